//! An engine for tests of collectives that go on beside it: its numbers are at addresses, as a
//! device's are, and it computes nothing.

use std::borrow::Cow;
use std::ops::Range;

use palingenesis_worker::comm::nccl::{Numbers, Reachable};
use palingenesis_worker::engine::{AdamW, Attention, Engine, Matmul, Precision, Result};

/// Numbers that live as long as the process.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    pub address: u64,
    pub len: usize,
}

/// Computes nothing.
pub struct Beside;

fn unused() -> ! {
    unreachable!("no test of collectives computes")
}

impl Reachable for Beside {
    const DEVICE: bool = true;

    fn numbers<'a>(&self, view: Span) -> Numbers<'a>
    where
        Self: 'a,
    {
        Numbers::Device { address: view.address, len: view.len, precision: Precision::F32 }
    }
}

impl Engine for Beside {
    type Buffer = Span;
    type View<'a> = Span;
    type ViewMut<'a> = Span;
    type Tokens = ();
    type Sum = f64;

    fn compute(&self) -> Precision {
        unused()
    }

    fn loss_chunk(&self) -> usize {
        unused()
    }

    fn zeros(&self, _len: usize, _precision: Precision) -> Result<Self::Buffer> {
        unused()
    }

    fn sum(&self) -> Result<Self::Sum> {
        unused()
    }

    fn take(&self, _sum: &mut Self::Sum) -> Result<f64> {
        unused()
    }

    fn len(&self, _buffer: &Self::Buffer) -> usize {
        unused()
    }

    fn view_len(&self, _view: Self::View<'_>) -> usize {
        unused()
    }

    fn view<'a>(&self, _buffer: &'a Self::Buffer, _range: Range<usize>) -> Self::View<'a> {
        unused()
    }

    fn view_mut<'a>(&self, _buffer: &'a mut Self::Buffer, _range: Range<usize>) -> Self::ViewMut<'a> {
        unused()
    }

    fn part<'a>(&self, _view: Self::View<'a>, _range: Range<usize>) -> Self::View<'a>
    where
        Self: 'a,
    {
        unused()
    }

    fn split<'a, const N: usize>(&self, _view: Self::ViewMut<'a>, _lengths: [usize; N]) -> [Self::ViewMut<'a>; N]
    where
        Self: 'a,
    {
        unused()
    }

    fn again<'a>(&self, _view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a> {
        unused()
    }

    fn read<'a>(&self, _view: &'a Self::ViewMut<'_>) -> Self::View<'a> {
        unused()
    }

    fn tokens(&self, _ids: &[u32]) -> Result<Self::Tokens> {
        unused()
    }

    fn upload(&self, _to: Self::ViewMut<'_>, _from: &[f32]) -> Result<()> {
        unused()
    }

    fn download(&self, _from: Self::View<'_>, _to: &mut [f32]) -> Result<()> {
        unused()
    }

    fn host<'a>(&self, _view: Self::View<'a>) -> Result<Cow<'a, [f32]>>
    where
        Self: 'a,
    {
        unused()
    }

    fn with_host<R>(&self, _views: Vec<Self::ViewMut<'_>>, _write: impl FnOnce(&mut [&mut [f32]]) -> R) -> Result<R> {
        unused()
    }

    fn fill(&self, _x: Self::ViewMut<'_>, _value: f32) -> Result<()> {
        unused()
    }

    fn copy(&self, _y: Self::ViewMut<'_>, _x: Self::View<'_>) -> Result<()> {
        unused()
    }

    fn add(&self, _y: Self::ViewMut<'_>, _x: Self::View<'_>) -> Result<()> {
        unused()
    }

    fn sum_of_squares(&self, _sum: &mut Self::Sum, _x: Self::View<'_>) -> Result<()> {
        unused()
    }

    fn matmul(&self, _c: Self::ViewMut<'_>, _a: Self::View<'_>, _b: Self::View<'_>, _how: Matmul) -> Result<()> {
        unused()
    }

    fn rms_norm(
        &self,
        _y: Self::ViewMut<'_>,
        _inverse_rms: Self::ViewMut<'_>,
        _x: Self::View<'_>,
        _weight: Self::View<'_>,
        _eps: f32,
    ) -> Result<()> {
        unused()
    }

    fn rms_norm_backward(
        &self,
        _dx: Self::ViewMut<'_>,
        _dweight: Self::ViewMut<'_>,
        _dy: Self::View<'_>,
        _x: Self::View<'_>,
        _weight: Self::View<'_>,
        _inverse_rms: Self::View<'_>,
    ) -> Result<()> {
        unused()
    }

    fn rope(
        &self,
        _x: Self::ViewMut<'_>,
        _table: Self::View<'_>,
        _heads: usize,
        _head_dim: usize,
        _back: bool,
    ) -> Result<()> {
        unused()
    }

    fn attention(
        &self,
        _out: Self::ViewMut<'_>,
        _log_sums: Self::ViewMut<'_>,
        _q: Self::View<'_>,
        _k: Self::View<'_>,
        _v: Self::View<'_>,
        _shape: Attention,
    ) -> Result<()> {
        unused()
    }

    fn attention_backward(
        &self,
        _dq: Self::ViewMut<'_>,
        _dk: Self::ViewMut<'_>,
        _dv: Self::ViewMut<'_>,
        _dout: Self::View<'_>,
        _out: Self::View<'_>,
        _log_sums: Self::View<'_>,
        _q: Self::View<'_>,
        _k: Self::View<'_>,
        _v: Self::View<'_>,
        _shape: Attention,
    ) -> Result<()> {
        unused()
    }

    fn swiglu(&self, _out: Self::ViewMut<'_>, _gate: Self::View<'_>, _up: Self::View<'_>) -> Result<()> {
        unused()
    }

    fn swiglu_backward(&self, _gate: Self::ViewMut<'_>, _up: Self::ViewMut<'_>, _dout: Self::View<'_>) -> Result<()> {
        unused()
    }

    fn embedding(&self, _out: Self::ViewMut<'_>, _table: Self::View<'_>, _tokens: &Self::Tokens) -> Result<()> {
        unused()
    }

    fn embedding_backward(
        &self,
        _dtable: Self::ViewMut<'_>,
        _dout: Self::View<'_>,
        _tokens: &Self::Tokens,
    ) -> Result<()> {
        unused()
    }

    fn cross_entropy(
        &self,
        _sum: &mut Self::Sum,
        _logits: Self::ViewMut<'_>,
        _targets: &Self::Tokens,
        _first: usize,
        _rows: usize,
        _scale: f32,
    ) -> Result<()> {
        unused()
    }

    fn adamw(
        &self,
        _param: Self::ViewMut<'_>,
        _grad: Self::View<'_>,
        _m: Self::ViewMut<'_>,
        _v: Self::ViewMut<'_>,
        _how: AdamW,
    ) -> Result<()> {
        unused()
    }
}
