//! The node's network interfaces by getifaddrs(3).

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// One address of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name, as in `ip link`.
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
    /// Length of the network prefix in bits.
    pub prefix: u8,
}

impl Interface {
    /// Whether `other` is in this address's network.
    pub fn reaches(&self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix.min(32))).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix.min(128))).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            _ => false,
        }
    }
}

/// All addresses of all interfaces.
///
/// # Errors
/// What getifaddrs says.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs writes the head of a list that freeifaddrs below frees.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: getifaddrs built the list; each node is valid until freeifaddrs.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        // SAFETY: the two socket addresses are null or valid, as the list's owner says.
        let (address, mask) = unsafe { (ip(entry.ifa_addr), ip(entry.ifa_netmask)) };
        if let Some(address) = address {
            // SAFETY: ifa_name is a NUL-terminated string of the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            let prefix = match mask {
                Some(IpAddr::V4(mask)) => mask.to_bits().count_ones() as u8,
                Some(IpAddr::V6(mask)) => mask.to_bits().count_ones() as u8,
                None => {
                    if address.is_ipv4() {
                        32
                    } else {
                        128
                    }
                }
            };
            found.push(Interface { name: name.to_string_lossy().into_owned(), address, prefix });
        }
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// # Safety
/// `address` is null or points to a socket address of its family's size.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is a sockaddr_in.
            let address = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::V4(Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is a sockaddr_in6.
            let address = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_there() {
        let found = interfaces().unwrap();
        let lo = found.iter().find(|interface| interface.address == IpAddr::V4(Ipv4Addr::LOCALHOST));
        let lo = lo.expect("127.0.0.1 is configured");
        assert_eq!((lo.name.as_str(), lo.prefix), ("lo", 8));
    }

    #[test]
    fn an_address_reaches_its_network_only() {
        let at = |address: &str, prefix| Interface { name: "ib0".into(), address: address.parse().unwrap(), prefix };
        let table = [
            ("10.1.2.3", 16, "10.1.9.9", true),
            ("10.1.2.3", 16, "10.2.2.3", false),
            ("10.1.2.3", 32, "10.1.2.3", true),
            ("10.1.2.3", 0, "192.0.2.1", true),
            ("fd00::1", 64, "fd00::ffff", true),
            ("fd00::1", 64, "fd01::1", false),
            ("10.1.2.3", 8, "fd00::1", false),
        ];
        for (own, prefix, other, expected) in table {
            assert_eq!(at(own, prefix).reaches(other.parse().unwrap()), expected, "{own}/{prefix} {other}");
        }
    }
}
