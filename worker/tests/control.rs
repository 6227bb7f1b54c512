//! The control group between real processes: this test binary started again, once for each
//! rank, told by lines what to do.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis::system::sockets;
use palingenesis_worker::comm::control::{Control, Terms};
use palingenesis_worker::comm::recorder::Recorder;
use palingenesis_worker::comm::{Op, Tag};

/// For what certainly happens: a machine may be busy.
const SURELY: Duration = Duration::from_secs(20);

const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
const OTHER_KEY: &str = "100102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/// No test: one rank, in a process of its own.
#[test]
fn rank_process() {
    let Ok(words) = std::env::var("TEST_RANK") else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [rank, world, host, master, port, key, start, silence] = words[..] else { panic!("{words:?}") };
    let seconds = |text: &str| Duration::from_secs_f64(text.parse().unwrap());
    let terms = Terms {
        rank: rank.parse().unwrap(),
        world_size: world.parse().unwrap(),
        host: host.to_owned(),
        master: (master.to_owned(), port.parse().unwrap()),
        key: Key::from_hex(key),
        start: seconds(start),
        silence: seconds(silence),
    };
    let say = |text: &str| {
        let mut out = std::io::stdout().lock();
        // libtest's own words may stand before it on the line.
        out.write_all(format!("\n@{text}\n").as_bytes()).and_then(|()| out.flush()).unwrap();
    };
    let (control, peers) = match Control::join(&terms, 40_000 + terms.rank as u16) {
        Ok(joined) => joined,
        Err(error) => return say(&format!("error {error}")),
    };
    let peers: Vec<String> = peers.iter().map(|peer| format!("{}={}={}", peer.rank, peer.host, peer.address)).collect();
    say(&format!("joined {}", peers.join(" ")));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        match command {
            "record" => {
                control.record(Recorder::create(argument.as_ref(), terms.rank, terms.world_size, &terms.host).unwrap());
            }
            "enter" => control.enter(argument.parse().unwrap(), Op::AllGather, Tag::of("block", 17), 1000),
            "leave" => control.leave(),
            "broken" => say(&control.broken().map_or("whole".to_owned(), |error| error.to_string())),
            // As a data connection waits: by the descriptor.
            "wait" => {
                let limit = seconds(argument);
                let readable = sockets::wait(&[(control.fd(), false)], limit) == [true];
                let verdict = control.verdict(Duration::ZERO);
                assert_eq!(readable, verdict.is_some());
                say(&verdict.map_or("whole".to_owned(), |error| error.to_string()));
            }
            "waiting" => say(&control.waiting_for(argument.parse().unwrap())),
            "fail" => {
                control.fail(argument);
                break;
            }
            "panic" => panic!("as the test wants it"),
            "end" => {
                control.end();
                return say("ended");
            }
            _ => panic!("{line:?}"),
        }
        say("done");
    }
}

struct Rank {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Rank {
    fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn hears(&self) -> String {
        self.hears_within(SURELY).unwrap_or_else(|| panic!("it says nothing"))
    }

    fn hears_within(&self, limit: Duration) -> Option<String> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("it has ended"),
        }
    }

    fn does(&mut self, line: &str) {
        self.send(line);
        assert_eq!(self.hears(), "done", "{line}");
    }

    fn answers(&mut self, line: &str) -> String {
        self.send(line);
        let answer = self.hears();
        assert_eq!(self.hears(), "done", "{line}");
        answer
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: takes numbers only; the process is our child, not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A launch on this machine.
#[derive(Clone)]
struct Launch {
    world: u32,
    port: u16,
    master: &'static str,
    key: &'static str,
    start: f64,
    silence: f64,
}

/// A port that no program has, below those that the kernel gives to anybody.
fn free_port() -> u16 {
    let mut at = std::process::id().wrapping_mul(31);
    loop {
        let random: [u8; 2] = palingenesis::system::random::bytes().unwrap();
        at = at.wrapping_add(u32::from(u16::from_ne_bytes(random)));
        let port = 20_000 + (at % 12_000) as u16;
        if sockets::listen(([0, 0, 0, 0], port).into(), false).is_ok() {
            return port;
        }
    }
}

impl Launch {
    fn of(world: u32) -> Launch {
        Launch { world, port: free_port(), master: "127.0.0.1", key: KEY, start: 15.0, silence: 10.0 }
    }

    fn rank(&self, rank: u32) -> Rank {
        self.rank_on(rank, &format!("h{rank}"))
    }

    fn rank_on(&self, rank: u32, host: &str) -> Rank {
        let Launch { world, port, master, key, start, silence } = self;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env("TEST_RANK", format!("{rank} {world} {host} {master} {port} {key} {start} {silence}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { return };
                if let Some(line) = line.strip_prefix('@')
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Rank { child, input, lines }
    }

    /// All ranks, joined.
    fn joined(&self) -> Vec<Rank> {
        let ranks: Vec<Rank> = (0..self.world).map(|rank| self.rank(rank)).collect();
        for rank in &ranks {
            let line = rank.hears();
            assert!(line.starts_with("joined"), "{line}");
        }
        ranks
    }
}

#[test]
fn all_ranks_learn_where_all_are_and_end_in_order() {
    for key in [KEY, "-"] {
        // Rank 0 comes last: the others wait for it.
        let launch = Launch { key, ..Launch::of(4) };
        let mut ranks: Vec<Rank> = (1..4).map(|rank| launch.rank(rank)).collect();
        std::thread::sleep(Duration::from_millis(200));
        ranks.insert(0, launch.rank(0));
        let expected: Vec<String> = (0..4).map(|rank| format!("{rank}=h{rank}=127.0.0.1:{}", 40_000 + rank)).collect();
        for rank in &ranks {
            assert_eq!(rank.hears(), format!("joined {}", expected.join(" ")), "key {key}");
        }
        for rank in &mut ranks[1..] {
            assert_eq!(rank.answers("broken"), "whole");
            rank.send("end");
            assert_eq!(rank.hears(), "ended");
        }
        assert_eq!(ranks[0].answers("wait 1"), "whole", "who is done is not gone");
        ranks[0].send("end");
        assert_eq!(ranks[0].hears(), "ended");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_within_moments() {
    for victim in 0..3 {
        let mut ranks = Launch::of(3).joined();
        for rank in &mut ranks {
            rank.does("enter 8812");
        }
        // One heartbeat.
        std::thread::sleep(Duration::from_millis(1500));
        let killed = ranks.remove(victim);
        killed.signal(libc::SIGKILL);
        let began = Instant::now();
        for rank in &mut ranks {
            let verdict = rank.answers("wait 20");
            assert!(
                verdict.starts_with(&format!("rank {victim} on h{victim} is gone (its connection was ")),
                "{verdict}"
            );
            assert!(verdict.ends_with(") in all_gather #8812 of block 17"), "{verdict}");
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
}

#[test]
fn a_stopped_rank_is_gone_when_it_was_silent_for_too_long() {
    for victim in [0, 2] {
        let mut ranks = Launch { silence: 3.0, ..Launch::of(3) }.joined();
        let stopped = ranks.remove(victim);
        stopped.signal(libc::SIGSTOP);
        for rank in &mut ranks {
            let verdict = rank.answers("wait 20");
            let expected = format!("rank {victim} on h{victim} is gone (nothing was heard of it for 3 s) in ");
            assert!(verdict.starts_with(&expected), "{verdict}");
        }
        // Woken up it learns what the others think of it.
        let mut woken = stopped;
        woken.signal(libc::SIGCONT);
        let verdict = woken.answers("wait 20");
        assert!(verdict.contains("nothing was heard of it for 3 s") || verdict.contains("rank 0 is gone"), "{verdict}");
    }
}
