//! `gid=auto`: the row of the RoCE ports' address tables that NCCL before 2.21 and
//! UCX are to use. One number holds for all ports of a node, so only a row that is
//! right on each will do
//! (<https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>).

use crate::config::{Gid, Settings};
use crate::facts::rdma::LinkLayer;
use crate::facts::{GidRow, NodeFacts, RdmaPort, TaskFacts};

use super::marks::Marks;
use super::netmatch::List;
use super::precedence::{self, Layer, Offers};
use super::{Facts, Origin};

/// A port, and its rows of RoCE v2 with an IPv4 address that leads somewhere.
pub type Usable<'a> = (&'a RdmaPort, Vec<u32>);

/// For each active port that NCCL takes of `hca`, its list of devices, the rows to
/// use; `None` where they are not known, or where not all ports are on Ethernet.
pub fn usable<'a>(node: &'a NodeFacts, task: Option<&TaskFacts>, hca: &str) -> Option<Vec<Usable<'a>>> {
    let rows = task.and_then(|task| task.gids.as_deref()).unwrap_or(&node.gids);
    let list = List::parse(hca);
    let taken = |port: &&RdmaPort| {
        port.active && port.link != LinkLayer::Other && list.selects(&port.device, Some(port.port.into()))
    };
    let ports: Vec<&RdmaPort> = node.rdma.as_deref()?.iter().filter(taken).collect();
    if rows.is_empty() || ports.is_empty() || ports.iter().any(|port| port.link != LinkLayer::Ethernet) {
        return None;
    }
    let of = |port: &RdmaPort| {
        let mine = |row: &&GidRow| row.device == port.device && row.port == port.port;
        rows.iter().filter(mine).filter(|row| row.ipv4().is_some() && row.is_routable()).map(|row| row.index).collect()
    };
    Some(ports.into_iter().map(|port| (port, of(port))).collect())
}

/// The lowest row that all of them have.
pub fn common(usable: &[Usable]) -> Option<u32> {
    let (_, first) = usable.first()?;
    first.iter().copied().filter(|row| usable.iter().all(|(_, rows)| rows.contains(row))).min()
}

/// "devA:1 has 1 5, devB:1 has none".
pub fn listed(usable: &[Usable]) -> String {
    let of = |(port, rows): &Usable| {
        let rows: Vec<String> = rows.iter().map(u32::to_string).collect();
        format!("{}:{} has {}", port.device, port.port, if rows.is_empty() { "none".into() } else { rows.join(" ") })
    };
    let shown: Vec<String> = usable.iter().take(8).map(of).collect();
    let more = usable.len().saturating_sub(8);
    format!("{}{}", shown.join(", "), if more > 0 { format!(" and {more} more ports") } else { String::new() })
}

pub(super) fn offer(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks) {
    if settings.gid != Gid::Auto || facts.step.nodes() == 1 {
        return;
    }
    const NAMES: [&str; 2] = ["NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX"];
    let hca = precedence::winner(offers, facts, marks, "NCCL_IB_HCA").unwrap_or_default();
    let Some(usable) = usable(facts.node, Some(facts.task), &hca) else {
        for name in NAMES {
            offers.nothing(name, "gid=auto: not all ports are RoCE, or their addresses are not known");
        }
        return;
    };
    // Without one the check gid-none speaks.
    let Some(row) = common(&usable) else { return };
    let (layer, origin) = match settings.is_of_site("gid") {
        true => (Layer::Fabric, Origin::Site),
        false => (Layer::Chosen, Origin::Option),
    };
    let why = format!("gid=auto: the lowest RoCE v2 row with an IPv4 address on all ports ({})", listed(&usable));
    for name in NAMES {
        offers.value(layer, origin, name, row.to_string(), why.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::rdma_port;
    use crate::plan::tests::World;
    use crate::plan::{Plan, Refusal};

    const NCCL: &str = "NCCL_IB_GID_INDEX";

    fn world(rows: &[(&str, u32, &str)]) -> World {
        let mut world = World::new("n[1-2]", "1(x2)", 0);
        let port = |device: &str| RdmaPort { gbps: Some(200), ..rdma_port(device, LinkLayer::Ethernet) };
        world.node.rdma = Some(vec![port("devA"), port("devB")]);
        let row = |(device, index, address): &(&str, u32, &str)| GidRow {
            device: (*device).into(),
            port: 1,
            index: *index,
            address: address.parse().unwrap(),
        };
        world.node.gids = rows.iter().map(row).collect();
        world.node.gpu_models = vec!["NVIDIA GB10".into()];
        world
    }

    fn chosen(plan: &Plan) -> (Option<&str>, Option<&str>) {
        (plan.value(NCCL), plan.value("UCX_IB_GID_INDEX"))
    }

    const A: &str = "::ffff:192.0.2.1";

    /// <https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>
    #[test]
    fn the_lowest_row_that_all_ports_have() {
        let both = [("devA", 1, A), ("devA", 5, A), ("devB", 3, A), ("devB", 5, A)];
        let plan = world(&both).plan("gid=auto").unwrap();
        assert_eq!(chosen(&plan), (Some("5"), Some("5")));
        // Not asked for: NCCL since 2.21 knows better.
        assert_eq!(chosen(&world(&both).plan("").unwrap()), (None, None));
        assert_eq!(chosen(&world(&both).plan("gid=off").unwrap()), (None, None));
        // One of them alone is used.
        let one = world(&both).export(&[("NCCL_IB_HCA", "=devA:1")]).plan("gid=auto").unwrap();
        assert_eq!(chosen(&one), (Some("1"), Some("1")));
        // The user's own stays.
        let own = world(&both).export(&[(NCCL, "3")]).plan("gid=auto,gid-since-221=off").unwrap();
        assert_eq!(chosen(&own), (None, Some("5")));
        // Rows that lead nowhere, and IPv6.
        let rows = [
            ("devA", 1, "fe80::1"),
            ("devB", 1, "fe80::1"),
            ("devA", 3, "::ffff:169.254.7.1"),
            ("devB", 3, A),
            ("devA", 4, "2001:db8::1"),
            ("devB", 4, A),
            ("devA", 7, A),
            ("devB", 7, A),
        ];
        assert_eq!(chosen(&world(&rows).plan("gid=auto").unwrap()).0, Some("7"));
    }

    #[test]
    fn no_common_row_is_an_error_that_lists_all_sets() {
        let none = world(&[("devA", 1, A), ("devB", 3, A)]);
        let Err(Refusal::Checks(found)) = none.plan("gid=auto") else { panic!("no refusal") };
        assert_eq!((found.len(), found[0].id), (1, "gid-none"));
        assert!(found[0].message.contains("devA:1 has 1, devB:1 has 3"), "{}", found[0].message);
        let plan = none.plan("gid=auto,gid-none=warn").unwrap();
        assert_eq!(chosen(&plan), (None, None));
        assert!(none.plan("").is_ok() && none.plan("gid=off").is_ok());
        let empty = world(&[("devA", 1, A)]);
        assert!(empty.refusal("gid=auto").contains("devB:1 has none"), "{}", empty.refusal("gid=auto"));
        // The user's own row decides.
        assert!(none.export(&[(NCCL, "3")]).plan("gid=auto,gid-since-221=off").is_ok());
    }

    /// The same report: what is no port's number stands for no port.
    #[test]
    fn malformed_ports_are_reported_and_select_nothing() {
        let rows = [("devA", 1, A), ("devA", 5, A), ("devB", 3, A), ("devB", 5, A)];
        for text in [":08", ":+8", ": 8", ":8abc", ":", "::2", ":18446744073709551615"] {
            let list = format!("=devA:1,devB{text}");
            let plan = world(&rows).export(&[("NCCL_IB_HCA", &list)]).plan("gid=auto").unwrap();
            assert_eq!(chosen(&plan).0, Some("1"), "{list}");
            let told =
                plan.warnings.iter().any(|warning| warning.id == "hca-missing" && warning.message.contains("devB"));
            assert!(told, "{list}: {:?}", plan.warnings);
        }
    }

    #[test]
    fn nothing_where_it_is_not_roce_or_not_known() {
        let mut infiniband = world(&[("devA", 1, A)]);
        infiniband.node.rdma.as_mut().unwrap().iter_mut().for_each(|port| port.link = LinkLayer::InfiniBand);
        for world in [infiniband, world(&[])] {
            let plan = world.plan("gid=auto").unwrap();
            assert_eq!(chosen(&plan), (None, None));
            assert!(plan.left.iter().any(|note| note.name == NCCL && note.why.contains("gid=auto")));
        }
        let mut single = world(&[("devA", 1, A), ("devB", 3, A)]);
        single.step = crate::facts::Step::described("n1", "2", 0, 44, 0).unwrap();
        assert_eq!(chosen(&single.plan("gid=auto").unwrap()), (None, None));
    }
}
