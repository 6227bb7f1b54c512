//! Everything that can be known about a checkpoint without another copy of it.

use std::path::Path;

use super::read::{StoredChunk, TensorInfo, data_pkl, label, numbers_of};
use super::zip::{Archive, ZipError};
use super::{Dcp, Fault};

/// What is read at once.
const BLOCK: usize = 1 << 20;

/// Looks at the whole checkpoint in `dir`, ours or PyTorch's, and reads every byte of it: each
/// file is there, as long as it must be, each item's checksums hold and it is what `.metadata`
/// says; each tensor has each of its numbers once. No fault: it is valid.
#[must_use]
pub fn verify(dir: &Path) -> Vec<Fault> {
    match Dcp::open(dir) {
        Ok(dcp) => {
            let files = (0..dcp.files().len()).flat_map(|file| dcp.verify_file(file));
            dcp.faults().iter().cloned().chain(files).collect()
        }
        Err(error) => vec![error.into_fault()],
    }
}

/// An item of a file.
struct Item<'d> {
    at: u64,
    length: u64,
    label: String,
    chunk: Option<(&'d TensorInfo, &'d StoredChunk)>,
}

impl Dcp {
    /// [`verify`] for one file of [`Dcp::files`], by its index: several ranks can share the
    /// work. What [`Dcp::faults`] says is not repeated.
    #[must_use]
    pub fn verify_file(&self, index: usize) -> Vec<Fault> {
        let name = &self.files()[index].name;
        let fault = |item: Option<&str>, error: ZipError| Fault {
            file: Some(name.clone()),
            item: item.map(str::to_owned),
            what: match error {
                ZipError::Io(error) => format!("cannot be read: {error}"),
                ZipError::Broken(what) => what,
            },
        };
        let file = match self.file(index) {
            Ok(file) => file,
            Err(error) => return vec![fault(None, error)],
        };

        let mut items: Vec<Item<'_>> = Vec::new();
        for (name, info) in self.tensors() {
            for chunk in info.chunks.iter().filter(|chunk| chunk.stored.file == index) {
                let (at, length) = (chunk.stored.at, chunk.stored.length);
                items.push(Item { at, length, label: label(name, &chunk.offsets), chunk: Some((info, chunk)) });
            }
        }
        for (name, stored) in self.objects.iter().filter(|(_, stored)| stored.file == index) {
            items.push(Item { at: stored.at, length: stored.length, label: name.clone(), chunk: None });
        }
        items.sort_by_key(|item| item.at);

        let mut faults = Vec::new();
        let mut buffer = vec![0; BLOCK];
        let mut end = 0;
        for item in &items {
            if item.at < end {
                let what = "lies where another item does".to_owned();
                faults.push(fault(Some(&item.label), ZipError::Broken(what)));
                continue;
            }
            end = item.at + item.length;
            let check = |buffer: &mut [u8]| {
                let archive = Archive::open(&file, item.at, item.length)?;
                match item.chunk {
                    Some((info, chunk)) if info.dtype.size().is_some() => {
                        numbers_of(&archive, &file, info, chunk)?;
                    }
                    // Not read here, but its bytes can be compared.
                    _ => {
                        data_pkl(&archive)?;
                    }
                }
                archive.entries.iter().try_for_each(|entry| archive.check(entry, buffer))
            };
            if let Err(error) = check(&mut buffer) {
                faults.push(fault(Some(&item.label), error));
            }
        }
        faults
    }
}
