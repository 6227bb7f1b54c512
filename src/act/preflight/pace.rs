//! When to look again: at this node's own ranks, at the clock, at a port that was
//! refused.

use std::time::{Duration, Instant};

use super::{Leader, Ranks, Work};

/// Nobody waits longer than this at a time.
const TICK: Duration = Duration::from_millis(200);

/// Between two looks of a process that runs there is never more than this.
const STOPPED: Duration = Duration::from_secs(5);

/// The time in which this process ran: a job that is suspended stands still with all its
/// deadlines, and nobody is given up for it when it goes on.
#[derive(Debug)]
pub struct Clock {
    looked: Instant,
    stood: Duration,
}

impl Clock {
    /// From now on.
    pub fn new() -> Clock {
        Clock { looked: Instant::now(), stood: Duration::ZERO }
    }

    /// Now. To be called every few moments.
    pub fn now(&mut self) -> Instant {
        self.at(Instant::now())
    }

    fn at(&mut self, real: Instant) -> Instant {
        let gap = real.saturating_duration_since(self.looked);
        if gap > STOPPED {
            self.stood += gap;
        }
        self.looked = self.looked.max(real);
        self.looked.checked_sub(self.stood).unwrap_or(self.looked)
    }
}

/// How long to wait before the node's own ranks are looked at again: often at first, when
/// they come within milliseconds of each other, then less; and once they are here only
/// whether one of them died.
pub fn until_ranks(waited: Duration, here: bool) -> Duration {
    match waited.as_millis() {
        _ if here => TICK,
        0..50 => Duration::from_millis(1),
        50..1_000 => Duration::from_millis(5),
        1_000..10_000 => Duration::from_millis(20),
        _ => Duration::from_millis(100),
    }
}

/// How long to wait before work that has nothing to wait for is gone on with; and other
/// work too, whose maker has deadlines to look at.
pub fn until_work(began: Duration, has_fd: bool) -> Duration {
    if has_fd { TICK } else { until_ranks(began, false) }
}

/// How long to wait before a port that was refused is tried again. An eighth of the time
/// waited so far, so that a server that comes late costs little more than it is late, but
/// a second at most; never so little that all nodes together, each several times a
/// millisecond, keep rank 0's node busy with refusing. Spread by node, so that they do not
/// come all at once.
pub fn until_retry(waited: Duration, nodes: usize, node_rank: u32, attempt: u32) -> Duration {
    let least = Duration::from_micros(10).saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX));
    let pause = (waited / 8).max(least.max(Duration::from_millis(2))).min(Duration::from_secs(1));
    // Three quarters to five quarters of it: Knuth's multiplicative hash.
    let spread = node_rank.wrapping_mul(31).wrapping_add(attempt).wrapping_mul(2_654_435_761) >> 24;
    pause * (384 + spread) / 512
}

/// This node's own ranks, looked at now and then.
#[derive(Debug)]
pub struct OwnRanks {
    began: Instant,
    /// When to look next.
    pub due: Instant,
    /// All of them have come.
    pub here: bool,
    /// Why one of them cannot start, once it was seen.
    pub failed: Option<String>,
}

impl OwnRanks {
    /// Nothing is known of them.
    pub fn new(now: Instant) -> OwnRanks {
        OwnRanks { began: now, due: now, here: false, failed: None }
    }

    /// Looks, if it is time to.
    pub fn look(&mut self, now: Instant, leader: &mut dyn Leader) {
        if now < self.due || self.failed.is_some() {
            return;
        }
        match leader.ranks() {
            Ranks::Coming => {}
            Ranks::Here => self.here = true,
            Ranks::Failed(why) => self.failed = Some(why),
        }
        self.due = now + until_ranks(now.saturating_duration_since(self.began), self.here);
    }
}

/// What the leader began for a round.
pub struct Task {
    /// As the leader began it.
    pub work: Box<dyn Work>,
    began: Instant,
    /// When to go on with it.
    pub due: Instant,
}

impl Task {
    /// To be gone on with at once.
    pub fn new(work: Box<dyn Work>, now: Instant) -> Task {
        Task { work, began: now, due: now }
    }

    /// Goes on with it, if it is time to. The answer, once there is one.
    pub fn advance(&mut self, now: Instant) -> Option<Vec<u8>> {
        if now < self.due {
            return None;
        }
        let answer = self.work.advance();
        self.due = now + until_work(now.saturating_duration_since(self.began), self.work.fd().is_some());
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_stopped_has_not_waited_meanwhile() {
        let mut clock = Clock::new();
        let start = clock.looked;
        let seconds = Duration::from_secs;
        assert_eq!(clock.at(start + seconds(1)), start + seconds(1));
        assert_eq!(clock.at(start + seconds(5)), start + seconds(5));
        // Stopped for an hour.
        assert_eq!(clock.at(start + seconds(3605)), start + seconds(5));
        assert_eq!(clock.at(start + seconds(3607)), start + seconds(7));
    }

    #[test]
    fn pauses_grow_to_a_second_and_nodes_do_not_come_all_at_once() {
        let at = |seconds: f64, nodes, rank| until_retry(Duration::from_secs_f64(seconds), nodes, rank, 0);
        assert!(at(0.0, 4, 1) <= Duration::from_millis(3));
        assert!(at(0.0, 4000, 1) >= Duration::from_millis(30));
        assert!(at(4.0, 4, 1) <= Duration::from_millis(625));
        assert!(at(1e6, 4, 1) <= Duration::from_millis(1250));
        let all: std::collections::BTreeSet<Duration> = (1..100).map(|rank| at(600.0, 100, rank)).collect();
        assert!(all.len() > 50, "{all:?}");
    }
}
