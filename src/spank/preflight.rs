//! The door's part of the pre-flight: in the forked tasks, as the user. The node's
//! local rank 0 leads: it meets the other nodes' leaders while its own ranks wait at
//! the gate, and gives them the verdict. A rank that cannot start stops every rank of
//! the step by it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::gate::{Gate, Roll, Verdict};
use super::host::{self, Handle};
use super::kept::lock;
use super::orphan::orphaned;
use super::slurmstepd::with_node;
use super::task::{Handed, Patience};
use crate::EXIT_REFUSED;
use crate::act::key::Key;
use crate::act::preflight::rounds::{Node, Own, Rounds, SAID, UNHEARD, clock, done, reason};
use crate::act::preflight::{Leader, Next, Outcome, Ranks, Terms, Waiting, Work, lead};
use crate::config::{Preflight, Settings};
use crate::facts::machine::Now;
use crate::facts::network::{PATIENCE, Resolution, resolve};
use crate::facts::task::{Container, Peers};
use crate::facts::{CpuSet, Environment, Rank0, Step, TaskFacts, listener};
use crate::plan::preflight::report::NodeReport;
use crate::plan::preflight::{MeetingPlace, alone, arrival, leads, meeting_place, own_endpoint, texts, wanted};
use crate::plan::{Facts, Plan, Shape, rendezvous};
use crate::report::one_line;
use crate::system::output::{exit_now, to_stderr};

/// A verdict comes at the latest so long after the leader's own deadlines.
const LEADER_S_ROUNDS: Duration = Duration::from_secs(1800);

/// How long the one that takes over may take for its verdict: it may be killed too.
const STANDING_IN: Duration = Duration::from_secs(5);

/// How long those that take over for a dead leader try to reach the others.
const TAKING_OVER: Duration = Duration::from_secs(60);

/// What a rank knows of the way to the other nodes, in case it cannot start.
#[derive(Debug)]
pub struct Known {
    pub step: Step,
    /// The user's and the site's.
    pub settings: Settings,
    pub rank0: Rank0,
    pub environment: Environment,
    pub submitted: Option<Environment>,
    pub command: Vec<String>,
    pub container: Container,
    pub key: Option<Key>,
    /// Rank 0's host, once it was looked up.
    pub resolution: Option<Resolution>,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// Keeps what is known of the way to the others.
pub fn know(known: Known) {
    *lock(&KNOWN) = Some(known);
}

/// Adds how rank 0's host resolves.
pub fn know_resolution(resolution: &Resolution) {
    if let Some(known) = lock(&KNOWN).as_mut() {
        known.resolution = Some(resolution.clone());
    }
}

impl Known {
    fn facts<'a>(&'a self, task: &'a TaskFacts, resolution: &'a Resolution) -> Facts<'a> {
        Facts {
            command: &self.command,
            rank0: &self.rank0,
            resolution,
            task,
            submitted: self.submitted.as_ref(),
            ..Facts::new(&self.step, &self.environment)
        }
    }

    /// Where to say that this node cannot start.
    fn terms(&self) -> Option<Terms> {
        let task = TaskFacts { container: self.container, ..TaskFacts::default() };
        let unknown = Resolution::NotTried;
        if !wanted(&self.facts(&task, &unknown), &self.settings) {
            return None;
        }
        let resolution = self.resolution.clone().unwrap_or_else(|| self.look_up());
        let place = meeting_place(&self.facts(&task, &resolution), &self.settings, true)?;
        Some(terms(&place, self.key.as_ref()?, arrival(&self.settings, self.container)))
    }

    fn look_up(&self) -> Resolution {
        let environment = self.submitted.as_ref().unwrap_or(&self.environment);
        let names = rendezvous::wanted(&self.step, &self.command, environment, &self.settings, &self.rank0);
        names.first().map_or(Resolution::NotTried, |name| resolve(name, PATIENCE))
    }
}

fn terms(place: &MeetingPlace, key: &Key, arrival: Duration) -> Terms {
    Terms {
        nodes: place.nodes.clone(),
        node_rank: place.node_rank,
        addresses: place.addresses.clone(),
        ports: place.ports.clone(),
        key: key.derive("preflight"),
        arrival,
    }
}

/// Says on the other nodes that no rank starts, if they wait for this node and this rank
/// is the one to say it.
pub fn tell_the_others(why: &str) {
    // Once, whatever happens meanwhile.
    let Some(known) = lock(&KNOWN).take() else { return };
    let leads = leads(&known.step);
    let takes_over = || with_gate(|gate| gate.is_some_and(|gate| gate.leader_is_gone() && gate.takes_over()));
    if (leads || takes_over())
        && let Some(mut terms) = known.terms()
    {
        if !leads {
            terms.arrival = terms.arrival.min(TAKING_OVER);
        }
        let told = say_so(&terms, why);
        if !told || orphaned() {
            end_the_step(&known.step, known.settings.preflight);
        }
    }
    if leads {
        // A rank that refuses after this one has ended finds nobody who listens any more.
        with_gate(|gate| gate.map(Gate::nothing_to_take_over));
    }
}

/// Meets the others to say that no rank starts. `false`: some do not know, and wait.
fn say_so(terms: &Terms, why: &str) -> bool {
    let why = if orphaned() { unheard(terms) } else { format!("{SAID}{}", bare(why)) };
    let mut failing = Failing { why, stopping: None };
    lead(terms, &mut failing);
    !(terms.node_rank > 0 && terms.addresses.is_empty()) && told_in_time(terms, failing.stopping)
}

/// Whether all that the rounds still waited for when it was decided that no rank starts
/// came to be told: else they wait until a tenth of the arrival time is over, and for
/// rank 0's node no longer than they hope for it (see `farewell` and `HOPE` there).
fn told_in_time(terms: &Terms, stopping: Option<Instant>) -> bool {
    let hope = if terms.node_rank == 0 { Duration::MAX } else { Duration::from_secs(30) };
    let longest = (terms.arrival / 10).min(hope).saturating_sub(Duration::from_millis(100));
    stopping.is_none_or(|stopping| stopping.elapsed() < longest)
}

/// How long what was told takes to srun at most. It drops what it has not read when a
/// signal ends the last task.
const READING: Duration = Duration::from_millis(500);

/// How long a node leaves it to others to tell it, and to ask the controller. What many nodes find at the
/// same moment, a firewall between all of them, the first ones tell it: Slurm ends the
/// step before the others have their turn. Each word to the controller has it send one to
/// every node of the step.
fn turn(node_rank: u32) -> Duration {
    match node_rank {
        0..8 => Duration::ZERO,
        _ => Duration::from_millis(2000 + 5 * u64::from(node_rank.min(4000))),
    }
}

/// The last resort where the others cannot be told, or have ranks that do not listen:
/// Slurm ends the step, so that nobody waits for the rest of the time. Not in a het step,
/// which has several, and not where the ranks are to start all the same.
fn end_the_step(step: &Step, preflight: Preflight) {
    end_the_step_after(turn(step.node_rank), step, preflight);
}

fn end_the_step_after(wait: Duration, step: &Step, preflight: Preflight) {
    std::thread::sleep(READING + wait);
    if !step.het && step.components.is_empty() && preflight == Preflight::On {
        host::end_step(step.job_id, step.step_id);
    }
}

/// Without what stands before a line on the terminal.
fn bare(line: &str) -> String {
    line.trim().trim_start_matches("palingenesis: error: ").to_string()
}

/// Why no rank starts, for another node to tell: slurmstepd was killed, and what is written
/// here reaches nobody.
fn unheard(terms: &Terms) -> String {
    let node = terms.nodes.get(terms.node_rank as usize).map_or("?", String::as_str);
    format!("{}{}", if terms.node_rank == 0 { UNHEARD } else { "" }, texts::orphaned(node))
}

/// A leader whose node cannot start.
struct Failing {
    /// As the other nodes get it.
    why: String,
    /// Since when those that do not know are waited for.
    stopping: Option<Instant>,
}

impl Leader for Failing {
    fn ranks(&mut self) -> Ranks {
        Ranks::Failed(self.why.clone())
    }

    fn work(&mut self, _question: &[u8]) -> Box<dyn Work> {
        done(Vec::new())
    }

    fn next(&mut self, _round: usize, _answers: &[Vec<u8>]) -> Next {
        Next::Stop(self.why.clone())
    }

    fn without(&mut self, _waiting: &Waiting) -> Next {
        Next::Stop(self.why.clone())
    }

    fn tell(&mut self, _waiting: &Waiting) {}

    fn stopping(&mut self, _outcome: &Outcome) {
        self.stopping.get_or_insert_with(Instant::now);
    }
}

/// Holds the node's lock meanwhile: what is done with the gate must not ask for the node.
fn with_gate<T>(use_it: impl FnOnce(Option<&Gate>) -> T) -> T {
    with_node(|node| use_it(node.and_then(|node| node.gate.as_ref())))
}

/// How the ranks of the step start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Each node's by itself, as without a pre-flight.
    EachNode,
    /// All of them together, with this port.
    Together(u16),
}

/// Waits until every rank of the step can start. Does not return where none does.
pub fn together(
    handle: Handle,
    facts: &Facts,
    settings: &Settings,
    plan: &Plan,
    handed: &Handed,
    patience: Patience,
) -> Start {
    if plan.step.shape == Shape::Shell || !(wanted(facts, settings) || alone(facts, settings)) {
        if let Some(line) = texts::not_warmed(settings).filter(|_| facts.step.rank == 0) {
            to_stderr(&line);
        }
        return Start::EachNode;
    }
    let Some(key) = handed.key() else {
        if facts.step.rank == 0 {
            to_stderr(
                "palingenesis: warning: srun handed over no secret, so the nodes do not meet before the start; is the plugin \
                 on the host of srun another version?\n",
            );
        }
        return Start::EachNode;
    };
    let Some(place) = meeting_place(facts, settings, false) else {
        if facts.step.rank == 0 {
            to_stderr(
                "palingenesis: note: the nodes do not meet before the start: several of the step's programs share a node\n",
            );
        }
        return Start::EachNode;
    };
    let arrival = arrival(settings, facts.task.container);
    // Before the gate is taken: both are the node's.
    let report = if leads(facts.step) { report(facts, settings, plan) } else { NodeReport::default() };
    with_gate(|gate| match gate {
        None => Start::EachNode,
        Some(gate) if leads(facts.step) => {
            let terms = terms(&place, &key, arrival);
            Start::Together(lead_the_node(handle, facts, settings, plan, report, &place, &terms, &key, gate, patience))
        }
        Some(gate) => {
            let warm = match settings.warm {
                Some(_) => Duration::from_secs(settings.warm_timeout.unwrap_or(3600).into()),
                None => Duration::ZERO,
            };
            let last = arrival + warm * 2 + LEADER_S_ROUNDS;
            Start::Together(follow(facts.step, settings, &place, gate, patience, last))
        }
    })
}

/// A rank that waits for its leader's verdict.
fn follow(
    step: &Step,
    settings: &Settings,
    place: &MeetingPlace,
    gate: &Gate,
    patience: Patience,
    last: Duration,
) -> u16 {
    let now = Instant::now();
    let end = patience.end(now);
    gate.arrive(step.local_rank);
    let mut other: Option<Instant> = None;
    loop {
        let late = match gate.wait_for_verdict(end, now + last) {
            Verdict::Go(port) => return port,
            Verdict::Closed => exit_now(EXIT_REFUSED),
            Verdict::LeaderGone => None,
            Verdict::LeaderLate => Some(patience.limit.as_secs()),
            // The leader sees it, too, and tells the others.
            Verdict::Orphaned if gate.leader_leads() => exit_now(EXIT_REFUSED),
            Verdict::Orphaned => None,
        };
        if !gate.takes_over() && other.get_or_insert_with(Instant::now).elapsed() < STANDING_IN {
            // Another rank does; its verdict follows, unless it was ended too.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let what = texts::rank_missing(&[0], &step.node, late);
        if settings.preflight == Preflight::Warn && !orphaned() {
            if gate.reports_missing() {
                to_stderr(&format!("palingenesis: warning: {what}; {}\n", texts::STARTED));
            }
            gate.go(first_port(place));
            continue;
        }
        say_why(gate, &format!("{what}: {}", texts::STOPPED));
        gate.close();
        if let Some(known) = lock(&KNOWN).take()
            && let Some(mut terms) = known.terms()
        {
            terms.arrival = terms.arrival.min(TAKING_OVER);
            let told = say_so(&terms, &what);
            if !told || late.is_some() || orphaned() {
                end_the_step(step, settings.preflight);
            }
        }
        exit_now(EXIT_REFUSED);
    }
}

/// The port where the nodes have not met.
fn first_port(place: &MeetingPlace) -> u16 {
    place.ports.first().copied().unwrap_or(0)
}

/// Says, once per node, why no rank starts.
fn say_why(gate: &Gate, why: &str) {
    if gate.speaks_first() {
        let line = one_line(&format!("palingenesis: error: {why}"));
        gate.keep_refusal(&line);
        to_stderr(&line);
    }
}

/// The node's ranks, for the rounds.
struct AtGate<'a> {
    gate: &'a Gate,
    step: &'a Step,
    warn: bool,
    patience: Patience,
    end: Instant,
    failed: Option<String>,
    /// Whether that is because a rank did not come: it does not know of it.
    late: bool,
    /// Since when those that do not know that no rank starts are waited for.
    stopping: Option<Instant>,
    /// What the others are told where slurmstepd was killed.
    orphaned: String,
}

impl AtGate<'_> {
    /// A rank is missing; the others of the node start without it, or none does.
    fn missing(&mut self, ranks: &[u32], late: Option<u64>) -> Ranks {
        let what = texts::rank_missing(ranks, &self.step.node, late);
        if self.warn {
            if self.gate.reports_missing() {
                to_stderr(&format!("palingenesis: warning: {what}; {}\n", texts::STARTED));
            }
            return Ranks::Here;
        }
        self.late = late.is_some();
        self.fail(&format!("{what}: {}", texts::STOPPED))
    }

    /// This node cannot start: told here, and by the rounds everywhere.
    fn fail(&mut self, why: &str) -> Ranks {
        say_why(self.gate, why);
        self.gate.close();
        self.failed = Some(format!("{SAID}{why}"));
        Ranks::Failed(format!("{SAID}{why}"))
    }
}

impl Own for AtGate<'_> {
    fn ranks(&mut self) -> Ranks {
        if let Some(failed) = &self.failed {
            return Ranks::Failed(failed.clone());
        }
        match self.gate.roll(self.end, self.patience.absent) {
            Roll::All => Ranks::Here,
            Roll::Coming => Ranks::Coming,
            Roll::Gone(ranks) => self.missing(&ranks, None),
            Roll::Late(ranks) => self.missing(&ranks, Some(self.patience.limit.as_secs())),
            Roll::Orphaned => {
                self.gate.close();
                self.failed = Some(self.orphaned.clone());
                Ranks::Failed(self.orphaned.clone())
            }
            Roll::Closed => {
                let why = self.gate.refusal().map(|line| bare(&line));
                let why = why.unwrap_or_else(|| format!("a rank on {} cannot start", self.step.node));
                let why = format!("{SAID}{why}");
                self.failed = Some(why.clone());
                Ranks::Failed(why)
            }
        }
    }

    fn stop(&mut self, why: Option<&str>) {
        // Now: the user need not wait for nodes that are late, nor who fails end the step
        // before it is told.
        if let Some(why) = why {
            say_why(self.gate, why);
        }
        self.gate.close();
        self.stopping.get_or_insert_with(Instant::now);
    }

    fn say(&mut self, lines: &str) {
        to_stderr(lines);
    }
}

/// What the node brings to the others.
fn report(facts: &Facts, settings: &Settings, plan: &Plan) -> NodeReport {
    // Of the step's CPUs on this node, where the ranks have met.
    let all = match &facts.task.peers {
        Peers::Met(peers) => Some(peers.iter().fold(CpuSet::EMPTY, |all, peer| all.or(&peer.mask))),
        _ => facts.task.mask.clone(),
    };
    let now = with_node(|node| node.map(|node| Now::read(&node.root, facts.node, &node.before, all.as_ref())));
    NodeReport::of(plan).with(plan, facts, settings, &now.unwrap_or_default())
}

/// The leader's part; the port with which the ranks start.
#[expect(clippy::too_many_arguments, reason = "each is something else of the one step")]
fn lead_the_node(
    handle: Handle,
    facts: &Facts,
    settings: &Settings,
    plan: &Plan,
    report: NodeReport,
    place: &MeetingPlace,
    terms: &Terms,
    key: &Key,
    gate: &Gate,
    patience: Patience,
) -> u16 {
    let step = facts.step;
    gate.arrive(step.local_rank);
    let warn = settings.preflight == Preflight::Warn;
    let serves = place.node_rank == 0 && place.nodes.len() > 1;
    let mut own = AtGate {
        gate,
        step,
        warn,
        patience,
        end: patience.end(Instant::now()),
        failed: None,
        late: false,
        stopping: None,
        orphaned: unheard(terms),
    };
    if let Some(taken) = place.named.filter(|_| serves).and_then(|port| taken(port, &step.node)) {
        own.fail(&taken);
    }
    let environment = handle.environment().unwrap_or_default();
    let variables = if settings.warm.is_some() { handle.variables().unwrap_or_default() } else { Vec::new() };
    let endpoint = own_endpoint(facts, plan);
    let node = Node {
        place,
        plan,
        facts,
        report,
        settings,
        environment: &environment,
        variables: &variables,
        endpoint: endpoint.as_deref(),
    };
    let mut rounds = Rounds::new(node, &mut own, key);
    let outcome = lead(terms, &mut rounds);
    let nodes_late = rounds.late();
    let line = rounds.over(&outcome);
    let told = told_in_time(terms, own.stopping);
    let waited = Instant::now();
    // Of the end of these tasks nobody tells srun.
    let unheard = orphaned();
    let untold =
        own.late || nodes_late || !told || unheard || matches!(outcome, Outcome::Unreached(_) | Outcome::NoPort(_));
    if !untold {
        // The others listen no longer, and know.
        gate.nothing_to_take_over();
    }
    match outcome {
        Outcome::Go { port, told } => {
            if let Some((offset, uncertainty)) = clock(&told) {
                gate.register().compare_clock(offset, uncertainty);
            }
            if step.rank == 0 {
                notes(place, port, endpoint.as_deref());
            }
            let port = place.named.unwrap_or(port);
            gate.go(port);
            port
        }
        Outcome::Unreached(_) | Outcome::Lost | Outcome::NoPort(_) if warn => {
            let line = line
                .map(|line| one_line(&format!("palingenesis: warning: {line}; the node's ranks start all the same")));
            to_stderr(&line.unwrap_or_default());
            let port = first_port(place);
            gate.go(port);
            port
        }
        _ => {
            if matches!(outcome, Outcome::Unreached(_)) {
                // Of a thousand nodes behind one firewall a few say it.
                std::thread::sleep(turn(step.node_rank));
            }
            match (line, outcome) {
                (Some(line), _) => say_why(gate, &line),
                (None, Outcome::Stop(why) | Outcome::Failed(why)) => gate.keep_refusal(reason(&why)),
                _ => {}
            }
            gate.close();
            if untold {
                end_the_step_after(turn(step.node_rank).saturating_sub(waited.elapsed()), step, settings.preflight);
                gate.nothing_to_take_over();
            }
            exit_now(EXIT_REFUSED)
        }
    }
}

/// What rank 0's node says of the port once the nodes have met.
fn notes(place: &MeetingPlace, port: u16, endpoint: Option<&str>) {
    let mut lines = String::new();
    let rank0 = place.nodes.first().map(String::as_str).unwrap_or_default();
    let before = place.ports.iter().position(|tried| *tried == port).unwrap_or(0);
    if before > 0 && place.named.is_none() {
        lines.push_str(&format!("palingenesis: note: {}\n", texts::settled(&place.ports[..before], rank0, port)));
    }
    if let Some(endpoint) = endpoint {
        let at = place.addresses.first().map_or(place.host.clone(), ToString::to_string);
        let at = if at.contains(':') { format!("[{at}]:{port}") } else { format!("{at}:{port}") };
        lines.push_str(&one_line(&format!("palingenesis: note: {}", texts::untested(endpoint, &at))));
    }
    to_stderr(&lines);
}

/// Why rank 0 could not listen on the port that somebody named. As the training will:
/// with SO_REUSEADDR, which std sets.
fn taken(port: u16, node: &str) -> Option<String> {
    let bound = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    };
    let error = bound.err()?;
    (error.kind() == io::ErrorKind::AddrInUse).then(|| {
        let found = listener::of("/".as_ref(), port);
        texts::taken(port, node, &texts::Holder { process: found.process, user: found.user })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The leader is gone, and so is the rank that took over, before it gave a verdict.
    #[test]
    fn who_stands_in_for_the_leader_may_be_killed_too() {
        let gate = Gate::new(3).unwrap();
        gate.gone(0);
        assert!(gate.takes_over());
        gate.gone(1);
        let step = Step::described("n[1-2]", "3", 2, 7, 0).unwrap();
        let mut settings = Settings::default();
        settings.preflight = Preflight::Warn;
        let place = MeetingPlace {
            nodes: vec!["n1".into(), "n2".into()],
            node_rank: 0,
            host: "n1".into(),
            addresses: Vec::new(),
            ports: vec![20312],
            named: None,
        };
        let minute = Duration::from_secs(60);
        let patience = Patience { limit: minute, absent: None };
        let start = Instant::now();
        assert_eq!(follow(&step, &settings, &place, &gate, patience, minute * 60), 20312);
        assert!(start.elapsed() < minute / 2, "{:?}", start.elapsed());
    }

    #[test]
    fn the_first_nodes_ask_the_controller_at_once_and_the_others_one_after_the_other() {
        assert_eq!((turn(0), turn(7)), (Duration::ZERO, Duration::ZERO));
        let others: std::collections::BTreeSet<Duration> = (8..1000).map(turn).collect();
        assert_eq!(others.len(), 992);
        assert!(others.first().is_some_and(|first| *first >= Duration::from_secs(2)));
        assert!(turn(u32::MAX) <= Duration::from_secs(22));
    }
}
