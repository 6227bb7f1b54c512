//! Large operations: each rank sends to the next and receives from the one before, so that
//! every byte goes over every connection once. What was received is sent on as soon as it
//! is there, not only when its part is complete.
//!
//! A part's sum begins at the rank after the one it belongs to and goes around: the same
//! order each time, and computed once, so that all ranks have the same bits.

use std::ops::Range;

use zerocopy::IntoBytes;

use super::header;
use super::turn::Turn;
use crate::comm::CommError;

/// Numbers that are received at once to be added: fits into a core's cache.
pub(super) const SCRATCH: usize = 64 << 10;

/// The most bytes received at once that are only kept: then sending has its turn.
const KEPT: usize = 1 << 20;

/// Which parts of the values go around.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    /// Numbers of a part; the last ones may be shorter or empty.
    pub(super) part: usize,
    /// What this rank sends first; then the part before it, and so on.
    pub(super) first: usize,
    /// How many it sends, and receives.
    pub(super) steps: usize,
    /// How many of the received ones are added; the others replace.
    pub(super) added: usize,
}

impl Round {
    /// The part that is sent in this step, and received in the one before.
    fn range(&self, step: usize, world: usize, len: usize) -> Range<usize> {
        let index = (self.first + world - step % world) % world;
        (index * self.part).min(len)..((index + 1) * self.part).min(len)
    }
}

/// How far one direction is.
#[derive(Debug, Default)]
struct Progress {
    /// Bytes of the header.
    head: usize,
    step: usize,
    /// Bytes within the step.
    at: usize,
}

impl Turn<'_> {
    /// Sends and receives the parts of `values`.
    pub(super) fn ring(&mut self, values: &mut [f32], scratch: &mut [f32], round: Round) -> Result<(), CommError> {
        let (world, len) = (self.group.world as usize, values.len());
        let range = |step: usize| round.range(step, world, len);
        let own = self.header.to_bytes();
        let mut theirs = [0; header::LENGTH];
        let (mut sent, mut got) = (Progress::default(), Progress::default());
        // Bytes at the beginning of scratch that are no whole number yet.
        let mut rest = 0;
        loop {
            // Steps that are complete, empty ones too.
            while sent.step < round.steps && sent.at == range(sent.step).len() * 4 {
                (sent.step, sent.at) = (sent.step + 1, 0);
            }
            while got.step < round.steps && got.at == range(got.step + 1).len() * 4 {
                (got.step, got.at) = (got.step + 1, 0);
            }
            let sending = sent.head < header::LENGTH || sent.step < round.steps;
            let receiving = got.head < header::LENGTH || got.step < round.steps;
            if !sending && !receiving {
                return Ok(());
            }

            // What is ready to go: of the first part all, of the others what has come.
            let ready = match sent.step {
                step if step == round.steps => 0..0,
                step if step == 0 || got.step >= step => range(step),
                step if got.step + 1 == step => range(step).start..range(step).start + got.at / 4,
                _ => 0..0,
            };
            let bytes = &values[ready].as_bytes()[sent.at..];
            let write = sent.head < header::LENGTH || !bytes.is_empty();
            let mut moved = 0;
            if write {
                moved = self.send(0, [&own[sent.head..], bytes])?;
                let head = moved.min(header::LENGTH - sent.head);
                sent.head += head;
                sent.at += moved - head;
            }

            if got.head < header::LENGTH {
                let more = self.receive(0, &mut theirs[got.head..])?;
                got.head += more;
                moved += more;
                if got.head == header::LENGTH {
                    self.check(0, &theirs)?;
                }
            } else if got.step < round.steps {
                let to = &mut values[range(got.step + 1)][got.at / 4..];
                if got.step < round.added {
                    let room = (to.len() * 4).min(size_of_val(scratch));
                    let more = self.receive(0, &mut scratch.as_mut_bytes()[rest..room])?;
                    moved += more;
                    let whole = (rest + more) / 4;
                    to.iter_mut().zip(&scratch[..whole]).for_each(|(sum, number)| *sum += number);
                    let end = rest + more;
                    rest = end % 4;
                    scratch.as_mut_bytes().copy_within(whole * 4..end, 0);
                    got.at += whole * 4;
                } else {
                    let to = &mut to.as_mut_bytes()[got.at % 4..];
                    let room = to.len().min(KEPT);
                    let more = self.receive(0, &mut to[..room])?;
                    moved += more;
                    got.at += more;
                }
            }
            if moved == 0 {
                self.wait(receiving.then_some(0), write.then_some(0))?;
            }
        }
    }
}
