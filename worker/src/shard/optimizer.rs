//! AdamW on the parts. What depends on all gradients, the norm, comes from outside.

use super::{Result, Sharded, pieces};
use crate::engine::{AdamW, Engine};

impl<E: Engine> Sharded<E> {
    /// The sum of the squares of this rank's gradients, in f64.
    ///
    /// # Errors
    /// The device's.
    pub fn sum_of_squares(&self, engine: &E) -> Result<f64> {
        let mut sum = 0.0;
        for kept in &self.units {
            sum += engine.sum_of_squares(engine.view(&kept.grad, 0..kept.own.len()))?;
        }
        Ok(sum)
    }

    /// One step of AdamW; weight decay only where [`crate::model::Tensor::decays`].
    ///
    /// # Errors
    /// The device's.
    pub fn update(&mut self, engine: &E, how: AdamW) -> Result<()> {
        // What was gathered is of before.
        (self.root.holds, self.block.holds) = (None, None);
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
