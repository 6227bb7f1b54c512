//! One authenticated connection: frames in and out of a socket that never waits.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::wire::{Broken, Channel, Message};

/// Bytes read at a time.
pub const READING: usize = 64 * 1024;

/// A socket, its channel, and what is on its way.
#[derive(Debug)]
pub struct Link {
    /// The socket.
    pub stream: TcpStream,
    channel: Channel,
    input: Vec<u8>,
    /// How much of `input` was opened.
    opened: usize,
    output: Vec<u8>,
    /// How much of `output` was written.
    written: usize,
    /// When something came last.
    pub heard: Instant,
    /// When something was sent last.
    pub said: Instant,
}

impl Link {
    /// A connection whose peer has shown that it has the key.
    pub fn new(stream: TcpStream, channel: Channel, now: Instant) -> Link {
        Link { stream, channel, input: Vec::new(), opened: 0, output: Vec::new(), written: 0, heard: now, said: now }
    }

    /// Sends it, or keeps it until the socket takes it. `false` when it is too long. A
    /// connection that has failed says so when it is read.
    #[must_use]
    pub fn send(&mut self, message: &Message, now: Instant) -> bool {
        self.said = now;
        let fits = self.channel.seal(message, &mut self.output);
        self.flush();
        fits
    }

    /// Writes as much as the socket takes; how much.
    pub fn flush(&mut self) -> usize {
        let before = self.written;
        while let Some(rest) = self.output.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(0) => break,
                Ok(written) => self.written += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Reading tells, after what the peer said before.
                Err(_) => self.written = self.output.len(),
            }
        }
        let written = self.written - before;
        if self.written == self.output.len() {
            self.output = Vec::new();
            self.written = 0;
        }
        written
    }

    /// Whether something is kept until the socket takes it.
    pub fn writes(&self) -> bool {
        !self.output.is_empty()
    }

    /// Reads what is there, a bounded part of it at a time. `Some` when nothing comes after
    /// it: why.
    pub fn receive(&mut self, scratch: &mut [u8], now: Instant) -> Option<String> {
        if self.opened > 0 {
            self.input.drain(..self.opened);
            self.opened = 0;
        }
        loop {
            match self.stream.read(scratch) {
                Ok(0) => return Some("it was closed".to_owned()),
                Ok(read) => {
                    self.heard = now;
                    self.input.extend_from_slice(&scratch[..read]);
                    return None;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(error.to_string()),
            }
        }
    }

    /// The next message of what was read.
    ///
    /// # Errors
    /// When it is not what the peer can have sent.
    pub fn next(&mut self) -> Result<Option<Message>, Broken> {
        let Some(rest) = self.input.get(self.opened..) else { return Ok(None) };
        let Some((message, length)) = self.channel.open(rest)? else { return Ok(None) };
        self.opened += length;
        if self.opened == self.input.len() {
            // Most connections are idle most of the time: none keeps its largest message.
            self.input = Vec::new();
            self.opened = 0;
        }
        Ok(Some(message))
    }
}
