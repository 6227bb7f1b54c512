//! The NUMA memory policy of this thread, which the program it becomes inherits.

use std::io;
use std::mem::size_of_val;

use crate::facts::CpuSet;

// linux/mempolicy.h.
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_BIND: libc::c_int = 2;
const MPOL_PREFERRED_MANY: libc::c_int = 5;
/// MPOL_F_STATIC_NODES and its like, which come back with the mode.
const MODE_FLAGS: libc::c_int = 7 << 13;

/// More nodes than any kernel has (CONFIG_NODES_SHIFT is 10 at most).
const NODES: usize = 4096;

/// A memory policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// The kernel's own.
    Default,
    /// These NUMA nodes while they have room.
    Prefer(CpuSet),
    /// These and no other.
    Bind(CpuSet),
    /// Another one, of that number.
    Other(i32),
}

/// What became of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Set,
    /// This kernel can prefer one node only, and there are several: the old one holds.
    NotOffered,
}

/// The thread's policy; `None` where the kernel does not say.
pub fn policy() -> Option<Policy> {
    let mut mode: libc::c_int = 0;
    let mut words = [0u64; NODES / 64];
    // SAFETY: the kernel writes one int and as many bits as the array has, both
    // ours; without an address and flags it is about this thread.
    let outcome = unsafe {
        let nowhere = std::ptr::null::<libc::c_void>();
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, words.as_mut_ptr(), NODES, nowhere, 0usize)
    };
    (outcome == 0).then(|| match mode & !MODE_FLAGS {
        MPOL_DEFAULT => Policy::Default,
        MPOL_PREFERRED | MPOL_PREFERRED_MANY => Policy::Prefer(CpuSet::of_words(&words)),
        MPOL_BIND => Policy::Bind(CpuSet::of_words(&words)),
        other => Policy::Other(other),
    })
}

/// Prefers these nodes.
///
/// # Errors
/// What the kernel says.
pub fn prefer(nodes: &CpuSet) -> io::Result<Outcome> {
    match set(MPOL_PREFERRED_MANY, nodes) {
        // Before Linux 5.15.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => prefer_as_of_old(nodes),
        other => other.map(|()| Outcome::Set),
    }
}

fn prefer_as_of_old(nodes: &CpuSet) -> io::Result<Outcome> {
    match nodes.len() {
        // Of several it would take the first.
        2.. => Ok(Outcome::NotOffered),
        _ => set(MPOL_PREFERRED, nodes).map(|()| Outcome::Set),
    }
}

/// Allows these nodes and no other.
///
/// # Errors
/// What the kernel says.
pub fn bind(nodes: &CpuSet) -> io::Result<Outcome> {
    set(MPOL_BIND, nodes).map(|()| Outcome::Set)
}

fn set(mode: libc::c_int, nodes: &CpuSet) -> io::Result<()> {
    if nodes.is_empty() {
        // The kernel would take it for another policy.
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let words = nodes.words();
    // The kernel reads one bit less than it is told.
    let bits = size_of_val(words) * 8 + 1;
    // SAFETY: the kernel reads the slice's bits, which live through the call.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, words.as_ptr(), bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of this thread, as the kernel prints it with each mapping.
    fn listed() -> String {
        let text = std::fs::read_to_string("/proc/thread-self/numa_maps").unwrap();
        // Behind it is nothing where nobody has touched the mapping.
        format!("{} ", text.lines().next().unwrap().split_once(' ').unwrap().1)
    }

    /// In threads of their own, whose policy is nobody else's. Node 0 is there on
    /// every machine; what several nodes do, one with one node cannot show.
    fn alone(check: impl FnOnce() + Send + 'static) {
        std::thread::spawn(move || match policy() {
            Some(Policy::Default) => check(),
            other => println!("skipped: the memory policy here is {other:?}"),
        })
        .join()
        .unwrap();
    }

    fn zero() -> CpuSet {
        CpuSet::from_iter([0])
    }

    #[test]
    fn a_preference_is_set_and_read() {
        alone(|| {
            assert_eq!(prefer(&zero()).unwrap(), Outcome::Set);
            assert_eq!(policy(), Some(Policy::Prefer(zero())));
            assert!(["prefer:0 ", "prefer (many):0 "].iter().any(|text| listed().starts_with(text)), "{}", listed());
        });
        // As on a kernel that does not know the newer one.
        alone(|| {
            assert_eq!(prefer_as_of_old(&zero()).unwrap(), Outcome::Set);
            assert_eq!(policy(), Some(Policy::Prefer(zero())));
            assert!(listed().starts_with("prefer:0 "), "{}", listed());
            assert_eq!(prefer_as_of_old(&CpuSet::from_iter([0, 1])).unwrap(), Outcome::NotOffered);
            assert_eq!(policy(), Some(Policy::Prefer(zero())));
        });
    }

    #[test]
    fn a_strict_one_is_set_and_read() {
        alone(|| {
            assert_eq!(bind(&zero()).unwrap(), Outcome::Set);
            assert_eq!(policy(), Some(Policy::Bind(zero())));
            assert!(listed().starts_with("bind:0 "), "{}", listed());
        });
    }

    #[test]
    fn nodes_that_are_not_there_are_an_error_and_change_nothing() {
        alone(|| {
            for nodes in [CpuSet::EMPTY, CpuSet::from_iter([1000]), CpuSet::from_iter([16_383])] {
                assert!(prefer(&nodes).is_err() && bind(&nodes).is_err(), "{nodes}");
            }
            assert_eq!(policy(), Some(Policy::Default));
        });
    }
}
