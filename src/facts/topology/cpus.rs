//! CPUs and the NUMA nodes that have some.

use std::path::Path;

use crate::facts::{CpuSet, files};

use super::{NumaNode, Topology, wrong};

/// More than any machine with GPUs has.
const MOST_NODES: u32 = 128;

/// `nodes`, `online` and `isolated` of a topology.
pub(super) fn cpus(root: &Path, unknown: &mut Vec<String>) -> Topology {
    let directory = root.join("sys/devices/system/cpu");
    let online = list(&directory.join("online"), unknown).unwrap_or_default();
    let isolated = list(&directory.join("isolated"), unknown).unwrap_or_default();
    Topology { nodes: nodes(root, unknown), online, isolated, ..Topology::default() }
}

/// A list of numbers; `None` where there is none.
pub(super) fn list(path: &Path, unknown: &mut Vec<String>) -> Option<CpuSet> {
    let text = files::attribute(path)?;
    CpuSet::parse(&text).map_err(|why| wrong(unknown, path, why)).ok()
}

fn nodes(root: &Path, unknown: &mut Vec<String>) -> Vec<NumaNode> {
    let directory = root.join("sys/devices/system/node");
    let online = list(&directory.join("online"), unknown);
    // Empty it cannot be right, and has been seen after CPUs went offline.
    let with_cpus = list(&directory.join("has_cpu"), unknown).filter(|nodes| !nodes.is_empty());
    let Some(wanted) = with_cpus.or_else(|| online.clone()) else {
        return Vec::new();
    };
    if wanted.len() > MOST_NODES {
        wrong(unknown, &directory, format!("more than {MOST_NODES} NUMA nodes: none is looked at"));
        return Vec::new();
    }
    let mut nodes = Vec::new();
    for id in wanted.iter() {
        let directory = directory.join(format!("node{id}"));
        let cpus = list(&directory.join("cpulist"), unknown).unwrap_or_default();
        if cpus.is_empty() {
            continue;
        }
        let path = directory.join("distance");
        let distances = match (&online, files::attribute(&path)) {
            (Some(online), Some(text)) => distances(online, &text).unwrap_or_else(|| {
                wrong(unknown, &path, "not a distance for each node");
                Vec::new()
            }),
            _ => Vec::new(),
        };
        nodes.push(NumaNode { id, cpus, distances });
    }
    nodes
}

/// The kernel writes a column for each node that is online.
fn distances(online: &CpuSet, text: &str) -> Option<Vec<(u32, u32)>> {
    let columns: Option<Vec<u32>> = text.split_whitespace().map(|column| column.parse().ok()).collect();
    let columns = columns.filter(|columns| columns.len() as u32 == online.len())?;
    Some(online.iter().zip(columns).collect())
}
