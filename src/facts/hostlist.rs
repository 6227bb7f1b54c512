//! Reads the two compact notations in which Slurm describes a step's nodes:
//! the host list (`SLURM_STEP_NODELIST`, `node[001-003,007],login1`) and the
//! tasks of every node (`SLURM_STEP_TASKS_PER_NODE`, `8(x4),4`).
//!
//! It must not run `scontrol`, touch files, the environment or the network,
//! panic on any input, or produce more than [`MAX_NAMES`] names.
//!
//! # What a list means
//!
//! The rules are those of Slurm's `src/common/hostlist.c` for clusters of one
//! dimension, and the names come out in the order in which `scontrol show
//! hostnames` prints them, duplicates kept:
//!
//! * Names are separated by commas, spaces, tabs or newlines; separators may
//!   be repeated, lead or trail (`_next_tok`). A comma inside brackets
//!   separates ranges instead.
//! * A range `lo-hi` counts upwards and pads every number with zeros to the
//!   width of `lo` as written: `node[98-0101]` is `node98 node99 node100
//!   node101` (`_parse_single_range`).
//! * With several brackets in one name the last bracket runs fastest, then the
//!   first, the second, and so on; the last but one runs slowest
//!   (`_push_range_list`). Two brackets therefore come out in reading order and
//!   three do not: `c[1-2]s[1-2]n[1-2]` starts `c1s1n1 c1s1n2 c2s1n1 c2s1n2
//!   c1s2n1`.
//! * Text after the last bracket belongs to every name: `node[1-2]-ib` is
//!   `node1-ib node2-ib`. Slurm reads this since 23.11; before, it called such a
//!   list invalid. No release is known to write it: 22.05 and 24.11 write these
//!   names one by one. Reading it is therefore right on every release.
//!
//! # Where this differs from `scontrol show hostnames`
//!
//! Malformed input is refused with a [`HostlistError`] that names the bad part,
//! where Slurm guesses:
//!
//! * an unclosed bracket (`node[1-2`: 22.05 answers `node]`, 24.11 refuses it)
//!   and a `]` without its `[` (`node]`, `node[1]]`: kept in the name);
//! * numbers that are not plain digits: `n[1-]` (Slurm: `n1`), `n[+1]` and
//!   `n[1, 2]` (Slurm: `n01`, `n02`), and a bad bracket before other brackets,
//!   `a[x]b[1]c[2]` (Slurm: no names at all);
//! * an empty list (Slurm: no names);
//! * names longer than [`MAX_NAME_LEN`] bytes and control characters in names.
//!
//! Well-formed input that differs: a newline separates names as it does in
//! 24.11, where 22.05 takes it into the name; numbers are kept exactly, where
//! Slurm turns trailing digits past 2^64-1 into 18446744073709551615. Not read
//! are the box notation of multi-dimension clusters, `bgl[000x133]`, and
//! functions such as `block{b1}`, which only the controller can expand and
//! which never reach a step: braces are ordinary characters here.

use std::error::Error;
use std::fmt;

/// The most names one bracketed range may stand for: `MAX_RANGE` in Slurm's
/// `src/common/hostlist.c`.
pub const MAX_RANGE: u64 = 65_536;

/// The most names one list may stand for, and the most nodes a
/// [`TasksPerNode`] may describe. Slurm bounds each range, not the whole list;
/// this bound keeps a hostile list from filling memory.
pub const MAX_NAMES: usize = 4 * 65_536;

/// The longest host name in bytes (`HOST_NAME_MAX` of POSIX).
pub const MAX_NAME_LEN: usize = 255;

/// Why a host list or a tasks-per-node string cannot be read.
///
/// Every message quotes the list (shortened if long) and the part that is bad.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostlistError {
    /// The list holds no name, or the tasks-per-node string no count.
    Empty {
        /// The text as given.
        list: String,
    },
    /// A `[` has no `]` before the next `[` or the end of the list.
    Unclosed {
        /// The list as given.
        list: String,
        /// From the start of the name to where the `]` is missed.
        part: String,
    },
    /// A `]` has no `[` before it.
    StrayClose {
        /// The list as given.
        list: String,
        /// From the start of the name to the `]`.
        part: String,
    },
    /// Nothing between `[` and `]`, or between two commas inside brackets.
    EmptyRange {
        /// The list as given.
        list: String,
        /// The bracket with the empty place.
        part: String,
    },
    /// A range that is neither a number nor two numbers with a dash.
    BadRange {
        /// The list as given.
        list: String,
        /// The range as written.
        part: String,
    },
    /// A range whose end is below its start.
    Backwards {
        /// The list as given.
        list: String,
        /// The range as written.
        part: String,
    },
    /// A range of more than [`MAX_RANGE`] numbers.
    RangeTooLarge {
        /// The list as given.
        list: String,
        /// The range as written.
        part: String,
    },
    /// More than [`MAX_NAMES`] names or nodes in all.
    TooMany {
        /// The text as given.
        list: String,
    },
    /// A name of more than [`MAX_NAME_LEN`] bytes.
    NameTooLong {
        /// The list as given.
        list: String,
        /// The name as written.
        part: String,
    },
    /// A control character in a name.
    BadCharacter {
        /// The list as given.
        list: String,
        /// From the start of the name to the character.
        part: String,
    },
    /// A part of a tasks-per-node string that is neither `8` nor `8(x4)`.
    BadTaskCount {
        /// The text as given.
        list: String,
        /// The part as written.
        part: String,
    },
}

/// Quotes `text` for a message, escaped and cut after 80 characters.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(80) {
            None => write!(f, "{:?}", self.0),
            Some((cut, _)) => write!(f, "{:?}...", &self.0[..cut]),
        }
    }
}

impl fmt::Display for HostlistError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { list } => {
                write!(f, "the list {} is empty", Quoted(list))
            }
            Self::Unclosed { list, part } => {
                write!(f, "node list {}: the bracket in {} is never closed with ']'", Quoted(list), Quoted(part))
            }
            Self::StrayClose { list, part } => {
                write!(f, "node list {}: the ']' at the end of {} has no '[' before it", Quoted(list), Quoted(part))
            }
            Self::EmptyRange { list, part } => {
                write!(f, "node list {}: a number is missing in {}", Quoted(list), Quoted(part))
            }
            Self::BadRange { list, part } => write!(
                f,
                "node list {}: {} in brackets is not a number or a range such as 001-003",
                Quoted(list),
                Quoted(part)
            ),
            Self::Backwards { list, part } => {
                write!(f, "node list {}: the range {} ends below its start", Quoted(list), Quoted(part))
            }
            Self::RangeTooLarge { list, part } => write!(
                f,
                "node list {}: the range {} stands for more than {MAX_RANGE} nodes",
                Quoted(list),
                Quoted(part)
            ),
            Self::TooMany { list } => write!(f, "the list {} stands for more than {MAX_NAMES} nodes", Quoted(list)),
            Self::NameTooLong { list, part } => {
                write!(f, "node list {}: {} makes a name longer than {MAX_NAME_LEN} bytes", Quoted(list), Quoted(part))
            }
            Self::BadCharacter { list, part } => write!(
                f,
                "node list {}: the control character at the end of {} cannot be in a node name",
                Quoted(list),
                Quoted(part)
            ),
            Self::BadTaskCount { list, part } => {
                write!(f, "tasks per node {}: {} is not a count such as 8 or 8(x4)", Quoted(list), Quoted(part))
            }
        }
    }
}

impl Error for HostlistError {}

/// Expands a host list into its names, in Slurm's order, duplicates kept.
///
/// # Errors
///
/// A [`HostlistError`] when the list is empty, malformed or too large; then
/// no name is produced, as `scontrol` prints none for an invalid list.
pub fn expand(list: &str) -> Result<Vec<String>, HostlistError> {
    let (terms, total) = parse(list)?;
    let mut names = Vec::with_capacity(total);
    for term in &terms {
        term.push_names(&mut names);
    }
    Ok(names)
}

/// The first name that [`expand`] would give, without making the others.
///
/// # Errors
///
/// Those of [`expand`]: a list that is bad further on is still refused.
pub fn first(list: &str) -> Result<String, HostlistError> {
    let (terms, _) = parse(list)?;
    match terms.first() {
        Some(term) => Ok(term.first_name()),
        None => Err(HostlistError::Empty { list: list.into() }),
    }
}

/// How many names [`expand`] would give, without making them.
///
/// # Errors
///
/// Those of [`expand`].
pub fn count(list: &str) -> Result<usize, HostlistError> {
    parse(list).map(|(_, total)| total)
}

/// One number or range inside brackets.
#[derive(Debug, Clone, Copy)]
struct Range {
    lo: u64,
    hi: u64,
    /// Numbers are padded with zeros to this many digits.
    width: usize,
}

impl Range {
    /// Digits of the longest number of the range, padding included.
    fn longest(&self) -> usize {
        self.width.max(digits(self.hi))
    }

    /// Appends one name per number. `head` comes back as it was.
    ///
    /// Ten names share all but their last digit, so that most of a name is a
    /// plain copy.
    fn push_names(&self, head: &mut String, suffix: &str, names: &mut Vec<String>) {
        let kept = head.len();
        let mut number = self.lo;
        loop {
            let tens = number / 10;
            if tens == 0 {
                push_zeros(head, self.width.saturating_sub(1));
            } else {
                push_number(head, tens, self.width.saturating_sub(1));
            }
            let digits_left = 10 - number % 10;
            let numbers = digits_left.min((self.hi - number).saturating_add(1));
            let first = number % 10;
            for digit in first..first + numbers {
                let mut name = String::with_capacity(head.len() + 1 + suffix.len());
                name.push_str(head);
                name.push(digit_char(digit));
                name.push_str(suffix);
                names.push(name);
            }
            head.truncate(kept);
            match number.checked_add(numbers) {
                Some(next) if next <= self.hi => number = next,
                _ => return,
            }
        }
    }
}

/// A bracket and the text before it.
#[derive(Debug)]
struct Dimension<'a> {
    before: &'a str,
    /// Never empty.
    ranges: Vec<Range>,
}

/// One name of the list as written, with or without brackets.
#[derive(Debug)]
struct Term<'a> {
    dimensions: Vec<Dimension<'a>>,
    /// Text after the last bracket; the whole name when there is none.
    suffix: &'a str,
}

impl Term<'_> {
    fn first_name(&self) -> String {
        let mut name = String::new();
        for dimension in &self.dimensions {
            name.push_str(dimension.before);
            if let Some(range) = dimension.ranges.first() {
                push_number(&mut name, range.lo, range.width);
            }
        }
        name.push_str(self.suffix);
        name
    }

    fn push_names(&self, names: &mut Vec<String>) {
        let Some((last, outer)) = self.dimensions.split_last() else {
            names.push(self.suffix.to_owned());
            return;
        };
        let mut odometer: Vec<Position> = outer.iter().map(Position::start).collect();
        let mut head = String::new();
        loop {
            head.clear();
            for (dimension, position) in outer.iter().zip(&odometer) {
                head.push_str(dimension.before);
                if let Some(range) = dimension.ranges.get(position.range) {
                    push_number(&mut head, position.number, range.width);
                }
            }
            head.push_str(last.before);
            for range in &last.ranges {
                range.push_names(&mut head, self.suffix, names);
            }
            // The first bracket steps next; the last but one steps least often.
            let stepped = outer.iter().zip(&mut odometer).any(|(dimension, position)| position.step(dimension));
            if !stepped {
                return;
            }
        }
    }
}

/// Where one of the slower brackets stands.
struct Position {
    range: usize,
    number: u64,
}

impl Position {
    fn start(dimension: &Dimension<'_>) -> Self {
        Position { range: 0, number: dimension.ranges.first().map_or(0, |range| range.lo) }
    }

    /// Moves to the next number; at the last one goes back to the start and
    /// says `false`, so that the next slower bracket moves.
    fn step(&mut self, dimension: &Dimension<'_>) -> bool {
        if let Some(range) = dimension.ranges.get(self.range)
            && self.number < range.hi
        {
            self.number += 1;
            return true;
        }
        if let Some(range) = dimension.ranges.get(self.range + 1) {
            self.range += 1;
            self.number = range.lo;
            return true;
        }
        *self = Position::start(dimension);
        false
    }
}

/// Decimal digits of `number`.
fn digits(number: u64) -> usize {
    number.checked_ilog10().map_or(1, |log| log as usize + 1)
}

/// The character of a number below ten.
fn digit_char(digit: u64) -> char {
    char::from(b'0' + (digit % 10) as u8)
}

fn push_zeros(name: &mut String, zeros: usize) {
    name.extend(std::iter::repeat_n('0', zeros));
}

/// Appends `number`, padded with zeros to `width`.
fn push_number(name: &mut String, number: u64, width: usize) {
    let digits = digits(number);
    push_zeros(name, width.saturating_sub(digits));
    let mut place = 10_u64.pow(digits as u32 - 1);
    while place > 0 {
        name.push(digit_char(number / place));
        place /= 10;
    }
}

fn is_separator(byte: u8) -> bool {
    matches!(byte, b',' | b' ' | b'\t' | b'\n')
}

/// Reads the whole list and counts its names, making none.
fn parse(list: &str) -> Result<(Vec<Term<'_>>, usize), HostlistError> {
    let bytes = list.as_bytes();
    let mut terms = Vec::new();
    let mut total = 0;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if is_separator(byte) {
            at += 1;
            continue;
        }
        let (term, names, end) = parse_term(list, at)?;
        total += names;
        if total > MAX_NAMES {
            return Err(HostlistError::TooMany { list: list.into() });
        }
        terms.push(term);
        at = end;
    }
    if terms.is_empty() {
        return Err(HostlistError::Empty { list: list.into() });
    }
    Ok((terms, total))
}

/// Reads the name that starts at `start`: the name, how many names it stands
/// for (at most [`MAX_NAMES`]), and the place after it.
///
/// All places are next to ASCII bytes, so slicing there keeps characters whole.
fn parse_term(list: &str, start: usize) -> Result<(Term<'_>, usize, usize), HostlistError> {
    let bytes = list.as_bytes();
    let fault = |end: usize| (list.to_owned(), list[start..end].to_owned());
    let mut dimensions = Vec::new();
    let mut names = 1_usize;
    // Length of the longest name so far, without the text since `text`.
    let mut length = 0_usize;
    let mut text = start;
    let mut at = start;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            byte if is_separator(byte) => break,
            b'[' => {
                let open = at + 1;
                let close = open
                    + bytes[open..].iter().position(|byte| matches!(byte, b'[' | b']')).unwrap_or(bytes.len() - open);
                if bytes.get(close) != Some(&b']') {
                    let (list, part) = fault(close);
                    return Err(HostlistError::Unclosed { list, part });
                }
                let (ranges, numbers) = parse_ranges(list, open, close)?;
                names = match names.checked_mul(numbers) {
                    Some(names) if names <= MAX_NAMES => names,
                    _ => return Err(HostlistError::TooMany { list: list.into() }),
                };
                length += at - text;
                length += ranges.iter().map(Range::longest).max().unwrap_or(0);
                if length > MAX_NAME_LEN {
                    let (list, part) = fault(close + 1);
                    return Err(HostlistError::NameTooLong { list, part });
                }
                dimensions.push(Dimension { before: &list[text..at], ranges });
                at = close + 1;
                text = at;
            }
            b']' => {
                let (list, part) = fault(at + 1);
                return Err(HostlistError::StrayClose { list, part });
            }
            byte if byte.is_ascii_control() => {
                let (list, part) = fault(at + 1);
                return Err(HostlistError::BadCharacter { list, part });
            }
            _ => at += 1,
        }
    }
    if length + (at - text) > MAX_NAME_LEN {
        let (list, part) = fault(at);
        return Err(HostlistError::NameTooLong { list, part });
    }
    let suffix = &list[text..at];
    Ok((Term { dimensions, suffix }, names, at))
}

/// Reads the ranges between the brackets around `open..close`, and how many
/// numbers they hold (at most [`MAX_NAMES`]).
fn parse_ranges(list: &str, open: usize, close: usize) -> Result<(Vec<Range>, usize), HostlistError> {
    let mut ranges = Vec::new();
    let mut numbers = 0_u64;
    for part in list[open..close].split(',') {
        let fault = || (list.to_owned(), part.to_owned());
        if part.is_empty() {
            return Err(HostlistError::EmptyRange { list: list.into(), part: list[open - 1..=close].into() });
        }
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (Some(lo), Some(hi)) = (number(low), number(high)) else {
            let (list, part) = fault();
            return Err(HostlistError::BadRange { list, part });
        };
        if hi < lo {
            let (list, part) = fault();
            return Err(HostlistError::Backwards { list, part });
        }
        if hi - lo >= MAX_RANGE {
            let (list, part) = fault();
            return Err(HostlistError::RangeTooLarge { list, part });
        }
        numbers += hi - lo + 1;
        if numbers > MAX_NAMES as u64 {
            return Err(HostlistError::TooMany { list: list.into() });
        }
        ranges.push(Range { lo, hi, width: low.len() });
    }
    // At most MAX_NAMES, so it fits.
    Ok((ranges, numbers as usize))
}

/// A number of plain digits only: no sign, no space, not empty.
fn number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// How many tasks of a step run on each of its nodes, in the order of the
/// step's host list: the value of `SLURM_STEP_TASKS_PER_NODE`.
///
/// Slurm writes runs of equal counts as `count(xnodes)`: `8(x4),4` is four
/// nodes with 8 tasks and one with 4 (`uint16_array_to_str` in Slurm's
/// `src/common/env.c`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TasksPerNode {
    runs: Vec<Run>,
    nodes: usize,
    total: u64,
}

/// Neighbouring nodes with the same number of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    tasks: u32,
    nodes: usize,
}

impl TasksPerNode {
    /// Reads the notation; space around the whole text is ignored.
    ///
    /// # Errors
    ///
    /// [`HostlistError::Empty`], [`HostlistError::BadTaskCount`] for anything
    /// but counts and counts with a repeat of at least one, and
    /// [`HostlistError::TooMany`] for more than [`MAX_NAMES`] nodes.
    pub fn parse(text: &str) -> Result<Self, HostlistError> {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Err(HostlistError::Empty { list: text.into() });
        }
        let mut parsed = TasksPerNode { runs: Vec::new(), nodes: 0, total: 0 };
        for part in trimmed.split(',') {
            let Some((tasks, repeat)) = task_run(part) else {
                return Err(HostlistError::BadTaskCount { list: text.into(), part: part.into() });
            };
            let nodes = usize::try_from(repeat).ok().filter(|&nodes| nodes <= MAX_NAMES - parsed.nodes);
            let Some(nodes) = nodes else {
                return Err(HostlistError::TooMany { list: text.into() });
            };
            parsed.nodes += nodes;
            // At most u32::MAX times MAX_NAMES, so it fits.
            parsed.total += u64::from(tasks) * repeat;
            parsed.runs.push(Run { tasks, nodes });
        }
        Ok(parsed)
    }

    /// The tasks of the node at this place of the host list, counted from 0;
    /// `None` past the last node.
    pub fn get(&self, node_index: usize) -> Option<u32> {
        let mut left = node_index;
        for run in &self.runs {
            if left < run.nodes {
                return Some(run.tasks);
            }
            left -= run.nodes;
        }
        None
    }

    /// The tasks of all nodes together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many nodes are described.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The tasks of every node, in the order of the host list.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| std::iter::repeat_n(run.tasks, run.nodes))
    }
}

/// Reads `8` or `8(x4)` into the count and its repeat.
fn task_run(part: &str) -> Option<(u32, u64)> {
    let (tasks, repeat) = match part.split_once('(') {
        None => (part, 1),
        Some((tasks, rest)) => {
            (tasks, number(rest.strip_prefix('x')?.strip_suffix(')')?).filter(|&repeat| repeat > 0)?)
        }
    };
    Some((u32::try_from(number(tasks)?).ok()?, repeat))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &str) -> Vec<String> {
        let names = expand(list).unwrap_or_else(|error| panic!("{list:?}: {error}"));
        assert_eq!(count(list), Ok(names.len()), "{list:?}");
        assert_eq!(first(list).as_ref(), Ok(&names[0]), "{list:?}");
        names
    }

    /// Every list with the names it must give, separated by spaces.
    fn check(table: &[(&str, &str)]) {
        for (list, expected) in table {
            assert_eq!(names(list).join(" "), *expected, "{list:?}");
        }
    }

    fn refusal(list: &str) -> HostlistError {
        let error = match expand(list) {
            Err(error) => error,
            Ok(names) => panic!("{list:?} was read as {} names", names.len()),
        };
        assert_eq!(count(list), Err(error.clone()), "{list:?}");
        assert_eq!(first(list), Err(error.clone()), "{list:?}");
        error
    }

    /// https://github.com/Lightning-AI/pytorch-lightning/issues/14896: a comma
    /// in brackets was taken for the end of a name.
    #[test]
    fn commas_in_brackets_do_not_end_a_name() {
        check(&[
            ("linux[1,2]", "linux1 linux2"),
            ("d05-[41-42]", "d05-41 d05-42"),
            ("nodes[006,011]", "nodes006 nodes011"),
            ("host[001,003-004,006]", "host001 host003 host004 host006"),
        ]);
    }

    /// https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3830: plain names
    /// before, between and after brackets.
    #[test]
    fn plain_names_stand_beside_brackets() {
        check(&[
            ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
            ("a[1-2],b,c[3]", "a1 a2 b c3"),
            ("b,a[1-2]", "b a1 a2"),
        ]);
    }

    /// https://github.com/facebookincubator/submitit/pull/4: leading zeros.
    #[test]
    fn zeros_follow_the_low_end_of_a_range() {
        check(&[
            ("node[001-003,007]", "node001 node002 node003 node007"),
            ("node[08-12]", "node08 node09 node10 node11 node12"),
            ("node[8-12]", "node8 node9 node10 node11 node12"),
            ("node[099-101]", "node099 node100 node101"),
            ("node[98-0101]", "node98 node99 node100 node101"),
            ("n[0-1,00-01]", "n0 n1 n00 n01"),
        ]);
    }

    /// Measured with `scontrol show hostnames` of Slurm 22.05.8 and 24.11.5.
    #[test]
    fn the_last_bracket_runs_fastest_and_the_last_but_one_slowest() {
        check(&[
            ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
            ("a[1-2][3-4]", "a13 a14 a23 a24"),
            ("c[1-2]s[1-2]n[1-2]", "c1s1n1 c1s1n2 c2s1n1 c2s1n2 c1s2n1 c1s2n2 c2s2n1 c2s2n2"),
            (
                "a[1-2]b[3-4]c[5-6]d[7-8]",
                "a1b3c5d7 a1b3c5d8 a2b3c5d7 a2b3c5d8 a1b4c5d7 a1b4c5d8 a2b4c5d7 a2b4c5d8 \
                 a1b3c6d7 a1b3c6d8 a2b3c6d7 a2b3c6d8 a1b4c6d7 a1b4c6d8 a2b4c6d7 a2b4c6d8",
            ),
            ("r[1,08-09]n[2,1]", "r1n2 r1n1 r08n2 r08n1 r09n2 r09n1"),
        ]);
    }

    #[test]
    fn duplicates_and_order_are_kept() {
        check(&[("node[1-2],node[2-3]", "node1 node2 node2 node3"), ("n2,n1,n2", "n2 n1 n2")]);
    }

    #[test]
    fn names_are_kept_as_written() {
        check(&[
            ("n01", "n01"),
            ("login-1.site.example", "login-1.site.example"),
            ("001,[1-3]", "001 1 2 3"),
            ("gpu_a-07", "gpu_a-07"),
            ("n18446744073709551616", "n18446744073709551616"),
            ("n[18446744073709551614-18446744073709551615]", "n18446744073709551614 n18446744073709551615"),
            ("nœud[1-2]é", "nœud1é nœud2é"),
        ]);
    }

    #[test]
    fn separators_may_repeat_lead_and_trail() {
        check(&[("a b,c\td\ne", "a b c d e"), (" ,a[1-2],, b[3],\n", "a1 a2 b3"), ("a[1-2]\nb[3-4]", "a1 a2 b3 b4")]);
    }

    /// https://github.com/pytorch/pytorch/issues/73656 asks for such names.
    /// Slurm 24.11.5 prints these (since 23.11: "a shared suffix" in its
    /// CHANGELOG/slurm-23.11.md); 22.05.8 says "Invalid hostlist".
    #[test]
    fn text_after_the_last_bracket_belongs_to_every_name() {
        check(&[("node[001-003]-ib", "node001-ib node002-ib node003-ib"), ("a[1-2]b[3].x,c", "a1b3.x a2b3.x c")]);
    }

    /// https://github.com/pytorch/pytorch/issues/73656: Slurm 22.05 expands
    /// the first of these to the single name "node]".
    #[test]
    fn an_unclosed_bracket_is_refused_with_the_name_it_is_in() {
        assert_eq!(
            refusal("node[1-2").to_string(),
            r#"node list "node[1-2": the bracket in "node[1-2" is never closed with ']'"#
        );
        for (list, part) in
            [("a1,b[2,c3", "b[2,c3"), ("a[1-2,b[3]", "a[1-2,b"), ("a[[1-2]]", "a["), ("[", "["), ("a[1]b[", "a[1]b[")]
        {
            assert_eq!(refusal(list), HostlistError::Unclosed { list: list.into(), part: part.into() });
        }
    }

    #[test]
    fn a_closing_bracket_alone_is_refused() {
        for (list, part) in [("a]", "a]"), ("b,a[1]]", "a[1]]"), ("]", "]"), ("a]b[1]", "a]")] {
            assert_eq!(refusal(list), HostlistError::StrayClose { list: list.into(), part: part.into() });
        }
    }

    #[test]
    fn bad_ranges_are_refused_by_name() {
        let bad = |part: &str| HostlistError::BadRange { list: format!("m1,n[{part}]"), part: part.into() };
        for part in ["x", "-3", "1-", "-", "+1", " 1", "1 ", "0x1", "1-2-3", "1--2", "1.5", "٣", "18446744073709551616"]
        {
            assert_eq!(refusal(&format!("m1,n[{part}]")), bad(part));
        }
        assert_eq!(refusal("n[3-1]").to_string(), r#"node list "n[3-1]": the range "3-1" ends below its start"#);
        assert_eq!(
            refusal("a[x]b[1]c[2]").to_string(),
            r#"node list "a[x]b[1]c[2]": "x" in brackets is not a number or a range such as 001-003"#
        );
        for (list, part) in [("n[]", "[]"), ("n[,1]", "[,1]"), ("n[1,,2]", "[1,,2]")] {
            assert_eq!(refusal(list).to_string(), format!("node list {list:?}: a number is missing in {part:?}"));
        }
    }

    #[test]
    fn an_empty_list_is_refused() {
        for list in ["", " ", ",", "\n,\t"] {
            assert_eq!(refusal(list), HostlistError::Empty { list: list.into() });
        }
    }

    #[test]
    fn control_characters_are_refused() {
        assert_eq!(
            refusal("a[1-2]\r").to_string(),
            "node list \"a[1-2]\\r\": the control character at the end of \"a[1-2]\\r\" \
             cannot be in a node name"
        );
        assert!(matches!(refusal("a\0b"), HostlistError::BadCharacter { .. }));
    }

    #[test]
    fn sizes_are_bounded_before_anything_is_made() {
        assert_eq!(count("n[0-65535]"), Ok(65_536));
        assert_eq!(
            refusal("n[0-65536]").to_string(),
            r#"node list "n[0-65536]": the range "0-65536" stands for more than 65536 nodes"#
        );
        for list in ["n[0-99999999999]", "n[0-18446744073709551615]"] {
            assert!(matches!(refusal(list), HostlistError::RangeTooLarge { .. }));
        }
        assert_eq!(count("a[0-65535]b[1-4]"), Ok(MAX_NAMES));
        for list in [
            "a[0-65535]b[1-5]".to_owned(),
            "a[1-9999]b[1-9999]c[1-9999]d[1-9999]e[1-9999]".to_owned(),
            "n[0-65535],".repeat(5),
            format!("n[{}0]", "0-65535,".repeat(4)),
            "[0-9]".repeat(40),
        ] {
            assert_eq!(refusal(&list), HostlistError::TooMany { list });
        }
        let longest = "a".repeat(MAX_NAME_LEN);
        assert_eq!(names(&longest), [longest.as_str()]);
        for list in [
            "a".repeat(MAX_NAME_LEN + 1),
            format!("{}[1]", "a".repeat(MAX_NAME_LEN)),
            format!("[9-10]{}", "a".repeat(MAX_NAME_LEN - 1)),
            format!("n[{}1]", "0".repeat(MAX_NAME_LEN)),
            "[1]".repeat(100_000),
        ] {
            assert!(matches!(refusal(&list), HostlistError::NameTooLong { .. }));
        }
    }

    #[test]
    fn long_lists_are_cut_in_messages() {
        let message = refusal(&format!("{}n[", "node17,".repeat(10_000))).to_string();
        assert!(message.len() < 250, "{message}");
        assert!(message.contains("\"..."), "{message}");
    }

    #[test]
    fn random_text_never_panics_and_the_three_answers_agree() {
        const ALPHABET: &[u8] = b"[[[]]],,--0123456789anx \t\n.+(\0\xc3\xa9\xff";
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        for _ in 0..20_000 {
            let bytes: Vec<u8> = (0..random(24))
                .map(|_| match random(8) {
                    0 => random(256) as u8,
                    _ => ALPHABET[random(ALPHABET.len())],
                })
                .collect();
            let list = String::from_utf8_lossy(&bytes);
            match expand(&list) {
                Ok(names) => {
                    assert_eq!(count(&list), Ok(names.len()), "{list:?}");
                    assert_eq!(first(&list).as_ref(), Ok(&names[0]), "{list:?}");
                    assert!(names.iter().all(|name| name.len() <= MAX_NAME_LEN), "{list:?}");
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    assert_eq!(refusal(&list), error);
                }
            }
            if let Ok(tasks) = TasksPerNode::parse(&list) {
                assert_eq!(tasks.iter().count(), tasks.nodes(), "{list:?}");
            }
        }
    }

    /// https://github.com/sehoffmann/dmlcloud/issues/39: "1(x2)" was read as
    /// a single number; https://github.com/grondo/slurm-spank-plugins/issues/1:
    /// so was SLURM_JOB_CPUS_PER_NODE, the last three, which is written alike.
    #[test]
    fn a_repeat_stands_for_that_many_nodes() {
        for (text, expected) in [
            ("1(x2)", vec![1, 1]),
            ("8(x4),4", vec![8, 8, 8, 8, 4]),
            ("2,1(x3),2", vec![2, 1, 1, 1, 2]),
            ("4", vec![4]),
            (" 4\n", vec![4]),
            ("0,1", vec![0, 1]),
            ("4(x2)", vec![4, 4]),
            ("8,4", vec![8, 4]),
            ("72(x2),36", vec![72, 72, 36]),
        ] {
            let tasks = TasksPerNode::parse(text).unwrap();
            assert_eq!(tasks.iter().collect::<Vec<_>>(), expected, "{text:?}");
            assert_eq!(tasks.nodes(), expected.len(), "{text:?}");
            assert_eq!(tasks.total(), expected.iter().map(|&tasks| u64::from(tasks)).sum::<u64>());
            for (index, &count) in expected.iter().enumerate() {
                assert_eq!(tasks.get(index), Some(count), "{text:?} at {index}");
            }
            assert_eq!(tasks.get(expected.len()), None, "{text:?}");
            assert_eq!(tasks.get(usize::MAX), None, "{text:?}");
        }
    }

    #[test]
    fn bad_task_counts_are_refused_by_name() {
        for (text, part) in [
            ("8(x4", "8(x4"),
            ("2,8x4", "8x4"),
            ("8(4)", "8(4)"),
            ("8(x0)", "8(x0)"),
            ("8(x)", "8(x)"),
            ("(x2)", "(x2)"),
            ("1,,2", ""),
            ("1,", ""),
            ("1, 2", " 2"),
            ("-1", "-1"),
            ("4294967296", "4294967296"),
            ("8(x4)1", "8(x4)1"),
        ] {
            assert_eq!(
                TasksPerNode::parse(text),
                Err(HostlistError::BadTaskCount { list: text.into(), part: part.into() })
            );
        }
        assert_eq!(
            TasksPerNode::parse("8(x4").unwrap_err().to_string(),
            r#"tasks per node "8(x4": "8(x4" is not a count such as 8 or 8(x4)"#
        );
        assert!(matches!(TasksPerNode::parse(" "), Err(HostlistError::Empty { .. })));
    }

    #[test]
    fn task_counts_are_bounded() {
        let largest = format!("4294967295(x{MAX_NAMES})");
        let tasks = TasksPerNode::parse(&largest).unwrap();
        assert_eq!(tasks.total(), u64::from(u32::MAX) * MAX_NAMES as u64);
        for text in [
            format!("1(x{})", MAX_NAMES + 1),
            format!("1(x{MAX_NAMES}),1"),
            "1(x18446744073709551615),1(x18446744073709551615)".to_owned(),
        ] {
            assert_eq!(TasksPerNode::parse(&text), Err(HostlistError::TooMany { list: text }));
        }
    }
}
