//! Ranks that are threads of one process: what tests and a world of one use. No deadline:
//! a thread that does not come is a mistake of the test.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::{Collective, CommError, Exchange, Tag};
use crate::engine::Cpu;

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

    fn exchange(&mut self, _tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(self.meet(own).to_vec())
    }

    fn broadcast(&mut self, _tag: Tag, root: u32, bytes: &mut Vec<u8>) -> Result<(), CommError> {
        *bytes = self.meet(if root == self.rank { bytes } else { &[] })[root as usize].clone();
        Ok(())
    }

    fn barrier(&mut self, _tag: Tag) -> Result<(), CommError> {
        self.meet(&[]);
        Ok(())
    }
}

impl Collective<Cpu> for Local {
    fn all_gather(&mut self, _tag: Tag, shard: &[f32], full: &mut [f32]) -> Result<(), CommError> {
        let all = self.meet(&to_bytes(shard));
        full.iter_mut().zip(all.iter().flat_map(|bytes| numbers(bytes))).for_each(|(to, from)| *to = from);
        Ok(())
    }

    fn reduce_scatter(&mut self, _tag: Tag, full: &mut [f32], shard: &mut [f32]) -> Result<(), CommError> {
        let all = self.meet(&to_bytes(full));
        let at = self.rank as usize * shard.len() * 4;
        shard.fill(0.0);
        for bytes in all.iter() {
            shard.iter_mut().zip(numbers(&bytes[at..])).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }

    fn all_reduce(&mut self, _tag: Tag, values: &mut [f32]) -> Result<(), CommError> {
        let all = self.meet(&to_bytes(values));
        values.fill(0.0);
        for bytes in all.iter() {
            values.iter_mut().zip(numbers(bytes)).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }
}
