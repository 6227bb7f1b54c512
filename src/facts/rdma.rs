//! RDMA devices and their ports, from /sys/class/infiniband. No device is
//! opened: a hanging driver would take the reader with it.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files;

/// One port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaPort {
    /// The device (mlx5_0).
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// What it speaks.
    pub link: LinkLayer,
    /// Whether its state is ACTIVE.
    pub active: bool,
    /// Whether its cable is up (phys_state LinkUp); as `active` where the driver
    /// does not tell.
    pub link_up: bool,
    /// Whether its state could be read at all. Restricted functions answer EINVAL
    /// (<https://github.com/prometheus/node_exporter/issues/3434>): none to use.
    pub readable: bool,
    /// Its rate in Gb/s.
    pub gbps: Option<u32>,
    /// The kernel driver (mlx5_core, efa).
    pub driver: Option<String>,
}

/// What an RDMA port speaks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
    /// Neither: AWS EFA says "Unspecified".
    #[default]
    Other,
}

/// A row of a port's table of addresses (GIDs).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidRow {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The row, which NCCL_IB_GID_INDEX names.
    pub index: u32,
    /// The address; an IPv4 address is written into one of IPv6.
    pub address: Ipv6Addr,
}

const CLASS: &str = "sys/class/infiniband";

/// More than any machine has.
const MOST_PORTS: usize = 256;

/// Rows that are looked at: those in use stand first.
const MOST_ROWS: u32 = 16;

/// So many empty rows one after the other are taken for the end.
const GAP: u32 = 3;

/// The ports below `root`, by name and number. No devices where the kernel knows
/// none; `None` where /sys itself is not there.
///
/// # Errors
/// One line when the directory is there but cannot be read.
pub fn ports(root: &Path) -> Result<Option<Vec<RdmaPort>>, String> {
    let class = root.join(CLASS);
    let unreadable = |error| format!("RDMA devices unknown: {}: {error}", class.display());
    let Some(devices) = files::names(&class).map_err(unreadable)? else {
        return Ok(files::is_directory(&root.join("sys/class")).then(Vec::new));
    };
    let mut ports = Vec::new();
    for device in devices {
        let directory = class.join(&device);
        let driver = files::link(&directory.join("device/driver"));
        let numbers = files::names(&directory.join("ports")).ok().flatten().unwrap_or_default();
        let mut numbers: Vec<u8> = numbers.iter().filter_map(|number| number.parse().ok()).collect();
        numbers.sort_unstable();
        for port in numbers {
            if ports.len() == MOST_PORTS {
                return Err(format!("RDMA devices unknown: {} has more than {MOST_PORTS} ports", class.display()));
            }
            let of = |name: &str| files::attribute(&directory.join(format!("ports/{port}/{name}")));
            let link = match of("link_layer").as_deref() {
                Some("InfiniBand") => LinkLayer::InfiniBand,
                Some("Ethernet") => LinkLayer::Ethernet,
                _ => LinkLayer::Other,
            };
            // Each further question to a restricted function is a line in the kernel's log.
            let state = of("state").filter(|state| !state.is_empty());
            let active = state.as_ref().is_some_and(|state| state.ends_with("ACTIVE") && !state.ends_with("INACTIVE"));
            let of = |name: &str| state.as_ref().and_then(|_| of(name));
            ports.push(RdmaPort {
                device: device.clone(),
                port,
                link,
                active,
                link_up: of("phys_state").map_or(active, |phys| phys.ends_with("LinkUp")),
                readable: state.is_some(),
                gbps: of("rate").as_deref().and_then(rate),
                driver: driver.clone(),
            });
        }
    }
    Ok(Some(ports))
}

/// "400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)".
fn rate(text: &str) -> Option<u32> {
    let number = text.split_whitespace().next()?.parse::<f64>().ok()?;
    (0.0..1e6).contains(&number).then_some(number as u32)
}

impl GidRow {
    /// Its IPv4 address, where it is one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address.to_ipv4_mapped()
    }

    /// Whether peers beyond the next switch may know the address: 169.254.0.0/16
    /// and fe80::/10 are the same network on every link.
    pub fn is_routable(&self) -> bool {
        match self.ipv4() {
            Some(address) => !address.is_link_local(),
            None => !self.address.is_unicast_link_local(),
        }
    }
}

/// The rows that RoCE v2 can use, of active ports on Ethernet: with its kind and an
/// address that is not all zero.
pub fn roce_v2_rows(root: &Path, ports: &[RdmaPort]) -> Vec<GidRow> {
    rows(root, ports, MOST_ROWS)
}

/// The same up to the first gap, which is where most tables end: a node's ports
/// are looked at before every step.
pub fn first_roce_v2_rows(root: &Path, ports: &[RdmaPort]) -> Vec<GidRow> {
    rows(root, ports, GAP)
}

fn rows(root: &Path, ports: &[RdmaPort], gap: u32) -> Vec<GidRow> {
    let mut rows = Vec::new();
    for port in ports.iter().filter(|port| port.active && port.link == LinkLayer::Ethernet) {
        let directory = root.join(CLASS).join(&port.device).join(format!("ports/{}", port.port));
        let mut empty = 0;
        for index in 0..MOST_ROWS {
            let Some(kind) = files::attribute(&directory.join(format!("gid_attrs/types/{index}"))) else {
                empty += 1;
                if empty == gap {
                    break;
                }
                continue;
            };
            empty = 0;
            let address = (kind == "RoCE v2").then(|| files::attribute(&directory.join(format!("gids/{index}"))));
            let address = address.flatten().and_then(|address| address.parse::<Ipv6Addr>().ok());
            if let Some(address) = address.filter(|address| !address.is_unspecified()) {
                rows.push(GidRow { device: port.device.clone(), port: port.port, index, address });
            }
        }
    }
    rows
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// The first port of a ConnectX, active at 400 Gb/s.
    pub(crate) fn rdma_port(device: &str, link: LinkLayer) -> RdmaPort {
        RdmaPort {
            device: device.into(),
            port: 1,
            link,
            active: true,
            link_up: true,
            readable: true,
            gbps: Some(400),
            driver: Some("mlx5_core".into()),
        }
    }

    /// A directory of its own for a tree of files; removed when dropped.
    pub(crate) struct Tree(PathBuf);

    impl Tree {
        pub(crate) fn new(name: &str) -> Tree {
            let folder = std::env::temp_dir().join(format!("palingenesis-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).unwrap();
            Tree(folder)
        }

        pub(crate) fn root(&self) -> &Path {
            &self.0
        }

        pub(crate) fn file(&self, path: &str, text: &str) -> &Tree {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        /// A port as the kernel's drivers show it.
        pub(crate) fn port(&self, device: &str, port: u8, state: &str, rate: &str, link: &str) -> &Tree {
            let directory = format!("{CLASS}/{device}/ports/{port}");
            self.file(&format!("{directory}/state"), &format!("{state}\n"));
            self.file(&format!("{directory}/rate"), &format!("{rate}\n"));
            self.file(&format!("{directory}/link_layer"), &format!("{link}\n"))
        }

        pub(crate) fn driver(&self, device: &str, driver: &str) -> &Tree {
            let directory = self.0.join(CLASS).join(device).join("device");
            fs::create_dir_all(&directory).unwrap();
            std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), directory.join("driver")).unwrap();
            self
        }

        pub(crate) fn gid(&self, device: &str, index: u32, kind: &str, address: &str) -> &Tree {
            let directory = format!("{CLASS}/{device}/ports/1");
            self.file(&format!("{directory}/gid_attrs/types/{index}"), &format!("{kind}\n"));
            self.file(&format!("{directory}/gids/{index}"), &format!("{address}\n"))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn ports_as_the_kernel_shows_them() {
        let tree = Tree::new("rdma");
        tree.port("mlx5_10", 1, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
        tree.port("mlx5_0", 1, "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet").driver("mlx5_0", "mlx5_core");
        tree.port("mlx5_0", 2, "1: DOWN", "2.5 Gb/sec (1X SDR)", "InfiniBand");
        tree.file(&format!("{CLASS}/mlx5_0/ports/2/phys_state"), "3: Disabled\n");
        tree.file(&format!("{CLASS}/mlx5_10/ports/1/phys_state"), "5: LinkUp\n");
        tree.port("rdmap0s6", 1, "4: ACTIVE", "100 Gb/sec (4X EDR)", "Unspecified").driver("rdmap0s6", "efa");
        // A device without ports, and one that says nothing.
        tree.file(&format!("{CLASS}/bare/node_guid"), "0\n").file(&format!("{CLASS}/mute/ports/1/x"), "");
        let ports = ports(tree.root()).unwrap().unwrap();
        let seen: Vec<_> = ports.iter().map(|p| (p.device.as_str(), p.port, p.link, p.active, p.gbps)).collect();
        use LinkLayer::*;
        assert_eq!(
            seen,
            [
                ("mlx5_0", 1, Ethernet, true, Some(100)),
                ("mlx5_0", 2, InfiniBand, false, Some(2)),
                ("mlx5_10", 1, InfiniBand, true, Some(400)),
                ("mute", 1, Other, false, None),
                ("rdmap0s6", 1, Other, true, Some(100)),
            ]
        );
        let told: Vec<_> = ports.iter().map(|port| (port.link_up, port.readable)).collect();
        assert_eq!(told, [(true, true), (false, true), (true, true), (false, false), (true, true)]);
        assert_eq!(ports[0].driver.as_deref(), Some("mlx5_core"));
        assert_eq!(ports[2].driver, None);
        assert_eq!(ports[4].driver.as_deref(), Some("efa"));
    }

    #[test]
    fn no_rdma_and_no_sys_are_two_things() {
        let tree = Tree::new("no-rdma");
        assert_eq!(ports(tree.root()), Ok(None));
        tree.file("sys/class/net/lo/flags", "0x9\n");
        assert_eq!(ports(tree.root()), Ok(Some(Vec::new())));
        tree.file(CLASS, "not a directory");
        assert!(ports(tree.root()).is_ok());
    }

    #[test]
    fn this_machine_s_own_ports_can_be_read() {
        let ports = ports(Path::new("/")).unwrap();
        let there = Path::new("/sys/class/infiniband").is_dir();
        assert!(ports.is_some_and(|ports| there || ports.is_empty()));
    }

    /// <https://github.com/getainode/ainode/pull/89>: rows that look like
    /// addresses and lead nowhere.
    #[test]
    fn rows_that_roce_v2_can_use() {
        let tree = Tree::new("gids");
        tree.port("rocep1s0f1", 1, "4: ACTIVE", "200 Gb/sec (4X HDR)", "Ethernet");
        tree.port("rocep1s0f0", 1, "1: DOWN", "200 Gb/sec (4X HDR)", "Ethernet");
        tree.gid("rocep1s0f1", 0, "IB/RoCE v1", "fe80:0000:0000:0000:0202:c9ff:fe00:0001");
        tree.gid("rocep1s0f1", 1, "RoCE v2", "fe80:0000:0000:0000:0202:c9ff:fe00:0001");
        tree.gid("rocep1s0f1", 2, "RoCE v2", "0000:0000:0000:0000:0000:0000:0000:0000");
        tree.gid("rocep1s0f1", 3, "RoCE v2", "0000:0000:0000:0000:0000:ffff:c000:020d");
        tree.gid("rocep1s0f1", 4, "RoCE v2", "0000:0000:0000:0000:0000:ffff:a9fe:0701");
        // Behind the gap of addresses that were taken away.
        tree.gid("rocep1s0f1", 9, "RoCE v2", "2001:0db8:0000:0000:0000:0000:0000:000d");
        tree.gid("rocep1s0f0", 3, "RoCE v2", "0000:0000:0000:0000:0000:ffff:c000:020e");
        let ports = ports(tree.root()).unwrap().unwrap();
        let all = roce_v2_rows(tree.root(), &ports);
        assert!(all.iter().all(|row| (row.device.as_str(), row.port) == ("rocep1s0f1", 1)));
        let seen = |rows: &[GidRow]| -> Vec<_> {
            rows.iter().map(|row| (row.index, row.ipv4().map(|ip| ip.to_string()), row.is_routable())).collect()
        };
        let ip = |text: &str| Some(text.to_string());
        let expected = [(1, None, false), (3, ip("192.0.2.13"), true), (4, ip("169.254.7.1"), false), (9, None, true)];
        assert_eq!(seen(&all), expected);
        assert_eq!(seen(&first_roce_v2_rows(tree.root(), &ports)), expected[..3]);
    }
}
