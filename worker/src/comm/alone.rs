//! A world of one rank on any engine: what is said goes by way of another group, numbers
//! are where they are to be. Nothing here waits.

use super::{Collective, CommError, Exchange, Ongoing, Tag};
use crate::engine::Engine;
use crate::shard;

/// The only rank. The other group has one rank, too.
#[derive(Debug)]
pub struct Alone<X>(pub X);

impl<X: Exchange> Exchange for Alone<X> {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn exchange(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.0.exchange(tag, own)
    }

    fn broadcast(&mut self, tag: Tag, root: u32, bytes: &mut Vec<u8>) -> Result<(), CommError> {
        self.0.broadcast(tag, root, bytes)
    }

    fn barrier(&mut self, tag: Tag) -> Result<(), CommError> {
        self.0.barrier(tag)
    }
}

impl<E: Engine, X: Exchange> Collective<E> for Alone<X> {
    fn all_gather(&mut self, _engine: &E, _tag: Tag, _full: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        Ok(Ongoing(0))
    }

    fn reduce_scatter(&mut self, _engine: &E, _tag: Tag, _full: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        Ok(Ongoing(0))
    }

    fn all_reduce(&mut self, _engine: &E, _tag: Tag, _values: E::ViewMut<'_>) -> shard::Result<Ongoing> {
        Ok(Ongoing(0))
    }

    fn finish(&mut self, _engine: &E, _ongoing: Ongoing) -> shard::Result<()> {
        Ok(())
    }
}
