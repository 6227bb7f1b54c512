//! Which checkpoint a training resumes from. Rank 0 alone lists directories and decides,
//! for other nodes may see an older state of a shared directory; all ranks read the files
//! to check them, each some, and all are told the choice.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::dcp::{self, Dcp};
use super::manifest::{FileSum, Manifest};
use super::names::{DCP, MANIFEST, Name};
use super::together::{agree, together};
use super::{CheckpointError, Checkpoints, Result, TrainState, why};
use crate::comm::{Exchange, Tag};
use crate::config::ResumeFrom;

const CHECK: Tag = Tag::of("checkpoint to check", 0);
const CHOICE: Tag = Tag::of("checkpoint to resume", 0);
/// What clocks of nodes and file servers may differ.
const CLOCKS: Duration = Duration::from_secs(2);
/// Entries of a directory that are looked at in search of a missing shard.
const MOST_NEIGHBOURS: usize = 1000;
/// Bytes read at once.
const BLOCK: usize = 1 << 20;

/// A checkpoint whose every byte has been checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// "step-500".
    pub name: String,
    /// Its step.
    pub step: u64,
    /// Where PyTorch's files are.
    pub dcp: PathBuf,
    /// Not there where another program wrote it.
    pub manifest: Option<Manifest>,
    /// What is odd about it, one line each.
    pub notes: Vec<String>,
}

impl Chosen {
    /// Where the training stood. Not known of what another program wrote.
    #[must_use]
    pub fn state(&self) -> Option<&TrainState> {
        self.manifest.as_ref().map(|manifest| &manifest.state)
    }
}

/// An entry of `output_dir` that is not resumed from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Its name there.
    pub name: String,
    /// "dcp/__1_0.distcp is missing".
    pub why: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.why)
    }
}

/// What [`Checkpoints::choose`] found, the same on all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The newest valid one; without any, the training begins.
    pub chosen: Option<Chosen>,
    /// What was newer, or is no checkpoint, and why.
    pub skipped: Vec<Skipped>,
}

/// What a look without reading the shards gives.
#[derive(Debug, Clone)]
pub(super) struct Looked {
    pub dcp: PathBuf,
    pub manifest: Option<Manifest>,
    pub notes: Vec<String>,
}

/// What rank 0 asks the others while it chooses or purges.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Read these files of this directory, each rank its own.
    Sums(PathBuf, Vec<FileSum>),
    /// Check the items of this directory of PyTorch's files, each rank some files.
    Items(PathBuf),
    /// No more questions.
    Over,
}

impl Checkpoints {
    /// What to resume from. `notice` is called on rank 0 before a long check, with what is
    /// being read: "checking step-500, 12.3 GB".
    ///
    /// # Errors
    /// `resume_from = none` where there are checkpoints, or a given one that is not there;
    /// damaged: a given one is not valid, or there are some and none of them is.
    pub fn choose(
        &mut self,
        exchange: &mut dyn Exchange,
        from: &ResumeFrom,
        notice: &mut dyn FnMut(&str),
    ) -> Result<Choice> {
        self.with_all(exchange, CHOICE, |keep, exchange| match from {
            ResumeFrom::Auto => keep.newest(exchange, notice),
            ResumeFrom::Never => keep.none(),
            ResumeFrom::Path(path) => keep.given(exchange, path, notice),
        })
    }

    /// Runs `decide` on rank 0, which may ask all ranks to check files, and gives all what
    /// it decided.
    pub(super) fn with_all<T: Serialize + serde::de::DeserializeOwned>(
        &mut self,
        exchange: &mut dyn Exchange,
        tag: Tag,
        decide: impl FnOnce(&mut Checkpoints, &mut dyn Exchange) -> Result<T>,
    ) -> Result<T> {
        if exchange.rank() != 0 {
            while let Some(ask) = hear(exchange)? {
                self.answer(exchange, &ask)?;
            }
            return agree(exchange, tag, None);
        }
        let decided = decide(self, exchange);
        if let Err(error @ CheckpointError::Comm(_)) = decided {
            return Err(error);
        }
        say(exchange, &Ask::Over)?;
        agree(exchange, tag, Some(decided))
    }

    fn newest(&mut self, exchange: &mut dyn Exchange, notice: &mut dyn FnMut(&str)) -> Result<Choice> {
        let (steps, mut skipped) = list(&self.output)?;
        let some = !steps.is_empty();
        for (step, name) in steps {
            match self.judge(exchange, &self.output.join(&name), notice)? {
                Err(why) => skipped.push(Skipped { name, why }),
                Ok(Looked { manifest: Some(manifest), .. }) if manifest.step != step => {
                    let why = format!("{MANIFEST} is that of step {}: the directory was renamed", manifest.step);
                    skipped.push(Skipped { name, why });
                }
                Ok(Looked { dcp, manifest, notes }) => {
                    return Ok(Choice { chosen: Some(Chosen { name, step, dcp, manifest, notes }), skipped });
                }
            }
        }
        if !some {
            return Ok(Choice { chosen: None, skipped });
        }
        let all: Vec<String> = skipped.iter().map(Skipped::to_string).collect();
        Err(CheckpointError::Damaged(format!(
            "no checkpoint in {} is valid: {}; restore one, or set train.resume_from to one elsewhere, or begin in another train.output_dir",
            self.output.display(),
            few(&all)
        )))
    }

    fn none(&self) -> Result<Choice> {
        let (steps, skipped) = list(&self.output)?;
        match steps.first() {
            None => Ok(Choice { chosen: None, skipped }),
            Some((_, newest)) => Err(CheckpointError::Refused(format!(
                "train.resume_from is none, but {} has {newest}; set it to auto, or take another train.output_dir",
                self.output.display()
            ))),
        }
    }

    fn given(&mut self, exchange: &mut dyn Exchange, path: &Path, notice: &mut dyn FnMut(&str)) -> Result<Choice> {
        let number = path.to_str().and_then(|text| text.parse::<u64>().ok());
        let directory = number.map_or_else(|| path.to_path_buf(), |step| self.output.join(format!("step-{step}")));
        if !directory.is_dir() {
            return Err(CheckpointError::Refused(format!(
                "train.resume_from names {}, which is no directory; give a step's directory, or auto",
                directory.display()
            )));
        }
        let name = directory.file_name().unwrap_or(directory.as_os_str()).to_string_lossy().into_owned();
        match self.judge(exchange, &directory, notice)? {
            Err(why) => Err(CheckpointError::Damaged(format!(
                "{} is not valid: {why}; with train.resume_from = auto the newest valid one is taken",
                directory.display()
            ))),
            Ok(Looked { dcp, manifest, notes }) => {
                let step = match (&manifest, Name::of(&name)) {
                    (Some(manifest), _) => manifest.step,
                    (None, Name::Step(step) | Name::Old(step)) => step,
                    _ => 0,
                };
                Ok(Choice { chosen: Some(Chosen { name, step, dcp, manifest, notes }), skipped: Vec::new() })
            }
        }
    }

    /// On rank 0, while the others listen: whether every byte of a checkpoint is as it was
    /// written, or why not.
    pub(super) fn judge(
        &mut self,
        exchange: &mut dyn Exchange,
        directory: &Path,
        notice: &mut dyn FnMut(&str),
    ) -> Result<std::result::Result<Looked, String>> {
        let looked = match look(directory) {
            Ok(looked) => looked,
            Err(why) => return Ok(Err(why + &elsewhere(directory))),
        };
        let faults = match &looked.manifest {
            Some(manifest) => {
                let key = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if directory.parent() == Some(&self.output) && self.verified.get(&key) == Some(&manifest.crc32) {
                    return Ok(Ok(looked));
                }
                let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
                notice(&format!("checking {key}, {}", size(bytes)));
                let ask = Ask::Sums(directory.to_path_buf(), manifest.files.clone());
                say(exchange, &ask)?;
                let faults = self.answer(exchange, &ask)?;
                if faults.is_empty() && directory.parent() == Some(&self.output) {
                    self.verified.insert(key, manifest.crc32.clone());
                }
                faults
            }
            None => {
                notice(&format!("checking {}, which has no {MANIFEST}", directory.display()));
                let ask = Ask::Items(looked.dcp.clone());
                say(exchange, &ask)?;
                self.answer(exchange, &ask)?
            }
        };
        Ok(if faults.is_empty() { Ok(looked) } else { Err(few(&faults)) })
    }

    /// This rank's share of a question, and all ranks' faults.
    fn answer(&self, exchange: &mut dyn Exchange, ask: &Ask) -> Result<Vec<String>> {
        let (rank, world) = (exchange.rank() as usize, exchange.world_size() as usize);
        let who = self.who(exchange.rank());
        let all = together(exchange, CHECK, move |stop| match ask {
            Ask::Sums(directory, files) => {
                let own = files.iter().skip(rank).step_by(world);
                Ok(own.filter_map(|file| differs(directory, file, &who, stop)).collect())
            }
            Ask::Items(dcp) => {
                let open = Dcp::open(dcp).map_err(|error| error.to_string())?;
                let whole = open.faults().iter().filter(|_| rank == 0).cloned();
                let own = (rank..open.files().len()).step_by(world).flat_map(|file| open.verify_file(file));
                Ok(whole.chain(own).map(|fault| fault.to_string()).collect())
            }
            Ask::Over => Ok(Vec::<String>::new()),
        })?;
        let faults = all.into_iter().flat_map(|faults| faults.unwrap_or_else(|why| vec![why]));
        Ok(faults.collect())
    }
}

fn say(exchange: &mut dyn Exchange, ask: &Ask) -> Result<()> {
    let mut bytes = serde_json::to_vec(ask)
        .map_err(|_| CheckpointError::Refused("the path of train.output_dir is not UTF-8; take another".into()))?;
    Ok(exchange.broadcast(CHECK, 0, &mut bytes)?)
}

fn hear(exchange: &mut dyn Exchange) -> Result<Option<Ask>> {
    let mut bytes = Vec::new();
    exchange.broadcast(CHECK, 0, &mut bytes)?;
    match serde_json::from_slice(&bytes) {
        Ok(Ask::Over) => Ok(None),
        Ok(ask) => Ok(Some(ask)),
        Err(error) => Err(CheckpointError::Storage(format!("rank 0's question is not understood: {error}"))),
    }
}

/// Steps and the names of their directories, newest first.
type Steps = Vec<(u64, String)>;

/// What is in `output_dir`, and what only looks like a step.
pub(super) fn list(output: &Path) -> Result<(Steps, Vec<Skipped>)> {
    let failed = |error: &io::Error| {
        CheckpointError::Storage(format!("train.output_dir {} cannot be read: {}", output.display(), why(error)))
    };
    let entries = match fs::read_dir(output) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(error) => return Err(failed(&error)),
        Ok(entries) => entries,
    };
    let mut steps = Vec::new();
    let mut skipped = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| failed(&error))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let mut skip = |why: &str| skipped.push(Skipped { name: name.clone(), why: why.into() });
        let kind = entry.file_type();
        match Name::of(&name) {
            Name::Foreign => {}
            Name::Odd(why) => skip(why),
            _ if kind.as_ref().is_ok_and(fs::FileType::is_symlink) => {
                skip("it is a symbolic link, and none is followed")
            }
            _ if kind.as_ref().is_ok_and(|kind| !kind.is_dir()) => skip("it is not a directory"),
            Name::Temporary => skip("it was being written when its launch ended, or still is"),
            // A step before what was moved aside for it.
            Name::Step(step) => steps.push((step, false, name)),
            Name::Old(step) => steps.push((step, true, name)),
        }
    }
    steps.sort_by(|a, b| (b.0, a.1, &b.2).cmp(&(a.0, b.1, &a.2)));
    skipped.sort_by(|a, b| a.name.cmp(&b.name));
    Ok((steps.into_iter().map(|(step, _, name)| (step, name)).collect(), skipped))
}

/// Looks whether a checkpoint is complete, without reading its shards.
pub(super) fn look(directory: &Path) -> std::result::Result<Looked, String> {
    fs::read_dir(directory).map_err(|error| format!("it cannot be read: {}", why(&error)))?;
    if let Some(manifest) = Manifest::read(directory)? {
        let dcp = directory.join(DCP);
        is_directory(&dcp)?;
        let faults: Vec<String> = manifest.files.iter().filter_map(|file| misses(directory, file)).collect();
        return match faults.is_empty() {
            true => Ok(Looked { dcp, manifest: Some(manifest), notes: Vec::new() }),
            false => Err(few(&faults)),
        };
    }
    look_at_dcp(directory)
}

fn is_directory(path: &Path) -> std::result::Result<(), String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(format!("{name} is not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!("{name} is missing")),
        Err(error) => Err(format!("{name} cannot be read: {}", why(&error))),
    }
}

/// What is wrong with a file's name and size.
fn misses(directory: &Path, file: &FileSum) -> Option<String> {
    match fs::symlink_metadata(directory.join(&file.name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(format!("{} is missing", file.name)),
        Err(error) => Some(format!("{} cannot be read: {}", file.name, why(&error))),
        Ok(found) if !found.is_file() => Some(format!("{} is not a regular file", file.name)),
        Ok(found) if found.len() != file.bytes => {
            Some(format!("{} has {} bytes instead of {}", file.name, found.len(), file.bytes))
        }
        Ok(_) => None,
    }
}

/// What is wrong with a file's bytes, as this rank reads them.
fn differs(directory: &Path, file: &FileSum, who: &str, stop: &AtomicBool) -> Option<String> {
    let sum = || -> io::Result<(u64, u32)> {
        let mut from = File::open(directory.join(&file.name))?;
        let mut sum = crc32fast::Hasher::new();
        let mut block = vec![0; BLOCK];
        let mut bytes = 0;
        while !stop.load(Ordering::Relaxed) {
            match from.read(&mut block)? {
                0 => break,
                got => {
                    sum.update(&block[..got]);
                    bytes += got as u64;
                }
            }
        }
        Ok((bytes, sum.finalize()))
    };
    match sum() {
        Err(error) => Some(format!("{} cannot be read by {who}: {}", file.name, why(&error))),
        Ok((bytes, _)) if bytes != file.bytes => {
            Some(format!("{} has {bytes} bytes instead of {} for {who}", file.name, file.bytes))
        }
        Ok((_, crc32)) if crc32 != file.crc32 => {
            Some(format!("{} is damaged: its checksum is {crc32:08x} instead of {:08x}", file.name, file.crc32))
        }
        Ok(_) => None,
    }
}

/// A checkpoint without manifest: another program's. Complete means: .metadata is there,
/// every shard that it needs is there and not empty, and none is newer, which would be one
/// of a later and unfinished save into the same directory.
fn look_at_dcp(directory: &Path) -> std::result::Result<Looked, String> {
    // torchtitan writes into the step's directory itself.
    let itself = directory.join(".metadata").is_file();
    let dcp = if itself { directory.to_path_buf() } else { directory.join(DCP) };
    if !itself {
        is_directory(&dcp).map_err(|missing| format!("{MANIFEST} is missing, and {missing}"))?;
    }
    let index = match fs::symlink_metadata(dcp.join(".metadata")) {
        Ok(found) if found.is_file() => found,
        _ => return Err("incomplete: .metadata is missing, which is written last".into()),
    };
    let open = Dcp::open(&dcp).map_err(|error| error.to_string())?;
    let mut faults = Vec::new();
    let mut needed = BTreeSet::new();
    for dcp::NeededFile { name, bytes: least } in open.files() {
        match fs::symlink_metadata(dcp.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => faults.push(format!("{name} is missing")),
            Err(error) => faults.push(format!("{name} cannot be read: {}", why(&error))),
            Ok(found) if !found.is_file() => faults.push(format!("{name} is not a regular file")),
            Ok(found) if found.len() == 0 => faults.push(format!("{name} is empty")),
            Ok(found) if found.len() < *least => {
                faults.push(format!("{name} has {} bytes and .metadata needs {least}", found.len()));
            }
            Ok(_) => {}
        }
        needed.insert(name.clone());
    }
    let mut notes = Vec::new();
    for shard in shards(&dcp) {
        let written = shard.written.duration_since(index.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        if let Ok(later) = written
            && later > CLOCKS
        {
            faults.push(format!(
                "suspicious: {} was written {} s after .metadata, so it belongs to another save",
                shard.name,
                later.as_secs()
            ));
        } else if !needed.contains(&shard.name) {
            notes.push(format!("{} is not part of it: it is of an older save by more ranks", shard.name));
        }
    }
    if faults.is_empty() { Ok(Looked { dcp, manifest: None, notes }) } else { Err(few(&faults)) }
}

struct ShardFile {
    name: String,
    written: SystemTime,
}

fn shards(dcp: &Path) -> Vec<ShardFile> {
    let entries = fs::read_dir(dcp).into_iter().flatten().flatten();
    let mut shards: Vec<ShardFile> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok().filter(|name| name.ends_with(".distcp"))?;
            Some(ShardFile { name, written: entry.metadata().ok()?.modified().ok()? })
        })
        .collect();
    shards.sort_by(|a, b| a.name.cmp(&b.name));
    shards
}

/// Where shards lie that a checkpoint lacks: in a temporary directory beside it, or under
/// the same step of a neighbouring run, for each rank named the directory by its own clock
/// or only one node renamed it.
fn elsewhere(directory: &Path) -> String {
    let here: BTreeSet<String> = shards(&directory.join(DCP)).into_iter().map(|shard| shard.name).collect();
    let (Some(output), Some(name)) = (directory.parent(), directory.file_name().and_then(|name| name.to_str())) else {
        return String::new();
    };
    let mut said = String::new();
    let mut tell = |place: &Path, called: String| {
        let there: Vec<String> =
            [place.join(DCP), place.to_path_buf()].iter().flat_map(|dcp| shards(dcp)).map(|shard| shard.name).collect();
        let missing: Vec<&str> = there.iter().map(String::as_str).filter(|shard| !here.contains(*shard)).collect();
        if !missing.is_empty() {
            said += &format!("; {} in {called}", ranks_of(&missing));
        }
    };
    for neighbour in directories(output) {
        if neighbour != name && mentions(&neighbour, name) && !matches!(Name::of(&neighbour), Name::Old(_)) {
            tell(&output.join(&neighbour), neighbour);
        }
    }
    let own = fs::canonicalize(output).unwrap_or_else(|_| output.to_path_buf());
    if let (Some(above), Some(own)) = (own.parent(), own.file_name()) {
        for run in directories(above) {
            // Another run that has this step whole is another training.
            let whole = above.join(&run).join(name).join(DCP).join(dcp::METADATA).exists();
            if run.as_str() != own && !whole {
                tell(&above.join(&run).join(name), format!("../{run}/{name}"));
            }
        }
    }
    said
}

/// Whether a name has `step-500` in it, or `checkpoint-500`, and not `step-5000`.
fn mentions(neighbour: &str, step: &str) -> bool {
    let number = step.trim_start_matches("step-");
    neighbour.match_indices(number).any(|(at, _)| {
        let digit = |text: Option<char>| text.is_some_and(|c| c.is_ascii_digit());
        !digit(neighbour[..at].chars().next_back()) && !digit(neighbour[at + number.len()..].chars().next())
    }) && ["tmp", "step", "checkpoint"].iter().any(|word| neighbour.contains(word))
}

/// "rank 3's shard lies", "shards of ranks 2, 3 lie".
fn ranks_of(shards: &[&str]) -> String {
    let rank = |name: &str| name.strip_prefix("__").and_then(|rest| rest.split('_').next()?.parse::<u32>().ok());
    let mut ranks: Vec<String> =
        shards.iter().map(|name| rank(name).map_or_else(|| (*name).to_string(), |rank| rank.to_string())).collect();
    ranks.dedup();
    match ranks.as_slice() {
        [one] => format!("rank {one}'s shard lies"),
        several => format!("shards of ranks {} lie", several.join(", ")),
    }
}

fn directories(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten().take(MOST_NEIGHBOURS);
    let mut names: Vec<String> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// The first of what may be as many as there are ranks: an error is one line.
pub(super) fn few(all: &[String]) -> String {
    const FEW: usize = 4;
    let first = all.iter().take(FEW).map(String::as_str).collect::<Vec<_>>().join("; ");
    match all.len().saturating_sub(FEW) {
        0 => first,
        more => format!("{first}; and {more} more"),
    }
}

/// "12.3 GB".
pub(super) fn size(bytes: u64) -> String {
    let units = ["bytes", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} bytes") } else { format!("{value:.1} {}", units[unit]) }
}
