//! `palingenesis doctor`: is this node and this install right? The facts are read in
//! `facts` and `slurm`, judged in `rules`, printed in `print`. With --config it is the
//! check of one site file, `site`. It changes nothing.

mod facts;
mod print;
mod rules;
mod site;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

pub use rules::{Check, Verdict, arguments, before_pyxis, library, release};
pub use site::Broken;

use crate::slurm::release::Release;
use facts::Facts;

/// The exit code where it could not be found out, or the command is wrong.
pub const EXIT_UNKNOWN: u8 = 3;

/// Below the options in --help.
pub const ABOUT: &str = "\
Looks at this node and this install: Slurm's release and the plugin's, plugstack.conf and what it includes, whether \
the \
library loads, pyxis, the site file, GPUs and network cards, NCCL and CUDA, directories, limits, enroot. It changes \
nothing and need not be root; what only root can see is told as unknown. A login host without GPUs is right too.

With --config FILE it checks that site file instead, as the plugin reads it: what it would refuse is one line.

Exit codes: 0 right, notes allowed; 1 warnings; 2 errors; 3 where it could not be found out, and for wrong usage. With \
--config: 0 where the file is right; 78 where jobs with the flag would be refused.";

/// What to check.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Check this site file instead of the node.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "root", "slurm"])]
    config: Option<String>,

    /// With --config: print also what holds in the end for jobs of this partition.
    #[arg(long, value_name = "NAME", requires = "config")]
    partition: Option<String>,

    /// With --config: print also what holds in the end on this node.
    #[arg(long, value_name = "NODE", requires = "config")]
    node: Option<String>,

    /// Print one JSON object with the keys version, verdict and checks (name, verdict,
    /// text, cure, source); the names stay.
    #[arg(long)]
    json: bool,

    /// The release of Slurm to compare with, as 24.11, instead of this host's.
    #[arg(long, value_name = "RELEASE", value_parser = parse_release)]
    slurm: Option<Release>,

    /// Read the files of a machine below this directory; no program of it is asked.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

/// For --slurm.
pub fn parse_release(text: &str) -> Result<Release, String> {
    Release::parse(text).ok_or_else(|| "write it as 24.11".into())
}

/// The subcommand.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(file) = &arguments.config {
        site::run(file, arguments.partition.as_deref(), arguments.node.as_deref())?;
        return Ok(ExitCode::SUCCESS);
    }
    let root = arguments.root.as_deref().unwrap_or(Path::new("/"));
    if !root.is_dir() {
        crate::tell(&format!("error: --root {}: no such directory", root.display()));
        return Ok(ExitCode::from(EXIT_UNKNOWN));
    }
    let what = match (&arguments.root, host_name()) {
        (Some(root), _) => format!("the machine in {}", root.display()),
        (None, Some(name)) => format!("host {name}"),
        (None, None) => "this host".into(),
    };
    let who = if palingenesis::system::user::effective_uid() == 0 { "as root" } else { "not as root" };
    let said = Said { json: arguments.json, about: format!("{what}, looked at {who}") };
    let beside = said.clone();
    let (told, ready) = std::sync::mpsc::channel::<()>();
    // Monitoring must not pile up: a thread can end what waits for a file server.
    std::thread::spawn(move || {
        if ready.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let checks = [rules::unanswered(PATIENCE.as_secs())];
            let _ = crate::print(&beside.text(&checks));
            std::process::exit(i32::from(EXIT_UNKNOWN));
        }
    });
    let checks = rules::checks(&Facts::read(root, arguments.slurm));
    drop(told);
    crate::print(&said.text(&checks))?;
    Ok(ExitCode::from(rules::exit_code(rules::overall(&checks))))
}

/// How long the facts may take to read: they are small files, and a few programs that
/// have deadlines of their own.
const PATIENCE: Duration = Duration::from_secs(60);

/// How it is told.
#[derive(Debug, Clone)]
struct Said {
    json: bool,
    about: String,
}

impl Said {
    fn text(&self, checks: &[Check]) -> String {
        if self.json { format!("{}\n", print::json(checks)) } else { print::text(&self.about, checks) }
    }
}

/// The NodeName that this machine has usually.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    name.trim().split('.').next().filter(|name| !name.is_empty()).map(String::from)
}
