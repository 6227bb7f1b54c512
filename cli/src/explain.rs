//! `palingenesis explain`: gathers what the plugin gathers in a task, and prints
//! the plan. With names of environment variables it prints what is known of
//! them instead, with --node what is known of the machine.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::Context;
use palingenesis::config;
use palingenesis::config::site::Site;
use palingenesis::facts::network::{Interfaces, Network};
use palingenesis::facts::{
    Environment, NodeFacts, Rank0, StartFacts, Step, StepError, TaskFacts, User, directories, program,
};
use palingenesis::plan::{self, Facts, caches, catalog, checks, rendezvous, worker};
use palingenesis::report;

use crate::archive::{self, Unpacked};
use crate::doctor::{host_name, parse_release};
use crate::node::Node;
use crate::slurm::release::{self, Release};
use crate::{print, tell};

/// Below the options in --help.
pub const ABOUT: &str = "\
In a step (srun palingenesis explain) it explains the task it runs in; anywhere else, describe a step with --nodelist. \
The environment of this shell counts as the one that srun passes on, PALINGENESIS and PALINGENESIS_OPT_* among it. \
A SPEC given to sbatch or salloc counts too, and in a step with the flag the one it was given.

palingenesis explain NCCL_IB_TIMEOUT prints what a variable does, which values it takes, and what people get wrong; \
palingenesis explain ib-timeout-range what a check looks for, and how it is switched off; palingenesis explain nic-down \
what a key of --palingenesis does.

palingenesis explain --node shows a machine: its GPUs, network cards and NUMA nodes, how far each card is from each GPU, \
which cards carry the training's traffic and why the others do not. It reads small files below /proc and /sys, opens no \
device and starts nothing.

palingenesis explain --record FILE writes those files, and no others, into FILE, for a bug report: then \
palingenesis explain --node --root FILE shows the same machine anywhere. UUIDs, GUIDs, hardware addresses and \
networks are replaced by numbers, the same by the same; of /etc/nccl.conf only NCCL's variables are taken, \
without secrets, and the topology file that it names; names of network devices and cards, and models, stay. tar -xOf FILE shows all of it, gzip makes it small.

Exit codes: 0, also where there is no rank to explain; 78 where the job would be refused; 1 where Slurm's variables or \
the description make no step, or a NAME is not known; 2 for wrong usage.";

/// What --json prints when there is no rank to explain.
const NO_PLAN: &str = r#"{"step":null,"binding":null,"env":[],"unset":[],"left":[],"warnings":[]}"#;

/// What describes a step, and has no meaning without one.
const OF_A_STEP: [&str; 2] = ["nodelist", "command"];

/// The step to explain, and how.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Environment variables, checks or keys of SPEC to explain, instead of a plan.
    #[arg(value_name = "NAME", conflicts_with_all = ["spec", "nodelist", "command"])]
    names: Vec<String>,

    /// Print all that is known of environment variables, as Markdown.
    #[arg(long, conflicts_with_all = ["names", "json", "spec", "nodelist", "command"])]
    catalog: bool,

    /// Show the machine instead of a plan; NAME, where it is given, is its NodeName,
    /// for the site file's sections by node.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    #[arg(conflicts_with_all = OF_A_STEP, conflicts_with_all = ["names", "catalog"])]
    node: Option<String>,

    /// Write the few files that --node reads of this machine into a tar archive, for
    /// a bug report.
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_A_STEP)]
    #[arg(conflicts_with_all = ["names", "catalog", "node", "json", "spec", "config", "partition"])]
    record: Option<PathBuf>,

    /// Print one JSON object with the keys step (as include/palingenesis.h has it;
    /// null where there is no rank to explain), binding (cpus, memory: what is set;
    /// decisions: what, value, why), env (name, value, origin and why
    /// of each variable), unset and left (name, value if known, why), warnings
    /// (id, severity, message, cure) and, where another program than COMMAND is
    /// started, launch (program, argument, how, why). With NAMEs, an array of what
    /// is known of them. With --node, one object with the keys gpus, nics, numa,
    /// cpus, default_route, topology_file, nccl_ib_hca (value, why), fallbacks,
    /// no_such_card and unknown.
    #[arg(long)]
    json: bool,

    /// As in srun --palingenesis=SPEC; "help" lists what there is.
    #[arg(long, value_name = "SPEC")]
    spec: Option<String>,

    /// The nodes of a step to describe, as Slurm writes them: gpu[01-04].
    #[arg(long, value_name = "NODES", requires = "tasks_per_node")]
    nodelist: Option<String>,

    /// Its tasks on each node, as Slurm writes them: 8(x2),4; or 8 for all nodes.
    #[arg(long, value_name = "COUNTS", requires = "nodelist")]
    tasks_per_node: Option<String>,

    /// The rank to explain, of ranks laid out node by node.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "nodelist")]
    rank: u32,

    /// The job id of the described step; MASTER_PORT depends on it.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "nodelist")]
    job_id: u32,

    /// The step id of the described step; MASTER_PORT depends on it.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "nodelist")]
    step_id: u32,

    /// The site file; where it is not given, that of the step or the usual one,
    /// /etc/palingenesis/palingenesis.toml.
    #[arg(long, value_name = "FILE")]
    config: Option<String>,

    /// The partition of the step, for the site file's sections by partition.
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,

    /// Read the node's hardware, kernel settings and NCCL's files below this
    /// directory, or from an archive that --record wrote.
    #[arg(long, value_name = "DIR|FILE")]
    root: Option<PathBuf>,

    /// The release of Slurm, as 24.11, where sinfo cannot be asked for it: since 23.11
    /// the worker is started in another way.
    #[arg(long, value_name = "RELEASE", value_parser = parse_release)]
    slurm: Option<Release>,

    /// The command of the step: some settings follow from it.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The subcommand.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.catalog {
        return print(&catalog::markdown());
    }
    if !arguments.names.is_empty() {
        return names(&arguments.names, arguments.json);
    }
    // Holds an unpacked archive until the end.
    let root = Root::of(arguments.root.as_deref())?;
    if let Some(file) = &arguments.record {
        return record(root.path(), file);
    }
    let environment = Environment::of_process();
    let named = arguments.config.as_deref().or(config::site_file_of_step(&environment));
    let site = Site::named_or_usual(named);
    // As in srun, `off` and `help` work whatever the site file is.
    let profiles = site.as_ref().ok().and_then(Option::as_ref).map(Site::profile_names).unwrap_or_default();
    let settings = match config::resolve_flagged(arguments.spec.as_deref(), &environment, &profiles) {
        Err(_) if site.is_err() => return site.map(drop).map_err(Into::into),
        settings => settings?,
    };
    if settings.help {
        return print(&config::help());
    }
    if let Some(name) = &arguments.node {
        return node(arguments, root.path(), &settings, site?, name, &environment);
    }
    let mut step = match step(arguments, &environment) {
        Err(none @ (StepError::NoJob | StepError::NoStep { .. } | StepError::SpecialStep { .. })) => {
            return no_plan(arguments, &format!("{none}; or describe a step to explain with --nodelist"));
        }
        step => step?,
    };
    if settings.off {
        return no_plan(arguments, "off: srun changes nothing here");
    }
    let partition = arguments.partition.as_deref().or(environment.get("SLURM_JOB_PARTITION"));
    let site = site?.map(|site| site.view(partition, Some(&step.node), &User::of_process(&environment)));
    let merged = site.as_ref().map_or_else(|| settings.clone(), |site| site.under(&settings));
    // As srun would see it, started from here.
    step.terminal = std::io::stdin().is_terminal();
    let rank0 = Rank0::default();
    let command: Vec<String> = arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    // The names and interfaces of a described step are those of other machines.
    let network = if arguments.nodelist.is_some() {
        Network::default()
    } else {
        let names = rendezvous::wanted(&step, &command, &environment, &merged, &rank0);
        Network::of_this_node(&names, Interfaces::wanted(step.nodes(), merged.iface.is_some()))
            .context("cannot list this node's interfaces")?
    };
    let (node, mut task) = surroundings(arguments, root.path(), &environment);
    task = task.with_gids(root.path(), node.rdma.as_deref().unwrap_or_default(), merged.gid == config::Gid::Auto);
    // One that only plugstack.conf's worker= names is not known here; then the plan
    // says that each node decides.
    if arguments.nodelist.is_none() && !command.is_empty() {
        let paths = worker::wanted(&merged, &command, &step, &environment, None);
        let programs = program::look(Path::new("/"), &paths);
        if programs.iter().any(|program| program.unfit.is_none()) {
            let release = arguments.slurm.or_else(release::here);
            if release.is_none() {
                tell(
                    "note: the release of Slurm is not known here, so it counts as older than 23.11, which starts the worker \
                     in another way; --slurm 24.11 names it",
                );
            }
            let prepends = release.is_some_and(Release::can_prepend);
            task.start = Some(StartFacts { programs, configured: None, prepends });
        }
    }
    let facts = Facts {
        command: &command,
        node: &node,
        task: &task,
        rank0: &rank0,
        resolution: &network.resolution,
        interfaces: &network.interfaces,
        site: site.as_ref(),
        ..Facts::new(&step, &environment)
    };
    // Looked at, not made; the directories of a described step are elsewhere.
    let directories = match &arguments.nodelist {
        Some(_) => Vec::new(),
        None => directories::look(&caches::wanted(&facts, &settings, &directories::here())),
    };
    let task = TaskFacts { directories, ..facts.task.clone() };
    let plan = plan::plan(&Facts { task: &task, ..facts }, &settings)?;
    if arguments.json { print(&(report::json(&plan)? + "\n")) } else { print(&report::table(&plan)) }
}

/// What is known of each variable, check or key. Unknown names are told after the
/// others.
fn names(names: &[String], json: bool) -> anyhow::Result<()> {
    if json {
        let of = |name: &String| {
            let variable = catalog::entry(name).map(catalog::Entry::json);
            variable.or_else(|| checks::json(name)).or_else(|| config::key_named(name).map(config::Key::json))
        };
        let all: Vec<serde_json::Value> = names.iter().filter_map(of).collect();
        print(&(serde_json::to_string(&all)? + "\n"))?;
    } else {
        let of = |name: &String| {
            let variable = catalog::entry(name).map(|entry| entry.text() + &set_here(entry.name));
            variable.or_else(|| checks::text(name)).or_else(|| config::key_named(name).map(config::Key::text))
        };
        let texts: Vec<String> = names.iter().filter_map(of).collect();
        print(&texts.join("\n"))?;
    }
    let is_known = |name: &str| {
        catalog::entry(name).is_some() || checks::text(name).is_some() || config::key_named(name).is_some()
    };
    let unknown = names.iter().filter(|name| !is_known(name)).map(|name| {
        let known = || checks::ids().chain(config::KEYS.iter().map(|key| key.name));
        let near = catalog::nearest(name).or_else(|| config::nearest(name, known()));
        let meant = near.map_or(String::new(), |near| format!("; did you mean {near}?"));
        format!("{} is no variable known here{meant}", config::printable(name))
    });
    let mut unknown: Vec<String> = unknown.collect();
    let Some(last) = unknown.pop() else { return Ok(()) };
    for line in unknown {
        tell(&format!("error: {line}"));
    }
    anyhow::bail!(last)
}

/// A line about the value in this shell, if there is one.
fn set_here(name: &str) -> String {
    match std::env::var(name) {
        Ok(_) if report::is_secret(name) => "  set here  (hidden)\n".into(),
        Ok(value) => format!("  set here  {}\n", config::printable(&value)),
        Err(_) => String::new(),
    }
}

fn step(arguments: &Arguments, environment: &Environment) -> Result<Step, StepError> {
    match (&arguments.nodelist, &arguments.tasks_per_node) {
        (Some(nodes), Some(tasks)) => {
            Step::described(nodes, tasks, arguments.rank, arguments.job_id, arguments.step_id)
        }
        _ => Step::from_environment(environment),
    }
}

/// The node's facts and the task's: of a step that is only described, what is
/// below --root; without that, this machine's GPUs and kernel settings stand for
/// its nodes', but not its network, its limits or its user's files.
fn surroundings(arguments: &Arguments, root: &Path, environment: &Environment) -> (NodeFacts, TaskFacts) {
    let mut node = NodeFacts::read(root);
    let task = match (&arguments.nodelist, &arguments.root) {
        (None, _) => TaskFacts::read(root, environment, &node),
        (Some(_), Some(_)) => TaskFacts::described(root, environment, &node),
        (Some(_), None) => {
            (node.rdma, node.netdevs) = (None, None);
            node.gids.clear();
            TaskFacts::default()
        }
    };
    (node, task)
}

/// Where the node is read.
enum Root {
    Directory(PathBuf),
    Archive(Unpacked),
}

impl Root {
    fn of(given: Option<&Path>) -> anyhow::Result<Root> {
        match given {
            Some(file) if file.exists() && !file.is_dir() => Ok(Root::Archive(archive::unpack(file)?)),
            given => Ok(Root::Directory(given.unwrap_or(Path::new("/")).into())),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Root::Directory(path) => path,
            Root::Archive(unpacked) => unpacked.root(),
        }
    }
}

/// `--node`.
fn node(
    arguments: &Arguments,
    root: &Path,
    settings: &config::Settings,
    site: Option<Site>,
    name: &str,
    environment: &Environment,
) -> anyhow::Result<()> {
    if !root.is_dir() {
        anyhow::bail!("--root {}: no such file or directory", config::printable(&root.to_string_lossy()));
    }
    let here = || match &arguments.root {
        Some(_) => None,
        None => environment.get("SLURMD_NODENAME").map(String::from).or_else(host_name),
    };
    let name = Some(name.to_string()).filter(|name| !name.is_empty()).or_else(here);
    let partition = arguments.partition.as_deref().or(environment.get("SLURM_JOB_PARTITION"));
    let view = site.map(|site| site.view(partition, name.as_deref(), &User::of_process(environment)));
    let node = Node::read(root, settings, view.as_ref());
    if arguments.json {
        return print(&format!("{}\n", node.json()));
    }
    let what = match (&arguments.root, name) {
        (Some(root), _) => format!("the machine in {}", config::printable(&root.to_string_lossy())),
        (None, Some(name)) => format!("node {}", config::printable(&name)),
        (None, None) => "this node".into(),
    };
    print(&node.text(&what))
}

/// `--record`.
fn record(root: &Path, file: &Path) -> anyhow::Result<()> {
    let record = NodeFacts::record(root).map_err(|why| anyhow::anyhow!("nothing recorded: {why}"))?;
    for refused in &record.refused {
        tell(&format!("warning: not in the record: {refused}"));
    }
    let bytes = archive::write(file, &record.entries)?;
    let shown = config::printable(&file.to_string_lossy());
    print(&format!(
        "{shown}: {} files of this machine, {} KiB, with the identities of its devices replaced; tar -xOf {shown} shows \
         all of it, palingenesis explain --node --root {shown} the machine\n",
        record.entries.len(),
        bytes.div_ceil(1024),
    ))
}

/// No rank is an answer too, not an error.
fn no_plan(arguments: &Arguments, why: &str) -> anyhow::Result<()> {
    if !arguments.json {
        return print(&format!("palingenesis: {why}\n"));
    }
    tell(why);
    print(&format!("{NO_PLAN}\n"))
}
