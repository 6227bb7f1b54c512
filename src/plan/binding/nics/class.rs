//! The fabric's class: of the cards' ports those of one kind, model and rate that
//! are near most GPUs. A fabric is cabled with equal ports, and those for storage
//! and management are others or fewer.

use std::collections::BTreeSet;

use crate::config::{Fabric, printable};
use crate::facts::RdmaPort;
use crate::facts::rdma::LinkLayer;

use super::super::Distance;
use super::Choice;
use super::ports::{Link, Model, Unit};

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

/// What cards of the fabric's model at another rate are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OtherRate {
    /// Cards of the GPUs that came up slow: with them each GPU has as many.
    Part,
    /// For something else: without them each GPU has as many.
    Apart,
    Unknown,
}

impl Choice<'_> {
    /// Whether a port may be of the fabric, by its kind alone.
    fn kinds(&self) -> Vec<Link> {
        let has =
            |link: Link| self.units.iter().any(|unit| unit.link == link && unit.active && self.out[unit.nic].is_none());
        match self.view.settings.fabric {
            Fabric::Infiniband => vec![Link::InfiniBand],
            Fabric::Roce => vec![Link::Ethernet],
            Fabric::Efa => vec![Link::Efa],
            Fabric::Slingshot => vec![Link::Slingshot],
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
    pub(super) fn by_class(&mut self) {
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
            let same = (!near && alike && class.link == winner.link).then(|| self.at_another_rate(&class, &winner));
            let joins = (near
                && class.link == winner.link
                && alone > 0
                && (class.rate >= winner.rate
                    || alike
                    || (2 * class.rate >= winner.rate && 2 * alone >= winner.cover)))
                || same == Some(OtherRate::Part);
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
            let unknown = same_network || same == Some(OtherRate::Unknown);
            if self.unclear.is_none() && (unknown || !self.is_sure(&winner, &class, near)) {
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
        self.without_routed(&down);
        self.missing = down;
        let used = &self.used;
        let units = &self.units;
        self.missing.retain(|nic| !used.iter().any(|unit| units[*unit].nic == *nic));
    }

    /// Whether `other` is surely not the fabric.
    fn is_sure(&self, winner: &Class, other: &Class, near: bool) -> bool {
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
        let by_mark = (!winner.bonded && other.bonded) || (!winner.routed && other.routed);
        if winner.link != other.link {
            return winner.bandwidth > other.bandwidth || nearer || by_mark;
        }
        // Two ports for management are more than one for the GPUs.
        let gpus = self.gpus().len();
        let one_each = gpus >= 4 && self.count(&winner.nics) >= gpus && self.count(&other.nics) < gpus;
        let more = winner.bandwidth > other.bandwidth
            && (winner.rate > other.rate || one_each || winner.bandwidth >= other.bandwidth.saturating_mul(4));
        more || nearer || by_mark
    }

    /// Where nothing but the number of cards tells what those of the fabric's model
    /// at another rate are.
    fn at_another_rate(&self, class: &Class, winner: &Class) -> OtherRate {
        let own: Vec<usize> = winner.nics.iter().chain(&winner.down).copied().collect();
        let all: Vec<usize> = own.iter().chain(&class.nics).copied().collect();
        let (own, all) = (self.count(&own), self.count(&all));
        match (self.is_even(own), self.is_even(all)) {
            (true, false) => OtherRate::Apart,
            (false, true) if 2 * own > all => OtherRate::Part,
            _ => OtherRate::Unknown,
        }
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

    /// One more card than the GPUs have is the outer network's where the default
    /// route goes over it.
    fn without_routed(&mut self, down: &[usize]) {
        let Some(route) = self.view.topology.default_route.clone() else {
            return;
        };
        let used = self.used_nics();
        let routed: BTreeSet<usize> =
            used.iter().filter(|nic| self.has_default_route(**nic)).map(|nic| self.cards[*nic]).collect();
        let (routed, rest): (Vec<usize>, Vec<usize>) = used.iter().partition(|nic| routed.contains(&self.cards[**nic]));
        let others: Vec<usize> = rest.iter().chain(down).copied().collect();
        let all: Vec<usize> = used.iter().chain(down).copied().collect();
        if rest.is_empty() || !self.is_even(self.count(&others)) || self.is_even(self.count(&all)) {
            return;
        }
        for nic in routed {
            let nearer = |gpu: usize| self.distances[gpu][nic].grade() < self.nearest(gpu, &others).grade();
            if !self.gpus().any(nearer) {
                let why = format!(
                    "{} has the default route, and the GPUs have as many cards each without it: {}",
                    printable(&route),
                    self.names(&rest)
                );
                self.drop_nic(nic, why);
            }
        }
    }

    /// Whether its ports are part of a bond. On InfiniBand that is a matter of IP
    /// alone, and RDMA goes past it.
    fn is_bonded(&self, nic: usize) -> bool {
        self.is_on_ethernet(nic) && self.nics[nic].netdevs.iter().any(|netdev| netdev.master.is_some())
    }

    /// Whether the default route goes over it; by IP over InfiniBand that means
    /// nothing.
    fn has_default_route(&self, nic: usize) -> bool {
        let Some(route) = self.view.topology.default_route.as_ref().filter(|_| self.is_on_ethernet(nic)) else {
            return false;
        };
        // A VLAN has the name of what it is on, and its number.
        let below = route.rsplit_once('.').map_or(route.as_str(), |(below, _)| below);
        let of_it = |name: &str| name == route || name == below;
        self.nics[nic].netdevs.iter().any(|netdev| of_it(&netdev.name) || netdev.master.as_deref().is_some_and(of_it))
    }

    fn is_on_ethernet(&self, nic: usize) -> bool {
        self.units.iter().any(|unit| unit.nic == nic && unit.active && unit.link == Link::Ethernet)
    }
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
