//! Which network cards carry the training's traffic, and which of them belong to
//! which GPU. NCCL finds the nearest cards by itself where it sees the PCI tree;
//! what it cannot know is which cards are for storage and management
//! (<https://github.com/NVIDIA/nccl/issues/1591>). Where that is not clear here
//! either, nothing is set.

mod class;
mod decide;
mod eligible;
mod faults;
mod lists;
mod of_gpu;
mod ports;

use std::collections::BTreeSet;

use crate::config::Settings;
use crate::config::nics::NicRules;
use crate::facts::topology::{Gpu, Nic, NicKind};
use crate::facts::{RdmaPort, Topology};

use super::super::Facts;
use super::Distance;
use super::subnets::Addresses;
pub(super) use decide::decide;
use ports::{Link, Model, Unit, address, card_of, model, units};

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

/// The choice in the making.
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
        let to_each = |gpu: &Gpu| {
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

    fn name(&self, nic: usize) -> &str {
        &self.nics[nic].name
    }

    /// Whether the kernel does not tell the state of a port.
    fn is_unreadable(&self, nic: usize) -> bool {
        self.view.ports.iter().any(|port| port.device == self.name(nic) && !port.readable)
    }

    /// How many physical cards these are.
    fn count(&self, nics: &[usize]) -> usize {
        nics.iter().map(|nic| self.cards[*nic]).collect::<BTreeSet<_>>().len()
    }

    /// Whether so many cards are as many for each GPU, or for as many GPUs each.
    fn is_even(&self, cards: usize) -> bool {
        let gpus = self.gpus().len();
        cards > 0 && gpus > 0 && (cards.is_multiple_of(gpus) || gpus.is_multiple_of(cards))
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

    fn used_nics(&self) -> Vec<usize> {
        let mut nics: Vec<usize> = self.order.clone();
        nics.retain(|nic| self.used.iter().any(|unit| self.units[*unit].nic == *nic));
        nics
    }

    fn done(mut self) -> NodeNics {
        self.used.sort_unstable();
        let used = self.used_nics();
        let of_gpu =
            if self.unclear.is_some() { vec![Vec::new(); self.gpus().len()] } else { self.assign(&used).of_gpu };
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
        let Some(unit) = unit else {
            return no(match self.nics[nic].kind {
                NicKind::Slingshot => "its network device is down",
                NicKind::Verbs if self.is_unreadable(nic) => "the state of its port cannot be read",
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
