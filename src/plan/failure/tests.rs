//! Who is named, who is not, and in which words.

use super::*;

const MS_: u64 = 1_000_000;
const S: u64 = 1000 * MS_;
/// 2026-11-30 12:00:00 UTC.
const NOON: u64 = 1_796_040_000 * S;

/// Chance that is the same in every run (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            list.swap(last, other);
        }
    }
}

/// A rank of a step with four on each node, whose clocks agree within 1 ms; it ended so
/// many ms after noon.
fn ended(rank: u32, kind: Ended, ms: u64) -> ExitRecord {
    ExitRecord {
        rank,
        node: format!("n{}", rank / 4 + 1),
        node_rank: rank / 4,
        local_rank: rank % 4,
        gpu: Some((rank % 4).to_string()),
        kind,
        time_ns: NOON + ms * MS_,
        oom: Oom::No,
        clock: Some((0, MS_)),
        line: None,
    }
}

fn exit(rank: u32, code: i32, ms: u64) -> ExitRecord {
    ended(rank, Ended::Exit(code), ms)
}

fn signalled(rank: u32, signal: i32, ms: u64) -> ExitRecord {
    ended(rank, Ended::Signal(signal), ms)
}

fn step() -> StepEnd {
    StepEnd { job: 44, step: 0, ranks: 16, nodes: 4, ..StepEnd::default() }
}

fn job_ended(ending: Ending, ms: u64, before: u32) -> StepEnd {
    StepEnd { ended: Some(ending), ended_ns: Some(NOON + ms * MS_), before, ..step() }
}

/// The ranks named.
fn who(records: &[ExitRecord], step: &StepEnd) -> Vec<u32> {
    judge(records, step).ranks()
}

fn words(records: &[ExitRecord], step: &StepEnd) -> String {
    let clock = |ns: u64| format!("{:03} ms", (ns - NOON) / MS_);
    report(&judge(records, step), step, &clock).join("\n")
}

/// All ranks but these, each ended as the function says.
fn others(but: &[u32], end: impl Fn(u32) -> ExitRecord) -> Vec<ExitRecord> {
    (0..16).filter(|rank| !but.contains(rank)).map(end).collect()
}

#[test]
fn nothing_failed_nothing_is_said() {
    assert_eq!(judge(&[], &step()), Verdict::Nothing);
    assert_eq!(judge(&[], &job_ended(Ending::Cancelled, 0, 30)), Verdict::Nothing);
    assert_eq!(words(&[], &step()), "");
}

#[test]
fn the_line_names_rank_node_gpu_end_time_and_the_others() {
    let mut records = others(&[5, 9], |rank| signalled(rank, libc::SIGTERM, 2810));
    records.extend([exit(5, 1, 500), exit(9, 1, 2820)]);
    let text = words(&records, &step());
    assert_eq!(
        text.lines().next().unwrap(),
        "rank 5 (n2, local rank 1, GPU 1) failed first: exit code 1 at 500 ms; 2.31 s later 15 others ended: 14 by \
         SIGTERM, 1 with exit code 1"
    );
    assert!(text.lines().nth(1).unwrap().contains("read what rank 5 wrote last; srun -l"), "{text}");
    let labelled = StepEnd { labelled: true, ..step() };
    assert!(words(&records, &labelled).ends_with("read what rank 5 wrote last"));
}

/// A rank that is ended because another one failed ends as Slurm and the libraries end
/// it, whenever its node saw that.
#[test]
fn a_cascade_changes_nothing_and_neither_does_the_order_in_which_records_come() {
    let mut chance = Chance(88_172_645_463_325_252);
    let causes = [
        Ended::Exit(1),
        Ended::Exit(2),
        Ended::Exit(255),
        Ended::Exit(139),
        Ended::Signal(libc::SIGSEGV),
        Ended::Signal(libc::SIGBUS),
        Ended::Signal(libc::SIGFPE),
    ];
    for round in 0..2000u64 {
        let rank = chance.below(16) as u32;
        let cause = causes[chance.below(causes.len() as u64) as usize];
        let mut records = vec![ended(rank, cause, 1000)];
        let mut all: Vec<u32> = (0..16).filter(|other| *other != rank).collect();
        chance.shuffle(&mut all);
        for other in &all[..chance.below(16) as usize] {
            let ms = 1000 + chance.below(5000);
            records.push(match chance.below(6) {
                0 => signalled(*other, libc::SIGTERM, ms),
                1 => exit(*other, 143, ms),
                // Slurm's own, KillWait later.
                2 => signalled(*other, libc::SIGKILL, 2000 + chance.below(30_000)),
                3 => exit(*other, 137, 2000 + chance.below(30_000)),
                4 => signalled(*other, libc::SIGABRT, 1200 + chance.below(600_000)),
                // Programs that deal with SIGTERM, or with the connection that is gone.
                _ => exit(*other, 1, 1200 + chance.below(5000)),
            });
            chance.shuffle(&mut records);
            assert_eq!(who(&records, &step()), [rank], "round {round}: {records:#?}");
        }
        let text = words(&records, &step());
        chance.shuffle(&mut records);
        assert_eq!(words(&records, &step()), text, "round {round}");
    }
}

/// Within 5 ms the true one is in the set; 200 ms before it is named, also where clocks
/// differ and the pre-flight measured by how much.
#[test]
fn the_true_first_is_named_or_in_the_set() {
    let mut chance = Chance(2_463_534_242);
    for round in 0..2000u64 {
        let true_first = chance.below(16) as u32;
        let close = round % 2 == 0;
        let skews: Vec<i64> =
            (0..4).map(|node| if node == 0 { 0 } else { chance.below(4_000_000_000) as i64 }).collect();
        let mut records: Vec<ExitRecord> = (0..16)
            .map(|rank| {
                let later = if rank == true_first {
                    0
                } else if close {
                    5
                } else {
                    200 + chance.below(50)
                };
                let kind = [Ended::Exit(1), Ended::Signal(libc::SIGSEGV)][chance.below(2) as usize];
                let mut record = ended(rank, kind, 1000 + later);
                // slurmstepd looks every 100 ms.
                if close {
                    record.time_ns += chance.below(100) * MS_;
                }
                let skew = skews[(rank / 4) as usize];
                record.time_ns = record.time_ns.checked_add_signed(skew).unwrap();
                // Measured to 10 ms, and that much wrong.
                let wrong = if rank < 4 { 0 } else { chance.below(20) as i64 * 1_000_000 - 10_000_000 };
                record.clock = Some((skew + wrong, if rank < 4 { 0 } else { 10 * MS_ }));
                record
            })
            .collect();
        // One node has one clock.
        for node in 1..4 {
            let clock = records[node * 4].clock;
            records[node * 4..node * 4 + 4].iter_mut().for_each(|record| record.clock = clock);
        }
        chance.shuffle(&mut records);
        let named = who(&records, &step());
        if close {
            assert!(named.contains(&true_first), "round {round}: {true_first} is not among {named:?}: {records:#?}");
        } else {
            assert_eq!(named, [true_first], "round {round}: {records:#?}");
        }
    }
}

#[test]
fn clocks_that_nobody_compared_leave_a_second_open() {
    let unknown = |mut record: ExitRecord| {
        record.clock = None;
        record
    };
    let near = [unknown(exit(5, 1, 0)), unknown(exit(9, 1, 900))];
    assert_eq!(who(&near, &step()), [5, 9]);
    assert!(words(&near, &step()).contains("clocks were not compared"), "{}", words(&near, &step()));
    let far = [unknown(exit(5, 1, 0)), unknown(exit(9, 1, 1100))];
    assert_eq!(who(&far, &step()), [5]);
    // On one node there is one clock.
    let one = [unknown(exit(5, 1, 0)), unknown(exit(6, 1, 200))];
    assert_eq!(who(&one, &step()), [5]);
}

#[test]
fn all_at_once_is_a_set_and_said_in_one_line() {
    let records = others(&[], |rank| exit(rank, 1, 1000 + u64::from(rank)));
    let text = words(&records, &step());
    let line = text.lines().next().unwrap();
    assert!(line.starts_with("16 ranks failed in the same moment, within 0.01 s at 1000 ms, exit code 1:"), "{line}");
    assert!(line.contains("no first one can be told"), "{line}");
    let some: Vec<ExitRecord> = (3..13).map(|rank| exit(rank, 1, 1000)).collect();
    let text = words(&some, &step());
    assert!(text.starts_with("10 of 16 ranks failed in the same moment (3-12), within 0.00 s"), "{text}");
    let two = [exit(5, 1, 0), signalled(9, libc::SIGSEGV, 40)];
    let text = words(&two, &step());
    for part in [
        "which of 2 ranks failed first cannot be told",
        "rank 5 (n2, local rank 1, GPU 1): exit code 1; rank 9",
        "SIGSEGV",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The kernel kills one process; what ends in the same moment lost its partner.
#[test]
fn a_rank_killed_for_want_of_memory_is_named_among_ends_in_the_same_moment() {
    let oom = |rank: u32, ms: u64| ExitRecord { oom: Oom::Killed, ..signalled(rank, libc::SIGKILL, ms) };
    let mut records = others(&[5], |rank| exit(rank, 1, 1010));
    records.push(oom(5, 1050));
    // The count is that of the step on its node.
    for record in records.iter_mut().filter(|record| record.node == "n2") {
        record.oom = Oom::Killed;
    }
    assert_eq!(who(&records, &step()), [5]);
    let text = words(&records, &step());
    assert!(text.starts_with("rank 5 (n2, local rank 1, GPU 1) failed first: out of memory (SIGKILL)"), "{text}");
    assert!(text.contains("15 others ended: 15 with exit code 1"), "{text}");
    assert!(text.contains("n2 killed a process of rank 5 for want of memory: ask for more (--mem"), "{text}");
    // Ended by srun -K, on the node where the kernel had killed one.
    let mut records = others(&[5], |rank| signalled(rank, libc::SIGTERM, 1060));
    records.push(oom(5, 1000));
    records.iter_mut().for_each(|record| record.oom = Oom::Killed);
    assert_eq!(who(&records, &step()), [5]);
    // Another rank failed long before: it is the first all the same.
    assert_eq!(who(&[exit(9, 1, 0), oom(5, 1000)], &step()), [9]);
    // A DataLoader worker was killed, and the rank says so and exits.
    let worker = ExitRecord { oom: Oom::Killed, ..exit(5, 1, 0) };
    assert!(words(&[worker], &step()).contains("failed first: out of memory (exit code 1)"));
}

/// <https://docs.pytorch.org/docs/stable/distributed.html>: ProcessGroupNCCL's watchdog
/// ends the process where a collective takes too long, on every rank but the one that
/// did not come.
#[test]
fn a_watchdog_s_aborts_are_not_the_first_failure_where_another_rank_fails_by_itself() {
    let mut records = others(&[7], |rank| signalled(rank, libc::SIGABRT, 1000 + u64::from(rank) * 20));
    records.push(exit(7, 1, 9000));
    assert_eq!(who(&records, &step()), [7]);
    // Nothing else: the first to abort.
    let mut records = others(&[7], |rank| exit(rank, 134, 3000 + u64::from(rank)));
    records.push(signalled(7, libc::SIGABRT, 1000));
    assert_eq!(who(&records, &step()), [7]);
    assert!(words(&records, &step()).contains("an assertion or an uncaught exception"));
    // One alone, and all others lose their connection: theirs are the consequence.
    let mut records = others(&[7], |rank| exit(rank, 1, 3000 + u64::from(rank)));
    records.push(signalled(7, libc::SIGABRT, 1000));
    assert_eq!(who(&records, &step()), [7]);
}

#[test]
fn one_rank_that_somebody_kills_is_named_and_so_is_where_to_look() {
    for kind in [Ended::Signal(libc::SIGKILL), Ended::Exit(137)] {
        for (code, ms) in [(1, 3000), (1, 1020), (143, 3000), (143, 1080)] {
            let mut records = others(&[5], |rank| exit(rank, code, ms + u64::from(rank)));
            records.push(ExitRecord { oom: Oom::Unknown, ..ended(5, kind, 1000) });
            if code == 143 {
                records.iter_mut().for_each(|record| record.clock = None);
            }
            assert_eq!(who(&records, &step()), [5], "{kind:?} {code} {ms}");
            let text = words(&records, &step());
            assert!(text.starts_with("rank 5 (n2, local rank 1, GPU 1) was ended first, by somebody else:"), "{text}");
            assert!(text.contains("the memory of n2") && text.contains("dmesg"), "{text}");
        }
    }
    let mut records = others(&[5], |rank| exit(rank, 1, 3000));
    records.push(signalled(5, libc::SIGTERM, 1000));
    assert_eq!(who(&records, &step()), [5]);
    // One of two.
    let two = StepEnd { ranks: 2, nodes: 1, ..step() };
    assert_eq!(who(&[signalled(1, libc::SIGKILL, 0), signalled(0, libc::SIGTERM, 400)], &two), [1]);
    assert_eq!(who(&[signalled(0, libc::SIGKILL, 0)], &StepEnd { ranks: 1, nodes: 1, ..step() }), [0]);
    // All of one node, and srun -K ended the others.
    let mut records = others(&[4, 5, 6, 7], |rank| signalled(rank, libc::SIGTERM, 3000));
    records.extend((4..8).map(|rank| signalled(rank, libc::SIGKILL, 1000)));
    assert_eq!(who(&records, &step()), [4, 5, 6, 7]);
}

/// Measured with Slurm 22.05.8: SIGTERM to all, SIGKILL after KillWait to those left.
#[test]
fn nobody_is_blamed_where_the_job_was_ended() {
    let endings = [
        (Ending::TimeLimit, "the job's time limit"),
        (Ending::Cancelled, "the job's cancellation"),
        (Ending::Preempted, "the job's preemption"),
        (Ending::Deadline, "the job's deadline"),
        (Ending::Requeued, "the job's return to the queue"),
        (Ending::NodeFailure, "a node of the job failed"),
    ];
    let mut chance = Chance(123_456_789);
    for (ending, said) in endings {
        for round in 0..200 {
            let end = 100_000;
            // Some are gone already, some deal with SIGTERM and end as they like, one is
            // stubborn.
            let mut records: Vec<ExitRecord> = (0..16)
                .filter(|rank| *rank == 0 || round % 4 != 0 || rank % 3 != 0)
                .map(|rank| match chance.below(6) {
                    0 => signalled(rank, libc::SIGKILL, end + 30_000 + chance.below(500)),
                    1 => exit(rank, 1, end + chance.below(20_000)),
                    2 => exit(rank, 143, end + chance.below(20_000)),
                    3 => signalled(rank, libc::SIGABRT, end + chance.below(20_000)),
                    _ => signalled(rank, libc::SIGTERM, end + chance.below(300)),
                })
                .collect();
            chance.shuffle(&mut records);
            let step = job_ended(ending, end, 30);
            assert_eq!(who(&records, &step), [0u32; 0], "{ending:?} {round}: {records:#?}");
            let text = words(&records, &step);
            assert!(text.starts_with("no rank failed by itself: ") && text.contains(said), "{text}");
            assert!(text.contains(" of 16 ended: "), "{text}");
        }
    }
}

#[test]
fn a_rank_that_failed_long_before_the_job_was_ended_is_named() {
    let mut records = others(&[5], |rank| signalled(rank, libc::SIGTERM, 100_000));
    records.push(exit(5, 1, 1000));
    let step = job_ended(Ending::TimeLimit, 100_000, 30);
    assert_eq!(who(&records, &step), [5]);
    let text = words(&records, &step);
    assert!(text.contains("failed first: exit code 1 at 1000 ms; 99 s later 15 others ended: 15 by SIGTERM; then came the job's time limit"), "{text}");
    // Not where that may have been its consequence: KillWait, and the controller's clock.
    let mut records = others(&[5], |rank| signalled(rank, libc::SIGTERM, 100_000));
    records.push(exit(5, 1, 70_000));
    assert_eq!(who(&records, &step), [0u32; 0]);
    // A node is missed after SlurmdTimeout only: its partners end before.
    let mut records = others(&[4, 5, 6, 7], |rank| signalled(rank, libc::SIGKILL, 300_000));
    records[0] = exit(0, 1, 61_000);
    let lost = StepEnd { lost: vec!["n2".into()], ..job_ended(Ending::NodeFailure, 300_000, 300) };
    assert_eq!(who(&records, &lost), [0u32; 0]);
    assert!(words(&records, &lost).contains("no rank failed by itself: n2 does not answer any more"));
}

#[test]
fn a_signal_to_all_is_nobody_s_failure() {
    // scancel JOB.STEP: the job runs on.
    let all = others(&[], |rank| signalled(rank, libc::SIGTERM, 1000 + u64::from(rank)));
    assert_eq!(who(&all, &step()), [0u32; 0]);
    assert!(words(&all, &step()).contains("a signal to all of them"), "{}", words(&all, &step()));
    // As scancel ends a step (measured with 22.05.8), which tells no clock.
    let mut all = others(&[], |rank| signalled(rank, libc::SIGKILL, 1000 + u64::from(rank)));
    assert_eq!(who(&all, &step()), [0u32; 0]);
    all.iter_mut().for_each(|record| record.clock = None);
    assert_eq!(who(&all, &step()), [0u32; 0]);
    // Some of them deal with it and end seconds later.
    let mut some = others(&[1, 2], |rank| exit(rank, 143, 1000));
    some.extend([exit(1, 1, 4000), exit(2, 1, 4000)]);
    assert_eq!(who(&some, &step()), [0u32; 0]);
    // Ctrl-C.
    let all = others(&[], |rank| exit(rank, 130, 1000));
    assert_eq!(who(&all, &step()), [0u32; 0]);
    // srun --wait: most have ended well.
    let two: Vec<ExitRecord> = (3..5).map(|rank| signalled(rank, libc::SIGKILL, 60_000)).collect();
    let waited = StepEnd { wait: Some(60), ..step() };
    assert_eq!(who(&two, &waited), [0u32; 0]);
    assert!(words(&two, &waited).contains("srun's --wait=60"), "{}", words(&two, &waited));
    // And where one had failed, it stays the first.
    let mut one = two.clone();
    one.push(exit(9, 1, 0));
    assert_eq!(who(&one, &waited), [9]);
}

#[test]
fn a_refusal_comes_before_everything_else_and_keeps_its_line() {
    let mut refused = ended(5, Ended::Refused, 2000);
    refused.line = Some("palingenesis: error: no GPU at all".into());
    let mut records = others(&[5, 6], |rank| exit(rank, 1, 1000));
    records.extend([refused, ended(6, Ended::Refused, 1900)]);
    assert_eq!(who(&records, &step()), [5]);
    let text = words(&records, &step());
    assert!(text.starts_with("rank 5 (n2, local rank 1, GPU 1) was refused first; "), "{text}");
    assert!(text.contains("15 others ended: 14 with exit code 1, 1 not started"), "{text}");
    assert!(text.ends_with("why: no GPU at all"), "{text}");
}

#[test]
fn launchers_are_called_so() {
    let step = StepEnd { agents: true, ranks: 4, ..step() };
    let mut one = exit(2, 1, 0);
    (one.node, one.local_rank, one.gpu) = ("n3".into(), 0, None);
    assert!(words(&[one], &step).starts_with("task 2 (the launcher on n3) failed first: exit code 1 at 000 ms"));
}

/// What nodes send is theirs; the terminal is the user's.
#[test]
fn names_and_lines_are_made_harmless() {
    let mut one = ended(5, Ended::Refused, 0);
    one.node = format!("n\u{1b}[2J\n{}", "x".repeat(5000));
    one.gpu = Some("\u{9b}\r".into());
    one.line = Some(format!("\u{1b}]0;{}", "y".repeat(5000)));
    // Beside a failure of another rank's own: of refusals alone nothing is said.
    assert_eq!(words(&[one.clone()], &step()), "");
    let text = words(&[one, exit(1, 1, 0)], &step());
    assert!(text.lines().all(|line| !line.chars().any(char::is_control) && line.chars().count() < 2000), "{text}");
    assert_eq!(text.lines().count(), 2);
    // Nor do numbers that cannot be.
    let mut odd = exit(u32::MAX, i32::MIN, 0);
    (odd.time_ns, odd.clock) = (u64::MAX, Some((i64::MIN, u64::MAX)));
    let records = [odd.clone(), exit(1, 1, 0), ExitRecord { clock: Some((i64::MAX, u64::MAX)), ..odd }];
    let _ = report(&judge(&records, &step()), &step(), &|_| String::new());
}

/// 16,000 ranks that end at once.
#[test]
fn many_ranks_take_no_time() {
    let records: Vec<ExitRecord> = (0..16_000).map(|rank| exit(rank, 1, u64::from(rank) % 400)).collect();
    let start = std::time::Instant::now();
    let step = StepEnd { ranks: 16_000, nodes: 4000, ..step() };
    assert!(!who(&records, &step).is_empty());
    assert!(start.elapsed() < std::time::Duration::from_secs(20));
}

/// The states that scontrol shows while srun ends; measured with Slurm 22.05.8 for
/// cancellation and time limit.
#[test]
fn the_job_s_state_tells_who_ended_it() {
    let around = Circumstances { in_allocation: true, kill_wait: 30, node_timeout: 300, now_ns: NOON };
    let own = Circumstances { in_allocation: false, ..around };
    let job = |state: &str, reason: &str| Job {
        state: state.into(),
        reason: reason.into(),
        end: Some(NOON / S),
        ..Job::default()
    };
    let told = |job: Job, around| step().told(&[job], Vec::new(), around);
    for (state, reason, ending) in [
        ("CANCELLED", "None", Some(Ending::Cancelled)),
        ("COMPLETING", "None", Some(Ending::Cancelled)),
        ("COMPLETING", "TimeLimit", Some(Ending::TimeLimit)),
        ("TIMEOUT", "TimeLimit", Some(Ending::TimeLimit)),
        ("PREEMPTED", "None", Some(Ending::Preempted)),
        ("NODE_FAIL", "None", Some(Ending::NodeFailure)),
        ("DEADLINE", "DeadLine", Some(Ending::Deadline)),
        ("PENDING", "BeginTime", Some(Ending::Requeued)),
        ("RUNNING", "None", None),
        ("FAILED", "NonZeroExitCode", None),
        ("COMPLETED", "None", None),
        ("", "", None),
    ] {
        assert_eq!(told(job(state, reason), around).ended, ending, "{state} {reason}");
    }
    // srun's own allocation, which it has given back.
    for (reason, ending) in [("NonZeroExitCode", None), ("JobLaunchFailure", None), ("None", Some(Ending::Cancelled))] {
        assert_eq!(told(job("COMPLETING", reason), own).ended, ending, "{reason}");
    }
    // In the grace before it is ended.
    let warned = Job { preempted: Some(NOON / S - 60), ..job("RUNNING", "None") };
    let end = told(warned, around);
    assert_eq!((end.ended, end.ended_ns, end.before), (Some(Ending::Preempted), Some(NOON - 60 * S), 30));
    // A node that the controller has not missed yet.
    let end = step().told(&[job("RUNNING", "None")], vec!["n2".into()], around);
    assert_eq!((end.ended, end.ended_ns, end.before), (Some(Ending::NodeFailure), Some(NOON), 630));
    assert_eq!(step().told(&[], Vec::new(), around).ended, None);
    let component = Job { het: Some(43), ..job("RUNNING", "None") };
    assert_eq!(told(component, around).job, 43);
}
