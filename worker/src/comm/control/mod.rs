//! The control group: all ranks meet at rank 0, prove to each other that they are of one
//! launch, and keep that connection. By it everybody learns within moments that a rank is
//! gone, which, and what it was at. No tensor goes over it, and nothing here ends the
//! process: it tells, and who waits for numbers looks at [`Control::fd`].
//!
//! Each process has one thread for it, `control`, which says something every second even
//! where the rank computes or waits. So silence means a stopped process or a dead host, and
//! a rank that merely takes long is not gone: that is for the operations' deadlines.

mod client;
mod key;
mod link;
mod server;
mod wire;

#[cfg(test)]
mod tests;

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use palingenesis::act::key::Key;
use palingenesis::config::printable;

use super::recorder::Recorder;
use super::{CommError, Op, Tag};
use wire::{At, Verdict};

pub use key::store_key;

/// Between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// How often the thread looks at what its rank is at: an operation that takes longer than
/// this is known to rank 0 before its next heartbeat.
const TICK: Duration = Duration::from_millis(200);

/// A process that was not scheduled for this long was stopped, with all its deadlines: it
/// does not blame the others for what it did not hear.
const STOPPED: Duration = Duration::from_secs(2);

/// How long those that end wait for each other's connections to close, so that nothing that
/// is on its way gets lost.
const PARTING: Duration = Duration::from_secs(1);

/// The most ranks that furthest behind are told to all.
const BEHIND: usize = 8;

/// Who meets where.
#[derive(Debug, Clone)]
pub struct Terms {
    /// RANK.
    pub rank: u32,
    /// WORLD_SIZE.
    pub world_size: u32,
    /// This rank's host, as people know it.
    pub host: String,
    /// MASTER_ADDR and MASTER_PORT: rank 0 listens there.
    pub master: (String, u16),
    /// The store key, see [`store_key`]; `None`: all ranks are on this host.
    pub key: Option<Key>,
    /// How long all ranks are waited for.
    pub start: Duration,
    /// How long a rank may say nothing until it counts as gone; at least some seconds.
    pub silence: Duration,
}

impl Terms {
    /// "n1:29500".
    fn master(&self) -> String {
        let (host, port) = (printable(&self.master.0), self.master.1);
        // An IPv6 address is written in brackets before a port.
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// A rank, as the others reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Its data listener: the port that it gave to [`Control::join`], at the address from
    /// which it was seen to connect.
    pub address: SocketAddr,
}

/// How an operation is named: "all_gather #8812 of block 17".
pub(crate) fn operation(op: &str, sequence: u64, what: &str, index: u32) -> String {
    format!("{op} #{sequence} of {what} {index}")
}

/// "3 5-7": ranks in order.
pub(crate) fn ranks(ranks: impl IntoIterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<String>>().join(" ")
}

/// "s" where there are several.
pub(crate) fn s(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

impl Verdict {
    fn error(&self) -> CommError {
        let (rank, host, why) = (self.rank, printable(&self.host), sentence(&self.why));
        match &self.at {
            Some(at) => CommError::Lost { rank, host, why, op: sentence(at) },
            None => CommError::Ended { rank, host, why },
        }
    }
}

/// The start came to nothing.
fn stopped(why: &str, again: bool) -> CommError {
    let why = sentence(why);
    if again { CommError::Start(why) } else { CommError::Refused(why) }
}

/// What another rank says, as one line of a terminal. Its own errors may be long.
fn sentence(text: &str) -> String {
    text.chars().take(1000).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// How a rank ends.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ending {
    /// All is done.
    Orderly,
    /// Why, for the others.
    Failed(String),
    /// Without a word.
    Dropped,
}

/// What this rank is at.
type Place = Option<(u64, Op, Tag, bool)>;

/// What the rank and its thread know together.
struct Shared {
    rank: u32,
    /// Of all ranks, once they are known.
    hosts: OnceLock<Vec<String>>,
    recorder: OnceLock<Mutex<Recorder>>,
    place: Mutex<Place>,
    /// The same of the operations that go on beside the rank's own work.
    beside: Mutex<Place>,
    broken: Mutex<Option<CommError>>,
    /// Of `broken`.
    is_broken: Condvar,
    /// One byte, once it is broken.
    told: (PipeReader, PipeWriter),
    /// Wakes the thread.
    wake: (PipeReader, PipeWriter),
    ending: Mutex<Option<Ending>>,
    /// The ranks furthest behind.
    behind: Mutex<Vec<(u32, At)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(rank: u32) -> io::Result<Shared> {
        Ok(Shared {
            rank,
            hosts: OnceLock::new(),
            recorder: OnceLock::new(),
            place: Mutex::default(),
            beside: Mutex::default(),
            broken: Mutex::default(),
            is_broken: Condvar::new(),
            told: io::pipe()?,
            wake: io::pipe()?,
            ending: Mutex::default(),
            behind: Mutex::default(),
        })
    }

    /// What this rank itself waits for comes first, then what its device does.
    fn place(&self) -> Place {
        let (own, beside) = (*lock(&self.place), *lock(&self.beside));
        let inside = |place: &Place| place.is_some_and(|(.., inside)| inside);
        let number = |place: &Place| place.map_or(0, |(sequence, ..)| sequence);
        match (inside(&own), inside(&beside)) {
            (false, true) => beside,
            (false, false) if number(&beside) > number(&own) => beside,
            _ => own,
        }
    }

    fn at(&self) -> At {
        match self.place() {
            Some((sequence, op, tag, inside)) => At { inside, ..At::operation(sequence, op, tag) },
            None => At::default(),
        }
    }

    fn host(&self, rank: u32) -> String {
        let index = usize::try_from(rank).unwrap_or(usize::MAX);
        printable(self.hosts.get().and_then(|hosts| hosts.get(index)).map_or("?", String::as_str))
    }

    /// See [`Control::waiting_for`].
    fn waiting_for(&self, sequence: u64) -> Option<String> {
        let behind = lock(&self.behind);
        let late: Vec<&(u32, At)> =
            behind.iter().filter(|(rank, at)| *rank != self.rank && at.sequence < sequence).collect();
        let mut texts: Vec<String> = late
            .iter()
            .take(3)
            .map(|(rank, at)| format!("rank {rank} on {}, which is at {}", self.host(*rank), at.text()))
            .collect();
        match late.len().saturating_sub(texts.len()) {
            _ if late.is_empty() => return None,
            0 => {}
            more if late.len() >= BEHIND => texts.push(format!("{more} or more others")),
            more => texts.push(format!("{more} other{}", s(more))),
        }
        Some(texts.join("; "))
    }

    /// The first cause holds.
    fn break_off(&self, error: CommError) {
        let mut broken = lock(&self.broken);
        if broken.is_none() {
            *broken = Some(error);
            // The only byte ever written: it does not wait.
            let _ = (&self.told.1).write_all(&[1]);
            self.is_broken.notify_all();
        }
    }

    fn broken(&self) -> Option<CommError> {
        lock(&self.broken).clone()
    }

    /// See [`Control::verdict`].
    fn verdict(&self, limit: Duration) -> Option<CommError> {
        let broken = lock(&self.broken);
        let waited = self.is_broken.wait_timeout_while(broken, limit, |broken| broken.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The rank ends; only the first way counts.
    fn end(&self, how: Ending) {
        let mut ending = lock(&self.ending);
        if ending.is_none() {
            *ending = Some(how);
            // As above.
            let _ = (&self.wake.1).write_all(&[1]);
        }
    }

    fn ending(&self) -> Option<Ending> {
        lock(&self.ending).clone()
    }

    /// Takes the byte of `end`, so that the thread can wait for other things.
    fn awake(&self) {
        let _ = (&self.wake.0).read(&mut [0]);
    }
}

/// The time in which this process ran: a job that is suspended stands still with all its
/// deadlines.
#[derive(Debug)]
pub(super) struct Clock {
    began: Instant,
    looked: Instant,
    stood: Duration,
}

impl Clock {
    pub(super) fn new() -> Clock {
        Clock { began: Instant::now(), looked: Instant::now(), stood: Duration::ZERO }
    }

    /// To be called at least every second: for how long it stood still since it was last.
    pub(super) fn look(&mut self) -> Option<Duration> {
        let gap = self.looked.elapsed();
        self.looked = Instant::now();
        let stood = (gap > STOPPED).then_some(gap);
        self.stood += stood.unwrap_or_default();
        stood
    }

    /// Since it began.
    pub(super) fn ran(&self) -> Duration {
        self.began.elapsed().saturating_sub(self.stood)
    }
}

/// This rank's place in the group.
pub struct Control {
    rank: u32,
    key: Option<Key>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Sees from any thread that the group is broken, or says so; and says what goes on beside
/// the rank's own work.
#[derive(Clone)]
pub struct Watch(Arc<Shared>);

impl Watch {
    /// Waits until it is, and says how.
    #[must_use]
    pub fn broken(&self) -> CommError {
        let mut broken = lock(&self.0.broken);
        loop {
            match &*broken {
                Some(error) => return error.clone(),
                None => broken = self.0.is_broken.wait(broken).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Watch {
    /// Why the group is of no more use; `None` while it is whole.
    #[must_use]
    pub fn is_broken(&self) -> Option<CommError> {
        self.0.broken()
    }

    /// See [`Control::verdict`].
    #[must_use]
    pub fn verdict(&self, limit: Duration) -> Option<CommError> {
        self.0.verdict(limit)
    }

    /// The group is broken by what this rank saw: it breaks off here, and the other ranks are
    /// told. Comes back at once.
    pub fn break_off(&self, error: CommError) {
        let why = sentence(&error.to_string());
        self.0.break_off(error);
        self.0.end(Ending::Failed(why));
    }

    /// An operation begins that goes on beside the rank's own work: what the recorder keeps.
    pub fn begin(&self, sequence: u64, op: Op, tag: Tag, count: u64) {
        if let Some(recorder) = self.0.recorder.get() {
            lock(recorder).enter(sequence, op, tag, count);
        }
    }

    /// That operation is over.
    pub fn over(&self, sequence: u64) {
        if let Some(recorder) = self.0.recorder.get() {
            lock(recorder).over(sequence);
        }
    }

    /// The operation that this rank's device is in, or has left: what the others are told
    /// while the rank itself waits for no other.
    pub fn stand(&self, sequence: u64, op: Op, tag: Tag, inside: bool) {
        *lock(&self.0.beside) = Some((sequence, op, tag, inside));
    }

    /// See [`Control::waiting_for`]; `None`: all ranks are in it, as far as they said.
    #[must_use]
    pub fn waiting_for(&self, sequence: u64) -> Option<String> {
        self.0.waiting_for(sequence)
    }

    /// A rank, its host and its operation, if that has this number but is another one.
    #[must_use]
    pub fn differs(&self, sequence: u64, op: Op, tag: Tag) -> Option<(u32, String, String)> {
        let own = At::operation(sequence, op, tag);
        let behind = lock(&self.0.behind);
        let other = behind
            .iter()
            .find(|(rank, at)| *rank != self.0.rank && at.inside && at.sequence == sequence && *at != own)?;
        Some((other.0, self.0.host(other.0), other.1.text()))
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// Which thread of the process it is.
fn start_thread(run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    let named = std::thread::Builder::new().name("control".to_owned());
    named.spawn(run).map_err(|error| CommError::Own(format!("cannot start the thread of the control group: {error}")))
}

impl Control {
    /// Meets the other ranks at rank 0, who listens at `terms.master`, and comes back when
    /// all are there. `data_port` is where this rank waits for data connections; the peers
    /// are all ranks, this one too, by rank. A world of one meets nobody and opens no port.
    ///
    /// # Errors
    /// [`CommError::Refused`] says what is wrong with the terms, [`CommError::Start`] who did
    /// not come, [`CommError::Lost`] and [`CommError::Ended`] who is gone meanwhile.
    pub fn join(terms: &Terms, data_port: u16) -> Result<(Control, Vec<Peer>), CommError> {
        let (rank, world) = (terms.rank, terms.world_size);
        if rank >= world {
            return Err(CommError::Refused(format!("RANK={rank} is not below WORLD_SIZE={world}")));
        }
        let own = |error: io::Error| CommError::Own(format!("cannot make a pipe: {error}"));
        let shared = Arc::new(Shared::new(rank).map_err(own)?);
        let (peers, thread) = if world == 1 {
            let address = SocketAddr::from(([127, 0, 0, 1], data_port));
            (vec![Peer { rank, host: terms.host.clone(), address }], None)
        } else if rank == 0 {
            let (server, peers) = server::gather(terms, data_port, &shared)?;
            (peers, Some(start_thread(move || server.run())?))
        } else {
            let (client, peers) = client::join(terms, data_port, &shared)?;
            (peers, Some(start_thread(move || client.run())?))
        };
        let _ = shared.hosts.set(peers.iter().map(|peer| peer.host.clone()).collect());
        let control = Control { rank, key: terms.key.clone(), shared, thread: Mutex::new(thread) };
        Ok((control, peers))
    }

    /// The store key, for data connections.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// From now on operations are recorded there; only the first recorder counts.
    pub fn record(&self, recorder: Recorder) {
        let _ = self.shared.recorder.set(Mutex::new(recorder));
    }

    /// This rank enters an operation: what the others are told, and the recorder keeps.
    pub fn enter(&self, sequence: u64, op: Op, tag: Tag, count: u64) {
        *lock(&self.shared.place) = Some((sequence, op, tag, true));
        if let Some(recorder) = self.shared.recorder.get() {
            lock(recorder).enter(sequence, op, tag, count);
        }
    }

    /// This rank has left it.
    pub fn leave(&self) {
        if let Some((.., inside)) = &mut *lock(&self.shared.place) {
            *inside = false;
        }
        if let Some(recorder) = self.shared.recorder.get() {
            lock(recorder).leave();
        }
    }

    /// Readable once the group is broken: [`Control::broken`] says how. Never read from it.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.told.0.as_fd()
    }

    /// Why the group is of no more use; `None` while it is whole.
    #[must_use]
    pub fn broken(&self) -> Option<CommError> {
        self.shared.broken()
    }

    /// For a thread that is to see it while this rank does something else.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

    /// The same, waited for: who has lost a data connection knows sooner than anybody that
    /// something is wrong, but not what.
    #[must_use]
    pub fn verdict(&self, limit: Duration) -> Option<CommError> {
        self.shared.verdict(limit)
    }

    /// Who has not come to this operation, as far as is known here: heartbeats are a second
    /// old at most. "rank 11 on node2, which is at all_gather #8811 of block 16".
    #[must_use]
    pub fn waiting_for(&self, sequence: u64) -> String {
        self.shared.waiting_for(sequence).unwrap_or_else(|| "data: all ranks are in it, as far as they said".to_owned())
    }

    /// This rank ends with an error of its own, and the others are told why: one line, as a
    /// person is to read it. Comes back when they could hear it; the process may end then.
    pub fn fail(&self, why: &str) {
        self.finish(Ending::Failed(sentence(why)));
    }

    /// This rank is done. Rank 0 waits until all are, but not longer than the silence of
    /// [`Terms`].
    pub fn end(self) {
        self.finish(Ending::Orderly);
    }

    /// Waits until the others could hear the goodbye, a second or two.
    fn finish(&self, how: Ending) {
        self.shared.end(how);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Control {
    /// Without a goodbye the others see that the connection was closed.
    fn drop(&mut self) {
        let panics = std::thread::panicking();
        self.finish(if panics { Ending::Failed("it panicked".to_owned()) } else { Ending::Dropped });
    }
}

/// For a rank that will not take part, whatever the others do: they are told why, one line,
/// as a person is to read it, instead of waiting for it. Comes back when all could hear it, or
/// after `terms.start`.
pub fn refuse(terms: &Terms, why: &str) {
    let why = sentence(why);
    match terms.rank {
        rank if rank >= terms.world_size || terms.world_size == 1 => {}
        0 => server::refuse(terms, &why),
        _ => client::refuse(terms, &why),
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("rank", &self.rank).field("hosts", &self.shared.hosts).finish_non_exhaustive()
    }
}
