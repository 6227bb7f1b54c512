//! Reads the world: the step as Slurm describes it, the node, the network, the
//! environment. No decision is taken here and nothing is changed.
//!
//! What is read from files takes a root directory, so that a recorded machine
//! can be planned anywhere.

mod bound;
pub mod container;
pub mod cpuset;
pub mod cuda;
pub mod directories;
pub mod environment;
pub mod exit;
mod files;
pub mod hostlist;
pub mod job;
pub mod listener;
pub mod locks;
pub mod machine;
pub mod mounts;
pub mod netdevs;
pub mod network;
pub mod oom;
pub mod overlay;
pub mod pci;
pub mod policy;
pub mod program;
pub mod rdma;
pub mod record;
pub mod step;
pub mod straggler;
pub mod task;
pub mod topology;
mod trace;
pub mod user;

pub use cpuset::CpuSet;
pub use environment::Environment;
pub use machine::Machine;
pub use netdevs::NetDevice;
pub use pci::PciAddress;
pub use program::{Program, StartFacts};
pub use rdma::{GidRow, RdmaPort};
pub use record::Record;
pub use step::{Step, StepError};
pub use task::TaskFacts;
pub use topology::Topology;
pub use user::User;

use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::system::child::{self, ChildError};

/// What the node itself says, read once per node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFacts {
    /// Model names of the GPUs, as the NVIDIA driver prints them; empty
    /// without the driver.
    pub gpu_models: Vec<String>,
    /// The kernel's range of ports for outgoing connections, if known.
    pub ephemeral_ports: Option<(u16, u16)>,
    /// Ports of RDMA devices; `None`: not known.
    pub rdma: Option<Vec<RdmaPort>>,
    /// The first rows of their tables of RoCE addresses.
    pub gids: Vec<GidRow>,
    /// Network devices; `None`: not known.
    pub netdevs: Option<Vec<NetDevice>>,
    /// Where GPUs, network cards and CPUs sit.
    pub topology: Topology,
    /// What is only compared with other nodes.
    pub machine: Machine,
    /// What could not be read, in words.
    pub unknown: Vec<String>,
}

impl NodeFacts {
    /// Reads a few small files below `root`. What cannot be read stays empty
    /// and is named in `unknown`; a missing driver is no fault.
    pub fn read(root: &Path) -> NodeFacts {
        NodeFacts::seen_by(root, gpus_of, network_of)
    }

    /// The same with the questions that may get no answer. A driver that does not
    /// answer costs its own part only.
    fn seen_by(root: &Path, gpus: impl Fn(&Path) -> SeenGpus, network: impl Fn(&Path) -> SeenNetwork) -> NodeFacts {
        let mut unknown = Vec::new();
        // Both at a time; what no driver can hold up is read meanwhile.
        let (gpus, network) = (ask(|| gpus(root)), ask(|| network(root)));
        let ephemeral_ports = network::ephemeral_ports(root).unwrap_or_else(|why| {
            unknown.push(why);
            None
        });
        let cpus = Topology::of_cpus(root, &mut unknown);
        let gpus = answer(gpus, PATIENCE).unwrap_or_else(|why| SeenGpus {
            unknown: vec![format!("the node's GPUs unknown: {why}")],
            ..SeenGpus::default()
        });
        let network = answer(network, PATIENCE).unwrap_or_else(|why| SeenNetwork {
            unknown: vec![format!("the node's network unknown: {why}")],
            ..SeenNetwork::default()
        });
        unknown.extend(gpus.unknown.into_iter().chain(network.unknown));
        let mut gpu_models: Vec<String> = gpus.gpus.iter().filter_map(|gpu| gpu.model.clone()).collect();
        gpu_models.sort();
        let topology = Topology { gpus: gpus.gpus, nics: network.nics, ..cpus }.completed();
        NodeFacts {
            gpu_models,
            ephemeral_ports,
            rdma: network.rdma,
            gids: network.gids,
            netdevs: network.netdevs,
            topology,
            machine: Machine::of(gpus.more, network.more),
            unknown,
        }
    }

    /// The files that the facts of the node below `root` are read from, for a bug
    /// report; those of its user are not among them.
    ///
    /// # Errors
    /// When a driver does not answer, or there is far more than on any machine.
    pub fn record(root: &Path) -> Result<Record, String> {
        // The reader names some paths without links.
        let root = root.canonicalize().map_err(|error| format!("{}: {error}", root.display()))?;
        let look = || {
            gpus_of(&root);
            let rdma = network_of(&root).rdma;
            Topology::of_cpus(&root, &mut Vec::new());
            let _ = network::ephemeral_ports(&root);
            let node = NodeFacts { rdma, ..NodeFacts::default() };
            let task = TaskFacts::described(&root, &Environment::default(), &node);
            let named = task.nccl_files.iter().find(|value| value.name == "NCCL_TOPO_FILE");
            overlay::look(&root, named.map(|value| value.value.as_str()));
        };
        in_a_child(PATIENCE * 2, || Record::of(&root, look).bounded()).and_then(|record| record)
    }
}

/// How long the kernel may take to tell the node's GPUs, and as long its network.
const PATIENCE: Duration = Duration::from_secs(10);

/// The node's GPUs, on their way from the child that looked.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct SeenGpus {
    gpus: Vec<topology::Gpu>,
    more: machine::OfGpus,
    unknown: Vec<String>,
}

fn gpus_of(root: &Path) -> SeenGpus {
    let mut unknown = Vec::new();
    let gpus = topology::gpus(root, &mut unknown);
    let more = machine::OfGpus { driver: machine::driver(root), lanes: machine::lanes_of_gpus(root, &gpus) };
    SeenGpus { gpus, more, unknown }
}

/// The same of its network.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct SeenNetwork {
    rdma: Option<Vec<RdmaPort>>,
    gids: Vec<GidRow>,
    netdevs: Option<Vec<NetDevice>>,
    nics: Vec<topology::Nic>,
    more: machine::OfNetwork,
    unknown: Vec<String>,
}

fn network_of(root: &Path) -> SeenNetwork {
    let mut seen = SeenNetwork::default();
    match rdma::ports(root) {
        Ok(ports) => seen.rdma = ports,
        Err(why) => seen.unknown.push(why),
    }
    seen.gids = rdma::first_roce_v2_rows(root, seen.rdma.as_deref().unwrap_or_default());
    match netdevs::devices(root) {
        Ok(devices) => seen.netdevs = devices,
        Err(why) => seen.unknown.push(why),
    }
    seen.nics = topology::nics(root, &mut seen.unknown);
    seen.more = machine::OfNetwork {
        lanes: machine::lanes_of_nics(root, &seen.nics),
        mtus: machine::mtus(root, seen.netdevs.as_deref().unwrap_or_default()),
        verbs: machine::verbs(root),
    };
    seen
}

/// Looks in a child: the state of a port is asked of the device's firmware, and
/// GPUs of a driver that holds its locks while it looks at a dead one. Either may
/// keep the asker for a minute, or for ever.
fn in_a_child<T: Serialize + DeserializeOwned>(patience: Duration, look: impl FnOnce() -> T) -> Result<T, String> {
    answer(ask(look), patience)
}

fn ask<T: Serialize>(look: impl FnOnce() -> T) -> Result<child::Asked, ChildError> {
    child::ask(|| serde_json::to_vec(&look()).unwrap_or_default())
}

fn answer<T: DeserializeOwned>(asked: Result<child::Asked, ChildError>, patience: Duration) -> Result<T, String> {
    let answer = asked.and_then(|asked| asked.answer(patience)).map_err(|error| error.to_string())?;
    serde_json::from_slice(&answer).map_err(|error| error.to_string())
}

/// What srun alone can know of rank 0, handed to the tasks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rank0 {
    /// NodeName of the node that holds global rank 0.
    pub host: Option<String>,
    /// Its numeric address, from its NodeAddr.
    pub address: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma::tests::Tree;

    #[test]
    fn the_network_comes_back_from_the_child_as_it_was_seen() {
        let tree = Tree::new("node");
        tree.port("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand").driver("mlx5_0", "mlx5_core");
        tree.file("sys/class/net/eth0/flags", "0x1003\n").file("sys/class/net/eth0/speed", "25000\n");
        let facts = NodeFacts::read(tree.root());
        assert_eq!(Ok(facts.rdma), rdma::ports(tree.root()));
        assert_eq!(Ok(facts.netdevs), netdevs::devices(tree.root()));
        assert_eq!(facts.unknown, Vec::<String>::new());
        let nothing = NodeFacts::read(Path::new("/nonexistent"));
        assert_eq!(nothing, NodeFacts::default());
    }

    /// A driver that does not answer holds up whoever reads its files, and nothing
    /// else is lost.
    #[test]
    fn a_driver_that_does_not_answer_costs_the_deadline_and_no_more() {
        let tree = Tree::new("silent-driver");
        tree.port("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
        tree.file("sys/devices/system/cpu/online", "0-3\n");
        let start = std::time::Instant::now();
        let silent = |_: &Path| loop {
            std::thread::sleep(PATIENCE * 100);
        };
        let facts = NodeFacts::seen_by(tree.root(), silent, network_of);
        assert!(start.elapsed() < PATIENCE * 3, "{:?}", start.elapsed());
        assert_eq!((facts.gpu_models.len(), facts.unknown.len()), (0, 1), "{:?}", facts.unknown);
        assert!(facts.unknown[0].starts_with("the node's GPUs unknown: no answer within"), "{:?}", facts.unknown);
        let seen = (facts.rdma.map(|ports| ports.len()), facts.topology.nics.len(), facts.topology.online.len());
        assert_eq!(seen, (Some(1), 1, 4));
    }

    #[test]
    fn gpu_models_come_back_from_the_child() {
        let tree = Tree::new("models");
        for (address, model) in [("0000:01:00.0", "NVIDIA H100"), ("0000:02:00.0", "NVIDIA A100")] {
            tree.file(&format!("proc/driver/nvidia/gpus/{address}/information"), &format!("Model: \t {model}\n"));
        }
        assert_eq!(NodeFacts::read(tree.root()).gpu_models, ["NVIDIA A100", "NVIDIA H100"]);
    }

    /// A node of hundreds of containers has a device for each.
    #[test]
    fn many_devices_come_back_too() {
        let tree = Tree::new("many-devices");
        for number in 0..900 {
            tree.file(&format!("sys/class/net/veth{number:07}/flags"), "0x1003\n");
        }
        let facts = NodeFacts::read(tree.root());
        assert_eq!(facts.netdevs.map(|devices| devices.len()), Some(900));
        assert_eq!(facts.unknown, Vec::<String>::new());
    }

    /// Sixteen GPUs, 64 virtual functions, CPU lists as long as Dell's interleaved
    /// ones, and a network device for each of 900 containers.
    #[test]
    fn a_large_machine_fits_into_the_answers() {
        let tree = Tree::new("large-machine");
        let list: Vec<String> = (0..256).step_by(2).map(|cpu| cpu.to_string()).collect();
        let list = list.join(",");
        let below = |bus: u32| {
            format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0/0000:{:02x}:00.0", bus + 1, bus + 2)
        };
        for index in 0..16 {
            tree.nvidia(&format!("{}/0000:{:02x}:00.0", below(index * 8), index * 8 + 3), index, 0, &list);
        }
        for index in 0..72u32 {
            let path = format!("{}/0000:{:02x}:{:02x}.{}", below(0x80), 0x83, index / 8, index % 8);
            tree.hca(&path, &format!("mlx5_{index}"), 0, &list).netdev(&path, &format!("ib{index}"), "0x1003", "up");
        }
        for number in 0..900 {
            tree.file(&format!("sys/class/net/veth{number:07}/flags"), "0x1003\n");
        }
        let facts = NodeFacts::read(tree.root());
        assert_eq!(facts.unknown, Vec::<String>::new());
        assert_eq!((facts.topology.gpus.len(), facts.topology.nics.len()), (16, 72));
        assert_eq!((facts.rdma.unwrap().len(), facts.netdevs.unwrap().len()), (72, 972));
        let gpus = serde_json::to_vec(&gpus_of(tree.root())).unwrap().len();
        let network = serde_json::to_vec(&network_of(tree.root())).unwrap().len();
        // A quarter of child::ANSWER_MAX, and half of it.
        assert!(gpus < 128 << 10 && network < 256 << 10, "{gpus} and {network} bytes");
    }
}
