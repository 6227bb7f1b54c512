//! Names below `output_dir`, and how directories come and go: what is about to be written
//! or removed bears a temporary name and a mark that says whose it is.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// In a directory that is being written or removed: whose it is.
pub(super) const MARK: &str = "attempt.json";
/// In a step's directory: PyTorch's part.
pub(super) const DCP: &str = "dcp";
/// In a step's directory: ours.
pub(super) const MANIFEST: &str = "manifest.json";
/// What one of our own small files may be long.
const LONGEST_MARK: u64 = 64 << 10;

/// What a name in `output_dir` stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Name {
    /// `step-500`.
    Step(u64),
    /// `step-500.old-ATTEMPT`: moved aside for another step-500.
    Old(u64),
    /// `step-500.tmp-ATTEMPT`, `final.tmp-ATTEMPT`.
    Temporary,
    /// Looks like a step, but is none; why.
    Odd(&'static str),
    /// Nothing of ours.
    Foreign,
}

impl Name {
    pub(super) fn of(name: &str) -> Name {
        if name.strip_prefix("final.tmp-").is_some_and(is_attempt) {
            return Name::Temporary;
        }
        let Some(rest) = name.strip_prefix("step-") else { return Name::Foreign };
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (digits, tail) = rest.split_at(end);
        let step = match digits.parse::<u64>() {
            Ok(step) if digits == step.to_string() => step,
            Ok(_) => return Name::Odd("its number begins with zeros, which this program never writes"),
            Err(_) if digits.is_empty() => return Name::Odd("it has no number"),
            Err(_) => return Name::Odd("its number is too large for a step"),
        };
        match tail.split_at_checked(5) {
            _ if tail.is_empty() => Name::Step(step),
            Some((".old-", attempt)) if is_attempt(attempt) => Name::Old(step),
            Some((".tmp-", attempt)) if is_attempt(attempt) => Name::Temporary,
            _ => Name::Odd("it is no name of a step"),
        }
    }
}

/// `LAUNCH-NUMBER`.
fn is_attempt(text: &str) -> bool {
    !text.is_empty() && text.len() <= 96 && text.bytes().all(is_plain)
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

/// What tells this launch from others in file names.
pub(super) fn launch(id: Option<&str>) -> String {
    let plain: String =
        id.unwrap_or_default().bytes().filter(|byte| is_plain(*byte)).take(64).map(char::from).collect();
    if plain.is_empty() { format!("p{}", std::process::id()) } else { plain }
}

/// Whose a temporary directory is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mark {
    /// Of rank 0.
    pub host: String,
    /// Of rank 0's process.
    pub pid: u32,
    /// When that began, in the kernel's ticks since it started: process ids come again.
    pub began: u64,
    /// Differs from launch to launch.
    pub launch: String,
}

impl Mark {
    pub(super) fn own(host: &str, launch: &str) -> Mark {
        let pid = std::process::id();
        Mark { host: host.to_string(), pid, began: began(pid).unwrap_or_default(), launch: launch.to_string() }
    }

    /// Writes it into `directory`.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        write_new(&directory.join(MARK), &serde_json::to_vec(self)?)
    }

    /// From `directory`; nothing where there is none, or not one of ours.
    pub(super) fn read(directory: &Path) -> Option<Mark> {
        serde_json::from_slice(&read_small(&directory.join(MARK), LONGEST_MARK).ok()?).ok()
    }

    /// Whether the process that made it has surely ended; nothing where this host cannot
    /// know.
    pub(super) fn is_dead(&self, host: &str) -> Option<bool> {
        (self.host == host).then(|| began(self.pid) != Some(self.began))
    }
}

/// When a process began: field 22 of /proc/PID/stat, proc(5).
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Writes a file that is not there yet, down to the disk.
pub(super) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Reads a regular file of at most `longest` bytes.
pub(super) fn read_small(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let found = fs::symlink_metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if found.len() > longest {
        return Err(io::Error::other(format!("it has {} bytes, more than {longest}", found.len())));
    }
    fs::read(path)
}

/// What was made in a directory survives a loss of power.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        // Some file systems have nothing to sync in a directory, fsync(2).
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        done => done,
    }
}

/// Makes a symbolic link in place of another; whatever else has the name stays.
/// One name on the way, so that whoever is killed meanwhile leaves no more than that one.
pub(super) fn point(link: &Path, target: &str) -> io::Result<()> {
    match fs::symlink_metadata(link) {
        Ok(found) if !found.is_symlink() => return Ok(()),
        _ if fs::read_link(link).is_ok_and(|there| there == Path::new(target)) => return Ok(()),
        _ => {}
    }
    let new = link.with_file_name(".latest.new");
    if fs::symlink_metadata(&new).is_ok_and(|found| found.is_symlink()) {
        fs::remove_file(&new)?;
    }
    std::os::unix::fs::symlink(target, &new)?;
    fs::rename(&new, link).inspect_err(|_| drop(fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_step_names_are_steps() {
        assert_eq!(Name::of("step-0"), Name::Step(0));
        assert_eq!(Name::of("step-500"), Name::Step(500));
        assert_eq!(Name::of("step-18446744073709551615"), Name::Step(u64::MAX));
        assert_eq!(Name::of("step-500.old-77-1"), Name::Old(500));
        assert_eq!(Name::of("step-500.tmp-77-1"), Name::Temporary);
        assert_eq!(Name::of("final.tmp-a"), Name::Temporary);
        for odd in
            ["step-", "step-007", "step-18446744073709551616", "step--5", "step-5.tmp-", "step-5.tmp-../x", "step-5 "]
        {
            assert!(matches!(Name::of(odd), Name::Odd(_)), "{odd}");
        }
        for foreign in ["final", "latest", "metrics.jsonl", "tmp-step-5", "checkpoint-5", ""] {
            assert_eq!(Name::of(foreign), Name::Foreign, "{foreign}");
        }
    }

    #[test]
    fn a_launch_id_becomes_part_of_a_file_name_whatever_is_in_it() {
        assert_eq!(launch(Some("4711.0-1764500000")), "47110-1764500000");
        assert_eq!(launch(Some("../../etc")), "etc");
        assert!(is_attempt(&launch(Some("/"))));
        assert!(is_attempt(&launch(None)));
        assert!(launch(Some(&"x".repeat(1000))).len() <= 64);
    }

    #[test]
    fn a_mark_knows_its_process_from_another_with_the_same_id() {
        let own = Mark::own("here", "1");
        assert_eq!(own.is_dead("here"), Some(false));
        assert_eq!(own.is_dead("elsewhere"), None);
        assert_eq!(Mark { began: own.began + 1, ..own }.is_dead("here"), Some(true));
    }
}
