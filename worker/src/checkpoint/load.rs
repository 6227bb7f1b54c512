//! Reads a rank's parts from a chosen checkpoint, at any world size. Every byte was checked
//! when it was chosen ([`super::Checkpoints::choose`] reads all files on all ranks), so
//! nothing is summed a second time here.

use super::dcp::Dcp;
use super::together::together;
use super::{CheckpointError, Checkpoints, Chosen, PartMut, Result};
use crate::comm::{Exchange, Tag};

const READ: Tag = Tag::of("checkpoint to read", 0);

impl Checkpoints {
    /// Fills this rank's parts.
    ///
    /// # Errors
    /// Damaged: a tensor is missing or has another shape, or a file cannot be read, naming
    /// the rank and host that found it; the same on all ranks.
    pub fn load(&self, exchange: &mut dyn Exchange, chosen: &Chosen, parts: &mut [PartMut<'_>]) -> Result<()> {
        let who = self.who(exchange.rank());
        let results = together(exchange, READ, move |stop| {
            let fault = |error: &dyn std::fmt::Display| format!("{}: {error} (seen by {who})", chosen.dcp.display());
            let dcp = Dcp::open(&chosen.dcp).map_err(|error| fault(&error))?;
            for part in parts {
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    return Err(String::new());
                }
                dcp.read(part).map_err(|error| fault(&error))?;
            }
            Ok(())
        })?;
        // Many ranks may find the same; those that only stopped say nothing.
        match results.into_iter().filter_map(std::result::Result::err).find(|why| !why.is_empty()) {
            Some(why) => Err(CheckpointError::Damaged(why)),
            None => Ok(()),
        }
    }
}
