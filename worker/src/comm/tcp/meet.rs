//! How the ranks' connections come about. Each rank connects to the ranks 1, 2, 4, … further
//! on; both ends prove by challenge and response that they hold the launch's key before
//! anything is believed. Strangers, silent ones and garbage are dropped and cost nothing
//! but a descriptor for a few seconds; when all connections are there, nobody listens.
//!
//! Between ranks of one host it is a Unix socket, whose name only holders of the key can
//! foresee. Without a key all ranks are on one host, only Unix sockets are used, and the
//! kernel tells whose process the other one is.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::time::{Duration, Instant};

use palingenesis::act::key::{Key, LENGTH};
use palingenesis::system::{folder, random, sockets};

use super::link::{Link, Stream};
use super::socket;
use super::turn::Group;
use crate::comm::CommError;
use crate::comm::control::{Clock, Control, Peer, Terms};

/// What the accepting side says first; its last digits are the version.
const GREETING: [u8; 8] = *b"pgdata01";

/// Greeting and challenge.
const FIRST: usize = 8 + LENGTH;

/// Which connection it is, challenge, proof.
const SECOND: usize = 12 + 2 * LENGTH;

/// How long a stranger may take for its proof.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections that have proved nothing yet: when there are more, the oldest goes.
const STRANGERS: usize = 256;

/// Between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(100);

/// All ranks are there and listen when connecting begins: who cannot be reached within this
/// time never can.
const REACHED: Duration = Duration::from_secs(60);

/// How much longer a rank waits for those that connect to it.
const FIRST_WORD: Duration = Duration::from_secs(3);

/// What the kernel may hold of one connection's bytes on one host; more is slower, measured.
const ROOM: usize = 256 << 10;

/// Where this rank can be reached.
#[derive(Debug)]
pub(super) struct Door {
    tcp: TcpListener,
    unix: Option<UnixListener>,
    port: u16,
}

impl Door {
    /// Listens at a port that the kernel chooses, and at a Unix socket.
    pub(super) fn open(terms: &Terms) -> Result<Door, CommError> {
        let own = |error: io::Error| {
            CommError::Own(format!("rank {} on {} cannot listen for the other ranks: {error}", terms.rank, terms.host))
        };
        let tcp = match terms.key {
            // Nobody comes there; its port makes the Unix socket's name this group's own.
            None => sockets::listen((Ipv4Addr::LOCALHOST, 0).into(), false),
            // Not at one address: on the store's host the store's name may mean 127.0.1.1.
            Some(_) => sockets::listen((Ipv6Addr::UNSPECIFIED, 0).into(), false)
                .or_else(|_| sockets::listen((Ipv4Addr::UNSPECIFIED, 0).into(), false)),
        }
        .map_err(own)?;
        let port = tcp.local_addr().map_err(own)?.port();
        let unix = UnixAddress::from_abstract_name(unix_name(terms.key.as_ref(), terms.rank, port))
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        match unix {
            Ok(unix) => Ok(Door { tcp, unix: Some(unix), port }),
            // Then there is TCP.
            Err(_) if terms.key.is_some() => Ok(Door { tcp, unix: None, port }),
            Err(error) => Err(own(error)),
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Who has come, as far as this user may have sent it.
    fn accept(&self, keyed: bool) -> io::Result<Option<Stream>> {
        if let Some(unix) = &self.unix {
            match unix.accept() {
                Ok((stream, _)) if !keyed && !same_user(&stream) => drop(stream),
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(Some(Stream::Unix(stream)));
                }
                Err(error) if passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        match self.tcp.accept() {
            Ok((stream, _)) if !keyed => drop(stream),
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                return Ok(Some(Stream::Tcp(stream)));
            }
            Err(error) if passing(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }
}

/// Nobody is there, or no more.
fn passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock)
}

fn same_user(stream: &std::os::unix::net::UnixStream) -> bool {
    socket::user(stream).is_ok_and(|user| user == folder::user())
}

fn unix_name(key: Option<&Key>, rank: u32, port: u16) -> String {
    let name = match key {
        Some(key) => key.derive_from(&[b"data socket", &rank.to_le_bytes(), &port.to_le_bytes()]).to_hex(),
        None => format!("{rank}-{port}"),
    };
    format!("palingenesis-{name}")
}

/// What makes two processes ranks of one group.
struct Proof {
    key: Key,
    world: u32,
}

impl Proof {
    fn new(terms: &Terms, peers: &[Peer]) -> Option<Proof> {
        let key = match &terms.key {
            Some(key) => key.derive("data"),
            // No secret: the kernel vouches for the user. It keeps two groups apart.
            None => {
                let ports: Vec<u8> = peers.iter().flat_map(|peer| peer.address.port().to_le_bytes()).collect();
                Key::from_hex(&"0".repeat(2 * LENGTH))?.derive_from(&[b"not secret", &ports])
            }
        };
        Some(Proof { key, world: terms.world_size })
    }

    fn tag(&self, side: &[u8], which: &[u8], challenges: [&[u8]; 2]) -> [u8; LENGTH] {
        self.key.tag(&[side, which, &self.world.to_le_bytes(), challenges[0], challenges[1]])
    }

    fn verify(&self, side: &[u8], which: &[u8], challenges: [&[u8]; 2], tag: &[u8]) -> bool {
        let parts = [side, which, &self.world.to_le_bytes(), challenges[0], challenges[1]];
        tag.try_into().is_ok_and(|tag| self.key.verify(&parts, tag))
    }
}

const CONNECTING: &[u8] = b"connecting";
const ACCEPTING: &[u8] = b"accepting";

/// From this rank to that one, the distance being 2 to the power of `slot`.
fn which(from: u32, to: u32, slot: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes.chunks_exact_mut(4).zip([from, to, slot]).for_each(|(four, n)| four.copy_from_slice(&n.to_le_bytes()));
    bytes
}

/// Fills `got` up to `whole` bytes; whether they are all there.
fn fill(stream: &Stream, got: &mut Vec<u8>, whole: usize) -> io::Result<bool> {
    let have = got.len();
    got.resize(whole, 0);
    let more = stream.receive(&mut got[have..]);
    got.truncate(have + more.as_ref().map_or(0, |more| *more));
    more.map(|_| got.len() == whole)
}

/// A connection is new, so that it has room for a few bytes.
fn say(stream: &Stream, parts: [&[u8]; 2]) -> io::Result<()> {
    let length = parts[0].len() + parts[1].len();
    if stream.send(parts)? == length { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Somebody who has come and proved nothing yet.
struct Stranger {
    stream: Stream,
    since: Instant,
    challenge: [u8; LENGTH],
    got: Vec<u8>,
}

/// A connection that this rank makes.
struct Call {
    slot: u32,
    /// Under way, and not yet connected where the second says so.
    stream: Option<(Stream, bool)>,
    /// A Unix socket is tried first.
    near: bool,
    challenge: [u8; LENGTH],
    got: Vec<u8>,
    again: Instant,
    why: String,
}

impl Call {
    /// What keeps it from standing.
    fn why(&self) -> &str {
        match &self.stream {
            None => &self.why,
            // As where a firewall drops what comes.
            Some((_, true)) => "it does not answer",
            Some((_, false)) => "it takes the connection and does not say who it is",
        }
    }
}

struct Meeting<'a> {
    terms: &'a Terms,
    peers: &'a [Peer],
    proof: Proof,
    ins: Vec<Option<Link>>,
    outs: Vec<Option<Link>>,
}

impl Meeting<'_> {
    fn peer(&self, slot: u32) -> &Peer {
        let (rank, world) = (u64::from(self.terms.rank), self.terms.world_size);
        &self.peers[((rank + (1u64 << slot)) % u64::from(world)) as usize]
    }

    fn begin(&self, call: &mut Call) -> io::Result<()> {
        let peer = self.peer(call.slot);
        call.got.clear();
        call.challenge = random::bytes()?;
        if call.near {
            let name = unix_name(self.terms.key.as_ref(), peer.rank, peer.address.port());
            let stream = socket::connect(name.as_bytes())?;
            if self.terms.key.is_none() && !same_user(&stream) {
                return Err(io::Error::other("another user listens there"));
            }
            socket::room(&stream, ROOM);
            call.stream = Some((Stream::Unix(stream), false));
        } else {
            let stream = sockets::connect(peer.address)?;
            stream.set_nodelay(true)?;
            call.stream = Some((Stream::Tcp(stream), true));
        }
        Ok(())
    }

    /// It is tried again a little later.
    fn failed(&self, call: &mut Call, error: Option<io::Error>) {
        let Some(error) = error else { return };
        call.stream = None;
        call.why = error.to_string();
        call.again = Instant::now() + AGAIN;
        // That rank has no Unix socket, or one in another network namespace.
        if call.near && self.terms.key.is_some() {
            call.near = false;
            call.again = Instant::now();
        }
    }

    /// Goes on with a connection that this rank makes; true when it stands.
    fn advance(&self, call: &mut Call) -> io::Result<bool> {
        let Some((stream, connecting)) = &mut call.stream else { return Ok(false) };
        if let (Stream::Tcp(stream), true) = (&*stream, *connecting) {
            if let Some(error) = stream.take_error()? {
                return Err(error);
            }
            // Writable, or readable because it has failed, which take_error has told.
            if stream.peer_addr().is_err() {
                return Ok(false);
            }
            *connecting = false;
        }
        let which = which(self.terms.rank, self.peer(call.slot).rank, call.slot);
        if call.got.len() < FIRST {
            if !fill(stream, &mut call.got, FIRST)? {
                return Ok(false);
            }
            if call.got[..8] != GREETING {
                return Err(io::Error::other("what answers there is no rank of this version"));
            }
            let tag = self.proof.tag(CONNECTING, &which, [&call.got[8..], &call.challenge]);
            let second: Vec<u8> = [&which[..], &call.challenge, &tag].concat();
            say(stream, [&second, &[]])?;
        }
        if !fill(stream, &mut call.got, FIRST + LENGTH)? {
            return Ok(false);
        }
        let (first, tag) = call.got.split_at(FIRST);
        if self.proof.verify(ACCEPTING, &which, [&first[8..], &call.challenge], tag) {
            Ok(true)
        } else {
            Err(io::Error::other("what answers there does not hold this launch's key"))
        }
    }

    /// Goes on with a stranger.
    fn hear(&self, stranger: &mut Stranger) -> Heard {
        match fill(&stranger.stream, &mut stranger.got, SECOND) {
            Ok(true) => {}
            Ok(false) => return Heard::NotAll,
            Err(_) => return Heard::Nobody,
        }
        let (said, rest) = stranger.got.split_at(12);
        let (challenge, tag) = rest.split_at(LENGTH);
        let challenges = [&stranger.challenge[..], challenge];
        let Some(slot) =
            (0..self.ins.len() as u32).find(|slot| said == which(self.before(*slot), self.terms.rank, *slot))
        else {
            return Heard::Nobody;
        };
        if !self.proof.verify(CONNECTING, said, challenges, tag) {
            return Heard::Nobody;
        }
        match say(&stranger.stream, [&self.proof.tag(ACCEPTING, said, challenges), &[]]) {
            Ok(()) => Heard::Rank(slot),
            Err(_) => Heard::Nobody,
        }
    }

    /// The rank that connects to this one over that distance.
    fn before(&self, slot: u32) -> u32 {
        let (rank, world) = (u64::from(self.terms.rank), u64::from(self.terms.world_size));
        ((rank + world - (1u64 << slot)) % world) as u32
    }

    fn link(&self, rank: u32, stream: Stream) -> Link {
        Link::new(rank, self.peers[rank as usize].host.clone(), stream)
    }

    fn accept(&self, door: &Door, strangers: &mut Vec<Stranger>) -> Result<(), CommError> {
        // A few at a time: the others have their turn too.
        for _ in 0..64 {
            let stream = match door.accept(self.terms.key.is_some()) {
                Ok(Some(stream)) => stream,
                Ok(None) => break,
                // No descriptors: the oldest stranger's will do.
                Err(_) if !strangers.is_empty() => {
                    strangers.remove(0);
                    break;
                }
                Err(error) => return Err(self.own(&error)),
            };
            let challenge = random::bytes().map_err(|error| self.own(&error))?;
            if say(&stream, [&GREETING, &challenge]).is_ok() {
                if strangers.len() == STRANGERS {
                    strangers.remove(0);
                }
                strangers.push(Stranger { stream, since: Instant::now(), challenge, got: Vec::new() });
            }
        }
        Ok(())
    }

    fn own(&self, error: &io::Error) -> CommError {
        CommError::Own(format!(
            "rank {} on {} cannot take connections of the other ranks: {error}",
            self.terms.rank, self.terms.host
        ))
    }

    /// Who is missing when the time is over.
    fn absent(&self, calls: &[Call]) -> CommError {
        let here = format!("rank {} on {}", self.terms.rank, self.terms.host);
        CommError::Start(match calls.first() {
            Some(call) => {
                let peer = self.peer(call.slot);
                format!(
                    "{here} cannot reach rank {} on {} at {}: {}; let the nodes' programs connect to each other at any port",
                    peer.rank,
                    peer.host,
                    peer.address,
                    call.why()
                )
            }
            None => {
                let slot = self.ins.iter().position(Option::is_none).unwrap_or(0) as u32;
                let peer = &self.peers[self.before(slot) as usize];
                format!(
                    "rank {} on {} has not connected to {here} within {} s; see what it says itself",
                    peer.rank,
                    peer.host,
                    REACHED.min(self.terms.start).as_secs()
                )
            }
        })
    }
}

enum Heard {
    NotAll,
    Nobody,
    Rank(u32),
}

/// Connects this rank with all that it has to do with. The others are told when that fails:
/// they would see no more than that this one is gone.
pub(super) fn connections(terms: &Terms, door: Door, control: Control, peers: &[Peer]) -> Result<Group, CommError> {
    match meet(terms, &door, &control, peers) {
        Ok([outs, ins]) => {
            Ok(Group { rank: terms.rank, world: terms.world_size, host: terms.host.clone(), control, outs, ins })
        }
        Err(error) => {
            control.fail(&error.to_string());
            Err(error)
        }
    }
}

/// The connections to the ranks 1, 2, 4, … further on, and those from the ranks before.
fn meet(terms: &Terms, door: &Door, control: &Control, peers: &[Peer]) -> Result<[Vec<Link>; 2], CommError> {
    let own = |what: &str| CommError::Own(format!("rank {} on {}: {what}", terms.rank, terms.host));
    if peers.len() != terms.world_size as usize || peers.iter().zip(0..).any(|(peer, rank)| peer.rank != rank) {
        return Err(own("the store's list of ranks is not whole"));
    }
    let slots = terms.world_size.next_power_of_two().ilog2();
    let mut meeting = Meeting {
        terms,
        peers,
        proof: Proof::new(terms, peers).ok_or_else(|| own("no proof can be made"))?,
        ins: (0..slots).map(|_| None).collect(),
        outs: (0..slots).map(|_| None).collect(),
    };
    let (began, limit) = (Instant::now(), REACHED.min(terms.start));
    let mut clock = Clock::new();
    let mut strangers: Vec<Stranger> = Vec::new();
    let mut calls: Vec<Call> = (0..slots)
        .map(|slot| Call {
            slot,
            stream: None,
            near: terms.key.is_none() || meeting.peer(slot).host == terms.host,
            challenge: [0; LENGTH],
            got: Vec::new(),
            again: began,
            why: String::new(),
        })
        .collect();
    while !calls.is_empty() || meeting.ins.iter().any(Option::is_none) {
        let now = Instant::now();
        clock.look();
        // Who cannot connect knows why and has the first word.
        let limit = if calls.is_empty() { limit + FIRST_WORD } else { limit };
        let left = limit.saturating_sub(clock.ran());
        if left.is_zero() {
            return Err(meeting.absent(&calls));
        }
        for call in &mut calls {
            if call.stream.is_none() && call.again <= now {
                let begun = meeting.begin(call);
                meeting.failed(call, begun.err());
            }
        }

        let mut fds: Vec<(BorrowedFd<'_>, bool)> = vec![(control.fd(), false), (door.tcp.as_fd(), false)];
        fds.extend(door.unix.iter().map(|unix| (unix.as_fd(), false)));
        fds.extend(strangers.iter().map(|stranger| (stranger.stream.as_fd(), false)));
        fds.extend(calls.iter().filter_map(|call| call.stream.as_ref()).map(|(stream, new)| (stream.as_fd(), *new)));
        let ready = sockets::wait(&fds, left.min(AGAIN));
        drop(fds);
        if ready[0]
            && let Some(error) = control.verdict(AGAIN)
        {
            return Err(error);
        }

        meeting.accept(door, &mut strangers)?;
        let mut waiting = Vec::with_capacity(strangers.len());
        for mut stranger in strangers {
            match meeting.hear(&mut stranger) {
                Heard::Rank(slot) => {
                    // The last one counts: a rank connects again only when it has given up
                    // the connection before.
                    let link = meeting.link(meeting.before(slot), stranger.stream);
                    meeting.ins[slot as usize] = Some(link);
                }
                Heard::NotAll if stranger.since.elapsed() < PATIENCE => waiting.push(stranger),
                Heard::NotAll | Heard::Nobody => {}
            }
        }
        strangers = waiting;
        for call in &mut calls {
            match meeting.advance(call) {
                Ok(false) => {}
                Ok(true) => {
                    let rank = meeting.peer(call.slot).rank;
                    let stream = call.stream.take().map(|(stream, _)| meeting.link(rank, stream));
                    meeting.outs[call.slot as usize] = stream;
                }
                Err(error) => meeting.failed(call, Some(error)),
            }
        }
        calls.retain(|call| meeting.outs[call.slot as usize].is_none());
    }
    Ok([meeting.outs, meeting.ins].map(|links| links.into_iter().flatten().collect()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::fd::AsRawFd;
    use std::thread;

    use super::*;

    fn terms(rank: u32, port: u16, host: &str, key: &Key) -> Terms {
        let limit = Duration::from_secs(30);
        let master = ("127.0.0.1".to_string(), port);
        Terms { rank, world_size: 2, host: host.into(), master, key: Some(key.clone()), start: limit, silence: limit }
    }

    /// Two ranks join; then each meets the other with the terms that `change` makes of its
    /// own, after `disturb` has had its door.
    fn both(
        change: fn(&mut Terms),
        disturb: fn(&Door) -> Vec<TcpStream>,
    ) -> Vec<Result<(Group, Vec<TcpStream>), CommError>> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let key = Key::new().unwrap();
        let rank = |rank: u32| {
            let mut terms = terms(rank, port, &format!("n{rank}"), &key);
            thread::spawn(move || {
                let door = Door::open(&terms).unwrap();
                let (control, peers) = Control::join(&terms, door.port()).unwrap();
                let strangers = disturb(&door);
                change(&mut terms);
                connections(&terms, door, control, &peers).map(|group| (group, strangers))
            })
        };
        let ranks = [rank(0), rank(1)];
        ranks.map(|rank| rank.join().unwrap()).into()
    }

    #[test]
    fn silent_garbled_and_many_strangers_keep_no_rank_away() {
        let met = both(
            |_| {},
            |door| {
                let come = |said: &[u8]| {
                    let mut stream = TcpStream::connect(("127.0.0.1", door.port())).unwrap();
                    stream.write_all(said).unwrap();
                    stream
                };
                let mut strangers: Vec<TcpStream> = (0..300).map(|_| come(b"")).collect();
                strangers.push(come(b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n"));
                // As long as a proof, and none.
                strangers.push(come(&[0; SECOND]));
                strangers.push(come(&[&which(1, 0, 0)[..], &which(0, 1, 0), &[0; 2 * LENGTH]].concat()));
                strangers
            },
        );
        for (rank, met) in met.into_iter().enumerate() {
            let (group, strangers) = met.unwrap();
            let other = 1 - rank as u32;
            assert_eq!([group.outs[0].rank, group.ins[0].rank], [other; 2]);
            // None of them was told more than the greeting.
            for mut stranger in strangers {
                let mut said = Vec::new();
                let _ = stranger.read_to_end(&mut said);
                assert!(said.len() <= FIRST, "{} bytes", said.len());
            }
        }
    }

    #[test]
    fn another_key_is_refused_and_the_error_names_both_ranks() {
        let met = both(
            |terms| {
                terms.start = Duration::from_secs(1);
                if terms.rank == 1 {
                    terms.key = Some(Key::new().unwrap());
                }
            },
            |_| Vec::new(),
        );
        // Which of them sees it first is open; the other sees this one's end.
        let errors: Vec<String> = met.into_iter().map(|met| met.map(drop).unwrap_err().to_string()).collect();
        let named = |error: &String| error.contains("rank 0 on n0") && error.contains("rank 1 on n1");
        assert!(errors.iter().any(|error| named(error) && error.contains("cannot reach")), "{errors:?}");
    }

    /// A listener whose queue is full drops what comes, as a firewall does.
    #[test]
    fn a_rank_that_cannot_be_reached_is_named_with_the_reason_on_both_sides() {
        let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::listen(deaf.as_raw_fd(), 0) }, 0);
        let address = deaf.local_addr().unwrap();
        let _queue: Vec<TcpStream> = (0..3).map(|_| sockets::connect(address).unwrap()).collect();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let key = Key::new().unwrap();
        let ranks = [0, 1].map(|rank| {
            let mut terms = terms(rank, port, &format!("n{rank}"), &key);
            thread::spawn(move || {
                let door = Door::open(&terms).unwrap();
                let (control, mut peers) = Control::join(&terms, door.port()).unwrap();
                if rank == 0 {
                    terms.start = Duration::from_secs(2);
                    peers[1].address = address;
                }
                connections(&terms, door, control, &peers).map(drop).unwrap_err().to_string()
            })
        });
        let [zero, one] = ranks.map(|rank| rank.join().unwrap());
        let why = format!("rank 0 on n0 cannot reach rank 1 on n1 at {address}: it does not answer; let the nodes'");
        assert!(zero.starts_with(&why), "{zero}");
        assert!(one.starts_with(&format!("rank 0 on n0 has ended: {why}")), "{one}");
    }
}
