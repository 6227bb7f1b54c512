//! Hooks in slurmstepd itself. Nothing here may fail, wait or panic through:
//! slurmstepd would take the step, or the node, with it. What goes wrong is kept
//! for task_init.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::exits::{self, Reporter};
use super::gate::Gate;
use super::host::{Handle, SpankError};
use super::kept::{self, lock};
use super::srun::NONCE;
use super::{Arguments, Failure, srun, task};
use crate::act::environment::TaskEnvironment;
use crate::config::site::{self, Site, SiteError};
use crate::config::{LogLevel, Plugstack};
use crate::facts::container::Place;
use crate::facts::straggler::Snapshot;
use crate::facts::{Environment, NodeFacts};
use crate::plan::release;
use crate::system::{child, log};

/// The longest line for the log, in characters.
const LONGEST_LINE: usize = 1500;

/// How long a site file that plugstack.conf names may take.
const SITE_PATIENCE: Duration = Duration::from_secs(5);

/// What stands in the job's environment in place of the launch's secret, which the
/// tasks have from slurmstepd then.
pub const TAKEN: &str = "-";

/// What the tasks need of their node; forked tasks inherit it.
#[derive(Debug, Default)]
pub struct Node {
    /// The node's facts.
    pub facts: NodeFacts,
    /// The node's counters before its tasks existed.
    pub before: Snapshot,
    /// How long reading them took.
    pub read_in: Duration,
    /// Below which facts are read.
    pub root: PathBuf,
    /// Where the tasks meet.
    pub gate: Option<Gate>,
    /// How long they wait there.
    pub limit: Duration,
    /// The job's environment before a container plugin could change it.
    pub submitted: Environment,
    /// Where a process without a container stands; `None` when not looked at.
    pub outside: Option<Place>,
    /// The worker that plugstack.conf names.
    pub worker: Option<String>,
    /// The node's site file.
    pub site: Option<Site>,
    /// Tells srun of ranks that end badly.
    pub exits: Option<Reporter>,
}

static NODE: Mutex<Option<Node>> = Mutex::new(None);
/// The first failure of a hook after the tasks' start.
static FAULT: Mutex<Option<String>> = Mutex::new(None);
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether this step has the flag.
pub fn active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// The node, for a forked task.
pub fn with_node<T>(use_it: impl FnOnce(Option<&Node>) -> T) -> T {
    use_it(lock(&NODE).as_ref())
}

/// Makes the gate, where the step has the flag and there is none yet. Says
/// whether it has the flag.
pub fn open_gate(handle: Handle) -> Result<bool, Failure> {
    if !task::flag_given(handle) {
        return Ok(false);
    }
    ACTIVE.store(true, Ordering::Relaxed);
    if lock(&NODE).is_none() {
        let made = handle.local_tasks().map_err(Failure::from).and_then(|tasks| Ok(Gate::new(tasks)?));
        // Without the count nobody can be waited for, but the ranks still stop together.
        let (gate, fault) = match made {
            Ok(gate) => (gate, None),
            Err(fault) => (Gate::new(0)?, Some(fault)),
        };
        *lock(&NODE) = Some(Node { gate: Some(gate), root: "/".into(), ..Node::default() });
        if let Some(fault) = fault {
            return Err(fault);
        }
    }
    Ok(true)
}

/// Whether a plugin before this one has taken the secret out of this environment. Not
/// inlined, as the next one: merged with their caller's, the comparisons look at bytes
/// that do not count, and valgrind tells of them.
#[inline(never)]
fn is_taken(environment: &Environment) -> bool {
    match NONCE.to_str().ok().and_then(|name| environment.get(name)) {
        Some(secret) => secret == TAKEN,
        None => false,
    }
}

/// Whether this library has it.
#[inline(never)]
fn has_secret() -> bool {
    match lock(&NODE).as_ref() {
        Some(node) if node.exits.is_some() => !is_taken(&node.submitted),
        _ => false,
    }
}

/// As the user, once per step and node, before the tasks are forked.
pub fn user_init(mut handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    // The gate first: with it a failure below still stops the ranks together.
    if !open_gate(handle)? {
        return Ok(());
    }
    let slurmstepd = format!("slurmstepd on {}", srun::own_name());
    release::check(&slurmstepd, handle.release()).map_err(Failure::refused)?;
    let plugstack = Plugstack::parse(arguments.iter()).map_err(Failure::refused)?;
    let start = Instant::now();
    let before = Snapshot::read(&plugstack.root);
    let facts = NodeFacts::read(&plugstack.root);
    let read_in = start.elapsed();
    let submitted = handle.environment()?;
    // The same file twice in plugstack.conf is one library, which has read all this; the
    // secret it would not find again.
    if is_taken(&submitted) && has_secret() {
        return Ok(());
    }
    let reporter = Reporter::new(handle, &submitted, &plugstack.root);
    if handle.has_variable(NONCE) {
        // A TaskEpilog, and whatever else Slurm starts with the job's environment, has no
        // business with it. Where it cannot be taken out it is as it was.
        let _ = handle.set("SLURM_PALINGENESIS_NONCE", TAKEN);
    }
    if let Some(node) = lock(&NODE).as_mut() {
        node.exits = Some(reporter);
        node.facts = facts;
        node.before = before;
        node.read_in = read_in;
        node.root = plugstack.root;
        node.limit = plugstack.gate;
        node.submitted = submitted;
        node.outside = Some(Place::here());
        node.worker = plugstack.worker;
    }
    let site = read_site(plugstack.config).map_err(Failure::refused)?;
    if let Some(node) = lock(&NODE).as_mut() {
        node.site = site;
    }
    Ok(())
}

/// The usual file lies on the node itself; one that the admin names may lie on a
/// file server that does not answer. srun reads its own in the same way.
pub fn read_site(config: Option<String>) -> Result<Option<Site>, SiteError> {
    let Some(file) = config else {
        return Site::named_or_usual(None);
    };
    let answer = child::run(SITE_PATIENCE, || match site::load(&file) {
        Ok(Some(text)) => format!("+{text}").into_bytes(),
        Ok(None) => b"-".to_vec(),
        Err(error) => format!("!{}", error.why()).into_bytes(),
    });
    let answer = answer.map_err(|error| SiteError::of_file(&file, format!("cannot be read: {error}")))?;
    let answer = String::from_utf8_lossy(&answer);
    match (answer.get(..1), answer.get(1..)) {
        (Some("+"), Some(text)) => Site::parse(&file, text).map(Some),
        (Some("!"), Some(why)) => Err(SiteError::of_file(&file, why)),
        _ => Err(SiteError::missing(&file)),
    }
}

/// As root, when a task has ended.
pub fn task_exit(handle: Handle) -> Result<(), Failure> {
    if !active() {
        return Ok(());
    }
    let task = handle.task_id()?;
    with_node(|node| {
        let Some(node) = node else { return Ok(()) };
        // Before the others are woken: the first one closes the gate.
        let stopped = node.gate.as_ref().is_some_and(Gate::is_closed);
        if let Some(gate) = &node.gate {
            gate.gone(task);
        }
        exits::ended(handle, node, task, stopped)
    })
}

/// As root, when the step has ended.
pub fn exit(handle: Handle) -> Result<(), Failure> {
    if active() {
        report(handle);
        *lock(&NODE) = None;
    }
    Ok(())
}

/// Keeps a fault of a hook that can no longer stop anything, for the log.
pub fn remember_fault(line: &str) {
    lock(&FAULT).get_or_insert_with(|| line.to_string());
}

/// Writes the step's line to the node's log, as far as the site file wants one.
pub fn report(handle: Handle) {
    // Once: a second line of plugstack.conf calls us again.
    ACTIVE.store(false, Ordering::Relaxed);
    let fault = lock(&FAULT).take();
    let line = with_node(|node| {
        let gate = node.and_then(|node| node.gate.as_ref());
        let refusal = gate.and_then(Gate::refusal).or_else(kept::first);
        let level = node.and_then(|node| node.site.as_ref()).map(Site::log).unwrap_or_default();
        let bad = refusal.is_some() || fault.is_some();
        let wanted = match level {
            LogLevel::Off => false,
            LogLevel::Error => bad,
            LogLevel::Info | LogLevel::Debug => true,
        };
        wanted.then(|| (bad, step_line(handle, node, level, refusal, fault)))
    });
    if let Some((bad, line)) = line {
        log::write(bad, &line);
    }
}

/// What happened to the step on this node.
fn step_line(
    handle: Handle,
    node: Option<&Node>,
    level: LogLevel,
    refusal: Option<String>,
    fault: Option<String>,
) -> String {
    let number = |item: Result<u32, SpankError>| item.map_or_else(|_| "?".into(), |number| number.to_string());
    let mut line = format!(
        "job={} step={} uid={} ranks={}/{}",
        number(handle.job_id()),
        number(handle.step_id()),
        number(handle.user_id()),
        number(handle.local_tasks()),
        number(handle.tasks()),
    );
    if let Some(summary) = node.and_then(|node| node.gate.as_ref()).and_then(Gate::summary) {
        line.push(' ');
        line.push_str(&summary);
    }
    if let Some(node) = node.filter(|_| level == LogLevel::Debug) {
        let facts = &node.facts;
        let topology = &facts.topology;
        line.push_str(&format!(
            " gpus={} nics={}",
            facts.gpu_models.len().max(topology.gpus.len()),
            topology.nics.len()
        ));
        if let Some(model) = facts.gpu_models.first() {
            line.push_str(&format!(" gpu_model={model:?}"));
        }
        if let Some((low, high)) = facts.ephemeral_ports {
            line.push_str(&format!(" ephemeral_ports={low}-{high}"));
        }
        line.push_str(&format!(" facts_ms={}", node.read_in.as_millis()));
        if let Some(met) = node.gate.as_ref().and_then(Gate::how_they_met) {
            line.push_str(&format!(" met={met:?}"));
        }
        line.push_str(&format!(" unknown={:?}", facts.unknown));
    }
    for (what, text) in [("refused", refusal), ("fault", fault)] {
        if let Some(text) = text {
            let text = text.trim().trim_start_matches("palingenesis: error: ");
            line.push_str(&format!(" {what}: {text}"));
        }
    }
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST_LINE).collect()
}
