//! Times the writing of a rank's checkpoint file and, in the same run, a plain write of the
//! same bytes, both with fsync, in turns; then reading it into place and verifying it
//! against a plain read. Prints ratios; above 1 is faster than plain.
//!
//! The first argument is the directory to write in (default: the current one), the second
//! MiB of numbers (default: 512).

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use palingenesis_worker::checkpoint::dcp::{self, Dcp, verify};
use palingenesis_worker::checkpoint::{Early, Part, PartMut};

const ROUNDS: usize = 7;
const WANTED: f64 = 0.8;

/// As of a model of a few hundred million parameters: matrices, and norms between them.
fn shapes(mib: usize) -> Vec<(String, Vec<usize>)> {
    (0..mib / 16)
        .flat_map(|layer| {
            [
                (format!("model.layers.{layer}.mlp.up_proj.weight"), vec![4096, 1024]),
                (format!("model.layers.{layer}.input_layernorm.weight"), vec![1024]),
            ]
        })
        .collect()
}

fn timed(action: impl FnOnce()) -> Duration {
    let start = Instant::now();
    action();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn line(what: &str, bytes: u64, ours: f64, plain: f64) {
    let speed = |seconds: f64| bytes as f64 / 1e9 / seconds;
    println!("{what:<32} {:>6.2} GB/s {:>6.2} GB/s plain   ratio {:.2}", speed(ours), speed(plain), plain / ours);
}

/// Writes with what a file takes at once, then waits for the disk.
fn write(path: &Path, fill: impl FnOnce(File) -> std::io::Result<()>) -> Duration {
    let _ = std::fs::remove_file(path);
    timed(|| fill(File::create(path).unwrap()).unwrap())
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| ".".into()));
    let mib = arguments.next().map_or(512, |mib| mib.parse().expect("MiB"));
    let dir = dir.join(format!("checkpoint-bench-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();

    let shapes = shapes(mib);
    let mut numbers: Vec<Vec<f32>> =
        shapes.iter().map(|(_, shape)| (0..shape.iter().product()).map(|at| at as f32 * 0.37).collect()).collect();
    let parts: Vec<_> = shapes
        .iter()
        .zip(&numbers)
        .map(|((name, shape), data)| Part { name, shape, range: 0..data.len(), data })
        .collect();
    let (name, path, plain) = (dcp::shard_name(0), dir.join(dcp::shard_name(0)), dir.join("plain"));

    let mut shard = None;
    let mut times = (Vec::new(), Vec::new(), Vec::new());
    let mut ours = || {
        write(&path, |file| {
            let mut file = Early::new(file);
            shard = Some(dcp::write_shard(&mut file, &parts, &[])?);
            file.sync()
        })
    };
    ours();
    let bytes = std::fs::read(&path).unwrap();
    for _ in 0..ROUNDS {
        times.0.push(ours());
        times.1.push(write(&plain, |mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        }));
    }
    let shard = shard.unwrap();
    let ratio = median(times.1.clone()) / median(times.0.clone());
    line("write + fsync", shard.bytes, median(times.0), median(times.1));
    for _ in 0..ROUNDS {
        times.2.push(timed(|| drop(dcp::write_shard(&mut std::io::sink(), &parts, &[]).unwrap())));
    }
    println!("{:<32} {:>6.2} GB/s", "all but the writing (checksums)", shard.bytes as f64 / 1e9 / median(times.2));
    drop(parts);
    let mut bytes = bytes;

    let tensors: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
    std::fs::write(dir.join(dcp::METADATA), dcp::metadata(&tensors, &[(name, shard.clone())]).unwrap()).unwrap();
    let mut times = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut block = vec![0; 1 << 20];
    for _ in 0..ROUNDS {
        times.0.push(timed(|| {
            let dcp = Dcp::open(&dir).unwrap();
            for ((name, shape), data) in shapes.iter().zip(&mut numbers) {
                dcp.read(&mut PartMut { name, shape, range: 0..data.len(), data }).unwrap();
            }
        }));
        times.1.push(timed(|| assert_eq!(verify(&dir), [])));
        times.2.push(timed(|| {
            let mut file = File::open(&path).unwrap();
            while file.read(&mut block).unwrap() > 0 {}
        }));
        times.3.push(timed(|| File::open(&path).unwrap().read_exact(&mut bytes).unwrap()));
    }
    line("read into place, with checksums", shard.bytes, median(times.0), median(times.3));
    line("verify", shard.bytes, median(times.1), median(times.2));
    std::fs::remove_dir_all(&dir).unwrap();
    let verdict = if ratio >= WANTED { "reached" } else { "MISSED" };
    println!("aim: writing at least {WANTED} as fast as plain: {verdict} ({ratio:.2})");
}
