//! Checks of the node and the task on it.

use super::Rule;

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[];
