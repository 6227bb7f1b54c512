//! Where tokens come from: shards of token ids on disk ([`prepare`] makes them, [`Dataset`]
//! reads them), an order that the seed decides ([`Order`]), and what each rank computes of
//! it ([`Batches`]). The cursor is one number, the samples seen so far, and knows nothing of
//! ranks; nothing here knows of a model.

mod batches;
mod check;
mod dataset;
mod documents;
mod encode;
mod order;
pub mod prepare;
mod shard;

pub use batches::Batches;
pub use check::{Beside, Check};
pub use dataset::Dataset;
pub use order::Order;

/// What is wrong with data: what, why and the cure in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// What was given or lies there cannot be used; another try finds the same.
    #[error("{0}")]
    Wrong(String),
    /// The file system failed: no space, an unreachable server.
    #[error("{0}")]
    Io(String),
}

/// A result of this module.
pub type Result<T> = std::result::Result<T, DataError>;

fn wrong<T>(why: impl Into<String>) -> Result<T> {
    Err(DataError::Wrong(why.into()))
}

/// An error of the file system, as [`Result::map_err`] takes it. What is not there or not
/// allowed is wrong for good, all else may pass.
fn io(what: &str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> DataError {
    use std::io::ErrorKind::{AlreadyExists, IsADirectory, NotADirectory, NotFound, PermissionDenied};
    let place = format!("{}: {what}", path.display());
    move |error| match error.kind() {
        NotFound | PermissionDenied | AlreadyExists | NotADirectory | IsADirectory => {
            DataError::Wrong(format!("{place}: {error}"))
        }
        _ => DataError::Io(format!("{place}: {error}")),
    }
}
