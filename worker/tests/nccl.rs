//! The NCCL group: against a stand-in for libnccl over host memory, between real processes,
//! with everything that can go wrong; and the real library as far as it goes without a GPU.

mod common;
#[path = "double/engine.rs"]
mod engine;

use std::ffi::c_void;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::Place;
use common::port::free_port;
use engine::{Beside, Span};
use palingenesis::act::key::Key;
use palingenesis_worker::comm::control::Terms;
use palingenesis_worker::comm::nccl::{self, Config, Limits, Nccl, Queue, RawComm, Status, UniqueId};
use palingenesis_worker::comm::{Collective, CommError, Exchange, Ongoing, Tag, connect};
use palingenesis_worker::config::Config as TrainConfig;
use palingenesis_worker::dynamic::Library;
use palingenesis_worker::engine::{Cpu, EngineError, Result as EngineResult};
use palingenesis_worker::shard::{self, ShardError};
use palingenesis_worker::train::{End, Job, TrainError, run};

/// For what certainly happens: a machine may be busy.
const SURELY: Duration = Duration::from_secs(90);

const WORLD: u32 = 4;
/// The rank at which something goes wrong.
const WRONG: u32 = 2;

/// Of an operation; of NCCL's end; for the process to end when its group is broken.
const OPERATION: Duration = Duration::from_secs(4);
const END: Duration = Duration::from_secs(2);
const LAST: Duration = Duration::from_secs(3);
const START: Duration = Duration::from_secs(8);

/// The stand-in, compiled once for each process of tests.
fn double() -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/double/nccl.c");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (new, made) = (folder.join(format!("nccl-{}.so", std::process::id())), folder.join("nccl.so"));
        let gcc = Command::new("gcc")
            .args(["-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-pthread", "-o"])
            .args([&new, &source])
            .status()
            .unwrap();
        assert!(gcc.success());
        // Another run of these tests may have it loaded.
        fs::rename(new, &made).unwrap();
        made
    })
    .clone()
}

/// The stand-in's stream.
struct DoubleQueue {
    stream: usize,
    mark: unsafe extern "C" fn(*mut c_void) -> u64,
    done: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    compute: unsafe extern "C" fn(*mut c_void, i32),
    device: String,
    /// What the computation waits for, and whether it is let go.
    waits: Arc<(AtomicU64, AtomicBool)>,
}

impl DoubleQueue {
    fn new(path: &Path, device: String) -> DoubleQueue {
        let library = Library::open(path).unwrap();
        // SAFETY: these are the stand-in's declarations.
        unsafe {
            let make: unsafe extern "C" fn() -> *mut c_void = library.symbol("double_stream").unwrap();
            DoubleQueue {
                stream: make() as usize,
                mark: library.symbol("double_mark").unwrap(),
                done: library.symbol("double_done").unwrap(),
                compute: library.symbol("double_compute").unwrap(),
                device,
                waits: Arc::default(),
            }
        }
    }

    fn raw(&self) -> *mut c_void {
        self.stream as *mut c_void
    }
}

impl Queue for DoubleQueue {
    type Marker = u64;

    fn device(&self) -> String {
        self.device.clone()
    }

    fn stream(&self) -> *mut c_void {
        self.raw()
    }

    fn enter(&self) -> EngineResult<()> {
        Ok(())
    }

    fn after_compute(&self) -> EngineResult<u64> {
        self.mark()
    }

    fn mark(&self) -> EngineResult<u64> {
        // SAFETY: the stream lives as long as the process.
        Ok(unsafe { (self.mark)(self.raw()) })
    }

    fn is_done(&self, marker: &u64) -> EngineResult<bool> {
        // SAFETY: as above.
        Ok(unsafe { (self.done)(self.raw(), *marker) } != 0)
    }

    fn compute_waits(&self, marker: &u64) -> EngineResult<()> {
        self.waits.0.fetch_max(*marker, Ordering::SeqCst);
        Ok(())
    }

    fn stop(&self) {
        self.waits.1.store(true, Ordering::SeqCst);
    }
}

/// As an engine waits for its device: until all that it was told to wait for is done.
struct Device {
    done: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    stream: usize,
    waits: Arc<(AtomicU64, AtomicBool)>,
}

impl Device {
    fn finish(&self) -> EngineResult<()> {
        loop {
            if self.waits.1.load(Ordering::SeqCst) {
                return Err(EngineError::Stopped);
            }
            // SAFETY: the stream lives as long as the process.
            if unsafe { (self.done)(self.stream as *mut c_void, self.waits.0.load(Ordering::SeqCst)) } != 0 {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// No test: one rank, in a process of its own.
#[test]
fn as_rank() {
    let Ok(words) = std::env::var("NCCL_TEST_RANK") else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [rank, world, port, device, library, mode, fault] = words[..] else { panic!("{words:?}") };
    let terms = Terms {
        rank: rank.parse().unwrap(),
        world_size: world.parse().unwrap(),
        host: "here".into(),
        master: ("127.0.0.1".into(), port.parse().unwrap()),
        key: Key::from_hex(&std::env::var("PALINGENESIS_STORE_KEY").unwrap()),
        start: SURELY,
        silence: Duration::from_secs(20),
    };
    // A training takes its operations together with seven other ranks on a busy machine.
    let operation = if mode.starts_with("fail") { OPERATION } else { SURELY };
    let tcp = connect(&terms, operation).unwrap_or_else(|error| leave(error.into()));
    let queue = DoubleQueue::new(library.as_ref(), device.into());
    let (stream, compute) = (queue.raw(), queue.compute);
    let device = Device { done: queue.done, stream: queue.stream, waits: Arc::clone(&queue.waits) };
    let library = nccl::Library::open(library.as_ref()).unwrap_or_else(|error| leave(error.into()));
    let limits = Limits {
        end: END,
        last: LAST,
        ..Limits::new(operation, if mode.starts_with("fail") { START } else { SURELY })
    };
    say("joined");
    let mut group = nccl::connect(tcp, library, queue, limits).unwrap_or_else(|error| leave(error.into()));
    say("begun");
    // SAFETY: the stream lives as long as the process.
    let busy = || unsafe { compute(stream, 1_000_000) };
    let outcome = match mode {
        "train" => train(&mut group, fault),
        "beside" | "failbeside" => beside(&mut group, &device, fault, busy),
        _ => collectives(&mut group, fault, busy).map_err(TrainError::from),
    };
    match outcome {
        Ok(()) => {
            if let Some(warning) = group.end() {
                say(&format!("warning: {warning}"));
            }
            std::process::exit(0);
        }
        Err(error) => {
            // As at the end of a training: the others hear of it.
            drop(group);
            leave(error)
        }
    }
}

fn say(text: &str) {
    // libtest's own words may stand before it on the line.
    let mut out = std::io::stdout().lock();
    out.write_all(format!("\n@{text}\n").as_bytes()).and_then(|()| out.flush()).unwrap();
}

/// As the worker does it.
fn leave(error: TrainError) -> ! {
    say(&format!("error: {error}"));
    std::process::exit(error.exit_code().into())
}

fn train(group: &mut Nccl<DoubleQueue>, config: &str) -> Result<(), TrainError> {
    let config = TrainConfig::read(config.as_ref(), &[]).unwrap();
    let job = Job { config: &config, host: "here", launch: None, started: Instant::now() };
    run(&Cpu::new(Some(1)), group, &job).map(|end| assert_eq!(end, End::Done))
}

/// Small whole numbers, whose sums are exact in any order.
fn number(rank: u32, at: usize) -> f32 {
    ((at * 7 + rank as usize * 13) % 101) as f32
}

fn numbers(rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|at| number(rank, at)).collect()
}

fn sums(world: u32, count: usize) -> Vec<f32> {
    (0..count).map(|at| (0..world).map(|rank| number(rank, at)).sum()).collect()
}

fn whole<C: Collective<Cpu>>(
    group: &mut C,
    begin: impl FnOnce(&mut C, &Cpu) -> shard::Result<Ongoing>,
) -> shard::Result<()> {
    let cpu = Cpu::new(Some(1));
    let ongoing = begin(group, &cpu)?;
    group.finish(&cpu, ongoing)
}

const COUNTS: [usize; 7] = [0, 1, 3, 1000, 4097, 70_001, 1];

/// Operations of all kinds, and what comes out against plain sums. `fault`, at one rank, is
/// the host's: "all_gather:3=absent".
fn collectives(group: &mut Nccl<DoubleQueue>, fault: &str, busy: impl Fn()) -> Result<(), ShardError> {
    let (rank, world) = (group.rank(), group.world_size());
    let (mut right, mut round) = (true, 0);
    let is = |op: &str, round: usize, what: &str| fault == format!("{op}:{round}={what}");
    for count in COUNTS {
        round += 1;
        for op in ["all_gather", "reduce_scatter", "all_reduce"] {
            if is(op, round, "absent") {
                thread::sleep(SURELY);
            }
            if is(op, round, "busy") {
                busy();
            }
            let index = round as u32 + u32::from(is(op, round, "other"));
            let tag = Tag::of("block", index);
            let count = if is(op, round, "count") { count + 1 } else { count };
            let size = count * world as usize;
            let own = rank as usize * count..(rank as usize + 1) * count;
            match op {
                "all_gather" => {
                    let mut full = vec![-1.0; size];
                    full[own].copy_from_slice(&numbers(rank, count));
                    whole(group, |group, cpu| group.all_gather(cpu, tag, &mut full))?;
                    right &= full == (0..world).flat_map(|rank| numbers(rank, count)).collect::<Vec<f32>>();
                }
                "reduce_scatter" => {
                    let mut full = numbers(rank, size);
                    whole(group, |group, cpu| group.reduce_scatter(cpu, tag, &mut full))?;
                    right &= full[own.clone()] == sums(world, size)[own];
                }
                _ => {
                    let mut values = numbers(rank, count);
                    whole(group, |group, cpu| group.all_reduce(cpu, tag, &mut values))?;
                    right &= values == sums(world, count);
                }
            }
        }
        let mut values = [f64::from(rank), 1.0];
        group.sum(Tag::of("step", round as u32), &mut values)?;
        assert_eq!(values, [f64::from(world * (world - 1) / 2), f64::from(world)]);
    }
    if !right {
        say("wrong numbers");
    }
    group.barrier(Tag::of("end", 0))?;
    Ok(())
}

/// As a step does it: several operations under way at once, waited for when their numbers are
/// needed, and the device where its numbers are read.
fn beside(group: &mut Nccl<DoubleQueue>, device: &Device, fault: &str, busy: impl Fn()) -> Result<(), TrainError> {
    let (rank, world, engine) = (group.rank(), group.world_size(), Beside);
    assert!(Collective::<Beside>::overlaps(group));
    let count = 5000;
    let own = rank as usize * count..(rank as usize + 1) * count;
    // Never given back: an operation that fails may write to them until the process ends.
    let new = || vec![-1.0f32; count * world as usize].leak();
    let buffers = [(); 4].map(|()| {
        let numbers = new();
        (numbers.as_mut_ptr(), Span { address: numbers.as_mut_ptr().expose_provenance() as u64, len: numbers.len() })
    });
    // SAFETY: nobody else looks at them while the device does nothing with them.
    let slice = |at: usize| unsafe { std::slice::from_raw_parts_mut(buffers[at].0, buffers[at].1.len) };
    let finished = |group: &mut Nccl<DoubleQueue>| match device.finish() {
        // As the worker does it: why it was let go the control group knows.
        Err(EngineError::Stopped) => {
            Err(group.verdict(Duration::from_secs(1)).map_or(EngineError::Stopped.into(), TrainError::from))
        }
        other => other.map_err(TrainError::from),
    };
    for round in 1..=8 {
        let tag = Tag::of("block", round);
        for at in [0, 1] {
            slice(at)[own.clone()].copy_from_slice(&numbers(rank, count));
            slice(at + 2).copy_from_slice(&numbers(rank, count * world as usize));
        }
        if fault == format!("all_gather:{round}=absent") {
            thread::sleep(SURELY);
        }
        if fault == format!("all_gather:{round}=busy") {
            busy();
        }
        let first = group.all_gather(&engine, tag, buffers[0].1)?;
        let second = group.reduce_scatter(&engine, tag, buffers[2].1)?;
        let third = group.all_gather(&engine, tag, buffers[1].1)?;
        let fourth = group.all_reduce(&engine, tag, buffers[3].1)?;
        group.finish(&engine, first)?;
        group.finish(&engine, second)?;
        finished(group)?;
        let all: Vec<f32> = (0..world).flat_map(|rank| numbers(rank, count)).collect();
        assert!(slice(0) == all && slice(2)[own.clone()] == sums(world, all.len())[own.clone()]);
        group.finish(&engine, third)?;
        group.finish(&engine, fourth)?;
        finished(group)?;
        assert!(slice(1) == all && slice(3) == sums(world, all.len()));
        group.barrier(Tag::of("step", round))?;
    }
    Ok(())
}

/// A running rank.
struct Rank {
    child: Child,
    out: Option<JoinHandle<(String, Option<Instant>)>>,
    err: Option<JoinHandle<String>>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How one ended.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    signal: Option<i32>,
    /// What it said, its error last.
    said: String,
    /// Since all had joined.
    after: Duration,
}

impl Ended {
    fn how(&self) -> String {
        self.code.map_or_else(|| format!("signal {}", self.signal.unwrap_or(0)), |code| code.to_string())
    }
}

/// What goes wrong at rank [`WRONG`].
#[derive(Clone, Default)]
struct Case {
    name: &'static str,
    /// NCCL_DOUBLE.
    double: String,
    /// The host's.
    fault: String,
    /// The same at all ranks.
    everywhere: &'static str,
    device: Option<&'static str>,
    version: Option<&'static str>,
    mode: &'static str,
}

fn start(case: &Case, directory: &Path) -> Vec<Rank> {
    let (port, key) = (free_port("127.0.0.1"), Key::new().unwrap().to_hex());
    let one = |rank: u32| {
        let wrong = rank == WRONG;
        let device = case.device.filter(|_| wrong).map_or_else(|| format!("gpu-{rank}"), str::to_string);
        let fault = if (wrong || case.mode == "train") && !case.fault.is_empty() { &case.fault } else { "-" };
        let library = double();
        let words = format!("{rank} {WORLD} {port} {device} {} {} {fault}", library.display(), case.mode);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["as_rank", "--exact", "--nocapture", "--test-threads=1"])
            .env("NCCL_TEST_RANK", words)
            .env("PALINGENESIS_STORE_KEY", &key)
            .env("NCCL_DOUBLE_DIR", directory)
            .env("NCCL_DOUBLE", format!("{} {}", case.everywhere, if wrong { &case.double } else { "" }))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(version) = case.version.filter(|_| wrong) {
            command.env("NCCL_DOUBLE_VERSION", version);
        }
        let mut child = command.spawn().unwrap();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let out = thread::spawn(move || {
            let (mut said, mut buffer, mut joined) = (String::new(), [0; 4096], None);
            while let Ok(got @ 1..) = out.read(&mut buffer) {
                said.push_str(&String::from_utf8_lossy(&buffer[..got]));
                if said.contains("@joined") {
                    joined.get_or_insert_with(Instant::now);
                }
            }
            (said, joined)
        });
        let err = thread::spawn(move || {
            let mut said = String::new();
            let _ = err.read_to_string(&mut said);
            said
        });
        Rank { child, out: Some(out), err: Some(err) }
    };
    (0..WORLD).map(one).collect()
}

/// Runs a case to its end.
fn ends(case: &Case) -> Vec<Ended> {
    let directory = tempfile::tempdir().unwrap();
    let mut ranks = start(case, directory.path());
    let limit = Instant::now() + SURELY;
    let mut ended: Vec<_> = ranks.iter().map(|_| None).collect();
    while ended.iter().any(Option::is_none) {
        for (rank, ended) in ranks.iter_mut().zip(&mut ended) {
            if ended.is_none() {
                *ended = rank.child.try_wait().unwrap().map(|status| (status, Instant::now()));
            }
        }
        assert!(Instant::now() < limit, "{}: not all ranks end: {ended:?}", case.name);
        thread::sleep(Duration::from_millis(5));
    }
    let said: Vec<_> = ranks
        .iter_mut()
        .map(|rank| (rank.out.take().unwrap().join().unwrap(), rank.err.take().unwrap().join().unwrap()))
        .collect();
    let joined = said.iter().filter_map(|((_, joined), _)| *joined).max();
    let ended = ended.into_iter().flatten();
    said.iter()
        .zip(ended)
        .map(|(((out, _), err), (status, when))| {
            let told = out.lines().filter_map(|line| line.strip_prefix('@'));
            let told = told.filter(|line| !["joined", "begun"].contains(line));
            let errors = err.lines().filter_map(|line| line.strip_prefix("palingenesis-worker: "));
            let mut said: Vec<&str> = told.chain(errors).collect();
            if said.is_empty() {
                said = err.lines().collect();
            }
            Ended {
                code: status.code(),
                signal: status.signal(),
                said: said.join("; "),
                after: joined.map_or(Duration::ZERO, |joined| when.saturating_duration_since(joined)),
            }
        })
        .collect()
}

/// What the ranks but [`WRONG`] say, and it.
struct Expected {
    others: (Option<i32>, &'static str),
    wrong: (Option<i32>, &'static str),
    within: Duration,
}

/// A row of the table, and what is not as expected.
fn check(case: &Case, expected: &Expected) -> (String, Vec<String>) {
    let ended = ends(case);
    let mut wrongs = Vec::new();
    for (rank, end) in (0..).zip(&ended) {
        let (code, text) = if rank == WRONG { expected.wrong } else { expected.others };
        if end.code != code || !end.said.contains(text) || end.after > expected.within {
            wrongs.push(format!("{}: rank {rank}: {end:?}, and not {code:?} with {text:?}", case.name));
        }
    }
    let wrong = &ended[WRONG as usize];
    let others = || (0..).zip(&ended).filter(|(rank, _)| *rank != WRONG).map(|(_, end)| end);
    let longest = others().map(|end| end.after).max().unwrap_or_default();
    let row = format!(
        "| {} | {} | {:.1} | {} | {} | {:.1} | {} |",
        case.name,
        others().map(Ended::how).collect::<Vec<_>>().join(" "),
        longest.as_secs_f64(),
        others().next().map(|end| end.said.replace('|', "/")).unwrap_or_default(),
        wrong.how(),
        wrong.after.as_secs_f64(),
        wrong.said.replace('|', "/"),
    );
    (row, wrongs)
}

const SLACK: Duration = Duration::from_secs(8);

fn named(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

/// For each kind of operation what can go wrong in it.
fn in_operations(cases: &mut Vec<(Case, Expected)>) {
    for op in ["all_gather", "reduce_scatter", "all_reduce"] {
        let fail = |what: &str, double: String, fault: String| Case {
            name: named(format!("{op}: {what}")),
            double,
            fault,
            mode: "fail",
            ..Case::default()
        };
        let with = |what: &str| fail(what, format!("{op}:3={what}"), String::new());
        let host = |what: &str| fail(what, String::new(), format!("{op}:3={what}"));
        let all_in_it = (Some(75), "NCCL: all ranks are in it");
        cases.push((with("hang"), Expected { others: all_in_it, wrong: all_in_it, within: OPERATION + SLACK }));
        cases.push((
            with("kill"),
            Expected { others: (Some(75), "rank 2 on here is gone"), wrong: (None, ""), within: SLACK },
        ));
        cases.push((
            with("error:1"),
            Expected {
                others: (Some(75), named(format!("rank 2 on here has ended: NCCL failed on rank 2 on here in {op} #"))),
                wrong: (Some(75), "unhandled cuda error (1): as the stand-in was told"),
                within: SLACK,
            },
        ));
        cases.push((
            with("sync:3"),
            Expected {
                others: (Some(75), named(format!("rank 2 on here has ended: NCCL failed on rank 2 on here in {op} #"))),
                wrong: (Some(75), "internal error (3): as the stand-in was told"),
                within: SLACK,
            },
        ));
        cases.push((
            with("stuck"),
            Expected {
                others: all_in_it,
                wrong: (Some(75), "it has not ended within 3 s; the process is ended"),
                within: OPERATION + LAST + SLACK,
            },
        ));
        cases.push((
            host("absent"),
            Expected {
                others: (Some(75), "waiting for rank 2 on here, which is at its own work after"),
                wrong: (Some(75), "it has not ended within 3 s; the process is ended"),
                within: OPERATION + LAST + SLACK,
            },
        ));
        cases.push((
            host("busy"),
            Expected {
                others: (Some(75), "rank 2 on here"),
                wrong: (Some(75), "rank 2 on here"),
                within: OPERATION + SLACK,
            },
        ));
        let differ = (Some(1), "at exchange #16 of step 3: the collectives before it differ");
        for what in ["other", "count"] {
            cases.push((host(what), Expected { others: differ, wrong: differ, within: SLACK }));
        }
        // NCCL waits for a rank that is at something else: the heartbeats tell.
        let hangs = Case { double: format!("{op}:3=hang"), ..host("other") };
        let both = (Some(1), "the operations differ");
        cases.push((
            Case { name: named(format!("{op}: other, and hang")), ..hangs },
            Expected { others: both, wrong: both, within: OPERATION },
        ));
        cases.push((
            with("wrong"),
            Expected { others: (Some(0), ""), wrong: (Some(0), "wrong numbers"), within: SLACK },
        ));
    }
}

/// Where operations go on beside the rank's own work.
fn beside_the_work(cases: &mut Vec<(Case, Expected)>) {
    let case = |what: &str, double: &str, fault: &str| Case {
        name: named(format!("beside: {what}")),
        double: double.into(),
        fault: fault.into(),
        mode: "failbeside",
        ..Case::default()
    };
    for op in ["all_gather", "reduce_scatter", "all_reduce"] {
        let with = |what: &str| case(&format!("{op}: {what}"), &format!("{op}:3={what}"), "");
        let in_it = (Some(75), "was not over within 4 s: waiting for NCCL: all ranks are in it");
        cases.push((with("hang"), Expected { others: in_it, wrong: in_it, within: OPERATION + SLACK }));
        let gone = (Some(75), "rank 2 on here is gone");
        cases.push((with("kill"), Expected { others: gone, wrong: (None, ""), within: SLACK }));
        let failed = (Some(75), named(format!("NCCL failed on rank 2 on here in {op} #")));
        cases.push((with("error:1"), Expected { others: failed, wrong: failed, within: SLACK }));
    }
    let missing = (Some(75), "waiting for rank 2 on here, which is at its own work after barrier #");
    cases.push((
        case("all_gather: absent", "", "all_gather:3=absent"),
        Expected {
            others: missing,
            wrong: (Some(75), "it has not ended within 3 s; the process is ended"),
            within: OPERATION + LAST + SLACK,
        },
    ));
    let busy = (Some(75), "waiting for rank 2 on here");
    cases.push((
        case("all_gather: busy", "", "all_gather:3=busy"),
        Expected { others: busy, wrong: busy, within: OPERATION + SLACK },
    ));
}

/// At the start, at the end, and where two things go wrong.
fn elsewhere(cases: &mut Vec<(Case, Expected)>) {
    let case = |name: &'static str, double: &str| Case { name, double: double.into(), mode: "fail", ..Case::default() };
    let late = (Some(75), "within 8 s: all ranks are in it, as far as they said; see whether NCCL_SOCKET_IFNAME");
    cases.push((case("init: hang", "init=hang"), Expected { others: late, wrong: late, within: START + SLACK }));
    cases.push((case("init: mute", "init=mute"), Expected { others: late, wrong: late, within: START + SLACK }));
    let refused = (Some(78), "error: NCCL 2.28.9 has not started on rank 2 on here: invalid usage (5)");
    let failed_start = (Some(75), "error: NCCL 2.28.9 has not started on rank 2 on here: unhandled system error (2)");
    cases.push((
        case("init: invalid usage", "init=error:5"),
        Expected { others: refused, wrong: refused, within: SLACK },
    ));
    cases.push((
        case("init: system error", "init=late:2"),
        Expected { others: failed_start, wrong: failed_start, within: SLACK },
    ));
    let failed = "NCCL failed on rank 2 on here in all_gather #";
    cases.push((
        Case { everywhere: "abort=hang", ..case("error:1, and abort: hang everywhere", "all_gather:3=error:1") },
        Expected { others: (Some(75), failed), wrong: (Some(75), failed), within: SLACK },
    ));
    cases.push((
        case("finalize: hang", "finalize=hang"),
        Expected {
            others: (Some(0), ""),
            wrong: (Some(0), "warning: NCCL did not end within 2 s, and was left"),
            within: END + SLACK,
        },
    ));
    let shared = (Some(78), "rank 1 and rank 2 on here have the same GPU, gpu-1: NCCL needs one for each rank");
    cases.push((
        Case { device: Some("gpu-1"), ..case("two ranks on one GPU", "") },
        Expected { others: shared, wrong: shared, within: SLACK },
    ));
    let mixed = (Some(78), "but rank 2 on here has NCCL 2.27.3");
    cases.push((
        Case { version: Some("22703"), ..case("another NCCL", "") },
        Expected { others: mixed, wrong: mixed, within: SLACK },
    ));
}

#[test]
fn every_failure_ends_every_rank_in_time_and_names_who_it_was() {
    let mut cases = Vec::new();
    in_operations(&mut cases);
    beside_the_work(&mut cases);
    elsewhere(&mut cases);
    double();
    let only = std::env::var("NCCL_TEST_ONLY").unwrap_or_default();
    cases.retain(|(case, _)| case.name.contains(&only));
    let todo = Mutex::new(cases.iter().enumerate().collect::<Vec<_>>().into_iter());
    let rows = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let next = todo.lock().unwrap().next();
                    let Some((index, (case, expected))) = next else { return };
                    let row = check(case, expected);
                    rows.lock().unwrap().push((index, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap();
    rows.sort();
    let (rows, wrongs): (Vec<String>, Vec<Vec<String>>) = rows.into_iter().map(|(_, row)| row).unzip();
    println!("| rank 2's fault | others end with | after s | and say | rank 2 | after s | and says |");
    println!("|---|---|---|---|---|---|---|");
    rows.iter().for_each(|row| println!("{row}"));
    let wrongs = wrongs.concat();
    assert!(wrongs.is_empty(), "{}", wrongs.join("\n"));
}

#[test]
fn sums_and_gatherings_are_those_of_plain_sums() {
    let case = Case { name: "all well", mode: "well", ..Case::default() };
    for end in ends(&case) {
        assert_eq!((end.code, &*end.said), (Some(0), ""), "{end:?}");
    }
}

#[test]
fn operations_that_go_on_beside_the_work_come_to_the_same() {
    let case = Case { name: "all well", mode: "beside", ..Case::default() };
    for end in ends(&case) {
        assert_eq!((end.code, &*end.said), (Some(0), ""), "{end:?}");
    }
}

#[test]
fn a_training_comes_to_the_losses_of_one_over_threads() {
    let (over_nccl, over_threads) = (Place::new("nccl"), Place::new("nccl-threads"));
    let config = over_nccl.config().display().to_string();
    let text = fs::read_to_string(&config).unwrap().replace("global_batch_size = 6", "global_batch_size = 8");
    fs::write(&config, text).unwrap();
    for end in ends(&Case { name: "training", mode: "train", fault: config, ..Case::default() }) {
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    common::train(WORLD, &over_threads, &["train.global_batch_size=8"]);
    let losses = |place: &Place| common::losses(&place.dir("output"));
    let (nccl, threads) = (losses(&over_nccl), losses(&over_threads));
    assert_eq!(nccl.len(), 30);
    for ((step, loss), (_, other)) in nccl.iter().zip(&threads) {
        // Sums in another order differ in their last bits, and trainings by them.
        assert!((loss - other).abs() < 1e-3 * other, "step {step}: {loss} and {other}");
    }
}

/// A sum that is finite and wrong is told by nobody: nothing of a sum shows it.
#[test]
fn a_sum_that_is_no_number_is_seen_and_costs_one_step() {
    let place = Place::new("nccl-nan");
    let config = place.config().display().to_string();
    let text = fs::read_to_string(&config).unwrap().replace("global_batch_size = 6", "global_batch_size = 8");
    fs::write(&config, text).unwrap();
    let case =
        Case { name: "nan", mode: "train", fault: config, double: "reduce_scatter:20=nan".into(), ..Case::default() };
    let ended = ends(&case);
    assert!(ended.iter().all(|end| end.code == Some(0)), "{ended:?}");
    let skipped: Vec<&str> = ended[0].said.split("; ").filter(|line| line.contains("not finite")).collect();
    println!("{skipped:?}");
    assert!(matches!(skipped[..], [line] if line.ends_with("so it changes nothing")), "{skipped:?}");
}

/// The real library, where it was fetched (scripts/cuda-libraries).
fn real() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cuda-libraries");
    let directory = std::env::var_os("PALINGENESIS_CUDA_LIBRARIES").map_or(fetched, PathBuf::from);
    let found = Some(directory.join("libnccl.so.2")).filter(|file| file.exists());
    if found.is_none() {
        println!("SKIPPED: no libnccl.so.2 in {}; scripts/cuda-libraries fetches it", directory.display());
    }
    found
}

#[test]
fn the_real_library_has_every_function_and_two_ids_differ() {
    let Some(path) = real() else { return };
    let library = nccl::Library::open(&path).unwrap();
    assert!(library.version >= nccl::OLDEST, "{}", library.version_text());
    println!("NCCL {}", library.version_text());
    assert_eq!(library.path(), path);
    let [first, second] = [(); 2].map(|()| library.unique_id().unwrap().0);
    assert_ne!(first, second);
    assert_ne!(first, [0; 128]);
    let explained = library.explain(Status::INVALID_USAGE);
    assert!(explained.starts_with("invalid usage") && explained.contains("(5)"), "{explained}");
}

#[test]
fn the_real_library_takes_the_configuration_and_fails_in_one_line_without_a_gpu() {
    let Some(path) = real() else { return };
    if Path::new("/dev/nvidiactl").exists() {
        println!("SKIPPED: here is a GPU");
        return;
    }
    let library = nccl::Library::open(&path).unwrap();
    // By another way to the same function: what a wrong configuration is answered with.
    let again = Library::open(&path).unwrap();
    type Init = unsafe extern "C" fn(*mut RawComm, i32, UniqueId, i32, *mut Config) -> Status;
    // SAFETY: as nccl.h declares it.
    let init: Init = unsafe { again.symbol("ncclCommInitRankConfig").unwrap() };
    let mut comm = std::ptr::null_mut();
    let (id, mut config) = (library.unique_id().unwrap(), Config::nonblocking());
    // SAFETY: given where to write, and a configuration.
    let status = unsafe { init(&raw mut comm, 1, id, 0, &raw mut config) };
    println!("{}", library.explain(status));
    assert!(!status.is_wrong_use(), "{}", library.explain(status));
    assert_ne!(status, Status::SUCCESS);

    let terms = Terms {
        rank: 0,
        world_size: 1,
        host: "here".into(),
        master: ("127.0.0.1".into(), free_port("127.0.0.1")),
        key: None,
        start: SURELY,
        silence: SURELY,
    };
    let tcp = connect(&terms, SURELY).unwrap();
    let queue = DoubleQueue::new(&double(), "0000:17:00.0".into());
    let error = nccl::connect(tcp, library, queue, Limits::new(SURELY, SURELY)).unwrap_err();
    println!("{error}");
    assert!(matches!(error, CommError::Start(_)), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("NCCL 2.") && text.contains("has not started on rank 0 on here: "), "{text}");
    assert!(!text.contains('\n'), "{text}");
    assert_eq!(TrainError::from(error).exit_code(), 75);
}
