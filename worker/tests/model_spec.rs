//! What is read from a config.json, what is refused and how, and the tensors and first
//! values that follow.

use palingenesis_worker::model::{Init, Kind, Rope, Scaling, Spec, Tensor, initial};
use serde_json::{Value, json};

/// https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
fn qwen3_600m() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "sliding_window": null,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 151936
    })
}

/// https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
fn llama31_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3"
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": true,
        "vocab_size": 128256
    })
}

/// The same config with other values; null takes a key away.
fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn refusal(config: &Value) -> String {
    let text = Spec::from_hf(config).expect_err("is refused").to_string();
    assert!(!text.contains('\n') && text.len() < 400, "one line: {text}");
    text
}

#[test]
fn every_number_is_read() {
    assert_eq!(
        Spec::from_hf(&qwen3_600m()),
        Ok(Spec {
            kind: Kind::Qwen3,
            vocab: 151_936,
            hidden: 1024,
            layers: 28,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            intermediate: 3072,
            eps: 1e-6,
            rope: Rope { theta: 1e6, scaling: None },
            tied: true,
            max_positions: 40_960,
            init_range: 0.02,
        })
    );
    let llama3 = Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192 };
    assert_eq!(
        Spec::from_hf(&llama31_8b()),
        Ok(Spec {
            kind: Kind::Llama,
            vocab: 128_256,
            hidden: 4096,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            intermediate: 14_336,
            eps: 1e-5,
            rope: Rope { theta: 500_000.0, scaling: Some(llama3) },
            tied: false,
            max_positions: 131_072,
            init_range: 0.02,
        })
    );
}

/// As the models' pages on huggingface.co and PyTorch's count of their parameters have them.
#[test]
fn parameters_are_as_many_as_published() {
    let qwen3 = |hidden, inner, layers, heads, tied| {
        let changes = json!({"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "tie_word_embeddings": tied});
        with(qwen3_600m(), changes)
    };
    let llama = |hidden, inner, layers, heads, kv_heads, vocab, tied| {
        let changes = json!({"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
            "tie_word_embeddings": tied});
        with(llama31_8b(), changes)
    };
    for (name, config, expected) in [
        ("Qwen/Qwen3-0.6B", qwen3_600m(), 596_049_920),
        ("Qwen/Qwen3-4B", qwen3(2560, 9728, 36, 32, true), 4_022_468_096),
        ("Qwen/Qwen3-8B", qwen3(4096, 12_288, 36, 32, false), 8_190_735_360),
        ("meta-llama/Meta-Llama-3-8B", llama31_8b(), 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", llama(2048, 8192, 16, 32, 8, 128_256, true), 1_235_814_400),
        ("HuggingFaceTB/SmolLM2-135M", llama(576, 1536, 30, 9, 3, 49_152, true), 134_515_008),
        ("TinyLlama/TinyLlama-1.1B", llama(2048, 5632, 22, 32, 4, 32_000, false), 1_100_048_384),
    ] {
        let spec = Spec::from_hf(&config).unwrap();
        let units: u64 = spec.units().iter().map(|unit| unit.len() as u64).sum();
        assert_eq!((units, spec.parameters()), (expected, expected), "{name}");
    }
}

#[test]
fn tensors_have_hugging_face_s_names_and_lie_without_gaps() {
    let small = json!({"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 10});
    for tied in [true, false] {
        let spec =
            Spec::from_hf(&with(with(qwen3_600m(), small.clone()), json!({"tie_word_embeddings": tied}))).unwrap();
        let units = spec.units();
        for unit in &units {
            let mut end = 0;
            for tensor in &unit.tensors {
                assert_eq!(tensor.offset, end);
                end = tensor.range().end;
                let expected = if tensor.name.contains("norm") { Init::Ones } else { Init::Normal(0.02) };
                assert_eq!((tensor.init, tensor.decays()), (expected, expected != Init::Ones), "{}", tensor.name);
            }
            assert_eq!(unit.len(), end);
        }
        let all: Vec<(&str, u32, &str, &[usize])> = units
            .iter()
            .flat_map(|unit| unit.tensors.iter().map(|t| (unit.what, unit.index, t.name.as_str(), t.shape.as_slice())))
            .collect();
        let mut expected: Vec<(&str, u32, String, Vec<usize>)> =
            vec![("embedding", 0, "model.embed_tokens.weight".into(), vec![10, 8])];
        let norm = ("model.norm.weight".to_string(), vec![8]);
        if tied {
            expected.push(("embedding", 0, norm.0.clone(), norm.1.clone()));
        }
        for layer in 0..2 {
            for (name, shape) in [
                ("input_layernorm", vec![8]),
                ("self_attn.q_proj", vec![24, 8]),
                ("self_attn.k_proj", vec![8, 8]),
                ("self_attn.v_proj", vec![8, 8]),
                ("self_attn.q_norm", vec![4]),
                ("self_attn.k_norm", vec![4]),
                ("self_attn.o_proj", vec![8, 24]),
                ("post_attention_layernorm", vec![8]),
                ("mlp.gate_proj", vec![12, 8]),
                ("mlp.up_proj", vec![12, 8]),
                ("mlp.down_proj", vec![8, 12]),
            ] {
                expected.push(("block", layer, format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        if !tied {
            expected.push(("head", 0, norm.0, norm.1));
            expected.push(("head", 0, "lm_head.weight".into(), vec![10, 8]));
        }
        let expected: Vec<_> = expected.iter().map(|(a, b, c, d)| (*a, *b, c.as_str(), d.as_slice())).collect();
        assert_eq!(all, expected);
    }
}

/// As LlamaConfig and Qwen3Config of transformers 5.24 have them.
#[test]
fn missing_keys_have_the_defaults_of_transformers() {
    let shape = json!({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 100, "vocab_size": 50});
    let llama = Spec::from_hf(&with(shape.clone(), json!({"model_type": "llama"}))).unwrap();
    let plain = Rope { theta: 10_000.0, scaling: None };
    assert_eq!((llama.kv_heads, llama.head_dim, llama.max_positions), (4, 16, 2048));
    assert_eq!((llama.eps, llama.rope, llama.tied, llama.init_range), (1e-6, plain, false, 0.02));
    let qwen3 = Spec::from_hf(&with(shape, json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": null}))).unwrap();
    assert_eq!((qwen3.head_dim, qwen3.max_positions, qwen3.tied, qwen3.rope), (128, 32_768, false, plain));
}

/// https://github.com/huggingface/transformers/blob/main/MIGRATION_GUIDE_V5.md: rope_parameters
/// holds what rope_theta and rope_scaling held.
#[test]
fn rotary_parameters_are_read_as_old_and_new_transformers_write_them() {
    let base = with(llama31_8b(), json!({"rope_scaling": null, "rope_theta": null}));
    let old = |theta: Value, scaling: Value| with(base.clone(), json!({"rope_theta": theta, "rope_scaling": scaling}));
    let new = |parameters: Value| with(base.clone(), json!({"rope_parameters": parameters}));
    let rope = |config: &Value| Spec::from_hf(config).map(|spec| spec.rope).map_err(|error| error.to_string());
    let llama3 = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    let scaling = Scaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192 };
    let expected = Ok(Rope { theta: 5e5, scaling: Some(scaling) });
    assert_eq!(rope(&new(llama3.clone())), expected);
    assert_eq!(rope(&old(json!(500_000), llama3.clone())), expected);
    let linear = Ok(Rope { theta: 10_000.0, scaling: Some(Scaling::Linear { factor: 2.0 }) });
    assert_eq!(rope(&old(Value::Null, json!({"type": "linear", "factor": 2.0}))), linear);
    assert_eq!(rope(&new(json!({"rope_type": "linear", "factor": 2}))), linear);
    let plain = Ok(Rope { theta: 1e6, scaling: None });
    assert_eq!(rope(&new(json!({"rope_type": "default", "rope_theta": 1e6}))), plain);
    assert_eq!(rope(&with(new(json!({"rope_theta": 1e6})), json!({"rope_scaling": {}}))), plain);
    let mut short = llama3;
    short["original_max_position_embeddings"] = Value::Null;
    let Ok(Rope { scaling: Some(Scaling::Llama3 { original, .. }), .. }) = rope(&new(short)) else { panic!() };
    assert_eq!(original, 131_072, "then max_position_embeddings");
}

#[test]
fn what_is_not_trained_is_refused_by_key_and_value_with_what_is_possible() {
    let qwen3 = |changes: Value| with(qwen3_600m(), changes);
    let llama = |changes: Value| with(llama31_8b(), changes);
    let other = |architecture: &str, kind: &str| llama(json!({"architectures": [architecture], "model_type": kind}));
    let possible = "choose a dense LlamaForCausalLM or Qwen3ForCausalLM";
    for (config, parts) in [
        (other("MixtralForCausalLM", "mixtral"), ["\"MixtralForCausalLM\": a mixture of experts", possible]),
        (other("Qwen3MoeForCausalLM", "qwen3_moe"), ["\"Qwen3MoeForCausalLM\": a mixture of experts", possible]),
        (other("DeepseekV3ForCausalLM", "deepseek_v3"), ["\"DeepseekV3ForCausalLM\": a mixture of experts", possible]),
        (other("Llama4ForCausalLM", "llama4_text"), ["\"Llama4ForCausalLM\": a mixture of experts", possible]),
        (other("Qwen3NextForCausalLM", "qwen3_next"), ["\"Qwen3NextForCausalLM\": hybrid attention", possible]),
        (other("Qwen3_5ForCausalLM", "qwen3_5_text"), ["\"Qwen3_5ForCausalLM\": hybrid attention", possible]),
        (other("Qwen3_5MoeForCausalLM", "qwen3_5_moe"), ["\"Qwen3_5MoeForCausalLM\": hybrid attention", possible]),
        (other("LlamaForSequenceClassification", "llama"), ["LlamaForSequenceClassification", possible]),
        (other("GPT2LMHeadModel", "gpt2"), ["architectures=\"GPT2LMHeadModel\": this kind is not trained", possible]),
        (llama(json!({"model_type": "mistral"})), ["model_type=\"mistral\"", possible]),
        (llama(json!({"model_type": "qwen3"})), ["model_type=\"qwen3\"", "must agree"]),
        (
            llama(json!({"model_type": null, "architectures": null})),
            ["model_type and architectures are missing", possible],
        ),
        (qwen3(json!({"num_experts": 128})), ["num_experts=128: a mixture of experts", possible]),
        (llama(json!({"num_local_experts": 8})), ["num_local_experts=8: a mixture of experts", possible]),
        (llama(json!({"n_routed_experts": 256})), ["n_routed_experts=256: a mixture of experts", possible]),
        (qwen3(json!({"full_attention_interval": 4})), ["full_attention_interval=4: hybrid attention", possible]),
        (
            qwen3(json!({"layer_types": ["full_attention", "linear_attention"]})),
            ["layer_types[1]=\"linear_attention\": hybrid attention", "full attention in all layers"],
        ),
        (
            qwen3(json!({"layer_types": ["sliding_attention"]})),
            ["layer_types[0]=\"sliding_attention\": attention within a window", "full attention in all layers"],
        ),
        (qwen3(json!({"layer_types": ["full_attention"]})), ["layer_types names 1 layers", "num_hidden_layers=28"]),
        (
            qwen3(json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 14})),
            ["use_sliding_window=true and max_window_layers=14", "full attention in all layers"],
        ),
        (llama(json!({"attention_bias": true})), ["attention_bias=true", "choose a model without"]),
        (llama(json!({"mlp_bias": true})), ["mlp_bias=true", "choose a model without"]),
        (llama(json!({"hidden_act": "gelu"})), ["hidden_act=\"gelu\"", "choose a model with silu"]),
        (llama(json!({"attention_dropout": 0.1})), ["attention_dropout=0.1", "set it to 0"]),
        (
            llama(json!({"quantization_config": {"quant_method": "fp8"}})),
            ["quantization_config is there (\"fp8\")", "bf16 or f32 weights"],
        ),
        (
            llama(json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})),
            ["rope_scaling.rope_type=\"yarn\"", "default, linear and llama3"],
        ),
        (
            llama(json!({"rope_scaling": null, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})),
            ["rope_parameters.rope_type=\"dynamic\"", "default, linear and llama3"],
        ),
        (llama(json!({"rope_scaling": {"rope_type": "linear"}})), ["rope_scaling.factor is missing", "config.json"]),
        (llama(json!({"partial_rotary_factor": 0.5})), ["partial_rotary_factor=0.5", "set it to 1"]),
        (llama(json!({"num_key_value_heads": 5})), ["num_attention_heads=32", "num_key_value_heads=5"]),
        (llama(json!({"head_dim": 127})), ["head_dim=127 is odd", "even head_dim"]),
        (llama(json!({"hidden_size": 4095})), ["hidden_size=4095", "num_attention_heads=32"]),
        (llama(json!({"hidden_size": null})), ["hidden_size is missing", "add it"]),
        (llama(json!({"num_hidden_layers": 0})), ["num_hidden_layers=0 is not", "above 0"]),
        (llama(json!({"num_hidden_layers": 100_000})), ["num_hidden_layers=100000", "fewer layers"]),
        (llama(json!({"vocab_size": -1})), ["vocab_size=-1 is not", "correct it"]),
        (llama(json!({"vocab_size": 1u64 << 40})), ["vocab_size=1099511627776 is not", "correct it"]),
        (llama(json!({"vocab_size": 1u64 << 32})), ["vocab_size=4294967296", "32 bits"]),
        (
            llama(json!({"hidden_size": 1u64 << 32, "intermediate_size": 1u64 << 32})),
            ["hidden_size=4294967296", "choose a smaller shape"],
        ),
        (llama(json!({"rms_norm_eps": "1e-5"})), ["rms_norm_eps=\"1e-5\" is not", "a number above 0"]),
        (llama(json!({"rope_theta": 1e300})), ["rope_theta=1e+300 is not", "a number above 0"]),
        (llama(json!({"tie_word_embeddings": 1})), ["tie_word_embeddings=1 is not", "true or false"]),
        (json!([1]), ["holds no object", "config.json"]),
    ] {
        let text = refusal(&config);
        assert!(parts.iter().all(|part| text.contains(part)), "{text}\nshould say {parts:?}");
    }
}

#[test]
fn what_changes_nothing_is_accepted() {
    let layers: Vec<&str> = vec!["full_attention"; 28];
    for (base, changes) in [
        (qwen3_600m(), json!({"layer_types": layers})),
        (qwen3_600m(), json!({"num_experts": 0, "quantization_config": null})),
        (qwen3_600m(), json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 28})),
        (qwen3_600m(), json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0})),
        (qwen3_600m(), json!({"attention_dropout": 0, "some_key_of_tomorrow": [1, 2]})),
        (llama31_8b(), json!({"sliding_window": 4096})),
        (llama31_8b(), json!({"model_type": null})),
        (llama31_8b(), json!({"architectures": null})),
        (llama31_8b(), json!({"architectures": []})),
    ] {
        assert_eq!(Spec::from_hf(&with(base.clone(), changes.clone())), Spec::from_hf(&base), "{changes}");
    }
}

#[test]
fn what_is_written_is_read_again_as_it_was() {
    let linear = json!({"rope_scaling": {"rope_type": "linear", "factor": 2.5}, "rms_norm_eps": 3e-6});
    for config in [qwen3_600m(), llama31_8b(), with(llama31_8b(), linear)] {
        let spec = Spec::from_hf(&config).unwrap();
        let written = spec.to_hf();
        assert_eq!(Spec::from_hf(&written), Ok(spec));
        // As short as they were: no 9.999999974752427e-7.
        assert_eq!(written["rms_norm_eps"], config["rms_norm_eps"]);
        assert_eq!(written["initializer_range"], config["initializer_range"]);
    }
}

#[test]
fn no_value_of_any_key_panics() {
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(3),
        json!(0.5),
        json!(1e300),
        json!(-0.0),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1u64 << 32),
        json!((1u64 << 32) - 1),
        json!(""),
        json!("x".repeat(9999)),
        json!("a\nb"),
        json!([]),
        json!([null]),
        json!([[]]),
        json!({}),
        json!({"rope_type": 1}),
        json!({"rope_type": "llama3"}),
    ];
    for base in [qwen3_600m(), llama31_8b()] {
        let mut keys: Vec<String> = base.as_object().unwrap().keys().cloned().collect();
        keys.extend(["rope_parameters", "layer_types", "num_experts", "quantization_config"].map(String::from));
        for first in &keys {
            for second in ["hidden_size", "num_hidden_layers", "vocab_size", first] {
                for value in &odd {
                    let config = with(with(base.clone(), json!({second: value})), json!({first: value}));
                    match Spec::from_hf(&config) {
                        Err(_) => drop(refusal(&config)),
                        Ok(spec) => {
                            assert!(spec.parameters() > 0 && spec.parameters() < u64::MAX / 8);
                            assert!(spec.heads % spec.kv_heads == 0 && spec.head_dim % 2 == 0);
                            assert_eq!(Spec::from_hf(&spec.to_hf()), Ok(spec));
                        }
                    }
                }
            }
        }
    }
}

// First values.

fn tensor(name: &str, len: usize, init: Init) -> Tensor {
    Tensor { name: name.into(), shape: vec![len], offset: 0, init }
}

fn values(tensor: &Tensor, seed: u64) -> Vec<f32> {
    let mut all = vec![0.0; tensor.len()];
    initial(tensor, seed, 0..tensor.len(), &mut all);
    all
}

#[test]
fn first_values_do_not_depend_on_how_the_tensor_is_divided() {
    let tensor = tensor("model.layers.3.mlp.up_proj.weight", 1001, Init::Normal(0.02));
    let whole = values(&tensor, 42);
    for world in 1..=9usize {
        let part = 1001usize.div_ceil(world);
        let mut parts = Vec::new();
        for rank in 0..world {
            let range = (rank * part).min(1001)..((rank + 1) * part).min(1001);
            let mut own = vec![f32::NAN; range.len()];
            initial(&tensor, 42, range, &mut own);
            parts.extend(own);
        }
        assert_eq!(parts, whole, "{world} ranks");
    }
}

/// Computed by Python's math from SplitMix64, FNV-1a and Box and Muller's formula.
#[test]
fn first_values_are_the_same_in_every_release() {
    let found = values(&tensor("lm_head.weight", 20_000, Init::Normal(0.02)), 42);
    for (place, expected) in GOLDEN {
        let off = f64::from(found[place]) - expected;
        assert!(off.abs() < 2e-9, "[{place}]: {}, not {expected}", found[place]);
    }
}

#[test]
fn first_values_are_normal() {
    const COUNT: usize = 1_000_000;
    let found = values(&tensor("model.embed_tokens.weight", COUNT, Init::Normal(0.02)), 1);
    let z: Vec<f64> = found.iter().map(|x| f64::from(*x) / 0.02).collect();
    let moment = |power: i32| z.iter().map(|z| z.powi(power)).sum::<f64>() / COUNT as f64;
    // Five standard errors: 1, √2, √15 and √96 by √COUNT.
    let near = |found: f64, expected: f64, spread: f64| (found - expected).abs() < 5.0 * spread / (COUNT as f64).sqrt();
    assert!(near(moment(1), 0.0, 1.0), "mean {}", moment(1));
    assert!(near(moment(2), 1.0, 2f64.sqrt()), "variance {}", moment(2));
    assert!(near(moment(3), 0.0, 15f64.sqrt()), "third moment {}", moment(3));
    assert!(near(moment(4), 3.0, 96f64.sqrt()), "fourth moment {}", moment(4));
    // Neighbours, of one pair and of two, have nothing to do with each other.
    for distance in [1, 2, 3, 1000] {
        let product: f64 = z.iter().zip(&z[distance..]).map(|(a, b)| a * b).sum::<f64>() / COUNT as f64;
        assert!(near(product, 0.0, 1.0), "{distance} apart: {product}");
    }
    let beyond = z.iter().filter(|z| z.abs() > 3.0).count() as f64 / COUNT as f64;
    assert!((beyond - 0.0027).abs() < 0.0003, "beyond three deviations: {beyond}");
}

#[test]
fn first_values_differ_by_seed_and_name_and_norms_begin_at_one() {
    let normal = |name: &str, seed| values(&tensor(name, 100, Init::Normal(0.02)), seed);
    let first = normal("model.layers.0.mlp.up_proj.weight", 1);
    for other in [normal("model.layers.0.mlp.up_proj.weight", 2), normal("model.layers.1.mlp.up_proj.weight", 1)] {
        assert!(first.iter().zip(&other).all(|(a, b)| a != b));
    }
    assert_eq!(values(&tensor("model.norm.weight", 5, Init::Ones), 9), [1.0; 5]);
}

const GOLDEN: [(usize, f64); 4] = [
    (0, -0.029688892390310594),
    (1, -0.021185600706226406),
    (2, -0.0008322367299480478),
    (12345, 0.0027451631681036535),
];
