//! Every check between nodes has reports it finds and reports it does not; who differs
//! is named, whatever the order of the reports.

use std::cell::Cell;

use super::super::report::{Device, Port};
use super::*;
use crate::facts::straggler::{Activity, Clock, Lanes};
use crate::plan::tests::World;

thread_local! {
    static LOOKED_AT: Cell<usize> = const { Cell::new(0) };
}

/// A value was put into its group.
pub(super) fn count() {
    LOOKED_AT.with(|count| count.set(count.get() + 1));
}

/// Eight H100 with a card for each, as an ordinary node of 16 reports itself.
fn node(rank: u32) -> NodeReport {
    let ports = (0..8).map(|number| Port {
        name: format!("mlx5_{number}:1"),
        chosen: true,
        active: true,
        gbps: Some(400),
        ..Port::default()
    });
    let lanes =
        |address: &str| Some(Lanes { address: address.into(), width: 16, most: 16, speed: 32_000, fastest: 32_000 });
    let plan = World::new("node[000-015]", "8(x16)", 0).plan("").unwrap();
    NodeReport {
        node: format!("node{rank:03}"),
        node_rank: rank,
        tasks: 8,
        gpus: Some(8),
        gpus_given: true,
        models: vec!["NVIDIA H100 80GB HBM3".into()],
        driver: Some("550.54.15".into()),
        ports: Some(ports.collect()),
        socket: Some(Device { name: "eth0".into(), mtu: 9000 }),
        clock: Some(2_000_000_000),
        met: Some((1_999_000_000, 2_001_000_000)),
        memlock: Some(u64::MAX),
        open_files: Some(131_072),
        shm: Some((503 << 30, 500 << 30)),
        activity: Activity {
            ticks: 2000,
            busy: 40,
            cpus: 192,
            load: Some(150),
            runnable: Some(2),
            throttled: Some(0),
            throttled_ever: Some(3),
            clock: Some(Clock { now: Some(3_500_000), limit: 3_800_000, most: 3_800_000 }),
            ..Activity::default()
        },
        gpu_lanes: lanes("0000:1b:00.0"),
        nic_lanes: lanes("0000:1c:00.0"),
        ..NodeReport::of(&plan)
    }
}

fn nodes(number: u32) -> Vec<NodeReport> {
    let one = node(0);
    (0..number).map(|rank| NodeReport { node: format!("node{rank:03}"), node_rank: rank, ..one.clone() }).collect()
}

type Change = fn(&mut NodeReport);

/// Sixteen nodes, of which those with these ranks are changed.
fn changed(ranks: &[usize], change: Change) -> Vec<NodeReport> {
    let mut reports = nodes(16);
    for rank in ranks {
        change(&mut reports[*rank]);
        reports[*rank] = again(&reports[*rank]);
    }
    reports
}

/// As it comes from the node, with a hash of what is in it.
fn again(report: &NodeReport) -> NodeReport {
    let met = report.met;
    NodeReport { met, ..NodeReport::from_bytes(&report.to_bytes()).unwrap() }
}

fn said(reports: &[NodeReport]) -> Vec<(&'static str, Severity, String)> {
    compare(reports).into_iter().map(|found| (found.id, found.severity, found.message)).collect()
}

#[track_caller]
fn one(reports: &[NodeReport], id: &str, severity: Severity, message: &str) {
    let found = said(reports);
    let [(found_id, found_severity, found_message)] = found.as_slice() else { panic!("{found:#?}") };
    assert_eq!((*found_id, *found_severity, found_message.as_str()), (id, severity, message));
}

#[test]
fn each_check_says_it_looks_once_and_each_look_has_a_check() {
    let of_rules: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
    let of_looks: BTreeSet<&str> = LOOKS.iter().map(|(id, _)| *id).collect();
    assert_eq!(of_rules.iter().copied().collect::<BTreeSet<_>>(), of_looks);
    assert_eq!((of_rules.len(), LOOKS.len()), (of_looks.len(), of_looks.len()));
    for rule in RULES {
        assert!(crate::plan::checks::ids().any(|id| id == rule.id));
        let text = crate::plan::checks::text(rule.id).unwrap();
        assert!(text.contains("between the nodes, before the ranks start"), "{text}");
    }
}

#[test]
fn equal_nodes_have_nothing_against_each_other() {
    for number in [0, 1, 2, 3, 16, 4096] {
        assert_eq!(compare(&nodes(number)), [], "{number}");
    }
    // Nor those of which nothing is known.
    let bare = |rank| NodeReport { node_rank: rank, ..NodeReport::default() };
    assert_eq!(compare(&(0..5).map(bare).collect::<Vec<_>>()), []);
}

#[test]
fn a_plan_that_is_not_sent_since_it_is_equal_is_equal() {
    let first = node(0);
    let mut reports = vec![first.clone()];
    for rank in 1..4 {
        let bytes = NodeReport { node_rank: rank, ..node(rank) }.to_bytes_for(&first.hash);
        reports.push(NodeReport::from_bytes(&bytes).unwrap());
    }
    assert!(reports[3].step.is_empty());
    assert_eq!(compare(&reports), []);
    reports[2].hash = "another".into();
    let found = said(&reports);
    assert!(found.len() == 1 && found[0].2.starts_with("node002 decided something else"), "{found:?}");
}

/// <https://github.com/maccallumlab/meld/issues/114>
#[test]
fn a_node_that_lost_a_gpu() {
    let reports = changed(&[4], |report| report.gpus = Some(7));
    let message = "node004 shows 7 GPUs, the other 15 show 8 GPUs, for 8 on each node: ranks would have to share a GPU";
    one(&reports, "nodes-gpus", Severity::Error, message);
    let reports = changed(&[4], |report| report.gpus = Some(1));
    assert!(said(&reports)[0].2.starts_with("node004 shows 1 GPU, the other 15 show 8 GPUs"));
    // A launcher on each node starts a rank for each GPU.
    let mut reports = changed(&[4], |report| report.gpus = Some(7));
    reports.iter_mut().for_each(|report| (report.tasks, report.agent) = (1, true));
    let message = "node004 shows 7 GPUs, the other 15 show 8 GPUs: the launchers would start unlike numbers of ranks";
    one(&reports, "nodes-gpus", Severity::Error, message);
    // Enough for the ranks.
    let mut reports = changed(&[4], |report| report.gpus = Some(7));
    reports.iter_mut().for_each(|report| report.tasks = 4);
    one(&reports, "nodes-gpus", Severity::Warning, "node004 shows 7 GPUs, the other 15 show 8 GPUs");
    // A node with fewer tasks was given fewer.
    let reports = changed(&[15], |report| (report.gpus, report.tasks) = (Some(4), 4));
    assert_eq!(compare(&reports), []);
    // Nobody asked for GPUs, and some nodes have none.
    let mut reports = changed(&[3], |report| (report.gpus, report.models, report.driver) = (Some(0), vec![], None));
    one(
        &reports,
        "nodes-gpus",
        Severity::Error,
        "node003 shows 0 GPUs, the other 15 show 8 GPUs, for 8 on each node: ranks would find no GPU",
    );
    reports.iter_mut().for_each(|report| report.gpus_given = false);
    one(&reports, "nodes-gpus", Severity::Warning, "node003 shows 0 GPUs, the other 15 show 8 GPUs");
}

#[test]
fn another_model_and_another_driver() {
    let reports = changed(&[7, 9], |report| report.driver = Some("535.104.05".into()));
    one(
        &reports,
        "nodes-gpus",
        Severity::Warning,
        "node007 and node009 have driver 535.104.05, the other 14 have driver 550.54.15",
    );
    let reports = changed(&[0], |report| report.models = vec!["NVIDIA A100-SXM4-80GB".into()]);
    let message = "different GPUs: node000 has NVIDIA A100-SXM4-80GB, the other 15 have NVIDIA H100 80GB HBM3";
    one(&reports, "nodes-gpus", Severity::Warning, message);
}

#[test]
fn a_command_that_only_looks_at_the_nodes_may_run_on_any() {
    let mut reports = changed(&[4], |report| (report.gpus, report.driver) = (Some(7), None));
    reports.iter_mut().for_each(|report| report.only_looks = true);
    assert_eq!(compare(&reports), []);
    reports[2].version = "0.0.9".into();
    assert_eq!(compare(&reports).len(), 1);
}

#[test]
fn another_version() {
    let reports = changed(&[2], |report| report.version = "0.0.9".into());
    let own = env!("CARGO_PKG_VERSION");
    let message =
        format!("the nodes have different versions of palingenesis: node002 has 0.0.9, the other 15 have {own}");
    one(&reports, "nodes-plugin", Severity::Error, &message);
    let reports = changed(&[2], |report| report.protocol += 1);
    assert_eq!(said(&reports)[0].1, Severity::Error);
}

#[test]
fn another_plan_names_the_key_and_both_values() {
    let change: Change = |report| drop(report.step.insert("world size".into(), "120".into()));
    let message = "world size differs between the nodes: node003 has 120, the other 15 have 128";
    one(&changed(&[3], change), "nodes-plan", Severity::Error, message);
    let change: Change = |report| drop(report.step.remove("NCCL_IB_TIMEOUT"));
    let message = "NCCL_IB_TIMEOUT differs between the nodes: node003 has none, the other 15 have 22";
    one(&changed(&[3], change), "nodes-plan", Severity::Warning, message);
    // A name that one node cannot look up gives way to its address there.
    let change: Change = |report| drop(report.step.insert("MASTER_ADDR".into(), "192.0.2.1".into()));
    let message = "MASTER_ADDR differs between the nodes: node003 has 192.0.2.1, the other 15 have node000";
    one(&changed(&[3], change), "nodes-plan", Severity::Info, message);
    // Of many keys a few.
    let change: Change = |report| report.step.values_mut().for_each(|value| value.push('x'));
    let found = said(&changed(&[3], change));
    assert_eq!(found.len(), MOST_KEYS + 1, "{found:#?}");
    assert!(found[MOST_KEYS].2.ends_with("differ between the nodes too"), "{found:#?}");
}

/// <https://github.com/NVIDIA/nccl/issues/626>: variables must be the same for all ranks.
#[test]
fn variables_that_are_set_on_some_nodes_only() {
    let change: Change = |report| drop(report.env.insert("NCCL_PROTO".into(), "LL".into()));
    let message = "NCCL_PROTO differs between the nodes: node001 has LL, the other 15 have none: NCCL's ranks would not \
                   understand each other";
    one(&changed(&[1], change), "nodes-env", Severity::Error, message);
    let change: Change = |report| drop(report.env.insert("UCX_TLS".into(), "tcp".into()));
    one(
        &changed(&[1], change),
        "nodes-env",
        Severity::Warning,
        "UCX_TLS differs between the nodes: node001 has tcp, the other 15 have none",
    );
    // One node's file has what the profile sets on the others.
    let change: Change = |report| {
        report.step.remove("NCCL_DEBUG");
        report.env.insert("NCCL_DEBUG".into(), "INFO".into());
    };
    one(
        &changed(&[1], change),
        "nodes-env",
        Severity::Warning,
        "NCCL_DEBUG differs between the nodes: node001 has INFO, the other 15 have WARN",
    );
    // Without GPUs no NCCL runs.
    let mut reports = changed(&[1], |report| drop(report.env.insert("NCCL_ALGO".into(), "Ring".into())));
    reports.iter_mut().for_each(|report| report.gpus = Some(0));
    assert_eq!(said(&reports)[0].1, Severity::Warning);
}

#[test]
fn no_secret_is_told() {
    let secret = "hf_AbCdEf";
    let mut reports = nodes(3);
    let of = |value: &str| {
        NodeReport::of(&World::new("node[000-015]", "8(x16)", 0).export(&[("OFI_NCCL_X_KEY", value)]).plan("").unwrap())
    };
    reports[1].env = of(secret).env;
    reports[2].env = of("another").env;
    let reports: Vec<NodeReport> = reports.iter().map(again).collect();
    let found = said(&reports);
    assert!(found.len() == 1 && found[0].2.contains("OFI_NCCL_X_KEY") && found[0].2.contains("not shown"), "{found:?}");
    assert!(!found[0].2.contains(secret) && !found[0].2.contains("another"));
}

/// <https://github.com/NVIDIA/nccl/issues/2428>: two cards on one node, one on the other.
/// What NCCL does then needs GPUs and cards, which no test here has.
#[test]
fn unlike_cards() {
    let hidden: Change = |report| report.ports.as_mut().unwrap()[1].hidden = true;
    let message = "NCCL takes unlike numbers of network cards: node005 has 7, the other 15 have 8 (mlx5_1:1 is hidden from \
                   the ranks on node005)";
    one(&changed(&[5], hidden), "nodes-hcas", Severity::Warning, message);
    let mut reports = changed(&[5], |report| report.ports.as_mut().unwrap()[1].active = false);
    assert!(said(&reports)[0].2.ends_with("(mlx5_1:1 is down on node005)"));
    reports.iter_mut().for_each(|report| report.strict = true);
    assert_eq!(said(&reports)[0].1, Severity::Error);
    // Nobody's NCCL looks at cards.
    reports.iter_mut().for_each(|report| report.net = Some("Socket".into()));
    assert_eq!(compare(&reports), []);
    let mut reports = changed(&[5], |report| report.ports.as_mut().unwrap()[1].active = false);
    reports.iter_mut().for_each(|report| report.gpus = Some(0));
    assert_eq!(compare(&reports), []);
    // Not one of NCCL's.
    let reports = changed(&[5], |report| report.ports.as_mut().unwrap().push(Port { active: true, ..Port::default() }));
    assert_eq!(compare(&reports), []);
}

#[test]
fn nodes_that_nccl_reaches_by_different_networks() {
    let down: Change = |report| report.ports.iter_mut().flatten().for_each(|port| port.active = false);
    let found = said(&changed(&[5], down));
    let message = "NCCL finds no way between the nodes: node005 has no RDMA port that NCCL can use (mlx5_0:1, mlx5_1:1, \
                   mlx5_2:1, mlx5_3:1 and 4 more are down), the other 15 have InfiniBand";
    assert_eq!(found[0], ("nodes-hcas", Severity::Error, message.into()), "{found:?}");
    let off: Change = |report| report.rdma_off = true;
    let message = "NCCL finds no way between the nodes: node005 has no RDMA port that NCCL can use (NCCL_IB_DISABLE is \
                   set), the other 15 have InfiniBand";
    one(&changed(&[5], off), "nodes-hcas", Severity::Error, message);
    let roce: Change = |report| report.ports.iter_mut().flatten().for_each(|port| port.ethernet = true);
    let message = "NCCL finds no way between the nodes: node005 has RoCE, the other 15 have InfiniBand";
    one(&changed(&[5], roce), "nodes-hcas", Severity::Error, message);
    // One of both kinds reaches the others by one of them.
    let both: Change = |report| report.ports.as_mut().unwrap()[0].ethernet = true;
    assert_eq!(compare(&changed(&[5], both)), []);
}

#[test]
fn a_slow_card() {
    let reports = changed(&[7], |report| report.ports.as_mut().unwrap()[3].gbps = Some(200));
    let message = "network cards run at different rates, the slowest of each node: node007 has 200 Gb/s at mlx5_3:1, the \
                   other 15 have 400 Gb/s";
    one(&reports, "nodes-rates", Severity::Warning, message);
    // One that NCCL does not take may run as it likes.
    let reports = changed(&[7], |report| {
        let port = &mut report.ports.as_mut().unwrap()[3];
        (port.gbps, port.chosen) = (Some(25), false);
    });
    assert_eq!(said(&reports).iter().filter(|found| found.0 == "nodes-rates").count(), 0);
}

/// <https://github.com/NVIDIA/nccl/issues/1524>
#[test]
fn unlike_packet_sizes() {
    let mut reports = nodes(4);
    for report in &mut reports {
        report.ports.iter_mut().flatten().for_each(|port| (port.ethernet, port.mtu) = (true, Some(4096)));
    }
    assert_eq!(compare(&reports), []);
    reports[2].ports.as_mut().unwrap()[5].mtu = Some(1024);
    let message = "RoCE packets carry unlike numbers of bytes, and NCCL from 2.20 on may fail or hang: node002 has 1024, the \
                   other 3 have 4096";
    one(&reports, "nodes-mtu", Severity::Warning, message);
    let reports = changed(&[2], |report| report.socket = Some(Device { name: "eth1".into(), mtu: 1500 }));
    let message = "the network devices that lead to rank 0 take packets of unlike sizes (MTU): node002 has 1500 (eth1), the \
                   other 15 have 9000 (eth0)";
    one(&reports, "nodes-mtu", Severity::Warning, message);
}

#[test]
fn a_clock_that_is_wrong_and_not_one_that_may_be_right() {
    let reports = changed(&[7], |report| report.clock = Some(7_300_000_000));
    one(&reports, "nodes-clock", Severity::Warning, "the nodes' clocks differ: node007 is 5.3 s ahead");
    // The answer was 4 s on the way, or the clock is 2 s behind.
    let mut reports = nodes(16);
    (reports[7].clock, reports[7].met) = (Some(2_000_000_000), Some((2_000_000_000, 6_000_000_000)));
    assert_eq!(compare(&reports), []);
    // The server's own is the wrong one.
    let mut reports = nodes(16);
    reports.iter_mut().skip(1).for_each(|report| report.clock = Some(62_000_000_000));
    one(&reports, "nodes-clock", Severity::Warning, "the nodes' clocks differ: node000 is 60.0 s behind");
    let mut reports = changed(&[7], |report| report.clock = Some(7_300_000_000));
    reports[7].met = None;
    assert_eq!(compare(&reports), []);
}

#[test]
fn lower_limits() {
    let reports = changed(&[1, 2], |report| report.memlock = Some(64 << 10));
    let message = "the limit of locked memory differs: node001 and node002 have 64 KiB, the other 14 have no limit";
    one(&reports, "nodes-limits", Severity::Warning, message);
    let reports = changed(&[1], |report| report.open_files = Some(1024));
    let message = "the limit of open files differs: node001 has 1024, the other 15 have 131072";
    one(&reports, "nodes-limits", Severity::Warning, message);
}

#[test]
fn a_small_and_a_filled_shared_memory() {
    let reports = changed(&[1], |report| report.shm = Some((64 << 20, 64 << 20)));
    one(
        &reports,
        "nodes-shm",
        Severity::Warning,
        "/dev/shm is small on some nodes: node001 64 MiB; on the others 503 GiB",
    );
    let reports = changed(&[1], |report| report.shm = Some((502 << 30, 3 << 30)));
    let message = "/dev/shm is filled on some nodes, free are: node001 3 GiB; on the others 500 GiB";
    one(&reports, "nodes-shm", Severity::Warning, message);
    // Half of a little less memory.
    let reports = changed(&[1], |report| report.shm = Some((500 << 30, 480 << 30)));
    assert_eq!(compare(&reports), []);
}

#[test]
fn slow_nodes_are_named_with_numbers() {
    let table: [(Change, &str); 8] = [
        (
            |report| report.activity.steal = 240,
            "node003: 12% of the CPU time there goes to other virtual machines (steal), on the other nodes 0%",
        ),
        (
            |report| report.activity.busy = 1900,
            "node003: 95% of the step's CPU time there was used before its ranks had started, on the other nodes 2%",
        ),
        (
            |report| (report.activity.load, report.activity.runnable) = (Some(19_200), Some(180)),
            "node003: 100% of the CPUs there had work before the step came, on the other nodes 1%",
        ),
        (
            |report| report.activity.throttled = Some(41),
            "CPU cores were throttled by heat while the step started, node003: 41 times, on the other nodes 0 times",
        ),
        (
            |report| report.activity.throttled_ever = Some(320_794),
            "CPU cores were throttled by heat since the machine's start, node003: 320794 times, on the other nodes 3 times",
        ),
        (
            |report| report.activity.clock = Some(Clock { now: None, limit: 1_900_000, most: 3_800_000 }),
            "the CPUs' clock is held at node003: 50% of what they can, on the other nodes at 100%",
        ),
        (
            |report| report.gpu_lanes.as_mut().unwrap().width = 8,
            "the PCI Express link of a GPU is slow: node003: x8 at 0000:1b:00.0; on the other nodes x16",
        ),
        (
            |report| report.nic_lanes.as_mut().unwrap().speed = 16_000,
            "the PCI Express link of a network card is slow: node003: x16 at 16 GT/s at 0000:1c:00.0; on the other nodes x16 \
             at 32 GT/s",
        ),
    ];
    for (change, message) in table {
        one(&changed(&[3], change), "nodes-slow", Severity::Warning, message);
        // Where all are alike nobody is slow.
        let all: Vec<usize> = (0..16).collect();
        assert_eq!(compare(&changed(&all, change)), [], "{message}");
    }
}

#[test]
fn what_says_nothing_of_a_slow_node() {
    let table: [Change; 7] = [
        // An image is imported.
        |report| (report.activity.busy, report.container) = (1900, true),
        // Too short a time.
        |report| (report.activity.ticks, report.activity.steal) = (20, 20),
        // A job that has just ended.
        |report| report.activity.load = Some(19_200),
        // GPUs lower their links' speed while they idle.
        |report| report.gpu_lanes.as_mut().unwrap().speed = 2_500,
        // A card of half the width has a link of half the width.
        |report| report.nic_lanes = Some(Lanes { width: 8, most: 8, ..report.nic_lanes.clone().unwrap() }),
        |report| report.activity = Activity::default(),
        |report| report.activity.clock = Some(Clock { now: Some(3_000_000), limit: 3_600_000, most: 3_800_000 }),
    ];
    for (number, change) in table.into_iter().enumerate() {
        assert_eq!(compare(&changed(&[3], change)), [], "{number}");
    }
}

/// What chance decides: the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most
    }

    fn shuffle(&mut self, reports: &mut [NodeReport]) {
        for place in (1..reports.len()).rev() {
            reports.swap(place, self.below(place + 1));
        }
    }
}

/// Differences, each of which one node alone can have.
const DIFFERENCES: [Change; 16] = [
    |report| report.version = "9.9".into(),
    |report| drop(report.step.insert("MASTER_PORT".into(), "1".into())),
    |report| drop(report.env.insert("NCCL_ALGO".into(), "Tree".into())),
    |report| report.gpus = Some(7),
    |report| report.driver = Some("535".into()),
    |report| report.models = vec!["NVIDIA A100".into()],
    |report| report.ports.as_mut().unwrap()[0].active = false,
    |report| report.rdma_off = true,
    |report| report.ports.as_mut().unwrap()[0].gbps = Some(100),
    |report| report.socket = Some(Device { name: "eth0".into(), mtu: 1500 }),
    |report| report.clock = Some(90_000_000_000),
    |report| report.memlock = Some(0),
    |report| report.open_files = Some(7),
    |report| report.shm = Some((1, 1)),
    |report| report.activity.steal = 1000,
    |report| report.gpu_lanes.as_mut().unwrap().width = 1,
];

#[test]
fn whoever_differs_is_named_and_the_order_of_the_reports_does_not_matter() {
    let mut chance = Chance(11);
    for round in 0..60 * crate::plan::tests::rounds() {
        let number = 3 + chance.below(30);
        let mut reports = nodes(number as u32);
        // Fewer than half of them.
        let odd = 1 + chance.below((number - 1) / 2);
        let mut ranks: Vec<usize> = (0..number).collect();
        for place in (1..number).rev() {
            ranks.swap(place, chance.below(place + 1));
        }
        let mut ranks = ranks[..odd].to_vec();
        ranks.sort_unstable();
        let change = DIFFERENCES[round % DIFFERENCES.len()];
        for rank in &ranks {
            change(&mut reports[*rank]);
            reports[*rank] = again(&reports[*rank]);
        }
        let found = compare(&reports);
        assert!(!found.is_empty(), "{round}");
        for warning in &found {
            let named = |rank: usize| warning.message.contains(&format!("node{rank:03}"));
            for rank in 0..number {
                let place = ranks.iter().position(|odd| *odd == rank);
                // Of many the first eight.
                let expected = place.is_some_and(|place| place < 8);
                assert_eq!(named(rank), expected, "{round}: node {rank}, {ranks:?}: {}", warning.message);
            }
            assert!(!warning.cure.is_empty() && warning.message.len() < 600, "{}", warning.message);
            assert!(!warning.message.chars().any(char::is_control));
        }
        chance.shuffle(&mut reports);
        assert_eq!(compare(&reports), found, "{round}");
    }
}

/// Twice as many nodes are twice as many looks, not four times, even where all differ.
#[test]
fn the_work_grows_with_the_number_of_nodes() {
    let looks = |number: u32, differ: bool| {
        let mut reports = nodes(number);
        if differ {
            for (rank, report) in reports.iter_mut().enumerate() {
                report.driver = Some(rank.to_string());
                report.hash = rank.to_string();
                report.env.insert("NCCL_ALGO".into(), rank.to_string());
                report.clock = Some(rank as u64 * 9_000_000_000);
                report.activity.steal = rank as u64 % 1500;
            }
        }
        LOOKED_AT.with(|count| count.set(0));
        let found = compare(&reports);
        assert_eq!(found.is_empty(), !differ);
        LOOKED_AT.with(Cell::get)
    };
    for differ in [false, true] {
        let (few, many) = (looks(512, differ), looks(4096, differ));
        assert_eq!(many, few * 8, "{differ}");
    }
    // Equal plans are one look each.
    assert!(looks(4096, false) < 4096 * 24);
}

#[test]
fn what_a_hostile_node_says_is_one_line_that_moves_no_cursor() {
    let bad = "\u{1b}[2J\n\u{9b}".repeat(500);
    let mut reports = nodes(5);
    let hostile = &mut reports[2];
    hostile.node = bad.clone();
    hostile.version = bad.clone();
    hostile.driver = Some(bad.clone());
    hostile.models = vec![bad.clone(); 20];
    hostile.step.insert(bad.clone(), bad.clone());
    hostile.env.insert(format!("X{bad}"), bad.clone());
    hostile.socket = Some(Device { name: bad.clone(), mtu: 0 });
    hostile.ports = Some(vec![Port { name: bad.clone(), chosen: true, active: false, ..Port::default() }; 40]);
    hostile.gpu_lanes = Some(Lanes { address: bad.clone(), width: 1, most: u32::MAX, speed: 0, fastest: u32::MAX });
    hostile.nic_lanes =
        Some(Lanes { width: u32::MAX, most: u32::MAX, speed: u32::MAX, fastest: u32::MAX, address: bad });
    (hostile.clock, hostile.met) = (Some(u64::MAX), Some((u64::MAX, 0)));
    (hostile.shm, hostile.memlock, hostile.gpus, hostile.tasks) =
        (Some((0, u64::MAX)), Some(0), Some(u32::MAX), u32::MAX);
    hostile.activity = Activity {
        ticks: u64::MAX,
        busy: u64::MAX,
        steal: u64::MAX,
        cpus: u32::MAX,
        load: Some(u32::MAX),
        runnable: Some(u32::MAX),
        throttled: Some(u64::MAX),
        throttled_ever: Some(u64::MAX),
        clock: Some(Clock { now: Some(u32::MAX), limit: u32::MAX, most: 0 }),
    };
    hostile.hash = "x".into();
    let found = compare(&reports);
    assert!(found.len() > 6, "{found:#?}");
    for warning in found {
        assert!(!warning.message.chars().any(char::is_control), "{:?}", warning.message);
        assert!(warning.message.len() < 4000, "{}", warning.message.len());
    }
    // And where every node is like that.
    let same: Vec<NodeReport> = (0..5).map(|rank| NodeReport { node_rank: rank, ..reports[2].clone() }).collect();
    let _ = compare(&same);
}
