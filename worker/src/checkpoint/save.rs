//! Writes a checkpoint: every rank its own file into a directory with a temporary name,
//! rank 0 the index and the manifest; once all of it is on the disk, one rename makes it
//! count. Whatever happens before leaves the older ones as they were.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::choose::few;
use super::dcp::{self, Shard};
use super::early::Early;
use super::manifest::{FileSum, Manifest, TensorShape};
use super::names::{self, DCP, MANIFEST, MARK, Mark};
use super::together::{agree, together};
use super::{CheckpointError, Checkpoints, Part, Result, TrainState, why};
use crate::comm::{Exchange, Tag};

const PLACE: Tag = Tag::of("checkpoint's directory", 0);
const WRITE: Tag = Tag::of("checkpoint's files", 0);
const COMMIT: Tag = Tag::of("checkpoint's commit", 0);
/// Between two looks for what another node has made.
const PAUSE: Duration = Duration::from_millis(50);
/// What a rank says that ended for another's sake.
const STOPPED: &str = "stopped, for another rank failed";

/// What is saved.
#[derive(Debug, Clone, Copy)]
pub struct What<'a> {
    /// Where the training stands; the checkpoint's step is `state.step`. The same on all
    /// ranks.
    pub state: &'a TrainState,
    /// The configuration, as far as it may not change. Rank 0's is kept.
    pub config: &'a Value,
    /// This rank's parts; all ranks' together hold every number of every tensor once.
    pub parts: &'a [Part<'a>],
}

/// A checkpoint that counts from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// "…/step-500".
    pub directory: PathBuf,
    /// Of all files.
    pub bytes: u64,
    /// From the first call to the last rename.
    pub took: Duration,
}

impl Checkpoints {
    /// Writes `output_dir/step-N`. A directory of that name is not changed: it is moved
    /// aside, and counts until the new one does.
    ///
    /// # Errors
    /// Storage: what could not be written, by which rank on which host and why, the same on
    /// all ranks; the temporary directory is removed then.
    pub fn save(&mut self, exchange: &mut dyn Exchange, what: What<'_>) -> Result<Saved> {
        let began = Instant::now();
        let own = (exchange.rank() == 0).then(|| self.make_place(what.state.step));
        let (attempt, host): (String, String) = agree(exchange, PLACE, own)?;
        let place = self.output.join(format!("step-{}.tmp-{attempt}", what.state.step));
        let written = match self.write_all(exchange, &place, &host, what) {
            // Others may still write: what is there is left to a later attempt.
            Err(error @ CheckpointError::Comm(_)) => return Err(error),
            written => written,
        };
        let own = (exchange.rank() == 0).then(|| {
            let committed = written.and_then(|shards| self.commit(&place, &attempt, shards, what));
            // No rank writes any more.
            committed.inspect_err(|_| drop(fs::remove_dir_all(&place)))
        });
        let bytes = agree(exchange, COMMIT, own)?;
        let directory = self.output.join(format!("step-{}", what.state.step));
        Ok(Saved { directory, bytes, took: began.elapsed() })
    }

    /// On rank 0: an attempt's name and this host.
    fn make_place(&mut self, step: u64) -> Result<(String, String)> {
        let attempt = self.attempt();
        let place = self.output.join(format!("step-{step}.tmp-{attempt}"));
        let made = fs::create_dir_all(&self.output)
            .and_then(|()| fs::create_dir(&place))
            .and_then(|()| Mark::own(&self.host, &self.launch).write(&place))
            .and_then(|()| fs::create_dir(place.join(DCP)));
        match made {
            Ok(()) => Ok((attempt, self.host.clone())),
            Err(error) => {
                let _ = fs::remove_dir_all(&place);
                Err(self.could_not(0, "make", &place, &error))
            }
        }
    }

    fn could_not(&self, rank: u32, verb: &str, path: &Path, error: &io::Error) -> CheckpointError {
        CheckpointError::Storage(format!("{} could not {verb} {}: {}", self.who(rank), path.display(), why(error)))
    }

    /// All ranks' files, on the disk.
    fn write_all(&self, exchange: &mut dyn Exchange, place: &Path, host: &str, what: What<'_>) -> Result<Vec<Shard>> {
        self.all_see(exchange, place, host)?;
        let rank = exchange.rank();
        let path = place.join(DCP).join(dcp::shard_name(rank));
        let results = together(exchange, WRITE, |stop| {
            // The position for a torch program that loads the model, not for ours.
            let state = serde_json::to_value(what.state).map_err(|error| error.to_string())?;
            let objects: &[(&str, &Value)] = if rank == 0 { &[("train_state", &state)] } else { &[] };
            write_file(&path, what.parts, objects, stop).map_err(|error| match stop.load(Ordering::Relaxed) {
                true => STOPPED.to_string(),
                false => self.could_not(rank, "write", &path, &error).to_string(),
            })
        })?;
        let mut shards = Vec::new();
        let mut failed = Vec::new();
        let mut stopped = 0;
        for result in results {
            match result {
                Ok(shard) => shards.push(shard),
                Err(why) if why == STOPPED => stopped += 1,
                Err(why) => failed.push(why),
            }
        }
        match failed.is_empty() && stopped == 0 {
            true => Ok(shards),
            false => Err(CheckpointError::Storage(few(&failed))),
        }
    }

    /// Waits until every rank sees what rank 0 made. Where a whole host does not, its
    /// output_dir is another.
    fn all_see(&self, exchange: &mut dyn Exchange, place: &Path, made_by: &str) -> Result<()> {
        let seen = together(exchange, PLACE, |_| {
            let end = Instant::now() + self.patience;
            loop {
                match fs::metadata(place.join(MARK)) {
                    Ok(_) => return Ok((self.host.clone(), None)),
                    Err(error) if Instant::now() >= end || !is_late(&error) => {
                        return Ok((self.host.clone(), Some(why(&error))));
                    }
                    Err(_) => thread::sleep(PAUSE),
                }
            }
        })?;
        let mut hosts: BTreeMap<String, (Vec<u32>, bool, String)> = BTreeMap::new();
        for (rank, answer) in (0..).zip(seen) {
            let (host, fault) = answer.map_err(CheckpointError::Storage)?;
            let (ranks, sees, reason) = hosts.entry(host).or_default();
            match fault {
                None => *sees = true,
                Some(why) => {
                    ranks.push(rank);
                    *reason = why;
                }
            }
        }
        let blind: Vec<String> = hosts
            .iter()
            .filter(|(_, (ranks, ..))| !ranks.is_empty())
            .map(|(host, (ranks, sees, reason))| {
                let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
                let whole = if *sees { "" } else { "all of " };
                format!("{whole}ranks {} on {host} ({reason})", ranks.join(", "))
            })
            .collect();
        if blind.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Storage(format!(
            "train.output_dir is not visible everywhere: {}, made by rank 0 on {made_by}, is not there for {}; let it be a directory that all nodes share",
            place.display(),
            few(&blind)
        )))
    }

    /// On rank 0: index, manifest and the rename. The bytes of all.
    fn commit(&mut self, place: &Path, attempt: &str, shards: Vec<Shard>, what: What<'_>) -> Result<u64> {
        let files: Vec<(String, Shard)> = (0..).map(dcp::shard_name).zip(shards).collect();
        let mut tensors: BTreeMap<&str, &[usize]> = BTreeMap::new();
        for item in files.iter().flat_map(|(_, shard)| &shard.items) {
            if let Some(placed) = &item.placed {
                tensors.insert(&item.name, &placed.shape);
            }
        }
        let listed: Vec<(&str, &[usize])> = tensors.iter().map(|(name, shape)| (*name, *shape)).collect();
        let index = dcp::metadata(&listed, &files).map_err(|error| CheckpointError::Damaged(error.to_string()))?;

        let mut sums = Vec::new();
        for (name, shard) in &files {
            let path = place.join(DCP).join(name);
            self.arrived(&path, shard.bytes)?;
            sums.push(FileSum { name: format!("{DCP}/{name}"), bytes: shard.bytes, crc32: shard.crc32 });
        }
        let name = format!("{DCP}/{}", dcp::METADATA);
        sums.push(FileSum { name, bytes: index.len() as u64, crc32: crc32fast::hash(&index) });
        let bytes = sums.iter().map(|file| file.bytes).sum();
        let world = u32::try_from(files.len()).unwrap_or(u32::MAX);
        let shapes = listed.iter().map(|(name, shape)| TensorShape { name: (*name).into(), shape: shape.to_vec() });
        let manifest = Manifest::new(&self.launch, world, what.state, what.config, sums, shapes.collect());

        let write = |path: PathBuf, bytes: &[u8]| {
            names::write_new(&path, bytes).map_err(|error| self.could_not(0, "write", &path, &error))
        };
        write(place.join(DCP).join(dcp::METADATA), &index)?;
        write(place.join(MANIFEST), &manifest.to_json())?;
        for directory in [&place.join(DCP), place] {
            names::sync_directory(directory).map_err(|error| self.could_not(0, "sync", directory, &error))?;
        }
        let name = format!("step-{}", what.state.step);
        let directory = self.output.join(&name);
        self.put(place, &directory, attempt).map_err(|error| self.could_not(0, "make", &directory, &error))?;
        // From here on it counts; the rest is housekeeping.
        let _ = fs::remove_file(directory.join(MARK));
        let _ = names::point(&self.output.join("latest"), &name);
        self.verified.insert(name, manifest.crc32);
        self.saved = Some(what.state.step);
        Ok(bytes)
    }

    /// Renames, an older directory of the same name aside.
    fn put(&self, place: &Path, directory: &Path, attempt: &str) -> io::Result<()> {
        let aside = directory.with_extension(format!("old-{attempt}"));
        let was_there = match fs::symlink_metadata(directory) {
            Ok(_) => fs::rename(directory, &aside).map(|()| true)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        fs::rename(place, directory).inspect_err(|_| {
            if was_there {
                let _ = fs::rename(&aside, directory);
            }
        })?;
        names::sync_directory(&self.output)
    }

    /// Waits until rank 0 sees what another rank has written.
    fn arrived(&self, path: &Path, bytes: u64) -> Result<()> {
        let end = Instant::now() + self.patience;
        loop {
            // Opening makes an NFS client ask the server.
            let seen = File::open(path).and_then(|file| file.metadata()).map(|found| found.len());
            match seen {
                Ok(length) if length == bytes => return Ok(()),
                Err(error) if !is_late(&error) => return Err(self.could_not(0, "read", path, &error)),
                seen if Instant::now() >= end => {
                    let has = seen.map_or_else(|error| why(&error), |length| format!("{length} bytes"));
                    return Err(CheckpointError::Storage(format!(
                        "{} does not see what another rank wrote: {} has {bytes} bytes there and here: {has}; let train.output_dir be a directory that all nodes share",
                        self.who(0),
                        path.display()
                    )));
                }
                _ => thread::sleep(PAUSE),
            }
        }
    }
}

/// What NFS says of a name that another node has just made.
fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

fn write_file(path: &Path, parts: &[Part<'_>], objects: &[(&str, &Value)], stop: &AtomicBool) -> io::Result<Shard> {
    let mut file = Stoppable { file: Early::new(File::create_new(path)?), stop };
    let shard = dcp::write_shard(&mut file, parts, objects)?;
    file.file.sync()?;
    Ok(shard)
}

/// A file that is not written further once another rank has failed.
struct Stoppable<'a> {
    file: Early,
    stop: &'a AtomicBool,
}

impl Write for Stoppable<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other(STOPPED));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
