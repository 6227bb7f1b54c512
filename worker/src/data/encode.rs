//! Text to token ids: by a Hugging Face tokenizer.json, or byte by byte.

use std::fs;
use std::path::{Path, PathBuf};

use palingenesis::config::printable;
use tokenizers::Tokenizer as HfTokenizer;

use super::dataset::{Tokenizer, hex};
use super::documents::Piece;
use super::{DataError, Result, io, wrong};

/// The token after a document of bytes.
const BYTES_EOS: &str = "<|endoftext|>";
/// Says of which class a tokenizer is.
const CONFIG: &str = "tokenizer_config.json";
/// What Hugging Face keeps beside tokenizer.json, for whoever loads the trained model.
const BESIDE: [&str; 6] =
    [CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"];
/// Names that ends of text have, where tokenizer_config.json names none.
const USUAL_EOS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>"];

/// A tokenizer.
pub struct Encoder {
    /// None: bytes.
    tokenizer: Option<HfTokenizer>,
    /// Ids are below this.
    pub vocab: usize,
    /// The id after a document.
    pub eos: u32,
    name: String,
    /// Names and contents; tokenizer.json is the first.
    files: Vec<(String, Vec<u8>)>,
}

impl Encoder {
    /// A token for each byte, and one for the end of a text.
    pub fn bytes() -> Encoder {
        let files = vec![
            ("tokenizer.json".to_string(), bytes_tokenizer().to_string().into_bytes()),
            (CONFIG.to_string(), plain_config(BYTES_EOS)),
        ];
        Encoder { tokenizer: None, vocab: 257, eos: 256, name: "bytes".into(), files }
    }

    /// From a tokenizer.json or the directory that has it. `eos` is the token after each
    /// document; else the one of tokenizer_config.json.
    pub fn open(path: &Path, eos: Option<&str>) -> Result<Encoder> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let content = fs::read(&path).map_err(io("cannot be read", &path))?;
        let mut tokenizer = HfTokenizer::from_bytes(&content).map_err(|error| {
            DataError::Wrong(format!(
                "{}: no tokenizer.json of Hugging Face: {}; transformers writes one with \
                 AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)",
                path.display(),
                printable(&error.to_string())
            ))
        })?;
        // Many files hold the truncation of the program that saved them, which would cut
        // every document without a word.
        let _ = tokenizer.with_padding(None).with_truncation(None);
        // "<|endoftext|>" in a text is text: only we end documents.
        tokenizer.set_encode_special_tokens(true);
        let ids = tokenizer.get_vocab(true);
        let Some(vocab) = ids.values().max().map(|most| *most as usize + 1) else {
            return wrong(format!("{}: a tokenizer without tokens", path.display()));
        };
        let beside = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let eos = find_eos(&tokenizer, &path, &beside, eos)?;
        let mut files = vec![("tokenizer.json".to_string(), content)];
        for name in BESIDE {
            let file = beside.join(name);
            if file.is_file() {
                files.push((name.to_string(), fs::read(&file).map_err(io("cannot be read", &file))?));
            }
        }
        // Without it transformers takes the class of the model's family, which splits text in
        // that family's way, whatever tokenizer.json says.
        if let Some(token) = tokenizer.id_to_token(eos).filter(|_| files.iter().all(|(name, _)| name != CONFIG)) {
            files.push((CONFIG.to_string(), plain_config(&token)));
        }
        let name = path.display().to_string();
        Ok(Encoder { tokenizer: Some(tokenizer), vocab, eos, name, files })
    }

    /// What data.json says of it.
    pub fn about(&self) -> Tokenizer {
        let sha256 = self.files.first().map(|(_, content)| hex(&hmac_sha256::Hash::hash(content)));
        let files = self.files.iter().map(|(name, _)| name.clone()).collect();
        Tokenizer { name: self.name.clone(), sha256: sha256.unwrap_or_default(), files }
    }

    /// Names and contents of the files that belong to it.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// The ids of a piece of `file`, with the end of text where the document ends.
    pub fn encode(&self, file: &Path, piece: &Piece) -> Result<Vec<u32>> {
        let mut ids = match &self.tokenizer {
            None => piece.text.iter().map(|byte| u32::from(*byte)).collect(),
            Some(tokenizer) => {
                let place = |at: usize| {
                    let lines = piece.text[..at].iter().filter(|byte| **byte == b'\n').count() as u64;
                    format!("{}:{}", file.display(), piece.line + lines)
                };
                let text = std::str::from_utf8(&piece.text).map_err(|error| {
                    DataError::Wrong(format!(
                        "{}: not UTF-8; convert the file (iconv -f latin1 -t utf-8, for one) or train on --bytes",
                        place(error.valid_up_to())
                    ))
                })?;
                let encoded = tokenizer.encode_fast(text, false);
                let encoded = encoded.map_err(|error| {
                    DataError::Wrong(format!("{}: cannot be tokenized: {}", place(0), printable(&error.to_string())))
                })?;
                encoded.get_ids().to_vec()
            }
        };
        if piece.ends {
            ids.push(self.eos);
        }
        Ok(ids)
    }
}

/// The id after a document.
fn find_eos(tokenizer: &HfTokenizer, path: &Path, beside: &Path, asked: Option<&str>) -> Result<u32> {
    if let Some(token) = asked {
        return tokenizer
            .token_to_id(token)
            .map_or_else(|| wrong(format!("--eos '{}' is no token of {}", printable(token), path.display())), Ok);
    }
    let config: PathBuf = beside.join(CONFIG);
    if config.is_file() {
        let text = fs::read(&config).map_err(io("cannot be read", &config))?;
        let json: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|error| DataError::Wrong(format!("{}: not JSON: {error}", config.display())))?;
        let named = &json["eos_token"];
        if let Some(token) = named.as_str().or_else(|| named["content"].as_str()) {
            return tokenizer.token_to_id(token).map_or_else(
                || {
                    let token = printable(token);
                    wrong(format!(
                        "{}: its eos_token '{token}' is no token of {}; name another with --eos TOKEN",
                        config.display(),
                        path.display()
                    ))
                },
                Ok,
            );
        }
    }
    USUAL_EOS.into_iter().find_map(|token| tokenizer.token_to_id(token)).map_or_else(
        || {
            wrong(format!(
                "{}: no end of text is known (no tokenizer_config.json beside it with an eos_token, and none of {}); \
                 name one with --eos TOKEN",
                path.display(),
                USUAL_EOS.join(", ")
            ))
        },
        Ok,
    )
}

/// tokenizer_config.json of a tokenizer that is what its tokenizer.json says.
fn plain_config(eos: &str) -> Vec<u8> {
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": false,
    });
    config.to_string().into_bytes()
}

/// A tokenizer.json whose ids are the bytes, so that what is trained on bytes loads
/// elsewhere like any model.
fn bytes_tokenizer() -> serde_json::Value {
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    let vocab: serde_json::Map<String, serde_json::Value> =
        byte_names().into_iter().enumerate().map(|(byte, name)| (name.to_string(), byte.into())).collect();
    serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 256, "content": BYTES_EOS, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

/// How GPT-2 writes bytes: printable ones of Latin-1 as themselves, the others, in their
/// order, as the characters from U+0100.
fn byte_names() -> [char; 256] {
    let mut others = 0x100..;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte as u32 } else { others.next().unwrap_or_default() };
        char::from_u32(code).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::super::documents::{Documents, Split};
    use super::*;

    #[test]
    fn the_tokenizer_of_bytes_gives_bytes_and_takes_them_back() {
        let encoder = Encoder::bytes();
        let theirs = HfTokenizer::from_bytes(&encoder.files()[0].1).unwrap();
        let text = "A\n\tz \u{e9}\u{20ac}\u{1f600}\0\u{7f}\u{ad}";
        let ids = theirs.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        let piece = Piece { text: text.into(), ends: false, line: 1 };
        assert_eq!(encoder.encode(Path::new("x"), &piece).unwrap(), ids);
        assert_eq!(theirs.decode(&ids, false).unwrap(), text);
        assert_eq!(theirs.token_to_id("<|endoftext|>"), Some(encoder.eos));
        assert_eq!(theirs.get_vocab_size(true), encoder.vocab);
    }
    #[test]
    fn pieces_of_a_document_have_its_tokens() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer");
        let encoder = Encoder::open(&fixture, None).unwrap();
        let text = fs::read(fixture.join("text.txt")).unwrap().repeat(2);
        let ids = |piece: usize| {
            let input = Box::new(std::io::Cursor::new(text.clone()));
            let mut documents = Documents::new(Path::new("x"), input, Split::Files, piece).unwrap();
            let (mut ids, mut pieces) = (Vec::new(), 0);
            while let Some(piece) = documents.next().unwrap() {
                ids.extend(encoder.encode(Path::new("x"), &piece).unwrap());
                pieces += 1;
            }
            (ids, pieces)
        };
        let (whole, 1) = ids(text.len()) else { panic!("more than one piece") };
        for piece in [150, 200, 333, 512, 1000, 1500, 2500] {
            let (cut, pieces) = ids(piece);
            assert!(pieces > 1 && cut == whole, "pieces of {piece} bytes");
        }
    }
}
