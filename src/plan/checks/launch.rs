//! Checks of the command and the layout of its step.

use super::{Findings, Phase, Rule, Subject};
use crate::config::{Profile, printable};
use crate::plan::environment::{has_any, is_blackwell};
use crate::plan::{Severity, Shape, agent, launcher};

/// Checks of this file.
pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "dist-not-block",
        Phase::Launch,
        Severity::Warning,
        "ranks of a node that are not consecutive",
        dist_not_block,
    ),
    Rule::new("uneven", Phase::Launch, Severity::Warning, "nodes with different numbers of ranks", uneven),
    Rule::new(
        "one-task-many-gpus",
        Phase::Node,
        Severity::Warning,
        "a plain program alone on a node with several GPUs",
        one_task_many_gpus,
    ),
    Rule::new(
        "gpus-per-task",
        Phase::Node,
        Severity::Warning,
        "several ranks on a node of which each sees one GPU only",
        one_gpu_for_each_task,
    ),
    Rule::new("gpus-fewer", Phase::Node, Severity::Warning, "more ranks on a node than GPUs they see", fewer_gpus),
    Rule::new(
        "deepspeed-five",
        Phase::Launch,
        Severity::Warning,
        "DeepSpeed without rank variables",
        deepspeed_without_ranks,
    ),
    Rule::new(
        "lightning-ntpn",
        Phase::Launch,
        Severity::Warning,
        "Lightning without SLURM_NTASKS_PER_NODE",
        lightning_without_tasks_per_node,
    ),
    Rule::new(
        "maxconn-tp",
        Phase::Node,
        Severity::Error,
        "Megatron's tensor or context parallelism with several connections",
        tensor_parallel_connections,
    ),
];

fn tasks_are_ranks(subject: &Subject) -> bool {
    subject.shape.is_some_and(Shape::tasks_are_ranks)
}

/// Megatron's groups, NCCL's rails and PyTorch's meshes take ranks that follow
/// each other for those of one node.
fn dist_not_block(subject: &Subject, findings: &mut Findings) {
    let Some(step) = subject.step.filter(|step| tasks_are_ranks(subject) && step.nodes() > 1) else {
        return;
    };
    // Slurm's own list of the ranks on this node; SLURM_DISTRIBUTION says cyclic
    // where it was not asked, and not what became of it (measured with 22.05.8).
    let Some(list) = subject.value("SLURM_GTIDS") else {
        return;
    };
    let mut ranks: Vec<u32> = list.split(',').filter_map(|rank| rank.trim().parse().ok()).collect();
    ranks.sort_unstable();
    if ranks.windows(2).any(|pair| pair[1] - pair[0] != 1) {
        findings.warn(
            format!(
                "ranks {} are on {}: not consecutive, so that groups of neighbouring ranks, such as tensor parallel ones, \
                 span nodes and are slow",
                printable(list),
                step.node
            ),
            "start with srun --distribution=block",
        );
    }
}

fn uneven(subject: &Subject, findings: &mut Findings) {
    let Some(step) = subject.step.filter(|step| tasks_are_ranks(subject) && step.nodes() > 1) else {
        return;
    };
    let counts = || step.tasks_per_node.iter();
    if let (Some(fewest), Some(most)) = (counts().min(), counts().max())
        && fewest != most
    {
        findings.warn(
            format!(
                "the step's nodes have {fewest} to {most} ranks each: Megatron, DeepSpeed and PyTorch's meshes count with as \
                 many on every node"
            ),
            "start with srun --ntasks-per-node=N: -n alone fills the first node up",
        );
    }
}

/// The GPUs a task may use: those Slurm gave it, else all of the node.
pub(super) fn gpus_of_the_task(subject: &Subject) -> u32 {
    match subject.value("CUDA_VISIBLE_DEVICES") {
        Some(list) => agent::listed(list),
        None => subject.node.map_or(0, |node| u32::try_from(node.gpu_models.len()).unwrap_or(u32::MAX)),
    }
}

/// The ranks of this node and the GPUs that each of them sees, where there are
/// several ranks and Slurm or somebody named their GPUs.
fn ranks_and_gpus(subject: &Subject) -> Option<(u32, u32, String)> {
    let step = subject.step.filter(|step| tasks_are_ranks(subject) && step.local_world_size > 1)?;
    let list = subject.value("CUDA_VISIBLE_DEVICES")?;
    Some((step.local_world_size, agent::listed(list), format!("CUDA_VISIBLE_DEVICES={}", printable(list))))
}

/// <https://github.com/NVIDIA/nccl/issues/1066>
fn one_gpu_for_each_task(subject: &Subject, findings: &mut Findings) {
    // JAX is told which one to take.
    let told = subject.value("JAX_LOCAL_DEVICE_IDS").is_some();
    if let Some((ranks, 1, shown)) = ranks_and_gpus(subject).filter(|_| !told) {
        let node = subject.step.map_or("the node", |step| step.node.as_str());
        findings.warn(
            format!(
                "each of the {ranks} ranks on {node} sees one GPU ({shown}): a program that takes GPU LOCAL_RANK ends with \
                 'invalid device ordinal', and NCCL may not find the way from GPU to GPU"
            ),
            "give srun --gpus-per-node=N --gpu-bind=none instead of --gpus-per-task, so that each rank sees all GPUs",
        );
    }
}

fn fewer_gpus(subject: &Subject, findings: &mut Findings) {
    if let Some((ranks, gpus @ 2.., shown)) = ranks_and_gpus(subject).filter(|(ranks, gpus, _)| gpus < ranks) {
        let node = subject.step.map_or("the node", |step| step.node.as_str());
        findings.warn(
            format!(
                "{ranks} ranks on {node} see {gpus} GPUs ({shown}): those with LOCAL_RANK {gpus} and above have none"
            ),
            format!("start with srun --ntasks-per-node={gpus}, or ask for {ranks} GPUs on each node"),
        );
    }
}

fn program(command: &[String]) -> &str {
    let first = command.first().map(String::as_str).unwrap_or_default();
    first.rsplit('/').next().unwrap_or(first)
}

/// Python itself; what a shell script starts is not known.
pub(super) fn is_python(command: &[String]) -> bool {
    launcher::is_python(program(command))
}

fn one_task_many_gpus(subject: &Subject, findings: &mut Findings) {
    if subject.shape != Some(Shape::Native) || subject.tasks_on_a_node != Some(1) || !is_python(subject.command) {
        return;
    }
    // `python -c` tries something out; one process for all GPUs of a node is JAX's
    // way, and servers and Ray start their own.
    if subject.command.get(1).is_some_and(|word| word == "-c") {
        return;
    }
    let one_for_all = ["jax", "maxtext", "vllm", "sglang", "ray", "verl"];
    let meant = subject.settings.profile == Profile::Jax || names(subject.command, &one_for_all);
    let gpus = gpus_of_the_task(subject);
    if gpus > 1 && !meant {
        let node = subject.step.map_or("the node", |step| step.node.as_str());
        findings.warn(
            format!(
                "one rank on {node} sees {gpus} GPUs: a program that takes one GPU a rank leaves {} idle",
                gpus - 1
            ),
            format!("start with srun --ntasks-per-node={gpus}, or start the ranks with torchrun in the one task"),
        );
    }
}

/// Whether a word of the command has one of these names as a part.
fn names(command: &[String], wanted: &[&str]) -> bool {
    command.iter().any(|word| {
        let word = word.to_ascii_lowercase();
        word.split(|c: char| !c.is_ascii_alphanumeric()).any(|part| wanted.contains(&part))
    })
}

/// With one of its five variables missing DeepSpeed asks MPI instead, and
/// overwrites them all (deepspeed/comm/comm.py).
fn deepspeed_without_ranks(subject: &Subject, findings: &mut Findings) {
    if subject.shape != Some(Shape::Agent) || !is_python(subject.command) {
        return;
    }
    if !names(subject.command, &["deepspeed"]) || launcher::find(subject.command).is_some() {
        return;
    }
    let five = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
    let missing: Vec<&str> = five.into_iter().filter(|name| subject.value(name).is_none()).collect();
    if !missing.is_empty() {
        findings.warn(
            format!(
                "the command names DeepSpeed and starts no ranks, and launch=agent gives it no {}: DeepSpeed then asks MPI",
                missing.join(", ")
            ),
            "leave out launch=agent, with one task for each GPU, or start it with torchrun",
        );
    }
}

/// Lightning's SLURM plugin refuses several tasks without it
/// (lightning/fabric/plugins/environments/slurm.py); it keeps out of jobs named
/// bash or interactive.
fn lightning_without_tasks_per_node(subject: &Subject, findings: &mut Findings) {
    // srun sets the variable later than it asks us.
    if subject.step.is_none() || !tasks_are_ranks(subject) || !names(subject.command, &["lightning"]) {
        return;
    }
    let outside = matches!(subject.value("SLURM_JOB_NAME"), Some("bash" | "interactive"));
    if subject.tasks.is_some_and(|tasks| tasks > 1) && !outside && subject.value("SLURM_NTASKS_PER_NODE").is_none() {
        findings.warn(
            "the command names Lightning, which refuses several tasks without SLURM_NTASKS_PER_NODE, and that is not set",
            "give the job or srun --ntasks-per-node=N instead of --ntasks",
        );
    }
}

/// Megatron-LM (megatron/training/arguments.py) insists on one connection before
/// Blackwell, but for its FSDP and where experts overlap.
fn tensor_parallel_connections(subject: &Subject, findings: &mut Findings) {
    let Some(value) = subject.given("CUDA_DEVICE_MAX_CONNECTIONS").filter(|value| value.value != "1") else {
        return;
    };
    let flags = ["tensor_model_parallel_size", "context_parallel_size"];
    let Some(flag) = flags.into_iter().find(|flag| above_one(subject.command, flag)) else {
        return;
    };
    let others = ["use_torch_fsdp2", "use_megatron_fsdp", "overlap_moe_expert_parallel_comm"];
    let models = subject.node.map_or(&[][..], |node| &node.gpu_models);
    if has_any(subject.command, &others) || models.iter().any(|model| is_blackwell(model)) {
        return;
    }
    let message = format!(
        "{} with --{} above 1: before Blackwell Megatron-LM ends with an error, since it relies on kernels in the order of launch",
        value.shown(),
        flag.replace('_', "-")
    );
    let cure = "unset it or set it to 1";
    if models.is_empty() { findings.warn(message, cure) } else { findings.error(message, cure) }
}

/// Whether `--flag N` or `--flag=N` stands in the command with N above 1.
fn above_one(command: &[String], flag: &str) -> bool {
    let flag = flag.replace('_', "-");
    command.iter().enumerate().any(|(place, word)| {
        let Some(rest) = word.strip_prefix("--").and_then(|word| word.strip_prefix(flag.as_str())) else {
            return false;
        };
        let number =
            rest.strip_prefix('=').or_else(|| command.get(place + 1).map(String::as_str).filter(|_| rest.is_empty()));
        number.and_then(|number| number.parse::<u32>().ok()).is_some_and(|number| number > 1)
    })
}
