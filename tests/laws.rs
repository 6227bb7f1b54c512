//! What must hold on a real Slurm whatever goes wrong in the plugin: a fault
//! never drains a node, ends a slurmd, hangs a step or changes the exit code of
//! a job that ran; before the command runs it stops the ranks with one line;
//! and without the flag nothing is noticed at all.
//!
//! The plugin under test is a build with fault injection. What one machine
//! cannot show: faults of a node whose clock, kernel or file system is its own.
//! With PALINGENESIS_SOAK=N the matrix is run N times more.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use common::{Said, Sandbox, fault_library, library, rounds};

const REFUSED: i32 = 78;
const MODES: [&str; 2] = ["optional", "required"];

struct Cluster {
    sandbox: Sandbox,
    /// Pid of every slurmd as the cluster was started.
    slurmds: String,
}

impl Cluster {
    fn up(name: &str, arguments: &[&str]) -> Option<Cluster> {
        let sandbox = Sandbox::up(&format!("laws-{name}"), arguments)?;
        let mut cluster = Cluster { sandbox, slurmds: String::new() };
        cluster.slurmds = cluster.slurmds();
        assert!(!cluster.slurmds.is_empty());
        Some(cluster)
    }

    /// Two nodes of four pretended cores.
    fn two_nodes(name: &str) -> Option<Cluster> {
        Cluster::up(name, &["--nodes", "2", "--cores", "4"])
    }

    fn load(&self, mode: &str, arguments: &str) {
        self.sandbox.plugstack(&[&format!("{mode} {} {arguments}", fault_library().display())]);
    }

    fn run(&self, line: &str) -> Said {
        let said = self.sandbox.run(line);
        Said { err: said.before_the_end(), ..said }
    }

    fn slurmds(&self) -> String {
        let line = "for f in /run/slurmd.*.pid; do read -r p <$f; echo $f $p $(cat /proc/$p/comm); done";
        self.run(line).ok().out
    }

    /// Within seconds no job and no slurmstepd is left and every node is idle;
    /// every slurmd still runs; and a job without the flag, under the same
    /// plugstack.conf, runs as if there were no plugin.
    #[track_caller]
    fn unharmed(&self, what: &str) {
        let said = self.run(
            "for i in {1..250}; do
                 left=$(squeue -h; sinfo -h -N -o '%N %T' | grep -v ' idle$'; pgrep -x slurmstepd; pgrep -x palingenesis)
                 [ -n \"$left\" ] || break
                 sleep 0.1
             done
             [ -z \"$left\" ] || { echo \"left behind: $left\"; exit 1; }
             RUST_BACKTRACE=full srun -Q -N2 -n2 sh -c 'echo plain'",
        );
        let wanted = (0, "plain\nplain\n", "");
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), wanted, "a plain job after {what}");
        assert_eq!(self.slurmds(), self.slurmds, "slurmd after {what}");
    }
}

/// Three ranks on each of two nodes that print what rank they are; the ranks
/// that ran.
fn six(cluster: &Cluster, options: &str, code: i32) -> (Said, BTreeSet<u32>) {
    six_that(cluster, options, &format!("exit {code}"))
}

/// The same with their last words.
fn six_that(cluster: &Cluster, options: &str, end: &str) -> (Said, BTreeSet<u32>) {
    let line =
        format!("RUST_BACKTRACE=full srun -Q -N2 -n6 --ntasks-per-node=3 {options} sh -c 'echo $SLURM_PROCID; {end}'");
    let mut said = cluster.run(&line);
    let ran = said.out.lines().map(|line| line.parse().expect("a rank")).collect();
    // That srun reports exit codes is Slurm's.
    said.err = said.err.lines().filter(|line| !line.starts_with("srun: ")).map(|line| format!("{line}\n")).collect();
    assert!(!said.err.contains("panicked at") && !said.err.contains("backtrace"), "{}", said.err);
    (said, ran)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scope {
    All,
    Node1,
    Rank1,
}

impl Scope {
    fn selector(self) -> &'static str {
        match self {
            Scope::All => "",
            Scope::Node1 => ":node=1",
            Scope::Rank1 => ":rank=1",
        }
    }
}

fn all() -> BTreeSet<u32> {
    (0..6).collect()
}

/// Hooks of srun (local) and slurmstepd (remote), and where in a step a fault
/// in them can be.
const BEFORE: &[(&str, &str, &[Scope])] = &[
    ("init", "local", &[Scope::All]),
    ("init_post_opt", "local", &[Scope::All]),
    ("local_user_init", "local", &[Scope::All]),
    ("init", "remote", &[Scope::All, Scope::Node1]),
    ("init_post_opt", "remote", &[Scope::All, Scope::Node1]),
    ("user_init", "remote", &[Scope::All, Scope::Node1]),
    ("task_init", "remote", &[Scope::All, Scope::Node1, Scope::Rank1]),
];
const AFTER: &[(&str, &str, &[Scope])] = &[
    ("task_exit", "remote", &[Scope::All, Scope::Node1, Scope::Rank1]),
    ("exit", "remote", &[Scope::All, Scope::Node1]),
    ("exit", "local", &[Scope::All]),
];

/// A failing hook by itself drains nodes, passes for success or is ignored,
/// depending on the hook, `required` and the release (spank(8), "ERRORS").
fn matrix(cluster: &Cluster, mode: &str, kind: &str) {
    for (hook, context, scopes) in BEFORE {
        for scope in *scopes {
            let fault = format!("fault={hook}:{kind}:context={context}{}", scope.selector());
            let what = format!("{mode} {fault}");
            cluster.load(mode, &fault);
            let (said, ran) = six(cluster, "--palingenesis", 0);
            assert_eq!(said.code, REFUSED, "{what}: {said:?}");
            // A lone rank, or a lone node, stops the whole step.
            assert_eq!(ran, BTreeSet::new(), "{what}: {said:?}");
            // srun's own fault is told once, a node's once per node.
            let lines = if *context == "remote" && *scope == Scope::All { 2 } else { 1 };
            assert_eq!(said.err.lines().count(), lines, "{what}: {said:?}");
            for line in said.err.lines() {
                let start = format!("palingenesis: error: internal fault in slurm_spank_{hook}: ");
                assert!(line.starts_with(&start) && line.contains("injected"), "{what}: {line}");
                assert!(line.contains("--palingenesis=off"), "{what}: no way out: {line}");
            }
            let (said, ran) = six(cluster, "--palingenesis=off", 3);
            assert_eq!((said.code, ran, said.err.as_str()), (3, all(), ""), "off: {what}");
            cluster.unharmed(&what);
        }
    }
    for (hook, context, scopes) in AFTER {
        for scope in *scopes {
            let fault = format!("fault={hook}:{kind}:context={context}{}", scope.selector());
            let what = format!("{mode} {fault}");
            cluster.load(mode, &fault);
            for code in [0, 3] {
                let (said, ran) = six(cluster, "--palingenesis", code);
                assert_eq!((said.code, ran), (code, all()), "{what}: {}", said.err);
                for line in said.err.lines() {
                    assert!(line.contains(&format!("internal fault in slurm_spank_{hook}: ")), "{what}: {line}");
                }
            }
            cluster.unharmed(&what);
        }
    }
}

#[test]
fn a_panic_in_any_hook_stops_the_ranks_or_nothing() {
    let Some(cluster) = Cluster::two_nodes("panic") else { return };
    for _ in 0..rounds() {
        for mode in MODES {
            matrix(&cluster, mode, "panic");
        }
    }
}

#[test]
fn an_error_in_any_hook_stops_the_ranks_or_nothing() {
    let Some(cluster) = Cluster::two_nodes("error") else { return };
    for _ in 0..rounds() {
        for mode in MODES {
            matrix(&cluster, mode, "error");
        }
    }
}

/// In the step of a batch script a required plugin's failure drains the node
/// and passes for success (spank(8)). Ours has nothing to do there.
#[test]
fn a_batch_script_runs_whatever_the_plugin_does_to_its_step() {
    let Some(cluster) = Cluster::two_nodes("batch") else { return };
    let hooks = ["init", "init_post_opt", "user_init", "task_init", "task_exit", "exit"];
    for mode in MODES {
        for kind in ["panic", "error"] {
            let faults = hooks.map(|hook| format!("fault={hook}:{kind}:context=remote")).join(" ");
            cluster.load(mode, &faults);
            let said = cluster.run(
                "cd; rm -f out
                 printf '%s\\n' '#!/bin/sh' 'echo script' 'srun -Q -N2 -n2 echo rank; echo inner $?' 'exit 3' >job
                 id=$(sbatch --parsable -N2 -o out --palingenesis job) || exit
                 for i in {1..300}; do
                     state=$(scontrol -o show job $id | grep -o 'JobState=[A-Z]* \\|ExitCode=[0-9:]*' | tr -d '\\n')
                     case $state in *RUNNING*|*PENDING*|*COMPLETING*) sleep 0.1 ;; *) break ;; esac
                 done
                 grep -v '^srun: ' out
                 echo $state",
            );
            let said = said.ok();
            let (ours, other): (Vec<&str>, Vec<&str>) = said
                .out
                .lines()
                .filter(|line| !line.contains("[kill-on-bad-exit]"))
                .partition(|line| line.contains("palingenesis"));
            assert_eq!(other, ["script", "inner 78", "JobState=FAILED ExitCode=3:0"], "{mode} {kind}: {said:?}");
            // Of the srun in the script: the first fault once per node, and those
            // that come after each task's end.
            let count = |hook: &str| {
                let start = format!("palingenesis: error: internal fault in slurm_spank_{hook}: ");
                ours.iter().filter(|line| line.starts_with(&start)).count()
            };
            assert_eq!((count("init"), count("task_exit"), ours.len()), (2, 2, 4), "{said:?}");
            cluster.unharmed(&format!("a batch job, {mode}, {faults}"));
        }
    }
}

#[test]
fn slurmd_starts_and_ends_with_faults_in_its_own_hooks() {
    let Some(mut cluster) = Cluster::two_nodes("slurmd") else { return };
    for mode in MODES {
        for kind in ["panic", "error"] {
            cluster.load(mode, &format!("fault=init:{kind}:context=slurmd fault=slurmd_exit:{kind}"));
            for _ in 0..2 {
                cluster.sandbox.restart_slurmd();
                let now = cluster.slurmds();
                assert!(now != cluster.slurmds && now.lines().count() == 2, "{now}");
                cluster.slurmds = now;
                let (said, ran) = six(&cluster, "--palingenesis", 3);
                assert_eq!((said.code, ran, said.err.as_str()), (3, all(), ""), "{mode} {kind}");
                cluster.unharmed(&format!("{mode} {kind} in slurmd"));
            }
        }
    }
}

/// Slurm calls task_exit for one task after the other, every other hook for all
/// tasks and nodes at once: with two tasks on a node a sleep of 3 s in each hook
/// costs 3 s nine times and 6 s once, of which srun does not wait for the last.
#[test]
fn a_slow_hook_delays_the_job_and_changes_nothing_else() {
    let Some(cluster) = Cluster::two_nodes("slow") else { return };
    let hooks = ["init", "init_post_opt", "local_user_init", "user_init", "task_init", "task_exit", "exit"];
    cluster.load("required", &hooks.map(|hook| format!("fault={hook}:sleep-3")).join(" "));
    let said = cluster.sandbox.run_as(
        &[],
        "srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis sh -c 'echo $RANK; exit 3' | sort; exit ${PIPESTATUS[0]}",
        120,
    );
    assert_eq!((said.code, said.out.as_str()), (3, "0\n1\n2\n3\n"), "{said:?}");
    assert!(!said.before_the_end().contains("palingenesis"), "{said:?}");
    assert!(said.took < Duration::from_secs(33 + 25), "{said:?}");
    // Without it the test would show nothing.
    assert!(said.took > Duration::from_secs(20), "the sleeps were not there: {said:?}");
    cluster.load("required", "");
    cluster.unharmed("sleeps");
}

/// The sandbox has proctrack/linuxproc, which spares processes that are still
/// named slurmstepd: scancel would leave the rank, and the node would drain.
#[test]
fn a_rank_that_hangs_before_the_start_stops_the_step_at_the_deadline() {
    let Some(cluster) = Cluster::two_nodes("hang") else { return };
    for mode in MODES {
        cluster.load(mode, "gate=3 fault=task_init:hang:rank=1");
        let (said, ran) = six(&cluster, "--palingenesis", 0);
        // Slurm ended the rank that hangs: 128 + SIGKILL, as srun reports it.
        assert_eq!((said.code, ran), (137, BTreeSet::new()), "{said:?}");
        assert!(said.took > Duration::from_secs(2) && said.took < Duration::from_secs(30), "{said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(ours[0].contains("error: local rank 1 on n1 did not come to the start within 3 s"), "{}", ours[0]);
        cluster.load(mode, "");
        cluster.unharmed("a hanging rank");
    }
}

/// With preflight=warn, and without a pre-flight, the others start.
#[test]
fn a_rank_that_hangs_before_the_start_holds_the_others_until_the_deadline_only() {
    let Some(cluster) = Cluster::two_nodes("hang-warn") else { return };
    for (mode, preflight) in [("optional", "warn"), ("required", "off")] {
        cluster.load(mode, "gate=3 fault=task_init:hang:rank=1");
        let said = cluster.run(&format!(
            "cd; rm -f ran.*; date +%s
             srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis=preflight={preflight} \
                 sh -c 'date +%s >ran.$RANK; sleep 100' &
             for i in {{1..250}}; do [ -s ran.0 ] && [ -s ran.2 ] && [ -s ran.3 ] && break; sleep 0.1; done
             cat ran.0 ran.2; ls ran.*
             scancel $(squeue -h -o %A); date +%s; wait $!; echo code $?; date +%s",
        ));
        let lines: Vec<&str> = said.out.lines().collect();
        let [start, rank0, rank2, "ran.0", "ran.2", "ran.3", cancelled, code, ended] = lines[..] else {
            panic!("{said:?}")
        };
        let second = |text: &str| text.parse::<u64>().expect("seconds");
        assert!(second(rank0) >= second(start) + 2, "rank 0 did not wait for rank 1: {said:?}");
        assert!(second(rank0) <= second(start) + 20, "rank 0 waited too long: {said:?}");
        if preflight == "off" {
            assert!(second(rank2) <= second(rank0), "the other node waited too: {said:?}");
        }
        assert_ne!(code, "code 0", "{said:?}");
        assert!(second(ended) <= second(cancelled) + 20, "scancel did not end it: {said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(ours[0].contains("warning: local rank 1 on n1 did not come to the start within 3 s"), "{}", ours[0]);
        cluster.load(mode, "");
        cluster.unharmed("a hanging rank");
    }
}

#[test]
fn a_rank_that_dies_before_the_start_stops_the_step() {
    let Some(cluster) = Cluster::two_nodes("kill") else { return };
    for mode in MODES {
        cluster.load(mode, "gate=600 fault=task_init:kill:rank=1");
        let (said, ran) = six(&cluster, "--palingenesis", 0);
        // 128 + SIGKILL, as srun reports the rank that was killed.
        assert_eq!((said.code, ran), (137, BTreeSet::new()), "{said:?}");
        assert!(said.took < Duration::from_secs(20), "{said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(ours[0].contains("error: local rank 1 on n1 ended before the start"), "{}", ours[0]);
        cluster.load(mode, "gate=600 fault=task_init:kill:rank=1");
        // A second longer: where a signal ended a task, srun drops at the last one's end
        // what it has not read yet (src/api/step_launch.c, slurm_step_launch_wait_finish).
        let (said, ran) = six_that(&cluster, "--palingenesis=preflight=warn", "sleep 1");
        assert_eq!((said.code, ran), (137, BTreeSet::from([0, 2, 3, 4, 5])), "{said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(ours[0].contains("warning: local rank 1 on n1 ended before the start"), "{}", ours[0]);
        cluster.load(mode, "");
        cluster.unharmed("a killed rank");
    }
}

/// A plugin must not keep what it opens in slurmstepd: descriptors and processes
/// that live as long as the step (<https://github.com/SchedMD/slurm/pull/19>:
/// leaked descriptors).
#[test]
fn slurmstepd_holds_no_descriptor_thread_or_process_of_ours() {
    const TASKS: usize = 64;
    let Some(cluster) = Cluster::up("descriptors", &["--nodes", "2", "--cores", "64"]) else { return };
    let with = format!("required {}", library().display());
    let count = |lines: &[&str], flag: &str| {
        cluster.sandbox.plugstack(lines);
        // Counted when every task runs the user's command and the counts stand still.
        let said = cluster.sandbox.run_root(&format!(
            "home=$(getent passwd trainer | cut -d: -f6); cd $home; rm -rf up; mkdir -m 777 up
             setpriv --reuid trainer --regid trainer --init-groups srun -Q -K -n{TASKS} {flag} \
                 sh -c 'touch up/$SLURM_PROCID; exec sleep 1000' & srun=$!
             for i in {{1..400}}; do [ $(ls up | wc -l) = {TASKS} ] && break; sleep 0.1; done
             last=
             for i in {{1..40}}; do
                 stepd=$(pgrep -x slurmstepd)
                 now=\"stepds $(echo $stepd | wc -w) fds\"
                 now=\"$now $(for one in $stepd; do ls /proc/$one/fd | wc -l; done | sort -n | xargs)\"
                 now=\"$now threads $(for one in $stepd; do ls /proc/$one/task; done | wc -l)\"
                 now=\"$now children $(for one in $stepd; do pgrep -P $one; done | wc -l)\"
                 now=\"$now sleeping $(for one in $stepd; do pgrep -P $one -x sleep; done | wc -l)\"
                 now=\"$now zombies $(ps -eo stat= | grep -c '^Z')\"
                 now=\"$now maps $(for one in $stepd; do cat /proc/$one/maps; done | grep -c 'rw-s .*/dev/zero')\"
                 [ \"$now\" != \"$last\" ] || break
                 last=$now; sleep 0.5
             done
             echo $now
             scancel -u trainer; wait $srun"
        ));
        cluster.sandbox.resume();
        let line = said.out.lines().next().unwrap_or_default().to_string();
        let (counts, maps) = line.split_once(" maps ").unwrap_or_else(|| panic!("{said:?}"));
        (counts.to_string(), maps.to_string())
    };
    let (none, _) = count(&[], "-N1");
    assert!(none.starts_with("stepds 1 ") && none.ends_with("children 64 sleeping 64 zombies 0"), "{none}");
    assert_eq!(count(&[&with], "-N1"), (none.clone(), "0".into()), "without the flag");
    assert_eq!(count(&[&with], "-N1 --palingenesis"), (none, "1".into()), "with the flag: the gate's memory alone");
    // Where the nodes have met, looked at a directory and warmed up.
    let (none, _) = count(&[], "-N2");
    assert!(none.starts_with("stepds 2 ") && none.ends_with("children 64 sleeping 64 zombies 0"), "{none}");
    let all = "-N2 --palingenesis --palingenesis-output=$PWD/run --palingenesis-warm=true";
    assert_eq!(count(&[&with], all), (none, "2".into()), "after the pre-flight: the gates' memory alone");
}

/// <https://github.com/hpc2n/spank-private-tmp/issues/5>: a plugin logged about
/// jobs that had nothing to do with it.
#[test]
fn without_the_flag_nobody_says_a_word() {
    let Some(cluster) = Cluster::up("silent", &["--nodes", "2", "--cores", "4", "--conf", "SlurmdDebug=verbose"])
    else {
        return;
    };
    let plugin = library().display().to_string();
    for mode in MODES {
        cluster.sandbox.plugstack(&[&format!("{mode} {plugin}")]);
        cluster.sandbox.restart_slurmd();
        // Key variables and our marks alone are not the flag.
        let said = cluster.run(
            "export PALINGENESIS_OPT_PORT=bad PALINGENESIS_SET=x SLURM_PALINGENESIS_SPEC=fsdp SLURM_PALINGENESIS_REFUSAL=x
             cd; rm -f out
             srun -Q -N2 -n4 sh -c 'env | grep -E \"^(RANK|WORLD_SIZE|MASTER_|NCCL_)\"; true'
             salloc -Q -N2 srun -N2 -n2 sh -c 'env | grep -E \"^(RANK|WORLD_SIZE|MASTER_|NCCL_)\"; true'
             sbatch -Q -o out --wrap 'srun -N1 true; env | grep -E \"^(RANK|WORLD_SIZE|MASTER_|NCCL_)\"; echo done' >/dev/null
             for i in {1..200}; do [ -n \"$(squeue -h)\" ] || break; sleep 0.1; done
             cat out",
        );
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "done\n", ""), "{mode}");
    }
    let mut logs = 0;
    for entry in fs::read_dir(cluster.sandbox.dir().join("log")).expect("the sandbox has logs").flatten() {
        let text = String::from_utf8_lossy(&fs::read(entry.path()).expect("a log")).into_owned();
        logs += usize::from(!text.is_empty());
        // The sandbox's and the plugin's paths have our name in them.
        let dir = cluster.sandbox.dir().display().to_string();
        let text = text.replace(&dir, "DIR").replace(&plugin, "PLUGIN");
        let ours: Vec<&str> = text.lines().filter(|line| line.contains("palingenesis")).collect();
        assert!(ours.is_empty(), "{}: {ours:?}", entry.path().display());
    }
    assert!(logs >= 3, "slurmctld and two slurmd keep logs");
}

/// What Slurm does between our hook and the command still happens: TaskProlog,
/// resource limits (an exec in the hook would lose both), exit codes and
/// signals.
#[test]
fn task_prolog_limits_and_exit_codes_are_as_without_the_flag() {
    let prolog = std::env::temp_dir().join(format!("palingenesis-prolog-{}", std::process::id()));
    fs::write(&prolog, "#!/bin/sh\necho export FROM_PROLOG=$SLURM_PROCID\necho print prolog $SLURM_PROCID\n")
        .expect("a file");
    let prolog = prolog.display().to_string();
    let chmod = std::process::Command::new("chmod").args(["755", &prolog]).status();
    assert!(chmod.is_ok_and(|status| status.success()));
    let conf = format!("TaskProlog={prolog}");
    if let Some(cluster) = Cluster::up("same", &["--nodes", "2", "--cores", "4", "--conf", &conf]) {
        cluster.sandbox.plugstack(&[&format!("required {}", library().display())]);
        let both = |line: &str| {
            let with = |flag: &str| {
                let said = cluster.run(&line.replace("FLAG", flag));
                let mut out: Vec<String> = said.out.lines().map(String::from).collect();
                out.sort_unstable();
                // slurmstepd puts the time before its lines in 26.05, and
                // "slurmstepd-n1: " up to 24.11 (measured).
                let untimed = |line: &str| match line.split_once("] error: ") {
                    Some((time, text)) if time.starts_with("[2") => format!("[] error: {text}"),
                    _ => line.to_string(),
                };
                let mut err: Vec<String> = said.err.lines().map(untimed).collect();
                err.sort_unstable();
                (said.code, out, err)
            };
            let (without, with) = (with(""), with("--palingenesis"));
            assert_eq!(with, without, "{line}");
            without
        };
        let (code, out, _) = both(
            "ulimit -S -n 777; ulimit -c 0; ulimit -S -s 5000; umask 027
             srun -Q -N2 -n2 FLAG bash -c 'ulimit -a; umask; pwd; echo $FROM_PROLOG; cat /proc/self/status | grep ^Sig[BI]; ls /proc/self/fd; \
                 exit $((3 + SLURM_PROCID))'",
        );
        let has = |text: &str| out.iter().any(|line| line.contains(text));
        // srun gives the highest of the tasks' codes.
        assert_eq!(code, 4);
        assert!(has("prolog 1") && has("777") && has("0027"), "{out:?}");
        let (code, ..) = both("srun -Q -N1 -n2 FLAG sh -c 'kill -SEGV $$'");
        // 128 + SIGSEGV.
        assert_eq!(code, 139);
        let (code, ..) = both("srun -Q -N1 -n1 FLAG /no/such/program");
        assert_eq!(code, 2);
        let (code, ..) = both("echo input | srun -Q -N1 -n1 FLAG cat");
        assert_eq!(code, 0);
        let (code, ..) = both("printf '0-1 echo %%t\\n' >$HOME/multi; srun -Q -N1 -n2 --multi-prog FLAG $HOME/multi");
        assert_eq!(code, 0);
    }
    let _ = fs::remove_file(prolog);
}

/// <https://github.com/awslabs/awsome-distributed-ai/issues/1207>: a plugin stood
/// twice in plugstack.conf. Slurm disables the second one's option and says so;
/// the first one must not lose the flag by that, be it the same file or a copy.
#[test]
fn a_second_copy_of_the_plugin_changes_nothing() {
    let Some(cluster) = Cluster::two_nodes("twice") else { return };
    let first = library().display().to_string();
    let copy = std::env::temp_dir().join(format!("palingenesis-copy-{}.so", std::process::id()));
    fs::copy(&first, &copy).expect("a copy");
    let copy = copy.display().to_string();
    for mode in MODES {
        for second in [&first, &copy] {
            cluster.sandbox.plugstack(&[&format!("{mode} {first}"), &format!("{mode} {second}")]);
            for flag in ["srun --palingenesis=port=23456", "PALINGENESIS=port=23456 srun"] {
                let (environment, srun) = flag.split_once("srun").unwrap_or_default();
                let line = format!("{environment} srun -Q -N2 -n2 {srun} sh -c 'echo $RANK $MASTER_PORT' | sort");
                let said = cluster.run(&line).ok();
                assert_eq!(said.out, "0 23456\n1 23456\n", "{mode} {second}: {said:?}");
                let ours = said.err.lines().filter(|line| !line.contains("provided by both")).count();
                assert_eq!(ours, 0, "{said:?}");
            }
            let said = cluster.run("srun -Q -N2 -n2 --palingenesis=prot=1 true");
            assert_eq!(said.code, REFUSED, "{said:?}");
        }
    }
    let _ = fs::remove_file(copy);
}

/// Slurm drops the option on a node whose plugstack.conf lacks the plugin, runs
/// the step and says so in that node's log only. (With the pre-flight the step stops;
/// see tests/preflight_start.rs.)
#[test]
fn a_node_without_the_plugin_gives_its_tasks_no_rank() {
    let arguments = ["--nodes", "2", "--cores", "4", "--namespace-per-node"];
    let Some(cluster) = Cluster::up("missing", &arguments) else { return };
    cluster.sandbox.plugstack(&[&format!("required {}", library().display())]);
    let on_n2 = ["--as-root", "--node", "n2"];
    let hide = ": >/run/no-plugstack && mount --bind /run/no-plugstack /etc/slurm/plugstack.conf";
    cluster.sandbox.run_as(&on_n2, hide, 10).ok();
    let line = "srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis=preflight=off sh -c \
                'echo $SLURM_PROCID rank:$RANK master:${MASTER_ADDR:+set} ours:$(env | grep -c ^SLURM_PALINGENESIS_)' | sort";
    let said = cluster.run(line).ok();
    assert_eq!(
        said.out,
        "0 rank:0 master:set ours:0\n1 rank:1 master:set ours:0\n2 rank: master: ours:7\n3 rank: master: ours:7\n",
        "{said:?}"
    );
}

/// srun, a task or a slurmstepd killed at a moment that chance picks, between the
/// command line and the end of the step. What Slurm leaves then is scancel's to
/// clean; the plugin must not add to it.
#[test]
fn killing_at_any_moment_leaves_a_usable_cluster() {
    let Some(cluster) = Cluster::two_nodes("chaos") else { return };
    cluster.sandbox.plugstack(&[&format!("optional {} gate=600", library().display())]);
    let mut state = u64::from(std::process::id()) | 1;
    println!("seed {state}");
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..3 * rounds() {
        let victim = ["srun", "palingenesis", "slurmstepd", "sleep"][next(4) as usize];
        let user = if victim == "slurmstepd" { "" } else { "-u trainer" };
        let millis = next(400);
        let what = format!("round {round}: {victim} killed after {millis} ms");
        let said = cluster.sandbox.run_root(&format!(
            "setpriv --reuid trainer --regid trainer --clear-groups srun -Q -N2 -n4 --palingenesis sleep 0.2 \
             >/dev/null 2>&1 & \
             sleep 0.{millis:03}; for i in {{1..20}}; do pkill -KILL -n -x {user} {victim} && echo hit && break; \
             sleep 0.01; done; timeout 5 tail --pid=$! -f /dev/null; scancel -u trainer; kill -TERM $! 2>/dev/null; \
             wait; true"
        ));
        println!("{what}: {}", if said.out.contains("hit") { "hit" } else { "missed" });
        cluster.unharmed(&what);
    }
}
