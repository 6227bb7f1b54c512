//! Whether a directory is the same one on all nodes, and can be written.
//!
//! Rank 0's node leaves a token in each of [`places`], every node says what it sees of it
//! ([`Seen`]), and [`judge`] says what follows. `act::preflight::shared` does it.

use serde::{Deserialize, Serialize};

use crate::config::Settings;
use crate::facts::Environment;
use crate::facts::directories::{Fault, Here};
use crate::facts::mounts::Mount;
use crate::plan::checks::Rule;
use crate::plan::{Plan, Warning};

/// The checks that look at directories.
pub const RULES: &[Rule] = &[];

/// When directories are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before a warm-up.
    Start,
    /// After the warm-up that ran on rank 0's node alone.
    Warmed,
}

/// A directory that all nodes should share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What names it: `output`, `cache`, or a variable.
    pub what: String,
    /// Absolute.
    pub path: String,
    /// Whether rank 0's node makes it.
    pub make: bool,
    /// Whether every node must be able to write there.
    pub write: bool,
}

/// What rank 0's node left in a place. Says nothing that a receiver acts on unless it has
/// the same place itself: another node never chooses a path here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// [`Place::what`].
    pub what: String,
    /// [`Place::path`] on rank 0's node.
    pub path: String,
    /// The file's name; `None` where none could be made.
    pub name: Option<String>,
    /// The file's content.
    pub content: String,
    /// Whether the place itself was made for it.
    pub made: bool,
}

/// What became of a token on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sight {
    /// It is there, after so many milliseconds.
    Same(u64),
    /// The directory is there, the token is not.
    Absent,
    /// There was none to look for.
    NoToken,
    /// The place has another path on this node, or none.
    Elsewhere,
}

/// A place as a node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// [`Place::what`].
    pub what: String,
    /// [`Place::path`] on that node; empty where it has no such place.
    pub path: String,
    /// The token.
    pub sight: Sight,
    /// Why the directory could not be looked at.
    pub fault: Option<Fault>,
    /// Why no file could be made and written.
    pub write: Option<Fault>,
    /// Bytes that the user may still write, and all.
    pub space: Option<(u64, u64)>,
    /// The same of files; absent where the file system counts none.
    pub files: Option<(u64, u64)>,
    /// What is mounted there.
    pub mount: Option<Mount>,
    /// The directory's number on its file system.
    pub inode: Option<u64>,
}

/// The directories to look at. `environment` is the rank's as it was before the plan.
pub fn places(
    _plan: &Plan,
    _settings: &Settings,
    _environment: &Environment,
    _here: &Here,
    _moment: Moment,
) -> Vec<Place> {
    Vec::new()
}

/// What the nodes saw, by node rank, has against a start.
pub fn judge(_seen: &[(String, Vec<Seen>)], _moment: Moment) -> Vec<Warning> {
    Vec::new()
}
