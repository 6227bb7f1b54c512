//! Real machines: which cards belong to which GPU there, and which carry no
//! training traffic, from what is published about them; and what ranks get there.
//!
//! The expected values stand in tests/fixtures/machines with their sources. A tree
//! of files cannot show what a card's firmware answers, nor that the cards found
//! are the fastest: that needs the machine.

mod common;
#[path = "golden/damage.rs"]
mod damage;
#[path = "golden/made_up.rs"]
mod made_up;
#[path = "golden/plans.rs"]
mod plans;

use common::machine::{Addresses, Machine, relation};
use common::planned::{Seen, choice, faults};
use palingenesis::facts::NodeFacts;
use palingenesis::facts::topology::GpuVendor;

const MACHINES: usize = 24;

/// The reader gives what the description says, of every machine.
#[test]
fn what_is_read_of_a_machine_is_what_its_description_says() {
    for machine in Machine::all() {
        let seen = Seen::of(machine);
        let (name, topology) = (&seen.machine.name, &seen.node.topology);
        assert_eq!(seen.node.unknown, Vec::<String>::new(), "{name}");
        let functions = seen.machine.functions();
        let find = |what: &str| functions.iter().find(|function| function.name == what).unwrap();
        let gpus = seen.machine.gpus();
        assert_eq!(topology.gpus.len(), gpus.len(), "{name}");
        for (number, (gpu, index)) in gpus.iter().zip(seen.gpus()).enumerate() {
            let read = &topology.gpus[index];
            let bridges: Vec<String> = read.place.bridges.iter().map(ToString::to_string).collect();
            assert_eq!((&bridges, read.place.numa), (&gpu.bridges, gpu.numa), "{name} {}", gpu.address);
            assert_eq!(read.place.host_bridge.as_ref(), Some(&gpu.host), "{name} {}", gpu.address);
            if read.vendor == GpuVendor::Nvidia {
                assert_eq!(read.model.as_ref(), Some(&seen.machine.gpu.model), "{name}");
                assert_eq!((read.minor, read.uuid.clone()), (Some(number as u32), Some(seen.machine.uuid(number))));
                assert_eq!(read.memory_node, seen.machine.gpu.memory_nodes.get(number).copied(), "{name}");
            }
        }
        assert_eq!(topology.nics.len(), seen.machine.cards().len(), "{name}");
        for nic in &topology.nics {
            let (function, place) = (find(&nic.name), nic.place.as_ref().unwrap());
            assert_eq!((place.address.to_string(), place.numa), (function.address.clone(), function.numa), "{name}");
            let netdevs: Vec<&str> = nic.netdevs.iter().map(|netdev| netdev.name.as_str()).collect();
            let kind = seen.machine.cards().into_iter().find(|(card, _)| *card == nic.name).unwrap().1;
            let netdev = kind.devices[&nic.name].as_str();
            assert_eq!(netdevs, if netdev.is_empty() { vec![] } else { vec![netdev] }, "{name} {}", nic.name);
        }
        let nodes: Vec<(u32, Vec<u32>)> =
            topology.nodes.iter().map(|node| (node.id, node.cpus.iter().collect())).collect();
        assert_eq!(nodes, seen.machine.nodes().into_iter().collect::<Vec<_>>(), "{name}");
        assert_eq!(topology.online.iter().collect::<Vec<_>>(), seen.machine.online(), "{name}");
        assert_eq!(topology.default_route, seen.machine.default_route, "{name}");
    }
}

/// The nearest cards of every machine whose wiring is published, and every card
/// that carries no training traffic there left out with a reason.
#[test]
fn golden() {
    let machines = Machine::all();
    let (mut published, mut reconstructed) = (0, 0);
    let mut wrong = Vec::new();
    for machine in machines {
        match machine.addresses {
            Addresses::Published => published += 1,
            Addresses::Reconstructed => reconstructed += 1,
        }
        assert!(!machine.source.is_empty() && machine.source.iter().all(|source| source.starts_with("https://")));
        let seen = Seen::of(machine);
        let choice = seen.choice();
        assert_eq!(choice.verdicts.len(), seen.node.topology.nics.len(), "{}", seen.machine.name);
        let faults = faults(&seen.machine, &seen.gpus(), &seen.node, &choice);
        println!("{:<22} {}", seen.machine.name, if faults.is_empty() { "right" } else { "WRONG" });
        for (nic, verdict) in seen.node.topology.nics.iter().zip(&choice.verdicts).filter(|(_, verdict)| !verdict.used)
        {
            println!("  without {}: {}", nic.name, verdict.why);
        }
        wrong.extend(faults.into_iter().map(|fault| format!("{}: {fault}", seen.machine.name)));
    }
    println!("machines with published addresses: {published}; reconstructed trees: {reconstructed}");
    assert_eq!((published, reconstructed, published + reconstructed), (13, 11, MACHINES));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The distances of a machine whose matrix is published are the matrix's.
#[test]
fn distances_are_those_that_the_published_matrices_show() {
    let mut cells = 0;
    for machine in Machine::all() {
        let seen = Seen::of(machine);
        let (choice, functions) = (seen.choice(), seen.machine.functions());
        for (gpu, index) in seen.machine.gpus().iter().zip(seen.gpus()) {
            for (nic, distance) in seen.node.topology.nics.iter().zip(&choice.distances[index]) {
                let function = functions.iter().find(|function| function.name == nic.name).unwrap();
                let expected = match relation(gpu, function) {
                    "SYS" if gpu.numa.is_none() || function.numa.is_none() => "?",
                    known => known,
                };
                assert_eq!(distance.name(), expected, "{}: {} {}", seen.machine.name, gpu.address, nic.name);
                cells += 1;
            }
        }
    }
    assert!(cells > 1000, "{cells}");
}

/// A permutation that is always the same for a seed.
fn shuffled<T: Clone>(items: &[T], seed: u64) -> Vec<T> {
    let mut items = items.to_vec();
    let mut random = Random(seed);
    for end in (1..items.len()).rev() {
        items.swap(end, random.below(end + 1));
    }
    items
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// <https://github.com/NVIDIA/nccl/issues/1277>: nodes of one cluster name alike
/// cards unlike. Under any names the same addresses are chosen.
#[test]
fn names_of_cards_never_change_which_cards_are_chosen() {
    let addresses = |node: &NodeFacts| -> Vec<Vec<String>> {
        let address = |nic: &usize| node.topology.nics[*nic].place.as_ref().unwrap().address.to_string();
        let choice = choice(node);
        let mut all: Vec<Vec<String>> = choice.of_gpu.iter().map(|nics| nics.iter().map(address).collect()).collect();
        all.push(
            (0..choice.verdicts.len()).filter(|nic| choice.verdicts[*nic].used).map(|nic| address(&nic)).collect(),
        );
        all
    };
    for machine in Machine::all() {
        let before = addresses(&Seen::of(machine.clone()).node);
        for seed in 1..4 {
            let mut renamed = machine.clone();
            let names: Vec<String> = machine.cards().iter().map(|(name, _)| name.to_string()).collect();
            let others = shuffled(&names, seed);
            renamed.rename(|name| others[names.iter().position(|own| own == name).unwrap()].clone());
            assert_eq!(addresses(&Seen::of(renamed).node), before, "{} with {others:?}", machine.name);
        }
    }
}
