//! The rows of the catalog, one block per subject. Versions are those of the
//! reader. Sources name a file as `owner/repository:path`, or a page.

use super::Grammar::*;
use super::Kind::*;
use super::internals::{NCCL_GONE, NCCL_INTERNALS};
use super::{Block, Entry, Grammar, Kind, Reader};

/// Every block, in the order of docs/variables.md.
pub(super) static TABLE: &[Block] = &[
    Block { title: "Ranks and rendezvous", entries: RANKS },
    Block { title: "palingenesis", entries: OURS },
    Block { title: "torchrun", entries: TORCHRUN },
    Block { title: "NCCL: bootstrap and sockets", entries: NCCL_BOOTSTRAP },
    Block { title: "NCCL: InfiniBand and RoCE", entries: NCCL_VERBS },
    Block { title: "NCCL: networks, GPUDirect, topology", entries: NCCL_NETWORKS },
    Block { title: "NCCL: inside the node, memory, algorithms", entries: NCCL_NODE },
    Block { title: "NCCL: logs and files", entries: NCCL_LOGS },
    Block { title: "Plugins of NCCL", entries: PLUGINS },
    Block { title: "Read by nobody", entries: PHANTOMS },
    Block { title: "PyTorch distributed", entries: C10D },
    Block { title: "CUDA", entries: CUDA_ROWS },
    Block { title: "Memory allocators", entries: ALLOCATORS },
    Block { title: "TransformerEngine, Megatron", entries: TRANSFORMER_ENGINE },
    Block { title: "Gloo, UCX, MPI, PMIx", entries: TRANSPORTS },
    Block { title: "libfabric, EFA, Slingshot", entries: LIBFABRIC },
    Block { title: "NVSHMEM", entries: NVSHMEM_ROWS },
    Block { title: "CPU threads", entries: THREADS },
    Block { title: "Python and the system", entries: PYTHON_SYSTEM },
    Block { title: "Compiled kernels and their caches", entries: COMPILERS },
    Block { title: "Hugging Face, NeMo, packages, trackers", entries: FRAMEWORKS },
    Block { title: "DeepSpeed, JAX", entries: DEEPSPEED_JAX },
    Block { title: "Containers and builds", entries: CONTAINERS },
    Block { title: "Slurm", entries: SLURM_ROWS },
    Block { title: "NCCL: internal", entries: NCCL_INTERNALS },
    Block { title: "NCCL: gone", entries: NCCL_GONE },
];

/// What the rows of one reader share.
struct Of(Reader, Kind, &'static str);

impl Of {
    const fn row(self, name: &'static str, grammar: Grammar, meaning: &'static str) -> Entry {
        Entry::new(name, self.0, self.1, grammar, meaning).source(self.2)
    }
}

const RANK: Of = Of(Reader::Ranks, Rank, "pytorch/pytorch:torch/distributed/rendezvous.py");
const ELASTIC: Of =
    Of(Reader::C10d, Rank, "pytorch/pytorch:torch/distributed/elastic/agent/server/local_elastic_agent.py");
const FACT: Of = Of(Reader::Scripts, Rank, "palingenesis itself: src/plan/binding/ranks.rs");
const OPTION: Of = Of(Reader::Palingenesis, Foreign, "palingenesis itself: src/config/spec.rs");
const PET: Of = Of(Reader::Torchrun, Rank, "pytorch/pytorch:torch/distributed/run.py");
const NCCL: Of = Of(Reader::Nccl, Tuning, "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html");
const NCCL_SOURCE: Of = Of(Reader::Nccl, Tuning, "NVIDIA/nccl:src");
const NET_IB: Of = Of(Reader::Nccl, Tuning, "NVIDIA/nccl:src/transport/net_ib");
const GOOGLE: Of = Of(Reader::NcclPlugin, Tuning, "GoogleCloudPlatform/cluster-toolkit:examples");
const SHARP: Of = Of(Reader::NcclPlugin, Tuning, "Mellanox/nccl-rdma-sharp-plugins:README.md");
const AWS: Of = Of(Reader::NcclPlugin, Tuning, "aws/aws-ofi-nccl:include/nccl_ofi_param.h");
const NOBODY: Of = Of(Reader::Nobody, Foreign, "NVIDIA/nccl:src");
const PG: Of = Of(Reader::C10d, Tuning, "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html");
const PG_SOURCE: Of = Of(Reader::C10d, Tuning, "pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp");
const CUDA: Of = Of(
    Reader::Cuda,
    Tuning,
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
);
const ALLOC: Of = Of(Reader::Allocator, Tuning, "https://docs.pytorch.org/docs/stable/notes/cuda.html");
const TE: Of = Of(Reader::TransformerEngine, Tuning, "NVIDIA/TransformerEngine:docs/envvars.rst");
const UCX: Of = Of(Reader::Ucx, Tuning, "https://openucx.readthedocs.io/en/master/faq.html");
const MPI: Of = Of(Reader::Mpi, Foreign, "https://docs.open-mpi.org/en/main/mca.html");
const FABRIC: Of = Of(Reader::Libfabric, Tuning, "https://ofiwg.github.io/libfabric/main/man/fi_efa.7.html");
const CXI: Of = Of(Reader::Libfabric, Tuning, "https://ofiwg.github.io/libfabric/main/man/fi_cxi.7.html");
const SHMEM: Of = Of(Reader::Nvshmem, Tuning, "https://docs.nvidia.com/nvshmem/api/gen/env.html");
const OPENMP: Of = Of(Reader::Threads, Tuning, "https://www.openmp.org/spec-html/5.0/openmpch6.html");
const PYTHON: Of = Of(Reader::Python, Tuning, "https://docs.python.org/3/using/cmdline.html#environment-variables");
const SYSTEM: Of = Of(Reader::System, Foreign, "https://man7.org/linux/man-pages/man7/environ.7.html");
const TRITON: Of = Of(Reader::Compiler, Cache, "triton-lang/triton:python/triton/knobs.py");
const INDUCTOR: Of = Of(Reader::Torch, Cache, "pytorch/pytorch:torch/_inductor/config.py");
const HUB: Of = Of(
    Reader::HuggingFace,
    Cache,
    "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
);
const NEMO: Of = Of(Reader::Nemo, Cache, "NVIDIA-NeMo/Run:nemo_run/config.py");
const UV: Of = Of(Reader::Packages, Tuning, "https://docs.astral.sh/uv/reference/environment/");
const WANDB: Of = Of(Reader::Tracking, Cache, "https://docs.wandb.ai/guides/track/environment-variables");
const DEEPSPEED: Of = Of(Reader::DeepSpeed, Tuning, "deepspeedai/DeepSpeed:deepspeed/comm/comm.py");
const JAX: Of = Of(Reader::Jax, Rank, "jax-ml/jax:jax/_src/distributed.py");
const XLA: Of = Of(Reader::Jax, Tuning, "https://docs.jax.dev/en/latest/gpu_memory_allocation.html");
const ENROOT: Of = Of(Reader::ContainerRuntime, Foreign, "NVIDIA/enroot:doc/configuration.md");
const PYXIS: Of = Of(Reader::ContainerRuntime, Foreign, "NVIDIA/pyxis:args.c");
const TOOLKIT: Of = Of(
    Reader::ContainerRuntime,
    Foreign,
    "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",
);
const BUILD: Of = Of(Reader::Packages, Foreign, "pytorch/pytorch:cmake/Modules/FindNCCL.cmake");
const SLURM: Of = Of(Reader::Slurm, Foreign, "https://slurm.schedmd.com/srun.html");

const ANY: i64 = i64::MIN;
const MORE: i64 = i64::MAX;
/// What compares with the one text "0" or "1".
const ZERO_ONE: Grammar = Word(&["0", "1"]);
/// libfabric's booleans (src/var.c).
const FI_BOOL: Grammar = AnyCase(&["0", "false", "no", "off", "1", "true", "yes", "on"]);
/// Hugging Face's booleans: these are true, everything else is false.
const HUB_BOOL: Grammar = AnyCase(&["1", "ON", "YES", "TRUE", "0", "OFF", "NO", "FALSE"]);
/// uv's booleans (clap).
const UV_BOOL: Grammar = AnyCase(&["1", "true", "yes", "y", "on", "t", "0", "false", "no", "n", "off", "f"]);
/// UCX's booleans and its third value.
const UCX_BOOL: Grammar = AnyCase(&["y", "yes", "on", "1", "n", "no", "off", "0", "try"]);

const RANKS: &[Entry] = &[
    RANK.row("RANK", Number(0, MORE), "the process's number among all processes").trap(
        "one inherited from a login shell or an outer launcher is wrong; torchrun sets it for its workers \
            itself; empty counts as missing",
    ),
    RANK.row("WORLD_SIZE", Number(1, MORE), "how many processes there are")
        .trap("some tools mean nodes by it; the job's number of tasks is not the step's"),
    RANK.row("LOCAL_RANK", Number(0, MORE), "the process's number on its node, by convention its GPU's").trap(
        "where a task sees one GPU only (--gpus-per-task, --gpu-bind=single), numbers above 0 name no \
            device: invalid device ordinal",
    ),
    RANK.row("LOCAL_WORLD_SIZE", Number(1, MORE), "how many processes this node has")
        .trap("tasks divided by nodes is wrong where nodes have different numbers of tasks"),
    RANK.row("NODE_RANK", Number(0, MORE), "the node's number among the nodes")
        .trap("torchrun neither reads nor exports it: its own names are PET_NODE_RANK and GROUP_RANK")
        .source("Lightning-AI/pytorch-lightning:src/lightning/fabric/plugins/environments/lightning.py"),
    RANK.row("MASTER_ADDR", Text, "the host where rank 0 listens").trap(
        "localhost or 127.0.1.1 reaches no other node; the first host of the job need not be in the step; \
            torchrun itself does not read it",
    ),
    RANK.row("MASTER_PORT", Number(1, 65535), "the port where rank 0 listens")
        .default("29500 in PyTorch's tools")
        .trap(
            "two jobs on one node with the same port fail or meet each other; ports of the kernel's ephemeral \
            range (from 32768) may be taken",
        ),
    ELASTIC
        .row("GROUP_RANK", Number(0, MORE), "torchrun's number of the agent, that is of the node")
        .trap("with c10d rendezvous it is not Slurm's node index: agents are sorted by host name"),
    ELASTIC.row("GROUP_WORLD_SIZE", Number(1, MORE), "how many agents torchrun has joined"),
    ELASTIC.row("ROLE_RANK", Number(0, MORE), "the process's number among those of its role"),
    ELASTIC.row("ROLE_WORLD_SIZE", Number(1, MORE), "how many processes have this role"),
    ELASTIC.row("ROLE_NAME", Text, "the role given with torchrun --role").default("default"),
    RANK.row("LOCAL_SIZE", Number(1, MORE), "processes on this node, as Horovod and the deepspeed launcher say it")
        .source("deepspeedai/DeepSpeed:deepspeed/launcher/launch.py"),
    RANK.row("CROSS_RANK", Number(0, MORE), "the node's number, as Horovod and the deepspeed launcher say it")
        .source("deepspeedai/DeepSpeed:deepspeed/launcher/launch.py"),
    RANK.row("CROSS_SIZE", Number(1, MORE), "how many nodes, as Horovod and the deepspeed launcher say it")
        .source("deepspeedai/DeepSpeed:deepspeed/launcher/launch.py"),
    ELASTIC
        .row("TORCHELASTIC_RUN_ID", Text, "torchrun tells its workers the run's id")
        .trap("inherited from an outer torchrun it makes Lightning believe that torchrun started it"),
    ELASTIC
        .row(
            "TORCHELASTIC_USE_AGENT_STORE",
            AnyCase(&["True", "False"]),
            "torchrun's agent hosts the store, so all workers are clients",
        )
        .trap("inherited without an agent nobody hosts the store, and all ranks wait until the timeout"),
    ELASTIC.row("TORCHELASTIC_RESTART_COUNT", Number(0, MORE), "how often torchrun has restarted its workers"),
    ELASTIC.row("TORCHELASTIC_MAX_RESTARTS", Number(0, MORE), "how often torchrun may restart its workers"),
    ELASTIC
        .row("TORCHELASTIC_ERROR_FILE", Path, "where a worker writes the error that torchrun then prints")
        .trap("written by functions under @record only"),
    ELASTIC.row("TORCHELASTIC_HEALTH_CHECK_PORT", Number(1, 65535), "port of torchrun's health check server"),
    ELASTIC
        .row(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            Number(0, MORE),
            "seconds torchrun waits for its workers to end before it kills them",
        )
        .default("30"),
    RANK.row("OMPI_COMM_WORLD_RANK", Number(0, MORE), "the rank, told by Open MPI's mpirun")
        .source("https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html")
        .trap("inherited from an mpirun shell it sends DeepSpeed, accelerate and JAX down the MPI path"),
    RANK.row("OMPI_COMM_WORLD_SIZE", Number(1, MORE), "the number of ranks, told by Open MPI's mpirun")
        .source("https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html"),
    RANK.row("OMPI_COMM_WORLD_LOCAL_RANK", Number(0, MORE), "the rank on the node, told by Open MPI's mpirun")
        .source("https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html"),
    RANK.row("OMPI_COMM_WORLD_LOCAL_SIZE", Number(1, MORE), "ranks on the node, told by Open MPI's mpirun")
        .source("https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html"),
    RANK.row(
        "OMPI_COMM_WORLD_NODE_RANK",
        Number(0, MORE),
        "the rank on the node over all jobs, told by Open MPI's mpirun",
    )
    .source("https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html"),
    RANK.row("OMPI_MCA_orte_hnp_uri", Text, "the address of mpirun's daemon; JAX knows Open MPI by it")
        .source("jax-ml/jax:jax/_src/clusters/ompi_cluster.py"),
    RANK.row("PMI_RANK", Number(0, MORE), "the rank, told by a PMI launcher")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("PMI_SIZE", Number(1, MORE), "the number of ranks, told by a PMI launcher")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("PMIX_RANK", Number(0, MORE), "the rank, told by a PMIx launcher (srun --mpi=pmix)")
        .source("https://pmix.github.io/standard"),
    RANK.row("PMIX_NAMESPACE", Text, "the job's name in PMIx").source("https://pmix.github.io/standard"),
    RANK.row("MV2_COMM_WORLD_RANK", Number(0, MORE), "the rank, told by MVAPICH2")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("MV2_COMM_WORLD_SIZE", Number(1, MORE), "the number of ranks, told by MVAPICH2")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("MV2_COMM_WORLD_LOCAL_RANK", Number(0, MORE), "the rank on the node, told by MVAPICH2")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("MV2_COMM_WORLD_LOCAL_SIZE", Number(1, MORE), "ranks on the node, told by MVAPICH2")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("MPI_LOCALRANKID", Number(0, MORE), "the rank on the node, told by Intel MPI")
        .source("huggingface/accelerate:src/accelerate/state.py"),
    RANK.row("MPI_LOCALNRANKS", Number(1, MORE), "ranks on the node, told by Intel MPI")
        .source("huggingface/accelerate:src/accelerate/state.py"),
];

const OURS: &[Entry] = &[
    FACT.row(
        "PALINGENESIS_GPU",
        Text,
        "the rank's GPU by its PCI address; several, joined by commas, where it has them",
    )
    .trap("not set where it is not known which GPU is the rank's"),
    FACT.row("PALINGENESIS_GPU_INDEX", Text, "CUDA's number for the rank's GPU in this task: cuda:N")
        .trap("0 where the task sees one GPU only, whatever LOCAL_RANK is"),
    FACT.row("PALINGENESIS_NIC", Text, "the network cards that belong to the rank's GPU, by their names"),
    FACT.row("PALINGENESIS_NUMA", Text, "the NUMA nodes of the rank's CPUs, as a list: 0-1"),
    OPTION.row("PALINGENESIS", Text, "the flag for every srun of this shell: on, off, show, a profile, key=value"),
    OPTION.row(
        "PALINGENESIS_OPT_*",
        Text,
        "a key of --palingenesis in capitals, with - as _: PALINGENESIS_OPT_NIC_DOWN=fail",
    ),
];

const TORCHRUN: &[Entry] = &[
    PET.row("PET_NNODES", Text, "torchrun --nnodes: how many nodes, or MIN:MAX")
        .default("1:1")
        .trap("without it and an address each node trains alone on 127.0.0.1"),
    PET.row("PET_NPROC_PER_NODE", Text, "torchrun --nproc-per-node: workers on this node; a number, gpu, cpu or auto")
        .default("1"),
    PET.row("PET_NODE_RANK", Number(0, MORE), "torchrun --node-rank: this node's number under static rendezvous")
        .default("0"),
    PET.row(
        "PET_RDZV_BACKEND",
        AnyCase(&["static", "c10d", "etcd", "etcd-v2"]),
        "torchrun --rdzv-backend: how the agents find each other",
    )
    .default("static")
    .trap("c10d numbers the agents by the sort order of host names: node10 comes before node2"),
    PET.row("PET_RDZV_ENDPOINT", Text, "torchrun --rdzv-endpoint: HOST[:PORT] where the agents meet").trap(
        "the host must be known on its own node by this very name or address, or no agent hosts the store \
            (is_host in PET_RDZV_CONF)",
    ),
    PET.row("PET_RDZV_ID", Text, "torchrun --rdzv-id: the name of the rendezvous")
        .default("none")
        .trap("keeps jobs apart inside one store only; it does not help against two jobs on one port"),
    PET.row("PET_RDZV_CONF", Pairs, "torchrun --rdzv-conf: is_host, join_timeout, read_timeout, timeout, …")
        .default("join_timeout 600 s, store connection 60 s"),
    PET.row("PET_MASTER_ADDR", Text, "torchrun --master-addr: node 0 under static rendezvous")
        .default("127.0.0.1")
        .trap("torchrun does not take MASTER_ADDR instead"),
    PET.row("PET_MASTER_PORT", Number(1, 65535), "torchrun --master-port: node 0's port under static rendezvous")
        .default("29500")
        .trap("torchrun does not take MASTER_PORT instead"),
    PET.row("PET_LOCAL_ADDR", Text, "torchrun --local-addr: this node's address as told to the others").since("1.13"),
    PET.row("PET_MAX_RESTARTS", Number(0, MORE), "torchrun --max-restarts: how often the workers are started again")
        .default("0"),
    PET.row("PET_MONITOR_INTERVAL", Text, "torchrun --monitor-interval: seconds between two looks at the workers")
        .default("0.1 (5 in torch 2.2 and older)"),
    PET.row(
        "PET_START_METHOD",
        Word(&["spawn", "fork", "forkserver"]),
        "torchrun --start-method: how workers that are functions start",
    )
    .default("spawn"),
    PET.row("PET_STANDALONE", Number(0, 1), "torchrun --standalone: one node, a port of its own choice").default("0"),
    PET.row("PET_LOG_DIR", Path, "torchrun --log-dir: where the workers' output goes"),
    PET.row(
        "PET_REDIRECTS",
        Text,
        "torchrun --redirects: which streams go to files; 1 stdout, 2 stderr, 3 both, or RANK:N,…",
    )
    .default("0"),
    PET.row("PET_TEE", Text, "torchrun --tee: the same, to the terminal too").default("0"),
    PET.row("PET_ROLE", Text, "torchrun --role: the workers' name in log lines").default("default"),
    PET.row("PET_MODULE", Number(0, 1), "torchrun --module: the script is a Python module").default("0"),
    PET.row("PET_NO_PYTHON", Number(0, 1), "torchrun --no-python: the script is a program of its own").default("0"),
    PET.row("PET_LOCAL_RANKS_FILTER", Text, "torchrun --local-ranks-filter: whose output is shown").since("2.3"),
];

const NCCL_BOOTSTRAP: &[Entry] = &[
    NCCL.row("NCCL_SOCKET_IFNAME", Interfaces, "interfaces of the bootstrap and of socket traffic")
        .default("ib*, then any but docker, lo and virbr, then these")
        .trap(
            "names are prefixes: bond0 also matches bond0.2973; RDMA names do not belong here; each node needs a \
            match; PyTorch's own store does not follow it",
        )
        .source("NVIDIA/nccl:src/misc/socket.cc"),
    NCCL.row("NCCL_SOCKET_FAMILY", Word(&["AF_INET", "AF_INET6"]), "IPv4 or IPv6 only")
        .default("either")
        .trap("any other word, ipv4 or 4 among them, is ignored without a message"),
    NCCL.row("NCCL_SOCKET_NTHREADS", Integer(1, 16), "helper threads per socket connection, TCP networks only")
        .default("chosen by platform: AWS 2, gVNIC 4, else 1")
        .since("2.4")
        .trap("times NCCL_NSOCKS_PERTHREAD it may not exceed 64"),
    NCCL.row("NCCL_NSOCKS_PERTHREAD", Integer(1, 64), "sockets per helper thread, TCP networks only")
        .default("chosen by platform: AWS 8, else 1")
        .since("2.4")
        .trap("times NCCL_SOCKET_NTHREADS it may not exceed 64"),
    NCCL.row("NCCL_SOCKET_RETRY_CNT", Integer(0, MORE), "how often a refused or timed out connection is tried again")
        .default("34")
        .since("2.24")
        .trap("with the default sleeps all tries take about a minute"),
    NCCL.row(
        "NCCL_SOCKET_RETRY_SLEEP_MSEC",
        Integer(0, MORE),
        "milliseconds before the first new try; grows with each",
    )
    .default("100")
    .since("2.24"),
    NCCL.row(
        "NCCL_SOCKET_POLL_TIMEOUT_MSEC",
        Integer(0, MORE),
        "wait in poll() that long instead of spinning on sockets",
    )
    .default("0")
    .since("2.28"),
    NCCL.row("NCCL_SOCKET_MAGIC", Unsigned, "64-bit number that both ends of a connection must share")
        .default("a built-in number")
        .since("2.30.7")
        .trap("ranks with different numbers refuse each other; text is ignored; it does not guard the bootstrap"),
    NCCL_SOURCE
        .row("NCCL_SOCKET_RCVBUF", Integer(-1, MORE), "receive buffer of each socket, in bytes")
        .default("-1")
        .since("2.27")
        .trap("the kernel cuts it at net.core.rmem_max"),
    NCCL_SOURCE
        .row("NCCL_SOCKET_SNDBUF", Integer(-1, MORE), "send buffer of each socket, in bytes")
        .default("-1")
        .since("2.27")
        .trap("the kernel cuts it at net.core.wmem_max"),
    NCCL.row("NCCL_OOB_NET_ENABLE", Switch, "bootstrap over the network plugin instead of sockets")
        .default("0")
        .since("2.23")
        .trap("all ranks must agree"),
    NCCL.row("NCCL_OOB_NET_IFNAME", Interfaces, "devices of that bootstrap").since("2.23"),
    NCCL.row(
        "NCCL_UID_STAGGER_THRESHOLD",
        Integer(0, MORE),
        "from how many ranks on their first contact with the root is spread over time",
    )
    .default("256")
    .since("2.23"),
    NCCL.row("NCCL_UID_STAGGER_RATE", Integer(1, MORE), "messages per second that the root should get then")
        .default("7000")
        .since("2.23"),
    NCCL.row("NCCL_COMM_ID", Endpoint, "where NCCL's own root listens, for programs that have no store")
        .kind(Rank)
        .trap(
            "PyTorch passes the id through its store: leave it unset there; NCCL then also prefers interfaces of \
            this subnet",
        )
        .source("NVIDIA/nccl:src/bootstrap.cc"),
    NCCL.row("NCCL_HOSTID", Text, "what NCCL takes for the host's identity")
        .kind(Foreign)
        .default("hash of host name and boot id")
        .trap(
            "the same on two hosts: shared memory fails; different on one host, as in containers with host names \
            of their own: no NVLink, no shared memory",
        )
        .source("NVIDIA/nccl:src/misc/utils.cc"),
    NCCL.row("NCCL_RAS_ENABLE", Switch, "the side channel that the ncclras program asks").default("1").since("2.24"),
    NCCL.row("NCCL_RAS_ADDR", Endpoint, "where it listens on each node")
        .default("localhost:28028")
        .since("2.24")
        .trap("two jobs on one node share or fight over the port: give each its own, or switch RAS off"),
    NCCL.row("NCCL_RAS_TIMEOUT_FACTOR", Integer(1, MORE), "multiplies the timeouts of RAS, for debuggers")
        .default("1")
        .since("2.24"),
    NCCL.row("NCCL_IPC_USE_ABSTRACT_SOCKET", Switch, "abstract Unix sockets between the ranks of a node")
        .default("1")
        .since("2.29")
        .trap("needs one network namespace for the ranks of a node; 0 needs one /tmp instead"),
];

const NCCL_VERBS: &[Entry] = &[
    NCCL.row("NCCL_IB_DISABLE", Switch, "1 uses sockets instead of InfiniBand and RoCE")
        .default("0")
        .trap("true counts as 0 and changes nothing; a forgotten 1 makes several nodes many times slower"),
    NCCL.row("NCCL_IB_HCA", RdmaDevices, "which RDMA devices and ports carry the traffic")
        .default("all active ones")
        .trap(
            "mlx5_1 is a prefix of mlx5_10: write =mlx5_1; a list that matches nothing falls back to sockets \
            without a warning; network interface names do not belong here; ^= not =^",
        )
        .source("NVIDIA/nccl:src/transport/net_ib/init.cc"),
    NCCL.row("NCCL_IB_TIMEOUT", AckTimeout, "how long a packet may stay unanswered: 4.096 us * 2^value, seven times")
        .default("20 (30 s) since 2.23; 18 in 2.14 to 2.22, 14 before")
        .trap(
            "an exponent, not seconds: 22 is two minutes; 0 and 32 or more wait for ever; a slow rank is not \
            cured by it",
        ),
    NCCL.row("NCCL_IB_RETRY_CNT", Integer(0, 7), "how often an unanswered packet is sent again")
        .default("7")
        .trap("the field has three bits"),
    NCCL.row("NCCL_IB_GID_INDEX", Integer(-1, 255), "row of the port's GID table, RoCE only")
        .default("-1 (chosen by NCCL) since 2.21; 0 before")
        .trap(
            "on InfiniBand it is not read; since 2.21 leave it unset: a row that is not RoCE v2 on each port \
            fails in ibv_modify_qp; 3 is common, not universal",
        ),
    NCCL.row("NCCL_IB_ADDR_FAMILY", Word(&["AF_INET", "AF_INET6"]), "address family of the GID that NCCL chooses")
        .default("AF_INET")
        .since("2.21"),
    NCCL.row("NCCL_IB_ADDR_RANGE", Text, "CIDR range of the GID that NCCL chooses")
        .default("any")
        .since("2.21")
        .trap("with older NCCL it does nothing"),
    NCCL.row("NCCL_IB_ROCE_VERSION_NUM", Integer(1, 2), "RoCE version of the GID that NCCL chooses")
        .default("2")
        .since("2.21"),
    NCCL.row("NCCL_IB_SL", Integer(-1, 15), "InfiniBand service level, RoCE priority")
        .default("-1 (not set) since 2.26; 0 before"),
    NCCL.row("NCCL_IB_TC", Integer(-1, 255), "RoCE traffic class").default("-1 (not set) since 2.26; 0 before").trap(
        "traffic class, not DSCP: DSCP 26 is 104, with ECN bits 106; without matching switches packets are \
            lost",
    ),
    NCCL.row("NCCL_IB_FIFO_TC", Integer(-1, 255), "traffic class of control messages")
        .default("-1 (as NCCL_IB_TC) since 2.24; 0 before")
        .since("2.22"),
    NET_IB
        .row("NCCL_IB_PKEY", Integer(0, 32767), "row of the partition key table")
        .default("0")
        .since("2.8")
        .trap("an index, not the key: 0x8001 is wrong"),
    NCCL.row(
        "NCCL_IB_QPS_PER_CONNECTION",
        Integer(1, 128),
        "queue pairs per connection: more spread over paths of a RoCE network",
    )
    .default("1")
    .since("2.10")
    .trap("many of them times many ranks exhaust the NIC"),
    NCCL.row("NCCL_IB_SPLIT_DATA_ON_QPS", Switch, "split each message over the queue pairs instead of taking turns")
        .default("0 since 2.20; 1 in 2.18 and 2.19")
        .since("2.18"),
    NCCL.row("NCCL_IB_ADAPTIVE_ROUTING", Integer(0, 1), "transfers that allow adaptive routing")
        .default("1 on InfiniBand, 0 on RoCE")
        .since("2.16")
        .trap("1 on a network without adaptive routing is slower"),
    NCCL.row("NCCL_IB_AR_THRESHOLD", Integer(0, MORE), "bytes above which a message is sent so")
        .default("chosen at run time since 2.30; 8192 before")
        .since("2.6"),
    NCCL.row(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        Integer(0, 2),
        "PCI relaxed ordering: 0 off, 1 required, 2 where there is",
    )
    .default("2")
    .since("2.12")
    .trap("1 fails where it is missing; 0 costs much in virtual machines"),
    NCCL.row("NCCL_IB_ECE_ENABLE", Switch, "enhanced connection establishment, for congestion control")
        .default("1")
        .since("2.23"),
    NCCL.row("NCCL_IB_MERGE_NICS", Switch, "join the ports of a dual-port NIC")
        .default("1")
        .since("2.20")
        .trap("ports of different speed are joined too"),
    NET_IB.row("NCCL_IB_MERGE_VFS", Switch, "join the virtual functions of one port").default("1").since("2.18"),
    NET_IB
        .row("NCCL_IB_DATA_DIRECT", Switch, "direct path between ConnectX-8 and GPU (GB300)")
        .default("1")
        .since("2.27"),
    NCCL.row("NCCL_IB_OOO_RQ", Switch, "receive queues that take packets out of order").default("0").since("2.30"),
    NET_IB
        .row("NCCL_IB_RESILIENCY_PORT_FAILOVER", Switch, "go on over another port when one fails")
        .default("0")
        .since("2.29")
        .trap("new and off; older NCCL ignores it"),
    NET_IB
        .row("NCCL_IB_RESILIENCY_PORT_RECOVERY", Switch, "take a port back that works again")
        .default("0")
        .since("2.30"),
    NET_IB.row("NCCL_IB_SUBNET_AWARE_ROUTING", Switch, "connect NICs of the same subnet").default("0").since("2.30.7"),
    NCCL.row("NCCL_IB_RETURN_ASYNC_EVENTS", Switch, "a fatal event of the NIC ends the communicator")
        .default("1")
        .since("2.23")
        .trap("0 turns an error into a hang"),
    NET_IB.row("NCCL_IB_WARN_RAIL_LOCAL", Switch, "warn when NICs of different rails talk").default("0").since("2.24"),
    NET_IB.row("NCCL_IB_USE_INLINE", Switch, "send small messages inline").default("0").since("2.8"),
    NET_IB
        .row(
            "NCCL_IB_ROUTABLE_FLID_GID_INDEX",
            Integer(0, 255),
            "GID row for routing between InfiniBand subnets by FLID",
        )
        .default("1")
        .since("2.22"),
];

const NCCL_NETWORKS: &[Entry] = &[
    NCCL.row(
        "NCCL_NET",
        Text,
        "the one network to use, by name in any case: IB, Socket, AWS Libfabric, FasTrak, gIB, …",
    )
    .default("the best that works")
    .since("2.10")
    .trap("a name that is not there ends the start, which guards against a silent fallback to sockets"),
    NCCL.row("NCCL_NET_PLUGIN", Text, "which network plugin to load: a file, the suffix of libnccl-net-….so, or none")
        .default("libnccl-net.so")
        .since("2.11")
        .trap("none on EFA or GCP means TCP; images preset it"),
    NCCL.row("NCCL_TUNER_PLUGIN", Text, "which tuner plugin to load: a file, a suffix or none").since("2.19"),
    NCCL.row("NCCL_PROFILER_PLUGIN", Text, "which profiler plugin to load: a file, a suffix or none").since("2.23"),
    NCCL.row("NCCL_ENV_PLUGIN", Text, "which plugin supplies NCCL's settings; it beats the environment").since("2.28"),
    NCCL.row("NCCL_NET_GDR_LEVEL", Level, "largest distance between NIC and GPU for GPUDirect RDMA")
        .default("PXB (P2C over C2C)")
        .since("2.4")
        .trap(
            "it enables nothing, GPUDirect is on by itself; 5 means SYS, across CPU sockets; lower case is \
            ignored",
        ),
    NCCL.row("NCCL_NET_GDR_READ", Integer(0, 1), "GPUDirect RDMA for sends too")
        .default("chosen at run time: 1 with NVLink"),
    NCCL.row("NCCL_NET_GDR_C2C", Switch, "GPUDirect RDMA over the chip-to-chip link of Grace")
        .default("1 since 2.27; 0 in 2.26")
        .since("2.26"),
    NCCL_SOURCE
        .row("NCCL_GDR_FLUSH_DISABLE", Switch, "skip the flush after a GPUDirect receive")
        .default("0")
        .trap("1 may corrupt data"),
    NCCL_SOURCE
        .row("NCCL_NET_FORCE_FLUSH", Switch, "flush after each GPUDirect receive, needed or not")
        .default("0 since 2.19; 1 before")
        .since("2.15"),
    NCCL.row("NCCL_DMABUF_ENABLE", Switch, "register GPU memory by dma-buf, without nvidia_peermem")
        .default("1")
        .since("2.13")
        .trap("0 without nvidia_peermem loaded: no GPUDirect RDMA"),
    NCCL.row("NCCL_CROSS_NIC", Integer(0, 2), "rings may use another NIC on the next node: 0 no, 1 yes, 2 prefer no")
        .default("2")
        .since("2.5")
        .trap("networks whose rails are not connected need 0"),
    NCCL.row("NCCL_PXN_DISABLE", Switch, "1 stops sending through the GPU beside the right NIC")
        .default("0")
        .since("2.12")
        .trap("1 costs all-to-all bandwidth on rail-optimised networks"),
    NCCL.row(
        "NCCL_P2P_PXN_LEVEL",
        Integer(0, 2),
        "send and receive through another GPU: 0 never, 1 where needed, 2 always",
    )
    .default("2")
    .since("2.12"),
    NCCL.row("NCCL_PXN_C2C", Switch, "the same over the chip-to-chip link of Grace")
        .default("1 since 2.28; 0 in 2.27")
        .since("2.27"),
    NCCL.row("NCCL_NETDEVS_POLICY", Text, "NICs per GPU: AUTO, MAX:N or ALL").default("AUTO").since("2.28"),
    NCCL_SOURCE.row("NCCL_NET_MERGE_LEVEL", Level, "NICs up to this distance from each other are merged").since("2.24"),
    NCCL_SOURCE.row("NCCL_NET_FORCE_MERGE", Text, "lists of NICs to merge").since("2.24"),
    NCCL.row("NCCL_NET_MERGE_POLICY", Text, "how NICs are merged").since("2.30.7"),
    NCCL.row("NCCL_NET_SHARED_BUFFERS", Integer(0, 1), "send and receive over the network share buffers")
        .default("chosen at run time")
        .since("2.8"),
    NCCL.row("NCCL_NET_SHARED_COMMS", Switch, "network connections shared under PXN").default("1").since("2.12"),
    NCCL.row("NCCL_TOPO_FILE", Path, "XML file that replaces the topology NCCL detects")
        .default("/var/run/nvidia-topologyd/virtualTopology.xml where it is")
        .since("2.6")
        .trap("a missing file is ignored; the container must see it; that of another machine type misplaces NICs"),
    NCCL.row("NCCL_TOPO_DUMP_FILE", Path, "where to write the detected topology").since("2.6"),
    NCCL_SOURCE.row("NCCL_TOPO_DUMP_FILE_RANK", Integer(0, MORE), "which rank writes it").default("0").since("2.6"),
    NCCL_SOURCE.row("NCCL_GRAPH_FILE", Path, "XML file that replaces the search for rings and trees").since("2.6"),
    NCCL_SOURCE.row("NCCL_GRAPH_DUMP_FILE", Path, "where to write the rings and trees found").since("2.6"),
    NCCL_SOURCE.row("NCCL_GRAPH_DUMP_FILE_RANK", Integer(0, MORE), "which rank writes it").default("0").since("2.6"),
    NCCL.row("NCCL_IGNORE_CPU_AFFINITY", Switch, "place threads by the GPU alone, not by the CPUs of the process")
        .default("0")
        .since("2.4")
        .trap("hides a wrong binding"),
    NCCL.row("NCCL_COLLNET_ENABLE", Integer(0, 1), "collectives inside the network (SHARP)")
        .default("chosen at run time since 2.27; 0 before")
        .since("2.6")
        .trap("needs a plugin with SHARP; without one it is ignored"),
    NCCL.row("NCCL_COLLNET_NODE_THRESHOLD", Integer(1, MORE), "from how many nodes on SHARP is used")
        .default("2")
        .since("2.9"),
    NCCL.row("NCCL_IGNORE_NET_MISMATCH", Switch, "accept ranks with different numbers of NICs")
        .default("1")
        .since("2.30")
        .trap("hides a dead NIC; 0 finds it"),
    NCCL.row("NCCL_IGNORE_COLLNET_MISMATCH", Switch, "accept ranks with different SHARP devices")
        .default("0")
        .since("2.30"),
];

const NCCL_NODE: &[Entry] = &[
    NCCL.row("NCCL_P2P_DISABLE", One, "1 stops NVLink and PCIe copies between the GPUs of a node")
        .default("not set")
        .trap("2 and true change nothing; a forgotten 1 makes the node many times slower; beats NCCL_P2P_LEVEL")
        .source("NVIDIA/nccl:src/graph/paths.cc"),
    NCCL.row("NCCL_P2P_LEVEL", Level, "largest distance between GPUs for direct copies")
        .default("chosen by CPU and topology")
        .trap("lower case is ignored; numbers are the old form; NVL on a PCIe machine means no direct copies")
        .source("NVIDIA/nccl:src/graph/paths.cc"),
    NCCL.row("NCCL_P2P_DIRECT_DISABLE", Switch, "1 stops direct access between GPUs of one process")
        .default("0")
        .since("2.12"),
    NCCL.row("NCCL_P2P_LL_THRESHOLD", Integer(0, MORE), "bytes up to which send and receive use the LL protocol")
        .default("16384")
        .since("2.14"),
    NCCL.row("NCCL_P2P_NET_CHUNKSIZE", Integer(1, MORE), "bytes per step of send and receive over the network")
        .default("131072")
        .since("2.14"),
    NCCL_SOURCE
        .row("NCCL_P2P_PCI_CHUNKSIZE", Integer(1, MORE), "bytes per step of send and receive over PCIe")
        .default("131072")
        .since("2.16"),
    NCCL_SOURCE
        .row("NCCL_P2P_NVL_CHUNKSIZE", Integer(1, MORE), "bytes per step of send and receive over NVLink")
        .default("524288")
        .since("2.16"),
    NCCL.row("NCCL_ALLOC_P2P_NET_LL_BUFFERS", Switch, "LL buffers for each peer, for low latency all-to-all")
        .default("0")
        .since("2.16")
        .trap("2.14 and 2.15 read NCCL_NCCL_ALLOC_P2P_NET_LL_BUFFERS by mistake"),
    NCCL.row("NCCL_NVB_DISABLE", Switch, "1 stops reaching a GPU through a neighbour over NVLink")
        .default("0")
        .since("2.9"),
    NCCL.row("NCCL_SHM_DISABLE", Switch, "1 stops copies through /dev/shm")
        .default("0")
        .trap("hides a too small /dev/shm by going over the network, slowly"),
    NCCL.row("NCCL_CUMEM_ENABLE", Integer(0, 1), "allocate with CUDA's virtual memory functions")
        .default("chosen at run time since 2.19; 0 in 2.18")
        .since("2.18")
        .trap("0 saves memory, but switches multi-node NVLink off without a word"),
    NCCL.row("NCCL_CUMEM_HOST_ENABLE", Integer(0, 1), "the same for shared host memory")
        .default("chosen at run time since 2.24; 0 in 2.23")
        .since("2.23")
        .trap(
            "2.24 to 2.26.3 fail in containers without NUMA rights (Docker: --cap-add SYS_NICE); later ones test \
            and fall back",
        ),
    NCCL.row("NCCL_NVLS_ENABLE", Integer(0, 2), "collectives inside the NVSwitch: 0 off, 1 on, 2 where it works")
        .default("2 since 2.18; 1 in 2.17")
        .since("2.17")
        .trap("0 saves memory and costs a quarter of the node's all-reduce; 1 fails where multicast does not work"),
    NCCL_SOURCE.row("NCCL_NVLS_CHUNKSIZE", Integer(1, MORE), "bytes per step of these").default("131072").since("2.21"),
    NCCL_SOURCE
        .row("NCCL_NVLS_NCHANNELS", Integer(1, 64), "channels of these")
        .default("chosen at run time since 2.25; 16 before")
        .since("2.17"),
    NCCL_SOURCE
        .row("NCCL_NVLSTREE_MAX_CHUNKSIZE", Integer(1, MORE), "bytes per step of NVLS trees between nodes")
        .default("chosen at run time")
        .since("2.20"),
    NCCL.row("NCCL_MNNVL_ENABLE", Integer(0, 2), "NVLink between nodes (NVL72): 0 off, 1 required, 2 where it works")
        .default("2")
        .since("2.21")
        .trap("1 without an IMEX channel fails; 0 loses the NVLink of the rack; needs NCCL_CUMEM_ENABLE"),
    NCCL.row("NCCL_MNNVL_UUID", Integer(ANY, MORE), "stands for the id of the NVLink domain")
        .default("-1")
        .since("2.25"),
    NCCL.row("NCCL_MNNVL_CLIQUE_ID", Integer(ANY, MORE), "stands for the clique in the NVLink domain")
        .default("-1")
        .since("2.23"),
    NCCL.row("NCCL_GRAPH_REGISTER", Switch, "register buffers of CUDA graphs")
        .default("1 since 2.19; 0 before")
        .since("2.11")
        .trap("must be 0 with expandable_segments:True and CUDA graphs"),
    NCCL.row("NCCL_LOCAL_REGISTER", Switch, "use the buffers that a program registers").default("1").since("2.19"),
    NCCL.row("NCCL_LEGACY_CUDA_REGISTER", Switch, "register memory of cudaMalloc too").default("0").since("2.24"),
    NCCL.row("NCCL_MULTI_SEGMENT_REGISTER", Switch, "register buffers made of several segments")
        .default("1")
        .since("2.29"),
    NCCL.row("NCCL_WIN_ENABLE", Switch, "windows of symmetric memory").default("1").since("2.27"),
    NCCL.row("NCCL_BUFFSIZE", Integer(1, MORE), "bytes of each buffer between two GPUs")
        .default("4194304")
        .trap("times channels and protocols: larger ones take GPU memory; the EFA plugin sets its own"),
    NCCL.row("NCCL_NTHREADS", OneOf(&[64, 128, 256, 512]), "CUDA threads per block").default("512, 256 on older GPUs"),
    NCCL.row("NCCL_MIN_CTAS", Integer(1, 64), "fewest CUDA blocks of a communicator")
        .default("chosen at run time")
        .since("2.17")
        .trap("at most 32 before 2.25; not above NCCL_MAX_CTAS"),
    NCCL.row("NCCL_MAX_CTAS", Integer(1, 64), "most CUDA blocks of a communicator")
        .default("chosen at run time")
        .since("2.17")
        .trap("one or two leave little bandwidth; at most 32 before 2.25"),
    NCCL.row("NCCL_MIN_NCHANNELS", Integer(1, 64), "fewest channels; old form of NCCL_MIN_CTAS")
        .default("chosen at run time")
        .since("2.5")
        .successor("NCCL_MIN_CTAS"),
    NCCL.row("NCCL_MAX_NCHANNELS", Integer(1, 64), "most channels; old form of NCCL_MAX_CTAS")
        .default("chosen at run time")
        .since("2.5")
        .successor("NCCL_MAX_CTAS"),
    NCCL_SOURCE
        .row("NCCL_MIN_P2P_NCHANNELS", Integer(1, 64), "fewest channels of send and receive")
        .default("1")
        .since("2.7"),
    NCCL_SOURCE
        .row("NCCL_MAX_P2P_NCHANNELS", Integer(1, 64), "most channels of send and receive")
        .default("as many as channels")
        .since("2.7"),
    NCCL_SOURCE
        .row("NCCL_NCHANNELS_PER_NET_PEER", Integer(1, 64), "channels of send and receive to each peer on another node")
        .default("chosen at run time since 2.20; 2 before")
        .since("2.12"),
    NCCL.row("NCCL_CGA_CLUSTER_SIZE", Integer(0, 8), "thread blocks per cluster, Hopper and newer")
        .default("4 on Hopper and newer")
        .since("2.15"),
    NCCL.row(
        "NCCL_CTA_POLICY",
        Flags(&["DEFAULT", "EFFICIENCY", "ZERO"]),
        "how sparing NCCL is with SMs when buffers are registered",
    )
    .default("DEFAULT")
    .since("2.27")
    .trap("before 2.29 numbers only: a word counts as 0"),
    NCCL.row("NCCL_ALGO", Algorithms, "which algorithms may be used").default("all").since("2.5").trap(
        "since 2.24 an unknown word ends the start, before it was ignored; a forgotten Ring switches NVLS \
            and Tree off",
    ),
    NCCL.row("NCCL_PROTO", Protocols, "which protocols may be used")
        .default("all that the hardware allows")
        .since("2.5")
        .trap("LL128 on hardware that does not keep its order corrupts data"),
    NCCL.row("NCCL_LAUNCH_MODE", Word(&["PARALLEL", "GROUP"]), "how several GPUs of one process start kernels")
        .default("PARALLEL")
        .trap("old; never needed"),
    NCCL.row("NCCL_LAUNCH_ORDER_IMPLICIT", Switch, "order the kernels of several communicators")
        .default("0")
        .since("2.26"),
    NCCL.row("NCCL_LAUNCH_RACE_FATAL", Switch, "fail when threads break that order").default("1").since("2.26"),
    NCCL.row("NCCL_GRAPH_MIXING_SUPPORT", Integer(0, 1), "collectives inside and outside CUDA graphs at once")
        .default("1")
        .since("2.13"),
    NCCL.row("NCCL_GRAPH_STREAM_ORDERING", Integer(0, 1), "order of graph launches against streams")
        .default("chosen at run time")
        .since("2.30.7"),
    NCCL.row("NCCL_MEM_SYNC_DOMAIN", Text, "CUDA memory domain of NCCL's kernels, Hopper and newer")
        .default("remote")
        .since("2.16"),
    NCCL.row("NCCL_MULTI_RANK_GPU_ENABLE", Switch, "allow several ranks on one GPU")
        .default("0")
        .since("2.30")
        .trap("the error that suggests it usually comes from a wrong LOCAL_RANK"),
    NCCL.row("NCCL_COMM_BLOCKING", Integer(0, 1), "whether calls wait; 0 returns at once")
        .default("chosen by the program")
        .since("2.14")
        .trap("PyTorch has TORCH_NCCL_USE_COMM_NONBLOCKING"),
    NCCL.row("NCCL_RUNTIME_CONNECT", Switch, "connect when first needed, not at the start").default("1").since("2.22"),
    NCCL.row("NCCL_SYM_GIN_KERNELS_ENABLE", Switch, "kernels that send over the network from the GPU")
        .default("1")
        .since("2.29"),
    NCCL.row("NCCL_SET_STACK_SIZE", Switch, "set CUDA's stack size to what the kernels need").default("0").since("2.9"),
    NCCL_SOURCE
        .row("NCCL_SET_CPU_STACK_SIZE", Switch, "give NCCL's threads stacks of their own size")
        .default("1")
        .since("2.28")
        .trap("older NCCL under ulimit -s unlimited starts threads with 2 MB and may crash"),
    NCCL.row("NCCL_SET_THREAD_NAME", Switch, "name NCCL's threads").default("0").since("2.12"),
    NCCL_SOURCE
        .row("NCCL_PROXY_CPUSET", Text, "CPU list of the proxy threads")
        .since("2.28")
        .trap("CPUs outside the task's own do not count"),
    NCCL_SOURCE
        .row("NCCL_GDRCOPY_ENABLE", Switch, "use gdrcopy for flags")
        .default("0")
        .since("2.9")
        .trap("needs /dev/gdrdrv, in the container too"),
];

const NCCL_LOGS: &[Entry] = &[
    NCCL.row("NCCL_DEBUG", AnyCase(&["VERSION", "WARN", "INFO", "ABORT", "TRACE"]), "how much NCCL says")
        .default("nothing; images often set VERSION")
        .trap(
            "any other word means nothing at all; INFO of thousands of ranks floods a shared file system; TRACE \
            needs a special build",
        )
        .source("NVIDIA/nccl:src/debug.cc"),
    NCCL.row("NCCL_DEBUG_SUBSYS", Subsystems, "what INFO is about")
        .default("INIT,BOOTSTRAP,ENV")
        .trap("without NCCL_DEBUG=INFO it does nothing; unknown words are ignored")
        .source("NVIDIA/nccl:src/debug.cc"),
    NCCL.row("NCCL_DEBUG_FILE", Path, "file for NCCL's log; %h is the host, %p the process").default("stdout").trap(
        "without %p the ranks overwrite each other; ~ is not expanded; the directory must be there, in the \
            container too",
    ),
    NCCL.row("NCCL_DEBUG_TIMESTAMP_LEVELS", Text, "which levels get a time").default("WARN").since("2.26"),
    NCCL.row("NCCL_DEBUG_TIMESTAMP_FORMAT", Text, "how the time is written, as strftime")
        .default("[%F %T] ")
        .since("2.26"),
    NCCL.row("NCCL_CHECK_MODE", Text, "which arguments of calls are checked").since("2.29.7"),
    NCCL.row("NCCL_CHECK_POINTERS", Switch, "check the pointers of each call")
        .default("0")
        .successor("NCCL_CHECK_MODE")
        .trap("slow"),
    NCCL_SOURCE.row("NCCL_WARN_ENABLE_DEBUG_INFO", Text, "switch INFO on after the first warning").since("2.19"),
    NCCL_SOURCE
        .row("NCCL_REPORT_CONNECT_PROGRESS", Switch, "say how far connecting has come")
        .default("0")
        .since("2.19"),
    NCCL_SOURCE
        .row(
            "NCCL_PARAM_DUMP_ALL",
            AnyCase(&["0", "1", "F", "T", "FALSE", "TRUE"]),
            "print each parameter, its value and where it is from",
        )
        .since("2.30"),
    NCCL_SOURCE.row("NCCL_NO_CACHE", Text, "parameters to read anew at each use").since("2.29.7"),
    NCCL.row(
        "NCCL_CONF_FILE",
        Path,
        "file of NAME=VALUE lines, read instead of ~/.nccl.conf; /etc/nccl.conf comes after it",
    )
    .since("2.23")
    .trap(
        "the environment beats it; no quotes, no export, no blanks; ~ is not expanded; a container sees its \
            own files",
    )
    .source("NVIDIA/nccl:src/misc/param.cc"),
];

const PLUGINS: &[Entry] = &[
    GOOGLE
        .row("NCCL_GPUDIRECTTCPX_*", Text, "GPUDirect-TCPX, Google's plugin of A3 High machines")
        .trap("values come with the image; none of them is NCCL's own"),
    GOOGLE
        .row("NCCL_FASTRAK_*", Text, "FasTrak (GPUDirect-TCPXO), Google's plugin of A3 Mega machines")
        .trap("set by Google's nccl-env-profile.sh; none of them is NCCL's own"),
    GOOGLE.row("NCCL_SHIMNET_*", Text, "shim of Google's network plugins").trap("none of them is NCCL's own"),
    GOOGLE
        .row("NCCL_DYNAMIC_CHUNK_SIZE", Integer(1, MORE), "bytes per step, read by Google's NCCL build")
        .trap("NCCL itself does not read it"),
    GOOGLE
        .row("NCCL_TUNER_CONFIG_PATH", Path, "configuration of Google's tuner plugin")
        .trap("NCCL itself does not read it"),
    SHARP
        .row("NCCL_IBEXT_DISABLE", Switch, "1 switches the plugin of HPC-X (IBext) off")
        .default("0")
        .trap("NCCL itself does not read it"),
    SHARP.row("SHARP_COLL_*", Text, "the SHARP library below HPC-X's plugin"),
    SHARP
        .row("SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING", ZERO_ONE, "PCI relaxed ordering in the SHARP library")
        .default("0")
        .source("coreweave/nccl-tests:README.md"),
    GOOGLE
        .row("NCCL_TESTS_*", Text, "the programs of nccl-tests; NCCL does not read it")
        .source("NVIDIA/nccl-tests:README.md"),
    AWS.row("OFI_NCCL_*", Text, "aws-ofi-nccl, the plugin for EFA"),
    AWS.row("OFI_NCCL_PROTOCOL", AnyCase(&["SENDRECV", "RDMA"]), "how aws-ofi-nccl sends")
        .default("chosen by machine type"),
    AWS.row("OFI_NCCL_NIC_DUP_CONNS", Number(0, MORE), "connections per NIC").default("0"),
    AWS.row("OFI_NCCL_MIN_STRIPE_SIZE", Number(0, MORE), "bytes from which a message is spread over the rails")
        .default("131072"),
    AWS.row("OFI_NCCL_EAGER_MAX_SIZE", Number(-1, MORE), "largest message sent without asking").default("-1 (none)"),
    AWS.row("OFI_NCCL_DISABLE_DMABUF", AnyCase(&["0", "1", "true", "false"]), "register GPU memory without dma-buf")
        .default("0"),
    AWS.row("OFI_NCCL_MR_CACHE_DISABLE", AnyCase(&["0", "1", "true", "false"]), "register memory anew at each use")
        .default("0")
        .trap("slow"),
    AWS.row("OFI_NCCL_FORCE_NUM_RAILS", Number(0, MORE), "rails per GPU").default("0 (one for each NIC)"),
    AWS.row("OFI_NCCL_TUNER_TYPE", AnyCase(&["INTERNAL", "REGION", "MODEL"]), "which tuner chooses the algorithm")
        .default("Region"),
    AWS.row(
        "OFI_NCCL_ABORT_ON_ERROR",
        AnyCase(&["0", "1", "true", "false"]),
        "end the process at an error of the plugin",
    )
    .default("0")
    .trap("NCCL 2.21 to 2.23 may hang at such errors without it"),
    Of(Reader::Nccl, Tuning, "")
        .row("RCCL_*", Text, "RCCL, AMD's NCCL; it also reads the NCCL_ names")
        .source("https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html"),
    UCX.row("RX_QUEUE_LEN", Number(1, MORE), "receive queue of HPC-X's libraries, in Oracle's recipes")
        .source("oracle-quickstart/oci-hpc:samples"),
    UCX.row("IB_RX_QUEUE_LEN", Number(1, MORE), "the same for InfiniBand, in Oracle's recipes")
        .source("oracle-quickstart/oci-hpc:samples"),
];

const PHANTOMS: &[Entry] = &[
    NOBODY
        .row("NCCL_TIMEOUT", Text, "nothing")
        .trap(
            "the timeout of collectives is set in code: init_process_group(timeout=…), Megatron \
            --distributed-timeout-minutes, DEEPSPEED_TIMEOUT",
        )
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"),
    NOBODY
        .row("NCCL_SOCKET_TIMEOUT", Text, "nothing")
        .trap("NCCL has tries and sleeps: NCCL_SOCKET_RETRY_CNT, NCCL_SOCKET_RETRY_SLEEP_MSEC"),
    NOBODY
        .row("TORCH_NCCL_TIMEOUT", Text, "nothing")
        .trap("the timeout of collectives is set in code: init_process_group(timeout=…)")
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"),
    NOBODY
        .row("NCCL_MIN_CHANNELS", Text, "nothing")
        .successor("NCCL_MIN_CTAS")
        .trap("NCCL's name was NCCL_MIN_NCHANNELS"),
    NOBODY
        .row("NCCL_MAX_CHANNELS", Text, "nothing")
        .successor("NCCL_MAX_CTAS")
        .trap("NCCL's name was NCCL_MAX_NCHANNELS"),
    NOBODY
        .row("NCCL_IB_CUDA_SUPPORT", Text, "nothing any more: was GPUDirect RDMA on or off")
        .until("2.3")
        .successor("NCCL_NET_GDR_LEVEL"),
    NOBODY
        .row("NCCL_IB_GDR_LEVEL", Text, "nothing any more: was the distance for GPUDirect RDMA")
        .until("2.3")
        .successor("NCCL_NET_GDR_LEVEL"),
    NOBODY
        .row("NCCL_LL_THRESHOLD", Text, "nothing any more: was the size limit of the LL protocol")
        .until("2.4")
        .successor("NCCL_PROTO"),
    NOBODY
        .row("NCCL_TREE_THRESHOLD", Text, "nothing any more: was the size limit of trees")
        .until("2.4")
        .successor("NCCL_ALGO"),
    NOBODY
        .row("NCCL_SINGLE_RING_THRESHOLD", Text, "nothing any more: was the size limit of a single ring")
        .until("2.4"),
    NOBODY.row("NCCL_THREAD_THRESHOLD", Text, "nothing any more").until("2.4"),
    NOBODY.row("NCCL_RINGS", Text, "nothing any more: was the list of rings").until("2.4").successor("NCCL_GRAPH_FILE"),
    NOBODY.row("NCCL_AGG_CHANNEL_SIZE", Text, "nothing any more").since("2.10").until("2.19"),
    NOBODY
        .row("NCCL_WORK_FIFO_DEPTH", Text, "nothing any more: was the size of the work queue")
        .since("2.13")
        .until("2.21")
        .successor("NCCL_WORK_FIFO_BYTES"),
    NOBODY
        .row("NCCL_MNNVL", Text, "nothing any more: was multi-node NVLink on or off")
        .since("2.20")
        .until("2.20")
        .successor("NCCL_MNNVL_ENABLE"),
    NOBODY.row("NCCL_SHARED_BUFF_COUNT", Text, "nothing any more").since("2.8").until("2.8"),
    NOBODY.row("NCCL_CUDA_PATH", Text, "nothing any more: was where libcuda lies").since("2.13").until("2.20"),
    NOBODY
        .row("NCCL_CHECKS_DISABLE", Text, "nothing any more: was the check of arguments")
        .until("2.2")
        .successor("NCCL_CHECK_POINTERS"),
    NOBODY
        .row("FI_EFA_FORK_SAFE", Text, "nothing any more: was safety of fork() on EFA")
        .trap("libfabric finds out by itself; leave it out")
        .source("awslabs/awsome-distributed-training:1.architectures/efa-cheatsheet.md"),
    NOBODY
        .row("RDMAV_FORK_SAFE", Text, "nothing on current kernels: was safety of fork() in rdma-core")
        .trap("leave it out")
        .source("awslabs/awsome-distributed-training:1.architectures/efa-cheatsheet.md"),
];

const C10D: &[Entry] = &[
    PG.row(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        TorchInteger(0, 3),
        "what follows a failed or late collective: 0 nothing, 1 end the process, 2 and 3 with less cleaning up",
    )
    .default("3; torchrun gives its workers 1")
    .since("2.2")
    .trap("0 hangs for ever; the old name without TORCH_ loses against torchrun's own value"),
    PG.row("NCCL_ASYNC_ERROR_HANDLING", TorchInteger(0, 3), "old name of TORCH_NCCL_ASYNC_ERROR_HANDLING")
        .successor("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        .trap("not NCCL's; still read, with a warning; under torchrun it does nothing"),
    PG.row("TORCH_NCCL_BLOCKING_WAIT", TorchBool, "wait() blocks the CPU until the collective is done")
        .default("0")
        .since("2.2")
        .trap("1 switches the watchdog's error handling off"),
    PG.row("NCCL_BLOCKING_WAIT", TorchBool, "old name of TORCH_NCCL_BLOCKING_WAIT")
        .successor("TORCH_NCCL_BLOCKING_WAIT")
        .trap("not NCCL's"),
    PG.row(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        TorchInteger(1, 2_147_483_647),
        "seconds without a sign of the watchdog after which the process is ended",
    )
    .default("480 (600 in 2.2 and 2.3)")
    .since("2.2")
    .trap("long compilations and huge checkpoints may need 1800"),
    PG.row("TORCH_NCCL_ENABLE_MONITORING", TorchBool, "whether that happens").default("1").since("2.2"),
    PG.row("TORCH_NCCL_DUMP_ON_TIMEOUT", TorchBool, "write the flight recorder at a timeout")
        .default("true in the newest releases, false before")
        .since("2.2")
        .trap("needs a buffer (TORCH_FR_BUFFER_SIZE) and TORCH_NCCL_ENABLE_MONITORING"),
    PG.row("TORCH_FR_DUMP_ON_TIMEOUT", TorchBool, "the same by its newer name").default("unknown to 2.13"),
    PG.row(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        TorchInteger(0, 2_147_483_647),
        "how many collectives the flight recorder keeps",
    )
    .default("2000 in the newest releases, 0 before")
    .since("2.2")
    .successor("TORCH_FR_BUFFER_SIZE"),
    PG.row("TORCH_FR_BUFFER_SIZE", TorchInteger(0, 2_147_483_647), "how many collectives the flight recorder keeps")
        .default("2000 in the newest releases, 0 before")
        .since("2.8"),
    PG.row("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", Path, "where the flight recorder is written; the rank is appended")
        .default("/tmp/nccl_trace_rank_ in older releases")
        .since("2.2")
        .successor("TORCH_FR_DUMP_TEMP_FILE")
        .trap("/tmp of a container is lost with it"),
    PG.row("TORCH_FR_DUMP_TEMP_FILE", Path, "where the flight recorder is written; the rank is appended")
        .default("/tmp/nccl_trace_rank_ in older releases")
        .since("2.8")
        .trap("/tmp of a container is lost with it"),
    PG_SOURCE.row(
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        Path,
        "pipe that asks for the flight recorder; the rank is appended",
    ),
    PG_SOURCE
        .row(
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
            TorchInteger(0, 2_147_483_647),
            "how long the end waits for the flight recorder",
        )
        .default("15000 in the newest releases; 60000, first 2000, before; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", TorchInteger(0, 2_147_483_647), "the same by its newer name")
        .default("unknown to 2.13"),
    PG_SOURCE
        .row(
            "TORCH_NCCL_COORD_CHECK_MILSEC",
            TorchInteger(1, 2_147_483_647),
            "how often a rank looks whether another timed out",
        )
        .default("1000; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_NCCL_TRACE_CPP_STACK", TorchBool, "C++ stacks in the flight recorder")
        .default("0")
        .successor("TORCH_FR_CPP_STACK")
        .trap("slow"),
    PG_SOURCE
        .row("TORCH_FR_CPP_STACK", TorchBool, "C++ stacks in the flight recorder")
        .default("0")
        .since("2.8")
        .trap("slow"),
    PG_SOURCE.row("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", TorchBool, "write the flight recorder at an exception too"),
    PG_SOURCE
        .row("TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", TorchBool, "C++ stacks at an unclean end")
        .default("1"),
    PG_SOURCE
        .row("TORCH_NCCL_PROPAGATE_ERROR", TorchBool, "tell the other ranks of an error through the store")
        .default("0; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_NCCL_RETHROW_CUDA_ERRORS", TorchBool, "hand CUDA errors of the watchdog on")
        .default("1; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", TorchBool, "end the process at a timeout")
        .default("0; unknown to 2.13"),
    PG_SOURCE
        .row("TORCH_NCCL_NAN_CHECK", TorchBool, "look for NaN in what is sent")
        .default("0; unknown to 2.2")
        .trap("slow"),
    PG_SOURCE
        .row("TORCH_NCCL_DESYNC_DEBUG", TorchBool, "name the ranks that lag behind at a timeout")
        .default("0")
        .since("2.2"),
    PG_SOURCE
        .row("NCCL_DESYNC_DEBUG", TorchBool, "old name of TORCH_NCCL_DESYNC_DEBUG")
        .successor("TORCH_NCCL_DESYNC_DEBUG")
        .trap("not NCCL's"),
    PG_SOURCE
        .row("TORCH_NCCL_ENABLE_TIMING", TorchBool, "measure each collective")
        .default("0")
        .since("2.2")
        .trap("raises the danger of a hang"),
    PG_SOURCE
        .row("NCCL_ENABLE_TIMING", TorchBool, "old name of TORCH_NCCL_ENABLE_TIMING")
        .successor("TORCH_NCCL_ENABLE_TIMING")
        .trap("not NCCL's"),
    PG.row("TORCH_NCCL_AVOID_RECORD_STREAMS", TorchBool, "keep tensors alive without recordStream")
        .default("1 from 2.8 on, 0 before")
        .until("2.13")
        .trap("the default since 2.8, where setting it only warns"),
    PG.row("TORCH_NCCL_HIGH_PRIORITY", TorchBool, "NCCL's streams have high priority").default("0; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_NCCL_CUDA_EVENT_CACHE", TorchBool, "use CUDA events again")
        .default("1 in newer releases, 0 before; unknown to 2.2"),
    PG.row("TORCH_NCCL_USE_COMM_NONBLOCKING", TorchBool, "communicators that start without waiting").default("0"),
    PG_SOURCE
        .row("TORCH_NCCL_NONBLOCKING_TIMEOUT", TorchInteger(1, 2_147_483_647), "seconds that such a start may take")
        .default("1800"),
    PG_SOURCE
        .row(
            "TORCH_NCCL_RANKS_PER_ROOT",
            TorchInteger(1, 2_147_483_647),
            "ranks per root at the start of large communicators",
        )
        .default("128; unknown to 2.2"),
    PG_SOURCE
        .row("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", TorchBool, "register allocator memory with NCCL")
        .default("0")
        .trap("breaks with expandable_segments"),
    PG_SOURCE
        .row("TORCH_NCCL_BCAST_UNIQUEID", TorchBool, "send NCCL's id through the store to all")
        .default("unknown to 2.2"),
    PG_SOURCE.row(
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
        TorchBool,
        "warn when eager start serialises send and receive",
    ),
    PG_SOURCE
        .row("TORCH_DIST_USE_NCCL2", ZERO_ONE, "0 takes the old implementation of the nccl backend")
        .default("1; unknown to 2.13"),
    PG.row("TORCH_DISTRIBUTED_DEBUG", AnyCase(&["OFF", "INFO", "DETAIL"]), "checks and logs of PyTorch's collectives")
        .default("OFF")
        .trap("any other word throws; DETAIL is slow")
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/debug.cpp"),
    PG.row(
        "TORCH_CPP_LOG_LEVEL",
        AnyCase(&["INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3"]),
        "what PyTorch's C++ parts say",
    )
    .default("WARNING")
    .trap("the watchdog's own lines need INFO"),
    PG.row("TORCH_SHOW_CPP_STACKTRACES", ZERO_ONE, "C++ stacks in error messages").default("0"),
    PG_SOURCE
        .row("TORCH_DIST_INIT_BARRIER", ZERO_ONE, "a barrier at the end of init_process_group")
        .default("0")
        .source("pytorch/pytorch:torch/distributed/distributed_c10d.py"),
    PG_SOURCE
        .row("USE_LIBUV", ZERO_ONE, "the store's server uses libuv")
        .default("1")
        .trap("all ranks must agree; 0 only against faults of the store")
        .source("pytorch/pytorch:torch/distributed/rendezvous.py"),
    PG_SOURCE
        .row("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", ZERO_ONE, "workers get a store of their own, not torchrun's")
        .default("0")
        .source("pytorch/pytorch:torch/distributed/elastic/rendezvous/api.py"),
    PG_SOURCE
        .row("TORCH_UCC_BLOCKING_WAIT", Text, "which of UCC's collectives block; none for none")
        .trap("Megatron sets none for its UCC pipeline backend")
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupUCC.cpp"),
    PG_SOURCE
        .row("GLOO_SOCKET_IFNAME", ExactInterfaces, "interfaces of Gloo")
        .default("the one with the address of the host's own name")
        .trap(
            "whole names: NCCL's ^, = and prefixes fail; where the host's name means 127.0.1.1, Gloo reaches no \
            other node",
        )
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"),
    PG_SOURCE
        .row("TORCH_GLOO_LAZY_INIT", TorchBool, "Gloo connects when first needed")
        .default("0; unknown to 2.9")
        .source("pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"),
    PG_SOURCE
        .row("TP_SOCKET_IFNAME", ExactInterfaces, "interface of TensorPipe, torch RPC only")
        .source("pytorch/tensorpipe:tensorpipe/transport/uv"),
];

const CUDA_ROWS: &[Entry] = &[
    CUDA.row("CUDA_VISIBLE_DEVICES", Devices, "which GPUs CUDA shows, in which order")
        .kind(Foreign)
        .default("all")
        .trap(
            "Slurm sets it; the first invalid entry hides the rest; empty or -1 means none; under device cgroups \
            the numbers start at 0",
        ),
    CUDA.row("CUDA_DEVICE_ORDER", Word(&["FASTEST_FIRST", "PCI_BUS_ID"]), "how CUDA numbers the GPUs")
        .default("FASTEST_FIRST")
        .trap("with different GPUs in a node the default differs from nvidia-smi and Slurm"),
    CUDA.row("CUDA_DEVICE_MAX_CONNECTIONS", Number(1, 32), "hardware queues between host and GPU").default("8").trap(
        "1 keeps the order of launch, which Megatron's tensor and context parallelism need before Blackwell; \
            it serialises the streams of FSDP and DeepSpeed",
    ),
    CUDA.row("CUDA_MODULE_LOADING", Word(&["LAZY", "EAGER"]), "when kernels are loaded")
        .default("LAZY since CUDA 12.2")
        .trap("EAGER takes memory and time; LAZY loads at first use, which may meet a waiting collective"),
    CUDA.row("CUDA_LAUNCH_BLOCKING", ZERO_ONE, "each kernel is waited for")
        .default("0")
        .trap("for debugging; a forgotten 1 is very slow"),
    CUDA.row("CUDA_CACHE_PATH", Path, "cache of compiled PTX")
        .kind(Cache)
        .default("~/.nv/ComputeCache")
        .trap("on a shared home: locks and quota"),
    CUDA.row("CUDA_CACHE_MAXSIZE", Number(0, 4_294_967_296), "its size in bytes")
        .default("1073741824 (268435456 in older drivers)"),
    CUDA.row("CUDA_CACHE_DISABLE", ZERO_ONE, "no such cache").default("0"),
    CUDA.row("CUDA_FORCE_PTX_JIT", ZERO_ONE, "compile all kernels from PTX").default("0").trap("a test; slow start"),
    CUDA.row("CUDA_DISABLE_PTX_JIT", ZERO_ONE, "refuse kernels that exist as PTX only").default("0").trap("a test"),
    CUDA.row("CUDA_MPS_PIPE_DIRECTORY", Path, "where the MPS daemon is met")
        .kind(Foreign)
        .default("/tmp/nvidia-mps")
        .trap("another's daemon on the node: all CUDA-capable devices are busy or unavailable")
        .source("https://docs.nvidia.com/deploy/mps/index.html"),
    CUDA.row("CUDA_MPS_LOG_DIRECTORY", Path, "where the MPS daemon writes its log")
        .kind(Foreign)
        .default("/var/log/nvidia-mps")
        .source("https://docs.nvidia.com/deploy/mps/index.html"),
    CUDA.row("CUBLAS_WORKSPACE_CONFIG", Text, "cuBLAS's workspace as :SIZE:COUNT")
        .trap("deterministic algorithms need :4096:8 or :16:8")
        .source("https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"),
    CUDA.row("CUBLASLT_WORKSPACE_SIZE", Number(0, MORE), "cuBLASLt's workspace in PyTorch, in KiB")
        .source("pytorch/pytorch:aten/src/ATen/cuda/CUDABlas.cpp"),
    CUDA.row("NVIDIA_TF32_OVERRIDE", ZERO_ONE, "0 forbids TF32 whatever the program says")
        .default("the program decides")
        .trap("a forgotten 0 is slow everywhere")
        .source("https://docs.nvidia.com/cuda/cublas/index.html"),
    CUDA.row("ROCR_VISIBLE_DEVICES", Text, "which AMD GPUs the runtime shows")
        .kind(Foreign)
        .trap("together with HIP_VISIBLE_DEVICES it filters twice")
        .source("https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html"),
    CUDA.row("HIP_VISIBLE_DEVICES", Text, "which AMD GPUs HIP shows")
        .kind(Foreign)
        .trap("together with ROCR_VISIBLE_DEVICES it filters twice")
        .source("https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html"),
    CUDA.row("ZE_AFFINITY_MASK", Text, "which Intel GPUs Level Zero shows")
        .kind(Foreign)
        .source("https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#environment-variables"),
];

const ALLOCATORS: &[Entry] = &[
    ALLOC.row("PYTORCH_ALLOC_CONF", AllocatorKeys, "options of PyTorch's GPU memory allocator").since("2.9").trap(
        "one string: setting it replaces all keys; older PyTorch ignores it; not together with \
            PYTORCH_CUDA_ALLOC_CONF of another value",
    ),
    ALLOC
        .row("PYTORCH_CUDA_ALLOC_CONF", AllocatorKeys, "the same by its old name, still read")
        .successor("PYTORCH_ALLOC_CONF")
        .trap(
            "an unknown key throws; expandable_segments:True does not go with NCCL user buffers, nor with \
            backend:cudaMallocAsync",
        ),
    ALLOC
        .row("PYTORCH_HIP_ALLOC_CONF", AllocatorKeys, "the same on AMD GPUs, by its old name")
        .successor("PYTORCH_ALLOC_CONF"),
    ALLOC
        .row("PYTORCH_NO_CUDA_MEMORY_CACHING", ZERO_ONE, "no caching of GPU memory")
        .default("0")
        .trap("for debugging; very slow"),
    ALLOC
        .row("MALLOC_ARENA_MAX", Number(1, MORE), "arenas of the C library's malloc: fewer take less host memory")
        .default("8 per core")
        .source("https://man7.org/linux/man-pages/man3/mallopt.3.html"),
    ALLOC
        .row("MALLOC_TRIM_THRESHOLD_", Number(0, MORE), "free bytes at which malloc gives memory back")
        .default("131072, then by use")
        .source("https://man7.org/linux/man-pages/man3/mallopt.3.html"),
];

const TRANSFORMER_ENGINE: &[Entry] = &[
    TE.row("NVTE_FLASH_ATTN", Number(0, 1), "allow FlashAttention")
        .default("1")
        .trap("0 here, in NVTE_FUSED_ATTN and in NVTE_UNFUSED_ATTN: no attention is left"),
    TE.row("NVTE_FLASH_ATTN_V2", Number(0, 1), "allow FlashAttention 2").default("1"),
    TE.row("NVTE_FLASH_ATTN_V3", Number(0, 1), "allow FlashAttention 3").default("1"),
    TE.row("NVTE_FLASH_ATTN_V4", Number(0, 1), "allow FlashAttention 4").default("1"),
    TE.row("NVTE_FUSED_ATTN", Number(0, 1), "allow cuDNN's attention").default("1"),
    TE.row("NVTE_UNFUSED_ATTN", Number(0, 1), "allow attention in plain PyTorch").default("1"),
    TE.row("NVTE_FUSED_ATTN_BACKEND", Number(0, 2), "which of cuDNN's kernels: 1 for FP16 and BF16, 2 for FP8")
        .default("chosen at run time"),
    TE.row("NVTE_FUSED_ATTN_USE_FAv2_BWD", Number(0, 1), "FlashAttention 2 for the backward pass of cuDNN's attention")
        .default("0"),
    TE.row("NVTE_ALLOW_NONDETERMINISTIC_ALGO", Number(0, 1), "allow algorithms whose results vary")
        .default("1")
        .trap("the 1 of many recipes changes nothing; 0 is for determinism"),
    TE.row("NVTE_BATCH_MHA_P2P_COMM", Number(0, 1), "batched exchange in context parallelism")
        .default("0; on by itself with two such ranks before Blackwell"),
    TE.row("NVTE_FP8_DPA_BWD", Number(0, 1), "FP8 in the backward pass of attention").default("1"),
    TE.row("NVTE_FWD_LAYERNORM_SM_MARGIN", Number(0, MORE), "SMs that layer norm leaves to communication, forward")
        .default("0"),
    TE.row("NVTE_BWD_LAYERNORM_SM_MARGIN", Number(0, MORE), "SMs that layer norm leaves to communication, backward")
        .default("0"),
    TE.row("NVTE_INF_LAYERNORM_SM_MARGIN", Number(0, MORE), "SMs that layer norm leaves free in inference")
        .default("0"),
    TE.row("NVTE_NORM_FWD_USE_CUDNN", Number(0, 1), "norms by cuDNN, forward").default("0"),
    TE.row("NVTE_NORM_BWD_USE_CUDNN", Number(0, 1), "norms by cuDNN, backward").default("0"),
    TE.row("NVTE_EXT_MARGIN_SM", Number(0, MORE), "SMs that matrix products leave free"),
    TE.row("NVTE_AG_P2P_MULTI_ATOMIC", Number(0, 1), "several atomic steps in overlapped all-gather").default("0"),
    TE.row("NVTE_TORCH_COMPILE", Number(0, 1), "compile helper functions").default("1"),
    TE.row("NVTE_BIAS_GELU_NVFUSION", Number(0, 1), "fuse bias and GELU").default("1"),
    TE.row("NVTE_CPU_OFFLOAD_V1", Number(0, 1), "the old way of offloading to the host").default("0"),
    TE.row("NVTE_DEBUG", Number(0, 1), "print which attention is taken").default("0"),
    TE.row("NVTE_DEBUG_LEVEL", Number(0, 2), "how much of it").default("0"),
    TE.row("NVTE_UB_WITH_MPI", Number(0, 1), "user buffers that start by MPI")
        .kind(Foreign)
        .default("0")
        .trap("decided when the library is built; 1 needs a launch by MPI"),
    TE.row("UB_SKIPMC", Number(0, 1), "user buffers without multicast, for nodes without NVLink SHARP")
        .default("0")
        .source("NVIDIA/TransformerEngine:transformer_engine/common/comm_gemm_overlap"),
    TE.row("UB_TIMEOUT", Number(1, MORE), "seconds until user buffers give up")
        .default("110")
        .source("NVIDIA/TransformerEngine:transformer_engine/common/comm_gemm_overlap"),
    TE.row("NVTE_DISABLE_NVRTC", Number(0, 1), "no kernels compiled at run time").default("0"),
    TE.row("NVTE_CUDA_INCLUDE_DIR", Path, "CUDA's headers for that").kind(Foreign),
    TE.row("NVTE_FRAMEWORK", Text, "what to build the library for: pytorch, jax, all, none").kind(Foreign),
    TE.row(
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
        Number(1, MORE),
        "ranks of expert parallelism that share NVLink, HybridEP",
    )
    .trap("at most 8 on HGX; the size of expert parallelism, up to 72, on NVL72")
    .source("NVIDIA-NeMo/Megatron-Bridge:scripts/performance/utils/overrides.py"),
    TE.row("NVLINK_DOMAIN_SIZE", Number(1, 72), "GPUs that share NVLink: 8 or 72")
        .source("NVIDIA-NeMo/Megatron-Bridge:scripts/performance/utils/overrides.py"),
    TE.row("USE_MNNVL", Number(0, 1), "whether NVLink reaches other nodes, HybridEP")
        .source("NVIDIA-NeMo/Megatron-Bridge:scripts/performance/utils/overrides.py"),
];

const TRANSPORTS: &[Entry] = &[
    UCX.row("UCX_NET_DEVICES", Text, "devices of UCX: all, mlx5_0:1, eth0, …")
        .default("all")
        .trap("RDMA devices with their port, TCP by interface; an unknown name is an error"),
    UCX.row("UCX_TLS", Text, "transports of UCX: all, or a list such as rc,cuda_copy,cuda_ipc,sm,self; ^ excludes")
        .default("all")
        .trap("without cuda_* GPU memory is not handled; a forgotten tcp is slow"),
    UCX.row("UCX_IB_GID_INDEX", Text, "row of the GID table").default("auto"),
    UCX.row("UCX_IB_SL", Text, "InfiniBand service level").default("auto"),
    UCX.row("UCX_IB_TRAFFIC_CLASS", Text, "RoCE traffic class").default("auto"),
    UCX.row("UCX_RC_TIMEOUT", WithUnit, "how long a packet may stay unanswered")
        .default("1.0s")
        .trap("a time, unlike NCCL_IB_TIMEOUT"),
    UCX.row("UCX_RC_RETRY_COUNT", Number(0, 7), "how often it is sent again").default("7"),
    UCX.row("UCX_MAX_RNDV_RAILS", Number(1, MORE), "NICs for one large message").default("2"),
    UCX.row("UCX_MEMTYPE_CACHE", UCX_BOOL, "remember which memory is the GPU's")
        .default("y")
        .trap("n where memory is allocated behind UCX's back"),
    UCX.row("UCX_RNDV_THRESH", WithUnit, "size from which a message is announced first").default("auto"),
    UCX.row("UCX_WARN_UNUSED_ENV_VARS", UCX_BOOL, "name UCX_ variables that nobody read: finds misspelt ones")
        .default("y"),
    UCX.row(
        "UCX_LOG_LEVEL",
        AnyCase(&["fatal", "error", "warn", "diag", "info", "debug", "trace", "req", "data", "async", "func", "poll"]),
        "what UCX says",
    )
    .default("warn"),
    UCX.row("UCC_CL_BASIC_TLS", Text, "transports of UCC's basic layer")
        .trap("Megatron sets ^sharp,nccl for its UCC pipeline backend")
        .source("openucx/ucc:docs/user_guide.md"),
    MPI.row("OMPI_MCA_*", Text, "any parameter of Open MPI").trap("NGC images preset several; PyTorch needs none"),
    MPI.row("OMPI_MCA_btl_tcp_if_include", Text, "interfaces of Open MPI's TCP traffic"),
    MPI.row("OMPI_MCA_oob_tcp_if_include", Text, "interfaces of Open MPI's own messages"),
    MPI.row("OMPI_MCA_pml", Text, "how Open MPI sends: ucx, ob1, cm"),
    MPI.row("OMPI_MCA_coll_hcoll_enable", Number(0, 1), "use Mellanox's hcoll").trap("0 where hcoll crashes"),
    MPI.row("PMIX_MCA_*", Text, "any parameter of PMIx").source("NVIDIA/enroot:conf/hooks/extra/50-slurm-pmi.sh"),
    MPI.row("PMIX_MCA_gds", Text, "where PMIx keeps its data")
        .trap("hash where a container shows PMIX ERROR in gds_ds12 or gds_ds21")
        .source("NVIDIA/enroot:conf/hooks/extra/50-slurm-pmi.sh"),
    MPI.row("PMIX_MCA_psec", Text, "how PMIx checks who asks: native or none, in containers")
        .source("NVIDIA/enroot:conf/hooks/extra/50-slurm-pmi.sh"),
];

const LIBFABRIC: &[Entry] = &[
    FABRIC
        .row("FI_PROVIDER", Text, "which of libfabric's providers to use")
        .trap("efa is needed for aws-ofi-nccl up to 1.5 only; later it is found")
        .source("awslabs/awsome-distributed-training:1.architectures/efa-cheatsheet.md"),
    FABRIC.row("FI_EFA_*", Text, "any parameter of the EFA provider"),
    FABRIC
        .row("FI_EFA_USE_HUGE_PAGE", ZERO_ONE, "huge pages for EFA's buffers")
        .default("1")
        .trap("0 where fork() fails for lack of memory"),
    FABRIC
        .row("FI_EFA_USE_DEVICE_RDMA", ZERO_ONE, "RDMA of the EFA device")
        .default("on where it works")
        .trap("needed on old libfabric only: leave it out")
        .source("awslabs/awsome-distributed-training:1.architectures/efa-cheatsheet.md"),
    FABRIC.row("FI_EFA_SET_CUDA_SYNC_MEMOPS", ZERO_ONE, "set sync_memops on GPU buffers").default("1"),
    FABRIC
        .row(
            "FI_MR_CACHE_MONITOR",
            Text,
            "how libfabric learns that registered memory is given back: memhooks, userfaultfd, kdreg2, disabled",
        )
        .trap("Slingshot's sites name userfaultfd for NCCL, where memhooks may hang")
        .source("https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html"),
    CXI.row("FI_CXI_*", Text, "any parameter of libfabric's provider for Slingshot"),
    CXI.row("FI_CXI_DISABLE_HOST_REGISTER", FI_BOOL, "register none of libfabric's own buffers with the GPU")
        .default("0")
        .trap("Slingshot's sites name 1 for NCCL, which may hang otherwise")
        .source("https://docs.isambard.ac.uk/user-documentation/guides/nccl/"),
    CXI.row("FI_CXI_DISABLE_HMEM_DEV_REGISTER", FI_BOOL, "no loads and stores to the GPU's memory over PCIe"),
    CXI.row("FI_CXI_DEVICE_NAME", Text, "which of the node's cards are used: cxi0,cxi1")
        .default("all")
        .trap("the same for all ranks it leaves some without the card beside their GPU"),
    CXI.row("FI_CXI_DEFAULT_CQ_SIZE", Number(1, MORE), "entries of a completion queue whose size nobody asked for")
        .trap("too short for large jobs: sites name 131072")
        .source("https://docs.isambard.ac.uk/user-documentation/guides/nccl/"),
    CXI.row("FI_CXI_DEFAULT_TX_SIZE", Number(1, MORE), "operations that may wait to be sent"),
    CXI.row("FI_CXI_DEFAULT_RX_SIZE", Number(1, MORE), "receives that may be posted"),
    CXI.row("FI_CXI_RX_MATCH_MODE", AnyCase(&["hardware", "software", "hybrid"]), "who matches messages to receives"),
    CXI.row("FI_CXI_RDZV_PROTO", AnyCase(&["default", "alt_read"]), "how large messages are fetched")
        .default("default")
        .trap("alt_read needs the driver's rdzv_get_en=0"),
    CXI.row("FI_CXI_RDZV_THRESHOLD", Text, "bytes from which a message is a large one").default("16384"),
    CXI.row("FI_CXI_RDZV_GET_MIN", Text, "bytes that a large message has at least left to fetch"),
    CXI.row("FI_CXI_RDZV_EAGER_SIZE", Text, "bytes of a large message that are sent unasked"),
    CXI.row("FI_CXI_REQ_BUF_SIZE", Text, "bytes of a buffer for messages that software matches"),
    CXI.row("FI_CXI_REQ_BUF_MIN_POSTED", Number(1, MORE), "how many of these are ready at least"),
    CXI.row("FI_CXI_OFLOW_BUF_SIZE", Text, "bytes of a buffer for messages that nobody waits for yet"),
    CXI.row("FI_CXI_ODP", FI_BOOL, "pages are fetched when the card needs them, not pinned"),
    CXI.row("FI_CXI_OPTIMIZED_MRS", FI_BOOL, "a quicker kind of registered memory, of which there is little")
        .trap("all ranks must agree"),
    CXI.row("FI_CXI_LLRING_MODE", AnyCase(&["idle", "always", "never"]), "a quicker way to hand commands to the card"),
    CXI.row("CXI_FORK_SAFE", Text, "set to anything: what a fork() leaves the child is not what the card writes to")
        .trap("a child that touches such memory ends with a segmentation fault"),
    CXI.row("CXI_FORK_SAFE_HP", Text, "the same for huge pages, beside CXI_FORK_SAFE"),
    FABRIC
        .row("FI_LOG_LEVEL", AnyCase(&["warn", "trace", "info", "debug"]), "what libfabric says")
        .default("warn")
        .source("https://ofiwg.github.io/libfabric/main/man/fabric.7.html"),
];

const NVSHMEM_ROWS: &[Entry] = &[
    SHMEM
        .row("NVSHMEM_*", Text, "any setting of NVSHMEM; DeepEP and Triton-distributed use it")
        .kind(Foreign)
        .trap("NCCL's settings do not reach it"),
    SHMEM
        .row("NVSHMEM_HCA_LIST", Text, "RDMA devices with ports")
        .trap("separate from NCCL_IB_HCA: the same facts, set twice"),
    SHMEM
        .row("NVSHMEM_IB_GID_INDEX", Number(-1, 255), "row of the GID table, RoCE")
        .trap("separate from NCCL_IB_GID_INDEX"),
    SHMEM
        .row(
            "NVSHMEM_REMOTE_TRANSPORT",
            AnyCase(&["ibrc", "ucx", "ibdevx", "libfabric", "none"]),
            "how other nodes are reached",
        )
        .default("ibrc"),
    SHMEM
        .row(
            "NVSHMEM_BOOTSTRAP",
            AnyCase(&["PMI", "MPI", "SHMEM", "UID", "plugin"]),
            "how the processes find each other",
        )
        .default("PMI"),
    SHMEM
        .row(
            "NVSHMEM_IB_ENABLE_IBGDA",
            AnyCase(&["0", "1", "true", "false", "yes", "no", "on", "off"]),
            "the GPU drives the NIC itself",
        )
        .default("false"),
];

const THREADS: &[Entry] = &[
    OPENMP.row("OMP_NUM_THREADS", Numbers(1, MORE), "threads of each process's OpenMP loops")
        .default("all CPUs of the process; torchrun sets 1 for more than one worker")
        .trap("unset, without --cpus-per-task, eight processes start as many threads each as the node has cores"),
    OPENMP.row("OMP_PROC_BIND", Text, "whether threads stay on their CPUs").trap("fights with Slurm's own binding"),
    OPENMP.row("OMP_PLACES", Text, "the places they stay at").trap("fights with Slurm's own binding"),
    OPENMP.row("MKL_NUM_THREADS", Number(1, MORE), "threads of Intel MKL")
        .default("as OMP_NUM_THREADS")
        .source("https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-0/setting-the-number-of-threads-using-openmp.html"),
    OPENMP.row(
        "OPENBLAS_NUM_THREADS",
        Number(1, MORE),
        "threads of OpenBLAS",
    ).source("OpenMathLib/OpenBLAS:README.md"),
    OPENMP.row("NUMEXPR_MAX_THREADS", Number(1, MORE), "threads of numexpr").source("pydata/numexpr:README.rst"),
    OPENMP.row("RAYON_NUM_THREADS", Number(0, MORE), "threads of Rust's rayon, tokenizers among them")
        .source("rayon-rs/rayon:FAQ.md"),
    OPENMP.row("KMP_AFFINITY", Text, "binding of Intel's and LLVM's OpenMP threads")
        .trap("fights with Slurm's own binding: all threads on one core")
        .source("https://openmp.llvm.org/design/Runtimes.html"),
    OPENMP.row("GOMP_CPU_AFFINITY", Text, "binding of GNU's OpenMP threads")
        .trap("fights with Slurm's own binding: all threads on one core")
        .source("https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fCPU_005fAFFINITY.html"),
    OPENMP.row(
        "TOKENIZERS_PARALLELISM",
        AnyCase(&["true", "false", "1", "0", "yes", "no", "on", "off"]),
        "threads inside Hugging Face tokenizers",
    )
        .trap("unset, a fork after their first use warns and switches them off; false where DataLoader workers are \
            used")
        .source("huggingface/tokenizers:tokenizers/src/utils/parallelism.rs"),
];

const PYTHON_SYSTEM: &[Entry] = &[
    PYTHON
        .row("PYTHONUNBUFFERED", Text, "not empty: output is written at once")
        .trap("without it the last lines before a crash are lost"),
    PYTHON.row("PYTHONFAULTHANDLER", Text, "not empty: Python's stack is printed at a crash"),
    PYTHON
        .row("PYTHONNOUSERSITE", Text, "not empty: ~/.local is not searched")
        .trap("without it a container may import the host's packages from a mounted home"),
    PYTHON.row("PYTHONDONTWRITEBYTECODE", Text, "not empty: no .pyc files"),
    PYTHON.row("PYTHONHASHSEED", Text, "seed of hashes: random, or 0 to 4294967295").default("random"),
    PYTHON
        .row("PYTHONPATH", Text, "where Python also looks for modules")
        .kind(Foreign)
        .trap("the host's path in a container imports the wrong modules"),
    SYSTEM
        .row("LD_LIBRARY_PATH", Text, "where the loader also looks for libraries")
        .trap("the host's path in a container, or a second libnccl: mismatched NCCL versions")
        .source("https://man7.org/linux/man-pages/man8/ld.so.8.html"),
    SYSTEM
        .row("LD_PRELOAD", Text, "libraries loaded before all others")
        .trap("a path that the container lacks prints an error for each program")
        .source("https://man7.org/linux/man-pages/man8/ld.so.8.html"),
    SYSTEM.row("PATH", Text, "where programs are looked for"),
    SYSTEM.row("HOME", Path, "the user's directory; most caches lie below it by default"),
    SYSTEM
        .row("TMPDIR", Path, "directory of temporary files")
        .default("/tmp")
        .trap("must be on the node, be there in the container too, and allow execution for compiled kernels"),
    SYSTEM
        .row("http_proxy", Text, "proxy of http")
        .trap("catches gRPC between the nodes too (JAX): warning, then hang")
        .source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM.row("https_proxy", Text, "proxy of https").source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM.row("all_proxy", Text, "proxy of all protocols").source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM
        .row("no_proxy", Text, "hosts that are reached without a proxy")
        .trap("should hold the cluster's own names")
        .source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM
        .row("HTTP_PROXY", Text, "as http_proxy, for programs that read the upper case form")
        .source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM.row("HTTPS_PROXY", Text, "as https_proxy").source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM.row("ALL_PROXY", Text, "as all_proxy").source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM.row("NO_PROXY", Text, "as no_proxy").source("https://curl.se/libcurl/c/libcurl-env.html"),
    SYSTEM
        .row("LANG", Text, "language and character set")
        .trap("pyxis removes it")
        .source("NVIDIA/pyxis:pyxis_slurmstepd.c"),
    SYSTEM
        .row("LC_ALL", Text, "the same, above LANG")
        .trap("pyxis removes it")
        .source("NVIDIA/pyxis:pyxis_slurmstepd.c"),
];

const COMPILERS: &[Entry] = &[
    TRITON
        .row("TRITON_CACHE_DIR", Path, "Triton's compiled kernels")
        .default("~/.triton/cache; under Inductor below its cache")
        .trap(
            "on NFS or Lustre the ranks disturb each other (Stale file handle, Device or resource busy): a \
            directory of the node and the user",
        ),
    TRITON.row("TRITON_HOME", Path, "where .triton lies").default("the home directory"),
    TRITON.row("TRITON_DUMP_DIR", Path, "where Triton writes what it compiles, if asked").default("~/.triton/dump"),
    INDUCTOR
        .row("TORCHINDUCTOR_CACHE_DIR", Path, "torch.compile's cache")
        .default("$TMPDIR/torchinductor_$USER")
        .trap("a directory of the node; it may be filled from an archive before"),
    INDUCTOR
        .row("TORCHINDUCTOR_FX_GRAPH_CACHE", ZERO_ONE, "keep whole compiled graphs too")
        .kind(Tuning)
        .default("1 in newer releases"),
    INDUCTOR
        .row("TORCHINDUCTOR_COMPILE_THREADS", Number(0, MORE), "compile processes of each rank")
        .kind(Tuning)
        .default("as many as cores, at most 32")
        .trap("times the ranks of the node"),
    INDUCTOR
        .row("TORCH_EXTENSIONS_DIR", Path, "where PyTorch compiles C++ extensions, DeepSpeed's among them")
        .default("~/.cache/torch_extensions")
        .trap("a left lock file in a shared home makes each rank wait without a word")
        .source("pytorch/pytorch:torch/utils/cpp_extension.py"),
    INDUCTOR
        .row("PYTORCH_KERNEL_CACHE_PATH", Path, "kernels that PyTorch compiles at run time")
        .default("~/.cache/torch/kernels")
        .source("pytorch/pytorch:aten/src/ATen/native/cuda/jit_utils.cpp"),
    INDUCTOR
        .row("TORCH_HOME", Path, "torch.hub's models")
        .default("~/.cache/torch")
        .trap("shared by the nodes, filled by one rank")
        .source("https://docs.pytorch.org/docs/stable/hub.html"),
    TRITON
        .row("NUMBA_CACHE_DIR", Path, "Numba's compiled functions")
        .source("https://numba.readthedocs.io/en/stable/reference/envvars.html"),
    TRITON
        .row("FLASHINFER_WORKSPACE_BASE", Path, "where FlashInfer compiles")
        .default("~")
        .source("flashinfer-ai/flashinfer:flashinfer/jit/env.py"),
    TRITON
        .row("DG_JIT_CACHE_DIR", Path, "DeepGEMM's compiled kernels")
        .default("~/.deep_gemm")
        .source("deepseek-ai/DeepGEMM:README.md"),
    TRITON
        .row("DG_CACHE_DIR", Path, "DeepGEMM's compiled kernels, old name")
        .successor("DG_JIT_CACHE_DIR")
        .source("deepseek-ai/DeepGEMM:README.md"),
    TRITON
        .row("TVM_FFI_CACHE_DIR", Path, "what tvm-ffi compiles")
        .default("~/.cache/tvm-ffi")
        .source("apache/tvm-ffi:python/tvm_ffi/cpp/extension.py"),
    TRITON
        .row("CUTE_DSL_CACHE_DIR", Path, "what CuTe DSL compiles")
        .source("https://docs.nvidia.com/cutlass/media/docs/pythonDSL/cute_dsl_general/dsl_jit_caching.html"),
    TRITON
        .row("VLLM_CACHE_ROOT", Path, "vLLM's caches")
        .default("~/.cache/vllm")
        .source("vllm-project/vllm:vllm/envs.py"),
    TRITON
        .row("MPLCONFIGDIR", Path, "matplotlib's configuration and font cache")
        .default("~/.config/matplotlib")
        .source("https://matplotlib.org/stable/install/environment_variables_faq.html"),
    TRITON
        .row("XDG_CACHE_HOME", Path, "where caches go that have no variable of their own")
        .default("~/.cache")
        .source("https://specifications.freedesktop.org/basedir-spec/latest"),
];

const FRAMEWORKS: &[Entry] = &[
    HUB.row("HF_HOME", Path, "everything Hugging Face keeps")
        .default("~/.cache/huggingface")
        .trap("shared by the nodes; read at import; ranks that download all at once get error 429 or wait for locks"),
    HUB.row("HF_HUB_CACHE", Path, "downloaded models and data sets").default("$HF_HOME/hub"),
    HUB.row("HF_DATASETS_CACHE", Path, "prepared data sets")
        .default("$HF_HOME/datasets")
        .source("https://huggingface.co/docs/datasets/cache"),
    HUB.row("TRANSFORMERS_CACHE", Path, "old name of the models' directory")
        .successor("HF_HUB_CACHE")
        .source("https://huggingface.co/docs/transformers/installation#cache-directory"),
    HUB.row("HF_HUB_OFFLINE", HUB_BOOL, "ask no server")
        .kind(Tuning)
        .default("0")
        .trap("set it once everything is downloaded, on NFS above all"),
    HUB.row("TRANSFORMERS_OFFLINE", HUB_BOOL, "the same for transformers")
        .kind(Tuning)
        .default("0")
        .source("https://huggingface.co/docs/transformers/installation#offline-mode"),
    HUB.row("HF_DATASETS_OFFLINE", HUB_BOOL, "the same for datasets")
        .kind(Tuning)
        .default("0")
        .source("https://huggingface.co/docs/datasets/loading#offline"),
    HUB.row("HF_HUB_ENABLE_HF_TRANSFER", HUB_BOOL, "downloads by hf_transfer")
        .kind(Tuning)
        .default("0")
        .successor("HF_XET_HIGH_PERFORMANCE")
        .trap("given up in favour of hf-xet"),
    HUB.row("HF_XET_HIGH_PERFORMANCE", HUB_BOOL, "hf-xet takes all the bandwidth it can").kind(Tuning).default("0"),
    HUB.row("HF_XET_*", Text, "any setting of hf-xet, which downloads from the Hub").kind(Tuning),
    HUB.row("HF_TOKEN", Text, "the user's key for the Hub")
        .kind(Foreign)
        .trap("a secret: on a command line everybody on the node can read it"),
    NEMO.row("NEMO_HOME", Path, "NeMo's models and packed data")
        .default("~/.cache/nemo")
        .trap("shared by the nodes: rank 0 packs, all read; otherwise 'NoneType' object is not an iterator")
        .source("NVIDIA-NeMo/NeMo:nemo/constants.py"),
    NEMO.row("NEMO_MODELS_CACHE", Path, "NeMo's models")
        .default("$NEMO_HOME/models")
        .source("NVIDIA-NeMo/NeMo:nemo/constants.py"),
    NEMO.row("NEMORUN_HOME", Path, "NeMo-Run's experiments").default("~/.nemo_run"),
    UV.row("UV_CACHE_DIR", Path, "uv's cache")
        .kind(Cache)
        .default("~/.cache/uv")
        .trap("on another file system than the environment uv copies instead of linking"),
    UV.row("UV_LINK_MODE", Word(&["clone", "copy", "hardlink", "symlink"]), "how uv puts packages in place")
        .default("hardlink on Linux")
        .trap("copy silences 'Failed to hardlink files'"),
    UV.row("UV_PROJECT_ENVIRONMENT", Path, "where uv keeps the project's environment")
        .kind(Foreign)
        .default(".venv")
        .trap("images name their own; ranks that sync one shared environment at once break it"),
    UV.row("UV_NO_SYNC", UV_BOOL, "uv run leaves the environment as it is")
        .default("0")
        .trap("the right setting where many ranks call uv run"),
    UV.row("UV_FROZEN", UV_BOOL, "take uv.lock as it is").default("0"),
    UV.row("UV_OFFLINE", UV_BOOL, "no network").default("0"),
    UV.row("PIP_CACHE_DIR", Path, "pip's cache")
        .kind(Cache)
        .default("~/.cache/pip")
        .source("https://pip.pypa.io/en/stable/topics/caching/"),
    UV.row("CONDA_PKGS_DIRS", Path, "conda's package cache").kind(Cache).source(
        "https://docs.conda.io/projects/conda/en/stable/user-guide/configuration/custom-env-and-pkg-locations.html",
    ),
    WANDB
        .row("WANDB_API_KEY", Text, "the user's key for wandb")
        .kind(Foreign)
        .trap("a secret: on a command line everybody on the node can read it"),
    WANDB.row("WANDB_DIR", Path, "where wandb keeps its runs").default("./wandb"),
    WANDB.row("WANDB_CACHE_DIR", Path, "wandb's cache").default("~/.cache/wandb"),
    WANDB.row("WANDB_DATA_DIR", Path, "wandb's staged artifacts").default("~/.local/share/wandb"),
    WANDB
        .row("WANDB_MODE", Word(&["online", "offline", "disabled", "shared"]), "whether wandb sends")
        .kind(Tuning)
        .default("online")
        .trap("from rank 0 only, or each rank becomes a run"),
    WANDB
        .row("MLFLOW_TRACKING_URI", Text, "where MLflow sends")
        .kind(Tuning)
        .source("https://mlflow.org/docs/latest/api_reference/python_api/mlflow.environment_variables.html"),
];

const DEEPSPEED_JAX: &[Entry] = &[
    DEEPSPEED
        .row("DEEPSPEED_TIMEOUT", Number(1, MORE), "timeout of collectives, in minutes")
        .default("10")
        .source("deepspeedai/DeepSpeed:deepspeed/constants.py"),
    DEEPSPEED
        .row("DS_BUILD_*", Text, "which of DeepSpeed's extensions are built at installation")
        .kind(Foreign)
        .source("deepspeedai/DeepSpeed:setup.py"),
    DEEPSPEED
        .row("DS_SKIP_CUDA_CHECK", ZERO_ONE, "build although CUDA's version differs from PyTorch's")
        .default("0")
        .source("deepspeedai/DeepSpeed:op_builder/builder.py"),
    JAX.row("JAX_COORDINATOR_ADDRESS", Text, "where process 0 listens")
        .default("found from Slurm's variables")
        .trap("http_proxy catches the connection: warning, then hang"),
    JAX.row("JAX_COORDINATOR_PORT", Number(1, 65535), "its port")
        .default("job id modulo 4096, plus 61440")
        .trap("the same for all steps of a job")
        .source("jax-ml/jax:jax/_src/clusters/slurm_cluster.py"),
    JAX.row("JAX_COORDINATOR_BIND_ADDRESS", Text, "the address and port it binds").default("all addresses"),
    JAX.row("JAX_NUM_PROCESSES", Number(1, MORE), "how many processes, where no launcher is known")
        .trap("newer releases only"),
    JAX.row("JAX_PROCESS_ID", Number(0, MORE), "the process's number, where no launcher is known")
        .trap("newer releases only"),
    JAX.row("JAX_LOCAL_DEVICE_IDS", Numbers(0, MORE), "which GPUs this process takes")
        .default("the task's number on its node")
        .trap("0 where each task sees one GPU only, or the number is out of range"),
    JAX.row("JAX_COMPILATION_CACHE_DIR", Path, "JAX's compiled programs")
        .kind(Cache)
        .trap("may be shared: files are named by their content")
        .source("https://docs.jax.dev/en/latest/persistent_compilation_cache.html"),
    XLA.row("XLA_PYTHON_CLIENT_MEM_FRACTION", Fraction, "part of GPU memory that JAX takes at the start")
        .default("0.75"),
    XLA.row("XLA_FLAGS", Text, "XLA's flags, separated by blanks")
        .trap("one string: setting it replaces all flags; an unknown flag ends the process"),
];

const CONTAINERS: &[Entry] = &[
    TOOLKIT
        .row("NVIDIA_VISIBLE_DEVICES", Text, "which GPUs a container gets")
        .trap("void or none: no GPU in the container; set by the runtime"),
    TOOLKIT
        .row("NVIDIA_DRIVER_CAPABILITIES", Text, "which parts of the driver a container gets")
        .trap("without compute,utility there is no NVML"),
    TOOLKIT
        .row("MELLANOX_VISIBLE_DEVICES", Text, "which RDMA devices a container gets")
        .trap("void: none, and NCCL falls back to sockets")
        .source("NVIDIA/enroot:conf/hooks/99-mellanox.sh"),
    TOOLKIT
        .row("NVIDIA_IMEX_CHANNELS", Text, "which IMEX channels a container gets (GB200)")
        .trap("none: multi-node NVLink fails with operation not permitted"),
    ENROOT
        .row("ENROOT_CACHE_PATH", Path, "enroot's image layers")
        .trap("set by the admin; does not pass through pyxis"),
    ENROOT
        .row("ENROOT_DATA_PATH", Path, "enroot's unpacked images")
        .trap("on the node: overlays do not work on NFS or Lustre, and shared names clash"),
    ENROOT
        .row("ENROOT_RUNTIME_PATH", Path, "enroot's working files")
        .trap("set by the admin; does not pass through pyxis"),
    ENROOT
        .row("ENROOT_TEMP_PATH", Path, "enroot's temporary files")
        .trap("set by the admin; does not pass through pyxis"),
    PYXIS.row("PYXIS_CONTAINER_IMAGE", Text, "default of --container-image"),
    PYXIS.row("PYXIS_CONTAINER_MOUNTS", Text, "default of --container-mounts"),
    PYXIS.row("PYXIS_CONTAINER_WORKDIR", Path, "default of --container-workdir"),
    PYXIS.row("PYXIS_CONTAINER_NAME", Text, "default of --container-name"),
    PYXIS.row("PYXIS_CONTAINER_SAVE", Path, "default of --container-save"),
    PYXIS
        .row("PYXIS_CONTAINER_MOUNT_HOME", Text, "default of --container-mount-home; 0 for no")
        .trap("#SBATCH --no-container-mount-home concerns the batch script's container only; this reaches each srun"),
    PYXIS.row("PYXIS_CONTAINER_REMAP_ROOT", Text, "default of --container-remap-root"),
    PYXIS.row("PYXIS_CONTAINER_ENTRYPOINT", Text, "default of --container-entrypoint"),
    PYXIS.row("PYXIS_CONTAINER_WRITABLE", Text, "default of --container-writable"),
    PYXIS.row("PYXIS_CONTAINER_READONLY", Text, "default of --container-readonly"),
    PYXIS
        .row("PYXIS_CONTAINER_ENV", Text, "default of --container-env: names whose value the image may not replace")
        .trap("without it the image's value wins over the one you export"),
    PYXIS.row("PYXIS_CONTAINER_UNSHARE", Text, "default of --container-unshare, newer pyxis"),
    TOOLKIT
        .row("NCCL_VERSION", Text, "an image's NCCL version, for people; NCCL does not read it")
        .source("https://gitlab.com/nvidia/container-images/cuda"),
    BUILD.row("NCCL_HOME", Path, "where builds look for NCCL; NCCL does not read it"),
    BUILD.row("NCCL_ROOT", Path, "where CMake looks for NCCL; NCCL does not read it"),
    BUILD.row("NCCL_ROOT_DIR", Path, "where PyTorch's build looks for NCCL; NCCL does not read it"),
    BUILD.row("NCCL_INCLUDE_DIR", Path, "NCCL's header for PyTorch's build; NCCL does not read it"),
    BUILD.row("NCCL_LIB_DIR", Path, "NCCL's library for PyTorch's build; NCCL does not read it"),
    TOOLKIT
        .row("PYTORCH_VERSION", Text, "an image's PyTorch version")
        .trap("where an image sets it, enroot and pyxis set RANK, LOCAL_RANK, MASTER_ADDR and more by themselves")
        .source("NVIDIA/pyxis:pyxis_slurmstepd.c"),
];

const SLURM_ROWS: &[Entry] = &[
    SLURM.row("SLURM_PROCID", Number(0, MORE), "the task's rank in the step").trap("0 in the batch script"),
    SLURM.row("SLURM_LOCALID", Number(0, MORE), "the task's number on its node"),
    SLURM.row("SLURM_NODEID", Number(0, MORE), "the node's number in the step").trap("0 in the batch script"),
    SLURM.row("SLURM_NTASKS", Number(1, MORE), "the step's tasks, in a step").trap(
        "in a batch script the job's, and missing without -n; code that sees it there without srun waits for \
            ranks that never start",
    ),
    SLURM.row("SLURM_NPROCS", Number(1, MORE), "old name of SLURM_NTASKS").successor("SLURM_NTASKS"),
    SLURM.row("SLURM_STEP_NUM_TASKS", Number(1, MORE), "the step's tasks"),
    SLURM.row("SLURM_STEP_NUM_NODES", Number(1, MORE), "the step's nodes"),
    SLURM.row("SLURM_NNODES", Number(1, MORE), "the step's nodes, in a step").trap("in a batch script the job's"),
    SLURM
        .row("SLURM_JOB_NUM_NODES", Number(1, MORE), "the job's nodes")
        .trap("wrong for a smaller step: SLURM_STEP_NUM_NODES"),
    SLURM.row("SLURM_STEP_NODELIST", Text, "the step's nodes, in the order of SLURM_NODEID"),
    SLURM.row("SLURM_JOB_NODELIST", Text, "the job's nodes").trap("its first node need not be in the step"),
    SLURM
        .row("SLURM_NODELIST", Text, "old name of SLURM_JOB_NODELIST")
        .successor("SLURM_JOB_NODELIST")
        .trap("the job's nodes, in a step too"),
    SLURM.row("SLURM_STEP_TASKS_PER_NODE", Text, "the step's tasks on each node: 8(x2),4"),
    SLURM.row("SLURM_TASKS_PER_NODE", Text, "the same").trap("the job's with --preserve-env"),
    SLURM
        .row("SLURM_NTASKS_PER_NODE", Number(1, MORE), "the option --ntasks-per-node")
        .trap("there only if given, and the job's; Lightning refuses several tasks without it"),
    SLURM.row("SLURM_JOB_ID", Number(1, MORE), "the job's number, of its own for each element of an array"),
    SLURM.row("SLURM_STEP_ID", Number(0, MORE), "the step's number in its job"),
    SLURM
        .row("SLURM_ARRAY_JOB_ID", Number(1, MORE), "the array's number")
        .trap("the same for all elements: no port or directory should come from it"),
    SLURM.row("SLURM_HET_JOB_ID", Number(1, MORE), "the number of a job of several components"),
    SLURM
        .row("SLURM_JOB_NAME", Text, "the job's name")
        .trap("bash or interactive switches Lightning's Slurm support off"),
    SLURM.row("SLURM_STEP_GPUS", Text, "the step's GPUs on this node"),
    SLURM
        .row("SLURM_JOB_GPUS", Text, "the job's GPUs on this node")
        .trap("numbers of the whole node, not those CUDA sees"),
    SLURM.row("SLURM_GPUS_ON_NODE", Number(0, MORE), "how many GPUs the step has on this node"),
    SLURM.row("SLURMD_NODENAME", Text, "this node's name in Slurm").trap("need not be its host name"),
    SLURM
        .row("SLURM_LAUNCH_NODE_IPADDR", Text, "the address of srun's host")
        .trap("may be a login node: no MASTER_ADDR"),
    SLURM
        .row("SLURM_SRUN_COMM_HOST", Text, "the address where srun listens")
        .trap("may be a login node: no MASTER_ADDR"),
    SLURM
        .row("SLURM_CPU_BIND", Text, "the option --cpu-bind")
        .trap("inherited from sbatch or an outer srun it binds all tasks of an inner one"),
    SLURM
        .row("SLURM_CPUS_PER_TASK", Number(1, MORE), "the option --cpus-per-task")
        .trap("srun of 22.05 to 23.02 does not take it over from sbatch: SRUN_CPUS_PER_TASK"),
    SLURM.row("SRUN_CPUS_PER_TASK", Number(1, MORE), "--cpus-per-task for srun").since("22.05"),
    SLURM
        .row("SLURM_TMPDIR", Path, "a directory of the job on the node, at sites that make one")
        .trap("not Slurm's own: most clusters do not have it"),
    SLURM.row("SLURM_CPUS_ON_NODE", Number(1, MORE), "CPUs of the step on this node"),
    SLURM.row("SLURM_MPI_TYPE", Text, "the option --mpi: none, pmi2, pmix").trap("PyTorch needs none of them"),
    SLURM.row("SLURM_UNBUFFEREDIO", Text, "the option --unbuffered: output line by line"),
    SLURM
        .row("SLURM_KILL_BAD_EXIT", Number(0, 1), "the option --kill-on-bad-exit: one failed task ends the step")
        .default("KillOnBadExit of slurm.conf")
        .trap("without it the others wait until a timeout; --no-kill switches it off"),
];
