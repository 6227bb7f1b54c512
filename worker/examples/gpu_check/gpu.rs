//! Where the engine and the group of a check come from: the only place that knows of a kind
//! of device. Nothing is checked here.

use std::mem::ManuallyDrop;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use palingenesis::facts::Environment;
use palingenesis_worker::comm::control::Terms;
use palingenesis_worker::comm::nccl::{self, GpuQueue, Library, Limits};
use palingenesis_worker::comm::{Collective, connect};
use palingenesis_worker::engine::cuda::driver::{Gpu, Stop};
use palingenesis_worker::engine::cuda::{Cuda, libraries, start};
use palingenesis_worker::engine::{Cpu, Engine, Precision};

/// What is done with an engine, of whatever kind.
pub trait Work {
    type Out;

    fn on<E: Engine>(self, engine: &E) -> Self::Out;
}

/// What is done with an engine and a group of ranks.
pub trait GroupWork {
    type Out;

    fn on<E: Engine, C: Collective<E>>(self, engine: &E, comm: &mut C) -> Self::Out;
}

/// Which engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The first GPU.
    Cuda,
    /// The processor: tries the check itself.
    Cpu,
}

type Result<T> = std::result::Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What the engine is, for people.
pub fn describe(kind: Kind, libraries: Option<&Path>) -> Result<String> {
    if kind == Kind::Cpu {
        return Ok(format!("{} threads of the processor", Cpu::default().threads()));
    }
    let Taken { engine, .. } = gpu(Precision::F32, libraries)?;
    let context = engine.device().context();
    let (identity, usage) = (context.identity(), context.usage().map_err(text)?);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    Ok(format!(
        "{identity}, compute capability {}.{}, {} multiprocessors, {:.1} GiB of {:.1} GiB in use, driver for CUDA {}.{}",
        identity.architecture / 10,
        identity.architecture % 10,
        identity.processors,
        gib(usage.used),
        gib(usage.total),
        identity.driver / 1000,
        identity.driver % 1000 / 10
    ))
}

/// Does `work` on an engine that computes in `precision`.
pub fn on<W: Work>(kind: Kind, precision: Precision, libraries: Option<&Path>, work: W) -> Result<W::Out> {
    match kind {
        Kind::Cpu => Ok(work.on(&Cpu::default())),
        Kind::Cuda => Ok(work.on(&*gpu(precision, libraries)?.engine)),
    }
}

/// Does `work` in a group of one rank, whose collectives are NCCL's on a GPU.
pub fn in_group<W: GroupWork>(kind: Kind, precision: Precision, libraries: Option<&Path>, work: W) -> Result<W::Out> {
    if kind == Kind::Cpu {
        let mut comm = connect(&terms()?, LIMIT).map_err(text)?;
        let out = work.on(&Cpu::default(), &mut comm);
        comm.end();
        return Ok(out);
    }
    if let Some(warning) = nccl::prepare() {
        eprintln!("gpu_check: warning: {warning}");
    }
    let Taken { engine, nccl } = gpu(precision, libraries)?;
    let library = Library::open(&nccl?).map_err(text)?;
    nccl::describe(&library).iter().for_each(|line| eprintln!("gpu_check: {line}"));
    let queue = GpuQueue::new(engine.device()).map_err(text)?;
    let tcp = connect(&terms()?, LIMIT).map_err(text)?;
    let mut comm = nccl::connect(tcp, library, queue, Limits::new(LIMIT, LIMIT)).map_err(text)?;
    let out = work.on(&*engine, &mut comm);
    match comm.end() {
        None => Ok(out),
        Some(told) => Err(told),
    }
}

/// How long one operation may take.
const LIMIT: Duration = Duration::from_secs(30);

/// The only rank.
fn terms() -> Result<Terms> {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.map_err(|error| format!("no port on 127.0.0.1: {error}"))?.port();
    Ok(Terms {
        rank: 0,
        world_size: 1,
        host: "here".into(),
        master: ("127.0.0.1".into(), port),
        key: None,
        start: LIMIT,
        silence: LIMIT,
    })
}

/// A GPU, and where NCCL is or was looked for.
struct Taken {
    /// Never dropped: giving memory back waits for all work on the GPU, which may hang.
    engine: ManuallyDrop<Cuda<Gpu>>,
    nccl: Result<PathBuf>,
}

/// The first GPU.
fn gpu(precision: Precision, directory: Option<&Path>) -> Result<Taken> {
    let found = libraries::find(directory, &Environment::of_process());
    let gpu = start::start(&libraries::places(&found)?, 0, Stop::new()).map_err(text)?;
    let engine = ManuallyDrop::new(Cuda::new(gpu, precision).map_err(text)?);
    Ok(Taken { engine, nccl: found.nccl.map(|found| found.path).map_err(text) })
}
