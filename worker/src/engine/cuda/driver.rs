//! The GPU behind CUDA's driver interface: [`Gpu`] is the engine's [`Device`]. Work is queued
//! on one stream and done in its order. Whoever waits here looks at [`Stop`] meanwhile: what
//! another rank's end has left unfinished on the GPU never keeps this process. Nothing here
//! knows what is computed.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::blas::Blas;
use super::device::{Arguments, Device, Gemm};
use super::start::StartError;
use super::sys::{self, Cuda};
use crate::dynamic::Library;
use crate::engine::{EngineError, Result};

/// One piece of the pinned memory through which the host's numbers go.
const PIECE: usize = 4 << 20;
/// Pieces for what is written.
const RING: usize = 4;
/// Where the next write begins in a piece: a multiple of it.
const ALIGN: usize = 256;
/// Dynamic shared memory that every kernel may have without asking: 48 KiB (CUDA Programming
/// Guide, "Technical Specifications per Compute Capability") are for it and the kernel's own
/// variables together, which have less than the rest.
const SHARED: u32 = 44 << 10;
/// What cublasLt may use; 32 MiB are advised for Hopper.
const WORKSPACE: usize = 64 << 20;
/// Shorter waits do without sleeping.
const SPIN: Duration = Duration::from_micros(50);
/// Sleeps between looks, from the first to the longest.
const SLEEP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(100));
/// How long memory that is dropped waits for the work on it; it is left to the process's end
/// then.
const DROP: Duration = Duration::from_secs(5);
/// What others have of a GPU's memory before they are to blame for too little of it: the
/// driver and the libraries take some hundred MiB, which count as others'.
const OTHERS: u64 = 3 << 30;

/// Told when the group is broken: whoever waits for the GPU then stops waiting.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Not set.
    #[must_use]
    pub fn new() -> Stop {
        Stop::default()
    }

    /// For good.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// An error of CUDA's: what it was about, CUDA's words, the GPU, and the cure where one is
/// known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError {
    /// CUresult.
    pub code: sys::Status,
    /// "CUDA_ERROR_ECC_UNCORRECTABLE".
    pub name: String,
    /// "uncorrectable ECC error encountered".
    pub text: String,
    /// What this process was at.
    pub doing: String,
    /// Which GPU; empty before there is one.
    pub gpu: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CudaError { code, name, text, doing, gpu } = self;
        if !gpu.is_empty() {
            write!(f, "{gpu}: ")?;
        }
        write!(f, "{doing} failed: {name} ({code}): {text}")?;
        if let Some(cure) = cure(*code) {
            write!(f, "; {cure}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CudaError {}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> EngineError {
        EngineError::Device(error.to_string())
    }
}

/// Whether it is the node's fault, so that the same may work on another node.
#[must_use]
pub fn is_hardware(code: sys::Status) -> bool {
    matches!(
        code,
        sys::DEVICE_UNAVAILABLE
            | sys::ECC_UNCORRECTABLE
            | sys::NVLINK_UNCORRECTABLE
            | sys::CONTAINED
            | sys::OPERATING_SYSTEM
            | sys::SYSTEM_NOT_READY
            | sys::SYSTEM_DRIVER_MISMATCH
            | sys::UNKNOWN
    )
}

/// What helps, for the errors that are seen most.
fn cure(code: sys::Status) -> Option<&'static str> {
    Some(match code {
        sys::STUB_LIBRARY => "this libcuda.so is one to link with; take the driver's, which comes with nvidia-smi",
        sys::OUT_OF_MEMORY => "another process has the GPU's memory: see nvidia-smi on the node",
        sys::DEVICE_UNAVAILABLE => "another process has the GPU to itself; see nvidia-smi for it and the compute mode",
        sys::NO_DEVICE => {
            "see nvidia-smi on the node, ask Slurm for GPUs (--gpus-per-node), or set train.device = \"cpu\""
        }
        sys::INVALID_DEVICE => "see CUDA_VISIBLE_DEVICES, and nvidia-smi -L on the node",
        sys::ECC_UNCORRECTABLE => "the GPU's memory is faulty: drain the node, and see nvidia-smi -q -d ECC",
        sys::NVLINK_UNCORRECTABLE => "a link between GPUs is faulty: drain the node, and see nvidia-smi nvlink -e",
        sys::CONTAINED => "the GPU's memory or a link of it is faulty: see the Xid lines of dmesg on the node",
        sys::UNSUPPORTED_PTX_VERSION => "the driver is older than NVRTC: install an older NVRTC or a newer driver",
        sys::INVALID_IMAGE | sys::NO_BINARY_FOR_GPU => "NVRTC and the driver do not fit: install ones of one CUDA",
        sys::ILLEGAL_ADDRESS | sys::LAUNCH_FAILED => {
            "a kernel went wrong, or the GPU did: see the Xid lines of dmesg on the node, and try another one"
        }
        sys::LAUNCH_TIMEOUT => "a display's watchdog ended a kernel: take a GPU without a display",
        sys::OPERATING_SYSTEM | sys::UNKNOWN => "see the Xid lines of dmesg and nvidia-smi on the node",
        sys::SYSTEM_NOT_READY => {
            "on nodes with NVSwitch the fabric manager is to run: systemctl status nvidia-fabricmanager"
        }
        sys::SYSTEM_DRIVER_MISMATCH => "the driver's module and libraries are of two versions: reboot the node",
        _ => return None,
    })
}

/// A status as a result.
pub(super) fn check(
    cuda: &Cuda,
    status: sys::Status,
    gpu: &str,
    doing: impl FnOnce() -> String,
) -> std::result::Result<(), CudaError> {
    if status == sys::SUCCESS {
        return Ok(());
    }
    let word = |function: unsafe extern "C" fn(sys::Status, *mut *const c_char) -> sys::Status, unknown: &str| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: gives a static string, or NULL for a number it does not know.
        let known = unsafe { function(status, &raw mut text) } == sys::SUCCESS && !text.is_null();
        // SAFETY: as above.
        if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { unknown.to_string() }
    };
    Err(CudaError {
        code: status,
        name: word(cuda.error_name, "an error without a name"),
        text: word(cuda.error_string, "the driver has no words for it"),
        doing: doing(),
        gpu: gpu.to_string(),
    })
}

/// Which GPU it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// As CUDA counts the visible ones.
    pub ordinal: u32,
    /// "NVIDIA H100 80GB HBM3".
    pub name: String,
    /// "GPU-…", as nvidia-smi -L has it.
    pub uuid: String,
    /// "0000:17:00.0".
    pub pci: String,
    /// Compute capability times ten.
    pub architecture: u32,
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes.
    pub memory: u64,
    /// The newest CUDA that the driver can do: 12040 for 12.4.
    pub driver: u32,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({}, {}, {})", self.ordinal, self.name, self.uuid, self.pci)
    }
}

/// A device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// In use, by anyone.
    pub used: u64,
    /// All of it.
    pub total: u64,
    /// This process's allocations, now.
    pub own: u64,
    /// The most they ever were.
    pub peak: u64,
}

/// A GPU that is ready, and the driver's functions: what streams, events and memory belong to.
pub struct Context {
    cuda: Cuda,
    raw: sys::Context,
    identity: Identity,
    text: String,
    stop: Stop,
    /// The GPU did not end what it does in the time that a drop waits.
    given_up: AtomicBool,
    own: AtomicU64,
    peak: AtomicU64,
    streams: Mutex<Vec<sys::Stream>>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// How many GPUs CUDA_VISIBLE_DEVICES shows.
///
/// # Errors
/// A driver that lacks a function, or cannot start; [`sys::NO_DEVICE`] where there is none.
pub fn count(library: &Library) -> std::result::Result<u32, StartError> {
    let cuda = Cuda::load(library)?;
    let call = |status, doing: &str| check(&cuda, status, "", || doing.to_string());
    // SAFETY: its only flag is 0.
    call(unsafe { (cuda.init)(0) }, &format!("starting CUDA with {}", library.path().display()))?;
    let mut count: c_int = 0;
    // SAFETY: given where to write its number.
    call(unsafe { (cuda.device_count)(&raw mut count) }, "counting the GPUs")?;
    Ok(u32::try_from(count).unwrap_or(0))
}

impl Context {
    /// Starts CUDA and takes the primary context of a GPU: `ordinal` counts those that
    /// CUDA_VISIBLE_DEVICES shows. It is the calling thread's then.
    ///
    /// # Errors
    /// A driver that lacks a function, no such GPU, one that does not work.
    pub fn open(library: &Library, ordinal: u32, stop: Stop) -> std::result::Result<Arc<Context>, StartError> {
        let cuda = Cuda::load(library)?;
        let call = |status, doing: &str| check(&cuda, status, "", || doing.to_string());
        // SAFETY: its only flag is 0.
        call(unsafe { (cuda.init)(0) }, &format!("starting CUDA with {}", library.path().display()))?;
        let (mut driver, mut count, mut device): (c_int, c_int, sys::Device) = (0, 0, 0);
        // SAFETY: each is given where to write its one number.
        unsafe {
            call((cuda.driver_version)(&raw mut driver), "asking the driver's version")?;
            call((cuda.device_count)(&raw mut count), "counting the GPUs")?;
        }
        let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        if wanted >= count {
            let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(value) => format!("CUDA_VISIBLE_DEVICES={value}"),
                Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_string(),
            };
            return Err(StartError::NoSuchGpu { ordinal, count: u32::try_from(count).unwrap_or(0), visible });
        }
        // SAFETY: as above.
        call(unsafe { (cuda.device_get)(&raw mut device, wanted) }, &format!("taking GPU {ordinal}"))?;
        let attribute = |which: c_int| {
            let mut value: c_int = 0;
            // SAFETY: as above.
            call(unsafe { (cuda.device_attribute)(&raw mut value, which, device) }, "asking what the GPU is")?;
            Ok::<u32, CudaError>(u32::try_from(value).unwrap_or(0))
        };
        let (mut name, mut pci, mut uuid) = ([0 as c_char; 128], [0 as c_char; 32], sys::Uuid::default());
        // SAFETY: each is given where to write and how much fits there.
        unsafe {
            call((cuda.device_name)(name.as_mut_ptr(), 128, device), "asking the GPU's name")?;
            call((cuda.device_pci_bus_id)(pci.as_mut_ptr(), 32, device), "asking where the GPU is")?;
            call((cuda.device_uuid)(&raw mut uuid, device), "asking the GPU's UUID")?;
        }
        let mut identity = Identity {
            ordinal,
            name: text_of(&name),
            uuid: uuid_text(uuid),
            pci: text_of(&pci).to_lowercase(),
            architecture: attribute(sys::ATTRIBUTE_MAJOR)? * 10 + attribute(sys::ATTRIBUTE_MINOR)?,
            processors: attribute(sys::ATTRIBUTE_PROCESSORS)?,
            memory: 0,
            driver: u32::try_from(driver).unwrap_or(0),
        };
        let text = identity.to_string();
        let call = |status, doing: &str| check(&cuda, status, &text, || doing.to_string());
        let mut raw = sys::Context::NULL;
        let (mut free, mut total) = (0_usize, 0_usize);
        // It is kept: giving it back waits for all work on it, which may never end.
        // SAFETY: as above, of a device that exists.
        unsafe {
            call((cuda.context_retain)(&raw mut raw, device), "taking the GPU's context")?;
            call((cuda.context_set)(raw), "taking the GPU's context")?;
            call((cuda.memory_info)(&raw mut free, &raw mut total), "asking for the GPU's memory")?;
        }
        identity.memory = total as u64;
        Ok(Arc::new(Context {
            cuda,
            raw,
            identity,
            text,
            stop,
            given_up: AtomicBool::new(false),
            own: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            streams: Mutex::new(Vec::new()),
        }))
    }

    /// Which GPU it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The flag that ends all waits.
    #[must_use]
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// CUDA's name of it.
    #[must_use]
    pub fn raw(&self) -> sys::Context {
        self.raw
    }

    /// Makes it the calling thread's context: CUDA's calls, and those of the libraries on
    /// it, are about that.
    ///
    /// # Errors
    /// The device's.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is kept for the process's life.
        self.check(unsafe { (self.cuda.context_set)(self.raw) }, || "taking the GPU's context".into())
    }

    /// A status as a result.
    pub(super) fn check(&self, status: sys::Status, doing: impl FnOnce() -> String) -> Result<()> {
        Ok(check(&self.cuda, status, &self.text, doing)?)
    }

    /// Memory, as the driver has it now.
    ///
    /// # Errors
    /// The device's.
    pub fn usage(&self) -> Result<Usage> {
        self.enter()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: given where to write its two numbers.
        let status = unsafe { (self.cuda.memory_info)(&raw mut free, &raw mut total) };
        self.check(status, || "asking for the GPU's memory".into())?;
        Ok(Usage {
            used: total.saturating_sub(free) as u64,
            total: total as u64,
            own: self.own.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
        })
    }

    /// Waits until `done` says true: looks at once, then ever more seldom, and each time at
    /// [`Stop`].
    fn wait(&self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        let (mut sleep, longest) = SLEEP;
        loop {
            if done()? {
                // What was aborted is over, too, and its numbers are none. The flag is set
                // before anything is aborted.
                return if self.stop.is_set() { Err(EngineError::Stopped) } else { Ok(()) };
            }
            if self.stop.is_set() {
                return Err(EngineError::Stopped);
            }
            if began.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(sleep);
                sleep = (sleep * 2).min(longest);
            }
        }
    }

    /// Whether `status`, of a query, says that the work is done.
    fn is_done(&self, status: sys::Status) -> Result<bool> {
        if status == sys::NOT_READY {
            return Ok(false);
        }
        self.check(status, || "waiting for the GPU's work".into())?;
        Ok(true)
    }

    /// Whether memory may be given back without the driver waiting for ever: all streams are
    /// done soon, and the group lives. Else the process is about to end, and with it all
    /// memory.
    fn may_free(&self) -> bool {
        let gone = self.stop.is_set() || self.given_up.load(Ordering::Relaxed);
        if gone || std::thread::panicking() || self.enter().is_err() {
            return false;
        }
        let began = Instant::now();
        let streams = lock(&self.streams).clone();
        let done = |stream| {
            // SAFETY: streams leave the list before they are destroyed.
            let done = self.is_done(unsafe { (self.cuda.stream_query)(stream) })?;
            if !done && began.elapsed() > DROP {
                // Once for all that is dropped.
                self.given_up.store(true, Ordering::Relaxed);
                return Err(EngineError::Stopped);
            }
            Ok(done)
        };
        streams.into_iter().all(|stream| self.wait(|| done(stream)).is_ok())
    }

    fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Memory> {
        self.enter()?;
        let size = bytes.max(1).next_multiple_of(ALIGN);
        let mut address: sys::Address = 0;
        // SAFETY: given where to write the address.
        let status = unsafe { (self.cuda.memory_allocate)(&raw mut address, size) };
        if status == sys::OUT_OF_MEMORY {
            return Err(self.out_of_memory(size as u64));
        }
        self.check(status, || format!("allocating {}", human(size as u64)))?;
        let own = self.own.fetch_add(size as u64, Ordering::Relaxed) + size as u64;
        self.peak.fetch_max(own, Ordering::Relaxed);
        Ok(Memory { context: self.clone(), address, bytes: size })
    }

    /// Says how much there is, and whose the rest is: too little because of another process
    /// is the node's fault, else the user's to cure.
    fn out_of_memory(&self, wanted: u64) -> EngineError {
        let usage = match self.usage() {
            Ok(usage) => usage,
            Err(error) => return error,
        };
        let free = usage.total.saturating_sub(usage.used);
        let others = usage.used.saturating_sub(usage.own);
        let text = format!(
            "{}: no memory for {} more: {} of {} are free, this process has {}",
            self.text,
            human(wanted),
            human(free),
            human(usage.total),
            human(usage.own)
        );
        if others >= OTHERS && wanted <= free.saturating_add(others - OTHERS) {
            let others = human(others);
            return EngineError::Device(format!(
                "{text}; another process has up to {others}: see nvidia-smi on the node"
            ));
        }
        EngineError::Wrong(format!("{text}; take more GPUs, a smaller micro-batch or shorter sequences"))
    }
}

/// Device memory, given back when dropped, unless work on it may never end.
pub struct Memory {
    context: Arc<Context>,
    address: sys::Address,
    bytes: usize,
}

impl Memory {
    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} at {:#x})", human(self.bytes as u64), self.address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.context.own.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        if self.context.may_free() {
            // An error here is one of earlier work, which the next call tells.
            // SAFETY: allocated by the driver, not yet freed, and no work is left on it.
            let _ = unsafe { (self.context.cuda.memory_free)(self.address) };
        }
    }
}

/// Pinned memory of the host, which the GPU reads and writes by itself.
struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
}

// SAFETY: plain memory that one owner at a time uses.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned> {
        context.enter()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: given where to write the address; no flags.
        let status = unsafe { (context.cuda.host_allocate)(&raw mut start, bytes, 0) };
        let doing = || format!("allocating {} of pinned memory on the host", human(bytes as u64));
        context.check(status, doing)?;
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Pinned { context: context.clone(), start }),
            None => Err(EngineError::Device(format!("{}: {} gave no address", context.text, doing()))),
        }
    }

    /// `offset` bytes after its start.
    fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.may_free() {
            // SAFETY: allocated by the driver, not yet freed, and no work is left on it.
            let _ = unsafe { (self.context.cuda.host_free)(self.start.as_ptr().cast()) };
        }
    }
}

/// Work that is done in its order.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::Stream,
}

impl Stream {
    /// One that waits for no other.
    ///
    /// # Errors
    /// The device's.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        context.enter()?;
        let mut raw = sys::Stream::NULL;
        // SAFETY: given where to write the stream.
        let status = unsafe { (context.cuda.stream_create)(&raw mut raw, sys::STREAM_NON_BLOCKING) };
        context.check(status, || "making a stream".into())?;
        lock(&context.streams).push(raw);
        Ok(Stream { context: context.clone(), raw })
    }

    /// CUDA's name of it, which is also the runtime's cudaStream_t.
    #[must_use]
    pub fn raw(&self) -> sys::Stream {
        self.raw
    }

    /// An event that happens when all work so far is done.
    ///
    /// # Errors
    /// The device's.
    pub fn record(&self) -> Result<Event> {
        let context = &self.context;
        context.enter()?;
        let mut raw = sys::Event::NULL;
        // SAFETY: given where to write the event.
        let status = unsafe { (context.cuda.event_create)(&raw mut raw, sys::EVENT_DISABLE_TIMING) };
        context.check(status, || "making an event".into())?;
        let event = Event { context: context.clone(), raw };
        // SAFETY: both exist.
        context.check(unsafe { (context.cuda.event_record)(raw, self.raw) }, || "recording an event".into())?;
        Ok(event)
    }

    /// Work that is queued from here on begins after the event, which may be another stream's.
    ///
    /// # Errors
    /// The device's.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.context.enter()?;
        // SAFETY: both exist; the only flag is 0. The event may be destroyed before it happens.
        let status = unsafe { (self.context.cuda.stream_wait_event)(self.raw, event.raw, 0) };
        self.context.check(status, || "letting a stream wait for another".into())
    }

    /// Whether all work so far is done.
    ///
    /// # Errors
    /// The device's.
    pub fn is_done(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: it exists.
        self.context.is_done(unsafe { (self.context.cuda.stream_query)(self.raw) })
    }

    /// Waits for all work so far.
    ///
    /// # Errors
    /// The device's; [`EngineError::Stopped`].
    pub fn finish(&self) -> Result<()> {
        self.context.wait(|| self.is_done())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        lock(&self.context.streams).retain(|stream| *stream != self.raw);
        if self.context.enter().is_ok() {
            // Returns at once: what is queued on it is still done.
            // SAFETY: made by the driver, not yet destroyed.
            let _ = unsafe { (self.context.cuda.stream_destroy)(self.raw) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::Event,
}

impl Event {
    /// Whether the work before it is done.
    ///
    /// # Errors
    /// The device's.
    pub fn is_done(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: it exists.
        self.context.is_done(unsafe { (self.context.cuda.event_query)(self.raw) })
    }

    /// Waits for the work before it.
    ///
    /// # Errors
    /// The device's; [`EngineError::Stopped`].
    pub fn finish(&self) -> Result<()> {
        self.context.wait(|| self.is_done())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // Returns at once, also before it has happened.
            // SAFETY: made by the driver, not yet destroyed.
            let _ = unsafe { (self.context.cuda.event_destroy)(self.raw) };
        }
    }
}

/// Pinned pieces that are filled one after the other. Many small writes share a piece.
struct Ring {
    pieces: Vec<Pinned>,
    /// What happens when the GPU has read a piece; none while it is not full or was not used.
    read: Vec<Option<Event>>,
    /// The piece that is being filled.
    at: usize,
    /// Where it is free.
    free: usize,
}

/// A kernel, and how much dynamic shared memory was asked for.
struct Kernel {
    function: sys::Function,
    shared: AtomicU32,
}

/// A GPU with its kernels: the [`Device`].
pub struct Gpu {
    context: Arc<Context>,
    stream: Arc<Stream>,
    kernels: HashMap<&'static str, Kernel>,
    blas: Blas,
    workspace: Memory,
    ring: Mutex<Ring>,
    back: Mutex<[Pinned; 2]>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("identity", &self.context.identity).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Loads the kernels of these names from `image`, a cubin or NUL-terminated PTX, and gets
    /// what it needs to work: about 100 MiB on the device, 24 MiB pinned on the host.
    ///
    /// # Errors
    /// An image that does not fit the GPU or the driver, a kernel that it lacks, no memory.
    pub fn new(
        context: Arc<Context>,
        image: &[u8],
        names: &[&'static str],
        cublaslt: &Library,
    ) -> std::result::Result<Gpu, StartError> {
        context.enter()?;
        let cuda = &context.cuda;
        let mut module = sys::Module::NULL;
        // SAFETY: an image of one of the kinds that the driver knows by its first bytes, of
        // which each says where it ends. It stays loaded.
        let status = unsafe { (cuda.module_load)(&raw mut module, image.as_ptr().cast()) };
        check(cuda, status, &context.text, || "loading the kernels".into())?;
        let mut kernels = HashMap::with_capacity(names.len());
        for name in names {
            let c_name = CString::new(*name).unwrap_or_default();
            let mut function = sys::Function::NULL;
            // This also brings the kernel's code to the GPU (CUDA Programming Guide, "Lazy
            // Loading"), which later could wait for what runs there.
            // SAFETY: the module is loaded, the name NUL-terminated.
            let status = unsafe { (cuda.module_function)(&raw mut function, module, c_name.as_ptr()) };
            check(cuda, status, &context.text, || format!("looking for the kernel {name}"))?;
            kernels.insert(*name, Kernel { function, shared: AtomicU32::new(SHARED) });
        }
        let blas = Blas::new(cublaslt)?;
        let stream = Arc::new(Stream::new(&context)?);
        let pieces = (0..RING).map(|_| Pinned::new(&context, PIECE)).collect::<Result<Vec<_>>>()?;
        let ring = Ring { read: pieces.iter().map(|_| None).collect(), pieces, at: 0, free: 0 };
        let back = [Pinned::new(&context, PIECE)?, Pinned::new(&context, PIECE)?];
        let workspace = context.allocate(WORKSPACE)?;
        Ok(Gpu { stream, kernels, blas, workspace, ring: Mutex::new(ring), back: Mutex::new(back), context })
    }

    /// The stream on which all is done.
    #[must_use]
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The GPU, for other streams on it.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Bytes of device memory.
    ///
    /// # Errors
    /// The device's.
    pub fn usage(&self) -> Result<Usage> {
        self.context.usage()
    }

    /// Queues a copy of at most what is left of the ring's piece; says how much that was.
    fn write_some(&self, ring: &mut Ring, to: u64, from: &[u8]) -> Result<usize> {
        if ring.free >= PIECE {
            let next = (ring.at + 1) % ring.pieces.len();
            ring.read[ring.at] = Some(self.stream.record()?);
            if let Some(event) = &ring.read[next] {
                event.finish()?;
            }
            ring.read[next] = None;
            (ring.at, ring.free) = (next, 0);
        }
        let bytes = from.len().min(PIECE - ring.free);
        let host = ring.pieces[ring.at].at(ring.free);
        // SAFETY: within the piece, of which the GPU has read what was there before; `from`
        // is no pinned memory of ours.
        let status = unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), host, bytes);
            (self.context.cuda.copy_to_device)(to, host.cast(), bytes, self.stream.raw)
        };
        self.context.check(status, || format!("copying {} to the GPU", human(bytes as u64)))?;
        ring.free = (ring.free + bytes).next_multiple_of(ALIGN);
        Ok(bytes)
    }
}

impl Device for Gpu {
    type Memory = Memory;

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        let memory = self.context.allocate(bytes)?;
        self.set(memory.address, memory.bytes, 0)?;
        Ok(memory)
    }

    fn address(memory: &Memory) -> u64 {
        memory.address
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        self.context.enter()?;
        let ring = &mut *lock(&self.ring);
        let mut done = 0;
        while done < from.len() {
            done += self.write_some(ring, to + done as u64, &from[done..])?;
        }
        Ok(())
    }

    fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.context.enter()?;
        // Through pinned memory: a copy to other memory waits inside the driver, where
        // nothing looks at `Stop`.
        let back = lock(&self.back);
        let mut before: Option<(usize, std::ops::Range<usize>, Event)> = None;
        let mut begun = 0;
        while begun < to.len() || before.is_some() {
            let mut next = None;
            if begun < to.len() {
                let range = begun..to.len().min(begun + PIECE);
                let half = (begun / PIECE) % 2;
                // SAFETY: the piece is at least that long, and its earlier numbers are taken:
                // they were so before the copy between this one and that was waited for.
                let status = unsafe {
                    let host = back[half].at(0).cast();
                    (self.context.cuda.copy_to_host)(host, from + begun as u64, range.len(), self.stream.raw)
                };
                self.context.check(status, || format!("copying {} from the GPU", human(range.len() as u64)))?;
                begun = range.end;
                next = Some((half, range, self.stream.record()?));
            }
            if let Some((half, range, event)) = before.take() {
                event.finish()?;
                // SAFETY: the GPU has written that much there, and writes no more.
                let there = unsafe { std::slice::from_raw_parts(back[half].at(0), range.len()) };
                to[range].copy_from_slice(there);
            }
            before = next;
        }
        Ok(())
    }

    fn set(&self, to: u64, bytes: usize, value: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller's memory on the device; a wrong address is the GPU's error.
        let status = unsafe { (self.context.cuda.set_bytes)(to, value, bytes, self.stream.raw) };
        self.context.check(status, || format!("setting {} on the GPU", human(bytes as u64)))
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: as above.
        let status = unsafe { (self.context.cuda.copy_on_device)(to, from, bytes, self.stream.raw) };
        self.context.check(status, || format!("copying {} on the GPU", human(bytes as u64)))
    }

    fn launch(&self, name: &'static str, grid: [u32; 3], block: u32, shared: u32, arguments: &Arguments) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        self.context.enter()?;
        let Some(kernel) = self.kernels.get(name) else {
            panic!("{name} is not among the names of the kernels");
        };
        let cuda = &self.context.cuda;
        if shared > kernel.shared.load(Ordering::Relaxed) {
            let bytes = c_int::try_from(shared).unwrap_or(c_int::MAX);
            // SAFETY: a function of the loaded module.
            let status = unsafe { (cuda.function_set)(kernel.function, sys::FUNCTION_DYNAMIC_SHARED, bytes) };
            self.context.check(status, || format!("asking for {shared} bytes of shared memory for {name}"))?;
            kernel.shared.store(shared, Ordering::Relaxed);
        }
        let mut addresses = arguments.addresses();
        let [x, y, z] = grid;
        // SAFETY: a function of the loaded module; the driver reads as many arguments as the
        // kernel has, from eight bytes each, before it returns.
        let status = unsafe {
            let none = std::ptr::null_mut();
            let stream = self.stream.raw;
            (cuda.launch)(kernel.function, x, y, z, block, 1, 1, shared, stream, addresses.as_mut_ptr(), none)
        };
        self.context.check(status, || format!("starting {name} on {x} x {y} x {z} blocks of {block}"))
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        let how = gemm.how;
        if how.m == 0 || how.n == 0 {
            return Ok(());
        }
        if how.k == 0 {
            let bytes = how.m * how.n * gemm.c_precision.bytes();
            return if how.accumulate { Ok(()) } else { self.set(gemm.c, bytes, 0) };
        }
        self.context.enter()?;
        self.blas
            .matmul(gemm, self.stream.raw, self.workspace.address, self.workspace.bytes)
            .map_err(|why| EngineError::Device(format!("{}: {why}", self.context.text)))
    }

    fn finish(&self) -> Result<()> {
        self.stream.finish()
    }

    fn memory_in_use(&self) -> Option<u64> {
        self.usage().ok().map(|usage| usage.used)
    }

    fn architecture(&self) -> u32 {
        self.context.identity.architecture
    }

    fn processors(&self) -> u32 {
        self.context.identity.processors
    }
}

/// What is behind a lock, also after another thread's panic: all are plain lists.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// "1.5 GiB".
fn human(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}

/// What the driver wrote up to a NUL.
fn text_of(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// As nvidia-smi writes it.
fn uuid_text(uuid: sys::Uuid) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.0.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
