//! The register: what each rank leaves in the gate's memory before it runs, for the day on
//! which it ends badly. slurmstepd, which then is root, takes numbers and short texts
//! from here and asks nobody.
//!
//! A rank's part is read whatever it holds: its writer may have been killed.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Gate;

/// A short text: its length, and its bytes.
const fn text_words(bytes: usize) -> usize {
    1 + bytes / 4
}

/// Of the node.
const NODE_BYTES: usize = 128;
const NODE: usize = 0;
/// The node's rank and one, 0 where not known.
const NODE_RANK: usize = NODE + text_words(NODE_BYTES);
/// 1 where the clock's words are right.
const CLOCK_KNOWN: usize = NODE_RANK + 1;
const OFFSET: usize = CLOCK_KNOWN + 1;
const UNCERTAINTY: usize = OFFSET + 2;
const HEAD: usize = UNCERTAINTY + 2;

/// Of a rank: its rank in the step and one, 0 where not known.
const RANK: usize = 0;
/// 1 where it has passed task_init.
const STARTED: usize = 1;
/// 1 where its end has been told.
const TOLD: usize = 2;
/// How often the kernel had killed in its memory group before it started, and one.
const KILLS_BEFORE: usize = 3;
/// How many of the later ones belong to ranks that have ended.
const KILLS_TOLD: usize = 4;
const GPU_BYTES: usize = 32;
const GPU: usize = 5;
const GROUP_BYTES: usize = 512;
const GROUP: usize = GPU + text_words(GPU_BYTES);
const PART: usize = GROUP + text_words(GROUP_BYTES);

/// More ranks on a node have no part: it bounds the memory.
const MOST_RANKS: u32 = 4096;

/// How many words the register of so many ranks takes.
pub(super) fn words(ranks: u32) -> usize {
    HEAD + if ranks <= MOST_RANKS { ranks as usize * PART } else { 0 }
}

/// The register of a node.
#[derive(Debug, Clone, Copy)]
pub struct Register<'a> {
    words: &'a [AtomicU32],
}

/// A rank's part of it.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    words: &'a [AtomicU32],
}

impl Gate {
    /// The register: the last words of the gate's memory.
    pub fn register(&self) -> Register<'_> {
        let all = self.words.all();
        Register { words: all.get(all.len().saturating_sub(words(self.ranks))..).unwrap_or_default() }
    }
}

impl<'a> Register<'a> {
    /// A local rank's part; `None` where the node has no such rank.
    pub fn of(self, local_rank: u32) -> Option<Entry<'a>> {
        let from = HEAD + (local_rank as usize).checked_mul(PART)?;
        Some(Entry { words: self.words.get(from..from + PART)? })
    }

    /// Writes which node this is.
    pub fn name(self, node: &str, node_rank: u32) {
        write(self.words, NODE, NODE_BYTES, node);
        self.words[NODE_RANK].store(node_rank.saturating_add(1), Ordering::Release);
    }

    /// NodeName and the node's rank in the step, where a rank got so far as to know.
    pub fn named(self) -> (Option<String>, Option<u32>) {
        (read(self.words, NODE, NODE_BYTES), self.words[NODE_RANK].load(Ordering::Acquire).checked_sub(1))
    }

    /// Writes by how much this node's clock is ahead of the one of rank 0's node, and how
    /// wrong that may be, in nanoseconds.
    pub fn compare_clock(self, offset: i64, uncertainty: u64) {
        put(self.words, OFFSET, offset.cast_unsigned());
        put(self.words, UNCERTAINTY, uncertainty);
        self.words[CLOCK_KNOWN].store(1, Ordering::Release);
    }

    /// The same, where somebody compared them.
    pub fn clock(self) -> Option<(i64, u64)> {
        let known = self.words[CLOCK_KNOWN].load(Ordering::Acquire) == 1;
        known.then(|| (take(self.words, OFFSET).cast_signed(), take(self.words, UNCERTAINTY)))
    }

    /// The part of the first rank with this memory group: there is counted for all of them.
    pub fn first_in(self, group: &str) -> Option<Entry<'a>> {
        let parts = self.words.get(HEAD..).unwrap_or_default().chunks_exact(PART);
        parts.map(|words| Entry { words }).find(|entry| entry.group().as_deref() == Some(group))
    }
}

impl Entry<'_> {
    /// Writes the rank in the step.
    pub fn enter(self, rank: u32) {
        self.words[RANK].store(rank.saturating_add(1), Ordering::Release);
    }

    /// Its rank in the step.
    pub fn rank(self) -> Option<u32> {
        self.words[RANK].load(Ordering::Acquire).checked_sub(1)
    }

    /// Writes what it uses: its GPU's name.
    pub fn use_gpu(self, gpu: &str) {
        write(self.words, GPU, GPU_BYTES, gpu);
    }

    /// Its GPU's name.
    pub fn gpu(self) -> Option<String> {
        read(self.words, GPU, GPU_BYTES)
    }

    /// Writes the file that counts the kernel's kills in its memory group, and what it
    /// says now. A path too long to keep is none.
    pub fn watch(self, group: &str, kills: u32) {
        if group.len() <= GROUP_BYTES {
            self.words[KILLS_BEFORE].store(kills.saturating_add(1), Ordering::Relaxed);
            write(self.words, GROUP, GROUP_BYTES, group);
        }
    }

    /// That file.
    pub fn group(self) -> Option<String> {
        read(self.words, GROUP, GROUP_BYTES)
    }

    /// What it said then.
    pub fn kills_before(self) -> Option<u32> {
        self.words[KILLS_BEFORE].load(Ordering::Relaxed).checked_sub(1)
    }

    /// How many kills since are some rank's already.
    pub fn kills_told(self) -> u32 {
        self.words[KILLS_TOLD].load(Ordering::Relaxed)
    }

    /// One more is.
    pub fn tell_kill(self) {
        self.words[KILLS_TOLD].fetch_add(1, Ordering::Relaxed);
    }

    /// It has passed task_init.
    pub fn start(self) {
        self.words[STARTED].store(1, Ordering::Release);
    }

    /// Whether it has.
    pub fn started(self) -> bool {
        self.words[STARTED].load(Ordering::Acquire) == 1
    }

    /// Whether this caller is the one to tell how it ended: true once.
    pub fn told_first(self) -> bool {
        self.words[TOLD].swap(1, Ordering::AcqRel) == 0
    }
}

fn put(words: &[AtomicU32], at: usize, value: u64) {
    words[at].store(value as u32, Ordering::Relaxed);
    words[at + 1].store((value >> 32) as u32, Ordering::Relaxed);
}

fn take(words: &[AtomicU32], at: usize) -> u64 {
    let half = |at: usize| u64::from(words[at].load(Ordering::Relaxed));
    half(at) | half(at + 1) << 32
}

/// Its length last: what a killed writer began is no text.
fn write(words: &[AtomicU32], at: usize, most: usize, text: &str) {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (word, bytes) in words[at + 1..].iter().zip(text.as_bytes()[..end].chunks(4)) {
        let mut four = [0; 4];
        four[..bytes.len()].copy_from_slice(bytes);
        word.store(u32::from_ne_bytes(four), Ordering::Relaxed);
    }
    words[at].store(u32::try_from(end).unwrap_or(0), Ordering::Release);
}

/// One line, whatever the memory holds.
fn read(words: &[AtomicU32], at: usize, most: usize) -> Option<String> {
    let length = (words[at].load(Ordering::Acquire) as usize).min(most);
    let bytes = words[at + 1..at + text_words(most)].iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
    let bytes: Vec<u8> = bytes.take(length).collect();
    let text = String::from_utf8_lossy(&bytes);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ranks_wrote_is_read_and_nothing_else() {
        let gate = Gate::new(3).unwrap();
        let register = gate.register();
        assert_eq!((register.named(), register.clock()), ((None, None), None));
        let entry = register.of(2).unwrap();
        assert_eq!((entry.rank(), entry.gpu(), entry.group(), entry.kills_before()), (None, None, None, None));
        assert!(!entry.started() && register.of(3).is_none() && register.of(u32::MAX).is_none());
        register.name("node007", 0);
        register.compare_clock(-5_000_000_001, 7_000_000_000);
        entry.enter(0);
        entry.use_gpu("0000:3b:00.0");
        entry.watch("/sys/fs/cgroup/memory/step_0/memory.oom_control", 4);
        entry.start();
        assert_eq!(register.named(), (Some("node007".into()), Some(0)));
        assert_eq!(register.clock(), Some((-5_000_000_001, 7_000_000_000)));
        assert_eq!((entry.rank(), entry.kills_before()), (Some(0), Some(4)));
        assert_eq!(entry.gpu().as_deref(), Some("0000:3b:00.0"));
        assert_eq!(entry.group().as_deref(), Some("/sys/fs/cgroup/memory/step_0/memory.oom_control"));
        assert!(entry.started() && entry.told_first() && !entry.told_first());
        // The others' parts are as before, and the gate knows nothing of it.
        assert_eq!(register.of(0).unwrap().rank(), None);
        assert_eq!(gate.refusal(), None);
        for local_rank in 0..3 {
            gate.gone(local_rank);
        }
        assert_eq!(entry.rank(), Some(0));
    }

    #[test]
    fn ranks_of_one_memory_group_count_in_one_place() {
        let gate = Gate::new(3).unwrap();
        let register = gate.register();
        for (local_rank, group) in [(0, "/a"), (1, "/b"), (2, "/b")] {
            register.of(local_rank).unwrap().watch(group, 0);
        }
        register.first_in("/b").unwrap().tell_kill();
        assert_eq!([0, 1, 2].map(|rank| register.of(rank).unwrap().kills_told()), [0, 1, 0]);
        assert!(register.first_in("/c").is_none());
    }

    #[test]
    fn wild_memory_and_long_texts_are_no_crash() {
        let gate = Gate::new(2).unwrap();
        for word in gate.register().words {
            word.store(u32::MAX, Ordering::Relaxed);
        }
        let entry = gate.register().of(1).unwrap();
        let _ = (gate.register().named(), gate.register().clock(), entry.rank(), entry.gpu(), entry.group());
        let gate = Gate::new(1).unwrap();
        let entry = gate.register().of(0).unwrap();
        entry.use_gpu(&"ä".repeat(GPU_BYTES));
        assert_eq!(entry.gpu(), Some("ä".repeat(GPU_BYTES / 2)));
        entry.watch(&"x".repeat(GROUP_BYTES + 1), 0);
        assert_eq!((entry.group(), entry.kills_before()), (None, None));
        assert!(Gate::new(0).unwrap().register().of(0).is_none());
        // Of very many only the node is known.
        let gate = Gate::new(MOST_RANKS + 1).unwrap();
        gate.register().name("node007", 3);
        assert_eq!(gate.register().named(), (Some("node007".into()), Some(3)));
        assert!(gate.register().of(0).is_none() && gate.register().of(MOST_RANKS).is_none());
        assert_eq!(words(MOST_RANKS + 1), HEAD);
    }
}
