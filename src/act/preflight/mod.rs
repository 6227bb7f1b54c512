//! The pre-flight: before the ranks start, one leader per node, its local rank 0,
//! meets the others at the address and port that the training will use. Rank 0's
//! node serves. Then rounds: the server asks every node, itself too, one question,
//! gets all answers, and asks the next or ends it.
//!
//! Here are the rounds' outer form and who waits for whom how long. What is asked
//! and what the answers come to is the [`Leader`]'s: see `rounds`. No thread, no
//! wait without a deadline.

mod clocks;
mod ring;
pub mod rounds;
pub mod shared;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::key::Key;

mod client;
mod connections;
mod link;
mod pace;
mod server;
mod wire;

#[cfg(test)]
mod tests;

pub use wire::CONTENT_MAX;

/// Who meets where.
#[derive(Debug, Clone)]
pub struct Terms {
    /// NodeNames of the step's nodes, by node rank.
    pub nodes: Vec<String>,
    /// This node's rank; 0 serves.
    pub node_rank: u32,
    /// Where rank 0's node is, best first: what MASTER_ADDR resolves to here.
    pub addresses: Vec<IpAddr>,
    /// The ports to try, in this order; one only where the user named it.
    pub ports: Vec<u16>,
    /// Of this launch and for this purpose.
    pub key: Key,
    /// How long a node is waited for.
    pub arrival: Duration,
}

/// How far this node's own ranks are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranks {
    /// Not all are here.
    Coming,
    /// All are here and wait.
    Here,
    /// One cannot start; why, for the other nodes, which are told this text as it is. It is
    /// told on this node already.
    Failed(String),
}

/// What a node does for a round: it may take long, and must not keep the leader from
/// hearing the others.
pub trait Work {
    /// Readable, or hung up, when there is something to do. `None`: ask again soon.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// Goes on as far as possible without waiting. The answer, once there is one.
    /// Dropped before that it ends whatever it has started.
    fn advance(&mut self) -> Option<Vec<u8>>;
}

/// What follows when every node has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// A question to each node, by node rank.
    Ask(Vec<Vec<u8>>),
    /// All nodes start their ranks; what each node is told, by node rank.
    Go(Vec<Vec<u8>>),
    /// No rank starts. Why: rank 0's node says it to the user.
    Stop(String),
}

/// What nodes are waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Nodes whose leader has not come.
    pub absent: Vec<u32>,
    /// Nodes that are here, but not all of their ranks; or, in a round, nodes that have not
    /// answered.
    pub unready: Vec<u32>,
    /// The round, from 0; `None` before the first.
    pub round: Option<usize>,
    /// For how long.
    pub since: Duration,
}

/// What the leader of a node knows and does; one call at a time.
pub trait Leader {
    /// Looked at again and again while waiting: never waits itself.
    fn ranks(&mut self) -> Ranks;
    /// Begins to answer a question.
    /// It borrows nothing of the leader, whose ranks are looked at meanwhile.
    fn work(&mut self, question: &[u8]) -> Box<dyn Work>;
    /// On rank 0's node: this node's answer has just come, its own too. Before the others'.
    fn answered(&mut self, _node_rank: u32) {}
    /// On rank 0's node: the question of this round, from 0. `answers` are every node's to
    /// the question before, by node rank; there are none before the first, when all nodes
    /// are here with all of their ranks.
    fn next(&mut self, round: usize, answers: &[Vec<u8>]) -> Next;
    /// On rank 0's node: `Terms::arrival` has passed. Whether those that are here start.
    /// [`Next::Ask`] is round 0 among them: the answers of the others are empty, and who
    /// still comes is told the end.
    fn without(&mut self, waiting: &Waiting) -> Next;
    /// On rank 0's node, now and then while others are waited for.
    fn tell(&mut self, waiting: &Waiting);
    /// It is decided that no rank starts, and the rounds return this outcome, but not yet:
    /// a node that could not be told so far is still waited for a while. The node's other
    /// ranks must not wait with it.
    fn stopping(&mut self, _outcome: &Outcome) {}
}

/// One way that was tried to rank 0's node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Where to.
    pub to: (IpAddr, u16),
    /// From which address of this node, where the kernel chose one.
    pub from: Option<IpAddr>,
    /// How it failed.
    pub fault: Unreachable,
}

/// Why a way did not lead to rank 0's node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unreachable {
    /// Nobody listens there (or a firewall says so).
    Refused,
    /// Nothing came back: a firewall, or no such host.
    Silent,
    /// The kernel knows no way, or a router said there is none: the error's number.
    NoRoute(i32),
    /// Somebody listens who is none of this launch.
    Stranger,
    /// Any other error's number.
    Other(i32),
}

/// How it ended for a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The ranks start; this port is free, this node was told this.
    Go {
        /// Of `Terms::ports`.
        port: u16,
        /// As [`Next::Go`] has it.
        told: Vec<u8>,
    },
    /// No rank starts. Why; told by rank 0's node, or by the node at fault.
    Stop(String),
    /// A rank of this node cannot start; the others know.
    Failed(String),
    /// This node did not reach rank 0's in time. The last attempt for each way.
    Unreached(Vec<Attempt>),
    /// The connection to rank 0's node ended before the end.
    Lost,
    /// Rank 0's node could listen on none of the ports: the errors' numbers.
    NoPort(Vec<(u16, i32)>),
}

/// A connection on which nothing comes back for this long is dead: its node has crashed or
/// lost its network. The kernel finds it out, see [`crate::system::sockets::watch`].
const DEAD: Duration = Duration::from_secs(15);

/// How often either side says something: that the kernel has something to find out with.
const PING: Duration = Duration::from_secs(5);

/// A peer whose kernel answers but who says nothing himself, not even a ping, for this long
/// hangs or is stopped alone. Long, for a busy node is not dead.
const MUTE: Duration = Duration::from_secs(60);

/// What a node does and whom it waits for how long, until the ranks start or do not.
/// Blocks; no thread, no wait without a deadline.
pub fn lead(terms: &Terms, leader: &mut dyn Leader) -> Outcome {
    if terms.node_rank == 0 { server::serve(terms, leader) } else { client::meet(terms, leader) }
}

/// For how long the nodes that have not come are still waited for when it is decided that
/// no rank starts, to be told; and for how long a node tries to tell that one of its own
/// cannot. Later ones meet nobody and give up by themselves. Not longer: a node without
/// the plugin never comes, and the step's end must not wait for it.
fn farewell(terms: &Terms) -> Duration {
    terms.arrival / 10
}

/// The name of a node.
fn name(terms: &Terms, node_rank: u32) -> &str {
    let index = usize::try_from(node_rank).unwrap_or(usize::MAX);
    terms.nodes.get(index).map_or("?", String::as_str)
}

/// Why what a node has to tell cannot be.
fn too_long(terms: &Terms, node_rank: u32) -> String {
    format!("node {}: what it has to tell is longer than {CONTENT_MAX} bytes", name(terms, node_rank))
}
