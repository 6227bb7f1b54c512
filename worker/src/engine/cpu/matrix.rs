//! Matrices that lie with gaps between their rows, cut into parts that several threads
//! write at once, and their product by the `gemm` crate. What is unsafe about that is
//! here, and the rest of the engine is not.

use std::marker::PhantomData;

/// A matrix to read: number (i, j) lies at `i * row + j * column`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    start: *const f32,
    rows: usize,
    columns: usize,
    row: usize,
    column: usize,
    numbers: PhantomData<&'a [f32]>,
}

/// A matrix to write, whose rows are without gaps.
#[derive(Debug)]
pub(super) struct MatrixMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row: usize,
    numbers: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a shared slice in all but shape.
unsafe impl Send for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Sync for Matrix<'_> {}
// SAFETY: it is the only way to its numbers, as an exclusive slice is.
unsafe impl Send for MatrixMut<'_> {}

impl<'a> Matrix<'a> {
    /// `rows` x `columns`, `row` numbers from one row to the next.
    pub(super) fn new(numbers: &'a [f32], rows: usize, columns: usize, row: usize) -> Matrix<'a> {
        assert!(fits(numbers.len(), rows, columns, row), "{rows} x {columns} of {}", numbers.len());
        Matrix { start: numbers.as_ptr(), rows, columns, row, column: 1, numbers: PhantomData }
    }

    pub(super) fn transposed(self) -> Matrix<'a> {
        Matrix { rows: self.columns, columns: self.rows, row: self.column, column: self.row, ..self }
    }

    pub(super) fn rows(self, first: usize, count: usize) -> Matrix<'a> {
        assert!(first + count <= self.rows);
        Matrix { start: self.start.wrapping_add(first * self.row), rows: count, ..self }
    }

    pub(super) fn columns(self, first: usize, count: usize) -> Matrix<'a> {
        self.transposed().rows(first, count).transposed()
    }

    /// One row; only of a matrix that is not transposed.
    pub(super) fn get(self, row: usize) -> &'a [f32] {
        assert!(row < self.rows && self.column == 1);
        // SAFETY: `new` checked that all rows lie within what is borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.row), self.columns) }
    }
}

impl<'a> MatrixMut<'a> {
    /// `rows` x `columns`, `row` numbers from one row to the next.
    pub(super) fn new(numbers: &'a mut [f32], rows: usize, columns: usize, row: usize) -> MatrixMut<'a> {
        assert!(fits(numbers.len(), rows, columns, row), "{rows} x {columns} of {}", numbers.len());
        MatrixMut { start: numbers.as_mut_ptr(), rows, columns, row, numbers: PhantomData }
    }

    /// Rows and columns.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The first `count` rows, and the others.
    pub(super) fn split_rows(self, count: usize) -> (MatrixMut<'a>, MatrixMut<'a>) {
        assert!(count <= self.rows);
        let start = self.start.wrapping_add(count * self.row);
        (MatrixMut { rows: count, ..self }, MatrixMut { start, rows: self.rows - count, ..self })
    }

    /// The first `count` columns, and the others.
    pub(super) fn split_columns(self, count: usize) -> (MatrixMut<'a>, MatrixMut<'a>) {
        assert!(count <= self.columns);
        let start = self.start.wrapping_add(count);
        (MatrixMut { columns: count, ..self }, MatrixMut { start, columns: self.columns - count, ..self })
    }

    /// Pieces of `width` columns, the last one what is left.
    pub(super) fn cut_columns(self, width: usize) -> impl Iterator<Item = MatrixMut<'a>> {
        let mut rest = Some(self);
        std::iter::from_fn(move || {
            let whole = rest.take().filter(|rest| rest.columns > 0)?;
            let count = width.min(whole.columns);
            let (piece, other) = whole.split_columns(count);
            rest = Some(other);
            Some(piece)
        })
    }

    /// Rows `first..first + count` for a while.
    pub(super) fn rows(&mut self, first: usize, count: usize) -> MatrixMut<'_> {
        assert!(first + count <= self.rows);
        MatrixMut { start: self.start.wrapping_add(first * self.row), rows: count, ..*self }
    }

    /// Columns `first..first + count` for a while.
    pub(super) fn columns(&mut self, first: usize, count: usize) -> MatrixMut<'_> {
        assert!(first + count <= self.columns);
        MatrixMut { start: self.start.wrapping_add(first), columns: count, ..*self }
    }

    /// One row.
    pub(super) fn get(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: `new` checked that all rows lie within what is borrowed for 'a, and that
        // no two share a number; columns that were split off are nobody's but theirs.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row), self.columns) }
    }

    /// self = alpha · a · b, or += if `add`.
    pub(super) fn product(self, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, add: bool) {
        assert!(a.rows == self.rows && b.columns == self.columns && a.columns == b.rows);
        let before = 1.0;
        // SAFETY: all three lie within slices that are borrowed meanwhile, as `new` and
        // the cutting checked; this one exclusively, so it overlaps neither factor.
        unsafe {
            gemm::gemm(
                self.rows,
                self.columns,
                a.columns,
                self.start,
                1,
                self.row as isize,
                add,
                a.start,
                a.column as isize,
                a.row as isize,
                b.start,
                b.column as isize,
                b.row as isize,
                before,
                alpha,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

fn fits(len: usize, rows: usize, columns: usize, row: usize) -> bool {
    columns <= row && (rows == 0 || (rows - 1) * row + columns <= len)
}
