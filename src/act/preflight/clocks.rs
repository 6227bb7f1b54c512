//! How far the nodes' clocks are from the one of rank 0's node, and how wrong that may
//! be: a node read its clock between the question to it and its own answer, whenever the
//! others answered.

use crate::plan::preflight::report::clock_offset;

/// How far a node's clock is ahead of the one of rank 0's node, and how wrong that may
/// be, in nanoseconds.
pub type Clock = (i64, u64);

/// A clock that is known less well is asked for again: so many nanoseconds are little
/// against the 0.1 s in which Slurm sees ranks end. What a busy node needs for its report
/// may be more.
const WELL_KNOWN: u64 = 5_000_000;

/// How often at most: each time costs a way there and back.
const AGAIN: u32 = 3;

/// The clocks, as rank 0's node knows them. Times are its own, in nanoseconds since 1970.
#[derive(Debug)]
pub struct Clocks {
    asked: u64,
    answered: Vec<Option<u64>>,
    known: Vec<Option<Clock>>,
    again: u32,
}

impl Clocks {
    /// Nothing is known but its own.
    pub fn new(nodes: usize) -> Clocks {
        let mut known = vec![None; nodes];
        if let Some(own) = known.first_mut() {
            *own = Some((0, 0));
        }
        Clocks { asked: 0, answered: Vec::new(), known, again: AGAIN }
    }

    /// The nodes are about to be asked something.
    pub fn ask(&mut self, now: u64) {
        self.asked = now;
        self.answered = vec![None; self.known.len()];
    }

    /// A node's answer has come.
    pub fn answered(&mut self, node: usize, now: u64) {
        if let Some(answered) = self.answered.get_mut(node) {
            *answered = Some(now);
        }
    }

    /// Between these two the node has answered.
    pub fn met(&self, node: usize) -> Option<(u64, u64)> {
        Some((self.asked, self.answered.get(node).copied().flatten()?))
    }

    /// A node's clock was at `said` meanwhile. What is known best is kept.
    pub fn said(&mut self, node: usize, said: u64) {
        // Ours may have been set back meanwhile.
        let Some((asked, answered)) = self.met(node).filter(|(asked, answered)| node > 0 && asked <= answered) else {
            return;
        };
        let (offset, uncertainty) = clock_offset(said, asked, answered);
        if let (Some(known), Ok(offset), Ok(uncertainty)) =
            (self.known.get_mut(node), i64::try_from(offset), u64::try_from(uncertainty))
            && known.is_none_or(|(_, known)| uncertainty < known)
        {
            *known = Some((offset, uncertainty));
        }
    }

    /// Whether to ask for them once more.
    pub fn again(&mut self) -> bool {
        let badly = self.known.iter().flatten().any(|(_, uncertainty)| *uncertainty > WELL_KNOWN);
        if badly && self.again > 0 {
            self.again -= 1;
            return true;
        }
        false
    }

    /// A node's clock.
    pub fn of(&self, node: usize) -> Option<Clock> {
        self.known.get(node).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const NOW: u64 = 1_796_035_785_000 * MS;

    #[test]
    fn a_node_that_answers_late_does_not_blur_the_others_clocks() {
        let mut clocks = Clocks::new(4);
        clocks.ask(NOW);
        // Its clock is 3 s behind, and it answers at once.
        clocks.answered(1, NOW + 2 * MS);
        clocks.said(1, NOW + MS - 3_000 * MS);
        // Right, after a while.
        clocks.answered(2, NOW + 120 * MS);
        clocks.said(2, NOW + 110 * MS);
        clocks.answered(0, NOW + 121 * MS);
        clocks.said(0, NOW + 60 * MS);
        assert_eq!(clocks.of(0), Some((0, 0)), "it is the same clock");
        assert_eq!(clocks.of(1), Some((-3_000 * MS as i64, MS)));
        assert_eq!(clocks.of(2), Some((50 * MS as i64, 60 * MS)), "the truth, 0, is within");
        assert_eq!((clocks.of(3), clocks.of(4), clocks.met(3)), (None, None, None));
    }

    #[test]
    fn a_clock_that_is_known_badly_is_asked_for_again_and_the_best_answer_is_kept() {
        let mut clocks = Clocks::new(3);
        let mut asked = 0;
        // The ways there and back, in ms: of node 1 never long.
        for (way, known) in [(120, 60), (40, 20), (90, 20), (8, 4)] {
            let now = NOW + asked * 1_000 * MS;
            clocks.ask(now);
            for (node, way) in [(1, 2), (2, way)] {
                clocks.answered(node, now + way * MS);
                clocks.said(node, now + way / 2 * MS + 7 * MS);
            }
            assert_eq!((clocks.of(1), clocks.of(2)), (Some((7 * MS as i64, MS)), Some((7 * MS as i64, known * MS))));
            asked += 1;
            assert_eq!(clocks.again(), asked < 4);
        }
        // Not for ever.
        let mut clocks = Clocks::new(2);
        clocks.ask(NOW);
        clocks.answered(1, NOW + 500 * MS);
        clocks.said(1, NOW);
        assert_eq!((0..9).filter(|_| clocks.again()).count(), 3);
        // Nor where nothing is known.
        assert!(!Clocks::new(2).again());
    }

    #[test]
    fn a_clock_that_was_set_meanwhile_is_not_believed_to_be_known_well() {
        let mut clocks = Clocks::new(2);
        clocks.ask(NOW);
        clocks.answered(1, NOW - MS);
        clocks.said(1, NOW);
        assert_eq!(clocks.of(1), None);
        clocks.ask(NOW);
        clocks.answered(1, NOW + 3_600_000 * MS);
        clocks.said(1, NOW);
        assert!(clocks.again());
        // What a node says may be anything.
        clocks.ask(NOW);
        clocks.answered(1, NOW + MS);
        clocks.said(1, u64::MAX);
        let before = clocks.of(1);
        assert_eq!(before, Some((-1_800_000 * MS as i64, 1_800_000 * MS)));
    }
}
