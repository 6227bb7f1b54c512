//! What the nodes of a step bring to the pre-flight and what it comes to. Pure: how
//! they meet is `act::preflight`'s.

pub mod compare;
pub mod directories;
pub mod report;
pub mod texts;

use std::net::IpAddr;
use std::time::Duration;

use super::checks::{self, Phase, Rule};
use super::{Facts, Plan, Refusal, Severity, Shape, Warning, agent, launch, marks::Marks, rendezvous};
use crate::config::{Preflight, Settings};
use crate::facts::network::Resolution;
use crate::facts::task::Container;
use crate::facts::{Step, hostlist};

/// How long a node is waited for: rank 0's node cannot know what holds it.
const ARRIVAL: Duration = Duration::from_secs(600);

/// The same with a container: each node may import the image first.
const IMPORT: Duration = Duration::from_secs(1800);

/// A node that does not reach the next one.
pub const NODE_TO_NODE: &str = "node-to-node";
/// An endpoint that is no node's or several nodes'.
pub const ENDPOINT_HOST: &str = "endpoint-host";

/// The checks that are made where the nodes meet.
const RULES: &[Rule] = &[
    checks::elsewhere(
        NODE_TO_NODE,
        Phase::Between,
        Severity::Error,
        "a node that cannot connect to the next one of the step, as NCCL and gloo will",
    ),
    checks::elsewhere(
        ENDPOINT_HOST,
        Phase::Between,
        Severity::Error,
        "a launcher's endpoint of the command's own that is the address of no node of the step, or of several",
    ),
];

/// Every check between the nodes.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    [RULES, compare::RULES, directories::RULES].into_iter().flatten()
}

/// Whether the nodes of this step meet before the ranks start. `settings` are those
/// with the site file's.
pub fn wanted(facts: &Facts, settings: &Settings) -> bool {
    settings.preflight != Preflight::Off && facts.step.nodes() > 1 && shape(facts, settings) != Shape::Shell
}

/// Whether the one node of this step has something to do before its ranks start.
pub fn alone(facts: &Facts, settings: &Settings) -> bool {
    let asked = settings.warm.is_some() || settings.output.is_some() || settings.cache.is_some();
    asked && settings.preflight != Preflight::Off && facts.step.nodes() == 1 && shape(facts, settings) != Shape::Shell
}

fn shape(facts: &Facts, settings: &Settings) -> Shape {
    let step = facts.step;
    launch::shape(settings, facts.command, step.pty, step.terminal, step.one_task_on_each_node())
}

/// How long a node is waited for.
pub fn arrival(settings: &Settings, container: Container) -> Duration {
    match (settings.timeout, container) {
        (Some(seconds), _) => Duration::from_secs(seconds.into()),
        (None, Container::None) => ARRIVAL,
        (None, _) => IMPORT,
    }
}

/// Where the nodes of a step meet, as this node knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeetingPlace {
    /// The step's nodes, rank 0's first, else as Slurm lists them.
    pub nodes: Vec<String>,
    /// This node's place among them.
    pub node_rank: u32,
    /// MASTER_ADDR.
    pub host: String,
    /// Rank 0's addresses, best first.
    pub addresses: Vec<IpAddr>,
    /// The ports to try.
    pub ports: Vec<u16>,
    /// The only one that will do, where somebody named it. Those after it are for
    /// telling that it is taken.
    pub named: Option<u16>,
}

/// Where the nodes of this step meet, also where this node has no plan: then so that
/// it can say so (`telling`), by whatever way leads there. `None` where nothing is
/// known, or two of the step's programs share a node.
pub fn meeting_place(facts: &Facts, settings: &Settings, telling: bool) -> Option<MeetingPlace> {
    let step = facts.step;
    let place = rendezvous::place(facts, settings);
    let rank0 = place.rank0?;
    let mut nodes = hostlist::expand(&step.node_list).ok()?;
    let first = nodes.iter().position(|node| *node == rank0)?;
    nodes[..=first].rotate_right(1);
    if shared(&nodes) {
        return None;
    }
    let node_rank = nodes.iter().position(|node| *node == step.node)?;
    let slurms = facts.rank0.address.as_ref().and_then(|address| address.parse::<IpAddr>().ok());
    let resolved: &[IpAddr] = match facts.resolution {
        Resolution::Found(addresses) => addresses,
        _ => &[],
    };
    let mut addresses: Vec<IpAddr> = match place.host.as_ref().map(|host| host.parse()) {
        Some(Ok(address)) => vec![address],
        _ => resolved.to_vec(),
    };
    // On another node rank 0's is never its own loopback.
    if node_rank > 0 {
        addresses.retain(|address| !address.is_loopback());
    }
    if telling || (addresses.is_empty() && !place.given) {
        addresses.extend(slurms.filter(|address| !addresses.contains(address)));
    }
    let (mut ports, mut named) = (place.ports, None);
    if place.named {
        named = ports.first().copied();
        ports.extend(place.own.into_iter().filter(|port| Some(*port) != named));
    } else if ports.is_empty() {
        ports = place.own;
    }
    let host = place.host.or(place.chosen).unwrap_or(rank0);
    Some(MeetingPlace { nodes, node_rank: u32::try_from(node_rank).ok()?, host, addresses, ports, named })
}

/// Whether two of a combined step's programs stand on one node.
fn shared(nodes: &[String]) -> bool {
    let mut sorted: Vec<&String> = nodes.iter().collect();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0] == pair[1])
}

/// The endpoint at which the launchers of this step meet, where that is not ours.
pub fn own_endpoint(facts: &Facts, plan: &Plan) -> Option<String> {
    (plan.step.shape == Shape::Agent).then(|| agent::own_endpoint(facts, &plan.step, &Marks::of(facts.environment)))?
}

/// The host of such an endpoint.
pub fn endpoint_host(endpoint: &str) -> &str {
    agent::host_of(endpoint)
}

/// What has been found between the nodes, as the settings take it: why no rank starts,
/// and what is told all the same.
pub fn verdict(found: Vec<Warning>, settings: &Settings) -> (Option<String>, Vec<Warning>) {
    let mut found = checks::judge(found, settings);
    if settings.preflight == Preflight::Warn {
        found.iter_mut().for_each(Warning::soften);
    }
    let (errors, rest): (Vec<Warning>, Vec<Warning>) =
        found.into_iter().partition(|warning| warning.severity == Severity::Error);
    ((!errors.is_empty()).then(|| Refusal::Checks(errors).to_string()), rest)
}

/// A finding of one of these checks.
pub fn error(id: &'static str, message: String, cure: String) -> Warning {
    Warning { id, severity: Severity::Error, message, cure }
}

/// Whether this rank leads its node.
pub fn leads(step: &Step) -> bool {
    step.local_rank == 0
}
