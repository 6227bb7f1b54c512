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
        /// Bridges below the last shared one, of the longer side.
        hops: u32,
    },
    /// Below a common host bridge: PHB.
    HostBridge {
        /// Bridges between them, of the longer side; 0 on one bus, as a guest sees
        /// the devices of one switch (AWS p4d).
        hops: u32,
    },
    /// On one NUMA node: NODE.
    Node,
    /// On two: SYS.
    System {
        /// The firmware's distance between the nodes; the largest (255) where it
        /// tells none.
        slit: u32,
    },
    /// One of them has no known place.
    Unknown,
}

/// What firmware says of nodes that cannot reach each other, and we of those it
/// says nothing of.
const FARTHEST: u32 = 255;

impl Distance {
    /// Between a GPU and a card.
    pub fn between(gpu: &Place, nic: Option<&Place>, nodes: &[NumaNode]) -> Distance {
        let Some(nic) = nic else {
            return Distance::Unknown;
        };
        // A bridge's address is of one machine only once: to share one is to be
        // below it, whatever the host bridges are called.
        let shared = gpu.bridges.iter().zip(&nic.bridges).take_while(|(one, other)| one == other).count();
        let longest = gpu.bridges.len().max(nic.bridges.len());
        let hops = u32::try_from(longest - shared).unwrap_or(u32::MAX);
        if shared > 0 {
            return Distance::Switch { shared: -i32::try_from(shared).unwrap_or(i32::MAX), hops };
        }
        let one_bus = (gpu.address.domain, gpu.address.bus) == (nic.address.domain, nic.address.bus);
        match (&gpu.host_bridge, &nic.host_bridge) {
            (Some(one), Some(other)) if one == other => {
                return Distance::HostBridge { hops: if one_bus { 0 } else { hops.max(1) } };
            }
            (Some(_), Some(_)) => {}
            _ if one_bus => return Distance::HostBridge { hops: 0 },
            _ => {}
        }
        match (gpu.numa, nic.numa) {
            (Some(one), Some(other)) if one == other => Distance::Node,
            (Some(one), Some(other)) => Distance::System { slit: slit(nodes, one, other) },
            _ => Distance::Unknown,
        }
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

    /// Whether a switch joins them, so that their traffic does not pass the CPU.
    pub fn is_near(self) -> bool {
        matches!(self, Distance::Switch { .. })
    }

    /// Its kind alone; smaller is nearer.
    pub(super) fn grade(self) -> u8 {
        match self {
            Distance::Switch { .. } => 0,
            Distance::HostBridge { .. } => 1,
            Distance::Node => 2,
            Distance::System { .. } => 3,
            Distance::Unknown => 4,
        }
    }
}

/// The firmware's distance, told by either of the two.
fn slit(nodes: &[NumaNode], one: u32, other: u32) -> u32 {
    let told = |from: u32, to: u32| {
        let node = nodes.iter().find(|node| node.id == from)?;
        node.distances.iter().find(|(id, _)| *id == to).map(|(_, distance)| *distance)
    };
    told(one, other).or_else(|| told(other, one)).unwrap_or(FARTHEST)
}
