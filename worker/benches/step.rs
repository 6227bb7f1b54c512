//! A whole training step on one rank beside PyTorch's on the same shape, both with two
//! threads and in f32, taking turns so that a busy machine hits both; the best of each
//! counts, since what else runs only adds. Two idle CPUs are needed all the same:
//! PyTorch's threads spin where they wait, and lose many times over to anything beside.
//!
//!     PYTHON=/path/to/python-with-torch cargo bench -p palingenesis-worker --bench step

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use palingenesis_worker::engine::{AdamW, Cpu, Engine};
use palingenesis_worker::model::{Kind, Model, Rope, Spec, initial};

const BATCH: usize = 4;
const SEQ: usize = 256;
const THREADS: usize = 2;
const ROUNDS: usize = 15;

/// Llama's shape with and without grouped queries.
fn shape(hidden: usize, layers: usize, kv_heads: usize, intermediate: usize, vocab: usize) -> Spec {
    Spec {
        kind: Kind::Llama,
        vocab,
        hidden,
        layers,
        heads: hidden / 32,
        kv_heads,
        head_dim: 32,
        intermediate,
        eps: 1e-6,
        rope: Rope { theta: 10_000.0, scaling: None },
        tied: false,
        max_positions: SEQ,
        init_range: 0.02,
    }
}

fn main() {
    for spec in [shape(256, 2, 8, 688, 4096), shape(512, 4, 4, 1376, 16384)] {
        compare(&spec);
    }
}

fn compare(spec: &Spec) {
    let mut ours = Training::new(spec);
    let mut torch = Torch::start(spec);
    let (mut own, mut theirs, mut version) = (f64::INFINITY, f64::INFINITY, String::new());
    let mut phases = [0.0; 4];
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let took = ours.step();
        let seconds = begin.elapsed().as_secs_f64();
        if seconds < own {
            (own, phases) = (seconds, took);
        }
        if let Some((seconds, name)) = torch.as_mut().and_then(Torch::step) {
            theirs = theirs.min(seconds);
            version = name;
        }
    }
    let parameters = spec.parameters() as f64 / 1e6;
    println!("{parameters:.1} M parameters, {BATCH} x {SEQ} tokens, {THREADS} threads, f32, recompute");
    for (name, seconds) in ["forward", "head", "backward", "optimizer"].iter().zip(phases) {
        println!("  {name:<10} {:7.1} ms", seconds * 1e3);
    }
    println!("  step       {:7.1} ms", own * 1e3);
    if theirs.is_finite() {
        println!("  PyTorch    {:7.1} ms (torch {version}); ratio {:.2}", theirs * 1e3, own / theirs);
    } else {
        println!("  PyTorch is not there: set PYTHON to a Python that has torch");
    }
}

struct Training {
    engine: Cpu,
    spec: Spec,
    model: Model<Cpu>,
    /// Parameters, gradients and both moments of each unit.
    units: Vec<[Vec<f32>; 4]>,
    xs: Vec<Vec<f32>>,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    steps: u64,
}

impl Training {
    fn new(spec: &Spec) -> Training {
        let engine = Cpu::new(Some(THREADS));
        let units = spec.units().into_iter().map(|unit| {
            let mut params = vec![0.0; unit.len()];
            for tensor in &unit.tensors {
                initial(tensor, 1, 0..tensor.len(), &mut params[tensor.range()]);
            }
            [params, vec![0.0; unit.len()], vec![0.0; unit.len()], vec![0.0; unit.len()]]
        });
        let units = units.collect();
        let ids = |from: usize| (from..from + BATCH * SEQ).map(|i| (i * 7919 % spec.vocab) as u32).collect();
        Training {
            model: Model::new(&engine, spec, BATCH, SEQ, 256).unwrap(),
            engine,
            spec: spec.clone(),
            units,
            xs: vec![vec![0.0; BATCH * SEQ * spec.hidden]; spec.layers + 2],
            tokens: ids(0),
            targets: ids(1),
            steps: 0,
        }
    }

    /// Seconds of forward, head, backward, and optimizer.
    fn step(&mut self) -> [f64; 4] {
        let Training { engine: e, spec, model, units, xs, tokens, targets, .. } = self;
        let mut times = [Instant::now(); 5];
        units.iter_mut().for_each(|[_, grads, ..]| e.fill(grads, 0.0).unwrap());
        model.embed(e, &units[0][0], tokens, &mut xs[0]).unwrap();
        for layer in 0..spec.layers {
            let (before, after) = xs.split_at_mut(layer + 1);
            model.block_forward(e, &units[layer + 1][0], &before[layer], &mut after[0]).unwrap();
        }
        times[1] = Instant::now();
        let (xs, dx) = xs.split_at_mut(spec.layers + 1);
        let (x, dx, scale) = (&xs[spec.layers], &mut dx[0], 1.0 / tokens.len() as f32);
        let [params, grads, ..] = &mut units[spec.layers + 1];
        let mut loss = 0.0;
        model.head(e, &mut loss, params, x, targets, dx, Some(grads), scale).unwrap();
        times[2] = Instant::now();
        for layer in (0..spec.layers).rev() {
            let [params, grads, ..] = &mut units[layer + 1];
            model.block_backward(e, params, &xs[layer], dx, grads).unwrap();
        }
        model.embed_backward(e, dx, tokens, &mut units[0][1]).unwrap();
        times[3] = Instant::now();
        let mut squares = 0.0;
        units.iter().for_each(|[_, grads, ..]| e.sum_of_squares(&mut squares, grads).unwrap());
        self.steps += 1;
        let how = AdamW {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            step: self.steps,
            grad_scale: (1.0 / squares.sqrt()).min(1.0) as f32,
        };
        for [params, grads, m, v] in units {
            e.adamw(params, grads, m, v, how).unwrap();
        }
        times[4] = Instant::now();
        [0, 1, 2, 3].map(|phase| (times[phase + 1] - times[phase]).as_secs_f64())
    }
}

struct Torch {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Torch {
    fn start(spec: &Spec) -> Option<Torch> {
        let shape = serde_json::json!({"threads": THREADS, "batch": BATCH, "seq": SEQ, "hidden": spec.hidden,
            "heads": spec.heads, "kv_heads": spec.kv_heads, "intermediate": spec.intermediate,
            "layers": spec.layers, "vocab": spec.vocab});
        let mut child = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "/usr/bin/python3".into()))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/step.py"))
            .arg(shape.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let lines = BufReader::new(child.stdout.take()?).lines();
        Some(Torch { child, lines })
    }

    /// Seconds, and torch's version.
    fn step(&mut self) -> Option<(f64, String)> {
        self.child.stdin.as_mut()?.write_all(b"step\n").ok()?;
        let line = self.lines.next()?.ok()?;
        let (seconds, version) = line.split_once(' ')?;
        Some((seconds.parse().ok()?, version.to_string()))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}
