//! Checkpoints: written so that PyTorch's `torch.distributed.checkpoint` reads them,
//! committed as a whole, judged before they are trusted, and read at any world size.
//! Nothing here follows a symbolic link out of `output_dir`, and nothing is removed that
//! this program has not made.
//!
//! ```text
//! output_dir/step-500/manifest.json         what is in it, with checksums
//! output_dir/step-500/dcp/.metadata         PyTorch's index
//! output_dir/step-500/dcp/__0_0.distcp      what rank 0 held, and so on
//! output_dir/step-600.tmp-ATTEMPT/          being written, or what an attempt left behind
//! output_dir/step-500.old-ATTEMPT/          replaced by another step-500; still counts if valid
//! output_dir/latest -> step-500             a hint for people, never read
//! output_dir/final/                         the model for transformers
//! output_dir/lock.json                      locked by the training that runs there
//! ```

mod choose;
mod claim;
pub mod dcp;
mod early;
mod export;
mod import;
mod load;
mod manifest;
mod names;
mod purge;
mod save;
mod together;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::comm::CommError;

pub use choose::{Choice, Chosen, Skipped};
pub use claim::FILE as LOCK_FILE;
pub use early::Early;
pub use export::{Dtype, Export, Exported, Exporter, tokenizer_files};
pub use import::Import;
pub use manifest::{FileSum, Manifest, TensorShape};
pub use purge::Purged;
pub use save::{Saved, What};
pub use together::agree;

/// A part of a tensor that a rank holds: `range` of the tensor's numbers in row-major
/// order.
#[derive(Debug)]
pub struct Part<'a> {
    /// "model.layers.0.mlp.up_proj.weight", "optimizer.state.….exp_avg".
    pub name: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    /// Which of its numbers.
    pub range: Range<usize>,
    /// Those numbers.
    pub data: &'a [f32],
}

/// The same, to be filled.
#[derive(Debug)]
pub struct PartMut<'a> {
    /// As in [`Part`].
    pub name: &'a str,
    /// Of the whole tensor: the checkpoint must have the same.
    pub shape: &'a [usize],
    /// Which of its numbers.
    pub range: Range<usize>,
    /// Where they go.
    pub data: &'a mut [f32],
}

/// Where a training stands. Everything else follows from it and the configuration: the
/// order of samples from the seed, the learning rate from the step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainState {
    /// Optimizer steps done.
    pub step: u64,
    /// Sequences seen: the cursor into the data, the same at every world size.
    pub samples: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Of weights and order.
    pub seed: u64,
    /// Steps that changed nothing, for a loss or norm was not finite.
    pub skipped: u64,
    /// The schedule that the learning rate follows.
    pub schedule: Schedule,
    /// How often the training was resumed before.
    pub restarts: u32,
}

/// What the learning rate follows from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Steps of the whole training.
    pub steps: u64,
    /// Of these, with a rising learning rate.
    pub warmup_steps: u64,
    /// The highest.
    pub lr: f64,
    /// The last.
    pub min_lr: f64,
}

/// Why a checkpoint was not written, chosen, read or exported. One line each; the same on
/// all ranks, but for [`CheckpointError::Comm`].
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The ranks no longer reach each other.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The file system did not do it: full, read-only, not the same on all nodes. What was
    /// there before still is.
    #[error("{0}")]
    Storage(String),
    /// What was to be read is incomplete or not what was written.
    #[error("{0}")]
    Damaged(String),
    /// What was asked for makes no sense: another try gives the same.
    #[error("{0}")]
    Refused(String),
    /// Another training runs in the same `output_dir`. It may have ended at the next try.
    #[error("{0}")]
    Busy(String),
}

/// A result of this module.
pub type Result<T> = std::result::Result<T, CheckpointError>;

/// The checkpoints below one `output_dir`, as one rank sees them. [`Checkpoints::save`],
/// [`Checkpoints::choose`], [`Checkpoints::load`] and [`Checkpoints::purge`] are called by
/// all ranks together.
#[derive(Debug)]
pub struct Checkpoints {
    output: PathBuf,
    launch: String,
    host: String,
    patience: Duration,
    /// In milliseconds since 1970: a launch's id may come again.
    began: u128,
    /// Counts what this process wrote, so that each has a name of its own.
    attempts: u32,
    /// Step directories whose every byte this process has written or checked, with the
    /// manifest's own checksum. Rank 0's.
    verified: BTreeMap<String, String>,
    /// The lock on `output_dir`. Rank 0's.
    held: Option<File>,
    /// The step that this process saved last. Rank 0's.
    saved: Option<u64>,
}

impl Checkpoints {
    /// Of `output`, which need not be there yet. `launch` tells this launch from others
    /// (PALINGENESIS_LAUNCH_ID; without one, the process id is taken). `host` is
    /// this rank's, for errors. A file that another node has made may take `patience` to
    /// be seen here, as NFS has it.
    #[must_use]
    pub fn new(output: &Path, launch: Option<&str>, host: &str, patience: Duration) -> Checkpoints {
        Checkpoints {
            output: output.to_path_buf(),
            launch: names::launch(launch),
            host: host.to_string(),
            patience,
            began: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis(),
            attempts: 0,
            verified: BTreeMap::new(),
            held: None,
            saved: None,
        }
    }

    /// A name for what this process is about to write.
    fn attempt(&mut self) -> String {
        self.attempts += 1;
        format!("{}-{}-{}", self.launch, self.began, self.attempts)
    }

    /// "rank 3 on n2".
    fn who(&self, rank: u32) -> String {
        format!("rank {rank} on {}", self.host)
    }
}

/// A system's error without its number, and what helps against it.
pub(crate) fn why(error: &io::Error) -> String {
    let text = error.to_string();
    let end = text.find(" (os error").unwrap_or(text.len());
    let cure = match error.raw_os_error() {
        Some(libc::ENOSPC) => "; free space there, or lower checkpoint.keep",
        Some(libc::EDQUOT) => "; free some of your quota there, or lower checkpoint.keep",
        Some(libc::EFBIG) => "; raise ulimit -f, or take a file system for larger files",
        _ => "",
    };
    format!("{}{cure}", text[..end].to_lowercase())
}
