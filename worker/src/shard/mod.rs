//! Each rank's part of every unit, ZeRO-3: gathered before use, given back after; gradients
//! are summed into the part they belong to.

use std::ops::Range;

/// How a unit's flat buffer is divided: into world_size parts of equal length, the last
/// ones shorter or empty; what is missing is padding in memory, never on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Numbers in the unit.
    pub len: usize,
    /// Ranks.
    pub world: usize,
}

impl Division {
    /// Of each part, with padding.
    #[must_use]
    pub fn part(&self) -> usize {
        self.len.div_ceil(self.world.max(1))
    }

    /// Of the buffer into which all parts are gathered.
    #[must_use]
    pub fn padded(&self) -> usize {
        self.part() * self.world
    }

    /// What a rank holds of the unit, without padding; may be empty.
    #[must_use]
    pub fn of(&self, rank: usize) -> Range<usize> {
        let part = self.part();
        (rank * part).min(self.len)..((rank + 1) * part).min(self.len)
    }
}
