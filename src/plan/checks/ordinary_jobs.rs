//! Jobs as people start them, with what images and clouds set: none of them is
//! told anything.

use crate::facts::netdevs::NetKind;
use crate::facts::rdma::LinkLayer;
use crate::facts::rdma::tests::rdma_port;
use crate::facts::task::{Container, MemoryFacts, Peer, Peers};
use crate::facts::{CpuSet, NetDevice, NodeFacts, RdmaPort, TaskFacts};
use crate::plan::Plan;
use crate::plan::binding::machine::dgx_h100;
use crate::plan::tests::World;

/// What NGC's PyTorch images set, in the main.
const NGC: &[(&str, &str)] = &[
    ("NCCL_VERSION", "2.25.1"),
    ("PYTORCH_VERSION", "2.7.0a0+7c8ec84dab"),
    ("CUDA_VERSION", "12.8.1.012"),
    ("CUDA_DRIVER_VERSION", "570.124.06"),
    ("CUDA_CACHE_DISABLE", "1"),
    ("CUDA_MODULE_LOADING", "LAZY"),
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility,video"),
    ("OMPI_MCA_coll_hcoll_enable", "0"),
    ("OPAL_PREFIX", "/opt/hpcx/ompi"),
    ("UCC_CL_BASIC_TLS", "^sharp"),
    ("TORCH_CUDA_ARCH_LIST", "8.0 8.6 9.0 10.0 12.0+PTX"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
    ("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas"),
    ("OMP_NUM_THREADS", "1"),
];
/// What AWS's training images set.
const AWS: &[(&str, &str)] = &[
    ("NCCL_VERSION", "2.23.4"),
    ("FI_PROVIDER", "efa"),
    ("FI_EFA_USE_HUGE_PAGE", "0"),
    ("OFI_NCCL_PROTOCOL", "RDMA"),
    ("NCCL_DEBUG", "INFO"),
    ("NCCL_SOCKET_IFNAME", "^docker,lo,veth"),
    ("LD_LIBRARY_PATH", "/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib"),
];
/// Google's, for A3 Mega (GoogleCloudPlatform/cluster-toolkit, examples).
const GOOGLE: &[(&str, &str)] = &[
    ("NCCL_FASTRAK_CTRL_DEV", "eth0"),
    ("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", "/dev/aperture_devices"),
    ("NCCL_SOCKET_IFNAME", "eth0"),
    ("NCCL_CROSS_NIC", "0"),
    ("NCCL_PROTO", "Simple,LL128"),
    ("NCCL_MIN_NCHANNELS", "4"),
    ("NCCL_TUNER_PLUGIN", "libnccl-tuner.so"),
    ("NCCL_DYNAMIC_CHUNK_SIZE", "524288"),
    ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
    ("NCCL_BUFFSIZE", "8388608"),
    ("NCCL_NET_GDR_LEVEL", "PIX"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE", "/var/lib/tcpxo/lib64/a3plus_guest_config.textproto"),
];
/// Megatron-Bridge's recipes (src/megatron/bridge/recipes/utils/environment_utils.py).
const BRIDGE: &[(&str, &str)] = &[
    ("NCCL_GRAPH_REGISTER", "0"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1"),
    ("TORCH_NCCL_HIGH_PRIORITY", "1"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ("TOKENIZERS_PARALLELISM", "False"),
];
const GPUS: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7");

#[derive(Clone, Copy, PartialEq)]
enum Machine {
    InfiniBand,
    Efa,
    Roce,
    NoGpus,
}

fn node(machine: Machine) -> NodeFacts {
    let (name, link, driver) = match machine {
        Machine::InfiniBand => ("mlx5_", LinkLayer::InfiniBand, "mlx5_core"),
        Machine::Efa => ("rdmap", LinkLayer::Other, "efa"),
        Machine::Roce => ("mlx5_", LinkLayer::Ethernet, "mlx5_core"),
        Machine::NoGpus => return NodeFacts { rdma: Some(Vec::new()), ..NodeFacts::default() },
    };
    let ports =
        (0..8).map(|number| RdmaPort { driver: Some(driver.into()), ..rdma_port(&format!("{name}{number}"), link) });
    let device = |name: &str| NetDevice { name: name.into(), up: true, mbps: None, kind: NetKind::Hardware };
    NodeFacts {
        gpu_models: vec!["NVIDIA H100 80GB HBM3".into(); 8],
        ephemeral_ports: Some((32768, 60999)),
        rdma: Some(ports.collect()),
        netdevs: Some(["lo", "eth0", "ib0", "docker0"].map(device).to_vec()),
        ..NodeFacts::default()
    }
}

/// A job; `image` is what its container sets, where it has one.
fn told(
    machine: Machine,
    tasks: &str,
    command: &str,
    user: &[(&str, &str)],
    image: &[(&str, &str)],
    spec: &str,
) -> Vec<String> {
    let nodes = if tasks.contains('x') || tasks == "alone" { "n1" } else { "n[1-2]" };
    let tasks = if tasks == "alone" { "1" } else { tasks.trim_end_matches('x') };
    let mut world = World::new(nodes, tasks, 0).export(user);
    world.node = node(machine);
    world.task = TaskFacts {
        cpus: Some(96),
        memlock: Some(u64::MAX),
        open_files: Some(1 << 20),
        stack: Some(8 << 20),
        shm: Some(1 << 40),
        ..TaskFacts::default()
    };
    if !image.is_empty() {
        world.task.container = Container::Inside;
        world.submitted = Some(world.environment.clone());
        world = world.export(image);
    }
    world.command = command.split('|').map(String::from).collect();
    match world.plan(spec) {
        Ok(plan) => plan.warnings.iter().map(crate::report::warning_line).collect(),
        Err(refusal) => vec![refusal.to_string()],
    }
}

#[test]
fn nothing_is_said_of_jobs_as_people_start_them() {
    use Machine::{Efa, InfiniBand, NoGpus, Roce};
    // Tasks on each of two nodes; with x on one node.
    type Job<'a> = (Machine, &'a str, &'a str, &'a [(&'a str, &'a str)], &'a [(&'a str, &'a str)], &'a str);
    let jobs: &[Job] = &[
        (InfiniBand, "8", "python|train.py", &[GPUS], NGC, ""),
        (InfiniBand, "1", "torchrun|train.py", &[GPUS], NGC, ""),
        (InfiniBand, "8", "python|train.py", &[GPUS, ("NCCL_IB_TIMEOUT", "22"), ("NCCL_DEBUG", "WARN")], &[], ""),
        (InfiniBand, "8", "python|train.py", &[GPUS, ("NCCL_SOCKET_IFNAME", "ib0"), ("NCCL_IB_HCA", "mlx5")], &[], ""),
        (InfiniBand, "8", "python|train.py", &[GPUS, ("NCCL_SOCKET_IFNAME", "^lo,docker0")], &[], ""),
        (InfiniBand, "8", "python|train.py", &[("UCX_NET_DEVICES", "mlx5_0:1"), ("UCX_TLS", "rc")], NGC, ""),
        (InfiniBand, "8", "python|train.py", &[("NCCL_COLLNET_ENABLE", "1"), ("SHARP_COLL_LOG_LEVEL", "3")], &[], ""),
        (Efa, "8", "python|train.py", &[GPUS], AWS, ""),
        (Efa, "1", "torchrun|--nproc_per_node|8|train.py", &[GPUS], AWS, ""),
        (Roce, "8", "python|train.py", &[("NCCL_IB_TC", "106"), ("NCCL_IB_QPS_PER_CONNECTION", "4")], NGC, ""),
        (Roce, "8", "python|train.py", &[GPUS], GOOGLE, ""),
        (Roce, "8", "python|train.py", GOOGLE, &[], "megatron"),
        (InfiniBand, "8", "python|pretrain_gpt.py|--tensor-model-parallel-size|4", BRIDGE, NGC, "megatron"),
        (InfiniBand, "8", "python|run_recipe.py|model.tensor_model_parallel_size=2", BRIDGE, NGC, ""),
        (InfiniBand, "8", "python|pretrain_gpt.py|--use-megatron-fsdp", &[GPUS], NGC, "megatron"),
        (InfiniBand, "8", "python|train_lightning.py", &[("SLURM_NTASKS_PER_NODE", "8")], NGC, ""),
        (InfiniBand, "8", "python|run_clm.py", &[("ACCELERATE_MIXED_PRECISION", "bf16")], NGC, ""),
        (InfiniBand, "8", "python|train.py|--deepspeed|ds.json", &[("DS_BUILD_OPS", "0")], NGC, "deepspeed"),
        (
            InfiniBand,
            "1",
            "python3|-m|MaxText.train|base.yml",
            &[("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")],
            &[],
            "jax",
        ),
        (InfiniBand, "8", "python|train.py", &[("https_proxy", "http://p:3128"), GPUS], &[], "jax"),
        (InfiniBand, "8", "python|train.py", &[("CUDA_VISIBLE_DEVICES", "3")], &[], "jax"),
        (InfiniBand, "8", "python|train_fsdp.py", &[("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")], NGC, "fsdp"),
        (InfiniBand, "1", "torchrun|-m|torchtitan.train", &[("TORCH_NCCL_TRACE_BUFFER_SIZE", "20000")], NGC, ""),
        (InfiniBand, "1", "torchrun|--nnodes=2|--rdzv_backend=c10d|--rdzv_endpoint=n1:29500|x.py", &[GPUS], &[], ""),
        (InfiniBand, "8", "bash|-c|source env.sh && python train.py", &[GPUS], NGC, ""),
        (InfiniBand, "8", "bash|train.sh", &[GPUS], &[], ""),
        (InfiniBand, "1", "bash|-lc|cd /code && torchrun train.py", &[GPUS], &[], ""),
        (InfiniBand, "1", "hostname", &[], &[], ""),
        (InfiniBand, "1", "nvidia-smi|-L", &[GPUS], &[], ""),
        (InfiniBand, "alone", "python3|-c|import torch", &[GPUS], NGC, ""),
        (InfiniBand, "8x", "python|train.py", &[GPUS, ("MASTER_ADDR", "localhost")], &[], ""),
        (InfiniBand, "alone", "torchrun|--standalone|--nproc_per_node=8|train.py", &[GPUS], &[], ""),
        (InfiniBand, "alone", "accelerate|launch|--num_processes|8|train.py", &[GPUS], NGC, ""),
        (InfiniBand, "alone", "python|train.py", &[("CUDA_VISIBLE_DEVICES", "0")], &[], ""),
        (InfiniBand, "alone", "python|-m|vllm.entrypoints.openai.api_server", &[GPUS], &[], ""),
        (InfiniBand, "8", "./build/all_reduce_perf|-b|8", &[("NCCL_TESTS_DEVICE", "0")], &[], ""),
        (NoGpus, "4", "python|preprocess.py", &[], &[], ""),
        (NoGpus, "4", "./solver", &[("OMPI_MCA_btl_tcp_if_include", "eth0"), ("SLURM_MPI_TYPE", "pmix")], &[], ""),
        (InfiniBand, "8", "python|train.py", &[], NGC, "debug"),
        (InfiniBand, "8", "python|train.py", &[], NGC, "deterministic"),
    ];
    for (machine, tasks, command, user, image, spec) in jobs {
        assert_eq!(
            told(*machine, tasks, command, user, image, spec),
            Vec::<String>::new(),
            "{command} {user:?} {spec}"
        );
    }
}

/// A task of a whole plan on DGX H100: what Slurm gives it, and what it finds.
struct Task {
    tasks: &'static str,
    rank: u32,
    command: &'static str,
    /// Masks of the node's tasks.
    masks: &'static [&'static str],
    /// The GPUs that it may open, and its list, by their numbers.
    open: std::ops::Range<usize>,
    list: &'static str,
    cpus_per_task: Option<&'static str>,
}

/// Slurm's default masks for eight tasks.
const EIGHTHS: &[&str] = &[
    "0-13,112-125",
    "56-69,168-181",
    "14-27,126-139",
    "70-83,182-195",
    "28-41,140-153",
    "84-97,196-209",
    "42-55,154-167",
    "98-111,210-223",
];

fn planned(task: &Task) -> Plan {
    let machine = dgx_h100();
    let mut world = World::new("n[1-2]", task.tasks, task.rank);
    let mut node = node(Machine::InfiniBand);
    let of_machine = machine.node_facts();
    (node.topology, node.rdma) = (of_machine.topology, of_machine.rdma);
    for gpu in &mut node.topology.gpus {
        let own = node.topology.nodes.iter().find(|node| Some(node.id) == gpu.place.numa).unwrap();
        gpu.place.cpus = own.cpus.clone();
    }
    let set = |text: &&str| CpuSet::parse(text).unwrap();
    let local = world.step.local_rank as usize;
    let given = task.open.len().to_string();
    world.task = TaskFacts {
        cpus: Some(set(&task.masks[local]).len()),
        mask: Some(set(&task.masks[local])),
        memory: MemoryFacts { allowed: CpuSet::parse("0-1").ok(), has_policy: Some(false) },
        memlock: Some(u64::MAX),
        open_files: Some(1 << 20),
        stack: Some(8 << 20),
        shm: Some(1 << 40),
        ..TaskFacts::default()
    };
    let gpus = &node.topology.gpus;
    let hidden = (0..gpus.len()).filter(|gpu| !task.open.contains(gpu)).map(|gpu| gpus[gpu].place.address);
    world.task.gpus_hidden = hidden.collect();
    let peer = |(rank, mask): (usize, &&str)| Peer { mask: set(mask), gpus: vec![(task.open.start + rank) as u8] };
    world.task.peers = match task.masks.len() {
        1 => Peers::NotAsked,
        _ => Peers::Met(task.masks.iter().enumerate().map(peer).collect()),
    };
    world.node = node;
    let mut world = world.export(&[
        ("CUDA_VISIBLE_DEVICES", task.list),
        ("SLURM_GPUS_ON_NODE", &given),
        ("SLURM_STEP_GPUS", task.list),
        ("SLURM_CPU_BIND", "quiet,mask_cpu:0x1"),
    ]);
    if let Some(cpus) = task.cpus_per_task {
        world.environment.set("SLURM_CPUS_PER_TASK", cpus);
    }
    world.command = task.command.split('|').map(String::from).collect();
    world.plan("").unwrap()
}

/// With binding: what is told, and the rows that `show` prints.
#[test]
fn nothing_is_said_of_bound_jobs_as_people_start_them() {
    const ALL: &str = "0,1,2,3,4,5,6,7";
    const EIGHT: Task = Task {
        tasks: "8(x2)",
        rank: 0,
        command: "python|train.py",
        masks: EIGHTHS,
        open: 0..8,
        list: ALL,
        cpus_per_task: Some("28"),
    };
    let jobs: &[(&str, Task)] = &[
        ("eight ranks", EIGHT),
        ("the second of eight, whose mask is exchanged", Task { rank: 1, ..EIGHT }),
        ("eight ranks on a cluster that binds none", Task { rank: 9, masks: &["0-223"; 8], ..EIGHT }),
        ("no -c", Task { cpus_per_task: None, masks: &["0-223"; 8], ..EIGHT }),
        (
            "torchrun",
            Task {
                tasks: "1(x2)",
                command: "torchrun|--nproc-per-node=8|train.py",
                masks: &["0-223"],
                cpus_per_task: Some("224"),
                ..EIGHT
            },
        ),
        (
            "one GPU of a shared node",
            Task { tasks: "1(x2)", masks: &["56-69"], open: 5..6, list: "0", cpus_per_task: Some("14"), ..EIGHT },
        ),
        (
            "two GPUs of a shared node",
            Task {
                tasks: "2(x2)",
                rank: 1,
                masks: &["56-69", "70-83"],
                open: 6..8,
                list: "0,1",
                cpus_per_task: Some("14"),
                ..EIGHT
            },
        ),
        (
            "a part of a GPU",
            Task {
                tasks: "1(x2)",
                masks: &["0-13"],
                open: 2..3,
                list: "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
                cpus_per_task: Some("14"),
                ..EIGHT
            },
        ),
        (
            "parts of GPUs, one for each rank",
            Task {
                tasks: "2(x2)",
                masks: &["0-13", "14-27"],
                open: 2..4,
                list: "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
                cpus_per_task: Some("14"),
                ..EIGHT
            },
        ),
        ("four of eight GPUs", Task { tasks: "4(x2)", masks: &EIGHTHS_OF_FOUR, open: 0..4, list: "0,1,2,3", ..EIGHT }),
    ];
    for (what, task) in jobs {
        let plan = planned(task);
        let told: Vec<String> = plan.warnings.iter().map(crate::report::warning_line).collect();
        assert_eq!(told, Vec::<String>::new(), "{what}");
        for row in &plan.binding.decisions {
            assert!(row.why.len() < 160, "{what}: {row:?}");
        }
    }
}

/// Of an exclusive node, as Slurm deals its sockets out.
const EIGHTHS_OF_FOUR: [&str; 4] = ["0-27,112-139", "56-83,168-195", "28-55,140-167", "84-111,196-223"];
