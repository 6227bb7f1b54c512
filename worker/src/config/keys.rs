//! Every key of the configuration once: what it takes, its default, what it is for, and
//! whether a training may go on when it changed.

/// What a key takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Takes {
    /// A path: $VARIABLE, ${VARIABLE} and a leading ~/ are replaced.
    Path,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A word of these, a step or a path.
    Resume,
    /// true or false.
    Flag,
    /// A whole number from the first to the second.
    Whole(u64, u64),
    /// A number from the first to the second, both included.
    Real(f64, f64),
    /// A number above 0.
    Positive,
    /// A number from 0, below 1.
    Fraction,
    /// Keys of config.json.
    Shape,
}

/// What a change of a key means for a training that goes on from a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Another training: it cannot go on.
    Fixed,
    /// It goes on in another way, which is worth a line.
    Told,
    /// Nothing.
    Free,
}

/// One key.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub section: &'static str,
    pub name: &'static str,
    pub takes: Takes,
    /// As it would be written; "" is none: with `required` it must be given.
    pub default: &'static str,
    pub required: bool,
    pub weight: Weight,
    pub what: &'static str,
}

pub const SECTIONS: [(&str, &str); 5] = [
    ("model", "what is trained: path or shape"),
    ("data", "with which tokens"),
    ("train", "how"),
    ("checkpoint", "when its state is kept"),
    ("comm", "how ranks talk"),
];

/// A count that is used as a length: far beyond what fits into memory.
const MANY: u64 = 1 << 31;
/// Seconds: ten years.
const LONG: u64 = 315_360_000;

const fn key(
    section: &'static str,
    name: &'static str,
    takes: Takes,
    default: &'static str,
    weight: Weight,
    what: &'static str,
) -> Key {
    Key { section, name, takes, default, required: false, weight, what }
}

const fn required(section: &'static str, name: &'static str, takes: Takes, weight: Weight, what: &'static str) -> Key {
    Key { section, name, takes, default: "", required: true, weight, what }
}

use Takes::{Flag, Fraction, Path, Positive, Real, Resume, Shape, Whole, Word};
use Weight::{Fixed, Free, Told};

/// All of them, section by section. What a model or data directory holds decides whether a
/// training can go on, not where it lies, so that paths are free.
pub const KEYS: [Key; 37] = [
    key("model", "path", Path, "", Free, "a Hugging Face directory: config.json and the weights to begin with"),
    key("model", "random_init", Flag, "false", Free, "of path, only config.json: weights begin from the seed"),
    key("model", "shape", Shape, "", Free, "instead of path: keys of config.json, model_type among them"),
    required("data", "path", Path, Free, "a directory made by palingenesis-worker prepare"),
    key("data", "shuffle", Flag, "true", Fixed, "the seed decides the order of sequences; else as they lie on disk"),
    required("train", "output_dir", Path, Free, "checkpoints, metrics, the final model; shared by all nodes"),
    key(
        "train",
        "resume_from",
        Resume,
        "\"auto\"",
        Free,
        "auto: the newest valid checkpoint; none; a step or its directory",
    ),
    required("train", "steps", Whole(1, 1 << 40), Told, "optimizer steps of the whole training"),
    key("train", "micro_batch_size", Whole(1, MANY), "1", Free, "sequences that a rank computes at once"),
    required("train", "global_batch_size", Whole(1, MANY), Fixed, "sequences of one step over all ranks; any number"),
    required("train", "seq_len", Whole(1, MANY), Fixed, "positions of a sequence"),
    key("train", "lr", Real(0.0, 10.0), "3e-4", Told, "the highest learning rate"),
    key("train", "min_lr", Real(0.0, 10.0), "0.0", Told, "at the end of the cosine; at most lr"),
    key("train", "warmup_steps", Whole(0, 1 << 40), "0", Told, "steps of a linear rise to lr; at most steps"),
    key("train", "grad_clip", Real(0.0, 1e9), "1.0", Told, "highest norm of all gradients; 0 does not clip"),
    key("train", "weight_decay", Real(0.0, 10.0), "0.1", Told, "of AdamW, for matrices"),
    key("train", "beta1", Fraction, "0.9", Told, "of AdamW"),
    key("train", "beta2", Fraction, "0.95", Told, "of AdamW"),
    key("train", "eps", Positive, "1e-8", Told, "of AdamW"),
    key("train", "seed", Whole(0, u64::MAX), "0", Fixed, "of the first weights and the order of sequences"),
    key("train", "log_every", Whole(1, 1 << 40), "10", Free, "steps between two lines of a log"),
    key(
        "train",
        "loss_chunk",
        Whole(0, MANY),
        "0",
        Free,
        "positions whose logits are held at once; 0: 256, on a GPU 4096",
    ),
    key("train", "threads", Whole(0, 4096), "0", Free, "of a rank; 0: as many as its CPUs"),
    key("train", "device", Word(&["auto", "cpu", "cuda"]), "\"auto\"", Free, "auto: cuda where a GPU is, else cpu"),
    key(
        "train",
        "param_dtype",
        Word(&["auto", "f32", "bf16"]),
        "\"auto\"",
        Free,
        "what is computed in; auto: bf16 on a GPU, f32 on a CPU; masters are f32",
    ),
    key(
        "train",
        "reduce_dtype",
        Word(&["f32", "bf16"]),
        "\"f32\"",
        Free,
        "of gradients, summed over ranks; bf16: GPUs",
    ),
    key(
        "train",
        "cuda_libraries",
        Path,
        "",
        Free,
        "a directory in which CUDA's and NCCL's libraries are looked for first",
    ),
    key("checkpoint", "every", Whole(0, 1 << 40), "500", Free, "steps; 0: only at the end and on a signal"),
    key("checkpoint", "keep", Whole(1, 1 << 20), "5", Free, "newest valid checkpoints that are kept"),
    key("checkpoint", "export", Flag, "true", Free, "at the end write output_dir/final, which Hugging Face reads"),
    key("checkpoint", "export_dtype", Word(&["f32", "bf16"]), "\"f32\"", Free, "numbers of the export"),
    key(
        "checkpoint",
        "grace",
        Whole(0, LONG),
        "30",
        Free,
        "seconds that SIGTERM or SIGUSR1 leaves for a last checkpoint",
    ),
    key("checkpoint", "max_restarts_without_progress", Whole(1, 1 << 20), "3", Free, "then exit code 76"),
    key("comm", "start_timeout", Whole(1, LONG), "300", Free, "seconds until all ranks must be there"),
    key("comm", "timeout", Whole(1, LONG), "600", Free, "seconds for one operation between ranks"),
    key("comm", "silence", Whole(2, LONG), "10", Free, "seconds without a heartbeat until a rank counts as gone"),
    key("comm", "key_file", Path, "", Free, "a secret of mode 0600, where no plugin gives one"),
];

/// The key of that name.
pub fn find(section: &str, name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.section == section && key.name == name)
}

/// Names that other programs have for the same.
const ELSEWHERE: [(&str, &str); 34] = [
    ("mixed_precision_param", "train.param_dtype"),
    ("mixed_precision_reduce", "train.reduce_dtype"),
    ("max_steps", "train.steps"),
    ("num_steps", "train.steps"),
    ("learning_rate", "train.lr"),
    ("lr_min", "train.min_lr"),
    ("num_warmup_steps", "train.warmup_steps"),
    ("max_norm", "train.grad_clip"),
    ("max_grad_norm", "train.grad_clip"),
    ("gradient_clipping", "train.grad_clip"),
    ("clip_grad", "train.grad_clip"),
    ("adam_beta1", "train.beta1"),
    ("adam_beta2", "train.beta2"),
    ("adam_epsilon", "train.eps"),
    ("batch_size", "train.global_batch_size"),
    ("local_batch_size", "train.micro_batch_size"),
    ("per_device_train_batch_size", "train.micro_batch_size"),
    ("sequence_length", "train.seq_len"),
    ("sequence_len", "train.seq_len"),
    ("max_seq_len", "train.seq_len"),
    ("max_seq_length", "train.seq_len"),
    ("max_length", "train.seq_len"),
    ("dump_folder", "train.output_dir"),
    ("save_dir", "train.output_dir"),
    ("resume_from_checkpoint", "train.resume_from"),
    ("logging_steps", "train.log_every"),
    ("log_freq", "train.log_every"),
    ("interval", "checkpoint.every"),
    ("save_steps", "checkpoint.every"),
    ("save_interval", "checkpoint.every"),
    ("keep_latest_k", "checkpoint.keep"),
    ("save_total_limit", "checkpoint.keep"),
    ("dataset_path", "data.path"),
    ("model_name_or_path", "model.path"),
];

/// What an unknown key was meant to be, as a full name: one of its section, one of another
/// section, one of another program.
pub fn meant(section: &str, name: &str) -> Option<String> {
    let full = |key: &Key| format!("{}.{}", key.section, key.name);
    let elsewhere = KEYS.iter().find(|key| key.name == name).map(full);
    let near = || {
        let names = KEYS.iter().filter(|key| key.section == section).map(|key| key.name);
        palingenesis::config::nearest(name, names).map(|near| format!("{section}.{near}"))
    };
    let foreign = || ELSEWHERE.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| ours.to_string());
    let anywhere = || {
        let near = palingenesis::config::nearest(name, KEYS.iter().map(|key| key.name))?;
        KEYS.iter().find(|key| key.name == near).map(full)
    };
    elsewhere.or_else(near).or_else(foreign).or_else(anywhere)
}

/// Keys of config.json that decide what a model computes or how it begins.
const SHAPE: [&str; 25] = [
    "architectures",
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

/// Names that other programs have for those with a default, which would be taken then.
const SHAPE_ELSEWHERE: [(&str, &str); 9] = [
    ("enable_weight_tying", "tie_word_embeddings"),
    ("init_std", "initializer_range"),
    ("max_seq_len", "max_position_embeddings"),
    ("n_kv_heads", "num_key_value_heads"),
    ("norm_eps", "rms_norm_eps"),
    ("num_kv_heads", "num_key_value_heads"),
    ("rope_base", "rope_theta"),
    ("rotary_base", "rope_theta"),
    ("tie_embeddings", "tie_word_embeddings"),
];

/// What an unknown key of model.shape was meant to be. Others that a config.json may have,
/// of tokens and of programs, are none of ours, and nothing is said of them.
pub fn meant_in_shape(name: &str) -> Option<&'static str> {
    if SHAPE.contains(&name) {
        return None;
    }
    let foreign = SHAPE_ELSEWHERE.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours);
    foreign.or_else(|| palingenesis::config::nearest(name, SHAPE))
}

impl Takes {
    /// In words that continue "must be".
    pub fn expected(self) -> String {
        match self {
            Takes::Path => "a path in quotes".into(),
            Takes::Word(words) => format!("one of {}", words.join(", ")),
            Takes::Resume => "auto, none, a step's number or the path of a checkpoint".into(),
            Takes::Flag => "true or false".into(),
            Takes::Whole(least, u64::MAX) => format!("a whole number of at least {least}"),
            Takes::Whole(least, most) => format!("a whole number from {least} to {most}"),
            Takes::Real(least, most) => format!("a number from {least} to {most}"),
            Takes::Positive => "a number above 0".into(),
            Takes::Fraction => "a number from 0, below 1".into(),
            Takes::Shape => "a section with keys of config.json".into(),
        }
    }
}
