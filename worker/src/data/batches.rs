//! Which samples a rank computes in a step. Step s has the samples s·G .. (s+1)·G of the
//! order, G the global batch, however many ranks there are; each rank has an equal share of
//! them, one more or less, in micro-batches.

use std::ops::Range;

use super::Order;

/// The steps of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batches {
    order: Order,
    global: u64,
    micro: u64,
}

impl Batches {
    /// `global` sequences a step over all ranks, `micro` at once on a rank.
    ///
    /// # Panics
    /// When one of them is 0; the configuration refuses that.
    #[must_use]
    pub fn new(order: Order, global: usize, micro: usize) -> Batches {
        assert!(global > 0 && micro > 0, "a batch of nothing");
        Batches { order, global: global as u64, micro: micro as u64 }
    }

    /// The cursor after `steps` steps, as checkpoints hold it.
    #[must_use]
    pub fn samples_seen(&self, steps: u64) -> u64 {
        steps.saturating_mul(self.global)
    }

    /// In how many micro-batches a step is computed: equally many on all ranks, since each
    /// has operations that all take part in.
    #[must_use]
    pub fn micro_steps(&self, world: usize) -> usize {
        let most = self.global.div_ceil(world.max(1) as u64);
        most.div_ceil(self.micro) as usize
    }

    /// Samples of the data, by number, that `rank` computes in micro-batch `micro_step` of
    /// `step` (all from 0): at most the micro-batch size, and none where the ranks' shares
    /// are uneven.
    #[must_use]
    pub fn micro(&self, step: u64, micro_step: usize, rank: usize, world: usize) -> Vec<u64> {
        let share = self.share(rank, world);
        let start = share.start.saturating_add((micro_step as u64).saturating_mul(self.micro)).min(share.end);
        let end = start.saturating_add(self.micro).min(share.end);
        let first = self.samples_seen(step);
        (start..end).map(|place| self.order.at(first.saturating_add(place)).1).collect()
    }

    /// Epochs begun before the end of `steps` steps, with a fraction: for people.
    #[must_use]
    pub fn epochs(&self, steps: u64) -> f64 {
        self.samples_seen(steps) as f64 / self.order.samples() as f64
    }

    /// Which of a step's samples a rank has.
    fn share(&self, rank: usize, world: usize) -> Range<u64> {
        let bound = |rank: usize| (u128::from(self.global) * rank as u128 / world.max(1) as u128) as u64;
        bound(rank)..bound(rank + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_world_size_sees_the_same_samples_in_every_step() {
        for (samples, global, micro) in [(100, 8, 2), (37, 5, 3), (3, 7, 1), (1000, 64, 64), (11, 1, 4)] {
            let order = Order::new(9, samples, true);
            let batches = Batches::new(order, global, micro);
            for step in 0..20 {
                let start = step * global as u64;
                let expected: Vec<u64> = (start..start + global as u64).map(|i| order.at(i).1).collect();
                for world in 1..=7 {
                    let mut union = Vec::new();
                    for rank in 0..world {
                        let steps = batches.micro_steps(world);
                        for micro_step in 0..steps {
                            let some = batches.micro(step, micro_step, rank, world);
                            assert!(some.len() <= micro);
                            union.extend(some);
                        }
                        assert!(
                            batches.micro(step, steps, rank, world).is_empty(),
                            "samples after the last micro-batch"
                        );
                    }
                    assert_eq!(union, expected, "world of {world}, step {step}");
                }
            }
        }
    }

    #[test]
    fn shares_differ_by_one_at_most() {
        let batches = Batches::new(Order::new(0, 100, false), 10, 2);
        let counts = |world: usize| {
            (0..world)
                .map(|rank| (0..batches.micro_steps(world)).map(|m| batches.micro(0, m, rank, world).len()).sum())
                .collect::<Vec<usize>>()
        };
        assert_eq!(counts(4), [2, 3, 2, 3]);
        assert_eq!(counts(10), [1; 10]);
        // More ranks than samples: some compute nothing, and still take part.
        assert_eq!(counts(12).iter().sum::<usize>(), 10);
        assert_eq!(batches.micro_steps(12), 1);
        assert_eq!(batches.micro_steps(3), 2);
    }
}
