//! The profile's variables: few, safe, each only if unset, each with its reason.
//!
//! NCCL's own documentation warns against keeping most of its variables in
//! scripts (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>),
//! so a variable needs a reason to be here.

use crate::config::{Profile, Settings};

use super::marks::Marks;
use super::{Facts, Origin, Plan};

pub(super) fn decide(plan: &mut Plan, facts: &Facts, settings: &Settings, marks: &Marks) {
    let mut offer = Offer { plan, facts, marks };
    offer.value("NCCL_DEBUG", "WARN", "NCCL names the cause of a fatal error; INFO would flood the log");
    offer.on_several_nodes(
        "NCCL_IB_TIMEOUT",
        "22",
        "4.096 us * 2^22, seven times: two minutes until a dead link is an error (the often copied 120 is out of range)",
        "one node: no network between the ranks",
    );
    offer.on_several_nodes(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "1",
        "a failed or timed out collective ends the process instead of leaving it waiting",
        "one node: PyTorch's own default ends the process too",
    );
    offer.value("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "CUDA counts the GPUs as nvidia-smi and Slurm do");
    connections(offer, settings);
}

/// Offers a value for a variable the user has not set.
struct Offer<'a, 'f> {
    plan: &'a mut Plan,
    facts: &'a Facts<'f>,
    marks: &'a Marks,
}

impl Offer<'_, '_> {
    /// An empty value counts as set: NCCL then takes its default, which may be
    /// what the user wants.
    fn value(&mut self, name: &str, value: &str, why: impl Into<String>) {
        match self.marks.users(self.facts.environment, name) {
            Some(_) => self.plan.leave(name, format!("yours, kept (the profile would set {value})")),
            None => self.plan.set(name, value, Origin::Profile, why),
        }
    }

    /// Not setting it is a decision too.
    fn nothing(&mut self, name: &str, why: impl Into<String>) {
        match self.marks.users(self.facts.environment, name) {
            Some(_) => self.plan.leave(name, "yours, kept"),
            None if self.marks.ours(self.facts.environment, name) => {
                self.plan.unset(name, "of the step this one was started from");
            }
            None => self.plan.leave(name, why),
        }
    }

    fn on_several_nodes(&mut self, name: &str, value: &str, why: &str, why_not: &str) {
        if self.facts.step.nodes() > 1 {
            self.value(name, value, why);
        } else {
            self.nothing(name, why_not);
        }
    }
}

/// CUDA_DEVICE_MAX_CONNECTIONS: one connection makes the GPU take kernels in
/// the order of launch, which Megatron's overlap of tensor-parallel
/// communication relies on before Blackwell (Megatron-LM, arguments.py); it
/// serialises the several streams of FSDP and DeepSpeed.
fn connections(mut offer: Offer, settings: &Settings) {
    let name = "CUDA_DEVICE_MAX_CONNECTIONS";
    let streams = match (settings.profile, framework_in(offer.facts.command)) {
        (Profile::Megatron, _) | (Profile::Default, None) => None,
        // The framework only: a word of the command may hold a secret.
        (Profile::Default, Some(framework)) => {
            Some(format!("the command names {framework}, whose streams one connection would serialise"))
        }
        (profile, _) => Some(format!("profile {}: one connection would serialise its streams", profile.name())),
    };
    if let Some(why) = streams {
        offer.nothing(name, why);
        return;
    }
    match offer.facts.node.gpu_models.iter().find(|model| is_blackwell(model)) {
        Some(model) => {
            offer.value(
                name,
                "32",
                format!("{model}: since Blackwell the order of kernels needs no single connection"),
            );
        }
        None => {
            offer.value(name, "1", "kernels start in the order of launch, so that communication overlaps computation");
        }
    }
}

/// The framework that a word of the command names.
fn framework_in(command: &[String]) -> Option<&'static str> {
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
fn is_blackwell(model: &str) -> bool {
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
