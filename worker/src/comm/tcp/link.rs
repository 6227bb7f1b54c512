//! One connection between two ranks. Operations go from the rank that connected to the one
//! that accepted; the other way nothing goes but a notice: the error that ended the group.
//! Nothing here waits.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::comm::CommError;

/// Between hosts TCP; on one host a Unix socket, which costs less.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// How many bytes were taken; 0 when there is no room now.
    pub(super) fn send(&self, bytes: [&[u8]; 2]) -> io::Result<usize> {
        // Rust ignores SIGPIPE: a peer that is gone is an error, not our end.
        unblocked(|| match self {
            Stream::Tcp(stream) => (&*stream).write_vectored(&bytes.map(IoSlice::new)),
            Stream::Unix(stream) => (&*stream).write_vectored(&bytes.map(IoSlice::new)),
        })
    }

    /// How many bytes have come; 0 when there are none now. The end is an error.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        unblocked(|| {
            let got = match self {
                Stream::Tcp(stream) => (&*stream).read(bytes),
                Stream::Unix(stream) => (&*stream).read(bytes),
            }?;
            if got == 0 { Err(io::Error::new(ErrorKind::UnexpectedEof, "its connection was closed")) } else { Ok(got) }
        })
    }
}

fn unblocked(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            done => return done,
        }
    }
}

/// The beginning of a notice.
const NOTICE: [u8; 4] = *b"pgn1";

/// The most bytes of a notice's text.
const LONGEST: usize = 16 << 10;

/// A connection to a rank.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) rank: u32,
    pub(super) host: String,
    pub(super) stream: Stream,
    /// What has come of a notice.
    heard: Vec<u8>,
    /// Nothing more comes from there.
    pub(super) closed: bool,
}

impl Link {
    pub(super) fn new(rank: u32, host: String, stream: Stream) -> Link {
        Link { rank, host, stream, heard: Vec::new(), closed: false }
    }

    /// Tells the rank that connected here why this one goes on no more, as far as that is
    /// possible without waiting.
    pub(super) fn tell(&self, error: &CommError) {
        let text = serde_json::to_vec(error).unwrap_or_default();
        if text.len() <= LONGEST {
            let length = (text.len() as u32).to_le_bytes();
            let begin: Vec<u8> = NOTICE.into_iter().chain(length).collect();
            // This way of the connection is empty, so that it has room.
            let _ = self.stream.send([&begin, &text]);
        }
    }

    /// The notice of the rank that this one connected to, if it has come.
    pub(super) fn heard(&mut self) -> Option<CommError> {
        while !self.closed {
            let want = match self.heard.get(..8) {
                None => 8,
                Some(begin) => {
                    let length = begin[4..].iter().rev().fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
                    if begin[..4] != NOTICE || length > LONGEST {
                        self.closed = true;
                        break;
                    }
                    8 + length
                }
            };
            let have = self.heard.len();
            if have == want {
                self.closed = true;
                return serde_json::from_slice(&self.heard[8..]).ok();
            }
            self.heard.resize(want, 0);
            let got = self.stream.receive(&mut self.heard[have..]);
            self.heard.truncate(have + got.as_ref().map_or(0, |got| *got));
            match got {
                Ok(0) => break,
                Ok(_) => {}
                Err(_) => self.closed = true,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Link, Link) {
        let (one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        (Link::new(0, "a".into(), Stream::Unix(one)), Link::new(1, "b".into(), Stream::Unix(other)))
    }

    #[test]
    fn a_notice_comes_whole_and_once_even_after_the_teller_is_gone() {
        let error =
            CommError::Lost { rank: 3, host: "n2".into(), why: "killed".into(), op: "barrier #1 of end 0".into() };
        let (mut from, to) = pair();
        assert_eq!(from.heard(), None);
        assert!(!from.closed);
        to.tell(&error);
        drop(to);
        assert_eq!(from.heard(), Some(error));
        assert!(from.closed);
        assert_eq!(from.heard(), None);
    }

    #[test]
    fn what_is_no_notice_closes_the_way_and_says_nothing() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"pgn1\xff\xff\xff\xff", b"pgn1\x02\0\0\0{}"] {
            let (mut from, to) = pair();
            to.stream.send([bytes, &[]]).unwrap();
            assert_eq!(from.heard(), None);
            assert!(from.closed, "{bytes:?}");
        }
    }
}
