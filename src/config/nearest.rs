//! The nearest known word to a mistyped one, for messages.

/// The candidate within a small edit distance of `word` (insertions,
/// deletions, replacements, swapped neighbours), or `None` when nothing is near
/// enough to be what was meant.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    let limit = (word.chars().count() / 3).clamp(1, 3);
    candidates
        .into_iter()
        .map(|candidate| (distance(&word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Damerau-Levenshtein distance (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    // A word far longer than any candidate is near none; this also bounds the work.
    if a.len().abs_diff(b.len()) > 3 {
        return usize::MAX;
    }
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(rows[i - 2][j - 2] + 1);
            }
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant_and_nothing_else() {
        let words = ["port", "ports", "master", "suffix"];
        assert_eq!(nearest("prot", words), Some("port"));
        assert_eq!(nearest("PORT", words), Some("port"));
        assert_eq!(nearest("mastre", words), Some("master"));
        assert_eq!(nearest("sufix", words), Some("suffix"));
        assert_eq!(nearest("banana", words), None);
        assert_eq!(nearest("", words), None);
        assert_eq!(nearest(&"x".repeat(100_000), words), None);
    }
}
