//! The connections of rank 0's node: everybody who comes to its port, and which of
//! them are the other nodes.
//!
//! Anybody can come to the port. Who has not shown the key is dropped after 2 s, and earlier
//! where there are many: the oldest first, for a node of this launch needs one round trip
//! and comes again when it was dropped. So memory and files are bounded, and neither
//! silence nor garbage nor a flood keeps the nodes of this launch out.
//!
//! A node joins once: its leader stays on the one connection that it has said so on (it
//! may have come by two addresses at a time) and ends when that ends. So whoever else says
//! later that he is this node is none, and it is he who is dropped.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::link::{Link, READING};
use super::wire::{self, Channel, GREETING, Message, REPLY, Side, VERSION};
use super::{DEAD, MUTE, PING, Terms};
use crate::system::limits::{self, Resource};
use crate::system::{random, sockets};

/// How long somebody may take to show that he is of this launch.
const AUTHENTICATION: Duration = Duration::from_secs(2);

/// How many may be about to, besides one for each node.
const STRANGERS: usize = 256;

/// Open files that are kept for everything else.
const OTHER_FILES: usize = 128;

/// How many are accepted before those that are here are heard again.
const ACCEPTED: usize = 64;

/// The listening socket's token.
const LISTENER: u64 = u64::MAX;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// This node has come.
    Joined(u32),
    /// A node has come whose release speaks this other version.
    Other(u32, u16),
    /// It says this.
    Said(u32, Message),
    /// Its connection has ended; why.
    Ended(u32, String),
    /// Nobody else can come: the error.
    Full(io::Error),
}

enum State {
    /// Was greeted with this; its reply, as far as it came.
    Greeted(TcpStream, [u8; GREETING], Vec<u8>),
    /// Has the key and speaks this version, but has not joined.
    Proved(Link, u32, u16),
    /// Is this node.
    Node(Link, u32),
}

struct Slot {
    state: State,
    /// Tells it from those that had its place before.
    serial: u64,
    /// Whether it is waited for until it takes what is to be sent.
    writing: bool,
}

impl Slot {
    fn stranger(&self) -> bool {
        !matches!(self.state, State::Node(..))
    }

    fn into_stream(self) -> TcpStream {
        match self.state {
            State::Greeted(stream, ..) => stream,
            State::Proved(link, ..) | State::Node(link, _) => link.stream,
        }
    }
}

/// All of them.
pub struct Connections<'a> {
    terms: &'a Terms,
    listener: Option<TcpListener>,
    /// Accepts nobody until then.
    deaf: Option<Instant>,
    /// The port that was free.
    pub port: u16,
    many: sockets::Many,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// The place of each node's connection.
    of_node: Vec<Option<usize>>,
    /// How many nodes are connected.
    pub joined: usize,
    /// Those that have not joined, oldest first; some are gone.
    waiting: VecDeque<(usize, u64, Instant)>,
    strangers: usize,
    strangers_max: usize,
    serial: u64,
    scratch: Vec<u8>,
    tokens: Vec<u64>,
    /// When something was last sent to, or ended by, a node.
    pub progress: Instant,
    beat: Instant,
    /// The limit of open files to go back to.
    files: Option<u64>,
}

/// The place that a token means.
fn place(token: u64) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX)
}

/// Listens on a port at every address of this node.
fn listen(port: u16, reuse: bool) -> io::Result<TcpListener> {
    let six = sockets::listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), reuse);
    match six {
        // A kernel without IPv6.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT | libc::ENOPROTOOPT)
            ) =>
        {
            sockets::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), reuse)
        }
        six => six,
    }
}

/// Listens on the first port that is free as the training program will want it: without
/// SO_REUSEADDR, which not everybody sets. Only where the user named the one port that must
/// do it is taken with it too.
fn first_free(ports: &[u16]) -> Result<(TcpListener, u16), Vec<(u16, i32)>> {
    let mut faults = Vec::new();
    for port in ports {
        let listener = match (listen(*port, false), ports) {
            (Err(_), [_]) => listen(*port, true),
            (listener, _) => listener,
        };
        match listener {
            Ok(listener) => return Ok((listener, *port)),
            Err(error) => faults.push((*port, error.raw_os_error().unwrap_or(0))),
        }
    }
    Err(faults)
}

impl<'a> Connections<'a> {
    /// Listens.
    ///
    /// # Errors
    /// Which port failed with which number.
    pub fn new(terms: &'a Terms, now: Instant) -> Result<Connections<'a>, Vec<(u16, i32)>> {
        let (listener, port) = first_free(&terms.ports)?;
        let failed = |error: io::Error| vec![(port, error.raw_os_error().unwrap_or(0))];
        sockets::watch(&listener, DEAD);
        let many = sockets::Many::new().map_err(failed)?;
        many.add(listener.as_fd(), LISTENER).map_err(failed)?;
        let nodes = terms.nodes.len();
        let wanted = 2 * nodes + STRANGERS + OTHER_FILES;
        let (soft, _) = limits::limit(Resource::OpenFiles).unwrap_or((1024, 1024));
        // Slurm gives the task the user's own limits later.
        let raised = soft < wanted as u64 && limits::set_open_files(wanted as u64);
        let (now_soft, _) = limits::limit(Resource::OpenFiles).unwrap_or((1024, 1024));
        let room = usize::try_from(now_soft).unwrap_or(usize::MAX).saturating_sub(nodes + OTHER_FILES);
        Ok(Connections {
            terms,
            listener: Some(listener),
            deaf: None,
            port,
            many,
            slots: Vec::new(),
            free: Vec::new(),
            of_node: vec![None; nodes],
            joined: 0,
            waiting: VecDeque::new(),
            strangers: 0,
            strangers_max: (nodes + STRANGERS).min(room).max(16),
            serial: 0,
            scratch: vec![0; READING],
            tokens: Vec::new(),
            progress: now,
            beat: now,
            files: raised.then_some(soft),
        })
    }

    /// Readable when [`Connections::turn`] has something to do.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.many.fd()
    }

    /// Hears what there is to hear, without waiting.
    pub fn turn(&mut self, now: Instant, events: &mut Vec<Event>) {
        self.expire(now);
        if self.deaf.is_some_and(|until| until <= now) {
            self.deaf = None;
            self.hear_listener(true);
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        self.many.ready(&mut tokens);
        for token in &tokens {
            if *token == LISTENER {
                self.accept(now, events);
            } else {
                self.hear(place(*token), now, events);
            }
        }
        self.tokens = tokens;
        if now.saturating_duration_since(self.beat) >= Duration::from_secs(1) {
            self.beat = now;
            self.ping(now, events);
        }
    }

    /// Sends it to a node that has joined. `false` when it is too long.
    #[must_use]
    pub fn send(&mut self, node_rank: u32, message: &Message, now: Instant) -> bool {
        let Some(index) = self.index(node_rank) else { return true };
        let Some(Some(slot)) = self.slots.get_mut(index) else { return true };
        let State::Node(link, _) = &mut slot.state else { return true };
        let fits = link.send(message, now);
        self.progress = now;
        self.mind_writing(index);
        fits
    }

    /// Whether this node is connected.
    pub fn has(&self, node_rank: u32) -> bool {
        self.index(node_rank).is_some()
    }

    /// Nobody else comes.
    pub fn close_port(&mut self) {
        self.listener = None;
        while self.drop_oldest() {}
    }

    fn index(&self, node_rank: u32) -> Option<usize> {
        self.of_node.get(usize::try_from(node_rank).ok()?).copied().flatten()
    }

    fn hear_listener(&self, hear: bool) {
        if let Some(listener) = &self.listener {
            let _ = self.many.reading(listener.as_fd(), LISTENER, hear);
        }
    }

    fn accept(&mut self, now: Instant, events: &mut Vec<Event>) {
        for _ in 0..ACCEPTED {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, _)) => self.greet(stream, now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    let full = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
                    // Any other error: that one has gone again.
                    if error.raw_os_error().is_some_and(|number| full.contains(&number)) && !self.drop_oldest() {
                        // It stays readable: nothing would be done but try.
                        self.deaf = Some(now + Duration::from_millis(200));
                        self.hear_listener(false);
                        events.push(Event::Full(error));
                        return;
                    }
                }
            }
        }
    }

    fn greet(&mut self, stream: TcpStream, now: Instant) {
        let Ok(random) = random::bytes() else { return sockets::reset(stream) };
        let greeting = wire::greeting(&random);
        // A fresh socket takes so little at once.
        let greeted = stream.set_nonblocking(true).is_ok() && matches!((&stream).write(&greeting), Ok(GREETING));
        if !greeted {
            return sockets::reset(stream);
        }
        while self.strangers >= self.strangers_max && self.drop_oldest() {}
        let index = self.free.pop().unwrap_or(self.slots.len());
        if self.many.add(stream.as_fd(), index as u64).is_err() {
            if index < self.slots.len() {
                self.free.push(index);
            }
            return sockets::reset(stream);
        }
        let serial = self.waits(index, now);
        let state = State::Greeted(stream, greeting, Vec::new());
        let slot = Some(Slot { state, serial, writing: false });
        match self.slots.get_mut(index) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.strangers += 1;
        if self.waiting.len() > 4 * self.strangers_max + 64 {
            let slots = &self.slots;
            self.waiting.retain(|(index, serial, _)| is_stranger(slots, *index, *serial));
        }
    }

    /// From now on this one is waited for; its number.
    fn waits(&mut self, index: usize, now: Instant) -> u64 {
        self.serial += 1;
        self.waiting.push_back((index, self.serial, now));
        self.serial
    }

    /// Drops those that took too long.
    fn expire(&mut self, now: Instant) {
        while let Some((index, serial, since)) = self.waiting.front().copied() {
            let gone = !is_stranger(&self.slots, index, serial);
            if !gone && now.saturating_duration_since(since) < AUTHENTICATION {
                return;
            }
            self.waiting.pop_front();
            if !gone {
                self.forget(index);
            }
        }
    }

    /// Whether there was one. Who has shown the key is none of those that are too many: he
    /// has begun to rely on the connection.
    fn drop_oldest(&mut self) -> bool {
        let slots = &self.slots;
        let greeted = |(index, serial, _): &(usize, u64, Instant)| {
            let slot = slots.get(*index).and_then(Option::as_ref);
            slot.is_some_and(|slot| slot.serial == *serial && matches!(slot.state, State::Greeted(..)))
        };
        let oldest = self.waiting.iter().position(greeted).and_then(|at| self.waiting.remove(at));
        let Some((index, ..)) = oldest else { return false };
        self.forget(index);
        true
    }

    /// Ends a connection with a reset.
    fn forget(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        match &slot.state {
            State::Node(_, node_rank) => self.place_of(*node_rank, None),
            _ => self.strangers -= 1,
        }
        self.free.push(index);
        sockets::reset(slot.into_stream());
    }

    /// Hears one connection.
    fn hear(&mut self, index: usize, now: Instant, events: &mut Vec<Event>) {
        let Some(Slot { state, serial, writing }) = self.slots.get_mut(index).and_then(Option::take) else {
            return;
        };
        let had_proved = matches!(state, State::Proved(..));
        let (was, heard) = match state {
            State::Greeted(stream, greeting, heard) => (None, self.greeted(stream, greeting, heard, now)),
            State::Proved(link, node_rank, version) => (None, self.proved(link, node_rank, version, now, events)),
            State::Node(link, node_rank) => (Some(node_rank), self.member(link, node_rank, now, events)),
        };
        let is = match &heard {
            Ok(State::Node(_, node_rank)) => Some(*node_rank),
            _ => None,
        };
        if let (Some(node_rank), None) = (was, is) {
            self.place_of(node_rank, None);
            self.progress = now;
        }
        if let (None, Some(node_rank)) = (was, is) {
            self.place_of(node_rank, Some(index));
        }
        if was.is_none() && (is.is_some() || heard.is_err()) {
            self.strangers -= 1;
        }
        match heard {
            Ok(state) => {
                // The time that it has had was for the key: its first word may take as long.
                let proved = matches!(state, State::Proved(..));
                let serial = if proved && !had_proved { self.waits(index, now) } else { serial };
                self.slots[index] = Some(Slot { state, serial, writing });
                self.mind_writing(index);
            }
            Err(stream) => {
                self.free.push(index);
                sockets::reset(stream);
            }
        }
    }

    /// A node's connection is here now, or is no more.
    fn place_of(&mut self, node_rank: u32, index: Option<usize>) {
        let Some(place) = usize::try_from(node_rank).ok().and_then(|rank| self.of_node.get_mut(rank)) else { return };
        self.joined -= usize::from(place.is_some());
        self.joined += usize::from(index.is_some());
        *place = index;
    }

    /// Reads a reply. The stream is to be reset where it comes back alone.
    fn greeted(
        &self,
        mut stream: TcpStream,
        greeting: [u8; GREETING],
        mut heard: Vec<u8>,
        now: Instant,
    ) -> Result<State, TcpStream> {
        // One byte more than may come.
        let mut buffer = [0; REPLY + 1];
        let room = buffer.len().saturating_sub(heard.len());
        match stream.read(&mut buffer[..room]) {
            Ok(0) => return Err(stream),
            Ok(read) => heard.extend_from_slice(&buffer[..read]),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(_) => return Err(stream),
        }
        if heard.len() < REPLY {
            return Ok(State::Greeted(stream, greeting, heard));
        }
        let Ok(reply) = <[u8; REPLY]>::try_from(heard) else { return Err(stream) };
        let Ok(replied) = wire::read_reply(&self.terms.key, &greeting, &reply) else { return Err(stream) };
        // Rank 0 is here; another number is none of this launch; who has joined stays.
        let known = usize::try_from(replied.node_rank).is_ok_and(|rank| (1..self.of_node.len()).contains(&rank));
        if !known || self.has(replied.node_rank) {
            return Err(stream);
        }
        let proof = wire::proof(&self.terms.key, &greeting, &reply);
        match stream.write(&proof) {
            Ok(written) if written == proof.len() => {}
            _ => return Err(stream),
        }
        let channel = Channel::new(&self.terms.key, Side::Server, &greeting, &reply);
        Ok(State::Proved(Link::new(stream, channel, now), replied.node_rank, replied.version))
    }

    /// Whether one that has the key joins.
    fn proved(
        &mut self,
        mut link: Link,
        node_rank: u32,
        version: u16,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<State, TcpStream> {
        let ended = link.receive(&mut self.scratch, now);
        match link.next() {
            Ok(None) if ended.is_none() => Ok(State::Proved(link, node_rank, version)),
            Ok(Some(Message::Join)) if !self.has(node_rank) => {
                events.push(if version == VERSION {
                    Event::Joined(node_rank)
                } else {
                    Event::Other(node_rank, version)
                });
                Self::said(link, node_rank, ended, events)
            }
            _ => Err(link.stream),
        }
    }

    /// Hears a node.
    fn member(
        &mut self,
        mut link: Link,
        node_rank: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<State, TcpStream> {
        link.flush();
        let ended = link.receive(&mut self.scratch, now);
        Self::said(link, node_rank, ended, events)
    }

    /// What a node has said, and whether it is at its end.
    fn said(
        mut link: Link,
        node_rank: u32,
        ended: Option<String>,
        events: &mut Vec<Event>,
    ) -> Result<State, TcpStream> {
        let why = loop {
            match (link.next(), &ended) {
                (Ok(Some(Message::Ping)), _) => {}
                (Ok(Some(message)), _) => events.push(Event::Said(node_rank, message)),
                (Ok(None), None) => return Ok(State::Node(link, node_rank)),
                (Ok(None), Some(why)) => break why.clone(),
                (Err(_), _) => break "what came over it was not what the node sent".to_owned(),
            }
        };
        events.push(Event::Ended(node_rank, why));
        Err(link.stream)
    }

    /// Waits for the socket to take more, where there is more.
    fn mind_writing(&mut self, index: usize) {
        let Some(Some(slot)) = self.slots.get_mut(index) else { return };
        let State::Node(link, _) = &slot.state else { return };
        if link.writes() != slot.writing {
            slot.writing = link.writes();
            let _ = self.many.writing(link.stream.as_fd(), index as u64, slot.writing);
        }
        if !slot.writing {
            self.progress = self.progress.max(link.said);
        }
    }

    /// Lets the nodes know that this one is here, and finds out who is not.
    fn ping(&mut self, now: Instant, events: &mut Vec<Event>) {
        for index in 0..self.slots.len() {
            let Some(Some(slot)) = self.slots.get_mut(index) else { continue };
            let State::Node(link, node_rank) = &mut slot.state else { continue };
            if now >= link.heard + MUTE {
                events.push(Event::Ended(*node_rank, format!("nothing was heard of it for {} s", MUTE.as_secs())));
                self.forget(index);
                continue;
            }
            if now >= link.said + PING {
                // Short, so it fits.
                let _ = link.send(&Message::Ping, now);
                self.mind_writing(index);
            }
        }
    }
}

/// Whether the place still is of this one, who has not joined.
fn is_stranger(slots: &[Option<Slot>], index: usize, serial: u64) -> bool {
    matches!(slots.get(index), Some(Some(slot)) if slot.serial == serial && slot.stranger())
}

/// Nothing is left of any connection: the port is free.
impl Drop for Connections<'_> {
    fn drop(&mut self) {
        self.listener = None;
        for slot in self.slots.drain(..).flatten() {
            sockets::reset(slot.into_stream());
        }
        if let Some(files) = self.files {
            limits::set_open_files(files);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::key::Key;

    fn terms(nodes: usize) -> Terms {
        // A port that is free at the moment.
        let any = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        Terms {
            nodes: (0..nodes).map(|node| format!("node{node:03}")).collect(),
            node_rank: 0,
            addresses: vec![],
            ports: vec![any],
            key: Key::new().unwrap(),
            arrival: Duration::from_secs(600),
        }
    }

    fn turn(connections: &mut Connections<'_>, now: Instant) -> Vec<Event> {
        let mut events = Vec::new();
        // The kernel needs a moment.
        for _ in 0..20 {
            connections.turn(now, &mut events);
            std::thread::sleep(Duration::from_millis(1));
        }
        events
    }

    fn knock(connections: &mut Connections<'_>, now: Instant) -> (TcpStream, [u8; GREETING]) {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, connections.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert!(turn(connections, now).is_empty());
        let mut greeting = [0; GREETING];
        stream.read_exact(&mut greeting).unwrap();
        (stream, greeting)
    }

    /// Has the key; joins where it is told to.
    fn prove(connections: &mut Connections<'_>, now: Instant) -> (TcpStream, Channel) {
        let (mut stream, greeting) = knock(connections, now);
        let reply = wire::reply(&connections.terms.key, &greeting, 1, &[9; wire::RANDOM]);
        stream.write_all(&reply).unwrap();
        assert!(turn(connections, now).is_empty());
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        (stream, Channel::new(&connections.terms.key, Side::Client, &greeting, &reply))
    }

    fn join(stream: &mut TcpStream, channel: &mut Channel) {
        let mut frame = Vec::new();
        assert!(channel.seal(&Message::Join, &mut frame));
        stream.write_all(&frame).unwrap();
    }

    fn is_over(stream: &mut TcpStream) -> bool {
        !matches!(stream.read(&mut [0; 1]), Ok(1))
    }

    #[test]
    fn who_shows_no_key_within_two_seconds_is_dropped() {
        let terms = terms(2);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        let (mut silent, _) = knock(&mut connections, now);
        // Has the key, but does not join.
        let (mut half, _) = prove(&mut connections, now + Duration::from_secs(1));
        assert_eq!(connections.strangers, 2);
        turn(&mut connections, now + Duration::from_secs(2));
        assert!(is_over(&mut silent));
        assert_eq!(connections.strangers, 1);
        turn(&mut connections, now + Duration::from_secs(3));
        assert!(is_over(&mut half));
        assert_eq!((connections.strangers, connections.joined), (0, 0));
    }

    /// A node under load may have needed nearly all of the time to show the key. It relies
    /// on the connection from the proof on, and would not come again.
    #[test]
    fn the_time_for_the_first_word_begins_with_the_proof() {
        let terms = terms(2);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        let (mut stream, greeting) = knock(&mut connections, now);
        let reply = wire::reply(&terms.key, &greeting, 1, &[9; wire::RANDOM]);
        stream.write_all(&reply).unwrap();
        let late = now + AUTHENTICATION - Duration::from_millis(1);
        assert!(turn(&mut connections, late).is_empty());
        stream.read_exact(&mut [0; 32]).unwrap();
        assert!(turn(&mut connections, now + AUTHENTICATION).is_empty());
        join(&mut stream, &mut Channel::new(&terms.key, Side::Client, &greeting, &reply));
        let events = turn(&mut connections, late + Duration::from_secs(1));
        assert!(matches!(events[..], [Event::Joined(1)]), "{events:?}");
        assert_eq!((connections.strangers, connections.joined), (0, 1));
    }

    #[test]
    fn of_too_many_strangers_the_oldest_is_dropped() {
        let terms = terms(2);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        connections.strangers_max = 3;
        let mut held: Vec<TcpStream> = (0..5).map(|_| knock(&mut connections, now).0).collect();
        assert_eq!(connections.strangers, 3);
        assert!(is_over(&mut held[0]) && is_over(&mut held[1]));
        let (mut stream, mut channel) = prove(&mut connections, now);
        assert!(is_over(&mut held[2]));
        join(&mut stream, &mut channel);
        assert!(matches!(turn(&mut connections, now)[..], [Event::Joined(1)]));
        assert_eq!((connections.strangers, connections.joined), (2, 1));
    }

    /// It is who comes later that is none of this launch.
    #[test]
    fn a_node_joins_once() {
        let terms = terms(3);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        // By two addresses at a time: it stays on the one that it says so on.
        let (mut first, mut first_channel) = prove(&mut connections, now);
        let (mut second, mut second_channel) = prove(&mut connections, now);
        join(&mut second, &mut second_channel);
        assert!(matches!(turn(&mut connections, now)[..], [Event::Joined(1)]));
        join(&mut first, &mut first_channel);
        assert!(turn(&mut connections, now).is_empty());
        assert!(is_over(&mut first));
        let (mut third, greeting) = knock(&mut connections, now);
        third.write_all(&wire::reply(&terms.key, &greeting, 1, &[9; wire::RANDOM])).unwrap();
        assert!(turn(&mut connections, now).is_empty());
        assert!(is_over(&mut third));
        assert_eq!((connections.joined, connections.strangers), (1, 0));
        // And is still heard on the one it joined on.
        assert!(connections.send(1, &Message::Ask(0, b"?".to_vec()), now));
        let mut frame = [0; 64];
        let read = second.read(&mut frame).unwrap();
        assert_eq!(second_channel.open(&frame[..read]).unwrap().unwrap().0, Message::Ask(0, b"?".to_vec()));
    }

    /// Between its proof and its first message a node relies on the connection already: a
    /// flood of strangers, of whom the oldest are dropped, must not end it.
    #[test]
    fn who_has_shown_the_key_is_not_dropped_for_strangers() {
        let terms = terms(2);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        let (mut stream, mut channel) = prove(&mut connections, now);
        let most = connections.strangers_max;
        let strangers: Vec<TcpStream> = (0..most + 10)
            .map(|_| {
                let stranger = TcpStream::connect((Ipv4Addr::LOCALHOST, connections.port)).unwrap();
                connections.turn(now, &mut Vec::new());
                stranger
            })
            .collect();
        assert!(connections.strangers <= most, "{} of {most}", connections.strangers);
        join(&mut stream, &mut channel);
        let events = turn(&mut connections, now);
        assert!(matches!(events[..], [Event::Joined(1)]), "{events:?}");
        drop(strangers);
    }

    #[test]
    fn a_node_is_pinged_and_one_that_says_nothing_for_a_minute_is_given_up() {
        let terms = terms(2);
        let now = Instant::now();
        let mut connections = Connections::new(&terms, now).unwrap();
        let (mut stream, mut channel) = prove(&mut connections, now);
        join(&mut stream, &mut channel);
        turn(&mut connections, now);
        assert!(turn(&mut connections, now + PING).is_empty());
        let mut frame = [0; 64];
        let read = stream.read(&mut frame).unwrap();
        assert_eq!(channel.open(&frame[..read]).unwrap().unwrap().0, Message::Ping);
        let mut ping = Vec::new();
        assert!(channel.seal(&Message::Ping, &mut ping));
        stream.write_all(&ping).unwrap();
        let later = now + Duration::from_secs(40);
        assert!(turn(&mut connections, later).is_empty());
        assert!(turn(&mut connections, later + Duration::from_secs(59)).is_empty());
        let events = turn(&mut connections, later + Duration::from_secs(61));
        assert!(
            matches!(&events[..], [Event::Ended(1, why)] if why == "nothing was heard of it for 60 s"),
            "{events:?}"
        );
        assert_eq!(connections.joined, 0);
    }
}
