//! Runs a question with no deadline of its own in a forked child that is killed
//! when time is up. Must not be given anything that needs a second thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use thiserror::Error;

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum ChildError {
    /// The deadline passed.
    #[error("no answer within {0:.1?}")]
    Deadline(Duration),
    /// No child could be started, or its answer could not be read.
    #[error("cannot ask: {0}")]
    Io(#[from] io::Error),
}

/// The longest answer. One that a pipe does not hold is read while the child
/// writes.
pub(super) const ANSWER_MAX: usize = 512 * 1024;

/// Ends each answer: half a one, of a child that was killed while it wrote, must
/// not pass for the whole.
const END: u8 = 4;

/// How long the end of a child is waited for.
const REAP: Duration = Duration::from_secs(1);

/// Runs `question` in a forked child and returns what it answers.
///
/// The child has this process's one calling thread only, so `question` must not
/// wait for another thread. It ends without running destructors or exit
/// handlers of this process, and with the thread that asks.
///
/// # Errors
/// When the child does not answer in time, or cannot be started.
pub fn run(deadline: Duration, question: impl FnOnce() -> Vec<u8>) -> Result<Vec<u8>, ChildError> {
    ask(question)?.answer(deadline)
}

/// A child that was asked and has not been heard yet; killed when dropped.
#[derive(Debug)]
pub struct Asked {
    pid: libc::pid_t,
    reader: OwnedFd,
    start: Instant,
    answered: bool,
    /// What was read of the answer so far.
    heard: Vec<u8>,
}

/// How long an answer that was ready while another child was heard may take to read:
/// a pipe holds its beginning only.
const READING: Duration = Duration::from_secs(1);

/// Starts such a child and does not wait for it, so that several can be asked at a
/// time.
///
/// # Errors
/// When it cannot be started.
pub fn ask(question: impl FnOnce() -> Vec<u8>) -> Result<Asked, ChildError> {
    ask_with(&[], question)
}

/// The same for a question that needs these descriptors of ours, sockets for one.
///
/// # Errors
/// When it cannot be started.
pub fn ask_with(kept: &[RawFd], question: impl FnOnce() -> Vec<u8>) -> Result<Asked, ChildError> {
    let start = Instant::now();
    let (reader, writer) = pipe()?;
    // SAFETY: getpid takes nothing and cannot fail.
    let parent = unsafe { libc::getpid() };
    // SAFETY: fork takes no pointers. The child below only runs `question`,
    // writes to the pipe and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error().into());
    }
    if pid == 0 {
        die_with(parent);
        answer(writer.as_raw_fd(), kept, question);
    }
    Ok(Asked { pid, reader, start, answered: false, heard: Vec::new() })
}

impl Asked {
    /// Waits for the answer, until `deadline` has passed since the question.
    ///
    /// # Errors
    /// When there is none in time.
    pub fn answer(mut self, deadline: Duration) -> Result<Vec<u8>, ChildError> {
        let end = (self.start + deadline).max(Instant::now() + READING);
        self.hear(end, deadline)
    }

    /// The answer, if it is there; looks without waiting. Nothing more is to be asked of
    /// a child that has given one, or an error.
    pub fn look(&mut self, deadline: Duration) -> Option<Result<Vec<u8>, ChildError>> {
        let late = self.start.elapsed() >= deadline;
        match self.hear(Instant::now(), deadline) {
            Err(ChildError::Deadline(_)) if !late => None,
            heard => Some(heard),
        }
    }

    /// Readable, or hung up, when there is something to hear.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    fn hear(&mut self, end: Instant, deadline: Duration) -> Result<Vec<u8>, ChildError> {
        let answer = read_until(&self.reader, &mut self.heard, end);
        let answer = answer.and_then(|()| whole(std::mem::take(&mut self.heard)));
        self.answered = answer.is_ok();
        answer.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => ChildError::Deadline(deadline),
            _ => error.into(),
        })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.answered {
            // SAFETY: `pid` is our own child and not waited for yet, so the number
            // cannot have passed to another process.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
        reap(self.pid);
    }
}

/// Lets this child be killed when its parent is: nobody else would end it, and
/// Slurm waits for every process of a step.
fn die_with(parent: libc::pid_t) {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: getppid takes nothing and cannot fail.
    let now = unsafe { libc::getppid() };
    // It may have been killed before; one in another pid namespace is 0.
    if now != parent && now != 0 {
        crate::system::output::exit_now(1);
    }
}

/// The answer without its end.
fn whole(mut answer: Vec<u8>) -> io::Result<Vec<u8>> {
    match answer.pop() {
        Some(END) => Ok(answer),
        _ => Err(io::Error::other("the child died")),
    }
}

/// A child that no signal ends, because its file system does not answer, is left
/// behind; it must not keep the pipes open that others read to their end, the
/// task's output first of all.
pub(super) fn close_all_but(kept: &[RawFd]) {
    let mut kept: Vec<libc::c_uint> = kept.iter().filter_map(|kept| (*kept).try_into().ok()).collect();
    kept.sort_unstable();
    let mut first = 0;
    for last in kept.iter().map(|kept| kept.checked_sub(1)).chain([Some(libc::c_uint::MAX)]) {
        if let Some(last) = last.filter(|last| first <= *last) {
            // SAFETY: closes numbers; nothing in this process uses them any more.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
        first = last.map_or(1, |last| last.saturating_add(2));
    }
    // Before Linux 5.9 there is no close_range.
    for number in (0..=2).filter(|number| !kept.contains(number)) {
        // SAFETY: as above; a C string, and a number nobody uses.
        unsafe {
            libc::close(number as libc::c_int);
            libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        }
    }
}

/// The child's whole life.
fn answer(writer: RawFd, kept: &[RawFd], question: impl FnOnce() -> Vec<u8>) -> ! {
    close_all_but(&[kept, &[writer]].concat());
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(question));
    let mut code = 1;
    if let Ok(mut bytes) = outcome {
        bytes.push(END);
        // SAFETY: the pointer and length are those of a live Vec.
        let written = unsafe { libc::write(writer, bytes.as_ptr().cast(), bytes.len()) };
        code = i32::from(usize::try_from(written) != Ok(bytes.len()));
    }
    // SAFETY: ends the child without touching the parent's buffers or handlers.
    unsafe { libc::_exit(code) }
}

pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors pipe2 writes.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: pipe2 has just opened both, and nobody else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// Adds to `answer` until its end.
pub(super) fn read_until(reader: &OwnedFd, answer: &mut Vec<u8>, end: Instant) -> io::Result<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // Rounded up, so that the last poll does not spin.
        let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        let mut poll = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, alive during the call.
        match unsafe { libc::poll(&mut poll, 1, millis) } {
            0 => return Err(io::ErrorKind::TimedOut.into()),
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
                continue;
            }
            _ => {}
        }
        let mut buffer = [0u8; 16 * 1024];
        // SAFETY: the buffer is ours and as long as we say.
        let read = unsafe { libc::read(reader.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        match usize::try_from(read) {
            Ok(0) => return Ok(()),
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
        if answer.len() > ANSWER_MAX + 1 {
            return Err(io::Error::other("the answer is too long"));
        }
    }
}

/// Waits for our child only: slurmstepd and srun wait for theirs themselves.
///
/// The child has ended or was killed, but a process that waits for a dead file
/// server ends only when that answers. It is then left behind.
fn reap(pid: libc::pid_t) {
    let end = Instant::now() + REAP;
    let mut pause = Duration::from_micros(100);
    loop {
        // SAFETY: a null status pointer is allowed.
        match unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) } {
            0 if Instant::now() < end => std::thread::sleep(pause),
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return,
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_back() {
        assert_eq!(run(Duration::from_secs(10), || b"yes".to_vec()).unwrap(), b"yes");
    }

    #[test]
    fn an_answer_longer_than_a_pipe_comes_back_whole() {
        let long: Vec<u8> = (0..300_000u32).map(|number| number as u8).collect();
        assert!(run(Duration::from_secs(10), || long.clone()).unwrap() == long);
    }

    #[test]
    fn a_silent_child_is_killed_at_the_deadline() {
        let start = Instant::now();
        let outcome = run(Duration::from_millis(100), || {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        });
        assert!(matches!(outcome, Err(ChildError::Deadline(_))), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn two_are_asked_at_a_time_and_one_that_is_silent_does_not_cost_the_other_s_answer() {
        let start = Instant::now();
        let silent = ask(|| {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        });
        let long = ask(|| vec![b'x'; ANSWER_MAX]);
        let dropped = ask(|| {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        });
        let pid = dropped.as_ref().unwrap().pid;
        drop(dropped);
        let outcome = silent.unwrap().answer(Duration::from_secs(1));
        assert!(matches!(outcome, Err(ChildError::Deadline(_))), "{outcome:?}");
        assert_eq!(long.unwrap().answer(Duration::from_secs(1)).unwrap().len(), ANSWER_MAX);
        // SAFETY: signal 0 only asks whether the process is there.
        assert_eq!(unsafe { libc::kill(pid, 0) }, -1);
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn an_answer_is_looked_for_without_waiting() {
        let (gone, held) = pipe().unwrap();
        let mut asked = ask_with(&[gone.as_raw_fd()], || {
            // Until the parent says so.
            let mut byte = [0u8; 1];
            // SAFETY: the buffer is as long as we say.
            unsafe { libc::read(gone.as_raw_fd(), byte.as_mut_ptr().cast(), 1) };
            vec![b'x'; 200_000]
        })
        .unwrap();
        let long = Duration::from_secs(20);
        assert!(asked.look(long).is_none());
        // SAFETY: a live slice.
        unsafe { libc::write(held.as_raw_fd(), b"!".as_ptr().cast(), 1) };
        let end = Instant::now() + long;
        let answer = loop {
            if let Some(answer) = asked.look(long) {
                break answer;
            }
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(answer.unwrap().len(), 200_000);
        let mut silent = ask(|| {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        })
        .unwrap();
        assert!(matches!(silent.look(Duration::ZERO), Some(Err(ChildError::Deadline(_)))));
    }

    #[test]
    fn a_child_that_dies_is_an_error() {
        // SAFETY: ends the child of this test.
        let outcome = run(Duration::from_secs(10), || unsafe { libc::_exit(3) });
        assert!(matches!(outcome, Err(ChildError::Io(_))), "{outcome:?}");
    }

    #[test]
    fn half_an_answer_and_one_that_is_too_long_are_errors() {
        // As a child that is killed while it writes, the pipe being all it has.
        let outcome = run(Duration::from_secs(10), || {
            let pipe = (0..1024).find(|fd| {
                let target = std::fs::read_link(format!("/proc/self/fd/{fd}"));
                target.is_ok_and(|target| target.to_string_lossy().starts_with("pipe:"))
            });
            // SAFETY: a live slice, and the pipe of this child, which ends here.
            unsafe {
                libc::write(pipe.unwrap_or(-1), b"+half".as_ptr().cast(), 5);
                libc::_exit(0)
            }
        });
        assert!(matches!(&outcome, Err(ChildError::Io(error)) if error.to_string() == "the child died"), "{outcome:?}");
        assert_eq!(run(Duration::from_secs(10), || vec![b'x'; ANSWER_MAX]).unwrap().len(), ANSWER_MAX);
        let outcome = run(Duration::from_secs(10), || vec![b'x'; ANSWER_MAX + 1]);
        assert!(
            matches!(&outcome, Err(ChildError::Io(error)) if error.to_string().contains("too long")),
            "{outcome:?}"
        );
        assert_eq!(run(Duration::from_secs(10), Vec::new).unwrap(), b"");
    }

    /// As when a step is cancelled while its tasks still ask.
    #[test]
    fn a_child_ends_with_the_process_that_asks() {
        let note = std::env::temp_dir().join(format!("palingenesis-orphan-{}", std::process::id()));
        let _ = run(Duration::from_secs(1), || {
            let inner = run(Duration::from_secs(600), || {
                std::fs::write(&note, std::process::id().to_string()).unwrap();
                loop {
                    std::thread::sleep(Duration::from_secs(600));
                }
            });
            inner.unwrap_or_default()
        });
        let pid = std::fs::read_to_string(&note).unwrap();
        std::fs::remove_file(&note).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        // Dead, and perhaps not waited for by whoever took it over.
        let runs = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
        };
        while runs() {
            assert!(Instant::now() < end, "process {pid} lives on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Nothing that another process waits to see closed.
    #[test]
    fn the_child_holds_no_descriptor_of_ours() {
        let _held = pipe().unwrap();
        let answer = run(Duration::from_secs(10), || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
            let open = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            let names: Vec<String> = open.map(|target| target.to_string_lossy().into_owned()).collect();
            names.join(" ").into_bytes()
        });
        let text = String::from_utf8(answer.unwrap()).unwrap();
        let pipes = text.split(' ').filter(|target| target.starts_with("pipe:")).count();
        let null = text.split(' ').filter(|target| *target == "/dev/null").count();
        assert_eq!((pipes, null), (1, 3), "{text}");
        // And the directory that is being read.
        assert_eq!(text.split(' ').count(), 5, "{text}");
    }

    #[test]
    fn no_descriptor_is_left_open() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let _ = run(Duration::from_secs(10), || b"warm".to_vec());
        let before = open();
        for _ in 0..20 {
            let _ = run(Duration::from_secs(10), || b"x".to_vec());
        }
        // Other tests of this process open files meanwhile.
        assert!(open() <= before + 10);
    }
}
