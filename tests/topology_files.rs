//! Machines as other projects recorded them: hwloc's XML and whole trees of /sys,
//! NCCL's and RCCL's XML. The environment variable TOPOLOGY_FILES names a folder
//! with such files; they are other people's, and not part of this repository.
//!
//! An XML file has the PCI tree only, not what a card's port says: ports count as
//! up and equally fast here where the file does not say otherwise.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::machine::{Addresses, Expect, Function, GpuKind, Machine, NicKind, Nics, Pci, TempTree, list, numbers};
use common::planned::{Seen, faults, means};
use palingenesis::facts::NodeFacts;
use roxmltree::{Document, Node, ParsingOptions};

/// The files below the folder, or `None` with a word about it.
fn files(test: &str, ends: &str) -> Option<Vec<PathBuf>> {
    let Some(folder) = std::env::var_os("TOPOLOGY_FILES") else {
        println!("{test}: skipped: TOPOLOGY_FILES is not set");
        return None;
    };
    fn walk(folder: &Path, ends: &str, files: &mut Vec<PathBuf>) {
        let mut entries: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            match path.is_dir() {
                true => walk(&path, ends, files),
                false if path.to_string_lossy().ends_with(ends) => files.push(path),
                false => {}
            }
        }
    }
    let mut files = Vec::new();
    walk(Path::new(&folder), ends, &mut files);
    assert!(!files.is_empty(), "{} has no {ends}", Path::new(&folder).display());
    Some(files)
}

/// The tree that a file describes; `None`: it describes another thing.
fn converted(path: &Path) -> Option<Machine> {
    let text = fs::read_to_string(path).unwrap();
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    let document =
        Document::parse_with_options(&text, options).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut tree = Tree::default();
    match document.root_element().tag_name().name() {
        "topology" => tree.hwloc(document.root_element(), &Above::default()),
        "system" => tree.nccl(document.root_element()),
        _ => return None,
    }
    Some(tree.machine(&path.file_stem().unwrap().to_string_lossy()))
}

/// What is gathered from a file.
#[derive(Debug, Default)]
struct Tree {
    functions: Vec<Function>,
    gpu: Option<GpuKind>,
    nics: Vec<Nics>,
    cpus: BTreeMap<String, String>,
    board: String,
}

/// What holds for what stands below an element.
#[derive(Debug, Default, Clone)]
struct Above {
    host: Option<String>,
    bridges: Vec<String>,
    numa: Option<u32>,
}

/// Bits of a mask in hexadecimal, words with commas, the most significant first;
/// an empty word is zero.
fn mask(text: &str) -> Vec<u32> {
    let words: Vec<u32> = text
        .split(',')
        .map(|word| u32::from_str_radix(word.trim().trim_start_matches("0x"), 16).unwrap_or(0))
        .collect();
    let mut bits = Vec::new();
    for (index, word) in words.iter().rev().enumerate() {
        bits.extend((0..32).filter(|bit| word & (1 << bit) != 0).map(|bit| index as u32 * 32 + bit));
    }
    bits
}

/// Devices that are talked to by verbs, by the names that their drivers give.
fn is_rdma(name: &str) -> bool {
    ["mlx", "qib", "hfi1_", "rdmap", "bnxt_re", "irdma", "usnic", "ibp"].iter().any(|prefix| name.starts_with(prefix))
}

impl Tree {
    /// A function; what it is shows in its class and its devices' names.
    #[allow(clippy::too_many_arguments)]
    fn add(
        &mut self,
        above: &Above,
        address: &str,
        class: &str,
        id: &str,
        rdma: &[(String, String)],
        netdevs: &[String],
        is_gpu: bool,
    ) {
        // Hand-made files have one bridge several times.
        if self.functions.iter().any(|function| function.address == address) {
            return;
        }
        let bus = address.rsplit_once(':').unwrap().0;
        let host = above.host.clone().unwrap_or_else(|| match address.strip_prefix("ffff:ff:") {
            // A bridge of nobody's, put in to say what is near.
            Some(device) => format!("pciffff:{}", &device[..2]),
            None => format!("pci{bus}"),
        });
        let (bridges, numa) = (above.bridges.clone(), above.numa);
        let function = |address: &str, name: String| Function {
            address: address.into(),
            host: host.clone(),
            numa,
            bridges: bridges.clone(),
            name,
        };
        let (vendor, _) = id.split_once(':').unwrap_or_default();
        if is_gpu {
            let number = self.functions.iter().filter(|function| function.name.starts_with("gpu")).count();
            self.functions.push(function(address, format!("gpu{number}")));
            let maker = if vendor == "1002" { "amd" } else { "nvidia" };
            let class = Some(class.to_string()).filter(|class| class.len() == 8);
            self.gpu = Some(GpuKind {
                vendor: maker.into(),
                model: "a GPU".into(),
                pci: id.into(),
                class,
                memory_nodes: vec![],
            });
            return;
        }
        let slingshot = vendor == "17db";
        let infiniband = class.starts_with("0x0207");
        let mut devices = rdma.to_vec();
        if devices.is_empty() && (infiniband || slingshot || id.starts_with("1d0f:efa")) {
            devices.push((format!("nic{}", self.nics.len()), "ACTIVE".into()));
        }
        if devices.is_empty() {
            self.functions.push(function(address, netdevs.first().cloned().unwrap_or_default()));
            return;
        }
        for (number, (name, state)) in devices.into_iter().enumerate() {
            // NCCL joins the functions of a card.
            let own = format!("{}{number}", &address[..address.len() - 1]);
            let taken = self.functions.iter().any(|function| function.name == name);
            let name = if taken { format!("{name}_{}", self.nics.len()) } else { name };
            self.functions.push(function(if number == 0 { address } else { &own }, name.clone()));
            let link = match (infiniband, vendor) {
                (true, _) => "InfiniBand",
                (_, "1d0f") => "Unspecified",
                _ => "Ethernet",
            };
            let netdev = netdevs.get(number).cloned().unwrap_or_default();
            self.nics.push(Nics {
                kind: if slingshot { NicKind::Slingshot } else { NicKind::Verbs },
                pci: id.into(),
                link: link.into(),
                rate: "100 Gb/sec (4X EDR)".into(),
                state,
                bond: None,
                devices: [(name, netdev)].into(),
                physical: BTreeMap::new(),
            });
        }
    }

    /// hwloc, versions 1 to 3: objects within objects. Of version 1 a NUMA node is
    /// above its devices; later it is beside them and they have its nodeset.
    fn hwloc(&mut self, element: Node, above: &Above) {
        for object in element.children().filter(|child| child.has_tag_name("object")) {
            let of = |name: &str| object.attribute(name).unwrap_or_default();
            let mut below = above.clone();
            if let Some(nodes) = object.attribute("nodeset") {
                let nodes = mask(nodes);
                below.numa = if nodes.len() == 1 { Some(nodes[0]) } else { None };
            }
            let info = |name: &str| {
                let infos = object.children().filter(|child| child.has_tag_name("info"));
                infos.filter(|info| info.attribute("name") == Some(name)).find_map(|info| info.attribute("value"))
            };
            if let Some(board) = info("DMIBoardName") {
                self.board = board.trim().into();
            }
            match of("type") {
                "NUMANode" => {
                    let cpus = mask(of("cpuset"));
                    if !cpus.is_empty() {
                        self.cpus.insert(of("os_index").into(), list(&cpus));
                    }
                }
                "Bridge" if of("bridge_type").starts_with("0-") => {
                    let (domain, rest) = of("bridge_pci").split_once(':').unwrap();
                    below.host = Some(format!("pci{domain}:{}", &rest[1..3]));
                }
                "Bridge" => {
                    self.add(above, of("pci_busid"), "0x060400", "", &[], &[], false);
                    below.bridges.push(of("pci_busid").into());
                }
                "PCIDev" => {
                    // "0302 [10de:1db1] …"
                    let kind = of("pci_type");
                    let (class, rest) = kind.split_once(' ').unwrap();
                    let id = &rest[1..10];
                    let devices: Vec<Node> =
                        object.children().filter(|child| child.attribute("type") == Some("OSDev")).collect();
                    let (mut rdma, mut netdevs) = (Vec::new(), Vec::new());
                    for device in devices {
                        let name = device.attribute("name").unwrap_or_default().to_string();
                        let state = device.children().find(|info| info.attribute("name") == Some("Port1State"));
                        let down = state.is_some_and(|info| info.attribute("value") != Some("4"));
                        match (device.attribute("osdev_type"), is_rdma(&name)) {
                            (Some("3"), _) | (_, true) => {
                                rdma.push((name, if down { "DOWN" } else { "ACTIVE" }.to_string()))
                            }
                            (Some("2" | "16"), _) => netdevs.push(name),
                            _ => {}
                        }
                    }
                    let gpu = (id.starts_with("10de") && class.starts_with("03"))
                        || (id.starts_with("1002") && (class.starts_with("03") || class == "1200"));
                    self.add(above, of("pci_busid"), &format!("0x{class}00"), id, &rdma, &netdevs, gpu);
                }
                _ => {}
            }
            self.hwloc(object, &below);
        }
    }

    /// NCCL: a node for each NUMA node, functions within bridges.
    fn nccl(&mut self, system: Node) {
        for cpu in system.children().filter(|child| child.has_tag_name("cpu")) {
            let numa = cpu.attribute("numaid").and_then(|node| node.parse().ok());
            if let (Some(node), Some(cpus)) = (cpu.attribute("numaid"), cpu.attribute("affinity")) {
                self.cpus.insert(node.into(), list(&mask(cpus)));
            }
            self.nccl_functions(cpu, &Above { numa, ..Above::default() });
        }
    }

    fn nccl_functions(&mut self, element: Node, above: &Above) {
        for function in element.children().filter(|child| child.has_tag_name("pci")) {
            let address = function.attribute("busid").unwrap();
            let child = |name: &str| function.children().find(|child| child.has_tag_name(name));
            let class = function.attribute("class").unwrap_or_default();
            let number = |name: &str| function.attribute(name).unwrap_or("0x0000").trim_start_matches("0x").to_string();
            let is_gpu = child("gpu").is_some() || class.starts_with("0x0302") || class.starts_with("0x0380");
            let mut id = format!("{}:{}", number("vendor"), number("device"));
            if id.starts_with("0000") && !class.starts_with("0x0604") {
                id = if is_gpu { "10de:0000" } else { "15b3:0000" }.into();
            }
            let nets = child("nic").into_iter().flat_map(|nic| nic.children().filter(|net| net.has_tag_name("net")));
            let names: Vec<String> = nets.filter_map(|net| net.attribute("name")).map(String::from).collect();
            let rdma: Vec<(String, String)> =
                names.iter().filter(|name| is_rdma(name)).map(|name| (name.clone(), "ACTIVE".into())).collect();
            let netdevs: Vec<String> = names.into_iter().filter(|name| !is_rdma(name)).collect();
            // Cards that the file does not name by a child are RDMA's: it lists no others.
            let rdma = match (class.starts_with("0x0200") && child("nic").is_none(), rdma.is_empty()) {
                (true, true) => vec![(format!("nic{}", self.nics.len()), "ACTIVE".to_string())],
                _ => rdma,
            };
            self.add(above, address, class, &id, &rdma, &netdevs, is_gpu);
            let mut below = above.clone();
            below.host = self.functions.iter().find(|f| f.address == address).map(|f| f.host.clone());
            below.bridges.push(address.into());
            self.nccl_functions(function, &below);
        }
    }

    fn machine(self, name: &str) -> Machine {
        let kind = GpuKind {
            vendor: "nvidia".into(),
            model: "none".into(),
            pci: "10de:0000".into(),
            class: None,
            memory_nodes: vec![],
        };
        let mut machine = Machine {
            name: name.into(),
            placed: Some(self.functions),
            addresses: Addresses::Published,
            source: Vec::new(),
            reconstructed: Vec::new(),
            dmi: Default::default(),
            cpus: self.cpus,
            packages: BTreeMap::new(),
            threads: Default::default(),
            cache: 0,
            memory_nodes: String::new(),
            default_route: None,
            functions: 0,
            gpu: self.gpu.unwrap_or(kind),
            nics: self.nics,
            expect: Expect::default(),
            pci: Pci {
                prefix: String::new(),
                tree: None,
                matrix: None,
                gpu_numa: Vec::new(),
                nic_numa: BTreeMap::new(),
            },
        };
        machine.dmi.board = self.board;
        machine
    }
}

/// Files of machines whose description stands in tests/fixtures/machines.
const KNOWN: [(&str, &str); 11] = [
    ("nccl-azure/ndv4-topo.xml", "azure-nd96asr-v4"),
    ("nccl-azure/ndv5-topo.xml", "azure-nd-h100-v5"),
    ("nccl-azure/ndv2-topo.xml", "azure-nd40rs-v2"),
    ("nccl-azure/ncv4-topo.xml", "azure-nc96-a100-v4"),
    ("nccl-aws/p4d-24xl-topo.xml", "aws-p4d-24xlarge"),
    ("nccl-oci/H100-topology.xml", "oci-bm-gpu-h100-8"),
    ("nccl-oci/topo-flattened.xml", "oci-bm-gpu4-8"),
    ("nccl-rccl/topo_8p_940.xml", "mi300x-oam-8"),
    ("nccl-rccl/topo_16p1h.xml", "mi200-16gcd"),
    ("mpibind/coral-lassen.xml", "llnl-lassen"),
    ("mpibind/eas-tioga.xml", "llnl-tioga-frontier"),
];

/// The cards nearest to a GPU, told from the functions alone: the most bridges in
/// common, then the fewest that are not; then a common host bridge; then the NUMA
/// node.
fn nearest(gpu: &Function, nics: &[&Function]) -> BTreeSet<String> {
    let rank = |nic: &Function| {
        let common = gpu.bridges.iter().zip(&nic.bridges).take_while(|(one, other)| one == other).count();
        let apart = gpu.bridges.len().max(nic.bridges.len()) - common;
        let bus = |function: &Function| function.address.rsplit_once(':').unwrap().0.to_string();
        match () {
            () if common > 0 => (0, usize::MAX - common, apart),
            () if gpu.host == nic.host => (1, 0, if bus(gpu) == bus(nic) { 0 } else { apart.max(1) }),
            () if gpu.numa.is_some() && gpu.numa == nic.numa => (2, 0, 0),
            () if gpu.numa.is_some() && nic.numa.is_some() => (3, 0, 0),
            () => (4, 0, 0),
        }
    };
    let best = nics.iter().map(|nic| rank(nic)).min();
    nics.iter().filter(|nic| Some(rank(nic)) == best).map(|nic| nic.name.clone()).collect()
}

#[test]
fn machines_in_xml_files_of_hwloc_and_nccl() {
    let Some(files) = files("machines_in_xml_files_of_hwloc_and_nccl", ".xml") else {
        return;
    };
    let (mut known, mut others, mut wrong) = (0, 0, Vec::new());
    for path in files {
        let Some(mut machine) = converted(&path) else {
            println!("{}: no topology", path.display());
            continue;
        };
        let own = KNOWN.iter().find(|(file, _)| path.ends_with(file));
        let described = own.map(|(_, name)| Machine::load(name));
        if let Some(described) = &described {
            machine.expect = described.expect.clone();
        }
        let mut seen = Seen::of(machine);
        let topology = &seen.node.topology;
        assert_eq!(seen.node.unknown, Vec::<String>::new(), "{}", path.display());
        let functions = seen.machine.functions();
        let cards: Vec<&Function> =
            functions.iter().filter(|f| seen.machine.cards().iter().any(|(name, _)| *name == f.name)).collect();
        assert_eq!(
            (topology.gpus.len(), topology.nics.len()),
            (seen.machine.gpus().len(), cards.len()),
            "{}",
            path.display()
        );
        let choice = seen.choice();
        if let Some(described) = &described {
            // Cards that the file leaves out are nobody's here.
            seen.machine.expect.exclude.retain(|word| topology.nics.iter().any(|nic| means(word, nic)));
            let index = |gpu: &Function| topology.gpus.iter().position(|g| g.place.address.to_string() == gpu.address);
            let gpus: Vec<usize> = described.gpus().iter().map(|gpu| index(gpu).unwrap()).collect();
            let faults = faults(&seen.machine, &gpus, &seen.node, &choice);
            println!(
                "{}: {} of {} GPUs as described",
                path.display(),
                gpus.len() - faults.len().min(gpus.len()),
                gpus.len()
            );
            wrong.extend(faults.into_iter().map(|fault| format!("{}: {fault}", path.display())));
            known += 1;
        } else {
            others += 1;
        }
        let mut pairs = 0;
        for (gpu, index) in seen.machine.gpus().iter().zip(seen.gpus()) {
            let distances = &choice.distances[index];
            let least = distances.iter().min();
            let found: BTreeSet<String> = topology
                .nics
                .iter()
                .zip(distances)
                .filter(|(_, distance)| Some(*distance) == least)
                .map(|(nic, _)| nic.name.clone())
                .collect();
            let expected = nearest(gpu, &cards);
            if found != expected {
                wrong.push(format!("{}: {} has {found:?}, wanted {expected:?}", path.display(), gpu.address));
            }
            pairs += found.len();
        }
        if described.is_none() {
            let used = choice.verdicts.iter().filter(|verdict| verdict.used).count();
            println!(
                "{}: {} GPUs, {} cards, {used} used, nearest sets as by common prefix ({pairs} pairs)",
                path.display(),
                topology.gpus.len(),
                topology.nics.len()
            );
        }
    }
    println!("{known} files of described machines, {others} others");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(known, KNOWN.len(), "files of described machines are missing");
}

/// Real trees of /sys and /proc, with what is odd in them: nodes without CPUs,
/// offline CPUs, numbers with gaps, domains of 32 bits.
#[test]
fn trees_recorded_by_hwloc() {
    let Some(files) = files("trees_recorded_by_hwloc", ".tar.bz2") else {
        return;
    };
    for path in files {
        let tree = TempTree::new();
        let unpacked = Command::new("tar").arg("xjf").arg(&path).arg("-C").arg(tree.root()).status();
        assert!(unpacked.is_ok_and(|status| status.success()), "{} cannot be unpacked", path.display());
        let root = fs::read_dir(tree.root()).unwrap().next().unwrap().unwrap().path();
        let facts = NodeFacts::read(&root);
        let topology = &facts.topology;
        // The same nodes, read in a plain way. Older kernels have the mask only.
        let mut nodes = BTreeMap::new();
        for entry in fs::read_dir(root.join("sys/devices/system/node")).unwrap().map(|entry| entry.unwrap()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let read = |file: &str| fs::read_to_string(entry.path().join(file)).ok();
            let of_mask = || read("cpumap").map(|text| mask(text.trim()));
            let cpus = read("cpulist").map(|text| numbers(text.trim())).or_else(of_mask).unwrap_or_default();
            if let (Some(number), false) =
                (name.strip_prefix("node").and_then(|n| n.parse::<u32>().ok()), cpus.is_empty())
            {
                nodes.insert(number, cpus);
            }
        }
        let read: BTreeMap<u32, Vec<u32>> =
            topology.nodes.iter().map(|node| (node.id, node.cpus.iter().collect())).collect();
        assert_eq!(read, nodes, "{}", path.display());
        println!(
            "{}: NUMA nodes {:?}, {} GPUs, cards {:?}, unknown {:?}",
            path.file_name().unwrap().to_string_lossy(),
            nodes.keys().collect::<Vec<_>>(),
            topology.gpus.len(),
            topology.nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(),
            facts.unknown
        );
        if path.ends_with("nvidiagpunumanodes.tar.bz2") {
            // As lstopo prints it (nvidiagpunumanodes.console): nodes 0 and 8 have
            // CPUs; each GPU's memory is one more.
            assert_eq!(nodes.keys().copied().collect::<Vec<_>>(), [0, 8]);
            let memory: BTreeSet<Option<u32>> = topology.gpus.iter().map(|gpu| gpu.memory_node).collect();
            assert_eq!(memory, (250..=255).map(Some).collect());
        }
        if path.ends_with("fakepcilocalities.tar.bz2") || path.ends_with("40intel64-2g2n4c+pcilocality.tar.bz2") {
            assert_eq!(topology.nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(), ["qib0"]);
        }
    }
}
