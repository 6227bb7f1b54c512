//! One file of token ids, in the form that llm.c's data scripts write
//! (<https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py>), so that either
//! reads the other's: 256 little-endian i32 (magic, version, count, zeros), then the ids as
//! u16 or u32, little-endian. Its CRC-32 stands in data.json and is that of the whole file.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::{DataError, Result, io};

/// Bytes before the ids.
const HEADER: usize = 1024;
/// The count is an i32.
pub const MOST_TOKENS: u64 = i32::MAX as u64;

/// How ids are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// Vocabularies of up to 65,536.
    U16,
    /// Larger ones.
    U32,
}

impl Width {
    /// What ids below `vocab` need.
    pub fn of(vocab: usize) -> Width {
        if vocab <= 1 << 16 { Width::U16 } else { Width::U32 }
    }

    fn bytes(self) -> usize {
        match self {
            Width::U16 => 2,
            Width::U32 => 4,
        }
    }

    /// llm.c's magic and version.
    fn marks(self) -> (i32, i32) {
        match self {
            Width::U16 => (20_240_520, 1),
            Width::U32 => (20_240_801, 7),
        }
    }

    fn header(self, tokens: u32) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        let (magic, version) = self.marks();
        for (at, number) in [magic, version].into_iter().enumerate() {
            header[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
        }
        header[8..12].copy_from_slice(&tokens.to_le_bytes());
        header
    }
}

/// A file that grows.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    width: Width,
    tokens: u32,
    body: crc32fast::Hasher,
    waiting: Vec<u8>,
}

/// A file that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Ids in it.
    pub tokens: u64,
    /// CRC-32 of the whole file.
    pub crc32: u32,
}

impl Writer {
    /// Makes the file.
    pub fn create(path: &Path, width: Width) -> Result<Writer> {
        let mut file = File::create_new(path).map_err(io("cannot be made", path))?;
        file.write_all(&[0; HEADER]).map_err(io("cannot be written", path))?;
        let body = crc32fast::Hasher::new();
        Ok(Writer { path: path.into(), file, width, tokens: 0, body, waiting: Vec::with_capacity(1 << 20) })
    }

    /// Ids in it so far.
    pub fn tokens(&self) -> u64 {
        u64::from(self.tokens)
    }

    /// Appends ids that the width can hold; no more than [`MOST_TOKENS`] in all.
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        for ids in ids.chunks(1 << 18) {
            match self.width {
                Width::U16 => self.waiting.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
                Width::U32 => self.waiting.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
            }
            self.tokens += ids.len() as u32;
            if self.waiting.len() >= 1 << 19 {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.body.update(&self.waiting);
        self.file.write_all(&self.waiting).map_err(io("cannot be written", &self.path))?;
        self.waiting.clear();
        Ok(())
    }

    /// Writes the header and waits until all is on the disk.
    pub fn finish(mut self) -> Result<Done> {
        self.flush()?;
        let header = self.width.header(self.tokens);
        self.file.write_all_at(&header, 0).map_err(io("cannot be written", &self.path))?;
        self.file.sync_all().map_err(io("cannot be written to disk", &self.path))?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&header);
        crc.combine(&self.body);
        Ok(Done { tokens: u64::from(self.tokens), crc32: crc.finalize() })
    }
}

/// A file that is read, as mapped memory.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    width: Width,
    tokens: u64,
}

impl Shard {
    /// Maps the file and checks that its header and its length say the same.
    pub fn open(path: &Path) -> Result<Shard> {
        let file = File::open(path).map_err(io("cannot be opened", path))?;
        let length = file.metadata().map_err(io("cannot be looked at", path))?.len();
        let damaged = |why: String| DataError::Wrong(format!("{}: {why}; prepare the data again", path.display()));
        if length < HEADER as u64 {
            return Err(damaged(format!("{length} bytes long, less than the header of a token shard")));
        }
        // SAFETY: nobody writes to a shard: prepare makes it under another name, complete and
        // read-only, before it appears here. Who truncates one while it is read ends the rank
        // with SIGBUS; no number is ever taken from outside the file.
        let map = unsafe { Mmap::map(&file) }.map_err(io("cannot be mapped", path))?;
        let word = |at: usize| i32::from_le_bytes([map[4 * at], map[4 * at + 1], map[4 * at + 2], map[4 * at + 3]]);
        let Some(width) = [Width::U16, Width::U32].into_iter().find(|width| width.marks() == (word(0), word(1))) else {
            return Err(damaged(format!("no token shard (it begins with {}, {})", word(0), word(1))));
        };
        let tokens = word(2);
        let expected = HEADER as u64 + u64::try_from(tokens).unwrap_or(0) * width.bytes() as u64;
        if tokens < 0 || expected != length {
            return Err(damaged(format!("{length} bytes long, but {expected} by its header ({tokens} tokens)")));
        }
        Ok(Shard { path: path.into(), map, width, tokens: tokens as u64 })
    }

    /// Ids in it.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `ids` from those that begin with the `start`-th; they must be there.
    pub fn read(&self, start: u64, ids: &mut [u32]) {
        let width = self.width.bytes();
        let from = HEADER + start as usize * width;
        let bytes = &self.map[from..from + ids.len() * width];
        match self.width {
            Width::U16 => {
                for (id, bytes) in ids.iter_mut().zip(bytes.chunks_exact(2)) {
                    *id = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
                }
            }
            Width::U32 => {
                for (id, bytes) in ids.iter_mut().zip(bytes.chunks_exact(4)) {
                    *id = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
    }

    /// Of the file.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }
}

/// Makes what was done in a directory last.
pub fn sync_directory(path: &Path) -> Result<()> {
    match File::open(path).and_then(|directory| directory.sync_all()) {
        Ok(()) => Ok(()),
        // Some network file systems cannot do this for directories.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTSUP)) => Ok(()),
        Err(error) => Err(io("cannot be written to disk", path)(error)),
    }
}
