//! Runs the warm-up's command and tells its output as it comes.

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;

mod marker;

use super::preflight::Work;
use crate::plan::warmup::WarmSpec;

/// A warm-up that runs. Dropped, it ends what it has started.
#[derive(Debug)]
pub struct Warmup {}

impl Warmup {
    /// Starts it. `environment` is the task's own, every variable byte for byte;
    /// [`WarmSpec::variables`] is applied to it.
    ///
    /// # Errors
    /// When no child can be started.
    pub fn start(_spec: WarmSpec, _environment: Vec<(OsString, OsString)>) -> io::Result<Warmup> {
        Ok(Warmup {})
    }
}

/// The answer is a [`crate::plan::warmup::WarmOutcome`] as JSON.
impl Work for Warmup {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        None
    }
}
