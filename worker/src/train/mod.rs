//! The training loop: schedule, accumulation, clipping, optimizer, metrics, checkpoints and
//! what ends it.
