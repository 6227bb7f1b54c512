//! Times the collectives between processes of this machine, as one rank of them:
//!
//!   collectives RANK WORLD PORT tcp|unix     (PALINGENESIS_STORE_KEY is the key)
//!
//! Rank 0 prints "operation bytes nanoseconds", the median over the rounds of what the
//! slowest rank took; bench/collectives.sh starts the ranks, and gloo's, and compares.

use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis_worker::comm::control::Terms;
use palingenesis_worker::comm::tcp::Tcp;
use palingenesis_worker::comm::{Collective, Exchange, Ongoing, Tag, connect};
use palingenesis_worker::engine::Cpu;
use palingenesis_worker::shard;

const SIZES: [usize; 4] = [64 << 10, 1 << 20, 16 << 20, 64 << 20];
const TAG: Tag = Tag::of("bench", 0);

/// The median of what the slowest rank took, in ns.
fn time(
    tcp: &mut Tcp,
    rounds: usize,
    mut work: impl FnMut(&mut Tcp) -> shard::Result<Ongoing>,
) -> Result<u64, shard::ShardError> {
    let mut took = Vec::with_capacity(rounds);
    for _ in 0..=rounds {
        tcp.barrier(TAG)?;
        let began = Instant::now();
        let Ongoing(_) = work(tcp)?;
        took.push(began.elapsed().as_nanos() as u64);
    }
    // The first one warms up. Each rank brings its times, so that the slowest is known.
    let own: Vec<u8> = took[1..].iter().flat_map(|time| time.to_le_bytes()).collect();
    let all = tcp.exchange(TAG, &own)?;
    let time = |bytes: &[u8], round: usize| {
        bytes
            .chunks_exact(8)
            .nth(round)
            .map_or(0, |eight| eight.iter().rev().fold(0, |sum: u64, byte| (sum << 8) | u64::from(*byte)))
    };
    let mut slowest: Vec<u64> =
        (0..rounds).map(|round| all.iter().map(|bytes| time(bytes, round)).max().unwrap_or(0)).collect();
    slowest.sort_unstable();
    Ok(slowest[rounds / 2])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let [rank, world, port, how] = &words[..] else {
        eprintln!("collectives: run by bench/collectives.sh");
        return Ok(());
    };
    let (rank, world_size): (u32, u32) = (rank.parse()?, world.parse()?);
    // Another host's name for each rank: then they take TCP.
    let host = if how == "tcp" { format!("n{rank}") } else { "here".to_string() };
    let key = Key::from_hex(&std::env::var("PALINGENESIS_STORE_KEY")?).ok_or("no key")?;
    let limit = Duration::from_secs(60);
    let terms = Terms {
        rank,
        world_size,
        host,
        master: ("127.0.0.1".to_string(), port.parse()?),
        key: Some(key),
        start: limit,
        silence: limit,
    };
    let mut tcp = connect(&terms, limit)?;
    let cpu = Cpu::new(Some(1));
    let world = world_size as usize;
    let sizes: Vec<usize> = match std::env::var("SIZES") {
        Ok(sizes) => sizes.split_whitespace().map(str::parse).collect::<Result<_, _>>()?,
        Err(_) => SIZES.to_vec(),
    };
    for bytes in sizes {
        let count = bytes / 4;
        let rounds = ((256 << 20) / bytes).clamp(5, 300);
        let (mut values, whole) = (vec![1.0f32; count], count / world * world);
        let times = [
            ("all_reduce", time(&mut tcp, rounds, |tcp| tcp.all_reduce(&cpu, TAG, &mut values))?),
            ("all_gather", time(&mut tcp, rounds, |tcp| tcp.all_gather(&cpu, TAG, &mut values[..whole]))?),
            ("reduce_scatter", time(&mut tcp, rounds, |tcp| tcp.reduce_scatter(&cpu, TAG, &mut values[..whole]))?),
        ];
        if rank == 0 {
            times.iter().for_each(|(name, ns)| println!("{name} {bytes} {ns}"));
        }
    }
    tcp.barrier(TAG)?;
    tcp.end();
    Ok(())
}
