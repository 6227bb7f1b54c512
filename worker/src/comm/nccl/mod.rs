//! Collectives between GPUs by NCCL, which is opened at run time. What NCCL cannot do is done
//! beside it: small things go over the sockets that are there already, every operation has a
//! number and a deadline, and who is gone is known by the control group. NCCL's own errors
//! never decide alone, and a hang of NCCL's is none of this program's.
//!
//! An operation is put on a stream of its own ([`Queue`]) and is over some time later. So an
//! error may come with a later call: the threads of `guard` see it, break the group off on
//! all ranks, and let everybody go who waits for the device. Numbers of a step are not
//! to be believed before the ranks have spoken over the sockets after it, which compares what
//! each of them has done here.

mod core;
mod gpu;
mod guard;
mod queue;
mod settings;
mod start;
mod sys;

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

pub use self::gpu::GpuQueue;
pub use self::queue::{Numbers, Queue, Reachable};
pub use self::settings::{describe, prepare};
pub use self::sys::{Config, Library, OLDEST, RawComm, Status, UniqueId};

use self::core::{Core, Flight};
use super::tcp::Tcp;
use super::{Collective, CommError, Exchange, Ongoing, Op, Tag};
use crate::engine::Precision;
use crate::shard::{self, ShardError};

/// How long the control group is asked who is gone before NCCL's word is taken.
const VERDICT: Duration = Duration::from_secs(1);

/// How often it is asked whether NCCL has put an operation on the stream, or the device has
/// done one: at first at once, then less and less often.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// How long is waited for what.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For an operation to be over, once it is the device's next.
    pub operation: Duration,
    /// For NCCL to start on all ranks.
    pub start: Duration,
    /// For NCCL to end in order.
    pub end: Duration,
    /// For the process to end after its group broke, before it is ended.
    pub last: Duration,
}

impl Limits {
    /// With what nobody needs to choose.
    #[must_use]
    pub fn new(operation: Duration, start: Duration) -> Limits {
        Limits { operation, start, end: Duration::from_secs(10), last: Duration::from_secs(15) }
    }
}

/// A rank's place in a group of GPUs.
pub struct Nccl<Q: Queue> {
    tcp: Tcp,
    own: Own<Q>,
    /// Where host memory's operations take place.
    scratch: Vec<f32>,
}

/// Goes away without an end in order only where the rank does, too.
struct Own<Q: Queue>(Arc<Core<Q>>);

impl<Q: Queue> Drop for Own<Q> {
    fn drop(&mut self) {
        if !self.0.ended.load(Ordering::Acquire) {
            self.0.leave();
        }
    }
}

impl<Q: Queue> std::fmt::Debug for Nccl<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

/// Brings the ranks of `tcp` together in NCCL. Where it fails the other ranks have been told.
///
/// # Errors
/// [`CommError::Refused`]: ranks with one GPU, with different versions, or settings that NCCL
/// refuses. [`CommError::Start`]: NCCL did not start on all ranks in time, or said why it
/// cannot. Else another rank's.
pub fn connect<Q: Queue>(tcp: Tcp, library: Library, queue: Q, limits: Limits) -> Result<Nccl<Q>, CommError> {
    let (mut tcp, queue) = (tcp, Arc::new(queue));
    let started = start::bring_together(&mut tcp, &library, &queue, limits).and_then(|comm| {
        let (watch, who) = (tcp.control().watch(), (tcp.rank(), tcp.host().to_owned()));
        let core = Arc::new(Core::new(library, comm, Arc::clone(&queue), watch, who, limits));
        guard::start(&core).map(|()| core)
    });
    match started {
        Ok(core) => Ok(Nccl { tcp, own: Own(core), scratch: Vec::new() }),
        Err(error) => {
            // A thread may hang in NCCL with this device.
            std::mem::forget(queue);
            Err(tcp.give_up(error))
        }
    }
}

/// Where an operation's numbers are.
#[derive(Clone, Copy)]
struct Place {
    address: *mut u8,
    len: usize,
    precision: Precision,
}

impl<Q: Queue> Nccl<Q> {
    /// The group of sockets, whose control group is this one's.
    #[must_use]
    pub fn tcp(&self) -> &Tcp {
        &self.tcp
    }

    /// Why the device let this rank go ([`crate::engine::EngineError::Stopped`]), with the
    /// operation that it was at; `None` where nothing is known within `limit`.
    #[must_use]
    pub fn verdict(&self, limit: Duration) -> Option<CommError> {
        let core = &self.own.0;
        match core.broken() {
            Some((error, _)) => Some(error.clone()),
            None => core.watch.verdict(limit).map(|error| core.here(error)),
        }
    }

    /// Goes away with the rank. What the device does is not waited for; the last words are, a
    /// second or so, for the others would else blame this rank.
    pub fn leave(self) {
        let Nccl { tcp, own, .. } = self;
        std::mem::forget(own);
        drop(tcp);
    }

    /// Ends in order, when all ranks have been at a barrier: NCCL first, within its limit; one
    /// that does not end is left. What is to be told of that, if anything.
    pub fn end(self) -> Option<String> {
        let Nccl { tcp, own, .. } = self;
        let core = Arc::clone(&own.0);
        core.ended.store(true, Ordering::Release);
        let (sender, receiver) = channel();
        let ending = Arc::clone(&core);
        let run = move || {
            let ended = end_in_order(&ending);
            // Who waited may have gone on.
            let _ = sender.send(ended);
        };
        let limit = core.limits.end;
        let told = match thread::Builder::new().name("nccl-end".to_owned()).spawn(run) {
            Err(error) => Some(format!("NCCL was not ended: no thread: {error}")),
            Ok(_) => match receiver.recv_timeout(limit) {
                Ok(Ok(())) => None,
                Ok(Err(status)) => Some(format!("NCCL did not end in order: {}", core.library.explain(status))),
                Err(_) => Some(format!("NCCL did not end within {} s, and was left", limit.as_secs())),
            },
        };
        tcp.end();
        told
    }

    /// Begins an operation on numbers of the device.
    fn begin(&mut self, op: Op, tag: Tag, place: Place) -> shard::Result<Arc<Flight<Q::Marker>>> {
        let core = &self.own.0;
        core.whole()?;
        let sequence = self.tcp.beside(op, tag, place.len as u64, place.precision.bytes() as u64);
        core.watch.begin(sequence, op, tag, place.len as u64);
        let before = core.queue.after_compute()?;
        let flight = Arc::new(Flight { sequence, op, tag, before, after: OnceLock::new() });
        // Before NCCL is called: where it does not come back the guard knows.
        core.push(Arc::clone(&flight));
        let (rank, world) = (self.tcp.rank() as usize, self.tcp.world_size() as usize);
        let called = core.access.with(|comm| {
            let Place { address, len, precision } = place;
            let (library, stream) = (&core.library, core.queue.stream());
            let dtype: c_int = if precision == Precision::F32 { sys::FLOAT32 } else { sys::BFLOAT16 };
            let part = len / world;
            let whole: *mut c_void = address.cast();
            // Within the numbers, or at their end where there are none.
            let own: *mut c_void = address.wrapping_add(rank * part * precision.bytes()).cast();
            // SAFETY: the addresses are those of `len` numbers of this type, which nobody else
            // touches before the operation is over; the communicator exists while it may be
            // called, and the stream as long as its queue.
            unsafe {
                match op {
                    Op::AllGather => (library.all_gather)(own, whole, part, dtype, comm, stream),
                    Op::ReduceScatter => (library.reduce_scatter)(whole, own, part, dtype, sys::SUM, comm, stream),
                    _ => (library.all_reduce)(whole, whole, len, dtype, sys::SUM, comm, stream),
                }
            }
        });
        // What was only begun is not on the stream yet, and a marker would come before it.
        let mut pause = PAUSE.0;
        let mut status = called;
        while status == Some(Status::IN_PROGRESS) {
            core.whole()?;
            status = core.status();
            if status == Some(Status::IN_PROGRESS) {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE.1);
            }
        }
        match status {
            Some(Status::SUCCESS) => {}
            Some(status) => return Err(core.break_off(core.nccl_failed(status, &flight.name())).into()),
            None => core.whole()?,
        }
        let after = core.queue.mark()?;
        let _ = flight.after.set(after);
        Ok(flight)
    }

    /// Waits until an operation is over.
    fn wait(&self, flight: &Flight<Q::Marker>) -> shard::Result<()> {
        let core = &self.own.0;
        let mut pause = PAUSE.0;
        loop {
            // First: an operation that was aborted is over, too.
            core.whole()?;
            if core.is_over(flight)? {
                // The guard may have seen an error of it just now.
                return match core.status() {
                    None | Some(Status::SUCCESS | Status::IN_PROGRESS) => Ok(core.whole()?),
                    Some(status) => Err(core.break_off(core.nccl_failed(status, &flight.name())).into()),
                };
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// What failed here the other ranks are told, in the words of an error, besides the control
    /// group's one line: all say the same of it.
    fn told<T>(&mut self, result: shard::Result<T>) -> shard::Result<T> {
        match result {
            Err(ShardError::Comm(error)) => Err(self.tcp.give_up(error).into()),
            result => result,
        }
    }

    fn operate(&mut self, op: Op, tag: Tag, numbers: Numbers<'_>) -> shard::Result<Ongoing> {
        let result = self.operate_on(op, tag, numbers);
        self.told(result)
    }

    fn operate_on(&mut self, op: Op, tag: Tag, numbers: Numbers<'_>) -> shard::Result<Ongoing> {
        let world = self.tcp.world_size() as usize;
        let check = |len: usize| {
            assert!(
                op == Op::AllReduce || len.is_multiple_of(world),
                "{} of {tag}: {len} numbers of {world} ranks",
                op.name()
            );
        };
        match numbers {
            Numbers::Device { address, len, precision } => {
                check(len);
                let address = std::ptr::with_exposed_provenance_mut(address as usize);
                let flight = self.begin(op, tag, Place { address, len, precision })?;
                Ok(Ongoing(flight.sequence))
            }
            Numbers::Host(values) => {
                check(values.len());
                let mut scratch = std::mem::take(&mut self.scratch);
                scratch.clear();
                scratch.extend_from_slice(values);
                let place =
                    Place { address: scratch.as_mut_ptr().cast(), len: scratch.len(), precision: Precision::F32 };
                match self.begin(op, tag, place).and_then(|flight| self.wait(&flight).map(|()| flight)) {
                    Ok(flight) => {
                        values.copy_from_slice(&scratch);
                        self.scratch = scratch;
                        Ok(Ongoing(flight.sequence))
                    }
                    Err(error) => {
                        // The operation may still write there.
                        std::mem::forget(scratch);
                        Err(error)
                    }
                }
            }
        }
    }
}

/// Waits until the communicator has nothing more to do, and frees it.
fn end_in_order<Q: Queue>(core: &Core<Q>) -> Result<(), Status> {
    let _ = core.queue.enter();
    let Some(comm) = core.access.take() else { return Ok(()) };
    // SAFETY: it exists, and nobody else calls it from here on.
    let mut status = unsafe { (core.library.finalize)(comm.0) };
    // Who waits for this has a limit; after it nobody needs an end.
    let began = Instant::now();
    while status == Status::IN_PROGRESS && began.elapsed() < core.limits.end {
        thread::sleep(PAUSE.1);
        // SAFETY: as above; given where to write the status.
        let asked = unsafe { (core.library.async_error)(comm.0, &raw mut status) };
        if asked != Status::SUCCESS {
            status = asked;
        }
    }
    if status != Status::SUCCESS {
        return Err(status);
    }
    // SAFETY: as above, and it is finalized.
    match unsafe { (core.library.destroy)(comm.0) } {
        Status::SUCCESS => Ok(()),
        status => Err(status),
    }
}

impl<Q: Queue> Exchange for Nccl<Q> {
    fn rank(&self) -> u32 {
        self.tcp.rank()
    }

    fn world_size(&self) -> u32 {
        self.tcp.world_size()
    }

    fn exchange(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.tcp.exchange(tag, own)
    }

    fn broadcast(&mut self, tag: Tag, root: u32, bytes: &mut Vec<u8>) -> Result<(), CommError> {
        self.tcp.broadcast(tag, root, bytes)
    }

    fn barrier(&mut self, tag: Tag) -> Result<(), CommError> {
        self.tcp.barrier(tag)
    }
}

impl<E: Reachable, Q: Queue> Collective<E> for Nccl<Q> {
    fn overlaps(&self) -> bool {
        E::DEVICE
    }

    fn all_gather(&mut self, engine: &E, tag: Tag, full: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        self.operate(Op::AllGather, tag, engine.numbers(full))
    }

    fn reduce_scatter(&mut self, engine: &E, tag: Tag, full: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        self.operate(Op::ReduceScatter, tag, engine.numbers(full))
    }

    fn all_reduce(&mut self, engine: &E, tag: Tag, values: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        self.operate(Op::AllReduce, tag, engine.numbers(values))
    }

    fn finish(&mut self, _engine: &E, ongoing: Ongoing) -> shard::Result<()> {
        let core = &self.own.0;
        if let Err(error) = core.whole() {
            return self.told(Err(error.into()));
        }
        // One that is not on the list is over.
        if let Some(flight) = core.flight(ongoing.0)
            && let Some(after) = flight.after.get()
        {
            core.queue.compute_waits(after)?;
        }
        Ok(())
    }
}
