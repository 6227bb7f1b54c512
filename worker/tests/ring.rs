//! The collectives over sockets, between threads and between processes, against plain sums.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use palingenesis::act::key::Key;
use palingenesis_worker::comm::control::Terms;
use palingenesis_worker::comm::tcp::Tcp;
use palingenesis_worker::comm::{Collective, Exchange, Tag, connect};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A port that nobody has now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

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
        let port = free_port();
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
            tcp.all_reduce(tag, &mut values).unwrap();
            assert_eq!(values, sums(world, count), "all_reduce of {count} by {world}");

            let mut full = vec![-1.0; count * world as usize];
            tcp.all_gather(tag, &numbers(rank, count), &mut full).unwrap();
            let expected: Vec<f32> = (0..world).flat_map(|rank| numbers(rank, count)).collect();
            assert_eq!(full, expected, "all_gather of {count} by {world}");

            let mut full = numbers(rank, count * world as usize);
            let mut shard = vec![-1.0; count];
            tcp.reduce_scatter(tag, &mut full, &mut shard).unwrap();
            let expected = &sums(world, count * world as usize)[rank as usize * count..][..count];
            assert_eq!(shard, expected, "reduce_scatter of {count} by {world}");

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
