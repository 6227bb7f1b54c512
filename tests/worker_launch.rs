//! `srun --palingenesis=worker ARGUMENTS` starts palingenesis-worker, and the
//! task is in everything what `srun palingenesis-worker ARGUMENTS` would be:
//! Slurm itself starts it, after TaskProlog and with the user's limits.
//!
//! Here the host is this machine's Slurm; tests/releases.rs has those with
//! spank_prepend_task_argv. What one machine cannot show: a worker that is on
//! some nodes only, since all of them share this machine's files.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::{Said, Sandbox, library, open_folder, program, slurm};

/// Tells what a program can see of how it was started, in the manner of the
/// worker: an argument that was handed over comes first and is removed. Its last
/// argument may ask for something else.
const STAND_IN: &str = r#"#!/bin/bash
[ -z "${PALINGENESIS_WORKER_ARG+set}" ] || set -- "$PALINGENESIS_WORKER_ARG" "$@"
unset PALINGENESIS_WORKER_ARG
export LC_ALL=C
last=${@: -1}
case $last in
exit=*) exit "${last#*=}" ;;
kill=*) kill -"${last#*=}" $$ ;;
stdin) exec /bin/cat ;;
esac
printf 'argument <%q>\n' "$@"
[ "$last" != arguments ] || exit 0
echo "program $0"
echo "directory $PWD umask $(umask) parent $(/bin/cat /proc/$PPID/comm)"
ulimit -S -a
ulimit -H -a
grep -E '^(Cpus_allowed_list|SigBlk|SigIgn|SigCgt|CapEff|Groups|NoNewPrivs|Mems_allowed_list)' /proc/self/status
/bin/ls /proc/self/fd | /bin/sed 's/^/descriptor /'
echo "user $(id -un) $(id -gn)"
/usr/bin/env -0 | tr '\0\n' '\n ' | sort
"#;

/// The stand-in, in a folder of this test's own.
fn stand_in() -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = open_folder().join("worker-launch");
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let (file, new) = (folder.join("palingenesis-worker"), folder.join("new"));
        fs::write(&new, STAND_IN).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, &file).unwrap();
        file
    })
    .clone()
}

/// Two nodes whose slurmd has limits that no user has, and two TaskPrologs.
fn up(name: &str, worker: &str) -> Option<Sandbox> {
    // Building it may replace the library for a moment: before any cluster loads that.
    program("palingenesis-worker");
    // For each cluster its own: a script that is being written cannot be executed.
    let prolog = open_folder().join(format!("worker-launch-prolog-{name}"));
    fs::write(&prolog, "#!/bin/sh\necho export FROM_PROLOG=yes\necho print prolog speaks\necho unset TAKEN\n").unwrap();
    fs::set_permissions(&prolog, fs::Permissions::from_mode(0o755)).unwrap();
    let line = format!("required {} {worker}", library().display());
    let conf = format!("TaskProlog={}", prolog.display());
    Sandbox::up(&format!("worker-launch-{name}"), &["--nodes", "2", "--plugstack", &line, "--conf", &conf])
}

/// What differs from step to step by Slurm's doing.
fn of_the_step(name: &str) -> bool {
    let ids = ["SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "TMPDIR"];
    ids.contains(&name)
        || name.contains("PORT")
        // Of 24.11, and of 26.05.
        || ["SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID"].contains(&name)
        || ["PALINGENESIS_SET", "PALINGENESIS_SPEC", "PALINGENESIS_LAUNCH_ID"].contains(&name)
}

/// What the flag gives every task.
fn of_the_flag(name: &str) -> bool {
    common::tasks::RANK_VARIABLES.contains(&name)
        || ["NCCL_", "TORCH", "TRITON_", "CUDA_", "PALINGENESIS_", "OMP_"].iter().any(|start| name.starts_with(start))
}

/// The lines of what the stand-in says, without those of variables that `but` picks.
fn lines(said: &Said, but: impl Fn(&str) -> bool) -> Vec<&str> {
    let dropped = |line: &str| {
        // With -l the task's number stands before each.
        let line =
            line.split_once(": ").filter(|(label, _)| label.parse::<u32>().is_ok()).map_or(line, |(_, rest)| rest);
        line.split_once('=').is_some_and(|(name, _)| but(name) || of_the_step(name))
    };
    let mut lines: Vec<&str> = said.out.lines().filter(|line| !dropped(line)).collect();
    lines.sort_unstable();
    lines
}

/// Lists that ought to be equal; only what differs is worth reading.
#[track_caller]
fn assert_same(started: &[&str], other: &[&str], what: &str) {
    let only = |a: &[&str], b: &[&str]| -> Vec<String> {
        a.iter().filter(|line| !b.contains(line)).map(|line| line.to_string()).collect()
    };
    assert_eq!(only(started, other), only(other, started), "{what}");
    assert_eq!(started, other, "{what}");
}

#[test]
fn a_task_of_the_worker_is_what_a_plain_run_would_be() {
    let worker = stand_in();
    let Some(sandbox) = up("plain", &format!("worker={}", worker.display())) else { return };
    let worker = worker.display().to_string();
    // The job's name would be the command's first word. A node by name: while the step
    // before is being cleaned up, another one would be chosen.
    // slurmstepd takes the user's soft limits over from srun only after task_init.
    let setup = "cd; umask 027; printf '#!/bin/sh\\necho export FROM_USER_PROLOG=yes\\n' >prolog; chmod +x prolog
                 ulimit -Sn 777; ulimit -Ss 5000; ulimit -Sc 0; export TAKEN=1 KEPT='two  words'";
    let variants = [
        ("-w n1 -n1", "train.toml"),
        ("-N2 -n4 -O --ntasks-per-node=2 -l", "train.toml"),
        ("-w n1 -n1 --task-prolog=$HOME/prolog -D /usr", "-- --resume 'a b' '' \"$(printf 'x\\ny')\" '*' last"),
        ("-w n1 -n1 --export=NONE", "train.toml"),
        ("-w n1 -n1 --export=KEPT", "train.toml 1"),
        ("-w n1 -n1 --cpu-bind=cores", "train.toml"),
        // A program of that name, which a plain command would be.
        ("-w n1 -n1", "true x"),
        ("-w n1 -n1", "'' x"),
        ("-w n1 -n1", "$'tr\\xff\\xfein.toml' $'\\xe4'"),
    ];
    for (options, words) in variants {
        let words = words.strip_prefix("-- ").unwrap_or(words);
        let run = |flag: &str, program: &str, dashes: &str| {
            sandbox.run(&format!("{setup}\nsrun -Q -J same {options} {flag} {dashes} {program} {words}")).ok()
        };
        let dashes = if words.starts_with('-') { "--" } else { "" };
        let (plain, started) = (run("", &worker, ""), run("--palingenesis=worker", "", dashes));
        assert_eq!(started.err, plain.err, "{options} {words}");
        assert_same(&lines(&started, of_the_flag), &lines(&plain, of_the_flag), &format!("{options} {words}"));
        assert!(plain.out.contains("FROM_PROLOG=yes") && plain.out.contains("prolog speaks"), "{}", plain.out);
        assert!(plain.out.contains("(-n) 777\n"), "{}", plain.out);
        assert!(!started.out.contains("PALINGENESIS_WORKER_ARG"), "{}", started.out);
        // The flag's own variables are those of a command that is the worker already.
        let named = run("--palingenesis=worker", &worker, "");
        // Each launch has a secret of its own.
        let secret = |name: &str| name == "PALINGENESIS_STORE_KEY";
        assert_same(&lines(&started, secret), &lines(&named, secret), &format!("{options} {words}"));
        assert!(named.out.contains("RANK=0") || options.contains("-l"), "{}", named.out);
    }
}

#[test]
fn exit_codes_signals_and_standard_input_are_the_worker_s() {
    let worker = stand_in();
    let Some(sandbox) = up("exit", &format!("worker={}", worker.display())) else { return };
    for (word, code) in [("exit=0", 0), ("exit=3", 3), ("kill=9", 137), ("kill=15", 143)] {
        let plain = sandbox.run(&format!("srun -Q -N2 -n2 {} train.toml {word}", worker.display()));
        let started = sandbox.run(&format!("srun -Q -N2 -n2 --palingenesis=worker train.toml {word}"));
        assert_eq!((plain.code, started.code), (code, code), "{word}: {started:?}");
        assert!(!started.before_the_end().contains("palingenesis"), "{word}: {started:?}");
    }
    let said = sandbox.run("printf 'first\\nsecond\\n' | srun -Q -n1 --palingenesis=worker train.toml stdin").ok();
    assert_eq!(said.out, "prolog speaks\nfirst\nsecond\n");
    // Without words there is nothing to run, says srun.
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker");
    assert_eq!((said.code, said.out.as_str()), (1, ""), "{said:?}");
    assert!(said.err.contains("No command given"), "{said:?}");
}

#[test]
fn what_is_the_worker_already_or_is_not_to_be_it_is_left_alone() {
    let worker = stand_in();
    let Some(sandbox) = up("alone", &format!("worker={}", worker.display())) else { return };
    let folder = worker.parent().unwrap().display().to_string();
    let arguments = |line: &str| {
        let said = sandbox.run(&format!("PATH=$PATH:{folder}; export OUTER=1; {line}")).ok();
        said.out.replace("prolog speaks\n", "")
    };
    let expected = "argument <train.toml>\nargument <arguments>\n";
    for command in [
        "palingenesis-worker train.toml arguments".to_string(),
        format!("{} train.toml arguments", worker.display()),
        "env A=1 palingenesis-worker train.toml arguments".to_string(),
        "bash -c 'palingenesis-worker train.toml arguments'".to_string(),
    ] {
        for flag in ["worker", "launch=worker", "default"] {
            assert_eq!(
                arguments(&format!("srun -Q -n1 --palingenesis={flag} {command}")),
                expected,
                "{flag} {command}"
            );
        }
    }
    // An argument that an outer worker left behind is not this one's.
    let line = "PALINGENESIS_WORKER_ARG=old srun -Q -n1 --palingenesis palingenesis-worker train.toml arguments";
    assert_eq!(arguments(line), expected);
    assert_eq!(arguments("srun -Q -n1 --palingenesis=worker,launch=native echo plain"), "plain\n");
    assert_eq!(arguments("srun -Q -n1 --palingenesis echo plain"), "plain\n");
    assert_eq!(
        arguments("srun -Q -n1 --palingenesis=launch=worker echo arguments"),
        "argument <echo>\nargument <arguments>\n"
    );
    // For every srun of a job.
    let nested = "salloc -Q -n1 --palingenesis=worker srun -Q train.toml arguments";
    assert_eq!(arguments(nested), expected);
}

#[test]
fn show_says_which_program_is_started_and_why() {
    let worker = stand_in();
    let Some(sandbox) = up("show", &format!("worker={}", worker.display())) else { return };
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker,show train.toml arguments").ok();
    let row = said.err.lines().find(|line| line.contains("train.toml")).unwrap_or_else(|| panic!("{}", said.err));
    // How a program comes before the command: spank.h of 23.11 and later has a function.
    let how = if slurm() >= (23, 11) { "spank_prepend_task_argv" } else { "PALINGENESIS_WORKER_ARG" };
    for part in [worker.to_str().unwrap(), "profile worker", "worker= of plugstack.conf", how] {
        assert!(row.contains(part), "{part}: {row}");
    }
    assert!(said.err.contains("worker shape, profile worker"), "{}", said.err);
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker,show --  --hf-token=s3cr3t arguments").ok();
    assert!(said.err.contains("--hf-token=(hidden)") && !said.err.contains("s3cr3t"), "{}", said.err);
}

#[test]
fn the_real_worker_gets_the_argument() {
    let worker = program("palingenesis-worker");
    let Some(sandbox) = up("real", &format!("worker={}", worker.display())) else { return };
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker -- --version").ok();
    assert_eq!(said.out, format!("prolog speaks\npalingenesis-worker {}\n", env!("CARGO_PKG_VERSION")));
    let plain = sandbox.run(&format!("srun -Q -n1 {} train.toml", worker.display()));
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker train.toml");
    assert_eq!((said.code, &said.out), (plain.code, &plain.out), "{said:?}");
    let line = |err: &str| err.lines().find(|line| line.starts_with("palingenesis-worker: error: ")).map(String::from);
    assert!(line(&said.err).is_some_and(|line| line.contains("configuration file train.toml: ")), "{said:?}");
    assert_eq!(line(&said.err), line(&plain.err), "{said:?}");
}

#[test]
fn without_an_admin_s_word_it_is_found_in_the_task_s_path() {
    let folder = stand_in().parent().unwrap().display().to_string();
    let Some(sandbox) = up("path", "") else { return };
    if installed() {
        return;
    }
    let said =
        sandbox.run(&format!("PATH=.:$PATH:{folder} srun -Q -n1 --palingenesis=worker,show train.toml arguments"));
    let said = said.ok();
    assert_eq!(said.out, "prolog speaks\nargument <train.toml>\nargument <arguments>\n");
    assert!(said.err.contains("first in PATH"), "{}", said.err);
    // palingenesis explain, asked in a step, says the same.
    let explain = format!("{} explain --spec worker -- train.toml a", program("palingenesis").display());
    let said = sandbox.run(&format!("PATH=$PATH:{folder} srun -Q -n1 {explain}")).ok();
    let row = said.out.lines().find(|line| line.contains("train.toml")).unwrap_or_else(|| panic!("{}", said.out));
    assert!(row.contains(&format!("{folder}/palingenesis-worker")) && row.contains("first in PATH"), "{row}");
    // Where it is not found, only the plugin knows whether plugstack.conf names one.
    let said = sandbox.run(&format!("srun -Q -n1 {explain}")).ok();
    assert!(said.out.contains("decided on each node"), "{}", said.out);
}

/// A worker that packages installed on this machine would be found first.
fn installed() -> bool {
    let found = ["/usr/bin", "/usr/local/bin"].iter().any(|dir| Path::new(dir).join("palingenesis-worker").exists());
    if found {
        println!("skipped: palingenesis-worker is installed on this machine");
    }
    found
}

#[test]
fn without_a_worker_no_task_runs_and_each_node_says_where_it_looked() {
    let Some(sandbox) = up("none", "worker=/nowhere/palingenesis-worker") else { return };
    if installed() {
        return;
    }
    let said = sandbox.run("cd; touch true; srun -Q -N2 -n4 -O --ntasks-per-node=2 --palingenesis=worker true");
    assert_eq!((said.code, said.out.as_str()), (78, ""), "{said:?}");
    let mut ours = said.ours();
    ours.sort_unstable();
    assert_eq!(ours.len(), 2, "{said:?}");
    for (line, node) in ours.iter().zip(["n1", "n2"]) {
        let start = format!("palingenesis: error: palingenesis-worker is not on {node}: looked at ");
        assert!(line.starts_with(&start), "{line}");
        for part in
            ["/nowhere/palingenesis-worker (not there)", "/usr/bin/palingenesis-worker", "install it on every node"]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    // There, but not to be executed: named, wherever it is.
    let said = sandbox.run(
        "mkdir -p ~/bin; echo >~/bin/palingenesis-worker; PATH=$PATH:$HOME/bin srun -Q -n1 --palingenesis=worker x",
    );
    assert_eq!(said.code, 78, "{said:?}");
    assert!(said.err.contains("/bin/palingenesis-worker (may not be executed)"), "{said:?}");
    assert_eq!(
        sandbox.run("for i in {1..50}; do [ -z \"$(squeue -h)\" ] && break; sleep 0.2; done; sinfo -h -o %T").out,
        "idle\n"
    );
}

#[test]
fn multi_prog_is_refused_once() {
    let worker = stand_in();
    let Some(sandbox) = up("multi", &format!("worker={}", worker.display())) else { return };
    let run = |flag: &str| {
        sandbox.run(&format!("cd; printf '0 /bin/echo zero\\n* /bin/echo more %%t\\n' >multi.conf; srun -Q -N2 -n2 {flag} --multi-prog multi.conf"))
    };
    for flag in ["--palingenesis=worker", "--palingenesis=launch=worker"] {
        let said = run(flag);
        assert_eq!(said.code, 78, "{said:?}");
        assert!(!said.out.contains("zero") && !said.out.contains("more"), "{said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(
            ours[0].starts_with("palingenesis: error: --multi-prog") && ours[0].contains("launch=native"),
            "{said:?}"
        );
    }
    for flag in ["--palingenesis=worker,launch=native", "--palingenesis"] {
        let said = run(flag).ok();
        assert!(said.out.contains("zero") && said.out.contains("more 1"), "{said:?}");
    }
    // A word of the command is no option of srun.
    let said = sandbox.run("srun -Q -n1 --palingenesis=worker x --multi-prog arguments").ok();
    assert!(said.out.contains("argument <--multi-prog>"), "{said:?}");
}
