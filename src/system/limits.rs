//! What the kernel grants this process: CPUs, resource limits, shared memory.

use std::ffi::CString;
use std::mem::size_of_val;
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

/// This thread's affinity mask, as words of 64 CPUs, the first ones first.
pub fn mask() -> Option<Vec<u64>> {
    // Room for 32,768 CPUs; the kernel refuses a mask shorter than its own.
    let mut mask = [0u64; 512];
    // SAFETY: pointer and length are those of a live array; 0 is this thread.
    let outcome = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    (outcome == 0).then(|| mask.to_vec())
}

/// Whether this thread has a memory policy of its own (set_mempolicy, numactl,
/// srun --mem-bind); `None` where the kernel does not say, as one without NUMA or
/// a container that forbids the question.
pub fn has_memory_policy() -> Option<bool> {
    let mut mode: libc::c_int = 0;
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel writes one int, which is ours; no nodes are asked for.
    let outcome = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) };
    (outcome == 0).then_some(mode != libc::MPOL_DEFAULT)
}

/// The size in bytes of the tmpfs mounted at `path`; `None` where there is none.
pub fn tmpfs_size(path: &Path) -> Option<u64> {
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
    // A tmpfs without a limit says 0.
    Some(answer.f_blocks.saturating_mul(u64::try_from(answer.f_bsize).ok()?)).filter(|size| *size > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_s_own() {
        // nproc is another reader of the same mask.
        let nproc = std::process::Command::new("nproc").env_remove("OMP_NUM_THREADS").output().unwrap();
        let nproc: u32 = String::from_utf8_lossy(&nproc.stdout).trim().parse().unwrap();
        let mask = mask().unwrap();
        assert_eq!(mask.iter().map(|word| word.count_ones()).sum::<u32>(), nproc);
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

    /// In a child, whose policy is no other test's.
    #[test]
    fn a_memory_policy_is_seen() {
        let Some(before) = has_memory_policy() else {
            return; // A container that forbids the question.
        };
        let answer = crate::system::child::run(std::time::Duration::from_secs(10), || {
            let policy = |mode: libc::c_int| {
                // SAFETY: no node mask is given.
                let outcome = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, 0usize, 0usize) };
                u8::from(outcome == 0 && has_memory_policy() == Some(true))
            };
            vec![policy(libc::MPOL_PREFERRED), policy(libc::MPOL_DEFAULT)]
        });
        assert_eq!((before, answer.unwrap()), (false, vec![1, 0]));
    }

    #[test]
    fn only_a_tmpfs_has_a_tmpfs_s_size() {
        assert_eq!(tmpfs_size(Path::new("/proc")), None);
        assert_eq!(tmpfs_size(Path::new("/nonexistent")), None);
        if std::fs::read_to_string("/proc/mounts").unwrap().contains(" /dev/shm tmpfs ") {
            assert!(tmpfs_size(Path::new("/dev/shm")).is_some());
        }
    }
}
