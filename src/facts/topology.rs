//! The machine as its kernel shows it: GPUs, network cards, NUMA nodes and where
//! each sits. Facts only: which card a GPU uses is `plan::binding`'s matter.
//!
//! Tens of small files are read; no device is opened, no program started, no
//! library of a vendor loaded, and the PCI bus is not scanned.

mod cpus;
mod gpus;
mod nics;
mod place;
mod route;
#[cfg(test)]
pub(crate) mod tests;

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{CpuSet, pci};

pub use gpus::gpus;
pub use nics::nics;

/// One node's hardware, as far as binding needs it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// The GPUs by PCI address.
    pub gpus: Vec<Gpu>,
    /// RDMA devices and other cards of a compute fabric, by PCI address; those
    /// without one last, by name.
    pub nics: Vec<Nic>,
    /// The NUMA nodes that have CPUs, by number. Numbers are labels: they may have
    /// gaps and come in any order.
    pub nodes: Vec<NumaNode>,
    /// CPUs that are online; empty where it is not known.
    pub online: CpuSet,
    /// CPUs that the kernel was told to keep free (isolcpus).
    pub isolated: CpuSet,
    /// The network device of the default route.
    pub default_route: Option<String>,
}

impl Topology {
    /// Reads the machine below `root`. What cannot be read is absent, and named in
    /// `unknown` where something is wrong: no driver and no cards are no fault.
    pub fn read(root: &Path, unknown: &mut Vec<String>) -> Topology {
        let gpus = gpus(root, unknown);
        let nics = nics(root, unknown);
        Topology { gpus, nics, ..Topology::of_cpus(root, unknown) }.completed()
    }

    /// Gives a device whose CPUs are not told those of its NUMA node. A kernel that
    /// names the node and then lists every CPU of several nodes does not tell them:
    /// old ones did.
    pub(super) fn completed(mut self) -> Topology {
        let nodes = &self.nodes;
        let all = nodes.iter().fold(CpuSet::EMPTY, |all, node| all.or(&node.cpus));
        let gpus = self.gpus.iter_mut().map(|gpu| &mut gpu.place);
        for place in gpus.chain(self.nics.iter_mut().filter_map(|nic| nic.place.as_mut())) {
            let node = nodes.iter().find(|node| Some(node.id) == place.numa);
            if let Some(node) = node.filter(|_| place.cpus.is_empty() || all.is_within(&place.cpus)) {
                place.cpus = node.cpus.clone();
            }
        }
        self
    }

    /// The part that the kernel knows by itself and that no driver can hold up:
    /// CPUs, NUMA nodes and the default route.
    pub(super) fn of_cpus(root: &Path, unknown: &mut Vec<String>) -> Topology {
        let mut topology = cpus::cpus(root, unknown);
        topology.default_route = route::default_route(root);
        topology
    }
}

/// Lines about what is wrong with one machine's files: the first few say it all.
const MOST_LINES: usize = 16;

fn wrong(unknown: &mut Vec<String>, path: &Path, what: impl std::fmt::Display) {
    if unknown.len() < MOST_LINES {
        unknown.push(format!("{}: {what}", path.display()));
    }
}

/// A NUMA node that has CPUs. Those without hold GPU memory (GB200: 2 to 33) and
/// are no place for a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: CpuSet,
    /// Its distances to other nodes by their numbers, as firmware tells them (SLIT; 10: itself).
    pub distances: Vec<(u32, u32)>,
}

/// Who made a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuVendor {
    /// NVIDIA.
    Nvidia,
    /// AMD: listed, and not bound.
    Amd,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Who made it.
    pub vendor: GpuVendor,
    /// Where it sits.
    pub place: pci::Place,
    /// "NVIDIA H100 80GB HBM3".
    pub model: Option<String>,
    /// "GPU-…"; `None` before the driver has initialised it.
    pub uuid: Option<String>,
    /// N of /dev/nvidiaN, which need not be its index.
    pub minor: Option<u32>,
    /// The NUMA node that is its own memory, where it is one.
    pub memory_node: Option<u32>,
}

/// How a card is talked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NicKind {
    /// RDMA verbs: InfiniBand, RoCE, EFA. Its ports are in `NodeFacts::rdma`.
    Verbs,
    /// HPE Slingshot (/sys/class/cxi), for libfabric only.
    Slingshot,
}

/// A network card's function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// mlx5_0, cxi0.
    pub name: String,
    /// How it is talked to.
    pub kind: NicKind,
    /// Where it sits, a bond's first card; `None` where sysfs does not lead to PCI (a
    /// software device).
    pub place: Option<pci::Place>,
    /// Its network devices (ib0, hsn0).
    pub netdevs: Vec<Netdev>,
}

impl Nic {
    /// Whether one of its network devices is up, or none is known.
    pub fn may_be_up(&self) -> bool {
        self.netdevs.is_empty() || self.netdevs.iter().any(|netdev| netdev.up)
    }
}

/// A network device of a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// The bond or bridge it belongs to.
    pub master: Option<String>,
    /// Whether it is up and running.
    pub up: bool,
}
