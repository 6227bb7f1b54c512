//! task_init: the forked task, as the user, after cgroups, affinity, GPU
//! variables and MPI, before it becomes the user's program. Everything that may
//! fail on a node fails here: the reason on the user's stderr, exit code 78,
//! no node drained, the same under `required` and `optional`.

use std::ffi::CStr;
use std::path::Path;
use std::time::{Duration, Instant};

use super::gate::{Gate, Meeting, Outcome};
use super::host::{self, Handle};
use super::preflight::{self, Known, Start};
use super::slurmstepd::{Node, with_node};
use super::srun::{
    ADDRESS, CONTAINER, CPU_BIND, HANDED_OVER, HET, HOST, LAUNCHED, MARKS, MEM_BIND, MULTI_PROG, NONCE, REFUSAL, SPEC,
    TERMINAL, TOLD,
};
use super::{Failure, exits, kept, orphan};
use crate::EXIT_REFUSED;
use crate::act::environment::{TaskEnvironment, apply};
use crate::act::key::Key;
use crate::act::launch::start;
use crate::act::{binding, directories};
use crate::config::site::SiteView;
use crate::config::{self, Gid, Settings, Source, SpecError, Switch};
use crate::facts::container::{self, Place};
use crate::facts::directories::here;
use crate::facts::network::{Interfaces, Network};
use crate::facts::step::FIRST_SPECIAL_STEP;
use crate::facts::task::{Container, Peers, UserBound, cores};
use crate::facts::{
    CpuSet, Environment, NodeFacts, Rank0, StartFacts, Step, StepError, TaskFacts, User, locks, netdevs, program,
};
use crate::plan::{self, Binding, Facts, Plan, caches, fabric, launch, rendezvous, worker};
use crate::report;
use crate::system::output::{exit_now, to_stderr};

/// How long the ranks of a node wait for each other with a container at least:
/// some container plugins import the image in each task, one after the other.
const IMPORT: Duration = Duration::from_secs(1800);

/// Whether srun handed this step the flag, without allocating. The batch
/// script's, extern and interactive step have no ranks. A step whose id Slurm
/// does not tell counts as one with ranks: better a refusal than tasks that run
/// without their variables and say nothing.
pub fn flag_given(handle: Handle) -> bool {
    handed_over(handle) && !handle.step_id().is_ok_and(|step| step >= FIRST_SPECIAL_STEP)
}

fn handed_over(handle: Handle) -> bool {
    handle.has_variable(SPEC) || handle.has_variable(REFUSAL)
}

/// Removes what srun handed over from the task's environment.
fn take_away(handle: &mut Handle) -> Result<(), Failure> {
    for name in HANDED_OVER {
        if let Ok(name) = name.to_str() {
            handle.unset(name)?;
        }
    }
    Ok(())
}

/// Gives the waiting task our name until it becomes the user's command.
/// proctrack/linuxproc signals no process named slurmstepd, which every task
/// still is (`src/plugins/proctrack/linuxproc/kill_tree.c`): scancel would not
/// end a task that waits here, and Slurm drains a node with a task that it could
/// not end within UnkillableStepTimeout. People see in ps what it waits for, too.
pub fn make_killable(handle: Handle) {
    if flag_given(handle) {
        orphan::keep_parent();
        // SAFETY: a C string shorter than the 16 bytes the kernel reads.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"palingenesis".as_ptr()) };
    }
}

/// The hook.
pub fn task_init(mut handle: Handle) -> Result<(), Failure> {
    if !handed_over(handle) {
        return Ok(());
    }
    if !flag_given(handle) {
        // The shell that salloc starts on a node: srun cannot take back what it
        // set before it knew the step.
        return take_away(&mut handle);
    }
    let mut environment = handle.environment()?;
    let handed = Handed::of(&environment);
    // Before anything can go wrong: the other nodes are to know of it.
    handed.know(handle, &environment);
    if let Some(line) = kept::first() {
        refuse(&line);
    }
    take_away(&mut handle)?;
    if let Some(line) = handed.get(REFUSAL) {
        refuse_for_the_step(&environment, handed.has(HET), line);
    }
    // srun's site file knew every profile in it; plan() says where this node's does not.
    let settings = handed.settings().map_err(Failure::refused)?;
    let step = handed.step(&environment).map_err(Failure::refused)?;
    let (mut task, mut submitted) = surroundings(handed.get(CONTAINER));
    let own = |name| handed.get(name).map(String::from);
    task.bound_by_user = UserBound { cpu: own(CPU_BIND), mem: own(MEM_BIND) };
    if let Some(marks) = handed.get(MARKS) {
        if let Some(submitted) = &mut submitted {
            submitted.set(config::MARKS, marks);
        }
        environment.set(config::MARKS, marks);
    }
    start_rank(&mut handle, &settings, &step, &environment, &handed, &task, submitted.as_ref())
}

/// What srun handed over to this task.
#[derive(Debug, Default)]
pub struct Handed(Environment);

impl Handed {
    fn of(environment: &Environment) -> Handed {
        let mut handed = Environment::default();
        for name in HANDED_OVER.iter().filter_map(|name| name.to_str().ok()) {
            if let Some(value) = environment.get(name) {
                handed.set(name, value);
            }
        }
        Handed(handed)
    }

    fn get(&self, name: &CStr) -> Option<&str> {
        self.0.get(name.to_str().ok()?)
    }

    fn has(&self, name: &CStr) -> bool {
        self.get(name).is_some()
    }

    fn settings(&self) -> Result<Settings, SpecError> {
        let spec = self.get(SPEC).unwrap_or_default();
        Settings::parse_with(spec, Source::Option, &config::profiles_in(spec))
    }

    fn step(&self, environment: &Environment) -> Result<Step, StepError> {
        let mut step = Step::from_environment(environment)?;
        step.het = self.has(HET);
        step.terminal = self.has(TERMINAL);
        step.multi_prog = self.has(MULTI_PROG);
        Ok(step)
    }

    fn rank0(&self) -> Rank0 {
        Rank0 { host: self.get(HOST).map(String::from), address: self.get(ADDRESS).map(String::from) }
    }

    /// The launch's secret.
    pub fn key(&self) -> Option<Key> {
        // slurmstepd has taken it out of the job's environment.
        let kept = || with_node(|node| Key::from_hex(node?.submitted.get(NONCE.to_str().ok()?)?));
        Key::from_hex(self.get(NONCE)?).or_else(kept)
    }

    /// Keeps what is needed to tell the other nodes that this one cannot start. Where
    /// even that is not known this node stops alone.
    fn know(&self, handle: Handle, environment: &Environment) {
        let (Ok(settings), Ok(step)) = (self.settings(), self.step(environment)) else { return };
        with_node(|node| node.map(|node| exits::enter(node, &step)));
        let (task, submitted) = surroundings(self.get(CONTAINER));
        let site = site_view(&step, submitted.as_ref().unwrap_or(environment));
        preflight::know(Known {
            settings: site.map(|site| site.under(&settings)).unwrap_or(settings),
            step,
            rank0: self.rank0(),
            environment: environment.clone(),
            submitted,
            command: handle.command().unwrap_or_default(),
            container: task.container,
            key: self.key(),
            resolution: None,
        });
    }
}

/// How long this rank waits for the others of its node.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// From the moment at which it waits.
    pub limit: Duration,
    /// Until when for a rank that was missing at the meeting: it is not waited for
    /// twice.
    pub absent: Option<Instant>,
}

impl Patience {
    fn new(container: Container) -> Patience {
        let limit = with_node(|node| node.map(|node| node.limit)).unwrap_or_default();
        Patience { limit: if container == Container::None { limit } else { limit.max(IMPORT) }, absent: None }
    }

    /// Until when, for one that waits from `now`.
    pub fn end(self, now: Instant) -> Instant {
        now + self.limit
    }
}

/// Whether the task stands in a container, by comparison with slurmstepd, and
/// then the environment from before.
fn surroundings(asked: Option<&str>) -> (TaskFacts, Option<Environment>) {
    let inside = |node: &Node| node.outside.is_some_and(|outside| outside != Place::here());
    let submitted = with_node(|node| node.filter(|node| inside(node)).map(|node| node.submitted.clone()));
    let container = match (&submitted, asked) {
        (Some(_), _) => Container::Inside,
        (None, Some(_)) => Container::ComesLater,
        (None, None) => Container::None,
    };
    let container_keeps = container::names(asked.unwrap_or_default());
    (TaskFacts { container, container_keeps, ..TaskFacts::default() }, submitted)
}

/// What the node's site file says of this step.
fn site_view(step: &Step, environment: &Environment) -> Option<SiteView> {
    let partition = environment.get("SLURM_JOB_PARTITION");
    let user = User::of_process(environment);
    with_node(|node| Some(node?.site.as_ref()?.view(partition, Some(&step.node), &user)))
}

/// Meets the ranks of this node, where binding needs it, makes the plan and carries it
/// out, and waits until all can start.
fn start_rank(
    handle: &mut Handle,
    spec: &Settings,
    step: &Step,
    environment: &Environment,
    handed: &Handed,
    task: &TaskFacts,
    submitted: Option<&Environment>,
) -> Result<(), Failure> {
    // As submitted: a container's image may have other words for partition and user.
    let site = site_view(step, submitted.unwrap_or(environment));
    let merged = site.as_ref().map(|site| site.under(spec));
    let settings = merged.as_ref().unwrap_or(spec);
    // A multi-prog step's argv is its file: no command to look at, none needed.
    let command = handle.command().unwrap_or_default();
    let rank0 = &handed.rank0();
    let names = rendezvous::wanted(step, &command, submitted.unwrap_or(environment), settings, rank0);
    let network = Network::of_this_node(&names, Interfaces::wanted(step.nodes(), settings.iface.is_some()))?;
    preflight::know_resolution(&network.resolution);
    let launched = handed.get(LAUNCHED).and_then(|ns| ns.parse().ok());
    let store_key = handed.key().map(|key| key.derive("store").to_hex());
    let programs = start_facts(settings, &command, step, environment);
    let (mut node, root) = with_node(|node| node.map(|node| (node.facts.clone(), node.root.clone())))
        .unwrap_or_else(|| (NodeFacts::default(), "/".into()));
    node.netdevs = node.netdevs.map(|devices| netdevs::of_this_namespace(&root, devices));
    let seen = TaskFacts::read(&root, environment, &node).within(task.container, task.container_keeps.clone());
    let seen = seen.with_gids(&root, node.rdma.as_deref().unwrap_or_default(), settings.gid == Gid::Auto);
    let task = TaskFacts { start: Some(programs), bound_by_user: task.bound_by_user.clone(), ..seen };
    let facts = Facts {
        command: &command,
        node: &node,
        rank0,
        resolution: &network.resolution,
        interfaces: &network.interfaces,
        task: &task,
        submitted,
        site: site.as_ref(),
        store_key: store_key.as_deref(),
        launched,
        ..Facts::new(step, environment)
    };
    let mut patience = Patience::new(task.container);
    let peers = meet(&facts, settings, &mut patience);
    // Of every mask: this rank may get another one's.
    let cores = match &peers {
        Peers::Met(peers) if settings.exclusive == Switch::On => {
            cores(&root, &peers.iter().fold(CpuSet::EMPTY, |all, peer| all.or(&peer.mask)))
        }
        _ => Vec::new(),
    };
    let directories = directories::make(&caches::wanted(&facts, spec, &here()));
    let locks = locks::old(&caches::with_locks(&facts, settings, &directories));
    let task = TaskFacts { directories, locks, peers, cores, ..facts.task.clone() };
    let facts = Facts { task: &task, ..facts };
    let plan = plan::plan(&facts, spec);
    with_node(|node| {
        if let Some(gate) = node.and_then(|node| node.gate.as_ref()) {
            gate.keep_summary(&summary(&facts, settings, plan.as_ref().ok()));
        }
    });
    let plan = plan.map_err(Failure::refused)?;
    with_node(|node| node.map(|node| exits::planned(node, step, &plan.binding, environment)));
    apply(&plan, handle)?;
    start(&plan, handle)?;
    if step.rank == 0 {
        tell(&plan, settings.show, handed.get(TOLD).unwrap_or_default());
    } else if step.local_rank == 0 {
        tell_of_node(&plan);
    }
    let how = preflight::together(*handle, &facts, settings, &plan, handed, patience);
    if let Start::Together(port) = how
        && plan.step.master_port.is_some_and(|planned| planned != port)
    {
        // Every rank has the same port here: what follows from it is all that changes.
        let settled = plan::plan(&Facts { port: Some(port), ..facts }, spec).map_err(Failure::refused)?;
        for variable in settled.env.iter().filter(|variable| plan.value(&variable.name) != Some(&variable.value)) {
            handle.set(&variable.name, &variable.value)?;
        }
    }
    bind(&plan);
    if how == Start::EachNode {
        with_node(|node| {
            if let Some(gate) = node.and_then(|node| node.gate.as_ref()) {
                wait(gate, patience, step);
            }
        });
    }
    with_node(|node| node.map(|node| exits::started(node, step)));
    Ok(())
}

/// What the node's ranks bring to each other, where the plan needs it.
fn meet(facts: &Facts, settings: &Settings, patience: &mut Patience) -> Peers {
    if !plan::binding::needs_meeting(facts, settings) {
        return Peers::NotAsked;
    }
    let (step, own) = (facts.step, plan::binding::own(facts, settings));
    let end = Instant::now() + patience.limit;
    let meeting = with_node(|node| Some(node?.gate.as_ref()?.meet(step.local_rank, step.local_world_size, &own, end)));
    match meeting {
        Some(Meeting::Over(peers)) => {
            if matches!(peers, Peers::Incomplete(_)) {
                patience.absent = Some(end);
            }
            peers
        }
        Some(Meeting::Closed) => closed(),
        None => Peers::Incomplete("the node's ranks have no place to meet".into()),
    }
}

/// Gives the rank its CPUs and its memory. What could not be is told once per
/// node: it is the same for all of them.
fn bind(plan: &Plan) {
    let lines = binding::apply(plan).concat();
    if lines.is_empty() {
        return;
    }
    let first = with_node(|node| node.and_then(|node| node.gate.as_ref()).is_none_or(Gate::reports_unbound));
    if first {
        to_stderr(&lines);
    }
}

/// What slurmstepd's log says of the node's ranks; of their plan, where there is one.
fn summary(facts: &Facts, settings: &Settings, plan: Option<&Plan>) -> String {
    let step = facts.step;
    let (shape, profile, fabric) = match plan {
        Some(plan) => (plan.step.shape, plan.step.profile.as_str(), plan.step.fabric),
        None => (
            launch::shape(settings, facts.command, step.pty, step.terminal, step.one_task_on_each_node()),
            settings.profile_name(),
            fabric::fabric(facts, settings).0.name(),
        ),
    };
    let bound = plan.map_or_else(|| "-".into(), |plan| bound(&plan.binding));
    format!("node={} shape={} profile={profile} fabric={fabric} bound={bound}", step.node, shape.name())
}

/// What the rank's binding changes, in a word.
fn bound(binding: &Binding) -> String {
    let parts = [("cpu", binding.cpus.is_some()), ("mem", binding.memory.is_some())];
    let parts: Vec<&str> = parts.iter().filter(|(_, set)| *set).map(|(name, _)| *name).collect();
    if parts.is_empty() { "-".into() } else { parts.join("+") }
}

/// What the task finds of palingenesis-worker, where that is to be started.
fn start_facts(settings: &Settings, command: &[String], step: &Step, environment: &Environment) -> StartFacts {
    let configured = with_node(|node| node.and_then(|node| node.worker.clone()));
    let paths = worker::wanted(settings, command, step, environment, configured.as_deref());
    StartFacts { programs: program::look(Path::new("/"), &paths), configured, prepends: host::can_prepend() }
}

/// Once per step, from rank 0, before it and its node's ranks start. What srun
/// has told already is left out, but not from the whole plan.
fn tell(plan: &Plan, show: bool, told: &str) {
    if show {
        to_stderr(&report::table(plan));
    } else {
        let told = |line: &String| told.split(' ').any(|mark| u32::from_str_radix(mark, 16) == Ok(report::mark(line)));
        let lines: String = plan.warnings.iter().map(report::warning_line).filter(|line| !told(line)).collect();
        to_stderr(&lines);
    }
}

/// What only this node has, from its first rank: rank 0 does not know it.
fn tell_of_node(plan: &Plan) {
    let own = plan.warnings.iter().filter(|warning| plan::binding::OF_A_NODE.contains(&warning.id));
    to_stderr(&own.map(report::warning_line).collect::<String>());
}

/// Waits for the node's other ranks.
fn wait(gate: &Gate, patience: Patience, step: &Step) {
    let (missing, what) = match gate.pass(step.local_rank, patience.limit, patience.absent) {
        Outcome::Open => return,
        Outcome::Closed | Outcome::Orphaned => exit_now(EXIT_REFUSED),
        Outcome::Gone(ranks) => (ranks, "ended before the start".to_string()),
        Outcome::Late(ranks) => (ranks, format!("did not come to the start within {} s", patience.limit.as_secs())),
    };
    if gate.reports_missing() {
        let ranks: Vec<String> = missing.iter().map(u32::to_string).collect();
        to_stderr(&format!(
            "palingenesis: warning: local rank {} on {} {what}; the node's other ranks start without it: \
             if they wait for it, end the step with scancel and look at that node\n",
            ranks.join(", "),
            step.node,
        ));
    }
}

/// A rank of this node has refused before the plan was made, or slurmstepd was killed.
fn closed() -> ! {
    let why = with_node(|node| node.and_then(|node| node.gate.as_ref()).and_then(Gate::refusal));
    preflight::tell_the_others(&why.unwrap_or_else(|| "a rank cannot start".into()));
    exit_now(EXIT_REFUSED)
}

/// The same as [`refuse`] where this task may not have come far enough to know its step.
pub fn refuse_with(handle: Handle, line: &str) {
    if let Ok(environment) = handle.environment() {
        let handed = Handed::of(&environment);
        if handed.has(SPEC) {
            handed.know(handle, &environment);
        }
    }
    refuse(line);
}

/// Stops this task and, by the node's gate, the node's other ranks, and by the other
/// nodes' those of the step. The first of a node says why.
pub fn refuse(line: &str) {
    with_node(|node| match node.and_then(|node| node.gate.as_ref()) {
        Some(gate) => {
            if gate.speaks_first() {
                gate.keep_refusal(line);
                to_stderr(line);
            }
            gate.close();
        }
        None => to_stderr(line),
    });
    preflight::tell_the_others(line);
    exit_now(EXIT_REFUSED);
}

/// srun's refusal is the same for all ranks: rank 0 alone says it. In a het step
/// it may have reached the tasks of one component only: a rank of each node does.
fn refuse_for_the_step(environment: &Environment, het: bool, line: &str) -> ! {
    let number = |name| environment.get(name);
    with_node(|node| {
        if let Some(gate) = node.and_then(|node| node.gate.as_ref()) {
            gate.keep_refusal(line);
        }
    });
    if number("SLURM_PROCID") == Some("0") || (het && number("SLURM_LOCALID") == Some("0")) {
        to_stderr(&report::one_line(line));
    }
    if het {
        preflight::tell_the_others(line);
    }
    exit_now(EXIT_REFUSED);
}
