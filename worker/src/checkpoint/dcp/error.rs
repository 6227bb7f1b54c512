//! What can be wrong with a checkpoint, told to people.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One thing that is wrong in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// In which file, relative to the checkpoint; none where none is to blame.
    pub file: Option<String>,
    /// In which tensor or object.
    pub item: Option<String>,
    /// What is wrong: "is missing".
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, &self.item) {
            (Some(file), Some(item)) => write!(f, "{file}: {item} {}", self.what),
            (Some(name), None) | (None, Some(name)) => write!(f, "{name} {}", self.what),
            (None, None) => f.write_str(&self.what),
        }
    }
}

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum DcpError {
    /// A file cannot be read; the cause says why.
    #[error("{path} cannot be read: {source}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {fault}", path = path.display())]
    Broken {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Where and what.
        fault: Fault,
    },
    /// The checkpoint has no such tensor or object.
    #[error("{path} has no {name}: it is of another model, or was written by another program", path = path.display())]
    Absent {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Of the tensor or object.
        name: String,
    },
    /// The checkpoint's tensor has another shape.
    #[error("{path}: {name} has shape {there:?}, the model's has {wanted:?}: it is of another model", path = path.display())]
    Shape {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Of the tensor.
        name: String,
        /// In the checkpoint.
        there: Vec<usize>,
        /// What was asked for.
        wanted: Vec<usize>,
    },
    /// The files of all ranks together are no checkpoint; nothing was written.
    #[error("the ranks' files do not make a checkpoint: {}", list(faults))]
    Incomplete {
        /// What is missing or twice.
        faults: Vec<Fault>,
    },
}

/// The first few.
fn list(faults: &[Fault]) -> String {
    let mut text = faults.iter().take(3).map(ToString::to_string).collect::<Vec<_>>().join("; ");
    if faults.len() > 3 {
        text += &format!("; and {} more", faults.len() - 3);
    }
    text
}

impl DcpError {
    /// The same as a fault of the checkpoint.
    pub(super) fn into_fault(self) -> Fault {
        match self {
            Self::Broken { fault, .. } => fault,
            Self::Io { path, source } => Fault {
                file: path.file_name().map(|name| name.to_string_lossy().into_owned()),
                item: None,
                what: format!("cannot be read: {source}"),
            },
            other => Fault { file: None, item: None, what: other.to_string() },
        }
    }
}
