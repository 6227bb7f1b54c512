//! What the kernel grants this process: resource limits, shared memory.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A resource limit of setrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Memory that may be locked, in bytes.
    LockedMemory,
    /// Open files.
    OpenFiles,
    /// The stack, in bytes.
    Stack,
}

/// The soft and the hard limit; `u64::MAX` is none.
pub fn limit(resource: Resource) -> Option<(u64, u64)> {
    let number = match resource {
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::OpenFiles => libc::RLIMIT_NOFILE,
        Resource::Stack => libc::RLIMIT_STACK,
    };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit, which is ours.
    (unsafe { libc::getrlimit(number, &mut limit) } == 0).then_some((limit.rlim_cur, limit.rlim_max))
}

/// Sets the soft limit of open files, to the hard one at most. Whether it was.
pub fn set_open_files(soft: u64) -> bool {
    let Some((_, hard)) = limit(Resource::OpenFiles) else { return false };
    let limit = libc::rlimit { rlim_cur: soft.min(hard), rlim_max: hard };
    // SAFETY: the kernel reads one rlimit, which is ours.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0 }
}

/// The size in bytes of the tmpfs mounted at `path`; `None` where there is none.
pub fn tmpfs_size(path: &Path) -> Option<u64> {
    tmpfs_room(path).map(|(size, _)| size)
}

/// The same, and how much of it is free.
pub fn tmpfs_room(path: &Path) -> Option<(u64, u64)> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut answer = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path is a C string, and the kernel writes one statfs, which is ours.
    if unsafe { libc::statfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: statfs returned 0, so it has filled the structure.
    let answer = unsafe { answer.assume_init() };
    if answer.f_type != libc::TMPFS_MAGIC {
        return None;
    }
    let block = u64::try_from(answer.f_bsize).ok()?;
    // A tmpfs without a limit says 0.
    let size = answer.f_blocks.saturating_mul(block);
    (size > 0).then(|| (size, answer.f_bavail.saturating_mul(block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_s_own() {
        let text = std::fs::read_to_string("/proc/self/limits").unwrap();
        for (resource, name) in [
            (Resource::LockedMemory, "Max locked memory"),
            (Resource::OpenFiles, "Max open files"),
            (Resource::Stack, "Max stack size"),
        ] {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            let said = line.split_whitespace().next().unwrap();
            let soft = limit(resource).unwrap().0;
            assert_eq!(said, if soft == u64::MAX { "unlimited".into() } else { soft.to_string() }, "{name}");
        }
    }

    #[test]
    fn only_a_tmpfs_has_a_tmpfs_s_size() {
        assert_eq!(tmpfs_size(Path::new("/proc")), None);
        assert_eq!(tmpfs_size(Path::new("/nonexistent")), None);
        if std::fs::read_to_string("/proc/mounts").unwrap().contains(" /dev/shm tmpfs ") {
            assert!(tmpfs_size(Path::new("/dev/shm")).is_some());
            assert!(tmpfs_room(Path::new("/dev/shm")).is_some_and(|(size, free)| free <= size));
        }
    }
}
