//! The PCI tree of a virtual machine, from NCCL's topology file. A hypervisor hands
//! each device over alone, so that sysfs says nothing of what is near what; cloud
//! providers ship a file that does. Its ancestry is taken, with bridges that may be
//! invented (ffff:ff:01.0), and nothing else: CPU masks in such files are typed by
//! hand, and wrong ones are shipped.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pci::Place;
use super::topology::Topology;
use super::{Environment, PciAddress, files};
use crate::config::printable;

/// What a topology file says of a node's devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The file.
    pub file: String,
    /// The devices of the node that it names.
    pub devices: Vec<Ancestry>,
}

/// What lies above one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestry {
    /// Its address, as the file has it.
    pub address: PciAddress,
    /// The file's name for what stands for a host bridge there: "numa0".
    pub host_bridge: Option<String>,
    /// The bridges, from the top.
    pub bridges: Vec<PciAddress>,
}

/// Where NVIDIA's daemon writes it, and NCCL looks without being told.
const DAEMON: &str = "/var/run/nvidia-topologyd/virtualTopology.xml";

/// NCCL itself takes some hundred elements.
const LONGEST: u64 = 256 << 10;
/// What a record has room for; shipped files have some KiB.
const LONGEST_NOTED: u64 = 128 << 10;
const MOST_ELEMENTS: u32 = 20_000;

/// Deeper than any tree of switches.
const DEEPEST: usize = 32;

/// How long the file server of a named file may take.
const PATIENCE: Duration = Duration::from_secs(10);

impl Topology {
    /// Whether the PCI tree says nothing of which card is near which GPU: no GPU
    /// shares a bridge with a card, and a host bridge either with none or with all.
    pub fn is_flat(&self) -> bool {
        let mut shared = Vec::new();
        for gpu in &self.gpus {
            for nic in self.nics.iter().filter_map(|nic| nic.place.as_ref()) {
                if gpu.place.bridges.iter().any(|bridge| nic.bridges.contains(bridge)) {
                    return false;
                }
                shared.push(gpu.place.host_bridge.is_some() && gpu.place.host_bridge == nic.host_bridge);
            }
        }
        shared.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// The same with the ancestry that a file tells, where the machine's own tree
    /// is flat.
    pub fn with_overlay(&self, overlay: Option<&Overlay>) -> Cow<'_, Topology> {
        let Some(overlay) = overlay.filter(|_| self.is_flat()) else {
            return Cow::Borrowed(self);
        };
        let mut topology = self.clone();
        let places = topology.gpus.iter_mut().map(|gpu| &mut gpu.place);
        for place in places.chain(topology.nics.iter_mut().filter_map(|nic| nic.place.as_mut())) {
            if let Some(ancestry) = overlay.of(place.address) {
                place.host_bridge.clone_from(&ancestry.host_bridge);
                place.bridges.clone_from(&ancestry.bridges);
            }
        }
        Cow::Owned(topology)
    }
}

impl Overlay {
    /// By the function's own address, or its card's: NCCL writes function 0 for a
    /// card with several ports.
    fn of(&self, address: PciAddress) -> Option<&Ancestry> {
        let exact = self.devices.iter().find(|device| device.address == address);
        let card = PciAddress { function: 0, ..address };
        exact.or_else(|| self.devices.iter().find(|device| device.address == card))
    }
}

/// The file's ancestry of the node's devices, where the node needs one and there is
/// a file: NCCL_TOPO_FILE, by the environment or by NCCL's files (`in_files`), or the
/// daemon's.
pub(super) fn overlay(
    root: &Path,
    environment: &Environment,
    in_files: Option<&str>,
    topology: &Topology,
    unknown: &mut Vec<String>,
) -> Option<Overlay> {
    let nics = || topology.nics.iter().filter_map(|nic| nic.place.as_ref());
    if topology.gpus.is_empty() || nics().next().is_none() || !topology.is_flat() {
        return None;
    }
    let named = environment.get("NCCL_TOPO_FILE").or(in_files).filter(|file| !file.is_empty());
    let file = named.unwrap_or(DAEMON);
    let path = below(root, file);
    let mut wanted = BTreeSet::new();
    for Place { address, .. } in topology.gpus.iter().map(|gpu| &gpu.place).chain(nics()) {
        wanted.extend([*address, PciAddress { function: 0, ..*address }]);
    }
    // In a child even where the file is the daemon's: whoever wrote it, a parser is
    // no part of the task.
    let found = super::in_a_child(PATIENCE, || devices_in(&path, &wanted)).and_then(|found| found);
    match found {
        Ok(Some(devices)) if !devices.is_empty() => Some(Overlay { file: file.into(), devices }),
        Ok(Some(_)) => {
            unknown.push(format!("topology file {} names none of this node's devices: not used", printable(file)));
            None
        }
        Ok(None) if named.is_none() => None,
        Ok(None) => {
            unknown.push(format!("topology file {} (NCCL_TOPO_FILE) is not there", printable(file)));
            None
        }
        Err(why) => {
            unknown.push(format!("topology file {} not used: {why}", printable(file)));
            None
        }
    }
}

/// One that is not absolute is relative to the working directory, as for NCCL.
fn below(root: &Path, file: &str) -> PathBuf {
    file.strip_prefix('/').map_or_else(|| PathBuf::from(file), |file| root.join(file))
}

/// Looks at the file as `overlay` does, for a record of the machine: what a child of
/// the reader's reads is not noted.
pub(super) fn look(root: &Path, in_files: Option<&str>) {
    let _ = files::regular(&below(root, in_files.filter(|file| !file.is_empty()).unwrap_or(DAEMON)), LONGEST_NOTED);
}

fn devices_in(path: &Path, wanted: &BTreeSet<PciAddress>) -> Result<Option<Vec<Ancestry>>, String> {
    let Some(bytes) = files::regular(path, LONGEST).map_err(|error| error.to_string())? else {
        return Ok(None);
    };
    let text = std::str::from_utf8(&bytes).map_err(|_| "it is no text")?;
    parse(text, wanted).map(Some)
}

/// The first mention of each wanted device.
fn parse(text: &str, wanted: &BTreeSet<PciAddress>) -> Result<Vec<Ancestry>, String> {
    let options = roxmltree::ParsingOptions { nodes_limit: MOST_ELEMENTS, ..Default::default() };
    let document =
        roxmltree::Document::parse_with_options(text, options).map_err(|error| printable(&error.to_string()))?;
    if !document.root_element().has_tag_name("system") {
        return Err("it is no topology of NCCL's".into());
    }
    let mut found: Vec<Ancestry> = Vec::new();
    for node in document.descendants().filter(|node| node.has_tag_name("pci")) {
        let Some(address) = node.attribute("busid").and_then(PciAddress::parse).filter(|one| wanted.contains(one))
        else {
            continue;
        };
        if found.iter().any(|known| known.address == address) {
            continue;
        }
        let mut ancestry = Ancestry { address, host_bridge: None, bridges: Vec::new() };
        for (depth, above) in node.ancestors().skip(1).enumerate() {
            if depth > DEEPEST {
                return Err(format!("more than {DEEPEST} bridges above {address}"));
            }
            let busid = above.attribute("busid").and_then(PciAddress::parse);
            ancestry.bridges.extend(busid.filter(|_| above.has_tag_name("pci")));
            if above.has_tag_name("cpu") {
                let number = above.attribute("numaid").filter(|id| id.len() < 6 && id.parse::<u32>().is_ok());
                ancestry.host_bridge = number.map(|id| format!("numa{id}"));
            }
        }
        ancestry.bridges.reverse();
        found.push(ancestry);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::NodeFacts;
    use crate::facts::TaskFacts;
    use crate::facts::rdma::tests::Tree;
    use crate::plan::binding::Distance;

    /// Two GPUs and two cards as Hyper-V hands them over.
    fn azure(name: &str) -> Tree {
        let tree = Tree::new(name);
        let path =
            |domain: u32| format!("LNXSYSTM:00/VMBUS:00/guid-{domain:x}/pci{domain:04x}:00/{domain:04x}:00:00.0");
        tree.nvidia(&path(1), 0, 1, "24-47").nvidia(&path(3), 1, 0, "0-23");
        tree.hca(&path(0x101), "mlx5_2", 1, "24-47").hca(&path(0x103), "mlx5_0", 0, "0-23");
        tree
    }

    /// As Azure ships for ND A100 v4
    /// (<https://github.com/Azure/azhpc-images/tree/master/topology>).
    const FILE: &str = r#"<system version="1">
        <cpu numaid="0" affinity="00000000,00000000,00ffffff" arch="x86_64">
          <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
            <pci busid="0003:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
            <pci busid="0103:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
          </pci>
        </cpu>
        <cpu numaid="1" affinity="00000000,0000ffff,ff000000" arch="x86_64">
          <pci busid="ffff:ff:02.0" class="0x060400"><pci busid="0001:00:00.0"/><pci busid="0101:00:00.0"/></pci>
        </cpu></system>"#;

    fn read(tree: &Tree, pairs: &[(&str, &str)]) -> (NodeFacts, TaskFacts) {
        let node = NodeFacts::read(tree.root());
        let environment = pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let task = TaskFacts::described(tree.root(), &environment, &node);
        (node, task)
    }

    #[test]
    fn a_flat_tree_takes_the_file_s_ancestry_and_nothing_else() {
        let tree = azure("overlay");
        tree.file("opt/topo.xml", FILE);
        let (node, task) = read(&tree, &[("NCCL_TOPO_FILE", "/opt/topo.xml")]);
        assert!(node.topology.is_flat());
        assert_eq!(task.unknown, Vec::<String>::new());
        let seen = node.topology.with_overlay(task.overlay.as_ref());
        let bridges = |place: &Place| (place.host_bridge.clone(), place.bridges[0].to_string());
        let of = |numa: &str, bridge: &str| (Some(numa.to_string()), bridge.to_string());
        let gpus: Vec<_> = seen.gpus.iter().map(|gpu| bridges(&gpu.place)).collect();
        assert_eq!(gpus, [of("numa1", "ffff:ff:02.0"), of("numa0", "ffff:ff:01.0")]);
        let nics: Vec<_> = seen.nics.iter().map(|nic| bridges(nic.place.as_ref().unwrap())).collect();
        assert_eq!(nics, gpus);
        // CPUs and NUMA nodes stay sysfs's.
        assert_eq!(seen.gpus[0].place.cpus, node.topology.gpus[0].place.cpus);
        assert!(!seen.is_flat());
        let distance = |topology: &Topology, gpu: usize, nic: usize| {
            Distance::between(&topology.gpus[gpu].place, topology.nics[nic].place.as_ref(), &topology.nodes).name()
        };
        assert_eq!([distance(&seen, 0, 0), distance(&node.topology, 0, 0)], ["PIX", "NODE"]);
    }

    #[test]
    fn the_file_that_nccl_would_take() {
        let tree = azure("overlay-files");
        tree.file("etc/nccl.conf", "NCCL_TOPO_FILE=/etc/topo.xml\n").file("etc/topo.xml", FILE);
        tree.file(DAEMON.trim_start_matches('/'), FILE).file("own.xml", FILE);
        let file = |pairs: &[(&str, &str)]| read(&tree, pairs).1.overlay.map(|overlay| overlay.file);
        assert_eq!(file(&[]).as_deref(), Some("/etc/topo.xml"));
        assert_eq!(file(&[("NCCL_TOPO_FILE", "/own.xml")]).as_deref(), Some("/own.xml"));
        tree.file("etc/nccl.conf", "");
        assert_eq!(file(&[]).as_deref(), Some(DAEMON));
        std::fs::remove_file(tree.root().join(DAEMON.trim_start_matches('/'))).unwrap();
        let (_, task) = read(&tree, &[]);
        assert_eq!((task.overlay, task.unknown.len()), (None, 0));
        let (_, task) = read(&tree, &[("NCCL_TOPO_FILE", "/lost.xml")]);
        assert_eq!(task.unknown, ["topology file /lost.xml (NCCL_TOPO_FILE) is not there"]);
    }

    #[test]
    fn a_record_of_the_machine_has_the_file() {
        let tree = azure("overlay-record");
        tree.file(DAEMON.trim_start_matches('/'), FILE).file("etc/topo.xml", FILE);
        let has =
            |file: &str| NodeFacts::record(tree.root()).unwrap().entries.contains_key(file.trim_start_matches('/'));
        assert_eq!([has(DAEMON), has("/etc/topo.xml")], [true, false]);
        tree.file("etc/nccl.conf", "NCCL_TOPO_FILE=/etc/topo.xml\n");
        assert_eq!([has(DAEMON), has("/etc/topo.xml")], [false, true]);
    }

    #[test]
    fn a_machine_with_a_tree_of_its_own_needs_no_file() {
        let tree = Tree::new("overlay-bare");
        tree.nvidia("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0", 0, 0, "0-55");
        tree.hca("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", "mlx5_0", 0, "0-55");
        tree.file("lost.xml", "garbage");
        let (node, task) = read(&tree, &[("NCCL_TOPO_FILE", "/lost.xml")]);
        assert!(!node.topology.is_flat() && task.overlay.is_none() && task.unknown.is_empty());
        // Not even one that was read for another machine.
        let other = Overlay {
            file: String::new(),
            devices: vec![Ancestry {
                address: node.topology.gpus[0].place.address,
                host_bridge: None,
                bridges: vec![],
            }],
        };
        assert_eq!(*node.topology.with_overlay(Some(&other)), node.topology);
    }

    /// All at the one host bridge of a virtual machine: as near as each other.
    #[test]
    fn one_host_bridge_for_all_is_flat_and_two_are_not() {
        let tree = Tree::new("overlay-one-bridge");
        for number in 1..4 {
            tree.nvidia(&format!("pci0000:00/0000:00:{number:02x}.0"), number, -1, "");
        }
        tree.hca("pci0000:00/0000:00:08.0", "mlx5_0", -1, "");
        assert!(NodeFacts::read(tree.root()).topology.is_flat());
        tree.nvidia("pci0000:80/0000:80:01.0", 9, -1, "");
        assert!(!NodeFacts::read(tree.root()).topology.is_flat());
    }

    #[test]
    fn no_file_does_harm() {
        let wanted: BTreeSet<PciAddress> = PciAddress::parse("0003:00:00.0").into_iter().collect();
        let deep = |depth: usize| {
            let inner = format!("{}<pci busid=\"0003:00:00.0\"/>{}", "<pci>".repeat(depth), "</pci>".repeat(depth));
            format!("<system>{inner}</system>")
        };
        assert_eq!(parse(&deep(20), &wanted).unwrap().len(), 1);
        let laughs = "<!DOCTYPE s [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]><system>&b;</system>";
        for bad in
            ["", "<system", "<system/><system/>", "\u{0}", "<graphs version=\"1\"/>", laughs, &deep(9_000), &deep(100)]
        {
            assert!(parse(bad, &wanted).is_err(), "{:.40}", bad);
        }
        assert!(parse(&format!("<system>{}</system>", "<pci/>".repeat(30_000)), &wanted).is_err());
        let odd = "<system><cpu numaid='-1'><pci busid='x'><pci busid='0003:00:00.0'/></pci></cpu>\
                   <pci busid='0003:00:00.0'/></system>";
        let found = parse(odd, &wanted).unwrap();
        assert_eq!((found.len(), found[0].host_bridge.clone(), found[0].bridges.len()), (1, None, 0));
        let tree = azure("overlay-odd-files");
        tree.file("long.xml", &" ".repeat(2 << 20)).file("latin.xml", "").file("none.xml", "<system/>");
        std::fs::write(tree.root().join("latin.xml"), b"<system>\xff</system>").unwrap();
        for file in ["/long.xml", "/latin.xml", "/none.xml", "/opt", "/"] {
            std::fs::create_dir_all(tree.root().join("opt")).unwrap();
            let (_, task) = read(&tree, &[("NCCL_TOPO_FILE", file)]);
            assert_eq!((&task.overlay, task.unknown.len()), (&None, 1), "{file}: {:?}", task.unknown);
            assert!(task.unknown[0].starts_with(&format!("topology file {file} ")), "{:?}", task.unknown);
        }
    }
}
