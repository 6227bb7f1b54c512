//! Times plan() for one rank of steps from 16 to 8,192 ranks, and the `palingenesis
//! explain` command for the largest; prints each as a ratio: plan() against
//! expanding the step's node list, explain against `scontrol show hostnames`.

use palingenesis::config::{Settings, Source};
use palingenesis::facts::hostlist::expand;
use palingenesis::facts::{Environment, NodeFacts, Step};
use palingenesis::plan::{Facts, plan};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: usize = 60;
const TASKS: usize = 8;
const NODES: [usize; 4] = [2, 32, 256, 1024];

fn time<T>(action: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let result = black_box(action());
    let taken = start.elapsed();
    drop(result);
    taken
}

fn median(mut measured: Vec<Duration>) -> Duration {
    measured.sort();
    measured[measured.len() / 2]
}

fn list(nodes: usize) -> String {
    format!("node[0001-{nodes:04}]")
}

fn main() {
    println!("{:<28} {:>12} {:>16} {:>8}", "plan() of the last rank", "median us", "node list us", "ratio");
    let environment = Environment::of_process();
    let settings = Settings::parse("megatron", Source::Option).expect("a SPEC");
    let node = NodeFacts::read(Path::new("/"));
    let command: Vec<String> = "python3 pretrain_gpt.py --overlap-grad-reduce".split(' ').map(String::from).collect();
    for nodes in NODES {
        let list = list(nodes);
        let ranks = u32::try_from(nodes * TASKS).expect("small");
        let (mut planning, mut expanding) = (Vec::new(), Vec::new());
        // In turns, so that a change in the speed of the machine meets both.
        for _ in 0..ROUNDS {
            let step = Step::described(&list, &TASKS.to_string(), ranks - 1, 7, 0).expect("a step");
            let facts = Facts { command: &command, node: &node, ..Facts::new(&step, &environment) };
            planning.push(time(|| plan(&facts, &settings).expect("a plan")));
            expanding.push(time(|| expand(&list)));
        }
        let (planning, expanding) = (median(planning), median(expanding));
        let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
        println!(
            "{:<28} {:>12.1} {:>16.1} {:>8.1}",
            format!("{ranks} ranks on {nodes} nodes"),
            micros(planning),
            micros(expanding),
            micros(planning) / micros(expanding)
        );
    }
    commands();
}

/// A configuration with which scontrol runs without a daemon.
fn configuration() -> std::io::Result<PathBuf> {
    let file = std::env::temp_dir().join(format!("plan-bench-{}.conf", std::process::id()));
    std::fs::write(&file, "ClusterName=bench\nSlurmctldHost=localhost\nNodeName=localhost\n")?;
    Ok(file)
}

fn commands() {
    let Some(program) = program() else {
        println!("explain: skipped, cargo cannot build the command here");
        return;
    };
    let nodes = NODES[NODES.len() - 1];
    let list = list(nodes);
    let ranks = nodes * TASKS;
    let rank = (ranks - 1).to_string();
    let tasks = TASKS.to_string();
    let explain = ["explain", "--nodelist", &list, "--tasks-per-node", &tasks, "--rank", &rank, "--", "python3"];
    let mut ours = Command::new(program);
    ours.args(explain).stdout(Stdio::null()).stderr(Stdio::null());
    let configuration = configuration().ok();
    let mut peer = Command::new("scontrol");
    peer.args(["show", "hostnames", &list]).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some(file) = &configuration {
        peer.env("SLURM_CONF", file);
    }
    let run = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    assert!(run(&mut ours), "explain fails");
    let has_peer = run(&mut peer);
    let (mut explaining, mut listing) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        explaining.push(time(|| run(&mut ours)));
        if has_peer {
            listing.push(time(|| run(&mut peer)));
        }
    }
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    let explaining = milliseconds(median(explaining));
    println!("\nexplain, rank {rank} of {ranks}: {explaining:.1} ms (wanted: below 20)");
    if has_peer {
        let listing = milliseconds(median(listing));
        println!("scontrol show hostnames of its nodes: {listing:.1} ms, ratio {:.2}", explaining / listing);
    } else {
        println!("scontrol is not here: no ratio");
    }
    if let Some(file) = configuration {
        let _ = std::fs::remove_file(file);
    }
}

/// The command as it is shipped.
fn program() -> Option<PathBuf> {
    let status =
        Command::new(env!("CARGO")).args(["build", "--release", "--quiet", "-p", "palingenesis-cli"]).status().ok()?;
    let bench = std::env::current_exe().ok()?;
    // target/release/deps/plan-…
    let program = bench.parent()?.parent()?.join("palingenesis");
    (status.success() && program.is_file()).then_some(program)
}
