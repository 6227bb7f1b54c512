//! Machines of tests/fixtures/machines as trees of files: what /sys and /proc show
//! there, with the links of a real sysfs. A machine is described by its PCI tree,
//! or, where no addresses are published, by the matrix of GPUs and cards from which
//! a tree is made that satisfies it.

#![allow(dead_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde::Deserialize;

/// The tree of a machine: by its name in tests/fixtures/machines, or from a
/// description's text.
pub fn tree(name_or_description: &str) -> TempTree {
    match name_or_description.contains('\n') {
        true => Machine::parse("described", name_or_description).tree(),
        false => Machine::load(name_or_description).tree(),
    }
}

/// A tree of files that goes when it is dropped.
#[derive(Debug)]
pub struct TempTree {
    root: PathBuf,
    /// Folders that are there already.
    made: RefCell<HashSet<PathBuf>>,
}

impl TempTree {
    /// An empty one, in memory where that can be: a machine has thousands of files.
    pub fn new() -> TempTree {
        let memory = Path::new("/dev/shm");
        let folder = std::env::temp_dir();
        TempTree::below(if memory.is_dir() && fs::write(memory.join(own_name("try")), "").is_ok() {
            let _ = fs::remove_file(memory.join(own_name("try")));
            memory
        } else {
            &folder
        })
    }

    /// An empty one below `folder`.
    pub fn below(folder: &Path) -> TempTree {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let root = folder.join(own_name(&number.to_string()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        TempTree { root, made: RefCell::default() }
    }

    /// Stands for "/".
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn make_folder_of(&self, path: &Path) {
        let folder = path.parent().unwrap();
        if self.made.borrow_mut().insert(folder.to_path_buf()) {
            fs::create_dir_all(folder).unwrap();
        }
    }

    /// Writes a file, and the folders above it.
    pub fn file(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.root.join(path);
        self.make_folder_of(&path);
        fs::write(path, text).unwrap();
    }

    /// Makes a relative link at `path` to `to`, both below the root, as sysfs does.
    pub fn link(&self, path: &str, to: &str) {
        let place = self.root.join(path);
        self.make_folder_of(&place);
        let ups = path.matches('/').count();
        symlink(format!("{}{to}", "../".repeat(ups)), place).unwrap();
    }

    /// All its files and links, in order.
    pub fn entries(&self) -> Vec<PathBuf> {
        fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
            let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).collect();
            entries.sort_by_key(fs::DirEntry::file_name);
            for entry in entries {
                match entry.file_type().unwrap() {
                    kind if kind.is_dir() => walk(&entry.path(), files),
                    _ => files.push(entry.path()),
                }
            }
        }
        let mut files = Vec::new();
        walk(&self.root, &mut files);
        files
    }
}

impl Drop for TempTree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// A name that no other process of these tests takes.
fn own_name(end: &str) -> String {
    format!("palingenesis-machine-{}-{end}", std::process::id())
}

/// Whether a machine's PCI addresses are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Addresses {
    /// They are; the tree is the machine's.
    Published,
    /// Not all of them; the tree is one that agrees with what is.
    Reconstructed,
}

/// A machine's description.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    #[serde(skip)]
    pub name: String,
    /// The functions of a variant, in place of those in `pci`.
    #[serde(skip)]
    pub placed: Option<Vec<Function>>,
    pub addresses: Addresses,
    /// Where its facts are from.
    pub source: Vec<String>,
    /// What no source says.
    #[serde(default)]
    pub reconstructed: Vec<String>,
    #[serde(default)]
    pub dmi: Dmi,
    /// CPUs by NUMA node: a list, or "even 8": the even ones of the first eight.
    #[serde(default)]
    pub cpus: BTreeMap<String, String>,
    /// Socket by NUMA node, where it is not one for each.
    #[serde(default)]
    pub packages: BTreeMap<String, u32>,
    #[serde(default)]
    pub threads: Threads,
    /// Cores that share a level 3 cache; 0: those of a NUMA node.
    #[serde(default)]
    pub cache: u32,
    /// NUMA nodes without CPUs.
    #[serde(default)]
    pub memory_nodes: String,
    pub default_route: Option<String>,
    /// Functions in all, where many more are to be there than the tree names.
    #[serde(default)]
    pub functions: usize,
    pub gpu: GpuKind,
    #[serde(default)]
    pub nics: Vec<Nics>,
    #[serde(default)]
    pub expect: Expect,
    pub pci: Pci,
}

/// Names in the firmware.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Dmi {
    pub vendor: String,
    pub product: String,
    pub board: String,
}

/// Which CPUs are one core.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threads {
    /// CPU n and CPU n + step.
    pub step: Option<u32>,
    /// So many with numbers that follow each other.
    pub adjacent: Option<u32>,
}

/// The GPUs, all of one kind.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuKind {
    pub vendor: String,
    pub model: String,
    /// vendor:device
    pub pci: String,
    #[serde(default)]
    pub class: Option<String>,
    /// NUMA nodes that are their memory.
    #[serde(default)]
    pub memory_nodes: Vec<u32>,
}

/// Network cards of one kind.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nics {
    #[serde(default)]
    pub kind: NicKind,
    /// vendor:device
    pub pci: String,
    pub link: String,
    pub rate: String,
    #[serde(default = "active")]
    pub state: String,
    /// The bond that their network devices belong to.
    pub bond: Option<String>,
    /// Name of a device and of its network device; "": it has none.
    pub devices: BTreeMap<String, String>,
    /// Virtual functions' physical ones, by name.
    #[serde(default)]
    pub physical: BTreeMap<String, String>,
}

/// How cards are talked to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    #[default]
    Verbs,
    Slingshot,
}

fn active() -> String {
    "ACTIVE".into()
}

/// What the sources say is right.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// For each GPU the nearest compute cards, by name, address or network device;
    /// empty: the sources do not say.
    #[serde(default)]
    pub want: Vec<Vec<String>>,
    /// GPUs that take one of those in `want`, not all.
    #[serde(default)]
    pub one_of: Vec<usize>,
    /// Cards that are not for the training's traffic.
    #[serde(default)]
    pub exclude: Vec<String>,
}

/// The devices' places.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pci {
    /// Folders of /sys/devices above the host bridges.
    #[serde(default)]
    pub prefix: String,
    /// One function a line, indented below its bridge; "numa N" at the host bridge.
    pub tree: Option<String>,
    /// As `nvidia-smi topo -m` prints it.
    pub matrix: Option<String>,
    #[serde(default)]
    pub gpu_numa: Vec<u32>,
    #[serde(default)]
    pub nic_numa: BTreeMap<String, u32>,
}

/// A function of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    pub address: String,
    /// pci0000:15
    pub host: String,
    pub numa: Option<u32>,
    /// The bridges above it, from the top.
    pub bridges: Vec<String>,
    /// gpu0, the name of a card or of a network device; empty for a bridge.
    pub name: String,
}

/// The folder of the descriptions.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/machines")
}

/// Numbers of a list like 0-3,8.
pub fn numbers(list: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(low.parse::<u32>().unwrap()..=high.parse::<u32>().unwrap());
    }
    numbers
}

/// The list of numbers, as the kernel writes it.
pub fn list(numbers: &[u32]) -> String {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, high)) if *high + 1 == number => *high = number,
            _ => parts.push((number, number)),
        }
    }
    let part = |(low, high): &(u32, u32)| if low == high { low.to_string() } else { format!("{low}-{high}") };
    parts.iter().map(part).collect::<Vec<_>>().join(",")
}

impl Machine {
    /// All of them, by name.
    pub fn all() -> Vec<Machine> {
        let entries = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
        let mut names: Vec<String> =
            entries.filter_map(|path| Some(path.file_name()?.to_str()?.strip_suffix(".toml")?.to_string())).collect();
        names.sort();
        names.iter().map(|name| Machine::load(name)).collect()
    }

    /// One of tests/fixtures/machines.
    pub fn load(name: &str) -> Machine {
        let file = folder().join(format!("{name}.toml"));
        Machine::parse(name, &fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())))
    }

    /// From its text.
    pub fn parse(name: &str, text: &str) -> Machine {
        let machine: Machine = toml::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        Machine { name: name.into(), ..machine }
    }

    /// The CPUs of each NUMA node that has some.
    pub fn nodes(&self) -> BTreeMap<u32, Vec<u32>> {
        let cpus = |text: &String| match text.split_once(' ') {
            Some(("even", count)) => (0..count.parse().unwrap()).step_by(2).collect(),
            Some(("odd", count)) => (1..count.parse().unwrap()).step_by(2).collect(),
            _ => numbers(text),
        };
        self.cpus.iter().map(|(node, text)| (node.parse().unwrap(), cpus(text))).collect()
    }

    /// All CPUs.
    pub fn online(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.nodes().into_values().flatten().collect();
        all.sort_unstable();
        all
    }

    /// The CPUs that are one core with `cpu`.
    pub fn siblings(&self, cpu: u32, online: &[u32]) -> Vec<u32> {
        let core = |cpu: u32| match (self.threads.step, self.threads.adjacent) {
            (Some(step), _) => cpu % step,
            (_, Some(adjacent)) => cpu / adjacent,
            _ => cpu,
        };
        online.iter().copied().filter(|other| core(*other) == core(cpu)).collect()
    }

    /// Cards by name, with the kind they are of.
    pub fn cards(&self) -> Vec<(&str, &Nics)> {
        self.nics.iter().flat_map(|kind| kind.devices.keys().map(move |name| (name.as_str(), kind))).collect()
    }

    /// Changes its functions, which is how a variant is made.
    pub fn change(&mut self, change: impl FnMut(&mut Function)) {
        let mut functions = self.functions();
        functions.iter_mut().for_each(change);
        self.placed = Some(functions);
    }

    /// Gives the cards other names; the places stay.
    pub fn rename(&mut self, other: impl Fn(&str) -> String) {
        let names: Vec<String> = self.cards().iter().map(|(name, _)| name.to_string()).collect();
        let word = |word: &String| if names.contains(word) { other(word) } else { word.clone() };
        self.change(|function| function.name = word(&function.name));
        for kind in &mut self.nics {
            kind.devices = kind.devices.iter().map(|(name, netdev)| (word(name), netdev.clone())).collect();
            kind.physical = kind.physical.iter().map(|(name, physical)| (word(name), word(physical))).collect();
        }
    }

    /// The functions that the description names, bridges as well.
    pub fn functions(&self) -> Vec<Function> {
        if let Some(functions) = &self.placed {
            return functions.clone();
        }
        let functions = match (&self.pci.tree, &self.pci.matrix) {
            (Some(tree), _) => self.of_tree(tree),
            (None, Some(matrix)) => self.of_matrix(matrix),
            (None, None) => panic!("{}: neither tree nor matrix", self.name),
        };
        if let Some(matrix) = &self.pci.matrix {
            self.verify(&functions, matrix);
        }
        for (card, _) in self.cards() {
            assert!(functions.iter().any(|function| function.name == card), "{}: {card} has no place", self.name);
        }
        functions
    }

    /// The GPUs' functions, by their number here.
    pub fn gpus(&self) -> Vec<Function> {
        let mut gpus: Vec<Function> =
            self.functions().into_iter().filter(|f| number_of_gpu(&f.name).is_some()).collect();
        gpus.sort_by_key(|gpu| number_of_gpu(&gpu.name));
        gpus
    }

    fn of_tree(&self, tree: &str) -> Vec<Function> {
        let mut functions = Vec::new();
        let (mut host, mut numa) = (String::new(), None);
        let mut above: Vec<String> = Vec::new();
        for line in tree.lines().filter(|line| !line.trim().is_empty()) {
            let depth = (line.len() - line.trim_start().len()) / 2;
            let words: Vec<&str> = line.split_whitespace().collect();
            if depth == 0 {
                host = words[0].to_string();
                numa = match words[1..] {
                    ["numa", node] => Some(node.parse().unwrap()),
                    [] => None,
                    _ => panic!("{}: {line}", self.name),
                };
                above.clear();
                continue;
            }
            assert!(depth <= above.len() + 1, "{}: {line}", self.name);
            above.truncate(depth - 1);
            functions.push(Function {
                address: words[0].into(),
                host: host.clone(),
                numa,
                bridges: above.clone(),
                name: words.get(1).copied().unwrap_or_default().into(),
            });
            above.push(words[0].into());
        }
        functions
    }

    fn rows(&self, matrix: &str) -> BTreeMap<(String, String), String> {
        let mut lines = matrix.lines().filter(|line| !line.trim().is_empty());
        let columns: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
        let mut cells = BTreeMap::new();
        for line in lines {
            let mut words = line.split_whitespace();
            let gpu = words.next().unwrap();
            for (column, word) in columns.iter().zip(words.by_ref()) {
                cells.insert((gpu.to_string(), column.to_string()), word.to_string());
            }
            assert!(words.next().is_none(), "{}: {line}", self.name);
        }
        cells
    }

    /// A tree that has the matrix's cells: what is PIX hangs at one switch, switches
    /// that are PXB to each other at one above them, what is PHB at one host bridge.
    fn of_matrix(&self, matrix: &str) -> Vec<Function> {
        let cells = self.rows(matrix);
        let mut devices: Vec<String> = (0..self.pci.gpu_numa.len()).map(|number| format!("gpu{number}")).collect();
        let gpus = devices.len();
        devices.extend(self.cards().iter().map(|(name, _)| name.to_string()));
        devices[gpus..].sort_by_key(|name| (name.len(), name.clone()));
        let place = |name: &str| devices.iter().position(|device| device == name).unwrap();
        // The first device of the group that each is in, for each kind of nearness.
        let groups = |kinds: &[&str]| {
            let mut group: Vec<usize> = (0..devices.len()).collect();
            for ((gpu, nic), _) in cells.iter().filter(|(_, cell)| kinds.contains(&cell.as_str())) {
                let (one, two) = (group[place(gpu)], group[place(nic)]);
                let (low, high) = (one.min(two), one.max(two));
                group.iter_mut().filter(|member| **member == high).for_each(|member| *member = low);
            }
            group
        };
        let (switch, port, host) = (groups(&["PIX"]), groups(&["PIX", "PXB"]), groups(&["PIX", "PXB", "PHB"]));
        let numa = |device: usize| match device < gpus {
            true => Some(self.pci.gpu_numa[device]),
            false => self.pci.nic_numa.get(&devices[device]).copied().or_else(|| {
                let near = |cell: &str| matches!(cell, "PIX" | "PXB" | "PHB" | "NODE");
                let mut row = (0..gpus).filter(|gpu| near(&cells[&(devices[*gpu].clone(), devices[device].clone())]));
                row.next().map(|gpu| self.pci.gpu_numa[gpu])
            }),
        };
        let members =
            |group: &[usize], of: usize| -> Vec<usize> { (0..devices.len()).filter(|d| group[*d] == of).collect() };
        let firsts = |group: &[usize], among: &[usize]| -> Vec<usize> {
            let mut firsts: Vec<usize> = among.iter().map(|device| group[*device]).collect();
            firsts.sort_unstable();
            firsts.dedup();
            firsts
        };
        let mut functions = Vec::new();
        let mut bus = 0x0f_u8;
        let mut next = || {
            bus = bus.checked_add(1).expect("buses enough");
            bus
        };
        let all: Vec<usize> = (0..devices.len()).collect();
        for one in firsts(&host, &all) {
            let root = next();
            let (name, node) = (format!("pci0000:{root:02x}"), numa(one));
            let mut add = |address: String, bridges: &[String], what: &str| {
                let bridges = bridges.to_vec();
                functions.push(Function {
                    address: address.clone(),
                    host: name.clone(),
                    numa: node,
                    bridges,
                    name: what.into(),
                });
                address
            };
            for (number, first) in firsts(&port, &members(&host, one)).into_iter().enumerate() {
                let mut above = vec![add(format!("0000:{root:02x}:{:02x}.0", number + 1), &[], "")];
                let switches = firsts(&switch, &members(&port, first));
                let several = switches.len() > 1;
                let mut top = 0;
                if several {
                    let address = add(format!("0000:{:02x}:00.0", next()), &above, "");
                    above.push(address);
                    top = next();
                }
                for (number, first) in switches.into_iter().enumerate() {
                    let mut above = above.clone();
                    if several {
                        let address = add(format!("0000:{top:02x}:{number:02x}.0"), &above, "");
                        above.push(address);
                    }
                    let address = add(format!("0000:{:02x}:00.0", next()), &above, "");
                    above.push(address);
                    let inner = next();
                    for (number, device) in members(&switch, first).into_iter().enumerate() {
                        let mut above = above.clone();
                        let address = add(format!("0000:{inner:02x}:{number:02x}.0"), &above, "");
                        above.push(address);
                        add(format!("0000:{:02x}:00.0", next()), &above, &devices[device]);
                    }
                }
            }
        }
        functions
    }

    /// Whether the tree has the matrix's cells, told from the paths alone. SYS is
    /// what two devices on one NUMA node may be too: the tool says so where it does
    /// not find the host bridges' node.
    fn verify(&self, functions: &[Function], matrix: &str) {
        let of = |name: &str| functions.iter().find(|function| function.name == name).unwrap();
        let cells = self.rows(matrix);
        assert!(!cells.is_empty());
        for ((gpu, nic), cell) in &cells {
            let found = relation(of(gpu), of(nic));
            assert!(found == cell || (found == "NODE" && cell == "SYS"), "{}: {gpu} {nic}: {cell}, {found}", self.name);
        }
        let gpus: Vec<&str> = (0..)
            .map_while(|n| functions.iter().find(|f| f.name == format!("gpu{n}")))
            .map(|f| f.address.as_str())
            .collect();
        assert!(gpus.is_sorted(), "{}: the GPUs are not in order", self.name);
    }

    /// Its files.
    pub fn tree(&self) -> TempTree {
        let tree = TempTree::new();
        self.write(&tree);
        tree
    }

    /// Writes its files into a tree.
    pub fn write(&self, tree: &TempTree) {
        let functions = self.functions();
        self.write_cpus(tree);
        self.write_firmware_and_routes(tree);
        let mut paths = BTreeMap::new();
        for function in &functions {
            paths.insert(function.address.clone(), self.write_function(tree, function, &functions));
        }
        let mut number = functions.len();
        // Functions of the processors' own, on the buses where servers have them.
        for bus in ["7e", "7f", "fe", "ff"] {
            for slot in 0..256 {
                if number < self.functions {
                    let function = Function {
                        address: format!("0000:{bus}:{:02x}.{}", slot / 8, slot % 8),
                        host: format!("pci0000:{bus}"),
                        numa: Some(u32::from(bus.starts_with('f'))),
                        bridges: Vec::new(),
                        name: "peripheral".into(),
                    };
                    self.write_function(tree, &function, &functions);
                    number += 1;
                }
            }
        }
        for kind in &self.nics {
            for (device, physical) in &kind.physical {
                let of = |name: &str| &paths[&functions.iter().find(|f| f.name == name).unwrap().address];
                tree.link(&format!("{}/physfn", of(device)), of(physical));
            }
        }
    }

    fn write_function(&self, tree: &TempTree, function: &Function, functions: &[Function]) -> String {
        let mut path = String::from("sys/devices/");
        if !self.pci.prefix.is_empty() {
            // Hyper-V: a bus of its own for each device, by a GUID.
            path += &format!("{}/{}/", self.pci.prefix, guid(&function.host));
        }
        path += &format!("{}/", function.host);
        for bridge in &function.bridges {
            path += &format!("{bridge}/");
        }
        path += &function.address;
        let card = self.cards().into_iter().find(|(name, _)| *name == function.name);
        let is_bridge = functions.iter().any(|other| other.bridges.contains(&function.address));
        let (class, id, driver) = match function.name.as_str() {
            _ if is_bridge || function.name.is_empty() => ("0x060400", "1000:c030", "pcieport"),
            name if number_of_gpu(name).is_some() => {
                let amd = self.gpu.vendor == "amd";
                let class = self.gpu.class.as_deref().unwrap_or("0x030200");
                (class, self.gpu.pci.as_str(), if amd { "amdgpu" } else { "nvidia" })
            }
            "nvme" => ("0x010802", "1344:51c0", "nvme"),
            "sas" => ("0x010700", "1000:02b2", "mpt3sas"),
            "nvswitch" => ("0x068000", "10de:22a3", "nvidia-nvswitch"),
            "peripheral" => ("0x088000", "8086:09a2", ""),
            _ => match card {
                Some((_, kind)) => {
                    let class = if kind.link == "InfiniBand" { "0x020700" } else { "0x020000" };
                    let driver = match (kind.kind, kind.pci.starts_with("1d0f")) {
                        (NicKind::Slingshot, _) => "cxi_core",
                        (_, true) => "efa",
                        _ => "mlx5_core",
                    };
                    (class, kind.pci.as_str(), driver)
                }
                None => ("0x020000", "14e4:1657", "tg3"),
            },
        };
        let (vendor, device) = id.split_once(':').unwrap();
        let nodes = self.nodes();
        let cpus = match function.numa {
            Some(node) => nodes.get(&node).cloned().unwrap_or_default(),
            // The kernel gives all of them where it knows no node.
            None => self.online(),
        };
        for (name, text) in [
            ("class", class.to_string()),
            ("vendor", format!("0x{vendor}")),
            ("device", format!("0x{device}")),
            ("numa_node", function.numa.map_or("-1".into(), |node| node.to_string())),
            ("local_cpulist", list(&cpus)),
            ("max_link_speed", "32.0 GT/s PCIe".into()),
            ("current_link_speed", "32.0 GT/s PCIe".into()),
            ("max_link_width", "16".into()),
            ("current_link_width", "16".into()),
            ("enable", "1".into()),
        ] {
            tree.file(&format!("{path}/{name}"), text + "\n");
        }
        tree.link(&format!("sys/bus/pci/devices/{}", function.address), &path);
        tree.link(&format!("{path}/subsystem"), "sys/bus/pci");
        if !driver.is_empty() {
            tree.link(&format!("sys/bus/pci/drivers/{driver}/{}", function.address), &path);
            tree.link(&format!("{path}/driver"), &format!("sys/bus/pci/drivers/{driver}"));
        }
        if let Some(number) = number_of_gpu(&function.name) {
            self.write_gpu(tree, function, &path, number);
        } else if let Some((name, kind)) = card {
            self.write_card(tree, &path, name, kind);
        } else if driver == "tg3" {
            write_netdev(tree, &path, &function.name, "1", 25_000, None);
        }
        path
    }

    fn write_gpu(&self, tree: &TempTree, function: &Function, path: &str, number: usize) {
        if self.gpu.vendor == "amd" {
            let node = format!("renderD{}", 128 + number);
            tree.file(&format!("{path}/drm/{node}/dev"), format!("226:{}\n", 128 + number));
            tree.link(&format!("{path}/drm/{node}/device"), path);
            tree.link(&format!("sys/class/drm/{node}"), &format!("{path}/drm/{node}"));
            tree.file(&format!("{path}/unique_id"), format!("{:016x}\n", 0x1000 + number));
            return;
        }
        let folder = format!("proc/driver/nvidia/gpus/{}", function.address);
        let uuid = self.uuid(number);
        let information = format!(
            "Model: \t\t {}\nIRQ:   \t\t {}\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.61.00.01\nBus Type: \t PCIe\n\
             DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {number}\n\
             GPU Firmware: \t 535.129.03\nGPU Excluded:\t No\n",
            self.gpu.model,
            200 + number,
            function.address
        );
        tree.file(&format!("{folder}/information"), information);
        if let Some(node) = self.gpu.memory_nodes.get(number) {
            tree.file(&format!("{folder}/numa_status"), format!("Node:\t {node}\nStatus:\t online\n"));
        }
    }

    /// The UUID that GPU `number` has here.
    pub fn uuid(&self, number: usize) -> String {
        format!("GPU-{}", guid(&format!("{} gpu{number}", self.name)))
    }

    fn write_card(&self, tree: &TempTree, path: &str, name: &str, kind: &Nics) {
        match kind.kind {
            NicKind::Slingshot => {
                let device = format!("{path}/cxi/{name}");
                tree.file(&format!("{device}/dev"), "240:0\n");
                tree.link(&format!("{device}/device"), path);
                tree.link(&format!("sys/class/cxi/{name}"), &device);
            }
            NicKind::Verbs => {
                let device = format!("{path}/infiniband/{name}");
                let (state, physical) = match kind.state.as_str() {
                    "ACTIVE" => ("4: ACTIVE", "5: LinkUp"),
                    "INIT" => ("2: INIT", "5: LinkUp"),
                    _ => ("1: DOWN", "3: Disabled"),
                };
                for (file, text) in
                    [("state", state), ("phys_state", physical), ("rate", &kind.rate), ("link_layer", &kind.link)]
                {
                    tree.file(&format!("{device}/ports/1/{file}"), format!("{text}\n"));
                }
                tree.file(&format!("{device}/node_type"), "1: CA\n");
                tree.file(&format!("{device}/fw_ver"), "28.39.1002\n");
                tree.link(&format!("{device}/device"), path);
                tree.link(&format!("sys/class/infiniband/{name}"), &device);
            }
        }
        let netdev = &kind.devices[name];
        if !netdev.is_empty() {
            let gbps: u32 = kind.rate.split_whitespace().next().unwrap().parse().unwrap();
            let link = if kind.link == "InfiniBand" { "32" } else { "1" };
            write_netdev(tree, path, netdev, link, gbps * 1000, kind.bond.as_deref());
        }
    }

    fn write_cpus(&self, tree: &TempTree) {
        let nodes = self.nodes();
        let online = self.online();
        let mut memory = numbers(&self.memory_nodes);
        memory.extend(nodes.keys());
        memory.sort_unstable();
        let folder = "sys/devices/system/node";
        let with_cpus: Vec<u32> = nodes.keys().copied().collect();
        for (file, nodes) in [
            ("online", &memory),
            ("possible", &memory),
            ("has_cpu", &with_cpus),
            ("has_memory", &memory),
            ("has_normal_memory", &memory),
        ] {
            tree.file(&format!("{folder}/{file}"), list(nodes) + "\n");
        }
        for node in &memory {
            let distance = |other: &u32| match () {
                () if node == other => "10",
                () if self.package(*node) == self.package(*other) => "12",
                () => "32",
            };
            let distances: Vec<&str> = memory.iter().map(distance).collect();
            tree.file(&format!("{folder}/node{node}/distance"), distances.join(" ") + "\n");
            let cpus = nodes.get(node).map_or(String::new(), |cpus| list(cpus));
            tree.file(&format!("{folder}/node{node}/cpulist"), cpus + "\n");
            tree.file(&format!("{folder}/node{node}/meminfo"), format!("Node {node} MemTotal: 263731316 kB\n"));
        }
        let folder = "sys/devices/system/cpu";
        for file in ["online", "possible", "present"] {
            tree.file(&format!("{folder}/{file}"), list(&online) + "\n");
        }
        tree.file(&format!("{folder}/isolated"), "\n");
        for (node, cpus) in &nodes {
            let mut cores: Vec<Vec<u32>> = cpus.iter().map(|cpu| self.siblings(*cpu, &online)).collect();
            cores.sort();
            cores.dedup();
            for (number, core) in cores.iter().enumerate() {
                let cache = if self.cache == 0 {
                    cpus.clone()
                } else {
                    let start = number / self.cache as usize * self.cache as usize;
                    let end = (start + self.cache as usize).min(cores.len());
                    cores[start..end].concat()
                };
                for cpu in core {
                    let folder = format!("{folder}/cpu{cpu}");
                    tree.file(&format!("{folder}/topology/thread_siblings_list"), list(core) + "\n");
                    tree.file(&format!("{folder}/topology/physical_package_id"), format!("{}\n", self.package(*node)));
                    tree.file(&format!("{folder}/cache/index3/shared_cpu_list"), list(&cache) + "\n");
                }
            }
        }
    }

    pub fn package(&self, node: u32) -> u32 {
        self.packages.get(&node.to_string()).copied().unwrap_or(node)
    }

    fn write_firmware_and_routes(&self, tree: &TempTree) {
        for (file, text) in
            [("sys_vendor", &self.dmi.vendor), ("product_name", &self.dmi.product), ("board_name", &self.dmi.board)]
        {
            tree.file(&format!("sys/devices/virtual/dmi/id/{file}"), format!("{text}\n"));
        }
        tree.link("sys/class/dmi/id", "sys/devices/virtual/dmi/id");
        write_netdev(tree, "sys/devices/virtual", "lo", "772", 0, None);
        for bond in self.nics.iter().filter_map(|kind| kind.bond.as_deref()) {
            write_netdev(tree, "sys/devices/virtual", bond, "1", 200_000, None);
        }
        let mut routes =
            String::from("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n");
        if let Some(name) = &self.default_route {
            routes += &format!("{name}\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n");
            routes += &format!("{name}\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n");
            let known =
                self.nics.iter().any(|k| k.bond.as_ref() == Some(name) || k.devices.values().any(|d| d == name));
            if !known && !self.functions().iter().any(|function| function.name == *name) {
                write_netdev(tree, "sys/devices/platform/onboard", name, "1", 25_000, None);
            }
        }
        tree.file("proc/net/route", routes);
        tree.file("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
    }
}

fn write_netdev(tree: &TempTree, path: &str, name: &str, link: &str, mbps: u32, master: Option<&str>) {
    let folder = format!("{path}/net/{name}");
    let loopback = link == "772";
    for (file, text) in [
        ("type", link.to_string()),
        ("flags", if loopback { "0x9".into() } else { "0x1043".into() }),
        ("operstate", if loopback { "unknown".into() } else { "up".into() }),
        ("carrier", "1".into()),
        ("mtu", if link == "1" { "9000".into() } else { "4092".into() }),
        ("dev_port", "0".into()),
    ] {
        tree.file(&format!("{folder}/{file}"), text + "\n");
    }
    if !loopback {
        tree.file(&format!("{folder}/speed"), format!("{mbps}\n"));
    }
    if !path.ends_with("virtual") {
        tree.link(&format!("{folder}/device"), path);
    }
    if let Some(master) = master {
        tree.link(&format!("{folder}/master"), &format!("sys/devices/virtual/net/{master}"));
        tree.file(&format!("sys/devices/virtual/net/{master}/bonding/slaves"), format!("{name}\n"));
    }
    tree.link(&format!("sys/class/net/{name}"), &folder);
}

/// Some digits in the form of a GUID, always the same for a text.
fn guid(text: &str) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut digits = String::new();
    for round in 0..2u8 {
        for byte in text.bytes().chain([round]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        digits += &format!("{hash:016x}");
    }
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

/// N of "gpuN".
pub fn number_of_gpu(name: &str) -> Option<usize> {
    name.strip_prefix("gpu")?.parse().ok()
}

/// What lies between two functions, as `nvidia-smi topo -m` tells it, from their
/// paths alone.
pub fn relation(one: &Function, two: &Function) -> &'static str {
    if one.host == two.host {
        let shared = one.bridges.iter().zip(&two.bridges).take_while(|(one, two)| one == two).count();
        let (left, right) = (one.bridges.len() - shared, two.bridges.len() - shared);
        return match shared {
            0 => "PHB",
            _ if left <= 1 && right <= 1 => "PIX",
            _ => "PXB",
        };
    }
    if one.numa.is_some() && one.numa == two.numa { "NODE" } else { "SYS" }
}
