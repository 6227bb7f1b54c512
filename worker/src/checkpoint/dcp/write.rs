//! Writing: a rank's file, and the `.metadata` of all.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zerocopy::IntoBytes;

use super::super::Part;
use super::boxes::uncovered;
use super::pickle::Pickler;
use super::zip::{Counted, Writer};
use super::{DcpError, Fault, boxes};

/// What a rank's file holds; sent to rank 0, which writes [`metadata`] from all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// In the order of the file.
    pub items: Vec<Item>,
    /// The whole file's length.
    pub bytes: u64,
    /// CRC-32 (zip's, IEEE) of the whole file.
    pub crc32: u32,
}

/// One item of a file: a box of a tensor, or an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Of the tensor or object.
    pub name: String,
    /// Which box of the tensor; none for an object.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub placed: Option<Placed>,
    /// Where it begins in the file, a multiple of 64 bytes.
    pub at: u64,
    /// Its bytes.
    pub length: u64,
    /// CRC-32 of those bytes.
    pub crc32: u32,
}

/// A box of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    /// Where the box begins, in every dimension.
    pub offsets: Vec<usize>,
    /// How far it goes, in every dimension.
    pub sizes: Vec<usize>,
}

/// The name of a rank's file: `__3_0.distcp`.
#[must_use]
pub fn shard_name(rank: u32) -> String {
    format!("__{rank}_0.distcp")
}

/// Writes a rank's file: its parts of tensors (f32), each as the fewest boxes, and objects,
/// which only one rank writes. Buffers itself: hand over the plain file; syncing it is the
/// caller's.
///
/// # Errors
///
/// What the file says (no space, quota), and [`io::ErrorKind::InvalidInput`] for a part whose
/// numbers are not as many as its range, or that does not lie within its tensor.
pub fn write_shard(file: &mut impl Write, parts: &[Part<'_>], objects: &[(&str, &Value)]) -> io::Result<Shard> {
    let mut out = Counted::new(file);
    let mut items = Vec::new();
    for part in parts {
        let numbers = numbers(part.shape).filter(|&numbers| part.range.end <= numbers);
        if numbers.is_none() || part.range.len() != part.data.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{}: {} numbers for {:?} of a tensor of shape {:?}",
                    part.name,
                    part.data.len(),
                    part.range,
                    part.shape
                ),
            ));
        }
        for chunk in boxes(part.shape, part.range.clone()) {
            let data = &part.data[chunk.range.start - part.range.start..chunk.range.end - part.range.start];
            let pickle = tensor_pickle(&chunk.sizes, data.len());
            let placed = Placed { shape: part.shape.to_vec(), offsets: chunk.offsets, sizes: chunk.sizes };
            items.push(item(&mut out, part.name, Some(placed), &pickle, Some(to_bytes(data)))?);
        }
    }
    for (name, value) in objects {
        let mut pickler = Pickler::new();
        pickler.value(value);
        items.push(item(&mut out, name, None, &pickler.finish(), None)?);
    }
    let (bytes, crc32) = out.finish()?;
    Ok(Shard { items, bytes, crc32 })
}

/// As they are on disk.
fn to_bytes(numbers: &[f32]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "checkpoints hold numbers as this machine does") };
    numbers.as_bytes()
}

/// How many numbers a tensor has; none if no memory could hold them.
pub(super) fn numbers(shape: &[usize]) -> Option<usize> {
    let bytes = shape.iter().filter(|&&size| size > 0).try_fold(8usize, |all, &size| all.checked_mul(size))?;
    (bytes <= isize::MAX as usize).then(|| shape.iter().product())
}

/// A whole file of `torch.save`.
fn item<W: Write>(
    out: &mut Counted<'_, W>,
    name: &str,
    placed: Option<Placed>,
    pickle: &[u8],
    data: Option<&[u8]>,
) -> io::Result<Item> {
    out.align()?;
    out.item_crc();
    let at = out.at();
    let mut zip = Writer::new(out);
    // PyTorch finds entries by name; the numbers come last, so that nothing after them
    // lies beyond 4 GiB but the directory.
    zip.entry("archive/data.pkl", pickle)?;
    zip.entry("archive/.format_version", b"1")?;
    zip.entry("archive/.storage_alignment", b"64")?;
    zip.entry("archive/byteorder", b"little")?;
    zip.entry("archive/version", b"3\n")?;
    if let Some(data) = data {
        zip.entry("archive/data/0", data)?;
    }
    zip.finish()?;
    Ok(Item { name: name.to_owned(), placed, at, length: out.at() - at, crc32: out.item_crc() })
}

/// `_rebuild_tensor_v2(storage 0 of FloatStorage on cpu, offset 0, sizes, strides, no
/// gradient, no hooks)`.
fn tensor_pickle(sizes: &[usize], numbers: usize) -> Vec<u8> {
    let mut strides = vec![1; sizes.len()];
    for dimension in (1..sizes.len()).rev() {
        strides[dimension - 1] = strides[dimension] * sizes[dimension].max(1);
    }
    let mut pickler = Pickler::new();
    pickler.global("torch._utils", "_rebuild_tensor_v2");
    pickler.ops(b"((");
    pickler.string("storage");
    pickler.global("torch", "FloatStorage");
    pickler.string("0");
    pickler.string("cpu");
    pickler.int(numbers as i128);
    pickler.ops(b"tQK\x00");
    pickler.tuple(sizes);
    pickler.tuple(&strides);
    pickler.ops(b"\x89");
    pickler.global("collections", "OrderedDict");
    pickler.ops(b")RtR");
    pickler.finish()
}

/// Where a state dict holds what the checkpoint calls `name`: tensors of the model under
/// their whole name, `optimizer.state.NAME.exp_avg` and objects nested, as PyTorch's
/// `get_optimizer_state_dict` has them.
fn path(name: &str, tensor: bool) -> Vec<&str> {
    if let Some(rest) = name.strip_prefix("optimizer.state.")
        && let Some((parameter, which)) = rest.rsplit_once('.')
    {
        return vec!["optimizer", "state", parameter, which];
    }
    if tensor { vec![name] } else { name.split('.').collect() }
}

const CLASSES: &str = "torch.distributed.checkpoint.metadata";

/// The `.metadata` of a checkpoint of `files` (name and content): f32 tensors and objects.
///
/// # Errors
///
/// [`DcpError::Incomplete`] if the files do not hold every number of each of `tensors` (name
/// and shape) exactly once, hold another tensor, or an object twice.
pub fn metadata(tensors: &[(&str, &[usize])], files: &[(String, Shard)]) -> Result<Vec<u8>, DcpError> {
    let mut pieces: BTreeMap<&str, Vec<&Placed>> = tensors.iter().map(|&(name, _)| (name, Vec::new())).collect();
    let shapes: BTreeMap<&str, &[usize]> = tensors.iter().copied().collect();
    let mut objects = BTreeMap::new();
    let mut faults = Vec::new();
    for (file, item) in files.iter().flat_map(|(file, shard)| shard.items.iter().map(move |item| (file, item))) {
        let fault =
            |what: &str| Fault { file: Some(file.clone()), item: Some(item.name.clone()), what: what.to_owned() };
        match &item.placed {
            Some(placed) if shapes.get(item.name.as_str()).is_some_and(|shape| *shape == placed.shape) => {
                pieces.entry(&item.name).or_default().push(placed);
            }
            Some(placed) => faults.push(fault(&match shapes.get(item.name.as_str()) {
                Some(shape) => format!("has shape {:?} here and {shape:?} elsewhere", placed.shape),
                None => "is no tensor of this model".to_owned(),
            })),
            None => {
                if objects.insert(item.name.as_str(), file).is_some() || shapes.contains_key(item.name.as_str()) {
                    faults.push(fault("is there twice"));
                }
            }
        }
    }
    for (name, placed) in &pieces {
        let all: Vec<_> = placed.iter().map(|placed| (placed.offsets.as_slice(), placed.sizes.as_slice())).collect();
        if let Some(what) = uncovered(shapes[name], &all) {
            faults.push(Fault { file: None, item: Some((*name).to_owned()), what });
        }
    }
    if !faults.is_empty() {
        return Err(DcpError::Incomplete { faults });
    }

    let mut p = Pickler::new();
    p.object(CLASSES, "Metadata");
    p.ops(b"}(");
    p.name("state_dict_metadata");
    p.ops(b"}(");
    for (name, placed) in &pieces {
        p.name(name);
        p.object(CLASSES, "TensorStorageMetadata");
        p.ops(b"}(");
        p.name("properties");
        properties(&mut p);
        p.name("size");
        p.size(shapes[name]);
        p.name("chunks");
        p.ops(b"](");
        for placed in placed {
            p.object(CLASSES, "ChunkStorageMetadata");
            p.ops(b"}(");
            p.name("offsets");
            p.size(&placed.offsets);
            p.name("sizes");
            p.size(&placed.sizes);
            p.ops(b"ub");
        }
        p.ops(b"eub");
    }
    for name in objects.keys() {
        p.name(name);
        p.object(CLASSES, "BytesStorageMetadata");
    }
    p.ops(b"u");

    p.name("planner_data");
    p.ops(b"}(");
    for (name, tensor) in pieces.keys().map(|name| (name, true)).chain(objects.keys().map(|name| (name, false))) {
        p.name(name);
        p.ops(b"(");
        for key in path(name, tensor) {
            // A place in a list, as of `optimizer.param_groups.0.lr`.
            match key.parse::<u32>() {
                Ok(index) if !tensor => p.int(index.into()),
                _ => p.name(key),
            }
        }
        p.ops(b"t");
    }
    p.ops(b"u");

    p.name("storage_data");
    p.ops(b"}(");
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (file, item) in files.iter().flat_map(|(file, shard)| shard.items.iter().map(move |item| (file, item))) {
        p.object(CLASSES, "MetadataIndex");
        p.ops(b"}(");
        p.name("fqn");
        p.name(&item.name);
        p.name("offset");
        match &item.placed {
            Some(placed) => {
                p.size(&placed.offsets);
                p.name("index");
                let index = seen.entry(&item.name).or_default();
                p.int(*index as i128);
                *index += 1;
            }
            None => {
                p.ops(b"N");
                p.name("index");
                p.ops(b"N");
            }
        }
        p.ops(b"ub");
        p.object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        p.ops(b"}(");
        p.name("relative_path");
        p.name(file);
        p.name("offset");
        p.int(i128::from(item.at));
        p.name("length");
        p.int(i128::from(item.length));
        p.ops(b"ub");
    }
    p.ops(b"u");

    p.name("storage_meta");
    p.ops(b"N");
    p.name("version");
    p.string("1.0.0");
    p.ops(b"ub");
    Ok(p.finish())
}

/// float32, strided, no gradient, contiguous, not pinned.
fn properties(p: &mut Pickler) {
    p.object(CLASSES, "TensorProperties");
    p.ops(b"(");
    p.global("torch", "float32");
    p.global("torch.serialization", "_get_layout");
    p.name("torch.strided");
    p.ops(b"\x85R\x89");
    p.global(CLASSES, "_MEM_FORMAT_ENCODING");
    p.ops(b"K\x00\x85R\x89tb");
}
