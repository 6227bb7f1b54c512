//! What every message between two ranks begins with: which operation it belongs to. Both
//! compare it with their own before they believe a number.

use crate::comm::{Op, Tag};

/// Bytes of a header.
pub(super) const LENGTH: usize = 64;

/// The beginning of all of them; its last digit is the version.
const MAGIC: [u8; 4] = *b"pgc1";

/// Bytes of a tag's word that are compared and shown.
const WORD: usize = 24;

/// What an operation's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Dtype {
    /// Bytes, of any number on each rank.
    Bytes = 1,
    F32 = 2,
}

/// One operation, as all ranks must have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) op: Op,
    pub(super) dtype: Dtype,
    pub(super) sequence: u64,
    /// Elements that each rank brings; 0 where each may bring another number.
    pub(super) count: u64,
    /// Whose bytes a broadcast is about.
    pub(super) root: u32,
    index: u32,
    word: [u8; WORD],
    /// Of the operations before it that went another way.
    before: u64,
}

impl Header {
    pub(super) fn new(op: Op, tag: Tag, sequence: u64, dtype: Dtype, count: u64, root: u32) -> Header {
        let mut word = [0; WORD];
        word.iter_mut().zip(tag.what.bytes()).for_each(|(to, byte)| *to = byte);
        Header { op, dtype, sequence, count, root, index: tag.index, word, before: 0 }
    }

    /// After operations with this digest.
    pub(super) fn after(self, before: u64) -> Header {
        Header { before, ..self }
    }

    pub(super) fn to_bytes(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.op as u8;
        bytes[5] = self.dtype as u8;
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.count.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.root.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.index.to_le_bytes());
        bytes[32..32 + WORD].copy_from_slice(&self.word);
        bytes[56..64].copy_from_slice(&self.before.to_le_bytes());
        bytes
    }

    /// None where these bytes are no header.
    pub(super) fn from_bytes(bytes: &[u8; LENGTH]) -> Option<Header> {
        let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let eight =
            |at: usize| (u64::from(u32::from_le_bytes(four(at + 4))) << 32) | u64::from(u32::from_le_bytes(four(at)));
        let mut word = [0; WORD];
        word.copy_from_slice(&bytes[32..32 + WORD]);
        Some(Header {
            op: (bytes[..4] == MAGIC).then(|| Op::of(bytes[4]))??,
            dtype: [Dtype::Bytes, Dtype::F32].into_iter().find(|dtype| *dtype as u8 == bytes[5])?,
            sequence: eight(8),
            count: eight(16),
            root: u32::from_le_bytes(four(24)),
            index: u32::from_le_bytes(four(28)),
            word,
            before: eight(56),
        })
    }

    /// "all_gather #8812 of block 17".
    pub(super) fn name(&self) -> String {
        // The other's word is printed as it is: both ranks hold the same key.
        let word = String::from_utf8_lossy(&self.word);
        format!("{} #{} of {} {}", self.op.name(), self.sequence, word.trim_end_matches('\0'), self.index)
    }

    /// With what it carries: "all_gather #8812 of block 17 (1024 f32)".
    pub(super) fn describe(&self) -> String {
        match (self.op, self.dtype) {
            (Op::Broadcast, _) => format!("{} from rank {}", self.name(), self.root),
            (_, Dtype::F32) => format!("{} ({} f32)", self.name(), self.count),
            (_, Dtype::Bytes) => self.name(),
        }
    }

    /// What differs, in words.
    pub(super) fn difference(&self, other: &Header) -> Option<&'static str> {
        if self == other {
            None
        } else if self.op != other.op {
            Some("the operations differ")
        } else if (self.word, self.index) != (other.word, other.index) {
            Some("what they are for differs")
        } else if self.sequence != other.sequence {
            Some("one has done more operations than the other")
        } else if self.count != other.count {
            Some("the counts differ")
        } else if self.root != other.root {
            Some("the roots differ")
        } else if self.before != other.before {
            Some("the collectives before it differ")
        } else {
            Some("the types differ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Header {
        Header::new(Op::AllGather, Tag::of("block", 17), 8812, Dtype::F32, 1024, 0)
    }

    #[test]
    fn a_header_comes_back_from_its_bytes_and_garbage_does_not() {
        assert_eq!(Header::from_bytes(&some().to_bytes()), Some(some()));
        assert_eq!(Header::from_bytes(&some().after(u64::MAX - 1).to_bytes()), Some(some().after(u64::MAX - 1)));
        assert_eq!(some().describe(), "all_gather #8812 of block 17 (1024 f32)");
        assert_eq!(Header::from_bytes(&[0; LENGTH]), None);
        for (at, value) in [(0, b'x'), (3, b'2'), (4, 0), (4, 7), (5, 0), (5, 3)] {
            let mut bytes = some().to_bytes();
            bytes[at] = value;
            assert_eq!(Header::from_bytes(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn each_difference_is_named() {
        let tag = Tag::of("block", 17);
        assert_eq!(some().difference(&some()), None);
        for (other, why) in [
            (Header::new(Op::AllReduce, tag, 8812, Dtype::F32, 1024, 0), "operations"),
            (Header::new(Op::AllGather, Tag::of("block", 16), 8812, Dtype::F32, 1024, 0), "for"),
            (Header::new(Op::AllGather, Tag::of("head", 17), 8812, Dtype::F32, 1024, 0), "for"),
            (Header::new(Op::AllGather, tag, 8811, Dtype::F32, 1024, 0), "more operations"),
            (Header::new(Op::AllGather, tag, 8812, Dtype::F32, 1025, 0), "counts"),
            (Header::new(Op::AllGather, tag, 8812, Dtype::F32, 1024, 1), "roots"),
            (Header::new(Op::AllGather, tag, 8812, Dtype::Bytes, 1024, 0), "types"),
            (some().after(1), "before it"),
        ] {
            let difference = some().difference(&other).unwrap();
            assert!(difference.contains(why), "{difference}");
        }
    }
}
