//! In which order samples come: a permutation for each epoch, computed for one place at a
//! time, so that it needs no memory and any place can be asked for first.
//!
//! A Feistel network permutes the numbers of twice `half` bits; what falls outside of the
//! samples is permuted again until it is inside (cycle walking; Black and Rogaway,
//! <https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf>). Checkpoints hold a place in this
//! order, so it must never change for a seed: `tests/data.rs` has values of another program.

/// Rounds of the network; four already look random to statistics.
const ROUNDS: u64 = 8;

/// The order of all samples of a training, epoch after epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    samples: u64,
    shuffle: bool,
    /// Bits of each half: the fewest with which all samples have a number.
    half: u32,
}

impl Order {
    /// For `samples` samples, at least 1. Without `shuffle` they come as they lie on disk, in
    /// every epoch.
    ///
    /// # Panics
    /// With no samples; [`super::Dataset::enough`] says so to people first.
    #[must_use]
    pub fn new(seed: u64, samples: u64, shuffle: bool) -> Order {
        assert!(samples > 0, "an order of no samples");
        let bits = u64::BITS - (samples - 1).leading_zeros();
        Order { seed, samples, shuffle, half: bits.div_ceil(2).max(1) }
    }

    /// Samples of one epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The `i`-th sample of the whole training, from 0: in which epoch it comes, and which it is.
    #[must_use]
    pub fn at(&self, i: u64) -> (u64, u64) {
        let (epoch, place) = (i / self.samples, i % self.samples);
        if !self.shuffle {
            return (epoch, place);
        }
        let key = mix(mix(self.seed).wrapping_add(epoch));
        let mut sample = self.permute(key, place);
        // Ends: the network is a permutation, and `place` itself lies on this cycle.
        while sample >= self.samples {
            sample = self.permute(key, sample);
        }
        (epoch, sample)
    }

    fn permute(&self, key: u64, number: u64) -> u64 {
        let mask = u64::MAX >> (u64::BITS - self.half);
        let (mut left, mut right) = (number >> self.half, number & mask);
        for round in 0..ROUNDS {
            let of_round = mix(key.wrapping_add(round));
            (left, right) = (right, left ^ (mix(right ^ of_round) & mask));
        }
        left << self.half | right
    }
}

/// One number of SplitMix64 (Steele, Lea and Flood, <https://doi.org/10.1145/2714064.2660195>),
/// the one that follows the state `x`.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_as_published_splitmix64_does() {
        // The values of https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64 for seed
        // 1234567: its state grows by the golden gamma before each number.
        let published = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        let states = (0..3u64).map(|i| 1_234_567u64.wrapping_add(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(i)));
        assert_eq!(states.map(mix).collect::<Vec<_>>(), published);
    }

    #[test]
    fn every_epoch_has_every_sample_once() {
        for samples in (1..70).chain([255, 256, 257, 1000, 4096, 4097, 10_007]) {
            let order = Order::new(7, samples, true);
            for epoch in 0..3 {
                let mut seen = vec![false; samples as usize];
                for place in 0..samples {
                    let (at, sample) = order.at(epoch * samples + place);
                    assert_eq!(at, epoch);
                    assert!(!std::mem::replace(&mut seen[sample as usize], true), "{sample} of {samples} comes twice");
                }
                assert!(seen.iter().all(|seen| *seen));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_unshuffled_stays() {
        let epoch = |seed, shuffle, epoch: u64| {
            let order = Order::new(seed, 1000, shuffle);
            (0..1000).map(|place| order.at(epoch * 1000 + place).1).collect::<Vec<_>>()
        };
        let equal = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        // Two random permutations agree in one place on average.
        assert!(equal(&epoch(1, true, 0), &epoch(1, true, 1)) < 10);
        assert!(equal(&epoch(1, true, 0), &epoch(2, true, 0)) < 10);
        assert_eq!(epoch(1, true, 5), epoch(1, true, 5));
        assert_eq!(epoch(1, false, 5), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn each_sample_is_as_likely_in_each_place() {
        // Chi-square over places x samples of 13 samples, 144 degrees of freedom: a fair
        // shuffle stays below 206 in 999 of 1000 cases.
        let (samples, epochs) = (13u64, 13_000u64);
        let order = Order::new(3, samples, true);
        let mut counts = [[0u64; 13]; 13];
        for i in 0..samples * epochs {
            counts[(i % samples) as usize][order.at(i).1 as usize] += 1;
        }
        let expected = epochs as f64 / samples as f64;
        let chi: f64 = counts.iter().flatten().map(|count| (*count as f64 - expected).powi(2) / expected).sum();
        assert!(chi < 206.0, "{chi}");
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        for samples in [1 << 40, u64::MAX / 2, u64::MAX] {
            let order = Order::new(u64::MAX, samples, true);
            assert!(order.at(samples - 1).1 < samples);
            assert!(order.at(u64::MAX).1 < samples);
        }
    }
}
