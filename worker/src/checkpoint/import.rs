//! Weights from a Hugging Face directory: `model.safetensors`, or several files by
//! `model.safetensors.index.json`; f32, bf16 or f16 become f32, straight into a rank's part.
//! Headers are read when it is opened, numbers only where they are asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;

use super::{CheckpointError, PartMut, Result, why};

const ONE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The safetensors crate's own limit for a header.
const LONGEST: u64 = 100_000_000;
/// Bytes read at once.
const BLOCK: usize = 1 << 18;
/// Names of tensors in an error.
const MOST_NAMED: usize = 5;
/// The output projection, which tied models do without.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

#[derive(Debug)]
struct Stored {
    file: usize,
    at: u64,
    dtype: Dtype,
    shape: Vec<usize>,
}

/// A directory of weights.
#[derive(Debug)]
pub struct Import {
    directory: PathBuf,
    files: Vec<(String, File)>,
    tensors: BTreeMap<String, Stored>,
}

impl Import {
    /// Opens the files and reads their headers.
    ///
    /// # Errors
    /// Refused: there are no safetensors, or a type of numbers that is not read. Damaged: a
    /// header or the index does not fit the files. Storage: a file cannot be read.
    pub fn open(directory: &Path) -> Result<Import> {
        let mut import = Import { directory: directory.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        let Some(index) = import.index()? else {
            import.add(ONE)?;
            return Ok(import);
        };
        let names: BTreeSet<&String> = index.values().collect();
        for name in names {
            if name.contains('/') || !name.ends_with(".safetensors") {
                return Err(
                    import.damaged(INDEX, &format!("it names {name:?}, which is no safetensors file beside it"))
                );
            }
            import.add(name)?;
        }
        for (tensor, file) in &index {
            match import.tensors.get(tensor) {
                Some(stored) if import.files[stored.file].0 == *file => {}
                _ => return Err(import.damaged(INDEX, &format!("it says that {tensor} is in {file}, and it is not"))),
            }
        }
        Ok(import)
    }

    /// Which file has which tensor; nothing where there is one file.
    fn index(&self) -> Result<Option<BTreeMap<String, String>>> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        if self.directory.join(ONE).is_file() {
            return Ok(None);
        }
        let path = self.directory.join(INDEX);
        if !path.is_file() {
            return Err(CheckpointError::Refused(format!(
                "{} has neither {ONE} nor {INDEX}; give model.path a directory with safetensors, or set model.random_init = true",
                self.directory.display()
            )));
        }
        let bytes = std::fs::read(&path).map_err(|error| self.storage(INDEX, &error))?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|error| self.damaged(INDEX, &error.to_string()))?;
        Ok(Some(index.weight_map))
    }

    fn add(&mut self, name: &str) -> Result<()> {
        let file = File::open(self.directory.join(name)).map_err(|error| self.storage(name, &error))?;
        let length = file.metadata().map_err(|error| self.storage(name, &error))?.len();
        let mut eight = [0; 8];
        file.read_exact_at(&mut eight, 0).map_err(|error| self.storage(name, &error))?;
        let header = u64::from_le_bytes(eight);
        if header > LONGEST.min(length.saturating_sub(8)) {
            return Err(self.damaged(name, &format!("a header of {header} bytes in a file of {length}")));
        }
        let mut json = vec![0; usize::try_from(header).unwrap_or_default()];
        file.read_exact_at(&mut json, 8).map_err(|error| self.storage(name, &error))?;
        // Checks that tensors follow each other without gaps and have room for their shapes.
        let header_of: Metadata =
            serde_json::from_slice(&json).map_err(|error| self.damaged(name, &format!("its header: {error}")))?;
        let needs = 8 + header + header_of.data_len() as u64;
        if needs != length {
            return Err(self.damaged(name, &format!("it has {length} bytes, and its header speaks of {needs}")));
        }
        let number = self.files.len();
        for (tensor, info) in header_of.tensors() {
            let at = 8 + header + info.data_offsets.0 as u64;
            let stored = Stored { file: number, at, dtype: info.dtype, shape: info.shape.clone() };
            if let Some(other) = self.tensors.get(&tensor) {
                let other = &self.files[other.file].0;
                return Err(self.damaged(name, &format!("{tensor} is in {other}, too")));
            }
            self.tensors.insert(tensor, stored);
        }
        self.files.push((name.to_string(), file));
        Ok(())
    }

    /// Checks that the model's tensors are there with their shapes, in numbers that can be
    /// read, and no others. `tied`: the output projection is the embedding.
    ///
    /// # Errors
    /// Refused, naming the tensors.
    pub fn check(&self, wanted: &[(String, Vec<usize>)], tied: bool) -> Result<()> {
        let mut faults = Vec::new();
        let mut missing = Vec::new();
        for (name, shape) in wanted {
            match self.find(name, shape) {
                Err(_) if !self.tensors.contains_key(name) => missing.push(name.as_str()),
                found => faults.extend(found.err()),
            }
        }
        let known: BTreeSet<&str> = wanted.iter().map(|(name, _)| name.as_str()).collect();
        // Old versions of transformers stored what follows from config.json.
        let extra: Vec<&str> = self
            .tensors
            .keys()
            .map(String::as_str)
            .filter(|name| !(known.contains(name) || name.ends_with(".rotary_emb.inv_freq") || tied && *name == HEAD))
            .collect();
        if !missing.is_empty() {
            faults.insert(0, format!("missing: {}", some(&missing)));
        }
        if missing.contains(&HEAD) && self.tensors.contains_key(EMBEDDING) {
            faults.push("a model without lm_head.weight has \"tie_word_embeddings\": true in config.json".into());
        }
        if !extra.is_empty() {
            faults.push(format!("not of this model: {}", some(&extra)));
        }
        if tied && faults.is_empty() && self.tensors.contains_key(HEAD) && !self.same(HEAD, EMBEDDING)? {
            faults.push(format!("{HEAD} is not {EMBEDDING}, and config.json says that they are tied"));
        }
        faults.truncate(MOST_NAMED);
        match faults.is_empty() {
            true => Ok(()),
            false => Err(self.unfit(&faults.join("; "))),
        }
    }

    fn find(&self, name: &str, shape: &[usize]) -> std::result::Result<&Stored, String> {
        match self.tensors.get(name) {
            None => Err(format!("missing: {name}")),
            Some(stored) if stored.shape != shape => {
                Err(format!("{name} has shape {:?}, and config.json gives {shape:?}", stored.shape))
            }
            Some(stored) if width(stored.dtype) == 0 => {
                Err(format!("{name} is {}; F32, BF16 and F16 are read", stored.dtype))
            }
            Some(stored) => Ok(stored),
        }
    }

    /// Fills a part.
    ///
    /// # Errors
    /// As of [`Import::check`], and Storage: a file cannot be read.
    pub fn read(&self, part: &mut PartMut<'_>) -> Result<()> {
        let stored = self.find(part.name, part.shape).map_err(|why| self.unfit(&why))?;
        let numbers: usize = part.shape.iter().product();
        assert!(part.range.end <= numbers && part.range.len() == part.data.len(), "a part of {}", part.name);
        let width = width(stored.dtype);
        let mut at = stored.at + (part.range.start * width) as u64;
        let mut bytes = vec![0; BLOCK];
        for numbers in part.data.chunks_mut(BLOCK / width) {
            let bytes = &mut bytes[..numbers.len() * width];
            self.read_bytes(stored.file, bytes, at)?;
            convert(stored.dtype, bytes, numbers);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn read_bytes(&self, file: usize, bytes: &mut [u8], at: u64) -> Result<()> {
        let (name, file) = &self.files[file];
        file.read_exact_at(bytes, at).map_err(|error| self.storage(name, &error))
    }

    /// Whether two tensors are the same, byte for byte.
    fn same(&self, one: &str, other: &str) -> Result<bool> {
        let (Some(one), Some(other)) = (self.tensors.get(one), self.tensors.get(other)) else { return Ok(false) };
        if one.dtype != other.dtype || one.shape != other.shape {
            return Ok(false);
        }
        let length = one.shape.iter().product::<usize>() * width(one.dtype);
        let (mut left, mut right) = (vec![0; BLOCK], vec![0; BLOCK]);
        for at in (0..length).step_by(BLOCK) {
            let some = BLOCK.min(length - at);
            self.read_bytes(one.file, &mut left[..some], one.at + at as u64)?;
            self.read_bytes(other.file, &mut right[..some], other.at + at as u64)?;
            if left[..some] != right[..some] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn unfit(&self, what: &str) -> CheckpointError {
        let directory = self.directory.display();
        CheckpointError::Refused(format!("the weights in {directory} do not fit its config.json: {what}"))
    }

    fn storage(&self, name: &str, error: &io::Error) -> CheckpointError {
        CheckpointError::Storage(format!("{} cannot be read: {}", self.directory.join(name).display(), why(error)))
    }

    fn damaged(&self, name: &str, what: &str) -> CheckpointError {
        CheckpointError::Damaged(format!("{} is damaged: {what}", self.directory.join(name).display()))
    }
}

/// Bytes of a number; 0 for those that are not read.
fn width(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::BF16 | Dtype::F16 => 2,
        _ => 0,
    }
}

/// Little-endian numbers of `dtype` as f32.
fn convert(dtype: Dtype, bytes: &[u8], numbers: &mut [f32]) {
    let halves = || bytes.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]]));
    match dtype {
        Dtype::F32 => {
            let fours = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            numbers.iter_mut().zip(fours).for_each(|(to, from)| *to = from);
        }
        Dtype::BF16 => halves().map(bf16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(numbers),
        // With the processor's own instruction, if it has one.
        _ => halves().map(f16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(numbers),
    }
}

fn some(names: &[&str]) -> String {
    let more = names.len().saturating_sub(MOST_NAMED);
    let named = names.iter().take(MOST_NAMED).copied().collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{named} and {more} more") } else { named }
}
