//! The check of a GPU's operations (examples/gpu_check), on the kernels' own text as the
//! processor runs it: the check finds nothing where nothing is wrong.

#[path = "cuda/emulated.rs"]
#[allow(dead_code, reason = "the tests of kernels use more of it")]
mod emulated;
#[path = "../examples/gpu_check/ops.rs"]
#[allow(dead_code, reason = "the program uses more of it")]
mod ops;
#[path = "../examples/gpu_check/row.rs"]
#[allow(dead_code, reason = "the program uses more of it")]
mod row;

use emulated::Emulated;
use palingenesis_worker::engine::Precision;
use palingenesis_worker::engine::cuda::Cuda;

fn check(precision: Precision) {
    let Some(device) = Emulated::new() else { return };
    let engine = Cuda::new(device, precision).unwrap();
    let rows = ops::all(&engine, false);
    rows.iter().for_each(|row| println!("{row}"));
    let failed: Vec<_> = rows.iter().filter(|row| row.state != row::State::Ok).map(ToString::to_string).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn the_kernels_pass_the_check_of_a_gpu_in_f32() {
    check(Precision::F32);
}

#[test]
fn the_kernels_pass_the_check_of_a_gpu_in_bf16() {
    check(Precision::Bf16);
}
