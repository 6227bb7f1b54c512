//! Gives a rank its CPUs and its memory policy, in the forked task and as the
//! user, before it becomes the program: both survive exec, and nothing is
//! allocated or started in the wrong place first.
//!
//! What the kernel does not grant is told and left. That costs speed; a refusal
//! would cost the job. So it is with `mem=bind` too: the site file may have it
//! for every job, and a container's seccomp filter that forbids set_mempolicy
//! would then end them all.

use crate::plan::Plan;
use crate::report;
use crate::system::affinity;
use crate::system::mempolicy::{self, Outcome};

/// Applies the rank's binding; a line for each part that could not be.
pub fn apply(plan: &Plan) -> Vec<String> {
    let (binding, step) = (&plan.binding, &plan.step);
    let mut lines = Vec::new();
    let mut told = |what: String, why: String, stays: &str, off: &str| {
        lines.push(report::one_line(&format!(
            "palingenesis: warning: {what} of rank {} on {} could not be set: {why}; its {stays} as Slurm left it: tell \
             the cluster's admins, or do without by {off}",
            step.rank, step.node
        )));
    };
    if let Some(cpus) = &binding.cpus
        && let Err(error) = affinity::set_mask(cpus)
    {
        told(format!("the CPUs {cpus}"), error.to_string(), "mask is", "--palingenesis=bind=off");
    }
    if let Some(policy) = &binding.memory {
        let outcome = if policy.strict { mempolicy::bind(&policy.nodes) } else { mempolicy::prefer(&policy.nodes) };
        match outcome {
            // A kernel that can prefer one node only takes memory beside the CPU that
            // asks for it, which is as good here.
            Ok(Outcome::Set | Outcome::NotOffered) => {}
            Err(error) => {
                let what = format!("the memory policy (NUMA nodes {})", policy.nodes);
                told(what, error.to_string(), "policy is", "--palingenesis=mem=off");
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;
    use crate::facts::{CpuSet, Environment, Step};
    use crate::plan::binding::MemoryPolicy;
    use crate::plan::{Binding, Facts, plan};

    fn bound(cpus: Option<CpuSet>, memory: Option<MemoryPolicy>) -> Plan {
        let step = Step::described("n[1-2]", "2(x2)", 3, 7, 0).unwrap();
        let environment = Environment::default();
        let plan = plan(&Facts::new(&step, &environment), &Settings::default()).unwrap();
        Plan { binding: Binding { cpus, memory, decisions: Vec::new() }, ..plan }
    }

    /// In a thread of its own: both belong to threads.
    #[test]
    fn what_is_planned_is_set_and_what_cannot_be_is_told() {
        std::thread::spawn(|| {
            let all = affinity::mask().unwrap();
            let one = CpuSet::from_iter(all.iter().take(1));
            let node = MemoryPolicy { strict: true, nodes: CpuSet::from_iter([0]) };
            assert_eq!(apply(&bound(Some(one.clone()), Some(node.clone()))), Vec::<String>::new());
            assert_eq!(affinity::mask(), Some(one.clone()));
            assert_eq!(mempolicy::policy(), Some(mempolicy::Policy::Bind(node.nodes)));
            // Nothing is planned: nothing changes.
            assert_eq!(apply(&bound(None, None)), Vec::<String>::new());
            assert_eq!(affinity::mask(), Some(one.clone()));

            let nowhere = CpuSet::from_iter([4000]);
            let lines = apply(&bound(Some(nowhere.clone()), Some(MemoryPolicy { strict: false, nodes: nowhere })));
            let [cpus, memory] = &lines[..] else { panic!("{lines:?}") };
            for part in [
                "warning: the CPUs 4000 of rank 3 on n2 could not be set: ",
                "its mask is as Slurm left it",
                "bind=off",
            ] {
                assert!(cpus.contains(part), "{cpus}");
            }
            for part in ["warning: the memory policy (NUMA nodes 4000) of rank 3 on n2 could not be set: ", "mem=off"] {
                assert!(memory.contains(part), "{memory}");
            }
            assert_eq!(affinity::mask(), Some(one));
        })
        .join()
        .unwrap();
    }
}
