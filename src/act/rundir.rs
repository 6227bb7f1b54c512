//! The records of a step whose ranks failed, kept as a file of the user: JOB.STEP.json in
//! the directory of `rundir=`. Written by srun at its end, read by `palingenesis report`.
//!
//! A file is made under a name that nobody can foresee, and renamed. That of an earlier
//! step with the same ids, of a job that was requeued or an id that came again, is
//! replaced. In a directory that others may change it is written, and said whose word it
//! is then.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::printable;
use crate::facts::exit::ExitRecord;
use crate::plan::failure::StepEnd;
use crate::system::user::effective_uid;
use crate::system::{child, folder};

/// The form of the files.
const VERSION: u32 = 1;
/// No record of ours is longer; 100,000 of them are not.
const LONGEST: u64 = 64 << 20;
/// More steps of one job are not looked at.
const MOST_STEPS: usize = 10_000;

/// What is kept of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    version: u32,
    /// When srun ended, in nanoseconds since 1970.
    pub ended_ns: u64,
    /// What it knew of the end.
    pub step: StepEnd,
    /// What the nodes had sent.
    pub records: Vec<ExitRecord>,
}

impl Kept {
    /// Of a step that has ended.
    pub fn new(step: StepEnd, ended_ns: u64, records: Vec<ExitRecord>) -> Kept {
        Kept { version: VERSION, ended_ns, step, records }
    }
}

/// Why there is nothing to read.
#[derive(Debug, Error)]
pub enum RundirError {
    /// The directory or a file cannot be read.
    #[error("{}: {error}", printable(&path.to_string_lossy()))]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is not a file of ours.
    #[error("{} is no record of this step: {why}", printable(&path.to_string_lossy()))]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// Writes in a forked child, since the directory may be that of a file server which is
/// gone.
///
/// Gives back who else may change what is there, as a sentence's end, if somebody may.
///
/// # Errors
/// A sentence's end that says what could not be done and why.
pub fn write(directory: &Path, kept: &Kept, deadline: Duration) -> Result<Option<String>, String> {
    let name = printable(&directory.to_string_lossy());
    let text = serde_json::to_vec(kept).map_err(|error| error.to_string())?;
    let answer = child::run(deadline, || match write_here(directory, kept, &text) {
        Ok(None) => Vec::new(),
        Ok(Some(others)) => format!("+{others}").into_bytes(),
        Err(error) => format!("-{error}").into_bytes(),
    });
    let answer = answer.map_err(|error| format!("{name}: {error}"))?;
    let answer = String::from_utf8_lossy(&answer);
    match (answer.get(..1), answer.get(1..)) {
        (Some("+"), Some(others)) => Ok(Some(format!("{name} {others}"))),
        (_, Some(error)) => Err(format!("{name}: {error}")),
        _ => Ok(None),
    }
}

/// Who may take records out of the directory and put others in their place, beside root
/// and `user`.
fn others(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user && owner != 0 {
        return Some(format!("belongs to user {owner}, who may"));
    }
    // A group is one of those that the user trusts with it; the sticky bit keeps all from
    // what is others'.
    (mode & 0o002 != 0 && mode & 0o1000 == 0).then(|| format!("is open to all (mode {:04o}), who may", mode & 0o7777))
}

fn write_here(directory: &Path, kept: &Kept, text: &[u8]) -> io::Result<Option<String>> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let data = std::fs::metadata(directory)?;
    let hidden = directory.join(folder::unforeseen_name()?);
    let outcome = written(&hidden, text)
        .and_then(|()| std::fs::rename(&hidden, directory.join(file_name(kept.step.job, kept.step.step))));
    if outcome.is_err() {
        let _ = std::fs::remove_file(&hidden);
    }
    outcome.map(|()| others(data.uid(), data.mode(), effective_uid()))
}

fn written(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let mut file = options.open(path)?;
    file.write_all(text)?;
    // A file server tells only now that there is no room.
    file.sync_all()
}

fn file_name(job: u32, step: u32) -> String {
    format!("{job}.{step}.json")
}

/// What is kept of a job's steps, or of one of them, by step.
///
/// # Errors
/// When the directory, or one of its files that is named so, cannot be read or is not
/// ours. A step of which there is nothing is no error.
pub fn read(directory: &Path, job: u32, step: Option<u32>) -> Result<Vec<Kept>, RundirError> {
    let fail = |error| RundirError::Io { path: directory.into(), error };
    let mut steps = Vec::new();
    match step {
        Some(step) => steps.push(step),
        None => {
            for entry in std::fs::read_dir(directory).map_err(fail)? {
                let name = entry.map_err(fail)?.file_name();
                let of_step = name.to_str().and_then(|name| {
                    let step = name.strip_suffix(".json")?.strip_prefix(&format!("{job}."))?.parse().ok()?;
                    (name == file_name(job, step)).then_some(step)
                });
                steps.extend(of_step);
            }
            steps.sort_unstable();
            steps.truncate(MOST_STEPS);
        }
    }
    let found = steps.into_iter().map(|step| read_one(directory, job, step));
    found.filter_map(Result::transpose).collect()
}

fn read_one(directory: &Path, job: u32, step: u32) -> Result<Option<Kept>, RundirError> {
    let path = directory.join(file_name(job, step));
    let text = match regular(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && directory.is_dir() => return Ok(None),
        Err(error) => return Err(RundirError::Io { path, error }),
    };
    let foreign = |why: String| RundirError::Foreign { path: path.clone(), why };
    let kept: Kept = serde_json::from_slice(&text).map_err(|error| foreign(error.to_string()))?;
    if kept.version != VERSION {
        return Err(foreign(format!("its form is {}, and this version reads {VERSION}", kept.version)));
    }
    if (kept.step.job, kept.step.step) != (job, step) {
        return Err(foreign(format!("it is of step {}.{}", kept.step.job, kept.step.step)));
    }
    Ok(Some(kept))
}

/// A file's text; no link, nothing that is waited for and nothing endless.
fn regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut options = OpenOptions::new();
    let file: File =
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    let data = file.metadata()?;
    if !data.is_file() || data.len() > LONGEST {
        return Err(io::Error::other("no regular file, or too long for one of ours"));
    }
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::facts::exit::{Ended, Oom};

    const LONG: Duration = Duration::from_secs(20);

    fn kept(step: u32) -> Kept {
        let record = ExitRecord {
            rank: 5,
            node: "n2".into(),
            node_rank: 1,
            local_rank: 1,
            gpu: None,
            kind: Ended::Exit(1),
            time_ns: 7,
            oom: Oom::Unknown,
            clock: None,
            line: None,
        };
        let step = StepEnd { job: 44, step, ranks: 16, nodes: 4, ..StepEnd::default() };
        Kept::new(step, 9, vec![record])
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("palingenesis-rundir-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn what_is_written_comes_back_and_is_the_user_s_alone() {
        let folder = folder("back");
        let below = folder.join("a/b");
        for step in [3, 0, 0] {
            assert_eq!(write(&below, &kept(step), LONG), Ok(None));
        }
        assert_eq!(read(&below, 44, None).unwrap(), [kept(0), kept(3)]);
        assert_eq!(read(&below, 44, Some(3)).unwrap(), [kept(3)]);
        assert!(read(&below, 44, Some(1)).unwrap().is_empty() && read(&below, 4, None).unwrap().is_empty());
        let data = std::fs::metadata(below.join("44.0.json")).unwrap();
        assert_eq!(data.permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(&below).unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(&below).unwrap().count(), 2, "nothing else is left");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_stands_under_the_name_is_replaced_and_no_link_followed() {
        let folder = folder("links");
        let victim = folder.join("victim");
        std::fs::write(&victim, "mine").unwrap();
        symlink(&victim, folder.join("44.0.json")).unwrap();
        assert!(read(&folder, 44, Some(0)).is_err());
        write(&folder, &kept(0), LONG).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
        assert_eq!(read(&folder, 44, Some(0)).unwrap(), [kept(0)]);
        std::fs::create_dir(folder.join("44.1.json")).unwrap();
        assert!(write(&folder, &kept(1), LONG).unwrap_err().contains("palingenesis-rundir-links"));
        assert!(read(&folder, 44, Some(1)).unwrap_err().to_string().contains("no regular file"));
        assert!(write(&victim, &kept(1), LONG).is_err() && write(Path::new("/proc/x"), &kept(1), LONG).is_err());
        let left = std::fs::read_dir(&folder).unwrap().flatten();
        assert!(!left.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with('.')));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// Whoever owns a directory may rename what is in it (rename(2)), whatever its mode.
    #[test]
    fn a_directory_that_others_may_change_is_written_to_and_told_of() {
        for (owner, mode, told) in [
            (1000, 0o700, None),
            (1000, 0o2770, None),
            (0, 0o1777, None),
            (1000, 0o1777, None),
            (0, 0o777, Some("is open to all (mode 0777), who may")),
            (1000, 0o703, Some("is open to all (mode 0703), who may")),
            (1001, 0o700, Some("belongs to user 1001, who may")),
            (1001, 0o1777, Some("belongs to user 1001, who may")),
        ] {
            assert_eq!(others(owner, mode, 1000).as_deref(), told, "{owner} {mode:o}");
        }
        let folder = folder("others");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
        let told = write(&folder, &kept(0), LONG).unwrap().unwrap();
        assert_eq!(told, format!("{} is open to all (mode 0777), who may", folder.display()));
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
        if effective_uid() == 0 {
            std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
            let told = write(&folder, &kept(1), LONG).unwrap().unwrap();
            assert_eq!(told, format!("{} belongs to user 12345, who may", folder.display()));
        } else {
            println!("skipped in part: needs root, for another user's directory");
        }
        assert_eq!(read(&folder, 44, Some(0)).unwrap(), [kept(0)]);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn foreign_files_are_errors_that_name_them() {
        let folder = folder("foreign");
        let other = serde_json::to_string(&kept(7)).unwrap();
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let later = serde_json::to_string(&kept(0)).unwrap().replace("\"version\":1", "\"version\":2");
        for text in ["", "{}", "\0\u{1b}[2J", "null", &other, &deep, &later, "{\"version\":-1}"] {
            std::fs::write(folder.join("44.0.json"), text).unwrap();
            let error = read(&folder, 44, None).unwrap_err().to_string();
            assert!(error.contains("44.0.json is no record of this step"), "{error}");
            assert!(!error.contains('\u{1b}') && error.len() < 500, "{error}");
        }
        for name in ["44.00.json", "44.+1.json", "44.x.json", "44..json", "440.0.json", "44.0.json.old"] {
            std::fs::write(folder.join(name), "x").unwrap();
        }
        std::fs::remove_file(folder.join("44.0.json")).unwrap();
        assert!(read(&folder, 44, None).unwrap().is_empty());
        assert!(read(&folder.join("none"), 44, None).is_err() && read(&folder.join("none"), 44, Some(0)).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
