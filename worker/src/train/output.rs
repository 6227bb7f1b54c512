//! Whether train.output_dir can be one, before any step is computed. Nothing is written into
//! it here.

use std::ffi::CString;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::checkpoint::{CheckpointError, agree};
use crate::comm::{Exchange, Tag};

/// Whether rank 0 may write there: who may not will not at the next start either, while a
/// full or failing disk may be well again.
pub fn usable(comm: &mut dyn Exchange, output: &Path) -> Result<(), CheckpointError> {
    let look = || {
        std::fs::create_dir_all(output).and_then(|()| may_write(output)).map_err(|error| {
            let why = format!("train.output_dir = {}: {error}", output.display());
            match error.kind() {
                ErrorKind::PermissionDenied | ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
                    CheckpointError::Refused(format!("{why}; name a directory in which you may write"))
                }
                _ => CheckpointError::Storage(why),
            }
        })
    };
    let own = (comm.rank() == 0).then(look);
    agree(comm, Tag::of("output_dir", 0), own)
}

fn may_write(directory: &Path) -> io::Result<()> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: the kernel reads a string that lives through the call.
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK | libc::X_OK, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
