//! Checks of the node and the task on it: what names a device that is not there,
//! and what is too little for a training.

use std::fmt::Write;

use super::launch::gpus_of_the_task;
use super::version::{NCCL, Version};
use super::{Findings, From, Phase, Rule, Subject, Value};
use crate::config::{Fabric, Gid, Profile, nearest, printable};
use crate::facts::rdma::LinkLayer;
use crate::facts::{NetDevice, RdmaPort};
use crate::plan::catalog::nccl_integer;
use crate::plan::gids;
use crate::plan::netmatch::{Item, List, Port};
use crate::plan::{Severity, Shape};

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[
    node("ifname-missing", Severity::Error, "a list of interfaces that names none of this node", ifname_missing),
    node("ifname-prefix", Severity::Warning, "an interface's name that begins other interfaces' names", ifname_prefix),
    node("ifname-lo", Severity::Error, "a list that takes lo or a bridge for several nodes", ifname_lo),
    node("hca-missing", Severity::Warning, "RDMA devices that are not there or not active", hca_missing),
    node("hca-prefix", Severity::Warning, "an RDMA device's name that begins other devices' names", hca_prefix),
    node("hca-netdev", Severity::Warning, "an interface's name where an RDMA device's belongs", hca_netdev),
    node("hca-mixed", Severity::Warning, "chosen RDMA ports of different kinds or rates", hca_mixed),
    node("gid-on-ib", Severity::Info, "NCCL_IB_GID_INDEX on InfiniBand, where nobody reads it", gid_on_ib),
    node("gid-since-221", Severity::Error, "NCCL_IB_GID_INDEX, which NCCL finds itself since 2.21", gid_index),
    node("gid-none", Severity::Error, "gid=auto where no row is one that all chosen RoCE ports have", gid_none),
    node("ib-disabled", Severity::Warning, "NCCL_IB_DISABLE on nodes with RDMA", ib_disabled),
    node("ucx-dev", Severity::Warning, "UCX_NET_DEVICES with devices that are not there", ucx_devices),
    node("net-missing", Severity::Warning, "EFA without the plugin that NCCL needs for it", net_missing),
    node("cvd-order", Severity::Warning, "GPUs of several models, counted in another order than Slurm's", cvd_order),
    node("memlock", Severity::Warning, "too little lockable memory for RDMA", memlock),
    node("stack-unlimited", Severity::Warning, "no limit of the stack, which makes threads' stacks small", stack),
    node("nofile", Severity::Warning, "too few open files for many ranks", open_files),
    node("shm-size", Severity::Warning, "a /dev/shm too small for the node's ranks", shm_size),
    node("cpus", Severity::Warning, "a GPU's rank with one CPU", cpus),
    node("cpus-asked", Severity::Warning, "fewer CPUs than the job asked for each task", cpus_asked),
    node("cpu-bind-stale", Severity::Warning, "SLURM_CPU_BIND of the step that this one was started from", bind_stale),
    node("mnnvl-no-imex", Severity::Error, "NCCL_MNNVL_ENABLE=1 where multi-node NVLink cannot work", mnnvl),
    node("nvls-forced-off", Severity::Warning, "NCCL_NVLS_ENABLE against what the GPUs have", nvls),
];

const fn node(id: &'static str, severity: Severity, looks_for: &'static str, run: fn(&Subject, &mut Findings)) -> Rule {
    Rule::new(id, Phase::Node, severity, looks_for, run)
}

/// Checks whose errors are NCCL's.
pub(super) const OF_NCCL: [&str; 5] = ["ifname-missing", "ifname-lo", "gid-since-221", "gid-none", "mnnvl-no-imex"];

/// From here on a limit on locked memory is no matter for NCCL, which pins some
/// tens of megabytes for each peer.
pub const ENOUGH_LOCKED: u64 = 64 << 30;
/// What each rank's data loader and NCCL want of /dev/shm.
const SHM_OF_A_RANK: u64 = 1 << 30;
/// What container runtimes give when nobody asks for more.
const SHM_OF_DOCKER: u64 = 64 << 20;
/// Names NCCL itself takes last when nobody chooses (src/misc/socket.cc).
const NO_NETWORK: [&str; 3] = ["lo", "docker", "virbr"];

// ------------------------------------------------------------------ small things

/// The node's name for people.
fn here<'a>(subject: &Subject<'a>) -> &'a str {
    subject.step.map_or("this node", |step| step.node.as_str())
}

/// "a, b, c and 4 more".
fn listed(names: impl IntoIterator<Item = String>) -> String {
    const MOST: usize = 8;
    let mut names: Vec<String> = names.into_iter().map(|name| printable(&name)).collect();
    names.dedup();
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    let mut text = if names.is_empty() { "none".to_string() } else { names.join(", ") };
    if more > 0 {
        // Writing to a String cannot fail.
        let _ = write!(text, " and {more} more");
    }
    text
}

/// What may have been meant: near, and with the same numbers in it, since mlx5_1
/// for mlx5_9 would be a guess.
fn meant<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let numbers = |name: &str| name.chars().filter(char::is_ascii_digit).collect::<String>();
    let names = names.into_iter().filter(|name| numbers(name) == numbers(word));
    nearest(word, names).filter(|near| *near != word)
}

fn did_you_mean(near: Option<&str>) -> String {
    near.map(|near| format!("; did you mean {near}?")).unwrap_or_default()
}

/// What NCCL makes of an integer that somebody else than we has set.
fn integer(subject: &Subject, name: &str) -> Option<i64> {
    subject.given(name).filter(|value| !value.value.is_empty()).and_then(|value| Some(nccl_integer(&value.value)?.0))
}

/// Whether the node has GPUs, and the task was not given an empty list of them.
fn has_gpus(subject: &Subject) -> bool {
    subject.node.is_some_and(|node| !node.gpu_models.is_empty()) && gpus_of_the_task(subject) > 0
}

/// The ranks on this node, of which an agent starts several.
fn ranks_here(subject: &Subject) -> u64 {
    let tasks = u64::from(subject.tasks_on_a_node.unwrap_or(1));
    if subject.shape != Some(Shape::Agent) {
        return tasks;
    }
    let asked = subject.value("PET_NPROC_PER_NODE").and_then(|ranks| ranks.parse().ok());
    tasks.saturating_mul(asked.unwrap_or(u64::from(gpus_of_the_task(subject))).max(1))
}

fn in_units(bytes: u64) -> String {
    if bytes < 10 << 20 {
        format!("{} KiB", bytes >> 10)
    } else if bytes < 10 << 30 {
        format!("{} MiB", bytes >> 20)
    } else {
        format!("{} GiB", bytes >> 30)
    }
}

// ------------------------------------------------------------------ interfaces

/// The user's list for NCCL's sockets, and the node's devices. NCCL ignores a
/// value of one character.
fn sockets<'a>(subject: &Subject<'a>) -> Option<(&'a Value, List, &'a [NetDevice])> {
    let value = subject.given("NCCL_SOCKET_IFNAME").filter(|value| value.value.len() > 1)?;
    Some((value, List::parse(&value.value), subject.node?.netdevs.as_deref()?))
}

/// What to do first with a wrong value: a key has none to unset.
fn unset(value: &Value) -> &'static str {
    if matches!(value.from, From::Key(_)) { "" } else { "unset it, or " }
}

fn has(devices: &[NetDevice]) -> String {
    listed(devices.iter().filter(|device| device.up && device.name != "lo").map(|device| device.name.clone()))
}

fn ifname_missing(subject: &Subject, findings: &mut Findings) {
    if let Some((value, list, devices)) = sockets(subject)
        && !devices.iter().any(|device| device.up && list.selects(&device.name, None))
    {
        let down = devices.iter().filter(|device| !device.up && list.selects(&device.name, None));
        let down: Vec<String> = down.map(|device| device.name.clone()).collect();
        let what = match (down.is_empty(), list.excludes) {
            (false, _) => format!("only takes {}, which is down,", listed(down)),
            (true, false) => "names no network device".into(),
            (true, true) => "leaves no network device".into(),
        };
        let near = list.items.iter().find_map(|item| meant(&item.name, devices.iter().map(|d| d.name.as_str())));
        let message = format!(
            "{} {what} on {} (has {}): NCCL ends with \"no socket interface found\"",
            value.shown(),
            here(subject),
            has(devices)
        );
        let cure = match value.from {
            From::Key(_) => format!("name an interface that every node has, and the whole of it{}", did_you_mean(near)),
            _ => format!(
                "unset it, or name an interface that every node has; a beginning such as en is enough{}",
                did_you_mean(near)
            ),
        };
        // With NCCL_COMM_ID or a network plugin NCCL finds its interface otherwise,
        // and a program of one rank may never ask.
        let certain = subject.value("NCCL_COMM_ID").is_none()
            && integer(subject, "NCCL_OOB_NET_ENABLE").unwrap_or(0) == 0
            && match subject.shape {
                Some(Shape::Agent) => true,
                Some(Shape::Native | Shape::Worker) => subject.tasks.is_some_and(|tasks| tasks > 1),
                _ => false,
            };
        if certain { findings.error(message, cure) } else { findings.warn(message, cure) }
    }
    let Some(devices) = subject.node.and_then(|node| node.netdevs.as_deref()) else {
        return;
    };
    for name in ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"] {
        // What follows from iface= as NCCL's does was told above.
        let told = |value: &&Value| {
            matches!(value.from, From::Key(_)) && sockets(subject).is_some_and(|(nccl, ..)| nccl.from == value.from)
        };
        let Some(value) = subject.given(name).filter(|value| !told(value)) else {
            continue;
        };
        // Whole names, no signs.
        let missing: Vec<&str> = value
            .value
            .split(',')
            .filter(|item| !item.is_empty() && !item.starts_with(['^', '=']))
            .filter(|item| !devices.iter().any(|device| device.name == *item))
            .collect();
        if let Some(first) = missing.first() {
            let near = meant(first, devices.iter().map(|device| device.name.as_str()));
            findings.warn(
                format!(
                    "{}: {} has no {} (has {}); it takes whole names, no beginnings",
                    value.shown(),
                    here(subject),
                    listed(missing.iter().map(ToString::to_string)),
                    has(devices)
                ),
                format!("{}name an interface that every node has{}", unset(value), did_you_mean(near)),
            );
        }
    }
}

/// <https://github.com/NVIDIA/nccl/issues/177>
fn ifname_prefix(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, devices)) = sockets(subject) else {
        return;
    };
    if list.exact || !subject.several_nodes() {
        return;
    }
    for item in &list.items {
        if !devices.iter().any(|device| device.name == item.name) {
            continue;
        }
        let others = devices.iter().filter(|device| device.up && device.name != item.name);
        let others: Vec<String> =
            others.filter(|device| list.names(item, &device.name, None)).map(|device| device.name.clone()).collect();
        also_the_beginning(subject, findings, value, &list, item, others);
    }
}

/// Warns of an entry that names a device and is the beginning of `others`.
fn also_the_beginning(
    subject: &Subject,
    findings: &mut Findings,
    value: &Value,
    list: &List,
    item: &Item,
    others: Vec<String>,
) {
    if others.is_empty() {
        return;
    }
    findings.warn(
        format!(
            "{}: {} is the beginning of {} on {} too, which NCCL {} as well",
            value.shown(),
            printable(&item.name),
            listed(others),
            here(subject),
            if list.excludes { "leaves out" } else { "takes" }
        ),
        format!("for whole names write {}={}", value.name, exactly(list)),
    );
}

/// The list with whole names, to be written behind `NAME=`.
fn exactly(list: &List) -> String {
    let items = list.items.iter().map(|item| match &item.port {
        Port::Any => item.name.clone(),
        Port::Number(port) => format!("{}:{port}", item.name),
        Port::Odd(text) => format!("{}:{text}", item.name),
    });
    let items: Vec<String> = items.collect();
    printable(&format!("'{}={}'", if list.excludes { "^" } else { "" }, items.join(",")))
}

/// <https://github.com/horovod/horovod/pull/700>
fn ifname_lo(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, devices)) = sockets(subject).filter(|_| subject.several_nodes()) else {
        return;
    };
    let selected = devices.iter().filter(|device| device.up && list.selects(&device.name, None));
    let (inside, network): (Vec<&NetDevice>, Vec<&NetDevice>) =
        selected.partition(|device| device.name == "lo" || NO_NETWORK[1..].iter().any(|n| device.name.starts_with(n)));
    if inside.is_empty() {
        return;
    }
    let names = listed(inside.iter().map(|device| device.name.clone()));
    let message = format!(
        "{} takes {names} on {}, {} no other node can reach",
        value.shown(),
        here(subject),
        if inside.len() == 1 { "which" } else { "of which each is one that" }
    );
    let cure = match value.from {
        From::Key(_) => "name an interface that leads to the other nodes, or leave it out".into(),
        _ => format!(
            "unset it (NCCL keeps off lo and bridges by itself), or write NCCL_SOCKET_IFNAME='^{}'",
            NO_NETWORK.join(",")
        ),
    };
    let ranks = matches!(subject.shape, Some(Shape::Native | Shape::Worker | Shape::Agent));
    if network.is_empty() && ranks { findings.error(message, cure) } else { findings.warn(message, cure) }
}

// ------------------------------------------------------------------ RDMA devices

fn speaks_verbs(port: &RdmaPort) -> bool {
    port.active && port.link != LinkLayer::Other
}

fn is_efa(port: &RdmaPort) -> bool {
    port.driver.as_deref() == Some("efa")
}

fn rdma<'a>(subject: &Subject<'a>) -> Option<&'a [RdmaPort]> {
    subject.node?.rdma.as_deref().filter(|_| subject.several_nodes())
}

/// The user's list of RDMA devices, and the node's ports, where NCCL reads the
/// one and uses the other.
fn hcas<'a>(subject: &Subject<'a>) -> Option<(&'a Value, List, &'a [RdmaPort])> {
    let value = subject.given("NCCL_IB_HCA").filter(|value| !value.value.is_empty())?;
    let ports = rdma(subject)?;
    let socket = subject.value("NCCL_NET").is_some_and(|net| net.eq_ignore_ascii_case("socket"));
    let off = integer(subject, "NCCL_IB_DISABLE").unwrap_or(0) != 0;
    // With EFA another plugin does the work.
    (!socket && !off && !ports.iter().any(is_efa)).then(|| (value, List::parse(&value.value), ports))
}

fn selects(list: &List, port: &RdmaPort) -> bool {
    speaks_verbs(port) && list.selects(&port.device, Some(port.port.into()))
}

fn by_name(list: &List, item: &Item, port: &RdmaPort) -> bool {
    let whole = Item { name: item.name.clone(), port: Port::Any };
    list.names(&whole, &port.device, None)
}

/// An entry that is an interface and no RDMA device.
fn is_interface(subject: &Subject, list: &List, item: &Item, ports: &[RdmaPort]) -> bool {
    let devices = subject.node.and_then(|node| node.netdevs.as_deref()).unwrap_or_default();
    devices.iter().any(|device| device.name == item.name) && !ports.iter().any(|port| by_name(list, item, port))
}

fn port_names<'a>(ports: impl Iterator<Item = &'a RdmaPort>) -> String {
    listed(ports.map(|port| format!("{}:{}", port.device, port.port)))
}

fn hca_missing(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, ports)) = hcas(subject) else {
        return;
    };
    let node = here(subject);
    let nothing_left = !ports.iter().any(|port| selects(&list, port));
    let consequence = if nothing_left {
        "NCCL finds no RDMA port and goes over TCP, many times slower, without a word"
    } else if list.excludes {
        "nothing is left out by it"
    } else {
        "NCCL goes on without it"
    };
    let active = format!("active are {}", port_names(ports.iter().filter(|port| speaks_verbs(port))));
    let cure = "take the names that `ibstat -l` or /sys/class/infiniband has, the same on all nodes";
    let mut said = false;
    for item in &list.items {
        let text = match &item.port {
            Port::Any => item.name.clone(),
            Port::Number(port) => format!("{}:{port}", item.name),
            Port::Odd(port) => format!("{}:{port}", item.name),
        };
        let text = printable(&text);
        if let Port::Odd(_) = item.port {
            said = true;
            findings.warn(
                format!("{}: {text} does not end in a port's number", value.shown()),
                format!("write {}:1, or leave the port out for all ports of the device", printable(&item.name)),
            );
        } else if is_interface(subject, &list, item, ports) {
            said = true;
        } else if !ports.iter().any(|port| by_name(&list, item, port)) {
            said = true;
            let near = meant(&item.name, ports.iter().map(|port| port.device.as_str()));
            findings.warn(
                format!("{}: {text} matches no RDMA device of {node} ({active}): {consequence}", value.shown()),
                format!("{cure}{}", did_you_mean(near)),
            );
        } else if !list.excludes {
            let named = |port: &&RdmaPort| list.names(item, &port.device, Some(port.port.into()));
            if !ports.iter().filter(named).any(speaks_verbs) {
                said = true;
                findings.warn(
                    format!("{}: no port of {text} is active on {node} ({active}): {consequence}", value.shown()),
                    "leave it out, or have the link looked at: `ibstat` shows its state",
                );
            }
        }
    }
    if nothing_left && !said {
        findings
            .warn(format!("{} selects no active RDMA port of {node} ({active}): {consequence}", value.shown()), cure);
    }
}

fn hca_prefix(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, ports)) = hcas(subject).filter(|(_, list, _)| !list.exact) else {
        return;
    };
    for item in list.items.iter().filter(|item| ports.iter().any(|port| port.device == item.name)) {
        let others = ports.iter().filter(|port| port.device != item.name && speaks_verbs(port));
        let others: Vec<String> = others
            .filter(|port| list.names(item, &port.device, Some(port.port.into())))
            .map(|port| port.device.clone())
            .collect();
        also_the_beginning(subject, findings, value, &list, item, others);
    }
}

fn hca_netdev(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, ports)) = hcas(subject) else {
        return;
    };
    let interfaces = list.items.iter().filter(|item| is_interface(subject, &list, item, ports));
    let interfaces: Vec<String> = interfaces.map(|item| item.name.clone()).collect();
    if let [_, ..] = interfaces.as_slice() {
        let nothing = !ports.iter().any(|port| selects(&list, port));
        findings.warn(
            format!(
                "{}: {} is a network interface of {}, and NCCL looks for RDMA devices{}",
                value.shown(),
                listed(interfaces),
                here(subject),
                if nothing { ": it finds none and goes over TCP, many times slower" } else { "" }
            ),
            format!(
                "name RDMA devices (active are {}); interfaces belong in NCCL_SOCKET_IFNAME",
                port_names(ports.iter().filter(|port| speaks_verbs(port)))
            ),
        );
    }
}

fn hca_mixed(subject: &Subject, findings: &mut Findings) {
    let Some((value, list, ports)) = hcas(subject) else {
        return;
    };
    let selected: Vec<&RdmaPort> = ports.iter().filter(|port| selects(&list, port)).collect();
    let Some(first) = selected.first() else {
        return;
    };
    let kind = |port: &RdmaPort| match port.link {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::Other => "neither",
    };
    let unlike = |port: &&&RdmaPort| {
        port.link != first.link || (port.gbps.is_some() && first.gbps.is_some() && port.gbps != first.gbps)
    };
    if let Some(other) = selected.iter().find(unlike) {
        let one = |port: &RdmaPort| {
            let rate = port.gbps.map(|rate| format!(" at {rate} Gb/s")).unwrap_or_default();
            format!("{}:{} ({}{rate})", port.device, port.port, kind(port))
        };
        findings.warn(
            format!(
                "{} takes unlike ports on {}: {} and {}; NCCL pairs the ports of two nodes, and the slowest sets the pace \
                 or the connection fails",
                value.shown(),
                here(subject),
                one(first),
                one(other)
            ),
            "name the ports of the GPUs' network only, and leave storage and management out",
        );
    }
}

/// The ports NCCL would take, and the row that somebody chose.
fn chosen_row<'a>(subject: &Subject<'a>) -> Option<(&'a Value, i64, Vec<&'a RdmaPort>)> {
    let value = subject.given("NCCL_IB_GID_INDEX")?;
    let index = integer(subject, "NCCL_IB_GID_INDEX").filter(|index| *index >= 0)?;
    let list = List::parse(subject.value("NCCL_IB_HCA").unwrap_or_default());
    let ports: Vec<&RdmaPort> = rdma(subject)?.iter().filter(|port| selects(&list, port)).collect();
    (!ports.is_empty()).then_some((value, index, ports))
}

fn gid_on_ib(subject: &Subject, findings: &mut Findings) {
    if let Some((value, _, ports)) = chosen_row(subject)
        && ports.iter().all(|port| port.link == LinkLayer::InfiniBand)
    {
        let message = format!(
            "{} does nothing on {}: its ports are InfiniBand, and NCCL looks at the index on Ethernet only",
            value.shown(),
            here(subject)
        );
        findings.inform(message, "unset it");
    }
}

/// <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index>
fn gid_index(subject: &Subject, findings: &mut Findings) {
    let Some((value, index, ports)) = chosen_row(subject) else {
        return;
    };
    let ports: Vec<&RdmaPort> = ports.into_iter().filter(|port| port.link == LinkLayer::Ethernet).collect();
    if ports.is_empty() {
        return;
    }
    let unneeded = "since 2.21 NCCL finds the index itself, on each port";
    let cure = "unset it; only NCCL before 2.21 needs one";
    let Some(rows) = subject.task.and_then(|task| task.gids.as_ref()) else {
        return findings.inform(format!("{} is not needed: {unneeded}", value.shown()), cure);
    };
    let of = |port: &RdmaPort| -> Vec<u32> {
        let mine = rows.iter().filter(|row| row.device == port.device && row.port == port.port);
        let mine = mine.filter(|row| row.ipv4().is_none() || row.is_routable());
        mine.map(|row| row.index).collect()
    };
    let wrong: Vec<&&RdmaPort> =
        ports.iter().filter(|port| !of(port).iter().any(|row| i64::from(*row) == index)).collect();
    // Rows beyond those that were read are not known, nor those of a port
    // without any.
    if rows.is_empty() || index > 15 {
        return findings.inform(format!("{} could not be looked up: {unneeded}", value.shown()), cure);
    }
    if wrong.is_empty() {
        return findings.inform(format!("{} is right on {}, but {unneeded}", value.shown(), here(subject)), cure);
    }
    let usable = ports.iter().take(4).map(|port| {
        let rows = of(port).iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        format!("{}:{} has {}", port.device, port.port, if rows.is_empty() { "none".into() } else { rows })
    });
    let usable = usable.collect::<Vec<_>>().join(", ");
    let common = (0..16).find(|row| ports.iter().all(|port| of(port).contains(row)));
    let message = format!(
        "{}: row {index} is no RoCE v2 address on {} of {} (rows that are: {usable}), so connections end in \"ibv_modify_qp failed\"",
        value.shown(),
        port_names(wrong.iter().copied().copied()),
        here(subject)
    );
    let cure = match common {
        Some(row) => format!("{cure}, and then {row} is one that all have"),
        None => format!("{cure}; no row is one that all have"),
    };
    if wrong.len() == ports.len() { findings.error(message, cure) } else { findings.warn(message, cure) }
}

fn gid_none(subject: &Subject, findings: &mut Findings) {
    if subject.settings.gid != Gid::Auto || subject.value("NCCL_IB_GID_INDEX").is_some() || !subject.several_nodes() {
        return;
    }
    let hca = subject.value("NCCL_IB_HCA").unwrap_or_default();
    if let Some(usable) = subject.node.and_then(|node| gids::usable(node, subject.task, hca))
        && gids::common(&usable).is_none()
    {
        let message = format!(
            "gid=auto: no row is one that all chosen RoCE ports of {} have ({})",
            here(subject),
            gids::listed(&usable)
        );
        findings.error(message, "leave out gid=auto, NCCL since 2.21 finds the row on each port; or name ports that have one by NCCL_IB_HCA");
    }
}

fn ib_disabled(subject: &Subject, findings: &mut Findings) {
    let (Some(value), Some(ports)) = (subject.given("NCCL_IB_DISABLE"), rdma(subject)) else {
        return;
    };
    let asked = subject.settings.fabric == Fabric::Tcp;
    if integer(subject, "NCCL_IB_DISABLE").unwrap_or(0) != 0 && ports.iter().any(speaks_verbs) && !asked {
        findings.warn(
            format!(
                "{} turns off {} of {}: the ranks of different nodes go over TCP, many times slower",
                value.shown(),
                port_names(ports.iter().filter(|port| speaks_verbs(port))),
                here(subject)
            ),
            "unset it; it is for finding faults. fabric=tcp says that TCP is meant",
        );
    }
}

fn ucx_devices(subject: &Subject, findings: &mut Findings) {
    let (Some(value), Some(node)) = (subject.given("UCX_NET_DEVICES"), subject.node) else {
        return;
    };
    let (Some(ports), Some(devices)) = (&node.rdma, &node.netdevs) else {
        return;
    };
    let there = |name: &str| {
        ports.iter().any(|port| port.device == name || format!("{}:{}", port.device, port.port) == name)
            || devices.iter().any(|device| device.name == name)
    };
    let missing = value.value.split(',').filter(|item| !item.is_empty() && *item != "all" && !there(item));
    // Patterns, and fabrics with devices of their own, are not ours to judge.
    let missing: Vec<&str> =
        missing.filter(|item| !item.contains(['*', '?', '[', '^']) && !item.starts_with("cxi")).collect();
    let Some(first) = missing.first() else {
        return;
    };
    let ports: Vec<String> = ports.iter().map(|port| format!("{}:{}", port.device, port.port)).collect();
    let near = meant(first, ports.iter().map(String::as_str));
    findings.warn(
        format!(
            "{}: {} has no {} (has {})",
            value.shown(),
            here(subject),
            listed(missing.iter().map(ToString::to_string)),
            listed(ports.iter().cloned().chain(devices.iter().map(|device| device.name.clone())))
        ),
        format!("unset it, or name devices as `ucx_info -d` does{}", did_you_mean(near)),
    );
}

fn net_missing(subject: &Subject, findings: &mut Findings) {
    if let (Some(value), Some(ports)) = (subject.given("NCCL_NET_PLUGIN"), rdma(subject))
        && value.value == "none"
        && ports.iter().any(|port| port.active && is_efa(port))
    {
        findings.warn(
            format!(
                "{} keeps NCCL from its plugin for EFA (aws-ofi-nccl), which {} has: it goes over TCP, many times slower",
                value.shown(),
                here(subject)
            ),
            "unset it, and have libnccl-net.so of aws-ofi-nccl in the image",
        );
    }
}

// ------------------------------------------------------------------ GPUs and limits

fn cvd_order(subject: &Subject, findings: &mut Findings) {
    let models = subject.node.map_or(&[][..], |node| &node.gpu_models);
    let (Some(first), Some(last)) = (models.first(), models.last()) else {
        return;
    };
    if first != last && subject.value("CUDA_DEVICE_ORDER") != Some("PCI_BUS_ID") {
        let order = match subject.given("CUDA_DEVICE_ORDER") {
            Some(value) => value.shown(),
            None => "CUDA_DEVICE_ORDER is not set".into(),
        };
        findings.warn(
            format!(
                "{order} and {} has GPUs of several models ({first}, {last}): CUDA counts the fastest first, Slurm by bus, \
                 so that one number may mean two GPUs",
                here(subject)
            ),
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        );
    }
}

fn memlock(subject: &Subject, findings: &mut Findings) {
    let Some(limit) = subject.task.and_then(|task| task.memlock) else {
        return;
    };
    if limit < ENOUGH_LOCKED && rdma(subject).is_some_and(|ports| ports.iter().any(|port| port.active)) {
        findings.warn(
            format!(
                "ulimit -l is {} on {}: RDMA needs its buffers locked in memory, or NCCL fails with \"Cannot allocate memory\"",
                in_units(limit),
                here(subject)
            ),
            "ask the cluster's admins for LimitMEMLOCK=infinity in slurmd's unit and PropagateResourceLimitsExcept=MEMLOCK \
             in slurm.conf; `ulimit -l unlimited` before srun where it is allowed",
        );
    }
}

fn stack(subject: &Subject, findings: &mut Findings) {
    let since_228 = Version::of(subject, NCCL).is_some_and(|version| !version.before("2.28"));
    if !since_228 && subject.task.and_then(|task| task.stack) == Some(u64::MAX) && has_gpus(subject) {
        findings.warn(
            "ulimit -s is unlimited, and then each thread's stack has 2 MiB only, too little for NCCL before 2.28 (it crashes)",
            "`ulimit -s 8192` before srun",
        );
    }
}

fn open_files(subject: &Subject, findings: &mut Findings) {
    let Some(limit) = subject.task.and_then(|task| task.open_files) else {
        return;
    };
    let ranks = u64::from(subject.nodes.unwrap_or(1)) * ranks_here(subject);
    if limit < 65_536 && ranks > 256 {
        findings.warn(
            format!(
                "ulimit -n is {limit} for {ranks} ranks: connections to the others and open files of data may need more"
            ),
            "`ulimit -n 65536` before srun, or up to `ulimit -Hn`",
        );
    }
}

fn shm_size(subject: &Subject, findings: &mut Findings) {
    let Some(size) = subject.task.and_then(|task| task.shm) else {
        return;
    };
    let ranks = ranks_here(subject);
    let small = size <= SHM_OF_DOCKER || (has_gpus(subject) && size < ranks.saturating_mul(SHM_OF_A_RANK));
    if small && subject.shape != Some(Shape::Shell) {
        findings.warn(
            format!(
                "/dev/shm has {} on {} for {ranks} ranks: data loaders die with a bus error, and NCCL cannot make its segments",
                in_units(size),
                here(subject)
            ),
            "give the container the host's /dev/shm or a larger one (--ipc=host, --shm-size), 1 GiB for each rank or more",
        );
    }
}

fn cpus(subject: &Subject, findings: &mut Findings) {
    let (Some(cpus), true) = (subject.task.and_then(|task| task.cpus), has_gpus(subject)) else {
        return;
    };
    let (ranks, who) = match subject.shape {
        Some(Shape::Native | Shape::Worker) => (1, "its rank".to_string()),
        Some(Shape::Agent) => (ranks_here(subject), format!("its {} ranks", ranks_here(subject))),
        _ => return,
    };
    if u64::from(cpus) <= ranks && asked_for(subject).is_none() && inherited(subject).is_none() {
        findings.warn(
            format!(
                "the task has {cpus} CPU{} for {who} on {}: its own code, the data loader and NCCL's threads wait for each other",
                if cpus == 1 { "" } else { "s" },
                here(subject)
            ),
            "give srun --cpus-per-task=N (Slurm 22.05 to 23.02 does not take over sbatch's), or --cpu-bind=none",
        );
    }
}

/// The CPUs of the mask and those that the job asked for, where it has fewer by
/// nobody's wish.
fn asked_for(subject: &Subject) -> Option<(u32, u32)> {
    let task = subject.task.filter(|task| task.bound_by_user.cpu.is_none())?;
    let has = task.cpus.filter(|_| subject.shape != Some(Shape::Shell))?;
    let asked = subject.value("SLURM_CPUS_PER_TASK")?.parse().ok()?;
    (has < asked).then_some((has, asked))
}

/// <https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41>
fn cpus_asked(subject: &Subject, findings: &mut Findings) {
    if let Some((has, asked)) = asked_for(subject) {
        findings.warn(
            format!(
                "the step's tasks have {has} CPU{} on {}, the job asked for {asked} (SLURM_CPUS_PER_TASK): srun of Slurm 22.05 to \
                 23.02 does not take that over, and each task's workers wait for each other",
                if has == 1 { "" } else { "s" },
                here(subject)
            ),
            format!("use srun -c {asked}, or export SRUN_CPUS_PER_TASK={asked} in the batch script"),
        );
    }
}

/// SLURM_CPU_BIND as srun itself writes it for the tasks of a step, with their
/// masks, where it decided this step's: it came along from another step's task.
fn inherited<'a>(subject: &Subject<'a>) -> Option<(&'a str, u32)> {
    let task = subject.task?;
    let text = task.bound_by_user.cpu.as_deref()?;
    let bind = text.strip_prefix("SLURM_CPU_BIND=")?;
    let (how, masks) = bind.split_whitespace().next()?.split_once("mask_cpu:")?;
    if !how.split(',').any(|word| matches!(word, "quiet" | "verbose")) {
        return None;
    }
    let has = task.cpus.filter(|_| subject.shape != Some(Shape::Shell))?;
    let asked = subject.value("SLURM_CPUS_PER_TASK").and_then(|cpus| cpus.parse::<u32>().ok());
    let tasks = subject.step.map_or(1, |step| step.local_world_size) as usize;
    // As many CPUs as asked for, and a mask for each task, do no harm.
    (asked.is_some_and(|asked| has < asked) || masks.split(',').count() < tasks).then_some((text, has))
}

/// <https://github.com/nebius/soperator/pull/2316>
fn bind_stale(subject: &Subject, findings: &mut Findings) {
    if let Some((text, has)) = inherited(subject) {
        findings.warn(
            format!(
                "{} binds the task to {has} CPU{} on {}: it is what srun set for another step, in which this job or step was \
                 submitted, and counts like --cpu-bind",
                printable(text),
                if has == 1 { "" } else { "s" },
                here(subject)
            ),
            "`unset ${!SLURM_CPU_BIND*}` in front of sbatch or srun",
        );
    }
}

fn mnnvl(subject: &Subject, findings: &mut Findings) {
    let Some(value) = subject.given("NCCL_MNNVL_ENABLE") else {
        return;
    };
    if integer(subject, "NCCL_MNNVL_ENABLE") != Some(1) {
        return;
    }
    if let Some(cumem) = subject.given("NCCL_CUMEM_ENABLE")
        && integer(subject, "NCCL_CUMEM_ENABLE") == Some(0)
    {
        findings.warn(
            format!("{} is without effect: {} turns off what it needs", value.shown(), cumem.shown()),
            "unset NCCL_CUMEM_ENABLE",
        );
    }
    let rack = |model: &&String| model.split_whitespace().any(|word| matches!(word, "GB200" | "GB300"));
    let model = subject.node.and_then(|node| node.gpu_models.iter().find(rack));
    if let (Some(model), Some(false)) = (model, subject.task.and_then(|task| task.imex)) {
        findings.error(
            format!(
                "{}, but {} with {model} has no /dev/nvidia-caps-imex-channels: NCCL cannot share memory across nodes and ends",
                value.shown(),
                here(subject)
            ),
            "have the channels in the container and nvidia-imex running on the nodes, or unset it: NCCL then finds out itself",
        );
    }
}

fn nvls(subject: &Subject, findings: &mut Findings) {
    let (Some(value), Some(node)) = (subject.given("NCCL_NVLS_ENABLE"), subject.node) else {
        return;
    };
    let models = &node.gpu_models;
    let of = |model: &str, names: &[&str]| {
        model.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| names.contains(&word))
    };
    // Three at least, on a board with switches.
    let switched = models.len() > 2
        && models.iter().all(|model| {
            of(model, &["H100", "H200", "H800", "H20", "B100", "B200", "B300", "GB200", "GB300"])
                && !of(model, &["PCIe", "NVL"])
        });
    let older = ["P100", "V100", "T4", "A100", "A800", "A30", "A40", "A10", "L4", "L40", "L40S"];
    match integer(subject, "NCCL_NVLS_ENABLE") {
        Some(0) if switched && value.from == From::User && subject.settings.profile != Profile::Megatron => findings.inform(
            format!(
                "{} leaves out the reductions of {}'s NVLink switches: all-reduce in the node loses about a quarter",
                value.shown(),
                here(subject)
            ),
            "unset it, unless its memory is needed",
        ),
        Some(1) => {
            if let Some(model) = models.iter().find(|model| of(model, &older)) {
                findings.warn(
                    format!(
                        "{} forces what {model} of {} does not have: NVLink multicast",
                        value.shown(),
                        here(subject)
                    ),
                    "unset it: NCCL finds out itself",
                );
            }
        }
        _ => {}
    }
}
