//! The engine on a GPU: kernels of our own, compiled at start, and CUDA's libraries, which
//! are loaded at run time; a program without them still trains on the processor.
//!
//! [`Cuda`] is the engine on any [`Device`]: the driver's, or a test's that runs the same
//! kernels on the processor. Here are its numbers: buffers, views, token ids, sums; what is
//! computed with them is in `ops`, by which kernel in `kernels/`.

pub mod attention;
pub mod blas;
pub mod device;
pub mod driver;
pub mod kernels;
pub mod libraries;
pub mod nvrtc;
mod ops;
pub mod start;
pub mod sys;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::rc::{Rc, Weak};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use zerocopy::IntoBytes;

use self::device::Device;
use super::{Precision, Result};

/// The engine on a device, computing in one precision.
pub struct Cuda<D: Device> {
    device: D,
    precision: Precision,
    scratch: RefCell<Scratch<D>>,
    /// Token ids' memory that is free again.
    pool: Rc<Pool<D>>,
}

type Pool<D> = RefCell<Vec<(<D as Device>::Memory, usize)>>;

/// What operations need beside their operands. Memory that became too small is kept: to give
/// it back waits for the device.
struct Scratch<D: Device> {
    kept: Vec<D::Memory>,
    bytes: usize,
}

impl<D: Device> Cuda<D> {
    /// Computes in `precision`; what the engine keeps is F32 in any case.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: D, precision: Precision) -> Result<Cuda<D>> {
        let scratch = RefCell::new(Scratch { kept: Vec::new(), bytes: 0 });
        Ok(Cuda { device, precision, scratch, pool: Rc::default() })
    }

    /// Where it computes.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// What it computes in.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The address of at least so many bytes that hold anything, until this is asked again.
    fn scratch(&self, bytes: usize) -> Result<u64> {
        let mut scratch = self.scratch.borrow_mut();
        if scratch.kept.is_empty() || scratch.bytes < bytes {
            // Twice as much as is asked for grows seldom.
            let more = (2 * bytes).max(1 << 20);
            let memory = self.device.allocate(more)?;
            scratch.kept.push(memory);
            scratch.bytes = more;
        }
        Ok(scratch.kept.last().map_or(0, D::address))
    }

    /// Copies numbers from the host, rounded where they are stored shorter.
    fn to_device(&self, to: &ViewMut<'_>, from: &[f32]) -> Result<()> {
        assert_eq!(to.len, from.len());
        match to.precision {
            Precision::F32 => self.device.write(to.address, from.as_bytes()),
            Precision::Bf16 => {
                let mut short = vec![bf16::ZERO; PIECE.min(from.len())];
                for (index, piece) in from.chunks(PIECE).enumerate() {
                    let short = &mut short[..piece.len()];
                    short.convert_from_f32_slice(piece);
                    self.device.write(to.address + (index * PIECE * 2) as u64, short.as_bytes())?;
                }
                Ok(())
            }
        }
    }

    /// Copies numbers to the host, as f32.
    fn to_host(&self, from: View<'_>, to: &mut [f32]) -> Result<()> {
        assert_eq!(from.len, to.len());
        match from.precision {
            Precision::F32 => self.device.read(from.address, to.as_mut_bytes()),
            Precision::Bf16 => {
                let mut short = vec![bf16::ZERO; PIECE.min(to.len())];
                for (index, piece) in to.chunks_mut(PIECE).enumerate() {
                    let short = &mut short[..piece.len()];
                    self.device.read(from.address + (index * PIECE * 2) as u64, short.as_mut_bytes())?;
                    short.convert_to_f32_slice(piece);
                }
                Ok(())
            }
        }
    }
}

/// Numbers that are converted at once.
const PIECE: usize = 1 << 20;

/// Numbers on the device.
#[derive(Debug)]
pub struct Buffer<D: Device> {
    /// None of an empty one.
    memory: Option<D::Memory>,
    len: usize,
    precision: Precision,
}

impl<D: Device> Buffer<D> {
    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, D::address)
    }
}

/// A part of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    address: u64,
    len: usize,
    precision: Precision,
    buffer: PhantomData<&'a ()>,
}

/// A part of a buffer, to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    address: u64,
    len: usize,
    precision: Precision,
    buffer: PhantomData<&'a mut ()>,
}

macro_rules! view {
    ($name:ident) => {
        impl $name<'_> {
            /// Where it begins.
            #[must_use]
            pub fn address(&self) -> u64 {
                self.address
            }

            /// How many numbers there are.
            #[must_use]
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// How they are stored.
            #[must_use]
            pub fn precision(&self) -> Precision {
                self.precision
            }

            /// Where a part of it begins.
            fn at(&self, range: &Range<usize>) -> u64 {
                assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} numbers", self.len);
                self.address + (range.start * self.precision.bytes()) as u64
            }
        }
    };
}
view!(View);
view!(ViewMut);

impl<'a> ViewMut<'a> {
    fn read(&self) -> View<'a> {
        View { address: self.address, len: self.len, precision: self.precision, buffer: PhantomData }
    }
}

/// Token ids on the device, and on the host, where they are compared with the vocabulary.
pub struct Tokens<D: Device> {
    memory: Option<(D::Memory, usize)>,
    ids: Vec<u32>,
    home: Weak<Pool<D>>,
}

impl<D: Device> Tokens<D> {
    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |(memory, _)| D::address(memory))
    }
}

impl<D: Device> Drop for Tokens<D> {
    /// The next ids come after whatever still reads these: it is one stream.
    fn drop(&mut self) {
        if let (Some(home), Some(memory)) = (self.home.upgrade(), self.memory.take()) {
            home.borrow_mut().push(memory);
        }
    }
}

/// An f64 on the device.
#[derive(Debug)]
pub struct Sum<D: Device>(D::Memory);
