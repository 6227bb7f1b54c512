//! One micro-batch, forward and backward, unit by unit. All ranks call all collectives in
//! the same order, those without a sample of their own, too.

use super::{Result, Sharded, is_block, of};
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
        let inputs = (0..=blocks).map(|_| Ok(engine.zeros(len, engine.compute())?)).collect::<Result<Vec<_>>>()?;
        Ok(Activations { inputs, gradient: engine.zeros(len, engine.compute())?, sequence })
    }
}

/// What a unit's computation takes.
pub(super) struct At<'a, E: Engine> {
    pub(super) params: E::View<'a>,
    grads: E::ViewMut<'a>,
    x: &'a mut Activations<E>,
    loss: &'a mut E::Sum,
}

impl<E: Engine> Sharded<E> {
    /// Adds one micro-batch's gradients, times `scale`, to the parts; `first` of a step
    /// replaces the last step's. This rank's losses over its targets are added up, see
    /// [`Sharded::take_loss`]; nothing without a batch.
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
    ) -> Result<()> {
        let blocks = self.units.iter().filter(|kept| is_block(&kept.unit)).count();
        // With a tied embedding the first unit is the last, too, and its gradients from
        // both ends meet in the same buffer.
        let embedding = 0;
        let head = if self.units.len() > blocks + 1 { blocks + 1 } else { embedding };
        // What comes next is gathered meanwhile.
        let ahead = self.blocks.len() > 1;

        let all = 0..batch.map_or(0, |batch| batch.sequences) * self.activations.sequence;
        if let Some(batch) = batch {
            model.set_batch(batch.sequences);
        }

        self.gather(engine, comm, embedding)?;
        if let Some(batch) = batch {
            let At { params, x, .. } = self.at(engine, embedding);
            model.embed(engine, params, &batch.inputs, engine.view_mut(&mut x.inputs[0], all.clone()))?;
        }
        for block in 0..blocks {
            self.gather(engine, comm, 1 + block)?;
            let next = if block + 1 < blocks { 2 + block } else { head };
            if ahead {
                self.begin_gather(engine, comm, next)?;
            }
            if batch.is_some() {
                let At { params, x, .. } = self.at(engine, 1 + block);
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
        self.clear(engine, comm, head, first)?;
        if let Some(batch) = batch {
            let At { params, grads, x, loss } = self.at(engine, head);
            let (from, dx) =
                (engine.view(&x.inputs[blocks], all.clone()), engine.view_mut(&mut x.gradient, all.clone()));
            model.head(engine, loss, params, from, &batch.targets, dx, Some(grads), scale)?;
        }
        if head != embedding {
            self.reduce(engine, comm, head, first)?;
        }

        for block in (0..blocks).rev() {
            self.gather(engine, comm, 1 + block)?;
            if ahead && block > 0 {
                self.begin_gather(engine, comm, block)?;
            }
            self.clear(engine, comm, 1 + block, first)?;
            if batch.is_some() {
                let At { params, grads, x, .. } = self.at(engine, 1 + block);
                let (from, dx) =
                    (engine.view(&x.inputs[block], all.clone()), engine.view_mut(&mut x.gradient, all.clone()));
                model.block_backward(engine, params, from, dx, grads)?;
            }
            self.reduce(engine, comm, 1 + block, first)?;
        }

        if head != embedding {
            self.clear(engine, comm, embedding, first)?;
        }
        if let Some(batch) = batch {
            let (grads, x) = self.grads_at(engine, embedding);
            model.embed_backward(engine, engine.view(&x.gradient, all.clone()), &batch.inputs, grads)?;
        }
        self.reduce(engine, comm, embedding, first)?;
        // Nothing is on its way between micro-steps.
        (0..self.units.len()).try_for_each(|index| self.add_reduced(engine, comm, index))
    }

    /// What is there of a unit that was gathered.
    pub(super) fn at(&mut self, engine: &E, index: usize) -> At<'_, E> {
        let Sharded { units, blocks, block_grads, activations: x, loss, .. } = self;
        let kept = &mut units[index];
        let len = kept.unit.len();
        let (whole, buffer) = match is_block(&kept.unit) {
            true => (&*of(blocks, index), &mut of(block_grads, index).buffer),
            false => (&self.root, &mut self.root_grads.buffer),
        };
        let grads = engine.view_mut(if self.grads_direct { &mut kept.grad } else { buffer }, 0..len);
        if self.direct {
            return At { params: engine.view(&kept.master, 0..len), grads, x, loss };
        }
        assert!(whole.holds == Some(index) && whole.ongoing.is_none(), "the unit was not gathered");
        At { params: engine.view(&whole.buffer, 0..len), grads, x, loss }
    }

    /// The same where the parameters are not needed.
    fn grads_at(&mut self, engine: &E, index: usize) -> (E::ViewMut<'_>, &mut Activations<E>) {
        let kept = &mut self.units[index];
        let len = kept.unit.len();
        let grads = match (self.grads_direct, is_block(&kept.unit)) {
            (true, _) => &mut kept.grad,
            (_, true) => &mut of(&mut self.block_grads, index).buffer,
            (_, false) => &mut self.root_grads.buffer,
        };
        (engine.view_mut(grads, 0..len), &mut self.activations)
    }
}
