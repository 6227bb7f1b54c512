//! Memory shared between a process and the children it forks: an array of
//! atomic words, and waiting for one of them to change.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Zeroed words in anonymous shared memory. Unmapped when dropped in any of
/// the processes, for that process only.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU32>,
    words: usize,
}

// SAFETY: the memory holds atomics only and lives as long as the value.
unsafe impl Send for SharedWords {}
// SAFETY: as above; all access is atomic.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps at least one word.
    ///
    /// # Errors
    /// What mmap says.
    pub fn new(words: usize) -> io::Result<SharedWords> {
        let words = words.max(1);
        let bytes = words * size_of::<AtomicU32>();
        // SAFETY: a fresh anonymous mapping, at an address the kernel chooses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(SharedWords { base, words })
    }

    /// All words.
    pub fn all(&self) -> &[AtomicU32] {
        // SAFETY: the mapping holds `words` zeroed, page-aligned words and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.words * size_of::<AtomicU32>()) };
    }
}

/// Waits until `word` is no longer `seen`, at most `limit`. May return early.
pub fn wait_for_change(word: &AtomicU32, seen: u32, limit: Duration) {
    if word.load(Ordering::Acquire) != seen {
        return;
    }
    // One second at most: a waker that was killed between its store and its wake
    // must not cost more.
    let limit = limit.min(Duration::from_secs(1));
    let timeout = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: the word and the timeout live through the call; FUTEX_WAIT without
    // FUTEX_PRIVATE_FLAG works across processes. Every outcome is a return.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
    }
}

/// Wakes every process that waits for `word` to change.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the word lives through the call; FUTEX_WAKE reads no memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
