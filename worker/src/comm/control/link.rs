//! One connection between a rank and rank 0: messages in and out of a socket that never
//! waits. Nothing is decided here.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::wire::{Message, Session};

/// Reads at a time: one that sends without end must not keep the others waiting.
const READS: usize = 16;

/// A socket, its session, and what is on its way.
#[derive(Debug)]
pub struct Link {
    /// Does not block.
    pub stream: TcpStream,
    session: Session,
    input: Vec<u8>,
    output: Vec<u8>,
    /// When something came last.
    pub heard: Instant,
    /// When something was sent last.
    pub said: Instant,
}

impl Link {
    /// A connection whose other end has shown who it is.
    pub fn new(stream: TcpStream, session: Session) -> Link {
        let now = Instant::now();
        Link { stream, session, input: Vec::new(), output: Vec::new(), heard: now, said: now }
    }

    /// Sends it, or keeps it until the socket takes it. That the connection has failed is
    /// seen when it is read.
    pub fn send(&mut self, message: &Message) {
        self.said = Instant::now();
        self.session.seal(message, &mut self.output);
        self.flush();
    }

    /// Writes as much as the socket takes.
    pub fn flush(&mut self) {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return,
                Ok(written) => drop(self.output.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.output.clear(),
            }
        }
    }

    /// Whether something is kept until the socket takes it.
    pub fn writes(&self) -> bool {
        !self.output.is_empty()
    }

    /// Bytes that go before any frame.
    pub fn push(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
        self.flush();
    }

    /// Reads what is there into messages. `Some` when nothing comes after them: why.
    pub fn receive(&mut self, messages: &mut Vec<Message>) -> Option<String> {
        let mut end = None;
        let mut buffer = [0; 16 << 10];
        for _ in 0..READS {
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    end = Some("its connection was closed".to_owned());
                    break;
                }
                Ok(read) => {
                    self.heard = Instant::now();
                    self.input.extend_from_slice(&buffer[..read]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    end = Some("its connection was reset".to_owned());
                    break;
                }
                Err(error) => {
                    end = Some(format!("its connection broke: {error}"));
                    break;
                }
            }
        }
        let mut opened = 0;
        loop {
            match self.session.open(&self.input[opened..]) {
                Ok(Some((message, length))) => {
                    opened += length;
                    messages.push(message);
                }
                Ok(None) => break,
                Err(_) => {
                    end = Some("its connection carried what no rank sends".to_owned());
                    break;
                }
            }
        }
        self.input.drain(..opened);
        end
    }

    /// Says nothing more: what is on its way still arrives.
    pub fn close(&mut self) {
        self.flush();
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// How long nothing has come.
    pub fn silent(&self) -> Duration {
        self.heard.elapsed()
    }
}
