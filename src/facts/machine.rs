//! What is compared between the nodes of a step and needed for nothing else: the
//! GPUs' driver, the packet sizes of network devices, the links of cards, room for
//! shared memory, the clock.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::straggler::{self, Activity, Lanes, Snapshot};
use super::topology::{Gpu, Nic};
use super::{CpuSet, NetDevice, NodeFacts, files};
use crate::facts::netdevs::NetKind;
use crate::system::{access, limits};

/// Devices whose packet size is read: so many cards' ports and what is made of them, and
/// as many others.
const MOST_DEVICES: usize = 64;

/// RDMA devices whose file is looked for.
const MOST_VERBS: usize = 256;

/// Read once per node, outside of any container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The version of NVIDIA's kernel module.
    pub driver: Option<String>,
    /// The links of GPUs and network cards.
    pub lanes: Vec<Lanes>,
    /// Network devices with the largest packet they take (MTU), in bytes.
    pub mtus: Vec<(String, u32)>,
    /// RDMA devices with the name of their file below /dev/infiniband.
    pub verbs: Vec<(String, String)>,
}

impl Machine {
    /// The packet size of a network device.
    pub fn mtu(&self, device: &str) -> Option<u32> {
        self.mtus.iter().find(|(name, _)| name == device).map(|(_, mtu)| *mtu)
    }
}

/// The version in what the module says of itself: the first word made of numbers.
pub(super) fn driver(root: &Path) -> Option<String> {
    let text = files::attribute(&root.join("proc/driver/nvidia/version"))?;
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        let number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        (2..=4).contains(&parts.len()) && parts.iter().all(number) && word.len() <= 32
    };
    line.split_ascii_whitespace().find(is_version).map(String::from)
}

/// The links of the GPUs.
pub(super) fn lanes_of_gpus(root: &Path, gpus: &[Gpu]) -> Vec<Lanes> {
    straggler::lanes(root, gpus.iter().map(|gpu| gpu.place.address))
}

/// And of the cards.
pub(super) fn lanes_of_nics(root: &Path, nics: &[Nic]) -> Vec<Lanes> {
    straggler::lanes(root, nics.iter().filter_map(|nic| nic.place.as_ref()).map(|place| place.address))
}

/// The packet sizes of what may lead to other nodes: whatever software made may carry
/// the addresses, a bridge or a container's end of a cable too, but no port of a bridge.
pub(super) fn mtus(root: &Path, devices: &[NetDevice]) -> Vec<(String, u32)> {
    let class = root.join("sys/class/net");
    let of = |device: &NetDevice| {
        let mtu = files::attribute(&class.join(&device.name).join("mtu"))?.parse().ok()?;
        Some((device.name.clone(), mtu))
    };
    let leads = |device: &&NetDevice| {
        let virtual_ = device.kind == NetKind::Virtual;
        device.name != "lo" && !(virtual_ && (!device.up || class.join(&device.name).join("master").exists()))
    };
    let (made, cards): (Vec<_>, Vec<_>) =
        devices.iter().filter(leads).partition(|device| device.kind == NetKind::Virtual);
    [cards, made].into_iter().flat_map(|kind| kind.into_iter().filter_map(of).take(MOST_DEVICES)).collect()
}

/// The files of RDMA devices.
pub(super) fn verbs(root: &Path) -> Vec<(String, String)> {
    let class = root.join("sys/class/infiniband_verbs");
    let names = files::names(&class).ok().flatten().unwrap_or_default();
    let uverbs = names.into_iter().filter(|name| name.starts_with("uverbs")).take(MOST_VERBS);
    uverbs.filter_map(|name| Some((files::attribute(&class.join(&name).join("ibdev"))?, name))).collect()
}

/// The largest payload of an RDMA packet on a RoCE port: InfiniBand knows five sizes,
/// and the headers take 96 bytes (the kernel's iboe_get_mtu, include/rdma/ib_addr.h).
pub fn rdma_mtu(mtu: u32) -> u32 {
    let room = mtu.saturating_sub(96);
    [4096, 2048, 1024, 512, 256].into_iter().find(|size| *size <= room).unwrap_or(0)
}

/// What the leader of a node looks at when it makes its report, where the ranks will
/// run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Now {
    /// Size of /dev/shm and what is free of it, in bytes.
    pub shm: Option<(u64, u64)>,
    /// RDMA devices that the ranks may not open, because a cgroup, the file's mode or
    /// the container hides them.
    pub hidden: Vec<String>,
    /// What happened on the node meanwhile.
    pub activity: Activity,
}

impl Now {
    /// Reads it; `first` is the snapshot from before the tasks existed.
    pub fn read(root: &Path, node: &NodeFacts, first: &Snapshot, mask: Option<&CpuSet>) -> Now {
        let closed = |(device, file): &(String, String)| {
            let denied = access::may_open(&root.join("dev/infiniband").join(file)).is_err();
            denied.then(|| device.clone())
        };
        Now {
            shm: limits::tmpfs_room(&root.join("dev/shm")),
            hidden: node.machine.verbs.iter().filter_map(closed).collect(),
            activity: straggler::since(root, first, mask),
        }
    }
}

/// The wall clock, in nanoseconds since 1970.
pub fn clock() -> u64 {
    nanoseconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// On its way from the child that looked.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct OfGpus {
    pub driver: Option<String>,
    pub lanes: Vec<Lanes>,
}

/// The same of the network.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct OfNetwork {
    pub lanes: Vec<Lanes>,
    pub mtus: Vec<(String, u32)>,
    pub verbs: Vec<(String, String)>,
}

impl Machine {
    pub(super) fn of(gpus: OfGpus, network: OfNetwork) -> Machine {
        let lanes = gpus.lanes.into_iter().chain(network.lanes).collect();
        Machine { driver: gpus.driver, lanes, mtus: network.mtus, verbs: network.verbs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::Tree;

    /// As the proprietary and the open module say it, on both kinds of processors.
    #[test]
    fn the_driver_s_version_as_its_module_says_it() {
        let tree = Tree::new("driver-version");
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  515.65.01  Wed Mar 16 11:24:05 UTC 2022\n\
                 GCC version:  gcc version 12.2.0 (GCC)\n",
                Some("515.65.01"),
            ),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  384.81  Wed Aug 17 22:24:07 PDT 2016\n", Some("384.81")),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.42.06  Release Build  (abuild@host)\n",
                Some("555.42.06"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build\n\
                 GCC version:  collect2: error: ld returned 1 exit status\n",
                Some("540.4.0"),
            ),
            ("GCC version:  gcc version 12.2.0 (GCC)\n", None),
            ("NVRM version: none\n", None),
        ] {
            tree.file("proc/driver/nvidia/version", text);
            assert_eq!(driver(tree.root()).as_deref(), version, "{text}");
        }
        assert_eq!(driver(Path::new("/nonexistent")), None);
    }

    /// NVIDIA's advice for RoCE: 4200 for packets of 4096, 2200 for 2048.
    #[test]
    fn what_a_roce_packet_carries() {
        let sizes = [(9000, 4096), (4200, 4096), (4096, 2048), (2200, 2048), (1500, 1024), (300, 0), (0, 0)];
        for (mtu, payload) in sizes {
            assert_eq!(rdma_mtu(mtu), payload, "{mtu}");
        }
    }

    /// <https://github.com/NVIDIA/nccl/issues/2428>: the device is there, but the
    /// container was given one file of two.
    #[test]
    fn an_rdma_device_that_the_ranks_may_not_open() {
        let tree = Tree::new("verbs");
        for (number, device) in [(0, "erdma_0"), (1, "erdma_1")] {
            tree.file(&format!("sys/class/infiniband_verbs/uverbs{number}/ibdev"), &format!("{device}\n"));
        }
        tree.file("sys/class/infiniband_verbs/abi_version", "6\n").file("dev/infiniband/uverbs0", "");
        let node = NodeFacts::read(tree.root());
        assert_eq!(node.machine.verbs.len(), 2, "{:?}", node.unknown);
        let now = Now::read(tree.root(), &node, &Snapshot::default(), None);
        assert_eq!(now.hidden, ["erdma_1"]);
    }

    #[test]
    fn packet_sizes_come_back_from_the_child() {
        let tree = Tree::new("mtus");
        for (name, mtu) in [("eth0", "9000"), ("lo", "65536"), ("ib0", "2044")] {
            tree.file(&format!("sys/class/net/{name}/flags"), "0x1003\n");
            tree.file(&format!("sys/class/net/{name}/mtu"), &format!("{mtu}\n"));
        }
        let node = NodeFacts::read(tree.root());
        assert_eq!(
            (node.machine.mtu("eth0"), node.machine.mtu("ib0"), node.machine.mtu("lo")),
            (Some(9000), Some(2044), None)
        );
    }

    /// A node with an end of a cable for each of its containers, most of them ports of a
    /// bridge, and one, the last, by which it reaches the others.
    #[test]
    fn what_software_made_leads_to_other_nodes_too() {
        let tree = Tree::new("mtus-virtual");
        let make = |name: &str, flags: &str, mtu: &str| {
            let place = format!("sys/devices/virtual/net/{name}");
            tree.file(&format!("{place}/flags"), &format!("{flags}\n")).file(&format!("{place}/mtu"), mtu);
            let entry = tree.root().join("sys/class/net").join(name);
            std::os::unix::fs::symlink(format!("../../devices/virtual/net/{name}"), entry).unwrap();
            tree.root().join(place)
        };
        std::fs::create_dir_all(tree.root().join("sys/class/net")).unwrap();
        make("br0", "0x1003", "1500\n");
        make("down", "0x1002", "1500\n");
        for number in 0..200 {
            let port = make(&format!("veth{number}"), "0x1003", "1500\n");
            std::os::unix::fs::symlink("../br0", port.join("master")).unwrap();
        }
        make("veth999", "0x1003", "1400\n");
        let devices = super::super::netdevs::devices(tree.root()).unwrap().unwrap();
        assert!(devices.iter().all(|device| device.kind == NetKind::Virtual), "{devices:?}");
        assert_eq!(mtus(tree.root(), &devices), [("br0".to_string(), 1500), ("veth999".to_string(), 1400)]);
    }

    #[test]
    fn the_clock_goes() {
        // 2020 and 2100.
        let range = 1_577_836_800_000_000_000..4_102_444_800_000_000_000;
        assert!(range.contains(&clock()));
    }
}
