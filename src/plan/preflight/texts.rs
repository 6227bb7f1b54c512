//! The lines people read when the nodes of a step do not come together, or do so
//! otherwise than they should: what, why, cure.

use std::net::IpAddr;

use crate::config::{Preflight, Settings};
use crate::facts::network::Interface;

/// More names of nodes than this are counted, not written.
const NAMES: usize = 8;

/// Names, the long list cut: "n1 n2 n3 and 13 more".
pub fn names(nodes: &[String]) -> String {
    let shown = nodes.iter().take(NAMES).cloned().collect::<Vec<_>>().join(" ");
    match nodes.len().saturating_sub(NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn nodes_of(count: usize, all: usize) -> String {
    format!("{count} of {all} node{}", if all == 1 { "" } else { "s" })
}

/// A warm-up that nobody runs.
pub fn not_warmed(settings: &Settings) -> Option<String> {
    let off = settings.preflight == Preflight::Off && settings.warm.is_some();
    off.then(|| {
        "palingenesis: warning: the warm-up is not run: with preflight=off the nodes do not wait for it; leave out \
         preflight=off\n"
            .into()
    })
}

/// While nodes are waited for: absent ones, and those that are here without all of
/// their ranks. `round`: they are all here, and an answer of these is missing.
pub fn waiting(absent: &[String], unready: &[String], all: usize, in_a_round: bool, seconds: u64) -> String {
    let mut parts = Vec::new();
    if !absent.is_empty() {
        parts.push(format!("{}: {}", nodes_of(absent.len(), all), names(absent)));
    }
    if !unready.is_empty() {
        let what = if in_a_round { "the answer of" } else { "all ranks of" };
        parts.push(format!("{what} {}: {}", nodes_of(unready.len(), all), names(unready)));
    }
    format!("palingenesis: waiting for {}, {seconds} s", parts.join("; "))
}

/// Nodes that did not come in time.
pub fn late(absent: &[String], unready: &[String], all: usize, seconds: u64) -> String {
    let list = |nodes: &[String]| nodes.iter().take(NAMES).cloned().collect::<Vec<_>>().join(",");
    let mut parts = Vec::new();
    if !absent.is_empty() {
        let first = absent.first().map(String::as_str).unwrap_or_default();
        parts.push(format!(
            "{} did not come to the start within {seconds} s: {}; see whether they are up (sinfo -N -n {}) and whether \
             palingenesis is installed and loaded there (srun -N1 -w {first} --palingenesis=show true prints a table if so); if \
             they only need longer, for an image to be imported say, give timeout=SECONDS",
            nodes_of(absent.len(), all),
            names(absent),
            list(absent),
        ));
    }
    if !unready.is_empty() {
        parts.push(format!(
            "{} came without all of their ranks within {seconds} s: {}; see what holds the ranks there (a TaskProlog, a \
             container's import), and give timeout=SECONDS if they only need longer",
            nodes_of(unready.len(), all),
            names(unready),
        ));
    }
    if parts.is_empty() {
        parts.push(format!("the nodes were not ready within {seconds} s; give timeout=SECONDS for more"));
    }
    parts.join(" | ")
}

/// How a way to rank 0's node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nobody listens, or a firewall says so.
    Refused,
    /// Nothing came back.
    Silent,
    /// No way; the error's number.
    NoRoute(i32),
    /// Somebody else listens.
    Stranger,
    /// Another error's number.
    Other(i32),
}

/// A way to rank 0's node that led nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// Where to.
    pub to: (IpAddr, u16),
    /// From which of this node's addresses.
    pub from: Option<IpAddr>,
    /// How it ended.
    pub fault: Fault,
}

/// What a node knows that did not reach rank 0's.
#[derive(Debug, Clone, Copy)]
pub struct Unreached<'a> {
    /// This node.
    pub node: &'a str,
    /// Rank 0's.
    pub rank0: &'a str,
    /// MASTER_ADDR.
    pub host: &'a str,
    /// What was tried.
    pub ways: &'a [Way],
    /// This node's addresses.
    pub interfaces: &'a [Interface],
    /// For how long it was tried.
    pub seconds: u64,
    /// The port that somebody named, where there is no other.
    pub named: Option<u16>,
}

fn socket(address: IpAddr, port: u16) -> String {
    std::net::SocketAddr::new(address, port).to_string()
}

fn error(number: i32) -> String {
    let text = std::io::Error::from_raw_os_error(number).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// A node that did not reach rank 0's.
pub fn unreached(what: &Unreached) -> String {
    let Unreached { node, rank0, host, interfaces, seconds, .. } = *what;
    // The first way is the one the training takes. Routers answer now and then only, so that
    // another port of the same address may tell more than its silence.
    let telling = |first: &&Way| {
        let answered = |way: &&Way| way.to.0 == first.to.0 && matches!(way.fault, Fault::NoRoute(_));
        what.ways.iter().find(answered).filter(|_| first.fault == Fault::Silent)
    };
    let Some(way) = what.ways.first().map(|first| telling(&first).unwrap_or(first)) else {
        return format!(
            "{node} cannot reach rank 0's node {rank0}: it has no address for MASTER_ADDR={host}; add {host} to DNS or to \
             /etc/hosts of {node}, or give master=ADDRESS"
        );
    };
    let (address, port) = way.to;
    let other: Vec<String> = what
        .ways
        .iter()
        .filter(|other| other.to.0 == address && other.to.1 != port && other.fault == way.fault)
        .map(|other| other.to.1.to_string())
        .collect();
    let others = if other.is_empty() { String::new() } else { format!(" (nor at {})", other.join(", ")) };
    let own = way.from.map(|from| match interfaces.iter().find(|interface| interface.address == from) {
        Some(interface) => format!(" from {from} ({})", interface.name),
        None => format!(" from {from}"),
    });
    let own = own.unwrap_or_default();
    let start = format!("{node} cannot reach rank 0's node {rank0} at {}{others}{own}", socket(address, port));
    let (named, resolved) = if host == address.to_string() {
        Default::default()
    } else {
        let resolved = format!(", to which {host} resolves on {node}");
        (format!("{resolved},"), resolved)
    };
    let ports = match what.named {
        Some(port) => format!("port {port}"),
        None => "the ports of MASTER_PORT (20000-31999, or ports=LOW-HIGH)".to_string(),
    };
    match way.fault {
        Fault::Refused => format!(
            "{start}: connection refused for {seconds} s: palingenesis is not loaded on {rank0}, or the step did not come to its \
             start there, or {address}{named} is another machine, or a firewall rejects; look at {rank0} \
             (srun -N1 -w {rank0} --palingenesis=show true prints a table if it is loaded), and let {ports} through between \
             the nodes"
        ),
        Fault::Silent => match elsewhere(way, interfaces) {
            Some((out, right)) => format!(
                "{start}: no answer within {seconds} s: the packets leave by {out}, though {right} is in {address}'s network; \
                 correct the routes of {node} (ip route get {address}), or choose the network with iface={right}"
            ),
            None => format!(
                "{start}: no answer within {seconds} s: a firewall drops the packets, or {address}{named} is no address by \
                 which {rank0} can be reached from there; let {ports} through between the nodes, or choose another network \
                 with iface=NAME"
            ),
        },
        Fault::NoRoute(number) => {
            // With a route the kernel has chosen where from.
            let why = match way.from {
                Some(_) => format!("no host has the address {address}{named} or a firewall refuses"),
                None => format!("{node} has no way to {address}{resolved}"),
            };
            format!(
                "{start}: {}: {why}; look at its routes (ip route get {address}) and its /etc/hosts or DNS, let {ports} through \
                 between the nodes, or choose another network with iface=NAME or master=ADDRESS",
                error(number)
            )
        }
        Fault::Stranger => format!(
            "{start}: another program listens there, none of this step: {address}{named} is another machine, or the port is \
             taken; {}",
            match what.named {
                Some(port) => format!("correct the name, or choose another port than {port}"),
                None =>
                    format!("correct {host} in /etc/hosts or DNS of {node}, or choose other ports with ports=LOW-HIGH"),
            }
        ),
        Fault::Other(number) => {
            format!("{start}: {}; look at that node's network, or choose another with iface=NAME", error(number))
        }
    }
}

/// Where packets leave by another interface than the one in the target's network: both.
fn elsewhere<'a>(way: &Way, interfaces: &'a [Interface]) -> Option<(&'a str, &'a str)> {
    let from = interfaces.iter().find(|interface| Some(interface.address) == way.from)?;
    if from.reaches(way.to.0) {
        return None;
    }
    let right = interfaces.iter().find(|interface| interface.prefix > 0 && interface.reaches(way.to.0))?;
    (right.name != from.name).then_some((from.name.as_str(), right.name.as_str()))
}

/// Rank 0's node has gone while this one waited.
pub fn lost(node: &str, rank0: &str) -> String {
    format!(
        "the connection of {node} to rank 0's node {rank0} ended before the start: its first rank was ended, or the node or the \
         network is down; look at {rank0} (sinfo -N -n {rank0}, its slurmd's log), and start the step again"
    )
}

/// What to do where a node's connection ended.
pub const LOOK_THERE: &str = "no rank of the step starts; look at that node (whether its ranks were ended, its slurmd's log, dmesg), and start the step \
     again";

/// A rank that cannot start, as its node tells it.
pub fn rank_missing(ranks: &[u32], node: &str, late: Option<u64>) -> String {
    let list = ranks.iter().take(NAMES).map(u32::to_string).collect::<Vec<_>>().join(", ");
    let list = match ranks.len().saturating_sub(NAMES) {
        0 => list,
        more => format!("{list} and {more} more"),
    };
    let what = match late {
        Some(seconds) => format!("did not come to the start within {seconds} s (gate= in plugstack.conf)"),
        None => "ended before the start".to_string(),
    };
    format!("local rank {list} on {node} {what}")
}

/// A node whose tasks nobody minds any more.
pub fn orphaned(node: &str) -> String {
    format!("slurmstepd on {node} was killed before the start")
}

/// What follows from it.
pub const STOPPED: &str = "no rank of the step starts; look at that node (dmesg, its slurmd's log), or start all the same with \
                           preflight=warn";

/// What follows where the nodes do not stop for it.
pub const STARTED: &str =
    "the node's other ranks start without it: if they wait for it, end the step with scancel and look at that node";

/// Who listens on a port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holder {
    /// Its process and that one's name.
    pub process: Option<(u32, String)>,
    /// Its user.
    pub user: Option<u32>,
}

impl Holder {
    fn shown(&self) -> String {
        match (&self.process, self.user) {
            (Some((pid, name)), _) => format!("{name} (process {pid})"),
            (None, Some(user)) => format!("a process of user {user}"),
            (None, None) => "another process".into(),
        }
    }
}

/// The user's port is not free.
pub fn taken(port: u16, rank0: &str, holder: &Holder) -> String {
    format!(
        "MASTER_PORT={port} is taken on {rank0} by {}, so rank 0 could not listen there; end it, or leave the port to us: unset \
         MASTER_PORT and leave out port=",
        holder.shown()
    )
}

/// The port is another than the first of the sequence.
pub fn settled(taken: &[u16], rank0: &str, port: u16) -> String {
    let list = taken.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
    let (noun, is) = if taken.len() == 1 { ("port", "is") } else { ("ports", "are") };
    format!("{noun} {list} {is} taken on {rank0}; MASTER_PORT is {port}")
}

/// None of the ports is free.
pub fn no_port(rank0: &str, ports: &[(u16, i32)]) -> String {
    let list = ports.iter().map(|(port, why)| format!("{port} ({})", error(*why))).collect::<Vec<_>>().join(", ");
    format!("{rank0} can listen on none of the step's ports: {list}; choose others with ports=LOW-HIGH")
}

/// An endpoint of the command's own.
pub fn untested(endpoint: &str, at: &str) -> String {
    format!(
        "the launcher has an endpoint of its own, {endpoint}; the nodes met at {at}, so whether {endpoint} can be reached is not \
         known; leave the endpoint out and the launchers meet where the nodes met"
    )
}

/// Nobody, or several, would host the store at the endpoint.
pub fn endpoint_hosts(endpoint: &str, hosts: &[String], all: usize) -> String {
    let who = match hosts.len() {
        0 => "none of the step's nodes has that address: nobody would host the store, and all would wait".to_string(),
        _ => format!(
            "{} have that address ({}): each would host a store of its own",
            nodes_of(hosts.len(), all),
            names(hosts)
        ),
    };
    format!("the launcher's endpoint is {endpoint}, and {who}; leave it out, or name rank 0's node")
}

/// One node to the next.
#[derive(Debug, Clone, Copy)]
pub struct Next<'a> {
    /// From here.
    pub node: &'a str,
    /// To there.
    pub next: &'a str,
    /// At.
    pub to: (IpAddr, u16),
    /// By which address of ours, and its interface.
    pub from: Option<(IpAddr, &'a str)>,
    /// How it ended.
    pub fault: Fault,
    /// After so long.
    pub seconds: u64,
}

/// A node that does not reach the next one, and the cure.
pub fn next_node(what: &Next) -> (String, String) {
    let from = what.from.map(|(from, name)| match name {
        "" => format!(" from {from}"),
        name => format!(" from {from} ({name})"),
    });
    let why = match what.fault {
        Fault::Refused => "connection refused".to_string(),
        Fault::Silent => format!("no answer within {} s", what.seconds),
        Fault::NoRoute(number) | Fault::Other(number) => error(number),
        Fault::Stranger => "another program answers there".to_string(),
    };
    let message = format!(
        "{} cannot reach {} at {}{}: {why}; NCCL and gloo connect the nodes with each other on ports like this",
        what.node,
        what.next,
        socket(what.to.0, what.to.1),
        from.unwrap_or_default(),
    );
    let cure = format!(
        "let all ports through between {} and {} (at least net.ipv4.ip_local_port_range), or choose another network with iface=NAME",
        what.node, what.next
    );
    (message, cure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(count: usize) -> Vec<String> {
        (1..=count).map(|number| format!("n{number}")).collect()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_long_list_is_folded_with_a_count() {
        assert_eq!(names(&list(2)), "n1 n2");
        assert_eq!(names(&list(8)), "n1 n2 n3 n4 n5 n6 n7 n8");
        assert_eq!(names(&list(1000)), "n1 n2 n3 n4 n5 n6 n7 n8 and 992 more");
    }

    #[test]
    fn who_is_waited_for() {
        assert_eq!(
            waiting(&["node007".into(), "node009".into(), "node012".into()], &[], 16, false, 40),
            "palingenesis: waiting for 3 of 16 nodes: node007 node009 node012, 40 s"
        );
        assert_eq!(
            waiting(&[], &list(1), 4, false, 10),
            "palingenesis: waiting for all ranks of 1 of 4 nodes: n1, 10 s"
        );
        assert_eq!(
            waiting(&[], &list(2), 4, true, 20),
            "palingenesis: waiting for the answer of 2 of 4 nodes: n1 n2, 20 s"
        );
    }

    #[test]
    fn nodes_that_did_not_come_are_named_with_what_to_look_at() {
        let line = late(&["n3".into()], &[], 4, 5);
        for part in [
            "1 of 4 nodes did not come to the start within 5 s: n3",
            "srun -N1 -w n3 --palingenesis=show true",
            "sinfo -N -n n3",
            "timeout=",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        let line = late(&list(2), &["n9".into()], 16, 600);
        assert!(
            line.contains("n1 n2") && line.contains("came without all of their ranks") && line.contains("n9"),
            "{line}"
        );
        assert!(!late(&[], &[], 1, 1).is_empty());
    }

    fn interface(name: &str, address: &str, prefix: u8) -> Interface {
        Interface { name: name.into(), address: ip(address), prefix }
    }

    #[test]
    fn each_way_not_to_reach_rank_0_has_its_own_words() {
        let interfaces = [interface("eth0", "10.99.0.3", 24), interface("ib0", "172.16.0.3", 16)];
        let text = |fault, from: &str, to: &str, named| {
            let ways = [
                Way { to: (ip(to), 20312), from: Some(ip(from)), fault },
                Way { to: (ip(to), 22871), from: Some(ip(from)), fault },
            ];
            unreached(&Unreached {
                node: "n3",
                rank0: "n1",
                host: "n1",
                ways: &ways,
                interfaces: &interfaces,
                seconds: 30,
                named,
            })
        };
        let cases: [(Fault, &str, &str, &[&str]); 6] = [
            (Fault::Silent, "10.99.0.3", "10.99.0.1", &["no answer within 30 s", "firewall", "iface="]),
            (
                Fault::Silent,
                "10.99.0.3",
                "172.16.0.1",
                &["leave by eth0", "ib0 is in 172.16.0.1's network", "iface=ib0"],
            ),
            (
                Fault::Refused,
                "10.99.0.3",
                "10.99.0.1",
                &["connection refused", "to which n1 resolves on n3", "-w n1 --palingenesis=show true"],
            ),
            (Fault::NoRoute(101), "10.99.0.3", "10.99.0.1", &["network is unreachable", "ip route get 10.99.0.1"]),
            (Fault::NoRoute(113), "10.99.0.3", "10.99.0.1", &["no route to host"]),
            (Fault::Stranger, "10.99.0.3", "10.99.0.1", &["another program listens there", "/etc/hosts"]),
        ];
        for (fault, from, to, parts) in cases {
            let line = text(fault, from, to, None);
            let start = format!("n3 cannot reach rank 0's node n1 at {to}:20312 (nor at 22871) from {from} (eth0)");
            assert!(line.starts_with(&start), "{line}");
            for part in parts {
                assert!(line.contains(part), "{part}: {line}");
            }
        }
        assert!(text(Fault::Stranger, "10.99.0.3", "10.99.0.1", Some(29500)).contains("another port than 29500"));
        let unknown =
            Unreached { node: "n3", rank0: "n1", host: "n1", ways: &[], interfaces: &[], seconds: 1, named: None };
        assert!(unreached(&unknown).contains("no address for MASTER_ADDR=n1"));
    }

    /// Linux sends one "unreachable" a second at most (net.ipv4.icmp_ratelimit).
    #[test]
    fn one_answer_of_a_router_tells_more_than_silence() {
        let way = |port, from: Option<&str>, fault| Way { to: (ip("10.99.0.1"), port), from: from.map(ip), fault };
        let text = |ways: &[Way]| {
            unreached(&Unreached {
                node: "n3",
                rank0: "n1",
                host: "n1",
                ways,
                interfaces: &[],
                seconds: 30,
                named: None,
            })
        };
        let from = Some("10.99.0.3");
        let line = text(&[way(20312, from, Fault::Silent), way(22871, from, Fault::NoRoute(113))]);
        assert!(line.contains("10.99.0.1:22871 from 10.99.0.3: no route to host: no host has the address"), "{line}");
        assert!(line.contains("a firewall refuses") && !line.contains("22871, "), "{line}");
        let line = text(&[way(20312, None, Fault::NoRoute(101))]);
        assert!(line.contains("n3 has no way to 10.99.0.1, to which n1 resolves on n3; look at"), "{line}");
    }

    #[test]
    fn ipv6_stands_in_brackets() {
        let ways = [Way { to: (ip("fd00::1"), 20312), from: None, fault: Fault::Silent }];
        let what = Unreached {
            node: "n3",
            rank0: "n1",
            host: "fd00::1",
            ways: &ways,
            interfaces: &[],
            seconds: 30,
            named: None,
        };
        assert!(unreached(&what).starts_with("n3 cannot reach rank 0's node n1 at [fd00::1]:20312: no answer"));
    }

    #[test]
    fn ports() {
        assert_eq!(settled(&[20312], "n1", 22871), "port 20312 is taken on n1; MASTER_PORT is 22871");
        assert_eq!(settled(&[20312, 22871], "n1", 25430), "ports 20312, 22871 are taken on n1; MASTER_PORT is 25430");
        let holder = Holder { process: Some((4711, "python3".into())), user: Some(1001) };
        assert!(
            taken(29500, "n1", &holder).starts_with("MASTER_PORT=29500 is taken on n1 by python3 (process 4711), ")
        );
        let holder = Holder { process: None, user: Some(0) };
        assert!(taken(29500, "n1", &holder).contains("by a process of user 0"));
        assert!(no_port("n1", &[(20312, 98)]).contains("20312 (address already in use)"));
    }

    #[test]
    fn one_node_to_the_next() {
        let what = Next {
            node: "n2",
            next: "n3",
            to: (ip("10.99.0.3"), 41234),
            from: Some((ip("10.99.0.2"), "eth0")),
            fault: Fault::Refused,
            seconds: 10,
        };
        let (message, cure) = next_node(&what);
        assert!(
            message
                .starts_with("n2 cannot reach n3 at 10.99.0.3:41234 from 10.99.0.2 (eth0): connection refused; NCCL")
        );
        assert!(cure.contains("between n2 and n3"));
    }

    #[test]
    fn ranks_and_endpoints() {
        assert_eq!(rank_missing(&[1], "n1", None), "local rank 1 on n1 ended before the start");
        assert_eq!(
            rank_missing(&[1, 2], "n1", Some(3)),
            "local rank 1, 2 on n1 did not come to the start within 3 s (gate= in plugstack.conf)"
        );
        assert!(endpoint_hosts("other:29400", &[], 2).contains("nobody would host the store"));
        assert!(endpoint_hosts("x:1", &list(2), 4).contains("2 of 4 nodes have that address (n1 n2)"));
        assert!(untested("n7:29400", "10.99.0.1:20312").contains("not known"));
    }
}
