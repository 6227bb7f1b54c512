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

/// Whether other components of the step may have another command.
fn het(subject: &Subject) -> bool {
    subject.step.is_some_and(|step| step.het)
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
                "give srun --ntasks-per-node=1, or start the launcher in one task of each node only",
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
    let cure = "give srun --ntasks-per-node=1; how many ranks each launcher starts is its own setting";
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
    add(
        findings,
        launcher.certain && !places && !het(subject),
        format!("{name} starts all ranks of its node, but up to {on_a_node} tasks on a node would each start {name}"),
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
    if nodes < 2 {
        return;
    }
    let cure = match launcher.kind.name() {
        "torchrun" => format!("leave out --{flag}"),
        name => format!("write bash -c '{name} --{} $NODE_RANK …'", flag.replace('-', "_")),
    };
    add(
        findings,
        launcher.certain && (launcher.flags_certain || launcher.kind == Kind::Accelerate) && !het(subject),
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
                        "{name} takes the nodes and its own number from flags or a configuration file, and the command lacks flags for the step's {nodes} nodes"
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

#[cfg(test)]
mod tests {
    use super::super::super::tests::World;
    use super::super::super::{Plan, Refusal, Warning};

    /// What the checks of this file find for a command on nodes with so many tasks
    /// each.
    fn found(
        nodes: &str,
        tasks: &str,
        rank: u32,
        command: &[&str],
        variables: &[(&str, &str)],
        spec: &str,
    ) -> Vec<Warning> {
        let mut world = World::new(nodes, tasks, rank).export(variables);
        world.command = command.iter().map(ToString::to_string).collect();
        let warnings = match world.plan(spec) {
            Ok(Plan { warnings, .. }) => warnings,
            Err(Refusal::Checks(errors)) => errors,
            Err(other) => panic!("{other}"),
        };
        warnings.into_iter().filter(|warning| warning.id.starts_with("launcher-")).collect()
    }

    /// `E` for an error, `w` for a warning, in the order found.
    fn marks(found: &[Warning]) -> String {
        found.iter().map(|warning| if warning.severity == super::Severity::Error { 'E' } else { 'w' }).collect()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    /// <https://github.com/pytorch/pytorch/issues/116974>: two launchers on a node
    /// for one place.
    #[test]
    fn several_launchers_on_a_node() {
        for (command, tasks, spec, expected) in [
            ("torchrun x.py", "4", "", "E"),
            ("torchrun --nnodes=2 --nproc_per_node=2 --rdzv_id=1 --rdzv_backend=c10d x.py", "2", "", "E"),
            ("python -m torch.distributed.run x.py", "2", "", "E"),
            ("uv run torchrun x.py", "2,1", "", "E"),
            ("accelerate launch x.py", "2", "", "E"),
            ("deepspeed x.py", "2", "", "E"),
            ("torchrun x.py", "2", "launch=agent", "E"),
            ("torchrun x.py", "2", "launcher-shape=warn", "w"),
            ("torchrun x.py", "2", "launcher-shape=off", ""),
            ("torchrun x.py", "2", "checks=off", ""),
            // The user says what the tasks are.
            ("torchrun x.py", "2", "launch=native", ""),
            // As many places as launchers.
            ("torchrun --nnodes=4 --rdzv_backend=c10d --rdzv_endpoint=n1 x.py", "2", "", "w"),
            ("nsys profile torchrun x.py", "2", "", "w"),
            ("bash train.sh", "2", "launch=agent", "w"),
            ("torchrun x.py", "1", "", ""),
            ("python x.py", "4", "", ""),
        ] {
            let found = found("n[1-2]", tasks, 0, &words(command), &[], spec);
            assert_eq!(marks(&found), expected, "{command}: {found:?}");
            assert!(found.iter().all(|warning| warning.cure.contains("--ntasks-per-node=1")), "{found:?}");
        }
        let text = ["bash", "-c", "[ $SLURM_LOCALID = 0 ] && torchrun --nproc-per-node=4 x.py"];
        for spec in ["", "launch=agent"] {
            assert_eq!(marks(&found("n[1-2]", "4", 3, &text, &[], spec)), "w", "{spec}");
        }
        // One node as well.
        assert_eq!(marks(&found("n1", "8", 0, &["torchrun", "x.py"], &[], "")), "E");
        // Of a het step the other component may be meant.
        let mut het = World::new("n[1-2]", "2", 0);
        het.command = vec!["torchrun".into(), "x.py".into()];
        (het.step.het, het.step.components) = (true, vec!["n1".into(), "n2".into()]);
        assert!(het.plan("").unwrap().warnings.iter().any(|warning| warning.id == "launcher-shape"));
    }

    /// <https://github.com/openvla/openvla/issues/175>
    #[test]
    fn each_node_for_itself() {
        for line in [
            "torchrun --standalone x.py",
            "torchrun --standalone --master_addr=$MASTER_ADDR --nnodes=$WORLD_SIZE --node_rank=$RANK x.py",
            "uv run torchrun --standalone --nproc-per-node=8 x.py",
            "python -m torch.distributed.run --standalone x.py",
            "torchrun --nnodes=1 x.py",
            "torchrun --nnodes 1:1 x.py",
            "torchrun --nn=1 x.py",
        ] {
            assert_eq!(marks(&found("n[1-2]", "1", 1, &words(line), &[], "")), "E", "{line}");
            assert_eq!(marks(&found("n1", "1", 0, &words(line), &[], "")), "", "{line}");
            assert_eq!(marks(&found("n[1-2]", "1", 1, &["bash", "-c", line], &[], "")), "w", "{line}");
        }
        for variable in [("PET_STANDALONE", "1"), ("PET_NNODES", "1"), ("PET_NNODES", "1:1")] {
            assert_eq!(marks(&found("n[1-2]", "1", 1, &["torchrun", "x.py"], &[variable], "")), "E", "{variable:?}");
        }
        assert_eq!(marks(&found("n[1-2]", "1", 1, &["torchrun", "x.py"], &[("PET_STANDALONE", "0")], "")), "");
    }

    #[test]
    fn a_number_of_nodes_that_is_not_the_step_s() {
        for (line, spec, expected) in [
            ("torchrun --nnodes=2 x.py", "", ""),
            ("torchrun --nnodes=3 x.py", "", "E"),
            ("torchrun --nnodes=1:2 x.py", "", ""),
            ("torchrun --nnodes=1:4 --rdzv-backend=c10d x.py", "", ""),
            ("torchrun --nnodes=1:4 x.py", "rdzv=c10d", ""),
            ("torchrun --nnodes=1:4 x.py", "", "E"),
            ("torchrun --nnodes=3:4 --rdzv-backend=c10d x.py", "", "E"),
            ("torchrun --nnodes=abc x.py", "", ""),
            ("torchrun --brand-new 1 --nnodes=3 x.py", "", "w"),
            ("torchrun x.py --nnodes=3", "", ""),
        ] {
            let found = found("n[1-2]", "1", 0, &words(line), &[], spec);
            assert_eq!(marks(&found), expected, "{line} {spec}: {found:?}");
        }
        assert_eq!(marks(&found("n[1-4]", "1", 0, &words("torchrun --nnodes=2 x.py"), &[], "")), "w");
        let variable = |value| found("n[1-4]", "1", 0, &words("torchrun x.py"), &[("PET_NNODES", value)], "");
        assert_eq!([marks(&variable("4")), marks(&variable("2")), marks(&variable("5"))], ["", "w", "E"]);
        // The flag wins over the variable.
        assert_eq!(marks(&found("n[1-2]", "1", 0, &words("torchrun --nnodes=2 x.py"), &[("PET_NNODES", "9")], "")), "");
    }

    #[test]
    fn a_node_number_that_is_the_same_everywhere() {
        for (line, variables, rank, expected) in [
            ("torchrun --nnodes=2 --node-rank=0 x.py", &[][..], 0, "E"),
            ("torchrun --nnodes=2 --node_rank 0 x.py", &[], 1, "E"),
            ("torchrun --node_rank=0 --rdzv_backend=c10d x.py", &[], 1, ""),
            ("torchrun --node-rank=$SLURM_NODEID x.py", &[], 1, ""),
            ("accelerate launch --machine_rank 0 --config_file c.yaml x.py", &[], 1, "E"),
            ("torchrun x.py", &[("PET_NODE_RANK", "0")], 1, "E"),
            // A task prolog may have set it.
            ("torchrun x.py", &[("PET_NODE_RANK", "1")], 1, ""),
        ] {
            let found = found("n[1-2]", "1", rank, &words(line), variables, "");
            assert_eq!(marks(&found), expected, "{line}: {found:?}");
        }
    }

    /// <https://github.com/pytorch/pytorch/issues/79388>
    #[test]
    fn a_meeting_place_where_nobody_listens() {
        for (line, variables, expected) in [
            ("torchrun --master-addr=127.0.0.1 x.py", &[][..], "E"),
            ("torchrun --master_addr localhost x.py", &[], "E"),
            ("torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 x.py", &[], "E"),
            ("torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.1.1:29400 x.py", &[], "E"),
            ("torchrun --rdzv-backend=c10d --rdzv-endpoint=n2:29400 x.py", &[], ""),
            ("torchrun --rdzv-backend=etcd-v2 --rdzv-endpoint=localhost:2379 x.py", &[], ""),
            ("torchrun --master-addr=n2 x.py", &[], "E"),
            ("torchrun --master-addr=n1 x.py", &[], ""),
            ("torchrun --master-addr=n1-ib0 x.py", &[], ""),
            ("torchrun x.py", &[("PET_MASTER_ADDR", "127.0.0.1")], "Ew"),
            ("torchrun x.py", &[("PET_MASTER_ADDR", "n2")], "Ew"),
            ("torchrun x.py", &[("PET_MASTER_ADDR", "n1")], ""),
            ("torchrun x.py", &[("PET_MASTER_ADDR", "n1-ib0")], "w"),
            ("torchrun --master-addr=n1 x.py", &[("PET_MASTER_ADDR", "n2")], ""),
        ] {
            let mut found = found("n[1-2]", "1", 1, &words(line), variables, "");
            if expected == "Ew" {
                // A refusal names errors only.
                found.truncate(1);
                assert_eq!(marks(&found), "E", "{line} {variables:?}: {found:?}");
            } else {
                assert_eq!(marks(&found), expected, "{line} {variables:?}: {found:?}");
            }
        }
    }

    #[test]
    fn launchers_that_need_flags_are_told() {
        for (line, expected) in [
            ("accelerate launch x.py", "w"),
            ("accelerate launch --config_file c.yaml x.py", "w"),
            ("accelerate launch --config_file c.yaml --machine_rank $NODE_RANK x.py", ""),
            (
                "accelerate launch --num_machines 2 --num_processes 16 --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT x.py",
                "",
            ),
            ("composer x.py", "w"),
            ("composer --world_size 16 x.py", ""),
            ("deepspeed x.py", "w"),
            ("deepspeed --no_ssh --node_rank $NODE_RANK x.py", ""),
            ("colossalai run x.py", "w"),
        ] {
            let found = found("n[1-2]", "1", 1, &["bash", "-c", line], &[], "");
            assert_eq!(marks(&found), expected, "{line}: {found:?}");
            assert_eq!(marks(&super::tests::found("n1", "1", 0, &["bash", "-c", line], &[], "")), "", "{line}");
        }
        let accelerate = found("n[1-2]", "1", 1, &words("accelerate launch --num_machines 2 x.py"), &[], "");
        let cure = &accelerate[0].cure;
        assert!(cure.contains("--machine_rank $NODE_RANK") && !cure.contains("num_machines"), "{cure}");
    }

    #[test]
    fn every_finding_is_one_line_without_words_of_the_command() {
        let secret = "hf_secret";
        for line in [
            format!("torchrun --master-addr={secret} --nnodes=1 x.py"),
            format!("torchrun --rdzv-endpoint={secret} --node-rank=0 x.py"),
            format!("accelerate launch --num_machines {secret} x.py"),
            format!("torchrun --nnodes={secret} --standalone x.py"),
        ] {
            for warning in found("n[1-2]", "1", 1, &words(&line), &[], "checks=warn") {
                let text = format!("{}{}", warning.message, warning.cure);
                assert!(!text.contains(secret) && !text.contains('\n'), "{text}");
            }
        }
    }
}
