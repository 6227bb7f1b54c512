//! Two threads that see to it that no operation outlives its deadline or its group. The guard
//! looks at the device, at NCCL and at the control group, and breaks the group off. The
//! sentry calls neither CUDA nor NCCL: it ends the process where everything else hangs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use palingenesis::system::output::to_stderr;

use super::core::{Core, Flight};
use super::queue::Queue;
use super::sys::Status;
use crate::comm::control::Clock;
use crate::comm::{CommError, Op, Tag};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Between two of the sentry's.
const SENTRY: Duration = Duration::from_millis(250);

/// What the process ends with where nothing else ends it: worth another try (EX_TEMPFAIL).
const EXIT: i32 = 75;

/// Starts both.
///
/// # Errors
/// [`CommError::Own`]: no thread.
pub(super) fn start<Q: Queue>(core: &Arc<Core<Q>>) -> Result<(), CommError> {
    let (guarded, watched) = (Arc::clone(core), Arc::clone(core));
    let named = |name: &str| thread::Builder::new().name(name.to_owned());
    let failed = |error| CommError::Own(format!("cannot start a thread to watch NCCL: {error}"));
    named("nccl-guard").spawn(move || Guard::new(guarded).run()).map_err(failed)?;
    named("nccl-sentry").spawn(move || stand_sentry(&watched)).map_err(failed)?;
    Ok(())
}

struct Guard<Q: Queue> {
    core: Arc<Core<Q>>,
    clock: Clock,
    /// The oldest operation that is not over, and since when it is that.
    oldest: Option<(u64, Duration)>,
    /// The last one that was over.
    last: Option<(u64, Op, Tag)>,
}

impl<Q: Queue> Guard<Q> {
    fn new(core: Arc<Core<Q>>) -> Guard<Q> {
        Guard { core, clock: Clock::new(), oldest: None, last: None }
    }

    fn run(mut self) {
        // A device that cannot be entered says so at the first question.
        let _ = self.core.queue.enter();
        loop {
            if self.core.ended.load(Ordering::Acquire) || self.core.broken().is_some() {
                return;
            }
            self.clock.look();
            self.core.looks.fetch_add(1, Ordering::Release);
            // Also the pause until the next look.
            let heard = self.core.watch.verdict(LOOK).map(|error| self.core.here(error));
            // The rank may have come to its end meanwhile.
            if self.core.ended.load(Ordering::Acquire) {
                return;
            }
            if let Err(error) = heard.map_or_else(|| self.look(), Err) {
                // Others may have ended before this one looked.
                if !self.core.ended.load(Ordering::Acquire) {
                    self.core.break_off(error);
                }
                return;
            }
        }
    }

    /// Whether all is well.
    fn look(&mut self) -> Result<(), CommError> {
        while let Some(flight) = self.core.oldest() {
            match self.core.is_over(&flight) {
                Ok(true) => self.last = Some((flight.sequence, flight.op, flight.tag)),
                Ok(false) => {
                    self.judge(&flight)?;
                    break;
                }
                Err(error) => return Err(self.device_failed(&flight, &error.to_string())),
            }
        }
        match self.core.status_if_idle() {
            None | Some(Status::SUCCESS | Status::IN_PROGRESS) => Ok(()),
            Some(status) => {
                let doing = self.core.oldest().map_or_else(|| "its own work".to_owned(), |flight| flight.name());
                Err(self.core.nccl_failed(status, &doing))
            }
        }
    }

    /// An operation that is not over: whether it may take longer.
    fn judge(&mut self, flight: &Flight<Q::Marker>) -> Result<(), CommError> {
        let Flight { sequence, op, tag, .. } = *flight;
        let watch = &self.core.watch;
        let reached = self.core.queue.is_done(&flight.before);
        let reached = reached.map_err(|error| self.device_failed(flight, &error.to_string()))?;
        // Where it is not, the device still computes: what the others wait for is this rank.
        match self.last {
            _ if reached => watch.stand(sequence, op, tag, true),
            Some((sequence, op, tag)) => watch.stand(sequence, op, tag, false),
            None => {}
        }
        if reached && let Some((rank, host, theirs)) = watch.differs(sequence, op, tag) {
            let (by, by_host, ours) = (self.core.rank, self.core.host.clone(), flight.name());
            let why = "the operations differ".to_owned();
            return Err(CommError::Mismatch { rank, host, theirs, by, by_host, ours, why });
        }
        let now = self.clock.ran();
        let since = match self.oldest {
            Some((oldest, since)) if oldest == sequence => since,
            _ => {
                self.oldest = Some((sequence, now));
                now
            }
        };
        let after = self.core.limits.operation;
        if now.saturating_sub(since) < after {
            return Ok(());
        }
        let (rank, host) = (self.core.rank, &self.core.host);
        let who = match watch.waiting_for(sequence) {
            _ if !reached => format!("rank {rank} on {host} itself, whose device still does its own work before it"),
            Some(others) => others,
            None => "NCCL: all ranks are in it, as far as they said".to_owned(),
        };
        Err(CommError::Late { who, op: flight.name(), after })
    }

    fn device_failed(&self, flight: &Flight<Q::Marker>, why: &str) -> CommError {
        let (rank, host) = (self.core.rank, &self.core.host);
        CommError::Own(format!("the device of rank {rank} on {host} failed before {} was over: {why}", flight.name()))
    }
}

/// Until the group has ended in order.
fn stand_sentry<Q: Queue>(core: &Core<Q>) {
    let mut clock = Clock::new();
    let mut guard = (0, Duration::ZERO);
    let (last, limit) = (core.limits.last, core.limits.operation + core.limits.last);
    while !core.ended.load(Ordering::Acquire) {
        thread::sleep(SENTRY);
        clock.look();
        let (rank, host) = (core.rank, &core.host);
        if let Some((error, since)) = core.broken() {
            if since.elapsed() >= last {
                end_process(&format!("rank {rank} on {host}: {error}; it has not ended within {} s", last.as_secs()));
            }
            continue;
        }
        let looks = core.looks.load(Ordering::Acquire);
        if looks != guard.0 {
            guard = (looks, clock.ran());
        } else if clock.ran().saturating_sub(guard.1) >= limit {
            let seconds = limit.as_secs();
            end_process(&format!(
                "rank {rank} on {host}: CUDA or NCCL has not come back from a question for {seconds} s"
            ));
        }
    }
}

fn end_process(why: &str) {
    to_stderr(&format!("palingenesis-worker: error: {why}; the process is ended\n"));
    // SAFETY: takes a number, and does not come back.
    unsafe { libc::_exit(EXIT) }
}
