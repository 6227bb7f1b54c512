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

/// One name for this launch on all its ranks. A program that names its output by its own
/// clock has ranks that fall into the next second, and their shards in another directory.
pub const LAUNCH_ID: &str = "PALINGENESIS_LAUNCH_ID";

pub(super) fn name_the_launch(plan: &mut Plan, facts: &Facts, marks: &Marks) {
    let step = facts.step;
    let why = "when srun started it, in UTC, and the step: equal on all ranks, for names of directories";
    match facts.launched {
        Some(_) if plan.step.shape == Shape::Shell && facts.environment.get(LAUNCH_ID).is_some() => {
            plan.unset(LAUNCH_ID, "inherited; it names another launch");
        }
        Some(ns) if plan.step.shape != Shape::Shell => {
            let id = format!("{}-{}.{}", utc(ns), step.job_id, step.step_id);
            plan.set(LAUNCH_ID, id, Origin::Step, why);
        }
        // For who asks inside the step.
        None if marks.of_this_step(facts.environment, step, LAUNCH_ID) => {
            plan.set(LAUNCH_ID, facts.environment.get(LAUNCH_ID).unwrap_or_default(), Origin::Step, why);
        }
        _ => {}
    }
}

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

/// "20261130T125501Z". The days by Howard Hinnant's civil_from_days
/// (<https://howardhinnant.github.io/date_algorithms.html>), for years from 1970.
fn utc(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    // Months from March on: the leap day is the last of a year.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (year + era * 400 + u64::from(month >= 10), if month < 10 { month + 3 } else { month - 9 });
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::super::tests::World;
    use super::*;

    #[test]
    fn times_are_those_of_date() {
        for (seconds, text) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (1_796_039_999, "20261130T115959Z"),
            (4_107_542_399, "21000228T235959Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(utc(seconds * 1_000_000_000 + 999_999_999), text);
        }
        assert!(utc(u64::MAX).ends_with('Z'));
    }

    /// <https://github.com/TensorAuto/OpenTau/pull/396>
    #[test]
    fn all_ranks_of_a_launch_have_one_name_for_it() {
        let ns = 1_796_039_999_500_000_000;
        for rank in [0, 7] {
            let mut world = World::new("n[1-2]", "4(x2)", rank).export(&[(LAUNCH_ID, "another")]);
            world.launched = Some(ns);
            assert_eq!(world.plan("on").unwrap().value(LAUNCH_ID), Some("20261130T115959Z-44.0"));
            let shell = world.plan("launch=shell").unwrap();
            assert!(shell.value(LAUNCH_ID).is_none() && shell.unset.iter().any(|unset| unset.name == LAUNCH_ID));
        }
        assert!(World::new("n1", "1", 0).plan("on").unwrap().value(LAUNCH_ID).is_none());
    }
}
