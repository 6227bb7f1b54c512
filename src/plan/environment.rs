//! The profile's variables: few, safe, each only if unset, each with its reason.
//!
//! NCCL's own documentation warns against keeping most of its variables in
//! scripts (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>),
//! so a variable needs a reason to be here.

use crate::config::Profile;

use super::checks::version::{self, Version};
use super::precedence::{Layer, Offers};
use super::{Facts, Origin, StepPlan};

/// What is wanted: a built-in profile and what is added to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub profile: Profile,
    pub debug: bool,
    pub deterministic: bool,
    /// Which of the two words was given for this step, not by the site file.
    pub debug_asked: bool,
    pub deterministic_asked: bool,
}

pub(super) fn offer(offers: &mut Offers, facts: &Facts, step: &StepPlan, wanted: Wanted) {
    let several = facts.step.nodes() > 1;
    let trains_with_torch = !matches!(wanted.profile, Profile::Jax | Profile::Worker);
    offers.profile("NCCL_DEBUG", "WARN", "NCCL names the cause of a fatal error; INFO would flood the log");
    if several {
        offers.profile(
            "NCCL_IB_TIMEOUT",
            "22",
            "4.096 us * 2^22, seven times: two minutes until a dead link is an error (the often copied 120 is out of range)",
        );
    } else {
        offers.nothing("NCCL_IB_TIMEOUT", "one node: no network between the ranks");
    }
    let async_errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    match (trains_with_torch, several) {
        (true, true) => offers.profile(
            async_errors,
            "1",
            "a failed or timed out collective ends the process instead of leaving it waiting",
        ),
        (true, false) => offers.nothing(async_errors, "one node: PyTorch's own default ends the process too"),
        (false, _) => {}
    }
    offers.profile("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "CUDA counts the GPUs as nvidia-smi and Slurm do");
    if wanted.profile != Profile::Worker {
        offers.profile("PYTHONUNBUFFERED", "1", "the last lines before a crash reach the log");
        offers.profile("PYTHONFAULTHANDLER", "1", "a crash in native code prints where Python was");
    }
    connections(offers, facts, wanted.profile);
    grace(offers, facts);
    match wanted.profile {
        Profile::Fsdp => expandable_segments(offers, facts, "FSDP's buffers of changing size fragment the memory less"),
        Profile::Megatron => megatron(offers, facts),
        Profile::Jax => jax(offers, facts, step),
        _ => {}
    }
    if wanted.debug {
        debug(offers, word(wanted.debug_asked));
    }
    if wanted.deterministic {
        deterministic(offers, wanted.profile, word(wanted.deterministic_asked));
    }
}

/// CUDA_DEVICE_MAX_CONNECTIONS: one connection makes the GPU take kernels in
/// the order of launch, which Megatron's overlap of tensor-parallel
/// communication relies on before Blackwell (Megatron-LM, arguments.py); it
/// serialises the several streams of FSDP and DeepSpeed.
fn connections(offers: &mut Offers, facts: &Facts, profile: Profile) {
    let name = "CUDA_DEVICE_MAX_CONNECTIONS";
    let streams = match (profile, framework_in(facts.command)) {
        (Profile::Megatron, _) | (Profile::Default, None) => None,
        // The framework only: a word of the command may hold a secret.
        (Profile::Default, Some(framework)) => {
            Some(format!("the command names {framework}, whose streams one connection would serialise"))
        }
        (profile, _) => Some(format!("profile {}: one connection would serialise its streams", profile.name())),
    };
    if let Some(why) = streams {
        offers.nothing(name, why);
        return;
    }
    if has_any(facts.command, &MEGATRON_FSDP) {
        offers.nothing(name, "the command uses Megatron's FSDP, which does not start with one connection");
        return;
    }
    if let Some(model) = facts.node.gpu_models.iter().find(|model| is_blackwell(model)) {
        let why = format!("{model}: since Blackwell the order of kernels needs no single connection");
        offers.profile(name, "32", why);
    } else if profile == Profile::Megatron && has_any(facts.command, &EXPERT_OVERLAP) {
        offers.profile(name, "32", "the command overlaps the experts' all-to-all, which needs several connections");
    } else {
        offers.profile(name, "1", "kernels start in the order of launch, so that communication overlaps computation");
    }
}

/// GB200 and GB300: GPU and CPU are linked, and the NVLink domain spans nodes.
/// NCCL uses both by itself since 2.27; which one is in the image its
/// NCCL_VERSION tells, where there is one.
fn grace(offers: &mut Offers, facts: &Facts) {
    let is_grace = |model: &&String| model.split_whitespace().any(|word| matches!(word, "GB200" | "GB300"));
    let Some(model) = facts.node.gpu_models.iter().find(is_grace) else {
        return;
    };
    let why = format!("{model}: NCCL finds the NVLink domain of several nodes by itself");
    offers.nothing("NCCL_MNNVL_ENABLE", why);
    let Some(version) = facts.environment.get(version::NCCL).and_then(Version::parse) else {
        return;
    };
    if version.before("2.26") {
        let why = format!("{model} with NCCL before 2.26: GPU memory is reached through the CPU's link");
        offers.profile("NCCL_NET_GDR_LEVEL", "PHB", why);
    } else if version.before("2.27") {
        let why = format!("{model} with NCCL 2.26, where this way to the GPU's memory is not the default yet");
        offers.profile("NCCL_NET_GDR_C2C", "1", why);
    }
}

/// Megatron-LM's and Megatron-Bridge's flags, without dashes and with `_` for `-`.
const EXPERT_OVERLAP: [&str; 4] = ["overlap_moe_expert_parallel_comm", "moe_enable_deepep", "deepep", "hybridep"];
pub(super) const USER_BUFFERS: [&str; 2] = ["nccl_ub", "use_nccl_ub"];
pub(super) const CUDA_GRAPHS: [&str; 4] = ["enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph"];
/// Flags whose start asserts against one connection (Megatron-LM, arguments.py).
pub(super) const MEGATRON_FSDP: [&str; 3] = ["use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"];
const DATA_OVERLAP: [&str; 2] = ["overlap_grad_reduce", "overlap_param_gather"];

/// Whether a word of the command is one of these flags, as `--a-b`, `a_b=…` or
/// the last part of `x.y.a_b=…`, and not switched off by its value.
pub(super) fn has_any(command: &[String], flags: &[&str]) -> bool {
    let off = |value: &str| ["false", "none", "off", "no", "0"].iter().any(|word| word.eq_ignore_ascii_case(value));
    command.iter().enumerate().any(|(place, word)| {
        let bare = word.trim_start_matches(['-', '+']);
        let (name, value) = match bare.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (bare, command.get(place + 1).map(String::as_str)),
        };
        let name = name.rsplit('.').next().unwrap_or(name).replace('-', "_").to_ascii_lowercase();
        flags.contains(&name.as_str()) && !value.is_some_and(off)
    })
}

/// Merged into the user's list. Both names are read by PyTorch since 2.9, the
/// older one alone before; two different values would fight.
fn expandable_segments(offers: &mut Offers, facts: &Facts, why: &str) {
    let (old, new) = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF");
    let names: &[&str] = match (facts.environment.get(old), facts.environment.get(new)) {
        (Some(_), Some(_)) => &[old, new],
        (None, Some(_)) => &[new],
        (_, None) => &[old],
    };
    for name in names {
        offers.profile(name, "expandable_segments:True", why);
    }
}

/// As Megatron-Bridge's recipes have it, but for NCCL_NVLS_ENABLE=0, which pays
/// memory with a quarter of the bandwidth in the node and is left to them.
fn megatron(offers: &mut Offers, facts: &Facts) {
    offers.profile("TORCH_NCCL_HIGH_PRIORITY", "1", "communication kernels are not kept waiting by computation");
    offers.profile(
        "TOKENIZERS_PARALLELISM",
        "false",
        "the data loader's workers are forked after the tokenizer's threads",
    );
    if has_any(facts.command, &USER_BUFFERS) {
        let why = "the command registers NCCL user buffers, which expandable segments break";
        offers.nothing("PYTORCH_CUDA_ALLOC_CONF", why);
        offers.profile("NCCL_NVLS_ENABLE", "1", "NCCL user buffers are for NVLink SHARP");
        offers.profile("NCCL_CTA_POLICY", "1", "with registered buffers NCCL needs few SMs");
    } else {
        expandable_segments(offers, facts, "less memory is lost to fragments");
        if has_any(facts.command, &CUDA_GRAPHS) {
            let why = "CUDA graphs with expandable segments: NCCL must not register their buffers";
            offers.profile("NCCL_GRAPH_REGISTER", "0", why);
        }
    }
    if has_any(facts.command, &DATA_OVERLAP) {
        let blackwell = facts.node.gpu_models.iter().any(|model| is_blackwell(model));
        let margin = if blackwell { "20" } else { "16" };
        let why = "the command overlaps gradients' communication: norms leave these SMs to it";
        offers.profile("NVTE_FWD_LAYERNORM_SM_MARGIN", margin, why);
        offers.profile("NVTE_BWD_LAYERNORM_SM_MARGIN", margin, why);
    }
}

/// jax.distributed takes ranks from Slurm itself (jax/_src/clusters/
/// slurm_cluster.py); its port is one per job, not per step.
fn jax(offers: &mut Offers, facts: &Facts, step: &StepPlan) {
    let (host, port) = (step.master_addr.as_deref(), step.master_port);
    // JAX takes GPU number SLURM_LOCALID, which a task that sees one does not have.
    let visible = facts.environment.get("CUDA_VISIBLE_DEVICES").map(super::agent::listed);
    if visible == Some(1) && step.local_world_size > 1 {
        let why = "the task sees one GPU, which is number 0 to it; JAX would take the number of the task";
        offers.derived("JAX_LOCAL_DEVICE_IDS", "0", why);
    }
    if let Some(port) = port {
        let why = "MASTER_PORT: JAX's own would be the same in all steps of the job";
        offers.derived("JAX_COORDINATOR_PORT", port.to_string(), why);
    }
    let proxy = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
    let proxied = proxy.iter().any(|name| facts.environment.get(name).is_some_and(|value| !value.is_empty()));
    if let Some(host) = host.filter(|_| proxied) {
        let why = "a proxy is set: JAX's ranks must reach their coordinator without it";
        offers.profile("no_proxy", host, why);
    }
}

/// Where a word that adds to the profile stands.
fn word(asked: bool) -> Layer {
    if asked { Layer::Chosen } else { Layer::AddOn }
}

fn debug(offers: &mut Offers, layer: Layer) {
    let why = "debug: ";
    for (name, value, what) in [
        ("NCCL_DEBUG", "INFO", "NCCL says what it finds and decides"),
        ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET,GRAPH", "of start, network and topology, not of each collective"),
        ("TORCH_CPP_LOG_LEVEL", "INFO", "the log of PyTorch's native code"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "c10d checks each collective among the ranks; slow"),
        ("TORCH_SHOW_CPP_STACKTRACES", "1", "errors of native code show where they came from"),
    ] {
        offers.value(layer, Origin::Profile, name, value, format!("{why}{what}"));
    }
}

fn deterministic(offers: &mut Offers, profile: Profile, layer: Layer) {
    let mut offer = |name: &str, value: &str, what: &str| {
        offers.value(layer, Origin::Profile, name, value, format!("deterministic: {what}"));
    };
    offer("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuBLAS sums in one order with a workspace of fixed size");
    offer("NCCL_ALGO", "Ring", "one order of reduction, whatever the message's size");
    offer("PYTHONHASHSEED", "0", "the order of Python's sets is that of the last run");
    if profile != Profile::Jax {
        offer("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "TransformerEngine takes its deterministic kernels");
    }
}

/// The framework that a word of the command names.
pub(super) fn framework_in(command: &[String]) -> Option<&'static str> {
    command.iter().find_map(|word| {
        let lower = word.to_ascii_lowercase();
        let mut parts = lower.split(|c: char| !c.is_ascii_alphanumeric());
        parts.find_map(|part| match part {
            "fsdp" | "fsdp1" | "fsdp2" => Some("FSDP"),
            "deepspeed" => Some("DeepSpeed"),
            "jax" | "maxtext" => Some("JAX"),
            _ => None,
        })
    })
}

/// By the model names the driver prints: B100, B200, B300, GB200, GB300, GB10,
/// RTX PRO … Blackwell, GeForce RTX 50x0.
pub(super) fn is_blackwell(model: &str) -> bool {
    let words: Vec<&str> = model.split_whitespace().collect();
    let data_centre = words.iter().any(|word| {
        let number = word.strip_prefix("GB").or_else(|| word.strip_prefix('B'));
        matches!(number, Some("10" | "30" | "40" | "100" | "200" | "300"))
    });
    let geforce = words.windows(3).any(|three| {
        three[..2] == ["GeForce", "RTX"] && matches!(three[2], "5050" | "5060" | "5070" | "5080" | "5090")
    });
    data_centre || geforce || words.contains(&"Blackwell")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blackwell_by_the_driver_s_model_names() {
        for model in [
            "NVIDIA B200",
            "NVIDIA B300 SXM6 AC",
            "NVIDIA GB200",
            "NVIDIA GB300",
            "NVIDIA GB10",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "NVIDIA GeForce RTX 5090",
        ] {
            assert!(is_blackwell(model), "{model}");
        }
        for model in [
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H200",
            "NVIDIA GH200 480GB",
            "NVIDIA A100-SXM4-80GB",
            "Tesla V100-SXM2-32GB",
            "NVIDIA L40S",
            "NVIDIA RTX 5000 Ada Generation",
            "Quadro RTX 5000",
            "",
        ] {
            assert!(!is_blackwell(model), "{model}");
        }
    }

    #[test]
    fn a_flag_counts_unless_its_value_switches_it_off() {
        let has = |command: &str| {
            let words: Vec<String> = command.split_whitespace().map(String::from).collect();
            has_any(&words, &CUDA_GRAPHS)
        };
        for command in ["x --enable-cuda-graph", "x model.enable_cuda_graph=True", "x --cuda-graph-impl local"] {
            assert!(has(command), "{command}");
        }
        for command in ["x --cuda-graph-impl none", "x model.enable_cuda_graph=False", "x --cuda-graph-impl=none"] {
            assert!(!has(command), "{command}");
        }
        // Reductions in the switches of InfiniBand need no registered buffers.
        assert!(!has_any(&["--use-sharp".into()], &USER_BUFFERS));
    }

    #[test]
    fn frameworks_are_whole_words_of_the_command() {
        let seen = |command: &str| {
            let words: Vec<String> = command.split_whitespace().map(String::from).collect();
            framework_in(&words)
        };
        assert_eq!(seen("python train_fsdp.py"), Some("FSDP"));
        assert_eq!(seen("python run.py --fsdp full_shard"), Some("FSDP"));
        assert_eq!(seen("python run.py --deepspeed ds.json"), Some("DeepSpeed"));
        assert_eq!(seen("python -m jax.train"), Some("JAX"));
        assert_eq!(seen("python /home/ajax/pretrain_gpt.py"), None);
        assert_eq!(seen("python /home/jaxon/pretrain_gpt.py"), None);
        assert_eq!(seen(""), None);
    }
}
