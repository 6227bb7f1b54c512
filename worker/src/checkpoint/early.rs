//! A file whose bytes go to disk while the next ones are being made, so that the sync at
//! its end finds little left to do. It must not sync by itself: that the bytes are safe is
//! said by whoever asks for it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

/// After so many bytes the disk is told to begin: enough for it to be worth a request.
const STRETCH: usize = 8 << 20;

/// A new file, written from its beginning to its end.
#[derive(Debug)]
pub struct Early {
    file: File,
    written: u64,
    begun: u64,
}

impl Early {
    /// The file must be empty.
    #[must_use]
    pub fn new(file: File) -> Early {
        Early { file, written: 0, begun: 0 }
    }

    /// Waits until all is on disk.
    ///
    /// # Errors
    /// What fsync(2) says; also of what was begun before.
    pub fn sync(self) -> io::Result<()> {
        self.file.sync_all()
    }
}

impl Write for Early {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // In pieces, for a tensor may be gigabytes.
        let taken = self.file.write(&bytes[..bytes.len().min(STRETCH)])?;
        self.written += taken as u64;
        let length = self.written - self.begun;
        if length >= STRETCH as u64 {
            begin(&self.file, self.begun, length);
            self.begun = self.written;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Without SYNC_FILE_RANGE_WAIT_* it takes no error away from the fsync to come. Where a
/// file system cannot do it, that fsync does all.
fn begin(file: &File, from: u64, length: u64) {
    if let (Ok(from), Ok(length)) = (from.try_into(), length.try_into()) {
        // SAFETY: takes numbers only, and the descriptor is open.
        let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), from, length, libc::SYNC_FILE_RANGE_WRITE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_larger_than_a_stretch_arrives_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..2 * STRETCH + 7).map(|i| (i % 251) as u8).collect();
        let mut file = Early::new(File::create_new(&path).unwrap());
        for part in [0..3, 3..STRETCH + 5, STRETCH + 5..bytes.len()] {
            file.write_all(&bytes[part]).unwrap();
        }
        file.sync().unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
}
