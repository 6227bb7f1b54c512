//! Machines with one file gone or filled with what does not belong there. Whatever
//! is read then, nothing panics, and what is decided is sound.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use palingenesis::facts::{CpuSet, NodeFacts, Topology, netdevs, rdma};

use super::Random;
use super::common::machine::{Machine, TempTree};
use super::common::planned::{choice, cyclic, masks_of, plans};

/// Reads as [`NodeFacts::read`] does, but in this process, where a panic shows.
fn read(root: &Path) -> NodeFacts {
    let mut unknown = Vec::new();
    let topology = Topology::read(root, &mut unknown);
    NodeFacts {
        gpu_models: topology.gpus.iter().filter_map(|gpu| gpu.model.clone()).collect(),
        rdma: rdma::ports(root).ok().flatten(),
        netdevs: netdevs::devices(root).ok().flatten(),
        topology,
        unknown,
        ..NodeFacts::default()
    }
}

/// What holds whatever was read.
fn check(node: &NodeFacts, masks: &[CpuSet], what: &str) {
    let topology = &node.topology;
    let choice = choice(node);
    assert_eq!(choice.verdicts.len(), topology.nics.len(), "{what}");
    assert_eq!((choice.of_gpu.len(), choice.distances.len()), (topology.gpus.len(), topology.gpus.len()), "{what}");
    for nic in choice.of_gpu.iter().flatten() {
        assert!(choice.verdicts[*nic].used, "{what}: a GPU has a card that is not used");
    }
    assert!(choice.verdicts.iter().all(|verdict| verdict.used || !verdict.why.is_empty()), "{what}");
    if masks.is_empty() {
        return;
    }
    let plans = plans(node, masks, &[], "");
    let step = masks.iter().fold(CpuSet::EMPTY, |all, mask| all.or(mask));
    let after = masks_of(&plans, masks);
    let mut both = (masks.to_vec(), after.clone());
    both.0.sort();
    both.1.sort();
    assert_eq!(both.0, both.1, "{what}: masks are not the same any more");
    assert!(after.iter().all(|mask| mask.is_within(&step) && !mask.is_empty()), "{what}: a CPU outside the step");
    let lists: BTreeSet<Option<&str>> = plans.iter().map(|plan| plan.value("NCCL_IB_HCA")).collect();
    assert_eq!(lists.len(), 1, "{what}: {lists:?}");
    let nodes: BTreeSet<u32> = topology.nodes.iter().map(|node| node.id).collect();
    for policy in plans.iter().filter_map(|plan| plan.binding.memory.as_ref()) {
        assert!(policy.nodes.iter().all(|node| nodes.contains(&node)), "{what}: {policy:?}");
    }
}

/// What does not belong into a file of the kernel's.
fn garbage(random: &mut Random) -> Vec<u8> {
    match random.below(9) {
        0 => Vec::new(),
        1 => b"\n".to_vec(),
        2 => b"4294967296\n".to_vec(),
        3 => b"-2\n".to_vec(),
        4 => b"0-16383,99999999999999999999\n".to_vec(),
        5 => b"7-3\n".to_vec(),
        6 => vec![b'9'; 70_000],
        7 => "0000:zz:00.0 \u{e9}\u{0} %s\n".repeat(50).into_bytes(),
        _ => (0..200).map(|_| random.below(256) as u8).collect(),
    }
}

/// Per-CPU files are alike for each CPU; those of two are taken.
fn is_one_of_many(path: &str) -> bool {
    let rest = path.split_once("system/cpu/cpu").map(|(_, rest)| rest);
    rest.is_some_and(|rest| !rest.starts_with("0/") && !rest.starts_with("9/"))
}

fn damage(machine: &Machine, every: usize, seed: u64) -> usize {
    let tree = machine.tree();
    let root = tree.root().to_path_buf();
    let masks = cyclic(machine, machine.gpus().len());
    let mut random = Random(seed);
    let places: Vec<PathBuf> =
        tree.entries().into_iter().filter(|path| !is_one_of_many(&path.to_string_lossy())).collect();
    let mut tried = 0;
    check(&read(&root), &masks, "as it is");
    for place in places {
        if random.below(every) != 0 {
            continue;
        }
        // All ranks now and then: the node's part is what the files decide.
        let masks = if tried % 8 == 0 { masks.as_slice() } else { &[] };
        let what = |how: &str| format!("{}: {} {how}", machine.name, place.display());
        let link = fs::read_link(&place).ok();
        let before = if link.is_none() { fs::read(&place).unwrap() } else { Vec::new() };
        fs::remove_file(&place).unwrap();
        check(&read(&root), masks, &what("is gone"));
        let text = garbage(&mut random);
        match random.below(3) {
            // A link to itself: the kernel says ELOOP.
            0 if link.is_some() => symlink(&place, &place).unwrap(),
            _ => fs::write(&place, &text).unwrap(),
        }
        check(&read(&root), masks, &what(&format!("holds {}", String::from_utf8_lossy(&text[..text.len().min(40)]))));
        fs::remove_file(&place).unwrap();
        match link {
            Some(target) => symlink(target, &place).unwrap(),
            None => fs::write(&place, before).unwrap(),
        }
        tried += 1;
    }
    tried
}

/// Every file and link of three machines.
#[test]
fn any_file_of_a_machine_may_be_gone_or_hold_anything() {
    for (seed, name) in [(1, "azure-nd40rs-v2"), (2, "aws-p4d-24xlarge"), (3, "gb200-nvl72-tray")] {
        let tried = damage(&Machine::load(name), 1, seed);
        println!("{name}: {tried} files and links");
        assert!(tried > 150, "{name}: {tried}");
    }
}

/// Some of each of the others; PALINGENESIS_SOAK makes it more.
#[test]
fn some_files_of_the_other_machines_as_well() {
    let rounds: usize = std::env::var("PALINGENESIS_SOAK").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    for (number, machine) in Machine::all().into_iter().enumerate() {
        let tried = damage(&machine, (60 / rounds).max(1), number as u64 + 10);
        println!("{}: {tried} files and links", machine.name);
    }
}

/// Folders of classes that are files, empty, or gone.
#[test]
fn any_folder_of_a_machine_may_be_gone_or_a_file() {
    let machine = Machine::load("dgx-1v");
    let masks = cyclic(&machine, 8);
    for folder in [
        "proc",
        "proc/driver",
        "proc/driver/nvidia",
        "proc/driver/nvidia/gpus",
        "sys",
        "sys/class",
        "sys/class/infiniband",
        "sys/class/net",
        "sys/class/dmi",
        "sys/bus",
        "sys/bus/pci",
        "sys/bus/pci/devices",
        "sys/devices",
        "sys/devices/system",
        "sys/devices/system/cpu",
        "sys/devices/system/node",
        "sys/devices/system/node/node1",
    ] {
        for file in [false, true] {
            let tree: TempTree = machine.tree();
            fs::remove_dir_all(tree.root().join(folder)).unwrap();
            if file {
                fs::write(tree.root().join(folder), "\u{0}").unwrap();
            }
            check(&read(tree.root()), &masks, &format!("{folder}, a file: {file}"));
            // In the children that a node's facts are really read in: the same.
            check(&NodeFacts::read(tree.root()), &masks, &format!("{folder}, a file: {file}"));
        }
    }
}
