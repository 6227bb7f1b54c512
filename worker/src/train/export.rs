//! What goes with an exported model beside its tensors and its shape: the tokens that have
//! a meaning, and files. Nothing here is part of a training's identity.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::checkpoint::tokenizer_files;
use crate::config::Config;

/// Keys of config.json.
const BEGIN: &str = "bos_token_id";
const END: &str = "eos_token_id";
const PADDING: &str = "pad_token_id";

/// How the model was told to generate.
const GENERATION: &str = "generation_config.json";

/// Of config.json. A model that weights were taken from keeps its own, and so does a shape
/// that names some; a model that has begun from the seed knows only `end`, with which the
/// data ends each document.
pub fn special_tokens(config: &Config, described: &Value, end: u32) -> Map<String, Value> {
    let begun_from_weights = config.model.path.is_some() && !config.model.random_init;
    let mut tokens = Map::new();
    if !begun_from_weights {
        // Without null transformers assumes ids of its own for some families.
        tokens.insert(BEGIN.into(), Value::Null);
        tokens.insert(END.into(), json!(end));
    }
    if begun_from_weights || config.model.shape.is_some() {
        let own = [BEGIN, END, PADDING].map(|key| (key, described.get(key)));
        tokens.extend(own.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?.clone()))));
    }
    tokens
}

/// `shape` as a config.json with these tokens. One that the model's own config.json had not
/// stays out: then it is what transformers takes for the family.
pub fn config_json(mut shape: Value, special: &Map<String, Value>) -> Value {
    if let Value::Object(keys) = &mut shape {
        keys.retain(|key, _| ![BEGIN, END, PADDING].contains(&key.as_str()));
        keys.extend(special.clone());
    }
    shape
}

/// The tokenizer that made the data, given as `of_data`, else the model's; and how the model
/// that weights were taken from was told to generate.
pub fn companions(config: &Config, of_data: Vec<PathBuf>) -> Vec<PathBuf> {
    let Some(path) = config.model.path.as_deref() else { return of_data };
    if of_data.is_empty() {
        return tokenizer_files(&[path]);
    }
    let generation = path.join(GENERATION);
    let more = (!config.model.random_init && generation.is_file()).then_some(generation);
    of_data.into_iter().chain(more).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(model: &str) -> Config {
        let text = format!(
            "[model]\n{model}\n[data]\npath = \"d\"\n[train]\noutput_dir = \"o\"\nsteps = 1\nseq_len = 1\nglobal_batch_size = 1\n"
        );
        Config::parse(Path::new("x.toml"), &text, &[], &|_| None).unwrap()
    }

    #[test]
    fn weights_bring_their_tokens_and_the_seed_only_the_data_s_end() {
        let described = json!({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": null, "vocab_size": 9});
        let tokens = |model: &str| Value::Object(special_tokens(&config(model), &described, 8));
        let own = json!({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": null});
        assert_eq!(tokens("path = \"m\""), own);
        assert_eq!(tokens("path = \"m\"\nrandom_init = true"), json!({"bos_token_id": null, "eos_token_id": 8}));
        assert_eq!(tokens("shape = { model_type = \"llama\", eos_token_id = 2 }"), own);
        let silent = special_tokens(&config("shape = { model_type = \"llama\" }"), &json!({}), 8);
        assert_eq!(Value::Object(silent), json!({"bos_token_id": null, "eos_token_id": 8}));
    }
}
