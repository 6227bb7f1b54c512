//! What the cards are: what their ports speak, of which model they are and which
//! functions are one physical card.

use crate::facts::RdmaPort;
use crate::facts::pci::PciAddress;
use crate::facts::rdma::LinkLayer;
use crate::facts::topology::{Nic, NicKind};

/// What a port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Link {
    InfiniBand,
    Ethernet,
    Efa,
    Slingshot,
    /// Nothing that NCCL or UCX speaks.
    Other,
}

impl Link {
    pub(super) fn name(self) -> &'static str {
        match self {
            Link::InfiniBand => "InfiniBand",
            Link::Ethernet => "Ethernet",
            Link::Efa => "EFA",
            Link::Slingshot => "Slingshot",
            Link::Other => "neither InfiniBand nor Ethernet",
        }
    }

    /// Whether NCCL and UCX reach it by RDMA verbs.
    pub(super) fn is_verbs(self) -> bool {
        matches!(self, Link::InfiniBand | Link::Ethernet)
    }

    pub(super) fn of(port: &RdmaPort) -> Link {
        match port.link {
            LinkLayer::InfiniBand => Link::InfiniBand,
            LinkLayer::Ethernet => Link::Ethernet,
            LinkLayer::Other if port.driver.as_deref() == Some("efa") => Link::Efa,
            LinkLayer::Other => Link::Other,
        }
    }
}

/// A port of a card, or a Slingshot card.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub(super) nic: usize,
    pub(super) port: Option<u8>,
    pub(super) link: Link,
    pub(super) active: bool,
    pub(super) gbps: Option<u32>,
}

/// Vendor and device of a card, of the physical one where it is virtual.
pub(super) type Model = (Option<u16>, Option<u16>);

/// The rate of a Slingshot 11 port, which /sys/class/cxi does not tell.
const SLINGSHOT_GBPS: u32 = 200;

/// The ports of a card, or the card itself.
pub(super) fn units(index: usize, nic: &Nic, ports: &[RdmaPort]) -> Vec<Unit> {
    if nic.kind == NicKind::Slingshot {
        let active = nic.may_be_up();
        return vec![Unit { nic: index, port: None, link: Link::Slingshot, active, gbps: Some(SLINGSHOT_GBPS) }];
    }
    let own = ports.iter().filter(|port| port.device == nic.name);
    let unit = |port: &RdmaPort| Unit {
        nic: index,
        port: Some(port.port),
        link: Link::of(port),
        active: port.active && port.link_up && port.readable,
        gbps: port.gbps,
    };
    own.map(unit).collect()
}

/// A virtual function has its physical one's, where that is here too.
pub(super) fn model(nic: &Nic, nics: &[Nic]) -> Model {
    let Some(place) = &nic.place else {
        return (None, None);
    };
    let physical = place
        .physical
        .and_then(|physical| nics.iter().filter_map(|nic| nic.place.as_ref()).find(|place| place.address == physical));
    let place = physical.unwrap_or(place);
    (place.vendor, place.device)
}

pub(super) fn address(nic: &Nic) -> Option<PciAddress> {
    nic.place.as_ref().map(|place| place.address)
}

/// The address of its card: a virtual function is of the physical one's.
pub(super) fn card_of(nic: &Nic) -> Option<PciAddress> {
    nic.place.as_ref().map(|place| place.physical.unwrap_or(place.address))
}
