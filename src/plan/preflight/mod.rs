//! What the nodes of a step bring to the pre-flight and what it comes to. Pure: how
//! they meet is `act::preflight`'s.

pub mod compare;
pub mod directories;
pub mod report;

use super::checks::Rule;

/// Every check between the nodes.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    [compare::RULES, directories::RULES, super::warmup::RULES].into_iter().flatten()
}
