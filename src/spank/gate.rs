//! The gate: shared memory in which the tasks of one node meet before they run.
//! slurmstepd makes it before it forks them. A rank that refuses closes it, and
//! with it the node's other ranks; a rank that never comes does not hold the
//! others longer than the deadline.
//!
//! Only atomics, no lock: a rank may be killed at any instruction.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::system::shared::{SharedWords, wait_for_change, wake_all};

/// Counts every change, so that waiting is one futex.
const CHANGES: usize = 0;
/// Not zero: a rank refused.
const CLOSED: usize = 1;
/// Not zero: a rank has said, or is saying, why the gate closed.
const SPOKEN: usize = 2;
/// Not zero: a rank has said who is missing.
const MISSED: usize = 3;
const HEADER: usize = 4;

/// A slot's states.
const ARRIVED: u32 = 1;
const GONE: u32 = 2;

/// More than a node can hold; bounds the memory.
const MOST_RANKS: u32 = 1 << 20;

/// How waiting at the gate ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All ranks of the node are here.
    Open,
    /// A rank refused.
    Closed,
    /// These local ranks ended before they came.
    Gone(Vec<u32>),
    /// These local ranks did not come in time.
    Late(Vec<u32>),
}

/// The node's gate.
#[derive(Debug)]
pub struct Gate {
    words: SharedWords,
}

impl Gate {
    /// A gate for `ranks` tasks.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(ranks: u32) -> io::Result<Gate> {
        if ranks > MOST_RANKS {
            return Err(io::Error::other(format!("{ranks} tasks on one node")));
        }
        Ok(Gate { words: SharedWords::new(HEADER + ranks as usize)? })
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.words.all()[index]
    }

    fn slots(&self) -> &[AtomicU32] {
        &self.words.all()[HEADER..]
    }

    fn changed(&self) {
        self.word(CHANGES).fetch_add(1, Ordering::AcqRel);
        wake_all(self.word(CHANGES));
    }

    /// Whether this caller is the one to say why the gate closes: true once.
    pub fn speaks_first(&self) -> bool {
        self.word(SPOKEN).swap(1, Ordering::AcqRel) == 0
    }

    /// Stops every rank of the node that has not passed.
    pub fn close(&self) {
        self.word(CLOSED).store(1, Ordering::Release);
        self.changed();
    }

    /// Whether this caller is the one to say who is missing: true once.
    pub fn reports_missing(&self) -> bool {
        self.word(MISSED).swap(1, Ordering::AcqRel) == 0
    }

    /// A task ended. Ranks that still wait need not wait for it.
    pub fn gone(&self, local_rank: u32) {
        if let Some(slot) = self.slots().get(local_rank as usize)
            && slot.compare_exchange(0, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
        {
            self.changed();
        }
    }

    /// Arrives and waits for the others, at most `limit`.
    pub fn pass(&self, local_rank: u32, limit: Duration) -> Outcome {
        let end = Instant::now() + limit;
        if let Some(slot) = self.slots().get(local_rank as usize) {
            slot.store(ARRIVED, Ordering::Release);
            self.changed();
        }
        loop {
            let seen = self.word(CHANGES).load(Ordering::Acquire);
            if self.word(CLOSED).load(Ordering::Acquire) != 0 {
                return Outcome::Closed;
            }
            let in_state = |state| {
                let slots = self.slots().iter().zip(0u32..);
                slots
                    .filter(|(slot, _)| slot.load(Ordering::Acquire) == state)
                    .map(|(_, rank)| rank)
                    .collect::<Vec<_>>()
            };
            let missing = in_state(0);
            if missing.is_empty() {
                let gone = in_state(GONE);
                return if gone.is_empty() { Outcome::Open } else { Outcome::Gone(gone) };
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Outcome::Late(missing);
            }
            wait_for_change(self.word(CHANGES), seen, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn ranks_leave_together() {
        let gate = Gate::new(8).unwrap();
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let ranks: Vec<_> = (0..8)
                .map(|rank| {
                    scope.spawn({
                        let gate = &gate;
                        move || gate.pass(rank, LONG)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Open), "{outcomes:?}");
    }

    #[test]
    fn one_refusal_stops_all_and_one_rank_speaks() {
        let gate = Gate::new(3).unwrap();
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|rank| {
                    scope.spawn({
                        let gate = &gate;
                        move || gate.pass(rank, LONG)
                    })
                })
                .collect();
            assert!(gate.speaks_first());
            assert!(!gate.speaks_first());
            gate.close();
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), Outcome::Closed);
            }
        });
    }

    #[test]
    fn a_rank_that_never_comes_costs_the_deadline_only() {
        let gate = Gate::new(3).unwrap();
        let start = Instant::now();
        thread::scope(|scope| {
            let first = scope.spawn(|| gate.pass(0, Duration::from_millis(200)));
            assert_eq!(gate.pass(2, Duration::from_millis(200)), Outcome::Late(vec![1]));
            assert_eq!(first.join().unwrap(), Outcome::Late(vec![1]));
        });
        assert!(start.elapsed() >= Duration::from_millis(200));
        assert!(gate.reports_missing());
        assert!(!gate.reports_missing());
    }

    #[test]
    fn a_rank_that_died_is_not_waited_for() {
        let gate = Gate::new(2).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.pass(0, LONG));
            gate.gone(1);
            assert_eq!(waiting.join().unwrap(), Outcome::Gone(vec![1]));
        });
    }

    #[test]
    fn the_end_of_a_rank_that_had_arrived_changes_nothing() {
        let gate = Gate::new(2).unwrap();
        assert_eq!(gate.pass(0, Duration::ZERO), Outcome::Late(vec![1]));
        gate.gone(0);
        assert_eq!(gate.pass(1, LONG), Outcome::Open);
    }

    #[test]
    fn strange_numbers_are_harmless() {
        let gate = Gate::new(0).unwrap();
        gate.gone(7);
        assert_eq!(gate.pass(7, LONG), Outcome::Open);
        assert!(Gate::new(u32::MAX).is_err());
    }

    #[test]
    fn it_works_between_processes() {
        let gate = Gate::new(2).unwrap();
        thread::scope(|scope| {
            let other =
                scope.spawn(|| crate::system::child::run(LONG, || format!("{:?}", gate.pass(1, LONG)).into_bytes()));
            assert_eq!(gate.pass(0, LONG), Outcome::Open);
            assert_eq!(other.join().unwrap().unwrap(), b"Open");
        });
    }
}
