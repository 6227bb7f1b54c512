//! The memory policy of a rank: its memory beside its CPUs.

use serde::Serialize;

use crate::config::Settings;
use crate::facts::CpuSet;

use super::super::Facts;
use super::Binding;

/// A memory policy of set_mempolicy(2); it survives exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPolicy {
    /// MPOL_BIND instead of MPOL_PREFERRED_MANY.
    pub strict: bool,
    /// NUMA nodes.
    pub nodes: CpuSet,
}

pub(super) fn decide(binding: &mut Binding, facts: &Facts, settings: &Settings) {
    let _ = (binding, facts, settings);
}
