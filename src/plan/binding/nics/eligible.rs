//! Cards that are out whatever the fabric is: those that the site file denies,
//! virtual functions beside their card, and ports that lead nowhere.

use crate::config::nics::NicPattern;
use crate::facts::RdmaPort;
use crate::facts::topology::Nic;

use super::super::subnets;
use super::Choice;
use super::ports::{Unit, address};

impl Choice<'_> {
    /// The site file's lists.
    pub(super) fn by_the_site(&mut self) {
        let rules = self.view.rules;
        let named = |patterns: &[NicPattern], nic: &Nic| {
            let names = || nic.netdevs.iter().map(|netdev| netdev.name.as_str()).chain([nic.name.as_str()]);
            patterns.iter().any(|pattern| pattern.names(address(nic), names()))
        };
        for (index, nic) in self.nics.iter().enumerate() {
            if named(&rules.deny, nic) {
                self.out[index] = Some("denied by the site file".into());
            } else if rules.allow.as_ref().is_some_and(|allow| !named(allow, nic)) {
                self.out[index] = Some("not in the site file's allow list".into());
            }
        }
        if rules.allow.is_some() {
            let allowed = |unit: &Unit| self.out[unit.nic].is_none();
            self.used = (0..self.units.len()).filter(|unit| allowed(&self.units[*unit])).collect();
            self.used.retain(|unit| self.units[*unit].active);
            let idle = |nic: &usize| self.out[*nic].is_none() && !self.is_active(*nic);
            self.missing = (0..self.nics.len()).filter(idle).collect();
        }
    }

    /// Virtual functions are the physical card over again
    /// (<https://github.com/vllm-project/vllm/issues/16997>), unless it cannot be
    /// seen or used here, as in a virtual machine.
    pub(super) fn without_virtual_functions(&mut self) {
        for index in 0..self.nics.len() {
            let physical = self.nics[index].place.as_ref().and_then(|place| place.physical);
            let owner =
                (0..self.nics.len()).find(|other| physical.is_some() && address(&self.nics[*other]) == physical);
            if let Some(owner) = owner
                && self.out[index].is_none()
                && self.out[owner].is_none()
                && self.is_active(owner)
            {
                self.out[index] = Some(format!("virtual function of {}, which is here too", self.name(owner)));
            }
        }
    }

    /// Ports that lead nowhere.
    pub(super) fn without_astray(&mut self) {
        let distances = |nic: usize| self.gpus().map(|gpu| self.distances[gpu][nic]).collect();
        let port = |unit: &Unit| {
            let of_it = |port: &&RdmaPort| port.device == self.nics[unit.nic].name && Some(port.port) == unit.port;
            self.view.ports.iter().find(of_it).filter(|_| unit.active && self.out[unit.nic].is_none())
        };
        let candidates: Vec<(Unit, subnets::Candidate)> = self
            .units
            .iter()
            .filter_map(|unit| Some((*unit, subnets::Candidate { port: port(unit)?, distances: distances(unit.nic) })))
            .collect();
        let ports: Vec<subnets::Candidate> = candidates.iter().map(|(_, candidate)| candidate.clone()).collect();
        for ((unit, candidate), why) in candidates.iter().zip(subnets::astray(&ports, &self.view.addresses)) {
            let Some(why) = why else { continue };
            if self.view.addresses.link_local(candidate.port).is_some() {
                self.unaddressed.push(unit.nic);
            }
            self.units.retain(|other| (other.nic, other.port) != (unit.nic, unit.port));
            self.active[unit.nic] = self.units.iter().any(|other| other.nic == unit.nic && other.active);
            if !self.is_active(unit.nic) {
                self.out[unit.nic] = Some(why);
            }
        }
    }
}
