//! What goes over a connection of the pre-flight. Bytes to messages and back; no
//! sockets here.
//!
//! ```text
//! server -> client   GREETING      "palingenesis", version (2), random (32)
//! client -> server   REPLY         "palingenesis", version (2), node rank (4), random (32),
//!                                  tag of "client", GREETING and what stands before it
//! server -> client   PROOF         tag of "server", GREETING and REPLY
//! both               frames        length (4) of kind and content, kind (1), content,
//!                                  tag of the direction, a counter, kind and content
//! ```
//!
//! Numbers are big-endian, a tag is HMAC-SHA256. The tags of GREETING, REPLY and PROOF are
//! made with the launch's key, those of frames with one that is derived from it and both
//! random numbers. So a reply fits one greeting only (no replay), no tag of one direction fits
//! the other (no reflection), and a frame fits one place of one connection. The launch's
//! key itself is never sent here. Nothing is encrypted: what nodes tell each other is no secret.
//!
//! Sizes are bounded before anything is kept: what an unknown peer may send is 82 bytes,
//! a frame 1 MiB. GREETING, REPLY, PROOF, frames and `Stop` are the same in every version, so
//! that a node with another release is told so rather than taken for a stranger.

pub use crate::act::key::Side;
use crate::act::key::{Key, LENGTH, Tag};

/// Of the messages. Two that differ do not understand each other.
pub const VERSION: u16 = 1;

/// How greetings and replies begin.
pub const MAGIC: &[u8; 12] = b"palingenesis";

/// Bytes of a random number.
pub const RANDOM: usize = 32;

/// Bytes of the server's greeting.
pub const GREETING: usize = MAGIC.len() + 2 + RANDOM;

/// Bytes of the client's reply.
pub const REPLY: usize = MAGIC.len() + 2 + 4 + RANDOM + LENGTH;

/// The most a frame's kind and content may come to.
pub const FRAME_MAX: usize = 1024 * 1024;

/// The most an answer, a question or what is told at the end may come to.
pub const CONTENT_MAX: usize = FRAME_MAX - 5;

/// The longest reason: it goes to a person.
const WHY_MAX: usize = 64 * 1024;

/// Before a frame's kind and content.
const HEADER: usize = 4;

/// What makes it no connection of this launch, or one that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Its bytes are none of this protocol.
    Foreign,
    /// Its tag is not the one that the launch's key gives.
    Tag,
    /// A frame is longer than any may be.
    Long,
}

/// The server's first bytes on a connection.
pub fn greeting(random: &[u8; RANDOM]) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    let (magic, rest) = bytes.split_at_mut(MAGIC.len());
    magic.copy_from_slice(MAGIC);
    let (version, number) = rest.split_at_mut(2);
    version.copy_from_slice(&VERSION.to_be_bytes());
    number.copy_from_slice(random);
    bytes
}

/// Whether `bytes`, all that came so far, can be or become a greeting.
pub fn greets(bytes: &[u8]) -> bool {
    bytes.len() <= GREETING && bytes.iter().zip(MAGIC).all(|(byte, magic)| byte == magic)
}

/// The client's reply to a greeting.
pub fn reply(key: &Key, greeting: &[u8; GREETING], node_rank: u32, random: &[u8; RANDOM]) -> [u8; REPLY] {
    let mut head = Vec::with_capacity(REPLY);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&VERSION.to_be_bytes());
    head.extend_from_slice(&node_rank.to_be_bytes());
    head.extend_from_slice(random);
    let tag = key.tag(&[b"client", greeting, &head]);
    let mut bytes = [0; REPLY];
    let (before, after) = bytes.split_at_mut(REPLY - LENGTH);
    before.copy_from_slice(&head);
    after.copy_from_slice(&tag);
    bytes
}

/// Who replied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replied {
    /// As it says.
    pub node_rank: u32,
    /// Of its messages.
    pub version: u16,
}

/// Reads a reply to this greeting.
///
/// # Errors
/// When it is none, or of somebody who does not have the key.
pub fn read_reply(key: &Key, greeting: &[u8; GREETING], reply: &[u8; REPLY]) -> Result<Replied, Broken> {
    let (head, tag) = reply.split_at(REPLY - LENGTH);
    let (Some(rest), Ok(tag)) = (head.strip_prefix(MAGIC), Tag::try_from(tag)) else {
        return Err(Broken::Foreign);
    };
    let [v0, v1, n0, n1, n2, n3, ..] = *rest else { return Err(Broken::Foreign) };
    if !key.verify(&[b"client", greeting, head], &tag) {
        return Err(Broken::Tag);
    }
    Ok(Replied { node_rank: u32::from_be_bytes([n0, n1, n2, n3]), version: u16::from_be_bytes([v0, v1]) })
}

/// That the server has the key too.
pub fn proof(key: &Key, greeting: &[u8; GREETING], reply: &[u8; REPLY]) -> Tag {
    key.tag(&[b"server", greeting, reply])
}

/// Whether the server has the key.
pub fn proves(key: &Key, greeting: &[u8; GREETING], reply: &[u8; REPLY], proof: &Tag) -> bool {
    key.verify(&[b"server", greeting, reply], proof)
}

/// What nodes tell each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Client: this is the connection that I stay on. Its first one.
    Join,
    /// Client: all ranks of my node are here.
    Here,
    /// Client: my answer in this round.
    Answer(u32, Vec<u8>),
    /// Client: a rank of my node cannot start; why.
    Failed(String),
    /// Server: the question of this round.
    Ask(u32, Vec<u8>),
    /// Server: start; the port, and what this node is told.
    Go(u16, Vec<u8>),
    /// Server: do not start; why.
    Stop(String),
    /// Either: I am still here.
    Ping,
}

impl Message {
    fn kind(&self) -> u8 {
        match self {
            Message::Join => 1,
            Message::Here => 2,
            Message::Answer(..) => 3,
            Message::Failed(_) => 4,
            Message::Ask(..) => 5,
            Message::Go(..) => 6,
            Message::Stop(_) => 7,
            Message::Ping => 8,
        }
    }

    /// The two parts of its content.
    fn parts(&self) -> ([u8; 4], usize, &[u8]) {
        match self {
            Message::Join | Message::Here | Message::Ping => ([0; 4], 0, &[]),
            Message::Answer(round, bytes) | Message::Ask(round, bytes) => (round.to_be_bytes(), 4, bytes),
            Message::Go(port, bytes) => {
                let [high, low] = port.to_be_bytes();
                ([high, low, 0, 0], 2, bytes)
            }
            Message::Failed(why) | Message::Stop(why) => ([0; 4], 0, cut(why).as_bytes()),
        }
    }

    fn read(kind: u8, content: &[u8]) -> Option<Message> {
        let text = || String::from_utf8_lossy(content).into_owned();
        let numbered = || {
            let (number, bytes) = content.split_first_chunk::<4>()?;
            Some((u32::from_be_bytes(*number), bytes.to_vec()))
        };
        Some(match kind {
            1 if content.is_empty() => Message::Join,
            2 if content.is_empty() => Message::Here,
            3 => numbered().map(|(round, bytes)| Message::Answer(round, bytes))?,
            4 => Message::Failed(text()),
            5 => numbered().map(|(round, bytes)| Message::Ask(round, bytes))?,
            6 => {
                let (port, told) = content.split_first_chunk::<2>()?;
                Message::Go(u16::from_be_bytes(*port), told.to_vec())
            }
            7 => Message::Stop(text()),
            8 if content.is_empty() => Message::Ping,
            _ => return None,
        })
    }
}

fn cut(why: &str) -> &str {
    let mut end = why.len().min(WHY_MAX);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    &why[..end]
}

/// The frames of one connection, both ways.
#[derive(Debug)]
pub struct Channel {
    key: Key,
    side: Side,
    sent: u64,
    heard: u64,
}

impl Channel {
    /// After this greeting and this reply.
    pub fn new(key: &Key, side: Side, greeting: &[u8; GREETING], reply: &[u8; REPLY]) -> Channel {
        Channel { key: key.derive_from(&[b"session", greeting, reply]), side, sent: 0, heard: 0 }
    }

    /// Adds the message's frame to `out`. `false`, and nothing is added, when it is too
    /// long.
    #[must_use]
    pub fn seal(&mut self, message: &Message, out: &mut Vec<u8>) -> bool {
        let (number, used, bytes) = message.parts();
        let length = 1 + used + bytes.len();
        let (Some(number), Ok(header)) = (number.get(..used), u32::try_from(length)) else { return false };
        if length > FRAME_MAX {
            return false;
        }
        out.reserve(HEADER + length + LENGTH);
        out.extend_from_slice(&header.to_be_bytes());
        let start = out.len();
        out.push(message.kind());
        out.extend_from_slice(number);
        out.extend_from_slice(bytes);
        let tag = self.key.tag(&[self.side.label(), &self.sent.to_be_bytes(), &out[start..]]);
        out.extend_from_slice(&tag);
        self.sent += 1;
        true
    }

    /// The first frame of `bytes` and its length; `None` when it is not there whole.
    ///
    /// # Errors
    /// When it is not the other side's next one. Nothing that follows can be then.
    pub fn open(&mut self, bytes: &[u8]) -> Result<Option<(Message, usize)>, Broken> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*header)).map_err(|_| Broken::Long)?;
        if length > FRAME_MAX {
            return Err(Broken::Long);
        }
        let (Some(inner), Some(tag)) = (rest.get(..length), rest.get(length..length + LENGTH)) else {
            return Ok(None);
        };
        let tag = Tag::try_from(tag).map_err(|_| Broken::Tag)?;
        if !self.key.verify(&[self.side.other().label(), &self.heard.to_be_bytes(), inner], &tag) {
            return Err(Broken::Tag);
        }
        self.heard += 1;
        let (kind, content) = inner.split_first().ok_or(Broken::Foreign)?;
        let message = Message::read(*kind, content).ok_or(Broken::Foreign)?;
        Ok(Some((message, HEADER + length + LENGTH)))
    }
}
