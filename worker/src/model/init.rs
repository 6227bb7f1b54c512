//! A tensor's first values. Each number follows from the seed, the tensor's name and its
//! place alone, so that a rank computes only its own part and the model is the same at
//! every world size.

use std::ops::Range;

use super::{Init, Tensor};

/// The numbers `range` of the tensor, in row-major order, into `out`, which has that length.
pub fn initial(tensor: &Tensor, seed: u64, range: Range<usize>, out: &mut [f32]) {
    assert!(out.len() == range.len() && range.end <= tensor.len());
    let deviation = match tensor.init {
        Init::Ones => return out.fill(1.0),
        Init::Normal(deviation) => f64::from(deviation),
    };
    let key = mix(seed ^ mix(name_hash(&tensor.name)));
    // Box and Muller's transform makes two normal numbers of two uniform ones.
    let mut pair = (usize::MAX, [0.0; 2]);
    for (place, to) in range.zip(out) {
        if pair.0 != place / 2 {
            pair = (place / 2, normal_pair(key, place as u64 / 2));
        }
        *to = (deviation * pair.1[place % 2]) as f32;
    }
}

fn normal_pair(key: u64, counter: u64) -> [f64; 2] {
    // SplitMix64 (Steele, Lea and Flood, https://doi.org/10.1145/2660193.2660195) at any
    // place of its sequence.
    let bits = mix(key.wrapping_add((counter + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / 4_294_967_296.0;
    let radius = (-2.0 * uniform((bits >> 32) as u32).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * uniform(bits as u32)).sin_cos();
    [radius * cos, radius * sin]
}

/// SplitMix64's output function.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// FNV-1a.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
