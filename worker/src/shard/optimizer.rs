//! AdamW on the parts. What depends on all gradients, the norm, comes from outside.

use super::{Result, Sharded, pieces};
use crate::engine::{AdamW, Engine};

impl<E: Engine> Sharded<E> {
    /// The sum of the squares of this rank's gradients, in f64.
    ///
    /// # Errors
    /// The device's.
    pub fn sum_of_squares(&mut self, engine: &E) -> Result<f64> {
        for kept in &self.units {
            engine.sum_of_squares(&mut self.squares, engine.view(&kept.grad, 0..kept.own.len()))?;
        }
        Ok(engine.take(&mut self.squares)?)
    }

    /// The sum of this rank's losses in all micro-batches since this was asked last.
    ///
    /// # Errors
    /// The device's.
    pub fn take_loss(&mut self, engine: &E) -> Result<f64> {
        Ok(engine.take(&mut self.loss)?)
    }

    /// One step of AdamW; weight decay only where [`crate::model::Tensor::decays`].
    ///
    /// # Errors
    /// The device's.
    pub fn update(&mut self, engine: &E, how: AdamW) -> Result<()> {
        // What was gathered is of before.
        self.forget();
        for kept in &mut self.units {
            // Neighbours with the same decay in one go.
            let mut runs: Vec<(std::ops::Range<usize>, bool)> = Vec::new();
            for piece in pieces(&kept.unit, &kept.own) {
                let decays = piece.tensor.decays();
                match runs.last_mut() {
                    Some((run, same)) if *same == decays => run.end = piece.at.end,
                    _ => runs.push((piece.at, decays)),
                }
            }
            for (run, decays) in runs {
                engine.adamw(
                    engine.view_mut(&mut kept.master, run.clone()),
                    engine.view(&kept.grad, run.clone()),
                    engine.view_mut(&mut kept.first_moment, run.clone()),
                    engine.view_mut(&mut kept.second_moment, run),
                    AdamW { weight_decay: if decays { how.weight_decay } else { 0.0 }, ..how },
                )?;
            }
        }
        Ok(())
    }
}
