//! What goes over a connection to rank 0. Bytes to messages and back; no sockets here,
//! and nothing is decided.
//!
//! ```text
//! server -> client   GREETING   "PLGstore", version (2), 1 if there is a key (1), random (32)
//! client -> server   REPLY      "PLGstore", version (2), random (32), length (2), hello,
//!                               tag of GREETING and what stands before it
//! server -> client   PROOF      tag of GREETING and REPLY; without a key one byte, 6
//! both               frames     length (4), message, tag of direction, counter and message
//! ```
//!
//! Numbers are big-endian; hello and messages are JSON. A tag is HMAC-SHA256 under the
//! store key: the reply fits one greeting only (no replay), no tag of one direction fits
//! the other (no reflection), and a frame fits one place of one connection. Ranks of one
//! host without a key have no tags; there the kernel says whose process it is.
//!
//! What a stranger may send is bounded by [`REPLY_MAX`]. Everything up to and including
//! [`Message::Stop`] is the same in every version, so that another version is told so.

use std::net::IpAddr;

pub use palingenesis::act::key::Side;
use palingenesis::act::key::{Key, LENGTH, Tag as Code};
use palingenesis::config::printable;
use serde::{Deserialize, Serialize};

use super::super::{Op, Tag};

/// Of the messages. Two that differ do not understand each other.
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"PLGstore";
const RANDOM: usize = 32;

/// Bytes of the server's greeting.
pub const GREETING: usize = MAGIC.len() + 2 + 1 + RANDOM;

const HEAD: usize = MAGIC.len() + 2 + RANDOM + 2;

/// The longest hello: a host name has at most 253 characters.
const HELLO_MAX: usize = 1024;

/// The most that a stranger may send.
pub const REPLY_MAX: usize = HEAD + HELLO_MAX + LENGTH;

/// The longest message that this end may send: rank 0 sends every rank's address.
fn frame_max(side: Side) -> usize {
    match side {
        Side::Server => 16 << 20,
        Side::Client => 16 << 10,
    }
}

/// Not what the other end of such a connection can have sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Its bytes are none of this protocol.
    Foreign,
    /// It does not know the key.
    Key,
}

/// Who says that he is a rank, and which.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// RANK.
    pub rank: u32,
    /// WORLD_SIZE, as this rank has it.
    pub world_size: u32,
    /// Its host.
    pub host: String,
    /// Where it waits for data connections.
    pub port: u16,
    /// Of the program.
    pub release: String,
}

/// The server's first bytes on a connection.
#[must_use]
pub fn greeting(keyed: bool, random: &[u8; RANDOM]) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_be_bytes());
    bytes[10] = u8::from(keyed);
    bytes[11..].copy_from_slice(random);
    bytes
}

/// Whether `bytes`, all that came so far, can be or become a greeting.
#[must_use]
pub fn greets(bytes: &[u8]) -> bool {
    bytes.len() <= GREETING && bytes.iter().zip(MAGIC).all(|(byte, magic)| byte == magic)
}

/// Whether the server that greets so has a key.
#[must_use]
pub fn is_keyed(greeting: &[u8; GREETING]) -> bool {
    greeting[10] != 0
}

fn code(key: Option<&Key>, parts: &[&[u8]]) -> Vec<u8> {
    key.map(|key| key.tag(parts).to_vec()).unwrap_or_default()
}

fn fits(key: Option<&Key>, parts: &[&[u8]], tag: &[u8]) -> bool {
    match key {
        Some(key) => Code::try_from(tag).is_ok_and(|tag| key.verify(parts, &tag)),
        None => tag.is_empty(),
    }
}

fn code_length(key: Option<&Key>) -> usize {
    if key.is_some() { LENGTH } else { 0 }
}

/// The client's reply to a greeting. `None` when the hello is too long.
#[must_use]
pub fn reply(key: Option<&Key>, greeting: &[u8; GREETING], hello: &Hello, random: &[u8; RANDOM]) -> Option<Vec<u8>> {
    versioned_reply(VERSION, key, greeting, hello, random)
}

/// As another version would.
pub(super) fn versioned_reply(
    version: u16,
    key: Option<&Key>,
    greeting: &[u8; GREETING],
    hello: &Hello,
    random: &[u8; RANDOM],
) -> Option<Vec<u8>> {
    let hello = serde_json::to_vec(hello).ok().filter(|hello| hello.len() <= HELLO_MAX)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&version.to_be_bytes());
    bytes.extend_from_slice(random);
    bytes.extend_from_slice(&u16::try_from(hello.len()).ok()?.to_be_bytes());
    bytes.extend_from_slice(&hello);
    let tag = code(key, &[b"client", greeting, &bytes]);
    bytes.extend_from_slice(&tag);
    Some(bytes)
}

/// Reads a reply to this greeting, and its version: `None` when it is not there whole.
///
/// # Errors
/// When it is none, or longer, or of somebody who does not have the key.
pub fn read_reply(
    key: Option<&Key>,
    greeting: &[u8; GREETING],
    bytes: &[u8],
) -> Result<Option<(u16, Option<Hello>)>, Broken> {
    if !bytes.iter().zip(MAGIC).all(|(byte, magic)| byte == magic) {
        return Err(Broken::Foreign);
    }
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([head[HEAD - 2], head[HEAD - 1]]));
    let whole = HEAD + length + code_length(key);
    if length > HELLO_MAX || bytes.len() > whole {
        return Err(Broken::Foreign);
    }
    if bytes.len() < whole {
        return Ok(None);
    }
    let (said, tag) = bytes.split_at(HEAD + length);
    if !fits(key, &[b"client", greeting, said], tag) {
        return Err(Broken::Key);
    }
    let version = u16::from_be_bytes([head[8], head[9]]);
    Ok(Some((version, serde_json::from_slice(&rest[..length]).ok())))
}

/// Without a key: the reply was read and taken.
const TAKEN: &[u8] = &[6];

/// That the server has the key too.
#[must_use]
pub fn proof(key: Option<&Key>, greeting: &[u8; GREETING], reply: &[u8]) -> Vec<u8> {
    match key {
        Some(_) => code(key, &[b"server", greeting, reply]),
        None => TAKEN.to_vec(),
    }
}

/// How long a proof is.
#[must_use]
pub fn proof_length(key: Option<&Key>) -> usize {
    if key.is_some() { LENGTH } else { TAKEN.len() }
}

/// Whether the server has the key.
#[must_use]
pub fn proves(key: Option<&Key>, greeting: &[u8; GREETING], reply: &[u8], proof: &[u8]) -> bool {
    match key {
        Some(_) => fits(key, &[b"server", greeting, reply], proof),
        None => proof == TAKEN,
    }
}

/// What a rank is at.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct At {
    /// The operation's number; 0: none so far.
    pub sequence: u64,
    /// Its name.
    pub op: String,
    /// Its tag.
    pub what: String,
    /// See `what`.
    pub index: u32,
    /// Whether it is in the operation, or has left it.
    pub inside: bool,
}

impl At {
    /// In this operation.
    #[must_use]
    pub fn operation(sequence: u64, op: Op, tag: Tag) -> At {
        At { sequence, op: op.name().to_owned(), what: tag.what.to_owned(), index: tag.index, inside: true }
    }

    /// "all_gather #8812 of block 17", for "in ..."; what it does between two operations is
    /// its own work.
    #[must_use]
    pub fn text(&self) -> String {
        if self.op.is_empty() {
            return "its own work before the first operation".to_owned();
        }
        let operation = super::operation(&printable(&self.op), self.sequence, &printable(&self.what), self.index);
        if self.inside { operation } else { format!("its own work after {operation}") }
    }
}

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its host.
    pub host: String,
    /// Its address as rank 0 sees it; `None`: that of rank 0, as the reader sees it.
    pub ip: Option<IpAddr>,
    /// Where it waits for data connections.
    pub port: u16,
}

/// Who was gone first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// How that was seen, or what it said itself.
    pub why: String,
    /// What it was at; `None` when it has said itself that it ends.
    pub at: Option<String>,
}

/// What is said on a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Server: no training.
    Stop {
        /// Why, for a person.
        why: String,
        /// Another try may do better.
        again: bool,
    },
    /// Client: I live and am here.
    Beat(At),
    /// Server: I live, and these are furthest behind.
    Beats(Vec<(u32, At)>),
    /// Server: all ranks are here.
    Welcome(Vec<Seat>),
    /// Server: this one is gone.
    Verdict(Verdict),
    /// Either: I end, in order or for this reason.
    Bye(Option<String>),
}

/// The frames of one connection, both ways.
#[derive(Debug)]
pub struct Session {
    key: Option<Key>,
    side: Side,
    sent: u64,
    heard: u64,
}

impl Session {
    /// After this greeting and this reply.
    #[must_use]
    pub fn new(key: Option<&Key>, side: Side, greeting: &[u8; GREETING], reply: &[u8]) -> Session {
        let key = key.map(|key| key.derive_from(&[b"session", greeting, reply]));
        Session { key, side, sent: 0, heard: 0 }
    }

    /// Adds the message's frame to `out`. A message longer than any may be is left out,
    /// which only a world of 50,000 ranks could make.
    pub fn seal(&mut self, message: &Message, out: &mut Vec<u8>) {
        let Ok(content) = serde_json::to_vec(message) else { return };
        let Some(length) = u32::try_from(content.len()).ok().filter(|_| content.len() <= frame_max(self.side)) else {
            return;
        };
        let tag = code(self.key.as_ref(), &[self.side.label(), &self.sent.to_be_bytes(), &content]);
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&content);
        out.extend_from_slice(&tag);
        self.sent += 1;
    }

    /// The first frame of `bytes` and its length; `None` when it is not there whole.
    ///
    /// # Errors
    /// When it is not the other side's next one. Nothing that follows can be then.
    pub fn open(&mut self, bytes: &[u8]) -> Result<Option<(Message, usize)>, Broken> {
        let Some((header, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*header)).map_err(|_| Broken::Foreign)?;
        let from = self.side.other();
        if length > frame_max(from) {
            return Err(Broken::Foreign);
        }
        let whole = length + code_length(self.key.as_ref());
        let (Some(content), Some(tag)) = (rest.get(..length), rest.get(length..whole)) else { return Ok(None) };
        if !fits(self.key.as_ref(), &[from.label(), &self.heard.to_be_bytes(), content], tag) {
            return Err(Broken::Key);
        }
        self.heard += 1;
        let message = serde_json::from_slice(content).map_err(|_| Broken::Foreign)?;
        Ok(Some((message, 4 + whole)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digits: &str) -> Key {
        Key::from_hex(&digits.repeat(32)).unwrap()
    }

    fn hello() -> Hello {
        Hello { rank: 3, world_size: 8, host: "n2".to_owned(), port: 40000, release: "0.1.0".to_owned() }
    }

    #[test]
    fn a_reply_fits_one_greeting_and_one_key_only() {
        let (first, second) = (greeting(true, &[1; 32]), greeting(true, &[2; 32]));
        let own = key("07");
        let bytes = reply(Some(&own), &first, &hello(), &[3; 32]).unwrap();
        assert_eq!(read_reply(Some(&own), &first, &bytes), Ok(Some((VERSION, Some(hello())))));
        assert_eq!(read_reply(Some(&own), &second, &bytes), Err(Broken::Key));
        assert_eq!(read_reply(Some(&key("08")), &first, &bytes), Err(Broken::Key));
        assert_eq!(read_reply(Some(&own), &first, &bytes[..bytes.len() - 1]), Ok(None));
        let without = reply(None, &first, &hello(), &[3; 32]).unwrap();
        assert_eq!(read_reply(Some(&own), &first, &without), Ok(None), "it waits for the tag");
        let proof = proof(Some(&own), &first, &bytes);
        assert!(proves(Some(&own), &first, &bytes, &proof) && !proves(Some(&key("08")), &first, &bytes, &proof));
        assert!(!proves(Some(&own), &first, &bytes, &[]), "no proof is none");
    }

    #[test]
    fn a_stranger_s_bytes_are_refused_before_they_are_many() {
        let first = greeting(true, &[1; 32]);
        assert_eq!(read_reply(None, &first, b"GET / HTTP/1.1"), Err(Broken::Foreign));
        let mut long = MAGIC.to_vec();
        long.extend_from_slice(&[0xff; HEAD]);
        assert_eq!(read_reply(None, &first, &long), Err(Broken::Foreign));
    }

    #[test]
    fn a_frame_fits_its_place_and_its_direction_only() {
        let (greeting, own) = (greeting(true, &[1; 32]), key("07"));
        let session = |side| Session::new(Some(&own), side, &greeting, b"reply");
        let (mut server, mut client) = (session(Side::Server), session(Side::Client));
        let mut bytes = Vec::new();
        let message = Message::Beat(At::operation(8812, Op::AllGather, Tag::of("block", 17)));
        client.seal(&message, &mut bytes);
        assert_eq!(session(Side::Client).open(&bytes), Err(Broken::Key), "it came back to its sender");
        for end in 0..bytes.len() {
            assert_eq!(session(Side::Server).open(&bytes[..end]), Ok(None));
        }
        assert_eq!(server.open(&bytes), Ok(Some((message, bytes.len()))));
        assert_eq!(server.open(&bytes), Err(Broken::Key), "it came twice");
        assert_eq!(session(Side::Server).open(&[0xff; 64]), Err(Broken::Foreign));
    }
}
