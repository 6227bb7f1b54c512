//! The operations on the processor, divided among the threads that it may run on. The same
//! inputs give the same bits, on one kind of processor however many threads there are.

mod attention;
mod matmul;
mod matrix;
mod rows;
mod simd;
mod threads;

use std::borrow::Cow;
use std::ops::{Deref, DerefMut, Range};

use threads::Threads;

use super::{AdamW, Attention, Engine, EngineError, Matmul, Precision, Result};

/// The processor.
#[derive(Debug, Clone)]
pub struct Cpu {
    threads: Threads,
}

impl Cpu {
    /// With so many threads, the caller's among them if it is one. `None`: as many as CPUs
    /// are allowed to this process (its affinity and its cgroup's quota), shared by all
    /// engines that are made so.
    #[must_use]
    pub fn new(threads: Option<usize>) -> Cpu {
        Cpu { threads: Threads::new(threads) }
    }

    /// How many threads compute.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.count()
    }
}

impl Default for Cpu {
    fn default() -> Cpu {
        Cpu::new(None)
    }
}

/// Numbers in memory; the first begins a cache line.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<f32>,
    start: usize,
    len: usize,
}

/// Numbers in a cache line.
const LINE: usize = 16;

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl Engine for Cpu {
    type Buffer = Buffer;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Tokens = Vec<u32>;
    type Sum = f64;

    fn compute(&self) -> Precision {
        Precision::F32
    }

    fn loss_chunk(&self) -> usize {
        256
    }

    fn zeros(&self, len: usize, precision: Precision) -> Result<Buffer> {
        assert_eq!(precision, Precision::F32, "the processor computes in f32");
        let mut memory = Vec::new();
        memory.try_reserve_exact(len.saturating_add(LINE)).map_err(|_| {
            EngineError::Wrong(format!(
                "no memory for {len} more numbers ({:.1} GiB): more ranks, or a smaller micro_batch_size or seq_len, need less",
                len as f64 * 4.0 / f64::from(1 << 30)
            ))
        })?;
        memory.resize(len + LINE, 0.0);
        let start = memory.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        Ok(Buffer { memory, start, len })
    }

    fn sum(&self) -> Result<f64> {
        Ok(0.0)
    }

    fn take(&self, sum: &mut f64) -> Result<f64> {
        Ok(std::mem::take(sum))
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.len()
    }

    fn view_len(&self, view: &[f32]) -> usize {
        view.len()
    }

    fn view<'a>(&self, buffer: &'a Buffer, range: Range<usize>) -> &'a [f32] {
        &buffer[range]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Buffer, range: Range<usize>) -> &'a mut [f32] {
        &mut buffer[range]
    }

    fn part<'a>(&self, view: &'a [f32], range: Range<usize>) -> &'a [f32]
    where
        Self: 'a,
    {
        &view[range]
    }

    fn split<'a, const N: usize>(&self, view: &'a mut [f32], lengths: [usize; N]) -> [&'a mut [f32]; N]
    where
        Self: 'a,
    {
        let mut rest = view;
        lengths.map(|length| {
            let (first, other) = std::mem::take(&mut rest).split_at_mut(length);
            rest = other;
            first
        })
    }

    fn again<'a>(&self, view: &'a mut &mut [f32]) -> &'a mut [f32] {
        view
    }

    fn read<'a>(&self, view: &'a &mut [f32]) -> &'a [f32] {
        view
    }

    fn tokens(&self, ids: &[u32]) -> Result<Vec<u32>> {
        Ok(ids.to_vec())
    }

    fn upload(&self, to: &mut [f32], from: &[f32]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn download(&self, from: &[f32], to: &mut [f32]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn host<'a>(&self, view: &'a [f32]) -> Result<Cow<'a, [f32]>>
    where
        Self: 'a,
    {
        Ok(Cow::Borrowed(view))
    }

    fn with_host<R>(&self, mut views: Vec<&mut [f32]>, write: impl FnOnce(&mut [&mut [f32]]) -> R) -> Result<R> {
        Ok(write(&mut views))
    }

    fn fill(&self, x: &mut [f32], value: f32) -> Result<()> {
        rows::fill(&self.threads, x, value);
        Ok(())
    }

    fn copy(&self, y: &mut [f32], x: &[f32]) -> Result<()> {
        rows::copy(&self.threads, y, x);
        Ok(())
    }

    fn add(&self, y: &mut [f32], x: &[f32]) -> Result<()> {
        rows::add(&self.threads, y, x);
        Ok(())
    }

    fn sum_of_squares(&self, sum: &mut f64, x: &[f32]) -> Result<()> {
        *sum += rows::sum_of_squares(&self.threads, x);
        Ok(())
    }

    fn matmul(&self, c: &mut [f32], a: &[f32], b: &[f32], how: Matmul) -> Result<()> {
        matmul::matmul(&self.threads, c, a, b, how);
        Ok(())
    }

    fn rms_norm(&self, y: &mut [f32], inverse_rms: &mut [f32], x: &[f32], weight: &[f32], eps: f32) -> Result<()> {
        rows::rms_norm(&self.threads, y, inverse_rms, x, weight, eps);
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        dx: &mut [f32],
        dweight: &mut [f32],
        dy: &[f32],
        x: &[f32],
        weight: &[f32],
        inverse_rms: &[f32],
    ) -> Result<()> {
        rows::rms_norm_backward(&self.threads, dx, dweight, dy, x, weight, inverse_rms);
        Ok(())
    }

    fn rope(&self, x: &mut [f32], table: &[f32], heads: usize, head_dim: usize, back: bool) -> Result<()> {
        rows::rope(&self.threads, x, table, heads, head_dim, back);
        Ok(())
    }

    fn attention(
        &self,
        out: &mut [f32],
        log_sums: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Attention,
    ) -> Result<()> {
        attention::forward(&self.threads, out, log_sums, q, k, v, shape);
        Ok(())
    }

    fn attention_backward(
        &self,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
        dout: &[f32],
        out: &[f32],
        log_sums: &[f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Attention,
    ) -> Result<()> {
        attention::backward(&self.threads, dq, dk, dv, dout, out, log_sums, q, k, v, shape);
        Ok(())
    }

    fn swiglu(&self, out: &mut [f32], gate: &[f32], up: &[f32]) -> Result<()> {
        rows::swiglu(&self.threads, out, gate, up);
        Ok(())
    }

    fn swiglu_backward(&self, gate: &mut [f32], up: &mut [f32], dout: &[f32]) -> Result<()> {
        rows::swiglu_backward(&self.threads, gate, up, dout);
        Ok(())
    }

    fn embedding(&self, out: &mut [f32], table: &[f32], tokens: &Vec<u32>) -> Result<()> {
        rows::embedding(&self.threads, out, table, tokens)
    }

    fn embedding_backward(&self, dtable: &mut [f32], dout: &[f32], tokens: &Vec<u32>) -> Result<()> {
        rows::embedding_backward(&self.threads, dtable, dout, tokens)
    }

    fn cross_entropy(
        &self,
        sum: &mut f64,
        logits: &mut [f32],
        targets: &Vec<u32>,
        first: usize,
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        *sum += rows::cross_entropy(&self.threads, logits, &targets[first..first + rows], scale)?;
        Ok(())
    }

    fn adamw(&self, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], how: AdamW) -> Result<()> {
        rows::adamw(&self.threads, param, grad, m, v, how);
        Ok(())
    }
}
