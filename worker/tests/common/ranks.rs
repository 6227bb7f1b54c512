//! Ranks as people start them: processes that meet over TCP on this machine.

use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::port::free_port;
use super::{Place, losses};

/// For what certainly happens: a machine may be busy.
pub const SURELY: Duration = Duration::from_secs(60);

/// A running rank and what it says on stderr. It does not outlive the thread that started
/// it, stopped or not.
pub struct Rank {
    pub child: Child,
    said: Option<JoinHandle<String>>,
    words: String,
    status: Option<(ExitStatus, Instant)>,
}

/// How a rank ended.
pub struct Ended {
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    pub said: String,
    /// When that was seen.
    pub when: Instant,
}

impl Ended {
    /// The last line on stderr.
    pub fn last(&self) -> &str {
        self.said.lines().last().unwrap_or_default()
    }
}

impl Rank {
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes no pointers; the process is a child that was not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().unwrap().map(|status| (status, Instant::now()));
        }
        self.status.is_some()
    }

    /// All that it has said, of one that has ended.
    pub fn said(&mut self) -> &str {
        if let Some(said) = self.said.take() {
            self.words = said.join().unwrap();
        }
        &self.words
    }

    /// Waits, not for ever.
    pub fn end(mut self) -> Ended {
        let limit = Instant::now() + SURELY;
        while !self.has_ended() {
            if Instant::now() > limit {
                let _ = self.child.kill();
                panic!("it did not end within a minute: {}", self.said());
            }
            thread::sleep(Duration::from_millis(2));
        }
        self.over()
    }

    /// Of one that has ended.
    fn over(&mut self) -> Ended {
        let (status, when) = self.status.unwrap();
        Ended { code: status.code(), signal: status.signal(), said: self.said().to_string(), when }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Waits for all of them at once, so that each end's time is right.
pub fn end(mut ranks: Vec<Rank>) -> Vec<Ended> {
    let limit = Instant::now() + SURELY;
    loop {
        let left = ranks.iter_mut().filter_map(|rank| (!rank.has_ended()).then_some(())).count();
        if left == 0 || Instant::now() > limit {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    ranks.into_iter().map(Rank::end).collect()
}

pub fn codes(ended: &[Ended]) -> Vec<Option<i32>> {
    ended.iter().map(|rank| rank.code).collect()
}

/// The command of one rank of a world on this host, without a key.
pub fn command(place: &Place, rank: u32, world: u32, master: (&str, u16)) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_palingenesis-worker"));
    command.env_remove("PALINGENESIS_STORE_KEY").env("PALINGENESIS_LAUNCH_ID", "test");
    for name in ["RANK", "LOCAL_RANK"] {
        command.env(name, rank.to_string());
    }
    for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
        command.env(name, world.to_string());
    }
    command.env("MASTER_ADDR", master.0).env("MASTER_PORT", master.1.to_string()).env("NODE_RANK", "0");
    command.arg(place.config()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Starts it.
pub fn spawn(mut command: Command) -> Rank {
    // SAFETY: prctl takes no pointers here and is allowed between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let said = thread::spawn(move || {
        let mut said = Vec::new();
        let _ = stderr.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    });
    Rank { child, said: Some(said), words: String::new(), status: None }
}

/// Starts all ranks of a world.
pub fn start(place: &Place, world: u32, more: &[&str]) -> Vec<Rank> {
    start_each(place, world, more, |_, _| {})
}

/// The same, with something else for each rank.
pub fn start_each(place: &Place, world: u32, more: &[&str], own: impl Fn(u32, &mut Command)) -> Vec<Rank> {
    let port = free_port("127.0.0.1");
    let rank = |rank| {
        let mut command = command(place, rank, world, ("127.0.0.1", port));
        command.args(more);
        own(rank, &mut command);
        spawn(command)
    };
    (0..world).map(rank).collect()
}

/// Waits until the training has told a step of at least this number.
pub fn wait_for_step(place: &Place, step: u64) {
    let limit = Instant::now() + SURELY;
    let output = place.dir("output");
    while !output.join("metrics.jsonl").exists() || losses(&output).last().is_none_or(|(at, _)| *at < step) {
        assert!(Instant::now() < limit, "no step {step} within a minute");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the training has told that it has begun.
pub fn wait_for_start(place: &Place) {
    let limit = Instant::now() + SURELY;
    while !fs::read_to_string(place.dir("output/metrics.jsonl")).is_ok_and(|text| text.contains("start")) {
        assert!(Instant::now() < limit, "no start within a minute");
        thread::sleep(Duration::from_millis(5));
    }
}
