//! A tiny model on a little text of this repository, for tests of whole trainings.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod port;
pub mod ranks;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use palingenesis_worker::comm::local::Local;
use palingenesis_worker::config::Config;
use palingenesis_worker::data::prepare;
use palingenesis_worker::engine::Cpu;
use palingenesis_worker::train::{End, Job, run};

/// A directory of a test's own, removed at its end.
pub struct Place(PathBuf);

impl Place {
    /// With data and a configuration.
    pub fn new(name: &str) -> Place {
        let place = Place(std::env::temp_dir().join(format!("palingenesis-train-{name}-{}", std::process::id())));
        let _ = fs::remove_dir_all(&place.0);
        fs::create_dir_all(&place.0).unwrap();
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
        let args = prepare::PrepareArgs {
            out: place.dir("data"),
            tokenizer: None,
            bytes: true,
            eos: None,
            split: None,
            key: None,
            shard_tokens: 1_000_000,
            files: vec![text],
        };
        prepare::run(&args).unwrap();
        fs::write(place.config(), CONFIG.replace("PLACE", place.0.to_str().unwrap())).unwrap();
        place
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn config(&self) -> PathBuf {
        self.0.join("train.toml")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const CONFIG: &str = r#"
[model.shape]
model_type = "qwen3"
vocab_size = 257
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
intermediate_size = 56
max_position_embeddings = 256
tie_word_embeddings = true
rms_norm_eps = 1e-6

[data]
path = "PLACE/data"

[train]
output_dir = "PLACE/output"
steps = 30
micro_batch_size = 2
global_batch_size = 6
seq_len = 32
lr = 3e-3
min_lr = 3e-4
warmup_steps = 5
log_every = 1
threads = 1

[checkpoint]
every = 0
"#;

/// Trains with ranks that are threads.
pub fn train(world: u32, place: &Place, overrides: &[&str]) {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_string()).collect();
    let config = Config::read(&place.config(), &overrides).unwrap();
    std::thread::scope(|scope| {
        for mut comm in Local::group(world) {
            let config = &config;
            scope.spawn(move || {
                let job = Job { config, host: "here", launch: None, started: Instant::now() };
                let engine = Cpu::new(Some(1));
                assert_eq!(run(&engine, &mut comm, &job).unwrap(), End::Done);
            });
        }
    });
}

/// Copies a directory.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// All losses that a training told, by step; of a step told twice the later.
pub fn losses(output: &Path) -> Vec<(u64, f64)> {
    let mut losses = std::collections::BTreeMap::new();
    for line in fs::read_to_string(output.join("metrics.jsonl")).unwrap().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        if line["event"] == "step" {
            losses.insert(line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap());
        }
    }
    losses.into_iter().collect()
}

/// Small and deterministic (<https://prng.di.unimi.it/splitmix64.c>).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// From 0 to below 1.
    pub fn part(&mut self) -> f64 {
        self.below(1 << 32) as f64 / (1u64 << 32) as f64
    }
}
