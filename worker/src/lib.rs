//! The training worker: one process per rank trains a decoder-only transformer of the
//! Llama and Qwen3 families, its parameters, gradients and optimizer sharded over all
//! ranks (ZeRO-3).
//!
//! From the outside in: [`config`] is what was asked for, [`data`] where the tokens come
//! from, [`train`] the loop; [`shard`] keeps each rank's part and calls [`model`], forward
//! and backward by hand, block by block, on the few operations of an [`engine`]; [`comm`]
//! is how ranks exchange numbers, with a deadline for everything; [`checkpoint`] writes,
//! judges and reads PyTorch's distributed checkpoints.

pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod data;
pub mod device;
pub mod dynamic;
pub mod engine;
pub mod model;
pub mod shard;
pub mod train;
