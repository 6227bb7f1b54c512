//! One operation under way: its header, its deadline, and how a wait ends: with bytes, with
//! the word of another rank, with the store's verdict, or when the time is over. What goes
//! over the connections is decided elsewhere.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use palingenesis::system::sockets;

use super::header::{self, Header};
use super::link::Link;
use crate::comm::CommError;
use crate::comm::control::{Clock, Control};

/// How long the store is asked who is gone before the neighbour is blamed.
const VERDICT: Duration = Duration::from_secs(1);

/// Between two looks at the clock, so that a job that was suspended is known from ranks that
/// are late.
const LOOK: Duration = Duration::from_secs(1);

/// How long the notice of an error may take from rank to rank behind the store's word.
const NOTICE: Duration = Duration::from_millis(300);

/// This rank and its connections.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) host: String,
    pub(super) control: Control,
    /// To the ranks 1, 2, 4, 8, … further on.
    pub(super) outs: Vec<Link>,
    /// From the ranks 1, 2, 4, 8, … further back.
    pub(super) ins: Vec<Link>,
}

/// Bytes on their way to another rank.
#[derive(Debug)]
pub(super) struct Sending<'a> {
    pub(super) out: usize,
    pub(super) bytes: &'a [u8],
}

/// One operation.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) group: &'a mut Group,
    pub(super) header: Header,
    /// Since the operation began.
    pub(super) clock: Clock,
    pub(super) timeout: Duration,
}

impl Turn<'_> {
    /// A group that is broken begins nothing.
    pub(super) fn start(&mut self) -> Result<(), CommError> {
        match self.group.control.broken() {
            None => Ok(()),
            // The rank that saw it first knows more.
            Some(error) => match self.group.outs.iter_mut().find_map(Link::heard) {
                Some(told) => Err(told),
                None => Err(self.here(error)),
            },
        }
    }

    /// Lets the other ranks know why this one goes on no more.
    pub(super) fn tell(&self, error: &CommError) {
        let ended =
            |why: &String| CommError::Ended { rank: self.group.rank, host: self.group.host.clone(), why: why.clone() };
        let told = match error {
            CommError::Own(why) => &ended(why),
            error => error,
        };
        self.group.ins.iter().for_each(|link| link.tell(told));
        self.group.control.fail(&error.to_string());
    }

    /// Sends to `outs[out]` what it takes now.
    pub(super) fn send(&mut self, out: usize, bytes: [&[u8]; 2]) -> Result<usize, CommError> {
        let link = &self.group.outs[out];
        match link.stream.send(bytes) {
            Ok(sent) => Ok(sent),
            Err(error) => Err(self.lost(link.rank, link.host.clone(), error.to_string())),
        }
    }

    /// Takes from `ins[from]` what is there now.
    pub(super) fn receive(&mut self, from: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        let link = &self.group.ins[from];
        match link.stream.receive(bytes) {
            Ok(got) => Ok(got),
            Err(error) => Err(self.lost(link.rank, link.host.clone(), error.to_string())),
        }
    }

    /// Waits until `ins[read]` has bytes or `outs[write]` room, or a while.
    pub(super) fn wait(&mut self, read: Option<usize>, write: Option<usize>) -> Result<(), CommError> {
        self.clock.look();
        let left = self.timeout.saturating_sub(self.clock.ran());
        if left.is_zero() {
            let who = self.group.control.waiting_for(self.header.sequence);
            return Err(CommError::Late { who, op: self.header.name(), after: self.timeout });
        }
        let group = &mut *self.group;
        let mut fds = Vec::with_capacity(group.outs.len() + 2);
        fds.push((group.control.fd(), false));
        fds.extend(read.map(|from| (group.ins[from].stream.as_fd(), false)));
        let outs = fds.len();
        // A closed one is ready all the time, which says nothing; where bytes are to go
        // there, sending fails.
        let open = |(out, link): (usize, &mut Link)| !link.closed || write == Some(out);
        let watched: Vec<usize> =
            group.outs.iter_mut().enumerate().filter_map(|(out, link)| open((out, link)).then_some(out)).collect();
        fds.extend(watched.iter().map(|out| (group.outs[*out].stream.as_fd(), write == Some(*out))));
        // Whoever calls this calls it again.
        let ready = sockets::wait(&fds, left.min(LOOK));
        drop(fds);
        for (out, _) in watched.into_iter().zip(&ready[outs..]).filter(|(_, ready)| **ready) {
            let link = &mut group.outs[out];
            if let Some(error) = link.heard() {
                return Err(error);
            }
            if link.closed && write == Some(out) {
                let (rank, host) = (link.rank, link.host.clone());
                return Err(self.lost(rank, host, "its connection was closed".to_string()));
            }
        }
        if ready[0] { Err(self.broken()) } else { Ok(()) }
    }

    /// Receives all of `bytes` from `ins[from]`; what is being sent goes on meanwhile.
    pub(super) fn fetch(&mut self, from: usize, mut bytes: &mut [u8], sending: &mut Sending) -> Result<(), CommError> {
        while !bytes.is_empty() {
            let sent = self.push(sending)?;
            let got = self.receive(from, bytes)?;
            bytes = &mut bytes[got..];
            if sent + got == 0 {
                self.wait(Some(from), (!sending.bytes.is_empty()).then_some(sending.out))?;
            }
        }
        Ok(())
    }

    /// Sends the rest.
    pub(super) fn finish(&mut self, sending: &mut Sending) -> Result<(), CommError> {
        while !sending.bytes.is_empty() {
            if self.push(sending)? == 0 {
                self.wait(None, Some(sending.out))?;
            }
        }
        Ok(())
    }

    fn push(&mut self, sending: &mut Sending) -> Result<usize, CommError> {
        if sending.bytes.is_empty() {
            return Ok(0);
        }
        let sent = self.send(sending.out, [sending.bytes, &[]])?;
        sending.bytes = &sending.bytes[sent..];
        Ok(sent)
    }

    /// Compares what `ins[from]` has sent with this rank's own operation.
    pub(super) fn check(&self, from: usize, bytes: &[u8; header::LENGTH]) -> Result<(), CommError> {
        let link = &self.group.ins[from];
        let theirs = Header::from_bytes(bytes);
        let why = match &theirs {
            None => "these bytes begin no operation",
            Some(theirs) => match self.header.difference(theirs) {
                None => return Ok(()),
                Some(why) => why,
            },
        };
        Err(CommError::Mismatch {
            rank: link.rank,
            host: link.host.clone(),
            theirs: theirs.map_or_else(|| "nothing known".to_string(), |theirs| theirs.describe()),
            by: self.group.rank,
            by_host: self.group.host.clone(),
            ours: self.header.describe(),
            why: why.to_string(),
        })
    }

    /// What another rank has told, or the store knows.
    fn broken(&mut self) -> CommError {
        if let Some(error) = self.group.outs.iter_mut().find_map(Link::heard) {
            return error;
        }
        match self.group.control.verdict(VERDICT) {
            Some(error) => self.here(error),
            None => CommError::Own(format!("the group broke for a reason unknown here in {}", self.header.name())),
        }
    }

    /// What the store says, as this rank tells it. What it heard of the lost rank may be a
    /// second old: the operation in which this rank missed the other is added. Of a rank
    /// that has ended with an error of an operation, the error itself is on its way.
    pub(super) fn here(&mut self, error: CommError) -> CommError {
        match error {
            CommError::Lost { rank, host, why, op } if op != self.header.name() => {
                let op = format!("{}, when last heard of in {op}", self.header.name());
                CommError::Lost { rank, host, why, op }
            }
            CommError::Ended { .. } => {
                let until = Instant::now() + NOTICE;
                loop {
                    if let Some(told) = self.group.outs.iter_mut().find_map(Link::heard) {
                        return told;
                    }
                    let left = until.saturating_duration_since(Instant::now());
                    let open = self.group.outs.iter().filter(|link| !link.closed);
                    let fds: Vec<_> = open.map(|link| (link.stream.as_fd(), false)).collect();
                    if left.is_zero() || fds.is_empty() {
                        return error;
                    }
                    sockets::wait(&fds, left);
                }
            }
            error => error,
        }
    }

    /// A connection broke: the rank at its other end may be gone, or have ended because of
    /// a third one.
    fn lost(&mut self, rank: u32, host: String, why: String) -> CommError {
        let until = Instant::now() + VERDICT;
        let group = &mut *self.group;
        loop {
            if let Some(error) = group.outs.iter_mut().find_map(Link::heard) {
                return error;
            }
            if let Some(error) = group.control.broken() {
                return self.here(error);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return CommError::Lost { rank, host, why, op: self.header.name() };
            }
            let mut fds = vec![(group.control.fd(), false)];
            fds.extend(group.outs.iter().filter(|link| !link.closed).map(|link| (link.stream.as_fd(), false)));
            if sockets::wait(&fds, left)[0]
                && let Some(error) = group.control.verdict(left)
            {
                return self.here(error);
            }
        }
    }
}
