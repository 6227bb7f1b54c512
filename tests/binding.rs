//! Binding on a real Slurm: two ranks whose GPUs are beside each other's CPU
//! exchange their masks before their programs start, and nothing changes where
//! the user chose, or where a rank does not come.
//!
//! The node pretends two sockets of one core, which this machine's two CPUs
//! stand for, and its GPUs are files as the driver and sysfs have them. What one
//! machine cannot show: a second NUMA node, so that a policy for node 1 is only
//! seen not to be set, and that any of it is faster.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use common::crossed::{CROSSED, Cluster, EXCHANGED, Ranks, SLURM_S, STRAIGHT, told};
use common::{Said, container_plugin, fault_library, library};

/// <https://docs.coreweave.com/products/sunk/optimize_workloads/cpu-binding-numa-affinity>:
/// Slurm deals tasks out over sockets in turn, whichever GPU is where.
#[test]
fn ranks_whose_gpus_are_crossed_exchange_their_cpus() {
    let Some(cluster) = Cluster::up("crossed", &CROSSED, &library(), &[]) else { return };
    // What the test rests on: Slurm binds, and the flag decides.
    cluster.two("", "").have(SLURM_S, "without the flag");
    cluster.two("", "--palingenesis").are_quiet().have(EXCHANGED, "crossed");
    cluster.run("srun -Q -N1 -n2 --palingenesis=bind=cpu --gpus-per-node=2 TASK").have(EXCHANGED, "bind=cpu");
    for spec in ["bind=off", "bind=mem", "bind=nic", "off", "bind=mem+nic", "launch=shell"] {
        cluster.two("", &format!("--palingenesis={spec}")).have(SLURM_S, spec);
    }
    // Two nodes have a gate each.
    let ranks = cluster.run("srun -Q -N2 -n4 --ntasks-per-node=2 --gpus-per-node=2 --palingenesis TASK");
    let found: Vec<&str> = ranks.cpus.values().map(String::as_str).collect();
    assert_eq!(found.len(), 4, "{ranks:#?}");
    assert!([[0, 1], [2, 3]].iter().all(|node| found[node[0]] != found[node[1]]), "{ranks:#?}");
    let ranks = cluster.run("salloc -Q -N1 -n2 --gpus-per-node=2 srun --palingenesis TASK");
    ranks.have(EXCHANGED, "in a job of salloc");
    cluster.machine(&STRAIGHT);
    cluster.two("", "--palingenesis").are_quiet().have(SLURM_S, "straight");
}

/// <https://github.com/NVIDIA/srt-slurm/issues/326>: masks that the user chose and
/// a program beneath then lost.
#[test]
fn what_the_user_chose_stays() {
    let Some(cluster) = Cluster::up("chosen", &CROSSED, &library(), &[]) else { return };
    for option in [
        "--cpu-bind=map_cpu:0,1",
        "--cpu-bind map_cpu:0,1",
        "--cpu_bind=mask_cpu:0x1,0x2",
        "--cpu-b=map_cpu:0,1",
        "--cpu-bind=cores",
        "--cpu-bind=rank",
    ] {
        cluster.two("", &format!("--palingenesis {option}")).have(SLURM_S, option);
        // Without ours it is the same.
        cluster.two("", option).have(SLURM_S, option);
    }
    cluster.two("", "--palingenesis --cpu-bind=none").have(["0-1", "0-1"], "--cpu-bind=none");
    cluster.two("", "--palingenesis --cpu-bind=map_cpu:1,0").have(EXCHANGED, "map_cpu:1,0");
    // To print it is no choice.
    cluster.two("", "--palingenesis --cpu-bind=verbose").have(EXCHANGED, "--cpu-bind=verbose");
    // The command's own words are not srun's.
    let line = "srun -Q -N1 -n2 --gpus-per-node=2 --palingenesis sh -c TASK sh --cpu-bind=none --mem-bind=local";
    cluster.run(line).have(EXCHANGED, line);

    cluster.two("SLURM_CPU_BIND=map_cpu:0,1", "--palingenesis").have(SLURM_S, "SLURM_CPU_BIND=map_cpu");
    cluster.two("SLURM_CPU_BIND=none", "--palingenesis").have(["0-1", "0-1"], "SLURM_CPU_BIND=none");
    cluster.two("SLURM_CPU_BIND=quiet", "--palingenesis").have(EXCHANGED, "SLURM_CPU_BIND=quiet");
}

/// <https://github.com/nebius/soperator/pull/2316>: in a step Slurm sets
/// SLURM_CPU_BIND itself, and an srun inside takes it for an option. In a batch
/// script there is none.
#[test]
fn the_bind_variables_of_an_outer_step_are_obeyed_and_a_batch_script_has_none() {
    let Some(cluster) = Cluster::up("nested", &CROSSED, &library(), &[]) else { return };
    // The inner step has the outer one's masks, which are those of two tasks.
    let line = "srun -Q -N1 -n2 --gpus-per-node=2 sh -c '[ $SLURM_PROCID = 1 ] ||
                srun -Q -N1 -n2 --gpus-per-node=2 --overlap --palingenesis TASK'";
    cluster.run(line).have(SLURM_S, "nested");
    let script = "cd; printf '%s\\n' '#!/bin/sh' 'env | grep SLURM_CPU_BIND' \
                  'srun -Q --palingenesis TASK' >job
                  sbatch -Q -N1 -n2 --gpus-per-node=2 --parsable -o out job >id
                  for i in {1..300}; do [ $(grep -cs '|' out) = 2 ] && break; sleep 0.1; done; cat out";
    let ranks = cluster.run(script);
    assert!(!ranks.said.out.contains("SLURM_CPU_BIND"), "{ranks:#?}");
    ranks.have(EXCHANGED, "in a batch script");
}

/// Without binding every task has all of the step's CPUs.
#[test]
fn where_slurm_binds_nothing_each_rank_gets_the_cpus_beside_its_gpu() {
    let conf = ["--conf", "TaskPlugin=task/none"];
    let Some(cluster) = Cluster::up("unbound", &CROSSED, &library(), &conf) else { return };
    let all = ["0-1", "0-1"];
    cluster.two("", "").have(all, "without the flag");
    cluster.two("", "--palingenesis").are_quiet().have(EXCHANGED, "crossed");
    cluster.two("", "--palingenesis=exclusive").are_quiet().have(EXCHANGED, "exclusive");
    cluster.two("", "--palingenesis=bind=off").have(all, "bind=off");
    // A rank alone on its node meets nobody.
    let ranks = cluster.run("srun -Q -N2 -n2 --gpus-per-node=1 --palingenesis TASK");
    ranks.have(["1", "1"], "one rank on each node");
    // One task for all GPUs of its node starts what spreads over its CPUs.
    let ranks = cluster.run("srun -Q -N2 -n2 --gpus-per-node=2 --palingenesis TASK");
    ranks.have(all, "one task for two GPUs");
    // Both GPUs beside one CPU, which is too few for two ranks.
    cluster.machine(&[("0000:01:00.0", 1), ("0000:81:00.0", 1)]);
    for spec in ["", "=exclusive"] {
        let ranks = cluster.two("", &format!("--palingenesis{spec}"));
        ranks.have(all, "one CPU for two ranks");
        let [line] = told(&ranks.said.err)[..] else { panic!("{ranks:#?}") };
        assert!(line.contains("1 of its 2 CPUs (0-1) are beside GPU") && line.contains("too few"), "{line}");
    }
}

/// One line for each step and node.
#[test]
fn the_node_s_log_says_what_was_bound_and_whether_all_ranks_met() {
    let Some(cluster) = Cluster::up("log", &CROSSED, &fault_library(), &[]) else { return };
    let socket = cluster.sandbox.syslog();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let site = cluster.sandbox.dir().join("site.toml");
    fs::write(&site, "log = \"debug\"\n").unwrap();
    fs::set_permissions(&site, PermissionsExt::from_mode(0o644)).unwrap();
    for (fault, spec, expected) in [
        ("", "", &[" bound=cpu", " gpus=2 nics=0 ", " facts_ms=", " met=\"all\" "][..]),
        ("", "bind=off", &[" bound=- ", " gpus=2 "]),
        ("fault=task_init:kill:rank=1", "bind=cpu", &[" bound=- ", " met=\"local rank 1 ended before the start\" "]),
    ] {
        cluster.load(&format!("config={} {fault}", site.display()));
        cluster.try_run(&format!("srun -Q -N1 -n2 --gpus-per-node=2 --palingenesis={spec} TASK"));
        let mut buffer = [0; 4096];
        let length = socket.recv(&mut buffer).unwrap();
        let line = String::from_utf8_lossy(&buffer[..length]);
        assert!(expected.iter().all(|part| line.contains(part)), "{expected:?} are not all in: {line}");
        assert_eq!(line.contains(" met="), spec != "bind=off", "{line}");
    }
}

/// What is handed over is known to one component only where the step has several.
#[test]
fn the_user_s_choice_is_known_in_every_component_of_a_het_step() {
    let Some(cluster) = Cluster::up("het", &CROSSED, &library(), &common::FOR_HET_STEPS) else { return };
    let two = "-N1 -n2 --gpus-per-node=2";
    for (first, second, expected) in
        [("", "", EXCHANGED), ("--cpu-bind=map_cpu:0,1", "--cpu-bind=map_cpu:0,1", SLURM_S)]
    {
        let line = format!("srun -Q --palingenesis {two} {first} TASK : {two} {second} TASK");
        let ranks = cluster.run(&line);
        let found: Vec<&str> = ranks.cpus.values().map(String::as_str).collect();
        assert_eq!(found, [expected, expected].concat(), "{line}: {ranks:#?}");
    }
}

/// set_mempolicy(2) survives execve: the program finds it.
#[test]
fn memory_is_preferred_beside_the_cpus_and_a_node_that_is_not_there_is_left() {
    let Some(cluster) = Cluster::up("memory", &CROSSED, &library(), &[]) else { return };
    let policies = |environment: &str, options: &str| {
        let ranks = cluster.two(environment, options);
        ranks.policies.into_values().collect::<Vec<_>>()
    };
    // Rank 1 runs on CPU 0 now, of node 0; this machine has no node 1 for rank 0.
    let preferred = policies("", "--palingenesis").pop().unwrap();
    assert!(preferred == "prefer (many):0" || preferred == "prefer:0", "{preferred}");
    for (options, expected) in [
        ("", ["default", "default"]),
        ("--palingenesis", ["default", preferred.as_str()]),
        ("--palingenesis=mem=bind", ["default", "bind:0"]),
        ("--palingenesis=mem=off", ["default", "default"]),
        ("--palingenesis=bind=off", ["default", "default"]),
        ("--palingenesis=bind=cpu", ["default", "default"]),
        // The masks stay, and the memory goes with them.
        ("--palingenesis --cpu-bind=cores", [preferred.as_str(), "default"]),
        ("--palingenesis=bind=mem", [preferred.as_str(), "default"]),
        ("--palingenesis --mem-bind=local", ["bind:0", "bind:0"]),
        ("--mem-bind=local", ["bind:0", "bind:0"]),
        ("--palingenesis --mem-bind=none", ["default", "default"]),
    ] {
        assert_eq!(policies("", options), expected, "{options}");
    }
    assert_eq!(policies("SLURM_MEM_BIND=none", "--palingenesis"), ["default", "default"]);

    // get_mempolicy(2) itself: MPOL_PREFERRED_MANY is 5, MPOL_PREFERRED 1.
    let python = "import ctypes, os\n\
                  mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 64)()\n\
                  code = ctypes.CDLL(None).syscall(239, ctypes.byref(mode), nodes, ctypes.c_ulong(4096), None, 0)\n\
                  print(os.environ['RANK'], code, mode.value, nodes[0], sorted(os.sched_getaffinity(0)))\n";
    if cfg!(target_arch = "x86_64") && Path::new("/usr/bin/python3").exists() {
        fs::write(cluster.sandbox.dir().join("home/policy.py"), python).unwrap();
        let file = cluster.sandbox.dir().join("home/policy.py");
        let line =
            format!("srun -Q -N1 -n2 --gpus-per-node=2 --palingenesis /usr/bin/python3 {} | sort", file.display());
        let said = cluster.sandbox.run(&line).ok();
        let mode = if preferred == "prefer:0" { 1 } else { 5 };
        assert_eq!(said.out, format!("0 0 0 0 [1]\n1 0 {mode} 1 [0]\n"), "{said:#?}");
    }
}

/// That rank 1 ended is told, and nothing else.
#[track_caller]
fn rank_1_ended(said: &Said) {
    // Beside what srun says at its end of the rank that failed first.
    let lines: Vec<&str> = told(&said.err).into_iter().filter(|line| line.contains("warning:")).collect();
    let [line] = lines[..] else { panic!("{said:#?}") };
    assert!(line.contains("warning: local rank 1 on n1 ended before the start"), "{line}");
}

/// A rank that ends or hangs before the meeting: the others keep their masks and
/// run, after the deadline once.
#[test]
fn with_one_rank_missing_the_masks_stay_and_the_job_runs() {
    let Some(cluster) = Cluster::up("missing", &CROSSED, &fault_library(), &[]) else { return };
    cluster.two("", "--palingenesis").have(EXCHANGED, "all ranks are there");

    cluster.load("gate=600 fault=task_init:kill:rank=1");
    // Into a file, and a second longer: where a signal ended any task, srun closes its
    // connections at the last one's end and drops what it has not read yet
    // (slurm_step_launch_wait_finish in src/api/step_launch.c: client_io_handler_abort).
    let said = cluster.try_run(
        "cd; rm -f ran; srun -Q -w n1 -N1 -n2 --gpus-per-node=2 --palingenesis sh -c 'TASK >>$HOME/ran; sleep 1'; echo $?; cat ran",
    );
    assert!(said.out.starts_with("137\n"), "{said:#?}");
    rank_1_ended(&said);
    let ranks = Ranks::of(said);
    assert_eq!(ranks.cpus, BTreeMap::from([(0, "0".to_string())]), "{ranks:#?}");

    cluster.load("gate=4 fault=task_init:hang:rank=0");
    let said = cluster.try_run(
        "rm $HOME/ran; srun -Q -w n1 -N1 -n2 --gpus-per-node=2 --palingenesis sh -c 'TASK >$HOME/ran; sleep 100' >$HOME/out 2>&1 &
         start=$(date +%s)
         for i in {1..300}; do grep -qs '|' $HOME/ran && break; sleep 0.1; done
         cat $HOME/ran; echo waited $(( $(date +%s) - start ))
         scancel $(squeue -h -o %A); wait $!; grep palingenesis: $HOME/out",
    );
    let ranks = Ranks::of(said);
    assert_eq!(ranks.cpus, BTreeMap::from([(1, "1".to_string())]), "{ranks:#?}");
    let waited = ranks.said.out.lines().find_map(|line| line.strip_prefix("waited ")).unwrap();
    let waited: u32 = waited.parse().unwrap();
    // The deadline once, not for the meeting and again for the start.
    assert!((3..=7).contains(&waited), "{ranks:#?}");
    let lines: Vec<&str> = told(&ranks.said.out).into_iter().filter(|line| line.contains("warning:")).collect();
    let [line] = lines[..] else { panic!("{ranks:#?}") };
    assert!(line.contains("warning: local rank 0 on n"), "{line}");
    assert!(line.contains(" did not come to the start within 4 s"), "{line}");

    // One that had come is killed while it waits for a slow one. Here it runs on CPU 1.
    cluster.load("gate=600 fault=task_init:sleep-10:rank=0");
    let said = cluster.try_run(
        "cd; rm -f ran; srun -Q -w n1 -N1 -n2 --gpus-per-node=2 --palingenesis sh -c 'TASK >>$HOME/ran; sleep 1' &
         on_cpu_1() { for p in $(pgrep -x palingenesis); do
             grep -qs '^Cpus_allowed_list:.1$' /proc/$p/status && echo $p
         done; }
         for i in {1..300}; do [ -n \"$(on_cpu_1)\" ] && break; sleep 0.1; done
         sleep 2; kill -9 $(on_cpu_1) && echo killed; wait $!; echo $?; cat ran",
    );
    assert!(said.out.starts_with("killed\n137\n"), "{said:#?}");
    let ranks = Ranks::of(said);
    assert_eq!(ranks.cpus, BTreeMap::from([(0, "0".to_string())]), "{ranks:#?}");
    rank_1_ended(&ranks.said);

    // One that refuses stops the others, which wait for it.
    cluster.load("gate=600 fault=task_init:error:rank=1");
    let said = cluster.try_run("srun -Q -w n1 -N1 -n2 --gpus-per-node=2 --palingenesis TASK");
    assert_eq!((said.code, said.ours().len()), (78, 1), "{said:#?}");
    assert!(!said.out.contains('|'), "{said:#?}");
    cluster.load("");
    cluster.two("", "--palingenesis").have(EXCHANGED, "afterwards");
}

/// <https://github.com/NVIDIA/pyxis/issues/73>: masks and policies survive a
/// container plugin's setns and the program's execve, whether it comes before ours
/// or after.
#[test]
fn they_hold_in_a_container() {
    let Some(plugin) = container_plugin(&common::slurm_headers()) else { return };
    let Some(cluster) = Cluster::up("container", &CROSSED, &library(), &[]) else { return };
    if !common::user_namespaces() {
        return;
    }
    let image = cluster.sandbox.dir().join("home/image");
    fs::create_dir(&image).unwrap();
    fs::write(image.join("environ"), "PATH=/usr/bin:/bin\n").unwrap();
    let (theirs, ours) = (format!("required {}", plugin.display()), cluster.line(""));
    for lines in [[theirs.as_str(), ours.as_str()], [ours.as_str(), theirs.as_str()]] {
        cluster.sandbox.plugstack(&lines);
        let options = format!("--palingenesis --container-image={}", image.display());
        let ranks = cluster.two("", &options);
        ranks.have(EXCHANGED, lines[0]);
        assert!(ranks.policies[&1].starts_with("prefer"), "{ranks:#?}");
        cluster.two("", &format!("{options} --cpu-bind=cores")).have(SLURM_S, lines[0]);
        let inside = cluster.sandbox.run(&format!("srun -Q -N1 -n1 {options} readlink /proc/self/ns/user")).ok().out;
        assert_ne!(inside, cluster.sandbox.run("readlink /proc/self/ns/user").ok().out, "it is no container");
    }
}
