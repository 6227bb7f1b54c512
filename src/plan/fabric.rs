//! The network between the nodes, and the few variables that follow from its
//! kind. Which cards are used is no matter of this file.

use crate::config::{Fabric, Settings};
use crate::facts::rdma::LinkLayer;
use crate::facts::topology::{Nic, NicKind};
use crate::facts::{NetDevice, RdmaPort};

use super::precedence::{Layer, Offers};
use super::{Facts, Origin, binding};

/// From here on one socket is too few for a network (Mb/s).
const FAST_ETHERNET: u32 = 100_000;

/// The fabric, and why it is taken for that one.
pub fn fabric(facts: &Facts, settings: &Settings) -> (Fabric, String) {
    if facts.step.nodes() == 1 {
        return (Fabric::SingleNode, "one node".into());
    }
    if settings.fabric != Fabric::Auto {
        let who = if settings.is_of_site("fabric") { "the site file" } else { "fabric=" };
        return (settings.fabric, who.into());
    }
    match &facts.node.rdma {
        Some(ports) => match seen(ports, &facts.node.topology.nics) {
            // Both kinds are here: the GPUs' cards tell, InfiniBand may be for storage.
            (Fabric::Infiniband, _)
                if !active(ports, LinkLayer::Ethernet).is_empty()
                    && binding::fabric(facts, settings) == Some("Ethernet") =>
            {
                (Fabric::Roce, "the GPUs' cards are on Ethernet, and InfiniBand is for something else".into())
            }
            seen => seen,
        },
        None => match slingshot(&facts.node.topology.nics) {
            Some(why) => (Fabric::Slingshot, why),
            None => (Fabric::Auto, "the node's RDMA devices are not known".into()),
        },
    }
}

/// By the active ports of the node. A node may have both kinds: its storage is
/// then on Ethernet more often than its GPUs'. Nobody has EFA or Slingshot for
/// storage alone.
fn seen(ports: &[RdmaPort], nics: &[Nic]) -> (Fabric, String) {
    let efa = ports.iter().filter(|port| port.active && port.driver.as_deref() == Some("efa")).collect::<Vec<_>>();
    let (infiniband, ethernet) = (active(ports, LinkLayer::InfiniBand), active(ports, LinkLayer::Ethernet));
    if !efa.is_empty() {
        (Fabric::Efa, format!("{} of the efa driver", names(efa)))
    } else if let Some(why) = slingshot(nics) {
        (Fabric::Slingshot, why)
    } else if !infiniband.is_empty() {
        (Fabric::Infiniband, format!("active InfiniBand ports: {}", names(infiniband)))
    } else if !ethernet.is_empty() {
        (Fabric::Roce, format!("active RDMA ports on Ethernet: {}", names(ethernet)))
    } else {
        (Fabric::Tcp, "no active RDMA port".into())
    }
}

fn active(ports: &[RdmaPort], link: LinkLayer) -> Vec<&RdmaPort> {
    ports.iter().filter(|port| port.active && port.link == link).collect()
}

/// Slingshot's cards are none of the kernel's RDMA devices: libfabric reaches them by
/// its cxi provider (<https://ofiwg.github.io/libfabric/main/man/fi_cxi.7.html>).
fn slingshot(nics: &[Nic]) -> Option<String> {
    let cards = nics.iter().filter(|nic| nic.kind == NicKind::Slingshot && nic.may_be_up());
    let cards: Vec<&str> = cards.map(|nic| nic.name.as_str()).collect();
    (!cards.is_empty()).then(|| format!("Slingshot cards: {}", listed(cards)))
}

/// The first few devices.
fn names(ports: Vec<&RdmaPort>) -> String {
    listed(ports.iter().map(|port| port.device.as_str()).collect())
}

fn listed(mut names: Vec<&str>) -> String {
    names.dedup();
    let more = names.len().saturating_sub(4);
    names.truncate(4);
    format!("{}{}", names.join(", "), if more > 0 { format!(" and {more} more") } else { String::new() })
}

pub(super) fn offer(offers: &mut Offers, facts: &Facts, settings: &Settings) {
    let (fabric, why) = fabric(facts, settings);
    let mut offer = |name: &str, value: &str, why: String| {
        offers.value(Layer::Fabric, Origin::Fabric, name, value, why);
    };
    match fabric {
        Fabric::Roce => offer(
            "NCCL_IB_QPS_PER_CONNECTION",
            "2",
            format!("RoCE ({why}): several queue pairs spread a connection over the switches' equal paths"),
        ),
        Fabric::Efa => offer(
            "NCCL_SOCKET_IFNAME",
            "^docker,lo,veth",
            format!("EFA ({why}): the bootstrap keeps off the container bridges of cloud images"),
        ),
        Fabric::Tcp => {
            let asked = settings.is_given("fabric");
            if asked {
                offer("NCCL_NET", "Socket", format!("{why}: TCP was asked for, and NCCL shall not look further"));
            }
            if let Some(device) = fast(facts.node.netdevs.as_deref().unwrap_or_default(), settings.iface.as_deref()) {
                let speed = device.mbps.unwrap_or(0) / 1000;
                let why = format!("TCP on {} at {speed} Gb/s: one socket cannot fill it", device.name);
                offer("NCCL_SOCKET_NTHREADS", "4", why.clone());
                offer("NCCL_NSOCKS_PERTHREAD", "4", why);
            }
        }
        _ => {}
    }
    // `=`: exact, since NCCL's names are prefixes and bond0 would match bond0.100.
    if let Some(iface) = settings.iface.as_deref().filter(|_| fabric != Fabric::SingleNode) {
        let (layer, origin) = match settings.is_of_site("iface") {
            true => (Layer::Fabric, Origin::Site),
            false => (Layer::Chosen, Origin::Option),
        };
        let why = format!("iface={iface}: the ranks meet there, so NCCL's sockets do too");
        offers.value(layer, origin, "NCCL_SOCKET_IFNAME", format!("={iface}"), why);
        let why = format!("iface={iface}: Gloo takes the host name's address otherwise");
        offers.value(layer, origin, "GLOO_SOCKET_IFNAME", iface, why);
    }
}

/// The fast device that carries the traffic: the one asked for, else one that is
/// the only fast one.
fn fast<'a>(devices: &'a [NetDevice], asked: Option<&str>) -> Option<&'a NetDevice> {
    let mut fast = devices
        .iter()
        .filter(|device| device.up && device.mbps.is_some_and(|mbps| mbps >= FAST_ETHERNET))
        .filter(|device| asked.is_none_or(|asked| device.name == asked));
    let first = fast.next()?;
    fast.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::netdevs::NetKind;
    use crate::facts::rdma::tests::rdma_port;
    use crate::facts::topology::Netdev;

    fn port(device: &str, link: LinkLayer, active: bool, driver: &str) -> RdmaPort {
        RdmaPort { active, link_up: active, driver: Some(driver.into()), ..rdma_port(device, link) }
    }

    #[test]
    fn the_fabric_by_the_node_s_active_ports() {
        use LinkLayer::*;
        for (ports, expected) in [
            (vec![], Fabric::Tcp),
            (vec![port("mlx5_0", InfiniBand, false, "mlx5_core")], Fabric::Tcp),
            (vec![port("mlx5_0", InfiniBand, true, "mlx5_core")], Fabric::Infiniband),
            (
                vec![port("mlx5_0", Ethernet, true, "mlx5_core"), port("mlx5_1", InfiniBand, true, "mlx5_core")],
                Fabric::Infiniband,
            ),
            (vec![port("mlx5_0", Ethernet, true, "mlx5_core")], Fabric::Roce),
            (vec![port("rdmap0s6", Other, true, "efa")], Fabric::Efa),
        ] {
            assert_eq!(seen(&ports, &[]).0, expected, "{ports:?}");
        }
    }

    /// Cray EX nodes: Slingshot's cards are in /sys/class/cxi and have no verbs; some have
    /// another maker's RDMA cards beside them, for storage.
    #[test]
    fn slingshot_has_a_word_of_its_own_and_no_sockets_for_the_data() {
        use crate::plan::binding::machine::{Machine, ex235a};
        use crate::plan::tests::World;
        let of = |machine: &Machine, spec: &str| {
            let mut world = World::new("n[1-2]", "8(x2)", 0);
            world.node = machine.node_facts();
            world.plan(spec).unwrap()
        };
        let plan = of(&ex235a(), "");
        assert_eq!(plan.step.fabric, "slingshot");
        // Set for TCP and RDMA verbs; and no word on which network NCCL is to take.
        for name in ["NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"] {
            assert_eq!(plan.value(name), None, "{name}");
        }
        let storage = ex235a().nic("mlx5_0", "0000:f1:00.0", 0, "pci0000:f0");
        assert_eq!(of(&storage, "").step.fabric, "slingshot");
        assert_eq!(of(&ex235a(), "fabric=slingshot").step.fabric, "slingshot");
        assert_eq!(of(&ex235a(), "fabric=tcp").value("NCCL_NET"), Some("Socket"));

        let mut down = ex235a();
        let netdev = Netdev { name: "hsn0".into(), master: None, up: false };
        down.topology.nics.iter_mut().for_each(|nic| nic.netdevs = vec![netdev.clone()]);
        assert_eq!(of(&down, "").step.fabric, "tcp");
        // Where the kernel's RDMA devices could not be read, these tell all the same.
        let mut world = World::new("n[1-2]", "8(x2)", 0);
        world.node = ex235a().node_facts();
        world.node.rdma = None;
        assert_eq!(world.plan("").unwrap().step.fabric, "slingshot");
        let (_, why) = seen(&[], &ex235a().topology.nics);
        assert_eq!(why, "Slingshot cards: cxi0, cxi1, cxi2, cxi3");
    }

    /// InfiniBand for storage beside the GPUs' RoCE, and the other way round; without
    /// GPUs, or where it is not clear, InfiniBand as above.
    #[test]
    fn of_both_kinds_that_of_the_gpus_cards() {
        use crate::plan::binding::machine::{CONNECTX_6, Machine, dell_roce, dgx_h100};
        use crate::plan::tests::World;
        let both =
            || dell_roce().nic("ibs0", "0000:f1:00.0", 1, "pci0000:f0").of(CONNECTX_6, LinkLayer::InfiniBand, 200);
        let mut bare = both();
        bare.topology.gpus.clear();
        let of = |machine: &Machine, spec: &str| {
            let mut world = World::new("n[1-2]", "8(x2)", 0);
            world.node = machine.node_facts();
            let plan = world.plan(spec).unwrap();
            (plan.step.fabric, plan.value("NCCL_IB_QPS_PER_CONNECTION").map(String::from))
        };
        assert_eq!(of(&both(), ""), ("roce", Some("2".into())));
        for (machine, spec) in [(dgx_h100(), ""), (bare, ""), (both(), "bind=off"), (both(), "fabric=infiniband")] {
            assert_eq!(of(&machine, spec), ("infiniband", None), "{spec}");
        }
    }

    #[test]
    fn the_fast_device_must_be_the_only_one() {
        let device = |name: &str, up, mbps| NetDevice { name: name.into(), up, mbps, kind: NetKind::Hardware };
        let two = [device("eth0", true, Some(200_000)), device("eth1", true, Some(100_000))];
        assert_eq!(fast(&two, None), None);
        assert_eq!(fast(&two, Some("eth1")), Some(&two[1]));
        assert_eq!(fast(&two[..1], None), Some(&two[0]));
        let slow = [device("eth0", true, Some(10_000)), device("eth1", false, Some(400_000)), device("lo", true, None)];
        assert_eq!(fast(&slow, None), None);
    }
}
