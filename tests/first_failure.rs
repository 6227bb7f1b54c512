//! Which rank failed first, as srun says it at its end on a real Slurm: the right one, or
//! an honest set, or nobody. And nothing where nothing failed.
//!
//! The nodes share one clock: that other clocks are corrected is tested in
//! `plan/failure/tests.rs`.

mod common;

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use common::{Said, Sandbox, library, program, rounds};

/// 16 ranks on 4 nodes.
const STEP: &str = "-N4 -n16 --ntasks-per-node=4";

/// The test whose ranks end 200 ms apart has the machine to itself: with four clusters on
/// two CPUs the system sees an end so much later.
static MACHINE: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held until the test's thread ends")]
enum Turn {
    Alone(RwLockWriteGuard<'static, ()>),
    Beside(RwLockReadGuard<'static, ()>),
}

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

fn up(name: &str, conf: &[&str]) -> Option<Sandbox> {
    let turn = match name {
        "first" => Turn::Alone(MACHINE.write().unwrap_or_else(PoisonError::into_inner)),
        _ => Turn::Beside(MACHINE.read().unwrap_or_else(PoisonError::into_inner)),
    };
    TURN.set(Some(turn));
    let options = ["--nodes", "4", "--cores", "4", "--namespace-per-node"];
    let sandbox = Sandbox::up(&format!("failure-{name}"), &[&options[..], conf].concat())?;
    sandbox.plugstack(&[&format!("optional {}", library().display())]);
    Some(sandbox)
}

/// What srun says of the end.
fn verdict(said: &Said) -> Vec<&str> {
    said.ours().into_iter().filter(|line| !line.contains("warning: ") && !line.contains("note: ")).collect()
}

/// A step whose ranks run `script`; RANK is set.
fn run(sandbox: &Sandbox, options: &str, script: &str) -> Said {
    sandbox.run(&format!("srun --palingenesis {STEP} {options} bash -c '{script}'"))
}

/// The ranks that the first line names: "rank 5 (n2, …) failed first" or a list.
fn named(said: &Said) -> Vec<u32> {
    let lines = verdict(said);
    let line = lines.first().unwrap_or_else(|| panic!("no verdict: {said:#?}"));
    let head = line.split(" later ").next().unwrap();
    if head.starts_with("palingenesis: no rank failed") {
        return Vec::new();
    }
    if head.starts_with("palingenesis: 16 ranks failed in the same moment") {
        return (0..16).collect();
    }
    if let Some((_, list)) = head.split_once("in the same moment (") {
        let ranges = list.split(')').next().unwrap().split(',');
        let number = |text: &str| text.parse::<u32>().unwrap();
        return ranges
            .flat_map(|range| match range.split_once('-') {
                Some((first, last)) => number(first)..=number(last),
                None => number(range)..=number(range),
            })
            .collect();
    }
    let ranks = head.split("rank ").skip(1).filter_map(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        rest[digits.len()..].starts_with(" (n").then(|| digits.parse().unwrap())
    });
    ranks.collect()
}

#[track_caller]
fn nobody(said: &Said, why: &str) {
    let lines = verdict(said);
    assert_eq!(lines.len(), 1, "{said:#?}");
    assert!(lines[0].starts_with("palingenesis: no rank failed by itself: ") && lines[0].contains(why), "{said:#?}");
}

#[test]
fn the_rank_that_fails_200_ms_before_the_others_is_named() {
    let Some(sandbox) = up("first", &[]) else { return };
    for round in 0..rounds().max(3) {
        let first = (round * 7 + 5) % 16;
        // All at once 200 ms later, each by itself, whatever their start took.
        let (how, said_so) = [("exit 1", "exit code 1"), ("kill -SEGV $$", "SIGSEGV")][round % 2];
        let script = format!(
            "until=$(cat ~/until); \
             at() {{ sleep $(echo \"$until + $1 - $(date +%s.%N)\" | bc); }}; \
             if [ $RANK = {first} ]; then at 0; {how}; fi; at 0.2; exit 1"
        );
        let said = sandbox.run(&format!(
            "echo \"$(date +%s.%N) + 2.5\" | bc >~/until; srun --palingenesis {STEP} bash -c '{script}'"
        ));
        assert_eq!(named(&said), [first as u32], "round {round}: {said:#?}");
        let line = verdict(&said)[0];
        let node = first / 4 + 1;
        assert!(line.contains(&format!("(n{node}, local rank {}", first % 4)), "{line}");
        assert!(line.contains(&format!(" failed first: {said_so} at ")), "{line}");
        assert!(line.contains(" 15 others ended: 15 with exit code 1"), "{line}");
        assert_ne!(said.code, 0);
    }
}

#[test]
fn the_rank_that_fails_within_5_ms_is_in_the_set() {
    let Some(sandbox) = up("set", &[]) else { return };
    for round in 0..rounds().max(3) {
        let first = (round * 5 + 3) % 16;
        let script = format!(
            "until=$(cat ~/until); \
             at() {{ sleep $(echo \"$until + $1 - $(date +%s.%N)\" | bc); }}; \
             if [ $RANK = {first} ]; then at 0; exit 1; fi; at 0.005; exit 1"
        );
        let said = sandbox.run(&format!(
            "echo \"$(date +%s.%N) + 2.5\" | bc >~/until; srun --palingenesis {STEP} bash -c '{script}'"
        ));
        assert!(named(&said).contains(&(first as u32)), "round {round}: rank {first}: {said:#?}");
    }
}

/// srun(1): -K ends the step when a rank fails, --wait after the first rank's end.
#[test]
fn the_ranks_that_srun_ends_are_not_blamed() {
    let Some(sandbox) = up("kills", &[]) else { return };
    let one = "if [ $RANK = 6 ]; then sleep 1; exit 3; fi; sleep 50";
    let said = run(&sandbox, "-K", one);
    assert_eq!(named(&said), [6], "{said:#?}");
    assert!(verdict(&said)[0].contains("15 others ended: 15 by SIGTERM"), "{said:#?}");
    let said = run(&sandbox, "--wait=1", one);
    assert_eq!(named(&said), [6], "{said:#?}");
    // Programs that deal with SIGTERM end with a code of their own.
    let said = run(&sandbox, "-K", "trap \"exit 1\" TERM; if [ $RANK = 6 ]; then sleep 1; exit 3; fi; sleep 50 & wait");
    assert!(named(&said).contains(&6), "{said:#?}");
    // Nobody has failed: the first ranks have ended well.
    let said = run(&sandbox, "--wait=1", "[ $RANK -lt 14 ] && exit 0; sleep 50");
    nobody(&said, "srun's --wait=1");
    // One that somebody kills.
    let said = run(&sandbox, "-K", "if [ $RANK = 6 ]; then sleep 1; kill -KILL $$; fi; sleep 50");
    assert_eq!(named(&said), [6], "{said:#?}");
    assert!(verdict(&said)[0].contains("was ended first, by somebody else: SIGKILL"), "{said:#?}");
}

#[test]
fn nothing_is_said_where_nothing_failed_and_the_exit_code_is_slurm_s_own() {
    let Some(sandbox) = up("well", &[]) else { return };
    let said = run(&sandbox, "-K", "true").ok();
    assert_eq!((said.err.as_str(), said.of_no_kill), ("", 0), "{said:#?}");
    for code in [1, 3, 255] {
        let script = format!("[ $RANK = 2 ] && exit {code}; sleep 1");
        let with = run(&sandbox, "", &script);
        let without = sandbox.run(&format!("srun {STEP} bash -c '[ $SLURM_PROCID = 2 ] && exit {code}; sleep 1'"));
        assert_eq!((with.code, without.code), (code, code), "{with:#?}");
        assert_eq!(named(&with), [2], "{with:#?}");
        assert!(without.ours().is_empty(), "{without:#?}");
    }
}

/// slurm.conf(5): KillOnBadExit is 0 unless the site says otherwise.
#[test]
fn a_step_that_goes_on_when_one_rank_fails_is_told_so_at_its_start() {
    let Some(sandbox) = up("note", &[]) else { return };
    let told = |line: &str| sandbox.run(line).ok().of_no_kill;
    assert_eq!(told(&format!("srun --palingenesis {STEP} true")), 1);
    for line in [
        format!("srun --palingenesis {STEP} -K true"),
        format!("srun --palingenesis {STEP} --kill-on-bad-exit=1 true"),
        format!("SLURM_KILL_BAD_EXIT=1 srun --palingenesis {STEP} true"),
        format!("srun --palingenesis {STEP} --wait=20 true"),
        format!("srun --palingenesis=kill-on-bad-exit=off {STEP} true"),
        format!("srun --palingenesis {STEP} hostname"),
        "srun --palingenesis -n1 true".into(),
        format!("srun {STEP} true"),
    ] {
        assert_eq!(told(&line), 0, "{line}");
    }
    // The command's own words are its own.
    assert_eq!(told(&format!("srun --palingenesis {STEP} bash -c true -K")), 1);
    let said = sandbox.run(&format!("srun --palingenesis --no-kill -K {STEP} true")).ok();
    assert!(said.err.contains("--no-kill: if a node or a rank fails"), "{said:#?}");
    drop(sandbox);
    let Some(sandbox) = up("note-site", &["--conf", "KillOnBadExit=1"]) else { return };
    let said = sandbox.run(&format!("srun --palingenesis {STEP} true")).ok();
    assert_eq!(said.of_no_kill, 0, "{said:#?}");
    let said = sandbox.run(&format!("srun --palingenesis -K0 {STEP} true")).ok();
    assert_eq!(said.of_no_kill, 1, "{said:#?}");
}

/// scancel of the job and of the step, and Ctrl-C (srun(1): a second one within a second
/// ends the step; the first only tells of it): with programs that die of it and programs
/// that deal with it and exit as they like, in an allocation of srun's own and in a batch
/// job.
#[test]
fn nobody_is_blamed_where_somebody_ends_the_job() {
    let Some(sandbox) = up("cancel", &[]) else { return };
    let dies = "touch ~/up.$RANK; sleep 50";
    // Leaves nothing behind that the next job would have to wait for.
    let deals = "sleep 50 & own=$!; trap \"kill $own; exit 1\" TERM INT; touch ~/up.$RANK; wait";
    let interrupt = "srun=$!; for i in {1..4}; do kill -INT $srun; sleep 0.3; done 2>/dev/null";
    let cancelled = |launch: &str, script: &str, what: &str| {
        sandbox.run(&format!(
            "rm -f ~/up.* ~/out; {launch} --palingenesis {STEP} bash -c '{script}' & \
             for i in {{1..200}}; do [ $(ls ~/up.* 2>/dev/null | wc -l) = 16 ] && break; sleep 0.1; done; sleep 0.3; {what}; wait"
        ))
    };
    for _ in 0..rounds().max(1) {
        for script in [dies, deals] {
            nobody(&cancelled("srun", script, "scancel $(squeue -h -o %A)"), "the job's cancellation");
            let said = cancelled("srun", script, interrupt);
            assert!(said.err.contains("srun: forcing job termination"), "{said:#?}");
            nobody(&said, "the job's cancellation");
        }
        // The first one ends nothing, and there is nothing to judge.
        let said = cancelled("srun", "touch ~/up.$RANK; sleep 5", "kill -INT $!");
        assert!(said.err.contains("tasks 0-15: running"), "{said:#?}");
        assert_eq!(verdict(&said), [] as [&str; 0], "{said:#?}");
        // As scancel does with a step: by SIGKILL.
        nobody(&cancelled("srun", dies, "scancel $(squeue -h -s -o %i | grep 0$)"), "a signal to all of them");
        let batch = format!(
            "rm -f ~/up.* ~/out; echo '#!/bin/bash\nsrun --palingenesis {STEP} bash -c \"{}\"' >~/job; \
             id=$(sbatch --parsable {STEP} -o ~/out ~/job); \
             for i in {{1..200}}; do [ $(ls ~/up.* 2>/dev/null | wc -l) = 16 ] && break; sleep 0.1; done; \
             scancel $id; for i in {{1..100}}; do squeue -h -j $id | grep -q . || break; sleep 0.1; done; cat ~/out >&2",
            deals.replace('"', "\\\"").replace('$', "\\$")
        );
        // SIGTERM goes to the script as well: srun may be gone before it can say anything.
        let said = sandbox.run(&batch);
        for line in verdict(&said) {
            assert!(line.contains("no rank failed by itself"), "{said:#?}");
        }
    }
}

/// slurm.conf(5): the job is ended at its limit by SIGTERM, and by SIGKILL KillWait later.
#[test]
fn nobody_is_blamed_at_the_time_limit() {
    let Some(sandbox) = up("limit", &[]) else { return };
    for _ in 0..rounds().clamp(1, 3) {
        // As root: the limit cannot be less than a minute, the end can be moved.
        let said = sandbox.run_as(
            &[],
            &format!(
                "rm -f ~/up.*; srun -t1 --palingenesis {STEP} bash -c 'trap \"exit 1\" TERM; touch ~/up.$RANK; sleep 200 & wait'"
            ),
            150,
        );
        nobody(&said, "the job's time limit");
        assert!(said.err.contains("DUE TO TIME LIMIT"), "{said:#?}");
    }
}

/// slurm.conf(5), PreemptMode=CANCEL: a job of a partition that goes first ends this one.
#[test]
fn nobody_is_blamed_where_another_job_goes_first() {
    let conf = [
        "--conf",
        "PreemptType=preempt/partition_prio",
        "--conf",
        "PreemptMode=CANCEL",
        "--conf",
        "PartitionName=first Nodes=ALL PriorityTier=10",
    ];
    let Some(sandbox) = up("preempted", &conf) else { return };
    let said = sandbox.run(&format!(
        "rm -f ~/up.*; srun -K --exclusive --palingenesis {STEP} bash -c 'trap \"exit 1\" TERM; touch ~/up.$RANK; sleep 50 & wait' & \
         for i in {{1..200}}; do [ $(ls ~/up.* 2>/dev/null | wc -l) = 16 ] && break; sleep 0.1; done; sleep 0.3; \
         srun -Q -p first -N4 --exclusive true; wait"
    ));
    nobody(&said, "the job's preemption");
    assert!(said.err.contains("DUE TO PREEMPTION"), "{said:#?}");
}

/// Everything of the node's is gone at once, and the controller finds out later.
#[test]
fn nobody_is_blamed_where_a_node_fails() {
    let Some(sandbox) = up("node", &["--conf", "SlurmdTimeout=10"]) else { return };
    for _ in 0..rounds().clamp(1, 3) {
        let ranks =
            "touch ~/up.$RANK; while [ ! -e ~/gone ]; do sleep 0.1; done; sleep 1; [ $RANK = 0 ] && exit 1; sleep 100";
        let user = format!("rm -f ~/up.* ~/gone; srun -K --palingenesis {STEP} bash -c '{ranks}'");
        let said = std::thread::scope(|scope| {
            let job = scope.spawn(|| sandbox.run_as(&[], &user, 90));
            // The node's processes are those of its own mount namespace, as after a reset.
            sandbox
                .run_as(
                    &["--as-root", "--node", "n3"],
                    "home=$(getent passwd trainer | cut -d: -f6)
                     for i in {1..200}; do [ $(ls $home/up.* 2>/dev/null | wc -l) = 16 ] && break; sleep 0.1; done
                     own=$(readlink /proc/self/ns/mnt)
                     for p in /proc/[0-9]*; do
                         case $(cat $p/comm 2>/dev/null) in slurmd|slurmstepd*|bash|sleep) ;; *) continue;; esac
                         [ \"$(readlink $p/ns/mnt)\" = $own ] && [ ${p#/proc/} != $$ ] && [ ${p#/proc/} != $PPID ] || continue
                         tr '\\0' ' ' <$p/cmdline | grep -q '^sleep infinity' && continue
                         kill -KILL ${p#/proc/}
                     done
                     touch $home/gone",
                    60,
                );
            job.join().unwrap()
        });
        nobody(&said, "n3");
        sandbox.resume();
    }
}

#[test]
fn a_het_step_s_ranks_are_counted_as_one() {
    let Some(sandbox) = up("het", &common::FOR_HET_STEPS) else { return };
    let part = "-N2 -n4 --ntasks-per-node=2";
    let script = "if [ $RANK = 6 ]; then sleep 1; exit 3; fi; sleep 50";
    let said = sandbox.run(&format!(
        "salloc -Q {part} : {part} bash -c 'srun -K --palingenesis=rundir=$HOME/runs --het-group=0,1 bash -c \"{}\"'; \
         ls $HOME/runs",
        script.replace('$', "\\$")
    ));
    // The first component's number, whichever component's thread came first.
    assert_eq!(said.out, "1.0.json\n", "{said:#?}");
    assert!(verdict(&said)[0].contains("7 others ended"), "{said:#?}");
    assert_eq!(named(&said), [6], "{said:#?}");
}

#[test]
fn what_was_said_is_kept_and_said_again() {
    let Some(sandbox) = up("kept", &[]) else { return };
    let palingenesis = program("palingenesis");
    let script = "if [ $RANK = 6 ]; then sleep 1; exit 3; fi; sleep 50";
    let said = sandbox.run(&format!(
        "export PALINGENESIS_OPT_RUNDIR=$HOME/a/b; salloc -Q {STEP} bash -c '
             echo $SLURM_JOB_ID >~/job
             srun -K --palingenesis {STEP} bash -c \"{0}\"; srun -K --palingenesis {STEP} true; srun -K --palingenesis {STEP} bash -c \"{0}\"'",
        script.replace('$', "\\$")
    ));
    let report = |arguments: &str| {
        sandbox.run(&format!("PALINGENESIS_OPT_RUNDIR=$HOME/a/b {} report {arguments}", palingenesis.display()))
    };
    let first: Vec<String> = verdict(&said).iter().map(|line| line.replace("palingenesis: ", "  ")).collect();
    assert_eq!(first.len(), 4, "{said:#?}");
    let both = report("$(cat ~/job)").ok();
    let lines: Vec<&str> = both.out.lines().collect();
    let job = sandbox.run("cat ~/job").ok().out.trim().to_string();
    assert!(lines[0].starts_with(&format!("step {job}.0, ended 20")), "{both:#?}");
    assert_eq!(&lines[1..3], &first[..2], "{both:#?}");
    assert!(lines[4].starts_with(&format!("step {job}.2, ended 20")), "{both:#?}");
    let one = report(&format!("{job}.2 --json")).ok();
    for part in ["\"verdict\":\"first\"", "\"ranks\":[6]", "\"records\":[{\"clock\":"] {
        assert!(one.out.contains(part), "{part}: {one:#?}");
    }
    let mode = sandbox.run(&format!("stat -c '%a %U' ~/a/b ~/a/b/{job}.0.json; ls -A ~/a/b | wc -l")).ok();
    assert_eq!(mode.out, "700 trainer\n600 trainer\n2\n");
    // Nothing is kept of a step that ended well, nor of another job.
    for (step, what) in [(format!("{job}.1"), "step"), ("4711".into(), "job")] {
        let none = report(&step);
        assert_eq!(none.code, 1, "{none:#?}");
        assert!(
            none.err.contains(&format!("nothing is kept of {what} {step} in ")) && none.err.contains("--rundir DIR")
        );
    }
    assert_eq!(report("44_1").code, 2);
    // Where it cannot be kept the step's end is told all the same.
    let script = "if [ $RANK = 6 ]; then exit 3; fi; sleep 1";
    let said = sandbox.run(&format!("srun --palingenesis=rundir=/proc/none {STEP} bash -c '{script}'"));
    assert_eq!((named(&said), said.code), (vec![6], 3), "{said:#?}");
    let warned = said.ours().into_iter().filter(|line| line.contains("is not kept: /proc/none: ")).count();
    assert_eq!(warned, 1, "{said:#?}");
    // Whoever owns the directory may replace what is kept there, which is said.
    let others = sandbox.dir().join("others");
    sandbox.run_root(&format!("mkdir -m 777 {0} && chown 12345 {0}", others.display())).ok();
    let said = sandbox.run(&format!("srun --palingenesis=rundir={} {STEP} bash -c '{script}'", others.display()));
    assert_eq!((named(&said), said.code), (vec![6], 3), "{said:#?}");
    let line = format!("was written, but {} belongs to user 12345, who may replace it", others.display());
    assert_eq!(said.ours().into_iter().filter(|own| own.contains(&line)).count(), 1, "{said:#?}");
    sandbox.run_root(&format!("rm -r {}", others.display())).ok();
}
