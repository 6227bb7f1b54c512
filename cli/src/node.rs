//! `palingenesis explain --node`: a node's GPUs, network cards, CPUs and the
//! distances between them, with what the plan makes of the cards.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use palingenesis::config::nics::{NicPattern, NicRules};
use palingenesis::config::site::SiteView;
use palingenesis::config::{Settings, printable};
use palingenesis::facts::pci::Place;
use palingenesis::facts::rdma::LinkLayer;
use palingenesis::facts::topology::{Gpu, GpuVendor, Netdev, Nic, NicKind, NumaNode};
use palingenesis::facts::{Environment, NodeFacts, RdmaPort, Step, TaskFacts};
use palingenesis::plan::binding::Distance;
use palingenesis::plan::binding::nics::{NodeNics, View, choose};
use palingenesis::plan::binding::subnets::Addresses;
use palingenesis::plan::{self, Facts};
use palingenesis::report::one_line;
use serde_json::{Value, json};

/// Lines of the matrix end here: a node of 32 cards has it in parts.
const LINE: usize = 120;

/// What is told of a node.
pub struct Node {
    facts: NodeFacts,
    /// NCCL's topology file, where the distances are told by it.
    topology_file: Option<String>,
    rules: NicRules,
    chosen: NodeNics,
    hca: Hca,
}

/// What a job of several nodes gets for NCCL_IB_HCA, where its user sets nothing.
enum Hca {
    Set { value: String, why: String },
    Left { why: String },
}

impl Node {
    /// The node below `root`.
    pub fn read(root: &Path, settings: &Settings, site: Option<&SiteView>) -> Node {
        let mut facts = NodeFacts::read(root);
        let task = TaskFacts::described(root, &Environment::default(), &facts);
        let mut topology_file = None;
        if let Cow::Owned(topology) = facts.topology.with_overlay(task.overlay.as_ref()) {
            facts.topology = topology;
            topology_file = task.overlay.map(|overlay| overlay.file);
        }
        facts.unknown.extend(task.unknown);
        // An archive is unpacked somewhere, which is of no interest.
        let prefix = root.to_string_lossy().trim_end_matches('/').to_string();
        if !prefix.is_empty() {
            facts.unknown.iter_mut().for_each(|line| *line = line.replace(&prefix, ""));
        }
        let merged = site.map_or_else(|| settings.clone(), |site| site.under(settings));
        let rules = site.map(|site| site.nics.clone()).unwrap_or_default();
        let ports = facts.rdma.as_deref().unwrap_or_default();
        // Without a step there is no rank 0 whose network could decide.
        let addresses = Addresses { gids: &facts.gids, ..Addresses::default() };
        let chosen = choose(&View { topology: &facts.topology, ports, addresses, settings: &merged, rules: &rules });
        let hca = hca(&facts, root, settings, site);
        Node { facts, topology_file, rules, chosen, hca }
    }

    fn gpus(&self) -> &[Gpu] {
        &self.facts.topology.gpus
    }

    fn nics(&self) -> &[Nic] {
        &self.facts.topology.nics
    }

    fn ports<'a>(&'a self, nic: &'a Nic) -> impl Iterator<Item = &'a RdmaPort> {
        let ports = self.facts.rdma.iter().flatten();
        ports.filter(move |port| nic.kind == NicKind::Verbs && port.device == nic.name)
    }

    fn cards_of(&self, gpu: usize) -> Vec<&str> {
        let cards = self.chosen.of_gpu.get(gpu).into_iter().flatten();
        cards.filter_map(|card| Some(self.nics().get(*card)?.name.as_str())).collect()
    }

    fn distance(&self, gpu: usize, nic: usize) -> &'static str {
        let distance = self.chosen.distances.get(gpu).and_then(|row| row.get(nic));
        distance.copied().map_or("?", Distance::name)
    }

    /// The site file's patterns that name none of the cards. A site's list is for
    /// many kinds of nodes, so that this is no fault.
    fn idle_patterns(&self) -> Vec<(&'static str, &NicPattern)> {
        let allow = self.rules.allow.iter().flatten().map(|pattern| ("nic-allow", pattern));
        let all = allow.chain(self.rules.deny.iter().map(|pattern| ("nic-deny", pattern)));
        let names_one = |pattern: &NicPattern| {
            self.nics().iter().any(|nic| {
                let netdevs = nic.netdevs.iter().map(|netdev| netdev.name.as_str());
                let address = nic.place.as_ref().map(|place| place.address);
                pattern.names(address, netdevs.chain([nic.name.as_str()]))
            })
        };
        all.filter(|(_, pattern)| !names_one(pattern)).collect()
    }

    /// All of it as one JSON object.
    pub fn json(&self) -> Value {
        let place = |place: &Place| {
            json!({
                "address": place.address.to_string(),
                "host_bridge": place.host_bridge,
                "bridges": place.bridges.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "numa": place.numa,
                "cpus": place.cpus.to_string(),
            })
        };
        let gpu = |(index, gpu): (usize, &Gpu)| {
            json!({
                "index": index,
                "place": place(&gpu.place),
                "vendor": vendor(gpu.vendor),
                "model": gpu.model,
                "uuid": gpu.uuid,
                "minor": gpu.minor,
                "memory_node": gpu.memory_node,
                "cards": self.cards_of(index),
                "distances": (0..self.nics().len()).map(|nic| self.distance(index, nic)).collect::<Vec<_>>(),
            })
        };
        let port = |port: &RdmaPort| {
            json!({
                "port": port.port,
                "link": link(port),
                "gbps": port.gbps,
                "state": state(port),
            })
        };
        let nic = |(index, nic): (usize, &Nic)| {
            let netdevs = nic.netdevs.iter();
            let netdevs = netdevs.map(|dev| json!({"name": dev.name, "up": dev.up, "master": dev.master}));
            let verdict = self.chosen.verdicts.get(index);
            json!({
                "name": nic.name,
                "place": nic.place.as_ref().map(place),
                "ports": self.ports(nic).map(port).collect::<Vec<_>>(),
                "netdevs": netdevs.collect::<Vec<_>>(),
                "used": verdict.map(|verdict| verdict.used),
                "why": verdict.map(|verdict| &verdict.why),
            })
        };
        let topology = &self.facts.topology;
        let node =
            |node: &NumaNode| json!({"node": node.id, "cpus": node.cpus.to_string(), "distances": node.distances});
        let idle = self.idle_patterns();
        let (value, why) = match &self.hca {
            Hca::Set { value, why } => (Some(value), why),
            Hca::Left { why } => (None, why),
        };
        json!({
            "gpus": topology.gpus.iter().enumerate().map(gpu).collect::<Vec<_>>(),
            "nics": topology.nics.iter().enumerate().map(nic).collect::<Vec<_>>(),
            "numa": topology.nodes.iter().map(node).collect::<Vec<_>>(),
            "cpus": {"online": topology.online.to_string(), "isolated": topology.isolated.to_string()},
            "default_route": topology.default_route,
            "topology_file": self.topology_file,
            "nccl_ib_hca": {"value": value, "why": why},
            "fallbacks": self.chosen.fallbacks,
            "no_such_card": idle.iter().map(|(key, pattern)| json!({"list": key, "pattern": pattern.to_string()})).collect::<Vec<_>>(),
            "unknown": self.facts.unknown,
        })
    }

    /// All of it as aligned text, ending in a newline.
    pub fn text(&self, what: &str) -> String {
        let topology = &self.facts.topology;
        let count = |number: usize, one: &str| format!("{number} {one}{}", if number == 1 { "" } else { "s" });
        let mut text = one_line(&format!(
            "palingenesis: {what}: {}, {}, {}, {} CPUs online",
            count(topology.gpus.len(), "GPU"),
            count(topology.nics.len(), "network card"),
            count(topology.nodes.len(), "NUMA node"),
            topology.online.len(),
        ));
        if topology.gpus.is_empty() {
            text.push_str("  no GPU is seen here, so nothing is bound\n");
        } else {
            self.gpu_table(&mut text);
        }
        if topology.nics.is_empty() {
            text.push_str("  no RDMA device and no Slingshot card is seen here\n");
        } else {
            self.nic_table(&mut text);
        }
        self.numa_table(&mut text);
        if !topology.gpus.is_empty() && !topology.nics.is_empty() {
            self.matrix(&mut text);
        }
        if !topology.gpus.is_empty() {
            let line = match &self.hca {
                Hca::Set { value, why } => format!("  NCCL_IB_HCA  {value}  ({why})"),
                Hca::Left { why } => format!("  NCCL_IB_HCA  not set: {why}"),
            };
            text.push_str(&one_line(&line));
        }
        if let Some(file) = &self.topology_file {
            let file = printable(file);
            text.push_str(&one_line(&format!(
                "palingenesis: note: the bridges are those of the topology file {file}: this machine's own tree shows none"
            )));
        }
        for fallback in &self.chosen.fallbacks {
            text.push_str(&one_line(&format!("palingenesis: warning: {fallback}")));
        }
        for (key, pattern) in self.idle_patterns() {
            text.push_str(&one_line(&format!("palingenesis: note: {key} \"{pattern}\" names no card of this node")));
        }
        for unknown in &self.facts.unknown {
            text.push_str(&one_line(&format!("palingenesis: note: {unknown}")));
        }
        text
    }

    fn gpu_table(&self, text: &mut String) {
        let titles = ["GPU", "ADDRESS", "MODEL", "UUID", "MINOR", "NUMA", "CPUS", "CARDS"];
        let row = |(index, gpu): (usize, &Gpu)| {
            let model = gpu.model.clone().unwrap_or_else(|| format!("{} (model not told)", vendor(gpu.vendor)));
            vec![
                index.to_string(),
                gpu.place.address.to_string(),
                model,
                gpu.uuid.as_deref().map_or("-".into(), short),
                or_dash(gpu.minor),
                or_dash(gpu.place.numa),
                or_dash(Some(gpu.place.cpus.to_string()).filter(|cpus| !cpus.is_empty())),
                or_dash(Some(self.cards_of(index).join(" ")).filter(|cards| !cards.is_empty())),
            ]
        };
        aligned(text, &titles, self.gpus().iter().enumerate().map(row).collect());
    }

    fn nic_table(&self, text: &mut String) {
        let titles = ["CARD", "ADDRESS", "LINK", "GBIT/S", "STATE", "NUMA", "NETDEVS", "USED", "WHY"];
        let row = |(index, nic): (usize, &Nic)| {
            let of = |what: fn(&RdmaPort) -> String| alike(self.ports(nic).map(|port| (port.port, what(port))));
            let is_slingshot = nic.kind == NicKind::Slingshot;
            let up = nic.netdevs.iter().any(|netdev| netdev.up);
            let netdev = |netdev: &Netdev| match &netdev.master {
                Some(master) => format!("{} (of {master})", netdev.name),
                None => netdev.name.clone(),
            };
            let netdevs: Vec<String> = nic.netdevs.iter().map(netdev).collect();
            let verdict = self.chosen.verdicts.get(index);
            vec![
                nic.name.clone(),
                or_dash(nic.place.as_ref().map(|place| place.address)),
                if is_slingshot { "Slingshot".into() } else { of(|port| link(port).into()) },
                if is_slingshot { "-".into() } else { of(|port| or_dash(port.gbps)) },
                if is_slingshot { if up { "up" } else { "down" }.into() } else { of(|port| state(port).into()) },
                or_dash(nic.place.as_ref().and_then(|place| place.numa)),
                or_dash(Some(netdevs.join(" ")).filter(|names| !names.is_empty())),
                verdict.map_or("-", |verdict| if verdict.used { "yes" } else { "no" }).into(),
                verdict.map_or("-".into(), |verdict| verdict.why.clone()),
            ]
        };
        aligned(text, &titles, self.nics().iter().enumerate().map(row).collect());
    }

    fn numa_table(&self, text: &mut String) {
        let topology = &self.facts.topology;
        let row = |node: &NumaNode| {
            // Those without CPUs are GPUs' memory, and many.
            let with_cpus: BTreeSet<u32> = topology.nodes.iter().map(|node| node.id).collect();
            let distances = node.distances.iter().filter(|(other, _)| with_cpus.contains(other));
            let distances: Vec<String> = distances.map(|(other, distance)| format!("{other}: {distance}")).collect();
            vec![
                node.id.to_string(),
                node.cpus.to_string(),
                or_dash(Some(distances.join(", ")).filter(|d| !d.is_empty())),
            ]
        };
        if !topology.nodes.is_empty() {
            aligned(text, &["NUMA", "CPUS", "DISTANCES"], topology.nodes.iter().map(row).collect());
        }
        if !topology.isolated.is_empty() {
            text.push_str(&one_line(&format!("  CPUs that the kernel keeps free: {}", topology.isolated)));
        }
    }

    /// As `nvidia-smi topo -m` has it, for GPUs and cards.
    fn matrix(&self, text: &mut String) {
        let names: Vec<&str> = self.nics().iter().map(|nic| nic.name.as_str()).collect();
        let width = names.iter().map(|name| name.chars().count() + 2).max().unwrap_or(0).max("NODE*".len() + 2);
        let part = ((LINE - "  DISTANCE  ".len()) / width).max(1);
        for first in (0..names.len()).step_by(part) {
            let columns = first..(first + part).min(names.len());
            let mut titles = vec!["DISTANCE"];
            titles.extend(&names[columns.clone()]);
            let row = |gpu: usize| {
                let belongs = |nic| self.chosen.of_gpu.get(gpu).is_some_and(|cards| cards.contains(&nic));
                let cell = |nic| format!("{}{}", self.distance(gpu, nic), if belongs(nic) { "*" } else { "" });
                let mut row = vec![format!("GPU {gpu}")];
                row.extend(columns.clone().map(cell));
                row
            };
            aligned(text, &titles, (0..self.gpus().len()).map(row).collect());
        }
        let seen: BTreeSet<&str> = (0..self.gpus().len())
            .flat_map(|gpu| (0..names.len()).map(move |nic| (gpu, nic)))
            .map(|(gpu, nic)| self.distance(gpu, nic))
            .collect();
        text.push_str("  *: the card belongs to that GPU");
        for (name, meaning) in LEGEND {
            if seen.contains(name) {
                // Writing to a String cannot fail.
                let _ = write!(text, "; {name}: {meaning}");
            }
        }
        text.push('\n');
    }
}

/// The nearest first.
const LEGEND: [(&str, &str); 6] = [
    ("PIX", "one PCI bridge between them at most"),
    ("PXB", "several bridges"),
    ("PHB", "the CPU's host bridge"),
    ("NODE", "the same NUMA node"),
    ("SYS", "another NUMA node"),
    ("?", "not known"),
];

/// The plan of a step of two nodes with a rank for each GPU, for what a job gets.
fn hca(facts: &NodeFacts, root: &Path, settings: &Settings, site: Option<&SiteView>) -> Hca {
    let left = |why: &str| Hca::Left { why: why.into() };
    if facts.topology.gpus.is_empty() {
        return left("no GPU is seen here");
    }
    let environment = Environment::default();
    let ranks = facts.topology.gpus.len();
    let Ok(step) = Step::described("node[1-2]", &ranks.to_string(), 0, 1, 0) else {
        return left("no step can be described for this many GPUs");
    };
    let task = TaskFacts::described(root, &environment, facts);
    let facts = Facts { node: facts, task: &task, site, ..Facts::new(&step, &environment) };
    let plan = match plan::plan(&facts, settings) {
        Ok(plan) => plan,
        Err(refusal) => return left(&format!("a job would be refused here: {refusal}")),
    };
    let set = plan.env.into_iter().find(|variable| variable.name == "NCCL_IB_HCA");
    if let Some(variable) = set {
        return Hca::Set { value: variable.value, why: variable.why };
    }
    let note = plan.left.into_iter().find(|note| note.name == "NCCL_IB_HCA");
    note.map_or_else(|| left("NCCL takes the cards it finds"), |note| Hca::Left { why: note.why })
}

fn vendor(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Nvidia => "NVIDIA",
        GpuVendor::Amd => "AMD",
    }
}

fn link(port: &RdmaPort) -> &'static str {
    match port.link {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "RoCE",
        LinkLayer::Other if port.driver.as_deref() == Some("efa") => "EFA",
        LinkLayer::Other => "-",
    }
}

fn state(port: &RdmaPort) -> &'static str {
    match (port.readable, port.active && port.link_up) {
        (false, _) => "unreadable",
        (true, true) => "up",
        (true, false) => "down",
    }
}

/// What all ports have, or what each has.
fn alike(ports: impl Iterator<Item = (u8, String)>) -> String {
    let ports: Vec<(u8, String)> = ports.collect();
    match ports.as_slice() {
        [] => "-".into(),
        [(_, first), rest @ ..] if rest.iter().all(|(_, other)| other == first) => first.clone(),
        all => all.iter().map(|(port, what)| format!("{port}:{what}")).collect::<Vec<_>>().join(" "),
    }
}

/// The ends of a UUID, which tell one from another.
fn short(uuid: &str) -> String {
    let characters: Vec<char> = uuid.chars().collect();
    match characters.len() {
        40 => characters[..12].iter().chain(&['…']).chain(&characters[36..]).collect(),
        _ => printable(uuid),
    }
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".into(), |value| value.to_string())
}

/// Rows below titles, each column as wide as its widest cell.
fn aligned(text: &mut String, titles: &[&str], rows: Vec<Vec<String>>) {
    let titles = titles.iter().map(ToString::to_string).collect();
    let rows: Vec<Vec<String>> = [vec![titles], rows].concat();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in &rows {
        let mut line = String::from(" ");
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, " {cell:<width$} ");
        }
        text.push_str(&one_line(line.trim_end()));
    }
}
