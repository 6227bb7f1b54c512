//! The site file, /etc/palingenesis/palingenesis.toml: the admin's defaults for
//! the keys of SPEC, variables and profiles, by partition and node. What may
//! stand in it is parsed in `site/parse.rs`; here is what it says of one step.

mod parse;
mod pattern;
mod read;
mod text;

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use thiserror::Error;

use super::nics::{NicPattern, NicRules};
use super::{CheckLevel, LogLevel, Profile, Settings};
use crate::facts::User;
use pattern::Pattern;
pub use read::{Found, LARGEST, load, look};

/// Where the site file is unless plugstack.conf says otherwise.
pub const SITE_FILE: &str = "/etc/palingenesis/palingenesis.toml";

/// Names the site file of a step where it is not [`SITE_FILE`], for `palingenesis
/// explain` and the C library.
pub const FILE_OF_STEP: &str = "PALINGENESIS_SITE";

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
    /// Whether it stands in a section for some nodes, which others are meant to lack.
    pub of_node: bool,
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
    /// The file.
    pub file: String,
    /// Defaults for the keys of SPEC.
    pub settings: Settings,
    /// Variables, one per name: the most specific section's.
    pub env: Vec<SiteVariable>,
    /// Its profiles.
    pub profiles: BTreeMap<String, SiteProfile>,
    /// Which network cards may be used.
    pub nics: NicRules,
}

impl SiteView {
    /// The settings that hold: `settings`, and what the site file has for the
    /// keys that nobody gave.
    pub fn under(&self, settings: &Settings) -> Settings {
        let mut merged = settings.clone().over(&self.settings);
        if let Some(profile) = merged.site_profile.as_ref().and_then(|name| self.profiles.get(name)) {
            merged.profile = profile.base;
        }
        merged
    }
}

/// Why the site file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "site file {place}{why}; tell the cluster's admins, who can check it with palingenesis doctor --config {file}; \
     jobs without --palingenesis run"
)]
pub struct SiteError {
    /// The file.
    file: String,
    /// File and line.
    place: Place,
    /// What is wrong, in words that continue the place.
    why: String,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    file: String,
    line: Option<usize>,
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: ", self.file),
            None => write!(f, "{} ", self.file),
        }
    }
}

impl SiteError {
    /// About the file as a whole: "is a directory".
    pub fn of_file(file: &str, why: impl Into<String>) -> SiteError {
        SiteError { file: file.into(), place: Place { file: file.into(), line: None }, why: why.into() }
    }

    /// For a file that was named and so must exist.
    pub fn missing(file: &str) -> SiteError {
        SiteError::of_file(file, "does not exist")
    }

    fn at_line(file: &str, line: usize, why: impl Into<String>) -> SiteError {
        SiteError { file: file.into(), place: Place { file: file.into(), line: Some(line) }, why: why.into() }
    }

    /// Where and what, for whoever can correct it.
    pub fn finding(&self) -> String {
        format!("{}{}", self.place, self.why)
    }

    /// What is wrong, without the place.
    pub fn why(&self) -> &str {
        &self.why
    }
}

/// What one section says.
#[derive(Debug, Clone, Default)]
struct Section {
    settings: Settings,
    /// The words, which a more specific section may take back.
    words: BTreeMap<&'static str, bool>,
    env: Vec<SiteVariable>,
    /// Network cards; an empty list takes back a less specific section's.
    nic_allow: Option<Vec<NicPattern>>,
    /// See `nic_allow`.
    nic_deny: Option<Vec<NicPattern>>,
}

/// A section for some partitions or nodes.
#[derive(Debug, Clone)]
struct Selected {
    pattern: Pattern,
    section: Section,
}

/// A site file that is understood as a whole.
#[derive(Debug, Clone)]
pub struct Site {
    file: String,
    log: LogLevel,
    top: Section,
    /// In the file's order, as are `nodes`.
    partitions: Vec<Selected>,
    nodes: Vec<Selected>,
    profiles: BTreeMap<String, SiteProfile>,
    warnings: Vec<String>,
}

impl Site {
    /// Reads the file; `None` where there is none.
    ///
    /// # Errors
    /// What is wrong with it, the first thing only.
    pub fn read(file: &str) -> Result<Option<Site>, SiteError> {
        load(file)?.map(|text| Site::parse(file, &text)).transpose()
    }

    /// The file that plugstack.conf or a person names, which must exist, else
    /// the one at its usual place, which need not.
    ///
    /// # Errors
    /// As [`Site::read`].
    pub fn named_or_usual(named: Option<&str>) -> Result<Option<Site>, SiteError> {
        let site = Site::read(named.unwrap_or(SITE_FILE))?;
        match named {
            Some(file) if site.is_none() => Err(SiteError::missing(file)),
            _ => Ok(site),
        }
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// What the log of the node gets.
    pub fn log(&self) -> LogLevel {
        self.log
    }

    /// The names of its profiles.
    pub fn profile_names(&self) -> Vec<String> {
        self.profiles.keys().cloned().collect()
    }

    /// Values that are understood but hardly meant.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// What holds for a step of `user` in `partition` on `node`. A node's section
    /// stands above a partition's and that above the top, for each key, each
    /// variable and each list of cards as a whole; of two that fit the later one does.
    ///
    /// Where partition or node is not known yet, findings are as mild as in the
    /// mildest section that might fit: what is refused too early cannot be taken
    /// back.
    pub fn view(&self, partition: Option<&str>, node: Option<&str>, user: &User) -> SiteView {
        let fitting = |list: &'_ [Selected], name: Option<&str>| -> Vec<Section> {
            let fits = |selected: &&Selected| name.is_some_and(|name| selected.pattern.fits(name));
            list.iter().rev().filter(fits).map(|selected| selected.section.clone()).collect()
        };
        let mut sections = fitting(&self.nodes, node);
        for variable in sections.iter_mut().flat_map(|section| &mut section.env) {
            variable.of_node = true;
        }
        sections.extend(fitting(&self.partitions, partition));
        sections.push(self.top.clone());

        let mut view = SiteView { file: self.file.clone(), profiles: self.profiles.clone(), ..SiteView::default() };
        let mut words: BTreeMap<&str, bool> = BTreeMap::new();
        for section in &sections {
            view.settings = view.settings.over(&section.settings);
            for (word, value) in &section.words {
                words.entry(word).or_insert(*value);
            }
            for variable in &section.env {
                if !view.env.iter().any(|known| known.name == variable.name) {
                    view.env.push(variable.clone());
                }
            }
        }
        let list = |of: fn(&Section) -> &Option<Vec<NicPattern>>| {
            let list = sections.iter().find_map(|section| of(section).as_ref());
            list.filter(|list| !list.is_empty()).cloned()
        };
        view.nics.allow = list(|section| &section.nic_allow);
        view.nics.deny = list(|section| &section.nic_deny).unwrap_or_default();
        let on = |word| words.get(word).copied().unwrap_or(false);
        let settings = &mut view.settings;
        (settings.show, settings.debug, settings.deterministic) = (on("show"), on("debug"), on("deterministic"));
        let directories = [&mut settings.cache, &mut settings.local, &mut settings.output, &mut settings.rundir];
        for directory in directories.into_iter().flatten() {
            *directory = directory.replace("{user}", &user.part()).replace("{uid}", &user.uid.to_string());
        }
        let unknown = |list: &'_ [Selected], known: bool| if known { Vec::new() } else { list.to_vec() };
        for selected in
            unknown(&self.partitions, partition.is_some()).iter().chain(&unknown(&self.nodes, node.is_some()))
        {
            soften(settings, &selected.section.settings);
        }
        view
    }
}

/// Takes the milder of two levels for each check.
fn soften(settings: &mut Settings, other: &Settings) {
    let rank = |level| match level {
        CheckLevel::Off => 0,
        CheckLevel::Warn => 1,
        CheckLevel::Error => 2,
    };
    if other.is_given("checks") && rank(other.checks) < rank(settings.checks) {
        settings.set_checks(other.checks);
    }
    for (id, level) in &other.rules {
        let now = settings.rules.get(id).copied().unwrap_or(settings.checks);
        if rank(*level) < rank(now) {
            settings.rules.insert(id, *level);
        }
    }
}

#[cfg(test)]
mod tests;
