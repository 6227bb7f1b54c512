//! SIGUSR1 and SIGTERM: the first asks for a checkpoint at the next step's end, the second
//! ends this process at once. Where there is nothing to save the first does that, too. And
//! SIGXFSZ, which is an error of a write.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use super::EXIT_RETRY;

/// Signals that came.
static CAME: AtomicU32 = AtomicU32::new(0);
/// When the first came, in ns of the monotonic clock.
static AT: AtomicU64 = AtomicU64::new(0);
/// Whether a first signal waits for the step's end.
static ARMED: AtomicBool = AtomicBool::new(false);

const TOLD: &[u8] =
    b"palingenesis-worker: signal: ending at once; the last checkpoint is what the next start goes on from\n";

/// Takes SIGUSR1 and SIGTERM from now on.
pub fn take() {
    for signal in [libc::SIGUSR1, libc::SIGTERM] {
        // SAFETY: the action is zeroed and then set; `came` calls only what is allowed in a handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = came as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// A file that reaches the limit of a file's size (ulimit -f, which srun hands on) is an
/// error that names the file, as it is to Python; by default the signal ends the process
/// without a word.
pub fn ignore_file_limit() {
    // SAFETY: takes numbers only.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// From now on a first signal is waited for with [`asked`], or no longer.
pub fn arm(on: bool) {
    ARMED.store(on, SeqCst);
}

/// How long ago the first signal came.
#[must_use]
pub fn asked() -> Option<Duration> {
    (CAME.load(SeqCst) > 0).then(|| Duration::from_nanos(now().saturating_sub(AT.load(SeqCst))))
}

extern "C" fn came(_signal: libc::c_int) {
    // The time first: another thread may look between the two.
    let _ = AT.compare_exchange(0, now(), SeqCst, SeqCst);
    if CAME.fetch_add(1, SeqCst) == 0 && ARMED.load(SeqCst) {
        return;
    }
    // SAFETY: both calls are allowed in a handler, and the bytes are static.
    unsafe {
        libc::write(libc::STDERR_FILENO, TOLD.as_ptr().cast(), TOLD.len());
        libc::_exit(i32::from(EXIT_RETRY));
    }
}

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills a struct of our own; the call is allowed in a handler.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
