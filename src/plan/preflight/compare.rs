//! What must be equal on all nodes, and what of it differs. A message names the few
//! that differ against the many; where neither are the many it names both.

mod groups;
mod slow;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::report::{HASHED, NodeReport, OF_NODE, Port, clock_offset};
use crate::config::printable;
use crate::plan::checks::{Findings, Phase, Rule, elsewhere};
use crate::plan::{Severity, Warning};
use crate::report::is_secret;
use groups::{Groups, words};

/// A check between nodes.
const fn between(id: &'static str, severity: Severity, looks_for: &'static str) -> Rule {
    elsewhere(id, Phase::Between, severity, looks_for)
}

/// The checks that look at the reports.
pub const RULES: &[Rule] = &[
    between("nodes-plugin", Severity::Error, "nodes with other versions of this plugin"),
    between(
        "nodes-plan",
        Severity::Error,
        "nodes that decided something else for the whole step, such as its ranks or ports; other variables are a warning",
    ),
    between(
        "nodes-gpus",
        Severity::Error,
        "nodes with fewer GPUs than the others and so too few for their ranks; another model or driver is a warning",
    ),
    between(
        "nodes-hcas",
        Severity::Error,
        "nodes that NCCL reaches by another kind of network; fewer network cards than the others are a warning",
    ),
    between("nodes-rates", Severity::Warning, "network cards that run slower than those of the other nodes"),
    between("nodes-mtu", Severity::Warning, "network devices that take smaller packets than those of the other nodes"),
    between("nodes-clock", Severity::Warning, "nodes whose clock is more than a second away from the others'"),
    between("nodes-limits", Severity::Warning, "nodes with lower limits of locked memory or open files"),
    between("nodes-shm", Severity::Warning, "nodes with a smaller /dev/shm, or one that is filled"),
    between(
        "nodes-env",
        Severity::Error,
        "variables that NCCL and others read and that somebody has set differently on the nodes",
    ),
    between(
        "nodes-slow",
        Severity::Warning,
        "nodes that are slow: CPU time that others take, heat, low clocks, narrow links",
    ),
];

type Look = fn(&Nodes, &mut Findings);

/// What each of them does.
const LOOKS: &[(&str, Look)] = &[
    ("nodes-plugin", plugin),
    ("nodes-plan", plan),
    ("nodes-env", env),
    ("nodes-gpus", gpus),
    ("nodes-hcas", hcas),
    ("nodes-rates", rates),
    ("nodes-mtu", mtu),
    ("nodes-limits", limits),
    ("nodes-shm", shm),
    ("nodes-clock", clock),
    ("nodes-slow", slow::slow),
];

/// Looked at whatever the command is.
const ALWAYS: [&str; 2] = ["nodes-plugin", "nodes-plan"];

/// What the reports, of one node each and in any order, have against a start. As severe
/// as the checks say: what the settings make of it is `checks::judge`'s.
pub fn compare(reports: &[NodeReport]) -> Vec<Warning> {
    let nodes = Nodes::of(reports);
    let mut found = Vec::new();
    let only_look = !reports.is_empty() && reports.iter().all(|report| report.only_looks);
    for (id, look) in LOOKS.iter().filter(|(id, _)| !only_look || ALWAYS.contains(id)) {
        let mut findings = Findings::of(id);
        look(&nodes, &mut findings);
        found.extend(findings.into_list());
    }
    found
}

/// The reports in the order of the nodes.
struct Nodes<'a>(Vec<&'a NodeReport>);

impl<'a> Nodes<'a> {
    fn of(reports: &'a [NodeReport]) -> Nodes<'a> {
        let mut nodes: Vec<&NodeReport> = reports.iter().collect();
        nodes.sort_by(|one, other| (one.node_rank, &one.node).cmp(&(other.node_rank, &other.node)));
        Nodes(nodes)
    }

    fn all(&self) -> impl Iterator<Item = (usize, &'a NodeReport)> {
        self.0.iter().copied().enumerate()
    }

    fn name(&self, place: usize) -> String {
        match self.0.get(place) {
            Some(report) if !report.node.is_empty() => printable(&report.node),
            _ => format!("node {place}"),
        }
    }

    /// Groups those nodes of which the value is known.
    fn by<V: Ord>(&self, value: impl Fn(&'a NodeReport) -> Option<V>) -> Groups<V> {
        Groups::of(self.all().filter_map(|(place, report)| Some((place, value(report)?))))
    }

    /// "n7 has A, the other 15 have B"
    fn differ<V: Ord>(&self, groups: &Groups<V>, say: impl Fn(&V, bool) -> String) -> String {
        groups.sentence(|place| self.name(place), say)
    }

    /// Whether NCCL will run: every node has GPUs.
    fn have_gpus(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|report| report.gpus.is_some_and(|gpus| gpus > 0))
    }
}

fn have(many: bool) -> &'static str {
    if many { "have" } else { "has" }
}

/// The middle one of some values; of two middle ones the higher one or the lower one.
fn middle<V: Ord + Copy>(values: &[V], higher: bool) -> Option<V> {
    let mut values = values.to_vec();
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    values.get(if higher { values.len() / 2 } else { last / 2 }).copied()
}

/// Versions decide differently, and may not understand each other.
fn plugin(nodes: &Nodes, findings: &mut Findings) {
    let groups = nodes.by(|report| Some((report.version.as_str(), report.protocol)));
    if groups.alike() {
        return;
    }
    let say = |(version, _): &(&str, u32), many: bool| {
        let version = if version.is_empty() { "an unknown one".into() } else { printable(version) };
        format!("{} {version}", have(many))
    };
    let message = format!("the nodes have different versions of palingenesis: {}", nodes.differ(&groups, say));
    findings.error(message, "tell the cluster's admins: all nodes need the same version");
}

/// Without these the ranks wait for ranks that never come.
const CERTAIN_OF_PLAN: [&str; 5] = ["nodes", "number of nodes", "world size", "launch shape", "MASTER_PORT"];

/// A name that one node cannot look up is replaced there by its address.
const OFTEN_FINE: [&str; 1] = ["MASTER_ADDR"];

/// So many keys are told one by one.
const MOST_KEYS: usize = 6;

fn plan(nodes: &Nodes, findings: &mut Findings) {
    let cure = "tell the cluster's admins: the site file or the machine differs there; \
                palingenesis explain shows on a node what is decided and why";
    unlike(
        nodes,
        |report| &report.step,
        false,
        |key, message| {
            if OFTEN_FINE.contains(&key) {
                findings.inform(message, "look at /etc/hosts and DNS of the nodes if the ranks do not meet");
            } else if CERTAIN_OF_PLAN.contains(&key) {
                findings.error(message, cure);
            } else {
                findings.warn(message, cure);
            }
        },
    );
}

/// NCCL's ranks send each other what the other side does not expect
/// (<https://github.com/NVIDIA/nccl/issues/626>: "message truncated").
const CERTAIN_OF_ENV: [&str; 4] = ["NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NET"];

fn env(nodes: &Nodes, findings: &mut Findings) {
    let nccl_runs = nodes.have_gpus();
    let cure = "set it alike everywhere: look at /etc/nccl.conf and the container's image on these nodes";
    unlike(
        nodes,
        |report| &report.env,
        true,
        |key, message| match CERTAIN_OF_ENV.contains(&key) && nccl_runs {
            true => findings.error(format!("{message}: NCCL's ranks would not understand each other"), cure),
            false => findings.warn(message, cure),
        },
    );
}

/// Tells each key whose values differ. Nodes with the same hash have the same plan, so
/// one of them is looked at; of a variable that one node set and another one's user
/// set the check of users' variables speaks.
fn unlike(
    nodes: &Nodes,
    of: impl Fn(&NodeReport) -> &BTreeMap<String, String>,
    users: bool,
    mut tell: impl FnMut(&str, String),
) {
    let hashes = nodes.by(|report| Some(report.hash.as_str()));
    if hashes.alike() {
        return;
    }
    // A plan that is equal to another node's is not sent with the report.
    let told = |report: &&NodeReport| !report.step.is_empty() || !report.env.is_empty();
    let mut plans: Vec<(&NodeReport, &[usize])> = Vec::new();
    let mut unknown: Vec<usize> = Vec::new();
    for (_, places) in hashes.iter() {
        match places.iter().map(|place| nodes.0[*place]).find(told) {
            Some(plan) => plans.push((plan, places)),
            None => unknown.extend(places),
        }
    }
    if !unknown.is_empty() && !users {
        unknown.sort_unstable();
        let who = groups::listed(&unknown, |place| nodes.name(place));
        tell("", format!("{who} decided something else for the step and did not say what"));
    }
    let keys: BTreeSet<&String> = plans.iter().flat_map(|(plan, _)| of(plan).keys()).collect();
    let other = |plan: &NodeReport, key: &str| plan.env.get(key).or_else(|| plan.step.get(key)).cloned();
    let mut more = Vec::new();
    let mut number = 0;
    for key in keys {
        if !users && plans.iter().any(|(plan, _)| plan.env.contains_key(key)) {
            continue;
        }
        // Meant to differ.
        if plans.iter().any(|(plan, _)| plan.step.get(key).is_some_and(|value| value == OF_NODE)) {
            continue;
        }
        let values = plans.iter().flat_map(|(plan, places)| {
            let value = other(plan, key);
            places.iter().map(move |place| (*place, value.clone()))
        });
        let groups = Groups::of(values);
        if groups.alike() {
            continue;
        }
        number += 1;
        if number > MOST_KEYS {
            more.push(printable(key));
            continue;
        }
        let say = |value: &Option<String>, many: bool| format!("{} {}", have(many), shown(key, value.as_deref()));
        tell(key, format!("{} differs between the nodes: {}", printable(key), nodes.differ(&groups, say)));
    }
    if let Some(first) = more.first() {
        let message = format!("{} differ between the nodes too", words(&more[..more.len().min(MOST_KEYS)], more.len()));
        let message = if more.len() == 1 { format!("{first} differs between the nodes too") } else { message };
        tell("", message);
    }
}

fn shown(name: &str, value: Option<&str>) -> String {
    match value {
        None => "none".into(),
        Some("") => "an empty one".into(),
        Some(value) if is_secret(name) || value.starts_with(HASHED) => {
            format!("a value that is not shown ({})", printable(value))
        }
        Some(value) => printable(value),
    }
}

/// <https://github.com/maccallumlab/meld/issues/114>: a node with fewer devices goes
/// another way, and the others wait for it.
fn gpus(nodes: &Nodes, findings: &mut Findings) {
    // Nodes with more tasks were given more GPUs.
    let tasks: BTreeSet<u32> = nodes.0.iter().map(|report| report.tasks).collect();
    let mut by_tasks: BTreeMap<u32, Vec<(usize, u32)>> = tasks.into_iter().map(|tasks| (tasks, Vec::new())).collect();
    for (place, report) in nodes.all() {
        if let (Some(gpus), Some(list)) = (report.gpus, by_tasks.get_mut(&report.tasks)) {
            list.push((place, gpus));
        }
    }
    for (tasks, seen) in by_tasks {
        let most = seen.iter().map(|(_, gpus)| *gpus).max().unwrap_or(0);
        let least = seen.iter().map(|(_, gpus)| *gpus).min().unwrap_or(0);
        let agent = seen.iter().any(|(place, _)| nodes.0[*place].agent);
        let groups = Groups::of(seen.into_iter());
        if groups.alike() {
            continue;
        }
        let say = |gpus: &u32, many: bool| {
            let verb = if many { "show" } else { "shows" };
            format!("{verb} {gpus} GPU{}", if *gpus == 1 { "" } else { "s" })
        };
        let message = nodes.differ(&groups, say);
        let cure = "leave those nodes out with --exclude=NODE and tell the cluster's admins";
        // A step on CPUs may have nodes with and without GPUs.
        let on_gpus = least > 0 || nodes.0.iter().any(|report| report.gpus_given);
        if agent && on_gpus {
            findings.error(format!("{message}: the launchers would start unlike numbers of ranks"), cure);
        } else if least < tasks && tasks <= most && on_gpus {
            let what = if least == 0 { "ranks would find no GPU" } else { "ranks would have to share a GPU" };
            findings.error(format!("{message}, for {tasks} on each node: {what}"), cure);
        } else {
            findings.warn(message, cure);
        }
    }
    let with_gpus = |report: &NodeReport| report.gpus.is_some_and(|gpus| gpus > 0);
    let models = nodes.by(|report| Some(report.models.join(" and ")).filter(|models| !models.is_empty()));
    if !models.alike() {
        let message = nodes.differ(&models, |model, many| format!("{} {}", have(many), printable(model)));
        findings.warn(
            format!("different GPUs: {message}"),
            "all ranks wait for the slowest; choose one kind with --constraint or --gres=gpu:TYPE:N",
        );
    }
    let drivers = nodes.by(|report| report.driver.as_deref().filter(|_| with_gpus(report)));
    if !drivers.alike() {
        let message = nodes.differ(&drivers, |driver, many| format!("{} driver {}", have(many), printable(driver)));
        findings.warn(
            message,
            "tell the cluster's admins; if NCCL fails on those nodes, leave them out with --exclude=NODE",
        );
    }
}

/// By what NCCL will reach a node, as far as can be seen.
fn network(report: &NodeReport) -> Option<Network> {
    if report.rdma_off {
        return Some(Network::Sockets);
    }
    let used = report.ports.as_deref()?.iter().filter(|port| port.used());
    let ethernet: BTreeSet<bool> = used.map(|port| port.ethernet).collect();
    Some(match (ethernet.contains(&false), ethernet.contains(&true)) {
        (true, true) => Network::Both,
        (true, false) => Network::InfiniBand,
        (false, true) => Network::Roce,
        (false, false) => Network::Sockets,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Network {
    Sockets,
    InfiniBand,
    Roce,
    Both,
}

impl Network {
    fn name(self) -> &'static str {
        match self {
            Network::Sockets => "no RDMA port that NCCL can use",
            Network::InfiniBand => "InfiniBand",
            Network::Roce => "RoCE",
            Network::Both => "InfiniBand and RoCE",
        }
    }

    /// Whether nodes of the two kinds can talk at all.
    fn meets(self, other: Network) -> bool {
        self == other
            || (self != Network::Sockets && other != Network::Sockets && [self, other].contains(&Network::Both))
    }
}

/// <https://github.com/NVIDIA/nccl/issues/2428>: the channels of a card that one side
/// alone has wait for ever; NCCL_IGNORE_NET_MISMATCH=0 makes NCCL refuse instead.
fn hcas(nodes: &Nodes, findings: &mut Findings) {
    if !nodes.have_gpus() {
        return;
    }
    // Another network than NCCL's own was asked for.
    if nodes.0.iter().any(|report| report.net.as_deref().is_some_and(|net| !net.eq_ignore_ascii_case("ib"))) {
        return;
    }
    let networks = nodes.by(network);
    let apart = |one: &Network| networks.iter().any(|(other, _)| !one.meets(*other));
    let cure = "leave those nodes out with --exclude=NODE and tell the cluster's admins; \
                or NCCL_IB_DISABLE=1 on all nodes uses TCP, which is slow";
    if networks.iter().any(|(one, _)| apart(one)) {
        let why = |places: &[usize]| {
            let mut reasons = places.iter().filter_map(|place| lost(nodes.0[*place]));
            reasons.next().map(|reason| format!(" ({reason})")).unwrap_or_default()
        };
        let reasons: BTreeMap<Network, String> = networks.iter().map(|(net, places)| (*net, why(places))).collect();
        let say = |net: &Network, many: bool| {
            let reason = if *net == Network::Sockets { reasons.get(net).map_or("", String::as_str) } else { "" };
            format!("{} {}{reason}", have(many), net.name())
        };
        let message = format!("NCCL finds no way between the nodes: {}", nodes.differ(&networks, say));
        findings.error(message, cure);
        return;
    }
    let used = |report: &NodeReport| report.ports.as_ref().map(|ports| ports.iter().filter(|port| port.used()).count());
    let counts = nodes.by(|report| used(report).filter(|_| !report.rdma_off));
    if counts.alike() {
        return;
    }
    let most = counts.iter().map(|(count, _)| *count).max().unwrap_or(0);
    let mut reasons = nodes.0.iter().filter(|report| used(report).is_some_and(|used| used < most));
    let reason = reasons.find_map(|report| Some(format!(" ({} on {})", lost(report)?, printable(&report.node))));
    let say = |count: &usize, many: bool| format!("{} {count}", have(many));
    let message = format!(
        "NCCL takes unlike numbers of network cards: {}{}",
        nodes.differ(&counts, say),
        reason.unwrap_or_default()
    );
    if nodes.0.iter().any(|report| report.strict) {
        findings.error(format!("{message}, and NCCL_IGNORE_NET_MISMATCH=0 makes it refuse that"), cure);
    } else {
        let cure = "a hang in NCCL may follow: leave those nodes out with --exclude=NODE, or give NCCL_IB_HCA the cards \
                    that all nodes have";
        findings.warn(message, cure);
    }
}

/// Why a node has fewer cards than it might.
fn lost(report: &NodeReport) -> Option<String> {
    if report.rdma_off {
        return Some("NCCL_IB_DISABLE is set".into());
    }
    let ports = || report.ports.iter().flatten().filter(|port| port.chosen && !port.used());
    let of = |wanted: fn(&&Port) -> bool, what: &str| {
        let names: Vec<String> = ports().filter(wanted).map(|port| printable(&port.name)).collect();
        let shown = words(&names[..names.len().min(4)], names.len());
        (!names.is_empty()).then(|| format!("{shown} {} {what}", if names.len() > 1 { "are" } else { "is" }))
    };
    of(|port| port.hidden, "hidden from the ranks").or_else(|| of(|port| !port.active, "down"))
}

/// What a node's cards run at.
fn rates(nodes: &Nodes, findings: &mut Findings) {
    let slowest = |report: &NodeReport| {
        let ports = report.ports.iter().flatten().filter(|port| port.used());
        let rates = ports.filter_map(|port| Some((port.gbps?, port.name.clone())));
        rates.min()
    };
    let groups = nodes.by(|report| slowest(report).map(|(gbps, _)| gbps));
    if groups.alike() {
        return;
    }
    // Of one node the card is told, too.
    let card = |gbps: &u32| {
        let mut places = groups.iter().filter(|(rate, _)| *rate == gbps).flat_map(|(_, places)| places);
        places.next().and_then(|place| slowest(nodes.0[*place])).map(|(_, name)| printable(&name)).unwrap_or_default()
    };
    let most = groups.iter().map(|(gbps, _)| *gbps).max().unwrap_or(0);
    let say = |gbps: &u32, many: bool| match *gbps < most {
        true => format!("{} {gbps} Gb/s at {}", have(many), card(gbps)),
        false => format!("{} {gbps} Gb/s", have(many)),
    };
    findings.warn(
        format!("network cards run at different rates, the slowest of each node: {}", nodes.differ(&groups, say)),
        "all ranks wait for the slowest; tell the cluster's admins: a cable or a switch port may be bad",
    );
}

/// <https://github.com/NVIDIA/nccl/issues/1524>: since NCCL 2.20 unlike packet sizes of
/// RoCE end in errors of the cards.
fn mtu(nodes: &Nodes, findings: &mut Findings) {
    let roce = nodes.by(|report| {
        let ports = report.ports.iter().flatten().filter(|port| port.used());
        ports.filter_map(|port| port.mtu).min()
    });
    if !roce.alike() {
        let say = |mtu: &u32, many: bool| format!("{} {mtu}", have(many));
        findings.warn(
            format!(
                "RoCE packets carry unlike numbers of bytes, and NCCL from 2.20 on may fail or hang: {}",
                nodes.differ(&roce, say)
            ),
            "tell the cluster's admins: the cards' network devices need the same MTU",
        );
    }
    let sockets = nodes.by(|report| report.socket.as_ref().map(|socket| socket.mtu));
    if !sockets.alike() {
        let name = |mtu: &u32| {
            let mut devices = nodes.0.iter().filter_map(|report| report.socket.as_ref());
            devices.find(|device| device.mtu == *mtu).map(|device| printable(&device.name)).unwrap_or_default()
        };
        let say = |mtu: &u32, many: bool| format!("{} {mtu} ({})", have(many), name(mtu));
        findings.warn(
            format!(
                "the network devices that lead to rank 0 take packets of unlike sizes (MTU): {}",
                nodes.differ(&sockets, say)
            ),
            "large messages may vanish on the way; tell the cluster's admins",
        );
    }
}

/// A node whose time service works is within milliseconds: a second says that it does
/// not. Logs and failures of several nodes can then not be put in order, and what goes
/// by times of files, such as locks and caches, goes wrong.
const CLOCK: i128 = 1_000_000_000;

fn clock(nodes: &Nodes, findings: &mut Findings) {
    let offsets: Vec<(usize, i128, i128)> = nodes
        .all()
        .filter_map(|(place, report)| {
            let (asked, answered) = report.met?;
            let (offset, unsure) = clock_offset(report.clock?, asked, answered);
            Some((place, offset, i128::try_from(unsure).unwrap_or(i128::MAX)))
        })
        .collect();
    // The server's own clock may be the wrong one.
    let Some(middle) = middle(&offsets.iter().map(|(_, offset, _)| *offset).collect::<Vec<_>>(), false) else { return };
    let far = |(_, offset, unsure): &&(usize, i128, i128)| (offset - middle).abs().saturating_sub(*unsure) > CLOCK;
    let wrong: Vec<&(usize, i128, i128)> = offsets.iter().filter(far).collect();
    if wrong.is_empty() {
        return;
    }
    let shown = wrong.iter().take(8).map(|(place, offset, _)| {
        let offset = offset - middle;
        let tenths = offset.abs() / (CLOCK / 10);
        let way = if offset < 0 { "behind" } else { "ahead" };
        format!("{} is {}.{} s {way}", nodes.name(*place), tenths / 10, tenths % 10)
    });
    findings.warn(
        format!("the nodes' clocks differ: {}", words(&shown.collect::<Vec<_>>(), wrong.len())),
        "times in logs of these nodes cannot be compared; tell the cluster's admins (chronyc tracking)",
    );
}

fn limits(nodes: &Nodes, findings: &mut Findings) {
    let memlock = nodes.by(|report| report.memlock);
    if !memlock.alike() {
        let say = |limit: &u64, many: bool| format!("{} {}", have(many), bytes(*limit));
        findings.warn(
            format!("the limit of locked memory differs: {}", nodes.differ(&memlock, say)),
            "RDMA needs it unlimited: ask the cluster's admins for LimitMEMLOCK=infinity in slurmd's unit on those nodes",
        );
    }
    let files = nodes.by(|report| report.open_files);
    if !files.alike() {
        let say = |limit: &u64, many: bool| match *limit {
            u64::MAX => format!("{} no limit", have(many)),
            limit => format!("{} {limit}", have(many)),
        };
        findings.warn(
            format!("the limit of open files differs: {}", nodes.differ(&files, say)),
            "ask the cluster's admins for the same LimitNOFILE in slurmd's unit on all nodes",
        );
    }
}

fn bytes(number: u64) -> String {
    match number {
        u64::MAX => "no limit".into(),
        0..1024 => format!("{number} bytes"),
        1024..0x10_0000 => format!("{} KiB", number >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", number >> 20),
        _ => format!("{} GiB", number >> 30),
    }
}

/// Nodes differ a little: the kernel gives /dev/shm half of the memory.
fn shm(nodes: &Nodes, findings: &mut Findings) {
    let known: Vec<(usize, u64, u64)> = nodes
        .all()
        .filter_map(|(place, report)| report.shm.map(|(size, free)| (place, size, free.min(size))))
        .collect();
    let of = |value: fn(&(usize, u64, u64)) -> u64| middle(&known.iter().map(value).collect::<Vec<_>>(), true);
    let (Some(size), Some(free)) = (of(|known| known.1), of(|known| known.2)) else { return };
    let named = |few: &[&(usize, u64, u64)], value: fn(&(usize, u64, u64)) -> u64| {
        let shown = few.iter().take(8).map(|known| format!("{} {}", nodes.name(known.0), bytes(value(known))));
        words(&shown.collect::<Vec<_>>(), few.len())
    };
    let small: Vec<_> = known.iter().filter(|known| known.1 < size / 10 * 9).collect();
    if !small.is_empty() {
        findings.warn(
            format!("/dev/shm is small on some nodes: {}; on the others {}", named(&small, |known| known.1), bytes(size)),
            "NCCL and data loaders need it: give the container the same --shm-size everywhere, or tell the cluster's admins",
        );
    }
    let filled: Vec<_> = known.iter().filter(|known| known.1 >= size / 10 * 9 && known.2 < free / 2).collect();
    if !filled.is_empty() {
        findings.warn(
            format!(
                "/dev/shm is filled on some nodes, free are: {}; on the others {}",
                named(&filled, |known| known.2),
                bytes(free)
            ),
            "remove there what your earlier jobs left in /dev/shm, or tell the cluster's admins",
        );
    }
}
