//! Removes what is no longer needed: valid checkpoints beyond the newest few, and what dead
//! attempts left behind. It removes only files that a manifest of ours lists, and temporary
//! directories that bear our mark; never the last valid checkpoint, never an incomplete
//! one, and follows no symbolic link.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::choose::{Chosen, Looked, few, list, look};
use super::dcp;
use super::manifest::Manifest;
use super::names::{self, DCP, MANIFEST, MARK, Mark, Name};
use super::{CheckpointError, Checkpoints, Result, why};
use crate::comm::{Exchange, Tag};

const PURGE: Tag = Tag::of("checkpoints to purge", 0);
/// A temporary directory of another host in which nothing was written for so long is dead.
const ABANDONED: Duration = Duration::from_secs(3600);
/// A temporary directory without a mark may get one for so long.
const NEW: Duration = Duration::from_secs(60);

/// What [`Checkpoints::purge`] did, the same on all ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purged {
    /// Names in `output_dir` that are gone.
    pub removed: Vec<String>,
    /// Checkpoints that remain and count, newest first. Where nothing had to be removed,
    /// only their sizes were looked at.
    pub kept: Vec<String>,
    /// What could not be removed, or is not valid, and why: "step-500: … is missing".
    pub notes: Vec<String>,
}

impl Checkpoints {
    /// Keeps the newest `keep` valid checkpoints. Of a training that has gone back to an
    /// earlier step these are the ones up to where it is: what it left ahead of itself is
    /// neither counted nor removed, or it would take the place of all that is saved now.
    /// Before any is removed, every byte of those that remain has been checked by this
    /// process, or written by it; `notice` as in [`Checkpoints::choose`].
    ///
    /// # Errors
    /// Refused: `keep` is 0. Storage: `output_dir` cannot be read. What cannot be removed
    /// is no error, but a note.
    pub fn purge(&mut self, exchange: &mut dyn Exchange, keep: usize, notice: &mut dyn FnMut(&str)) -> Result<Purged> {
        self.with_all(exchange, PURGE, |all, exchange| all.purge_here(exchange, keep, notice))
    }

    /// Rank 0 puts in order what a launch before this one has not come to: what it was
    /// writing is removed, and `latest` is what this one goes on from. Gives what could not
    /// be removed.
    #[must_use]
    pub fn tidy(&self, chosen: Option<&Chosen>) -> Vec<String> {
        let mut purged = Purged::default();
        self.sweep(&mut purged);
        if let Some(chosen) = chosen.filter(|chosen| chosen.dcp.starts_with(self.output.join(&chosen.name))) {
            let _ = names::point(&self.output.join("latest"), &chosen.name);
        }
        purged.notes
    }

    fn purge_here(&mut self, exchange: &mut dyn Exchange, keep: usize, notice: &mut dyn FnMut(&str)) -> Result<Purged> {
        if keep == 0 {
            return Err(CheckpointError::Refused(
                "checkpoint.keep is 0, which would leave nothing to resume from; set it to 1 or more".into(),
            ));
        }
        let mut purged = Purged::default();
        self.sweep(&mut purged);
        let (steps, _) = list(&self.output)?;
        let saved = self.saved.unwrap_or(u64::MAX);
        let mut found = BTreeSet::new();
        let mut ahead = Vec::new();
        // As cheap as it gets while there is nothing to remove: no shard is read.
        let distinct: BTreeSet<u64> = steps.iter().map(|(step, _)| *step).collect();
        let enough = steps.iter().filter(|(step, _)| *step <= saved).count() <= keep && distinct.len() == steps.len();
        for (step, name) in steps {
            let directory = self.output.join(&name);
            // Two of one step are one checkpoint.
            let counts = step <= saved && found.len() < keep && !found.contains(&step);
            let judged = match counts && !enough {
                true => self.judge(exchange, &directory, notice)?,
                false => look(&directory),
            };
            match judged {
                Err(why) => purged.notes.push(format!("{name}: {why}")),
                Ok(looked) if looked.manifest.as_ref().is_some_and(|manifest| manifest.step != step) => {
                    purged.notes.push(format!("{name}: its {MANIFEST} is that of another step"));
                }
                Ok(_) if step > saved => ahead.push(name),
                Ok(_) if counts => {
                    found.insert(step);
                    purged.kept.push(name);
                }
                Ok(Looked { manifest: Some(manifest), .. }) => match self.remove(&directory, &manifest) {
                    Ok(()) => purged.removed.push(name),
                    Err(why) => purged.notes.push(format!("{name} was not removed: {why}")),
                },
                // Another program's: its to remove.
                Ok(_) => purged.kept.push(name),
            }
        }
        if !ahead.is_empty() {
            purged.notes.push(format!(
                "{}: later than step-{saved}, where this training is, so neither counted nor removed; with \
                 train.resume_from = auto the next start goes on from the newest of them that is valid: move them away if \
                 it is not to",
                few(&ahead)
            ));
        }
        self.verified.retain(|name, _| purged.kept.contains(name));
        Ok(purged)
    }

    /// Takes a checkpoint out of the count by one rename, and then apart. One in which
    /// somebody keeps something else stays.
    fn remove(&mut self, directory: &Path, manifest: &Manifest) -> std::result::Result<(), String> {
        let listed = |name: &str| manifest.files.iter().any(|file| file.name == format!("{DCP}/{name}"));
        let other = names_in(directory)?
            .into_iter()
            .find(|name| ![DCP, MANIFEST, MARK].contains(&name.as_str()))
            .or(names_in(&directory.join(DCP))?.into_iter().find(|name| !listed(name)));
        if let Some(other) = other {
            return Err(format!("it holds {other}, which is not of this program"));
        }
        let attempt = self.attempt();
        let place = self.output.join(format!("step-{}.tmp-{attempt}", manifest.step));
        remove_file(&directory.join(MARK))
            .and_then(|()| Mark::own(&self.host, &self.launch).write(directory))
            .and_then(|()| fs::rename(directory, &place))
            .and_then(|()| names::sync_directory(&self.output))
            .map_err(|error| why(&error))?;
        take_apart(&place)
    }

    /// Removes temporary directories whose launch is over.
    pub(super) fn sweep(&self, purged: &mut Purged) {
        let Ok(entries) = fs::read_dir(&self.output) else { return };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let directory = self.output.join(&name);
            let real = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if Name::of(&name) != Name::Temporary || !real || !self.is_dead(&directory) {
                continue;
            }
            match take_apart(&directory) {
                Ok(()) => purged.removed.push(name),
                Err(why) => purged.notes.push(format!("{name} was not removed: {why}")),
            }
        }
    }

    fn is_dead(&self, directory: &Path) -> bool {
        let Some(mark) = Mark::read(directory) else {
            // Of a process that was killed before it had written the mark, which is first.
            let nothing = names_in(directory).is_ok_and(|names| names.iter().all(|name| name == MARK));
            return nothing && is_older(directory, NEW);
        };
        // This process writes one thing at a time, and is here now.
        mark == Mark::own(&self.host, &self.launch)
            || mark.is_dead(&self.host).unwrap_or_else(|| is_older(directory, ABANDONED))
    }
}

/// Whether nothing was written in it for so long, by this host's clock.
fn is_older(directory: &Path, than: Duration) -> bool {
    let inside = [directory.to_path_buf(), directory.join(DCP)]
        .into_iter()
        .flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten())
        .filter_map(|entry| entry.metadata().ok());
    let newest =
        fs::symlink_metadata(directory).into_iter().chain(inside).filter_map(|found| found.modified().ok()).max();
    newest.is_some_and(|newest| SystemTime::now().duration_since(newest).is_ok_and(|since| since > than))
}

/// Removes what this program writes into a directory, and the directory if nothing else is
/// left in it. The mark goes last: until then it says whose the rest is.
pub(super) fn take_apart(directory: &Path) -> std::result::Result<(), String> {
    let failed = |path: &Path, error: &io::Error| format!("{}: {}", path.display(), why(error));
    let dcp_here = directory.join(DCP);
    if fs::symlink_metadata(&dcp_here).is_ok_and(|found| found.is_dir()) {
        for name in names_in(&dcp_here)? {
            // An attempt that was cut short has no manifest yet.
            if is_shard(&name) || name == dcp::METADATA {
                let path = dcp_here.join(name);
                remove_file(&path).map_err(|error| failed(&path, &error))?;
            }
        }
        fs::remove_dir(&dcp_here).map_err(|error| failed(&dcp_here, &error))?;
    }
    for name in super::export::files_of(directory).iter().map(String::as_str).chain([MANIFEST]) {
        let path = directory.join(name);
        remove_file(&path).map_err(|error| failed(&path, &error))?;
    }
    if let Some(other) = names_in(directory)?.iter().find(|name| *name != MARK) {
        return Err(format!("it holds {other}, which is not of this program"));
    }
    remove_file(&directory.join(MARK))
        .and_then(|()| fs::remove_dir(directory))
        .map_err(|error| failed(directory, &error))
}

fn names_in(directory: &Path) -> std::result::Result<Vec<String>, String> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| format!("{}: {}", directory.display(), why(&error)))?;
    Ok(entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// `__3_0.distcp`.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("__").and_then(|rest| rest.strip_suffix("_0.distcp"));
    numbers.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}
