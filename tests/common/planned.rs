//! A job on a described machine: the masks that Slurm gives its tasks, what each
//! rank's plan is, and which cards are whose, by the names of the description.

#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};

use palingenesis::config::nics::NicRules;
use palingenesis::config::{Settings, Source};
use palingenesis::facts::task::{MemoryFacts, Peer, Peers};
use palingenesis::facts::topology::Nic;
use palingenesis::facts::{CpuSet, Environment, NodeFacts, Step, TaskFacts};
use palingenesis::plan::binding::nics::{View, choose};
use palingenesis::plan::binding::{NodeNics, own};
use palingenesis::plan::{Facts, Plan, plan};

use super::machine::{Machine, TempTree};

/// A machine as it is read.
#[derive(Debug)]
pub struct Seen {
    pub machine: Machine,
    pub tree: TempTree,
    pub node: NodeFacts,
}

impl Seen {
    pub fn of(machine: Machine) -> Seen {
        let tree = machine.tree();
        let node = NodeFacts::read(tree.root());
        Seen { machine, tree, node }
    }

    /// The choice of cards, with the default settings.
    pub fn choice(&self) -> NodeNics {
        choice(&self.node)
    }

    /// For each GPU of the description its index among those read.
    pub fn gpus(&self) -> Vec<usize> {
        let topology = &self.node.topology;
        let index = |address: &str| topology.gpus.iter().position(|gpu| gpu.place.address.to_string() == address);
        self.machine.gpus().iter().map(|gpu| index(&gpu.address).unwrap_or_else(|| panic!("{gpu:?}"))).collect()
    }
}

/// The choice of cards, with the default settings.
pub fn choice(node: &NodeFacts) -> NodeNics {
    let (settings, rules) = (Settings::default(), NicRules::default());
    let ports = node.rdma.as_deref().unwrap_or_default();
    let addresses = palingenesis::plan::binding::subnets::Addresses::default();
    choose(&View { topology: &node.topology, ports, addresses, settings: &settings, rules: &rules })
}

/// Whether a source's word (a name, an address, a network device) means this card.
pub fn means(word: &str, nic: &Nic) -> bool {
    nic.name == word
        || nic.place.as_ref().is_some_and(|place| place.address.to_string() == word)
        || nic.netdevs.iter().any(|netdev| netdev.name == word)
}

/// What is wrong with a choice, against what the sources say of the machine.
pub fn faults(machine: &Machine, gpus: &[usize], node: &NodeFacts, choice: &NodeNics) -> Vec<String> {
    let topology = &node.topology;
    let mut faults = Vec::new();
    let names = |indexes: &BTreeSet<usize>| -> Vec<&str> {
        indexes.iter().map(|index| topology.nics[*index].name.as_str()).collect()
    };
    for (number, gpu) in gpus.iter().enumerate() {
        let chosen: BTreeSet<usize> = choice.of_gpu.get(*gpu).into_iter().flatten().copied().collect();
        for nic in &chosen {
            if !choice.verdicts[*nic].used {
                faults.push(format!("GPU {number} has {}, which is not used", topology.nics[*nic].name));
            }
        }
        let Some(want) = machine.expect.want.get(number) else {
            // The sources do not pair them: then a card of its own NUMA node, if one may be used.
            let numa = topology.gpus[*gpu].place.numa;
            let on_its_node = |nic: &usize| topology.nics[*nic].place.as_ref().is_some_and(|place| place.numa == numa);
            let excluded = |nic: &usize| machine.expect.exclude.iter().any(|word| means(word, &topology.nics[*nic]));
            let there = (0..topology.nics.len()).any(|nic| on_its_node(&nic) && !excluded(&nic));
            if there && (chosen.is_empty() || !chosen.iter().all(on_its_node)) {
                faults.push(format!("GPU {number} has {:?}, not of its NUMA node", names(&chosen)));
            }
            continue;
        };
        let wanted: BTreeSet<usize> =
            (0..topology.nics.len()).filter(|nic| want.iter().any(|word| means(word, &topology.nics[*nic]))).collect();
        assert!(wanted.len() == want.len(), "{}: {want:?} names {wanted:?}", machine.name);
        let right = if machine.expect.one_of.contains(&number) {
            !chosen.is_empty() && chosen.is_subset(&wanted)
        } else {
            chosen == wanted
        };
        if !right {
            faults.push(format!("GPU {number}: wanted {want:?}, has {:?}", names(&chosen)));
        }
    }
    if machine.expect.want.is_empty() {
        // As many cards as GPUs or fewer: none lies idle.
        for (index, nic) in topology.nics.iter().enumerate().filter(|(index, _)| choice.verdicts[*index].used) {
            if !choice.of_gpu.iter().flatten().any(|other| *other == index) {
                faults.push(format!("{} is no GPU's", nic.name));
            }
        }
    }
    for word in &machine.expect.exclude {
        let mut found = false;
        for (nic, verdict) in topology.nics.iter().zip(&choice.verdicts).filter(|(nic, _)| means(word, nic)) {
            found = true;
            if verdict.used || verdict.why.trim().is_empty() {
                faults.push(format!("{} is used, or without a reason: {verdict:?}", nic.name));
            }
        }
        assert!(found, "{}: no card is {word}", machine.name);
    }
    faults
}

/// CPUs of a list of numbers.
pub fn set(numbers: &[u32]) -> CpuSet {
    numbers.iter().copied().collect()
}

/// What Slurm gives `tasks` tasks of a node that are bound to cores and share it
/// evenly: the default distribution goes round the sockets (srun's
/// --distribution, "block:cyclic").
pub fn cyclic(machine: &Machine, tasks: usize) -> Vec<CpuSet> {
    let mut sockets: BTreeMap<u32, Vec<Vec<u32>>> = BTreeMap::new();
    let online = machine.online();
    for (node, cpus) in machine.nodes() {
        let cores = sockets.entry(machine.package(node)).or_default();
        for cpu in cpus {
            let core = machine.siblings(cpu, &online);
            if !cores.contains(&core) {
                cores.push(core);
            }
        }
    }
    let sockets: Vec<Vec<Vec<u32>>> = sockets.into_values().collect();
    let cores: usize = sockets.iter().map(Vec::len).sum();
    let each = cores / tasks;
    let mut taken = vec![0; sockets.len()];
    (0..tasks)
        .map(|task| {
            // Of a socket that has enough left, else of several.
            let order: Vec<usize> = (0..sockets.len()).map(|step| (task + step) % sockets.len()).collect();
            let left = |socket: &usize| sockets[*socket].len() - taken[*socket];
            let one = order.iter().copied().find(|socket| left(socket) >= each);
            let mut mask = CpuSet::EMPTY;
            let mut wanted = each;
            for socket in one.map_or(order, |socket| vec![socket]) {
                let count = wanted.min(sockets[socket].len() - taken[socket]);
                let cores = &sockets[socket][taken[socket]..taken[socket] + count];
                cores.iter().flatten().for_each(|cpu| mask.insert(*cpu));
                taken[socket] += count;
                wanted -= count;
            }
            mask
        })
        .collect()
}

/// The plans of a node's ranks, the first of two nodes: local rank i has mask i.
pub fn plans(node: &NodeFacts, masks: &[CpuSet], exported: &[(&str, &str)], spec: &str) -> Vec<Plan> {
    let settings = Settings::parse(spec, Source::Option).unwrap();
    let mut environment = Environment::default();
    for (name, value) in exported {
        environment.set(*name, *value);
    }
    let tasks = masks.len();
    let steps: Vec<Step> = (0..tasks)
        .map(|rank| Step::described("n[1-2]", &format!("{tasks}(x2)"), rank as u32, 44, 0).unwrap())
        .collect();
    let command = ["python3".to_string(), "train.py".to_string()];
    let own_task = |rank: usize, peers: Peers| TaskFacts {
        mask: Some(masks[rank].clone()),
        cpus: Some(masks[rank].len()),
        memory: MemoryFacts {
            allowed: Some(node.topology.nodes.iter().map(|node| node.id).collect()),
            has_policy: Some(false),
        },
        peers,
        ..TaskFacts::default()
    };
    let facts = |rank: usize, task: &TaskFacts, then: &mut dyn FnMut(&Facts)| {
        then(&Facts { command: &command, node, task, ..Facts::new(&steps[rank], &environment) });
    };
    let mut peers: Vec<Peer> = Vec::new();
    for rank in 0..tasks {
        facts(rank, &own_task(rank, Peers::NotAsked), &mut |facts| peers.push(own(facts, &settings)));
    }
    let mut plans = Vec::new();
    for rank in 0..tasks {
        let task = own_task(rank, Peers::Met(peers.clone()));
        facts(rank, &task, &mut |facts| plans.push(plan(facts, &settings).unwrap()));
    }
    plans
}

/// The CPUs that each rank has in the end.
pub fn masks_of(plans: &[Plan], masks: &[CpuSet]) -> Vec<CpuSet> {
    plans.iter().zip(masks).map(|(plan, mask)| plan.binding.cpus.clone().unwrap_or_else(|| mask.clone())).collect()
}
