//! What goes row by row or number by number.

use super::simd::{self, dot};
use super::threads::Threads;
use crate::engine::{AdamW, Factors, IGNORED, Result, check_tokens};

/// Rows whose contributions to the gradient of a norm's weight are summed up first, however
/// many threads there are.
const ROWS: usize = 128;

/// Numbers whose squares are summed up first.
const NUMBERS: usize = 1 << 16;

/// How many rows of `width` there are.
fn rows(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} numbers in rows of {width}");
    len / width
}

pub(super) fn fill(threads: &Threads, x: &mut [f32], value: f32) {
    let piece = threads.piece(x.len(), 1);
    threads.run(x.chunks_mut(piece), |x| x.fill(value));
}

pub(super) fn copy(threads: &Threads, y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len());
    let piece = threads.piece(x.len(), 1);
    threads.run(y.chunks_mut(piece).zip(x.chunks(piece)), |(y, x)| y.copy_from_slice(x));
}

pub(super) fn add(threads: &Threads, y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len());
    let piece = threads.piece(x.len(), 1);
    threads.run(y.chunks_mut(piece).zip(x.chunks(piece)), |(y, x)| {
        simd::run(
            #[inline(always)]
            || y.iter_mut().zip(x).for_each(|(y, x)| *y += x),
        );
    });
}

pub(super) fn sum_of_squares(threads: &Threads, x: &[f32]) -> f64 {
    let mut sums = vec![0.0; x.len().div_ceil(NUMBERS)];
    threads.run(sums.iter_mut().zip(x.chunks(NUMBERS)), |(sum, x)| {
        *sum = simd::run(
            #[inline(always)]
            || simd::sum_of_squares(x),
        )
    });
    sums.iter().sum()
}

pub(super) fn rms_norm(threads: &Threads, y: &mut [f32], inverse_rms: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    let rows = rows(x.len(), width);
    assert!(y.len() == x.len() && inverse_rms.len() == rows);
    let piece = threads.piece(rows, 2 * width);
    let tasks = y.chunks_mut(piece * width).zip(inverse_rms.chunks_mut(piece)).zip(x.chunks(piece * width));
    threads.run(tasks, |((y, inverse_rms), x)| {
        simd::run(
            #[inline(always)]
            || {
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(inverse_rms);
                for ((y, x), inverse) in rows {
                    *inverse = 1.0 / (dot(x, x) / width as f32 + eps).sqrt();
                    y.iter_mut().zip(x).zip(weight).for_each(|((y, x), w)| *y = x * *inverse * w);
                }
            },
        );
    });
}

pub(super) fn rms_norm_backward(
    threads: &Threads,
    dx: &mut [f32],
    dweight: &mut [f32],
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    inverse_rms: &[f32],
) {
    let width = weight.len();
    let rows = rows(x.len(), width);
    assert!(dx.len() == x.len() && dy.len() == x.len() && inverse_rms.len() == rows && dweight.len() == width);
    let mut sums = vec![0.0; rows.div_ceil(ROWS) * width];
    let tasks = dx
        .chunks_mut(ROWS * width)
        .zip(sums.chunks_exact_mut(width))
        .zip(dy.chunks(ROWS * width).zip(x.chunks(ROWS * width)).zip(inverse_rms.chunks(ROWS)));
    threads.run(tasks, |((dx, sums), ((dy, x), inverse_rms))| {
        simd::run(
            #[inline(always)]
            || {
                let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width)).zip(x.chunks_exact(width));
                for (((dx, dy), x), inverse) in rows.zip(inverse_rms) {
                    let dot = simd::dot3(dy, weight, x);
                    let along = dot * inverse * inverse * inverse / width as f32;
                    let numbers = dx.iter_mut().zip(&mut *sums).zip(dy.iter().zip(x).zip(weight));
                    for ((dx, sum), ((dy, x), w)) in numbers {
                        *dx += dy * w * inverse - x * along;
                        *sum += dy * x * inverse;
                    }
                }
            },
        );
    });
    for sums in sums.chunks_exact(width) {
        dweight.iter_mut().zip(sums).for_each(|(dweight, sum)| *dweight += sum);
    }
}

pub(super) fn rope(threads: &Threads, x: &mut [f32], table: &[f32], heads: usize, head_dim: usize, back: bool) {
    assert!(heads > 0 && head_dim > 0 && head_dim.is_multiple_of(2));
    let (positions, half) = (rows(x.len(), heads * head_dim), head_dim / 2);
    let seq = rows(table.len(), head_dim);
    assert!(positions == 0 || seq > 0 && positions.is_multiple_of(seq), "{positions} positions of {seq}");
    let sign = if back { -1.0 } else { 1.0 };
    let piece = threads.piece(positions, heads * head_dim);
    threads.run(x.chunks_mut(piece * heads * head_dim).enumerate(), |(index, x)| {
        simd::run(
            #[inline(always)]
            || {
                for (i, position) in x.chunks_exact_mut(heads * head_dim).enumerate() {
                    let (cos, sin) = table[(index * piece + i) % seq * head_dim..][..head_dim].split_at(half);
                    for head in position.chunks_exact_mut(head_dim) {
                        let (real, imaginary) = head.split_at_mut(half);
                        for ((r, i), (cos, sin)) in real.iter_mut().zip(imaginary).zip(cos.iter().zip(sin)) {
                            let sin = sin * sign;
                            (*r, *i) = (*r * cos - *i * sin, *i * cos + *r * sin);
                        }
                    }
                }
            },
        );
    });
}

pub(super) fn swiglu(threads: &Threads, out: &mut [f32], gate: &[f32], up: &[f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    let piece = threads.piece(out.len(), 4);
    threads.run(out.chunks_mut(piece).zip(gate.chunks(piece)).zip(up.chunks(piece)), |((out, gate), up)| {
        simd::run(
            #[inline(always)]
            || {
                out.iter_mut().zip(gate).zip(up).for_each(|((out, g), u)| *out = g * simd::sigmoid(*g) * u);
            },
        );
    });
}

pub(super) fn swiglu_backward(threads: &Threads, gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
    assert!(gate.len() == dout.len() && up.len() == dout.len());
    let piece = threads.piece(dout.len(), 4);
    threads.run(gate.chunks_mut(piece).zip(up.chunks_mut(piece)).zip(dout.chunks(piece)), |((gate, up), dout)| {
        simd::run(
            #[inline(always)]
            || {
                for ((g, u), d) in gate.iter_mut().zip(up).zip(dout) {
                    let sigmoid = simd::sigmoid(*g);
                    let silu = *g * sigmoid;
                    (*g, *u) = (d * *u * (sigmoid + silu * (1.0 - sigmoid)), d * silu);
                }
            },
        );
    });
}

pub(super) fn embedding(threads: &Threads, out: &mut [f32], table: &[f32], tokens: &[u32]) -> Result<()> {
    if tokens.is_empty() {
        return Ok(());
    }
    let width = rows(out.len(), tokens.len());
    check_tokens(tokens.iter(), rows(table.len(), width))?;
    let piece = threads.piece(tokens.len(), width);
    threads.run(out.chunks_mut(piece * width).zip(tokens.chunks(piece)), |(out, tokens)| {
        for (out, token) in out.chunks_exact_mut(width).zip(tokens) {
            out.copy_from_slice(&table[*token as usize * width..][..width]);
        }
    });
    Ok(())
}

pub(super) fn embedding_backward(threads: &Threads, dtable: &mut [f32], dout: &[f32], tokens: &[u32]) -> Result<()> {
    if tokens.is_empty() {
        return Ok(());
    }
    let width = rows(dout.len(), tokens.len());
    let vocab = rows(dtable.len(), width);
    check_tokens(tokens.iter(), vocab)?;
    // Each thread looks for the tokens of its part of the table.
    let piece = vocab.div_ceil(threads.pieces(dout.len()));
    threads.run(dtable.chunks_mut(piece * width).enumerate(), |(index, dtable)| {
        simd::run(
            #[inline(always)]
            || {
                for (dout, token) in dout.chunks_exact(width).zip(tokens) {
                    let row = (*token as usize)
                        .checked_sub(index * piece)
                        .and_then(|row| dtable.get_mut(row * width..(row + 1) * width));
                    row.into_iter().flatten().zip(dout).for_each(|(to, d)| *to += d);
                }
            },
        );
    });
    Ok(())
}

pub(super) fn cross_entropy(threads: &Threads, logits: &mut [f32], targets: &[u32], scale: f32) -> Result<f64> {
    if targets.is_empty() {
        return Ok(0.0);
    }
    let vocab = rows(logits.len(), targets.len());
    check_tokens(targets.iter().filter(|target| **target != IGNORED), vocab)?;
    let mut losses = vec![0.0; targets.len()];
    let piece = threads.piece(targets.len(), 4 * vocab);
    let tasks = logits.chunks_mut(piece * vocab).zip(losses.chunks_mut(piece)).zip(targets.chunks(piece));
    threads.run(tasks, |((logits, losses), targets)| {
        simd::run(
            #[inline(always)]
            || {
                for ((row, loss), target) in logits.chunks_exact_mut(vocab).zip(losses).zip(targets) {
                    if *target == IGNORED {
                        row.fill(0.0);
                        continue;
                    }
                    let target = *target as usize;
                    let own = row[target];
                    let (highest, sum) = simd::exponentials(row);
                    *loss = f64::from(sum).ln() + f64::from(highest - own);
                    let factor = scale / sum;
                    row.iter_mut().for_each(|x| *x *= factor);
                    row[target] -= scale;
                }
            },
        );
    });
    Ok(losses.iter().sum())
}

pub(super) fn adamw(threads: &Threads, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], how: AdamW) {
    assert!(grad.len() == param.len() && m.len() == param.len() && v.len() == param.len() && how.step > 0);
    let (Factors { keep, size, root, beta1, new1, beta2, new2, eps }, grad_scale) = (how.factors(), how.grad_scale);
    let piece = threads.piece(param.len(), 4);
    let tasks = param.chunks_mut(piece).zip(grad.chunks(piece)).zip(m.chunks_mut(piece)).zip(v.chunks_mut(piece));
    threads.run(tasks, |(((param, grad), m), v)| {
        simd::run(
            #[inline(always)]
            || {
                for (((p, g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
                    let g = g * grad_scale;
                    *m = beta1 * *m + new1 * g;
                    *v = beta2 * *v + new2 * g * g;
                    *p = *p * keep - size * *m / (v.sqrt() / root + eps);
                }
            },
        );
    });
}
