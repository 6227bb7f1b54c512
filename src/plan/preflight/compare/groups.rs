//! Nodes grouped by what they have, and the sentence that names the few that differ.

use std::collections::BTreeMap;

/// Nodes that a message names; of more their number.
const MOST_NODES: usize = 8;

/// Different values that a message names.
const MOST_VALUES: usize = 4;

/// Nodes by what they have, as places in the list of reports; the largest group first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Groups<V> {
    groups: Vec<(V, Vec<usize>)>,
}

impl<V: Ord> Groups<V> {
    /// Of those nodes that have a value.
    pub(super) fn of(values: impl Iterator<Item = (usize, V)>) -> Groups<V> {
        let mut groups: BTreeMap<V, Vec<usize>> = BTreeMap::new();
        for (node, value) in values {
            #[cfg(test)]
            super::tests::count();
            groups.entry(value).or_default().push(node);
        }
        let mut groups: Vec<(V, Vec<usize>)> = groups.into_iter().collect();
        // Of two groups of one size that of the first node goes first.
        groups.sort_by_key(|(_, nodes)| (std::cmp::Reverse(nodes.len()), nodes.first().copied()));
        Groups { groups }
    }

    /// Whether all have the same.
    pub(super) fn alike(&self) -> bool {
        self.groups.len() < 2
    }

    /// Whether one group is larger than every other: what its nodes have is taken for
    /// what was meant.
    pub(super) fn has_majority(&self) -> bool {
        matches!(self.groups.as_slice(), [(_, most), (_, next), ..] if most.len() > next.len())
    }

    /// Each value with the places of its nodes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&V, &[usize])> {
        self.groups.iter().map(|(value, nodes)| (value, nodes.as_slice()))
    }

    /// "node007 and node009 have A, the other 14 have B". `say` puts a verb before the
    /// value, in the plural where the nodes are several.
    pub(super) fn sentence(&self, name: impl Fn(usize) -> String, say: impl Fn(&V, bool) -> String) -> String {
        let (most, few) = match self.groups.split_first() {
            Some((most, few)) if self.has_majority() => (Some(most), few),
            _ => (None, self.groups.as_slice()),
        };
        let part =
            |(value, nodes): &(V, Vec<usize>)| format!("{} {}", listed(nodes, &name), say(value, nodes.len() > 1));
        let mut parts: Vec<String> = few.iter().take(MOST_VALUES).map(part).collect();
        let unnamed: usize = few.iter().skip(MOST_VALUES).map(|(_, nodes)| nodes.len()).sum();
        if unnamed > 0 {
            parts.push(format!("{unnamed} more {} still others", if unnamed > 1 { "have" } else { "has" }));
        }
        if let Some((value, nodes)) = most {
            parts.push(format!("the other {} {}", nodes.len(), say(value, true)));
        }
        parts.join(", ")
    }
}

/// "a", "a and b", "a, b and c"; of many the first few and a number.
pub(super) fn listed(nodes: &[usize], name: impl Fn(usize) -> String) -> String {
    words(&nodes.iter().take(MOST_NODES).map(|node| name(*node)).collect::<Vec<_>>(), nodes.len())
}

/// The same of words of which there are `all`.
pub(super) fn words(shown: &[String], all: usize) -> String {
    match (shown, all.saturating_sub(shown.len())) {
        ([], more) => more.to_string(),
        ([one], 0) => one.clone(),
        ([before @ .., last], 0) => format!("{} and {last}", before.join(", ")),
        (shown, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(values: &[&str]) -> String {
        let groups = Groups::of(values.iter().copied().enumerate());
        groups
            .sentence(|node| format!("n{node}"), |value, many| format!("{} {value}", if many { "have" } else { "has" }))
    }

    #[test]
    fn the_few_are_named_against_the_many() {
        let mut values = vec!["550.54"; 16];
        (values[7], values[9]) = ("535.104", "535.104");
        assert_eq!(said(&values), "n7 and n9 have 535.104, the other 14 have 550.54");
        values[3] = "470";
        assert_eq!(said(&values), "n7 and n9 have 535.104, n3 has 470, the other 13 have 550.54");
    }

    #[test]
    fn of_a_tie_both_are_named() {
        assert_eq!(said(&["b", "a"]), "n0 has b, n1 has a");
        assert_eq!(said(&["a", "b", "b", "a"]), "n0 and n3 have a, n1 and n2 have b");
        assert_eq!(said(&["a", "b", "c"]), "n0 has a, n1 has b, n2 has c");
    }

    #[test]
    fn of_many_a_number() {
        let values: Vec<&str> = (0..40).map(|node| if node % 2 == 0 && node < 24 { "a" } else { "b" }).collect();
        assert_eq!(said(&values), "n0, n2, n4, n6, n8, n10, n12, n14 and 4 more have a, the other 28 have b");
        let different: Vec<String> = (0..9).map(|node| node.to_string()).collect();
        let different: Vec<&str> = different.iter().map(String::as_str).collect();
        assert_eq!(said(&different), "n0 has 0, n1 has 1, n2 has 2, n3 has 3, 5 more have still others");
    }
}
