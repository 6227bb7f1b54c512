//! The standard streams without std's buffers and panics: `eprintln!` panics
//! when stderr is gone; this does not care.

use std::io;
use std::mem::MaybeUninit;

/// Writes `text` to stderr, in one write(2) where the kernel takes it whole, so
/// that lines of parallel tasks do not mix.
pub fn to_stderr(text: &str) {
    write_all(libc::STDERR_FILENO, text.as_bytes());
}

/// Writes `text` to stdout without std's buffer.
pub fn to_stdout(text: &str) {
    write_all(libc::STDOUT_FILENO, text.as_bytes());
}

/// Slurm's tasks have SIGPIPE as it comes, and it would end them where slurmstepd, at the
/// other end of their streams, was killed.
struct NoSigpipe {
    only: libc::sigset_t,
    before: libc::sigset_t,
    pending: bool,
}

impl NoSigpipe {
    fn begin() -> NoSigpipe {
        let [mut only, mut before, mut pending] = [MaybeUninit::<libc::sigset_t>::zeroed(); 3];
        // SAFETY: sets of our own, which sigemptyset and the kernel fill; none of the calls can fail with them.
        unsafe {
            libc::sigemptyset(only.as_mut_ptr());
            libc::sigaddset(only.as_mut_ptr(), libc::SIGPIPE);
            libc::sigpending(pending.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, only.as_ptr(), before.as_mut_ptr());
            let pending = libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1;
            NoSigpipe { only: only.assume_init(), before: before.assume_init(), pending }
        }
    }
}

impl Drop for NoSigpipe {
    fn drop(&mut self) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: sets that `begin` has filled; with no time sigtimedwait does not wait.
        unsafe {
            if !self.pending {
                libc::sigtimedwait(&raw const self.only, std::ptr::null_mut(), &raw const now);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}

fn write_all(fd: i32, mut bytes: &[u8]) {
    let _quiet = NoSigpipe::begin();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::child;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    #[test]
    fn a_stream_that_nobody_reads_ends_nobody() {
        let said = child::run(Duration::from_secs(30), || {
            // SAFETY: as Slurm's tasks have it; this is a process of its own.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            write_all(writer.as_raw_fd(), b"nobody hears it");
            write_all(writer.as_raw_fd(), b"nor this");
            b"lives".to_vec()
        });
        assert_eq!(said.unwrap(), b"lives");
    }
}
