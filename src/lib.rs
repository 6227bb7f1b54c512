//! palingenesis: a SPANK plugin, a shared library and the logic of the
//! `palingenesis` command, in one crate.
//!
//! Data flows one way: [`facts`] and [`config`] go into [`plan`], which decides
//! and does nothing else; [`act`] carries a plan out. The doors ([`spank`] for
//! Slurm, [`capi`] for other programs, the `palingenesis` command for people)
//! call these and hold no rule of their own.

#![warn(missing_docs)]

pub mod act;
pub mod capi;
pub mod config;
pub mod facts;
pub mod plan;
pub mod report;
pub mod spank;
pub mod system;

/// The exit code of every refusal: `EX_CONFIG` of sysexits.h.
pub const EXIT_REFUSED: i32 = 78;
