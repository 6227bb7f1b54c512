//! Whole launches over loopback, each node a thread with a leader that answers as the
//! test says.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;
use crate::system::sockets;

/// What a leader of these tests does.
#[derive(Default)]
struct Script {
    /// Rounds that are asked before it ends.
    rounds: usize,
    /// How long its ranks take to come.
    ranks_after: Duration,
    /// Why one of them fails, and after how long.
    fails: Option<(Duration, String)>,
    /// Bytes of an answer.
    answer: usize,
    /// How long an answer takes.
    works: Duration,
    /// What `without` says.
    without: Option<Next>,
    /// Ends the thread after so long: its sockets close as those of a killed process do.
    dies: Option<Duration>,
}

/// What became of its calls.
#[derive(Default)]
struct Seen {
    answers: Vec<Vec<Vec<u8>>>,
    /// Whose answer came, one after the other.
    answered: Vec<u32>,
    told: Vec<Waiting>,
    without: Vec<Waiting>,
    stopping: Vec<Outcome>,
}

struct Fake {
    began: Instant,
    node_rank: u32,
    nodes: usize,
    script: Script,
    seen: Arc<Mutex<Seen>>,
    dropped: Arc<AtomicUsize>,
}

struct Slow {
    until: Instant,
    answer: Vec<u8>,
    done: bool,
    dropped: Arc<AtomicUsize>,
}

impl Work for Slow {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn advance(&mut self) -> Option<Vec<u8>> {
        self.done = Instant::now() >= self.until;
        self.done.then(|| std::mem::take(&mut self.answer))
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        if !self.done {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn question(round: usize, node: usize) -> Vec<u8> {
    format!("question {round} to {node}").into_bytes()
}

/// An answer that shows who was asked what.
fn answer(node_rank: u32, question: &[u8], length: usize) -> Vec<u8> {
    let mut answer = format!("{node_rank} was asked {}. ", String::from_utf8_lossy(question)).into_bytes();
    answer.resize(answer.len().max(length), u8::try_from(node_rank % 251).unwrap());
    answer
}

impl Leader for Fake {
    fn ranks(&mut self) -> Ranks {
        let waited = self.began.elapsed();
        if self.script.dies.is_some_and(|after| waited >= after) {
            // Without a line on stderr.
            std::panic::resume_unwind(Box::new("killed"));
        }
        match &self.script.fails {
            Some((after, why)) if waited >= *after => Ranks::Failed(why.clone()),
            _ if waited >= self.script.ranks_after => Ranks::Here,
            _ => Ranks::Coming,
        }
    }
    fn work(&mut self, question: &[u8]) -> Box<dyn Work> {
        Box::new(Slow {
            until: Instant::now() + self.script.works,
            answer: answer(self.node_rank, question, self.script.answer),
            done: false,
            dropped: self.dropped.clone(),
        })
    }
    fn answered(&mut self, node_rank: u32) {
        self.seen.lock().unwrap().answered.push(node_rank);
    }
    fn next(&mut self, round: usize, answers: &[Vec<u8>]) -> Next {
        self.seen.lock().unwrap().answers.push(answers.to_vec());
        if round < self.script.rounds {
            Next::Ask((0..self.nodes).map(|node| question(round, node)).collect())
        } else {
            Next::Go((0..self.nodes).map(|node| format!("go {node}").into_bytes()).collect())
        }
    }
    fn without(&mut self, waiting: &Waiting) -> Next {
        self.seen.lock().unwrap().without.push(waiting.clone());
        self.script.without.clone().unwrap_or_else(|| Next::Stop(format!("absent: {:?}", waiting.absent)))
    }
    fn tell(&mut self, waiting: &Waiting) {
        self.seen.lock().unwrap().told.push(waiting.clone());
    }
    fn stopping(&mut self, outcome: &Outcome) {
        self.seen.lock().unwrap().stopping.push(outcome.clone());
    }
}

/// Ports that nobody has at the moment; other tests take others.
fn ports(count: u16) -> Vec<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Below the range of outgoing connections.
    let base = 14_000 + u16::try_from(std::process::id() % 97).unwrap() * 100;
    let mut found = Vec::new();
    while found.len() < usize::from(count) {
        let port = 12_000 + (base + NEXT.fetch_add(1, Ordering::Relaxed)) % 19_000;
        if sockets::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), false).is_ok() {
            found.push(port);
        }
    }
    found
}

/// A launch of so many nodes on this machine.
fn terms(nodes: usize, address: IpAddr, ports: &[u16]) -> Terms {
    Terms {
        nodes: (0..nodes).map(|node| format!("node{node:03}")).collect(),
        node_rank: 0,
        addresses: vec![address],
        ports: ports.to_vec(),
        key: Key::new().unwrap(),
        arrival: Duration::from_secs(60),
    }
}

struct Running {
    thread: JoinHandle<(Outcome, Duration)>,
    seen: Arc<Mutex<Seen>>,
    dropped: Arc<AtomicUsize>,
}

impl Running {
    fn outcome(self) -> Outcome {
        self.thread.join().unwrap().0
    }
}

fn start(terms: &Terms, node_rank: u32, script: Script) -> Running {
    let terms = Terms { node_rank, ..terms.clone() };
    let (seen, dropped) = <(Arc<Mutex<Seen>>, Arc<AtomicUsize>)>::default();
    let mut fake = Fake {
        began: Instant::now(),
        node_rank,
        nodes: terms.nodes.len(),
        script,
        seen: seen.clone(),
        dropped: dropped.clone(),
    };
    let thread = std::thread::spawn(move || {
        let began = Instant::now();
        fake.began = began;
        (lead(&terms, &mut fake), began.elapsed())
    });
    Running { thread, seen, dropped }
}

/// All nodes with the same script each.
fn launch(terms: &Terms, script: impl Fn(u32) -> Script) -> Vec<Running> {
    (0..u32::try_from(terms.nodes.len()).unwrap()).map(|rank| start(terms, rank, script(rank))).collect()
}

fn go(port: u16, node: usize) -> Outcome {
    Outcome::Go { port, told: format!("go {node}").into_bytes() }
}

fn all_go(terms: &Terms, running: Vec<Running>, port: u16) {
    assert_eq!(running.len(), terms.nodes.len());
    for (node, running) in running.into_iter().enumerate() {
        assert_eq!(running.outcome(), go(port, node));
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Whether this machine has IPv6; says so where it has not.
fn has_ipv6() -> bool {
    let has = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has {
        eprintln!("SKIPPED: no IPv6 on this machine, ::1 cannot be tried");
    }
    has
}

#[test]
fn one_node_alone_answers_its_own_questions_without_a_socket() {
    // No address and no port that could be used.
    let terms = Terms { addresses: vec![], ports: vec![], ..terms(1, LOOPBACK, &[]) };
    let alone = start(&terms, 0, Script { rounds: 2, ranks_after: Duration::from_millis(20), ..Script::default() });
    let seen = alone.seen.clone();
    assert_eq!(alone.outcome(), go(0, 0));
    let expected: Vec<Vec<Vec<u8>>> =
        vec![vec![], vec![answer(0, &question(0, 0), 0)], vec![answer(0, &question(1, 0), 0)]];
    assert_eq!(seen.lock().unwrap().answers, expected);
}

/// Each node gets its own question and its answer gets to its own place.
#[test]
fn all_nodes_answer_every_round_and_start_by_ipv4_and_ipv6() {
    let addresses = [LOOPBACK, IpAddr::V6(Ipv6Addr::LOCALHOST)];
    for address in addresses.into_iter().filter(|address| address.is_ipv4() || has_ipv6()) {
        for nodes in [2, 50] {
            let terms = terms(nodes, address, &ports(3));
            let running = launch(&terms, |rank| Script {
                rounds: 3,
                answer: 4096,
                ranks_after: Duration::from_millis(u64::from(rank % 7)),
                ..Script::default()
            });
            let seen = running[0].seen.clone();
            all_go(&terms, running, terms.ports[0]);
            let Seen { answers, answered, .. } = &*seen.lock().unwrap();
            assert_eq!(answers.len(), 4);
            // Each as it came, before the next question.
            for answered in answered.chunks(nodes) {
                let each: BTreeSet<usize> = answered.iter().map(|node| *node as usize).collect();
                assert_eq!(each, (0..nodes).collect());
            }
            assert_eq!(answered.len(), 3 * nodes);
            for (round, answers) in answers.iter().enumerate().skip(1) {
                for (node, given) in answers.iter().enumerate() {
                    assert_eq!(*given, answer(u32::try_from(node).unwrap(), &question(round - 1, node), 4096));
                }
            }
        }
    }
}

/// What a failing node or a stop may take at most until all nodes are out; 2 s are wanted,
/// the rest is for a machine that does something else.
const STOPS_WITHIN: Duration = Duration::from_secs(5);

/// Everybody's outcome, all of them no later than `STOPS_WITHIN` after `since`.
fn soon(running: Vec<Running>, since: Instant) -> Vec<Outcome> {
    let outcomes = running.into_iter().map(Running::outcome).collect();
    assert!(since.elapsed() < STOPS_WITHIN, "{:?}", since.elapsed());
    outcomes
}

#[test]
fn answers_of_60_kib_and_the_longest_come_through_whole() {
    for length in [60 * 1024, CONTENT_MAX] {
        let terms = terms(8, LOOPBACK, &ports(1));
        let running = launch(&terms, |_| Script { rounds: 2, answer: length, ..Script::default() });
        let seen = running[0].seen.clone();
        all_go(&terms, running, terms.ports[0]);
        assert!(seen.lock().unwrap().answers[1..].iter().flatten().all(|answer| answer.len() == length));
    }
}

#[test]
fn an_answer_that_is_too_long_stops_all_and_names_the_node() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let start = Instant::now();
    let running = launch(&terms, |rank| Script {
        rounds: 1,
        answer: if rank == 1 { CONTENT_MAX + 1 } else { 1 },
        ..Script::default()
    });
    for outcome in soon(running, start) {
        assert!(matches!(&outcome, Outcome::Stop(why) if why.starts_with("node node001: ")), "{outcome:?}");
    }
}

#[test]
fn a_server_that_comes_late_is_met() {
    let terms = terms(4, LOOPBACK, &ports(3));
    let mut running: Vec<Running> = (1..4).map(|rank| start(&terms, rank, Script::default())).collect();
    std::thread::sleep(Duration::from_millis(1500));
    running.insert(0, start(&terms, 0, Script::default()));
    all_go(&terms, running, terms.ports[0]);
}

/// What somebody else does who has the first port.
fn stranger(port: u16, with: impl Fn(TcpStream) + Send + Clone + 'static) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    // Ends with the test program.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let with = with.clone();
            std::thread::spawn(move || with(stream));
        }
    });
}

/// Nothing more is said, and the connection stays.
fn hold(stream: TcpStream) {
    std::thread::sleep(Duration::from_secs(120));
    drop(stream);
}

#[test]
fn a_stranger_on_the_first_port_costs_a_second_and_the_next_port_is_taken() {
    let other = Key::new().unwrap();
    let silent = |stream: TcpStream| hold(stream);
    let talks = |mut stream: TcpStream| {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n");
        hold(stream);
    };
    let echoes = |mut stream: TcpStream| {
        let mut copy = stream.try_clone().unwrap();
        let _ = std::io::copy(&mut copy, &mut stream);
    };
    let closes = drop::<TcpStream>;
    // It has seen the greeting of a launch.
    let greets = |mut stream: TcpStream| {
        let _ = stream.write_all(&wire::greeting(&[7; 32]));
        hold(stream);
    };
    // Another launch's, and one that proves nothing but sends back what it got.
    let proves = move |mut stream: TcpStream| {
        let greeting = wire::greeting(&[7; 32]);
        let _ = stream.write_all(&greeting);
        let mut reply = [0; wire::REPLY];
        let _ = stream.read_exact(&mut reply);
        let _ = stream.write_all(&wire::proof(&other, &greeting, &reply));
        hold(stream);
    };
    let mirrors = |mut stream: TcpStream| {
        let _ = stream.write_all(&wire::greeting(&[7; 32]));
        let mut reply = [0; wire::REPLY];
        let _ = stream.read_exact(&mut reply);
        let _ = stream.write_all(&reply[wire::REPLY - 32..]);
        hold(stream);
    };
    let launches: Vec<(Terms, Vec<Running>)> = (0..7)
        .map(|kind| {
            let terms = terms(3, LOOPBACK, &ports(3));
            let port = terms.ports[0];
            match kind {
                0 => stranger(port, silent),
                1 => stranger(port, talks),
                2 => stranger(port, echoes),
                3 => stranger(port, closes),
                4 => stranger(port, greets),
                5 => stranger(port, proves.clone()),
                _ => stranger(port, mirrors),
            }
            let running = launch(&terms, |_| Script { rounds: 1, ..Script::default() });
            (terms, running)
        })
        .collect();
    for (terms, running) in launches {
        for (node, running) in running.into_iter().enumerate() {
            let (outcome, took) = running.thread.join().unwrap();
            assert_eq!(outcome, go(terms.ports[1], node));
            assert!(took < STOPS_WITHIN, "{took:?}");
        }
    }
}

#[test]
fn a_server_that_gets_no_port_says_which_failed_how() {
    let terms = terms(2, LOOPBACK, &ports(2));
    let held: Vec<TcpListener> =
        terms.ports.iter().map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).unwrap()).collect();
    let outcome = start(&terms, 0, Script::default()).outcome();
    let faults = terms.ports.iter().map(|port| (*port, libc::EADDRINUSE)).collect();
    assert_eq!(outcome, Outcome::NoPort(faults));
    drop(held);
    // And one that the user named.
    let terms = Terms { ports: ports(1), ..terms };
    let _held = TcpListener::bind((Ipv4Addr::LOCALHOST, terms.ports[0])).unwrap();
    let outcome = start(&terms, 0, Script::default()).outcome();
    assert_eq!(outcome, Outcome::NoPort(vec![(terms.ports[0], libc::EADDRINUSE)]));
}

/// Somebody's connection closed first on this side keeps the port for a minute: another of the
/// sequence is taken, as the training program's own bind would fail; where the user named
/// it, it is taken all the same.
#[test]
fn a_port_in_time_wait_is_passed_by_and_taken_only_where_it_was_named() {
    let two = ports(2);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, two[0])).unwrap();
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, two[0])).unwrap();
    let (server, _) = listener.accept().unwrap();
    // Closes first.
    server.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    drop(client);
    std::thread::sleep(Duration::from_millis(50));
    drop((server, listener));
    assert!(sockets::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, two[0])), false).is_err());
    let terms = terms(2, LOOPBACK, &two);
    all_go(&terms, launch(&terms, |_| Script::default()), two[1]);
    let terms = Terms { ports: vec![two[0]], ..terms };
    all_go(&terms, launch(&terms, |_| Script::default()), two[0]);
}

#[test]
fn a_node_with_another_key_stays_out_and_is_told_that_it_met_a_stranger() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let wrong = Terms { key: Key::new().unwrap(), arrival: Duration::from_secs(3), ..terms.clone() };
    // It says that it is node 1, and comes first.
    let outsider = start(&wrong, 1, Script::default());
    let server = start(&terms, 0, Script { ranks_after: Duration::from_secs(1), ..Script::default() });
    std::thread::sleep(Duration::from_millis(300));
    let running = vec![server, start(&terms, 1, Script::default()), start(&terms, 2, Script::default())];
    all_go(&terms, running, terms.ports[0]);
    match outsider.outcome() {
        Outcome::Unreached(attempts) => {
            assert_eq!(attempts.len(), 1);
            assert_eq!(attempts[0].to, (LOOPBACK, terms.ports[0]));
            assert_eq!(attempts[0].from, Some(LOOPBACK));
            // The server is gone by the end.
            assert!(matches!(attempts[0].fault, Unreachable::Stranger | Unreachable::Refused));
        }
        outcome => panic!("{outcome:?}"),
    }
}

#[test]
fn a_node_meets_no_server_that_has_another_key() {
    let theirs = terms(2, LOOPBACK, &ports(1));
    let ours = Terms { key: Key::new().unwrap(), arrival: Duration::from_secs(2), ..theirs.clone() };
    let server = start(&Terms { arrival: Duration::from_secs(4), ..theirs.clone() }, 0, Script::default());
    let outcome = start(&ours, 1, Script::default()).outcome();
    let attempt = Attempt { to: (LOOPBACK, theirs.ports[0]), from: Some(LOOPBACK), fault: Unreachable::Stranger };
    assert_eq!(outcome, Outcome::Unreached(vec![attempt]));
    assert_eq!(server.outcome(), Outcome::Stop("absent: [1]".into()));
}

/// A connection to the server as anybody can have it, and its greeting.
fn knock(port: u16) -> (TcpStream, [u8; wire::GREETING]) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let mut greeting = [0; wire::GREETING];
        let met = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).and_then(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            stream.read_exact(&mut greeting).map(|()| stream)
        });
        match met {
            Ok(stream) => return (stream, greeting),
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Everything that comes until the other side ends it.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..read]);
    }
    bytes
}

#[test]
fn a_reply_that_was_heard_on_another_connection_or_in_another_launch_opens_nothing() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let server = start(&terms, 0, Script::default());
    // A right one, heard on the way.
    let (mut first, greeting) = knock(terms.ports[0]);
    let reply = wire::reply(&terms.key, &greeting, 1, &[1; 32]);
    first.write_all(&reply).unwrap();
    let mut proof = [0; 32];
    first.read_exact(&mut proof).unwrap();
    assert!(wire::proves(&terms.key, &greeting, &reply, &proof));
    // Said again: on another connection, and with what another launch's key makes of it.
    let (mut again, other) = knock(terms.ports[0]);
    again.write_all(&reply).unwrap();
    assert_eq!(rest(again), b"");
    let (mut foreign, other_still) = knock(terms.ports[0]);
    foreign.write_all(&wire::reply(&Key::new().unwrap(), &other_still, 1, &[1; 32])).unwrap();
    assert_eq!(rest(foreign), b"");
    assert_ne!(greeting, other);
    // Who has the key, but says that it is node 0, or one that this launch does not have.
    for node_rank in [0, 3, u32::MAX] {
        let (mut stream, greeting) = knock(terms.ports[0]);
        stream.write_all(&wire::reply(&terms.key, &greeting, node_rank, &[1; 32])).unwrap();
        assert_eq!(rest(stream), b"", "{node_rank}");
    }
    // A frame of another connection, a mirrored one, one that comes twice.
    let (mut second, greeting_2) = knock(terms.ports[0]);
    let reply_2 = wire::reply(&terms.key, &greeting_2, 1, &[1; 32]);
    second.write_all(&reply_2).unwrap();
    second.read_exact(&mut proof).unwrap();
    let mut channel = wire::Channel::new(&terms.key, wire::Side::Client, &greeting, &reply);
    let mut join = Vec::new();
    assert!(channel.seal(&wire::Message::Join, &mut join));
    second.write_all(&join).unwrap();
    assert_eq!(rest(second), b"");
    drop(first);
    let running = vec![server, start(&terms, 1, Script::default()), start(&terms, 2, Script::default())];
    all_go(&terms, running, terms.ports[0]);
}

/// An xorshift generator: the same bytes in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| u8::try_from(self.next() >> 56).unwrap()).collect()
    }
}

#[test]
fn garbage_of_every_length_and_halves_of_replies_keep_nobody_out() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let server = start(&terms, 0, Script::default());
    let mut noise = Noise(5);
    for length in (0..2 * wire::REPLY).chain([4096, 1 << 20]) {
        let (mut stream, _) = knock(terms.ports[0]);
        // It may be dropped in the middle of it.
        let _ = stream.write_all(&noise.bytes(length));
        let (mut stream, greeting) = knock(terms.ports[0]);
        let mut reply = wire::reply(&terms.key, &greeting, 1, &[1; 32]).to_vec();
        reply.resize(length.min(4096), 0);
        if length < wire::REPLY {
            let _ = stream.write_all(&reply);
        } else if length > wire::REPLY {
            let _ = stream.write_all(&reply);
            assert_eq!(rest(stream), b"", "{length} bytes are no reply");
        }
    }
    let running = vec![server, start(&terms, 1, Script::default()), start(&terms, 2, Script::default())];
    all_go(&terms, running, terms.ports[0]);
}

/// Has the key and joins as node 1; its end of the connection.
fn joined(terms: &Terms) -> (TcpStream, wire::Channel) {
    let (mut stream, greeting) = knock(terms.ports[0]);
    let reply = wire::reply(&terms.key, &greeting, 1, &[1; 32]);
    stream.write_all(&reply).unwrap();
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).unwrap();
    let mut channel = wire::Channel::new(&terms.key, wire::Side::Client, &greeting, &reply);
    let mut join = Vec::new();
    assert!(channel.seal(&wire::Message::Join, &mut join));
    stream.write_all(&join).unwrap();
    (stream, channel)
}

/// Whatever a node's connection carries that the node cannot have sent ends the launch, and
/// names the node.
#[test]
fn a_broken_frame_of_a_node_stops_all_and_names_it() {
    let here = |channel: &mut wire::Channel| {
        let mut frame = Vec::new();
        assert!(channel.seal(&wire::Message::Here, &mut frame));
        frame
    };
    type Bytes = Box<dyn Fn(&mut wire::Channel) -> Vec<u8>>;
    let table: Vec<(&str, Bytes)> = vec![
        ("longer than any", Box::new(|_| ((1u32 << 20) + 1).to_be_bytes().to_vec())),
        ("longest there is", Box::new(|_| u32::MAX.to_be_bytes().to_vec())),
        ("empty", Box::new(|_| [0; 36].to_vec())),
        ("twice the same", Box::new(move |channel| here(channel).repeat(2))),
        (
            "one bit",
            Box::new(move |channel| {
                let mut frame = here(channel);
                frame[4] ^= 1;
                frame
            }),
        ),
        (
            "one left out",
            Box::new(move |channel| {
                here(channel);
                here(channel)
            }),
        ),
        (
            "an answer to nothing",
            Box::new(|channel| {
                let mut frame = Vec::new();
                assert!(channel.seal(&wire::Message::Answer(0, b"x".to_vec()), &mut frame));
                frame
            }),
        ),
        (
            "what only the server says",
            Box::new(|channel| {
                let mut frame = Vec::new();
                assert!(channel.seal(&wire::Message::Go(1, vec![]), &mut frame));
                frame
            }),
        ),
    ];
    for (what, bytes) in table {
        let terms = terms(3, LOOPBACK, &ports(1));
        let began = Instant::now();
        let running = vec![start(&terms, 0, Script::default()), start(&terms, 2, Script::default())];
        let (mut stream, mut channel) = joined(&terms);
        stream.write_all(&bytes(&mut channel)).unwrap();
        for outcome in soon(running, began) {
            assert!(matches!(&outcome, Outcome::Stop(why) if why.starts_with("node node001: ")), "{what}: {outcome:?}");
        }
    }
}

/// Half a frame may be a node that hangs: pings do not come then, and it is not waited for
/// for ever; here it dies.
#[test]
fn a_node_that_dies_in_the_middle_of_a_frame_is_one_that_died() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let began = Instant::now();
    let running = vec![start(&terms, 0, Script::default()), start(&terms, 2, Script::default())];
    let (mut stream, mut channel) = joined(&terms);
    let mut frame = Vec::new();
    assert!(channel.seal(&wire::Message::Failed("a long story".repeat(99)), &mut frame));
    stream.write_all(&frame[..500]).unwrap();
    drop(stream);
    for outcome in soon(running, began) {
        let expected = "node node001: its connection ended before the start: ";
        assert!(matches!(&outcome, Outcome::Stop(why) if why.starts_with(expected)), "{outcome:?}");
    }
}

/// As when nodes of two releases are in one step.
#[test]
fn a_node_with_another_version_is_named_and_not_taken_for_a_stranger() {
    let terms = terms(2, LOOPBACK, &ports(1));
    let server = start(&terms, 0, Script::default());
    let (mut stream, greeting) = knock(terms.ports[0]);
    let mut head = wire::reply(&terms.key, &greeting, 1, &[1; 32])[..wire::REPLY - 32].to_vec();
    head[wire::MAGIC.len() + 1] = 9;
    let tag = terms.key.tag(&[b"client", &greeting, &head]);
    let reply: [u8; wire::REPLY] = [head, tag.to_vec()].concat().try_into().unwrap();
    stream.write_all(&reply).unwrap();
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).unwrap();
    let mut channel = wire::Channel::new(&terms.key, wire::Side::Client, &greeting, &reply);
    let mut join = Vec::new();
    assert!(channel.seal(&wire::Message::Join, &mut join));
    stream.write_all(&join).unwrap();
    let told = channel.open(&rest(stream)).unwrap().unwrap().0;
    let wire::Message::Stop(why) = told else { panic!("{told:?}") };
    assert!(why.starts_with("node node001: another release") && why.contains("version 9"), "{why}");
    assert_eq!(server.outcome(), Outcome::Stop(why));
}

/// On one machine they share its CPUs with the launch, as they would not elsewhere.
#[test]
fn ten_thousand_connections_of_somebody_else_neither_stop_nor_slow_the_launch() {
    let terms = terms(20, LOOPBACK, &ports(1));
    let (stop, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let server = start(&terms, 0, Script { rounds: 2, answer: 4096, ..Script::default() });
    let hostile: Vec<JoinHandle<()>> = (0..2)
        .map(|kind| {
            let (stop, made, port) = (stop.clone(), made.clone(), terms.ports[0]);
            std::thread::spawn(move || {
                let mut noise = Noise(kind + 1);
                let mut held = std::collections::VecDeque::new();
                while stop.load(Ordering::Relaxed) == 0 || made.load(Ordering::Relaxed) < 10_000 {
                    let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
                        // The server does not listen yet; or the launch is through and its port closed.
                        if made.load(Ordering::Relaxed) == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                            continue;
                        }
                        break;
                    };
                    made.fetch_add(1, Ordering::Relaxed);
                    if kind == 1 {
                        let length = usize::try_from(noise.next() % 200).unwrap();
                        let _ = stream.write_all(&noise.bytes(length));
                    }
                    held.push_back(stream);
                    // Open files of this program.
                    if held.len() > 2000 {
                        held.pop_front();
                    }
                }
            })
        })
        .collect();
    // In the middle of it: 9,000 before, the rest meanwhile.
    let end = Instant::now() + Duration::from_secs(60);
    while made.load(Ordering::Relaxed) < 9_000 {
        assert!(Instant::now() < end, "{made:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let began = Instant::now();
    let mut running = vec![server];
    running.extend((1..20).map(|rank| start(&terms, rank, Script { answer: 4096, ..Script::default() })));
    all_go(&terms, running, terms.ports[0]);
    let took = began.elapsed();
    stop.store(1, Ordering::Relaxed);
    hostile.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn a_rank_that_fails_stops_all_nodes() {
    // On another node, on rank 0's.
    for failing in [2, 0] {
        let terms = terms(5, LOOPBACK, &ports(2));
        let after = Duration::from_secs(1);
        let why = format!("node node{failing:03}, rank 7: no GPU");
        let begun = Instant::now();
        let running = launch(&terms, |rank| Script {
            fails: (rank == failing).then(|| (after, why.clone())),
            // Node 1 is not ready, so that nothing starts before.
            ranks_after: Duration::from_secs(if rank == 1 { 3600 } else { 0 }),
            ..Script::default()
        });
        for (rank, outcome) in (0..).zip(soon(running, begun + after)) {
            let expected = if rank == failing { Outcome::Failed(why.clone()) } else { Outcome::Stop(why.clone()) };
            assert_eq!(outcome, expected, "node {rank}");
        }
    }
}

/// No connection is there yet that could tell it.
#[test]
fn a_rank_that_fails_before_rank_0_s_node_is_there_stops_all_nodes() {
    let terms = terms(3, LOOPBACK, &ports(2));
    let why = "node node002, rank 7: no GPU".to_owned();
    let fails = Script { fails: Some((Duration::ZERO, why.clone())), ..Script::default() };
    let mut running = vec![start(&terms, 1, Script::default()), start(&terms, 2, fails)];
    let failing = running[1].seen.clone();
    std::thread::sleep(Duration::from_secs(1));
    let begun = Instant::now();
    running.insert(0, start(&terms, 0, Script::default()));
    let outcomes = soon(running, begun);
    assert_eq!(outcomes, [Outcome::Stop(why.clone()), Outcome::Stop(why.clone()), Outcome::Failed(why.clone())]);
    // Its other ranks did not wait for that.
    assert_eq!(failing.lock().unwrap().stopping, [Outcome::Failed(why)]);
}

/// A node that comes after the end would otherwise meet nobody and wait for its whole time.
#[test]
fn a_node_that_comes_when_all_is_over_is_told_why() {
    let terms = terms(3, LOOPBACK, &ports(2));
    let why = "node node000, rank 0: no GPU".to_owned();
    let fails = Script { fails: Some((Duration::ZERO, why.clone())), ..Script::default() };
    let begun = Instant::now();
    let mut running = vec![start(&terms, 0, fails), start(&terms, 1, Script::default())];
    let server = running[0].seen.clone();
    // Who is here does not wait for who is not.
    assert_eq!(soon(vec![running.pop().unwrap()], begun), [Outcome::Stop(why.clone())]);
    assert_eq!(server.lock().unwrap().stopping, [Outcome::Failed(why.clone())]);
    std::thread::sleep(Duration::from_secs(1));
    let begun = Instant::now();
    running.push(start(&terms, 2, Script::default()));
    assert_eq!(soon(running, begun), [Outcome::Failed(why.clone()), Outcome::Stop(why)]);
}

/// As a leader that is killed, or whose node Slurm ends.
#[test]
fn a_node_that_dies_stops_all_and_is_named() {
    let terms = terms(6, LOOPBACK, &ports(1));
    let after = Duration::from_secs(1);
    let begun = Instant::now();
    let mut running = launch(&terms, |rank| Script {
        dies: (rank == 4).then_some(after),
        ranks_after: Duration::from_secs(if rank == 1 { 3600 } else { 0 }),
        ..Script::default()
    });
    assert!(running.remove(4).thread.join().is_err());
    for outcome in soon(running, begun + after) {
        let Outcome::Stop(why) = outcome else { panic!("{outcome:?}") };
        assert!(why.starts_with("node node004: its connection ended before the start: "), "{why}");
    }
}

#[test]
fn nodes_whose_server_dies_are_lost_at_once() {
    let terms = terms(4, LOOPBACK, &ports(1));
    let after = Duration::from_secs(1);
    let begun = Instant::now();
    let mut running = launch(&terms, |rank| Script {
        dies: (rank == 0).then_some(after),
        ranks_after: Duration::from_secs(if rank == 1 { 3600 } else { 0 }),
        ..Script::default()
    });
    assert!(running.remove(0).thread.join().is_err());
    assert_eq!(soon(running, begun + after), [Outcome::Lost, Outcome::Lost, Outcome::Lost]);
}

/// A warm-up, say.
#[test]
fn work_ends_at_once_where_another_node_fails_meanwhile() {
    for failing in [2, 0] {
        let terms = terms(4, LOOPBACK, &ports(1));
        let after = Duration::from_secs(1);
        let why = "no space left".to_owned();
        let begun = Instant::now();
        let running = launch(&terms, |rank| Script {
            rounds: 1,
            works: Duration::from_secs(3600),
            fails: (rank == failing).then(|| (after, why.clone())),
            ..Script::default()
        });
        let dropped: Vec<Arc<AtomicUsize>> = running.iter().map(|running| running.dropped.clone()).collect();
        let outcomes = soon(running, begun + after);
        assert!(outcomes.iter().all(|outcome| *outcome != Outcome::Lost), "{outcomes:?}");
        // Each node's work was ended.
        assert_eq!(dropped.iter().map(|dropped| dropped.load(Ordering::Relaxed)).sum::<usize>(), 4);
    }
}

#[test]
fn work_that_takes_a_second_is_waited_for() {
    let terms = terms(3, LOOPBACK, &ports(1));
    let running = launch(&terms, |rank| Script {
        rounds: 2,
        works: Duration::from_secs(u64::from(rank == 1)),
        ..Script::default()
    });
    all_go(&terms, running, terms.ports[0]);
}

/// What the training program does next: `bind` without SO_REUSEADDR, at once.
#[test]
fn the_port_is_free_the_moment_the_server_is_done() {
    for fails in [false, true] {
        let terms = terms(51, LOOPBACK, &ports(1));
        let port = terms.ports[0];
        let mut running: Vec<Running> = (1..51)
            .map(|rank| {
                let fails = (fails && rank == 30).then(|| (Duration::from_millis(500), "x".to_owned()));
                start(&terms, rank, Script { answer: 4096, fails, ..Script::default() })
            })
            .collect();
        // Somebody is connected and says nothing.
        let strangers = std::thread::spawn(move || (0..20).map(|_| knock(port)).collect::<Vec<_>>());
        let seen = Arc::<Mutex<Seen>>::default();
        let mut server = Fake {
            began: Instant::now(),
            node_rank: 0,
            nodes: 51,
            script: Script {
                rounds: 1,
                answer: 4096,
                ranks_after: Duration::from_millis(if fails { 3_600_000 } else { 700 }),
                ..Script::default()
            },
            seen,
            dropped: Arc::default(),
        };
        let outcome = lead(&terms, &mut server);
        let bound = sockets::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), false).map(drop);
        assert!(bound.is_ok(), "{bound:?}");
        assert_eq!(outcome, if fails { Outcome::Stop("x".into()) } else { go(port, 0) });
        drop(strangers.join().unwrap());
        if !fails {
            for (node, running) in (1..).zip(running.drain(..)) {
                assert_eq!(running.outcome(), go(port, node));
            }
        }
        running.into_iter().for_each(|running| drop(running.outcome()));
    }
}

#[test]
fn a_node_that_does_not_come_in_time_is_named_and_the_leader_decides() {
    let together = Terms { arrival: Duration::from_secs(2), ..terms(4, LOOPBACK, &ports(1)) };
    // Node 2 never comes, node 3 is there, but not all of its ranks.
    let script = |rank: u32, without| Script {
        ranks_after: Duration::from_secs(if rank == 3 { 3600 } else { 0 }),
        rounds: 1,
        without: (rank == 0).then_some(without).flatten(),
        ..Script::default()
    };
    let running = [0, 1, 3].map(|rank| start(&together, rank, script(rank, None)));
    let seen = running[0].seen.clone();
    for running in running {
        assert_eq!(running.outcome(), Outcome::Stop("absent: [2]".into()));
    }
    let asked = seen.lock().unwrap().without.clone();
    assert_eq!(asked.len(), 1);
    assert_eq!((&asked[0].absent, &asked[0].unready, asked[0].round), (&vec![2], &vec![3], None));

    // It may start without them; then those that are here are asked, and all that came start.
    let ask = Next::Ask((0..4).map(|node| question(0, node)).collect());
    let terms = Terms { ports: ports(1), ..together };
    let running = [0, 1, 3].map(|rank| start(&terms, rank, script(rank, Some(ask.clone()))));
    let seen = running[0].seen.clone();
    for (node, running) in [0, 1, 3].into_iter().zip(running) {
        assert_eq!(running.outcome(), go(terms.ports[0], node));
    }
    let answers = seen.lock().unwrap().answers.clone();
    assert_eq!(answers, [vec![answer(0, &question(0, 0), 0), answer(1, &question(0, 1), 0), vec![], vec![]]]);
}

#[test]
fn who_is_waited_for_is_told_after_ten_seconds() {
    let terms = Terms { arrival: Duration::from_secs(11), ..terms(3, LOOPBACK, &ports(1)) };
    let running = [0, 1].map(|rank| start(&terms, rank, Script::default()));
    let seen = running[0].seen.clone();
    running.into_iter().for_each(|running| drop(running.outcome()));
    let told = seen.lock().unwrap().told.clone();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0].absent, &told[0].unready, told[0].round), (&vec![2], &vec![], None));
    assert!(told[0].since >= Duration::from_secs(10), "{told:?}");
}

/// The address is looked at in both families at a time: the one that leads there counts,
/// and a node that comes by both is one node.
#[test]
fn of_several_addresses_the_one_that_leads_there_is_taken() {
    let six: IpAddr = Ipv6Addr::LOCALHOST.into();
    let mut addresses = vec![IpAddr::from([127, 0, 0, 2]), LOOPBACK];
    addresses.extend(has_ipv6().then_some(six));
    let terms = Terms { addresses, ..terms(20, LOOPBACK, &ports(2)) };
    all_go(&terms, launch(&terms, |_| Script { rounds: 1, ..Script::default() }), terms.ports[0]);
}

/// None of them panics or is taken for anything.
#[test]
fn noise_is_no_message() {
    let mut noise = Noise(1);
    let key = Key::new().unwrap();
    let greeting = wire::greeting(&[3; 32]);
    let reply = wire::reply(&key, &greeting, 5, &[4; 32]);
    let good = {
        let mut frame = Vec::new();
        let mut channel = wire::Channel::new(&key, wire::Side::Server, &greeting, &reply);
        assert!(channel.seal(&wire::Message::Go(7, b"told".to_vec()), &mut frame));
        frame
    };
    for _ in 0..20_000 {
        let length = usize::try_from(noise.next() % 300).unwrap();
        let mut bytes = noise.bytes(length);
        // Often with a beginning that is believed.
        if noise.next() & 1 == 0 && bytes.len() > 8 {
            bytes[..4].copy_from_slice(&u32::try_from(noise.next() % 300).unwrap().to_be_bytes());
            bytes[4] = u8::try_from(noise.next() % 9).unwrap();
        }
        let mut channel = wire::Channel::new(&key, wire::Side::Client, &greeting, &reply);
        assert!(!matches!(channel.open(&bytes), Ok(Some(_))));
        let replied: [u8; wire::REPLY] = noise.bytes(wire::REPLY).try_into().unwrap();
        assert!(wire::read_reply(&key, &greeting, &replied).is_err());
        // Any one bit of the real ones.
        let bit = usize::try_from(noise.next()).unwrap() % (8 * good.len());
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        assert!(!matches!(channel.open(&frame), Ok(Some(_))), "bit {bit}");
        let bit = usize::try_from(noise.next()).unwrap() % (8 * reply.len());
        let mut replied = reply;
        replied[bit / 8] ^= 1 << (bit % 8);
        assert!(wire::read_reply(&key, &greeting, &replied).is_err(), "bit {bit}");
    }
    let mut channel = wire::Channel::new(&key, wire::Side::Client, &greeting, &reply);
    for length in 0..good.len() {
        assert_eq!(channel.open(&good[..length]), Ok(None));
    }
    assert_eq!(channel.open(&good), Ok(Some((wire::Message::Go(7, b"told".to_vec()), good.len()))));
    // Once only.
    assert_eq!(channel.open(&good), Err(wire::Broken::Tag));
}

#[test]
fn every_message_comes_back_and_no_reason_is_endless() {
    use wire::{Channel, Message, Side};
    let key = Key::new().unwrap();
    let greeting = wire::greeting(&[3; 32]);
    let reply = wire::reply(&key, &greeting, 5, &[4; 32]);
    let (mut from, mut to) =
        (Channel::new(&key, Side::Client, &greeting, &reply), Channel::new(&key, Side::Server, &greeting, &reply));
    let messages = [
        Message::Join,
        Message::Here,
        Message::Answer(3, vec![0, 255]),
        Message::Failed("why ✗".into()),
        Message::Ask(u32::MAX, vec![]),
        Message::Go(29500, b"x".to_vec()),
        Message::Stop(String::new()),
        Message::Ping,
    ];
    let mut bytes = Vec::new();
    assert!(messages.iter().all(|message| from.seal(message, &mut bytes)));
    for message in messages {
        let (heard, length) = to.open(&bytes).unwrap().unwrap();
        assert_eq!(heard, message);
        bytes.drain(..length);
    }
    assert!(from.seal(&Message::Stop("é".repeat(1 << 20)), &mut bytes));
    let Some((Message::Stop(why), _)) = to.open(&bytes).unwrap() else { panic!() };
    assert!(why.len() <= 64 * 1024 && why.chars().all(|char| char == 'é'));
    assert!(!from.seal(&Message::Ask(0, vec![0; CONTENT_MAX + 1]), &mut bytes));
}

/// As when a node crashes or loses its network: no connection is closed, nothing comes any
/// more. In a network namespace of its own, whose loopback goes down.
#[test]
fn a_network_that_is_gone_without_a_word_is_noticed_in_twenty_seconds() {
    let inside = "PALINGENESIS_TEST_OWN_NETWORK";
    let ip = |action: &str| {
        let status = std::process::Command::new("ip").args(["link", "set", "lo", action]).status();
        assert!(status.is_ok_and(|status| status.success()), "ip link set lo {action}");
    };
    if std::env::var_os(inside).is_some() {
        ip("up");
        let terms = terms(3, LOOPBACK, &ports(1));
        let running = launch(&terms, |rank| Script {
            // Node 1 is not ready, so that nothing starts before.
            ranks_after: Duration::from_secs(if rank == 1 { 3600 } else { 0 }),
            ..Script::default()
        });
        std::thread::sleep(Duration::from_secs(2));
        ip("down");
        let gone = Instant::now();
        let outcomes: Vec<Outcome> = running.into_iter().map(Running::outcome).collect();
        let took = gone.elapsed();
        let Outcome::Stop(why) = &outcomes[0] else { panic!("{outcomes:?}") };
        assert!(why.contains(": its connection ended before the start: "), "{why}");
        assert_eq!(outcomes[1..], [Outcome::Lost, Outcome::Lost]);
        eprintln!("noticed in {took:.1?}: {why}");
        assert!((Duration::from_secs(5)..Duration::from_secs(40)).contains(&took), "{took:?}");
        return;
    }
    let possible = std::process::Command::new("unshare").args(["-n", "ip", "link", "show"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: no network namespace can be made here (unshare, ip, root)");
        return;
    }
    let name = "act::preflight::tests::a_network_that_is_gone_without_a_word_is_noticed_in_twenty_seconds";
    let output = std::process::Command::new("unshare")
        .args(["-n", "timeout", "-k", "3", "90"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(inside, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let ran = said.contains("noticed in ");
    assert!(output.status.success() && ran, "{}{said}", String::from_utf8_lossy(&output.stdout));
    eprintln!("{said}");
}
