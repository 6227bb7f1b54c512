//! Every operation on views that begin anywhere in their buffers, on the GPU's kernels run on
//! the processor: a GPU ends a program that reads 16 bytes at an address that is no multiple of
//! them, and a tensor of an odd size leaves all that follow it in such places. What lies beside
//! a view stays as it was, and no row at all is no error.

#[path = "cuda/emulated.rs"]
mod emulated;

use emulated::Emulated;
use palingenesis_worker::engine::cuda::{Buffer, Cuda, View, ViewMut};
use palingenesis_worker::engine::{AdamW, Attention, Cpu, Engine, Precision};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Numbers between -1 and 1 that both precisions have.
    fn numbers(&mut self, len: usize) -> Vec<f32> {
        let one = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..len).map(|_| half::bf16::from_f32(one(self.next())).to_f32()).collect()
    }
}

/// Numbers with NaNs before and after, so many before that vectors cannot begin there.
struct Inside {
    buffer: Buffer<Emulated>,
    before: usize,
    len: usize,
}

/// NaNs after.
const AFTER: usize = 3;

impl Inside {
    fn new(cuda: &Cuda<Emulated>, numbers: &[f32], before: usize, precision: Precision) -> Inside {
        let len = numbers.len();
        let all = [&vec![f32::NAN; before][..], numbers, &[f32::NAN; AFTER]].concat();
        let mut buffer = cuda.zeros(all.len(), precision).unwrap();
        cuda.upload(cuda.view_mut(&mut buffer, 0..all.len()), &all).unwrap();
        Inside { buffer, before, len }
    }

    fn read(&self, cuda: &Cuda<Emulated>) -> View<'_> {
        cuda.view(&self.buffer, self.before..self.before + self.len)
    }

    fn write(&mut self, cuda: &Cuda<Emulated>) -> ViewMut<'_> {
        cuda.view_mut(&mut self.buffer, self.before..self.before + self.len)
    }

    /// Compares, relative to the largest, and looks at what lies beside.
    fn close(&self, cuda: &Cuda<Emulated>, what: &str, right: &[f32], bar: f32) {
        let all = cuda.host(cuda.view(&self.buffer, 0..self.before + self.len + AFTER)).unwrap();
        let (before, rest) = all.split_at(self.before);
        let (ours, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|number| number.is_nan()), "{what}: beside it is written");
        assert_eq!(ours.len(), right.len(), "{what}");
        let largest = right.iter().fold(1e-30_f32, |most, number| most.max(number.abs()));
        for (at, (own, right)) in ours.iter().zip(right).enumerate() {
            assert!((own - right).abs() <= bar * largest, "{what}: number {at} is {own}, not {right}");
        }
    }
}

/// In both precisions, with views that begin one, two and three numbers in, and at 16 bytes.
fn each(test: impl Fn(&Cuda<Emulated>, &Cpu, Precision, usize, f32)) {
    for (precision, bar) in [(Precision::F32, 2e-5), (Precision::Bf16, 1e-2)] {
        for before in [1, 2, 3, 8] {
            let Some(device) = Emulated::new() else { return };
            test(&Cuda::new(device, precision).unwrap(), &Cpu::new(Some(1)), precision, before, bar);
        }
    }
}

#[test]
fn sums_casts_and_swiglu_begin_anywhere() {
    each(|cuda, cpu, precision, before, bar| {
        let mut random = Random(5);
        for len in [16, 203] {
            let [a, b, d] = [(); 3].map(|()| random.numbers(len));
            // One of two only.
            for (first, second) in [(before, 8), (8, before), (before, before)] {
                for (to, from) in [(precision, precision), (precision, Precision::F32), (Precision::F32, precision)] {
                    let mut y = Inside::new(cuda, &a, first, to);
                    let x = Inside::new(cuda, &b, second, from);
                    cuda.add(y.write(cuda), x.read(cuda)).unwrap();
                    let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
                    y.close(cuda, "a sum", &sums, bar);
                    cuda.copy(y.write(cuda), x.read(cuda)).unwrap();
                    y.close(cuda, "a copy", &b, 0.0);
                }
            }
            let mut sum = cuda.sum().unwrap();
            cuda.sum_of_squares(&mut sum, Inside::new(cuda, &a, before, precision).read(cuda)).unwrap();
            let right: f64 = a.iter().map(|a| f64::from(*a).powi(2)).sum();
            assert!((cuda.take(&mut sum).unwrap() / right - 1.0).abs() < 1e-12);
            let mut right = vec![0.0; len];
            cpu.swiglu(&mut right, &a, &b).unwrap();
            let own = |numbers: &[f32]| Inside::new(cuda, numbers, before, precision);
            let (mut gate, mut up, dout, mut out) = (own(&a), own(&b), own(&d), own(&vec![f32::NAN; len]));
            cuda.swiglu(out.write(cuda), gate.read(cuda), up.read(cuda)).unwrap();
            out.close(cuda, "swiglu", &right, bar);
            let (mut dgate, mut dup) = (a, b);
            cpu.swiglu_backward(&mut dgate, &mut dup, &d).unwrap();
            cuda.swiglu_backward(gate.write(cuda), up.write(cuda), dout.read(cuda)).unwrap();
            gate.close(cuda, "dgate", &dgate, bar);
            up.close(cuda, "dup", &dup, bar);
        }
    });
}

#[test]
fn norms_begin_anywhere_and_are_as_wide_as_a_model() {
    each(|cuda, cpu, precision, before, bar| {
        let mut random = Random(6);
        for (rows, width) in [(9, 64), (3, 128), (2, 1032), (2, 16_384)] {
            let what = format!("{rows} x {width}, {precision:?}, {before} in");
            let [x, dy, dx] = [(); 3].map(|()| random.numbers(rows * width));
            let [weight, dweight] = [(); 2].map(|()| random.numbers(width));
            let (mut y, mut inverse) = (vec![0.0; rows * width], vec![0.0; rows]);
            cpu.rms_norm(&mut y, &mut inverse, &x, &weight, 1e-6).unwrap();
            let own = |numbers: &[f32]| Inside::new(cuda, numbers, before, precision);
            let (own_x, own_weight, own_dy, mut own_y) =
                (own(&x), own(&weight), own(&dy), own(&vec![f32::NAN; y.len()]));
            let mut own_inverse = Inside::new(cuda, &vec![f32::NAN; rows], before, Precision::F32);
            let (to, keep) = (own_y.write(cuda), own_inverse.write(cuda));
            cuda.rms_norm(to, keep, own_x.read(cuda), own_weight.read(cuda), 1e-6).unwrap();
            own_y.close(cuda, &what, &y, bar);
            own_inverse.close(cuda, &what, &inverse, 2e-6);
            for stored in [precision, Precision::F32] {
                let (mut own_dx, mut own_dweight) = (own(&dx), Inside::new(cuda, &dweight, before, stored));
                let (mut right_dx, mut right_dweight) = (dx.clone(), dweight.clone());
                cpu.rms_norm_backward(&mut right_dx, &mut right_dweight, &dy, &x, &weight, &inverse).unwrap();
                let (to, sums) = (own_dx.write(cuda), own_dweight.write(cuda));
                let (dy, x, weight) = (own_dy.read(cuda), own_x.read(cuda), own_weight.read(cuda));
                cuda.rms_norm_backward(to, sums, dy, x, weight, own_inverse.read(cuda)).unwrap();
                own_dx.close(cuda, &format!("dx of {what}"), &right_dx, bar);
                own_dweight.close(cuda, &format!("dweight of {what}"), &right_dweight, bar);
            }
        }
    });
}

#[test]
fn rope_and_embeddings_begin_anywhere() {
    each(|cuda, cpu, precision, before, bar| {
        let mut random = Random(7);
        let own = |numbers: &[f32]| Inside::new(cuda, numbers, before, precision);
        let (seq, heads, head_dim) = (5, 2, 64);
        let (x, table) = (random.numbers(2 * seq * heads * head_dim), random.numbers(seq * head_dim));
        let mut right = x.clone();
        cpu.rope(&mut right, &table, heads, head_dim, false).unwrap();
        for at in [8, before] {
            let (mut x, table) = (own(&x), Inside::new(cuda, &table, at, Precision::F32));
            cuda.rope(x.write(cuda), table.read(cuda), heads, head_dim, false).unwrap();
            x.close(cuda, "rope", &right, bar);
        }

        let (vocab, width, ids) = (5, 40, [4, 0, 4, 1, 4, 0]);
        let (table, dout) = (random.numbers(vocab * width), random.numbers(ids.len() * width));
        let (tokens, on_host) = (cuda.tokens(&ids).unwrap(), cpu.tokens(&ids).unwrap());
        let mut right = vec![0.0; dout.len()];
        cpu.embedding(&mut right, &table, &on_host).unwrap();
        let mut out = own(&vec![f32::NAN; dout.len()]);
        cuda.embedding(out.write(cuda), own(&table).read(cuda), &tokens).unwrap();
        out.close(cuda, "rows of the table", &right, 0.0);
        let mut right = table.clone();
        cpu.embedding_backward(&mut right, &dout, &on_host).unwrap();
        for stored in [precision, Precision::F32] {
            let mut dtable = Inside::new(cuda, &table, before, stored);
            cuda.embedding_backward(dtable.write(cuda), own(&dout).read(cuda), &tokens).unwrap();
            dtable.close(cuda, "dtable", &right, bar);
        }
    });
}

#[test]
fn cross_entropy_adamw_and_attention_begin_anywhere() {
    each(|cuda, cpu, precision, before, bar| {
        let mut random = Random(8);
        let own = |numbers: &[f32]| Inside::new(cuda, numbers, before, precision);
        for (rows, vocab) in [(3, 64), (2, 1003)] {
            let (logits, ids) = (random.numbers(rows * vocab), vec![1_u32; rows]);
            let (mut right, mut right_loss) = (logits.clone(), 0.0);
            cpu.cross_entropy(&mut right_loss, &mut right, &cpu.tokens(&ids).unwrap(), 0, rows, 0.5).unwrap();
            let (mut ours, mut sum) = (own(&logits), cuda.sum().unwrap());
            cuda.cross_entropy(&mut sum, ours.write(cuda), &cuda.tokens(&ids).unwrap(), 0, rows, 0.5).unwrap();
            ours.close(cuda, "dlogits", &right, bar);
            let loss = cuda.take(&mut sum).unwrap();
            assert!((loss / right_loss - 1.0).abs() < 2e-6, "{loss} {right_loss}");
        }

        let how = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: 2, grad_scale: 1.0 };
        let [mut p, g, mut m] = [(); 3].map(|()| random.numbers(100));
        let mut v: Vec<f32> = m.iter().map(|m| m * m).collect();
        let full = |numbers: &[f32]| Inside::new(cuda, numbers, before, Precision::F32);
        let (mut own_p, own_g, mut own_m, mut own_v) = (full(&p), full(&g), full(&m), full(&v));
        cpu.adamw(&mut p, &g, &mut m, &mut v, how).unwrap();
        let (to, first, second) = (own_p.write(cuda), own_m.write(cuda), own_v.write(cuda));
        cuda.adamw(to, own_g.read(cuda), first, second, how).unwrap();
        own_p.close(cuda, "a step", &p, 1e-6);
        own_m.close(cuda, "m", &m, 1e-6);
        own_v.close(cuda, "v", &v, 1e-6);

        let shape = Attention { batch: 1, seq: 9, heads: 2, kv_heads: 1, head_dim: 64 };
        let q = random.numbers(9 * 2 * 64);
        let [k, v] = [(); 2].map(|()| random.numbers(9 * 64));
        let (mut right, mut right_sums) = (vec![0.0; q.len()], vec![0.0; 18]);
        cpu.attention(&mut right, &mut right_sums, &q, &k, &v, shape).unwrap();
        let (mut out, mut sums) = (own(&vec![f32::NAN; q.len()]), full(&[f32::NAN; 18]));
        let (to, keep) = (out.write(cuda), sums.write(cuda));
        cuda.attention(to, keep, own(&q).read(cuda), own(&k).read(cuda), own(&v).read(cuda), shape).unwrap();
        out.close(cuda, "attention", &right, bar);
        sums.close(cuda, "log_sums", &right_sums, 2e-5);
    });
}

#[test]
fn of_no_row_nothing_is_asked() {
    let Some(device) = Emulated::new() else { return };
    let cuda = &Cuda::new(device, Precision::Bf16).unwrap();
    let own = |numbers: &[f32]| Inside::new(cuda, numbers, 1, Precision::Bf16);
    let full = |numbers: &[f32]| Inside::new(cuda, numbers, 1, Precision::F32);
    let (mut none, mut other, mut third, read) = (own(&[]), own(&[]), full(&[]), own(&[]));
    let (weight, mut dweight, table) = (own(&[1.0; 4]), full(&[2.0; 4]), full(&[1.0; 4]));
    let (tokens, mut sum) = (cuda.tokens(&[]).unwrap(), cuda.sum().unwrap());
    cuda.fill(none.write(cuda), 1.0).unwrap();
    cuda.copy(none.write(cuda), read.read(cuda)).unwrap();
    cuda.add(none.write(cuda), read.read(cuda)).unwrap();
    cuda.sum_of_squares(&mut sum, read.read(cuda)).unwrap();
    cuda.rms_norm(none.write(cuda), third.write(cuda), read.read(cuda), weight.read(cuda), 1e-6).unwrap();
    let (x, inverse) = (read.read(cuda), third.read(cuda));
    cuda.rms_norm_backward(none.write(cuda), dweight.write(cuda), x, x, weight.read(cuda), inverse).unwrap();
    cuda.rope(none.write(cuda), table.read(cuda), 1, 4, false).unwrap();
    cuda.swiglu(none.write(cuda), x, x).unwrap();
    cuda.swiglu_backward(none.write(cuda), other.write(cuda), x).unwrap();
    cuda.embedding(none.write(cuda), weight.read(cuda), &tokens).unwrap();
    cuda.embedding_backward(dweight.write(cuda), x, &tokens).unwrap();
    cuda.cross_entropy(&mut sum, none.write(cuda), &tokens, 0, 0, 1.0).unwrap();
    dweight.close(cuda, "dweight", &[2.0; 4], 0.0);
    assert_eq!(cuda.take(&mut sum).unwrap(), 0.0);
}
