//! The operations that a model is made of, and where their numbers live. [`Cpu`] computes
//! them on the processor; a device is another [`Engine`]. Nothing here knows of a model, a
//! rank or a file.
//!
//! All matrices are row-major and dense. Numbers are f32, or stored shorter where an engine
//! says so ([`Engine::compute`]); sums are always made in f32 or more. The letters of the
//! shapes:
//! N rows (batch · seq), W a row's width, B batch, T seq, H heads, K key-value heads,
//! D head dimension, V vocabulary.

mod cpu;
pub mod cuda;

use std::borrow::Cow;

pub use cpu::{Buffer, Cpu};

/// How a number is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
}

impl Precision {
    /// Of one number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Precision::F32 => 4,
            Precision::Bf16 => 2,
        }
    }
}

/// What went wrong on a device. The CPU has no such errors but memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// What was asked for does not fit: too little memory, a token that is not in the
    /// vocabulary. Trying again will not help.
    #[error("{0}")]
    Wrong(String),
    /// The device itself: a GPU that fell off the bus, an ECC error, a failed launch.
    #[error("{0}")]
    Device(String),
    /// Broken off, because the group is broken: the reason is the group's to tell.
    #[error("broken off: the group has ended")]
    Stopped,
}

/// A result of an operation.
pub type Result<T> = std::result::Result<T, EngineError>;

/// C = alpha · A · B, or C += alpha · A · B. A is m x k, B k x n, C m x n; a transposed
/// factor lies in memory as k x m, n x k.
#[derive(Debug, Clone, Copy)]
pub struct Matmul {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// What is summed over.
    pub k: usize,
    /// A lies in memory as k x m.
    pub a_transposed: bool,
    /// B lies in memory as n x k.
    pub b_transposed: bool,
    /// Adds to C instead of replacing it.
    pub accumulate: bool,
    /// A factor.
    pub alpha: f32,
}

/// Causal attention of grouped queries. q and out are B x T x H x D, k and v B x T x K x D.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions in each.
    pub seq: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

/// One step of AdamW (Loshchilov and Hutter, <https://arxiv.org/abs/1711.05101>), with the
/// bias corrections of `step`, as torch.optim.AdamW does it.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Against division by zero.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Counts from 1.
    pub step: u64,
    /// Gradients are multiplied by it first: the clipping.
    pub grad_scale: f32,
}

/// What of [`AdamW`] each number is computed with, the same on every device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Factors {
    /// What weight decay leaves of a parameter.
    pub keep: f32,
    /// Of the step, with the first moment's bias corrected.
    pub size: f32,
    /// By which the second moment's root is corrected.
    pub root: f32,
    pub beta1: f32,
    /// 1 - beta1.
    pub new1: f32,
    pub beta2: f32,
    /// 1 - beta2.
    pub new2: f32,
    pub eps: f32,
}

impl AdamW {
    pub(crate) fn factors(&self) -> Factors {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step, .. } = *self;
        // In f64 what comes close to 0: 1 - 0.999 has only 17 good bits in f32.
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Factors {
            keep: (1.0 - lr * weight_decay) as f32,
            size: (lr / correction(beta1)) as f32,
            root: correction(beta2).sqrt() as f32,
            beta1: beta1 as f32,
            new1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            new2: (1.0 - beta2) as f32,
            eps: eps as f32,
        }
    }
}

/// Where numbers live and how they are computed with. A view may be read, a `ViewMut` read
/// and written; the operations check lengths and how numbers are stored, and panic on what
/// is wrong: that is a mistake in this program, never in what a user gave it.
///
/// A device may compute later than it is told to, in the order of the calls: only
/// [`Engine::take`], [`Engine::download`], [`Engine::host`] and [`Engine::with_host`] wait.
/// What goes wrong may so be an error of a later call.
///
/// F32 are: inverse_rms, log_sums, the table of rope, and all four of adamw. Factors of a
/// matmul are both of one precision, its result of that or F32; gradients of parameters
/// (dweight, dtable) are of either; all other operands of one operation are stored alike.
pub trait Engine {
    /// Numbers that it owns.
    type Buffer;
    /// A borrowed part of a buffer.
    type View<'a>: Copy
    where
        Self: 'a;
    /// A part that is written.
    type ViewMut<'a>
    where
        Self: 'a;
    /// Token ids, where the operations read them.
    type Tokens;
    /// An f64 to which operations add, on the device: reading it waits for them.
    type Sum;

    /// What activations, and parameters while they are used, are stored as.
    fn compute(&self) -> Precision;
    /// How many rows of logits are held at once where nobody says: so many that the device
    /// has enough to do, and no more.
    fn loss_chunk(&self) -> usize;
    /// What is worth a line before a training begins: a model that the device computes in a
    /// slow way.
    fn warning(&self, _head_dim: usize) -> Option<String> {
        None
    }
    /// Bytes of the device's memory that are in use, by whomever; `None` where that is the
    /// host's.
    fn memory_in_use(&self) -> Option<u64> {
        None
    }
    /// `len` zeros, stored as `precision`, which is F32 or [`Engine::compute`].
    ///
    /// # Errors
    /// No memory.
    fn zeros(&self, len: usize, precision: Precision) -> Result<Self::Buffer>;
    /// A sum that is 0.
    ///
    /// # Errors
    /// No memory.
    fn sum(&self) -> Result<Self::Sum>;
    /// What was summed up, when all operations so far are done; it is 0 again after.
    ///
    /// # Errors
    /// The device's.
    fn take(&self, sum: &mut Self::Sum) -> Result<f64>;
    /// How many numbers there are.
    fn len(&self, buffer: &Self::Buffer) -> usize;
    /// How many numbers there are.
    fn view_len(&self, view: Self::View<'_>) -> usize;
    /// A part of a buffer.
    fn view<'a>(&self, buffer: &'a Self::Buffer, range: std::ops::Range<usize>) -> Self::View<'a>;
    /// A part of a buffer, to write.
    fn view_mut<'a>(&self, buffer: &'a mut Self::Buffer, range: std::ops::Range<usize>) -> Self::ViewMut<'a>;
    /// A part of a view.
    fn part<'a>(&self, view: Self::View<'a>, range: std::ops::Range<usize>) -> Self::View<'a>
    where
        Self: 'a;
    /// Consecutive parts of a view, of these lengths, each to write.
    fn split<'a, const N: usize>(&self, view: Self::ViewMut<'a>, lengths: [usize; N]) -> [Self::ViewMut<'a>; N]
    where
        Self: 'a;
    /// The same numbers for a shorter time.
    fn again<'a>(&self, view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a>;
    /// The same numbers, to read.
    fn read<'a>(&self, view: &'a Self::ViewMut<'_>) -> Self::View<'a>;
    /// Brings token ids to the device.
    ///
    /// # Errors
    /// No memory.
    fn tokens(&self, ids: &[u32]) -> Result<Self::Tokens>;
    /// Copies from the host, rounded to the nearest where the numbers are stored shorter.
    ///
    /// # Errors
    /// The device's.
    fn upload(&self, to: Self::ViewMut<'_>, from: &[f32]) -> Result<()>;
    /// Copies to the host, as f32, when all operations so far are done.
    ///
    /// # Errors
    /// The device's.
    fn download(&self, from: Self::View<'_>, to: &mut [f32]) -> Result<()>;
    /// The numbers where the host reads them: as they lie, or a copy.
    ///
    /// # Errors
    /// The device's.
    fn host<'a>(&self, view: Self::View<'a>) -> Result<Cow<'a, [f32]>>
    where
        Self: 'a;
    /// Lets the host write numbers: as they lie, or a copy that is brought back after.
    /// What they were before is not there to be read.
    ///
    /// # Errors
    /// The device's.
    fn with_host<R>(&self, views: Vec<Self::ViewMut<'_>>, write: impl FnOnce(&mut [&mut [f32]]) -> R) -> Result<R>;

    /// x = value.
    ///
    /// # Errors
    /// The device's, as for all operations.
    fn fill(&self, x: Self::ViewMut<'_>, value: f32) -> Result<()>;
    /// y = x, rounded to the nearest where y is stored shorter.
    ///
    /// # Errors
    /// The device's.
    fn copy(&self, y: Self::ViewMut<'_>, x: Self::View<'_>) -> Result<()>;
    /// y += x.
    ///
    /// # Errors
    /// The device's.
    fn add(&self, y: Self::ViewMut<'_>, x: Self::View<'_>) -> Result<()>;
    /// sum += the squares of x.
    ///
    /// # Errors
    /// The device's.
    fn sum_of_squares(&self, sum: &mut Self::Sum, x: Self::View<'_>) -> Result<()>;
    /// See [`Matmul`].
    ///
    /// # Errors
    /// The device's.
    fn matmul(&self, c: Self::ViewMut<'_>, a: Self::View<'_>, b: Self::View<'_>, how: Matmul) -> Result<()>;
    /// y = x / rms(x) · weight, row by row; keeps 1 / rms(x) of each row. `width` is
    /// weight's length: for the norm of queries and keys a row is one head.
    ///
    /// # Errors
    /// The device's.
    fn rms_norm(
        &self,
        y: Self::ViewMut<'_>,
        inverse_rms: Self::ViewMut<'_>,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        eps: f32,
    ) -> Result<()>;
    /// dx += and dweight +=, from dy.
    ///
    /// # Errors
    /// The device's.
    fn rms_norm_backward(
        &self,
        dx: Self::ViewMut<'_>,
        dweight: Self::ViewMut<'_>,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        inverse_rms: Self::View<'_>,
    ) -> Result<()>;
    /// Turns each head of x (B x T x heads x D) by its position's angles, or back: the
    /// first half of a head is the real, the second the imaginary part, as Hugging Face's
    /// rotate_half has it. `table` is T x D, each row the cos of the D/2 angles, then
    /// their sin; `heads` is how many x has at each position.
    ///
    /// # Errors
    /// The device's.
    fn rope(
        &self,
        x: Self::ViewMut<'_>,
        table: Self::View<'_>,
        heads: usize,
        head_dim: usize,
        back: bool,
    ) -> Result<()>;
    /// out = softmax(q·kᵀ/√D, causal)·v; keeps the logarithm of each row's sum of
    /// exponentials, B x H x T.
    ///
    /// # Errors
    /// The device's.
    fn attention(
        &self,
        out: Self::ViewMut<'_>,
        log_sums: Self::ViewMut<'_>,
        q: Self::View<'_>,
        k: Self::View<'_>,
        v: Self::View<'_>,
        shape: Attention,
    ) -> Result<()>;
    /// dq, dk and dv, replaced, from dout.
    ///
    /// # Errors
    /// The device's.
    #[expect(clippy::too_many_arguments, reason = "each is another operand")]
    fn attention_backward(
        &self,
        dq: Self::ViewMut<'_>,
        dk: Self::ViewMut<'_>,
        dv: Self::ViewMut<'_>,
        dout: Self::View<'_>,
        out: Self::View<'_>,
        log_sums: Self::View<'_>,
        q: Self::View<'_>,
        k: Self::View<'_>,
        v: Self::View<'_>,
        shape: Attention,
    ) -> Result<()>;
    /// out = silu(gate) · up.
    ///
    /// # Errors
    /// The device's.
    fn swiglu(&self, out: Self::ViewMut<'_>, gate: Self::View<'_>, up: Self::View<'_>) -> Result<()>;
    /// Replaces gate and up by dgate and dup, from dout.
    ///
    /// # Errors
    /// The device's.
    fn swiglu_backward(&self, gate: Self::ViewMut<'_>, up: Self::ViewMut<'_>, dout: Self::View<'_>) -> Result<()>;
    /// out's rows are the table's rows of the tokens.
    ///
    /// # Errors
    /// The device's.
    fn embedding(&self, out: Self::ViewMut<'_>, table: Self::View<'_>, tokens: &Self::Tokens) -> Result<()>;
    /// dtable's rows += dout's; of equal tokens in their order.
    ///
    /// # Errors
    /// The device's.
    fn embedding_backward(&self, dtable: Self::ViewMut<'_>, dout: Self::View<'_>, tokens: &Self::Tokens) -> Result<()>;
    /// sum += -log softmax(row), at its target, over rows `first..first + rows` of the
    /// targets; logits become their gradient times `scale`. A target of
    /// [`IGNORED`] counts nothing and has no gradient.
    ///
    /// # Errors
    /// The device's.
    fn cross_entropy(
        &self,
        sum: &mut Self::Sum,
        logits: Self::ViewMut<'_>,
        targets: &Self::Tokens,
        first: usize,
        rows: usize,
        scale: f32,
    ) -> Result<()>;
    /// See [`AdamW`]; m and v are its moments.
    ///
    /// # Errors
    /// The device's.
    fn adamw(
        &self,
        param: Self::ViewMut<'_>,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        v: Self::ViewMut<'_>,
        how: AdamW,
    ) -> Result<()>;
}

/// The target of a position that counts nothing.
pub const IGNORED: u32 = u32::MAX;

/// Tokens come from a user's file: whether all of them have a row in the table.
pub(crate) fn check_tokens<'a>(mut tokens: impl Iterator<Item = &'a u32>, vocab: usize) -> Result<()> {
    match tokens.find(|token| **token as usize >= vocab) {
        Some(token) => Err(EngineError::Wrong(format!(
            "token {token} is not in the vocabulary of {vocab}: the data was prepared with another tokenizer than the model's"
        ))),
        None => Ok(()),
    }
}
