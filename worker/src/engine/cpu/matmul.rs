//! Products of whole matrices, divided among the threads.

use super::matrix::{Matrix, MatrixMut};
use super::threads::Threads;
use crate::engine::Matmul;

/// A piece of C has more rows and columns than this, where it is cut at all: `gemm` takes
/// another way, with other roundings, for those that have not.
const LEAST: usize = 65;

pub(super) fn matmul(threads: &Threads, c: &mut [f32], a: &[f32], b: &[f32], how: Matmul) {
    let Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha } = how;
    assert!(c.len() == m * n && a.len() == m * k && b.len() == k * n, "{how:?}");
    let a = if a_transposed { Matrix::new(a, k, m, m).transposed() } else { Matrix::new(a, m, k, k) };
    let b = if b_transposed { Matrix::new(b, n, k, k).transposed() } else { Matrix::new(b, k, n, n) };
    let c = MatrixMut::new(c, m, n, n);

    // Each piece packs what it reads of both factors; the one that is harder to pack is
    // read only once if the cut goes through it.
    let work = m.saturating_mul(n).saturating_mul(k) / 8;
    let cut = |size: usize| threads.piece(size, work / size.max(1)).max(LEAST).next_multiple_of(16);
    let (rows, columns) = if a_transposed && m >= 2 * LEAST { (cut(m), n) } else { (m, cut(n)) };
    let (rows, columns) = (if columns >= n { cut(m) } else { rows }, columns);
    let cuts = c.cut_rows(rows.max(1)).zip((0..m).step_by(rows.max(1)));
    let pieces = cuts.flat_map(|(c, i)| {
        c.cut_columns(columns.max(1)).zip((0..n).step_by(columns.max(1))).map(move |(c, j)| (c, i, j))
    });
    threads.run(pieces, |(c, i, j)| {
        let (rows, columns) = c.shape();
        c.product(a.rows(i, rows), b.columns(j, columns), alpha, accumulate);
    });
}
