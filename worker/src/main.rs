//! palingenesis-worker: trains, prepares data, and says which rank it was given.

mod cli;
#[path = "../../cli/src/pages.rs"]
mod pages;
mod watch;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::Instant;

use palingenesis::plan::worker::ARGUMENT_VARIABLE;
use palingenesis::system::output::to_stderr;
use palingenesis::system::variables;
use palingenesis_worker::device;

fn main() -> ExitCode {
    let started = Instant::now();
    // Before the first thread.
    device::prepare();
    // Where the plugin put this program in place of the command's first word.
    let displaced = variables::take(ARGUMENT_VARIABLE);
    let arguments: Vec<OsString> = displaced.into_iter().chain(std::env::args_os().skip(1)).collect();
    // A panic has said what it is; exit handlers are not for a process with CUDA in it.
    let outcome = std::panic::catch_unwind(|| cli::run(arguments, started))
        .unwrap_or_else(|_| Err(cli::Failed { code: 101, line: String::new() }));
    let code =
        match outcome.and_then(|text| print(&text).map_err(|error| cli::Failed { code: 1, line: error.to_string() })) {
            Ok(()) => 0,
            Err(cli::Failed { code, line }) => {
                // An end that has already been told has no line.
                if !line.is_empty() {
                    to_stderr(&format!("palingenesis-worker: error: {line}\n"));
                }
                code
            }
        };
    if device::needs_plain_exit() {
        // SAFETY: takes a number, and does not come back.
        unsafe { libc::_exit(i32::from(code)) }
    }
    ExitCode::from(code)
}

/// A reader that has seen enough is no error.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
