//! The training loop: schedule, accumulation, clipping, optimizer, metrics, checkpoints and
//! what ends it. Which rank this is and how the ranks were brought together is decided
//! outside; how numbers are computed and files written, in the other modules.

mod export;
mod metrics;
mod output;
mod places;
mod restarts;
mod schedule;
pub mod signals;
mod steps;

use std::time::Instant;

pub use metrics::{FILE as METRICS_FILE, Stragglers, Times};
pub use restarts::FILE as RESTARTS_FILE;
pub use schedule::learning_rate;
pub use steps::{End, Job, run};

use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::engine::EngineError;
use crate::model::SpecError;
use crate::shard::ShardError;

/// All steps are done.
pub const EXIT_DONE: u8 = 0;
/// Something else failed, or the loss was not finite again and again: a person must look.
pub const EXIT_FAILED: u8 = 1;
/// The command line makes no sense.
pub const EXIT_USAGE: u8 = 2;
/// A rank was lost, storage failed, another training has output_dir or a signal came: start
/// it again (EX_TEMPFAIL).
pub const EXIT_RETRY: u8 = 75;
/// Started again several times without getting further: hold it (EX_PROTOCOL's number).
pub const EXIT_NO_PROGRESS: u8 = 76;
/// The configuration, the model or the data is wrong: another start gives the same
/// (EX_CONFIG).
pub const EXIT_CONFIG: u8 = 78;

/// Why a training ended before its time. One line each.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// What was asked for cannot be done.
    #[error("{0}")]
    Config(String),
    /// Another rank is gone or late.
    #[error("{0}")]
    Comm(CommError),
    /// The device.
    #[error("{0}")]
    Engine(#[from] EngineError),
    /// A checkpoint was not written or read.
    #[error("{0}")]
    Checkpoint(CheckpointError),
    /// The file system, elsewhere.
    #[error("{0}")]
    Storage(String),
    /// Several starts got no further.
    #[error("{0}")]
    NoProgress(String),
    /// The numbers are no longer numbers.
    #[error("{0}")]
    Diverged(String),
}

impl TrainError {
    /// What the process ends with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            // A model that does not fit, or a token that no vocabulary has: the others end with
            // 75, and srun with the highest code.
            TrainError::Config(_)
            | TrainError::Engine(EngineError::Wrong(_))
            | TrainError::Comm(CommError::Refused(_))
            | TrainError::Checkpoint(CheckpointError::Refused(_)) => EXIT_CONFIG,
            TrainError::Comm(CommError::Mismatch { .. }) => EXIT_FAILED,
            TrainError::Comm(_) | TrainError::Checkpoint(_) | TrainError::Storage(_) => EXIT_RETRY,
            // A GPU that fell off the bus: another start may be given another one.
            TrainError::Engine(EngineError::Device(_) | EngineError::Stopped) => EXIT_RETRY,
            TrainError::NoProgress(_) => EXIT_NO_PROGRESS,
            TrainError::Diverged(_) => EXIT_FAILED,
        }
    }

    /// Whether other ranks do not know it by themselves.
    #[must_use]
    pub fn is_own(&self) -> bool {
        !matches!(
            self,
            TrainError::Comm(CommError::Lost { .. } | CommError::Ended { .. } | CommError::Late { .. })
                | TrainError::Engine(EngineError::Stopped)
        )
    }
}

impl From<CommError> for TrainError {
    fn from(error: CommError) -> TrainError {
        TrainError::Comm(error)
    }
}

impl From<ShardError> for TrainError {
    fn from(error: ShardError) -> TrainError {
        match error {
            ShardError::Comm(error) => TrainError::Comm(error),
            ShardError::Engine(error) => TrainError::Engine(error),
        }
    }
}

impl From<CheckpointError> for TrainError {
    fn from(error: CheckpointError) -> TrainError {
        match error {
            CheckpointError::Comm(error) => TrainError::Comm(error),
            other => TrainError::Checkpoint(other),
        }
    }
}

impl From<SpecError> for TrainError {
    fn from(error: SpecError) -> TrainError {
        TrainError::Config(error.0)
    }
}

impl From<ConfigError> for TrainError {
    fn from(error: ConfigError) -> TrainError {
        TrainError::Config(error.to_string())
    }
}

impl From<DataError> for TrainError {
    fn from(error: DataError) -> TrainError {
        match error {
            DataError::Wrong(text) => TrainError::Config(text),
            DataError::Io(text) => TrainError::Storage(text),
        }
    }
}

/// Since when this process is there: what the first step's time is counted from.
#[must_use]
pub fn process_start(now: Instant) -> Instant {
    // Of the system's 10 ms ticks: the time that exec and the loader took.
    let ticks = std::fs::read_to_string("/proc/self/stat").ok();
    let ticks = ticks.and_then(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse::<f64>().ok());
    let up = std::fs::read_to_string("/proc/uptime").ok();
    let up = up.and_then(|up| up.split_whitespace().next()?.parse::<f64>().ok());
    let age = up.zip(ticks).map_or(0.0, |(up, ticks)| up - ticks / 100.0);
    now.checked_sub(std::time::Duration::from_secs_f64(age.clamp(0.0, 60.0))).unwrap_or(now)
}
