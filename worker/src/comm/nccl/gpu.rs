//! A GPU's streams as NCCL needs them.

use std::ffi::c_void;
use std::sync::Arc;

use super::queue::{Numbers, Queue, Reachable};
use crate::engine::Result;
use crate::engine::cuda::device::Device;
use crate::engine::cuda::driver::{Context, Event, Gpu, Stream};
use crate::engine::cuda::{Cuda, ViewMut};

/// A stream for collectives beside the one on which a GPU computes.
#[derive(Debug)]
pub struct GpuQueue {
    context: Arc<Context>,
    compute: Arc<Stream>,
    collectives: Stream,
}

impl GpuQueue {
    /// Beside the stream of this GPU.
    ///
    /// # Errors
    /// The device's.
    pub fn new(gpu: &Gpu) -> Result<GpuQueue> {
        let context = Arc::clone(gpu.context());
        let collectives = Stream::new(&context)?;
        Ok(GpuQueue { context, compute: Arc::clone(gpu.stream()), collectives })
    }
}

impl Queue for GpuQueue {
    type Marker = Event;

    fn device(&self) -> String {
        let identity = self.context.identity();
        // MIG instances of one GPU have one address.
        format!("{} ({})", identity.pci, identity.uuid)
    }

    fn stream(&self) -> *mut c_void {
        self.collectives.raw().0
    }

    fn enter(&self) -> Result<()> {
        self.context.enter()
    }

    fn after_compute(&self) -> Result<Event> {
        let computed = self.compute.record()?;
        self.collectives.wait_for(&computed)?;
        Ok(computed)
    }

    fn mark(&self) -> Result<Event> {
        self.collectives.record()
    }

    fn is_done(&self, marker: &Event) -> Result<bool> {
        marker.is_done()
    }

    fn compute_waits(&self, marker: &Event) -> Result<()> {
        self.compute.wait_for(marker)
    }

    fn stop(&self) {
        self.context.stop().set();
    }
}

impl<D: Device> Reachable for Cuda<D> {
    const DEVICE: bool = true;

    fn numbers<'a>(&self, view: ViewMut<'a>) -> Numbers<'a>
    where
        Self: 'a,
    {
        Numbers::Device { address: view.address(), len: view.len(), precision: view.precision() }
    }
}
