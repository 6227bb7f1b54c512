//! The grammar of `--palingenesis=SPEC`: words and `key=value`, separated by
//! commas. No `#` (a comment in sbatch scripts) and no blanks. The same keys
//! stand in the site file.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use thiserror::Error;

use super::{KEY_PREFIX, nearest};
use crate::plan::checks;

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

impl Key {
    /// What `palingenesis explain KEY` prints.
    pub fn text(&self) -> String {
        format!(
            "{}, a key of --palingenesis\n  {}\n  values    {}\n  where     --palingenesis={}=…, {}{}=…, or the site file\n",
            self.name,
            self.meaning,
            self.value,
            self.name,
            KEY_PREFIX,
            self.name.to_uppercase().replace('-', "_"),
        )
    }

    /// The same for programs.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({"name": self.name, "kind": "key", "values": self.value, "meaning": self.meaning})
    }
}

/// Every key of SPEC. The id of each check is one more, with off, warn or error.
pub const KEYS: &[Key] = &[
    Key {
        name: "profile",
        value: "default|fsdp|megatron|deepspeed|jax|worker",
        meaning: "values for this kind of training; the bare word does the same",
    },
    Key {
        name: "fabric",
        value: "auto|infiniband|roce|efa|slingshot|tcp|single-node",
        meaning: "the network between the nodes (auto: seen from the node's devices)",
    },
    Key {
        name: "launch",
        value: "auto|native|agent|shell|worker",
        meaning: "auto: seen from the command; native: the tasks are the ranks, agent: each starts a launcher such as torchrun, worker: palingenesis-worker gets the command as its arguments",
    },
    Key {
        name: "rdzv",
        value: "static|c10d",
        meaning: "torchrun's rendezvous: static keeps ranks in the order of nodes (default)",
    },
    Key { name: "port", value: "PORT", meaning: "MASTER_PORT, exactly this one" },
    Key { name: "ports", value: "LOW-HIGH", meaning: "the range MASTER_PORT is taken from (default 20000-31999)" },
    Key { name: "master", value: "HOST", meaning: "MASTER_ADDR, instead of rank 0's host" },
    Key { name: "suffix", value: "TEXT", meaning: "appended to rank 0's host name: -ib0 makes node7-ib0" },
    Key { name: "iface", value: "NAME", meaning: "MASTER_ADDR is rank 0's address on this interface's network" },
    Key {
        name: "cache",
        value: "DIR",
        meaning: "shared directory for HF_HOME, NEMO_HOME, TORCH_HOME, UV_CACHE_DIR (also --palingenesis-cache=DIR)",
    },
    Key { name: "local", value: "DIR", meaning: "the node's own directory for what compilers keep (default $TMPDIR)" },
    Key {
        name: "bind",
        value: "auto|off|cpu|mem|nic, several joined by +",
        meaning: "what is bound to each rank's GPU: its CPUs, its memory, its network cards (auto: all three)",
    },
    Key {
        name: "mem",
        value: "prefer|bind|off",
        meaning: "memory beside the rank's CPUs: preferred (default), or nowhere else, which may end in out of memory",
    },
    Key {
        name: "isolate",
        value: "off|env",
        meaning: "env, or the bare word: CUDA_VISIBLE_DEVICES names the rank's own GPU only; not for programs that take GPU LOCAL_RANK",
    },
    Key {
        name: "exclusive",
        value: "off|on",
        meaning: "on, or the bare word: ranks that share CPUs get whole cores of their own",
    },
    Key {
        name: "store",
        value: "off|on",
        meaning: "on, or the bare word: tasks get PALINGENESIS_STORE_KEY, as the worker's do, for palingenesis_exchange_id",
    },
    Key {
        name: "rails",
        value: "1-16",
        meaning: "network cards in UCX_NET_DEVICES for each rank, the nearest first (default: the nearest)",
    },
    Key {
        name: "gid",
        value: "off|auto",
        meaning: "auto: NCCL_IB_GID_INDEX is a RoCE v2 row that all chosen ports have; for NCCL before 2.21 and UCX",
    },
    Key {
        name: "preflight",
        value: "on|off|warn",
        meaning: "before the ranks start, the nodes meet at the port the training will use and compare what must be equal (default on, for more than one node); warn: what they find stops nothing; a rank that cannot start and a warm-up that fails still stop all ranks",
    },
    Key {
        name: "timeout",
        value: "SECONDS",
        meaning: "how long the pre-flight waits for a node (default 600, with a container 1800)",
    },
    Key {
        name: "output",
        value: "DIR",
        meaning: "where the training writes its checkpoints: every node must see the same directory, able to be written and not full (also --palingenesis-output=DIR)",
    },
    Key {
        name: "warm",
        value: "CMD",
        meaning: "command line run once before the ranks start, while all of them wait, such as uv sync (better --palingenesis-warm=CMD: commas and blanks are %2C and %20 here)",
    },
    Key { name: "warm-per", value: "step|node", meaning: "whether that runs on rank 0's node (default) or on each" },
    Key { name: "warm-timeout", value: "SECONDS", meaning: "how long it may take (default 3600)" },
    Key {
        name: "rundir",
        value: "DIR",
        meaning: "where what is known of ranks that failed is kept, for palingenesis report JOBID",
    },
    Key { name: "nic-down", value: "warn|fail", meaning: "what becomes of a rank whose nearest network card is down" },
    Key {
        name: "checks",
        value: "off|warn|error",
        meaning: "error: what certainly fails is refused (default); warn: nothing is; and ID=off|warn|error for one check",
    },
];

/// Every bare word of SPEC and what it does.
pub const WORDS: &[(&str, &str)] = &[
    ("on", "nothing more: what the flag alone does"),
    ("off", "do nothing for this srun, whatever sbatch or salloc were given"),
    ("help", "print this text and exit"),
    ("show", "print what is set, and why, before the ranks start"),
    ("debug", "in addition: logs that name what NCCL and PyTorch do; slow"),
    ("deterministic", "in addition: the same sums in the same order each time; slow"),
];

/// A setting that is one of a few words.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident: $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum $name { $($(#[$variant_doc])* $variant),+ }

        impl $name {
            /// Every value with its word.
            pub const ALL: &[(&'static str, $name)] = &[$(($word, $name::$variant)),+];

            /// The word that selects it.
            pub fn name(self) -> &'static str {
                Self::ALL.iter().find(|(_, value)| *value == self).map_or("", |(word, _)| *word)
            }

            /// The value of a word.
            pub fn named(word: &str) -> Option<$name> {
                Self::ALL.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
            }
        }
    };
}

choice! {
    /// The kind of training whose environment is wanted.
    Profile:
    /// Right for most; looks at the command for FSDP, DeepSpeed and JAX.
    #[default]
    Default = "default",
    /// PyTorch FSDP and FSDP2.
    Fsdp = "fsdp",
    /// Megatron-LM and Megatron-Bridge (tensor and context parallelism).
    Megatron = "megatron",
    /// DeepSpeed.
    Deepspeed = "deepspeed",
    /// JAX.
    Jax = "jax",
    /// palingenesis-worker, which is started too.
    Worker = "worker",
}

choice! {
    /// What the step's tasks are to be, if the user says so.
    Launch:
    /// Seen from the command and `--pty`.
    #[default]
    Auto = "auto",
    /// The tasks are the ranks.
    Native = "native",
    /// Each task starts a launcher that starts the node's ranks.
    Agent = "agent",
    /// A shell for a person: environment, no ranks.
    Shell = "shell",
    /// The tasks are the ranks of palingenesis-worker.
    Worker = "worker",
}

choice! {
    /// The network between the nodes.
    Fabric:
    /// Seen from the node's devices.
    #[default]
    Auto = "auto",
    /// InfiniBand.
    Infiniband = "infiniband",
    /// RDMA over Ethernet.
    Roce = "roce",
    /// AWS Elastic Fabric Adapter.
    Efa = "efa",
    /// HPE Slingshot.
    Slingshot = "slingshot",
    /// No RDMA.
    Tcp = "tcp",
    /// One node: no network between the ranks.
    SingleNode = "single-node",
}

choice! {
    /// How the agents of torchrun find each other.
    Rendezvous:
    /// Node ranks are those of the step.
    #[default]
    Static = "static",
    /// torchrun decides; ranks follow the order of host names.
    C10d = "c10d",
}

choice! {
    /// What becomes of the findings of the checks, or of one.
    CheckLevel:
    /// Not looked for.
    Off = "off",
    /// Told.
    Warn = "warn",
    /// Errors are refused; for a single check, whatever it finds.
    #[default]
    Error = "error",
}

choice! {
    /// What the log of the node gets of steps with the flag.
    LogLevel:
    /// Nothing.
    Off = "off",
    /// Steps that were refused, and faults.
    #[default]
    Error = "error",
    /// Every step.
    Info = "info",
    /// Every step, with what was read of the node.
    Debug = "debug",
}

choice! {
    /// How a rank's memory is placed.
    Memory:
    /// Beside its CPUs while there is room.
    #[default]
    Prefer = "prefer",
    /// Beside its CPUs or nowhere.
    Bind = "bind",
    /// As the kernel does it.
    Off = "off",
}

choice! {
    /// Whether a rank sees its own GPU only.
    Isolate:
    /// All of the step's.
    #[default]
    Off = "off",
    /// By CUDA_VISIBLE_DEVICES.
    Env = "env",
}

choice! {
    /// Yes or no.
    Switch:
    /// No.
    #[default]
    Off = "off",
    /// Yes.
    On = "on",
}

choice! {
    /// Whether a row of RoCE ports' address tables is chosen.
    Gid:
    /// NCCL and UCX find it.
    #[default]
    Off = "off",
    /// One that all chosen ports have.
    Auto = "auto",
}

choice! {
    /// What becomes of a rank whose nearest network card is down.
    NicDown:
    /// It uses the next one, and that is told.
    #[default]
    Warn = "warn",
    /// The step is refused.
    Fail = "fail",
}

choice! {
    /// Whether the nodes meet before the ranks start.
    Preflight:
    /// They do, and what is wrong ends the step.
    #[default]
    On = "on",
    /// They do not.
    Off = "off",
    /// They do, and what is wrong is told.
    Warn = "warn",
}

choice! {
    /// Where the warm-up runs.
    WarmPer:
    /// On rank 0's node.
    #[default]
    Step = "step",
    /// On each node.
    Node = "node",
}

/// Keys with an option of their own, `--palingenesis-KEY=TEXT`, since commas and blanks
/// are natural in their values.
pub const APART: [&str; 3] = ["cache", "output", "warm"];

/// A day: longer waits are a slip.
const LONGEST_WAIT: u32 = 86400;

/// A comma begins the next key.
const JOINED: &str = "its parts are joined by +";

/// What is bound to each rank's GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The rank's CPUs.
    pub cpu: bool,
    /// Its memory.
    pub mem: bool,
    /// Its network cards.
    pub nic: bool,
}

impl Default for Bind {
    fn default() -> Bind {
        Bind { cpu: true, mem: true, nic: true }
    }
}

impl Bind {
    /// Reads `auto`, `off`, or parts joined by `+`.
    fn parse(value: &str) -> Result<Bind, String> {
        let none = Bind { cpu: false, mem: false, nic: false };
        match value {
            "auto" => return Ok(Bind::default()),
            "off" => return Ok(none),
            _ => {}
        }
        let mut bind = none;
        for part in value.split('+') {
            let known = match part {
                "cpu" => &mut bind.cpu,
                "mem" => &mut bind.mem,
                "nic" => &mut bind.nic,
                "auto" | "off" => return Err(format!("{part} stands alone")),
                _ if part.contains(',') => return Err(JOINED.into()),
                _ => return Err(format!("'{}' is none of cpu, mem, nic", printable(part))),
            };
            if std::mem::replace(known, true) {
                return Err(format!("{part} is in it twice"));
            }
        }
        Ok(bind)
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("cpu", self.cpu), ("mem", self.mem), ("nic", self.nic)];
        let given: Vec<&str> = parts.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        match given.len() {
            0 => f.write_str("off"),
            3 => f.write_str("auto"),
            _ => f.write_str(&given.join("+")),
        }
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
    /// `--palingenesis-KEY` of one of [`APART`], likewise.
    Apart(&'static str),
    /// An environment variable of srun.
    Variable(String),
    /// The site file; its name, with the line where it is known.
    Site(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Option => f.write_str("--palingenesis"),
            Source::Apart(key) => write!(f, "--palingenesis-{key}"),
            Source::Variable(name) | Source::Site(name) => f.write_str(name),
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
    /// In addition to the profile: logs.
    pub debug: bool,
    /// In addition to the profile: determinism.
    pub deterministic: bool,
    /// The environment's profile; that of `site_profile` is in the site file.
    pub profile: Profile,
    /// A profile that the site file defines.
    pub site_profile: Option<String>,
    /// The network between the nodes.
    pub fabric: Fabric,
    /// What the tasks are to be.
    pub launch: Launch,
    /// How torchrun's agents meet.
    pub rdzv: Rendezvous,
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
    /// Root of the shared caches; absolute.
    pub cache: Option<String>,
    /// Root of the node's own caches; absolute.
    pub local: Option<String>,
    /// What is bound to each rank's GPU.
    pub bind: Bind,
    /// How its memory is placed.
    pub mem: Memory,
    /// Whether it sees its own GPU only.
    pub isolate: Isolate,
    /// Whether ranks that share CPUs get cores of their own.
    pub exclusive: Switch,
    /// Whether tasks get PALINGENESIS_STORE_KEY that are not the worker's.
    pub store: Switch,
    /// Network cards in UCX_NET_DEVICES for each rank.
    pub rails: Option<u8>,
    /// Whether NCCL_IB_GID_INDEX is chosen.
    pub gid: Gid,
    /// What becomes of a rank whose nearest network card is down.
    pub nic_down: NicDown,
    /// Whether the nodes meet before the ranks start.
    pub preflight: Preflight,
    /// How long they wait for each other, in seconds.
    pub timeout: Option<u32>,
    /// Where the training writes its checkpoints; absolute.
    pub output: Option<String>,
    /// The warm-up's command line.
    pub warm: Option<String>,
    /// Where it runs.
    pub warm_per: WarmPer,
    /// How long it may take, in seconds.
    pub warm_timeout: Option<u32>,
    /// Where records of failed ranks are kept; absolute.
    pub rundir: Option<String>,
    /// What becomes of findings.
    pub checks: CheckLevel,
    /// Exceptions by check.
    pub rules: BTreeMap<&'static str, CheckLevel>,
    /// Keys that have been given, so that variables and the site file supply only
    /// the others.
    given: Keys,
    /// Keys of which the site file supplied the value.
    of_site: Keys,
}

const _: () = assert!(KEYS.len() <= u32::BITS as usize, "each key has a bit of Keys");

/// Bit per entry of [`KEYS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Keys(u32);

impl Keys {
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
        Settings::parse_with(spec, source, &[])
    }

    /// The same where the site file defines `profiles`, too.
    ///
    /// # Errors
    /// The first word, key or value that is not understood.
    pub fn parse_with(spec: &str, source: Source, profiles: &[String]) -> Result<Settings, SpecError> {
        if spec.len() > SPEC_MAX {
            return Err(SpecError::TooLong { length: spec.len(), source_: source });
        }
        let mut settings = Settings::default();
        for item in spec.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.split_once('=') {
                Some((key, value)) => settings.set(key.trim(), value.trim(), &source, profiles)?,
                None => settings.word(item, &source, profiles)?,
            }
        }
        settings.check_combination()?;
        Ok(settings)
    }

    /// Takes one bare word.
    pub(super) fn word(&mut self, word: &str, source: &Source, profiles: &[String]) -> Result<(), SpecError> {
        match word {
            "on" => {}
            "off" => self.off = true,
            "help" => self.help = true,
            "show" => self.show = true,
            "debug" => self.debug = true,
            "deterministic" => self.deterministic = true,
            "isolate" => return self.set("isolate", "env", source, profiles),
            "exclusive" | "store" => return self.set(word, "on", source, profiles),
            _ if Profile::named(word).is_some() || profiles.iter().any(|name| name == word) => {
                return self.set("profile", word, source, profiles);
            }
            _ => {
                // bind=cpu,nic
                if let ("cpu" | "mem" | "nic", true, Some(bind)) = (word, self.given.has("bind"), key_named("bind")) {
                    return Err(bad(bind, &format!("{},{word}", self.bind), JOINED, source));
                }
                // A key without its value is the likelier slip than a strange word.
                if let Some(key) = KEYS.iter().find(|key| key.name == word) {
                    return Err(bad(key, "", "it needs a value", source));
                }
                let known = WORDS.iter().map(|(word, _)| *word);
                let known = known.chain(Profile::ALL.iter().map(|(name, _)| *name));
                let known = known.chain(KEYS.iter().map(|key| key.name));
                let known = known.chain(profiles.iter().map(String::as_str));
                return Err(SpecError::UnknownWord {
                    word: printable(word),
                    near: nearest(word, known).map(String::from),
                    source_: source.clone(),
                });
            }
        }
        Ok(())
    }

    /// Takes one `key=value`.
    pub(in crate::config) fn set(
        &mut self,
        name: &str,
        value: &str,
        source: &Source,
        profiles: &[String],
    ) -> Result<(), SpecError> {
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            return self.set_rule(name, value, source);
        };
        if self.given.has(key.name) {
            return Err(SpecError::Twice { key: key.name, source_: source.clone() });
        }
        let text = |longest, also| -> Result<Option<String>, SpecError> {
            check_characters(value, also, longest).map_err(|why| bad(key, value, &why, source))?;
            Ok(Some(value.to_string()))
        };
        match key.name {
            "profile" if profiles.iter().any(|name| name == value) => self.site_profile = Some(value.into()),
            "profile" => {
                let known = Profile::ALL.iter().map(|(name, _)| *name).chain(profiles.iter().map(String::as_str));
                self.profile = Profile::named(value).ok_or_else(|| bad_word(key, value, known, source))?;
            }
            "fabric" => self.fabric = chosen(key, value, Fabric::ALL, source)?,
            "launch" => self.launch = chosen(key, value, Launch::ALL, source)?,
            "rdzv" => self.rdzv = chosen(key, value, Rendezvous::ALL, source)?,
            "checks" => self.checks = chosen(key, value, CheckLevel::ALL, source)?,
            "bind" => self.bind = Bind::parse(value).map_err(|why| bad(key, value, &why, source))?,
            "mem" => self.mem = chosen(key, value, Memory::ALL, source)?,
            "isolate" => self.isolate = chosen(key, value, Isolate::ALL, source)?,
            "exclusive" => self.exclusive = chosen(key, value, Switch::ALL, source)?,
            "store" => self.store = chosen(key, value, Switch::ALL, source)?,
            "gid" => self.gid = chosen(key, value, Gid::ALL, source)?,
            "nic-down" => self.nic_down = chosen(key, value, NicDown::ALL, source)?,
            "rails" => {
                let rails = value.parse().ok().filter(|rails| (1..=16).contains(rails));
                self.rails = Some(rails.ok_or_else(|| bad(key, value, "it is no number from 1 to 16", source))?);
            }
            "port" => self.port = Some(parse_port(value).map_err(|why| bad(key, value, &why, source))?),
            "ports" => self.ports = Some(parse_ports(value).map_err(|why| bad(key, value, &why, source))?),
            "master" => {
                check_host(value).map_err(|why| bad(key, value, &why, source))?;
                self.master = Some(value.into());
            }
            "suffix" => self.suffix = text(64, ".-")?,
            // IFNAMSIZ of linux/if.h: 15 characters and a NUL.
            "iface" => self.iface = text(15, ".-_@")?,
            "preflight" => self.preflight = chosen(key, value, Preflight::ALL, source)?,
            "warm-per" => self.warm_per = chosen(key, value, WarmPer::ALL, source)?,
            "timeout" | "warm-timeout" => {
                let seconds = value.parse().ok().filter(|seconds| (1..=LONGEST_WAIT).contains(seconds));
                let seconds = seconds.ok_or_else(|| bad(key, value, "it is no number from 1 to 86400", source))?;
                *(if key.name == "timeout" { &mut self.timeout } else { &mut self.warm_timeout }) = Some(seconds);
            }
            "cache" | "local" | "output" | "rundir" | "warm" => {
                let text = unescape(value).map_err(|why| bad(key, value, &why, source))?;
                self.take(key, text, source)?;
            }
            _ => {}
        }
        self.given.add(key.name);
        Ok(())
    }

    /// Takes a directory or the warm-up's command as a person writes it.
    fn take(&mut self, key: &'static Key, text: String, source: &Source) -> Result<(), SpecError> {
        let checked = if key.name == "warm" { check_command(&text) } else { check_directory(&text) };
        checked.map_err(|why| bad(key, &text, &why, source))?;
        let place = match key.name {
            "cache" => &mut self.cache,
            "output" => &mut self.output,
            "rundir" => &mut self.rundir,
            "warm" => &mut self.warm,
            _ => &mut self.local,
        };
        *place = Some(text);
        self.given.add(key.name);
        Ok(())
    }

    /// Takes `ID=off|warn|error` of one check.
    fn set_rule(&mut self, name: &str, value: &str, source: &Source) -> Result<(), SpecError> {
        let Some(id) = checks::ids().find(|id| *id == name) else {
            let known = KEYS.iter().map(|key| key.name).chain(checks::ids());
            return Err(SpecError::UnknownKey {
                key: printable(name),
                near: nearest(name, known).map(String::from),
                source_: source.clone(),
            });
        };
        if self.rules.contains_key(id) {
            return Err(SpecError::Twice { key: id, source_: source.clone() });
        }
        let key = Key { name: id, value: "off|warn|error", meaning: "" };
        self.rules.insert(id, chosen(&key, value, CheckLevel::ALL, source)?);
        Ok(())
    }

    /// The value of a key that was given, as SPEC has it.
    fn get(&self, key: &str) -> Option<String> {
        if !self.given.has(key) {
            return None;
        }
        match key {
            "profile" => Some(self.profile_name().into()),
            "fabric" => Some(self.fabric.name().into()),
            "launch" => Some(self.launch.name().into()),
            "rdzv" => Some(self.rdzv.name().into()),
            "checks" => Some(self.checks.name().into()),
            "bind" => Some(self.bind.to_string()),
            "mem" => Some(self.mem.name().into()),
            "isolate" => Some(self.isolate.name().into()),
            "exclusive" => Some(self.exclusive.name().into()),
            "store" => Some(self.store.name().into()),
            "gid" => Some(self.gid.name().into()),
            "nic-down" => Some(self.nic_down.name().into()),
            "rails" => self.rails.map(|rails| rails.to_string()),
            "port" => self.port.map(|port| port.to_string()),
            "ports" => self.ports.map(|ports| ports.to_string()),
            "master" => self.master.clone(),
            "suffix" => self.suffix.clone(),
            "iface" => self.iface.clone(),
            "cache" => self.cache.as_deref().map(escape),
            "local" => self.local.as_deref().map(escape),
            "preflight" => Some(self.preflight.name().into()),
            "timeout" => self.timeout.map(|seconds| seconds.to_string()),
            "output" => self.output.as_deref().map(escape),
            "warm" => self.warm.as_deref().map(escape),
            "warm-per" => Some(self.warm_per.name().into()),
            "warm-timeout" => self.warm_timeout.map(|seconds| seconds.to_string()),
            "rundir" => self.rundir.as_deref().map(escape),
            _ => None,
        }
    }

    /// Every key and check that was given a value, as the site file has them.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        let keys = KEYS.iter().filter_map(|key| {
            let value = match key.name {
                "cache" => self.cache.clone(),
                "local" => self.local.clone(),
                "output" => self.output.clone(),
                "warm" => self.warm.clone(),
                "rundir" => self.rundir.clone(),
                name => self.get(name),
            };
            Some((key.name, value?))
        });
        keys.chain(self.rules.iter().map(|(id, level)| (*id, level.name().to_string()))).collect()
    }

    /// Sets what becomes of findings, whatever was given.
    pub(in crate::config) fn set_checks(&mut self, level: CheckLevel) {
        self.checks = level;
        self.given.add("checks");
    }

    /// The profile's name, the site file's too.
    pub fn profile_name(&self) -> &str {
        self.site_profile.as_deref().unwrap_or(self.profile.name())
    }

    /// Whether the site file, not the user, gave this key its value.
    pub fn is_of_site(&self, key: &str) -> bool {
        self.of_site.has(key)
    }

    /// Whether anybody gave this key a value.
    pub fn is_given(&self, key: &str) -> bool {
        self.given.has(key)
    }

    /// Takes a `PALINGENESIS_OPT_<KEY>` variable, unless the key has a value.
    pub(super) fn supply(
        &mut self,
        variable: &str,
        key: &str,
        value: &str,
        profiles: &[String],
    ) -> Result<(), SpecError> {
        let key = key.to_ascii_lowercase().replace('_', "-");
        let known = || KEYS.iter().map(|key| key.name).chain(checks::ids());
        if !known().any(|known| known == key) {
            return Err(SpecError::UnknownVariable {
                name: printable(variable),
                near: nearest(&key, known())
                    .map(|near| format!("{KEY_PREFIX}{}", near.to_ascii_uppercase().replace('-', "_"))),
            });
        }
        if self.given.has(&key) || self.rules.contains_key(key.as_str()) {
            return Ok(());
        }
        self.set(&key, value.trim(), &Source::Variable(variable.into()), profiles)
    }

    /// Takes the argument of `--palingenesis-KEY`, which stands above `KEY=` as the
    /// more particular word.
    pub(super) fn take_apart(&mut self, name: &'static str, text: &str) -> Result<(), SpecError> {
        let key = KEYS.iter().find(|key| key.name == name).unwrap_or(&KEYS[0]);
        self.take(key, text.into(), &Source::Apart(key.name))
    }

    /// Takes from the site file's settings what nobody else has given. A key that
    /// chooses the same thing as one that was given is passed over.
    #[must_use]
    pub fn over(mut self, site: &Settings) -> Settings {
        let host = ["master", "suffix", "iface"];
        let port = ["port", "ports"];
        let before = self.given;
        for key in KEYS.iter().filter(|key| site.given.has(key.name) && !before.has(key.name)) {
            let rivals: &[&str] = match key.name {
                name if host.contains(&name) => &host,
                name if port.contains(&name) => &port,
                _ => &[],
            };
            if rivals.iter().any(|rival| before.has(rival)) {
                continue;
            }
            match key.name {
                "profile" => (self.profile, self.site_profile) = (site.profile, site.site_profile.clone()),
                "fabric" => self.fabric = site.fabric,
                "launch" => self.launch = site.launch,
                "rdzv" => self.rdzv = site.rdzv,
                "checks" => self.checks = site.checks,
                "bind" => self.bind = site.bind,
                "mem" => self.mem = site.mem,
                "isolate" => self.isolate = site.isolate,
                "exclusive" => self.exclusive = site.exclusive,
                "store" => self.store = site.store,
                "gid" => self.gid = site.gid,
                "nic-down" => self.nic_down = site.nic_down,
                "rails" => self.rails = site.rails,
                "port" => self.port = site.port,
                "ports" => self.ports = site.ports,
                "master" => self.master = site.master.clone(),
                "suffix" => self.suffix = site.suffix.clone(),
                "iface" => self.iface = site.iface.clone(),
                "cache" => self.cache = site.cache.clone(),
                "local" => self.local = site.local.clone(),
                "preflight" => self.preflight = site.preflight,
                "timeout" => self.timeout = site.timeout,
                "output" => self.output = site.output.clone(),
                "warm" => self.warm = site.warm.clone(),
                "warm-per" => self.warm_per = site.warm_per,
                "warm-timeout" => self.warm_timeout = site.warm_timeout,
                "rundir" => self.rundir = site.rundir.clone(),
                _ => continue,
            }
            self.given.add(key.name);
            self.of_site.add(key.name);
        }
        // The user's word on all checks stands above the site's on one.
        if !before.has("checks") {
            for (id, level) in &site.rules {
                self.rules.entry(id).or_insert(*level);
            }
        }
        self.show |= site.show;
        self.debug |= site.debug;
        self.deterministic |= site.deterministic;
        self
    }

    /// Whether all of it can be handed to the nodes.
    pub(super) fn check_length(&self) -> Result<(), SpecError> {
        let length = self.to_string().len();
        if length <= SPEC_MAX {
            return Ok(());
        }
        let together = "--palingenesis, with what --palingenesis-cache, -output, -warm and PALINGENESIS_OPT_* add,";
        Err(SpecError::TooLong { length, source_: Source::Variable(together.into()) })
    }

    /// Keys that exclude each other.
    pub(in crate::config) fn check_combination(&self) -> Result<(), SpecError> {
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
        let words = [
            ("off", self.off),
            ("help", self.help),
            ("show", self.show),
            ("debug", self.debug),
            ("deterministic", self.deterministic),
        ];
        let words = words.iter().filter(|(_, given)| *given).map(|(word, _)| word.to_string());
        let own = |key: &&Key| !self.of_site.has(key.name);
        let keys = KEYS.iter().filter(own).filter_map(|key| Some((key.name, self.get(key.name)?)));
        let keys = keys.map(|(key, value)| if key == "profile" { value } else { format!("{key}={value}") });
        let rules = self.rules.iter().map(|(id, level)| format!("{id}={}", level.name()));
        let items: Vec<String> = keys.chain(words).chain(rules).collect();
        f.write_str(if items.is_empty() { "on" } else { "" })?;
        f.write_str(&items.join(","))
    }
}

/// The key of that name.
pub fn key_named(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// One of a setting's words.
fn chosen<T: Copy>(key: &Key, value: &str, known: &[(&'static str, T)], source: &Source) -> Result<T, SpecError> {
    known
        .iter()
        .find(|(word, _)| *word == value)
        .map(|(_, chosen)| *chosen)
        .ok_or_else(|| bad_word(key, value, known.iter().map(|(word, _)| *word), source))
}

/// A path as SPEC has it: what would end it there is written %XX.
pub(in crate::config) fn escape(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for character in path.chars() {
        match character {
            ',' | '%' | ' ' | '#' => text.push_str(&format!("%{:02X}", u32::from(character))),
            _ => text.push(character),
        }
    }
    text
}

fn unescape(text: &str) -> Result<String, String> {
    let mut path = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            path.push(byte);
            continue;
        }
        let digits = [bytes.next().unwrap_or(0), bytes.next().unwrap_or(0)];
        let code = std::str::from_utf8(&digits).ok().and_then(|digits| u8::from_str_radix(digits, 16).ok());
        path.push(code.ok_or("% stands before two hexadecimal digits; a % itself is %25")?);
    }
    String::from_utf8(path).map_err(|_| "it is not UTF-8".into())
}

/// A directory that may hold caches. A shell variable that was empty leaves
/// paths such as `/` and `//hf`.
///
/// # Errors
/// What is wrong with it.
pub fn check_directory(path: &str) -> Result<(), String> {
    if path.is_empty() {
        return Err("it is empty".into());
    }
    if !path.starts_with('/') {
        return Err("it is not absolute".into());
    }
    if path.starts_with("//") {
        return Err("it begins with //: was a variable in it empty?".into());
    }
    if path.trim_matches('/').is_empty() {
        return Err("it is the root directory: was a variable in it empty?".into());
    }
    if path.contains('$') {
        return Err("there is a $ left in it: no shell has replaced the variable".into());
    }
    if path.split('/').any(|part| part == "..") {
        return Err("there is a .. in it".into());
    }
    if path.chars().any(char::is_control) {
        return Err("there is a control character in it".into());
    }
    // What stands for bytes that are none.
    if path.contains(char::REPLACEMENT_CHARACTER) {
        return Err("it is not UTF-8".into());
    }
    if path.len() > 1024 {
        return Err("longer than 1024 bytes".into());
    }
    Ok(())
}

/// A command line for a shell.
fn check_command(text: &str) -> Result<(), String> {
    match text {
        _ if text.trim().is_empty() => Err("it is empty".into()),
        _ if text.len() > 1024 => Err("longer than 1024 bytes: put it into a script".into()),
        _ if text.chars().any(char::is_control) => Err("there is a control character in it".into()),
        _ if text.contains(char::REPLACEMENT_CHARACTER) => Err("it is not UTF-8".into()),
        _ => Ok(()),
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

fn bad_word<'a>(key: &Key, value: &str, known: impl Iterator<Item = &'a str>, source: &Source) -> SpecError {
    let why = match nearest(value, known) {
        Some(near) => format!("no such {} (did you mean '{near}'?)", key.name),
        None => format!("no such {}", key.name),
    };
    bad(key, value, &why, source)
}

/// The character, or `?` in place of one that does something to a terminal instead of
/// showing: control characters, and those that turn the order of what follows
/// (Unicode TR 36, "bidirectional text spoofing").
pub fn visible(character: char) -> char {
    if character.is_control() || turns(character) { '?' } else { character }
}

/// Whether it turns the direction of a line.
pub(crate) fn turns(character: char) -> bool {
    matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text from a user, made safe for one line of a terminal and cut to a
/// readable length.
pub fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(80).map(visible).collect();
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

/// Whether the site file may define a profile of that name: it is a word of SPEC,
/// which must not mean something else.
///
/// # Errors
/// What is wrong with it.
pub(in crate::config) fn check_profile_name(name: &str) -> Result<(), String> {
    check_characters(name, "-_.", 32)?;
    let taken = Profile::named(name).is_some()
        || WORDS.iter().any(|(word, _)| *word == name)
        || KEYS.iter().any(|key| key.name == name)
        || checks::ids().any(|id| id == name);
    if taken { Err("the word has a meaning already".into()) } else { Ok(()) }
}

/// The names in a SPEC that only a site file can explain. Of a SPEC that was
/// accepted once these are its profiles.
pub fn profiles_in(spec: &str) -> Vec<String> {
    let words = spec.split(',').map(str::trim);
    let names = words.map(|word| word.strip_prefix("profile=").unwrap_or(word));
    names.filter(|name| check_profile_name(name).is_ok()).map(String::from).collect()
}

/// Where the meanings in the help begin, and where its lines end.
const MEANINGS: usize = 40;
const LINE: usize = 100;

/// Words of `text` in lines that begin `indent` columns from the left and end
/// before `LINE`; a word that is longer has a line of its own.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last().map_or(0, |line| line.chars().count());
        if last > 0 && indent + last + 1 + word.chars().count() > LINE {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join(&format!("\n{}", " ".repeat(indent)))
}

/// A row of the help; what is too long for its column has a line of its own.
fn row(what: &str, meaning: &str) -> String {
    let what = format!("  {what}");
    let meaning = wrapped(meaning, MEANINGS);
    if what.chars().count() + 2 <= MEANINGS {
        format!("{what:<MEANINGS$}{meaning}\n")
    } else {
        format!("{what}\n{:MEANINGS$}{meaning}\n", "")
    }
}

/// The text of `--palingenesis=help`.
pub fn help() -> String {
    let mut text = String::from(
        "--palingenesis[=SPEC] gives each task of the step its rank variables and its NCCL and CUDA\n\
         environment. SPEC is a list of words and key=value, separated by commas; without SPEC the profile is\n\
         'default'.\n\nWords:\n",
    );
    for (word, meaning) in WORDS {
        text.push_str(&row(word, meaning));
    }
    text.push_str("\nKeys:\n");
    for key in KEYS {
        text.push_str(&row(&format!("{}={}", key.name, key.value), key.meaning));
    }
    let mut ids: Vec<&str> = checks::ids().collect();
    ids.sort_unstable();
    text.push_str(&format!(
        "\nChecks, each a key too (ID=off|warn|error); palingenesis explain ID says what one looks for:\n  {}\n",
        wrapped(&ids.join(" "), 2)
    ));
    text.push_str(
        "\nPALINGENESIS=SPEC in srun's environment counts as the flag; PALINGENESIS_OPT_<KEY>=VALUE supplies a\n\
         value for a key that SPEC does not name. An srun inside a job takes over the SPEC given to sbatch or\n\
         salloc; its own replaces it as a whole.\n",
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
            (
                "bind=gpu",
                "bad value 'gpu' for bind in --palingenesis: 'gpu' is none of cpu, mem, nic; write bind=auto|off",
            ),
            ("bind=cpu+cpu", "cpu is in it twice"),
            ("bind=cpu+off", "off stands alone"),
            ("bind=auto+nic", "auto stands alone"),
            ("bind=", "'' is none of"),
            ("bind=cpu+", "'' is none of"),
            ("bind=cpu,nic", "bad value 'cpu,nic' for bind in --palingenesis: its parts are joined by +"),
            ("bind=nic,mem", "its parts are joined by +"),
            ("mem=strict", "write mem=prefer|bind|off"),
            ("mem", "bad value '' for mem in --palingenesis: it needs a value"),
            ("isolate=gpu", "write isolate=off|env"),
            ("isolate,isolate=off", "isolate is given twice"),
            ("isolat", "did you mean 'isolate'?"),
            ("exclusiv", "did you mean 'exclusive'?"),
            ("rails=0", "no number from 1 to 16"),
            ("rails=17", "no number from 1 to 16"),
            ("rails=two", "no number from 1 to 16"),
            ("nic-down=stop", "write nic-down=warn|fail"),
            ("nicdown=fail", "did you mean 'nic-down'?"),
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
        let message = parse("show\u{202e}").unwrap_err().to_string();
        assert!(!message.contains('\u{202e}'), "{message:?}");
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
            "bind=auto",
            "bind=off",
            "bind=mem+cpu",
            "isolate,exclusive",
            "mem=prefer,isolate=off,exclusive=off,nic-down=warn",
            "store",
            "store=off,port=20000",
            "mem=bind,isolate=env,exclusive=on,rails=16,nic-down=fail",
        ] {
            let settings = parse(spec).unwrap();
            let again = parse(&settings.to_string()).unwrap();
            // The canonical form names the profile always.
            assert_eq!(settings, again);
        }
    }

    #[test]
    fn what_is_bound_and_how() {
        let bind = |cpu, mem, nic| Bind { cpu, mem, nic };
        assert_eq!(parse("").unwrap().bind, bind(true, true, true));
        assert_eq!(parse("bind=off").unwrap().bind, bind(false, false, false));
        assert_eq!(parse("bind=nic+cpu").unwrap().bind, bind(true, false, true));
        assert_eq!(parse("bind=nic+cpu").unwrap().to_string(), "bind=cpu+nic");
        assert_eq!(parse("bind=cpu+mem+nic").unwrap().to_string(), "bind=auto");
        let settings = parse("isolate,exclusive,mem=bind,rails=2,nic-down=fail").unwrap();
        assert_eq!((settings.isolate, settings.exclusive), (Isolate::Env, Switch::On));
        assert_eq!((settings.mem, settings.rails, settings.nic_down), (Memory::Bind, Some(2), NicDown::Fail));
        assert_eq!(settings.to_string(), "mem=bind,isolate=env,exclusive=on,rails=2,nic-down=fail");
        let settings = parse("fsdp").unwrap();
        assert_eq!((settings.mem, settings.isolate, settings.exclusive), (Memory::Prefer, Isolate::Off, Switch::Off));
        assert_eq!((settings.rails, settings.nic_down), (None, NicDown::Warn));
    }

    #[test]
    fn no_spec_panics_and_each_that_parses_survives_the_way_to_the_nodes() {
        let pieces = [
            "port",
            "ports",
            "master",
            "cache",
            "iface",
            "launch",
            "profile",
            "show",
            "off",
            "checks",
            "port-range",
            "bind",
            "rails",
            "nic-down",
            "isolate",
            "=",
            "=",
            "=",
            ",",
            ",",
        ];
        let more = [
            "20000",
            "21000-22000",
            "70000",
            "n1",
            "-ib0",
            "native",
            "fsdp",
            "/a",
            "%2C",
            "warn",
            "cpu+mem",
            "2",
            "\u{0}",
            "ä",
            " ",
            "-",
            "#",
            "x",
        ];
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
                    assert_eq!(again, settings, "{spec:?}");
                }
                Err(error) => assert!(!error.to_string().contains(['\n', '\0']), "{spec:?}: {error}"),
            }
        }
        assert!(parsed > 100, "the generator makes too few that parse: {parsed}");
    }

    #[test]
    fn paths_survive_the_way_to_the_nodes() {
        for path in ["/shared/cache", "/a b", "/a,b", "/a%2C", "/a#b", "/%", "/ä/ö", "/a=b", "/a%41"] {
            let mut settings = parse("show").unwrap();
            settings.take_apart("cache", path).unwrap();
            let again = parse(&settings.to_string()).unwrap();
            assert_eq!(again.cache.as_deref(), Some(path));
        }
        assert_eq!(parse("cache=/a%20b").unwrap().cache.as_deref(), Some("/a b"));
        assert!(parse("cache=/a%2").unwrap_err().to_string().contains("%25"));
    }

    #[test]
    fn a_path_that_an_empty_variable_left_is_refused() {
        // https://github.com/NVIDIA/pyxis/issues/46
        for (path, word) in [
            ("", "empty"),
            ("/", "root"),
            ("//hf", "//"),
            ("//", "//"),
            ("hf", "absolute"),
            ("./hf", "absolute"),
            ("/shared/$USER", "$"),
            ("/shared/${USER}/hf", "$"),
            ("/shared/../etc", ".."),
            ("/a\nb", "control"),
        ] {
            let why = check_directory(path).expect_err(path);
            assert!(why.contains(word), "{path:?}: {why}");
        }
        assert_eq!(check_directory("/shared/user1/hf"), Ok(()));
    }

    #[test]
    fn the_site_file_supplies_what_nobody_gave() {
        let site = parse("megatron,ports=21000-21999,suffix=-ib0,checks=warn,port-range=off,debug").unwrap();
        let merged = parse("show").unwrap().over(&site);
        assert_eq!((merged.profile, merged.checks), (Profile::Megatron, CheckLevel::Warn));
        assert_eq!(merged.suffix.as_deref(), Some("-ib0"));
        assert!(merged.debug && merged.show && merged.is_of_site("ports") && !merged.is_of_site("port"));
        assert_eq!(merged.rules.get("port-range"), Some(&CheckLevel::Off));
        // What the user gave stands above it, also by another key for the same thing.
        let merged = parse("fsdp,port=20001,master=n1,port-range=error").unwrap().over(&site);
        assert_eq!((merged.profile, merged.port, merged.ports), (Profile::Fsdp, Some(20001), None));
        assert_eq!((merged.master.as_deref(), merged.suffix), (Some("n1"), None));
        assert_eq!(merged.rules.get("port-range"), Some(&CheckLevel::Error));
        let merged = parse("checks=warn").unwrap().over(&parse("checks=error,port-range=error").unwrap());
        assert_eq!((merged.checks, merged.rules.len()), (CheckLevel::Warn, 0));
    }

    #[test]
    fn checks_are_keys_by_their_ids() {
        let settings = parse("port-range=off,ranks-stale=error").unwrap();
        assert_eq!(settings.to_string(), "port-range=off,ranks-stale=error");
        assert!(parse("port-range=no").unwrap_err().to_string().contains("off|warn|error"));
        assert!(parse("port-rnge=off").unwrap_err().to_string().contains("did you mean 'port-range'"));
    }

    #[test]
    fn a_profile_of_the_site_file_is_a_word() {
        let profiles = ["mixtral".to_string()];
        let parse = |spec: &str| Settings::parse_with(spec, Source::Option, &profiles);
        let settings = parse("mixtral,debug").unwrap();
        assert_eq!((settings.profile_name(), settings.debug), ("mixtral", true));
        assert_eq!(settings.to_string(), "mixtral,debug");
        assert!(parse("mixtrl").unwrap_err().to_string().contains("did you mean 'mixtral'"));
        assert!(parse("mixtral,fsdp").unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn help_names_every_word_and_key() {
        let text = help();
        let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>().join(" ");
        let one_line = words(&text);
        for key in KEYS {
            assert!(one_line.contains(&words(&format!("{}={} {}", key.name, key.value, key.meaning))), "{}", key.name);
        }
        for (word, meaning) in WORDS {
            assert!(one_line.contains(&words(&format!("{word} {meaning}"))), "{word}");
        }
        for id in checks::ids() {
            assert!(one_line.contains(&format!(" {id} ")), "{id}");
        }
    }

    /// A terminal of 100 columns shows each line whole, with the meanings under
    /// each other.
    #[test]
    fn help_fits_a_terminal() {
        let text = help();
        for line in text.lines() {
            assert!(line.chars().count() <= 100 && line.trim_end() == line, "{line}");
        }
        let begin: Vec<&str> = WORDS.iter().map(|(_, meaning)| *meaning).collect();
        for meaning in begin.into_iter().chain(KEYS.iter().map(|key| key.meaning)) {
            let start: String = meaning.chars().take(20).collect();
            assert!(text.lines().any(|line| line.find(&start) == Some(40)), "{meaning}\n{text}");
        }
    }
}
