//! A flat range of a tensor as boxes: a rank holds a range of a unit's numbers, PyTorch's
//! format knows boxes (offsets and sizes in every dimension) only.

use std::ops::Range;

/// A box of a tensor whose numbers follow each other in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Where it begins, in every dimension.
    pub offsets: Vec<usize>,
    /// How far it goes, in every dimension.
    pub sizes: Vec<usize>,
    /// The same numbers in the flattened tensor.
    pub range: Range<usize>,
}

/// The fewest boxes, each of consecutive numbers, that make up `range` of the flattened
/// tensor, in order: at most three for a matrix, `2 * dimensions - 1` in general. None for
/// an empty range. The range must lie within the tensor.
#[must_use]
pub fn boxes(shape: &[usize], range: Range<usize>) -> Vec<Chunk> {
    let numbers = shape.iter().product::<usize>();
    assert!(range.end <= numbers, "range {range:?} of a tensor of {numbers} numbers, shape {shape:?}");
    let mut found = Vec::new();
    if !range.is_empty() {
        divide(shape, &mut Vec::new(), 0, range, &mut found);
    }
    found
}

/// `prefix` fixes the outer dimensions; `range` lies within the sub-tensor that is left,
/// whose first number is the whole tensor's number `base`.
fn divide(shape: &[usize], prefix: &mut Vec<usize>, base: usize, range: Range<usize>, found: &mut Vec<Chunk>) {
    let inner = &shape[prefix.len()..];
    let Some((_, rows_of)) = inner.split_first() else {
        found.push(Chunk {
            offsets: prefix.clone(),
            sizes: vec![1; prefix.len()],
            range: base + range.start..base + range.end,
        });
        return;
    };
    let row: usize = rows_of.iter().product();
    let within = |prefix: &mut Vec<usize>, at: usize, part: Range<usize>, found: &mut Vec<Chunk>| {
        prefix.push(at);
        divide(shape, prefix, base + at * row, part.start - at * row..part.end - at * row, found);
        prefix.pop();
    };
    // Whole rows in the middle, a piece of a row before and after them.
    let (first, last) = (range.start.div_ceil(row), range.end / row);
    if first > last {
        within(prefix, last, range, found);
        return;
    }
    if range.start < first * row {
        within(prefix, first - 1, range.start..first * row, found);
    }
    if first < last {
        let mut offsets = prefix.clone();
        offsets.push(first);
        offsets.resize(shape.len(), 0);
        let mut sizes = vec![1; prefix.len()];
        sizes.push(last - first);
        sizes.extend_from_slice(rows_of);
        found.push(Chunk { offsets, sizes, range: base + first * row..base + last * row });
    }
    if last * row < range.end {
        within(prefix, last, last * row..range.end, found);
    }
}

/// The range of the flattened tensor that a box takes up, or none if its numbers do not
/// follow each other. Every offset and size must lie within the shape.
pub(super) fn flat(shape: &[usize], offsets: &[usize], sizes: &[usize]) -> Option<Range<usize>> {
    let mut start = 0;
    let mut len = 1;
    let mut whole = true; // all dimensions further in are covered wholly
    let mut stride = 1;
    for ((&of, &offset), &size) in shape.iter().zip(offsets).zip(sizes).rev() {
        start += offset * stride;
        if size > 1 && !whole {
            return None;
        }
        len *= size;
        whole &= size == of;
        stride *= of;
    }
    Some(start..start + len)
}

/// Each is compared with others: a damaged `.metadata` must not take hours. Of boxes in
/// row-major order, such as those of this program and of FSDP, there can be any number.
const MOST_ACROSS_ROWS: usize = 16_384;

/// What keeps boxes (offsets and sizes, each within the shape) from being the whole tensor,
/// each number once; none if nothing does.
pub(super) fn uncovered(shape: &[usize], boxes: &[(&[usize], &[usize])]) -> Option<String> {
    let numbers: usize = shape.iter().product();
    let full: Vec<_> = boxes.iter().filter(|(_, sizes)| !sizes.contains(&0)).collect();
    let ranges: Option<Vec<Range<usize>>> = full.iter().map(|(offsets, sizes)| flat(shape, offsets, sizes)).collect();
    if let Some(mut ranges) = ranges {
        ranges.sort_by_key(|range| range.start);
        let mut reached = 0;
        for range in ranges {
            if range.start != reached {
                let (from, to) = (reached.min(range.start), reached.max(range.start).min(numbers));
                let what = if range.start > reached { "lacks" } else { "has twice" };
                let to = if range.start > reached { to } else { to.min(range.end) };
                return Some(format!("{what} its numbers {from} to {to} of {numbers}"));
            }
            reached = range.end;
        }
        return (reached < numbers).then(|| format!("lacks its numbers {reached} to {numbers} of {numbers}"));
    }
    // Boxes across rows: none overlaps another, and together they are as many.
    if full.len() > MOST_ACROSS_ROWS {
        return Some(format!("has {} boxes across rows; more than {MOST_ACROSS_ROWS} are not read here", full.len()));
    }
    let mut sorted = full;
    sorted.sort();
    for (at, (offsets, sizes)) in sorted.iter().enumerate() {
        for (others, other_sizes) in sorted[at + 1..].iter().take_while(|(others, _)| others[0] < offsets[0] + sizes[0])
        {
            let apart = (0..shape.len()).any(|dimension| {
                offsets[dimension] + sizes[dimension] <= others[dimension]
                    || others[dimension] + other_sizes[dimension] <= offsets[dimension]
            });
            if !apart {
                return Some(format!("has numbers twice: boxes at {offsets:?} and {others:?} overlap"));
            }
        }
    }
    let there: usize = sorted.iter().map(|(_, sizes)| sizes.iter().product::<usize>()).sum();
    (there < numbers).then(|| format!("lacks {} of its {numbers} numbers", numbers - there))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes() -> Vec<Vec<usize>> {
        let mut shapes = vec![vec![], vec![1], vec![7], vec![1, 1, 1]];
        for a in 1..4 {
            for b in 1..5 {
                shapes.push(vec![a, b]);
                for c in 1..4 {
                    shapes.push(vec![a, b, c]);
                }
            }
        }
        shapes
    }

    /// The numbers of a box, straight from the definition of row-major order.
    fn numbers(shape: &[usize], chunk: &Chunk) -> Vec<usize> {
        let mut all = vec![0];
        for (dimension, &of) in shape.iter().enumerate() {
            let from = chunk.offsets[dimension];
            all = all
                .iter()
                .flat_map(|outer| (from..from + chunk.sizes[dimension]).map(move |index| outer * of + index))
                .collect();
        }
        all
    }

    #[test]
    fn boxes_are_exactly_the_range_and_say_where_they_lie() {
        for shape in shapes() {
            let len: usize = shape.iter().product();
            for start in 0..=len {
                for end in start..=len {
                    let found = boxes(&shape, start..end);
                    let covered: Vec<usize> = found.iter().flat_map(|chunk| numbers(&shape, chunk)).collect();
                    assert_eq!(covered, (start..end).collect::<Vec<_>>(), "{shape:?} {start}..{end}");
                    for chunk in &found {
                        assert_eq!(numbers(&shape, chunk), chunk.range.clone().collect::<Vec<_>>());
                        assert_eq!(flat(&shape, &chunk.offsets, &chunk.sizes), Some(chunk.range.clone()));
                    }
                }
            }
        }
    }

    #[test]
    fn no_fewer_boxes_would_do() {
        for shape in shapes() {
            let len: usize = shape.iter().product();
            // Every box there is whose numbers follow each other.
            let mut every = vec![(vec![], vec![])];
            for &of in &shape {
                every = every
                    .iter()
                    .flat_map(|(offsets, sizes)| {
                        (0..of).flat_map(move |from| {
                            (1..=of - from).map(move |size| {
                                let with = |list: &Vec<usize>, more| [list.as_slice(), &[more]].concat();
                                (with(offsets, from), with(sizes, size))
                            })
                        })
                    })
                    .collect();
            }
            let every: Vec<Chunk> = every
                .into_iter()
                .map(|(offsets, sizes)| Chunk { offsets, sizes, range: 0..0 })
                .filter_map(|chunk| {
                    let all = numbers(&shape, &chunk);
                    all.windows(2)
                        .all(|two| two[0] + 1 == two[1])
                        .then(|| Chunk { range: all[0]..all[0] + all.len(), ..chunk })
                })
                .collect();
            for start in 0..len {
                // The fewest that reach each number, by dynamic programming.
                let mut fewest = vec![usize::MAX; len + 1];
                fewest[start] = 0;
                for at in start..len {
                    for chunk in every.iter().filter(|chunk| chunk.range.start == at) {
                        fewest[chunk.range.end] = fewest[chunk.range.end].min(fewest[at].saturating_add(1));
                    }
                }
                for (end, &fewest) in fewest.iter().enumerate().skip(start + 1) {
                    assert_eq!(boxes(&shape, start..end).len(), fewest, "{shape:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn a_box_across_rows_has_no_flat_range() {
        assert_eq!(flat(&[3, 4], &[0, 1], &[2, 2]), None);
        assert_eq!(flat(&[3, 4], &[1, 0], &[2, 4]), Some(4..12));
        assert_eq!(flat(&[3, 4], &[2, 1], &[1, 2]), Some(9..11));
        assert_eq!(flat(&[2, 1, 4], &[0, 0, 0], &[2, 1, 4]), Some(0..8));
    }

    #[test]
    fn a_tensor_is_whole_when_each_number_is_there_once() {
        let whole = |shape: &[usize], boxes: &[(&[usize], &[usize])]| uncovered(shape, boxes);
        assert_eq!(whole(&[], &[(&[], &[])]), None);
        assert_eq!(whole(&[0, 4], &[]), None);
        assert_eq!(whole(&[4], &[(&[2], &[2]), (&[4], &[0]), (&[0], &[2])]), None);
        assert_eq!(whole(&[4], &[(&[0], &[2])]).unwrap(), "lacks its numbers 2 to 4 of 4");
        assert_eq!(whole(&[4], &[(&[0], &[1]), (&[2], &[2])]).unwrap(), "lacks its numbers 1 to 2 of 4");
        assert_eq!(whole(&[4], &[(&[0], &[3]), (&[1], &[3])]).unwrap(), "has twice its numbers 1 to 3 of 4");
        assert_eq!(whole(&[4], &[(&[0], &[4]), (&[1], &[1])]).unwrap(), "has twice its numbers 1 to 2 of 4");
        assert_eq!(whole(&[4], &[]).unwrap(), "lacks its numbers 0 to 4 of 4");
        assert_eq!(whole(&[], &[]).unwrap(), "lacks its numbers 0 to 1 of 1");
        // Columns, as of tensor parallelism.
        assert_eq!(whole(&[2, 4], &[(&[0, 2], &[2, 2]), (&[0, 0], &[2, 2])]), None);
        assert_eq!(whole(&[2, 4], &[(&[0, 2], &[2, 2]), (&[0, 0], &[2, 1])]).unwrap(), "lacks 2 of its 8 numbers");
        assert_eq!(
            whole(&[2, 4], &[(&[0, 1], &[2, 3]), (&[1, 0], &[1, 2])]).unwrap(),
            "has numbers twice: boxes at [0, 1] and [1, 0] overlap"
        );
    }
}
