//! The rank variables. They are facts of the step and always set, whatever was
//! inherited: an inherited value belongs to another step.

use super::marks::Marks;
use super::{Facts, Origin, Plan, Shape};

/// Variables that a launcher inside the step would set; stale when inherited.
const OF_A_LAUNCHER: [&str; 4] = ["GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"];

/// torch.distributed.elastic: with TORCHELASTIC_USE_AGENT_STORE inherited every
/// rank is a client of a store that nobody hosts, and all of them wait
/// (torch/distributed/rendezvous.py).
const ELASTIC_PREFIX: &str = "TORCHELASTIC_";

/// How many inherited variables a warning names.
const MOST_NAMED: usize = 6;

pub(super) fn decide(plan: &mut Plan, facts: &Facts, marks: &Marks) {
    let step = facts.step;
    let variables = [
        ("RANK", step.rank, "SLURM_PROCID: the task's number in the step"),
        ("WORLD_SIZE", step.world_size, "SLURM_STEP_NUM_TASKS: tasks in the step"),
        ("LOCAL_RANK", step.local_rank, "SLURM_LOCALID: the task's number on its node"),
        ("LOCAL_WORLD_SIZE", step.local_world_size, "tasks on this node, from SLURM_STEP_TASKS_PER_NODE"),
        ("NODE_RANK", step.node_rank, "SLURM_NODEID: the node's number in the step"),
        ("GROUP_RANK", step.node_rank, "the name torch.distributed.elastic gives NODE_RANK"),
    ];
    let inherited = |name: &str| facts.environment.get(name).is_some();
    let elastic = facts.environment.iter().map(|(name, _)| name).filter(|name| name.starts_with(ELASTIC_PREFIX));
    let elastic: Vec<&str> = elastic.collect();
    match plan.step.shape {
        Shape::Native | Shape::Worker => {
            let mut stale = Vec::new();
            for (name, value, why) in variables {
                let value = value.to_string();
                if let Some(old) = marks.users(facts.users(), name).filter(|old| *old != value) {
                    stale.push(format!("{name}={}", crate::config::printable(old)));
                }
                plan.set(name, value, Origin::Step, why);
            }
            stale.extend(elastic.iter().map(|name| crate::config::printable(name)));
            let more = stale.len().saturating_sub(MOST_NAMED);
            stale.truncate(MOST_NAMED);
            if !stale.is_empty() {
                plan.warn(
                    "ranks-stale",
                    format!(
                        "{}{} came from the environment and is not this step's; replaced or removed",
                        stale.join(" "),
                        if more > 0 { format!(" and {more} more") } else { String::new() }
                    ),
                    "unset it before srun",
                );
            }
            for name in OF_A_LAUNCHER.into_iter().filter(|name| inherited(name)) {
                plan.unset(name, "inherited from another launcher; this step has none");
            }
        }
        Shape::Shell | Shape::Agent => {
            let (left, removed) = if plan.step.shape == Shape::Agent {
                ("the launcher gives each rank its own", "inherited; a launcher is no rank")
            } else {
                (
                    "a shell is no rank; an srun in it gets its own (launch=native would set them)",
                    "inherited; a shell is no rank",
                )
            };
            plan.leave("RANK and the others", left);
            if plan.step.shape == Shape::Agent {
                // For commands such as `accelerate launch --machine_rank $NODE_RANK`.
                plan.set("NODE_RANK", super::agent::number(step).to_string(), Origin::Step, "this launcher's number");
            }
            let names = variables.map(|(name, ..)| name);
            for name in names.into_iter().chain(OF_A_LAUNCHER).filter(|name| inherited(name)) {
                if plan.value(name).is_none() {
                    plan.unset(name, removed);
                }
            }
        }
    }
    for name in elastic {
        plan.unset(
            name,
            "inherited from a torchrun outside this step; with it every rank would wait for a store nobody hosts",
        );
    }
}
