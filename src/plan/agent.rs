//! PET_*: what torchrun takes for flags that it is not given, so that one
//! launcher on each node needs none (torch/distributed/argparse_util.py). It
//! reads neither MASTER_ADDR nor NODE_RANK; without all of this each node's
//! would be a training of its own at 127.0.0.1:29500.

use std::net::IpAddr;

use crate::config::{Rendezvous, Settings};
use crate::facts::{Step, hostlist};

use super::launcher::{self, Kind, Launcher};
use super::marks::Marks;
use super::precedence::{self, Layer, Offers};
use super::{Facts, Origin, Shape, StepPlan};

/// How torchrun's launchers meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    /// The first one listens; node ranks are given.
    Static,
    /// The one at the endpoint listens; node ranks follow from host names.
    C10d,
    /// Another one, such as etcd.
    Other,
}

/// This node's number among the launchers: that of its only task, so that node 0
/// is where MASTER_ADDR points to under every layout.
pub(super) fn number(step: &Step) -> u32 {
    if step.one_task_on_each_node() { step.rank } else { step.node_rank }
}

/// The backend in force: by flag, by option, by the user's variable.
pub(super) fn backend(launcher: Option<&Launcher>, variable: Option<&str>, settings: &Settings) -> Backend {
    let kind = launcher.map(|launcher| launcher.kind);
    if kind == Some(Kind::FtLauncher) {
        return Backend::C10d;
    }
    let named = |name: &str| match name {
        "static" => Backend::Static,
        "c10d" => Backend::C10d,
        _ => Backend::Other,
    };
    let of_settings = match settings.rdzv {
        Rendezvous::Static => Backend::Static,
        Rendezvous::C10d => Backend::C10d,
    };
    match (launcher.and_then(|launcher| launcher.value("rdzv-backend")), variable) {
        (Some(flag), _) => named(flag),
        // Its own default is in force, not the variable's.
        (None, _) if kind == Some(Kind::Accelerate) => Backend::Static,
        (None, Some(variable)) if !of_user(settings) => named(variable),
        _ => of_settings,
    }
}

/// Whether the user has given `rdzv=`.
fn of_user(settings: &Settings) -> bool {
    settings.is_given("rdzv") && !settings.is_of_site("rdzv")
}

/// The host of an endpoint, `HOST`, `HOST:PORT` or `[IPV6]:PORT`.
pub(super) fn host_of(endpoint: &str) -> &str {
    let endpoint = endpoint.trim();
    if let Some((address, _)) = endpoint.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    match endpoint.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => endpoint,
    }
}

/// Whether this node hosts the store at `endpoint`; `None`: not known from here.
///
/// torch itself compares the endpoint with this host's own name and addresses,
/// which fails for the name of another interface and for aliases; then nobody
/// hosts it and all wait (<https://github.com/pytorch/pytorch/issues/79388>).
fn hosts_store(step: &Step, endpoint: Option<&str>, master: &str) -> Option<bool> {
    let first = number(step) == 0;
    let host = match endpoint {
        None => return Some(first),
        Some(endpoint) => host_of(endpoint),
    };
    if host == master || host.contains("MASTER_ADDR") {
        return Some(first);
    }
    let nodes = hostlist::expand(&step.node_list).unwrap_or_default();
    nodes.iter().any(|node| node == host).then(|| host == step.node)
}

/// Offers PET_*; says how many ranks each task will start.
pub(super) fn offer(offers: &mut Offers, facts: &Facts, plan: &StepPlan, settings: &Settings, marks: &Marks) -> u32 {
    if plan.shape != Shape::Agent {
        return 1;
    }
    let launcher = launcher::find(facts.command);
    let launcher = launcher.as_ref();
    let gpus = visible_gpus(facts);
    let users = |name: &str| precedence::given(facts, marks, name).map(|(value, _)| value);
    let wanted = launcher.and_then(|launcher| launcher.value("nproc-per-node")).map(String::from);
    let ranks = ranks(wanted.or_else(|| users("PET_NPROC_PER_NODE")).as_deref(), gpus.as_ref(), facts.task.cpus);
    if let Some(other) = launcher.map(|launcher| launcher.kind).filter(|kind| !kind.reads_pet()) {
        offers.nothing("PET_NNODES and the others", format!("{} does not read them", other.name()));
        return ranks;
    }

    // In shell text another command may follow, without the flag.
    let flagged = |flag: &str| launcher.is_some_and(|launcher| !launcher.in_shell && launcher.has(flag));
    let set = |offers: &mut Offers, name: &str, flag: &str, layer: (Layer, Origin), value: &str, why: &str| {
        if flagged(flag) {
            offers.nothing(name, format!("--{flag} of the command is taken (without it {value} would be)"));
        } else {
            offers.value(layer.0, layer.1, name, value, why);
        }
    };
    let derived = (Layer::Profile, Origin::Step);
    set(offers, "PET_NNODES", "nnodes", derived, &plan.nodes.to_string(), "nodes of the step: torchrun's --nnodes");
    set(
        offers,
        "PET_NODE_RANK",
        "node-rank",
        derived,
        &number(facts.step).to_string(),
        "this node's number: --node-rank",
    );
    match &gpus {
        Some((count, why)) if *count > 0 => {
            set(offers, "PET_NPROC_PER_NODE", "nproc-per-node", derived, &count.to_string(), why);
        }
        _ if flagged("nproc-per-node") => {
            offers.nothing("PET_NPROC_PER_NODE", "--nproc-per-node of the command is taken");
        }
        _ => offers.nothing(
            "PET_NPROC_PER_NODE",
            "no GPU is visible here, so torchrun's default is left: 1 rank on each node; export it for more",
        ),
    }
    let (Some(master), Some(port)) = (plan.master_addr.as_deref(), plan.master_port) else {
        return ranks;
    };
    let id = format!("{}.{}", plan.job_id, plan.step_id);
    set(
        offers,
        "PET_RDZV_ID",
        "rdzv-id",
        derived,
        &id,
        "job and step: launchers of two steps never take each other for theirs",
    );
    let address = match master.parse() {
        Ok(IpAddr::V6(address)) => format!("[{address}]"),
        _ => master.to_string(),
    };
    let backend = backend(launcher, users("PET_RDZV_BACKEND").as_deref(), settings);
    let of_backend = match (of_user(settings), settings.is_of_site("rdzv")) {
        (true, _) => (Layer::Option, Origin::Option),
        (false, true) => (Layer::Site, Origin::Site),
        _ => derived,
    };
    match backend {
        Backend::Static => {
            let why = "ranks follow the order of the step's nodes";
            set(offers, "PET_RDZV_BACKEND", "rdzv-backend", of_backend, "static", why);
            set(
                offers,
                "PET_MASTER_ADDR",
                "master-addr",
                derived,
                &address,
                "MASTER_ADDR, which torchrun does not read",
            );
            set(
                offers,
                "PET_MASTER_PORT",
                "master-port",
                derived,
                &port.to_string(),
                "MASTER_PORT, which torchrun does not read",
            );
        }
        Backend::C10d => {
            let why = "node ranks follow the names of the hosts, not their order in the step";
            set(offers, "PET_RDZV_BACKEND", "rdzv-backend", of_backend, "c10d", why);
            let why = "MASTER_ADDR:MASTER_PORT, where the launchers meet";
            set(offers, "PET_RDZV_ENDPOINT", "rdzv-endpoint", derived, &format!("{address}:{port}"), why);
            let flag = launcher.and_then(|launcher| launcher.value("rdzv-endpoint")).map(String::from);
            let endpoint = flag.or_else(|| users("PET_RDZV_ENDPOINT"));
            let (host, why) = match hosts_store(facts.step, endpoint.as_deref(), master) {
                Some(true) => {
                    ("is_host=1,", "this node hosts the store, and no other; time for a node that comes late")
                }
                Some(false) => ("is_host=0,", "another node hosts the store; time for a node that comes late"),
                None => ("", "time for a node that comes late; torchrun finds out itself who hosts your endpoint"),
            };
            set(
                offers,
                "PET_RDZV_CONF",
                "rdzv-conf",
                derived,
                &format!("{host}join_timeout=1800,read_timeout=600"),
                why,
            );
        }
        Backend::Other => {}
    }
    ranks
}

/// How many ranks torchrun starts for what it is told.
fn ranks(told: Option<&str>, gpus: Option<&(u32, String)>, cpus: Option<u32>) -> u32 {
    let visible = gpus.map(|(count, _)| *count).filter(|count| *count > 0);
    let ranks = match told {
        Some("cpu") => cpus,
        Some("auto") => visible.or(cpus),
        Some(number) => number.parse().ok().or(visible),
        None => visible,
    };
    ranks.unwrap_or(1).max(1)
}

/// The GPUs that a process started here will see, and how that is known.
fn visible_gpus(facts: &Facts) -> Option<(u32, String)> {
    let variable = |name: &str| facts.environment.get(name);
    if let Some(list) = variable("CUDA_VISIBLE_DEVICES") {
        return Some((listed(list), "a rank for each GPU in CUDA_VISIBLE_DEVICES".into()));
    }
    if let Some(count) = variable("SLURM_GPUS_ON_NODE").and_then(|count| count.parse().ok()) {
        return Some((count, "a rank for each GPU the step has here, by SLURM_GPUS_ON_NODE".into()));
    }
    let models = u32::try_from(facts.node.gpu_models.len()).ok().filter(|count| *count > 0)?;
    Some((models, "a rank for each GPU of the node: Slurm names none for the step".into()))
}

/// How many GPUs CUDA sees by this CUDA_VISIBLE_DEVICES: up to the first entry
/// that is none, and of MIG devices the first one only.
fn listed(list: &str) -> u32 {
    let mut seen: Vec<&str> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        if entry.starts_with("MIG-") {
            return u32::from(seen.is_empty());
        }
        let index = !entry.is_empty() && entry.bytes().all(|byte| byte.is_ascii_digit());
        if !index && !entry.starts_with("GPU-") {
            break;
        }
        // The same one twice: CUDA takes the list for wrong, and shows none.
        if seen.contains(&entry) {
            return 0;
        }
        seen.push(entry);
    }
    u32::try_from(seen.len()).unwrap_or(u32::MAX)
}

/// Whether the environment asks torchrun for a training on this node alone.
pub(super) fn standalone(value: &str) -> bool {
    value.trim().parse::<i64>().is_ok_and(|number| number != 0)
}
