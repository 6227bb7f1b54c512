//! The zip files of `torch.save`: stored entries only, numbers at a multiple of 64 bytes.
//!
//! Written in one pass, read from their central directory as the standard has it. No
//! compression and no encryption: who uses them is refused by name.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

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

/// A zip within a file.
#[derive(Debug)]
pub(super) struct Archive<'f> {
    file: &'f File,
    at: u64,
    /// Where its directory begins.
    directory: u64,
    pub(super) entries: Vec<Entry>,
}

/// One of its entries, stored.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// "archive/data.pkl".
    pub(super) name: String,
    /// Of the payload.
    pub(super) size: u64,
    /// CRC-32 of the payload.
    pub(super) crc32: u32,
    /// Of the local header, from the zip's beginning.
    header: u64,
}

/// What reading a zip comes to.
#[derive(Debug)]
pub(super) enum ZipError {
    /// The file cannot be read.
    Io(io::Error),
    /// It is no zip of ours or PyTorch's: what is wrong, after "it".
    Broken(String),
}

impl From<io::Error> for ZipError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Broken("is cut short".to_owned()),
            _ => Self::Io(error),
        }
    }
}

fn broken<T>(what: &str) -> Result<T, ZipError> {
    Err(ZipError::Broken(format!("is damaged: {what}")))
}

/// Fields of a header, in order; zero beyond its end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let len = N.min(self.0.len());
        field[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        field
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn skip(&mut self, len: usize) {
        self.0 = &self.0[len.min(self.0.len())..];
    }
}

/// `torch.save` makes seven entries for a tensor; an object that holds tensors has more.
const MOST_ENTRIES: u64 = 4096;

impl<'f> Archive<'f> {
    /// Reads the central directory of the zip that is `length` bytes from `at` of the file.
    pub(super) fn open(file: &'f File, at: u64, length: u64) -> Result<Self, ZipError> {
        let mut archive = Self { file, at, directory: 0, entries: Vec::new() };
        // Nobody writes a comment: the end record is the last thing.
        let Some(end_at) = length.checked_sub(22) else { return broken("it is shorter than an empty zip") };
        // Both end records and the locator between them.
        let before = end_at.min(20 + 56);
        let tail = archive.bytes(end_at - before, before + 22)?;
        let mut end = Fields(&tail[before as usize..]);
        if end.u32() != END {
            return broken("no zip ends where it should");
        }
        end.skip(6);
        let (mut count, mut size, mut start) = (u64::from(end.u16()), u64::from(end.u32()), u64::from(end.u32()));
        if end.u16() != 0 {
            return broken("its end has a comment");
        }
        let mut directory_end = end_at;
        let mut locator = Fields(&tail[(before as usize).saturating_sub(20)..]);
        if before >= 20 && locator.u32() == END64_LOCATOR {
            locator.skip(4);
            let at = locator.u64();
            if at.checked_add(56 + 20) != Some(end_at) {
                return broken("its 64-bit end is not where it says");
            }
            let mut end = Fields(&tail);
            if end.u32() != END64 {
                return broken("its 64-bit end is not where it says");
            }
            end.skip(8 + 4 + 8 + 8);
            (count, size, start) = (end.u64(), end.u64(), end.u64());
            directory_end = at;
        }
        if count > MOST_ENTRIES || size > (1 << 20) || start.checked_add(size) != Some(directory_end) {
            return broken("its directory does not end where it says");
        }
        archive.directory = start;
        let directory = archive.bytes(start, size)?;
        let mut rest = Fields(&directory);
        for _ in 0..count {
            if rest.u32() != CENTRAL {
                return broken("its directory has an entry that is none");
            }
            rest.skip(4);
            let (flags, method) = (rest.u16(), rest.u16());
            rest.skip(4);
            let crc32 = rest.u32();
            let (mut packed, mut size) = (u64::from(rest.u32()), u64::from(rest.u32()));
            let (name, extra, comment) = (rest.u16() as usize, rest.u16() as usize, rest.u16() as usize);
            rest.skip(8);
            let mut header = u64::from(rest.u32());
            if rest.0.len() < name + extra + comment {
                return broken("its directory is cut short");
            }
            let name = match std::str::from_utf8(&rest.0[..name]) {
                Ok(text) => text.to_owned(),
                Err(_) => return broken("a name in its directory is no text"),
            };
            rest.skip(name.len());
            let mut extras = Fields(&rest.0[..extra]);
            while !extras.0.is_empty() {
                let (id, len) = (extras.u16(), extras.u16() as usize);
                let mut field = Fields(&extras.0[..len.min(extras.0.len())]);
                if id == 1 {
                    for value in [&mut size, &mut packed, &mut header] {
                        if *value == u64::from(u32::MAX) && field.0.len() >= 8 {
                            *value = field.u64();
                        }
                    }
                }
                extras.skip(len);
            }
            rest.skip(extra + comment);
            if flags & 1 != 0 || method != 0 || packed != size {
                return Err(ZipError::Broken(format!("has {name} compressed or encrypted, which PyTorch never does")));
            }
            if header >= start || size > start - header {
                return broken("an entry lies outside of it");
            }
            archive.entries.push(Entry { name, size, crc32, header });
        }
        if !rest.0.is_empty() {
            return broken("its directory has more entries than it says");
        }
        // Each ends where the next begins, or before.
        archive.entries.sort_by_key(|entry| entry.header);
        for at in 0..archive.entries.len() {
            let room = archive.entries.get(at + 1).map_or(start, |next| next.header) - archive.entries[at].header;
            if archive.entries[at].size.saturating_add(30) > room {
                return broken("its entries overlap");
            }
        }
        Ok(archive)
    }

    /// Bytes from the zip's beginning; few.
    fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>, ZipError> {
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, self.at + at)?;
        Ok(bytes)
    }

    /// The entry whose name ends like this after the archive's own: "data.pkl".
    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name.split_once('/').is_some_and(|(_, rest)| rest == name))
    }

    /// Where in the file the payload of an entry begins.
    pub(super) fn payload_at(&self, entry: &Entry) -> Result<u64, ZipError> {
        let header = self.bytes(entry.header, 30)?;
        let mut fields = Fields(&header);
        if fields.u32() != LOCAL {
            return broken(&format!("{} does not begin where its directory says", entry.name));
        }
        fields.skip(4);
        let method = fields.u16();
        fields.skip(16);
        let (name, extra) = (u64::from(fields.u16()), u64::from(fields.u16()));
        if method != 0 || self.bytes(entry.header + 30, name)? != entry.name.as_bytes() {
            return broken(&format!("{} is called otherwise in its directory", entry.name));
        }
        // In the order of the file.
        let next = self.entries.iter().map(|other| other.header).find(|&other| other > entry.header);
        let payload = entry.header + 30 + name + extra;
        if payload + entry.size > next.unwrap_or(self.directory) {
            return broken("its entries overlap");
        }
        Ok(self.at + payload)
    }

    /// A small payload, its checksum checked.
    pub(super) fn small(&self, entry: &Entry, most: u64) -> Result<Vec<u8>, ZipError> {
        if entry.size > most {
            return broken(&format!("{} has {} bytes, more than {most}", entry.name, entry.size));
        }
        let at = self.payload_at(entry)?;
        let bytes = self.bytes(at - self.at, entry.size)?;
        if crc32fast::hash(&bytes) != entry.crc32 {
            return Err(ZipError::Broken(changed(&entry.name)));
        }
        Ok(bytes)
    }

    /// Reads a payload to the end and compares its checksum; `buffer` is room.
    pub(super) fn check(&self, entry: &Entry, buffer: &mut [u8]) -> Result<(), ZipError> {
        let mut at = self.payload_at(entry)?;
        let mut left = entry.size;
        let mut crc = Hasher::new();
        while left > 0 {
            let now = (buffer.len() as u64).min(left);
            let block = &mut buffer[..now as usize];
            self.file.read_exact_at(block, at)?;
            crc.update(block);
            at += now;
            left -= now;
        }
        if crc.finalize() == entry.crc32 { Ok(()) } else { Err(ZipError::Broken(changed(&entry.name))) }
    }
}

/// What a wrong checksum means.
pub(super) fn changed(name: &str) -> String {
    format!("does not match its checksum ({name}): it has changed since it was written")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(zip64_from: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut out = Counted::new(&mut bytes);
        out.small(b"before").unwrap();
        out.align().unwrap();
        let mut zip = Writer::new(&mut out).with_zip64_from(zip64_from);
        zip.entry("archive/small", b"three").unwrap();
        zip.entry("archive/data/0", &[7; 5000]).unwrap();
        zip.entry("archive/empty", b"").unwrap();
        zip.entry("archive/after", b"more").unwrap();
        zip.finish().unwrap();
        let (len, crc32) = out.finish().unwrap();
        assert_eq!((len, crc32), (bytes.len() as u64, crc32fast::hash(&bytes)));
        bytes
    }

    /// As if the limit were lower than 4 GiB: sizes, offsets and end in 64 bits.
    #[test]
    fn the_64_bit_fields_are_read_by_python_and_by_us() {
        const READ: &str = "import sys, zipfile, io
z = zipfile.ZipFile(io.BytesIO(open(sys.argv[1], 'rb').read()[64:]))
assert z.testzip() is None and len(z.namelist()) == 4 and z.read('archive/data/0') == bytes([7]) * 5000";
        for zip64_from in [u64::from(u32::MAX), 4000, 5, 0] {
            let bytes = written(zip64_from);
            let path = std::env::temp_dir().join(format!("palingenesis-zip-{}-{zip64_from}", std::process::id()));
            std::fs::write(&path, &bytes).unwrap();
            match std::process::Command::new("python3").args(["-c", READ]).arg(&path).output() {
                Ok(said) => assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr)),
                Err(_) => eprintln!("skipped: no python3"),
            }
            let file = File::open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let archive = Archive::open(&file, 64, bytes.len() as u64 - 64).unwrap();
            assert_eq!(archive.small(archive.entry("after").unwrap(), 4).unwrap(), b"more");
            let data = archive.entry("data/0").unwrap();
            assert_eq!(archive.payload_at(data).unwrap() % ALIGNMENT, 0);
            archive.entries.iter().for_each(|entry| archive.check(entry, &mut [0; 1000]).unwrap());
        }
    }
}
