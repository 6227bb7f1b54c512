//! The grammar of `--palingenesis=SPEC`: words and `key=value`, separated by
//! commas. No `#` (a comment in sbatch scripts) and no blanks.

use std::fmt;
use std::net::IpAddr;

use thiserror::Error;

use super::{KEY_PREFIX, nearest};

/// A `key=value` of SPEC: the table behind parsing, help and messages.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// As written in SPEC; in `PALINGENESIS_OPT_<KEY>` in capitals.
    pub name: &'static str,
    /// What may follow the `=`, for people.
    pub value: &'static str,
    /// One line for `--palingenesis=help`.
    pub meaning: &'static str,
}

/// Every key of SPEC.
pub const KEYS: &[Key] = &[
    Key {
        name: "profile",
        value: "default|fsdp|megatron|deepspeed|jax",
        meaning: "values for this kind of training; the bare word does the same",
    },
    Key {
        name: "launch",
        value: "auto|native|shell",
        meaning: "auto: a shell with a terminal gets no rank variables, everything else does",
    },
    Key { name: "port", value: "PORT", meaning: "MASTER_PORT, exactly this one" },
    Key { name: "ports", value: "LOW-HIGH", meaning: "the range MASTER_PORT is taken from (default 20000-31999)" },
    Key { name: "master", value: "HOST", meaning: "MASTER_ADDR, instead of rank 0's host" },
    Key { name: "suffix", value: "TEXT", meaning: "appended to rank 0's host name: -ib0 makes node7-ib0" },
    Key { name: "iface", value: "NAME", meaning: "MASTER_ADDR is rank 0's address on this interface's network" },
];

/// Every bare word of SPEC and what it does.
pub const WORDS: &[(&str, &str)] = &[
    ("off", "do nothing for this srun, whatever sbatch or salloc were given"),
    ("help", "print this text and exit"),
    ("show", "print what is set, and why, before the ranks start"),
];

/// The kind of training whose environment is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// Right for most; looks at the command for FSDP, DeepSpeed and JAX.
    #[default]
    Default,
    /// PyTorch FSDP and FSDP2.
    Fsdp,
    /// Megatron-LM and Megatron-Bridge (tensor and context parallelism).
    Megatron,
    /// DeepSpeed.
    Deepspeed,
    /// JAX.
    Jax,
}

impl Profile {
    const ALL: [(&'static str, Profile); 5] = [
        ("default", Profile::Default),
        ("fsdp", Profile::Fsdp),
        ("megatron", Profile::Megatron),
        ("deepspeed", Profile::Deepspeed),
        ("jax", Profile::Jax),
    ];

    /// The word that selects it.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, profile)| *profile == self).map_or("default", |(name, _)| name)
    }

    fn named(word: &str) -> Option<Profile> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, profile)| *profile)
    }
}

/// What the step's tasks are to be, if the user says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launch {
    /// Seen from the command and `--pty`.
    #[default]
    Auto,
    /// The tasks are the ranks.
    Native,
    /// A shell for a person: environment, no ranks.
    Shell,
}

impl Launch {
    const ALL: [(&'static str, Launch); 3] =
        [("auto", Launch::Auto), ("native", Launch::Native), ("shell", Launch::Shell)];

    /// The value of `launch=`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, launch)| *launch == self).map_or("auto", |(name, _)| name)
    }
}

/// An inclusive range of TCP ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// Lowest port, at least 1024.
    pub low: u16,
    /// Highest port, at least `low`.
    pub high: u16,
}

impl PortRange {
    /// How many ports it holds.
    pub fn len(self) -> u32 {
        u32::from(self.high) - u32::from(self.low) + 1
    }

    /// Never: a range holds at least one port.
    pub fn is_empty(self) -> bool {
        false
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.low, self.high)
    }
}

/// Where a setting was written, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `--palingenesis`, on a command line, in an #SBATCH line or handed down
    /// by sbatch or salloc.
    Option,
    /// An environment variable of srun.
    Variable(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Option => f.write_str("--palingenesis"),
            Source::Variable(name) => f.write_str(name),
        }
    }
}

/// The settings of one step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Do nothing.
    pub off: bool,
    /// Print the help and exit.
    pub help: bool,
    /// Print the plan before the ranks start.
    pub show: bool,
    /// The environment's profile.
    pub profile: Profile,
    /// What the tasks are to be.
    pub launch: Launch,
    /// Exactly this MASTER_PORT.
    pub port: Option<u16>,
    /// MASTER_PORT is taken from here.
    pub ports: Option<PortRange>,
    /// Exactly this MASTER_ADDR.
    pub master: Option<String>,
    /// Appended to rank 0's host name.
    pub suffix: Option<String>,
    /// Rank 0's address on this interface's network.
    pub iface: Option<String>,
    /// Keys that have been given, so that variables supply only the others.
    given: Given,
}

/// Bit per entry of [`KEYS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Given(u32);

impl Given {
    fn has(self, key: &str) -> bool {
        KEYS.iter().position(|known| known.name == key).is_some_and(|bit| self.0 & (1 << bit) != 0)
    }

    fn add(&mut self, key: &str) {
        if let Some(bit) = KEYS.iter().position(|known| known.name == key) {
            self.0 |= 1 << bit;
        }
    }
}

/// Longest SPEC accepted. It must fit into the buffers that carry it to the nodes.
pub const SPEC_MAX: usize = 2048;

/// Why a SPEC or a variable was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    /// A bare word that is none.
    #[error("unknown word '{word}' in {source_}{} srun --palingenesis=help", meant(.near))]
    UnknownWord {
        /// As written.
        word: String,
        /// The word or key that was probably meant.
        near: Option<String>,
        /// Where it stands.
        source_: Source,
    },
    /// A `key=` that is none.
    #[error("unknown key '{key}' in {source_}{} srun --palingenesis=help", meant(.near))]
    UnknownKey {
        /// As written.
        key: String,
        /// The key that was probably meant.
        near: Option<String>,
        /// Where it stands.
        source_: Source,
    },
    /// A `PALINGENESIS_OPT_` variable that names no key.
    #[error("unknown variable {name}{} srun --palingenesis=help", meant(.near))]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The variable that was probably meant.
        near: Option<String>,
    },
    /// A value outside the key's grammar.
    #[error("bad value '{value}' for {key} in {source_}: {why}; write {key}={expected}")]
    BadValue {
        /// The key.
        key: &'static str,
        /// As written.
        value: String,
        /// What is wrong with it.
        why: String,
        /// The key's grammar.
        expected: &'static str,
        /// Where it stands.
        source_: Source,
    },
    /// A key given twice with two values.
    #[error("{key} is given twice in {source_}: it can have one value only; leave one out")]
    Twice {
        /// The key.
        key: &'static str,
        /// Where it stands.
        source_: Source,
    },
    /// Two keys that exclude each other.
    #[error("{first} and {second} are both given, and both choose {what}; leave one out")]
    Conflict {
        /// A key.
        first: &'static str,
        /// The other key.
        second: &'static str,
        /// What both choose.
        what: &'static str,
    },
    /// A SPEC that no person wrote.
    #[error("{source_} is {length} bytes long, more than {SPEC_MAX}; shorten it")]
    TooLong {
        /// Its length in bytes.
        length: usize,
        /// Where it stands.
        source_: Source,
    },
}

/// Up to where to read on.
fn meant(near: &Option<String>) -> String {
    match near {
        Some(near) => format!(": did you mean '{near}'? See"),
        None => "; see".into(),
    }
}

impl Settings {
    /// Parses SPEC. An empty SPEC is the flag alone.
    ///
    /// # Errors
    /// The first word, key or value that is not understood.
    pub fn parse(spec: &str, source: Source) -> Result<Settings, SpecError> {
        if spec.len() > SPEC_MAX {
            return Err(SpecError::TooLong { length: spec.len(), source_: source });
        }
        let mut settings = Settings::default();
        for item in spec.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.split_once('=') {
                Some((key, value)) => settings.set(key.trim(), value.trim(), &source)?,
                None => settings.word(item, &source)?,
            }
        }
        settings.check_combination()?;
        Ok(settings)
    }

    fn word(&mut self, word: &str, source: &Source) -> Result<(), SpecError> {
        match word {
            "off" => self.off = true,
            "help" => self.help = true,
            "show" => self.show = true,
            _ if Profile::named(word).is_some() => return self.set("profile", word, source),
            _ => {
                // A key without its value is the likelier slip than a strange word.
                if let Some(key) = KEYS.iter().find(|key| key.name == word) {
                    return Err(bad(key, "", "it needs a value", source));
                }
                let known = WORDS.iter().map(|(word, _)| *word);
                let known = known.chain(Profile::ALL.map(|(name, _)| name));
                let known = known.chain(KEYS.iter().map(|key| key.name));
                return Err(SpecError::UnknownWord {
                    word: printable(word),
                    near: nearest(word, known).map(String::from),
                    source_: source.clone(),
                });
            }
        }
        Ok(())
    }

    fn set(&mut self, name: &str, value: &str, source: &Source) -> Result<(), SpecError> {
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            return Err(SpecError::UnknownKey {
                key: printable(name),
                near: nearest(name, KEYS.iter().map(|key| key.name)).map(String::from),
                source_: source.clone(),
            });
        };
        if self.given.has(key.name) {
            return Err(SpecError::Twice { key: key.name, source_: source.clone() });
        }
        match key.name {
            "profile" => {
                self.profile = Profile::named(value)
                    .ok_or_else(|| bad_word(key, value, Profile::ALL.map(|(name, _)| name), source))?;
            }
            "launch" => {
                self.launch = Launch::ALL
                    .iter()
                    .find(|(name, _)| *name == value)
                    .map(|(_, launch)| *launch)
                    .ok_or_else(|| bad_word(key, value, Launch::ALL.map(|(name, _)| name), source))?;
            }
            "port" => self.port = Some(parse_port(value).map_err(|why| bad(key, value, &why, source))?),
            "ports" => self.ports = Some(parse_ports(value).map_err(|why| bad(key, value, &why, source))?),
            "master" => {
                check_host(value).map_err(|why| bad(key, value, &why, source))?;
                self.master = Some(value.into());
            }
            "suffix" => {
                check_characters(value, ".-", 64).map_err(|why| bad(key, value, &why, source))?;
                self.suffix = Some(value.into());
            }
            "iface" => {
                // IFNAMSIZ of linux/if.h: 15 characters and a NUL.
                check_characters(value, ".-_@", 15).map_err(|why| bad(key, value, &why, source))?;
                self.iface = Some(value.into());
            }
            _ => {}
        }
        self.given.add(key.name);
        Ok(())
    }

    /// Takes a `PALINGENESIS_OPT_<KEY>` variable, unless the key has a value.
    pub(super) fn supply(&mut self, variable: &str, key: &str, value: &str) -> Result<(), SpecError> {
        let key = key.to_ascii_lowercase().replace('_', "-");
        if !KEYS.iter().any(|known| known.name == key) {
            return Err(SpecError::UnknownVariable {
                name: printable(variable),
                near: nearest(&key, KEYS.iter().map(|key| key.name))
                    .map(|near| format!("{KEY_PREFIX}{}", near.to_ascii_uppercase().replace('-', "_"))),
            });
        }
        if self.given.has(&key) {
            return Ok(());
        }
        self.set(&key, value.trim(), &Source::Variable(variable.into()))
    }

    /// Keys that exclude each other.
    pub(super) fn check_combination(&self) -> Result<(), SpecError> {
        let both = |first, second, what| {
            (self.given.has(first) && self.given.has(second)).then_some(SpecError::Conflict { first, second, what })
        };
        let conflict = both("port", "ports", "MASTER_PORT")
            .or_else(|| both("master", "suffix", "MASTER_ADDR"))
            .or_else(|| both("master", "iface", "MASTER_ADDR"))
            .or_else(|| both("suffix", "iface", "MASTER_ADDR"));
        conflict.map_or(Ok(()), Err)
    }
}

/// The canonical SPEC that srun hands to the tasks; parsing it gives the same
/// settings.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.profile.name())?;
        for (word, given) in [("off", self.off), ("help", self.help), ("show", self.show)] {
            if given {
                write!(f, ",{word}")?;
            }
        }
        if self.launch != Launch::Auto {
            write!(f, ",launch={}", self.launch.name())?;
        }
        if let Some(port) = self.port {
            write!(f, ",port={port}")?;
        }
        if let Some(ports) = self.ports {
            write!(f, ",ports={ports}")?;
        }
        for (key, value) in [("master", &self.master), ("suffix", &self.suffix), ("iface", &self.iface)] {
            if let Some(value) = value {
                write!(f, ",{key}={value}")?;
            }
        }
        Ok(())
    }
}

fn bad(key: &Key, value: &str, why: &str, source: &Source) -> SpecError {
    SpecError::BadValue {
        key: key.name,
        value: printable(value),
        why: why.into(),
        expected: key.value,
        source_: source.clone(),
    }
}

fn bad_word<const N: usize>(key: &Key, value: &str, known: [&'static str; N], source: &Source) -> SpecError {
    let why = match nearest(value, known) {
        Some(near) => format!("no such {} (did you mean '{near}'?)", key.name),
        None => format!("no such {}", key.name),
    };
    bad(key, value, &why, source)
}

/// Text from a user, made safe for one line of a terminal and cut to a
/// readable length.
pub fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().nth(80).is_some() {
        shown.push('…');
    }
    shown
}

/// A TCP port that an ordinary process may listen on.
pub(crate) fn parse_port(value: &str) -> Result<u16, String> {
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let port = value.parse::<u16>().ok().filter(|_| digits);
    match port {
        Some(port @ 1024..) => Ok(port),
        Some(0) => Err("port 0 is none".into()),
        Some(_) => Err("ports below 1024 belong to root".into()),
        None if digits => Err("ports end at 65535".into()),
        None => Err("not a port number".into()),
    }
}

fn parse_ports(value: &str) -> Result<PortRange, String> {
    let (low, high) = value.split_once('-').ok_or("not a range")?;
    let (low, high) = (parse_port(low.trim())?, parse_port(high.trim())?);
    if low > high {
        return Err(format!("it ends ({high}) before it begins ({low})"));
    }
    Ok(PortRange { low, high })
}

/// A host name or an IP address, without a port.
pub(crate) fn check_host(value: &str) -> Result<(), String> {
    if value.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    if value.contains(':') {
        return Err("neither a host name nor an IP address (a port goes into port=)".into());
    }
    check_characters(value, ".-_", 253)
}

fn check_characters(value: &str, also: &str, longest: usize) -> Result<(), String> {
    if value.is_empty() {
        return Err("it is empty".into());
    }
    if value.len() > longest {
        return Err(format!("longer than {longest} characters"));
    }
    match value.chars().find(|c| !c.is_ascii_alphanumeric() && !also.contains(*c)) {
        Some(c) => Err(format!("{c:?} cannot stand in it")),
        None => Ok(()),
    }
}

/// The text of `--palingenesis=help`.
pub fn help() -> String {
    let mut text = String::from(
        "--palingenesis[=SPEC] gives each task of the step its rank variables and its NCCL and CUDA environment.\n\
         SPEC is a list of words and key=value, separated by commas; without SPEC the profile is 'default'.\n\nWords:\n",
    );
    for (word, meaning) in WORDS {
        text.push_str(&format!("  {word:<36} {meaning}\n"));
    }
    text.push_str("\nKeys:\n");
    for key in KEYS {
        text.push_str(&format!("  {:<36} {}\n", format!("{}={}", key.name, key.value), key.meaning));
    }
    text.push_str(
        "\nPALINGENESIS=SPEC in srun's environment counts as the flag; PALINGENESIS_OPT_<KEY>=VALUE supplies a value\n\
         for a key that SPEC does not name. An srun inside a job takes over the SPEC given to sbatch or salloc;\n\
         its own replaces it as a whole.\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(spec: &str) -> Result<Settings, SpecError> {
        Settings::parse(spec, Source::Option)
    }

    #[test]
    fn the_flag_alone_is_the_default_profile() {
        assert_eq!(parse(""), Ok(Settings::default()));
        assert_eq!(parse(",,").unwrap(), Settings::default());
    }

    #[test]
    fn words_and_keys_in_any_order() {
        let settings = parse("show,megatron,port=23456,master=10.0.0.7").unwrap();
        assert!(settings.show && !settings.off);
        assert_eq!(settings.profile, Profile::Megatron);
        assert_eq!(settings.port, Some(23456));
        assert_eq!(settings.master.as_deref(), Some("10.0.0.7"));
        assert_eq!(parse("profile=megatron,show").unwrap().profile, Profile::Megatron);
        assert_eq!(parse("ports=20000-20099").unwrap().ports, Some(PortRange { low: 20000, high: 20099 }));
        assert_eq!(parse("master=fd00::7").unwrap().master.as_deref(), Some("fd00::7"));
    }

    #[test]
    fn what_is_not_understood_is_named_with_the_nearest() {
        let table = [
            ("megatorn", "unknown word 'megatorn' in --palingenesis: did you mean 'megatron'?"),
            ("prot=1", "unknown key 'prot' in --palingenesis: did you mean 'port'?"),
            ("banana", "unknown word 'banana' in --palingenesis; "),
            ("launch=nativ", "did you mean 'native'?"),
            ("launch=native,launch=shell", "launch is given twice"),
            ("fsdp,megatron", "profile is given twice"),
            ("port", "bad value '' for port in --palingenesis: it needs a value"),
            ("port=", "not a port number"),
            ("port=0", "port 0 is none"),
            ("port=80", "below 1024"),
            ("port=70000", "ports end at 65535"),
            ("port=-1", "not a port number"),
            ("port=+2000", "not a port number"),
            ("port=0x5000", "not a port number"),
            ("ports=30000", "not a range"),
            ("ports=30000-20000", "ends (20000) before it begins (30000)"),
            ("ports=1-2000", "below 1024"),
            ("master=", "it is empty"),
            ("master=node1:29500", "a port goes into port="),
            ("master=a b", "cannot stand in it"),
            ("iface=averyveryverylongname", "longer than 15"),
            ("port=20000,ports=20000-20001", "port and ports are both given"),
            ("master=a,suffix=-ib0", "master and suffix are both given"),
            ("suffix=i,iface=ib0", "suffix and iface are both given"),
        ];
        for (spec, expected) in table {
            let message = parse(spec).expect_err(spec).to_string();
            assert!(message.contains(expected), "{spec}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn terminal_escapes_and_length_are_bounded_in_messages() {
        let message = parse("a\u{1b}[31m\n").unwrap_err().to_string();
        assert!(!message.contains('\u{1b}') && !message.contains('\n'), "{message:?}");
        let message = parse(&"x".repeat(2000)).unwrap_err().to_string();
        assert!(message.len() < 300, "{message}");
        assert!(matches!(parse(&"x,".repeat(5000)), Err(SpecError::TooLong { .. })));
    }

    #[test]
    fn the_canonical_form_parses_to_the_same_settings() {
        for spec in [
            "",
            "show",
            "off",
            "fsdp,show,launch=shell,ports=1024-65535,iface=ib0",
            "port=20000,suffix=-ib0",
            "master=n1",
        ] {
            let settings = parse(spec).unwrap();
            let again = parse(&settings.to_string()).unwrap();
            // The canonical form names the profile always.
            assert_eq!(Settings { given: Given(0), ..settings }, Settings { given: Given(0), ..again });
        }
    }

    #[test]
    fn no_spec_panics_and_each_that_parses_survives_the_way_to_the_nodes() {
        let pieces =
            ["port", "ports", "master", "suffix", "iface", "launch", "profile", "show", "off", "=", "=", "=", ",", ","];
        let more = ["20000", "21000-22000", "70000", "n1", "-ib0", "native", "fsdp", "\u{0}", "ä", " ", "-", "#", "x"];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut parsed = 0;
        for _ in 0..20_000 * crate::plan::tests::rounds() {
            let mut spec = String::new();
            loop {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = (state >> 8) as usize % (pieces.len() + more.len() + 4);
                match pieces.iter().chain(&more).nth(at) {
                    Some(piece) => spec.push_str(piece),
                    None => break,
                }
            }
            match parse(&spec) {
                Ok(settings) => {
                    parsed += 1;
                    let again = parse(&settings.to_string()).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                    assert_eq!(
                        Settings { given: Given(0), ..again },
                        Settings { given: Given(0), ..settings },
                        "{spec:?}"
                    );
                }
                Err(error) => assert!(!error.to_string().contains(['\n', '\0']), "{spec:?}: {error}"),
            }
        }
        assert!(parsed > 100, "the generator makes too few that parse: {parsed}");
    }

    #[test]
    fn help_names_every_word_and_key() {
        let text = help();
        for key in KEYS {
            assert!(text.contains(key.name) && text.contains(key.meaning));
        }
        for (word, meaning) in WORDS {
            assert!(text.contains(word) && text.contains(meaning));
        }
    }
}
