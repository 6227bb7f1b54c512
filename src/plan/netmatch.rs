//! NCCL's lists of network interfaces and RDMA devices, `[^][=]name[:port],…`,
//! matched as NCCL matches them (src/misc/socket.cc, parseStringList and
//! matchIfList of src/misc/utils.cc): names are prefixes unless the list begins
//! with `=`, and `^` turns the whole list around.

/// A port as written behind a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    /// None: every port.
    Any,
    /// A number.
    Number(u32),
    /// Something else. NCCL's `atoi` makes 0, a part of it, or for a huge number
    /// even "every port" of it; here it matches nothing.
    Odd(String),
}

/// One entry of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The name, or the beginning of one.
    pub name: String,
    /// The port.
    pub port: Port,
}

/// A list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// Whether what matches is left out.
    pub excludes: bool,
    /// Whether names must be whole.
    pub exact: bool,
    /// Its entries.
    pub items: Vec<Item>,
}

/// Whether `^` and whether `=` stands in front of a list, and the list behind.
pub fn signs(value: &str) -> (bool, bool, &str) {
    let (excludes, rest) = value.strip_prefix('^').map_or((false, value), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    (excludes, exact, rest)
}

impl List {
    /// Parses a value.
    pub fn parse(value: &str) -> List {
        let (excludes, exact, rest) = signs(value);
        // An entry without a name is none.
        let items = rest.split(',').filter_map(|item| {
            let (name, port) = item.split_once(':').map_or((item, None), |(name, port)| (name, Some(port)));
            (!name.is_empty()).then(|| Item { name: name.into(), port: port.map_or(Port::Any, parse_port) })
        });
        List { excludes, exact, items: items.collect() }
    }

    /// Whether an entry names this device, all its ports or one of them.
    pub fn names(&self, item: &Item, device: &str, port: Option<u32>) -> bool {
        let by_name = if self.exact { device == item.name } else { device.starts_with(&item.name) };
        by_name
            && match (&item.port, port) {
                (Port::Any, _) | (Port::Number(_), None) => true,
                (Port::Number(number), Some(port)) => *number == port,
                (Port::Odd(_), _) => false,
            }
    }

    /// Whether the list selects this device or port. A list without entries
    /// names every one.
    pub fn selects(&self, device: &str, port: Option<u32>) -> bool {
        let named = self.items.is_empty() || self.items.iter().any(|item| self.names(item, device, port));
        named != self.excludes
    }
}

/// `port[:rail[:plane]]`; rail and plane, of NCCL 2.30, are not looked at.
fn parse_port(text: &str) -> Port {
    let mut parts = text.split(':');
    let port = parts.next().unwrap_or_default();
    let number = |text: &str| !text.is_empty() && text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    let fine = number(port) && (port == "0" || !port.starts_with('0')) && parts.all(number);
    match port.parse() {
        Ok(number) if fine => Port::Number(number),
        _ => Port::Odd(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected<'a>(value: &str, devices: &[&'a str]) -> Vec<&'a str> {
        let list = List::parse(value);
        devices.iter().copied().filter(|device| list.selects(device, None)).collect()
    }

    /// <https://github.com/NVIDIA/nccl/issues/177>: the devices of the report.
    #[test]
    fn interfaces_by_prefix_and_exactly_taken_and_left_out() {
        let devices = ["lo", "bond0", "bond0.2973", "bond0.2973.1", "eth0", "eth10"];
        for (value, expected) in [
            ("bond0", &["bond0", "bond0.2973", "bond0.2973.1"][..]),
            ("=bond0", &["bond0"]),
            ("^bond0", &["lo", "eth0", "eth10"]),
            ("^=bond0", &["lo", "bond0.2973", "bond0.2973.1", "eth0", "eth10"]),
            ("eth,lo", &["lo", "eth0", "eth10"]),
            ("=eth0,bond0", &["bond0", "eth0"]),
            ("^lo,eth", &["bond0", "bond0.2973", "bond0.2973.1"]),
            // Signs count once, at the list's beginning.
            ("^lo,^eth0", &["bond0", "bond0.2973", "bond0.2973.1", "eth0", "eth10"]),
            ("=eth0,=bond0", &["eth0"]),
            ("=^eth0", &[]),
            // White space belongs to the name.
            ("bond0, eth0", &["bond0", "bond0.2973", "bond0.2973.1"]),
            (",,eth0,", &["eth0"]),
            ("eth2", &[]),
            // No entries: every one, and with ^ none.
            ("=", &devices),
            ("^", &[]),
        ] {
            assert_eq!(selected(value, &devices), expected, "{value}");
        }
    }

    #[test]
    fn rdma_devices_with_ports() {
        let list = List::parse("=mlx5_1:1,mlx5_2");
        assert!(list.selects("mlx5_1", Some(1)) && !list.selects("mlx5_1", Some(2)));
        assert!(list.selects("mlx5_2", Some(2)) && !list.selects("mlx5_10", Some(1)));
        let list = List::parse("^mlx5_1:2");
        assert!(list.selects("mlx5_1", Some(1)) && !list.selects("mlx5_10", Some(2)));
        // Rail and plane of NCCL 2.30 do not change what is selected.
        assert!(List::parse("mlx5_0:1:3:0").selects("mlx5_0", Some(1)));
    }

    /// <https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>:
    /// no odd text and no huge number stands for every port.
    #[test]
    fn a_port_that_is_none_matches_nothing() {
        for text in ["08", "+8", " 8", "8abc", "", ":2", "18446744073709551615", "-1", "8:x"] {
            let list = List::parse(&format!("=devP:{text}"));
            assert_eq!(list.items[0].port, Port::Odd(text.into()));
            assert!((0..300).all(|port| !list.selects("devP", Some(port))), "{text}");
        }
    }
}
