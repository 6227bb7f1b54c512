//! What a model is: the numbers of a Hugging Face config.json, and the tensors that follow
//! from them. What this worker cannot train is refused by its name: a key that changes the
//! computation is either understood or an error, never passed over.

use serde_json::{Map, Value, json};

use super::{Init, Tensor, Unit};

/// The families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// LlamaForCausalLM.
    Llama,
    /// Qwen3ForCausalLM: queries and keys are normed head by head.
    Qwen3,
}

impl Kind {
    fn architecture(self) -> &'static str {
        match self {
            Kind::Llama => "LlamaForCausalLM",
            Kind::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Kind::Llama => "llama",
            Kind::Qwen3 => "qwen3",
        }
    }
}

/// How rotary frequencies are slowed for longer contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// `rope_type` "linear": all of them, by `factor`.
    Linear {
        /// By how much.
        factor: f32,
    },
    /// `rope_type` "llama3": the low ones, with a smooth passage.
    Llama3 {
        /// By how much low frequencies are slowed.
        factor: f32,
        /// Longer wavelengths than `original / low_freq_factor` are slowed.
        low_freq_factor: f32,
        /// Shorter ones than `original / high_freq_factor` stay.
        high_freq_factor: f32,
        /// The context the model was first trained with.
        original: usize,
    },
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

/// Why a config.json is not trained: the key, its value, and what is possible instead.
/// Whoever read the file puts its name before it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(pub String);

/// The end of a refusal.
const POSSIBLE: &str = "choose a dense LlamaForCausalLM or Qwen3ForCausalLM";

/// No dimension is larger: the offsets of every tensor then fit, and a config.json cannot
/// ask for a list of blocks that is longer than memory.
const MOST: usize = 1 << 32;
const MOST_LAYERS: usize = 1 << 16;

impl Spec {
    /// From a config.json, as transformers 4 and 5 write it. A key that is missing or null has
    /// the default of transformers; the shape's own keys must be there.
    ///
    /// # Errors
    /// A key is missing or wrong, or the model is of a kind that is not trained here
    /// (mixture of experts, hybrid attention, sliding windows).
    pub fn from_hf(config: &Value) -> Result<Spec, SpecError> {
        let Some(keys) = config.as_object() else {
            return refuse("config.json holds no object; take the config.json of a model's directory".into());
        };
        let keys = Keys { keys, within: "" };
        let kind = family(&keys)?;
        refuse_what_is_not_computed(&keys)?;

        let hidden = keys.size("hidden_size")?;
        let layers = keys.size("num_hidden_layers")?;
        let heads = keys.size("num_attention_heads")?;
        let kv_heads = keys.optional_size("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match (keys.optional_size("head_dim")?, kind) {
            (Some(given), _) => given,
            (None, Kind::Qwen3) => 128,
            (None, Kind::Llama) => hidden / heads,
        };
        if kind == Kind::Llama && hidden % heads != 0 {
            return refuse(format!(
                "hidden_size={hidden} is no multiple of num_attention_heads={heads}, which transformers demands of \
                 LlamaForCausalLM; change one of them"
            ));
        }
        if heads % kv_heads != 0 {
            return refuse(format!(
                "num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}, but equally many query \
                 heads share each key-value head; change one of them"
            ));
        }
        if head_dim % 2 != 0 {
            return refuse(format!(
                "head_dim={head_dim} is odd, but rotary embedding turns pairs; choose an even head_dim"
            ));
        }
        if layers > MOST_LAYERS {
            return refuse(format!("num_hidden_layers={layers} is more than {MOST_LAYERS}; choose fewer layers"));
        }
        refuse_windows(&keys, kind, layers)?;
        let max_positions = keys.optional_size("max_position_embeddings")?.unwrap_or(match kind {
            Kind::Llama => 2048,
            Kind::Qwen3 => 32768,
        });
        let spec = Spec {
            kind,
            vocab: keys.size("vocab_size")?,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate: keys.size("intermediate_size")?,
            eps: keys.positive("rms_norm_eps")?.unwrap_or(1e-6),
            rope: rope(&keys, max_positions)?,
            tied: keys.boolean("tie_word_embeddings")?.unwrap_or(false),
            max_positions,
            init_range: keys.positive("initializer_range")?.unwrap_or(0.02),
        };
        if spec.vocab > u32::MAX as usize {
            return refuse(format!(
                "vocab_size={} is more than token ids of 32 bits tell apart; choose at most {}",
                spec.vocab,
                u32::MAX
            ));
        }
        match spec.count() {
            Some(_) => Ok(spec),
            None => refuse(format!(
                "a model with hidden_size={hidden}, num_hidden_layers={layers}, num_attention_heads={heads}, \
                 head_dim={head_dim}, intermediate_size={} and vocab_size={} has more parameters than this machine \
                 can count; choose a smaller shape",
                spec.intermediate, spec.vocab
            )),
        }
    }

    /// A config.json that transformers 4 and 5 read. It says nothing of tokens with a
    /// meaning (begin, end, padding): the model's shape does not know them.
    #[must_use]
    pub fn to_hf(&self) -> Value {
        let mut config = json!({
            "architectures": [self.kind.architecture()],
            "model_type": self.kind.model_type(),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(self.eps),
            "rope_theta": shortest(self.rope.theta),
            "rope_scaling": match self.rope.scaling {
                None => Value::Null,
                Some(Scaling::Linear { factor }) => json!({"rope_type": "linear", "factor": shortest(factor)}),
                Some(Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original }) => json!({
                    "rope_type": "llama3",
                    "factor": shortest(factor),
                    "low_freq_factor": shortest(low_freq_factor),
                    "high_freq_factor": shortest(high_freq_factor),
                    "original_max_position_embeddings": original,
                }),
            },
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "initializer_range": shortest(self.init_range),
            "attention_bias": false,
            "attention_dropout": 0.0,
            // Without them transformers assumes the ids 1 and 2 for Llama.
            "bos_token_id": null,
            "eos_token_id": null,
            "torch_dtype": "float32",
        });
        match self.kind {
            Kind::Llama => config["mlp_bias"] = json!(false),
            Kind::Qwen3 => config["use_sliding_window"] = json!(false),
        }
        config
    }

    /// All units: "embedding" first, the blocks in their order, and "head" (final norm and
    /// output projection) last; where the embedding is tied the first holds the final
    /// norm, too, and there is no "head".
    #[must_use]
    pub fn units(&self) -> Vec<Unit> {
        let matrix = Init::Normal(self.init_range);
        let embedding = ("model.embed_tokens.weight", vec![self.vocab, self.hidden], matrix);
        let norm = ("model.norm.weight", vec![self.hidden], Init::Ones);
        let output = ("lm_head.weight", vec![self.vocab, self.hidden], matrix);
        let blocks = (0..self.layers).map(|layer| self.block(layer));
        if self.tied {
            std::iter::once(unit("embedding", 0, "", vec![embedding, norm])).chain(blocks).collect()
        } else {
            let (first, last) = (unit("embedding", 0, "", vec![embedding]), unit("head", 0, "", vec![norm, output]));
            std::iter::once(first).chain(blocks).chain([last]).collect()
        }
    }

    /// Numbers of the whole model, a tied matrix once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.count().unwrap_or(u64::MAX)
    }

    /// In the order in which they are used, which the forward and backward pass rely on:
    /// see `block::Weights`.
    fn block(&self, layer: usize) -> Unit {
        let (hidden, inner) = (self.hidden, self.intermediate);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let matrix = Init::Normal(self.init_range);
        let mut tensors = vec![
            ("input_layernorm.weight", vec![hidden], Init::Ones),
            ("self_attn.q_proj.weight", vec![queries, hidden], matrix),
            ("self_attn.k_proj.weight", vec![keys, hidden], matrix),
            ("self_attn.v_proj.weight", vec![keys, hidden], matrix),
        ];
        if self.kind == Kind::Qwen3 {
            tensors.push(("self_attn.q_norm.weight", vec![self.head_dim], Init::Ones));
            tensors.push(("self_attn.k_norm.weight", vec![self.head_dim], Init::Ones));
        }
        tensors.extend([
            ("self_attn.o_proj.weight", vec![hidden, queries], matrix),
            ("post_attention_layernorm.weight", vec![hidden], Init::Ones),
            ("mlp.gate_proj.weight", vec![inner, hidden], matrix),
            ("mlp.up_proj.weight", vec![inner, hidden], matrix),
            ("mlp.down_proj.weight", vec![hidden, inner], matrix),
        ]);
        unit("block", layer, &format!("model.layers.{layer}."), tensors)
    }

    /// The number of parameters, if a machine of this kind can hold their bytes.
    fn count(&self) -> Option<u64> {
        let [vocab, hidden, layers, heads, kv_heads, head_dim, inner] =
            [self.vocab, self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.intermediate]
                .map(|size| size as u128);
        // Each factor is at most 2^32, so that no sum of products of three overflows.
        let attention = 2 * hidden * head_dim * (heads + kv_heads);
        let norms = 2 * hidden + if self.kind == Kind::Qwen3 { 2 * head_dim } else { 0 };
        let block = attention + norms + 3 * hidden * inner;
        let embeddings = vocab * hidden * if self.tied { 1 } else { 2 };
        let all = block.checked_mul(layers)?.checked_add(embeddings + hidden)?;
        u64::try_from(all).ok().filter(|all| *all <= isize::MAX as u64 / 4)
    }
}

/// What of a unit's tensors.
type Described = (&'static str, Vec<usize>, Init);

fn unit(what: &'static str, index: usize, prefix: &str, tensors: Vec<Described>) -> Unit {
    let mut offset = 0;
    let placed = tensors.into_iter().map(|(name, shape, init)| {
        let tensor = Tensor { name: format!("{prefix}{name}"), shape, offset, init };
        offset = tensor.range().end;
        tensor
    });
    Unit { what, index: index as u32, tensors: placed.collect() }
}

/// The family, by `architectures` and `model_type`, of which one is enough.
fn family(keys: &Keys) -> Result<Kind, SpecError> {
    let model_type = keys.text("model_type")?;
    let architectures = match keys.get("architectures") {
        None => Vec::new(),
        Some(Value::Array(all)) => all.iter().map(|name| name.as_str().map_or(shown(name), str::to_string)).collect(),
        Some(other) => return refuse(format!("architectures={} is no list of names; {POSSIBLE}", shown(other))),
    };
    let known = |named: &str, name: fn(Kind) -> &'static str| {
        [Kind::Llama, Kind::Qwen3].into_iter().find(|kind| name(*kind) == named)
    };
    let mut found = None;
    for architecture in &architectures {
        let kind = known(architecture, Kind::architecture);
        found = found.or(kind);
        if kind.is_none() || kind != found {
            return refuse(format!("architectures={}: {}; {POSSIBLE}", quoted(architecture), why_not(architecture)));
        }
    }
    match model_type {
        Some(model_type) => {
            let kind = known(model_type, Kind::model_type);
            if kind.is_none() || kind != found.or(kind) {
                return refuse(format!("model_type={}: {}; {POSSIBLE}", quoted(model_type), why_not(model_type)));
            }
            found = kind;
        }
        None if found.is_none() => {
            return refuse(format!(
                "model_type and architectures are missing, so the model's kind is unknown; {POSSIBLE}"
            ));
        }
        None => {}
    }
    // Not reached without a kind; the compiler does not see that.
    found.map_or_else(|| refuse(format!("model_type is missing; {POSSIBLE}")), Ok)
}

/// What stands in the way of a model of this name.
fn why_not(name: &str) -> &'static str {
    let plain: String = name.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
    let any = |words: &[&str]| words.iter().any(|word| plain.contains(word));
    if any(&[
        "qwen3next",
        "qwen35",
        "jamba",
        "mamba",
        "bamba",
        "falconh1",
        "zamba",
        "nemotronh",
        "hybrid",
        "kimilinear",
    ]) {
        "hybrid attention (linear or state-space layers between attention layers) is not trained here"
    } else if any(&["moe", "mixtral", "deepseekv", "gptoss", "llama4", "dbrx", "minimax", "glm4moe"]) {
        "a mixture of experts is not trained here"
    } else if plain.starts_with("llama") || plain.starts_with("qwen3") {
        "only causal language models of this family are trained here, and the two keys must agree"
    } else {
        "this kind is not trained here"
    }
}

/// Keys that would make another computation of a Llama or Qwen3.
fn refuse_what_is_not_computed(keys: &Keys) -> Result<(), SpecError> {
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if let Some(value) = keys.get(key).filter(|value| value.as_u64() != Some(0)) {
            return refuse(format!("{key}={}: a mixture of experts is not trained here; {POSSIBLE}", shown(value)));
        }
    }
    for key in ["full_attention_interval", "linear_num_value_heads", "attn_layer_period", "mamba_d_state"] {
        if let Some(value) = keys.get(key) {
            return refuse(format!("{key}={}: hybrid attention is not trained here; {POSSIBLE}", shown(value)));
        }
    }
    for key in ["attention_bias", "mlp_bias"] {
        if keys.boolean(key)? == Some(true) {
            return refuse(format!("{key}=true: projections with a bias are not trained here; choose a model without"));
        }
    }
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(value) = keys.get(key).filter(|value| !matches!(value.as_str(), Some("silu" | "swish"))) {
            return refuse(format!("{key}={}: only silu is computed here; choose a model with silu", shown(value)));
        }
    }
    if let Some(value) = keys.get("quantization_config") {
        let method = value.get("quant_method").map(|method| format!(" ({})", shown(method))).unwrap_or_default();
        return refuse(format!(
            "quantization_config is there{method}: quantized weights are not trained here; take the model's directory \
             with bf16 or f32 weights"
        ));
    }
    for key in ["attention_dropout", "hidden_dropout"] {
        if let Some(value) = keys.get(key).filter(|value| value.as_f64() != Some(0.0)) {
            return refuse(format!("{key}={}: dropout is not done here; set it to 0", shown(value)));
        }
    }
    Ok(())
}

/// Sliding windows, where a layer would use one.
fn refuse_windows(keys: &Keys, kind: Kind, layers: usize) -> Result<(), SpecError> {
    const CURE: &str = "choose a model with full attention in all layers";
    if let Some(types) = keys.get("layer_types") {
        let Some(types) = types.as_array() else {
            return refuse(format!("layer_types={} is no list; {CURE}", shown(types)));
        };
        if let Some((at, other)) = types.iter().enumerate().find(|(_, layer)| layer.as_str() != Some("full_attention"))
        {
            let why = if other.as_str().is_some_and(|name| name.contains("sliding") || name.contains("chunked")) {
                "attention within a window"
            } else {
                "hybrid attention"
            };
            return refuse(format!("layer_types[{at}]={}: {why} is not trained here; {CURE}", shown(other)));
        }
        if types.len() != layers {
            let many = types.len();
            return refuse(format!(
                "layer_types names {many} layers, but num_hidden_layers={layers}; correct one of them"
            ));
        }
        return Ok(());
    }
    // Llama knows no windows, and Qwen3's begin at max_window_layers.
    let asked = kind == Kind::Qwen3 && keys.boolean("use_sliding_window")?.unwrap_or(false);
    let from = keys.optional_count("max_window_layers")?.unwrap_or(28);
    // Missing, the window is 4096; null, there is none.
    if !asked || from >= layers || keys.keys.get("sliding_window").is_some_and(Value::is_null) {
        return Ok(());
    }
    refuse(format!(
        "use_sliding_window=true and max_window_layers={from}: attention within a window is not trained here, and \
         blocks from the {from}th on would use one; {CURE}"
    ))
}

/// `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which has both.
fn rope(keys: &Keys, max_positions: usize) -> Result<Rope, SpecError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let outer = keys.positive("rope_theta")?;
    if let Some(value) = keys.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
        return refuse(format!("partial_rotary_factor={}: whole heads are turned here; set it to 1", shown(value)));
    }
    // As in transformers, an empty object says nothing and the older name comes first.
    let says =
        |name: &&str| keys.get(name).is_some_and(|value| value.as_object().is_none_or(|object| !object.is_empty()));
    let within = ["rope_scaling", "rope_parameters"].into_iter().find(says);
    let Some((name, value)) = within.and_then(|name| keys.get(name).map(|value| (name, value))) else {
        return Ok(Rope { theta: outer.unwrap_or(10_000.0), scaling: None });
    };
    let Some(object) = value.as_object() else {
        return refuse(format!("{name}={} is no object; remove it, or take the model's own config.json", shown(value)));
    };
    let inner = Keys { keys: object, within: name };
    let theta = inner.positive("rope_theta")?.or(outer).unwrap_or(10_000.0);
    if let Some(value) = inner.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
        return refuse(format!(
            "{name}.partial_rotary_factor={}: whole heads are turned here; set it to 1",
            shown(value)
        ));
    }
    let needed = |key: &'static str| match inner.positive(key) {
        Ok(None) => refuse(format!("{name}.{key} is missing; take the model's own config.json")),
        Ok(Some(value)) => Ok(value),
        Err(error) => Err(error),
    };
    // "type" is its older name.
    let kind = inner.text("rope_type")?.or(inner.text("type")?).unwrap_or("default");
    let scaling = match kind {
        "default" => None,
        "linear" => Some(Scaling::Linear { factor: needed("factor")? }),
        "llama3" => {
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            if low >= high {
                return refuse(format!(
                    "{name}.low_freq_factor={low} is not below high_freq_factor={high}; take the model's own config.json"
                ));
            }
            Some(Scaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original: keys.optional_size(ORIGINAL)?.or(inner.optional_size(ORIGINAL)?).unwrap_or(max_positions),
            })
        }
        other => {
            return refuse(format!(
                "{name}.rope_type={}: only default, linear and llama3 are computed here; choose a model with one of them",
                quoted(other)
            ));
        }
    };
    Ok(Rope { theta, scaling })
}

fn refuse<T>(why: String) -> Result<T, SpecError> {
    Err(SpecError(why))
}

/// As few digits as name this f32, so that 1e-6 does not become 9.999999974752427e-7.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// A value for an error's line, cut short.
fn shown(value: &Value) -> String {
    short(value.to_string())
}

fn quoted(text: &str) -> String {
    shown(&Value::from(text))
}

fn short(text: String) -> String {
    const LONGEST: usize = 60;
    if text.chars().count() <= LONGEST { text } else { text.chars().take(LONGEST).chain(['…']).collect() }
}

/// Keys of an object, read strictly: null counts as missing, a wrong type is an error.
struct Keys<'a> {
    keys: &'a Map<String, Value>,
    /// Of which object within the file: "" is the outermost.
    within: &'static str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn wrong<T>(&self, key: &str, value: &Value, wanted: &str) -> Result<T, SpecError> {
        let name = self.name(key);
        refuse(format!("{name}={} is not {wanted}; correct it, or take the model's own config.json", shown(value)))
    }

    fn name(&self, key: &str) -> String {
        if self.within.is_empty() { key.to_string() } else { format!("{}.{key}", self.within) }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, SpecError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.wrong(key, other, "a text"),
        }
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>, SpecError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => self.wrong(key, other, "true or false"),
        }
    }

    /// Above zero and finite, as f32.
    fn positive(&self, key: &str) -> Result<Option<f32>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => self.wrong(key, value, "a number above 0 that fits an f32"),
        }
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) if number <= MOST => Ok(Some(number)),
            _ => self.wrong(key, value, &format!("a whole number up to {MOST}")),
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, SpecError> {
        match self.optional_count(key)? {
            Some(0) => self.wrong(key, &Value::from(0), "a number above 0"),
            other => Ok(other),
        }
    }

    fn size(&self, key: &str) -> Result<usize, SpecError> {
        match self.optional_size(key)? {
            Some(size) => Ok(size),
            None => refuse(format!(
                "{} is missing, and the model's shape needs it; add it, or take the model's own config.json",
                self.name(key)
            )),
        }
    }
}
