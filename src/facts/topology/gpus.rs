//! The GPUs. NVIDIA's as its driver lists them in /proc; where that is hidden,
//! the functions its driver has in sysfs. AMD's as sysfs lists their render nodes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::facts::{PciAddress, files};

use super::place::Places;
use super::{Gpu, GpuVendor, wrong};

/// More than any machine has.
const MOST: usize = 128;

const AMD: u16 = 0x1002;

/// The GPUs below `root` by PCI address.
pub fn gpus(root: &Path, unknown: &mut Vec<String>) -> Vec<Gpu> {
    let places = Places::below(root);
    let mut gpus = nvidia(root, &places, unknown);
    gpus.extend(amd(root, &places, unknown));
    gpus.sort_by_key(|gpu| gpu.place.address);
    if gpus.len() > MOST {
        unknown.push(format!("more than {MOST} GPUs: the others are not looked at"));
        gpus.truncate(MOST);
    }
    gpus
}

fn nvidia(root: &Path, places: &Places, unknown: &mut Vec<String>) -> Vec<Gpu> {
    let driver = root.join("proc/driver/nvidia/gpus");
    let listed = addresses(&driver, unknown);
    let addresses = listed.or_else(|| addresses(&root.join("sys/bus/pci/drivers/nvidia"), unknown));
    let addresses = addresses.unwrap_or_default();
    let mut unreadable = Vec::new();
    let of = |(address, name): (PciAddress, String)| {
        let directory = driver.join(name);
        let file = directory.join("information");
        let information = files::attribute(&file);
        if information.is_none() && files::is_directory(&directory) {
            unreadable.push(file);
        }
        let information = information.unwrap_or_default();
        let memory = files::attribute(&directory.join("numa_status")).unwrap_or_default();
        Gpu {
            vendor: GpuVendor::Nvidia,
            place: places.of_address(root, address, unknown),
            model: field(&information, "Model:").map(String::from),
            // Question marks before the driver has initialised it.
            uuid: field(&information, "GPU UUID:").filter(|uuid| !uuid.contains('?')).map(String::from),
            minor: field(&information, "Device Minor:").and_then(|minor| minor.parse().ok()),
            memory_node: field(&memory, "Node:").and_then(|node| node.parse().ok()),
        }
    };
    let gpus = addresses.into_iter().take(MOST + 1).map(of).collect();
    if let Some(file) = unreadable.first() {
        wrong(unknown, file, format!("cannot be read, so that the models of {} GPUs are unknown", unreadable.len()));
    }
    gpus
}

/// The PCI addresses among the names in a directory, in their order; `None` where
/// there is no such directory.
fn addresses(directory: &Path, unknown: &mut Vec<String>) -> Option<Vec<(PciAddress, String)>> {
    let names = match files::names(directory) {
        Ok(names) => names?,
        Err(error) => {
            wrong(unknown, directory, format!("{error}, so that the node's GPUs are unknown"));
            return None;
        }
    };
    let mut found: Vec<(PciAddress, String)> =
        names.into_iter().filter_map(|name| Some((PciAddress::parse(&name)?, name))).collect();
    found.sort();
    found.dedup_by_key(|(address, _)| *address);
    Some(found)
}

/// What stands behind a name in the driver's text; longer than any of its values is
/// no value.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.trim();
    (!value.is_empty() && value.len() <= 128 && !value.chars().any(char::is_control)).then_some(value)
}

fn amd(root: &Path, places: &Places, unknown: &mut Vec<String>) -> Vec<Gpu> {
    let class = root.join("sys/class/drm");
    let Ok(names) = files::names(&class) else {
        return Vec::new();
    };
    let of_amd = |directory: &PathBuf| {
        let of = |name: &str| files::attribute(&directory.join(name)).unwrap_or_default();
        of("vendor") == format!("{AMD:#06x}")
            && ["0x0380", "0x1200", "0x0300"].iter().any(|c| of("class").starts_with(c))
    };
    // A GPU in partitions has a node for each.
    let mut seen = BTreeSet::new();
    let nodes = names.unwrap_or_default().into_iter().filter(|name| name.starts_with("renderD"));
    nodes
        .map(|name| class.join(name).join("device"))
        .filter(of_amd)
        .filter_map(|directory| places.of_directory(&directory, unknown))
        .filter(|place| seen.insert(place.address))
        .take(MOST + 1)
        .map(|place| Gpu { vendor: GpuVendor::Amd, place, model: None, uuid: None, minor: None, memory_node: None })
        .collect()
}
