//! Which network cards carry the training's traffic, and which of them belong to
//! which GPU. NCCL finds the nearest cards by itself where it sees the PCI tree;
//! what it cannot know is which cards are for storage and management
//! (<https://github.com/NVIDIA/nccl/issues/1591>). Where that is not clear here
//! either, nothing is set.

use crate::config::nics::{NicPattern, NicRules};
use crate::config::{CheckLevel, Fabric, NicDown, Settings, printable};
use crate::facts::pci::PciAddress;
use crate::facts::rdma::LinkLayer;
use crate::facts::topology::{Nic, NicKind};
use crate::facts::{RdmaPort, Topology};

use super::super::marks::Marks;
use super::super::netmatch::List;
use super::super::precedence::{self, Layer, Offers};
use super::super::{Facts, Origin, Plan, Severity, Shape, Warning, checks};
use super::subnets::{self, Addresses};
use super::{Distance, visible};

/// What the choice is made from: the node's facts and the admin's rules. The same
/// for every rank of the node.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The machine.
    pub topology: &'a Topology,
    /// The ports of its RDMA devices.
    pub ports: &'a [RdmaPort],
    /// Their addresses, and rank 0's where there is one.
    pub addresses: Addresses<'a>,
    /// `fabric=` and `nic-down=`.
    pub settings: &'a Settings,
    /// The site file's lists.
    pub rules: &'a NicRules,
}

static NO_RULES: NicRules = NicRules { allow: None, deny: Vec::new() };

impl<'a> View<'a> {
    /// The facts' part of it.
    pub fn of(facts: &Facts<'a>, settings: &'a Settings) -> View<'a> {
        View {
            topology: &facts.node.topology,
            ports: facts.node.rdma.as_deref().unwrap_or_default(),
            addresses: Addresses::of(facts),
            settings,
            rules: facts.site.map_or(&NO_RULES, |site| &site.nics),
        }
    }
}

/// What became of one card's function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it is used.
    pub used: bool,
    /// Why, or why not: "near GPU 0 (PIX)", "no port is active".
    pub why: String,
}

/// The node's choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNics {
    /// For each of `topology.nics`.
    pub verdicts: Vec<Verdict>,
    /// For each of `topology.gpus`, the cards that belong to it, as indexes of
    /// `topology.nics`, nearest first; of a card with several functions all. None
    /// where it is not known.
    pub of_gpu: Vec<Vec<usize>>,
    /// For each of `topology.gpus`, its distance to each of `topology.nics`.
    pub distances: Vec<Vec<Distance>>,
    /// Faults: "GPU 5: mlx5_9 is down, mlx5_6 is used".
    pub fallbacks: Vec<String>,
    /// The GPU of each of `fallbacks`, and whether its card is down.
    pub faults: Vec<(usize, bool)>,
    /// For each of `topology.nics`, its InfiniBand and Ethernet ports that are used.
    pub ports: Vec<Vec<u8>>,
    /// The kind of the used cards: "InfiniBand", "Ethernet", "EFA", "Slingshot".
    pub fabric: Option<&'static str>,
    /// Why it is not known which cards are meant, where it is not.
    pub unclear: Option<String>,
}

/// What a port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    InfiniBand,
    Ethernet,
    Efa,
    Slingshot,
    /// Nothing that NCCL or UCX speaks.
    Other,
}

impl Link {
    fn name(self) -> &'static str {
        match self {
            Link::InfiniBand => "InfiniBand",
            Link::Ethernet => "Ethernet",
            Link::Efa => "EFA",
            Link::Slingshot => "Slingshot",
            Link::Other => "neither InfiniBand nor Ethernet",
        }
    }

    /// Whether NCCL and UCX reach it by RDMA verbs.
    fn is_verbs(self) -> bool {
        matches!(self, Link::InfiniBand | Link::Ethernet)
    }

    fn of(port: &RdmaPort) -> Link {
        match port.link {
            LinkLayer::InfiniBand => Link::InfiniBand,
            LinkLayer::Ethernet => Link::Ethernet,
            LinkLayer::Other if port.driver.as_deref() == Some("efa") => Link::Efa,
            LinkLayer::Other => Link::Other,
        }
    }
}

/// A port of a card, or a Slingshot card.
#[derive(Debug, Clone, Copy)]
struct Unit {
    nic: usize,
    port: Option<u8>,
    link: Link,
    active: bool,
    gbps: Option<u32>,
}

/// Vendor and device of a card, of the physical one where it is virtual.
type Model = (Option<u16>, Option<u16>);

/// Ports of one kind, model and rate: a fabric is cabled with equal ones.
#[derive(Debug, Clone)]
struct Class {
    link: Link,
    model: Model,
    rate: u32,
    /// Cards' functions with an active port of it.
    nics: Vec<usize>,
    /// Such without one, which would be of it.
    down: Vec<usize>,
    /// GPUs that have none nearer.
    gpus: Vec<usize>,
    /// What is compared: those GPUs, or the NUMA nodes of them.
    cover: usize,
    /// Of all active ports together.
    bandwidth: u32,
    bonded: bool,
    /// Whether the default route goes over it.
    routed: bool,
}

/// The rate of a Slingshot 11 port, which /sys/class/cxi does not tell.
const SLINGSHOT_GBPS: u32 = 200;

/// More devices than NCCL takes (MAX_IB_DEVS of src/transport/net_ib).
const MOST_DEVICES: usize = 32;

/// Makes the choice.
pub fn choose(view: &View) -> NodeNics {
    let mut choice = Choice::new(view);
    choice.by_the_site();
    if view.rules.allow.is_none() {
        choice.without_virtual_functions();
        choice.without_astray();
        choice.by_class();
    }
    choice.done()
}

struct Choice<'a> {
    view: &'a View<'a>,
    nics: &'a [Nic],
    units: Vec<Unit>,
    /// Whether a function has an active port.
    active: Vec<bool>,
    models: Vec<Model>,
    distances: Vec<Vec<Distance>>,
    /// The card of each function: that of the first function with its address.
    cards: Vec<usize>,
    /// Functions by address; those without last.
    order: Vec<usize>,
    /// Why a function is out.
    out: Vec<Option<String>>,
    /// Ports that are used, as indexes of `units`.
    used: Vec<usize>,
    /// Functions that are down and would be used.
    missing: Vec<usize>,
    /// Functions that have a link-local address only.
    unaddressed: Vec<usize>,
    /// Functions slower than their like, with both rates.
    slow: Vec<(usize, u32, u32)>,
    unclear: Option<String>,
}

impl<'a> Choice<'a> {
    fn new(view: &'a View<'a>) -> Choice<'a> {
        let topology = view.topology;
        let nics = topology.nics.as_slice();
        let to_each = |gpu: &crate::facts::topology::Gpu| {
            nics.iter().map(|nic| Distance::between(&gpu.place, nic.place.as_ref(), &topology.nodes)).collect()
        };
        let mut order: Vec<usize> = (0..nics.len()).collect();
        order.sort_by_key(|nic| (address(&nics[*nic]).is_none(), address(&nics[*nic])));
        let card = |nic: usize| {
            let own = card_of(&nics[nic])?;
            order.iter().copied().find(|other| card_of(&nics[*other]).is_some_and(|other| other.same_card(own)))
        };
        let units: Vec<Unit> = nics.iter().enumerate().flat_map(|(index, nic)| units(index, nic, view.ports)).collect();
        let mut active = vec![false; nics.len()];
        units.iter().filter(|unit| unit.active).for_each(|unit| active[unit.nic] = true);
        Choice {
            view,
            nics,
            units,
            active,
            models: nics.iter().map(|nic| model(nic, nics)).collect(),
            distances: topology.gpus.iter().map(to_each).collect(),
            cards: (0..nics.len()).map(|nic| card(nic).unwrap_or(nic)).collect(),
            out: vec![None; nics.len()],
            used: Vec::new(),
            missing: Vec::new(),
            unaddressed: Vec::new(),
            slow: Vec::new(),
            unclear: None,
            order,
        }
    }

    fn gpus(&self) -> std::ops::Range<usize> {
        0..self.distances.len()
    }

    fn is_active(&self, nic: usize) -> bool {
        self.active[nic]
    }

    /// The least distance of a GPU to one of `nics`.
    fn nearest(&self, gpu: usize, nics: &[usize]) -> Distance {
        nics.iter().map(|nic| self.distances[gpu][*nic]).min().unwrap_or(Distance::Unknown)
    }

    fn is_near_some_gpu(&self, nic: usize) -> bool {
        self.gpus().any(|gpu| self.distances[gpu][nic].is_near())
    }

    fn model(&self, nic: usize) -> Model {
        self.models[nic]
    }

    /// Whether its ports are part of a bond. On InfiniBand that is a matter of IP
    /// alone, and RDMA goes past it.
    fn is_bonded(&self, nic: usize) -> bool {
        let ethernet = self.units.iter().any(|unit| unit.nic == nic && unit.active && unit.link == Link::Ethernet);
        ethernet && self.nics[nic].netdevs.iter().any(|netdev| netdev.master.is_some())
    }

    fn has_default_route(&self, nic: usize) -> bool {
        let Some(route) = &self.view.topology.default_route else {
            return false;
        };
        self.nics[nic].netdevs.iter().any(|netdev| netdev.name == *route || netdev.master.as_ref() == Some(route))
    }

    fn name(&self, nic: usize) -> &str {
        &self.nics[nic].name
    }

    /// Names by address, the first few.
    fn names(&self, nics: &[usize]) -> String {
        let mut nics = nics.to_vec();
        nics.sort_by_key(|nic| self.order.iter().position(|other| other == nic));
        let names: Vec<&str> = nics.iter().take(4).map(|nic| self.name(*nic)).collect();
        match nics.len().saturating_sub(4) {
            0 => names.join(", "),
            more => format!("{} and {more} more", names.join(", ")),
        }
    }

    /// The site file's lists.
    fn by_the_site(&mut self) {
        let rules = self.view.rules;
        let named = |patterns: &[NicPattern], nic: &Nic| {
            let names = || nic.netdevs.iter().map(|netdev| netdev.name.as_str()).chain([nic.name.as_str()]);
            patterns.iter().any(|pattern| pattern.names(address(nic), names()))
        };
        for (index, nic) in self.nics.iter().enumerate() {
            if named(&rules.deny, nic) {
                self.out[index] = Some("denied by the site file".into());
            } else if rules.allow.as_ref().is_some_and(|allow| !named(allow, nic)) {
                self.out[index] = Some("not in the site file's allow list".into());
            }
        }
        if rules.allow.is_some() {
            let allowed = |unit: &Unit| self.out[unit.nic].is_none();
            self.used = (0..self.units.len()).filter(|unit| allowed(&self.units[*unit])).collect();
            self.used.retain(|unit| self.units[*unit].active);
            let idle = |nic: &usize| self.out[*nic].is_none() && !self.is_active(*nic);
            self.missing = (0..self.nics.len()).filter(idle).collect();
        }
    }

    /// Virtual functions are the physical card over again
    /// (<https://github.com/vllm-project/vllm/issues/16997>), unless it cannot be
    /// seen or used here, as in a virtual machine.
    fn without_virtual_functions(&mut self) {
        for index in 0..self.nics.len() {
            let physical = self.nics[index].place.as_ref().and_then(|place| place.physical);
            let owner =
                (0..self.nics.len()).find(|other| physical.is_some() && address(&self.nics[*other]) == physical);
            if let Some(owner) = owner
                && self.out[index].is_none()
                && self.out[owner].is_none()
                && self.is_active(owner)
            {
                self.out[index] = Some(format!("virtual function of {}, which is here too", self.name(owner)));
            }
        }
    }

    /// Ports that lead nowhere.
    fn without_astray(&mut self) {
        let distances = |nic: usize| self.gpus().map(|gpu| self.distances[gpu][nic]).collect();
        let port = |unit: &Unit| {
            let of_it = |port: &&RdmaPort| port.device == self.nics[unit.nic].name && Some(port.port) == unit.port;
            self.view.ports.iter().find(of_it).filter(|_| unit.active && self.out[unit.nic].is_none())
        };
        let candidates: Vec<(Unit, subnets::Candidate)> = self
            .units
            .iter()
            .filter_map(|unit| Some((*unit, subnets::Candidate { port: port(unit)?, distances: distances(unit.nic) })))
            .collect();
        let ports: Vec<subnets::Candidate> = candidates.iter().map(|(_, candidate)| candidate.clone()).collect();
        for ((unit, candidate), why) in candidates.iter().zip(subnets::astray(&ports, &self.view.addresses)) {
            let Some(why) = why else { continue };
            if self.view.addresses.link_local(candidate.port).is_some() {
                self.unaddressed.push(unit.nic);
            }
            self.units.retain(|other| (other.nic, other.port) != (unit.nic, unit.port));
            self.active[unit.nic] = self.units.iter().any(|other| other.nic == unit.nic && other.active);
            if !self.is_active(unit.nic) {
                self.out[unit.nic] = Some(why);
            }
        }
    }

    /// Whether a port may be of the fabric, by its kind alone.
    fn kinds(&self) -> Vec<Link> {
        let has =
            |link: Link| self.units.iter().any(|unit| unit.link == link && unit.active && self.out[unit.nic].is_none());
        match self.view.settings.fabric {
            Fabric::Infiniband => vec![Link::InfiniBand],
            Fabric::Roce => vec![Link::Ethernet],
            Fabric::Efa => vec![Link::Efa],
            // Nobody has these for storage alone.
            _ if has(Link::Efa) => vec![Link::Efa],
            _ if has(Link::Slingshot) => vec![Link::Slingshot],
            _ => vec![Link::InfiniBand, Link::Ethernet],
        }
    }

    fn classes(&self, kinds: &[Link]) -> Vec<Class> {
        let candidate = |unit: &&Unit| self.out[unit.nic].is_none() && kinds.contains(&unit.link);
        let mut classes: Vec<Class> = Vec::new();
        for unit in self.units.iter().filter(candidate).filter(|unit| unit.active) {
            let model = self.model(unit.nic);
            let alike = |other: &&Unit| other.active && other.link == unit.link && self.model(other.nic) == model;
            // One that does not tell its rate has that of its like.
            let rate = unit.gbps.or_else(|| self.units.iter().filter(alike).filter_map(|other| other.gbps).max());
            let rate = rate.unwrap_or(0);
            let same = |class: &&mut Class| (class.link, class.model, class.rate) == (unit.link, model, rate);
            match classes.iter_mut().find(same) {
                Some(class) => {
                    class.bandwidth += rate;
                    if !class.nics.contains(&unit.nic) {
                        class.nics.push(unit.nic);
                    }
                }
                None => classes.push(Class {
                    link: unit.link,
                    model,
                    rate,
                    nics: vec![unit.nic],
                    down: Vec::new(),
                    gpus: Vec::new(),
                    cover: 0,
                    bandwidth: rate,
                    bonded: false,
                    routed: false,
                }),
            }
        }
        for class in &mut classes {
            class.bonded = class.nics.iter().all(|nic| self.is_bonded(*nic));
            class.routed = class.nics.iter().any(|nic| self.has_default_route(*nic));
            for unit in self.units.iter().filter(candidate).filter(|unit| !self.is_active(unit.nic)) {
                let alike = unit.link == class.link && self.model(unit.nic) == class.model;
                if alike && !class.down.contains(&unit.nic) {
                    class.down.push(unit.nic);
                }
            }
        }
        classes
    }

    /// The fabric is the class that is nearest to most GPUs. One whose ports are
    /// down counts with them: a broken link shall not make the storage network
    /// the fabric.
    fn by_class(&mut self) {
        let kinds = self.kinds();
        let mut classes = self.classes(&kinds);
        let every: Vec<usize> =
            classes.iter().flat_map(|class| class.nics.iter().chain(&class.down)).copied().collect();
        let near = self.gpus().any(|gpu| self.nearest(gpu, &every).is_near());
        for class in &mut classes {
            let own: Vec<usize> = class.nics.iter().chain(&class.down).copied().collect();
            class.gpus = self.gpus().collect();
            class.gpus.retain(|gpu| {
                let least = self.nearest(*gpu, &every);
                least != Distance::Unknown && self.nearest(*gpu, &own) == least
            });
            class.cover = if near { class.gpus.len() } else { self.numa_nodes(&class.gpus) };
        }
        self.unlisted();
        let Some(best) = best(&classes, near) else {
            return;
        };
        let winner = classes.remove(best);
        let own: Vec<usize> = winner.nics.iter().chain(&winner.down).copied().collect();
        let (mut taken, mut down) = (winner.nics.clone(), winner.down.clone());
        let before = self.out.clone();
        for class in classes {
            let alone = |gpu: &&usize| match near {
                true => self.nearest(**gpu, &class.nics).is_near() && !self.nearest(**gpu, &own).is_near(),
                false => !winner.gpus.contains(gpu),
            };
            let alone = class.gpus.iter().filter(alone).count();
            let alike = class.model == winner.model && class.model != (None, None);
            let joins = near
                && class.link == winner.link
                && alone > 0
                && (class.rate >= winner.rate || alike || (2 * class.rate >= winner.rate && 2 * alone >= winner.cover));
            if joins {
                taken.extend(class.nics.iter().filter(|nic| !winner.nics.contains(nic)));
                down.extend(class.down.iter().filter(|nic| !winner.down.contains(nic)));
                if class.rate < winner.rate && alike {
                    self.slow.extend(class.nics.iter().map(|nic| (*nic, class.rate, winner.rate)));
                }
                self.used.extend(self.units_of(&class));
                continue;
            }
            let same_network = !near && class.link == winner.link && alone > 0 && 2 * class.rate >= winner.rate;
            if self.unclear.is_none() && (same_network || !is_sure(&winner, &class, near)) {
                self.unclear = Some(format!(
                    "whether {} or {} carry the training's traffic is not clear; fabric= says it, or nic-allow in the site file",
                    self.described(&winner),
                    self.described(&class)
                ));
            }
            self.outdone(&class, &winner, near);
        }
        self.used.extend(self.units_of(&winner));
        if self.unclear.is_some() {
            self.out = before;
            return;
        }
        if near {
            self.without_far(&taken, &mut down);
        }
        self.without_bonded(&down);
        self.missing = down;
        let used = &self.used;
        let units = &self.units;
        self.missing.retain(|nic| !used.iter().any(|unit| units[*unit].nic == *nic));
    }

    fn numa_nodes(&self, gpus: &[usize]) -> usize {
        let mut nodes: Vec<u32> = gpus.iter().filter_map(|gpu| self.view.topology.gpus[*gpu].place.numa).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len()
    }

    fn units_of(&self, class: &Class) -> Vec<usize> {
        let of_it = |index: &usize| {
            let unit = &self.units[*index];
            let rate = unit.gbps.is_none_or(|gbps| gbps == class.rate);
            unit.active && unit.link == class.link && rate && class.nics.contains(&unit.nic)
        };
        (0..self.units.len()).filter(of_it).collect()
    }

    /// Devices with ports of which nothing else is known.
    fn unlisted(&mut self) {
        let known = |port: &&RdmaPort| self.nics.iter().any(|nic| nic.name == port.device);
        let of_nccl = |port: &&RdmaPort| port.active && port.link != LinkLayer::Other;
        if let Some(port) = self.view.ports.iter().filter(of_nccl).find(|port| !known(port)) {
            self.unclear = Some(format!("where {} sits is not known", port.device));
        }
    }

    fn described(&self, class: &Class) -> String {
        let rate = if class.rate > 0 { format!(" at {} Gb/s", class.rate) } else { String::new() };
        format!("{} ({}{rate})", self.names(&class.nics), class.link.name())
    }

    /// Says why the cards of a class are not used.
    fn outdone(&mut self, class: &Class, winner: &Class, near: bool) {
        let all = match near {
            true => format!("{} GPUs", self.gpus().len()),
            false => format!("the GPUs' {} NUMA nodes", self.numa_nodes(&self.gpus().collect::<Vec<_>>())),
        };
        let kind = |class: &Class| match class.bandwidth.checked_div(class.rate) {
            Some(ports) => {
                let s = if ports == 1 { "" } else { "s" };
                format!("{}, {ports} port{s} at {} Gb/s, nearest to {}", class.link.name(), class.rate, class.cover)
            }
            None => format!("{}, nearest to {}", class.link.name(), class.cover),
        };
        let why = format!("{} of {all}; {}: {}", kind(class), kind(winner), self.names(&winner.nics));
        for nic in &class.nics {
            if !winner.nics.contains(nic) && self.out[*nic].is_none() {
                self.out[*nic] = Some(why.clone());
            }
        }
    }

    fn drop_nic(&mut self, nic: usize, why: String) {
        self.out[nic] = Some(why);
        let units = &self.units;
        self.used.retain(|unit| units[*unit].nic != nic);
    }

    fn used_nics(&self) -> Vec<usize> {
        let mut nics: Vec<usize> = self.order.clone();
        nics.retain(|nic| self.used.iter().any(|unit| self.units[*unit].nic == *nic));
        nics
    }

    /// Cards of the fabric that are near no GPU are for storage, where others are
    /// near (DGX), unless a GPU has none nearer.
    fn without_far(&mut self, taken: &[usize], down: &mut Vec<usize>) {
        let all: Vec<usize> = taken.iter().chain(down.iter()).copied().collect();
        let (near, far): (Vec<usize>, Vec<usize>) = all.iter().partition(|nic| self.is_near_some_gpu(**nic));
        if !near.iter().any(|nic| taken.contains(nic)) {
            return;
        }
        let needed = |nic: usize| {
            self.gpus().any(|gpu| {
                let least = self.nearest(gpu, &all);
                least != Distance::Unknown && self.distances[gpu][nic] == least && self.nearest(gpu, &near) > least
            })
        };
        let far: Vec<usize> = far.into_iter().filter(|nic| !needed(*nic)).collect();
        down.retain(|nic| !far.contains(nic));
        let near: Vec<usize> = near.into_iter().filter(|nic| taken.contains(nic)).collect();
        let why = format!("near no GPU, as cards for storage and management are; near GPUs are {}", self.names(&near));
        for nic in far.into_iter().filter(|nic| taken.contains(nic)) {
            self.drop_nic(nic, why.clone());
        }
    }

    /// A bond of cards is for management where there are others
    /// (<https://github.com/NVIDIA/nccl/issues/1015>).
    fn without_bonded(&mut self, down: &[usize]) {
        let (bonded, single): (Vec<usize>, Vec<usize>) =
            self.used_nics().into_iter().partition(|nic| self.is_bonded(*nic));
        if single.is_empty() {
            return;
        }
        let rest: Vec<usize> = single.iter().chain(down).copied().collect();
        for nic in bonded {
            let nearer = |gpu: usize| self.distances[gpu][nic].grade() < self.nearest(gpu, &rest).grade();
            if self.gpus().any(nearer) {
                continue;
            }
            let bond = self.nics[nic].netdevs.iter().find_map(|netdev| netdev.master.as_deref()).unwrap_or_default();
            let why = format!("member of {}; others are there: {}", printable(bond), self.names(&single));
            self.drop_nic(nic, why);
        }
    }

    /// Which of `nics` belong to each GPU: the nearest; of several equally near
    /// ones as many as there are for each of the GPUs that share them, in the
    /// order of PCI addresses, and where they are too few the least used.
    fn assign(&self, nics: &[usize]) -> Vec<Vec<usize>> {
        let mut cards: Vec<usize> = Vec::new();
        let mut functions: Vec<Vec<usize>> = vec![Vec::new(); self.nics.len()];
        for nic in self.order.iter().copied().filter(|nic| nics.contains(nic)) {
            let card = self.cards[nic];
            if functions[card].is_empty() {
                cards.push(card);
            }
            functions[card].push(nic);
        }
        let to_card = |gpu: usize, card: usize| self.nearest(gpu, &functions[card]);
        // GPUs with the same nearest cards, the most restricted first.
        let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for gpu in self.gpus_in_order() {
            let least = cards.iter().map(|card| to_card(gpu, *card)).min().unwrap_or(Distance::Unknown);
            let mut nearest = cards.clone();
            nearest.retain(|card| to_card(gpu, *card) == least);
            if least == Distance::Unknown && cards.len() > 1 {
                continue;
            }
            match groups.iter_mut().find(|(cards, _)| *cards == nearest) {
                Some((_, gpus)) => gpus.push(gpu),
                None => groups.push((nearest, vec![gpu])),
            }
        }
        groups.sort_by_key(|(cards, _)| cards.len());
        let mut uses = vec![0usize; self.nics.len()];
        let mut of_gpu = vec![Vec::new(); self.gpus().len()];
        for (cards, gpus) in groups.iter().filter(|(cards, _)| !cards.is_empty()) {
            // What is another GPU's own is taken for want of better only.
            let free = cards.iter().filter(|card| uses[**card] == 0).count();
            let each = (free / gpus.len()).max(1);
            let mut shares: Vec<usize> = Vec::new();
            for _ in 0..each * gpus.len() {
                if let Some(card) = cards.iter().min_by_key(|card| uses[**card]) {
                    uses[*card] += 1;
                    shares.push(*card);
                }
            }
            shares.sort_by_key(|card| cards.iter().position(|other| other == card));
            for (gpu, shares) in gpus.iter().zip(shares.chunks(each)) {
                of_gpu[*gpu] = shares.iter().flat_map(|card| functions[*card].iter().copied()).collect();
            }
        }
        of_gpu
    }

    fn gpus_in_order(&self) -> Vec<usize> {
        let mut gpus: Vec<usize> = self.gpus().collect();
        gpus.sort_by_key(|gpu| self.view.topology.gpus[*gpu].place.address);
        gpus
    }

    /// What GPUs lack: their own cards that are down, or slower than their like.
    fn faults(&self, of_gpu: &[Vec<usize>]) -> Vec<(usize, bool, String)> {
        let used = self.used_nics();
        let mut missing = self.missing.clone();
        if used.is_empty() && missing.is_empty() && self.view.settings.nic_down == NicDown::Fail {
            missing = (0..self.nics.len()).filter(|nic| self.out[*nic].is_none()).collect();
        }
        missing.extend(self.dead_fabric(&used));
        missing.extend(self.unaddressed.iter().filter(|nic| !used.contains(nic)));
        let both: Vec<usize> = used.iter().chain(&missing).copied().collect();
        let mut faults = Vec::new();
        for (gpu, nics) in self.assign(&both).into_iter().enumerate() {
            // A card with one of its ports is no fault: the other may have no cable.
            let has_port = |nic: &usize| used.iter().any(|other| self.cards[*other] == self.cards[*nic]);
            let dead: Vec<usize> = nics.into_iter().filter(|nic| !has_port(nic)).collect();
            if dead.is_empty() {
                continue;
            }
            let is = if dead.len() == 1 { "is" } else { "are" };
            let instead = match of_gpu[gpu].as_slice() {
                [] => "and no other is near".into(),
                [one] => format!("{} is used", self.name(*one)),
                several => format!("{} are used", self.names(several)),
            };
            let what = match dead.iter().all(|nic| self.unaddressed.contains(nic)) {
                true => "without an address that a peer knows",
                false => "down",
            };
            faults.push((gpu, true, format!("GPU {gpu}: {} {is} {what}, {instead}", self.names(&dead))));
        }
        for (gpu, nics) in of_gpu.iter().enumerate() {
            for (nic, rate, others) in self.slow.iter().filter(|(nic, ..)| nics.contains(nic)) {
                let text = format!("GPU {gpu}: {} runs at {rate} Gb/s, its like at {others}", self.name(*nic));
                faults.push((gpu, false, text));
            }
        }
        faults.sort_by_key(|(gpu, ..)| *gpu);
        faults
    }

    /// Cards of one model and kind near most of the GPUs, none of which is active, where
    /// what is used is near fewer.
    fn dead_fabric(&self, used: &[usize]) -> Vec<usize> {
        let near = |nics: &[usize]| self.gpus().filter(|gpu| self.nearest(*gpu, nics).is_near()).count();
        let idle: Vec<usize> = (0..self.nics.len())
            .filter(|nic| self.out[*nic].is_none() && !self.is_active(*nic) && self.is_near_some_gpu(*nic))
            .collect();
        let mut dead: Vec<usize> = Vec::new();
        for nic in &idle {
            let kind = |nic: usize| self.units.iter().find(|unit| unit.nic == nic).map(|unit| unit.link);
            let alike = |other: &usize| self.model(*other) == self.model(*nic) && kind(*other) == kind(*nic);
            if used.iter().any(alike) || dead.iter().any(alike) {
                continue;
            }
            let like: Vec<usize> = idle.iter().copied().filter(alike).collect();
            if !used.is_empty() && 2 * near(&like) > self.gpus().len() && near(&like) > near(used) {
                dead.extend(like);
            }
        }
        dead
    }

    fn done(mut self) -> NodeNics {
        self.used.sort_unstable();
        let used = self.used_nics();
        let of_gpu = if self.unclear.is_some() { vec![Vec::new(); self.gpus().len()] } else { self.assign(&used) };
        let faults = if self.unclear.is_some() { Vec::new() } else { self.faults(&of_gpu) };
        let verdicts = (0..self.nics.len()).map(|nic| self.verdict(nic, &of_gpu)).collect();
        // A site's list may name cards of several kinds.
        let links = || self.used.iter().map(|unit| self.units[*unit].link);
        let link = links().find(|link| link.is_verbs()).or(links().next());
        let mut ports = vec![Vec::new(); self.nics.len()];
        if self.unclear.is_none() {
            for unit in &self.used {
                let Unit { nic, port, link, .. } = self.units[*unit];
                ports[nic].extend(port.filter(|_| link.is_verbs()));
            }
        }
        NodeNics {
            verdicts,
            of_gpu,
            distances: self.distances,
            faults: faults.iter().map(|(gpu, down, _)| (*gpu, *down)).collect(),
            fallbacks: faults.into_iter().map(|(_, _, text)| text).collect(),
            ports,
            fabric: link.filter(|_| self.unclear.is_none()).map(Link::name),
            unclear: self.unclear,
        }
    }

    fn verdict(&self, nic: usize, of_gpu: &[Vec<usize>]) -> Verdict {
        let no = |why: &str| Verdict { used: false, why: why.into() };
        let unit = self.units.iter().find(|unit| unit.nic == nic && unit.active);
        if let Some(why) = &self.out[nic] {
            return no(why);
        }
        let name = self.name(nic);
        let Some(unit) = unit else {
            return no(match self.nics[nic].kind {
                NicKind::Slingshot => "its network device is down",
                NicKind::Verbs if self.view.ports.iter().any(|port| port.device == name && !port.readable) => {
                    "the state of its port cannot be read"
                }
                NicKind::Verbs if self.units.iter().any(|unit| unit.nic == nic) => "no port is active",
                NicKind::Verbs => "no port of it is known",
            });
        };
        if let Some(why) = &self.unclear {
            return Verdict { used: true, why: why.clone() };
        }
        if !self.used.iter().any(|used| self.units[*used].nic == nic) {
            return no(&format!("{}: not the fabric's kind", unit.link.name()));
        }
        let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
        for gpu in self.gpus().filter(|gpu| of_gpu[*gpu].contains(&nic)) {
            let name = self.distances[gpu][nic].name();
            match groups.iter_mut().find(|(known, _)| *known == name) {
                Some((_, gpus)) => gpus.push(gpu.to_string()),
                None => groups.push((name, vec![gpu.to_string()])),
            }
        }
        let groups: Vec<String> = groups
            .into_iter()
            .map(|(name, gpus)| format!("GPU{} {} ({name})", if gpus.len() == 1 { "" } else { "s" }, gpus.join(", ")))
            .collect();
        let why = match groups.is_empty() {
            true => "of the fabric; other cards are nearer to each GPU".into(),
            false => format!("nearest to {}", groups.join(", ")),
        };
        Verdict { used: true, why }
    }
}

/// The ports of a card, or the card itself.
fn units(index: usize, nic: &Nic, ports: &[RdmaPort]) -> Vec<Unit> {
    if nic.kind == NicKind::Slingshot {
        let active = nic.netdevs.is_empty() || nic.netdevs.iter().any(|netdev| netdev.up);
        return vec![Unit { nic: index, port: None, link: Link::Slingshot, active, gbps: Some(SLINGSHOT_GBPS) }];
    }
    let own = ports.iter().filter(|port| port.device == nic.name);
    let unit = |port: &RdmaPort| Unit {
        nic: index,
        port: Some(port.port),
        link: Link::of(port),
        active: port.active && port.link_up && port.readable,
        gbps: port.gbps,
    };
    own.map(unit).collect()
}

/// A virtual function has its physical one's, where that is here too.
fn model(nic: &Nic, nics: &[Nic]) -> Model {
    let Some(place) = &nic.place else {
        return (None, None);
    };
    let physical = place
        .physical
        .and_then(|physical| nics.iter().filter_map(|nic| nic.place.as_ref()).find(|place| place.address == physical));
    let place = physical.unwrap_or(place);
    (place.vendor, place.device)
}

fn address(nic: &Nic) -> Option<PciAddress> {
    nic.place.as_ref().map(|place| place.address)
}

/// The address of its card: a virtual function is of the physical one's.
fn card_of(nic: &Nic) -> Option<PciAddress> {
    nic.place.as_ref().map(|place| place.physical.unwrap_or(place.address))
}

/// The class that is the fabric, if any. By nearness where a switch joins cards
/// and GPUs; else the fastest, since sockets are no more than a hint.
fn best(classes: &[Class], near: bool) -> Option<usize> {
    let key = |class: &Class| {
        let (first, second) = (class.cover, class.bandwidth as usize);
        let (first, second) = if near { (first, second) } else { (second, first) };
        (first, second, !class.bonded, !class.routed)
    };
    (0..classes.len()).max_by_key(|index| (key(&classes[*index]), std::cmp::Reverse(*index)))
}

/// Whether `other` is surely not the fabric.
fn is_sure(winner: &Class, other: &Class, near: bool) -> bool {
    let nearer = winner.cover > other.cover;
    // InfiniBand is seldom there for management; RDMA on Ethernet is everywhere.
    if winner.link == Link::Ethernet && other.link == Link::InfiniBand {
        return winner.bandwidth >= other.bandwidth.saturating_mul(if near && nearer { 2 } else { 4 });
    }
    if near && nearer {
        // A slow port beside a GPU proves nothing.
        return winner.rate == 0 || 2 * winner.rate >= other.rate;
    }
    if winner.cover < other.cover {
        let overtops = winner.link == Link::InfiniBand && other.link == Link::Ethernet;
        return overtops && winner.rate >= 2 * other.rate;
    }
    winner.bandwidth > other.bandwidth || nearer || (!winner.bonded && other.bonded) || (!winner.routed && other.routed)
}

impl NodeNics {
    /// NCCL_IB_HCA for every rank of the node.
    ///
    /// # Errors
    /// Why none is needed, or none known.
    pub fn nccl_ib_hca(&self, view: &View) -> Result<String, String> {
        self.known()?;
        let mut order: Vec<usize> = (0..self.ports.len()).collect();
        order.sort_by_key(|nic| {
            let address = view.topology.nics.get(*nic).and_then(address);
            (address.is_none(), address)
        });
        let name = |nic: usize| view.topology.nics.get(nic).map_or("", |nic| nic.name.as_str());
        let wanted: Vec<(&str, u8)> =
            order.iter().flat_map(|nic| self.ports[*nic].iter().map(|port| (name(*nic), *port))).collect();
        let active: Vec<(&str, u8)> = view
            .ports
            .iter()
            .filter(|port| port.active && port.link != LinkLayer::Other)
            .map(|port| (port.device.as_str(), port.port))
            .collect();
        if active.iter().all(|port| wanted.contains(port)) && view.rules.allow.is_none() {
            return Err("every active card is of the GPUs' fabric: none must be left out".into());
        }
        if wanted.len() > MOST_DEVICES {
            return Err(format!("{} ports are more than NCCL takes from a list", wanted.len()));
        }
        let entries: Vec<String> = wanted.iter().map(|(device, port)| format!("{device}:{port}")).collect();
        let value = format!("={}", entries.join(","));
        let list = List::parse(&value);
        let exact = active
            .iter()
            .all(|(device, port)| list.selects(device, Some((*port).into())) == wanted.contains(&(*device, *port)));
        if exact { Ok(value) } else { Err("the devices' names do not fit into NCCL's list".into()) }
    }

    /// Whether there are cards for NCCL and UCX.
    fn known(&self) -> Result<(), String> {
        if let Some(why) = &self.unclear {
            return Err(why.clone());
        }
        match self.fabric {
            Some("InfiniBand" | "Ethernet") => Ok(()),
            Some(other) => Err(format!("the fabric is {other}, which is reached by libfabric, not by RDMA verbs")),
            None => Err("no compute fabric found: none of the cards that may be used is active".into()),
        }
    }

    /// UCX_NET_DEVICES for a rank with these GPUs.
    ///
    /// # Errors
    /// Why none is set.
    pub fn ucx_net_devices(&self, view: &View, gpus: &[usize], rails: Option<u8>) -> Result<String, String> {
        self.known()?;
        let every = view.topology.gpus.len();
        if gpus.is_empty() || (gpus.len() == every && every > 1) {
            return Err("this rank has all GPUs of the node: it and what it starts take what is near each".into());
        }
        let used = |nic: &usize| !self.ports[*nic].is_empty();
        let all: Vec<usize> = (0..self.ports.len()).filter(used).collect();
        let mut taken: Vec<usize> = Vec::new();
        for gpu in gpus {
            let own = self.of_gpu.get(*gpu).map(Vec::as_slice).unwrap_or_default();
            if own.is_empty() || own.iter().any(|nic| self.distances[*gpu][*nic] == Distance::Unknown) {
                return Err(format!("which card is near GPU {gpu} is not known"));
            }
            for nic in self.rails(view, *gpu, own, &all, rails) {
                if !taken.contains(&nic) {
                    taken.push(nic);
                }
            }
        }
        if all.iter().all(|nic| taken.contains(nic)) && !self.leaves_out_active(view) {
            return Err("every active card is this rank's: none must be left out".into());
        }
        let entries = taken.iter().flat_map(|nic| {
            let name = &view.topology.nics[*nic].name;
            self.ports[*nic].iter().map(move |port| format!("{name}:{port}"))
        });
        Ok(entries.collect::<Vec<_>>().join(","))
    }

    fn leaves_out_active(&self, view: &View) -> bool {
        let out = |nic: &Nic, ports: &[u8]| {
            view.ports.iter().any(|port| {
                port.active && port.link != LinkLayer::Other && port.device == nic.name && !ports.contains(&port.port)
            })
        };
        view.topology.nics.iter().zip(&self.ports).any(|(nic, ports)| out(nic, ports))
    }

    /// As many cards as `rails` asks for: the GPU's own first, then the next
    /// nearest.
    fn rails(&self, view: &View, gpu: usize, own: &[usize], all: &[usize], rails: Option<u8>) -> Vec<usize> {
        let Some(rails) = rails else {
            return own.to_vec();
        };
        let nics = &view.topology.nics;
        let mut others: Vec<usize> = all.iter().copied().filter(|nic| !own.contains(nic)).collect();
        others.sort_by_key(|nic| (self.distances[gpu][*nic], address(&nics[*nic])));
        let mut taken: Vec<usize> = Vec::new();
        let mut cards: Vec<PciAddress> = Vec::new();
        for nic in own.iter().copied().chain(others) {
            let Some(card) = card_of(&nics[nic]) else {
                continue;
            };
            if !cards.iter().any(|known| known.same_card(card)) {
                if cards.len() == usize::from(rails) || self.distances[gpu][nic] == Distance::Unknown {
                    continue;
                }
                cards.push(card);
            }
            taken.push(nic);
        }
        taken
    }
}

/// NCCL_IB_HCA, UCX_NET_DEVICES and what is told of cards.
pub(super) fn decide(
    plan: &mut Plan,
    offers: &mut Offers,
    facts: &Facts,
    settings: &Settings,
    nics: &NodeNics,
    gpus: &Result<Vec<usize>, String>,
) {
    const HCA: &str = "NCCL_IB_HCA";
    const UCX: &str = "UCX_NET_DEVICES";
    if !settings.bind.nic {
        let why = format!("bind={}: network cards are left alone", settings.bind);
        offers.nothing(HCA, why.clone());
        offers.nothing(UCX, why.clone());
        plan.binding.say("nic", None, why);
        return;
    }
    let view = View::of(facts, settings);
    let tcp = settings.fabric == Fabric::Tcp;
    if facts.step.nodes() > 1 && !tcp {
        tell_faults(plan, facts, settings, nics);
    }
    let by_tcp = || "fabric=tcp: RDMA cards are not used".to_string();
    let hca = match facts.step.nodes() {
        1 => Err("one node: NCCL uses no network".into()),
        _ if tcp => Err(by_tcp()),
        _ if facts.node.rdma.is_none() => Err("the node's RDMA devices are not known".into()),
        _ => nics.nccl_ib_hca(&view),
    };
    // What leads to rank 0 follows from where it is, which only srun may have known.
    let marks = Marks::of(facts.users());
    let kept = facts.users().get(HCA).filter(|_| marks.of_this_step(facts.users(), facts.step, HCA));
    if let Some(kept) = kept.filter(|kept| hca.as_deref() != Ok(*kept)) {
        offers.value(Layer::Chosen, Origin::Fabric, HCA, kept, "as set when this step started");
    }
    match hca {
        Ok(value) => {
            tell_far(plan, facts, &view, nics, &value);
            let why = match view.rules.allow {
                Some(_) => "the site file's allow list; the same for all ranks of the node".to_string(),
                None => {
                    format!("only the GPUs' cards, not {}; the same for all ranks of the node", left_out(&view, nics))
                }
            };
            offers.value(Layer::Fabric, Origin::Fabric, HCA, value, why);
        }
        Err(why) => offers.nothing(HCA, why),
    }
    let own = gpus.as_ref().map_err(Clone::clone);
    let ucx = match own {
        _ if tcp => Err(by_tcp()),
        _ if plan.step.shape == Shape::Agent => {
            Err("each task starts the node's ranks, and UCX in each takes what is near it".into())
        }
        Err(why) => Err(why),
        Ok(gpus) => nics.ucx_net_devices(&view, gpus, settings.rails),
    };
    match (ucx, gpus) {
        (Ok(value), _) => {
            let chosen = settings.is_given("rails") && !settings.is_of_site("rails");
            let (layer, origin) =
                if chosen { (Layer::Chosen, Origin::Option) } else { (Layer::Fabric, Origin::Fabric) };
            offers.value(layer, origin, UCX, value, "the cards nearest to this rank's GPU");
        }
        (Err(why), _) => offers.nothing(UCX, why),
    }
    match gpus {
        Ok(gpus) => report(plan, &view, nics, gpus),
        Err(why) => plan.binding.say("nic", None, why.clone()),
    }
}

/// The rank's cards, and how near they are.
fn report(plan: &mut Plan, view: &View, nics: &NodeNics, gpus: &[usize]) {
    let mut names: Vec<&str> = Vec::new();
    let mut how: Vec<&str> = Vec::new();
    for gpu in gpus {
        for nic in nics.of_gpu.get(*gpu).into_iter().flatten() {
            let name = view.topology.nics[*nic].name.as_str();
            if !names.contains(&name) {
                names.push(name);
                how.push(nics.distances[*gpu][*nic].name());
            }
        }
    }
    if names.is_empty() {
        let why = nics.known().err().unwrap_or_else(|| "which cards are near is not known".into());
        plan.binding.say("nic", None, why);
        return;
    }
    let nearest = if gpus.len() == 1 { "nearest to its GPU" } else { "nearest to its GPUs" };
    plan.binding.say("nic", Some(names.join(", ")), format!("{nearest} ({})", how.join(", ")));
}

/// Active functions that are not used.
fn left_out(view: &View, nics: &NodeNics) -> String {
    let active = |nic: &Nic| view.ports.iter().any(|port| port.active && port.device == nic.name);
    let out: Vec<&str> = view
        .topology
        .nics
        .iter()
        .zip(&nics.verdicts)
        .filter(|(nic, verdict)| !verdict.used && active(nic))
        .map(|(nic, _)| nic.name.as_str())
        .collect();
    match out.len().saturating_sub(4) {
        0 => out.join(", "),
        more => format!("{} and {more} more", out[..4].join(", ")),
    }
}

/// A card that is down, or slow, of a GPU that this task may use.
fn tell_faults(plan: &mut Plan, facts: &Facts, settings: &Settings, nics: &NodeNics) {
    if settings.checks == CheckLevel::Off && settings.nic_down == NicDown::Warn {
        return;
    }
    let seen = visible::visible(facts, settings).ok();
    for ((gpu, down), text) in nics.faults.iter().zip(&nics.fallbacks) {
        if seen.as_ref().is_some_and(|seen| !seen.contains(gpu)) {
            continue;
        }
        let fails = *down && settings.nic_down == NicDown::Fail;
        plan.warnings.push(Warning {
            id: "nic-down",
            severity: if fails { Severity::Error } else { Severity::Warning },
            message: format!("{text} on {}", plan.step.node),
            cure: "have the link looked at (`ibstat`); a card that is not meant belongs in nic-deny of the site file"
                .into(),
        });
    }
}

/// The user's own list that takes cards which are no part of the fabric, and
/// which look like it: by kind and rate alone nobody sees it.
fn tell_far(plan: &mut Plan, facts: &Facts, view: &View, nics: &NodeNics, ours: &str) {
    let marks = Marks::of(facts.environment);
    let Some((value, from @ (checks::From::User | checks::From::Image))) =
        precedence::given(facts, &marks, "NCCL_IB_HCA")
    else {
        return;
    };
    let list = List::parse(&value);
    let like = |port: &RdmaPort| {
        let of_fabric = |other: &&RdmaPort| {
            let index = view.topology.nics.iter().position(|nic| nic.name == other.device);
            index.is_some_and(|index| nics.ports[index].contains(&other.port))
        };
        view.ports.iter().filter(of_fabric).any(|other| (other.link, other.gbps) == (port.link, port.gbps))
    };
    for (index, nic) in view.topology.nics.iter().enumerate() {
        let taken = |port: &&RdmaPort| {
            port.device == nic.name
                && port.active
                && list.selects(&port.device, Some(port.port.into()))
                && !nics.ports[index].contains(&port.port)
        };
        if let Some(port) = view.ports.iter().filter(taken).find(|port| like(port)) {
            let shown = checks::Value { name: "NCCL_IB_HCA".into(), value: value.clone(), from };
            plan.warn(
                "hca-far",
                format!("{} takes {}:{} too: {}", shown.shown(), port.device, port.port, nics.verdicts[index].why),
                format!("write {ours}, or unset it"),
            );
            return;
        }
    }
}
