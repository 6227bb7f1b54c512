//! What GPUs lack: cards of theirs that are down, or slower than their like.

use crate::config::NicDown;

use super::Choice;
use super::of_gpu::Assigned;

impl Choice<'_> {
    /// What GPUs lack: their own cards that are down, or slower than their like.
    pub(super) fn faults(&self, of_gpu: &[Vec<usize>]) -> Vec<(usize, bool, String)> {
        let used = self.used_nics();
        let mut missing = self.missing.clone();
        if used.is_empty() && missing.is_empty() && self.view.settings.nic_down == NicDown::Fail {
            missing = (0..self.nics.len()).filter(|nic| self.out[*nic].is_none()).collect();
        }
        missing.extend(self.dead_fabric(&used));
        missing.extend(self.unaddressed.iter().filter(|nic| !used.contains(nic)));
        let both: Vec<usize> = used.iter().chain(&missing).copied().collect();
        let Assigned { of_gpu: whole, uneven } = self.assign(&both);
        let mut faults = Vec::new();
        for (gpu, nics) in whole.into_iter().enumerate() {
            // A card with one of its ports is no fault: the other may have no cable.
            let has_port = |nic: &usize| used.iter().any(|other| self.cards[*other] == self.cards[*nic]);
            let dead: Vec<usize> = nics.into_iter().filter(|nic| !has_port(nic)).collect();
            // Of cards that do not divide evenly one may be idle by intent.
            if dead.is_empty() || (uneven[gpu] && !of_gpu[gpu].is_empty()) {
                continue;
            }
            let is = if dead.len() == 1 { "is" } else { "are" };
            let instead = match (of_gpu[gpu].as_slice(), self.view.settings.nic_down) {
                ([], _) => "and no other is near".into(),
                (others, NicDown::Fail) => format!("{} would be used instead", self.names(others)),
                ([one], NicDown::Warn) => format!("{} is used", self.name(*one)),
                (several, NicDown::Warn) => format!("{} are used", self.names(several)),
            };
            let what = if dead.iter().all(|nic| self.unaddressed.contains(nic)) {
                "without an address that a peer knows"
            } else if dead.iter().all(|nic| self.is_unreadable(*nic)) {
                "of unknown state, which cannot be read"
            } else {
                "down"
            };
            faults.push((gpu, true, format!("GPU {gpu}: {} {is} {what}, {instead}", self.names(&dead))));
        }
        for (gpu, nics) in of_gpu.iter().enumerate() {
            for (nic, rate, others) in self.slow.iter().filter(|(nic, ..)| nics.contains(nic)) {
                let text = format!("GPU {gpu}: {} runs at {rate} Gb/s, its like at {others}", self.name(*nic));
                faults.push((gpu, false, text));
            }
        }
        faults.sort_by_key(|(gpu, ..)| *gpu);
        faults
    }

    /// Cards of one model and kind near most of the GPUs, none of which is active, where
    /// what is used is near fewer.
    fn dead_fabric(&self, used: &[usize]) -> Vec<usize> {
        let near = |nics: &[usize]| self.gpus().filter(|gpu| self.nearest(*gpu, nics).is_near()).count();
        let idle: Vec<usize> = (0..self.nics.len())
            .filter(|nic| self.out[*nic].is_none() && !self.is_active(*nic) && self.is_near_some_gpu(*nic))
            .collect();
        let mut dead: Vec<usize> = Vec::new();
        for nic in &idle {
            let kind = |nic: usize| self.units.iter().find(|unit| unit.nic == nic).map(|unit| unit.link);
            let alike = |other: &usize| self.model(*other) == self.model(*nic) && kind(*other) == kind(*nic);
            if used.iter().any(alike) || dead.iter().any(alike) {
                continue;
            }
            let like: Vec<usize> = idle.iter().copied().filter(alike).collect();
            if !used.is_empty() && 2 * near(&like) > self.gpus().len() && near(&like) > near(used) {
                dead.extend(like);
            }
        }
        dead
    }
}
