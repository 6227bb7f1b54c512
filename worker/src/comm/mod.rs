//! How ranks exchange bytes and numbers. Every operation has a number, a deadline and a
//! header that all ranks compare: what does not fit is an error that names both, never a
//! hang. Nothing here knows what the numbers mean.

pub mod alone;
pub mod control;
pub mod local;
pub mod nccl;
pub mod recorder;
pub mod tcp;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::Engine;
pub use tcp::connect;

/// What an operation is for, as errors and the recorder name it: "block 17".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// A word, the same on all ranks.
    pub what: &'static str,
    /// Which of them.
    pub index: u32,
}

impl Tag {
    /// One of several.
    #[must_use]
    pub const fn of(what: &'static str, index: u32) -> Tag {
        Tag { what, index }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.index)
    }
}

/// The kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// All get all ranks' shards.
    AllGather = 1,
    /// Each gets its part of the sum.
    ReduceScatter = 2,
    /// All get the sum.
    AllReduce = 3,
    /// All get one rank's.
    Broadcast = 4,
    /// All wait for all.
    Barrier = 5,
    /// All get all ranks' bytes.
    Exchange = 6,
}

impl Op {
    /// The kind of this number, as it comes from another rank or a file.
    #[must_use]
    pub fn of(number: u8) -> Option<Op> {
        use Op::{AllGather, AllReduce, Barrier, Broadcast, Exchange, ReduceScatter};
        [AllGather, ReduceScatter, AllReduce, Broadcast, Barrier, Exchange].into_iter().find(|op| *op as u8 == number)
    }

    /// As in errors and the recorder.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllReduce => "all_reduce",
            Op::Broadcast => "broadcast",
            Op::Barrier => "barrier",
            Op::Exchange => "exchange",
        }
    }
}

/// Why an operation did not come to its end. Each names the rank, its host and the
/// operation; after one of them the group is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CommError {
    /// A rank is gone: killed, or its connection broke.
    #[error("rank {rank} on {host} is gone ({why}) in {op}")]
    Lost {
        /// The rank that is gone.
        rank: u32,
        /// Its host.
        host: String,
        /// How that was seen.
        why: String,
        /// "all_gather #8812 of block 17".
        op: String,
    },
    /// A rank has ended with an error of its own, and has said why.
    #[error("rank {rank} on {host} has ended: {why}")]
    Ended {
        /// The rank that has ended.
        rank: u32,
        /// Its host.
        host: String,
        /// As it said itself.
        why: String,
    },
    /// Ranks did not come in time, but live.
    #[error("{op} was not over within {} s: waiting for {who}", .after.as_secs())]
    Late {
        /// "rank 11 on node2, which is at all_gather #8811 of block 16".
        who: String,
        /// The operation.
        op: String,
        /// The limit.
        after: Duration,
    },
    /// Two ranks are at different operations: a mistake in the program, or mixed versions.
    /// All ranks say the same of it, also those that are neither.
    #[error("rank {rank} on {host} is at {theirs}, but rank {by} on {by_host} at {ours}: {why}")]
    Mismatch {
        /// One of them.
        rank: u32,
        /// Its host.
        host: String,
        /// Its operation: "all_gather #12 of block 3 (1024 f32)".
        theirs: String,
        /// The rank that saw it.
        by: u32,
        /// Its host.
        by_host: String,
        /// Its operation.
        ours: String,
        /// What differs.
        why: String,
    },
    /// The ranks could not be brought together at the start.
    #[error("{0}")]
    Start(String),
    /// What was asked for cannot work, and will not at the next try: no key for several
    /// hosts, a rank twice, mixed versions.
    #[error("{0}")]
    Refused(String),
    /// This machine's own fault: no memory, no descriptor.
    #[error("{0}")]
    Own(String),
}

/// Bytes between ranks: what is said of checkpoints, choices and reports.
pub trait Exchange {
    /// This rank.
    fn rank(&self) -> u32;
    /// All of them.
    fn world_size(&self) -> u32;
    /// Every rank's bytes, by rank.
    ///
    /// # Errors
    /// See [`CommError`].
    fn exchange(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;
    /// `root`'s bytes on all ranks.
    ///
    /// # Errors
    /// See [`CommError`].
    fn broadcast(&mut self, tag: Tag, root: u32, bytes: &mut Vec<u8>) -> Result<(), CommError>;
    /// Waits for all.
    ///
    /// # Errors
    /// See [`CommError`].
    fn barrier(&mut self, tag: Tag) -> Result<(), CommError>;
    /// A few f64 summed over the ranks, in the order of the ranks: the same bits on all.
    ///
    /// # Errors
    /// See [`CommError`].
    fn sum(&mut self, tag: Tag, values: &mut [f64]) -> Result<(), CommError> {
        let own: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.exchange(tag, &own)?;
        values.fill(0.0);
        for bytes in &all {
            let numbers = bytes.chunks_exact(8).map(|eight| f64::from_le_bytes(eight.try_into().unwrap_or_default()));
            values.iter_mut().zip(numbers).for_each(|(value, number)| *value += number);
        }
        Ok(())
    }
}

/// An operation that was begun: what it reads and writes is not to be touched before
/// [`Collective::finish`] has been given this.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the operation's numbers are there when it is finished"]
pub struct Ongoing(pub u64);

/// Numbers between ranks. The order of a sum is the same each time at one world size, so
/// that its bits are, too. All are in place, and as long as world_size times a part, which
/// all ranks have equally long and stored alike.
pub trait Collective<E: Engine>: Exchange {
    /// Whether an operation goes on beside the engine's: then it is worth to begin it before
    /// its numbers are needed. If not, it is over when it was begun.
    fn overlaps(&self) -> bool {
        false
    }
    /// Begins: `full` becomes all ranks' parts, one after the other; this rank's own is there.
    ///
    /// # Errors
    /// See [`ShardError`](crate::shard::ShardError): another rank's, or the device's.
    fn all_gather(&mut self, engine: &E, tag: Tag, full: E::ViewMut<'_>) -> crate::shard::Result<Ongoing>;
    /// Begins: this rank's part of `full` becomes the sum over all ranks; the others hold
    /// anything.
    ///
    /// # Errors
    /// As above.
    fn reduce_scatter(&mut self, engine: &E, tag: Tag, full: E::ViewMut<'_>) -> crate::shard::Result<Ongoing>;
    /// Begins: `values`, of any length, become the sum over the ranks.
    ///
    /// # Errors
    /// As above.
    fn all_reduce(&mut self, engine: &E, tag: Tag, values: E::ViewMut<'_>) -> crate::shard::Result<Ongoing>;
    /// What the engine is told to do from here on comes after this operation.
    ///
    /// # Errors
    /// As above.
    fn finish(&mut self, engine: &E, ongoing: Ongoing) -> crate::shard::Result<()>;
}
