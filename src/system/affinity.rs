//! The CPUs on which this thread may run.

use std::io;
use std::mem::size_of_val;

use crate::facts::CpuSet;

/// Room for 16,384 CPUs: the kernel refuses a mask shorter than its own.
const WORDS: usize = 256;

/// The thread's affinity mask.
pub fn mask() -> Option<CpuSet> {
    let mut words = [0u64; WORDS];
    // SAFETY: pointer and length are those of a live array; 0 is this thread.
    let outcome = unsafe { libc::sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr().cast()) };
    (outcome == 0).then(|| CpuSet::of_words(&words))
}

/// Sets the mask, whole or not at all: the kernel would take a part of it where
/// a cpuset or an offline CPU leaves no more.
///
/// # Errors
/// What the kernel says, or that it granted a part only.
pub fn set_mask(cpus: &CpuSet) -> io::Result<()> {
    let before = mask();
    set(cpus)?;
    let granted = mask();
    if granted.as_ref() == Some(cpus) {
        return Ok(());
    }
    if let Some(before) = before {
        set(&before)?;
    }
    let granted = granted.map_or_else(|| "none that can be read".into(), |granted| granted.to_string());
    Err(io::Error::other(format!("the kernel grants {granted} of them only")))
}

fn set(cpus: &CpuSet) -> io::Result<()> {
    let words = cpus.words();
    // SAFETY: pointer and length are those of a live slice, which is only read; 0 is this thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(words), words.as_ptr().cast()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_nproc_says() {
        let nproc = std::process::Command::new("nproc").env_remove("OMP_NUM_THREADS").output().unwrap();
        let nproc: u32 = String::from_utf8_lossy(&nproc.stdout).trim().parse().unwrap();
        assert_eq!(mask().map(|mask| mask.len()), Some(nproc));
    }

    /// As the kernel itself lists it, of this thread.
    fn listed() -> CpuSet {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        CpuSet::parse(text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap()).unwrap()
    }

    /// In a thread of its own, whose mask is nobody else's.
    #[test]
    fn a_mask_is_set_whole_or_not_at_all() {
        std::thread::spawn(|| {
            let all = listed();
            assert_eq!(mask().as_ref(), Some(&all));
            let one = CpuSet::from_iter(all.iter().take(1));
            set_mask(&one).unwrap();
            assert_eq!((mask(), listed()), (Some(one.clone()), one.clone()));
            // A CPU that this machine does not have, beside one that it has, and alone.
            let beyond = all.or(&CpuSet::from_iter([4000]));
            let error = set_mask(&beyond).unwrap_err().to_string();
            assert_eq!(error, format!("the kernel grants {all} of them only"));
            assert_eq!(mask(), Some(one.clone()));
            assert!(set_mask(&CpuSet::from_iter([4000])).is_err() && set_mask(&CpuSet::EMPTY).is_err());
            assert_eq!(mask(), Some(one));
            set_mask(&all).unwrap();
            assert_eq!(listed(), all);
        })
        .join()
        .unwrap();
    }
}
