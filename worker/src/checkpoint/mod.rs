//! Checkpoints: written so that PyTorch's `torch.distributed.checkpoint` reads them,
//! committed as a whole, judged before they are trusted, and read at any world size.

pub mod dcp;

use std::ops::Range;

/// A part of a tensor that a rank holds: `range` of the tensor's numbers in row-major
/// order.
#[derive(Debug)]
pub struct Part<'a> {
    /// "model.layers.0.mlp.up_proj.weight", "optimizer.state.….exp_avg".
    pub name: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    /// Which of its numbers.
    pub range: Range<usize>,
    /// Those numbers.
    pub data: &'a [f32],
}

/// The same, to be filled.
#[derive(Debug)]
pub struct PartMut<'a> {
    /// As in [`Part`].
    pub name: &'a str,
    /// Of the whole tensor: the checkpoint must have the same.
    pub shape: &'a [usize],
    /// Which of its numbers.
    pub range: Range<usize>,
    /// Where they go.
    pub data: &'a mut [f32],
}
