//! The end of srun: who failed first. Of a step that ended well nothing is asked, written
//! or said. srun's exit code is its own: nothing here changes it, and all of it has an
//! end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::host::{self, Handle, Layout};
use super::kept::lock;
use crate::act::rundir::{self, Kept};
use crate::config::Settings;
use crate::facts::exit::{Ended, ExitRecord};
use crate::facts::policy::Policy;
use crate::facts::{Environment, job};
use crate::plan::failure::{self, Circumstances, StepEnd};
use crate::report::one_line;
use crate::system::output::to_stderr;
use crate::system::{clock, program};

/// How long the controller is asked, with all questions.
const ASKING: Duration = Duration::from_secs(2);
/// How long a directory for the records may take.
const WRITING: Duration = Duration::from_millis(1500);
/// More nodes are not looked up, and not asked after where they sent nothing.
const MOST_ASKED: u32 = 256;

/// What is known of the step before it starts.
#[derive(Debug)]
struct Step {
    end: StepEnd,
    circumstances: Circumstances,
    rundir: Option<String>,
    /// The nodes, as far as they were looked up.
    nodes: BTreeSet<String>,
}

static STEP: Mutex<Option<Step>> = Mutex::new(None);
/// The job in which srun was started: later SLURM_JOB_ID is also there where srun has made
/// an allocation of its own.
static OUTER_JOB: Mutex<Option<String>> = Mutex::new(None);

/// Before anything is allocated.
pub fn look_around(environment: &Environment) {
    *lock(&OUTER_JOB) = environment.get("SLURM_JOB_ID").map(String::from);
}

/// Keeps what will be needed: at the end Slurm's own is gone.
pub fn expect(handle: Handle, settings: &Settings, policy: Policy) {
    let (Ok(job), Ok(step)) = (handle.job_id(), handle.step_id()) else { return };
    let end = StepEnd {
        job,
        step,
        ranks: handle.tasks().unwrap_or(0),
        nodes: handle.nodes().unwrap_or(0),
        labelled: policy.labelled,
        wait: policy.wait.filter(|wait| *wait > 0),
        ..StepEnd::default()
    };
    let circumstances = Circumstances {
        in_allocation: lock(&OUTER_JOB).as_ref().is_some_and(|outer| *outer == job.to_string()),
        kill_wait: seconds("KillWait").unwrap_or(30),
        node_timeout: seconds("SlurmdTimeout").unwrap_or(300),
        now_ns: 0,
    };
    *lock(&STEP) = Some(Step { end, circumstances, rundir: settings.rundir.clone(), nodes: BTreeSet::new() });
}

/// Looks the step's nodes up: each of the first ones has a task that is so many tasks
/// after the one before it, in every usual distribution.
pub fn look_nodes_up(layout: &Layout) {
    if let Some(step) = lock(&STEP).as_mut() {
        let (tasks, nodes) = (step.end.ranks, step.end.nodes.max(1));
        let apart = (tasks / nodes).max(1);
        let looked = (0..nodes.min(MOST_ASKED)).map(|node| node.saturating_mul(apart)).filter(|task| *task < tasks);
        step.nodes = looked.filter_map(|task| layout.node_of(task)).collect();
    }
}

/// The step's tasks are launchers.
pub fn has_launchers() {
    if let Some(step) = lock(&STEP).as_mut() {
        step.end.agents = true;
    }
}

/// What srun was asked to do when a rank fails, with slurm.conf's word where its own say
/// nothing.
pub fn policy(words: &[String], command: &[String], environment: &Environment) -> Policy {
    let policy = Policy::of(words, command, environment);
    Policy {
        kill: policy.kill.or_else(|| host::conf_value("KillOnBadExit").map(|value| value != "0")),
        wait: policy.wait.or_else(|| seconds("WaitTime")),
        ..policy
    }
}

/// "30 sec" of slurm.conf, as it is printed.
fn seconds(name: &str) -> Option<u32> {
    host::conf_value(name)?.split_whitespace().next()?.parse().ok()
}

/// Tells who failed first, and keeps the records where that was asked.
pub fn report(records: Vec<ExitRecord>) {
    *lock(&OUTER_JOB) = None;
    let Some(Step { mut end, mut circumstances, rundir, nodes }) = lock(&STEP).take() else { return };
    if records.is_empty() {
        return;
    }
    // The first component's alone, in a het step.
    let last = records.iter().map(|record| record.rank.saturating_add(1)).max().unwrap_or(0);
    end.ranks = end.ranks.max(last);
    circumstances.now_ns = clock::now();
    // Why nobody started the user has read, and it was nobody else's fault.
    let refused = records.iter().all(|record| record.kind == Ended::Refused);
    if !refused {
        let until = Instant::now() + ASKING;
        let jobs = scontrol(&["show", "job", "-o", &end.job.to_string()], until);
        let jobs = jobs.map(|text| job::jobs(&text)).unwrap_or_default();
        let silent = silent(nodes, &records);
        let lost = match silent.as_slice() {
            [] => Vec::new(),
            silent => {
                let text = scontrol(&["show", "node", "-o", &silent.join(",")], until);
                text.map(|text| job::lost(&text)).unwrap_or_default()
            }
        };
        end = end.told(&jobs, lost, circumstances);
        let verdict = failure::judge(&records, &end);
        let lines = failure::report(&verdict, &end, &|ns| clock::time_of_day(ns, circumstances.now_ns));
        to_stderr(&lines.iter().map(|line| one_line(&format!("palingenesis: {line}"))).collect::<String>());
    }
    if let Some(folder) = rundir {
        let kept = Kept::new(end, circumstances.now_ns, records);
        let line = match rundir::write(Path::new(&folder), &kept, WRITING) {
            Ok(None) => return,
            Ok(Some(others)) => format!(
                "palingenesis: warning: the record of the failed ranks was written, but {others} replace it; name a directory \
                 of your own with rundir="
            ),
            Err(why) => format!(
                "palingenesis: warning: what is known of the failed ranks is not kept: {why}; rundir= must name a directory \
                 that you can write to on this host"
            ),
        };
        to_stderr(&one_line(&line));
    }
}

/// Nodes of the step from which no rank's end was told: their ranks ended well, or nobody
/// is left to tell.
fn silent(nodes: BTreeSet<String>, records: &[ExitRecord]) -> Vec<String> {
    let told: BTreeSet<&str> = records.iter().map(|record| record.node.as_str()).collect();
    nodes.into_iter().filter(|node| !told.contains(node.as_str())).collect()
}

/// What scontrol prints; it lies beside srun.
fn scontrol(arguments: &[&str], until: Instant) -> Option<String> {
    let own = std::fs::read_link("/proc/self/exe").ok();
    let beside = own.map(|own| own.with_file_name("scontrol")).filter(|file| file.is_file());
    let file = beside.unwrap_or_else(|| PathBuf::from("scontrol"));
    let left = until.saturating_duration_since(Instant::now());
    // Seconds since 1970; the others of its variables stay.
    let text = program::output(&file, arguments, &[("SLURM_TIME_FORMAT", "%s")], left).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}
