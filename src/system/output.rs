//! The standard streams without std's buffers and panics: `eprintln!` panics
//! when stderr is gone; this does not care.

use std::io;

/// Writes `text` to stderr, in one write(2) where the kernel takes it whole, so
/// that lines of parallel tasks do not mix.
pub fn to_stderr(text: &str) {
    write_all(libc::STDERR_FILENO, text.as_bytes());
}

/// Writes `text` to stdout without std's buffer.
pub fn to_stdout(text: &str) {
    write_all(libc::STDOUT_FILENO, text.as_bytes());
}

fn write_all(fd: i32, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: pointer and length are those of a live slice.
        let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(0) => return,
            Ok(written) => bytes = &bytes[written..],
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Whether standard input is a terminal. (std's own handle makes a buffer that
/// nobody frees when Slurm unloads us.)
pub fn stdin_is_terminal() -> bool {
    // SAFETY: isatty takes a number and has no other effect.
    unsafe { libc::isatty(libc::STDIN_FILENO) == 1 }
}

/// Ends this process at once, without exit handlers: for a forked task.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}
