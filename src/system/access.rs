//! What this process may do with a file.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether execve would be allowed, by the file's mode, its owner, its access
/// list and its mount.
pub fn may_execute(file: &Path) -> bool {
    let Ok(path) = CString::new(file.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: a C string, which is only read.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) == 0 }
}

/// Whether open(2) for reading and writing would be allowed, by the same and, for
/// a device, by the control groups of this process: the kernel asks them here too
/// (inode_permission), and the device is not opened.
///
/// # Errors
/// What the kernel says: it is not there, or it is not allowed.
pub fn may_open(file: &Path) -> io::Result<()> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    // The plain call: with AT_EACCESS an older libc would judge by the mode itself.
    // SAFETY: a C string, which is only read.
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::R_OK | libc::W_OK, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What the kernel knows of a file's lock (flock(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Nobody holds it.
    Free,
    /// Somebody does.
    Held,
    /// The file system has no locks, or the file cannot be opened.
    Unknown,
}

/// Looks at a file's lock by taking it, shared and for a moment, if nobody has it.
pub fn lock_of(path: &Path) -> Lock {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let Ok(file) = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) else {
        return Lock::Unknown;
    };
    // SAFETY: an open descriptor; closing the file gives the lock back.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) } {
        0 => Lock::Free,
        _ if io::Error::last_os_error().raw_os_error() == Some(libc::EWOULDBLOCK) => Lock::Held,
        _ => Lock::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_lock_is_free_until_somebody_holds_it() {
        let path = std::env::temp_dir().join(format!("palingenesis-lock-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        assert_eq!(lock_of(&path), Lock::Free);
        // SAFETY: an open descriptor.
        assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
        assert_eq!(lock_of(&path), Lock::Held);
        drop(file);
        assert_eq!(lock_of(&path), Lock::Free);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(lock_of(&path), Lock::Unknown);
    }
}
