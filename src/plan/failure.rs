//! Which rank failed first, from the records that the nodes sent: the first failure, a set
//! of which the order cannot be told, or nobody, where the job was ended from outside.
//!
//! What is known of the order. slurmstepd collects its tasks' ends in batches of about
//! 100 ms, so ends on one node closer than 150 ms are in no order; between nodes comes
//! what the comparison of their clocks leaves open. What is known of causes. A rank that
//! ends with a code of its own or by a fault of its program did so by itself; SIGTERM and
//! SIGKILL come from outside, mostly because another rank had failed; SIGABRT is how
//! watchdogs end a rank that waits for another one.

mod text;

#[cfg(test)]
mod tests;

pub use text::report;

use serde::{Deserialize, Serialize};

use crate::facts::exit::{Ended, ExitRecord, Oom};
use crate::facts::job::Job;

const MS: i64 = 1_000_000;
const SECOND: i64 = 1000 * MS;

/// Ends on one node closer than this are in no order.
const SAME_NODE: i64 = 150 * MS;
/// And between nodes whose clocks were not compared.
const CLOCKS_UNKNOWN: i64 = SECOND;
/// How far the controller's clock, which counts whole seconds, may be from the nodes'.
const CONTROLLER: i64 = 5 * SECOND;

/// What srun knows of the end of its step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepEnd {
    /// SLURM_JOB_ID.
    pub job: u32,
    /// SLURM_STEP_ID.
    pub step: u32,
    /// Tasks of the step, of all het components.
    pub ranks: u32,
    /// Nodes of the step.
    pub nodes: u32,
    /// The tasks are launchers, such as torchrun, and no ranks.
    pub agents: bool,
    /// Lines of the output begin with their rank, or each rank has a file.
    pub labelled: bool,
    /// Who ended the job, where it was not its ranks.
    pub ended: Option<Ending>,
    /// When, by the controller's clock; nanoseconds since 1970.
    pub ended_ns: Option<u64>,
    /// How long before that ranks may already have died of it, in seconds: KillWait, or
    /// the time after which a node that is gone is missed.
    pub before: u32,
    /// Nodes of the step that sent no record and do not answer the controller.
    pub lost: Vec<String>,
    /// srun's `--wait`, where given, in seconds: the ranks left are ended so long after
    /// the first one's end.
    pub wait: Option<u32>,
}

/// What is known beside a step's end of where it ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Circumstances {
    /// The job is not srun's own: it was there before, and goes on without it.
    pub in_allocation: bool,
    /// KillWait of slurm.conf, in seconds.
    pub kill_wait: u32,
    /// SlurmdTimeout, in seconds.
    pub node_timeout: u32,
    /// The time, in nanoseconds since 1970.
    pub now_ns: u64,
}

impl StepEnd {
    /// With what the controller says of the job, and of nodes that sent no record and do
    /// not answer it.
    pub fn told(mut self, jobs: &[Job], lost: Vec<String>, around: Circumstances) -> StepEnd {
        let ended = jobs.iter().find_map(|job| Some((ending(job, around.in_allocation)?, job)));
        // srun's hook knows whichever component came first; people know the first one.
        self.job = jobs.iter().find_map(|job| job.het).unwrap_or(self.job);
        self.lost = lost;
        self.before = around.kill_wait;
        (self.ended, self.ended_ns) = match ended {
            // The job's time is that of its end, which comes after the grace of preemption.
            Some((ending, job)) => {
                let end = job.preempted.or(job.end).filter(|_| ending != Ending::Requeued);
                (Some(ending), end.map(|end| end.saturating_mul(SECOND as u64)))
            }
            // The controller has not missed it yet.
            None if !self.lost.is_empty() => (Some(Ending::NodeFailure), Some(around.now_ns)),
            None => (None, None),
        };
        if !self.lost.is_empty() || self.ended == Some(Ending::NodeFailure) {
            // Slurm looks in turns, the longer the timeout the rarer: with 10 s it missed a
            // node after 25 (measured with 22.05.8).
            self.before = self.before.max(around.node_timeout.saturating_mul(2).saturating_add(30));
        }
        self
    }
}

/// Who ended the job, where it was not its ranks. While its processes end a job is
/// COMPLETING, and only its reason may tell why.
fn ending(job: &Job, in_allocation: bool) -> Option<Ending> {
    if job.preempted.is_some() {
        return Some(Ending::Preempted);
    }
    let state = job.state.split(['+', ',']).next().unwrap_or_default();
    match (state, job.reason.as_str()) {
        ("TIMEOUT", _) | ("COMPLETING", "TimeLimit") => Some(Ending::TimeLimit),
        ("DEADLINE", _) | ("COMPLETING", "DeadLine") => Some(Ending::Deadline),
        ("PREEMPTED", _) => Some(Ending::Preempted),
        ("NODE_FAIL" | "BOOT_FAIL", _) | ("COMPLETING", "NodeDown" | "NodeFail") => Some(Ending::NodeFailure),
        ("PENDING" | "REQUEUED" | "REQUEUE_HOLD" | "REQUEUE_FED" | "SPECIAL_EXIT", _)
        | ("COMPLETING", "BeginTime" | "JobHeldAdmin" | "JobHeldUser") => Some(Ending::Requeued),
        ("CANCELLED", _) => Some(Ending::Cancelled),
        // While its srun runs, a job is completing only where somebody ended it. An srun
        // with an allocation of its own has given it back by now, with the reason.
        ("COMPLETING", reason) if in_allocation || reason == "None" => Some(Ending::Cancelled),
        _ => None,
    }
}

/// What ended a job from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// Its time limit.
    TimeLimit,
    /// Its `--deadline`.
    Deadline,
    /// scancel, or the end of what it belongs to.
    Cancelled,
    /// A job that goes first.
    Preempted,
    /// A node.
    NodeFailure,
    /// It was put back into the queue.
    Requeued,
}

/// What is said of a step's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// Nothing failed.
    Nothing,
    /// One rank was first.
    First {
        /// Its end.
        first: &'a ExitRecord,
        /// The others' ends.
        others: Others,
        /// The job was ended afterwards.
        then: Option<Ending>,
    },
    /// One of these was; not one alone is surely before the others.
    Set {
        /// By time, as far as it is known.
        set: Vec<&'a ExitRecord>,
        /// Why they are in no order.
        why: Unordered,
        /// The others' ends.
        others: Others,
        /// The job was ended afterwards.
        then: Option<Ending>,
    },
    /// No rank failed by itself.
    Nobody {
        /// Who ended them.
        by: Outside,
        /// How they ended.
        all: Others,
    },
}

impl Verdict<'_> {
    /// In one word, for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Nothing => "nothing",
            Verdict::First { .. } => "first",
            Verdict::Set { .. } => "set",
            Verdict::Nobody { .. } => "nobody",
        }
    }

    /// The ranks named, in order.
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = match self {
            Verdict::First { first, .. } => vec![first.rank],
            Verdict::Set { set, .. } => set.iter().map(|record| record.rank).collect(),
            Verdict::Nothing | Verdict::Nobody { .. } => Vec::new(),
        };
        ranks.sort_unstable();
        ranks
    }
}

/// Who ended ranks that did not fail by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outside {
    /// The job's end.
    Job(Ending),
    /// srun's `--wait`.
    Wait(u32),
    /// A signal to all of them: scancel of the step, its time limit, an interrupt.
    Signal,
}

/// Why some ends are in no order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unordered {
    /// On one node, within 150 ms.
    SameNode,
    /// On several nodes, within 150 ms and what is left open by their clocks: this many
    /// nanoseconds.
    Clocks(i64),
    /// On several nodes whose clocks were not compared, within a second.
    ClocksUnknown,
}

/// How others ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Others {
    /// Kinds, most frequent first.
    pub kinds: Vec<(Kind, u32)>,
    /// How long after the first failure the first of them ended, in nanoseconds.
    pub after: i64,
}

impl Others {
    /// How many.
    pub fn count(&self) -> u32 {
        self.kinds.iter().map(|(_, count)| count).sum()
    }

    fn of<'a>(records: impl Iterator<Item = &'a ExitRecord>, since: i64) -> Others {
        let mut others = Others::default();
        let mut first: Option<i64> = None;
        for record in records {
            let kind = Kind::of(record);
            match others.kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => others.kinds.push((kind, 1)),
            }
            first = Some(first.map_or(time(record), |first| first.min(time(record))));
        }
        others.kinds.sort_by_key(|(kind, count)| (std::cmp::Reverse(*count), *kind));
        others.after = first.map_or(0, |first| first.saturating_sub(since).max(0));
        others
    }
}

/// How a rank ended, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Not started.
    Refused,
    /// For want of memory.
    Memory,
    /// With this exit code.
    Exit(i32),
    /// By this signal.
    Signal(i32),
}

impl Kind {
    /// Of a record. A shell's 128 + N is not taken for the signal: what was counted is
    /// what Slurm shows.
    pub fn of(record: &ExitRecord) -> Kind {
        match record.kind {
            Ended::Refused => Kind::Refused,
            _ if class(record) == Class::Memory && signal(record).is_some() => Kind::Memory,
            Ended::Exit(code) => Kind::Exit(code),
            Ended::Signal(signal) => Kind::Signal(signal),
        }
    }
}

/// What an end says of its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// palingenesis did not start it, and said why.
    Refused,
    /// The kernel killed it for want of memory: never because of another rank.
    Memory,
    /// By itself: its own exit code, or a fault of its program.
    Own,
    /// Mostly because of another rank: a watchdog's abort, a closed pipe.
    Abort,
    /// Sent by somebody else.
    Outside,
}

/// The signal by which it ended, its own or that of the program a shell reports with
/// 128 + N.
fn signal(record: &ExitRecord) -> Option<i32> {
    match record.kind {
        Ended::Signal(signal) => Some(signal),
        Ended::Exit(code @ 129..=192) => Some(code - 128),
        _ => None,
    }
}

fn class(record: &ExitRecord) -> Class {
    let signal = match (record.kind, signal(record)) {
        (Ended::Refused, _) => return Class::Refused,
        // A cgroup's count is one for all of it: a rank that ends by SIGTERM is not the
        // one that the kernel killed.
        (_, None | Some(libc::SIGKILL)) if record.oom == Oom::Killed => return Class::Memory,
        (_, None) => return Class::Own,
        (_, Some(signal)) => signal,
    };
    match signal {
        libc::SIGABRT | libc::SIGPIPE => Class::Abort,
        libc::SIGTERM | libc::SIGKILL | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT | libc::SIGUSR1 | libc::SIGUSR2 => {
            Class::Outside
        }
        _ => Class::Own,
    }
}

/// When, by the clock of rank 0's node, as far as that is known.
fn time(record: &ExitRecord) -> i64 {
    let offset = record.clock.map_or(0, |(offset, _)| offset);
    i64::try_from(record.time_ns).unwrap_or(i64::MAX).saturating_sub(offset)
}

/// How much later one must be than the other to be surely later.
fn margin(one: &ExitRecord, other: &ExitRecord) -> i64 {
    if one.node == other.node {
        return SAME_NODE;
    }
    match (open(one), open(other)) {
        (Some(one), Some(other)) => SAME_NODE.saturating_add(one).saturating_add(other),
        _ => CLOCKS_UNKNOWN,
    }
}

/// What its clock leaves open; rank 0's node is compared with itself.
fn open(record: &ExitRecord) -> Option<i64> {
    match record.clock {
        Some((_, uncertainty)) => Some(i64::try_from(uncertainty).unwrap_or(i64::MAX)),
        None => (record.node_rank == 0).then_some(0),
    }
}

/// Whether `one` surely ended before `other`.
fn before(one: &ExitRecord, other: &ExitRecord) -> bool {
    let later = time(other).saturating_sub(time(one));
    later > SAME_NODE && later > margin(one, other)
}

/// Those before which surely none of the others ended, by time.
fn earliest<'a>(records: &[&'a ExitRecord]) -> Vec<&'a ExitRecord> {
    let mut sorted: Vec<&ExitRecord> = records.to_vec();
    sorted.sort_by_key(|record| (time(record), record.rank));
    let Some(first) = sorted.first().copied() else {
        return Vec::new();
    };
    let is_head = |record: &&&ExitRecord| {
        let sure = sorted.partition_point(|other| time(other) < time(record).saturating_sub(SAME_NODE));
        // Most are after the very first one.
        !before(first, record) && !sorted[..sure].iter().any(|other| before(other, record))
    };
    sorted.iter().filter(is_head).copied().collect()
}

/// One record for each rank: the first it sent.
fn one_each(records: &[ExitRecord]) -> Vec<&ExitRecord> {
    let mut each: Vec<&ExitRecord> = records.iter().collect();
    each.sort_by_key(|record| (record.rank, record.time_ns, Kind::of(record)));
    each.dedup_by_key(|record| record.rank);
    each
}

/// Judges. The order in which the records came does not matter.
pub fn judge<'a>(records: &'a [ExitRecord], step: &StepEnd) -> Verdict<'a> {
    let all = one_each(records);
    if all.is_empty() {
        return Verdict::Nothing;
    }
    let refused: Vec<&ExitRecord> = all.iter().filter(|record| class(record) == Class::Refused).copied().collect();
    if !refused.is_empty() {
        // Why no rank started the user has read; those that somebody else ended did not
        // cause it, or are named in that line.
        if all.iter().all(|record| matches!(class(record), Class::Refused | Class::Outside)) {
            return Verdict::Nothing;
        }
        return of_refused(&all, &refused);
    }
    let Some(ending) = step.ended else {
        return by_themselves(&all, step);
    };
    let early: Vec<&ExitRecord> = match step.ended_ns {
        Some(end) => {
            let end = i64::try_from(end).unwrap_or(i64::MAX);
            let limit = end.saturating_sub(i64::from(step.before).saturating_mul(SECOND)).saturating_sub(CONTROLLER);
            all.iter().filter(|record| time(record) < limit).copied().collect()
        }
        None => Vec::new(),
    };
    match by_themselves(&early, step) {
        Verdict::First { first, others: _, .. } => {
            Verdict::First { first, others: rest(&all, &[first]), then: Some(ending) }
        }
        Verdict::Set { set, why, .. } => {
            let others = rest(&all, &set);
            Verdict::Set { set, why, others, then: Some(ending) }
        }
        Verdict::Nothing | Verdict::Nobody { .. } => {
            Verdict::Nobody { by: Outside::Job(ending), all: Others::of(all.into_iter(), 0) }
        }
    }
}

/// The ends beside those named.
fn rest(all: &[&ExitRecord], named: &[&ExitRecord]) -> Others {
    let since = named.iter().map(|record| time(record)).min().unwrap_or(0);
    let is_named = |record: &&&ExitRecord| !named.iter().any(|named| named.rank == record.rank);
    Others::of(all.iter().filter(is_named).copied(), since)
}

/// A rank that was refused was there before any that ran. Those without a line of their
/// own were stopped with it.
fn of_refused<'a>(all: &[&'a ExitRecord], refused: &[&'a ExitRecord]) -> Verdict<'a> {
    let with_line: Vec<&ExitRecord> = refused.iter().filter(|record| record.line.is_some()).copied().collect();
    let told = if with_line.is_empty() { refused.to_vec() } else { with_line };
    named(earliest(&told), all)
}

fn named<'a>(mut heads: Vec<&'a ExitRecord>, all: &[&'a ExitRecord]) -> Verdict<'a> {
    let others = rest(all, &heads);
    if heads.len() == 1
        && let Some(first) = heads.pop()
    {
        return Verdict::First { first, others, then: None };
    }
    let why = unordered(&heads);
    Verdict::Set { set: heads, why, others, then: None }
}

fn unordered(set: &[&ExitRecord]) -> Unordered {
    if set.windows(2).all(|pair| pair[0].node == pair[1].node) {
        return Unordered::SameNode;
    }
    let open: Option<Vec<i64>> = set.iter().map(|record| open(record)).collect();
    match open.and_then(|open| open.into_iter().max()) {
        Some(open) => Unordered::Clocks(open),
        None => Unordered::ClocksUnknown,
    }
}

/// Where nothing but the ranks and srun ended the step.
fn by_themselves<'a>(all: &[&'a ExitRecord], step: &StepEnd) -> Verdict<'a> {
    if all.is_empty() {
        return Verdict::Nothing;
    }
    let of = |wanted: &[Class]| -> Vec<&'a ExitRecord> {
        all.iter().filter(|record| wanted.contains(&class(record))).copied().collect()
    };
    let own = of(&[Class::Memory, Class::Own]);
    let aborts = of(&[Class::Abort]);
    // A watchdog's aborts are those of all ranks but the one that they wait for, so that
    // few before many others end otherwise are what the others end of.
    let early: Vec<&ExitRecord> =
        aborts.iter().filter(|abort| !own.iter().any(|own| before(own, abort))).copied().collect();
    let failures = match (own.is_empty(), early.len() < own.len()) {
        (true, _) => aborts,
        (false, true) => [own, early].concat(),
        (false, false) => own,
    };
    // Slurm ends ranks by SIGTERM, and by SIGKILL only KillWait later: a rank killed while
    // others still end was singled out, whatever those end with.
    let heads = earliest(all);
    let kill = |record: &&&ExitRecord| class(record) == Class::Outside && signal(record) == Some(libc::SIGKILL);
    let killed: Vec<&ExitRecord> = heads.iter().filter(kill).copied().collect();
    if !killed.is_empty() && few(&killed, killed.len() == all.len(), step) {
        return named(killed, all);
    }
    let outside = of(&[Class::Outside]);
    let first: Vec<&ExitRecord> =
        outside.iter().filter(|one| failures.iter().all(|failure| before(one, failure))).copied().collect();
    let ended = earliest(&first);
    let others = || all.iter().filter(|record| !ended.iter().any(|one| one.rank == record.rank));
    // The others lived on.
    let alone = others().all(|other| ended.iter().all(|one| before(one, other)));
    if !ended.is_empty() && alone && few(&ended, others().count() == 0, step) {
        return named(ended, all);
    }
    if !first.is_empty() && 2 * first.len() >= all.len() {
        let by = match step.wait {
            Some(wait) if failures.is_empty() && all.len() < as_count(step.ranks) => Outside::Wait(wait),
            _ => Outside::Signal,
        };
        return Verdict::Nobody { by, all: Others::of(all.iter().copied(), 0) };
    }
    let mut heads = earliest(&failures);
    // An OOM kill is no consequence; what ends beside it in the same moment mostly is one.
    if heads.iter().any(|head| class(head) == Class::Memory) {
        heads.retain(|head| class(head) == Class::Memory);
        // The count is the step's on that node: who was killed needs no other evidence.
        if heads.iter().any(|head| signal(head).is_some()) {
            heads.retain(|head| signal(head).is_some());
        }
    }
    named(heads, all)
}

fn as_count(ranks: u32) -> usize {
    usize::try_from(ranks).unwrap_or(usize::MAX)
}

/// Whether ranks that a signal ended were singled out: one, or a quarter of all, or those
/// of one node among several. Where `alone`, nobody else ended badly: those may have dealt
/// with a SIGTERM that all got, but with no SIGKILL.
fn few(killed: &[&ExitRecord], alone: bool, step: &StepEnd) -> bool {
    let kill = killed.iter().all(|record| signal(record) == Some(libc::SIGKILL));
    if alone && (!kill || step.wait.is_some()) {
        return false;
    }
    let one_node = killed.windows(2).all(|pair| pair[0].node == pair[1].node);
    killed.len() == 1 || 4 * killed.len() <= as_count(step.ranks) || (one_node && step.nodes > 1)
}
