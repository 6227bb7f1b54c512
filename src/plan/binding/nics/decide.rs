//! The cards' part of a plan: the variables, the rank's row, and the warnings of
//! cards that are down and of lists that take too much.

use crate::config::{CheckLevel, Fabric, NicDown, Settings};
use crate::facts::RdmaPort;
use crate::facts::task::Peers;
use crate::facts::topology::Nic;
use crate::plan::marks::Marks;
use crate::plan::netmatch::List;
use crate::plan::precedence::{self, Layer, Offers};
use crate::plan::{Facts, Origin, Plan, Severity, Shape, Warning, checks};

use super::super::visible;
use super::{NodeNics, View};

/// NCCL_IB_HCA, UCX_NET_DEVICES and what is told of cards.
pub(in crate::plan::binding) fn decide(
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

/// A card that is down, or slow, of a GPU that this task may use, or another rank of
/// the node has: one rank speaks for its node, and may see its own GPU only.
fn tell_faults(plan: &mut Plan, facts: &Facts, settings: &Settings, nics: &NodeNics) {
    if settings.checks == CheckLevel::Off && settings.nic_down == NicDown::Warn {
        return;
    }
    let seen = visible::visible(facts, settings).ok();
    let of_others = |gpu: usize| match &facts.task.peers {
        Peers::Met(peers) => peers.iter().any(|peer| peer.gpus.iter().any(|own| usize::from(*own) == gpu)),
        _ => false,
    };
    for ((gpu, down), text) in nics.faults.iter().zip(&nics.fallbacks) {
        if seen.as_ref().is_some_and(|seen| !seen.contains(gpu)) && !of_others(*gpu) {
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
