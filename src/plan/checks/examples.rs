//! For each check values that it must find and values that it must not, with
//! what it has to say. The right answers are those of the readers' sources and
//! of the public reports named beside them.

use super::{From, Phase, Subject, Value, judge, look};
use crate::config::{Settings, Source};
use crate::facts::directories::{Directory, Fault, FileSystem, HardLink, Purpose, Request, What};
use crate::facts::locks::OldLock;
use crate::facts::{NodeFacts, TaskFacts};
use crate::plan::Severity::{self, Error, Info};
use crate::plan::tests::World;
use crate::plan::{Refusal, Shape, Warning};

const WARNING: Severity = Severity::Warning;
const PHASES: [Phase; 3] = [Phase::Environment, Phase::Launch, Phase::Node];

/// What the checks look at, to be built up.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    pub values: Vec<Value>,
    pub settings: Settings,
    pub command: Vec<String>,
    pub nodes: u32,
    pub tasks: u32,
    pub shape: Shape,
    pub node: NodeFacts,
    pub task: TaskFacts,
}

/// A step of 8 tasks on 2 nodes with these variables of the user.
pub(super) fn env(pairs: &[&str]) -> Scene {
    let scene = Scene {
        values: Vec::new(),
        settings: Settings::default(),
        command: vec!["python3".into(), "train.py".into()],
        nodes: 2,
        tasks: 8,
        shape: Shape::Native,
        node: NodeFacts::default(),
        task: TaskFacts::default(),
    };
    scene.from(From::User, pairs)
}

impl Scene {
    pub fn from(mut self, from: From, pairs: &[&str]) -> Scene {
        for pair in pairs {
            let (name, value) = pair.split_once('=').unwrap();
            self.values.push(Value { name: name.into(), value: value.into(), from: from.clone() });
        }
        self
    }

    pub fn ours(self, pairs: &[&str]) -> Scene {
        self.from(From::Ours, pairs)
    }

    pub fn image(self, pairs: &[&str]) -> Scene {
        self.from(From::Image, pairs)
    }

    pub fn spec(mut self, spec: &str) -> Scene {
        self.settings = Settings::parse(spec, Source::Option).unwrap();
        self
    }

    pub fn command(mut self, command: &str) -> Scene {
        self.command = command.split(' ').map(String::from).collect();
        self
    }

    pub fn one_task(mut self) -> Scene {
        (self.nodes, self.tasks) = (1, 1);
        self
    }

    pub fn shape(mut self, shape: Shape) -> Scene {
        self.shape = shape;
        self
    }

    pub fn gpus(mut self, model: &str) -> Scene {
        self.node.gpu_models = vec![model.into(); 8];
        self
    }

    /// A directory of caches as it was found in the task.
    pub fn directory(mut self, purpose: Purpose, path: &str, found: impl Fn(&mut Directory)) -> Scene {
        let mut directory = Directory::of(&Request { purpose, ..Request::given(path) });
        found(&mut directory);
        self.task.directories.push(directory);
        self
    }

    /// An old lock file of PyTorch's.
    pub fn lock(mut self, path: &str) -> Scene {
        let owner = crate::facts::locks::Owner::Extensions;
        self.task.locks.push(OldLock { owner, path: path.into(), hours: 50, held: Some(false) });
        self
    }

    /// The same of one that a variable names, on this file system (linux/magic.h).
    pub fn lies_on(self, path: &str, magic: u64) -> Scene {
        self.directory(Purpose::Given, path, |found| found.file_system = Some(FileSystem::of(magic)))
    }

    pub fn look(&self) -> Vec<Warning> {
        let subject = Subject {
            command: &self.command,
            nodes: Some(self.nodes),
            tasks: Some(self.tasks),
            tasks_on_a_node: Some(self.tasks.div_ceil(self.nodes)),
            shape: Some(self.shape),
            node: Some(&self.node),
            task: Some(&self.task),
            ..Subject::of_values(&self.values, &self.settings)
        };
        judge(look(&subject, &PHASES), &self.settings)
    }
}

/// One example of a check.
pub(super) struct Example {
    pub id: &'static str,
    pub scene: Scene,
    /// None: it must find nothing.
    pub severity: Option<Severity>,
    /// What the line must hold.
    pub words: &'static [&'static str],
}

fn bad(id: &'static str, severity: Severity, scene: Scene, words: &'static [&'static str]) -> Example {
    Example { id, scene, severity: Some(severity), words }
}

fn good(id: &'static str, scene: Scene) -> Example {
    Example { id, scene, severity: None, words: &[] }
}

/// Of `nccl.rs`.
pub(super) fn nccl() -> Vec<Example> {
    let mut list = Vec::new();
    ib(&mut list);
    integers(&mut list);
    names(&mut list);
    words(&mut list);
    hardware(&mut list);
    list
}

/// Exponents: 4.096 us * 2^value, by NCCL's guide 1 to 31, seven tries. The
/// seconds of <https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>.
fn ib(list: &mut Vec<Example>) {
    let id = "ib-timeout-range";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["NCCL_IB_TIMEOUT=120"]),
            &["NCCL_IB_TIMEOUT=120", "exponent", "22 is two minutes", "8 minutes", "write 22 if 120 seconds"],
        ),
        // The exponents of these seconds, worked out by hand: 7 * 4.096 us * 2^21 = 60.1 s.
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=60"]), &["write 21 if 60 seconds", "2 hours"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=240"]), &["write 23 if 240 seconds"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=480"]), &["write 24 if 480 seconds"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=960"]), &["write 25 if 960 seconds", "for ever"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=32"]), &["endless", "for ever"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=0x20"]), &["endless"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=0"]), &["waits for ever", "22 is two minutes"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=-1"]), &["no exponent", "22 is two minutes"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=abc"]), &["reads a word as 0", "waits for ever"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=99999999999999999999"]), &["its default"]),
        bad(id, WARNING, env(&[]).image(&["NCCL_IB_TIMEOUT=120"]), &["NCCL_IB_TIMEOUT=120 of the container image"]),
        bad(
            id,
            WARNING,
            env(&[]).from(From::File("/etc/nccl.conf".into()), &["NCCL_IB_TIMEOUT=120"]),
            &["NCCL_IB_TIMEOUT=120 in /etc/nccl.conf"],
        ),
        good(id, env(&[])),
        good(id, env(&["NCCL_IB_TIMEOUT="])),
        good(id, env(&[]).ours(&["NCCL_IB_TIMEOUT=120"])),
    ]);
    for value in ["1", "14", "20", "22", "23", "31", "0x16", "20 "] {
        list.push(good(id, env(&[&format!("NCCL_IB_TIMEOUT={value}")])));
    }
    let id = "ib-timeout-low";
    list.extend([
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=13"]), &["0.2 s", "write 22"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=1"]), &["0.0 s"]),
        good(id, env(&["NCCL_IB_TIMEOUT=14"])),
        good(id, env(&["NCCL_IB_TIMEOUT=0"])),
    ]);
    let id = "ib-retry";
    list.extend([
        bad(id, WARNING, env(&["NCCL_IB_RETRY_CNT=13"]), &["0 to 7", "unset it"]),
        bad(id, WARNING, env(&["NCCL_IB_RETRY_CNT=-1"]), &["0 to 7"]),
        good(id, env(&["NCCL_IB_RETRY_CNT=7"])),
        good(id, env(&["NCCL_IB_RETRY_CNT=0"])),
    ]);
}

/// NCCL, src/misc/param.cc: strtoll(value, NULL, 0).
fn integers(list: &mut Vec<Example>) {
    let id = "nccl-bool-word";
    list.extend([
        bad(id, WARNING, env(&["NCCL_IB_DISABLE=true"]), &["NCCL reads it as 0", "InfiniBand stays on", "write 1"]),
        bad(id, WARNING, env(&["NCCL_P2P_DISABLE=yes"]), &["P2P stays on", "write 1"]),
        bad(id, WARNING, env(&["NCCL_SHM_DISABLE=on"]), &["shared memory stays on", "write 1"]),
        bad(id, WARNING, env(&["NCCL_PXN_DISABLE=True"]), &["nothing is disabled"]),
        bad(id, WARNING, env(&["NCCL_NVLS_ENABLE=true"]), &["it is off"]),
        bad(id, WARNING, env(&["NCCL_IB_QPS_PER_CONNECTION=four"]), &["a word as 0"]),
        bad(id, Info, env(&["NCCL_IB_DISABLE=False"]), &["happens to mean", "write 0"]),
        good(id, env(&["NCCL_IB_DISABLE=1", "NCCL_DEBUG=info", "NCCL_NET=Socket", "NCCL_P2P_LEVEL=SYS"])),
        good(id, env(&["NCCL_IB_DISABLE="])),
        // Said once, with what it does there.
        good(id, env(&["NCCL_IB_TIMEOUT=abc"])),
    ]);
    let id = "nccl-octal";
    list.extend([
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=022"]), &["NCCL reads 18", "write 22"]),
        bad(id, WARNING, env(&["NCCL_IB_TC=0106"]), &["NCCL reads 70", "write 106"]),
        bad(id, WARNING, env(&["NCCL_IB_TC=09"]), &["NCCL reads 0", "write 9"]),
        good(id, env(&["NCCL_IB_TC=106"])),
        good(id, env(&["NCCL_IB_TC=0"])),
        good(id, env(&["NCCL_IB_SL=03"])),
        good(id, env(&["NCCL_IB_TC=0x6a"])),
    ]);
    let id = "nccl-trailing";
    list.extend([
        bad(id, WARNING, env(&["NCCL_BUFFSIZE=4M"]), &["NCCL reads 4", "'M'", "no units", "write 4194304"]),
        bad(id, WARNING, env(&["NCCL_BUFFSIZE=512KiB"]), &["write 524288"]),
        bad(id, WARNING, env(&["NCCL_IB_TIMEOUT=22s"]), &["NCCL reads 22", "write 22"]),
        bad(id, WARNING, env(&["NCCL_BUFFSIZE=99999999999999999999"]), &["its default"]),
        bad(id, Info, env(&["NCCL_IB_TIMEOUT=20 "]), &["NCCL reads 20", "write 20"]),
        good(id, env(&["NCCL_BUFFSIZE=4194304"])),
        good(id, env(&["NCCL_BUFFSIZE=0x400000"])),
    ]);
    let id = "gdr-level-int";
    list.extend([
        // NCCL, src/graph/paths.cc: LOC, PIX, PXB, PHB, SYS, SYS.
        bad(id, WARNING, env(&["NCCL_NET_GDR_LEVEL=5"]), &["SYS", "across CPU sockets", "unset it"]),
        bad(id, WARNING, env(&["NCCL_NET_GDR_LEVEL=2"]), &["PXB"]),
        bad(id, WARNING, env(&["NCCL_NET_GDR_LEVEL=0"]), &["LOC", "off"]),
        good(id, env(&["NCCL_NET_GDR_LEVEL=PHB"])),
    ]);
    let id = "level-case";
    list.extend([
        bad(id, WARNING, env(&["NCCL_NET_GDR_LEVEL=phb"]), &["capitals", "write PHB"]),
        bad(id, WARNING, env(&["NCCL_P2P_LEVEL=NVLINK"]), &["write one of LOC, NVL"]),
        good(id, env(&["NCCL_P2P_LEVEL=NVL", "NCCL_NET_GDR_LEVEL=SYS", "NCCL_NET_MERGE_LEVEL=LOC"])),
        good(id, env(&["NCCL_P2P_LEVEL=4"])),
    ]);
    let id = "sockets-product";
    list.extend([
        bad(id, WARNING, env(&["NCCL_SOCKET_NTHREADS=32"]), &["16 threads"]),
        bad(id, WARNING, env(&["NCCL_SOCKET_NTHREADS=16", "NCCL_NSOCKS_PERTHREAD=8"]), &["64 sockets"]),
        bad(id, WARNING, env(&["NCCL_NSOCKS_PERTHREAD=32"]).ours(&["NCCL_SOCKET_NTHREADS=4"]), &["64 sockets"]),
        good(id, env(&["NCCL_SOCKET_NTHREADS=8", "NCCL_NSOCKS_PERTHREAD=8"])),
        good(id, env(&[]).ours(&["NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"])),
    ]);
    let id = "ctas";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["NCCL_MIN_CTAS=16", "NCCL_MAX_CTAS=8"]),
            &["NCCL_MIN_CTAS=16 is more than NCCL_MAX_CTAS=8"],
        ),
        bad(id, WARNING, env(&["NCCL_MAX_CTAS=128"]), &["1 to 64"]),
        bad(id, WARNING, env(&["NCCL_MAX_CTAS=48"]).image(&["NCCL_VERSION=2.21.5-1"]), &["1 to 32"]),
        good(id, env(&["NCCL_MIN_CTAS=8", "NCCL_MAX_CTAS=32"])),
        good(id, env(&["NCCL_MAX_CTAS=48"]).image(&["NCCL_VERSION=2.26.2-1"])),
    ]);
    let id = "nthreads";
    list.extend([
        bad(id, WARNING, env(&["NCCL_NTHREADS=1024"]), &["64, 128, 256 or 512"]),
        bad(id, WARNING, env(&["NCCL_NTHREADS=many"]), &["64, 128, 256 or 512"]),
        good(id, env(&["NCCL_NTHREADS=256"])),
    ]);
}

/// Lists of names, and the names of variables.
fn names(list: &mut Vec<Example>) {
    let id = "ifname-grammar";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["NCCL_SOCKET_IFNAME=^lo,^docker"]),
            &["'^docker'", "write NCCL_SOCKET_IFNAME=^lo,docker"],
        ),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAME==eth0,=eth1"]), &["write NCCL_SOCKET_IFNAME==eth0,eth1"]),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAME=eth0, eth1"]), &["blanks", "=eth0,eth1"]),
        bad(id, Error, env(&["NCCL_SOCKET_IFNAME==^eth0"]), &["no socket interface found", "=^=eth0"]),
        bad(
            id,
            Error,
            env(&["NCCL_SOCKET_IFNAME= eth0"]),
            &["no socket interface found", "write NCCL_SOCKET_IFNAME=eth0"],
        ),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAME=eth0,^lo"]), &["either name"]),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAME=mlx5_0"]), &["RDMA device", "NCCL_IB_HCA"]),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAME=eth0:1"]), &["no ports"]),
        bad(id, WARNING, env(&["NCCL_OOB_NET_IFNAME= ib0"]), &["blanks"]),
        good(id, env(&["NCCL_SOCKET_IFNAME=^lo,docker"])),
        good(id, env(&["NCCL_SOCKET_IFNAME=^=lo,docker0"])),
        good(id, env(&["NCCL_SOCKET_IFNAME==eth0,eth1"])),
        good(id, env(&["NCCL_SOCKET_IFNAME=eth,ib"])),
        good(id, env(&["NCCL_SOCKET_IFNAME="])),
    ]);
    // <https://github.com/NVIDIA/nccl-tests/issues/150>.
    let id = "hca-grammar";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["NCCL_IB_HCA=^=mlx5_8,^=mlx5_14"]),
            &["'^=mlx5_14'", "write NCCL_IB_HCA=^=mlx5_8,mlx5_14"],
        ),
        bad(id, WARNING, env(&["NCCL_IB_HCA==^mlx5_3"]), &["in this order", "write NCCL_IB_HCA=^=mlx5_3"]),
        bad(id, WARNING, env(&["NCCL_IB_HCA= =mlx5_0"]), &["blanks", "write NCCL_IB_HCA==mlx5_0"]),
        good(id, env(&["NCCL_IB_HCA=^=mlx5_8,mlx5_14"])),
        good(id, env(&["NCCL_IB_HCA==mlx5_0:1,mlx5_1:1"])),
        good(id, env(&["NCCL_IB_HCA=mlx5"])),
        good(id, env(&["NCCL_IB_HCA=^mlx5_bond_0:1"])),
        good(id, env(&["NCCL_IB_HCA=mlx5_0:1:0:1"])),
        good(id, env(&["NCCL_IB_HCA=devA:255"])),
        bad(
            id,
            WARNING,
            env(&[&format!("NCCL_IB_HCA={}", (0..33).map(|n| format!("mlx5_{n}")).collect::<Vec<_>>().join(","))]),
            &["33 entries", "32"],
        ),
    ]);
    // <https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>.
    for port in [":08", ":+8", ":8abc", ":", "::2", ":18446744073709551615", ":0", ":256", ":-1"] {
        list.push(bad(
            id,
            WARNING,
            env(&[&format!("NCCL_IB_HCA==devP{port},devB:1")]),
            &["'devP", "port from 1 to 255"],
        ));
    }
    list.push(bad(id, WARNING, env(&["NCCL_IB_HCA==devP: 8"]), &["blanks", "write NCCL_IB_HCA==devP:8"]));
    let id = "gdr-dead-name";
    list.extend([
        bad(id, Info, env(&["NCCL_IB_GDR_LEVEL=5"]), &["gave this name up", "NCCL_NET_GDR_LEVEL"]),
        bad(id, Info, env(&["NCCL_IB_CUDA_SUPPORT=1"]), &["GPUDirect RDMA is automatic"]),
        bad(id, Info, env(&["NCCL_TREE_THRESHOLD=0"]), &["chooses by itself"]),
        good(id, env(&["NCCL_NET_GDR_LEVEL=PHB"])),
    ]);
    // <https://github.com/llm-d/llm-d-benchmark/pull/1862>.
    let id = "phantom";
    list.extend([
        bad(id, WARNING, env(&["NCCL_DEBG=INFO"]), &["NCCL_DEBG", "write NCCL_DEBUG "]),
        bad(id, WARNING, env(&["NCCL_SOCKET_IFNAMES=eth0"]), &["write NCCL_SOCKET_IFNAME "]),
        bad(id, WARNING, env(&["NCCL_EXCLUDE_IB_HCA=mlx5_7"]), &["NCCL_IB_HCA"]),
        bad(id, WARNING, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLNG=1"]), &["write TORCH_NCCL_ASYNC_ERROR_HANDLING "]),
        bad(id, WARNING, env(&["NCCL_TIMEOUT=1800"]), &["nobody reads", "init_process_group"]),
        bad(id, WARNING, env(&["TORCH_NCCL_TIMEOUT=1800"]), &["nobody reads"]),
        bad(id, WARNING, env(&["NCCL_MIN_CHANNELS=8"]), &["nobody reads", "NCCL_MIN_CTAS"]),
        bad(id, Info, env(&["NCCL_WORK_FIFO_DEPTH=1"]), &["by nobody now"]),
        good(id, env(&["NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME=eth0", "NCCL_P2P_LL_THRESHOLD=1", "NCCL_MIN_NRINGS=4"])),
        good(
            id,
            env(&["NCCL_VERSION=2.21.5", "NCCL_ROOT=/opt/nccl", "NCCL_HOME=/opt/nccl", "NCCL_SITE_LICENSE_OWNER=me"]),
        ),
        good(id, env(&["NCCL_FASTRAK_NUM_FLOWS=2", "NCCL_GPUDIRECTTCPX_CTRL_DEV=eth0"])),
    ]);
}

/// Words, files and versions.
fn words(list: &mut Vec<Example>) {
    let id = "algo-proto";
    list.extend([
        bad(id, WARNING, env(&["NCCL_ALGO=Rnig"]), &["'Rnig'", "does not start with it since 2.24", "Ring, Tree"]),
        bad(
            id,
            Error,
            env(&["NCCL_ALGO=Rnig"]).image(&["NCCL_VERSION=2.26.2-1"]),
            &["NCCL 2.26.2 does not start with it"],
        ),
        bad(id, WARNING, env(&["NCCL_ALGO=Rnig"]).image(&["NCCL_VERSION=2.21.5-1"]), &["NCCL 2.21.5 ignores it"]),
        bad(id, WARNING, env(&["NCCL_ALGO=^NVLS,^NVLSTree"]), &["'^NVLSTree'", "write NCCL_ALGO=^NVLS,NVLSTree"]),
        bad(id, WARNING, env(&["NCCL_ALGO=Ring, Tree"]), &["write NCCL_ALGO=Ring,Tree"]),
        bad(id, WARNING, env(&["NCCL_ALGO=allsum:Ring"]), &["'allsum'"]),
        bad(id, WARNING, env(&["NCCL_PROTO=LL256"]), &["LL, LL128, Simple"]),
        bad(id, WARNING, env(&["NCCL_PROTO=LL128"]), &["corrupted"]),
        bad(id, Info, env(&["NCCL_ALGO=Ring"]), &["takes the choice from NCCL"]),
        bad(
            id,
            Info,
            env(&["NCCL_ALGO=ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"]),
            &["takes the choice"],
        ),
        bad(id, Info, env(&["NCCL_PROTO=^LL128"]), &["takes the choice"]),
        good(id, env(&["NCCL_ALGO=Ring"]).spec("deterministic")),
        good(id, env(&["NCCL_ALGO="])),
        good(id, env(&[]).ours(&["NCCL_ALGO=Ring"])),
    ]);
    let id = "debug-file";
    list.extend([
        bad(id, WARNING, env(&["NCCL_DEBUG_FILE=/tmp/nccl.log"]), &["over each other", "%h and %p"]),
        bad(id, WARNING, env(&["NCCL_DEBUG_FILE=/tmp/nccl.%h"]), &["%p"]),
        bad(id, WARNING, env(&["NCCL_DEBUG_FILE=~/nccl.%h.%p"]), &["does not know ~", "whole path"]),
        bad(id, WARNING, env(&["NCCL_DEBUG_FILE=/tmp/nccl.log"]).one_task().shape(Shape::Agent), &["over each other"]),
        good(id, env(&["NCCL_DEBUG_FILE=/tmp/nccl.%h.%p"])),
        good(id, env(&["NCCL_DEBUG_FILE=/dev/stderr"])),
        good(id, env(&["NCCL_DEBUG_FILE=/tmp/nccl.log"]).one_task()),
    ]);
    let id = "debug-word";
    list.extend([
        bad(id, WARNING, env(&["NCCL_DEBUG=WARM"]), &["logs nothing at all", "write WARN"]),
        bad(id, WARNING, env(&["NCCL_DEBUG=1"]), &["logs nothing at all"]),
        bad(id, WARNING, env(&["NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,NETWORK"]), &["'NETWORK'", "INIT,COLL"]),
        good(id, env(&["NCCL_DEBUG=info", "NCCL_DEBUG_SUBSYS=^COLL,P2P"])),
        good(id, env(&["NCCL_DEBUG=VERSION"])),
        good(id, env(&["NCCL_DEBUG="])),
    ]);
    let id = "subsys-no-info";
    list.extend([
        bad(
            id,
            Info,
            env(&["NCCL_DEBUG_SUBSYS=NET"]).ours(&["NCCL_DEBUG=WARN"]),
            &["NCCL_DEBUG=WARN", "NCCL_DEBUG=INFO too"],
        ),
        bad(id, Info, env(&["NCCL_DEBUG_SUBSYS=NET"]), &["does not print"]),
        good(id, env(&["NCCL_DEBUG_SUBSYS=NET", "NCCL_DEBUG=info"])),
        good(id, env(&["NCCL_DEBUG_SUBSYS=NET"]).ours(&["NCCL_DEBUG=INFO"])),
    ]);
    let id = "version-gate";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["NCCL_IB_ADDR_RANGE=10.0.0.0/8"]).image(&["NCCL_VERSION=2.19.3-1+cuda12.3"]),
            &["NCCL 2.19.3", "does not read it yet", "2.21"],
        ),
        bad(
            id,
            WARNING,
            env(&["PYTORCH_ALLOC_CONF=expandable_segments:True"]).image(&["PYTORCH_VERSION=2.7.0a0+git"]),
            &["PyTorch 2.7.0", "2.9"],
        ),
        good(id, env(&["NCCL_IB_ADDR_RANGE=10.0.0.0/8"]).image(&["NCCL_VERSION=2.21.5-1"])),
        good(id, env(&["NCCL_IB_ADDR_RANGE=10.0.0.0/8"])),
        good(id, env(&["PYTORCH_ALLOC_CONF=expandable_segments:True"]).image(&["PYTORCH_VERSION=2.9.1"])),
    ]);
}

/// What the models, as the driver prints them, say.
fn hardware(list: &mut Vec<Example>) {
    let (h100, a100) = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB");
    let id = "p2p-disabled";
    list.extend([
        bad(id, WARNING, env(&["NCCL_P2P_DISABLE=1"]).gpus(h100), &["NVLink", "H100"]),
        bad(id, WARNING, env(&["NCCL_P2P_DISABLE=1"]).gpus(a100), &["NVLink"]),
        bad(id, Info, env(&["NCCL_P2P_DISABLE=1"]), &["by way of the CPU"]),
        good(id, env(&["NCCL_P2P_DISABLE=1"]).gpus("NVIDIA GeForce RTX 4090")),
        good(id, env(&["NCCL_P2P_DISABLE=1"]).gpus("NVIDIA A100-PCIE-40GB")),
        good(id, env(&["NCCL_P2P_DISABLE=0"]).gpus(h100)),
        // Only 1 counts (NCCL, src/graph/paths.cc).
        good(id, env(&["NCCL_P2P_DISABLE=2"]).gpus(h100)),
    ]);
    let id = "hostid";
    list.extend([
        bad(id, WARNING, env(&["NCCL_HOSTID=train"]), &["takes them for one host", "TaskProlog"]),
        good(id, env(&["NCCL_HOSTID=train"]).one_task()),
        good(id, env(&["NCCL_HOSTID="])),
    ]);
    let id = "shm-disabled";
    list.extend([
        bad(id, WARNING, env(&["NCCL_SHM_DISABLE=1"]), &["/dev/shm", "unset it"]),
        good(id, env(&["NCCL_SHM_DISABLE=0"])),
        good(id, env(&["NCCL_SHM_DISABLE=true"])),
    ]);
}

/// Of `torch.rs`.
pub(super) fn torch() -> Vec<Example> {
    let mut list = Vec::new();
    c10d(&mut list);
    allocator(&mut list);
    others(&mut list);
    list
}

/// c10d/Utils.hpp, getCvarBool and getCvarInt; c10d/debug.cpp.
fn c10d(list: &mut Vec<Example>) {
    let id = "c10d-bool";
    list.extend([
        bad(
            id,
            Error,
            env(&["TORCH_NCCL_BLOCKING_WAIT=maybe"]),
            &["TORCH_NCCL_BLOCKING_WAIT=maybe", "throws", "write 1 or 0"],
        ),
        bad(id, Error, env(&["TORCH_NCCL_ENABLE_MONITORING=on"]), &["throws"]),
        bad(id, Error, env(&["TORCH_NCCL_DUMP_ON_TIMEOUT=2"]), &["throws"]),
        bad(id, Error, env(&["TORCH_NCCL_BLOCKING_WAIT="]), &["throws"]),
        bad(id, Error, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=true"]), &["a number", "throws"]),
        bad(id, WARNING, env(&["TORCH_NCCL_BLOCKING_WAIT=maybe"]).spec("jax"), &["throws"]),
        bad(id, Error, env(&["TORCH_DISTRIBUTED_DEBUG=FULL"]), &["OFF, INFO and DETAIL"]),
        good(
            id,
            env(&["TORCH_NCCL_BLOCKING_WAIT=Yes", "TORCH_NCCL_ENABLE_MONITORING=0", "TORCH_NCCL_DUMP_ON_TIMEOUT=f"]),
        ),
        good(id, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=3", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800"])),
        good(id, env(&["TORCH_DISTRIBUTED_DEBUG=detail"]).spec("debug")),
        good(id, env(&[]).ours(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=x"])),
    ]);
    let id = "torch-rename";
    list.extend([
        bad(
            id,
            Info,
            env(&["NCCL_ASYNC_ERROR_HANDLING=0"]).ours(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=1"]),
            &["called TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 stands above it"],
        ),
        bad(
            id,
            Info,
            env(&["NCCL_BLOCKING_WAIT=1"]).image(&["PYTORCH_VERSION=2.3.0a0"]),
            &["TORCH_NCCL_BLOCKING_WAIT"],
        ),
        good(id, env(&["NCCL_ASYNC_ERROR_HANDLING=1"]).image(&["PYTORCH_VERSION=2.1.2"])),
        good(id, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=1"])),
    ]);
    let id = "async-off";
    list.extend([
        bad(id, WARNING, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"]), &["wait for ever"]),
        bad(id, WARNING, env(&["NCCL_ASYNC_ERROR_HANDLING=0"]), &["wait for ever"]),
        bad(id, WARNING, env(&["TORCH_NCCL_BLOCKING_WAIT=True"]), &["blocks the CPU"]),
        good(id, env(&["TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "NCCL_ASYNC_ERROR_HANDLING=0"])),
        good(id, env(&["TORCH_NCCL_BLOCKING_WAIT=0"])),
    ]);
    let id = "avoid-record";
    list.extend([
        bad(
            id,
            Info,
            env(&["TORCH_NCCL_AVOID_RECORD_STREAMS=1"]).image(&["PYTORCH_VERSION=2.8.0a0+34c6371d24"]),
            &["PyTorch 2.8.0", "anyway"],
        ),
        good(id, env(&["TORCH_NCCL_AVOID_RECORD_STREAMS=1"]).image(&["PYTORCH_VERSION=2.7.1"])),
        good(id, env(&["TORCH_NCCL_AVOID_RECORD_STREAMS=1"])),
    ]);
}

/// c10/cuda/CUDAAllocatorConfig.cpp.
fn allocator(list: &mut Vec<Example>) {
    let id = "alloc-both";
    let (old, new) = ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "PYTORCH_ALLOC_CONF=max_split_size_mb:128");
    list.extend([
        bad(
            id,
            WARNING,
            env(&[old, "PYTORCH_ALLOC_CONF=expandable_segments:True"]),
            &["differ", "unset PYTORCH_ALLOC_CONF"],
        ),
        good(id, env(&[old, new])),
        good(id, env(&[new])),
    ]);
    let id = "alloc-keys";
    let conf = |value: &str| env(&[&format!("PYTORCH_CUDA_ALLOC_CONF={value}")]);
    list.extend([
        bad(
            id,
            Error,
            conf("expandable_segment:True"),
            &["no option 'expandable_segment'", "write expandable_segments"],
        ),
        bad(id, Error, conf("expandable_segments=True"), &["KEY:VALUE", "write expandable_segments:True"]),
        bad(id, Error, conf("expandable_segments:true"), &["True or False"]),
        bad(id, Error, conf("max_split_size_mb:16"), &["above 20"]),
        bad(id, Error, conf("garbage_collection_threshold:80"), &["between 0 and 1"]),
        bad(id, Error, conf("backend:async"), &["cudaMallocAsync"]),
        bad(id, WARNING, env(&["PYTORCH_ALLOC_CONF=max_split_size:128"]), &["write max_split_size_mb if"]),
        bad(id, Error, conf("max_split_sise_mb:128"), &["write max_split_size_mb"]),
        // Of a newer release, perhaps.
        bad(id, WARNING, conf("pinned_max_register_threads:8"), &["throws at unknown ones"]),
        bad(id, WARNING, conf("quantum_pages:7"), &["'quantum_pages'"]),
        good(id, conf("expandable_segments:True,max_split_size_mb:512, garbage_collection_threshold:0.8")),
        good(id, conf("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:False")),
        good(id, conf("backend:cudaMallocAsync")),
        good(id, conf("")),
    ]);
    let id = "alloc-vs-ub";
    let expandable = || conf("expandable_segments:True");
    list.extend([
        bad(
            id,
            WARNING,
            expandable().command("python3 pretrain_gpt.py --use-nccl-ub"),
            &["user buffers", "take expandable_segments out"],
        ),
        bad(
            id,
            WARNING,
            expandable().command("python3 pretrain_gpt.py --enable-cuda-graph"),
            &["CUDA graphs", "NCCL_GRAPH_REGISTER=0"],
        ),
        bad(
            id,
            WARNING,
            conf("expandable_segments:True").from(From::User, &["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1"]),
            &["registers the allocator's memory"],
        ),
        good(id, expandable().command("python3 pretrain_gpt.py --enable-cuda-graph").ours(&["NCCL_GRAPH_REGISTER=0"])),
        good(id, conf("expandable_segments:False").command("python3 pretrain_gpt.py --use-nccl-ub")),
        good(id, expandable()),
    ]);
}

fn others(list: &mut Vec<Example>) {
    let one = || env(&["CUDA_DEVICE_MAX_CONNECTIONS=1"]);
    let id = "maxconn-range";
    list.extend([
        bad(id, WARNING, env(&["CUDA_DEVICE_MAX_CONNECTIONS=64"]), &["1 to 32"]),
        bad(id, WARNING, env(&["CUDA_DEVICE_MAX_CONNECTIONS=0"]), &["1 to 32"]),
        bad(id, WARNING, env(&["CUDA_DEVICE_MAX_CONNECTIONS=one"]), &["1 to 32"]),
        good(id, env(&["CUDA_DEVICE_MAX_CONNECTIONS=32"])),
        good(id, one()),
    ]);
    let id = "maxconn-fsdp";
    list.extend([
        // Megatron-LM, megatron/training/arguments.py: both assert against "1".
        bad(
            id,
            Error,
            one().command("python3 pretrain_gpt.py --use-torch-fsdp2"),
            &["does not start FSDP", "unset it"],
        ),
        bad(id, Error, one().command("python3 pretrain_gpt.py --use-megatron-fsdp"), &["does not start FSDP"]),
        bad(id, WARNING, one().spec("fsdp"), &["streams of FSDP"]),
        bad(id, WARNING, one().command("python3 train.py --deepspeed ds.json"), &["streams of DeepSpeed"]),
        good(id, one().command("python3 pretrain_gpt.py --tensor-model-parallel-size 8")),
        good(id, one().spec("megatron")),
        good(id, env(&["CUDA_DEVICE_MAX_CONNECTIONS=8"]).spec("fsdp")),
        good(id, env(&[]).ours(&["CUDA_DEVICE_MAX_CONNECTIONS=1"]).spec("fsdp")),
    ]);
    let id = "maxconn-blackwell";
    list.extend([
        bad(id, WARNING, one().gpus("NVIDIA B200"), &["B200", "write 32"]),
        good(id, one().gpus("NVIDIA H100 80GB HBM3")),
        good(id, env(&["CUDA_DEVICE_MAX_CONNECTIONS=32"]).gpus("NVIDIA B200")),
    ]);
    let id = "launch-blocking";
    list.extend([
        bad(id, WARNING, env(&["CUDA_LAUNCH_BLOCKING=1"]), &["waits for each kernel"]),
        bad(id, WARNING, env(&["PYTORCH_NO_CUDA_MEMORY_CACHING=1"]), &["cudaMalloc"]),
        bad(id, WARNING, env(&["NVIDIA_TF32_OVERRIDE=0"]), &["TF32"]),
        bad(id, WARNING, env(&["TORCH_DISTRIBUTED_DEBUG=DETAIL"]), &["compare each collective"]),
        good(id, env(&["TORCH_DISTRIBUTED_DEBUG=DETAIL"]).spec("debug")),
        good(id, env(&["CUDA_LAUNCH_BLOCKING=0", "NVIDIA_TF32_OVERRIDE=1", "TORCH_DISTRIBUTED_DEBUG=INFO"])),
    ]);
    let id = "gloo-grammar";
    list.extend([
        bad(id, WARNING, env(&["GLOO_SOCKET_IFNAME=^lo,docker0"]), &["Unable to find address for", "no exclusion"]),
        bad(id, WARNING, env(&["GLOO_SOCKET_IFNAME==eth0"]), &["write GLOO_SOCKET_IFNAME=eth0"]),
        bad(id, WARNING, env(&["TP_SOCKET_IFNAME=eth0:1"]), &["write TP_SOCKET_IFNAME=eth0"]),
        good(id, env(&["GLOO_SOCKET_IFNAME=eth0,eth1"])),
    ]);
    let id = "proxy-jax";
    let proxy = || env(&["https_proxy=http://me:s3cr3t@proxy:3128"]);
    list.extend([
        bad(id, WARNING, proxy().command("python3 -m maxtext.train"), &["https_proxy is set", "profile=jax"]),
        good(id, proxy().command("python3 train.py")),
        good(id, proxy().command("python3 -m jax.train").spec("jax")),
        good(id, env(&["https_proxy="]).command("python3 -m jax.train")),
        good(id, proxy().command("python3 -m jax.train").one_task()),
    ]);
    let id = "efa-obsolete";
    list.extend([
        bad(id, Info, env(&["FI_EFA_USE_DEVICE_RDMA=1"]), &["by itself", "unset it"]),
        bad(id, Info, env(&["FI_PROVIDER=efa", "RDMAV_FORK_SAFE=1"]), &["RDMAV_FORK_SAFE=1"]),
        bad(id, Info, env(&["NCCL_PROTO=simple"]).spec("fabric=efa"), &["EFA plugin"]),
        good(id, env(&["RDMAV_FORK_SAFE=1"])),
        good(id, env(&["NCCL_PROTO=simple"])),
        good(id, env(&["FI_PROVIDER=efa"])),
    ]);
    let id = "empty-rank";
    list.extend([
        bad(
            id,
            WARNING,
            env(&["MASTER_ADDR="]).shape(Shape::Agent),
            &["MASTER_ADDR is set, but to nothing", "unset MASTER_ADDR"],
        ),
        bad(id, WARNING, env(&["RANK="]).shape(Shape::Shell), &["unset RANK"]),
        good(id, env(&["RANK="])),
        good(id, env(&["RANK=0"]).shape(Shape::Shell)),
        good(id, env(&[]).ours(&["MASTER_ADDR=n1"]).shape(Shape::Agent)),
    ]);
    let id = "secrets-argv";
    let hugging = format!("python3 train.py --hf {}{}", "hf_", "abcdefghijklmnopqrstuvwxyzABCDEFGH");
    let wandb = format!("python3 train.py --wandb-key {}", "0123456789abcdef".repeat(3).get(..40).unwrap());
    let commit = format!("python3 train.py --commit {}", "0123456789abcdef".repeat(3).get(..40).unwrap());
    list.extend([
        bad(id, WARNING, env(&[]).command(&hugging), &["argument 3", "Hugging Face", "in ps"]),
        bad(id, WARNING, env(&[]).command(&hugging.replace("--hf ", "TOKEN=")), &["argument 2"]),
        bad(id, WARNING, env(&[]).command(&wandb), &["argument 3", "Weights & Biases"]),
        good(id, env(&[]).command(&commit)),
        good(id, env(&[]).command(&commit.replace("--commit", "--tokenizer-revision"))),
        bad(id, WARNING, env(&[]).command(&commit.replace("--commit", "--token")), &["argument 3"]),
        good(id, env(&[]).command("python3 train.py /data/hf_datasets_cache_of_the_last_pretraining_run")),
        good(
            id,
            env(&[]).command("python3 train.py --set ASIA_PACIFIC_DATA_2024 sk-learn-baseline-of-the-experiment-7"),
        ),
        bad(id, WARNING, env(&[]).command(&format!("aws --id {}{}", "AKIA", "IOSFODNN7EXAMPLE")), &["AWS"]),
        good(id, env(&[]).command("python3 hf_train.py --task-ghp_x --ask-me-anything-about-sk-learn-and-numpy-too")),
    ]);
    let id = "kill-on-bad";
    list.extend([
        bad(id, WARNING, env(&["SLURM_KILL_BAD_EXIT=0"]), &["the others wait", "--kill-on-bad-exit=1"]),
        bad(id, WARNING, env(&["SLURM_NO_KILL=1"]), &["--no-kill"]),
        good(id, env(&["SLURM_KILL_BAD_EXIT=1"])),
        good(id, env(&["SLURM_NO_KILL=off"])),
    ]);
}

/// Of `caches.rs`; more of it beside the plan of the caches.
pub(super) fn caches_examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    let (nfs, ext4) = (0x6969, 0xEF53);
    let triton = || env(&["TRITON_CACHE_DIR=/home/me/t"]);
    let hub = || env(&["HF_HOME=/data/hf"]);
    let shared = |found: &dyn Fn(&mut Directory)| {
        env(&[]).spec("cache=/scratch").directory(Purpose::Shared, "/scratch", found).look()
    };
    let uv = |fault: Option<&str>| {
        let fault = fault.map(String::from);
        let set = |found: &mut Directory| found.hard_link = Some(HardLink { to: "/env".into(), fault: fault.clone() });
        env(&["UV_CACHE_DIR=/mine/uv"]).directory(Purpose::Given, "/mine/uv", set).look()
    };
    vec![
        ("cache-path", true, env(&["HF_HOME=/HF_HOME"]).look()),
        ("cache-path", false, hub().look()),
        ("cache-nfs", true, triton().lies_on("/home/me/t", nfs).look()),
        ("cache-nfs", false, triton().lies_on("/home/me/t", nfs).one_task().look()),
        ("cache-nfs", false, triton().lies_on("/home/me/t", ext4).look()),
        ("shared-local", true, hub().lies_on("/data/hf", ext4).look()),
        ("shared-local", false, hub().lies_on("/data/hf", ext4).one_task().look()),
        ("shared-local", false, hub().lies_on("/data/hf", nfs).look()),
        ("cache-unusable", true, {
            let at = "/scratch".to_string();
            shared(&|found| found.fault = Some(Fault { at: at.clone(), what: What::Missing }))
        }),
        ("cache-unusable", false, shared(&|_| {})),
        ("cache-lock-old", true, env(&[]).lock("/home/me/.cache/torch_extensions/py311_cu124/fused/lock").look()),
        ("cache-lock-old", false, env(&[]).look()),
        ("cache-space", true, shared(&|found| found.free = Some(1 << 20))),
        ("cache-space", false, shared(&|found| found.free = Some(1 << 40))),
        ("uv-link", true, uv(Some("another file system"))),
        ("uv-link", false, uv(None)),
    ]
}

/// What a whole plan finds: rank 1 of a step on two nodes, `tasks` on each.
fn planned(tasks: &str, command: &str, environment: &[(&str, &str)], spec: &str) -> Vec<Warning> {
    let mut world = World::new("n[1-2]", tasks, 1).export(environment);
    world.command = command.split(' ').map(String::from).collect();
    world.node.ephemeral_ports = Some((32768, 60999));
    match world.plan(spec) {
        Ok(plan) => plan.warnings,
        Err(Refusal::Checks(errors)) => errors,
        Err(other) => panic!("{other}"),
    }
}

/// Of `launcher.rs`, and of the checks that the plan makes itself: id, whether it
/// must find something, and what it found.
pub(super) fn plan_examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    let plain = |environment: &[(&str, &str)], spec| planned("1", "python3 train.py", environment, spec);
    vec![
        ("ranks-stale", true, plain(&[("RANK", "7")], "")),
        ("ranks-stale", false, plain(&[], "")),
        ("port-range", true, plain(&[], "port=40000")),
        ("port-range", false, plain(&[], "port=20000")),
        ("launcher-shape", true, planned("2", "torchrun x.py", &[], "")),
        ("launcher-shape", false, planned("1", "torchrun x.py", &[], "")),
        ("launcher-variables", true, planned("1", "torchrun x.py", &[("PET_NNODES", "1")], "")),
        ("launcher-variables", false, planned("1", "torchrun x.py", &[("PET_NNODES", "2")], "")),
        ("launcher-flags", true, planned("1", "accelerate launch x.py", &[], "")),
        ("launcher-flags", false, planned("1", "torchrun x.py", &[], "")),
    ]
}

/// Of `nccl.rs`, for the test that asks for both kinds of every check.
pub(super) fn nccl_examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    found(nccl())
}

/// Of `torch.rs`.
pub(super) fn torch_examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    found(torch())
}

fn found(examples: Vec<Example>) -> Vec<(&'static str, bool, Vec<Warning>)> {
    examples.into_iter().map(|example| (example.id, example.severity.is_some(), example.scene.look())).collect()
}
