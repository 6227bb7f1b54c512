//! What a model is: the numbers of a Hugging Face config.json, and the tensors that follow
//! from them. What this worker cannot train is refused by its name.

use super::Unit;

/// The families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// LlamaForCausalLM.
    Llama,
    /// Qwen3ForCausalLM: queries and keys are normed head by head.
    Qwen3,
}

/// Llama 3's scaling of the rotary frequencies (`rope_type` "llama3").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// By how much low frequencies are slowed.
    pub factor: f32,
    /// Longer wavelengths than `original / low_freq_factor` are slowed.
    pub low_freq_factor: f32,
    /// Shorter ones than `original / high_freq_factor` stay.
    pub high_freq_factor: f32,
    /// The context the model was first trained with.
    pub original: usize,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f32,
    /// Without: as it is.
    pub scaling: Option<Scaling>,
}

/// A model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// The family.
    pub kind: Kind,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Width of a position.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub intermediate: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The embedding is the output projection, too.
    pub tied: bool,
    /// Longest sequence.
    pub max_positions: usize,
    /// Deviation of the first weights.
    pub init_range: f32,
}

/// Why a config.json is not trained, naming the key and its value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(pub String);

impl Spec {
    /// From a config.json.
    ///
    /// # Errors
    /// A key is missing or wrong, or the model is of a kind that is not trained here
    /// (mixture of experts, hybrid attention, sliding windows).
    pub fn from_hf(config: &serde_json::Value) -> Result<Spec, SpecError> {
        let _ = config;
        Err(SpecError("not built".into()))
    }

    /// A config.json that transformers reads.
    #[must_use]
    pub fn to_hf(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// All units: "embedding" first, the blocks in their order, and "head" (final norm and
    /// output projection) last; where the embedding is tied the first holds the final
    /// norm, too, and there is no "head".
    #[must_use]
    pub fn units(&self) -> Vec<Unit> {
        Vec::new()
    }
}
