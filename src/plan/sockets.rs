//! The interface on which NCCL and Gloo meet: theirs to choose badly on a node
//! with several. NCCL takes the first whose name begins with ib, else the first of
//! all (src/misc/socket.cc), whether or not it leads anywhere; Gloo takes the
//! address of the host name, which Debian's installer maps to 127.0.1.1.
//!
//! Named is only what is proven, or the default route: an interface in whose
//! network rank 0's address lies reaches rank 0. Where sockets carry the data
//! itself nothing is named, since NCCL then takes several interfaces.

use std::net::IpAddr;

use crate::config::{Fabric, Settings, printable};
use crate::facts::NetDevice;
use crate::facts::netdevs::NetKind;
use crate::facts::network::{Interface, Resolution};

use super::catalog::nccl_integer;
use super::marks::Marks;
use super::precedence::{self, Layer, Offers};
use super::{Facts, Origin, fabric};

const NCCL: &str = "NCCL_SOCKET_IFNAME";
const GLOO: &str = "GLOO_SOCKET_IFNAME";

/// Beginnings of the names of interfaces that NCCL takes last.
const NOT_TAKEN: [&str; 3] = ["lo", "docker", "virbr"];

/// And of more that lead to no other node.
const INSIDE: [&str; 9] = ["veth", "cni", "flannel", "cali", "cilium", "br-", "kube", "tun", "tap"];

pub(super) fn offer(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks, master: Option<&str>) {
    // With iface= the choice is made, and for EFA there is a list.
    let (fabric, _) = fabric::fabric(facts, settings);
    if settings.iface.is_some()
        || !matches!(fabric, Fabric::Infiniband | Fabric::Roce | Fabric::Slingshot | Fabric::Tcp)
    {
        return;
    }
    // As with MASTER_ADDR: only srun knew where rank 0 is.
    let kept = [NCCL, GLOO].map(|name| (name, facts.users().get(name)));
    let kept = kept.into_iter().filter(|(name, _)| marks.of_this_step(facts.users(), facts.step, name));
    let kept: Vec<(&str, &str)> = kept.filter_map(|(name, value)| Some((name, value?))).collect();
    if !kept.is_empty() {
        for (name, value) in kept {
            offers.value(Layer::Fabric, Origin::Fabric, name, value, "as set when this step started");
        }
        return;
    }
    let (candidates, others) = candidates(facts);
    if candidates.is_empty() || candidates.len() + others.len() < 2 {
        return;
    }
    if facts.interfaces.is_empty() {
        // A plan for another machine.
        let why =
            format!("{} could serve: which does follows from their addresses, known on the nodes", listed(&candidates));
        offers.nothing(NCCL, why.clone());
        return offers.nothing(GLOO, why);
    }
    let value = |name: &str| precedence::winner(offers, facts, marks, name);
    let data = data_over_tcp(fabric, &value);
    let chosen = match data {
        Some(why) => Err(why),
        None => choose(facts, &candidates, &rank0_addresses(facts, master)),
    };
    let family = value("NCCL_SOCKET_FAMILY");
    let comm_id = value("NCCL_COMM_ID");
    let (name, why) = match chosen {
        Ok(chosen) => chosen,
        Err(why) => {
            let why = format!("there is {}: {why}", listed(&candidates));
            offers.nothing(NCCL, why.clone());
            return offers.nothing(GLOO, why);
        }
    };
    let others: Vec<&str> = candidates.into_iter().filter(|other| *other != name).chain(others).collect();
    let why = format!("{why}; there is {} too", listed(&others));
    offers.value(Layer::Fabric, Origin::Fabric, GLOO, name, why.clone());
    if comm_id.is_some() {
        offers.nothing(NCCL, "NCCL_COMM_ID is set: NCCL takes the interface in its network");
    } else if let Some(family) = family.filter(|family| !has_family(facts, name, family)) {
        offers.nothing(NCCL, format!("{why}, but it has no address of NCCL_SOCKET_FAMILY={}", printable(&family)));
    } else {
        // `=`: exact, since NCCL's names are prefixes and eth1 would match eth10.
        offers.value(Layer::Fabric, Origin::Fabric, NCCL, format!("={name}"), why);
    }
}

/// "a, b and 3 more".
fn listed(names: &[&str]) -> String {
    let shown = names.iter().take(4).map(|name| printable(name)).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(4) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Why the sockets carry the data, if they do.
fn data_over_tcp(fabric: Fabric, value: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let why = if fabric == Fabric::Tcp {
        "without RDMA".to_string()
    } else if fabric == Fabric::Slingshot {
        "where NCCL does not find aws-ofi-nccl".to_string()
    } else if value("NCCL_NET").is_some_and(|net| net.eq_ignore_ascii_case("socket")) {
        "with NCCL_NET=Socket".to_string()
    } else {
        let off = value("NCCL_IB_DISABLE").filter(|off| nccl_integer(off).is_some_and(|(off, _)| off != 0))?;
        format!("with NCCL_IB_DISABLE={}", printable(&off))
    };
    Some(format!("{why} the data goes over them as well, and a wrong choice would cost bandwidth; iface= names one"))
}

/// The interfaces that NCCL might take when left to itself, which are those that are
/// up and have any address: first those that may lead to other nodes, then bridges
/// and containers' ends (<https://github.com/NVIDIA/nccl/issues/913>).
fn candidates<'a>(facts: &Facts<'a>) -> (Vec<&'a str>, Vec<&'a str>) {
    let devices = facts.node.netdevs.as_deref().unwrap_or_default();
    let begins = |name: &str, list: &[&str]| list.iter().any(|beginning| name.starts_with(beginning));
    let taken = devices.iter().filter(|device| {
        device.up
            && !begins(&device.name, &NOT_TAKEN)
            && (facts.interfaces.is_empty() || facts.interfaces.iter().any(|own| own.name == device.name))
    });
    let names = |fit: bool| {
        let fits = |device: &&NetDevice| (device.kind != NetKind::Virtual && !begins(&device.name, &INSIDE)) == fit;
        taken.clone().filter(fits).map(|device| device.name.as_str()).collect()
    };
    (names(true), names(false))
}

/// Whether the address means one place to all nodes.
fn is_routable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_link_local() || ip.is_unspecified()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified()),
    }
}

/// Rank 0's addresses: MASTER_ADDR as it resolves here, or else the one that Slurm
/// knows. On its own node a host's name may be 127.0.1.1 or anything else that
/// /etc/hosts has for it, and other nodes know nothing of that: there Slurm's goes
/// first.
pub fn rank0_addresses(facts: &Facts, master: Option<&str>) -> Vec<IpAddr> {
    let plain = |ip: IpAddr| ip.to_canonical();
    if let Some(address) = master.and_then(|master| master.parse().ok()).map(plain) {
        return if is_routable(address) { vec![address] } else { Vec::new() };
    }
    let resolved: &[IpAddr] = match facts.resolution {
        Resolution::Found(addresses) => addresses,
        _ => &[],
    };
    let resolved: Vec<IpAddr> = resolved.iter().copied().map(plain).filter(|ip| is_routable(*ip)).collect();
    let of_slurm = facts.rank0.address.as_deref().and_then(|address| address.parse().ok()).map(plain);
    let own = || master == Some(facts.step.node.as_str());
    match of_slurm.filter(|ip| is_routable(*ip)) {
        Some(of_slurm) if resolved.is_empty() || own() => vec![of_slurm],
        _ => resolved,
    }
}

/// The interface that the kernel would send to an address by, without a router:
/// that of the address itself, else of the smallest network that holds it; more
/// than one where these are alike.
pub fn networks_of(address: IpAddr, interfaces: &[Interface]) -> Vec<&Interface> {
    let rank = |interface: &Interface| (interface.address == address, interface.prefix);
    let holds = || interfaces.iter().filter(|i| is_routable(i.address) && i.reaches(address));
    let best = holds().map(rank).max();
    holds().filter(|interface| Some(rank(interface)) == best).collect()
}

/// The interface, and why; or why none.
fn choose<'a>(facts: &Facts<'a>, candidates: &[&'a str], rank0: &[IpAddr]) -> Result<(&'a str, String), String> {
    let route = facts.node.topology.default_route.as_deref();
    let mut near: Vec<(&Interface, IpAddr)> = Vec::new();
    for address in rank0 {
        for interface in networks_of(*address, facts.interfaces) {
            if !near.iter().any(|(known, _)| known.name == interface.name) {
                near.push((interface, *address));
            }
        }
    }
    let candidate = |name: &str| candidates.iter().copied().find(|candidate| *candidate == name);
    match near.as_slice() {
        [] => {}
        [(one, address)] => {
            return match candidate(&one.name) {
                Some(name) => Ok((name, format!("rank 0's {address} is in its network, /{}", one.prefix))),
                None => Err(format!(
                    "rank 0's {address} is in the network of {}, which is down or leads to no other node",
                    printable(&one.name)
                )),
            };
        }
        several => {
            let names: Vec<&str> = several.iter().map(|(interface, _)| interface.name.as_str()).collect();
            return match route.filter(|route| names.contains(route)).and_then(candidate) {
                Some(name) => Ok((name, "it has the default route, and rank 0 is in its network".into())),
                None => Err(format!("rank 0 is in the networks of {}", listed(&names))),
            };
        }
    }
    let what = match rank0 {
        [] => "rank 0's address is not known".to_string(),
        [address, ..] => format!("rank 0's {address} is in no interface's network"),
    };
    let Some(route) = route else { return Err(format!("{what}, and there is no default route")) };
    let usable = |name: &&str| facts.interfaces.iter().any(|i| i.name == *name && is_routable(i.address));
    match candidate(route).filter(usable) {
        Some(name) => Ok((name, format!("it has the default route ({what})"))),
        None => Err(format!("{what}, and the default route's {} leads to no other node", printable(route))),
    }
}

/// Whether the interface has an address that NCCL takes for this family.
fn has_family(facts: &Facts, name: &str, family: &str) -> bool {
    let of = |wanted: fn(&IpAddr) -> bool| {
        facts.interfaces.iter().any(|interface| interface.name == name && wanted(&interface.address))
    };
    match family {
        "AF_INET" => of(IpAddr::is_ipv4),
        "AF_INET6" => of(IpAddr::is_ipv6),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Topology;
    use crate::facts::rdma::LinkLayer;
    use crate::facts::rdma::tests::rdma_port;
    use crate::plan::Plan;
    use crate::plan::tests::World;

    /// A node of an InfiniBand cluster: eth0 for services, with the default route,
    /// eth1 for storage, IPoIB, a bond with a VLAN, and what containers bring.
    fn world(rank: u32, resolved: &[&str]) -> World {
        use NetKind::*;
        let mut world = World::new("n[1-2]", "1(x2)", rank).resolves(resolved);
        let port = |link| rdma_port("mlx5_0", link);
        world.node.rdma = Some(vec![port(LinkLayer::InfiniBand)]);
        let device = |(name, up, kind): (&str, bool, NetKind)| NetDevice { name: name.into(), up, mbps: None, kind };
        let devices = [
            ("lo", true, Virtual),
            ("eth0", true, Hardware),
            ("eth1", true, Hardware),
            ("eth2", false, Hardware),
            ("ib0", true, Hardware),
            ("bond0", true, Bond),
            ("bond0.100", true, Vlan),
            ("docker0", true, Virtual),
            ("br0", true, Virtual),
        ];
        world.node.netdevs = Some(devices.into_iter().map(device).collect());
        let interface = |(name, address, prefix): (&str, &str, u8)| Interface {
            name: name.into(),
            address: address.parse().unwrap(),
            prefix,
        };
        let own = 2 - rank % 2;
        world.interfaces = [
            ("lo", "127.0.0.1", 8),
            ("eth0", &format!("192.0.2.{own}"), 25),
            ("eth1", &format!("198.51.100.{own}"), 24),
            ("eth2", &format!("203.0.113.{own}"), 28),
            ("ib0", &format!("10.1.0.{own}"), 16),
            ("bond0", &format!("192.0.2.{}", 128 + own), 25),
            ("bond0.100", &format!("10.1.100.{own}"), 24),
            ("docker0", "172.17.0.1", 16),
            ("br0", &format!("203.0.113.{}", 128 + own), 28),
            ("eth0", "2001:db8::1", 64),
            ("eth1", "fe80::1", 64),
        ]
        .into_iter()
        .map(interface)
        .collect();
        world.node.topology = Topology { default_route: Some("eth0".into()), ..Topology::default() };
        world
    }

    /// What NCCL and Gloo get, and why.
    fn chosen(plan: &Plan) -> (Option<&str>, Option<&str>, &str) {
        let why = plan.env.iter().find(|set| set.name == NCCL).map(|set| set.why.as_str());
        let left = plan.left.iter().find(|note| note.name == NCCL).map(|note| note.why.as_str());
        (plan.value(NCCL), plan.value(GLOO), why.or(left).unwrap_or_default())
    }

    #[track_caller]
    fn assert_chosen(world: &World, expected: Option<&str>, words: &str) {
        let plan = world.plan("").unwrap();
        let (nccl, gloo, why) = chosen(&plan);
        let exact = expected.map(|name| format!("={name}"));
        assert_eq!((nccl, gloo), (exact.as_deref(), expected), "{why}");
        assert!(why.contains(words), "'{words}' is not in: {why}");
    }

    #[test]
    fn the_interface_in_rank_0_s_network_and_else_the_default_route() {
        for (resolved, expected, words) in [
            (
                &["192.0.2.2"][..],
                Some("eth0"),
                "rank 0's 192.0.2.2 is in its network, /25; there is eth1, ib0, bond0, bond0.100 and 1 more too",
            ),
            (&["198.51.100.2"], Some("eth1"), "/24"),
            // MASTER_ADDR names IPoIB: NCCL meets there too.
            (&["10.1.7.7"], Some("ib0"), "/16"),
            // The smallest network, as the kernel sends.
            (&["10.1.100.9"], Some("bond0.100"), "/24"),
            (&["192.0.2.200"], Some("bond0"), "/25"),
            (&["2001:db8::99"], Some("eth0"), "/64"),
            (&["::ffff:198.51.100.9"], Some("eth1"), "/24"),
            // Behind a router.
            (
                &["203.0.113.77"],
                Some("eth0"),
                "has the default route (rank 0's 203.0.113.77 is in no interface's network)",
            ),
            // Two addresses: the default route's, and else neither is clear.
            (&["198.51.100.2", "192.0.2.2"], Some("eth0"), "has the default route, and rank 0 is in its network"),
            (&["198.51.100.2", "10.1.7.7"], None, "rank 0 is in the networks of eth1, ib0"),
            (&["198.51.100.2", "2001:db9::1"], Some("eth1"), "/24"),
            // Down, or inside a node.
            (&["203.0.113.2"], None, "eth2, which is down"),
            (&["203.0.113.130"], None, "br0, which is down or leads to no other node"),
            (&["172.17.0.9"], None, "docker0"),
            // Every node has these: nothing to go by.
            (&["fe80::1"], Some("eth0"), "rank 0's address is not known"),
            (&["169.254.1.1"], Some("eth0"), "rank 0's address is not known"),
        ] {
            assert_chosen(&world(1, resolved), expected, words);
        }
        // Several networks, no word of where rank 0 is, and no default route, or
        // one by a device that is not fit.
        for (route, words) in [
            (None, "there is no default route"),
            (Some("br0"), "default route's br0"),
            (Some("eth2"), "default route's eth2"),
            (Some("wlan7"), "default route's wlan7"),
        ] {
            let mut world = world(1, &["203.0.113.77"]);
            world.node.topology.default_route = route.map(String::from);
            assert_chosen(&world, None, words);
        }
    }

    /// Debian's installer writes 127.0.1.1 for a host's own name
    /// (<https://www.debian.org/doc/manuals/debian-reference/ch05.en.html>): rank 0's
    /// node goes by the address that Slurm has.
    #[test]
    fn rank_0_s_own_node_takes_the_interface_that_has_its_address() {
        let mut own = world(0, &["127.0.1.1"]);
        assert_chosen(&own, Some("eth0"), "rank 0's address is not known");
        own.rank0.address = Some("198.51.100.2".into());
        assert_chosen(&own, Some("eth1"), "rank 0's 198.51.100.2 is in its network");
        // Nor does what its own /etc/hosts has for its name count.
        own.resolution = Resolution::Found(vec!["10.1.0.2".parse().unwrap()]);
        assert_chosen(&own, Some("eth1"), "rank 0's 198.51.100.2 is in its network");
        // A name that somebody chose does.
        let plan = own.plan("master=n1-ib0").unwrap();
        assert_eq!(chosen(&plan).0, Some("=ib0"));
        // Google's addresses are networks of one (/32).
        for interface in &mut own.interfaces {
            interface.prefix = if interface.address.is_ipv4() { 32 } else { 128 };
        }
        assert_chosen(&own, Some("eth1"), "/32");
        // The address itself goes before a smaller network.
        let mut own = world(0, &["10.1.0.2"]);
        own.interfaces.iter_mut().find(|i| i.name == "ib0").unwrap().prefix = 8;
        own.interfaces.iter_mut().find(|i| i.name == "bond0.100").unwrap().prefix = 9;
        assert_chosen(&own, Some("ib0"), "/8");
    }

    /// <https://github.com/marin-community/marin/issues/7018>: the host's address is
    /// one of two (/31) on the port with the default route, and functions without an
    /// address of their own were taken instead.
    #[test]
    fn a_network_of_two_addresses_holds_no_rank_0_and_the_default_route_decides() {
        let mut world = world(1, &["10.168.206.71"]);
        let device = |name: &str| NetDevice { name: name.into(), up: true, mbps: None, kind: NetKind::Hardware };
        let names = ["lo", "enp220s0f0", "enp90s0v0", "enp90s0np0"];
        world.node.netdevs = Some(names.into_iter().map(device).collect());
        let interface = |name: &str, address: &str, prefix| Interface {
            name: name.into(),
            address: address.parse().unwrap(),
            prefix,
        };
        world.interfaces = vec![
            interface("enp90s0np0", "10.168.206.131", 31),
            interface("enp220s0f0", "fe80::1", 64),
            interface("enp90s0v0", "fe80::2", 64),
        ];
        world.node.topology.default_route = Some("enp90s0np0".into());
        assert_chosen(&world, Some("enp90s0np0"), "it has the default route (rank 0's 10.168.206.71 is in no");
    }

    #[test]
    fn several_interfaces_in_one_network_are_not_told_apart() {
        let mut world = world(1, &["192.0.2.2"]);
        world.interfaces.iter_mut().find(|i| i.name == "bond0").unwrap().address = "192.0.2.60".parse().unwrap();
        assert_chosen(&world, Some("eth0"), "has the default route, and rank 0 is in its network");
        world.node.topology.default_route = Some("eth1".into());
        assert_chosen(&world, None, "rank 0 is in the networks of eth0, bond0");
    }

    /// <https://github.com/NVIDIA/nccl/issues/913>
    #[test]
    fn one_interface_needs_no_choice() {
        let mut world = world(1, &["192.0.2.2"]);
        world.node.netdevs.as_mut().unwrap().retain(|device| ["lo", "eth0", "docker0"].contains(&device.name.as_str()));
        assert_chosen(&world, None, "");
        assert!(!world.plan("").unwrap().left.iter().any(|note| [NCCL, GLOO].contains(&note.name.as_str())));
        // Beside a container's end of a cable it does: NCCL took that one, and hung.
        let mut world = super::tests::world(1, &["192.0.2.2"]);
        world.node.netdevs.as_mut().unwrap().retain(|device| ["lo", "eth0", "br0"].contains(&device.name.as_str()));
        world.node.netdevs.as_mut().unwrap()[2].name = "veth5f3".into();
        world.interfaces.push(Interface { name: "veth5f3".into(), address: "fe80::2".parse().unwrap(), prefix: 64 });
        assert_chosen(&world, Some("eth0"), "there is veth5f3 too");
        // So is one that has nothing but a link-local address.
        let mut world = super::tests::world(1, &["192.0.2.2"]);
        world.interfaces.retain(|i| i.name == "eth0" || i.address.to_string() == "fe80::1");
        assert_chosen(&world, Some("eth0"), "there is eth1 too");
    }

    #[test]
    fn nothing_is_chosen_where_the_sockets_carry_the_data() {
        let words = "a wrong choice would cost bandwidth";
        for pair in [("NCCL_NET", "Socket"), ("NCCL_NET", "socket"), ("NCCL_IB_DISABLE", "1")] {
            assert_chosen(&world(1, &["192.0.2.2"]).export(&[pair]), None, words);
        }
        assert_chosen(
            &world(1, &["192.0.2.2"]).export(&[("NCCL_IB_DISABLE", "0"), ("NCCL_NET", "IB")]),
            Some("eth0"),
            "",
        );
        let mut tcp = world(1, &["192.0.2.2"]);
        tcp.node.rdma = Some(Vec::new());
        assert_chosen(&tcp, None, "without RDMA");
        // Neither on one node, nor where the network is not known.
        let mut single = world(1, &["192.0.2.2"]);
        single.step = crate::facts::Step::described("n1", "2", 1, 44, 0).unwrap();
        assert_chosen(&single, None, "");
        let mut unknown = world(1, &["192.0.2.2"]);
        unknown.node.rdma = None;
        assert_chosen(&unknown, None, "");
    }

    #[test]
    fn what_somebody_else_set_stays() {
        let exported = world(1, &["192.0.2.2"]).export(&[(NCCL, "ib0")]).plan("").unwrap();
        assert_eq!(chosen(&exported), (None, Some("eth0"), "yours, kept (the fabric would set =eth0)"));
        let asked = world(1, &["198.51.100.2"]).plan("iface=eth1").unwrap();
        assert_eq!((asked.value(NCCL), asked.value(GLOO)), (Some("=eth1"), Some("eth1")));
        let by_id = world(1, &["192.0.2.2"]).export(&[("NCCL_COMM_ID", "198.51.100.2:4000")]).plan("").unwrap();
        assert_eq!(chosen(&by_id).0, None);
        assert!(chosen(&by_id).2.contains("NCCL_COMM_ID"), "{:?}", chosen(&by_id));
        // An interface without an address of the family that is asked for.
        let family = |resolved: &str, family: &str| {
            let plan = world(1, &[resolved]).export(&[("NCCL_SOCKET_FAMILY", family)]).plan("").unwrap();
            plan.value(NCCL).map(String::from)
        };
        assert_eq!(family("10.1.7.7", "AF_INET6"), None);
        assert_eq!(family("192.0.2.2", "AF_INET6").as_deref(), Some("=eth0"));
        assert_eq!(family("10.1.7.7", "AF_INET").as_deref(), Some("=ib0"));
    }

    #[test]
    fn planning_again_in_the_step_gives_the_same_though_rank_0_is_not_known() {
        let mut world = world(0, &["127.0.1.1"]);
        world.rank0.address = Some("198.51.100.2".into());
        for variable in world.plan("").unwrap().env {
            world.environment.set(&variable.name, &variable.value);
        }
        world.rank0.address = None;
        assert_chosen(&world, Some("eth1"), "as set when this step started");
    }

    #[test]
    fn a_described_step_s_nodes_have_addresses_of_their_own() {
        let mut world = world(1, &["192.0.2.2"]);
        world.interfaces.clear();
        assert_chosen(&world, None, "known on the nodes");
    }
}
