//! The kernel's random numbers.

use std::io;

/// `N` bytes nobody can foresee.
///
/// # Errors
/// What getrandom(2) says; it does not happen on a kernel that has started.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the buffer is as long as we say.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    match usize::try_from(got) {
        Ok(got) if got == N => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}
