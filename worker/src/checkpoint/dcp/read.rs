//! Reading: what `.metadata` says, and any part of a tensor from the files it names.
//!
//! Nothing is believed: sizes are checked before memory is taken, names of files must stay
//! within the directory, and what does not fit together is an error that says where.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use serde_json::Value;
use zerocopy::IntoBytes;

use super::super::PartMut;
use super::boxes::uncovered;
use super::pickle::{Global, Node, Pickle, Slot};
use super::write::numbers;
use super::zip::{Archive, Entry, ZipError, changed};
use super::{DcpError, Fault, METADATA, boxes};

/// A `.metadata` of a thousand ranks has a tenth of this.
const LARGEST_METADATA: u64 = 256 << 20;
/// The pickle of a tensor has 150 bytes, of an object a few thousand.
const LARGEST_PICKLE: u64 = 16 << 20;
/// Files that are held open.
const OPEN_FILES: usize = 16;
/// Small runs of numbers are read in windows of so many bytes, large ones where they belong.
const WINDOW: u64 = 1 << 20;
const LARGE: usize = 32 << 10;

/// How a tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// torch.float32, what [`super::write_shard`] writes.
    F32,
    /// torch.float64.
    F64,
    /// torch.float16.
    F16,
    /// torch.bfloat16.
    Bf16,
    /// torch.int64.
    I64,
    /// torch.int32.
    I32,
    /// torch.int16.
    I16,
    /// torch.int8.
    I8,
    /// torch.uint8.
    U8,
    /// torch.bool.
    Bool,
    /// One that this program knows of but does not read: 8-bit floats, complex numbers.
    Other,
}

impl Dtype {
    /// Bytes of a number.
    pub(super) fn size(self) -> Option<usize> {
        match self {
            Self::F64 | Self::I64 => Some(8),
            Self::F32 | Self::I32 => Some(4),
            Self::F16 | Self::Bf16 | Self::I16 => Some(2),
            Self::I8 | Self::U8 | Self::Bool => Some(1),
            Self::Other => None,
        }
    }

    /// Little-endian bytes to the nearest f64 and f32.
    fn convert(self, bytes: &[u8], out: &mut [f32]) {
        fn each<const N: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; N]) -> f32) {
            for (bytes, number) in bytes.as_chunks::<N>().0.iter().zip(out) {
                *number = read(*bytes);
            }
        }
        match self {
            Self::F32 => each(bytes, out, f32::from_le_bytes),
            Self::F64 => each(bytes, out, |bytes| f64::from_le_bytes(bytes) as f32),
            Self::F16 => each(bytes, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Self::Bf16 => each(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Self::I64 => each(bytes, out, |bytes| i64::from_le_bytes(bytes) as f32),
            Self::I32 => each(bytes, out, |bytes| i32::from_le_bytes(bytes) as f32),
            Self::I16 => each(bytes, out, |bytes| i16::from_le_bytes(bytes).into()),
            Self::I8 => each(bytes, out, |bytes| i8::from_le_bytes(bytes).into()),
            Self::U8 | Self::Bool => each(bytes, out, |bytes| u8::from_le_bytes(bytes).into()),
            Self::Other => {}
        }
    }
}

/// A tensor of a checkpoint.
#[derive(Debug)]
pub struct TensorInfo {
    /// Its size in every dimension; none for a scalar.
    pub shape: Vec<usize>,
    /// How its numbers are stored; they are read as f32.
    pub dtype: Dtype,
    pub(super) chunks: Vec<StoredChunk>,
    /// What keeps it from being read.
    fault: Option<Fault>,
}

/// A box of it, not empty.
#[derive(Debug)]
pub(super) struct StoredChunk {
    pub(super) offsets: Vec<usize>,
    pub(super) sizes: Vec<usize>,
    pub(super) stored: Stored,
}

/// Where an item lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    /// Index of the file.
    pub(super) file: usize,
    pub(super) at: u64,
    pub(super) length: u64,
}

/// A file that a checkpoint is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededFile {
    /// Relative to the checkpoint's directory.
    pub name: String,
    /// It must be at least so long.
    pub bytes: u64,
}

/// A checkpoint on disk: what [`METADATA`] says of it, and its files as they are read.
#[derive(Debug)]
pub struct Dcp {
    dir: PathBuf,
    tensors: BTreeMap<String, TensorInfo>,
    pub(super) objects: BTreeMap<String, Stored>,
    files: Vec<NeededFile>,
    faults: Vec<Fault>,
    open: Mutex<Vec<(usize, Arc<File>)>>,
}

/// The numbers of a chunk: where, and in which order.
pub(super) struct Numbers {
    file: Arc<File>,
    dtype: Dtype,
    /// Of the storage, in the file.
    at: u64,
    entry: Entry,
    /// In numbers, within the storage.
    offset: usize,
    strides: Vec<usize>,
}

impl Dcp {
    /// Reads `.metadata` of the checkpoint in `dir`, the directory that holds it. That the
    /// files are there is not looked at; see [`super::verify`].
    ///
    /// # Errors
    ///
    /// [`DcpError::Io`] if it cannot be read, [`DcpError::Broken`] if it is missing, damaged
    /// or names what this program does not know.
    pub fn open(dir: &Path) -> Result<Dcp, DcpError> {
        let broken = |what: &str| DcpError::Broken {
            path: dir.to_owned(),
            fault: Fault { file: Some(METADATA.to_owned()), item: None, what: what.to_owned() },
        };
        let path = dir.join(METADATA);
        let failed = |source| DcpError::Io { path: path.clone(), source };
        let file = match plain_file(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(broken("is missing: the save was cut short, or this is no checkpoint"));
            }
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = Vec::new();
        file.take(LARGEST_METADATA + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > LARGEST_METADATA {
            return Err(broken(&format!("has more than {LARGEST_METADATA} bytes")));
        }
        if bytes.is_empty() {
            return Err(broken("is empty: the save was cut short"));
        }
        let pickle = Pickle::read(&bytes).map_err(|what| broken(&what))?;
        let mut dcp = Dcp {
            dir: dir.to_owned(),
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            files: Vec::new(),
            faults: Vec::new(),
            open: Mutex::default(),
        };
        dcp.take(&pickle).map_err(|what| broken(&what))?;
        Ok(dcp)
    }

    /// Understands the pickle of `.metadata`.
    fn take(&mut self, pickle: &Pickle<'_>) -> Result<(), String> {
        let unknown = |what: &str| format!("is no metadata of a checkpoint, or of an unknown version: {what}");
        let table = |name: &str| {
            pickle.attribute(pickle.root, name).and_then(|slot| pickle.dict(slot)).ok_or_else(|| unknown(name))
        };
        if !matches!(pickle.object(pickle.root), Some((Global::Metadata, ..))) {
            return Err(unknown("the outermost object"));
        }

        let mut places: HashMap<(&str, Option<Vec<usize>>), Stored> = HashMap::new();
        let mut files: HashMap<&str, usize> = HashMap::new();
        for &(index, info) in table("storage_data")? {
            let place = (|| {
                let name = pickle.str(pickle.attribute(index, "fqn")?)?;
                // PyTorch leaves it out for an object.
                let offsets = match pickle.attribute(index, "offset") {
                    None | Some(Slot::None) => None,
                    Some(slot) => Some(pickle.size(slot)?),
                };
                let number = |name| match pickle.attribute(info, name)? {
                    Slot::Int(number) => u64::try_from(number).ok(),
                    _ => None,
                };
                let file = pickle.str(pickle.attribute(info, "relative_path")?)?;
                let (at, length) = (number("offset")?, number("length")?);
                let end = at.checked_add(length).filter(|&end| i64::try_from(end).is_ok())?;
                Some((name, offsets, file, at, length, end))
            })();
            let (name, offsets, file, at, length, end) = place.ok_or_else(|| unknown("a place in storage_data"))?;
            let transformed = pickle.attribute(info, "transform_descriptors").filter(|&slot| slot != Slot::None);
            if transformed.is_some_and(|slot| pickle.list(slot).is_none_or(|list| !list.is_empty())) {
                return Err(format!("says that {name} is compressed or encrypted, which is not read here"));
            }
            let mut components = Path::new(file).components();
            if file.is_empty() || !components.all(|part| matches!(part, Component::Normal(_))) {
                return Err(format!("names the file {file:?}, which is not inside the checkpoint"));
            }
            let file = *files.entry(file).or_insert_with(|| {
                self.files.push(NeededFile { name: file.to_owned(), bytes: 0 });
                self.files.len() - 1
            });
            self.files[file].bytes = self.files[file].bytes.max(end);
            places.insert((name, offsets), Stored { file, at, length });
        }

        for &(name, kind) in table("state_dict_metadata")? {
            let name = pickle.str(name).ok_or_else(|| unknown("a name that is no string"))?;
            match pickle.object(kind) {
                Some((Global::BytesStorageMetadata, ..)) => match places.get(&(name, None)) {
                    Some(&stored) => {
                        self.objects.insert(name.to_owned(), stored);
                    }
                    None => self.faults.push(nowhere(name)),
                },
                Some((Global::TensorStorageMetadata, ..)) => {
                    let info = tensor(pickle, name, kind, &places)
                        .ok_or_else(|| unknown(&format!("shape or boxes of {name}")))?;
                    self.faults.extend(info.fault.clone());
                    self.tensors.insert(name.to_owned(), info);
                }
                _ => return Err(unknown(name)),
            }
        }
        Ok(())
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every tensor with its name, in the order of names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// One of them.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The names of objects, in order.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.objects.keys().map(String::as_str)
    }

    /// The files it is made of, and how long each must be.
    #[must_use]
    pub fn files(&self) -> &[NeededFile] {
        &self.files
    }

    /// What `.metadata` alone shows to be wrong: tensors with missing or overlapping boxes.
    #[must_use]
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// An object: numbers, strings, lists and dicts; tuples come as lists.
    ///
    /// # Errors
    ///
    /// [`DcpError::Absent`] if there is none of that name; [`DcpError::Broken`] if its file is
    /// missing, cut short or changed, or if it holds something else.
    pub fn object(&self, name: &str) -> Result<Value, DcpError> {
        let stored = *self.objects.get(name).ok_or_else(|| self.absent(name))?;
        let file = self.file(stored.file).map_err(|error| self.error(stored, None, error))?;
        let read = || {
            let archive = Archive::open(&file, stored.at, stored.length)?;
            let bytes = archive.small(data_pkl(&archive)?, LARGEST_PICKLE)?;
            let pickle = Pickle::read(&bytes).map_err(ZipError::Broken)?;
            pickle.json(pickle.root).map_err(ZipError::Broken)
        };
        read().map_err(|error| self.error(stored, Some(name.to_owned()), error))
    }

    /// One number: a tensor of one number, or an object that is one; PyTorch keeps `step`
    /// either way. Exact up to 2^53.
    ///
    /// # Errors
    ///
    /// As [`Dcp::object`]; also if there are more numbers than one.
    pub fn number(&self, name: &str) -> Result<f64, DcpError> {
        let not_one = |file: Option<String>| DcpError::Broken {
            path: self.dir.clone(),
            fault: Fault { file, item: Some(name.to_owned()), what: "is not one number".to_owned() },
        };
        let Some(info) = self.tensors.get(name) else {
            return self.object(name)?.as_f64().ok_or_else(|| not_one(None));
        };
        let [chunk] = info.chunks.as_slice() else { return Err(not_one(None)) };
        if info.shape.iter().product::<usize>() != 1 {
            return Err(not_one(None));
        }
        let numbers = self.numbers(name, info, chunk)?;
        let mut bytes = [0; 8];
        let size = info.dtype.size().unwrap_or(8);
        let at = numbers.at + (numbers.offset * size) as u64;
        numbers
            .file
            .read_exact_at(&mut bytes[..size], at)
            .map_err(|error| self.error(chunk.stored, Some(name.to_owned()), error.into()))?;
        Ok(match info.dtype {
            Dtype::F64 => f64::from_le_bytes(bytes),
            Dtype::I64 => i64::from_le_bytes(bytes) as f64,
            Dtype::I32 => i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
            dtype => {
                let mut number = [0.0];
                dtype.convert(&bytes[..size], &mut number);
                number[0].into()
            }
        })
    }

    /// Fills a part, whatever the boxes of the checkpoint are: 16- and 64-bit floats and
    /// integers become the nearest f32. A box that is read as a whole is compared with its
    /// checksum, one that is read in part is not: verify the files first.
    ///
    /// # Errors
    ///
    /// [`DcpError::Absent`] and [`DcpError::Shape`] if the checkpoint is of another model,
    /// [`DcpError::Broken`] if a file is missing, cut short or changed.
    ///
    /// # Panics
    ///
    /// If the part's data are not as many as its range.
    pub fn read(&self, part: &mut PartMut<'_>) -> Result<(), DcpError> {
        assert_eq!(part.range.len(), part.data.len(), "a part of {}", part.name);
        let info = self.tensors.get(part.name).ok_or_else(|| self.absent(part.name))?;
        if info.shape != part.shape {
            return Err(DcpError::Shape {
                path: self.dir.clone(),
                name: part.name.to_owned(),
                there: info.shape.clone(),
                wanted: part.shape.to_vec(),
            });
        }
        if let Some(fault) = &info.fault {
            return Err(DcpError::Broken { path: self.dir.clone(), fault: fault.clone() });
        }
        let wanted = boxes(part.shape, part.range.clone());
        for chunk in &info.chunks {
            if wanted.iter().all(|wanted| shared(wanted, chunk).is_none()) {
                continue;
            }
            let numbers = self.numbers(part.name, info, chunk)?;
            let (offset, strides) = (numbers.offset, numbers.strides.clone());
            let mut source = Source { numbers, window: Vec::new(), window_at: 0 };
            let base = part.range.start;
            let mut copy = |to: usize, from: usize, len: usize| source.read(from, &mut part.data[to - base..][..len]);
            wanted
                .iter()
                .filter_map(|wanted| shared(wanted, chunk))
                .try_for_each(|shared| runs(part.shape, &shared, chunk, (offset, &strides), &mut copy))
                .map_err(|error| self.error(chunk.stored, Some(label(part.name, &chunk.offsets)), error))?;
        }
        Ok(())
    }

    fn absent(&self, name: &str) -> DcpError {
        DcpError::Absent { path: self.dir.clone(), name: name.to_owned() }
    }

    /// What went wrong with an item, or with its file.
    fn error(&self, stored: Stored, item: Option<String>, error: ZipError) -> DcpError {
        let file = &self.files[stored.file].name;
        match error {
            ZipError::Io(source) => DcpError::Io { path: self.dir.join(file), source },
            ZipError::Broken(what) => {
                DcpError::Broken { path: self.dir.clone(), fault: Fault { file: Some(file.clone()), item, what } }
            }
        }
    }

    /// Opens a file of [`Dcp::files`], which must be as long as it should.
    pub(super) fn file(&self, index: usize) -> Result<Arc<File>, ZipError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|(other, _)| *other == index) {
            // The one used last stands last.
            let found = open.remove(at);
            let file = Arc::clone(&found.1);
            open.push(found);
            return Ok(file);
        }
        let needed = &self.files[index];
        let file = match plain_file(&self.dir.join(&needed.name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ZipError::Broken("is missing".to_owned()));
            }
            Err(error) => return Err(ZipError::Io(error)),
        };
        let bytes = file.metadata()?.len();
        if bytes < needed.bytes {
            return Err(ZipError::Broken(format!("has {bytes} bytes, {} are needed: it was cut short", needed.bytes)));
        }
        let file = Arc::new(file);
        if open.len() == OPEN_FILES {
            open.remove(0);
        }
        open.push((index, Arc::clone(&file)));
        Ok(file)
    }

    /// Finds a chunk's numbers in its zip.
    fn numbers(&self, name: &str, info: &TensorInfo, chunk: &StoredChunk) -> Result<Numbers, DcpError> {
        let file = self.file(chunk.stored.file).map_err(|error| self.error(chunk.stored, None, error))?;
        Archive::open(&file, chunk.stored.at, chunk.stored.length)
            .and_then(|archive| numbers_of(&archive, &file, info, chunk))
            .map_err(|error| self.error(chunk.stored, Some(label(name, &chunk.offsets)), error))
    }
}

/// What the zip of a chunk says about its numbers, compared with what `.metadata` says.
pub(super) fn numbers_of(
    archive: &Archive<'_>,
    file: &Arc<File>,
    info: &TensorInfo,
    chunk: &StoredChunk,
) -> Result<Numbers, ZipError> {
    let not = |what: &str| ZipError::Broken(format!("is not what {METADATA} says: {what}"));
    if let Some(entry) = archive.entry("byteorder")
        && archive.small(entry, 64)? != b"little"
    {
        return Err(ZipError::Broken("was written on a big-endian machine, which is not read here".to_owned()));
    }
    let bytes = archive.small(data_pkl(archive)?, LARGEST_PICKLE)?;
    let pickle = Pickle::read(&bytes).map_err(ZipError::Broken)?;
    let tensor = (|| {
        let Some((Global::RebuildTensor, arguments, _)) = pickle.object(pickle.root) else { return None };
        let &[storage, Slot::Int(offset), sizes, strides, ..] = pickle.list(arguments)? else { return None };
        let Some(Node::Persistent(storage)) = pickle.node(storage) else { return None };
        let &[_, Slot::Global(Global::Dtype(dtype)), key, _, Slot::Int(count)] = pickle.list(*storage)? else {
            return None;
        };
        let (offset, count) = (usize::try_from(offset).ok()?, usize::try_from(count).ok()?);
        Some((dtype, pickle.str(key)?, count, offset, pickle.size(sizes)?, pickle.size(strides)?))
    })();
    let (dtype, key, count, offset, sizes, strides) = tensor.ok_or_else(|| not("it is no plain tensor"))?;
    if dtype != info.dtype {
        return Err(not(&format!("its numbers are {dtype:?}, not {:?}", info.dtype)));
    }
    let Some(size) = dtype.size() else {
        return Err(ZipError::Broken("has numbers of a type that is not read here".to_owned()));
    };
    if sizes != chunk.sizes || strides.len() != sizes.len() {
        return Err(not(&format!("its shape is {sizes:?}, not {:?}", chunk.sizes)));
    }
    let entry = archive.entry(&format!("data/{key}")).ok_or_else(|| not("it has no numbers"))?;
    let last = sizes
        .iter()
        .zip(&strides)
        .try_fold(offset, |last, (&size, &stride)| last.checked_add((size - 1).checked_mul(stride)?));
    let stored = count.checked_mul(size).is_some_and(|bytes| bytes as u64 <= entry.size);
    if !stored || last.is_none_or(|last| last >= count) {
        return Err(not("it has fewer numbers than its shape"));
    }
    let at = archive.payload_at(entry)?;
    Ok(Numbers { file: Arc::clone(file), dtype, at, entry: entry.clone(), offset, strides })
}

pub(super) fn data_pkl<'z>(archive: &'z Archive<'_>) -> Result<&'z Entry, ZipError> {
    archive.entry("data.pkl").ok_or_else(|| ZipError::Broken("is damaged: it has no data.pkl".to_owned()))
}

/// A tensor, or a box of it, in a message.
pub(super) fn label(name: &str, offsets: &[usize]) -> String {
    if offsets.iter().all(|&offset| offset == 0) { name.to_owned() } else { format!("{name} from {offsets:?}") }
}

fn nowhere(name: &str) -> Fault {
    Fault { file: Some(METADATA.to_owned()), item: Some(name.to_owned()), what: "has no place in any file".to_owned() }
}

/// What `.metadata` says of a tensor; none if that makes no sense.
fn tensor(
    pickle: &Pickle<'_>,
    name: &str,
    slot: Slot,
    places: &HashMap<(&str, Option<Vec<usize>>), Stored>,
) -> Option<TensorInfo> {
    let (_, _, properties) = pickle.object(pickle.attribute(slot, "properties")?)?;
    let &[Slot::Global(Global::Dtype(dtype)), ..] = pickle.list(properties)? else { return None };
    let shape = pickle.size(pickle.attribute(slot, "size")?)?;
    numbers(&shape)?;
    let mut chunks = Vec::new();
    let mut fault = None;
    for &chunk in pickle.list(pickle.attribute(slot, "chunks")?)? {
        let offsets = pickle.size(pickle.attribute(chunk, "offsets")?)?;
        let sizes = pickle.size(pickle.attribute(chunk, "sizes")?)?;
        let inside =
            |((&offset, &size), &of): ((&usize, &usize), &usize)| offset.checked_add(size).is_some_and(|end| end <= of);
        if offsets.len() != shape.len()
            || sizes.len() != shape.len()
            || !offsets.iter().zip(&sizes).zip(&shape).all(inside)
        {
            return None;
        }
        // A rank with nothing of the tensor.
        if sizes.contains(&0) {
            continue;
        }
        match places.get(&(name, Some(offsets.clone()))) {
            Some(&stored) => chunks.push(StoredChunk { offsets, sizes, stored }),
            None => fault = Some(nowhere(name)),
        }
    }
    let all: Vec<_> = chunks.iter().map(|chunk| (chunk.offsets.as_slice(), chunk.sizes.as_slice())).collect();
    let fault = fault.or_else(|| {
        let what = uncovered(&shape, &all)?;
        Some(Fault { file: Some(METADATA.to_owned()), item: Some(name.to_owned()), what })
    });
    Some(TensorInfo { shape, dtype, chunks, fault })
}

/// Opens what must be a plain file; a pipe does not block.
fn plain_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no plain file")) }
}

/// The indices that a wanted box and a chunk share, in every dimension.
fn shared(wanted: &super::Chunk, chunk: &StoredChunk) -> Option<Vec<Range<usize>>> {
    let one = |((&a, &a_size), (&b, &b_size)): ((&usize, &usize), (&usize, &usize))| {
        let range = a.max(b)..(a + a_size).min(b + b_size);
        (!range.is_empty()).then_some(range)
    };
    wanted.offsets.iter().zip(&wanted.sizes).zip(chunk.offsets.iter().zip(&chunk.sizes)).map(one).collect()
}

/// Walks the numbers at `shared` indices of a tensor, last dimension fastest, and calls
/// `copy(number of the flattened tensor, number of the storage, how many)` for each run that
/// is one in both.
fn runs(
    shape: &[usize],
    shared: &[Range<usize>],
    chunk: &StoredChunk,
    numbers: (usize, &[usize]),
    copy: &mut impl FnMut(usize, usize, usize) -> Result<(), ZipError>,
) -> Result<(), ZipError> {
    let (offset, strides) = numbers;
    let mut index: Vec<usize> = shared.iter().map(|range| range.start).collect();
    // The last dimension at once where the storage has it so.
    let row = match (shared.last(), strides.last()) {
        (Some(range), Some(1)) => range.len(),
        _ => 1,
    };
    let (mut to, mut from, mut len) = (0, 0, 0);
    loop {
        let next_to = index.iter().zip(shape).fold(0, |flat, (index, of)| flat * of + index);
        let inside = index.iter().zip(&chunk.offsets).zip(strides);
        let next_from = inside.fold(offset, |at, ((index, offset), stride)| at + (index - offset) * stride);
        if (to + len, from + len) == (next_to, next_from) {
            len += row;
        } else {
            if len > 0 {
                copy(to, from, len)?;
            }
            (to, from, len) = (next_to, next_from, row);
        }
        // The next row, or number.
        let mut dimension = index.len();
        let mut step = row;
        loop {
            if dimension == 0 {
                return copy(to, from, len);
            }
            dimension -= 1;
            index[dimension] += step;
            if index[dimension] < shared[dimension].end {
                break;
            }
            index[dimension] = shared[dimension].start;
            step = 1;
        }
    }
}

/// A storage that is read in runs.
struct Source {
    numbers: Numbers,
    /// Bytes of the storage, from number `window_at` on.
    window: Vec<u8>,
    window_at: usize,
}

impl Source {
    /// Reads the storage's numbers from `from` on.
    fn read(&mut self, from: usize, out: &mut [f32]) -> Result<(), ZipError> {
        let Numbers { file, dtype, at, entry, .. } = &self.numbers;
        let size = dtype.size().unwrap_or(1);
        if *dtype == Dtype::F32 && out.len() * size >= LARGE {
            file.read_exact_at(out.as_mut_bytes(), at + (from * size) as u64)?;
        } else {
            let mut done = 0;
            while done < out.len() {
                let now = from + done;
                let held = self.window_at..self.window_at + self.window.len() / size;
                if !held.contains(&now) {
                    let left = entry.size - (now * size) as u64;
                    let len = WINDOW.min(left) as usize / size * size;
                    self.window.resize(len, 0);
                    file.read_exact_at(&mut self.window, at + (now * size) as u64)?;
                    self.window_at = now;
                    continue;
                }
                let len = (held.end - now).min(out.len() - done);
                dtype.convert(&self.window[(now - held.start) * size..][..len * size], &mut out[done..done + len]);
                done += len;
            }
        }
        // Compared for nothing, as it is all at hand.
        let whole = *dtype == Dtype::F32 && from == 0 && (out.len() * size) as u64 == entry.size;
        if whole && crc32fast::hash(out.as_bytes()) != entry.crc32 {
            return Err(ZipError::Broken(changed(&entry.name)));
        }
        Ok(())
    }
}
