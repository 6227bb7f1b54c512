//! RoCE ports that lead nowhere: active, but with an address that no peer knows,
//! or on a network that rank 0 is not in. NCCL pairs the cards of two nodes by
//! position, so that one stray port breaks the pair
//! (<https://github.com/getainode/ainode/pull/89>).
//!
//! Rails are networks of their own by intent, and rank 0's address lies in one of
//! them: so ports are left out only where those on rank 0's network are as many as
//! the GPUs and as near to each. Ports without an IPv4 address stay.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use crate::facts::network::Interface;
use crate::facts::rdma::LinkLayer;
use crate::facts::{GidRow, RdmaPort};

use super::super::{Facts, sockets};
use super::Distance;

/// What is known of the node's addresses, and of rank 0's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Addresses<'a> {
    /// Rows of the ports' tables.
    pub gids: &'a [GidRow],
    /// The node's interfaces.
    pub interfaces: &'a [Interface],
    /// Where rank 0 is.
    pub rank0: &'a [IpAddr],
}

/// Rank 0's addresses; `master` is MASTER_ADDR.
pub fn rank0(facts: &Facts, master: Option<&str>) -> Vec<IpAddr> {
    let mut all = sockets::rank0_addresses(facts, master);
    all.extend(master.and_then(|master| master.parse().ok()).filter(|address| !all.contains(address)));
    all
}

impl<'a> Addresses<'a> {
    /// Those that the node has.
    pub fn of(facts: &Facts<'a>) -> Addresses<'a> {
        Addresses { gids: &facts.node.gids, interfaces: facts.interfaces, rank0: &[] }
    }

    fn rows(&self, port: &RdmaPort) -> impl Iterator<Item = &'a GidRow> {
        let (device, number) = (port.device.clone(), port.port);
        self.gids.iter().filter(move |row| row.device == device && row.port == number)
    }

    /// The link-local address, where the port has no other.
    pub fn link_local(&self, port: &RdmaPort) -> Option<Ipv4Addr> {
        let first = self.rows(port).find_map(GidRow::ipv4)?;
        (!self.rows(port).any(GidRow::is_routable)).then_some(first)
    }

    /// Whether two of these ports on Ethernet have no network in common.
    pub fn are_apart<'p>(&self, ports: impl Iterator<Item = &'p RdmaPort>) -> bool {
        let on_ethernet = ports.filter(|port| port.link == LinkLayer::Ethernet);
        let networks: Vec<Vec<&Interface>> =
            on_ethernet.map(|port| self.networks(port)).filter(|networks| !networks.is_empty()).collect();
        let shared = |one: &[&Interface], other: &[&Interface]| {
            one.iter().any(|one| other.iter().any(|other| one.prefix == other.prefix && one.reaches(other.address)))
        };
        networks.windows(2).any(|pair| !shared(&pair[0], &pair[1]))
    }

    /// The networks of the port's IPv4 addresses.
    fn networks(&self, port: &RdmaPort) -> Vec<&'a Interface> {
        let own: Vec<IpAddr> =
            self.rows(port).filter(|row| row.is_routable()).filter_map(GidRow::ipv4).map(IpAddr::V4).collect();
        self.interfaces.iter().filter(|interface| own.contains(&interface.address)).collect()
    }
}

/// A port that could be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The port.
    pub port: &'a RdmaPort,
    /// From each GPU of the node to its card.
    pub distances: Vec<Distance>,
}

/// For each of the ports why it leads nowhere, or `None`.
pub fn astray(candidates: &[Candidate], addresses: &Addresses) -> Vec<Option<String>> {
    let on_ethernet = |candidate: &Candidate| candidate.port.active && candidate.port.link == LinkLayer::Ethernet;
    let mut out: Vec<Option<String>> = vec![None; candidates.len()];
    // Two machines on one cable may well meet by link-local addresses.
    if addresses.rank0.iter().any(|rank0| matches!(rank0, IpAddr::V4(ip) if ip.is_link_local())) {
        return out;
    }
    let routable = |candidate: &Candidate| addresses.rows(candidate.port).any(GidRow::is_routable);
    // Where all are like that they may be meant so.
    if candidates.iter().any(|candidate| on_ethernet(candidate) && routable(candidate)) {
        for (candidate, out) in candidates.iter().zip(&mut out).filter(|(candidate, _)| on_ethernet(candidate)) {
            let address = addresses.link_local(candidate.port);
            *out = address.map(|address| format!("link-local address {address} only: no peer knows it"));
        }
    }
    let rest = || candidates.iter().zip(&out).filter(|(candidate, out)| on_ethernet(candidate) && out.is_none());
    let rest: Vec<&Candidate> = rest().map(|(candidate, _)| candidate).collect();
    let networks = Networks::of(&rest, addresses);
    let to_rank0 = |network: &Interface| addresses.rank0.iter().any(|rank0| network.reaches(*rank0));
    let Some(leading) = networks.0.iter().find(|(network, ports)| to_rank0(network) && enough(ports, &rest)) else {
        return out;
    };
    let several_gpus = gpus(&rest) > 1;
    for (candidate, out) in candidates.iter().zip(&mut out) {
        let mut own = networks.0.iter().filter(|(_, ports)| ports.iter().any(|port| std::ptr::eq(*port, candidate)));
        // As many and as near again: a second plane, with several GPUs.
        let stays = |(network, ports): &(&Interface, Vec<&Candidate>)| {
            to_rank0(network) || (several_gpus && enough(ports, &rest))
        };
        if let Some(first) = own.clone().next()
            && !own.any(stays)
        {
            *out = Some(format!("{} leads to rank 0, {} does not", shown(leading.0), shown(first.0)));
        }
    }
    out
}

/// The networks of several ports, and the ports of each.
struct Networks<'c, 'a, 'n>(Vec<(&'n Interface, Vec<&'c Candidate<'a>>)>);

impl<'c, 'a, 'n> Networks<'c, 'a, 'n> {
    fn of(candidates: &[&'c Candidate<'a>], addresses: &Addresses<'n>) -> Networks<'c, 'a, 'n> {
        let mut all: Vec<(&Interface, Vec<&Candidate>)> = Vec::new();
        for candidate in candidates.iter().copied() {
            for network in addresses.networks(candidate.port) {
                let same = |known: &Interface| known.prefix == network.prefix && known.reaches(network.address);
                match all.iter_mut().find(|(known, _)| same(known)) {
                    Some((_, ports)) => ports.push(candidate),
                    None => all.push((network, vec![candidate])),
                }
            }
        }
        Networks(all)
    }
}

fn gpus(candidates: &[&Candidate]) -> usize {
    candidates.iter().map(|candidate| candidate.distances.len()).max().unwrap_or(0)
}

/// Whether some of the ports are as near to each GPU as all of them, and as many as
/// the GPUs.
fn enough(some: &[&Candidate], all: &[&Candidate]) -> bool {
    let cards: BTreeSet<&str> = some.iter().map(|candidate| candidate.port.device.as_str()).collect();
    let nearest = |list: &[&Candidate], gpu: usize| list.iter().filter_map(|one| one.distances.get(gpu).copied()).min();
    let gpus = gpus(all);
    gpus > 0 && cards.len() >= gpus && (0..gpus).all(|gpu| nearest(some, gpu) == nearest(all, gpu))
}

/// "192.0.2.0/24".
fn shown(interface: &Interface) -> String {
    let IpAddr::V4(address) = interface.address else {
        return format!("{}/{}", interface.address, interface.prefix);
    };
    let mask = u32::MAX.checked_shl(32 - u32::from(interface.prefix.min(32))).unwrap_or(0);
    format!("{}/{}", Ipv4Addr::from_bits(address.to_bits() & mask), interface.prefix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::rdma_port;
    use crate::plan::tests::World;

    const NEAR: Distance = Distance::Switch { shared: -2, hops: 1 };
    const NONE: [usize; 0] = [];
    const FAR: Distance = Distance::System { slit: 21 };

    /// A port on Ethernet, its address and how far the GPUs are.
    type Port<'a> = (&'a str, &'a str, Vec<Distance>);

    /// What becomes of ports, one row each; all networks are /24.
    fn verdicts(ports: &[Port], rank0: &[&str]) -> Vec<Option<String>> {
        let all: Vec<RdmaPort> = ports
            .iter()
            .map(|(device, ..)| RdmaPort { gbps: Some(200), ..rdma_port(device, LinkLayer::Ethernet) })
            .collect();
        let mut gids = Vec::new();
        let mut interfaces = Vec::new();
        for (device, address, _) in ports {
            for (index, text) in ["fe80::1", address].into_iter().enumerate().filter(|(_, text)| !text.is_empty()) {
                let address: IpAddr = text.parse().unwrap();
                let written = match address {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                gids.push(GidRow { device: (*device).into(), port: 1, index: 1 + 2 * index as u32, address: written });
                interfaces.push(Interface {
                    name: format!("net-{device}"),
                    address,
                    prefix: if address.is_ipv4() { 24 } else { 64 },
                });
            }
        }
        let rank0: Vec<IpAddr> = rank0.iter().map(|address| address.parse().unwrap()).collect();
        let addresses = Addresses { gids: &gids, interfaces: &interfaces, rank0: &rank0 };
        let candidates: Vec<Candidate> = all
            .iter()
            .zip(ports)
            .map(|(port, (_, _, distances))| Candidate { port, distances: distances.clone() })
            .collect();
        astray(&candidates, &addresses)
    }

    fn out(ports: &[Port], rank0: &[&str]) -> Vec<usize> {
        verdicts(ports, rank0).iter().enumerate().filter_map(|(index, why)| why.as_ref().map(|_| index)).collect()
    }

    /// <https://github.com/getainode/ainode/pull/89>
    #[test]
    fn of_interchangeable_ports_those_that_lead_to_rank_0_remain() {
        let one = |distance| vec![distance];
        let ports = [
            ("roceP2p1s0f1", "192.0.2.13", one(Distance::Node)),
            ("rocep1s0f0", "198.51.100.2", one(Distance::Node)),
            ("roceP2p1s0f0", "169.254.7.1", one(Distance::Node)),
        ];
        let verdicts = verdicts(&ports, &["192.0.2.12"]);
        assert_eq!(
            verdicts,
            [
                None,
                Some("192.0.2.0/24 leads to rank 0, 198.51.100.0/24 does not".to_string()),
                Some("link-local address 169.254.7.1 only: no peer knows it".to_string()),
            ]
        );
        // Rank 0 elsewhere, or unknown: the link-local one goes all the same.
        assert_eq!(out(&ports, &["203.0.113.1"]), [2]);
        assert_eq!(out(&ports, &[]), [2]);
        // MASTER_ADDR is link-local itself: they are meant.
        assert_eq!(out(&ports, &["169.254.7.2"]), NONE);
        // The other one is nearer to the GPU: it stays.
        let ports = [("a", "192.0.2.13", one(Distance::Node)), ("b", "198.51.100.2", one(NEAR))];
        assert_eq!(out(&ports, &["192.0.2.12"]), NONE);
        assert_eq!(out(&ports, &["198.51.100.9"]), [0]);
    }

    /// <https://github.com/oracle-quickstart/oci-hpc>: two ports for each GPU, sixteen
    /// networks, and MASTER_ADDR in one of them.
    #[test]
    fn rails_are_networks_of_their_own() {
        let near = |gpu: usize| (0..8).map(|other| if other == gpu { NEAR } else { FAR }).collect::<Vec<_>>();
        // And two planes, each a network with a port near each GPU.
        for (cards, a_network_each) in [(1, true), (2, true), (2, false)] {
            let names: Vec<(String, String, usize)> = (0..8 * cards)
                .map(|card| {
                    let network = if a_network_each { card } else { card % cards };
                    (format!("mlx5_{card}"), format!("10.224.{network}.{}", 10 + card), card / cards)
                })
                .collect();
            let ports: Vec<Port> =
                names.iter().map(|(name, address, gpu)| (name.as_str(), address.as_str(), near(*gpu))).collect();
            assert_eq!(out(&ports, &["10.224.0.200"]), NONE, "{cards} {a_network_each}");
        }
        // Two ports more for storage, near two of the GPUs, are no plane.
        let mut names: Vec<(String, String, usize)> =
            (0..8).map(|card| (format!("mlx5_{card}"), format!("10.224.0.{}", 10 + card), card)).collect();
        names.extend([0, 4].map(|gpu| (format!("storage{gpu}"), format!("10.9.9.{}", 1 + gpu), gpu)));
        let ports: Vec<Port> =
            names.iter().map(|(name, address, gpu)| (name.as_str(), address.as_str(), near(*gpu))).collect();
        assert_eq!(out(&ports, &["10.224.0.200"]), [8, 9]);
        // The same where the machine does not tell what is near: eight networks.
        for distance in [Distance::Unknown, Distance::Node] {
            let names: Vec<(String, String)> =
                (0..8).map(|card| (format!("mlx5_{card}"), format!("10.224.{card}.10"))).collect();
            let ports: Vec<Port> =
                names.iter().map(|(name, address)| (name.as_str(), address.as_str(), vec![distance; 8])).collect();
            assert_eq!(out(&ports, &["10.224.0.200"]), NONE);
        }
    }

    #[test]
    fn ports_of_which_too_little_is_known_stay() {
        let one = || vec![NEAR];
        // Without an IPv4 address.
        assert_eq!(out(&[("a", "192.0.2.13", one()), ("b", "", one())], &["192.0.2.12"]), NONE);
        assert_eq!(out(&[("a", "192.0.2.13", one()), ("b", "2001:db8::7", one())], &["192.0.2.12"]), NONE);
        // All of them link-local: two machines on a cable.
        assert_eq!(out(&[("a", "169.254.7.1", one()), ("b", "169.254.8.1", one())], &[]), NONE);
        assert_eq!(out(&[("a", "169.254.7.1", one()), ("b", "", one())], &[]), NONE);
        // No GPUs, no network, no port.
        assert_eq!(out(&[("a", "192.0.2.13", vec![]), ("b", "198.51.100.2", vec![])], &["192.0.2.12"]), NONE);
        assert_eq!(out(&[], &["192.0.2.12"]), NONE);
        // InfiniBand is none of this.
        let port = RdmaPort {
            device: "mlx5_0".into(),
            port: 1,
            link: LinkLayer::InfiniBand,
            active: true,
            link_up: true,
            readable: true,
            gbps: None,
            driver: None,
        };
        let candidates = [Candidate { port: &port, distances: one() }];
        assert_eq!(astray(&candidates, &Addresses::default()), [None]);
    }

    /// The report's machine: a GPU and two cards of two ports, of which one is down,
    /// one has a link-local address and one is on another network.
    fn spark() -> World {
        use super::super::machine::{CONNECTX_7, Machine};
        let (one, two) = ("pci0000:00/0000:00:00.0", "pci0002:00/0002:00:00.0");
        let mut machine =
            Machine::default().node(0, "0-19", &[(0, 10)]).gpu("000f:01:00.0", 0, "pci000f:00/000f:00:00.0");
        for (name, at, path) in [
            ("rocep1s0f0", "0000:01:00.0", one),
            ("rocep1s0f1", "0000:01:00.1", one),
            ("roceP2p1s0f0", "0002:01:00.0", two),
            ("roceP2p1s0f1", "0002:01:00.1", two),
        ] {
            machine = machine.nic(name, at, 0, path).of(CONNECTX_7, LinkLayer::Ethernet, 200);
        }
        machine.link("rocep1s0f1", false);
        let mut world = World::new("spark[1-2]", "1(x2)", 1).resolves(&["192.0.2.12"]);
        world.node.topology = machine.topology;
        world.node.rdma = Some(machine.ports);
        world.node.gpu_models = vec!["NVIDIA GB10".into()];
        for (device, netdev, address) in [
            ("roceP2p1s0f1", "enP2p1s0f1np1", "192.0.2.13"),
            ("rocep1s0f0", "enp1s0f0np0", "198.51.100.2"),
            ("roceP2p1s0f0", "enP2p1s0f0np0", "169.254.7.1"),
        ] {
            let address: Ipv4Addr = address.parse().unwrap();
            for (index, written) in [(1, "fe80::1".parse().unwrap()), (3, address.to_ipv6_mapped())] {
                world.node.gids.push(GidRow { device: device.into(), port: 1, index, address: written });
            }
            let prefix = if address.is_link_local() { 16 } else { 24 };
            world.interfaces.push(Interface { name: netdev.into(), address: address.into(), prefix });
        }
        world
    }

    /// <https://github.com/getainode/ainode/pull/89>
    #[test]
    fn nccl_gets_the_port_that_leads_to_rank_0_and_a_note_for_each_other() {
        let plan = spark().plan("").unwrap();
        assert_eq!(plan.value("NCCL_IB_HCA"), Some("=roceP2p1s0f1:1"));
        let why = plan.env.iter().find(|set| set.name == "NCCL_IB_HCA").map(|set| set.why.as_str()).unwrap();
        assert!(why.contains("rocep1s0f0") && why.contains("roceP2p1s0f0"), "{why}");
        let world = spark();
        let settings = crate::config::Settings::default();
        let rank0 = ["192.0.2.12".parse().unwrap()];
        let view = super::super::nics::View {
            topology: &world.node.topology,
            ports: world.node.rdma.as_deref().unwrap(),
            addresses: Addresses { gids: &world.node.gids, interfaces: &world.interfaces, rank0: &rank0 },
            settings: &settings,
            rules: &crate::config::nics::NicRules::default(),
        };
        let nics = super::super::nics::choose(&view);
        let verdict = |name: &str| {
            let index = world.node.topology.nics.iter().position(|nic| nic.name == name).unwrap();
            (nics.verdicts[index].used, nics.verdicts[index].why.as_str())
        };
        assert_eq!(verdict("rocep1s0f0"), (false, "192.0.2.0/24 leads to rank 0, 198.51.100.0/24 does not"));
        assert_eq!(verdict("roceP2p1s0f0"), (false, "link-local address 169.254.7.1 only: no peer knows it"));
        assert_eq!(verdict("rocep1s0f1"), (false, "no port is active"));
        assert!(verdict("roceP2p1s0f1").0, "{:?}", verdict("roceP2p1s0f1"));
        // Planned again in the step, where Slurm's address of rank 0 is not known.
        let mut own = spark().resolves(&["127.0.1.1"]);
        own.step = crate::facts::Step::described("spark[1-2]", "1(x2)", 0, 44, 0).unwrap();
        own.rank0.address = Some("192.0.2.12".into());
        for variable in own.plan("").unwrap().env {
            own.environment.set(&variable.name, &variable.value);
        }
        own.rank0.address = None;
        assert_eq!(own.plan("").unwrap().value("NCCL_IB_HCA"), Some("=roceP2p1s0f1:1"));
        // Rank 0 over another network: what is not link-local stays.
        let plan = spark().resolves(&["203.0.113.1"]).plan("").unwrap();
        assert_eq!(plan.value("NCCL_IB_HCA"), Some("=rocep1s0f0:1,roceP2p1s0f1:1"));
    }
}
