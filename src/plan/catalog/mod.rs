//! What is known of the environment variables that programs of multi-node
//! training read: who reads them, their grammar, their traps. Knowledge only:
//! what is wrong with a value is said by `plan/checks`, what is set by
//! `plan/environment`. The rows stand in `table.rs`.

mod grammar;
mod table;

use std::fmt::Write;

pub use grammar::{Fault, Grammar, Level, nccl_integer};

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
    /// libfabric and its EFA provider.
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

/// One variable.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name.
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
        }
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
        let mut text = format!("{}  ({})\n  {}\n", self.name, self.reader.name(), self.meaning);
        let versions = match (self.since, self.until) {
            ("", "") => String::new(),
            (since, "") => format!("since {since}"),
            ("", until) => format!("until {until}"),
            (since, until) => format!("{since} to {until}"),
        };
        let rows = [
            ("values", self.grammar.describe()),
            ("default", self.default.to_string()),
            ("versions", versions),
            ("now called", self.successor.to_string()),
            ("trap", self.trap.to_string()),
            ("source", self.source.to_string()),
        ];
        for (title, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {title:<10}  {value}");
        }
        text
    }
}

/// Every variable, in the table's order.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    table::TABLE.iter().copied().flatten()
}

/// The variable of that name.
pub fn entry(name: &str) -> Option<&'static Entry> {
    entries().find(|entry| entry.name == name)
}

/// Whether the user's value is put back after a container's image replaced it.
pub fn put_back(name: &str) -> bool {
    entry(name).is_some_and(|entry| matches!(entry.kind, Kind::Tuning | Kind::Cache))
}

/// The whole catalog as a Markdown page: docs/variables.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Environment variables of multi-node training\n\n\
         Made from the catalog that is compiled into palingenesis; `palingenesis explain NAME` prints an entry.\n",
    );
    let mut section = None;
    for entry in entries() {
        if section != Some(entry.reader) {
            section = Some(entry.reader);
            let _ = write!(
                text,
                "\n## {}\n\n| Variable | Values | Default | Versions | Meaning | Trap |\n|---|---|---|---|---|---|\n",
                entry.reader.name()
            );
        }
        let mut versions = [("since ", entry.since), ("until ", entry.until), ("now ", entry.successor)]
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(title, value)| format!("{title}{value}"))
            .collect::<Vec<_>>()
            .join(", ");
        if versions.is_empty() {
            versions.push('-');
        }
        let cell = |text: &str| if text.is_empty() { "-".into() } else { text.replace('|', "\\|") };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} |",
            entry.name,
            cell(&entry.grammar.describe()),
            cell(entry.default),
            cell(&versions),
            cell(entry.meaning),
            cell(entry.trap),
        );
    }
    text
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
            assert!(entry.successor.is_empty() || super::entry(entry.successor).is_some(), "{}", entry.name);
        }
    }
}
