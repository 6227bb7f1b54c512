//! Llama and Qwen3, dense: what a model consists of, and its computation forward and
//! backward by hand, one block at a time, from parameters that lie in one flat buffer per
//! unit. Nothing here knows of other ranks or of files.

mod block;
mod forward;
mod init;
mod spec;

pub use forward::Model;
pub use init::initial;
pub use spec::{Kind, Rope, Scaling, Spec, SpecError};

/// How a tensor's numbers begin without a pretrained model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All one: the norms.
    Ones,
    /// Normal around zero with this deviation, from the seed, the tensor's name and each
    /// number's place in it: the same at every world size.
    Normal(f32),
}

/// One parameter and where it lies in its unit's flat buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// As Hugging Face names it: "model.layers.0.self_attn.q_proj.weight".
    pub name: String,
    /// As Hugging Face has it: a projection is out x in.
    pub shape: Vec<usize>,
    /// In the flat buffer.
    pub offset: usize,
    /// Its first values.
    pub init: Init,
}

impl Tensor {
    /// Numbers in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies in the flat buffer.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// Weight decay is for matrices.
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }
}

/// Parameters that are gathered, used and given back together.
#[derive(Debug, Clone, PartialEq)]
pub struct Unit {
    /// "embedding", "block", "head".
    pub what: &'static str,
    /// Which block; 0 for the others.
    pub index: u32,
    /// In the order of the flat buffer, without gaps.
    pub tensors: Vec<Tensor>,
}

impl Unit {
    /// Numbers in its flat buffer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tensors.last().map_or(0, |last| last.range().end)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
