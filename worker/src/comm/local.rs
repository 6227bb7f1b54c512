//! Ranks that are threads of one process: what tests and a world of one use. No deadline:
//! a thread that does not come is a mistake of the test.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::{Collective, CommError, Exchange, Ongoing, Tag};
use crate::engine::Engine;
use crate::shard::Result;

#[derive(Debug, Default)]
struct Meeting {
    /// Counts meetings that are over.
    over: u64,
    brought: Vec<Option<Vec<u8>>>,
    result: Arc<Vec<Vec<u8>>>,
}

/// One rank of a group within this process.
#[derive(Debug)]
pub struct Local {
    rank: u32,
    world: u32,
    meeting: Arc<(Mutex<Meeting>, Condvar)>,
}

impl Local {
    /// A group of `world` ranks.
    #[must_use]
    pub fn group(world: u32) -> Vec<Local> {
        let meeting = Arc::new((Mutex::new(Meeting::default()), Condvar::new()));
        (0..world).map(|rank| Local { rank, world, meeting: Arc::clone(&meeting) }).collect()
    }

    /// The only rank.
    #[must_use]
    pub fn alone() -> Local {
        Local { rank: 0, world: 1, meeting: Arc::default() }
    }

    fn meet(&self, own: &[u8]) -> Arc<Vec<Vec<u8>>> {
        let (meeting, changed) = &*self.meeting;
        let mut now = meeting.lock().unwrap_or_else(PoisonError::into_inner);
        now.brought.resize(self.world as usize, None);
        now.brought[self.rank as usize] = Some(own.to_vec());
        if now.brought.iter().all(Option::is_some) {
            now.result = Arc::new(now.brought.drain(..).flatten().collect());
            now.over += 1;
            changed.notify_all();
            return Arc::clone(&now.result);
        }
        let over = now.over;
        while now.over == over {
            now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        Arc::clone(&now.result)
    }
}

fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap_or_default()))
}

impl Exchange for Local {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world
    }

    fn exchange(&mut self, _tag: Tag, own: &[u8]) -> std::result::Result<Vec<Vec<u8>>, CommError> {
        Ok(self.meet(own).to_vec())
    }

    fn broadcast(&mut self, _tag: Tag, root: u32, bytes: &mut Vec<u8>) -> std::result::Result<(), CommError> {
        *bytes = self.meet(if root == self.rank { bytes } else { &[] })[root as usize].clone();
        Ok(())
    }

    fn barrier(&mut self, _tag: Tag) -> std::result::Result<(), CommError> {
        self.meet(&[]);
        Ok(())
    }
}

impl Local {
    /// The numbers of all ranks, by rank.
    fn numbers<E: Engine>(&self, engine: &E, own: E::View<'_>, len: usize) -> Result<Vec<Vec<f32>>> {
        let mut bytes = vec![0.0; len];
        engine.download(own, &mut bytes)?;
        Ok(self.meet(&to_bytes(&bytes)).iter().map(|bytes| numbers(bytes).collect()).collect())
    }

    fn total<E: Engine>(&self, engine: &E, values: E::View<'_>, len: usize) -> Result<Vec<f32>> {
        let mut sums = vec![0.0; len];
        for numbers in self.numbers(engine, values, len)? {
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        Ok(sums)
    }
}

impl<E: Engine> Collective<E> for Local {
    fn all_gather(&mut self, engine: &E, _tag: Tag, full: E::ViewMut<'_>) -> Result<Ongoing> {
        if self.world > 1 {
            let len = engine.view_len(engine.read(&full));
            let part = len / self.world as usize;
            let at = self.rank as usize * part;
            let all = self.numbers(engine, engine.part(engine.read(&full), at..at + part), part)?;
            engine.upload(full, &all.concat())?;
        }
        Ok(Ongoing(0))
    }

    fn reduce_scatter(&mut self, engine: &E, tag: Tag, full: E::ViewMut<'_>) -> Result<Ongoing> {
        self.all_reduce(engine, tag, full)
    }

    fn all_reduce(&mut self, engine: &E, _tag: Tag, values: E::ViewMut<'_>) -> Result<Ongoing> {
        if self.world > 1 {
            let len = engine.view_len(engine.read(&values));
            let sums = self.total(engine, engine.read(&values), len)?;
            engine.upload(values, &sums)?;
        }
        Ok(Ongoing(0))
    }

    fn finish(&mut self, _engine: &E, _ongoing: Ongoing) -> Result<()> {
        Ok(())
    }
}
