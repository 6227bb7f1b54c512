//! How NCCL's lists of names, `[^][=]name[:port],…`, are written: `^` leaves the
//! named ones out, `=` takes names as they are; both count once, in front of the
//! whole list, in this order (NCCL, src/misc/socket.cc). Here a list is taken
//! apart as it was written, odd entries too; what it selects on a node says
//! `plan/netmatch.rs`.

use crate::plan::netmatch;

/// NCCL looks at no more entries of a list than this.
pub(super) const LONGEST: usize = 32;

/// A list as NCCL reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NameList<'a> {
    /// `^`: everything but these.
    pub excludes: bool,
    /// `=`: whole names.
    pub exact: bool,
    /// Its entries; NCCL skips empty ones.
    pub items: Vec<Item<'a>>,
}

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Item<'a> {
    /// As written.
    pub text: &'a str,
    /// Up to the first colon.
    pub name: &'a str,
    /// Behind it.
    pub port: Option<&'a str>,
}

impl<'a> NameList<'a> {
    /// Reads a list. NCCL takes values of one character as unset.
    pub fn parse(text: &'a str) -> NameList<'a> {
        let text = if text.chars().count() > 1 { text } else { "" };
        let (excludes, exact, text) = netmatch::signs(text);
        let items = text.split(',').filter(|item| !item.is_empty()).map(|item| {
            let (name, port) = match item.split_once(':') {
                Some((name, port)) => (name, Some(port)),
                None => (item, None),
            };
            Item { text: item, name, port }
        });
        NameList { excludes, exact, items: items.collect() }
    }

    /// Entries that no name can be: `^` and `=` where they do not count, blanks.
    pub fn odd(&self) -> impl Iterator<Item = &Item<'a>> {
        self.items.iter().filter(|item| item.name.starts_with(['^', '=']) || item.text.contains(char::is_whitespace))
    }
}

/// The list with `^` and `=` in front and without blanks, where that is clear.
pub(super) fn corrected(text: &str) -> Option<String> {
    let mut items = Vec::new();
    let (mut first, mut exact) = (None, false);
    for item in text.split(',') {
        let item: String = item.chars().filter(|c| !c.is_whitespace()).collect();
        let rest = item.trim_start_matches(['^', '=']);
        if rest.is_empty() {
            continue;
        }
        let marks = &item[..item.len() - rest.len()];
        let excludes = marks.contains('^');
        // A list that excludes some and names others is not to be guessed at.
        if excludes && first == Some(false) {
            return None;
        }
        first.get_or_insert(excludes);
        exact |= marks.contains('=');
        items.push(rest.to_string());
    }
    let excludes = if first? { "^" } else { "" };
    Some(format!("{excludes}{}{}", if exact { "=" } else { "" }, items.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_count_once_in_front_of_the_list() {
        let odd = |text: &str| NameList::parse(text).odd().map(|item| item.text.to_string()).collect::<Vec<_>>();
        for (text, excludes, exact, expected) in [
            ("bond0", false, false, &[] as &[&str]),
            ("^=bond0,eth0", true, true, &[]),
            ("^lo,^docker", true, false, &["^docker"]),
            ("=eth0,=eth1", false, true, &["=eth1"]),
            ("=^eth0", false, true, &["^eth0"]),
            (" =mlx5_0", false, false, &[" =mlx5_0"]),
            ("eth0, eth1", false, false, &[" eth1"]),
            (",,eth0,", false, false, &[]),
            ("^", false, false, &[]),
        ] {
            let list = NameList::parse(text);
            assert_eq!((list.excludes, list.exact), (excludes, exact), "{text:?}");
            assert_eq!(odd(text), expected, "{text:?}");
        }
        let list = NameList::parse("=devA:1,devP:,devP::2");
        let ports: Vec<_> = list.items.iter().map(|item| (item.name, item.port)).collect();
        assert_eq!(ports, [("devA", Some("1")), ("devP", Some("")), ("devP", Some(":2"))]);
    }

    #[test]
    fn the_corrected_form_has_its_marks_in_front() {
        for (list, expected) in [
            ("^=mlx5_8,^=mlx5_14", Some("^=mlx5_8,mlx5_14")),
            ("^lo,^docker", Some("^lo,docker")),
            ("=eth0,=eth1", Some("=eth0,eth1")),
            ("=^mlx5_3", Some("^=mlx5_3")),
            (" =mlx5_0", Some("=mlx5_0")),
            ("eth0, eth1 ,", Some("eth0,eth1")),
            ("eth0,^lo", None),
            ("^", None),
            ("", None),
        ] {
            assert_eq!(corrected(list).as_deref(), expected, "{list:?}");
        }
    }
}
