//! PET_*: what torchrun takes for flags that it is not given, so that one
//! launcher on each node needs none (torch/distributed/argparse_util.py). It
//! reads neither MASTER_ADDR nor NODE_RANK; without all of this each node's
//! would be a training of its own at 127.0.0.1:29500.

use std::net::IpAddr;

use crate::config::{Rendezvous, Settings};
use crate::facts::{Step, hostlist};

use super::binding::visible;
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

/// HOST:PORT at which the launchers meet by the user's own flags or variables; `None`
/// where they take ours.
pub(super) fn own_endpoint(facts: &Facts, plan: &StepPlan, marks: &Marks) -> Option<String> {
    let launcher = launcher::find(facts.command);
    let launcher = launcher.as_ref();
    let users = |name: &str| precedence::given(facts, marks, name).map(|(value, _)| value);
    let given = |flag: &str, variable: &str| {
        launcher.and_then(|launcher| launcher.value(flag)).map(String::from).or_else(|| users(variable))
    };
    // What a shell puts in is ours.
    let own = |text: &String| !text.is_empty() && !text.contains('$');
    if let Some(endpoint) = given("rdzv-endpoint", "PET_RDZV_ENDPOINT") {
        return Some(endpoint).filter(own);
    }
    let (host, port) = (plan.master_addr.clone()?, plan.master_port?.to_string());
    let theirs = (
        given("master-addr", "PET_MASTER_ADDR").filter(own).unwrap_or_else(|| host.clone()),
        given("master-port", "PET_MASTER_PORT").filter(own).unwrap_or_else(|| port.clone()),
    );
    (theirs != (host, port)).then(|| format!("{}:{}", theirs.0, theirs.1))
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

/// How many GPUs CUDA sees by this CUDA_VISIBLE_DEVICES, if all of them are there.
pub(super) fn listed(list: &str) -> u32 {
    u32::try_from(visible::entries(list).len()).unwrap_or(u32::MAX)
}

/// Whether the environment asks torchrun for a training on this node alone.
pub(super) fn standalone(value: &str) -> bool {
    value.trim().parse::<i64>().is_ok_and(|number| number != 0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::World;
    use super::super::{Plan, Refusal};
    use super::*;

    /// One task on each of these nodes, in the place `rank`.
    fn world(nodes: &str, rank: u32, command: &str) -> World {
        let mut world = World::new(nodes, "1", rank);
        world.command = command.split_whitespace().map(String::from).collect();
        world
    }

    fn pet(plan: &Plan) -> Vec<(String, String)> {
        let variables = plan.env.iter().filter(|variable| variable.name.starts_with("PET_"));
        let mut all: Vec<_> = variables.map(|variable| (variable.name.clone(), variable.value.clone())).collect();
        all.sort();
        all
    }

    fn left<'a>(plan: &'a Plan, name: &str) -> &'a str {
        plan.left.iter().find(|note| note.name == name).map_or("", |note| note.why.as_str())
    }

    #[test]
    fn torchrun_needs_no_flag() {
        let plan = world("n[2,10]", 1, "torchrun train.py").export(&[("CUDA_VISIBLE_DEVICES", "0,1,2,3")]);
        let plan = plan.plan("port=20001").unwrap();
        let expected = [
            ("PET_MASTER_ADDR", "n2"),
            ("PET_MASTER_PORT", "20001"),
            ("PET_NNODES", "2"),
            ("PET_NODE_RANK", "1"),
            ("PET_NPROC_PER_NODE", "4"),
            ("PET_RDZV_BACKEND", "static"),
            ("PET_RDZV_ID", "44.0"),
        ];
        assert_eq!(pet(&plan), expected.map(|(name, value)| (name.to_string(), value.to_string())));
        assert_eq!(plan.value("MASTER_ADDR"), Some("n2"));
        assert_eq!(plan.value("NODE_RANK"), Some("1"));
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"] {
            assert_eq!(plan.value(name), None, "{name}");
        }
        assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    }

    #[test]
    fn what_another_launcher_left_is_removed() {
        let plan = world("n[1-2]", 1, "torchrun train.py")
            .export(&[("RANK", "3"), ("NODE_RANK", "0"), ("TORCHELASTIC_USE_AGENT_STORE", "True")])
            .plan("")
            .unwrap();
        let removed: Vec<&str> = plan.unset.iter().map(|note| note.name.as_str()).collect();
        assert_eq!(removed, ["RANK", "TORCHELASTIC_USE_AGENT_STORE"]);
        assert_eq!(plan.value("NODE_RANK"), Some("1"));
    }

    #[test]
    fn native_ranks_get_none_of_it() {
        for (spec, command) in [("launch=native", "torchrun train.py"), ("", "python train.py"), ("launch=shell", "x")]
        {
            assert_eq!(pet(&world("n[1-2]", 0, command).plan(spec).unwrap()), [], "{spec} {command}");
        }
    }

    /// Node 0 is where rank 0's task is, also where the layout is the user's.
    #[test]
    fn node_0_is_where_the_address_points_to() {
        let mut world = world("n[1-3]", 0, "torchrun train.py");
        world.step.arbitrary = true;
        (world.step.node_rank, world.step.node, world.rank0.host) = (1, "n2".into(), Some("n2".into()));
        let plan = world.plan("").unwrap();
        assert_eq!((plan.value("PET_NODE_RANK"), plan.value("PET_MASTER_ADDR")), (Some("0"), Some("n2")));
    }

    #[test]
    fn as_many_ranks_as_gpus_are_visible() {
        // CUDA C++ programming guide, CUDA environment variables: the list ends at
        // the first invalid index; MIG devices: one per process.
        for (list, expected) in [
            ("0,1,2,3", Some("4")),
            ("3", Some("1")),
            ("GPU-5ebe9f43,GPU-ac33420d", Some("2")),
            ("0,1,-1,2", Some("2")),
            ("0, 1", Some("2")),
            ("0,,1", Some("1")),
            ("0,0", None),
            ("MIG-c7384736,MIG-5ebe9f43", Some("1")),
            ("", None),
            ("-1", None),
            ("NoDevFiles", None),
            ("void", None),
        ] {
            let plan = world("n[1-2]", 0, "torchrun x.py").export(&[("CUDA_VISIBLE_DEVICES", list)]).plan("").unwrap();
            assert_eq!(plan.value("PET_NPROC_PER_NODE"), expected, "{list:?}");
            assert_eq!(expected.is_none(), left(&plan, "PET_NPROC_PER_NODE").contains("no GPU"), "{list:?}");
        }
        let by_slurm = world("n[1-2]", 0, "torchrun x.py").export(&[("SLURM_GPUS_ON_NODE", "8")]).plan("").unwrap();
        assert_eq!(by_slurm.value("PET_NPROC_PER_NODE"), Some("8"));
        let mut by_driver = world("n[1-2]", 0, "torchrun x.py");
        by_driver.node.gpu_models = vec!["NVIDIA H100 80GB HBM3".into(); 2];
        assert_eq!(by_driver.plan("").unwrap().value("PET_NPROC_PER_NODE"), Some("2"));
    }

    #[test]
    fn threads_are_those_of_one_of_the_node_s_ranks() {
        for (command, ranks) in [
            ("torchrun x.py", 4),
            ("torchrun --nproc-per-node=2 x.py", 2),
            ("torchrun --nproc_per_node gpu x.py", 4),
            ("torchrun --nproc-per-node=cpu x.py", 32),
        ] {
            let mut world = world("n[1-2]", 0, command).export(&[("CUDA_VISIBLE_DEVICES", "0,1,2,3")]);
            world.task.cpus = Some(32);
            let plan = world.plan("").unwrap();
            assert_eq!(plan.value("OMP_NUM_THREADS"), Some((32 / ranks).to_string().as_str()), "{command}");
        }
    }

    #[test]
    fn the_user_s_variables_are_kept() {
        let user = [("PET_NPROC_PER_NODE", "2"), ("PET_MASTER_PORT", "29500"), ("PET_MAX_RESTARTS", "3")];
        let plan = world("n[1-2]", 1, "torchrun x.py").export(&user).plan("").unwrap();
        for (name, _) in user {
            assert_eq!(plan.value(name), None, "{name}");
        }
        assert!(left(&plan, "PET_MASTER_PORT").contains("yours"), "{plan:?}");
    }

    #[test]
    fn the_plan_says_what_the_command_s_flags_replace() {
        let command = "torchrun --nnodes=2 --nproc_per_node=3 --master-port 29500 --rdzv-id=x train.py --node-rank=7";
        let plan = world("n[1-2]", 1, command).export(&[("SLURM_GPUS_ON_NODE", "8")]).plan("port=20001").unwrap();
        for (name, flag, ours) in [
            ("PET_NNODES", "--nnodes ", "2"),
            ("PET_NPROC_PER_NODE", "--nproc-per-node ", "8"),
            ("PET_MASTER_PORT", "--master-port ", "20001"),
            ("PET_RDZV_ID", "--rdzv-id ", "44.0"),
        ] {
            assert_eq!(plan.value(name), None, "{name}");
            let why = left(&plan, name);
            assert!(why.contains(flag) && why.contains(ours), "{name}: {why}");
        }
        assert_eq!(plan.value("PET_NODE_RANK"), Some("1"));
        // A later command of the text may lack the flags.
        let mut text = world("n[1-2]", 1, "");
        text.command = vec!["bash".into(), "-c".into(), "torchrun --nnodes=2 a.py && torchrun b.py".into()];
        assert_eq!(text.plan("").unwrap().value("PET_NNODES"), Some("2"));
    }

    #[test]
    fn c10d_on_request_by_option_flag_or_variable() {
        let c10d = |rank, command: &str, variables: &[(&str, &str)], spec: &str| {
            let plan = world("n[1-2]", rank, command).export(variables).plan(&format!("port=20001,{spec}")).unwrap();
            let value = |name: &str| plan.value(name).unwrap_or("-").to_string();
            [value("PET_RDZV_BACKEND"), value("PET_RDZV_ENDPOINT"), value("PET_RDZV_CONF"), value("PET_MASTER_ADDR")]
        };
        let conf = |host: &str| format!("is_host={host},join_timeout=1800,read_timeout=600");
        for rank in [0, 1] {
            let conf = conf(if rank == 0 { "1" } else { "0" });
            let full = |backend: &str| [backend.into(), "n1:20001".into(), conf.clone(), "-".into()];
            assert_eq!(c10d(rank, "torchrun x.py", &[], "rdzv=c10d"), full("c10d"));
            assert_eq!(c10d(rank, "torchrun --rdzv_backend c10d x.py", &[], ""), full("-"));
            assert_eq!(c10d(rank, "torchrun x.py", &[("PET_RDZV_BACKEND", "c10d")], ""), full("-"));
            // It has no other.
            assert_eq!(c10d(rank, "ft_launcher x.py", &[], ""), full("c10d"));
            // The option stands above the variable.
            let static_ = c10d(rank, "torchrun x.py", &[("PET_RDZV_BACKEND", "c10d")], "rdzv=static");
            assert_eq!((static_[0].as_str(), static_[3].as_str()), ("static", "n1"));
        }
        let keys = c10d(1, "torchrun x.py", &[("PET_RDZV_CONF", "join_timeout=60,foo=1")], "rdzv=c10d");
        assert_eq!(keys[2], "join_timeout=60,foo=1,is_host=0,read_timeout=600");
    }

    /// <https://github.com/pytorch/pytorch/issues/79388>: the endpoint's forms on
    /// its own node, which torch compares with the host's own names.
    #[test]
    fn exactly_one_node_hosts_the_store() {
        for (endpoint, hosts) in [
            ("node001:29400", [Some(true), Some(false)]),
            ("node002:29400", [Some(false), Some(true)]),
            ("node002", [Some(false), Some(true)]),
            ("$MASTER_ADDR:$MASTER_PORT", [Some(true), Some(false)]),
            // Another name or address of whichever node: torch finds out.
            ("node001.cluster.example:29400", [None, None]),
            ("192.0.2.1:29400", [None, None]),
            ("node001-ib0:29400", [None, None]),
            ("[fd00::1]:29400", [None, None]),
        ] {
            for (rank, expected) in [0, 1].into_iter().zip(hosts) {
                let world = world("node[001-002]", rank, &format!("torchrun --rdzv-endpoint={endpoint} x.py"));
                let plan = world.plan("rdzv=c10d").unwrap();
                let conf = plan.value("PET_RDZV_CONF").unwrap();
                let says =
                    if conf.contains("is_host=1") { Some(true) } else { conf.contains("is_host=0").then_some(false) };
                assert_eq!(says, expected, "{endpoint} on {rank}");
            }
        }
        // The step's own address, whichever name it has.
        for master in ["192.0.2.1", "node001-ib0"] {
            let mut world = world("node[001-002]", 0, &format!("torchrun --rdzv-endpoint={master}:29400 x.py"));
            world.resolution = crate::facts::network::Resolution::Found(vec!["192.0.2.1".parse().unwrap()]);
            let plan = world.plan(&format!("rdzv=c10d,master={master}")).unwrap();
            assert!(plan.value("PET_RDZV_CONF").unwrap().starts_with("is_host=1,"), "{master}");
        }
        for (spec, at) in [("", "PET_MASTER_ADDR"), ("rdzv=c10d", "PET_RDZV_ENDPOINT")] {
            // Without a name for MASTER_ADDR, Slurm's address is taken.
            let mut world = world("n[1-2]", 1, "torchrun x.py");
            world.resolution = crate::facts::network::Resolution::Failed("unknown".into());
            world.rank0.address = Some("fd00::1".into());
            let plan = world.plan(spec).unwrap();
            assert!(plan.value(at).unwrap().starts_with("[fd00::1]"), "{plan:?}");
        }
    }

    #[test]
    fn the_host_of_an_endpoint() {
        for (endpoint, host) in [
            ("n1", "n1"),
            ("n1:29400", "n1"),
            (" n1:29400 ", "n1"),
            ("[fd00::1]:29400", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
            ("fd00::1", "fd00::1"),
            ("$MASTER_ADDR:$MASTER_PORT", "$MASTER_ADDR:$MASTER_PORT"),
            ("", ""),
        ] {
            assert_eq!(host_of(endpoint), host, "{endpoint}");
        }
    }

    #[test]
    fn launchers_that_do_not_read_pet() {
        for command in ["deepspeed x.py", "composer x.py", "colossalai run x.py"] {
            let plan = world("n[1-2]", 1, command).plan("").unwrap();
            assert_eq!(pet(&plan), [], "{command}");
            assert!(!left(&plan, "PET_NNODES and the others").is_empty(), "{command}");
            // What composer reads, and what others can be told.
            assert_eq!((plan.value("NODE_RANK"), plan.value("MASTER_ADDR")), (Some("1"), Some("n1")), "{command}");
        }
    }

    #[test]
    fn a_step_inside_an_agent_s_step_takes_its_values_not_for_the_user_s() {
        let outer = world("n[1-4]", 3, "torchrun x.py").plan("rdzv=c10d").unwrap();
        let mut inner = world("n[1-2]", 1, "torchrun x.py");
        inner.step.step_id = 1;
        for variable in &outer.env {
            inner.environment.set(&variable.name, &variable.value);
        }
        let plan = inner.plan("").unwrap();
        assert_eq!(plan.value("PET_NNODES"), Some("2"));
        assert_eq!(plan.value("PET_NODE_RANK"), Some("1"));
        assert_eq!(plan.value("PET_RDZV_ID"), Some("44.1"));
        let removed: Vec<&str> = plan.unset.iter().map(|note| note.name.as_str()).collect();
        assert!(removed.contains(&"PET_RDZV_ENDPOINT") && removed.contains(&"PET_RDZV_CONF"), "{removed:?}");
        assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    }

    #[test]
    fn a_launcher_that_cannot_start_right_is_refused() {
        let refused = world("n[1-2]", 0, "torchrun --standalone x.py").plan("");
        assert!(matches!(refused, Err(Refusal::Checks(_))), "{refused:?}");
    }
}
