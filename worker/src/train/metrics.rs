//! What a training says of itself: JSON lines for programs, one line or a bar for people,
//! and which rank keeps the others waiting.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use palingenesis::system::output;
use serde::Serialize;
use serde_json::{Value, json};

/// Name of the file in output_dir.
pub const FILE: &str = "metrics.jsonl";

/// A rank's times over a window of steps, in seconds, and its memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Times {
    /// Computing.
    pub compute: f64,
    /// In collectives: moving numbers and waiting for others.
    pub wait: f64,
    /// Reading tokens.
    pub data: f64,
    /// Sequences computed: ranks may have different numbers.
    pub sequences: f64,
    /// Highest resident memory so far, bytes.
    pub memory: f64,
    /// Its GPU's memory in use, bytes; 0 on the processor.
    pub device_memory: f64,
}

impl Times {
    /// For other ranks.
    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        let Times { compute, wait, data, sequences, memory, device_memory } = self;
        [compute, wait, data, sequences, memory, device_memory].iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// Another rank's; zeros where it sent something else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Times {
        let mut numbers = bytes.chunks_exact(8).map(|eight| f64::from_le_bytes(eight.try_into().unwrap_or_default()));
        let mut next = || numbers.next().unwrap_or_default();
        Times { compute: next(), wait: next(), data: next(), sequences: next(), memory: next(), device_memory: next() }
    }

    fn per_sequence(&self) -> Option<f64> {
        (self.sequences > 0.0).then(|| self.compute / self.sequences)
    }
}

/// The highest resident memory of this process so far, bytes; 0 where /proc says nothing.
#[must_use]
pub fn peak_memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|kb| kb.trim().parse().ok()).unwrap_or(0.0) * 1024.0
}

/// Finds the rank that keeps the others waiting. All ranks share one step time, so only
/// what each computes itself tells them apart. The threshold is the one that NVIDIA's
/// resiliency extension uses.
#[derive(Debug, Default)]
pub struct Stragglers {
    /// Windows in a row in which each rank was slow.
    slow: Vec<u32>,
    /// Ranks whose speed says nothing of them: they share CPUs with others.
    left_out: Vec<bool>,
}

impl Stragglers {
    /// Below this part of the fastest rank's speed a rank is slow.
    const SCORE: f64 = 0.75;
    /// For so many windows in a row.
    const WINDOWS: u32 = 3;
    /// Shorter ones say nothing, seconds: the kernel's other work is as long.
    const SHORTEST: f64 = 0.5;

    /// Of these, by rank, none is told of that is left out.
    #[must_use]
    pub fn without(left_out: Vec<bool>) -> Stragglers {
        Stragglers { left_out, ..Stragglers::default() }
    }

    /// Takes one window's times by rank; gives the ranks to tell of, each with its score,
    /// once as long as it stays slow.
    pub fn window(&mut self, times: &[Times]) -> Vec<(usize, f64)> {
        self.slow.resize(times.len(), 0);
        let fastest = times.iter().filter_map(Times::per_sequence).fold(f64::INFINITY, f64::min);
        let mut found = Vec::new();
        for (rank, (own, slow)) in times.iter().zip(&mut self.slow).enumerate() {
            let score = own.per_sequence().filter(|_| own.compute >= Self::SHORTEST).map_or(1.0, |own| fastest / own);
            let counts = score < Self::SCORE && !self.left_out.get(rank).is_some_and(|left_out| *left_out);
            *slow = if counts { *slow + 1 } else { 0 };
            if *slow == Self::WINDOWS {
                found.push((rank, score));
            }
        }
        found
    }
}

/// One window of steps as rank 0 tells it.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// The last step.
    pub step: u64,
    /// Its loss, the mean over all its tokens.
    pub loss: f64,
    /// Its learning rate.
    pub lr: f64,
    /// Its norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Tokens of one step.
    pub tokens: u64,
    /// Tokens of the training so far.
    pub tokens_seen: u64,
    /// How many steps.
    pub steps: u64,
    /// How long they took.
    pub took: Duration,
    /// Steps left out so far.
    pub skipped: u64,
    /// By rank.
    pub times: &'a [Times],
}

/// Rank 0's voice: metrics.jsonl, and a bar on a terminal or a line in a log.
pub struct Reporter {
    file: File,
    /// A line was not written to its end.
    torn: bool,
    bar: Option<ProgressBar>,
    steps: u64,
}

impl Reporter {
    /// Goes on with output_dir's file. A line that a killed process left half-written is
    /// ended first.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(output_dir: &Path, steps: u64, done: u64) -> io::Result<Reporter> {
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(output_dir.join(FILE))?;
        if file.seek(SeekFrom::End(0))? > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {eta} left");
        let bar = io::stderr().is_terminal().then(|| ProgressBar::new(steps).with_position(done));
        let bar = bar.map(|bar| style.map_or(bar.clone(), |style| bar.with_style(style)));
        Ok(Reporter { file, torn: false, bar, steps })
    }

    /// One line of JSON. What cannot be written is told once on stderr and else let be: a
    /// training does not end for it.
    pub fn event(&mut self, event: &str, more: Value) {
        let mut line = json!({ "event": event });
        if let (Value::Object(line), Value::Object(more)) = (&mut line, more) {
            line.extend(more);
        }
        self.line(&line);
    }

    fn line(&mut self, value: &impl Serialize) {
        // Of a disk that was full the half of a line may be there: the next one is not part of it.
        let mut text = if self.torn { vec![b'\n'] } else { Vec::new() };
        let written = serde_json::to_writer(&mut text, value).map_err(io::Error::from).and_then(|()| {
            text.push(b'\n');
            self.file.write_all(&text)
        });
        self.torn = written.is_err();
        if let Err(error) = written {
            self.say(&format!("warning: {FILE} was not written: {error}"));
        }
    }

    /// A line for people, beside the bar.
    pub fn say(&self, text: &str) {
        let say = || output::to_stderr(&format!("palingenesis-worker: {text}\n"));
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }

    /// Moves the bar.
    pub fn step(&self, step: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(step);
        }
    }

    /// Tells a window.
    pub fn window(&mut self, window: &Window<'_>) {
        let Window { step, loss, lr, grad_norm, tokens, tokens_seen, steps, took, skipped, times } = *window;
        let step_s = took.as_secs_f64() / steps.max(1) as f64;
        let tokens_per_s = tokens as f64 / step_s.max(1e-9);
        let range = |of: fn(&Times) -> f64| {
            let each = times.iter().map(|times| of(times) / steps.max(1) as f64);
            each.fold((f64::INFINITY, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)))
        };
        let least_and_most = |(least, most): (f64, f64)| json!({ "min": least, "max": most });
        let (compute, wait, data) = (range(|t| t.compute), range(|t| t.wait), range(|t| t.data));
        let most = |of: fn(&Times) -> f64| times.iter().map(of).fold(0.0, f64::max);
        let (memory, device_memory) = (most(|times| times.memory), most(|times| times.device_memory));
        let mut line = json!({
            "event": "step", "step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens_seen,
            "tokens_per_s": tokens_per_s, "step_s": step_s, "compute_s": least_and_most(compute),
            "wait_s": least_and_most(wait), "data_s": least_and_most(data), "memory_bytes": memory, "skipped": skipped,
        });
        if device_memory > 0.0 {
            line["device_memory_bytes"] = json!(device_memory);
        }
        self.line(&line);
        let numbers = format!("loss {loss:.4}, lr {lr:.2e}, grad norm {grad_norm:.3}, {tokens_per_s:.0} tokens/s");
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(numbers);
            }
            None => output::to_stdout(&format!(
                "step {step}/{}: {numbers}, {step_s:.3} s a step (compute {}, wait {}, data {}), {:.0} MiB{}\n",
                self.steps,
                span(compute),
                span(wait),
                span(data),
                memory / f64::from(1 << 20),
                if device_memory > 0.0 {
                    format!(", GPU {:.1} GiB", device_memory / f64::from(1 << 30))
                } else {
                    String::new()
                }
            )),
        }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// "0.102" or "0.102-0.140".
fn span((least, most): (f64, f64)) -> String {
    let (least, most) = (format!("{least:.3}"), format!("{most:.3}"));
    if least == most { least } else { format!("{least}-{most}") }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::*;

    fn rank(compute: f64, sequences: f64) -> Times {
        Times { compute, sequences, ..Times::default() }
    }

    #[test]
    fn a_straggler_is_named_once_after_three_windows() {
        let mut stragglers = Stragglers::default();
        let window = [rank(1.0, 4.0), rank(1.1, 4.0), rank(2.0, 4.0)];
        assert_eq!(stragglers.window(&window), []);
        assert_eq!(stragglers.window(&window), []);
        assert_eq!(stragglers.window(&window), [(2, 0.5)]);
        assert_eq!(stragglers.window(&window), []);
        stragglers.window(&[rank(1.0, 4.0); 3]);
        stragglers.window(&window);
        assert_eq!(stragglers.window(&window), []);
        assert_eq!(stragglers.window(&window), [(2, 0.5)]);
    }

    #[test]
    fn ranks_that_share_cpus_are_left_out() {
        let mut stragglers = Stragglers::without(vec![false, true, false]);
        let window = [rank(1.0, 4.0), rank(2.0, 4.0), rank(2.0, 4.0)];
        let found: Vec<_> = (0..3).map(|_| stragglers.window(&window)).collect();
        assert_eq!(found, [vec![], vec![], vec![(2, 0.5)]]);
    }

    /// With uneven batches a rank may have twice as many, or none.
    #[test]
    fn more_work_is_not_slowness() {
        let mut stragglers = Stragglers::default();
        for _ in 0..5 {
            assert_eq!(stragglers.window(&[rank(2.0, 4.0), rank(1.0, 2.0), rank(0.0, 0.0)]), []);
        }
    }

    /// A pipe that nobody reads takes a part of a line and then none, as a full disk does.
    #[test]
    fn after_half_a_line_the_next_one_begins_anew() {
        let (mut from, to) = io::pipe().unwrap();
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::fcntl(to.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let mut reporter = Reporter { file: File::from(OwnedFd::from(to)), torn: false, bar: None, steps: 9 };
        reporter.event("whole", json!({}));
        reporter.event("long", json!({ "text": "x".repeat(1 << 20) }));
        reporter.event("none", json!({}));
        let mut bytes = vec![0; 1 << 20];
        let got = from.read(&mut bytes).unwrap();
        reporter.event("next", json!({}));
        reporter.event("last", json!({}));
        drop(reporter);
        let mut rest = Vec::new();
        from.read_to_end(&mut rest).unwrap();
        let text = String::from_utf8([&bytes[..got], &rest].concat()).unwrap();
        let events =
            text.lines().filter_map(|line| Some(serde_json::from_str::<Value>(line).ok()?["event"].to_string()));
        assert_eq!(events.collect::<Vec<_>>(), ["\"whole\"", "\"next\"", "\"last\""]);
    }

    #[test]
    fn times_survive_the_way() {
        let times = Times { compute: 1.5, wait: 0.25, data: 1e-3, sequences: 3.0, memory: 1e9, device_memory: 2e9 };
        assert_eq!(Times::from_bytes(&times.to_bytes()), times);
        assert_eq!(Times::from_bytes(b"short"), Times::default());
        assert!(peak_memory() > 1e5);
    }
}
