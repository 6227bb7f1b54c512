//! Decides what a rank gets, with a reason for every decision. Pure: no input
//! or output, no clock, no randomness, so that `palingenesis explain` shows what
//! a job gets by construction.

pub mod agent;
pub mod binding;
pub mod caches;
pub mod catalog;
pub mod checks;
mod container;
pub mod environment;
pub mod exits;
pub mod fabric;
pub mod failure;
pub mod gids;
pub mod launch;
pub mod launcher;
pub mod marks;
pub mod merge;
pub mod netmatch;
pub mod precedence;
pub mod preflight;
pub mod ranks;
pub mod release;
pub mod rendezvous;
pub mod sockets;
mod threads;
pub mod warmup;
pub mod worker;

use serde::Serialize;
use thiserror::Error;

use crate::config::Settings;
use crate::config::site::{SiteProfile, SiteVariable, SiteView};
use crate::facts::network::{Interface, Resolution};
use crate::facts::task::{Container, MemoryFacts, Peers, UserBound};
use crate::facts::{CpuSet, Environment, Machine, NodeFacts, Rank0, Step, TaskFacts, Topology};

pub use binding::Binding;
use checks::Subject;
pub use launch::Shape;
use marks::Marks;
use precedence::{Layer, Offers};
pub use rendezvous::RendezvousError;
pub use worker::{LaunchPlan, WorkerError};

/// Everything a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The task's place in its step.
    pub step: &'a Step,
    /// The task's environment as Slurm and the user made it.
    pub environment: &'a Environment,
    /// The command and its arguments.
    pub command: &'a [String],
    /// The node.
    pub node: &'a NodeFacts,
    /// What srun said of rank 0.
    pub rank0: &'a Rank0,
    /// How the host that [`rendezvous::wanted`] names resolves on this node.
    pub resolution: &'a Resolution,
    /// This node's interfaces; empty where they are not known.
    pub interfaces: &'a [Interface],
    /// What the task finds where it runs.
    pub task: &'a TaskFacts,
    /// The environment as it was submitted, where a container plugin may have
    /// changed it since.
    pub submitted: Option<&'a Environment>,
    /// What the site file says of this partition and node.
    pub site: Option<&'a SiteView>,
    /// The port that the nodes' pre-flight settled on.
    pub port: Option<u16>,
    /// The secret by which the workers of this launch know each other.
    pub store_key: Option<&'a str>,
    /// When srun started this launch, nanoseconds since 1970.
    pub launched: Option<u64>,
}

static UNKNOWN_NODE: NodeFacts = NodeFacts {
    gpu_models: Vec::new(),
    ephemeral_ports: None,
    rdma: None,
    gids: Vec::new(),
    netdevs: None,
    topology: Topology {
        gpus: Vec::new(),
        nics: Vec::new(),
        nodes: Vec::new(),
        online: CpuSet::EMPTY,
        isolated: CpuSet::EMPTY,
        default_route: None,
    },
    machine: Machine { driver: None, lanes: Vec::new(), mtus: Vec::new(), verbs: Vec::new() },
    unknown: Vec::new(),
};
static UNKNOWN_TASK: TaskFacts = TaskFacts {
    cpus: None,
    nccl_files: Vec::new(),
    container: Container::None,
    container_keeps: Vec::new(),
    start: None,
    directories: Vec::new(),
    locks: Vec::new(),
    memlock: None,
    open_files: None,
    stack: None,
    shm: None,
    imex: None,
    gids: None,
    mask: None,
    memory: MemoryFacts { allowed: None, has_policy: None },
    gpus_hidden: Vec::new(),
    cores: Vec::new(),
    overlay: None,
    peers: Peers::NotAsked,
    bound_by_user: UserBound { cpu: None, mem: None },
    unknown: Vec::new(),
};
static UNKNOWN_RANK0: Rank0 = Rank0 { host: None, address: None };

impl<'a> Facts<'a> {
    /// A task's step and environment, and nothing else known.
    pub fn new(step: &'a Step, environment: &'a Environment) -> Facts<'a> {
        Facts {
            step,
            environment,
            command: &[],
            node: &UNKNOWN_NODE,
            rank0: &UNKNOWN_RANK0,
            resolution: &Resolution::NotTried,
            interfaces: &[],
            task: &UNKNOWN_TASK,
            submitted: None,
            site: None,
            port: None,
            store_key: None,
            launched: None,
        }
    }

    /// The environment as the user knows it. A container's image, or its
    /// runtime's hooks, may have put ranks and a MASTER_ADDR into the task's
    /// (enroot's 50-slurm-pytorch.sh does), which are nobody's wish.
    fn users(&self) -> &'a Environment {
        self.submitted.unwrap_or(self.environment)
    }
}

/// Who decided a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A fact of the step.
    Step,
    /// `--palingenesis=…` or its environment equivalent.
    Option,
    /// The user's exported variable.
    User,
    /// The container image.
    Image,
    /// The site file.
    Site,
    /// The profile.
    Profile,
    /// The network's kind.
    Fabric,
}

impl Origin {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Step => "step",
            Origin::Option => "option",
            Origin::User => "user",
            Origin::Image => "image",
            Origin::Site => "site",
            Origin::Profile => "profile",
            Origin::Fabric => "fabric",
        }
    }
}

/// A variable that the task gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Who decided it.
    pub origin: Origin,
    /// Why, in one line.
    pub why: String,
}

/// A variable that is removed, or something that is deliberately left alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Note {
    /// The variable.
    pub name: String,
    /// The value it keeps, where somebody else set it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why, in one line.
    pub why: String,
}

/// How bad a warning is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It cannot start, or certainly fails: refused, unless `checks=` says otherwise.
    Error,
    /// Probably not what was meant.
    Warning,
    /// Good to know.
    Info,
}

/// Something the user should know, that stops nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Stable name of the rule.
    pub id: &'static str,
    /// How bad.
    pub severity: Severity,
    /// What, and why it matters.
    pub message: String,
    /// What to do.
    pub cure: String,
}

impl Warning {
    fn soften(&mut self) {
        if self.severity == Severity::Error {
            self.severity = Severity::Warning;
        }
    }
}

/// The step, and this rank's place in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StepPlan {
    /// Slurm job id (the leader's in a het job).
    pub job_id: u32,
    /// Slurm step id.
    pub step_id: u32,
    /// What the tasks are.
    pub shape: Shape,
    /// The environment's profile, with what is added to it.
    pub profile: String,
    /// The network between the nodes; "auto" where it is not known.
    pub fabric: &'static str,
    /// Number of nodes.
    pub nodes: u32,
    /// The step's nodes as Slurm writes them.
    pub node_list: String,
    /// Number of ranks.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
    /// This rank among the node's.
    pub local_rank: u32,
    /// Ranks on this node.
    pub local_world_size: u32,
    /// Index of this node in the step.
    pub node_rank: u32,
    /// NodeName of this node.
    pub node: String,
    /// Where rank 0 listens; absent without ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub master_addr: Option<String>,
    /// The port rank 0 listens on; absent without ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub master_port: Option<u16>,
    /// The ports to try in this order when rank 0 finds one taken; the same on
    /// every node. One only when the user named it.
    pub ports: Vec<u16>,
}

/// What one rank gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The step and the rank's place.
    pub step: StepPlan,
    /// The program that is started instead of the command, if one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch: Option<LaunchPlan>,
    /// Where the rank runs: its GPU, CPUs, memory and network cards.
    pub binding: Binding,
    /// Variables that are set.
    pub env: Vec<Variable>,
    /// Variables that are removed.
    pub unset: Vec<Note>,
    /// Variables that are deliberately left as they are.
    pub left: Vec<Note>,
    /// What the user should know.
    pub warnings: Vec<Warning>,
}

/// Why there is no plan: the job would not work.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// MASTER_ADDR or MASTER_PORT cannot work.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// palingenesis-worker cannot be started.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A profile of the site file that this node's does not have.
    #[error("profile {name} is not in the site file of {node}; the site's files differ: tell the cluster's admins")]
    NoSuchProfile {
        /// As given.
        name: String,
        /// This node.
        node: String,
    },
    /// Checks that found errors.
    #[error("{}", shown(.0))]
    Checks(Vec<Warning>),
}

/// Each finding as a sentence, joined to one line.
fn shown(found: &[Warning]) -> String {
    let sentence = |warning: &Warning| {
        let Warning { id, message, cure, .. } = warning;
        format!("{message}; {cure} (--palingenesis={id}=warn would start it all the same)")
    };
    found.iter().map(sentence).collect::<Vec<_>>().join(" | ")
}

/// The plan for the rank that `facts` are about.
///
/// # Errors
/// When the step could not start right.
pub fn plan(facts: &Facts, settings: &Settings) -> Result<Plan, Refusal> {
    let merged = facts.site.map(|site| site.under(settings));
    let (spec, settings) = (settings, merged.as_ref().unwrap_or(settings));
    let step = facts.step;
    let marks = Marks::of(facts.environment);
    let shape = launch::shape(settings, facts.command, step.pty, step.terminal, step.one_task_on_each_node());
    let site_profile = site_profile(facts, settings)?;
    let wanted = environment::Wanted {
        profile: site_profile.map_or(settings.profile, |profile| profile.base),
        debug: settings.debug || site_profile.is_some_and(|profile| profile.debug),
        deterministic: settings.deterministic || site_profile.is_some_and(|profile| profile.deterministic),
        debug_asked: spec.debug,
        deterministic_asked: spec.deterministic,
    };
    let mut profile = settings.profile_name().to_string();
    for (word, given) in [("debug", wanted.debug), ("deterministic", wanted.deterministic)] {
        if given {
            profile.push(',');
            profile.push_str(word);
        }
    }
    let mut plan = Plan {
        step: StepPlan {
            job_id: step.job_id,
            step_id: step.step_id,
            shape,
            profile,
            fabric: fabric::fabric(facts, settings).0.name(),
            nodes: step.nodes(),
            node_list: step.node_list.clone(),
            world_size: step.world_size,
            rank: step.rank,
            local_rank: step.local_rank,
            local_world_size: step.local_world_size,
            node_rank: step.node_rank,
            node: step.node.clone(),
            master_addr: None,
            master_port: None,
            ports: Vec::new(),
        },
        launch: None,
        binding: Binding::default(),
        env: Vec::new(),
        unset: Vec::new(),
        left: Vec::new(),
        warnings: Vec::new(),
    };
    ranks::decide(&mut plan, facts, &marks);
    rendezvous::decide(&mut plan, facts, settings, &marks)?;
    ranks::name_the_launch(&mut plan, facts, &marks);
    worker::decide(&mut plan, facts, settings)?;
    let mut offers = Offers::default();
    environment::offer(&mut offers, facts, &plan.step, wanted);
    fabric::offer(&mut offers, facts, settings);
    offer_site(&mut offers, facts, site_profile);
    let share = binding::decide(&mut plan, &mut offers, facts, settings);
    let ranks_per_task = agent::offer(&mut offers, facts, &plan.step, settings, &marks);
    threads::offer(&mut offers, facts, shape, ranks_per_task, share);
    caches::offer(&mut offers, facts, settings, &marks);
    gids::offer(&mut offers, facts, settings, &marks);
    sockets::offer(&mut offers, facts, settings, &marks, plan.step.master_addr.as_deref());
    precedence::settle(&mut plan, facts, &marks, &offers);
    container::decide(&mut plan, facts, &marks);
    for unknown in facts.node.unknown.iter().chain(&facts.task.unknown) {
        plan.inform("facts-unknown", unknown.clone(), "what follows from it is left as if it were not there");
    }
    let values = precedence::values(&plan, facts, settings, &marks);
    let subject = Subject {
        command: facts.command,
        nodes: Some(step.nodes()),
        tasks: Some(step.world_size),
        tasks_on_a_node: Some(step.most_tasks_on_a_node()),
        shape: Some(shape),
        step: Some(step),
        node: Some(facts.node),
        task: Some(facts.task),
        ..Subject::of_values(&values, settings)
    };
    checks::decide(&mut plan, &subject);
    precedence::name_the_rest(&mut plan, &values);
    marks::decide(&mut plan, spec, facts.site);
    let errors: Vec<Warning> = plan.warnings.iter().filter(|w| w.severity == Severity::Error).cloned().collect();
    if errors.is_empty() { Ok(plan) } else { Err(Refusal::Checks(errors)) }
}

/// The profile of the site file that is wanted, if one is.
fn site_profile<'a>(facts: &Facts<'a>, settings: &Settings) -> Result<Option<&'a SiteProfile>, Refusal> {
    let Some(name) = &settings.site_profile else {
        return Ok(None);
    };
    let found = facts.site.and_then(|site| site.profiles.get(name));
    found.map(Some).ok_or_else(|| Refusal::NoSuchProfile { name: name.clone(), node: facts.step.node.clone() })
}

/// The site file's variables, and those of its profile.
fn offer_site(offers: &mut Offers, facts: &Facts, profile: Option<&SiteProfile>) {
    let mut offer = |variable: &SiteVariable, default: Layer| {
        let layer = if variable.force { Layer::Forced } else { default };
        offers.value(layer, Origin::Site, &variable.name, &variable.value, &variable.place);
    };
    for variable in profile.iter().flat_map(|profile| &profile.env) {
        offer(variable, Layer::AddOn);
    }
    for variable in facts.site.iter().flat_map(|site| &site.env) {
        offer(variable, Layer::Site);
    }
}

impl Plan {
    fn set(&mut self, name: &str, value: impl Into<String>, origin: Origin, why: impl Into<String>) {
        self.env.push(Variable { name: name.into(), value: value.into(), origin, why: why.into() });
    }

    fn unset(&mut self, name: &str, why: impl Into<String>) {
        self.unset.push(Note { name: name.into(), value: None, why: why.into() });
    }

    fn leave(&mut self, name: &str, why: impl Into<String>) {
        self.left.push(Note { name: name.into(), value: None, why: why.into() });
    }

    fn leave_value(&mut self, name: &str, value: &str, why: impl Into<String>) {
        self.left.push(Note { name: name.into(), value: Some(value.into()), why: why.into() });
    }

    fn warn(&mut self, id: &'static str, message: String, cure: impl Into<String>) {
        self.warnings.push(Warning { id, severity: Severity::Warning, message, cure: cure.into() });
    }

    fn inform(&mut self, id: &'static str, message: String, cure: impl Into<String>) {
        self.warnings.push(Warning { id, severity: Severity::Info, message, cure: cure.into() });
    }

    /// The value the plan gives `name`, if it sets it.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.env.iter().find(|variable| variable.name == name).map(|variable| variable.value.as_str())
    }
}

#[cfg(test)]
mod precedence_tests;
#[cfg(test)]
mod site_tests;
#[cfg(test)]
pub(crate) mod tests;
