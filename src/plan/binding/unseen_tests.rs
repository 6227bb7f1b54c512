//! Machines that no source describes, as people build them, cable them in part and
//! cut virtual ones from them. What is right follows from what NCCL and UCX do with
//! a list: a card too many is a wrong network or a hang, a card too few is lost
//! bandwidth; where neither is sure nothing is set.

use super::super::Plan;
use super::super::tests::World;
use super::machine::*;
use super::nics::*;
use crate::facts::network::Interface;
use crate::facts::rdma::LinkLayer::{self, Ethernet, InfiniBand};
use crate::facts::{GidRow, RdmaPort};

fn root(bus: usize) -> String {
    format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0")
}

/// Two NUMA nodes.
fn two_sockets() -> Machine {
    Machine::default().node(0, "0-31", &[(0, 10), (1, 21)]).node(1, "32-63", &[(0, 21), (1, 10)])
}

/// Eight GPUs and as many cards in two sockets, of which a guest sees no bridges.
fn flat(link: LinkLayer, gbps: u32) -> Machine {
    let mut machine = two_sockets();
    for index in 0..8usize {
        let (bus, numa) = (0x10 + index, i32::from(index >= 4));
        machine = machine.gpu(&format!("0001:{bus:02x}:00.0"), numa, &format!("pci0001:{bus:02x}"));
        machine = machine
            .nic(&format!("mlx5_{}", index + 1), &format!("0002:{bus:02x}:00.0"), numa, &format!("pci0002:{bus:02x}"))
            .of(VIRTUAL, link, gbps);
    }
    machine
}

/// One more card, mlx5_0, before the eight in PCI order.
fn and_one(machine: Machine, model: u16, link: LinkLayer, gbps: u32) -> Machine {
    machine.nic("mlx5_0", "0002:01:00.0", 0, "pci0002:01").of(model, link, gbps).sorted()
}

/// One GPU and cards on its socket.
fn one_gpu(cards: &[(u16, LinkLayer, u32)]) -> Machine {
    let mut machine = Machine::default().node(0, "0-31", &[]).gpu("0000:11:00.0", 0, &root(0x10));
    for (index, (model, link, gbps)) in cards.iter().enumerate() {
        let bus = 0x20 + 0x10 * index;
        let at = format!("0000:{:02x}:00.0", bus + 1);
        machine = machine.nic(&format!("mlx5_{index}"), &at, 0, &root(bus)).of(*model, *link, *gbps);
    }
    machine
}

/// Four GPUs below one switch, and cards at these places.
fn one_switch(cards: &[(&str, &str, &str)]) -> Machine {
    let mut machine = Machine::default().node(0, "0-31", &[]);
    for index in 0..4 {
        let path = format!("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:0{index}.0");
        machine = machine.gpu(&format!("0000:{:02x}:00.0", 0x13 + index), 0, &path);
    }
    for (name, at, path) in cards {
        machine = machine.nic(name, at, 0, path);
    }
    machine
}

fn routed(mut machine: Machine, netdev: &str) -> Machine {
    machine.topology.default_route = Some(netdev.into());
    machine
}

fn gbps(mut machine: Machine, name: &str, gbps: u32) -> Machine {
    machine.ports.iter_mut().filter(|port| port.device == name).for_each(|port| port.gbps = Some(gbps));
    machine
}

/// The eight pairs of the DGX H100 with RoCE, and mlx5_1 for the outer network, of
/// the same model and rate.
fn roce_and_its_like() -> Machine {
    let mut machine = dgx_h100();
    let gone = ["mlx5_2", "mlx5_7", "mlx5_8"];
    machine.topology.nics.retain(|nic| !gone.contains(&nic.name.as_str()));
    machine.ports.retain(|port| !gone.contains(&port.device.as_str()));
    machine.ports.iter_mut().for_each(|port| port.link = Ethernet);
    machine
}

/// mlx5_1 below GPU 0's own switch.
fn at_gpu_0(mut machine: Machine) -> Machine {
    let of = |name: &str| machine.topology.nics.iter().position(|nic| nic.name == name).unwrap();
    let (own, other) = (of("mlx5_0"), of("mlx5_1"));
    let own = machine.topology.nics[own].place.clone().unwrap();
    let place = machine.topology.nics[other].place.as_mut().unwrap();
    (place.host_bridge, place.bridges) = (own.host_bridge, own.bridges);
    machine
}

/// Every card a bond of two ports, as on H20 and H800 nodes: mlx5_bond_N.
fn bonds(mut machine: Machine) -> Machine {
    for (index, nic) in machine.topology.nics.iter_mut().enumerate() {
        nic.netdevs[0].master = Some(format!("bond{index}"));
    }
    machine
}

/// Grace Hopper, four modules, with a BlueField-3 for the outer network.
fn four_modules() -> Machine {
    let mut machine = Machine::default();
    for module in 0..4u32 {
        let cpus = format!("{}-{}", module * 72, module * 72 + 71);
        machine = machine.node(module, &cpus, &[]).node(4 + 8 * module, "", &[]);
        let path = |domain: u32| format!("pci00{module}{domain}:00/00{module}{domain}:00:00.0");
        machine = machine.gpu(&format!("00{module}9:01:00.0"), module as i32, &path(9));
        machine = machine.nic(&format!("mlx5_{module}"), &format!("00{module}2:01:00.0"), module as i32, &path(2));
    }
    machine.nic("mlx5_4", "0006:01:00.0", 0, "pci0006:00/0006:00:00.0").of(BLUEFIELD_3, Ethernet, 200)
}

/// Two functions of one card, InfiniBand and Ethernet.
fn both_kinds(gbps: u32) -> Machine {
    let machine = Machine::default().node(0, "0-31", &[]).gpu("0000:11:00.0", 0, &root(0x10));
    let machine = machine.nic("mlx5_0", "0000:21:00.0", 0, &root(0x20)).of(CONNECTX_6, InfiniBand, 200);
    machine.nic("mlx5_1", "0000:21:00.1", 0, &root(0x20)).of(CONNECTX_6, Ethernet, gbps)
}

/// What each machine gets: NCCL's list, and the cards of each GPU. "-": no list,
/// since nothing must be left out; "?": not clear, nothing at all is set.
#[test]
fn machines_that_people_build() {
    let half = ["mlx5_3", "mlx5_5", "mlx5_9", "mlx5_11"].into_iter().fold(dgx_h100(), Machine::down);
    let far = || {
        let machine = two_sockets().gpu("0000:11:00.0", 0, &root(0x10));
        let machine = machine.nic("mlx5_0", "0000:81:00.0", 1, &root(0x80));
        machine.nic("mlx5_1", "0000:91:00.0", 1, &root(0x90))
    };
    let unlike = |numa: i32, model: u16| {
        let machine = two_sockets().gpu("0000:11:00.0", 0, &root(0x10)).gpu("0000:91:00.0", 1, &root(0x90));
        let machine = machine.nic("mlx5_0", "0000:21:00.0", 0, &root(0x20));
        machine.nic("mlx5_1", "0000:81:00.0", numa, &root(0x80)).of(model, InfiniBand, 200)
    };
    let mut no_numa = and_one(flat(InfiniBand, 400), CONNECTX_4LX, Ethernet, 100);
    no_numa.topology.nics.iter_mut().for_each(|nic| nic.place.as_mut().unwrap().numa = None);
    let mut rxe = one_gpu(&[(CONNECTX_7, Ethernet, 400)]).nic("rxe0", "0000:ff:00.0", 0, "").of(0, Ethernet, 25);
    rxe.topology.nics.last_mut().unwrap().place = None;
    let at_root = ("mlx5_0", "0000:20:00.0", "pci0000:10/0000:10:02.0");
    let eight = "mlx5_0|mlx5_3|mlx5_4|mlx5_5|mlx5_6|mlx5_9|mlx5_10|mlx5_11";
    let of_flat = "mlx5_1|mlx5_2|mlx5_3|mlx5_4|mlx5_5|mlx5_6|mlx5_7|mlx5_8";
    let first_five = "mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4";
    let others = "mlx5_5 mlx5_6 mlx5_7 mlx5_8";
    let shared = format!("{0}|{0}|{0}|{0}|{1}|{1}|{1}|{1}", first_five, others);
    let table: &[(&str, Machine, &str, &str)] = &[
        (
            "four of eight rails are cabled; storage on the same InfiniBand stays out",
            half,
            "mlx5_0,mlx5_4,mlx5_6,mlx5_10",
            "mlx5_0|mlx5_0|mlx5_4|mlx5_4|mlx5_6|mlx5_6|mlx5_10|mlx5_10",
        ),
        ("one GPU, two cards on the other socket", far(), "-", "mlx5_0 mlx5_1"),
        (
            "the same with Ethernet on the GPU's socket",
            far().nic("lom", "0000:21:00.0", 0, &root(0x20)).of(CONNECTX_4LX, Ethernet, 25),
            "mlx5_0,mlx5_1",
            "mlx5_0 mlx5_1",
        ),
        ("four GPUs behind a switch, a card at the root", one_switch(&[at_root]), "-", "mlx5_0|mlx5_0|mlx5_0|mlx5_0"),
        (
            "and Ethernet on another root",
            one_switch(&[at_root, ("lom", "0000:31:00.0", &root(0x30))]).of(CONNECTX_4LX, Ethernet, 25),
            "mlx5_0",
            "mlx5_0|mlx5_0|mlx5_0|mlx5_0",
        ),
        // Of one model: both for the GPUs, or one for storage.
        ("400 and 200 Gb/s on two sockets", unlike(1, CONNECTX_7), "?", "|"),
        ("400 and 200 Gb/s on one socket", unlike(0, CONNECTX_7), "?", "|"),
        ("and one GPU", one_gpu(&[(CONNECTX_7, InfiniBand, 400), (CONNECTX_7, InfiniBand, 200)]), "?", ""),
        (
            "two ports for management as fast as the GPU's one",
            one_gpu(&[(CONNECTX_7, Ethernet, 100), (CONNECTX_6DX, Ethernet, 100), (CONNECTX_6DX, Ethernet, 100)]),
            "?",
            "",
        ),
        ("BlueField-3 alone", routed(one_gpu(&[(BLUEFIELD_3, Ethernet, 400)]), "net-mlx5_0"), "-", "mlx5_0"),
        ("both kinds on one card, at one rate", both_kinds(200), "?", ""),
        ("both kinds, Ethernet slower", both_kinds(100), "mlx5_0", "mlx5_0"),
        ("both kinds, Ethernet in a bond", both_kinds(200).bonded("bond0"), "mlx5_0", "mlx5_0"),
        (
            "RoCE, and its like at a root port",
            roce_and_its_like(),
            "mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11",
            eight,
        ),
        (
            "RoCE, and its like at GPU 0's switch with the default route",
            routed(at_gpu_0(roce_and_its_like()), "net-mlx5_1"),
            "mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11",
            eight,
        ),
        (
            "and without: nobody tells which of the two it is",
            at_gpu_0(roce_and_its_like()),
            "-",
            "mlx5_0 mlx5_1|mlx5_3|mlx5_4|mlx5_5|mlx5_6|mlx5_9|mlx5_10|mlx5_11",
        ),
        (
            "a guest with RoCE and its like with the default route",
            routed(and_one(flat(Ethernet, 400), VIRTUAL, Ethernet, 400), "net-mlx5_0"),
            "mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
            of_flat,
        ),
        (
            "by a VLAN",
            routed(and_one(flat(Ethernet, 400), VIRTUAL, Ethernet, 400), "net-mlx5_0.100"),
            "mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
            of_flat,
        ),
        ("the default route over one of the eight rails", routed(flat(Ethernet, 400), "net-mlx5_1"), "-", of_flat),
        // By IP over InfiniBand it says nothing.
        (
            "InfiniBand for storage, and the default route over a rail",
            routed(and_one(flat(InfiniBand, 400), VIRTUAL, InfiniBand, 400), "net-mlx5_1"),
            "-",
            &shared,
        ),
        // Which of five is no GPU's own is not known: each has all of its socket.
        ("and without a default route", and_one(flat(Ethernet, 400), VIRTUAL, Ethernet, 400), "-", &shared),
        (
            "InfiniBand storage of the same model",
            and_one(flat(InfiniBand, 400), VIRTUAL, InfiniBand, 400),
            "-",
            &shared,
        ),
        (
            "and at a lower rate",
            and_one(flat(InfiniBand, 400), VIRTUAL, InfiniBand, 200),
            "mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
            of_flat,
        ),
        ("one of eight came up slow", gbps(flat(InfiniBand, 400), "mlx5_3", 200), "-", of_flat),
        (
            "and there is Ethernet",
            gbps(and_one(flat(InfiniBand, 400), CONNECTX_4LX, Ethernet, 50), "mlx5_3", 100),
            "mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
            of_flat,
        ),
        (
            "no NUMA node known of any card",
            no_numa,
            "mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
            "|||||||",
        ),
        (
            "each GPU's card a bond, and one bond more",
            routed(bonds(roce_and_its_like()), "bond3"),
            "mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11",
            eight,
        ),
        ("Grace Hopper", four_modules(), "mlx5_0,mlx5_1,mlx5_2,mlx5_3", "mlx5_0|mlx5_1|mlx5_2|mlx5_3"),
        (
            "RoCE for the GPUs, InfiniBand for storage",
            dell_roce().nic("ibs", "0000:f1:00.0", 1, &root(0xf0)).of(CONNECTX_6, InfiniBand, 400),
            "mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_8,mlx5_9,mlx5_10,mlx5_11",
            "mlx5_2|mlx5_3|mlx5_4|mlx5_5|mlx5_8|mlx5_9|mlx5_10|mlx5_11",
        ),
        ("a software device", rxe, "mlx5_0", "mlx5_0"),
        ("Google's network cards have no RDMA", flat_gpus(), "none", "|||||||"),
        ("an Azure guest's Ethernet alone", one_gpu(&[(VIRTUAL, Ethernet, 100)]), "-", "mlx5_0"),
    ];
    for (what, machine, list, of_gpus) in table {
        let nics = machine.choose("");
        let value = machine.with("", |view| choose(view).nccl_ib_hca(view));
        let found = match &value {
            Ok(value) => value.trim_start_matches('=').replace(":1", ""),
            Err(_) if nics.unclear.is_some() => "?".into(),
            Err(why) if why.contains("none must be left out") => "-".into(),
            Err(_) => "none".into(),
        };
        assert_eq!((found.as_str(), machine.of_gpus(&nics).join("|").as_str()), (*list, *of_gpus), "{what}: {nics:?}");
    }
}

fn flat_gpus() -> Machine {
    let mut machine = flat(Ethernet, 200);
    machine.topology.nics.clear();
    machine.ports.clear();
    machine
}

#[test]
fn what_is_told_of_such_machines() {
    let slow = gbps(flat(InfiniBand, 400), "mlx5_3", 200);
    assert_eq!(slow.choose("").fallbacks, ["GPU 2: mlx5_3 runs at 200 Gb/s, its like at 400"]);
    let mut unreadable = dgx_h100();
    unreadable.ports.iter_mut().filter(|port| port.device == "mlx5_9").for_each(|port| port.readable = false);
    let expected = ["GPU 5: mlx5_9 is of unknown state, which cannot be read, mlx5_6 is used"];
    assert_eq!(unreadable.choose("").fallbacks, expected);
    // Spare ones may have no cable: two of ten are down.
    let mut spare = and_one(flat(InfiniBand, 400), VIRTUAL, InfiniBand, 400);
    spare = spare.nic("mlx5_9", "0002:02:00.0", 1, "pci0002:02").of(VIRTUAL, InfiniBand, 400).sorted();
    let spare = spare.down("mlx5_0").down("mlx5_9");
    assert_eq!((spare.choose("").fallbacks, spare.choose("").missing_gpus()), (vec![], 0));
    let of = |machine: &Machine, name: &str| {
        let nics = machine.choose("");
        nics.verdicts[machine.topology.nics.iter().position(|nic| nic.name == name).unwrap()].why.clone()
    };
    let outer = routed(and_one(flat(Ethernet, 400), VIRTUAL, Ethernet, 400), "net-mlx5_0");
    assert_eq!(
        of(&outer, "mlx5_0"),
        "net-mlx5_0 has the default route, and the GPUs have as many cards each without it: mlx5_1, mlx5_2, mlx5_3, \
         mlx5_4 and 4 more"
    );
}

impl NodeNics {
    /// GPUs without a card.
    fn missing_gpus(&self) -> usize {
        self.of_gpu.iter().filter(|nics| nics.is_empty()).count()
    }
}

fn plan(machine: &Machine, rank: u32, spec: &str, change: impl FnOnce(&mut World)) -> Plan {
    let mut world = World::new("n[1-2]", "8(x2)", rank);
    world.node = machine.node_facts();
    change(&mut world);
    world.plan(spec).unwrap()
}

/// Rails without cables: one line from each node.
#[test]
fn many_cards_without_a_cable_are_one_line() {
    let half = ["mlx5_3", "mlx5_5", "mlx5_9", "mlx5_11"].into_iter().fold(dgx_h100(), Machine::down);
    let told = plan(&half, 0, "", |_| {}).warnings;
    let told: Vec<&str> = told.iter().filter(|told| told.id == "nic-down").map(|told| told.message.as_str()).collect();
    assert_eq!(
        told,
        ["GPU 1: mlx5_3 is down, mlx5_0 is used; GPU 3: mlx5_5 is down, mlx5_4 is used; GPU 5: mlx5_9 is down, \
          mlx5_6 is used; GPU 7: mlx5_11 is down, mlx5_10 is used on n1"]
    );
}

/// <https://github.com/NVIDIA/nccl/issues/1478>: what a rank may open or sees, and
/// how many ranks there are, makes no difference to the node's list.
#[test]
fn hidden_gpus_do_not_change_the_node_s_list() {
    let machine = dgx_h100();
    let whole = plan(&machine, 0, "", |_| {}).value("NCCL_IB_HCA").unwrap().to_string();
    for rank in 0..8u32 {
        let hidden = plan(&machine, rank, "", |world| {
            let others = machine.topology.gpus.iter().enumerate().filter(|(gpu, _)| *gpu != rank as usize);
            world.task.gpus_hidden = others.map(|(_, gpu)| gpu.place.address).collect();
        });
        let listed = plan(&machine, rank, "", |world| world.environment.set("CUDA_VISIBLE_DEVICES", "4,5,6,7"));
        for plan in [&hidden, &listed] {
            assert_eq!(plan.value("NCCL_IB_HCA"), Some(whole.as_str()), "{rank}");
        }
        // The card is that of the GPU which the rank has, not of its number.
        let own = machine.of_gpus(&machine.choose(""))[rank as usize].clone();
        assert_eq!(hidden.value("UCX_NET_DEVICES"), Some(format!("{own}:1").as_str()), "{rank}");
    }
}

/// UCX_NET_DEVICES holds for TCP too: a list of cards leaves it no device.
#[test]
fn ucx_that_needs_tcp_is_left_alone() {
    const UCX: &str = "UCX_NET_DEVICES";
    let machine = dgx_h100();
    let of = |tls: &str| plan(&machine, 1, "", |world| world.environment.set("UCX_TLS", tls));
    assert_eq!(of("rc,cuda_copy,sm,self").value(UCX), Some("mlx5_3:1"));
    let left = of("tcp,cuda_copy,sm,self");
    assert_eq!(left.value(UCX), None);
    let why = left.left.iter().find(|note| note.name == UCX).map_or("", |note| note.why.as_str());
    assert_eq!(why, "UCX_TLS=tcp,cuda_copy,sm,self: UCX would find no network device for TCP among the cards");
}

/// RoCE rails that are networks of their own: with one card a rank may have no way to
/// a peer whose only card is on another rail.
#[test]
fn ucx_finds_its_way_over_separate_rails_itself() {
    const UCX: &str = "UCX_NET_DEVICES";
    let machine = dell_roce();
    let addressed = |rails: bool| {
        move |world: &mut World| {
            let ports: Vec<RdmaPort> = world.node.rdma.clone().unwrap();
            for (number, port) in ports.iter().enumerate() {
                let network = if rails { number } else { 0 };
                let text = format!("10.0.{network}.{}", 10 + number);
                let ip: std::net::Ipv4Addr = text.parse().unwrap();
                let (device, address) = (port.device.clone(), ip.to_ipv6_mapped());
                world.node.gids.push(GidRow { device, port: 1, index: 3, address });
                world.interfaces.push(Interface { name: format!("eth{number}"), address: ip.into(), prefix: 24 });
            }
        }
    };
    assert_eq!(plan(&machine, 1, "", addressed(false)).value(UCX), Some("mlx5_3:1"));
    let apart = plan(&machine, 1, "", addressed(true));
    assert_eq!(apart.value(UCX), None);
    assert!(apart.left.iter().any(|note| note.name == UCX && note.why.contains("networks of their own")));
    // NCCL's list stays, and so does what was asked for.
    assert!(apart.value("NCCL_IB_HCA").is_some());
    assert_eq!(plan(&machine, 1, "rails=1", addressed(true)).value(UCX), Some("mlx5_3:1"));
}

/// Numbers without a pattern, the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }

    fn one<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Guests without bridges whose cabling is known: cards for the GPUs, as many for
/// each socket, and others. Whatever is chosen, no card of the GPUs is left out, and
/// one that is none of theirs is given to a GPU only where nothing tells it apart.
#[test]
fn guests_of_known_cabling() {
    let mut dice = Dice(9);
    let (mut listed, mut clear) = (0, 0);
    for round in 0..4000 * crate::plan::tests::rounds() {
        let sockets = dice.one(&[1usize, 2]);
        let gpus = sockets * dice.one(&[1usize, 2, 4]);
        let cards = sockets * dice.one(&[1, gpus / sockets, 2 * gpus / sockets]);
        let (link, gbps, model) =
            (dice.one(&[InfiniBand, Ethernet]), dice.one(&[100, 200, 400]), dice.one(&[VIRTUAL, CONNECTX_7]));
        let mut machine = two_sockets();
        let mut buses: Vec<usize> = (1..120).collect();
        let mut bus = |dice: &mut Dice| buses.remove(dice.below(buses.len()));
        for gpu in 0..gpus {
            let (bus, numa) = (bus(&mut dice), (gpu * sockets / gpus) as i32);
            machine = machine.gpu(&format!("0001:{bus:02x}:00.0"), numa, &format!("pci0001:{bus:02x}"));
        }
        let mut add = |machine: Machine, dice: &mut Dice, name: &str, numa: i32, kind: (u16, LinkLayer, u32)| {
            let bus = bus(dice);
            machine
                .nic(name, &format!("0002:{bus:02x}:00.0"), numa, &format!("pci0002:{bus:02x}"))
                .of(kind.0, kind.1, kind.2)
        };
        for card in 0..cards {
            let numa = (card * sockets / cards) as i32;
            machine = add(machine, &mut dice, &format!("own{card}"), numa, (model, link, gbps));
        }
        // One slow card of theirs, where there are more.
        let slow = cards > 2 && dice.below(4) == 0;
        if slow {
            machine = self::gbps(machine, "own1", gbps / 2);
        }
        let mut alike = 0;
        for other in 0..dice.below(3) {
            let name = format!("other{other}");
            let numa = dice.below(2) as i32;
            // One of their model at most: two could pass for theirs.
            let kind = match dice.below(if other == 0 { 4 } else { 2 }) {
                0 => (CONNECTX_4LX, Ethernet, 25),
                1 => (CONNECTX_6DX, Ethernet, 100),
                2 => (model, link, gbps / 2),
                _ => (model, link, gbps),
            };
            alike += usize::from(kind.0 == model && kind.1 == link && (kind.2 == gbps || slow));
            machine = add(machine, &mut dice, &name, numa, kind);
            if kind.1 == Ethernet && dice.below(2) == 0 {
                machine.topology.default_route = Some(format!("net-{name}"));
            }
        }
        // Those that nobody could tell apart: one more and one slow, and as many as each
        // GPU would have with them.
        let divide = (cards + alike).is_multiple_of(gpus) || gpus.is_multiple_of(cards + alike);
        if alike > 0 && (slow || divide) {
            continue;
        }
        let machine = machine.sorted();
        let nics = machine.choose("");
        let what = || format!("{round}: {:?} {:?} {machine:#?}", machine.excluded(&nics), machine.of_gpus(&nics));
        if nics.unclear.is_some() {
            continue;
        }
        clear += 1;
        listed += usize::from(machine.with("", |view| choose(view).nccl_ib_hca(view)).is_ok());
        assert!(machine.excluded(&nics).iter().all(|name| !name.starts_with("own")), "{}", what());
        for own in machine.of_gpus(&nics) {
            assert!(own.contains("own"), "{}", what());
            assert!(alike > 0 || !own.contains("other"), "{}", what());
        }
    }
    assert!(clear > 2000 && listed > 1000, "{clear} {listed}");
}
