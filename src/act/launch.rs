//! Lets a task start the program that the plan names instead of its command.
//! The task's words are changed and Slurm starts them: an execve from here
//! would lose TaskProlog and the user's resource limits.

use std::error::Error;

use crate::plan::Plan;
use crate::plan::worker::{ARGUMENT_VARIABLE, How, LaunchPlan};

/// The words of a task before it runs.
pub trait TaskCommand {
    /// Why they could not be changed.
    type Error: Error;

    /// Puts `program` before them.
    ///
    /// # Errors
    /// When the host refuses.
    fn prepend(&mut self, program: &str) -> Result<(), Self::Error>;

    /// Puts `program` in place of the first word, and that word, byte for byte,
    /// into the variable `name`.
    ///
    /// # Errors
    /// When the host refuses.
    fn replace_first(&mut self, program: &str, name: &str) -> Result<(), Self::Error>;

    /// The error of a plan that names no way.
    fn undecided(&self) -> Self::Error;
}

/// Does what `plan` says of the program. After the plan's variables: one of
/// them may be removed that is set here.
///
/// # Errors
/// When the words could not be changed.
pub fn start<C: TaskCommand>(plan: &Plan, command: &mut C) -> Result<(), C::Error> {
    match &plan.launch {
        None => Ok(()),
        Some(LaunchPlan { how: How::Prepend, program, .. }) => command.prepend(program),
        Some(LaunchPlan { how: How::Replace, program, .. }) => command.replace_first(program, ARGUMENT_VARIABLE),
        Some(LaunchPlan { how: How::Unknown, .. }) => Err(command.undecided()),
    }
}
