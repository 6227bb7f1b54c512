//! The warm-up: a command that fills caches, run once before the ranks start. Here is
//! who runs it, what it sees, which directories it must have for itself and what its
//! end means for the step. Pure: `act::warmup` runs it.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use crate::config::{Settings, WarmPer};
use crate::facts::directories::Here;
use crate::facts::{Environment, Step};

/// A warm-up as one node runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmSpec {
    /// The command line, for /bin/sh -c.
    pub command: String,
    /// On which nodes.
    pub per: WarmPer,
    /// Seconds it may take, and seconds it may wait for another step's.
    pub seconds: u32,
    /// NodeName of the node that runs it.
    pub node: String,
    /// The job and the step, as JOB.STEP.
    pub step: String,
    /// Limits of the shell that submitted, as Slurm sets them for the tasks.
    pub limits: Vec<Limit>,
    /// Directories in which no other warm-up may run at the same time.
    pub targets: Vec<Target>,
}

/// A resource limit that srun brought with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// As Slurm names it: NOFILE.
    pub name: &'static str,
    /// The soft limit; `u64::MAX` is none.
    pub soft: u64,
}

/// A directory that warm-ups share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its absolute path.
    pub path: String,
    /// Why it is one.
    pub why: &'static str,
}

/// How a warm-up ended on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmEnd {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// It took too long and was ended.
    TooLong,
    /// It never ran: another step's held this directory all the time. Whose.
    Waited {
        /// The directory.
        target: String,
        /// The step that holds it, in words.
        holder: String,
    },
    /// It could not be started; why.
    NotStarted(String),
}

/// What a node's warm-up came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmOutcome {
    /// How it ended.
    pub end: WarmEnd,
    /// How long it ran.
    pub seconds: u32,
    /// The last lines of its output, made safe for a terminal.
    pub last_lines: Vec<String>,
}

/// The warm-up of this step, if one is wanted. `settings` are those of the site under
/// the user's; `environment` is the task's, as the plan made it.
pub fn wanted(_settings: &Settings, _step: &Step, _environment: &Environment, _here: &Here) -> Option<WarmSpec> {
    None
}

impl WarmSpec {
    /// Whether this node runs it.
    pub fn runs_here(&self, has_rank_0: bool) -> bool {
        self.per == WarmPer::Node || has_rank_0
    }

    /// What the command finds in its environment: the task's, but for what makes it a
    /// rank among others.
    pub fn variables(&self, task: Vec<(OsString, OsString)>) -> Vec<(OsString, OsString)> {
        task
    }
}

/// Why the step cannot start after its warm-up, on one line; `None`: it can. `outcomes`
/// by node; none for a node that did not run it.
pub fn judge(_spec: &WarmSpec, _outcomes: &[(String, Option<WarmOutcome>)]) -> Option<String> {
    None
}
