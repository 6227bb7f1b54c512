//! Checks of what NCCL's variables hold.

use super::Rule;

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[];
