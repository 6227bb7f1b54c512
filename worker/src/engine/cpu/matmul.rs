//! Products of whole matrices, divided among the threads.

use super::matrix::{Matrix, MatrixMut};
use super::threads::Threads;
use crate::engine::Matmul;

/// A piece of C has at least so many rows or columns where it is cut, and [`OTHERS`] of the
/// others: `gemm` takes other ways, with other roundings, for less.
const LEAST: usize = 65;

/// See [`LEAST`].
const OTHERS: usize = 4;

/// Pieces begin at multiples of this.
const STEP: usize = 16;

/// The lengths of so many pieces, or of fewer, that differ by little.
fn cut(size: usize, others: usize, pieces: usize) -> Vec<usize> {
    let pieces = if others < OTHERS { 1 } else { pieces.min(size / (LEAST + STEP)).max(1) };
    let begin = |i: usize| if i == pieces { size } else { size * i / pieces / STEP * STEP };
    (0..pieces).map(|i| begin(i + 1) - begin(i)).collect()
}

pub(super) fn matmul(threads: &Threads, c: &mut [f32], a: &[f32], b: &[f32], how: Matmul) {
    let Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha } = how;
    assert!(c.len() == m * n && a.len() == m * k && b.len() == k * n, "{how:?}");
    let a = if a_transposed { Matrix::new(a, k, m, m).transposed() } else { Matrix::new(a, m, k, k) };
    let b = if b_transposed { Matrix::new(b, n, k, k).transposed() } else { Matrix::new(b, k, n, n) };
    let c = MatrixMut::new(c, m, n, n);

    // Each piece packs what it reads of both factors; the one that is harder to pack is
    // read only once if the cut goes through it.
    let count = threads.pieces(m.saturating_mul(n).saturating_mul(k) / 8);
    let by_rows = (cut(m, n, count), vec![n]);
    let by_columns = (vec![m], cut(n, m, count));
    let ways = if a_transposed { [by_rows, by_columns] } else { [by_columns, by_rows] };
    let [first, second] = ways;
    let pieces = |way: &(Vec<usize>, Vec<usize>)| way.0.len() * way.1.len();
    let (rows, columns) = if pieces(&second) > pieces(&first) { second } else { first };
    let mut pieces = Vec::new();
    let (mut rest, mut i) = (c, 0);
    for rows in rows {
        let (mut across, below) = rest.split_rows(rows);
        let mut j = 0;
        for columns in &columns {
            let (piece, beside) = across.split_columns(*columns);
            pieces.push((piece, i, j));
            (across, j) = (beside, j + columns);
        }
        (rest, i) = (below, i + rows);
    }
    threads.run(pieces.into_iter(), |(c, i, j)| {
        let (rows, columns) = c.shape();
        c.product(a.rows(i, rows), b.columns(j, columns), alpha, accumulate);
    });
}
