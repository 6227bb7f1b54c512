//! The command line: what was asked for, this process's place among the ranks, and the
//! code it ends with. No rule of the training lives here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser, Subcommand};
use palingenesis::config::printable;
use palingenesis::facts::Environment;
use palingenesis::system::output::to_stderr;
use palingenesis_worker::comm::control::{self, Terms, store_key};
use palingenesis_worker::comm::recorder::{self, Recorder};
use palingenesis_worker::comm::tcp::{self, Tcp};
use palingenesis_worker::config::Config;
use palingenesis_worker::data::{Dataset, prepare};
use palingenesis_worker::device::{self, Deadline, Group};
use palingenesis_worker::train::{self, End, Job, TrainError, signals};

use crate::{pages, watch};

const AFTER: &str = "\
Started without any argument it prints which rank it was given, so that a cluster can be tried out.

Ranks: srun --palingenesis=worker CONFIG gives each task RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT; without any of them there is one rank. Numbers are computed on GPUs where there are any, else on CPUs
(train.device).

Exit codes:
   0  all steps are done
   1  failed for a reason that another start does not mend (a loss that is not finite)
   2  the command line makes no sense
  75  start it again: a rank was lost, a GPU or storage failed, another training has output_dir, or a signal came
      (SIGUSR1 and SIGTERM write a checkpoint first)
  76  hold it: several starts in a row got no further
  78  the configuration, the model or the data is wrong, or train.device lacks what it needs
In slurm.conf: RequeueExit=75 and RequeueExitHold=76.";

/// Trains Llama and Qwen3 models, sharded over all ranks of a step.
#[derive(Debug, Parser)]
#[command(
    name = "palingenesis-worker",
    version,
    after_help = AFTER,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    max_term_width = 120
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// What to train: a TOML or YAML file.
    #[arg(required = true)]
    config: Option<PathBuf>,
    /// Values that go before the file's: train.steps=100, or --train.steps=100.
    #[arg(value_name = "SECTION.KEY=VALUE", trailing_var_arg = true, allow_hyphen_values = true)]
    overrides: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Makes token shards of text files.
    Prepare(prepare::PrepareArgs),
    /// Reads all token shards of a data directory and compares their checksums
    Check {
        /// made by prepare
        data: PathBuf,
    },
    /// Says from ranks' flight recorders who waits for whom.
    Recorder {
        /// recorder files of all ranks
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Prints all keys of a configuration with their defaults.
    Config,
}

/// A line for people and the code to end with.
pub struct Failed {
    /// See [`train::EXIT_RETRY`] and its neighbours.
    pub code: u8,
    /// What, why, cure.
    pub line: String,
}

fn failed(code: u8, line: impl ToString) -> Failed {
    Failed { code, line: line.to_string() }
}

/// Does what the arguments say; gives what is to be printed.
pub fn run(arguments: Vec<OsString>, started: Instant) -> Result<String, Failed> {
    let environment = Environment::of_process();
    if arguments.is_empty() {
        return place(&environment).map_err(|line| failed(train::EXIT_CONFIG, line));
    }
    if let [word, folder] = &arguments[..]
        && word == pages::WORD
    {
        let folder = Path::new(folder);
        let text = |error| failed(train::EXIT_FAILED, format!("{}: {error}", folder.display()));
        return generate(folder).map(|()| String::new()).map_err(text);
    }
    let name = OsString::from("palingenesis-worker");
    let arguments = Arguments::parse_from(std::iter::once(name).chain(arguments));
    signals::ignore_file_limit();
    match arguments.command {
        Some(Command::Prepare(arguments)) => match prepare::run(&arguments) {
            Ok(summary) => Ok(format!("{summary}\n")),
            Err(error) => Err(failed(TrainError::from(error.clone()).exit_code(), error)),
        },
        Some(Command::Check { data }) => {
            match Dataset::open(&data).and_then(|found| found.verify(0, 1).map(|()| found)) {
                Ok(found) => Ok(format!("{}: {} bytes are as prepare wrote them\n", data.display(), found.bytes())),
                Err(error) => Err(failed(TrainError::from(error.clone()).exit_code(), error)),
            }
        }
        Some(Command::Recorder { files }) => recorder::merge(&files).map_err(|line| failed(train::EXIT_FAILED, line)),
        Some(Command::Config) => Ok(palingenesis_worker::config::describe()),
        None => train(&environment, &arguments.config.unwrap_or_default(), &arguments.overrides, started),
    }
}

/// For packages.
fn generate(folder: &Path) -> std::io::Result<()> {
    let page = pages::Page {
        name: "palingenesis-worker.toml",
        section: "5",
        about: "what palingenesis-worker trains",
        synopsis: "palingenesis-worker FILE.toml",
        text: &palingenesis_worker::config::describe(),
        see: "palingenesis-worker(1)",
    };
    pages::page(&page, folder)?;
    pages::program(Arguments::command(), "1", "palingenesis-worker.toml(5), palingenesis(1)", folder)
}

/// One rank of a training.
fn train(environment: &Environment, config: &Path, overrides: &[String], started: Instant) -> Result<String, Failed> {
    let wrong = |line: String| failed(train::EXIT_CONFIG, line);
    let config = Config::read(config, overrides)
        .map_err(|error| unreadable(environment, &error.to_string(), train::EXIT_CONFIG))?;
    let ranks = Ranks::of(environment).map_err(wrong)?;
    let host = host_name(environment);
    let job = Job {
        config: &config,
        host: &host,
        launch: environment.get("PALINGENESIS_LAUNCH_ID").filter(|id| !id.is_empty()),
        started: train::process_start(started),
    };
    let tell = |line: &str| to_stderr(&format!("palingenesis-worker: {line}\n"));
    // Before the ranks meet: one without its device tells the others, as one without a
    // configuration does.
    let who = ranks.as_ref().map_or(String::new(), |ranks| format!("rank {} on {host}: ", ranks.rank));
    let tell_own = |line: &str| tell(&format!("{who}{line}"));
    let deadline = Deadline::new(Duration::from_secs(config.comm.start_timeout), &who);
    let device = device::choose(&config.train, environment, &tell_own);
    drop(deadline);
    let device = match device {
        Ok(device) => device,
        Err(refused) => return Err(unreadable(environment, &refused.why, refused.code)),
    };
    // One for all: there may be thousands.
    if ranks.as_ref().is_none_or(|ranks| ranks.rank == 0) {
        device.describe().iter().for_each(|line| tell_own(line));
    }
    signals::take();
    let outcome = match &ranks {
        None => device::alone(&device, &job),
        Some(ranks) => join(environment, ranks, &config, &host).and_then(|tcp| {
            watch::begin(tcp.control().watch(), format!("rank {} on {host}", ranks.rank));
            let mut group = Group::new(&device, tcp, &job, &tell).inspect_err(|_| watch::end())?;
            let outcome = group.run(&device, &job);
            watch::end();
            match outcome {
                Ok(end) => {
                    group.end(&tell_own);
                    Ok(end)
                }
                Err(error) => {
                    if error.is_own() {
                        group.control().fail(&error.to_string());
                    }
                    group.leave();
                    Err(error)
                }
            }
        }),
    };
    // The GPU's memory is not given back piece by piece.
    std::mem::forget(device);
    match outcome {
        Ok(End::Done) => Ok(String::new()),
        Ok(End::Interrupted { .. }) => Err(failed(train::EXIT_RETRY, "")),
        Err(error) => Err(failed(error.exit_code(), format!("{who}{error}"))),
    }
}

/// How long a rank that has no configuration looks for the others.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

/// The configuration may be missing or another on this host alone, and the others would wait
/// for this rank until comm.start_timeout: they are told, if that needs nothing of it.
fn unreadable(environment: &Environment, why: &str, code: u8) -> Failed {
    let Ok(Some(ranks)) = Ranks::of(environment) else { return failed(code, why) };
    let Ok(key) = store_key(environment, None, ranks.world_size, ranks.local_world_size) else {
        return failed(code, why);
    };
    let host = host_name(environment);
    // First: it may be the last that is heard of this rank.
    to_stderr(&format!("palingenesis-worker: error: rank {} on {host}: {why}\n", ranks.rank));
    let (rank, world_size, master) = (ranks.rank, ranks.world_size, ranks.master);
    control::refuse(&Terms { rank, world_size, host, master, key, start: TOLD_WITHIN, silence: TOLD_WITHIN }, why);
    failed(code, "")
}

/// Meets the other ranks, and records from then on what it does with them.
fn join(environment: &Environment, ranks: &Ranks, config: &Config, host: &str) -> Result<Tcp, TrainError> {
    let Ranks { rank, world_size, local_world_size, ref master } = *ranks;
    // The key is refused for good; who has not come may come to the next start.
    let key = store_key(environment, config.comm.key_file.as_deref(), world_size, local_world_size)
        .map_err(|error| TrainError::Config(error.to_string()))?;
    let limit = Duration::from_secs;
    let terms = Terms {
        rank,
        world_size,
        host: host.to_string(),
        master: master.clone(),
        key,
        start: limit(config.comm.start_timeout),
        silence: limit(config.comm.silence),
    };
    let group = tcp::connect(&terms, limit(config.comm.timeout))?;
    let folder = config.train.output_dir.join("recorder");
    let file = folder.join(format!("rank-{rank}"));
    match std::fs::create_dir_all(&folder).and_then(|()| Recorder::create(&file, rank, world_size, host)) {
        Ok(recorder) => group.control().record(recorder),
        // Nobody needs it until something hangs.
        Err(error) => to_stderr(&format!(
            "palingenesis-worker: warning: {}: {error}: what rank {rank} waits for is not recorded\n",
            file.display()
        )),
    }
    Ok(group)
}

/// As Slurm names this node, else as it names itself.
fn host_name(environment: &Environment) -> String {
    let own = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string();
    environment.get("SLURMD_NODENAME").map_or_else(own, String::from)
}

/// This process among the others.
struct Ranks {
    rank: u32,
    world_size: u32,
    /// On this host, where that is known.
    local_world_size: Option<u32>,
    master: (String, u16),
}

impl Ranks {
    /// None without any of the variables.
    fn of(environment: &Environment) -> Result<Option<Ranks>, String> {
        if ["RANK", "WORLD_SIZE"].iter().all(|name| environment.get(name).is_none_or(str::is_empty)) {
            // Each of several tasks would take itself for the whole training.
            let tasks = environment.get("SLURM_STEP_NUM_TASKS").and_then(|tasks| tasks.parse::<u32>().ok());
            return match tasks {
                Some(tasks) if tasks > 1 => Err(format!(
                    "this step has {tasks} tasks, but RANK and WORLD_SIZE are not set, so each would train alone; start it \
                     with srun --palingenesis=worker, or set RANK=0 and WORLD_SIZE=1 where each is a training of its own"
                )),
                _ => Ok(None),
            };
        }
        let (rank, world_size) = position(environment, "RANK", "WORLD_SIZE")?;
        if world_size == 1 {
            return Ok(None);
        }
        let master = (text(environment, "MASTER_ADDR")?.to_string(), number(environment, "MASTER_PORT", "a port")?);
        let local_world_size = match environment.get("LOCAL_WORLD_SIZE") {
            Some(value) if !value.is_empty() => Some(number(environment, "LOCAL_WORLD_SIZE", "a number")?),
            _ => None,
        };
        Ok(Some(Ranks { rank, world_size, local_world_size, master }))
    }
}

/// The line that tells this process's place among the ranks.
fn place(environment: &Environment) -> Result<String, String> {
    let (rank, world) = position(environment, "RANK", "WORLD_SIZE")?;
    let (local_rank, local_world) = position(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    let node_rank: u32 = number(environment, "NODE_RANK", "a number")?;
    let host = text(environment, "MASTER_ADDR")?;
    let port: u16 = number(environment, "MASTER_PORT", "a port")?;
    // An IPv6 address is written in brackets before a port.
    let host = if host.contains(':') { format!("[{}]", printable(host)) } else { printable(host) };
    Ok(format!(
        "rank {rank} of {world}: local rank {local_rank} of {local_world}, node rank {node_rank}, master {host}:{port}\n"
    ))
}

fn position(environment: &Environment, rank: &str, size: &str) -> Result<(u32, u32), String> {
    let number = |name| number::<u32>(environment, name, "a number");
    let (at, of) = (number(rank)?, number(size)?);
    if at < of { Ok((at, of)) } else { Err(unusable(&format!("{rank}={at} is not below {size}={of}"))) }
}

fn number<T: FromStr>(environment: &Environment, name: &str, what: &str) -> Result<T, String> {
    let value = text(environment, name)?;
    value.parse().map_err(|_| unusable(&format!("{name}={} is not {what}", printable(value))))
}

fn text<'a>(environment: &'a Environment, name: &str) -> Result<&'a str, String> {
    match environment.get(name) {
        Some(value) if !value.is_empty() => Ok(value),
        _ => Err(unusable(&format!("{name} is not set"))),
    }
}

fn unusable(what: &str) -> String {
    format!("{what}, so this process belongs to no rank; start it with srun --palingenesis palingenesis-worker")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<u32>, String> {
        let mut environment = Environment::default();
        variables.iter().for_each(|(name, value)| environment.set(*name, *value));
        Ranks::of(&environment).map(|ranks| ranks.map(|ranks| ranks.world_size))
    }

    /// As where MPI has no word with Slurm, and each task is "rank 0 of 1"
    /// (<https://github.com/open-mpi/ompi/issues/13523>).
    #[test]
    fn tasks_without_ranks_are_no_trainings_of_one() {
        assert_eq!(world(&[]), Ok(None));
        // A batch script has the job's number of tasks, and is one process.
        assert_eq!(world(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), Ok(None));
        assert_eq!(world(&[("SLURM_STEP_NUM_TASKS", "1")]), Ok(None));
        let error = world(&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")]).unwrap_err();
        assert!(error.starts_with("this step has 4 tasks") && error.contains("--palingenesis=worker"), "{error}");
        assert_eq!(world(&[("SLURM_STEP_NUM_TASKS", "4"), ("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        let ranks = [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "n1"), ("MASTER_PORT", "29500")];
        assert_eq!(world(&[&ranks[..], &[("SLURM_STEP_NUM_TASKS", "4")]].concat()), Ok(Some(4)));
    }
}
