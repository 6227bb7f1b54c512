//! How the ranks come together in NCCL: what would make it hang or fail without words is
//! compared first, over the group that is there already; then NCCL is started with a deadline.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use palingenesis::config::printable;
use serde::{Deserialize, Serialize};

use super::core::Comm;
use super::queue::Queue;
use super::sys::{Config, Library, RawComm, Status, UniqueId, version_text};
use super::{Limits, VERDICT};
use crate::comm::control::Clock;
use crate::comm::tcp::Tcp;
use crate::comm::{CommError, Exchange, Op, Tag};

/// Between two looks at whether NCCL has started.
const LOOK: Duration = Duration::from_millis(5);

/// What a rank has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Statement {
    pub(super) host: String,
    /// Of NCCL.
    pub(super) version: c_int,
    /// NCCL's file.
    pub(super) path: String,
    /// See [`Queue::device`].
    pub(super) device: String,
}

/// Whether ranks with these can train together; all ranks come to the same words.
pub(super) fn compare(ranks: &[Statement]) -> Result<(), CommError> {
    let Some(first) = ranks.first() else { return Ok(()) };
    if let Some((rank, other)) = (0..).zip(ranks).find(|(_, rank)| rank.version != first.version) {
        let has = |rank: &Statement| format!("NCCL {} ({})", version_text(rank.version), printable(&rank.path));
        return Err(CommError::Refused(format!(
            "rank 0 on {} has {}, but rank {rank} on {} has {}: ranks of different versions hang; install the same NCCL \
             on all nodes",
            printable(&first.host),
            has(first),
            printable(&other.host),
            has(other)
        )));
    }
    let mut owners: HashMap<(&str, &str), u32> = HashMap::new();
    for (rank, statement) in (0..).zip(ranks) {
        if let Some(owner) = owners.insert((&statement.host, &statement.device), rank) {
            return Err(CommError::Refused(format!(
                "rank {owner} and rank {rank} on {} have the same GPU, {}: NCCL needs one for each rank; give each task its \
                 own (srun --gpus-per-task=1, or as many tasks on a node as GPUs), and see whether CUDA_VISIBLE_DEVICES \
                 is set by hand",
                printable(&statement.host),
                printable(&statement.device)
            )));
        }
    }
    Ok(())
}

/// Compares, starts, and waits for all.
///
/// # Errors
/// See [`super::connect`].
pub(super) fn bring_together<Q: Queue>(
    tcp: &mut Tcp,
    library: &Library,
    queue: &Arc<Q>,
    limits: Limits,
) -> Result<Comm, CommError> {
    let (rank, world) = (tcp.rank(), tcp.world_size());
    let host = tcp.host().to_owned();
    let path = library.path().display().to_string();
    let own = Statement { host: host.clone(), version: library.version, path, device: queue.device() };
    let own = serde_json::to_vec(&own).map_err(|error| CommError::Own(error.to_string()))?;
    let all = tcp.exchange(Tag::of("NCCL", 0), &own)?;
    let unread = |error: serde_json::Error| CommError::Start(format!("what ranks say of their NCCL: {error}"));
    let all: Vec<Statement> =
        all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>().map_err(unread)?;
    if let Err(refused) = compare(&all) {
        // All come to the same words, once all have read the others'.
        let _ = tcp.barrier(Tag::of("NCCL", 1));
        return Err(refused);
    }

    let who = format!("rank {rank} on {host}");
    let mut id = Vec::new();
    if rank == 0 {
        let new = library.unique_id().map_err(|status| not_started(library, &who, status))?;
        id = new.0.to_vec();
    }
    tcp.broadcast(Tag::of("NCCL", 0), 0, &mut id)?;
    let wrong = |_| CommError::Start(format!("rank 0's id of the NCCL group does not have its length on {who}"));
    let id = UniqueId(id.try_into().map_err(wrong)?);

    let (op, tag) = (Op::Barrier, Tag::of("NCCL start", 0));
    let sequence = tcp.beside(op, tag, 0, 0);
    let watch = tcp.control().watch();
    watch.begin(sequence, op, tag, 0);
    watch.stand(sequence, op, tag, true);
    let end = Arc::new(AtomicBool::new(false));
    let started = begin(library, queue, id, (rank, world), &end)?;
    let mut clock = Clock::new();
    let outcome = loop {
        clock.look();
        match started.recv_timeout(LOOK) {
            Ok(outcome) => break outcome,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CommError::Own(format!("the thread that starts NCCL on {who} has ended")));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let late = clock.ran() >= limits.start;
        if let Some(error) = watch.is_broken() {
            end.store(true, Ordering::Release);
            return Err(error);
        }
        if late {
            end.store(true, Ordering::Release);
            let all = || "all ranks are in it, as far as they said".to_owned();
            let waiting = watch.waiting_for(sequence).map_or_else(all, |others| format!("waiting for {others}"));
            return Err(CommError::Start(format!(
                "NCCL has not started on {who} within {} s: {waiting}; see whether NCCL_SOCKET_IFNAME and NCCL_IB_HCA \
                 name interfaces that reach the other nodes, and whether a firewall is between; NCCL_DEBUG=INFO says more",
                limits.start.as_secs()
            )));
        }
    };
    let comm = match outcome {
        Ok(comm) => comm,
        Err(Failed::Device(why)) => return Err(CommError::Start(format!("NCCL has not started on {who}: {why}"))),
        Err(Failed::Nccl(status)) if status.is_wrong_use() => return Err(not_started(library, &who, status)),
        // Another rank may be the reason.
        Err(Failed::Nccl(status)) => {
            return Err(watch.verdict(VERDICT).unwrap_or_else(|| not_started(library, &who, status)));
        }
    };
    watch.over(sequence);
    watch.stand(sequence, op, tag, false);
    // Who is not through is named here.
    tcp.barrier(Tag::of("NCCL", 0))?;
    Ok(comm)
}

fn not_started(library: &Library, who: &str, status: Status) -> CommError {
    let why = format!(
        "NCCL {} has not started on {who}: {}; NCCL_DEBUG=INFO says more",
        library.version_text(),
        library.explain(status)
    );
    if status.is_wrong_use() { CommError::Refused(why) } else { CommError::Start(why) }
}

enum Failed {
    Device(String),
    Nccl(Status),
}

type Started = Result<Comm, Failed>;

/// In a thread of its own: though it is told not to wait, it may.
fn begin<Q: Queue>(
    library: &Library,
    queue: &Arc<Q>,
    id: UniqueId,
    (rank, world): (u32, u32),
    end: &Arc<AtomicBool>,
) -> Result<std::sync::mpsc::Receiver<Started>, CommError> {
    let wrong = |_| CommError::Refused(format!("NCCL has no rank {rank} of {world}"));
    let (rank, world) = (c_int::try_from(rank).map_err(wrong)?, c_int::try_from(world).map_err(wrong)?);
    let (library, queue, end) = (library.clone(), Arc::clone(queue), Arc::clone(end));
    let (sender, receiver) = channel();
    let run = move || {
        let outcome = match queue.enter() {
            Ok(()) => start_one(&library, id, rank, world, &end),
            Err(error) => Err(Failed::Device(error.to_string())),
        };
        // Nobody waits any more where the start was given up.
        let _ = sender.send(outcome);
    };
    let named = thread::Builder::new().name("nccl-start".to_owned()).spawn(run);
    named.map_err(|error| CommError::Own(format!("cannot start a thread for NCCL: {error}")))?;
    Ok(receiver)
}

fn start_one(library: &Library, id: UniqueId, rank: c_int, world: c_int, end: &AtomicBool) -> Started {
    let mut comm: RawComm = std::ptr::null_mut();
    let mut config = Config::nonblocking();
    // SAFETY: given where to write the communicator, and a configuration, which is copied.
    let mut status = unsafe { (library.init)(&raw mut comm, world, id, rank, &raw mut config) };
    while status == Status::IN_PROGRESS {
        if end.load(Ordering::Acquire) {
            // SAFETY: it was made above, and only this thread knows it.
            return Err(Failed::Nccl(unsafe { (library.abort)(comm) }));
        }
        thread::sleep(LOOK);
        // SAFETY: as above; given where to write the status.
        let asked = unsafe { (library.async_error)(comm, &raw mut status) };
        if asked != Status::SUCCESS {
            status = asked;
        }
    }
    match status {
        Status::SUCCESS => Ok(Comm(comm)),
        failed => Err(Failed::Nccl(failed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(host: &str, version: c_int, device: &str) -> Statement {
        Statement { host: host.into(), version, path: "/usr/lib/libnccl.so.2".into(), device: device.into() }
    }

    #[test]
    fn ranks_that_cannot_train_together_are_named() {
        let good =
            [rank("a", 22809, "0000:17:00.0"), rank("a", 22809, "0000:2a:00.0"), rank("b", 22809, "0000:17:00.0")];
        assert_eq!(compare(&good), Ok(()));
        let text = |ranks: &[Statement]| compare(ranks).unwrap_err().to_string();
        let mixed = text(&[good[0].clone(), good[1].clone(), rank("b", 21805, "0000:17:00.0")]);
        assert!(
            mixed.starts_with("rank 0 on a has NCCL 2.28.9 (/usr/lib/libnccl.so.2), but rank 2 on b has NCCL 2.18.5")
        );
        let shared = text(&[good[0].clone(), good[2].clone(), good[2].clone()]);
        assert!(shared.starts_with("rank 1 and rank 2 on b have the same GPU, 0000:17:00.0: "), "{shared}");
    }
}
