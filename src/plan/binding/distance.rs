//! How far a network card is from a GPU, by what lies between them in the PCI
//! tree, as NCCL and `nvidia-smi topo -m` tell it.

use crate::facts::pci::Place;
use crate::facts::topology::NumaNode;

/// Smaller is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Below a common switch: at most one bridge between them is PIX, several
    /// are PXB. The deeper the common one the nearer
    /// (<https://github.com/NVIDIA/nccl/issues/820>).
    Switch {
        /// Negated number of bridges they share, so that more is nearer.
        shared: i32,
        /// Bridges between them, besides the shared ones.
        hops: u32,
    },
    /// Below a common host bridge: PHB.
    HostBridge {
        /// Bridges between them.
        hops: u32,
    },
    /// On one NUMA node: NODE.
    Node,
    /// On two: SYS.
    System {
        /// The firmware's distance between the nodes; 0 where it tells none.
        slit: u32,
    },
    /// One of them has no known place.
    Unknown,
}

impl Distance {
    /// Between a GPU and a card.
    pub fn between(gpu: &Place, nic: Option<&Place>, nodes: &[NumaNode]) -> Distance {
        let _ = (gpu, nic, nodes);
        Distance::Unknown
    }

    /// As `nvidia-smi topo -m` abbreviates it.
    pub fn name(self) -> &'static str {
        match self {
            Distance::Switch { hops: 0..=1, .. } => "PIX",
            Distance::Switch { .. } => "PXB",
            Distance::HostBridge { .. } => "PHB",
            Distance::Node => "NODE",
            Distance::System { .. } => "SYS",
            Distance::Unknown => "?",
        }
    }
}
