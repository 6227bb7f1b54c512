//! The `palingenesis` command: a door for people, which holds no rule of the
//! product. What it prints comes from the plan the Slurm plugin makes too.

mod archive;
mod doctor;
mod enable;
mod explain;
mod node;
mod pages;
mod report;
mod slurm;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use palingenesis::EXIT_REFUSED;
use palingenesis::config::SpecError;
use palingenesis::config::site::{SITE_FILE, SiteError};
use palingenesis::plan::Refusal;
use slurm::library::PROBE;

/// Shows what `srun --palingenesis` gives a job, and why.
#[derive(Debug, Parser)]
#[command(
    name = "palingenesis",
    version,
    arg_required_else_help = true,
    after_help = "Not there yet, and no command of this version: launch, diagnose, size, losses, init, checkpoints.\n\
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
    /// Checks this node and this install, or a site file.
    #[command(after_help = doctor::ABOUT)]
    Doctor(doctor::Arguments),
    /// Prints which rank of a job failed first, from what its srun kept.
    #[command(after_help = report::ABOUT)]
    Report(report::Arguments),
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let word = |index: usize| words.get(index).and_then(|word| word.to_str()).unwrap_or_default();
    if word(1) == PROBE && words.len() == 3 {
        slurm::library::probe(word(2));
    }
    if word(1) == pages::WORD && words.len() == 3 {
        let folder = Path::new(&words[2]);
        return ended(generate(folder).with_context(|| format!("{}", folder.display())).map(|()| ExitCode::SUCCESS));
    }
    // Packages install the same program as palingenesis-enable too.
    if Path::new(word(0)).file_name().is_some_and(|name| name == enable::NAME) {
        return ended(enable::run(&enable::Arguments::parse()));
    }
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        if error.use_stderr() && word(1) == "doctor" {
            // 2 is what monitoring takes for errors of the node.
            let _ = error.print();
            std::process::exit(i32::from(doctor::EXIT_UNKNOWN));
        }
        error.exit()
    });
    ended(match arguments.command {
        Command::Explain(arguments) => explain::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Report(arguments) => report::run(&arguments).map(|()| ExitCode::SUCCESS),
    })
}

fn ended(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        tell(&format!("error: {error}"));
        ExitCode::from(exit_code(&error))
    })
}

/// For packages.
fn generate(folder: &Path) -> io::Result<()> {
    let see = "palingenesis-spec(7), palingenesis.toml(5), palingenesis-worker(1)";
    pages::program(Arguments::command(), "1", see, folder)?;
    pages::program(enable::Arguments::command(), "8", "palingenesis-doctor(1), spank(7), slurm.conf(5)", folder)?;
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
    palingenesis::system::output::to_stderr(&palingenesis::report::one_line(&format!("palingenesis: {text}")));
}

/// Writes to stdout. A reader that has seen enough, such as `head`, is no error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to standard output"),
        _ => Ok(()),
    }
}
