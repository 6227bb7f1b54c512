//! The lists for NCCL and UCX: NCCL_IB_HCA, the same on every rank of the node, and
//! UCX_NET_DEVICES, the rank's own.

use crate::facts::pci::PciAddress;
use crate::facts::rdma::LinkLayer;
use crate::facts::topology::Nic;
use crate::plan::netmatch::List;

use super::super::Distance;
use super::ports::{address, card_of};
use super::{NodeNics, View};

/// More devices than NCCL takes (MAX_IB_DEVS of src/transport/net_ib).
const MOST_DEVICES: usize = 32;

impl NodeNics {
    /// NCCL_IB_HCA for every rank of the node.
    ///
    /// # Errors
    /// Why none is needed, or none known.
    pub fn nccl_ib_hca(&self, view: &View) -> Result<String, String> {
        self.known()?;
        let mut order: Vec<usize> = (0..self.ports.len()).collect();
        order.sort_by_key(|nic| {
            let address = view.topology.nics.get(*nic).and_then(address);
            (address.is_none(), address)
        });
        let name = |nic: usize| view.topology.nics.get(nic).map_or("", |nic| nic.name.as_str());
        let wanted: Vec<(&str, u8)> =
            order.iter().flat_map(|nic| self.ports[*nic].iter().map(|port| (name(*nic), *port))).collect();
        let active: Vec<(&str, u8)> = view
            .ports
            .iter()
            .filter(|port| port.active && port.link != LinkLayer::Other)
            .map(|port| (port.device.as_str(), port.port))
            .collect();
        if active.iter().all(|port| wanted.contains(port)) && view.rules.allow.is_none() {
            return Err("every active card may be of the GPUs' fabric: none must be left out".into());
        }
        if wanted.len() > MOST_DEVICES {
            return Err(format!("{} ports are more than NCCL takes from a list", wanted.len()));
        }
        let entries: Vec<String> = wanted.iter().map(|(device, port)| format!("{device}:{port}")).collect();
        let value = format!("={}", entries.join(","));
        let list = List::parse(&value);
        let exact = active
            .iter()
            .all(|(device, port)| list.selects(device, Some((*port).into())) == wanted.contains(&(*device, *port)));
        if exact { Ok(value) } else { Err("the devices' names do not fit into NCCL's list".into()) }
    }

    /// Whether there are cards for NCCL and UCX.
    pub(super) fn known(&self) -> Result<(), String> {
        if let Some(why) = &self.unclear {
            return Err(why.clone());
        }
        match self.fabric {
            Some("InfiniBand" | "Ethernet") => Ok(()),
            Some(other) => Err(format!("the fabric is {other}, which is reached by libfabric, not by RDMA verbs")),
            None => Err("no compute fabric found: none of the cards that may be used is active".into()),
        }
    }

    /// UCX_NET_DEVICES for a rank with these GPUs.
    ///
    /// # Errors
    /// Why none is set.
    pub fn ucx_net_devices(&self, view: &View, gpus: &[usize], rails: Option<u8>) -> Result<String, String> {
        self.known()?;
        let every = view.topology.gpus.len();
        if gpus.is_empty() || (gpus.len() == every && every > 1) {
            return Err("this rank has all GPUs of the node: it and what it starts take what is near each".into());
        }
        if rails.is_none() && self.rails_apart(view) {
            return Err(
                "the cards are on networks of their own, and UCX itself finds the one that reaches a peer".into()
            );
        }
        let used = |nic: &usize| !self.ports[*nic].is_empty();
        let all: Vec<usize> = (0..self.ports.len()).filter(used).collect();
        let mut taken: Vec<usize> = Vec::new();
        for gpu in gpus {
            let own = self.of_gpu.get(*gpu).map(Vec::as_slice).unwrap_or_default();
            if own.is_empty() || own.iter().any(|nic| self.distances[*gpu][*nic] == Distance::Unknown) {
                return Err(format!("which card is near GPU {gpu} is not known"));
            }
            for nic in self.rails(view, *gpu, own, &all, rails) {
                if !taken.contains(&nic) {
                    taken.push(nic);
                }
            }
        }
        if all.iter().all(|nic| taken.contains(nic)) && !self.leaves_out_active(view) {
            return Err("every active card is this rank's: none must be left out".into());
        }
        let entries = taken.iter().flat_map(|nic| {
            let name = &view.topology.nics[*nic].name;
            self.ports[*nic].iter().map(move |port| format!("{name}:{port}"))
        });
        Ok(entries.collect::<Vec<_>>().join(","))
    }

    /// Whether the used ports are on different IP networks, between which there may
    /// be no way.
    fn rails_apart(&self, view: &View) -> bool {
        let used = view.topology.nics.iter().zip(&self.ports).flat_map(|(nic, ports)| {
            view.ports.iter().filter(|port| port.device == nic.name && ports.contains(&port.port))
        });
        view.addresses.are_apart(used)
    }

    fn leaves_out_active(&self, view: &View) -> bool {
        let out = |nic: &Nic, ports: &[u8]| {
            view.ports.iter().any(|port| {
                port.active && port.link != LinkLayer::Other && port.device == nic.name && !ports.contains(&port.port)
            })
        };
        view.topology.nics.iter().zip(&self.ports).any(|(nic, ports)| out(nic, ports))
    }

    /// As many cards as `rails` asks for: the GPU's own first, then the next
    /// nearest.
    fn rails(&self, view: &View, gpu: usize, own: &[usize], all: &[usize], rails: Option<u8>) -> Vec<usize> {
        let Some(rails) = rails else {
            return own.to_vec();
        };
        let nics = &view.topology.nics;
        let mut others: Vec<usize> = all.iter().copied().filter(|nic| !own.contains(nic)).collect();
        others.sort_by_key(|nic| (self.distances[gpu][*nic], address(&nics[*nic])));
        let mut taken: Vec<usize> = Vec::new();
        let mut cards: Vec<PciAddress> = Vec::new();
        for nic in own.iter().copied().chain(others) {
            let Some(card) = card_of(&nics[nic]) else {
                continue;
            };
            if !cards.iter().any(|known| known.same_card(card)) {
                if cards.len() == usize::from(rails) || self.distances[gpu][nic] == Distance::Unknown {
                    continue;
                }
                cards.push(card);
            }
            taken.push(nic);
        }
        taken
    }
}
