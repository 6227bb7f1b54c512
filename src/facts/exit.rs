//! How a rank ended: what its node sends to srun.

use serde::{Deserialize, Serialize};

/// The end of one rank that did not end well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Its rank in the step.
    pub rank: u32,
    /// NodeName of its node.
    pub node: String,
    /// The node's rank in the step.
    pub node_rank: u32,
    /// Its rank on its node.
    pub local_rank: u32,
    /// The PCI address of its GPU, else its index, where known.
    pub gpu: Option<String>,
    /// How it ended.
    pub kind: Ended,
    /// When its node's slurmstepd saw it, by that node's clock: nanoseconds since 1970.
    pub time_ns: u64,
    /// Whether the kernel killed one of its processes for want of memory.
    pub oom: Oom,
    /// That node's clock minus the one of rank 0's node, and how wrong this may be, in
    /// nanoseconds; `None` where nobody compared them.
    pub clock: Option<(i64, u64)>,
    /// Why the rank was not started: the line that the user has seen.
    pub line: Option<String>,
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// With this exit code, which is not zero.
    Exit(i32),
    /// By this signal.
    Signal(i32),
    /// It was not started: palingenesis refused.
    Refused,
}

/// What the node says of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Oom {
    /// The kernel killed nothing of this rank, nor of this step on this node, for want of
    /// memory.
    No,
    /// It killed.
    Killed,
    /// The node does not tell.
    Unknown,
}
