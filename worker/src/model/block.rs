//! One block: attention and feed-forward, each behind a norm and beside a residual. The
//! forward pass and, beside each of its lines, what its gradient is; it allocates nothing.

use std::ops::Range;

use super::Spec;
use super::spec::Kind;
use crate::engine::{Attention, Engine, Matmul, Precision, Result};

/// Where the operations run, and on how many rows at once.
pub(super) struct On<'e, E> {
    pub engine: &'e E,
    pub rows: usize,
}

impl<E> Clone for On<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for On<'_, E> {}

/// `width` numbers for each row.
pub(super) struct Array<E: Engine> {
    buffer: E::Buffer,
    width: usize,
}

impl<E: Engine> Array<E> {
    /// Stored as the engine computes.
    pub(super) fn new(on: On<'_, E>, width: usize) -> Result<Array<E>> {
        Array::stored(on, width, on.engine.compute())
    }

    pub(super) fn f32(on: On<'_, E>, width: usize) -> Result<Array<E>> {
        Array::stored(on, width, Precision::F32)
    }

    fn stored(on: On<'_, E>, width: usize, precision: Precision) -> Result<Array<E>> {
        let len = on.rows.checked_mul(width).ok_or_else(|| too_many(on.rows, width))?;
        Ok(Array { buffer: on.engine.zeros(len, precision)?, width })
    }

    pub(super) fn read<'a>(&'a self, on: On<'a, E>) -> E::View<'a> {
        on.engine.view(&self.buffer, 0..on.rows * self.width)
    }

    pub(super) fn write<'a>(&'a mut self, on: On<'a, E>) -> E::ViewMut<'a> {
        on.engine.view_mut(&mut self.buffer, 0..on.rows * self.width)
    }
}

pub(super) fn too_many(rows: usize, width: usize) -> crate::engine::EngineError {
    crate::engine::EngineError::Wrong(format!(
        "{rows} positions with {width} numbers each are more than this machine can address; lower micro_batch_size or seq_len"
    ))
}

/// A linear map of each row: the weight is `output` x `input`, as Hugging Face has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Projection {
    pub input: usize,
    pub output: usize,
}

/// Whether a result replaces what was there or is added to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Put {
    Replace,
    Add,
}

impl Projection {
    /// y = x · Wᵀ.
    pub(super) fn forward<E: Engine>(
        self,
        on: On<'_, E>,
        y: E::ViewMut<'_>,
        put: Put,
        x: E::View<'_>,
        weight: E::View<'_>,
    ) -> Result<()> {
        let how = Matmul {
            m: on.rows,
            n: self.output,
            k: self.input,
            a_transposed: false,
            b_transposed: true,
            accumulate: put == Put::Add,
            alpha: 1.0,
        };
        on.engine.matmul(y, x, weight, how)
    }

    /// dW += dyᵀ · x.
    pub(super) fn weight_gradient<E: Engine>(
        self,
        on: On<'_, E>,
        dweight: E::ViewMut<'_>,
        dy: E::View<'_>,
        x: E::View<'_>,
    ) -> Result<()> {
        let how = Matmul {
            m: self.output,
            n: self.input,
            k: on.rows,
            a_transposed: true,
            b_transposed: false,
            accumulate: true,
            alpha: 1.0,
        };
        on.engine.matmul(dweight, dy, x, how)
    }

    /// dx = dy · W.
    pub(super) fn input_gradient<E: Engine>(
        self,
        on: On<'_, E>,
        dx: E::ViewMut<'_>,
        put: Put,
        dy: E::View<'_>,
        weight: E::View<'_>,
    ) -> Result<()> {
        let how = Matmul {
            m: on.rows,
            n: self.input,
            k: self.output,
            a_transposed: false,
            b_transposed: false,
            accumulate: put == Put::Add,
            alpha: 1.0,
        };
        on.engine.matmul(dx, dy, weight, how)
    }
}

/// A block's numbers: widths, and what the norms and the heads need.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub hidden: usize,
    pub attention: Attention,
    pub eps: f32,
    /// Whether queries and keys are normed head by head.
    pub head_norms: bool,
    pub q_proj: Projection,
    /// Keys' and values'.
    pub kv_proj: Projection,
    pub o_proj: Projection,
    /// The gate's, too.
    pub up_proj: Projection,
    pub down_proj: Projection,
}

impl Shape {
    pub(super) fn new(spec: &Spec, batch: usize, seq: usize) -> Shape {
        let (hidden, inner) = (spec.hidden, spec.intermediate);
        let (queries, keys) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        Shape {
            hidden,
            attention: Attention { batch, seq, heads: spec.heads, kv_heads: spec.kv_heads, head_dim: spec.head_dim },
            eps: spec.eps,
            head_norms: spec.kind == Kind::Qwen3,
            q_proj: Projection { input: hidden, output: queries },
            kv_proj: Projection { input: hidden, output: keys },
            o_proj: Projection { input: queries, output: hidden },
            up_proj: Projection { input: hidden, output: inner },
            down_proj: Projection { input: inner, output: hidden },
        }
    }

    /// Lengths of a block's tensors in the order of its unit; Llama's head norms are empty.
    fn lengths(&self) -> [usize; 11] {
        let head_norm = if self.head_norms { self.attention.head_dim } else { 0 };
        let [queries, keys, inner] = [self.q_proj, self.kv_proj, self.up_proj].map(|w| w.input * w.output);
        [self.hidden, queries, keys, keys, head_norm, head_norm, queries, self.hidden, inner, inner, inner]
    }
}

/// A block's parameters, or views of another buffer of the same order.
struct Weights<V> {
    attention_norm: V,
    queries: V,
    keys: V,
    values: V,
    query_norm: V,
    key_norm: V,
    output: V,
    inner_norm: V,
    gate: V,
    up: V,
    down: V,
}

impl<V> From<[V; 11]> for Weights<V> {
    fn from(parts: [V; 11]) -> Weights<V> {
        let [attention_norm, queries, keys, values, query_norm, key_norm, output, inner_norm, gate, up, down] = parts;
        Weights { attention_norm, queries, keys, values, query_norm, key_norm, output, inner_norm, gate, up, down }
    }
}

fn weights<'a, E: Engine>(engine: &E, shape: &Shape, params: E::View<'a>) -> Weights<E::View<'a>> {
    let mut end = 0;
    let mut next = |length: usize| -> Range<usize> {
        end += length;
        end - length..end
    };
    Weights::from(shape.lengths().map(|length| engine.part(params, next(length))))
}

/// Of one block at a time. The names are those of the forward pass; the backward pass
/// needs few more, since a gradient takes the place of what is not needed any more.
pub(super) struct Activations<E: Engine> {
    /// The input, normed; and 1 / rms of its rows.
    normed: Array<E>,
    normed_inverse: Array<E>,
    /// Before their norms: with `head_norms` only.
    raw_queries: Array<E>,
    raw_keys: Array<E>,
    query_inverse: Array<E>,
    key_inverse: Array<E>,
    /// Normed and turned.
    queries: Array<E>,
    keys: Array<E>,
    values: Array<E>,
    /// What the heads gather, and the logarithms of their softmax's sums.
    gathered: Array<E>,
    log_sums: Array<E>,
    /// After the first residual, the same normed, and 1 / rms.
    middle: Array<E>,
    middle_normed: Array<E>,
    middle_inverse: Array<E>,
    gate: Array<E>,
    up: Array<E>,
    /// silu(gate) · up.
    inner: Array<E>,
    /// Gradients.
    d_normed: Array<E>,
    d_gathered: Array<E>,
    d_queries: Array<E>,
    d_keys: Array<E>,
    d_values: Array<E>,
}

impl<E: Engine> Activations<E> {
    pub(super) fn new(on: On<'_, E>, shape: &Shape) -> Result<Activations<E>> {
        let array = |width| Array::new(on, width);
        let f32 = |width| Array::f32(on, width);
        let (hidden, queries, keys) = (shape.hidden, shape.q_proj.output, shape.kv_proj.output);
        let Attention { heads, kv_heads, .. } = shape.attention;
        let if_normed = |width| if shape.head_norms { width } else { 0 };
        Ok(Activations {
            normed: array(hidden)?,
            normed_inverse: f32(1)?,
            raw_queries: array(if_normed(queries))?,
            raw_keys: array(if_normed(keys))?,
            query_inverse: f32(if_normed(heads))?,
            key_inverse: f32(if_normed(kv_heads))?,
            queries: array(queries)?,
            keys: array(keys)?,
            values: array(keys)?,
            gathered: array(queries)?,
            log_sums: f32(heads)?,
            middle: array(hidden)?,
            middle_normed: array(hidden)?,
            middle_inverse: f32(1)?,
            gate: array(shape.up_proj.output)?,
            up: array(shape.up_proj.output)?,
            inner: array(shape.up_proj.output)?,
            d_normed: array(hidden)?,
            d_gathered: array(queries)?,
            d_queries: array(queries)?,
            d_keys: array(keys)?,
            d_values: array(keys)?,
        })
    }
}

/// x_out from x_in.
pub(super) fn forward<E: Engine>(
    on: On<'_, E>,
    shape: &Shape,
    angles: E::View<'_>,
    a: &mut Activations<E>,
    params: E::View<'_>,
    x_in: E::View<'_>,
    mut x_out: E::ViewMut<'_>,
) -> Result<()> {
    let e = on.engine;
    let w = weights(e, shape, params);
    up_to_inner(on, shape, angles, a, &w, x_in)?;
    // x_out = middle + inner · Wdᵀ
    e.copy(e.again(&mut x_out), a.middle.read(on))?;
    shape.down_proj.forward(on, x_out, Put::Add, a.inner.read(on), w.down)
}

/// The forward pass without its last projection, which the backward pass does not need.
fn up_to_inner<'a, E: Engine>(
    on: On<'_, E>,
    shape: &Shape,
    angles: E::View<'_>,
    a: &mut Activations<E>,
    w: &Weights<E::View<'a>>,
    x_in: E::View<'_>,
) -> Result<()> {
    let e = on.engine;
    let Attention { heads, kv_heads, head_dim, .. } = shape.attention;

    // normed = norm(x_in)
    e.rms_norm(a.normed.write(on), a.normed_inverse.write(on), x_in, w.attention_norm, shape.eps)?;

    // queries, keys, values = normed · Wᵀ; Qwen3 norms each head of the first two
    if shape.head_norms {
        shape.q_proj.forward(on, a.raw_queries.write(on), Put::Replace, a.normed.read(on), w.queries)?;
        shape.kv_proj.forward(on, a.raw_keys.write(on), Put::Replace, a.normed.read(on), w.keys)?;
        let (raw_queries, raw_keys) = (a.raw_queries.read(on), a.raw_keys.read(on));
        e.rms_norm(a.queries.write(on), a.query_inverse.write(on), raw_queries, w.query_norm, shape.eps)?;
        e.rms_norm(a.keys.write(on), a.key_inverse.write(on), raw_keys, w.key_norm, shape.eps)?;
    } else {
        shape.q_proj.forward(on, a.queries.write(on), Put::Replace, a.normed.read(on), w.queries)?;
        shape.kv_proj.forward(on, a.keys.write(on), Put::Replace, a.normed.read(on), w.keys)?;
    }
    shape.kv_proj.forward(on, a.values.write(on), Put::Replace, a.normed.read(on), w.values)?;

    // queries and keys turned by their positions
    e.rope(a.queries.write(on), angles, heads, head_dim, false)?;
    e.rope(a.keys.write(on), angles, kv_heads, head_dim, false)?;

    // gathered = attention(queries, keys, values)
    let (queries, keys, values) = (a.queries.read(on), a.keys.read(on), a.values.read(on));
    e.attention(a.gathered.write(on), a.log_sums.write(on), queries, keys, values, shape.attention)?;

    // middle = x_in + gathered · Woᵀ
    e.copy(a.middle.write(on), x_in)?;
    shape.o_proj.forward(on, a.middle.write(on), Put::Add, a.gathered.read(on), w.output)?;

    // inner = silu(norm(middle) · Wgᵀ) · (norm(middle) · Wuᵀ)
    let middle = a.middle.read(on);
    e.rms_norm(a.middle_normed.write(on), a.middle_inverse.write(on), middle, w.inner_norm, shape.eps)?;
    shape.up_proj.forward(on, a.gate.write(on), Put::Replace, a.middle_normed.read(on), w.gate)?;
    shape.up_proj.forward(on, a.up.write(on), Put::Replace, a.middle_normed.read(on), w.up)?;
    e.swiglu(a.inner.write(on), a.gate.read(on), a.up.read(on))
}

/// The forward pass again, then each of its lines backward, from the last to the first.
/// `dx` is the gradient of x_out and becomes that of x_in; gradients of the parameters
/// are added to `grads`.
#[expect(clippy::too_many_arguments, reason = "each is another operand")]
pub(super) fn backward<E: Engine>(
    on: On<'_, E>,
    shape: &Shape,
    angles: E::View<'_>,
    a: &mut Activations<E>,
    params: E::View<'_>,
    x_in: E::View<'_>,
    mut dx: E::ViewMut<'_>,
    grads: E::ViewMut<'_>,
) -> Result<()> {
    let e = on.engine;
    let Attention { heads, kv_heads, head_dim, .. } = shape.attention;
    let w = weights(e, shape, params);
    let mut dw = Weights::from(e.split(grads, shape.lengths()));
    up_to_inner(on, shape, angles, a, &w, x_in)?;

    // x_out = middle + inner · Wdᵀ. The residual's gradient is dx as it is.
    shape.down_proj.weight_gradient(on, dw.down, e.read(&dx), a.inner.read(on))?;
    let d_inner = &mut a.inner;
    shape.down_proj.input_gradient(on, d_inner.write(on), Put::Replace, e.read(&dx), w.down)?;

    // inner = silu(gate) · up: gate and up become their gradients
    e.swiglu_backward(a.gate.write(on), a.up.write(on), d_inner.read(on))?;
    let (d_gate, d_up) = (a.gate.read(on), a.up.read(on));

    // gate, up = norm(middle) · Wᵀ
    shape.up_proj.weight_gradient(on, dw.gate, d_gate, a.middle_normed.read(on))?;
    shape.up_proj.weight_gradient(on, dw.up, d_up, a.middle_normed.read(on))?;
    shape.up_proj.input_gradient(on, a.d_normed.write(on), Put::Replace, d_gate, w.gate)?;
    shape.up_proj.input_gradient(on, a.d_normed.write(on), Put::Add, d_up, w.up)?;
    let (d_normed, middle, inverse) = (a.d_normed.read(on), a.middle.read(on), a.middle_inverse.read(on));
    e.rms_norm_backward(e.again(&mut dx), dw.inner_norm, d_normed, middle, w.inner_norm, inverse)?;

    // middle = x_in + gathered · Woᵀ: dx is now the gradient of middle
    shape.o_proj.weight_gradient(on, dw.output, e.read(&dx), a.gathered.read(on))?;
    shape.o_proj.input_gradient(on, a.d_gathered.write(on), Put::Replace, e.read(&dx), w.output)?;

    // gathered = attention(queries, keys, values)
    e.attention_backward(
        a.d_queries.write(on),
        a.d_keys.write(on),
        a.d_values.write(on),
        a.d_gathered.read(on),
        a.gathered.read(on),
        a.log_sums.read(on),
        a.queries.read(on),
        a.keys.read(on),
        a.values.read(on),
        shape.attention,
    )?;

    // queries and keys turned by their positions: turned back
    e.rope(a.d_queries.write(on), angles, heads, head_dim, true)?;
    e.rope(a.d_keys.write(on), angles, kv_heads, head_dim, true)?;

    // the norms of heads; the turned queries and keys make room for the gradients of the raw
    if shape.head_norms {
        let (d_queries, raw, inverse) = (a.d_queries.read(on), a.raw_queries.read(on), a.query_inverse.read(on));
        e.fill(a.queries.write(on), 0.0)?;
        e.rms_norm_backward(a.queries.write(on), e.again(&mut dw.query_norm), d_queries, raw, w.query_norm, inverse)?;
        let (d_keys, raw, inverse) = (a.d_keys.read(on), a.raw_keys.read(on), a.key_inverse.read(on));
        e.fill(a.keys.write(on), 0.0)?;
        e.rms_norm_backward(a.keys.write(on), e.again(&mut dw.key_norm), d_keys, raw, w.key_norm, inverse)?;
    }
    let (d_queries, d_keys) = if shape.head_norms { (&a.queries, &a.keys) } else { (&a.d_queries, &a.d_keys) };
    let (d_queries, d_keys, d_values) = (d_queries.read(on), d_keys.read(on), a.d_values.read(on));

    // queries, keys, values = normed · Wᵀ
    shape.q_proj.weight_gradient(on, dw.queries, d_queries, a.normed.read(on))?;
    shape.kv_proj.weight_gradient(on, dw.keys, d_keys, a.normed.read(on))?;
    shape.kv_proj.weight_gradient(on, dw.values, d_values, a.normed.read(on))?;
    shape.q_proj.input_gradient(on, a.d_normed.write(on), Put::Replace, d_queries, w.queries)?;
    shape.kv_proj.input_gradient(on, a.d_normed.write(on), Put::Add, d_keys, w.keys)?;
    shape.kv_proj.input_gradient(on, a.d_normed.write(on), Put::Add, d_values, w.values)?;

    // normed = norm(x_in)
    let (d_normed, inverse) = (a.d_normed.read(on), a.normed_inverse.read(on));
    e.rms_norm_backward(dx, dw.attention_norm, d_normed, x_in, w.attention_norm, inverse)
}
