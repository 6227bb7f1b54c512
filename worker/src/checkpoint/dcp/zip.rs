//! The zip files of `torch.save`: stored entries only, numbers at a multiple of 64 bytes.
//!
//! Written in one pass, read from their central directory as the standard has it. No
//! compression and no encryption: who uses them is refused by name.

use std::io::{self, Write};

use crc32fast::Hasher;

/// Payloads begin at a multiple of this, within the zip and, if the zip does, in the file.
pub(super) const ALIGNMENT: u64 = 64;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const END64_LOCATOR: u32 = 0x0706_4b50;
/// Sizes from here on need the 64-bit fields.
const ZIP64: u64 = u32::MAX as u64;
/// Small pieces are collected, large ones go in blocks of this many bytes.
const BLOCK: usize = 1 << 20;

/// Writes, counts, and keeps the CRC-32 of everything written.
pub(super) struct Counted<'a, W: Write> {
    out: &'a mut W,
    waiting: Vec<u8>,
    at: u64,
    crc: Hasher,
    item: Hasher,
}

impl<'a, W: Write> Counted<'a, W> {
    pub(super) fn new(out: &'a mut W) -> Self {
        Self { out, waiting: Vec::with_capacity(BLOCK), at: 0, crc: Hasher::new(), item: Hasher::new() }
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Writes `bytes`, whose CRC-32 is `crc`.
    fn put(&mut self, bytes: &[u8], crc: &Hasher) -> io::Result<()> {
        self.at += bytes.len() as u64;
        self.crc.combine(crc);
        self.item.combine(crc);
        if bytes.len() < BLOCK {
            self.waiting.extend_from_slice(bytes);
            if self.waiting.len() >= BLOCK {
                self.flush()?;
            }
            return Ok(());
        }
        self.flush()?;
        self.out.write_all(bytes)
    }

    pub(super) fn small(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.put(bytes, &crc_of(bytes))
    }

    /// Zeros up to the next multiple of [`ALIGNMENT`].
    pub(super) fn align(&mut self) -> io::Result<()> {
        let over = (self.at % ALIGNMENT) as usize;
        if over == 0 { Ok(()) } else { self.small(&[0; ALIGNMENT as usize][over..]) }
    }

    /// The CRC-32 of what was written since the last call.
    pub(super) fn item_crc(&mut self) -> u32 {
        std::mem::take(&mut self.item).finalize()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(&self.waiting)?;
        self.waiting.clear();
        Ok(())
    }

    /// Bytes and CRC-32 of all.
    pub(super) fn finish(mut self) -> io::Result<(u64, u32)> {
        self.flush()?;
        Ok((self.at, self.crc.finalize()))
    }
}

fn crc_of(bytes: &[u8]) -> Hasher {
    let mut crc = Hasher::new();
    crc.update(bytes);
    crc
}

/// One zip in the making.
pub(super) struct Writer<'o, 'a, W: Write> {
    out: &'o mut Counted<'a, W>,
    start: u64,
    central: Vec<u8>,
    entries: u16,
    zip64_from: u64,
}

impl<'o, 'a, W: Write> Writer<'o, 'a, W> {
    pub(super) fn new(out: &'o mut Counted<'a, W>) -> Self {
        let start = out.at();
        Self { out, start, central: Vec::new(), entries: 0, zip64_from: ZIP64 }
    }

    #[cfg(test)]
    fn with_zip64_from(mut self, bytes: u64) -> Self {
        self.zip64_from = bytes;
        self
    }

    /// An entry, its payload at a multiple of [`ALIGNMENT`] from the zip's beginning.
    pub(super) fn entry(&mut self, name: &str, payload: &[u8]) -> io::Result<()> {
        let crc = crc_of(payload);
        let crc32 = crc.clone().finalize();
        let size = payload.len() as u64;
        let at = self.out.at() - self.start;
        let large = size >= self.zip64_from;
        let far = at >= self.zip64_from;
        let size32 = if large { u32::MAX } else { size as u32 };
        let version: u16 = if large || far { 45 } else { 20 };

        let mut extra = Vec::new();
        if large {
            extra.extend_from_slice(&[1, 0, 16, 0]);
            extra.extend_from_slice(&size.to_le_bytes());
            extra.extend_from_slice(&size.to_le_bytes());
        }
        // PyTorch's own filler: field "FB", its letters Z.
        let head = at + 30 + (name.len() + extra.len() + 4) as u64;
        let fill = (ALIGNMENT - head % ALIGNMENT) % ALIGNMENT;
        extra.extend_from_slice(b"FB");
        extra.extend_from_slice(&(fill as u16).to_le_bytes());
        extra.resize(extra.len() + fill as usize, b'Z');

        // Version, flags (bit 11: the name is UTF-8), method, time, date, CRC, sizes, lengths.
        let common = |extra: usize| {
            let mut bytes = Vec::new();
            for field in [version, 1 << 11, 0, 0, 33] {
                bytes.extend_from_slice(&field.to_le_bytes());
            }
            for field in [crc32, size32, size32] {
                bytes.extend_from_slice(&field.to_le_bytes());
            }
            bytes.extend_from_slice(&(name.len() as u16).to_le_bytes());
            bytes.extend_from_slice(&(extra as u16).to_le_bytes());
            bytes
        };
        let mut local = LOCAL.to_le_bytes().to_vec();
        local.extend_from_slice(&common(extra.len()));
        local.extend_from_slice(name.as_bytes());
        local.extend_from_slice(&extra);
        self.out.small(&local)?;
        self.out.put(payload, &crc)?;

        let mut extra = Vec::new();
        if large {
            extra.extend_from_slice(&size.to_le_bytes());
            extra.extend_from_slice(&size.to_le_bytes());
        }
        if far {
            extra.extend_from_slice(&at.to_le_bytes());
        }
        if !extra.is_empty() {
            let head = [1u16, extra.len() as u16];
            extra.splice(0..0, head.iter().flat_map(|field| field.to_le_bytes()));
        }
        self.central.extend_from_slice(&CENTRAL.to_le_bytes());
        self.central.extend_from_slice(&version.to_le_bytes());
        self.central.extend_from_slice(&common(extra.len()));
        // Comment, disk, internal and external attributes: none.
        self.central.extend_from_slice(&[0; 10]);
        self.central.extend_from_slice(&if far { u32::MAX } else { at as u32 }.to_le_bytes());
        self.central.extend_from_slice(name.as_bytes());
        self.central.extend_from_slice(&extra);
        self.entries += 1;
        Ok(())
    }

    /// The central directory.
    pub(super) fn finish(self) -> io::Result<()> {
        let at = self.out.at() - self.start;
        let size = self.central.len() as u64;
        let mut end = self.central;
        if at >= self.zip64_from {
            let end64 = at + size;
            end.extend_from_slice(&END64.to_le_bytes());
            end.extend_from_slice(&44u64.to_le_bytes());
            end.extend_from_slice(&[45, 0, 45, 0]);
            end.extend_from_slice(&[0; 8]);
            for field in [u64::from(self.entries), u64::from(self.entries), size, at] {
                end.extend_from_slice(&field.to_le_bytes());
            }
            end.extend_from_slice(&END64_LOCATOR.to_le_bytes());
            end.extend_from_slice(&0u32.to_le_bytes());
            end.extend_from_slice(&end64.to_le_bytes());
            end.extend_from_slice(&1u32.to_le_bytes());
        }
        end.extend_from_slice(&END.to_le_bytes());
        end.extend_from_slice(&[0; 4]);
        end.extend_from_slice(&self.entries.to_le_bytes());
        end.extend_from_slice(&self.entries.to_le_bytes());
        end.extend_from_slice(&(size as u32).to_le_bytes());
        end.extend_from_slice(&if at >= self.zip64_from { u32::MAX } else { at as u32 }.to_le_bytes());
        end.extend_from_slice(&[0; 2]);
        self.out.small(&end)
    }
}
