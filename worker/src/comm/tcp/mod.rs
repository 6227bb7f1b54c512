//! Collectives between processes, over sockets: TCP between hosts, Unix sockets on one. No
//! thread: whoever calls an operation does its work. Every wait ends: with what it waits
//! for, with the error of another rank, with the store's verdict, or at the deadline.
//!
//! Each rank has connections to the ranks 1, 2, 4, 8, … further on. The first of them is
//! the ring, in which large operations go around; small ones go over all, see `small`.
//! Both ends compare each operation's header. An error goes to all ranks, against the
//! direction of the connections, so that all of them say the same.

mod header;
mod link;
mod meet;
mod ring;
mod small;
mod socket;
mod turn;

use std::time::Duration;

use zerocopy::IntoBytes;

use self::header::{Dtype, Header};
use self::meet::Door;
use self::ring::Round;
use self::turn::{Group, Turn};
use super::control::{Clock, Control, Terms};
use super::{Collective, CommError, Exchange, Ongoing, Op, Tag};
use crate::engine::Cpu;
use crate::shard;

/// An all_reduce of at most this many bytes, times the ranks, is exchanged whole: fewer
/// messages, each of them still one segment or few.
const EXCHANGED: usize = 64 << 10;

/// This rank's place in a group of processes.
#[derive(Debug)]
pub struct Tcp {
    group: Group,
    timeout: Duration,
    sequence: u64,
    /// Of all operations that went another way so far.
    digest: u64,
    scratch: Vec<f32>,
    failed: Option<CommError>,
}

/// Brings the ranks together: at the store, then with each other. `timeout` is each
/// operation's.
///
/// # Errors
/// [`CommError::Start`] names who is missing or cannot be reached, and why.
pub fn connect(terms: &Terms, timeout: Duration) -> Result<Tcp, CommError> {
    let door = Door::open(terms)?;
    let (control, peers) = Control::join(terms, door.port())?;
    Ok(Tcp {
        group: meet::connections(terms, door, control, &peers)?,
        timeout,
        sequence: 0,
        digest: 0,
        scratch: Vec::new(),
        failed: None,
    })
}

impl Tcp {
    /// Ends in order: no rank takes this one for lost. All have been at a barrier before.
    pub fn end(self) {
        self.group.control.end();
    }

    /// The store, for what is not an operation.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.group.control
    }

    /// This rank's host.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.group.host
    }

    /// The number of an operation that goes another way than over these connections. The next
    /// one that goes over them compares what all ranks have said here: NCCL compares nothing.
    pub(super) fn beside(&mut self, op: Op, tag: Tag, count: u64, bytes: u64) -> u64 {
        self.sequence += 1;
        let parts = [self.digest, op as u64, tag.index.into(), count, bytes];
        let parts = parts.iter().flat_map(|part| part.to_le_bytes()).chain(tag.what.bytes());
        // FNV-1a, 64 bits.
        self.digest = parts
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        self.sequence
    }

    /// An operation that went another way has failed: the other ranks are told. Where it is
    /// only known that a rank has ended, what that rank itself was told is on its way.
    pub(super) fn give_up(&mut self, error: CommError) -> CommError {
        if let Some(failed) = &self.failed {
            return failed.clone();
        }
        let header = Header::new(Op::Barrier, Tag::of("end", 0), self.sequence, Dtype::Bytes, 0, 0);
        let mut turn = Turn { group: &mut self.group, header, clock: Clock::new(), timeout: self.timeout };
        let error = if matches!(error, CommError::Ended { .. }) { turn.here(error) } else { error };
        turn.tell(&error);
        self.failed = Some(error.clone());
        error
    }

    fn turn<T>(
        &mut self,
        op: Op,
        tag: Tag,
        (dtype, count): (Dtype, usize),
        root: u32,
        work: impl FnOnce(&mut Turn<'_>, &mut Vec<f32>) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.sequence += 1;
        let header = Header::new(op, tag, self.sequence, dtype, count as u64, root).after(self.digest);
        self.group.control.enter(self.sequence, op, tag, count as u64);
        let mut turn = Turn { group: &mut self.group, header, clock: Clock::new(), timeout: self.timeout };
        let result = turn.start().and_then(|()| work(&mut turn, &mut self.scratch));
        match &result {
            Ok(_) => self.group.control.leave(),
            // It stays in the recorder as an operation that was not left.
            Err(error) => {
                turn.tell(error);
                self.failed = Some(error.clone());
            }
        }
        result
    }

    /// The parts of the values as they go around.
    fn ring(&mut self, op: Op, tag: Tag, count: usize, values: &mut [f32]) -> Result<(), CommError> {
        let (rank, world) = (self.group.rank as usize, self.group.world as usize);
        self.turn(op, tag, (Dtype::F32, count), 0, |turn, scratch| {
            let part = values.len().div_ceil(world);
            let round = match op {
                Op::AllGather => Round { part, first: rank, steps: world - 1, added: 0 },
                Op::ReduceScatter => Round { part, first: rank + world - 1, steps: world - 1, added: world - 1 },
                _ => Round { part, first: rank + world - 1, steps: 2 * (world - 1), added: world - 1 },
            };
            if round.added > 0 {
                scratch.resize(ring::SCRATCH, 0.0);
            }
            if world == 1 { Ok(()) } else { turn.ring(values, scratch, round) }
        })
    }
}

impl Exchange for Tcp {
    fn rank(&self) -> u32 {
        self.group.rank
    }

    fn world_size(&self) -> u32 {
        self.group.world
    }

    fn exchange(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.turn(Op::Exchange, tag, (Dtype::Bytes, 0), 0, |turn, _| turn.all_to_all(own))
    }

    fn broadcast(&mut self, tag: Tag, root: u32, bytes: &mut Vec<u8>) -> Result<(), CommError> {
        assert!(root < self.group.world, "rank {root} is not below world_size {}", self.group.world);
        self.turn(Op::Broadcast, tag, (Dtype::Bytes, 0), root, |turn, _| turn.tree(bytes))
    }

    fn barrier(&mut self, tag: Tag) -> Result<(), CommError> {
        self.turn(Op::Barrier, tag, (Dtype::Bytes, 0), 0, |turn, _| turn.all_to_all(&[]).map(drop))
    }
}

impl Collective<Cpu> for Tcp {
    fn all_gather(&mut self, _engine: &Cpu, tag: Tag, full: &mut [f32]) -> shard::Result<Ongoing> {
        let world = self.group.world as usize;
        assert!(full.len().is_multiple_of(world), "all_gather of {tag}: {} numbers of {world} ranks", full.len());
        self.ring(Op::AllGather, tag, full.len() / world, full)?;
        Ok(Ongoing(self.sequence))
    }

    fn reduce_scatter(&mut self, _engine: &Cpu, tag: Tag, full: &mut [f32]) -> shard::Result<Ongoing> {
        let world = self.group.world as usize;
        assert!(full.len().is_multiple_of(world), "reduce_scatter of {tag}: {} numbers of {world} ranks", full.len());
        self.ring(Op::ReduceScatter, tag, full.len(), full)?;
        Ok(Ongoing(self.sequence))
    }

    fn all_reduce(&mut self, _engine: &Cpu, tag: Tag, values: &mut [f32]) -> shard::Result<Ongoing> {
        let count = values.len();
        if count * 4 * self.group.world as usize > EXCHANGED {
            self.ring(Op::AllReduce, tag, count, values)?;
            return Ok(Ongoing(self.sequence));
        }
        let own = values.as_bytes().to_vec();
        let all = self.turn(Op::AllReduce, tag, (Dtype::F32, count), 0, |turn, _| turn.all_to_all(&own))?;
        values.fill(0.0);
        for bytes in &all {
            let numbers = bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]));
            values.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        Ok(Ongoing(self.sequence))
    }

    fn finish(&mut self, _engine: &Cpu, _ongoing: Ongoing) -> shard::Result<()> {
        Ok(())
    }
}
