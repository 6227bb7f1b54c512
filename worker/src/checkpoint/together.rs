//! Work that takes as long as a file system takes, done by all ranks at once: they keep
//! talking meanwhile, so that no operation of `comm` comes to its deadline, and the first
//! failure stops the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{CheckpointError, Result};
use crate::comm::{CommError, Exchange, Tag};

/// How long ranks are silent at the most.
const TURN: Duration = Duration::from_millis(500);

/// What a rank says in a turn, before its result.
const BUSY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
/// It has said its result in an earlier turn.
const SAID: u8 = 3;

/// Runs `work` on all ranks and gives each all ranks' results. `work` ends soon after its
/// flag is set, which it is as soon as any rank's work has failed.
pub(super) fn together<T>(
    exchange: &mut dyn Exchange,
    tag: Tag,
    work: impl FnOnce(&AtomicBool) -> std::result::Result<T, String> + Send,
) -> std::result::Result<Vec<std::result::Result<T, String>>, CommError>
where
    T: Serialize + DeserializeOwned + Send,
{
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let stop = &stop;
        let worker = thread::Builder::new().name("checkpoint".into()).spawn_scoped(scope, move || {
            let _ = tell.send(message(work(stop)));
        });
        let worker = worker.map_err(|error| CommError::Own(format!("no thread could be started: {error}")))?;
        let outcome = take_turns(exchange, tag, &told, stop);
        stop.store(true, Ordering::Relaxed);
        // Its panic was told as a failure; the hook has printed it.
        let _ = worker.join();
        outcome
    })
}

fn message<T: Serialize>(outcome: std::result::Result<T, String>) -> Vec<u8> {
    let (kind, text) = match outcome.and_then(|result| serde_json::to_vec(&result).map_err(|error| error.to_string())) {
        Ok(json) => (DONE, json),
        Err(why) => (FAILED, why.into_bytes()),
    };
    let mut message = vec![kind];
    message.extend(text);
    message
}

fn take_turns<T: DeserializeOwned>(
    exchange: &mut dyn Exchange,
    tag: Tag,
    told: &mpsc::Receiver<Vec<u8>>,
    stop: &AtomicBool,
) -> std::result::Result<Vec<std::result::Result<T, String>>, CommError> {
    let mut results: Vec<Option<std::result::Result<T, String>>> = (0..exchange.world_size()).map(|_| None).collect();
    let mut own_said = false;
    loop {
        let own = match own_said {
            true => vec![SAID],
            false => match told.recv_timeout(TURN) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => vec![BUSY],
                Err(RecvTimeoutError::Disconnected) => message::<()>(Err("its thread has panicked".into())),
            },
        };
        own_said |= own != [BUSY];
        for (rank, said) in exchange.exchange(tag, &own)?.iter().enumerate() {
            let Some((kind, text)) = said.split_first() else { continue };
            let result = match *kind {
                DONE => serde_json::from_slice(text).map_err(|error| format!("its report is not understood: {error}")),
                FAILED => Err(String::from_utf8_lossy(text).into_owned()),
                _ => continue,
            };
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            results[rank] = Some(result);
        }
        if results.iter().all(Option::is_some) {
            return Ok(results.into_iter().flatten().collect());
        }
    }
}

/// A [`CheckpointError`] on its way to the other ranks.
#[derive(Serialize, Deserialize)]
enum Fault {
    Storage(String),
    Damaged(String),
    Refused(String),
    Busy(String),
}

/// What rank 0 found, on all ranks; theirs is not looked at. An error of rank 0 becomes an
/// error of all.
///
/// # Errors
/// Rank 0's, or that the ranks no longer reach each other.
pub fn agree<T>(exchange: &mut dyn Exchange, tag: Tag, own: Option<Result<T>>) -> Result<T>
where
    T: Serialize + DeserializeOwned,
{
    let mut bytes = Vec::new();
    if exchange.rank() == 0 {
        let verdict = match own.unwrap_or_else(|| Err(CheckpointError::Storage("rank 0 has no answer".into()))) {
            Ok(value) => Ok(value),
            Err(CheckpointError::Storage(text)) => Err(Fault::Storage(text)),
            Err(CheckpointError::Damaged(text)) => Err(Fault::Damaged(text)),
            Err(CheckpointError::Refused(text)) => Err(Fault::Refused(text)),
            Err(CheckpointError::Busy(text)) => Err(Fault::Busy(text)),
            // The others know it by themselves, and nothing can be told them.
            Err(error @ CheckpointError::Comm(_)) => return Err(error),
        };
        bytes = serde_json::to_vec(&verdict).map_err(|error| CheckpointError::Storage(error.to_string()))?;
    }
    exchange.broadcast(tag, 0, &mut bytes)?;
    let verdict: std::result::Result<T, Fault> = serde_json::from_slice(&bytes)
        .map_err(|error| CheckpointError::Storage(format!("rank 0's answer is not understood: {error}")))?;
    if verdict.is_err() {
        // All know it before the first one ends: none is to take that for the reason.
        let _ = exchange.barrier(tag);
    }
    verdict.map_err(|fault| match fault {
        Fault::Storage(text) => CheckpointError::Storage(text),
        Fault::Damaged(text) => CheckpointError::Damaged(text),
        Fault::Refused(text) => CheckpointError::Refused(text),
        Fault::Busy(text) => CheckpointError::Busy(text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::local::Local;

    const TAG: Tag = Tag::of("checkpoint", 1);

    fn on_all<T: Send>(world: u32, run: impl Fn(&mut Local) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> =
                Local::group(world).into_iter().map(|mut local| scope.spawn(move || run(&mut local))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_get_all_results_in_the_order_of_the_ranks_however_long_each_takes() {
        let all = on_all(3, |local| {
            let rank = local.rank();
            together(local, TAG, move |_| {
                thread::sleep(Duration::from_millis(600 * u64::from(rank)));
                Ok(rank)
            })
            .unwrap()
        });
        assert_eq!(all, vec![vec![Ok(0), Ok(1), Ok(2)]; 3]);
    }

    #[test]
    fn the_first_failure_stops_the_others_and_all_know_it() {
        let all = on_all(2, |local| {
            let rank = local.rank();
            together(local, TAG, move |stop| {
                if rank == 1 {
                    return Err::<u32, _>("disk full".to_string());
                }
                while !stop.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(5));
                }
                Err("stopped".into())
            })
            .unwrap()
        });
        assert_eq!(all, vec![vec![Err("stopped".to_string()), Err("disk full".to_string())]; 2]);
    }

    #[test]
    fn a_panic_in_the_work_is_a_failure_that_all_know() {
        let all = on_all(2, |local| {
            let rank = local.rank();
            together(local, TAG, move |_| {
                assert!(rank == 0, "on purpose");
                Ok(7)
            })
            .unwrap()
        });
        assert_eq!(all, vec![vec![Ok(7), Err("its thread has panicked".to_string())]; 2]);
    }

    #[test]
    fn what_rank_0_refuses_is_refused_on_all_ranks() {
        let all = on_all(3, |local| {
            let own = (local.rank() == 0).then(|| Err::<u32, _>(CheckpointError::Refused("keep 0".into())));
            agree(local, TAG, own).unwrap_err().to_string()
        });
        assert_eq!(all, vec!["keep 0"; 3]);
    }
}
