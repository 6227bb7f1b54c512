//! The `palingenesis` command: a door for people, which holds no rule of the
//! product. What it prints comes from the plan the Slurm plugin makes too.

mod archive;
mod doctor;
mod explain;
mod node;
mod pages;
mod report;

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use palingenesis::EXIT_REFUSED;
use palingenesis::config::SpecError;
use palingenesis::config::site::{SITE_FILE, SiteError};
use palingenesis::plan::Refusal;

static VERSION: LazyLock<String> = LazyLock::new(|| {
    format!("{} (its SPANK plugin is built for Slurm {})", env!("CARGO_PKG_VERSION"), palingenesis::spank::release())
});

/// Shows what `srun --palingenesis` gives a job, and why.
#[derive(Debug, Parser)]
#[command(
    name = "palingenesis",
    version = VERSION.as_str(),
    arg_required_else_help = true,
    after_help = "Not there yet, and no command of this version: launch, diagnose, size, losses, init, checkpoints; doctor \
                  checks the site file only.\n\
                  The keys of --palingenesis=SPEC: srun --palingenesis=help, or palingenesis explain --spec help."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints what a rank gets from srun --palingenesis, each value with its reason.
    #[command(after_help = explain::ABOUT)]
    Explain(explain::Arguments),
    /// Checks the site file and prints what it means.
    #[command(after_help = doctor::ABOUT)]
    Doctor(doctor::Arguments),
    /// Prints which rank of a job failed first, from what its srun kept.
    #[command(after_help = report::ABOUT)]
    Report(report::Arguments),
    /// Writes the manual pages and the completions of shells below a directory.
    #[command(hide = true)]
    Generate {
        /// The directory.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Generate { folder } => generate(&folder).with_context(|| format!("{}", folder.display())),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("error: {error}"));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// For packages.
fn generate(folder: &Path) -> io::Result<()> {
    let see = "palingenesis-spec(7), palingenesis.toml(5), palingenesis-worker(1)";
    pages::program(Arguments::command(), "1", see, folder)?;
    pages::page(
        &pages::Page {
            name: "palingenesis-spec",
            section: "7",
            about: "what srun --palingenesis can be told",
            synopsis: "srun --palingenesis[=SPEC] ...",
            text: &palingenesis::config::help(),
            see: "palingenesis(1), palingenesis.toml(5), srun(1)",
        },
        folder,
    )?;
    pages::page(
        &pages::Page {
            name: "palingenesis.toml",
            section: "5",
            about: "the site file of palingenesis",
            synopsis: SITE_FILE,
            text: include_str!("../../etc/palingenesis.toml"),
            see: "palingenesis-doctor(1), palingenesis-spec(7)",
        },
        folder,
    )
}

/// A job that would be refused gets the code the job would get.
fn exit_code(error: &anyhow::Error) -> u8 {
    let refused =
        error.is::<Refusal>() || error.is::<SpecError>() || error.is::<SiteError>() || error.is::<doctor::Broken>();
    if refused { u8::try_from(EXIT_REFUSED).unwrap_or(1) } else { 1 }
}

/// One line on stderr.
fn tell(text: &str) {
    palingenesis::system::output::to_stderr(&format!("palingenesis: {text}\n"));
}

/// Writes to stdout. A reader that has seen enough, such as `head`, is no error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to standard output"),
        _ => Ok(()),
    }
}
