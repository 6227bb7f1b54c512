//! Forward and backward of a whole model, unit by unit.

use super::Spec;
use crate::engine::{Engine, Result};

/// What the computation needs beside parameters: activations of one block at a time,
/// and tables.
#[derive(Debug)]
pub struct Model<E: Engine> {
    _engine: std::marker::PhantomData<E>,
}

impl<E: Engine> Model<E> {
    /// For micro-batches of `batch` sequences of `seq` positions.
    ///
    /// # Errors
    /// No memory.
    pub fn new(_engine: &E, _spec: &Spec, _batch: usize, _seq: usize) -> Result<Model<E>> {
        Ok(Model { _engine: std::marker::PhantomData })
    }
}
