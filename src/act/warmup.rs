//! Runs the warm-up's command and tells its output as it comes.
//!
//! A supervisor, forked from the task, sets the marks in the directories that the
//! command fills, starts the command, and ends it with everything it has started: at
//! its time limit, and when the task is gone. Whatever waits for a file server waits
//! there. The task reads two pipes: the command's output, and what the supervisor
//! reports.

mod lines;
mod marker;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::lines::Lines;
use self::marker::{Marker, Owner, Seen, Tried};
use super::preflight::Work;
use crate::plan::warmup::{WarmEnd, WarmOutcome, WarmSpec};
use crate::report::one_line;
use crate::system::output::to_stderr;
use crate::system::supervisor::{Duty, End, Heed, Supervisor, Wake, apart, reading_pipe};
use crate::system::{folder, limits, random};

/// How often a holder gives a sign of life.
const BEAT: Duration = Duration::from_secs(5);

/// How long a mark must have been silent to be taken over.
const SILENT: Duration = Duration::from_secs(60);

/// The longest pause between two looks at another's mark.
const LOOK: Duration = Duration::from_secs(1);

/// When people are told of a wait, and how often after that.
const TELL_FIRST: Duration = Duration::from_secs(10);
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// How long a command may take to end when it is asked to. Every rank of the step is
/// to have stopped two seconds after one has failed.
const GRACE: Duration = Duration::from_millis(500);

/// How long the supervisor may take for all of that.
const LET_GO: Duration = Duration::from_millis(1900);

/// Longer than a supervisor takes that is not held up.
const HELD_UP: Duration = Duration::from_secs(60);

/// Bytes of output read at a time, before others are heard again.
const AT_A_TIME: usize = 256 * 1024;

/// Bytes of output behind the command's end.
const REST: usize = 4 * 1024 * 1024;

/// Longer than any report.
const LONGEST_REPORT: usize = 64 * 1024;

/// What the supervisor says, a line of JSON each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Report {
    /// For people.
    Note(String),
    /// The command has started, as this process.
    Started(i32),
    /// All is over; how, and how many seconds the command ran.
    Ended(WarmEnd, u32),
}

/// A warm-up that runs. Dropped, it ends what it has started.
pub struct Warmup {
    spec: WarmSpec,
    supervisor: Supervisor,
    output: Option<File>,
    reports: File,
    wake: Wake,
    heard: Vec<u8>,
    lines: Lines,
    program: Option<i32>,
    /// When the command started, and when anything was told last.
    since: Instant,
    told: Instant,
    latest: Instant,
    ended: Option<(WarmEnd, u32)>,
    tell: Box<dyn FnMut(&str)>,
    /// Dropped last, when all has been ended.
    heed: Heed,
}

impl Warmup {
    /// Starts it. `environment` is the task's own, every variable byte for byte;
    /// [`WarmSpec::variables`] is applied to it.
    ///
    /// # Errors
    /// When no child can be started.
    pub fn start(spec: WarmSpec, environment: Vec<(OsString, OsString)>) -> io::Result<Warmup> {
        Warmup::start_with(spec, environment, Pace { beat: BEAT, silent: SILENT }, Box::new(to_stderr))
    }

    fn start_with(
        spec: WarmSpec,
        environment: Vec<(OsString, OsString)>,
        pace: Pace,
        tell: Box<dyn FnMut(&str)>,
    ) -> io::Result<Warmup> {
        let heed = Heed::sigterm();
        let (output, writer) = reading_pipe()?;
        let (reports, reporter) = reading_pipe()?;
        let environment = spec.variables(environment);
        let kept = [writer.as_raw_fd(), reporter.as_raw_fd()];
        let supervisor = Supervisor::start(&kept, |duty| {
            supervise(duty, pace, &spec, &environment, writer, File::from(reporter));
        })?;
        let wake = Wake::new(&[output.as_fd(), reports.as_fd()])?;
        let now = Instant::now();
        // It waits, and then it runs.
        let latest = now + 2 * Duration::from_secs(u64::from(spec.seconds)) + HELD_UP;
        Ok(Warmup {
            spec,
            supervisor,
            output: Some(output),
            reports,
            wake,
            heard: Vec::new(),
            lines: Lines::new(now),
            program: None,
            since: now,
            told: now,
            latest,
            ended: None,
            tell,
            heed,
        })
    }

    fn show(&mut self, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        let prefix = self.spec.prefix();
        let text: String = lines.iter().map(|line| one_line(&format!("{prefix}{line}"))).collect();
        (self.tell)(&text);
        self.told = Instant::now();
    }

    fn note(&mut self, text: &str) {
        (self.tell)(&one_line(&format!("palingenesis: note: {text}")));
        self.told = Instant::now();
    }

    /// Shows what was written, of `most` bytes.
    fn read_output(&mut self, most: usize) {
        let mut buffer = [0u8; 16 * 1024];
        let mut left = most;
        while let Some(output) = self.output.as_mut().filter(|_| left > 0) {
            match output.read(&mut buffer) {
                Ok(0) => self.output = None,
                Ok(read) => {
                    left = left.saturating_sub(read);
                    let lines = self.lines.take(&buffer[..read], Instant::now());
                    self.show(&lines);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.output = None,
            }
        }
    }

    /// What the supervisor has reported. False: it will report nothing more.
    fn read_reports(&mut self) -> bool {
        let mut buffer = [0u8; 4096];
        loop {
            match self.reports.read(&mut buffer) {
                Ok(0) => return false,
                Ok(read) => self.heard.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
            while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(Report::Note(text)) => self.note(&text),
                    Ok(Report::Started(pid)) => {
                        self.program = Some(pid);
                        self.since = Instant::now();
                        self.told = self.since;
                    }
                    Ok(Report::Ended(end, seconds)) => self.ended = Some((end, seconds)),
                    Err(_) => return false,
                }
            }
            if self.heard.len() > LONGEST_REPORT {
                return false;
            }
        }
    }

    /// Ends it with all that it has started, if it has not ended.
    fn stop(&mut self) {
        self.supervisor.let_go();
        if self.supervisor.ended(LET_GO).is_none() {
            self.supervisor.kill(self.program);
        }
    }

    /// How it ended, if it has.
    fn end(&mut self) -> Option<(WarmEnd, u32)> {
        self.wake.seen();
        if self.heed.asked() {
            // scancel, or the job's time limit.
            self.stop();
            self.heed.end();
            return Some((WarmEnd::Killed(libc::SIGTERM), 0));
        }
        self.read_output(AT_A_TIME);
        let more = self.read_reports();
        if let Some(ended) = self.ended.take() {
            self.program = None;
            self.read_output(REST);
            return Some(ended);
        }
        let ran = || u32::try_from(self.since.elapsed().as_secs()).unwrap_or(u32::MAX);
        if !more {
            // Somebody has ended it, the kernel for want of memory most likely.
            let seconds = ran();
            self.supervisor.kill(self.program);
            self.read_output(REST);
            let end = match self.supervisor.ended(Duration::ZERO) {
                Some(End::Killed(signal)) => WarmEnd::Killed(signal),
                _ => WarmEnd::NotStarted("the process that watches it has ended".into()),
            };
            return Some((end, seconds));
        }
        if Instant::now() >= self.latest {
            let seconds = ran();
            self.supervisor.kill(self.program);
            self.read_output(REST);
            return Some((WarmEnd::TooLong, seconds));
        }
        if self.program.is_some() && self.told.elapsed() >= TELL_AGAIN {
            let text = self.spec.goes_on(self.since.elapsed().as_secs());
            self.note(&text);
        }
        None
    }
}

/// The answer is a [`WarmOutcome`] as JSON.
impl Work for Warmup {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        let (end, seconds) = self.end()?;
        let rest = self.lines.end();
        self.show(&rest);
        let outcome = WarmOutcome { end, seconds, last_lines: self.lines.last() };
        Some(serde_json::to_vec(&outcome).unwrap_or_default())
    }
}

impl Drop for Warmup {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for Warmup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Warmup").field("spec", &self.spec).field("program", &self.program).finish_non_exhaustive()
    }
}

/// How long things take; shorter in tests.
#[derive(Debug, Clone, Copy)]
struct Pace {
    beat: Duration,
    silent: Duration,
}

/// What the supervisor works with.
struct Watch<'a> {
    duty: &'a Duty,
    spec: &'a WarmSpec,
    owner: Owner,
    reporter: File,
    pace: Pace,
    /// Directories of which it has said that no mark can be made there.
    unmarked: Vec<String>,
}

/// Why it stopped before the end.
enum Stopped {
    /// Nobody waits for it any more.
    LetGo,
    /// Another took a mark over; in this directory.
    Lost(String),
    /// It ended without having run.
    Ended(WarmEnd),
}

/// The supervisor's work.
fn supervise(
    duty: &Duty,
    pace: Pace,
    spec: &WarmSpec,
    environment: &[(OsString, OsString)],
    output: OwnedFd,
    reporter: File,
) {
    let id = random::bytes::<16>().map(|bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect());
    let owner = Owner {
        step: spec.step.clone(),
        host: spec.node.clone(),
        user: folder::user(),
        pid: std::process::id(),
        id: id.unwrap_or_else(|_| format!("{}-{}", spec.step, std::process::id())),
    };
    let mut watch = Watch { duty, spec, owner, reporter, pace, unmarked: Vec::new() };
    loop {
        let mut marks = match watch.marks() {
            Ok(marks) => marks,
            Err(Stopped::Ended(end)) => return watch.report(&Report::Ended(end, 0)),
            Err(_) => return,
        };
        let ended = watch.run(environment, &output, &mut marks);
        give_back(marks);
        match ended {
            Ok((end, seconds)) => return watch.report(&Report::Ended(end, seconds)),
            Err(Stopped::Ended(end)) => return watch.report(&Report::Ended(end, 0)),
            Err(Stopped::Lost(target)) => watch.report(&Report::Note(spec.starts_again(&target))),
            Err(Stopped::LetGo) => return,
        }
    }
}

/// Marks with their directories.
type Marks = Vec<(String, Marker)>;

fn give_back(marks: Marks) {
    for (_, mark) in marks {
        mark.give_back();
    }
}

/// Another's mark that is waited for.
struct Waiting {
    target: String,
    seen: Seen,
    /// For how long it has looked so, of the time in which it was looked at.
    silent: Duration,
}

impl Watch<'_> {
    fn report(&mut self, report: &Report) {
        if let Ok(mut line) = serde_json::to_string(report) {
            line.push('\n');
            // Nobody reads it where the task is gone, and that is seen elsewhere.
            let _ = self.reporter.write_all(line.as_bytes());
        }
    }

    /// Sets a mark in every directory, or in none: two that have one each and wait for the
    /// other's would wait for ever. `taken` has been set already.
    fn set_all(&mut self, taken: Option<(String, Marker)>) -> Result<Marks, (String, Seen)> {
        let mut marks: Marks = taken.into_iter().collect();
        let spec = self.spec;
        for target in &spec.targets {
            if marks.iter().any(|(path, _)| *path == target.path) {
                continue;
            }
            match marker::set(&target.path, &self.owner) {
                Tried::Set(mark) => marks.push((target.path.clone(), mark)),
                Tried::Held(seen) => {
                    give_back(marks);
                    return Err((target.path.clone(), seen));
                }
                Tried::OursAlready => {}
                Tried::Impossible(error) => self.goes_without(&target.path, &error),
            }
        }
        Ok(marks)
    }

    /// Where one may make nothing the command fills nothing either, and all is well.
    fn goes_without(&mut self, target: &str, error: &io::Error) {
        let harmless = matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS));
        if harmless || self.unmarked.iter().any(|path| path == target) {
            return;
        }
        self.unmarked.push(target.into());
        let text = self.spec.goes_without(target, &error.to_string());
        self.report(&Report::Note(text));
    }

    /// Waits until it has every directory for itself.
    fn marks(&mut self) -> Result<Marks, Stopped> {
        let limit = Duration::from_secs(u64::from(self.spec.seconds));
        let start = Instant::now();
        let mut tell_at = TELL_FIRST;
        let mut pause = Duration::from_millis(20);
        let mut waiting: Option<Waiting> = None;
        loop {
            // One that is waited for is tried alone, so that others are not held up meanwhile.
            let tried = match &waiting {
                None => self.set_all(None),
                Some(waiting) => match self.look(waiting) {
                    Tried::Set(mark) => self.set_all(Some((waiting.target.clone(), mark))),
                    Tried::Held(seen) => Err((waiting.target.clone(), seen)),
                    Tried::Impossible(_) | Tried::OursAlready => self.set_all(None),
                },
            };
            let (target, seen) = match tried {
                Ok(marks) => return Ok(marks),
                Err(held) => held,
            };
            let holder = seen.holder();
            let silent = match waiting {
                // A pause that was longer than asked for shows that we were stopped: so may
                // the holder have been.
                Some(waiting) if waiting.seen == seen && waiting.target == target => waiting.silent,
                _ => Duration::ZERO,
            };
            let waited = start.elapsed();
            if waited >= limit {
                return Err(Stopped::Ended(WarmEnd::Waited { target, holder }));
            }
            if waited >= tell_at {
                tell_at = waited + TELL_AGAIN;
                let text = self.spec.waits(&target, &holder, waited.as_secs());
                self.report(&Report::Note(text));
            }
            let asleep = Instant::now();
            let nap = jittered(pause).min(limit - waited);
            if !self.duty.wait(nap) {
                return Err(Stopped::LetGo);
            }
            pause = (pause * 2).min(LOOK);
            let silent = silent + asleep.elapsed().min(nap + LOOK);
            waiting = Some(Waiting { target, seen, silent });
        }
    }

    /// Looks at a mark that is waited for, and takes it over where it has been silent.
    fn look(&mut self, waiting: &Waiting) -> Tried {
        if waiting.silent < self.pace.silent {
            return marker::set(&waiting.target, &self.owner);
        }
        let tried = marker::take_over(&waiting.target, &self.owner, &waiting.seen);
        if matches!(tried, Tried::Set(_)) {
            let text = self.spec.takes_over(&waiting.target, &waiting.seen.holder(), waiting.silent.as_secs());
            self.report(&Report::Note(text));
        }
        tried
    }

    /// Runs the command to its end, and ends what it leaves behind.
    fn run(
        &mut self,
        environment: &[(OsString, OsString)],
        output: &OwnedFd,
        marks: &mut Marks,
    ) -> Result<(WarmEnd, u32), Stopped> {
        let not_started = |error: io::Error| Stopped::Ended(WarmEnd::NotStarted(format!("/bin/sh: {error}")));
        let streams = output.try_clone().and_then(|first| Ok((first, output.try_clone()?)));
        let (out, err) = streams.map_err(not_started)?;
        let limits: Vec<(u32, u64)> =
            self.spec.limits.iter().filter_map(|limit| Some((limits::number(limit.name)?, limit.soft))).collect();
        let mut command = Command::new("/bin/sh");
        command
            .arg("-c")
            .arg(&self.spec.command)
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        apart(&mut command, &limits);
        let start = Instant::now();
        let child = command.spawn().map_err(not_started)?;
        drop(command); // and with it our ends of its output
        let pid = child.id();
        self.report(&Report::Started(i32::try_from(pid).unwrap_or(0)));
        let ended = self.until_it_ends(pid, start, marks);
        let program = ended.is_err().then_some(pid);
        let seen = self.duty.end_all(program, GRACE);
        let seconds = u32::try_from(start.elapsed().as_secs()).unwrap_or(u32::MAX);
        match ended {
            Ok(End::Exited(code)) => Ok((WarmEnd::Exited(code), seconds)),
            Ok(End::Killed(signal)) => Ok((WarmEnd::Killed(signal), seconds)),
            // It came to its end just then.
            Err(Stopped::Ended(_)) if seen == Some(End::Exited(0)) => Ok((WarmEnd::Exited(0), seconds)),
            Err(Stopped::Ended(end)) => Ok((end, seconds)),
            Err(stopped) => Err(stopped),
        }
    }

    fn until_it_ends(&self, pid: u32, start: Instant, marks: &mut Marks) -> Result<End, Stopped> {
        let limit = Duration::from_secs(u64::from(self.spec.seconds));
        let mut beat_at = self.pace.beat;
        loop {
            while let Some((ended, how)) = self.duty.next_ended() {
                if ended == pid {
                    return Ok(how);
                }
            }
            let ran = start.elapsed();
            if ran >= limit {
                return Err(Stopped::Ended(WarmEnd::TooLong));
            }
            if ran >= beat_at {
                beat_at = ran + self.pace.beat;
                // Every one of them, whatever another's came to.
                let lost: Vec<String> =
                    marks.iter_mut().filter_map(|(path, mark)| (!mark.beat()).then(|| path.clone())).collect();
                if let Some(target) = lost.first() {
                    return Err(Stopped::Lost(target.clone()));
                }
            }
            if !self.duty.wait(beat_at.min(limit).saturating_sub(ran)) {
                return Err(Stopped::LetGo);
            }
        }
    }
}

/// So that several that wait do not look all at once.
fn jittered(pause: Duration) -> Duration {
    let [byte] = random::bytes::<1>().unwrap_or([128]);
    pause / 2 + pause * u32::from(byte) / 256
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WarmPer;
    use crate::plan::warmup::{Limit, MARK, Target};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex};

    const LONG: Duration = Duration::from_secs(60);

    /// Signs and silence of a hurried world.
    const HURRY: Pace = Pace { beat: Duration::from_millis(200), silent: Duration::from_secs(3) };

    struct Place(PathBuf);

    impl Place {
        fn new() -> Place {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let name = format!("palingenesis-warm-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Place(path)
        }

        fn read(&self, name: &str) -> String {
            std::fs::read_to_string(self.0.join(name)).unwrap_or_default()
        }

        /// A warm-up that fills this place.
        fn spec(&self, command: &str, seconds: u32) -> WarmSpec {
            WarmSpec {
                command: command.replace("PLACE", self.0.to_str().unwrap()),
                per: WarmPer::Step,
                seconds,
                node: "n1".into(),
                step: "7.0".into(),
                limits: Vec::new(),
                targets: vec![Target { path: self.0.display().to_string(), why: "" }],
            }
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn start(spec: WarmSpec) -> (Warmup, Arc<Mutex<String>>) {
        let said = Arc::new(Mutex::new(String::new()));
        let hears = Arc::clone(&said);
        let environment = vec![("PATH".into(), "/usr/bin:/bin".into()), ("RANK".into(), "0".into())];
        let tell = Box::new(move |text: &str| hears.lock().unwrap().push_str(text));
        (Warmup::start_with(spec, environment, HURRY, tell).unwrap(), said)
    }

    /// As the leader of a node does it: by the descriptor alone.
    fn outcome(warmup: &mut Warmup) -> WarmOutcome {
        let end = Instant::now() + LONG;
        loop {
            if let Some(answer) = warmup.advance() {
                return serde_json::from_slice(&answer).unwrap();
            }
            assert!(Instant::now() < end, "no end");
            let mut poll = libc::pollfd { fd: warmup.fd().unwrap().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd, alive during the call.
            unsafe { libc::poll(&raw mut poll, 1, 5_000) };
        }
    }

    fn run(spec: WarmSpec) -> (WarmOutcome, String) {
        let (mut warmup, said) = start(spec);
        let outcome = outcome(&mut warmup);
        drop(warmup);
        let said = said.lock().unwrap().clone();
        (outcome, said)
    }

    /// Whether the process lives: not one that is dead and not waited for.
    fn lives(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
    }

    fn until(what: &str, mut is: impl FnMut() -> bool) {
        let end = Instant::now() + LONG;
        while !is() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn its_output_comes_line_by_line_and_its_end_is_told() {
        let place = Place::new();
        let (outcome, said) = run(place.spec("echo one; printf 'two\\nthree' >&2; exit 3", 60));
        assert_eq!(outcome.end, WarmEnd::Exited(3));
        assert_eq!(outcome.last_lines, ["one", "two", "three"]);
        assert_eq!(said, "palingenesis: warm-up: one\npalingenesis: warm-up: two\npalingenesis: warm-up: three\n");
        let (outcome, said) = run(place.spec("kill -SEGV $$", 60));
        assert_eq!((outcome.end, said.as_str()), (WarmEnd::Killed(libc::SIGSEGV), ""));
        assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 0, "a mark is left");
    }

    /// What slurmstepd's tasks have, and a user's program must not: our descriptors,
    /// signals that do nothing, somebody's terminal.
    #[test]
    fn the_command_starts_as_a_program_of_the_user_s() {
        let place = Place::new();
        let ignored = |name: &str| {
            let text = place.read("status");
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{text}"));
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        let mut spec = place.spec(
            "cat /proc/self/status >PLACE/status; ls /proc/self/fd >PLACE/fds; ulimit -n >PLACE/files; env >PLACE/env
             cat >PLACE/input; (: </dev/tty) 2>/dev/null || echo none >PLACE/tty; ps -o comm= -p $$ >PLACE/name; pwd >PLACE/pwd",
            60,
        );
        spec.limits = vec![Limit { name: "NOFILE", soft: 77 }, Limit { name: "CORE", soft: u64::MAX }];
        // SAFETY: takes numbers; the harness does not need it.
        unsafe { libc::signal(libc::SIGUSR2, libc::SIG_IGN) };
        let (outcome, _) = run(spec);
        assert_eq!(outcome.end, WarmEnd::Exited(0), "{outcome:?}");
        // 32 and 33 are the C library's own, which nobody else may set.
        assert_eq!((ignored("SigIgn:") & !(3 << 31), ignored("SigBlk:")), (0, 0));
        // The last is of ls itself.
        assert_eq!(place.read("fds"), "0\n1\n2\n3\n");
        assert_eq!((place.read("files").as_str(), place.read("input").as_str()), ("77\n", ""));
        assert_eq!((place.read("tty").as_str(), place.read("name").as_str()), ("none\n", "sh\n"));
        assert!(!place.read("env").contains("RANK="), "{}", place.read("env"));
        assert_eq!(place.read("pwd").trim(), std::env::current_dir().unwrap().to_str().unwrap());
    }

    /// Also what has left the session, as a daemon does, and what refuses to be asked.
    const FAMILY: &str = "echo $$ >PLACE/shell
        (trap '' TERM; echo $(sh -c 'echo $PPID') >PLACE/stubborn; while :; do sleep 1; done) &
        setsid sh -c 'echo $$ >PLACE/daemon; exec sleep 600' &
        timeout 600 sh -c 'echo $$ >PLACE/group; exec sleep 600' &
        until [ -s PLACE/stubborn ] && [ -s PLACE/daemon ] && [ -s PLACE/group ]; do sleep 0.02; done; echo ready";

    #[track_caller]
    fn family_is_gone(place: &Place) {
        for name in ["shell", "stubborn", "daemon", "group"] {
            let pid = place.read(name);
            assert!(!pid.is_empty(), "{name} has not run");
            assert!(!lives(&pid), "{name}, process {pid}, lives on");
        }
        assert!(!place.0.join(MARK).exists());
    }

    #[test]
    fn its_time_limit_ends_it_with_everything_it_has_started() {
        let place = Place::new();
        let start = Instant::now();
        let (outcome, _) = run(place.spec(&format!("{FAMILY}; wait"), 2));
        assert_eq!(outcome.end, WarmEnd::TooLong);
        assert_eq!(outcome.last_lines, ["ready"]);
        assert!(start.elapsed() < Duration::from_secs(20));
        family_is_gone(&place);
    }

    #[test]
    fn what_it_leaves_running_ends_with_it() {
        let place = Place::new();
        let (outcome, _) = run(place.spec(FAMILY, 60));
        assert_eq!(outcome.end, WarmEnd::Exited(0));
        family_is_gone(&place);
    }

    #[test]
    fn dropping_it_ends_it_within_two_seconds() {
        let place = Place::new();
        let (mut warmup, said) = start(place.spec(&format!("{FAMILY}; wait"), 60));
        until("it does not start", || {
            assert_eq!(warmup.advance(), None);
            said.lock().unwrap().contains("ready")
        });
        assert!(place.0.join(MARK).is_dir());
        let start = Instant::now();
        drop(warmup);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        family_is_gone(&place);
    }

    /// As when a rank is killed alone: nothing of it is asked any more.
    #[test]
    fn it_ends_with_the_task_that_runs_it() {
        let place = Place::new();
        let told = crate::system::child::run(Duration::from_secs(30), || {
            let (mut warmup, said) = start(place.spec(&format!("{FAMILY}; wait"), 60));
            until("it does not start", || {
                let _ = warmup.advance();
                said.lock().unwrap().contains("ready")
            });
            std::mem::forget(warmup);
            b"killed".to_vec()
        });
        assert_eq!(told.unwrap(), b"killed");
        until("its mark stays", || !place.0.join(MARK).exists());
        family_is_gone(&place);
    }

    /// A task has SIGPIPE as it comes, and a test has not.
    #[test]
    fn the_task_goes_on_after_it() {
        let place = Place::new();
        let told = crate::system::child::run(Duration::from_secs(30), || {
            // SAFETY: no handler is set.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            let (mut warmup, _) = start(place.spec("echo done", 60));
            let end = outcome(&mut warmup).end;
            // The supervisor has ended by then.
            std::thread::sleep(Duration::from_millis(300));
            drop(warmup);
            format!("{end:?}").into_bytes()
        });
        assert_eq!(told.unwrap(), b"Exited(0)");
    }

    /// As by scancel: it ends by that signal, but not before it has put back what it has.
    #[test]
    fn asked_to_end_it_ends_what_it_has_started_first() {
        let place = Place::new();
        let told = crate::system::child::run(Duration::from_secs(30), || {
            let (mut warmup, said) = start(place.spec(&format!("{FAMILY}; wait"), 60));
            until("it does not start", || {
                let _ = warmup.advance();
                said.lock().unwrap().contains("ready")
            });
            // SAFETY: takes a number; to this process of the test's.
            unsafe { libc::raise(libc::SIGTERM) };
            let _ = warmup.advance();
            b"lives on".to_vec()
        });
        assert!(told.is_err(), "{told:?}");
        family_is_gone(&place);
    }

    /// As by the kernel, for want of memory.
    #[test]
    fn the_end_of_its_supervisor_is_an_end_too() {
        let place = Place::new();
        let (mut warmup, _) = start(place.spec("echo $PPID >PLACE/supervisor; echo $$ >PLACE/shell; sleep 600", 60));
        until("it does not start", || {
            assert_eq!(warmup.advance(), None);
            !place.read("shell").trim().is_empty()
        });
        let pid: i32 = place.read("supervisor").trim().parse().unwrap();
        // SAFETY: a process that this test has started.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        assert_eq!(outcome(&mut warmup).end, WarmEnd::Killed(libc::SIGKILL));
        until("the shell lives", || !lives(&place.read("shell")));
        // What it leaves is taken over: <https://github.com/ishandhanani/srt-slurm/pull/251>.
        let (outcome, said) = run(place.spec("echo again", 60));
        assert_eq!(outcome.end, WarmEnd::Exited(0), "{said}");
        let notes: Vec<&str> = said.lines().filter(|line| line.starts_with("palingenesis: note: ")).collect();
        assert_eq!(notes.len(), 1, "{said}");
        assert!(notes[0].contains("step 7.0 on n1") && notes[0].contains("given no sign for"), "{said}");
        assert!(!place.0.join(MARK).exists());
    }

    /// Silent for longer than a mark may be, but not its counter.
    #[test]
    fn the_mark_of_one_that_runs_is_respected_until_the_limit() {
        let place = Place::new();
        let (mut first, _) = start(place.spec("sleep 600", 60));
        until("no mark", || {
            let _ = first.advance();
            place.0.join(MARK).join("owner").exists()
        });
        let (outcome, said) = run(place.spec("echo never", 6));
        let WarmEnd::Waited { target, holder } = &outcome.end else { panic!("{outcome:?} {said}") };
        assert_eq!(*target, place.0.display().to_string());
        assert!(holder.starts_with("step 7.0 on n1"), "{holder}");
        assert!(!said.contains("never"), "{said}");
        drop(first);
        assert!(!place.0.join(MARK).exists());
    }

    /// As a job that was suspended: another has taken over, and it lets it.
    #[test]
    fn one_that_was_stopped_for_long_starts_again_behind_the_other() {
        let place = Place::new();
        let log = "echo begin $$ >>PLACE/log; sleep 2; echo end $$ >>PLACE/log";
        // Only its first time takes long: what runs on after SIGCONT must be ended, not end.
        let first = "echo $PPID >PLACE/supervisor; echo begin $$ >>PLACE/log; mkdir PLACE/once 2>/dev/null && sleep 50; \
                     echo end $$ >>PLACE/log";
        let (mut first, said) = start(place.spec(first, 60));
        until("it does not start", || {
            let _ = first.advance();
            place.read("log").contains("begin")
        });
        let pid: i32 = place.read("supervisor").trim().parse().unwrap();
        let shell: i32 = place.read("log").trim().rsplit(' ').next().unwrap().parse().unwrap();
        // SAFETY: processes that this test has started.
        let send = |signal| [pid, -shell].map(|target| unsafe { libc::kill(target, signal) });
        send(libc::SIGSTOP);
        let (mut second, told) = start(place.spec(log, 60));
        until("it is not taken over", || {
            let _ = second.advance();
            told.lock().unwrap().contains("given no sign")
        });
        send(libc::SIGCONT);
        assert_eq!(outcome(&mut second).end, WarmEnd::Exited(0));
        assert_eq!(outcome(&mut first).end, WarmEnd::Exited(0));
        let said = said.lock().unwrap().clone();
        assert!(said.contains("starts again"), "{said}");
        assert_eq!(place.read("log").matches("end").count(), 2, "{}", place.read("log"));
    }

    /// Two directories, named in another order by the other one: nobody waits for ever.
    #[test]
    fn several_directories_are_had_all_or_none() {
        let (one, two) = (Place::new(), Place::new());
        let (mut warmups, _): (Vec<_>, Vec<_>) = (0..4)
            .map(|number| {
                let mut spec = one.spec("mkdir PLACE/alone && sleep 0.2 && rmdir PLACE/alone", 60);
                let second = Target { path: two.0.display().to_string(), why: "" };
                spec.targets.insert(number % 2, second);
                start(spec)
            })
            .unzip();
        for warmup in &mut warmups {
            assert_eq!(outcome(warmup).end, WarmEnd::Exited(0));
        }
        drop(warmups);
        assert!(!one.0.join(MARK).exists() && !two.0.join(MARK).exists());
    }

    #[test]
    fn what_cannot_be_marked_holds_nothing_up() {
        let place = Place::new();
        std::fs::write(place.0.join(MARK), "a file").unwrap();
        let mut spec = place.spec("echo done", 60);
        for path in ["/proc/nowhere", "/sys"] {
            spec.targets.push(Target { path: path.into(), why: "" });
        }
        let (outcome, said) = run(spec);
        assert_eq!(outcome.end, WarmEnd::Exited(0));
        assert!(said.contains("cannot leave its mark") && said.contains("is no directory"), "{said}");
    }
}
