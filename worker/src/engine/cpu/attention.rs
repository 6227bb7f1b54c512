//! Causal attention of grouped queries, head by head and in blocks of queries: no more
//! than a block's scores exist at once, and of those only the ones that count.

use std::cell::RefCell;

use super::matrix::{Matrix, MatrixMut};
use super::simd::{self, dot};
use super::threads::Threads;
use crate::engine::Attention;

/// Queries whose scores are computed together.
const BLOCK: usize = 64;

/// The blocks of queries, and how many keys the last query of each sees.
fn blocks(seq: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..seq).step_by(BLOCK).map(move |first| {
        let count = BLOCK.min(seq - first);
        (first, count, first + count)
    })
}

/// Head by head, what lies position by position.
fn heads<'a>(numbers: &'a [f32], shape: Attention, heads: usize) -> impl Fn(usize, usize) -> Matrix<'a> {
    let Attention { seq, head_dim, .. } = shape;
    let row = heads * head_dim;
    move |batch, head| {
        Matrix::new(&numbers[batch * seq * row..][..seq * row], seq, row, row).columns(head * head_dim, head_dim)
    }
}

/// Likewise, `together` heads at a time, to write.
fn heads_mut(
    numbers: &mut [f32],
    shape: Attention,
    heads: usize,
    together: usize,
) -> impl Iterator<Item = MatrixMut<'_>> {
    let Attention { seq, head_dim, .. } = shape;
    let row = heads * head_dim;
    let sequences = numbers.chunks_exact_mut((seq * row).max(1));
    sequences.flat_map(move |numbers| MatrixMut::new(numbers, seq, row, row).cut_columns(together * head_dim))
}

fn check(shape: Attention, queries: &[usize], keys: &[usize], log_sums: usize) {
    let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
    assert!(kv_heads > 0 && head_dim > 0 && heads.is_multiple_of(kv_heads), "{shape:?}");
    assert!(queries.iter().all(|len| *len == batch * seq * heads * head_dim), "{shape:?} {queries:?}");
    assert!(keys.iter().all(|len| *len == batch * seq * kv_heads * head_dim), "{shape:?} {keys:?}");
    assert!(log_sums == batch * heads * seq, "{shape:?} {log_sums}");
}

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Numbers of this thread that hold anything.
fn with_scratch(len: usize, work: impl FnOnce(&mut [f32])) {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(len.max(scratch.len()), 0.0);
        work(&mut scratch[..len]);
    });
}

pub(super) fn forward(
    threads: &Threads,
    out: &mut [f32],
    log_sums: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    shape: Attention,
) {
    check(shape, &[out.len(), q.len()], &[k.len(), v.len()], log_sums.len());
    let (seq, group, scale) = (shape.seq, shape.heads / shape.kv_heads, 1.0 / (shape.head_dim as f32).sqrt());
    let (q, k, v) = (heads(q, shape, shape.heads), heads(k, shape, shape.kv_heads), heads(v, shape, shape.kv_heads));
    let tasks = heads_mut(out, shape, shape.heads, 1).zip(log_sums.chunks_exact_mut(seq.max(1))).enumerate();
    threads.run(tasks, |(index, (mut out, log_sums))| {
        let (batch, head) = (index / shape.heads, index % shape.heads);
        let (q, k, v) = (q(batch, head), k(batch, head / group), v(batch, head / group));
        with_scratch(BLOCK.min(seq) * seq, |scratch| {
            for (first, count, seen) in blocks(seq) {
                let weights = &mut scratch[..count * seen];
                MatrixMut::new(weights, count, seen, seen).product(
                    q.rows(first, count),
                    k.rows(0, seen).transposed(),
                    scale,
                    false,
                );
                let log_sums = &mut log_sums[first..first + count];
                let mut inverse = [0.0; BLOCK];
                simd::run(
                    #[inline(always)]
                    || {
                        for (i, row) in weights.chunks_exact_mut(seen).enumerate() {
                            let (row, hidden) = row.split_at_mut(first + i + 1);
                            let (highest, sum) = simd::exponentials(row);
                            hidden.fill(0.0);
                            log_sums[i] = highest + sum.ln();
                            inverse[i] = 1.0 / sum;
                        }
                    },
                );
                let mut out = out.rows(first, count);
                out.rows(0, count).product(Matrix::new(weights, count, seen, seen), v.rows(0, seen), 1.0, false);
                simd::run(
                    #[inline(always)]
                    || (0..count).for_each(|i| out.get(i).iter_mut().for_each(|out| *out *= inverse[i])),
                );
            }
        });
    });
}

#[expect(clippy::too_many_arguments, reason = "each is another operand")]
pub(super) fn backward(
    threads: &Threads,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
    dout: &[f32],
    out: &[f32],
    log_sums: &[f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    shape: Attention,
) {
    check(shape, &[dq.len(), dout.len(), out.len(), q.len()], &[dk.len(), dv.len(), k.len(), v.len()], log_sums.len());
    let (seq, group, width) = (shape.seq, shape.heads / shape.kv_heads, shape.head_dim);
    let scale = 1.0 / (width as f32).sqrt();
    let (q, k, v) = (heads(q, shape, shape.heads), heads(k, shape, shape.kv_heads), heads(v, shape, shape.kv_heads));
    let (dout, out) = (heads(dout, shape, shape.heads), heads(out, shape, shape.heads));
    // A key-value head's gradient is the sum over its query heads: one task.
    let tasks = heads_mut(dq, shape, shape.heads, group)
        .zip(heads_mut(dk, shape, shape.kv_heads, 1).zip(heads_mut(dv, shape, shape.kv_heads, 1)))
        .enumerate();
    threads.run(tasks, |(index, (mut dq, (mut dk, mut dv)))| {
        let (batch, kv_head) = (index / shape.kv_heads, index % shape.kv_heads);
        let (k, v) = (k(batch, kv_head), v(batch, kv_head));
        (0..seq).for_each(|t| {
            dk.get(t).fill(0.0);
            dv.get(t).fill(0.0);
        });
        with_scratch(2 * BLOCK.min(seq) * seq, |scratch| {
            for member in 0..group {
                let head = kv_head * group + member;
                let (q, dout, out) = (q(batch, head), dout(batch, head), out(batch, head));
                let log_sums = &log_sums[(batch * shape.heads + head) * seq..][..seq];
                for (first, count, seen) in blocks(seq) {
                    let (weights, dweights) = scratch[..2 * count * seen].split_at_mut(count * seen);
                    let (q, dout) = (q.rows(first, count), dout.rows(first, count));
                    let (k, v) = (k.rows(0, seen), v.rows(0, seen));
                    MatrixMut::new(weights, count, seen, seen).product(q, k.transposed(), scale, false);
                    MatrixMut::new(dweights, count, seen, seen).product(dout, v.transposed(), 1.0, false);
                    simd::run(
                        #[inline(always)]
                        || {
                            let rows = weights.chunks_exact_mut(seen).zip(dweights.chunks_exact_mut(seen)).enumerate();
                            for (i, (weights, dweights)) in rows {
                                let (weights, hidden) = weights.split_at_mut(first + i + 1);
                                let (dweights, dhidden) = dweights.split_at_mut(first + i + 1);
                                hidden.fill(0.0);
                                dhidden.fill(0.0);
                                // What the softmax's own normalisation takes back.
                                let own = dot(dout.get(i), out.get(first + i));
                                let log_sum = log_sums[first + i];
                                for (weight, dweight) in weights.iter_mut().zip(dweights) {
                                    *weight = simd::exp(*weight - log_sum);
                                    *dweight = *weight * (*dweight - own) * scale;
                                }
                            }
                        },
                    );
                    let weights = Matrix::new(weights, count, seen, seen);
                    let dscores = Matrix::new(dweights, count, seen, seen);
                    dv.rows(0, seen).product(weights.transposed(), dout, 1.0, true);
                    dk.rows(0, seen).product(dscores.transposed(), q, 1.0, true);
                    dq.columns(member * width, width).rows(first, count).product(dscores, k, 1.0, false);
                }
            }
        });
    });
}
