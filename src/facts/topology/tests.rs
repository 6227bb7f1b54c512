use super::*;
use crate::facts::rdma::tests::Tree;
use crate::facts::{NodeFacts, PciAddress};

impl Tree {
    pub(crate) fn link(&self, path: &str, target: &str) -> &Tree {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
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
