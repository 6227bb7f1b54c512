//! The gate: shared memory in which the tasks of one node meet before they run.
//! slurmstepd makes it before it forks them. A rank that refuses closes it, and
//! with it the node's other ranks; a rank that never comes does not hold the
//! others longer than the deadline.
//!
//! Only atomics, no lock: a rank may be killed at any instruction.

mod meeting;
mod register;

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::orphan::orphaned;
use crate::system::shared::{SharedWords, wait_for_change, wake_all};

pub use meeting::Meeting;
pub use register::{Entry, Register};

/// Counts every change, so that waiting is one futex.
const CHANGES: usize = 0;
/// Not zero: a rank refused.
const CLOSED: usize = 1;
/// Not zero: a rank has said, or is saying, why the gate closed.
const SPOKEN: usize = 2;
/// Not zero: a rank has said who is missing.
const MISSED: usize = 3;
/// What the meeting came to; see `meeting`.
const DECISION: usize = 4;
/// Not zero: a rank has said that it could not be bound.
const UNBOUND: usize = 5;
/// Zero, or the port with which the node's ranks start.
const VERDICT: usize = 6;
/// Not zero: a rank does what the leader no longer can, or nothing is left to do.
const TAKEN_OVER: usize = 7;
/// What the first rank that refused has said.
const REFUSAL: usize = 8;
/// What the first rank that has a plan says of it.
const SUMMARY: usize = REFUSAL + NOTE_WORDS;
const HEADER: usize = SUMMARY + NOTE_WORDS;

/// A note: its state, its length in bytes, and its text.
const NOTE_TEXT: usize = 512;
const NOTE_WORDS: usize = 2 + NOTE_TEXT / 4;
/// The states of a note. It stays in the first where its writer was killed.
const WRITING: u32 = 1;
const WRITTEN: u32 = 2;

/// A slot's states.
const ARRIVED: u32 = 1;
const GONE: u32 = 2;
/// It has come and waits for the verdict: its end before that counts.
const WAITING: u32 = 3;

/// Set in a verdict, whatever the port.
const GO: u32 = 1 << 16;

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
    /// slurmstepd was killed.
    Orphaned,
}

/// Who of the node's ranks is here, at a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Roll {
    /// All, and they wait for the verdict.
    All,
    /// Not all.
    Coming,
    /// A rank refused.
    Closed,
    /// These local ranks ended, before they came or since.
    Gone(Vec<u32>),
    /// These local ranks did not come in time.
    Late(Vec<u32>),
    /// slurmstepd was killed.
    Orphaned,
}

/// How waiting for the verdict ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The ranks start, with this port.
    Go(u16),
    /// They do not.
    Closed,
    /// The leader, local rank 0, ended before it gave one.
    LeaderGone,
    /// The leader did not come in time, or gave none.
    LeaderLate,
    /// slurmstepd was killed.
    Orphaned,
}

/// The node's gate.
#[derive(Debug)]
pub struct Gate {
    words: SharedWords,
    ranks: u32,
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
        Ok(Gate {
            words: SharedWords::new(HEADER + ranks as usize + meeting::words(ranks) + register::words(ranks))?,
            ranks,
        })
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.words.all()[index]
    }

    fn slots(&self) -> &[AtomicU32] {
        &self.words.all()[HEADER..HEADER + self.ranks as usize]
    }

    fn changes(&self) -> u32 {
        self.word(CHANGES).load(Ordering::Acquire)
    }

    /// Whether no rank of the node starts.
    pub fn is_closed(&self) -> bool {
        self.word(CLOSED).load(Ordering::Acquire) != 0
    }

    fn changed(&self) {
        self.word(CHANGES).fetch_add(1, Ordering::AcqRel);
        wake_all(self.word(CHANGES));
    }

    /// Whether this caller is the one to say why the gate closes: true once.
    pub fn speaks_first(&self) -> bool {
        self.word(SPOKEN).swap(1, Ordering::AcqRel) == 0
    }

    /// Keeps, for slurmstepd's log, why the gate closes. The first text counts.
    pub fn keep_refusal(&self, text: &str) {
        self.write_note(REFUSAL, text);
    }

    /// The text that was kept.
    pub fn refusal(&self) -> Option<String> {
        self.read_note(REFUSAL)
    }

    /// Keeps, for slurmstepd's log, what the node's ranks are. The first text counts.
    pub fn keep_summary(&self, text: &str) {
        self.write_note(SUMMARY, text);
    }

    /// The text that was kept.
    pub fn summary(&self) -> Option<String> {
        self.read_note(SUMMARY)
    }

    fn write_note(&self, at: usize, text: &str) {
        let state = self.word(at);
        if state.compare_exchange(0, WRITING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let mut end = text.len().min(NOTE_TEXT);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let words = self.words.all()[at + 2..].iter();
        for (word, bytes) in words.zip(text.as_bytes()[..end].chunks(4)) {
            let mut four = [0; 4];
            four[..bytes.len()].copy_from_slice(bytes);
            word.store(u32::from_ne_bytes(four), Ordering::Relaxed);
        }
        self.word(at + 1).store(u32::try_from(end).unwrap_or(0), Ordering::Relaxed);
        state.store(WRITTEN, Ordering::Release);
    }

    /// One line, whatever the memory holds.
    fn read_note(&self, at: usize) -> Option<String> {
        if self.word(at).load(Ordering::Acquire) != WRITTEN {
            return None;
        }
        let length = (self.word(at + 1).load(Ordering::Relaxed) as usize).min(NOTE_TEXT);
        let words = &self.words.all()[at + 2..at + NOTE_WORDS];
        let bytes = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let bytes: Vec<u8> = bytes.take(length).collect();
        let text = String::from_utf8_lossy(&bytes);
        Some(text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_string())
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

    /// Whether this caller is the one to say that a rank could not be bound: true once.
    pub fn reports_unbound(&self) -> bool {
        self.word(UNBOUND).swap(1, Ordering::AcqRel) == 0
    }

    /// A task ended. Ranks that still wait need not wait for it.
    pub fn gone(&self, local_rank: u32) {
        self.ended_before_the_decision(local_rank);
        let Some(slot) = self.slots().get(local_rank as usize) else { return };
        let ends = |state| slot.compare_exchange(state, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if ends(0) || (self.verdict().is_none() && ends(WAITING)) {
            self.changed();
        }
    }

    /// Arrives, to wait for a verdict.
    pub fn arrive(&self, local_rank: u32) {
        self.went_on(local_rank);
        if let Some(slot) = self.slots().get(local_rank as usize) {
            slot.store(WAITING, Ordering::Release);
            self.changed();
        }
    }

    /// Looks who is here, without waiting. `end` and `absent` as [`Gate::pass`] has
    /// them.
    pub fn roll(&self, end: Instant, absent: Option<Instant>) -> Roll {
        if self.is_closed() {
            return Roll::Closed;
        }
        if orphaned() {
            return Roll::Orphaned;
        }
        let gone = self.in_state(GONE);
        if !gone.is_empty() {
            return Roll::Gone(gone);
        }
        let missing = self.in_state(0);
        if missing.is_empty() {
            return Roll::All;
        }
        if self.until(&missing, end, absent) <= Instant::now() { Roll::Late(missing) } else { Roll::Coming }
    }

    /// Lets the ranks that wait start.
    pub fn go(&self, port: u16) {
        self.word(VERDICT).store(GO | u32::from(port), Ordering::Release);
        self.changed();
    }

    fn verdict(&self) -> Option<u16> {
        let verdict = self.word(VERDICT).load(Ordering::Acquire);
        (verdict & GO != 0).then_some(verdict as u16)
    }

    /// Waits for the verdict: for a leader that has not come until `end`, else as
    /// long as it needs, but not beyond `last`.
    pub fn wait_for_verdict(&self, end: Instant, last: Instant) -> Verdict {
        loop {
            let seen = self.changes();
            if let Some(port) = self.verdict() {
                return Verdict::Go(port);
            }
            if self.is_closed() {
                return Verdict::Closed;
            }
            if orphaned() {
                return Verdict::Orphaned;
            }
            let until = match self.slots().first().map(|slot| slot.load(Ordering::Acquire)) {
                Some(GONE) => return Verdict::LeaderGone,
                Some(0) => end.min(last),
                _ => last,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Verdict::LeaderLate;
            }
            wait_for_change(self.word(CHANGES), seen, left);
        }
    }

    /// Whether local rank 0 meets the other nodes.
    pub fn leader_leads(&self) -> bool {
        self.slots().first().is_some_and(|slot| slot.load(Ordering::Acquire) == WAITING)
    }

    /// Whether local rank 0 ended before it gave a verdict.
    pub fn leader_is_gone(&self) -> bool {
        self.slots().first().is_some_and(|slot| slot.load(Ordering::Acquire) == GONE)
    }

    /// Whether this caller is the one to do what the leader no longer can: true once.
    pub fn takes_over(&self) -> bool {
        self.word(TAKEN_OVER).swap(1, Ordering::AcqRel) == 0
    }

    /// The others have been told, or need not be: nobody takes over when the leader ends.
    pub fn nothing_to_take_over(&self) {
        self.word(TAKEN_OVER).store(1, Ordering::Release);
    }

    fn in_state(&self, state: u32) -> Vec<u32> {
        let slots = self.slots().iter().zip(0u32..);
        slots.filter(|(slot, _)| slot.load(Ordering::Acquire) == state).map(|(_, rank)| rank).collect()
    }

    /// Until when these are waited for. One that came to the meeting lives, and makes
    /// its plan as this one did.
    fn until(&self, missing: &[u32], end: Instant, absent: Option<Instant>) -> Instant {
        absent.filter(|_| !missing.iter().any(|rank| self.has_come(*rank))).unwrap_or(end)
    }

    /// Arrives and waits for the others, at most `limit`; for those that have not
    /// come to the meeting no longer than until `absent`, where that is given.
    pub fn pass(&self, local_rank: u32, limit: Duration, absent: Option<Instant>) -> Outcome {
        let end = Instant::now() + limit;
        self.went_on(local_rank);
        if let Some(slot) = self.slots().get(local_rank as usize) {
            slot.store(ARRIVED, Ordering::Release);
            self.changed();
        }
        loop {
            let seen = self.changes();
            if self.is_closed() {
                return Outcome::Closed;
            }
            let missing = self.in_state(0);
            if missing.is_empty() {
                let gone = self.in_state(GONE);
                return if gone.is_empty() { Outcome::Open } else { Outcome::Gone(gone) };
            }
            if orphaned() {
                return Outcome::Orphaned;
            }
            let left = self.until(&missing, end, absent).saturating_duration_since(Instant::now());
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
                        move || gate.pass(rank, LONG, None)
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
                        move || gate.pass(rank, LONG, None)
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
            let first = scope.spawn(|| gate.pass(0, Duration::from_millis(200), None));
            assert_eq!(gate.pass(2, Duration::from_millis(200), None), Outcome::Late(vec![1]));
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
            let waiting = scope.spawn(|| gate.pass(0, LONG, None));
            gate.gone(1);
            assert_eq!(waiting.join().unwrap(), Outcome::Gone(vec![1]));
        });
    }

    #[test]
    fn the_end_of_a_rank_that_had_arrived_changes_nothing() {
        let gate = Gate::new(2).unwrap();
        assert_eq!(gate.pass(0, Duration::ZERO, None), Outcome::Late(vec![1]));
        gate.gone(0);
        assert_eq!(gate.pass(1, LONG, None), Outcome::Open);
    }

    #[test]
    fn the_leader_s_verdict_lets_those_that_wait_start() {
        let gate = Gate::new(3).unwrap();
        let late = || Instant::now() + LONG;
        thread::scope(|scope| {
            let start = |rank: u32| {
                let gate = &gate;
                scope.spawn(move || {
                    gate.arrive(rank);
                    gate.wait_for_verdict(late(), late())
                })
            };
            gate.arrive(0);
            assert_eq!(gate.roll(late(), None), Roll::Coming);
            let waiting = [start(1), start(2)];
            while gate.roll(late(), None) == Roll::Coming {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(gate.roll(late(), None), Roll::All);
            gate.go(20312);
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), Verdict::Go(20312));
            }
        });
        // Ranks that end after it are those of an ordinary job.
        gate.gone(0);
        gate.gone(2);
        assert_eq!(gate.wait_for_verdict(late(), late()), Verdict::Go(20312));
        assert_eq!(gate.roll(late(), None), Roll::All);
    }

    #[test]
    fn a_rank_that_ends_while_it_waits_for_the_verdict_is_seen() {
        let gate = Gate::new(2).unwrap();
        let late = Instant::now() + LONG;
        gate.arrive(0);
        gate.arrive(1);
        gate.gone(1);
        assert_eq!(gate.roll(late, None), Roll::Gone(vec![1]));
        gate.close();
        assert_eq!(gate.roll(late, None), Roll::Closed);
        assert_eq!(gate.wait_for_verdict(late, late), Verdict::Closed);
    }

    #[test]
    fn a_leader_that_ends_or_does_not_come_is_not_waited_for() {
        let (now, late) = (Instant::now(), Instant::now() + LONG);
        let gate = Gate::new(2).unwrap();
        gate.arrive(1);
        assert_eq!(gate.wait_for_verdict(now, late), Verdict::LeaderLate);
        gate.arrive(0);
        assert_eq!(gate.wait_for_verdict(late, now), Verdict::LeaderLate);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.wait_for_verdict(late, late));
            gate.gone(0);
            assert_eq!(waiting.join().unwrap(), Verdict::LeaderGone);
        });
        assert!(gate.takes_over());
        assert!(!gate.takes_over());
        let gate = Gate::new(2).unwrap();
        gate.nothing_to_take_over();
        gate.gone(0);
        assert!(gate.leader_is_gone() && !gate.takes_over());
        // Rank 1 has not come: it costs the deadline.
        let gate = Gate::new(2).unwrap();
        gate.arrive(0);
        assert_eq!(gate.roll(now, None), Roll::Late(vec![1]));
        assert_eq!(gate.roll(late, Some(now)), Roll::Late(vec![1]));
    }

    #[test]
    fn nobody_waits_on_once_slurmstepd_was_killed() {
        let gate = Gate::new(2).unwrap();
        let seen = crate::system::child::run(LONG, || {
            let late = Instant::now() + LONG;
            super::super::orphan::pretend();
            let met = gate.meet(1, 2, &crate::facts::task::Peer::default(), late);
            gate.arrive(0);
            let waited = (gate.leader_leads(), gate.roll(late, None), gate.wait_for_verdict(late, late));
            format!("{met:?} {waited:?} {:?}", gate.pass(1, LONG, None)).into_bytes()
        });
        assert_eq!(String::from_utf8(seen.unwrap()).unwrap(), "Closed (true, Orphaned, Orphaned) Open");
    }

    #[test]
    fn strange_numbers_are_harmless() {
        let gate = Gate::new(0).unwrap();
        gate.gone(7);
        assert_eq!(gate.pass(7, LONG, None), Outcome::Open);
        gate.arrive(7);
        assert_eq!(gate.roll(Instant::now(), None), Roll::All);
        assert_eq!(gate.wait_for_verdict(Instant::now(), Instant::now()), Verdict::LeaderLate);
        gate.word(VERDICT).store(u32::MAX, Ordering::Relaxed);
        assert_eq!(gate.wait_for_verdict(Instant::now(), Instant::now()), Verdict::Go(u16::MAX));
        assert!(Gate::new(u32::MAX).is_err());
    }

    #[test]
    fn the_first_note_counts_and_is_one_bounded_line() {
        let gate = Gate::new(1).unwrap();
        assert_eq!((gate.refusal(), gate.summary()), (None, None));
        gate.keep_refusal("port 0\nis\u{1b}[31m none\n");
        gate.keep_refusal("another");
        assert_eq!(gate.refusal().as_deref(), Some("port 0 is [31m none"));
        gate.keep_summary(&"ä".repeat(NOTE_TEXT));
        assert_eq!(gate.summary(), Some("ä".repeat(NOTE_TEXT / 2)));
        // Beside them nothing changed.
        assert_eq!(gate.pass(0, LONG, None), Outcome::Open);
    }

    #[test]
    fn a_writer_that_was_killed_and_wild_memory_are_no_note_and_no_crash() {
        let gate = Gate::new(1).unwrap();
        gate.word(REFUSAL).store(WRITING, Ordering::Relaxed);
        assert_eq!(gate.refusal(), None);
        for word in &gate.words.all()[REFUSAL..HEADER] {
            word.store(u32::MAX, Ordering::Relaxed);
        }
        gate.word(REFUSAL).store(WRITTEN, Ordering::Relaxed);
        assert_eq!(gate.refusal().map(|text| text.chars().count()), Some(NOTE_TEXT));
    }

    #[test]
    fn a_note_comes_from_another_process() {
        let gate = Gate::new(1).unwrap();
        crate::system::child::run(LONG, || {
            gate.keep_refusal("said there");
            b"done".to_vec()
        })
        .unwrap();
        assert_eq!(gate.refusal().as_deref(), Some("said there"));
    }

    #[test]
    fn it_works_between_processes() {
        let gate = Gate::new(2).unwrap();
        thread::scope(|scope| {
            let other = scope
                .spawn(|| crate::system::child::run(LONG, || format!("{:?}", gate.pass(1, LONG, None)).into_bytes()));
            assert_eq!(gate.pass(0, LONG, None), Outcome::Open);
            assert_eq!(other.join().unwrap().unwrap(), b"Open");
        });
    }
}
