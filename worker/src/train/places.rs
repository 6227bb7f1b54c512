//! Which CPUs ranks compute on: ranks that share some with more threads than CPUs take them
//! from each other, so that how fast one of them is says nothing of it.

use palingenesis::facts::CpuSet;
use palingenesis::system::affinity;
use serde::{Deserialize, Serialize};

/// Where a rank computes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// The same for all that one kernel runs, whatever name each host has there.
    machine: String,
    /// On which it may run.
    cpus: CpuSet,
    /// That compute.
    threads: u32,
}

impl Place {
    /// This rank's; `threads` = 0 is as many as CPUs. `host` stands for the machine where the
    /// kernel does not tell.
    pub fn own(host: &str, threads: usize) -> Place {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let machine = if boot.trim().is_empty() { host } else { boot.trim() }.to_string();
        let all = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = u32::try_from(if threads == 0 { all() } else { threads }).unwrap_or(u32::MAX);
        Place { machine, cpus: affinity::mask().unwrap_or_default(), threads }
    }
}

/// By rank, whether it shares its CPUs.
pub fn sharing(places: &[Place]) -> Vec<bool> {
    let shares = |own: &Place| {
        let there = places.iter().filter(|other| other.machine == own.machine && other.cpus.meets(&own.cpus));
        let (threads, cpus) = there.fold((0u64, CpuSet::default()), |(threads, cpus), other| {
            (threads + u64::from(other.threads), cpus.or(&other.cpus))
        });
        threads > u64::from(cpus.len()) && !cpus.is_empty()
    };
    places.iter().map(shares).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(machine: &str, cpus: &str, threads: u32) -> Place {
        Place { machine: machine.into(), cpus: CpuSet::parse(cpus).unwrap(), threads }
    }

    #[test]
    fn ranks_with_cpus_of_their_own_share_none() {
        let bound = [place("a", "0-3", 4), place("a", "4-7", 4), place("b", "0-3", 4), place("b", "4-7", 4)];
        assert_eq!(sharing(&bound), [false; 4]);
        // Not bound, but no more threads than CPUs.
        assert_eq!(sharing(&[place("a", "0-7", 4), place("a", "0-7", 4)]), [false; 2]);
        // Not known.
        let unknown = Place { machine: "a".into(), threads: 4, ..Place::default() };
        assert_eq!(sharing(&[unknown.clone(), unknown]), [false; 2]);
    }

    #[test]
    fn more_threads_than_cpus_are_shared_on_that_machine_only() {
        let mixed = [place("a", "0-1", 2), place("a", "0-1", 2), place("b", "0-1", 2), place("a", "2-3", 2)];
        assert_eq!(sharing(&mixed), [true, true, false, false]);
        // Half of them overlap.
        assert_eq!(sharing(&[place("a", "0-2", 3), place("a", "2-4", 3)]), [true; 2]);
        assert_eq!(sharing(&[place("a", "0", 2)]), [true], "one rank with too many threads");
    }

    #[test]
    fn this_process_has_a_place() {
        let own = Place::own("here", 0);
        assert!(own.threads > 0 && !own.cpus.is_empty() && !own.machine.is_empty());
        assert_eq!(sharing(&[own]), [false]);
    }
}
