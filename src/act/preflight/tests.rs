//! Whole launches over loopback, each node a thread with a leader that answers as the
//! test says.

use std::collections::VecDeque;
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
    /// Drops the connection, as a process that is killed does, after so long: ends the test's
    /// thread by a panic.
    dies: Option<Duration>,
}

/// What became of its calls.
#[derive(Default)]
struct Seen {
    answers: Vec<Vec<Vec<u8>>>,
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
            std::panic::panic_any("killed");
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
            let answers = &seen.lock().unwrap().answers;
            assert_eq!(answers.len(), 4);
            for (round, answers) in answers.iter().enumerate().skip(1) {
                for (node, given) in answers.iter().enumerate() {
                    assert_eq!(*given, answer(u32::try_from(node).unwrap(), &question(round - 1, node), 4096));
                }
            }
        }
    }
}
