//! The warm-up on a real Slurm: once, before any rank starts, as the task would run
//! it; what its failure means; and that two never fill one directory at a time.
//!
//! What one machine cannot show: file systems on which a mark that one node has made
//! is seen late by another.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use common::{Said, Sandbox, container_plugin, library, open_folder, rounds};

const REFUSED: i32 = 78;

/// The mark in a directory that is being filled.
const MARK: &str = ".palingenesis-warm.lock";

fn up(name: &str, options: &[&str]) -> Option<Sandbox> {
    let plugin = format!("required {}", library().display());
    let standard = ["--nodes", "2", "--cores", "4", "--plugstack", &plugin];
    Sandbox::up(&format!("warmup-{name}"), &[&standard, options].concat())
}

fn home(sandbox: &Sandbox) -> PathBuf {
    sandbox.dir().join("home/trainer")
}

fn read(sandbox: &Sandbox, name: &str) -> String {
    fs::read_to_string(home(sandbox).join(name)).unwrap_or_default()
}

/// A shell script in the user's home directory.
fn script(sandbox: &Sandbox, name: &str, text: &str) {
    let path = home(sandbox).join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Within seconds no job is left, every node is idle, and no mark is left.
#[track_caller]
fn nothing_is_left(sandbox: &Sandbox) {
    let said = sandbox.run(
        "for i in {1..100}; do
             left=$(squeue -h; sinfo -h -N -o '%N %T' | grep -v ' idle$')
             [ -n \"$left\" ] || exit 0
             sleep 0.1
         done
         echo \"$left\"; exit 1",
    );
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let left: Vec<_> = fs::read_dir(home(sandbox)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let left: Vec<_> = left.iter().filter(|name| name.to_string_lossy().starts_with(".palingenesis")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A library that lets everybody have every lock, as some file systems do.
fn broken_locks() -> Option<PathBuf> {
    let library = open_folder().join("broken_locks.so");
    let source = open_folder().join("broken_locks.c");
    let text = "#include <stdarg.h>\n#include <fcntl.h>\n\
                int flock(int fd, int how) { return 0; }\n\
                int lockf(int fd, int how, off_t length) { return 0; }\n\
                int lockf64(int fd, int how, off_t length) { return 0; }\n\
                #define _GNU_SOURCE\n#include <dlfcn.h>\n\
                static int pass(int fd, int what, void *with) {\n\
                  if (what == F_SETLK || what == F_SETLKW) return 0;\n\
                  int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym((void *)-1L, \"fcntl64\");\n\
                  return real(fd, what, with);\n}\n\
                int fcntl(int fd, int what, ...) { va_list l; va_start(l, what); void *w = va_arg(l, void *); va_end(l); return pass(fd, what, w); }\n\
                int fcntl64(int fd, int what, ...) { va_list l; va_start(l, what); void *w = va_arg(l, void *); va_end(l); return pass(fd, what, w); }\n";
    fs::write(&source, text).unwrap();
    let mut compiler = Command::new("gcc");
    compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).arg("-ldl");
    match compiler.status() {
        Ok(status) if status.success() => Some(library),
        other => {
            println!("skipped: gcc: {other:?}");
            None
        }
    }
}

/// <https://github.com/huggingface/huggingface_hub/pull/4306>: eight ranks on two nodes,
/// and locks of files that everybody gets.
#[test]
fn one_process_of_the_whole_step_warms_up_before_any_rank_starts() {
    let Some(sandbox) = up("once", &[]) else { return };
    let Some(broken) = broken_locks() else { return };
    script(&sandbox, "warm", "#!/bin/sh\necho begin $SLURMD_NODENAME >>log\nsleep 0.3\necho end >>log\n");
    for round in 0..if rounds() > 1 { 30 } else { 3 } {
        let said = sandbox.run(&format!(
            "cd; rm -f log; export LD_PRELOAD={}
             srun -N2 --ntasks-per-node=4 --palingenesis --palingenesis-warm=./warm sh -c 'echo rank >>log'",
            broken.display()
        ));
        assert_eq!(said.ours(), [""; 0], "round {round}");
        said.ok();
        let log = read(&sandbox, "log");
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines, [&["begin n1", "end"][..], &["rank"; 8]].concat(), "round {round}");
    }
    nothing_is_left(&sandbox);
}

#[test]
fn each_node_warms_up_where_that_is_asked_for() {
    let Some(sandbox) = up("node", &[]) else { return };
    let said = sandbox
        .run(
            "cd; srun -N2 --ntasks-per-node=2 --palingenesis=warm-per=node \
             --palingenesis-warm='echo on $SLURMD_NODENAME; echo warm >>log' sh -c 'echo rank >>log'",
        )
        .ok();
    let mut ours = said.ours();
    ours.sort_unstable();
    assert_eq!(ours, ["palingenesis: warm-up on n1: on n1", "palingenesis: warm-up on n2: on n2"]);
    assert_eq!(read(&sandbox, "log").lines().collect::<Vec<_>>(), [&["warm"; 2][..], &["rank"; 4]].concat());
    nothing_is_left(&sandbox);
}

/// The option comes with the job and again with srun
/// (<https://github.com/NERSC/shifter/pull/190>: each use was one more).
#[test]
fn of_a_job_s_warm_up_and_its_srun_s_the_inner_one_runs_once() {
    let Some(sandbox) = up("inner", &[]) else { return };
    let run = |inner: &str| {
        let outer = "--palingenesis --palingenesis-warm='echo job' --palingenesis-output=/nowhere/a/b";
        sandbox.run(&format!("salloc -Q -N2 -n2 {outer} srun -N2 -n2 --palingenesis-output=$HOME {inner} true"))
    };
    assert_eq!(run("").ok().ours(), ["palingenesis: warm-up: job"]);
    assert_eq!(run("--palingenesis-warm='echo step'").ok().ours(), ["palingenesis: warm-up: step"]);
    assert_eq!(run("--palingenesis=off").ok().ours(), [""; 0]);
}

/// What a warm-up makes on a node's own disk is on that node only; the report is
/// <https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4207>. Where it ran on each node
/// all of them have it.
#[test]
fn what_it_makes_on_one_node_only_is_told_with_the_cure() {
    let Some(sandbox) = up("local", &["--namespace-per-node"]) else { return };
    let make = "--palingenesis-warm='mkdir -p /tmp/env && touch /tmp/env/made'";
    let run = |spec: &str, then: &str| {
        sandbox.run(&format!("export UV_PROJECT_ENVIRONMENT=/tmp/env; srun -N2 -n2 --palingenesis{spec} {make} {then}"))
    };
    let said = run("", "true").ok();
    let [line] = said.ours()[..] else { panic!("not one line: {said:?}") };
    assert!(line.starts_with("palingenesis: warning: UV_PROJECT_ENVIRONMENT=/tmp/env is not on n2: "), "{line}");
    assert!(line.contains("give warm-per=node"), "{line}");
    let said = run("=warm-per=node", "test -e /tmp/env/made").ok();
    assert_eq!(said.ours(), [""; 0], "{said:?}");
}

/// Exit code 78, no rank, one line that says why.
#[track_caller]
fn ends_the_step(sandbox: &Sandbox, said: &Said, parts: &[&str]) {
    let text = format!("exit code {}\n{}{}", said.code, said.out, said.err);
    assert_eq!(said.code, REFUSED, "{text}");
    assert!(!said.out.contains("RANK"), "{text}");
    let errors: Vec<&str> = said.ours().into_iter().filter(|line| line.starts_with("palingenesis: error: ")).collect();
    let [error] = errors[..] else { panic!("not one line: {text}") };
    for part in parts {
        assert!(error.contains(part), "'{part}' is missing: {text}");
    }
    nothing_is_left(sandbox);
}

#[test]
fn its_failure_ends_the_step_with_its_last_lines() {
    let Some(sandbox) = up("fails", &[]) else { return };
    let step = |options: &str, warm: &str| {
        sandbox.run(&format!(
            "cd; srun {options} --ntasks-per-node=2 --palingenesis=warm-timeout=2 --palingenesis-warm='{warm}' echo RANK"
        ))
    };
    for options in ["-N1", "-N2"] {
        let said = step(options, "echo fetching; echo no network >&2; exit 3");
        ends_the_step(&sandbox, &said, &["exit code 3", "on n1", "fetching | no network", "mend what it says"]);
        assert!(said.err.contains("palingenesis: warm-up: no network\n"), "{}", said.err);
        ends_the_step(&sandbox, &step(options, "kill -SEGV $$"), &["signal 11 (SIGSEGV)"]);
        ends_the_step(&sandbox, &step(options, "no-such-command"), &["127", "not found", "PATH"]);
        let said = step(options, "echo begun; sleep 300");
        ends_the_step(&sandbox, &said, &["was ended after 2 s", "begun", "warm-timeout=SECONDS"]);
        assert!(said.took < Duration::from_secs(30), "{:?}", said.took);
    }
    // The cause is told by the node that has it, and by no other.
    let said = sandbox.run(
        "cd; srun -N2 --ntasks-per-node=2 --palingenesis=warm-per=node \
         --palingenesis-warm='[ $SLURMD_NODENAME = n1 ] || exit 5' echo RANK",
    );
    ends_the_step(&sandbox, &said, &["exit code 5", "on n2"]);
}

/// Then nobody would wait for it.
#[test]
fn with_the_pre_flight_off_it_is_refused_and_before_a_shell_left_out() {
    let Some(sandbox) = up("off", &[]) else { return };
    for nodes in ["-N1", "-N2"] {
        let said = sandbox
            .run(&format!("cd; srun {nodes} --palingenesis=preflight=off --palingenesis-warm='echo never' echo RANK"));
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:?}");
        let [line] = said.ours()[..] else { panic!("not one line: {said:?}") };
        assert!(line.starts_with("palingenesis: error: ") && line.contains("preflight=off"), "{line}");
    }
    let said = sandbox
        .run("cd; srun -N1 --palingenesis=launch=shell --palingenesis-warm='echo never' sh -c 'echo SHELL'")
        .ok();
    let [line] = said.ours()[..] else { panic!("not one line: {said:?}") };
    assert!(line.starts_with("palingenesis: warning: the warm-up is not run"), "{line}");
    assert_eq!(said.out, "SHELL\n");
}

/// What the shell of a task shows of itself, to a file named by its first argument.
const PROBE: &str = "#!/bin/sh
exec >\"$HOME/probe.$1\"
echo files $(ulimit -n) core $(ulimit -c) stack $(ulimit -s) umask $(umask) in $PWD user $(id -u) groups $(id -G)
echo name $(cat /proc/$$/comm) oom $(cat /proc/self/oom_score_adj) nice $(nice)
grep -E '^(Sig(Blk|Ign)|CapEff|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):' /proc/self/status
echo cgroup $(cat /proc/self/cgroup)
";

/// slurmd has other limits, and its children have signals blocked, a name of their own
/// and descriptors that are nobody's business.
#[test]
fn it_runs_as_the_task_will() {
    let Some(sandbox) = up("same", &[]) else { return };
    script(&sandbox, "probe", PROBE);
    script(&sandbox, "files", "#!/bin/sh\nls /proc/self/fd; readlink /proc/self/fd/0\n");
    fs::create_dir(home(&sandbox).join("job")).unwrap();
    sandbox.run_root(&format!("chown -R trainer {}", home(&sandbox).join("job").display())).ok();
    let run = sandbox.record(
        "cd ~/job; ulimit -S -n 777; ulimit -S -s 4096; umask 027; export MINE=1
         srun -N1 -n1 --palingenesis --palingenesis-cache=$HOME/caches \
         --palingenesis-warm='~/probe warm; ~/files; RECORD warm' sh -c '~/probe task; exec RECORD task'",
    );
    let (warm, task) = (read(&sandbox, "probe.warm"), read(&sandbox, "probe.task"));
    assert!(warm.starts_with("files 777 core "), "{warm}");
    assert!(warm.contains("umask 0027 in ") && warm.contains("/job user 1001"), "{warm}");
    assert_eq!(warm, task);
    // The last is that of ls.
    let files: Vec<&str> =
        run.said.err.lines().map(|line| line.trim_start_matches("palingenesis: warm-up: ")).collect();
    assert_eq!(files, ["0", "1", "2", "3", "/dev/null"]);

    let (warm, task) = (run.task("warm"), run.task("task"));
    warm.is_no_rank();
    assert_eq!(warm.get("HF_HOME"), task.get("HF_HOME"));
    assert!(warm.get("HF_HOME").is_some_and(|path| path.ends_with("/caches/huggingface")));
    for (name, value) in task.iter() {
        if warm.get(name) != Some(value) && !["_", "TMPDIR"].contains(&name) {
            assert!(common::tasks::RANK_VARIABLES.contains(&name), "{name}={value} is {:?}", warm.get(name));
        }
    }
    for (name, _) in warm.iter() {
        assert!(task.get(name).is_some(), "{name} is new");
    }
    // Byte for byte, also what is no text.
    let said = sandbox
        .run(
            "BYTES=$'\\xff\\xe9=\\n' srun -N1 -n1 --palingenesis \
             --palingenesis-warm='printf %s \"$BYTES\" | od -An -tx1' sh -c 'printf %s \"$BYTES\" | od -An -tx1'",
        )
        .ok();
    assert_eq!(said.out, " ff e9 3d 0a\n");
    assert_eq!(said.err, "palingenesis: warm-up:  ff e9 3d 0a\n");
    // Of several ranks it sees one: what counts them must not wait for the others.
    let run =
        sandbox.record("cd; srun -N2 --ntasks-per-node=2 --palingenesis --palingenesis-warm='RECORD warm' RECORD task");
    let warm = run.task("warm");
    warm.is_no_rank();
    for name in ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"] {
        assert_eq!(warm.get(name), Some("1"), "{name}");
    }
    assert_eq!(warm.get("SLURM_STEP_NODELIST"), Some("n1"));
    assert_eq!(run.tasks("task").len(), 4);
}

/// Limits that the site does not propagate are slurmd's, for both.
#[test]
fn limits_that_are_not_propagated_stay() {
    let Some(sandbox) = up("limits", &["--conf", "PropagateResourceLimitsExcept=NOFILE"]) else { return };
    for (option, own) in [("", false), ("--propagate=NOFILE", true)] {
        let said = sandbox
            .run(&format!(
                "cd; ulimit -S -n 777; srun -N1 {option} --palingenesis --palingenesis-warm='ulimit -n' sh -c 'ulimit -n'"
            ))
            .ok();
        let warm = said.err.trim().trim_start_matches("palingenesis: warm-up: ");
        assert_eq!(warm, said.out.trim());
        assert_eq!(warm == "777", own, "{warm}");
    }
}

/// <https://github.com/NVIDIA/pyxis/issues/124>: inside, where the caches are.
#[test]
fn it_runs_inside_the_container() {
    let Some(container) = container_plugin(&common::slurm_headers()) else { return };
    let theirs = format!("required {}", container.display());
    let ours = format!("required {}", library().display());
    let options = ["--nodes", "2", "--cores", "4", "--plugstack", &theirs, "--plugstack", &ours];
    let Some(sandbox) = Sandbox::up("warmup-container", &options) else { return };
    if !common::user_namespaces() {
        return;
    }
    let image = sandbox.dir().join("home/image");
    fs::create_dir(&image).unwrap();
    fs::write(image.join("environ"), "OF_THE_IMAGE=yes\nPATH=/usr/bin:/bin\n").unwrap();
    fs::write(image.join("hide"), "/srv\n").unwrap();
    let said = sandbox
        .run(&format!(
            "cd; srun -N2 --container-image={} --palingenesis \
             --palingenesis-warm='echo $OF_THE_IMAGE $PATH; readlink /proc/self/ns/mnt' \
             sh -c '[ $SLURM_PROCID != 0 ] || readlink /proc/self/ns/mnt'; readlink /proc/self/ns/mnt",
            image.display()
        ))
        .ok();
    let warm: Vec<&str> = said.err.lines().filter_map(|line| line.strip_prefix("palingenesis: warm-up: ")).collect();
    let [inside, outside] = said.out.lines().collect::<Vec<_>>()[..] else { panic!("{said:?}") };
    assert_eq!(warm, ["yes /usr/bin:/bin", inside]);
    assert_ne!(inside, outside);
}

/// What has left the command's session, too, as a daemon does.
const FAMILY: &str = "#!/bin/sh
echo $$ >>pids
setsid sh -c 'echo $$ >>pids; exec sleep 600' &
timeout 600 sh -c 'echo $$ >>pids; exec sleep 600' &
(trap '' TERM; sh -c 'echo $PPID' >>pids; while :; do sleep 1; done) &
while [ $(wc -l <pids) -lt 4 ]; do sleep 0.05; done
echo ready
wait
";

/// Slurm ends a step's processes by its cgroup, or as far as it finds them by their
/// parents. By the cgroup all of them end at the same moment, and a mark may stay
/// until it is taken over; not where the step is asked to end first, as by default.
#[test]
fn scancel_leaves_nothing_of_it() {
    for (name, options, ways) in [("cancel", &[][..], &["", "-s KILL"][..]), ("cgroup", &["--cgroup"], &["", ""])] {
        let Some(sandbox) = up(name, options) else { return };
        script(&sandbox, "family", FAMILY);
        for how in ways {
            is_ended_by_scancel(&sandbox, how);
        }
    }
}

#[track_caller]
fn is_ended_by_scancel(sandbox: &Sandbox, how: &str) {
    let said = sandbox.run(&format!(
        "cd; rm -f pids log
             srun -N2 --ntasks-per-node=2 --palingenesis --palingenesis-warm=./family echo RANK >log 2>&1 &
             until grep -q ready log; do sleep 0.1; done
             [ -d {MARK} ] || echo no mark
             scancel {how} $(squeue -h -o %A)
             wait
             for i in {{1..100}}; do
                 left=$(for pid in $(cat pids); do ps -o pid=,args= -p $pid; done)
                 [ -n \"$left\" ] || break
                 sleep 0.1
             done
             echo \"$left\"; wc -l <pids; cat log >&2"
    ));
    assert_eq!(said.out, "\n4\n", "{how}: {}", said.err);
    assert!(!said.err.contains("RANK"), "{how}: {}", said.err);
    nothing_is_left(sandbox);
}

/// A rank that dies while the others wait for the warm-up ends it, and the step.
#[test]
fn a_rank_that_dies_meanwhile_ends_it() {
    let Some(sandbox) = up("rank", &[]) else { return };
    script(&sandbox, "family", FAMILY);
    let said = sandbox.run(
        "cd; rm -f pids log
         srun -N2 --ntasks-per-node=2 --palingenesis --palingenesis-warm=./family echo RANK >log 2>&1 &
         step=$!
         until grep -q ready log; do sleep 0.1; done
         # A waiting task of rank 0's node that has started nothing.
         victim=$(for pid in $(pgrep -x palingenesis); do pgrep -P $pid >/dev/null || echo $pid; done | head -n 1)
         kill -9 $victim
         wait $step; echo $?
         for i in {1..100}; do
             left=$(for pid in $(cat pids); do ps -o pid=,args= -p $pid; done)
             [ -n \"$left\" ] || break
             sleep 0.1
         done
         echo \"left $left\"; cat log >&2",
    );
    let (code, rest) = said.out.split_once('\n').unwrap();
    assert_ne!(code, "0", "{said:?}");
    assert_eq!(rest, "left \n", "{said:?}");
    assert!(!said.err.contains("RANK"), "{said:?}");
    assert!(said.took < Duration::from_secs(30), "{said:?}");
    nothing_is_left(&sandbox);
}

/// <https://github.com/astral-sh/uv/issues/17399>: tasks of an array that make one
/// environment, and whose directories differ.
#[test]
fn eight_tasks_of_an_array_never_fill_one_directory_at_the_same_time() {
    let Some(sandbox) = up("array", &[]) else { return };
    script(
        &sandbox,
        "fill",
        "#!/bin/sh\nmkdir ~/env/half || exit 9\necho begin $(date +%s%N) >>~/log\nsleep 0.4\necho end $(date +%s%N) >>~/log\n\
         rmdir ~/env/half\n",
    );
    fs::create_dir(home(&sandbox).join("env")).unwrap();
    sandbox.run_root(&format!("chown -R trainer {}", home(&sandbox).join("env").display())).ok();
    let run = sandbox.batch(
        "--array=0-7 -N1 -n1",
        8,
        "mkdir ~/job-$SLURM_ARRAY_TASK_ID; cd ~/job-$SLURM_ARRAY_TASK_ID
         export UV_PROJECT_ENVIRONMENT=$HOME/env/project
         srun --palingenesis --palingenesis-warm=~/fill echo RANK",
    );
    assert_eq!(run.said.out.matches("RANK").count(), 8, "{}", run.said.out);
    let log = read(&sandbox, "log");
    let marks: Vec<(&str, u64)> =
        log.lines().map(|line| line.split_once(' ').map(|(what, at)| (what, at.parse().unwrap())).unwrap()).collect();
    assert_eq!(marks.len(), 16, "{log}");
    assert!(marks.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{log}");
    for (number, (what, _)) in marks.iter().enumerate() {
        assert_eq!(*what, if number % 2 == 0 { "begin" } else { "end" }, "{log}");
    }
    assert!(!home(&sandbox).join("env").join(MARK).exists());
    nothing_is_left(&sandbox);
}

/// <https://github.com/ishandhanani/srt-slurm/pull/251>: everything of it was killed at
/// once, so that nothing could be put back. The next start succeeds, and says why it
/// waited.
#[test]
fn after_a_kill_the_next_start_succeeds_within_the_limit() {
    let Some(sandbox) = up("killed", &[]) else { return };
    let said = sandbox.run(
        "cd; srun -N1 -n1 --palingenesis --palingenesis-warm='echo $PPID $$ >pids; sleep 600' echo RANK >log 2>&1 &
         until [ -s pids ] && [ -s .palingenesis-warm.lock/owner ]; do sleep 0.1; done
         kill -9 $(cat pids); wait; cat log",
    );
    assert!(home(&sandbox).join(MARK).is_dir(), "it was put back: {said:?}");
    assert!(said.out.contains("SIGKILL") && !said.out.contains("RANK"), "{said:?}");
    let line = "cd; srun -N1 -n1 --palingenesis=warm-timeout=150 --palingenesis-warm='echo again' echo RANK";
    let said = sandbox.run_as(&[], line, 170).ok();
    let notes: Vec<&str> = said.ours().into_iter().filter(|line| line.contains("given no sign")).collect();
    let [note] = notes[..] else { panic!("not one notice: {}", said.err) };
    assert!(note.starts_with("palingenesis: note: step ") && note.contains(" on n1 "), "{note}");
    assert!(said.err.contains("palingenesis: warm-up: again\n") && said.out == "RANK\n", "{said:?}");
    assert!(said.took < Duration::from_secs(120), "{:?}", said.took);
    nothing_is_left(&sandbox);
}

/// The other one's mark is older than a silent one may be, but its holder lives.
#[test]
fn a_step_waits_for_another_s_and_says_for_whom() {
    let Some(sandbox) = up("waits", &[]) else { return };
    let said = sandbox
        .run(
            "cd; srun -N1 -n1 --palingenesis --palingenesis-warm='echo A begin >>log; sleep 13; echo A end >>log' true &
             until [ -e .palingenesis-warm.lock/owner ]; do sleep 0.1; done
             srun -N1 -n1 --palingenesis --palingenesis-warm='echo B >>log' echo RANK 2>err; wait; cat err",
        )
        .ok();
    assert_eq!(read(&sandbox, "log"), "A begin\nA end\nB\n");
    let note = said.out.lines().find(|line| line.starts_with("palingenesis: note: ")).unwrap_or_default();
    assert!(note.contains(" waits for step ") && note.contains("(user 1001, process "), "{said:?}");
    // It gives up at its limit, and the other goes on.
    let said = sandbox.run(
        "cd; srun -N1 -n1 --palingenesis --palingenesis-warm='sleep 8' echo OTHER &
         until [ -e .palingenesis-warm.lock/owner ]; do sleep 0.1; done
         srun -N1 -n1 --palingenesis=warm-timeout=2 --palingenesis-warm='echo never' echo RANK; code=$?; wait; exit $code",
    );
    ends_the_step(&sandbox, &said, &["could not begin within 2 s", "step ", "scancel", MARK]);
    assert_eq!(said.out, "OTHER\n");
}
