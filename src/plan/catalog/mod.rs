//! What is known of the environment variables that programs of multi-node
//! training read: who reads them, their grammar, their traps. Knowledge only:
//! what is wrong with a value is said by `plan/checks`, what is set by
//! `plan/environment`. The rows stand in `table.rs`, NCCL's undocumented names
//! in `internals.rs`.

mod grammar;
mod index;
mod internals;
mod table;

use std::fmt::Write;

use serde_json::{Value, json};

pub use grammar::{Fault, Grammar, Level, SUBSYSTEMS, ib_timeout_seconds, nccl_integer};

/// Who reads a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reader {
    /// libnccl.
    Nccl,
    /// A network, tuner or profiler plugin of NCCL.
    NcclPlugin,
    /// PyTorch: c10d, its process groups, elastic.
    C10d,
    /// torchrun and torch.distributed.run: the defaults of their flags.
    Torchrun,
    /// PyTorch's memory allocator.
    Allocator,
    /// PyTorch elsewhere: Inductor, extensions, hub.
    Torch,
    /// The CUDA driver, runtime and libraries.
    Cuda,
    /// The container's runtime (enroot, nvidia-container-toolkit).
    ContainerRuntime,
    /// TransformerEngine, Megatron's user buffers and expert parallelism.
    TransformerEngine,
    /// Gloo.
    Gloo,
    /// UCX and UCC.
    Ucx,
    /// MPI and PMIx.
    Mpi,
    /// libfabric and its providers for EFA and Slingshot.
    Libfabric,
    /// NVSHMEM.
    Nvshmem,
    /// OpenMP and other thread pools.
    Threads,
    /// The Python interpreter.
    Python,
    /// The loader and the C library.
    System,
    /// Hugging Face libraries.
    HuggingFace,
    /// NeMo.
    Nemo,
    /// uv, pip, conda.
    Packages,
    /// Triton and other just-in-time compilers of kernels.
    Compiler,
    /// JAX and XLA.
    Jax,
    /// DeepSpeed.
    DeepSpeed,
    /// Weights & Biases and other trackers.
    Tracking,
    /// Programs that are told their ranks by variables.
    Ranks,
    /// Slurm's own commands.
    Slurm,
    /// This plugin and the command palingenesis.
    Palingenesis,
    /// Users' scripts.
    Scripts,
    /// Nobody: misread, misspelt or long gone.
    Nobody,
}

impl Reader {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Reader::Nccl => "NCCL",
            Reader::NcclPlugin => "NCCL plugins",
            Reader::C10d => "PyTorch c10d",
            Reader::Torchrun => "torchrun",
            Reader::Allocator => "PyTorch allocator",
            Reader::Torch => "PyTorch",
            Reader::Cuda => "CUDA",
            Reader::ContainerRuntime => "container runtime",
            Reader::TransformerEngine => "TransformerEngine",
            Reader::Gloo => "Gloo",
            Reader::Ucx => "UCX",
            Reader::Mpi => "MPI, PMIx",
            Reader::Libfabric => "libfabric",
            Reader::Nvshmem => "NVSHMEM",
            Reader::Threads => "thread pools",
            Reader::Python => "Python",
            Reader::System => "system",
            Reader::HuggingFace => "Hugging Face",
            Reader::Nemo => "NeMo",
            Reader::Packages => "package managers",
            Reader::Compiler => "kernel compilers",
            Reader::Jax => "JAX",
            Reader::DeepSpeed => "DeepSpeed",
            Reader::Tracking => "trackers",
            Reader::Ranks => "rank readers",
            Reader::Slurm => "Slurm",
            Reader::Palingenesis => "palingenesis",
            Reader::Scripts => "your scripts",
            Reader::Nobody => "nobody",
        }
    }
}

/// What a variable is for, which decides whether the user's value is put back
/// after a container's image replaced it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Tunes a library: put back.
    Tuning,
    /// A cache's or scratch directory: put back.
    Cache,
    /// A rank, size, address or port: decided by the step, never put back.
    Rank,
    /// Belongs to the node, the container or another program: left as found.
    Foreign,
}

impl Kind {
    /// As printed in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Tuning => "tuning",
            Kind::Cache => "cache",
            Kind::Rank => "rank",
            Kind::Foreign => "foreign",
        }
    }
}

/// One variable, or a family of them.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name; of a family, what the names begin with and `*`.
    pub name: &'static str,
    /// Who reads it.
    pub reader: Reader,
    /// What it is for.
    pub kind: Kind,
    /// What its value may be.
    pub grammar: Grammar,
    /// What its reader does without it, with the versions that differ; "" when
    /// there is nothing to say.
    pub default: &'static str,
    /// First version of the reader that reads it ("2.21"); "" when always or
    /// unknown.
    pub since: &'static str,
    /// Last version that reads it; "" when current ones do.
    pub until: &'static str,
    /// The name that took its place; "" when none did.
    pub successor: &'static str,
    /// One line: what it does.
    pub meaning: &'static str,
    /// What people get wrong; "" when nothing is known.
    pub trap: &'static str,
    /// Where this is from: a file of a public repository or a page.
    pub source: &'static str,
    /// Its reader does not document it, or did not: known, so that it is not
    /// taken for a misspelt name, and never suggested for one.
    pub internal: bool,
}

/// The rows about one subject.
struct Block {
    title: &'static str,
    entries: &'static [Entry],
}

impl Entry {
    const fn new(name: &'static str, reader: Reader, kind: Kind, grammar: Grammar, meaning: &'static str) -> Entry {
        Entry {
            name,
            reader,
            kind,
            grammar,
            default: "",
            since: "",
            until: "",
            successor: "",
            meaning,
            trap: "",
            source: "",
            internal: false,
        }
    }

    const fn kind(mut self, kind: Kind) -> Entry {
        self.kind = kind;
        self
    }

    const fn internal(mut self) -> Entry {
        self.internal = true;
        self
    }

    const fn default(mut self, text: &'static str) -> Entry {
        self.default = text;
        self
    }

    const fn since(mut self, version: &'static str) -> Entry {
        self.since = version;
        self
    }

    const fn until(mut self, version: &'static str) -> Entry {
        self.until = version;
        self
    }

    const fn successor(mut self, name: &'static str) -> Entry {
        self.successor = name;
        self
    }

    const fn trap(mut self, text: &'static str) -> Entry {
        self.trap = text;
        self
    }

    const fn source(mut self, text: &'static str) -> Entry {
        self.source = text;
        self
    }

    /// The entry as text for people, ending in a newline.
    pub fn text(&self) -> String {
        let mut text = format!("{}, read by {}\n  {}\n", self.name, self.reader.name(), self.meaning);
        let rows = [
            ("values", self.values()),
            ("default", self.default.to_string()),
            ("versions", self.versions()),
            ("instead", self.successor.to_string()),
            ("trap", self.trap.to_string()),
            ("source", self.source.to_string()),
        ];
        for (title, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {title:<10}{value}");
        }
        for (value, one, all) in self.seconds() {
            let _ = writeln!(text, "  {value:>8}  {one:.1} s per try, {all:.0} s over 7 tries");
        }
        text
    }

    /// The entry for programs.
    pub fn json(&self) -> Value {
        let mut object = json!({
            "name": self.name,
            "reader": self.reader.name(),
            "kind": self.kind.name(),
            "values": self.values(),
            "default": self.default,
            "since": self.since,
            "until": self.until,
            "successor": self.successor,
            "meaning": self.meaning,
            "trap": self.trap,
            "source": self.source,
            "internal": self.internal,
        });
        let seconds = self.seconds();
        if !seconds.is_empty() {
            let rows = seconds.iter().map(|(value, one, all)| json!({"value": value, "per_try": one, "total": all}));
            object["seconds"] = rows.collect();
        }
        object
    }

    /// What its value may be; of a variable that nobody reads, nothing.
    fn values(&self) -> String {
        if self.reader == Reader::Nobody { String::new() } else { self.grammar.describe() }
    }

    fn versions(&self) -> String {
        match (self.since, self.until) {
            ("", "") => String::new(),
            (since, "") => format!("since {since}"),
            ("", until) => format!("until {until}"),
            (since, until) if since == until => format!("{since} only"),
            (since, until) => format!("{since} to {until}"),
        }
    }

    /// The usual values of an exponent, each with what it means in seconds.
    fn seconds(&self) -> Vec<(i64, f64, f64)> {
        if self.grammar != Grammar::AckTimeout {
            return Vec::new();
        }
        (17..=25).filter_map(|value| ib_timeout_seconds(value).map(|(one, all)| (value, one, all))).collect()
    }

    fn family(&self) -> Option<&'static str> {
        self.name.strip_suffix('*')
    }
}

/// Every variable and family, in the table's order.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    table::TABLE.iter().flat_map(|block| block.entries)
}

/// The variable of that name, else the family it belongs to.
pub fn entry(name: &str) -> Option<&'static Entry> {
    index::named(name).or_else(|| index::family(name))
}

/// The variable that was probably meant by a name that is not in the catalog.
pub fn nearest(name: &str) -> Option<&'static str> {
    let candidates: Vec<&'static str> = entries()
        .filter(|entry| entry.reader != Reader::Nobody && !entry.internal && entry.family().is_none())
        .map(|entry| entry.name)
        .collect();
    // The prefix left out (IB_TIMEOUT), or the case wrong.
    let upper = name.to_ascii_uppercase();
    let whole = |candidate: &&&'static str| {
        **candidate == upper || candidate.strip_suffix(upper.as_str()).is_some_and(|prefix| prefix.ends_with('_'))
    };
    let of_letters = || {
        let lower: Vec<String> = candidates.iter().map(|candidate| candidate.to_ascii_lowercase()).collect();
        let near = crate::config::nearest(name, lower.iter().map(String::as_str))?;
        lower.iter().position(|candidate| candidate == near).map(|at| candidates[at])
    };
    // A word too many (NCCL_EXCLUDE_IB_HCA) or one too few (NCCL_IFNAME).
    let words: Vec<&str> = upper.split('_').collect();
    let one_more = |few: &[&str], many: &[&str]| {
        few.len() > 1 && few.len() + 1 == many.len() && few.iter().all(|word| many.contains(word))
    };
    let of_words = |candidate: &&&'static str| {
        let parts: Vec<&str> = candidate.split('_').collect();
        one_more(&parts, &words) || one_more(&words, &parts)
    };
    if words.iter().all(|word| word.is_empty()) {
        return None;
    }
    let one = candidates.iter().find(whole).copied().or_else(of_letters);
    one.or_else(|| candidates.iter().find(of_words).copied())
}

/// Whether the user's value is put back after a container's image replaced it.
pub fn put_back(name: &str) -> bool {
    // The image's interpreter is set up by its image.
    !name.starts_with("PYTHON") && entry(name).is_some_and(|entry| matches!(entry.kind, Kind::Tuning | Kind::Cache))
}

/// The whole catalog as a Markdown page: docs/variables.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Environment variables of multi-node training\n\n\
         Made by `make docs` from the catalog that is compiled into palingenesis: change `src/plan/catalog/table.rs`, not \
         this page.\n`palingenesis explain NAME` prints one entry, with its source. Versions are those of the reader.\n\n\
         NCCL's own guide asks not to keep the variables of its second half in scripts: most programs need almost none of \
         these.\n",
    );
    for block in table::TABLE {
        let _ = write!(text, "\n## {}\n\n", block.title);
        if block.entries.iter().all(|entry| entry.internal) {
            compact(&mut text, block);
        } else {
            full(&mut text, block);
        }
    }
    text
}

fn full(text: &mut String, block: &Block) {
    text.push_str(
        "| Variable | Reader | What it does | Values | Default | Versions | Trap |\n|---|---|---|---|---|---|---|\n",
    );
    for entry in block.entries {
        let mut versions = entry.versions();
        if !entry.successor.is_empty() {
            let comma = if versions.is_empty() { "" } else { ", " };
            let _ = write!(versions, "{comma}use {}", entry.successor);
        }
        let cells =
            [entry.name, entry.reader.name(), entry.meaning, &entry.values(), entry.default, &versions, entry.trap];
        row(text, &cells);
    }
}

fn compact(text: &mut String, block: &Block) {
    text.push_str("| Variable | Default | Versions |\n|---|---|---|\n");
    for entry in block.entries {
        row(text, &[entry.name, entry.default, &entry.versions()]);
    }
}

fn row(text: &mut String, cells: &[&str]) {
    for cell in cells {
        // `*` and `<` mean something in Markdown.
        let cell = cell.replace('|', "\\|").replace('*', "\\*").replace('<', "&lt;");
        let _ = write!(text, "| {cell} ");
    }
    text.push_str("|\n");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_entry_is_complete_and_named_once() {
        let mut names = BTreeSet::new();
        for entry in entries() {
            assert!(names.insert(entry.name), "{} stands twice", entry.name);
            assert!(!entry.meaning.is_empty() && !entry.meaning.contains('\n'), "{}", entry.name);
            assert!(!entry.source.is_empty(), "{} has no source", entry.name);
            let source = entry.source;
            assert!(source.starts_with("https://") || source.contains('/') && source.contains(':'), "{source}");
            let successor = super::entry(entry.successor);
            assert!(entry.successor.is_empty() || successor.is_some_and(|next| next.name == entry.successor));
            for version in [entry.since, entry.until].iter().filter(|version| !version.is_empty()) {
                assert!(version.split('.').all(|part| part.parse::<u32>().is_ok()), "{}: {version}", entry.name);
            }
        }
    }

    #[test]
    fn each_default_is_a_value_that_its_reader_takes() {
        let mut judged = 0;
        for entry in entries().filter(|entry| entry.default.parse::<i64>().is_ok()) {
            assert_eq!(entry.grammar.fault(entry.default), None, "{}={}", entry.name, entry.default);
            judged += 1;
        }
        assert!(judged > 100, "{judged}");
    }

    #[test]
    fn every_name_is_found() {
        for expected in entries() {
            let found = super::entry(expected.name);
            assert!(found.is_some_and(|found| std::ptr::eq(found, expected)), "{}", expected.name);
            // What family() finds.
            assert!(!expected.name.contains('*') || expected.name.ends_with("_*"), "{}", expected.name);
        }
    }

    /// A variable that binding sets has a row.
    #[test]
    fn the_facts_of_a_rank_are_explained() {
        for name in ["PALINGENESIS_GPU", "PALINGENESIS_GPU_INDEX", "PALINGENESIS_NIC", "PALINGENESIS_NUMA"] {
            assert_eq!(entry(name).map(|entry| entry.reader), Some(Reader::Scripts), "{name}");
        }
        assert_eq!(entry("PALINGENESIS_OPT_NIC_DOWN").map(|entry| entry.name), Some("PALINGENESIS_OPT_*"));
    }

    #[test]
    fn names_of_a_family_are_known_and_names_of_their_own_come_first() {
        assert_eq!(entry("NCCL_FASTRAK_CTRL_DEV").map(|entry| entry.name), Some("NCCL_FASTRAK_*"));
        assert_eq!(entry("OMPI_MCA_pml_ucx_tls").map(|entry| entry.name), Some("OMPI_MCA_*"));
        assert_eq!(entry("OFI_NCCL_PROTOCOL").map(|entry| entry.name), Some("OFI_NCCL_PROTOCOL"));
        assert!(
            entry("NCCL_FASTRAK").is_none()
                && entry("NCCL_FASTRAK_").is_none()
                && entry("").is_none()
                && entry("*").is_none()
        );
    }

    /// What belongs to the container or the step is not the user's to put back.
    #[test]
    fn never_put_back() {
        for name in [
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "PATH",
            "PYTHONPATH",
            "PYTHONNOUSERSITE",
            "PYTHONUNBUFFERED",
            "HOME",
            "TMPDIR",
            "CUDA_VISIBLE_DEVICES",
            "NVIDIA_VISIBLE_DEVICES",
            "RANK",
            "MASTER_ADDR",
            "OMPI_MCA_pml",
            "NVSHMEM_HOME",
            "UV_PROJECT_ENVIRONMENT",
            "NO_SUCH_VARIABLE",
        ] {
            assert!(!put_back(name), "{name}");
        }
        for entry in entries().filter(|entry| entry.name.starts_with("SLURM") || crate::report::is_secret(entry.name)) {
            assert!(!put_back(entry.name), "{}", entry.name);
        }
        assert!(put_back("NCCL_DEBUG") && put_back("HF_HOME") && put_back("OFI_NCCL_PROTOCOL"));
    }

    /// <https://github.com/llm-d/llm-d-benchmark/pull/1862>: an exclusion that
    /// excluded nothing, under a name that nobody reads.
    #[test]
    fn what_was_meant() {
        for (name, meant) in [
            ("NCCL_SOCKET_IFNAMES", Some("NCCL_SOCKET_IFNAME")),
            ("NCCL_DEBG", Some("NCCL_DEBUG")),
            ("NCCL_EXCLUDE_IB_HCA", Some("NCCL_IB_HCA")),
            ("NCCL_SOCKET_IFACE", Some("NCCL_SOCKET_IFNAME")),
            ("NCCL_IFNAME", Some("NCCL_SOCKET_IFNAME")),
            ("NCCL_IB_HCAS", Some("NCCL_IB_HCA")),
            ("NCCL_DEBUG_SUBSYSTEM", Some("NCCL_DEBUG_SUBSYS")),
            ("IB_TIMEOUT", Some("NCCL_IB_TIMEOUT")),
            ("nccl_debug", Some("NCCL_DEBUG")),
            ("CUDA_VISIBLE_DEVICE", Some("CUDA_VISIBLE_DEVICES")),
            ("NCCL", None),
            ("EDITOR", None),
            ("", None),
        ] {
            assert_eq!(nearest(name), meant, "{name}");
        }
    }
}
