//! Memory beside the rank's CPUs, and where it is left alone.

use super::tasks::{Nodes, Task, set};
use crate::facts::CpuSet;

fn two_sockets() -> Nodes {
    Nodes::new(&[(0, "0-7"), (8, "8-15")]).gpus(&[0, 8])
}

/// What rank 0 of two ends up with, as "nodes, how", or why nothing.
fn memory(machine: &Nodes, masks: &[&str], change: impl FnOnce(&mut Task)) -> Result<(CpuSet, bool), String> {
    let plan = machine.rank(0, masks).with(change).bound();
    let (value, why) = plan.row("memory");
    match (&plan.binding.memory, value) {
        (Some(policy), Some(_)) => Ok((policy.nodes.clone(), policy.strict)),
        (None, None) => Err(why.into()),
        other => panic!("{other:?}: {why}"),
    }
}

/// The final mask's nodes, not those of the mask that Slurm set; numbers have gaps
/// on Lassen (0 and 8).
#[test]
fn memory_follows_the_mask_that_the_rank_will_have() {
    let machine = two_sockets();
    assert_eq!(memory(&machine, &["8-11", "0-3"], |_| ()), Ok((set("0"), false)));
    assert_eq!(memory(&machine, &["0-3", "8-11"], |_| ()), Ok((set("0"), false)));
    assert_eq!(memory(&machine, &["0-15", "0-15"], |_| ()), Ok((set("0"), false)));
    // --cpu-bind of the user's: beside the CPUs all the same.
    let bound = |task: &mut Task| task.world.task.bound_by_user.cpu = Some("--cpu-bind=map_cpu:8,0".into());
    assert_eq!(memory(&machine, &["8-11", "0-3"], bound), Ok((set("8"), false)));
    let row = machine.rank(0, &["8-11", "0-3"]).bound();
    assert_eq!(row.row("memory"), (Some("NUMA node 0, preferred"), "where its CPUs are"));
}

/// Bound strictly a program is killed where the node is full
/// (<https://github.com/NVIDIA-NeMo/RL/pull/2613>): only if asked.
#[test]
fn memory_is_bound_for_who_asks_for_it() {
    let strict = |task: &mut Task| task.spec = "mem=bind";
    assert_eq!(memory(&two_sockets(), &["8-11", "0-3"], strict), Ok((set("0"), true)));
}

/// All nodes the mask spans (<https://github.com/sgl-project/sglang/issues/19666>).
#[test]
fn a_mask_on_several_nodes_has_them_all() {
    let machine = Nodes::new(&[(0, "0-3"), (1, "4-7"), (2, "8-11"), (3, "12-15")]).gpus(&[0, 2]);
    assert_eq!(memory(&machine, &["2-5", "8-11"], |_| ()), Ok((set("0-1"), false)));
    let some = |task: &mut Task| task.world.task.memory.allowed = Some(set("1-3"));
    assert_eq!(memory(&machine, &["2-5", "8-11"], some), Ok((set("1"), false)));
}

/// GB200: nodes 2 to 33 are the GPUs' memory and have no CPUs; a program there
/// would take it away from the GPU.
#[test]
fn never_a_node_without_cpus() {
    let machine = Nodes::new(&[(0, "0-71"), (1, "72-143")]).gpus(&[0, 0, 1, 1]);
    let hbm = |task: &mut Task| task.world.task.memory.allowed = Some(set("0-33"));
    assert_eq!(memory(&machine, &["0-35", "36-71", "72-107", "108-143"], hbm), Ok((set("0"), false)));
    // Listed all the same, without CPUs.
    let listed = Nodes::new(&[(0, "0-71"), (1, "72-143"), (2, ""), (3, "")]).gpus(&[0, 0, 1, 1]);
    assert_eq!(memory(&listed, &["0-143"; 4], hbm), Ok((set("0"), false)));
    // Nothing to prefer, but the GPUs' memory to keep out of.
    let wide = ["70-75", "0-9", "80-89", "90-99"];
    let why = memory(&machine, &wide, hbm).unwrap_err();
    assert!(why.contains("on all of its NUMA nodes (0-1)"), "{why}");
    let strict = |task: &mut Task| {
        hbm(task);
        task.spec = "mem=bind";
    };
    assert_eq!(memory(&machine, &wide, strict), Ok((set("0-1"), true)));
}

#[test]
fn memory_is_left_alone_with_a_reason() {
    let machine = two_sockets();
    let why = |change: fn(&mut Task)| memory(&machine, &["8-11", "0-3"], change).unwrap_err();
    for (change, words) in [
        ((|task| task.spec = "bind=cpu") as fn(&mut Task), "bind=cpu"),
        (|task| task.spec = "mem=off", "mem=off"),
        (|task| task.spec = "launch=agent", "launcher"),
        (|task| task.gpus = Err("hidden".into()), "hidden"),
        (|task| task.world.task.memory.has_policy = Some(true), "a memory policy is set already"),
        (|task| task.world.task.memory.has_policy = None, "set already is not known"),
        (|task| task.world.task.memory.allowed = None, "may use is not known"),
        (|task| task.world.task.memory.allowed = Some(set("8")), "on NUMA node 0, and it may use 8 only"),
        (|task| task.world.task.bound_by_user.mem = Some("--mem-bind=local".into()), "--mem-bind=local"),
        (|task| task.world.node.topology.nodes.clear(), "NUMA nodes the CPUs"),
    ] {
        assert!(why(change).contains(words), "{words}: {}", why(change));
    }
    let one_node = Nodes::new(&[(0, "0-15")]).gpus(&[0, 0]);
    assert!(memory(&one_node, &["0-7", "8-15"], |_| ()).unwrap_err().contains("on all of its NUMA nodes (0)"));
}
