//! What tests share that compare the worker's operations and gradients with candle's, which
//! computes them in another way. Run by `cargo test --manifest-path worker/oracle/Cargo.toml`.
