//! The rows of the catalog, one block per reader. Versions are those of the
//! reader. Sources name a file as `owner/repository:path`, or a page.

use super::Grammar::*;
use super::Kind::*;
use super::{Entry, Reader};

/// Every block, in the order of docs/variables.md.
pub(super) const TABLE: &[&[Entry]] = &[NCCL_BOOTSTRAP];

const fn nccl(name: &'static str, grammar: super::Grammar, meaning: &'static str) -> Entry {
    Entry::new(name, Reader::Nccl, Tuning, grammar, meaning)
        .source("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html")
}

const NCCL_BOOTSTRAP: &[Entry] = &[
    nccl("NCCL_SOCKET_IFNAME", Interfaces, "interfaces of the bootstrap and of socket traffic")
        .default("ib*, then any but docker, lo and virbr, then these")
        .trap("names are prefixes: bond0 also matches bond0.2973; RDMA names do not belong here")
        .source("NVIDIA/nccl:src/misc/socket.cc"),
    nccl("NCCL_IB_TIMEOUT", Integer(1, 31), "how long a packet may stay unanswered: 4.096 us * 2^value, seven times")
        .default("20 (30 s) since 2.23; 18 in 2.14 to 2.22, 14 before")
        .trap("an exponent, not seconds: 22 is two minutes; 0 and 32 or more wait for ever"),
];
