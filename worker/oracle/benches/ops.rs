//! The engine's operations against candle's on the same CPUs in the same run, at the
//! shapes of a small Llama: 4 sequences of 256 positions, width 256, 8 heads, feed-forward
//! 688, vocabulary 4096. Then all operations of one training step of two such blocks, with
//! the blocks computed again in backward.
//!
//! cargo bench --manifest-path worker/oracle/Cargo.toml [-- PART OF A NAME]

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{D, Device, Tensor, Var};
use palingenesis_worker::engine::{AdamW, Attention, Cpu, Engine, Matmul, Precision};

const BATCH: usize = 4;
const SEQ: usize = 256;
const N: usize = BATCH * SEQ;
const WIDTH: usize = 256;
const HEADS: usize = 8;
const HEAD: usize = WIDTH / HEADS;
const INNER: usize = 688;
const VOCAB: usize = 4096;
const SHAPE: Attention = Attention { batch: BATCH, seq: SEQ, heads: HEADS, kv_heads: HEADS, head_dim: HEAD };
const ADAMW: AdamW =
    AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 % 2003) as f32 / 1001.5 - 1.0) * 0.5).collect()
}

fn tensor(shape: &[usize]) -> Tensor {
    Tensor::from_vec(numbers(shape.iter().product()), shape, &Device::Cpu).expect("a tensor")
}

fn var(shape: &[usize]) -> Var {
    Var::from_tensor(&tensor(shape)).expect("a variable")
}

/// The shortest of several times, ours and the other's in turn.
fn times(ours: &mut dyn FnMut(), theirs: Option<&mut dyn FnMut()>) -> (Duration, Option<Duration>) {
    let once = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    let (mut best, mut other) = (Duration::MAX, Duration::MAX);
    let mut theirs = theirs;
    once(ours);
    let until = Instant::now() + Duration::from_millis(600);
    let mut rounds = 0;
    while rounds < 5 || Instant::now() < until && rounds < 300 {
        best = best.min(once(ours));
        if let Some(theirs) = &mut theirs {
            other = other.min(once(*theirs));
        }
        rounds += 1;
    }
    (best, theirs.map(|_| other))
}

struct Table(Option<String>);

impl Table {
    fn row(&self, name: &str, flops: f64, mut ours: impl FnMut(), theirs: Option<&mut dyn FnMut()>) {
        if self.0.as_ref().is_some_and(|part| !name.contains(part.as_str())) {
            return;
        }
        let (ours, theirs) = times(&mut ours, theirs);
        let rate = if flops > 0.0 { format!("{:.0} GFLOP/s", flops / ours.as_secs_f64() / 1e9) } else { String::new() };
        let ms = |time: Duration| format!("{:.3} ms", time.as_secs_f64() * 1e3);
        let (candle, ratio) = theirs.map_or_else(Default::default, |theirs| {
            (ms(theirs), format!("{:.2}", ours.as_secs_f64() / theirs.as_secs_f64()))
        });
        println!("{name:<34} {:>12} {candle:>12} {ratio:>6}  {rate}", ms(ours));
    }
}

fn main() {
    let table = Table(std::env::args().skip(1).find(|arg| !arg.starts_with('-')));
    let cpu = Cpu::default();
    println!("{} threads; ratio: below 1 is faster than candle", cpu.threads());
    println!("{:<34} {:>12} {:>12} {:>6}", "", "ours", "candle", "ratio");
    products(&table, &cpu);
    single(&table, &cpu);
    attention(&table, &cpu);
    step(&table, &cpu);
}

fn products(table: &Table, cpu: &Cpu) {
    for (name, m, n, k, a_transposed, b_transposed) in [
        ("matmul 1024³", 1024, 1024, 1024, false, false),
        ("matmul 1024³, B transposed", 1024, 1024, 1024, false, true),
        ("matmul 1024³, A transposed", 1024, 1024, 1024, true, false),
        ("matmul x·Wᵀ, 256 to 256", N, WIDTH, WIDTH, false, true),
        ("matmul x·Wᵀ, 256 to 688", N, INNER, WIDTH, false, true),
        ("matmul x·Wᵀ, 688 to 256", N, WIDTH, INNER, false, true),
        ("matmul x·Wᵀ, 256 to 4096", N, VOCAB, WIDTH, false, true),
        ("matmul dy·W, 688 to 256", N, WIDTH, INNER, false, false),
        ("matmul dy·W, 4096 to 256", N, WIDTH, VOCAB, false, false),
        ("matmul dyᵀ·x, 256 x 256", WIDTH, WIDTH, N, true, false),
        ("matmul dyᵀ·x, 688 x 256", INNER, WIDTH, N, true, false),
        ("matmul dyᵀ·x, 4096 x 256", VOCAB, WIDTH, N, true, false),
    ] {
        let (mut a, mut b, mut c) = (zeros(cpu, m * k), zeros(cpu, k * n), zeros(cpu, m * n));
        a.copy_from_slice(&numbers(m * k));
        b.copy_from_slice(&numbers(k * n));
        let how = Matmul { m, n, k, a_transposed, b_transposed, accumulate: false, alpha: 1.0 };
        let ta = if a_transposed { tensor(&[k, m]).t().expect("2 dims") } else { tensor(&[m, k]) };
        let tb = if b_transposed { tensor(&[n, k]).t().expect("2 dims") } else { tensor(&[k, n]) };
        let mut candle = || drop(black_box(ta.matmul(&tb).expect("a product")));
        table.row(
            name,
            2.0 * (m * n * k) as f64,
            || cpu.matmul(&mut c, &a, &b, how).expect("a product"),
            Some(&mut candle),
        );
    }
}

fn zeros(cpu: &Cpu, len: usize) -> palingenesis_worker::engine::Buffer {
    cpu.zeros(len, Precision::F32).expect("memory")
}

/// What goes row by row, in turn.
fn single(table: &Table, cpu: &Cpu) {
    let (x, dy, weight) = (numbers(N * WIDTH), numbers(N * WIDTH), numbers(WIDTH));
    let (mut y, mut inverse) = (numbers(N * WIDTH), numbers(N));
    let (mut dx, mut dweight) = (numbers(N * WIDTH), numbers(WIDTH));
    let (cx, cw) = (var(&[N, WIDTH]), var(&[WIDTH]));
    let norm = |x: &Tensor| -> candle_core::Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&cw)
    };
    let mut candle = || drop(black_box(norm(&cx.as_detached_tensor()).expect("norm")));
    table.row(
        "rms_norm",
        0.0,
        || cpu.rms_norm(&mut y, &mut inverse, &x, &weight, 1e-5).expect("norm"),
        Some(&mut candle),
    );
    let mut candle = || drop(black_box(norm(&cx).and_then(|y| y.sum_all()?.backward()).expect("norm")));
    table.row(
        "rms_norm forward and backward",
        0.0,
        || {
            cpu.rms_norm(&mut y, &mut inverse, &x, &weight, 1e-5).expect("norm");
            cpu.rms_norm_backward(&mut dx, &mut dweight, &dy, &x, &weight, &inverse).expect("norm");
        },
        Some(&mut candle),
    );

    let table_of_angles = numbers(SEQ * HEAD);
    let cq = tensor(&[BATCH, SEQ, HEADS, HEAD]);
    let (cos, sin) = (tensor(&[SEQ, 1, HEAD]), tensor(&[SEQ, 1, HEAD]));
    let rope = || -> candle_core::Result<Tensor> {
        let (x1, x2) = (cq.narrow(3, 0, HEAD / 2)?, cq.narrow(3, HEAD / 2, HEAD / 2)?);
        let rotated = Tensor::cat(&[&x2.neg()?, &x1], 3)?;
        cq.broadcast_mul(&cos)? + rotated.broadcast_mul(&sin)?
    };
    let mut candle = || drop(black_box(rope().expect("rope")));
    table.row("rope", 0.0, || cpu.rope(&mut y, &table_of_angles, HEADS, HEAD, false).expect("rope"), Some(&mut candle));

    let (gate, up) = (numbers(N * INNER), numbers(N * INNER));
    let (mut out, mut dgate, mut dup) = (gate.clone(), gate.clone(), up.clone());
    let (cg, cu) = (var(&[N, INNER]), var(&[N, INNER]));
    let swiglu = |gate: &Tensor| gate.silu()? * cu.as_tensor();
    let mut candle = || drop(black_box(swiglu(&cg.as_detached_tensor()).expect("swiglu")));
    table.row("swiglu", 0.0, || cpu.swiglu(&mut out, &gate, &up).expect("swiglu"), Some(&mut candle));
    let mut candle = || drop(black_box(swiglu(&cg).and_then(|y| y.sum_all()?.backward()).expect("swiglu")));
    table.row(
        "swiglu forward and backward",
        0.0,
        || {
            cpu.swiglu(&mut out, &gate, &up).expect("swiglu");
            // Backward replaces them; what it leaves would shrink until it is denormal.
            cpu.copy(&mut dgate, &gate).expect("a copy");
            cpu.copy(&mut dup, &up).expect("a copy");
            cpu.swiglu_backward(&mut dgate, &mut dup, &out).expect("swiglu");
        },
        Some(&mut candle),
    );

    let ids: Vec<u32> = (0..N as u32).map(|i| i * 7919 % VOCAB as u32).collect();
    let tokens = cpu.tokens(&ids).expect("memory");
    let (rows, mut drows) = (numbers(VOCAB * WIDTH), numbers(VOCAB * WIDTH));
    let (crows, cids) = (var(&[VOCAB, WIDTH]), Tensor::new(&ids[..], &Device::Cpu).expect("ids"));
    let mut candle =
        || drop(black_box(crows.index_select(&cids, 0).and_then(|y| y.sum_all()?.backward()).expect("rows")));
    table.row(
        "embedding forward and backward",
        0.0,
        || {
            cpu.embedding(&mut y, &rows, &tokens).expect("rows");
            cpu.embedding_backward(&mut drows, &y, &tokens).expect("rows");
        },
        Some(&mut candle),
    );

    let mut logits = numbers(N * VOCAB);
    let (clogits, ctargets) = (var(&[N, VOCAB]), cids.unsqueeze(1).expect("targets"));
    let cross_entropy = || -> candle_core::Result<()> {
        let highest = clogits.max_keepdim(1)?.detach();
        let shifted = clogits.broadcast_sub(&highest)?;
        let log_softmax = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(1)?.log()?)?;
        log_softmax.gather(&ctargets, 1)?.sum_all()?.backward().map(drop)
    };
    let mut candle = || cross_entropy().expect("loss");
    table.row(
        "cross_entropy with gradient",
        0.0,
        || cpu.cross_entropy(&mut 0.0, &mut logits, &tokens, 0, N, 0.1).expect("loss"),
        Some(&mut candle),
    );

    let len = VOCAB * WIDTH;
    let (mut param, grad, mut m, mut v) = (numbers(len), numbers(len), numbers(len), vec![1.0; len]);
    let [cp, cgrad, cm] = [(); 3].map(|()| tensor(&[len]));
    let cv = cm.sqr().expect("squares");
    let adamw = || -> candle_core::Result<Tensor> {
        let m = ((&cm * 0.9)? + (&cgrad * 0.1)?)?;
        let v = ((&cv * 0.999)? + (cgrad.sqr()? * 0.001)?)?;
        (&cp * 0.9999)? - ((m * 0.001)? / (v.sqrt()? + 1e-8)?)?
    };
    let mut candle = || drop(black_box(adamw().expect("a step")));
    table.row(
        "adamw, 1 M numbers",
        0.0,
        || cpu.adamw(&mut param, &grad, &mut m, &mut v, ADAMW).expect("a step"),
        Some(&mut candle),
    );
    let mut candle = || drop(black_box(cgrad.sqr().and_then(|x| x.sum_all()).expect("sum")));
    table.row(
        "sum_of_squares, 1 M numbers",
        0.0,
        || cpu.sum_of_squares(&mut 0.0, &grad).expect("sum"),
        Some(&mut candle),
    );
    let mut candle = || drop(black_box((&cgrad + &cm).expect("sum")));
    table.row("add, 1 M numbers", 0.0, || cpu.add(&mut param, &grad).expect("sum"), Some(&mut candle));
}

fn attention(table: &Table, cpu: &Cpu) {
    let len = N * WIDTH;
    let (q, k, v, dout) = (numbers(len), numbers(len), numbers(len), numbers(len));
    let (mut out, mut log_sums) = (numbers(len), numbers(N * HEADS));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| numbers(len));
    let [cq, ck, cv] = [(); 3].map(|()| var(&[BATCH, SEQ, HEADS, HEAD]));
    let hidden = (0..SEQ * SEQ).map(|i| if i % SEQ > i / SEQ { f32::NEG_INFINITY } else { 0.0 }).collect();
    let hidden = Tensor::from_vec(hidden, (SEQ, SEQ), &Device::Cpu).expect("a mask");
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| -> candle_core::Result<Tensor> {
        let heads = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let scores = (heads(q)?.matmul(&heads(k)?.t()?)? * (1.0 / (HEAD as f64).sqrt()))?;
        let scores = scores.broadcast_add(&hidden)?;
        let powers = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let weights = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
        weights.matmul(&heads(v)?)?.transpose(1, 2)?.contiguous()
    };
    let whole = 4.0 * (BATCH * HEADS * SEQ * SEQ * HEAD) as f64;
    let [fq, fk, fv] = [&cq, &ck, &cv].map(|x| x.as_detached_tensor());
    let mut candle = || drop(black_box(attend(&fq, &fk, &fv).expect("attention")));
    table.row(
        "attention",
        whole / 2.0,
        || cpu.attention(&mut out, &mut log_sums, &q, &k, &v, SHAPE).expect("attention"),
        Some(&mut candle),
    );
    let mut candle =
        || drop(black_box(attend(&cq, &ck, &cv).and_then(|y| y.sum_all()?.backward()).expect("attention")));
    table.row(
        "attention forward and backward",
        whole / 2.0 * 3.5,
        || {
            cpu.attention(&mut out, &mut log_sums, &q, &k, &v, SHAPE).expect("attention");
            cpu.attention_backward(&mut dq, &mut dk, &mut dv, &dout, &out, &log_sums, &q, &k, &v, SHAPE)
                .expect("attention");
        },
        Some(&mut candle),
    );
}

/// The operations of one step of two blocks, in an order as a model has them; what the
/// numbers are does not matter.
fn step(table: &Table, cpu: &Cpu) {
    let width = WIDTH * N;
    let [mut x, mut y, mut q, mut k, mut v, mut out, mut dx] = [(); 7].map(|()| zeros(cpu, width));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros(cpu, width));
    let [mut gate, mut up, mut inner] = [(); 3].map(|()| zeros(cpu, N * INNER));
    let (mut inverse, mut log_sums) = (zeros(cpu, N), zeros(cpu, N * HEADS));
    let mut logits = zeros(cpu, N * VOCAB);
    let params = VOCAB * WIDTH + 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH) + WIDTH;
    let (mut param, mut grad) = (zeros(cpu, params), zeros(cpu, params));
    let (mut m1, mut m2) = (zeros(cpu, params), zeros(cpu, params));
    param.iter_mut().enumerate().for_each(|(i, x)| *x = (i * 7919 % 2003) as f32 * 1e-5 - 0.01);
    let initial = param.to_vec();
    let angles = numbers(SEQ * HEAD);
    let ids: Vec<u32> = (0..N as u32).map(|i| i * 7919 % VOCAB as u32).collect();
    let tokens = cpu.tokens(&ids).expect("memory");
    // y = x·Wᵀ, dx += dy·W, dW += dyᵀ·x
    let forward = |y: &mut [f32], x: &[f32], w: &[f32], from: usize, to: usize, add: bool| {
        let how = Matmul { m: N, n: to, k: from, a_transposed: false, b_transposed: true, accumulate: add, alpha: 1.0 };
        cpu.matmul(y, x, w, how).expect("a product");
    };
    let back = |dx: &mut [f32], dw: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], from: usize, to: usize| {
        let how =
            Matmul { m: N, n: from, k: to, a_transposed: false, b_transposed: false, accumulate: true, alpha: 1.0 };
        cpu.matmul(dx, dy, w, how).expect("a product");
        let how = Matmul { m: to, n: from, k: N, a_transposed: true, b_transposed: false, ..how };
        cpu.matmul(dw, dy, x, how).expect("a product");
    };
    let (square, wide, head) = (WIDTH * WIDTH, WIDTH * INNER, VOCAB * WIDTH);
    let mut step = || -> palingenesis_worker::engine::Result<()> {
        param.copy_from_slice(&initial);
        cpu.fill(&mut grad, 0.0)?;
        let weight = &initial[..WIDTH];
        let (square_w, wide_w, head_w) = (&initial[..square], &initial[..wide], &initial[..head]);
        cpu.embedding(&mut x, head_w, &tokens)?;
        for pass in 0..4 {
            cpu.rms_norm(&mut y, &mut inverse, &x, weight, 1e-5)?;
            forward(&mut q, &y, square_w, WIDTH, WIDTH, false);
            forward(&mut k, &y, square_w, WIDTH, WIDTH, false);
            forward(&mut v, &y, square_w, WIDTH, WIDTH, false);
            cpu.rope(&mut q, &angles, HEADS, HEAD, false)?;
            cpu.rope(&mut k, &angles, HEADS, HEAD, false)?;
            cpu.attention(&mut out, &mut log_sums, &q, &k, &v, SHAPE)?;
            cpu.copy(&mut dx, &x)?;
            forward(&mut dx, &out, square_w, WIDTH, WIDTH, true);
            cpu.rms_norm(&mut y, &mut inverse, &dx, weight, 1e-5)?;
            forward(&mut gate, &y, wide_w, WIDTH, INNER, false);
            forward(&mut up, &y, wide_w, WIDTH, INNER, false);
            cpu.swiglu(&mut inner, &gate, &up)?;
            // The last product of a block is not computed again.
            if pass < 2 {
                forward(&mut x, &inner, wide_w, INNER, WIDTH, false);
                cpu.add(&mut x, &dx)?;
                continue;
            }
            let dw = &mut grad[..wide];
            back(&mut inner, dw, &dx, &gate, wide_w, INNER, WIDTH);
            cpu.swiglu_backward(&mut gate, &mut up, &inner)?;
            cpu.fill(&mut y, 0.0)?;
            back(&mut y, dw, &gate, &x, wide_w, WIDTH, INNER);
            back(&mut y, dw, &up, &x, wide_w, WIDTH, INNER);
            cpu.rms_norm_backward(&mut dx, &mut dw[..WIDTH], &y, &x, weight, &inverse)?;
            back(&mut y, &mut dw[..square], &dx, &x, square_w, WIDTH, WIDTH);
            cpu.attention_backward(&mut dq, &mut dk, &mut dv, &y, &out, &log_sums, &q, &k, &v, SHAPE)?;
            cpu.rope(&mut dq, &angles, HEADS, HEAD, true)?;
            cpu.rope(&mut dk, &angles, HEADS, HEAD, true)?;
            cpu.fill(&mut y, 0.0)?;
            for d in [&dq, &dk, &dv] {
                back(&mut y, &mut dw[..square], d, &x, square_w, WIDTH, WIDTH);
            }
            cpu.rms_norm_backward(&mut dx, &mut dw[..WIDTH], &y, &x, weight, &inverse)?;
            cpu.fill(&mut x, 0.5)?;
        }
        cpu.rms_norm(&mut y, &mut inverse, &x, weight, 1e-5)?;
        forward(&mut logits, &y, head_w, WIDTH, VOCAB, false);
        cpu.cross_entropy(&mut 0.0, &mut logits, &tokens, 0, N, 1e-3)?;
        cpu.fill(&mut dx, 0.0)?;
        back(&mut dx, &mut grad[..head], &logits, &y, head_w, WIDTH, VOCAB);
        cpu.embedding_backward(&mut grad[..head], &dx, &tokens)?;
        cpu.sum_of_squares(&mut 0.0, &grad)?;
        cpu.adamw(&mut param, &grad, &mut m1, &mut m2, ADAMW)
    };
    let flops = 6.0 * (N * params) as f64 + 2.0 * (N * (params - head)) as f64;
    table.row("all operations of a training step", flops, || step().expect("a step"), None);
}
