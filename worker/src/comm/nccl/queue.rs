//! What NCCL needs of a device: a stream of work of its own, points in it, and that the
//! stream of the computation and this one wait for each other. Nothing here knows what goes
//! over the stream.

use std::ffi::c_void;

use crate::engine::{Cpu, Engine, Precision, Result};

/// A device's stream for collectives, beside the one of the computation. Used from several
/// threads.
pub trait Queue: Send + Sync + 'static {
    /// A point in a stream's work. Dropping one does not wait.
    type Marker: Send + Sync + 'static;

    /// Which device of its host it is: the PCI address and the UUID, for MIG instances share an
    /// address.
    fn device(&self) -> String;
    /// CUDA's name of the stream.
    fn stream(&self) -> *mut c_void;
    /// Makes the device that of the calling thread, as NCCL wants it.
    ///
    /// # Errors
    /// The device's, as for all that follow.
    fn enter(&self) -> Result<()>;
    /// What is put on the stream from here on comes after all that was computed so far: the
    /// point where that is done.
    ///
    /// # Errors
    /// The device's.
    fn after_compute(&self) -> Result<Self::Marker>;
    /// The point where all that is on the stream so far is done.
    ///
    /// # Errors
    /// The device's.
    fn mark(&self) -> Result<Self::Marker>;
    /// Whether it is. Does not wait.
    ///
    /// # Errors
    /// The device's, also of the work before it.
    fn is_done(&self, marker: &Self::Marker) -> Result<bool>;
    /// What is computed from here on comes after it. Does not wait.
    ///
    /// # Errors
    /// The device's.
    fn compute_waits(&self, marker: &Self::Marker) -> Result<()>;
    /// The group is broken: whoever waits for the device is to wait no more.
    fn stop(&self);
}

/// The numbers of a view, where NCCL reads and writes them.
#[derive(Debug)]
pub enum Numbers<'a> {
    /// Memory that the borrow alone keeps alive: an operation is over before it is given back.
    Host(&'a mut [f32]),
    /// Memory of a device, which is freed only when the device has done what it was told.
    Device {
        /// Where they begin.
        address: u64,
        /// How many.
        len: usize,
        /// How they are stored.
        precision: Precision,
    },
}

/// An engine whose numbers NCCL can reach.
pub trait Reachable: Engine {
    /// Whether its memory is a device's: then operations go on beside the computation.
    const DEVICE: bool;
    /// The numbers of a view.
    fn numbers<'a>(&self, view: Self::ViewMut<'a>) -> Numbers<'a>
    where
        Self: 'a;
}

impl Reachable for Cpu {
    const DEVICE: bool = false;

    fn numbers<'a>(&self, view: &'a mut [f32]) -> Numbers<'a>
    where
        Self: 'a,
    {
        Numbers::Host(view)
    }
}
