//! TOML, YAML and `section.key=value` as one list of known keys with their values and where
//! they stand. Types and ranges are checked by `build.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use palingenesis::config::printable;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::ConfigError;
use super::keys::{self, Key, Takes};

/// The longest file that is read; one that is written by hand is far shorter.
const LONGEST: u64 = 1 << 20;

/// A key's value as somebody wrote it.
#[derive(Debug, Clone)]
pub struct Given {
    pub value: Value,
    /// "train.toml:3", "command line".
    pub place: String,
}

/// By full name: "train.lr".
pub type All = BTreeMap<String, Given>;

/// The file's text.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |why: String| ConfigError(format!("configuration file {}: {why}", path.display()));
    // Without O_NONBLOCK a fifo holds whoever opens it.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = opened.map_err(|problem| match problem.kind() {
        ErrorKind::NotFound if path.is_relative() => {
            let here = std::env::current_dir().map(|here| here.display().to_string()).unwrap_or_default();
            error(format!("does not exist; it is looked for from the working directory, {here}"))
        }
        _ => error(format!("cannot be opened: {problem}")),
    })?;
    let data = file.metadata().map_err(|problem| error(format!("cannot be looked at: {problem}")))?;
    if !data.is_file() {
        let what = if data.is_dir() { "is a directory" } else { "is no regular file" };
        return Err(error(format!("{what}; name a TOML or YAML file, which all ranks can read")));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(|problem| error(format!("cannot be read: {problem}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(error(format!("is longer than {LONGEST} bytes; is it the right file?")));
    }
    String::from_utf8(bytes).map_err(|problem| {
        let before = &problem.as_bytes()[..problem.utf8_error().valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        error(format!("is not UTF-8 in line {line}; save it as UTF-8"))
    })
}

/// What stands in the text of `file`, and over that the `overrides`.
pub fn all(file: &Path, text: &str, overrides: &[String]) -> Result<All, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (entries, yaml) = document(file, text)?;
    let reader = Reader { file, text, yaml };
    let mut all = All::new();
    for entry in &entries {
        reader.section(entry, &mut all)?;
    }
    for text in overrides {
        apply(text, &mut all)?;
    }
    Ok(all)
}

/// A name with what it stands for. YAML's parser tells no lines; see [`Reader::place`].
#[derive(Debug)]
struct Entry {
    name: String,
    line: Option<usize>,
    node: Node,
}

#[derive(Debug)]
enum Node {
    Value(Value),
    Table(Vec<Entry>),
}

impl Node {
    fn value(&self) -> Value {
        match self {
            Node::Value(value) => value.clone(),
            Node::Table(entries) => {
                Value::Object(entries.iter().map(|entry| (entry.name.clone(), entry.node.value())).collect())
            }
        }
    }
}

/// By the file's ending; without one that is known, by what it can be read as. True for YAML.
fn document(file: &Path, text: &str) -> Result<(Vec<Entry>, bool), ConfigError> {
    let ending = file.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let at = |(line, why): (Option<usize>, String), what: &str| {
        let line = line.map(|line| format!(":{line}")).unwrap_or_default();
        ConfigError(format!("{}{line}: not {what}: {}", file.display(), printable(&why)))
    };
    match ending.as_str() {
        "toml" => of_toml(text).map(|entries| (entries, false)).map_err(|fault| at(fault, "TOML")),
        // JSON is YAML.
        "yaml" | "yml" | "json" => of_yaml(text).map(|entries| (entries, true)).map_err(|fault| at(fault, "YAML")),
        _ => match (of_toml(text), of_yaml(text)) {
            (Ok(entries), _) => Ok((entries, false)),
            (_, Ok(entries)) => Ok((entries, true)),
            (Err((line, toml)), Err((_, yaml))) => Err(ConfigError(format!(
                "{}: neither TOML (line {}: {}) nor YAML ({}); name it .toml or .yaml",
                file.display(),
                line.unwrap_or(1),
                printable(&toml),
                printable(&yaml)
            ))),
        },
    }
}

type Fault = (Option<usize>, String);

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

fn of_toml(text: &str) -> Result<Vec<Entry>, Fault> {
    let document = DeTable::parse(text).map_err(|error| {
        let line = error.span().map(|span| line_of(text, span.start));
        (line, error.message().to_string())
    })?;
    Ok(toml_table(document.get_ref(), text))
}

fn toml_table(table: &DeTable, text: &str) -> Vec<Entry> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    let read = entries.into_iter().map(|(name, value)| Entry {
        name: name.get_ref().to_string(),
        line: Some(line_of(text, name.span().start)),
        node: toml_node(value.get_ref(), text),
    });
    read.collect()
}

fn toml_node(value: &DeValue, text: &str) -> Node {
    let text_of = |text: &str| Value::String(text.to_string());
    Node::Value(match value {
        DeValue::String(string) => text_of(string),
        DeValue::Integer(number) => {
            let digits = number.as_str();
            let signed = || i64::from_str_radix(digits, number.radix()).map(Value::from);
            u64::from_str_radix(digits, number.radix())
                .map(Value::from)
                .or_else(|_| signed())
                .unwrap_or_else(|_| text_of(digits))
        }
        DeValue::Float(number) => real(number.as_str().parse().unwrap_or(f64::NAN), number.as_str()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(date) => text_of(&date.to_string()),
        DeValue::Array(list) => {
            Value::Array(list.iter().map(|value| toml_node(value.get_ref(), text).value()).collect())
        }
        DeValue::Table(table) => return Node::Table(toml_table(table, text)),
    })
}

/// JSON has no infinity; as text it is refused by every key.
fn real(number: f64, written: &str) -> Value {
    serde_json::Number::from_f64(number).map_or_else(|| Value::String(written.to_string()), Value::Number)
}

/// Brackets within brackets that YAML is read with: its scanner's time grows with their square.
const DEEPEST: i64 = 100;

fn of_yaml(text: &str) -> Result<Vec<Entry>, Fault> {
    if text.lines().map(str::trim_start).all(|line| line.is_empty() || line.starts_with('#')) {
        return Ok(Vec::new());
    }
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        depth += i64::from(matches!(byte, b'[' | b'{')) - i64::from(matches!(byte, b']' | b'}'));
        if depth > DEEPEST {
            return Err((Some(line_of(text, at)), format!("more than {DEEPEST} open brackets")));
        }
    }
    let fault = |error: serde_norway::Error| {
        let text = error.to_string();
        // Its place is told before it.
        let why = text.split(" at line ").next().unwrap_or_default().to_string();
        (error.location().map(|location| location.line()), why)
    };
    match serde_norway::from_str::<Node>(text).map_err(fault)? {
        Node::Table(entries) => Ok(entries),
        Node::Value(Value::Null) => Ok(Vec::new()),
        Node::Value(_) => Err((None, "it has no sections".to_string())),
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("sections, keys and values")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Node, E> {
        Ok(Node::Value(Value::Bool(flag)))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Node, E> {
        Ok(Node::Value(Value::from(number)))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Node, E> {
        Ok(Node::Value(Value::from(number)))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Node, E> {
        Ok(Node::Value(real(number, &number.to_string())))
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Value(Value::String(text.to_string())))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Value(Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut values = Vec::new();
        while let Some(node) = list.next_element::<Node>()? {
            values.push(node.value());
        }
        Ok(Node::Value(Value::Array(values)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        while let Some(name) = map.next_key_seed(NewKey(&entries))? {
            entries.push(Entry { name, line: None, node: map.next_value()? });
        }
        Ok(Node::Table(entries))
    }
}

/// A key that is not among these, so that the error about one that is has its place.
struct NewKey<'e>(&'e [Entry]);

impl<'de> DeserializeSeed<'de> for NewKey<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NewKey<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<String, E> {
        match self.0.iter().any(|entry| entry.name == name) {
            true => Err(E::custom(format!("key '{}' is there twice", printable(name)))),
            false => Ok(name.to_string()),
        }
    }
}

/// Stops at a key with an error, whose place is that key's.
struct StopAt<'p>(&'p [&'p str]);

impl<'de> DeserializeSeed<'de> for StopAt<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StopAt<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("keys")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((wanted, below)) = self.0.split_first() else { return Ok(()) };
        while let Some(found) = map.next_key_seed(StopKey { wanted, stop: below.is_empty() })? {
            if found {
                return map.next_value_seed(StopAt(below));
            }
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

struct StopKey<'p> {
    wanted: &'p str,
    stop: bool,
}

impl<'de> DeserializeSeed<'de> for StopKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for StopKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<bool, E> {
        match name == self.wanted {
            true if self.stop => Err(E::custom("here")),
            found => Ok(found),
        }
    }
}

/// From the file's entries to known keys.
struct Reader<'a> {
    file: &'a Path,
    text: &'a str,
    yaml: bool,
}

impl Reader<'_> {
    /// Where a key stands: the file, and its line where that can be told.
    fn place(&self, entry: &Entry, path: &[&str]) -> String {
        let found = || {
            let stopped = StopAt(path).deserialize(serde_norway::Deserializer::from_str(self.text)).err()?;
            Some(stopped.location()?.line())
        };
        match entry.line.or_else(|| if self.yaml { found() } else { None }) {
            Some(line) => format!("{}:{line}", self.file.display()),
            None => self.file.display().to_string(),
        }
    }

    fn section(&self, section: &Entry, all: &mut All) -> Result<(), ConfigError> {
        let name = section.name.as_str();
        let error = |why: String| ConfigError(format!("{}: {why}", self.place(section, &[name])));
        let known = keys::SECTIONS.iter().any(|(known, _)| *known == name);
        let entries = match &section.node {
            Node::Table(entries) if known => entries,
            Node::Value(Value::Null) if known => return Ok(()),
            _ if known => return Err(error(format!("{name} is a section, and has keys of its own"))),
            Node::Table(_) => {
                let sections = keys::SECTIONS.map(|(section, _)| section);
                let near = palingenesis::config::nearest(name, sections);
                let cure = near.map_or_else(
                    || format!("there are {}", sections.join(", ")),
                    |near| format!("did you mean {near}?"),
                );
                return Err(error(format!("unknown section '{}'; {cure}", printable(name))));
            }
            Node::Value(_) => return Err(error(unknown("", name))),
        };
        for entry in entries {
            let place = || self.place(entry, &[name, &entry.name]);
            let Some(key) = keys::find(name, &entry.name) else {
                return Err(ConfigError(format!("{}: {}", place(), unknown(name, &entry.name))));
            };
            all.insert(format!("{name}.{}", key.name), Given { value: entry.node.value(), place: place() });
        }
        Ok(())
    }
}

fn unknown(section: &str, name: &str) -> String {
    let full = if section.is_empty() { printable(name) } else { format!("{section}.{}", printable(name)) };
    match keys::meant(section, name) {
        Some(meant) if section.is_empty() && meant.ends_with(&format!(".{name}")) => {
            format!("key '{full}' stands in no section; it is {meant}")
        }
        Some(meant) => format!("unknown key '{full}'; did you mean {meant}?"),
        None => format!("unknown key '{full}'; all keys are in palingenesis-worker's help"),
    }
}

/// `section.key=value`, with or without `--` before it.
fn apply(text: &str, all: &mut All) -> Result<(), ConfigError> {
    let error = |why: String| Err(ConfigError(format!("command line: {why}")));
    let Some((name, written)) = text.strip_prefix("--").unwrap_or(text).split_once('=') else {
        return error(format!("'{}' is no override; one looks like train.lr=3e-4", printable(text)));
    };
    let name = name.trim();
    let (section, rest) = name.split_once('.').unwrap_or(("", name));
    // Below model.shape all keys are config.json's.
    let (key_name, below) = match rest.split_once('.') {
        Some((key, below)) if section == "model" && key == "shape" => (key, Some(below)),
        _ => (rest, None),
    };
    let Some(key) = keys::find(section, key_name) else {
        let near = || palingenesis::config::nearest(section, keys::SECTIONS.map(|(section, _)| section));
        return match near() {
            Some(near) if near != section && keys::find(near, key_name).is_some() => {
                error(format!("unknown key '{}'; did you mean {near}.{key_name}?", printable(name)))
            }
            _ => error(unknown(section, key_name)),
        };
    };
    let value = value_of(key, below, written);
    let full = format!("{section}.{key_name}");
    match below {
        None => {
            all.insert(full, Given { value, place: "command line".into() });
        }
        Some(below) => {
            let place = "command line".to_string();
            let shape = all.entry(full).or_insert_with(|| Given { value: Value::Object(Default::default()), place });
            let Value::Object(keys) = &mut shape.value else {
                return error(format!("model.shape.{} has no place: model.shape is no section", printable(below)));
            };
            // Only one level: rope_scaling and the like are written as JSON.
            keys.insert(below.to_string(), value);
        }
    }
    Ok(())
}

/// Typed as it would be in the file.
fn value_of(key: &Key, below: Option<&str>, written: &str) -> Value {
    let text = || Value::String(written.to_string());
    match key.takes {
        Takes::Path | Takes::Word(_) | Takes::Resume => text(),
        Takes::Shape if below.is_some() => serde_json::from_str(written).unwrap_or_else(|_| text()),
        _ => match (written.parse::<u64>(), written.parse::<i64>(), written.parse::<f64>(), written.parse::<bool>()) {
            (Ok(number), ..) => Value::from(number),
            (_, Ok(number), ..) => Value::from(number),
            (_, _, Ok(number), _) => real(number, written),
            (.., Ok(flag)) => Value::Bool(flag),
            _ => serde_json::from_str(written).unwrap_or_else(|_| text()),
        },
    }
}
