//! Who wins. Highest first: facts of the step; variables that the site file
//! forces; options that name the value itself, such as `rdzv=`; the user's own
//! variables; what follows from another option given for this step, such as
//! `debug` or `cache=`; the container image's; NCCL's files; the site file; its
//! profile, and words that it switched on; the fabric; the profile. Lists are
//! merged by key, the higher one's keys win.
//!
//! Facts of the step are set where they are decided (`ranks`, `rendezvous`);
//! everything else is offered here and settled once.

use crate::facts::Environment;
use crate::facts::task::Container;

use super::checks::{From, Value};
use super::marks::Marks;
use super::{Facts, Origin, Plan, Variable, catalog, merge};
use crate::config::Settings;

/// Where an offer stands, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// The profile, or what follows from step and node.
    Profile,
    /// The network's kind.
    Fabric,
    /// What the site file adds to the profile: variables of a profile of its own,
    /// and the words debug and deterministic.
    AddOn,
    /// The site file.
    Site,
    /// What follows from an option given for this step: above what an image
    /// brings along, below the user's variables, which say it more exactly.
    Chosen,
    /// An option that names the value itself.
    Option,
    /// The site file by `force`.
    Forced,
}

/// One candidate for a variable.
#[derive(Debug, Clone)]
struct Offer {
    name: String,
    /// None: deliberately nothing.
    value: Option<String>,
    layer: Layer,
    origin: Origin,
    why: String,
}

/// All candidates.
#[derive(Debug, Default)]
pub struct Offers(Vec<Offer>);

impl Offers {
    /// Offers a value.
    pub fn value(
        &mut self,
        layer: Layer,
        origin: Origin,
        name: &str,
        value: impl Into<String>,
        why: impl Into<String>,
    ) {
        let (name, value, why) = (name.into(), Some(value.into()), why.into());
        self.0.push(Offer { name, value, layer, origin, why });
    }

    /// A value of the profile.
    pub fn profile(&mut self, name: &str, value: impl Into<String>, why: impl Into<String>) {
        self.value(Layer::Profile, Origin::Profile, name, value, why);
    }

    /// A value that follows from the step or the node, to be had unless anybody
    /// says otherwise.
    pub fn derived(&mut self, name: &str, value: impl Into<String>, why: impl Into<String>) {
        self.value(Layer::Profile, Origin::Step, name, value, why);
    }

    /// Not setting it is a decision too, and has a reason.
    pub fn nothing(&mut self, name: &str, why: impl Into<String>) {
        let (name, why) = (name.into(), why.into());
        self.0.push(Offer { name, value: None, layer: Layer::Profile, origin: Origin::Profile, why });
    }
}

/// What somebody else has set a variable to, and who.
pub fn given(facts: &Facts, marks: &Marks, name: &str) -> Option<(String, From)> {
    let current = marks.users(facts.environment, name);
    if let Some(submitted) = facts.submitted.filter(|_| catalog::put_back(name)) {
        if let Some(users) = marks.users(submitted, name) {
            return Some((users.into(), From::User));
        }
        if let Some(image) = current {
            return Some((image.into(), From::Image));
        }
    } else if let Some(users) = current {
        return Some((users.into(), From::User));
    }
    let file = facts.task.nccl_files.iter().find(|value| value.name == name)?;
    Some((file.value.clone(), From::File(file.file.clone())))
}

/// What a variable will be after all that has been offered so far; not for lists.
pub fn winner(offers: &Offers, facts: &Facts, marks: &Marks, name: &str) -> Option<String> {
    // As in settle: the highest, and of two of one layer the later one.
    let best = offers.0.iter().filter(|offer| offer.name == name && offer.value.is_some()).max_by_key(|o| o.layer);
    match (given(facts, marks, name), best) {
        (Some((_, from)), Some(best)) if above(best, &from) => best.value.clone(),
        (Some((own, _)), _) => Some(own),
        (None, best) => best.and_then(|best| best.value.clone()),
    }
}

/// Takes one offer for each variable, and says what became of the others.
pub(super) fn settle(plan: &mut Plan, facts: &Facts, marks: &Marks, offers: &Offers) {
    let mut names: Vec<&str> = Vec::new();
    for offer in &offers.0 {
        if !names.contains(&offer.name.as_str()) {
            names.push(&offer.name);
        }
    }
    for name in &names {
        // Facts stand above everything.
        if plan.value(name).is_some() {
            continue;
        }
        let mut list: Vec<&Offer> = offers.0.iter().filter(|offer| offer.name == *name).collect();
        // The highest first; of two of one layer the later one.
        list.reverse();
        list.sort_by_key(|offer| std::cmp::Reverse(offer.layer));
        settle_one(plan, facts, marks, name, &list);
    }
    put_back(plan, facts, marks, &names);
    let stale = marks.names().filter(|name| marks.ours(facts.environment, name));
    for name in stale.map(String::from).collect::<Vec<_>>() {
        if plan.value(&name).is_none() && !plan.unset.iter().any(|note| note.name == name) {
            plan.unset(&name, "of the step this one was started from");
        }
    }
}

fn settle_one(plan: &mut Plan, facts: &Facts, marks: &Marks, name: &str, list: &[&Offer]) {
    let given = given(facts, marks, name);
    let best = list.iter().find(|offer| offer.value.is_some());
    let (Some(best), Some(value)) = (best, best.and_then(|offer| offer.value.as_deref())) else {
        match given {
            Some((value, from)) => keep(plan, facts, name, &value, &from, None),
            None => plan.leave(name, list.first().map_or("", |offer| offer.why.as_str())),
        }
        return;
    };
    if let Some(kind) = merge::kind(name).filter(|_| best.layer != Layer::Forced) {
        let offers = list.iter().filter_map(|offer| offer.value.as_deref());
        let values: Vec<&str> = given.iter().map(|(value, _)| value.as_str()).chain(offers).collect();
        let merged = merge::merge(kind, &values);
        match given {
            // An empty one is a decision, too.
            Some((own, from)) if own == merged || own.trim().is_empty() => {
                keep(plan, facts, name, &own, &from, Some((value, who(best))));
            }
            // Not marked as ours: an srun in this step takes the whole for the user's,
            // and nothing of it is lost.
            Some((_, from)) => {
                let origin = if from == From::Image { Origin::Image } else { Origin::User };
                let why = format!("{}, with what else the {} has: {}", whose(&from), who(best), best.why);
                plan.set(name, merged, origin, why);
            }
            None => plan.set(name, merged, best.origin, best.why.clone()),
        }
        return;
    }
    match given {
        Some((own, from)) if !above(best, &from) => keep(plan, facts, name, &own, &from, Some((value, who(best)))),
        Some((own, from)) if own != value && best.layer == Layer::Forced => {
            plan.set(name, value, best.origin, best.why.clone());
            plan.warn(
                "site-force",
                format!(
                    "{} gives way to {}, which the site file forces",
                    Value { name: name.into(), value: own, from }.shown(),
                    Value { name: name.into(), value: value.into(), from: From::Ours }.shown()
                ),
                format!("ask the cluster's admins, who wrote it ({})", best.why),
            );
        }
        Some((own, from)) if own != value && from != From::User => {
            let own = crate::config::printable(&own);
            plan.set(name, value, best.origin, format!("{} (instead of {own}, {})", best.why, whose(&from)));
        }
        _ => plan.set(name, value, best.origin, best.why.clone()),
    }
}

fn above(offer: &Offer, given: &From) -> bool {
    offer.layer >= if *given == From::User { Layer::Option } else { Layer::Chosen }
}

fn who(offer: &Offer) -> String {
    match offer.layer {
        Layer::Site | Layer::Forced if offer.origin == Origin::Site => "site file".into(),
        _ => offer.origin.name().into(),
    }
}

fn whose(from: &From) -> &'static str {
    match from {
        From::Image => "the image's",
        From::File(_) => "of NCCL's file",
        _ => "yours",
    }
}

/// Leaves what somebody else set, which for the user's own may mean to put it
/// back over the image's.
fn keep(plan: &mut Plan, facts: &Facts, name: &str, value: &str, from: &From, instead: Option<(&str, String)>) {
    let instead = match &instead {
        Some((other, who)) if *other != value => format!(" (the {who} would set {other})"),
        _ => String::new(),
    };
    match from {
        From::User if facts.environment.get(name) != Some(value) => {
            restore(plan, facts, name, value);
        }
        From::File(file) => plan.leave_value(name, value, format!("NCCL finds it in {file}, kept{instead}")),
        From::Image => plan.leave_value(name, value, format!("the container image's, kept{instead}")),
        _ => plan.leave_value(name, value, format!("yours, kept{instead}")),
    }
}

/// Puts the user's value back. One that is not UTF-8 is known only in part.
fn restore(plan: &mut Plan, facts: &Facts, name: &str, value: &str) {
    if value.contains(char::REPLACEMENT_CHARACTER) {
        plan.leave(name, "yours is not UTF-8 and cannot be put back: the container image's stays");
    } else {
        plan.set(name, value, Origin::User, restored(facts.environment, name));
    }
}

fn restored(environment: &Environment, name: &str) -> String {
    match environment.get(name) {
        Some(_) if crate::report::is_secret(name) => "yours, put back: the container image has another".into(),
        Some(image) => format!("yours, put back: the container image has {}", crate::config::printable(image)),
        None => "yours, put back: the container had removed it".into(),
    }
}

/// The user's values that the container's image replaced, of variables nobody
/// else has offered anything for.
fn put_back(plan: &mut Plan, facts: &Facts, marks: &Marks, settled: &[&str]) {
    let Some(submitted) = facts.submitted.filter(|_| facts.task.container == Container::Inside) else {
        return;
    };
    for (name, value) in submitted.iter() {
        let changed = facts.environment.get(name) != Some(value);
        if changed
            && !settled.contains(&name)
            && plan.value(name).is_none()
            && catalog::put_back(name)
            && marks.users(submitted, name).is_some()
        {
            restore(plan, facts, name, value);
        }
    }
}

/// What others set of the catalog's tuning and caches and nobody else spoke of:
/// it is part of what the rank gets.
pub(super) fn name_the_rest(plan: &mut Plan, values: &[Value]) {
    for value in values.iter().filter(|value| value.from != From::Ours && catalog::put_back(&value.name)) {
        let name = value.name.as_str();
        if plan.value(name).is_some() || plan.left.iter().any(|note| note.name == name) {
            continue;
        }
        match &value.from {
            From::File(file) => plan.leave_value(name, &value.value, format!("NCCL finds it in {file}")),
            From::Image => plan.leave_value(name, &value.value, "the container image's"),
            _ => plan.leave_value(name, &value.value, "yours"),
        }
    }
}

/// The key from which a variable that the node must be able to follow has its value:
/// whoever is to correct it looks for that word.
fn key(settings: &Settings, variable: &Variable) -> Option<String> {
    let of = |key: &str| if settings.is_of_site(key) { " of the site file" } else { "" };
    let iface = settings.iface.as_deref()?;
    let follows = match variable.name.as_str() {
        "NCCL_SOCKET_IFNAME" => variable.value.strip_prefix('=') == Some(iface),
        "GLOO_SOCKET_IFNAME" => variable.value == iface,
        _ => false,
    };
    follows.then(|| format!("iface={}{}", crate::config::printable(iface), of("iface")))
}

/// Every variable as the rank's programs will find it, with who set it.
pub(super) fn values(plan: &Plan, facts: &Facts, settings: &Settings, marks: &Marks) -> Vec<Value> {
    let mut values: Vec<Value> = Vec::new();
    for variable in &plan.env {
        let from = match (variable.origin, key(settings, variable)) {
            (Origin::User, _) => From::User,
            (Origin::Image, _) => From::Image,
            (Origin::Site | Origin::Option, Some(key)) => From::Key(key),
            (Origin::Site, None) => From::Site("the site file".into()),
            _ => From::Ours,
        };
        values.push(Value { name: variable.name.clone(), value: variable.value.clone(), from });
    }
    let set_by_others = facts.environment.iter().map(|(name, _)| name);
    let in_files = facts.task.nccl_files.iter().map(|value| value.name.as_str());
    for name in set_by_others.chain(in_files) {
        if plan.value(name).is_some() || plan.unset.iter().any(|note| note.name == name) {
            continue;
        }
        if let Some((value, from)) = given(facts, marks, name)
            && !values.iter().any(|known| known.name == name)
        {
            values.push(Value { name: name.into(), value, from });
        }
    }
    values
}
