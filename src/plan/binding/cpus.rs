//! The CPUs of a rank. Slurm's default distribution is cyclic over sockets, so
//! that a task's mask is often on the other socket than its GPU; intersecting
//! would leave nothing. The node's masks are exchanged among its ranks instead:
//! each CPU keeps exactly one owner. Only a mask that several ranks share, which
//! is how it is without CPU binding, is narrowed to the CPUs beside the GPU.
//!
//! Every rank works out the whole node's arrangement from the same masks and
//! GPUs, and takes its own place in it.

use std::collections::BTreeSet;

use crate::config::{Settings, Switch};
use crate::facts::task::{Peer, Peers};
use crate::facts::{CpuSet, Topology};

use super::super::{Facts, Plan, Shape};
use super::assignment;

/// The most ranks of a node among which masks are exchanged: the time grows with
/// their number's third power.
const MOST: usize = 128;

/// With so many CPUs a rank may lose more than half of its share of the step's
/// for having them all beside its GPU.
const ENOUGH: u32 = 8;

/// More than any distance in firmware's table, which has a byte for each.
const WORTH: u32 = 256;

/// What a changed mask gives OpenMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) struct Share {
    /// CPUs of the mask.
    pub cpus: u32,
    /// Ranks that have the same.
    pub ranks: u32,
}

/// A rank as it came: its mask, and the CPUs beside its GPUs; none where those
/// are not known, and then it keeps its mask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seat {
    pub mask: CpuSet,
    pub near: CpuSet,
    /// The CPUs of NUMA nodes, with what one of them is worth: the more the nearer
    /// the node is to the GPUs', below [`WORTH`]. Of masks with as many CPUs
    /// beside the GPU the nearer one is the better.
    pub around: Vec<(CpuSet, u32)>,
}

/// What a mask has become.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum How {
    /// Its rank takes no part.
    Apart,
    /// Unchanged, whatever of it is beside the GPU.
    Kept,
    /// It was that of this local rank.
    Exchanged(usize),
    /// What is beside the GPU of this mask, which several ranks share.
    Narrowed(CpuSet),
    /// Whole cores of that.
    Split(CpuSet),
    /// Unchanged, since too little of it is beside the GPU; how many it would need.
    TooFew(u32),
}

/// Where a rank goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub mask: CpuSet,
    pub how: How,
    /// Ranks that share these CPUs, with this one.
    pub ranks: u32,
    /// Why `exclusive` gives it no cores of its own.
    pub unsplit: Option<String>,
}

/// What the arrangement depends on beside the ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wishes<'a> {
    /// Whether ranks that share CPUs get whole cores of their own.
    pub exclusive: bool,
    /// The CPUs of each core.
    pub cores: &'a [CpuSet],
    /// The CPUs that each task asked for.
    pub per_task: Option<u32>,
}

/// Arranges the node's ranks.
///
/// # Errors
/// Why all masks stay.
pub(crate) fn arrange(seats: &[Seat], wishes: &Wishes) -> Result<Vec<Place>, String> {
    if seats.len() > MOST {
        return Err(format!("{} ranks are on the node, and masks are exchanged among {MOST} at most", seats.len()));
    }
    for (rank, one) in seats.iter().enumerate() {
        let odd = |other: &Seat| one.mask != other.mask && one.mask.meets(&other.mask);
        if let Some(other) = seats[..rank].iter().position(odd) {
            return Err(format!(
                "the masks of local ranks {other} and {rank} overlap in part ({}; {})",
                seats[other].mask, one.mask
            ));
        }
    }
    let mut places: Vec<Place> = seats
        .iter()
        .map(|seat| {
            let part = !seat.near.is_empty() && !seat.mask.is_empty();
            let how = if part { How::Kept } else { How::Apart };
            Place { mask: seat.mask.clone(), how, ranks: 1, unsplit: None }
        })
        .collect();
    exchange(seats, &mut places);
    narrow(seats, &mut places, wishes);
    Ok(places)
}

/// Hands masks of one size round among the ranks that take part, so that as many
/// CPUs as can be are beside their rank's GPU, and as few ranks as can be change.
fn exchange(seats: &[Seat], places: &mut [Place]) {
    let part = |rank: &usize| places[*rank].how != How::Apart;
    let sizes: BTreeSet<u32> = (0..seats.len()).filter(part).map(|rank| seats[rank].mask.len()).collect();
    for size in sizes {
        let members: Vec<usize> = (0..seats.len())
            .filter(|rank| places[*rank].how != How::Apart && seats[*rank].mask.len() == size)
            .collect();
        // Without Slurm's binding all have the same: nothing to exchange.
        if members.iter().all(|rank| seats[*rank].mask == seats[members[0]].mask) {
            continue;
        }
        // The most that what is around can count for all of them together; 2^29.
        let around = i64::from(WORTH) * i64::from(size) * members.len() as i64;
        let worth = |rank: usize, mask: usize| {
            let (rank, mask) = (&seats[members[rank]], &seats[members[mask]].mask);
            let nearness = |(cpus, each): &(CpuSet, u32)| i64::from(common(mask, cpus)) * i64::from(*each);
            let near = i64::from(common(mask, &rank.near)) * around + rank.around.iter().map(nearness).sum::<i64>();
            // Ties go to the mask the rank has.
            near * (members.len() as i64 + 1) + i64::from(*mask == rank.mask)
        };
        let worth: Vec<Vec<i64>> =
            (0..members.len()).map(|rank| (0..members.len()).map(|mask| worth(rank, mask)).collect()).collect();
        let chosen = assignment::best(members.len(), |rank, mask| worth[rank][mask]);
        for (place, mask) in chosen.into_iter().enumerate() {
            let (rank, from) = (members[place], members[mask]);
            if seats[from].mask != seats[rank].mask {
                places[rank].mask = seats[from].mask.clone();
                places[rank].how = How::Exchanged(from);
            }
        }
    }
}

/// Narrows masks that several ranks share, or that of the only rank, to what is
/// beside the GPU.
fn narrow(seats: &[Seat], places: &mut [Place], wishes: &Wishes) {
    let masks: BTreeSet<CpuSet> = places.iter().map(|place| place.mask.clone()).collect();
    for mask in masks {
        let sharing: Vec<usize> = (0..places.len()).filter(|rank| places[*rank].mask == mask).collect();
        let ranks = sharing.len() as u32;
        if mask.is_empty() || (ranks == 1 && places.len() > 1) {
            continue;
        }
        let part: Vec<(usize, CpuSet)> = sharing
            .iter()
            .filter(|rank| places[**rank].how != How::Apart)
            .map(|rank| (*rank, mask.and(&seats[*rank].near)))
            .collect();
        for rank in &sharing {
            places[*rank].ranks = ranks;
        }
        for (rank, beside) in &part {
            let others = part.iter().filter(|(_, other)| other.meets(beside)).count() as u32;
            let fair = (mask.len() / ranks / 2).min(ENOUGH);
            let need = wishes.per_task.unwrap_or(1).max(fair).saturating_mul(others).max(1);
            let place = &mut places[*rank];
            if beside.is_empty() || *beside == mask {
                continue;
            }
            if beside.len() < need {
                place.how = How::TooFew(need);
            } else {
                *place = Place { mask: beside.clone(), how: How::Narrowed(mask.clone()), ranks: others, unsplit: None };
            }
        }
        if wishes.exclusive && ranks > 1 {
            split(&part, places, wishes);
        }
    }
}

/// Gives ranks with the same CPUs beside their GPUs whole cores of them, as many
/// each, and of what remains one to each of the first.
fn split(part: &[(usize, CpuSet)], places: &mut [Place], wishes: &Wishes) {
    let part: Vec<&(usize, CpuSet)> = part.iter().filter(|(rank, beside)| places[*rank].mask == *beside).collect();
    let groups: BTreeSet<&CpuSet> = part.iter().map(|(_, beside)| beside).collect();
    for beside in &groups {
        let ranks: Vec<usize> = part.iter().filter(|(_, other)| other == *beside).map(|(rank, _)| *rank).collect();
        let apart = groups.iter().all(|other| other == beside || !other.meets(beside));
        let shares = if apart {
            shares(beside, ranks.len(), wishes)
        } else {
            Err("ranks with other GPUs have some of these CPUs beside theirs".to_string())
        };
        match shares {
            Ok(shares) => {
                for (rank, share) in ranks.into_iter().zip(shares) {
                    if share != places[rank].mask {
                        places[rank] =
                            Place { mask: share, how: How::Split((*beside).clone()), ranks: 1, unsplit: None };
                    }
                }
            }
            Err(why) => ranks.into_iter().for_each(|rank| places[rank].unsplit = Some(why.clone())),
        }
    }
}

/// The cores of `beside` in so many parts. A core of which only some threads are
/// in it counts as a core.
fn shares(beside: &CpuSet, ranks: usize, wishes: &Wishes) -> Result<Vec<CpuSet>, String> {
    let mut cores: Vec<CpuSet> = Vec::new();
    let mut rest = beside.clone();
    for core in wishes.cores {
        let core = core.and(&rest);
        if !core.is_empty() {
            rest = rest.without(&core);
            cores.push(core);
        }
    }
    if !rest.is_empty() {
        return Err(format!("which of the CPUs {rest} are one core is not known"));
    }
    if cores.len() < ranks {
        return Err(format!("{} cores are too few for {ranks} ranks", cores.len()));
    }
    cores.sort_by_key(|core| core.iter().next());
    let (each, more) = (cores.len() / ranks, cores.len() % ranks);
    let mut cores = cores.into_iter();
    let mut take = |count: usize| cores.by_ref().take(count).fold(CpuSet::EMPTY, |all, core| all.or(&core));
    let shares: Vec<CpuSet> = (0..ranks).map(|rank| take(each + usize::from(rank < more))).collect();
    let fewest = shares.iter().map(CpuSet::len).min().unwrap_or_default();
    match wishes.per_task.filter(|asked| fewest < *asked) {
        Some(asked) => Err(format!("{fewest} CPUs would be fewer than the {asked} that each task asked for")),
        None => Ok(shares),
    }
}

/// How many numbers both hold.
fn common(one: &CpuSet, two: &CpuSet) -> u32 {
    one.words().iter().zip(two.words()).map(|(one, two)| (one & two).count_ones()).sum()
}

/// The CPUs beside these GPUs that a program can use.
///
/// # Errors
/// Why they are not known.
pub(super) fn beside(topology: &Topology, gpus: &[usize]) -> Result<CpuSet, String> {
    let mut near = CpuSet::EMPTY;
    for gpu in gpus {
        let Some(gpu) = topology.gpus.get(*gpu) else {
            return Err("its GPU is not among the node's".into());
        };
        let place = &gpu.place;
        // Without a NUMA node the kernel calls every CPU local.
        let Some(numa) = place.numa else {
            return Err(format!("the kernel does not tell which NUMA node GPU {} is on", place.address));
        };
        let of_node = topology.nodes.iter().find(|node| node.id == numa).map(|node| &node.cpus);
        let cpus = Some(&place.cpus).filter(|cpus| !cpus.is_empty()).or(of_node);
        match cpus.filter(|cpus| !cpus.is_empty()) {
            Some(cpus) => near = near.or(cpus),
            None => return Err(format!("NUMA node {numa} of GPU {} has no CPUs", place.address)),
        }
    }
    if !topology.online.is_empty() {
        near = near.and(&topology.online);
    }
    near = near.without(&topology.isolated);
    if near.is_empty() {
        return Err(format!("the CPUs beside {} are offline or isolated", named(topology, gpus)));
    }
    Ok(near)
}

/// "GPU 0000:1b:00.0".
fn named(topology: &Topology, gpus: &[usize]) -> String {
    let addresses = gpus.iter().filter_map(|gpu| Some(topology.gpus.get(*gpu)?.place.address.to_string()));
    let addresses: Vec<String> = addresses.collect();
    format!("GPU{} {}", if addresses.len() == 1 { "" } else { "s" }, addresses.join(", "))
}

fn cpus(number: u32) -> String {
    format!("{number} CPU{}", if number == 1 { "" } else { "s" })
}

/// Whether CPUs and memory of this task are to be those beside its GPUs.
///
/// # Errors
/// Why not.
pub(super) fn bound_to<'a>(
    facts: &Facts,
    shape: Shape,
    gpus: &'a Result<Vec<usize>, String>,
) -> Result<&'a [usize], String> {
    if shape == Shape::Agent {
        return Err("the ranks that the task's launcher starts spread over its CPUs".into());
    }
    match gpus {
        Err(why) => Err(why.clone()),
        Ok(gpus) if gpus.is_empty() => Err("it has no GPU".into()),
        Ok(gpus) if gpus.len() > 1 && facts.step.local_world_size == 1 => {
            Err(format!("one task with {} GPUs: what it starts for each spreads over its CPUs", gpus.len()))
        }
        Ok(gpus) => Ok(gpus),
    }
}

/// The mask and what is told of it.
pub(super) fn decide(
    plan: &mut Plan,
    facts: &Facts,
    settings: &Settings,
    gpus: &Result<Vec<usize>, String>,
) -> Option<Share> {
    let mask = facts.task.mask.as_ref();
    let shown = mask.map(CpuSet::to_string);
    if !settings.bind.cpu {
        plan.binding.say("cpus", shown, format!("as Slurm set it: bind={}", settings.bind));
        return None;
    }
    let topology = &facts.node.topology;
    let known = bound_to(facts, plan.step.shape, gpus).and_then(|gpus| Ok((gpus, beside(topology, gpus)?)));
    if let Some(user) = &facts.task.bound_by_user.cpu {
        let user = crate::config::printable(user);
        let why = match (mask, &known) {
            (Some(mask), Ok((gpus, near))) => format!(
                "as {user} says: {} of {} are beside {} ({near})",
                common(mask, near),
                cpus(mask.len()),
                named(topology, gpus)
            ),
            _ => format!("as {user} says"),
        };
        plan.binding.say("cpus", shown, why);
        return None;
    }
    let (bound_by, near) = match known {
        Ok(known) => known,
        Err(why) => {
            plan.binding.say("cpus", shown, format!("as Slurm set it: {why}"));
            return None;
        }
    };
    let gpus = named(topology, bound_by);
    let stays = |why: &str| format!("as Slurm set it: {why}; beside {gpus} are {near}");
    let local_rank = facts.step.local_rank as usize;
    let ranks = facts.step.local_world_size as usize;
    let alone;
    let peers = match (&facts.task.peers, mask) {
        // Nobody to meet.
        (Peers::NotAsked, Some(mask)) if ranks == 1 => {
            alone =
                [Peer { mask: mask.clone(), gpus: bound_by.iter().filter_map(|gpu| (*gpu).try_into().ok()).collect() }];
            &alone[..]
        }
        (Peers::Met(peers), _) if peers.len() == ranks && local_rank < ranks => peers,
        (Peers::Met(peers), _) => {
            plan.binding.say("cpus", shown, stays(&format!("{} of the node's {ranks} ranks are known", peers.len())));
            return None;
        }
        (Peers::Incomplete(why), _) => {
            plan.binding.say("cpus", shown, stays(why));
            return None;
        }
        (Peers::NotAsked, _) => {
            let why = format!("the node's ranks share out the step's CPUs when they start; beside {gpus} are {near}");
            plan.binding.say("cpus", shown, why);
            return None;
        }
    };
    let seats: Vec<Seat> = peers.iter().map(|peer| seat(topology, peer)).collect();
    let per_task = facts.environment.get("SLURM_CPUS_PER_TASK").and_then(|cpus| cpus.parse().ok());
    let exclusive = settings.exclusive == Switch::On;
    let places = match arrange(&seats, &Wishes { exclusive, cores: &facts.task.cores, per_task }) {
        Ok(places) => places,
        Err(why) => {
            plan.binding.say("cpus", shown, stays(&why));
            return None;
        }
    };
    let (seat, place) = (&seats[local_rank], &places[local_rank]);
    let mut why = told(seat, place, &gpus, &near);
    if let Some(unsplit) = &place.unsplit {
        why.push_str(&format!("; exclusive does nothing: {unsplit}"));
    }
    plan.binding.say("cpus", Some(place.mask.to_string()), why);
    warn_of_far_ranks(plan, facts, peers, &seats, &places);
    if Some(&place.mask) == mask {
        return None;
    }
    plan.binding.cpus = Some(place.mask.clone());
    if facts.environment.iter().any(|(name, _)| name.starts_with("SLURM_CPU_BIND")) {
        let why = "as srun set it: the rank's mask is another one now, see BOUND";
        plan.leave("SLURM_CPU_BIND and the like", why);
    }
    Some(Share { cpus: place.mask.len(), ranks: place.ranks })
}

fn seat(topology: &Topology, peer: &Peer) -> Seat {
    let gpus: Vec<usize> = peer.gpus.iter().map(|gpu| usize::from(*gpu)).collect();
    let near = if gpus.is_empty() { CpuSet::EMPTY } else { beside(topology, &gpus).unwrap_or_default() };
    let around = if near.is_empty() { Vec::new() } else { around(topology, &gpus) };
    Seat { mask: peer.mask.clone(), near, around }
}

/// The NUMA nodes' CPUs by their distance from the GPUs'.
fn around(topology: &Topology, gpus: &[usize]) -> Vec<(CpuSet, u32)> {
    let own = |gpu: &usize| topology.gpus.get(*gpu)?.place.numa;
    let own: Vec<u32> = gpus.iter().filter_map(own).collect();
    let from = |id: u32| topology.nodes.iter().find(|node| node.id == id);
    let distance = |to: u32| {
        let of = |id: &u32| from(*id)?.distances.iter().find(|(node, _)| *node == to).map(|(_, distance)| *distance);
        own.iter().filter_map(of).min()
    };
    let nodes = topology.nodes.iter().map(|node| {
        let usable = node.cpus.without(&topology.isolated);
        (usable, WORTH.saturating_sub(distance(node.id).unwrap_or(WORTH)).min(WORTH - 1))
    });
    nodes.collect()
}

/// The row's reason.
fn told(seat: &Seat, place: &Place, gpus: &str, near: &CpuSet) -> String {
    let (has, of) = (common(&place.mask, near), cpus(place.mask.len()));
    match &place.how {
        How::Apart => "as Slurm set it: the mask is not known".into(),
        How::Kept if has == place.mask.len() => format!("as Slurm set it: beside {gpus}"),
        How::Kept => {
            format!("as Slurm set it: {has} of {of} are beside {gpus} ({near}), and no exchange in the node gives more")
        }
        How::Exchanged(from) => {
            let had = common(&seat.mask, near);
            format!(
                "the mask of local rank {from}: {has} of {of} are beside {gpus}, and {had} of {} were{}",
                seat.mask,
                if had == has { ", which are farther away or another rank's now" } else { "" }
            )
        }
        How::Narrowed(all) => match place.ranks {
            1 => format!("those of {all} that are beside {gpus}"),
            ranks => format!("those of {all} that are beside {gpus}; {ranks} ranks share them"),
        },
        How::Split(all) => format!("the rank's own cores of {all}, which are beside {gpus}: exclusive=on"),
        How::TooFew(need) => {
            format!(
                "as Slurm set it: {has} of {of} are beside {gpus} ({near}), too few to be kept to them; {need} would do"
            )
        }
    }
}

/// One line for all ranks of the node: rank 0 alone speaks. Where the step has
/// CPUs beside the GPU, and other ranks need them, the row says so and no more:
/// DGX A100 has two GPUs on every other NUMA node.
fn warn_of_far_ranks(plan: &mut Plan, facts: &Facts, peers: &[Peer], seats: &[Seat], places: &[Place]) {
    let step = seats.iter().fold(CpuSet::EMPTY, |all, seat| all.or(&seat.mask));
    let far = |rank: &usize| match places[*rank].how {
        How::Apart => false,
        // With half of them and one for each rank most threads run where they should.
        How::TooFew(need) => {
            let has = common(&places[*rank].mask, &seats[*rank].near);
            2 * has < need || has < places[*rank].ranks
        }
        _ => !step.meets(&seats[*rank].near),
    };
    let far: Vec<usize> = (0..places.len()).filter(far).collect();
    let Some((first, others)) = far.split_first() else {
        return;
    };
    let (near, mask) = (&seats[*first].near, &places[*first].mask);
    let there = match &places[*first].how {
        How::TooFew(need) => format!("too few to be kept to them ({need} would do), so that its mask stays"),
        _ => "the step has none there".into(),
    };
    let gpus: Vec<usize> = peers[*first].gpus.iter().map(|gpu| usize::from(*gpu)).collect();
    let more = match others {
        [] => String::new(),
        others => {
            let others: Vec<String> = others.iter().map(usize::to_string).collect();
            format!("; the same of local rank{} {}", if others.len() == 1 { "" } else { "s" }, others.join(", "))
        }
    };
    plan.warn(
        "cpus-far",
        format!(
            "local rank {first} on {}: {} of its {} ({mask}) are beside {} ({near}); {there}{more}",
            facts.step.node,
            common(mask, near),
            cpus(mask.len()),
            named(&facts.node.topology, &gpus)
        ),
        "give the job CPUs beside its GPUs: --exclusive for the whole node, or --gres-flags=enforce-binding",
    );
}
