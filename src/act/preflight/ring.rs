//! Whether a node reaches the next one of the step on a port that the kernel chose, as
//! NCCL and gloo will want to. Two forked children: one accepts the node before this
//! one, one connects to the next. They prove to each other that they have the launch's
//! secret: the connection leads where it should.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Work;
use super::rounds::way_to;
use crate::act::key::{Key, LENGTH, Tag};
use crate::facts::network::Interface;
use crate::plan::preflight::texts;
use crate::system::child::{Asked, ChildError, ask, ask_with};
use crate::system::{random, sockets};

/// How long a node may take to reach the next.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The longest look at those that have connected.
const SILENT: Duration = Duration::from_secs(1);

/// How many of them are heard at a time.
const CALLERS: usize = 128;

/// A port of this node's, chosen by the kernel.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    port: u16,
}

impl Listening {
    /// Listens at `address`, or at all of the node's.
    ///
    /// # Errors
    /// When the kernel says no.
    pub fn new(address: Option<IpAddr>) -> io::Result<Listening> {
        let listener = match address {
            Some(address) => TcpListener::bind((address, 0))?,
            // IPv4 too, but where that was turned off; without IPv6 IPv4 alone.
            None => TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)))?,
        };
        let port = listener.local_addr()?.port();
        Ok(Listening { listener, port })
    }

    /// Its number.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Answers until one has shown the secret, or it is too late. For a child. Anybody may
    /// connect: all are heard at a time, so that nobody keeps the node before this one
    /// waiting, and of too many the oldest goes.
    fn answer(&self, key: &Key, end: Instant) -> bool {
        if self.listener.set_nonblocking(true).is_err() {
            return false;
        }
        let mut callers: VecDeque<Caller> = VecDeque::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let listener = std::iter::once(self.listener.as_fd());
            let which: Vec<_> = listener.chain(callers.iter().map(|caller| caller.stream.as_fd())).collect();
            let which: Vec<_> = which.into_iter().map(|fd| (fd, false)).collect();
            let ready = sockets::wait(&which, left.min(SILENT));
            let mut heard = ready.iter().skip(1);
            let mut shown = false;
            callers.retain_mut(|caller| match heard.next() {
                Some(true) if !shown => match caller.hear(key) {
                    Answer::More => true,
                    Answer::Strange => false,
                    Answer::Shown => {
                        shown = true;
                        false
                    }
                },
                _ => true,
            });
            if shown {
                return true;
            }
            if ready.first() == Some(&true)
                && let Ok((stream, _)) = self.listener.accept()
                && let Ok(caller) = Caller::greeted(stream)
            {
                if callers.len() >= CALLERS {
                    callers.pop_front();
                }
                callers.push_back(caller);
            }
        }
    }
}

/// Somebody who has connected, on the side that is connected to: it has sent a random
/// number, gets the other's tag of that and its own number, and sends the tag of that one.
struct Caller {
    stream: TcpStream,
    own: [u8; LENGTH],
    heard: Vec<u8>,
}

/// What came of a caller so far.
enum Answer {
    More,
    Strange,
    Shown,
}

impl Caller {
    fn greeted(mut stream: TcpStream) -> io::Result<Caller> {
        stream.set_nonblocking(true)?;
        let own: [u8; LENGTH] = random::bytes()?;
        // A fresh socket takes so little at once.
        stream.write_all(&own)?;
        Ok(Caller { stream, own, heard: Vec::new() })
    }

    /// Reads what is there, without waiting.
    fn hear(&mut self, key: &Key) -> Answer {
        let mut buffer = [0; 2 * LENGTH];
        let room = buffer.len() - self.heard.len();
        match self.stream.read(&mut buffer[..room]) {
            Ok(0) => return Answer::Strange,
            Ok(read) => self.heard.extend_from_slice(&buffer[..read]),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(_) => return Answer::Strange,
        }
        let Some((tag, other)) = self.heard.split_at_checked(LENGTH).filter(|(_, other)| other.len() == LENGTH) else {
            return Answer::More;
        };
        let shown = Tag::try_from(tag).is_ok_and(|tag| key.verify(&[b"to", &self.own, other], &tag));
        if shown && self.stream.write_all(&key.tag(&[b"back", other])).is_ok() {
            Answer::Shown
        } else {
            Answer::Strange
        }
    }
}

/// The side that connects; whether the other one has the secret.
fn show(mut stream: TcpStream, key: &Key, left: Duration) -> io::Result<bool> {
    let left = left.max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))?;
    let mut other = [0; LENGTH];
    stream.read_exact(&mut other)?;
    let own: [u8; LENGTH] = random::bytes()?;
    stream.write_all(&[key.tag(&[b"to", &other, &own]), own].concat())?;
    let mut tag: Tag = [0; LENGTH];
    stream.read_exact(&mut tag)?;
    Ok(key.verify(&[b"back", &own], &tag))
}

/// How it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Nobody listens, or a firewall says so.
    Refused,
    /// Nothing came back.
    Silent,
    /// An error of the kernel's: its number.
    Error(i32),
    /// Somebody without the secret.
    Stranger,
}

impl Kind {
    fn of(error: &io::Error) -> Kind {
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::ConnectionRefused, _) => Kind::Refused,
            (io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock, _) => Kind::Silent,
            (io::ErrorKind::UnexpectedEof, _) => Kind::Stranger,
            (_, Some(number)) => Kind::Error(number),
            _ => Kind::Stranger,
        }
    }

    /// For the texts.
    pub fn shown(self) -> texts::Fault {
        match self {
            Kind::Refused => texts::Fault::Refused,
            Kind::Silent => texts::Fault::Silent,
            Kind::Error(number) => texts::Fault::Other(number),
            Kind::Stranger => texts::Fault::Stranger,
        }
    }
}

/// That the next node was not reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingFault {
    /// Where it listens.
    pub to: SocketAddr,
    /// From which of this node's addresses, and its interface.
    pub from: Option<(IpAddr, String)>,
    /// How it failed.
    pub kind: Kind,
}

/// Reaches one of these. For a child.
fn reach(to: &[SocketAddr], key: &Key, end: Instant) -> Option<(SocketAddr, Kind)> {
    let mut failed = None;
    for target in to {
        let left = || end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let shown = TcpStream::connect_timeout(target, left()).and_then(|stream| show(stream, key, left()));
        let kind = match shown {
            Ok(true) => return None,
            Ok(false) => Kind::Stranger,
            Err(error) => Kind::of(&error),
        };
        failed = failed.or(Some((*target, kind)));
    }
    failed
}

/// The work: the answer is an `Option<RingFault>` as JSON.
pub struct Ring {
    connecting: Option<Asked>,
    accepting: Option<Asked>,
    to: Vec<SocketAddr>,
    interfaces: Vec<Interface>,
    found: Option<Option<RingFault>>,
}

impl Ring {
    /// Begins it. Without a port of the next node's nothing is tested.
    pub fn new(listening: Option<Listening>, to: Vec<SocketAddr>, key: Key, interfaces: &[Interface]) -> Ring {
        let end = Instant::now() + PATIENCE;
        let accepting = listening.and_then(|listening| {
            let kept = [listening.listener.as_raw_fd()];
            let key = key.clone();
            ask_with(&kept, move || vec![u8::from(listening.answer(&key, end))]).ok()
        });
        let targets = to.clone();
        let connecting = (!to.is_empty())
            .then(|| ask(move || serde_json::to_vec(&reach(&targets, &key, end)).unwrap_or_default()).ok())
            .flatten();
        let found = connecting.is_none().then_some(None);
        Ring { connecting, accepting, to, interfaces: interfaces.to_vec(), found }
    }

    fn fault(&self, to: SocketAddr, kind: Kind) -> RingFault {
        let from = way_to(to.ip()).map(|from| {
            let own = self.interfaces.iter().find(|interface| interface.address == from);
            (from, own.map(|own| own.name.clone()).unwrap_or_default())
        });
        RingFault { to, from, kind }
    }

    fn connected(&self, answer: Result<Vec<u8>, ChildError>) -> Option<RingFault> {
        match answer {
            // No child: nothing is known.
            Err(ChildError::Io(_)) => None,
            Err(ChildError::Deadline(_)) => self.to.first().map(|to| self.fault(*to, Kind::Silent)),
            Ok(bytes) => serde_json::from_slice::<Option<(SocketAddr, Kind)>>(&bytes)
                .ok()
                .flatten()
                .map(|(to, kind)| self.fault(to, kind)),
        }
    }
}

impl Work for Ring {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.connecting.as_ref().or(self.accepting.as_ref()).map(Asked::fd)
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        let late = PATIENCE + Duration::from_secs(1);
        if let Some(answer) = self.connecting.as_mut().and_then(|asked| asked.look(late)) {
            self.found = Some(self.connected(answer));
            self.connecting = None;
        }
        // The node before this one may still be on its way.
        if self.accepting.as_mut().is_some_and(|asked| asked.look(late).is_some()) {
            self.accepting = None;
        }
        match &self.found {
            Some(found) if self.accepting.is_none() => Some(serde_json::to_vec(found).unwrap_or_default()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn finish(mut ring: Ring) -> Option<RingFault> {
        let end = Instant::now() + PATIENCE * 3;
        while Instant::now() < end {
            if let Some(answer) = ring.advance() {
                return serde_json::from_slice(&answer).unwrap();
            }
            thread::sleep(Duration::from_millis(2));
        }
        panic!("no answer");
    }

    fn here(port: u16) -> Vec<SocketAddr> {
        vec![SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port)]
    }

    #[test]
    fn nodes_reach_each_other_in_a_ring() {
        let key = Key::new().unwrap();
        for address in [None, Some(IpAddr::from([127, 0, 0, 1]))] {
            let (a, b) = (Listening::new(address).unwrap(), Listening::new(address).unwrap());
            let (to_a, to_b) = (here(a.port()), here(b.port()));
            let (a, b) = (Ring::new(Some(a), to_b, key.clone(), &[]), Ring::new(Some(b), to_a, key.clone(), &[]));
            assert_eq!((finish(a), finish(b)), (None, None));
        }
    }

    #[test]
    fn a_stranger_on_either_side_is_none_of_ours() {
        let (key, other) = (Key::new().unwrap(), Key::new().unwrap());
        // A port that is not the next node's.
        let wrong = Listening::new(None).unwrap();
        let to = here(wrong.port());
        let wrong = Ring::new(Some(wrong), Vec::new(), other, &[]);
        let fault = finish(Ring::new(None, to.clone(), key.clone(), &[])).unwrap();
        assert_eq!((fault.to, fault.kind), (to[0], Kind::Stranger));
        drop(wrong);
        // Somebody connects and talks before the node that should.
        let right = Listening::new(None).unwrap();
        let to = here(right.port());
        let right = Ring::new(Some(right), Vec::new(), key.clone(), &[]);
        let mut silent = TcpStream::connect(to[0]).unwrap();
        silent.write_all(&[7; 64]).unwrap();
        assert_eq!(finish(Ring::new(None, to, key, &[])), None);
        assert_eq!(finish(right), None);
    }

    /// Anybody on the node sees the port in /proc/net/tcp. Those that say nothing, and one
    /// that says a byte now and then, must not keep the node before this one out.
    #[test]
    fn many_that_connect_and_say_nothing_do_not_hold_the_ring_up() {
        let key = Key::new().unwrap();
        let right = Listening::new(None).unwrap();
        let to = here(right.port());
        let right = Ring::new(Some(right), Vec::new(), key.clone(), &[]);
        let mut silent: Vec<TcpStream> = (0..CALLERS + 30).map(|_| TcpStream::connect(to[0]).unwrap()).collect();
        silent.iter_mut().for_each(|stream| stream.write_all(&[7]).unwrap());
        let start = Instant::now();
        assert_eq!(finish(Ring::new(None, to, key, &[])), None);
        assert_eq!(finish(right), None);
        assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    }

    #[test]
    fn a_port_where_nobody_listens_is_refused() {
        let port = Listening::new(None).unwrap().port();
        let fault = finish(Ring::new(None, here(port), Key::new().unwrap(), &[])).unwrap();
        assert_eq!((fault.kind, fault.from.unwrap().0), (Kind::Refused, IpAddr::from([127, 0, 0, 1])));
    }

    #[test]
    fn without_a_next_node_nothing_is_tested() {
        assert_eq!(finish(Ring::new(None, Vec::new(), Key::new().unwrap(), &[])), None);
    }
}
