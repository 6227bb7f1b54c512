//! What a node tells of a rank that ended: whether at all, how it ended, whether for
//! want of memory, and the line for the user where srun could not be told.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::EXIT_REFUSED;
use crate::facts::Environment;
use crate::facts::exit::{Ended, ExitRecord, Oom};

use super::Binding;

/// How a task ended, by its wait status; `None` where it ended well. One that was not
/// `started` and has our own exit code was refused: a program may have the same code. So
/// was one that a signal ended after its node had `stopped` the start: as the last resort
/// Slurm ends the step, and kills whoever has not gone by himself.
pub fn ended(status: i32, started: bool, stopped: bool) -> Option<Ended> {
    let status = ExitStatus::from_raw(status);
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (Some(code), _) if code == EXIT_REFUSED && !started => Some(Ended::Refused),
        (Some(code), _) => Some(Ended::Exit(code)),
        (None, Some(libc::SIGKILL | libc::SIGTERM)) if stopped && !started => Some(Ended::Refused),
        (None, Some(signal)) => Some(Ended::Signal(signal)),
        (None, None) => None,
    }
}

/// The kernel kills for want of memory by SIGKILL; a shell between shows it as a code.
fn is_sigkill(ended: Ended) -> bool {
    matches!(ended, Ended::Signal(9) | Ended::Exit(137))
}

/// What a node's memory group says of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kills {
    /// Kills counted before the rank started.
    pub before: Option<u32>,
    /// Now.
    pub now: Option<u32>,
    /// How many of those since belong to ranks that have ended.
    pub told: u32,
    /// Whether the group is the step's own.
    pub own: bool,
}

/// Whether the kernel killed one of the rank's processes for want of memory, and whether
/// that kill is now accounted for. The ranks of a node may share a group: a kill that
/// ended a rank is that rank's, so that those that fail after it are not said to have
/// been killed too. One that ended a rank's helper, as a data loader's worker, leaves the
/// rank to fail by itself: it is any failing rank's that has no kill of its own.
pub fn oom(ended: Ended, kills: Kills) -> (Oom, bool) {
    let (Some(before), Some(now)) = (kills.before, kills.now) else {
        return (Oom::Unknown, false);
    };
    match now.saturating_sub(before).saturating_sub(kills.told) {
        0 => (Oom::No, false),
        // Of whichever job on this node.
        _ if !kills.own => (Oom::Unknown, false),
        _ => (Oom::Killed, is_sigkill(ended)),
    }
}

/// The name of the rank's GPU: its PCI address where the plan knows it, else its number
/// in CUDA_VISIBLE_DEVICES. None where it has several.
pub fn gpu(binding: &Binding, environment: &Environment, local_rank: u32, ranks: u32) -> Option<String> {
    let decided = binding.decisions.iter().find(|decision| decision.what == "gpu");
    if let Some(value) = decided.and_then(|decision| decision.value.as_ref()) {
        return Some(value.clone()).filter(|value| !value.is_empty() && !value.contains(','));
    }
    let list = environment.get("CUDA_VISIBLE_DEVICES")?;
    let numbers: Vec<&str> = list.split(',').map(str::trim).collect();
    let index = match numbers.len() {
        1 => 0,
        count if u32::try_from(count) == Ok(ranks) => local_rank as usize,
        _ => return None,
    };
    numbers.get(index).filter(|number| !number.is_empty()).map(ToString::to_string)
}

/// The line for a rank that srun could not be told of: one for each node, of the first that
/// failed there. Of one that Slurm ends with the step nothing is said: that is how each
/// rank of it ends, on every node.
pub fn untold(record: &ExitRecord, srun: Option<&str>, why: &str) -> Option<String> {
    let slurms = matches!(record.kind, Ended::Signal(9 | 15) | Ended::Exit(137 | 143));
    if record.kind == Ended::Refused || (slurms && record.oom != Oom::Killed) {
        return None;
    }
    let how = match record.kind {
        Ended::Exit(code) => format!("with exit code {code}"),
        Ended::Signal(signal) => format!("by signal {signal}"),
        Ended::Refused => "before it started".into(),
    };
    let memory = if record.oom == Oom::Killed { ", for want of memory" } else { "" };
    let told = match srun {
        Some(address) => format!("srun could not be told at {address}: {why}"),
        None => "srun has no address that this node knows".into(),
    };
    Some(format!(
        "palingenesis: warning: rank {} (local rank {}) ended {how}{memory}, as the first on {}; {told}, so compare \
         the nodes' lines by hand, and look at this rank's output first",
        record.rank, record.local_rank, record.node,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::binding::Decision;

    #[test]
    fn how_a_task_ended_by_its_status() {
        for stopped in [false, true] {
            let ended = |status, started| ended(status, started, stopped);
            assert_eq!(ended(0, true), None);
            assert_eq!(ended(0, false), None);
            assert_eq!(ended(1 << 8, true), Some(Ended::Exit(1)));
            assert_eq!(ended(11, true), Some(Ended::Signal(11)));
            // With a core.
            assert_eq!(ended(11 | 0x80, true), Some(Ended::Signal(11)));
            assert_eq!(ended(78 << 8, false), Some(Ended::Refused));
            assert_eq!(ended(78 << 8, true), Some(Ended::Exit(78)));
            assert_eq!(ended(1 << 8, false), Some(Ended::Exit(1)));
            // Stopped by a signal: it has not ended.
            assert_eq!(ended(0x137f, true), None);
        }
    }

    /// Slurm's signals after the start was given up are no somebody's; a crash of ours is.
    #[test]
    fn who_is_killed_after_the_start_was_given_up_was_refused() {
        for signal in [libc::SIGKILL, libc::SIGTERM] {
            assert_eq!(ended(signal, false, true), Some(Ended::Refused));
            for (started, stopped) in [(false, false), (true, false), (true, true)] {
                assert_eq!(ended(signal, started, stopped), Some(Ended::Signal(signal)), "{started} {stopped}");
            }
        }
        assert_eq!(ended(libc::SIGSEGV, false, true), Some(Ended::Signal(libc::SIGSEGV)));
    }

    fn kills(before: u32, now: u32, told: u32) -> Kills {
        Kills { before: Some(before), now: Some(now), told, own: true }
    }

    #[test]
    fn a_kill_is_the_rank_s_that_it_ended() {
        let killed = Ended::Signal(9);
        assert_eq!(oom(killed, kills(0, 0, 0)), (Oom::No, false));
        assert_eq!(oom(killed, kills(0, 1, 0)), (Oom::Killed, true));
        assert_eq!(oom(Ended::Exit(137), kills(3, 4, 0)), (Oom::Killed, true));
        // The next one on the node, which ended because of the first.
        assert_eq!(oom(Ended::Exit(1), kills(0, 1, 1)), (Oom::No, false));
        // A helper's death: the rank has seen it and ended itself.
        assert_eq!(oom(Ended::Exit(1), kills(0, 1, 0)), (Oom::Killed, false));
    }

    #[test]
    fn what_is_not_counted_for_this_step_is_not_known() {
        let killed = Ended::Signal(9);
        assert_eq!(oom(killed, Kills { before: None, ..kills(0, 1, 0) }), (Oom::Unknown, false));
        assert_eq!(oom(killed, Kills { now: None, ..kills(0, 1, 0) }), (Oom::Unknown, false));
        assert_eq!(oom(killed, Kills { own: false, ..kills(0, 1, 0) }), (Oom::Unknown, false));
        // Nobody on the node was killed: nor was this rank.
        assert_eq!(oom(killed, Kills { own: false, ..kills(5, 5, 0) }), (Oom::No, false));
    }

    #[test]
    fn the_gpu_s_name() {
        let mut binding = Binding::default();
        let mut environment = Environment::default();
        assert_eq!(gpu(&binding, &environment, 0, 2), None);
        environment.set("CUDA_VISIBLE_DEVICES", "2,3");
        assert_eq!(gpu(&binding, &environment, 1, 2).as_deref(), Some("3"));
        assert_eq!(gpu(&binding, &environment, 0, 1), None);
        environment.set("CUDA_VISIBLE_DEVICES", "5");
        assert_eq!(gpu(&binding, &environment, 3, 4).as_deref(), Some("5"));
        let decided = |value: &str| Decision { what: "gpu", value: Some(value.into()), why: String::new() };
        binding.decisions = vec![decided("0000:3b:00.0")];
        assert_eq!(gpu(&binding, &environment, 3, 4).as_deref(), Some("0000:3b:00.0"));
        binding.decisions = vec![decided("0000:3b:00.0,0000:4c:00.0")];
        assert_eq!(gpu(&binding, &environment, 3, 4), None);
    }

    #[test]
    fn the_line_where_srun_is_out_of_reach() {
        let record = ExitRecord {
            rank: 11,
            node: "node007".into(),
            node_rank: 2,
            local_rank: 3,
            gpu: None,
            kind: Ended::Exit(1),
            time_ns: 0,
            oom: Oom::No,
            clock: None,
            line: None,
        };
        assert_eq!(
            untold(&record, Some("10.1.1.1:61000"), "Connection refused").as_deref(),
            Some(
                "palingenesis: warning: rank 11 (local rank 3) ended with exit code 1, as the first on node007; srun \
                 could not be told at 10.1.1.1:61000: Connection refused, so compare the nodes' lines by hand, and \
                 look at this rank's output first"
            )
        );
        let killed = ExitRecord { kind: Ended::Signal(9), ..record.clone() };
        assert_eq!(untold(&killed, None, ""), None);
        let line = untold(&ExitRecord { oom: Oom::Killed, ..killed }, None, "").unwrap();
        assert!(line.contains("by signal 9, for want of memory") && line.contains("srun has no address"), "{line}");
        // Its own line has been seen.
        assert_eq!(untold(&ExitRecord { kind: Ended::Refused, ..record }, None, ""), None);
    }
}
