//! `palingenesis report`: what srun said at the end of a step whose ranks failed, again,
//! from what it kept in the directory of `rundir=`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use palingenesis::act::rundir::{self, Kept};
use palingenesis::config::site::Site;
use palingenesis::config::{self, printable};
use palingenesis::facts::{Environment, User};
use palingenesis::plan::failure;
use palingenesis::report::one_line;
use palingenesis::system::clock;
use serde_json::json;

use crate::print;

/// Below the options in --help.
pub const ABOUT: &str = "\
srun keeps what the nodes sent of ranks that failed where --palingenesis=rundir=DIR, PALINGENESIS_OPT_RUNDIR or the \
site file's rundir says so; of a step in which nothing failed there is nothing to keep. JOBID is SLURM_JOB_ID: of an \
array's task its own number, not 44_1, and of a het job its first component's. A \
job that is requeued, or whose number comes again, replaces what was kept of the earlier one: each report says when its \
step ended.

Exit codes: 0; 1 where nothing is kept of the step, or it cannot be read; 2 for wrong usage.";

/// What to report.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The job, or one of its steps.
    #[arg(value_name = "JOBID[.STEP]", value_parser = parse)]
    step: Asked,

    /// Where it is kept; default: what PALINGENESIS_OPT_RUNDIR or the site file says.
    #[arg(long, value_name = "DIR")]
    rundir: Option<PathBuf>,

    /// Print one JSON object for each step, with all records.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    job: u32,
    step: Option<u32>,
}

fn parse(text: &str) -> Result<Asked, String> {
    let (job, step) = match text.split_once('.') {
        Some((job, step)) => (job, Some(step)),
        None => (text, None),
    };
    let number = |text: &str| text.parse::<u32>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    match (number(job), step.map(number)) {
        (Some(job), None) => Ok(Asked { job, step: None }),
        (Some(job), Some(Some(step))) => Ok(Asked { job, step: Some(step) }),
        _ => Err("write it as 44 or 44.0, with the job's own number (SLURM_JOB_ID)".into()),
    }
}

/// The subcommand.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Asked { job, step } = arguments.step;
    let named = match step {
        Some(step) => format!("step {job}.{step}"),
        None => format!("job {job}"),
    };
    let folder = match &arguments.rundir {
        Some(folder) => folder.clone(),
        None => usual()?.context(
            "no directory is known: give --rundir DIR, the one that --palingenesis=rundir= named when the job ran \
             (nothing is kept without)",
        )?,
    };
    let kept = rundir::read(&folder, job, step)?;
    if kept.is_empty() {
        bail!(
            "nothing is kept of {named} in {}: no rank of it failed, or it ran without rundir= or with another one \
             (--rundir DIR)",
            printable(&folder.to_string_lossy())
        );
    }
    let texts: Vec<String> =
        kept.iter().map(|kept| if arguments.json { json_of(kept) } else { text_of(kept) }).collect();
    print(&texts.join(if arguments.json { "" } else { "\n" }))
}

/// As srun would take it, started from here.
fn usual() -> anyhow::Result<Option<PathBuf>> {
    let environment = Environment::of_process();
    let site = Site::named_or_usual(config::site_file_of_step(&environment))?;
    let profiles = site.as_ref().map(Site::profile_names).unwrap_or_default();
    let settings = config::resolve_flagged(None, &environment, &profiles)?;
    let view =
        site.map(|site| site.view(environment.get("SLURM_JOB_PARTITION"), None, &User::of_process(&environment)));
    let settings = view.map_or_else(|| settings.clone(), |view| view.under(&settings));
    Ok(settings.rundir.map(|folder| Path::new(&folder).to_path_buf()))
}

fn lines(kept: &Kept) -> Vec<String> {
    let clock = |ns| clock::time_of_day(ns, kept.ended_ns);
    failure::report(&failure::judge(&kept.records, &kept.step), &kept.step, &clock)
}

fn text_of(kept: &Kept) -> String {
    let step = &kept.step;
    let what = if step.agents { "launchers" } else { "ranks" };
    let mut text = one_line(&format!(
        "step {}.{}, ended {}, {} {what}, {} failed or were ended:",
        step.job,
        step.step,
        clock::date_and_time(kept.ended_ns),
        step.ranks,
        kept.records.len(),
    ));
    for line in lines(kept) {
        text.push_str(&one_line(&format!("  {line}")));
    }
    text
}

fn json_of(kept: &Kept) -> String {
    let verdict = failure::judge(&kept.records, &kept.step);
    let object = json!({
        "job": kept.step.job,
        "step": kept.step.step,
        "ended_ns": kept.ended_ns,
        "verdict": verdict.name(),
        "ranks": verdict.ranks(),
        "lines": lines(kept),
        "known": kept.step,
        "records": kept.records,
    });
    format!("{object}\n")
}
