//! Checks of what the variables of PyTorch, CUDA and the other libraries hold.

use super::Rule;

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[];
