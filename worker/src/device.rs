//! Which device a rank computes on, and the training on it: the processor, or a GPU with
//! NCCL between the ranks. How either computes, and how ranks meet, is elsewhere.

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use palingenesis::config::printable;
use palingenesis::facts::Environment;
use palingenesis::system::output::to_stderr;
use serde::{Deserialize, Serialize};

use crate::comm::alone::Alone;
use crate::comm::control::Control;
use crate::comm::local::Local;
use crate::comm::nccl::{self, GpuQueue, Limits, Nccl};
use crate::comm::tcp::Tcp;
use crate::comm::{CommError, Exchange, Tag};
use crate::config::{self, TrainConfig};
use crate::engine::cuda::driver::Stop;
use crate::engine::cuda::start::StartError;
use crate::engine::cuda::{Cuda, driver, libraries, start, sys};
use crate::engine::{Cpu, EngineError, Precision};
use crate::train::{self, EXIT_CONFIG, EXIT_RETRY, End, Job, TrainError};

/// The device of this rank, ready to compute.
pub enum Device {
    /// The processor.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Box<Gpu>),
}

/// A GPU and what goes between it and others.
pub struct Gpu {
    /// Never dropped: giving memory back waits for all work on the GPU, which may hang.
    engine: ManuallyDrop<Cuda<driver::Gpu>>,
    /// NCCL's file, or where it was looked for.
    nccl: Result<PathBuf, String>,
}

/// Why there is no device, in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// What, why, cure.
    pub why: String,
    /// The exit code: whether the same may work elsewhere or later.
    pub code: u8,
}

/// Whether CUDA was ever started in this process: its libraries' exit handlers may wait for
/// a GPU that does not answer, so the process is to end without them.
static CUDA: AtomicBool = AtomicBool::new(false);

/// Whether the process is to end by `_exit`: CUDA was started, and its libraries' exit
/// handlers may wait for a GPU that does not answer.
#[must_use]
pub fn needs_plain_exit() -> bool {
    CUDA.load(SeqCst)
}

/// What is to be told where NCCL is used.
static WARNING: OnceLock<Option<String>> = OnceLock::new();

/// Sees to it that nothing in the environment lets NCCL's calls wait for ever. To be called
/// before the first thread.
pub fn prepare() {
    let _ = WARNING.set(nccl::prepare());
}

/// Ends this process if it is not dropped in time: a GPU that is ill, or libraries on a file
/// server that is gone, may hold up the start for ever, and the ranks have not met yet.
pub struct Deadline(#[expect(dead_code, reason = "its drop is what counts")] Sender<()>);

impl Deadline {
    /// From now on; `who` begins the line.
    #[must_use]
    pub fn new(limit: Duration, who: &str) -> Deadline {
        let (sender, receiver) = channel::<()>();
        let who = who.to_string();
        let run = move || {
            if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                to_stderr(&format!(
                    "palingenesis-worker: error: {who}the GPU was not ready within {} s; see nvidia-smi on the node, and \
                     whether the file system of CUDA's libraries answers\n",
                    limit.as_secs()
                ));
                // SAFETY: takes a number, and does not come back.
                unsafe { libc::_exit(i32::from(EXIT_RETRY)) }
            }
        };
        // Without the thread there is no deadline.
        let _ = thread::Builder::new().name("deadline".into()).spawn(run);
        Deadline(sender)
    }
}

/// Takes the device that the configuration names, and says on `tell` what is worth a line.
///
/// # Errors
/// What is missing or does not fit, see [`Refused`].
pub fn choose(config: &TrainConfig, environment: &Environment, tell: &dyn Fn(&str)) -> Result<Device, Refused> {
    let cpu = || {
        for (name, short) in [
            ("train.param_dtype", config.param_dtype == Some(Precision::Bf16)),
            ("train.reduce_dtype", config.reduce_dtype == Precision::Bf16),
        ] {
            if short {
                return Err(wrong(format!(
                    "{name} = \"bf16\" needs a GPU, and this rank computes on the processor; set it to \"f32\""
                )));
            }
        }
        Ok(Device::Cpu(Cpu::new((config.threads > 0).then_some(config.threads))))
    };
    if config.device == config::Device::Cpu {
        return cpu();
    }
    let precision = config.param_dtype.unwrap_or(Precision::Bf16);
    let found = libraries::find(config.cuda_libraries.as_deref(), environment);
    let given = given(environment);
    let mut prefix = "train.device = \"cuda\": ";
    if config.device == config::Device::Auto {
        // Without the driver's library there is no GPU that anybody could use, and without a
        // GPU nobody needs the other libraries.
        let driver = match (&found.driver, &given) {
            (Ok(driver), _) => driver,
            (Err(_), None) => return cpu(),
            (Err(_), Some(given)) => {
                tell(&format!(
                    "warning: the step has GPUs ({given}), but NVIDIA's libcuda.so.1 is not found, so the processor computes; \
                     train.device = \"cuda\" says where it was looked for"
                ));
                return cpu();
            }
        };
        CUDA.store(true, SeqCst);
        prefix = "";
        match (start::shows_a_gpu(&driver.path).map_err(|error| refused(prefix, &error, environment))?, given) {
            (true, _) => {}
            (false, None) => {
                tell(&format!(
                    "warning: {} is there but no GPU is seen, so the processor computes",
                    driver.path.display()
                ));
                return cpu();
            }
            // Not for days on the processor: another start may be given GPUs that work.
            (false, Some(given)) => {
                let why = format!(
                    "the step has GPUs ({given}), but the driver shows none; see nvidia-smi -L and the Xid lines of dmesg on \
                     the node, or set train.device = \"cpu\""
                );
                return Err(Refused { why, code: EXIT_RETRY });
            }
        }
    }
    if precision == Precision::F32 && config.reduce_dtype == Precision::Bf16 {
        let cure = "set one of them as the other";
        return Err(wrong(format!("train.reduce_dtype = \"bf16\" needs train.param_dtype = \"bf16\"; {cure}")));
    }
    CUDA.store(true, SeqCst);
    let places = libraries::places(&found).map_err(|why| wrong(format!("{prefix}{why}")))?;
    let stop = Stop::new();
    let mut gpu = start::start(&places, ordinal(environment).map_err(wrong)?, stop.clone());
    if let Err(StartError::NoSuchGpu { count: 1, .. }) = &gpu {
        // This rank sees its own only.
        gpu = start::start(&places, 0, stop);
    }
    let gpu = gpu.map_err(|error| refused(prefix, &error, environment))?;
    let nccl = found.nccl.map(|found| found.path).map_err(|missing| missing.to_string());
    let engine = Cuda::new(gpu, precision).map_err(|error| wrong(error.to_string()))?;
    Ok(Device::Cuda(Box::new(Gpu { engine: ManuallyDrop::new(engine), nccl })))
}

/// What says that the step was given GPUs, and that they are not hidden by hand.
fn given(environment: &Environment) -> Option<String> {
    let set = |name: &str| environment.get(name).filter(|value| !value.is_empty());
    // As Slurm writes it for a step without GPUs, and people do.
    if environment.get("CUDA_VISIBLE_DEVICES").is_some_and(|list| ["", "-1", "NoDevFiles"].contains(&list)) {
        return None;
    }
    // A step without GPUs of a job with some has SLURM_JOB_GPUS, too.
    let names = ["SLURM_STEP_GPUS", "PALINGENESIS_GPU_INDEX"];
    names.iter().find_map(|name| set(name).map(|value| format!("{name}={}", printable(value))))
}

/// Another start may be given a GPU that works.
fn refused(prefix: &str, error: &StartError, environment: &Environment) -> Refused {
    let wanted = environment.get("SLURM_GPUS_ON_NODE").and_then(|count| count.parse::<u32>().ok());
    // One that fell off the bus is not shown.
    let lost = matches!(error, StartError::NoSuchGpu { count, .. } if wanted.is_some_and(|wanted| wanted > *count));
    let unseen =
        matches!(error, StartError::Cuda(error) if error.code == sys::NO_DEVICE) && given(environment).is_some();
    let code = if error.may_pass() || lost || unseen { EXIT_RETRY } else { EXIT_CONFIG };
    Refused { why: format!("{prefix}{error}"), code }
}

fn wrong(why: String) -> Refused {
    Refused { why, code: EXIT_CONFIG }
}

/// CUDA's number of this rank's GPU: as the plugin says, else that of the local rank.
fn ordinal(environment: &Environment) -> Result<u32, String> {
    for name in ["PALINGENESIS_GPU_INDEX", "LOCAL_RANK", "SLURM_LOCALID"] {
        let Some(value) = environment.get(name).filter(|value| !value.is_empty()) else { continue };
        return value.parse().map_err(|_| format!("{name}={} is no number of a GPU; unset it", printable(value)));
    }
    Ok(0)
}

/// What ranks compare before they compute together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Own {
    host: String,
    /// "cpu", or "cuda in bf16".
    kind: String,
    /// The GPU's place and its UUID; MIG instances share a place.
    gpu: Option<(String, String)>,
}

/// Ranks on different devices would wait for each other, or share one GPU.
///
/// # Errors
/// [`TrainError::Config`] names the two; all ranks say the same.
fn same<X: Exchange>(comm: &mut X, device: &Device, host: &str) -> Result<(), TrainError> {
    let (kind, gpu) = match device {
        Device::Cpu(_) => ("cpu".to_string(), None),
        Device::Cuda(gpu) => {
            let identity = gpu.engine.device().context().identity();
            (format!("cuda in {:?}", gpu.engine.precision()), Some((identity.pci.clone(), identity.uuid.clone())))
        }
    };
    let own = Own { host: host.to_string(), kind, gpu };
    let told = serde_json::to_vec(&own).unwrap_or_default();
    let all = comm.exchange(Tag::of("device", 0), &told)?;
    let all: Vec<Own> = all.iter().filter_map(|bytes| serde_json::from_slice(bytes).ok()).collect();
    let Some(why) = differs(&all) else { return Ok(()) };
    // All have compared before the first one ends: none is to take that for the reason.
    let _ = comm.barrier(Tag::of("device", 1));
    Err(TrainError::Config(why))
}

/// The first thing that does not fit.
fn differs(all: &[Own]) -> Option<String> {
    let first = all.first()?;
    for (rank, own) in all.iter().enumerate() {
        if own.kind != first.kind {
            return Some(format!(
                "rank {rank} on {} computes on {}, but rank 0 on {} on {}; set train.device on all ranks, or look why a \
                 GPU is not seen there",
                own.host, own.kind, first.host, first.kind
            ));
        }
        let Some(gpu) = &own.gpu else { continue };
        if let Some(other) =
            all[..rank].iter().position(|other| other.host == own.host && other.gpu.as_ref() == Some(gpu))
        {
            return Some(format!(
                "ranks {other} and {rank} on {} have the same GPU ({}, {}): NCCL needs one for each; start as many ranks per \
                 node as it has GPUs, with LOCAL_RANK or CUDA_VISIBLE_DEVICES set for each",
                own.host, gpu.1, gpu.0
            ));
        }
    }
    None
}

/// Trains without other ranks.
///
/// # Errors
/// See [`TrainError`].
pub fn alone(device: &Device, job: &Job<'_>) -> Result<End, TrainError> {
    let mut comm = Local::alone();
    match device {
        Device::Cpu(engine) => train::run(engine, &mut comm, job),
        Device::Cuda(gpu) => train::run(&*gpu.engine, &mut comm, job),
    }
}

/// The ranks of a training, by the way that their numbers go.
pub enum Group {
    /// Processors: over the sockets.
    Tcp(Tcp),
    /// One GPU: no way.
    Alone(Alone<Tcp>),
    /// GPUs.
    Nccl(Nccl<GpuQueue>),
}

impl Group {
    /// Brings the devices of the ranks together, which have met. Where it fails the other
    /// ranks have been told.
    ///
    /// # Errors
    /// Ranks on different devices, or on one GPU; what NCCL cannot do.
    pub fn new(device: &Device, tcp: Tcp, job: &Job<'_>, tell: &dyn Fn(&str)) -> Result<Group, TrainError> {
        let mut tcp = tcp;
        let fits = same(&mut tcp, device, job.host).and_then(|()| match device {
            Device::Cuda(gpu) if tcp.world_size() > 1 => Ok(Some((gpu, gpu.between()?))),
            _ => Ok(None),
        });
        let between = match fits {
            Ok(between) => between,
            Err(error) => {
                if error.is_own() {
                    tcp.control().fail(&error.to_string());
                }
                return Err(error);
            }
        };
        match (device, between) {
            (_, Some((_, (library, queue)))) => {
                if let Some(Some(warning)) = WARNING.get() {
                    tell(&format!("warning: rank {} on {}: {warning}", tcp.rank(), job.host));
                }
                if tcp.rank() == 0 {
                    nccl::describe(&library).iter().for_each(|line| tell(line));
                }
                let limit = Duration::from_secs;
                let limits = Limits::new(limit(job.config.comm.timeout), limit(job.config.comm.start_timeout));
                Ok(Group::Nccl(nccl::connect(tcp, library, queue, limits)?))
            }
            (Device::Cuda(_), None) => Ok(Group::Alone(Alone(tcp))),
            (Device::Cpu(_), None) => Ok(Group::Tcp(tcp)),
        }
    }

    /// The control group.
    #[must_use]
    pub fn control(&self) -> &Control {
        match self {
            Group::Tcp(tcp) | Group::Alone(Alone(tcp)) => tcp.control(),
            Group::Nccl(nccl) => nccl.tcp().control(),
        }
    }

    /// Why the group is broken, if it is or is found to be soon.
    fn verdict(&self) -> Option<CommError> {
        match self {
            Group::Nccl(nccl) => nccl.verdict(VERDICT),
            other => other.control().verdict(VERDICT),
        }
    }

    /// Trains.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn run(&mut self, device: &Device, job: &Job<'_>) -> Result<End, TrainError> {
        let outcome = match (device, &mut *self) {
            (Device::Cpu(engine), Group::Tcp(tcp)) => train::run(engine, tcp, job),
            (Device::Cuda(gpu), Group::Alone(alone)) => train::run(&*gpu.engine, alone, job),
            (Device::Cuda(gpu), Group::Nccl(nccl)) => train::run(&*gpu.engine, nccl, job),
            _ => Err(TrainError::Config("the ranks were brought together for another device".into())),
        };
        match outcome {
            // A GPU that does not answer any more often is the first sign of a rank that is gone.
            Err(TrainError::Engine(EngineError::Stopped | EngineError::Device(_))) => match self.verdict() {
                Some(error) => Err(error.into()),
                None => outcome,
            },
            outcome => outcome,
        }
    }

    /// Ends with an error of this rank's or of another's.
    pub fn leave(self) {
        if let Group::Nccl(nccl) = self {
            nccl.leave();
        }
    }

    /// Ends in order, when all ranks are done.
    pub fn end(self, tell: &dyn Fn(&str)) {
        match self {
            Group::Tcp(tcp) | Group::Alone(Alone(tcp)) => tcp.end(),
            Group::Nccl(nccl) => {
                if let Some(told) = nccl.end() {
                    tell(&format!("warning: {told}"));
                }
            }
        }
    }
}

impl Device {
    /// Which GPU computes, and in what; none of the processor.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let Device::Cuda(gpu) = self else { return None };
        let precision = if gpu.engine.precision() == Precision::F32 { "f32" } else { "bf16" };
        Some(format!("{} computes in {precision}", gpu.engine.device().context().identity()))
    }
}

impl Gpu {
    /// What goes between this GPU and others.
    fn between(&self) -> Result<(nccl::Library, GpuQueue), TrainError> {
        let path = self.nccl.as_ref().map_err(|missing| TrainError::Config(missing.clone()))?;
        Ok((nccl::Library::open(path)?, GpuQueue::new(self.engine.device())?))
    }
}

/// How long the control group is asked who is gone before the GPU's word is taken.
const VERDICT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn on(host: &str, kind: &str, gpu: Option<&str>) -> Own {
        let gpu = gpu.map(|pci| (pci.to_string(), format!("GPU-{pci}")));
        Own { host: host.into(), kind: kind.into(), gpu }
    }

    #[test]
    fn ranks_on_one_gpu_or_on_different_devices_are_named() {
        let (cuda, cpu) = ("cuda in bf16", "cpu");
        let fine = [on("a", cuda, Some("1b")), on("a", cuda, Some("43")), on("b", cuda, Some("1b"))];
        assert_eq!(differs(&fine), None);
        assert_eq!(differs(&[on("a", cpu, None), on("a", cpu, None)]), None);
        let twice =
            differs(&[on("a", cuda, Some("1b")), on("b", cuda, Some("1b")), on("a", cuda, Some("1b"))]).unwrap();
        assert!(twice.starts_with("ranks 0 and 2 on a have the same GPU (GPU-1b, 1b)"), "{twice}");
        let mixed = differs(&[on("a", cuda, Some("1b")), on("b", cpu, None)]).unwrap();
        assert!(mixed.starts_with("rank 1 on b computes on cpu, but rank 0 on a on cuda in bf16; "), "{mixed}");
    }

    #[test]
    fn the_plugins_number_of_the_gpu_goes_before_the_local_rank() {
        let number = |variables: &[(&str, &str)]| {
            let own = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
            ordinal(&Environment::from_iter(own))
        };
        assert_eq!(number(&[]), Ok(0));
        assert_eq!(number(&[("LOCAL_RANK", "3")]), Ok(3));
        assert_eq!(number(&[("LOCAL_RANK", "3"), ("PALINGENESIS_GPU_INDEX", "0")]), Ok(0));
        assert_eq!(number(&[("SLURM_LOCALID", "2"), ("LOCAL_RANK", "")]), Ok(2));
        assert!(number(&[("LOCAL_RANK", "x")]).unwrap_err().contains("LOCAL_RANK=x is no number of a GPU"));
    }
}
