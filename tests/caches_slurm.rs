//! Caches on a real Slurm of two nodes with a /tmp each and one home.
//!
//! The home is a local file system here, so the warning that other nodes
//! probably do not see it is wrong, and expected: one machine has no file server.

mod common;

use common::tasks::Task;
use common::{Sandbox, library};

const SHARED: [(&str, &str); 4] =
    [("HF_HOME", "huggingface"), ("NEMO_HOME", "nemo"), ("TORCH_HOME", "torch"), ("UV_CACHE_DIR", "uv")];
const LOCAL: [(&str, &str); 4] = [
    ("TRITON_CACHE_DIR", "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ("TORCH_EXTENSIONS_DIR", "torch_extensions"),
    ("CUDA_CACHE_PATH", "cuda"),
];

fn up(name: &str) -> Option<Sandbox> {
    // Before any cluster loads the library, which building the command renews.
    common::program("palingenesis");
    let plugstack = format!("required {}", library().display());
    let options = ["--nodes", "2", "--cores", "4", "--namespace-per-node", "--plugstack", &plugstack];
    Sandbox::up(&format!("caches-{name}"), &options)
}

#[track_caller]
fn assert_values(tasks: &[Task], root: &str, expected: &[(&str, &str)]) {
    for task in tasks {
        for (name, folder) in expected {
            assert_eq!(task.get(name), Some(format!("{root}/{folder}").as_str()), "{name}:\n{task}");
        }
    }
}

/// Owner and mode of directories, as a node sees them.
fn owners(slurm: &Sandbox, node: &str, path: &str) -> String {
    slurm.run_as(&["--as-root", "--node", node], &format!("stat -c '%U %a %F' {path}"), 20).ok().out
}

/// A directory's name may hold what ends a word of SPEC.
#[test]
fn one_directory_for_all_nodes_and_one_on_each() {
    let Some(slurm) = up("shared") else { return };
    let home = slurm.run("echo $HOME").ok().out.trim().to_string();
    let uid = slurm.run("id -u").ok().out.trim().to_string();
    let own = format!("/tmp/palingenesis-{uid}");
    let root = format!("{home}/my caches, all #1 100%");
    let run = slurm
        .record(&format!("cd; srun -N2 --ntasks-per-node=2 --palingenesis '--palingenesis-cache={root}' RECORD a"));
    assert_eq!(run.tasks("a").len(), 4);
    assert_values(run.tasks("a"), &root, &SHARED);
    assert_values(run.tasks("a"), &own, &LOCAL);
    for task in run.tasks("a") {
        // Cache and working directory are on one file system.
        assert_eq!((task.get("UV_LINK_MODE"), task.get("XDG_CACHE_HOME")), (None, None));
    }
    let warnings: Vec<&str> = run.said.err.lines().collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    for (line, name) in warnings.iter().zip(["HF_HOME", "NEMO_HOME"]) {
        assert!(line.contains(&format!("warning: {name}={root}/")) && line.contains("[shared-local]"), "{line}");
    }
    let private = "trainer 700 directory\n";
    assert_eq!(owners(&slurm, "n1", &format!("'{root}' '{root}'/*")), private.repeat(5));
    assert_eq!(slurm.run(&format!("find '{root}' -type f")).ok().out, "");
    for node in ["n1", "n2"] {
        assert_eq!(owners(&slurm, node, &format!("{own} {own}/*")), private.repeat(5), "{node}");
    }

    // Given to sbatch and taken over by each srun in it.
    let batch = slurm.batch(
        &format!("-N2 --ntasks-per-node=2 --palingenesis=shared-local=off '--palingenesis-cache={home}/b, c'"),
        1,
        "srun RECORD inner
         srun --palingenesis-cache=$HOME/other RECORD own",
    );
    assert_values(batch.tasks("inner"), &format!("{home}/b, c"), &SHARED);
    assert_values(batch.tasks("own"), &format!("{home}/other"), &SHARED);
    assert_eq!((batch.tasks("inner").len(), batch.tasks("own").len()), (4, 4));

    // In SPEC; with values of the user's; where there are no ranks.
    let run = slurm.record(
        "cd
         export HF_HOME=$HOME/hf TRITON_CACHE_DIR=/tmp/t
         srun -n2 -N1 --palingenesis=cache=$HOME/c1 RECORD kept
         unset HF_HOME TRITON_CACHE_DIR
         srun -n1 -N1 --palingenesis=cache=$HOME/c2,launch=shell RECORD shell
         srun -n1 -N1 --palingenesis RECORD bare
         [ ! -e $HOME/c1/huggingface ] && [ ! -e /tmp/t ]",
    );
    for task in run.tasks("kept") {
        assert_eq!(task.get("HF_HOME"), Some(format!("{home}/hf").as_str()));
        assert_eq!(task.get("TRITON_CACHE_DIR"), Some("/tmp/t"));
    }
    assert_values(run.tasks("kept"), &format!("{home}/c1"), &SHARED[1..]);
    assert_values(run.tasks("kept"), &own, &LOCAL[1..]);
    assert_values(run.tasks("shell"), &format!("{home}/c2"), &SHARED);
    run.task("shell").is_no_rank();
    for (name, _) in SHARED {
        assert_eq!(run.task("bare").get(name), None, "{name} without cache=");
    }
    assert_values(run.tasks("bare"), &own, &LOCAL);

    // uv is told to copy where it could not link.
    let run = slurm.record(
        "cd
         srun -n2 -N1 --palingenesis=cache=/dev/shm/c RECORD apart
         srun -n2 -N1 --palingenesis=cache=$HOME/c3 --chdir=/tmp RECORD elsewhere
         export UV_LINK_MODE=symlink
         srun -n2 -N1 --palingenesis=cache=/dev/shm/c RECORD own",
    );
    let modes = |label| run.tasks(label).iter().map(|task| task.get("UV_LINK_MODE")).collect::<Vec<_>>();
    assert_eq!(modes("apart"), [Some("copy"); 2]);
    assert_eq!(modes("own"), [Some("symlink"); 2]);
    // Each node's /tmp is a file system of its own.
    assert_eq!(modes("elsewhere"), [Some("copy"); 2]);
}

#[test]
fn no_job_starts_on_a_cache_that_it_cannot_use() {
    let Some(slurm) = up("refused") else { return };
    let uid = slurm.run("id -u").ok().out.trim().to_string();
    slurm.run_root("mkdir -p /etc/closed; touch ~trainer/file").ok();
    for (spec, parts) in [
        ("cache=/etc/closed/me", ["cache=/etc/closed/me cannot be used on ", "may not make files in /etc/closed/me"]),
        ("cache=/proc/me", ["cache=/proc/me cannot be used on ", "name another directory with cache="]),
        ("cache=$HOME/file", ["cannot be used on ", "/file is no directory"]),
        ("local=/etc/closed", ["local=/etc/closed cannot be used on ", "may not make files in /etc/closed"]),
    ] {
        let said = slurm.run(&format!("srun -N2 --ntasks-per-node=2 --palingenesis={spec} sh -c 'echo COMMAND-RAN'"));
        assert_eq!((said.code, said.out.as_str()), (78, ""), "{spec}: {said:?}");
        let mut ours = said.ours();
        ours.sort_unstable();
        assert_eq!(ours.len(), 2, "one line for each node: {said:?}");
        for (line, node) in ours.iter().zip(["n1", "n2"]) {
            assert!(line.starts_with("palingenesis: error: "), "{line}");
            assert!(line.contains(&format!("cannot be used on {node}: ")), "{line}");
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
    }
    // <https://github.com/NVIDIA/pyxis/issues/46>: made from an empty variable.
    for (environment, option, part) in [
        ("", "--palingenesis=cache=/", "root directory"),
        ("", "--palingenesis=cache=//hf", "was a variable in it empty?"),
        ("", "--palingenesis --palingenesis-cache=hf", "not absolute"),
        ("", "--palingenesis --palingenesis-cache=", "it is empty"),
        ("HF_HOME=/HF_HOME", "--palingenesis", "HF_HOME=/HF_HOME: the variable it was made from was empty"),
    ] {
        let said = slurm.run(&format!("{environment} srun -N1 -n2 {option} sh -c 'echo COMMAND-RAN'"));
        assert_eq!((said.code, said.out.as_str(), said.ours().len()), (78, "", 1), "{option}: {said:?}");
        assert!(said.err.contains(part), "{said:?}");
    }

    // No flag: said where it stands, and not where an srun with the flag may follow.
    let said = slurm.run("srun -N2 -n2 --palingenesis-cache=$HOME/alone sh -c 'echo $HF_HOME.'").ok();
    assert_eq!((said.out.as_str(), said.ours().len()), (".\n.\n", 1), "{said:?}");
    assert!(said.err.contains("warning: --palingenesis-cache alone does nothing; add --palingenesis"), "{said:?}");
    for line in [
        "salloc -Q -N1 --palingenesis-cache=$HOME/alone srun -n1 true",
        "srun -N1 -n1 --palingenesis=off --palingenesis-cache=$HOME/alone true",
        "[ ! -e ~/alone ]; PALINGENESIS= srun -N1 -n1 --palingenesis-cache=$HOME/alone true; [ -e ~/alone ]",
    ] {
        assert_eq!(slurm.run(line).ok().ours(), [""; 0], "{line}");
    }

    // One node only cannot: the reason is that node's.
    let on = |node: &str, line: &str| slurm.run_as(&["--as-root", "--node", node], line, 20).ok();
    on("n2", "own=/tmp/palingenesis-$(id -u trainer); rm -rf $own; ln -sT /etc $own");
    let said = slurm.run("srun -N2 --ntasks-per-node=2 --palingenesis=local=/tmp sleep 0");
    assert_eq!(said.code, 78, "{said:?}");
    let link = format!("local=/tmp cannot be used on n2: /tmp/palingenesis-{uid} is a symbolic link");
    assert!(said.ours().len() == 1 && said.err.contains(&link), "{said:?}");
    assert!(!on("n2", "ls /etc").out.contains("triton"));

    // Nobody asked for that directory: the compilers keep their own. $TMPDIR goes
    // before it.
    let run = slurm.record(
        "cd; mkdir tmp
         srun -w n2 -n2 --palingenesis RECORD left
         srun -w n2 -n1 --palingenesis=show RECORD shown
         TMPDIR=$HOME/tmp srun -w n2 -n2 --palingenesis RECORD tmpdir
         TMPDIR=/nowhere srun -w n1 -n2 --palingenesis RECORD nowhere
         stat -c %a tmp/palingenesis-*/triton",
    );
    assert!(run.said.err.contains("no directory of the node can be used: /tmp/palingenesis-"), "{}", run.said.err);
    assert!(run.tasks("left").iter().all(|task| LOCAL.iter().all(|(name, _)| task.get(name).is_none())));
    let home = slurm.run("echo $HOME").ok().out.trim().to_string();
    assert_values(run.tasks("tmpdir"), &format!("{home}/tmp/palingenesis-{uid}"), &LOCAL);
    assert_values(run.tasks("nowhere"), &format!("/tmp/palingenesis-{uid}"), &LOCAL);
    assert_eq!(run.said.out, "700\n");
}

/// explain looks and makes nothing; in a step it shows what the step was given.
#[test]
fn explain_shows_the_directories_and_makes_none() {
    let Some(slurm) = up("explain") else { return };
    let program = common::program("palingenesis").display().to_string();
    let uid = slurm.run("id -u").ok().out.trim().to_string();
    let said = slurm.run(&format!(
        "cd; export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 \
                 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1 SLURMD_NODENAME=n1 SLURM_NTASKS=1 \
                 SLURM_STEP_NUM_NODES=1 SLURM_JOB_NODELIST=n1 SLURM_GTIDS=0 SLURM_NNODES=1 SLURM_TASKS_PER_NODE=1
             {program} explain --json --spec cache=$HOME/new || exit
             {program} explain --spec cache=/proc/new; echo $?
             [ ! -e new ] && [ ! -e /tmp/palingenesis-{uid} ]"
    ));

    assert!(said.out.contains("/new/huggingface") && said.out.contains("TRITON_CACHE_DIR"), "{said:?}");
    assert!(said.out.ends_with("78\n"), "{said:?}");
    assert!(said.err.contains("cache=/proc/new cannot be used on n1: "), "{said:?}");

    let run = slurm.record(&format!(
        "cd; srun -N1 -n1 --palingenesis=cache=/dev/shm/c sh -c '{program} explain --json >explained; exec RECORD a'
         cat explained"
    ));
    let task = run.task("a");
    let plan: serde_json::Value = serde_json::from_str(&run.said.out).unwrap();
    let value = |name: &str| {
        let list = plan["env"].as_array().unwrap().iter();
        list.filter(|variable| variable["name"] == name).find_map(|variable| variable["value"].as_str())
    };
    assert_eq!(task.get("UV_LINK_MODE"), Some("copy"));
    for name in SHARED.iter().chain(&LOCAL).map(|(name, _)| *name).chain(["UV_LINK_MODE"]) {
        assert_eq!(value(name), task.get(name), "{name}");
    }
}
