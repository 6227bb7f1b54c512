//! Shared libraries that are there at run time, or not: opened by their path, kept for the
//! process's life. Nothing here knows what is in them; no name is looked for elsewhere than
//! in the library that was opened and what it needs itself.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// Why a library cannot be used: one line that names it, and the symbol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// The loader's words, which often name another library that this one needs.
    #[error("{path} cannot be loaded: {why}")]
    Open {
        /// The file.
        path: PathBuf,
        /// As dlerror has it.
        why: String,
    },
    /// Another version than this program is for.
    #[error("{path} has no function {symbol}: it is too old or not what its name says; install a newer one")]
    Symbol {
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: String,
    },
}

/// An open library. It is never closed: functions of it are called until the process ends.
#[derive(Debug, Clone)]
pub struct Library {
    handle: NonNull<c_void>,
    path: PathBuf,
}

// SAFETY: dlsym may be called from any thread, and the handle is never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `path`, an absolute path, or a bare name that the loader looks for. All of the
    /// library's own symbols are resolved now, and are there for libraries opened later.
    ///
    /// # Errors
    /// [`LibraryError::Open`].
    pub fn open(path: &Path) -> Result<Library, LibraryError> {
        let failed = |why: String| LibraryError::Open { path: path.to_path_buf(), why };
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| failed("its path has a NUL in it".into()))?;
        // SAFETY: a NUL-terminated string. What the library does when it is loaded is its
        // own affair: the user named it, as for any program that is started.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        let handle = NonNull::new(handle).ok_or_else(|| {
            let why = last_error();
            // The loader begins with the path; the line has it already.
            let short = why.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&why);
            failed(short.to_string())
        })?;
        Ok(Library { handle, path: path.to_path_buf() })
    }

    /// As it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`].
    ///
    /// # Safety
    /// `F` is a function pointer type with the function's true signature.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "F is to be a function pointer") };
        let missing = || LibraryError::Symbol { path: self.path.clone(), symbol: name.to_string() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the handle is open, the string NUL-terminated.
        let found = unsafe { libc::dlsym(self.handle.as_ptr(), c_name.as_ptr()) };
        if found.is_null() {
            return Err(missing());
        }
        // SAFETY: of equal size by the assertion, and a function of type F by the caller.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }
}

/// What the loader says of this thread's last failure.
fn last_error() -> String {
    // SAFETY: returns NULL or a string that lives until this thread's next call of dl*.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".into();
    }
    // SAFETY: not NULL, so NUL-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
