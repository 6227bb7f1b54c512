//! Times reading a node's hardware and planning a rank on it, and counts on every
//! described machine the ranks that have their CPUs beside their GPU, and the
//! nearest network card: with Slurm alone, with the arithmetic that launch scripts
//! use, and with the plan.
//!
//! The trees of files are in memory: a real sysfs asks drivers as well.

#[path = "../tests/common/machine.rs"]
mod machine;
#[path = "../tests/common/planned.rs"]
mod planned;

use std::hint::black_box;
use std::time::{Duration, Instant};

use machine::Machine;
use palingenesis::config::{Settings, Source};
use palingenesis::facts::task::{MemoryFacts, Peer, Peers};
use palingenesis::facts::topology::GpuVendor;
use palingenesis::facts::{CpuSet, Environment, NodeFacts, Step, TaskFacts};
use palingenesis::plan::{Facts, plan};
use planned::{Seen, cyclic, masks_of, means, plans, set};

const ROUNDS: usize = 200;

fn main() {
    times();
    shares();
}

/// Processor time of this process and of the children it has waited for, in the
/// kernel's ticks of 10 ms.
fn ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let after_name = text.rsplit_once(')').expect("a name in brackets").1;
    after_name.split_whitespace().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum()
}

fn milliseconds(mut measured: Vec<Duration>) -> f64 {
    measured.sort();
    measured[measured.len() / 2].as_secs_f64() * 1e3
}

fn times() {
    println!("a node's facts and a rank's plan: median ms, and ms of processor time (wanted: below 5)");
    println!("{:<56} {:>9} {:>9} {:>9} {:>9}", "", "facts", "plan", "both", "processor");
    for (name, what) in [
        ("dell-8xh100-roce", "8 GPUs, 12 cards, 517 PCI functions"),
        ("dgx-h100", "8 GPUs, 12 cards"),
        ("mi200-16gcd", "16 GPUs, 8 cards, 256 CPUs"),
        ("gb200-nvl72-tray", "4 GPUs, 6 cards, 34 NUMA nodes"),
    ] {
        let machine = Machine::load(name);
        let masks = cyclic(&machine, machine.gpus().len());
        let seen = Seen::of(machine);
        let settings = Settings::parse("", Source::Option).expect("a SPEC");
        let environment = Environment::default();
        let tasks = masks.len();
        let step = Step::described("n[1-2]", &format!("{tasks}(x2)"), 3, 44, 0).expect("a step");
        let peers = (0..tasks).map(|rank| Peer { mask: masks[rank].clone(), gpus: vec![rank as u8] }).collect();
        let task = TaskFacts {
            mask: Some(masks[3].clone()),
            cpus: Some(masks[3].len()),
            memory: MemoryFacts {
                allowed: Some(seen.node.topology.nodes.iter().map(|node| node.id).collect()),
                has_policy: Some(false),
            },
            peers: Peers::Met(peers),
            ..TaskFacts::default()
        };
        let command = ["python3".to_string(), "train.py".to_string()];
        let (mut reading, mut planning, mut both) = (Vec::new(), Vec::new(), Vec::new());
        let before = ticks();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let node = NodeFacts::read(seen.tree.root());
            let read = start.elapsed();
            let facts = Facts { command: &command, node: &node, task: &task, ..Facts::new(&step, &environment) };
            black_box(plan(&facts, &settings).expect("a plan"));
            let all = start.elapsed();
            reading.push(read);
            planning.push(all - read);
            both.push(all);
        }
        let processor = (ticks() - before) as f64 * 10.0 / ROUNDS as f64;
        println!(
            "{:<56} {:>9.2} {:>9.2} {:>9.2} {processor:>9.2}",
            format!("{name}: {what}"),
            milliseconds(reading),
            milliseconds(planning),
            milliseconds(both)
        );
    }
}

/// Ranks of a machine that are right, in CPUs and in cards.
#[derive(Default)]
struct Right {
    cpus: usize,
    cards: usize,
}

fn shares() {
    println!("\nranks (one for each GPU) with all their CPUs beside their GPU, and with a nearest card:");
    println!(
        "{:<22} {:>5}   {:>13} {:>13} {:>13}   {:>13} {:>13} {:>13}",
        "", "", "CPUs: Slurm", "arithmetic", "ours", "card: first", "_$LOCAL_RANK", "ours"
    );
    let mut sums = [0; 6];
    let (mut ranks, mut with_cards) = (0, 0);
    for machine in Machine::all() {
        let masks = cyclic(&machine, machine.gpus().len());
        let seen = Seen::of(machine);
        let count = masks.len();
        let (slurm, arithmetic, ours) = (alone(&seen, &masks), arithmetic(&seen), planned_ranks(&seen, &masks));
        let has_cards = !seen.node.topology.nics.is_empty();
        let bound = seen.node.topology.gpus[0].vendor == GpuVendor::Nvidia;
        let share = |right: usize, of: bool| if of { format!("{right}/{count}") } else { "-".into() };
        println!(
            "{:<22} {:>5}   {:>13} {:>13} {:>13}   {:>13} {:>13} {:>13}{}",
            seen.machine.name,
            count,
            share(slurm.cpus, true),
            share(arithmetic.cpus, true),
            share(ours.cpus, true),
            share(slurm.cards, has_cards),
            share(arithmetic.cards, has_cards),
            share(ours.cards, has_cards),
            if bound { "" } else { "   (AMD: not bound)" }
        );
        ranks += count;
        with_cards += if has_cards { count } else { 0 };
        let all = [slurm.cpus, arithmetic.cpus, ours.cpus, slurm.cards, arithmetic.cards, ours.cards];
        sums.iter_mut().zip(all).for_each(|(sum, right)| *sum += right);
    }
    let percent = |right: usize, of: usize| format!("{:.0} %", 100.0 * right as f64 / of as f64);
    let shares: Vec<String> =
        sums.iter().enumerate().map(|(index, sum)| percent(*sum, if index < 3 { ranks } else { with_cards })).collect();
    println!(
        "{:<22} {ranks:>5}   {:>13} {:>13} {:>13}   {:>13} {:>13} {:>13}",
        "all", shares[0], shares[1], shares[2], shares[3], shares[4], shares[5]
    );
}

/// How many ranks have this of CPUs and cards: rank i uses the i-th GPU by address.
fn count(seen: &Seen, masks: &[CpuSet], card: impl Fn(usize) -> Option<usize>) -> Right {
    let topology = &seen.node.topology;
    let nodes = seen.machine.nodes();
    let described = seen.gpus();
    let mut right = Right::default();
    for (rank, mask) in masks.iter().enumerate() {
        let place = &topology.gpus[rank].place;
        let near = place.numa.and_then(|node| nodes.get(&node)).map_or(CpuSet::EMPTY, |cpus| set(cpus));
        right.cpus += usize::from(!mask.is_empty() && mask.is_within(&near));
        let Some(nic) = card(rank).map(|nic| &topology.nics[nic]) else {
            continue;
        };
        let number = described.iter().position(|index| *index == rank).expect("a described GPU");
        let is_near = match seen.machine.expect.want.get(number) {
            Some(want) => want.iter().any(|word| means(word, nic)),
            // Not stated: any compute card of the NUMA node.
            None => {
                let excluded = seen.machine.expect.exclude.iter().any(|word| means(word, nic));
                !excluded && nic.place.as_ref().is_some_and(|own| own.numa == place.numa)
            }
        };
        right.cards += usize::from(is_near);
    }
    right
}

/// Slurm's masks, and the first card by name.
fn alone(seen: &Seen, masks: &[CpuSet]) -> Right {
    let nics = &seen.node.topology.nics;
    let first = (0..nics.len()).min_by_key(|nic| (nics[*nic].name.len(), nics[*nic].name.clone()));
    count(seen, masks, |_| first)
}

/// numactl with local rank * nodes / ranks, and the card with the local rank's number.
fn arithmetic(seen: &Seen) -> Right {
    let nodes: Vec<Vec<u32>> = seen.machine.nodes().into_values().collect();
    let ranks = seen.machine.gpus().len();
    let masks: Vec<CpuSet> = (0..ranks).map(|rank| set(&nodes[rank * nodes.len() / ranks])).collect();
    let numbered = |rank: usize| {
        let names = [format!("mlx5_{rank}"), format!("cxi{rank}")];
        seen.node.topology.nics.iter().position(|nic| names.contains(&nic.name))
    };
    count(seen, &masks, numbered)
}

fn planned_ranks(seen: &Seen, masks: &[CpuSet]) -> Right {
    let choice = seen.choice();
    let after = masks_of(&plans(&seen.node, masks, &[], ""), masks);
    count(seen, &after, |rank| choice.of_gpu[rank].first().copied())
}
