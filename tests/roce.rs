//! RoCE ports and their addresses, from a recorded machine to the plan.
//!
//! What that cannot show: whether a packet arrives.

mod common;

use std::process::Command;

use common::Said;
use common::machine::{TempTree, tree};

/// Cards of the machine that belong to GPUs, in the order of their addresses.
const CARDS: [&str; 8] = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];

fn gid(tree: &TempTree, device: &str, index: u32, kind: &str, address: &str) {
    let port = format!("sys/class/infiniband/{device}/ports/1");
    tree.file(&format!("{port}/gid_attrs/types/{index}"), format!("{kind}\n"));
    tree.file(&format!("{port}/gids/{index}"), format!("{address}\n"));
}

/// The machine with a table as mlx5 has it: each address twice, link-local first.
fn machine() -> TempTree {
    let tree = tree("dell-8xh100-roce");
    for (number, device) in CARDS.iter().enumerate() {
        for (index, kind) in [(0, "IB/RoCE v1"), (1, "RoCE v2")] {
            gid(&tree, device, index, kind, "fe80:0000:0000:0000:0202:c9ff:fe00:0001");
        }
        for (index, kind) in [(2, "IB/RoCE v1"), (3, "RoCE v2")] {
            gid(&tree, device, index, kind, &format!("0000:0000:0000:0000:0000:ffff:0a00:{:02x}0d", number));
        }
    }
    tree
}

fn explain(tree: &TempTree, spec: &str) -> Said {
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().env("HOME", "/nonexistent");
    command.args(["explain", "--nodelist", "n[1-2]", "--tasks-per-node", "8", "--spec", spec, "--json", "--root"]);
    command.arg(tree.root());
    Said::run(command)
}

/// The variable's value and why; empty where it is not set.
fn set(said: &Said, name: &str) -> (String, String) {
    let plan: serde_json::Value = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said:#?}"));
    let all = plan["env"].as_array().unwrap();
    let text = |key: &str| {
        let one = all.iter().find(|variable| variable["name"] == name);
        one.and_then(|one| one[key].as_str()).unwrap_or_default().to_string()
    };
    (text("value"), text("why"))
}

/// <https://github.com/getainode/ainode/pull/89>
#[test]
fn a_card_that_got_no_address_is_left_out() {
    let tree = machine();
    let said = explain(&tree, "").ok();
    let all: Vec<String> = CARDS.iter().map(|card| format!("{card}:1")).collect();
    let (hca, why) = set(&said, "NCCL_IB_HCA");
    assert_eq!(hca, format!("={}", all.join(",")), "{why}");
    for (index, kind) in [(2, "IB/RoCE v1"), (3, "RoCE v2")] {
        gid(&tree, "mlx5_5", index, kind, "0000:0000:0000:0000:0000:ffff:a9fe:0701");
    }
    let said = explain(&tree, "").ok();
    let rest: Vec<String> = all.into_iter().filter(|port| port != "mlx5_5:1").collect();
    let (hca, why) = set(&said, "NCCL_IB_HCA");
    assert_eq!(hca, format!("={}", rest.join(",")), "{why}");
    assert!(said.out.contains("GPU 3: mlx5_5 is without an address that a peer knows, "), "{}", said.out);
    assert!(why.contains("mlx5_5") || why.contains("1 more"), "{why}");
}

/// <https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>
#[test]
fn a_row_is_chosen_that_all_cards_have_or_the_job_does_not_start() {
    let tree = machine();
    assert_eq!(set(&explain(&tree, "").ok(), "NCCL_IB_GID_INDEX").0, "");
    let said = explain(&tree, "gid=auto").ok();
    for name in ["NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX"] {
        assert_eq!(set(&said, name).0, "3");
    }
    // An address more on one, and the first taken away: rows 2 and 3 are empty, and
    // so many after them that only the whole table has the rest.
    for index in 2..4 {
        for folder in ["gids", "gid_attrs/types"] {
            std::fs::remove_file(tree.root().join(format!("sys/class/infiniband/mlx5_9/ports/1/{folder}/{index}")))
                .unwrap();
        }
    }
    gid(&tree, "mlx5_9", 7, "RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:050d");
    let said = explain(&tree, "gid=auto");
    assert_eq!(said.code, 78, "{said:#?}");
    for part in ["gid=auto", "mlx5_0:1 has 3", "mlx5_9:1 has 7", "gid-none=warn"] {
        assert!(said.err.contains(part), "'{part}' is missing: {}", said.err);
    }
}
