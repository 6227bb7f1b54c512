//! The file of a plugin: what its symbols say, read without loading it, and whether the
//! loader takes it, tried in a process of its own. It must not be loaded into the command:
//! what lies there may be anything.

use std::ffi::CString;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use palingenesis::system::program;

use super::access::{self, Access};
use super::plugstack::Line;
use super::release::Release;
use super::tree::{Tree, reason};

/// The hidden subcommand that loads a file and says what the loader said.
pub const PROBE: &str = "probe-library";

const PATIENCE: Duration = Duration::from_secs(10);

/// A plugin of 1 GiB is none.
const MOST: u64 = 1 << 30;

/// One line's file.
#[derive(Debug, Clone)]
pub struct Library {
    /// The line that names it.
    pub line: Line,
    /// The file, if one is there.
    pub path: Option<String>,
    /// What its symbols say, or why it is no plugin.
    pub symbols: Result<Symbols, String>,
    /// What the loader said.
    pub load: Load,
    /// Who may read and change it.
    pub access: Access,
}

/// What Slurm's loader reads before it loads a plugin (src/common/plugin.c).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Symbols {
    /// plugin_name.
    pub name: Option<String>,
    /// plugin_type; of a SPANK plugin it is "spank".
    pub kind: Option<String>,
    /// plugin_version.
    pub release: Option<Release>,
}

/// The loader's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Load {
    /// It loads.
    Loaded,
    /// It does not, in the loader's words.
    Refused(String),
    /// The process that loaded it ended.
    Crashed(String),
    /// It was not tried, or not to the end.
    Unknown(String),
}

/// Looks at the file that a line names.
pub fn look(tree: &Tree, line: &Line, plugin_dirs: &[String], probe: Option<&Path>) -> Library {
    let candidates: Vec<String> = match line.path.starts_with('/') {
        true => vec![line.path.clone()],
        false => plugin_dirs.iter().map(|dir| format!("{}/{}", dir.trim_end_matches('/'), line.path)).collect(),
    };
    let path = candidates.iter().find(|path| tree.metadata(path).is_ok()).cloned();
    let Some(file) = path.as_ref().and_then(|path| tree.file(path).ok()) else {
        let first = candidates.first().unwrap_or(&line.path);
        let why = match tree.metadata(first) {
            Err(error) => reason(&error),
            Ok(_) => "it cannot be looked at".into(),
        };
        let symbols = Err(why.clone());
        let access = Access::default();
        return Library { line: line.clone(), path: None, symbols, load: Load::Refused(why), access };
    };
    let access = access::of(tree, path.as_deref().unwrap_or(&line.path));
    Library {
        line: line.clone(),
        path,
        symbols: symbols(&file),
        load: match tree.is_machine() {
            true => load(&file, probe),
            // Loading runs what is in it.
            false => Load::Unknown("not loaded, for it is another machine's".into()),
        },
        access,
    }
}

/// Tries it by `probe`, our own program.
fn load(file: &Path, probe: Option<&Path>) -> Load {
    let Some(probe) = probe else { return Load::Unknown("this program does not know its own file".into()) };
    let Some(name) = file.to_str() else { return Load::Unknown("its name is not UTF-8".into()) };
    match program::output(probe, &[PROBE, name], &[], PATIENCE) {
        Ok(said) => answer(name, &String::from_utf8_lossy(&said)),
        Err(error) => Load::Unknown(format!("the process that loads it gave no answer: {}", reason(&error))),
    }
}

/// As long as the loader's words may be told.
const MOST_WORDS: usize = 400;

fn answer(file: &str, said: &str) -> Load {
    // The loader begins with the file, which is told anyway.
    let words =
        |text: &str| text.trim().trim_start_matches(file).trim_start_matches(": ").chars().take(MOST_WORDS).collect();
    // What stands behind it is the parent's, which tells an end without an answer.
    match said.lines().next().unwrap_or_default().split_once(' ') {
        Some(("loaded", _)) => Load::Loaded,
        Some(("refused", why)) => Load::Refused(words(why)),
        Some(("crashed", how)) => Load::Crashed(words(how)),
        _ => Load::Unknown("the process that loads it said nothing".into()),
    }
}

/// The hidden subcommand: one line on stdout. A child loads the file, so that its end is
/// told too.
pub fn probe(file: &str) -> ! {
    let Ok(path) = CString::new(file) else { end("refused its name has a NUL") };
    // SAFETY: takes a number; no core of ours is wanted.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
    // SAFETY: this process has one thread; the child loads, writes and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        become_nobody();
        // SAFETY: takes nothing. Without a terminal of its own there is none to type into.
        unsafe { libc::setsid() };
        // SAFETY: takes numbers only.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        // As Slurm does (plugin_load_from_file).
        // SAFETY: a C string; what the library's own constructors do is why this is a child.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
        if !handle.is_null() {
            end("loaded -");
        }
        // SAFETY: dlerror's string lives until the next call of the loader.
        let why = unsafe { libc::dlerror() };
        let why = match why.is_null() {
            true => String::new(),
            // SAFETY: not null, and a C string.
            false => unsafe { std::ffi::CStr::from_ptr(why) }.to_string_lossy().into_owned(),
        };
        end(&format!("refused {why}"));
    }
    let mut status = 0;
    // SAFETY: our own child, and an int to write to.
    if pid < 0 || unsafe { libc::waitpid(pid, &mut status, 0) } != pid {
        end("unknown -");
    }
    if libc::WIFSIGNALED(status) {
        end(&format!("crashed by signal {}", libc::WTERMSIG(status)));
    }
    // Where the child has answered, this comes behind its answer and counts for nothing.
    end(&format!("crashed with exit code {}", libc::WEXITSTATUS(status)));
}

/// What the library does as it is loaded it does not do as root, and it must be
/// readable by users, who load it in their srun. Others than root stay who they are.
fn become_nobody() {
    const NOBODY: u32 = 65534;
    // SAFETY: these take numbers, and a list of no groups; where they fail, as in a user
    // namespace without that number, root's check is as good as there can be one.
    unsafe {
        libc::setgroups(0, std::ptr::null());
        libc::setresgid(NOBODY, NOBODY, NOBODY);
        libc::setresuid(NOBODY, NOBODY, NOBODY);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    }
}

/// Leaves without the destructors and exit handlers of what was loaded.
fn end(line: &str) -> ! {
    let mut out = std::io::stdout();
    let _ = out.write_all(format!("{}\n", line.replace('\n', " ")).as_bytes()).and_then(|()| out.flush());
    palingenesis::system::output::exit_now(0)
}

/// Reads the symbols of a 64-bit little-endian ELF file.
pub fn symbols(file: &Path) -> Result<Symbols, String> {
    let elf = Elf::open(file)?;
    let found = elf.symbols(["plugin_name", "plugin_type", "plugin_version"])?;
    let text = |at: Option<u64>| {
        let bytes = elf.at_address(at?, 64).ok()?;
        let text = bytes.split(|byte| *byte == 0).next()?;
        Some(palingenesis::config::printable(&String::from_utf8_lossy(text)))
    };
    let number = |at: Option<u64>| Some(u32::from_le_bytes(elf.at_address(at?, 4).ok()?.try_into().ok()?));
    Ok(Symbols {
        name: text(found[0]),
        kind: text(found[1]),
        release: number(found[2]).map(Release::of_plugin_version),
    })
}

/// This machine's in the file's header (elf.h).
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

const PT_LOAD: u32 = 1;
const SHT_DYNSYM: u32 = 11;

struct Elf {
    file: std::fs::File,
    /// Parts of the file and where they come to lie: address, offset, length in the file.
    loaded: Vec<(u64, u64, u64)>,
    /// The symbols the loader sees, and their names.
    symbols: (u64, u64),
    names: (u64, u64),
}

impl Elf {
    fn open(path: &Path) -> Result<Elf, String> {
        use std::os::unix::fs::OpenOptionsExt;
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| reason(&error))?;
        let data = file.metadata().map_err(|error| reason(&error))?;
        if !data.is_file() || data.len() > MOST {
            return Err("it is no regular file, or far too long".into());
        }
        let mut elf = Elf { file, loaded: Vec::new(), symbols: (0, 0), names: (0, 0) };
        let header = elf.part(0, 64)?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return Err("it is no 64-bit ELF library".into());
        }
        if half(&header, 18) != MACHINE {
            return Err(format!("it is for another processor (ELF machine {}, here {MACHINE})", half(&header, 18)));
        }
        let table = |offset: usize, size: usize, count: usize| {
            (long(&header, offset), half(&header, size), half(&header, count))
        };
        let (at, size, count) = table(32, 54, 56);
        for index in 0..u64::from(count) {
            let entry = elf.part(place(at, index, u64::from(size))?, 56)?;
            if word(&entry, 0) == PT_LOAD {
                elf.loaded.push((long(&entry, 16), long(&entry, 8), long(&entry, 32)));
            }
        }
        let (at, size, count) = table(40, 58, 60);
        for index in 0..u64::from(count) {
            let entry = elf.part(place(at, index, u64::from(size))?, 64)?;
            if word(&entry, 4) == SHT_DYNSYM {
                elf.symbols = (long(&entry, 24), long(&entry, 32));
                let names = elf.part(place(at, u64::from(word(&entry, 40)), u64::from(size))?, 64)?;
                elf.names = (long(&names, 24), long(&names, 32));
            }
        }
        Ok(elf)
    }

    fn part(&self, at: u64, length: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at).map_err(|_| "it is no whole ELF library".to_string())?;
        Ok(bytes)
    }

    fn at_address(&self, address: u64, length: usize) -> Result<Vec<u8>, String> {
        let fits = |(start, _, size): &&(u64, u64, u64)| address >= *start && address - start < *size;
        let (start, offset, size) = self.loaded.iter().find(fits).ok_or("a symbol lies outside of it")?;
        let inside = address - start;
        let length = length.min(usize::try_from(size - inside).unwrap_or(length));
        self.part(offset.checked_add(inside).ok_or("a symbol lies outside of it")?, length)
    }

    /// The addresses of symbols that are defined.
    fn symbols<const N: usize>(&self, wanted: [&str; N]) -> Result<[Option<u64>; N], String> {
        let mut found = [None; N];
        let (at, size) = self.symbols;
        if size > 64 << 20 || self.names.1 > 64 << 20 {
            return Err("its table of symbols is far too long".into());
        }
        let whole = |length: u64| usize::try_from(length).map_err(|_| "it is too long".to_string());
        let table = self.part(at, whole(size)?)?;
        let names = self.part(self.names.0, whole(self.names.1)?)?;
        for entry in table.chunks_exact(24) {
            let name = names.get(word(entry, 0) as usize..).unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            if half(entry, 6) != 0
                && let Some(index) = wanted.iter().position(|wanted| wanted.as_bytes() == name)
            {
                found[index] = Some(long(entry, 8));
            }
        }
        Ok(found)
    }
}

fn place(at: u64, index: u64, size: u64) -> Result<u64, String> {
    index.checked_mul(size).and_then(|offset| at.checked_add(offset)).ok_or_else(|| "it is no whole ELF library".into())
}

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|part| part.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_plugin_is_said_and_never_a_panic() {
        let file = std::env::temp_dir().join(format!("palingenesis-elf-{}", std::process::id()));
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let header = &own[..4096.min(own.len())];
        for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", header] {
            std::fs::write(&file, bytes).unwrap();
            assert!(symbols(&file).is_err(), "{:?}", &bytes[..bytes.len().min(8)]);
        }
        // Every field of the header turned over.
        for at in 0..64 {
            let mut bytes = own.clone();
            bytes.truncate(1 << 16);
            bytes[at] ^= 0xff;
            std::fs::write(&file, &bytes).unwrap();
            let _ = symbols(&file);
        }
        assert!(symbols(Path::new("/nonexistent")).is_err());
        assert!(symbols(Path::new("/")).is_err());
        std::fs::remove_file(&file).unwrap();
        // A program is an ELF file without them.
        assert_eq!(symbols(&std::env::current_exe().unwrap()).map(|found| found.release), Ok(None));
    }

    #[test]
    fn the_probe_s_words() {
        let of = |said: &str| answer("/l/p.so", said);
        // The parent's line comes behind the child's.
        assert_eq!(of("loaded -\ncrashed with exit code 0\n"), Load::Loaded);
        assert_eq!(
            of("refused libx.so: cannot open\ncrashed with exit code 0\n"),
            Load::Refused("libx.so: cannot open".into())
        );
        assert_eq!(of("refused /l/p.so: undefined symbol: x\n"), Load::Refused("undefined symbol: x".into()));
        assert_eq!(of("crashed by signal 11\n"), Load::Crashed("by signal 11".into()));
        assert!(matches!(of(""), Load::Unknown(_)));
    }
}
