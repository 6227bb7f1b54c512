//! Tasks on a machine of NUMA nodes, for tests of CPUs and memory.

use crate::config::{Settings, Source};
use crate::facts::pci::Place;
use crate::facts::task::{MemoryFacts, Peer, Peers};
use crate::facts::topology::{Gpu, GpuVendor, NumaNode};
use crate::facts::{CpuSet, PciAddress, Topology};
use crate::plan::tests::World;
use crate::plan::{Facts, Plan};

pub(crate) fn set(text: &str) -> CpuSet {
    CpuSet::parse(text).unwrap()
}

/// A machine's NUMA nodes, and its GPUs beside them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nodes(pub Topology);

impl Nodes {
    /// These NUMA nodes with their CPUs, all online.
    pub fn new(nodes: &[(u32, &str)]) -> Nodes {
        let mut topology = Topology::default();
        for (id, cpus) in nodes {
            topology.nodes.push(NumaNode { id: *id, cpus: set(cpus), distances: Vec::new() });
            topology.online = topology.online.or(&set(cpus));
        }
        topology.nodes.sort_by_key(|node| node.id);
        Nodes(topology)
    }

    /// A GPU on each of these NUMA nodes, as the kernel shows it.
    pub fn gpus(mut self, nodes: &[u32]) -> Nodes {
        for numa in nodes {
            let bus = 0x10 + self.0.gpus.len();
            let address = PciAddress::parse(&format!("0000:{bus:02x}:00.0")).unwrap();
            let of_node = self.0.nodes.iter().find(|node| node.id == *numa).map(|node| node.cpus.clone());
            let place = Place { numa: Some(*numa), cpus: of_node.unwrap_or_default(), ..Place::of(address) };
            self.0.gpus.push(Gpu {
                vendor: GpuVendor::Nvidia,
                place,
                model: None,
                uuid: None,
                minor: None,
                memory_node: None,
            });
        }
        self
    }

    pub fn with(mut self, change: impl FnOnce(&mut Topology)) -> Nodes {
        change(&mut self.0);
        self
    }

    /// What local rank `rank` of one node finds, where each rank has this mask and
    /// the GPU of its own number.
    pub fn rank(&self, rank: u32, masks: &[&str]) -> Task {
        let mut world = World::new("n1", &masks.len().to_string(), rank);
        world.node.topology = self.0.clone();
        let peer = |(gpu, mask): (usize, &&str)| Peer { mask: set(mask), gpus: vec![gpu as u8] };
        world.task.peers = Peers::Met(masks.iter().enumerate().map(peer).collect());
        world.task.mask = Some(set(masks[rank as usize]));
        world.task.cpus = Some(set(masks[rank as usize]).len());
        let nodes = self.0.nodes.iter().map(|node| node.id).collect();
        world.task.memory = MemoryFacts { allowed: Some(nodes), has_policy: Some(false) };
        Task { world, gpus: Ok(vec![rank as usize]), spec: "" }
    }
}

/// A task whose GPU is settled already.
pub(crate) struct Task {
    pub world: World,
    pub gpus: Result<Vec<usize>, String>,
    pub spec: &'static str,
}

impl Task {
    pub fn with(mut self, change: impl FnOnce(&mut Task)) -> Task {
        change(&mut self);
        self
    }

    /// The plan as far as CPUs and memory go, and the rank's OMP_NUM_THREADS.
    pub fn bound(&self) -> Plan {
        let settings = Settings::parse(self.spec, Source::Option).unwrap();
        let world = &self.world;
        let bare = World { node: Default::default(), task: Default::default(), ..World::new("n1", "1", 0) };
        let mut plan = bare.plan("").unwrap();
        plan.step.shape = crate::plan::launch::shape(&settings, &world.command, false, false, true);
        let facts = Facts {
            environment: &world.environment,
            command: &world.command,
            node: &world.node,
            task: &world.task,
            ..Facts::new(&world.step, &world.environment)
        };
        let share = super::cpus::decide(&mut plan, &facts, &settings, &self.gpus);
        super::memory::decide(&mut plan, &facts, &settings, &self.gpus);
        let mut offers = crate::plan::precedence::Offers::default();
        crate::plan::threads::offer(&mut offers, &facts, plan.step.shape, 1, share);
        plan.env.clear();
        plan.left.retain(|note| note.name.starts_with("SLURM_"));
        let marks = crate::plan::marks::Marks::of(facts.environment);
        crate::plan::precedence::settle(&mut plan, &facts, &marks, &offers);
        plan
    }
}

impl Plan {
    /// The row of what was decided: its value and why.
    pub(crate) fn row(&self, what: &str) -> (Option<&str>, &str) {
        let row = self.binding.decisions.iter().find(|decision| decision.what == what).unwrap();
        (row.value.as_deref(), &row.why)
    }
}
