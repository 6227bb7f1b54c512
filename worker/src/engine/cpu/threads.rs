//! The threads of this process that operations are divided among. How work is divided
//! must never decide what comes out: no sum may depend on how many threads there are.

use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

/// Smaller work than this many simple steps is not worth waking a thread for.
const WORTH_IT: usize = 16 * 1024;

/// A pool, or only the caller.
#[derive(Debug, Clone)]
pub(super) struct Threads {
    pool: Option<Arc<rayon::ThreadPool>>,
}

impl Threads {
    /// `None`: as many as the CPUs this process may run on, one pool for all who ask so.
    pub(super) fn new(count: Option<usize>) -> Threads {
        static ALL: OnceLock<Threads> = OnceLock::new();
        match count {
            Some(count) => Threads::own(count),
            None => {
                let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
                ALL.get_or_init(|| Threads::own(cpus())).clone()
            }
        }
    }

    /// Where the system gives no more threads the caller computes alone.
    fn own(count: usize) -> Threads {
        let pool = (count > 1)
            .then(|| rayon::ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("compute {i}")).build())
            .and_then(std::result::Result::ok);
        Threads { pool: pool.map(Arc::new) }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Into how many pieces to cut work of so many simple steps.
    pub(super) fn pieces(&self, steps: usize) -> usize {
        (steps / WORTH_IT).clamp(1, self.count())
    }

    /// How large a piece of `units` is, each of which takes so many simple steps.
    pub(super) fn piece(&self, units: usize, steps: usize) -> usize {
        units.div_ceil(self.pieces(units.saturating_mul(steps))).max(1)
    }

    /// Does `work` on all tasks, in any order.
    pub(super) fn run<T: Send>(&self, tasks: impl Iterator<Item = T>, work: impl Fn(T) + Send + Sync) {
        match &self.pool {
            None => tasks.for_each(work),
            Some(pool) => {
                let mut tasks: Vec<T> = tasks.collect();
                match tasks.len() {
                    0 | 1 => tasks.drain(..).for_each(work),
                    _ => pool.install(|| tasks.into_par_iter().with_max_len(1).for_each(work)),
                }
            }
        }
    }
}
