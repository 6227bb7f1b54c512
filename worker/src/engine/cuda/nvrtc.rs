//! Compiles the kernels for the GPU at hand with NVRTC, and keeps what came out for the next
//! start. A cache that cannot be read, trusted or written costs the time of compiling, never
//! a training.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use hmac_sha256::Hash;

use super::sys;
use crate::dynamic::{Library, LibraryError};

/// First bytes of a file of the cache; the number goes up with the format.
const MAGIC: &[u8] = b"palingenesis kernels 1\n";
/// No kernels are larger.
const LARGEST: u64 = 256 << 20;
/// Lines of the compiler's words in an error.
const LINES: usize = 12;

/// What the driver loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code for this architecture, compute capability times ten.
    Cubin(u32),
    /// PTX, which the driver compiles further: for a GPU that is newer than NVRTC.
    Ptx(u32),
}

impl Target {
    /// The best that a compiler for `known` architectures can do for a GPU of
    /// `architecture`: its own code; else code of the same major version, which runs on all
    /// later minor ones; else PTX of the newest before it, which runs on all later.
    #[must_use]
    pub fn best(known: &[u32], architecture: u32) -> Option<Target> {
        let before = |same_major: bool| {
            let fits = |one: &&u32| **one <= architecture && (!same_major || **one / 10 == architecture / 10);
            known.iter().filter(fits).max().copied()
        };
        before(true).map(Target::Cubin).or_else(|| before(false).map(Target::Ptx))
    }

    /// NVRTC's option.
    fn option(self) -> String {
        match self {
            Target::Cubin(architecture) => format!("--gpu-architecture=sm_{architecture}"),
            Target::Ptx(architecture) => format!("--gpu-architecture=compute_{architecture}"),
        }
    }
}

/// Why kernels were not compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC is too old even for PTX.
    #[error(
        "NVRTC {version}, {path}, cannot compile for a GPU of compute capability {}.{}; install {} one",
        .architecture / 10, .architecture % 10, if *.newer { "a newer" } else { "an older" }
    )]
    Unknown {
        /// NVRTC's version.
        version: String,
        /// The library.
        path: PathBuf,
        /// The GPU's, times ten.
        architecture: u32,
        /// Whether the GPU is newer than all that NVRTC knows.
        newer: bool,
    },
    /// The compiler's words.
    #[error("NVRTC {version}, {path}, failed to compile the kernels with {options}: {why}\n{log}")]
    Failed {
        /// NVRTC's version.
        version: String,
        /// The library.
        path: PathBuf,
        /// The options.
        options: String,
        /// "NVRTC_ERROR_COMPILATION".
        why: String,
        /// The first lines of its log.
        log: String,
    },
}

/// Compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// What the driver loads; PTX ends with a NUL.
    pub bytes: Vec<u8>,
    /// What it is.
    pub target: Target,
    /// Whether the cache had it.
    pub cached: bool,
    /// The compiler's words, which may be none; none of a cached one.
    pub log: String,
}

/// NVRTC.
#[derive(Debug, Clone)]
pub struct Compiler {
    table: sys::Nvrtc,
    path: PathBuf,
    version: (u32, u32),
    known: Vec<u32>,
}

impl Compiler {
    /// Finds its functions and asks what it can do.
    ///
    /// # Errors
    /// A library that is none.
    pub fn new(library: &Library) -> Result<Compiler, LibraryError> {
        let table = sys::Nvrtc::load(library)?;
        let (mut major, mut minor, mut count): (c_int, c_int, c_int) = (0, 0, 0);
        // SAFETY: each is given where to write its numbers. They fail on NULL only.
        let known = unsafe {
            let _ = (table.version)(&raw mut major, &raw mut minor);
            let _ = (table.architecture_count)(&raw mut count);
            let mut known: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
            let _ = (table.architectures)(known.as_mut_ptr());
            known
        };
        let number = |value: c_int| u32::try_from(value).unwrap_or(0);
        Ok(Compiler {
            table,
            path: library.path().to_path_buf(),
            version: (number(major), number(minor)),
            known: known.into_iter().map(number).collect(),
        })
    }

    /// CUDA's version that it is of: (13, 0).
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The architectures it compiles for.
    #[must_use]
    pub fn known(&self) -> &[u32] {
        &self.known
    }

    /// What is made for a GPU of `architecture`.
    ///
    /// # Errors
    /// [`CompileError::Unknown`].
    pub fn target(&self, architecture: u32) -> Result<Target, CompileError> {
        Target::best(&self.known, architecture).ok_or_else(|| CompileError::Unknown {
            version: self.version_text(),
            path: self.path.clone(),
            architecture,
            newer: self.known.iter().all(|one| *one < architecture),
        })
    }

    /// Compiles `source` for `target`, or takes it from the cache, where all that decides
    /// the result is the same: the text, the options and NVRTC's version. `more` are options
    /// beside those that all have.
    ///
    /// # Errors
    /// [`CompileError::Failed`].
    pub fn compile(&self, source: &str, target: Target, more: &[&str], cache: &Cache) -> Result<Image, CompileError> {
        // All functions are the device's. No fast mathematics: a kernel asks for it by name.
        let mut options = vec![target.option(), "--std=c++17".into(), "-default-device".into()];
        options.extend(more.iter().map(ToString::to_string));
        let options = options.join(" ");
        let key = self.key(source, &options);
        if let Some(bytes) = cache.read(&key) {
            return Ok(Image { bytes, target, cached: true, log: String::new() });
        }
        let image = self.run(source, target, &options)?;
        cache.write(&key, &image.bytes);
        Ok(image)
    }

    fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The name in the cache.
    fn key(&self, source: &str, options: &str) -> String {
        let mut hash = Hash::new();
        // Its size tells builds of one version apart.
        let size = fs::metadata(&self.path).map_or(0, |file| file.len());
        for part in [&format!("{} {size}", self.version_text()), options, source] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn run(&self, source: &str, target: Target, options: &str) -> Result<Image, CompileError> {
        let failed = |why: String, log: &str| CompileError::Failed {
            version: self.version_text(),
            path: self.path.clone(),
            options: options.to_string(),
            why,
            log: log.lines().filter(|line| !line.trim().is_empty()).take(LINES).collect::<Vec<_>>().join("\n"),
        };
        let nul = |_| failed("there is a NUL in the text".into(), "");
        let text = CString::new(source).map_err(nul)?;
        let words: Vec<CString> = options.split(' ').map(CString::new).collect::<Result<_, _>>().map_err(nul)?;
        let words: Vec<*const c_char> = words.iter().map(|word| word.as_ptr()).collect();
        let check = |status: c_int, log: &str| {
            if status == sys::SUCCESS {
                return Ok(());
            }
            // SAFETY: a static string for any number.
            let why = unsafe { CStr::from_ptr((self.table.error_string)(status)) }.to_string_lossy().into_owned();
            Err(failed(why, log))
        };
        let mut raw = sys::Program::NULL;
        // SAFETY: given where to write the program, and NUL-terminated strings; no headers.
        let status = unsafe {
            let none = std::ptr::null();
            (self.table.create)(&raw mut raw, text.as_ptr(), c"kernels.cu".as_ptr(), 0, none, none)
        };
        check(status, "")?;
        let program = Program { table: &self.table, raw };
        let count = c_int::try_from(words.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program exists, and there are so many NUL-terminated options.
        let status = unsafe { (self.table.compile)(program.raw, count, words.as_ptr()) };
        let log = program.fetch(self.table.log_size, self.table.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        check(status, &log)?;
        let (size, get) = match target {
            Target::Cubin(_) => (self.table.cubin_size, self.table.cubin),
            Target::Ptx(_) => (self.table.ptx_size, self.table.ptx),
        };
        let bytes = program.fetch(size, get).map_err(|status| match check(status, &log) {
            Err(error) => error,
            Ok(()) => failed("it gave nothing".into(), &log),
        })?;
        Ok(Image { bytes, target, cached: false, log })
    }
}

/// A program in NVRTC, given back when dropped.
struct Program<'a> {
    table: &'a sys::Nvrtc,
    raw: sys::Program,
}

impl Program<'_> {
    /// One of its results: asks how long it is, then for it. An empty one is an error.
    fn fetch(
        &self,
        size: unsafe extern "C" fn(sys::Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(sys::Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut bytes = 0_usize;
        // SAFETY: the program exists; given where to write the number.
        let status = unsafe { size(self.raw, &raw mut bytes) };
        if status != sys::SUCCESS || bytes == 0 {
            return Err(status);
        }
        let mut to = vec![0_u8; bytes];
        // SAFETY: as above, and there is room for so many bytes.
        match unsafe { get(self.raw, to.as_mut_ptr().cast()) } {
            sys::SUCCESS => Ok(to),
            status => Err(status),
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by NVRTC, not yet given back.
        let _ = unsafe { (self.table.destroy)(&raw mut self.raw) };
    }
}

/// Where compiled kernels are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache(Option<PathBuf>);

impl Cache {
    /// palingenesis-worker in $CUDA_CACHE_PATH, else in $XDG_CACHE_HOME or ~/.cache; none
    /// with CUDA_CACHE_DISABLE=1, as for CUDA's own cache.
    #[must_use]
    pub fn from_environment() -> Cache {
        Cache::from_variables(|name| std::env::var_os(name).map(PathBuf::from))
    }

    /// As above, of these variables.
    #[must_use]
    pub fn from_variables(variable: impl Fn(&str) -> Option<PathBuf>) -> Cache {
        let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
        if variable("CUDA_CACHE_DISABLE").is_some_and(|value| value == Path::new("1")) {
            return Cache::none();
        }
        let above = absolute("CUDA_CACHE_PATH")
            .or_else(|| absolute("XDG_CACHE_HOME"))
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        Cache(above.map(|above| above.join("palingenesis-worker")))
    }

    /// This directory, which is made when something is written.
    #[must_use]
    pub fn at(directory: &Path) -> Cache {
        Cache(Some(directory.to_path_buf()))
    }

    /// None at all.
    #[must_use]
    pub fn none() -> Cache {
        Cache(None)
    }

    /// Where a file of this key is.
    fn file(directory: &Path, key: &str) -> PathBuf {
        directory.join(format!("{key}.kernels"))
    }

    /// What was kept, if it is whole and nobody else can have written it: this is code.
    fn read(&self, key: &str) -> Option<Vec<u8>> {
        let directory = self.0.as_deref()?;
        own(&fs::symlink_metadata(directory).ok()?).then_some(())?;
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(Cache::file(directory, key)).ok()?;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || !own(&metadata) || metadata.len() > LARGEST {
            return None;
        }
        let mut all = Vec::new();
        file.take(LARGEST).read_to_end(&mut all).ok()?;
        let (sum, bytes) = all.strip_prefix(MAGIC)?.split_at_checked(32)?;
        (!bytes.is_empty() && Hash::hash(bytes) == sum).then(|| bytes.to_vec())
    }

    /// Keeps it, under a name of its own first: many ranks do so at once.
    fn write(&self, key: &str, bytes: &[u8]) {
        if let Some(directory) = self.0.as_deref() {
            // Of no consequence but time at the next start.
            let _ = Cache::try_write(directory, key, bytes);
        }
    }

    fn try_write(directory: &Path, key: &str, bytes: &[u8]) -> io::Result<()> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if let Some(above) = directory.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(above)?;
        }
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if !own(&fs::symlink_metadata(directory)?) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // Ranks on several hosts may share the directory, and a process id.
        let nonce =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = directory.join(format!(".{key}.{}.{count}.{nonce}", std::process::id()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let written = fill(&mut file, bytes).and_then(|()| fs::rename(&temporary, Cache::file(directory, key)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

fn fill(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(MAGIC)?;
    file.write_all(&Hash::hash(bytes))?;
    file.write_all(bytes)
}

/// Whether only this user can have written it.
fn own(metadata: &fs::Metadata) -> bool {
    // SAFETY: reads a number of this process.
    let user = unsafe { libc::geteuid() };
    metadata.uid() == user && metadata.mode() & 0o022 == 0 && !metadata.file_type().is_symlink()
}
