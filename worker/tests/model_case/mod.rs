//! Tiny models and one micro-batch, driven unit by unit as the training loop does it; for
//! tests here and beside candle in worker/oracle.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::HashMap;

use palingenesis_worker::engine::{Cpu, IGNORED};
use palingenesis_worker::model::{Kind, Model, Rope, Spec, Unit, initial};

pub type Named = HashMap<String, Vec<f32>>;

/// A model, its parameters in flat buffers, and one micro-batch.
pub struct Case {
    pub engine: Cpu,
    pub spec: Spec,
    pub units: Vec<Unit>,
    pub params: Vec<Vec<f32>>,
    pub batch: usize,
    pub seq: usize,
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub chunk: usize,
}

impl Case {
    pub fn new(spec: Spec, batch: usize, seq: usize) -> Case {
        let units = spec.units();
        let mut numbers = Numbers(7);
        let params = units.iter().map(|unit| {
            let mut flat = vec![0.0; unit.len()];
            for tensor in &unit.tensors {
                let part = &mut flat[tensor.range()];
                initial(tensor, 3, 0..tensor.len(), part);
                // Far from where training begins: what is wrong then shows.
                let factor = if tensor.decays() { 0.25 / spec.init_range } else { 1.0 };
                part.iter_mut().for_each(|x| *x = *x * factor + 0.1 * numbers.uniform());
            }
            flat
        });
        let params = params.collect();
        let mut ids = || (0..batch * seq).map(|_| numbers.below(spec.vocab)).collect::<Vec<u32>>();
        let (tokens, mut targets) = (ids(), ids());
        targets.iter_mut().skip(2).step_by(5).for_each(|target| *target = IGNORED);
        Case { engine: Cpu::default(), spec, units, params, batch, seq, tokens, targets, chunk: 4 }
    }

    pub fn counted(&self) -> f32 {
        self.targets.iter().filter(|target| **target != IGNORED).count() as f32
    }

    /// The model, and the last block's output.
    pub fn forward(&self, buffers_for: usize) -> (Model<Cpu>, Vec<Vec<f32>>) {
        let e = &self.engine;
        let mut model = Model::new(e, &self.spec, buffers_for, self.seq, self.chunk).unwrap();
        model.set_batch(self.batch);
        let mut xs = vec![vec![f32::NAN; self.batch * self.seq * self.spec.hidden]; self.spec.layers + 1];
        model.embed(e, &self.params[0], &self.tokens, &mut xs[0]).unwrap();
        for layer in 0..self.spec.layers {
            let (before, after) = xs.split_at_mut(layer + 1);
            model.block_forward(e, &self.params[layer + 1], &before[layer], &mut after[0]).unwrap();
        }
        (model, xs)
    }

    pub fn last(&self) -> usize {
        if self.spec.tied { 0 } else { self.units.len() - 1 }
    }

    pub fn loss(&self) -> f64 {
        let (mut model, xs) = self.forward(self.batch);
        let x = xs.last().unwrap();
        let mut untouched = vec![7.0; x.len()];
        let mut loss = 0.0;
        let params = &self.params[self.last()];
        model.head(&self.engine, &mut loss, params, x, &self.targets, &mut untouched, None, 1.0).unwrap();
        assert!(untouched.iter().all(|x| *x == 7.0), "an evaluation writes no gradient");
        loss / f64::from(self.counted())
    }

    /// The mean loss, and its gradient added to `grads`.
    pub fn backward(&self, buffers_for: usize, grads: &mut [Vec<f32>]) -> f64 {
        let e = &self.engine;
        let (mut model, xs) = self.forward(buffers_for);
        let last = self.last();
        let mut dx = vec![f32::NAN; xs[0].len()];
        let (x, scale) = (xs.last().unwrap(), 1.0 / self.counted());
        let (mut loss, into) = (0.0, Some(&mut *grads[last]));
        model.head(e, &mut loss, &self.params[last], x, &self.targets, &mut dx, into, scale).unwrap();
        for layer in (0..self.spec.layers).rev() {
            let (params, grads) = (&self.params[layer + 1], &mut grads[layer + 1]);
            model.block_backward(e, params, &xs[layer], &mut dx, grads).unwrap();
        }
        model.embed_backward(e, &dx, &self.tokens, &mut grads[0]).unwrap();
        loss / f64::from(self.counted())
    }

    pub fn zeros(&self) -> Vec<Vec<f32>> {
        self.params.iter().map(|params| vec![0.0; params.len()]).collect()
    }

    pub fn gradients(&self) -> (f64, Named) {
        let mut grads = self.zeros();
        let loss = self.backward(self.batch, &mut grads);
        (loss, self.named(&grads))
    }

    pub fn named(&self, flat: &[Vec<f32>]) -> Named {
        let tensors = self.units.iter().zip(flat).flat_map(|(unit, flat)| {
            unit.tensors.iter().map(|tensor| (tensor.name.clone(), flat[tensor.range()].to_vec()))
        });
        tensors.collect()
    }

    /// What softmax makes of the logits of each row, by the loss of each target alone.
    pub fn log_probabilities(&self) -> Vec<f64> {
        let (mut model, xs) = self.forward(self.batch);
        let x = xs.last().unwrap();
        let mut dx = vec![0.0; x.len()];
        let mut of = |row: usize, token: usize| {
            let mut targets = vec![IGNORED; self.targets.len()];
            targets[row] = token as u32;
            let mut loss = 0.0;
            let params = &self.params[self.last()];
            model.head(&self.engine, &mut loss, params, x, &targets, &mut dx, None, 1.0).unwrap();
            -loss
        };
        let (rows, vocab) = (self.targets.len(), self.spec.vocab);
        (0..rows * vocab).map(|i| of(i / vocab, i % vocab)).collect()
    }
}

/// SplitMix64, for what a test needs of chance.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> u32 {
        (self.next() % end as u64) as u32
    }

    /// Between -1 and 1.
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The largest difference, relative to the largest of the expected numbers.
pub fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() });
    off.fold(0.0, f32::max) / largest.max(1e-6)
}

pub fn assert_all_close(what: &str, found: &Named, expected: &Named, tolerance: f32) {
    let mut names: Vec<_> = expected.keys().collect();
    names.sort();
    assert_eq!(names.len(), found.len(), "{what}");
    for name in names {
        let off = difference(&found[name], &expected[name]);
        assert!(off <= tolerance, "{what}: {name} is off by {off:e}");
    }
}

pub fn spec(kind: Kind, tied: bool) -> Spec {
    let rope = Rope { theta: 10_000.0, scaling: None };
    let (heads, kv_heads, head_dim, hidden) = match kind {
        Kind::Llama => (4, 4, 6, 24),
        Kind::Qwen3 => (6, 3, 4, 15),
    };
    Spec {
        kind,
        vocab: 37,
        hidden,
        layers: 2,
        heads,
        kv_heads,
        head_dim,
        intermediate: 29,
        eps: 1e-5,
        rope,
        tied,
        max_positions: 64,
        init_range: 0.02,
    }
}
