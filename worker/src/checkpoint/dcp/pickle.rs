//! As much of Python's pickle as checkpoints need.
//!
//! [`Pickler`] writes protocol 2, with the few opcodes that PyTorch's careful loader
//! (`weights_only`) takes.

use std::collections::HashMap;

use serde_json::Value;

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
