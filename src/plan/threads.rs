//! OMP_NUM_THREADS. Unset, each rank's OpenMP starts a thread for every CPU of
//! its mask, which without CPU binding are those of all ranks of the node.

use super::binding::cpus::Share;
use super::precedence::Offers;
use super::{Facts, Shape};

pub(super) fn offer(offers: &mut Offers, facts: &Facts, shape: Shape, ranks_per_task: u32, bound: Option<Share>) {
    let name = "OMP_NUM_THREADS";
    // The mask that the rank will have, not the one it came with.
    let mask = bound.map(|share| share.cpus).or(facts.task.cpus);
    let Some(mask) = mask.filter(|cpus| *cpus > 0) else {
        return;
    };
    if shape == Shape::Shell {
        offers.nothing(name, "a shell is no rank");
        return;
    }
    // What the job has here, shared by the ranks: a mask may be theirs together.
    let ranks = facts.step.local_world_size.max(1).saturating_mul(ranks_per_task.max(1));
    let on_node = facts.environment.get("SLURM_CPUS_ON_NODE").and_then(|cpus| cpus.parse::<u32>().ok());
    let share = on_node.map_or(u32::MAX, |cpus| cpus / ranks).max(1);
    let sharing = bound.map_or(1, |share| share.ranks.max(1));
    let own = (mask / ranks_per_task.max(1) / sharing).max(1);
    let threads = own.min(share);
    let cpus = |number: u32| format!("{number} CPU{}", if number == 1 { "" } else { "s" });
    let why = match on_node.filter(|_| own > share) {
        None => format!("the rank's share of its task's {}", cpus(mask)),
        Some(on_node) => format!("the rank's share of the job's {} here; its mask has {mask}", cpus(on_node)),
    };
    offers.derived(name, threads.to_string(), why);
}
