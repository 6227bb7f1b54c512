//! Sets of CPUs, or of NUMA nodes, as the kernel writes them: `0-55,112-167`.
//! Always a set, never a range: CPU numbers of one NUMA node may interleave with
//! another's, and NUMA numbers may have gaps.

use std::fmt;

use serde::{Deserialize, Serialize};

/// More numbers than any kernel has CPUs (CONFIG_NR_CPUS is 8192 at most).
pub const LARGEST: u32 = 16_383;

/// A set of small numbers.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet {
    /// Bits, lowest number first, without zero words at the end.
    words: Vec<u64>,
}

impl CpuSet {
    /// No number.
    pub const EMPTY: CpuSet = CpuSet { words: Vec::new() };

    /// Reads the kernel's list form; the empty text is the empty set.
    ///
    /// # Errors
    /// What is not a list.
    pub fn parse(text: &str) -> Result<CpuSet, String> {
        let mut set = CpuSet::EMPTY;
        for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number <= LARGEST);
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            match (number(low), number(high)) {
                (Some(low), Some(high)) if low <= high => (low..=high).for_each(|number| set.insert(number)),
                _ => return Err(format!("'{}' is no list of CPUs", crate::config::printable(part))),
            }
        }
        Ok(set)
    }

    /// Reads the kernel's other form, a mask: hexadecimal words of 32 bits, the last
    /// numbers first, `00ff,ffffffff`.
    ///
    /// # Errors
    /// What is not a mask.
    pub fn parse_mask(text: &str) -> Result<CpuSet, String> {
        let mut set = CpuSet::EMPTY;
        for (index, word) in text.trim().rsplit(',').enumerate() {
            let hexadecimal = (1..=8).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_hexdigit());
            let bits = u32::from_str_radix(word, 16).ok().filter(|_| hexadecimal && index <= LARGEST as usize / 32);
            let bits = bits.ok_or_else(|| format!("'{}' is no mask of CPUs", crate::config::printable(text)))?;
            (0..32u32).filter(|bit| bits & (1 << bit) != 0).for_each(|bit| set.insert(index as u32 * 32 + bit));
        }
        Ok(set)
    }

    /// The set whose bits are these words, lowest first.
    pub fn of_words(words: &[u64]) -> CpuSet {
        let mut set = CpuSet { words: words.to_vec() };
        set.trim();
        set
    }

    /// Its bits, lowest first.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    /// Adds a number; one above [`LARGEST`] is passed over.
    pub fn insert(&mut self, number: u32) {
        if number > LARGEST {
            return;
        }
        let word = number as usize / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (number % 64);
    }

    /// Whether it holds `number`.
    pub fn has(&self, number: u32) -> bool {
        self.words.get(number as usize / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    /// How many numbers it holds.
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Its numbers, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let bits = |(index, word): (usize, &u64)| {
            let word = *word;
            (0..64u32).filter(move |bit| word & (1 << bit) != 0).map(move |bit| index as u32 * 64 + bit)
        };
        self.words.iter().enumerate().flat_map(bits)
    }

    fn zip(&self, other: &CpuSet, combine: impl Fn(u64, u64) -> u64) -> CpuSet {
        let length = self.words.len().max(other.words.len());
        let word = |set: &CpuSet, index: usize| set.words.get(index).copied().unwrap_or(0);
        let mut set =
            CpuSet { words: (0..length).map(|index| combine(word(self, index), word(other, index))).collect() };
        set.trim();
        set
    }

    /// What both hold.
    #[must_use]
    pub fn and(&self, other: &CpuSet) -> CpuSet {
        self.zip(other, |one, two| one & two)
    }

    /// What either holds.
    #[must_use]
    pub fn or(&self, other: &CpuSet) -> CpuSet {
        self.zip(other, |one, two| one | two)
    }

    /// What it holds and `other` does not.
    #[must_use]
    pub fn without(&self, other: &CpuSet) -> CpuSet {
        self.zip(other, |one, two| one & !two)
    }

    /// Whether `other` holds all of it.
    pub fn is_within(&self, other: &CpuSet) -> bool {
        self.without(other).is_empty()
    }

    /// Whether both hold a number.
    pub fn meets(&self, other: &CpuSet) -> bool {
        !self.and(other).is_empty()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> CpuSet {
        let mut set = CpuSet::EMPTY;
        numbers.into_iter().for_each(|number| set.insert(number));
        set
    }
}

/// The kernel's list form; nothing for the empty set.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.iter().peekable();
        let mut comma = "";
        while let Some(low) = numbers.next() {
            let mut high = low;
            while numbers.peek() == Some(&(high + 1)) {
                high += 1;
                numbers.next();
            }
            if low == high {
                write!(f, "{comma}{low}")?
            } else {
                write!(f, "{comma}{low}-{high}")?
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl TryFrom<String> for CpuSet {
    type Error = String;

    fn try_from(text: String) -> Result<CpuSet, String> {
        CpuSet::parse(&text)
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> String {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse(text).unwrap()
    }

    #[test]
    fn lists_as_the_kernel_writes_them() {
        for text in ["", "0", "0-3", "0-55,112-167", "1,3,5,63,64,65-70", "16383"] {
            // The last of 65-70 joins what stands before it.
            assert_eq!(set(text).to_string(), text.replace("63,64,65-70", "63-70"));
        }
        assert_eq!(set(" 0-1 \n").iter().collect::<Vec<_>>(), [0, 1]);
        for bad in ["a", "3-1", "0-", "-1", "16384", "0 1", "99999999999"] {
            assert!(CpuSet::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn masks_as_the_kernel_writes_them() {
        for (text, list) in [
            ("0000,00000022,22222222\n", "1,5,9,13,17,21,25,29,33,37"),
            ("00000000,00000000,0000ffff", "0-15"),
            ("3", "0-1"),
            ("1,00000000,80000000", "31,64"),
        ] {
            assert_eq!(CpuSet::parse_mask(text), Ok(set(list)), "{text}");
        }
        let long = "0,".repeat(2000) + "1";
        for bad in ["", "0-3", "123456789", "1,,1", "+1", &long] {
            assert!(CpuSet::parse_mask(bad).is_err(), "{bad:.20}");
        }
    }

    #[test]
    fn sets_and_what_two_have_in_common() {
        let (one, two) = (set("0-9,100"), set("5-12"));
        assert_eq!(one.and(&two), set("5-9"));
        assert_eq!(one.or(&two), set("0-12,100"));
        assert_eq!(one.without(&two), set("0-4,100"));
        assert!(set("5-9").is_within(&one) && !two.is_within(&one) && one.meets(&two));
        assert!(!one.meets(&set("50")) && CpuSet::EMPTY.is_within(&one));
        assert_eq!((one.len(), set("").len(), one.has(100), one.has(10)), (11, 0, true, false));
        // No trace of words that became empty.
        assert_eq!(one.without(&set("100")), set("0-9"));
        assert_eq!(CpuSet::of_words(&[3, 0, 0]), set("0-1"));
    }
}
