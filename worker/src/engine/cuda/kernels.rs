//! The kernels' text, one translation unit.

use super::attention;

/// Files of this folder, in the order in which they are compiled: name and text.
const OWN: &[(&str, &str)] = &[
    ("common.cu", include_str!("kernels/common.cu")),
    ("optimizer.cu", include_str!("kernels/optimizer.cu")),
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("loss.cu", include_str!("kernels/loss.cu")),
];

/// All kernels.
pub const NAMES: &[&str] = &[
    "fill_f32",
    "fill_bf16",
    "cast_to_bf16",
    "cast_to_f32",
    "add_f32_f32",
    "add_f32_bf16",
    "add_bf16_bf16",
    "add_bf16_f32",
    "sum_of_squares_f32",
    "sum_of_squares_bf16",
    "add_sum_f64",
    "add_sum_f32",
    "rms_norm_f32",
    "rms_norm_bf16",
    "rms_norm_narrow_f32",
    "rms_norm_narrow_bf16",
    "rms_norm_backward_f32",
    "rms_norm_backward_bf16",
    "rms_norm_backward_narrow_f32",
    "rms_norm_backward_narrow_bf16",
    "column_sum_f32",
    "column_sum_bf16",
    "rope_f32",
    "rope_bf16",
    "swiglu_f32",
    "swiglu_bf16",
    "swiglu_backward_f32",
    "swiglu_backward_bf16",
    "embedding_f32",
    "embedding_bf16",
    "embedding_backward_f32_f32",
    "embedding_backward_bf16_f32",
    "embedding_backward_bf16_bf16",
    "cross_entropy_f32",
    "cross_entropy_bf16",
    "adamw",
];

/// All kernels' names, those of attention too.
#[must_use]
pub fn names() -> Vec<&'static str> {
    NAMES.iter().chain(attention::NAMES).copied().collect()
}

/// All files, one after the other.
#[must_use]
pub fn source() -> String {
    let files = OWN.iter().chain(attention::SOURCES);
    files.map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
}
