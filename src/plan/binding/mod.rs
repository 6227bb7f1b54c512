//! Binding: which GPU a rank uses, and the CPUs, memory and network cards that
//! go with it. Cards are matched by PCI address, never by name or number; what is
//! not known is left alone, and says so.
//!
//! The node's part (which cards carry the training's traffic, which card belongs
//! to which GPU) is the same on every rank of a node: NCCL joins the ranks' lists
//! by position, and unlike ones give wrong rings
//! (<https://github.com/NVIDIA/nccl/issues/1478>). The rank's part is its CPUs,
//! its memory and UCX's card.

mod assignment;
pub mod cpus;
#[cfg(test)]
mod cpus_tests;
pub mod distance;
#[cfg(test)]
pub(crate) mod machine;
pub mod memory;
#[cfg(test)]
mod memory_tests;
pub mod nics;
#[cfg(test)]
mod nics_tests;
pub mod ranks;
pub mod subnets;
#[cfg(test)]
pub(crate) mod tasks;
#[cfg(test)]
mod unseen_tests;
pub mod visible;

use std::borrow::Cow;

use serde::Serialize;

use crate::config::Settings;
use crate::facts::task::Peer;
use crate::facts::topology::GpuVendor;
use crate::facts::{CpuSet, NodeFacts};

use super::precedence::Offers;
use super::{Facts, Plan, Shape, launch};
pub use distance::Distance;
pub use memory::MemoryPolicy;
pub use nics::NodeNics;

/// Ids of findings that are one node's alone, such as a card that is down: told
/// from each node, not from rank 0's only.
pub const OF_A_NODE: [&str; 2] = ["nic-down", "cache-lock-old"];

/// Where a rank runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Binding {
    /// The mask to set; `None`: it stays as Slurm set it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuSet>,
    /// The memory policy to set; `None`: it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryPolicy>,
    /// What was decided, also where nothing is changed.
    pub decisions: Vec<Decision>,
}

/// One thing that was decided, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// gpu, cpus, memory, nic, topology.
    pub what: &'static str,
    /// What it is now; `None`: not known, or left alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why, in one line.
    pub why: String,
}

impl Binding {
    fn say(&mut self, what: &'static str, value: Option<String>, why: impl Into<String>) {
        self.decisions.push(Decision { what, value, why: why.into() });
    }
}

/// Whether the ranks of a node have to meet before their plans are made: where
/// their CPUs may be changed. From what all of them know alike, or some would wait
/// for others that do not come. A rank alone on its node waits for nobody.
pub fn needs_meeting(facts: &Facts, settings: &Settings) -> bool {
    let step = facts.step;
    let shape = launch::shape(settings, facts.command, step.pty, step.terminal, step.one_task_on_each_node());
    settings.bind.cpu
        && shape.tasks_are_ranks()
        && facts.task.bound_by_user.cpu.is_none()
        && facts.node.topology.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia)
}

/// What this rank brings to its node's meeting, from its own facts alone.
pub fn own(facts: &Facts, settings: &Settings) -> Peer {
    let gpus = ranks::of_this_rank(facts, settings)
        .map(|gpus| gpus.into_iter().filter_map(|gpu| u8::try_from(gpu).ok()).collect());
    Peer { mask: facts.task.mask.clone().unwrap_or_default(), gpus: gpus.unwrap_or_default() }
}

/// The kind of the cards that carry the training's traffic, where that is clear.
pub(super) fn fabric(facts: &Facts, settings: &Settings) -> Option<&'static str> {
    let topology = facts.node.topology.with_overlay(facts.task.overlay.as_ref());
    let view = nics::View { topology: &topology, ..nics::View::of(facts, settings) };
    nics::choose(&view).fabric.filter(|_| !topology.gpus.is_empty() && settings.bind.nic)
}

/// Decides the rank's binding and offers the variables that follow from it and
/// from the node. Gives back what a changed mask leaves the rank.
pub(super) fn decide(plan: &mut Plan, offers: &mut Offers, facts: &Facts, settings: &Settings) -> Option<cpus::Share> {
    let topology = &facts.node.topology;
    if topology.gpus.is_empty() || plan.step.shape == Shape::Shell {
        return None;
    }
    let with_file;
    let facts = match topology.with_overlay(facts.task.overlay.as_ref()) {
        Cow::Borrowed(_) => facts,
        Cow::Owned(topology) => {
            let file = facts.task.overlay.as_ref().map(|overlay| overlay.file.clone());
            let why = "in the machine's own PCI tree no card is nearer to a GPU than another: NCCL's file tells";
            plan.binding.say("topology", file, why);
            with_file = NodeFacts { topology, ..facts.node.clone() };
            &Facts { node: &with_file, ..*facts }
        }
    };
    let rank0 = subnets::rank0(facts, plan.step.master_addr.as_deref());
    let mut view = nics::View::of(facts, settings);
    view.addresses.rank0 = &rank0;
    let nics = nics::choose(&view);
    let mut share = ranks::share(facts, settings, plan.step.shape);
    ranks::decide(plan, offers, facts, settings, &mut share);
    let gpus = ranks::bound(&share);
    nics::decide(plan, offers, facts, settings, &nics, &gpus);
    let bound = cpus::decide(plan, facts, settings, &gpus);
    memory::decide(plan, facts, settings, &gpus);
    ranks::tell(plan, facts, &nics, &share);
    bound
}
