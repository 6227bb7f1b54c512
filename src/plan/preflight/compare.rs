//! What must be equal on all nodes, and what of it differs.

use super::report::NodeReport;
use crate::plan::Warning;
use crate::plan::checks::Rule;

/// The checks that look at the reports.
pub const RULES: &[Rule] = &[];

/// What the reports, by node rank, have against a start.
pub fn compare(_reports: &[NodeReport]) -> Vec<Warning> {
    Vec::new()
}
