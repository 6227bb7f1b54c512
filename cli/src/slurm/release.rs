//! The release of Slurm that this host has. Asked of sinfo or scontrol beside srun: srun
//! and sbatch load every plugin before they tell their version, and fail where a
//! required one cannot be loaded (measured with 22.05.8).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use palingenesis::system::program;

/// How long a program may take to tell its version.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where Slurm may be when PATH does not say: daemons are in no user's PATH, and sites
/// that build it themselves put it here.
const USUAL: [&str; 8] = [
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/opt/slurm/bin",
    "/opt/slurm/sbin",
    "/usr/local/slurm/bin",
    "/usr/local/slurm/sbin",
];

/// Year and month: the part of the version that Slurm's loader compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// 24 of 24.11.
    pub major: u32,
    /// 11 of 24.11.
    pub minor: u32,
}

impl Release {
    /// "24.11", "24.11.5", or the first such word in "slurm-wlm 22.05.8".
    pub fn parse(text: &str) -> Option<Release> {
        let of = |word: &str| {
            let mut parts = word.split(['.', '-']);
            let number = |part: Option<&str>| part.filter(|part| part.len() == 2)?.parse::<u32>().ok();
            let (major, minor) = (number(parts.next())?, number(parts.next())?);
            (1..=12).contains(&minor).then_some(Release { major, minor })
        };
        text.split_whitespace().find_map(of)
    }

    /// Of a `plugin_version`: SLURM_VERSION_NUM of slurm/slurm.h.
    pub fn of_plugin_version(number: u32) -> Release {
        Release { major: number >> 16, minor: number >> 8 & 0xff }
    }

    /// Whether its loader compares releases, and the plugin can be used at all.
    pub fn is_supported(self) -> bool {
        self >= Release { major: 21, minor: 8 }
    }

    /// Whether it can put a program before a task's command (spank_prepend_task_argv).
    pub fn can_prepend(self) -> bool {
        self >= Release { major: 23, minor: 11 }
    }

    /// The package with the plugin for it.
    pub fn package(self) -> String {
        format!("palingenesis-slurm{self}")
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.major, self.minor)
    }
}

/// A program of Slurm.
#[derive(Debug, Clone)]
pub struct Program {
    /// Where it is.
    pub path: PathBuf,
    /// Which program was asked for it.
    pub asked: PathBuf,
    /// What it said, or why nothing is known.
    pub said: Result<String, String>,
}

impl Program {
    /// Its release.
    pub fn release(&self) -> Option<Release> {
        Release::parse(self.said.as_ref().ok()?)
    }
}

/// The commands that users start jobs with.
pub fn commands() -> Option<Program> {
    let path = ["srun", "sbatch", "salloc"].iter().find_map(|name| find(name))?;
    let beside = ["sinfo", "scontrol", "squeue"].iter().map(|name| path.with_file_name(name));
    let asked = beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| path.clone());
    Some(Program { said: ask(&asked), path, asked })
}

/// The slurmd: the program that runs, if that is known, else the one that is installed.
pub fn slurmd(running: Option<PathBuf>) -> Option<Program> {
    let path = running.filter(|path| path.is_file()).or_else(|| find("slurmd"))?;
    Some(Program { asked: path.clone(), said: ask(&path), path })
}

/// Of this host, for who needs only that.
pub fn here() -> Option<Release> {
    commands().and_then(|program| program.release()).or_else(|| slurmd(None)?.release())
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    let found = folders
        .chain(USUAL.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| path.is_file() && palingenesis::system::access::may_execute(path))?;
    Some(found)
}

fn ask(path: &Path) -> Result<String, String> {
    let output = program::output(path, &["-V"], &[], PATIENCE).map_err(|error| super::tree::reason(&error))?;
    let text = String::from_utf8_lossy(&output);
    match text.lines().next().map(str::trim).filter(|line| !line.is_empty()) {
        Some(line) if Release::parse(line).is_some() => Ok(palingenesis::config::printable(line)),
        Some(line) => Err(format!("it said {}", palingenesis::config::printable(line))),
        None => Err("it said nothing, as where it finds no slurm.conf".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_packages_of_slurm_say_of_themselves() {
        for (text, release) in [
            ("slurm-wlm 22.05.8", Some("22.05")),
            ("slurm 24.11.5", Some("24.11")),
            ("slurm 25.05.0-0rc1", Some("25.05")),
            ("24.05", Some("24.05")),
            ("slurm 2.6.5", None),
            ("", None),
            ("4294967296.5", None),
        ] {
            assert_eq!(Release::parse(text).map(|release| release.to_string()).as_deref(), release, "{text}");
        }
        // 0x160508 is SLURM_VERSION_NUMBER of 22.05.8.
        let debian = Release::of_plugin_version(0x0016_0508);
        assert_eq!(debian.package(), "palingenesis-slurm22.05");
        assert!(debian.is_supported() && !debian.can_prepend());
        assert!(!Release { major: 20, minor: 11 }.is_supported());
        assert!(Release { major: 23, minor: 11 }.can_prepend() && Release { major: 26, minor: 5 }.can_prepend());
    }
}
