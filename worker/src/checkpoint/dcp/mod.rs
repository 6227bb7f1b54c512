//! PyTorch's distributed checkpoint (`torch.distributed.checkpoint`) on disk, written and
//! read without Python.
//!
//! A checkpoint is a directory: one file per rank, `__R_0.distcp`, in which every item (a
//! box of a tensor, or a Python object) is a whole file of `torch.save`, a zip of stored
//! entries; and `.metadata`, a pickle that says what tensors there are, which boxes they
//! are made of, and where each lies. [`write_shard`] makes the files, [`metadata`] the
//! pickle; [`Dcp`] reads both, ours or PyTorch's, at any world size; [`verify`] looks for
//! what PyTorch does not: it loads a shard with a flipped bit without a word.
//!
//! It must not decide which checkpoint counts, rename or delete anything, call fsync, or
//! run a pickle: `pickle` builds plain values from a list of known names.

mod boxes;
mod error;
mod pickle;
mod read;
mod verify;
mod write;
mod zip;

pub use boxes::{Chunk, boxes};
pub use error::{DcpError, Fault};
pub use read::{Dcp, Dtype, NeededFile, TensorInfo};
pub use verify::verify;
pub use write::{Item, Placed, Shard, metadata, shard_name, write_shard};

/// The file that PyTorch writes last and looks for first.
pub const METADATA: &str = ".metadata";
