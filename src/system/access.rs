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
