//! What the nodes of a step ask each other before the ranks start, and what follows:
//! their reports are compared, each reaches the next one, shared directories are the
//! same everywhere, the warm-up runs. Rank 0's node asks; it tells what it finds.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::clocks::{Clock, Clocks};
use super::ring::{self, Listening, RingFault};
use super::{Attempt, Leader, Next, Outcome, Ranks, Unreachable, Waiting, Work, shared};
use crate::act::key::Key;
use crate::act::warmup::Warmup;
use crate::config::{Preflight, Settings};
use crate::facts::Environment;
use crate::facts::directories::here;
use crate::facts::machine;
use crate::facts::network::{Interface, Resolution, resolve};
use crate::plan::preflight::compare::compare;
use crate::plan::preflight::directories::{self, Moment, Token};
use crate::plan::preflight::report::NodeReport;
use crate::plan::preflight::{self as judged, ENDPOINT_HOST, MeetingPlace, NODE_TO_NODE, texts};
use crate::plan::warmup::{self, WarmOutcome, WarmSpec};
use crate::plan::{Facts, Plan, Warning};
use crate::report::{one_line, warning_line};
use crate::system::child::{Asked, ask};

/// How long a node may look its launcher's endpoint up, and answer.
const REPORTING: Duration = Duration::from_secs(10);
const LOOKING_UP: Duration = Duration::from_secs(5);

/// Begins what [`Ranks::Failed`] says, for all others: the node has told it to the user.
pub const SAID: &str = "told: ";

/// Begins it where rank 0's node cannot tell it: the next node does.
pub const UNHEARD: &str = "unheard: ";

/// Such a reason, for a log.
pub fn reason(why: &str) -> &str {
    why.strip_prefix(SAID).or_else(|| why.strip_prefix(UNHEARD)).unwrap_or(why)
}

/// Reads what a node is told when the ranks start.
pub fn clock(told: &[u8]) -> Option<Clock> {
    serde_json::from_slice(told).ok().flatten()
}

/// What a node's leader knows of its node.
#[derive(Debug)]
pub struct Node<'a> {
    /// Where the nodes meet.
    pub place: &'a MeetingPlace,
    /// The leader's plan.
    pub plan: &'a Plan,
    /// What it was made from.
    pub facts: &'a Facts<'a>,
    /// What the node is and has.
    pub report: NodeReport,
    /// The settings, with the site file's.
    pub settings: &'a Settings,
    /// The leader's environment as the plan has made it.
    pub environment: &'a Environment,
    /// The same byte for byte.
    pub variables: &'a [(OsString, OsString)],
    /// Where the launchers meet, where that is not at our port.
    pub endpoint: Option<&'a str>,
}

/// What goes on in the node's gate.
pub trait Own {
    /// How far the node's ranks are.
    fn ranks(&mut self) -> Ranks;
    /// No rank starts; why, where this node tells it.
    fn stop(&mut self, why: Option<&str>);
    /// Tells the user: lines that end in newlines.
    fn say(&mut self, lines: &str);
}

/// What is asked of a node.
#[derive(Debug, Serialize, Deserialize)]
enum Question {
    /// What it is; the plan only where it has another hash than this.
    Report { hash: String },
    /// Whether it reaches the next node: its name and where it listens.
    Ring { next: String, to: Vec<SocketAddr> },
    /// To leave tokens in its directories; whether the warm-up has run.
    Write { warmed: bool },
    /// Whether it sees these.
    Look { warmed: bool, tokens: Vec<Token> },
    /// To run the warm-up.
    Warm,
    /// What time it is there, in nanoseconds since 1970, at once.
    Clock,
    /// Nothing.
    Nothing,
}

fn moment(warmed: bool) -> Moment {
    if warmed { Moment::Warmed } else { Moment::Start }
}

/// The answer to the first question. From another machine: nothing in it is believed
/// beyond the texts it goes into.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Brought {
    /// A [`NodeReport`] as it is sent.
    report: String,
    /// Where the node listens for the one before it, if it can.
    listens: Option<(Option<IpAddr>, u16)>,
    /// The launcher's endpoint, and whether the node has its address; `None`: not known.
    endpoint: Option<(String, Option<bool>)>,
}

impl Brought {
    fn new(report: &NodeReport, hash: &str, listens: Option<(Option<IpAddr>, u16)>) -> Brought {
        Brought { report: String::from_utf8_lossy(&report.to_bytes_for(hash)).into_owned(), listens, endpoint: None }
    }
}

/// What the answers are to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Nothing,
    Report,
    Ring,
    Write(Moment),
    Look(Moment),
    Warm,
    Clock,
}

/// The rounds, as a node's leader goes through them.
pub struct Rounds<'a> {
    node: Node<'a>,
    own: &'a mut dyn Own,
    key: Key,
    listening: Option<Listening>,
    began: Instant,
    clocks: Clocks,
    stage: Stage,
    tokens: Vec<Token>,
    warm: Option<WarmSpec>,
    /// Why no rank starts, where this node found it.
    decided: Option<String>,
    /// Whether it is that nodes did not come.
    late: bool,
}

impl<'a> Rounds<'a> {
    /// Before the nodes have met. `key` is the launch's.
    pub fn new(node: Node<'a>, own: &'a mut dyn Own, key: &Key) -> Rounds<'a> {
        let nodes = node.place.nodes.len();
        let warm = warmup::wanted(node.settings, node.facts.step, node.environment, &here());
        Rounds {
            node,
            own,
            key: key.derive("ring"),
            listening: None,
            began: Instant::now(),
            clocks: Clocks::new(nodes),
            stage: Stage::Nothing,
            tokens: Vec::new(),
            warm,
            decided: None,
            late: false,
        }
    }

    fn nodes(&self) -> &'a [String] {
        &self.node.place.nodes
    }

    fn named(&self, ranks: &[u32]) -> Vec<String> {
        ranks.iter().filter_map(|rank| self.nodes().get(*rank as usize)).cloned().collect()
    }

    fn has_rank_0(&self) -> bool {
        self.node.place.node_rank == 0
    }

    /// The same question to all.
    fn ask_all(&mut self, stage: Stage, question: impl Fn(usize) -> Question) -> Next {
        self.stage = stage;
        self.clocks.ask(machine::clock());
        Next::Ask((0..self.nodes().len()).map(|node| bytes(&question(node))).collect())
    }

    fn stop(&mut self, why: String) -> Next {
        self.decided = Some(why.clone());
        Next::Stop(why)
    }

    /// Tells what was found, or stops.
    fn judge(&mut self, found: Vec<Warning>) -> Option<Next> {
        let (why, rest) = judged::verdict(found, self.node.settings);
        let lines: String = rest.iter().map(warning_line).collect();
        if !lines.is_empty() {
            self.own.say(&lines);
        }
        why.map(|why| self.stop(why))
    }

    /// After the nodes have said what time it is there.
    fn timed(&mut self, answers: &[Vec<u8>]) -> Next {
        for (node, answer) in answers.iter().enumerate() {
            if let Ok(said) = serde_json::from_slice(answer) {
                self.clocks.said(node, said);
            }
        }
        self.go()
    }

    /// What each node is told when they start: how far its clock is off. What a busy node
    /// needed for its report is no part of that: where it was long, it is asked again.
    fn go(&mut self) -> Next {
        if self.clocks.again() {
            return self.ask_all(Stage::Clock, |_| Question::Clock);
        }
        let clock = |node| bytes(&self.clocks.of(node));
        Next::Go((0..self.nodes().len()).map(clock).collect())
    }

    /// This node's answer to the first question.
    fn bring(&mut self, hash: &str) -> Box<dyn Work> {
        let mut listens = None;
        if self.nodes().len() > 1 {
            let towards = if self.has_rank_0() { None } else { self.way_out() };
            self.listening = Listening::new(towards).ok();
            listens = self.listening.as_ref().map(|listening| (towards, listening.port()));
        }
        let report = NodeReport { clock: Some(machine::clock()), ..self.node.report.clone() };
        let Some(endpoint) = self.node.endpoint else {
            return done(bytes(&Brought::new(&report, hash, listens)));
        };
        let without = bytes(&Brought::new(&report, hash, listens));
        // A name server may not answer.
        let asked = ask(|| {
            let own = owns(endpoint, self.node.facts.interfaces);
            let report = NodeReport { clock: Some(machine::clock()), ..report };
            let brought = Brought::new(&report, hash, listens);
            bytes(&Brought { endpoint: Some((endpoint.to_string(), own)), ..brought })
        });
        match asked {
            Ok(asked) => Box::new(Bringing { asked, without }),
            Err(_) => done(without),
        }
    }

    /// The address of this node from which packets go to rank 0's.
    fn way_out(&self) -> Option<IpAddr> {
        self.node.place.addresses.iter().find_map(|address| way_to(*address))
    }

    /// After the reports.
    fn reported(&mut self, answers: &[Vec<u8>]) -> Next {
        let brought: Vec<Option<Brought>> = answers.iter().map(|answer| serde_json::from_slice(answer).ok()).collect();
        let mut found = Vec::new();
        let mut reports = Vec::new();
        for (rank, one) in (0u32..).zip(&brought) {
            let text = one.as_ref().map(|one| one.report.as_bytes()).unwrap_or_default();
            let node = self.nodes().get(rank as usize).cloned().unwrap_or_default();
            match NodeReport::from_bytes(text) {
                Ok(report) => {
                    let report = report.placed(&node, rank);
                    reports.push(NodeReport { met: self.clocks.met(reports.len()), ..report });
                }
                Err(why) => {
                    let why = format!("{node} brought no report that can be read: {why}; update palingenesis there");
                    return self.stop(why);
                }
            }
        }
        for (node, report) in reports.iter().enumerate() {
            if let Some(said) = report.clock {
                self.clocks.said(node, said);
            }
        }
        found.extend(compare(&reports));
        found.extend(self.endpoint(&brought));
        if let Some(stop) = self.judge(found) {
            return stop;
        }
        let nodes = self.nodes();
        if nodes.len() < 2 {
            return self.directories(Moment::Start);
        }
        // Where the next node listens; rank 0's is reached at the address that leads there.
        let to = |next: usize| match brought.get(next).and_then(Option::as_ref).and_then(|next| next.listens) {
            Some((Some(address), port)) => vec![SocketAddr::new(address, port)],
            Some((None, port)) => vec![SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port)],
            None => Vec::new(),
        };
        let targets: Vec<(String, Vec<SocketAddr>)> =
            (0..nodes.len()).map(|node| (node + 1) % nodes.len()).map(|next| (nodes[next].clone(), to(next))).collect();
        self.ask_all(Stage::Ring, |node| Question::Ring { next: targets[node].0.clone(), to: targets[node].1.clone() })
    }

    /// Whether exactly one node has the launcher's endpoint.
    fn endpoint(&self, brought: &[Option<Brought>]) -> Option<Warning> {
        let endpoints: Vec<&(String, Option<bool>)> =
            brought.iter().flatten().filter_map(|brought| brought.endpoint.as_ref()).collect();
        let (endpoint, _) = *endpoints.first()?;
        // One that does not know it may be the one.
        if endpoints.len() < brought.len() || endpoints.iter().any(|(_, own)| own.is_none()) {
            return None;
        }
        let own: Vec<u32> =
            (0u32..).zip(&endpoints).filter(|(_, (_, own))| *own == Some(true)).map(|(at, _)| at).collect();
        if own.len() == 1 {
            return None;
        }
        let text = texts::endpoint_hosts(endpoint, &self.named(&own), self.nodes().len());
        let (message, cure) = text.rsplit_once("; ").unwrap_or((&text, ""));
        Some(judged::error(ENDPOINT_HOST, message.into(), cure.into()))
    }

    /// After each has tried to reach the next.
    fn ringed(&mut self, answers: &[Vec<u8>]) -> Next {
        let mut found = Vec::new();
        for (rank, answer) in answers.iter().enumerate() {
            let Ok(Some(fault)) = serde_json::from_slice::<Option<RingFault>>(answer) else { continue };
            let nodes = self.nodes();
            let (node, next) = (&nodes[rank], &nodes[(rank + 1) % nodes.len()]);
            let (message, cure) = texts::next_node(&texts::Next {
                node,
                next,
                to: (fault.to.ip(), fault.to.port()),
                from: fault.from.as_ref().map(|(from, name)| (*from, name.as_str())),
                fault: fault.kind.shown(),
                seconds: ring::PATIENCE.as_secs(),
            });
            found.push(judged::error(NODE_TO_NODE, message, cure));
        }
        match self.judge(found) {
            Some(stop) => stop,
            None => self.directories(Moment::Start),
        }
    }

    fn places(&self, moment: Moment) -> Vec<directories::Place> {
        directories::places(self.node.plan, self.node.settings, self.node.facts.environment, &here(), moment)
    }

    fn directories(&mut self, moment: Moment) -> Next {
        if self.places(moment).is_empty() {
            return self.looked(moment);
        }
        let warmed = moment == Moment::Warmed;
        self.ask_all(
            Stage::Write(moment),
            |node| if node == 0 { Question::Write { warmed } } else { Question::Nothing },
        )
    }

    /// After rank 0's node has left its tokens.
    fn written(&mut self, moment: Moment, answers: &[Vec<u8>]) -> Next {
        self.clean(true);
        self.tokens = answers.first().and_then(|answer| shared::tokens(answer).ok()).unwrap_or_default();
        let tokens = self.tokens.clone();
        let warmed = moment == Moment::Warmed;
        self.ask_all(Stage::Look(moment), |_| Question::Look { warmed, tokens: tokens.clone() })
    }

    /// After every node has looked for them.
    fn seen(&mut self, moment: Moment, answers: &[Vec<u8>]) -> Next {
        let seen: Vec<(String, Vec<directories::Seen>)> = self
            .nodes()
            .iter()
            .zip(answers)
            .filter_map(|(node, answer)| Some((node.clone(), shared::seen(answer).ok()?)))
            .collect();
        match self.judge(directories::judge(&seen, moment)) {
            Some(stop) => stop,
            None => self.looked(moment),
        }
    }

    /// After the directories.
    fn looked(&mut self, moment: Moment) -> Next {
        match &self.warm {
            Some(warm) if moment == Moment::Start => {
                let runs: Vec<bool> = (0..self.nodes().len()).map(|node| warm.runs_here(node == 0)).collect();
                self.ask_all(Stage::Warm, |node| if runs[node] { Question::Warm } else { Question::Nothing })
            }
            _ => self.go(),
        }
    }

    /// After the warm-up.
    fn warmed(&mut self, answers: &[Vec<u8>]) -> Next {
        let Some(warm) = &self.warm else { return self.go() };
        let outcomes: Vec<(String, Option<WarmOutcome>)> = self
            .nodes()
            .iter()
            .zip(answers)
            .map(|(node, answer)| (node.clone(), serde_json::from_slice(answer).ok()))
            .collect();
        match warmup::judge(warm, &outcomes) {
            Some(why) => self.stop(why),
            None => self.directories(Moment::Warmed),
        }
    }

    /// Removes this node's tokens.
    fn clean(&mut self, starts: bool) {
        if !self.tokens.is_empty() {
            let mut places = self.places(Moment::Start);
            places.extend(
                self.places(Moment::Warmed).into_iter().filter(|place| !places.contains(place)).collect::<Vec<_>>(),
            );
            shared::clean(&places, &std::mem::take(&mut self.tokens), starts);
        }
    }

    /// Whether it ended because nodes did not come: their ranks do not know of it.
    pub fn late(&self) -> bool {
        self.late
    }

    /// The end, with what this node tells the user of it.
    pub fn over(mut self, outcome: &Outcome) -> Option<String> {
        self.clean(matches!(outcome, Outcome::Go { .. }));
        self.line(outcome)
    }

    fn line(&self, outcome: &Outcome) -> Option<String> {
        let place = self.node.place;
        let (node, rank0) =
            (self.node.plan.step.node.as_str(), place.nodes.first().map(String::as_str).unwrap_or_default());
        match outcome {
            Outcome::Go { .. } | Outcome::Failed(_) => None,
            Outcome::Stop(why) if why.starts_with(UNHEARD) => {
                (place.node_rank == 1).then(|| format!("{}; {}", reason(why), texts::LOOK_THERE))
            }
            // A node's own fault is told there.
            Outcome::Stop(why) if why.starts_with(SAID) || !self.has_rank_0() => None,
            Outcome::Stop(why) if self.decided.as_ref() == Some(why) => Some(why.clone()),
            Outcome::Stop(why) => Some(format!("{why}; {}", texts::LOOK_THERE)),
            // The first ones say it for all.
            Outcome::Lost => (place.node_rank <= 8).then(|| texts::lost(node, rank0)),
            Outcome::NoPort(ports) => Some(texts::no_port(rank0, ports)),
            Outcome::Unreached(attempts) => {
                let ways: Vec<texts::Way> = attempts.iter().map(way).collect();
                Some(texts::unreached(&texts::Unreached {
                    node,
                    rank0,
                    host: &place.host,
                    ways: &ways,
                    interfaces: self.node.facts.interfaces,
                    seconds: self.began.elapsed().as_secs().max(1),
                    named: place.named,
                }))
            }
        }
    }
}

impl Leader for Rounds<'_> {
    fn ranks(&mut self) -> Ranks {
        self.own.ranks()
    }

    fn work(&mut self, question: &[u8]) -> Box<dyn Work> {
        match serde_json::from_slice(question) {
            Ok(Question::Report { hash }) => self.bring(&hash),
            Ok(Question::Ring { to, .. }) => {
                let to = self.targets(&to);
                Box::new(ring::Ring::new(self.listening.take(), to, self.key.clone(), self.node.facts.interfaces))
            }
            Ok(Question::Write { warmed }) => {
                Box::new(shared::writing(self.places(moment(warmed)), &self.node.plan.step))
            }
            Ok(Question::Look { warmed, tokens }) => {
                Box::new(shared::looking(self.places(moment(warmed)), tokens, &self.node.plan.step))
            }
            Ok(Question::Warm) => self.warm(),
            Ok(Question::Clock) => done(bytes(&machine::clock())),
            Ok(Question::Nothing) | Err(_) => done(b"null".to_vec()),
        }
    }

    fn next(&mut self, _round: usize, answers: &[Vec<u8>]) -> Next {
        match self.stage {
            Stage::Nothing => {
                let hash = self.node.report.hash.clone();
                // Its own plan this node has to see whole.
                let of = |node| if node == 0 { String::new() } else { hash.clone() };
                self.ask_all(Stage::Report, |node| Question::Report { hash: of(node) })
            }
            Stage::Report => self.reported(answers),
            Stage::Ring => self.ringed(answers),
            Stage::Write(moment) => self.written(moment, answers),
            Stage::Look(moment) => self.seen(moment, answers),
            Stage::Warm => self.warmed(answers),
            Stage::Clock => self.timed(answers),
        }
    }

    fn answered(&mut self, node_rank: u32) {
        self.clocks.answered(usize::try_from(node_rank).unwrap_or(usize::MAX), machine::clock());
    }

    fn without(&mut self, waiting: &Waiting) -> Next {
        let (absent, unready) = (self.named(&waiting.absent), self.named(&waiting.unready));
        let text = texts::late(&absent, &unready, self.nodes().len(), waiting.since.as_secs());
        if self.node.settings.preflight == Preflight::Warn {
            self.own.say(&one_line(&format!("palingenesis: warning: {text}; the others start without them")));
            return self.go();
        }
        self.late = true;
        self.stop(text)
    }

    fn tell(&mut self, waiting: &Waiting) {
        // It tells of itself.
        if self.stage == Stage::Warm && waiting.round.is_some() {
            return;
        }
        let seconds = waiting.since.as_secs();
        let (absent, unready) = (self.named(&waiting.absent), self.named(&waiting.unready));
        let text = texts::waiting(&absent, &unready, self.nodes().len(), waiting.round.is_some(), seconds);
        self.own.say(&one_line(&text));
    }

    fn stopping(&mut self, outcome: &Outcome) {
        let line = self.line(outcome);
        self.own.stop(line.as_deref());
    }
}

impl Rounds<'_> {
    /// Where the next node listens, as seen from here.
    fn targets(&self, to: &[SocketAddr]) -> Vec<SocketAddr> {
        let rank0 = &self.node.place.addresses;
        to.iter()
            .flat_map(|to| match to.ip().is_unspecified() {
                true => rank0.iter().map(|address| SocketAddr::new(*address, to.port())).collect(),
                false => vec![*to],
            })
            .collect()
    }

    fn warm(&mut self) -> Box<dyn Work> {
        let started = match self.warm.clone() {
            Some(spec) => Warmup::start(spec, self.node.variables.to_vec()).map_err(|error| error.to_string()),
            None => Err("this node has no warm-up".into()),
        };
        match started {
            Ok(warmup) => Box::new(warmup),
            Err(why) => {
                done(bytes(&WarmOutcome { end: warmup::WarmEnd::NotStarted(why), seconds: 0, last_lines: Vec::new() }))
            }
        }
    }
}

/// Where packets to `address` leave this node: nothing is sent.
pub fn way_to(address: IpAddr) -> Option<IpAddr> {
    let any = match address {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((address, 9)).ok()?;
    socket.local_addr().ok().map(|own| own.ip()).filter(|own| !own.is_unspecified())
}

/// An attempt, for the texts.
fn way(attempt: &Attempt) -> texts::Way {
    let fault = match attempt.fault {
        Unreachable::Refused => texts::Fault::Refused,
        Unreachable::Silent => texts::Fault::Silent,
        Unreachable::NoRoute(number) => texts::Fault::NoRoute(number),
        Unreachable::Stranger => texts::Fault::Stranger,
        Unreachable::Other(number) => texts::Fault::Other(number),
    };
    texts::Way { to: attempt.to, from: attempt.from, fault }
}

fn bytes<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// An answer that is there.
struct Done(Option<Vec<u8>>);

/// This answer, at once.
pub fn done(answer: Vec<u8>) -> Box<dyn Work> {
    Box::new(Done(Some(answer)))
}

impl Work for Done {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        self.0.take()
    }
}

/// A report that a child makes.
struct Bringing {
    asked: Asked,
    /// The report without what the child looks at.
    without: Vec<u8>,
}

impl Work for Bringing {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.asked.fd())
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        let answer = self.asked.look(REPORTING)?;
        Some(answer.unwrap_or_else(|_| std::mem::take(&mut self.without)))
    }
}

/// Whether the host of an endpoint is this node; `None`: not known.
fn owns(endpoint: &str, interfaces: &[Interface]) -> Option<bool> {
    let Resolution::Found(addresses) = resolve(judged::endpoint_host(endpoint), LOOKING_UP) else { return None };
    let own =
        |address: &IpAddr| address.is_loopback() || interfaces.iter().any(|interface| interface.address == *address);
    (!interfaces.is_empty()).then(|| addresses.iter().any(own))
}
