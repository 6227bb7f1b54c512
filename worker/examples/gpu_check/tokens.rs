//! A text of words that have no meaning, and a tokenizer of as many tokens as a real one, so
//! that a training without network looks up as many different rows of its embedding.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::ops::Random;

/// The end of a text.
const END: &str = "<|endoftext|>";

/// Writes tokenizer.json with ids below `vocab`, and text.txt with `count` tokens.
pub fn write(dir: &Path, vocab: u32, count: usize) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{}: {error}", dir.display());
    fs::create_dir_all(dir).map_err(told)?;
    let end = vocab.saturating_sub(1);
    let mut words: Map<String, Value> = (0..end).map(|id| (format!("w{id}"), json!(id))).collect();
    words.insert(END.into(), json!(end));
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null,
        "added_tokens": [{"id": end, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": END},
    });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).map_err(told)?;
    let mut text = Vec::new();
    for (at, id) in Random(7).below(count, end.max(1)).iter().enumerate() {
        write!(text, "w{id}{}", if at % 16 == 15 { '\n' } else { ' ' }).map_err(told)?;
    }
    fs::write(dir.join("text.txt"), text).map_err(told)
}
