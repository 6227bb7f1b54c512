//! What a node's leader brings to the pre-flight: what every node must have decided
//! alike, and what it is and has. It comes from another machine, perhaps from another
//! version of this plugin: what is unknown is passed over, what is missing counts as
//! not known, and nothing in it is believed to be short.

use std::collections::BTreeMap;

use hmac_sha256::Hash;
use serde::{Deserialize, Serialize};

use crate::config::{SPEC_OF_STEP, Settings, printable};
use crate::facts::machine::{Now, rdma_mtu};
use crate::facts::rdma::LinkLayer;
use crate::facts::straggler::{Activity, Lanes};
use crate::facts::task::Container;
use crate::facts::topology::GpuVendor;
use crate::plan::caches::MUST_BE_SHARED;
use crate::plan::catalog::{self, Kind, Reader, nccl_integer};
use crate::plan::checks;
use crate::plan::netmatch::{List, signs};
use crate::plan::{Facts, Origin, Plan, Shape, sockets};
use crate::report::is_secret;

/// The form of a report and of what is said around it. Raised when nodes of two
/// versions could not understand each other.
pub const PROTOCOL: u32 = 1;

/// The longest report, in bytes of JSON.
pub const LONGEST: usize = 64 * 1024;

/// The longest value that is sent whole; of a longer one its beginning and its hash.
const LONGEST_VALUE: usize = 400;

/// Slurm sets them for a step with GPUs.
const GIVEN: [&str; 3] = ["SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"];

/// The most ports that are sent.
const MOST_PORTS: usize = 64;

/// A node, as its leader describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeReport {
    /// NodeName.
    pub node: String,
    /// Its index in the step.
    pub node_rank: u32,
    /// The plugin's version.
    pub version: String,
    /// [`PROTOCOL`] of that version.
    pub protocol: u32,
    /// Of `step` and `env`: where it is equal, neither is sent or looked at.
    pub hash: String,
    /// What every node must have decided alike: name and value. Secrets as hashes.
    pub step: BTreeMap<String, String>,
    /// Variables that somebody else than we set and that must be alike, as the ranks
    /// will find them. Secrets as hashes.
    pub env: BTreeMap<String, String>,
    /// Tasks on this node.
    pub tasks: u32,
    /// Whether the command only looks at the node: then its cards and limits are no
    /// matter.
    pub only_looks: bool,
    /// Whether each task starts a launcher, which starts a rank for each GPU.
    pub agent: bool,
    /// Whether the ranks run in a container.
    pub container: bool,
    /// GPUs that the leader may use.
    pub gpus: Option<u32>,
    /// Whether Slurm has given this node's tasks GPUs.
    pub gpus_given: bool,
    /// Their models, each once.
    pub models: Vec<String>,
    /// The version of NVIDIA's driver.
    pub driver: Option<String>,
    /// NCCL_IB_HCA; `None`: NCCL takes every card.
    pub hca: Option<String>,
    /// NCCL_NET, where anybody has set it.
    pub net: Option<String>,
    /// Whether NCCL_IB_DISABLE keeps NCCL from RDMA.
    pub rdma_off: bool,
    /// Whether NCCL_IGNORE_NET_MISMATCH=0 makes NCCL refuse unlike numbers of cards.
    pub strict: bool,
    /// Ports of RDMA devices that NCCL could use if they were up; `None`: not known.
    pub ports: Option<Vec<Port>>,
    /// The network device that leads to rank 0.
    pub socket: Option<Device>,
    /// The wall clock when this report was made (`facts::machine::clock`), in
    /// nanoseconds since 1970.
    pub clock: Option<u64>,
    /// Bytes that may be locked in memory; `u64::MAX`: no limit.
    pub memlock: Option<u64>,
    /// Files that may be open; `u64::MAX`: no limit.
    pub open_files: Option<u64>,
    /// Size of /dev/shm in bytes, and what is free of it.
    pub shm: Option<(u64, u64)>,
    /// What happened on the node while the step started.
    pub activity: Activity,
    /// The narrowest link of a GPU.
    pub gpu_lanes: Option<Lanes>,
    /// The narrowest link of a card that NCCL takes.
    pub nic_lanes: Option<Lanes>,
    /// When the server asked for this report and when it had it, by the server's
    /// clock, in nanoseconds since 1970. Filled in by the server.
    #[serde(skip)]
    pub met: Option<(u64, u64)>,
}

/// In place of a value that the site file has for that node alone: no value of a variable.
pub const OF_NODE: &str = "\0";

/// A port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Port {
    /// `mlx5_0:1`
    pub name: String,
    /// Whether NCCL_IB_HCA takes it.
    pub chosen: bool,
    /// Whether it speaks Ethernet, not InfiniBand.
    pub ethernet: bool,
    /// Whether it is up.
    pub active: bool,
    /// Whether the ranks may not open its device.
    pub hidden: bool,
    /// Its rate in Gb/s.
    pub gbps: Option<u32>,
    /// What a packet carries, in bytes; of Ethernet only: the kernel does not tell
    /// InfiniBand's.
    pub mtu: Option<u32>,
}

impl Port {
    /// Whether NCCL will use it.
    pub fn used(&self) -> bool {
        self.chosen && self.active && !self.hidden
    }
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// eth0
    pub name: String,
    /// The largest packet it takes, in bytes.
    pub mtu: u32,
}

impl NodeReport {
    /// What the plan says.
    pub fn of(plan: &Plan) -> NodeReport {
        let step = &plan.step;
        let number = |name: &str| found(plan, name).and_then(nccl_integer).map(|(number, _)| number);
        let mut common = BTreeMap::new();
        let mut put = |name: &str, value: String| {
            common.insert(name.to_string(), shortened(name, &value));
        };
        put("nodes", step.node_list.clone());
        put("number of nodes", step.nodes.to_string());
        put("world size", step.world_size.to_string());
        put("launch shape", step.shape.name().into());
        put("profile", step.profile.clone());
        put("fabric", step.fabric.into());
        put("MASTER_ADDR", step.master_addr.clone().unwrap_or_default());
        let ports: Vec<String> = step.ports.iter().map(u16::to_string).collect();
        put("MASTER_PORT", ports.join(","));
        put("settings", settings(plan.value(SPEC_OF_STEP).unwrap_or_default()));
        let mut env = BTreeMap::new();
        for variable in &plan.env {
            let (name, value) = (variable.name.as_str(), variable.value.as_str());
            let theirs = matches!(variable.origin, Origin::User | Origin::Image);
            if is_of_a_node(name) {
                continue;
            }
            match theirs {
                true if must_be_alike(name) => env.insert(name.into(), shortened(name, value)),
                true => None,
                false => common.insert(name.into(), shortened(name, value)),
            };
        }
        for note in &plan.left {
            if let Some(value) = note.value.as_deref().filter(|_| must_be_alike(&note.name)) {
                env.insert(note.name.clone(), shortened(&note.name, value));
            }
        }
        NodeReport {
            node: step.node.clone(),
            node_rank: step.node_rank,
            version: env!("CARGO_PKG_VERSION").into(),
            protocol: PROTOCOL,
            step: common,
            env,
            tasks: step.local_world_size,
            agent: step.shape == Shape::Agent,
            hca: found(plan, "NCCL_IB_HCA").map(|list| shortened("", list)),
            net: found(plan, "NCCL_NET").map(|net| shortened("", net)),
            rdma_off: number("NCCL_IB_DISABLE").is_some_and(|off| off != 0),
            strict: number("NCCL_IGNORE_NET_MISMATCH") == Some(0),
            ..NodeReport::default()
        }
        .hashed()
    }

    /// The same with the node it is about, as its leader sees it now.
    #[must_use]
    pub fn with(mut self, plan: &Plan, facts: &Facts, settings: &Settings, now: &Now) -> NodeReport {
        // What the admin wrote for this node alone differs by intent.
        for variable in facts.site.iter().flat_map(|site| &site.env).filter(|variable| variable.of_node) {
            if let Some(value) = self.step.get_mut(&variable.name) {
                *value = OF_NODE.into();
            }
        }
        let common = self.hashed();
        let (node, task) = (facts.node, facts.task);
        let nvidia = node.topology.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia);
        let seen: Vec<_> = nvidia.filter(|gpu| !task.gpus_hidden.contains(&gpu.place.address)).collect();
        let mut models: Vec<String> = seen.iter().filter_map(|gpu| gpu.model.clone()).collect();
        models.sort();
        models.dedup();
        let ports = ports(facts, found(plan, "NCCL_IB_HCA").unwrap_or_default(), now);
        let lanes = |address: &str| node.machine.lanes.iter().find(|lanes| lanes.address == address);
        let narrowest = |addresses: Vec<String>| {
            let links = addresses.iter().filter_map(|address| lanes(address));
            links.min_by_key(|lanes| (lanes.width, &lanes.address)).cloned()
        };
        let used = |name: &str| {
            let mut ports = ports.iter().flatten().filter(|port| port.used());
            ports.any(|port| port.name.rsplit_once(':').is_some_and(|(device, _)| device == name))
        };
        let nics = node.topology.nics.iter().filter(|nic| used(&nic.name)).filter_map(|nic| nic.place.as_ref());
        NodeReport {
            only_looks: !checks::trains(facts.command),
            container: task.container != Container::None,
            gpus: Some(u32::try_from(seen.len()).unwrap_or(u32::MAX)),
            gpus_given: GIVEN.iter().any(|name| facts.environment.get(name).is_some_and(|value| !value.is_empty())),
            models,
            driver: node.machine.driver.clone(),
            gpu_lanes: narrowest(seen.iter().map(|gpu| gpu.place.address.to_string()).collect()),
            nic_lanes: narrowest(nics.map(|place| place.address.to_string()).collect()),
            ports,
            socket: socket(plan, facts, settings),
            memlock: task.memlock,
            open_files: task.open_files,
            // A container that comes later brings its own.
            shm: now.shm.filter(|_| task.container != Container::ComesLater),
            activity: now.activity.clone(),
            ..common
        }
    }

    /// As it is sent; never longer than [`LONGEST`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let whole = serde_json::to_vec(self).unwrap_or_default();
        if whole.len() <= LONGEST {
            return whole;
        }
        // More variables than anybody compares: their hashes say whether they differ.
        let mut short = self.clone();
        for map in [&mut short.step, &mut short.env] {
            map.iter_mut().filter(|(_, value)| value.len() > 24).for_each(|(_, value)| *value = masked(value));
        }
        let bytes = serde_json::to_vec(&short).unwrap_or_default();
        if bytes.len() <= LONGEST {
            return bytes;
        }
        let (step, env) = (BTreeMap::new(), BTreeMap::new());
        serde_json::to_vec(&NodeReport { step, env, ports: None, ..short }).unwrap_or_default()
    }

    /// As it is sent to a node whose plan has `hash`: where this one's is the same,
    /// the plan stays out.
    pub fn to_bytes_for(&self, hash: &str) -> Vec<u8> {
        if hash.is_empty() || hash != self.hash {
            return self.to_bytes();
        }
        NodeReport { step: BTreeMap::new(), env: BTreeMap::new(), ..self.clone() }.to_bytes()
    }

    /// Reads what another node has sent.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_bytes(bytes: &[u8]) -> Result<NodeReport, String> {
        if bytes.len() > LONGEST {
            return Err(format!("a report of {} bytes", bytes.len()));
        }
        if bytes.first() != Some(&b'{') {
            return Err("no report: it is no object".into());
        }
        // serde_json names what it has read: that may be anything.
        let report: NodeReport =
            serde_json::from_slice(bytes).map_err(|error| format!("no report: {}", printable(&error.to_string())))?;
        let told = !report.step.is_empty() || !report.env.is_empty();
        Ok(if told { report.hashed() } else { report })
    }

    /// The same with the place that the server knows of the one who sent it.
    #[must_use]
    pub fn placed(self, node: &str, node_rank: u32) -> NodeReport {
        NodeReport { node: node.into(), node_rank, ..self }
    }

    fn hashed(self) -> NodeReport {
        let bytes = serde_json::to_vec(&(&self.step, &self.env)).unwrap_or_default();
        NodeReport { hash: hash(&bytes, 8), ..self }
    }
}

/// What the ranks will find a variable to be, as far as the plan knows.
fn found<'a>(plan: &'a Plan, name: &str) -> Option<&'a str> {
    let left = || plan.left.iter().find(|note| note.name == name).and_then(|note| note.value.as_deref());
    plan.value(name).or_else(left).filter(|value| !value.is_empty())
}

/// The settings as srun handed them over; a warm-up's command may hold anything.
fn settings(spec: &str) -> String {
    let item = |item: &str| match item.strip_prefix("warm=") {
        Some(command) => format!("warm={}", masked(command)),
        None => item.to_string(),
    };
    spec.split(',').map(item).collect::<Vec<_>>().join(",")
}

/// Begins what stands for a value that is not told.
pub(super) const HASHED: &str = "hash ";

/// 32 bits: enough to see that two values differ, and too few to find one by trying.
fn masked(value: &str) -> String {
    format!("{HASHED}{}", hash(value.as_bytes(), 4))
}

fn hash(bytes: &[u8], length: usize) -> String {
    Hash::hash(bytes).iter().take(length).map(|byte| format!("{byte:02x}")).collect()
}

/// A value as it is sent.
fn shortened(name: &str, value: &str) -> String {
    if is_secret(name) {
        return masked(value);
    }
    match value.char_indices().nth(LONGEST_VALUE) {
        Some((end, _)) => format!("{}… {}", &value[..end], masked(value)),
        None => value.into(),
    }
}

/// Variables that follow from the node or from what stands in `step` already.
const OF_A_NODE: &[&str] = &[
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_CONF",
    "PET_LOCAL_ADDR",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_COORDINATOR_PORT",
    "no_proxy",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "UCX_IB_GID_INDEX",
    "UCX_NET_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_OOB_NET_IFNAME",
    "NVSHMEM_HCA_LIST",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
    "NCCL_TOPO_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_CONF_FILE",
    "NCCL_HOSTID",
    "NCCL_RAS_ADDR",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
];

fn is_of_a_node(name: &str) -> bool {
    let cache =
        || catalog::entry(name).is_some_and(|entry| entry.kind == Kind::Cache) && !MUST_BE_SHARED.contains(&name);
    OF_A_NODE.contains(&name) || name.starts_with("PALINGENESIS_") || cache()
}

/// Variables of others that the libraries read with which the nodes talk.
fn must_be_alike(name: &str) -> bool {
    let talks = |reader| {
        matches!(
            reader,
            Reader::Nccl
                | Reader::NcclPlugin
                | Reader::C10d
                | Reader::Gloo
                | Reader::Ucx
                | Reader::Libfabric
                | Reader::Nvshmem
                | Reader::Torch
                | Reader::Allocator
                | Reader::TransformerEngine
        )
    };
    let tunes = |entry: &catalog::Entry| entry.kind == Kind::Tuning && talks(entry.reader);
    !is_of_a_node(name) && (catalog::entry(name).is_some_and(tunes) || MUST_BE_SHARED.contains(&name))
}

/// The ports that NCCL could use: those of InfiniBand and RoCE. EFA's are reached by
/// libfabric.
fn ports(facts: &Facts, hca: &str, now: &Now) -> Option<Vec<Port>> {
    let list = List::parse(hca);
    let node = facts.node;
    let mtu = |device: &str| {
        let nic = node.topology.nics.iter().find(|nic| nic.name == device)?;
        let netdev = nic.netdevs.first()?;
        let mtu = node.machine.mtu(&netdev.name).or_else(|| node.machine.mtu(netdev.master.as_deref()?))?;
        Some(rdma_mtu(mtu))
    };
    let known = node.rdma.as_ref()?;
    let mut ports: Vec<Port> = known
        .iter()
        .filter(|port| port.link != LinkLayer::Other && port.readable)
        .map(|port| {
            let ethernet = port.link == LinkLayer::Ethernet;
            Port {
                name: format!("{}:{}", port.device, port.port),
                chosen: list.selects(&port.device, Some(port.port.into())),
                ethernet,
                active: port.active,
                hidden: now.hidden.contains(&port.device),
                gbps: port.gbps,
                mtu: if ethernet { mtu(&port.device) } else { None },
            }
        })
        .collect();
    ports.sort_by(|one, other| (!one.chosen, !one.active, &one.name).cmp(&(!other.chosen, !other.active, &other.name)));
    ports.truncate(MOST_PORTS);
    Some(ports)
}

/// The network device by which the ranks of this node reach rank 0, if that is clear.
fn socket(plan: &Plan, facts: &Facts, settings: &Settings) -> Option<Device> {
    let one = |value: &'_ str| match signs(value) {
        (false, true, name) if !name.contains([',', ':']) => Some(name.to_string()),
        _ => None,
    };
    let named = found(plan, "NCCL_SOCKET_IFNAME").and_then(one).or_else(|| settings.iface.clone());
    let near = || {
        let addresses = sockets::rank0_addresses(facts, plan.step.master_addr.as_deref());
        let mut names: Vec<&str> = addresses
            .iter()
            .flat_map(|address| sockets::networks_of(*address, facts.interfaces))
            .map(|interface| interface.name.as_str())
            .filter(|name| *name != "lo")
            .collect();
        names.sort_unstable();
        names.dedup();
        if let [one] = names.as_slice() { Some(one.to_string()) } else { None }
    };
    let name = named.or_else(near).or_else(|| facts.node.topology.default_route.clone())?;
    let mtu = facts.node.machine.mtu(&name)?;
    Some(Device { name, mtu })
}

/// How far another clock is ahead of ours, in nanoseconds, and how far that may be
/// wrong: its time `reported`, for a question asked at `asked` and answered at
/// `answered` by our clock. The moment of the report lies between the two.
pub fn clock_offset(reported: u64, asked: u64, answered: u64) -> (i128, u128) {
    let (reported, asked, answered) = (i128::from(reported), i128::from(asked), i128::from(answered));
    let way = (answered - asked).max(0);
    (reported - (asked + way / 2), (way - way / 2).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Source;
    use crate::facts::rdma::tests::rdma_port;
    use crate::facts::task::FileValue;
    use crate::plan::tests::World;

    fn world(rank: u32) -> World {
        World::new("n[1-2]", "2(x2)", rank)
    }

    #[test]
    fn what_the_nodes_of_a_step_decide_is_the_same_for_all_of_them() {
        for spec in
            ["", "fsdp", "megatron", "jax", "launch=agent", "debug", "deterministic", "fabric=roce", "port=20001"]
        {
            for command in ["python3 train.py", "torchrun train.py", "deepspeed.py"] {
                let report = |rank: u32| {
                    let mut world = World::new("n[1-2]", "1(x2)", rank);
                    world.command = command.split(' ').map(String::from).collect();
                    NodeReport::of(&world.plan(spec).unwrap())
                };
                let (one, other) = (report(0), report(1));
                assert_eq!((one.node_rank, other.node_rank), (0, 1));
                assert_eq!(one.step, other.step, "{spec}: {command}");
                assert_eq!((&one.hash, one.env), (&other.hash, other.env), "{spec}: {command}");
                assert!(one.step.len() > 8, "{:?}", one.step);
            }
        }
    }

    #[test]
    fn the_step_s_decisions_stand_in_it() {
        let report = NodeReport::of(&world(0).plan("fsdp,port=20001").unwrap());
        for (name, value) in [
            ("nodes", "n[1-2]"),
            ("world size", "4"),
            ("launch shape", "native"),
            ("profile", "fsdp"),
            ("MASTER_ADDR", "n1"),
            ("MASTER_PORT", "20001"),
            ("NCCL_IB_TIMEOUT", "22"),
        ] {
            assert_eq!(report.step.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(report.step["settings"].contains("port=20001"));
        for name in ["RANK", "LOCAL_RANK", "NODE_RANK", "OMP_NUM_THREADS", "PALINGENESIS_SET"] {
            assert!(!report.step.contains_key(name), "{name}");
        }
        assert_eq!((report.tasks, report.agent, report.protocol), (2, false, PROTOCOL));
    }

    #[test]
    fn what_others_set_stands_apart_and_a_file_of_nccl_s_counts() {
        let mut world =
            world(0).export(&[("NCCL_PROTO", "Simple"), ("WANDB_MODE", "offline"), ("NCCL_IB_HCA", "mlx5_0")]);
        let file = "/etc/nccl.conf".to_string();
        world.task.nccl_files.push(FileValue { name: "NCCL_ALGO".into(), value: "Ring".into(), file });
        let report = NodeReport::of(&world.plan("").unwrap());
        let env: Vec<_> = report.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(env, [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")]);
        assert_eq!(report.hca.as_deref(), Some("mlx5_0"));
    }

    #[test]
    fn no_secret_and_no_warm_up_s_command_is_sent() {
        let secret = "hf_AbCdEf";
        let plan = world(0).export(&[("OFI_NCCL_X_KEY", secret)]).plan("warm=run%20hf_AbCdEf").unwrap();
        let report = NodeReport::of(&plan);
        let bytes = String::from_utf8(report.to_bytes()).unwrap();
        assert!(!bytes.contains(secret) && report.env["OFI_NCCL_X_KEY"].starts_with(HASHED), "{bytes}");
        // Two values can be told apart.
        assert_ne!(masked("a"), masked("b"));
        assert_eq!(masked("a").len(), HASHED.len() + 8);
    }

    #[test]
    fn what_is_sent_is_read_again_and_an_equal_plan_is_not_sent() {
        let report = NodeReport::of(&world(0).plan("").unwrap());
        assert_eq!(NodeReport::from_bytes(&report.to_bytes()).as_ref(), Ok(&report));
        assert_eq!(NodeReport::from_bytes(&report.to_bytes_for("other")).as_ref(), Ok(&report));
        let short = report.to_bytes_for(&report.hash);
        assert!(report.to_bytes().windows(15).any(|part| part == b"NCCL_IB_TIMEOUT"));
        assert!(!short.windows(15).any(|part| part == b"NCCL_IB_TIMEOUT"));
        let short = NodeReport::from_bytes(&short).unwrap();
        assert!(short.step.is_empty() && short.hash == report.hash && short.node == "n1");
        // A hash is not believed where the plan is there.
        let lie = NodeReport { hash: "0".into(), ..report.clone() };
        assert_eq!(NodeReport::from_bytes(&lie.to_bytes()).map(|report| report.hash), Ok(report.hash));
    }

    #[test]
    fn a_report_of_another_version_is_read_as_far_as_it_goes() {
        let newer = br#"{"node":"n2","node_rank":1,"version":"9.0","protocol":1,"more":{"a":[1,2]},"gpus":8}"#;
        let report = NodeReport::from_bytes(newer).unwrap();
        assert_eq!((report.node.as_str(), report.gpus, report.driver), ("n2", Some(8), None));
        assert_eq!(NodeReport::from_bytes(b"{}"), Ok(NodeReport::default()));
        let placed = NodeReport::from_bytes(newer).unwrap().placed("n7", 6);
        assert_eq!((placed.node.as_str(), placed.node_rank), ("n7", 6));
    }

    #[test]
    fn hostile_reports_are_an_error_of_one_short_line_or_harmless() {
        let deep = [vec![b'['; 60_000], vec![b']'; 4000]].concat();
        let long = vec![b' '; LONGEST + 1];
        let string = format!("{{\"gpus\":\"{}\"}}", "\\u001b[2J\\n".repeat(4000));
        let mut lines: Vec<Vec<u8>> = [
            "",
            "null",
            "[]",
            "{",
            "{\"gpus\":-1}",
            "{\"gpus\":1e99}",
            "{\"node\":7}",
            "{\"step\":[]}",
            "{\"shm\":[1]}",
            "{\"activity\":{\"ticks\":-1}}",
            "{\"ports\":[{\"name\":{}}]}",
            "{\"more\":",
        ]
        .iter()
        .map(|text| text.as_bytes().to_vec())
        .collect();
        lines.extend([deep, long, string.into_bytes(), vec![0xff; 100], b"{\"node\":\"\xff\"}".to_vec()]);
        for bytes in lines {
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
            let error = NodeReport::from_bytes(&bytes).expect_err(&shown);
            assert!(error.len() < 300 && !error.chars().any(char::is_control), "{shown}: {error}");
        }
    }

    #[test]
    fn bytes_that_were_changed_on_the_way_never_panic() {
        let report = NodeReport::of(&world(0).plan("debug").unwrap());
        let bytes = report.to_bytes();
        let mut random = 7u64;
        for _ in 0..2000 {
            let mut changed = bytes.clone();
            for _ in 0..3 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let place = (random >> 33) as usize % changed.len();
                changed[place] = (random >> 20) as u8;
            }
            let _ = NodeReport::from_bytes(&changed);
        }
    }

    #[test]
    fn a_report_is_never_longer_than_what_is_read() {
        let mut report = NodeReport::of(&world(0).plan("").unwrap());
        for number in 0..600 {
            report.env.insert(format!("NCCL_{number}"), "x".repeat(LONGEST_VALUE));
        }
        let bytes = report.to_bytes();
        assert!(bytes.len() <= LONGEST);
        let read = NodeReport::from_bytes(&bytes).unwrap();
        assert!(read.env.len() == 600 && read.env["NCCL_7"].starts_with(HASHED));
        for number in 0..6000 {
            report.env.insert(format!("NCCL_{}_{number}", "long".repeat(40)), "1".into());
        }
        let bytes = report.to_bytes();
        assert!(bytes.len() <= LONGEST && NodeReport::from_bytes(&bytes).is_ok_and(|read| read.node == "n1"));
        let long = shortened("X", &"ä".repeat(LONGEST_VALUE + 1));
        assert_ne!(long, shortened("X", &format!("{}b", "ä".repeat(LONGEST_VALUE))));
    }

    #[test]
    fn the_node_as_its_leader_sees_it() {
        let mut world = world(0).export(&[("NCCL_IB_HCA", "=mlx5_0,mlx5_2")]);
        world.node.rdma = Some(
            [
                ("mlx5_0", LinkLayer::InfiniBand),
                ("mlx5_1", LinkLayer::Ethernet),
                ("mlx5_2", LinkLayer::InfiniBand),
                ("rdmap0s6", LinkLayer::Other),
            ]
            .map(|(device, link)| rdma_port(device, link))
            .to_vec(),
        );
        world.node.machine.driver = Some("550.54.15".into());
        world.node.machine.mtus = vec![("eth0".into(), 9000)];
        world.node.topology.default_route = Some("eth0".into());
        world.task.memlock = Some(65536);
        let settings = Settings::parse("", Source::Option).unwrap();
        let plan = world.plan("").unwrap();
        let facts = Facts { node: &world.node, task: &world.task, ..Facts::new(&world.step, &world.environment) };
        let now = Now { hidden: vec!["mlx5_2".into()], shm: Some((2, 1)), ..Now::default() };
        let report = NodeReport::of(&plan).with(&plan, &facts, &settings, &now);
        let ports = report.ports.clone().unwrap();
        let seen: Vec<_> =
            ports.iter().map(|port| (port.name.as_str(), port.chosen, port.used(), port.ethernet)).collect();
        let expected =
            [("mlx5_0:1", true, true, false), ("mlx5_2:1", true, false, false), ("mlx5_1:1", false, false, true)];
        assert_eq!(seen, expected);
        assert_eq!(report.socket, Some(Device { name: "eth0".into(), mtu: 9000 }));
        assert_eq!(
            (report.driver.as_deref(), report.memlock, report.shm),
            (Some("550.54.15"), Some(65536), Some((2, 1)))
        );
        assert_eq!((report.gpus, report.container), (Some(0), false));
        assert!(report.to_bytes().len() < 8192);
    }

    #[test]
    fn an_offset_lies_in_the_middle_of_the_way_and_may_be_half_of_it_wrong() {
        // Asked at 100, back at 140: made at 120 at the best guess.
        assert_eq!(clock_offset(120, 100, 140), (0, 20));
        assert_eq!(clock_offset(5_000_000_120, 100, 140), (5_000_000_000, 20));
        assert_eq!(clock_offset(0, 1_000, 1_001), (-1_000, 1));
        // A clock that was set back meanwhile.
        assert_eq!(clock_offset(10, 20, 10), (-10, 0));
        assert_eq!(clock_offset(u64::MAX, 0, 0), (i128::from(u64::MAX), 0));
        assert_eq!(clock_offset(0, 0, u64::MAX).1, u128::from(u64::MAX / 2) + 1);
    }
}
