//! Whether token shards are what prepare wrote: all bytes are read and their checksums
//! compared, on demand or in a thread beside a training. Files are read, not mapped, so that
//! what passes by does not count as the training's memory, and one that is cut meanwhile is
//! an error and no signal.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use super::{DataError, Result, io, wrong};

/// Bytes read at once.
const BLOCK: usize = 1 << 20;

/// Shards to be checked.
#[derive(Debug)]
pub struct Check {
    pub(super) directory: PathBuf,
    /// Names, and checksums as data.json has them.
    pub(super) shards: Vec<(String, String)>,
}

impl Check {
    /// Reads them; ends without a word soon after `stop` was set.
    ///
    /// # Errors
    /// Names every damaged one. A file that cannot be read.
    pub fn run(&self, stop: &AtomicBool) -> Result<()> {
        let mut damaged = Vec::new();
        for (name, told) in &self.shards {
            let Some(sum) = sum(&self.directory.join(name), stop)? else { return Ok(()) };
            if format!("{sum:08x}") != *told {
                damaged.push(name.as_str());
            }
        }
        if damaged.is_empty() {
            return Ok(());
        }
        wrong(format!(
            "{}: damaged: the contents of {} do not have the checksum of data.json; prepare the data again",
            self.directory.display(),
            damaged.join(", ")
        ))
    }

    /// The same in a thread of its own, until the end or until what is returned is dropped.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn beside(self) -> Result<Beside> {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, outcome) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("data check".into());
        let run = move || drop(tell.send(self.run(&stopped)));
        thread.spawn(run).map_err(|error| DataError::Io(format!("no thread could be started: {error}")))?;
        Ok(Beside { stop, outcome, over: false })
    }
}

/// A check that is under way.
#[derive(Debug)]
pub struct Beside {
    stop: Arc<AtomicBool>,
    outcome: Receiver<Result<()>>,
    over: bool,
}

impl Beside {
    /// Whether all was read and is as it should be; waits no longer than `patience` for it.
    ///
    /// # Errors
    /// See [`Check::run`].
    pub fn is_over(&mut self, patience: Duration) -> Result<bool> {
        if !self.over {
            match self.outcome.recv_timeout(patience) {
                Ok(outcome) => outcome?,
                Err(RecvTimeoutError::Timeout) => return Ok(false),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(DataError::Io("the thread that checks the data has panicked".into()));
                }
            }
            self.over = true;
        }
        Ok(true)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Of a whole file; none if it was stopped.
fn sum(path: &Path, stop: &AtomicBool) -> Result<Option<u32>> {
    let mut file = File::open(path).map_err(io("cannot be opened", path))?;
    let mut sum = crc32fast::Hasher::new();
    let mut block = vec![0; BLOCK];
    while !stop.load(Ordering::Relaxed) {
        match file.read(&mut block) {
            Ok(0) => return Ok(Some(sum.finalize())),
            Ok(read) => sum.update(&block[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io("cannot be read", path)(error)),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    /// A shard that comes as slowly as the test wants.
    fn slow(directory: &Path) -> Check {
        let path = std::ffi::CString::new(directory.join("slow").as_os_str().as_bytes()).unwrap();
        // SAFETY: the kernel reads a string that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        // Python: zlib.crc32(b"tokens")
        Check { directory: directory.into(), shards: vec![("slow".into(), "aa5a118e".into())] }
    }

    #[test]
    fn a_check_beside_the_training_is_over_when_all_is_read() {
        for (content, right) in [(b"tokens", true), (b"tokenz", false)] {
            let directory = tempfile::tempdir().unwrap();
            let mut beside = slow(directory.path()).beside().unwrap();
            assert_eq!(beside.is_over(Duration::from_millis(50)), Ok(false));
            let mut end = File::options().write(true).open(directory.path().join("slow")).unwrap();
            end.write_all(content).unwrap();
            assert_eq!(beside.is_over(Duration::from_millis(50)), Ok(false));
            drop(end);
            let limit = Duration::from_secs(20);
            if right {
                assert_eq!((beside.is_over(limit), beside.is_over(Duration::ZERO)), (Ok(true), Ok(true)));
            } else {
                let error = beside.is_over(limit).unwrap_err().to_string();
                assert!(error.contains("the contents of slow do not have the checksum"), "{error}");
            }
        }
    }
}
