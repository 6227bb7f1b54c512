//! The model as transformers reads it: safetensors of at most 5 GB each, config.json, the
//! tokenizer. Tensors come one after the other, in any order, and go straight to their
//! place: no more than one is in memory. The directory gets its name once all of it is on
//! the disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::names::{self, MARK, Mark};
use super::purge::take_apart;
use super::{CheckpointError, Checkpoints, Result, why};

/// What Hugging Face's hub and transformers take as the size of a file: "5GB".
const MOST_BYTES: u64 = 5_000_000_000;
/// What we say of an export: which files are ours.
const RECORD: &str = "export.json";
/// Numbers converted at once.
const BLOCK: usize = 1 << 16;
/// What goes with a model, as transformers names it; the rest of a directory does not.
const COMPANIONS: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
];

/// In which numbers a model is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// As it was trained.
    F32,
    /// Rounded to nearest, half the size.
    Bf16,
}

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// In a safetensors header.
    fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::Bf16 => "BF16",
        }
    }

    /// In config.json.
    fn torch(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
        }
    }
}

/// What is exported.
#[derive(Debug, Clone)]
pub struct Export<'a> {
    /// Names and shapes; files are filled in this order.
    pub tensors: &'a [(String, Vec<usize>)],
    /// In which numbers.
    pub dtype: Dtype,
    /// config.json without the type of its numbers.
    pub config: &'a Value,
    /// Files that are copied: the tokenizer's, see [`tokenizer_files`].
    pub copy: &'a [PathBuf],
}

/// A finished export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// "…/final".
    pub directory: PathBuf,
    /// Names in it.
    pub files: Vec<String>,
    /// Of the tensors.
    pub bytes: u64,
    /// Where what had the name before lies now, if it was not this program's.
    pub aside: Option<PathBuf>,
}

/// `export.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    format: u32,
    dtype: Dtype,
    files: Vec<String>,
}

/// The files of a tokenizer, each from the first of these directories that has it.
#[must_use]
pub fn tokenizer_files(directories: &[&Path]) -> Vec<PathBuf> {
    let found = |name: &&str| directories.iter().map(|place| place.join(name)).find(|path| path.is_file());
    COMPANIONS.iter().filter_map(found).collect()
}

/// What an export wrote into a directory, as it says itself; nothing where it does not.
pub(super) fn files_of(directory: &Path) -> Vec<String> {
    let record = names::read_small(&directory.join(RECORD), 16 << 20).ok();
    let record: Option<Record> = record.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut files = record.map(|record| record.files).unwrap_or_default();
    files.retain(|name| !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != "..");
    if !files.is_empty() {
        files.push(RECORD.into());
    }
    files
}

/// Where a tensor goes.
#[derive(Debug)]
struct Place {
    file: usize,
    at: u64,
    numbers: usize,
    written: bool,
}

/// A file of tensors.
#[derive(Debug)]
struct Output {
    name: String,
    file: File,
    /// Tensors that have not come.
    left: usize,
}

/// An export under way, on rank 0. If it is dropped before [`Exporter::finish`], what it
/// wrote is removed.
#[derive(Debug)]
pub struct Exporter {
    who: String,
    attempt: String,
    place: PathBuf,
    directory: PathBuf,
    dtype: Dtype,
    files: Vec<Output>,
    listed: Vec<String>,
    places: BTreeMap<String, Place>,
    bytes: u64,
    done: bool,
}

impl Checkpoints {
    /// Begins `output_dir/final`. Rank 0 only: see [`super::agree`] for telling the others.
    ///
    /// # Errors
    /// Storage: a file cannot be made.
    pub fn export(&mut self, what: &Export<'_>) -> Result<Exporter> {
        self.export_in_files_of(what, MOST_BYTES)
    }

    fn export_in_files_of(&mut self, what: &Export<'_>, most: u64) -> Result<Exporter> {
        let attempt = self.attempt();
        let mut exporter = Exporter {
            who: self.who(0),
            place: self.output.join(format!("final.tmp-{attempt}")),
            directory: self.output.join("final"),
            attempt,
            dtype: what.dtype,
            files: Vec::new(),
            listed: Vec::new(),
            places: BTreeMap::new(),
            bytes: 0,
            done: false,
        };
        let mark = Mark::own(&self.host, &self.launch);
        exporter
            .guard("make", &exporter.place, |place| {
                fs::create_dir_all(&self.output)?;
                fs::create_dir(place)?;
                mark.write(place)
            })
            .and_then(|()| exporter.begin(what, most))?;
        Ok(exporter)
    }
}

impl Exporter {
    fn guard<T>(&self, verb: &str, path: &Path, run: impl FnOnce(&Path) -> io::Result<T>) -> Result<T> {
        run(path).map_err(|error| {
            CheckpointError::Storage(format!("{} could not {verb} {}: {}", self.who, path.display(), why(&error)))
        })
    }

    /// All files with their headers, all but the tensors.
    fn begin(&mut self, what: &Export<'_>, most: u64) -> Result<()> {
        let mut groups: Vec<Vec<(&str, &[usize], u64)>> = Vec::new();
        let mut filled = 0;
        for (name, shape) in what.tensors {
            let numbers: usize = shape.iter().product();
            let bytes = numbers as u64 * self.dtype.bytes();
            if groups.is_empty() || (filled > 0 && filled + bytes > most) {
                groups.push(Vec::new());
                filled = 0;
            }
            filled += bytes;
            groups.last_mut().into_iter().for_each(|group| group.push((name, shape, bytes)));
        }
        let count = groups.len();
        let called = |index: usize| match count {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let index = json!({
            "metadata": {"total_size": groups.iter().flatten().map(|(.., bytes)| bytes).sum::<u64>()},
            "weight_map": groups.iter().enumerate().flat_map(|(index, group)| {
                group.iter().map(move |(name, ..)| ((*name).to_string(), Value::from(called(index))))
            }).collect::<Map<String, Value>>(),
        });
        let mut config = what.config.clone();
        // transformers writes "dtype" since version 5 and reads the older name, too.
        config["torch_dtype"] = self.dtype.torch().into();

        let mut texts = vec![("config.json".to_string(), pretty(&config))];
        if count > 1 {
            texts.push(("model.safetensors.index.json".into(), pretty(&index)));
        }
        let copied = |path: &PathBuf| Some(path.file_name()?.to_str()?.to_string());
        self.listed = (0..count).map(called).chain(texts.iter().map(|(name, _)| name.clone())).collect();
        self.listed.extend(what.copy.iter().filter_map(copied));
        let record = Record { format: 1, dtype: self.dtype, files: self.listed.clone() };
        // First: what an export that is cut short leaves is known by it.
        texts.insert(0, (RECORD.into(), pretty(&json!(record))));
        for (name, text) in &texts {
            self.guard("write", &self.place.join(name), |path| names::write_new(path, text))?;
        }
        for from in what.copy {
            let Some(name) = copied(from) else { continue };
            let text = self.guard("read", from, |from| fs::read(from))?;
            self.guard("write", &self.place.join(name), |path| names::write_new(path, &text))?;
        }
        for (index, group) in groups.iter().enumerate() {
            let name = called(index);
            let header = header(group, self.dtype);
            let bytes: u64 = group.iter().map(|(.., bytes)| bytes).sum();
            let file = self.guard("write", &self.place.join(&name), |path| {
                let file = File::create_new(path)?;
                file.write_all_at(&header, 0)?;
                Ok(file)
            })?;
            let mut at = header.len() as u64;
            for (tensor, shape, bytes) in group {
                let place = Place { file: index, at, numbers: shape.iter().product(), written: false };
                self.places.insert((*tensor).to_string(), place);
                at += bytes;
            }
            self.bytes += bytes;
            self.files.push(Output { name, file, left: group.len() });
        }
        Ok(())
    }

    /// Writes a tensor, whole and in row-major order. A file's last one brings it to the disk.
    ///
    /// # Errors
    /// Storage: it could not be written. Refused: it is not among the announced ones, came
    /// before, or has another length.
    pub fn tensor(&mut self, name: &str, numbers: &[f32]) -> Result<()> {
        let refused = |what: &str| Err(CheckpointError::Refused(format!("export: {name} {what}")));
        let dtype = self.dtype;
        match self.places.get_mut(name) {
            None => return refused("was not announced"),
            Some(place) if place.written => return refused("came twice"),
            Some(place) if place.numbers != numbers.len() => {
                return refused(&format!("has {} numbers instead of {}", numbers.len(), place.numbers));
            }
            Some(place) => place.written = true,
        }
        let Place { file, mut at, .. } = self.places[name];
        self.files[file].left -= 1;
        let Output { name: called, file, left } = &self.files[file];
        self.guard("write", &self.place.join(called), |_| {
            let mut bytes = Vec::with_capacity(BLOCK * 4);
            let mut rounded = vec![bf16::ZERO; BLOCK];
            for block in numbers.chunks(BLOCK) {
                bytes.clear();
                match dtype {
                    Dtype::F32 => bytes.extend(block.iter().flat_map(|number| number.to_le_bytes())),
                    Dtype::Bf16 => {
                        let rounded = &mut rounded[..block.len()];
                        rounded.convert_from_f32_slice(block);
                        bytes.extend(rounded.iter().flat_map(|number| number.to_le_bytes()));
                    }
                }
                file.write_all_at(&bytes, at)?;
                at += bytes.len() as u64;
            }
            // Now, so that the others do not wait for all files at the end.
            if *left == 0 { file.sync_all() } else { Ok(()) }
        })
    }

    /// Gives it its name. What had that name before is
    /// removed if this program had written it, and else kept beside it.
    ///
    /// # Errors
    /// Storage, as before. Refused: a tensor has not come.
    pub fn finish(mut self) -> Result<Exported> {
        if let Some((name, _)) = self.places.iter().find(|(_, place)| !place.written) {
            return Err(CheckpointError::Refused(format!("export: {name} has not come")));
        }
        self.guard("sync", &self.place, names::sync_directory)?;
        let aside = self.directory.with_extension(format!("old-{}", self.attempt));
        let was_there = fs::symlink_metadata(&self.directory).is_ok();
        self.guard("rename", &self.directory, |directory| {
            if was_there {
                fs::rename(directory, &aside)?;
            }
            fs::rename(&self.place, directory).inspect_err(|_| {
                if was_there {
                    let _ = fs::rename(&aside, directory);
                }
            })
        })?;
        self.done = true;
        let _ = fs::remove_file(self.directory.join(MARK));
        if let Some(output) = self.directory.parent() {
            self.guard("sync", output, names::sync_directory)?;
        }
        let kept = was_there && (files_of(&aside).is_empty() || take_apart(&aside).is_err());
        Ok(Exported {
            directory: self.directory.clone(),
            files: std::mem::take(&mut self.listed),
            bytes: self.bytes,
            aside: kept.then_some(aside),
        })
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if !self.done {
            let _ = take_apart(&self.place);
        }
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

/// The length in 8 bytes and JSON, filled up with blanks to a multiple of 8
/// (<https://github.com/huggingface/safetensors#format>). transformers wants "format".
fn header(group: &[(&str, &[usize], u64)], dtype: Dtype) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, shape, bytes) in group {
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [at, at + bytes]});
        entries.insert((*name).to_string(), entry);
        at += bytes;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use safetensors::SafeTensors;

    use super::*;
    use crate::checkpoint::{Import, PartMut};

    fn tensors() -> Vec<(String, Vec<usize>)> {
        let shapes: [(&str, &[usize]); 4] = [("a", &[3, 4]), ("b", &[5]), ("c", &[2, 3]), ("d", &[1])];
        shapes.map(|(name, shape)| (name.to_string(), shape.to_vec())).into()
    }

    fn numbers(name: &str, count: usize) -> Vec<f32> {
        (0..count).map(|at| f32::from(name.as_bytes()[0]) + at as f32 / 64.0).collect()
    }

    #[test]
    fn several_files_hold_each_tensor_once_and_the_index_says_where() {
        let output = tempfile::tempdir().unwrap();
        let mut all = Checkpoints::new(output.path(), None, "n1", Duration::ZERO);
        let config = json!({"model_type": "llama"});
        let what = Export { tensors: &tensors(), dtype: Dtype::F32, config: &config, copy: &[] };
        // 12 numbers are 48 bytes: one file for a, one for b and c, one for d.
        let mut exporter = all.export_in_files_of(&what, 44).unwrap();
        for (name, shape) in tensors().iter().rev() {
            exporter.tensor(name, &numbers(name, shape.iter().product())).unwrap();
        }
        let exported = exporter.finish().unwrap();
        assert_eq!(exported.bytes, 4 * (12 + 5 + 6 + 1));
        let files: Vec<&str> = exported.files.iter().map(String::as_str).collect();
        let wanted = [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "config.json",
            "model.safetensors.index.json",
        ];
        assert_eq!(files, wanted);

        let index: Value = serde_json::from_slice(&fs::read(exported.directory.join(files[4])).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 96);
        for (name, shape) in tensors() {
            let file = index["weight_map"][&name].as_str().unwrap();
            let bytes = fs::read(exported.directory.join(file)).unwrap();
            let read = SafeTensors::deserialize(&bytes).unwrap();
            let tensor = read.tensor(&name).unwrap();
            assert_eq!(tensor.shape(), shape);
            let expected: Vec<u8> =
                numbers(&name, shape.iter().product()).iter().flat_map(|number| number.to_le_bytes()).collect();
            assert_eq!(tensor.data(), expected);
        }

        let import = Import::open(&exported.directory).unwrap();
        import.check(&tensors(), false).unwrap();
        let mut data = vec![0.0; 3];
        import.read(&mut PartMut { name: "b", shape: &[5], range: 1..4, data: &mut data }).unwrap();
        assert_eq!(data, numbers("b", 5)[1..4]);
        fs::remove_file(exported.directory.join(files[1])).unwrap();
        let error = Import::open(&exported.directory).unwrap_err().to_string();
        assert!(error.contains("model-00002-of-00003.safetensors cannot be read: no such file"), "{error}");
    }
}
