//! One micro-batch, forward and backward, unit by unit. All ranks call all collectives in
//! the same order, those without a sample of their own, too.

use super::{Result, Sharded, is_block};
use crate::comm::Collective;
use crate::engine::Engine;
use crate::model::Model;

/// What a rank computes at once: sequences · seq tokens and what should follow each.
pub struct Batch<E: Engine> {
    /// Sequences, at least one.
    pub sequences: usize,
    /// Tokens.
    pub inputs: E::Tokens,
    /// The tokens after them, or [`crate::engine::IGNORED`].
    pub targets: E::Tokens,
}

/// What is kept between forward and backward: the input of each block, and the last one's
/// output. All else is computed again.
pub(super) struct Activations<E: Engine> {
    inputs: Vec<E::Buffer>,
    gradient: E::Buffer,
    /// Numbers of one sequence.
    sequence: usize,
}

impl<E: Engine> Activations<E> {
    pub(super) fn new(engine: &E, blocks: usize, sequences: usize, sequence: usize) -> Result<Activations<E>> {
        let len = sequences * sequence;
        let inputs = (0..=blocks).map(|_| Ok(engine.zeros(len)?)).collect::<Result<Vec<_>>>()?;
        Ok(Activations { inputs, gradient: engine.zeros(len)?, sequence })
    }
}

impl<E: Engine> Sharded<E> {
    /// Adds one micro-batch's gradients, times `scale`, to the parts; `first` of a step
    /// replaces the last step's. Returns the sum of this rank's losses over its targets,
    /// 0 without a batch.
    ///
    /// # Errors
    /// Another rank's, or the device's.
    pub fn micro_step<C: Collective<E>>(
        &mut self,
        engine: &E,
        comm: &mut C,
        model: &mut Model<E>,
        batch: Option<&Batch<E>>,
        scale: f32,
        first: bool,
    ) -> Result<f64> {
        let blocks = self.units.iter().filter(|kept| is_block(&kept.unit)).count();
        // With a tied embedding the first unit is the last, too, and its gradients from
        // both ends meet in the same buffer.
        let embedding = 0;
        let head = if self.units.len() > blocks + 1 { blocks + 1 } else { embedding };

        let all = 0..batch.map_or(0, |batch| batch.sequences) * self.activations.sequence;
        if let Some(batch) = batch {
            model.set_batch(batch.sequences);
        }

        self.gather(engine, comm, embedding)?;
        if let Some(batch) = batch {
            let (params, _, x) = self.at(engine, embedding);
            model.embed(engine, params, &batch.inputs, engine.view_mut(&mut x.inputs[0], all.clone()))?;
        }
        for block in 0..blocks {
            self.gather(engine, comm, 1 + block)?;
            if batch.is_some() {
                let (params, _, x) = self.at(engine, 1 + block);
                let (before, after) = x.inputs.split_at_mut(block + 1);
                let (from, to) = (&before[block], &mut after[0]);
                model.block_forward(
                    engine,
                    params,
                    engine.view(from, all.clone()),
                    engine.view_mut(to, all.clone()),
                )?;
            }
        }

        self.gather(engine, comm, head)?;
        self.clear(engine, head, first)?;
        let mut loss = 0.0;
        if let Some(batch) = batch {
            let (params, grads, x) = self.at(engine, head);
            let (from, dx) =
                (engine.view(&x.inputs[blocks], all.clone()), engine.view_mut(&mut x.gradient, all.clone()));
            loss = model.head(engine, params, from, &batch.targets, dx, Some(grads), scale)?;
        }
        if head != embedding {
            self.scatter(engine, comm, head, first)?;
        }

        for block in (0..blocks).rev() {
            self.gather(engine, comm, 1 + block)?;
            self.clear(engine, 1 + block, first)?;
            if batch.is_some() {
                let (params, grads, x) = self.at(engine, 1 + block);
                let (from, dx) =
                    (engine.view(&x.inputs[block], all.clone()), engine.view_mut(&mut x.gradient, all.clone()));
                model.block_backward(engine, params, from, dx, grads)?;
            }
            self.scatter(engine, comm, 1 + block, first)?;
        }

        if head != embedding {
            self.clear(engine, embedding, first)?;
        }
        if let Some(batch) = batch {
            let (grads, x) = self.grads_at(engine, embedding);
            model.embed_backward(engine, engine.view(&x.gradient, all.clone()), &batch.inputs, grads)?;
        }
        self.scatter(engine, comm, embedding, first)?;
        Ok(loss)
    }

    /// A unit's parameters and gradients beside the activations.
    pub(super) fn at(&mut self, engine: &E, index: usize) -> (E::View<'_>, E::ViewMut<'_>, &mut Activations<E>) {
        let kept = &mut self.units[index];
        let len = kept.unit.len();
        if self.world == 1 {
            let (params, grads) = (engine.view(&kept.master, 0..len), engine.view_mut(&mut kept.grad, 0..len));
            return (params, grads, &mut self.activations);
        }
        let (whole, grads) = match is_block(&kept.unit) {
            true => (&self.block, &mut self.block_grads),
            false => (&self.root, &mut self.root_grads),
        };
        assert_eq!(whole.holds, Some(index), "the unit was not gathered");
        (engine.view(&whole.buffer, 0..len), engine.view_mut(grads, 0..len), &mut self.activations)
    }

    /// The same where the parameters are not needed.
    fn grads_at(&mut self, engine: &E, index: usize) -> (E::ViewMut<'_>, &mut Activations<E>) {
        let kept = &mut self.units[index];
        let len = kept.unit.len();
        let grads = match (self.world, is_block(&kept.unit)) {
            (1, _) => &mut kept.grad,
            (_, true) => &mut self.block_grads,
            (_, false) => &mut self.root_grads,
        };
        (engine.view_mut(grads, 0..len), &mut self.activations)
    }
}
