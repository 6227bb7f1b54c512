//! Where CUDA's and NCCL's libraries are, by five rules in this order: a directory that is
//! named, LD_LIBRARY_PATH, the toolkits of CUDA_HOME, CUDA_PATH and /usr/local, what the
//! loader knows, and the wheels of Python environments. Files are looked at, never loaded. The driver's library comes with
//! the driver: a toolkit has only a stub of it, which is no driver.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::Environment;

/// By which rule a library was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A directory that the configuration names.
    Configured,
    /// LD_LIBRARY_PATH.
    LibraryPath,
    /// CUDA_HOME, CUDA_PATH, and the toolkits in /usr/local.
    Toolkit,
    /// /etc/ld.so.cache and the loader's usual directories.
    Loader,
    /// `nvidia/*/lib` of Python environments: PyPI's wheels.
    Python,
}

impl Rule {
    /// All of them, in their order.
    pub const ALL: [Rule; 5] = [Rule::Configured, Rule::LibraryPath, Rule::Toolkit, Rule::Loader, Rule::Python];

    /// As lines name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Rule::Configured => "the configured directory",
            Rule::LibraryPath => "LD_LIBRARY_PATH",
            Rule::Toolkit => "/usr/local/cuda*/lib64",
            Rule::Loader => "the loader's cache and directories",
            Rule::Python => "site-packages/nvidia/*/lib",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A library's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Absolute.
    pub path: PathBuf,
    /// "13.0.88", as its name or that of the file it links to has it; empty where they have none.
    pub version: String,
    /// How it was found.
    pub by: Rule,
}

/// A library that is not there, and where it was looked for. Its text is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// "libnvrtc.so".
    pub name: &'static str,
    /// How to get it.
    pub cure: &'static str,
    /// Directories by rule.
    pub looked: Vec<(Rule, Vec<PathBuf>)>,
    /// Files that were there and not taken, with the reason.
    pub skipped: Vec<String>,
}

/// Directories of a rule that a line shows.
const SHOWN: usize = 4;

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not found in ", self.name)?;
        for (index, (rule, directories)) in self.looked.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{rule}")?;
            let shown: Vec<String> =
                directories.iter().take(SHOWN).map(|directory| directory.display().to_string()).collect();
            match directories.len() {
                0 => write!(f, " (none)")?,
                all if all > SHOWN => write!(f, " ({} and {} more)", shown.join(", "), all - SHOWN)?,
                _ => write!(f, " ({})", shown.join(", "))?,
            }
        }
        for skipped in self.skipped.iter().take(SHOWN) {
            write!(f, "; {skipped}")?;
        }
        write!(f, "; {}", self.cure)
    }
}

/// What a training on GPUs loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libraries {
    /// libcuda.so.1, of the driver.
    pub driver: Result<Found, Missing>,
    /// libnvrtc.so, the compiler.
    pub nvrtc: Result<Found, Missing>,
    /// libnvrtc-builtins.so, beside it.
    pub nvrtc_builtins: Option<PathBuf>,
    /// libcublasLt.so, matrix products.
    pub cublaslt: Result<Found, Missing>,
    /// libnccl.so.2, between GPUs.
    pub nccl: Result<Found, Missing>,
}

/// One that is wanted.
struct Wanted {
    name: &'static str,
    /// Its files' names: this, and a dot and a version, or this alone.
    prefix: &'static str,
    /// Whether a toolkit or a wheel may have it.
    of_toolkits: bool,
    /// A file of this name's beginning has to lie beside it.
    beside: Option<&'static str>,
    cure: &'static str,
}

const DRIVER: Wanted = Wanted {
    name: "libcuda.so.1",
    prefix: "libcuda.so.1",
    of_toolkits: false,
    beside: None,
    cure: "it comes with NVIDIA's driver (libcuda1, nvidia-driver-cuda-libs); in a container the runtime mounts it",
};
const NVRTC: Wanted = Wanted {
    name: "libnvrtc.so",
    prefix: "libnvrtc.so",
    of_toolkits: true,
    beside: Some("libnvrtc-builtins.so"),
    cure: "install it (pip install nvidia-cuda-nvrtc, or the CUDA toolkit), or name its directory in train.cuda_libraries",
};
const CUBLASLT: Wanted = Wanted {
    name: "libcublasLt.so",
    prefix: "libcublasLt.so",
    of_toolkits: true,
    beside: None,
    cure: "install it (pip install nvidia-cublas, or the CUDA toolkit), or name its directory in train.cuda_libraries",
};
const NCCL: Wanted = Wanted {
    name: "libnccl.so.2",
    prefix: "libnccl.so.2",
    of_toolkits: true,
    beside: None,
    cure: "install it (pip install nvidia-nccl-cu13, or libnccl2), or name its directory in train.cuda_libraries",
};

/// More directories than this are not looked into, nor more of one's entries: a path that
/// was added to in a loop is not to hold up a start.
const MOST_DIRECTORIES: usize = 256;
const MOST_ENTRIES: usize = 65_536;
/// The loader's cache of a large installation has some hundred KiB.
const MOST_CACHE: u64 = 64 << 20;

/// Looks below `root` for all of them; `configured` is a directory that goes before all else.
#[must_use]
pub fn find(root: &Path, configured: Option<&Path>, environment: &Environment) -> Libraries {
    let places = Places::of(root, configured, environment);
    let nvrtc = places.find(&NVRTC);
    let beside = nvrtc.as_ref().ok().and_then(|found| beside(root, &found.path, "libnvrtc-builtins.so"));
    Libraries {
        driver: places.find(&DRIVER),
        nvrtc,
        nvrtc_builtins: beside,
        cublaslt: places.find(&CUBLASLT),
        nccl: places.find(&NCCL),
    }
}

/// The directories of each rule.
struct Places<'a> {
    root: &'a Path,
    directories: Vec<(Rule, Vec<PathBuf>)>,
    /// What the loader's cache names.
    cached: Vec<PathBuf>,
}

/// A path of the machine as it lies below `root`.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A directory's names, sorted.
fn names(root: &Path, directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(below(root, directory)).into_iter().flatten().take(MOST_ENTRIES).flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// "13.0.88" as numbers.
fn numbers(version: &str) -> Vec<u64> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

impl<'a> Places<'a> {
    fn of(root: &'a Path, configured: Option<&Path>, environment: &Environment) -> Places<'a> {
        let set = |name: &str| environment.get(name).filter(|value| value.starts_with('/'));
        let mut directories = Vec::new();
        directories.push((Rule::Configured, configured.map(Path::to_path_buf).into_iter().collect::<Vec<_>>()));

        let path = environment.get("LD_LIBRARY_PATH").unwrap_or_default();
        let path = path.split([':', ';']).filter(|part| part.starts_with('/')).map(PathBuf::from);
        directories.push((Rule::LibraryPath, distinct(path)));

        let own = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set).map(PathBuf::from);
        let usr_local = Path::new("/usr/local");
        let mut toolkits: Vec<String> = names(root, usr_local);
        toolkits.retain(|name| name == "cuda" || name.starts_with("cuda-"));
        // What the admin's link names goes first, then the newest.
        toolkits.sort_by_key(|name| Reverse((name == "cuda", numbers(name.trim_start_matches("cuda-")))));
        let toolkits = own.chain(toolkits.into_iter().map(|name| usr_local.join(name)));
        // lib64 is a link to a target's, which a cut-down image may lack.
        let libraries = ["lib64", "lib", TARGET];
        let toolkits = toolkits.flat_map(|toolkit| libraries.map(|name| toolkit.join(name)));
        directories.push((Rule::Toolkit, there(root, distinct(toolkits))));

        let usual = ["/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib"];
        let usual = usual.into_iter().chain(["/usr/local/nvidia/lib64", "/usr/local/lib"]).map(PathBuf::from);
        directories.push((Rule::Loader, there(root, usual.collect())));

        let home = set("HOME").map(|home| Path::new(home).join(".local"));
        let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set).map(PathBuf::from).chain(home);
        let prefixes = prefixes.chain([PathBuf::from("/usr/local"), PathBuf::from("/usr")]);
        let wheels = prefixes.flat_map(|prefix| wheels(root, &prefix));
        // Conda's packages of CUDA have theirs beside all others.
        let conda = set("CONDA_PREFIX").map(|prefix| Path::new(prefix).join("lib"));
        directories.push((Rule::Python, distinct(conda.into_iter().chain(wheels))));

        let cache = File::open(below(root, Path::new("/etc/ld.so.cache"))).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(MOST_CACHE).read_to_end(&mut bytes).map(|_| bytes)
        });
        Places { root, directories, cached: cache.map(|bytes| cached(&bytes)).unwrap_or_default() }
    }

    fn find(&self, wanted: &Wanted) -> Result<Found, Missing> {
        let (mut skipped, mut looked) = (Vec::new(), Vec::new());
        for (rule, directories) in &self.directories {
            if !wanted.of_toolkits && matches!(rule, Rule::Toolkit | Rule::Python) {
                continue;
            }
            let of_cache = self.cached.iter().filter(|_| *rule == Rule::Loader).cloned();
            let listed = directories.iter().flat_map(|directory| {
                let mut names = names(self.root, directory);
                // The newest of a directory first; the bare name, for developers, last.
                names.sort_by_key(|name| Reverse(numbers(version_in(name, wanted.prefix).unwrap_or_default())));
                names.into_iter().map(|name| directory.join(name)).collect::<Vec<_>>()
            });
            for path in of_cache.chain(listed) {
                let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
                if version_in(name, wanted.prefix).is_none() {
                    continue;
                }
                match self.fits(&path, wanted) {
                    Ok(version) => return Ok(Found { path, version, by: *rule }),
                    Err(why) => skipped.push(format!("{} is {why}", path.display())),
                }
            }
            looked.push((*rule, directories.clone()));
        }
        Err(Missing { name: wanted.name, cure: wanted.cure, looked, skipped })
    }

    /// The version of a file that can be loaded.
    fn fits(&self, path: &Path, wanted: &Wanted) -> Result<String, &'static str> {
        let target = fs::canonicalize(below(self.root, path)).ok();
        let stub = |path: &Path| path.components().any(|part| part.as_os_str() == "stubs");
        // Images that were built without a driver link the driver's name to the stub.
        if stub(path) || target.as_deref().is_some_and(stub) {
            return Err("a stub to link with, and no library");
        }
        is_library(&below(self.root, path))?;
        if let Some(name) = wanted.beside
            && beside(self.root, path, name).is_none()
        {
            return Err("alone: libnvrtc-builtins.so of its version is not beside it");
        }
        let name = |path: &Path| path.file_name().and_then(OsStr::to_str).map(String::from);
        // The loader's name links to the file that has all of the version.
        let target = target.as_deref().and_then(name);
        let plain = wanted.prefix.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('.');
        let of = |name: String| version_in(&name, plain).map(String::from);
        Ok(target.and_then(of).or_else(|| name(path).and_then(of)).unwrap_or_default())
    }
}

/// In their order, each once, and not too many.
fn distinct(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = Vec::new();
    for path in paths {
        if all.len() < MOST_DIRECTORIES && !all.contains(&path) {
            all.push(path);
        }
    }
    all
}

fn there(root: &Path, directories: Vec<PathBuf>) -> Vec<PathBuf> {
    directories.into_iter().filter(|directory| below(root, directory).is_dir()).collect()
}

/// The wheels' directories of the Python installations below a prefix.
fn wheels(root: &Path, prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in [prefix.join("lib"), prefix.join("lib64")] {
        let mut pythons = names(root, &lib);
        pythons.retain(|name| name.starts_with("python3"));
        pythons.sort_by_key(|name| Reverse(numbers(name.trim_start_matches("python"))));
        for packages in pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|name| (python, name)))
        {
            let nvidia = lib.join(packages.0).join(packages.1).join("nvidia");
            for package in names(root, &nvidia) {
                found.push(nvidia.join(package).join("lib"));
            }
        }
    }
    there(root, found)
}

/// "13.0.88" of "libnvrtc.so.13.0.88", "" of the bare name; none of another library.
fn version_in<'n>(name: &'n str, prefix: &str) -> Option<&'n str> {
    match name.strip_prefix(prefix)? {
        "" => Some(""),
        rest => rest.strip_prefix('.').filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())),
    }
}

/// The library beside another whose name begins so, of the same major and minor version as far
/// as both names have one; of several the newest.
fn beside(root: &Path, library: &Path, prefix: &str) -> Option<PathBuf> {
    let directory = library.parent()?;
    // The name it links to has the minor version; the loader's has the major one only.
    let target = fs::canonicalize(below(root, library)).ok()?;
    let version = target.file_name()?.to_str()?.split_once(".so").map(|(_, version)| version.trim_start_matches('.'));
    let version = version.map(numbers).unwrap_or_default();
    let fits = |name: &String| {
        let own = version_in(name, prefix).map(numbers);
        own.is_some_and(|own| own.iter().zip(&version).take(2).all(|(own, other)| own == other))
            && is_library(&below(root, &directory.join(name))).is_ok()
    };
    let newest = |name: &String| version_in(name, prefix).map(numbers);
    names(root, directory).into_iter().filter(fits).max_by_key(newest).map(|name| directory.join(name))
}

/// Where a toolkit has the libraries of this processor's servers.
const TARGET: &str = if cfg!(target_arch = "aarch64") { "targets/sbsa-linux/lib" } else { "targets/x86_64-linux/lib" };

/// EM_X86_64 and EM_AARCH64 of elf.h.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Whether a file is a library that this program could load.
fn is_library(path: &Path) -> Result<(), &'static str> {
    let data = fs::metadata(path).map_err(|_| "a link to nothing")?;
    if !data.is_file() {
        return Err("no file");
    }
    let mut header = [0; 20];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.map_err(|_| "not readable, or too short for a library")?;
    let [0x7f, b'E', b'L', b'F', class, ..] = header else { return Err("no ELF file") };
    if class != 2 || u16::from_le_bytes([header[18], header[19]]) != MACHINE {
        return Err("for another processor");
    }
    Ok(())
}

/// The paths in the loader's cache: of its format since glibc 2.2, as dl-cache.h has it.
fn cached(bytes: &[u8]) -> Vec<PathBuf> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    // One of the older format may come before it.
    let Some(start) = bytes.windows(MAGIC.len()).position(|window| window == MAGIC) else { return Vec::new() };
    let cache = bytes.get(start..).unwrap_or_default();
    let number = |at: usize| {
        let four = cache.get(at..at.checked_add(4)?)?;
        four.try_into().ok().map(u32::from_le_bytes).map(|number| number as usize)
    };
    let text = |at: usize| {
        let rest = cache.get(at..)?;
        rest.split(|byte| *byte == 0).next().and_then(|text| std::str::from_utf8(text).ok())
    };
    let count = number(20).unwrap_or(0).min(cache.len() / 24);
    let entries = (0..count).filter_map(|index| text(number(48 + index * 24 + 8)?));
    entries.filter(|path| path.starts_with('/') && path.contains("/lib")).map(PathBuf::from).collect()
}
