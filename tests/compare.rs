//! The nodes of a step against each other, from what is read of described machines up
//! to what is said. "Nodes" are trees of files here: what NCCL does on unlike nodes no
//! test without GPUs can show.

mod common;

use std::path::Path;

use common::machine::{Machine, TempTree};
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
