//! Checks of the command and the layout of its step.

use super::{Findings, From, Phase, Rule, Subject, Value};
use crate::config::{Preflight, Profile, printable};
use crate::plan::binding::visible;
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
        "several ranks on a node from which the GPUs of the others are hidden",
        hidden_from_each_other,
    ),
    Rule::new("gpus-fewer", Phase::Node, Severity::Warning, "more ranks on a node than GPUs they see", fewer_gpus),
    Rule::new(
        "gpus-none",
        Phase::Node,
        Severity::Error,
        "a task that can use no GPU where it was given some; a warning where it asked for none",
        no_gpu,
    ),
    Rule::new(
        "gpus-foreign",
        Phase::Node,
        Severity::Warning,
        "a task that sees more of the node's GPUs than its step has",
        gpus_of_others,
    ),
    Rule::new(
        "kill-on-bad-exit",
        Phase::Launch,
        Severity::Info,
        "a step of several ranks that goes on when one of them or a node fails; in srun only",
        goes_on_after_a_failure,
    ),
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
        "warm-skipped",
        Phase::Launch,
        Severity::Error,
        "a warm-up where nothing waits for it: with preflight=off, or before a shell, which is a warning",
        warm_skipped,
    ),
    Rule::new(
        "maxconn-tp",
        Phase::Node,
        Severity::Error,
        "Megatron's tensor or context parallelism with several connections",
        tensor_parallel_connections,
    ),
];

/// A rank that waits for one that has ended waits until its library gives up, if it does.
fn goes_on_after_a_failure(subject: &Subject, findings: &mut Findings) {
    let several = subject.tasks.filter(|tasks| *tasks > 1);
    let trains = subject.shape.is_some_and(|shape| shape != Shape::Shell);
    let (Some(policy), Some(tasks), true) = (subject.policy, several, trains) else {
        return;
    };
    let what = if subject.shape == Some(Shape::Agent) { "launchers" } else { "ranks" };
    // Of the variables kill-on-bad tells.
    if policy.no_kill && subject.several_nodes() && subject.value("SLURM_NO_KILL").is_none() {
        findings.inform(
            format!(
                "--no-kill: if a node or a rank fails, the other {what} go on, also with -K, and may wait for it until the \
                 time limit"
            ),
            "leave --no-kill out, or give kill-on-bad-exit=off to --palingenesis where that is meant",
        );
    } else if policy.kill == Some(false) && policy.wait == Some(0) && subject.value("SLURM_KILL_BAD_EXIT").is_none() {
        findings.inform(
            format!("if one of the {tasks} {what} fails, the others go on, and may wait for it until the time limit"),
            "add -K (--kill-on-bad-exit) to srun, or kill-on-bad-exit=off to --palingenesis where that is meant",
        );
    }
}

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

/// The GPUs that CUDA will show the task, where the node's are known.
fn visible(subject: &Subject) -> Option<u32> {
    let gpus = &subject.node?.topology.gpus;
    let hidden = subject.task.map_or(&[][..], |task| &task.gpus_hidden);
    let shown = visible::shown(gpus, hidden, subject.value(visible::LIST), subject.value("CUDA_DEVICE_ORDER"));
    u32::try_from(shown.ok()?.len()).ok()
}

/// The GPUs a task may use: those Slurm gave it, else all of the node.
pub(super) fn gpus_of_the_task(subject: &Subject) -> u32 {
    visible(subject).unwrap_or_else(|| match subject.value(visible::LIST) {
        Some(list) => agent::listed(list),
        None => subject.node.map_or(0, |node| u32::try_from(node.gpu_models.len()).unwrap_or(u32::MAX)),
    })
}

/// The GPUs that Slurm gave the step on this node; unset in a step without
/// (measured with 22.05).
fn gpus_of_the_step(subject: &Subject) -> Option<u32> {
    subject.value("SLURM_GPUS_ON_NODE")?.parse().ok().filter(|gpus| *gpus > 0)
}

/// Several ranks of this node, and the GPUs that each sees.
struct Sight<'a> {
    node: &'a str,
    ranks: u32,
    visible: u32,
    /// "CUDA_VISIBLE_DEVICES=3", or that some may not be opened.
    shown: String,
}

impl Sight<'_> {
    /// Where there are several ranks and not just all of the node's GPUs.
    fn of<'a>(subject: &Subject<'a>) -> Option<Sight<'a>> {
        let step = subject.step.filter(|step| tasks_are_ranks(subject) && step.local_world_size > 1)?;
        let shown = match (subject.value(visible::LIST), visible(subject)) {
            // isolate=env, which was asked for. No other value of it is ours or the site file's.
            (Some(_), _) if is_isolated(subject) => return None,
            (Some(list), _) => format!("{}={}", visible::LIST, printable(list)),
            (None, Some(_)) => format!("{} is not set", visible::LIST),
            (None, None) => return None,
        };
        Some(Sight { node: &step.node, ranks: step.local_world_size, visible: gpus_of_the_task(subject), shown })
    }

    /// Whether the ranks see other GPUs each. Their lists are not compared: a task
    /// that sees fewer than its step has on this node, or one only, is one of those.
    fn is_its_own(&self, subject: &Subject) -> bool {
        match gpus_of_the_step(subject) {
            Some(given) => self.visible < given,
            None => self.visible == 1 && gpus_of_the_node(subject) != Some(1),
        }
    }
}

fn is_isolated(subject: &Subject) -> bool {
    let of_somebody = |value: &Value| !matches!(value.from, From::Ours | From::Site(_) | From::Key(_));
    subject.values.iter().any(|value| value.name == visible::LIST && !of_somebody(value))
}

fn gpus_of_the_node(subject: &Subject) -> Option<usize> {
    let node = subject.node?;
    Some(node.topology.gpus.len().max(node.gpu_models.len())).filter(|gpus| *gpus > 0)
}

/// <https://github.com/NVIDIA/nccl/issues/1066>
fn hidden_from_each_other(subject: &Subject, findings: &mut Findings) {
    // JAX is told which one to take; of parts of GPUs CUDA shows one at a time whatever
    // is given.
    let part = subject.value(visible::LIST).is_some_and(|list| list.trim_start().starts_with("MIG-"));
    let told = part || subject.value("JAX_LOCAL_DEVICE_IDS").is_some();
    let Some(sight) = Sight::of(subject).filter(|sight| sight.visible > 0 && sight.is_its_own(subject) && !told) else {
        return;
    };
    let Sight { node, ranks, visible, shown } = sight;
    let gpus = match (visible, gpus_of_the_step(subject)) {
        (1, None) => "one GPU".to_string(),
        (1, Some(given)) => format!("one GPU of the step's {given}"),
        (_, given) => format!("{visible} GPUs of the step's {}", given.unwrap_or(visible)),
    };
    let fails = if visible < ranks {
        "a program that takes GPU LOCAL_RANK ends with 'invalid device ordinal', and NCCL"
    } else {
        "NCCL"
    };
    findings.warn(
        format!("each of the {ranks} ranks on {node} sees {gpus} ({shown}): {fails} may not find the way from GPU to GPU"),
        "give sbatch or srun --gpus-per-node=N --gpu-bind=none instead of --gpus-per-task, or where srun knows it \
         --tres-bind=gres/gpu:none, so that each rank sees all GPUs; PALINGENESIS_GPU_INDEX tells a rank its GPU's number",
    );
}

/// <https://github.com/NVIDIA/nccl/issues/1066>: several processes on one GPU may
/// be meant (MPS), and NCCL takes no GPU twice.
fn fewer_gpus(subject: &Subject, findings: &mut Findings) {
    let found = Sight::of(subject).filter(|sight| sight.visible < sight.ranks && !sight.is_its_own(subject));
    let Some(Sight { node, ranks, visible: gpus @ 1.., shown }) = found else {
        return;
    };
    let (are, those) = if gpus == 1 { ("GPU", "1") } else { ("GPUs", &*gpus.to_string()) };
    findings.warn(
        format!(
            "{ranks} ranks on {node} see {gpus} {are} ({shown}): NCCL ends with 'Duplicate GPU detected' where two of its \
             ranks take the same one, and a program that takes GPU LOCAL_RANK has none from LOCAL_RANK {those} on"
        ),
        format!("start with srun --ntasks-per-node={gpus}, or ask for {ranks} GPUs on each node"),
    );
}

/// A step may be meant to have no GPU: one that asked Slurm for none, or whose
/// list is empty, is at most warned of.
fn no_gpu(subject: &Subject, findings: &mut Findings) {
    let (Some(0), Some(node), Some(step)) = (visible(subject), subject.node, subject.step) else {
        return;
    };
    if subject.shape == Some(Shape::Shell) {
        return;
    }
    let (gpus, here) = (node.topology.gpus.len(), &step.node);
    let hidden = subject.task.map_or(0, |task| task.gpus_hidden.len());
    let why_hidden = if hidden == 0 {
        String::new()
    } else {
        format!("; {hidden} of its {gpus} GPUs may not be opened, by its cgroup or the device files' modes")
    };
    match (subject.value(visible::LIST), gpus_of_the_step(subject)) {
        // Nobody's mistake: "", -1 and Slurm's NoDevFiles.
        (Some(list), None) if matches!(list.trim(), "" | "-1" | "NoDevFiles") => {}
        (Some(list), given) => {
            let given = given.map(|given| format!(", where its step has {given}")).unwrap_or_default();
            findings.error(
                format!(
                    "{}={} shows the task no GPU of {here}, which has {gpus}{given}{why_hidden}",
                    visible::LIST,
                    printable(list)
                ),
                "unset it, or name GPUs that the task has: numbers below their count, each once, or UUIDs of nvidia-smi -L",
            );
        }
        (None, Some(given)) => findings.error(
            format!("the task can use no GPU of {here}, where its step has {given}{why_hidden}"),
            format!("tell the cluster's admins what srun ls -l /dev/nvidia* prints on {here}"),
        ),
        // Ranks meet to train; a lone task may prepare data.
        (None, None) if step.world_size > 1 || subject.shape != Some(Shape::Native) => findings.warn(
            format!("the task can use no GPU of {here}{why_hidden}: Slurm gave the step none"),
            "ask for them with --gpus-per-node=N; if it needs none, gpus-none=off says so",
        ),
        (None, None) => {}
    }
}

/// Slurm 22.05 removes the list with `--gpu-bind=none`; without device cgroups the
/// task then sees the whole node, and counts from GPU 0 (measured; 24.11 and 26.05
/// keep the list).
fn gpus_of_others(subject: &Subject, findings: &mut Findings) {
    let (Some(visible), Some(given), Some(step)) = (visible(subject), gpus_of_the_step(subject), subject.step) else {
        return;
    };
    if visible <= given {
        return;
    }
    let shown = match subject.value(visible::LIST) {
        Some(list) => format!("{}={}", visible::LIST, printable(list)),
        None => format!("{} is not set", visible::LIST),
    };
    findings.warn(
        format!(
            "the task sees {visible} GPUs of {}, and its step has {given} of them ({shown}): a program that counts them from 0 \
             may take another job's",
            step.node
        ),
        "give srun --gpus-per-node=N without --gpu-bind=none, with which this Slurm names no GPUs; device cgroups (ConstrainDevices in cgroup.conf) \
         would hide the others'",
    );
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

/// Ranks wait for a warm-up while they meet. One that the site wants is no reason not
/// to start.
fn warm_skipped(subject: &Subject, findings: &mut Findings) {
    let settings = subject.settings;
    let (Some(_), Some(shape)) = (&settings.warm, subject.shape) else { return };
    let of_site = settings.is_of_site("warm");
    if shape == Shape::Shell {
        if !of_site {
            findings.warn(
                "the warm-up is not run: the command is a shell, which has no ranks that would wait for it",
                "run its command in the shell, or leave it out",
            );
        }
    } else if settings.preflight == Preflight::Off {
        let message = "the warm-up would not be run: with preflight=off the ranks start without waiting for each other, \
                       or for it";
        let cure = "leave out preflight=off (preflight=warn stops no step for what it finds), or the warm-up";
        if of_site { findings.warn(message, cure) } else { findings.error(message, cure) }
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
