//! The rank variables in every form of launch, on a real Slurm, compared with
//! what Slurm itself tells each task (SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID,
//! SLURM_STEP_TASKS_PER_NODE, `scontrol show hostnames`) and with layouts known
//! beforehand.
//!
//! The nodes are several slurmd of one machine with pretended CPUs. What that
//! cannot show: how a real network looks up names (see rendezvous.rs for a
//! network per node), and binding to CPUs, which the layouts do not need.

mod common;

use common::Sandbox;

/// Three nodes with room for every step of a test at once.
fn cluster(name: &str) -> Option<Sandbox> {
    cluster_of(name, "32", &[])
}

fn het_cluster(name: &str) -> Option<Sandbox> {
    cluster_of(name, "32", &common::FOR_HET_STEPS)
}

fn cluster_of(name: &str, cores: &str, options: &[&str]) -> Option<Sandbox> {
    let plugstack = format!("required {}", common::library().display());
    let nodes = "node001,node002,node003";
    let all = ["--names", nodes, "--sockets", "2", "--cores", cores, "--plugstack", &plugstack];
    Sandbox::up(name, &[&all, options].concat())
}

/// <https://github.com/sehoffmann/dmlcloud/issues/39>: `1(x2)` was read as a number.
#[test]
fn one_task_on_each_of_two_nodes() {
    let Some(slurm) = cluster("one-each") else { return };
    let run = slurm.record("srun --palingenesis -N2 -n2 RECORD a");
    let tasks = run.tasks("a");
    assert_eq!(tasks[0].get("SLURM_STEP_TASKS_PER_NODE"), Some("1(x2)"));
    assert_eq!(slurm.check(tasks).to_string(), "node001 0; node002 1");
    assert_eq!(run.said.ours(), [""; 0]);
}

/// <https://github.com/Benzoin96485/Enerzyme/pull/107>: counts of the job were
/// preferred to those of the step.
#[test]
fn a_step_smaller_than_its_job() {
    let Some(slurm) = cluster("smaller") else { return };
    let run = slurm.batch(
        "-N3 --ntasks-per-node=2",
        1,
        "srun --palingenesis -N2 -n2 RECORD small
         srun --palingenesis RECORD whole",
    );
    let tasks = run.tasks("small");
    for task in tasks {
        // What misleads: these two are the job's.
        assert_eq!(task.get("SLURM_NTASKS_PER_NODE"), Some("2"));
        assert_eq!(task.get("SLURM_JOB_NODELIST"), Some("node[001-003]"));
        let elsewhere = |(name, value): &(&str, &str)| !name.starts_with("SLURM") && value.contains("node003");
        assert_eq!(task.iter().find(elsewhere), None);
    }
    assert_eq!(slurm.check(tasks).to_string(), "node001 0; node002 1");
    assert_eq!(slurm.check(run.tasks("whole")).to_string(), "node001 0,1; node002 2,3; node003 4,5");
}

/// <https://github.com/mila-iqia/mila-docs/pull/245>: the local index was
/// computed as rank modulo devices.
/// <https://github.com/oumi-ai/oumi/pull/2020>: the task's number was taken for
/// the node's.
#[test]
fn cyclic_plane_and_full_nodes() {
    // Slurm's layouts follow from the number of CPUs.
    let Some(slurm) = cluster_of("eight-cpus", "4", &[]) else { return };
    let run = slurm.record(
        "srun --palingenesis -N2 -n5 -m cyclic RECORD two && srun --palingenesis -N3 -n7 -m cyclic -c2 RECORD three",
    );
    assert_eq!(slurm.check(run.tasks("two")).to_string(), "node001 0,2,3,4; node002 1");
    assert_eq!(slurm.check(run.tasks("three")).to_string(), "node001 0,3,5,6; node002 1,4; node003 2");

    let run = slurm.record(
        "srun --palingenesis -N2 --ntasks-per-node=4 -m plane=2 RECORD plane &&
         srun --palingenesis -N2 --ntasks-per-node=8 RECORD full",
    );
    assert_eq!(slurm.check(run.tasks("plane")).to_string(), "node001 0,1,4,5; node002 2,3,6,7");
    let full = run.tasks("full");
    assert_eq!(slurm.check(full).to_string(), "node001 0,1,2,3,4,5,6,7; node002 8,9,10,11,12,13,14,15");
    assert!(full.iter().all(|task| task.number("NODE_RANK") < 2));
}

#[test]
fn uneven_tasks_per_node() {
    let Some(slurm) = cluster("uneven") else { return };
    let run = slurm.record("srun --palingenesis -N3 -n5 RECORD a");
    let tasks = run.tasks("a");
    let counts: Vec<&str> = tasks.iter().map(|task| task.get("LOCAL_WORLD_SIZE").unwrap()).collect();
    assert_eq!(tasks[0].get("SLURM_STEP_TASKS_PER_NODE"), Some("3,1(x2)"));
    assert_eq!(counts, ["3", "3", "3", "1", "1"]);
    slurm.check(tasks);
}

/// <https://github.com/EleutherAI/gpt-neox/pull/1069>: SLURM_NTASKS was missing
/// in a script that gives nodes only.
#[test]
fn a_batch_script_without_a_number_of_tasks() {
    let Some(slurm) = cluster("no-tasks") else { return };
    let run = slurm.batch(
        "",
        1,
        "#SBATCH -N3 --palingenesis
         RECORD script
         srun RECORD step",
    );
    let script = run.task("script");
    assert_eq!((script.get("SLURM_NTASKS"), script.get("SLURM_NPROCS")), (None, None));
    script.is_untouched();
    assert_eq!(slurm.check(run.tasks("step")).to_string(), "node001 0; node002 1; node003 2");
    // Beside the note on what a step without -K does.
    let mut ours = run.said.out.lines().filter(|line| line.contains("palingenesis"));
    assert!(ours.all(|line| line.ends_with(" [kill-on-bad-exit]")), "{}", run.said.out);
}

#[test]
fn the_option_of_sbatch_reaches_its_sruns_and_not_its_script() {
    let Some(slurm) = cluster("sbatch") else { return };
    let run = slurm.batch(
        "",
        1,
        "#SBATCH -N2 --ntasks-per-node=2 --palingenesis=port=21111
         RECORD script
         srun RECORD inherited
         srun --palingenesis=off RECORD off
         srun --palingenesis=port=22222 RECORD other
         srun --palingenesis RECORD plain
         PALINGENESIS=port=23333 srun RECORD variable",
    );
    let script = run.task("script");
    // Slurm gives the script the variables of a first task.
    assert_eq!(script.get("SLURM_PROCID"), Some("0"));
    script.is_untouched();
    assert_eq!(slurm.check(run.tasks("inherited")).port, 21111);
    assert_eq!(run.tasks("off").len(), 4);
    run.tasks("off").iter().for_each(|task| task.is_untouched());
    assert_eq!(slurm.check(run.tasks("other")).port, 22222);
    assert_ne!(slurm.check(run.tasks("plain")).port, 21111);
    // The option comes before the variable, also where sbatch had it.
    assert_eq!(slurm.check(run.tasks("variable")).port, 21111);
    // Beside the note on what a step without -K does.
    let mut ours = run.said.out.lines().filter(|line| line.contains("palingenesis"));
    assert!(ours.all(|line| line.ends_with(" [kill-on-bad-exit]")), "{}", run.said.out);
}

/// SLURM_EXPORT_ENV=NONE reaches the inner srun.
#[test]
fn a_batch_script_without_the_users_environment() {
    let Some(slurm) = cluster("sbatch-none") else { return };
    let run = slurm.batch("-N2 -n2 --export=NONE --palingenesis", 1, "RECORD script\nsrun RECORD step");
    run.task("script").is_untouched();
    assert_eq!(slurm.check(run.tasks("step")).to_string(), "node001 0; node002 1");
}

/// <https://github.com/Lightning-AI/pytorch-lightning/issues/20776>: a step was
/// taken for a shell because the job's name is that of one.
#[test]
fn in_an_allocation_of_any_name() {
    let Some(slurm) = cluster("salloc") else { return };
    for name in ["interactive", "bash"] {
        let run = slurm.record(&format!(
            "salloc -N2 -n4 -J {name} bash -c 'RECORD shell; srun --palingenesis RECORD step; srun RECORD without'"
        ));
        let tasks = run.tasks("step");
        assert!(tasks.iter().all(|task| task.get("SLURM_JOB_NAME") == Some(name)));
        assert_eq!(slurm.check(tasks).to_string(), "node001 0,1,2; node002 3");
        run.task("shell").is_untouched();
        run.tasks("without").iter().for_each(|task| task.is_untouched());
    }
    let run = slurm.record(
        "salloc --palingenesis -N2 -n2 bash -c 'RECORD shell; srun RECORD step; srun --palingenesis=off RECORD off'",
    );
    run.task("shell").is_untouched();
    slurm.check(run.tasks("step"));
    run.tasks("off").iter().for_each(|task| task.is_untouched());
}

#[test]
fn the_flag_as_a_variable() {
    let Some(slurm) = cluster("variable") else { return };
    let run = slurm.record(
        "PALINGENESIS= srun -n2 RECORD empty
         PALINGENESIS=port=21234 srun -n2 RECORD spec
         PALINGENESIS=fsdp PALINGENESIS_OPT_PORT=21235 srun -n2 RECORD key
         PALINGENESIS_OPT_PORT=21236 srun --palingenesis -n2 RECORD flag
         PALINGENESIS_OPT_PORT=21236 srun --palingenesis=port=21237 -n2 RECORD both
         PALINGENESIS_OPT_PORT=21236 srun -n2 RECORD none
         PALINGENESIS=off srun -n2 RECORD off
         PALINGENESIS=port=21234 srun --palingenesis=off -n2 RECORD beaten",
    );
    slurm.check(run.tasks("empty"));
    for (label, port) in [("spec", 21234), ("key", 21235), ("flag", 21236), ("both", 21237)] {
        assert_eq!(slurm.check(run.tasks(label)).port, port, "{label}");
    }
    for label in ["none", "off", "beaten"] {
        assert_eq!(run.tasks(label).len(), 2);
        run.tasks(label).iter().for_each(|task| task.is_untouched());
    }
}

/// <https://github.com/NVIDIA-NeMo/Skills/pull/372>: the first component's
/// address was used for a step of the second.
#[test]
fn the_steps_of_a_heterogeneous_job() {
    let Some(slurm) = het_cluster("het") else { return };
    // Several times: which component's thread of srun comes first is chance.
    let script = "#SBATCH -N1 -n2 -w node001
         #SBATCH hetjob
         #SBATCH -N2 -n4 -w node002,node003
         RECORD script
         srun --palingenesis RECORD first
         srun --palingenesis --het-group=1 RECORD second
         for i in {1..8}; do srun --palingenesis --het-group=0,1 RECORD both$i; done";
    let run = slurm.batch("", 1, script);
    run.task("script").is_untouched();
    assert_eq!(slurm.check(run.tasks("first")).to_string(), "node001 0,1");
    assert_eq!(slurm.check(run.tasks("second")).to_string(), "node002 0,1,2; node003 3");
    for round in 1..=8 {
        let both = run.tasks(&format!("both{round}"));
        assert_eq!(slurm.check(both).to_string(), "node001 0,1; node002 2,3,4; node003 5");
        assert_eq!(both.len(), 6);
    }
}

/// Slurm sorts the nodes of a combined step by name and counts them, in
/// SLURM_NODEID, by component.
#[test]
fn a_heterogeneous_job_whose_first_component_is_on_the_last_node() {
    let Some(slurm) = het_cluster("het-last") else { return };
    let run = slurm.batch(
        "",
        1,
        "#SBATCH -N1 -n2 -w node003
         #SBATCH hetjob
         #SBATCH -N2 -n4 -w node001,node002
         for i in {1..8}; do srun --palingenesis --het-group=0,1 RECORD both$i; done",
    );
    for round in 1..=8 {
        let both = run.tasks(&format!("both{round}"));
        assert_eq!(both[0].get("SLURM_STEP_NODELIST"), Some("node[001-003]"));
        assert_eq!(both[0].get("SLURM_STEP_TASKS_PER_NODE"), Some("3,1,2"));
        assert_eq!(slurm.check(both).to_string(), "node003 0,1; node001 2,3,4; node002 5");
    }
    let run = slurm.record(
        "srun --palingenesis -N1 -n1 -w node003 RECORD direct : -N1 -n2 -w node001 RECORD direct
         salloc -N3 -n6 srun --palingenesis=master=node003 -N1 -n1 -w node003 RECORD given : -N1 -n2 -w node001 RECORD given",
    );
    assert_eq!(slurm.check(run.tasks("direct")).to_string(), "node003 0; node001 1,2");
    assert_eq!(slurm.check(run.tasks("given")).to_string(), "node003 0; node001 1,2");
    // In one allocation no variable tells the components apart. Rank 0 sees
    // that the others would look elsewhere.
    let run = slurm
        .try_record("salloc -N3 -n6 srun --palingenesis -N1 -n1 -w node003 RECORD a : -N1 -n2 -w node001 RECORD a");
    let line = run.said.ours().into_iter().find(|line| line.contains("master=node003"));
    assert!(line.is_some_and(|line| line.contains("rank 0 runs on node003")), "{}", run.said.err);
}

#[test]
fn several_programs_in_one_step() {
    let Some(slurm) = het_cluster("mpmd") else { return };
    let run = slurm.record(
        "salloc -N3 -n6 srun --palingenesis -N1 -n1 RECORD het : -N2 -n2 RECORD het
         for i in 1 2 3 4 5 6 7 8; do
             salloc -Q -N3 -n6 srun -N1 -n1 RECORD later$i : --palingenesis -N2 -n2 RECORD later$i
         done
         printf '0 RECORD multi\n1-3 RECORD multi\n' >FOLDER/programs
         srun --palingenesis -N2 -n4 --multi-prog FOLDER/programs",
    );
    assert_eq!(slurm.check(run.tasks("het")).to_string(), "node001 0; node002 1; node003 2");
    // One step, one flag, wherever it stands.
    for i in 1..=8 {
        assert_eq!(slurm.check(run.tasks(&format!("later{i}"))).to_string(), "node001 0; node002 1; node003 2");
    }
    assert_eq!(slurm.check(run.tasks("multi")).to_string(), "node001 0,1,2; node002 3");
}

/// Rank 0 on the second of the step's nodes.
#[test]
fn an_arbitrary_layout() {
    let Some(slurm) = cluster("arbitrary") else { return };
    let run = slurm.record(
        "printf '%s\n' node002 node002 node001 node003 >FOLDER/hosts
         SLURM_HOSTFILE=FOLDER/hosts srun --palingenesis -m arbitrary -n4 RECORD file
         srun --palingenesis -m arbitrary -n3 -w node002,node001,node003 RECORD list",
    );
    let layout = slurm.check(run.tasks("file"));
    assert_eq!((layout.node_of(0), layout.to_string().as_str()), ("node002", "node001 2; node002 0,1; node003 3"));
    let layout = slurm.check(run.tasks("list"));
    assert_eq!((layout.node_of(0), layout.to_string().as_str()), ("node002", "node001 1; node002 0; node003 2"));
}

/// Its hooks run twice then, which must not pass for a step of two components.
#[test]
fn the_plugin_twice_in_plugstack() {
    let line = format!("required {}", common::library().display());
    let Some(slurm) = cluster_of("twice", "32", &[&common::FOR_HET_STEPS[..], &["--plugstack", &line]].concat()) else {
        return;
    };
    let run = slurm.record(
        "srun --palingenesis -m arbitrary -n3 -w node002,node001,node003 RECORD arbitrary
         salloc -N3 -n6 srun --palingenesis -N1 -n1 RECORD het : -N2 -n2 RECORD het",
    );
    assert_eq!(slurm.check(run.tasks("arbitrary")).to_string(), "node001 1; node002 0; node003 2");
    assert_eq!(slurm.check(run.tasks("het")).to_string(), "node001 0; node002 1; node003 2");
}

/// <https://github.com/ROCm/spur/issues/875>: a step of part of the nodes was
/// treated as the whole job.
#[test]
fn steps_on_chosen_nodes_of_a_job() {
    let Some(slurm) = cluster("chosen") else { return };
    let run = slurm.record(
        "salloc -N3 --ntasks-per-node=2 bash -c '
            srun --palingenesis -N1 -n2 -w node003 RECORD named
            srun --palingenesis -N1 -n1 -r1 RECORD relative
            srun --palingenesis -N2 -n2 -x node001 RECORD without
            srun --palingenesis -N2 -n2 RECORD fewer'",
    );
    for (label, expected) in [("named", "node003 0,1"), ("relative", "node002 0"), ("without", "node002 0; node003 1")]
    {
        assert_eq!(slurm.check(run.tasks(label)).to_string(), expected, "{label}");
    }
    // 26.05 avoids a node whose last step has just ended (measured with 26.05.5).
    let fewer = slurm.check(run.tasks("fewer")).to_string();
    let avoided = common::slurm() >= (26, 5) && fewer == "node001 0; node003 1";
    assert!(avoided || fewer == "node001 0; node002 1", "{fewer}");
}

/// What the user exports is kept where `--export` lets it through, and not seen
/// where it does not: `--export=NAME=VALUE` leaves a task no HOME and no PATH
/// (<https://github.com/NVIDIA/pyxis/issues/101>), in which a program of Slurm's
/// would not be found (<https://github.com/NVIDIA/enroot/issues/136>).
#[test]
fn every_form_of_export() {
    let Some(slurm) = cluster("export") else { return };
    // 10.99.0.1 is node001, rank 0's node, under a name that we would not choose.
    let user = "MASTER_ADDR=10.99.0.1 MASTER_PORT=29555 NCCL_DEBUG=INFO";
    let line: String = [
        ("all", "--export=ALL"),
        ("more", "--export=ALL,X=1"),
        ("preserve", "-E"),
        ("long", "--preserve-env"),
        ("none", "--export=NONE"),
        ("nil", "--export=NIL"),
        ("set", "--export=X=1"),
        ("some", "--export=MASTER_PORT,NCCL_DEBUG"),
    ]
    .map(|(label, option)| format!("{user} srun --palingenesis {option} -N2 -n2 RECORD {label} || exit\n"))
    .concat();
    let line = format!("{line}settled; env -i /usr/bin/srun --palingenesis -N2 -n2 RECORD nothing");
    let run = slurm.record(&line);
    assert_eq!(run.said.ours(), [""; 0]);
    let of_user = |label: &str| {
        let tasks = run.tasks(label);
        assert_eq!(slurm.check_ranks(tasks).to_string(), "node001 0; node002 1", "{label}");
        let seen = |name| {
            let values: Vec<_> = tasks.iter().map(|task| task.get(name).unwrap().to_string()).collect();
            assert_eq!(values[0], values[1], "{label}: {name}");
            values[0].clone()
        };
        [seen("MASTER_ADDR"), seen("MASTER_PORT"), seen("NCCL_DEBUG")]
    };
    for label in ["all", "more", "preserve", "long"] {
        assert_eq!(of_user(label), ["10.99.0.1", "29555", "INFO"], "{label}");
    }
    for label in ["none", "nil", "set", "nothing"] {
        let [host, _, debug] = of_user(label);
        assert_eq!((host.as_str(), debug.as_str()), ("node001", "WARN"), "{label}");
        slurm.check(run.tasks(label));
    }
    assert_eq!(of_user("some"), ["node001", "29555", "INFO"]);
}

/// A value that no task gets must not stop the step either.
#[test]
fn a_host_that_is_not_exported_is_not_looked_up() {
    let Some(slurm) = cluster("not-exported") else { return };
    let run = slurm.record(
        "export MASTER_ADDR=no-such-host.invalid MASTER_PORT=70000
         srun --palingenesis --export=NONE -N2 -n2 RECORD option
         SLURM_EXPORT_ENV=NONE srun --palingenesis -N2 -n2 RECORD variable
         SRUN_EXPORT_ENV=NONE srun --palingenesis -N2 -n2 RECORD of-srun",
    );
    slurm.check(run.tasks("of-srun"));
    slurm.check(run.tasks("option"));
    slurm.check(run.tasks("variable"));
    let refused = slurm.try_record("MASTER_ADDR=no-such-host.invalid srun --palingenesis -N2 -n2 RECORD a");
    assert_eq!((refused.said.code, refused.labels().len()), (78, 0), "{:#?}", refused.said);
}

/// `-E` keeps SLURM_NTASKS and SLURM_JOB_NUM_NODES as they were before srun.
#[test]
fn stale_counts_that_preserve_env_lets_through() {
    let Some(slurm) = cluster("preserve") else { return };
    let run = slurm.record("SLURM_NTASKS=99 SLURM_JOB_NUM_NODES=3 srun --palingenesis -E -N2 -n2 RECORD a");
    let tasks = run.tasks("a");
    assert!(tasks.iter().all(|task| task.get("SLURM_NTASKS") == Some("99")), "{}", tasks[0]);
    assert_eq!(slurm.check(tasks).to_string(), "node001 0; node002 1");
}

#[test]
fn two_steps_at_once_have_two_ports() {
    let Some(slurm) = cluster("at-once") else { return };
    // Each waits until the other has recorded itself: they do run at once.
    let run = slurm.record(
        "salloc -N2 --ntasks-per-node=2 bash -c '
            step() { srun --palingenesis --exact -N2 -n2 bash -c \"
                RECORD $1; until ls FOLDER/$2.*; do sleep 0.1; done\" >/dev/null 2>&1; }
            step a b & first=$!; step b a && wait $first'",
    );
    let (a, b) = (slurm.check(run.tasks("a")), slurm.check(run.tasks("b")));
    assert_eq!((a.to_string(), b.to_string()), ("node001 0; node002 1".into(), "node001 0; node002 1".into()));
    assert_ne!(a.port, b.port);
}

#[test]
fn every_task_of_a_job_array_is_a_world_of_its_own() {
    let Some(slurm) = cluster("array") else { return };
    let run = slurm.batch(
        "--array=1-2 -N2 -n3",
        2,
        "RECORD script
         srun --palingenesis RECORD $SLURM_ARRAY_TASK_ID",
    );
    assert_eq!(run.tasks("script").len(), 2);
    run.tasks("script").iter().for_each(|task| task.is_untouched());
    let layouts = ["1", "2"].map(|index| slurm.check(run.tasks(index)));
    assert_eq!(layouts[0].to_string(), "node001 0,1; node002 2");
    assert_ne!(layouts[0].port, layouts[1].port);
}

#[test]
fn a_shell_with_a_terminal_has_no_rank_and_starts_ranks() {
    let Some(slurm) = cluster("pty") else { return };
    // Typed when somebody is there to read it: srun throws away what came before.
    let run = slurm.record(
        "echo 'touch FOLDER/ready' >~/.bashrc
         wait_for() { until [ -e FOLDER/$1 ]; do sleep 0.1; done; }
         { wait_for ready
           echo 'RECORD shell'
           echo 'srun --palingenesis --overlap -N2 -n3 -m block RECORD ranks </dev/null'
           echo 'srun --overlap -N1 -n1 RECORD without </dev/null'
           echo 'srun --palingenesis --overlap -N1 -n1 --pty RECORD terminal; touch FOLDER/left'
           wait_for left
           echo exit; } |
            script -qec 'salloc -N2 -n4 srun --palingenesis -N1 -n1 --pty bash' /dev/null",
    );
    let shell = run.task("shell");
    shell.is_no_rank();
    assert_eq!(shell.get("NCCL_DEBUG"), Some("WARN"));
    assert!(shell.get("SLURM_PTY_PORT").is_some(), "no terminal:\n{shell}");
    assert_eq!(slurm.check(run.tasks("ranks")).to_string(), "node001 0,1; node002 2");
    // One node has nothing to be told about a network between nodes, two have.
    assert_eq!(shell.get("NCCL_IB_TIMEOUT"), None);
    assert!(run.tasks("ranks").iter().all(|task| task.get("NCCL_IB_TIMEOUT") == Some("22")));
    run.task("without").is_no_rank();
    run.task("terminal").is_no_rank();
    assert_ne!(run.task("terminal").get("SLURM_PTY_PORT"), shell.get("SLURM_PTY_PORT"));
}

#[test]
fn a_step_inside_a_step_has_its_own_ranks() {
    let Some(slurm) = cluster("nested") else { return };
    let run = slurm.record(
        "NCCL_DEBUG=INFO salloc -N2 --ntasks-per-node=4 srun --palingenesis -N2 -n2 bash -c '
            RECORD outer
            [ $RANK = 1 ] || exit 0
            srun --palingenesis --overlap -N1 -n3 -w node002 RECORD inner
            srun --palingenesis --overlap -N2 -n4 -m block RECORD wide'",
    );
    let outer = slurm.check(run.tasks("outer"));
    let inner = slurm.check(run.tasks("inner"));
    let wide = slurm.check(run.tasks("wide"));
    assert_eq!(outer.to_string(), "node001 0; node002 1");
    assert_eq!(inner.to_string(), "node002 0,1,2");
    assert_eq!(wide.to_string(), "node001 0,1; node002 2,3");
    assert!(outer.port != inner.port && inner.port != wide.port && outer.port != wide.port);
    for task in run.tasks("inner") {
        assert_eq!(task.get("NCCL_DEBUG"), Some("INFO"), "the user's value goes all the way");
        // Ours, for the outer step's two nodes.
        assert_eq!(task.get("NCCL_IB_TIMEOUT"), None);
    }
    assert_eq!(run.said.ours(), [""; 0], "nothing to warn of: the outer values are ours");
}

#[test]
fn ranks_of_the_login_shell_are_replaced_with_one_warning() {
    let Some(slurm) = cluster("inherited") else { return };
    let run = slurm.record(
        "export RANK=7 WORLD_SIZE=99 LOCAL_RANK=5 TORCHELASTIC_RUN_ID=x TORCHELASTIC_USE_AGENT_STORE=True
         srun --palingenesis -N2 --ntasks-per-node=2 RECORD a",
    );
    slurm.check(run.tasks("a"));
    for task in run.tasks("a") {
        assert_eq!(task.iter().find(|(name, _)| name.starts_with("TORCHELASTIC_")), None);
    }
    let [line] = run.said.ours()[..] else { panic!("{}", run.said.err) };
    for name in ["warning", "RANK=7", "WORLD_SIZE=99", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"] {
        assert!(line.contains(name), "{name} is not in: {line}");
    }
}

/// <https://github.com/mlc-ai/pith-train/pull/47>: ranks looked for rank 0 on
/// the machine where srun runs.
#[test]
fn the_host_is_never_that_of_srun() {
    let Some(slurm) = cluster("head") else { return };
    let run = slurm.record("srun --palingenesis -N2 -n2 -x node001 RECORD a");
    for task in run.tasks("a") {
        assert_eq!(task.get("SLURM_LAUNCH_NODE_IPADDR"), Some("10.99.0.254"));
        assert_eq!(task.get("SLURM_SUBMIT_HOST"), Some("head"));
    }
    assert_eq!(slurm.check(run.tasks("a")).to_string(), "node002 0; node003 1");
}

/// Nobody types into `srun bash <script`: its commands are a program.
#[test]
fn a_shell_is_for_a_person_if_it_has_a_terminal() {
    let Some(slurm) = cluster("script") else { return };
    let run = slurm.record(
        "echo 'RECORD piped' | srun --palingenesis -N2 -n2 bash
         echo 'touch FOLDER/ready' >~/.bashrc
         { sleep 2; echo 'RECORD typed'; echo exit; } | script -qec 'srun --palingenesis -N1 -n1 bash' /dev/null",
    );
    assert_eq!(slurm.check(run.tasks("piped")).to_string(), "node001 0; node002 1");
    run.task("typed").is_no_rank();
    assert_eq!(run.task("typed").get("NCCL_DEBUG"), Some("WARN"));
}

/// The step in which salloc starts its shell on a node is no training
/// (slurm.conf(5), LaunchParameters=use_interactive_step).
#[test]
fn the_interactive_step_is_left_alone() {
    let Some(slurm) = cluster_of("interactive", "4", &["--conf", "LaunchParameters=use_interactive_step"]) else {
        return;
    };
    let run = slurm.record(
        "{ sleep 2
           echo 'RECORD shell'
           echo 'srun --overlap -N2 -n2 RECORD ranks </dev/null; touch FOLDER/left'
           until [ -e FOLDER/left ]; do sleep 0.1; done
           echo exit; } | script -qec 'salloc -N2 -n4 --palingenesis' /dev/null",
    );
    run.task("shell").is_untouched();
    assert_eq!(slurm.check(run.tasks("ranks")).to_string(), "node001 0; node002 1");
}

/// `--export` with a list may pass on an outer step's values without their marks.
#[test]
fn outer_values_are_known_as_ours_under_any_export() {
    let Some(slurm) = cluster("marks") else { return };
    let run = slurm.record(
        "salloc -N2 --ntasks-per-node=2 srun --palingenesis -N2 -n2 bash -c '
            [ $RANK = 1 ] || exit 0
            srun --export=MASTER_ADDR,MASTER_PORT,RANK --palingenesis --overlap -N1 -n2 -w node002 RECORD inner'",
    );
    assert_eq!(slurm.check(run.tasks("inner")).to_string(), "node002 0,1");
    assert_eq!(run.said.ours(), [""; 0], "nothing to warn of: the outer values are ours");
}
