//! For each check of the node a situation it must speak of and one it must not,
//! and what it says.

use super::{From, Phase, Subject, Value, look};
use crate::config::{Settings, Source};
use crate::facts::netdevs::NetKind;
use crate::facts::policy::Policy;
use crate::facts::rdma::tests::rdma_port as port;
use crate::facts::rdma::{GidRow, LinkLayer};
use crate::facts::{NetDevice, NodeFacts, RdmaPort, Step, TaskFacts};
use crate::plan::binding::visible::tests::gpus;
use crate::plan::{Severity, Shape, Warning};

/// A task on a node.
pub(super) struct World {
    pub step: Step,
    pub values: Vec<Value>,
    pub command: Vec<String>,
    pub shape: Shape,
    pub spec: &'static str,
    pub node: NodeFacts,
    pub task: TaskFacts,
    pub policy: Option<Policy>,
}

impl World {
    /// Rank 0 of 8 on each of these nodes, which have eth0 and ib0, and mlx5_0
    /// to mlx5_7 on InfiniBand.
    pub(super) fn new(nodes: &str) -> World {
        World {
            step: Step::described(nodes, "8", 0, 44, 0).unwrap(),
            values: Vec::new(),
            command: vec!["python3".into(), "train.py".into()],
            shape: Shape::Native,
            spec: "",
            node: NodeFacts {
                netdevs: Some(devices(&["lo", "eth0", "ib0"])),
                rdma: Some((0..8).map(|i| port(&format!("mlx5_{i}"), LinkLayer::InfiniBand)).collect()),
                ..NodeFacts::default()
            },
            task: TaskFacts::default(),
            policy: None,
        }
    }

    pub(super) fn set(mut self, name: &str, value: &str) -> World {
        self.values.push(Value { name: name.into(), value: value.into(), from: From::User });
        self
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut World)) -> World {
        change(&mut self);
        self
    }

    pub(super) fn gpus(self, count: usize, model: &str) -> World {
        self.with(|world| world.node.gpu_models = vec![model.into(); count])
    }

    /// GPUs whose places are known, of which the task may open the first `open`.
    pub(super) fn machine(self, count: u8, open: u8) -> World {
        let addresses: Vec<String> = (0..count).map(|bus| format!("0000:{bus:02x}:00.0")).collect();
        let list: Vec<_> = addresses.iter().map(|address| (address.as_str(), H100, "")).collect();
        self.gpus(count.into(), H100).with(|world| {
            world.node.topology.gpus = gpus(&list);
            let hidden = world.node.topology.gpus.iter().skip(open.into());
            world.task.gpus_hidden = hidden.map(|gpu| gpu.place.address).collect();
        })
    }

    pub(super) fn command(self, command: &str) -> World {
        self.with(|world| world.command = command.split_whitespace().map(String::from).collect())
    }

    /// What all checks find.
    pub(super) fn all(&self) -> Vec<Warning> {
        let settings = Settings::parse(self.spec, Source::Option).unwrap();
        let subject = Subject {
            command: &self.command,
            nodes: Some(self.step.nodes()),
            tasks: Some(self.step.world_size),
            tasks_on_a_node: Some(self.step.local_world_size),
            shape: Some(self.shape),
            step: Some(&self.step),
            node: Some(&self.node),
            task: Some(&self.task),
            policy: self.policy,
            ..Subject::of_values(&self.values, &settings)
        };
        look(&subject, &[Phase::Environment, Phase::Launch, Phase::Node])
    }

    /// What one check finds.
    pub(super) fn found(&self, id: &str) -> Vec<Warning> {
        self.all().into_iter().filter(|warning| warning.id == id).collect()
    }
}

fn devices(names: &[&str]) -> Vec<NetDevice> {
    names.iter().map(|name| NetDevice { name: (*name).into(), up: true, mbps: None, kind: NetKind::Hardware }).collect()
}

const TWO: &str = "n[1-2]";
const H100: &str = "NVIDIA H100 80GB HBM3";

fn has(world: World, names: &[&str]) -> World {
    world.with(|world| world.node.netdevs = Some(devices(names)))
}

fn roce(world: World, rows: &[(&str, u32)]) -> World {
    let rows: Vec<GidRow> = rows
        .iter()
        .map(|(device, index)| GidRow {
            device: (*device).into(),
            port: 1,
            index: *index,
            address: "::ffff:192.0.2.1".parse().unwrap(),
        })
        .collect();
    world.with(|world| {
        world.node.rdma = Some(vec![port("devA", LinkLayer::Ethernet), port("devB", LinkLayer::Ethernet)]);
        world.task.gids = Some(rows);
    })
}

fn efa(world: World) -> World {
    world.with(|world| {
        let efa = RdmaPort { driver: Some("efa".into()), ..port("rdmap0s6", LinkLayer::Other) };
        world.node.rdma = Some(vec![efa]);
    })
}

fn set(name: &str, value: &str) -> World {
    World::new(TWO).set(name, value)
}

/// The same where NCCL runs: errors are certain there only.
fn with_gpus(name: &str, value: &str) -> World {
    set(name, value).gpus(8, H100)
}

/// Each check with a bad example (true) and a good one, and what it found there.
pub(super) fn examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    let hca = |value: &str| set("NCCL_IB_HCA", value);
    let ifname = |value: &str| set("NCCL_SOCKET_IFNAME", value);
    let gid = |value: &str| set("NCCL_IB_GID_INDEX", value);
    let two = || World::new(TWO);
    let auto = || World::new(TWO).with(|world| world.spec = "gid=auto");
    let table: Vec<(&'static str, bool, World)> = vec![
        ("ifname-missing", true, ifname("eth2")),
        ("ifname-missing", true, set("GLOO_SOCKET_IFNAME", "eth")),
        ("ifname-missing", false, ifname("eth")),
        ("ifname-missing", false, set("GLOO_SOCKET_IFNAME", "eth0")),
        ("ifname-prefix", true, has(ifname("bond0"), &["lo", "bond0", "bond0.2973"])),
        ("ifname-prefix", false, has(ifname("=bond0"), &["lo", "bond0", "bond0.2973"])),
        ("ifname-prefix", false, has(ifname("eth"), &["lo", "eth0", "eth1"])),
        ("ifname-lo", true, has(ifname("^docker0"), &["lo", "docker0", "eth0"])),
        ("ifname-lo", true, ifname("lo")),
        ("ifname-lo", false, has(ifname("^docker,lo,virbr"), &["lo", "docker0", "eth0"])),
        ("ifname-lo", false, World::new("n1").set("NCCL_SOCKET_IFNAME", "lo")),
        ("hca-missing", true, hca("^mlxl5_7")),
        ("hca-missing", true, hca("=mlx5_9")),
        ("hca-missing", true, hca("=mlx5_0:08")),
        ("hca-missing", false, hca("=mlx5_0:1,mlx5_7")),
        ("hca-missing", false, hca("=mlx5_9").set("NCCL_IB_DISABLE", "1")),
        ("hca-missing", false, World::new("n1").set("NCCL_IB_HCA", "=mlx5_9")),
        ("hca-prefix", true, hca("mlx5_1").with(more_ports)),
        ("hca-prefix", false, hca("=mlx5_1").with(more_ports)),
        ("hca-prefix", false, hca("mlx5").with(more_ports)),
        ("hca-netdev", true, hca("ib0")),
        ("hca-netdev", false, hca("mlx5_0")),
        ("hca-mixed", true, hca("=mlx5_0,mlx5_1").with(|world| second_port(world).link = LinkLayer::Ethernet)),
        ("hca-mixed", true, hca("=mlx5_0,mlx5_1").with(|world| second_port(world).gbps = Some(25))),
        ("hca-mixed", false, hca("=mlx5_0,mlx5_2").with(|world| second_port(world).gbps = Some(25))),
        ("gid-on-ib", true, gid("3")),
        ("gid-on-ib", false, gid("-1")),
        ("gid-on-ib", false, roce(gid("3"), &[("devA", 3), ("devB", 3)])),
        ("gid-since-221", true, roce(gid("3"), &[("devA", 3), ("devB", 3)])),
        ("gid-since-221", true, roce(gid("3"), &[("devA", 1), ("devB", 5)])),
        ("gid-since-221", false, roce(gid("-1"), &[("devA", 3), ("devB", 3)])),
        ("gid-since-221", false, gid("3")),
        ("gid-none", true, roce(auto(), &[("devA", 1), ("devB", 3)])),
        ("gid-none", true, roce(auto(), &[("devA", 1)])),
        ("gid-none", false, roce(auto(), &[("devA", 1), ("devA", 5), ("devB", 3), ("devB", 5)])),
        ("gid-none", false, roce(two(), &[("devA", 1), ("devB", 3)])),
        ("gid-none", false, roce(auto().set("NCCL_IB_GID_INDEX", "-1"), &[("devA", 1), ("devB", 3)])),
        ("gid-none", false, roce(auto().set("NCCL_IB_HCA", "=devA"), &[("devA", 1), ("devB", 3)])),
        ("gid-none", false, auto()),
        ("ib-disabled", true, set("NCCL_IB_DISABLE", "1")),
        // NCCL reads the word as 0: nothing is disabled.
        ("ib-disabled", false, set("NCCL_IB_DISABLE", "true")),
        ("ib-disabled", false, set("NCCL_IB_DISABLE", "1").with(|world| world.node.rdma = Some(Vec::new()))),
        ("ib-disabled", false, set("NCCL_IB_DISABLE", "1").with(|world| world.spec = "fabric=tcp")),
        ("ucx-dev", true, set("UCX_NET_DEVICES", "mlx5_0:1,mlx5_9:1")),
        ("ucx-dev", false, set("UCX_NET_DEVICES", "mlx5_0:1,eth0")),
        ("ucx-dev", false, set("UCX_NET_DEVICES", "all")),
        ("net-missing", true, efa(set("NCCL_NET_PLUGIN", "none"))),
        ("net-missing", false, efa(set("NCCL_NET_PLUGIN", "ofi"))),
        ("net-missing", false, set("NCCL_NET_PLUGIN", "none")),
        ("cvd-order", true, two().with(|world| world.node.gpu_models = vec!["NVIDIA A100".into(), H100.into()])),
        ("cvd-order", false, two().gpus(8, H100)),
        ("memlock", true, two().with(|world| world.task.memlock = Some(8 << 20))),
        ("memlock", false, two().with(|world| world.task.memlock = Some(u64::MAX))),
        ("memlock", false, two().with(|world| tcp_only(world).memlock = Some(8 << 20))),
        ("stack-unlimited", true, two().gpus(8, H100).with(|world| world.task.stack = Some(u64::MAX))),
        ("stack-unlimited", false, two().gpus(8, H100).with(|world| world.task.stack = Some(8 << 20))),
        (
            "stack-unlimited",
            false,
            set("NCCL_VERSION", "2.28.9").gpus(8, H100).with(|world| world.task.stack = Some(u64::MAX)),
        ),
        ("nofile", true, World::new("n[1-64]").with(|world| world.task.open_files = Some(1024))),
        ("nofile", false, two().with(|world| world.task.open_files = Some(1024))),
        ("nofile", false, World::new("n[1-64]").with(|world| world.task.open_files = Some(131_072))),
        ("shm-size", true, two().with(|world| world.task.shm = Some(64 << 20))),
        ("shm-size", true, two().gpus(8, H100).with(|world| world.task.shm = Some(4 << 30))),
        ("shm-size", false, two().gpus(8, H100).with(|world| world.task.shm = Some(8 << 30))),
        ("cpus", true, two().gpus(8, H100).with(|world| world.task.cpus = Some(1))),
        ("cpus", false, two().gpus(8, H100).with(|world| world.task.cpus = Some(8))),
        ("cpus", false, two().with(|world| world.task.cpus = Some(1))),
        ("cpus", false, set("CUDA_VISIBLE_DEVICES", "").gpus(8, H100).with(|world| world.task.cpus = Some(1))),
        ("cpus-asked", true, set("SLURM_CPUS_PER_TASK", "4").with(|world| world.task.cpus = Some(1))),
        ("cpus-asked", false, set("SLURM_CPUS_PER_TASK", "4").with(|world| world.task.cpus = Some(4))),
        ("cpus-asked", false, two().with(|world| world.task.cpus = Some(1))),
        ("cpus-asked", false, bound("--cpu-bind=map_cpu:0", 1).set("SLURM_CPUS_PER_TASK", "4")),
        ("cpu-bind-stale", true, bound("SLURM_CPU_BIND=quiet,mask_cpu:0x1", 1).set("SLURM_CPUS_PER_TASK", "10")),
        ("cpu-bind-stale", true, bound("SLURM_CPU_BIND=quiet,mask_cpu:0x1 (exported)", 1)),
        ("cpu-bind-stale", false, bound("SLURM_CPU_BIND=cores", 1).set("SLURM_CPUS_PER_TASK", "10")),
        ("cpu-bind-stale", false, bound("--cpu-bind=quiet,mask_cpu:0x1", 1)),
        ("cpu-bind-stale", false, bound("SLURM_CPU_BIND=quiet,mask_cpu:0x1,0x2,0x4,0x8,0x10,0x20,0x40,0x80", 1)),
        ("mnnvl-no-imex", true, nvl72(set("NCCL_MNNVL_ENABLE", "1"), false)),
        ("mnnvl-no-imex", true, set("NCCL_MNNVL_ENABLE", "1").set("NCCL_CUMEM_ENABLE", "0")),
        ("mnnvl-no-imex", false, nvl72(set("NCCL_MNNVL_ENABLE", "1"), true)),
        ("mnnvl-no-imex", false, nvl72(set("NCCL_MNNVL_ENABLE", "2"), false)),
        ("nvls-forced-off", true, set("NCCL_NVLS_ENABLE", "0").gpus(8, H100)),
        ("nvls-forced-off", true, set("NCCL_NVLS_ENABLE", "1").gpus(8, "NVIDIA A100-SXM4-80GB")),
        ("nvls-forced-off", false, set("NCCL_NVLS_ENABLE", "0").gpus(4, "NVIDIA H100 PCIe")),
        ("nvls-forced-off", false, set("NCCL_NVLS_ENABLE", "1").gpus(8, H100)),
    ];
    table.into_iter().map(|(id, bad, world)| (id, bad, world.found(id))).collect()
}

fn more_ports(world: &mut World) {
    let ports = world.node.rdma.get_or_insert_default();
    ports.extend(["mlx5_10", "mlx5_11"].map(|device| port(device, LinkLayer::InfiniBand)));
}

fn second_port(world: &mut World) -> &mut RdmaPort {
    &mut world.node.rdma.as_mut().unwrap()[1]
}

/// Tasks with so many CPUs each, as the user chose them.
fn bound(by: &str, cpus: u32) -> World {
    World::new(TWO).with(|world| {
        world.task.cpus = Some(cpus);
        world.task.bound_by_user.cpu = Some(by.into());
    })
}

fn tcp_only(world: &mut World) -> &mut TaskFacts {
    world.node.rdma = Some(Vec::new());
    &mut world.task
}

fn nvl72(world: World, imex: bool) -> World {
    world.gpus(4, "NVIDIA GB200").with(|world| world.task.imex = Some(imex))
}

#[test]
fn each_check_tells_the_bad_from_the_good() {
    for (id, bad, found) in examples() {
        assert_eq!(!found.is_empty(), bad, "{id}: {found:?}");
        let worst = super::rules().find(|rule| rule.id == id).unwrap().severity;
        for warning in found {
            assert!(rank(warning.severity) <= rank(worst), "{id} finds {:?}, and says {worst:?}", warning.severity);
            let text = format!("{}; {}", warning.message, warning.cure);
            assert!(!text.contains('\n') && !warning.cure.is_empty(), "{text}");
        }
    }
}

fn rank(severity: Severity) -> u8 {
    match severity {
        Severity::Info => 0,
        Severity::Warning => 1,
        Severity::Error => 2,
    }
}

/// A variable that is not set, and facts that are not known, are no finding.
#[test]
fn nothing_known_is_nothing_wrong() {
    let silent = World::new(TWO).with(|world| {
        world.node = NodeFacts::default();
        world.task = TaskFacts::default();
    });
    assert_eq!(silent.all(), []);
    assert_eq!(World::new(TWO).all(), []);
    let exported = [("NCCL_SOCKET_IFNAME", "eth2"), ("NCCL_IB_HCA", "mlx5_9"), ("NCCL_IB_GID_INDEX", "3")];
    let mut unknown = World::new(TWO).with(|world| world.node = NodeFacts::default());
    for (name, value) in exported {
        unknown = unknown.set(name, value);
    }
    for id in ["ifname-missing", "hca-missing", "gid-on-ib", "gid-since-221"] {
        assert_eq!(unknown.found(id), [], "{id}");
    }
}

#[track_caller]
fn one(world: &World, id: &str) -> (Severity, String) {
    let mut found = world.found(id);
    assert_eq!(found.len(), 1, "{id}: {found:?}");
    let warning = found.remove(0);
    (warning.severity, format!("{}; {}", warning.message, warning.cure))
}

#[track_caller]
fn says(world: &World, id: &str, severity: Severity, parts: &[&str]) {
    let (found, text) = one(world, id);
    assert_eq!(found, severity, "{text}");
    for part in parts {
        assert!(text.contains(part), "'{part}' is missing: {text}");
    }
}

/// <https://github.com/NVIDIA/nccl/issues/1837>
#[test]
fn an_interface_that_is_not_there_stops_nccl() {
    says(
        &with_gpus("NCCL_SOCKET_IFNAME", "eth2"),
        "ifname-missing",
        Severity::Error,
        &["NCCL_SOCKET_IFNAME=eth2", "on n1 (has eth0, ib0)", "no socket interface found"],
    );
    // A device that is down does not count, and is named.
    let down = with_gpus("NCCL_SOCKET_IFNAME", "eth0").with(|world| world.node.netdevs.as_mut().unwrap()[1].up = false);
    says(&down, "ifname-missing", Severity::Error, &["eth0, which is down", "(has ib0)"]);
    // Where NCCL finds its interface otherwise, or may not be asked, it is no error.
    let other = with_gpus("NCCL_SOCKET_IFNAME", "eth2").set("NCCL_COMM_ID", "10.0.0.1:2000");
    says(&other, "ifname-missing", Severity::Warning, &["eth2"]);
    let alone =
        with_gpus("NCCL_SOCKET_IFNAME", "eth2").with(|world| world.step = Step::described("n1", "1", 0, 1, 0).unwrap());
    says(&alone, "ifname-missing", Severity::Warning, &["eth2"]);
    let shell = with_gpus("NCCL_SOCKET_IFNAME", "eth2").with(|world| world.shape = Shape::Shell);
    says(&shell, "ifname-missing", Severity::Warning, &["eth2"]);
    says(&with_gpus("NCCL_SOCKET_IFNAME", "etj0"), "ifname-missing", Severity::Error, &["did you mean eth0?"]);
    // A program that runs no NCCL is not refused: on a node without GPUs, or a tool.
    says(&set("NCCL_SOCKET_IFNAME", "eth2"), "ifname-missing", Severity::Warning, &["eth2"]);
    let tool = with_gpus("NCCL_SOCKET_IFNAME", "eth2").command("nvidia-smi -L");
    says(&tool, "ifname-missing", Severity::Warning, &["eth2"]);
    // Gloo takes whole names.
    let gloo = set("GLOO_SOCKET_IFNAME", "eth0,ib");
    says(&gloo, "ifname-missing", Severity::Warning, &["n1 has no ib (has eth0, ib0)", "whole names"]);
}

/// <https://github.com/NVIDIA/nccl/issues/177>
#[test]
fn an_interface_s_name_begins_others() {
    let bond = ["lo", "bond0", "bond0.2973", "bond0.2973.1"];
    says(
        &has(set("NCCL_SOCKET_IFNAME", "bond0"), &bond),
        "ifname-prefix",
        Severity::Warning,
        &["bond0.2973, bond0.2973.1 on n1", "NCCL_SOCKET_IFNAME='=bond0'"],
    );
    let left_out = has(set("NCCL_SOCKET_IFNAME", "^lo,bond0"), &bond);
    says(&left_out, "ifname-prefix", Severity::Warning, &["leaves out", "NCCL_SOCKET_IFNAME='^=lo,bond0'"]);
}

/// <https://github.com/horovod/horovod/pull/700>
#[test]
fn leaving_out_docker_alone_takes_lo() {
    let with_network = has(set("NCCL_SOCKET_IFNAME", "^docker0"), &["lo", "docker0", "eth0"]);
    says(&with_network, "ifname-lo", Severity::Warning, &["takes lo on n1", "'^lo,docker,virbr'"]);
    // Nothing else: two nodes would talk to themselves.
    let without = has(with_gpus("NCCL_SOCKET_IFNAME", "^docker0"), &["lo", "docker0"]);
    says(&without, "ifname-lo", Severity::Error, &["takes lo"]);
}

/// <https://github.com/llm-d/llm-d-benchmark/pull/1862>
#[test]
fn a_misspelt_device_is_named_with_what_was_meant() {
    says(
        &set("NCCL_IB_HCA", "^mlxl5_7"),
        "hca-missing",
        Severity::Warning,
        &["mlxl5_7 matches no RDMA device of n1", "nothing is left out", "did you mean mlx5_7?"],
    );
    // No guess between devices that differ by their number only.
    let (_, text) = one(&set("NCCL_IB_HCA", "=mlx5_9"), "hca-missing");
    assert!(text.contains("goes over TCP") && !text.contains("did you mean"), "{text}");
}

/// <https://github.com/getainode/ainode/pull/89>
#[test]
fn a_port_that_is_down_does_not_count() {
    let down = set("NCCL_IB_HCA", "=mlx5_1").with(|world| second_port(world).active = false);
    says(&down, "hca-missing", Severity::Warning, &["no port of mlx5_1 is active on n1", "goes over TCP"]);
    let one_of_two = set("NCCL_IB_HCA", "=mlx5_0,mlx5_1").with(|world| second_port(world).active = false);
    says(&one_of_two, "hca-missing", Severity::Warning, &["no port of mlx5_1", "goes on without it"]);
    let second = set("NCCL_IB_HCA", "=mlx5_0:2");
    says(&second, "hca-missing", Severity::Warning, &["no port of mlx5_0:2 is active"]);
}

/// <https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>
#[test]
fn an_index_must_be_usable_on_every_port() {
    let gid = |index: &str, rows: &[(&str, u32)]| roce(with_gpus("NCCL_IB_GID_INDEX", index), rows);
    let common = [("devA", 1), ("devA", 5), ("devB", 3), ("devB", 5)];
    says(&gid("5", &common), "gid-since-221", Severity::Info, &["is right on n1"]);
    says(
        &gid("3", &common),
        "gid-since-221",
        Severity::Warning,
        &["row 3 is no RoCE v2 address on devA:1", "devA:1 has 1 5, devB:1 has 3 5", "5 is one that all have"],
    );
    says(&gid("0", &common), "gid-since-221", Severity::Error, &["devA:1, devB:1 of n1"]);
    let apart = gid("1", &[("devA", 1), ("devB", 3)]);
    says(&apart, "gid-since-221", Severity::Warning, &["devA:1 has 1, devB:1 has 3", "no row is one that all have"]);
    // A table that could not be read is no proof.
    says(&gid("3", &[]), "gid-since-221", Severity::Info, &["could not be looked up"]);
}

#[test]
fn a_port_s_number_that_is_none_is_named() {
    for text in ["08", "+8", "8abc", "", ":2", "18446744073709551615"] {
        let world = set("NCCL_IB_HCA", &format!("=mlx5_0:{text}"));
        says(&world, "hca-missing", Severity::Warning, &["does not end in a port's number", "mlx5_0:1"]);
    }
}

/// Google's settings for A3 Mega machines have NCCL_PROTO=Simple,LL128
/// (GoogleCloudPlatform/cluster-toolkit, examples):
/// no harm where NVLink keeps the order.
#[test]
fn ll128_among_others_is_a_danger_without_nvlink_only() {
    let list = || set("NCCL_PROTO", "Simple,LL128");
    says(&list(), "algo-proto", Severity::Info, &["takes the choice"]);
    says(&list().gpus(8, H100), "algo-proto", Severity::Info, &["takes the choice"]);
    assert_eq!(list().set("NCCL_FASTRAK_CTRL_DEV", "eth0").gpus(8, H100).found("algo-proto"), []);
    says(&list().gpus(4, "NVIDIA A10"), "algo-proto", Severity::Warning, &["corrupted"]);
}

/// Somebody who looks at a node is not told what it lacks for a training.
#[test]
fn a_step_that_trains_nothing_is_silent_on_any_node() {
    for command in ["hostname", "nvidia-smi", "python3 -m torch.utils.collect_env", "python3 -V"] {
        let poor = World::new(TWO).gpus(8, H100).command(command).with(|world| {
            world.step = Step::described(TWO, "1,2", 0, 44, 0).unwrap();
            world.task.cpus = Some(1);
            world.task.memlock = Some(8 << 20);
            world.task.shm = Some(64 << 20);
            world.task.stack = Some(u64::MAX);
            world.task.open_files = Some(1024);
        });
        assert_eq!(poor.all(), [], "{command}");
        assert_ne!(poor.command("python3 train.py").all(), []);
    }
}

/// <https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41>
#[test]
fn cpus_that_the_job_asked_for_and_the_step_did_not_get_are_told_once() {
    let few = || set("SLURM_CPUS_PER_TASK", "4").gpus(8, H100).with(|world| world.task.cpus = Some(1));
    says(
        &few(),
        "cpus-asked",
        Severity::Warning,
        &["the step's tasks have 1 CPU on n1, the job asked for 4 (SLURM_CPUS_PER_TASK)", "use srun -c 4"],
    );
    assert_eq!(few().found("cpus"), []);
    assert_eq!(few().command("nproc").all(), []);
}

/// <https://github.com/nebius/soperator/pull/2316>
#[test]
fn the_cpu_bind_of_another_step_is_named_with_how_to_be_rid_of_it() {
    let inherited = || bound("SLURM_CPU_BIND=quiet,mask_cpu:0x1", 1).set("SLURM_CPUS_PER_TASK", "10").gpus(8, H100);
    says(
        &inherited(),
        "cpu-bind-stale",
        Severity::Warning,
        &["SLURM_CPU_BIND=quiet,mask_cpu:0x1 binds the task to 1 CPU on n1", "unset ${!SLURM_CPU_BIND*}"],
    );
    assert_eq!((inherited().found("cpus"), inherited().found("cpus-asked")), (vec![], vec![]));
}

#[test]
fn an_agent_s_ranks_count_for_shared_memory_and_cpus() {
    let agent = || {
        World::new(TWO).gpus(8, H100).with(|world| {
            world.step = Step::described(TWO, "1", 0, 44, 0).unwrap();
            world.shape = Shape::Agent;
        })
    };
    let small = agent().with(|world| world.task.shm = Some(4 << 30));
    says(&small, "shm-size", Severity::Warning, &["/dev/shm has 4096 MiB on n1 for 8 ranks"]);
    let few = agent().with(|world| world.task.cpus = Some(8));
    says(&few, "cpus", Severity::Warning, &["8 CPUs for its 8 ranks"]);
    assert_eq!(agent().with(|world| world.task.cpus = Some(96)).found("cpus"), []);
}
