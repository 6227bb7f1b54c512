//! Checks of the command and the layout of its step.

use super::Rule;

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[];
