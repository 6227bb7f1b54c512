//! Machines for tests, built in code: where each device sits, and nothing else.

use crate::config::nics::NicRules;
use crate::config::{Settings, Source};
use crate::facts::pci::{PciAddress, Place};
use crate::facts::rdma::LinkLayer;
use crate::facts::rdma::tests::rdma_port;
use crate::facts::topology::{Gpu, GpuVendor, Netdev, Nic, NicKind, NumaNode};
use crate::facts::{CpuSet, NodeFacts, RdmaPort, Topology};

use super::nics::{NodeNics, View, choose};
use super::subnets::Addresses;

/// A machine that is being built.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    pub topology: Topology,
    pub ports: Vec<RdmaPort>,
    pub rules: NicRules,
}

pub(crate) const CONNECTX_4LX: u16 = 0x1015;
pub(crate) const CONNECTX_6: u16 = 0x101b;
pub(crate) const CONNECTX_6DX: u16 = 0x101d;
pub(crate) const VIRTUAL: u16 = 0x101e;
pub(crate) const CONNECTX_7: u16 = 0x1021;
pub(crate) const BLUEFIELD_3: u16 = 0xa2dc;

pub(crate) fn address(text: &str) -> PciAddress {
    PciAddress::parse(text).unwrap_or_else(|| panic!("{text}"))
}

/// `path` as in sysfs: the host bridge, and the bridges below it. A negative
/// NUMA node is none, as in sysfs.
fn place(text: &str, numa: i32, path: &str) -> Place {
    let mut path = path.split('/').filter(|part| !part.is_empty());
    let host_bridge = path.next().map(String::from);
    let bridges = path.map(address).collect();
    Place { host_bridge, bridges, numa: u32::try_from(numa).ok(), ..Place::of(address(text)) }
}

impl Machine {
    pub fn node(mut self, id: u32, cpus: &str, distances: &[(u32, u32)]) -> Machine {
        let cpus = CpuSet::parse(cpus).unwrap();
        self.topology.online = self.topology.online.or(&cpus);
        self.topology.nodes.push(NumaNode { id, cpus, distances: distances.to_vec() });
        self
    }

    pub fn gpu(mut self, at: &str, numa: i32, path: &str) -> Machine {
        let mut place = place(at, numa, path);
        (place.vendor, place.device) = (Some(0x10de), Some(0x2330));
        let minor = u32::try_from(self.topology.gpus.len()).ok();
        let (model, uuid) = (Some("NVIDIA H100 80GB HBM3".into()), Some(format!("GPU-{at}")));
        self.topology.gpus.push(Gpu { vendor: GpuVendor::Nvidia, place, model, uuid, minor, memory_node: None });
        self.topology.gpus.sort_by_key(|gpu| gpu.place.address);
        self
    }

    /// A ConnectX-7 with an active InfiniBand port at 400 Gb/s.
    pub fn nic(mut self, name: &str, at: &str, numa: i32, path: &str) -> Machine {
        let mut place = place(at, numa, path);
        (place.vendor, place.device) = (Some(0x15b3), Some(CONNECTX_7));
        self.topology.nics.push(Nic {
            name: name.into(),
            kind: NicKind::Verbs,
            place: Some(place),
            netdevs: vec![Netdev { name: format!("net-{name}"), master: None, up: true }],
        });
        self.ports.push(rdma_port(name, LinkLayer::InfiniBand));
        self
    }

    fn last(&mut self) -> (&mut Nic, &mut RdmaPort) {
        (self.topology.nics.last_mut().unwrap(), self.ports.last_mut().unwrap())
    }

    /// The last card is of this model, kind and rate.
    pub fn of(mut self, model: u16, link: LinkLayer, gbps: u32) -> Machine {
        let (nic, port) = self.last();
        nic.place.as_mut().unwrap().device = Some(model);
        (port.link, port.gbps) = (link, Some(gbps));
        self
    }

    /// The last card's network device belongs to a bond or bridge.
    pub fn bonded(mut self, master: &str) -> Machine {
        self.last().0.netdevs[0].master = Some(master.into());
        self
    }

    /// The last card is a virtual function of that one.
    pub fn virtual_of(mut self, at: &str) -> Machine {
        let place = self.last().0.place.as_mut().unwrap();
        (place.physical, place.device) = (Some(address(at)), Some(VIRTUAL));
        self
    }

    /// The last card is an EFA.
    pub fn efa(mut self) -> Machine {
        let (nic, port) = self.last();
        let place = nic.place.as_mut().unwrap();
        (place.vendor, place.device) = (Some(0x1d0f), Some(0xefa1));
        (port.link, port.gbps, port.driver) = (LinkLayer::Other, Some(100), Some("efa".into()));
        self
    }

    /// The last card is of Slingshot.
    pub fn slingshot(mut self) -> Machine {
        self.ports.pop();
        let nic = self.topology.nics.last_mut().unwrap();
        nic.kind = NicKind::Slingshot;
        self
    }

    /// Sets the ports of a device active or down.
    pub fn link(&mut self, name: &str, active: bool) {
        self.ports
            .iter_mut()
            .filter(|port| port.device == name)
            .for_each(|port| (port.active, port.link_up) = (active, active));
        let nic = self.topology.nics.iter_mut().find(|nic| nic.name == name).unwrap();
        nic.netdevs.iter_mut().for_each(|netdev| netdev.up = active);
    }

    pub fn down(mut self, name: &str) -> Machine {
        self.link(name, false);
        self
    }

    /// Calls a device otherwise.
    pub fn rename(&mut self, index: usize, name: &str) {
        let old = std::mem::replace(&mut self.topology.nics[index].name, name.into());
        self.ports.iter_mut().filter(|port| port.device == old).for_each(|port| port.device = name.into());
    }

    /// As facts list them.
    pub fn sorted(mut self) -> Machine {
        let key = |nic: &Nic| nic.place.as_ref().map(|place| place.address);
        self.topology.nics.sort_by_key(|nic| (nic.place.is_none(), key(nic), nic.name.clone()));
        self.ports.sort_by(|one, other| (&one.device, one.port).cmp(&(&other.device, other.port)));
        self
    }

    /// As the facts of a node.
    pub fn node_facts(&self) -> NodeFacts {
        let gpu_models = self.topology.gpus.iter().filter_map(|gpu| gpu.model.clone()).collect();
        let (topology, rdma) = (self.topology.clone(), Some(self.ports.clone()));
        NodeFacts { gpu_models, rdma, topology, ..NodeFacts::default() }
    }

    pub fn with<R>(&self, spec: &str, look: impl FnOnce(&View) -> R) -> R {
        let settings = Settings::parse(spec, Source::Option).unwrap();
        let view = View {
            topology: &self.topology,
            ports: &self.ports,
            addresses: Addresses::default(),
            settings: &settings,
            rules: &self.rules,
        };
        look(&view)
    }

    pub fn choose(&self, spec: &str) -> NodeNics {
        self.with(spec, choose)
    }

    pub fn name(&self, nic: usize) -> &str {
        &self.topology.nics[nic].name
    }

    /// The names of the cards of each GPU.
    pub fn of_gpus(&self, nics: &NodeNics) -> Vec<String> {
        let names = |nics: &Vec<usize>| nics.iter().map(|nic| self.name(*nic)).collect::<Vec<_>>().join(" ");
        nics.of_gpu.iter().map(names).collect()
    }

    /// The names of the functions that are not used.
    pub fn excluded(&self, nics: &NodeNics) -> Vec<&str> {
        let out = (0..nics.verdicts.len()).filter(|nic| !nics.verdicts[*nic].used);
        out.map(|nic| self.name(nic)).collect()
    }
}

/// A path below a switch of its own: root port, upstream and downstream port.
fn switch(bus: u8, down: u8) -> String {
    format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0/0000:{:02x}:{down:02x}.0", bus + 1, bus + 2)
}

/// GPUs and cards in pairs below switches of their own: (GPU, card's name, card).
fn pairs(list: &[(&str, &str, &str)]) -> Machine {
    let mut machine = Machine::default().node(0, "0-55,112-167", &[(0, 10), (1, 21)]);
    machine = machine.node(1, "56-111,168-223", &[(0, 21), (1, 10)]);
    for (index, (gpu, name, nic)) in list.iter().enumerate() {
        let numa = i32::from(index >= list.len() / 2);
        let bus = address(nic).bus - 3;
        machine = machine.gpu(gpu, numa, &switch(bus, 1)).nic(name, nic, numa, &switch(bus, 0));
    }
    machine
}

/// NVIDIA DGX H100 user guide, PCI tables: each GPU shares a switch with a card;
/// the storage cards hang alone.
pub(crate) fn dgx_h100() -> Machine {
    let root = |bus: &str| format!("pci0000:{bus}/0000:{bus}:01.0");
    pairs(&[
        ("0000:1b:00.0", "mlx5_0", "0000:18:00.0"),
        ("0000:43:00.0", "mlx5_3", "0000:40:00.0"),
        ("0000:52:00.0", "mlx5_4", "0000:4f:00.0"),
        ("0000:61:00.0", "mlx5_5", "0000:5e:00.0"),
        ("0000:9d:00.0", "mlx5_6", "0000:9a:00.0"),
        ("0000:c3:00.0", "mlx5_9", "0000:c0:00.0"),
        ("0000:d1:00.0", "mlx5_10", "0000:ce:00.0"),
        ("0000:df:00.0", "mlx5_11", "0000:dc:00.0"),
    ])
    .nic("mlx5_1", "0000:29:00.0", 0, &root("26"))
    .nic("mlx5_2", "0000:29:00.1", 0, &root("26"))
    .of(CONNECTX_7, LinkLayer::Ethernet, 200)
    .nic("mlx5_7", "0000:aa:00.0", 1, &root("a7"))
    .nic("mlx5_8", "0000:aa:00.1", 1, &root("a7"))
    .of(CONNECTX_7, LinkLayer::Ethernet, 200)
    .sorted()
}

/// leptonai/gpud, pkg/pci/testdata/lspci-vvv: the ConnectX-6 Dx for the outer
/// network are below the switches of GPU 0 and GPU 4.
pub(crate) fn dell_roce() -> Machine {
    let list = [
        ("0000:19:00.0", "mlx5_2", "0000:1a:00.0"),
        ("0000:3b:00.0", "mlx5_3", "0000:3c:00.0"),
        ("0000:4c:00.0", "mlx5_4", "0000:4d:00.0"),
        ("0000:5d:00.0", "mlx5_5", "0000:5e:00.0"),
        ("0000:9b:00.0", "mlx5_8", "0000:9c:00.0"),
        ("0000:bb:00.0", "mlx5_9", "0000:bc:00.0"),
        ("0000:cb:00.0", "mlx5_10", "0000:cc:00.0"),
        ("0000:db:00.0", "mlx5_11", "0000:dc:00.0"),
    ];
    let mut machine = pairs(&list);
    machine.ports.iter_mut().for_each(|port| port.link = LinkLayer::Ethernet);
    for (name, at, numa, bus) in [
        ("mlx5_0", "0000:1b:00.0", 0, 0x17),
        ("mlx5_1", "0000:1b:00.1", 0, 0x17),
        ("mlx5_6", "0000:9d:00.0", 1, 0x99),
        ("mlx5_7", "0000:9d:00.1", 1, 0x99),
    ] {
        machine = machine.nic(name, at, numa, &switch(bus, 2)).of(CONNECTX_6DX, LinkLayer::Ethernet, 100);
    }
    machine.sorted()
}

/// <https://github.com/NVIDIA/nccl/issues/1357>: four cards for eight GPUs, each
/// beside one of two.
pub(crate) fn hgx_four_cards() -> Machine {
    let mut machine = Machine::default().node(0, "0-47,96-143", &[]).node(1, "48-95,144-191", &[]);
    for index in 0..8u8 {
        let bus = 0x10 + 0x10 * index;
        let (numa, gpu) = (i32::from(index / 4), format!("0000:{:02x}:00.0", bus + 6));
        machine = machine.gpu(&gpu, numa, &switch(bus, 1));
        if index % 2 == 0 {
            let nic = format!("0000:{:02x}:00.0", bus + 3);
            machine = machine.nic(&format!("NIC{}", index / 2), &nic, numa, &switch(bus, 0));
        }
    }
    machine
        .nic("NIC4", "0000:a1:00.0", -1, "pci0000:a0/0000:a0:01.0")
        .nic("NIC5", "0000:b1:00.0", -1, "pci0000:b0/0000:b0:01.0")
        .sorted()
}

/// LLNL Lassen: every device in a PCI domain without GPUs, dual-port cards.
pub(crate) fn lassen() -> Machine {
    let mut machine = Machine::default().node(0, "8-87", &[(8, 40)]).node(8, "96-175", &[(0, 40)]);
    for (at, numa) in [("0004:04:00.0", 0), ("0004:05:00.0", 0), ("0035:03:00.0", 8), ("0035:04:00.0", 8)] {
        machine = machine.gpu(at, numa, &format!("pci{}:00", &at[..4]));
    }
    for (name, at, numa) in [
        ("mlx5_0", "0003:01:00.0", 0),
        ("mlx5_1", "0003:01:00.1", 0),
        ("mlx5_2", "0033:01:00.0", 8),
        ("mlx5_3", "0033:01:00.1", 8),
    ] {
        let path = format!("pci{}:00/{}:00:00.0", &at[..4], &at[..4]);
        machine = machine.nic(name, at, numa, &path).of(CONNECTX_6, LinkLayer::InfiniBand, 100);
    }
    machine
}

/// A guest of Hyper-V: each device alone in a PCI domain of its own.
pub(crate) fn hyper_v(gpus: &[(&str, i32)], nics: &[(&str, &str, i32)]) -> Machine {
    let mut machine = Machine::default();
    for numa in 0..4 {
        machine = machine.node(numa, &format!("{}-{}", numa * 24, numa * 24 + 23), &[]);
    }
    for (at, numa) in gpus {
        machine = machine.gpu(at, *numa, &format!("pci{}:00", &at[..4]));
    }
    for (name, at, numa) in nics {
        let path = format!("pci{}:00", &at[..4]);
        machine = machine.nic(name, at, *numa, &path).of(VIRTUAL, LinkLayer::InfiniBand, 200);
    }
    machine
}

/// Azure/azhpc-images, topology/ndv4-topo.xml, with the guest's Ethernet.
pub(crate) fn azure_nd_a100() -> Machine {
    hyper_v(
        &[
            ("0001:00:00.0", 1),
            ("0002:00:00.0", 1),
            ("0003:00:00.0", 0),
            ("0004:00:00.0", 0),
            ("000b:00:00.0", 3),
            ("000c:00:00.0", 3),
            ("000d:00:00.0", 2),
            ("000e:00:00.0", 2),
        ],
        &[
            ("mlx5_ib0", "0101:00:00.0", 1),
            ("mlx5_ib1", "0102:00:00.0", 1),
            ("mlx5_ib2", "0103:00:00.0", 0),
            ("mlx5_ib3", "0104:00:00.0", 0),
            ("mlx5_ib4", "0105:00:00.0", 3),
            ("mlx5_ib5", "0106:00:00.0", 3),
            ("mlx5_ib6", "0107:00:00.0", 2),
            ("mlx5_ib7", "0108:00:00.0", 2),
        ],
    )
    .nic("mlx5_an0", "c941:00:02.0", -1, "pcic941:00")
    .of(CONNECTX_4LX, LinkLayer::Ethernet, 50)
}

/// aws/aws-ofi-nccl, topology/p4d-24xl-topo.xml: the guest sees no bridges.
pub(crate) fn aws_p4d() -> Machine {
    let mut machine = Machine::default().node(0, "0-23,48-71", &[]).node(1, "24-47,72-95", &[]);
    for (bus, numa) in [("10", 0), ("20", 0), ("90", 1), ("a0", 1)] {
        let path = format!("pci0000:{bus}");
        for device in ["1c", "1d"] {
            machine = machine.gpu(&format!("0000:{bus}:{device}.0"), numa, &path);
        }
        machine = machine.nic(&format!("rdmap{bus}s27"), &format!("0000:{bus}:1b.0"), numa, &path).efa();
    }
    machine
}

/// GB200 NVL72 tray: GPUs and cards in domains of their own, four ConnectX-7 for
/// the GPUs and two BlueField-3.
pub(crate) fn gb200() -> Machine {
    let mut machine = Machine::default().node(0, "0-71", &[(1, 40)]).node(1, "72-143", &[(0, 40)]);
    for (at, numa) in [("0008:01:00.0", 0), ("0009:01:00.0", 0), ("0018:01:00.0", 1), ("0019:01:00.0", 1)] {
        machine = machine.gpu(at, numa, &format!("pci{0}:00/{0}:00:00.0", &at[..4]));
    }
    for (name, at, numa, bluefield) in [
        ("mlx5_0", "0000:03:00.0", 0, false),
        ("mlx5_1", "0002:03:00.0", 0, false),
        ("mlx5_2", "0006:03:00.0", 0, true),
        ("mlx5_3", "0010:03:00.0", 1, false),
        ("mlx5_4", "0012:03:00.0", 1, false),
        ("mlx5_5", "0016:03:00.0", 1, true),
    ] {
        machine = machine.nic(name, at, numa, &format!("pci{0}:00/{0}:00:00.0", &at[..4]));
        if bluefield {
            machine = machine.of(BLUEFIELD_3, LinkLayer::Ethernet, 400);
        }
    }
    machine
}

/// oracle-quickstart/oci-hpc, samples/gpu/H100-topology.xml: cards with two
/// functions, 200 Gb/s each; mlx5_2 and mlx5_11 are the front end.
pub(crate) fn oci_h100() -> Machine {
    let mut machine = Machine::default().node(0, "0-55,112-167", &[]).node(1, "56-111,168-223", &[]);
    for (gpu, card, names, numa) in [
        ("0f", "0c", ["mlx5_0", "mlx5_1"], 0),
        ("2d", "2a", ["mlx5_3", "mlx5_4"], 0),
        ("44", "41", ["mlx5_5", "mlx5_6"], 0),
        ("5b", "58", ["mlx5_7", "mlx5_8"], 0),
        ("89", "86", ["mlx5_9", "mlx5_10"], 1),
        ("a8", "a5", ["mlx5_12", "mlx5_13"], 1),
        ("c0", "bd", ["mlx5_14", "mlx5_15"], 1),
        ("d8", "d5", ["mlx5_16", "mlx5_17"], 1),
    ] {
        let bus = u8::from_str_radix(card, 16).unwrap() - 3;
        machine = machine.gpu(&format!("0000:{gpu}:00.0"), numa, &switch(bus, 1));
        for (function, name) in names.iter().enumerate() {
            machine = machine.nic(name, &format!("0000:{card}:00.{function}"), numa, &switch(bus, 0)).of(
                CONNECTX_7,
                LinkLayer::Ethernet,
                200,
            );
        }
    }
    for (name, at, numa, root) in [("mlx5_2", "0000:1f:00.0", 0, "1d"), ("mlx5_11", "0000:9a:00.0", 1, "98")] {
        machine = machine.nic(name, at, numa, &format!("pci0000:{root}/0000:{root}:01.0")).of(
            CONNECTX_6DX,
            LinkLayer::Ethernet,
            100,
        );
    }
    machine.sorted()
}

/// Frontier, LUMI-G, Tioga (HPE Cray EX235A): a Slingshot card for each NUMA node.
pub(crate) fn ex235a() -> Machine {
    let mut machine = Machine::default();
    for numa in 0..4 {
        machine = machine.node(numa, &format!("{}-{}", numa * 16, numa * 16 + 15), &[]);
    }
    for (at, numa) in [("c1", 3), ("c6", 3), ("c9", 1), ("ce", 1), ("d1", 0), ("d6", 0), ("d9", 2), ("de", 2)] {
        machine = machine.gpu(&format!("0000:{at}:00.0"), numa, &format!("pci0000:{at}"));
    }
    for gpu in &mut machine.topology.gpus {
        gpu.vendor = GpuVendor::Amd;
    }
    for (name, at, numa) in [("cxi0", "c5", 3), ("cxi1", "cd", 1), ("cxi2", "d5", 0), ("cxi3", "dd", 2)] {
        machine = machine.nic(name, &format!("0000:{at}:00.0"), numa, &format!("pci0000:{at}")).slingshot();
    }
    machine
}

/// ROCm/rccl, tools/topo_expl/models/topo_16p1h.xml, one of four sockets' worth:
/// two GPUs for each card.
pub(crate) fn mi200() -> Machine {
    let mut machine = Machine::default().node(0, "0-31", &[]);
    let upper = "pci0000:40/0000:40:01.0/0000:41:00.0";
    for (name, nic, gpus, switch) in [("mlx5_0", "4b", ["4e", "51"], "49"), ("mlx5_1", "5a", ["56", "59"], "52")] {
        for (index, gpu) in gpus.iter().enumerate() {
            let own = u8::from_str_radix(gpu, 16).unwrap() - 2;
            let path = format!("{upper}/0000:{switch}:00.0/0000:{own:02x}:00.0/0000:{:02x}:0{index}.0", own + 1);
            machine = machine.gpu(&format!("0000:{gpu}:00.0"), 0, &path);
        }
        machine = machine.nic(name, &format!("0000:{nic}:00.0"), 0, &format!("{upper}/0000:{switch}:00.0"));
        machine = machine.of(CONNECTX_6, LinkLayer::InfiniBand, 200);
    }
    machine.sorted()
}

/// Every machine above, by name.
pub(crate) fn all() -> Vec<(&'static str, Machine)> {
    vec![
        ("dgx h100", dgx_h100()),
        ("dell roce", dell_roce()),
        ("hgx with four cards", hgx_four_cards()),
        ("lassen", lassen()),
        ("azure nd a100", azure_nd_a100()),
        ("aws p4d", aws_p4d()),
        ("gb200", gb200()),
        ("oci h100", oci_h100()),
        ("ex235a", ex235a()),
        ("mi200", mi200()),
    ]
}
