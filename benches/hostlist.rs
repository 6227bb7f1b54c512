//! Times the expansion of a list of 10,000 hosts and, in the same run, the
//! `scontrol show hostnames` command on the same list, and prints the ratio.

use palingenesis::facts::hostlist::{expand, first};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LIST: &str = "node[00001-10000]";
const HOSTS: usize = 10_000;
const ROUNDS: usize = 100;
const WANTED: f64 = 10.0;

/// How long `action` takes until its result is there; dropping it comes after.
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

fn scontrol(config: &Path) -> Command {
    let mut command = Command::new("scontrol");
    command.env("SLURM_CONF", config).args(["show", "hostnames", LIST]).stderr(Stdio::null());
    command
}

/// A configuration with which the command runs without a daemon, or why the
/// command cannot be used.
fn configure() -> Result<PathBuf, String> {
    let config = std::env::temp_dir().join(format!("hostlist-bench-{}.conf", std::process::id()));
    let text = "ClusterName=bench\nSlurmctldHost=localhost\nNodeName=localhost\n";
    std::fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
    let reason = match scontrol(&config).output() {
        Ok(output) if output.stdout.split(|&byte| byte == b'\n').count() == HOSTS + 1 => {
            return Ok(config);
        }
        Ok(_) => "scontrol does not print the hosts here".to_owned(),
        Err(error) => format!("scontrol: {error}"),
    };
    let _ = std::fs::remove_file(&config);
    Err(reason)
}

fn main() {
    assert_eq!(expand(LIST).map(|names| names.len()), Ok(HOSTS));
    let config = configure();
    let cold = time(|| expand(black_box(LIST)));
    // A large block returned once keeps glibc from giving the memory of one
    // measurement back to the kernel before the next.
    drop(black_box(vec![1_u8; 16 << 20]));
    let (mut expanding, mut finding_first, mut command) = (Vec::new(), Vec::new(), Vec::new());
    // In turns, so that a change in the speed of the machine meets both.
    for _ in 0..ROUNDS {
        for _ in 0..10 {
            expanding.push(time(|| expand(black_box(LIST))));
            finding_first.push(time(|| first(black_box(LIST))));
        }
        if let Ok(config) = &config {
            command.push(time(|| scontrol(config).output()));
        }
    }
    let expanding = median(expanding);
    println!(
        "hostlist: expand {HOSTS} hosts: {expanding:?} (with fresh memory {cold:?}); \
         first host only: {:?}",
        median(finding_first)
    );
    match config {
        Err(reason) => println!("hostlist: SKIPPED the comparison: {reason}"),
        Ok(config) => {
            let _ = std::fs::remove_file(config);
            let command = median(command);
            let ratio = command.as_secs_f64() / expanding.as_secs_f64();
            println!("hostlist: scontrol show hostnames: {command:?}; ratio {ratio:.1} (at least {WANTED} wanted)");
        }
    }
}
