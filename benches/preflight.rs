//! Times the pre-flight's rounds, from "all start" to "all have Go", with 1,000 and 4,000
//! nodes over loopback, each with a report of 4 KiB; and in the same run torch's TCPStore
//! with as many clients for the same work (bench/tcpstore.py), and prints the ratio.
//!
//! The server is one lead() in one thread of a process of its own. Each other node is a
//! lead() too, a thread of a second process: more than torch's clients have, which take
//! turns in few threads and need not be woken.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::BorrowedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis::act::preflight::{Leader, Next, Outcome, Ranks, Terms, Waiting, Work, lead};

const REPORT: usize = 4096;
const ROUNDS: [(usize, usize, f64); 2] = [(1000, 5, 1.0), (4000, 3, 3.0)];
/// Processes that share torch's clients: the quickest of 1, 2, 8, 16, 32 and 64 on two CPUs.
const PROCESSES: &str = "8";

struct Node(usize);

struct Report;

impl Work for Report {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn advance(&mut self) -> Option<Vec<u8>> {
        Some(vec![b'x'; REPORT])
    }
}

impl Leader for Node {
    fn ranks(&mut self) -> Ranks {
        Ranks::Here
    }
    fn work(&mut self, _: &[u8]) -> Box<dyn Work> {
        Box::new(Report)
    }
    fn next(&mut self, round: usize, answers: &[Vec<u8>]) -> Next {
        if round == 0 {
            return Next::Ask(vec![b"report".to_vec(); self.0]);
        }
        assert!(answers.len() == self.0 && answers.iter().all(|answer| answer.len() == REPORT));
        Next::Go(vec![b"start".to_vec(); self.0])
    }
    fn without(&mut self, waiting: &Waiting) -> Next {
        Next::Stop(format!("{} nodes are absent", waiting.absent.len()))
    }
    fn tell(&mut self, waiting: &Waiting) {
        eprintln!("preflight: waiting for {} nodes, {:?}", waiting.absent.len(), waiting.since);
    }
}

fn terms(nodes: usize, node_rank: u32, port: u16, key: &str) -> Terms {
    Terms {
        nodes: (0..nodes).map(|node| format!("node{node}")).collect(),
        node_rank,
        addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
        ports: (port..port + 4).collect(),
        key: Key::from_hex(key).expect("a key"),
        arrival: Duration::from_secs(300),
    }
}

/// Second process: every node but rank 0's. Says when they are ready, starts them at a line
/// and says when all have Go.
fn clients(nodes: usize, port: u16, key: &str) {
    let all = terms(nodes, 1, port, key);
    let started = Arc::new(Barrier::new(nodes));
    let gone = Arc::new(AtomicUsize::new(0));
    let last = Arc::new(Mutex::new(()));
    let threads: Vec<_> = (1..nodes)
        .map(|node| {
            let terms = Terms { node_rank: u32::try_from(node).expect("small"), ..all.clone() };
            let (started, gone, last) = (started.clone(), gone.clone(), last.clone());
            let thread = std::thread::Builder::new().stack_size(128 * 1024);
            let thread = thread.spawn(move || {
                started.wait();
                let outcome = lead(&terms, &mut Node(nodes));
                assert!(matches!(outcome, Outcome::Go { .. }), "{outcome:?}");
                if gone.fetch_add(1, Ordering::AcqRel) + 2 == nodes {
                    let _one = last.lock();
                    println!("done");
                }
            });
            thread.expect("a thread")
        })
        .collect();
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    started.wait();
    for thread in threads {
        thread.join().expect("Go");
    }
}

fn ours(nodes: usize, port: u16) -> Duration {
    let key = Key::new().expect("a key").to_hex();
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program)
        .args(["clients", &nodes.to_string(), &port.to_string(), &key])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process");
    let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("ready");
    let start = Instant::now();
    child.stdin.take().expect("a pipe").write_all(b"go\n").expect("a reader");
    let outcome = lead(&terms(nodes, 0, port, &key), &mut Node(nodes));
    assert!(matches!(outcome, Outcome::Go { .. }), "{outcome:?}");
    said.read_line(&mut line).expect("done");
    let taken = start.elapsed();
    assert_eq!(line, "ready\ndone\n");
    assert!(child.wait().expect("a child").success());
    taken
}

/// The same work by TCPStore; why not.
fn torch(nodes: usize) -> Result<Duration, String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/tcpstore.py");
    let output = Command::new("/usr/bin/python3")
        .args([script, &nodes.to_string(), PROCESSES])
        .output()
        .map_err(|error| format!("/usr/bin/python3: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).trim().parse().map(Duration::from_secs_f64);
    text.map_err(|_| match String::from_utf8_lossy(&output.stderr).trim() {
        "" => format!("bench/tcpstore.py: {}", output.status),
        said => said.to_owned(),
    })
}

fn median(mut measured: Vec<Duration>) -> Duration {
    measured.sort();
    measured[measured.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, nodes, port, key] = arguments.as_slice()
        && word == "clients"
    {
        return clients(nodes.parse().expect("a number"), port.parse().expect("a port"), key);
    }
    // For two sockets of each node, and torch's children.
    let wanted = 20_000;
    if !palingenesis::system::limits::set_open_files(wanted) {
        println!("preflight: the limit of open files stays as it is");
    }
    let mut port = 21_000 + u16::try_from(std::process::id() % 500).expect("small") * 16;
    for (nodes, rounds, wanted) in ROUNDS {
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        let mut reason = None;
        // In turns, so that a change in the speed of the machine meets both.
        for _ in 0..rounds {
            mine.push(ours(nodes, port));
            port += 4;
            match reason.is_none().then(|| torch(nodes)) {
                Some(Ok(taken)) => theirs.push(taken),
                Some(Err(error)) => reason = Some(error),
                None => {}
            }
        }
        let mine = median(mine);
        print!("preflight: {nodes} nodes: {mine:.1?}");
        match reason {
            Some(reason) => println!("; SKIPPED the comparison with torch's TCPStore: {reason}"),
            None => {
                let theirs = median(theirs);
                let ratio = theirs.as_secs_f64() / mine.as_secs_f64();
                println!("; torch's TCPStore {theirs:.1?}, ratio {ratio:.1} (at least {wanted} wanted)");
            }
        }
    }
}
