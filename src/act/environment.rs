//! Puts a plan's variables into a task's environment.

use std::error::Error;

use crate::plan::Plan;

/// The environment of a task before it runs.
pub trait TaskEnvironment {
    /// Why a variable could not be set.
    type Error: Error;

    /// Sets `name`, replacing a value it has.
    ///
    /// # Errors
    /// When the host refuses.
    fn set(&mut self, name: &str, value: &str) -> Result<(), Self::Error>;

    /// Removes `name`, set or not.
    ///
    /// # Errors
    /// When the host refuses.
    fn unset(&mut self, name: &str) -> Result<(), Self::Error>;
}

/// Applies all of `plan`'s variables.
///
/// # Errors
/// The first variable that could not be set or removed.
pub fn apply<E: TaskEnvironment>(plan: &Plan, environment: &mut E) -> Result<(), E::Error> {
    for removed in &plan.unset {
        environment.unset(&removed.name)?;
    }
    for variable in &plan.env {
        environment.set(&variable.name, &variable.value)?;
    }
    Ok(())
}
