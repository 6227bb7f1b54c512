//! What makes a training the one that it is. Its checkpoints keep this, so that whoever goes
//! on with them can tell what was changed meanwhile.

use std::fmt;

use palingenesis::config::printable;
use serde_json::{Map, Value, json};

use super::Config;
use super::keys::{self, Weight};

/// Keys of config.json that a training may go on without.
const LOOSE: [&str; 2] = ["initializer_range", "max_position_embeddings"];

impl Config {
    /// The model as a config.json, the data's [`crate::data::Dataset::fingerprint`], and the
    /// keys that change what is computed. Where files lie is none of it.
    #[must_use]
    pub fn identity(&self, model: &Value, data: &str) -> Value {
        let train = &self.train;
        json!({
            "model": model,
            "data": data,
            "data.shuffle": self.data.shuffle,
            "train.steps": train.steps,
            "train.global_batch_size": train.global_batch_size,
            "train.seq_len": train.seq_len,
            "train.lr": train.lr,
            "train.min_lr": train.min_lr,
            "train.warmup_steps": train.warmup_steps,
            "train.grad_clip": train.grad_clip,
            "train.weight_decay": train.weight_decay,
            "train.beta1": train.beta1,
            "train.beta2": train.beta2,
            "train.eps": train.eps,
            "train.seed": train.seed,
        })
    }
}

/// SHA-256 of an identity, in hexadecimal digits: the same wherever the identity is.
#[must_use]
pub fn hash(identity: &Value) -> String {
    let mut text = String::new();
    canonical(identity, &mut text);
    hmac_sha256::Hash::hash(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// JSON with sorted keys; serde_json keeps another order with one of its features.
fn canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            text.push('{');
            for key in keys {
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                canonical(&map[key], text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Array(list) => {
            text.push('[');
            for value in list {
                canonical(value, text);
                text.push(',');
            }
            text.push(']');
        }
        plain => text.push_str(&plain.to_string()),
    }
}

/// A difference between two identities.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// "train.lr", "model.hidden_size", "data".
    pub key: String,
    /// Its value in the checkpoint; null where it had none.
    pub old: Value,
    /// Its value now.
    pub new: Value,
    /// Whether the training cannot go on: the checkpoint's weights or its place in the data
    /// mean something else now. Otherwise it goes on in another way.
    pub fixed: bool,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key == "data" {
            return f.write_str("the tokens of data.path are others");
        }
        let text = |value: &Value| match value {
            Value::Null => "nothing".to_string(),
            value => printable(&value.to_string()),
        };
        write!(f, "{} was {} and is {}", self.key, text(&self.old), text(&self.new))
    }
}

/// What differs between a checkpoint's identity and today's, those that cannot be first.
#[must_use]
pub fn changed(old: &Value, new: &Value) -> Vec<Change> {
    let (old, new) = (flat(old), flat(new));
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    let null = Value::Null;
    let mut changes = Vec::new();
    for key in keys {
        let (old, new) = (old.get(key).unwrap_or(&null), new.get(key).unwrap_or(&null));
        if !same(old, new) {
            changes.push(Change { key: key.clone(), old: old.clone(), new: new.clone(), fixed: fixed(key) });
        }
    }
    changes.sort_by_key(|change| !change.fixed);
    changes
}

/// The keys of the model beside the others.
fn flat(identity: &Value) -> Map<String, Value> {
    let mut flat = Map::new();
    for (key, value) in identity.as_object().into_iter().flatten() {
        match value {
            Value::Object(model) if key == "model" => {
                flat.extend(model.iter().map(|(key, value)| (format!("model.{key}"), value.clone())));
            }
            _ => {
                flat.insert(key.clone(), value.clone());
            }
        }
    }
    flat
}

/// 1 and 1.0 are the same number.
fn same(old: &Value, new: &Value) -> bool {
    match (old, new) {
        (Value::Number(old), Value::Number(new)) => {
            old == new || old.as_f64() == new.as_f64() && (old.is_f64() || new.is_f64())
        }
        _ => old == new,
    }
}

fn fixed(key: &str) -> bool {
    let (section, name) = key.split_once('.').unwrap_or(("", key));
    match keys::find(section, name) {
        Some(key) => key.weight == Weight::Fixed,
        None => !(section == "model" && LOOSE.contains(&name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn identity(overrides: &[&str], model: &Value, data: &str) -> Value {
        let text = "model:\n  path: m\ndata:\n  path: d\ntrain:\n  output_dir: o\n  steps: 10\n  seq_len: 8\n  global_batch_size: 4\n";
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let config = Config::parse(Path::new("x.yaml"), text, &overrides, &|_| None).unwrap();
        config.identity(model, data)
    }

    #[test]
    fn holds_every_key_that_is_not_free() {
        let identity = identity(&[], &json!({"hidden_size": 8}), "d");
        for key in keys::KEYS {
            let name = format!("{}.{}", key.section, key.name);
            assert_eq!(identity.get(&name).is_some(), key.weight != Weight::Free, "{name}");
        }
    }

    #[test]
    fn changes_are_told_and_weighed() {
        let model = json!({"hidden_size": 8, "initializer_range": 0.02});
        let old = identity(&["train.lr=1"], &model, "d");
        assert_eq!(changed(&old, &identity(&["train.lr=1.0", "train.output_dir=p", "data.path=e"], &model, "d")), []);
        let wider = json!({"hidden_size": 16, "initializer_range": 0.01});
        let new = identity(&["train.lr=2", "train.seed=1"], &wider, "e");
        let told: Vec<(String, bool)> =
            changed(&old, &new).iter().map(|change| (change.to_string(), change.fixed)).collect();
        let expected = [
            ("the tokens of data.path are others", true),
            ("model.hidden_size was 8 and is 16", true),
            ("train.seed was 0 and is 1", true),
            ("model.initializer_range was 0.02 and is 0.01", false),
            ("train.lr was 1.0 and is 2.0", false),
        ];
        assert_eq!(told, expected.map(|(text, fixed)| (text.to_string(), fixed)));
    }

    #[test]
    fn the_hash_knows_no_order_and_survives_a_file() {
        let one: Value = serde_json::from_str("{\"b\":[1,{\"d\":2,\"c\":3e-4}],\"a\":\"x\"}").unwrap();
        let other: Value = serde_json::from_str("{\"a\":\"x\",\"b\":[1,{\"c\":0.0003,\"d\":2}]}").unwrap();
        assert_eq!(hash(&one), hash(&other));
        // printf '{"a":"x","b":[1,{"c":0.0003,"d":2,},],}' | sha256sum
        assert_eq!(hash(&one), "f06b98d0844b3a67ef6be0160c46a5eba872dfef0035ac80be7a3b1dc4dd0173");
        assert_ne!(hash(&one), hash(&json!({"a": "x"})));
    }
}
