//! Masks on real machines' layouts, and what holds of any.

use super::assignment::best;
use super::cpus::{How, Place, Seat, Wishes, arrange};
use super::tasks::{Nodes, set};
use crate::facts::CpuSet;
use crate::facts::task::{Peer, Peers};
use crate::plan::tests::rounds;

/// Two sockets of 56 cores with two threads each, GPUs 0 to 3 on the first and 4
/// to 7 on the second: DGX H100.
fn dgx_h100() -> Nodes {
    Nodes::new(&[(0, "0-55,112-167"), (1, "56-111,168-223")]).gpus(&[0, 0, 0, 0, 1, 1, 1, 1])
}

/// GPUs 0 and 1 on NUMA node 3, then 1, 7, 5: DGX A100. Eight nodes of 16 cores.
fn dgx_a100() -> Nodes {
    let nodes: Vec<(u32, String)> =
        (0..8).map(|id| (id, format!("{}-{},{}-{}", id * 16, id * 16 + 15, 128 + id * 16, 143 + id * 16))).collect();
    let nodes: Vec<(u32, &str)> = nodes.iter().map(|(id, cpus)| (*id, cpus.as_str())).collect();
    let far = |from: u32, to: u32| {
        if from == to {
            10
        } else if from / 4 == to / 4 {
            12
        } else {
            32
        }
    };
    Nodes::new(&nodes).gpus(&[3, 3, 1, 1, 7, 7, 5, 5]).with(|topology| {
        for node in &mut topology.nodes {
            node.distances = (0..8).map(|to| (to, far(node.id, to))).collect();
        }
    })
}

/// All ranks' masks as each of them works them out by itself.
fn masks(machine: &Nodes, given: &[&str]) -> Vec<CpuSet> {
    let rank = |rank: u32| {
        let plan = machine.rank(rank, given).bound();
        let value = plan.row("cpus").0.map(set);
        assert_eq!(plan.binding.cpus.clone().or(Some(set(given[rank as usize]))), value, "rank {rank}");
        value.unwrap()
    };
    (0..given.len() as u32).map(rank).collect()
}

fn sets(texts: &[&str]) -> Vec<CpuSet> {
    texts.iter().map(|text| set(text)).collect()
}

/// Slurm's default, cyclic over sockets: rank r on socket r % 2, as CoreWeave
/// found it (<https://docs.coreweave.com/products/sunk/optimize_workloads/cpu-binding-numa-affinity>).
/// Ranks 0 and 2, 5 and 7 are right, the others are exchanged crosswise.
#[test]
fn masks_dealt_out_in_turns_over_two_sockets_are_exchanged() {
    let given = [
        "0-13,112-125",
        "56-69,168-181",
        "14-27,126-139",
        "70-83,182-195",
        "28-41,140-153",
        "84-97,196-209",
        "42-55,154-167",
        "98-111,210-223",
    ];
    let machine = dgx_h100();
    let changed = masks(&machine, &given);
    for (rank, mask) in changed.iter().enumerate() {
        assert!(mask.is_within(&machine.0.nodes[rank / 4].cpus), "rank {rank}: {mask}");
    }
    for rank in [0, 2, 5, 7] {
        assert_eq!(changed[rank], set(given[rank]), "rank {rank} was right");
    }
    let mut owners = changed.clone();
    owners.sort();
    let mut before = sets(&given);
    before.sort();
    assert_eq!(owners, before);
    let plan = machine.rank(1, &given).with(|task| task.world = export(task, "SLURM_CPU_BIND", "quiet")).bound();
    let (value, why) = plan.row("cpus");
    assert!(["28-41,140-153", "42-55,154-167"].contains(&value.unwrap()), "{value:?}");
    assert!(why.contains("28 of 28 CPUs are beside GPU 0000:11:00.0, and 0 of 56-69,168-181 were"), "{why}");
    assert!(plan.left.iter().any(|note| note.name.starts_with("SLURM_CPU_BIND")), "{:?}", plan.left);
    assert_eq!(plan.value("OMP_NUM_THREADS"), Some("28"));
    // Rank 0 keeps what it has, and SLURM_CPU_BIND says so truly.
    let plan = machine.rank(0, &given).with(|task| task.world = export(task, "SLURM_CPU_BIND", "quiet")).bound();
    assert_eq!((plan.binding.cpus.as_ref(), plan.left.len()), (None, 0));
    assert_eq!(plan.row("cpus"), (Some(given[0]), "as Slurm set it: beside GPU 0000:10:00.0"));
}

fn export(task: &super::tasks::Task, name: &str, value: &str) -> crate::plan::tests::World {
    let mut world = crate::plan::tests::World::new("n1", &task.world.step.world_size.to_string(), task.world.step.rank);
    world.node = task.world.node.clone();
    world.task = task.world.task.clone();
    world.export(&[(name, value)])
}

/// <https://github.com/argonne-lcf/GettingStarted/pull/13>: GPU 0 is beside the
/// last cores; rank 0's CPUs become 48-63.
#[test]
fn the_first_gpu_may_be_beside_the_last_cores() {
    let nodes = [(0, "0-15"), (1, "16-31"), (2, "32-47"), (3, "48-63")];
    let given = ["0-15", "16-31", "32-47", "48-63"];
    let reversed = Nodes::new(&nodes).gpus(&[3, 2, 1, 0]);
    assert_eq!(masks(&reversed, &given), sets(&["48-63", "32-47", "16-31", "0-15"]));
    // Unbound: each has all, and gets those of its node.
    assert_eq!(masks(&reversed, &["0-63"; 4]), sets(&["48-63", "32-47", "16-31", "0-15"]));
    // A mask of some cores of each node only: those.
    let some = "0-3,16-19,32-35,48-51";
    assert_eq!(masks(&reversed, &[some; 4]), sets(&["48-51", "32-35", "16-19", "0-3"]));
}

/// <https://github.com/flux-framework/flux-core/issues/4622>: GPUs 4 and 5 on
/// node 0, 2 and 3 on 1, 6 and 7 on 2, 0 and 1 on 3.
#[test]
fn two_ranks_of_one_numa_node_share_no_cpu() {
    let nodes = [(0, "0-15"), (1, "16-31"), (2, "32-47"), (3, "48-63")];
    let machine = Nodes::new(&nodes).gpus(&[3, 3, 1, 1, 0, 0, 2, 2]);
    let given = ["0-7", "8-15", "16-23", "24-31", "32-39", "40-47", "48-55", "56-63"];
    let changed = masks(&machine, &given);
    for (rank, mask) in changed.iter().enumerate() {
        let numa = machine.0.gpus[rank].place.numa.unwrap() as usize;
        assert!(mask.len() == 8 && mask.is_within(&machine.0.nodes[numa].cpus), "rank {rank}: {mask}");
        assert!(changed[..rank].iter().all(|other| !other.meets(mask)), "rank {rank}: {mask}");
    }
    // Unbound they share, unless exclusive splits the cores.
    assert_eq!(masks(&machine, &["0-63"; 8])[..2], sets(&["48-63", "48-63"]));
    for (rank, expected) in ["48-55", "56-63", "16-23", "24-31", "0-7", "8-15", "32-39", "40-47"].iter().enumerate() {
        let exclusive = machine.rank(rank as u32, &["0-63"; 8]).with(|task| {
            task.spec = "exclusive";
            task.world.task.cores = (0..64).map(|cpu| set(&cpu.to_string())).collect();
        });
        assert_eq!(exclusive.bound().binding.cpus, Some(set(expected)), "rank {rank}");
    }
}

#[test]
fn numa_numbers_are_labels_on_dgx_a100() {
    let machine = dgx_a100();
    let beside = |rank: usize| {
        let numa = machine.0.gpus[rank].place.numa.unwrap();
        machine.0.nodes.iter().find(|node| node.id == numa).unwrap().cpus.clone()
    };
    // A core with both threads of each NUMA node for each of eight ranks, in order.
    let given: Vec<String> = (0..8)
        .map(|rank| {
            let (low, high) = (rank * 16, rank * 16 + 15);
            format!("{low}-{high},{}-{}", low + 128, high + 128)
        })
        .collect();
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let changed = masks(&machine, &given);
    // Four of the eight masks are beside GPUs; each goes to one of the two ranks there.
    for node in [0, 2, 4, 6] {
        let right = (node..node + 2).filter(|rank| changed[*rank] == beside(*rank)).count();
        assert_eq!(right, 1, "{changed:?}");
    }
    assert_eq!(masks(&machine, &["0-255"; 8])[0], set("48-63,176-191"));
    // The other four have their GPU's socket at least, and nothing can be done for them.
    for (rank, mask) in changed.iter().enumerate() {
        let socket = if rank < 4 { "0-63,128-191" } else { "64-127,192-255" };
        assert!(mask.is_within(&set(socket)), "rank {rank}: {mask}");
        assert_eq!(machine.rank(rank as u32, &given).bound().warnings, []);
    }
    // Dealt out to the sockets in turns, as Slurm does.
    let turns: Vec<&str> = [0, 4, 1, 5, 2, 6, 3, 7].map(|node| given[node]).to_vec();
    let changed = masks(&machine, &turns);
    for (rank, mask) in changed.iter().enumerate() {
        let socket = if rank < 4 { "0-63,128-191" } else { "64-127,192-255" };
        assert!(mask.is_within(&set(socket)), "rank {rank}: {mask}");
    }
    assert_eq!((0..8).filter(|rank| changed[*rank] == beside(*rank)).count(), 4, "{changed:?}");
}

#[test]
fn numbers_of_a_socket_s_cpus_may_be_every_other_one() {
    let even: String = (0..64).step_by(2).map(|cpu| format!("{cpu},")).collect();
    let odd: String = (1..64).step_by(2).map(|cpu| format!("{cpu},")).collect();
    let machine = Nodes::new(&[(0, &even), (1, &odd)]).gpus(&[0, 0, 1, 1]);
    let pick = |from: u32| (0..8).map(|n| format!("{},", from + 2 * n)).collect::<String>();
    let given = [pick(1), pick(0), pick(17), pick(16)];
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let changed = masks(&machine, &given);
    assert!(changed[..2].iter().all(|mask| mask.is_within(&set(&even))), "{changed:?}");
    assert!(changed[2..].iter().all(|mask| mask.is_within(&set(&odd))), "{changed:?}");
    // Unbound, on the same machine.
    assert_eq!(masks(&machine, &["0-63"; 4]), [set(&even), set(&even), set(&odd), set(&odd)]);
}

#[test]
fn threads_of_a_core_stay_together() {
    let machine = dgx_h100();
    let cores: Vec<CpuSet> = (0..112).map(|core| set(&format!("{core},{}", core + 112))).collect();
    let exclusive = |rank: u32, given: &str| {
        let task = machine.rank(rank, &[given; 8]).with(|task| {
            task.spec = "exclusive";
            task.world.task.cores = cores.clone();
        });
        task.bound()
    };
    assert_eq!(exclusive(0, "0-223").binding.cpus, Some(set("0-13,112-125")));
    assert_eq!(exclusive(7, "0-223").binding.cpus, Some(set("98-111,210-223")));
    assert_eq!(exclusive(7, "0-223").value("OMP_NUM_THREADS"), Some("28"));
    // Slurm gave one thread of each core: so it stays.
    assert_eq!(exclusive(1, "0-111").binding.cpus, Some(set("14-27")));
    // 54 cores for four ranks: the first two get one more.
    let sizes: Vec<u32> = (0..4).map(|rank| exclusive(rank, "0-53,56-109").binding.cpus.unwrap().len()).collect();
    assert_eq!(sizes, [14, 14, 13, 13]);
    // Where cores are not known nothing is split, and it is said.
    let unknown = machine.rank(0, &["0-223"; 8]).with(|task| task.spec = "exclusive").bound();
    assert_eq!(unknown.binding.cpus, Some(set("0-55,112-167")));
    assert!(unknown.row("cpus").1.contains("exclusive does nothing"), "{:?}", unknown.row("cpus"));
    assert_eq!(unknown.value("OMP_NUM_THREADS"), Some("28"), "four ranks share 112 CPUs");
}

/// <https://github.com/argonne-lcf/GettingStarted/pull/13>: nothing is taken away
/// from a rank that has nothing there.
#[test]
fn a_rank_without_cpus_beside_its_gpu_keeps_its_mask_and_is_told_of() {
    let machine = dgx_h100();
    let given = ["0-13", "14-27", "28-41", "42-55", "112-125", "126-139", "140-153", "154-167"];
    assert_eq!(masks(&machine, &given), sets(&given));
    let plan = machine.rank(0, &given).bound();
    let [warning] = plan.warnings.as_slice() else { panic!("{:?}", plan.warnings) };
    assert_eq!(warning.id, "cpus-far");
    assert_eq!(
        warning.message,
        "local rank 4 on n1: 0 of its 14 CPUs (112-125) are beside GPU 0000:14:00.0 (56-111,168-223); the step has none \
         there; the same of local ranks 5, 6, 7"
    );
    // Unbound on the wrong socket alone: the same.
    let plan = machine.rank(6, &["0-55"; 8]).bound();
    assert_eq!(plan.binding.cpus, None);
    assert!(plan.warnings[0].message.contains("0 of its 56 CPUs (0-55)"), "{:?}", plan.warnings);
    assert!(plan.row("cpus").1.contains("0 of 56 CPUs are beside GPU 0000:16:00.0 (56-111,168-223)"));
}

#[test]
fn too_few_cpus_beside_the_gpu_are_no_place_for_a_rank() {
    let machine = dgx_h100();
    let asked = |spec: &'static str, cpus: &str| {
        let task = machine.rank(7, &["0-55,56-59"; 8]);
        task.with(|task| {
            task.spec = spec;
            task.world = export(task, "SLURM_CPUS_PER_TASK", cpus);
        })
        .bound()
    };
    // 4 CPUs there for four ranks that have 7 each.
    let plan = asked("", "7");
    assert_eq!(plan.binding.cpus, None);
    assert!(plan.row("cpus").1.contains("4 of 60 CPUs are beside"), "{:?}", plan.row("cpus"));
    assert!(plan.warnings[0].message.contains("too few to be kept to them (28 would do)"), "{:?}", plan.warnings);
    assert_eq!(asked("", "1").binding.cpus, None, "one CPU for each of four ranks, of 60");
}

/// `isolcpus=` and CPUs that are off.
#[test]
fn isolated_and_offline_cpus_are_left_out() {
    let machine = dgx_h100().with(|topology| {
        topology.isolated = set("0-1,112-113");
        topology.online = set("0-223").without(&set("10,122"));
    });
    let plan = machine.rank(0, &["0-223"; 8]).bound();
    assert_eq!(plan.binding.cpus, Some(set("2-9,11-55,114-121,123-167")));
    // All beside a GPU isolated: its rank keeps its mask.
    let machine = dgx_h100().with(|topology| topology.isolated = set("0-55,112-167"));
    let plan = machine.rank(0, &["0-223"; 8]).bound();
    assert_eq!(plan.binding.cpus, None);
    assert!(plan.row("cpus").1.contains("offline or isolated"), "{:?}", plan.row("cpus"));
}

#[test]
fn what_is_not_known_changes_nothing_and_says_what() {
    let machine = dgx_h100();
    let crossed = ["56-69", "0-13"];
    let row = |change: fn(&mut super::tasks::Task)| {
        let plan = machine.rank(0, &crossed).with(change).bound();
        assert_eq!((plan.binding.cpus.as_ref(), plan.warnings.len()), (None, 0), "{:?}", plan.row("cpus"));
        plan.row("cpus").1.to_string()
    };
    let unknown = |task: &mut super::tasks::Task| {
        task.world.node.topology.gpus.iter_mut().for_each(|gpu| gpu.place.numa = None);
    };
    assert!(row(unknown).contains("does not tell which NUMA node GPU 0000:10:00.0 is on"), "{}", row(unknown));
    let many = |task: &mut super::tasks::Task| task.world.task.peers = Peers::Met(vec![Peer::default()]);
    assert!(row(many).contains("1 of the node's 2 ranks are known"));
    let late = |task: &mut super::tasks::Task| {
        task.world.task.peers = Peers::Incomplete("local rank 1 did not come".into());
    };
    assert!(row(late).contains("local rank 1 did not come"));
    assert!(row(|task| task.world.task.peers = Peers::NotAsked).contains("0-55,112-167"));
    assert!(row(|task| task.gpus = Err("2 GPUs for 4 ranks".into())).contains("2 GPUs for 4 ranks"));
    assert!(row(|task| task.spec = "bind=mem+nic").contains("bind=mem+nic"));
    assert!(row(|task| task.spec = "launch=agent").contains("launcher"));
    let overlapping = machine.rank(0, &["0-13", "10-20"]).bound();
    assert_eq!(overlapping.binding.cpus, None);
    assert!(overlapping.row("cpus").1.contains("overlap in part (0-13; 10-20)"));
    let alone = machine.rank(0, &["0-223"]).with(|task| task.gpus = Ok((0..8).collect())).bound();
    assert!(alone.row("cpus").1.contains("one task with 8 GPUs"), "{:?}", alone.row("cpus"));
    assert!(alone.binding.cpus.is_none() && alone.binding.memory.is_none());
}

/// One rank with one GPU, on a node that gave it CPUs of both sockets: those beside
/// the GPU, unless it asked for more than there are.
#[test]
fn a_rank_alone_has_nobody_to_meet() {
    let alone = |asked: &str| {
        let task = dgx_h100().rank(0, &["0-15,56-71"]).with(|task| {
            task.world = export(task, "SLURM_CPUS_PER_TASK", asked);
            task.world.task.peers = Peers::NotAsked;
        });
        task.bound()
    };
    assert_eq!(alone("1").binding.cpus, Some(set("0-15")));
    assert_eq!(alone("32").binding.cpus, None);
    assert!(alone("32").row("cpus").1.contains("16 of 32 CPUs are beside GPU"), "{:?}", alone("32").row("cpus"));
}

/// The whole plan, from what Slurm and the machine tell a task: its GPU, its CPUs,
/// its memory, its threads.
#[test]
fn a_plan_binds_a_rank_by_the_gpu_it_takes() {
    let machine = Nodes::new(&[(0, "0-7"), (1, "8-15")]).gpus(&[0, 0, 1, 1]);
    let mut world = machine.rank(1, &["0-3", "8-11", "4-7", "12-15"]).world.export(&[
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        ("SLURM_CPUS_ON_NODE", "16"),
        ("SLURM_CPU_BIND", "quiet,mask_cpu:0xf,0xf00,0xf0,0xf000"),
    ]);
    let plan = world.plan("").unwrap();
    assert_eq!(plan.binding.cpus, Some(set("4-7")), "{plan:#?}");
    assert_eq!(plan.binding.memory.as_ref().map(|policy| &policy.nodes), Some(&set("0")));
    assert_eq!(plan.value("OMP_NUM_THREADS"), Some("4"));
    assert!(plan.left.iter().any(|note| note.name.starts_with("SLURM_CPU_BIND")), "{:?}", plan.left);
    // The other way round the GPUs are where the masks are.
    world.environment.set("CUDA_VISIBLE_DEVICES", "0,2,1,3");
    let Peers::Met(peers) = &mut world.task.peers else { unreachable!() };
    (peers[1].gpus, peers[2].gpus) = (vec![2], vec![1]);
    let plan = world.plan("").unwrap();
    assert_eq!((plan.binding.cpus.as_ref(), plan.row("cpus").0), (None, Some("8-11")));
    assert_eq!(plan.binding.memory.as_ref().map(|policy| &policy.nodes), Some(&set("1")));
    assert!(!plan.left.iter().any(|note| note.name.starts_with("SLURM_CPU_BIND")), "{:?}", plan.left);
}

/// The user's --cpu-bind stays, good or bad.
#[test]
fn who_binds_the_cpus_keeps_them_and_hears_where_the_gpu_is() {
    let plan = dgx_h100().rank(0, &["56-69", "0-13"]).with(|task| {
        task.world.task.bound_by_user.cpu = Some("--cpu-bind=map_cpu:56,0".into());
    });
    let plan = plan.bound();
    assert_eq!(plan.binding.cpus, None);
    let expected = "as --cpu-bind=map_cpu:56,0 says: 0 of 14 CPUs are beside GPU 0000:10:00.0 (0-55,112-167)";
    assert_eq!(plan.row("cpus"), (Some("56-69"), expected));
}

/// A rank whose GPU is not known takes no part, and its mask goes to nobody.
#[test]
fn a_rank_without_a_known_gpu_takes_no_part() {
    let machine = dgx_h100();
    let task = |rank| {
        machine.rank(rank, &["56-69", "70-83", "0-13", "14-27", "28-41"]).with(|task| {
            let Peers::Met(peers) = &mut task.world.task.peers else { unreachable!() };
            peers[2].gpus.clear();
            task.gpus = if rank == 2 { Err("hidden".into()) } else { Ok(vec![rank as usize]) };
        })
    };
    assert_eq!(task(2).bound().binding.cpus, None);
    let changed: Vec<Option<CpuSet>> = (0..5).map(|rank| task(rank).bound().binding.cpus).collect();
    // GPU 4 is on the second socket; rank 3 is right already.
    assert_eq!(changed[3], None);
    assert_eq!(changed.iter().filter(|mask| **mask == Some(set("0-13"))).count(), 0);
    assert_eq!(changed.iter().flatten().count(), 2, "{changed:?}");
}

/// Sockets shared by several ranks each, as TaskPluginParam=autobind=sockets
/// gives them: whole masks change hands too.
#[test]
fn masks_that_several_ranks_share_are_exchanged_whole() {
    let machine = Nodes::new(&[(0, "0-7"), (1, "8-15")]).gpus(&[0, 0, 1, 1]);
    assert_eq!(masks(&machine, &["0-7", "8-15", "0-7", "8-15"]), sets(&["0-7", "0-7", "8-15", "8-15"]));
}

#[test]
fn masks_of_different_sizes_are_exchanged_among_equals() {
    let machine = Nodes::new(&[(0, "0-7"), (1, "8-15")]).gpus(&[0, 0, 1, 1]);
    // Each rank keeps its number of CPUs: 3, 2, 3, 2.
    let given = ["8-10", "0-1", "0-2", "8-9"];
    let overlapping = ["8-10", "4-5", "0-2", "12-13"];
    assert!(arrange(&seats(&machine, &given), &Wishes::default()).is_err());
    assert_eq!(masks(&machine, &overlapping), sets(&["0-2", "4-5", "8-10", "12-13"]));
}

fn seats(machine: &Nodes, masks: &[&str]) -> Vec<Seat> {
    let seat = |(rank, mask): (usize, &&str)| Seat {
        mask: set(mask),
        near: super::cpus::beside(&machine.0, &[rank]).unwrap_or_default(),
        ..Seat::default()
    };
    masks.iter().enumerate().map(seat).collect()
}

/// How Slurm deals CPUs out on two sockets of eight cores with two threads, GPUs 0
/// and 1 on the first (Slurm's `srun` page: --distribution, --hint, --exact).
#[test]
fn layouts_of_slurm() {
    let machine = Nodes::new(&[(0, "0-7,16-23"), (1, "8-15,24-31")]).gpus(&[0, 0, 1, 1]);
    let table: &[(&str, [&str; 4], [&str; 4])] = &[
        (
            "block",
            ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"],
            ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"],
        ),
        (
            "cyclic",
            ["0-3,16-19", "8-11,24-27", "4-7,20-23", "12-15,28-31"],
            ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"],
        ),
        // Half of each mask on each socket: no exchange helps, and no CPU is taken away.
        (
            "fcyclic",
            ["0-1,8-9,16-17,24-25", "2-3,10-11,18-19,26-27", "4-5,12-13,20-21,28-29", "6-7,14-15,22-23,30-31"],
            ["0-1,8-9,16-17,24-25", "2-3,10-11,18-19,26-27", "4-5,12-13,20-21,28-29", "6-7,14-15,22-23,30-31"],
        ),
        ("one thread of each core", ["0-3", "8-11", "4-7", "12-15"], ["0-3", "4-7", "8-11", "12-15"]),
        ("one CPU each", ["0", "8", "1", "9"], ["0", "1", "8", "9"]),
        ("a part of the job", ["0-1", "8-9", "2-3", "10-11"], ["0-1", "2-3", "8-9", "10-11"]),
        ("the first socket alone", ["0-1", "2-3", "4-5", "6-7"], ["0-1", "2-3", "4-5", "6-7"]),
        ("of two sizes", ["8-11", "4-5", "0-3", "12-13"], ["0-3", "4-5", "8-11", "12-13"]),
        ("not bound", ["0-31"; 4], ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]),
        ("not bound, one thread of each core", ["0-15"; 4], ["0-7", "0-7", "8-15", "8-15"]),
        ("one CPU for all", ["5"; 4], ["5"; 4]),
    ];
    for (what, given, expected) in table {
        assert_eq!(masks(&machine, given), sets(expected), "{what}");
        let far: Vec<String> = machine.rank(0, given).bound().warnings.into_iter().map(|told| told.message).collect();
        let step = sets(given).iter().fold(CpuSet::EMPTY, |all, mask| all.or(mask));
        assert_eq!(far.is_empty(), step.meets(&set("8-15,24-31")), "{what}: {far:?}");
    }
    // Threads that are switched off.
    let off = machine.clone().with(|topology| topology.online = set("0-15"));
    assert_eq!(masks(&off, &["0-15"; 4]), sets(&["0-7", "0-7", "8-15", "8-15"]));
}

/// Four tasks with four CPUs each, on a cluster that binds none: eight beside the
/// GPUs are less than was asked for.
#[test]
fn no_task_loses_cpus_that_it_asked_for() {
    let machine = Nodes::new(&[(0, "0-7"), (1, "8-15")]).gpus(&[0, 0, 0, 0]);
    let asked = |cpus: &str| {
        let task = machine.rank(1, &["0-15"; 4]).with(|task| task.world = export(task, "SLURM_CPUS_PER_TASK", cpus));
        let plan = task.bound();
        assert_eq!(plan.warnings, []);
        plan.binding.cpus
    };
    assert_eq!(asked("4"), None);
    assert_eq!(asked("2"), Some(set("0-7")));
}

// ------------------------------------------------------------------ what holds of any

struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }

    fn mixed(&mut self, limit: usize) -> Vec<usize> {
        let mut list: Vec<usize> = (0..limit).collect();
        for place in (1..limit).rev() {
            list.swap(place, self.below(place + 1));
        }
        list
    }
}

fn beside(places: &[Place], seats: &[Seat]) -> u32 {
    places.iter().zip(seats).map(|(place, seat)| place.mask.and(&seat.near).len()).sum()
}

#[test]
fn the_best_assignment_is_that_of_trying_all() {
    fn most(size: usize, worth: &[Vec<i64>], row: usize, taken: u32) -> i64 {
        if row == size {
            return 0;
        }
        let free = (0..size).filter(|column| taken & (1 << column) == 0);
        free.map(|column| worth[row][column] + most(size, worth, row + 1, taken | 1 << column)).max().unwrap()
    }
    let mut chance = Chance(0x2545_f491_4f6c_dd1d);
    for round in 0..4000 * rounds() {
        let size = chance.below(8);
        let range = [2, 4, 300][round % 3];
        let worth: Vec<Vec<i64>> = (0..size).map(|_| (0..size).map(|_| chance.below(range) as i64).collect()).collect();
        let chosen = best(size, |row, column| worth[row][column]);
        let sum: i64 = chosen.iter().enumerate().map(|(row, column)| worth[row][*column]).sum();
        let mut columns = chosen.clone();
        columns.sort_unstable();
        assert_eq!(columns, (0..size).collect::<Vec<_>>());
        assert_eq!(sum, most(size, &worth, 0, 0), "{worth:?}: {chosen:?}");
    }
}

/// Masks dealt at random out of a step's CPUs, GPUs on random NUMA nodes, some
/// ranks without a known one.
fn random_seats(chance: &mut Chance, even: bool) -> Vec<Seat> {
    let ranks = 1 + chance.below(12);
    let nodes = 1 + chance.below(4);
    let total = 8 * nodes.max(2);
    let numa: Vec<usize> = (0..total).map(|_| chance.below(nodes)).collect();
    let order = chance.mixed(total);
    let mut next = order.into_iter();
    (0..ranks)
        .map(|_| {
            let size = if even { total / ranks.max(1) } else { chance.below(4) };
            let mask: CpuSet = next.by_ref().take(size).map(|cpu| cpu as u32).collect();
            let gpu = chance.below(nodes + 1);
            let near = (0..total).filter(|cpu| numa[*cpu] == gpu).map(|cpu| cpu as u32).collect();
            Seat { mask, near, ..Seat::default() }
        })
        .collect()
}

#[test]
fn masks_keep_their_number_and_owners() {
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    for round in 0..5000 * rounds() {
        let seats = random_seats(&mut chance, round % 2 == 0);
        let places = arrange(&seats, &Wishes::default()).unwrap();
        if seats.len() == 1 {
            continue;
        }
        let masks = |list: Vec<CpuSet>| {
            let mut list = list;
            list.sort();
            list
        };
        let before = masks(seats.iter().map(|seat| seat.mask.clone()).collect());
        assert_eq!(masks(places.iter().map(|place| place.mask.clone()).collect()), before, "{seats:?}");
        let own: Vec<Place> = seats
            .iter()
            .map(|seat| Place { mask: seat.mask.clone(), how: How::Kept, ranks: 1, unsplit: None })
            .collect();
        assert!(beside(&places, &seats) >= beside(&own, &seats), "{seats:?}: {places:?}");
        if beside(&places, &seats) == beside(&own, &seats) {
            assert_eq!(masks_of(&places), masks_of(&own), "nothing is gained, and yet changed: {seats:?}");
        }
        for (seat, place) in seats.iter().zip(&places) {
            assert_eq!(seat.mask.len(), place.mask.len());
            assert!(!seat.near.is_empty() || seat.mask == place.mask);
        }
    }
}

/// Every way to hand the masks round is tried: none has more CPUs beside their
/// rank's GPU, nor, among those with as many, any that are nearer.
#[test]
fn no_other_exchange_has_more_cpus_beside_their_gpu() {
    fn most(seats: &[Seat], rank: usize, taken: u32) -> (u32, u32) {
        let Some(seat) = seats.get(rank) else { return (0, 0) };
        let free = (0..seats.len()).filter(|from| taken & (1 << from) == 0);
        let ways = free.map(|from| {
            let (near, around) = most(seats, rank + 1, taken | 1 << from);
            let (more, further) = worth(&seats[from].mask, seat);
            (near + more, around + further)
        });
        ways.max().unwrap()
    }
    fn worth(mask: &CpuSet, seat: &Seat) -> (u32, u32) {
        let around = seat.around.iter().map(|(cpus, each)| mask.and(cpus).len() * each).sum();
        (mask.and(&seat.near).len(), around)
    }
    let mut chance = Chance(0xfeed_beef_1234_5677);
    for _ in 0..1500 * rounds() {
        let (ranks, size) = (2 + chance.below(5), 1 + chance.below(4));
        let order = chance.mixed(ranks * size);
        let nodes: Vec<usize> = order.iter().map(|_| chance.below(4)).collect();
        let of_node = |node: usize| -> CpuSet {
            (0..order.len()).filter(|cpu| nodes[*cpu] == node).map(|cpu| cpu as u32).collect()
        };
        let seats: Vec<Seat> = (0..ranks)
            .map(|rank| {
                let own = chance.below(4);
                let far = |node: usize| {
                    if node == own {
                        246
                    } else if node / 2 == own / 2 {
                        240
                    } else {
                        224
                    }
                };
                let mask = order[rank * size..][..size].iter().map(|cpu| *cpu as u32).collect();
                Seat { mask, near: of_node(own), around: (0..4).map(|node| (of_node(node), far(node))).collect() }
            })
            .collect();
        // One without CPUs beside its GPU takes no part, and the sum is another one.
        if seats.iter().any(|seat| seat.near.is_empty()) {
            continue;
        }
        let places = arrange(&seats, &Wishes::default()).unwrap();
        let worth = places.iter().zip(&seats).map(|(place, seat)| worth(&place.mask, seat));
        let found = worth.fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
        assert_eq!(found, most(&seats, 0, 0), "{seats:#?}: {places:#?}");
    }
}

fn masks_of(places: &[Place]) -> Vec<&CpuSet> {
    places.iter().map(|place| &place.mask).collect()
}

#[test]
fn a_shared_mask_is_never_left_nor_emptied() {
    let mut chance = Chance(0x1234_5678_9abc_def1);
    for round in 0..5000 * rounds() {
        let ranks = 1 + chance.below(9);
        let nodes = 1 + chance.below(4) as u32;
        let total = 4 * (2 + chance.below(16) as u32);
        // Threads of a core are neighbours, or total/2 apart.
        let core = |cpu: u32| if round % 2 == 0 { cpu / 2 } else { cpu % (total / 2) };
        let cores: Vec<CpuSet> =
            (0..total / 2).map(|number| (0..total).filter(|cpu| core(*cpu) == number).collect()).collect();
        let numa: Vec<u32> = (0..total / 2).map(|_| chance.below(nodes as usize) as u32).collect();
        let mask: CpuSet = (0..total).filter(|_| chance.below(8) != 0).collect();
        if mask.is_empty() {
            continue;
        }
        let seats: Vec<Seat> = (0..ranks)
            .map(|_| {
                let gpu = chance.below(nodes as usize + 1) as u32;
                let near = (0..total).filter(|cpu| numa[core(*cpu) as usize] == gpu).collect();
                Seat { mask: mask.clone(), near, ..Seat::default() }
            })
            .collect();
        let exclusive = chance.below(2) == 0;
        let per_task = [None, Some(1), Some(1 + chance.below(4) as u32)][chance.below(3)];
        let places = arrange(&seats, &Wishes { exclusive, cores: &cores, per_task }).unwrap();
        for (rank, (seat, place)) in seats.iter().zip(&places).enumerate() {
            assert!(!place.mask.is_empty() && place.mask.is_within(&mask), "{seats:?}: {places:?}");
            if place.mask == mask {
                continue;
            }
            assert!(place.mask.is_within(&seat.near) && place.mask.len() >= per_task.unwrap_or(1));
            for (other, another) in places.iter().enumerate().filter(|(other, _)| *other != rank) {
                let (one, two) = (&place.mask, &another.mask);
                let split = |how: &How| matches!(how, How::Split(_));
                if split(&place.how) && split(&another.how) {
                    assert!(!one.meets(two), "{other} and {rank}: {places:?}");
                    let apart = |core: &&CpuSet| core.meets(one) && core.meets(two);
                    assert_eq!(cores.iter().find(apart), None, "a core of both: {places:?}");
                }
            }
        }
    }
}

/// Wherever the kernel tells no NUMA node, whatever masks are there, nothing changes.
#[test]
fn without_numa_nodes_nothing_changes() {
    let mut chance = Chance(77);
    let nowhere = dgx_h100().with(|topology| {
        topology.gpus.iter_mut().for_each(|gpu| gpu.place.numa = None);
    });
    for _ in 0..200 {
        let ranks = 1 + chance.below(8);
        let order = chance.mixed(224);
        let given: Vec<String> = (0..ranks)
            .map(|rank| order[rank * 8..rank * 8 + 8].iter().map(|cpu| *cpu as u32).collect::<CpuSet>().to_string())
            .collect();
        let given: Vec<&str> = given.iter().map(String::as_str).collect();
        for rank in 0..ranks as u32 {
            let plan = nowhere.rank(rank, &given).bound();
            assert!(plan.binding.cpus.is_none() && plan.binding.memory.is_none(), "{given:?}");
            assert!(plan.warnings.is_empty());
        }
    }
}

/// 128 ranks that share all CPUs, as with --overcommit: every exchange is as good
/// as every other, which must cost nothing.
#[test]
fn ranks_that_share_one_mask_are_arranged_in_no_time() {
    let cpus = |text: &str| CpuSet::parse(text).unwrap();
    let near = |rank: usize| if rank.is_multiple_of(2) { cpus("0-63") } else { cpus("64-127") };
    let seats: Vec<Seat> =
        (0..128).map(|rank| Seat { mask: cpus("0-127"), near: near(rank), around: Vec::new() }).collect();
    let start = std::time::Instant::now();
    let places = arrange(&seats, &Wishes::default()).unwrap();
    println!("128 ranks with one mask: {:?}", start.elapsed());
    assert!(places.iter().enumerate().all(|(rank, place)| place.mask == near(rank)));
    assert!(start.elapsed() < std::time::Duration::from_secs(1));
}

/// 128 ranks, crossed on two sockets: each of them works it out.
#[test]
fn many_ranks_take_no_time() {
    let mut chance = Chance(99);
    let order = chance.mixed(512);
    let half: [CpuSet; 2] = [(0..256).collect(), (256..512).collect()];
    let seats: Vec<Seat> = (0..128)
        .map(|rank| Seat {
            mask: order[rank * 4..rank * 4 + 4].iter().map(|cpu| *cpu as u32).collect(),
            near: half[rank / 64].clone(),
            around: half.iter().cloned().zip([246, 224]).collect(),
        })
        .collect();
    let start = std::time::Instant::now();
    let places = arrange(&seats, &Wishes::default()).unwrap();
    // Without optimization, and beside other tests; optimized it is some milliseconds.
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    println!("128 ranks: {:?}", start.elapsed());
    let many = vec![Seat::default(); 129];
    assert!(arrange(&many, &Wishes::default()).unwrap_err().contains("129 ranks"));
    assert!(beside(&places, &seats) > 256);
}
