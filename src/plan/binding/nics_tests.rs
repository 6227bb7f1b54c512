//! Which cards are chosen on real machines, and by which rule.

use super::super::netmatch::List;
use super::super::precedence::Offers;
use super::super::tests::World;
use super::super::{Facts, Origin, Plan, Severity, Warning};
use super::machine::*;
use super::nics::*;
use crate::config::Settings;
use crate::config::nics::NicPattern;
use crate::facts::RdmaPort;
use crate::facts::rdma::LinkLayer;
use crate::facts::task::{FileValue, Peer, Peers};

use LinkLayer::{Ethernet, InfiniBand};

/// The nearest cards as each machine's source has them, and what must stay out.
#[test]
fn real_machines() {
    let table: [(&str, &[&str], &[&str]); 10] = [
        (
            "dgx h100",
            &["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"],
            &["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"],
        ),
        (
            "dell roce",
            &["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"],
            &["mlx5_0", "mlx5_1", "mlx5_6", "mlx5_7"],
        ),
        ("hgx with four cards", &["NIC0", "NIC0", "NIC1", "NIC1", "NIC2", "NIC2", "NIC3", "NIC3"], &["NIC4", "NIC5"]),
        ("lassen", &["mlx5_0 mlx5_1", "mlx5_0 mlx5_1", "mlx5_2 mlx5_3", "mlx5_2 mlx5_3"], &[]),
        (
            "azure nd a100",
            &["mlx5_ib0", "mlx5_ib1", "mlx5_ib2", "mlx5_ib3", "mlx5_ib4", "mlx5_ib5", "mlx5_ib6", "mlx5_ib7"],
            &["mlx5_an0"],
        ),
        (
            "aws p4d",
            &[
                "rdmap10s27",
                "rdmap10s27",
                "rdmap20s27",
                "rdmap20s27",
                "rdmap90s27",
                "rdmap90s27",
                "rdmapa0s27",
                "rdmapa0s27",
            ],
            &[],
        ),
        ("gb200", &["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4"], &["mlx5_2", "mlx5_5"]),
        (
            "oci h100",
            &[
                "mlx5_0 mlx5_1",
                "mlx5_3 mlx5_4",
                "mlx5_5 mlx5_6",
                "mlx5_7 mlx5_8",
                "mlx5_9 mlx5_10",
                "mlx5_12 mlx5_13",
                "mlx5_14 mlx5_15",
                "mlx5_16 mlx5_17",
            ],
            &["mlx5_2", "mlx5_11"],
        ),
        ("ex235a", &["cxi0", "cxi0", "cxi1", "cxi1", "cxi2", "cxi2", "cxi3", "cxi3"], &[]),
        ("mi200", &["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"], &[]),
    ];
    for ((name, machine), (known, nearest, out)) in all().into_iter().zip(table) {
        assert_eq!(name, known);
        let nics = machine.choose("");
        assert_eq!(machine.of_gpus(&nics), nearest, "{name}");
        assert_eq!(machine.excluded(&nics), out, "{name}: {:?}", nics.verdicts);
        assert_eq!((nics.unclear, nics.fallbacks), (None, vec![]), "{name}");
        assert!(nics.verdicts.iter().all(|verdict| !verdict.why.is_empty()), "{name}");
    }
}

/// NCCL_IB_HCA, or why there is none.
fn hca(machine: &Machine, spec: &str) -> Result<String, String> {
    machine.with(spec, |view| choose(view).nccl_ib_hca(view))
}

fn ucx(machine: &Machine, gpus: &[usize], rails: Option<u8>) -> Result<String, String> {
    machine.with("", |view| choose(view).ucx_net_devices(view, gpus, rails))
}

fn why<'a>(machine: &Machine, nics: &'a NodeNics, name: &str) -> &'a str {
    let nic = machine.topology.nics.iter().position(|nic| nic.name == name).unwrap();
    &nics.verdicts[nic].why
}

/// What NCCL's own rule selects (src/misc/utils.cc: parseStringList, matchIf,
/// matchPort, matchIfList), written down a second time from its source.
fn nccl_selects(value: &str, device: &str, port: i32) -> bool {
    let (not, value) = value.strip_prefix('^').map_or((false, value), |rest| (true, rest));
    let (exact, value) = value.strip_prefix('=').map_or((false, value), |rest| (true, rest));
    let found = value.split(',').any(|item| {
        let (name, number) = item.split_once(':').map_or((item, -1), |(name, port)| (name, port.parse().unwrap()));
        let by_name = if exact { name == device } else { device.as_bytes().starts_with(name.as_bytes()) };
        by_name && (number == -1 || number == port)
    });
    found != not
}

// ------------------------------------------------------------------ rules 1 to 8

#[test]
fn rule_1_the_site_file_decides() {
    let mut machine = dgx_h100();
    let name = |name: &str| NicPattern::Name(name.into());
    machine.rules.deny = vec![name("mlx5_3")];
    let nics = machine.choose("");
    assert_eq!(why(&machine, &nics, "mlx5_3"), "denied by the site file");
    assert!(machine.of_gpus(&nics).iter().all(|names| names != "mlx5_3"));
    // What is denied is no fault, also where it is down.
    assert_eq!(machine.clone().down("mlx5_3").choose("").fallbacks, Vec::<String>::new());
    // By address and by network device; exactly those, storage or not, and a
    // denied one not.
    machine.rules.allow =
        Some(vec![NicPattern::Address(address("0000:29:00.0")), name("net-mlx5_4"), name("mlx5_3"), name("mlx5_2")]);
    assert_eq!(hca(&machine, ""), Ok("=mlx5_1:1,mlx5_2:1,mlx5_4:1".into()));
    assert_eq!(why(&machine, &machine.choose(""), "mlx5_0"), "not in the site file's allow list");
    // The list is written also where it names every card.
    let mut whole = oci_h100();
    whole.rules.allow = Some(whole.topology.nics.iter().map(|nic| name(&nic.name)).collect());
    assert_eq!(hca(&whole, "").unwrap().split(',').count(), 18);
    // Nothing of it is active.
    machine.rules.allow = Some(vec![name("mlx5_0")]);
    assert!(hca(&machine.down("mlx5_0"), "").unwrap_err().contains("none of the cards that may be used is active"));
}

#[test]
fn rule_2_a_port_that_is_down_is_out_and_told() {
    let machine = dgx_h100().down("mlx5_9");
    let nics = machine.choose("");
    assert_eq!(why(&machine, &nics, "mlx5_9"), "no port is active");
    assert_eq!(nics.fallbacks, ["GPU 5: mlx5_9 is down, mlx5_6 is used"]);
    assert_eq!(nics.faults, [(5, true)]);
    // Storage stays out, though it is as near to GPU 5 now.
    assert_eq!(machine.excluded(&nics), ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8", "mlx5_9"]);
    assert_eq!(hca(&machine, ""), Ok("=mlx5_0:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_10:1,mlx5_11:1".into()));
    // One port of a card with two is no fault.
    assert_eq!(oci_h100().down("mlx5_4").choose("").fallbacks, Vec::<String>::new());
    let both = oci_h100().down("mlx5_3").down("mlx5_4");
    assert_eq!(both.choose("").fallbacks, ["GPU 1: mlx5_3, mlx5_4 are down, mlx5_0, mlx5_1 are used"]);
}

/// <https://github.com/vllm-project/vllm/issues/16997>,
/// <https://github.com/NVIDIA/nccl/issues/707>: one card, and 16 virtual
/// functions of it.
#[test]
fn rule_3_virtual_functions_beside_their_card_are_out() {
    let mut machine = dgx_h100();
    for index in 0..16u8 {
        let at = format!("0000:18:{:02x}.{}", 1 + index / 8, index % 8);
        let path = machine.topology.nics[0].place.clone().unwrap();
        machine = machine.nic(&format!("mlx5_{}", 12 + index), &at, 0, "").virtual_of("0000:18:00.0");
        let place = machine.topology.nics.last_mut().unwrap().place.as_mut().unwrap();
        (place.host_bridge, place.bridges) = (path.host_bridge, path.bridges);
    }
    let machine = machine.sorted();
    let nics = machine.choose("");
    assert_eq!(why(&machine, &nics, "mlx5_12"), "virtual function of mlx5_0, which is here too");
    assert_eq!(machine.of_gpus(&nics)[0], "mlx5_0");
    assert_eq!(hca(&machine, "").unwrap().split(',').count(), 8);
    // Without it they are what there is (a virtual machine): one card.
    let alone = machine.down("mlx5_0");
    let nics = alone.choose("");
    assert_eq!(nics.of_gpu[0].len(), 16, "{:?}", alone.of_gpus(&nics));
    assert_eq!(nics.fallbacks, Vec::<String>::new());
}

/// <https://github.com/NVIDIA/nccl/issues/1591>: distance alone would take the
/// outer network's cards below a GPU's own switch.
#[test]
fn rules_4_and_5_the_class_of_most_gpus_beats_distance() {
    let machine = dell_roce();
    let nics = machine.choose("");
    let outer = machine.topology.nics.iter().position(|nic| nic.name == "mlx5_0").unwrap();
    let own = machine.topology.nics.iter().position(|nic| nic.name == "mlx5_2").unwrap();
    assert_eq!(nics.distances[0][outer], nics.distances[0][own]);
    assert!(nics.verdicts[outer].why.starts_with(
        "Ethernet, 4 ports at 100 Gb/s, nearest to 2 of 8 GPUs; Ethernet, 8 ports at 400 Gb/s, nearest to 8: "
    ));
    // Nor with their own links down: even as fast as the others they are another network's.
    for (rate, spec) in [(100, ""), (400, ""), (400, "fabric=roce")] {
        let mut broken = dell_roce().down("mlx5_2").down("mlx5_8");
        broken.ports.iter_mut().filter(|port| port.gbps == Some(100)).for_each(|port| port.gbps = Some(rate));
        let nics = broken.choose(spec);
        assert_eq!(nics.faults, [(0, true), (4, true)]);
        assert_eq!(
            broken.excluded(&nics),
            ["mlx5_2", "mlx5_0", "mlx5_1", "mlx5_8", "mlx5_6", "mlx5_7"],
            "{rate} {spec}"
        );
    }
}

#[test]
fn rule_5_a_card_that_came_up_slow_stays_and_is_told() {
    let mut machine = dgx_h100();
    machine.ports.iter_mut().filter(|port| port.device == "mlx5_9").for_each(|port| port.gbps = Some(200));
    let nics = machine.choose("");
    assert_eq!(machine.of_gpus(&nics)[5], "mlx5_9");
    assert_eq!(nics.fallbacks, ["GPU 5: mlx5_9 runs at 200 Gb/s, its like at 400"]);
    assert_eq!(nics.faults, [(5, false)]);
    assert!(hca(&machine, "").unwrap().contains("mlx5_9:1"));
}

/// Two models, each for half of the GPUs.
#[test]
fn rule_5_a_second_class_joins_where_it_alone_is_near() {
    let mut machine = dgx_h100();
    for name in ["mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"] {
        let nic = machine.topology.nics.iter_mut().find(|nic| nic.name == name).unwrap();
        nic.place.as_mut().unwrap().device = Some(CONNECTX_6);
        machine.ports.iter_mut().filter(|port| port.device == name).for_each(|port| port.gbps = Some(200));
    }
    let nics = machine.choose("");
    assert_eq!(machine.of_gpus(&nics), machine.of_gpus(&dgx_h100().choose("")));
    assert_eq!(machine.excluded(&nics), ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]);
    assert_eq!(nics.fallbacks, Vec::<String>::new());
}

#[test]
fn rule_6_far_cards_of_the_class_are_out_unless_a_gpu_needs_them() {
    let machine = dgx_h100();
    let nics = machine.choose("");
    assert_eq!(
        why(&machine, &nics, "mlx5_1"),
        "near no GPU, as cards for storage and management are; near GPUs are mlx5_0, mlx5_3, mlx5_4, mlx5_5 and 4 more"
    );
    // A GPU on the other socket, for which there is but that one.
    let machine = Machine::default()
        .gpu("0000:13:00.0", 0, "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0")
        .nic("near", "0000:14:00.0", 0, "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0")
        .gpu("0000:83:00.0", 1, "pci0000:80/0000:80:01.0")
        .nic("far", "0000:91:00.0", 1, "pci0000:90/0000:90:01.0");
    let nics = machine.choose("");
    assert_eq!((machine.of_gpus(&nics), machine.excluded(&nics)), (vec!["near".into(), "far".into()], vec![]));
}

/// <https://github.com/NVIDIA/nccl/issues/1015>
#[test]
fn rule_7_a_bond_is_out_unless_there_is_nothing_else() {
    let below = |bus: &str| format!("pci0000:{bus}/0000:{bus}:01.0");
    let card = |machine: Machine, name: &str, bus: &str| {
        machine.nic(name, &format!("0000:{bus}:02.0"), 0, &below(bus)).of(CONNECTX_7, Ethernet, 200)
    };
    let gpu = || Machine::default().gpu("0000:11:00.0", 0, &below("10"));
    let bonded = card(gpu(), "mlx5_bond_0", "20").bonded("bond0");
    let nics = bonded.choose("");
    assert_eq!((bonded.of_gpus(&nics), bonded.excluded(&nics)), (vec!["mlx5_bond_0".into()], vec![]));
    let machine = card(bonded, "mlx5_0", "30");
    let nics = machine.choose("");
    assert_eq!((machine.of_gpus(&nics), machine.excluded(&nics)), (vec!["mlx5_0".into()], vec!["mlx5_bond_0"]));
    assert_eq!(why(&machine, &nics, "mlx5_bond_0"), "member of bond0; others are there: mlx5_0");
    // Every rail in a VRF of its own: each has a master, and none is a bond.
    let rails = card(card(gpu(), "mlx5_0", "20").bonded("rail0"), "mlx5_1", "30").bonded("rail1");
    assert_eq!(rails.excluded(&rails.choose("")), Vec::<&str>::new());
    // IP over InfiniBand may be bonded: RDMA is not.
    let ip = gpu().nic("mlx5_0", "0000:20:02.0", 0, &below("20")).bonded("bond0");
    let ip = ip.nic("mlx5_1", "0000:30:02.0", 0, &below("30"));
    assert_eq!(ip.excluded(&ip.choose("")), Vec::<&str>::new());
    // NVIDIA B300: eight cards, and a bond for the outer network.
    let mut b300 = dgx_h100();
    let storage = b300.topology.nics.iter_mut().find(|nic| nic.name == "mlx5_2").unwrap();
    storage.netdevs[0].master = Some("bond0".into());
    assert!(b300.excluded(&b300.choose("")).contains(&"mlx5_2"));
}

#[test]
fn rule_8_nothing_is_set_where_there_is_nothing() {
    let azure_nc = hyper_v(&[("0001:00:00.0", 0), ("0002:00:00.0", 1), ("0003:00:00.0", 2), ("0004:00:00.0", 3)], &[]);
    assert!(hca(&azure_nc, "").unwrap_err().starts_with("no compute fabric found"));
    assert_eq!(azure_nc.choose("").of_gpu, vec![Vec::<usize>::new(); 4]);
    let mut dark = dgx_h100();
    dark.ports.iter_mut().for_each(|port| port.active = false);
    assert!(hca(&dark, "").is_err() && ucx(&dark, &[0], None).is_err());
    // A node whose cards have no cables may be meant so, unless somebody minds.
    assert_eq!(dark.choose("").fallbacks, Vec::<String>::new());
    assert_eq!(dark.choose("nic-down=fail").fallbacks[5], "GPU 5: mlx5_9 is down, and no other is near");
    // With the outer network alone the GPUs' own are missed.
    dark.link("mlx5_2", true);
    assert_eq!(dark.choose("").fallbacks[5], "GPU 5: mlx5_9 is down, mlx5_2 is used");
}

// ------------------------------------------------------------------ what is not clear

/// One GPU, and cards on its NUMA node: (kind, rate, model).
fn pcie_box(cards: &[(LinkLayer, u32, u16)]) -> Machine {
    let mut machine = Machine::default().node(0, "0-15", &[]).gpu("0000:11:00.0", 0, "pci0000:10/0000:10:01.0");
    for (index, (link, gbps, model)) in cards.iter().enumerate() {
        let bus = 0x20 + 0x10 * index;
        let path = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
        machine = machine.nic(&format!("mlx5_{index}"), &format!("0000:{:02x}:00.0", bus + 1), 0, &path);
        machine = machine.of(*model, *link, *gbps);
    }
    machine
}

#[test]
fn what_is_not_clear_is_left_alone_and_said() {
    for cards in [
        // InfiniBand for storage or for the GPUs, nobody knows.
        &[(InfiniBand, 100, CONNECTX_6), (Ethernet, 200, CONNECTX_6)][..],
        &[(InfiniBand, 200, CONNECTX_6), (Ethernet, 200, CONNECTX_6)],
        &[(Ethernet, 200, CONNECTX_7), (Ethernet, 200, CONNECTX_6)],
    ] {
        let machine = pcie_box(cards);
        let nics = machine.choose("");
        let why = nics.unclear.clone().unwrap();
        assert!(why.contains("mlx5_0 (") && why.contains("mlx5_1 (") && why.contains("is not clear"), "{why}");
        assert_eq!(hca(&machine, ""), Err(why.clone()));
        assert_eq!(ucx(&machine, &[0], None), Err(why.clone()));
        // NCCL takes both then.
        assert!(nics.verdicts.iter().all(|verdict| verdict.used && verdict.why == why));
    }
    let two = pcie_box(&[(InfiniBand, 100, CONNECTX_6), (Ethernet, 200, CONNECTX_6)]);
    assert_eq!(hca(&two, "fabric=roce"), Ok("=mlx5_1:1".into()));
    assert_eq!(hca(&two, "fabric=infiniband"), Ok("=mlx5_0:1".into()));
    // A management port beside the GPU's InfiniBand is clear.
    let usual = pcie_box(&[(InfiniBand, 200, CONNECTX_6), (Ethernet, 25, CONNECTX_4LX), (Ethernet, 25, CONNECTX_4LX)]);
    assert_eq!(hca(&usual, ""), Ok("=mlx5_0:1".into()));
    assert_eq!(ucx(&usual, &[0], None), Ok("mlx5_0:1".into()));
    // A bond, or the default route, tells of two equal ones which is the outer network.
    let bonded = pcie_box(&[(Ethernet, 200, CONNECTX_7), (Ethernet, 200, CONNECTX_6)]).bonded("bond0");
    assert_eq!(hca(&bonded, ""), Ok("=mlx5_0:1".into()));
    let mut routed = pcie_box(&[(Ethernet, 200, CONNECTX_7), (Ethernet, 200, CONNECTX_6)]);
    routed.topology.default_route = Some("net-mlx5_0".into());
    assert_eq!(hca(&routed, ""), Ok("=mlx5_1:1".into()));
}

/// A slow port below a GPU's switch does not make the InfiniBand card on another
/// root the storage's.
#[test]
fn a_slow_port_beside_a_gpu_is_no_fabric() {
    let below = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:0";
    let machine = Machine::default()
        .gpu("0000:13:00.0", 0, &format!("{below}0.0"))
        .nic("lom", "0000:14:00.0", 0, &format!("{below}1.0"))
        .of(CONNECTX_4LX, Ethernet, 25)
        .nic("mlx5_0", "0000:21:00.0", 0, "pci0000:20/0000:20:01.0");
    assert!(hca(&machine, "").unwrap_err().contains("is not clear"));
    assert_eq!(machine.excluded(&machine.choose("")), Vec::<&str>::new());
}

/// A device whose ports are seen and whose place is not.
#[test]
fn an_active_device_of_which_nothing_is_known() {
    let mut machine = dgx_h100();
    machine.topology.nics.retain(|nic| nic.name != "mlx5_9");
    assert_eq!(hca(&machine, ""), Err("where mlx5_9 sits is not known".into()));
}

// ------------------------------------------------------------------ properties

/// Names say nothing: shuffled they leave every card where it is
/// (<https://github.com/NVIDIA/nccl/issues/1277>).
#[test]
fn names_never_matter() {
    for (what, machine) in all() {
        let chosen = |machine: &Machine| {
            let nics = machine.choose("");
            let of = |nic: &usize| machine.topology.nics[*nic].place.as_ref().map(|place| place.address);
            let used = (0..nics.verdicts.len()).filter(|nic| nics.verdicts[*nic].used);
            (
                nics.of_gpu.iter().map(|nics| nics.iter().map(of).collect::<Vec<_>>()).collect::<Vec<_>>(),
                used.map(|nic| of(&nic)).collect::<std::collections::BTreeSet<_>>(),
            )
        };
        let before = chosen(&machine);
        let count = machine.topology.nics.len();
        for seed in 0..20usize {
            let mut other = machine.clone();
            for index in 0..count {
                other.rename(index, &format!("tmp{index}"));
            }
            for index in 0..count {
                // A permutation: an odd step walks through a power of two.
                let size = count.next_power_of_two();
                let order: Vec<usize> =
                    (0..size).map(|at| (at * (2 * seed + 1) + seed) % size).filter(|at| *at < count).collect();
                other.rename(index, &format!("mlx5_{}", order[index]));
            }
            other.ports.sort_by(|one, two| one.device.cmp(&two.device));
            assert_eq!(chosen(&other), before, "{what} {seed}");
            // Nor the order of the list.
            other.topology.nics.rotate_left(seed % count);
            assert_eq!(chosen(&other), before, "{what} {seed}");
        }
    }
}

/// Each list selects what is meant, by NCCL's rule; mlx5_1 does not bring mlx5_10.
#[test]
fn every_list_selects_exactly_what_is_meant() {
    let mut lists = 0;
    for (what, machine) in all() {
        for down in 0..=machine.topology.nics.len() {
            let mut machine = machine.clone();
            if let Some(nic) = machine.topology.nics.get(down) {
                let name = nic.name.clone();
                machine.link(&name, false);
            }
            let Ok(value) = hca(&machine, "") else { continue };
            lists += 1;
            assert!(value.starts_with('='), "{value}");
            let nics = machine.choose("");
            for port in machine.ports.iter().filter(|port| port.active) {
                let nic = machine.topology.nics.iter().position(|nic| nic.name == port.device).unwrap();
                let meant = nics.verdicts[nic].used;
                assert_eq!(nccl_selects(&value, &port.device, port.port.into()), meant, "{what}: {value} {port:?}");
                let by_ours = List::parse(&value).selects(&port.device, Some(port.port.into()));
                assert_eq!(by_ours, meant, "{what}: {value} {port:?}");
            }
        }
    }
    assert!(lists > 50, "{lists}");
}

/// One card after the other down: only its GPUs change, each says so, and nothing
/// comes in that was out.
#[test]
fn one_card_after_the_other_down() {
    for (what, machine) in all() {
        let before = machine.choose("");
        for down in 0..machine.topology.nics.len() {
            let mut broken = machine.clone();
            let name = broken.name(down).to_string();
            let card = |nic: usize| machine.topology.nics[nic].place.as_ref().unwrap().address;
            let siblings: Vec<usize> =
                (0..machine.topology.nics.len()).filter(|nic| card(*nic).same_card(card(down))).collect();
            for nic in &siblings {
                let name = broken.name(*nic).to_string();
                broken.link(&name, false);
            }
            let after = broken.choose("");
            assert_eq!(after.unclear, None, "{what} {name}");
            for nic in 0..machine.topology.nics.len() {
                let expected = before.verdicts[nic].used && !siblings.contains(&nic);
                assert_eq!(after.verdicts[nic].used, expected, "{what} {name}: {:?}", after.verdicts[nic]);
            }
            for gpu in 0..machine.topology.gpus.len() {
                let hit = before.of_gpu[gpu].iter().any(|nic| siblings.contains(nic));
                assert_eq!(after.faults.contains(&(gpu, true)), hit, "{what} {name}: {:?}", after.fallbacks);
                if hit {
                    assert!(!after.of_gpu[gpu].is_empty(), "{what} {name}: GPU {gpu}");
                } else {
                    assert_eq!(after.of_gpu[gpu], before.of_gpu[gpu], "{what} {name}: GPU {gpu}");
                }
            }
        }
    }
}

/// -1 everywhere: what the PCI tree tells stays, and nothing else is made up.
#[test]
fn unknown_numa_is_never_node_0() {
    for (what, machine) in all() {
        let known = machine.choose("");
        let mut machine = machine.clone();
        machine.topology.gpus.iter_mut().for_each(|gpu| gpu.place.numa = None);
        machine.topology.nics.iter_mut().filter_map(|nic| nic.place.as_mut()).for_each(|place| place.numa = None);
        let nics = machine.choose("");
        for gpu in 0..machine.topology.gpus.len() {
            let by_tree = known.of_gpu[gpu].iter().any(|nic| known.distances[gpu][*nic].grade() < 2);
            let expected = if by_tree { known.of_gpu[gpu].clone() } else { Vec::new() };
            assert_eq!(nics.of_gpu[gpu], expected, "{what} GPU {gpu}");
        }
        for nic in 0..machine.topology.nics.len() {
            assert_eq!(nics.verdicts[nic].used, known.verdicts[nic].used, "{what} {}", machine.name(nic));
        }
    }
}

/// Nothing at all known of places, ports or models.
#[test]
fn bare_facts_do_no_harm() {
    for (what, machine) in all() {
        let mut bare = machine.clone();
        bare.topology.nics.iter_mut().for_each(|nic| nic.place = None);
        let nics = bare.choose("");
        assert!(nics.of_gpu.iter().all(Vec::is_empty), "{what}");
        let mut mute = machine.clone();
        mute.ports.clear();
        assert!(hca(&mute, "").is_err(), "{what}");
        let mut rateless = machine.clone();
        rateless.ports.iter_mut().for_each(|port| port.gbps = None);
        let (with, without) = (machine.choose(""), rateless.choose(""));
        assert!(without.unclear.is_some() || with.ports == without.ports, "{what}: {:?}", without.verdicts);
        let mut modelless = machine.clone();
        for place in modelless.topology.nics.iter_mut().filter_map(|nic| nic.place.as_mut()) {
            (place.vendor, place.device) = (None, None);
        }
        let without = modelless.choose("");
        assert!(without.unclear.is_some() || with.ports == without.ports, "{what}: {:?}", without.verdicts);
        assert_eq!(Machine::default().choose(""), NodeNics::default());
    }
}

// ------------------------------------------------------------------ variables

#[test]
fn nccl_ib_hca_is_set_only_where_a_card_must_stay_out() {
    assert_eq!(
        hca(&dgx_h100(), ""),
        Ok("=mlx5_0:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_9:1,mlx5_10:1,mlx5_11:1".into())
    );
    for machine in [lassen(), mi200()] {
        assert!(hca(&machine, "").unwrap_err().contains("none must be left out"));
    }
    for (machine, name) in [(aws_p4d(), "EFA"), (ex235a(), "Slingshot")] {
        assert!(hca(&machine, "").unwrap_err().starts_with(&format!("the fabric is {name}")));
        assert!(ucx(&machine, &[0], None).is_err());
    }
    // An EFA node with an RDMA card for something else: still the plugin's matter.
    let both = aws_p4d().nic("mlx5_0", "0000:30:00.0", 0, "pci0000:30");
    assert!(hca(&both, "").unwrap_err().starts_with("the fabric is EFA"));
    assert_eq!(both.excluded(&both.choose("")), ["mlx5_0"]);
    // The ports that are active, not port 1 by habit: two of an old card.
    let mut second = pcie_box(&[(InfiniBand, 100, CONNECTX_6), (Ethernet, 25, CONNECTX_4LX)]);
    second.ports[0].port = 2;
    assert_eq!(hca(&second, ""), Ok("=mlx5_0:2".into()));
    assert_eq!(ucx(&second, &[0], None), Ok("mlx5_0:2".into()));
    // One device with an InfiniBand and an Ethernet port.
    let mut vpi = pcie_box(&[(InfiniBand, 100, CONNECTX_6)]);
    let ethernet = RdmaPort { port: 2, link: Ethernet, gbps: Some(40), ..vpi.ports[0].clone() };
    vpi.ports.push(ethernet);
    assert_eq!(hca(&vpi, ""), Ok("=mlx5_0:1".into()));
    assert_eq!(ucx(&vpi, &[0], None), Ok("mlx5_0:1".into()));
}

#[test]
fn ucx_net_devices_are_the_rank_s_own() {
    let dgx = dgx_h100();
    assert_eq!(ucx(&dgx, &[1], None), Ok("mlx5_3:1".into()));
    assert_eq!(ucx(&dgx, &[4, 5], None), Ok("mlx5_6:1,mlx5_9:1".into()));
    assert!(ucx(&dgx, &[0, 1, 2, 3, 4, 5, 6, 7], None).unwrap_err().contains("all GPUs of the node"));
    // Rails: the next nearest are those of the socket.
    assert_eq!(ucx(&dgx, &[5], Some(3)), Ok("mlx5_9:1,mlx5_6:1,mlx5_10:1".into()));
    assert_eq!(ucx(&dgx, &[5], Some(1)), Ok("mlx5_9:1".into()));
    assert_eq!(ucx(&oci_h100(), &[1], None), Ok("mlx5_3:1,mlx5_4:1".into()));
    assert_eq!(ucx(&oci_h100(), &[1], Some(2)), Ok("mlx5_3:1,mlx5_4:1,mlx5_0:1,mlx5_1:1".into()));
    // One card, and nothing to leave out.
    assert!(ucx(&pcie_box(&[(InfiniBand, 200, CONNECTX_6)]), &[0], None).unwrap_err().contains("none must be left"));
    // Not known how near.
    let mut azure = azure_nd_a100();
    azure.topology.gpus[3].place.numa = None;
    assert_eq!(ucx(&azure, &[3], None), Err("which card is near GPU 3 is not known".into()));
}

/// Several cards of its own, as on AWS p5; and one for all, on the other socket
/// for half of the GPUs (Azure ND40rs v2).
#[test]
fn as_many_cards_as_there_are_for_each_gpu() {
    let many = |gpus: usize, cards: usize| {
        let mut machine = Machine::default();
        for gpu in 0..gpus {
            machine = machine.gpu(&format!("0000:{:02x}:00.0", 0x20 + gpu), 0, &format!("pci0000:{:02x}", 0x20 + gpu));
        }
        for card in 0..cards {
            let bus = 0x40 + card;
            machine =
                machine.nic(&format!("n{card}"), &format!("0000:{bus:02x}:00.0"), 0, &format!("pci0000:{bus:02x}"));
        }
        let nics = machine.choose("");
        machine.of_gpus(&nics).join("|")
    };
    assert_eq!(many(2, 8), "n0 n1 n2 n3|n4 n5 n6 n7");
    // One of five may be for something else, and which one nobody tells.
    assert_eq!(many(2, 5), "n0 n1 n2 n3 n4|n0 n1 n2 n3 n4");
    assert_eq!(many(4, 2), "n0|n0|n1|n1");
    assert_eq!(many(3, 2), "n0 n1|n0 n1|n0 n1");
    let gpus: Vec<(String, i32)> = (1..=8).map(|index| (format!("000{index}:00:00.0"), i32::from(index > 4))).collect();
    let gpus: Vec<(&str, i32)> = gpus.iter().map(|(at, numa)| (at.as_str(), *numa)).collect();
    let azure = hyper_v(&gpus, &[("mlx5_0", "0101:00:00.0", 0)]);
    assert_eq!(azure.of_gpus(&azure.choose("")), ["mlx5_0"; 8]);
}

fn world(machine: &Machine, nodes: &str) -> World {
    let mut world = World::new(nodes, "8(x2)", 0);
    world.node = machine.node_facts();
    world
}

fn left<'a>(plan: &'a Plan, name: &str) -> &'a str {
    plan.left.iter().find(|note| note.name == name).map_or("", |note| note.why.as_str())
}

const HCA: &str = "NCCL_IB_HCA";

#[test]
fn reasons_for_people() {
    let machine = hgx_four_cards();
    assert_eq!(why(&machine, &machine.choose(""), "NIC0"), "nearest to GPU 0 (PIX), GPU 1 (NODE)");
    let machine = lassen();
    assert_eq!(why(&machine, &machine.choose(""), "mlx5_3"), "nearest to GPUs 2, 3 (NODE)");
    let machine = gb200();
    assert_eq!(
        why(&machine, &machine.choose(""), "mlx5_2"),
        "Ethernet, 2 ports at 400 Gb/s, nearest to 2 of the GPUs' 2 NUMA nodes; InfiniBand, 4 ports at 400 Gb/s, \
         nearest to 2: mlx5_0, mlx5_1, mlx5_3, mlx5_4"
    );
}

/// <https://github.com/NVIDIA/nccl/issues/1478>: one list for all ranks of a node.
#[test]
fn all_ranks_of_a_node_get_the_same_list() {
    let machine = dgx_h100();
    let mut values = std::collections::BTreeSet::new();
    let of_torchrun = (0..2).map(|rank| ("1(x2)", rank, "torchrun --nproc-per-node 8 train.py"));
    for (tasks, rank, command) in (0..16).map(|rank| ("8(x2)", rank, "python3 train.py")).chain(of_torchrun) {
        let mut world = World::new("n[1-2]", tasks, rank);
        world.node = machine.node_facts();
        world.command = command.split(' ').map(String::from).collect();
        values.insert(world.plan("").unwrap().value(HCA).unwrap().to_string());
    }
    assert_eq!(values.len(), 1, "{values:?}");
}

#[test]
fn who_decides_about_cards() {
    let machine = dgx_h100();
    let plan = world(&machine, "n[1-2]").plan("").unwrap();
    let variable = plan.env.iter().find(|variable| variable.name == HCA).unwrap();
    assert_eq!(variable.origin, Origin::Fabric);
    assert!(variable.why.starts_with("only the GPUs' cards, not mlx5_1, mlx5_2, mlx5_7, mlx5_8; "), "{}", variable.why);
    // The user, empty too; and NCCL's own file.
    for value in ["", "mlx5_0", "^mlx5_1"] {
        let plan = world(&machine, "n[1-2]").export(&[(HCA, value)]).plan("").unwrap();
        assert_eq!(plan.value(HCA), None);
        assert!(left(&plan, HCA).starts_with("yours, kept (the fabric would set =mlx5_0:1,"), "{}", left(&plan, HCA));
    }
    let mut filed = world(&machine, "n[1-2]");
    filed.task.nccl_files =
        vec![FileValue { name: HCA.into(), value: "=mlx5_0".into(), file: "/etc/nccl.conf".into() }];
    let plan = filed.plan("").unwrap();
    assert_eq!(plan.value(HCA), None);
    assert!(left(&plan, HCA).contains("/etc/nccl.conf"));
    // One node, TCP, no binding of cards, devices not known.
    for (nodes, tasks, spec, why) in [
        ("n1", "8", "", "one node"),
        ("n[1-2]", "8(x2)", "fabric=tcp", "fabric=tcp"),
        ("n[1-2]", "8(x2)", "bind=cpu+mem", "bind=cpu+mem"),
        ("n[1-2]", "8(x2)", "bind=off", "bind=off"),
    ] {
        let mut world = World::new(nodes, tasks, 0);
        world.node = machine.node_facts();
        let plan = world.plan(spec).unwrap();
        assert_eq!(plan.value(HCA), None, "{spec}");
        assert!(left(&plan, HCA).starts_with(why), "{spec}: {}", left(&plan, HCA));
    }
    let mut unknown = world(&machine, "n[1-2]");
    unknown.node.rdma = None;
    assert_eq!(left(&unknown.plan("").unwrap(), HCA), "the node's RDMA devices are not known");
}

#[test]
fn a_card_that_is_down_is_told_or_refused() {
    let machine = dgx_h100().down("mlx5_9");
    let plan = world(&machine, "n[1-2]").plan("").unwrap();
    let told: Vec<&Warning> = plan.warnings.iter().filter(|warning| warning.id == "nic-down").collect();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].message, "GPU 5: mlx5_9 is down, mlx5_6 is used on n1");
    assert_eq!(told[0].severity, Severity::Warning);
    let refusal = world(&machine, "n[1-2]").refusal("nic-down=fail");
    assert!(
        refusal.contains("GPU 5: mlx5_9 is down, mlx5_6 would be used instead on n1")
            && refusal.contains("--palingenesis=nic-down=warn"),
        "{refusal}"
    );
    assert!(world(&dgx_h100(), "n[1-2]").plan("nic-down=fail").is_ok());
    // A rank that sees its own GPU only speaks for the others of its node, too.
    let mut alone = world(&machine, "n[1-2]").export(&[("CUDA_VISIBLE_DEVICES", "0")]);
    let told = |world: &World| world.plan("").unwrap().warnings.iter().filter(|one| one.id == "nic-down").count();
    assert_eq!(told(&alone), 0);
    alone.task.peers = Peers::Met((0..8).map(|gpu| Peer { gpus: vec![gpu], ..Peer::default() }).collect());
    assert_eq!(told(&alone), 1);
    // Where nobody looks, and where no network is used.
    let mut single = World::new("n1", "8", 0);
    single.node = machine.node_facts();
    for plan in [
        world(&machine, "n[1-2]").plan("checks=off"),
        world(&machine, "n[1-2]").plan("fabric=tcp,nic-down=fail"),
        world(&machine, "n[1-2]").plan("bind=cpu,nic-down=fail"),
        single.plan("nic-down=fail"),
    ] {
        assert!(plan.unwrap().warnings.iter().all(|warning| warning.id != "nic-down"));
    }
}

/// <https://github.com/NVIDIA/nccl/issues/1591>: storage ports of the same kind
/// and rate, taken by a prefix.
#[test]
fn the_user_s_list_that_takes_storage_too_is_told() {
    let found = |value: &str| {
        let plan = world(&dgx_h100(), "n[1-2]").export(&[(HCA, value)]).plan("").unwrap();
        plan.warnings.into_iter().find(|warning| warning.id == "hca-far")
    };
    let warning = found("mlx5_1").unwrap();
    assert!(warning.message.starts_with("NCCL_IB_HCA=mlx5_1 takes mlx5_1:1 too: near no GPU"), "{}", warning.message);
    assert!(warning.cure.starts_with("write =mlx5_0:1,mlx5_3:1,"), "{}", warning.cure);
    assert!(found("mlx5").is_some() && found("^mlx5_7,mlx5_8").is_some());
    // Right ones, and narrower ones, which are the user's matter.
    for value in
        ["=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11", "^=mlx5_1,mlx5_2,mlx5_7,mlx5_8", "=mlx5_0"]
    {
        assert_eq!(found(value), None, "{value}");
    }
}

#[test]
fn the_rank_s_card_is_in_its_plan() {
    let machine = dgx_h100();
    let world = world(&machine, "n[1-2]");
    let settings = Settings::default();
    let facts = Facts { node: &world.node, ..Facts::new(&world.step, &world.environment) };
    let mut plan = world.plan("bind=off").unwrap();
    plan.binding.decisions.clear();
    let nics = choose(&View::of(&facts, &settings));
    let mut offers = Offers::default();
    decide(&mut plan, &mut offers, &facts, &settings, &nics, &Ok(vec![5]));
    let decision = plan.binding.decisions.iter().find(|decision| decision.what == "nic").unwrap();
    assert_eq!(decision.value.as_deref(), Some("mlx5_9"));
    assert_eq!(decision.why, "nearest to its GPU (PIX)");
    let offered = format!("{offers:?}");
    assert!(offered.contains("\"UCX_NET_DEVICES\", value: Some(\"mlx5_9:1\")"), "{offered}");
}

/// Whole plans: each rank its own card, its user's value before ours, and none
/// for a launcher.
#[test]
fn ucx_net_devices_in_the_plan() {
    const UCX: &str = "UCX_NET_DEVICES";
    let machine = dgx_h100();
    let plan = |tasks: &str, rank: u32, command: &str, exported: &[(&str, &str)], spec: &str| {
        let mut world = World::new("n[1-2]", tasks, rank).export(exported);
        world.node = machine.node_facts();
        world.command = command.split(' ').map(String::from).collect();
        world.plan(spec).unwrap()
    };
    let cards = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];
    for rank in 0..16 {
        let plan = plan("8(x2)", rank, "python3 train.py", &[], "");
        let expected = format!("{}:1", cards[rank as usize % 8]);
        assert_eq!(plan.value(UCX), Some(expected.as_str()), "rank {rank}");
        let variable = plan.env.iter().find(|variable| variable.name == UCX).unwrap();
        assert_eq!(variable.origin, Origin::Fabric);
    }
    // Two GPUs for each rank.
    let two = plan("4(x2)", 3, "python3 train.py", &[], "");
    assert_eq!(two.value(UCX), Some("mlx5_10:1,mlx5_11:1"));
    let torchrun = plan("1(x2)", 0, "torchrun --nproc-per-node 8 train.py", &[], "");
    assert_eq!(torchrun.value(UCX), None);
    assert!(left(&torchrun, UCX).starts_with("each task starts the node's ranks"), "{}", left(&torchrun, UCX));
    let alone = plan("1(x2)", 0, "python3 train.py", &[], "");
    assert!(left(&alone, UCX).starts_with("one task on the node"), "{}", left(&alone, UCX));
    let users = plan("8(x2)", 5, "python3 train.py", &[(UCX, "all")], "rails=2");
    assert_eq!((users.value(UCX), left(&users, UCX).starts_with("yours, kept")), (None, true));
    let rails = plan("8(x2)", 5, "python3 train.py", &[], "rails=2");
    assert_eq!(rails.value(UCX), Some("mlx5_9:1,mlx5_6:1"));
}

/// Numbers without a pattern, the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn path(&mut self) -> String {
        let bus = 0x10 * (1 + self.below(4));
        let bridges = (0..self.below(4)).map(|level| format!("/0000:{:02x}:0{}.0", bus + level, self.below(2)));
        format!("pci0000:{bus:02x}{}", bridges.collect::<String>())
    }

    fn machine(&mut self) -> Machine {
        let mut machine = Machine::default();
        for index in 0..self.below(5) {
            let (numa, path) = (self.below(3) as i32 - 1, self.path());
            machine = machine.gpu(&format!("0000:{:02x}:00.0", 0x80 + index), numa, &path);
        }
        for index in 0..self.below(9) {
            let at = format!("0000:{:02x}:00.{}", 0xa0 + self.below(6), index % 8);
            let (numa, path) = (self.below(3) as i32 - 1, self.path());
            machine = machine.nic(&format!("mlx5_{index}"), &at, numa, &path);
            machine = match self.below(9) {
                0 => machine.of(CONNECTX_6DX, Ethernet, 100),
                1 => machine.of(CONNECTX_7, Ethernet, 200),
                2 => machine.of(CONNECTX_7, Ethernet, 400).bonded("bond0"),
                3 => machine.of(CONNECTX_6, InfiniBand, 200),
                4 if self.below(4) == 0 => machine.efa(),
                5 if self.below(4) == 0 => machine.slingshot(),
                6 => machine.virtual_of(&format!("0000:{:02x}:00.0", 0xa0 + self.below(6))),
                _ => machine,
            };
            if self.below(4) == 0 {
                machine.link(&format!("mlx5_{index}"), false);
            }
        }
        if self.below(8) == 0 {
            machine.topology.nics.iter_mut().take(1).for_each(|nic| nic.place = None);
        }
        if self.below(8) == 0 {
            machine.rules.allow = Some(vec![NicPattern::Name("mlx5_1".into()), NicPattern::Name("mlx5_0".into())]);
        }
        if self.below(8) == 0 {
            machine.rules.deny = vec![NicPattern::Name("mlx5_2".into())];
        }
        machine
    }
}

/// Machines nobody has built: no panic, and what follows from one choice agrees.
#[test]
fn odd_machines() {
    let mut dice = Dice(4);
    for round in 0..3000 * crate::plan::tests::rounds() {
        let machine = dice.machine();
        let spec = ["", "", "fabric=roce", "fabric=infiniband", "nic-down=fail"][dice.below(5) as usize];
        let what = || format!("{round} {spec} {machine:#?}");
        let nics = machine.choose(spec);
        let (cards, gpus) = (machine.topology.nics.len(), machine.topology.gpus.len());
        assert_eq!((nics.verdicts.len(), nics.ports.len(), nics.of_gpu.len()), (cards, cards, gpus), "{}", what());
        assert_eq!(nics.faults.len(), nics.fallbacks.len());
        for (index, verdict) in nics.verdicts.iter().enumerate() {
            let name = machine.name(index);
            let verbs = machine.ports.iter().any(|port| port.device == name);
            let active = machine.ports.iter().any(|port| port.device == name && port.active);
            assert!(!verdict.why.is_empty() && !verdict.why.contains('\n'), "{}", what());
            assert!(!verdict.used || active || !verbs, "{name} is used and down: {}", what());
            assert!(nics.ports[index].is_empty() || verdict.used, "{name}: {}", what());
        }
        for nic in nics.of_gpu.iter().flatten() {
            assert!(nics.verdicts[*nic].used, "{}", what());
        }
        assert!(nics.unclear.is_none() || nics.of_gpu.iter().all(Vec::is_empty), "{}", what());
        if let Ok(value) = hca(&machine, spec) {
            let named = value.split(',').count();
            let active = machine.ports.iter().filter(|port| port.active && port.link != LinkLayer::Other);
            let taken = active.clone().filter(|port| nccl_selects(&value, &port.device, port.port.into())).count();
            assert_eq!(named, taken, "{value}: {}", what());
            assert!(taken < active.count() || machine.rules.allow.is_some(), "{value}: {}", what());
        }
        // Each GPU by itself: a part of the list, or nothing.
        for gpu in 0..gpus {
            let own = machine.with(spec, |view| choose(view).ucx_net_devices(view, &[gpu], Some(2)));
            for entry in own.iter().flat_map(|own| own.split(',')) {
                let (name, port) = entry.split_once(':').unwrap();
                let index = machine.topology.nics.iter().position(|nic| nic.name == name).unwrap();
                assert!(nics.ports[index].contains(&port.parse().unwrap()), "{entry}: {}", what());
            }
        }
    }
}

/// <https://github.com/sgl-project/sglang/issues/4572>: a flood of virtual
/// functions shall not hold up a rank.
#[test]
fn a_flood_of_virtual_functions_costs_little() {
    let mut machine = dgx_h100();
    for index in 0..240u32 {
        let at = format!("0000:18:{:02x}.{}", 1 + index / 8, index % 8);
        machine = machine.nic(&format!("vf{index}"), &at, 0, "").virtual_of("0000:18:00.0");
        let path = machine.topology.nics[0].place.clone().unwrap();
        let place = machine.topology.nics.last_mut().unwrap().place.as_mut().unwrap();
        (place.host_bridge, place.bridges) = (path.host_bridge, path.bridges);
    }
    let start = std::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(machine.choose("").verdicts.iter().filter(|verdict| verdict.used).count(), 8);
    }
    println!("{:?}", start.elapsed() / 20);
    assert!(start.elapsed().as_secs() < 10);
    machine.link("mlx5_0", false);
    let start = std::time::Instant::now();
    assert!(machine.with("", |view| choose(view).nccl_ib_hca(view)).unwrap_err().contains("more than NCCL takes"));
    println!("{:?}", start.elapsed());
}
