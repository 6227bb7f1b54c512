//! Network devices, from /sys/class/net.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files;

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Short", into = "Short")]
pub struct NetDevice {
    /// Its name (eth0).
    pub name: String,
    /// Whether it is up and running, as NCCL asks of one (IFF_UP, IFF_RUNNING).
    pub up: bool,
    /// Its speed in Mb/s, where the driver tells one.
    pub mbps: Option<u32>,
    /// What it is.
    pub kind: NetKind,
}

/// What a network device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetKind {
    /// A card's port, or a hypervisor's.
    Hardware,
    /// A bond of several.
    Bond,
    /// A VLAN on another one.
    Vlan,
    /// Made by software, such as lo, bridges and containers' ends of a cable; also
    /// a device of which nothing but its name is known.
    Virtual,
}

/// Short on the way from a child.
type Short = (String, bool, Option<u32>, NetKind);

impl From<Short> for NetDevice {
    fn from((name, up, mbps, kind): Short) -> NetDevice {
        NetDevice { name, up, mbps, kind }
    }
}

impl From<NetDevice> for Short {
    fn from(device: NetDevice) -> Short {
        (device.name, device.up, device.mbps, device.kind)
    }
}

/// More than any machine has, even with a device for each of its containers.
const MOST: usize = 4096;

/// IFF_UP of if.h.
const UP: u32 = 0x1;

/// The devices below `root` in the kernel's order, which is the one NCCL meets
/// them in; `None` where /sys is not there.
///
/// # Errors
/// One line when the directory is there but cannot be read.
pub fn devices(root: &Path) -> Result<Option<Vec<NetDevice>>, String> {
    let class = root.join("sys/class/net");
    let unreadable = |error| format!("network devices unknown: {}: {error}", class.display());
    let Some(names) = files::names(&class).map_err(unreadable)? else {
        return Ok(None);
    };
    if names.len() > MOST {
        return Err(format!("network devices unknown: {} has more than {MOST}", class.display()));
    }
    let mut found: Vec<(u32, NetDevice)> = Vec::new();
    for name in names {
        let of = |attribute: &str| files::attribute(&class.join(&name).join(attribute));
        // bonding_masters is a file among the devices.
        let Some(up) = is_up(&class.join(&name)) else {
            continue;
        };
        let index = of("ifindex").and_then(|index| index.parse().ok()).unwrap_or(u32::MAX);
        let mbps = of("speed").and_then(|speed| speed.parse().ok()).filter(|speed| (1..u32::MAX).contains(speed));
        let kind = kind(&class.join(&name));
        found.push((index, NetDevice { name, up, mbps, kind }));
    }
    // Without an index (a recorded tree): lo is the first everywhere.
    found.sort_by_key(|(index, device)| (*index, device.name != "lo", device.name.clone()));
    Ok(Some(of_this_namespace(root, found.into_iter().map(|(_, device)| device).collect())))
}

/// Whether the device with this directory is up and running; `None` where it is no
/// device.
pub(super) fn is_up(directory: &Path) -> Option<bool> {
    let flags = files::attribute(&directory.join("flags"))?;
    let flags = flags.strip_prefix("0x").and_then(|flags| u32::from_str_radix(flags, 16).ok()).unwrap_or(0);
    // The kernel counts an unknown state, as lo's, as running (netif_oper_up).
    let state = files::attribute(&directory.join("operstate"));
    Some(flags & UP != 0 && state.is_none_or(|state| state == "up" || state == "unknown"))
}

/// By where its entry leads to, and for what software made by the kind that it
/// tells. Which kinds the kernel names: bond_main.c, vlan_dev.c (DEVTYPE).
fn kind(entry: &Path) -> NetKind {
    let link = fs::read_link(entry).unwrap_or_default();
    if !link.to_string_lossy().contains("/devices/virtual/") {
        return NetKind::Hardware;
    }
    let told = files::attribute(&entry.join("uevent")).unwrap_or_default();
    match told.lines().find_map(|line| line.strip_prefix("DEVTYPE=")) {
        Some("bond") => NetKind::Bond,
        Some("vlan") => NetKind::Vlan,
        _ => NetKind::Virtual,
    }
}

/// The devices of the reader's own network namespace: /sys shows its mounter's,
/// and a container may have another one.
pub fn of_this_namespace(root: &Path, mut devices: Vec<NetDevice>) -> Vec<NetDevice> {
    let Some(here) = listed(root) else {
        return devices;
    };
    devices.retain(|device| here.contains(&device.name));
    let unseen = |name: &String| !devices.iter().any(|device| device.name == *name);
    let others: Vec<String> = here.iter().filter(|name| unseen(name)).cloned().collect();
    devices.extend(others.into_iter().map(|name| NetDevice { name, up: true, mbps: None, kind: NetKind::Virtual }));
    devices
}

/// The names in /proc/net/dev, which are those of the reader's own namespace.
fn listed(root: &Path) -> Option<BTreeSet<String>> {
    let text = files::regular(&root.join("proc/net/dev"), 1 << 20).ok()??;
    let text = String::from_utf8_lossy(&text);
    Some(text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_string())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::Tree;

    fn device(tree: &Tree, name: &str, index: &str, flags: &str, state: &str, speed: &str) {
        for (attribute, value) in [("ifindex", index), ("flags", flags), ("operstate", state), ("speed", speed)] {
            if !value.is_empty() {
                tree.file(&format!("sys/class/net/{name}/{attribute}"), &format!("{value}\n"));
            }
        }
    }

    fn seen(tree: &Tree) -> Vec<(String, bool, Option<u32>)> {
        let devices = devices(tree.root()).unwrap().unwrap();
        devices.into_iter().map(|device| (device.name, device.up, device.mbps)).collect()
    }

    #[test]
    fn devices_as_the_kernel_shows_them() {
        let tree = Tree::new("netdevs");
        device(&tree, "lo", "1", "0x9", "unknown", "");
        device(&tree, "eth0", "2", "0x1003", "up", "25000");
        device(&tree, "ib0", "5", "0x1003", "up", "-1");
        device(&tree, "eth1", "3", "0x1003", "down", "4294967295");
        device(&tree, "eth2", "4", "0x1002", "down", "100000");
        tree.file("sys/class/net/bonding_masters", "bond0\n");
        let expected = [
            ("lo", true, None),
            ("eth0", true, Some(25_000)),
            ("eth1", false, None),
            ("eth2", false, Some(100_000)),
            ("ib0", true, None),
        ];
        assert_eq!(seen(&tree), expected.map(|(name, up, speed)| (name.to_string(), up, speed)));
    }

    #[test]
    fn what_software_made_is_known_by_where_its_entry_leads() {
        let tree = Tree::new("netdevs-kinds");
        let made = [
            ("eth0", "pci0000:00/0000:00:03.0/net", "", NetKind::Hardware),
            ("bond0", "virtual/net", "DEVTYPE=bond\nINTERFACE=bond0\n", NetKind::Bond),
            ("bond0.100", "virtual/net", "DEVTYPE=vlan\n", NetKind::Vlan),
            ("br0", "virtual/net", "DEVTYPE=bridge\n", NetKind::Virtual),
            ("lo", "virtual/net", "INTERFACE=lo\nIFINDEX=1\n", NetKind::Virtual),
        ];
        std::fs::create_dir_all(tree.root().join("sys/class/net")).unwrap();
        for (name, place, uevent, _) in made {
            tree.file(&format!("sys/devices/{place}/{name}/flags"), "0x1003\n");
            tree.file(&format!("sys/devices/{place}/{name}/uevent"), uevent);
            let link = tree.root().join("sys/class/net").join(name);
            std::os::unix::fs::symlink(format!("../../devices/{place}/{name}"), link).unwrap();
        }
        let devices = devices(tree.root()).unwrap().unwrap();
        for (name, _, _, kind) in made {
            let device = devices.iter().find(|device| device.name == name).unwrap();
            assert_eq!(device.kind, kind, "{name}");
        }
    }

    #[test]
    fn another_namespace_s_sys_does_not_count() {
        let tree = Tree::new("netdevs-namespace");
        device(&tree, "lo", "1", "0x9", "unknown", "");
        device(&tree, "ib0", "2", "0x1003", "up", "");
        tree.file("proc/net/dev", "Inter-|   Receive\n face |bytes\n    lo:   0\n  eth0:   7 1\n");
        assert_eq!(seen(&tree), [("lo".to_string(), true, None), ("eth0".to_string(), true, None)]);
    }

    #[test]
    fn no_sys_is_no_fault_and_this_machine_has_a_loopback() {
        assert_eq!(devices(Path::new("/nonexistent")), Ok(None));
        let devices = devices(Path::new("/")).unwrap().unwrap();
        let lo = devices.iter().find(|device| device.name == "lo");
        assert!(lo.is_some_and(|lo| lo.kind == NetKind::Virtual), "{devices:?}");
        let listed = crate::facts::network::interfaces().unwrap();
        let missing: Vec<_> = listed.iter().filter(|i| !devices.iter().any(|d| d.name == i.name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
