//! Hooks in slurmstepd itself. Nothing here may fail, wait or panic through:
//! slurmstepd would take the step, or the node, with it. What goes wrong is kept
//! for task_init.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::gate::Gate;
use super::host::Handle;
use super::kept::lock;
use super::{Arguments, Failure, task};
use crate::config::Plugstack;
use crate::facts::container::Place;
use crate::facts::{Environment, NodeFacts};

/// What the tasks need of their node; forked tasks inherit it.
#[derive(Debug, Default)]
pub struct Node {
    /// The node's facts.
    pub facts: NodeFacts,
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
}

static NODE: Mutex<Option<Node>> = Mutex::new(None);
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
        *lock(&NODE) = Some(Node { gate: Some(gate), ..Node::default() });
        if let Some(fault) = fault {
            return Err(fault);
        }
    }
    Ok(true)
}

/// As the user, once per step and node, before the tasks are forked.
pub fn user_init(handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    // The gate first: with it a failure below still stops the ranks together.
    if !open_gate(handle)? {
        return Ok(());
    }
    let plugstack = Plugstack::parse(arguments.iter()).map_err(|error| Failure::Refused(error.to_string()))?;
    let facts = NodeFacts::read(&plugstack.root);
    let submitted = handle.environment()?;
    if let Some(node) = lock(&NODE).as_mut() {
        node.facts = facts;
        node.limit = plugstack.gate;
        node.submitted = submitted;
        node.outside = Some(Place::here());
        node.worker = plugstack.worker;
    }
    Ok(())
}

/// As root, when a task has ended.
pub fn task_exit(handle: Handle) -> Result<(), Failure> {
    if !active() {
        return Ok(());
    }
    let task = handle.task_id()?;
    with_node(|node| {
        if let Some(gate) = node.and_then(|node| node.gate.as_ref()) {
            gate.gone(task);
        }
    });
    Ok(())
}

/// As root, when the step has ended.
pub fn exit() -> Result<(), Failure> {
    if active() {
        *lock(&NODE) = None;
    }
    Ok(())
}
