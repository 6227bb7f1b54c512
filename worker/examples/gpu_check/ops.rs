//! Each operation of an engine beside the CPU's, on random numbers. Both begin with the same
//! numbers, rounded to what the engine stores; what is written holds NaN before, and NaN lies
//! on both sides of every operand, where nothing may be read or written. The error of a result is
//! the largest difference, as a part of the largest right number. No rule of an operation
//! lives here.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use half::bf16;
use palingenesis_worker::engine::{AdamW, Attention, Cpu, Engine, EngineError, IGNORED, Matmul, Precision, Result};

use crate::row::{Row, State};

/// Numbers on both sides of an operand. The second is no multiple of anything, as a
/// parameter's place in its unit may be.
const MARGINS: [usize; 2] = [64, 3];

/// One rounding to bf16, to the nearest, is half of this at most.
const ONCE: f64 = 1.0 / 256.0;

/// Numbers that look random and are always the same
/// (SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -size and size.
    pub fn vec(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size).collect()
    }

    pub fn below(&mut self, len: usize, end: u32) -> Vec<u32> {
        (0..len).map(|_| (self.next() % u64::from(end)) as u32).collect()
    }
}

/// As the engine stores them.
pub fn rounded(numbers: &[f32], precision: Precision) -> Vec<f32> {
    match precision {
        Precision::F32 => numbers.to_vec(),
        Precision::Bf16 => numbers.iter().map(|number| bf16::from_f32(*number).to_f32()).collect(),
    }
}

/// The largest difference as a part of the largest right number; infinite where one is none.
pub fn error(ours: &[f32], right: &[f32]) -> f64 {
    let size = right.iter().fold(1e-30_f64, |size, number| size.max(f64::from(number.abs())));
    ours.iter().zip(right).fold(0.0, |most: f64, (ours, right)| {
        let error = (f64::from(*ours) - f64::from(*right)).abs() / size;
        if error.is_nan() { f64::INFINITY } else { most.max(error) }
    })
}

/// An operand of the engine's, and the same of the CPU's.
struct Pair<E: Engine> {
    there: E::Buffer,
    here: Vec<f32>,
    margin: usize,
}

impl<E: Engine> Pair<E> {
    fn read(&self, engine: &E) -> E::View<'_> {
        engine.view(&self.there, self.margin..self.margin + self.here.len())
    }

    fn write(&mut self, engine: &E) -> E::ViewMut<'_> {
        engine.view_mut(&mut self.there, self.margin..self.margin + self.here.len())
    }

    /// What the engine has.
    fn got(&self, engine: &E) -> Result<Vec<f32>> {
        let whole = self.here.len() + 2 * self.margin;
        let mut got = vec![0.0; whole];
        engine.download(engine.view(&self.there, 0..whole), &mut got)?;
        let behind = got.split_off(self.margin + self.here.len());
        let numbers = got.split_off(self.margin);
        if got.iter().chain(&behind).all(|number| number.is_nan()) {
            Ok(numbers)
        } else {
            Err(EngineError::Device("numbers beside a result were overwritten".into()))
        }
    }
}

/// What is compared with what.
struct At<'a, E: Engine> {
    engine: &'a E,
    cpu: Cpu,
    /// Shapes of real models, too.
    full: bool,
    margin: usize,
    random: Random,
}

impl<E: Engine> At<'_, E> {
    fn pair(&self, numbers: &[f32], precision: Precision) -> Result<Pair<E>> {
        let here = rounded(numbers, precision);
        let whole = here.len() + 2 * self.margin;
        let mut there = self.engine.zeros(whole, precision)?;
        let beside = vec![f32::NAN; self.margin];
        self.engine.upload(self.engine.view_mut(&mut there, 0..whole), &[&beside[..], &here, &beside].concat())?;
        Ok(Pair { there, here, margin: self.margin })
    }

    /// Numbers between -size and size, stored as the engine computes.
    fn input(&mut self, len: usize, size: f32) -> Result<Pair<E>> {
        self.stored(len, size, self.engine.compute())
    }

    fn stored(&mut self, len: usize, size: f32, precision: Precision) -> Result<Pair<E>> {
        let numbers = self.random.vec(len, size);
        self.pair(&numbers, precision)
    }

    /// What is to be written.
    fn output(&self, len: usize) -> Result<Pair<E>> {
        self.pair(&vec![f32::NAN; len], self.engine.compute())
    }

    fn output_f32(&self, len: usize) -> Result<Pair<E>> {
        self.pair(&vec![f32::NAN; len], Precision::F32)
    }

    /// The bar of a result that is stored as the engine computes.
    fn bar(&self, f32: f64, bf16: f64) -> f64 {
        bar(self.engine.compute(), f32, bf16)
    }

    /// What gradients of parameters are stored as.
    fn gradients(&self) -> Vec<Precision> {
        match self.engine.compute() {
            Precision::F32 => vec![Precision::F32],
            short => vec![Precision::F32, short],
        }
    }
}

fn bar(precision: Precision, f32: f64, bf16: f64) -> f64 {
    match precision {
        Precision::F32 => f32,
        Precision::Bf16 => bf16,
    }
}

/// Results by name: the worst error, and its bar.
#[derive(Default)]
struct Found(BTreeMap<String, (f64, f64)>);

impl Found {
    fn error(&mut self, name: &str, error: f64, bar: f64) {
        let worst = self.0.entry(name.to_string()).or_insert((0.0, bar));
        worst.0 = worst.0.max(error);
    }

    fn pair<E: Engine>(&mut self, at: &At<E>, name: &str, pair: &Pair<E>, bar: f64) -> Result<()> {
        self.error(name, error(&pair.got(at.engine)?, &pair.here), bar);
        Ok(())
    }

    fn row(&self, what: String) -> Row {
        let number = |number: f64| if number == 0.0 { "0".to_string() } else { format!("{number:.1e}") };
        let list = |of: fn(&(f64, f64)) -> f64| {
            let each = self.0.iter().map(|(name, found)| format!("{name} {}", number(of(found))));
            each.collect::<Vec<_>>().join(", ")
        };
        let mut bars = self.0.values().map(|(_, bar)| *bar);
        let same = bars.next().filter(|first| bars.all(|bar| bar == *first));
        let bar = same.map_or_else(|| list(|found| found.1), number);
        let fits = !self.0.is_empty() && self.0.values().all(|(error, bar)| error <= bar);
        Row::new(what, list(|found| found.0), bar, State::of(fits))
    }
}

/// How a precision is called.
pub fn name(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16",
    }
}

type Check<E> = fn(&mut At<E>, &mut Found) -> Result<()>;

/// A row for each operation. `full`: with shapes of real models, which take a machine of many
/// CPUs some seconds.
pub fn all<E: Engine>(engine: &E, full: bool) -> Vec<Row> {
    let checks: [(&str, Check<E>); 15] = [
        ("to the device and back", moved),
        ("fill, copy, add", plain),
        ("sum_of_squares", squares),
        ("matmul", matmul),
        ("rms_norm", rms_norm),
        ("rms_norm_backward", rms_norm_backward),
        ("rope", rope),
        ("attention", attention),
        ("attention_backward", attention_backward),
        ("swiglu", swiglu),
        ("swiglu_backward", swiglu_backward),
        ("embedding and its gradient", embedding),
        ("cross_entropy", cross_entropy),
        ("adamw", adamw),
        ("the same bits when done again", again),
    ];
    let check = |(what, check): (&str, Check<E>)| {
        let what = format!("{what}, {}", name(engine.compute()));
        let mut found = Found::default();
        for (index, margin) in MARGINS.into_iter().enumerate() {
            let mut at = At { engine, cpu: Cpu::default(), full, margin, random: Random(index as u64 + 1) };
            // The engine panics where operands do not fit: the other operations are still worth a look.
            match catch_unwind(AssertUnwindSafe(|| check(&mut at, &mut found))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Row::failed(what, error),
                Err(_) => return Row::failed(what, "it panicked; see above"),
            }
        }
        found.row(what)
    };
    checks.into_iter().map(check).collect()
}

fn moved<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    for len in [1, 97, 70_001] {
        for precision in at.gradients() {
            let numbers = at.random.vec(len, 100.0);
            let pair = at.pair(&numbers, precision)?;
            found.pair(at, "same", &pair, 0.0)?;
            // The engine rounds what was not rounded here.
            let mut there = at.engine.zeros(len, precision)?;
            at.engine.upload(at.engine.view_mut(&mut there, 0..len), &numbers)?;
            let got = at.engine.host(at.engine.view(&there, 0..len))?.into_owned();
            found.error("rounded", error(&got, &rounded(&numbers, precision)), 0.0);
        }
    }
    Ok(())
}

fn plain<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    for len in [1, 97, 70_001] {
        let e = at.engine;
        let (x, mut y) = (at.input(len, 1.0)?, at.output(len)?);
        e.fill(y.write(e), 2.5)?;
        y.here.fill(2.5);
        found.pair(at, "fill", &y, 0.0)?;
        e.copy(y.write(e), x.read(e))?;
        y.here.copy_from_slice(&x.here);
        found.pair(at, "copy", &y, 0.0)?;
        let other = at.input(len, 1.0)?;
        e.add(y.write(e), other.read(e))?;
        at.cpu.add(&mut y.here, &other.here)?;
        let bar = at.bar(1e-7, ONCE);
        found.pair(at, "add", &y, bar)?;
        // Between the masters and what is computed with.
        let (long, mut short) = (at.stored(len, 1.0, Precision::F32)?, at.output(len)?);
        e.copy(short.write(e), long.read(e))?;
        short.here = rounded(&long.here, e.compute());
        found.pair(at, "shortened", &short, 0.0)?;
        let mut long = at.output_f32(len)?;
        e.copy(long.write(e), short.read(e))?;
        long.here.copy_from_slice(&short.here);
        found.pair(at, "lengthened", &long, 0.0)?;
    }
    Ok(())
}

fn squares<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    for len in [1, 97, 1_000_003] {
        for precision in at.gradients() {
            let x = at.stored(len, 1.0, precision)?;
            let mut sum = at.engine.sum()?;
            at.engine.sum_of_squares(&mut sum, x.read(at.engine))?;
            at.engine.sum_of_squares(&mut sum, x.read(at.engine))?;
            let right: f64 = x.here.iter().map(|x| 2.0 * f64::from(*x) * f64::from(*x)).sum();
            found.error("sum", (at.engine.take(&mut sum)? / right - 1.0).abs(), 1e-6);
            found.error("0 again", at.engine.take(&mut sum)?.abs(), 0.0);
        }
    }
    Ok(())
}

fn matmul<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let mut shapes = vec![(1, 1, 1), (1, 97, 33), (97, 1, 33), (7, 33, 5), (130, 257, 300), (128, 256, 64)];
    if at.full {
        shapes.extend([(2048, 1024, 3072), (1000, 2048, 1024), (512, 20_000, 1024)]);
    }
    let e = at.engine;
    for (m, n, k) in shapes {
        let (a, b) = (at.input(m * k, 1.0)?, at.input(k * n, 1.0)?);
        for way in 0..8 {
            let (a_transposed, b_transposed, accumulate) = (way & 1 > 0, way & 2 > 0, way & 4 > 0);
            let how = Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha: 0.7 };
            for precision in at.gradients() {
                let mut c = if accumulate {
                    at.stored(m * n, 1.0, precision)?
                } else {
                    at.pair(&vec![f32::NAN; m * n], precision)?
                };
                e.matmul(c.write(e), a.read(e), b.read(e), how)?;
                at.cpu.matmul(&mut c.here, &a.here, &b.here, how)?;
                found.pair(at, name(precision), &c, bar(precision, 1e-5, 2.0 * ONCE))?;
            }
        }
    }
    Ok(())
}

/// Rows and widths: a model's, a head's, and odd ones.
fn rows<E: Engine>(at: &At<E>) -> Vec<(usize, usize)> {
    let mut shapes = vec![(1, 8), (7, 33), (300, 128), (65, 1024)];
    if at.full {
        shapes.extend([(4096, 1024), (32_768, 128), (513, 4096)]);
    }
    shapes
}

fn rms_norm<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for (rows, width) in rows(at) {
        let (x, weight) = (at.input(rows * width, 3.0)?, at.input(width, 1.0)?);
        let (mut y, mut inverse) = (at.output(rows * width)?, at.output_f32(rows)?);
        e.rms_norm(y.write(e), inverse.write(e), x.read(e), weight.read(e), 1e-6)?;
        at.cpu.rms_norm(&mut y.here, &mut inverse.here, &x.here, &weight.here, 1e-6)?;
        let bar = at.bar(2e-6, 2.0 * ONCE);
        found.pair(at, "y", &y, bar)?;
        found.pair(at, "inverse_rms", &inverse, 2e-6)?;
    }
    Ok(())
}

fn rms_norm_backward<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for (rows, width) in rows(at) {
        for precision in at.gradients() {
            let (x, weight, dy) = (at.input(rows * width, 3.0)?, at.input(width, 1.0)?, at.input(rows * width, 1.0)?);
            let (mut y, mut inverse) = (vec![0.0; rows * width], vec![0.0; rows]);
            at.cpu.rms_norm(&mut y, &mut inverse, &x.here, &weight.here, 1e-6)?;
            let inverse = at.pair(&inverse, Precision::F32)?;
            let (mut dx, mut dweight) = (at.input(rows * width, 1.0)?, at.stored(width, 1.0, precision)?);
            let (dy_there, x_there) = (dy.read(e), x.read(e));
            e.rms_norm_backward(dx.write(e), dweight.write(e), dy_there, x_there, weight.read(e), inverse.read(e))?;
            let (dx_here, dweight_here) = (&mut dx.here, &mut dweight.here);
            at.cpu.rms_norm_backward(dx_here, dweight_here, &dy.here, &x.here, &weight.here, &inverse.here)?;
            let dx_bar = at.bar(1e-5, 2.0 * ONCE);
            found.pair(at, "dx", &dx, dx_bar)?;
            let what = format!("dweight in {}", name(precision));
            found.pair(at, &what, &dweight, bar(precision, 2e-5, 2.0 * ONCE))?;
        }
    }
    Ok(())
}

fn rope<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for (batch, seq, heads, head_dim) in [(1, 1, 1, 2), (2, 7, 6, 10), (3, 65, 2, 64), (2, 300, 16, 128)] {
        let half = head_dim / 2;
        let angle = |t: usize, i: usize| t as f64 * 1e6_f64.powf(-((2 * i) as f64) / head_dim as f64);
        let table = (0..seq * head_dim).map(|place| {
            let (t, i) = (place / head_dim, place % head_dim);
            (if i < half { angle(t, i).cos() } else { angle(t, i - half).sin() }) as f32
        });
        let table = at.pair(&table.collect::<Vec<_>>(), Precision::F32)?;
        for (back, what) in [(false, "there"), (true, "back")] {
            let mut x = at.input(batch * seq * heads * head_dim, 1.0)?;
            e.rope(x.write(e), table.read(e), heads, head_dim, back)?;
            at.cpu.rope(&mut x.here, &table.here, heads, head_dim, back)?;
            let bar = at.bar(1e-6, ONCE);
            found.pair(at, what, &x, bar)?;
        }
    }
    Ok(())
}

/// With and without grouped queries, whole tiles and parts, the widths of real heads and
/// others.
fn shapes<E: Engine>(at: &At<E>) -> Vec<Attention> {
    let mut shapes =
        vec![(2, 5, 6, 2, 10), (1, 64, 2, 2, 64), (2, 130, 4, 1, 32), (2, 200, 4, 2, 64), (1, 300, 4, 2, 128)];
    if at.full {
        shapes.extend([(1, 1024, 16, 8, 128), (2, 777, 8, 8, 64), (1, 2048, 4, 2, 128)]);
    }
    let shape = |(batch, seq, heads, kv_heads, head_dim)| Attention { batch, seq, heads, kv_heads, head_dim };
    shapes.into_iter().map(shape).collect()
}

/// q, k, v and what they give on the CPU.
struct Attended<E: Engine> {
    q: Pair<E>,
    k: Pair<E>,
    v: Pair<E>,
    out: Vec<f32>,
    log_sums: Vec<f32>,
}

fn attended<E: Engine>(at: &mut At<E>, shape: Attention) -> Result<Attended<E>> {
    let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
    let (queries, keys) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
    let (q, k, v) = (at.input(queries, 3.0)?, at.input(keys, 3.0)?, at.input(keys, 1.0)?);
    let (mut out, mut log_sums) = (vec![0.0; queries], vec![0.0; batch * heads * seq]);
    at.cpu.attention(&mut out, &mut log_sums, &q.here, &k.here, &v.here, shape)?;
    Ok(Attended { q, k, v, out, log_sums })
}

fn attention<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for shape in shapes(at) {
        let Attended { q, k, v, out: right, log_sums: right_sums } = attended(at, shape)?;
        let (mut out, mut log_sums) = (at.output(right.len())?, at.output_f32(right_sums.len())?);
        e.attention(out.write(e), log_sums.write(e), q.read(e), k.read(e), v.read(e), shape)?;
        (out.here, log_sums.here) = (right, right_sums);
        let (out_bar, sums_bar) = (at.bar(1e-5, 3.0 * ONCE), at.bar(1e-5, 1e-4));
        found.pair(at, "out", &out, out_bar)?;
        found.pair(at, "log_sums", &log_sums, sums_bar)?;
    }
    Ok(())
}

fn attention_backward<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for shape in shapes(at) {
        let Attended { q, k, v, out, log_sums } = attended(at, shape)?;
        let (out, log_sums) = (at.pair(&out, e.compute())?, at.pair(&log_sums, Precision::F32)?);
        let dout = at.input(out.here.len(), 1.0)?;
        let (mut dq, mut dk, mut dv) = (at.output(q.here.len())?, at.output(k.here.len())?, at.output(v.here.len())?);
        e.attention_backward(
            dq.write(e),
            dk.write(e),
            dv.write(e),
            dout.read(e),
            out.read(e),
            log_sums.read(e),
            q.read(e),
            k.read(e),
            v.read(e),
            shape,
        )?;
        let (dq_here, dk_here, dv_here) = (&mut dq.here, &mut dk.here, &mut dv.here);
        let (dout, out, sums) = (&dout.here, &out.here, &log_sums.here);
        at.cpu.attention_backward(dq_here, dk_here, dv_here, dout, out, sums, &q.here, &k.here, &v.here, shape)?;
        let bar = at.bar(3e-5, 4.0 * ONCE);
        for (what, pair) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            found.pair(at, what, pair, bar)?;
        }
    }
    Ok(())
}

fn swiglu<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for (len, size) in [(1, 1.0), (97, 3.0), (70_001, 5.0), (4096, 120.0)] {
        let (gate, up, mut out) = (at.input(len, size)?, at.input(len, 2.0)?, at.output(len)?);
        e.swiglu(out.write(e), gate.read(e), up.read(e))?;
        at.cpu.swiglu(&mut out.here, &gate.here, &up.here)?;
        let bar = at.bar(2e-6, 2.0 * ONCE);
        found.pair(at, "out", &out, bar)?;
    }
    Ok(())
}

fn swiglu_backward<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for (len, size) in [(1, 1.0), (97, 3.0), (70_001, 5.0), (4096, 120.0)] {
        let (mut gate, mut up, dout) = (at.input(len, size)?, at.input(len, 2.0)?, at.input(len, 1.0)?);
        e.swiglu_backward(gate.write(e), up.write(e), dout.read(e))?;
        at.cpu.swiglu_backward(&mut gate.here, &mut up.here, &dout.here)?;
        let bar = at.bar(2e-6, 2.0 * ONCE);
        found.pair(at, "dgate", &gate, bar)?;
        found.pair(at, "dup", &up, bar)?;
    }
    Ok(())
}

fn embedding<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    let mut shapes = vec![(97, 33, 70), (5, 8, 400), (1000, 64, 2000)];
    if at.full {
        shapes.extend([(151_936, 64, 8192), (32_000, 1024, 4096)]);
    }
    for (vocab, width, count) in shapes {
        let (table, dout) = (at.input(vocab * width, 1.0)?, at.input(count * width, 1.0)?);
        let ids = at.random.below(count, vocab as u32);
        let tokens = e.tokens(&ids)?;
        let mut out = at.output(count * width)?;
        e.embedding(out.write(e), table.read(e), &tokens)?;
        at.cpu.embedding(&mut out.here, &table.here, &ids)?;
        found.pair(at, "out", &out, 0.0)?;
        for precision in at.gradients() {
            let mut dtable = at.stored(vocab * width, 1.0, precision)?;
            e.embedding_backward(dtable.write(e), dout.read(e), &tokens)?;
            at.cpu.embedding_backward(&mut dtable.here, &dout.here, &ids)?;
            let what = format!("dtable in {}", name(precision));
            found.pair(at, &what, &dtable, bar(precision, 1e-5, 4.0 * ONCE))?;
        }
    }
    Ok(())
}

fn cross_entropy<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    let mut shapes = vec![(1, 8, 1.0), (7, 97, 3.0), (33, 257, 20.0), (70, 500, 1.0)];
    if at.full {
        shapes.extend([(7, 151_936, 3.0), (300, 32_000, 10.0)]);
    }
    for (rows, vocab, size) in shapes {
        let mut logits = at.input(rows * vocab, size)?;
        // Other rows' targets lie before and after.
        let mut targets = at.random.below(rows + 5, vocab as u32);
        if rows > 5 {
            (targets[4], targets[8]) = (IGNORED, IGNORED);
        }
        let there = e.tokens(&targets)?;
        let (mut sum, mut right) = (e.sum()?, at.cpu.sum()?);
        e.cross_entropy(&mut sum, logits.write(e), &there, 3, rows, 0.125)?;
        at.cpu.cross_entropy(&mut right, &mut logits.here, &targets, 3, rows, 0.125)?;
        found.error("loss", (e.take(&mut sum)? / at.cpu.take(&mut right)? - 1.0).abs(), 1e-5);
        let bar = at.bar(1e-5, 2.0 * ONCE);
        found.pair(at, "dlogits", &logits, bar)?;
    }
    Ok(())
}

fn adamw<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    for len in [1, 97, 70_001] {
        let mut stored = |size| at.stored(len, size, Precision::F32);
        let (mut param, mut m, mut v) = (stored(1.0)?, stored(0.0)?, stored(0.0)?);
        for step in 1..=3 {
            let grad = at.stored(len, 0.1, Precision::F32)?;
            let how = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.7 };
            e.adamw(param.write(e), grad.read(e), m.write(e), v.write(e), how)?;
            at.cpu.adamw(&mut param.here, &grad.here, &mut m.here, &mut v.here, how)?;
            found.pair(at, "param", &param, 2e-6)?;
            found.pair(at, "m", &m, 2e-6)?;
            found.pair(at, "v", &v, 2e-6)?;
        }
    }
    Ok(())
}

/// Of numbers whose sums depend on the order: how many come out with other bits.
fn again<E: Engine>(at: &mut At<E>, found: &mut Found) -> Result<()> {
    let e = at.engine;
    let shape = Attention { batch: 2, seq: 300, heads: 4, kv_heads: 2, head_dim: 64 };
    let Attended { q, k, v, out, log_sums } = attended(at, shape)?;
    let (out, log_sums) = (at.pair(&out, e.compute())?, at.pair(&log_sums, Precision::F32)?);
    let (rows, width, vocab) = (512, 256, 97);
    let x = at.input(rows * width, 1.0)?;
    let weight = at.input(width, 1.0)?;
    let inverse = at.stored(rows, 1.0, Precision::F32)?;
    let tokens = e.tokens(&at.random.below(rows, vocab))?;
    let vocab = vocab as usize;
    let once = || -> Result<Vec<(&str, Vec<f32>)>> {
        let (mut dq, mut dk, mut dv) = (at.output(q.here.len())?, at.output(k.here.len())?, at.output(v.here.len())?);
        e.attention_backward(
            dq.write(e),
            dk.write(e),
            dv.write(e),
            out.read(e),
            out.read(e),
            log_sums.read(e),
            q.read(e),
            k.read(e),
            v.read(e),
            shape,
        )?;
        let zeros = |len: usize| at.pair(&vec![0.0; len], Precision::F32);
        let (mut dx, mut dweight) = (at.pair(&vec![0.0; rows * width], e.compute())?, zeros(width)?);
        let (mut dtable, mut product) = (zeros(vocab * width)?, zeros(width * width)?);
        e.rms_norm_backward(dx.write(e), dweight.write(e), x.read(e), x.read(e), weight.read(e), inverse.read(e))?;
        e.embedding_backward(dtable.write(e), x.read(e), &tokens)?;
        let (m, n, k) = (width, width, rows);
        let how = Matmul { m, n, k, a_transposed: true, b_transposed: false, accumulate: true, alpha: 1.0 };
        e.matmul(product.write(e), x.read(e), x.read(e), how)?;
        let mut sum = e.sum()?;
        e.sum_of_squares(&mut sum, x.read(e))?;
        let sum = e.take(&mut sum)?.to_bits();
        Ok(vec![
            ("dq", dq.got(e)?),
            ("dk", dk.got(e)?),
            ("dv", dv.got(e)?),
            ("dweight", dweight.got(e)?),
            ("dtable", dtable.got(e)?),
            ("matmul", product.got(e)?),
            ("sum", vec![f32::from_bits((sum >> 32) as u32), f32::from_bits(sum as u32)]),
        ])
    };
    let first = once()?;
    for _ in 0..3 {
        for ((what, first), (_, other)) in first.iter().zip(once()?) {
            let differ = first.iter().zip(&other).filter(|(first, other)| first.to_bits() != other.to_bits());
            found.error(what, differ.count() as f64, 0.0);
        }
    }
    Ok(())
}

/// How fast the large operations of a model of Qwen3-0.6B's shape are, alone: no bar, but
/// where a step loses its time. `peak` is the device's FLOP/s in bf16, where that is known.
pub fn rates<E: Engine>(engine: &E, peak: Option<f64>) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut told = |what: String, rate: Result<f64>| {
        rows.push(match rate {
            Ok(rate) => {
                let part = peak.map_or(String::new(), |peak| format!(", {:.0} % of the peak", 100.0 * rate / peak));
                Row::new(what, format!("{:.0} TFLOP/s{part}", rate / 1e12), "-", State::Ok)
            }
            Err(error) => Row::failed(what, error),
        });
    };
    let precision = name(engine.compute());
    for (m, n, k) in [(16_384, 3072, 1024), (16_384, 1024, 3072), (4096, 151_936, 1024)] {
        told(format!("speed of matmul {m} x {n} x {k}, {precision}"), matmul_rate(engine, m, n, k));
    }
    let shape = Attention { batch: 4, seq: 4096, heads: 16, kv_heads: 8, head_dim: 128 };
    let flops = 2.0 * (shape.batch * shape.heads * shape.seq * shape.seq * shape.head_dim) as f64;
    let [forward, backward] = match attention_seconds(engine, shape) {
        // Two products forward and five backward; of each the lower half, since it is causal.
        Ok([forward, backward]) => [Ok(flops / forward), Ok(2.5 * flops / backward)],
        Err(error) => [Err(error.clone()), Err(error)],
    };
    told(format!("speed of attention 4 x 4096, 16 heads of 128, {precision}"), forward);
    told(format!("speed of attention_backward 4 x 4096, 16 heads of 128, {precision}"), backward);
    rows
}

/// Seconds of one of ten, after two; `wait` ends when all is done.
fn seconds(mut run: impl FnMut() -> Result<()>, mut wait: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    run()?;
    wait()?;
    let begin = Instant::now();
    for _ in 0..10 {
        run()?;
    }
    wait()?;
    Ok(begin.elapsed().as_secs_f64() / 10.0)
}

/// Numbers as the engine computes with them, at random, but the same again and again.
fn filled<E: Engine>(engine: &E, len: usize) -> Result<E::Buffer> {
    let mut buffer = engine.zeros(len, engine.compute())?;
    let some = Random(len as u64).vec(len.min(1 << 20), 1.0);
    for from in (0..len).step_by(some.len().max(1)) {
        let count = some.len().min(len - from);
        engine.upload(engine.view_mut(&mut buffer, from..from + count), &some[..count])?;
    }
    Ok(buffer)
}

fn matmul_rate<E: Engine>(engine: &E, m: usize, n: usize, k: usize) -> Result<f64> {
    let (a, b) = (filled(engine, m * k)?, filled(engine, n * k)?);
    let mut c = engine.zeros(m * n, engine.compute())?;
    let mut sum = engine.sum()?;
    // As a projection does it: the weight is out x in.
    let how = Matmul { m, n, k, a_transposed: false, b_transposed: true, accumulate: false, alpha: 1.0 };
    let run = || {
        let to = engine.view_mut(&mut c, 0..m * n);
        engine.matmul(to, engine.view(&a, 0..m * k), engine.view(&b, 0..n * k), how)
    };
    let took = seconds(run, || engine.take(&mut sum).map(drop))?;
    Ok(2.0 * (m * n * k) as f64 / took)
}

/// Forward and backward.
fn attention_seconds<E: Engine>(engine: &E, shape: Attention) -> Result<[f64; 2]> {
    let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
    let (queries, keys, sums) =
        (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim, batch * heads * seq);
    let (q, k, v) = (filled(engine, queries)?, filled(engine, keys)?, filled(engine, keys)?);
    let zeros = |len| engine.zeros(len, engine.compute());
    let (mut out, mut dq, mut dk, mut dv) = (zeros(queries)?, zeros(queries)?, zeros(keys)?, zeros(keys)?);
    let mut log_sums = engine.zeros(sums, Precision::F32)?;
    let mut sum = engine.sum()?;
    let view = |buffer, len| engine.view(buffer, 0..len);
    let forward = || {
        engine.attention(
            engine.view_mut(&mut out, 0..queries),
            engine.view_mut(&mut log_sums, 0..sums),
            view(&q, queries),
            view(&k, keys),
            view(&v, keys),
            shape,
        )
    };
    let forward = seconds(forward, || engine.take(&mut sum).map(drop))?;
    let backward = || {
        engine.attention_backward(
            engine.view_mut(&mut dq, 0..queries),
            engine.view_mut(&mut dk, 0..keys),
            engine.view_mut(&mut dv, 0..keys),
            view(&out, queries),
            view(&out, queries),
            view(&log_sums, sums),
            view(&q, queries),
            view(&k, keys),
            view(&v, keys),
            shape,
        )
    };
    Ok([forward, seconds(backward, || engine.take(&mut sum).map(drop))?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(engine: &Cpu) -> At<'_, Cpu> {
        At { engine, cpu: engine.clone(), full: false, margin: 3, random: Random(1) }
    }

    #[test]
    fn what_is_written_beside_a_result_is_an_error() {
        let engine = Cpu::new(Some(1));
        let mut pair = at(&engine).input(5, 1.0).unwrap();
        assert_eq!(pair.got(&engine).unwrap(), pair.here);
        for place in [2, 8] {
            let before = pair.there[place];
            pair.there[place] = 0.0;
            assert!(pair.got(&engine).unwrap_err().to_string().contains("overwritten"));
            pair.there[place] = before;
        }
    }

    #[test]
    fn a_result_beyond_its_bar_or_never_written_fails() {
        let engine = Cpu::new(Some(1));
        let at = at(&engine);
        let state = |there: f32, here: f32, bar: f64| {
            let mut pair = at.pair(&[there, 1.0], Precision::F32).unwrap();
            pair.here[0] = here;
            let mut found = Found::default();
            found.pair(&at, "x", &pair, bar).unwrap();
            found.row("x".into()).state
        };
        assert_eq!(state(0.5, 0.5, 0.0), State::Ok);
        assert_eq!(state(0.5, 0.51, 0.02), State::Ok);
        assert_eq!(state(0.5, 0.53, 0.02), State::Failed);
        assert_eq!(state(f32::NAN, 0.5, 1.0), State::Failed);
        assert_eq!(Found::default().row("nothing was compared".into()).state, State::Failed);
    }
}
