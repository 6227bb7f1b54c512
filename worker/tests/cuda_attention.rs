//! Attention's kernels, run on the processor, against the CPU's engine.

#[path = "cuda/emulated.rs"]
#[allow(dead_code, reason = "shared between test programs")]
mod emulated;

use emulated::Emulated;
use half::bf16;
use palingenesis_worker::engine::cuda::{Buffer, Cuda, attention};
use palingenesis_worker::engine::{Attention, Cpu, Engine, Precision};

/// Of the largest number of a result: how far any may be off. A bf16 has 8 bits, and what is
/// summed was rounded to it once before.
fn bar(precision: Precision) -> f32 {
    match precision {
        Precision::F32 => 2e-5,
        Precision::Bf16 => 2e-2,
    }
}

fn engine(precision: Precision) -> Option<Cuda<Emulated>> {
    Some(Cuda::new(Emulated::new()?, precision).unwrap())
}

/// Numbers between -2 and 2 that are the same in every run, as the precision stores them.
fn numbers(len: usize, seed: u64, precision: Precision) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len)
        .map(|_| match precision {
            Precision::F32 => next(),
            Precision::Bf16 => bf16::from_f32(next()).to_f32(),
        })
        .collect()
}

fn lengths(shape: Attention) -> (usize, usize, usize) {
    let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
    (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim, batch * heads * seq)
}

/// Inputs: q, k, v and dout.
fn inputs(shape: Attention, precision: Precision) -> [Vec<f32>; 4] {
    let (queries, keys, _) = lengths(shape);
    [(queries, 1), (keys, 2), (keys, 3), (queries, 4)].map(|(len, seed)| numbers(len, seed, precision))
}

/// Results: out, log_sums, dq, dk and dv.
type Results = [Vec<f32>; 5];
const RESULTS: [&str; 5] = ["out", "log_sums", "dq", "dk", "dv"];

fn on_cpu(shape: Attention, [q, k, v, dout]: &[Vec<f32>; 4]) -> Results {
    let (queries, keys, rows) = lengths(shape);
    let engine = Cpu::new(Some(1));
    let [mut out, mut log_sums] = [queries, rows].map(|len| vec![f32::NAN; len]);
    engine.attention(&mut out, &mut log_sums, q, k, v, shape).unwrap();
    let [mut dq, mut dk, mut dv] = [queries, keys, keys].map(|len| vec![f32::NAN; len]);
    engine.attention_backward(&mut dq, &mut dk, &mut dv, dout, &out, &log_sums, q, k, v, shape).unwrap();
    [out, log_sums, dq, dk, dv]
}

/// The numbers in a buffer of their own, `before` numbers after its beginning.
fn buffer(engine: &Cuda<Emulated>, numbers: &[f32], precision: Precision, before: usize) -> Buffer<Emulated> {
    let mut buffer = engine.zeros(before + numbers.len(), precision).unwrap();
    engine.upload(engine.view_mut(&mut buffer, before..before + numbers.len()), numbers).unwrap();
    buffer
}

fn on_device(engine: &Cuda<Emulated>, shape: Attention, inputs: &[Vec<f32>; 4], before: usize) -> Results {
    let (queries, keys, rows) = lengths(shape);
    let precision = engine.compute();
    let [q, k, v, dout] = inputs.each_ref().map(|numbers| buffer(engine, numbers, precision, before));
    let poisoned = |len, precision| buffer(engine, &vec![f32::NAN; len], precision, before);
    let [mut out, mut dq, mut dk, mut dv] = [queries, queries, keys, keys].map(|len| poisoned(len, precision));
    let mut log_sums = poisoned(rows, Precision::F32);
    fn view<'a>(
        engine: &Cuda<Emulated>,
        of: &'a Buffer<Emulated>,
        before: usize,
    ) -> <Cuda<Emulated> as Engine>::View<'a> {
        engine.view(of, before..engine.len(of))
    }
    fn write<'a>(
        engine: &Cuda<Emulated>,
        of: &'a mut Buffer<Emulated>,
        before: usize,
    ) -> <Cuda<Emulated> as Engine>::ViewMut<'a> {
        let end = engine.len(of);
        engine.view_mut(of, before..end)
    }
    let read = |of| view(engine, of, before);
    engine
        .attention(
            write(engine, &mut out, before),
            write(engine, &mut log_sums, before),
            read(&q),
            read(&k),
            read(&v),
            shape,
        )
        .unwrap();
    engine
        .attention_backward(
            write(engine, &mut dq, before),
            write(engine, &mut dk, before),
            write(engine, &mut dv, before),
            view(engine, &dout, before),
            view(engine, &out, before),
            view(engine, &log_sums, before),
            view(engine, &q, before),
            view(engine, &k, before),
            view(engine, &v, before),
            shape,
        )
        .unwrap();
    [out, log_sums, dq, dk, dv].map(|of| {
        let mut numbers = vec![0.0; engine.len(&of)];
        engine.download(engine.view(&of, 0..engine.len(&of)), &mut numbers).unwrap();
        // What comes before was zeros, and belongs to nobody.
        assert!(numbers[..before].iter().all(|number| *number == 0.0), "{shape:?}: written before a view's beginning");
        numbers.split_off(before)
    })
}

fn assert_close(shape: Attention, precision: Precision, results: &Results, expected: &Results) {
    for (name, (results, expected)) in RESULTS.iter().zip(results.iter().zip(expected)) {
        let largest = expected.iter().fold(0.0_f32, |largest, number| largest.max(number.abs()));
        // With one position all of dq and dk is rounding.
        let bar = bar(precision) * largest.max(0.1);
        for (i, (result, expected)) in results.iter().zip(expected).enumerate() {
            assert!(
                (result - expected).abs() <= bar,
                "{shape:?} {precision:?}: {name}[{i}] is {result}, not {expected} (largest {largest})"
            );
        }
    }
}

/// Each length with its own number of heads that share keys, so that all meet with few runs.
fn lengths_and_groups() -> [(usize, usize, usize); 6] {
    [(1, 4, 2), (17, 2, 2), (64, 4, 1), (65, 4, 2), (130, 4, 1), (200, 2, 1)]
}

fn same_as_the_cpu(precision: Precision, head_dims: &[usize]) {
    let Some(engine) = engine(precision) else { return };
    for head_dim in head_dims {
        for (seq, heads, kv_heads) in lengths_and_groups() {
            let batch = if seq == 65 { 2 } else { 1 };
            let shape = Attention { batch, seq, heads, kv_heads, head_dim: *head_dim };
            let inputs = inputs(shape, precision);
            assert_close(shape, precision, &on_device(&engine, shape, &inputs, 0), &on_cpu(shape, &inputs));
        }
    }
}

#[test]
fn attention_in_f32_is_the_cpus() {
    same_as_the_cpu(Precision::F32, &[2, 32, 64, 80, 128]);
}

#[test]
fn attention_in_bf16_without_tensor_cores_is_the_cpus() {
    assert!(!attention::is_tensor(32, Precision::Bf16) && !attention::is_tensor(96, Precision::Bf16));
    same_as_the_cpu(Precision::Bf16, &[32, 96]);
}

#[test]
fn attention_on_tensor_cores_is_the_cpus() {
    assert!(attention::is_tensor(64, Precision::Bf16) && attention::is_tensor(128, Precision::Bf16));
    same_as_the_cpu(Precision::Bf16, &[64, 128]);
}

#[test]
fn the_widest_heads_are_the_cpus() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(engine) = engine(precision) else { return };
        for (seq, head_dim) in [(33, 256), (40, 200)] {
            let shape = Attention { batch: 1, seq, heads: 2, kv_heads: 1, head_dim };
            let inputs = inputs(shape, precision);
            assert_close(shape, precision, &on_device(&engine, shape, &inputs, 0), &on_cpu(shape, &inputs));
        }
    }
}

#[test]
fn views_that_begin_anywhere_are_computed_all_the_same() {
    // Two bytes, and eight, off what tensor cores' copies need.
    let Some(engine) = engine(Precision::Bf16) else { return };
    for before in [1, 4, 8] {
        let shape = Attention { batch: 2, seq: 66, heads: 2, kv_heads: 1, head_dim: 64 };
        let inputs = inputs(shape, Precision::Bf16);
        assert_close(shape, Precision::Bf16, &on_device(&engine, shape, &inputs, before), &on_cpu(shape, &inputs));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(engine) = engine(precision) else { return };
        let shape = Attention { batch: 1, seq: 70, heads: 2, kv_heads: 1, head_dim: 64 };
        let mut inputs = inputs(shape, precision);
        // Scores of some thousands: e to their power is no f32, and almost all weight is one key's.
        inputs[0].iter_mut().for_each(|number| *number *= 64.0);
        let (results, expected) = (on_device(&engine, shape, &inputs, 0), on_cpu(shape, &inputs));
        assert!(expected[1].iter().any(|log_sum| *log_sum > 200.0));
        for (name, (results, expected)) in RESULTS.iter().zip(results.iter().zip(&expected)).take(2) {
            let largest = expected.iter().fold(0.0_f32, |largest, number| largest.max(number.abs()));
            for (result, expected) in results.iter().zip(expected) {
                assert!((result - expected).abs() <= bar(precision) * largest, "{name}: {result}, not {expected}");
            }
        }
        assert!(results.iter().flatten().all(|number| number.is_finite()));
    }
}

#[test]
fn the_same_bits_come_out_twice() {
    for (precision, head_dim) in [(Precision::F32, 48), (Precision::Bf16, 48), (Precision::Bf16, 128)] {
        let Some(engine) = engine(precision) else { return };
        let shape = Attention { batch: 1, seq: 150, heads: 4, kv_heads: 2, head_dim };
        let inputs = inputs(shape, precision);
        // Another length in between leaves other things in memory.
        let bits =
            || on_device(&engine, shape, &inputs, 0).map(|all| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let first = bits();
        let other = Attention { seq: 31, ..shape };
        on_device(&engine, other, &self::inputs(other, precision), 0);
        assert!(first == bits(), "{shape:?} {precision:?}");
    }
}

#[test]
fn a_position_does_not_depend_on_later_ones() {
    for (precision, head_dim) in [(Precision::F32, 32), (Precision::Bf16, 64), (Precision::Bf16, 128)] {
        let Some(engine) = engine(precision) else { return };
        let long = Attention { batch: 1, seq: 140, heads: 2, kv_heads: 1, head_dim };
        let short = Attention { seq: 77, ..long };
        let inputs = inputs(long, precision);
        let mut cut = inputs.clone();
        for (numbers, heads) in cut.iter_mut().zip([2, 1, 1, 2]) {
            numbers.truncate(short.seq * heads * head_dim);
        }
        let [long_out, ..] = on_device(&engine, long, &inputs, 0);
        let [short_out, ..] = on_device(&engine, short, &cut, 0);
        assert!(long_out[..short_out.len()] == short_out[..], "{head_dim} {precision:?}");
    }
}

#[test]
fn heads_that_are_too_wide_are_said_to_be() {
    let Some(engine) = engine(Precision::F32) else { return };
    let shape = Attention { batch: 1, seq: 2, heads: 1, kv_heads: 1, head_dim: 258 };
    let [q, k, v, _] = inputs(shape, Precision::F32).map(|numbers| buffer(&engine, &numbers, Precision::F32, 0));
    let [mut out, mut log_sums] = [516, 2].map(|len| engine.zeros(len, Precision::F32).unwrap());
    let all = |of| engine.view(of, 0..516);
    let error = engine
        .attention(
            engine.view_mut(&mut out, 0..516),
            engine.view_mut(&mut log_sums, 0..2),
            all(&q),
            all(&k),
            all(&v),
            shape,
        )
        .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("heads of 258 numbers") && message.contains("at most 256"), "{message}");
}
