//! Which of the fabric's cards belong to each GPU.

use super::super::Distance;
use super::Choice;

/// Which cards belong to which GPU.
pub(super) struct Assigned {
    /// For each GPU its cards.
    pub(super) of_gpu: Vec<Vec<usize>>,
    /// For each GPU whether others have the same cards, since they do not divide
    /// evenly.
    pub(super) uneven: Vec<bool>,
}

impl Choice<'_> {
    /// Which of `nics` belong to each GPU: the nearest; of several equally near
    /// ones as many as there are for each of the GPUs that share them, in the
    /// order of PCI addresses, and where they are too few the least used. Where
    /// they do not divide evenly one of them may be for something else: each GPU
    /// has all then.
    pub(super) fn assign(&self, nics: &[usize]) -> Assigned {
        let mut cards: Vec<usize> = Vec::new();
        let mut functions: Vec<Vec<usize>> = vec![Vec::new(); self.nics.len()];
        for nic in self.order.iter().copied().filter(|nic| nics.contains(nic)) {
            let card = self.cards[nic];
            if functions[card].is_empty() {
                cards.push(card);
            }
            functions[card].push(nic);
        }
        let whole: Vec<usize> = nics.iter().chain(&self.missing).copied().collect();
        let odd = !self.is_even(self.count(&whole));
        let to_card = |gpu: usize, card: usize| self.nearest(gpu, &functions[card]);
        // GPUs with the same nearest cards, the most restricted first.
        let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for gpu in self.gpus_in_order() {
            let least = cards.iter().map(|card| to_card(gpu, *card)).min().unwrap_or(Distance::Unknown);
            let mut nearest = cards.clone();
            nearest.retain(|card| to_card(gpu, *card) == least);
            if least == Distance::Unknown && cards.len() > 1 {
                continue;
            }
            match groups.iter_mut().find(|(cards, _)| *cards == nearest) {
                Some((_, gpus)) => gpus.push(gpu),
                None => groups.push((nearest, vec![gpu])),
            }
        }
        groups.sort_by_key(|(cards, _)| cards.len());
        let mut uses = vec![0usize; self.nics.len()];
        let mut of_gpu = vec![Vec::new(); self.gpus().len()];
        let mut uneven = vec![false; self.gpus().len()];
        for (cards, gpus) in groups.iter().filter(|(cards, _)| !cards.is_empty()) {
            // What is another GPU's own is taken for want of better only.
            let free: Vec<usize> = cards.iter().copied().filter(|card| uses[*card] == 0).collect();
            let too_many = free.len() > gpus.len() && !free.len().is_multiple_of(gpus.len());
            // By sockets alone the one too many may be in a socket where they divide.
            let far = gpus.iter().all(|gpu| to_card(*gpu, cards[0]).grade() >= Distance::Node.grade());
            if too_many || (far && odd && free.len() > 1) {
                free.iter().for_each(|card| uses[*card] += 1);
                for gpu in gpus {
                    uneven[*gpu] = true;
                    of_gpu[*gpu] = free.iter().flat_map(|card| functions[*card].iter().copied()).collect();
                }
                continue;
            }
            let each = (free.len() / gpus.len()).max(1);
            let mut shares: Vec<usize> = Vec::new();
            for _ in 0..each * gpus.len() {
                if let Some(card) = cards.iter().min_by_key(|card| uses[**card]) {
                    uses[*card] += 1;
                    shares.push(*card);
                }
            }
            shares.sort_by_key(|card| cards.iter().position(|other| other == card));
            for (gpu, shares) in gpus.iter().zip(shares.chunks(each)) {
                of_gpu[*gpu] = shares.iter().flat_map(|card| functions[*card].iter().copied()).collect();
            }
        }
        Assigned { of_gpu, uneven }
    }

    fn gpus_in_order(&self) -> Vec<usize> {
        let mut gpus: Vec<usize> = self.gpus().collect();
        gpus.sort_by_key(|gpu| self.view.topology.gpus[*gpu].place.address);
        gpus
    }
}
