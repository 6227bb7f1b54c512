//! The checks: what is known to be wrong in what the user, the image, NCCL's
//! own files and the site file set, in the command and on the node. Each has an
//! id, by which it can be switched off or made stricter.
//!
//! A check is an error where the job cannot start or certainly fails; all else
//! is a warning, or, where it merely does nothing, a note.

mod caches;
mod launch;
#[cfg(test)]
mod launch_examples;
mod launcher;
mod lists;
mod nccl;
mod node;
#[cfg(test)]
mod node_examples;
#[cfg(test)]
mod ordinary_jobs;
mod tools;
mod torch;
pub(super) mod version;

pub use node::ENOUGH_LOCKED;

use serde_json::json;

use crate::config::{CheckLevel, Settings};
use crate::facts::policy::Policy;
use crate::facts::{NodeFacts, Step, TaskFacts};

use super::{Plan, Severity, Shape, Warning};

/// When a check has what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// In srun before it asks for anything: variables alone.
    Environment,
    /// In srun once the step is laid out: command and layout.
    Launch,
    /// On the node, in the task.
    Node,
    /// On rank 0's node, of what all nodes bring to the pre-flight.
    Between,
}

impl Phase {
    /// For people.
    pub fn when(self) -> &'static str {
        match self {
            Phase::Environment => "in srun before the step starts, and on the node; sbatch and salloc only warn",
            Phase::Launch => "in srun when the step is laid out, and on the node",
            Phase::Node => "on the node, before the rank starts",
            Phase::Between => "between the nodes, before the ranks start",
        }
    }
}

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Its name, for good.
    pub id: &'static str,
    /// When it can be decided.
    pub phase: Phase,
    /// The worst it finds.
    pub severity: Severity,
    /// What it looks for, in one line.
    pub looks_for: &'static str,
    /// Looks.
    pub run: fn(&Subject, &mut Findings),
}

impl Rule {
    const fn new(
        id: &'static str,
        phase: Phase,
        severity: Severity,
        looks_for: &'static str,
        run: fn(&Subject, &mut Findings),
    ) -> Rule {
        Rule { id, phase, severity, looks_for, run }
    }

    fn text(&self) -> String {
        let Rule { id, looks_for, .. } = self;
        let stricter = format!("{id}=off does not look; {id}=error stops the job at what it finds");
        let (says, switch) = match self.severity {
            Severity::Error => (
                "an error, at which the job does not start; a warning where that is less certain",
                format!("{id}=off does not look; {id}=warn starts the job all the same"),
            ),
            Severity::Warning => ("a warning", stricter),
            Severity::Info => ("a note: it does no harm", stricter),
        };
        format!(
            "{id}, a check\n  looks for {looks_for}\n  says      {says}\n  when      {}\n  switch    {switch}\n  where     \
             --palingenesis=SPEC, PALINGENESIS_OPT_{}=…, or [rules] of the site file\n",
            self.phase.when(),
            id.replace('-', "_").to_ascii_uppercase(),
        )
    }
}

/// Checks that the plan makes where it decides the value they are about.
const ELSEWHERE: &[Rule] = &[
    elsewhere(
        "ranks-stale",
        Phase::Node,
        Severity::Warning,
        "rank variables and TORCHELASTIC_* from elsewhere that are not this step's; they are replaced or removed",
    ),
    elsewhere(
        "variable-passed-over",
        Phase::Node,
        Severity::Info,
        "your MASTER_ADDR or MASTER_PORT that gives way to an option",
    ),
    elsewhere(
        "name-not-checked",
        Phase::Node,
        Severity::Warning,
        "a name of rank 0's host that could not be looked up in time",
    ),
    elsewhere(
        "port-range",
        Phase::Node,
        Severity::Warning,
        "a MASTER_PORT in the kernel's range for outgoing connections, where it may be taken",
    ),
    elsewhere("facts-unknown", Phase::Node, Severity::Info, "something of the node that could not be read"),
    elsewhere(
        "hca-far",
        Phase::Node,
        Severity::Warning,
        "your NCCL_IB_HCA that takes cards of storage or management too, which only their place tells apart",
    ),
    elsewhere("cpus-far", Phase::Node, Severity::Warning, "ranks without CPUs beside their GPU"),
    elsewhere("site-force", Phase::Node, Severity::Warning, "your variable that gives way to one the site file forces"),
    elsewhere(
        "container-order",
        Phase::Node,
        Severity::Warning,
        "a container plugin behind ours, whose image's variables replace what we set",
    ),
];

/// A check that looks where the plan is made.
pub(super) const fn elsewhere(id: &'static str, phase: Phase, severity: Severity, looks_for: &'static str) -> Rule {
    Rule::new(id, phase, severity, looks_for, |_, _| {})
}

/// Mistakes that no check finds, and why: they are seen to elsewhere, or show on
/// a GPU only.
pub const UNDECIDED: &[(&str, &str)] = &[
    ("elastic-leak", "cured: TORCHELASTIC_* is taken out of every rank's environment, and ranks-stale names it"),
    ("master-loopback", "refused where MASTER_ADDR is settled, in srun or on the node, whatever checks= says"),
];

/// Every check that looks by itself.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    [nccl::RULES, torch::RULES, launch::RULES, launcher::RULES, node::RULES, caches::RULES].into_iter().flatten()
}

/// The ids of all checks, which are keys of SPEC and of the site file.
pub fn ids() -> impl Iterator<Item = &'static str> {
    all().map(|rule| rule.id)
}

fn all() -> impl Iterator<Item = &'static Rule> {
    rules().chain(ELSEWHERE).chain(super::preflight::rules())
}

/// What is known of the check with that id, as text that ends in a newline.
pub fn text(id: &str) -> Option<String> {
    if let Some((id, reason)) = UNDECIDED.iter().find(|(undecided, _)| *undecided == id) {
        return Some(format!("{id}, no check of its own\n  why       {reason}\n"));
    }
    all().find(|rule| rule.id == id).map(Rule::text)
}

/// The same for programs.
pub fn json(id: &str) -> Option<serde_json::Value> {
    if let Some((id, reason)) = UNDECIDED.iter().find(|(undecided, _)| *undecided == id) {
        return Some(json!({"name": id, "kind": "check", "severity": null, "why": reason}));
    }
    let rule = all().find(|rule| rule.id == id)?;
    Some(json!({
        "name": rule.id,
        "kind": "check",
        "severity": rule.severity,
        "looks_for": rule.looks_for,
        "when": rule.phase.when(),
    }))
}

/// Who set a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum From {
    /// The user.
    User,
    /// The container's image, or a plugin before us.
    Image,
    /// One of NCCL's files; its name.
    File(String),
    /// The site file; where.
    Site(String),
    /// A key of SPEC from which the value follows, as people write it, and who gave it
    /// where that was not the user: `iface=eth1 of the site file`.
    Key(String),
    /// We, by profile, option or step.
    Ours,
}

/// A variable as the rank's programs will find it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Who set it.
    pub from: From,
}

impl Value {
    /// `NAME=value`, with who set it where that is not the user; a secret's value
    /// is not shown.
    pub fn shown(&self) -> String {
        let value = if crate::report::is_secret(&self.name) {
            "(hidden)".into()
        } else {
            crate::config::printable(&self.value)
        };
        match &self.from {
            From::User | From::Ours => format!("{}={value}", self.name),
            From::Image => format!("{}={value} of the container image", self.name),
            From::File(place) | From::Site(place) => format!("{}={value} in {place}", self.name),
            From::Key(key) => format!("{key} ({}={value})", self.name),
        }
    }
}

/// What the checks look at. What is not known yet is absent.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The variables.
    pub values: &'a [Value],
    /// The settings.
    pub settings: &'a Settings,
    /// The command and its arguments; empty when not known.
    pub command: &'a [String],
    /// The number of nodes of the step.
    pub nodes: Option<u32>,
    /// The number of tasks of the step.
    pub tasks: Option<u32>,
    /// The most tasks on one node.
    pub tasks_on_a_node: Option<u32>,
    /// What the tasks are.
    pub shape: Option<Shape>,
    /// This task's place in the step.
    pub step: Option<&'a Step>,
    /// The node.
    pub node: Option<&'a NodeFacts>,
    /// The task.
    pub task: Option<&'a TaskFacts>,
    /// What srun does when a rank or node fails, with slurm.conf's word where its own say
    /// nothing; in srun only.
    pub policy: Option<Policy>,
}

impl<'a> Subject<'a> {
    /// Variables alone.
    pub fn of_values(values: &'a [Value], settings: &'a Settings) -> Subject<'a> {
        Subject {
            values,
            settings,
            command: &[],
            nodes: None,
            tasks: None,
            tasks_on_a_node: None,
            shape: None,
            step: None,
            node: None,
            task: None,
            policy: None,
        }
    }

    /// What somebody else than we set `name` to.
    pub fn given(&self, name: &str) -> Option<&'a Value> {
        self.values.iter().find(|value| value.name == name && value.from != From::Ours)
    }

    /// What `name` will be, whoever set it.
    pub fn value(&self, name: &str) -> Option<&'a str> {
        self.values.iter().find(|value| value.name == name).map(|value| value.value.as_str())
    }

    /// Whether the step is known to have several nodes.
    pub fn several_nodes(&self) -> bool {
        self.nodes.is_some_and(|nodes| nodes > 1)
    }
}

/// The longest message, and cure, of a finding in characters: a value may list
/// thousands of words that are none. A cure may name a path of 1024 bytes twice.
const LONGEST: usize = 3000;

/// Collects what one check finds.
#[derive(Debug, Default)]
pub struct Findings {
    id: &'static str,
    list: Vec<Warning>,
}

impl Findings {
    /// Those of one check.
    pub(super) fn of(id: &'static str) -> Findings {
        Findings { id, list: Vec::new() }
    }

    /// What was found.
    pub(super) fn into_list(self) -> Vec<Warning> {
        self.list
    }

    /// It cannot start, or certainly fails.
    pub fn error(&mut self, message: impl Into<String>, cure: impl Into<String>) {
        self.add(Severity::Error, message.into(), cure.into());
    }

    /// Probably not what was meant.
    pub fn warn(&mut self, message: impl Into<String>, cure: impl Into<String>) {
        self.add(Severity::Warning, message.into(), cure.into());
    }

    /// It does nothing.
    pub fn inform(&mut self, message: impl Into<String>, cure: impl Into<String>) {
        self.add(Severity::Info, message.into(), cure.into());
    }

    fn add(&mut self, severity: Severity, message: String, cure: String) {
        let cut = |text: String| match text.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        };
        self.list.push(Warning { id: self.id, severity, message: cut(message), cure: cut(cure) });
    }
}

/// What the checks of these phases find, as severe as they say.
pub fn look(subject: &Subject, phases: &[Phase]) -> Vec<Warning> {
    let mut findings = Findings::default();
    if subject.settings.checks == CheckLevel::Off && subject.settings.rules.is_empty() {
        return findings.list;
    }
    let tool = tools::is_one(subject.command);
    let nccl_runs = !tool && subject.node.is_none_or(|node| !node.gpu_models.is_empty());
    for rule in rules().filter(|rule| phases.contains(&rule.phase)) {
        if tool && tools::NEEDS_NOT.contains(&rule.id) {
            continue;
        }
        findings.id = rule.id;
        let before = findings.list.len();
        (rule.run)(subject, &mut findings);
        // Where no NCCL runs nothing of it fails for certain.
        if !nccl_runs && node::OF_NCCL.contains(&rule.id) {
            findings.list[before..].iter_mut().for_each(Warning::soften);
        }
    }
    findings.list
}

/// What the settings make of findings: off drops one, warn takes the error out
/// of it, and error, given for one check, refuses whatever it finds.
pub fn judge(found: Vec<Warning>, settings: &Settings) -> Vec<Warning> {
    found
        .into_iter()
        .filter_map(|mut warning| {
            let by_id = settings.rules.get(warning.id).copied();
            match by_id.unwrap_or(settings.checks) {
                CheckLevel::Off if by_id.is_some() || ids().any(|id| id == warning.id) => return None,
                CheckLevel::Warn if warning.severity == Severity::Error => warning.severity = Severity::Warning,
                CheckLevel::Error if by_id.is_some() => warning.severity = Severity::Error,
                _ => {}
            }
            Some(warning)
        })
        .collect()
}

/// Whether the command may train: it is none of those that only look at a node.
pub(super) fn trains(command: &[String]) -> bool {
    !tools::is_one(command)
}

/// Runs every check on a rank's plan and adds what they find.
pub(super) fn decide(plan: &mut Plan, subject: &Subject) {
    let found = look(subject, &[Phase::Environment, Phase::Launch, Phase::Node]);
    if tools::is_one(subject.command) {
        plan.warnings.retain(|warning| !tools::NEEDS_NOT.contains(&warning.id));
    }
    plan.warnings.extend(found);
    plan.warnings = judge(std::mem::take(&mut plan.warnings), subject.settings);
}

#[cfg(test)]
mod examples;
#[cfg(test)]
mod tests;
