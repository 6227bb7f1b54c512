//! Where a device sits, from its directory in sysfs.

use std::path::{Path, PathBuf};

use crate::config::printable;
use crate::facts::pci::Place;
use crate::facts::{CpuSet, PciAddress, cpuset, files};

use super::wrong;

/// More bridges than a PCI tree can be deep: a domain has 256 buses.
const DEEPEST: usize = 256;

/// EX235A's firmware tells the NUMA node only; a GPU's CPUs are those of one L3
/// cache, which its bus tells (hwloc, hwloc/pci-common.c).
const EX235A: &str = "HPE CRAY EX235A";

/// The buses of each of its L3 caches, and the first of the cache's eight cores;
/// each core's second CPU is 64 further.
const EX235A_CACHES: [(u8, u8, u32); 8] = [
    (0xd0, 0xd1, 0),
    (0xd4, 0xd6, 8),
    (0xc8, 0xc9, 16),
    (0xcc, 0xce, 24),
    (0xd8, 0xd9, 32),
    (0xdc, 0xde, 40),
    (0xc0, 0xc1, 48),
    (0xc4, 0xc6, 56),
];

/// Reads places below one root.
pub(super) struct Places {
    /// The root without symbolic links, where it is there.
    root: Option<PathBuf>,
    ex235a: bool,
}

impl Places {
    pub(super) fn below(root: &Path) -> Places {
        let board = files::attribute(&root.join("sys/class/dmi/id/board_name"));
        Places { root: files::resolved(root), ex235a: board.as_deref() == Some(EX235A) }
    }

    /// The place of the device with this directory; `None` where it does not lead
    /// to a PCI function.
    pub(super) fn of_directory(&self, directory: &Path, unknown: &mut Vec<String>) -> Option<Place> {
        let (host_bridge, mut chain) = self.chain(directory)?;
        let mut place = Place::of(chain.pop()?);
        (place.host_bridge, place.bridges) = (host_bridge, chain);
        self.attributes(&mut place, directory, unknown);
        Some(place)
    }

    /// The place of the function with this address, whatever sysfs says of it.
    pub(super) fn of_address(&self, root: &Path, address: PciAddress, unknown: &mut Vec<String>) -> Place {
        let directory = root.join(format!("sys/bus/pci/devices/{address}"));
        let mut place = Place::of(address);
        if let Some((host_bridge, mut chain)) = self.chain(&directory)
            && chain.pop() == Some(address)
        {
            (place.host_bridge, place.bridges) = (host_bridge, chain);
        }
        self.attributes(&mut place, &directory, unknown);
        place
    }

    /// The host bridge and the PCI functions on the way down to the device, itself
    /// last. A device of another bus (auxiliary, virtio) below a PCI function has
    /// that function's.
    fn chain(&self, directory: &Path) -> Option<(Option<String>, Vec<PciAddress>)> {
        let path = files::resolved(directory)?;
        chain_of(path.strip_prefix(self.root.as_ref()?).ok()?)
    }

    fn attributes(&self, place: &mut Place, directory: &Path, unknown: &mut Vec<String>) {
        let hexadecimal = |name: &str| {
            let text = files::attribute(&directory.join(name))?;
            u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        };
        (place.vendor, place.device) = (hexadecimal("vendor"), hexadecimal("device"));
        let path = directory.join("numa_node");
        let told = files::attribute(&path);
        match told.as_deref().map(str::parse::<i64>) {
            None | Some(Ok(-1)) => {}
            Some(Ok(node)) if (0..=i64::from(cpuset::LARGEST)).contains(&node) => place.numa = u32::try_from(node).ok(),
            _ => wrong(unknown, &path, format!("'{}' is no NUMA node", printable(&told.clone().unwrap_or_default()))),
        }
        // Of a device without a NUMA node the kernel lists every CPU, which says nothing.
        if place.numa.is_some() || told.is_none() {
            // hwloc-gather-topology records the mask only.
            let forms = [("local_cpulist", CpuSet::parse as fn(&str) -> _), ("local_cpus", CpuSet::parse_mask)];
            for (path, parse) in forms.map(|(name, parse)| (directory.join(name), parse)) {
                if let Some(text) = files::attribute(&path) {
                    place.cpus = parse(&text).unwrap_or_else(|why| {
                        wrong(unknown, &path, why);
                        CpuSet::EMPTY
                    });
                    break;
                }
            }
        }
        place.physical = files::link(&directory.join("physfn")).and_then(|name| PciAddress::parse(&name));
        if self.ex235a
            && place.address.domain == 0
            && let Some((_, _, first)) =
                EX235A_CACHES.iter().find(|(low, high, _)| (*low..=*high).contains(&place.address.bus))
        {
            place.cpus = (*first..first + 8).chain(first + 64..first + 72).collect();
        }
    }
}

/// Of a path like sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0. On ARM and on
/// Hyper-V other names come before the host bridge; behind a bridge of its own
/// (VMD) there may be a second host bridge, and the nearest counts.
fn chain_of(path: &Path) -> Option<(Option<String>, Vec<PciAddress>)> {
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap_or_default()).collect();
    let last = names.iter().rposition(|name| PciAddress::parse(name).is_some())?;
    let mut chain: Vec<PciAddress> =
        names[..=last].iter().rev().map_while(|name| PciAddress::parse(name)).take(DEEPEST).collect();
    let above = names[..=last].len() - chain.len();
    chain.reverse();
    let host_bridge = names[..above].last().filter(|name| is_host_bridge(name));
    Some((host_bridge.map(ToString::to_string), chain))
}

/// `pci0000:15`
fn is_host_bridge(name: &str) -> bool {
    let hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.strip_prefix("pci")
        .and_then(|name| name.split_once(':'))
        .is_some_and(|(domain, bus)| (4..=8).contains(&domain.len()) && bus.len() == 2 && hex(domain) && hex(bus))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(path: &str) -> Option<(Option<String>, Vec<String>)> {
        let (bridge, chain) = chain_of(Path::new(path))?;
        Some((bridge, chain.iter().map(ToString::to_string).collect()))
    }

    #[test]
    fn the_way_down_to_a_device() {
        for (path, bridge, expected) in [
            (
                "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0",
                Some("pci0000:15"),
                &["0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:19:00.0"][..],
            ),
            // Hyper-V.
            (
                "sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001-0000-3130-444531444234/\
                 pci0001:00/0001:00:00.0",
                Some("pci0001:00"),
                &["0001:00:00.0"],
            ),
            // ARM, with a device tree.
            ("sys/devices/platform/soc/40000000.pcie/pci0004:00/0004:00:00.0", Some("pci0004:00"), &["0004:00:00.0"]),
            // Behind VMD.
            (
                "sys/devices/pci0000:64/0000:64:00.5/pci10000:00/10000:00:02.0/10000:01:00.0",
                Some("pci10000:00"),
                &["10000:00:02.0", "10000:01:00.0"],
            ),
            // A device of another bus below it.
            ("sys/devices/pci0000:00/0000:00:05.0/mlx5_core.rdma.0", Some("pci0000:00"), &["0000:00:05.0"]),
            ("sys/devices/virtual/0000:00:05.0", None, &["0000:00:05.0"]),
        ] {
            let expected = expected.iter().map(ToString::to_string).collect();
            assert_eq!(chain(path), Some((bridge.map(String::from), expected)), "{path}");
        }
        assert_eq!(chain("sys/devices/virtual/infiniband/rxe0"), None);
        assert_eq!(chain("sys/devices/pci0000:00"), None);
    }
}
