//! Whether a directory is the same one on all nodes, and can be written.

use crate::plan::checks::Rule;

/// The checks that look at directories.
pub const RULES: &[Rule] = &[];
