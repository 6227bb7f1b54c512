//! What the rank and the threads beside it know together of one NCCL group: the communicator
//! and who may call it, the operations that are not over, and why the group is broken. No
//! lock is held while CUDA or NCCL is called: either may never come back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::queue::Queue;
use super::sys::{Library, RawComm, Status};
use super::{Limits, VERDICT};
use crate::comm::control::{Watch, operation};
use crate::comm::{CommError, Op, Tag};
use crate::engine;

/// How long a call that is under way is waited for before the communicator is aborted under it,
/// which is what NCCL's abort is for (NCCL's user guide, "Fault Tolerance").
const UNDER_WAY: Duration = Duration::from_secs(1);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// ncclComm_t, on its way between threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comm(pub(super) RawComm);

// SAFETY: NCCL takes calls for a communicator from any thread; who may call is `Access`'s.
unsafe impl Send for Comm {}

/// A communicator, as long as it may be called, and by one thread at a time: even the question
/// for its status is not for several (NCCL, src/init.cc, ncclCommGetAsyncError ends what the
/// last call began). Only the abort may come while another call is under way.
#[derive(Debug)]
pub(super) struct Access {
    /// And whether a call is under way.
    comm: Mutex<(Option<Comm>, bool)>,
    idle: Condvar,
}

impl Access {
    pub(super) fn new(comm: Comm) -> Access {
        Access { comm: Mutex::new((Some(comm), false)), idle: Condvar::new() }
    }

    /// Calls with it, when nobody else does; `None`: nobody may any more.
    pub(super) fn with<T>(&self, call: impl FnOnce(RawComm) -> T) -> Option<T> {
        let comm = {
            let state = lock(&self.comm);
            let waited = self.idle.wait_while(state, |(comm, busy)| *busy && comm.is_some());
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            let comm = state.0?;
            state.1 = true;
            comm
        };
        Some(self.call(comm, call))
    }

    /// The same, unless somebody else calls now.
    pub(super) fn with_idle<T>(&self, call: impl FnOnce(RawComm) -> T) -> Option<T> {
        let comm = {
            let mut state = lock(&self.comm);
            let comm = state.0.filter(|_| !state.1)?;
            state.1 = true;
            comm
        };
        Some(self.call(comm, call))
    }

    fn call<T>(&self, comm: Comm, call: impl FnOnce(RawComm) -> T) -> T {
        let result = call(comm.0);
        lock(&self.comm).1 = false;
        self.idle.notify_all();
        result
    }

    /// From here on nobody may but the caller, who gets it; the first one only.
    pub(super) fn take(&self) -> Option<Comm> {
        let mut state = lock(&self.comm);
        let comm = state.0.take();
        // Who waits for his turn sees that there is none.
        self.idle.notify_all();
        let waited = self.idle.wait_timeout_while(state, UNDER_WAY, |(_, busy)| *busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        comm
    }
}

/// An operation that was begun.
#[derive(Debug)]
pub(super) struct Flight<M> {
    pub(super) sequence: u64,
    pub(super) op: Op,
    pub(super) tag: Tag,
    /// The device has come to it.
    pub(super) before: M,
    /// It is over. Not there as long as NCCL is being told to do it.
    pub(super) after: OnceLock<M>,
}

impl<M> Flight<M> {
    /// "all_gather #8812 of block 17".
    pub(super) fn name(&self) -> String {
        operation(self.op.name(), self.sequence, self.tag.what, self.tag.index)
    }
}

/// See the module.
pub(super) struct Core<Q: Queue> {
    pub(super) library: Library,
    pub(super) access: Access,
    pub(super) queue: Arc<Q>,
    pub(super) watch: Watch,
    pub(super) rank: u32,
    pub(super) host: String,
    pub(super) limits: Limits,
    /// Oldest first: the device does them in this order.
    flights: Mutex<VecDeque<Arc<Flight<Q::Marker>>>>,
    broken: OnceLock<(CommError, Instant)>,
    /// Nothing is to be watched any more.
    pub(super) ended: AtomicBool,
    /// Counts the guard's looks.
    pub(super) looks: AtomicU64,
}

impl<Q: Queue> Core<Q> {
    pub(super) fn new(
        library: Library,
        comm: Comm,
        queue: Arc<Q>,
        watch: Watch,
        (rank, host): (u32, String),
        limits: Limits,
    ) -> Core<Q> {
        Core {
            library,
            access: Access::new(comm),
            queue,
            watch,
            rank,
            host,
            limits,
            flights: Mutex::default(),
            broken: OnceLock::new(),
            ended: AtomicBool::new(false),
            looks: AtomicU64::new(0),
        }
    }

    /// Why the group is of no more use, and since when.
    pub(super) fn broken(&self) -> Option<&(CommError, Instant)> {
        self.broken.get()
    }

    /// A group that is broken begins and finishes nothing.
    pub(super) fn whole(&self) -> Result<(), CommError> {
        match self.broken() {
            Some((error, _)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(super) fn push(&self, flight: Arc<Flight<Q::Marker>>) {
        lock(&self.flights).push_back(flight);
    }

    /// The one that the device does now, or is to do next.
    pub(super) fn oldest(&self) -> Option<Arc<Flight<Q::Marker>>> {
        lock(&self.flights).front().cloned()
    }

    /// The one with this number, if it is not known to be over.
    pub(super) fn flight(&self, sequence: u64) -> Option<Arc<Flight<Q::Marker>>> {
        lock(&self.flights).iter().find(|flight| flight.sequence == sequence).cloned()
    }

    /// Whether an operation is over; where it is, it and those before it are taken off the list.
    pub(super) fn is_over(&self, flight: &Flight<Q::Marker>) -> engine::Result<bool> {
        let Some(after) = flight.after.get() else { return Ok(false) };
        if !self.queue.is_done(after)? {
            return Ok(false);
        }
        loop {
            let mut flights = lock(&self.flights);
            if flights.front().is_none_or(|first| first.sequence > flight.sequence) {
                return Ok(true);
            }
            let done = flights.pop_front();
            drop(flights);
            if let Some(done) = done {
                self.watch.over(done.sequence);
                self.watch.stand(done.sequence, done.op, done.tag, false);
            }
        }
    }

    /// NCCL's word for how the communicator is; `None`: nobody may call it any more.
    pub(super) fn status(&self) -> Option<Status> {
        self.access.with(|comm| self.ask(comm))
    }

    /// The same, unless somebody calls it now.
    pub(super) fn status_if_idle(&self) -> Option<Status> {
        self.access.with_idle(|comm| self.ask(comm))
    }

    fn ask(&self, comm: RawComm) -> Status {
        let mut status = Status::SUCCESS;
        // SAFETY: `Access` lets no two threads call it, and it exists as long as one may; given
        // where to write the status.
        match unsafe { (self.library.async_error)(comm, &raw mut status) } {
            Status::SUCCESS => status,
            failed => failed,
        }
    }

    /// NCCL says that it failed. It often only means that another rank is gone, which the
    /// control group knows better; where that knows nothing, NCCL is believed.
    pub(super) fn nccl_failed(&self, status: Status, doing: &str) -> CommError {
        let explained = self.library.explain(status);
        self.watch.verdict(VERDICT).map_or_else(
            || {
                let (rank, host) = (self.rank, &self.host);
                CommError::Own(format!(
                    "NCCL failed on rank {rank} on {host} in {doing}: {explained}; NCCL_DEBUG=INFO says more"
                ))
            },
            |verdict| self.here(verdict),
        )
    }

    /// What the control group says, as this rank tells it: what is known of the lost rank may
    /// be a second old.
    pub(super) fn here(&self, error: CommError) -> CommError {
        match (error, self.oldest()) {
            (CommError::Lost { rank, host, why, op }, Some(own)) if op != own.name() => {
                CommError::Lost { rank, host, why, op: format!("{}, when last heard of in {op}", own.name()) }
            }
            (error, _) => error,
        }
    }

    /// The group is broken, for the first cause that is given. Everybody is told, who waits for
    /// the device is let go, and the communicator is aborted by a thread of its own, for the
    /// abort may hang like everything else. Comes back at once, with the cause that holds.
    pub(super) fn break_off(self: &Arc<Self>, error: CommError) -> CommError {
        if self.broken.set((error.clone(), Instant::now())).is_ok() {
            // First: who is let go may end the process. Does nothing where the control group
            // knew it before.
            self.watch.break_off(error);
            self.queue.stop();
            self.abort();
        }
        self.broken().map_or_else(|| CommError::Own("the group is broken".to_owned()), |(error, _)| error.clone())
    }

    /// The rank goes away without an end in order: the others learn why elsewhere.
    pub(super) fn leave(self: &Arc<Self>) {
        let error = CommError::Own("this rank has left its group".to_owned());
        if self.broken.set((error, Instant::now())).is_ok() {
            self.queue.stop();
            self.abort();
        }
    }

    fn abort(self: &Arc<Self>) {
        let core = Arc::clone(self);
        let run = move || {
            let _ = core.queue.enter();
            if let Some(comm) = core.access.take() {
                // SAFETY: it exists, and nobody calls it from here on; who is in a call still
                // is got out of it by this.
                let _ = unsafe { (core.library.abort)(comm.0) };
            }
            // Memory that the device may still write to is not given back.
            std::mem::forget(core);
        };
        // Without the thread the process still ends, see the guard.
        let _ = thread::Builder::new().name("nccl-abort".to_owned()).spawn(run);
    }
}
