//! The control group between real processes: this test binary started again, once for each
//! rank, told by lines what to do.

#[path = "common/port.rs"]
mod port;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis::facts::Environment;
use palingenesis::system::sockets;
use palingenesis::system::user::effective_uid;
use palingenesis_worker::comm::control::{Control, Terms, store_key};
use palingenesis_worker::comm::recorder::{Recorder, merge};
use palingenesis_worker::comm::{CommError, Op, Tag};
use port::free_port;

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
        Err(error @ CommError::Refused(_)) => return say(&format!("refused {error}")),
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
            "drop" => return,
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

impl Launch {
    fn of(world: u32) -> Launch {
        Launch { world, port: free_port("0.0.0.0"), master: "127.0.0.1", key: KEY, start: 15.0, silence: 10.0 }
    }

    fn rank(&self, rank: u32) -> Rank {
        self.rank_on(rank, &format!("h{rank}"))
    }

    fn rank_on(&self, rank: u32, host: &str) -> Rank {
        self.start(rank, host, Stdio::null(), |_| {})
    }

    fn start(&self, rank: u32, host: &str, errors: Stdio, change: impl FnOnce(&mut Command)) -> Rank {
        let Launch { world, port, master, key, start, silence } = self;
        let mut command = Command::new(std::env::current_exe().unwrap());
        change(&mut command);
        let mut child = command
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env("TEST_RANK", format!("{rank} {world} {host} {master} {port} {key} {start} {silence}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
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

/// A whole job that Slurm suspends stands still with all its clocks.
#[test]
fn a_job_that_was_suspended_as_a_whole_goes_on() {
    let mut ranks = Launch { silence: 3.0, ..Launch::of(3) }.joined();
    ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
    std::thread::sleep(Duration::from_secs(5));
    ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT));
    for rank in &mut ranks {
        assert_eq!(rank.answers("wait 1"), "whole");
    }
}

#[test]
fn a_rank_that_ends_with_an_error_says_why_to_all() {
    for victim in 0..3 {
        let mut ranks = Launch::of(3).joined();
        let mut fails = ranks.remove(victim);
        fails.send("fail /scratch/run: no space left on device");
        for rank in &mut ranks {
            assert_eq!(
                rank.answers("wait 20"),
                format!("rank {victim} on h{victim} has ended: /scratch/run: no space left on device")
            );
        }
    }
}

#[test]
fn a_rank_that_panics_says_so_and_one_that_only_leaves_is_gone() {
    let mut ranks = Launch::of(3).joined();
    ranks[1].send("panic");
    assert_eq!(ranks[2].answers("wait 20"), "rank 1 on h1 has ended: it panicked");
    let mut ranks = Launch::of(2).joined();
    ranks[0].send("drop");
    let verdict = ranks[1].answers("wait 20");
    assert!(verdict.starts_with("rank 0 on h0 is gone (its connection was "), "{verdict}");
}

/// The first is named, and not who ends because of it.
#[test]
fn who_ends_because_another_is_gone_is_not_blamed() {
    let mut ranks = Launch::of(4).joined();
    ranks[3].signal(libc::SIGKILL);
    let verdict = ranks[2].answers("wait 20");
    ranks[2].send(&format!("fail {verdict}"));
    for rank in [0, 1] {
        assert_eq!(ranks[rank].answers("wait 20"), verdict);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(ranks[rank].answers("broken"), verdict);
    }
}

#[test]
fn who_is_waited_for_is_known_everywhere() {
    let mut ranks = Launch::of(3).joined();
    for rank in &mut ranks {
        rank.does("enter 7");
        rank.does("leave");
    }
    ranks[0].does("enter 8");
    ranks[2].does("enter 8");
    std::thread::sleep(Duration::from_millis(2500));
    for rank in [0, 2] {
        assert_eq!(
            ranks[rank].answers("waiting 8"),
            "rank 1 on h1, which is at its own work after all_gather #7 of block 17"
        );
    }
    ranks[1].does("enter 8");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(ranks[2].answers("waiting 8"), "data: all ranks are in it, as far as they said");
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let launch = Launch { start: 4.0, ..Launch::of(8) };
    let ranks: Vec<Rank> = [0, 1, 2, 4].map(|rank| launch.rank(rank)).into();
    for rank in &ranks {
        let line = rank.hears();
        assert!(line.starts_with("error ranks 3 5-7 of 8 have not come to rank 0 on h0 at 127.0.0.1:"), "{line}");
        assert!(line.contains(" within 4 s; see in srun's output whether they have started"), "{line}");
    }
    // Without rank 0 nobody decides.
    let launch = Launch { start: 2.0, ..Launch::of(2) };
    let line = launch.rank(1).hears();
    assert!(line.starts_with("error rank 1 on h1 has not reached rank 0 at 127.0.0.1:"), "{line}");
    assert!(line.contains(" within 2 s: 127.0.0.1: Connection refused"), "{line}");
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named() {
    for victim in [0, 1] {
        let launch = Launch::of(4);
        let mut ranks: Vec<Rank> = (0..3).map(|rank| launch.rank(rank)).collect();
        // Rank 3 never comes; the others are there.
        assert_eq!(ranks[2].hears_within(Duration::from_secs(2)), None);
        ranks.remove(victim).signal(libc::SIGKILL);
        for rank in &ranks {
            let line = rank.hears();
            let host = if victim == 0 { "127.0.0.1" } else { "h1" };
            assert!(line.starts_with(&format!("error rank {victim} on {host} is gone (its connection was ")), "{line}");
        }
    }
}

#[test]
fn who_comes_late_is_told_why_there_is_no_training() {
    let launch = Launch::of(3);
    let mut ranks: Vec<Rank> = (0..2).map(|rank| launch.rank(rank)).collect();
    assert_eq!(ranks[1].hears_within(Duration::from_secs(1)), None);
    ranks.remove(1).signal(libc::SIGKILL);
    std::thread::sleep(Duration::from_millis(500));
    ranks.push(launch.rank(2));
    for rank in &ranks {
        let line = rank.hears();
        assert!(line.starts_with("error rank 1 on h1 is gone (its connection was "), "{line}");
    }
}

#[test]
fn a_rank_that_is_stopped_before_all_have_come_is_named() {
    for victim in [0, 1] {
        let launch = Launch { silence: 3.0, ..Launch::of(4) };
        let mut ranks: Vec<Rank> = (0..3).map(|rank| launch.rank(rank)).collect();
        assert_eq!(ranks[2].hears_within(Duration::from_secs(1)), None);
        let stopped = ranks.remove(victim);
        stopped.signal(libc::SIGSTOP);
        for rank in &ranks {
            let (line, host) = (rank.hears(), if victim == 0 { "127.0.0.1" } else { "h1" });
            let expected =
                format!("error rank {victim} on {host} is gone (nothing was heard of it for 3 s) in the start");
            assert_eq!(line, expected);
        }
    }
}

/// Before, in the middle of, and after the handshake.
#[test]
fn a_rank_killed_at_any_moment_of_the_start_leaves_nobody_waiting() {
    let kill = |victim: usize, delay: u64| {
        let launch = Launch { start: 6.0, ..Launch::of(3) };
        let mut ranks: Vec<Rank> = (0..3).map(|rank| launch.rank(rank)).collect();
        std::thread::sleep(Duration::from_millis(delay));
        ranks.remove(victim).signal(libc::SIGKILL);
        for rank in &mut ranks {
            let mut line = rank.hears();
            if line.starts_with("joined") {
                line = rank.answers("wait 20");
            }
            assert!(line.contains(&format!("rank {victim} ")), "{line}");
        }
    };
    std::thread::scope(|scope| {
        for (victim, delay) in [(0, 0), (0, 6), (1, 3), (2, 8), (0, 15), (1, 30)] {
            scope.spawn(move || kill(victim, delay));
        }
    });
}

/// Both would wait for ranks that are not: <https://github.com/pytorch/pytorch/issues/23074>.
#[test]
fn a_rank_that_is_there_twice_is_told_with_both_hosts() {
    let launch = Launch::of(4);
    let ranks = [(0, "n1"), (1, "n1"), (2, "n2")].map(|(rank, host)| launch.rank_on(rank, host));
    assert_eq!(ranks[2].hears_within(Duration::from_secs(1)), None);
    let twice = launch.rank_on(1, "n2");
    for rank in ranks.iter().chain([&twice]) {
        let line = rank.hears();
        assert!(
            line.starts_with("refused rank 1 is there twice: on n1 and on n2; each process needs a RANK"),
            "{line}"
        );
    }
    // Later it is none of the others' business.
    let launch = Launch::of(2);
    let mut ranks = launch.joined();
    let line = launch.rank_on(1, "n9").hears();
    assert!(line.starts_with("refused rank 1 is there twice: on h1 and on n9;"), "{line}");
    let line = launch.rank_on(0, "n9").hears();
    assert!(line.starts_with("error rank 0 on n9 cannot listen at port"), "{line}");
    for rank in &mut ranks {
        assert_eq!(rank.answers("wait 1"), "whole");
    }
}

/// "world_size=2, worker_count=4", after 30 minutes:
/// <https://github.com/tczhangzhi/pytorch-distributed/issues/18>.
#[test]
fn another_world_size_is_told_with_both_hosts() {
    let launch = Launch::of(2);
    let ranks = [launch.rank(0), Launch { world: 4, ..launch }.rank(1)];
    for rank in &ranks {
        let line = rank.hears();
        assert!(line.starts_with("refused rank 1 on h1 has WORLD_SIZE=4, rank 0 on h0 has WORLD_SIZE=2;"), "{line}");
    }
}

#[test]
fn another_launch_s_rank_is_no_rank_of_this_one() {
    let launch = Launch { start: 5.0, ..Launch::of(2) };
    let ranks = [launch.rank(0), Launch { key: OTHER_KEY, ..launch.clone() }.rank(1)];
    let line = ranks[0].hears();
    assert!(line.starts_with("error rank 1 of 2 has not come to rank 0 on h0"), "{line}");
    assert!(line.contains(" turned away, the last from 127.0.0.1: it does not know this launch's store key"), "{line}");
    let line = ranks[1].hears();
    assert!(
        line.contains("somebody else: 127.0.0.1: it closed the connection when it was shown this rank's"),
        "{line}"
    );
    for (own, other, says) in
        [(KEY, "-", "it has a store key, this rank has none"), ("-", KEY, "it has no store key, this rank has one")]
    {
        let launch = Launch { start: 4.0, key: own, ..Launch::of(2) };
        let ranks = [launch.rank(0), Launch { key: other, ..launch.clone() }.rank(1)];
        let line = ranks[1].hears();
        assert!(line.contains(says), "{line}");
        assert!(!line.contains(KEY) && !ranks[0].hears().contains(KEY));
    }
}

#[test]
fn several_hosts_without_a_key_are_refused() {
    // TEST-NET-1 of RFC 5737: another host.
    let launch = Launch { key: "-", master: "192.0.2.1", ..Launch::of(2) };
    let line = launch.rank(1).hears();
    assert!(line.starts_with("refused rank 1 on h1 and rank 0 at 192.0.2.1:"), "{line}");
    assert!(
        line.contains(", but no store key: without one anybody who reaches the port could pose as a rank;"),
        "{line}"
    );
    assert!(line.contains("srun --palingenesis=worker") && line.contains("comm.key_file"), "{line}");
}

/// Without a key the kernel says whose process it is.
#[test]
fn another_user_s_process_is_no_rank() {
    if effective_uid() != 0 {
        eprintln!("SKIPPED: it takes root to be two users");
        return;
    }
    let launch = Launch { key: "-", start: 3.0, ..Launch::of(2) };
    let first = launch.rank(0);
    // The program, where that user can read it.
    let folder = std::env::temp_dir().join(format!("palingenesis-user-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("rank");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let nobody = launch.start(1, "h1", Stdio::null(), |command| {
        *command = Command::new(&program);
        command.uid(65534).gid(65534).current_dir("/");
    });
    let line = nobody.hears();
    assert!(line.contains("somebody else: 127.0.0.1: it is user 0's"), "{line}");
    let line = first.hears();
    assert!(line.starts_with("error rank 1 of 2 has not come"), "{line}");
    // And who does not look whose the listener is.
    let launch = Launch { key: "-", start: 3.0, ..Launch::of(2) };
    let first = launch.rank(0);
    let mut python = Command::new("/usr/bin/python3");
    python.uid(65534).gid(65534).current_dir("/").args(["-c", KEYLESS_RANK, &launch.port.to_string()]);
    let Ok(output) = python.output() else {
        eprintln!("SKIPPED: no python3 on this machine");
        return;
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "greeted\nturned away\n", "{output:?}");
    let line = first.hears();
    assert!(line.contains(" turned away, the last from 127.0.0.1: it is user 65534's"), "{line}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// A reply as wire.rs describes it, for a launch without a key.
const KEYLESS_RANK: &str = r#"
import json, socket, struct, sys, time
for _ in range(100):
    try:
        s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
assert s.recv(43)[:8] == b"PLGstore"
print("greeted")
hello = json.dumps({"rank": 1, "world_size": 2, "host": "h1", "port": 1, "release": "0.1.0"}).encode()
s.sendall(b"PLGstore" + struct.pack(">H32sH", 1, b"", len(hello)) + hello)
try:
    print("taken" if s.recv(1) else "turned away")
except ConnectionResetError:
    print("turned away")
"#;

/// What a person sees who waits, too.
#[test]
fn who_is_waited_for_is_told_now_and_then() {
    let folder = std::env::temp_dir().join(format!("palingenesis-waiting-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let errors = folder.join("stderr");
    let launch = Launch { start: 6.0, ..Launch::of(8) };
    let file = std::fs::File::create(&errors).unwrap();
    let first = launch.start(0, "h0", file.into(), |_| {});
    let _others = [1, 2, 4].map(|rank| launch.rank(rank));
    assert!(first.hears().starts_with("error ranks 3 5-7 of 8 have not come"));
    let told = std::fs::read_to_string(&errors).unwrap();
    assert!(told.contains("palingenesis-worker: waiting for ranks 3 5-7 of 8, 5 s\n"), "{told}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn ranks_meet_over_ipv6_and_by_name() {
    for master in ["::1", "localhost"] {
        if master == "::1" && TcpListener::bind("[::1]:0").is_err() {
            eprintln!("SKIPPED: no IPv6 on this machine");
            continue;
        }
        let launch = Launch { master, ..Launch::of(2) };
        let [first, second] = [launch.rank(0), launch.rank(1)];
        assert!(first.hears().starts_with("joined 0=h0=127.0.0.1:40000 1=h1="));
        let line = second.hears();
        let expected = ["[::1]", "127.0.0.1"].map(|ip| format!("joined 0=h0={ip}:40000 1=h1={ip}:40001"));
        assert!(expected.contains(&line), "{line}");
    }
}

/// Who says nothing, or anything, or comes in thousands.
#[test]
fn strangers_keep_no_rank_out() {
    for key in [KEY, "-"] {
        let launch = Launch { key, ..Launch::of(3) };
        let first = launch.rank(0);
        let to = ("127.0.0.1", launch.port);
        let connect = || {
            let began = Instant::now();
            loop {
                match TcpStream::connect(to) {
                    Ok(stream) => return stream,
                    Err(error) => assert!(began.elapsed() < SURELY, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        let mut strangers: Vec<TcpStream> = (0..400).map(|_| connect()).collect();
        for (number, stranger) in strangers.iter_mut().enumerate() {
            // Some of them were dropped: there are too many.
            let _ = match number % 4 {
                0 => stranger.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                1 => stranger.write_all(b"PLGstore"),
                2 => stranger.write_all(&[0xff; 100_000]),
                _ => Ok(()),
            };
        }
        let others = [launch.rank(1), launch.rank(2)];
        // And 10,000 more, while the ranks come and while they run.
        let began = Instant::now();
        let came =
            (0..10_000).take_while(|_| began.elapsed() < SURELY).filter(|_| TcpStream::connect(to).is_ok()).count();
        eprintln!("{came} strangers came and went in {:?}", began.elapsed());
        for rank in others.iter().chain([&first]) {
            let line = rank.hears();
            assert!(line.starts_with("joined"), "{line}");
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", first.child.id())).unwrap();
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix(" kB")?.trim().parse().ok());
        assert!(peak.is_some_and(|kib: u64| kib < 64 << 10), "{peak:?} KiB");
        for rank in &mut others.into_iter().chain([first]).collect::<Vec<Rank>>() {
            assert_eq!(rank.answers("broken"), "whole");
        }
    }
}

/// Rank 0 fails at once, one of the others hangs for ever:
/// <https://github.com/pytorch/pytorch/issues/129367>.
#[test]
fn a_port_that_is_taken_is_told_with_who_has_it() {
    let launch = Launch { start: 3.0, ..Launch::of(2) };
    let holder = TcpListener::bind(("127.0.0.1", launch.port)).unwrap();
    let ranks = [launch.rank(0), launch.rank(1)];
    let line = ranks[0].hears();
    assert!(line.starts_with(&format!("error rank 0 on h0 cannot listen at port {}:", launch.port)), "{line}");
    assert!(line.contains(&format!(" (process {}) of user ", std::process::id())), "{line}");
    assert!(line.contains("MASTER_PORT"), "{line}");
    let line = ranks[1].hears();
    assert!(
        line.contains("does not find rank 0 at") && line.contains("somebody else: 127.0.0.1: it says nothing"),
        "{line}"
    );
    drop(holder);
}

#[test]
fn the_recorder_says_what_a_killed_rank_was_at() {
    let folder = std::env::temp_dir().join(format!("palingenesis-control-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |rank: usize| folder.join(format!("rank-{rank}"));
    let launch = Launch::of(3);
    let mut ranks = launch.joined();
    for (number, rank) in ranks.iter_mut().enumerate() {
        rank.does(&format!("record {}", file(number).display()));
        for sequence in 1..=20 {
            rank.does(&format!("enter {sequence}"));
            rank.does("leave");
        }
    }
    ranks[0].does("enter 21");
    ranks[1].does("enter 21");
    for rank in &ranks {
        rank.signal(libc::SIGKILL);
    }
    drop(ranks);
    // The next start has the same port, at once.
    let ranks = launch.joined();
    drop(ranks);
    let text = merge(&[file(0), file(1), file(2)]).unwrap();
    assert!(
        text.contains("rank 2 on h2 never entered all_gather #21 of block 17; ranks 0-1 on h0 h1 wait in it since "),
        "{text}"
    );
    assert!(text.contains("left all_gather #20 of block 17 (1000 f32) at "), "{text}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_store_key_is_taken_from_the_environment_or_a_file_that_is_the_user_s_alone() {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = std::env::temp_dir().join(format!("palingenesis-key-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("key");
    write(&path, format!("{KEY}\n")).unwrap();
    let mode = |mode| set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    let with = |value: Option<&str>| {
        let mut environment = Environment::default();
        value.into_iter().for_each(|value| environment.set("PALINGENESIS_STORE_KEY", value));
        environment
    };
    let (none, own) = (with(None), with(Some(OTHER_KEY)));
    let refused = |path: &Path, why: &str| {
        let error = store_key(&none, Some(path), 4, Some(2)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("comm.key_file={} {why}", path.display())), "{error}");
        assert!(!error.contains(KEY), "{error}");
    };
    mode(0o600);
    assert_eq!(store_key(&none, Some(&path), 4, Some(2)).unwrap(), Key::from_hex(KEY));
    assert_eq!(store_key(&own, Some(&path), 4, Some(2)).unwrap(), Key::from_hex(OTHER_KEY));
    for open in [0o640, 0o604, 0o660, 0o700, 0o4600] {
        mode(open);
        refused(&path, &format!("has mode {open:04o}, so others may know it; make a new one with mode 0600"));
    }
    mode(0o600);
    let link = folder.join("link");
    symlink(&path, &link).unwrap();
    refused(&link, "is a symbolic link");
    refused(&folder.join("missing"), "cannot be read: No such file");
    refused(&folder, "is no regular file");
    let fifo = folder.join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    refused(&fifo, "is no regular file");
    for (text, why) in [
        ("", "is empty"),
        ("secret", "has 6 characters, not 64 hexadecimal digits"),
        (&"0".repeat(64), "is one byte again and again"),
        (&format!("{KEY} {KEY}"), "has 129 characters, not 64 hexadecimal digits"),
        (&"xy".repeat(32), "has characters that are no hexadecimal digits"),
    ] {
        write(&path, text).unwrap();
        refused(&path, why);
        let error = store_key(&with(Some(text)), None, 4, Some(2)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("PALINGENESIS_STORE_KEY {why}")), "{error}");
    }
    if effective_uid() == 0 {
        write(&path, KEY).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        refused(&path, "belongs to user 65534, not to you (user 0)");
    }
    assert_eq!(store_key(&none, None, 4, Some(4)).unwrap(), None, "one host needs none");
    assert_eq!(store_key(&none, None, 1, Some(1)).unwrap(), None);
    let error = store_key(&none, None, 4, Some(2)).unwrap_err().to_string();
    assert!(error.starts_with("4 ranks, 2 of them on this host, but no store key:"), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}
