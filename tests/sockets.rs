//! The interface on which ranks meet, on a real Slurm whose nodes have two: eth0
//! joins them, eth1 leads nowhere, and each node's own name is its address there.
//!
//! The nodes are network namespaces of one machine, and a recorded machine says
//! that they have InfiniBand. What that cannot show: NCCL, InfiniBand, routers.

mod common;

use std::fs;
use std::path::PathBuf;

use common::{Sandbox, library, open_folder, readable};

/// A node with lo, eth0, eth1 and an InfiniBand port.
fn recorded() -> PathBuf {
    let root = open_folder().join("sockets");
    let _ = fs::remove_dir_all(&root);
    for (device, index) in [("lo", 1), ("eth1", 2), ("eth0", 3)] {
        let folder = format!("sys/class/net/{device}");
        readable(&root, &format!("{folder}/ifindex"), &index.to_string());
        readable(&root, &format!("{folder}/flags"), if device == "lo" { "0x9" } else { "0x1003" });
        readable(&root, &format!("{folder}/operstate"), if device == "lo" { "unknown" } else { "up" });
    }
    let port = "sys/class/infiniband/mlx5_0/ports/1";
    readable(&root, &format!("{port}/state"), "4: ACTIVE");
    readable(&root, &format!("{port}/phys_state"), "5: LinkUp");
    readable(&root, &format!("{port}/link_layer"), "InfiniBand");
    readable(&root, &format!("{port}/rate"), "400 Gb/sec (4X NDR)");
    root
}

/// Adds up over gloo, and tells by which of the node's addresses.
const TRAIN: &str = r#"
import datetime, os, socket, struct
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://", timeout=datetime.timedelta(seconds=15))
rank = dist.get_rank()
number = torch.tensor([10.0**rank])
dist.all_reduce(number)
peers = set()
for line in open("/proc/self/net/tcp"):
    local, remote, state = line.split()[1:4]
    address = socket.inet_ntoa(struct.pack("<I", int(local.split(":")[0], 16))) if ":" in local else ""
    # 01: established. Rank 0's store is at MASTER_PORT.
    ports = [int(end.split(":")[1], 16) for end in (local, remote)] if address else []
    if state == "01" and int(os.environ["MASTER_PORT"]) not in ports and not address.startswith("127."):
        peers.add(address)
print("rank %d: sum %d over %s" % (rank, number.item(), " ".join(sorted(peers))), flush=True)
dist.destroy_process_group()
"#;

/// <https://github.com/aws-samples/aws-do-eks/pull/69>: Gloo takes what the host's own
/// name resolves to there, and each rank advertises an address that no other reaches.
#[test]
fn ranks_meet_on_the_interface_that_reaches_rank_0() {
    let root = recorded();
    let plugstack = format!("required {} root={}", library().display(), root.display());
    let options = ["--nodes", "2", "--cores", "4", "--namespace-per-node", "--plugstack", &plugstack];
    let Some(slurm) = Sandbox::up("sockets", &options) else { return };
    for number in [1, 2] {
        let line = format!(
            "ip link add eth1 type veth peer name nowhere
             ip addr add 10.98.0.{number}/24 dev eth1
             ip link set eth1 up; ip link set nowhere up
             sed 's/.* n{number}$/10.98.0.{number} n{number}/' /etc/hosts >/tmp/hosts
             mount --bind /tmp/hosts /etc/hosts
             getent ahostsv4 n{number}"
        );
        let said = slurm.run_as(&["--as-root", "--node", &format!("n{number}")], &line, 20).ok();
        assert!(said.out.contains(&format!("10.98.0.{number} ")), "{said:#?}");
    }
    let run = slurm.record("srun --palingenesis -N2 --ntasks-per-node=2 RECORD a");
    for task in run.tasks("a") {
        assert_eq!(task.get("NCCL_SOCKET_IFNAME"), Some("=eth0"), "{task}");
        assert_eq!(task.get("GLOO_SOCKET_IFNAME"), Some("eth0"), "{task}");
    }
    let said = slurm.run("srun --palingenesis=show -N2 --ntasks-per-node=2 true").ok();
    let line = said.err.lines().find(|line| line.trim_start().starts_with("NCCL_SOCKET_IFNAME ")).unwrap_or_default();
    assert!(line.contains("rank 0's 10.99.0.1 is in its network, /24; there is eth1 too"), "{said:#?}");
    // The user's own goes before.
    let run = slurm.record("NCCL_SOCKET_IFNAME=eth1 srun --palingenesis -N2 --ntasks-per-node=1 RECORD a");
    assert!(run.tasks("a").iter().all(|task| task.get("NCCL_SOCKET_IFNAME") == Some("eth1")));

    if slurm.run("/usr/bin/python3 -c 'import importlib.util as u; raise SystemExit(not u.find_spec(\"torch\"))'").code
        != 0
    {
        println!("skipped: /usr/bin/python3 has no torch; install it with: apt-get install python3-torch");
        return;
    }
    fs::write(slurm.dir().join("home/trainer/train.py"), TRAIN).unwrap();
    let srun = "cd ~; export OMP_NUM_THREADS=1; srun --palingenesis -N2 --ntasks-per-node=2 /usr/bin/python3 train.py";
    let said = slurm.run_as(&[], srun, 120).ok();
    for rank in 0..4 {
        let expected = format!("rank {rank}: sum 1111 over 10.99.0.{}", 1 + rank / 2);
        assert!(said.out.lines().any(|line| line == expected), "'{expected}' is not in:\n{}", said.out);
    }
    // Left to itself Gloo does not meet: not in many times the time of the above.
    let unset = srun.replace("/usr/bin/python3", "env -u GLOO_SOCKET_IFNAME /usr/bin/python3");
    let said = slurm.run_as(&[], &unset, 20);
    assert!(said.code != 0 && !said.out.contains("sum 1111"), "{said:#?}");
}
