//! Names, addresses and ports as this node sees them. Every look-up has a
//! deadline; nothing is chosen here.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use super::files;
use crate::system::{child, resolver};

pub use crate::system::interfaces::{Interface, interfaces};

/// What looking a host name up on this node gave.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Resolution {
    /// Not looked up: the plan is for another machine.
    #[default]
    NotTried,
    /// Its addresses, in the resolver's order.
    Found(Vec<IpAddr>),
    /// The resolver's reason why there is none.
    Failed(String),
    /// Why the resolver gave no answer. The name may be right: a dead first name
    /// server alone costs 5 s (resolv.conf(5), timeout).
    Silent(String),
}

/// Looks `host` up in a child process that is killed at the deadline, because
/// getaddrinfo(3) itself knows none and may wait for minutes.
pub fn resolve(host: &str, deadline: Duration) -> Resolution {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Resolution::Found(vec![address]);
    }
    match child::run(deadline, || resolver::lookup(host)) {
        Ok(answer) => decode(&answer),
        Err(error) => Resolution::Silent(error.to_string()),
    }
}

/// How long a name may take to resolve: longer than glibc's patience with a dead
/// name server or two, shorter than the ranks' patience with each other.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What this node's network says to a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Network {
    /// The addresses of all names together; a failure only when none resolves.
    pub resolution: Resolution,
    /// The node's interfaces, if they were asked for.
    pub interfaces: Vec<Interface>,
}

/// Whether the plan needs the node's interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interfaces {
    /// It does without.
    Unneeded,
    /// It is better for them.
    Useful,
    /// It cannot be made without (`iface=`).
    Needed,
}

impl Interfaces {
    /// By the number of the step's nodes, and whether `iface=` names one.
    pub fn wanted(nodes: u32, named: bool) -> Interfaces {
        match (named, nodes) {
            (true, _) => Interfaces::Needed,
            (false, 1) => Interfaces::Unneeded,
            _ => Interfaces::Useful,
        }
    }
}

impl Network {
    /// Looks up `names` (see `plan::rendezvous::wanted`) and lists the interfaces.
    ///
    /// # Errors
    /// What getifaddrs says, where they are needed.
    pub fn of_this_node(names: &[String], wanted: Interfaces) -> io::Result<Network> {
        let interfaces = match wanted {
            Interfaces::Unneeded => Vec::new(),
            Interfaces::Useful => interfaces().unwrap_or_default(),
            Interfaces::Needed => interfaces()?,
        };
        Ok(Network { resolution: resolve_all(names), interfaces })
    }
}

fn resolve_all(names: &[String]) -> Resolution {
    let mut found: Vec<IpAddr> = Vec::new();
    let mut outcome = Resolution::NotTried;
    for name in names {
        match resolve(name, PATIENCE) {
            Resolution::Found(addresses) => found.extend(addresses),
            other => outcome = other,
        }
    }
    if found.is_empty() { outcome } else { Resolution::Found(found) }
}

fn decode(answer: &[u8]) -> Resolution {
    let text = String::from_utf8_lossy(answer);
    if let Some(reason) = text.strip_prefix('!') {
        return Resolution::Failed(reason.to_string());
    }
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in text.split_whitespace().filter_map(|word| word.parse().ok()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() { Resolution::Failed("no address".into()) } else { Resolution::Found(addresses) }
}

/// `net.ipv4.ip_local_port_range`: ports the kernel gives to outgoing
/// connections, so that a listener there may find its port taken.
///
/// # Errors
/// One line when the file is there but cannot be read or understood.
pub fn ephemeral_ports(root: &Path) -> Result<Option<(u16, u16)>, String> {
    let file = root.join("proc/sys/net/ipv4/ip_local_port_range");
    let text = match files::regular(&file, 4096) {
        Ok(Some(text)) => String::from_utf8_lossy(&text).into_owned(),
        Ok(None) => return Ok(None),
        Err(error) => return Err(format!("ephemeral port range unknown: {}: {error}", file.display())),
    };
    let mut numbers = text.split_whitespace().map(str::parse::<u16>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(low)), Some(Ok(high))) => Ok(Some((low, high))),
        _ => Err(format!("ephemeral port range unknown: {} holds no two numbers", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_numeric_address_needs_no_look_up() {
        let expected = Resolution::Found(vec!["192.0.2.7".parse().unwrap()]);
        assert_eq!(resolve("192.0.2.7", Duration::ZERO), expected);
    }

    #[test]
    fn localhost_resolves_and_an_impossible_name_says_why() {
        let Resolution::Found(addresses) = resolve("localhost", Duration::from_secs(10)) else {
            panic!("localhost does not resolve here");
        };
        assert!(addresses.iter().all(IpAddr::is_loopback));
        let Resolution::Failed(why) = resolve("no-such-host.invalid", Duration::from_secs(30)) else {
            panic!("a name under .invalid resolved");
        };
        assert!(!why.is_empty());
    }

    #[test]
    fn the_resolver_s_answers() {
        assert_eq!(decode(b"!Name or service not known"), Resolution::Failed("Name or service not known".into()));
        assert_eq!(decode(b""), Resolution::Failed("no address".into()));
        let expected = Resolution::Found(vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()]);
        assert_eq!(decode(b"10.0.0.1 10.0.0.1 fd00::1"), expected);
    }
}
