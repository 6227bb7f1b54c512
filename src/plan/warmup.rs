//! The warm-up: a command that fills caches, run once before the ranks start. Here is
//! who runs it, what it sees, which directories it must have for itself and what its
//! end means for the step. Pure: `act::warmup` runs it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use serde::{Deserialize, Serialize};

use crate::config::{Settings, WarmPer, check_directory, printable};
use crate::facts::directories::Here;
use crate::facts::{Environment, Step};

/// The mark that a warm-up leaves in a directory while it fills it.
pub const MARK: &str = ".palingenesis-warm.lock";

/// How long it may take where nobody said.
const LONGEST: u32 = 3600;

/// A warm-up as one node runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmSpec {
    /// The command line, for /bin/sh -c.
    pub command: String,
    /// On which nodes.
    pub per: WarmPer,
    /// Seconds it may take, and seconds it may wait for another step's before that.
    pub seconds: u32,
    /// NodeName of the node that runs it.
    pub node: String,
    /// The job and the step, as JOB.STEP.
    pub step: String,
    /// Limits of the shell that submitted, as Slurm sets them for the tasks.
    pub limits: Vec<Limit>,
    /// Directories in which no other warm-up may run at the same time, in the order in
    /// which they are taken.
    pub targets: Vec<Target>,
}

/// A resource limit that srun brought with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// As Slurm and, behind RLIMIT_, setrlimit(2) name it: NOFILE.
    pub name: &'static str,
    /// The soft limit; `u64::MAX` is none.
    pub soft: u64,
}

/// A directory that warm-ups share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its absolute path.
    pub path: String,
    /// What is in it.
    pub why: &'static str,
}

/// How a warm-up ended on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmEnd {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// It took too long and was ended.
    TooLong,
    /// It never ran: another step's held a directory all the time.
    Waited {
        /// The directory.
        target: String,
        /// Who holds it, in words.
        holder: String,
    },
    /// It could not be started; why.
    NotStarted(String),
}

/// What a node's warm-up came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmOutcome {
    /// How it ended.
    pub end: WarmEnd,
    /// How long it ran.
    pub seconds: u32,
    /// The last lines of its output, made safe for a terminal.
    pub last_lines: Vec<String>,
}

/// The warm-up of this step, if one is wanted. `settings` are the user's over the
/// site's; `environment` is the task's, as the plan made it.
pub fn wanted(settings: &Settings, step: &Step, environment: &Environment, here: &Here) -> Option<WarmSpec> {
    let command = settings.warm.clone()?;
    Some(WarmSpec {
        command,
        per: settings.warm_per,
        seconds: settings.warm_timeout.unwrap_or(LONGEST),
        node: step.node.clone(),
        step: format!("{}.{}", step.job_id, step.step_id),
        limits: LIMITS.iter().filter_map(|name| limit(environment, name)).collect(),
        targets: targets(settings, environment, here),
    })
}

/// Limits that Slurm propagates (src/common/slurm_rlimits_info.c).
const LIMITS: [&str; 10] = ["CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "AS", "MEMLOCK"];

/// slurmstepd sets it after our hook, and only for the task's own program.
fn limit(environment: &Environment, name: &'static str) -> Option<Limit> {
    let text = environment.get(&format!("SLURM_RLIMIT_{name}"))?;
    // A U says that the user asked for it, with --propagate.
    let soft = text.strip_prefix('U').unwrap_or(text).parse().ok()?;
    Some(Limit { name, soft })
}

/// Directories that a warm-up fills. Where two fill the same one at a time, one sees
/// what the other has half made
/// (<https://github.com/astral-sh/uv/issues/17399>,
/// <https://github.com/huggingface/huggingface_hub/pull/4306>).
///
/// For an environment it is the directory above: what makes an environment takes the
/// directory itself away, and none that holds anything else for one.
fn targets(settings: &Settings, environment: &Environment, here: &Here) -> Vec<Target> {
    let mut targets: Vec<Target> = Vec::new();
    let mut add = |path: &str, why| {
        let path = if path.len() > 1 { path.trim_end_matches('/') } else { path };
        if !targets.iter().any(|target| target.path == path) {
            targets.push(Target { path: path.into(), why });
        }
    };
    let named = |name: &str| environment.get(name).filter(|path| !path.is_empty());
    match named("UV_PROJECT_ENVIRONMENT").and_then(|path| above(path, here)) {
        Some(folder) => add(&folder, "UV_PROJECT_ENVIRONMENT is in it"),
        None => {
            if let Some(folder) = here.folder.as_deref() {
                add(folder, "the job's directory, where a project has its .venv");
            }
        }
    }
    if let Some(folder) = named("VIRTUAL_ENV").and_then(|path| above(path, here)) {
        add(&folder, "VIRTUAL_ENV is in it");
    }
    let root = settings.cache.as_deref().filter(|root| check_directory(root).is_ok());
    if let Some(root) = root {
        add(root, "cache= names it");
    }
    let below = |path: &str| root.is_some_and(|root| path.starts_with(&format!("{}/", root.trim_end_matches('/'))));
    for (name, why) in [("HF_HOME", "HF_HOME names it"), ("UV_CACHE_DIR", "UV_CACHE_DIR names it")] {
        if let Some(path) = named(name).filter(|path| check_directory(path).is_ok() && !below(path)) {
            add(path, why);
        }
    }
    targets
}

/// The directory that holds `path`.
fn above(path: &str, here: &Here) -> Option<String> {
    let whole = match path.starts_with('/') {
        true => path.to_string(),
        false => format!("{}/{path}", here.folder.as_deref()?.trim_end_matches('/')),
    };
    let (folder, _) = whole.trim_end_matches('/').rsplit_once('/')?;
    Some(if folder.is_empty() { "/".into() } else { folder.into() })
}

/// What makes a program one of several ranks: one that found it would wait for the
/// others, who wait for the warm-up.
const OF_A_RANK: [&str; 13] = [
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JAX_COORDINATOR_PORT",
    "PALINGENESIS_STORE_KEY",
];

/// The same for torchrun, and for MPI, whose start talks to slurmstepd in the rank's
/// name; and what slurmstepd takes out of a task's environment after our hook.
const OF_A_RANK_PREFIXES: [&str; 7] =
    ["PET_", "TORCHELASTIC_", "PMI_", "PMI2_", "PMIX_", "SLURM_RLIMIT_", "SLURM_PALINGENESIS_"];

/// What a step of one task has there: Lightning, JAX and MPI count ranks by them.
const OF_ONE_TASK: [(&str, &str); 11] = [
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_GTIDS", "0"),
    ("SLURM_NTASKS", "1"),
    ("SLURM_NPROCS", "1"),
    ("SLURM_NNODES", "1"),
    ("SLURM_TASKS_PER_NODE", "1"),
    ("SLURM_STEP_NUM_TASKS", "1"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "1"),
];

impl WarmSpec {
    /// Whether this node runs it.
    pub fn runs_here(&self, has_rank_0: bool) -> bool {
        self.per == WarmPer::Node || has_rank_0
    }

    /// What the command finds in its environment: what `srun -N1 -n1` would give it. That
    /// is the task's, but for what makes it one rank of several.
    pub fn variables(&self, task: Vec<(OsString, OsString)>) -> Vec<(OsString, OsString)> {
        let of_a_rank = |name: &[u8]| {
            OF_A_RANK.iter().any(|other| other.as_bytes() == name)
                || OF_A_RANK_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
        };
        let of_one = |name: &[u8]| {
            let value = OF_ONE_TASK.iter().find(|(other, _)| other.as_bytes() == name).map(|(_, value)| *value);
            value.or_else(|| (name == b"SLURM_STEP_NODELIST").then_some(self.node.as_str()))
        };
        let kept = task.into_iter().filter(|(name, _)| !of_a_rank(name.as_bytes()));
        let one = |(name, value): (OsString, OsString)| match of_one(name.as_bytes()) {
            Some(one) => (name, one.into()),
            None => (name, value),
        };
        let mut variables: Vec<(OsString, OsString)> = kept.map(one).collect();
        // As slurmstepd does it behind our hook.
        if !variables.iter().any(|(name, _)| name == "TMPDIR") {
            variables.push(("TMPDIR".into(), "/tmp".into()));
        }
        variables
    }

    /// What it is called in a line for people. Its words may hold a secret: the first is
    /// its name.
    fn name(&self) -> String {
        let word = self.command.split_whitespace().find(|word| !word.contains('='));
        let word: String = word.unwrap_or("…").chars().take(60).collect();
        format!("the warm-up ('{}')", printable(&word))
    }

    /// What stands before each line of its output.
    pub fn prefix(&self) -> String {
        match self.per {
            WarmPer::Step => "palingenesis: warm-up: ".into(),
            WarmPer::Node => format!("palingenesis: warm-up on {}: ", printable(&self.node)),
        }
    }

    /// While another step's is waited for.
    pub fn waits(&self, target: &str, holder: &str, seconds: u64) -> String {
        format!(
            "{} on {} waits for {holder}, which fills {} at this moment: {seconds} s so far, {} s at most",
            self.name(),
            self.node,
            printable(target),
            self.seconds,
        )
    }

    /// When a marker is taken over.
    pub fn takes_over(&self, target: &str, holder: &str, silent: u64) -> String {
        format!(
            "{holder} has left its mark in {} and given no sign for {silent} s, as when it was killed: \
             {} on {} starts without it",
            printable(target),
            self.name(),
            self.node,
        )
    }

    /// When no mark can be made in a directory.
    pub fn goes_without(&self, target: &str, why: &str) -> String {
        format!(
            "{} on {} cannot leave its mark in {} ({}): another step that fills it at the same time is not kept out",
            self.name(),
            self.node,
            printable(target),
            printable(why),
        )
    }

    /// When it was itself silent for so long that another took over.
    pub fn starts_again(&self, target: &str) -> String {
        format!(
            "{} on {} was stopped for so long that another step took {} over; it starts again when that is done",
            self.name(),
            self.node,
            printable(target),
        )
    }

    /// When it says nothing.
    pub fn goes_on(&self, seconds: u64) -> String {
        format!("{} runs on {} since {seconds} s", self.name(), self.node)
    }
}

/// Lines of output in a refusal.
const LINES_TOLD: usize = 5;

/// How long each may be there.
const LINE_TOLD: usize = 160;

/// Nodes that a line names.
const NODES_NAMED: usize = 4;

/// Why the step cannot start after its warm-up, on one line; `None`: it can. `outcomes`
/// by node; none for a node that did not run it.
pub fn judge(spec: &WarmSpec, outcomes: &[(String, Option<WarmOutcome>)]) -> Option<String> {
    let failed = |outcome: &&(String, Option<WarmOutcome>)| {
        outcome.1.as_ref().is_some_and(|outcome| outcome.end != WarmEnd::Exited(0))
    };
    let failed: Vec<_> = outcomes.iter().filter(failed).collect();
    let (node, outcome) = failed.first().and_then(|(node, outcome)| Some((node, outcome.as_ref()?)))?;
    let (how, cure) = told(outcome, spec);
    let others: Vec<String> = failed[1..].iter().map(|(node, _)| node.clone()).collect();
    let others = match others.len() {
        0 => String::new(),
        _ => format!(" (it failed on {} too)", some(&others)),
    };
    let last: Vec<String> = outcome.last_lines.iter().rev().take(LINES_TOLD).rev().map(|line| cut(line)).collect();
    let last = match (last.len(), &outcome.end) {
        (_, WarmEnd::Waited { .. } | WarmEnd::NotStarted(_)) => String::new(),
        (0, _) => "; it wrote nothing".into(),
        (1, _) => format!("; the last line of its output: {}", last[0]),
        _ => format!("; the last lines of its output: {}", last.join(" | ")),
    };
    Some(format!("{} {how} on {}{others}, so no rank starts{last}; {cure}", spec.name(), printable(node)))
}

/// How it ended, and what to do.
fn told(outcome: &WarmOutcome, spec: &WarmSpec) -> (String, String) {
    let after = outcome.seconds;
    let mend = || "mend what it says, or start without it (leave out --palingenesis-warm)".to_string();
    match &outcome.end {
        WarmEnd::Exited(127) => (
            format!("ended with exit code 127 after {after} s: a command in it was not found"),
            "name it with its path, or set PATH or load its module before srun".into(),
        ),
        WarmEnd::Exited(126) => (
            format!("ended with exit code 126 after {after} s: a command in it cannot be executed"),
            "look at that file's rights (chmod +x)".into(),
        ),
        // What a shell says of a command that a signal ended.
        WarmEnd::Exited(code @ 129..=192) => killed(code - 128, after),
        WarmEnd::Exited(code) => (format!("ended with exit code {code} after {after} s"), mend()),
        WarmEnd::Killed(signal) => killed(*signal, after),
        WarmEnd::TooLong => (
            format!("was ended after {after} s, its time limit"),
            "give it more time with warm-timeout=SECONDS, or mend what holds it up".into(),
        ),
        WarmEnd::Waited { target, holder } => (
            format!("could not begin within {} s: {holder} fills {} all the time", spec.seconds, printable(target)),
            format!(
                "end that step with scancel if it hangs, or wait longer with warm-timeout=SECONDS; if there is no such \
                 step, remove {}/{MARK}",
                printable(target),
            ),
        ),
        WarmEnd::NotStarted(why) => {
            (format!("could not be started ({})", printable(why)), "tell the cluster's admins, or leave it out".into())
        }
    }
}

fn killed(signal: i32, after: u32) -> (String, String) {
    let cure = match signal {
        libc::SIGKILL => "mostly that is for memory: give the step more (--mem), or let it do less at a time",
        libc::SIGXFSZ | libc::SIGXCPU => "raise that limit with ulimit before srun",
        _ => "mend what it says, or start without it (leave out --palingenesis-warm)",
    };
    (format!("was ended by signal {signal}{} after {after} s", signal_name(signal)), cure.into())
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGHUP => " (SIGHUP)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGFPE => " (SIGFPE)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGPIPE => " (SIGPIPE)",
        libc::SIGTERM => " (SIGTERM)",
        libc::SIGXCPU => " (SIGXCPU)",
        libc::SIGXFSZ => " (SIGXFSZ)",
        _ => "",
    }
}

fn cut(line: &str) -> String {
    match line.char_indices().nth(LINE_TOLD) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.into(),
    }
}

fn some(nodes: &[String]) -> String {
    let named: Vec<String> = nodes.iter().take(NODES_NAMED).map(|node| printable(node)).collect();
    match nodes.len().saturating_sub(NODES_NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn here() -> Here {
        Here { user: 1001, folder: Some("/home/u/job".into()) }
    }

    fn spec(text: &str) -> WarmSpec {
        let settings = settings(text);
        let variables = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
            ("SLURMD_NODENAME", "n1"),
        ];
        let environment = environment(&variables);
        wanted(&settings, &Step::from_environment(&environment).unwrap(), &environment, &here()).unwrap()
    }

    fn settings(text: &str) -> Settings {
        Settings::parse_with(text, crate::config::Source::Option, &[]).unwrap()
    }

    fn paths(settings: &Settings, pairs: &[(&str, &str)]) -> Vec<String> {
        targets(settings, &environment(pairs), &here()).into_iter().map(|target| target.path).collect()
    }

    #[test]
    fn what_is_filled_is_had_alone() {
        let plain = settings("warm=x");
        assert_eq!(paths(&plain, &[]), ["/home/u/job"]);
        // The same for a job that names what is the default.
        assert_eq!(paths(&plain, &[("UV_PROJECT_ENVIRONMENT", "/home/u/job/.venv")]), ["/home/u/job"]);
        assert_eq!(paths(&plain, &[("UV_PROJECT_ENVIRONMENT", ".venv/")]), ["/home/u/job"]);
        assert_eq!(paths(&plain, &[("UV_PROJECT_ENVIRONMENT", "")]), ["/home/u/job"]);
        assert_eq!(paths(&plain, &[("UV_PROJECT_ENVIRONMENT", "/scratch/envs/a")]), ["/scratch/envs"]);
        assert_eq!(paths(&plain, &[("UV_PROJECT_ENVIRONMENT", "/env")]), ["/"]);
        assert_eq!(paths(&plain, &[("VIRTUAL_ENV", "/home/u/envs/a")]), ["/home/u/job", "/home/u/envs"]);
        assert_eq!(paths(&plain, &[("HF_HOME", "/s/hf"), ("UV_CACHE_DIR", "rel")]), ["/home/u/job", "/s/hf"]);
        let shared = settings("warm=x,cache=/s/caches/");
        let below = [("HF_HOME", "/s/caches/huggingface"), ("UV_CACHE_DIR", "/s/caches/uv")];
        assert_eq!(paths(&shared, &below), ["/home/u/job", "/s/caches"]);
        assert_eq!(paths(&shared, &[("HF_HOME", "/s/caches2")]), ["/home/u/job", "/s/caches", "/s/caches2"]);
        let nowhere = Here { user: 1, folder: None };
        assert!(targets(&plain, &environment(&[]), &nowhere).is_empty());
    }

    #[test]
    fn nothing_makes_the_command_wait_for_other_ranks() {
        let pairs = [
            ("PATH", "/bin"),
            ("RANK", "0"),
            ("MASTER_ADDR", "n1"),
            ("PET_NNODES", "2"),
            ("TORCHELASTIC_RUN_ID", "1"),
            ("PMI_FD", "9"),
            ("PMIX_RANK", "0"),
            ("SLURM_RLIMIT_NOFILE", "1024"),
            ("SLURM_PALINGENESIS_NONCE", "secret"),
            ("PALINGENESIS_STORE_KEY", "secret"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_NODELIST", "n[1-2]"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
            ("CUDA_VISIBLE_DEVICES", "3"),
            ("HF_HOME", "/s"),
        ];
        let task = pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let seen: Vec<String> = spec("warm=x")
            .variables(task)
            .into_iter()
            .map(|(name, value)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))
            .collect();
        let wanted = [
            "PATH=/bin",
            "SLURM_PROCID=0",
            "SLURM_NTASKS=1",
            "SLURM_STEP_NODELIST=n1",
            "SLURM_JOB_NODELIST=n[1-2]",
            "CUDA_VISIBLE_DEVICES=3",
            "HF_HOME=/s",
            "TMPDIR=/tmp",
        ];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn limits_are_read_as_slurm_writes_them() {
        let variables = environment(&[
            ("SLURM_RLIMIT_NOFILE", "1024"),
            ("SLURM_RLIMIT_CORE", "U0"),
            ("SLURM_RLIMIT_STACK", "18446744073709551615"),
            ("SLURM_RLIMIT_AS", "much"),
        ]);
        let limits: Vec<(&str, u64)> =
            LIMITS.iter().filter_map(|name| limit(&variables, name)).map(|limit| (limit.name, limit.soft)).collect();
        assert_eq!(limits, [("STACK", u64::MAX), ("CORE", 0), ("NOFILE", 1024)]);
    }

    fn ended(end: WarmEnd, lines: &[&str]) -> Option<WarmOutcome> {
        Some(WarmOutcome { end, seconds: 14, last_lines: lines.iter().map(|line| line.to_string()).collect() })
    }

    #[test]
    fn only_an_end_without_a_fault_lets_the_ranks_start() {
        let spec = spec("warm=HF_TOKEN=abc%20uv%20sync%20--token%20abc");
        let judged =
            |end: WarmEnd, lines: &[&str]| judge(&spec, &[("n1".into(), ended(end, lines)), ("n2".into(), None)]);
        assert_eq!(judged(WarmEnd::Exited(0), &["fine"]), None);
        let line = judged(WarmEnd::Exited(2), &["1", "2", "3", "4", "5", "error: no network"]).unwrap();
        assert_eq!(
            line,
            "the warm-up ('uv') ended with exit code 2 after 14 s on n1, so no rank starts; the last lines of its \
             output: 2 | 3 | 4 | 5 | error: no network; mend what it says, or start without it (leave out \
             --palingenesis-warm)"
        );
        for (end, part) in [
            (WarmEnd::Exited(127), "a command in it was not found"),
            (WarmEnd::Exited(137), "signal 9 (SIGKILL)"),
            (WarmEnd::Killed(11), "signal 11 (SIGSEGV)"),
            (WarmEnd::TooLong, "warm-timeout=SECONDS"),
            (WarmEnd::Waited { target: "/s".into(), holder: "step 5.0 on n9".into() }, "step 5.0 on n9 fills /s"),
            (WarmEnd::NotStarted("no /bin/sh".into()), "could not be started (no /bin/sh)"),
        ] {
            let line = judged(end, &[]).unwrap();
            assert!(line.contains(part) && !line.contains("abc") && !line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn every_node_that_failed_is_named() {
        let spec = spec("warm=x,warm-per=node");
        let end = || ended(WarmEnd::Exited(1), &[]);
        let line =
            judge(&spec, &[("n1".into(), ended(WarmEnd::Exited(0), &[])), ("n2".into(), end()), ("n3".into(), end())]);
        let line = line.unwrap();
        assert!(line.contains("on n2 (it failed on n3 too), so no rank starts; it wrote nothing;"), "{line}");
        assert!(spec.runs_here(false));
        assert_eq!(spec.prefix(), "palingenesis: warm-up on n1: ");
    }
}
