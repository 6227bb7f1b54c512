//! MASTER_ADDR and MASTER_PORT: where rank 0 listens for the others.

use std::net::IpAddr;

use thiserror::Error;

use crate::config::{self, Launch, PortRange, Settings, printable};
use crate::facts::hostlist;
use crate::facts::network::Resolution;
use crate::facts::task::Container;
use crate::facts::{Environment, Rank0, Step};

use super::launch::shape;
use super::marks::Marks;
use super::{Facts, Origin, Plan, Shape};

/// Below the kernel's usual range for outgoing connections (32768-60999), above
/// what services use, and clear of the ranges others derive ports from
/// (29500 of torchrun lies inside it, but is one port of 12,000).
pub const DEFAULT_PORTS: PortRange = PortRange { low: 20000, high: 31999 };

/// How many ports a plan names.
const SEQUENCE: u32 = 8;

/// Why the ranks could not meet.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RendezvousError {
    /// MASTER_PORT of the user is no port.
    #[error("MASTER_PORT={value}: {why}; unset MASTER_PORT and one is chosen, or export a port between 1024 and 65535")]
    BadPort {
        /// The user's value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// MASTER_ADDR of the user is no host.
    #[error("MASTER_ADDR={value}: {why}; unset MASTER_ADDR and rank 0's host is taken")]
    BadHost {
        /// The user's value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// A loopback address on several nodes.
    #[error(
        "{from} is a loopback address, but the step has {nodes} nodes: each node would wait for itself; \
         {cure} and rank 0's host is taken"
    )]
    Loopback {
        /// The setting with its value.
        from: String,
        /// Nodes of the step.
        nodes: u32,
        /// How to take it back.
        cure: &'static str,
    },
    /// A node of the job that rank 0 is not on.
    #[error(
        "{from} is not rank 0's host: rank 0 runs on {rank0}, so nobody would listen there; {cure} and {rank0} is taken"
    )]
    NotRank0 {
        /// The setting with its value.
        from: String,
        /// Rank 0's node.
        rank0: String,
        /// How to take it back.
        cure: &'static str,
    },
    /// The user's host does not resolve.
    #[error(
        "{from} does not resolve on {node} ({why}); correct the name, give an IP address, or {cure} and rank 0's host is taken"
    )]
    Unresolvable {
        /// The setting with its value.
        from: String,
        /// Where it was looked up.
        node: String,
        /// The resolver's reason.
        why: String,
        /// How to take it back.
        cure: &'static str,
    },
    /// The user's host resolves to a loopback address where rank 0 is not.
    #[error(
        "{from} resolves to a loopback address on {node}, so its ranks would wait for themselves; \
         correct the name there, give an IP address, or {cure} and rank 0's host is taken"
    )]
    LoopbackName {
        /// The setting with its value.
        from: String,
        /// Where it was looked up.
        node: String,
        /// How to take it back.
        cure: &'static str,
    },
    /// Neither rank 0's host name nor its address can be used.
    #[error(
        "rank 0's host {host} {why} on {node}, and Slurm handed over no numeric address for it; \
         add {host} to DNS or to /etc/hosts of {node}, or set NodeAddr in slurm.conf, or give master=ADDRESS"
    )]
    NoAddress {
        /// Rank 0's host.
        host: String,
        /// Where it was looked up.
        node: String,
        /// What is wrong with its name.
        why: String,
    },
    /// The layout does not show where rank 0 is.
    #[error("rank 0's node is unknown: {why}; give it as master=HOST")]
    UnknownRank0 {
        /// Why it is.
        why: &'static str,
    },
    /// The other ranks take another node for rank 0's.
    #[error(
        "rank 0 runs on {node}, but the other ranks were told {host} and would look for it there; give master={node}"
    )]
    Elsewhere {
        /// Rank 0's node.
        node: String,
        /// What the others take it for.
        host: String,
    },
    /// No such interface here.
    #[error("iface={iface}: {node} has no such interface with an address (it has {has}); name one of these")]
    NoInterface {
        /// The interface.
        iface: String,
        /// The node.
        node: String,
        /// Those it has.
        has: String,
    },
    /// Rank 0 has no known address in the interface's network.
    #[error(
        "iface={iface}: {host} has no address in the network of {iface} on {node} ({network}); \
         where it has a name there, give suffix=, else master=ADDRESS"
    )]
    NotOnNetwork {
        /// The interface.
        iface: String,
        /// Rank 0's host.
        host: String,
        /// This node.
        node: String,
        /// The interface's network.
        network: String,
    },
}

/// A host to meet at, before it is known whether it resolves.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Choice {
    host: String,
    origin: Origin,
    why: &'static str,
}

/// How a user takes a host back, by where it came from.
fn cure(origin: Origin) -> &'static str {
    match origin {
        Origin::Option => "leave out master=",
        Origin::Site => "have the cluster's admins take master out of the site file",
        _ => "unset MASTER_ADDR",
    }
}

fn shown(origin: Origin, host: &str) -> String {
    match origin {
        Origin::Option => format!("master={}", printable(host)),
        Origin::Site => format!("master={} of the site file", printable(host)),
        _ => format!("MASTER_ADDR={}", printable(host)),
    }
}

/// Whether the user chose by one of these options. What the site file has for
/// them stands below the user's exported variables.
fn asked(settings: &Settings, keys: &[&str]) -> bool {
    keys.iter().any(|key| settings.is_given(key) && !settings.is_of_site(key))
}

/// Who gave an option its value.
fn origin(settings: &Settings, key: &str) -> Origin {
    if settings.is_of_site(key) { Origin::Site } else { Origin::Option }
}

/// `key=`, with who gave it where that is not the user.
fn named(settings: &Settings, key: &str) -> String {
    if settings.is_of_site(key) { format!("{key} of the site file") } else { format!("{key}=") }
}

/// The host somebody named: the user by `master=` or by exporting MASTER_ADDR,
/// else the site file; `None` where another option chooses it.
pub fn given_host(settings: &Settings, environment: &Environment) -> Option<(String, Origin)> {
    let master = |origin| settings.master.clone().map(|host| (host, origin));
    if asked(settings, &["master"]) {
        return master(Origin::Option);
    }
    if asked(settings, &["suffix", "iface"]) {
        return None;
    }
    let exported = Marks::of(environment).users(environment, "MASTER_ADDR");
    match exported.filter(|_| settings.launch != Launch::Shell) {
        Some(exported) => Some((exported.to_string(), Origin::User)),
        None => master(Origin::Site),
    }
}

/// The port the user exported; `None` where an option chooses it.
///
/// # Errors
/// When no rank could listen on it.
pub fn given_port(settings: &Settings, environment: &Environment) -> Result<Option<u16>, RendezvousError> {
    if settings.launch == Launch::Shell || asked(settings, &["port", "ports"]) {
        return Ok(None);
    }
    let Some(value) = Marks::of(environment).users(environment, "MASTER_PORT") else {
        return Ok(None);
    };
    config::parse_port(value).map(Some).map_err(|why| RendezvousError::BadPort { value: printable(value), why })
}

/// Options stand above exported variables; one that is passed over is told.
fn tell_passed_over(plan: &mut Plan, facts: &Facts, settings: &Settings, marks: &Marks) {
    let options = [("MASTER_ADDR", &["master", "suffix", "iface"][..]), ("MASTER_PORT", &["port", "ports"])];
    for (name, options) in options {
        let option = options.iter().find(|option| asked(settings, &[option]));
        if let (Some(value), Some(option)) = (marks.users(facts.users(), name), option) {
            let message = format!("{name}={} of the environment gives way to {option}=", printable(value));
            plan.inform("variable-passed-over", message, format!("leave out {option}= to have it"));
        }
    }
}

/// Checks a host the user named against what is known of the step: its number
/// of nodes, rank 0's node, the nodes of job and step.
///
/// # Errors
/// When the ranks could not meet there.
pub fn check_given_host(
    host: &str,
    origin: Origin,
    nodes: u32,
    rank0: Option<&str>,
    known: &[String],
) -> Result<(), RendezvousError> {
    config::check_host(host).map_err(|why| RendezvousError::BadHost { value: printable(host), why })?;
    let address = host.parse::<IpAddr>().ok();
    let loopback = address.is_some_and(|a| a.is_loopback() || a.is_unspecified()) || host == "localhost";
    if nodes > 1 && loopback {
        return Err(RendezvousError::Loopback { from: shown(origin, host), nodes, cure: cure(origin) });
    }
    if let Some(rank0) = rank0.filter(|rank0| *rank0 != host)
        && known.iter().any(|node| node == host)
    {
        return Err(RendezvousError::NotRank0 { from: shown(origin, host), rank0: rank0.into(), cure: cure(origin) });
    }
    Ok(())
}

/// The refusal for a host of the user's that does not resolve.
pub fn unresolvable(host: &str, origin: Origin, node: &str, why: &str) -> RendezvousError {
    RendezvousError::Unresolvable { from: shown(origin, host), node: node.into(), why: why.into(), cure: cure(origin) }
}

/// The names to look up on this node before planning; empty when the shape has
/// no ranks. With `iface=` rank 0 may have a name of its own on that network.
pub fn wanted(
    step: &Step,
    command: &[String],
    environment: &Environment,
    settings: &Settings,
    rank0: &Rank0,
) -> Vec<String> {
    if shape(settings, command, step.pty, step.terminal, step.one_task_on_each_node()) == Shape::Shell {
        return Vec::new();
    }
    let marks = Marks::of(environment);
    match choose(step, environment, settings, rank0, &marks) {
        Ok(choice) => match &settings.iface {
            Some(iface) if choice.origin == Origin::Step => vec![format!("{}-{iface}", choice.host), choice.host],
            _ => vec![choice.host],
        },
        Err(_) => Vec::new(),
    }
}

/// Rank 0's node: what srun said, else the step's first node, which holds rank 0
/// under every distribution but an arbitrary one. Rank 0 sees whether it does.
fn rank0_node(step: &Step, rank0: &Rank0) -> Result<String, RendezvousError> {
    if let Some(host) = &rank0.host {
        return Ok(host.clone());
    }
    // All ranks refuse alike here: one that started would wait for the others.
    let unknown = |why| RendezvousError::UnknownRank0 { why };
    if step.arbitrary && step.nodes() > 1 {
        return Err(unknown("the layout is arbitrary and srun could not ask Slurm for it"));
    }
    let first = first_node(step).ok_or_else(|| unknown("the step's node list is empty"))?;
    if step.rank == 0 && first != step.node {
        return Err(RendezvousError::Elsewhere { node: step.node.clone(), host: first });
    }
    if step.het && step.components.is_empty() && !counts_as_listed(step) {
        return Err(unknown("the step's programs stand on its nodes in another order than Slurm lists them"));
    }
    Ok(first)
}

/// Whether this node's index in the step is its place in the list.
fn counts_as_listed(step: &Step) -> bool {
    let hosts = hostlist::expand(&step.node_list).unwrap_or_default();
    hosts.iter().position(|host| *host == step.node) == Some(step.node_rank as usize)
}

/// The step's first node, the same seen from every rank. A combined het step
/// counts its nodes from its first component on, its list is sorted.
fn first_node(step: &Step) -> Option<String> {
    if step.components.is_empty() {
        return hostlist::first(&step.node_list).ok();
    }
    let nodes = hostlist::expand(&step.node_list).ok()?;
    let of_components = step.components.iter().flat_map(|list| hostlist::expand(list).unwrap_or_default());
    let first = of_components.into_iter().find(|node| nodes.contains(node));
    first.or_else(|| nodes.first().cloned())
}

/// Rank 0's node where it is certain.
fn certain_rank0(step: &Step, rank0: &Rank0) -> Option<String> {
    match &rank0.host {
        Some(host) => Some(host.clone()),
        None if step.rank == 0 => Some(step.node.clone()),
        None if step.arbitrary || step.het => None,
        None => first_node(step),
    }
}

fn choose(
    step: &Step,
    environment: &Environment,
    settings: &Settings,
    rank0: &Rank0,
    marks: &Marks,
) -> Result<Choice, RendezvousError> {
    if let Some((host, origin)) = given_host(settings, environment) {
        let why = match origin {
            Origin::Option => "master=",
            Origin::Site => "master of the site file",
            _ => "yours, kept",
        };
        return Ok(Choice { host, origin, why });
    }
    if marks.of_this_step(environment, step, "MASTER_ADDR")
        && let Some(host) = environment.get("MASTER_ADDR")
    {
        return Ok(Choice { host: host.into(), origin: Origin::Step, why: "as set when this step started" });
    }
    let mut host = rank0_node(step, rank0)?;
    let mut choice = Choice { host: String::new(), origin: Origin::Step, why: "the host of global rank 0" };
    if let Some(suffix) = &settings.suffix {
        host.push_str(suffix);
        choice.origin = origin(settings, "suffix");
        choice.why = match choice.origin {
            Origin::Site => "the host of global rank 0, with suffix of the site file",
            _ => "the host of global rank 0, with suffix=",
        };
    }
    choice.host = host;
    Ok(choice)
}

pub(super) fn decide(
    plan: &mut Plan,
    facts: &Facts,
    settings: &Settings,
    marks: &Marks,
) -> Result<(), RendezvousError> {
    if plan.step.shape == Shape::Shell {
        for name in ["MASTER_ADDR", "MASTER_PORT"] {
            if marks.ours(facts.environment, name) {
                plan.unset(name, "of the step this shell was started from");
            }
        }
        return Ok(());
    }
    tell_passed_over(plan, facts, settings, marks);
    let (host, origin, why) = settle_host(facts, settings, marks)?;
    if let Resolution::Silent(why) = facts.resolution {
        let message = format!("whether {host} resolves on {} is unknown: {why}", looked_up_on(facts));
        plan.warn("name-not-checked", message, "if the ranks do not meet, look at that node's resolver");
    }
    plan.step.master_addr = Some(host.clone());
    plan.set("MASTER_ADDR", host, origin, why);
    settle_port(plan, facts, settings, marks)
}

fn settle_host(facts: &Facts, settings: &Settings, marks: &Marks) -> Result<(String, Origin, String), RendezvousError> {
    let step = facts.step;
    let choice = choose(step, facts.users(), settings, facts.rank0, marks)?;
    if let Some((host, origin)) = given_host(settings, facts.users()) {
        let known = known_nodes(step);
        check_given_host(&host, origin, step.nodes(), certain_rank0(step, facts.rank0).as_deref(), &known)?;
        let here = step.node == choice.host || certain_rank0(step, facts.rank0).as_ref() == Some(&step.node);
        return match facts.resolution {
            Resolution::Failed(why) => Err(unresolvable(&host, origin, &looked_up_on(facts), why)),
            Resolution::Found(addresses) if step.nodes() > 1 && !here && addresses.iter().all(IpAddr::is_loopback) => {
                let from = shown(origin, &host);
                Err(RendezvousError::LoopbackName { from, node: looked_up_on(facts), cure: cure(origin) })
            }
            _ => Ok((host, origin, choice.why.into())),
        };
    }
    if let Some(host) = facts.rank0.host.as_ref().filter(|host| step.rank == 0 && **host != step.node) {
        return Err(RendezvousError::Elsewhere { node: step.node.clone(), host: host.clone() });
    }
    if let Some(iface) = &settings.iface {
        return on_interface(facts, iface, origin(settings, "iface"), &choice.host);
    }
    let fallback = |why: &str| -> Result<(String, Origin, String), RendezvousError> {
        if let (Some(address), None) = (&facts.rank0.address, &settings.suffix) {
            let reason = format!(
                "Slurm's address of rank 0's host {}, since the name {why} on {}",
                choice.host,
                looked_up_on(facts)
            );
            return Ok((address.clone(), Origin::Step, reason));
        }
        if step.nodes() == 1 && settings.suffix.is_none() {
            let reason = format!("one node only, and its name {} {why}", choice.host);
            return Ok(("127.0.0.1".into(), Origin::Step, reason));
        }
        if settings.suffix.is_some() {
            return Err(RendezvousError::Unresolvable {
                from: format!("suffix={}: {}", settings.suffix.as_deref().unwrap_or_default(), choice.host),
                node: looked_up_on(facts),
                why: why.into(),
                cure: match choice.origin {
                    Origin::Site => "have the cluster's admins take suffix out of the site file",
                    _ => "leave out suffix=",
                },
            });
        }
        Err(RendezvousError::NoAddress { host: choice.host.clone(), node: looked_up_on(facts), why: why.into() })
    };
    match facts.resolution {
        Resolution::Failed(why) => fallback(&format!("does not resolve ({why})")),
        // Debian's installer maps a host's own name to 127.0.1.1. On rank 0's own
        // node that does no harm; on another it would be the wrong machine.
        Resolution::Found(addresses)
            if step.nodes() > 1 && addresses.iter().all(IpAddr::is_loopback) && step.node != choice.host =>
        {
            fallback("resolves to a loopback address")
        }
        Resolution::Silent(why) if facts.rank0.address.is_some() => fallback(&format!("gets no answer ({why})")),
        _ => Ok((choice.host, choice.origin, choice.why.into())),
    }
}

/// Whose resolver was asked: a container has an /etc of its own.
fn looked_up_on(facts: &Facts) -> String {
    match facts.task.container {
        Container::Inside => format!("{} (in its container)", facts.step.node),
        _ => facts.step.node.clone(),
    }
}

/// Names that are certainly hosts of this job.
fn known_nodes(step: &Step) -> Vec<String> {
    let lists = [Some(step.node_list.as_str()), step.job_node_list.as_deref()];
    lists.into_iter().flatten().flat_map(|list| hostlist::expand(list).unwrap_or_default()).collect()
}

/// Rank 0's address in the network of `iface`, found without asking rank 0: the
/// one of its resolved addresses, or else Slurm's, that this node's `iface`
/// reaches.
fn on_interface(
    facts: &Facts,
    iface: &str,
    origin: Origin,
    host: &str,
) -> Result<(String, Origin, String), RendezvousError> {
    let node = &facts.step.node;
    let own: Vec<_> = facts.interfaces.iter().filter(|interface| interface.name == iface).collect();
    let why = format!("iface=: rank 0's address on the network of {iface}");
    if facts.interfaces.is_empty() {
        // A plan for another machine: its interfaces are not to be seen here.
        return Ok((host.to_string(), origin, format!("{why}, known on the nodes only")));
    }
    if own.is_empty() {
        let mut has: Vec<&str> = facts.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        has.sort_unstable();
        has.dedup();
        let iface = if origin == Origin::Site { format!("{iface} of the site file") } else { iface.into() };
        return Err(RendezvousError::NoInterface { iface, node: node.clone(), has: has.join(", ") });
    }
    // Link-local addresses are the same network everywhere and need a zone.
    let several = facts.step.nodes() > 1;
    let usable = |address: &IpAddr| match address {
        _ if several && address.is_loopback() => false,
        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        IpAddr::V4(v4) => !v4.is_link_local(),
    };
    if node == host
        && let Some(interface) = own.iter().find(|interface| usable(&interface.address))
    {
        return Ok((interface.address.to_string(), origin, why));
    }
    let resolved: &[IpAddr] = match facts.resolution {
        Resolution::Found(addresses) => addresses,
        _ => &[],
    };
    let of_slurm = facts.rank0.address.as_ref().and_then(|address| address.parse().ok());
    let reached = resolved.iter().copied().chain(of_slurm).find(|candidate| {
        usable(candidate) && own.iter().any(|interface| usable(&interface.address) && interface.reaches(*candidate))
    });
    match reached {
        Some(address) => Ok((address.to_string(), origin, why)),
        None => Err(RendezvousError::NotOnNetwork {
            iface: iface.into(),
            host: host.into(),
            node: node.clone(),
            network: own.iter().map(|i| format!("{}/{}", i.address, i.prefix)).collect::<Vec<_>>().join(", "),
        }),
    }
}

/// The ports to try in this order, who chose them, and why.
fn ports(facts: &Facts, settings: &Settings, marks: &Marks) -> Result<(Vec<u16>, Origin, String), RendezvousError> {
    let step = facts.step;
    if let Some(port) = given_port(settings, facts.users())? {
        return Ok((vec![port], Origin::User, "yours, kept".to_string()));
    }
    if let Some(port) = settings.port {
        return Ok((vec![port], origin(settings, "port"), named(settings, "port")));
    }
    let of_this_step = marks.of_this_step(facts.users(), step, "MASTER_PORT");
    let kept = facts.users().get("MASTER_PORT").and_then(|port| port.parse().ok());
    if let Some(port) = kept.filter(|_| of_this_step) {
        return Ok((vec![port], Origin::Step, "as set when this step started".to_string()));
    }
    let range = settings.ports.unwrap_or(DEFAULT_PORTS);
    let origin = if settings.ports.is_some() { origin(settings, "ports") } else { Origin::Step };
    let why = match range.len() - 1 {
        0 => format!("the only one of {range}"),
        others => format!("from job and step id, in {range}: the job's next {others} steps have others"),
    };
    Ok((sequence(step.job_id, step.step_id, range), origin, why))
}

/// Where rank 0 is to be met, also where there is no plan: host and ports.
pub(super) fn place(facts: &Facts, settings: &Settings) -> Place {
    let marks = Marks::of(facts.environment);
    let host = settle_host(facts, settings, &marks).map(|(host, ..)| host);
    let chosen = choose(facts.step, facts.users(), settings, facts.rank0, &marks);
    let (ports, named) = match ports(facts, settings, &marks) {
        Ok((ports, origin, _)) => {
            let named = ports.len() == 1 && (origin != Origin::Step || settings.port.is_some());
            (ports, named)
        }
        Err(_) => (Vec::new(), false),
    };
    let own = sequence(facts.step.job_id, facts.step.step_id, settings.ports.unwrap_or(DEFAULT_PORTS));
    let given = given_host(settings, facts.users()).is_some();
    Place {
        host: host.ok(),
        chosen: chosen.ok().map(|choice| choice.host),
        ports,
        named,
        own,
        given,
        rank0: rank0_node(facts.step, facts.rank0).ok(),
    }
}

/// See [`place`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// MASTER_ADDR, where it can be used from this node.
    pub host: Option<String>,
    /// The name it is chosen by.
    pub chosen: Option<String>,
    /// The ports.
    pub ports: Vec<u16>,
    /// Whether somebody named the port: there is no other.
    pub named: bool,
    /// Those that would be taken if nobody had.
    pub own: Vec<u16>,
    /// Whether somebody named the host.
    pub given: bool,
    /// Rank 0's node.
    pub rank0: Option<String>,
}

fn settle_port(plan: &mut Plan, facts: &Facts, settings: &Settings, marks: &Marks) -> Result<(), RendezvousError> {
    let (mut ports, origin, mut why) = ports(facts, settings, marks)?;
    if let Some(settled) = facts.port
        && let Some(place) = ports.iter().position(|port| *port == settled).filter(|place| *place > 0)
    {
        why = format!("the step's port {} is taken on rank 0's node: the next one that is free", list(&ports[..place]));
        ports.rotate_left(place);
    }
    let port = ports.first().copied().unwrap_or(DEFAULT_PORTS.low);
    if let Some((low, high)) = facts.node.ephemeral_ports
        && (low..=high).contains(&port)
    {
        plan.warn(
            "port-range",
            format!("MASTER_PORT={port} lies in the kernel's range for outgoing connections ({low}-{high}), so it may be taken when rank 0 wants it"),
            "choose ports below it with ports=LOW-HIGH",
        );
    }
    plan.step.master_port = Some(port);
    plan.step.ports = ports;
    plan.set("MASTER_PORT", port.to_string(), origin, why);
    Ok(())
}

fn list(ports: &[u16]) -> String {
    ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
}

/// The ports of a step, the same on every node without asking anybody.
///
/// Not a random hash but a lattice: job, step and position each advance by a
/// stride that has no factor in common with the size of the range. So within a
/// range of n ports the steps of one job differ as long as there are at most n,
/// and so do two jobs less than n job ids apart. Derivations by modulo of a
/// round number or by last digits do not have that property
/// (<https://github.com/awslabs/awsome-distributed-ai/pull/1172>).
pub fn sequence(job_id: u32, step_id: u32, range: PortRange) -> Vec<u16> {
    let n = u64::from(range.len());
    let (job_stride, step_stride, next_stride) =
        (coprime_near(n, 0.6180), coprime_near(n, 0.3247), coprime_near(n, 0.7549));
    let start = u64::from(job_id) * job_stride + u64::from(step_id) * step_stride;
    (0..u64::from(SEQUENCE).min(n))
        .map(|position| {
            let offset = (start % n + position * next_stride) % n;
            range.low + u16::try_from(offset).unwrap_or(0)
        })
        .collect()
}

/// The number nearest to `share * n` from above that has no factor in common with n.
fn coprime_near(n: u64, share: f64) -> u64 {
    fn gcd(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    let start = ((n as f64 * share) as u64).max(1);
    (start..).find(|candidate| gcd(*candidate, n) == 1).unwrap_or(1)
}
