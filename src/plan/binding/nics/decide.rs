//! The cards' part of a plan: the variables, the rank's row, and the warnings of
//! cards that are down and of lists that take too much.

use crate::config::{CheckLevel, Fabric, NicDown, Settings, printable};
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
        Ok(gpus) => match precedence::winner(offers, facts, &Marks::of(facts.environment), "UCX_TLS") {
            Some(list) if !by_rdma_alone(&list) => {
                let why = "UCX would find no network device for TCP among the cards";
                Err(format!("UCX_TLS={}: {why}", printable(&list)))
            }
            _ => nics.ucx_net_devices(&view, gpus, settings.rails),
        },
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

/// Whether UCX_TLS leaves UCX its RDMA transports, and does not ask for TCP by name:
/// UCX_NET_DEVICES holds for TCP's network devices too
/// (<https://openucx.readthedocs.io/en/master/faq.html>).
fn by_rdma_alone(list: &str) -> bool {
    let (excluded, list) = list.trim().strip_prefix('^').map_or((false, list.trim()), |rest| (true, rest));
    let items = || list.split(',').map(|item| item.trim().trim_start_matches('\\'));
    let named = |name: &str| items().any(|item| item == name);
    let begins = |name: &str| items().any(|item| item == name || item.starts_with(&format!("{name}_")));
    let of_rdma = ["ib", "rc", "dc", "ud"];
    if excluded {
        return !named("ib") && !of_rdma[1..].iter().all(|name| named(name));
    }
    list.is_empty() || named("all") || (of_rdma.iter().any(|name| begins(name)) && !named("tcp"))
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
    let is_used = |gpu: usize| seen.as_ref().is_none_or(|seen| seen.contains(&gpu)) || of_others(gpu);
    let told = |is_down: bool| -> Vec<&str> {
        let faults = nics.faults.iter().zip(&nics.fallbacks);
        let its = faults.filter(|((gpu, down), _)| *down == is_down && is_used(*gpu));
        its.map(|(_, text)| text.as_str()).collect()
    };
    // One line for all of a node: where every other rail has no cable they are many.
    for (is_down, texts) in [(true, told(true)), (false, told(false))] {
        if texts.is_empty() {
            continue;
        }
        let more = match texts.len().saturating_sub(4) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let fails = is_down && settings.nic_down == NicDown::Fail;
        plan.warnings.push(Warning {
            id: "nic-down",
            severity: if fails { Severity::Error } else { Severity::Warning },
            message: format!("{}{more} on {}", texts[..texts.len().min(4)].join("; "), plan.step.node),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// UCX's own words (src/ucp/core/ucp_context.c): ib stands for all RDMA
    /// transports, rc for its kinds.
    #[test]
    fn ucx_tls_with_rdma_and_without_tcp() {
        for (list, expected) in [
            ("", true),
            ("all", true),
            ("rc,cuda_copy,cuda_ipc,sm,self", true),
            ("rc_x,sm", true),
            ("ib,cuda,sm", true),
            ("^tcp", true),
            ("^dc,ud", true),
            ("^cuda_ipc", true),
            ("tcp,cuda_copy,cuda_ipc,sm,self", false),
            ("rc,tcp,cuda_copy", false),
            ("sm,self", false),
            ("^ib", false),
            ("^rc,dc,ud", false),
        ] {
            assert_eq!(by_rdma_alone(list), expected, "{list}");
        }
    }
}
