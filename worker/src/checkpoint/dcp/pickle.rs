//! As much of Python's pickle as checkpoints need.
//!
//! [`Pickler`] writes protocol 2, with the few opcodes that PyTorch's careful loader
//! (`weights_only`) takes. [`Pickle`] reads protocols 2 to 5, into plain values: nothing is
//! imported, called or run. Names of Python must be on the list [`GLOBALS`]; what is built
//! of them is only written down. Values live in one list and refer to each other by index,
//! so that neither a cycle nor a depth of millions can hurt, and there are never more of
//! them than bytes read.

use std::collections::HashMap;

use serde_json::Value;

use super::read::Dtype;

/// Writes a pickle.
#[derive(Debug, Default)]
pub(super) struct Pickler {
    out: Vec<u8>,
    memo: HashMap<String, u32>,
}

impl Pickler {
    pub(super) fn new() -> Self {
        Self { out: vec![0x80, 2], memo: HashMap::new() }
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// Opcodes without argument.
    pub(super) fn ops(&mut self, ops: &[u8]) {
        self.out.extend_from_slice(ops);
    }

    /// What follows is written once under a key and fetched after that.
    fn once(&mut self, key: String, write: impl FnOnce(&mut Self)) {
        if let Some(&at) = self.memo.get(&key) {
            self.index(b"hj", at);
            return;
        }
        write(self);
        let at = self.memo.len() as u32;
        self.index(b"qr", at);
        self.memo.insert(key, at);
    }

    fn index(&mut self, ops: &[u8; 2], at: u32) {
        if let Ok(small) = u8::try_from(at) {
            self.out.extend_from_slice(&[ops[0], small]);
        } else {
            self.out.push(ops[1]);
            self.out.extend_from_slice(&at.to_le_bytes());
        }
    }

    pub(super) fn global(&mut self, module: &str, name: &str) {
        self.once(format!("c{module}\n{name}\n"), |pickler| {
            pickler.out.extend_from_slice(format!("c{module}\n{name}\n").as_bytes());
        });
    }

    /// An object without arguments; the state follows, then `b`.
    pub(super) fn object(&mut self, module: &str, name: &str) {
        self.global(module, name);
        self.ops(b")\x81");
    }

    pub(super) fn string(&mut self, text: &str) {
        self.out.push(b'X');
        // Names and objects of gigabytes are refused where they come in.
        self.out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.out.extend_from_slice(text.as_bytes());
    }

    /// A string that comes again.
    pub(super) fn name(&mut self, text: &str) {
        self.once(format!("s{text}"), |pickler| pickler.string(text));
    }

    pub(super) fn int(&mut self, value: i128) {
        if let Ok(small) = u8::try_from(value) {
            self.out.extend_from_slice(&[b'K', small]);
        } else if let Ok(small) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend_from_slice(&small.to_le_bytes());
        } else {
            self.out.extend_from_slice(&[0x8a, 16]);
            self.out.extend_from_slice(&value.to_le_bytes());
        }
    }

    pub(super) fn float(&mut self, value: f64) {
        self.out.push(b'G');
        self.out.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn tuple(&mut self, of: &[usize]) {
        if of.is_empty() {
            return self.ops(b")");
        }
        self.ops(b"(");
        of.iter().for_each(|&number| self.int(number as i128));
        self.ops(b"t");
    }

    /// `torch.Size`.
    pub(super) fn size(&mut self, of: &[usize]) {
        self.global("torch", "Size");
        self.tuple(of);
        self.ops(b"\x85R");
    }

    pub(super) fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.ops(b"N"),
            Value::Bool(true) => self.ops(b"\x88"),
            Value::Bool(false) => self.ops(b"\x89"),
            Value::Number(number) => match number.as_i128() {
                Some(whole) => self.int(whole),
                None => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => self.string(text),
            Value::Array(list) => {
                self.ops(b"](");
                list.iter().for_each(|value| self.value(value));
                self.ops(b"e");
            }
            Value::Object(map) => {
                self.ops(b"}(");
                for (key, value) in map {
                    self.string(key);
                    self.value(value);
                }
                self.ops(b"u");
            }
        }
    }
}

/// The names of Python that may occur, each with what it is to us.
const GLOBALS: &[(&str, &str, Global)] = &[
    ("torch.distributed.checkpoint.metadata", "Metadata", Global::Metadata),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata", Global::TensorStorageMetadata),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata", Global::BytesStorageMetadata),
    ("torch.distributed.checkpoint.metadata", "TensorProperties", Global::Ignored),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata", Global::Ignored),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex", Global::Ignored),
    ("torch.distributed.checkpoint.metadata", "StorageMeta", Global::Ignored),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", Global::Ignored),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", Global::Ignored),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix", Global::Ignored),
    ("torch.serialization", "_get_layout", Global::Ignored),
    ("pathlib", "PosixPath", Global::Ignored),
    ("pathlib._local", "PosixPath", Global::Ignored),
    ("torch", "Size", Global::Size),
    ("torch._utils", "_rebuild_tensor_v2", Global::RebuildTensor),
    ("collections", "OrderedDict", Global::OrderedDict),
    ("torch", "float32", Global::Dtype(Dtype::F32)),
    ("torch", "FloatStorage", Global::Dtype(Dtype::F32)),
    ("torch", "float64", Global::Dtype(Dtype::F64)),
    ("torch", "DoubleStorage", Global::Dtype(Dtype::F64)),
    ("torch", "float16", Global::Dtype(Dtype::F16)),
    ("torch", "HalfStorage", Global::Dtype(Dtype::F16)),
    ("torch", "bfloat16", Global::Dtype(Dtype::Bf16)),
    ("torch", "BFloat16Storage", Global::Dtype(Dtype::Bf16)),
    ("torch", "int64", Global::Dtype(Dtype::I64)),
    ("torch", "LongStorage", Global::Dtype(Dtype::I64)),
    ("torch", "int32", Global::Dtype(Dtype::I32)),
    ("torch", "IntStorage", Global::Dtype(Dtype::I32)),
    ("torch", "int16", Global::Dtype(Dtype::I16)),
    ("torch", "ShortStorage", Global::Dtype(Dtype::I16)),
    ("torch", "int8", Global::Dtype(Dtype::I8)),
    ("torch", "CharStorage", Global::Dtype(Dtype::I8)),
    ("torch", "uint8", Global::Dtype(Dtype::U8)),
    ("torch", "ByteStorage", Global::Dtype(Dtype::U8)),
    ("torch", "bool", Global::Dtype(Dtype::Bool)),
    ("torch", "BoolStorage", Global::Dtype(Dtype::Bool)),
    ("torch", "float8_e4m3fn", Global::Dtype(Dtype::Other)),
    ("torch", "float8_e5m2", Global::Dtype(Dtype::Other)),
    ("torch", "complex64", Global::Dtype(Dtype::Other)),
    ("torch", "complex128", Global::Dtype(Dtype::Other)),
    ("torch", "uint16", Global::Dtype(Dtype::Other)),
    ("torch", "uint32", Global::Dtype(Dtype::Other)),
    ("torch", "uint64", Global::Dtype(Dtype::Other)),
];

/// A name of Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,
    Size,
    RebuildTensor,
    OrderedDict,
    Dtype(Dtype),
    /// What it makes is known by where it stands.
    Ignored,
}

/// What a place of the stack, a list or a dict holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Slot {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Global(Global),
    /// Index of a [`Node`]; a pickle has less than 2^32 bytes.
    Node(u32),
}

/// A value with parts.
#[derive(Debug)]
pub(super) enum Node<'a> {
    Str(&'a str),
    Bytes,
    /// Beyond i64.
    Unsigned(u64),
    List(Vec<Slot>),
    Tuple(Vec<Slot>),
    Dict(Vec<(Slot, Slot)>),
    /// What a class was made of, or a function called with, and the state it was given.
    Object {
        of: Global,
        arguments: Slot,
        state: Slot,
    },
    /// A storage, by `torch.save`'s key.
    Persistent(Slot),
}

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    /// The value it is.
    pub(super) root: Slot,
}

/// Why it was not.
type Refused = String;

impl<'a> Pickle<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, Refused> {
        if u32::try_from(bytes.len()).is_err() {
            return Err("is too large".to_owned());
        }
        let mut machine =
            Machine { rest: bytes, nodes: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        let root = machine.run().map_err(|what| {
            format!("is damaged or no pickle of a checkpoint: {what}, near byte {}", bytes.len() - machine.rest.len())
        })?;
        Ok(Self { nodes: machine.nodes, root })
    }

    pub(super) fn node(&self, slot: Slot) -> Option<&Node<'a>> {
        match slot {
            Slot::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    pub(super) fn str(&self, slot: Slot) -> Option<&'a str> {
        match self.node(slot) {
            Some(Node::Str(text)) => Some(text),
            _ => None,
        }
    }

    pub(super) fn dict(&self, slot: Slot) -> Option<&[(Slot, Slot)]> {
        match self.node(slot) {
            Some(Node::Dict(items)) => Some(items),
            _ => None,
        }
    }

    /// A list or tuple.
    pub(super) fn list(&self, slot: Slot) -> Option<&[Slot]> {
        match self.node(slot) {
            Some(Node::List(items) | Node::Tuple(items)) => Some(items),
            _ => None,
        }
    }

    /// What an object was made of, with, and given.
    pub(super) fn object(&self, slot: Slot) -> Option<(Global, Slot, Slot)> {
        match self.node(slot) {
            Some(Node::Object { of, arguments, state }) => Some((*of, *arguments, *state)),
            _ => None,
        }
    }

    /// An attribute of an object.
    pub(super) fn attribute(&self, slot: Slot, name: &str) -> Option<Slot> {
        let (_, _, state) = self.object(slot)?;
        self.dict(state)?.iter().find(|(key, _)| self.str(*key) == Some(name)).map(|(_, value)| *value)
    }

    /// `torch.Size`, or a tuple of numbers.
    pub(super) fn size(&self, slot: Slot) -> Option<Vec<usize>> {
        let tuple = match self.object(slot) {
            Some((Global::Size, arguments, _)) => *self.list(arguments)?.first()?,
            Some(_) => return None,
            None => slot,
        };
        self.list(tuple)?
            .iter()
            .map(|number| match number {
                Slot::Int(number) => usize::try_from(*number).ok(),
                _ => None,
            })
            .collect()
    }

    /// Plain values: numbers, strings, lists, dicts; tuples become lists, and keys that are
    /// numbers strings.
    pub(super) fn json(&self, slot: Slot) -> Result<Value, Refused> {
        self.to_json(slot, 64, &mut 1_000_000)
    }

    fn to_json(&self, slot: Slot, depth: usize, left: &mut usize) -> Result<Value, Refused> {
        if depth == 0 || *left == 0 {
            return Err("is nested too deep or too large".to_owned());
        }
        *left -= 1;
        Ok(match slot {
            Slot::None => Value::Null,
            Slot::Bool(value) => value.into(),
            Slot::Int(value) => value.into(),
            Slot::Float(value) => serde_json::Number::from_f64(value)
                .map(Value::Number)
                .ok_or_else(|| format!("holds {value}, which is no finite number"))?,
            Slot::Global(_) => return Err("holds a class".to_owned()),
            Slot::Node(_) => match self.node(slot) {
                Some(Node::Str(text)) => Value::String((*text).to_owned()),
                Some(Node::Unsigned(value)) => (*value).into(),
                Some(Node::List(items) | Node::Tuple(items)) => Value::Array(
                    items.iter().map(|item| self.to_json(*item, depth - 1, left)).collect::<Result<_, _>>()?,
                ),
                Some(Node::Dict(items)) => {
                    let mut map = serde_json::Map::new();
                    for (key, value) in items {
                        let key = match self.to_json(*key, 1, left)? {
                            Value::String(key) => key,
                            Value::Number(key) => key.to_string(),
                            _ => return Err("has keys that are neither strings nor numbers".to_owned()),
                        };
                        map.insert(key, self.to_json(*value, depth - 1, left)?);
                    }
                    Value::Object(map)
                }
                _ => return Err("holds more than numbers, strings, lists and dicts".to_owned()),
            },
        })
    }
}

/// The stack machine that a pickle is a program for.
struct Machine<'a> {
    rest: &'a [u8],
    nodes: Vec<Node<'a>>,
    stack: Vec<Slot>,
    /// Where on the stack a tuple, list or dict under construction begins.
    marks: Vec<usize>,
    memo: HashMap<u32, Slot>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Slot, Refused> {
        loop {
            let op = self.take(1)?[0];
            match op {
                b'.' => return self.pop(),
                0x80 => {
                    let protocol = self.take(1)?[0];
                    if !(2..=5).contains(&protocol) {
                        return Err(format!("it has protocol {protocol}"));
                    }
                }
                0x95 => {
                    self.take(8)?; // how long a frame is
                }
                b'(' => self.marks.push(self.stack.len()),
                b'0' => {
                    self.pop()?;
                }
                b'1' => {
                    self.marked()?;
                }
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                b'N' => self.stack.push(Slot::None),
                0x88 => self.stack.push(Slot::Bool(true)),
                0x89 => self.stack.push(Slot::Bool(false)),
                b'K' => self.int(u8::from_le_bytes)?,
                b'M' => self.int(u16::from_le_bytes)?,
                b'J' => self.int(i32::from_le_bytes)?,
                0x8a => {
                    let len = self.take(1)?[0] as usize;
                    self.long(len)?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.array()?);
                    self.stack.push(Slot::Float(value));
                }
                0x8c => self.string::<1>()?,
                b'X' => self.string::<4>()?,
                0x8d => self.string::<8>()?,
                b'C' => self.bytes::<1>()?,
                b'B' => self.bytes::<4>()?,
                0x8e => self.bytes::<8>()?,
                b']' => self.push(Node::List(Vec::new())),
                b'}' => self.push(Node::Dict(Vec::new())),
                b')' => self.push(Node::Tuple(Vec::new())),
                0x85..=0x87 => {
                    let len = (op - 0x84) as usize;
                    let from = self.stack.len().checked_sub(len).ok_or("a tuple of nothing")?;
                    self.above_mark(from)?;
                    let items = self.stack.split_off(from);
                    self.push(Node::Tuple(items));
                }
                b't' => {
                    let items = self.marked()?;
                    self.push(Node::Tuple(items));
                }
                b'l' => {
                    let items = self.marked()?;
                    self.push(Node::List(items));
                }
                b'd' => {
                    let items = self.marked()?;
                    self.push(Node::Dict(Vec::new()));
                    self.set(&items)?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(&[item])?;
                }
                b'e' => {
                    let items = self.marked()?;
                    self.append(&items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set(&[key, value])?;
                }
                b'u' => {
                    let items = self.marked()?;
                    self.set(&items)?;
                }
                b'c' => {
                    let module = self.line()?;
                    let name = self.line()?;
                    self.global(module, name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.text(module), self.text(name)) {
                        (Some(module), Some(name)) => self.global(module, name)?,
                        _ => return Err("a name that is no string".to_owned()),
                    }
                }
                0x81 | b'R' => {
                    let arguments = self.pop()?;
                    match (self.pop()?, arguments) {
                        (Slot::Global(Global::OrderedDict), _) => self.push(Node::Dict(Vec::new())),
                        (Slot::Global(of), arguments) => self.push(Node::Object { of, arguments, state: Slot::None }),
                        _ => return Err("it calls what is no class".to_owned()),
                    }
                }
                b'b' => {
                    let given = self.pop()?;
                    let top = self.top()?;
                    match self.node(top) {
                        Some(Node::Object { state, .. }) => *state = given,
                        // Attributes of a dict: state dicts have `_metadata`.
                        Some(Node::Dict(_)) => {}
                        _ => return Err("a state for what is no object".to_owned()),
                    }
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Node::Persistent(id));
                }
                b'q' => {
                    let at = self.take(1)?[0];
                    self.remember(at.into())?;
                }
                b'r' => {
                    let at = u32::from_le_bytes(self.array()?);
                    self.remember(at)?;
                }
                0x94 => self.remember(self.memo.len() as u32)?,
                b'h' => {
                    let at = self.take(1)?[0];
                    self.recall(at.into())?;
                }
                b'j' => {
                    let at = u32::from_le_bytes(self.array()?);
                    self.recall(at)?;
                }
                _ => return Err(format!("opcode {op:#04x} is not known here")),
            }
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Refused> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or("it ends too early")?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<&'a str, Refused> {
        let len = self.rest.iter().take(300).position(|&byte| byte == b'\n').ok_or("a name without an end")?;
        let line = self.take(len + 1)?;
        std::str::from_utf8(&line[..len]).map_err(|_| "a name that is no text".to_owned())
    }

    fn above_mark(&self, at: usize) -> Result<(), Refused> {
        if self.marks.last().is_some_and(|&mark| at < mark) { Err("it takes what is not there".into()) } else { Ok(()) }
    }

    fn pop(&mut self) -> Result<Slot, Refused> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn top(&mut self) -> Result<Slot, Refused> {
        let at = self.stack.len().checked_sub(1).ok_or("it takes what is not there")?;
        self.above_mark(at)?;
        Ok(self.stack[at])
    }

    /// Everything since the last mark.
    fn marked(&mut self) -> Result<Vec<Slot>, Refused> {
        let mark = self.marks.pop().ok_or("an end without a beginning")?;
        Ok(self.stack.split_off(mark))
    }

    fn push(&mut self, node: Node<'a>) {
        self.stack.push(Slot::Node(self.nodes.len() as u32));
        self.nodes.push(node);
    }

    fn node(&mut self, slot: Slot) -> Option<&mut Node<'a>> {
        match slot {
            Slot::Node(at) => self.nodes.get_mut(at as usize),
            _ => None,
        }
    }

    fn text(&mut self, slot: Slot) -> Option<&'a str> {
        match self.node(slot) {
            Some(Node::Str(text)) => Some(text),
            _ => None,
        }
    }

    fn int<const N: usize, T: Into<i64>>(&mut self, read: fn([u8; N]) -> T) -> Result<(), Refused> {
        let value = read(self.array()?).into();
        self.stack.push(Slot::Int(value));
        Ok(())
    }

    /// Two's complement of any length; more than 64 bits only if they say nothing.
    fn long(&mut self, len: usize) -> Result<(), Refused> {
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        let (low, high) = bytes.split_at(len.min(16));
        wide[..low.len()].copy_from_slice(low);
        if high.iter().any(|&byte| byte != wide[15]) {
            return Err(format!("a number of {len} bytes"));
        }
        let wide = i128::from_le_bytes(wide);
        if let Ok(value) = i64::try_from(wide) {
            self.stack.push(Slot::Int(value));
        } else {
            let value = u64::try_from(wide).map_err(|_| format!("the number {wide}"))?;
            self.push(Node::Unsigned(value));
        }
        Ok(())
    }

    /// Bytes after their length, which has N bytes itself.
    fn sized<const N: usize>(&mut self) -> Result<&'a [u8], Refused> {
        let mut len = [0; 8];
        len[..N].copy_from_slice(self.take(N)?);
        self.take(usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX))
    }

    fn string<const N: usize>(&mut self) -> Result<(), Refused> {
        let text = std::str::from_utf8(self.sized::<N>()?).map_err(|_| "a string that is no text")?;
        self.push(Node::Str(text));
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<(), Refused> {
        self.sized::<N>()?;
        self.push(Node::Bytes);
        Ok(())
    }

    fn append(&mut self, more: &[Slot]) -> Result<(), Refused> {
        let top = self.top()?;
        match self.node(top) {
            Some(Node::List(items)) => items.extend_from_slice(more),
            _ => return Err("it appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn set(&mut self, more: &[Slot]) -> Result<(), Refused> {
        let top = self.top()?;
        match (self.node(top), more.len() % 2) {
            (Some(Node::Dict(items)), 0) => items.extend(more.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => return Err("it sets items of what is no dict".to_owned()),
        }
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), Refused> {
        let known = GLOBALS.iter().find(|known| (known.0, known.1) == (module, name));
        let &(_, _, global) = known.ok_or_else(|| format!("it names {module:?} {name:?}, which is not on the list"))?;
        self.stack.push(Slot::Global(global));
        Ok(())
    }

    fn remember(&mut self, at: u32) -> Result<(), Refused> {
        let top = self.top()?;
        self.memo.insert(at, top);
        Ok(())
    }

    fn recall(&mut self, at: u32) -> Result<(), Refused> {
        let slot = *self.memo.get(&at).ok_or("it recalls what it never had")?;
        self.stack.push(slot);
        Ok(())
    }
}
