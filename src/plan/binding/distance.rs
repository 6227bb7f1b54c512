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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::pci::PciAddress;

    /// A place below these bridges; the first part is the host bridge.
    fn place(at: &str, numa: Option<u32>, path: &str) -> Place {
        let mut path = path.split_whitespace();
        let host_bridge = path.next().map(String::from);
        let bridges = path.map(|bridge| PciAddress::parse(bridge).unwrap()).collect();
        Place { host_bridge, bridges, numa, ..Place::of(PciAddress::parse(at).unwrap()) }
    }

    fn between(gpu: &Place, nic: &Place) -> Distance {
        let node = NumaNode { id: 0, cpus: Default::default(), distances: vec![(0, 10), (1, 32)] };
        Distance::between(gpu, Some(nic), &[node])
    }

    #[test]
    fn as_nvidia_smi_names_them() {
        let below = "pci0000:15 0000:15:01.0 0000:16:00.0 0000:17:";
        let gpu = place("0000:19:00.0", Some(0), &format!("{below}01.0"));
        for (at, numa, path, name) in [
            // The GPU's switch, another port of it.
            ("0000:18:00.0", Some(0), format!("{below}00.0"), "PIX"),
            // A switch below that switch.
            ("0000:1c:00.0", Some(0), format!("{below}02.0 0000:1a:00.0 0000:1b:00.0"), "PXB"),
            ("0000:20:00.0", Some(0), "pci0000:15 0000:15:02.0".into(), "PHB"),
            ("0000:29:00.0", Some(0), "pci0000:26 0000:26:01.0".into(), "NODE"),
            ("0000:aa:00.0", Some(1), "pci0000:a7 0000:a7:01.0".into(), "SYS"),
            // -1 is no node, and above all not node 0.
            ("0000:29:00.0", None, "pci0000:26 0000:26:01.0".into(), "?"),
        ] {
            assert_eq!(between(&gpu, &place(at, numa, &path)).name(), name, "{at} {path}");
        }
        assert_eq!(Distance::between(&gpu, None, &[]), Distance::Unknown);
    }

    /// <https://github.com/NVIDIA/nccl/issues/820>: of two cards below the same
    /// upper switch the one at the GPU's lower switch.
    #[test]
    fn the_deepest_common_switch_is_the_nearest() {
        let upper = "pci0000:40 0000:40:01.0 0000:41:00.0";
        let gpu = place("0000:4a:00.0", Some(0), &format!("{upper} 0000:42:00.0 0000:43:00.0 0000:44:01.0"));
        let same = place("0000:4b:00.0", Some(0), &format!("{upper} 0000:42:00.0 0000:43:00.0 0000:44:02.0"));
        let other = place("0000:5a:00.0", Some(0), &format!("{upper} 0000:42:01.0"));
        assert!(between(&gpu, &same) < between(&gpu, &other));
        let order = [
            between(&gpu, &same),
            between(&gpu, &other),
            between(&gpu, &place("0000:60:00.0", Some(0), "pci0000:40 0000:40:02.0")),
            between(&gpu, &place("0000:70:00.0", Some(0), "pci0000:70 0000:70:00.0")),
            between(&gpu, &place("0000:80:00.0", Some(1), "pci0000:80 0000:80:00.0")),
            // Firmware says nothing of node 2.
            between(&gpu, &place("0000:90:00.0", Some(2), "pci0000:90 0000:90:00.0")),
            between(&gpu, &place("0000:a0:00.0", None, "pci0000:a0 0000:a0:00.0")),
        ];
        assert!(order.is_sorted() && order.windows(2).all(|pair| pair[0] < pair[1]), "{order:?}");
        assert_eq!(order[4], Distance::System { slit: 32 });
    }

    /// AWS p4d: no bridges, a bus for each switch.
    #[test]
    fn one_bus_without_bridges() {
        let gpu = place("0000:10:1c.0", Some(0), "pci0000:10");
        assert_eq!(between(&gpu, &place("0000:10:1b.0", None, "pci0000:10")), Distance::HostBridge { hops: 0 });
        assert_eq!(between(&gpu, &place("0000:20:1b.0", Some(0), "pci0000:20")), Distance::Node);
        // Also where the path is not known.
        assert_eq!(between(&gpu, &place("0000:10:1b.0", None, "")), Distance::HostBridge { hops: 0 });
        // Buses of Hyper-V are all 00, in domains of their own.
        let (gpu, nic) = (place("0001:00:00.0", Some(0), ""), place("0101:00:00.0", Some(0), ""));
        assert_eq!(between(&gpu, &nic), Distance::Node);
    }

    /// An overlay gives ancestors that the guest does not see.
    #[test]
    fn invented_bridges_count_whatever_the_host_bridges() {
        let gpu = place("0001:00:00.0", Some(0), "pci0001:00 ffff:ff:01.0");
        let nic = place("0101:00:00.0", Some(0), "pci0101:00 ffff:ff:01.0");
        assert_eq!(between(&gpu, &nic), Distance::Switch { shared: -1, hops: 0 });
    }
}
