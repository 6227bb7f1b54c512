//! Where tokens come from: shards of token ids on disk, an order that the seed decides, and
//! a cursor that does not know how many ranks there are.
