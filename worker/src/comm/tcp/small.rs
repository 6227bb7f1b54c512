//! Small operations: few messages count more than few bytes.
//!
//! All ranks' bytes come to all in ceil(log2 world) rounds: in each, a rank sends what it
//! has to the rank 1, 2, 4, … further on and has twice as much after it (Bruck et al.,
//! <https://doi.org/10.1109/71.642949>). A broadcast goes over the same connections as a tree.

use super::header;
use super::turn::{Sending, Turn};
use crate::comm::CommError;

/// Bytes of a length.
const LENGTH: usize = 8;

impl Turn<'_> {
    /// Every rank's bytes, by rank.
    pub(super) fn all_to_all(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let (rank, world) = (self.group.rank as usize, self.group.world as usize);
        // Of this rank, the one before, and so on.
        let mut blocks: Vec<Vec<u8>> = vec![own.to_vec()];
        for round in 0..self.group.outs.len() {
            let count = blocks.len().min(world - blocks.len());
            let frame = self.frame(&blocks[..count]);
            let mut sending = Sending { out: round, bytes: &frame };
            let come = self.fetch_blocks(round, count, &mut sending)?;
            self.finish(&mut sending)?;
            blocks.extend(come);
        }
        blocks.reverse();
        // Now the last one is this rank's.
        blocks.rotate_left((world - 1 - rank) % world);
        Ok(blocks)
    }

    /// The root's bytes on all ranks.
    pub(super) fn tree(&mut self, bytes: &mut Vec<u8>) -> Result<(), CommError> {
        let (rank, world) = (self.group.rank as usize, self.group.world as usize);
        // As if the root were 0: rank v has them from v without its highest bit.
        let place = (rank + world - self.header.root as usize) % world;
        let mut first = 0;
        if place > 0 {
            let from = place.ilog2() as usize;
            let come = self.fetch_blocks(from, 1, &mut Sending { out: 0, bytes: &[] })?;
            *bytes = come.into_iter().next().unwrap_or_default();
            first = from + 1;
        }
        let frame = self.frame(std::slice::from_ref(bytes));
        for out in (first..self.group.outs.len()).filter(|out| place + (1 << out) < world) {
            self.finish(&mut Sending { out, bytes: &frame })?;
        }
        Ok(())
    }

    /// Header, lengths, bytes.
    fn frame(&self, blocks: &[Vec<u8>]) -> Vec<u8> {
        let mut frame = self.header.to_bytes().to_vec();
        blocks.iter().for_each(|block| frame.extend((block.len() as u64).to_le_bytes()));
        blocks.iter().for_each(|block| frame.extend(block));
        frame
    }

    fn fetch_blocks(&mut self, from: usize, count: usize, sending: &mut Sending) -> Result<Vec<Vec<u8>>, CommError> {
        let mut head = [0; header::LENGTH];
        self.fetch(from, &mut head, sending)?;
        self.check(from, &head)?;
        let mut lengths = vec![0; count * LENGTH];
        self.fetch(from, &mut lengths, sending)?;
        let mut blocks = Vec::with_capacity(count);
        for length in lengths.chunks_exact(LENGTH) {
            let length = length.iter().rev().fold(0, |sum: u64, byte| (sum << 8) | u64::from(*byte));
            let mut block = Vec::new();
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            block.try_reserve_exact(length).map_err(|_| {
                let rank = self.group.ins[from].rank;
                CommError::Own(format!("no memory for {length} bytes from rank {rank} in {}", self.header.name()))
            })?;
            block.resize(length, 0);
            self.fetch(from, &mut block, sending)?;
            blocks.push(block);
        }
        Ok(blocks)
    }
}
