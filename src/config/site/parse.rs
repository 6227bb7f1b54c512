//! The site file's grammar: TOML, with the keys and words of SPEC at the top and
//! in sections by partition and node. Strict: what is not known is an error with
//! its line, since a default that is passed over is noticed by nobody.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::pattern::Pattern;
use super::{Section, Selected, Site, SiteError, SiteProfile, SiteVariable};
use crate::config::nics::NicPattern;
use crate::config::spec::{check_profile_name, escape};
use crate::config::{KEYS, LogLevel, Profile, Settings, Source, SpecError, nearest, printable};
use crate::facts::hostlist::MAX_NAMES;
use crate::plan::catalog::{self, Fault, Kind, Reader};
use crate::plan::checks;

/// Words of SPEC that can be defaults.
pub const SITE_WORDS: [&str; 3] = ["show", "debug", "deterministic"];
/// Lists of network cards, in every section; no keys of SPEC.
pub const LISTS: [&str; 2] = ["nic-allow", "nic-deny"];
/// Tables in every section.
pub const TABLES: [&str; 3] = ["rules", "env", "force"];
/// What stands at the top only.
pub const TOP_ONLY: [&str; 4] = ["log", "profiles", "partition", "node"];

/// The most texts of a list of cards.
const MOST_CARDS: usize = 256;

/// Variables that tell a rank or an agent its place, besides those the catalog
/// knows as such; others of torchrun, as PET_MAX_RESTARTS, are anybody's.
const FACTS: [&str; 20] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_LOCAL_ADDR",
    "PET_STANDALONE",
];
/// Which GPUs a job has.
const GPUS: [&str; 5] = [
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
];
/// Load code into every program.
const LOADER: [&str; 3] = ["LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH"];
/// Who the user is and where.
const PERSON: [&str; 6] = ["HOME", "USER", "LOGNAME", "SHELL", "PWD", "UID"];

type Table<'a> = DeTable<'a>;
type Value<'a> = Spanned<DeValue<'a>>;

/// An entry of a table, in the file's order.
struct Entry<'t, 'a> {
    name: &'t str,
    at: Range<usize>,
    value: &'t Value<'a>,
}

fn entries<'t, 'a>(table: &'t Table<'a>) -> Vec<Entry<'t, 'a>> {
    let entries = table.iter().map(|(key, value)| Entry { name: key.get_ref(), at: key.span(), value });
    let mut entries: Vec<_> = entries.collect();
    entries.sort_by_key(|entry| entry.at.start);
    entries
}

/// Reads one file.
struct Parser<'a> {
    file: &'a str,
    text: &'a str,
    profiles: Vec<String>,
    warnings: Vec<String>,
    /// Names that the patterns so far stand for.
    names: usize,
}

impl Site {
    /// Reads the text of `file`.
    ///
    /// # Errors
    /// The first thing that is not understood.
    pub fn parse(file: &str, text: &str) -> Result<Site, SiteError> {
        let parser = Parser { file, text, profiles: Vec::new(), warnings: Vec::new(), names: 0 };
        let document = DeTable::parse(text).map_err(|error| {
            let why = format!("not TOML: {}", printable(error.message()));
            parser.error(&error.span().unwrap_or(0..0), why)
        })?;
        parser.site(document.get_ref())
    }
}

impl Parser<'_> {
    fn line(&self, at: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..at.start.min(self.text.len())).unwrap_or_default();
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }

    fn place(&self, at: &Range<usize>) -> String {
        format!("{}:{}", self.file, self.line(at))
    }

    fn error(&self, at: &Range<usize>, why: impl Into<String>) -> SiteError {
        SiteError::at_line(self.file, self.line(at), why)
    }

    fn wrong_type(&self, entry: &Entry, expected: &str) -> SiteError {
        let found = match entry.value.get_ref() {
            DeValue::String(_) => "text",
            DeValue::Integer(_) => "a number",
            DeValue::Float(_) => "a number with a point",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a section",
        };
        self.error(&entry.at, format!("{} is {found}, but must be {expected}", printable(entry.name)))
    }

    fn string<'t>(&self, entry: &'t Entry, expected: &str) -> Result<&'t str, SiteError> {
        entry.value.get_ref().as_str().ok_or_else(|| self.wrong_type(entry, expected))
    }

    fn table<'t, 'a>(&self, entry: &Entry<'t, 'a>) -> Result<&'t Table<'a>, SiteError> {
        entry.value.get_ref().as_table().ok_or_else(|| self.wrong_type(entry, "a section"))
    }

    fn site(mut self, document: &Table) -> Result<Site, SiteError> {
        let all = entries(document);
        // First, since their names are values of `profile`.
        let mut profiles = BTreeMap::new();
        for entry in all.iter().filter(|entry| entry.name == "profiles") {
            for profile in entries(self.table(entry)?) {
                check_profile_name(profile.name).map_err(|why| {
                    self.error(
                        &profile.at,
                        format!("profile '{}' cannot have that name: {why}", printable(profile.name)),
                    )
                })?;
                profiles.insert(profile.name.to_string(), self.profile(&profile)?);
            }
        }
        self.profiles = profiles.keys().cloned().collect();
        let mut log = LogLevel::default();
        let (mut partitions, mut nodes) = (Vec::new(), Vec::new());
        let mut rest = Vec::new();
        for entry in all {
            match entry.name {
                "profiles" => {}
                "log" => {
                    let word = self.string(&entry, "one of off, error, info, debug")?;
                    log = LogLevel::named(word).ok_or_else(|| {
                        let known = LogLevel::ALL.iter().map(|(name, _)| *name);
                        let why = format!(
                            "bad value '{}' for log{}; write off, error, info or debug",
                            printable(word),
                            meant(word, known)
                        );
                        self.error(&entry.at, why)
                    })?;
                }
                "partition" => partitions = self.selected(&entry)?,
                "node" => nodes = self.selected(&entry)?,
                _ => rest.push(entry),
            }
        }
        let top = self.section(rest, true)?;
        let file = self.file.to_string();
        Ok(Site { file, log, top, partitions, nodes, profiles, warnings: self.warnings })
    }

    /// `[partition.NAME]` or `[node.NAME]`.
    fn selected(&mut self, entry: &Entry) -> Result<Vec<Selected>, SiteError> {
        let mut list = Vec::new();
        for named in entries(self.table(entry)?) {
            let known = KEYS.iter().map(|key| key.name).chain(SITE_WORDS).chain(LISTS).chain(TABLES);
            if named.value.get_ref().as_table().is_none() || TABLES.contains(&named.name) {
                let mut why = format!("{} stands in no section of a {}", printable(named.name), entry.name);
                if known.into_iter().any(|known| known == named.name) {
                    why.push_str(&format!(": write it below [{}.NAME]", entry.name));
                }
                return Err(self.error(&named.at, why));
            }
            let pattern = Pattern::parse(named.name)
                .map_err(|why| self.error(&named.at, format!("bad {} pattern: {why}", entry.name)))?;
            self.names += pattern.len();
            if self.names > MAX_NAMES {
                let why = format!(
                    "the file's patterns stand for more than {MAX_NAMES} names by now: write * for a range that holds all"
                );
                return Err(self.error(&named.at, why));
            }
            let section = self.section(entries(self.table(&named)?), false)?;
            list.push(Selected { pattern, section });
        }
        Ok(list)
    }

    fn section(&mut self, list: Vec<Entry>, top: bool) -> Result<Section, SiteError> {
        let mut section = Section::default();
        for entry in &list {
            match entry.name {
                "rules" => self.rules(&mut section.settings, entry)?,
                "env" => self.variables(&mut section.env, entry, false)?,
                "force" => self.variables(&mut section.env, entry, true)?,
                "nic-allow" => section.nic_allow = Some(self.cards(entry)?),
                "nic-deny" => section.nic_deny = Some(self.cards(entry)?),
                name => match SITE_WORDS.into_iter().find(|word| *word == name) {
                    Some(word) => {
                        section.words.insert(word, self.switch(entry)?);
                    }
                    None => self.key(&mut section.settings, entry, top)?,
                },
            }
        }
        // Which of the two is one too many only people can say: the later one is named.
        if let Err(error) = section.settings.check_combination() {
            let mut keys = list.iter().filter(|entry| section.settings.is_given(entry.name));
            let rivals = ["port", "ports", "master", "suffix", "iface"];
            let last = keys.rfind(|entry| rivals.contains(&entry.name));
            return Err(self.error(&last.map_or(0..0, |entry| entry.at.clone()), error.to_string()));
        }
        Ok(section)
    }

    fn switch(&self, entry: &Entry) -> Result<bool, SiteError> {
        entry.value.get_ref().as_bool().ok_or_else(|| self.wrong_type(entry, "true or false, without quotes"))
    }

    /// `nic-allow = ["mlx5_[0-7]", "0000:18:00.0"]`.
    fn cards(&self, entry: &Entry) -> Result<Vec<NicPattern>, SiteError> {
        let expected = "a list of texts: [\"mlx5_0\", \"0000:18:00.0\"]";
        let DeValue::Array(list) = entry.value.get_ref() else {
            return Err(self.wrong_type(entry, expected));
        };
        if list.len() > MOST_CARDS {
            let why = format!("{} holds {} texts; {MOST_CARDS} are the most", entry.name, list.len());
            return Err(self.error(&entry.at, format!("{why}: write * or [0-7] for what is alike")));
        }
        let card = |value: &Value| {
            // A list may go over many lines: each text has its own.
            let text = value.get_ref().as_str().ok_or_else(|| {
                self.error(&value.span(), format!("{} holds what is no text, but must be {expected}", entry.name))
            })?;
            NicPattern::parse(text)
                .map_err(|why| self.error(&value.span(), format!("'{}' in {} {why}", printable(text), entry.name)))
        };
        list.iter().map(card).collect()
    }

    /// `key = "value"`.
    fn key(&self, settings: &mut Settings, entry: &Entry, top: bool) -> Result<(), SiteError> {
        let Some(key) = KEYS.iter().find(|key| key.name == entry.name) else {
            return Err(self.unknown(entry, top));
        };
        let expected = format!("text: \"{}\"", key.value);
        let value = match entry.value.get_ref() {
            DeValue::Integer(number) if key.name == "port" && number.radix() == 10 => number.as_str(),
            _ => self.string(entry, &expected)?,
        };
        let value = if matches!(key.name, "cache" | "local" | "output" | "warm" | "rundir") {
            if key.name != "warm" {
                self.placeholders(entry, value)?;
            }
            // As SPEC has it.
            escape(value)
        } else {
            value.to_string()
        };
        settings.set(key.name, &value, &Source::Site(self.place(&entry.at)), &self.profiles).map_err(|error| {
            let why = match error {
                SpecError::BadValue { key, value, why, expected, .. } => {
                    format!("bad value '{value}' for {key}: {why}; write {key} = \"{expected}\"")
                }
                other => other.to_string(),
            };
            self.error(&entry.at, why)
        })
    }

    fn placeholders(&self, entry: &Entry, value: &str) -> Result<(), SiteError> {
        let rest = value.replace("{user}", "").replace("{uid}", "");
        if rest.contains(['{', '}']) {
            let why = format!(
                "bad value '{}' for {}: only {{user}} and {{uid}} stand for something",
                printable(value),
                entry.name
            );
            return Err(self.error(&entry.at, why));
        }
        Ok(())
    }

    fn unknown(&self, entry: &Entry, top: bool) -> SiteError {
        let name = entry.name;
        if checks::ids().any(|id| id == name) {
            return self.error(&entry.at, format!("{name} is a check: write it below [rules]"));
        }
        if matches!(name, "off" | "on" | "help") {
            return self.error(&entry.at, format!("{name} is a word for a command line, no default"));
        }
        if !top && TOP_ONLY.contains(&name) {
            return self.error(&entry.at, format!("{name} stands at the top of the file only"));
        }
        let known = KEYS.iter().map(|key| key.name).chain(SITE_WORDS).chain(LISTS).chain(TABLES);
        let known: Vec<&str> = if top { known.chain(TOP_ONLY).collect() } else { known.collect() };
        let what = if entry.value.get_ref().is_table() { "section" } else { "key" };
        let mut why = format!("unknown {what} '{}'{}", printable(name), meant(name, known.iter().copied()));
        if nearest(name, known).is_none() && catalog::entry(name).is_some() {
            why.push_str(": a variable stands below [env] or [force]");
        }
        self.error(&entry.at, why)
    }

    fn rules(&self, settings: &mut Settings, entry: &Entry) -> Result<(), SiteError> {
        for rule in entries(self.table(entry)?) {
            if !checks::ids().any(|id| id == rule.name) {
                let why = format!("unknown check '{}'{}", printable(rule.name), meant(rule.name, checks::ids()));
                return Err(self.error(&rule.at, why));
            }
            let level = self.string(&rule, "text: \"off|warn|error\"")?;
            settings.set(rule.name, level, &Source::Site(self.place(&rule.at)), &[]).map_err(|error| {
                let why = match error {
                    SpecError::BadValue { value, .. } => {
                        format!("bad value '{value}' for {}; write off, warn or error", rule.name)
                    }
                    other => other.to_string(),
                };
                self.error(&rule.at, why)
            })?;
        }
        Ok(())
    }

    fn variables(&mut self, list: &mut Vec<SiteVariable>, entry: &Entry, force: bool) -> Result<(), SiteError> {
        for variable in entries(self.table(entry)?) {
            let name = variable.name;
            check_name(name).map_err(|why| self.error(&variable.at, format!("{} {why}", printable(name))))?;
            let value = match variable.value.get_ref() {
                DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
                DeValue::Boolean(value) => {
                    let why = format!(
                        "{name} is {value}, but a variable's value is text: write \"{value}\", \"1\" or \"0\", whichever its reader takes"
                    );
                    return Err(self.error(&variable.at, why));
                }
                _ => self.string(&variable, "text in quotes")?,
            };
            if value.chars().any(char::is_control) {
                return Err(
                    self.error(&variable.at, format!("the value of {name} holds a line break or a control character"))
                );
            }
            if list.iter().any(|known| known.name == name) {
                return Err(
                    self.error(&variable.at, format!("{name} stands below [env] and below [force]; one of them"))
                );
            }
            self.judge(&variable, value);
            let place = self.place(&variable.at);
            list.push(SiteVariable { name: name.into(), value: value.into(), force, place, of_node: false });
        }
        Ok(())
    }

    /// What the catalog knows against a value. A warning: the catalog may be older
    /// than the library that reads it.
    fn judge(&mut self, variable: &Entry, value: &str) {
        let name = variable.name;
        let Some(known) = catalog::entry(name) else {
            return;
        };
        let found = match known.grammar.fault(value) {
            None => return,
            Some(Fault::WordForInteger) => "a word where its reader takes an integer, and 0 for any word".to_string(),
            Some(Fault::Octal(number)) => format!("an octal number because of the leading 0: {number}"),
            Some(Fault::Trailing(number)) => format!("read as {number}, what follows is passed over"),
            Some(Fault::OutOfRange(number)) => format!("{number} is outside the range"),
            Some(Fault::Overflow) => "too large: its reader takes the default".to_string(),
            Some(Fault::NoSuchWord(Some(near))) => format!("none of its words (did you mean '{near}'?)"),
            Some(Fault::NoSuchWord(None)) => "none of its words".to_string(),
            Some(Fault::Throws) => "its reader ends the program at that".to_string(),
        };
        let takes = known.grammar.describe();
        let text = format!("{}: {name}={}: {found}; it takes {takes}", self.place(&variable.at), printable(value));
        self.warnings.push(text);
    }

    fn profile(&mut self, entry: &Entry) -> Result<SiteProfile, SiteError> {
        let mut profile = SiteProfile::default();
        for part in entries(self.table(entry)?) {
            match part.name {
                "base" => {
                    let word = self.string(&part, "text: the name of a built-in profile")?;
                    let known = || Profile::ALL.iter().map(|(name, _)| *name);
                    profile.base = Profile::named(word).ok_or_else(|| {
                        let all: Vec<&str> = known().collect();
                        let why = format!(
                            "no built-in profile '{}'{}; there are {}",
                            printable(word),
                            meant(word, known()),
                            all.join(", ")
                        );
                        self.error(&part.at, why)
                    })?;
                }
                "debug" => profile.debug = self.switch(&part)?,
                "deterministic" => profile.deterministic = self.switch(&part)?,
                "env" => self.variables(&mut profile.env, &part, false)?,
                "force" => self.variables(&mut profile.env, &part, true)?,
                name => {
                    let known = ["base", "debug", "deterministic", "env", "force"];
                    let why = format!("unknown key '{}' in a profile{}", printable(name), meant(name, known));
                    return Err(self.error(&part.at, why));
                }
            }
        }
        Ok(profile)
    }
}

fn meant<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map(|near| format!(" (did you mean '{near}'?)")).unwrap_or_default()
}

/// Whether a site file may set a variable of that name.
///
/// # Errors
/// Why not, in words that continue the name.
fn check_name(name: &str) -> Result<(), String> {
    let is_key = KEYS.iter().any(|key| key.name == name);
    if is_key || SITE_WORDS.contains(&name) || LISTS.contains(&name) || name == "log" {
        return Err("is a setting, not a variable: settings stand above the first [section]".into());
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.len() > 128 || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(plain)
    {
        return Err("is no name of a variable: letters, digits and _ make one".into());
    }
    let upper = name.to_ascii_uppercase();
    let why = if upper == "MASTER_PORT" || upper == "MASTER_ADDR" {
        "is a fact of the step; the settings port, ports, master, suffix and iface choose it"
    } else if FACTS.contains(&upper.as_str())
        || upper.starts_with("TORCHELASTIC_")
        || catalog::entry(name).is_some_and(|entry| entry.kind == Kind::Rank && entry.reader != Reader::Torchrun)
    {
        "is a fact of the step, and each rank has its own"
    } else if ["SLURM_", "SLURMD_", "SPANK_", "_SLURM"].iter().any(|prefix| upper.starts_with(prefix)) {
        "is Slurm's own"
    } else if upper == "PALINGENESIS" || upper.starts_with("PALINGENESIS_") {
        "is our own; the file's keys are for settings"
    } else if GPUS.contains(&upper.as_str()) {
        "says which GPUs a job has, and Slurm decides that"
    } else if LOADER.contains(&upper.as_str()) {
        "loads code into every program of the job"
    } else if PERSON.contains(&upper.as_str()) {
        "belongs to the user"
    } else if crate::report::is_secret(name) {
        "is a secret by its name, and the file is for all to read"
    } else {
        return Ok(());
    };
    Err(format!("cannot be set here: it {why}"))
}
