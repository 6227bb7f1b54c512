//! From files to a GPU that is ready: opens the libraries, checks that they fit each other
//! and the GPU, compiles and loads the kernels. Where the files are is found elsewhere.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::driver::{self, Context, CudaError, Gpu, Stop, is_hardware};
use super::kernels;
use super::nvrtc::{Cache, CompileError, Compiler, Target};
use super::sys::{self, BlasLt};
use crate::dynamic::{Library, LibraryError};
use crate::engine::EngineError;

/// The kernels copy to shared memory asynchronously and multiply bf16 matrices as GPUs since
/// Ampere do.
const OLDEST: u32 = 80;

/// The libraries' files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// libcuda.so.1, of the driver.
    pub driver: PathBuf,
    /// libnvrtc.so.
    pub nvrtc: PathBuf,
    /// libnvrtc-builtins.so of the same version, which NVRTC else looks for by its name.
    pub nvrtc_builtins: Option<PathBuf>,
    /// libcublasLt.so.
    pub cublaslt: PathBuf,
}

/// Why there is no GPU to train on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A library is not what it should be.
    #[error("{0}")]
    Library(#[from] LibraryError),
    /// CUDA's.
    #[error("{0}")]
    Cuda(#[from] CudaError),
    /// Fewer GPUs than ranks on this node.
    #[error(
        "there is no GPU {ordinal} for this rank: the node shows {count} ({visible}); \
         start one rank per GPU (--ntasks-per-node = --gpus-per-node)"
    )]
    NoSuchGpu {
        /// That was wanted, from 0.
        ordinal: u32,
        /// That there are.
        count: u32,
        /// What CUDA_VISIBLE_DEVICES is.
        visible: String,
    },
    /// No kernels for it.
    #[error(
        "{gpu} has compute capability {}.{}: the kernels need 8.0 (Ampere) or newer; \
         take another GPU, or set train.device = \"cpu\"",
        .architecture / 10, .architecture % 10
    )]
    OldGpu {
        /// Which.
        gpu: String,
        /// Times ten.
        architecture: u32,
    },
    /// The driver cannot run what a library makes for it.
    #[error(
        "the driver is for CUDA {}, {path} is of CUDA {}.{}: {why}; install a driver for CUDA {}.{} or newer, \
         or the library of CUDA {}",
        version(*.driver), .library.0, .library.1, .library.0, .library.1, version(*.driver)
    )]
    OldDriver {
        /// 12040 for 12.4.
        driver: u32,
        /// The library.
        path: PathBuf,
        /// Its CUDA.
        library: (u32, u32),
        /// Which rule it breaks.
        why: &'static str,
    },
    /// The kernels do not compile.
    #[error("{0}")]
    Compile(#[from] CompileError),
    /// cublasLt does not start.
    #[error("{0}")]
    Blas(String),
    /// The device's.
    #[error("{0}")]
    Engine(#[from] EngineError),
}

impl StartError {
    /// Whether the same may work on another node, or later: the GPU's fault, not the user's.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            // Nothing is allocated by then: the memory is other processes'.
            StartError::Cuda(error) => is_hardware(error.code) || error.code == sys::OUT_OF_MEMORY,
            StartError::Engine(error) => !matches!(error, EngineError::Wrong(_)),
            _ => false,
        }
    }
}

/// "12.4" of 12040.
fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Whether the driver whose library this is shows a GPU.
///
/// # Errors
/// See [`StartError`]: a driver that does not work.
pub fn shows_a_gpu(driver: &Path) -> Result<bool, StartError> {
    match driver::count(&Library::open(driver)?) {
        Ok(count) => Ok(count > 0),
        Err(StartError::Cuda(error)) if error.code == sys::NO_DEVICE => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes GPU `ordinal` of those that CUDA_VISIBLE_DEVICES shows, and makes it ready.
///
/// # Errors
/// See [`StartError`]: each is about one file or one GPU, which it names.
pub fn start(places: &Places, ordinal: u32, stop: Stop) -> Result<Gpu, StartError> {
    start_with(places, ordinal, stop, &Cache::from_environment())
}

/// As [`start`], with compiled kernels kept elsewhere.
///
/// # Errors
/// As above.
pub fn start_with(places: &Places, ordinal: u32, stop: Stop, cache: &Cache) -> Result<Gpu, StartError> {
    let driver = Library::open(&places.driver)?;
    let context = Context::open(&driver, ordinal, stop)?;
    let (gpu, architecture, newest) = {
        let identity = context.identity();
        (identity.to_string(), identity.architecture, identity.driver)
    };
    if architecture < OLDEST {
        return Err(StartError::OldGpu { gpu, architecture });
    }
    if let Some(builtins) = &places.nvrtc_builtins {
        // NVRTC finds it by its name then.
        Library::open(builtins)?;
    }
    let compiler = Compiler::new(&Library::open(&places.nvrtc)?)?;
    let target = compiler.target(architecture)?;
    fits(newest, compiler.version(), target)
        .map_err(|why| old_driver(newest, places.nvrtc.clone(), compiler.version(), why))?;
    let cublaslt = Library::open(&places.cublaslt)?;
    let cuda = cuda_of(&cublaslt)?;
    // As code of this CUDA's own: whatever it has for the GPU inside.
    fits(newest, cuda, Target::Cubin(architecture))
        .map_err(|why| old_driver(newest, places.cublaslt.clone(), cuda, why))?;
    let image = compiler.compile(&kernels::source(), target, &[], cache)?;
    Gpu::new(Arc::clone(&context), &image.bytes, &kernels::names(), &cublaslt)
}

fn old_driver(driver: u32, path: PathBuf, library: (u32, u32), why: &'static str) -> StartError {
    StartError::OldDriver { driver, path, library, why }
}

/// The CUDA that cublasLt was built for.
fn cuda_of(library: &Library) -> Result<(u32, u32), StartError> {
    let table = BlasLt::load(library)?;
    // SAFETY: reads nothing.
    let number = u32::try_from(unsafe { (table.cuda_version)() }).unwrap_or(0);
    Ok((number / 1000, number % 1000 / 10))
}

/// Whether a driver for CUDA `driver` (12040 for 12.4) runs what a library of CUDA `library`
/// makes. Machine code runs on every driver of the same major version and on later ones
/// (CUDA's minor version compatibility), PTX only on a driver that is at least as new.
///
/// # Errors
/// The rule.
pub fn fits(driver: u32, library: (u32, u32), target: Target) -> Result<(), &'static str> {
    let (major, minor) = (driver / 1000, driver % 1000 / 10);
    match target {
        Target::Cubin(_) if major < library.0 => Err("a library of a later major version needs a newer driver"),
        Target::Ptx(_) if (major, minor) < library => {
            Err("the GPU is newer than the library, whose PTX needs a driver at least as new")
        }
        _ => Ok(()),
    }
}
