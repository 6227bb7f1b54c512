//! Forward and backward of a whole model, unit by unit: embedding, blocks, head. Whoever
//! calls keeps the blocks' inputs, which is all that the backward pass needs beside the
//! parameters (activation checkpointing), and decides which unit's parameters are there.

use super::block::{self, Activations, Array, On, Projection, Put, Shape, too_many};
use super::spec::{Rope, Scaling, Spec};
use crate::engine::{Engine, Result};

/// What the computation needs beside parameters: activations of one block at a time,
/// the logits of some rows, and tables.
///
/// N is batch · seq, the rows of `x`, which is N x hidden. `params` and `grads` are flat
/// buffers of one [`super::Unit`]; what lies behind the unit's last number is not touched.
/// Gradients of parameters are added to what is there.
pub struct Model<E: Engine> {
    shape: Shape,
    vocab: usize,
    tied: bool,
    /// N.
    rows: usize,
    most_rows: usize,
    /// seq x head_dim, as [`Engine::rope`] wants it.
    angles: Array<E>,
    block: Activations<E>,
    /// Of the head: rows at once, their norm, and their logits.
    chunk: usize,
    normed: Array<E>,
    inverse: Array<E>,
    d_normed: Array<E>,
    logits: Array<E>,
}

impl<E: Engine> Model<E> {
    /// For micro-batches of `batch` sequences of `seq` positions; the head holds the
    /// logits of `loss_chunk` rows at once.
    ///
    /// # Errors
    /// No memory.
    pub fn new(engine: &E, spec: &Spec, batch: usize, seq: usize, loss_chunk: usize) -> Result<Model<E>> {
        let rows = batch.checked_mul(seq).ok_or_else(|| too_many(batch, seq))?;
        let chunk = loss_chunk.clamp(1, rows.max(1));
        let (all, some) = (On { engine, rows }, On { engine, rows: chunk });
        let shape = Shape::new(spec, batch, seq);
        let mut angles = Array::f32(On { engine, rows: seq }, spec.head_dim)?;
        engine.upload(angles.write(On { engine, rows: seq }), &table(&spec.rope, spec.head_dim, seq))?;
        Ok(Model {
            shape,
            vocab: spec.vocab,
            tied: spec.tied,
            rows,
            most_rows: rows,
            angles,
            block: Activations::new(all, &shape)?,
            chunk,
            normed: Array::new(some, spec.hidden)?,
            inverse: Array::f32(some, 1)?,
            d_normed: Array::new(some, spec.hidden)?,
            logits: Array::new(some, spec.vocab)?,
        })
    }

    /// From now on micro-batches have this many sequences, at most as many as at first.
    pub fn set_batch(&mut self, batch: usize) {
        let rows = batch * self.shape.attention.seq;
        assert!(rows <= self.most_rows, "{batch} sequences are more than the buffers are for");
        self.shape.attention.batch = batch;
        self.rows = rows;
    }

    /// x's rows are the tokens' rows of the embedding. `params` are those of "embedding".
    ///
    /// # Errors
    /// The engine's, as for all of these.
    pub fn embed(&self, engine: &E, params: E::View<'_>, tokens: &E::Tokens, x: E::ViewMut<'_>) -> Result<()> {
        engine.embedding(x, engine.part(params, 0..self.vocab * self.shape.hidden), tokens)
    }

    /// Adds to the embedding's gradient. `grads` are those of "embedding".
    ///
    /// # Errors
    /// The engine's.
    pub fn embed_backward(&self, engine: &E, dx: E::View<'_>, tokens: &E::Tokens, grads: E::ViewMut<'_>) -> Result<()> {
        let [table] = engine.split(grads, [self.vocab * self.shape.hidden]);
        engine.embedding_backward(table, dx, tokens)
    }

    /// `x_out` is the block's output for `x_in`.
    ///
    /// # Errors
    /// The engine's.
    pub fn block_forward(
        &mut self,
        engine: &E,
        params: E::View<'_>,
        x_in: E::View<'_>,
        x_out: E::ViewMut<'_>,
    ) -> Result<()> {
        let on = On { engine, rows: self.rows };
        let angles = self.angles.read(On { engine, rows: self.shape.attention.seq });
        block::forward(on, &self.shape, angles, &mut self.block, params, x_in, x_out)
    }

    /// From the same `x_in` as the forward pass: `dx` is the gradient of the block's output
    /// and becomes that of its input.
    ///
    /// # Errors
    /// The engine's.
    pub fn block_backward(
        &mut self,
        engine: &E,
        params: E::View<'_>,
        x_in: E::View<'_>,
        dx: E::ViewMut<'_>,
        grads: E::ViewMut<'_>,
    ) -> Result<()> {
        let on = On { engine, rows: self.rows };
        let angles = self.angles.read(On { engine, rows: self.shape.attention.seq });
        block::backward(on, &self.shape, angles, &mut self.block, params, x_in, dx, grads)
    }

    /// Adds to `loss` the cross-entropies of all rows whose target counts: final norm, output
    /// projection and loss, a chunk of rows at a time. With `grads`, also backward: `dx`
    /// becomes the gradient of `scale` times that sum, and the parameters' is added;
    /// without, `dx` is not touched. `params` and `grads` are those of "head", or of
    /// "embedding" where the embedding is tied.
    ///
    /// # Errors
    /// The engine's.
    #[expect(clippy::too_many_arguments, reason = "each is another operand")]
    pub fn head(
        &mut self,
        engine: &E,
        loss: &mut E::Sum,
        params: E::View<'_>,
        x: E::View<'_>,
        targets: &E::Tokens,
        mut dx: E::ViewMut<'_>,
        grads: Option<E::ViewMut<'_>>,
        scale: f32,
    ) -> Result<()> {
        let e = engine;
        let hidden = self.shape.hidden;
        let output = Projection { input: hidden, output: self.vocab };
        // Tied: the matrix, then the norm; else the norm, then the matrix.
        let matrix = self.vocab * hidden;
        let (norm_at, matrix_at) =
            if self.tied { (matrix..matrix + hidden, 0..matrix) } else { (0..hidden, hidden..hidden + matrix) };
        let (norm, weight) = (e.part(params, norm_at), e.part(params, matrix_at));
        let mut grads = grads.map(|grads| {
            if self.tied {
                let [weight, norm] = e.split(grads, [matrix, hidden]);
                (norm, weight)
            } else {
                let [norm, weight] = e.split(grads, [hidden, matrix]);
                (norm, weight)
            }
        });
        if grads.is_some() {
            e.fill(e.again(&mut dx), 0.0)?;
        }

        let mut rest = dx;
        for first in (0..self.rows).step_by(self.chunk) {
            let on = On { engine, rows: self.chunk.min(self.rows - first) };
            let x = e.part(x, first * hidden..(first + on.rows) * hidden);
            e.rms_norm(self.normed.write(on), self.inverse.write(on), x, norm, self.shape.eps)?;
            output.forward(on, self.logits.write(on), Put::Replace, self.normed.read(on), weight)?;
            e.cross_entropy(loss, self.logits.write(on), targets, first, on.rows, scale)?;

            let left = (self.rows - first - on.rows) * hidden;
            let [dx, after] = e.split(rest, [on.rows * hidden, left]);
            rest = after;
            let Some((d_norm, d_weight)) = &mut grads else { continue };
            let d_logits = self.logits.read(on);
            output.weight_gradient(on, e.again(d_weight), d_logits, self.normed.read(on))?;
            output.input_gradient(on, self.d_normed.write(on), Put::Replace, d_logits, weight)?;
            let (d_normed, inverse) = (self.d_normed.read(on), self.inverse.read(on));
            e.rms_norm_backward(dx, e.again(d_norm), d_normed, x, norm, inverse)?;
        }
        Ok(())
    }
}

/// seq x head_dim: the cos of each position's head_dim / 2 angles, then their sin.
fn table(rope: &Rope, head_dim: usize, seq: usize) -> Vec<f32> {
    let frequencies = frequencies(rope, head_dim);
    let mut table = Vec::with_capacity(seq * head_dim);
    for position in 0..seq {
        // Rounded to f32 as transformers does it: at far positions the rounding counts.
        let angles = frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        table.extend(angles.clone().map(|angle| angle.cos() as f32));
        table.extend(angles.map(|angle| angle.sin() as f32));
    }
    table
}

/// Radians per position, of each pair of a head (Su et al., <https://arxiv.org/abs/2104.09864>).
fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f32> {
    let plain = (0..head_dim / 2).map(|pair| {
        let exponent = 2.0 * pair as f64 / head_dim as f64;
        (1.0 / f64::from(rope.theta).powf(exponent)) as f32
    });
    plain.map(|frequency| scaled(frequency, rope.scaling)).collect()
}

fn scaled(frequency: f32, scaling: Option<Scaling>) -> f32 {
    match scaling {
        None => frequency,
        Some(Scaling::Linear { factor }) => frequency / factor,
        Some(Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original }) => {
            let original = original as f32;
            let wavelength = std::f32::consts::TAU / frequency;
            if wavelength > original / low_freq_factor {
                frequency / factor
            } else if wavelength < original / high_freq_factor {
                frequency
            } else {
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}
