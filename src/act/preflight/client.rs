//! A node that is not rank 0's: looks for rank 0's node, joins it, and answers until it is
//! told the end.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::link::{Link, READING};
use super::pace::{Clock, OwnRanks, Task, until_retry};
use super::wire::{self, Channel, GREETING, Message, REPLY, Side};
use super::{Attempt, DEAD, Leader, MUTE, Outcome, PING, Terms, Unreachable, farewell, too_long};
use crate::act::key::{LENGTH, Tag};
use crate::system::{random, sockets};

/// Whoever answers nothing for this long is taken for silent, or for a stranger, and the
/// next port is tried. The connection is kept meanwhile: rank 0's node may be slow.
const SOON: Duration = Duration::from_secs(1);

/// When a connection that was begun is begun anew: the kernel itself asks again after 1, 3,
/// 7, 15 seconds, too seldom for a node that comes up.
const BEGIN: Duration = Duration::from_secs(4);

/// When one that says nothing of what it should is given up and begun anew.
const ANSWER: Duration = Duration::from_secs(10);

/// How long nothing but silence, "no route" and strangers is put up with. The node of rank 0
/// is up, for Slurm has started the step there, and where only the program is not there yet
/// its kernel refuses. So silence is a firewall or another host, and waiting does not help; a
/// stranger on every port is none that will make room for rank 0.
const HOPE: Duration = Duration::from_secs(30);

/// Addresses and ports that are tried, at most.
const WAYS: usize = 64;

/// How long the end of a connection is waited for by a node that has said its last word.
const PARTING: Duration = Duration::from_secs(1);

/// Joins the others and stays until the end.
pub fn meet(terms: &Terms, leader: &mut dyn Leader) -> Outcome {
    let mut clock = Clock::new();
    let mut own = OwnRanks::new(clock.now());
    match Search::new(terms, clock.now()).run(&mut clock, &mut own, leader) {
        Ok(link) => stay(terms, link, &mut clock, &mut own, leader),
        Err(outcome) => outcome,
    }
}

/// How far a way is.
enum State {
    /// Tried again then.
    Idle(Instant),
    /// Not known whether somebody listens.
    Begun(TcpStream),
    /// Somebody does: the greeting, as far as it came.
    Greeting(TcpStream, Vec<u8>),
    /// Replied: the proof, as far as it came.
    Proof(TcpStream, Vec<u8>, Box<([u8; GREETING], [u8; REPLY])>),
}

/// One address and port.
struct Way {
    to: SocketAddr,
    state: State,
    /// Since when the state is.
    since: Instant,
    from: Option<IpAddr>,
    /// How the last attempt failed, or how the present one looks.
    fault: Option<Unreachable>,
    attempts: u32,
}

/// What became of a way that had something to say.
enum Step {
    /// Nothing new.
    On,
    /// It leads nowhere now.
    Failed(Unreachable),
    /// It is rank 0's node.
    Met(TcpStream, Channel),
}

fn unreachable(error: &io::Error) -> Unreachable {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Unreachable::Refused,
        Some(libc::ETIMEDOUT) => Unreachable::Silent,
        Some(number @ (libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EHOSTDOWN | libc::ENETDOWN)) => {
            Unreachable::NoRoute(number)
        }
        number => Unreachable::Other(number.unwrap_or(0)),
    }
}

impl Way {
    /// Begins to connect.
    fn begin(&mut self, now: Instant) -> Step {
        self.attempts = self.attempts.wrapping_add(1);
        self.since = now;
        match sockets::connect(self.to) {
            Ok(stream) => {
                // The kernel has chosen where from.
                self.from = stream.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_unspecified());
                self.state = State::Begun(stream);
                Step::On
            }
            Err(error) => {
                self.from = sockets::source(self.to);
                Step::Failed(unreachable(&error))
            }
        }
    }

    /// What the clock says of it.
    fn look(&mut self, now: Instant) -> Step {
        let waited = now.saturating_duration_since(self.since);
        match &self.state {
            State::Idle(_) => {}
            State::Begun(_) => {
                if waited >= SOON {
                    self.fault = Some(Unreachable::Silent);
                }
                if waited >= BEGIN {
                    return Step::Failed(Unreachable::Silent);
                }
            }
            State::Greeting(..) | State::Proof(..) => {
                if waited >= SOON {
                    self.fault = Some(Unreachable::Stranger);
                }
                if waited >= ANSWER {
                    return Step::Failed(Unreachable::Stranger);
                }
            }
        }
        Step::On
    }

    /// Goes on as far as it can; its socket has something.
    fn advance(&mut self, terms: &Terms, now: Instant) -> Step {
        loop {
            match std::mem::replace(&mut self.state, State::Idle(now)) {
                idle @ State::Idle(_) => {
                    self.state = idle;
                    return Step::On;
                }
                State::Begun(stream) => {
                    match stream.take_error() {
                        Ok(Some(error)) | Err(error) => return Step::Failed(unreachable(&error)),
                        Ok(None) => {}
                    }
                    if stream.peer_addr().is_err() {
                        self.state = State::Begun(stream);
                        return Step::On;
                    }
                    let _ = stream.set_nodelay(true);
                    self.since = now;
                    self.state = State::Greeting(stream, Vec::new());
                }
                State::Greeting(stream, mut heard) => match read(&stream, &mut heard, GREETING, wire::greets) {
                    Bytes::Part => {
                        self.state = State::Greeting(stream, heard);
                        return Step::On;
                    }
                    Bytes::Bad => return Step::Failed(Unreachable::Stranger),
                    Bytes::Whole => {
                        let Ok(greeting) = <[u8; GREETING]>::try_from(heard) else {
                            return Step::Failed(Unreachable::Stranger);
                        };
                        let random = match random::bytes() {
                            Ok(random) => random,
                            Err(error) => return Step::Failed(unreachable(&error)),
                        };
                        let reply = wire::reply(&terms.key, &greeting, terms.node_rank, &random);
                        // A fresh socket takes so little at once.
                        match (&stream).write(&reply) {
                            Ok(REPLY) => {}
                            _ => return Step::Failed(Unreachable::Stranger),
                        }
                        self.since = now;
                        self.state = State::Proof(stream, Vec::new(), Box::new((greeting, reply)));
                    }
                },
                State::Proof(stream, mut heard, said) => match read(&stream, &mut heard, LENGTH, |_| true) {
                    Bytes::Part => {
                        self.state = State::Proof(stream, heard, said);
                        return Step::On;
                    }
                    Bytes::Bad => return Step::Failed(Unreachable::Stranger),
                    Bytes::Whole => {
                        let (greeting, reply) = &*said;
                        let proved =
                            Tag::try_from(heard).is_ok_and(|proof| wire::proves(&terms.key, greeting, reply, &proof));
                        if !proved {
                            return Step::Failed(Unreachable::Stranger);
                        }
                        return Step::Met(stream, Channel::new(&terms.key, Side::Client, greeting, reply));
                    }
                },
            }
        }
    }
}

/// What came of what a stranger may yet be.
enum Bytes {
    Part,
    Whole,
    Bad,
}

/// Reads what is there, up to `length` bytes in all, and only as long as it is `right`.
fn read(mut stream: &TcpStream, heard: &mut Vec<u8>, length: usize, right: impl Fn(&[u8]) -> bool) -> Bytes {
    let mut buffer = [0; GREETING];
    loop {
        let room = length.saturating_sub(heard.len()).min(buffer.len());
        if room == 0 {
            return Bytes::Whole;
        }
        match stream.read(&mut buffer[..room]) {
            Ok(0) => return Bytes::Bad,
            Ok(read) => {
                heard.extend_from_slice(&buffer[..read]);
                if !right(heard) {
                    return Bytes::Bad;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Bytes::Part,
            Err(_) => return Bytes::Bad,
        }
    }
}

/// Looks for rank 0's node on every way at a time.
struct Search<'a> {
    terms: &'a Terms,
    began: Instant,
    /// Address by address, each with its ports in their order.
    ways: Vec<Way>,
    /// When somebody refused last: there is hope.
    hope: Instant,
}

impl<'a> Search<'a> {
    fn new(terms: &'a Terms, now: Instant) -> Search<'a> {
        let ports = terms.ports.len().clamp(1, WAYS);
        let addresses = terms.addresses.iter().take((WAYS / ports).max(1));
        let targets = addresses.flat_map(|ip| terms.ports.iter().take(ports).map(|port| SocketAddr::new(*ip, *port)));
        let way = |to| Way { to, state: State::Idle(now), since: now, from: None, fault: None, attempts: 0 };
        Search { terms, began: now, ways: targets.map(way).collect(), hope: now }
    }

    /// Where nobody is found: how it ends.
    fn run(mut self, clock: &mut Clock, own: &mut OwnRanks, leader: &mut dyn Leader) -> Result<Link, Outcome> {
        let mut end = self.began + self.terms.arrival;
        let mut failed = None;
        loop {
            let now = clock.now();
            own.look(now, leader);
            if let (None, Some(why)) = (&failed, &own.failed) {
                // The others do not know yet.
                end = end.min(now + farewell(self.terms));
                let outcome = Outcome::Failed(why.clone());
                leader.stopping(&outcome);
                failed = Some(outcome);
            }
            if now >= end || self.hopeless(now) {
                return Err(failed.unwrap_or_else(|| self.unreached()));
            }
            if let Some(link) = self.turn(now) {
                return Ok(link);
            }
            self.wait(now, own.due.min(end));
        }
    }

    /// Whether waiting longer does not help.
    fn hopeless(&self, now: Instant) -> bool {
        self.ways.is_empty() || now.saturating_duration_since(self.hope) >= HOPE
    }

    fn unreached(self) -> Outcome {
        let attempt = |way: Way| {
            let fault = way.fault?;
            Some(Attempt { to: (way.to.ip(), way.to.port()), from: way.from, fault })
        };
        Outcome::Unreached(self.ways.into_iter().filter_map(attempt).collect())
    }

    /// Begins what is due and gives up what is late. A way to rank 0's node, once there is
    /// one.
    fn turn(&mut self, now: Instant) -> Option<Link> {
        let ports = self.terms.ports.len().clamp(1, WAYS);
        for index in 0..self.ways.len() {
            // The first port is tried first; the next ones when those before have failed.
            let open = index % ports == 0 || self.ways[index - 1].fault.is_some();
            let way = &mut self.ways[index];
            let mut step = way.look(now);
            if let (Step::On, State::Idle(at), true) = (&step, &way.state, open)
                && *at <= now
            {
                step = way.begin(now);
            }
            if let Step::On = step
                && !matches!(way.state, State::Idle(_))
            {
                step = way.advance(self.terms, now);
            }
            match step {
                Step::On => {}
                Step::Failed(fault) => self.failed(index, fault, now),
                Step::Met(stream, channel) => {
                    sockets::watch(&stream, DEAD);
                    let mut link = Link::new(stream, channel, now);
                    // Short, so it fits.
                    let _ = link.send(&Message::Join, now);
                    return Some(link);
                }
            }
        }
        None
    }

    fn failed(&mut self, index: usize, fault: Unreachable, now: Instant) {
        if fault == Unreachable::Refused {
            self.hope = now;
        }
        let ports = self.terms.ports.len().clamp(1, WAYS);
        // Rank 0's node takes the first port that it gets: a later one is likely only
        // where somebody else has all before it.
        let first = index - index % ports;
        let likely = self.ways[first..index].iter().all(|way| way.fault == Some(Unreachable::Stranger));
        let way = &mut self.ways[index];
        let waited = now.saturating_duration_since(self.began);
        let pause = until_retry(waited, self.terms.nodes.len(), self.terms.node_rank, way.attempts);
        let pause = if likely { pause } else { (pause * 4).min(Duration::from_secs(2)) };
        way.fault = Some(fault);
        way.since = now;
        way.state = State::Idle(now + pause);
    }

    /// Until a way has something, something is due, or `due`.
    fn wait(&self, now: Instant, due: Instant) {
        let mut until = due;
        let mut which = Vec::with_capacity(self.ways.len());
        let ports = self.terms.ports.len().clamp(1, WAYS);
        for (index, way) in self.ways.iter().enumerate() {
            let (stream, begun) = match &way.state {
                State::Idle(at) => {
                    if index % ports == 0 || self.ways[index - 1].fault.is_some() {
                        until = until.min(*at);
                    }
                    continue;
                }
                State::Begun(stream) => (stream, true),
                State::Greeting(stream, _) | State::Proof(stream, ..) => (stream, false),
            };
            which.push((stream.as_fd(), begun));
            let late = if begun { BEGIN } else { ANSWER };
            let limit = if way.fault.is_some() && now >= way.since + SOON { late } else { SOON };
            until = until.min(way.since + limit);
        }
        sockets::wait(&which, until.saturating_duration_since(now));
    }
}

/// From joining to the end.
fn stay(terms: &Terms, mut link: Link, clock: &mut Clock, own: &mut OwnRanks, leader: &mut dyn Leader) -> Outcome {
    let mut scratch = vec![0; READING];
    let mut task: Option<(u32, Task)> = None;
    let mut said_here = false;
    loop {
        let now = clock.now();
        own.look(now, leader);
        if own.here && !said_here {
            said_here = link.send(&Message::Here, now);
        }
        if let Some((round, begun)) = &mut task
            && let Some(answer) = begun.advance(now)
        {
            let message = Message::Answer(*round, answer);
            task = None;
            if !link.send(&message, now) {
                let why = too_long(terms, terms.node_rank);
                let _ = link.send(&Message::Failed(why.clone()), now);
                part(link, &mut scratch);
                return Outcome::Stop(why);
            }
        }
        if let Some(why) = own.failed.take() {
            drop(task);
            let _ = link.send(&Message::Failed(why.clone()), now);
            part(link, &mut scratch);
            return Outcome::Failed(why);
        }
        if now >= link.said + PING {
            let _ = link.send(&Message::Ping, now);
        }
        // The server may wait for another node's work for hours, and pings all the while.
        if now >= link.heard + MUTE {
            return Outcome::Lost;
        }
        let due = task.as_ref().map_or(own.due, |(_, task)| own.due.min(task.due));
        let mut which = vec![(link.stream.as_fd(), link.writes())];
        which.extend(task.as_ref().and_then(|(_, task)| task.work.fd()).map(|fd| (fd, false)));
        let ready = sockets::wait(&which, due.saturating_duration_since(now));
        if let (Some(true), Some((_, task))) = (ready.get(1), &mut task) {
            task.due = now;
        }
        if ready.first() != Some(&true) {
            continue;
        }
        let now = clock.now();
        link.flush();
        let ended = link.receive(&mut scratch, now).is_some();
        loop {
            match link.next() {
                Ok(Some(Message::Ask(round, question))) if task.is_none() => {
                    task = Some((round, Task::new(leader.work(&question), now)));
                }
                Ok(Some(Message::Go(port, told))) => return Outcome::Go { port, told },
                Ok(Some(Message::Stop(why))) => return Outcome::Stop(why),
                Ok(Some(Message::Ping)) => {}
                Ok(None) if ended => return Outcome::Lost,
                Ok(None) => break,
                Ok(Some(_)) | Err(_) => return Outcome::Lost,
            }
        }
    }
}

/// Sees to it that the last word is heard: closing with something unread would reset the
/// connection and might destroy it.
fn part(mut link: Link, scratch: &mut [u8]) {
    let end = Instant::now() + PARTING;
    loop {
        let now = Instant::now();
        if now >= end {
            return;
        }
        link.flush();
        if !link.writes() {
            let _ = link.stream.shutdown(std::net::Shutdown::Write);
        }
        sockets::wait(&[(link.stream.as_fd(), link.writes())], end.saturating_duration_since(now));
        if link.receive(scratch, now).is_some() {
            return;
        }
        // What it was, nobody asks any more.
        while let Ok(Some(_)) = link.next() {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::act::key::Key;

    fn terms(ports: Vec<u16>) -> Terms {
        Terms {
            nodes: vec!["node000".into(), "node001".into()],
            node_rank: 1,
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            ports,
            key: Key::new().unwrap(),
            arrival: Duration::from_secs(600),
        }
    }

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    /// Goes on for so many seconds of the search's own clock, with a little real time in
    /// between for the kernel.
    fn pass(search: &mut Search<'_>, from: Instant, to: u64) {
        for tenth in 0..to * 10 {
            assert!(search.turn(from + Duration::from_millis(100 * tenth)).is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A port that answers no SYN, as behind a firewall that drops: its backlog is full.
    fn silent() -> (TcpListener, u16, Vec<TcpStream>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        let mut held = Vec::new();
        for _ in 0..20_000 {
            match TcpStream::connect_timeout(&to, Duration::from_millis(300)) {
                Ok(stream) => held.push(stream),
                Err(_) => return (listener, to.port(), held),
            }
        }
        panic!("{to} still answers");
    }

    /// Rank 0's node is up, as Slurm has started the step there: what is not started yet
    /// refuses.
    #[test]
    fn silence_is_given_up_after_half_a_minute_and_a_refusal_is_not() {
        let (listener, port, held) = silent();
        let begin = Instant::now();
        let only = terms(vec![port]);
        let mut search = Search::new(&only, begin);
        pass(&mut search, begin, 3);
        assert_eq!(search.ways[0].fault, Some(Unreachable::Silent));
        assert!(!search.hopeless(begin + seconds(29)));
        assert!(search.hopeless(begin + seconds(30)));
        let Outcome::Unreached(attempts) = search.unreached() else { panic!() };
        let here = Ipv4Addr::LOCALHOST.into();
        assert_eq!(attempts, [Attempt { to: (here, port), from: Some(here), fault: Unreachable::Silent }]);

        // A port that nobody has: bound, but nobody listens.
        let free = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let begin = Instant::now();
        let both = terms(vec![port, free]);
        let mut search = Search::new(&both, begin);
        pass(&mut search, begin, 40);
        assert_eq!(search.ways[1].fault, Some(Unreachable::Refused));
        assert!(!search.hopeless(begin + seconds(40)));
        drop((listener, held));
    }

    /// 192.0.2.0/24 is for documentation (RFC 5737); 255.255.255.255 is no address that TCP
    /// connects to.
    #[test]
    fn where_no_way_leads_is_given_up_too_and_the_error_is_kept() {
        let nowhere = Terms { addresses: vec![Ipv4Addr::BROADCAST.into()], ..terms(vec![29500]) };
        let begin = Instant::now();
        let mut search = Search::new(&nowhere, begin);
        pass(&mut search, begin, 2);
        let expected = matches!(search.ways[0].fault, Some(Unreachable::NoRoute(_) | Unreachable::Other(_)));
        assert!(expected, "{:?}", search.ways[0].fault);
        assert!(search.hopeless(begin + seconds(31)));
        let none = Terms { addresses: vec![], ..nowhere };
        assert!(Search::new(&none, begin).hopeless(begin));
    }

    /// Whoever holds the port will not make room for rank 0.
    #[test]
    fn a_silent_stranger_is_known_in_a_second_and_kept_for_ten() {
        let stranger = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let free = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let both = terms(vec![stranger.local_addr().unwrap().port(), free]);
        let begin = Instant::now();
        let mut search = Search::new(&both, begin);
        for _ in 0..5 {
            assert!(search.turn(begin).is_none());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(search.ways.iter().all(|way| way.fault.is_none()), "the next port is not tried yet");
        assert!(search.turn(begin + seconds(1)).is_none());
        assert!(search.turn(begin + seconds(1)).is_none());
        assert_eq!(search.ways[0].fault, Some(Unreachable::Stranger));
        assert!(!matches!(search.ways[1].state, State::Idle(_)) || search.ways[1].fault.is_some());
        // A server that is slow is still heard.
        assert!(search.turn(begin + seconds(9)).is_none());
        assert!(matches!(search.ways[0].state, State::Greeting(..)));
        assert!(search.turn(begin + seconds(10)).is_none());
        assert!(matches!(search.ways[0].state, State::Idle(_)));
    }
}
