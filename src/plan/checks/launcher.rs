//! Checks of a launcher in the command: whether it fits the step, and whether
//! the launchers of all nodes will meet.

use std::net::IpAddr;

use super::{Findings, Phase, Rule, Subject};
use crate::config::Launch;
use crate::facts::hostlist;
use crate::plan::agent::{self, Backend};
use crate::plan::launcher::{self, Kind, Launcher};
use crate::plan::{Severity, Shape};

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "launcher-shape",
        Phase::Launch,
        Severity::Error,
        "torchrun and its kind with several tasks on a node, or with flags that do not fit the step's nodes",
        fits_the_step,
    ),
    Rule::new(
        "launcher-variables",
        Phase::Launch,
        Severity::Error,
        "exported PET_ variables that do not fit the step",
        variables,
    ),
    Rule::new(
        "launcher-flags",
        Phase::Launch,
        Severity::Warning,
        "launchers that take the step's nodes from their flags only, without these flags",
        flags,
    ),
];

/// Adds a finding that is an error where what it rests on is certain.
fn add(findings: &mut Findings, certain: bool, message: String, cure: &str) {
    if certain { findings.error(message, cure) } else { findings.warn(message, cure) }
}

/// The launcher, where the tasks are meant to be launchers or may be.
fn launcher(subject: &Subject) -> Option<Launcher> {
    let of_another_kind = matches!(subject.settings.launch, Launch::Native | Launch::Shell | Launch::Worker);
    let shell = matches!(subject.shape, Some(Shape::Shell | Shape::Worker));
    if of_another_kind || shell { None } else { launcher::find(subject.command) }
}

fn fits_the_step(subject: &Subject, findings: &mut Findings) {
    let (Some(nodes), Some(on_a_node)) = (subject.nodes, subject.tasks_on_a_node) else {
        return;
    };
    let agents = subject.settings.launch == Launch::Agent;
    let Some(launcher) = launcher(subject) else {
        if agents && on_a_node > 1 {
            findings.warn(
                format!(
                    "launch=agent, but up to {on_a_node} tasks run on a node: two launchers there would be one node"
                ),
                "--ntasks-per-node=1, or start the launcher in one task of each node only",
            );
        }
        return;
    };
    if on_a_node > 1 {
        too_many(subject, &launcher, on_a_node, findings);
        return;
    }
    if !matches!(launcher.kind, Kind::Torchrun | Kind::FtLauncher) {
        same_number_everywhere(subject, &launcher, "machine-rank", nodes, findings);
        return;
    }
    let certain = launcher.certain && launcher.flags_certain;
    let name = launcher.kind.name();
    if nodes > 1 && launcher.has("standalone") {
        // <https://github.com/openvla/openvla/issues/175>
        add(
            findings,
            certain,
            format!("--standalone of {name}, but the step has {nodes} nodes: each would train for itself"),
            "leave out --standalone",
        );
        return;
    }
    let backend =
        agent::backend(Some(&launcher), subject.given("PET_RDZV_BACKEND").map(|v| &*v.value), subject.settings);
    if let Some(value) = launcher.value("nnodes") {
        node_count(value, "--nnodes", nodes, backend, certain, "leave out --nnodes", findings);
    }
    if backend == Backend::Static {
        same_number_everywhere(subject, &launcher, "node-rank", nodes, findings);
    }
    let flag =
        if backend == Backend::Static && !launcher.has("rdzv-endpoint") { "master-addr" } else { "rdzv-endpoint" };
    if let Some(endpoint) = launcher.value(flag) {
        let host = agent::host_of(endpoint);
        meeting_place(subject, host, &format!("--{flag}"), nodes, backend, certain, findings);
    }
}

/// Several tasks on a node, each of which would start the node's ranks.
fn too_many(subject: &Subject, launcher: &Launcher, on_a_node: u32, findings: &mut Findings) {
    let name = launcher.kind.name();
    let cure = "--ntasks-per-node=1 (torchrun's --nproc-per-node says how many ranks it starts)";
    if launcher.in_shell {
        findings.warn(
            format!("the shell text starts {name}, and up to {on_a_node} tasks run it on a node: each would start the node's ranks, unless one of them only gets that far"),
            cure,
        );
        return;
    }
    // As many places as launchers: `--nnodes` counts the tasks.
    let counted = launcher.value("nnodes").and_then(|value| value.parse().ok());
    let places = counted.is_some_and(|places: u32| Some(places) == subject.tasks);
    let het = subject.step.is_some_and(|step| step.het);
    add(
        findings,
        launcher.certain && !places && !het,
        format!("{name} starts the ranks of its node, but up to {on_a_node} tasks on a node each start one"),
        cure,
    );
}

/// MIN:MAX or one number of nodes, which must be those of the step.
fn node_count(
    value: &str,
    name: &str,
    nodes: u32,
    backend: Backend,
    certain: bool,
    cure: &str,
    findings: &mut Findings,
) {
    let (least, most) = value.split_once(':').unwrap_or((value, value));
    let (Ok(least), Ok(most)) = (least.parse::<u32>(), most.parse::<u32>()) else {
        return;
    };
    // static waits for the greater number, c10d for the smaller one.
    let needed = if backend == Backend::Static { most } else { least };
    let shown = if least == most { format!("{name}={most}") } else { format!("{name}={least}:{most}") };
    if most == 1 && nodes > 1 {
        let message = format!("{shown}, but the step has {nodes} nodes: each would train for itself");
        add(findings, certain, message, cure);
    } else if needed > nodes {
        let message = format!("{shown}, but the step has {nodes} nodes: they would wait for one that never comes");
        add(findings, certain, message, cure);
    } else if most < nodes {
        findings.warn(format!("{shown}, but the step has {nodes} nodes: not all of them can take part"), cure);
    }
}

/// `srun torchrun --node-rank=$SLURM_NODEID`: the batch script's shell has put
/// one number there for all.
fn same_number_everywhere(subject: &Subject, launcher: &Launcher, flag: &str, nodes: u32, findings: &mut Findings) {
    let Some(number) = launcher.value(flag).and_then(|value| value.parse::<u32>().ok()) else {
        return;
    };
    if nodes < 2 || subject.command.is_empty() {
        return;
    }
    let cure = match launcher.kind.name() {
        "torchrun" => format!("leave out --{flag}"),
        name => format!("write bash -c '{name} --{} $NODE_RANK …'", flag.replace('-', "_")),
    };
    add(
        findings,
        launcher.certain && (launcher.flags_certain || launcher.kind == Kind::Accelerate),
        format!("--{flag}={number} is the same on all {nodes} nodes, but each needs a number of its own"),
        &cure,
    );
}

/// Where the launchers are told to meet.
fn meeting_place(
    subject: &Subject,
    host: &str,
    name: &str,
    nodes: u32,
    backend: Backend,
    certain: bool,
    findings: &mut Findings,
) {
    if nodes < 2 || backend == Backend::Other {
        return;
    }
    let cure = format!("leave {name} to palingenesis");
    let address = host.parse::<IpAddr>().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback() || address.is_unspecified()) {
        add(
            findings,
            certain,
            format!("{name} is a loopback address, but the step has {nodes} nodes: each would wait for itself"),
            &cure,
        );
        return;
    }
    let Some(step) = subject.step.filter(|step| backend == Backend::Static && !step.arbitrary && !step.het) else {
        return;
    };
    let hosts = hostlist::expand(&step.node_list).unwrap_or_default();
    if let Some(first) = hosts.first().filter(|first| *first != host && hosts.iter().any(|node| node == host)) {
        add(findings, certain, format!("{name} names {host}, but node 0 is {first}: nobody would listen there"), &cure);
    }
}

fn variables(subject: &Subject, findings: &mut Findings) {
    let Some(nodes) = subject.nodes else { return };
    let launcher = launcher(subject);
    let known = launcher.as_ref();
    let agents = match subject.shape {
        Some(shape) => shape == Shape::Agent,
        None => known.is_some() || subject.settings.launch == Launch::Agent,
    };
    if !agents || known.is_some_and(|launcher| !matches!(launcher.kind, Kind::Torchrun | Kind::FtLauncher)) {
        return;
    }
    let certain = known.is_some_and(|launcher| launcher.certain && launcher.flags_certain);
    // The launcher's flags win over the variables.
    let given =
        |name: &str, flag: &str| subject.given(name).filter(|_| !known.is_some_and(|launcher| launcher.has(flag)));
    let backend = agent::backend(known, subject.given("PET_RDZV_BACKEND").map(|v| &*v.value), subject.settings);
    if let Some(value) = given("PET_STANDALONE", "standalone").filter(|v| nodes > 1 && agent::standalone(&v.value)) {
        let message = format!("{}, but the step has {nodes} nodes: each would train for itself", value.shown());
        add(findings, certain, message, "unset it");
        return;
    }
    if let Some(value) = given("PET_NNODES", "nnodes") {
        node_count(&value.value, "PET_NNODES", nodes, backend, certain, "unset it", findings);
    }
    if let Some(value) = given("PET_NODE_RANK", "node-rank").filter(|_| nodes > 1 && backend == Backend::Static) {
        let own = subject.step.map(agent::number);
        if own.is_none_or(|own| value.value.trim() != own.to_string()) {
            let message =
                format!("{} is the same on all {nodes} nodes, but each needs a number of its own", value.shown());
            add(findings, certain, message, "unset it");
        }
    }
    let endpoint = given("PET_RDZV_ENDPOINT", "rdzv-endpoint");
    let place = match backend {
        Backend::Static => endpoint.or_else(|| given("PET_MASTER_ADDR", "master-addr")),
        _ => endpoint,
    };
    if let Some(place) = place {
        let host = agent::host_of(&place.value);
        meeting_place(subject, host, &place.name, nodes, backend, certain, findings);
        if let Some(master) = subject.value("MASTER_ADDR").filter(|master| *master != host) {
            findings.warn(
                format!("{} is not MASTER_ADDR={master}, where the step's rank 0 is", place.shown()),
                "unset it, unless it is another name of that node",
            );
        }
    }
}

fn flags(subject: &Subject, findings: &mut Findings) {
    let (Some(nodes), Some(on_a_node)) = (subject.nodes, subject.tasks_on_a_node) else {
        return;
    };
    let Some(launcher) = launcher(subject).filter(|_| nodes > 1 && on_a_node == 1) else {
        return;
    };
    let name = launcher.kind.name();
    match launcher.kind {
        Kind::Torchrun | Kind::FtLauncher => {}
        Kind::Accelerate => {
            let mut needed = vec![("machine-rank", "--machine_rank $NODE_RANK".to_string())];
            // A file may hold the others, but the same for all nodes.
            if !launcher.has("config-file") {
                needed.push(("num-machines", format!("--num_machines {nodes}")));
                needed.push(("num-processes", "--num_processes RANKS-OF-ALL-NODES".into()));
                needed.push(("main-process-ip", "--main_process_ip $MASTER_ADDR".into()));
                needed.push(("main-process-port", "--main_process_port $MASTER_PORT".into()));
            }
            needed.retain(|(flag, _)| !launcher.has(flag));
            if !needed.is_empty() {
                let missing: Vec<String> = needed.into_iter().map(|(_, text)| text).collect();
                findings.warn(
                    format!(
                        "{name} does not take the step's {nodes} nodes from the environment, and lacks flags for them"
                    ),
                    format!("write bash -c '{name} {} …', or use torchrun, which needs no flag", missing.join(" ")),
                );
            }
        }
        Kind::Composer => {
            if !launcher.has("world-size") {
                findings.warn(
                    format!("{name} takes node and address from NODE_RANK, MASTER_ADDR and MASTER_PORT, but not the number of ranks from the step's {nodes} nodes"),
                    "add --world_size with the number of ranks of all nodes",
                );
            }
        }
        Kind::Deepspeed | Kind::Colossalai => {
            if !(launcher.has("no-ssh") && launcher.has("node-rank")) {
                findings.warn(
                    format!("{name} starts its other nodes by ssh from a host file; started on each of the step's {nodes} nodes, each would train for itself"),
                    "start the training with torchrun, or with one task for each GPU and no launcher",
                );
            }
        }
    }
}
