//! The flight recorder: a rank's last 1,024 operations in a mapped file, which is there
//! after the process was killed; and what the files of several ranks say together. Writing
//! costs two stores and two looks at the clock for each operation. Reading trusts nothing.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{Ordering, compiler_fence};

use memmap2::MmapMut;
use palingenesis::system::clock;

use super::{Op, Tag};

/// Operations that are kept.
pub const KEPT: usize = 1024;

/// ```text
/// header   "PLGrecrd", version (4), bytes of a record (4), records (4), rank (4),
///          world size (4), process (4), made at (8), length of host (1), host (63), zeros
/// record   sequence (8), count (8), start (8), end (8), index (4), op (1), dtype (1),
///          state (1), length of tag (1), tag (24)
/// ```
/// Numbers are little-endian, times nanoseconds of CLOCK_REALTIME.
const MAGIC: &[u8; 8] = b"PLGrecrd";
const VERSION: u32 = 1;
const HEADER: usize = 128;
const HOST: usize = 63;
const RECORD: usize = 64;
const WHAT: usize = 24;
const FILE: usize = HEADER + KEPT * RECORD;

/// Where in a record.
const STATE: usize = 38;

const EMPTY: u8 = 0;
const ENTERED: u8 = 1;
const LEFT: u8 = 2;

/// What the numbers of an operation are: collectives carry f32, the others bytes.
fn dtype(op: Op) -> u8 {
    match op {
        Op::AllGather | Op::ReduceScatter | Op::AllReduce => 1,
        Op::Broadcast | Op::Exchange => 2,
        Op::Barrier => 0,
    }
}

/// A rank's own file, written to while it runs.
#[derive(Debug)]
pub struct Recorder {
    map: MmapMut,
    /// Operations so far.
    next: usize,
}

impl Recorder {
    /// Begins a file, for this user alone. One that is there, of the run before, is kept as
    /// `PATH.old`: after a restart it says what the killed run was at.
    ///
    /// # Errors
    /// When the file cannot be made; a full disk says so here, not later.
    pub fn create(path: &Path, rank: u32, world_size: u32, host: &str) -> io::Result<Recorder> {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        match fs::rename(path, &old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let mut bytes = vec![0; FILE];
        let host = cut(host, HOST);
        let numbers = [VERSION, RECORD as u32, KEPT as u32, rank, world_size, std::process::id()];
        bytes[..8].copy_from_slice(MAGIC);
        for (at, number) in numbers.iter().enumerate() {
            bytes[8 + 4 * at..][..4].copy_from_slice(&number.to_le_bytes());
        }
        bytes[32..40].copy_from_slice(&clock::now().to_le_bytes());
        bytes[40] = host.len() as u8;
        bytes[41..][..host.len()].copy_from_slice(host.as_bytes());
        // Written, not only made long: a store to a page that a full disk has no room for
        // would end the process.
        file.write_all(&bytes)?;
        file.sync_all()?;
        // SAFETY: the file is new and this user's alone. Were it cut short while it is mapped,
        // the next store would end this process (SIGBUS), and nothing worse.
        let map = unsafe { MmapMut::map_mut(&file)? };
        Ok(Recorder { map, next: 0 })
    }

    fn record(&mut self, number: usize) -> &mut [u8] {
        let at = HEADER + number % KEPT * RECORD;
        &mut self.map[at..at + RECORD]
    }

    /// An operation begins. The state is written last: a process that is killed in the
    /// middle leaves an empty record, not a wrong one.
    pub fn enter(&mut self, sequence: u64, op: Op, tag: Tag, count: u64) {
        let record = self.record(self.next);
        record[STATE] = EMPTY;
        compiler_fence(Ordering::SeqCst);
        for (at, number) in [sequence, count, clock::now(), 0].iter().enumerate() {
            record[8 * at..][..8].copy_from_slice(&number.to_le_bytes());
        }
        record[32..36].copy_from_slice(&tag.index.to_le_bytes());
        record[36] = op as u8;
        record[37] = dtype(op);
        let what = cut(tag.what, WHAT);
        record[39] = what.len() as u8;
        record[40..][..what.len()].copy_from_slice(what.as_bytes());
        compiler_fence(Ordering::SeqCst);
        record[STATE] = ENTERED;
        self.next += 1;
    }

    /// The last operation that began is over.
    pub fn leave(&mut self) {
        let Some(last) = self.next.checked_sub(1) else { return };
        let record = self.record(last);
        record[24..32].copy_from_slice(&clock::now().to_le_bytes());
        compiler_fence(Ordering::SeqCst);
        record[STATE] = LEFT;
    }
}

/// As much as has room.
fn cut(text: &str, room: usize) -> &str {
    let mut end = text.len().min(room);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
