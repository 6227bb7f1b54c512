//! One training at a time in an `output_dir`: rank 0 holds a lock of the kernel's on
//! `lock.json`, which says whose it is. The kernel drops it when the process ends, however it
//! ends, so that what a killed training leaves never keeps its successor waiting. The file
//! itself means nothing and stays; no clock is compared.
//!
//! It is a lock of fcntl(2) on an open file, which NFS and most cluster file systems carry
//! between nodes. Where a file system has no locks the training goes on without, and where it
//! has them on each node alone (Lustre's `localflock`, NFS's `local_lock`) a training on
//! another node is not seen.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use palingenesis::config::printable;
use palingenesis::system::clock;
use serde::{Deserialize, Serialize};

use super::names::Mark;
use super::together::together;
use super::{CheckpointError, Checkpoints, Result, why};
use crate::comm::{Exchange, Tag};

/// Name of the file in `output_dir`.
pub const FILE: &str = "lock.json";

const CLAIM: Tag = Tag::of("claim of output_dir", 0);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(200);
/// What a file of ours begins with.
const BEGINS: &[u8] = b"{\"palingenesis\":";
const LONGEST: u64 = 4096;

/// What the file says: of people's interest, but for `job` and `restart`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    /// 1, the form of this file.
    palingenesis: u32,
    host: String,
    pid: u32,
    launch: String,
    /// Nanoseconds since 1970, by its host's clock.
    since: u64,
    /// SLURM_JOB_ID, where it is a job.
    job: Option<String>,
    /// SLURM_RESTART_COUNT: how often Slurm has started the job again.
    restart: u64,
}

impl Holder {
    fn own(mark: Mark) -> Holder {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Holder {
            palingenesis: 1,
            host: mark.host,
            pid: mark.pid,
            launch: mark.launch,
            since: clock::now(),
            job: variable("SLURM_JOB_ID"),
            restart: variable("SLURM_RESTART_COUNT").and_then(|count| count.parse().ok()).unwrap_or(0),
        }
    }

    /// Slurm starts a job again only when its last run is over; a lock that outlives it is a
    /// dead node's that a file server still believes in.
    fn is_earlier_run_of(&self, own: &Holder) -> bool {
        self.job.is_some() && self.job == own.job && self.restart < own.restart
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.pid, printable(&self.host))?;
        if let Some(job) = &self.job {
            write!(f, ", job {}", printable(job))?;
        }
        write!(f, ", since {}", clock::date_and_time(self.since))
    }
}

/// What came of an attempt.
enum Tried {
    Held(File),
    /// By whom, if its file says so.
    Busy(Option<Holder>),
    /// Why this file system cannot tell.
    NoLocks(String),
}

impl Checkpoints {
    /// Claims `output_dir` for this training until [`Checkpoints`] is dropped or the process
    /// ends, and makes it if it is not there. A predecessor that is still there, perhaps
    /// writing its last checkpoint, is waited for; `notice` says so, and what else a person
    /// should know. All ranks call it together, only rank 0 looks.
    ///
    /// # Errors
    /// Busy: another training did not end within `wait`. Storage: the directory or the file
    /// cannot be made.
    pub fn claim(&mut self, exchange: &mut dyn Exchange, wait: Duration, notice: &(dyn Fn(&str) + Sync)) -> Result<()> {
        let first = exchange.rank() == 0;
        let own = Holder::own(Mark::own(&self.host, &self.launch));
        let mut held = None;
        let outcomes = together(exchange, CLAIM, |stop| {
            if !first {
                return Ok(None);
            }
            match hold(&self.output, &own, wait, notice, stop) {
                Ok(Ok(file)) => {
                    held = file;
                    Ok(None)
                }
                Ok(Err(busy)) => Ok(Some(busy)),
                Err(error) => Err(format!("train.output_dir = {}: {}", self.output.display(), why(&error))),
            }
        })?;
        self.held = held;
        for outcome in outcomes {
            if let Some(busy) = outcome.map_err(CheckpointError::Storage)? {
                return Err(CheckpointError::Busy(busy));
            }
        }
        Ok(())
    }
}

/// The locked file, or none where there are no locks; else why not.
fn hold(
    output: &Path,
    own: &Holder,
    wait: Duration,
    notice: &(dyn Fn(&str) + Sync),
    stop: &AtomicBool,
) -> io::Result<std::result::Result<Option<File>, String>> {
    fs::create_dir_all(output)?;
    let (place, shown) = (output.join(FILE), output.display());
    let began = Instant::now();
    let mut told = false;
    loop {
        let holder = match attempt(&place)? {
            Tried::Held(file) => {
                sign(&file, own);
                return Ok(Ok(Some(file)));
            }
            Tried::NoLocks(why) => {
                notice(&format!(
                    "warning: {}: {why}: a second training in train.output_dir would not be seen",
                    place.display()
                ));
                return Ok(Ok(None));
            }
            Tried::Busy(holder) => holder,
        };
        let who = holder.as_ref().map_or_else(|| "another process".to_string(), ToString::to_string);
        if began.elapsed() < wait && !stop.load(Ordering::Relaxed) {
            if !told {
                notice(&format!("waiting for another training to end in train.output_dir = {shown}: {who}"));
                told = true;
            }
            std::thread::sleep(AGAIN);
            continue;
        }
        if holder.is_some_and(|holder| holder.is_earlier_run_of(own)) && !stop.load(Ordering::Relaxed) {
            notice(&format!(
                "warning: train.output_dir = {shown} is still locked for this job's earlier run ({who}), which Slurm \
                 takes for over: going on without it"
            ));
            // Who comes by this name then has another file, with a lock of its own.
            fs::remove_file(&place)?;
            continue;
        }
        return Ok(Err(format!(
            "another training runs in train.output_dir = {shown} ({who}) and has not ended within {} s \
             (checkpoint.grace); end it, or give this one another train.output_dir; if its node is dead, remove {}",
            wait.as_secs(),
            place.display()
        )));
    }
}

/// Says whose it is now. What is no file of ours stays as it is.
fn sign(file: &File, own: &Holder) {
    let mut begins = [0; BEGINS.len()];
    let is_ours = file.read_exact_at(&mut begins, 0).is_ok_and(|()| begins == *BEGINS);
    if !is_ours && file.metadata().is_ok_and(|data| data.len() > 0) {
        return;
    }
    let Ok(mut text) = serde_json::to_vec(own) else { return };
    text.push(b'\n');
    // On a full disk it is a lock all the same.
    let _ = file.write_all_at(&text, 0).and_then(|()| file.set_len(text.len() as u64)).and_then(|()| file.sync_data());
}

fn attempt(place: &Path) -> io::Result<Tried> {
    let mut open = OpenOptions::new();
    open.read(true).write(true).create(true).mode(0o644).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    loop {
        let file = open.open(place)?;
        match lock(&file) {
            Ok(()) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::EAGAIN | libc::EACCES) => return Ok(Tried::Busy(read(&file))),
                Some(libc::ENOSYS | libc::ENOLCK | libc::EOPNOTSUPP | libc::EINVAL) => {
                    return Ok(Tried::NoLocks(why(&error)));
                }
                _ => return Err(error),
            },
        }
        // Of a file that was removed meanwhile the lock keeps nobody out.
        let (held, named) = (file.metadata()?, fs::symlink_metadata(place));
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
            return Ok(Tried::Held(file));
        }
    }
}

/// For writing, of the whole file, until the last descriptor of this opening is closed.
fn lock(file: &File) -> io::Result<()> {
    // SAFETY: zeros are a valid flock: from the beginning, to the end, no process.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as libc::c_short;
    whole.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open, and the kernel reads a struct that lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn read(file: &File) -> Option<Holder> {
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::local::Local;

    fn holder(job: &str, restart: u64) -> Holder {
        let (host, launch) = ("n1".to_string(), "l".to_string());
        Holder { palingenesis: 1, host, pid: 1, launch, since: 0, job: Some(job.into()), restart }
    }

    fn claimed(output: &Path) -> (Checkpoints, Result<()>) {
        let mut checkpoints = Checkpoints::new(output, Some("l"), "n1", Duration::ZERO);
        let outcome = checkpoints.claim(&mut Local::alone(), Duration::from_millis(300), &|_| {});
        (checkpoints, outcome)
    }

    #[test]
    fn one_at_a_time_and_the_next_when_the_first_has_ended() {
        let output = tempfile::tempdir().unwrap();
        let (first, outcome) = claimed(output.path());
        outcome.unwrap();
        let (_, outcome) = claimed(output.path());
        let Err(CheckpointError::Busy(text)) = outcome else { panic!("{outcome:?}") };
        let who = format!("(process {} on n1", std::process::id());
        assert!(text.contains(&who) && text.contains("output_dir") && text.contains(FILE), "{text}");
        drop(first);
        claimed(output.path()).1.unwrap();
    }

    #[test]
    fn a_lock_that_a_server_keeps_for_a_dead_node_gives_way_to_the_same_job() {
        let output = tempfile::tempdir().unwrap();
        let place = output.path().join(FILE);
        let Tried::Held(file) = attempt(&place).unwrap() else { panic!() };
        sign(&file, &holder("7", 1));
        let go = |own: &Holder| hold(output.path(), own, Duration::ZERO, &|_| {}, &AtomicBool::new(false)).unwrap();
        for other in [holder("8", 2), holder("7", 1), holder("7", 0)] {
            assert!(go(&other).unwrap_err().contains("process 1 on n1, job 7, since 19"), "{other:?}");
        }
        let taken = go(&holder("7", 2)).unwrap();
        assert!(taken.is_some() && go(&holder("7", 2)).is_err(), "the new one is locked");
        // The dead one's end changes nothing.
        drop(file);
        assert!(go(&holder("7", 2)).is_err());
    }

    #[test]
    fn somebody_else_s_file_of_that_name_keeps_what_it_says() {
        let output = tempfile::tempdir().unwrap();
        let place = output.path().join(FILE);
        fs::write(&place, "{\"my\": 1}").unwrap();
        let (_held, outcome) = claimed(output.path());
        outcome.unwrap();
        assert_eq!(fs::read_to_string(&place).unwrap(), "{\"my\": 1}");
        assert!(claimed(output.path()).1.is_err());
        fs::remove_file(&place).unwrap();
        std::os::unix::fs::symlink("/nowhere", &place).unwrap();
        let error = claimed(output.path()).1.unwrap_err();
        assert!(matches!(error, CheckpointError::Storage(_)), "{error}");
    }
}
