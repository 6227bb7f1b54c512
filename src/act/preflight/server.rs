//! Rank 0's node: waits for the others, asks, and decides with the leader when it
//! ends. Takes part itself; alone, where the step has one node.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use super::connections::{Connections, Event};
use super::pace::{Clock, OwnRanks, Task};
use super::wire::{CONTENT_MAX, Message, VERSION};
use super::{Leader, Next, Outcome, Terms, Waiting, farewell, name, too_long};
use crate::system::sockets;

/// How long a round may take. What nodes do in it is bounded by who made it, and a node that
/// dies meanwhile is noticed by its connection, so this is for a fault that nobody thought
/// of; long, for a round may be the user's own warm-up, with a limit that the user chose.
const ROUND: Duration = Duration::from_secs(24 * 60 * 60);

/// When it is first told who is waited for; then after twice the time, but every
/// [`TELL_MAX`].
const TELL: Duration = Duration::from_secs(10);
const TELL_MAX: Duration = Duration::from_secs(60);

/// How long the nodes' own closing is waited for when they have been told the end: a server
/// that closed first would leave its port taken, and a reset destroys what was not read.
/// For as long as one of them still takes something or closes, but not longer than
/// [`CLOSING_MAX`].
const CLOSING: Duration = Duration::from_secs(1);
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// What is known of a node.
#[derive(Debug, Default, Clone)]
struct Node {
    /// Its leader has come, and may have gone again.
    came: bool,
    /// And all of its ranks.
    here: bool,
    /// It is asked in the rounds.
    asked: bool,
    answer: Option<Vec<u8>>,
}

/// How it ends.
enum End {
    Go(Vec<Vec<u8>>),
    Stop(String),
    /// A rank of this node cannot start.
    Failed(String),
}

struct Server<'a> {
    terms: &'a Terms,
    leader: &'a mut dyn Leader,
    clock: Clock,
    connections: Option<Connections<'a>>,
    own: OwnRanks,
    task: Option<Task>,
    nodes: Vec<Node>,
    /// Nodes that are not here with all of their ranks; in a round, that have not answered.
    missing: usize,
    opened: Instant,
    round: Option<u32>,
    /// Since when that is waited for.
    since: Instant,
    /// After how long it is told next.
    tell: Duration,
}

/// Waits for all, asks, and ends it.
pub fn serve(terms: &Terms, leader: &mut dyn Leader) -> Outcome {
    let mut clock = Clock::new();
    let now = clock.now();
    // A single node meets nobody.
    let connections = match (terms.nodes.len() > 1).then(|| Connections::new(terms, now)).transpose() {
        Ok(connections) => connections,
        Err(faults) => return Outcome::NoPort(faults),
    };
    let nodes = vec![Node::default(); terms.nodes.len().max(1)];
    let mut server = Server {
        terms,
        leader,
        clock,
        connections,
        own: OwnRanks::new(now),
        task: None,
        missing: nodes.len(),
        nodes,
        opened: now,
        round: None,
        since: now,
        tell: TELL,
    };
    server.node(0).came = true;
    let end = loop {
        if let Some(end) = server.turn() {
            break end;
        }
    };
    server.end(end)
}

/// A node's place in the lists.
fn at(node_rank: u32) -> usize {
    usize::try_from(node_rank).unwrap_or(usize::MAX)
}

impl Server<'_> {
    /// There is one for each rank that the connections let in, and for this one.
    fn node(&mut self, node_rank: u32) -> &mut Node {
        let last = self.nodes.len() - 1;
        &mut self.nodes[at(node_rank).min(last)]
    }

    /// Once around.
    fn turn(&mut self) -> Option<End> {
        let now = self.clock.now();
        self.own.look(now, self.leader);
        if let Some(why) = self.own.failed.take() {
            return Some(End::Failed(why));
        }
        if self.own.here {
            self.here(0);
        }
        if let Some(answer) = self.task.as_mut().and_then(|task| task.advance(now)) {
            self.task = None;
            self.answered(0, answer);
        }
        if let Some(end) = self.hear(now) {
            return Some(end);
        }
        if let Some(next) = self.progress(now) {
            return self.follow(next, now);
        }
        let waited = now.saturating_duration_since(self.since);
        if waited >= self.tell {
            self.tell = (self.tell * 2).min(self.tell + TELL_MAX);
            let waiting = self.waiting(waited);
            self.leader.tell(&waiting);
        }
        self.wait(now);
        None
    }

    fn here(&mut self, node_rank: u32) {
        let gathering = self.round.is_none();
        let node = self.node(node_rank);
        if !node.here {
            node.here = true;
            if gathering {
                self.missing -= 1;
            }
        }
    }

    fn answered(&mut self, node_rank: u32, answer: Vec<u8>) {
        let node = self.node(node_rank);
        if node.asked && node.answer.is_none() {
            node.answer = Some(answer);
            self.missing -= 1;
            self.leader.answered(node_rank);
        }
    }

    /// What the other nodes say.
    fn hear(&mut self, now: Instant) -> Option<End> {
        let mut events = Vec::new();
        self.connections.as_mut()?.turn(now, &mut events);
        let terms = self.terms;
        // Before anything ends it: these are told with the others.
        for event in &events {
            if let Event::Joined(node_rank) | Event::Other(node_rank, _) = event {
                self.node(*node_rank).came = true;
            }
        }
        for event in events {
            match event {
                Event::Joined(_) => {}
                Event::Said(node_rank, Message::Here) => self.here(node_rank),
                Event::Said(node_rank, Message::Answer(round, answer)) if self.round == Some(round) => {
                    self.answered(node_rank, answer);
                }
                Event::Said(_, Message::Failed(why)) => return Some(End::Stop(why)),
                Event::Said(node_rank, _) => {
                    let name = name(terms, node_rank);
                    return Some(End::Stop(format!("node {name}: its leader said what it was not asked")));
                }
                Event::Other(node_rank, version) => {
                    return Some(End::Stop(format!(
                        "node {}: another release of palingenesis is installed there: its pre-flight speaks \
                         version {version}, node {}'s {VERSION}; install one release on all nodes",
                        name(terms, node_rank),
                        name(terms, 0),
                    )));
                }
                Event::Ended(node_rank, why) => {
                    let name = name(terms, node_rank);
                    return Some(End::Stop(format!("node {name}: its connection ended before the start: {why}")));
                }
                Event::Full(error) => {
                    let name = name(terms, 0);
                    return Some(End::Stop(format!("node {name}: cannot accept more nodes: {error}")));
                }
            }
        }
        None
    }

    /// What follows, when something does.
    fn progress(&mut self, now: Instant) -> Option<Next> {
        match self.round {
            None if self.missing == 0 => Some(self.leader.next(0, &[])),
            None if now >= self.opened + self.terms.arrival => {
                let waiting = self.waiting(now.saturating_duration_since(self.opened));
                Some(self.leader.without(&waiting))
            }
            Some(round) if self.missing == 0 => {
                let answers: Vec<Vec<u8>> =
                    self.nodes.iter_mut().map(|node| node.answer.take().unwrap_or_default()).collect();
                Some(self.leader.next(at(round).saturating_add(1), &answers))
            }
            Some(_) if now >= self.since + ROUND => {
                let late = self.waiting(ROUND).unready;
                let late: Vec<&str> = late.into_iter().map(|node_rank| name(self.terms, node_rank)).collect();
                Some(Next::Stop(format!("no answer within {} h from: {}", ROUND.as_secs() / 3600, late.join(" "))))
            }
            _ => None,
        }
    }

    fn follow(&mut self, next: Next, now: Instant) -> Option<End> {
        let questions = match next {
            Next::Stop(why) => return Some(End::Stop(why)),
            Next::Go(told) => {
                return Some(match self.longest(&told) {
                    Some(node_rank) => End::Stop(too_long(self.terms, node_rank)),
                    None => End::Go(told),
                });
            }
            Next::Ask(questions) => questions,
        };
        if let Some(node_rank) = self.longest(&questions) {
            return Some(End::Stop(too_long(self.terms, node_rank)));
        }
        let round = match self.round {
            Some(round) => round.saturating_add(1),
            None => {
                // All of them, or those that are here without the others.
                self.nodes.iter_mut().for_each(|node| node.asked = node.here);
                0
            }
        };
        self.round = Some(round);
        self.since = now;
        self.tell = TELL;
        self.missing = self.nodes.iter().filter(|node| node.asked).count();
        let mut questions = questions.into_iter();
        let own = questions.next().unwrap_or_default();
        for (node_rank, node) in (1..).zip(self.nodes.iter().skip(1)) {
            let question = questions.next().unwrap_or_default();
            if let (true, Some(connections)) = (node.asked, &mut self.connections) {
                // Its length was looked at.
                let _ = connections.send(node_rank, &Message::Ask(round, question), now);
            }
        }
        if self.nodes.first().is_some_and(|node| node.asked) {
            self.task = Some(Task::new(self.leader.work(&own), now));
        }
        None
    }

    /// The node for which this is too long to send.
    fn longest(&self, contents: &[Vec<u8>]) -> Option<u32> {
        contents.iter().position(|content| content.len() > CONTENT_MAX).and_then(|index| u32::try_from(index).ok())
    }

    fn waiting(&self, since: Duration) -> Waiting {
        let which = |keep: &dyn Fn(&Node) -> bool| {
            (0..).zip(&self.nodes).filter(|(_, node)| keep(node)).map(|(node_rank, _)| node_rank).collect()
        };
        let (absent, unready) = match self.round {
            None => (which(&|node| !node.came), which(&|node| node.came && !node.here)),
            Some(_) => (Vec::new(), which(&|node| node.asked && node.answer.is_none())),
        };
        Waiting { absent, unready, round: self.round.map(at), since }
    }

    fn wait(&mut self, now: Instant) {
        let mut due = self.own.due;
        let mut which: Vec<(BorrowedFd<'_>, bool)> = Vec::new();
        which.extend(self.connections.as_ref().map(|connections| (connections.fd(), false)));
        if let Some(task) = &self.task {
            due = due.min(task.due);
            which.extend(task.work.fd().map(|fd| (fd, false)));
        }
        let ready = sockets::wait(&which, due.saturating_duration_since(now));
        let of_task = usize::from(self.connections.is_some());
        if let (Some(true), Some(task)) = (ready.get(of_task), &mut self.task) {
            task.due = now;
        }
    }

    /// Tells everybody and leaves the port free.
    fn end(mut self, end: End) -> Outcome {
        // Ends what it has started.
        self.task = None;
        let port = self.connections.as_ref().map(|connections| connections.port);
        let port = port.or(self.terms.ports.first().copied()).unwrap_or(0);
        let (told, outcome) = match end {
            End::Go(mut told) => {
                told.resize(self.nodes.len(), Vec::new());
                let own = told.first_mut().map(std::mem::take).unwrap_or_default();
                (Ok(told), Outcome::Go { port, told: own })
            }
            End::Stop(why) => (Err(why.clone()), Outcome::Stop(why)),
            End::Failed(why) => (Err(why.clone()), Outcome::Failed(why)),
        };
        let Some(mut connections) = self.connections.take() else { return outcome };
        let began = self.clock.now();
        connections.progress = began;
        let last_word = |connections: &mut Connections<'_>, node_rank: u32, now: Instant| {
            let message = match &told {
                Ok(told) => Message::Go(port, told.get(at(node_rank)).cloned().unwrap_or_default()),
                Err(why) => Message::Stop(why.clone()),
            };
            // Its length was looked at.
            let _ = connections.send(node_rank, &message, now);
        };
        for node_rank in (1..).take(self.nodes.len() - 1) {
            last_word(&mut connections, node_rank, began);
        }
        let late = self.opened + self.terms.arrival;
        let mut coming = match &outcome {
            Outcome::Go { .. } => 0,
            // They have had their time.
            _ if began >= late => 0,
            _ => self.nodes.iter().filter(|node| !node.came).count(),
        };
        if coming > 0 {
            self.leader.stopping(&outcome);
        }
        let farewell = late.min(began + farewell(self.terms));
        let mut events = Vec::new();
        loop {
            let now = self.clock.now();
            connections.turn(now, &mut events);
            for event in events.drain(..) {
                if let Event::Joined(node_rank) | Event::Other(node_rank, _) = event
                    && !std::mem::replace(&mut self.node(node_rank).came, true)
                {
                    coming = coming.saturating_sub(1);
                    last_word(&mut connections, node_rank, now);
                }
            }
            if coming == 0 || now >= farewell {
                connections.close_port();
                let still = now < connections.progress + CLOSING && now < began.max(farewell) + CLOSING_MAX;
                if connections.joined == 0 || !still {
                    return outcome;
                }
            }
            sockets::wait(&[(connections.fd(), false)], Duration::from_millis(50));
        }
    }
}
