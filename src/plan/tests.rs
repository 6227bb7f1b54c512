//! Tables and properties of whole plans.

use std::collections::HashSet;
use std::net::IpAddr;

use super::rendezvous::{DEFAULT_PORTS, sequence, wanted};
use super::*;
use crate::config::{PortRange, Source};
use crate::facts::task::FileValue;

/// How often what chance decides is tried: PALINGENESIS_SOAK, else once.
pub(crate) fn rounds() -> usize {
    std::env::var("PALINGENESIS_SOAK").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

/// A step's facts, to be changed by each test.
pub(crate) struct World {
    pub step: Step,
    pub environment: Environment,
    pub command: Vec<String>,
    pub node: NodeFacts,
    pub rank0: Rank0,
    pub resolution: Resolution,
    pub interfaces: Vec<Interface>,
    pub task: TaskFacts,
    pub submitted: Option<Environment>,
    pub site: Option<SiteView>,
    pub launched: Option<u64>,
}

impl World {
    /// Rank `rank` of `tasks` on `nodes`, in job 44, step 0.
    pub fn new(nodes: &str, tasks: &str, rank: u32) -> World {
        World {
            step: Step::described(nodes, tasks, rank, 44, 0).unwrap(),
            environment: Environment::default(),
            command: vec!["python3".into(), "train.py".into()],
            node: NodeFacts::default(),
            rank0: Rank0::default(),
            resolution: Resolution::NotTried,
            interfaces: Vec::new(),
            task: TaskFacts::default(),
            submitted: None,
            site: None,
            launched: None,
        }
    }

    pub fn export(mut self, pairs: &[(&str, &str)]) -> World {
        for (name, value) in pairs {
            self.environment.set(*name, *value);
        }
        self
    }

    pub fn resolves(mut self, addresses: &[&str]) -> World {
        self.resolution = Resolution::Found(addresses.iter().map(|a| a.parse().unwrap()).collect());
        self
    }

    pub fn plan(&self, spec: &str) -> Result<Plan, Refusal> {
        self.plan_with(&Settings::parse(spec, Source::Option).unwrap())
    }

    pub fn plan_with(&self, settings: &Settings) -> Result<Plan, Refusal> {
        let facts = Facts {
            step: &self.step,
            environment: &self.environment,
            command: &self.command,
            node: &self.node,
            rank0: &self.rank0,
            resolution: &self.resolution,
            interfaces: &self.interfaces,
            task: &self.task,
            submitted: self.submitted.as_ref(),
            site: self.site.as_ref(),
            port: None,
            store_key: None,
            launched: self.launched,
        };
        plan(&facts, settings)
    }

    #[track_caller]
    pub fn refusal(&self, spec: &str) -> String {
        let text = self.plan(spec).expect_err(spec).to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    }
}

fn left<'a>(plan: &'a Plan, name: &str) -> Option<&'a str> {
    plan.left.iter().find(|note| note.name == name).map(|note| note.why.as_str())
}

fn removed(plan: &Plan) -> Vec<&str> {
    plan.unset.iter().map(|note| note.name.as_str()).collect()
}

#[test]
fn every_rank_of_an_uneven_step_has_its_place() {
    // 8 + 8 + 4 ranks in blocks: node, local rank and local world size by hand.
    for (rank, node, local, of) in
        [(0, 0, 0, 8), (7, 0, 7, 8), (8, 1, 0, 8), (15, 1, 7, 8), (16, 2, 0, 4), (19, 2, 3, 4)]
    {
        let plan = World::new("gpu[01-03]", "8(x2),4", rank).plan("").unwrap();
        let expected = [
            ("RANK", rank),
            ("WORLD_SIZE", 20),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", of),
            ("NODE_RANK", node),
            ("GROUP_RANK", node),
        ];
        for (name, value) in expected {
            assert_eq!(plan.value(name), Some(value.to_string().as_str()), "{name} of rank {rank}");
        }
        assert_eq!(plan.value("MASTER_ADDR"), Some("gpu01"));
    }
}

#[test]
fn each_value_says_who_decided_it_and_why() {
    let plan = World::new("n[1-2]", "1(x2)", 0).export(&[("NCCL_DEBUG", "INFO")]).plan("port=20001").unwrap();
    let origin = |name: &str| plan.env.iter().find(|variable| variable.name == name).map(|variable| variable.origin);
    assert_eq!(origin("RANK"), Some(Origin::Step));
    assert_eq!(origin("MASTER_PORT"), Some(Origin::Option));
    assert_eq!(origin("NCCL_IB_TIMEOUT"), Some(Origin::Profile));
    assert_eq!(origin("NCCL_DEBUG"), None);
    assert!(left(&plan, "NCCL_DEBUG").unwrap().contains("yours"));
    assert!(plan.env.iter().all(|variable| !variable.why.is_empty() && !variable.why.contains('\n')));
    // One decision per variable.
    let names: HashSet<&str> = plan.env.iter().map(|variable| variable.name.as_str()).collect();
    assert_eq!(names.len(), plan.env.len());
}

#[test]
fn the_default_profile_is_small_and_right() {
    let several = World::new("n[1-2]", "1(x2)", 0).plan("").unwrap();
    for (name, value) in [
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_IB_TIMEOUT", "22"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ] {
        assert_eq!(several.value(name), Some(value), "{name}");
    }
    let single = World::new("n1", "8", 0).plan("").unwrap();
    assert_eq!(single.value("NCCL_IB_TIMEOUT"), None);
    assert!(left(&single, "NCCL_IB_TIMEOUT").is_some() && left(&single, "TORCH_NCCL_ASYNC_ERROR_HANDLING").is_some());
    assert_eq!(single.value("NCCL_DEBUG"), Some("WARN"));
}

#[test]
fn the_users_values_are_kept_also_empty_ones() {
    for name in [
        "NCCL_DEBUG",
        "NCCL_IB_TIMEOUT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
    ] {
        for value in ["", "7"] {
            for nodes in ["n1", "n[1-2]"] {
                // c10d throws at an empty number, and that is an error of its own.
                let plan = World::new(nodes, "1", 0).export(&[(name, value)]).plan("c10d-bool=warn").unwrap();
                assert_eq!(plan.value(name), None, "{name}={value}");
                assert!(left(&plan, name).unwrap().contains("yours"), "{name}={value}");
                assert!(!removed(&plan).contains(&name));
            }
        }
    }
}

#[test]
fn connections_by_hardware_profile_and_command() {
    let connections = |models: &[&str], command: &str, spec: &str| {
        let mut world = World::new("n[1-2]", "1", 0);
        world.node.gpu_models = models.iter().map(ToString::to_string).collect();
        world.command = command.split_whitespace().map(String::from).collect();
        let plan = world.plan(spec).unwrap();
        assert!(
            plan.value("CUDA_DEVICE_MAX_CONNECTIONS").is_some() != left(&plan, "CUDA_DEVICE_MAX_CONNECTIONS").is_some()
        );
        plan.value("CUDA_DEVICE_MAX_CONNECTIONS").map(String::from)
    };
    let table = [
        (&["NVIDIA H100 80GB HBM3"][..], "python pretrain_gpt.py", "", Some("1")),
        (&["NVIDIA B200"], "python pretrain_gpt.py", "", Some("32")),
        (&["NVIDIA B200"], "python train.py", "megatron", Some("32")),
        (&[], "python train.py", "", Some("1")),
        (&[], "python train_fsdp.py", "", None),
        (&[], "python train_fsdp.py", "megatron", Some("1")),
        (&["NVIDIA B200"], "python train.py --deepspeed ds.json", "", None),
        (&[], "python train.py", "fsdp", None),
        (&[], "python train.py", "deepspeed", None),
        (&[], "python train.py", "jax", None),
    ];
    for (models, command, spec, expected) in table {
        assert_eq!(connections(models, command, spec).as_deref(), expected, "{models:?} {command} {spec}");
    }
}

#[test]
fn inherited_rank_variables_are_replaced_with_a_word() {
    let world = World::new("n[1-2]", "1", 1).export(&[("RANK", "3"), ("WORLD_SIZE", "2"), ("ROLE_RANK", "3")]);
    let plan = world.plan("").unwrap();
    assert_eq!(plan.value("RANK"), Some("1"));
    assert_eq!(plan.warnings.len(), 1);
    assert_eq!(plan.warnings[0].id, "ranks-stale");
    // WORLD_SIZE is what it should be: nothing to say about it.
    assert!(plan.warnings[0].message.contains("RANK=3") && !plan.warnings[0].message.contains("WORLD_SIZE"));
    assert_eq!(removed(&plan), ["ROLE_RANK"]);
}

#[test]
fn an_agent_s_store_is_never_inherited() {
    // torch/distributed/rendezvous.py: with TORCHELASTIC_USE_AGENT_STORE=True
    // every rank is a client.
    for spec in ["", "launch=shell"] {
        let world = World::new("n[1-2]", "1", 1).export(&[
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "x"),
            ("TORCH_HOME", "/h"),
        ]);
        let plan = world.plan(spec).unwrap();
        assert_eq!(removed(&plan), ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"]);
        // Ranks are told, a shell has nothing to lose.
        let told: Vec<&str> = plan.warnings.iter().map(|warning| warning.message.as_str()).collect();
        assert_eq!(told.len(), usize::from(spec.is_empty()), "{told:?}");
        assert!(told.iter().all(|message| message.contains("TORCHELASTIC_USE_AGENT_STORE")), "{told:?}");
    }
}

#[test]
fn a_shell_gets_the_environment_and_no_ranks() {
    let world = World::new("n[1-2]", "1", 0).export(&[("RANK", "3"), ("MASTER_ADDR", "elsewhere")]);
    let plan = world.plan("launch=shell").unwrap();
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ] {
        assert_eq!(plan.value(name), None, "{name}");
    }
    assert_eq!(plan.value("NCCL_DEBUG"), Some("WARN"));
    // The user's MASTER_ADDR is not ours to remove.
    assert_eq!(removed(&plan), ["RANK"]);
}

#[test]
fn a_step_inside_a_step_takes_nothing_of_the_outer_ones_for_the_users() {
    let outer = World::new("n[1-4]", "1", 3).plan("port=25000").unwrap();
    let mut inner = World::new("n[2-3]", "1", 0);
    inner.step.step_id = 1;
    for variable in &outer.env {
        inner.environment.set(&variable.name, &variable.value);
    }
    inner.environment.set("NCCL_DEBUG", "INFO"); // changed in between: the user's
    let plan = inner.plan("").unwrap();
    assert_eq!(plan.value("MASTER_ADDR"), Some("n2"));
    assert_ne!(plan.value("MASTER_PORT"), Some("25000"));
    assert_eq!(plan.value("RANK"), Some("0"));
    assert_eq!(plan.value("NCCL_IB_TIMEOUT"), Some("22"));
    assert!(left(&plan, "NCCL_DEBUG").unwrap().contains("yours"));
    assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    // On one node the outer step's network value goes.
    let mut single = World::new("n2", "1", 0);
    single.environment = inner.environment.clone();
    assert!(removed(&single.plan("").unwrap()).contains(&"NCCL_IB_TIMEOUT"));
    // And a shell inside keeps no rendezvous of the outer step.
    assert!(removed(&inner.plan("launch=shell").unwrap()).contains(&"MASTER_ADDR"));
}

#[test]
fn planning_again_in_the_same_step_gives_the_same() {
    // `palingenesis explain` inside a task of an arbitrary layout: only srun knew
    // where rank 0 is.
    let mut world = World::new("n[1-3]", "1", 2);
    world.step.arbitrary = true;
    world.rank0.host = Some("n2".into());
    let first = world.plan("ports=21000-21999").unwrap();
    for variable in &first.env {
        world.environment.set(&variable.name, &variable.value);
    }
    world.rank0 = Rank0::default();
    let spec = world.environment.get("PALINGENESIS_SPEC").unwrap().to_string();
    let again = world.plan(&spec).unwrap();
    for variable in &first.env {
        assert_eq!(again.value(&variable.name), Some(variable.value.as_str()), "{}", variable.name);
    }
}

#[test]
fn rank_0_s_host_is_what_srun_says() {
    let mut world = World::new("n[1-3]", "1", 2);
    world.rank0.host = Some("n2".into());
    assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("n2"));
    world.rank0.host = None;
    assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("n1"));
    world.step.arbitrary = true;
    assert!(world.refusal("").contains("master="));
    // Rank 0 knows where it is, but the others would wait for it.
    let mut rank0 = World::new("n[1-3]", "1", 0);
    rank0.step.arbitrary = true;
    assert!(rank0.refusal("").contains("arbitrary"));
    rank0.rank0.host = Some("n3".into());
    assert!(rank0.refusal("").contains("rank 0 runs on n1"));
    // And that the others, told nothing, would look for it on the first node.
    let mut elsewhere = World::new("n[1-3]", "1", 0);
    elsewhere.step.node = "n2".into();
    assert!(elsewhere.refusal("").contains("rank 0 runs on n2"));
}

#[test]
fn the_first_node_of_a_het_step_is_its_first_component_s() {
    // The list is sorted; what srun can say reaches one component's tasks only.
    for rank in [0, 1] {
        let mut world = World::new("n[1-3]", "1", rank);
        world.step.het = true;
        if rank == 0 {
            world.step.node = "n3".into();
        }
        world.step.components = vec!["n3".into(), "n[1-2]".into()];
        assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("n3"), "rank {rank}");
        // A first component outside the step.
        world.step.components = vec!["n9".into(), "n3".into(), "n[1-2]".into()];
        assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("n3"), "rank {rank}");
        // Several programs in one allocation: nothing tells where rank 0 is but
        // itself, so the user may.
        world.step.components.clear();
        assert_eq!(world.plan("master=n3").unwrap().value("MASTER_ADDR"), Some("n3"), "rank {rank}");
    }
}

#[test]
fn a_name_that_does_not_resolve_gives_way_to_slurms_address() {
    let mut world = World::new("n[1-2]", "1", 1);
    world.resolution = Resolution::Failed("Name or service not known".into());
    let text = world.refusal("");
    assert!(text.contains("n1 does not resolve (Name or service not known) on n2"), "{text}");
    world.rank0.address = Some("10.0.0.1".into());
    assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("10.0.0.1"));
    // One node needs no network at all.
    let mut single = World::new("n1", "2", 1);
    single.resolution = Resolution::Failed("Name or service not known".into());
    assert_eq!(single.plan("").unwrap().value("MASTER_ADDR"), Some("127.0.0.1"));
    // With a suffix the node's plain address would be the wrong network.
    assert!(world.refusal("suffix=-ib0").contains("n1-ib0"));
}

#[test]
fn a_name_that_is_loopback_elsewhere_gives_way_to_slurms_address() {
    let mut world = World::new("n[1-2]", "1", 1).resolves(&["127.0.1.1"]);
    world.rank0.address = Some("10.0.0.1".into());
    assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some("10.0.0.1"));
    // On rank 0's own node 127.0.1.1 is itself.
    let mut own = World::new("n[1-2]", "1", 0).resolves(&["127.0.1.1"]);
    own.rank0.address = Some("10.0.0.1".into());
    assert_eq!(own.plan("").unwrap().value("MASTER_ADDR"), Some("n1"));
}

#[test]
fn the_users_master_is_kept_or_refused_never_replaced() {
    let user = |addr: &str| World::new("n[1-2]", "1", 1).export(&[("MASTER_ADDR", addr)]).resolves(&["10.0.0.9"]);
    assert_eq!(user("10.0.0.9").plan("").unwrap().value("MASTER_ADDR"), Some("10.0.0.9"));
    assert_eq!(user("n1").plan("").unwrap().value("MASTER_ADDR"), Some("n1"));
    assert_eq!(user("n1-ib0").plan("").unwrap().value("MASTER_ADDR"), Some("n1-ib0"));
    for (addr, expected) in [
        ("127.0.0.1", "loopback"),
        ("localhost", "loopback"),
        ("::1", "loopback"),
        ("0.0.0.0", "loopback"),
        ("n2", "rank 0 runs on n1"),
        ("", "MASTER_ADDR="),
        ("n1:29500", "port"),
    ] {
        let text = user(addr).refusal("");
        assert!(text.contains(expected) && text.contains("MASTER_ADDR"), "{addr}: {text}");
    }
    // A node of the job outside the step.
    let mut outside = user("n7");
    outside.step.job_node_list = Some("n[1-9]".into());
    assert!(outside.refusal("").contains("rank 0 runs on n1"));
    // The option is judged the same, and beats the variable.
    assert!(user("10.0.0.9").refusal("master=n2").contains("master=n2"));
    assert_eq!(user("10.0.0.9").plan("master=n1").unwrap().value("MASTER_ADDR"), Some("n1"));
    let mut unresolved = user("nosuch");
    unresolved.resolution = Resolution::Failed("Name or service not known".into());
    unresolved.rank0.address = Some("10.0.0.1".into());
    assert!(unresolved.refusal("").contains("MASTER_ADDR=nosuch does not resolve on n2"));
    // Loopback is fine on one node.
    let single = World::new("n1", "2", 1).export(&[("MASTER_ADDR", "127.0.0.1")]);
    assert_eq!(single.plan("").unwrap().value("MASTER_ADDR"), Some("127.0.0.1"));
}

#[test]
fn the_users_port_is_kept_or_refused() {
    let user = |port: &str| World::new("n[1-2]", "1", 1).export(&[("MASTER_PORT", port)]);
    let plan = user("29500").plan("").unwrap();
    assert_eq!((plan.value("MASTER_PORT"), &plan.step.ports[..]), (Some("29500"), &[29500][..]));
    assert_eq!(user("29500").plan("port=30000").unwrap().value("MASTER_PORT"), Some("30000"));
    for port in ["", "0", "80", "65536", "abc", "29500 ", "-1"] {
        assert!(user(port).refusal("").contains("MASTER_PORT"), "{port:?}");
    }
}

#[test]
fn a_port_the_kernel_may_give_away_is_told() {
    let mut world = World::new("n[1-2]", "1", 1);
    world.node.ephemeral_ports = Some((32768, 60999));
    assert!(world.plan("").unwrap().warnings.is_empty());
    let warned = world.plan("port=50000").unwrap();
    assert_eq!(warned.warnings[0].id, "port-range");
    world.node.ephemeral_ports = Some((15000, 65000));
    assert_eq!(world.plan("").unwrap().warnings.len(), 1);
}

#[test]
fn suffix_and_interface() {
    let mut world = World::new("node[7-8]", "1", 1).resolves(&["10.1.0.7"]);
    let plan = world.plan("suffix=-ib0").unwrap();
    assert_eq!(plan.value("MASTER_ADDR"), Some("node7-ib0"));
    // https://github.com/pytorch/pytorch/issues/73656: a site's names end in a letter.
    assert_eq!(world.plan("suffix=i").unwrap().value("MASTER_ADDR"), Some("node7i"));
    let interface =
        |name: &str, address: &str| Interface { name: name.into(), address: address.parse().unwrap(), prefix: 16 };
    world.interfaces =
        vec![interface("eth0", "192.168.0.8"), interface("ib0", "10.1.0.8"), interface("ib0", "169.254.0.8")];
    world.resolution = Resolution::Found(vec!["192.168.0.7".parse().unwrap(), "10.1.0.7".parse().unwrap()]);
    assert_eq!(world.plan("iface=ib0").unwrap().value("MASTER_ADDR"), Some("10.1.0.7"));
    assert_eq!(world.plan("iface=eth0").unwrap().value("MASTER_ADDR"), Some("192.168.0.7"));
    let text = world.refusal("iface=ib1");
    assert!(text.contains("eth0, ib0") && text.contains("node8"), "{text}");
    world.resolution = Resolution::Found(vec!["192.168.0.7".parse().unwrap()]);
    assert!(world.refusal("iface=ib0").contains("suffix="));
    // Slurm's own address is as good as a resolved one.
    world.rank0.address = Some("10.1.0.7".into());
    assert_eq!(world.plan("iface=ib0").unwrap().value("MASTER_ADDR"), Some("10.1.0.7"));
    // On rank 0's node its own address is known.
    let mut own = World::new("node[7-8]", "1", 0);
    own.interfaces = vec![interface("ib0", "169.254.0.7"), interface("ib0", "10.1.0.7")];
    assert_eq!(own.plan("iface=ib0").unwrap().value("MASTER_ADDR"), Some("10.1.0.7"));
}

#[test]
fn the_names_to_look_up() {
    let names = |spec: &str, environment: &Environment| {
        let step = Step::described("n[1-2]", "1", 1, 44, 0).unwrap();
        wanted(&step, &[], environment, &Settings::parse(spec, Source::Option).unwrap(), &Rank0::default())
    };
    let none = Environment::default();
    assert_eq!(names("", &none), ["n1"]);
    assert_eq!(names("suffix=i", &none), ["n1i"]);
    assert_eq!(names("iface=ib0", &none), ["n1-ib0", "n1"]);
    assert_eq!(names("master=x", &none), ["x"]);
    // A shell waits for no name.
    assert_eq!(names("launch=shell", &none), [""; 0]);
    let mut user = Environment::default();
    user.set("MASTER_ADDR", "y");
    assert_eq!(names("", &user), ["y"]);
}

#[test]
fn no_two_steps_of_a_job_and_no_two_near_jobs_share_a_port() {
    let ranges = [
        DEFAULT_PORTS,
        PortRange { low: 20000, high: 20000 },
        PortRange { low: 20000, high: 20009 },
        PortRange { low: 1024, high: 65535 },
        PortRange { low: 30000, high: 30996 },
    ];
    for range in ranges {
        let n = range.len();
        let first = |job: u32, step: u32| sequence(job, step, range)[0];
        for job in [1, 44, 999_999, u32::MAX] {
            let steps: HashSet<u16> = (0..n).map(|step| first(job, step)).collect();
            assert_eq!(steps.len(), n as usize, "steps of job {job} in {range}");
        }
        let jobs: HashSet<u16> = (1_000_000..1_000_000 + n).map(|job| first(job, 0)).collect();
        assert_eq!(jobs.len(), n as usize, "jobs in {range}");
        for (job, step) in [(1, 0), (1, 1), (77, 3), (u32::MAX, u32::MAX)] {
            let ports = sequence(job, step, range);
            assert!(ports.iter().all(|port| (range.low..=range.high).contains(port)));
            assert_eq!(ports.iter().collect::<HashSet<_>>().len(), ports.len());
            assert_eq!(ports.len(), 8.min(n as usize));
        }
    }
}

/// <https://github.com/awslabs/awsome-distributed-ai/pull/1172>: pairs that
/// collide under derivations in use.
#[test]
fn job_ids_that_collide_elsewhere_do_not_here() {
    for (a, b) in [(1500, 2500), (1_234_567, 2_234_567), (100_000, 104_536), (44, 45), (50_000, 60_000)] {
        assert_ne!(sequence(a, 0, DEFAULT_PORTS)[0], sequence(b, 0, DEFAULT_PORTS)[0], "{a} {b}");
    }
    // And never in the kernel's usual range for outgoing connections.
    assert!((0..100_000).all(|job| sequence(job, 0, DEFAULT_PORTS)[0] < 32768));
}

#[test]
fn all_ranks_agree_on_where_to_meet() {
    let meet = |rank| {
        let plan = World::new("n[1-3]", "3,1,2", rank).plan("").unwrap();
        (plan.step.master_addr, plan.step.ports)
    };
    assert!((1..6).all(|rank| meet(rank) == meet(0)));
}

#[test]
fn the_json_form_has_the_documented_keys() {
    let plan = World::new("n[1-2]", "1", 1).export(&[("RANK", "9")]).plan("").unwrap();
    let json = serde_json::to_value(&plan).unwrap();
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&json), ["binding", "env", "left", "step", "unset", "warnings"]);
    assert_eq!(keys(&json["env"][0]), ["name", "origin", "value", "why"]);
    assert_eq!(keys(&json["warnings"][0]), ["cure", "id", "message", "severity"]);
    assert_eq!(json["env"][0]["origin"], "step");
    assert_eq!(json["warnings"][0]["severity"], "warning");

    let mut world = World::new("n[1-2]", "1", 1).export(&[("NCCL_DEBUG", "INFO"), ("TORCHELASTIC_X", "1")]);
    world.command = vec!["train.toml".into()];
    let json = serde_json::to_value(world.plan("worker").unwrap()).unwrap();
    assert_eq!(keys(&json["unset"][0]), ["name", "why"]);
    assert!(json["left"].as_array().unwrap().iter().any(|note| keys(note) == ["name", "value", "why"]));
    assert_eq!(keys(&json["launch"]), ["argument", "how", "program", "why"]);
    let header = include_str!("../../include/palingenesis.h");
    for key in keys(&json["step"]) {
        assert!(header.contains(&key), "{key} is not in the header");
    }
}

#[test]
fn nothing_a_user_can_export_makes_planning_panic() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let names = ["RANK", "MASTER_ADDR", "MASTER_PORT", "PALINGENESIS_SET", "NCCL_DEBUG", "TORCHELASTIC_X", "ROLE_RANK"];
    for _ in 0..5000 * rounds() {
        let mut world = World::new("n[1-2]", "2", (next() % 4) as u32);
        for name in names {
            let length = next() % 12;
            let value: String = (0..length).map(|_| char::from((next() % 128) as u8)).collect();
            if next() % 3 > 0 {
                world.environment.set(name, value);
            }
        }
        let _ = world.plan("").map(|plan| crate::report::table(&plan)).map_err(|refusal| refusal.to_string());
    }
}

#[test]
fn addresses_in_all_forms_are_hosts() {
    for host in ["10.0.0.1", "fd00::1", "node-1.cluster.example", "NODE_1"] {
        let world = World::new("n[1-2]", "1", 1).export(&[("MASTER_ADDR", host)]);
        assert_eq!(world.plan("").unwrap().value("MASTER_ADDR"), Some(host));
    }
    assert!("fd00::1".parse::<IpAddr>().is_ok());
}

#[test]
fn options_stand_above_exported_variables_and_say_so() {
    let user = [("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "abc")];
    let table =
        [("suffix=-ib0,ports=24000-24099", "n1-ib0", 24000..=24099), ("master=n1,port=23000", "n1", 23000..=23000)];
    for (spec, addr, ports) in table {
        let plan = World::new("n[1-2]", "1", 1).export(&user).resolves(&["10.1.0.1"]).plan(spec).unwrap();
        assert_eq!(plan.value("MASTER_ADDR"), Some(addr), "{spec}");
        let port: u16 = plan.value("MASTER_PORT").unwrap().parse().unwrap();
        assert!(ports.contains(&port), "{spec}: {port}");
        let told: Vec<&str> = plan.warnings.iter().map(|warning| warning.id).collect();
        assert_eq!(told, ["variable-passed-over", "variable-passed-over"], "{spec}");
    }
    // A shell has no use for either.
    assert!(World::new("n[1-2]", "1", 1).export(&user).plan("launch=shell").is_ok());
}

#[test]
fn a_resolver_that_gives_no_answer_proves_nothing() {
    let silent = || Resolution::Silent("no answer within 20.0s".into());
    let mut user = World::new("n[1-2]", "1", 1).export(&[("MASTER_ADDR", "n1-ib0")]);
    user.resolution = silent();
    let plan = user.plan("").unwrap();
    assert_eq!(plan.value("MASTER_ADDR"), Some("n1-ib0"));
    assert_eq!(plan.warnings[0].id, "name-not-checked");
    let mut own = World::new("n[1-2]", "1", 1);
    own.resolution = silent();
    assert_eq!(own.plan("").unwrap().value("MASTER_ADDR"), Some("n1"));
    own.rank0.address = Some("10.0.0.1".into());
    assert_eq!(own.plan("").unwrap().value("MASTER_ADDR"), Some("10.0.0.1"));
}

#[test]
fn a_name_that_is_loopback_where_rank_0_is_not_is_refused() {
    let user = |rank| World::new("n[1-2]", "1", rank).export(&[("MASTER_ADDR", "head")]).resolves(&["127.0.1.1"]);
    let text = user(1).refusal("");
    assert!(text.contains("MASTER_ADDR=head") && text.contains("on n2"), "{text}");
    // On rank 0's own node it is itself, as Debian's installer maps it.
    assert_eq!(user(0).plan("").unwrap().value("MASTER_ADDR"), Some("head"));
    // Rank 0's own name likewise, where Slurm's address is not known.
    assert!(World::new("n[1-2]", "1", 1).resolves(&["127.0.1.1"]).refusal("").contains("loopback"));
}

#[test]
fn a_combined_step_whose_order_no_variable_shows_is_refused_by_every_rank_that_can_see_it() {
    // srun --palingenesis -w n3 a : -w n1 b in one allocation: node indices 0 and
    // 1, the list says n1, n3.
    let world = |rank: u32, node: &str| {
        let mut world = World::new("n[1,3]", "1", rank);
        world.step.het = true;
        world.step.node = node.into();
        world
    };
    assert!(world(0, "n3").refusal("").contains("master="));
    assert!(world(1, "n1").refusal("").contains("master="));
    assert_eq!(world(1, "n3").plan("").unwrap().value("MASTER_ADDR"), Some("n1"));
    assert_eq!(world(1, "n1").plan("master=n3").unwrap().value("MASTER_ADDR"), Some("n3"));
}

#[test]
fn no_word_of_the_command_is_printed() {
    let mut world = World::new("n[1-2]", "1", 0);
    world.command = vec!["bash".into(), "-c".into(), "HF_TOKEN=hf_secret deepspeed train.py".into()];
    let plan = world.plan("").unwrap();
    assert_eq!(left(&plan, "CUDA_DEVICE_MAX_CONNECTIONS").map(|why| why.contains("DeepSpeed")), Some(true));
    assert!(!crate::report::table(&plan).contains("secret"));
    assert!(!crate::report::json(&plan).unwrap().contains("secret"));
}

#[test]
fn a_warning_stays_one_readable_line_whatever_is_inherited() {
    let mut world = World::new("n[1-2]", "1", 0);
    for number in 0..1500 {
        world.environment.set(format!("TORCHELASTIC_{number}"), "x");
    }
    let plan = world.plan("").unwrap();
    assert!(plan.warnings[0].message.len() < 400 && plan.warnings[0].message.contains("and 1494 more"));
}

/// The plan's values of `names` for a command under a profile.
fn profile_values(spec: &str, models: &[&str], command: &str, names: &[&str]) -> Vec<Option<String>> {
    let mut world = World::new("n[1-2]", "8(x2)", 0);
    world.node.gpu_models = models.iter().map(ToString::to_string).collect();
    world.command = command.split_whitespace().map(String::from).collect();
    let plan = world.plan(spec).unwrap();
    names.iter().map(|name| plan.value(name).map(String::from)).collect()
}

#[test]
fn every_profile_s_own_values() {
    let h100: &[&str] = &["NVIDIA H100 80GB HBM3"];
    let b200: &[&str] = &["NVIDIA B200"];
    let alloc = Some("expandable_segments:True");
    // profile, GPUs, command, variable, value. Sources: Megatron-LM's
    // megatron/training/arguments.py; Megatron-Bridge's recipes and
    // scripts/performance/utils/overrides.py.
    type Row<'a> = (&'a str, &'a [&'a str], &'a str, &'a str, Option<&'a str>);
    let table: &[Row] = &[
        ("fsdp", h100, "python train.py", "PYTORCH_CUDA_ALLOC_CONF", alloc),
        ("fsdp", h100, "python train.py", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("default", h100, "python train.py", "PYTORCH_CUDA_ALLOC_CONF", None),
        ("megatron", h100, "python pretrain_gpt.py", "PYTORCH_CUDA_ALLOC_CONF", alloc),
        ("megatron", h100, "python pretrain_gpt.py", "TORCH_NCCL_HIGH_PRIORITY", Some("1")),
        ("megatron", h100, "python pretrain_gpt.py", "TOKENIZERS_PARALLELISM", Some("false")),
        ("megatron", h100, "python pretrain_gpt.py", "NCCL_GRAPH_REGISTER", None),
        ("megatron", h100, "python p.py --enable-cuda-graph", "NCCL_GRAPH_REGISTER", Some("0")),
        ("megatron", h100, "python p.py --nccl-ub", "PYTORCH_CUDA_ALLOC_CONF", None),
        ("megatron", h100, "python p.py --nccl-ub", "NCCL_NVLS_ENABLE", Some("1")),
        ("megatron", h100, "python p.py", "NCCL_NVLS_ENABLE", None),
        ("megatron", h100, "python p.py --overlap-grad-reduce", "NVTE_FWD_LAYERNORM_SM_MARGIN", Some("16")),
        ("megatron", b200, "python p.py ddp.overlap_grad_reduce=true", "NVTE_BWD_LAYERNORM_SM_MARGIN", Some("20")),
        ("megatron", h100, "python p.py", "NVTE_FWD_LAYERNORM_SM_MARGIN", None),
        ("megatron", h100, "python p.py --moe-enable-deepep", "CUDA_DEVICE_MAX_CONNECTIONS", Some("32")),
        ("megatron", b200, "python p.py", "CUDA_DEVICE_MAX_CONNECTIONS", Some("32")),
        ("megatron", h100, "python p.py --use-megatron-fsdp", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("megatron", h100, "python p.py --use-torch-fsdp2", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("default", h100, "python p.py ddp.use_custom_fsdp=true", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("deepspeed", h100, "python train.py", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("worker", h100, "train.toml", "TORCH_NCCL_ASYNC_ERROR_HANDLING", None),
        ("worker", h100, "train.toml", "NCCL_IB_TIMEOUT", Some("22")),
        ("worker", h100, "train.toml", "CUDA_DEVICE_MAX_CONNECTIONS", None),
        ("default", h100, "python train.py", "PYTHONFAULTHANDLER", Some("1")),
        ("default,debug", h100, "python train.py", "NCCL_DEBUG", Some("INFO")),
        ("megatron,debug", h100, "python train.py", "TORCH_DISTRIBUTED_DEBUG", Some("DETAIL")),
        ("megatron,debug", h100, "python train.py", "CUDA_DEVICE_MAX_CONNECTIONS", Some("1")),
        ("fsdp,deterministic", h100, "python train.py", "CUBLAS_WORKSPACE_CONFIG", Some(":4096:8")),
        ("fsdp,deterministic", h100, "python train.py", "NCCL_ALGO", Some("Ring")),
        ("fsdp,deterministic", h100, "python train.py", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", Some("0")),
    ];
    for (spec, models, command, name, expected) in table {
        let found = profile_values(spec, models, command, &[*name]);
        assert_eq!(found[0].as_deref(), *expected, "{name} under {spec} for {command}");
    }
}

#[test]
fn jax_takes_the_one_gpu_it_sees() {
    let device = |visible: &str| {
        let world = World::new("n[1-2]", "8(x2)", 3).export(&[("CUDA_VISIBLE_DEVICES", visible)]);
        world.plan("jax").unwrap().value("JAX_LOCAL_DEVICE_IDS").map(String::from)
    };
    assert_eq!(device("3").as_deref(), Some("0"));
    assert_eq!(device("0,1,2,3,4,5,6,7"), None);
}

#[test]
fn jax_gets_a_port_of_its_step_and_no_proxy_in_its_way() {
    let world = World::new("n[1-2]", "8(x2)", 0).export(&[("https_proxy", "http://p:3128"), ("no_proxy", "localhost")]);
    let plan = world.plan("jax").unwrap();
    assert_eq!(plan.value("JAX_COORDINATOR_PORT"), plan.value("MASTER_PORT"));
    assert_eq!(plan.value("no_proxy"), Some("localhost,n1"));
    let plan = World::new("n[1-2]", "8(x2)", 0).plan("jax").unwrap();
    assert_eq!(plan.value("no_proxy"), None);
}

#[test]
fn fabrics_and_what_follows_from_them() {
    use crate::facts::netdevs::{NetDevice, NetKind};
    use crate::facts::rdma::tests::rdma_port;
    use crate::facts::{RdmaPort, rdma::LinkLayer};
    let world = |link: Option<LinkLayer>, driver: &str| {
        let mut world = World::new("n[1-2]", "8(x2)", 0);
        let port = |link| RdmaPort { driver: Some(driver.into()), ..rdma_port("mlx5_0", link) };
        world.node.rdma = Some(link.map(port).into_iter().collect());
        world.node.netdevs =
            Some(vec![NetDevice { name: "eth0".into(), up: true, mbps: Some(200_000), kind: NetKind::Hardware }]);
        world
    };
    let infiniband = world(Some(LinkLayer::InfiniBand), "mlx5_core").plan("").unwrap();
    assert_eq!(infiniband.step.fabric, "infiniband");
    for name in
        ["NCCL_IB_GID_INDEX", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_IB_QPS_PER_CONNECTION"]
    {
        assert_eq!(infiniband.value(name), None, "{name}");
    }
    let roce = world(Some(LinkLayer::Ethernet), "mlx5_core").plan("").unwrap();
    assert_eq!((roce.step.fabric, roce.value("NCCL_IB_QPS_PER_CONNECTION")), ("roce", Some("2")));
    assert_eq!(roce.value("NCCL_IB_GID_INDEX"), None);
    let efa = world(Some(LinkLayer::Other), "efa").plan("").unwrap();
    assert_eq!((efa.step.fabric, efa.value("NCCL_SOCKET_IFNAME")), ("efa", Some("^docker,lo,veth")));
    let tcp = world(None, "").plan("").unwrap();
    assert_eq!((tcp.step.fabric, tcp.value("NCCL_NET")), ("tcp", None));
    assert_eq!((tcp.value("NCCL_SOCKET_NTHREADS"), tcp.value("NCCL_NSOCKS_PERTHREAD")), (Some("4"), Some("4")));
    // Asked for: it stands above what is seen, and NCCL is told.
    let asked = world(Some(LinkLayer::InfiniBand), "mlx5_core").plan("fabric=tcp").unwrap();
    assert_eq!((asked.step.fabric, asked.value("NCCL_NET")), ("tcp", Some("Socket")));
    // One node has none, whatever it has.
    let mut single = world(Some(LinkLayer::Ethernet), "mlx5_core");
    single.step = Step::described("n1", "8", 0, 44, 0).unwrap();
    let plan = single.plan("fabric=roce").unwrap();
    assert_eq!((plan.step.fabric, plan.value("NCCL_IB_QPS_PER_CONNECTION")), ("single-node", None));
}

#[test]
fn our_own_interface_is_written_as_an_exact_match() {
    // https://github.com/NVIDIA/nccl/issues/177: bond0 matches bond0.2973 too.
    let mut world = World::new("n[1-2]", "1(x2)", 0).resolves(&["192.0.2.7"]);
    world.interfaces = vec![Interface { name: "bond0".into(), address: "192.0.2.8".parse().unwrap(), prefix: 27 }];
    let plan = world.plan("iface=bond0").unwrap();
    assert_eq!(plan.value("NCCL_SOCKET_IFNAME"), Some("=bond0"));
    assert_eq!(plan.value("GLOO_SOCKET_IFNAME"), Some("bond0"));
}

#[test]
fn grace_by_the_nccl_of_the_image() {
    let plan = |model: &str, version: Option<&str>| {
        let mut world = World::new("n[1-2]", "4(x2)", 0);
        world.node.gpu_models = vec![model.into()];
        if let Some(version) = version {
            world.environment.set("NCCL_VERSION", version);
        }
        let plan = world.plan("").unwrap();
        let value = |name: &str| plan.value(name).map(String::from);
        (value("NCCL_NET_GDR_LEVEL"), value("NCCL_NET_GDR_C2C"), left(&plan, "NCCL_MNNVL_ENABLE").is_some())
    };
    assert_eq!(plan("NVIDIA GB200", Some("2.25.1-1")), (Some("PHB".into()), None, true));
    assert_eq!(plan("NVIDIA GB200", Some("2.26.5")), (None, Some("1".into()), true));
    for version in [None, Some("2.28.9"), Some("x"), Some("")] {
        assert_eq!(plan("NVIDIA GB300", version), (None, None, true));
    }
    assert_eq!(plan("NVIDIA B200", Some("2.25.1")), (None, None, false));
}

/// Of all that we set, whatever is asked for, the reader of each variable takes
/// each value; NCCL's guide has 1 to 31 for NCCL_IB_TIMEOUT, and seconds written
/// there are the mistake of <https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>.
#[test]
fn every_value_of_ours_is_one_that_its_reader_takes() {
    let models = ["", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA GB200"];
    let mut values = 0;
    for profile in ["default", "fsdp", "megatron", "deepspeed", "jax", "worker"] {
        for words in ["", ",debug", ",deterministic", ",debug,deterministic"] {
            for fabric in ["auto", "infiniband", "roce", "efa", "slingshot", "tcp", "single-node"] {
                for (nodes, model) in ["n1", "n[1-2]"].into_iter().flat_map(|n| models.map(|model| (n, model))) {
                    let mut world = World::new(nodes, "8", 0);
                    world.node.gpu_models.extend((!model.is_empty()).then(|| model.to_string()));
                    let spec = format!("{profile}{words},fabric={fabric}");
                    let plan = world.plan(&spec).unwrap_or_else(|refusal| panic!("{spec}: {refusal}"));
                    for set in &plan.env {
                        let Some(entry) = catalog::entry(&set.name) else { continue };
                        assert_eq!(entry.grammar.fault(&set.value), None, "{}={} by {spec}", set.name, set.value);
                        values += 1;
                    }
                    if let Some(timeout) = plan.value("NCCL_IB_TIMEOUT") {
                        assert!(
                            timeout.parse().is_ok_and(|timeout| (1..=31).contains(&timeout)),
                            "{timeout} by {spec}"
                        );
                    }
                }
            }
        }
    }
    assert!(values > 1000, "{values}");
}

/// With a variable missing DeepSpeed asks MPI instead (deepspeed/comm/comm.py,
/// required_env), and accelerate takes a LOCAL_RANK of -1 for a lone process
/// (accelerate/state.py).
#[test]
fn a_task_on_each_gpu_has_what_deepspeed_and_accelerate_read() {
    for (profile, command) in [("deepspeed", "python train.py --deepspeed ds.json"), ("", "python train.py")] {
        let mut world = World::new("n[1-2]", "4(x2)", 5);
        world.command = command.split(' ').map(String::from).collect();
        let plan = world.plan(profile).unwrap();
        let read = |name| plan.value(name).unwrap_or_else(|| panic!("{name} is missing"));
        for (name, value) in
            [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4"), ("MASTER_ADDR", "n1")]
        {
            assert_eq!(read(name), value, "{name}");
        }
        assert!(
            read("MASTER_PORT")
                .parse::<u16>()
                .is_ok_and(|port| (DEFAULT_PORTS.low..=DEFAULT_PORTS.high).contains(&port))
        );
        // Either would put its streams behind each other in one connection.
        assert_eq!(plan.value("CUDA_DEVICE_MAX_CONNECTIONS").is_none(), profile == "deepspeed");
        assert_eq!(plan.warnings, []);
    }
}

/// A wrong value in one of NCCL's files is told with the file's name.
#[test]
fn what_is_wrong_in_nccl_s_own_file_is_told_by_the_file_s_name() {
    let mut world = World::new("n[1-2]", "1(x2)", 0);
    let file = "/home/ada/.nccl.conf".to_string();
    world.task.nccl_files.push(FileValue { name: "NCCL_IB_TIMEOUT".into(), value: "120".into(), file });
    let plan = world.plan("").unwrap();
    let [warning] = plan.warnings.as_slice() else { panic!("{:#?}", plan.warnings) };
    assert_eq!(warning.id, "ib-timeout-range");
    assert!(warning.message.starts_with("NCCL_IB_TIMEOUT=120 in /home/ada/.nccl.conf"), "{}", warning.message);
    // It counts as set all the same; what the user exports stands above the file.
    assert!(plan.value("NCCL_IB_TIMEOUT").is_none());
    assert_eq!(world.export(&[("NCCL_IB_TIMEOUT", "23")]).plan("").unwrap().warnings, []);
}
