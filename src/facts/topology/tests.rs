use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr};
use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::*;
use crate::facts::rdma::tests::Tree;
use crate::facts::{Environment, NodeFacts, PciAddress, TaskFacts, task};

impl Tree {
    pub(crate) fn link(&self, path: &str, target: &str) -> &Tree {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
        self
    }

    /// A PCI function as sysfs shows it, at `path` below sys/devices.
    pub(crate) fn function(&self, path: &str, class: &str, vendor: &str, numa: i32, cpus: &str) -> &Tree {
        let directory = format!("sys/devices/{path}");
        for (name, value) in [("class", class), ("vendor", vendor), ("device", "0x2330"), ("local_cpulist", cpus)] {
            self.file(&format!("{directory}/{name}"), &format!("{value}\n"));
        }
        self.file(&format!("{directory}/numa_node"), &format!("{numa}\n"));
        let address = path.rsplit('/').next().unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../devices/{path}"))
    }

    pub(crate) fn nvidia(&self, path: &str, minor: u32, numa: i32, cpus: &str) -> &Tree {
        self.function(path, "0x030200", "0x10de", numa, cpus);
        let address = path.rsplit('/').next().unwrap();
        let text = format!(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 101\nGPU UUID: \t GPU-{minor:08x}-1111-2222-3333-444444444444\n\
             Video BIOS: \t 96.00.61.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t {address}\n\
             Device Minor: \t {minor}\nGPU Firmware: \t 535.129.03\nGPU Excluded:\t No\n"
        );
        self.file(&format!("proc/driver/nvidia/gpus/{address}/information"), &text)
    }

    pub(crate) fn hca(&self, path: &str, name: &str, numa: i32, cpus: &str) -> &Tree {
        self.function(path, "0x020700", "0x15b3", numa, cpus);
        self.port(name, 1, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
        self.file(&format!("sys/class/infiniband/{name}/ports/1/phys_state"), "5: LinkUp\n");
        self.link(&format!("sys/class/infiniband/{name}/device"), &format!("../../../devices/{path}"))
    }

    pub(crate) fn netdev(&self, path: &str, name: &str, flags: &str, state: &str) -> &Tree {
        let directory = format!("sys/devices/{path}/net/{name}");
        self.file(&format!("{directory}/flags"), &format!("{flags}\n"));
        self.file(&format!("{directory}/operstate"), &format!("{state}\n"));
        self.link(&format!("sys/class/net/{name}"), &format!("../../devices/{path}/net/{name}"))
    }
}

fn address(text: &str) -> PciAddress {
    PciAddress::parse(text).unwrap()
}

fn read(tree: &Tree) -> (Topology, Vec<String>) {
    let mut unknown = Vec::new();
    (Topology::read(tree.root(), &mut unknown), unknown)
}

const GPU: &str = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0";
const HCA: &str = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0";

#[test]
fn a_gpu_and_its_card_with_all_that_is_told() {
    let tree = Tree::new("topology");
    tree.nvidia(GPU, 3, 0, "0-55,112-167").hca(HCA, "mlx5_7", 0, "0-55,112-167");
    tree.netdev(HCA, "ib0", "0x1003", "up").link(&format!("sys/devices/{HCA}/net/ib0/master"), "../../bond0");
    tree.file("sys/devices/system/node/online", "0-1\n").file("sys/devices/system/node/has_cpu", "0\n");
    tree.file("sys/devices/system/node/node0/cpulist", "0-55,112-167\n");
    tree.file("sys/devices/system/node/node0/distance", "10 21\n");
    tree.file("sys/devices/system/node/node1/cpulist", "\n");
    tree.file("sys/devices/system/cpu/online", "0-55,112-167\n").file("sys/devices/system/cpu/isolated", "54-55\n");
    tree.file("proc/net/route", "eth9\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n");
    let (topology, unknown) = read(&tree);
    assert_eq!(unknown, Vec::<String>::new());
    let cpus = CpuSet::parse("0-55,112-167").unwrap();
    let bridges = |bridges: [&str; 3]| bridges.map(address).to_vec();
    let gpu = &topology.gpus[0];
    assert_eq!(
        *gpu,
        Gpu {
            vendor: GpuVendor::Nvidia,
            place: pci::Place {
                address: address("0000:19:00.0"),
                host_bridge: Some("pci0000:15".into()),
                bridges: bridges(["0000:15:01.0", "0000:16:00.0", "0000:17:01.0"]),
                numa: Some(0),
                cpus: cpus.clone(),
                vendor: Some(0x10de),
                device: Some(0x2330),
                physical: None,
            },
            model: Some("NVIDIA H100 80GB HBM3".into()),
            uuid: Some("GPU-00000003-1111-2222-3333-444444444444".into()),
            minor: Some(3),
            memory_node: None,
        }
    );
    let nic = &topology.nics[0];
    let place = nic.place.as_ref().unwrap();
    assert_eq!((nic.name.as_str(), nic.kind, place.address), ("mlx5_7", NicKind::Verbs, address("0000:18:00.0")));
    assert_eq!(place.bridges, bridges(["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"]));
    assert_eq!(nic.netdevs, [Netdev { name: "ib0".into(), master: Some("bond0".into()), up: true }]);
    assert_eq!(topology.nodes, [NumaNode { id: 0, cpus: cpus.clone(), distances: vec![(0, 10), (1, 21)] }]);
    assert_eq!((topology.online.clone(), topology.isolated.len()), (cpus, 2));
    assert_eq!(topology.default_route.as_deref(), Some("eth9"));
    // The same through the children.
    let facts = NodeFacts::read(tree.root());
    assert_eq!((facts.topology, facts.gpu_models.len()), (topology, 1));
    assert!(facts.rdma.unwrap()[0].link_up);
}

fn cpus(text: &str) -> CpuSet {
    CpuSet::parse(text).unwrap()
}

#[test]
fn nothing_is_there_and_nothing_is_wrong() {
    let tree = Tree::new("topology-nothing");
    assert_eq!(read(&tree), (Topology::default(), Vec::new()));
    // A machine without GPUs and cards.
    tree.file("sys/devices/system/cpu/online", "0-3\n").file("sys/class/net/lo/flags", "0x9\n");
    let (topology, unknown) = read(&tree);
    assert_eq!((topology, unknown.len()), (Topology { online: cpus("0-3"), ..Topology::default() }, 0));
}

#[test]
fn this_machine_s_own() {
    let mut unknown = Vec::new();
    let topology = Topology::read(Path::new("/"), &mut unknown);
    assert_eq!(unknown, Vec::<String>::new());
    let getconf = std::process::Command::new("getconf").arg("_NPROCESSORS_ONLN").output().unwrap();
    assert_eq!(topology.online.len().to_string(), String::from_utf8_lossy(&getconf.stdout).trim());
    for node in &topology.nodes {
        assert!(node.distances.is_empty() || node.distances.contains(&(node.id, 10)), "{node:?}");
    }
}

/// Without the driver's part of /proc, as in a container that hides it.
#[test]
fn sysfs_lists_the_driver_s_gpus_where_proc_does_not() {
    let tree = Tree::new("topology-sysfs");
    tree.function("pci0000:15/0000:15:01.0/0000:19:00.0", "0x030200", "0x10de", 1, "0-7");
    tree.link("sys/bus/pci/drivers/nvidia/0000:19:00.0", "../../../../devices/pci0000:15/0000:15:01.0/0000:19:00.0");
    tree.file("sys/bus/pci/drivers/nvidia/new_id", "").file("sys/bus/pci/drivers/nvidia/bind", "");
    let (topology, unknown) = read(&tree);
    let gpu = &topology.gpus[0];
    assert_eq!((topology.gpus.len(), gpu.place.numa, gpu.place.bridges.len()), (1, Some(1), 1));
    assert_eq!((&gpu.model, &gpu.uuid, gpu.minor, unknown.len()), (&None, &None, None, 0));
    // Without sysfs the driver's part alone.
    let tree = Tree::new("topology-proc");
    tree.file("proc/driver/nvidia/gpus/0008:01:00.0/information", "Model: \t\t NVIDIA GB200\nDevice Minor: \t 2\n");
    let (topology, unknown) = read(&tree);
    assert_eq!((topology.gpus[0].place.clone(), unknown.len()), (pci::Place::of(address("0008:01:00.0")), 0));
    assert_eq!((topology.gpus[0].minor, topology.gpus[0].model.as_deref()), (Some(2), Some("NVIDIA GB200")));
}

/// Before the driver has initialised a GPU it writes question marks
/// (<https://github.com/NVIDIA/open-gpu-kernel-modules>, nv-procfs.c).
#[test]
fn a_gpu_that_is_not_initialised_has_no_uuid() {
    let tree = Tree::new("topology-asleep");
    let text = "Model: \t\t NVIDIA A100\nIRQ: \t 77\nGPU UUID: \t GPU-????????-????-????-????-????????????\n\
                Device Minor: \t 0\n";
    tree.file("proc/driver/nvidia/gpus/0000:07:00.0/information", text);
    let gpu = &read(&tree).0.gpus[0];
    assert_eq!((gpu.uuid.as_deref(), gpu.minor), (None, Some(0)));
}

/// GB200: nodes 2 to 33 are the GPUs' memory. Grace's hosts give each GPU a domain
/// of its own.
#[test]
fn memory_of_gpus_is_no_place_for_a_program() {
    let tree = gb200("topology-gb200", 34);
    let (topology, unknown) = read(&tree);
    assert_eq!(unknown, Vec::<String>::new());
    let nodes: Vec<_> = topology.nodes.iter().map(|node| (node.id, node.cpus.len(), node.distances.len())).collect();
    assert_eq!(nodes, [(0, 72, 34), (1, 72, 34)]);
    assert_eq!(topology.nodes[0].distances[..3], [(0, 10), (1, 40), (2, 80)]);
    let seen: Vec<_> = topology.gpus.iter().map(|gpu| (gpu.place.numa, gpu.memory_node)).collect();
    assert_eq!(seen, [(Some(0), Some(2)), (Some(0), Some(10)), (Some(1), Some(18)), (Some(1), Some(26))]);
}

fn gb200(name: &str, nodes: u32) -> Tree {
    let tree = Tree::new(name);
    for (index, domain) in [0x8u32, 0x9, 0x18, 0x19].into_iter().enumerate() {
        let path = format!("pci{domain:04x}:00/{domain:04x}:00:00.0/{domain:04x}:01:00.0");
        let numa = (index / 2) as u32;
        tree.nvidia(&path, index as u32, numa as i32, if numa == 0 { "0-71" } else { "72-143" });
        let status = format!("Node:      {}\nStatus:    online\n", 2 + 8 * index);
        tree.file(&format!("proc/driver/nvidia/gpus/{domain:04x}:01:00.0/numa_status"), &status);
    }
    tree.file("sys/devices/system/cpu/online", "0-143\n");
    tree.file("sys/devices/system/node/online", &format!("0-{}\n", nodes - 1))
        .file("sys/devices/system/node/has_cpu", "0-1\n");
    for node in 0..nodes {
        let column = |other: u32| {
            if other == node {
                "10"
            } else if other < 2 && node < 2 {
                "40"
            } else {
                "80"
            }
        };
        let columns: Vec<&str> = (0..nodes).map(column).collect();
        let list = ["0-71\n", "72-143\n"].get(node as usize).unwrap_or(&"\n");
        tree.file(&format!("sys/devices/system/node/node{node}/cpulist"), list);
        tree.file(&format!("sys/devices/system/node/node{node}/distance"), &format!("{}\n", columns.join(" ")));
    }
    tree
}

/// hwloc's table for Frontier's node (<https://github.com/open-mpi/hwloc>,
/// hwloc/pci-common.c): firmware tells the NUMA node, and the L3 cache follows from
/// the bus. AMD's GPUs are listed and Slingshot's cards have no verbs.
#[test]
fn ex235a_s_gpus_sit_at_an_l3_cache() {
    let tree = Tree::new("topology-ex235a");
    tree.file("sys/class/dmi/id/board_name", "HPE CRAY EX235A\n");
    for (minor, bus, numa) in [(128, "d1", 0), (129, "c6", 3)] {
        let path = format!("pci0000:{bus}/0000:{bus}:00.0");
        tree.function(&path, "0x038000", "0x1002", numa, "0-15,64-79");
        tree.link(&format!("sys/class/drm/renderD{minor}/device"), &format!("../../../devices/{path}"));
    }
    let card = "pci0000:d4/0000:d4:01.0/0000:d5:00.0";
    tree.function(card, "0x020000", "0x17db", 0, "0-15,64-79").netdev(card, "hsi2", "0x1043", "up");
    tree.link("sys/class/cxi/cxi2/device", &format!("../../../devices/{card}"));
    // The BMC's VGA and a partition of a GPU.
    tree.function("pci0000:00/0000:00:02.0", "0x030000", "0x1a03", 0, "0-15");
    tree.link("sys/class/drm/renderD140/device", "../../../devices/pci0000:00/0000:00:02.0");
    tree.file("sys/class/drm/renderD150/device/uevent", "");
    let (topology, unknown) = read(&tree);
    assert_eq!(unknown, Vec::<String>::new());
    let gpus: Vec<_> = topology.gpus.iter().map(|gpu| (gpu.vendor, gpu.place.cpus.clone(), gpu.place.numa)).collect();
    let amd = GpuVendor::Amd;
    assert_eq!(gpus, [(amd, cpus("56-63,120-127"), Some(3)), (amd, cpus("0-7,64-71"), Some(0))]);
    let nic = &topology.nics[0];
    assert_eq!((nic.name.as_str(), nic.kind, nic.netdevs[0].name.as_str()), ("cxi2", NicKind::Slingshot, "hsi2"));
    assert_eq!(nic.place.as_ref().unwrap().cpus, cpus("8-15,72-79"));
}

/// <https://github.com/vllm-project/vllm/issues/16997>: virtual functions, whose
/// card is known by a link; a bond, which still is a card; a device of software.
#[test]
fn virtual_functions_bonds_and_devices_of_software() {
    let tree = Tree::new("topology-virtual");
    let port = "pci0000:a0/0000:a0:01.0";
    tree.hca(&format!("{port}/0000:a1:00.0"), "mlx5_0", 1, "8-15");
    tree.hca(&format!("{port}/0000:a1:00.2"), "mlx5_4", 1, "8-15");
    tree.link(&format!("sys/devices/{port}/0000:a1:00.2/physfn"), "../0000:a1:00.0");
    let bond = format!("{port}/0000:a1:00.1");
    tree.hca(&bond, "mlx5_bond_0", 1, "8-15").netdev(&bond, "eth2", "0x1803", "up");
    tree.link(&format!("sys/devices/{bond}/net/eth2/master"), "../../../../../virtual/net/bond0");
    tree.port("rxe0", 1, "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet");
    tree.file("sys/class/infiniband/README", "no device");
    let (topology, unknown) = read(&tree);
    assert_eq!(unknown, Vec::<String>::new());
    let place = |nic: &Nic| nic.place.as_ref().map(|place| place.address.to_string());
    let seen: Vec<_> = topology.nics.iter().map(|nic| (nic.name.clone(), place(nic))).collect();
    let at = |name: &str, place: Option<&str>| (name.to_string(), place.map(String::from));
    assert_eq!(
        seen,
        [
            at("mlx5_0", Some("0000:a1:00.0")),
            at("mlx5_bond_0", Some("0000:a1:00.1")),
            at("mlx5_4", Some("0000:a1:00.2")),
            at("rxe0", None)
        ]
    );
    let physical: Vec<_> =
        topology.nics.iter().map(|nic| nic.place.as_ref().and_then(|place| place.physical)).collect();
    assert_eq!(physical, [None, None, Some(address("0000:a1:00.0")), None]);
    assert_eq!(topology.nics[1].netdevs, [Netdev { name: "eth2".into(), master: Some("bond0".into()), up: true }]);
}

/// "-1" is "unknown": of such a device the kernel lists every CPU
/// (<https://github.com/aws/aws-ofi-nccl/issues/873>).
#[test]
fn an_unknown_node_is_not_node_0() {
    let tree = Tree::new("topology-unknown-node");
    tree.nvidia("pci0000:00/0000:00:16.0", 0, -1, "0-191");
    let place = &read(&tree).0.gpus[0].place;
    assert_eq!(
        (place.numa, place.cpus.clone(), place.host_bridge.as_deref()),
        (None, CpuSet::EMPTY, Some("pci0000:00"))
    );
}

/// What trees recorded from real machines taught
/// (<https://github.com/open-mpi/hwloc/tree/master/tests/hwloc/linux>): a NUL behind
/// a list (Linux 2.6.32), has_cpu empty after CPUs went offline, columns for another
/// number of nodes, only the mask of a device's CPUs, a node that is named beside a
/// list of all CPUs.
#[test]
fn what_real_kernels_wrote() {
    let tree = Tree::new("topology-real");
    tree.file("sys/devices/system/node/online", "0-1\n\0").file("sys/devices/system/node/has_cpu", "\n");
    tree.file("sys/devices/system/node/node0/cpulist", "0,2,4,6\n");
    tree.file("sys/devices/system/node/node1/cpulist", "1,3,5,7\n");
    tree.file("sys/devices/system/node/node0/distance", "10 20\n");
    tree.file("sys/devices/system/node/node1/distance", "20 20 10\n");
    tree.nvidia("pci0000:00/0000:00:01.0", 0, 0, "x").nvidia("pci0000:40/0000:40:01.0", 1, 1, "0-7");
    let directory = "sys/devices/pci0000:00/0000:00:01.0";
    fs::remove_file(tree.root().join(format!("{directory}/local_cpulist"))).unwrap();
    tree.file(&format!("{directory}/local_cpus"), "0000,00000000,00000014\n");
    let (topology, unknown) = read(&tree);
    assert_eq!(unknown.len(), 1, "{unknown:?}");
    assert!(unknown[0].ends_with("node1/distance: not a distance for each node"), "{unknown:?}");
    let nodes: Vec<_> = topology.nodes.iter().map(|node| (node.id, node.cpus.clone(), node.distances.len())).collect();
    assert_eq!(nodes, [(0, cpus("0,2,4,6"), 2), (1, cpus("1,3,5,7"), 0)]);
    let gpus: Vec<_> = topology.gpus.iter().map(|gpu| gpu.place.cpus.clone()).collect();
    assert_eq!(gpus, [cpus("2,4"), cpus("1,3,5,7")]);
}

/// A small machine with one of everything.
fn one_of_everything(name: &str) -> Tree {
    let tree = gb200(name, 3);
    tree.nvidia(GPU, 9, 0, "0-71").hca(HCA, "mlx5_7", 0, "0-71").netdev(HCA, "ib0", "0x1003", "up");
    tree.link(&format!("sys/devices/{HCA}/net/ib0/master"), "../../bond0");
    let other = "pci0000:a0/0000:a0:01.0/0000:a1:00.2";
    tree.hca(other, "mlx5_8", 1, "72-143").driver("mlx5_9", "mlx5_core");
    tree.link(&format!("sys/devices/{other}/physfn"), "../0000:a1:00.0");
    let card = "pci0000:d4/0000:d4:01.0/0000:d5:00.0";
    tree.function(card, "0x020000", "0x17db", 0, "0-71").netdev(card, "hsn0", "0x1043", "up");
    tree.link("sys/class/cxi/cxi0/device", &format!("../../../devices/{card}"));
    tree.function("pci0000:c0/0000:c1:00.0", "0x120000", "0x1002", 0, "0-71");
    tree.link("sys/class/drm/renderD128/device", "../../../devices/pci0000:c0/0000:c1:00.0");
    tree.file("sys/class/dmi/id/board_name", "a board\n").file("sys/devices/system/cpu/isolated", "5\n");
    tree.file("proc/net/route", "eth9\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n");
    tree.file("proc/net/ipv6_route", "").file("dev/nvidia0", "").file("dev/nvidia9", "");
    for cpu in 0..2 {
        tree.file(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), "0-1\n");
    }
    tree
}

/// Every path of the tree that a reader may meet, directories last.
fn paths(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort_by_key(|path| (path.symlink_metadata().unwrap().is_dir(), path.clone()));
    found
}

fn remove(path: &Path) {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// Each path in turn is taken away or becomes something else. EINVAL and EIO, which
/// kernels answer too, cannot be made with files; to the reader they are as a file
/// that is a directory (EISDIR).
#[test]
fn no_file_s_absence_or_content_does_more_than_cost_facts() {
    let tree = one_of_everything("topology-fuzz");
    let (whole, unknown) = read(&tree);
    assert_eq!(unknown, Vec::<String>::new());
    assert_eq!((whole.gpus.len(), whole.nics.len(), whole.nodes.len()), (6, 4, 2));
    let mask = cpus("0-3");
    assert_eq!(task::cores(tree.root(), &mask), [cpus("0-1")]);
    let environment = Environment::default();
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u8;
    let noise: Vec<u8> = (1..=1 << 20).map(byte).collect();
    let aside = tree.root().with_extension("aside");
    let start = Instant::now();
    let mut tried = 0;
    for path in paths(tree.root()) {
        if path.symlink_metadata().is_err() {
            continue;
        }
        remove(&aside);
        fs::rename(&path, &aside).unwrap();
        // What may stand where a directory was is no text.
        let kinds: &[u8] = if aside.is_dir() { &[0, 1, 4, 6, 7] } else { &[0, 1, 2, 3, 4, 5, 6, 7, 8] };
        for kind in kinds {
            match kind {
                0 => {}
                1 => fs::write(&path, &noise[..64]).unwrap(),
                2 => fs::write(&path, [0; 32]).unwrap(),
                3 => fs::write(&path, &noise).unwrap(),
                4 => fs::create_dir(&path).unwrap(),
                5 => {
                    let fifo = CString::new(path.as_os_str().as_bytes()).unwrap();
                    // SAFETY: a C string.
                    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
                }
                6 => std::os::unix::fs::symlink("/nonexistent/elsewhere", &path).unwrap(),
                7 => std::os::unix::fs::symlink(&path, &path).unwrap(),
                _ => fs::write(&path, "99999999999999999999,-5--3\n").unwrap(),
            }
            tried += 1;
            let (topology, _) = read(&tree);
            let _ = (crate::facts::rdma::ports(tree.root()), crate::facts::netdevs::devices(tree.root()));
            let node = NodeFacts { topology: topology.clone(), ..NodeFacts::default() };
            let _ = TaskFacts::described(tree.root(), &environment, &node);
            let _ = task::cores(tree.root(), &mask);
            for gpu in &topology.gpus {
                let before = whole.gpus.iter().find(|whole| whole.place.address == gpu.place.address);
                let before = before.unwrap_or_else(|| panic!("{} {kind}: a GPU from nowhere: {gpu:?}", path.display()));
                assert!(gpu.place.numa.is_none_or(|numa| Some(numa) == before.place.numa), "{} {kind}", path.display());
                assert!(gpu.place.cpus.is_within(&before.place.cpus), "{} {kind}: {gpu:?}", path.display());
                assert!(
                    gpu.place.bridges.is_empty() || gpu.place.bridges == before.place.bridges,
                    "{} {kind}",
                    path.display()
                );
            }
            let before: BTreeSet<_> = whole.nodes.iter().map(|node| node.id).collect();
            assert!(topology.nodes.iter().all(|node| before.contains(&node.id)), "{} {kind}", path.display());
            let text = serde_json::to_string(&topology).unwrap();
            assert_eq!(serde_json::from_str::<Topology>(&text).unwrap(), topology);
            remove(&path);
        }
        fs::rename(&aside, &path).unwrap();
    }
    assert_eq!(read(&tree).0, whole);
    assert!(tried > 900, "{tried}");
    assert!(start.elapsed() < Duration::from_secs(120), "{tried} trees took {:?}", start.elapsed());
}

#[test]
fn a_directory_with_more_entries_than_a_machine_has_devices() {
    let tree = Tree::new("topology-flood");
    let class = tree.root().join("sys/class/infiniband");
    fs::create_dir_all(&class).unwrap();
    for number in 0..17_000 {
        fs::write(class.join(format!("f{number}")), "").unwrap();
    }
    let gpus = tree.root().join("proc/driver/nvidia/gpus");
    for number in 0..400u32 {
        fs::create_dir_all(gpus.join(format!("{number:04x}:01:00.0"))).unwrap();
    }
    fs::create_dir_all(gpus.join(OsStr::from_bytes(b"0000:\xff\xfe:00.0"))).unwrap();
    let (topology, unknown) = read(&tree);
    assert_eq!((topology.gpus.len(), topology.nics.len()), (128, 0));
    assert!(unknown.iter().any(|line| line.contains("more than 16384 entries")), "{unknown:?}");
    assert!(unknown.iter().any(|line| line.contains("more than 128 GPUs")), "{unknown:?}");
    assert!(unknown.len() < 5, "{unknown:?}");
}

/// What is opened below some directories, as the kernel tells it.
struct Opened {
    inotify: fs::File,
    directories: BTreeMap<i32, PathBuf>,
}

impl Opened {
    fn below(root: &Path) -> Opened {
        // SAFETY: takes a number; the descriptor is new and nobody else's.
        let inotify = unsafe { fs::File::from_raw_fd(libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC)) };
        let mut opened = Opened { inotify, directories: BTreeMap::new() };
        for path in paths(root).into_iter().filter(|path| path.symlink_metadata().unwrap().is_dir()) {
            let name = CString::new(path.as_os_str().as_bytes()).unwrap();
            // SAFETY: an open descriptor and a C string.
            let watch = unsafe { libc::inotify_add_watch(opened.inotify.as_raw_fd(), name.as_ptr(), libc::IN_OPEN) };
            assert!(watch >= 0, "{}", std::io::Error::last_os_error());
            opened.directories.insert(watch, path);
        }
        opened
    }

    /// The files, each as often as it was opened; directories are listed for free.
    fn files(mut self) -> Vec<PathBuf> {
        let (mut files, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
        while let Ok(length) = self.inotify.read(&mut buffer) {
            let mut events = &buffer[..length];
            while let Some((head, rest)) = events.split_at_checked(16) {
                let number = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
                let (name, rest) = rest.split_at(number(12) as usize);
                assert_eq!(number(4) & libc::IN_Q_OVERFLOW, 0);
                if number(4) & libc::IN_ISDIR == 0 {
                    let name = name.split(|byte| *byte == 0).next().unwrap();
                    files.push(self.directories[&(number(0) as i32)].join(OsStr::from_bytes(name)));
                }
                events = rest;
            }
        }
        files
    }
}

/// Eight GPUs and twelve cards among the 517 functions of a server
/// (<https://github.com/leptonai/gpud>, pkg/pci/testdata/lspci-vvv).
fn server(name: &str) -> (Tree, Vec<String>) {
    let tree = Tree::new(name);
    let mut named = Vec::new();
    for index in 0..8u32 {
        let (numa, list) = if index < 4 { (0, "0-55,112-167") } else { (1, "56-111,168-223") };
        let (root, bus) = (0x10 + index * 0x1c, 0x11 + index * 0x1c);
        let below = format!("pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{bus:02x}:00.0");
        let port = |number: u32| format!("{below}/0000:{:02x}:{number:02x}.0", bus + 1);
        let (gpu, hca) =
            (format!("{}/0000:{:02x}:00.0", port(0), bus + 2), format!("{}/0000:{:02x}:00.0", port(1), bus + 3));
        tree.nvidia(&gpu, index, numa, list).hca(&hca, &format!("mlx5_{index}"), numa, list);
        tree.netdev(&hca, &format!("ib{index}"), "0x1043", "up");
        named.extend([gpu, hca]);
        if index % 2 == 0 {
            let other = format!("{}/0000:{:02x}:00.0", port(2), bus + 4);
            tree.hca(&other, &format!("mlx5_{}", 8 + index), numa, list);
            tree.netdev(&other, &format!("eth{index}"), "0x1043", "up");
            named.push(other);
        }
    }
    let spare = 517 - named.len();
    for index in 0..spare {
        let path = format!("pci0000:f0/0000:f0:{:02x}.{}/0001:{index:02x}:00.0", index / 8 % 32, index % 8);
        tree.function(&path.replace("0001:", &format!("{:04x}:", 1 + index / 256)), "0x088000", "0x8086", 0, "0-223");
    }
    tree.file("sys/devices/system/cpu/online", "0-223\n").file("sys/devices/system/cpu/isolated", "\n");
    tree.file("sys/devices/system/node/online", "0-1\n").file("sys/devices/system/node/has_cpu", "0-1\n");
    for (node, list, columns) in [(0, "0-55,112-167", "10 21"), (1, "56-111,168-223", "21 10")] {
        tree.file(&format!("sys/devices/system/node/node{node}/cpulist"), &format!("{list}\n"));
        tree.file(&format!("sys/devices/system/node/node{node}/distance"), &format!("{columns}\n"));
    }
    tree.file("sys/class/dmi/id/board_name", "0C1JHM\n");
    (tree, named)
}

#[test]
fn the_bus_is_not_scanned_and_each_device_costs_a_handful_of_files() {
    let (tree, named) = server("topology-517");
    assert_eq!(fs::read_dir(tree.root().join("sys/bus/pci/devices")).unwrap().count(), 517);
    let opened = Opened::below(tree.root());
    let (topology, unknown) = read(&tree);
    let files = opened.files();
    assert_eq!((topology.gpus.len(), topology.nics.len(), topology.nodes.len()), (8, 12, 2));
    assert_eq!(unknown, Vec::<String>::new());
    let functions = tree.root().join("sys/devices");
    let strangers: Vec<_> = files
        .iter()
        .filter(|file| file.starts_with(&functions) && !file.starts_with(functions.join("system")))
        .filter(|file| !named.iter().any(|named| file.starts_with(functions.join(named))))
        .collect();
    assert!(strangers.is_empty(), "{strangers:?}");
    // A GPU: information, vendor, device, numa_node, local_cpulist. A card: the last
    // four, and two of its network device.
    assert!((8 * 5 + 12 * 4..=8 * 6 + 12 * 6 + 20).contains(&files.len()), "{}: {files:?}", files.len());
    // With its ports and all network devices, as a step reads it.
    let opened = Opened::below(tree.root());
    let node = NodeFacts::read(tree.root());
    let files = opened.files();
    assert_eq!((node.rdma.unwrap().len(), node.netdevs.unwrap().len()), (12, 12));
    assert!(files.len() <= 8 * 6 + 12 * 6 + 12 * 4 + 12 * 4 + 20, "{}: {files:?}", files.len());
}
