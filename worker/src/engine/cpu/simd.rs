//! Loops that the compiler turns into the widest instructions of the processor they run
//! on. Sums go into [`LANES`] fixed lanes, so that they round alike on all of them.

use pulp::Arch;

/// Sums that go on side by side: two of the widest registers.
const LANES: usize = 32;

/// Runs `work` compiled for this processor. It must be `#[inline(always)]`, and so what it
/// calls: a closure that is not inlined here is compiled for the oldest processor, and is
/// a hundred times slower.
pub(super) fn run<R>(work: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(work)
}

/// e^x to a relative error of less than 2^-23 (1.2e-7); 0 below -87.33, where e^x is no longer normal,
/// infinite above 88.37. NaN stays.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.7;
    // Adding it leaves the nearest whole number in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons that keep NaN, unlike min and max.
    let bounded = if x < LOWEST { LOWEST } else { x };
    let bounded = if bounded > HIGHEST { HIGHEST } else { bounded };
    let rounded = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let whole = rounded - ROUND;
    // ln 2 in two parts, the first exact in a product with any whole number here.
    let rest = whole.mul_add(-0.693_359_4, bounded);
    let rest = whole.mul_add(2.121_944_4e-4, rest);
    // Cephes' polynomial of e^x - 1 - x over x², minimax on half of ln 2 to either side.
    let series = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5]
        .into_iter()
        .fold(1.987_569_1e-4_f32, |sum, factor| sum.mul_add(rest, factor));
    let mantissa = series.mul_add(rest * rest, rest) + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < LOWEST { 0.0 } else { mantissa * power }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
fn total(mut sums: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Σ a·b.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] = a.mul_add(*b, sums[i]);
    }
    total(sums)
}

/// The highest number that is one.
#[inline(always)]
pub(super) fn highest(row: &[f32]) -> f32 {
    let mut highest = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            highest[i] = if chunk[i] > highest[i] { chunk[i] } else { highest[i] };
        }
    }
    highest.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max)
}

/// Σ a·b·c.
#[inline(always)]
pub(super) fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let ((b, b_rest), (c, c_rest)) = (b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            sums[i] = (a[i] * b[i]).mul_add(c[i], sums[i]);
        }
    }
    for (i, ((a, b), c)) in a_rest.iter().zip(b_rest).zip(c_rest).enumerate() {
        sums[i] = (a * b).mul_add(*c, sums[i]);
    }
    total(sums)
}

/// Σ x², in f64.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            sums[i] += f64::from(chunk[i]) * f64::from(chunk[i]);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        sums[i] += f64::from(*x) * f64::from(*x);
    }
    sums.iter().sum()
}

/// Replaces a row by e^(x - highest); gives the highest and the sum.
#[inline(always)]
pub(super) fn exponentials(row: &mut [f32]) -> (f32, f32) {
    let highest = highest(row);
    let mut sums = [0.0; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp(chunk[i] - highest);
            sums[i] += chunk[i];
        }
    }
    for (i, x) in rest.iter_mut().enumerate() {
        *x = exp(*x - highest);
        sums[i] += *x;
    }
    (highest, total(sums))
}

#[cfg(test)]
mod tests {
    use super::{exp, run};

    #[test]
    fn exp_is_f64s_to_the_last_place_but_one() {
        let worst = run(
            #[inline(always)]
            || {
                let xs = (-873_300..883_700).map(|i| i as f32 / 10_000.0 + 1e-5);
                xs.map(|x| ((f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs(), x))
                    .fold((0.0, 0.0), |worst, this| if this.0 > worst.0 { this } else { worst })
            },
        );
        assert!(worst.0 < f64::from(f32::EPSILON), "{worst:?}");
    }

    #[test]
    fn exp_beyond_its_range_is_zero_infinite_or_not_a_number() {
        let values = run(
            #[inline(always)]
            || [f32::NEG_INFINITY, -1e30, -88.0, 0.0, 89.0, 1e30, f32::INFINITY, f32::NAN].map(exp),
        );
        assert_eq!(values[..7], [0.0, 0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
        assert!(values[7].is_nan());
    }
}
