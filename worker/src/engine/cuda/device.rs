//! What the engine needs of a device: memory, kernels, matrix products. The driver's is
//! `driver::Gpu`; tests have one that runs the same kernels on the processor. Nothing here
//! knows what is computed.

use std::fmt::Debug;

use crate::engine::{Precision, Result};

/// A device, and one stream of work on it: what is told is done in the order of the calls.
pub trait Device {
    /// Memory of the device, freed when dropped.
    type Memory: Debug;

    /// `bytes` of memory, at least, all zero, whose address is a multiple of 256.
    ///
    /// # Errors
    /// [`crate::engine::EngineError::Wrong`], with the size, where there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory>;
    /// Where it begins.
    fn address(memory: &Self::Memory) -> u64;
    /// Copies from the host, whose memory may be used again at once.
    ///
    /// # Errors
    /// The device's, also of earlier work; as for all that follow.
    fn write(&self, to: u64, from: &[u8]) -> Result<()>;
    /// Copies to the host, when all work so far is done.
    ///
    /// # Errors
    /// The device's.
    fn read(&self, from: u64, to: &mut [u8]) -> Result<()>;
    /// Sets bytes.
    ///
    /// # Errors
    /// The device's.
    fn set(&self, to: u64, bytes: usize, value: u8) -> Result<()>;
    /// Copies within the device; the two do not overlap.
    ///
    /// # Errors
    /// The device's.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;
    /// Runs the kernel of this name, one of [`super::kernels::names`], with `shared` bytes of
    /// dynamic shared memory (more than 48 KiB is asked for by the device itself).
    ///
    /// # Errors
    /// The device's.
    fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        arguments: &Arguments,
    ) -> Result<()>;
    /// See [`Gemm`].
    ///
    /// # Errors
    /// The device's.
    fn gemm(&self, gemm: &Gemm) -> Result<()>;
    /// Waits for all work so far.
    ///
    /// # Errors
    /// The device's.
    fn finish(&self) -> Result<()>;
    /// Bytes of its memory that are in use, by whomever; `None` where it does not say.
    fn memory_in_use(&self) -> Option<u64>;
    /// Compute capability times ten: 90 for Hopper.
    fn architecture(&self) -> u32;
    /// Multiprocessors, for kernels whose grid follows the device.
    fn processors(&self) -> u32;
}

/// A kernel's arguments, in order, each in eight bytes of its own.
#[derive(Debug, Clone, Default)]
pub struct Arguments(Vec<u64>);

impl Arguments {
    /// None yet.
    #[must_use]
    pub fn new() -> Arguments {
        Arguments::default()
    }

    /// A pointer to device memory.
    #[must_use]
    pub fn pointer(mut self, address: u64) -> Arguments {
        self.0.push(address);
        self
    }

    /// An `int`.
    #[must_use]
    pub fn int(mut self, value: i32) -> Arguments {
        self.0.push(u64::from(value.cast_unsigned()));
        self
    }

    /// A `long long`.
    #[must_use]
    pub fn long(mut self, value: i64) -> Arguments {
        self.0.push(value.cast_unsigned());
        self
    }

    /// A `float`.
    #[must_use]
    pub fn float(mut self, value: f32) -> Arguments {
        self.0.push(u64::from(value.to_bits()));
        self
    }

    /// Where each lies, as cuLaunchKernel wants it.
    pub fn addresses(&self) -> Vec<*mut std::ffi::c_void> {
        self.0.iter().map(|slot| std::ptr::from_ref(slot).cast_mut().cast()).collect()
    }
}

/// C = alpha · A · B, or C += alpha · A · B, row-major as [`crate::engine::Matmul`] has it;
/// summed in f32. Both factors are of one precision, C of that or F32.
#[derive(Debug, Clone, Copy)]
pub struct Gemm {
    /// See [`crate::engine::Matmul`].
    pub how: crate::engine::Matmul,
    /// Addresses.
    pub c: u64,
    /// C's numbers.
    pub c_precision: Precision,
    /// Address.
    pub a: u64,
    /// Address.
    pub b: u64,
    /// The factors' numbers.
    pub precision: Precision,
}
