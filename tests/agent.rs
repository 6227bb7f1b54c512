//! torchrun on a real Slurm: one launcher on each node, no flag of its own, and
//! ranks that really meet; and launchers that do not fit their step.
//!
//! The nodes are network namespaces of one machine, each with a host name and an
//! address of its own, and their GPUs are pretended: what that cannot show is
//! NCCL, two networks, and launchers that start minutes apart.

mod common;

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use common::{Sandbox, library};
use palingenesis::plan::launcher;

/// Slurm counts n2 before n10; by the order of characters n10 comes first.
const NODES: &str = "n2,n10";

/// Each rank gives its share of a sum that only ranks of its own job can make.
const TRAIN: &str = r#"
import os, pathlib, sys, time
import torch
import torch.distributed as dist

own, other = sys.argv[1:3]
dist.init_process_group("gloo", init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0 and other != "-":
    # Both jobs are there before either adds up.
    pathlib.Path.home().joinpath("there-" + own).touch()
    for _ in range(600):
        if pathlib.Path.home().joinpath("there-" + other).exists():
            break
        time.sleep(0.1)
    else:
        sys.exit("the other job never came")
number = torch.tensor([float(own) * 10**rank])
dist.all_reduce(number)
place = "local rank %s on %s" % (os.environ["LOCAL_RANK"], os.environ["SLURMD_NODENAME"])
print("job %s: rank %d of %d (%s): sum %d." % (own, rank, world, place, number.item()), flush=True)
dist.destroy_process_group()
"#;

fn cluster(name: &str) -> Option<Sandbox> {
    let plugstack = format!("required {}", library().display());
    let options = ["--names", NODES, "--gpus", "4", "--sockets", "1", "--cores", "8", "--namespace-per-node"];
    Sandbox::up(&format!("agent-{name}"), &[&options[..], &["--plugstack", &plugstack]].concat())
}

/// A cluster whose Python has torch, with the program above at ~/train.py.
fn cluster_with_torch(name: &str) -> Option<Sandbox> {
    let slurm = cluster(name)?;
    let torch = "/usr/bin/python3 -c 'import importlib.util as u; raise SystemExit(not u.find_spec(\"torch\"))'";
    if slurm.run(torch).code != 0 {
        println!("skipped: /usr/bin/python3 has no torch; install it with: apt-get install python3-torch");
        return None;
    }
    fs::write(slurm.dir().join("home/trainer/train.py"), TRAIN).unwrap();
    Some(slurm)
}

/// torchrun of PyTorch 1.13 under Python 3.11 fails at its ranks' output unless it
/// writes it to files too: a fault of its own.
const EXPORT: &str = "cd ~; export PET_TEE=1 PET_REDIRECTS=1 OMP_NUM_THREADS=1";

/// <https://github.com/pytorch/pytorch/issues/137402>: rank 0 on another node than
/// MASTER_ADDR. <https://github.com/wenet-e2e/wespeaker/issues/171>: two runs on
/// one node in one rendezvous.
#[test]
fn torchrun_needs_no_flag_and_two_jobs_on_the_same_nodes_do_not_meet() {
    let Some(slurm) = cluster_with_torch("static") else { return };
    let srun =
        "srun --palingenesis -N2 --ntasks-per-node=1 --gpus-per-node=2 /usr/bin/python3 -m torch.distributed.run";
    let line = format!(
        "{EXPORT}
         {srun} train.py 1 1000 >one 2>&1 & one=$!
         {srun} train.py 1000 1 >two 2>&1 & two=$!
         wait $one; a=$?; wait $two; b=$?
         cat one two
         exit $((a + b))"
    );
    let said = slurm.run_as(&[], &line, 150).ok();
    for (job, sum) in [(1, 1111), (1000, 1_111_000)] {
        for rank in 0..4 {
            // As many ranks on each node as the job has GPUs there, in Slurm's order.
            let (local, node) = (rank % 2, if rank < 2 { "n2" } else { "n10" });
            let expected = format!("job {job}: rank {rank} of 4 (local rank {local} on {node}): sum {sum}.");
            assert!(said.out.contains(&expected), "'{expected}' is not in:\n{}", said.out);
        }
    }
    let ours = said.out.lines().filter(|line| line.contains("palingenesis:"));
    assert_eq!(ours.filter(|line| !line.contains("[kill-on-bad-exit]")).count(), 0, "{}", said.out);
}

/// <https://github.com/pytorch/pytorch/issues/79388>: the endpoint is rank 0's name
/// on another network, in which torch does not recognise its own host; left to
/// itself nobody hosts the store (measured: RendezvousConnectionError on both).
#[test]
fn c10d_on_request_and_the_user_s_flag_wins() {
    let Some(slurm) = cluster_with_torch("c10d") else { return };
    // Appended to, since the nodes have this file mounted.
    let mut hosts = fs::File::options().append(true).open(slurm.dir().join("etc/hosts")).unwrap();
    for (number, node) in NODES.split(',').enumerate() {
        let address = format!("10.98.0.{}", number + 1);
        slurm.run_as(&["--as-root", "--node", node], &format!("ip addr add {address}/24 dev eth0"), 20).ok();
        writeln!(hosts, "{address} {node}-ib0").unwrap();
    }
    let line = format!(
        "{EXPORT}
         srun --palingenesis=rdzv=c10d,suffix=-ib0 -N2 --ntasks-per-node=1 --gpus-per-node=2 \
            /usr/bin/python3 -m torch.distributed.run --nproc_per_node=1 train.py 1 -"
    );
    let said = slurm.run_as(&[], &line, 120).ok();
    // Which node has rank 0 is c10d's choice; two GPUs are visible on each.
    for rank in 0..2 {
        let expected = format!("job 1: rank {rank} of 2 (local rank 0 on n");
        assert!(said.out.contains(&expected), "'{expected}' is not in:\n{}\n{}", said.out, said.err);
    }
    assert_eq!(said.out.matches(": sum 11.").count(), 2, "{}", said.out);
    for node in NODES.split(',') {
        assert!(said.out.contains(&format!("on {node})")), "{}", said.out);
    }
}

/// A torchrun that records its environment instead.
const TORCHRUN: &str = "ln -s RECORD FOLDER/torchrun";

/// <https://github.com/pytorch/pytorch/issues/116974>,
/// <https://github.com/openvla/openvla/issues/175>
#[test]
fn launchers_that_do_not_fit_the_step_are_refused_with_the_cure() {
    let Some(slurm) = cluster("refused") else { return };
    for (command, parts) in [
        ("srun --palingenesis -N2 --ntasks-per-node=4 FOLDER/torchrun a", ["torchrun", "--ntasks-per-node=1"]),
        ("srun --palingenesis -N2 --ntasks-per-node=1 FOLDER/torchrun --standalone a", ["--standalone", "2 nodes"]),
        ("srun --palingenesis -N2 --ntasks-per-node=1 env A=1 FOLDER/torchrun --nnodes=1 a", ["--nnodes=1", "2 nodes"]),
    ] {
        let run = slurm.try_record(&format!("{TORCHRUN}; {command}"));
        assert_eq!((run.said.code, run.labels().len()), (78, 0), "{command}: {:#?}", run.said);
        let lines = run.said.ours();
        // One line where srun can tell; one from each node otherwise.
        assert!((1..=2).contains(&lines.len()), "{command}: {lines:?}");
        for part in parts {
            assert!(lines[0].contains(part), "{command}: '{part}' is not in {}", lines[0]);
        }
    }
}

#[test]
fn a_launcher_in_shell_text_is_warned_of_only() {
    let Some(slurm) = cluster("text") else { return };
    let run = slurm.record(&format!(
        "{TORCHRUN}
         srun --palingenesis -N2 --ntasks-per-node=4 bash -c '[ $SLURM_LOCALID = 0 ] && FOLDER/torchrun a || true'"
    ));
    let [line] = run.said.ours()[..] else { panic!("not one line: {:#?}", run.said) };
    assert!(line.contains("warning") && line.contains("launcher-shape"), "{line}");
    // The tasks stay ranks.
    assert_eq!(run.tasks("a").iter().map(|task| task.number("RANK")).collect::<Vec<_>>(), [0, 4]);
    // With one task on each node it is an agent, and nobody is warned.
    let run = slurm.record(&format!(
        "{TORCHRUN}; srun --palingenesis -N2 --ntasks-per-node=1 bash -c 'true; exec FOLDER/torchrun a'"
    ));
    assert!(run.said.ours().is_empty(), "{:#?}", run.said);
    for (rank, task) in run.tasks("a").iter().enumerate() {
        assert_eq!((task.number("PET_NNODES"), task.number("PET_NODE_RANK")), (2, rank as u32), "{task}");
        assert_eq!((task.get("PET_MASTER_ADDR"), task.get("RANK")), (Some("n2"), None), "{task}");
        assert_eq!(task.get("PET_MASTER_PORT"), task.get("MASTER_PORT"), "{task}");
        assert_eq!(task.get("SLURMD_NODENAME"), Some(["n2", "n10"][rank]), "{task}");
    }
}

#[test]
fn a_script_with_a_launcher_is_an_agent_by_option() {
    let Some(slurm) = cluster("script") else { return };
    let run = slurm.record(
        "printf '#!/bin/sh\\nexec RECORD a\\n' >FOLDER/train.sh; chmod +x FOLDER/train.sh
         export PET_NPROC_PER_NODE=3
         srun --palingenesis=launch=agent -N2 --ntasks-per-node=1 --gpus-per-node=4 FOLDER/train.sh",
    );
    for (rank, task) in run.tasks("a").iter().enumerate() {
        // The user's stays.
        assert_eq!(task.number("PET_NPROC_PER_NODE"), 3, "{task}");
        assert_eq!(task.number("PET_NODE_RANK"), rank as u32, "{task}");
    }
}

/// Command lines of torchrun; PyTorch 1.13 knows `_` only.
const FLAGS: [&str; 16] = [
    "train.py",
    "--nnodes=2 train.py",
    "--nnodes 1:4 train.py --nnodes=9",
    "--nproc_per_node 8 --node_rank=1 train.py",
    "--nproc=4 train.py",
    "--nn 2 --node 1 train.py",
    "--master_a=n1 --master_p 29500 train.py",
    "--rdzv_backend=c10d --rdzv_e n1:29400 --rdzv_i x --rdzv_c is_host=1,a=2 train.py",
    "--standalone train.py --standalone",
    "--stand --nproc_per_node=gpu train.py",
    "-m --nnodes=2 package.train --node_rank 1",
    "-r 3 -t3 --nnodes=2 train.py",
    "-r3 -t 0:1,1:2 --max_restarts 1 --nnodes=2 train.py",
    "--nnodes=1 --nnodes=2 train.py",
    "--no_python --nnodes=2 ./train.sh --standalone",
    "--run_path --role trainer --log_dir /tmp --nnodes=2 /train.py",
];

/// What torchrun's own parser makes of each line that it is given.
const PARSER: &str = "
import sys
from torch.distributed.run import get_args_parser
for line in sys.argv[1:]:
    read = get_args_parser().parse_args(line.split())
    names = ['nnodes', 'nproc_per_node', 'node_rank', 'master_addr', 'master_port',
             'rdzv_backend', 'rdzv_endpoint', 'rdzv_id', 'rdzv_conf', 'standalone']
    print('|'.join(str(getattr(read, name)) for name in names))
";

#[test]
fn flags_are_read_as_torchrun_reads_them() {
    let mut python = Command::new("timeout");
    python.args(["60", "/usr/bin/python3", "-c", PARSER]).args(FLAGS).stdin(Stdio::null());
    // Its defaults, not those of whoever runs the tests.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PET_")) {
        python.env_remove(name);
    }
    let output = python.output().expect("timeout is there");
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(why.contains("No module named 'torch'") || why.contains("No such file"), "{why}");
        println!("skipped: /usr/bin/python3 has no torch; install it with: apt-get install python3-torch");
        return;
    }
    let read = String::from_utf8(output.stdout).unwrap();
    assert_eq!(read.lines().count(), FLAGS.len(), "{read}");
    for (flags, read) in FLAGS.into_iter().zip(read.lines()) {
        let words: Vec<String> = format!("torchrun {flags}").split(' ').map(String::from).collect();
        let found = launcher::find(&words).unwrap();
        assert!(found.certain && found.flags_certain, "{flags}");
        let value = |flag: &str, default: &str| found.value(flag).unwrap_or(default).to_string();
        let ours = [
            value("nnodes", "1:1"),
            value("nproc-per-node", "1"),
            value("node-rank", "0"),
            value("master-addr", "127.0.0.1"),
            value("master-port", "29500"),
            value("rdzv-backend", "static"),
            value("rdzv-endpoint", ""),
            value("rdzv-id", "none"),
            value("rdzv-conf", ""),
            if found.has("standalone") { "True".into() } else { "False".into() },
        ];
        assert_eq!(ours.join("|"), read, "{flags}");
    }
}
