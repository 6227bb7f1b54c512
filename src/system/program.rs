//! Runs a program and reads what it prints, with a deadline. By std's way of starting one,
//! which copies none of this process's memory and takes none of its locks: srun has
//! threads.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::child::{self, ANSWER_MAX};

/// What `program` prints to its standard output, whatever its exit code; it sees these
/// variables beside our own, no input, and its errors are nobody's. Killed when time is
/// up.
///
/// # Errors
/// When it cannot be started, prints too much or takes too long.
pub fn output(
    program: &Path,
    arguments: &[&str],
    variables: &[(&str, &str)],
    deadline: Duration,
) -> io::Result<Vec<u8>> {
    let end = Instant::now() + deadline;
    let mut command = Command::new(program);
    command.args(arguments.iter().map(OsStr::new)).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut running = Killed(command.spawn()?);
    let Some(pipe) = running.0.stdout.take() else {
        return Err(io::Error::other("no pipe"));
    };
    let mut text = Vec::new();
    child::read_until(&OwnedFd::from(pipe), &mut text, end)?;
    if text.len() > ANSWER_MAX { Err(io::Error::other("the output is too long")) } else { Ok(text) }
}

/// Killed, if it still runs, and collected.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let end = Instant::now() + Duration::from_millis(200);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_prints_comes_back_and_one_that_waits_is_killed() {
        let shell = Path::new("/bin/sh");
        let long = Duration::from_secs(20);
        let text = output(shell, &["-c", "echo $A; exit 3"], &[("A", "1 2")], long).unwrap();
        assert_eq!(text, b"1 2\n");
        assert!(output(Path::new("/no/such"), &[], &[], long).is_err());
        let start = Instant::now();
        let error = output(shell, &["-c", "exec sleep 600"], &[], Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(output(shell, &["-c", "exec yes"], &[], long).is_err());
        assert!(start.elapsed() < long);
    }
}
