//! Rank 0's side: everybody who comes to its port, which of them are ranks, and which rank
//! is gone first.
//!
//! Anybody can come to the port. Who has not shown the key is dropped after some seconds,
//! and earlier where there are many, the oldest first: a rank needs one round trip, and
//! comes again when it was dropped. So neither silence nor garbage nor a flood keeps ranks
//! out or fills memory. The port stays open to the end: a rank that is there twice is to be
//! told so, however late it comes.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis::config::printable;
use palingenesis::facts::listener;
use palingenesis::system::limits::{self, Resource};
use palingenesis::system::output::to_stderr;
use palingenesis::system::{random, sockets};

use super::key::is_own;
use super::link::Link;
use super::wire::{self, At, GREETING, Hello, Message, REPLY_MAX, Seat, Session, Side, VERSION, Verdict};
use super::{BEAT, BEHIND, Clock, Ending, PARTING, Peer, Shared, TICK, Terms, lock, ranks, s, stopped};
use crate::comm::CommError;

/// How long somebody may take to show that he is of this launch.
const AUTHENTICATION: Duration = Duration::from_secs(5);

/// How many may be about to, besides one for each rank.
const STRANGERS: usize = 256;

/// Open files that are kept for everything else: data connections, checkpoints.
const OTHER_FILES: usize = 256;

/// How many are accepted before those that are here are heard again.
const ACCEPTED: usize = 64;

/// How long a port that is taken is tried again: of a killed job the last may still end.
const PORT_TAKEN: Duration = Duration::from_secs(3);

/// How long who has not come yet is waited for when there is no training.
const LATE: Duration = Duration::from_secs(5);

/// When it is first told who is waited for; then after twice the time, but every
/// [`TELL_MAX`].
const TELL: Duration = Duration::from_secs(5);
const TELL_MAX: Duration = Duration::from_secs(60);

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// The program's version: all ranks need the same, or they compute different things.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

enum Connection {
    /// Was greeted; its reply, as far as it came.
    Stranger { stream: TcpStream, greeting: Box<[u8; GREETING]>, heard: Vec<u8> },
    /// Is this rank.
    Member { rank: u32, link: Link },
    /// Has heard or said the last word; until it closes, or then.
    Leaving { link: Link, until: Instant },
}

impl Connection {
    fn link(&mut self) -> Option<&mut Link> {
        match self {
            Connection::Stranger { .. } => None,
            Connection::Member { link, .. } | Connection::Leaving { link, .. } => Some(link),
        }
    }
}

/// A rank that has come.
struct Member {
    seat: Seat,
    /// The address from which it was seen to connect.
    ip: IpAddr,
    at: At,
    /// It has a connection, and has not said goodbye.
    connected: bool,
}

/// A rank that is gone, or says that it ends.
struct Gone {
    rank: u32,
    why: String,
    said: bool,
}

/// Who came and is no rank.
#[derive(Default)]
struct TurnedAway {
    count: u64,
    last: Option<(IpAddr, String)>,
}

impl TurnedAway {
    fn note(&mut self, stream: &TcpStream, why: &str) {
        self.count += 1;
        if let Ok(from) = stream.peer_addr() {
            self.last = Some((from.ip().to_canonical(), why.to_owned()));
        }
    }

    /// As a person wants it behind "waiting for ranks".
    fn text(&self) -> String {
        match &self.last {
            None => String::new(),
            Some((from, why)) => {
                format!(
                    "; {} connection{} turned away, the last from {from}: {why}",
                    self.count,
                    s(self.count as usize)
                )
            }
        }
    }
}

/// The thread's state.
pub struct Server {
    shared: Arc<Shared>,
    key: Option<Key>,
    /// Rank 0's.
    host: String,
    silence: Duration,
    listener: Option<TcpListener>,
    many: sockets::Many,
    /// Accepts nobody until then.
    deaf: Option<Instant>,
    connections: HashMap<u64, Connection>,
    next: u64,
    /// Oldest first; some are strangers no more.
    strangers: VecDeque<(u64, Instant)>,
    strangers_max: usize,
    turned_away: TurnedAway,
    /// By rank; the first is rank 0 itself.
    members: Vec<Option<Member>>,
    /// All have come.
    running: bool,
    gone: Vec<Gone>,
    /// Why there is no training.
    last: Option<Message>,
    clock: Clock,
    beat: Instant,
    tokens: Vec<u64>,
}

fn own(what: &str) -> impl Fn(io::Error) -> CommError {
    let what = what.to_owned();
    move |error| CommError::Own(format!("cannot {what}: {error}"))
}

/// Listens; without a key at loopback only.
fn listen(terms: &Terms) -> Result<TcpListener, CommError> {
    let port = terms.master.1;
    let bind = || match terms.key {
        None => sockets::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), true),
        Some(_) => sockets::listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), true).or_else(|error| {
            // A kernel without IPv6.
            match error.raw_os_error() {
                Some(libc::EADDRINUSE | libc::EACCES) => Err(error),
                _ => sockets::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), true),
            }
        }),
    };
    let began = Instant::now();
    loop {
        match bind() {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && began.elapsed() < PORT_TAKEN.min(terms.start) => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(error) => {
                let holder = listener::of(Path::new("/"), port);
                let who = match (holder.process, holder.user) {
                    (Some((pid, name)), Some(user)) => format!(" by {name} (process {pid}) of user {user}"),
                    (_, Some(user)) => format!(" by a process of user {user}"),
                    _ => String::new(),
                };
                let cure = match error.kind() {
                    io::ErrorKind::AddrInUse => "end it, or set MASTER_PORT (srun --palingenesis=port=PORT) to another",
                    _ => "set MASTER_PORT (srun --palingenesis=port=PORT) to one from 1024 to 65535",
                };
                let why =
                    format!("rank 0 on {} cannot listen at port {port}: {error}{who}; {cure}", printable(&terms.host));
                return Err(stopped(&why, error.kind() == io::ErrorKind::AddrInUse));
            }
        }
    }
}

/// Waits for all ranks.
///
/// # Errors
/// See [`super::Control::join`]. Those that are here are told the same.
pub fn gather(terms: &Terms, data_port: u16, shared: &Arc<Shared>) -> Result<(Server, Vec<Peer>), CommError> {
    let mut server = Server::new(terms, data_port, shared)?;
    let mut tell = TELL;
    loop {
        server.turn();
        if let Some(error) = shared.broken() {
            server.linger(LATE.min(terms.start.saturating_sub(server.clock.ran())));
            return Err(error);
        }
        let absent: Vec<u32> =
            (0..terms.world_size).zip(&server.members).filter(|(_, m)| m.is_none()).map(|(r, _)| r).collect();
        if absent.is_empty() {
            let peers = server.welcome();
            return Ok((server, peers));
        }
        let waited = server.clock.ran();
        let (count, world) = (absent.len(), terms.world_size);
        let who = format!("rank{} {} of {world}", s(count), ranks(absent));
        if waited >= terms.start {
            let keyless = match terms.key {
                Some(_) => "",
                None => " (without a store key only those of this host can)",
            };
            let why = format!(
                "{who} {} not come to rank 0 on {} at {} within {} s{}; see in srun's output whether they have started, \
                 and whether their hosts reach that port{keyless}",
                if count == 1 { "has" } else { "have" },
                printable(&terms.host),
                terms.master(),
                terms.start.as_secs(),
                server.turned_away.text(),
            );
            server.stop(why, true);
        } else if waited >= tell {
            let away = server.turned_away.text();
            to_stderr(&format!("palingenesis-worker: waiting for {who}, {} s{away}\n", waited.as_secs()));
            tell += tell.min(TELL_MAX);
        }
    }
}

/// Waits for the other ranks only to tell them why there is no training. Where nobody can
/// come nobody is told.
pub fn refuse(terms: &Terms, why: &str) {
    let Ok(shared) = Shared::new(0).map(Arc::new) else { return };
    let Ok(mut server) = Server::new(terms, 0, &shared) else { return };
    server.stop(format!("rank 0 on {} has ended: {why}", printable(&terms.host)), false);
    server.linger(terms.start);
}

impl Server {
    fn new(terms: &Terms, data_port: u16, shared: &Arc<Shared>) -> Result<Server, CommError> {
        let listener = listen(terms)?;
        let many = sockets::Many::new().map_err(own("wait for connections"))?;
        many.add(listener.as_fd(), LISTENER).map_err(own("wait for connections"))?;
        many.add(shared.wake.0.as_fd(), WAKE).map_err(own("wait for connections"))?;
        let world = terms.world_size as usize;
        let wanted = (2 * world + STRANGERS + OTHER_FILES) as u64;
        if limits::limit(Resource::OpenFiles).is_some_and(|(soft, _)| soft < wanted) {
            let _ = limits::set_open_files(wanted);
        }
        let (soft, _) = limits::limit(Resource::OpenFiles).unwrap_or((1024, 1024));
        let room = usize::try_from(soft).unwrap_or(usize::MAX).saturating_sub(world + OTHER_FILES);
        let mut members: Vec<Option<Member>> = Vec::new();
        members.resize_with(world, || None);
        members[0] = Some(Member {
            seat: Seat { host: terms.host.clone(), ip: None, port: data_port },
            ip: Ipv4Addr::LOCALHOST.into(),
            at: At::default(),
            connected: false,
        });
        Ok(Server {
            shared: Arc::clone(shared),
            key: terms.key.clone(),
            host: terms.host.clone(),
            silence: terms.silence,
            listener: Some(listener),
            many,
            deaf: None,
            connections: HashMap::new(),
            next: 0,
            strangers: VecDeque::new(),
            strangers_max: (world + STRANGERS).min(room).max(16),
            turned_away: TurnedAway::default(),
            members,
            running: false,
            gone: Vec::new(),
            last: None,
            clock: Clock::new(),
            beat: Instant::now(),
            tokens: Vec::new(),
        })
    }

    /// Until this rank ends.
    pub fn run(mut self) {
        let mut end = None;
        loop {
            self.turn();
            let Some(ending) = self.shared.ending() else { continue };
            let broken = self.shared.broken().is_some();
            match ending {
                // Also where this rank saw it elsewhere than here.
                Ending::Failed(why) if self.last.is_none() => {
                    self.gone.push(Gone { rank: 0, why, said: true });
                    self.judge();
                    break;
                }
                _ if broken => break,
                // The others see it by the connections.
                Ending::Dropped | Ending::Failed(_) => return,
                Ending::Orderly => {
                    let end = *end.get_or_insert_with(|| Instant::now() + self.silence);
                    let all_done = self.members.iter().flatten().all(|member| !member.connected);
                    if all_done || Instant::now() >= end {
                        self.tell(&Message::Bye(None));
                        break;
                    }
                }
            }
        }
        self.part();
    }

    /// Hears and says what there is to hear and to say; waits for it a tick.
    fn turn(&mut self) {
        sockets::wait(&[(self.many.fd(), false)], TICK);
        let now = Instant::now();
        if let Some(gap) = self.clock.look() {
            self.connections.values_mut().filter_map(Connection::link).for_each(|link| link.heard += gap);
        }
        if self.deaf.is_some_and(|until| until <= now) {
            self.deaf = None;
            self.hear_listener(true);
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        self.many.ready(&mut tokens);
        for token in &tokens {
            match *token {
                LISTENER => self.accept(now),
                WAKE => self.shared.awake(),
                token => self.hear(token, now),
            }
        }
        self.tokens = tokens;
        self.expire(now);
        if now.saturating_duration_since(self.beat) >= BEAT {
            self.beat = now;
            self.send_beats();
        }
        let mut silent = Vec::new();
        for connection in self.connections.values_mut() {
            if let Connection::Member { rank, link } = connection {
                link.flush();
                if link.silent() > self.silence {
                    silent.push(*rank);
                }
            }
        }
        silent.sort_unstable();
        let why = format!("nothing was heard of it for {} s", self.silence.as_secs());
        self.gone.extend(silent.into_iter().map(|rank| Gone { rank, why: why.clone(), said: false }));
        self.judge();
    }

    /// Of those that are gone since the last look, a killed one comes before one that ends
    /// because of it.
    fn judge(&mut self) {
        let gone = std::mem::take(&mut self.gone);
        let Some(first) = gone.iter().find(|gone| !gone.said).or(gone.first()) else { return };
        if self.last.is_some() {
            return;
        }
        let Some(Some(member)) = self.members.get(first.rank as usize) else { return };
        let at = match self.running {
            true => member.at.text(),
            false => "the start".to_owned(),
        };
        let verdict = Verdict {
            rank: first.rank,
            host: member.seat.host.clone(),
            why: first.why.clone(),
            at: (!first.said).then_some(at),
        };
        self.tell_for_good(Message::Verdict(verdict.clone()));
        self.shared.break_off(verdict.error());
    }

    /// No training.
    fn stop(&mut self, why: String, again: bool) {
        let error = stopped(&why, again);
        self.tell_for_good(Message::Stop { why, again });
        self.shared.break_off(error);
    }

    /// Until those that have not come have been told, too: they would look for rank 0 for as
    /// long as they may.
    fn linger(&mut self, limit: Duration) {
        let until = self.clock.ran() + limit;
        while self.members.iter().any(Option::is_none) && self.clock.ran() < until {
            self.turn();
        }
        self.part();
    }

    /// All ranks are told, and those that come later.
    fn tell_for_good(&mut self, message: Message) {
        self.tell(&message);
        self.last = Some(message);
    }

    /// All ranks are told.
    fn tell(&mut self, message: &Message) {
        for connection in self.connections.values_mut() {
            if let Connection::Member { link, .. } = connection {
                link.send(message);
            }
        }
    }

    /// All are here: everybody is told where everybody is.
    fn welcome(&mut self) -> Vec<Peer> {
        self.running = true;
        let seats: Vec<Seat> = self.members.iter().flatten().map(|member| member.seat.clone()).collect();
        self.tell(&Message::Welcome(seats));
        let members = (0..).zip(self.members.iter().flatten());
        let peer = |(rank, member): (u32, &Member)| Peer {
            rank,
            host: member.seat.host.clone(),
            address: SocketAddr::new(member.ip, member.seat.port),
        };
        members.map(peer).collect()
    }

    fn send_beats(&mut self) {
        if let Some(Some(own)) = self.members.first_mut() {
            own.at = self.shared.at();
        }
        let mut behind: Vec<(u32, At)> =
            (0..).zip(self.members.iter().flatten()).map(|(rank, member)| (rank, member.at.clone())).collect();
        behind.sort_by_key(|(rank, at)| (at.sequence, at.inside, *rank));
        let own = behind.iter().find(|(rank, _)| *rank == 0).cloned();
        behind.truncate(BEHIND);
        // When rank 0 is gone, nobody else can say what it was at.
        if let Some(own) = own.filter(|own| !behind.contains(own)) {
            behind.push(own);
        }
        let message = Message::Beats(if self.running { behind.clone() } else { Vec::new() });
        for connection in self.connections.values_mut() {
            // Who does not read gets no more than it has not read.
            if let Connection::Member { link, .. } = connection
                && !link.writes()
            {
                link.send(&message);
            }
        }
        *lock(&self.shared.behind) = behind;
    }

    /// The last words arrive, and then the connections close.
    fn part(&mut self) {
        self.listener = None;
        self.connections.retain(|_, connection| connection.link().is_some());
        let until = Instant::now() + PARTING;
        let mut scratch = Vec::new();
        while !self.connections.is_empty() && Instant::now() < until {
            self.connections.retain(|_, connection| {
                let Some(link) = connection.link() else { return false };
                link.flush();
                if !link.writes() {
                    link.close();
                }
                scratch.clear();
                link.receive(&mut scratch).is_none()
            });
            sockets::wait(&[(self.many.fd(), false)], Duration::from_millis(20));
        }
    }

    fn hear_listener(&self, hear: bool) {
        if let Some(listener) = &self.listener {
            let _ = self.many.reading(listener.as_fd(), LISTENER, hear);
        }
    }

    fn accept(&mut self, now: Instant) {
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
                        self.deaf = Some(now + TICK);
                        self.hear_listener(false);
                        return;
                    }
                }
            }
        }
    }

    fn greet(&mut self, stream: TcpStream, now: Instant) {
        let Ok(random) = random::bytes() else { return sockets::reset(stream) };
        let greeting = wire::greeting(self.key.is_some(), &random);
        let _ = stream.set_nodelay(true);
        // A fresh socket takes so little at once.
        let greeted = stream.set_nonblocking(true).is_ok() && matches!((&stream).write(&greeting), Ok(GREETING));
        while self.strangers.len() >= self.strangers_max {
            self.drop_first();
        }
        let token = self.next;
        if !greeted || self.many.add(stream.as_fd(), token).is_err() {
            return sockets::reset(stream);
        }
        self.next += 1;
        self.strangers.push_back((token, now));
        let stranger = Connection::Stranger { stream, greeting: Box::new(greeting), heard: Vec::new() };
        self.connections.insert(token, stranger);
    }

    /// Whether one was dropped to make room.
    fn drop_oldest(&mut self) -> bool {
        while !self.strangers.is_empty() {
            if self.drop_first() {
                return true;
            }
        }
        false
    }

    /// Whether the first of the list was a stranger still.
    fn drop_first(&mut self) -> bool {
        let first = self.strangers.pop_front().and_then(|(token, _)| self.take_stranger(token));
        let Some(Connection::Stranger { stream, .. }) = first else { return false };
        sockets::reset(stream);
        true
    }

    fn take_stranger(&mut self, token: u64) -> Option<Connection> {
        match self.connections.get(&token) {
            Some(Connection::Stranger { .. }) => self.connections.remove(&token),
            _ => None,
        }
    }

    /// Drops those that took too long.
    fn expire(&mut self, now: Instant) {
        while let Some((token, since)) = self.strangers.front().copied() {
            let is_stranger = matches!(self.connections.get(&token), Some(Connection::Stranger { .. }));
            if is_stranger && now.saturating_duration_since(since) < AUTHENTICATION {
                break;
            }
            self.strangers.pop_front();
            if let Some(Connection::Stranger { stream, heard, .. }) = self.take_stranger(token) {
                let silent = heard.is_empty();
                self.turned_away.note(&stream, if silent { "it said nothing" } else { "it did not finish its reply" });
                sockets::reset(stream);
            }
        }
        self.connections
            .retain(|_, connection| !matches!(connection, Connection::Leaving { until, .. } if *until <= now));
    }

    /// Hears one connection, which is kept unless it is over.
    fn hear(&mut self, token: u64, now: Instant) {
        let kept = match self.connections.remove(&token) {
            None => None,
            Some(Connection::Stranger { stream, greeting, heard }) => self.hear_stranger(stream, greeting, heard, now),
            Some(Connection::Member { rank, link }) => self.hear_member(rank, link, now),
            Some(Connection::Leaving { mut link, until }) => {
                link.receive(&mut Vec::new()).is_none().then_some(Connection::Leaving { link, until })
            }
        };
        if let Some(connection) = kept {
            self.connections.insert(token, connection);
        }
    }

    fn hear_stranger(
        &mut self,
        mut stream: TcpStream,
        greeting: Box<[u8; GREETING]>,
        mut heard: Vec<u8>,
        now: Instant,
    ) -> Option<Connection> {
        let mut buffer = [0; REPLY_MAX + 1];
        let room = buffer.len() - heard.len();
        let failed = match stream.read(&mut buffer[..room]) {
            Ok(0) => Some("it closed the connection before it had shown the key"),
            Ok(read) => {
                heard.extend_from_slice(&buffer[..read]);
                None
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => None,
            Err(_) => Some("it closed the connection before it had shown the key"),
        };
        let read = match failed {
            Some(why) => Err(why.to_owned()),
            None => match wire::read_reply(self.key.as_ref(), &greeting, &heard) {
                Ok(None) => return Some(Connection::Stranger { stream, greeting, heard }),
                Ok(Some(replied)) if self.key.is_some() => Ok(replied),
                Ok(Some(replied)) => is_own(&stream).map(|()| replied),
                Err(wire::Broken::Key) => Err("it does not know this launch's store key".to_owned()),
                Err(wire::Broken::Foreign) => Err("it is no palingenesis-worker".to_owned()),
            },
        };
        let (version, hello) = match read {
            Ok(replied) => replied,
            Err(why) => {
                self.turned_away.note(&stream, &why);
                sockets::reset(stream);
                return None;
            }
        };
        let Ok(ip) = stream.peer_addr().map(|from| from.ip().to_canonical()) else { return None };
        let mut link = Link::new(stream, Session::new(self.key.as_ref(), Side::Server, &greeting, &heard));
        link.push(&wire::proof(self.key.as_ref(), &greeting, &heard));
        match self.admit(version, hello, ip) {
            Ok(rank) => {
                if let Some(last) = &self.last {
                    link.send(last);
                }
                Some(Connection::Member { rank, link })
            }
            Err(why) => {
                link.send(&Message::Stop { why: why.clone(), again: false });
                link.close();
                // Training that runs is not ended by who comes too late.
                if !self.running && self.shared.broken().is_none() {
                    self.stop(why, false);
                }
                Some(Connection::Leaving { link, until: now + AUTHENTICATION })
            }
        }
    }

    /// Takes a rank of this launch, or says why its launch is wrong.
    fn admit(&mut self, version: u16, hello: Option<Hello>, ip: IpAddr) -> Result<u32, String> {
        let host = printable(&self.host);
        let hello = match hello {
            Some(hello) if version == VERSION && hello.release == RELEASE => hello,
            other => {
                let (who, release) = match &other {
                    Some(hello) => (format!("rank {} on {}", hello.rank, printable(&hello.host)), &*hello.release),
                    None => (format!("a rank on {ip}"), "another version"),
                };
                return Err(format!(
                    "{who} runs palingenesis-worker {} (protocol {version}), rank 0 on {host} {RELEASE} (protocol {VERSION}); \
                     install the same one on all nodes",
                    printable(release)
                ));
            }
        };
        let (rank, world, there) = (hello.rank, self.members.len(), printable(&hello.host));
        if hello.world_size as usize != world {
            return Err(format!(
                "rank {rank} on {there} has WORLD_SIZE={}, rank 0 on {host} has WORLD_SIZE={world}; start all ranks with one \
                 srun, and set neither by hand",
                hello.world_size
            ));
        }
        match self.members.get_mut(rank as usize) {
            None => Err(format!("RANK={rank} on {there} is not below WORLD_SIZE={world}")),
            Some(Some(other)) => Err(format!(
                "rank {rank} is there twice: on {} and on {there}; each process needs a RANK of its own: start all with \
                 one srun, and set RANK not by hand",
                printable(&other.seat.host)
            )),
            Some(free) => {
                // Another host would look for it at its own loopback.
                let seen = (!ip.is_loopback()).then_some(ip);
                let seat = Seat { host: hello.host, ip: seen, port: hello.port };
                *free = Some(Member { seat, ip, at: At::default(), connected: true });
                Ok(rank)
            }
        }
    }

    fn hear_member(&mut self, rank: u32, mut link: Link, now: Instant) -> Option<Connection> {
        let mut messages = Vec::new();
        let mut end = link.receive(&mut messages);
        for message in messages {
            match message {
                Message::Beat(at) => {
                    if let Some(Some(member)) = self.members.get_mut(rank as usize) {
                        member.at = at;
                    }
                }
                Message::Bye(why) => {
                    if let Some(why) = why.or((!self.running).then(|| "it left before all ranks had come".to_owned())) {
                        self.gone.push(Gone { rank, why, said: true });
                    }
                    self.forget(rank);
                    link.send(&Message::Bye(None));
                    link.close();
                    return Some(Connection::Leaving { link, until: now + AUTHENTICATION });
                }
                _ => end = Some("its connection carried what no rank sends".to_owned()),
            }
        }
        let Some(why) = end else { return Some(Connection::Member { rank, link }) };
        self.gone.push(Gone { rank, why, said: false });
        self.forget(rank);
        None
    }

    /// It has no connection any more.
    fn forget(&mut self, rank: u32) {
        if let Some(Some(member)) = self.members.get_mut(rank as usize) {
            member.connected = false;
        }
    }
}
