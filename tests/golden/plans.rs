//! What each rank's plan is on the described machines.

use std::collections::BTreeSet;

use palingenesis::facts::rdma::LinkLayer;
use palingenesis::facts::topology::{GpuVendor, NicKind};
use palingenesis::facts::{CpuSet, NodeFacts};
use palingenesis::plan::Plan;
use palingenesis::plan::binding::NodeNics;

use super::common::machine::Machine;
use super::common::planned::{Seen, cyclic, masks_of, plans};

/// The machines whose GPUs ranks are bound to, with the masks of one rank for each
/// GPU as Slurm hands them out.
fn machines() -> Vec<(Seen, Vec<CpuSet>)> {
    let machines = Machine::all().into_iter().map(|machine| {
        let masks = cyclic(&machine, machine.gpus().len());
        (Seen::of(machine), masks)
    });
    machines.filter(|(seen, _)| seen.node.topology.gpus[0].vendor == GpuVendor::Nvidia).collect()
}

/// A device and its port as NCCL sees them, and as its list names them; -1: any.
type Port = (String, i64);

/// NCCL's own reading of NCCL_IB_HCA (parseStringList, matchIfList in
/// src/misc/utils.cc, and its use in src/transport/net_ib): `^` turns the list into
/// those left out, then `=` asks for whole names; else a name is a beginning.
fn nccl_takes(value: Option<&str>, ports: &[Port]) -> BTreeSet<Port> {
    let Some(value) = value else {
        return ports.iter().cloned().collect();
    };
    let (not, value) = value.strip_prefix('^').map_or((false, value), |rest| (true, rest));
    let (exact, value) = value.strip_prefix('=').map_or((false, value), |rest| (true, rest));
    let list: Vec<Port> = value
        .split(',')
        .filter(|entry| !entry.is_empty())
        .map(|entry| {
            let mut parts = entry.split(':');
            let name = parts.next().unwrap().to_string();
            (name, parts.next().map_or(-1, |port| port.parse().unwrap()))
        })
        .collect();
    let matches = |(device, port): &Port, (name, wanted): &Port| {
        let name_fits = if exact { device == name } else { device.starts_with(name.as_str()) };
        name_fits && (*wanted == -1 || wanted == port)
    };
    let listed = |port: &Port| list.is_empty() || list.iter().any(|entry| matches(port, entry));
    ports.iter().filter(|port| listed(port) != not).cloned().collect()
}

#[test]
fn the_reading_of_nccls_list_used_here_is_nccls() {
    let ports: Vec<Port> = ["mlx5_1", "mlx5_10", "mlx5_11"].map(|name| (name.to_string(), 1)).to_vec();
    let takes =
        |value: &str| -> Vec<String> { nccl_takes(Some(value), &ports).into_iter().map(|(name, _)| name).collect() };
    // A beginning of a name takes every device that begins with it.
    assert_eq!(takes("mlx5_1"), ["mlx5_1", "mlx5_10", "mlx5_11"]);
    assert_eq!(takes("=mlx5_1:1,mlx5_11"), ["mlx5_1", "mlx5_11"]);
    assert_eq!(takes("=mlx5_1:2"), Vec::<String>::new());
    assert_eq!(takes("^=mlx5_1"), ["mlx5_10", "mlx5_11"]);
    assert_eq!(takes("^mlx5_10"), ["mlx5_1", "mlx5_11"]);
}

/// The ports that NCCL would take on its own: up, and of InfiniBand or Ethernet.
fn ports(node: &NodeFacts) -> Vec<Port> {
    let ports = node.rdma.iter().flatten().filter(|port| port.active && port.link != LinkLayer::Other);
    ports.map(|port| (port.device.clone(), i64::from(port.port))).collect()
}

/// Those of the cards that are to be used.
fn wanted(node: &NodeFacts, choice: &NodeNics) -> BTreeSet<Port> {
    let used = node.topology.nics.iter().zip(&choice.verdicts).filter(|(_, verdict)| verdict.used);
    let names: BTreeSet<&str> =
        used.filter(|(nic, _)| nic.kind == NicKind::Verbs).map(|(nic, _)| nic.name.as_str()).collect();
    ports(node).into_iter().filter(|(device, _)| names.contains(device.as_str())).collect()
}

/// One list on all ranks of a node (<https://github.com/NVIDIA/nccl/issues/1478>),
/// and NCCL takes from it the cards that are meant, no mlx5_10 for an mlx5_1.
#[test]
fn nccl_takes_the_cards_that_are_meant_and_the_same_on_every_rank() {
    let mut lists = 0;
    for (seen, masks) in machines() {
        let plans = plans(&seen.node, &masks, &[], "");
        let lists_here: BTreeSet<Option<&str>> = plans.iter().map(|plan| plan.value("NCCL_IB_HCA")).collect();
        assert_eq!(lists_here.len(), 1, "{}: {lists_here:?}", seen.machine.name);
        let value = plans[0].value("NCCL_IB_HCA");
        let (found, wanted) = (nccl_takes(value, &ports(&seen.node)), wanted(&seen.node, &seen.choice()));
        assert_eq!(found, wanted, "{}: {value:?}", seen.machine.name);
        lists += usize::from(value.is_some());
        println!("{:<22} NCCL_IB_HCA {}", seen.machine.name, value.unwrap_or("-"));
    }
    assert!(lists >= 9, "{lists}");
}

/// UCX's list is the rank's own: the ports of its GPU's cards.
#[test]
fn ucx_gets_the_cards_of_the_ranks_own_gpu() {
    let mut lists = 0;
    for (seen, masks) in machines() {
        let choice = seen.choice();
        for (rank, plan) in plans(&seen.node, &masks, &[], "").iter().enumerate() {
            let Some(value) = plan.value("UCX_NET_DEVICES") else {
                continue;
            };
            let name = |nic: &usize| seen.node.topology.nics[*nic].name.as_str();
            let wanted: BTreeSet<&str> = choice.of_gpu[rank].iter().map(name).collect();
            let found: BTreeSet<&str> = value.split(',').map(|entry| entry.strip_suffix(":1").unwrap()).collect();
            assert_eq!(found, wanted, "{} rank {rank}", seen.machine.name);
            lists += 1;
        }
    }
    assert!(lists > 80, "{lists}");
}

fn sorted(masks: &[CpuSet]) -> Vec<CpuSet> {
    let mut masks = masks.to_vec();
    masks.sort();
    masks
}

/// The CPUs beside a rank's GPU: rank i uses the i-th GPU by address.
fn near(seen: &Seen, rank: usize) -> CpuSet {
    let numa = seen.node.topology.gpus[rank].place.numa.unwrap();
    seen.machine.nodes()[&numa].iter().copied().collect()
}

/// The most CPUs that can be beside their rank's GPU when each rank has one of
/// these masks, by trying every set of masks.
fn most(masks: &[CpuSet], near: &[CpuSet]) -> u32 {
    let mut best = vec![0; 1 << masks.len()];
    for taken in 1..1_usize << masks.len() {
        let rank = taken.count_ones() as usize - 1;
        let with = (0..masks.len()).filter(|mask| taken & (1 << mask) != 0);
        let value = with.map(|mask| best[taken & !(1 << mask)] + masks[mask].and(&near[rank]).len());
        best[taken] = value.max().unwrap();
    }
    best[(1 << masks.len()) - 1]
}

/// Slurm's masks are exchanged: each stays whole and with one rank, and as many
/// CPUs as can be are beside their rank's GPU.
#[test]
fn masks_go_to_the_ranks_whose_gpus_they_are_beside() {
    let mut not_all = Vec::new();
    for (seen, masks) in machines() {
        let name = seen.machine.name.clone();
        let after = masks_of(&plans(&seen.node, &masks, &[], ""), &masks);
        assert_eq!(sorted(&after), sorted(&masks), "{name}: masks are not the same any more");
        let near: Vec<CpuSet> = (0..masks.len()).map(|rank| near(&seen, rank)).collect();
        let local: u32 = after.iter().zip(&near).map(|(mask, near)| mask.and(near).len()).sum();
        assert_eq!(local, most(&masks, &near), "{name}: {after:?}");
        let all = after.iter().map(CpuSet::len).sum::<u32>();
        if local < all {
            not_all.push(name.clone());
        }
        println!("{name:<22} {local} of {all} CPUs beside their rank's GPU");
    }
    // Their GPUs are on half of the NUMA nodes, and the masks cover all.
    assert_eq!(not_all, ["juwels-booster", "oci-bm-gpu4-8"]);
}

/// Where Slurm binds nothing, each rank gets the CPUs beside its GPU.
#[test]
fn unbound_ranks_get_the_cpus_beside_their_gpu() {
    for (seen, masks) in machines() {
        let all: CpuSet = seen.machine.online().into_iter().collect();
        let masks = vec![all; masks.len()];
        for (rank, mask) in masks_of(&plans(&seen.node, &masks, &[], ""), &masks).iter().enumerate() {
            assert_eq!(*mask, near(&seen, rank), "{} rank {rank}", seen.machine.name);
        }
    }
}

/// Memory is preferred where the rank's CPUs are, and never where none are: on
/// GB200 the other 32 nodes are GPUs' memory.
#[test]
fn memory_is_preferred_on_the_nodes_of_the_ranks_cpus() {
    let mut policies = 0;
    for (seen, masks) in machines() {
        let plans = plans(&seen.node, &masks, &[], "");
        for (plan, mask) in plans.iter().zip(masks_of(&plans, &masks)) {
            let nodes = seen.machine.nodes();
            let spanned: CpuSet =
                nodes.iter().filter(|(_, cpus)| cpus.iter().any(|cpu| mask.has(*cpu))).map(|(node, _)| *node).collect();
            let Some(policy) = &plan.binding.memory else {
                continue;
            };
            assert!(!policy.strict);
            assert_eq!(policy.nodes, spanned, "{}", seen.machine.name);
            if seen.machine.name == "gb200-nvl72-tray" {
                assert!(policy.nodes.iter().all(|node| node < 2), "{policy:?}");
            }
            policies += 1;
        }
    }
    assert!(policies > 100, "{policies}");
}

fn says_why(plans: &[Plan], what: &str) -> bool {
    plans.iter().all(|plan| plan.binding.decisions.iter().any(|said| said.what == what && !said.why.is_empty()))
}

/// A node that the kernel does not know (-1) is not node 0: CPUs and memory stay,
/// and that is told.
#[test]
fn where_no_numa_node_is_known_cpus_and_memory_stay() {
    for mut machine in Machine::all() {
        machine.change(|function| function.numa = None);
        let masks = cyclic(&machine, machine.gpus().len());
        let seen = Seen::of(machine);
        let all: CpuSet = seen.machine.online().into_iter().collect();
        for masks in [masks.clone(), vec![all; masks.len()]] {
            let plans = plans(&seen.node, &masks, &[], "");
            for plan in &plans {
                assert_eq!((&plan.binding.cpus, &plan.binding.memory), (&None, &None), "{}", seen.machine.name);
            }
            assert!(says_why(&plans, "cpus"), "{}: {:?}", seen.machine.name, plans[0].binding.decisions);
        }
    }
}

/// Fewer ranks than GPUs, and more: no CPU outside the step, none with another
/// owner, and one list of cards.
#[test]
fn any_number_of_ranks_keeps_to_the_steps_cpus() {
    for (seen, _) in machines() {
        let gpus = seen.node.topology.gpus.len();
        for ranks in [1, 2, gpus / 2, gpus + 1, 2 * gpus] {
            let masks = cyclic(&seen.machine, ranks);
            let plans = plans(&seen.node, &masks, &[], "");
            let after = masks_of(&plans, &masks);
            let name = format!("{} with {ranks} ranks", seen.machine.name);
            if ranks == 1 {
                // torchrun's own children spread from all of it.
                assert_eq!(after, masks, "{name}");
            }
            assert_eq!(sorted(&after), sorted(&masks), "{name}");
            let lists: BTreeSet<Option<&str>> = plans.iter().map(|plan| plan.value("NCCL_IB_HCA")).collect();
            assert_eq!(lists.len(), 1, "{name}: {lists:?}");
        }
    }
}

/// Any masks of one size, no CPU in two: the exchange is the best there is, and no
/// rank changes for nothing.
#[test]
fn random_masks_go_as_near_as_they_can() {
    let seen = Seen::of(Machine::load("dell-xe9680-h100-ib"));
    let near: Vec<CpuSet> = (0..8).map(|rank| near(&seen, rank)).collect();
    for seed in 0..40 {
        let cpus = super::shuffled(&seen.machine.online(), seed);
        let each = [4, 8, 16, 28][seed as usize % 4];
        let masks: Vec<CpuSet> = cpus.chunks(each).take(8).map(|mask| mask.iter().copied().collect()).collect();
        let after = masks_of(&plans(&seen.node, &masks, &[], ""), &masks);
        assert_eq!(sorted(&after), sorted(&masks), "seed {seed}");
        let local = |masks: &[CpuSet]| masks.iter().zip(&near).map(|(mask, near)| mask.and(near).len()).sum::<u32>();
        assert_eq!(local(&after), most(&masks, &near), "seed {seed}");
        if local(&masks) == local(&after) {
            assert_eq!(after, masks, "seed {seed}: changed for nothing");
        }
    }
}
