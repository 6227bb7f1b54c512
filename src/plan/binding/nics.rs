//! Which network cards carry the training's traffic, and which of them belong to
//! which GPU.

use crate::config::Settings;
use crate::config::nics::NicRules;
use crate::facts::{RdmaPort, Topology};

use super::super::precedence::Offers;
use super::super::{Facts, Plan};
use super::Distance;

/// What the choice is made from: the node's facts and the admin's rules. The same
/// for every rank of the node.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The machine.
    pub topology: &'a Topology,
    /// The ports of its RDMA devices.
    pub ports: &'a [RdmaPort],
    /// `rails=` and `nic-down=`.
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
            settings,
            rules: facts.site.map_or(&NO_RULES, |site| &site.nics),
        }
    }
}

/// What became of one card's function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it is used.
    pub used: bool,
    /// Why, or why not: "near GPU 0", "down", "storage: near no GPU".
    pub why: String,
}

/// The node's choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNics {
    /// For each of `topology.nics`.
    pub verdicts: Vec<Verdict>,
    /// For each of `topology.gpus`, the cards that belong to it, as indexes of
    /// `topology.nics`, nearest first; of a card with several functions all.
    pub of_gpu: Vec<Vec<usize>>,
    /// For each of `topology.gpus`, its distance to each of `topology.nics`.
    pub distances: Vec<Vec<Distance>>,
    /// Faults: "GPU 5: mlx5_9 is down, mlx5_6 is used".
    pub fallbacks: Vec<String>,
}

/// Makes the choice.
pub fn choose(view: &View) -> NodeNics {
    let _ = view;
    NodeNics::default()
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
    let _ = (plan, offers, facts, settings, nics, gpus);
}
