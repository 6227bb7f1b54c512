//! A forked process that starts a program for us, watches it, and ends it with all
//! that it has started: when it is told to, and when we die. Slurm ends a step's
//! processes too, but only those that it still finds.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::child::{close_all_but, pipe};
use super::output::exit_now;

/// How long the end of a process that was killed is waited for. One that waits for a
/// dead file server ends when that answers; it is then left behind.
const REAP: Duration = Duration::from_secs(1);

/// Signals that Slurm sends to all processes of a step, and that a command may send
/// to all of its own: they are not for the supervisor, which ends when the process
/// that started it has ended.
const NOT_OURS: [libc::c_int; 10] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGXCPU,
    libc::SIGTSTP,
];

/// The supervisor, seen from the process that started it.
#[derive(Debug)]
pub struct Supervisor {
    pid: libc::pid_t,
    /// Ours alone: its end is how the supervisor learns of ours.
    line: Option<OwnedFd>,
    /// Its other end, so that a word to a supervisor that has ended is no SIGPIPE for us.
    _other_end: OwnedFd,
    ended: Option<End>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl End {
    fn of(status: libc::c_int) -> End {
        if libc::WIFSIGNALED(status) {
            End::Killed(libc::WTERMSIG(status))
        } else {
            End::Exited(libc::WEXITSTATUS(status))
        }
    }
}

/// What the supervisor itself has.
#[derive(Debug)]
pub struct Duty {
    line: OwnedFd,
    children: OwnedFd,
    /// Whether who started us is gone: Slurm then ends what is left of the step within
    /// moments.
    hurry: Cell<bool>,
}

impl Supervisor {
    /// Forks it. `duty` runs there, with these descriptors of ours and no other.
    ///
    /// # Errors
    /// When there can be no process.
    pub fn start(kept: &[RawFd], duty: impl FnOnce(&Duty)) -> io::Result<Supervisor> {
        let (line, held) = pipe()?;
        // SAFETY: fork takes no pointers. The child runs `duty` and leaves by _exit; this
        // thread is its only one.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        if pid == 0 {
            drop(held);
            supervise(line, kept, duty);
        }
        // Here too: it may be ended before it has come so far.
        // SAFETY: takes numbers; our own child.
        unsafe { libc::setpgid(pid, pid) };
        Ok(Supervisor { pid, line: Some(held), _other_end: line, ended: None })
    }

    /// Lets it end, with all that it has started. Does not wait.
    pub fn let_go(&mut self) {
        if let Some(line) = self.line.take() {
            // Without this word it is our own end that it sees.
            let _ = File::from(line).write(b"e");
        }
    }

    /// How it ended, if it has, within `limit`.
    pub fn ended(&mut self, limit: Duration) -> Option<End> {
        let end = Instant::now() + limit;
        while self.ended.is_none() {
            let mut status = 0;
            // SAFETY: our own child, and a status that is ours.
            match unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) } {
                0 if Instant::now() >= end => break,
                0 => std::thread::sleep(Duration::from_millis(2)),
                -1 if interrupted() => {}
                -1 => self.ended = Some(End::Exited(0)),
                _ => self.ended = Some(End::of(status)),
            }
        }
        self.ended
    }

    /// Ends it at once, and the program it has started, which leads a group of its own.
    pub fn kill(&mut self, program: Option<i32>) {
        self.line = None;
        for group in
            [program, self.ended.is_none().then_some(self.pid)].into_iter().flatten().filter(|group| *group > 1)
        {
            // SAFETY: takes numbers. The supervisor is not waited for yet, and its program
            // has just been seen, so that neither number has passed to another.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        self.ended(REAP);
    }
}

fn interrupted() -> bool {
    io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
}

/// The supervisor's whole life.
fn supervise(line: OwnedFd, kept: &[RawFd], duty: impl FnOnce(&Duty)) -> ! {
    // SAFETY: takes numbers; leads a group of its own, so that it can be ended with it.
    unsafe { libc::setpgid(0, 0) };
    close_all_but(&[kept, &[line.as_raw_fd()]].concat());
    for signal in NOT_OURS {
        // SAFETY: no handler is set.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // What its program starts and leaves behind is then ours to end.
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    let Ok(children) = children_s_ends() else { exit_now(1) };
    let duty = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        duty(&Duty { line, children, hurry: Cell::new(false) })
    }));
    exit_now(i32::from(duty.is_err()));
}

/// A descriptor that is readable when a child has ended; their signal is blocked.
fn children_s_ends() -> io::Result<OwnedFd> {
    // SAFETY: all zeros are a valid set.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours; the default disposition keeps ended children for us.
    let descriptor = unsafe {
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

impl Duty {
    /// Waits until a child has ended, we are to end, or `limit` has passed. Whether we
    /// are to go on.
    pub fn wait(&self, limit: Duration) -> bool {
        let poll = |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut polls = [poll(&self.line), poll(&self.children)];
        let millis = i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: two pollfds, alive during the call.
        unsafe { libc::poll(polls.as_mut_ptr(), 2, millis) };
        if polls[1].revents != 0 {
            let mut told = [0u8; 1024];
            // SAFETY: the buffer is as long as we say.
            unsafe { libc::read(self.children.as_raw_fd(), told.as_mut_ptr().cast(), told.len()) };
        }
        let over = polls[0].revents;
        self.hurry.set(over & libc::POLLHUP != 0 && over & libc::POLLIN == 0);
        over == 0
    }

    /// A child that has ended: its number, and how.
    pub fn next_ended(&self) -> Option<(u32, End)> {
        let mut status = 0;
        // SAFETY: every child here is ours, and the status too.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        u32::try_from(pid).ok().filter(|pid| *pid > 0).map(|pid| (pid, End::of(status)))
    }

    /// Ends everything that was started: `program`, not waited for yet, with its session,
    /// and what left that. Asks first, and no longer than `grace`; does not ask when who
    /// started us is gone. Tells how `program` ended.
    pub fn end_all(&self, program: Option<u32>, grace: Duration) -> Option<End> {
        let mut known = program;
        let mut seen = None;
        for (signal, limit) in [(libc::SIGTERM, grace), (libc::SIGKILL, REAP)] {
            if signal == libc::SIGTERM && self.hurry.get() {
                continue;
            }
            let end = Instant::now() + limit;
            let mut asked = false;
            loop {
                while let Some((pid, how)) = self.next_ended() {
                    if known == Some(pid) {
                        (known, seen) = (None, Some(how));
                    }
                }
                let children = children();
                if children.is_empty() && known.is_none() {
                    return seen;
                }
                // Again and again where it cannot be refused: the children of those that have
                // ended have become ours.
                if signal == libc::SIGKILL || !asked {
                    asked = true;
                    let group = known.and_then(|pid| i32::try_from(pid).ok()).map(|pid| -pid);
                    for target in group.into_iter().chain(children) {
                        // SAFETY: takes numbers: of our own children, not waited for yet.
                        unsafe { libc::kill(target, signal) };
                        // One that was stopped hears nothing.
                        // SAFETY: as above.
                        unsafe { libc::kill(target, libc::SIGCONT) };
                    }
                }
                if Instant::now() >= end || (signal == libc::SIGTERM && self.hurry.get()) {
                    break;
                }
                self.wait_for_children(Duration::from_millis(20));
            }
        }
        seen
    }

    /// As [`Duty::wait`], also when we are to end.
    fn wait_for_children(&self, limit: Duration) {
        if !self.wait(limit) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Our children, dead ones too; none where /proc does not tell.
fn children() -> Vec<i32> {
    let own = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|pid| parent_of(*pid) == Some(own)).collect()
}

fn parent_of(pid: i32) -> Option<u32> {
    let mut stat = [0u8; 512];
    let read = File::open(format!("/proc/{pid}/stat")).ok()?.read(&mut stat).ok()?;
    let text = String::from_utf8_lossy(&stat[..read]).into_owned();
    // The name, which may hold anything, ends with the last bracket.
    text.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Lets `command` start as a program of its own: a new session, without a terminal that
/// could ask somebody; no signal ignored or blocked; these limits, by their numbers, as
/// far as the hard ones allow; no descriptor of ours. It ends with the process that
/// starts it.
pub fn apart(command: &mut Command, limits: &[(u32, u64)]) {
    let limits = limits.to_vec();
    let prepare = move || {
        // SAFETY: all of it takes numbers, or pointers to what is ours; nothing allocates.
        unsafe {
            libc::setsid();
            for signal in 1..=64 {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
            for (resource, soft) in &limits {
                let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                if libc::getrlimit(*resource, &raw mut limit) == 0 {
                    limit.rlim_cur = *soft;
                    // What cannot be stays, as in Slurm's own.
                    libc::setrlimit(*resource, &raw const limit);
                }
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        Ok(())
    };
    // SAFETY: between fork and exec; see above.
    unsafe { command.pre_exec(prepare) };
}

static ASKED_TO_END: AtomicBool = AtomicBool::new(false);

extern "C" fn asked_to_end(_signal: libc::c_int) {
    ASKED_TO_END.store(true, Ordering::Relaxed);
}

/// While this lives, SIGTERM does not end this process but is kept for it to heed: Slurm
/// ends all processes of a step as soon as its tasks have ended, and those that still
/// have something to put in order with them.
#[derive(Debug)]
pub struct Heed {
    before: libc::sighandler_t,
}

impl Heed {
    /// From now on.
    pub fn sigterm() -> Heed {
        let handler: extern "C" fn(libc::c_int) = asked_to_end;
        // SAFETY: the handler only stores to an atomic.
        Heed { before: unsafe { libc::signal(libc::SIGTERM, handler as libc::sighandler_t) } }
    }

    /// Whether it has come.
    pub fn asked(&self) -> bool {
        ASKED_TO_END.load(Ordering::Relaxed)
    }

    /// Ends this process as the signal would have. Goes on where it would not have.
    pub fn end(&self) {
        ASKED_TO_END.store(false, Ordering::Relaxed);
        // SAFETY: what was set before; a signal to this very thread.
        unsafe {
            libc::signal(libc::SIGTERM, self.before);
            libc::raise(libc::SIGTERM);
        }
    }
}

impl Drop for Heed {
    /// One that has come meanwhile is not lost.
    fn drop(&mut self) {
        // SAFETY: what was set before.
        unsafe { libc::signal(libc::SIGTERM, self.before) };
        if self.asked() {
            self.end();
        }
    }
}

/// A pipe: the end to read, which never waits, and the end to write.
///
/// # Errors
/// When there are no descriptors left.
pub fn reading_pipe() -> io::Result<(File, OwnedFd)> {
    let (reader, writer) = pipe()?;
    // SAFETY: our descriptor; the flags are of the reading end only.
    if unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((File::from(reader), writer))
}

/// Readable when one of several descriptors is, or has hung up, and once a second.
#[derive(Debug)]
pub struct Wake {
    all: OwnedFd,
    clock: OwnedFd,
}

impl Wake {
    /// Of these. One that is closed is taken out by that.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn new(of: &[BorrowedFd<'_>]) -> io::Result<Wake> {
        let opened = |descriptor: libc::c_int| {
            if descriptor < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: just opened, and nobody else owns it.
            Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
        };
        // SAFETY: takes a number.
        let all = opened(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: takes numbers.
        let clock =
            opened(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) })?;
        let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        let every = libc::itimerspec { it_interval: second, it_value: second };
        // SAFETY: the times are ours, the old ones are not asked for.
        if unsafe { libc::timerfd_settime(clock.as_raw_fd(), 0, &raw const every, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        for descriptor in of.iter().map(AsRawFd::as_raw_fd).chain([clock.as_raw_fd()]) {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: open descriptors, and an event that is ours.
            let added = unsafe { libc::epoll_ctl(all.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event) };
            if added != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Wake { all, clock })
    }

    /// The second that has passed is over.
    pub fn seen(&self) {
        let mut count = [0u8; 8];
        // SAFETY: the buffer is as long as we say.
        unsafe { libc::read(self.clock.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}
