//! The meeting at the gate, before the plan is made: each rank of the node
//! brings its CPUs and its GPUs, and all of them get everybody's or nobody's.
//!
//! One rank that changes its CPUs for another's while that one keeps them would
//! leave two ranks on the same CPUs. So one word decides for all: the first rank
//! that sees everybody, or the first that sees somebody missing, sets it, once.
//! What happens to a rank afterwards changes nothing for the others.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use super::super::orphan::orphaned;
use super::{Gate, HEADER};
use crate::facts::CpuSet;
use crate::facts::task::{Peer, Peers};
use crate::system::shared::wait_for_change;

/// More ranks on one node than this do not meet; bounds the memory.
const MOST_RANKS: u32 = 4096;
/// CPUs with higher numbers cannot be written down.
const CPUS: usize = 2048;
/// More GPUs of one rank cannot be written down.
const GPUS: usize = 64;

/// A rank's part of the memory: its state, how many GPUs, its GPUs, its CPUs.
const STATE: usize = 0;
const GPU_COUNT: usize = 1;
const GPU_WORDS: usize = 2;
const CPU_WORDS: usize = GPU_WORDS + GPUS / 4;
const RANK_WORDS: usize = CPU_WORDS + CPUS / 32;

/// A rank's part is written.
const PRESENT: u32 = 1;

/// The decision: nothing yet, all were there, or the kind of what was amiss and
/// above it the local rank.
const OPEN: u32 = 0;
const ALL: u32 = 1;
const LATE: u32 = 2;
const ENDED: u32 = 3;
const TOO_LARGE: u32 = 4;
const WENT_ON: u32 = 5;
const UNCOUNTED: u32 = 6;
const KIND_BITS: u32 = 4;

/// How the meeting ended for a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// All ranks of the node have the same of these.
    Over(Peers),
    /// A rank refused, or slurmstepd was killed: the others are not to start.
    Closed,
}

/// The words that a gate for `ranks` tasks needs for the meeting.
pub(super) fn words(ranks: u32) -> usize {
    if ranks <= MOST_RANKS { ranks as usize * RANK_WORDS } else { 0 }
}

fn amiss(kind: u32, local_rank: u32) -> u32 {
    kind | local_rank << KIND_BITS
}

impl Gate {
    /// Brings `peer` and waits for the others, at most until `end`. `ranks` is how
    /// many tasks of the step this rank knows on its node.
    pub fn meet(&self, local_rank: u32, ranks: u32, peer: &Peer, end: Instant) -> Meeting {
        if self.ranks > MOST_RANKS || local_rank >= MOST_RANKS {
            return Meeting::Over(Peers::Incomplete(format!("more than {MOST_RANKS} ranks on one node do not meet")));
        }
        if ranks != self.ranks || local_rank >= self.ranks {
            // Several components of a het step on one node have a gate each.
            return self.over(self.decide(amiss(UNCOUNTED, local_rank)));
        }
        if !self.bring(local_rank, peer) {
            return self.over(self.decide(amiss(TOO_LARGE, local_rank)));
        }
        loop {
            let seen = self.changes();
            if self.is_closed() || orphaned() {
                return Meeting::Closed;
            }
            let decision = self.decision().load(Ordering::SeqCst);
            if decision != OPEN {
                return self.over(decision);
            }
            let Some(missing) = (0..self.ranks).find(|rank| !self.has_come(*rank)) else {
                return self.over(self.decide(ALL));
            };
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.over(self.decide(amiss(LATE, missing)));
            }
            // Woken by the decision, not by each arrival: the last one to come sees
            // all. Should it be killed before it says so, one of us sees it when
            // this returns, after a second at most.
            wait_for_change(self.word(super::CHANGES), seen, left);
        }
    }

    /// A task ended. Without a decision there will be no exchange, also where it
    /// had come.
    pub(super) fn ended_before_the_decision(&self, local_rank: u32) {
        if local_rank < self.ranks.min(MOST_RANKS) {
            self.decide(amiss(ENDED, local_rank));
        }
    }

    /// A rank starts that has not come to the meeting: nobody need wait for it.
    pub(super) fn went_on(&self, local_rank: u32) {
        if local_rank < self.ranks.min(MOST_RANKS) && !self.has_come(local_rank) {
            self.decide(amiss(WENT_ON, local_rank));
        }
    }

    /// How the meeting went, for slurmstepd's log; `None`: there was none.
    pub fn how_they_met(&self) -> Option<String> {
        match self.decision().load(Ordering::SeqCst) {
            ALL => Some("all".into()),
            // Without a meeting there are ranks that end and go on, too.
            decision if decision != OPEN && self.somebody_came() => Some(why(decision)),
            _ => None,
        }
    }

    /// Whether a rank has come to the meeting; there is none for very many.
    pub(super) fn has_come(&self, local_rank: u32) -> bool {
        let has_part = self.ranks <= MOST_RANKS && local_rank < self.ranks;
        has_part && self.part(local_rank, STATE).load(Ordering::SeqCst) == PRESENT
    }

    fn somebody_came(&self) -> bool {
        (0..self.ranks).any(|rank| self.has_come(rank))
    }

    fn decision(&self) -> &AtomicU32 {
        self.word(super::DECISION)
    }

    /// Decides, or says what was decided before.
    fn decide(&self, wanted: u32) -> u32 {
        match self.decision().compare_exchange(OPEN, wanted, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => {
                self.changed();
                wanted
            }
            Err(decided) => decided,
        }
    }

    /// The word at `at` of a rank's part. `local_rank` is below `ranks`, and
    /// `ranks` not above MOST_RANKS.
    fn part(&self, local_rank: u32, at: usize) -> &AtomicU32 {
        self.word(HEADER + self.ranks as usize + local_rank as usize * RANK_WORDS + at)
    }

    /// Writes this rank's part, whole before its state says so; false where it
    /// does not fit.
    fn bring(&self, local_rank: u32, peer: &Peer) -> bool {
        if peer.mask.words().len() > CPUS / 64 || peer.gpus.len() > GPUS {
            return false;
        }
        for (index, word) in peer.mask.words().iter().enumerate() {
            let halves = [*word as u32, (*word >> 32) as u32];
            for (half, value) in halves.into_iter().enumerate() {
                self.part(local_rank, CPU_WORDS + index * 2 + half).store(value, Ordering::Relaxed);
            }
        }
        for (index, gpus) in peer.gpus.chunks(4).enumerate() {
            let mut four = [0; 4];
            four[..gpus.len()].copy_from_slice(gpus);
            self.part(local_rank, GPU_WORDS + index).store(u32::from_ne_bytes(four), Ordering::Relaxed);
        }
        self.part(local_rank, GPU_COUNT).store(peer.gpus.len() as u32, Ordering::Relaxed);
        // Before this rank looks at the others' states: of two that come at once,
        // one sees both.
        self.part(local_rank, STATE).store(PRESENT, Ordering::SeqCst);
        true
    }

    /// What a rank brought, whatever the memory holds.
    fn brought(&self, local_rank: u32) -> Peer {
        let word = |at: usize| self.part(local_rank, at).load(Ordering::Relaxed);
        let cpus = (0..CPUS / 64).map(|index| {
            let half = |half: usize| u64::from(word(CPU_WORDS + index * 2 + half));
            half(0) | half(1) << 32
        });
        let gpus = (0..GPUS / 4).flat_map(|index| word(GPU_WORDS + index).to_ne_bytes());
        Peer {
            mask: CpuSet::of_words(&cpus.collect::<Vec<_>>()),
            gpus: gpus.take((word(GPU_COUNT) as usize).min(GPUS)).collect(),
        }
    }

    fn over(&self, decision: u32) -> Meeting {
        Meeting::Over(match decision {
            ALL => Peers::Met((0..self.ranks).map(|rank| self.brought(rank)).collect()),
            decision => Peers::Incomplete(why(decision)),
        })
    }
}

/// What was amiss, in words.
fn why(decision: u32) -> String {
    let rank = decision >> KIND_BITS;
    match decision & ((1 << KIND_BITS) - 1) {
        LATE => format!("local rank {rank} did not come in time"),
        ENDED => format!("local rank {rank} ended before the start"),
        TOO_LARGE => format!("local rank {rank} has CPU numbers above {} or more than {GPUS} GPUs", CPUS - 1),
        WENT_ON => format!("local rank {rank} did not take part"),
        UNCOUNTED => "Slurm does not tell how many ranks of the step are on this node".into(),
        _ => "the ranks' shared memory is damaged".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread;
    use std::time::Duration;

    use super::super::Outcome;
    use super::*;
    use crate::system::child;

    const LONG: Duration = Duration::from_secs(30);

    fn soon(milliseconds: u64) -> Instant {
        Instant::now() + Duration::from_millis(milliseconds)
    }

    fn late() -> Instant {
        Instant::now() + LONG
    }

    fn peer(cpus: &str, gpus: &[u8]) -> Peer {
        Peer { mask: CpuSet::parse(cpus).unwrap(), gpus: gpus.to_vec() }
    }

    fn own(rank: u32) -> Peer {
        Peer { mask: CpuSet::from_iter([rank, rank + 100]), gpus: vec![u8::try_from(rank).unwrap()] }
    }

    fn incomplete(meeting: &Meeting) -> &str {
        match meeting {
            Meeting::Over(Peers::Incomplete(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn everybody_learns_what_everybody_brought() {
        let brought =
            [peer("0-3,64,2047", &[1]), peer("31-32,63", &[]), peer("", &[255, 0, 7, 8, 9]), peer("4", &[3; 64])];
        let gate = Gate::new(4).unwrap();
        let meetings: Vec<Meeting> = thread::scope(|scope| {
            let meet = |rank: usize| {
                let (gate, peer) = (&gate, &brought[rank]);
                scope.spawn(move || gate.meet(rank as u32, 4, peer, late()))
            };
            let ranks: Vec<_> = (0..4).map(meet).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for meeting in meetings {
            assert_eq!(meeting, Meeting::Over(Peers::Met(brought.to_vec())));
        }
        assert_eq!(gate.how_they_met().as_deref(), Some("all"));
        // The end of a rank after the decision changes nothing for one that looks late.
        gate.gone(1);
        assert_eq!(gate.meet(0, 4, &brought[0], soon(0)), Meeting::Over(Peers::Met(brought.to_vec())));
    }

    #[test]
    fn a_rank_alone_meets_itself() {
        let gate = Gate::new(1).unwrap();
        let own = peer("0-7", &[0]);
        assert_eq!(gate.meet(0, 1, &own, soon(0)), Meeting::Over(Peers::Met(vec![own])));
    }

    #[test]
    fn a_rank_that_does_not_come_in_time_costs_the_deadline_and_the_exchange() {
        let gate = Gate::new(3).unwrap();
        let start = Instant::now();
        let (first, second) = thread::scope(|scope| {
            let first = scope.spawn(|| gate.meet(0, 3, &own(0), soon(200)));
            (gate.meet(2, 3, &own(2), soon(300)), first.join().unwrap())
        });
        assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < LONG);
        // Rank 2 would have waited longer; it follows rank 0.
        assert_eq!(first, second);
        assert_eq!(incomplete(&first), "local rank 1 did not come in time");
        // So does the late one, and at once.
        let start = Instant::now();
        assert_eq!(incomplete(&gate.meet(1, 3, &own(1), late())), "local rank 1 did not come in time");
        assert!(start.elapsed() < LONG / 2);
    }

    #[test]
    fn a_rank_that_ends_before_the_decision_ends_the_waiting() {
        // One that had not come, and one that had.
        for comes in [false, true] {
            let gate = Gate::new(3).unwrap();
            if comes {
                assert!(gate.bring(1, &own(1)));
            }
            let meeting = thread::scope(|scope| {
                let waiting = scope.spawn(|| gate.meet(0, 3, &own(0), late()));
                gate.gone(1);
                waiting.join().unwrap()
            });
            assert_eq!(incomplete(&meeting), "local rank 1 ended before the start");
            assert_eq!(gate.meet(2, 3, &own(2), late()), meeting);
            assert_eq!(gate.how_they_met().as_deref(), Some("local rank 1 ended before the start"));
        }
    }

    #[test]
    fn a_refusal_closes_the_meeting() {
        let gate = Gate::new(2).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.meet(0, 2, &own(0), late()));
            gate.close();
            assert_eq!(waiting.join().unwrap(), Meeting::Closed);
        });
    }

    #[test]
    fn a_rank_that_starts_without_meeting_is_not_waited_for() {
        let gate = Gate::new(2).unwrap();
        let meeting = thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.meet(0, 2, &own(0), late()));
            gate.pass(1, Duration::ZERO, None);
            waiting.join().unwrap()
        });
        assert_eq!(incomplete(&meeting), "local rank 1 did not take part");
    }

    /// Rank 1 hangs. Ranks 0, 2 and 3 learn at the same moment that it is late, and
    /// the first of them at the gate finds the others still busy with their plans.
    #[test]
    fn after_an_incomplete_meeting_only_a_rank_that_did_not_come_is_missing_at_the_start() {
        let gate = Gate::new(4).unwrap();
        let outcomes = thread::scope(|scope| {
            let start = |rank: u32| {
                let gate = &gate;
                scope.spawn(move || {
                    let end = soon(300);
                    incomplete(&gate.meet(rank, 4, &own(rank), end));
                    thread::sleep(Duration::from_millis(u64::from(rank) * 200));
                    gate.pass(rank, LONG, Some(end))
                })
            };
            let ranks: Vec<_> = [0, 2, 3].map(start).into();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(outcomes, vec![Outcome::Late(vec![1]); 3]);
        // One that came and ends before its start is waited for no longer, either.
        let gate = Gate::new(3).unwrap();
        let end = soon(0);
        incomplete(&gate.meet(0, 3, &own(0), end));
        incomplete(&gate.meet(2, 3, &own(2), end));
        let outcome = thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.pass(0, LONG, Some(end)));
            gate.gone(2);
            waiting.join().unwrap()
        });
        assert_eq!(outcome, Outcome::Late(vec![1]));
    }

    #[test]
    fn ranks_that_do_not_meet_say_nothing_of_a_meeting() {
        let gate = Gate::new(2).unwrap();
        assert_eq!(gate.how_they_met(), None);
        gate.pass(0, Duration::ZERO, None);
        gate.gone(0);
        assert_eq!(gate.how_they_met(), None);
    }

    #[test]
    fn what_cannot_be_written_down_is_no_exchange_for_anybody() {
        for odd in [peer("2048", &[]), peer("0", &[0; 65])] {
            let gate = Gate::new(2).unwrap();
            let meeting = gate.meet(1, 2, &odd, late());
            assert_eq!(incomplete(&meeting), "local rank 1 has CPU numbers above 2047 or more than 64 GPUs");
            assert_eq!(gate.meet(0, 2, &own(0), late()), meeting);
        }
    }

    #[test]
    fn a_gate_for_another_number_of_ranks_decides_against_the_exchange() {
        for (gate, ranks) in [(2, 3), (2, 1), (0, 2)] {
            let gate = Gate::new(gate).unwrap();
            let start = Instant::now();
            let told = "Slurm does not tell how many ranks of the step are on this node";
            assert_eq!(incomplete(&gate.meet(0, ranks, &own(0), late())), told);
            assert_eq!(incomplete(&gate.meet(7, 2, &own(7), late())), told);
            assert!(start.elapsed() < LONG / 2);
        }
    }

    #[test]
    fn the_memory_of_very_many_ranks_is_bounded() {
        let gate = Gate::new(MOST_RANKS + 1).unwrap();
        let register = super::super::register::words(MOST_RANKS + 1);
        assert_eq!(gate.words.all().len(), HEADER + MOST_RANKS as usize + 1 + register);
        for rank in [0, MOST_RANKS, u32::MAX] {
            let told = incomplete(&gate.meet(rank, MOST_RANKS + 1, &own(0), late())).to_string();
            assert_eq!(told, "more than 4096 ranks on one node do not meet");
            // With them the start is as without a meeting.
            assert!(matches!(gate.pass(rank, Duration::ZERO, None), Outcome::Late(_)));
            gate.gone(rank);
        }
        assert_eq!(gate.how_they_met(), None);
        let gate = Gate::new(MOST_RANKS).unwrap();
        let last = MOST_RANKS - 1;
        assert!(gate.bring(last, &own(1)));
        assert_eq!((gate.brought(last), gate.brought(0)), (own(1), Peer::default()));
        assert_eq!(gate.how_they_met(), None);
        gate.gone(last);
        assert_eq!(gate.how_they_met().as_deref(), Some("local rank 4095 ended before the start"));
    }

    #[test]
    fn wild_memory_is_no_crash_and_no_endless_wait() {
        let gate = Gate::new(2).unwrap();
        for word in &gate.words.all()[HEADER..] {
            word.store(u32::MAX, Ordering::Relaxed);
        }
        let all = CpuSet::from_iter(0..2048);
        let wild = Peer { mask: all, gpus: vec![255; 64] };
        assert_eq!(gate.brought(1), wild);
        assert_eq!(incomplete(&gate.meet(0, 2, &own(0), soon(0))), "local rank 1 did not come in time");
        for wild in [7, 15, u32::MAX, u32::MAX << KIND_BITS] {
            let gate = Gate::new(2).unwrap();
            gate.decision().store(wild, Ordering::Relaxed);
            assert_eq!(incomplete(&gate.meet(0, 2, &own(0), late())), "the ranks' shared memory is damaged");
        }
    }

    #[test]
    fn a_rank_killed_while_it_writes_or_waits_is_no_exchange() {
        // While it waits: its process ends at the deadline of `child::run`.
        let gate = Gate::new(3).unwrap();
        let killed = child::run(Duration::from_millis(300), || {
            gate.meet(1, 3, &own(1), late());
            Vec::new()
        });
        assert!(killed.is_err());
        assert_eq!(gate.part(1, STATE).load(Ordering::SeqCst), PRESENT, "it did not come that far");
        gate.gone(1);
        assert_eq!(incomplete(&gate.meet(0, 3, &own(0), late())), "local rank 1 ended before the start");
        // While it writes: half of its part is there, its state is not.
        let gate = Gate::new(2).unwrap();
        gate.part(1, CPU_WORDS).store(u32::MAX, Ordering::Relaxed);
        assert_eq!(incomplete(&gate.meet(0, 2, &own(0), soon(50))), "local rank 1 did not come in time");
    }

    #[test]
    fn it_works_between_processes() {
        let gate = Gate::new(2).unwrap();
        thread::scope(|scope| {
            let other =
                scope.spawn(|| child::run(LONG, || format!("{:?}", gate.meet(1, 2, &own(1), late())).into_bytes()));
            let here = gate.meet(0, 2, &own(0), late());
            assert_eq!(here, Meeting::Over(Peers::Met(vec![own(0), own(1)])));
            assert_eq!(String::from_utf8(other.join().unwrap().unwrap()).unwrap(), format!("{here:?}"));
        });
    }

    /// Processes as Slurm's tasks are, of which one is killed at any instruction. Its
    /// end is told as slurmstepd tells it, and the others agree.
    #[test]
    fn a_process_killed_at_any_moment_leaves_the_others_with_the_same_answer() {
        const RANKS: u32 = 4;
        let mut state = 0x2545_f491_4f6c_dd1d;
        let (mut exchanges, mut kept) = (0, 0);
        for round in 0..150 {
            let gate = Gate::new(RANKS).unwrap();
            let meet = |rank: u32| {
                let (gate, start) = (&gate, Duration::from_micros(number(&mut state) % 1500));
                child::ask(move || {
                    thread::sleep(start);
                    format!("{:?}", gate.meet(rank, RANKS, &own(rank), late())).into_bytes()
                })
            };
            let mut ranks: Vec<_> = (0..RANKS).map(meet).map(|asked| Some(asked.unwrap())).collect();
            let victim = (number(&mut state) % u64::from(RANKS)) as usize;
            thread::sleep(Duration::from_micros(number(&mut state) % 3000));
            // Dropped before it is heard, it is killed.
            drop(ranks[victim].take());
            gate.gone(victim as u32);
            let answers = ranks.into_iter().flatten().map(|asked| asked.answer(LONG).unwrap());
            let texts: BTreeSet<String> = answers.map(|answer| String::from_utf8(answer).unwrap()).collect();
            let [text] = &texts.iter().collect::<Vec<_>>()[..] else { panic!("round {round}: {texts:#?}") };
            match text.starts_with("Over(Met(") {
                true => exchanges += 1,
                false => {
                    assert!(text.contains(&format!("local rank {victim} ended")), "round {round}: {text}");
                    kept += 1;
                }
            }
        }
        assert!(exchanges > 5 && kept > 5, "{exchanges} exchanges, {kept} without");
    }

    /// Numbers that differ from run to run of the loop, and not from test to test.
    fn number(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    /// Whatever the ranks' timing, deadlines and ends: those that get an answer get
    /// the same one, and an exchange only where all came.
    #[test]
    fn all_ranks_have_the_same_answer_whatever_their_timing() {
        const RANKS: u32 = 4;
        let mut state = 0x9e37_79b9_7f4a_7c15;
        let (mut exchanges, mut kept) = (0, 0);
        for round in 0..400 {
            let gate = Gate::new(RANKS).unwrap();
            // The deadline of each, around the moment at which the last one comes.
            let plan: Vec<(Duration, Duration, u64)> = (0..RANKS)
                .map(|_| {
                    let micros = |most: u64, state: &mut u64| Duration::from_micros(number(state) % most);
                    (micros(2000, &mut state), micros(3000, &mut state), number(&mut state) % 40)
                })
                .collect();
            let answers: Vec<Option<Meeting>> = thread::scope(|scope| {
                let one = |rank: u32| {
                    let (gate, (start, limit, fate)) = (&gate, plan[rank as usize]);
                    scope.spawn(move || {
                        thread::sleep(start);
                        match fate {
                            // It ends before it comes, and after.
                            0 => gate.gone(rank),
                            1 => {
                                gate.bring(rank, &own(rank));
                                gate.gone(rank);
                            }
                            _ => return Some(gate.meet(rank, RANKS, &own(rank), Instant::now() + limit)),
                        }
                        None
                    })
                };
                let ranks: Vec<_> = (0..RANKS).map(one).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let texts: BTreeSet<String> = answers.iter().flatten().map(|answer| format!("{answer:?}")).collect();
            assert!(texts.len() <= 1, "round {round}: {texts:#?}");
            if let Some(Meeting::Over(Peers::Met(peers))) = answers.iter().flatten().next() {
                assert_eq!(*peers, (0..RANKS).map(own).collect::<Vec<_>>(), "round {round}");
                assert!(plan.iter().all(|(_, _, fate)| *fate != 0), "round {round}: one never came");
                exchanges += 1;
            } else {
                kept += 1;
            }
        }
        // Without both the test would show nothing.
        assert!(exchanges > 20 && kept > 20, "{exchanges} exchanges, {kept} without");
    }
}
