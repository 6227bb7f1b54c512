//! Which of the GPUs it sees a rank uses: the contract of torchrun, Megatron, JAX
//! and Lightning is that local rank i takes visible GPU i.
//!
//! GPUs stay visible: NCCL reaches a GPU by NVLink only if it sees it
//! (<https://github.com/NVIDIA/nccl/issues/1066>). `isolate=env` is for programs
//! that take the first GPU they see.

use std::ops::Range;

use crate::config::{Isolate, Settings};
use crate::facts::CpuSet;

use super::super::marks::Marks;
use super::super::precedence::Offers;
use super::super::{Facts, Origin, Plan, Shape, launch};
use super::nics::NodeNics;
use super::visible;

/// A rank's part of the GPUs it sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Its GPUs, as indexes of the node's.
    pub gpus: Vec<usize>,
    /// Where they stand among those it sees: CUDA's numbers.
    pub place: Range<usize>,
    /// How many it sees.
    pub visible: usize,
    /// How it came to them.
    pub rule: Sharing,
}

/// How a rank came to its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// It sees no other.
    Only,
    /// As many GPUs as ranks.
    Number,
    /// More GPUs than ranks: as many for each.
    Part,
    /// Fewer GPUs than ranks, which are told apart by `isolate=env`.
    Several,
    /// One task on the node: what it starts shares them all, and is bound by no one
    /// of them.
    All,
}

/// `r`'s part of `visible` GPUs among `ranks` on the node.
fn part(visible: usize, r: usize, ranks: usize, isolated: bool) -> Result<(Range<usize>, Sharing), String> {
    let from = |r: usize| r.saturating_mul(visible) / ranks.max(1);
    match visible {
        0 => Err("the task sees no GPU".into()),
        1 => Ok((0..1, Sharing::Only)),
        _ if ranks == 1 => Ok((0..visible, Sharing::All)),
        _ if visible == ranks => Ok((r..r + 1, Sharing::Number)),
        _ if visible > ranks => Ok((from(r)..from(r + 1), Sharing::Part)),
        _ if isolated => Ok((from(r)..from(r) + 1, Sharing::Several)),
        _ => Err(format!("{ranks} ranks share {visible} GPUs, and which rank takes which is the program's to say")),
    }
}

/// The rank's part.
///
/// # Errors
/// Why it is not known, in words that follow "not bound: ".
pub fn share(facts: &Facts, settings: &Settings, shape: Shape) -> Result<Share, String> {
    match shape {
        Shape::Agent => return Err("the node's GPUs belong to the ranks that the launcher starts".into()),
        Shape::Shell => return Err("a shell is no rank".into()),
        Shape::Native | Shape::Worker => {}
    }
    let visible = visible::visible(facts, settings)?;
    let (r, ranks) = (facts.step.local_rank as usize, facts.step.local_world_size as usize);
    // Without device cgroups `--gpu-bind=none` of Slurm 22.05 shows a task the
    // whole node, whichever GPUs its step has (measured).
    if let Some(given) = of_the_step(facts).filter(|given| *given < visible.len()) {
        return Err(format!(
            "the task sees {} GPUs, and its step has {given} of them, Slurm does not say which",
            visible.len()
        ));
    }
    let isolated = isolates(facts, settings, &visible).is_ok();
    let (place, rule) = part(visible.len(), r, ranks, isolated)?;
    let gpus = visible.get(place.clone()).map(<[usize]>::to_vec).unwrap_or_default();
    if rule == Sharing::Part && !isolated {
        agree(facts, &visible, &place, r)?;
    }
    Ok(Share { gpus, place, visible: visible.len(), rule })
}

/// Of more GPUs than ranks, a program may take those of its part, or by its
/// number as with as many: where both have the same CPUs beside them it does not
/// matter, else nobody but the program knows.
fn agree(facts: &Facts, visible: &[usize], part: &Range<usize>, r: usize) -> Result<(), String> {
    let cpus = |gpu: &usize| facts.node.topology.gpus.get(*gpu).map_or(CpuSet::EMPTY, |gpu| gpu.place.cpus.clone());
    let of_part =
        visible.get(part.clone()).unwrap_or_default().iter().fold(CpuSet::EMPTY, |all, gpu| all.or(&cpus(gpu)));
    match visible.get(r) {
        Some(by_number) if !part.contains(&r) && !cpus(by_number).is_within(&of_part) => Err(format!(
            "the program may take GPU {r}, by LOCAL_RANK, or {}, its part of {}, which are beside other CPUs: \
                 isolate=env, or as many ranks as GPUs, makes it clear",
            (part.start..part.end).map(|gpu| gpu.to_string()).collect::<Vec<_>>().join(" and "),
            visible.len()
        )),
        _ => Ok(()),
    }
}

/// The step's GPUs on this node, where Slurm gave it some.
fn of_the_step(facts: &Facts) -> Option<usize> {
    facts.environment.get("SLURM_GPUS_ON_NODE")?.parse().ok().filter(|gpus| *gpus > 0)
}

/// The GPUs of this rank, as indexes of the node's: one, or the several of a rank
/// that has more.
///
/// # Errors
/// Why nothing is bound by them, in words that follow "not bound: ".
pub fn of_this_rank(facts: &Facts, settings: &Settings) -> Result<Vec<usize>, String> {
    let merged = facts.site.map(|site| site.under(settings));
    let settings = merged.as_ref().unwrap_or(settings);
    let step = facts.step;
    let shape = launch::shape(settings, facts.command, step.pty, step.terminal, step.one_task_on_each_node());
    bound(&share(facts, settings, shape))
}

/// The GPUs that a rank is bound by.
///
/// # Errors
/// See [`of_this_rank`].
pub(super) fn bound(share: &Result<Share, String>) -> Result<Vec<usize>, String> {
    match share {
        Ok(Share { rule: Sharing::All, visible, .. }) => {
            Err(format!("one task on the node: what it starts shares its {visible} GPUs"))
        }
        Ok(share) => Ok(share.gpus.clone()),
        Err(why) => Err(why.clone()),
    }
}

/// Whether `isolate=env` can be done.
///
/// # Errors
/// Why not, in words that follow "not isolated: "; `None`: not asked for.
fn isolates(facts: &Facts, settings: &Settings, visible: &[usize]) -> Result<(), Option<String>> {
    if settings.isolate != Isolate::Env {
        return Err(None);
    }
    if visible::list(facts).is_some_and(|list| !is_slurms(facts, list)) {
        return Err(Some(format!("{} is not Slurm's (SLURM_STEP_GPUS does not fit), kept", visible::LIST)));
    }
    let uuid = |gpu: &usize| facts.node.topology.gpus.get(*gpu).and_then(|gpu| gpu.uuid.as_ref());
    match visible.iter().find(|gpu| uuid(gpu).is_none()) {
        Some(gpu) => Err(Some(format!("the driver does not tell the UUID of {}", address(facts, *gpu)))),
        None => Ok(()),
    }
}

/// Whether Slurm made the list. Where it gives out GPUs it replaces or removes the
/// user's, and names the same GPUs, by other numbers perhaps, in SLURM_STEP_GPUS
/// (measured with 22.05); with `Flags=no_gpu_env` in gres.conf the list stays the
/// user's.
fn is_slurms(facts: &Facts, list: &str) -> bool {
    let marks = Marks::of(facts.environment);
    if marks.of_this_step(facts.environment, facts.step, visible::LIST) {
        return true;
    }
    let count = |list: &str| visible::entries(list).len();
    facts.environment.get("SLURM_STEP_GPUS").is_some_and(|step| count(step) == count(list))
}

fn address(facts: &Facts, gpu: usize) -> String {
    facts.node.topology.gpus.get(gpu).map(|gpu| gpu.place.address.to_string()).unwrap_or_default()
}

fn joined(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(",")
}

/// Isolates the rank where that was asked for, and says which GPU it has.
pub(super) fn decide(
    plan: &mut Plan,
    offers: &mut Offers,
    facts: &Facts,
    settings: &Settings,
    share: &mut Result<Share, String>,
) {
    if let Ok(share) = share {
        isolate(plan, offers, facts, settings, share);
    } else if settings.isolate == Isolate::Env {
        plan.leave(visible::LIST, "isolate=env: which GPU is the rank's is not known, see gpu");
    }
    match share {
        Ok(share) => {
            let value = joined(share.gpus.iter().map(|gpu| address(facts, *gpu)));
            plan.binding.say("gpu", Some(value), policy(facts, share));
        }
        Err(why) => plan.binding.say("gpu", None, why.clone()),
    }
}

/// Which policy is active, and CUDA's number for the GPU.
fn policy(facts: &Facts, share: &Share) -> String {
    let step = facts.step;
    let (r, ranks, visible) = (step.local_rank, step.local_world_size, share.visible);
    let numbers = joined(share.place.clone().map(|index| index.to_string()));
    match share.rule {
        Sharing::Only if ranks > 1 => {
            format!("index 0 of 1: the only GPU it sees, so that its index is 0 while LOCAL_RANK is {r}")
        }
        Sharing::Only => "index 0 of 1: the only GPU it sees".into(),
        Sharing::Number => format!("index {numbers} of {visible}: local rank {r} takes visible GPU {r}"),
        Sharing::Part => format!("index {numbers} of {visible}: {ranks} ranks, each with its part"),
        Sharing::Several => format!("index {numbers} of {visible}: {ranks} ranks share {visible} GPUs"),
        Sharing::All => format!("index {numbers} of {visible}: one task on the node, with all of them"),
    }
}

/// `isolate=env`: full UUIDs, which mean the same under every order and cgroup.
fn isolate(plan: &mut Plan, offers: &mut Offers, facts: &Facts, settings: &Settings, share: &mut Share) {
    let visible = match visible::visible(facts, settings) {
        Ok(visible) => visible,
        Err(_) => return,
    };
    match isolates(facts, settings, &visible) {
        Err(None) => return,
        Err(Some(why)) => return plan.leave(visible::LIST, format!("isolate=env: not isolated: {why}")),
        Ok(()) => {}
    }
    let gpus = &facts.node.topology.gpus;
    let uuids = joined(share.gpus.iter().filter_map(|gpu| gpus.get(*gpu)?.uuid.clone()));
    let instead = visible::list(facts).filter(|list| *list != uuids);
    let instead = instead.map(|list| format!(", of Slurm's {}", crate::config::printable(list))).unwrap_or_default();
    let why = format!("isolate=env: the rank's own GPU{instead}; LOCAL_RANK is no index into it");
    let origin = if settings.is_of_site("isolate") { Origin::Site } else { Origin::Option };
    plan.set(visible::LIST, uuids, origin, why);
    share.place = 0..share.gpus.len();
    share.visible = share.gpus.len();
    if share.rule != Sharing::All {
        let numbers = joined(share.place.clone().map(|index| index.to_string()));
        let why = "isolate=env: JAX would take the number of the task";
        offers.derived("JAX_LOCAL_DEVICE_IDS", numbers, why);
    }
}

/// PALINGENESIS_GPU and the others: what is known of the rank's place, for its
/// scripts.
pub(super) fn tell(plan: &mut Plan, facts: &Facts, nics: &NodeNics, share: &Result<Share, String>) {
    let mut set = |name: &str, value: String, why: &str| {
        if !value.is_empty() {
            plan.set(name, value, Origin::Step, why);
        }
    };
    if let Ok(share) = share {
        let addresses = joined(share.gpus.iter().map(|gpu| address(facts, *gpu)));
        set("PALINGENESIS_GPU", addresses, "the rank's GPU by its PCI address");
        let numbers = joined(share.place.clone().map(|index| index.to_string()));
        set("PALINGENESIS_GPU_INDEX", numbers, "CUDA's number for it in this task: cuda:N");
        let mut names: Vec<String> = Vec::new();
        for nic in share.gpus.iter().filter_map(|gpu| nics.of_gpu.get(*gpu)).flatten() {
            if let Some(nic) = facts.node.topology.nics.get(*nic).filter(|nic| !names.contains(&nic.name)) {
                names.push(nic.name.clone());
            }
        }
        set("PALINGENESIS_NIC", names.join(","), "the network cards that belong to the rank's GPU");
    }
    if let Some(mask) = plan.binding.cpus.as_ref().or(facts.task.mask.as_ref()) {
        let nodes = facts.node.topology.nodes.iter().filter(|node| node.cpus.meets(mask)).map(|node| node.id);
        let nodes = nodes.collect::<CpuSet>().to_string();
        if !nodes.is_empty() {
            plan.set("PALINGENESIS_NUMA", nodes, Origin::Step, "the NUMA nodes of the rank's CPUs");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::visible::tests::gpus;
    use super::*;
    use crate::facts::topology::NumaNode;
    use crate::plan::tests::World;

    const MODEL: &str = "NVIDIA A100-SXM4-80GB";
    const UUIDS: [&str; 4] = [
        "GPU-aaaa0000-0000-0000-0000-000000000000",
        "GPU-bbbb0000-0000-0000-0000-000000000000",
        "GPU-cccc0000-0000-0000-0000-000000000000",
        "GPU-dddd0000-0000-0000-0000-000000000000",
    ];
    const ADDRESSES: [&str; 4] = ["0000:07:00.0", "0000:0b:00.0", "0000:48:00.0", "0000:4c:00.0"];

    /// Local rank `r` of `ranks` on a node with four GPUs.
    fn world(ranks: u32, r: u32, variables: &[(&str, &str)]) -> World {
        let mut world = World::new("n1", &ranks.to_string(), r).export(variables);
        let list: Vec<_> = ADDRESSES.into_iter().zip(UUIDS).map(|(address, uuid)| (address, MODEL, uuid)).collect();
        world.node.topology.gpus = gpus(&list);
        world
    }

    /// What Slurm 22.05 sets for a task that sees `list` of a step with `of` GPUs.
    fn slurm<'a>(list: &'a str, of: &'a str) -> [(&'a str, &'a str); 3] {
        [("CUDA_VISIBLE_DEVICES", list), ("SLURM_STEP_GPUS", list), ("SLURM_GPUS_ON_NODE", of)]
    }

    fn gpu_row(plan: &Plan) -> (Option<String>, String) {
        let row = plan.binding.decisions.iter().find(|row| row.what == "gpu").expect("a row");
        (row.value.clone(), row.why.clone())
    }

    /// For each: ranks, local rank, CUDA_VISIBLE_DEVICES, addresses, numbers.
    #[test]
    fn each_local_rank_has_its_gpu() {
        let table: &[(u32, u32, &str, &[usize], &str)] = &[
            // As many as ranks (torchrun's and Megatron's contract).
            (4, 0, "0,1,2,3", &[0], "0"),
            (4, 3, "0,1,2,3", &[3], "3"),
            (4, 3, "3,2,1,0", &[0], "3"),
            (2, 1, "2,3", &[3], "1"),
            // https://github.com/ACEsuit/mace/issues/435: one for each task.
            (4, 3, "3", &[3], "0"),
            (4, 3, "0", &[0], "0"),
            // https://github.com/NVIDIA/nccl-tests/issues/300: map_gpu:3,1.
            (2, 0, "3", &[3], "0"),
            (2, 1, "1", &[1], "0"),
            // More than ranks.
            (2, 0, "0,1,2,3", &[0, 1], "0,1"),
            (2, 1, "0,1,2,3", &[2, 3], "2,3"),
            (3, 0, "0,1,2,3", &[0], "0"),
            (3, 2, "0,1,2,3", &[2, 3], "2,3"),
            // One task on the node.
            (1, 0, "1,3", &[1, 3], "0,1"),
            (1, 0, "2", &[2], "0"),
        ];
        for (ranks, r, list, expected, numbers) in table {
            let plan = world(*ranks, *r, &[("CUDA_VISIBLE_DEVICES", list)]).plan("").unwrap();
            let addresses = joined(expected.iter().map(|gpu| ADDRESSES[*gpu].to_string()));
            assert_eq!(plan.value("PALINGENESIS_GPU"), Some(addresses.as_str()), "{ranks} {r} {list}");
            assert_eq!(plan.value("PALINGENESIS_GPU_INDEX"), Some(*numbers), "{ranks} {r} {list}");
            assert_eq!(plan.value("LOCAL_RANK"), Some(r.to_string().as_str()));
            assert_eq!(plan.value("CUDA_VISIBLE_DEVICES"), None, "{list}");
            let seen = list.split(',').count();
            for number in numbers.split(',') {
                assert!(number.parse::<usize>().unwrap() < seen, "{ranks} {r} {list}");
            }
            let (value, why) = gpu_row(&plan);
            assert_eq!(value, Some(addresses));
            assert!(why.starts_with(&format!("index {numbers} of {seen}: ")), "{why}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        let why = |world: World, spec: &str| {
            let plan = world.plan(spec).unwrap();
            assert_eq!((plan.value("PALINGENESIS_GPU"), plan.value("PALINGENESIS_GPU_INDEX")), (None, None));
            let (value, why) = gpu_row(&plan);
            assert_eq!(value, None);
            why
        };
        // https://github.com/jax-ml/jax/issues/29669: more tasks than GPUs, on purpose.
        assert!(why(world(8, 5, &slurm("0,1,2,3", "4")), "").contains("8 ranks share 4 GPUs"));
        assert!(why(world(2, 0, &[("CUDA_VISIBLE_DEVICES", "-1")]), "").contains("sees no GPU"));
        assert!(why(world(1, 0, &[]), "launch=agent").contains("the launcher starts"));
        // Slurm 22.05 with --gpu-bind=none on a node that others share.
        assert!(why(world(2, 0, &[("SLURM_GPUS_ON_NODE", "2")]), "").contains("sees 4 GPUs, and its step has 2"));
    }

    /// Two ranks and four GPUs: rank 1 has GPUs 2 and 3 for who divides them, and
    /// GPU 1 for who takes cuda:LOCAL_RANK.
    #[test]
    fn a_part_beside_other_cpus_than_the_gpu_of_that_number_is_not_bound() {
        let bound = |r: u32, cpus: [&str; 4], spec: &str| {
            let mut world = world(2, r, &slurm("0,1,2,3", "4"));
            for (gpu, cpus) in world.node.topology.gpus.iter_mut().zip(cpus) {
                gpu.place.cpus = CpuSet::parse(cpus).unwrap();
            }
            gpu_row(&world.plan(spec).unwrap())
        };
        let (two, one) = (["0-3", "0-3", "4-7", "4-7"], ["0-7"; 4]);
        assert_eq!(bound(0, two, "").0, Some(joined([0, 1].into_iter().map(|gpu: usize| ADDRESSES[gpu].to_string()))));
        let (value, why) = bound(1, two, "");
        assert_eq!(value, None);
        assert!(why.contains("GPU 1, by LOCAL_RANK, or 2 and 3, its part of 4"), "{why}");
        let part = Some(joined([2, 3].into_iter().map(|gpu: usize| ADDRESSES[gpu].to_string())));
        assert_eq!(bound(1, one, "").0, part);
        assert_eq!(bound(1, two, "isolate=env").0, part);
    }

    #[test]
    fn a_lone_task_is_bound_by_none_of_its_gpus() {
        let bound = |variables| {
            let world = world(1, 0, variables);
            let settings = Settings::default();
            let facts = Facts { node: &world.node, ..Facts::new(&world.step, &world.environment) };
            of_this_rank(&facts, &settings)
        };
        assert!(bound(&[]).unwrap_err().contains("shares its 4 GPUs"));
        assert_eq!(bound(&[("CUDA_VISIBLE_DEVICES", "2")]), Ok(vec![2]));
    }

    #[test]
    fn isolated_by_whole_uuids_within_what_slurm_shows() {
        let isolated = |ranks, r, variables: &[(&str, &str)]| {
            let plan = world(ranks, r, variables).plan("isolate=env").unwrap();
            let value = |name| plan.value(name).unwrap_or("-").to_string();
            [value("CUDA_VISIBLE_DEVICES"), value("PALINGENESIS_GPU_INDEX"), value("JAX_LOCAL_DEVICE_IDS")]
        };
        let two = format!("{},{}", UUIDS[2], UUIDS[3]);
        assert_eq!(isolated(4, 3, &slurm("0,1,2,3", "4")), [UUIDS[3], "0", "0"]);
        assert_eq!(isolated(4, 3, &[]), [UUIDS[3], "0", "0"]);
        assert_eq!(isolated(2, 1, &slurm("2,3", "2")), [UUIDS[3], "0", "0"]);
        assert_eq!(isolated(2, 1, &slurm("0,1,2,3", "4")), [two.as_str(), "0,1", "0,1"]);
        // Two ranks on each GPU.
        for (r, gpu) in [0, 0, 1, 1, 2, 2, 3, 3].into_iter().enumerate() {
            assert_eq!(isolated(8, r as u32, &slurm("0,1,2,3", "4")), [UUIDS[gpu], "0", "0"]);
        }
    }

    #[test]
    fn what_cannot_be_isolated_stays_and_says_why() {
        let left = |world: World, spec: &str| {
            let plan = world.plan(spec).unwrap();
            assert_eq!(plan.value("CUDA_VISIBLE_DEVICES"), None, "{spec}");
            let notes = plan.left.iter().filter(|note| note.name == "CUDA_VISIBLE_DEVICES");
            notes.map(|note| note.why.clone()).collect::<Vec<_>>().join("; ")
        };
        let own = [("CUDA_VISIBLE_DEVICES", "3,2,1,0")];
        assert!(left(world(4, 1, &own), "isolate=env").contains("is not Slurm's"));
        // Flags=no_gpu_env: Slurm names GPUs, and leaves the list to the user.
        let both = [("CUDA_VISIBLE_DEVICES", "3,2,1,0"), ("SLURM_STEP_GPUS", "0,1")];
        assert!(left(world(4, 1, &both), "isolate=env").contains("is not Slurm's"));
        let mut unknown = world(4, 1, &slurm("0,1,2,3", "4"));
        unknown.node.topology.gpus[2].uuid = None;
        assert!(left(unknown, "isolate=env").contains("does not tell the UUID of 0000:48:00.0"));
        assert_eq!(left(world(4, 1, &slurm("0,1,2,3", "4")), ""), "");
        assert!(left(world(1, 0, &slurm("0,1,2,3", "4")), "isolate=env,launch=agent").contains("not known"));
    }

    /// A step started inside an isolated one must not take that rank's GPU for its
    /// user's choice, and `palingenesis explain` in a step must find what it has.
    #[test]
    fn our_own_list_belongs_to_its_step() {
        let outer = world(4, 2, &[]).plan("isolate=env").unwrap();
        let inside = |step_id| {
            let mut inner = world(4, 2, &[]);
            inner.step.step_id = step_id;
            for variable in &outer.env {
                inner.environment.set(&variable.name, &variable.value);
            }
            inner
        };
        let plan = inside(1).plan("").unwrap();
        assert_eq!(plan.value("PALINGENESIS_GPU"), Some(ADDRESSES[2]));
        assert_eq!(plan.value("PALINGENESIS_GPU_INDEX"), Some("2"));
        assert!(plan.unset.iter().any(|note| note.name == "CUDA_VISIBLE_DEVICES"), "{:?}", plan.unset);
        let plan = inside(0).plan("isolate=env").unwrap();
        assert_eq!(plan.value("PALINGENESIS_GPU"), Some(ADDRESSES[2]));
        assert_eq!(plan.value("PALINGENESIS_GPU_INDEX"), Some("0"));
        assert_eq!(plan.value("CUDA_VISIBLE_DEVICES"), Some(UUIDS[2]));
        // Without GPUs the facts of the outer step are removed.
        let mut without = inside(1);
        without.node.topology.gpus.clear();
        let plan = without.plan("").unwrap();
        for name in ["PALINGENESIS_GPU", "PALINGENESIS_GPU_INDEX"] {
            assert!(plan.unset.iter().any(|note| note.name == name), "{name}");
        }
    }

    /// <https://github.com/pytorch/pytorch/pull/92315>: by name, whatever the order.
    #[test]
    fn a_gpu_given_by_its_uuid_is_found_by_its_address() {
        for order in [None, Some("FASTEST_FIRST"), Some("PCI_BUS_ID")] {
            let mut world = world(1, 0, &[("CUDA_VISIBLE_DEVICES", "GPU-bbbb")]);
            world.node.topology.gpus[0].model = Some("Quadro P400".into());
            if let Some(order) = order {
                world.environment.set("CUDA_DEVICE_ORDER", order);
            }
            let plan = world.plan("").unwrap();
            assert_eq!(plan.value("PALINGENESIS_GPU"), Some(ADDRESSES[1]), "{order:?}");
            assert_eq!(plan.value("CUDA_DEVICE_ORDER"), order.is_none().then_some("PCI_BUS_ID"));
        }
        // Numbers mean nothing then.
        let mut unlike = world(4, 1, &[("CUDA_DEVICE_ORDER", "FASTEST_FIRST")]);
        unlike.node.topology.gpus[0].model = Some("Quadro P400".into());
        let (value, why) = gpu_row(&unlike.plan("").unwrap());
        assert!(value.is_none() && why.contains("several models"), "{why}");
    }

    #[test]
    fn the_numa_nodes_are_those_of_the_cpus() {
        let mut world = world(4, 0, &[]);
        let cpus = |text: &str| CpuSet::parse(text).unwrap();
        let node = |id, list: &str| NumaNode { id, cpus: cpus(list), distances: Vec::new() };
        world.node.topology.nodes = vec![node(1, "16-31"), node(3, "0-15"), node(8, "32-47")];
        world.task.mask = Some(cpus("0-3,40"));
        assert_eq!(world.plan("bind=off").unwrap().value("PALINGENESIS_NUMA"), Some("3,8"));
        world.task.mask = None;
        assert_eq!(world.plan("bind=off").unwrap().value("PALINGENESIS_NUMA"), None);
    }

    #[test]
    fn every_gpu_belongs_to_a_rank_and_each_number_is_one_that_cuda_has() {
        for ranks in 1..=20usize {
            for visible in 1..=20usize {
                let mut taken = vec![0; visible];
                for r in 0..ranks {
                    let Ok((place, _)) = part(visible, r, ranks, true) else { panic!("{visible} {r} {ranks}") };
                    assert!(!place.is_empty() && place.end <= visible, "{visible} {r} {ranks}: {place:?}");
                    place.for_each(|index| taken[index] += 1);
                }
                assert!(taken.iter().all(|ranks| *ranks > 0), "{visible} {ranks}: {taken:?}");
                if visible >= ranks {
                    assert!(taken.iter().all(|ranks| *ranks == 1), "{visible} {ranks}: {taken:?}");
                }
            }
        }
        assert!(part(0, 0, 1, true).is_err() && part(4, 0, 8, false).is_err());
    }
}
