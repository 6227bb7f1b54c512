//! Whole trainings hurt at random moments: a rank killed or stopped, also in the middle of
//! a save; a full disk; a file limit; a flipped bit and a truncated file between two starts.
//! Each ends in bounded time and names who or what it was; the next start goes on from the
//! newest checkpoint that is complete, as this test judges it by itself, and computes the
//! same numbers as a training that nothing has happened to.
//!
//! Seven trainings, each with another fault; with PALINGENESIS_SOAK=N as many as N, and at
//! least 50. PALINGENESIS_CHAOS_SEED=SEED repeats what SEED decided, SEED/NUMBER one
//! training of it; PALINGENESIS_CHAOS_FAULT=KIND takes that kind only.
//!
//! All ranks share one kernel, clock and disk here, whatever nodes they are told to be on:
//! a dead host, whose connections stay open, is shown by a stopped process only, and what
//! survives a loss of power not at all.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use common::port::free_port;
use common::ranks::{Ended, Rank, SURELY, codes, command, end, spawn};
use common::{Place, Random};
use palingenesis_worker::comm::recorder;
use serde_json::Value;

/// Of each training.
const STEPS: u64 = 24;
const EVERY: u64 = 2;
const KEEP: usize = 2;
/// `comm.silence`, seconds.
const SILENCE: u64 = 3;
/// Of a killed rank's others: the bound.
const KILLED: Duration = Duration::from_secs(2);
/// Of a stopped rank's others: besides its silence.
const STOPPED: Duration = Duration::from_secs(5);
/// Longer than any deadline of a suspended training, which are TIMEOUT and SILENCE.
const SUSPENDED: Duration = Duration::from_secs(7);
/// `comm.timeout`, seconds, of what is suspended, and of all others.
const TIMEOUT: [u64; 2] = [5, 30];
/// Nobody's: it must appear nowhere.
const KEY: &str = "5ec2e7005ec2e7015ec2e7025ec2e7035ec2e7045ec2e7055ec2e7065ec2e707";

/// About a million parameters: saving takes a good part of the time.
const MODEL: [&str; 8] = [
    "model.shape.hidden_size=128",
    "model.shape.num_hidden_layers=6",
    "model.shape.head_dim=16",
    "model.shape.intermediate_size=384",
    "train.seq_len=16",
    "train.lr=1e-3",
    "train.min_lr=0",
    "comm.start_timeout=30",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    KillInSave,
    /// All ranks of a node.
    KillNode,
    KillAll,
    Stop,
    StopInSave,
    /// All, and all go on.
    Suspend,
    FullDisk,
    FileLimit,
    FlippedBit,
    Truncated,
}

use Fault::{
    FileLimit, FlippedBit, FullDisk, Kill, KillAll, KillInSave, KillNode, Stop, StopInSave, Suspend, Truncated,
};

/// By number.
const FAULTS: [Fault; 25] = [
    Kill, KillInSave, Stop, FullDisk, FlippedBit, Truncated, FileLimit, StopInSave, KillNode, KillInSave, KillAll,
    FullDisk, KillInSave, Stop, Kill, KillInSave, FlippedBit, Suspend, FullDisk, KillNode, Stop, Truncated, StopInSave,
    Kill, KillAll,
];

/// A directory with everything that trainings are given, and things that are not theirs.
struct Tree {
    place: Place,
}

/// A training that nothing happens to.
struct Reference {
    losses: BTreeMap<u64, f64>,
    model: Vec<u8>,
    /// From the moment when all ranks are there.
    took: Duration,
}

/// One training with what happens to it.
struct Round<'a> {
    tree: &'a Tree,
    references: &'a BTreeMap<u32, Reference>,
    random: Random,
    fault: Fault,
    world: u32,
    output: PathBuf,
    /// For people who look for the reason of a failure.
    story: String,
    starts: u32,
    /// Of earlier starts, as many as metrics.jsonl tells of.
    starts_told: u32,
}

/// What came of it.
#[derive(Debug, Default)]
struct Row {
    /// From each fault to the end of the last rank that it was not done to.
    took: Vec<Duration>,
    /// Faults that hit what they were meant for.
    hits: u32,
    /// Those that came when the training was over.
    late: u32,
    /// Why nothing was done.
    skipped: Option<String>,
}

fn host(rank: u32, world: u32) -> &'static str {
    if rank < world.div_ceil(2) { "n1" } else { "n2" }
}

impl Tree {
    fn new() -> Tree {
        let place = Place::new("chaos");
        for name in ["home", "tmp", "cwd", "disk", "beside/step-9999/dcp", "beside/step-9999.tmp-a-1"] {
            fs::create_dir_all(place.dir(name)).unwrap();
        }
        for name in
            ["beside/step-9999/dcp/__0_0.distcp", "beside/step-9999.tmp-a-1/attempt.json", "cwd/step-1", "home/a"]
        {
            fs::write(place.dir(name), "not theirs").unwrap();
        }
        Tree { place }
    }

    /// All ranks of a training, as of two nodes: what goes between them goes over TCP.
    fn start(&self, world: u32, output: &Path, timeout: u64) -> Vec<Rank> {
        let port = free_port("127.0.0.1");
        let rank = |rank| {
            let mut command = command(&self.place, rank, world, ("127.0.0.1", port));
            let (here, first) = (host(rank, world), world.div_ceil(2));
            let (local, of) = if here == "n1" { (rank, first) } else { (rank - first, world - first) };
            command
                .current_dir(self.place.dir("cwd"))
                .env_clear()
                .envs([("HOME", self.place.dir("home")), ("TMPDIR", self.place.dir("tmp"))])
                .envs([("PALINGENESIS_STORE_KEY", KEY), ("SLURMD_NODENAME", here), ("MASTER_ADDR", "127.0.0.1")])
                .envs([("PALINGENESIS_LAUNCH_ID", "4711.0-1764500000"), ("PATH", "/usr/bin:/bin")])
                .env("MASTER_PORT", port.to_string())
                .envs(
                    [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", of)]
                        .map(|(name, number)| (name, number.to_string())),
                )
                .args(MODEL)
                .arg(format!("train.steps={STEPS}"))
                .arg(format!("checkpoint.every={EVERY}"))
                .arg(format!("checkpoint.keep={KEEP}"))
                .arg(format!("comm.silence={SILENCE}"))
                .arg(format!("comm.timeout={timeout}"))
                .arg(format!("train.output_dir={}", output.display()));
            spawn(command)
        };
        (0..world).map(rank).collect()
    }

    fn reference(&self, world: u32) -> Reference {
        let output = self.place.dir(&format!("reference-{world}"));
        let mut ranks = self.start(world, &output, TIMEOUT[1]);
        assert!(all_are_there(&mut ranks, &output), "{}", end(ranks)[0].said);
        let began = Instant::now();
        let ended = end(ranks);
        let took = began.elapsed();
        assert!(ended.iter().all(|rank| rank.code == Some(0)), "{}", ended[0].said);
        let losses: BTreeMap<u64, f64> = common::losses(&output).into_iter().collect();
        assert_eq!(losses.len() as u64, STEPS);
        let model = fs::read(output.join("final/model.safetensors")).unwrap();
        fs::remove_dir_all(output).unwrap();
        Reference { losses, model, took }
    }

    /// Everything but `output` and what is mounted at `disk`.
    fn snapshot(&self, output: &Path) -> BTreeMap<PathBuf, String> {
        let mut all = BTreeMap::new();
        let disk = self.place.dir("disk");
        let mut open = vec![self.place.dir("")];
        while let Some(path) = open.pop() {
            if path == output || path == disk {
                continue;
            }
            let found = fs::symlink_metadata(&path).unwrap();
            let holds = match found.is_file() {
                true => crc32fast::hash(&fs::read(&path).unwrap()),
                false => 0,
            };
            // The directory that `output` itself lies in does not change either: it is there.
            let is = format!(
                "{:o} {} {}.{:09} {} {} {holds:08x}",
                found.mode(),
                found.len(),
                found.mtime(),
                found.mtime_nsec(),
                found.ino(),
                found.nlink()
            );
            if found.is_dir() {
                open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            all.insert(path, is);
        }
        all
    }
}

/// Waits until all ranks have met; false if one has ended before.
fn all_are_there(ranks: &mut [Rank], output: &Path) -> bool {
    let limit = Instant::now() + SURELY;
    loop {
        // A rank begins its recording when all have met.
        let met = ranks.iter().enumerate().all(|(rank, process)| {
            let file = output.join(format!("recorder/rank-{rank}"));
            recorder::read(&file).is_ok_and(|flight| flight.process == process.child.id())
        });
        if met {
            return true;
        }
        if let Some(rank) = ranks.iter_mut().find_map(|rank| rank.has_ended().then_some(rank)) {
            eprintln!("before all ranks had met, one ended: {}", rank.said());
            return false;
        }
        assert!(Instant::now() < limit, "the ranks did not meet");
        thread::sleep(Duration::from_millis(1));
    }
}

/// What metrics.jsonl says: each start and each step, in order; and lines that are none.
fn events(output: &Path) -> (Vec<Value>, Vec<String>) {
    let bytes = fs::read(output.join("metrics.jsonl")).unwrap_or_default();
    let (mut events, mut odd) = (Vec::new(), Vec::new());
    for line in String::from_utf8_lossy(&bytes).lines() {
        match serde_json::from_str(line) {
            Ok(event) => events.push(event),
            Err(_) => odd.push(line.to_string()),
        }
    }
    (events, odd)
}

/// The last step that was told of a start later than so many.
fn progress(output: &Path, starts: u32) -> Option<u64> {
    let (mut seen, mut step) = (0, None);
    for event in events(output).0 {
        seen += u32::from(event["event"] == "start");
        if seen > starts && (event["event"] == "start" || event["event"] == "step") {
            step = event["step"].as_u64();
        }
    }
    step
}

/// "step-12" and "step-12.old-…" are 12.
fn step_of(name: &str) -> Option<u64> {
    let (number, rest) = name.strip_prefix("step-")?.split_once('.').unwrap_or((name.strip_prefix("step-")?, "old-"));
    number.parse().ok().filter(|_| rest.starts_with("old-"))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files that a checkpoint's manifest lists, if each is there, as long as it says, with
/// its CRC-32, and the manifest itself has its own.
fn files_of(directory: &Path) -> Option<Vec<String>> {
    let mut text = fs::read(directory.join("manifest.json")).ok()?;
    let manifest: Value = serde_json::from_slice(&text).ok()?;
    let end = text.iter().rposition(|byte| *byte == b'"')?;
    text.get_mut(end - 8..end)?.fill(b'0');
    if manifest["crc32"].as_str()? != format!("{:08x}", crc32fast::hash(&text)) {
        return None;
    }
    let mut names = Vec::new();
    for file in manifest["files"].as_array()? {
        let name = file["name"].as_str()?;
        let bytes = fs::read(directory.join(name)).ok()?;
        let right = file["bytes"].as_u64()? == bytes.len() as u64;
        if !right || file["crc32"].as_u64()? != u64::from(crc32fast::hash(&bytes)) {
            return None;
        }
        names.push(name.to_string());
    }
    let world = manifest["world_size"].as_u64()? as usize;
    (names.len() == world + 1).then_some(names)
}

/// Steps of which a whole checkpoint is there.
fn complete(output: &Path) -> BTreeSet<u64> {
    let real = |name: &&String| fs::symlink_metadata(output.join(name)).is_ok_and(|found| found.is_dir());
    let names = names(output);
    let whole = names.iter().filter(real).filter(|name| files_of(&output.join(name)).is_some());
    whole.filter_map(|name| step_of(name)).collect()
}

/// Directories of saves under way: of a later step than any that is there.
fn saves(output: &Path) -> Vec<String> {
    let names = names(output);
    let newest = names.iter().filter_map(|name| step_of(name)).filter(|step| *step != 9999).max().unwrap_or(0);
    let is = |name: &&String| {
        let number = name.strip_prefix("step-").and_then(|rest| rest.split_once(".tmp-"));
        number.and_then(|(number, _)| number.parse().ok()).is_some_and(|step: u64| step > newest)
    };
    names.iter().filter(is).cloned().collect()
}

/// What rank 0 said of a start.
struct Began {
    /// "step-12", or nothing where it began from the beginning.
    from: Option<String>,
    /// Names that were not taken, with the reason.
    skipped: Vec<(String, String)>,
    /// The newest that was kept.
    kept: Option<u64>,
}

fn began(said: &str) -> Option<Began> {
    let lines = || said.lines().filter_map(|line| line.strip_prefix("palingenesis-worker: "));
    let from = lines().find(|line| line.contains(" parameters over "))?.rsplit_once(", from ")?.1;
    let skipped = lines().filter_map(|line| line.strip_prefix("warning: not resumed from ")?.split_once(": "));
    let mut kept = lines().filter_map(|line| step_of(line.split_once(" is kept: ")?.0));
    Some(Began {
        from: (from != "the beginning").then(|| from.to_string()),
        skipped: skipped.map(|(name, why)| (name.to_string(), why.to_string())).collect(),
        kept: kept.next_back(),
    })
}

impl Round<'_> {
    fn say(&mut self, text: &str) {
        let _ = writeln!(self.story, "{text}");
    }

    fn hear(&mut self, what: &str, ended: &[Ended]) {
        for (at, rank) in ended.iter().enumerate() {
            self.say(&format!("{what} {at}: code {:?}, signal {:?}\n{}", rank.code, rank.signal, rank.said));
            assert!(!rank.said.to_lowercase().contains(KEY), "the store key was printed");
            assert!(!rank.said.contains("panicked"), "a panic");
        }
    }

    fn reference(&self, world: u32) -> &Reference {
        &self.references[&world]
    }

    /// Starts all ranks; says from which step they are to go on.
    fn start(&mut self) -> (Vec<Rank>, Option<u64>) {
        let newest = complete(&self.output).last().copied();
        let left: Vec<String> = names(&self.output);
        self.starts += 1;
        self.starts_told = events(&self.output).0.iter().filter(|event| event["event"] == "start").count() as u32;
        let (start, world) = (self.starts, self.world);
        self.say(&format!("start {start} of {world} ranks, newest complete checkpoint {newest:?}, there is {left:?}"));
        (self.tree.start(world, &self.output, TIMEOUT[usize::from(self.fault != Suspend)]), newest)
    }

    /// Checks that a start went on from where it should.
    fn check_start(&mut self, said: &str, newest: Option<u64>, left: &[String]) {
        let Some(began) = began(said) else { return };
        // A stopped rank 0 that goes on meanwhile may yet finish what it was writing or removing.
        let alone = !said.contains("waiting for another training to end");
        let (from, finished) = (began.from.as_deref().and_then(step_of), Some(newest.unwrap_or(0) + EVERY));
        if alone || from != finished {
            assert_eq!(from, newest, "not resumed from the newest complete checkpoint");
        }
        for name in left.iter().filter(|name| alone && name.contains(".tmp-") && name.starts_with("step-")) {
            let told = began.skipped.iter().any(|(skipped, _)| skipped == name);
            assert!(told, "{name} was left behind and is not told of: {said}");
        }
        let link = began.skipped.iter().find(|(name, _)| name == "step-9999").map(|(_, why)| why.as_str());
        assert_eq!(link, Some("it is a symbolic link, and none is followed"));
    }

    /// What was told to be kept is there.
    fn check_kept(&mut self, said: &str) {
        let kept = began(said).and_then(|began| began.kept);
        let newest = complete(&self.output).last().copied();
        self.say(&format!("told to be kept: {kept:?}; complete: {:?}", complete(&self.output)));
        assert!(newest >= kept, "step {kept:?} was told to be kept, and the newest complete one is {newest:?}");
    }

    /// Waits for a moment after all ranks have met: `at` is in steps, and its fraction of the
    /// time of one.
    fn wait_for(&mut self, ranks: &mut [Rank], from: u64, at: f64) {
        let step = Duration::from_secs_f64(self.reference(self.world).took.as_secs_f64() / STEPS as f64);
        let whole = (at.floor() as u64).min(STEPS);
        let limit = Instant::now() + SURELY;
        // Before its first step it looks for a checkpoint, checks and loads it.
        while whole > from
            && progress(&self.output, self.starts_told).unwrap_or(0) < whole
            && !ranks.iter_mut().any(Rank::has_ended)
        {
            assert!(Instant::now() < limit, "no step {whole} within a minute");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(step.mul_f64(at - whole as f64));
    }

    /// Waits until a save is under way; gives its directory.
    fn wait_for_save(&mut self, ranks: &mut [Rank]) -> Option<String> {
        let limit = Instant::now() + SURELY;
        while !ranks.iter_mut().any(Rank::has_ended) {
            if let Some(name) = saves(&self.output).pop() {
                // A save takes some 20 ms here.
                thread::sleep(Duration::from_micros(self.random.below(20_000)));
                return Some(name);
            }
            assert!(Instant::now() < limit, "no save within a minute");
            thread::sleep(Duration::from_micros(200));
        }
        None
    }

    /// A random moment of a start that goes on from `from`, or of its saves.
    fn moment(&mut self, ranks: &mut [Rank], from: u64) -> Option<String> {
        assert!(all_are_there(ranks, &self.output), "a rank has ended at once");
        let in_save = match self.fault {
            KillInSave | StopInSave => true,
            KillNode | KillAll => self.random.below(2) == 0,
            _ => false,
        };
        if in_save {
            let least = from as f64 + (STEPS - from) as f64 * 0.8 * self.random.part();
            self.wait_for(ranks, from, least.floor());
            return self.wait_for_save(ranks);
        }
        let (from_there, end) = (from as f64, STEPS as f64);
        let part = self.random.part();
        let at = match self.random.below(8) {
            // For a damaged checkpoint another one must be there.
            _ if matches!(self.fault, FlippedBit | Truncated) => (2 * EVERY + 1) as f64 + (end - 5.0) * part,
            0 => from_there + part,
            // The last save, and the export.
            1 => end + 1.6 * part,
            _ => from_there + (end - from_there) * part,
        };
        self.say(&format!("a random moment: step {at:.3}"));
        self.wait_for(ranks, from, at);
        None
    }

    /// Whom it is done to.
    fn victims(&mut self) -> Vec<u32> {
        let world = self.world;
        match self.fault {
            KillAll | Suspend => (0..world).collect(),
            KillNode => {
                let node = ["n1", "n2"][self.random.below(2) as usize];
                (0..world).filter(|rank| host(*rank, world) == node).collect()
            }
            _ => vec![self.random.below(world.into()) as u32],
        }
    }

    /// Kills or stops random ranks at a random moment; checks how the others end. Gives
    /// those that were stopped.
    fn strike(&mut self, row: &mut Row) -> Vec<(u32, Rank)> {
        let left = names(&self.output);
        let (mut ranks, newest) = self.start();
        let save = self.moment(&mut ranks, newest.unwrap_or(0));
        let victims = self.victims();
        let stop = matches!(self.fault, Stop | StopInSave);
        let mut all: Vec<(u32, Rank)> = (0..).zip(ranks).collect();
        let mut struck: Vec<(u32, Rank)> = all.extract_if(.., |(rank, _)| victims.contains(rank)).collect();
        let over = struck.iter_mut().any(|(_, rank)| rank.has_ended());
        let is_there = || save.as_ref().is_some_and(|name| self.output.join(name).exists());
        let before = is_there();
        let since = Instant::now();
        for (_, rank) in struck.iter_mut().filter(|_| !over) {
            rank.signal(if stop { libc::SIGSTOP } else { libc::SIGKILL });
        }
        row.hits += u32::from(save.is_none() || (before && is_there()));
        self.say(&format!("ranks {victims:?} {}", if stop { "stopped" } else { "killed" }));

        let mut first = String::new();
        let mut stopped = Vec::new();
        if stop {
            stopped = struck;
        } else {
            for (rank, process) in struck {
                let killed = process.end();
                if rank == 0 {
                    first.clone_from(&killed.said);
                }
                self.hear("the killed rank", &[killed]);
            }
        }
        let zero = all.first().is_some_and(|(rank, _)| *rank == 0);
        let ended = end(all.into_iter().map(|(_, rank)| rank).collect());
        let last = ended.iter().map(|rank| rank.when).max();
        let took = last.map(|last| last.saturating_duration_since(since));
        if zero {
            first.clone_from(&ended[0].said);
        }
        self.say(&format!("{took:.2?} from then to the end of the others"));
        self.hear("other", &ended);
        self.check_start(&first, newest, &left);
        self.check_kept(&first);
        if over || self.output.join("final/model.safetensors").exists() {
            // It was over, or as good as: whoever has not ended with success is started again.
            row.late += 1;
            assert!(codes(&ended).iter().all(|code| [Some(0), Some(75)].contains(code)), "{:?}", codes(&ended));
            return stopped;
        }
        assert!(codes(&ended).iter().all(|code| *code == Some(75)), "{:?}", codes(&ended));
        let why = if stop { format!("nothing was heard of it for {SILENCE} s") } else { String::new() };
        for other in &ended {
            let last = other.last();
            let named = victims
                .iter()
                .any(|rank| last.contains(&format!(": rank {rank} on {} is gone ({why}", host(*rank, self.world))));
            assert!(named && last.contains("error: "), "not named: {last}");
        }
        let limit = if stop { Duration::from_secs(SILENCE) + STOPPED } else { KILLED };
        assert!(took.is_none_or(|took| took < limit), "the others took {took:?}");
        row.took.extend(took);
        stopped
    }

    /// Stops all for longer than any deadline: none is blamed, all go on.
    fn suspend(&mut self, row: &mut Row) {
        let left = names(&self.output);
        let (mut ranks, newest) = self.start();
        self.moment(&mut ranks, 0);
        ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
        thread::sleep(SUSPENDED);
        // Nodes are not told at the same moment.
        let late = self.random.below(self.world.into()) as usize;
        ranks.iter().enumerate().filter(|(rank, _)| *rank != late).for_each(|(_, rank)| rank.signal(libc::SIGCONT));
        thread::sleep(Duration::from_millis(self.random.below(1000)));
        let since = Instant::now();
        ranks[late].signal(libc::SIGCONT);
        let ended = end(ranks);
        let took = ended.iter().map(|rank| rank.when).max().unwrap().saturating_duration_since(since);
        self.say(&format!("{took:.2?} from SIGCONT to the end"));
        self.hear("rank", &ended);
        assert!(codes(&ended).iter().all(|code| *code == Some(0)), "{:?}", codes(&ended));
        self.check_start(&ended[0].said, newest, &left);
        row.took.push(took);
        row.hits += 1;
    }

    /// One that was stopped, once the others are gone.
    fn go_on(&mut self, stopped: Rank) {
        let since = Instant::now();
        stopped.signal(libc::SIGCONT);
        let ended = stopped.end();
        let took = ended.when.saturating_duration_since(since);
        self.say(&format!("{took:.2?} from SIGCONT to its end"));
        let code = ended.code;
        self.hear("the stopped rank", &[ended]);
        assert!([Some(75), Some(0)].contains(&code), "{code:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    /// Fills the disk, or lets no file of a rank grow; checks how all end.
    fn fill(&mut self, row: &mut Row, at_some_moment: bool) {
        let disk = self.tree.place.dir("disk");
        let whole = self.reference(self.world).model.len() as u64 * 3;
        let at = STEPS as f64 * self.random.part();
        let (mut ranks, newest) = self.start();
        let mut since = Instant::now();
        let mut who = None;
        if at_some_moment {
            assert!(all_are_there(&mut ranks, &self.output), "a rank has ended at once");
            self.wait_for(&mut ranks, 0, at);
            since = Instant::now();
            if self.fault == FullDisk {
                let mut filler = File::create(disk.join("filler")).unwrap();
                let error = (0..).find_map(|_| filler.write_all(&[7; 4096]).err()).unwrap();
                assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            } else {
                let rank = self.random.below(self.world.into()) as u32;
                let bytes = 80_000 + self.random.below(whole / u64::from(self.world) - 100_000);
                self.say(&format!("no file of rank {rank} longer than {bytes}"));
                limit_files(ranks[rank as usize].child.id(), bytes);
                who = Some(rank);
            }
        }
        let ended = end(ranks);
        let took = ended.iter().map(|rank| rank.when).max().unwrap().saturating_duration_since(since);
        self.hear("rank", &ended);
        let first = ended[0].said.clone();
        self.check_start(&first, newest, &[]);
        self.check_kept(&first);
        if self.output.join("final/model.safetensors").exists() {
            row.late += 1;
            assert!(codes(&ended).iter().all(|code| *code == Some(0)), "{:?}", codes(&ended));
        } else {
            assert!(codes(&ended).iter().all(|code| *code == Some(75)), "{:?}", codes(&ended));
            let why = if self.fault == FullDisk { "no space left on device" } else { "file too large" };
            for rank in &ended {
                let line = rank.last();
                let named = line.contains("error: ") && line.to_lowercase().contains(why);
                assert!(named && line.contains(&format!("{}/", self.output.display())), "not named: {line}");
                // Each failure has a rank and its host.
                let by =
                    who.map_or("rank 0 on n1".to_string(), |who| format!("rank {who} on {}", host(who, self.world)));
                let any = self.fault == FullDisk
                    && (0..self.world)
                        .any(|rank| line.contains(&format!("rank {rank} on {} could not", host(rank, self.world))));
                assert!(any || line.contains(&by), "no rank is named: {line}");
            }
            row.hits += 1;
            row.took.push(took);
        }
        if self.fault == FullDisk {
            // There is space again.
            mount(&disk, libc::MS_REMOUNT, 20 * whole).unwrap();
            let _ = fs::remove_file(disk.join("filler"));
            assert_eq!(names(&disk), ["output"], "something was written beside output_dir");
        }
    }

    /// Spoils the newest checkpoint; gives its name and the file's.
    fn spoil(&mut self) -> (String, String) {
        let all: Vec<u64> = complete(&self.output).into_iter().collect();
        assert!(all.len() >= 2, "of {KEEP} checkpoints there is {all:?}");
        let name = format!("step-{}", all[all.len() - 1]);
        let mut files = files_of(&self.output.join(&name)).unwrap();
        files.push("manifest.json".into());
        let file = files.swap_remove(self.random.below(files.len() as u64) as usize);
        let path = self.output.join(&name).join(&file);
        let length = fs::metadata(&path).unwrap().len();
        let at = self.random.below(length);
        if self.fault == FlippedBit {
            let open = File::options().read(true).write(true).open(&path).unwrap();
            let mut byte = [0];
            open.read_exact_at(&mut byte, at).unwrap();
            open.write_all_at(&[byte[0] ^ (1 << self.random.below(8))], at).unwrap();
        } else {
            File::options().write(true).open(&path).unwrap().set_len(at).unwrap();
        }
        self.say(&format!("{name}/{file} of {length} bytes: {:?} at {at}", self.fault));
        (name, file)
    }

    /// The last start, to the end.
    fn finish(&mut self, spoilt: Option<(String, String)>, stopped: Option<Rank>, holds: bool) {
        let left = names(&self.output);
        let (mut ranks, newest) = self.start();
        if let Some(stopped) = stopped {
            // Nobody has told it: it wakes up when its training is already going on without it.
            all_are_there(&mut ranks, &self.output);
            // While a stopped rank 0 holds output_dir, no other training begins there.
            let steps = if holds { 0.9 } else { 4.0 };
            let at = newest.unwrap_or(0) as f64 + steps * self.random.part();
            self.wait_for(&mut ranks, newest.unwrap_or(0), at);
            self.go_on(stopped);
        }
        let ended = end(ranks);
        self.hear("rank", &ended);
        assert!(codes(&ended).iter().all(|code| *code == Some(0)), "{:?}", codes(&ended));
        let first = &ended[0].said;
        assert!(began(first).is_some(), "rank 0 did not say from where it went on");
        self.check_start(first, newest, &left);
        if let Some((name, file)) = spoilt {
            let skipped = began(first).unwrap().skipped;
            let why = skipped.iter().find(|(skipped, _)| *skipped == name).map(|(_, why)| why.clone());
            let why = why.unwrap_or_else(|| panic!("{name} was spoilt and is not told of"));
            assert!(why.contains(&file), "{file} was spoilt, and what is told is: {why}");
        }
        assert_eq!(complete(&self.output).last(), Some(&STEPS));
    }

    /// What must hold when all is over.
    fn check_end(&mut self, swept: bool) {
        let (events, odd) = events(&self.output);
        // A rank that was killed may leave half a line.
        assert!(odd.len() < self.starts as usize, "metrics.jsonl has lines that are none: {odd:?}");
        // At which world size alone a step was reached, if it was only one.
        let mut reached: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        let (mut world, mut alone, mut last) = (0, None, 0);
        for event in &events {
            let step = event["step"].as_u64().unwrap();
            if event["event"] == "start" {
                world = event["world_size"].as_u64().unwrap();
                let before = if step == 0 { Some(world) } else { reached.get(&step).copied().flatten() };
                alone = before.filter(|before| *before == world);
            } else if event["event"] == "step" {
                reached.insert(step, alone);
                let (loss, same) = (event["loss"].as_f64().unwrap(), self.reference(world as u32).losses[&step]);
                if alone.is_some() {
                    assert_eq!(loss, same, "other bits in step {step} than without the fault");
                } else {
                    let close = (loss - same).abs() <= 1e-5 * same.abs();
                    assert!(close, "step {step}: {loss}, without the fault {same}");
                }
                last = step;
            }
        }
        assert_eq!(last, STEPS);
        let model = fs::read(self.output.join("final/model.safetensors")).unwrap();
        if alone.is_some() {
            assert!(model == self.reference(world as u32).model, "the same losses, another model");
        }
        assert_eq!(model.len(), self.reference(world as u32).model.len());

        assert!(!self.output.join("restarts.json").exists());
        assert_eq!(fs::read_to_string(self.output.join("notes.txt")).unwrap(), "not theirs");
        assert_eq!(fs::read_link(self.output.join("step-9999")).unwrap(), self.tree.place.dir("beside/step-9999"));
        let latest = fs::read_link(self.output.join("latest")).unwrap();
        assert_eq!(latest, Path::new(&format!("step-{STEPS}")));
        for name in names(&self.output) {
            let whole = files_of(&self.output.join(&name)).is_some();
            let number = step_of(&name);
            assert!(number.is_none() || whole || name != format!("step-{STEPS}"));
            if swept && name.contains(".tmp-") {
                // One that was killed before it had marked its directory is not known yet.
                let inside = names_of_attempt(&self.output.join(&name));
                assert!(inside.is_empty(), "{name} was left behind with {inside:?}");
            }
        }
        self.no_key(&self.output.clone());
    }

    /// The store key is in no file.
    fn no_key(&self, directory: &Path) {
        for name in names(directory) {
            let path = directory.join(name);
            let found = fs::symlink_metadata(&path).unwrap();
            if found.is_dir() {
                self.no_key(&path);
            } else if found.is_file() {
                let bytes = fs::read(&path).unwrap();
                assert!(!bytes.windows(16).any(|window| window == &KEY.as_bytes()[..16]), "{}", path.display());
            }
        }
    }

    fn run(&mut self) -> Row {
        let mut row = Row::default();
        let model = self.reference(self.world).model.len() as u64;
        // Full from the beginning, or after some checkpoints, or at some moment.
        let size = match self.random.below(3) {
            _ if self.fault != FullDisk => None,
            0 => Some(16_384 + self.random.below(200_000)),
            1 => Some(model / 2 + self.random.below(9 * model)),
            _ => Some(40 * model),
        };
        if let Some(size) = size {
            self.say(&format!("a disk of {size} bytes"));
            if let Err(error) = own_mounts().and_then(|()| mount(&self.tree.place.dir("disk"), 0, size)) {
                row.skipped = Some(format!("no small disk can be mounted here: {error}"));
                return row;
            }
        }
        fs::create_dir_all(&self.output).unwrap();
        fs::write(self.output.join("notes.txt"), "not theirs").unwrap();
        std::os::unix::fs::symlink(self.tree.place.dir("beside/step-9999"), self.output.join("step-9999")).unwrap();
        let before = self.tree.snapshot(&self.output);

        let (mut spoilt, mut stopped, mut holds) = (None, None, false);
        match self.fault {
            Kill | KillInSave | KillNode | KillAll => {
                // One in three is struck again when it goes on.
                for _ in 0..1 + self.random.below(3) / 2 {
                    self.strike(&mut row);
                    self.other_world();
                }
            }
            Stop | StopInSave => {
                let struck = self.strike(&mut row).pop();
                holds = struck.as_ref().is_some_and(|(rank, _)| *rank == 0);
                let struck = struck.map(|(_, rank)| rank);
                let how = self.random.below(3);
                self.say(["it goes on now", "it is killed", "it goes on later"][how as usize]);
                match (struck, how) {
                    (Some(struck), 0) => self.go_on(struck),
                    (Some(struck), 2) => stopped = Some(struck),
                    _ => {}
                }
                self.other_world();
            }
            Suspend => self.suspend(&mut row),
            FullDisk | FileLimit => {
                self.fill(&mut row, size.is_none_or(|size| size == 40 * model));
                self.other_world();
            }
            FlippedBit | Truncated => {
                self.strike(&mut row);
                spoilt = Some(self.spoil());
                self.other_world();
            }
        }
        let swept = stopped.is_none();
        self.finish(spoilt, stopped, holds);
        self.check_end(swept);
        let after = self.tree.snapshot(&self.output);
        let changed: Vec<&PathBuf> =
            before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path)).collect();
        assert!(changed.is_empty(), "outside output_dir was changed: {changed:?}");
        fs::remove_dir_all(&self.output).unwrap();
        row
    }

    /// The next start has another number of ranks in one of three cases.
    fn other_world(&mut self) {
        if self.random.below(3) == 0 {
            self.world = 2 + (self.world - 1) % 3;
        }
    }
}

/// What is in an attempt's directory besides its mark.
fn names_of_attempt(directory: &Path) -> Vec<String> {
    names(directory).into_iter().filter(|name| name != "attempt.json").collect()
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// This thread and what it starts have their own mounts from now on; they end with them.
fn own_mounts() -> io::Result<()> {
    // SAFETY: takes a number only.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let (none, none_ptr) = (c"none", std::ptr::null());
    // SAFETY: both texts end with a zero and live through the call.
    checked(unsafe {
        libc::mount(none.as_ptr(), c"/".as_ptr(), none_ptr, libc::MS_REC | libc::MS_PRIVATE, none_ptr.cast())
    })
}

/// A file system of `size` bytes, or of a new size with MS_REMOUNT.
fn mount(at: &Path, flags: libc::c_ulong, size: u64) -> io::Result<()> {
    let at = CString::new(at.to_str().unwrap()).unwrap();
    let data = CString::new(format!("size={size}")).unwrap();
    // SAFETY: all texts end with a zero and live through the call.
    checked(unsafe { libc::mount(c"none".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), flags, data.as_ptr().cast()) })
}

/// No file of this process grows beyond so many bytes.
fn limit_files(process: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the limits live through the call; nothing is asked back.
    checked(unsafe { libc::prlimit(process as i32, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) })
        .unwrap();
}

/// Past what the test harness keeps to itself.
fn tell(text: &str) {
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}

fn asked(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

#[test]
fn whatever_happens_the_culprit_is_named_and_the_next_start_goes_on_from_the_newest_whole_checkpoint() {
    let soak: Option<usize> = asked("PALINGENESIS_SOAK").map(|text| text.parse().unwrap());
    let chosen = asked("PALINGENESIS_CHAOS_SEED");
    let (seed, only) = match chosen.as_deref().map(|text| text.split_once('/').unwrap_or((text, ""))) {
        Some((seed, number)) => (seed.parse().unwrap(), number.parse::<usize>().ok()),
        None => (SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros() as u64, None),
    };
    let kind = asked("PALINGENESIS_CHAOS_FAULT");
    let is_asked =
        |number: &usize| kind.as_ref().is_none_or(|kind| *kind == format!("{:?}", FAULTS[number % FAULTS.len()]));
    let count = soak.map_or(7, |soak| soak.max(50));
    let numbers: Vec<usize> = match only {
        Some(number) => vec![number],
        None => (0..).filter(is_asked).take(count).collect(),
    };
    tell(&format!("chaos: PALINGENESIS_CHAOS_SEED={seed}"));

    let tree = Tree::new();
    let references: BTreeMap<u32, Reference> = (2..=4).map(|world| (world, tree.reference(world))).collect();
    let mut rows: Vec<(Fault, Row)> = Vec::new();
    let mut failures = Vec::new();
    for number in numbers {
        let fault = FAULTS[number % FAULTS.len()];
        let parent = if fault == FullDisk { tree.place.dir("disk") } else { tree.place.dir(&format!("run-{number}")) };
        if fault != FullDisk {
            fs::create_dir_all(&parent).unwrap();
        }
        let mut round = Round {
            tree: &tree,
            references: &references,
            random: Random(seed ^ (number as u64) << 40),
            fault,
            world: 2 + number as u32 % 3,
            output: parent.join("output"),
            story: String::new(),
            starts: 0,
            starts_told: 0,
        };
        // A thread of its own: its mounts end with it, and with it all that it started.
        let outcome = thread::scope(|scope| scope.spawn(|| catch_unwind(AssertUnwindSafe(|| round.run()))).join());
        match outcome.unwrap_or_else(Err) {
            Ok(row) => {
                if soak.is_some() {
                    tell(&format!("chaos: {seed}/{number} ({fault:?}): {:.2?}", row.took));
                }
                rows.push((fault, row));
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
                failures.push(format!("PALINGENESIS_CHAOS_SEED={seed}/{number} ({fault:?}): {text}\n{}", round.story));
                tell(&format!("chaos: {seed}/{number} ({fault:?}) failed: {text}"));
            }
        }
        if fault != FullDisk {
            let _ = fs::remove_dir_all(&parent);
        }
    }
    let mut kinds: BTreeMap<Fault, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|(fault, row)| kinds.entry(*fault).or_default().push(row));
    for (fault, rows) in kinds {
        for row in rows.iter().filter_map(|row| row.skipped.as_ref()) {
            tell(&format!("skipped: {fault:?}: {row}"));
        }
        let mut took: Vec<f64> = rows.iter().flat_map(|row| &row.took).map(Duration::as_secs_f64).collect();
        took.sort_by(f64::total_cmp);
        let sum = |of: fn(&Row) -> u32| rows.iter().map(|row| of(row)).sum::<u32>();
        tell(&format!(
            "chaos: {fault:?}: {} trainings, {} faults named (median {:.2} s, at most {:.2} s to the last end), {} where \
             meant, {} when all was done",
            rows.len(),
            took.len(),
            took.get(took.len() / 2).unwrap_or(&0.0),
            took.last().unwrap_or(&0.0),
            sum(|row| row.hits),
            sum(|row| row.late),
        ));
    }
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        failures.len() + rows.len(),
        failures.join("\n")
    );
}
