//! Shows by a token whether directories are the same on all nodes: rank 0's node writes,
//! every node looks, rank 0's node removes.

use std::os::fd::BorrowedFd;

use super::Work;
use crate::plan::StepPlan;
use crate::plan::preflight::directories::{Place, Seen, Token};

/// Rank 0's node: leaves tokens. Answer: [`tokens`] reads it.
pub fn writing(_places: Vec<Place>, _step: &StepPlan) -> impl Work + use<> {
    Done(Some(b"[]".to_vec()))
}

/// Every node: looks for them. `places` are this node's own; nothing else is opened,
/// whatever the tokens say. Answer: [`seen`] reads it.
pub fn looking(_places: Vec<Place>, _tokens: Vec<Token>, _step: &StepPlan) -> impl Work + use<> {
    Done(Some(b"[]".to_vec()))
}

/// Reads what [`writing`] answered, on any node.
///
/// # Errors
/// What is wrong with it.
pub fn tokens(_bytes: &[u8]) -> Result<Vec<Token>, String> {
    Ok(Vec::new())
}

/// Reads what [`looking`] answered on another node.
///
/// # Errors
/// What is wrong with it.
pub fn seen(_bytes: &[u8]) -> Result<Vec<Seen>, String> {
    Ok(Vec::new())
}

/// Rank 0's node: removes its tokens; where the step does not start, also the directory
/// that was made for one. Waits a few seconds at the most.
pub fn clean(_places: &[Place], _tokens: &[Token], _starts: bool) {}

struct Done(Option<Vec<u8>>);

impl Work for Done {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        self.0.take()
    }
}
