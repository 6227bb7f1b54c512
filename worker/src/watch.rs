//! Ends this rank when its group is broken and it does not come to see it, for it computes
//! or waits for a file system: nothing that it does is of use any more, and until it ends
//! Slurm cannot start the training again. Not for a rank that is ending by itself.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use palingenesis::system::output::to_stderr;
use palingenesis_worker::comm::control::Watch;
use palingenesis_worker::train::TrainError;

/// Who waits in an operation sees it at once and has ended by then.
const PATIENCE: Duration = Duration::from_millis(1200);

/// Whether somebody has the last word already.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Watches from now on; `who` is this rank.
pub fn begin(watch: Watch, who: String) {
    let run = move || {
        let error = TrainError::from(watch.broken());
        thread::sleep(PATIENCE);
        if !ENDING.swap(true, SeqCst) {
            to_stderr(&format!(
                "palingenesis-worker: error: {who}: {error}; what this rank was doing meanwhile is broken off\n"
            ));
            // SAFETY: takes a number, and does not come back.
            unsafe { libc::_exit(i32::from(error.exit_code())) }
        }
    };
    // Without the thread it ends later.
    let _ = thread::Builder::new().name("watch".into()).spawn(run);
}

/// This rank ends by itself from here on. If it was too late, it has ended.
pub fn end() {
    if ENDING.swap(true, SeqCst) {
        loop {
            thread::park();
        }
    }
}
