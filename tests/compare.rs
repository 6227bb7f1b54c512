//! The nodes of a step against each other, from what is read of described machines up
//! to what is said. "Nodes" are trees of files here: what NCCL does on unlike nodes no
//! test without GPUs can show.

mod common;

use std::path::Path;

use common::machine::{Machine, TempTree};
use common::{Sandbox, library, open_folder};
use palingenesis::config::{Settings, Source};
use palingenesis::facts::machine::Now;
use palingenesis::facts::straggler::Snapshot;
use palingenesis::facts::{Environment, NodeFacts, Step, TaskFacts};
use palingenesis::plan::preflight::compare::compare;
use palingenesis::plan::preflight::report::NodeReport;
use palingenesis::plan::{Facts, Severity, plan};

const NODES: u32 = 4;

/// The report of the leader of the node with this rank, on the machine below `root`,
/// as it arrives at rank 0's node.
fn report(root: &Path, rank: u32, tasks: u32) -> NodeReport {
    let step = Step::described("node[001-004]", &format!("{tasks}(x4)"), rank * tasks, 44, 0).unwrap();
    let settings = Settings::parse("checks=warn", Source::Option).unwrap();
    let mut environment = Environment::default();
    environment.set("SLURM_STEP_GPUS", "0,1,2,3,4,5,6,7");
    let first = Snapshot::read(root);
    let node = NodeFacts::read(root);
    assert_eq!(node.unknown, Vec::<String>::new());
    let task = TaskFacts::described(root, &environment, &node);
    let command = ["python3".to_string(), "train.py".to_string()];
    let facts = Facts { node: &node, task: &task, command: &command, ..Facts::new(&step, &environment) };
    let plan = plan(&facts, &settings).unwrap();
    let now = Now::read(root, &node, &first, None);
    let report = NodeReport::of(&plan).with(&plan, &facts, &settings, &now);
    NodeReport::from_bytes(&report.to_bytes()).unwrap()
}

/// What is said where the node of rank 2 has another tree.
fn said(usual: &Path, odd: &Path, tasks: u32) -> Vec<(&'static str, Severity, String)> {
    let tree = |rank| if rank == 2 { odd } else { usual };
    let reports: Vec<NodeReport> = (0..NODES).map(|rank| report(tree(rank), rank, tasks)).collect();
    compare(&reports).into_iter().map(|found| (found.id, found.severity, found.message)).collect()
}

fn gpus_of(tree: &TempTree) -> Vec<String> {
    let folder = tree.root().join("proc/driver/nvidia/gpus");
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn equal_machines_have_nothing_against_each_other() {
    let mut number = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/machines")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let tree = Machine::load(path.file_stem().unwrap().to_str().unwrap()).tree();
        assert_eq!(said(tree.root(), tree.root(), 4), [], "{}", path.display());
        number += 1;
    }
    assert!(number > 10, "{number}");
}

/// <https://github.com/maccallumlab/meld/issues/114>
#[test]
fn a_node_that_has_lost_a_gpu_is_named() {
    let (usual, odd) = (common::machine::tree("dgx-h100"), common::machine::tree("dgx-h100"));
    let gpus = gpus_of(&odd);
    assert_eq!(gpus.len(), 8);
    std::fs::remove_dir_all(odd.root().join("proc/driver/nvidia/gpus").join(&gpus[5])).unwrap();
    let found = said(usual.root(), odd.root(), 8);
    let message = "node003 shows 7 GPUs, the other 3 show 8 GPUs, for 8 on each node: ranks would have to share a GPU";
    assert!(found.contains(&("nodes-gpus", Severity::Error, message.into())), "{found:#?}");
}

#[test]
fn a_node_with_another_driver_is_named() {
    let (usual, odd) = (common::machine::tree("dgx-h100"), common::machine::tree("dgx-h100"));
    let version = |tree: &TempTree, version: &str| {
        let text = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Mar 16 11:24:05 UTC 2022\n");
        tree.file("proc/driver/nvidia/version", text);
    };
    version(&usual, "550.54.15");
    version(&odd, "515.65.01");
    let message = "node003 has driver 515.65.01, the other 3 have driver 550.54.15";
    assert_eq!(said(usual.root(), odd.root(), 8), [("nodes-gpus", Severity::Warning, message.to_string())]);
}

/// <https://github.com/NVIDIA/nccl/issues/2428>
#[test]
fn a_node_with_a_card_that_is_down_or_slow_is_named() {
    let (usual, odd) = (common::machine::tree("dgx-h100"), common::machine::tree("dgx-h100"));
    let node = NodeFacts::read(odd.root());
    // One that is chosen: the plan's own list tells.
    let hca = report(usual.root(), 0, 8).hca.unwrap();
    let device = hca.trim_start_matches('=').split([',', ':']).next().unwrap().to_string();
    assert!(node.rdma.unwrap().iter().any(|port| port.device == device && port.active));
    let port = format!("sys/class/infiniband/{device}/ports/1");
    let real = odd.root().join(&port).canonicalize().unwrap();
    std::fs::write(real.join("rate"), "100 Gb/sec (2X NDR)\n").unwrap();
    let found = said(usual.root(), odd.root(), 8);
    let rates: Vec<_> = found.iter().filter(|found| found.0 == "nodes-rates").collect();
    assert!(rates.len() == 1 && rates[0].2.contains(&format!("node003 has 100 Gb/s at {device}:1")), "{found:#?}");
    std::fs::write(real.join("state"), "1: DOWN\n").unwrap();
    let found = said(usual.root(), odd.root(), 8);
    let cards: Vec<_> = found.iter().filter(|found| found.0 == "nodes-hcas").collect();
    assert!(cards.len() == 1 && cards[0].2.contains("node003 has 7, the other 3 have 8"), "{found:#?}");
}

/// On a real Slurm of two nodes, each of which has a tree of its own.
#[test]
fn what_differs_is_told_or_refused_before_a_rank_starts() {
    let root = "/tmp/machine";
    let line = format!("optional {} root={root}", library().display());
    let shape = ["--nodes", "2", "--sockets", "1", "--cores", "8", "--gpus", "8", "--namespace-per-node"];
    let Some(sandbox) = Sandbox::up("compare", &[&shape[..], &["--plugstack", &line]].concat()) else { return };
    let tree = TempTree::below(&open_folder());
    Machine::load("dgx-h100").write(&tree);
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Wed Mar 16 11:24:05 UTC 2022\n";
    tree.file("proc/driver/nvidia/version", version);
    let on = |node: &str, line: &str| sandbox.run_as(&["--node", node], line, 60).ok();
    for node in ["n1", "n2"] {
        on(node, &format!("cp -a {} {root}", tree.root().display()));
    }
    let step = |spec: &str| {
        let checks = "gpus-fewer=off,gpus-none=off,memlock=off,nofile=off,shm-size=off,gpus-foreign=off";
        let line = format!(
            "srun -Q -N2 --ntasks-per-node=8 --gpus-per-node=8 --palingenesis={checks},{spec} sh -c 'echo RAN'"
        );
        sandbox.run(&line)
    };
    let between = |said: &common::Said| -> Vec<String> {
        said.err.lines().filter(|line| line.contains("[nodes-") || line.contains("nodes-")).map(String::from).collect()
    };
    let said = step("show").ok();
    assert_eq!((between(&said), said.out.matches("RAN").count()), (vec![], 16), "{said:#?}");

    // Another driver is told once.
    on("n2", &format!("sed -i s/550.54.15/535.104.05/ {root}/proc/driver/nvidia/version"));
    let said = step("on").ok();
    let lines = between(&said);
    let told = "palingenesis: warning: n1 has driver 550.54.15, n2 has driver 535.104.05; ";
    assert!(lines.len() == 1 && lines[0].starts_with(told), "{said:#?}");
    let said = step("nodes-gpus=off").ok();
    assert_eq!(between(&said), [""; 0], "{said:#?}");

    // With fewer GPUs than ranks none starts.
    on("n2", &format!("cd {root}/proc/driver/nvidia/gpus && rm -r $(ls | head -1)"));
    let said = step("on");
    let told = "n1 shows 8 GPUs, n2 shows 7 GPUs, for 8 on each node: ranks would have to share a GPU";
    assert_eq!((said.code, said.out.contains("RAN")), (78, false), "{said:#?}");
    assert!(between(&said).iter().any(|line| line.contains(told)), "{said:#?}");
    let said = step("nodes-gpus=warn").ok();
    assert!(
        between(&said).iter().any(|line| line.contains(told)) && said.out.matches("RAN").count() == 16,
        "{said:#?}"
    );
}

/// <https://github.com/pytorch/pytorch/issues/189245>
#[test]
fn an_old_lock_file_is_told_where_it_lies() {
    let plugstack = format!("required {}", library().display());
    let options = ["--nodes", "2", "--cores", "4", "--namespace-per-node", "--plugstack", &plugstack];
    let Some(sandbox) = Sandbox::up("locks", &options) else { return };
    let uid = sandbox.run("id -u").ok().out.trim().to_string();
    let lock = format!("/tmp/palingenesis-{uid}/torch_extensions/fused/lock");
    let leave = format!("umask 077; mkdir -p $(dirname {lock}); touch -d '2 days ago' {lock}");
    sandbox.run_as(&["--node", "n2"], &leave, 20).ok();
    let said = sandbox.run("srun -Q -N2 --ntasks-per-node=2 --palingenesis sh -c 'echo RAN'").ok();
    let lines: Vec<&str> = said.err.lines().filter(|line| line.contains("lock file")).collect();
    let told = format!("palingenesis: warning: an old lock file on n2: {lock} (2 days): ");
    assert!(lines.len() == 1 && lines[0].starts_with(&told) && lines[0].contains("[cache-lock-old]"), "{said:#?}");
    assert!(lines[0].contains(&format!("rm {lock}")), "{said:#?}");
    assert_eq!(said.out, "RAN\n".repeat(4));
    // It is left there.
    sandbox.run_as(&["--node", "n2"], &format!("[ -e {lock} ]"), 20).ok();
}
