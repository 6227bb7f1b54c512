//! Every operation by the GPU's kernels, run on the processor, against the processor's own:
//! random numbers, results that held NaN before, in both precisions.

#[path = "cuda/emulated.rs"]
mod emulated;

use emulated::Emulated;
use palingenesis_worker::engine::cuda::{Buffer, Cuda};
use palingenesis_worker::engine::{AdamW, Attention, Cpu, Engine, IGNORED, Matmul, Precision};

const BOTH: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// The engine under test beside its twin.
struct Twins {
    cuda: Cuda<Emulated>,
    cpu: Cpu,
    precision: Precision,
    random: u64,
}

impl Twins {
    fn new(precision: Precision) -> Option<Twins> {
        let cuda = Cuda::new(Emulated::new()?, precision).unwrap();
        Some(Twins { cuda, cpu: Cpu::new(Some(1)), precision, random: 1 })
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Numbers between -size and size that both precisions have.
    fn numbers(&mut self, len: usize, size: f32) -> Vec<f32> {
        let one = |bits: u64| ((bits >> 40) as f32 / (1 << 23) as f32 - 1.0) * size;
        (0..len).map(|_| half::bf16::from_f32(one(self.next())).to_f32()).collect()
    }

    fn tokens(&mut self, len: usize, vocab: usize) -> Vec<u32> {
        (0..len).map(|_| (self.next() % vocab as u64) as u32).collect()
    }

    /// On the device.
    fn up(&self, numbers: &[f32], precision: Precision) -> Buffer<Emulated> {
        let mut buffer = self.cuda.zeros(numbers.len(), precision).unwrap();
        self.cuda.upload(self.cuda.view_mut(&mut buffer, 0..numbers.len()), numbers).unwrap();
        buffer
    }

    fn own(&self, numbers: &[f32]) -> Buffer<Emulated> {
        self.up(numbers, self.precision)
    }

    fn full(&self, numbers: &[f32]) -> Buffer<Emulated> {
        self.up(numbers, Precision::F32)
    }

    fn poisoned(&self, len: usize, precision: Precision) -> Buffer<Emulated> {
        self.up(&vec![f32::NAN; len], precision)
    }

    fn down(&self, buffer: &Buffer<Emulated>) -> Vec<f32> {
        let mut numbers = vec![0.0; self.cuda.len(buffer)];
        self.cuda.download(self.cuda.view(buffer, 0..numbers.len()), &mut numbers).unwrap();
        numbers
    }

    /// Compares with what is right, relative to the largest.
    fn close(&self, what: &str, buffer: &Buffer<Emulated>, right: &[f32]) {
        let bar = if self.precision == Precision::F32 { 2e-5 } else { 1e-2 };
        close(what, &self.down(buffer), right, bar);
    }
}

fn close(what: &str, ours: &[f32], right: &[f32], bar: f32) {
    assert_eq!(ours.len(), right.len(), "{what}");
    let largest = right.iter().fold(0.0_f32, |most, number| most.max(number.abs())).max(1e-30);
    for (at, (own, right)) in ours.iter().zip(right).enumerate() {
        let error = (own - right).abs() / largest;
        assert!(error <= bar, "{what}: number {at} is {own}, not {right}: {error:e} of {largest}");
    }
}

macro_rules! r {
    ($twins:expr, $buffer:expr) => {
        $twins.cuda.view(&$buffer, 0..$twins.cuda.len(&$buffer))
    };
}

macro_rules! w {
    ($twins:expr, $buffer:expr) => {{
        let len = $twins.cuda.len(&$buffer);
        $twins.cuda.view_mut(&mut $buffer, 0..len)
    }};
}

/// Runs for both precisions, where the kernels can be compiled.
fn each(test: impl Fn(Twins)) {
    BOTH.into_iter().filter_map(Twins::new).for_each(test);
}

#[test]
fn numbers_go_there_and_back_rounded_to_nearest_even() {
    each(|t| {
        let numbers = [1.0, -2.5, 1.003_906_2, 1.011_718_8, 1e-40, f32::INFINITY, 3.0e38];
        let expected: Vec<f32> = match t.precision {
            Precision::F32 => numbers.to_vec(),
            Precision::Bf16 => numbers.iter().map(|number| half::bf16::from_f32(*number).to_f32()).collect(),
        };
        assert_eq!(t.down(&t.own(&numbers)), expected);
        // On the device, too.
        let (from, mut to) = (t.full(&numbers), t.poisoned(7, t.precision));
        t.cuda.copy(w!(t, to), r!(t, from)).unwrap();
        assert_eq!(t.down(&to), expected);
        let mut back = t.poisoned(7, Precision::F32);
        t.cuda.copy(w!(t, back), r!(t, to)).unwrap();
        assert_eq!(t.down(&back), expected);
        let mut nan = t.poisoned(7, t.precision);
        t.cuda.copy(w!(t, nan), r!(t, t.full(&[f32::NAN; 7]))).unwrap();
        assert!(t.down(&nan).iter().all(|number| number.is_nan()));
    });
}

#[test]
fn fill_copy_and_add_reach_every_number_and_no_other() {
    each(|mut t| {
        for len in [1, 7, 8, 64, 1000, 70_001] {
            for precision in [t.precision, Precision::F32] {
                let mut x = t.poisoned(len + 2, precision);
                for value in [0.0, 2.5] {
                    t.cuda.fill(t.cuda.view_mut(&mut x, 1..len + 1), value).unwrap();
                    let all = t.down(&x);
                    assert!(all[0].is_nan() && all[len + 1].is_nan() && all[1..=len].iter().all(|x| *x == value));
                }
            }
            let (a, b) = (t.numbers(len, 2.0), t.numbers(len, 2.0));
            let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            for (to, from) in [
                (t.precision, t.precision),
                (Precision::F32, t.precision),
                (t.precision, Precision::F32),
                (Precision::F32, Precision::F32),
            ] {
                let (mut y, x) = (t.up(&a, to), t.up(&b, from));
                t.cuda.add(w!(t, y), r!(t, x)).unwrap();
                let right = t.down(&t.up(&sums, to));
                assert_eq!(t.down(&y), right, "{to:?} += {from:?}, {len}");
                t.cuda.copy(w!(t, y), r!(t, x)).unwrap();
                assert_eq!(t.down(&y), b);
            }
        }
    });
}

#[test]
fn sums_of_squares_are_in_f64_and_add_up() {
    each(|mut t| {
        let mut sum = t.cuda.sum().unwrap();
        for len in [1, 255, 4097, 200_003] {
            let x = t.numbers(len, 3.0);
            let right: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let x = t.own(&x);
            t.cuda.sum_of_squares(&mut sum, r!(t, x)).unwrap();
            t.cuda.sum_of_squares(&mut sum, r!(t, x)).unwrap();
            let ours = t.cuda.take(&mut sum).unwrap();
            assert!((ours / right / 2.0 - 1.0).abs() < 1e-12, "{len}: {ours} {right}");
            assert_eq!(t.cuda.take(&mut sum).unwrap(), 0.0);
        }
        // In f32 it would be infinite, and the small ones lost.
        let mut many = vec![1e-4; 1000];
        many.push(1e20);
        t.cuda.sum_of_squares(&mut sum, r!(t, t.full(&many))).unwrap();
        assert!((t.cuda.take(&mut sum).unwrap() / 1e40 - 1.0).abs() < 1e-6);
        t.cuda.sum_of_squares(&mut sum, r!(t, t.full(&[1.0, f32::NAN]))).unwrap();
        assert!(t.cuda.take(&mut sum).unwrap().is_nan());
    });
}

#[test]
fn norms_and_their_gradients_are_the_processors() {
    each(|mut t| {
        for (rows, width) in
            [(1, 1), (3, 6), (129, 7), (5, 64), (130, 128), (17, 100), (3, 1024), (9, 1030), (4, 2048), (40, 2050)]
        {
            let (x, weight, dy) = (t.numbers(rows * width, 2.0), t.numbers(width, 1.0), t.numbers(rows * width, 1.0));
            let (before_x, before_w) = (t.numbers(rows * width, 0.5), t.numbers(width, 0.5));
            let what = format!("{rows} x {width}, {:?}", t.precision);
            let (mut y, mut inverse) = (vec![0.0; rows * width], vec![0.0; rows]);
            t.cpu.rms_norm(&mut y, &mut inverse, &x, &weight, 1e-5).unwrap();
            let (dx_x, dx_w, dx_dy) = (t.own(&x), t.own(&weight), t.own(&dy));
            let (mut own_y, mut own_inverse) =
                (t.poisoned(rows * width, t.precision), t.poisoned(rows, Precision::F32));
            t.cuda.rms_norm(w!(t, own_y), w!(t, own_inverse), r!(t, dx_x), r!(t, dx_w), 1e-5).unwrap();
            t.close(&format!("norm of {what}"), &own_y, &y);
            close(&format!("1 / rms of {what}"), &t.down(&own_inverse), &inverse, 2e-6);

            let (mut dx, mut dweight) = (before_x.clone(), before_w.clone());
            t.cpu.rms_norm_backward(&mut dx, &mut dweight, &dy, &x, &weight, &inverse).unwrap();
            for precision in [t.precision, Precision::F32] {
                let run = || {
                    let (mut own_dx, mut own_dw) = (t.own(&before_x), t.up(&before_w, precision));
                    let (dy, x, weight) = (r!(t, dx_dy), r!(t, dx_x), r!(t, dx_w));
                    t.cuda.rms_norm_backward(w!(t, own_dx), w!(t, own_dw), dy, x, weight, r!(t, own_inverse)).unwrap();
                    (own_dx, own_dw)
                };
                let (own_dx, own_dw) = run();
                t.close(&format!("dx of {what}"), &own_dx, &dx);
                t.close(&format!("dweight of {what}"), &own_dw, &dweight);
                let again = run();
                assert!(t.down(&again.0) == t.down(&own_dx) && t.down(&again.1) == t.down(&own_dw), "other bits");
            }
        }
    });
}

#[test]
fn rope_turns_and_turns_back_as_the_processor() {
    each(|mut t| {
        for (batch, seq, heads, head_dim) in [(1, 1, 1, 2), (2, 5, 3, 6), (3, 17, 2, 64), (1, 33, 4, 128)] {
            let x = t.numbers(batch * seq * heads * head_dim, 2.0);
            let angles = t.numbers(seq * head_dim / 2, 3.0);
            let table: Vec<f32> = angles
                .chunks(head_dim / 2)
                .flat_map(|angles| angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin())))
                .collect();
            for back in [false, true] {
                let mut right = x.clone();
                t.cpu.rope(&mut right, &table, heads, head_dim, back).unwrap();
                let mut ours = t.own(&x);
                t.cuda.rope(w!(t, ours), r!(t, t.full(&table)), heads, head_dim, back).unwrap();
                t.close(&format!("rope of {heads} x {head_dim}, back {back}"), &ours, &right);
            }
        }
    });
}

#[test]
fn swiglu_and_its_gradients_are_the_processors() {
    each(|mut t| {
        for (len, size) in [(1, 1.0), (7, 3.0), (1000, 3.0), (8192, 100.0), (70_001, 5.0)] {
            let (gate, up, dout) = (t.numbers(len, size), t.numbers(len, 2.0), t.numbers(len, 1.0));
            let mut right = vec![0.0; len];
            t.cpu.swiglu(&mut right, &gate, &up).unwrap();
            let (mut own_gate, mut own_up, own_dout) = (t.own(&gate), t.own(&up), t.own(&dout));
            let mut out = t.poisoned(len, t.precision);
            t.cuda.swiglu(w!(t, out), r!(t, own_gate), r!(t, own_up)).unwrap();
            t.close("swiglu", &out, &right);
            let (mut dgate, mut dup) = (gate, up);
            t.cpu.swiglu_backward(&mut dgate, &mut dup, &dout).unwrap();
            t.cuda.swiglu_backward(w!(t, own_gate), w!(t, own_up), r!(t, own_dout)).unwrap();
            t.close("dgate", &own_gate, &dgate);
            t.close("dup", &own_up, &dup);
        }
    });
}

#[test]
fn embedding_and_its_gradient_are_the_processors() {
    each(|mut t| {
        for (count, vocab, width) in [(1, 1, 1), (9, 4, 7), (40, 61, 20), (70, 11, 256), (5, 97, 1030)] {
            let (table, ids) = (t.numbers(vocab * width, 1.0), t.tokens(count, vocab));
            let tokens = (t.cpu.tokens(&ids).unwrap(), t.cuda.tokens(&ids).unwrap());
            let mut right = vec![0.0; count * width];
            t.cpu.embedding(&mut right, &table, &tokens.0).unwrap();
            let mut out = t.poisoned(count * width, t.precision);
            t.cuda.embedding(w!(t, out), r!(t, t.own(&table)), &tokens.1).unwrap();
            assert_eq!(t.down(&out), right, "copied as they are");

            let (dout, before) = (t.numbers(count * width, 1.0), t.numbers(vocab * width, 1.0));
            let mut right = before.clone();
            t.cpu.embedding_backward(&mut right, &dout, &tokens.0).unwrap();
            for precision in [t.precision, Precision::F32] {
                let mut dtable = t.up(&before, precision);
                t.cuda.embedding_backward(w!(t, dtable), r!(t, t.own(&dout)), &tokens.1).unwrap();
                t.close("dtable", &dtable, &right);
            }
        }
    });
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error_that_names_both() {
    each(|t| {
        let tokens = t.cuda.tokens(&[1, 97, 2]).unwrap();
        let (mut out, mut table) = (t.own(&[0.0; 3 * 2]), t.own(&[0.0; 97 * 2]));
        let mut sum = t.cuda.sum().unwrap();
        let mut logits = t.own(&[0.0; 3 * 97]);
        for error in [
            t.cuda.embedding(w!(t, out), r!(t, table), &tokens).unwrap_err(),
            t.cuda.embedding_backward(w!(t, table), r!(t, out), &tokens).unwrap_err(),
            t.cuda.cross_entropy(&mut sum, w!(t, logits), &tokens, 0, 3, 1.0).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("token 97") && text.contains("vocabulary of 97"), "{text}");
        }
    });
}

#[test]
fn cross_entropy_and_its_gradient_are_the_processors() {
    each(|mut t| {
        for (rows, vocab, size) in [(1, 1, 1.0), (7, 97, 3.0), (3, 1031, 80.0), (2, 5000, 10.0), (9, 64, 1.0)] {
            let logits = t.numbers(rows * vocab, size);
            let mut targets = t.tokens(rows + 3, vocab);
            if rows > 2 {
                targets[2 + 1] = IGNORED;
            }
            let tokens = (t.cpu.tokens(&targets).unwrap(), t.cuda.tokens(&targets).unwrap());
            let (mut right, mut right_loss) = (logits.clone(), 0.0);
            t.cpu.cross_entropy(&mut right_loss, &mut right, &tokens.0, 2, rows, 0.125).unwrap();
            let (mut ours, mut sum) = (t.own(&logits), t.cuda.sum().unwrap());
            t.cuda.cross_entropy(&mut sum, w!(t, ours), &tokens.1, 2, rows, 0.125).unwrap();
            let loss = t.cuda.take(&mut sum).unwrap();
            assert!(
                (loss - right_loss).abs() <= 2e-6 * right_loss.abs().max(1.0),
                "{rows} x {vocab}: {loss} {right_loss}"
            );
            t.close(&format!("dlogits of {rows} x {vocab}"), &ours, &right);
        }
        let tokens = t.cuda.tokens(&[7]).unwrap();
        let mut logits = vec![1.0; 97];
        logits[50] = f32::NAN;
        let (mut logits, mut sum) = (t.own(&logits), t.cuda.sum().unwrap());
        t.cuda.cross_entropy(&mut sum, w!(t, logits), &tokens, 0, 1, 1.0).unwrap();
        assert!(t.cuda.take(&mut sum).unwrap().is_nan());
    });
}

#[test]
fn adamw_is_the_processors() {
    let Some(mut t) = Twins::new(Precision::F32) else { return };
    let how = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 3, grad_scale: 0.5 };
    for len in [1, 7, 1000, 70_001] {
        let (param, grad, m) = (t.numbers(len, 1.0), t.numbers(len, 2.0), t.numbers(len, 1.0));
        let v: Vec<f32> = t.numbers(len, 1.0).iter().map(|v| v * v).collect();
        let (mut p, mut m1, mut v1) = (param.clone(), m.clone(), v.clone());
        t.cpu.adamw(&mut p, &grad, &mut m1, &mut v1, how).unwrap();
        let (mut own_p, own_grad, mut own_m, mut own_v) = (t.full(&param), t.full(&grad), t.full(&m), t.full(&v));
        t.cuda.adamw(w!(t, own_p), r!(t, own_grad), w!(t, own_m), w!(t, own_v), how).unwrap();
        // A step that is small beside the number hides what is wrong with it.
        let steps = |new: &[f32]| new.iter().zip(&param).map(|(new, old)| new - old).collect::<Vec<f32>>();
        close("steps", &steps(&t.down(&own_p)), &steps(&p), 1e-4);
        close("m", &t.down(&own_m), &m1, 1e-6);
        close("v", &t.down(&own_v), &v1, 1e-6);
    }
}

#[test]
fn attention_and_its_gradients_are_the_processors() {
    each(|mut t| {
        for (batch, seq, heads, kv_heads, head_dim) in [
            (1, 1, 1, 1, 8),
            (2, 17, 4, 2, 8),
            (1, 70, 2, 1, 32),
            (1, 65, 2, 2, 64),
            (1, 130, 4, 1, 64),
            (1, 100, 2, 1, 128),
        ] {
            let shape = Attention { batch, seq, heads, kv_heads, head_dim };
            let (queries, keys) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
            let (q, k, v, dout) =
                (t.numbers(queries, 2.0), t.numbers(keys, 2.0), t.numbers(keys, 1.0), t.numbers(queries, 1.0));
            let (mut out, mut log_sums) = (vec![0.0; queries], vec![0.0; batch * heads * seq]);
            t.cpu.attention(&mut out, &mut log_sums, &q, &k, &v, shape).unwrap();
            let (own_q, own_k, own_v, own_dout) = (t.own(&q), t.own(&k), t.own(&v), t.own(&dout));
            let mut own_out = t.poisoned(queries, t.precision);
            let mut own_sums = t.poisoned(log_sums.len(), Precision::F32);
            t.cuda.attention(w!(t, own_out), w!(t, own_sums), r!(t, own_q), r!(t, own_k), r!(t, own_v), shape).unwrap();
            t.close(&format!("out, {shape:?}"), &own_out, &out);
            close("log_sums", &t.down(&own_sums), &log_sums, 2e-5);

            let [mut dq, mut dk, mut dv] = [vec![0.0; queries], vec![0.0; keys], vec![0.0; keys]];
            t.cpu.attention_backward(&mut dq, &mut dk, &mut dv, &dout, &out, &log_sums, &q, &k, &v, shape).unwrap();
            let own = |len| t.poisoned(len, t.precision);
            let (mut own_dq, mut own_dk, mut own_dv) = (own(queries), own(keys), own(keys));
            t.cuda
                .attention_backward(
                    w!(t, own_dq),
                    w!(t, own_dk),
                    w!(t, own_dv),
                    r!(t, own_dout),
                    r!(t, own_out),
                    r!(t, own_sums),
                    r!(t, own_q),
                    r!(t, own_k),
                    r!(t, own_v),
                    shape,
                )
                .unwrap();
            let bar = if t.precision == Precision::F32 { 5e-5 } else { 2e-2 };
            for (what, ours, right) in [("dq", &own_dq, &dq), ("dk", &own_dk, &dk), ("dv", &own_dv, &dv)] {
                close(&format!("{what}, {shape:?}"), &t.down(ours), right, bar);
            }
        }
    });
}

#[test]
fn products_are_the_processors_into_either_precision() {
    each(|mut t| {
        let (m, n, k) = (5, 7, 11);
        let (a, b, c) = (t.numbers(m * k, 1.0), t.numbers(k * n, 1.0), t.numbers(m * n, 1.0));
        for accumulate in [false, true] {
            let how = Matmul { m, n, k, a_transposed: true, b_transposed: true, accumulate, alpha: 0.5 };
            let mut right = c.clone();
            t.cpu.matmul(&mut right, &a, &b, how).unwrap();
            for precision in [t.precision, Precision::F32] {
                let mut ours = t.up(&c, precision);
                t.cuda.matmul(w!(t, ours), r!(t, t.own(&a)), r!(t, t.own(&b)), how).unwrap();
                t.close("a product", &ours, &right);
            }
        }
        // Nothing to sum over.
        let how = Matmul { m, n, k: 0, a_transposed: false, b_transposed: false, accumulate: false, alpha: 1.0 };
        let mut ours = t.own(&c);
        t.cuda.matmul(w!(t, ours), r!(t, t.own(&[])), r!(t, t.own(&[])), how).unwrap();
        assert!(t.down(&ours).iter().all(|number| *number == 0.0));
    });
}

#[test]
fn token_memory_is_used_again() {
    let Some(t) = Twins::new(Precision::F32) else { return };
    let in_use = || t.cuda.memory_in_use().unwrap();
    drop(t.cuda.tokens(&[1, 2, 3, 4]).unwrap());
    let once = in_use();
    for len in 1..=4 {
        drop(t.cuda.tokens(&[1, 2, 3, 4][..len]).unwrap());
    }
    assert_eq!(in_use(), once);
}
