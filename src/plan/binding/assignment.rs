//! The assignment problem: each row gets one column of its own, so that the sum
//! is the greatest. Kuhn's and Munkres' method in its form with potentials, in a
//! time that grows with the third power.

/// The column of each of `size` rows; `worth(row, column)`.
pub(super) fn best(size: usize, worth: impl Fn(usize, usize) -> i64) -> Vec<usize> {
    // Row and column 0 stand for none.
    let mut of_row = vec![0i64; size + 1];
    let mut of_column = vec![0i64; size + 1];
    let mut owner = vec![0usize; size + 1];
    for row in 1..=size {
        owner[0] = row;
        let mut column = 0;
        let mut slack = vec![i64::MAX; size + 1];
        let mut before = vec![0usize; size + 1];
        let mut done = vec![false; size + 1];
        // The cheapest path from this row to a column that nobody has.
        while owner[column] != 0 {
            done[column] = true;
            let from = owner[column];
            let (mut least, mut next) = (i64::MAX, 0);
            for to in 1..=size {
                if done[to] {
                    continue;
                }
                let cost = -worth(from - 1, to - 1) - of_row[from] - of_column[to];
                if cost < slack[to] {
                    slack[to] = cost;
                    before[to] = column;
                }
                if slack[to] < least {
                    least = slack[to];
                    next = to;
                }
            }
            for to in 0..=size {
                if done[to] {
                    of_row[owner[to]] += least;
                    of_column[to] -= least;
                } else if slack[to] != i64::MAX {
                    slack[to] -= least;
                }
            }
            column = next;
        }
        while column != 0 {
            owner[column] = owner[before[column]];
            column = before[column];
        }
    }
    let mut chosen = vec![0; size];
    for (column, row) in owner.iter().enumerate().skip(1) {
        if let Some(row) = row.checked_sub(1) {
            chosen[row] = column - 1;
        }
    }
    chosen
}
