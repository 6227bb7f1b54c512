//! The memory policy of a rank: its memory beside its CPUs. Preferred, not bound:
//! where the node is full a program then gets memory that is farther away, and
//! not killed.

use serde::Serialize;

use crate::config::{Memory, Settings};
use crate::facts::CpuSet;

use super::super::{Facts, Plan};
use super::cpus;

/// A memory policy of set_mempolicy(2); it survives exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPolicy {
    /// MPOL_BIND instead of MPOL_PREFERRED_MANY.
    pub strict: bool,
    /// NUMA nodes.
    pub nodes: CpuSet,
}

pub(super) fn decide(plan: &mut Plan, facts: &Facts, settings: &Settings, gpus: &Result<Vec<usize>, String>) {
    match policy(plan, facts, settings, gpus) {
        Ok((policy, why)) => {
            let how = if policy.strict { "only" } else { "preferred" };
            let nodes = if policy.nodes.len() == 1 { "node" } else { "nodes" };
            let value = format!("NUMA {nodes} {}, {how}", policy.nodes);
            plan.binding.say("memory", Some(value), why);
            plan.binding.memory = Some(policy);
        }
        Err(why) => plan.binding.say("memory", None, why),
    }
}

/// The policy and why, or why none.
fn policy(
    plan: &Plan,
    facts: &Facts,
    settings: &Settings,
    gpus: &Result<Vec<usize>, String>,
) -> Result<(MemoryPolicy, String), String> {
    if !settings.bind.mem {
        return Err(format!("as it is: bind={}", settings.bind));
    }
    let strict = match settings.mem {
        Memory::Off => return Err("as it is: mem=off".into()),
        Memory::Prefer => false,
        Memory::Bind => true,
    };
    if let Some(user) = &facts.task.bound_by_user.mem {
        return Err(format!("as {} says", crate::config::printable(user)));
    }
    match facts.task.memory.has_policy {
        Some(false) => {}
        Some(true) => return Err("as it is: a memory policy is set already, by numactl or the like".into()),
        None => return Err("as it is: whether a memory policy is set already is not known".into()),
    }
    let topology = &facts.node.topology;
    let as_is = |why: String| format!("as it is: {why}");
    let bound = cpus::bound_to(facts, plan.step.shape, gpus).map_err(as_is)?;
    cpus::beside(topology, bound).map_err(as_is)?;
    let Some(mask) = plan.binding.cpus.as_ref().or(facts.task.mask.as_ref()) else {
        return Err("as it is: the task's mask is not known".into());
    };
    let Some(allowed) = &facts.task.memory.allowed else {
        return Err("as it is: which NUMA nodes it may use is not known".into());
    };
    // Nodes without CPUs are the GPUs' own memory.
    let with_cpus: CpuSet = topology.nodes.iter().filter(|node| !node.cpus.is_empty()).map(|node| node.id).collect();
    let spanned: CpuSet = topology.nodes.iter().filter(|node| node.cpus.meets(mask)).map(|node| node.id).collect();
    if spanned.is_empty() {
        return Err(format!("as it is: which NUMA nodes the CPUs {mask} are on is not known"));
    }
    let nodes = spanned.and(allowed);
    if nodes.is_empty() {
        return Err(format!("as it is: its CPUs are on NUMA node {spanned}, and it may use {allowed} only"));
    }
    // Also where its cpuset lacks them for now: a policy holds when that changes.
    let elsewhere = if strict { with_cpus.or(allowed) } else { with_cpus };
    if elsewhere.is_within(&nodes) {
        return Err(format!("as it is: its CPUs are on all of its NUMA nodes ({nodes})"));
    }
    let why = if strict { "where its CPUs are, and nowhere else: mem=bind" } else { "where its CPUs are" };
    Ok((MemoryPolicy { strict, nodes }, why.into()))
}
