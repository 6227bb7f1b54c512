//! The collectives over sockets, between threads and between processes, against plain sums.

#[path = "common/port.rs"]
mod port;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis_worker::comm::control::Terms;
use palingenesis_worker::comm::tcp::Tcp;
use palingenesis_worker::comm::{Collective, CommError, Exchange, Ongoing, Tag, connect};
use palingenesis_worker::engine::Cpu;
use palingenesis_worker::shard::{self, ShardError};
use port::free_port;

const TIMEOUT: Duration = Duration::from_secs(60);

/// How a group of ranks is brought together.
#[derive(Clone)]
struct How {
    world: u32,
    key: Option<Key>,
    /// Of each rank: those with the same name are on one host.
    host: fn(u32) -> String,
    timeout: Duration,
}

fn one_host(_: u32) -> String {
    "here".into()
}

/// TCP, as between hosts.
fn many_hosts(rank: u32) -> String {
    format!("n{rank}")
}

impl How {
    fn new(world: u32) -> How {
        How { world, key: Some(Key::new().unwrap()), host: one_host, timeout: TIMEOUT }
    }

    fn terms(&self, rank: u32, port: u16) -> Terms {
        Terms {
            rank,
            world_size: self.world,
            host: (self.host)(rank),
            master: ("127.0.0.1".into(), port),
            key: self.key.clone(),
            start: TIMEOUT,
            silence: TIMEOUT,
        }
    }

    /// Each rank is a thread; what each of them gives.
    fn run<T: Send + 'static>(&self, work: impl Fn(&mut Tcp) -> T + Copy + Send + 'static) -> Vec<T> {
        let port = free_port("127.0.0.1");
        let ranks: Vec<_> = (0..self.world)
            .map(|rank| {
                let how = self.clone();
                thread::spawn(move || {
                    let mut tcp = connect(&how.terms(rank, port), how.timeout).unwrap();
                    assert_eq!((tcp.rank(), tcp.world_size()), (rank, how.world));
                    let given = work(&mut tcp);
                    tcp.end();
                    given
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }
}

/// Small whole numbers, whose sums are exact in any order.
fn number(rank: u32, at: usize) -> f32 {
    ((at * 7 + rank as usize * 13) % 101) as f32
}

fn numbers(rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|at| number(rank, at)).collect()
}

/// An operation, from its beginning to its end.
fn whole(tcp: &mut Tcp, begin: impl FnOnce(&mut Tcp, &Cpu) -> shard::Result<Ongoing>) -> Result<(), CommError> {
    let cpu = Cpu::new(Some(1));
    match begin(tcp, &cpu).and_then(|ongoing| tcp.finish(&cpu, ongoing)) {
        Err(ShardError::Comm(error)) => Err(error),
        Err(other) => panic!("{other}"),
        Ok(()) => Ok(()),
    }
}

fn all_reduce(tcp: &mut Tcp, tag: Tag, values: &mut [f32]) -> Result<(), CommError> {
    whole(tcp, |tcp, cpu| tcp.all_reduce(cpu, tag, values))
}

fn all_gather(tcp: &mut Tcp, tag: Tag, full: &mut [f32]) -> Result<(), CommError> {
    whole(tcp, |tcp, cpu| tcp.all_gather(cpu, tag, full))
}

fn reduce_scatter(tcp: &mut Tcp, tag: Tag, full: &mut [f32]) -> Result<(), CommError> {
    whole(tcp, |tcp, cpu| tcp.reduce_scatter(cpu, tag, full))
}

fn sums(world: u32, count: usize) -> Vec<f32> {
    (0..count).map(|at| (0..world).map(|rank| number(rank, at)).sum()).collect()
}

const COUNTS: [usize; 9] = [0, 1, 2, 3, 5, 1000, 4097, 70_001, 300_003];

fn check_all(how: &How) {
    let world = how.world;
    how.run(move |tcp| {
        let rank = tcp.rank();
        for (index, count) in COUNTS.into_iter().enumerate() {
            let tag = Tag::of("test", index as u32);
            let mut values = numbers(rank, count);
            all_reduce(tcp, tag, &mut values).unwrap();
            assert_eq!(values, sums(world, count), "all_reduce of {count} by {world}");

            let mut full = vec![-1.0; count * world as usize];
            full[rank as usize * count..][..count].copy_from_slice(&numbers(rank, count));
            all_gather(tcp, tag, &mut full).unwrap();
            let expected: Vec<f32> = (0..world).flat_map(|rank| numbers(rank, count)).collect();
            assert_eq!(full, expected, "all_gather of {count} by {world}");

            let mut full = numbers(rank, count * world as usize);
            reduce_scatter(tcp, tag, &mut full).unwrap();
            let own = rank as usize * count..(rank as usize + 1) * count;
            let expected = &sums(world, count * world as usize)[own.clone()];
            assert_eq!(&full[own], expected, "reduce_scatter of {count} by {world}");

            let bytes = |rank: u32| vec![rank as u8 + 1; (count * rank as usize) % 10_007];
            let all = tcp.exchange(tag, &bytes(rank)).unwrap();
            assert_eq!(all, (0..world).map(bytes).collect::<Vec<_>>(), "exchange of {count} by {world}");

            for root in 0..world {
                let mut said = bytes(rank);
                tcp.broadcast(tag, root, &mut said).unwrap();
                assert_eq!(said, bytes(root), "broadcast of {count} from {root} of {world}");
            }
            let mut total = [f64::from(rank), 0.5];
            tcp.sum(tag, &mut total).unwrap();
            assert_eq!(total, [f64::from(world * (world - 1) / 2), 0.5 * f64::from(world)]);
        }
        tcp.barrier(Tag::of("end", 0)).unwrap();
    });
}

#[test]
fn all_operations_give_plain_sums_and_copies_for_any_world_and_count() {
    for world in 1..=5 {
        check_all(&How::new(world));
    }
}

#[test]
fn between_hosts_they_do_too() {
    for world in [2, 3, 5] {
        check_all(&How { host: many_hosts, ..How::new(world) });
    }
}

#[test]
fn without_a_key_they_do_on_one_host() {
    check_all(&How { key: None, ..How::new(4) });
}

/// A sum whose rounding depends on its order.
#[test]
fn a_sum_has_the_same_bits_on_all_ranks_and_each_time() {
    for count in [100, 300_003] {
        let sum = move |tcp: &mut Tcp| {
            let mut values: Vec<f32> =
                (0..count).map(|at| 1.0 / (1.0 + at as f32 + 1000.0 * tcp.rank() as f32)).collect();
            all_reduce(tcp, Tag::of("test", 0), &mut values).unwrap();
            tcp.barrier(Tag::of("end", 0)).unwrap();
            values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>()
        };
        let mut all = How::new(4).run(sum);
        all.extend(How { host: many_hosts, ..How::new(4) }.run(sum));
        assert!(all.iter().all(|bits| *bits == all[0]), "{count} numbers");
    }
}

/// Both neighbours send more than any socket holds before either receives.
#[test]
fn messages_larger_than_all_buffers_cross_without_a_deadlock() {
    const BYTES: usize = 24 << 20;
    How::new(2).run(|tcp| {
        let rank = tcp.rank();
        let all = tcp.exchange(Tag::of("big", 0), &vec![rank as u8; BYTES]).unwrap();
        assert!(all.iter().zip(0u8..).all(|(bytes, rank)| bytes.len() == BYTES && bytes.iter().all(|b| *b == rank)));
        let mut values = numbers(rank, BYTES / 4);
        all_reduce(tcp, Tag::of("big", 1), &mut values).unwrap();
        assert!(values == sums(2, BYTES / 4));
        tcp.barrier(Tag::of("end", 0)).unwrap();
    });
}

/// Rank 2 of 4 does something else than the others: all of them say so, and name it.
/// NCCL may hang there, or give wrong numbers: <https://github.com/NVIDIA/nccl/issues/1417>.
fn all_name_rank_2(work: fn(&mut Tcp, bool) -> Result<(), CommError>, ours: &str, theirs: &str) {
    let started = Instant::now();
    let errors = How::new(4).run(move |tcp| {
        let wrong = tcp.rank() == 2;
        // All are connected before one fails.
        let first = tcp.barrier(Tag::of("start", 0)).and_then(|()| work(tcp, wrong)).unwrap_err();
        // The group is of no more use, and says so again.
        assert_eq!(tcp.barrier(Tag::of("next", 0)).unwrap_err(), first);
        first
    });
    for error in errors {
        let CommError::Mismatch { rank, by, .. } = &error else { panic!("{error}") };
        assert!((*rank == 2) != (*by == 2), "{error}");
        let text = error.to_string();
        assert!(text.contains(ours) && text.contains(theirs), "{text}");
        assert!(text.contains("rank 2 on here"), "{text}");
    }
    assert!(started.elapsed() < TIMEOUT / 2);
}

#[test]
fn ranks_at_different_operations_are_an_error_that_names_both() {
    all_name_rank_2(
        |tcp, wrong| {
            let mut full = vec![0.0; 36_000];
            match wrong {
                true => reduce_scatter(tcp, Tag::of("block", 7), &mut full),
                false => all_gather(tcp, Tag::of("block", 7), &mut full),
            }
        },
        "all_gather #2 of block 7 (9000 f32)",
        "reduce_scatter #2 of block 7 (36000 f32)",
    );
}

#[test]
fn ranks_with_different_counts_are_an_error_that_names_both() {
    for (few, many) in [(9, 10), (900_000, 900_001)] {
        let work = match few {
            9 => {
                |tcp: &mut Tcp, wrong: bool| all_reduce(tcp, Tag::of("norm", 0), &mut vec![0.0; 9 + usize::from(wrong)])
            }
            _ => |tcp: &mut Tcp, wrong: bool| {
                all_reduce(tcp, Tag::of("norm", 0), &mut vec![0.0; 900_000 + usize::from(wrong)])
            },
        };
        all_name_rank_2(
            work,
            &format!("all_reduce #2 of norm 0 ({few} f32)"),
            &format!("all_reduce #2 of norm 0 ({many} f32)"),
        );
    }
}

#[test]
fn ranks_at_different_blocks_are_an_error_that_names_both() {
    all_name_rank_2(
        |tcp, wrong| tcp.barrier(Tag::of(if wrong { "save" } else { "step" }, 3)),
        "barrier #2 of step 3",
        "barrier #2 of save 3",
    );
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_over() {
    let how = How { timeout: Duration::from_secs(3), ..How::new(3) };
    let errors = how.run(|tcp| {
        tcp.barrier(Tag::of("start", 0)).unwrap();
        if tcp.rank() == 1 {
            // It lives, and computes.
            thread::sleep(Duration::from_secs(5));
        }
        all_gather(tcp, Tag::of("block", 4), &mut [0.0; 3000]).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        let text = error.to_string();
        assert!(matches!(error, CommError::Late { .. }), "rank {rank}: {text}");
        assert!(
            text.starts_with("all_gather #2 of block 4 was not over within 3 s: waiting for rank 1 on here"),
            "{text}"
        );
    }
}

/// A rank as a process of its own: this program again, with RING set.
#[test]
fn as_rank() {
    let Ok(words) = std::env::var("RING") else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [rank, world, port, silence, host] = words[..] else { panic!("{words:?}") };
    let terms = Terms {
        rank: rank.parse().unwrap(),
        world_size: world.parse().unwrap(),
        host: host.into(),
        master: ("127.0.0.1".into(), port.parse().unwrap()),
        key: Key::from_hex(&std::env::var("PALINGENESIS_STORE_KEY").unwrap()),
        start: TIMEOUT,
        silence: Duration::from_secs(silence.parse().unwrap()),
    };
    let mut tcp = connect(&terms, TIMEOUT).unwrap();
    tcp.barrier(Tag::of("start", 0)).unwrap();
    println!("\nbegun");
    let mut values = vec![0.0; 400_000];
    let error = loop {
        if let Err(error) = all_reduce(&mut tcp, Tag::of("block", 5), &mut values) {
            break error;
        }
    };
    println!("\nerror: {error}");
}

struct Rank(Child, BufReader<ChildStdout>);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ranks that exchange numbers without end.
fn processes(world: u32, silence: u32, host: fn(u32) -> String) -> Vec<Rank> {
    let (port, key) = (free_port("127.0.0.1"), Key::new().unwrap().to_hex());
    let mut ranks: Vec<Rank> = (0..world)
        .map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["as_rank", "--exact", "--nocapture"])
                .env("RING", format!("{rank} {world} {port} {silence} {}", host(rank)))
                .env("PALINGENESIS_STORE_KEY", &key)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let stdout = BufReader::new(child.stdout.take().unwrap());
            Rank(child, stdout)
        })
        .collect();
    for Rank(_, stdout) in &mut ranks {
        assert!(stdout.lines().any(|line| line.unwrap() == "begun"));
    }
    ranks
}

fn send(signal: libc::c_int, rank: &Rank) {
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(rank.0.id() as libc::pid_t, signal) }, 0);
}

/// After this signal to that rank, what the others say, and when the last of them did.
fn after(signal: libc::c_int, to: usize, mut ranks: Vec<Rank>) -> (Vec<String>, Duration) {
    // In the middle of operations.
    thread::sleep(Duration::from_millis(100));
    let at = Instant::now();
    send(signal, &ranks[to]);
    let _gone = ranks.remove(to);
    let says = |Rank(_, stdout): &mut Rank| {
        let mut said = String::new();
        stdout.read_to_string(&mut said).unwrap();
        said.lines().find_map(|line| line.strip_prefix("error: ")).expect("an error").to_string()
    };
    let errors = ranks.iter_mut().map(says).collect();
    (errors, at.elapsed())
}

#[test]
fn a_killed_rank_is_named_on_every_rank_within_two_seconds() {
    for (to, host) in [(0, one_host as fn(u32) -> String), (2, one_host), (3, many_hosts)] {
        let (errors, took) = after(libc::SIGKILL, to, processes(4, 30, host));
        for error in &errors {
            assert!(error.starts_with(&format!("rank {to} on {} is gone (", host(to as u32))), "{error}");
            assert!(error.contains("all_reduce #"), "{error}");
        }
        assert!(took < Duration::from_secs(2), "{took:?}: {errors:?}");
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_limit_of_silence() {
    for to in [0, 1] {
        let (errors, took) = after(libc::SIGSTOP, to, processes(3, 3, one_host));
        for error in &errors {
            assert!(error.starts_with(&format!("rank {to} on here is gone (nothing was heard of it")), "{error}");
        }
        assert!((Duration::from_secs(2)..Duration::from_secs(10)).contains(&took), "{took:?}");
    }
}
