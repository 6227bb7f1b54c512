//! NCCL's functions, as nccl.h declares them, found in a library that is opened at run time.
//! Only what is used. Names, values and layouts are of nccl.h 2.18 to 2.28, which have them
//! alike. Nothing here decides anything.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use crate::comm::CommError;
use crate::dynamic;

/// ncclComm_t.
pub type RawComm = *mut c_void;

/// The oldest NCCL that works: ncclConfig_t with all of [`Config`], and a finalize and an
/// abort that do not wait (2.18.1, 2023).
pub const OLDEST: c_int = 21800;

/// ncclUniqueId: NCCL_UNIQUE_ID_BYTES.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// ncclResult_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Status(pub c_int);

impl Status {
    /// ncclSuccess.
    pub const SUCCESS: Status = Status(0);
    /// ncclInvalidArgument.
    pub const INVALID_ARGUMENT: Status = Status(4);
    /// ncclInvalidUsage.
    pub const INVALID_USAGE: Status = Status(5);
    /// ncclInProgress.
    pub const IN_PROGRESS: Status = Status(7);

    /// Another try gives the same.
    #[must_use]
    pub fn is_wrong_use(self) -> bool {
        self == Status::INVALID_ARGUMENT || self == Status::INVALID_USAGE
    }
}

/// ncclDataType_t: what the engines store.
pub const FLOAT32: c_int = 7;
/// ncclBfloat16.
pub const BFLOAT16: c_int = 9;

/// ncclRedOp_t.
pub const SUM: c_int = 0;

/// ncclConfig_t of 2.18. A later NCCL takes as much as `size` says, and its own defaults for
/// the rest (NCCL, src/init.cc, parseCommConfig).
#[repr(C)]
#[derive(Debug)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// NCCL_CONFIG_INITIALIZER, but for `blocking`: calls come back at once.
    #[must_use]
    pub fn nonblocking() -> Config {
        // NCCL_CONFIG_UNDEF_INT.
        let undefined = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST.cast_unsigned(),
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: undefined,
            net_name: std::ptr::null(),
            split_share: undefined,
        }
    }
}

type OnComm = unsafe extern "C" fn(RawComm) -> Status;
type Collective = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> Status;
type Reducing = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Status;

/// An NCCL that was opened.
#[derive(Debug, Clone)]
pub struct Library {
    library: dynamic::Library,
    /// Major · 10000 + minor · 100 + patch.
    pub version: c_int,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    pub(super) init: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Status,
    pub(super) finalize: OnComm,
    pub(super) destroy: OnComm,
    pub(super) abort: OnComm,
    pub(super) async_error: unsafe extern "C" fn(RawComm, *mut Status) -> Status,
    pub(super) all_gather: Collective,
    pub(super) reduce_scatter: Reducing,
    pub(super) all_reduce: Reducing,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
}

impl Library {
    /// Opens `path`, a file or a name that the loader looks for.
    ///
    /// # Errors
    /// [`CommError::Refused`]: it is not there, no NCCL, or too old. One line with a cure.
    pub fn open(path: &Path) -> Result<Library, CommError> {
        let refused = |error: dynamic::LibraryError| CommError::Refused(error.to_string());
        let library = dynamic::Library::open(path).map_err(refused)?;
        // SAFETY: the types are nccl.h's declarations of these names.
        let found = unsafe {
            let get_version: unsafe extern "C" fn(*mut c_int) -> Status =
                library.symbol("ncclGetVersion").map_err(refused)?;
            let mut version = 0;
            let status = get_version(&raw mut version);
            // Before the others: an old one lacks some of them.
            if status != Status::SUCCESS || version < OLDEST {
                return Err(CommError::Refused(format!(
                    "{} is NCCL {}, too old: {} is needed; install a newer one",
                    path.display(),
                    version_text(version),
                    version_text(OLDEST)
                )));
            }
            Library {
                version,
                get_unique_id: library.symbol("ncclGetUniqueId").map_err(refused)?,
                init: library.symbol("ncclCommInitRankConfig").map_err(refused)?,
                finalize: library.symbol("ncclCommFinalize").map_err(refused)?,
                destroy: library.symbol("ncclCommDestroy").map_err(refused)?,
                abort: library.symbol("ncclCommAbort").map_err(refused)?,
                async_error: library.symbol("ncclCommGetAsyncError").map_err(refused)?,
                all_gather: library.symbol("ncclAllGather").map_err(refused)?,
                reduce_scatter: library.symbol("ncclReduceScatter").map_err(refused)?,
                all_reduce: library.symbol("ncclAllReduce").map_err(refused)?,
                error_string: library.symbol("ncclGetErrorString").map_err(refused)?,
                last_error: library.symbol("ncclGetLastError").map_err(refused)?,
                library,
            }
        };
        Ok(found)
    }

    /// As it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// "2.28.9".
    #[must_use]
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// A new id of a group, by which its ranks find each other.
    ///
    /// # Errors
    /// NCCL's status: no network interface that it may use.
    pub fn unique_id(&self) -> Result<UniqueId, Status> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: given where to write the id.
        match unsafe { (self.get_unique_id)(&raw mut id) } {
            Status::SUCCESS => Ok(id),
            status => Err(status),
        }
    }

    /// What a status means, with what NCCL says itself of the last failure in this process.
    #[must_use]
    pub fn explain(&self, status: Status) -> String {
        // SAFETY: takes a number, returns a constant string. ncclGetLastError looks at no
        // communicator: its words are the process's (NCCL, src/init.cc).
        let (text, last) =
            unsafe { (text((self.error_string)(status)), text((self.last_error)(std::ptr::null_mut()))) };
        let last = last.trim();
        let text = if text.is_empty() { "an error without a name" } else { &text };
        if last.is_empty() { format!("{text} ({})", status.0) } else { format!("{text} ({}): {last}", status.0) }
    }
}

/// "2.28.9" of 22809.
pub(super) fn version_text(version: c_int) -> String {
    // Up to 2.8 the code was major · 1000 + minor · 100 + patch (nccl.h, NCCL_VERSION).
    let major = if version < 10_000 { version / 1000 } else { version / 10_000 };
    let minor = if version < 10_000 { version % 1000 / 100 } else { version % 10_000 / 100 };
    format!("{major}.{minor}.{}", version % 100)
}

/// One line of a C string.
///
/// # Safety
/// NULL or NUL-terminated.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
    words.chars().take(500).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_lies_as_nccl_h_has_it() {
        // Of ncclConfig_t in nccl.h 2.18.1, by offsetof with gcc on x86-64.
        assert_eq!(std::mem::offset_of!(Config, magic), 8);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
        assert_eq!(size_of::<Config>(), 48);
    }

    #[test]
    fn versions_are_told_as_people_know_them() {
        assert_eq!(version_text(22809), "2.28.9");
        assert_eq!(version_text(21803), "2.18.3");
        assert_eq!(version_text(2708), "2.7.8");
    }
}
