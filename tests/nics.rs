//! Network cards on a real Slurm of two nodes: what each rank gets of them, and
//! what is told of one that is down. The nodes' hardware is a tree of files.
//!
//! What that cannot show: that a packet arrives.

mod common;

use common::machine::{Machine, TempTree};
use common::tasks::Task;
use common::{Said, Sandbox, library, open_folder};

/// The cards beside GPU 0 to 7 of a DGX H100
/// (<https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html>).
const CARDS: [&str; 8] = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];

fn up(name: &str) -> Option<(Sandbox, TempTree)> {
    let tree = TempTree::below(&open_folder());
    Machine::load("dgx-h100").write(&tree);
    let line = format!("optional {} root={}", library().display(), tree.root().display());
    let shape = ["--nodes", "2", "--sockets", "1", "--cores", "8", "--gpus", "8", "--plugstack", &line];
    Some((Sandbox::up(&format!("nics-{name}"), &shape)?, tree))
}

const STEP: &str = "-Q -N2 -n16 --ntasks-per-node=8 --gpus-per-node=8";

fn cards(task: &Task) -> [&str; 3] {
    ["NCCL_IB_HCA", "UCX_NET_DEVICES", "PALINGENESIS_NIC"].map(|name| task.get(name).unwrap_or("-"))
}

fn list(cards: &[&str]) -> String {
    let ports: Vec<String> = cards.iter().map(|card| format!("{card}:1")).collect();
    format!("={}", ports.join(","))
}

/// Lines that tell of it, in order.
fn down(said: &Said) -> Vec<&str> {
    let mut lines: Vec<&str> = said.ours().into_iter().filter(|line| line.contains(" is down, ")).collect();
    lines.sort();
    lines
}

/// <https://github.com/NVIDIA/nccl/issues/1478>: NCCL's list is the node's, on all
/// ranks alike; UCX's is the rank's.
#[test]
fn all_ranks_have_one_list_for_nccl_and_each_its_own_for_ucx() {
    let Some((sandbox, _tree)) = up("lists") else { return };
    let run = sandbox.record(&format!("srun --palingenesis {STEP} RECORD rank"));
    assert!(down(&run.said).is_empty(), "{:#?}", run.said);
    let all = list(&CARDS);
    for (rank, task) in run.tasks("rank").iter().enumerate() {
        let own = CARDS[rank % 8];
        assert_eq!(cards(task), [all.as_str(), &format!("{own}:1"), own], "rank {rank}");
    }
    // The user's own stay.
    let run = sandbox.record(&format!(
        "NCCL_IB_HCA==mlx5_0,mlx5_3 UCX_NET_DEVICES=mlx5_0:1,mlx5_3:1 srun --palingenesis {STEP} RECORD rank"
    ));
    for (rank, task) in run.tasks("rank").iter().enumerate() {
        assert_eq!(cards(task), ["=mlx5_0,mlx5_3", "mlx5_0:1,mlx5_3:1", CARDS[rank % 8]], "rank {rank}");
    }
    let run = sandbox.record(&format!("srun --palingenesis=bind=cpu+mem {STEP} RECORD rank"));
    for task in run.tasks("rank") {
        assert_eq!(cards(task)[..2], ["-", "-"]);
    }
    // In a step of one node NCCL uses no card.
    let run = sandbox.record("srun --palingenesis -Q -N1 -n8 --gpus-per-node=8 RECORD rank");
    for (rank, task) in run.tasks("rank").iter().enumerate() {
        assert_eq!(cards(task), ["-", &format!("{}:1", CARDS[rank]), CARDS[rank]], "rank {rank}");
    }
}

/// The card of GPU 5 is down: one line for each node, also where no rank but one
/// sees that GPU, and what the rank uses instead is another card of its NUMA node.
#[test]
fn a_card_that_is_down_is_told_once_for_each_node() {
    let Some((sandbox, tree)) = up("down") else { return };
    let port = "sys/class/infiniband/mlx5_9/ports/1";
    tree.file(&format!("{port}/state"), "1: DOWN\n");
    tree.file(&format!("{port}/phys_state"), "3: Disabled\n");
    let others = list(&CARDS.into_iter().filter(|card| *card != "mlx5_9").collect::<Vec<_>>());
    for options in [STEP, "-Q -N2 -n16 --ntasks-per-node=8 --gpus-per-task=1"] {
        let run = sandbox.record(&format!("srun --palingenesis {options} RECORD rank"));
        let lines = down(&run.said);
        assert_eq!(lines.len(), 2, "{options}: {:#?}", run.said);
        for (line, node) in lines.iter().zip(["n1", "n2"]) {
            let told = format!("palingenesis: warning: GPU 5: mlx5_9 is down, mlx5_6 is used on {node}; ");
            assert!(line.starts_with(&told), "{options}: {line}");
        }
        for (rank, task) in run.tasks("rank").iter().enumerate() {
            let own = if rank % 8 == 5 { "mlx5_6" } else { CARDS[rank % 8] };
            assert_eq!(cards(task), [others.as_str(), &format!("{own}:1"), own], "{options}: rank {rank}");
        }
    }
    let said = sandbox.run(&format!("srun --palingenesis=checks=off {STEP} true")).ok();
    assert!(down(&said).is_empty(), "{said:#?}");
    // One error for each node, and no rank starts.
    let said = sandbox.run(&format!("srun --palingenesis=nic-down=fail {STEP} echo RAN"));
    let lines = down(&said);
    assert_eq!((said.code, lines.len(), said.out.contains("RAN")), (78, 2, false), "{said:#?}");
    for (line, node) in lines.iter().zip(["n1", "n2"]) {
        assert!(line.contains("error: GPU 5: mlx5_9 is down") && line.contains(&format!(" on {node}")), "{line}");
    }
}

/// Down on n2 only, where rank 0 is not: each node has a tree of its own.
#[test]
fn a_card_that_is_down_on_one_node_is_told_from_there() {
    let root = "/tmp/machine";
    let line = format!("optional {} root={root}", library().display());
    let shape = ["--nodes", "2", "--sockets", "1", "--cores", "8", "--gpus", "8", "--namespace-per-node"];
    let Some(sandbox) = Sandbox::up("nics-unlike", &[&shape[..], &["--plugstack", &line]].concat()) else { return };
    let tree = TempTree::below(&open_folder());
    Machine::load("dgx-h100").write(&tree);
    let copy = format!("cp -a {} {root}", tree.root().display());
    sandbox.run_as(&["--node", "n1"], &copy, 60).ok();
    let port = format!("{root}/sys/class/infiniband/mlx5_9/ports/1");
    let broken = format!("{copy}; cd {port} && echo '1: DOWN' >state && echo '3: Disabled' >phys_state");
    sandbox.run_as(&["--node", "n2"], &broken, 60).ok();

    let run = sandbox.record(&format!("srun --palingenesis {STEP} RECORD rank"));
    let [line] = down(&run.said)[..] else { panic!("{:#?}", run.said) };
    assert!(line.starts_with("palingenesis: warning: GPU 5: mlx5_9 is down, mlx5_6 is used on n2; "), "{line}");
    let (all, others) = (list(&CARDS), list(&CARDS.into_iter().filter(|card| *card != "mlx5_9").collect::<Vec<_>>()));
    for (rank, task) in run.tasks("rank").iter().enumerate() {
        assert_eq!(cards(task)[0], if rank < 8 { &all } else { &others }, "rank {rank}");
    }
    // Its node's ranks stop. What the other node's do then is no matter of the card.
    let said = sandbox.run(&format!("srun -K --palingenesis=nic-down=fail {STEP} sh -c 'echo $SLURMD_NODENAME RAN'"));
    assert!(said.code != 0 && down(&said).len() == 1 && !said.out.contains("n2 RAN"), "{said:#?}");
}
