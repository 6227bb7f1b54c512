//! Which of the GPUs it sees a rank uses: the contract of torchrun, Megatron, JAX
//! and Lightning is that local rank i takes visible GPU i.

use super::super::Facts;
use super::{Binding, visible};

/// The GPUs of this rank, as indexes of the node's: one, or the several of a rank
/// that has more.
///
/// # Errors
/// Why it is not known, in words that follow "not bound: ".
pub fn of_this_rank(facts: &Facts) -> Result<Vec<usize>, String> {
    visible::visible(facts)
}

/// The row for people.
pub(super) fn report(binding: &mut Binding, facts: &Facts, gpus: &Result<Vec<usize>, String>) {
    let address = |gpu: &usize| Some(facts.node.topology.gpus.get(*gpu)?.place.address.to_string());
    match gpus {
        Ok(gpus) => {
            let addresses: Vec<String> = gpus.iter().filter_map(address).collect();
            binding.say("gpu", Some(addresses.join(", ")), "the GPU that programs take by LOCAL_RANK");
        }
        Err(why) => binding.say("gpu", None, why),
    }
}
