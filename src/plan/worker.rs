//! Which palingenesis-worker is started with the user's words as its arguments,
//! and by which of Slurm's two ways: put before the task's words
//! (spank_prepend_task_argv, Slurm 23.11), or in place of the first one, which
//! the worker then gets in a variable. Both leave TaskProlog, resource limits
//! and exit codes to Slurm, as for any other command.

use serde::Serialize;
use thiserror::Error;

use crate::config::{Launch, Settings, Switch, printable};
use crate::facts::program::shown;
use crate::facts::task::Container;
use crate::facts::{Environment, Program, Step};

use super::launch::{self, SHELLS, Shape};
use super::{Facts, Origin, Plan};

/// The program's name.
pub const PROGRAM: &str = "palingenesis-worker";

/// Holds the command's first word where the worker stands in its place; the
/// worker takes it as its first argument and removes it.
pub const ARGUMENT_VARIABLE: &str = "PALINGENESIS_WORKER_ARG";

/// The secret by which the workers of one launch know each other.
pub const STORE_KEY: &str = "PALINGENESIS_STORE_KEY";

/// Where packages and `make install` put it.
const INSTALLED: [&str; 2] = ["/usr/bin/palingenesis-worker", "/usr/local/bin/palingenesis-worker"];

/// Programs that start the one their later words name.
const WRAPPERS: &str = "env uv numactl taskset nice ionice chrt stdbuf setarch setpriv timeout time nohup setsid unbuffer \
                        strace gdb valgrind nsys ncu rocprofv3 perf compute-sanitizer apptainer singularity shifter \
                        podman enroot conda mamba micromamba pixi poetry";

/// How the worker gets into the task's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// By spank_prepend_task_argv.
    Prepend,
    /// In place of the first word, which [`ARGUMENT_VARIABLE`] hands over.
    Replace,
    /// Not known here: the task decides it.
    Unknown,
}

impl How {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            How::Prepend => "spank_prepend_task_argv",
            How::Replace => "argv[0], by PALINGENESIS_WORKER_ARG",
            How::Unknown => "decided on each node",
        }
    }
}

/// Another program than the command is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LaunchPlan {
    /// Its path.
    pub program: String,
    /// The command's first word, now its first argument; absent where no command is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argument: Option<String>,
    /// How it is started.
    pub how: How,
    /// Why, in one line.
    pub why: String,
}

/// Why the worker cannot be started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WorkerError {
    /// No candidate is a program the task may run.
    #[error("{PROGRAM} is not {place} {node}: looked at {looked}; {cure}")]
    NotFound {
        /// "on" or "in the container on".
        place: &'static str,
        /// This node.
        node: String,
        /// What was looked for.
        looked: String,
        /// What to do.
        cure: String,
    },
    /// The words of each task are in srun's file.
    #[error(
        "--multi-prog takes each task's program from its file, so {PROGRAM} cannot be started in their place; \
         write {PROGRAM} into the file and give --palingenesis=launch=native, or leave out --multi-prog"
    )]
    MultiProg,
    /// Slurm did not tell the command.
    #[error(
        "Slurm does not tell the command of this step on {node}, so {PROGRAM} cannot be started with it; \
         start it by name: srun --palingenesis {PROGRAM} ARGUMENTS"
    )]
    NoCommand {
        /// This node.
        node: String,
    },
}

/// Whether the command starts the worker by itself: as its program, behind a
/// wrapper such as env, uv run or numactl, or in a shell's text.
pub fn is_command(command: &[String]) -> bool {
    let Some((program, arguments)) = command.split_first() else {
        return false;
    };
    let program = base_name(program);
    program == PROGRAM
        || (WRAPPERS.split_whitespace().any(|wrapper| wrapper == program)
            && arguments.iter().any(|word| base_name(word) == PROGRAM))
        || (SHELLS.contains(&program) && arguments.iter().any(|text| text_names_it(text)))
}

/// Whether one of the words of a shell's text is the worker.
fn text_names_it(text: &str) -> bool {
    let between_words = |c: char| c.is_whitespace() || ";&|()<>{}'\"`$=".contains(c);
    text.split(between_words).any(|word| base_name(word) == PROGRAM)
}

fn base_name(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// Whether the worker must be put before the command. (How many tasks a node has
/// matters to launchers only.)
fn is_to_be_started(settings: &Settings, command: &[String], step: &Step) -> bool {
    launch::shape(settings, command, step.pty, step.terminal, false) == Shape::Worker && !is_command(command)
}

/// srun knows of `--multi-prog`: refused there once, not by each node.
///
/// # Errors
/// When the step is one and the worker is wanted.
pub fn check_multi_prog(settings: &Settings, command: &[String], multi_prog: bool) -> Result<(), WorkerError> {
    let wanted = launch::shape(settings, command, false, false, false) == Shape::Worker;
    if multi_prog && wanted { Err(WorkerError::MultiProg) } else { Ok(()) }
}

/// The paths at which the task is to look for the worker, best first; none
/// where it is not to be started. `configured` is the admin's `worker=`.
pub fn wanted(
    settings: &Settings,
    command: &[String],
    step: &Step,
    environment: &Environment,
    configured: Option<&str>,
) -> Vec<String> {
    if !is_to_be_started(settings, command, step) {
        return Vec::new();
    }
    let mut paths: Vec<String> = configured.into_iter().chain(INSTALLED).map(String::from).collect();
    // A relative directory would depend on where the task happens to be.
    let directories = environment.get("PATH").unwrap_or_default().split(':').filter(|dir| dir.starts_with('/'));
    paths.extend(directories.map(|dir| format!("{}/{PROGRAM}", dir.trim_end_matches('/'))));
    let mut seen = std::collections::BTreeSet::new();
    paths.retain(|path| seen.insert(path.clone()));
    paths
}

/// Decides which program is started instead of the command.
pub(super) fn decide(plan: &mut Plan, facts: &Facts, settings: &Settings) -> Result<(), WorkerError> {
    if facts.environment.get(ARGUMENT_VARIABLE).is_some() {
        plan.unset(ARGUMENT_VARIABLE, "inherited; it was meant for another step's worker");
    }
    let (worker, asked) = (plan.step.shape == Shape::Worker, settings.store == Switch::On);
    match facts.store_key.filter(|_| worker || asked) {
        Some(key) if worker => plan.set(
            STORE_KEY,
            key,
            Origin::Step,
            "of this launch alone: by it the workers know each other at the store",
        ),
        Some(key) => plan.set(
            STORE_KEY,
            key,
            if settings.is_of_site("store") { Origin::Site } else { Origin::Option },
            "of this launch alone: by it the ranks know each other in palingenesis_exchange_id",
        ),
        None if facts.environment.get(STORE_KEY).is_some() => {
            plan.unset(STORE_KEY, "inherited; it belongs to another launch's workers");
        }
        None => {}
    }
    if plan.step.shape != Shape::Worker {
        return Ok(());
    }
    if facts.step.multi_prog {
        return Err(WorkerError::MultiProg);
    }
    if is_command(facts.command) {
        return Ok(());
    }
    let asked = if settings.launch == Launch::Worker { "launch=worker" } else { "profile worker" };
    let argument = facts.command.first().cloned();
    let Some(start) = facts.task.start.as_ref().filter(|start| !start.programs.is_empty() || argument.is_none()) else {
        plan.launch = Some(LaunchPlan {
            program: PROGRAM.into(),
            argument,
            how: How::Unknown,
            why: format!(
                "{asked}; each node looks for it at worker= of plugstack.conf, in /usr/bin, /usr/local/bin and PATH"
            ),
        });
        return Ok(());
    };
    let node = || printable(&facts.step.node);
    if argument.is_none() {
        return Err(WorkerError::NoCommand { node: node() });
    }
    let found = start.programs.iter().find(|program| program.unfit.is_none()).map(|program| program.path.as_str());
    let usual = start.configured.as_deref().unwrap_or(INSTALLED[0]);
    let Some(program) = found.or((facts.task.container == Container::ComesLater).then_some(usual)) else {
        return Err(not_found(facts, &start.programs, usual));
    };
    if facts.task.container == Container::ComesLater {
        plan.inform(
            "worker-unseen",
            format!("the container comes after this plugin: whether it holds {} is not known", shown(program)),
            "if the task fails to start, install it in the image or mount it; the admin can list the container plugin first",
        );
    }
    let place = if start.configured.as_deref() == Some(program) {
        "worker= of plugstack.conf names it"
    } else if INSTALLED.contains(&program) {
        "where packages install it"
    } else {
        "first in PATH"
    };
    let how = if start.prepends { How::Prepend } else { How::Replace };
    plan.launch = Some(LaunchPlan { program: program.into(), argument, how, why: format!("{asked}; {place}") });
    Ok(())
}

fn not_found(facts: &Facts, programs: &[Program], usual: &str) -> WorkerError {
    let fixed = |path: &str| path == usual || INSTALLED.contains(&path);
    // What is missing in a directory of PATH says nothing; what is there and unusable does.
    let (named, others): (Vec<_>, Vec<_>) = programs.iter().partition(|program| fixed(&program.path) || program.exists);
    let mut looked = named.into_iter().map(Program::described).collect::<Vec<_>>().join(", ");
    match others.len() {
        0 => {}
        1 => looked.push_str(" and in one more directory of PATH"),
        more => looked.push_str(&format!(" and in {more} more directories of PATH")),
    }
    let source = shown(usual);
    let (place, cure) = match facts.task.container {
        Container::None => (
            "on",
            "install it on every node, or start it by its path: srun --palingenesis /PATH/palingenesis-worker ARGUMENTS"
                .to_string(),
        ),
        Container::Inside | Container::ComesLater => {
            ("in the container on", format!("add --container-mounts={source}:{source} to srun, or install it in the image"))
        }
    };
    WorkerError::NotFound { place, node: printable(&facts.step.node), looked, cure }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::StartFacts;
    use crate::plan::Refusal;
    use crate::plan::tests::World;

    fn words(line: &str) -> Vec<String> {
        line.split('|').map(String::from).collect()
    }

    fn world(command: &str, programs: &[(&str, Option<&str>)]) -> World {
        let mut world = World::new("n[1-2]", "2", 1);
        world.step.node = "n1".into();
        world.command = words(command);
        let programs = programs.iter().map(|(path, unfit)| Program {
            path: path.to_string(),
            exists: unfit.is_none_or(|why| why != "not there"),
            unfit: unfit.map(String::from),
        });
        world.task.start = Some(StartFacts { programs: programs.collect(), configured: None, prepends: false });
        world
    }

    const FOUND: [(&str, Option<&str>); 2] =
        [("/usr/bin/palingenesis-worker", Some("not there")), ("/usr/local/bin/palingenesis-worker", None)];

    #[test]
    fn the_worker_behind_wrappers_is_the_worker() {
        for command in [
            "palingenesis-worker",
            "/opt/x/palingenesis-worker|train.toml",
            "env|A=1|palingenesis-worker|train.toml",
            "uv|run|palingenesis-worker",
            "apptainer|exec|/x.sif|palingenesis-worker|a",
            "numactl|--localalloc|/usr/bin/palingenesis-worker",
            "bash|-c|exec palingenesis-worker train.toml",
            "sh|-lc|cd /x; '/usr/bin/palingenesis-worker' a",
        ] {
            assert!(is_command(&words(command)), "{command}");
        }
        for command in [
            "train.toml",
            "python3|palingenesis-worker",
            "bash|-c|my-palingenesis-worker x",
            "env|python3|train.py",
            "",
        ] {
            assert!(!is_command(&words(command)), "{command}");
        }
        assert!(!is_command(&[]));
    }

    #[test]
    fn the_first_program_that_may_be_run_is_started_with_the_first_word() {
        for (spec, why) in
            [("worker", "profile worker; where packages install it"), ("launch=worker", "launch=worker; where")]
        {
            let plan = world("train.toml|a", &FOUND).plan(spec).unwrap();
            let launch = plan.launch.unwrap();
            assert_eq!(launch.program, "/usr/local/bin/palingenesis-worker");
            assert_eq!((launch.argument.as_deref(), launch.how), (Some("train.toml"), How::Replace));
            assert!(launch.why.starts_with(why), "{}", launch.why);
            assert_eq!(plan.step.shape, Shape::Worker);
        }
        let mut newer = world("train.toml", &FOUND);
        newer.task.start.as_mut().unwrap().prepends = true;
        assert_eq!(newer.plan("worker").unwrap().launch.unwrap().how, How::Prepend);
    }

    #[test]
    fn nothing_is_started_where_the_command_is_the_worker_or_launch_says_native() {
        for (command, spec, shape) in [
            ("palingenesis-worker|train.toml", "worker", Shape::Worker),
            ("palingenesis-worker|train.toml", "launch=worker", Shape::Worker),
            ("env|palingenesis-worker|train.toml", "", Shape::Worker),
            ("palingenesis-worker|train.toml", "launch=native", Shape::Native),
            ("train.toml", "worker,launch=native", Shape::Native),
            ("python3|train.py", "", Shape::Native),
        ] {
            let plan = world(command, &[]).plan(spec).unwrap();
            assert_eq!((plan.launch, plan.step.shape), (None, shape), "{command} {spec}");
        }
    }

    /// `#SBATCH --palingenesis=worker`, and somebody looks into the job.
    #[test]
    fn a_shell_for_a_person_is_no_configuration() {
        let mut shell = world("bash|-l", &FOUND[..1]);
        shell.step.pty = true;
        assert_eq!(shell.plan("worker").unwrap().step.shape, Shape::Shell);
        assert!(matches!(shell.plan("launch=worker"), Err(Refusal::Worker(_))));
        // The worker itself may have a terminal.
        shell.command = words("train.toml");
        shell.task.start.as_mut().unwrap().programs = vec![Program { path: "/w".into(), exists: true, unfit: None }];
        assert_eq!(shell.plan("worker").unwrap().launch.unwrap().program, "/w");
    }

    #[test]
    fn an_empty_first_word_is_an_argument_and_no_word_is_a_refusal() {
        assert_eq!(world("", &FOUND).plan("worker").unwrap().launch.unwrap().argument.as_deref(), Some(""));
        let mut none = world("x", &FOUND);
        none.command.clear();
        let error = none.plan("worker").unwrap_err().to_string();
        assert!(error.contains("n1") && error.contains("srun --palingenesis palingenesis-worker"), "{error}");
    }

    #[test]
    fn a_multi_prog_step_is_refused() {
        let mut multi = world("mp.conf|0 a\n1 b\n", &FOUND);
        multi.step.multi_prog = true;
        assert!(matches!(multi.plan("worker"), Err(Refusal::Worker(WorkerError::MultiProg))));
        assert!(multi.plan("worker,launch=native").is_ok() && multi.plan("").is_ok());
    }

    #[test]
    fn the_paths_in_order_without_repeats_and_only_where_they_are_needed() {
        let mut world = world("train.toml", &[]);
        world.environment.set("PATH", "/home/u/bin:.:/usr/bin/:/opt/x");
        let paths = |spec: &str, configured| {
            let settings = Settings::parse(spec, crate::config::Source::Option).unwrap();
            wanted(&settings, &world.command, &world.step, &world.environment, configured)
        };
        let usual = ["/usr/bin", "/usr/local/bin", "/home/u/bin", "/opt/x"].map(|dir| format!("{dir}/{PROGRAM}"));
        assert_eq!(paths("worker", None), usual);
        assert_eq!(paths("worker", Some("/srv/w"))[..2], ["/srv/w".to_string(), usual[0].clone()]);
        assert_eq!(paths("worker,launch=native", None), [""; 0]);
    }

    #[test]
    fn what_was_looked_for_and_the_cure() {
        let missing = [
            ("/usr/bin/palingenesis-worker", Some("not there")),
            ("/usr/local/bin/palingenesis-worker", Some("may not be executed")),
            ("/a/palingenesis-worker", Some("not there")),
            ("/b/palingenesis-worker", Some("a directory")),
        ];
        let mut bare = world("train.toml", &missing);
        let error = bare.plan("worker").unwrap_err().to_string();
        for part in [
            "palingenesis-worker is not on n1: looked at /usr/bin/palingenesis-worker (not there), ",
            "/usr/local/bin/palingenesis-worker (may not be executed)",
            "/b/palingenesis-worker (a directory) and in one more directory of PATH; ",
            "install it on every node",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(!error.contains("/a/") && !error.contains('\n'), "{error}");
        bare.task.container = Container::Inside;
        let error = bare.plan("worker").unwrap_err().to_string();
        let mount = "--container-mounts=/usr/bin/palingenesis-worker:/usr/bin/palingenesis-worker";
        assert!(error.contains("in the container on n1") && error.contains(mount), "{error}");
        bare.task.start.as_mut().unwrap().configured = Some("/srv/w".into());
        assert!(bare.plan("worker").unwrap_err().to_string().contains("--container-mounts=/srv/w:/srv/w"));
    }

    /// Outside, it may be missing where the container has it, and the other way round.
    #[test]
    fn where_the_container_comes_later_nothing_is_refused() {
        let missing = [("/usr/bin/palingenesis-worker", Some("not there"))];
        for (programs, program) in [(&FOUND[..], FOUND[1].0), (&missing[..], missing[0].0)] {
            let mut world = world("train.toml", programs);
            world.task.container = Container::ComesLater;
            let plan = world.plan("worker").unwrap();
            assert_eq!(plan.launch.unwrap().program, program);
            assert!(plan.warnings.iter().any(|warning| warning.id == "worker-unseen"));
        }
    }

    #[test]
    fn where_nothing_was_looked_for_the_plan_says_so() {
        let mut described = world("train.toml", &[]);
        for start in [None, Some(StartFacts::default())] {
            described.task.start = start;
            let launch = described.plan("worker").unwrap().launch.unwrap();
            assert_eq!((launch.program.as_str(), launch.how), (PROGRAM, How::Unknown));
        }
    }

    #[test]
    fn an_inherited_argument_does_not_reach_another_worker() {
        for (command, spec) in [("palingenesis-worker", ""), ("python3|train.py", ""), ("train.toml", "worker")] {
            let plan = world(command, &FOUND).export(&[(ARGUMENT_VARIABLE, "old.toml")]).plan(spec).unwrap();
            assert!(plan.unset.iter().any(|note| note.name == ARGUMENT_VARIABLE), "{command} {spec}");
        }
    }
}
