//! What is mounted where, of /proc/self/mountinfo.

use serde::{Deserialize, Serialize};

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where.
    pub at: String,
    /// The file system's type.
    pub kind: String,
    /// What is mounted, without names and passwords of users.
    pub source: String,
}
