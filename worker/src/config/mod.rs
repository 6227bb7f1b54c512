//! What was asked for: a TOML or YAML file with torchtitan's names, and overrides
//! `section.key=value` on the command line. Strict: an unknown key is an error that names
//! the nearest known one. Nothing is looked at here but the file itself; whether a path leads
//! to a model or to data is found by those who read them.
//!
//! Relative paths are relative to the working directory, in the file as on the command line,
//! and [`Config`] has absolute ones.

mod build;
mod identity;
mod keys;
mod parse;

use std::path::PathBuf;

use crate::engine::Precision;

pub use identity::{Change, changed, hash};

/// What is wrong with a configuration, where, and the cure, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// Everything.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What is trained.
    pub model: ModelConfig,
    /// With which tokens.
    pub data: DataConfig,
    /// How.
    pub train: TrainConfig,
    /// When its state is kept.
    pub checkpoint: CheckpointConfig,
    /// How ranks talk.
    pub comm: CommConfig,
}

/// `[model]`: a directory of Hugging Face's, or a shape to begin from nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// `path`: a directory with config.json and, to go on from its weights, safetensors.
    pub path: Option<PathBuf>,
    /// `random_init = true`: only config.json is read, weights begin from the seed.
    pub random_init: bool,
    /// `[model.shape]`: keys as in config.json, `model_type` among them.
    pub shape: Option<serde_json::Value>,
}

/// `[data]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataConfig {
    /// `path`: a directory made by `palingenesis-worker prepare`.
    pub path: PathBuf,
    /// `shuffle`: the seed decides the order of sequences; else as they lie on disk.
    pub shuffle: bool,
}

/// `resume_from`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumeFrom {
    /// `auto`: the newest valid checkpoint of `output_dir`, else from the beginning.
    Auto,
    /// `none`: from the beginning; refused where `output_dir` has checkpoints.
    Never,
    /// A step's directory, or its number below `output_dir`.
    Path(PathBuf),
}

/// `[train]`.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// `output_dir`: checkpoints, metrics, the final model. Shared by all nodes.
    pub output_dir: PathBuf,
    /// `resume_from`.
    pub resume_from: ResumeFrom,
    /// `steps`: optimizer steps of the whole training.
    pub steps: u64,
    /// `micro_batch_size`: sequences that a rank computes at once.
    pub micro_batch_size: usize,
    /// `global_batch_size`: sequences of one optimizer step over all ranks. Need not be a
    /// multiple of anything.
    pub global_batch_size: usize,
    /// `seq_len`: positions of a sequence.
    pub seq_len: usize,
    /// `lr`: the highest learning rate.
    pub lr: f64,
    /// `min_lr`: at the end of the cosine.
    pub min_lr: f64,
    /// `warmup_steps`: linear from 0.
    pub warmup_steps: u64,
    /// `grad_clip`: highest norm of all gradients; 0 does not clip.
    pub grad_clip: f64,
    /// `weight_decay`.
    pub weight_decay: f64,
    /// `beta1`, `beta2`, `eps` of AdamW.
    pub beta1: f64,
    /// See `beta1`.
    pub beta2: f64,
    /// See `beta1`.
    pub eps: f64,
    /// `seed`: of weights and order.
    pub seed: u64,
    /// `log_every`: steps between two lines.
    pub log_every: u64,
    /// `loss_chunk`: rows whose logits are held at once; 0: what suits the device.
    pub loss_chunk: usize,
    /// `threads`: of this rank; 0: as many as its CPUs allow.
    pub threads: usize,
    /// `device`.
    pub device: Device,
    /// `param_dtype`: what parameters are computed with in; `None`: what suits the device.
    pub param_dtype: Option<Precision>,
    /// `reduce_dtype`: what gradients are summed over the ranks in.
    pub reduce_dtype: Precision,
    /// `cuda_libraries`: where CUDA's and NCCL's libraries are looked for first.
    pub cuda_libraries: Option<PathBuf>,
}

/// `device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// `auto`: CUDA where a GPU is, else the CPU.
    Auto,
    /// `cpu`.
    Cpu,
    /// `cuda`.
    Cuda,
}

/// `export_dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDtype {
    /// `f32`: as they were trained.
    F32,
    /// `bf16`: rounded, half as large.
    Bf16,
}

/// `[checkpoint]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// `every`: steps; 0: only at the end and on a signal.
    pub every: u64,
    /// `keep`: newest valid ones, at least 1.
    pub keep: usize,
    /// `export`: write `output_dir/final` at the end.
    pub export: bool,
    /// `export_dtype`: its numbers.
    pub export_dtype: ExportDtype,
    /// `grace`: seconds that a signal leaves for the last checkpoint.
    pub grace: u64,
    /// `max_restarts_without_progress`: then exit code 76.
    pub max_restarts_without_progress: u32,
}

/// `[comm]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommConfig {
    /// `start_timeout`: seconds until all ranks must be there.
    pub start_timeout: u64,
    /// `timeout`: seconds for one operation.
    pub timeout: u64,
    /// `silence`: seconds without a heartbeat until a rank counts as gone.
    pub silence: u64,
    /// `key_file`: 0600, where no plugin gives PALINGENESIS_STORE_KEY.
    pub key_file: Option<PathBuf>,
}

/// All sections and keys with their defaults and what they are for, as `--help` shows them:
/// several lines, ending in a newline.
#[must_use]
pub fn describe() -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for (section, what) in keys::SECTIONS {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "[{section}]  {what}");
        for key in keys::KEYS.iter().filter(|key| key.section == section) {
            let default = match (key.required, key.default) {
                (true, _) => "required",
                (false, "") => "-",
                (false, default) => default,
            };
            let _ = writeln!(text, "  {:<30} {default:<9} {}", key.name, key.what);
        }
    }
    text
}
