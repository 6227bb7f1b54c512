//! A directory of token shards as `palingenesis-worker prepare` makes it: `data.json` says
//! what is in it, the shards are mapped, and sequences are cut from them as if they were one.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::shard::Shard;
use super::{Check, DataError, Result, io, wrong};

/// The file that describes the directory.
pub const ABOUT: &str = "data.json";
const FORMAT: &str = "palingenesis-tokens";
const VERSION: u32 = 1;

/// What data.json says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct About {
    format: String,
    version: u32,
    pub tokenizer: Tokenizer,
    /// Ids are below this.
    pub vocab: usize,
    /// The id after each document.
    pub eos: u32,
    pub tokens: u64,
    pub documents: u64,
    pub shards: Vec<ShardAbout>,
    /// Where the text came from; nothing depends on it.
    pub sources: Vec<Source>,
}

/// Which tokenizer made the ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tokenizer {
    /// "bytes", or the path that was given to prepare.
    pub name: String,
    /// Of tokenizer.json, as sha256sum prints it.
    pub sha256: String,
    /// In this directory: tokenizer.json and what Hugging Face keeps beside it.
    pub files: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardAbout {
    pub file: String,
    pub tokens: u64,
    /// Of the whole file, eight hexadecimal digits.
    pub crc32: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Source {
    pub file: String,
    pub bytes: u64,
    pub documents: u64,
}

impl About {
    /// Of this version.
    pub fn new(tokenizer: Tokenizer, vocab: usize, eos: u32) -> About {
        let (format, version) = (FORMAT.into(), VERSION);
        let (shards, sources) = (Vec::new(), Vec::new());
        About { format, version, tokenizer, vocab, eos, tokens: 0, documents: 0, shards, sources }
    }

    fn read(dir: &Path) -> Result<About> {
        let path = dir.join(ABOUT);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let what = if dir.is_dir() { "has no data.json" } else { "is no directory" };
                return wrong(format!(
                    "data directory {} {what}; make it with palingenesis-worker prepare --out {} FILE...",
                    dir.display(),
                    dir.display()
                ));
            }
            read => read.map_err(io("cannot be read", &path))?,
        };
        let damaged = |why: String| DataError::Wrong(format!("{}: {why}; prepare the data again", path.display()));
        // The version first: a later one may have other keys.
        let json: serde_json::Value = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if json["format"] != FORMAT {
            return Err(damaged(format!("its format is not \"{FORMAT}\"")));
        }
        if json["version"] != VERSION {
            return Err(damaged(format!(
                "its version is {}, but this worker reads {VERSION}; take the worker that made it",
                json["version"]
            )));
        }
        let about: About = serde_json::from_value(json).map_err(|error| damaged(error.to_string()))?;
        let names = about.shards.iter().map(|shard| &shard.file).chain(&about.tokenizer.files);
        if let Some(name) = names.into_iter().find(|name| !is_name(name)) {
            return Err(damaged(format!("'{}' is no name of a file in it", palingenesis::config::printable(name))));
        }
        Ok(about)
    }
}

/// A file name without directories.
fn is_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// Token shards, open for reading.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    about: About,
    shards: Vec<Shard>,
    /// The number of each shard's first token, and that after the last one's last.
    firsts: Vec<u64>,
}

impl Dataset {
    /// Maps the shards of `dir` and checks headers and sizes; their contents are checked by
    /// [`Dataset::verify`].
    ///
    /// # Errors
    /// There is no such data, or a file of it is missing or damaged, which is then named.
    pub fn open(dir: &Path) -> Result<Dataset> {
        let about = About::read(dir)?;
        let mut shards = Vec::with_capacity(about.shards.len());
        let mut firsts = vec![0];
        let mut total = 0u64;
        for told in &about.shards {
            let path = dir.join(&told.file);
            let shard = Shard::open(&path)?;
            if shard.tokens() != told.tokens {
                return wrong(format!(
                    "{}: {} tokens, but {} by data.json; prepare the data again",
                    path.display(),
                    shard.tokens(),
                    told.tokens
                ));
            }
            total += shard.tokens();
            firsts.push(total);
            shards.push(shard);
        }
        if total != about.tokens {
            return wrong(format!(
                "{}: its shards have {total} tokens together, but {} are told; prepare the data again",
                dir.join(ABOUT).display(),
                about.tokens
            ));
        }
        Ok(Dataset { dir: dir.into(), about, shards, firsts })
    }

    /// Tokens in all shards.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.about.tokens
    }

    /// Ids are below this; a model's vocabulary must have as many.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.about.vocab
    }

    /// The id after each document.
    #[must_use]
    pub fn eos(&self) -> u32 {
        self.about.eos
    }

    /// tokenizer.json and what belongs to it, for the export.
    #[must_use]
    pub fn tokenizer_files(&self) -> Vec<PathBuf> {
        self.about.tokenizer.files.iter().map(|file| self.dir.join(file)).collect()
    }

    /// Stands for the tokens, wherever they lie: equal when a training may go on with them.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let mut hash = hmac_sha256::Hash::new();
        hash.update(format!("{} {} {}", FORMAT, self.about.vocab, self.about.eos));
        for shard in &self.about.shards {
            hash.update(format!("\n{} {}", shard.tokens, shard.crc32));
        }
        hex(&hash.finalize())
    }

    /// Sequences of `seq_len` + 1 tokens, each beginning with its predecessor's last one.
    #[must_use]
    pub fn samples(&self, seq_len: usize) -> u64 {
        self.tokens().saturating_sub(1) / (seq_len.max(1) as u64)
    }

    /// As [`Dataset::samples`], at least one.
    ///
    /// # Errors
    /// The data is shorter than one sequence.
    pub fn enough(&self, seq_len: usize) -> Result<u64> {
        match self.samples(seq_len) {
            0 => wrong(format!(
                "data directory {} has {} tokens, too few for one sequence of train.seq_len = {seq_len} and its next \
                 token; take more text or a smaller seq_len",
                self.dir.display(),
                self.tokens()
            )),
            samples => Ok(samples),
        }
    }

    /// Sequence `index` below [`Dataset::samples`], also across the border of shards:
    /// `inputs` are its tokens, `targets` (equally many) the ones that follow each.
    ///
    /// # Errors
    /// An id outside of the vocabulary: the shard is damaged, and named.
    ///
    /// # Panics
    /// With lengths that differ, or no such sequence.
    pub fn sample(&self, index: u64, inputs: &mut [u32], targets: &mut [u32]) -> Result<()> {
        let n = inputs.len();
        assert!(n > 0 && n == targets.len() && index < self.samples(n), "no sample {index} of {n} tokens");
        let start = index * n as u64;
        self.read(start + 1, targets)?;
        self.read(start, &mut inputs[..1])?;
        inputs[1..].copy_from_slice(&targets[..n - 1]);
        Ok(())
    }

    /// The tokens that begin with the `start`-th.
    fn read(&self, start: u64, ids: &mut [u32]) -> Result<()> {
        let mut done = 0;
        while done < ids.len() {
            let at = start + done as u64;
            let which = self.firsts.partition_point(|first| *first <= at) - 1;
            let some = usize::try_from(self.firsts[which + 1] - at).unwrap_or(usize::MAX).min(ids.len() - done);
            let ids = &mut ids[done..done + some];
            self.shards[which].read(at - self.firsts[which], ids);
            if let Some(place) = ids.iter().position(|id| *id as usize >= self.about.vocab) {
                return wrong(format!(
                    "{}: damaged: token {} has id {}, but the vocabulary ends at {}; prepare the data again",
                    self.shards[which].path().display(),
                    at - self.firsts[which] + place as u64,
                    ids[place],
                    self.about.vocab
                ));
            }
            done += some;
        }
        Ok(())
    }

    /// What reads shards in full and compares their checksums: the `part`-th, from 0, of
    /// `parts` equal parts of them, so that ranks can share the work.
    #[must_use]
    pub fn check(&self, part: usize, parts: usize) -> Check {
        let shards = self.about.shards.iter().skip(part).step_by(parts.max(1));
        let shards = shards.map(|shard| (shard.file.clone(), shard.crc32.clone())).collect();
        Check { directory: self.dir.clone(), shards }
    }

    /// The same at once.
    ///
    /// # Errors
    /// Names every damaged one.
    pub fn verify(&self, part: usize, parts: usize) -> Result<()> {
        self.check(part, parts).run(&AtomicBool::new(false))
    }

    /// Of all shards, with their headers.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(Shard::bytes).sum()
    }
}

/// As sha256sum prints it.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
