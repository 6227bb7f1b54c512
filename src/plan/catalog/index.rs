//! Finds an entry by name: a hash table that the compiler fills, since each task
//! of a step looks up its whole environment, and a table made at run time would
//! stay behind when Slurm unloads the plugin.

use super::Entry;
use super::table::TABLE;

/// A power of two, well above the number of entries.
const SLOTS: usize = 2048;

/// Number of the block, number of the entry in it.
static INDEX: [Option<(u8, u8)>; SLOTS] = fill();

const fn fill() -> [Option<(u8, u8)>; SLOTS] {
    let mut slots = [None; SLOTS];
    let mut block = 0;
    while block < TABLE.len() {
        let entries = TABLE[block].entries;
        assert!(TABLE.len() <= 256 && entries.len() <= 256);
        let mut at = 0;
        while at < entries.len() {
            let mut slot = slot(START, entries[at].name.as_bytes());
            while slots[slot].is_some() {
                slot = (slot + 1) % SLOTS;
            }
            slots[slot] = Some((block as u8, at as u8));
            at += 1;
        }
        block += 1;
    }
    slots
}

/// FNV-1a, <http://www.isthe.com/chongo/tech/comp/fnv/>.
const START: u32 = 0x811c_9dc5;

const fn hash(mut hash: u32, bytes: &[u8]) -> u32 {
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u32).wrapping_mul(0x0100_0193);
        at += 1;
    }
    hash
}

const fn slot(start: u32, bytes: &[u8]) -> usize {
    hash(start, bytes) as usize % SLOTS
}

/// The entry called so.
pub(super) fn named(name: &str) -> Option<&'static Entry> {
    find(slot(START, name.as_bytes()), |entry| entry.name == name)
}

/// The family of the longest beginning: NCCL_FASTRAK_ALL is of NCCL_FASTRAK_*.
pub(super) fn family(name: &str) -> Option<&'static Entry> {
    name.rmatch_indices('_').filter(|(at, _)| at + 1 < name.len()).find_map(|(at, _)| {
        let prefix = &name[..=at];
        find(slot(hash(START, prefix.as_bytes()), b"*"), |entry| entry.family() == Some(prefix))
    })
}

/// Some slots are free, so that the search ends.
fn find(slot: usize, is: impl Fn(&Entry) -> bool) -> Option<&'static Entry> {
    let run = INDEX[slot..].iter().chain(&INDEX[..slot]).map_while(|entry| *entry);
    run.map(|(block, at)| &TABLE[usize::from(block)].entries[usize::from(at)]).find(|entry| is(entry))
}
