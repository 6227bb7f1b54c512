//! Restarts that bring nothing: counted in a small file of output_dir, so that a training
//! that always fails at the same place is not started for ever.

use std::io;
use std::path::Path;

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
}

/// Counts a start that goes on from `step` and writes the file. A file that is not
/// readable counts as none.
///
/// # Errors
/// The file system's.
pub fn count(output: &Path, step: u64) -> io::Result<Restarts> {
    let file = output.join(FILE);
    let before = std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<Restarts>(&bytes).ok());
    let now = match before {
        None => Restarts { step, starts: 0, fruitless: 0 },
        Some(last) if step > last.step => Restarts { step, starts: last.starts.saturating_add(1), fruitless: 0 },
        Some(last) => {
            Restarts { step, starts: last.starts.saturating_add(1), fruitless: last.fruitless.saturating_add(1) }
        }
    };
    let new = output.join(format!("{FILE}.tmp"));
    std::fs::write(&new, serde_json::to_vec(&now)?)?;
    std::fs::rename(&new, &file)?;
    Ok(now)
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
}
