//! The site file's lists of network cards: which may carry the training's
//! traffic, and which may not.

use crate::facts::PciAddress;

/// What names cards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicPattern {
    /// One function by its address.
    Address(PciAddress),
    /// RDMA devices or network devices by name; `*` stands for any characters,
    /// `?` for one, `[0-7]` for one of a range.
    Name(String),
}

/// The lists that hold for a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NicRules {
    /// Exactly these are used, where it is given.
    pub allow: Option<Vec<NicPattern>>,
    /// These are not used.
    pub deny: Vec<NicPattern>,
}

impl NicPattern {
    /// Whether it names a card, by any of its names.
    pub fn names<'a>(&self, address: Option<PciAddress>, names: impl IntoIterator<Item = &'a str>) -> bool {
        match self {
            NicPattern::Address(own) => address == Some(*own),
            NicPattern::Name(own) => names.into_iter().any(|name| name == own),
        }
    }
}
