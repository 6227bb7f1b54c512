//! palingenesis-worker. For now it only says which rank it was given, so that a
//! cluster can be tried out with `srun --palingenesis palingenesis-worker`.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::str::FromStr;

use palingenesis::EXIT_REFUSED;
use palingenesis::config::printable;
use palingenesis::facts::Environment;
use palingenesis::plan::worker::ARGUMENT_VARIABLE;
use palingenesis::system::output::to_stderr;
use palingenesis::system::variables;

const HELP: &str = "\
palingenesis-worker: prints the rank it was given, one line per process

Start it in a step: srun --palingenesis palingenesis-worker; with srun
--palingenesis=worker ARGUMENT... the plugin starts it with these arguments.
Training does not exist yet in this version; there is nothing to configure.

Options:
  -h, --help     print this text
  -V, --version  print the version
";

/// sysexits.h's EX_USAGE is 64; 2 is what the palingenesis command uses.
const EXIT_USAGE: i32 = 2;

fn main() -> ExitCode {
    // Where the plugin put this program in place of the command's first word.
    let displaced = variables::take(ARGUMENT_VARIABLE);
    let arguments: Vec<OsString> = displaced.into_iter().chain(std::env::args_os().skip(1)).collect();
    let outcome = match arguments.first().map(|argument| argument.to_string_lossy()).as_deref() {
        None => place(&Environment::of_process()).map_err(|line| (EXIT_REFUSED, line)),
        Some("-h" | "--help") => Ok(HELP.to_string()),
        Some("-V" | "--version") => Ok(format!("palingenesis-worker {}\n", env!("CARGO_PKG_VERSION"))),
        Some(other) => Err((
            EXIT_USAGE,
            format!(
                "argument '{}' means nothing yet: this version does not train; run it without arguments",
                printable(other)
            ),
        )),
    };
    let (code, line) = match outcome.and_then(|text| print(&text).map_err(|error| (1, error.to_string()))) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(failed) => failed,
    };
    to_stderr(&format!("palingenesis-worker: error: {line}\n"));
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The line that tells this process's place among the ranks.
fn place(environment: &Environment) -> Result<String, String> {
    let (rank, world) = position(environment, "RANK", "WORLD_SIZE")?;
    let (local_rank, local_world) = position(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    let node_rank: u32 = number(environment, "NODE_RANK", "a number")?;
    let host = text(environment, "MASTER_ADDR")?;
    let port: u16 = number(environment, "MASTER_PORT", "a port")?;
    // An IPv6 address is written in brackets before a port.
    let host = if host.contains(':') { format!("[{}]", printable(host)) } else { printable(host) };
    Ok(format!(
        "rank {rank} of {world}: local rank {local_rank} of {local_world}, node rank {node_rank}, master {host}:{port}\n"
    ))
}

fn position(environment: &Environment, rank: &str, size: &str) -> Result<(u32, u32), String> {
    let number = |name| number::<u32>(environment, name, "a number");
    let (at, of) = (number(rank)?, number(size)?);
    if at < of { Ok((at, of)) } else { Err(unusable(&format!("{rank}={at} is not below {size}={of}"))) }
}

fn number<T: FromStr>(environment: &Environment, name: &str, what: &str) -> Result<T, String> {
    let value = text(environment, name)?;
    value.parse().map_err(|_| unusable(&format!("{name}={} is not {what}", printable(value))))
}

fn text<'a>(environment: &'a Environment, name: &str) -> Result<&'a str, String> {
    match environment.get(name) {
        Some(value) if !value.is_empty() => Ok(value),
        _ => Err(unusable(&format!("{name} is not set"))),
    }
}

fn unusable(what: &str) -> String {
    format!("{what}, so this process belongs to no rank; start it with srun --palingenesis palingenesis-worker")
}

/// A reader that has seen enough is no error.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
