//! What a task finds where it runs: its CPUs, its limits, NCCL's files as seen
//! from inside its container. Read in the task, as the user.

use super::directories::Directory;
use super::program::StartFacts;

/// The task's surroundings; what is not known is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskFacts {
    /// CPUs in the task's affinity mask.
    pub cpus: Option<u32>,
    /// What NCCL's configuration files say, the first one that names a variable
    /// first.
    pub nccl_files: Vec<FileValue>,
    /// Whether a container's image replaced the environment.
    pub container: Container,
    /// Names that the container plugin was told to leave as they are.
    pub container_keeps: Vec<String>,
    /// What is known for starting another program than the command; `None`: not
    /// looked for.
    pub start: Option<StartFacts>,
    /// Directories for caches: what `plan::caches::wanted` names, as they were
    /// found or made.
    pub directories: Vec<Directory>,
}

/// A variable in one of NCCL's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileValue {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The file.
    pub file: String,
}

/// Where the task is, seen from the container plugin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Container {
    /// No container, or none that is known of.
    #[default]
    None,
    /// Inside one: its image's environment has been imported.
    Inside,
    /// One was asked for, and its plugin comes after ours: the image's
    /// environment will replace ours.
    ComesLater,
}
