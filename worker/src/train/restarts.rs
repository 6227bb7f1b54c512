//! What one start leaves for the next beside checkpoints, in a small file of output_dir: how
//! many of them brought nothing, so that a training that always fails at the same place is
//! not started for ever, and how long a save took.

use std::io;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Name of the file.
pub const FILE: &str = "restarts.json";

/// What the file says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// The step from which the last start went on.
    pub step: u64,
    /// Starts before this one.
    pub starts: u64,
    /// Starts in a row, up to the last, that went on from no later step than the one before.
    pub fruitless: u32,
    /// How long the last save took; 0 without one.
    #[serde(default)]
    pub save_ms: u64,
}

/// Counts a start that goes on from `step` and writes the file. A file that is not
/// readable counts as none.
///
/// # Errors
/// The file system's.
pub fn count(output: &Path, step: u64) -> io::Result<Restarts> {
    let now = match read(output) {
        None => Restarts { step, ..Restarts::default() },
        Some(last) => {
            let fruitless = if step > last.step { 0 } else { last.fruitless.saturating_add(1) };
            Restarts { step, starts: last.starts.saturating_add(1), fruitless, save_ms: last.save_ms }
        }
    };
    write(output, now)?;
    Ok(now)
}

/// Keeps how long a save took. Without it the next start only tries a save for which there
/// may be no time.
pub fn remember_save(output: &Path, took: Duration) {
    let save_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX).max(1);
    if let Some(last) = read(output) {
        let _ = write(output, Restarts { save_ms, ..last });
    }
}

fn read(output: &Path) -> Option<Restarts> {
    serde_json::from_slice(&std::fs::read(output.join(FILE)).ok()?).ok()
}

fn write(output: &Path, restarts: Restarts) -> io::Result<()> {
    let new = output.join(format!("{FILE}.tmp"));
    std::fs::write(&new, serde_json::to_vec(&restarts)?)?;
    std::fs::rename(&new, output.join(FILE))
}

/// Forgets what was counted: the training is over.
pub fn forget(output: &Path) {
    let _ = std::fs::remove_file(output.join(FILE));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_starts_from_no_later_step_are_fruitless() {
        let directory = std::env::temp_dir().join(format!("palingenesis-restarts-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let fruitless = |step| count(&directory, step).unwrap().fruitless;
        assert_eq!([0, 0, 0, 10, 10, 5, 20].map(fruitless), [0, 1, 2, 0, 1, 2, 0]);
        std::fs::write(directory.join(FILE), b"{\"step\":").unwrap();
        assert_eq!(fruitless(20), 0, "a torn file");
        forget(&directory);
        assert_eq!(fruitless(0), 0);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn how_long_a_save_took_is_known_to_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let took = |milliseconds| remember_save(directory.path(), Duration::from_millis(milliseconds));
        took(5);
        assert_eq!(read(directory.path()), None, "no start was counted");
        std::fs::write(directory.path().join(FILE), b"{\"step\":3,\"starts\":1,\"fruitless\":1}").unwrap();
        assert_eq!(count(directory.path(), 3).unwrap(), Restarts { step: 3, starts: 2, fruitless: 2, save_ms: 0 });
        took(1500);
        assert_eq!(count(directory.path(), 4).unwrap(), Restarts { step: 4, starts: 3, fruitless: 0, save_ms: 1500 });
    }
}
