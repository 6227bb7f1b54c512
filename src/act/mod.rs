//! Carries a plan out. Decides nothing: what is done here was decided in
//! `plan/`, and what fails here is reported, not worked around.

pub mod binding;
pub mod directories;
pub mod environment;
pub mod exchange;
pub mod exits;
pub mod key;
pub mod launch;
pub mod preflight;
pub mod rundir;
pub mod warmup;
