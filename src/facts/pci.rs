//! Where a device sits in the PCI tree: its address and the bridges above it.
//! Names and numbers of devices say nothing about that (`mlx5_7` may be the one
//! next to GPU 0); the address does.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::CpuSet;

/// A PCI function's address, `dddd:bb:dd.f`. Ordered as `lspci` lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// The domain: four digits usually, up to eight on Hyper-V and behind VMD.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device, below 32.
    pub device: u8,
    /// The function, below 8.
    pub function: u8,
}

impl PciAddress {
    /// Reads `dddd:bb:dd.f`, hexadecimal, in either case.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
            let fits = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let address = PciAddress {
            domain: hex(domain, 4..=8)?,
            bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
            device: u8::try_from(hex(device, 2..=2)?).ok()?,
            function: u8::try_from(hex(function, 1..=1)?).ok()?,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    }

    /// Whether both are functions of one card.
    pub fn same_card(self, other: PciAddress) -> bool {
        PciAddress { function: 0, ..self } == PciAddress { function: 0, ..other }
    }
}

/// As sysfs writes it: lower case, four digits of the domain at least.
impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<PciAddress, String> {
        PciAddress::parse(&text).ok_or_else(|| format!("'{}' is no PCI address", crate::config::printable(&text)))
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// A device's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its own address.
    pub address: PciAddress,
    /// The host bridge as sysfs names it, `pci0000:15`; `None` where the tree has
    /// none (the path is not known).
    pub host_bridge: Option<String>,
    /// The bridges and switch ports between the host bridge and the device, from
    /// the top. Empty where the device hangs directly at the host bridge.
    pub bridges: Vec<PciAddress>,
    /// The NUMA node the kernel names; `None` where it says -1, which is
    /// "unknown" and never 0.
    pub numa: Option<u32>,
    /// `local_cpulist`; empty where it is not known.
    pub cpus: CpuSet,
    /// PCI vendor (0x15b3: Mellanox, 0x10de: NVIDIA, 0x1002: AMD, 0x1d0f: Amazon).
    pub vendor: Option<u16>,
    /// PCI device id.
    pub device: Option<u16>,
    /// The physical function, where this one is virtual and it can be seen here.
    pub physical: Option<PciAddress>,
}

impl Place {
    /// An address, and nothing else known.
    pub fn of(address: PciAddress) -> Place {
        Place {
            address,
            host_bridge: None,
            bridges: Vec::new(),
            numa: None,
            cpus: CpuSet::EMPTY,
            vendor: None,
            device: None,
            physical: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_sysfs_nvml_and_hyper_v_write_them() {
        for (text, expected) in [
            ("0000:1b:00.0", "0000:1b:00.0"),
            ("0008:01:00.0", "0008:01:00.0"),
            ("C941:00:02.0", "c941:00:02.0"),
            ("00000008:01:00.0", "0008:01:00.0"),
            ("10000:e0:06.0", "10000:e0:06.0"),
        ] {
            assert_eq!(PciAddress::parse(text).map(|address| address.to_string()).as_deref(), Some(expected));
        }
        for bad in ["", "1b:00.0", "000:1b:00.0", "0000:1b:20.0", "0000:1b:00.8", "0000:1b:00", "+000:1b:00.0", "é"] {
            assert_eq!(PciAddress::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn functions_of_one_card() {
        let address = |text| PciAddress::parse(text).unwrap();
        assert!(address("0000:0c:00.0").same_card(address("0000:0c:00.1")));
        assert!(!address("0000:10:1b.0").same_card(address("0000:10:1c.0")));
        assert!(address("0001:00:00.0") < address("0001:00:00.1") && address("0000:ff:1f.7") < address("0001:00:00.0"));
    }
}
