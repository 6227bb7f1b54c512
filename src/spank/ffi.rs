//! Slurm's own declarations: generated from `slurm/spank.h` at build time, or
//! the committed copy of them. Types and constants only.

#![allow(non_camel_case_types, non_upper_case_globals, dead_code, unused_imports, missing_docs)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
