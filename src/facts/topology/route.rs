//! The network device of the default route.

use std::path::Path;

use crate::facts::files;

/// Long enough for the tables of any node of a cluster.
const LONGEST: u64 = 1 << 20;

/// RTF_UP and RTF_REJECT of route.h.
const UP: u32 = 0x1;
const REJECT: u32 = 0x200;

/// IPv4's, by the lowest metric; without one IPv6's.
pub(super) fn default_route(root: &Path) -> Option<String> {
    let of = |file: &str, read: fn(&str) -> Option<String>| {
        let text = files::regular(&root.join("proc/net").join(file), LONGEST).ok()??;
        read(&String::from_utf8_lossy(&text))
    };
    of("route", ipv4).or_else(|| of("ipv6_route", ipv6))
}

fn ipv4(table: &str) -> Option<String> {
    let route = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [device, "00000000", _, flags, _, _, metric, "00000000", ..] = columns[..] else {
            return None;
        };
        goes(flags)?;
        Some((metric.parse::<u32>().ok()?, device.to_string()))
    };
    nearest(table, route)
}

fn ipv6(table: &str) -> Option<String> {
    let route = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [destination, "00", _, _, _, metric, _, _, flags, device] = columns[..] else {
            return None;
        };
        goes(flags)?;
        let default = destination.bytes().all(|byte| byte == b'0') && device != "lo";
        default.then_some((u32::from_str_radix(metric, 16).ok()?, device.to_string()))
    };
    nearest(table, route)
}

fn goes(flags: &str) -> Option<()> {
    let flags = u32::from_str_radix(flags, 16).ok()?;
    (flags & UP != 0 && flags & REJECT == 0).then_some(())
}

/// The first of those with the lowest metric.
fn nearest(table: &str, route: impl Fn(&str) -> Option<(u32, String)>) -> Option<String> {
    table.lines().filter_map(route).min_by_key(|(metric, _)| *metric).map(|(_, device)| device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_route_with_the_lowest_metric() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let far = "ib0\t00000000\t0100000A\t0003\t0\t0\t500\t00000000\t0\t0\t0\n";
        let near = "eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n";
        let half = "vpn0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000080\t0\t0\t0\n";
        let unreachable = "*\t00000000\t00000000\t0200\t0\t0\t0\t00000000\t0\t0\t0\n";
        let net = "eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let table = [head, far, near, half, unreachable, net].concat();
        assert_eq!(ipv4(&table).as_deref(), Some("eth0"));
        assert_eq!(ipv4(&[head, net].concat()), None);
        assert_eq!(ipv4("garbage\n\u{0}"), None);
    }

    #[test]
    fn and_ipv6_s() {
        let zero = "0".repeat(32);
        let line = |prefix: &str, metric: &str, flags: &str, device: &str| {
            format!(
                "{zero} {prefix} {zero} 00 fe800000000000000000000000000001 {metric} 00000002 00000000 {flags} {device:>8}\n"
            )
        };
        let table = [
            line("00", "ffffffff", "00200200", "lo"),
            line("00", "00000400", "00450003", "eth0"),
            line("00", "00000064", "00450003", "bond0"),
            line("40", "00000001", "00450003", "eth2"),
        ]
        .concat();
        assert_eq!(ipv6(&table).as_deref(), Some("bond0"));
        assert_eq!(ipv6(&line("00", "ffffffff", "00200200", "lo")), None);
    }
}
