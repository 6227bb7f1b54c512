//! Logits, loss and gradients of tiny models against transformers (fixtures made by
//! fixtures/model/generate.py), against candle's autograd of a model written here, and
//! against finite differences.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{D, DType, Device, Tensor, Var};
use palingenesis_worker::engine::{Cpu, Engine, IGNORED};
use palingenesis_worker::model::{Kind, Model, Rope, Scaling, Spec, Unit, initial};
use safetensors::SafeTensors;
use serde_json::Value;

type Named = HashMap<String, Vec<f32>>;

/// A model, its parameters in flat buffers, and one micro-batch.
struct Case {
    spec: Spec,
    units: Vec<Unit>,
    params: Vec<Vec<f32>>,
    batch: usize,
    seq: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    chunk: usize,
}

impl Case {
    fn new(spec: Spec, batch: usize, seq: usize) -> Case {
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
        Case { spec, units, params, batch, seq, tokens, targets, chunk: 4 }
    }

    fn counted(&self) -> f32 {
        self.targets.iter().filter(|target| **target != IGNORED).count() as f32
    }

    /// The model, and the last block's output.
    fn forward(&self, buffers_for: usize) -> (Model<Cpu>, Vec<Vec<f32>>) {
        let e = Cpu;
        let mut model = Model::new(&e, &self.spec, buffers_for, self.seq, self.chunk).unwrap();
        model.set_batch(self.batch);
        let mut xs = vec![vec![f32::NAN; self.batch * self.seq * self.spec.hidden]; self.spec.layers + 1];
        model.embed(&e, &self.params[0], &self.tokens, &mut xs[0]).unwrap();
        for layer in 0..self.spec.layers {
            let (before, after) = xs.split_at_mut(layer + 1);
            model.block_forward(&e, &self.params[layer + 1], &before[layer], &mut after[0]).unwrap();
        }
        (model, xs)
    }

    fn last(&self) -> usize {
        if self.spec.tied { 0 } else { self.units.len() - 1 }
    }

    fn loss(&self) -> f64 {
        let (mut model, xs) = self.forward(self.batch);
        let x = xs.last().unwrap();
        let mut untouched = vec![7.0; x.len()];
        let loss = model.head(&Cpu, &self.params[self.last()], x, &self.targets, &mut untouched, None, 1.0).unwrap();
        assert!(untouched.iter().all(|x| *x == 7.0), "an evaluation writes no gradient");
        loss / f64::from(self.counted())
    }

    /// The mean loss, and its gradient added to `grads`.
    fn backward(&self, buffers_for: usize, grads: &mut [Vec<f32>]) -> f64 {
        let e = Cpu;
        let (mut model, xs) = self.forward(buffers_for);
        let last = self.last();
        let mut dx = vec![f32::NAN; xs[0].len()];
        let (x, scale) = (xs.last().unwrap(), 1.0 / self.counted());
        let loss =
            model.head(&e, &self.params[last], x, &self.targets, &mut dx, Some(&mut grads[last]), scale).unwrap();
        for layer in (0..self.spec.layers).rev() {
            let (params, grads) = (&self.params[layer + 1], &mut grads[layer + 1]);
            model.block_backward(&e, params, &xs[layer], &mut dx, grads).unwrap();
        }
        model.embed_backward(&e, &dx, &self.tokens, &mut grads[0]).unwrap();
        loss / f64::from(self.counted())
    }

    fn zeros(&self) -> Vec<Vec<f32>> {
        self.params.iter().map(|params| vec![0.0; params.len()]).collect()
    }

    fn gradients(&self) -> (f64, Named) {
        let mut grads = self.zeros();
        let loss = self.backward(self.batch, &mut grads);
        (loss, self.named(&grads))
    }

    fn named(&self, flat: &[Vec<f32>]) -> Named {
        let tensors = self.units.iter().zip(flat).flat_map(|(unit, flat)| {
            unit.tensors.iter().map(|tensor| (tensor.name.clone(), flat[tensor.range()].to_vec()))
        });
        tensors.collect()
    }

    /// What softmax makes of the logits of each row, by the loss of each target alone.
    fn log_probabilities(&self) -> Vec<f64> {
        let (mut model, xs) = self.forward(self.batch);
        let x = xs.last().unwrap();
        let mut dx = vec![0.0; x.len()];
        let mut of = |row: usize, token: usize| {
            let mut targets = vec![IGNORED; self.targets.len()];
            targets[row] = token as u32;
            -model.head(&Cpu, &self.params[self.last()], x, &targets, &mut dx, None, 1.0).unwrap()
        };
        let (rows, vocab) = (self.targets.len(), self.spec.vocab);
        (0..rows * vocab).map(|i| of(i / vocab, i % vocab)).collect()
    }
}

/// SplitMix64, for what a test needs of chance.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> u32 {
        (self.next() % end as u64) as u32
    }

    /// Between -1 and 1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The largest difference, relative to the largest of the expected numbers.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() });
    off.fold(0.0, f32::max) / largest.max(1e-6)
}

fn assert_all_close(what: &str, found: &Named, expected: &Named, tolerance: f32) {
    let mut names: Vec<_> = expected.keys().collect();
    names.sort();
    assert_eq!(names.len(), found.len(), "{what}");
    for name in names {
        let off = difference(&found[name], &expected[name]);
        assert!(off <= tolerance, "{what}: {name} is off by {off:e}");
    }
}

// Against transformers.

fn fixture(model: &str, file: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model").join(model).join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words<T>(tensors: &SafeTensors, name: &str, number: fn([u8; 4]) -> T) -> Vec<T> {
    let tensor = tensors.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|four| number(four.try_into().unwrap())).collect()
}

fn same_as_transformers(name: &str) {
    let config: Value = serde_json::from_slice(&fixture(name, "config.json")).unwrap();
    let spec = Spec::from_hf(&config).unwrap();
    let (weights, expected) = (fixture(name, "model.safetensors"), fixture(name, "expected.safetensors"));
    let (weights, expected) =
        (SafeTensors::deserialize(&weights).unwrap(), SafeTensors::deserialize(&expected).unwrap());
    let shape = expected.tensor("logits").unwrap().shape().to_vec();
    let mut case = Case::new(spec, shape[0], shape[1]);
    case.tokens = words(&expected, "tokens", u32::from_le_bytes);
    case.targets = words(&expected, "targets", i32::from_le_bytes)
        .into_iter()
        .map(|target| u32::try_from(target).unwrap_or(IGNORED))
        .collect();
    let mut read = 0;
    for (unit, flat) in case.units.iter().zip(&mut case.params) {
        for tensor in &unit.tensors {
            assert_eq!(weights.tensor(&tensor.name).unwrap().shape(), tensor.shape, "{}", tensor.name);
            flat[tensor.range()].copy_from_slice(&words(&weights, &tensor.name, f32::from_le_bytes));
            read += 1;
        }
    }
    assert_eq!(read, weights.len(), "every tensor of the file has a place");

    let (loss, grads) = case.gradients();
    let expected_loss = f64::from(words(&expected, "loss", f32::from_le_bytes)[0]);
    assert!((loss / expected_loss - 1.0).abs() < 1e-6, "{name}: loss {loss}, transformers has {expected_loss}");
    let named = expected.names().into_iter().filter_map(|name| name.strip_prefix("grad."));
    let expected_grads: Named =
        named.map(|name| (name.to_string(), words(&expected, &format!("grad.{name}"), f32::from_le_bytes))).collect();
    assert_all_close(name, &grads, &expected_grads, 1e-5);

    let logits = words(&expected, "logits", f32::from_le_bytes);
    let log_softmax = logits.chunks_exact(case.spec.vocab).flat_map(|row| {
        let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        row.iter().map(move |x| f64::from(*x) - sum.ln())
    });
    for (at, (found, expected)) in case.log_probabilities().iter().zip(log_softmax).enumerate() {
        assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{name} [{at}]: {found}, not {expected}");
    }
}

#[test]
fn qwen3_computes_what_transformers_computes() {
    same_as_transformers("qwen3");
}

#[test]
fn llama_with_llama3_scaling_computes_what_transformers_computes() {
    same_as_transformers("llama3");
}

/// fixtures/model/generate.py --check has transformers read these files.
#[test]
fn the_config_json_that_is_written_is_the_one_that_transformers_was_shown() {
    for name in ["qwen3", "llama3"] {
        let spec = Spec::from_hf(&serde_json::from_slice(&fixture(name, "config.json")).unwrap()).unwrap();
        let shown: Value = serde_json::from_slice(&fixture(name, "ours.json")).unwrap();
        assert_eq!(spec.to_hf(), shown, "{name}: {:#}", spec.to_hf());
        assert_eq!(Spec::from_hf(&shown), Ok(spec));
    }
}

// Against candle.

/// The same model, written for clarity alone, in f64 with candle's gradients.
struct Oracle<'a> {
    spec: &'a Spec,
    vars: HashMap<String, Var>,
}

impl Oracle<'_> {
    fn get(&self, name: &str) -> &Tensor {
        self.vars[name].as_tensor()
    }

    fn linear(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        x.broadcast_matmul(&self.get(name).t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.spec.eps))?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(self.get(name))
    }

    /// x is batch, heads, seq, head_dim.
    fn turned(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (_, _, seq, width) = x.dims4()?;
        let theta = f64::from(self.spec.rope.theta);
        let slower = match self.spec.rope.scaling {
            Some(Scaling::Linear { factor }) => f64::from(factor),
            _ => 1.0,
        };
        let angle = |i: usize| {
            let (position, pair) = (i / (width / 2), i % (width / 2));
            position as f64 / slower * theta.powf(-2.0 * pair as f64 / width as f64)
        };
        let angles: Vec<f64> = (0..seq * width / 2).map(angle).collect();
        let angles = Tensor::from_vec(angles, (1, 1, seq, width / 2), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (a, b) = (x.narrow(3, 0, width / 2)?, x.narrow(3, width / 2, width / 2)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    fn attention(&self, x: &Tensor, prefix: &str) -> candle_core::Result<Tensor> {
        let (batch, seq, _) = x.dims3()?;
        let Spec { heads, kv_heads, head_dim, .. } = *self.spec;
        let split = |name: &str, heads: usize, norm: Option<&str>| {
            let all = self.linear(x, &format!("{prefix}{name}.weight"))?.reshape((batch, seq, heads, head_dim))?;
            let normed = match norm {
                Some(norm) if self.spec.kind == Kind::Qwen3 => self.norm(&all, &format!("{prefix}{norm}.weight"))?,
                _ => all,
            };
            normed.transpose(1, 2)?.contiguous()
        };
        let shared = |x: Tensor| {
            let parts: candle_core::Result<Vec<Tensor>> =
                (0..heads).map(|head| x.narrow(1, head / (heads / kv_heads), 1)).collect();
            Tensor::cat(&parts?, 1)
        };
        let q = self.turned(&split("q_proj", heads, Some("q_norm"))?)?;
        let k = shared(self.turned(&split("k_proj", kv_heads, Some("k_norm"))?)?)?;
        let v = shared(split("v_proj", kv_heads, None)?)?;
        let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? / (head_dim as f64).sqrt())?;
        let hidden = |i: usize| if i % seq > i / seq { -1e30 } else { 0.0 };
        let mask = Tensor::from_vec((0..seq * seq).map(hidden).collect::<Vec<f64>>(), (1, 1, seq, seq), &Device::Cpu)?;
        let scores = scores.broadcast_add(&mask)?;
        let exp = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
        let weights = exp.broadcast_div(&exp.sum_keepdim(3)?)?;
        let out = weights.matmul(&v.contiguous()?)?.transpose(1, 2)?.reshape((batch, seq, heads * head_dim))?;
        self.linear(&out, &format!("{prefix}o_proj.weight"))
    }

    fn loss(&self, case: &Case) -> candle_core::Result<Tensor> {
        let spec = self.spec;
        let tokens = Tensor::from_slice(&case.tokens, case.tokens.len(), &Device::Cpu)?;
        let embedded = self.get("model.embed_tokens.weight").index_select(&tokens, 0)?;
        let mut x = embedded.reshape((case.batch, case.seq, spec.hidden))?;
        for layer in 0..spec.layers {
            let at = format!("model.layers.{layer}.");
            let normed = self.norm(&x, &format!("{at}input_layernorm.weight"))?;
            x = (&x + self.attention(&normed, &format!("{at}self_attn."))?)?;
            let normed = self.norm(&x, &format!("{at}post_attention_layernorm.weight"))?;
            let gate = self.linear(&normed, &format!("{at}mlp.gate_proj.weight"))?;
            let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
            let inner = (silu * self.linear(&normed, &format!("{at}mlp.up_proj.weight"))?)?;
            x = (x + self.linear(&inner, &format!("{at}mlp.down_proj.weight"))?)?;
        }
        let x = self.norm(&x, "model.norm.weight")?;
        let output = if spec.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let logits = self.linear(&x, output)?.reshape((case.targets.len(), spec.vocab))?;
        let log_sums = logits.exp()?.sum_keepdim(1)?.log()?;
        let counts: Vec<f64> = case.targets.iter().map(|t| f64::from(u8::from(*t != IGNORED))).collect();
        let targets: Vec<u32> = case.targets.iter().map(|t| if *t == IGNORED { 0 } else { *t }).collect();
        let rows = case.targets.len();
        let chosen = logits.gather(&Tensor::from_vec(targets, (rows, 1), &Device::Cpu)?, 1)?;
        let losses = ((log_sums - chosen)? * Tensor::from_vec(counts, (rows, 1), &Device::Cpu)?)?;
        losses.sum_all()? / f64::from(case.counted())
    }
}

fn candle(case: &Case) -> candle_core::Result<(f64, Named)> {
    let mut vars = HashMap::new();
    for (unit, flat) in case.units.iter().zip(&case.params) {
        for tensor in &unit.tensors {
            let values: Vec<f64> = flat[tensor.range()].iter().map(|x| f64::from(*x)).collect();
            let value = Tensor::from_vec(values, tensor.shape.as_slice(), &Device::Cpu)?;
            vars.insert(tensor.name.clone(), Var::from_tensor(&value)?);
        }
    }
    let oracle = Oracle { spec: &case.spec, vars };
    let loss = oracle.loss(case)?;
    let grads = loss.backward()?;
    let mut named = Named::new();
    for (name, var) in &oracle.vars {
        let grad = grads.get(var).unwrap_or_else(|| panic!("candle has no gradient of {name}"));
        named.insert(name.clone(), grad.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?);
    }
    Ok((loss.to_scalar()?, named))
}

fn spec(kind: Kind, tied: bool) -> Spec {
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

fn same_as_candle(what: &str, case: &Case) {
    let (loss, grads) = case.gradients();
    let (expected_loss, expected) = candle(case).unwrap();
    assert!((loss / expected_loss - 1.0).abs() < 1e-5, "{what}: loss {loss}, candle has {expected_loss}");
    assert_all_close(what, &grads, &expected, 2e-5);
}

#[test]
fn gradients_are_candles_tied_and_untied() {
    for kind in [Kind::Llama, Kind::Qwen3] {
        for tied in [false, true] {
            same_as_candle(&format!("{kind:?}, tied: {tied}"), &Case::new(spec(kind, tied), 3, 7));
        }
    }
}

#[test]
fn gradients_are_candles_where_all_queries_share_one_key() {
    let one = Spec { kv_heads: 1, ..spec(Kind::Llama, false) };
    same_as_candle("one key-value head", &Case::new(one, 2, 9));
}

#[test]
fn gradients_are_candles_with_linear_scaling_and_another_base() {
    let rope = Rope { theta: 500.0, scaling: Some(Scaling::Linear { factor: 4.0 }) };
    same_as_candle("linear", &Case::new(Spec { rope, ..spec(Kind::Qwen3, true) }, 1, 33));
}

#[test]
fn gradients_are_candles_for_a_single_position_and_a_single_block() {
    same_as_candle("T=1", &Case::new(Spec { layers: 1, ..spec(Kind::Qwen3, false) }, 3, 1));
}

// Against itself.

#[test]
fn gradients_are_the_loss_s_finite_differences() {
    for kind in [Kind::Llama, Kind::Qwen3] {
        let mut case = Case::new(spec(kind, kind == Kind::Qwen3), 2, 5);
        let (_, grads) = case.gradients();
        let mut numbers = Numbers(11);
        let units = case.units.clone();
        for (at, tensor) in units.iter().enumerate().flat_map(|(at, unit)| unit.tensors.iter().map(move |t| (at, t))) {
            let direction: Vec<f32> = (0..tensor.len()).map(|_| numbers.uniform().signum()).collect();
            let slope: f32 = grads[&tensor.name].iter().zip(&direction).map(|(g, d)| g * d).sum();
            let before = case.params[at].clone();
            let step = 2e-3;
            let mut shifted = |by: f32| {
                let to = &mut case.params[at][tensor.range()];
                to.iter_mut().zip(&before[tensor.range()]).zip(&direction).for_each(|((to, x), d)| *to = x + by * d);
                case.loss()
            };
            // Richardson: what is left is of the fourth order.
            let half = (shifted(step / 2.0) - shifted(-step / 2.0)) / f64::from(step);
            let whole = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            let measured = ((4.0 * half - whole) / 3.0) as f32;
            case.params[at] = before;
            let off = (measured - slope).abs();
            assert!(off < 2e-3 * slope.abs().max(0.5), "{kind:?} {}: {slope}, measured {measured}", tensor.name);
        }
    }
}

#[test]
fn the_loss_s_chunks_change_nothing_but_rounding() {
    for tied in [false, true] {
        let mut case = Case::new(spec(Kind::Qwen3, tied), 3, 7);
        let (loss, grads) = case.gradients();
        for chunk in [1, 20, 21, 22, 1000, 0] {
            case.chunk = chunk;
            let (again, other) = case.gradients();
            assert!((again / loss - 1.0).abs() < 1e-6, "{chunk}: {again}, not {loss}");
            assert_all_close(&format!("chunks of {chunk}"), &other, &grads, 1e-5);
            assert!((case.loss() / loss - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn gradients_are_added_and_a_buffer_s_padding_is_not_touched() {
    let mut case = Case::new(spec(Kind::Qwen3, true), 2, 5);
    let (_, once) = case.gradients();
    let mut grads = case.zeros();
    grads.iter_mut().for_each(|flat| flat.extend([9.0; 3]));
    case.params.iter_mut().for_each(|flat| flat.extend([f32::NAN; 3]));
    case.backward(case.batch, &mut grads);
    case.backward(case.batch, &mut grads);
    assert!(grads.iter().all(|flat| flat[flat.len() - 3..] == [9.0; 3]));
    let twice = case.named(&grads).into_iter().map(|(name, grad)| (name, grad.iter().map(|x| x / 2.0).collect()));
    assert_all_close("twice", &twice.collect(), &once, 1e-6);
}

#[test]
fn a_smaller_micro_batch_in_larger_buffers_is_the_same() {
    let case = Case::new(spec(Kind::Llama, false), 2, 5);
    let (loss, once) = case.gradients();
    let mut grads = case.zeros();
    assert_eq!(case.backward(5, &mut grads), loss);
    assert_all_close("in larger buffers", &case.named(&grads), &once, 0.0);
}

#[test]
fn sequences_whose_targets_do_not_count_change_no_gradient() {
    let mut case = Case::new(spec(Kind::Qwen3, false), 2, 6);
    case.targets[6..].fill(IGNORED);
    let (loss, padded) = case.gradients();
    (case.batch, case.tokens, case.targets) = (1, case.tokens[..6].to_vec(), case.targets[..6].to_vec());
    let (alone, grads) = case.gradients();
    assert!((loss / alone - 1.0).abs() < 1e-6);
    assert_all_close("padded", &padded, &grads, 1e-5);
}

#[test]
fn buffers_that_no_machine_has_are_an_error() {
    let huge = spec(Kind::Llama, false);
    for (batch, seq) in [(usize::MAX, 2), (usize::MAX / 64, 3)] {
        let error = Model::<Cpu>::new(&Cpu, &huge, batch, seq, 1).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|text| text.contains("lower micro_batch_size or seq_len")), "{error:?}");
    }
}

#[test]
fn a_step_against_the_gradient_lowers_the_loss() {
    let mut case = Case::new(spec(Kind::Qwen3, true), 2, 8);
    let mut grads = case.zeros();
    let before = case.backward(case.batch, &mut grads);
    let squares: f64 = grads.iter().map(|grads| Cpu.sum_of_squares(grads).unwrap()).sum();
    let rate = 1e-3 / squares.sqrt();
    for (params, grads) in case.params.iter_mut().zip(&grads) {
        params.iter_mut().zip(grads).for_each(|(p, g)| *p -= rate as f32 * g);
    }
    let (fallen, foreseen) = (before - case.loss(), rate * squares);
    assert!((fallen / foreseen - 1.0).abs() < 0.05, "fell by {fallen}, foreseen {foreseen}");
}
