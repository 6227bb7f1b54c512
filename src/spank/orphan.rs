//! Whether the slurmstepd that forked this task still is. Where it was killed (by the OOM
//! killer, by hand), nobody tells srun of this node's tasks any more, nor of their end, and
//! what they write reaches nobody: a task that waits here for others would wait for nothing,
//! and srun after it.

use std::os::unix::process::parent_id;
use std::sync::atomic::{AtomicU32, Ordering};

/// Zero in slurmstepd itself.
static PARENT: AtomicU32 = AtomicU32::new(0);

/// Keeps who forked this task. Early: what comes before the start may take long.
pub fn keep_parent() {
    let _ = PARENT.compare_exchange(0, parent_id(), Ordering::Relaxed, Ordering::Relaxed);
}

/// Whether that one has ended: the kernel gives its children to another. In a pid
/// namespace of its own a task has parent 0 all along.
pub fn orphaned() -> bool {
    let kept = PARENT.load(Ordering::Relaxed);
    kept != 0 && kept != parent_id()
}

#[cfg(test)]
pub fn pretend() {
    PARENT.store(parent_id() + 1, Ordering::Relaxed);
}
