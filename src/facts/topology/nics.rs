//! Network cards that a training may use: RDMA devices and Slingshot's.

use std::path::Path;

use crate::facts::{files, netdevs};

use super::place::Places;
use super::{Netdev, Nic, NicKind, wrong};

/// More than any machine has, virtual functions included.
const MOST: usize = 256;

/// More than one card's function has: one for each port, a few for VLANs.
const MOST_NETDEVS: usize = 16;

/// The cards below `root` by PCI address; those without one last, by name.
pub fn nics(root: &Path, unknown: &mut Vec<String>) -> Vec<Nic> {
    let places = Places::below(root);
    let mut nics = Vec::new();
    'all: for (kind, class) in [(NicKind::Verbs, "sys/class/infiniband"), (NicKind::Slingshot, "sys/class/cxi")] {
        let class = root.join(class);
        let names = match files::names(&class) {
            Ok(names) => names.unwrap_or_default(),
            Err(error) => {
                wrong(unknown, &class, format!("{error}, so that the node's network cards are unknown"));
                continue;
            }
        };
        for name in names {
            if nics.len() == MOST {
                unknown.push(format!("more than {MOST} network cards: the others are not looked at"));
                break 'all;
            }
            let directory = class.join(&name);
            // A file among the devices is none.
            if files::is_directory(&directory) {
                let device = directory.join("device");
                let place = places.of_directory(&device, unknown);
                nics.push(Nic { name, kind, place, netdevs: netdevs_of(&device) });
            }
        }
    }
    nics.sort_by_cached_key(|nic| {
        let address = nic.place.as_ref().map(|place| place.address);
        (address.is_none(), address, nic.name.clone())
    });
    nics
}

fn netdevs_of(device: &Path) -> Vec<Netdev> {
    let class = device.join("net");
    let names = files::names(&class).ok().flatten().unwrap_or_default();
    let of = |name: String| {
        let directory = class.join(&name);
        let up = netdevs::is_up(&directory)?;
        Some(Netdev { master: files::link(&directory.join("master")), up, name })
    };
    names.into_iter().take(MOST_NETDEVS).filter_map(of).collect()
}
