//! The worker's choice of a device, as people start it: on machines without CUDA, and with
//! stand-ins for the driver, its compiler, cublasLt and NCCL, under which the GPU's kernels
//! run on the processor. What it cannot show: anything of a real GPU, and time.

mod common;
#[allow(dead_code, reason = "only the kernels' file is taken here")]
#[path = "cuda/emulated.rs"]
mod emulated;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use common::port::free_port;
use common::ranks::{Ended, codes, command, end, spawn};
use common::{Place, losses};

/// This machine's own driver would be found.
fn has_driver() -> bool {
    let places = ["/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib"];
    let found = places.iter().any(|place| Path::new(place).join("libcuda.so.1").exists());
    if found {
        println!("SKIPPED: this machine has NVIDIA's driver");
    }
    found
}

/// A training of ranks that see these variables.
fn ranks(place: &Place, world: u32, variables: &[(&str, &OsStr)], more: &[&str]) -> Vec<Ended> {
    let port = free_port("127.0.0.1");
    let ranks = (0..world).map(|rank| {
        let mut command = command(place, rank, world, ("127.0.0.1", port));
        for name in ["LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"] {
            command.env_remove(name);
        }
        command.env("HOME", place.dir("home")).env("CUDA_CACHE_PATH", place.dir("cache"));
        command.envs(variables.iter().copied()).args(more);
        spawn(command)
    });
    end(ranks.collect())
}

fn one(place: &Place, variables: &[(&str, &OsStr)], more: &[&str]) -> Ended {
    ranks(place, 1, variables, more).remove(0)
}

#[test]
fn the_program_needs_no_library_of_cuda() {
    let ldd = Command::new("ldd").arg(env!("CARGO_BIN_EXE_palingenesis-worker")).output().unwrap();
    let text = String::from_utf8_lossy(&ldd.stdout).to_lowercase();
    assert!(text.contains("libc.so.6"), "{text}");
    for name in ["cuda", "nvrtc", "cublas", "nccl", "stdc++"] {
        assert!(!text.contains(name), "{text}");
    }
}

#[test]
fn without_cuda_device_cuda_is_one_line_and_78() {
    if has_driver() {
        return;
    }
    let place = Place::new("no-cuda");
    let ended = one(&place, &[], &["train.device=cuda"]);
    assert_eq!(ended.code, Some(78), "{}", ended.said);
    let lines: Vec<&str> = ended.said.lines().collect();
    assert!(
        lines.len() == 1 && lines[0].contains("train.device = \"cuda\": libcuda.so.1 is not found in "),
        "{lines:?}"
    );
    assert!(lines[0].ends_with("in a container the runtime mounts it"), "{lines:?}");
    assert!(!place.dir("output").exists());
}

#[test]
fn without_cuda_auto_computes_on_the_processor_and_says_nothing_of_it() {
    if has_driver() {
        return;
    }
    let place = Place::new("auto");
    let ended = one(&place, &[], &["train.steps=2", "train.warmup_steps=0"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(!ended.said.to_lowercase().contains("cuda") && !ended.said.contains("GPU"), "{}", ended.said);
}

#[test]
fn what_only_a_gpu_has_is_refused_on_the_processor() {
    let place = Place::new("bf16");
    for key in ["train.param_dtype", "train.reduce_dtype"] {
        let ended = one(&place, &[], &["train.device=cpu", &format!("{key}=bf16")]);
        assert_eq!(ended.code, Some(78), "{}", ended.said);
        assert!(ended.last().contains(&format!("{key} = \"bf16\" needs a GPU")), "{}", ended.said);
    }
}

/// A directory with stand-ins for all libraries.
struct StandIns(tempfile::TempDir);

impl StandIns {
    /// None, and a line, where they cannot be compiled.
    fn new() -> Option<StandIns> {
        let stand_ins = StandIns(tempfile::tempdir().unwrap());
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        for (source, name) in [
            ("cuda/driver_double.c", "libcuda.so.1"),
            ("cuda/nvrtc_double.c", "libnvrtc.so.13"),
            ("cuda/nvrtc_double.c", "libnvrtc-builtins.so.13.0"),
            ("double/nccl.c", "libnccl.so.2"),
        ] {
            let gcc = Command::new("gcc")
                .args(["-O1", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-o"])
                .args([stand_ins.0.path().join(name), tests.join(source)])
                .output()
                .unwrap();
            assert!(gcc.status.success(), "{}", String::from_utf8_lossy(&gcc.stderr));
        }
        // It has cublasLt's functions, too.
        symlink("libcuda.so.1", stand_ins.0.path().join("libcublasLt.so.13")).unwrap();
        Some(stand_ins)
    }

    fn key(&self) -> String {
        format!("train.cuda_libraries={}", self.0.path().display())
    }
}

#[test]
fn a_driver_without_a_gpu_is_told_and_the_processor_computes() {
    let (Some(stand_ins), place) = (StandIns::new(), Place::new("no-gpu")) else { return };
    // CUDA_ERROR_NO_DEVICE
    let none = [("DOUBLE_FAIL", OsStr::new("cuInit:100"))];
    let ended = one(&place, &none, &[&stand_ins.key(), "train.steps=2", "train.warmup_steps=0"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(ended.said.contains("warning: ") && ended.said.contains("is there but no GPU is seen"), "{}", ended.said);
    let ended = one(&place, &none, &[&stand_ins.key(), "train.device=cuda"]);
    assert_eq!(ended.code, Some(78), "{}", ended.said);
    assert!(ended.last().contains("train.device = \"cuda\": "), "{}", ended.said);
    // A driver with a GPU, and nothing to compile its kernels with: not silently the processor;
    // but a node without a GPU needs none.
    fs::remove_file(stand_ins.0.path().join("libnvrtc.so.13")).unwrap();
    let ended = one(&place, &none, &[&stand_ins.key(), "train.steps=2", "train.warmup_steps=0"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    let ended = one(&place, &[], &[&stand_ins.key()]);
    assert_eq!(ended.code, Some(78), "{}", ended.said);
    assert!(ended.last().contains("libnvrtc.so is not found in "), "{}", ended.said);
}

/// Another node may have a GPU that works.
#[test]
fn a_gpu_that_does_not_work_ends_with_75() {
    let (Some(stand_ins), place) = (StandIns::new(), Place::new("ill")) else { return };
    // CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_ECC_UNCORRECTABLE
    for (fail, name) in [("cuInit:802", "fabric"), ("cuDevicePrimaryCtxRetain:214", "ECC")] {
        let ended = one(&place, &[("DOUBLE_FAIL", OsStr::new(fail))], &[&stand_ins.key(), "train.device=cuda"]);
        assert_eq!(ended.code, Some(75), "{}", ended.said);
        assert!(ended.last().contains(name), "{}", ended.said);
    }
}

/// Ranks have not met by then, so no other one ends it.
#[test]
fn a_driver_that_hangs_ends_with_75() {
    let (Some(stand_ins), place) = (StandIns::new(), Place::new("hangs")) else { return };
    for device in ["auto", "cuda"] {
        let more = [&stand_ins.key(), &format!("train.device={device}"), "comm.start_timeout=2"];
        let ended = one(&place, &[("DOUBLE_FAIL", OsStr::new("cuInit:-1"))], &more);
        assert_eq!(ended.code, Some(75), "{}", ended.said);
        assert!(ended.last().contains("the GPU was not ready within 2 s; see nvidia-smi"), "{}", ended.said);
    }
}

/// Slurm gave the step GPUs, and they are not there: not for days on the processor.
#[test]
fn gpus_that_slurm_gave_and_nobody_sees_end_with_75_unless_they_are_hidden() {
    let (Some(stand_ins), place) = (StandIns::new(), Place::new("given")) else { return };
    let given = [("DOUBLE_FAIL", OsStr::new("cuInit:100")), ("SLURM_STEP_GPUS", OsStr::new("0,1"))];
    let more = [&stand_ins.key(), "train.steps=2", "train.warmup_steps=0"];
    let ended = one(&place, &given, &more);
    assert_eq!(ended.code, Some(75), "{}", ended.said);
    assert!(
        ended.last().contains("the step has GPUs (SLURM_STEP_GPUS=0,1), but the driver shows none"),
        "{}",
        ended.said
    );
    let cuda = [&more[..], &["train.device=cuda"]].concat();
    assert_eq!(one(&place, &given, &cuda).code, Some(75));
    let hidden = [given[0], given[1], ("CUDA_VISIBLE_DEVICES", OsStr::new("-1"))];
    assert_eq!(one(&place, &hidden, &more).code, Some(0));
    // One of two: the second rank's has fallen off the bus.
    let lost = [("SLURM_GPUS_ON_NODE", OsStr::new("3")), ("LOCAL_RANK", OsStr::new("2"))];
    let ended = one(&place, &[lost[0], lost[1], ("DOUBLE_COUNT", OsStr::new("2"))], &more);
    assert_eq!(ended.code, Some(75), "{}", ended.said);
    assert!(ended.last().contains("there is no GPU 2 for this rank: the node shows 2"), "{}", ended.said);
}

#[test]
fn precisions_that_do_not_fit_each_other_are_refused() {
    let (Some(stand_ins), place) = (StandIns::new(), Place::new("precisions")) else { return };
    let more = [&stand_ins.key(), "train.device=cuda", "train.param_dtype=f32", "train.reduce_dtype=bf16"];
    let ended = one(&place, &[], &more);
    assert_eq!(ended.code, Some(78), "{}", ended.said);
    assert!(
        ended.last().contains("train.reduce_dtype = \"bf16\" needs train.param_dtype = \"bf16\""),
        "{}",
        ended.said
    );
}

const KERNELS: &str = "DOUBLE_KERNELS";

/// The losses of a training that went well.
fn trained(place: &Place, ended: &[Ended]) -> Vec<(u64, f64)> {
    assert!(codes(ended).iter().all(|code| *code == Some(0)), "{}{}", ended[0].said, ended[ended.len() - 1].said);
    losses(&place.dir("output"))
}

fn near(ours: &[(u64, f64)], right: &[(u64, f64)], bar: f64) {
    assert_eq!(ours.len(), right.len());
    for ((step, own), (_, right)) in ours.iter().zip(right) {
        assert!((own / right - 1.0).abs() < bar, "step {step}: {own}, not {right}: {ours:?}");
    }
}

#[test]
fn a_training_goes_from_the_gpu_to_the_processor_and_back() {
    let (Some(kernels), Some(stand_ins)) = (emulated::library(), StandIns::new()) else { return };
    let gpu = [(KERNELS, kernels.as_os_str())];
    let libraries = stand_ins.key();
    // The same rate at each step, however many there are.
    let schedule = ["train.warmup_steps=0", "train.global_batch_size=2", "train.min_lr=3e-3"];
    let on = |device: &'static str, steps: &str, place: &Place, precision: &str| {
        let (steps, precision) = (format!("train.steps={steps}"), format!("train.param_dtype={precision}"));
        let device = format!("train.device={device}");
        let more = [&schedule[..], &[&steps, &device, &precision, &libraries]].concat();
        let ended = one(place, &gpu, &more);
        let losses = trained(place, &[ended]);
        assert!(!losses.is_empty());
        losses
    };
    let (whole, parts) = (Place::new("whole"), Place::new("parts"));
    let right = on("cpu", "8", &whole, "f32");
    on("cuda", "3", &parts, "f32");
    on("cpu", "6", &parts, "f32");
    let ours = on("cuda", "8", &parts, "f32");
    near(&ours, &right, 1e-3);
    let metrics = fs::read_to_string(parts.dir("output").join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"device_memory_bytes\""), "{metrics}");
    assert!(parts.dir("output").join("final/model.safetensors").exists());

    let short = Place::new("short");
    near(&on("cuda", "8", &short, "bf16"), &right, 3e-2);
}

#[test]
fn two_gpus_train_over_nccl_as_two_processors_do() {
    let (Some(kernels), Some(stand_ins)) = (emulated::library(), StandIns::new()) else { return };
    let meeting = tempfile::tempdir().unwrap();
    let gpu = [
        (KERNELS, kernels.as_os_str()),
        ("NCCL_DOUBLE_DIR", meeting.path().as_os_str()),
        ("NCCL_DOUBLE_AT_ONCE", OsStr::new("1")),
    ];
    let libraries = stand_ins.key();
    let (one, two) = (Place::new("tcp"), Place::new("nccl"));
    let steps = ["train.steps=3", "train.global_batch_size=2", "train.warmup_steps=1", "checkpoint.export=false"];
    let right = trained(&one, &ranks(&one, 2, &[], &[&steps[..], &["train.device=cpu"]].concat()));
    // The stand-in has one GPU, which both ranks would have on one host.
    let keys = [&steps[..], &["train.device=cuda", "train.param_dtype=f32", &libraries]].concat();
    let ended = ranks(&two, 2, &gpu, &keys);
    assert_eq!(codes(&ended), [Some(78); 2], "{}", ended[0].said);
    for rank in &ended {
        assert!(rank.said.contains("ranks 0 and 1 on ") && rank.said.contains("have the same GPU"), "{}", rank.said);
    }
    // Of its own each:
    let port = free_port("127.0.0.1");
    let started = (0..2).map(|rank| {
        let mut command = command(&two, rank, 2, ("127.0.0.1", port));
        command.envs(gpu.iter().copied()).env("DOUBLE_UUID", rank.to_string());
        command.env("CUDA_CACHE_PATH", two.dir("cache")).args(&keys);
        spawn(command)
    });
    let ended = end(started.collect());
    near(&trained(&two, &ended), &right, 1e-4);
    assert!(ended[0].said.contains("NCCL 2."), "{}", ended[0].said);
}

/// In the middle of a step a GPU falls off: its rank ends to be started again, and so does
/// the other, which waits in NCCL's call for it and names it.
#[test]
fn a_gpu_that_fails_in_a_step_ends_all_ranks_with_75() {
    let (Some(kernels), Some(stand_ins)) = (emulated::library(), StandIns::new()) else { return };
    // CUDA_ERROR_ECC_UNCORRECTABLE
    let (kernels, fail) = ((KERNELS, kernels.as_os_str()), ("DOUBLE_FAIL", OsStr::new("cuLaunchKernel:214:60")));
    let place = Place::new("falls");
    let ended = one(&place, &[kernels, fail], &[&stand_ins.key(), "train.device=cuda"]);
    assert_eq!(ended.code, Some(75), "{}", ended.said);
    assert!(ended.last().contains("ECC") && ended.last().contains("GPU 0 (Double 0"), "{}", ended.said);

    let (meeting, place, port) = (tempfile::tempdir().unwrap(), Place::new("one-falls"), free_port("127.0.0.1"));
    let started = (0..2).map(|rank| {
        let mut command = command(&place, rank, 2, ("127.0.0.1", port));
        command.envs([kernels]).envs([fail].iter().filter(|_| rank == 1).copied()).env("DOUBLE_UUID", rank.to_string());
        command.env("NCCL_DOUBLE_DIR", meeting.path()).env("NCCL_DOUBLE_AT_ONCE", "1");
        command.env("CUDA_CACHE_PATH", place.dir("cache")).args([&stand_ins.key(), "train.device=cuda"]);
        spawn(command)
    });
    let ended = end(started.collect());
    assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
    let between = ended[0].when.saturating_duration_since(ended[1].when);
    assert!(between < std::time::Duration::from_secs(10), "{between:?}");
    let (other, own) = (ended[0].last(), ended[1].last());
    assert!(own.contains("rank 1 on ") && own.contains("ECC"), "{}", ended[1].said);
    assert!(other.contains("rank 1 on ") && other.contains("ECC"), "{}", ended[0].said);
}
