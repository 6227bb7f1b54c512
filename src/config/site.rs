//! The site file, /etc/palingenesis/palingenesis.toml: the admin's defaults by
//! partition and node.

use std::collections::BTreeMap;

use super::{Profile, Settings};

/// Where the site file is unless plugstack.conf says otherwise.
pub const SITE_FILE: &str = "/etc/palingenesis/palingenesis.toml";

/// A variable that the site file sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteVariable {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Whether it stands above the user's own.
    pub force: bool,
    /// Where it stands, for reports: `/etc/…/palingenesis.toml:12`.
    pub place: String,
}

/// A profile that the site file defines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SiteProfile {
    /// The built-in one it builds on.
    pub base: Profile,
    /// Its words: debug, deterministic.
    pub debug: bool,
    /// See `debug`.
    pub deterministic: bool,
    /// Its variables; they stand above those of `base`.
    pub env: Vec<SiteVariable>,
}

/// What the site file says of one partition and node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SiteView {
    /// Defaults for the keys of SPEC.
    pub settings: Settings,
    /// Variables, one per name: the most specific section's.
    pub env: Vec<SiteVariable>,
    /// Its profiles.
    pub profiles: BTreeMap<String, SiteProfile>,
}
