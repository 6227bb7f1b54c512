//! Each operation of the engine on the CPU against candle in f64, its gradients by
//! candle's autograd, and against the slope of the operation itself.

use candle_core::{D, DType, Device, Tensor, Var};
use palingenesis_worker::engine::{AdamW, Attention, Cpu, Engine, EngineError, IGNORED, Matmul, Precision};

/// Numbers that look random and are always the same (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -size and size.
    fn vec(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size).collect()
    }

    fn tokens(&mut self, len: usize, vocab: u32) -> Vec<u32> {
        (0..len).map(|_| (self.next() % u64::from(vocab)) as u32).collect()
    }
}

/// A variable of candle's, in f64.
fn var(numbers: &[f32], shape: &[usize]) -> Var {
    let numbers = numbers.iter().map(|x| f64::from(*x)).collect();
    Var::from_tensor(&Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Gradients of Σ out·dout with respect to the variables.
fn gradients<const N: usize>(out: &Tensor, dout: &[f32], of: [&Var; N]) -> [Vec<f64>; N] {
    let store = (out * var(dout, out.dims()).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    of.map(|var| numbers(store.get(var).unwrap()))
}

/// All within `tolerance` of the largest of the right ones, and numbers.
#[track_caller]
fn assert_close(what: &str, ours: &[f32], right: &[f64], tolerance: f64) {
    assert_eq!(ours.len(), right.len(), "{what}");
    let size = right.iter().fold(1e-30_f64, |size, x| size.max(x.abs()));
    for (i, (ours, right)) in ours.iter().zip(right).enumerate() {
        let error = (f64::from(*ours) - right).abs() / size;
        assert!(error <= tolerance, "{what}: [{i}] is {ours}, must be {right}: {error:.1e} of {size}");
    }
}

fn inner(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// That <gradient, direction> is the slope of `loss` in that direction at `x`, by a central
/// difference.
#[track_caller]
fn assert_slope(what: &str, x: &[f32], gradient: &[f32], seed: u64, mut loss: impl FnMut(&[f32]) -> f64) {
    let direction = Numbers(seed).vec(x.len(), 1.0);
    let step = 1e-2;
    let mut moved = |by: f32| loss(&x.iter().zip(&direction).map(|(x, d)| x + by * d).collect::<Vec<_>>());
    let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
    let ours = inner(gradient, &direction);
    let size = (inner(gradient, gradient) * inner(&direction, &direction)).sqrt().max(1e-3);
    assert!((slope - ours).abs() < 2e-3 * size, "{what}: slope {slope}, gradient gives {ours}");
}

fn cpu() -> Cpu {
    Cpu::new(Some(2))
}

const LEFTOVER: f32 = f32::NAN;

#[test]
fn matmul_is_the_sum_of_products_in_all_its_ways() {
    let cpu = cpu();
    let shapes = [
        (1, 1, 1),
        (1, 97, 33),
        (97, 1, 33),
        (7, 33, 5),
        (7, 5, 2),
        (33, 97, 64),
        (130, 257, 300),
        (300, 70, 700),
        (0, 5, 3),
        (5, 0, 3),
        (4, 6, 0),
    ];
    for (m, n, k) in shapes {
        let mut random = Numbers((m * 1000 + n * 10 + k) as u64);
        let (a, b, before) = (random.vec(m * k, 1.0), random.vec(k * n, 1.0), random.vec(m * n, 1.0));
        for way in 0..8 {
            let (a_transposed, b_transposed, accumulate) = (way & 1 > 0, way & 2 > 0, way & 4 > 0);
            let mut right = Vec::new();
            for i in 0..m {
                for j in 0..n {
                    let a = |l: usize| f64::from(if a_transposed { a[l * m + i] } else { a[i * k + l] });
                    let b = |l: usize| f64::from(if b_transposed { b[j * k + l] } else { b[l * n + j] });
                    let sum: f64 = (0..k).map(|l| a(l) * b(l)).sum();
                    right.push(0.7 * sum + if accumulate { f64::from(before[i * n + j]) } else { 0.0 });
                }
            }
            let mut c = if accumulate { before.clone() } else { vec![LEFTOVER; m * n] };
            let how = Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha: 0.7 };
            cpu.matmul(&mut c, &a, &b, how).unwrap();
            assert_close(&format!("{how:?}"), &c, &right, 1e-5);
        }
    }
}

#[test]
fn rms_norm_and_its_gradients_are_candles() {
    let cpu = cpu();
    for (rows, width, size) in [(1, 1, 1.0), (7, 33, 1.0), (200, 64, 3.0), (300, 16, 1e-3), (5, 40, 1e15), (0, 8, 1.0)]
    {
        let mut random = Numbers((rows + width) as u64);
        let (x, weight, dy) = (random.vec(rows * width, size), random.vec(width, 1.0), random.vec(rows * width, 1.0));
        let eps = 1e-5;
        let (mut y, mut inverse) = (vec![LEFTOVER; rows * width], vec![LEFTOVER; rows]);
        cpu.rms_norm(&mut y, &mut inverse, &x, &weight, eps).unwrap();
        let (mut dx, mut dweight) = (vec![0.25 / size; rows * width], vec![0.5; width]);
        cpu.rms_norm_backward(&mut dx, &mut dweight, &dy, &x, &weight, &inverse).unwrap();
        if rows == 0 {
            assert_eq!(dweight, vec![0.5; width]);
            continue;
        }

        let (cx, cw) = (var(&x, &[rows, width]), var(&weight, &[width]));
        let mean = (cx.sqr().unwrap().mean_keepdim(D::Minus1).unwrap() + f64::from(eps)).unwrap();
        let right = cx.broadcast_div(&mean.sqrt().unwrap()).unwrap().broadcast_mul(&cw).unwrap();
        assert_close("y", &y, &numbers(&right), 1e-6);
        let [right_dx, right_dw] = gradients(&right, &dy, [&cx, &cw]);
        let added: Vec<f64> = right_dx.iter().map(|x| x + f64::from(0.25 / size)).collect();
        assert_close("dx", &dx, &added, 1e-5);
        assert_close("dweight", &dweight, &right_dw.iter().map(|x| x + 0.5).collect::<Vec<_>>(), 1e-5);
        if size == 1.0 && width > 1 {
            dx.iter_mut().for_each(|x| *x -= 0.25);
            assert_slope("dx", &x, &dx, 1, |x| {
                cpu.rms_norm(&mut y, &mut inverse, x, &weight, eps).unwrap();
                inner(&y, &dy)
            });
        }
    }
}

/// cos and sin of the angles of `seq` positions.
fn rope_table(seq: usize, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let angle = |t: usize, i: usize| t as f64 * 10_000_f64.powf(-((2 * i) as f64) / head_dim as f64);
    (0..seq)
        .flat_map(|t| (0..head_dim).map(move |i| if i < half { angle(t, i).cos() } else { angle(t, i - half).sin() }))
        .map(|x| x as f32)
        .collect()
}

/// <https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py>:
/// x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).
#[test]
fn rope_turns_as_hugging_faces_rotate_half_and_back() {
    let cpu = cpu();
    for (batch, seq, heads, head_dim) in [(1, 1, 1, 2), (2, 7, 6, 10), (3, 33, 2, 64), (0, 5, 2, 8)] {
        let x = Numbers(seq as u64).vec(batch * seq * heads * head_dim, 1.0);
        let table = rope_table(seq, head_dim);
        let mut turned = x.clone();
        cpu.rope(&mut turned, &table, heads, head_dim, false).unwrap();
        if batch > 0 {
            let half = head_dim / 2;
            let table = var(&table, &[seq, 1, head_dim]);
            let twice = |first: usize| {
                let part = table.narrow(2, first, half).unwrap();
                Tensor::cat(&[&part, &part], 2).unwrap()
            };
            let cx = var(&x, &[batch, seq, heads, head_dim]);
            let (x1, x2) = (cx.narrow(3, 0, half).unwrap(), cx.narrow(3, half, half).unwrap());
            let rotated = Tensor::cat(&[&x2.neg().unwrap(), &x1], 3).unwrap();
            let right = (cx.broadcast_mul(&twice(0)).unwrap() + rotated.broadcast_mul(&twice(half)).unwrap()).unwrap();
            assert_close("turned", &turned, &numbers(&right), 1e-6);
            let dout = Numbers(9).vec(x.len(), 1.0);
            let [right_dx] = gradients(&right, &dout, [&cx]);
            let mut dx = dout;
            cpu.rope(&mut dx, &rope_table(seq, head_dim), heads, head_dim, true).unwrap();
            assert_close("dx", &dx, &right_dx, 1e-6);
        }
        cpu.rope(&mut turned, &table, heads, head_dim, true).unwrap();
        assert_close("back", &turned, &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 1e-6);
    }
}

/// softmax(q·kᵀ/√D, causal)·v with whole T x T scores; and the log-sums.
fn candle_attention(q: &Tensor, k: &Tensor, v: &Tensor, shape: Attention) -> (Tensor, Tensor) {
    let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
    let repeat = |x: &Tensor| {
        let x = x.transpose(1, 2).unwrap().unsqueeze(2).unwrap();
        let x = x.broadcast_as((batch, kv_heads, heads / kv_heads, seq, head_dim)).unwrap();
        x.contiguous().unwrap().reshape((batch, heads, seq, head_dim)).unwrap()
    };
    let q = q.transpose(1, 2).unwrap().contiguous().unwrap();
    let scores = q.matmul(&repeat(k).transpose(2, 3).unwrap().contiguous().unwrap()).unwrap();
    let scores = (scores / (head_dim as f64).sqrt()).unwrap();
    let hidden = (0..seq * seq).map(|i| if i % seq > i / seq { -1e300 } else { 0.0 }).collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(hidden, (seq, seq), &Device::Cpu).unwrap()).unwrap();
    // Shifted by hand: the highest is a constant to autograd, as it may be.
    let highest = scores.max_keepdim(D::Minus1).unwrap().detach();
    let powers = scores.broadcast_sub(&highest).unwrap().exp().unwrap();
    let sums = powers.sum_keepdim(D::Minus1).unwrap();
    let out = powers.broadcast_div(&sums).unwrap().matmul(&repeat(v)).unwrap();
    (out.transpose(1, 2).unwrap().contiguous().unwrap(), (sums.log().unwrap() + highest).unwrap())
}

#[test]
fn attention_and_its_gradients_are_candles() {
    let cpu = cpu();
    let shapes =
        [(1, 1, 1, 1, 2), (2, 1, 6, 2, 8), (2, 7, 6, 2, 10), (1, 33, 6, 2, 16), (2, 65, 2, 2, 5), (1, 130, 4, 1, 32)];
    for (batch, seq, heads, kv_heads, head_dim) in shapes {
        let shape = Attention { batch, seq, heads, kv_heads, head_dim };
        let mut random = Numbers((seq + heads) as u64);
        let (queries, keys) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
        let (q, k, v) = (random.vec(queries, 3.0), random.vec(keys, 1.5), random.vec(keys, 1.0));
        let dout = random.vec(queries, 1.0);
        let (mut out, mut log_sums) = (vec![LEFTOVER; queries], vec![LEFTOVER; batch * heads * seq]);
        cpu.attention(&mut out, &mut log_sums, &q, &k, &v, shape).unwrap();
        let [mut dq, mut dk, mut dv] = [vec![LEFTOVER; queries], vec![LEFTOVER; keys], vec![LEFTOVER; keys]];
        cpu.attention_backward(&mut dq, &mut dk, &mut dv, &dout, &out, &log_sums, &q, &k, &v, shape).unwrap();

        let cq = var(&q, &[batch, seq, heads, head_dim]);
        let (ck, cv) = (var(&k, &[batch, seq, kv_heads, head_dim]), var(&v, &[batch, seq, kv_heads, head_dim]));
        let (right, right_sums) = candle_attention(&cq, &ck, &cv, shape);
        assert_close(&format!("out {shape:?}"), &out, &numbers(&right), 2e-6);
        assert_close(&format!("log_sums {shape:?}"), &log_sums, &numbers(&right_sums), 2e-6);
        let [right_dq, right_dk, right_dv] = gradients(&right, &dout, [&cq, &ck, &cv]);
        // With one position the softmax has nothing to weigh: dq and dk are 0 but for
        // rounding.
        let size = if seq == 1 { 1.0 } else { 0.0 };
        let with = |mut right: Vec<f64>| {
            right.push(size);
            right
        };
        dq.push(size as f32);
        dk.push(size as f32);
        assert_close(&format!("dq {shape:?}"), &dq, &with(right_dq), 1e-5);
        assert_close(&format!("dk {shape:?}"), &dk, &with(right_dk), 1e-5);
        assert_close(&format!("dv {shape:?}"), &dv, &right_dv, 1e-5);
        dq.pop();
        dk.pop();

        let mut loss = |q: &[f32], k: &[f32], v: &[f32]| {
            cpu.attention(&mut out, &mut log_sums, q, k, v, shape).unwrap();
            inner(&out, &dout)
        };
        assert_slope("dq", &q, &dq, 1, |q| loss(q, &k, &v));
        assert_slope("dk", &k, &dk, 2, |k| loss(&q, k, &v));
        assert_slope("dv", &v, &dv, 3, |v| loss(&q, &k, v));
    }
}

#[test]
fn attention_with_extreme_scores_looks_at_the_highest_only() {
    let (cpu, seq, head_dim) = (cpu(), 70, 4);
    let shape = Attention { batch: 1, seq, heads: 1, kv_heads: 1, head_dim };
    // Scores of up to a million, either sign.
    let (q, k) = (vec![1000.0; seq * head_dim], Numbers(4).vec(seq, 500.0));
    let k: Vec<f32> = k.iter().flat_map(|k| [*k; 4]).collect();
    let v: Vec<f32> = (0..seq * head_dim).map(|i| (i / head_dim) as f32).collect();
    let (mut out, mut log_sums) = (vec![LEFTOVER; seq * head_dim], vec![LEFTOVER; seq]);
    cpu.attention(&mut out, &mut log_sums, &q, &k, &v, shape).unwrap();
    for t in 0..seq {
        let highest = (0..=t).max_by(|a, b| k[a * head_dim].total_cmp(&k[b * head_dim])).unwrap();
        assert!((out[t * head_dim] - highest as f32).abs() < 1e-3, "{t}: {} not {highest}", out[t * head_dim]);
    }
    let mut d = [(); 3].map(|()| vec![LEFTOVER; seq * head_dim]);
    let [dq, dk, dv] = &mut d;
    cpu.attention_backward(dq, dk, dv, &v, &out, &log_sums, &q, &k, &v, shape).unwrap();
    assert!(d.iter().flatten().all(|d| d.is_finite()), "{d:?}");
}

#[test]
fn attention_of_no_sequence_does_nothing_and_of_no_position_neither() {
    let cpu = cpu();
    for shape in [
        Attention { batch: 0, seq: 7, heads: 6, kv_heads: 2, head_dim: 4 },
        Attention { batch: 2, seq: 0, heads: 6, kv_heads: 2, head_dim: 4 },
    ] {
        cpu.attention(&mut [], &mut [], &[], &[], &[], shape).unwrap();
        cpu.attention_backward(&mut [], &mut [], &mut [], &[], &[], &[], &[], &[], &[], shape).unwrap();
    }
}

#[test]
fn swiglu_and_its_gradients_are_candles() {
    let cpu = cpu();
    for (len, size) in [(1, 1.0), (33, 3.0), (40_001, 5.0), (64, 120.0), (0, 1.0)] {
        let mut random = Numbers(len as u64);
        let (gate, up, dout) = (random.vec(len, size), random.vec(len, 2.0), random.vec(len, 1.0));
        let mut out = vec![LEFTOVER; len];
        cpu.swiglu(&mut out, &gate, &up).unwrap();
        let (mut dgate, mut dup) = (gate.clone(), up.clone());
        cpu.swiglu_backward(&mut dgate, &mut dup, &dout).unwrap();
        if len == 0 {
            continue;
        }
        let (cg, cu) = (var(&gate, &[len]), var(&up, &[len]));
        let sigmoid = ((cg.neg().unwrap().exp().unwrap() + 1.0).unwrap()).recip().unwrap();
        let right = (&(cg.as_tensor() * sigmoid).unwrap() * cu.as_tensor()).unwrap();
        assert_close("out", &out, &numbers(&right), 1e-6);
        let [right_dgate, right_dup] = gradients(&right, &dout, [&cg, &cu]);
        assert_close("dgate", &dgate, &right_dgate, 1e-6);
        assert_close("dup", &dup, &right_dup, 1e-6);
        if size < 4.0 {
            assert_slope("dgate", &gate, &dgate, 1, |gate| {
                cpu.swiglu(&mut out, gate, &up).unwrap();
                inner(&out, &dout)
            });
        }
    }
}

#[test]
fn swiglu_of_huge_gates_is_zero_or_the_product_never_nan() {
    let (cpu, mut out) = (cpu(), [LEFTOVER; 6]);
    let gate = [-1e30, -200.0, -80.0, 80.0, 200.0, 1e30];
    cpu.swiglu(&mut out, &gate, &[2.0; 6]).unwrap();
    assert_eq!(out[3..], [160.0, 400.0, 2e30]);
    assert!(out[..3].iter().all(|x| x.abs() < 1e-30), "{out:?}");
    let (mut dgate, mut dup) = (gate, [2.0; 6]);
    cpu.swiglu_backward(&mut dgate, &mut dup, &[1.0; 6]).unwrap();
    assert_eq!((&dgate[3..], &dup[3..]), (&[2.0; 3][..], &gate[3..]));
    assert!(dgate[..3].iter().chain(&dup[..3]).all(|x| x.abs() < 1e-30), "{dgate:?} {dup:?}");
}

#[test]
fn embedding_takes_rows_and_its_gradient_adds_those_of_equal_tokens() {
    let cpu = cpu();
    for (vocab, width, count) in [(97, 33, 70), (5, 1, 40), (1000, 64, 2000), (9, 4, 0)] {
        let mut random = Numbers(vocab as u64);
        let (table, dout) = (random.vec(vocab * width, 1.0), random.vec(count * width, 1.0));
        let ids = random.tokens(count, vocab as u32);
        let tokens = cpu.tokens(&ids).unwrap();
        let mut out = vec![LEFTOVER; count * width];
        cpu.embedding(&mut out, &table, &tokens).unwrap();
        let mut dtable = vec![1.0; vocab * width];
        cpu.embedding_backward(&mut dtable, &dout, &tokens).unwrap();
        if count == 0 {
            assert!(dtable.iter().all(|x| *x == 1.0));
            continue;
        }
        let ct = var(&table, &[vocab, width]);
        let right = ct.index_select(&Tensor::new(&ids[..], &Device::Cpu).unwrap(), 0).unwrap();
        assert_close("out", &out, &numbers(&right), 0.0);
        let [right] = gradients(&right, &dout, [&ct]);
        assert_close("dtable", &dtable, &right.iter().map(|x| x + 1.0).collect::<Vec<_>>(), 1e-6);
    }
}

/// What is added to a sum of 0.
fn cross_entropy(
    cpu: &Cpu,
    logits: &mut [f32],
    targets: &Vec<u32>,
    first: usize,
    rows: usize,
    scale: f32,
) -> Result<f64, EngineError> {
    let mut sum = cpu.sum()?;
    cpu.cross_entropy(&mut sum, logits, targets, first, rows, scale)?;
    cpu.take(&mut sum)
}

fn sum_of_squares(cpu: &Cpu, x: &[f32]) -> Result<f64, EngineError> {
    let mut sum = cpu.sum()?;
    cpu.sum_of_squares(&mut sum, x)?;
    cpu.take(&mut sum)
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error_that_names_both() {
    let cpu = cpu();
    let tokens = cpu.tokens(&[1, 97, 2]).unwrap();
    let says = |error: EngineError| {
        let text = error.to_string();
        assert!(text.contains("token 97") && text.contains("vocabulary of 97"), "{text}");
    };
    says(cpu.embedding(&mut [0.0; 3 * 2], &[0.0; 97 * 2], &tokens).unwrap_err());
    says(cpu.embedding_backward(&mut [0.0; 97 * 2], &[0.0; 3 * 2], &tokens).unwrap_err());
    says(cross_entropy(&cpu, &mut [0.0; 3 * 97], &tokens, 0, 3, 1.0).unwrap_err());
    // What counts nothing as a target is no token to look up.
    let tokens = cpu.tokens(&[1, IGNORED]).unwrap();
    assert!(cpu.embedding(&mut [0.0; 2 * 2], &[0.0; 97 * 2], &tokens).is_err());
    assert!(cpu.embedding_backward(&mut [0.0; 97 * 2], &[0.0; 2 * 2], &tokens).is_err());
}

#[test]
fn cross_entropy_and_its_gradient_are_candles() {
    let cpu = cpu();
    for (rows, vocab, size) in [(1, 1, 1.0), (7, 97, 3.0), (33, 97, 80.0), (5, 1031, 1e4), (70, 500, 1.0)] {
        let mut random = Numbers((rows * vocab) as u64);
        let logits = random.vec(rows * vocab, size);
        // Other rows' targets lie before and after.
        let mut targets = random.tokens(rows + 5, vocab as u32);
        if rows > 5 {
            targets[3 + 1] = IGNORED;
            targets[3 + 5] = IGNORED;
        }
        let (mut ours, tokens) = (logits.clone(), cpu.tokens(&targets).unwrap());
        let loss = cross_entropy(&cpu, &mut ours, &tokens, 3, rows, 0.125).unwrap();

        let cl = var(&logits, &[rows, vocab]);
        let highest = cl.max_keepdim(1).unwrap().detach();
        let shifted = cl.broadcast_sub(&highest).unwrap();
        let log_sums = shifted.exp().unwrap().sum_keepdim(1).unwrap().log().unwrap();
        let log_softmax = shifted.broadcast_sub(&log_sums).unwrap();
        let chosen: Vec<f64> = targets[3..3 + rows]
            .iter()
            .flat_map(|target| (0..vocab).map(|i| if i as u32 == *target { -1.0 } else { 0.0 }))
            .collect();
        let right = (log_softmax * Tensor::from_vec(chosen, (rows, vocab), &Device::Cpu).unwrap()).unwrap();
        let right = right.sum_all().unwrap();
        let (right_loss, [mut right_gradient]) = (numbers(&right)[0], gradients(&right, &[0.125], [&cl]));
        assert!((loss - right_loss).abs() <= 1e-6 * right_loss.abs().max(1.0), "{loss} {right_loss}");
        ours.push(1.0);
        right_gradient.push(1.0);
        assert_close("dlogits", &ours, &right_gradient, 1e-6);
        ours.pop();
        if size < 4.0 {
            assert_slope("dlogits", &logits, &ours, 1, |logits| {
                0.125 * cross_entropy(&cpu, &mut logits.to_vec(), &tokens, 3, rows, 1.0).unwrap()
            });
        }
    }
    let none = cpu.tokens(&[]).unwrap();
    assert_eq!(cross_entropy(&cpu, &mut [], &none, 0, 0, 1.0).unwrap(), 0.0);
}

#[test]
fn a_logit_that_is_no_number_shows_in_the_loss() {
    let cpu = cpu();
    for place in [0, 5, 96] {
        let mut logits = vec![1.0; 97];
        logits[place] = f32::NAN;
        let tokens = cpu.tokens(&[7]).unwrap();
        assert!(cross_entropy(&cpu, &mut logits, &tokens, 0, 1, 1.0).unwrap().is_nan(), "{place}");
    }
}

/// worker/tests/fixtures/adamw.py made the numbers.
#[test]
fn adamw_is_torchs() {
    #[derive(serde::Deserialize)]
    struct Step {
        grad: Vec<f32>,
        param: Vec<f64>,
    }
    #[derive(serde::Deserialize)]
    struct Case {
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        grad_scale: f32,
        param: Vec<f32>,
        steps: Vec<Step>,
        exp_avg: Vec<f64>,
        exp_avg_sq: Vec<f64>,
    }
    #[derive(serde::Deserialize)]
    struct Fixture {
        cases: Vec<Case>,
    }
    let cpu = cpu();
    let fixture: Fixture = serde_json::from_str(include_str!("../../tests/fixtures/adamw.json")).unwrap();
    assert_eq!(fixture.cases.len(), 3);
    for case in fixture.cases {
        let Case { lr, beta1, beta2, eps, weight_decay, grad_scale, mut param, .. } = case;
        let (mut m, mut v) = (vec![0.0; param.len()], vec![0.0; param.len()]);
        for (index, step) in case.steps.iter().enumerate() {
            let how = AdamW { lr, beta1, beta2, eps, weight_decay, step: index as u64 + 1, grad_scale };
            cpu.adamw(&mut param, &step.grad, &mut m, &mut v, how).unwrap();
            for (ours, right) in param.iter().zip(&step.param) {
                let error = (f64::from(*ours) - right).abs();
                assert!(error <= 2e-6 * right.abs() + 2e-7, "step {}: {ours} {right}", index + 1);
            }
        }
        assert_close("exp_avg", &m, &case.exp_avg, 1e-6);
        assert_close("exp_avg_sq", &v, &case.exp_avg_sq, 1e-6);
    }
}

#[test]
fn sum_of_squares_is_in_f64() {
    let cpu = cpu();
    let x = Numbers(5).vec(200_003, 1.0);
    let right: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    assert!((sum_of_squares(&cpu, &x).unwrap() / right - 1.0).abs() < 1e-12);
    assert_eq!(sum_of_squares(&cpu, &[]).unwrap(), 0.0);
    // In f32 the first would be infinite, and the second lost beside it.
    assert_eq!(sum_of_squares(&cpu, &[1e30]).unwrap(), f64::from(1e30_f32) * f64::from(1e30_f32));
    let mut many = vec![1e-4; 1000];
    many.push(1e4);
    assert!((sum_of_squares(&cpu, &many).unwrap() - 1e8 - 1e-5).abs() < 1e-7);
    assert!(sum_of_squares(&cpu, &[f32::NAN]).unwrap().is_nan());
    assert!(sum_of_squares(&cpu, &[f32::INFINITY]).unwrap().is_infinite());
}

#[test]
fn fill_copy_and_add_reach_every_number() {
    let cpu = cpu();
    for len in [0, 1, 97, 70_001] {
        let (x, mut y) = (Numbers(len as u64).vec(len, 1.0), vec![0.0; len]);
        cpu.fill(&mut y, 2.5).unwrap();
        assert!(y.iter().all(|y| *y == 2.5));
        cpu.copy(&mut y, &x).unwrap();
        assert_eq!(y, x);
        cpu.add(&mut y, &x).unwrap();
        assert!(y.iter().zip(&x).all(|(y, x)| *y == x + x));
    }
}

#[test]
fn parts_of_a_buffer_are_its_numbers_and_it_begins_a_cache_line() {
    let cpu = cpu();
    for len in [0, 1, 15, 16, 1000] {
        let mut buffer = cpu.zeros(len, Precision::F32).unwrap();
        assert_eq!((cpu.len(&buffer), cpu.view(&buffer, 0..len)), (len, &vec![0.0; len][..]));
        assert_eq!(buffer.as_ptr().addr() % 64, 0);
        let upload: Vec<f32> = (0..len).map(|i| i as f32).collect();
        cpu.upload(cpu.view_mut(&mut buffer, 0..len), &upload).unwrap();
        let mut download = vec![0.0; len];
        cpu.download(cpu.view(&buffer, 0..len), &mut download).unwrap();
        assert_eq!(download, upload);
        let view = cpu.view_mut(&mut buffer, 0..len);
        let [first, second] = cpu.split(view, [len / 3, len - len / 3]);
        assert_eq!((&*first, &*second), upload.split_at(len / 3));
    }
}

#[test]
fn more_memory_than_there_is_is_an_error_that_says_how_much() {
    let text = cpu().zeros(1 << 60, Precision::F32).unwrap_err().to_string();
    assert!(text.contains("1152921504606846976") && text.contains("micro_batch_size"), "{text}");
}

/// Everything that comes out of each operation at sizes at which all threads get work.
fn everything(cpu: &Cpu) -> Vec<(&'static str, Vec<u32>)> {
    let mut out = Vec::new();
    let mut keep = |what, numbers: &[f32]| out.push((what, numbers.iter().map(|x| x.to_bits()).collect()));
    let mut random = Numbers(77);
    let (batch, seq, heads, kv_heads, head_dim, vocab) = (2, 130, 6, 2, 32, 997);
    let (rows, width) = (batch * seq, heads * head_dim);
    let (x, weight) = (random.vec(rows * width, 1.0), random.vec(width, 1.0));
    // The small ones have pieces for which gemm has other ways.
    let small = [(12, 100, 700), (64, 100, 1030), (81, 130, 1030), (3, 300, 1000), (300, 1, 5000), (170, 5, 2000)];
    let large = [(rows, width, width), (1000, 70, 1030), (70, 1000, 1030), (rows, vocab, width)];
    for (m, n, k) in small.into_iter().chain(large) {
        let (a, b) = (random.vec(m * k, 1.0), random.vec(k * n, 1.0));
        for way in 0..4 {
            let mut c = vec![0.0; m * n];
            let (a_transposed, b_transposed) = (way & 1 > 0, way & 2 > 0);
            let how = Matmul { m, n, k, a_transposed, b_transposed, accumulate: false, alpha: 1.0 };
            cpu.matmul(&mut c, &a, &b, how).unwrap();
            keep("matmul", &c);
        }
    }
    let (mut y, mut inverse) = (vec![0.0; rows * width], vec![0.0; rows]);
    cpu.rms_norm(&mut y, &mut inverse, &x, &weight, 1e-5).unwrap();
    keep("rms_norm", &y);
    let (mut dx, mut dweight) = (vec![0.0; rows * width], vec![0.0; width]);
    cpu.rms_norm_backward(&mut dx, &mut dweight, &y, &x, &weight, &inverse).unwrap();
    keep("rms_norm dx", &dx);
    keep("rms_norm dweight", &dweight);
    let mut q = x.clone();
    cpu.rope(&mut q, &rope_table(seq, head_dim), heads, head_dim, false).unwrap();
    keep("rope", &q);
    let keys = batch * seq * kv_heads * head_dim;
    let (k, v) = (random.vec(keys, 1.0), random.vec(keys, 1.0));
    let shape = Attention { batch, seq, heads, kv_heads, head_dim };
    let mut log_sums = vec![0.0; batch * heads * seq];
    cpu.attention(&mut y, &mut log_sums, &q, &k, &v, shape).unwrap();
    keep("attention", &y);
    let (mut dk, mut dv) = (vec![0.0; keys], vec![0.0; keys]);
    cpu.attention_backward(&mut dx, &mut dk, &mut dv, &x, &y, &log_sums, &q, &k, &v, shape).unwrap();
    keep("attention dq", &dx);
    keep("attention dk", &dk);
    keep("attention dv", &dv);
    cpu.swiglu(&mut y, &x, &q).unwrap();
    keep("swiglu", &y);
    let (mut gate, mut up) = (x.clone(), q.clone());
    cpu.swiglu_backward(&mut gate, &mut up, &y).unwrap();
    keep("swiglu dgate", &gate);
    keep("swiglu dup", &up);
    let tokens = cpu.tokens(&random.tokens(rows, vocab as u32)).unwrap();
    let mut dtable = vec![0.0; vocab * width];
    cpu.embedding_backward(&mut dtable, &x, &tokens).unwrap();
    keep("embedding dtable", &dtable);
    let mut logits = random.vec(rows * vocab, 3.0);
    let loss = cross_entropy(cpu, &mut logits, &tokens, 0, rows, 1.0).unwrap();
    keep("dlogits", &logits);
    keep("loss", &[loss as f32, (loss - f64::from(loss as f32)) as f32]);
    let squares = sum_of_squares(cpu, &logits).unwrap();
    keep("sum_of_squares", &[squares as f32, (squares - f64::from(squares as f32)) as f32]);
    let how = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: 3, grad_scale: 0.5 };
    let (mut m, mut v) = (vec![0.1; rows * width], vec![0.1; rows * width]);
    cpu.adamw(&mut y, &x, &mut m, &mut v, how).unwrap();
    keep("adamw", &y);
    out
}

#[test]
fn another_number_of_threads_gives_the_same_bits() {
    let right = everything(&Cpu::new(Some(1)));
    for threads in [2, 3, 8] {
        let cpu = Cpu::new(Some(threads));
        assert_eq!(cpu.threads(), threads);
        for ((what, ours), (_, right)) in everything(&cpu).iter().zip(&right) {
            assert!(ours == right, "{what} with {threads} threads");
        }
    }
}

#[test]
fn ranks_that_are_threads_of_one_process_share_the_engine() {
    let right = everything(&Cpu::new(None));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert!(everything(&Cpu::new(None)) == right));
        }
    });
}
