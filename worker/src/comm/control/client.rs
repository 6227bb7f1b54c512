//! The side of every rank but 0: looks for rank 0 until it answers, shows that it belongs
//! here, and stays.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use palingenesis::config::printable;
use palingenesis::system::{random, sockets};

use super::key::{is_here, is_own, no_key};
use super::link::Link;
use super::server::RELEASE;
use super::wire::{self, GREETING, Hello, Message, Seat, Session, Side, Verdict};
use super::{BEAT, Clock, Ending, PARTING, Peer, Shared, TICK, Terms, lock};
use crate::comm::CommError;

/// When a connection that was begun is begun anew: the kernel itself asks again after 1, 3,
/// 7, 15 seconds, too seldom for a host that comes up.
const BEGIN: Duration = Duration::from_secs(4);

/// How long who listens may take for his first words.
const GREETED: Duration = Duration::from_secs(10);

/// How long nothing but strangers is put up with at rank 0's port: none of them will make
/// room for it.
const HOPE: Duration = Duration::from_secs(30);

/// Less time than an attempt should have.
const CURTAILED: Duration = Duration::from_secs(1);

/// Why an attempt did not lead to rank 0.
enum Fault {
    /// Nobody is there yet, or no way leads there.
    Absent(String),
    /// Somebody is, who does not know this launch.
    Stranger(String),
}

/// A rank that has joined; its thread's state.
pub struct Client {
    shared: Arc<Shared>,
    link: Link,
    /// Rank 0's.
    host: String,
    silence: Duration,
    clock: Clock,
    /// All have come.
    running: bool,
    place: Place,
    welcome: Option<Vec<Seat>>,
    /// Rank 0 has said goodbye.
    over: bool,
}

/// What this rank was at, when looked last, and when it was told.
#[derive(Default)]
struct Place {
    seen: super::Place,
    told: super::Place,
}

/// Joins, and waits until all have.
///
/// # Errors
/// See [`super::Control::join`].
pub fn join(terms: &Terms, data_port: u16, shared: &Arc<Shared>) -> Result<(Client, Vec<Peer>), CommError> {
    let link = search(terms, data_port)?;
    let reached = link.stream.peer_addr().map(|to| to.ip().to_canonical()).unwrap_or(Ipv4Addr::LOCALHOST.into());
    let mut client = Client {
        shared: Arc::clone(shared),
        link,
        host: terms.master.0.clone(),
        silence: terms.silence,
        clock: Clock::new(),
        running: false,
        place: Place::default(),
        welcome: None,
        over: false,
    };
    // Rank 0 is there and decides how long the others are waited for.
    let seats = loop {
        client.turn();
        if let Some(error) = shared.broken() {
            return Err(error);
        }
        if client.over {
            return Err(CommError::Start(format!("rank 0 at {} has ended before all ranks had come", terms.master())));
        }
        if let Some(seats) = client.welcome.take() {
            break seats;
        }
    };
    if seats.len() != terms.world_size as usize {
        return Err(CommError::Start(format!(
            "rank 0 at {} tells of {} ranks, not of {}",
            terms.master(),
            seats.len(),
            terms.world_size
        )));
    }
    client.running = true;
    if let Some(first) = seats.first() {
        client.host.clone_from(&first.host);
    }
    let peer = |(rank, seat): (u32, Seat)| Peer {
        rank,
        host: seat.host,
        address: SocketAddr::new(seat.ip.unwrap_or(reached), seat.port),
    };
    Ok((client, (0..).zip(seats).map(peer).collect()))
}

/// Comes only to say why it will not stay. Where rank 0 is not found nobody can be told.
pub fn refuse(terms: &Terms, why: &str) {
    if let Ok(mut link) = search(terms, 0) {
        say_goodbye(&mut link, Some(why.to_owned()));
    }
}

/// Looks for rank 0 at all addresses of its name until it is found.
fn search(terms: &Terms, data_port: u16) -> Result<Link, CommError> {
    let mut clock = Clock::new();
    // Since when there is nobody but strangers.
    let mut strangers: Option<Duration> = None;
    let mut attempt: u32 = 0;
    let mut addresses: Vec<IpAddr> = Vec::new();
    let mut last: Option<Fault> = None;
    loop {
        let left = terms.start.saturating_sub(clock.ran());
        let fault = match find_addresses(&mut addresses, terms, &mut clock) {
            Err(fault) => fault,
            Ok(()) => {
                let ip = addresses[attempt as usize % addresses.len()];
                let ip = if terms.key.is_some() {
                    ip
                } else if addresses.iter().any(|ip| is_here(*ip)) {
                    Ipv4Addr::LOCALHOST.into()
                } else {
                    let host = printable(&terms.host);
                    return Err(no_key(&format!("rank {} on {host} and rank 0 at {}", terms.rank, terms.master())));
                };
                match reach(terms, data_port, SocketAddr::new(ip, terms.master.1), &mut clock) {
                    Ok(link) => return Ok(link),
                    Err(fault) => fault,
                }
            }
        };
        let waited = clock.ran();
        // One that the deadline cut short tells less than the one before it.
        let fault = match last.take() {
            Some(before) if left < CURTAILED => before,
            _ => fault,
        };
        strangers = match fault {
            Fault::Absent(_) => None,
            Fault::Stranger(_) => strangers.or(Some(waited)),
        };
        if waited >= terms.start || strangers.is_some_and(|since| waited.saturating_sub(since) >= HOPE) {
            return Err(not_reached(terms, &fault, waited));
        }
        last = Some(fault);
        attempt = attempt.wrapping_add(1);
        std::thread::sleep(until_retry(waited, terms.rank, attempt).min(terms.start.saturating_sub(waited)));
        clock.look();
    }
}

fn not_reached(terms: &Terms, fault: &Fault, waited: Duration) -> CommError {
    let (rank, host, master, seconds) = (terms.rank, printable(&terms.host), terms.master(), waited.as_secs());
    CommError::Start(match fault {
        Fault::Absent(why) => format!(
            "rank {rank} on {host} has not reached rank 0 at {master} within {seconds} s: {why}; see whether rank 0 has \
             started, whether MASTER_ADDR and MASTER_PORT are its, and whether a firewall is between"
        ),
        Fault::Stranger(why) => format!(
            "rank {rank} on {host} does not find rank 0 at {master}, but somebody else: {why}; use another port \
             (srun --palingenesis=port=PORT, or MASTER_PORT), or the same store key on all nodes"
        ),
    })
}

/// How long to wait before the next attempt: an eighth of the time waited so far, so that
/// rank 0 that comes late costs little more than it is late; spread by rank, so that they
/// do not come all at once.
fn until_retry(waited: Duration, rank: u32, attempt: u32) -> Duration {
    let pause = (waited / 8).clamp(Duration::from_millis(5), Duration::from_secs(1));
    // Three quarters to five quarters of it: Knuth's multiplicative hash.
    let spread = rank.wrapping_mul(31).wrapping_add(attempt).wrapping_mul(2_654_435_761) >> 24;
    pause * (384 + spread) / 512
}

/// Resolves rank 0's host once. A resolver has no deadline of its own: one that does not
/// come back is left to its thread.
fn find_addresses(addresses: &mut Vec<IpAddr>, terms: &Terms, clock: &mut Clock) -> Result<(), Fault> {
    if !addresses.is_empty() {
        return Ok(());
    }
    let (sender, receiver) = mpsc::channel();
    let master = terms.master.clone();
    let name = printable(&master.0);
    let resolve = move || drop(sender.send(master.to_socket_addrs().map(|found| found.map(|to| to.ip()).collect())));
    let failed = |why: String| Fault::Absent(format!("the name {name} is not resolved: {why}"));
    std::thread::Builder::new()
        .name("resolver".to_owned())
        .spawn(resolve)
        .map_err(|error| failed(format!("no thread: {error}")))?;
    let found: io::Result<Vec<IpAddr>> = loop {
        match receiver.recv_timeout(TICK) {
            Ok(found) => break found,
            Err(_) if clock.ran() >= terms.start => return Err(failed("the resolver does not answer".to_owned())),
            Err(_) => clock.look(),
        };
    };
    *addresses = found.map_err(|error| failed(error.to_string()))?;
    if addresses.is_empty() { Err(failed("it has no address".to_owned())) } else { Ok(()) }
}

/// Waits for bytes until there are as many as wanted, or the clock says `end`.
fn read_whole(
    stream: &mut TcpStream,
    length: usize,
    clock: &mut Clock,
    end: Duration,
    right: impl Fn(&[u8]) -> bool,
) -> Result<Vec<u8>, String> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 64]);
    while bytes.len() < length {
        clock.look();
        let left = end.saturating_sub(clock.ran());
        if left.is_zero() {
            return Err("it says nothing".to_owned());
        }
        sockets::wait(&[(stream.as_fd(), false)], left.min(TICK));
        let room = (length - bytes.len()).min(buffer.len());
        match stream.read(&mut buffer[..room]) {
            Ok(0) => return Err("it closed the connection".to_owned()),
            // By a kernel that had more to read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err("it closed the connection".to_owned());
            }
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error.to_string()),
        }
        if !right(&bytes) {
            return Err("it is no palingenesis-worker".to_owned());
        }
    }
    Ok(bytes)
}

/// One attempt: connects, and shows who this is.
fn reach(terms: &Terms, data_port: u16, to: SocketAddr, clock: &mut Clock) -> Result<Link, Fault> {
    let absent = |error: io::Error| Fault::Absent(format!("{}: {error}", to.ip()));
    let stranger = |why: String| Fault::Stranger(format!("{}: {why}", to.ip()));
    let mut stream = sockets::connect(to).map_err(absent)?;
    let end = (clock.ran() + BEGIN).min(terms.start);
    loop {
        sockets::wait(&[(stream.as_fd(), true)], TICK);
        clock.look();
        if let Some(error) = stream.take_error().map_err(absent)? {
            return Err(absent(error));
        }
        if stream.peer_addr().is_ok() {
            break;
        }
        if clock.ran() >= end {
            return Err(Fault::Absent(format!("{} does not answer", to.ip())));
        }
    }
    // The kernel may connect a socket to itself where nobody listens at a port that it
    // chose for it (RFC 9293, 3.5, simultaneous open).
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(Fault::Absent(format!("{}: nobody listens", to.ip())));
    }
    let _ = stream.set_nodelay(true);
    let key = terms.key.as_ref();
    let end = (clock.ran() + GREETED).min(terms.start);
    let bytes = read_whole(&mut stream, GREETING, clock, end, wire::greets).map_err(stranger)?;
    let greeting = <[u8; GREETING]>::try_from(bytes).map_err(|_| stranger("it says something else".to_owned()))?;
    match (wire::is_keyed(&greeting), key) {
        (true, None) => return Err(stranger("it has a store key, this rank has none".to_owned())),
        (false, Some(_)) => return Err(stranger("it has no store key, this rank has one".to_owned())),
        (false, None) => is_own(&stream).map_err(stranger)?,
        (true, Some(_)) => {}
    }
    prove(terms, data_port, stream, &greeting, clock).map_err(stranger)
}

/// Shows that this rank has the key, and sees that the other has it.
fn prove(
    terms: &Terms,
    data_port: u16,
    mut stream: TcpStream,
    greeting: &[u8; GREETING],
    clock: &mut Clock,
) -> Result<Link, String> {
    let key = terms.key.as_ref();
    let hello = Hello {
        rank: terms.rank,
        world_size: terms.world_size,
        host: terms.host.chars().take(253).collect(),
        port: data_port,
        release: RELEASE.to_owned(),
    };
    let random = random::bytes().map_err(|error| format!("no random numbers: {error}"))?;
    let reply = wire::reply(key, greeting, &hello, &random).ok_or("this host's name is too long")?;
    stream.write_all(&reply).map_err(|error| error.to_string())?;
    // Once it was taken rank 0 would count this rank as gone if it gave up.
    let proof = read_whole(&mut stream, wire::proof_length(key), clock, terms.start, |_| true)
        .map_err(|why| format!("{why} when it was shown this rank's store key, so its own is probably another"))?;
    if !wire::proves(key, greeting, &reply, &proof) {
        return Err("it does not know this launch's store key".to_owned());
    }
    Ok(Link::new(stream, Session::new(key, Side::Client, greeting, &reply)))
}

impl Client {
    /// Until this rank ends.
    pub fn run(mut self) {
        loop {
            self.turn();
            match self.shared.ending() {
                None => {}
                // The others see it by the connection.
                Some(Ending::Dropped) => return,
                Some(Ending::Orderly) => return self.part(None),
                Some(Ending::Failed(why)) => return self.part(Some(why)),
            }
        }
    }

    /// Hears and says what there is to hear and to say; waits for it a tick.
    fn turn(&mut self) {
        if self.over || self.shared.broken().is_some() {
            // Nothing more will come: only this rank's own end is waited for.
            sockets::wait(&[(self.shared.wake.0.as_fd(), false)], TICK);
            return;
        }
        sockets::wait(&[(self.link.stream.as_fd(), false), (self.shared.wake.0.as_fd(), false)], TICK);
        if let Some(gap) = self.clock.look() {
            self.link.heard += gap;
        }
        let mut messages = Vec::new();
        let end = self.link.receive(&mut messages);
        for message in messages {
            self.hear(message);
        }
        if let Some(why) = end {
            if !self.over {
                self.lost(why);
            }
            return;
        }
        if self.link.silent() > self.silence {
            let why = format!("nothing was heard of it for {} s", self.silence.as_secs());
            self.link.send(&Message::Bye(Some(format!("rank 0 is gone: {why}"))));
            return self.lost(why);
        }
        self.beat();
        self.link.flush();
    }

    /// Rank 0 is gone.
    fn lost(&mut self, why: String) {
        let at = lock(&self.shared.behind).iter().find(|(rank, _)| *rank == 0).map(|(_, at)| at.text());
        let at = at.filter(|_| self.running).unwrap_or_else(|| "the start".to_owned());
        self.shared.break_off(Verdict { rank: 0, host: self.host.clone(), why, at: Some(at) }.error());
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Beats(behind) => *lock(&self.shared.behind) = behind,
            Message::Welcome(seats) => self.welcome = Some(seats),
            Message::Verdict(verdict) => self.shared.break_off(verdict.error()),
            Message::Stop { why, again } => self.shared.break_off(super::stopped(&why, again)),
            Message::Bye(_) => self.over = true,
            Message::Beat(_) => {}
        }
    }

    /// Every second, and soon when this rank stays in one place: where a rank hangs or dies
    /// is known then.
    fn beat(&mut self) {
        let now = self.shared.place();
        let stays = now == self.place.seen && now != self.place.told;
        self.place.seen = now;
        if self.link.said.elapsed() >= BEAT || stays {
            self.place.told = now;
            // Who does not read gets no more than it has not read.
            if !self.link.writes() {
                self.link.send(&Message::Beat(self.shared.at()));
            }
        }
    }

    fn part(mut self, why: Option<String>) {
        say_goodbye(&mut self.link, why);
    }
}

/// And waits until rank 0 has heard it.
fn say_goodbye(link: &mut Link, why: Option<String>) {
    link.send(&Message::Bye(why));
    link.close();
    let until = Instant::now() + PARTING;
    let mut messages = Vec::new();
    while link.receive(&mut messages).is_none() && Instant::now() < until {
        messages.clear();
        sockets::wait(&[(link.stream.as_fd(), false)], Duration::from_millis(50));
    }
}
