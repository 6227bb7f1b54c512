//! What the whole-program tests share: a real Slurm cluster on this machine and
//! the libraries to load into it.
//!
//! Tests that need a cluster call [`Sandbox::up`] and return when it gives
//! `None`: without root there are no namespaces and no devices. They say so.

#![allow(dead_code)]

pub mod tasks;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder cargo built this test into: `target/debug`.
pub fn target() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().and_then(Path::parent).expect("a test lies in target/PROFILE/deps").to_path_buf()
}

/// The plugin, as built with this test: beside it in deps/. (`cargo test` does
/// not renew the copy one folder above.)
pub fn library() -> PathBuf {
    let library = target().join("deps/libpalingenesis.so");
    assert!(library.is_file(), "{} is missing", library.display());
    readable_by_all(library)
}

/// A program of the workspace (`palingenesis`, `palingenesis-worker`).
pub fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| cargo(&["build", "--workspace", "--bins"], &target_root()));
    readable_by_all(target_root().join("debug").join(name))
}

/// The plugin with fault injection, in a target folder of its own.
pub fn fault_library() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    let folder = target_root().join("fault");
    BUILT.get_or_init(|| cargo(&["build", "--features", "fault-injection"], &folder));
    readable_by_all(folder.join("debug/libpalingenesis.so"))
}

/// The plugin as it is shipped.
pub fn release_library() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| cargo(&["build", "--release"], &target_root()));
    target_root().join("release/libpalingenesis.so")
}

/// The file, or a copy of it where the cluster's user could not reach it: below a
/// home directory that is closed to others.
pub fn readable_by_all(file: PathBuf) -> PathBuf {
    let open = |folder: &Path| fs::metadata(folder).is_ok_and(|data| data.permissions().mode() & 0o001 != 0);
    if file.ancestors().skip(1).all(open) {
        return file;
    }
    let copies = std::env::temp_dir().join(format!("palingenesis-test-files-{}", std::process::id()));
    let copy = copies.join(file.strip_prefix(target_root()).unwrap_or(Path::new("file")));
    let folder = copy.parent().expect("it lies in the folder of copies");
    fs::create_dir_all(folder).expect("the temporary folder is writable");
    for folder in folder.ancestors().take_while(|folder| folder.starts_with(&copies)) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    replace(&file, &copy);
    copy
}

/// Copies `file` to `copy`, never into a file that a process, slurmd or this
/// one, has mapped: it would crash.
fn replace(file: &Path, copy: &Path) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let new = copy.with_extension(format!("new{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    fs::copy(file, &new).expect("the file can be copied");
    fs::rename(&new, copy).expect("it is the same folder");
}

/// The plugin for another Slurm release, in a target folder of its own.
pub fn stamped_library(release: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let output = stamped_build(&[("PALINGENESIS_SLURM", release)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let built = stamped_folder().join("debug/libpalingenesis.so");
    let kept = stamped_folder().join(format!("libpalingenesis-{release}.so"));
    replace(&built, &kept);
    kept
}

/// Builds the library with these variables.
pub fn stamped_build(variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO"))
        .args(["build", "--lib", "--target-dir"])
        .arg(stamped_folder())
        .env_remove("PALINGENESIS_SLURM")
        .env_remove("SLURM_INCLUDE_DIR")
        .envs(variables.iter().copied())
        .current_dir(root())
        .output()
        .expect("cargo runs")
}

/// Where [`stamped_build`] builds.
pub fn stamped_folder() -> PathBuf {
    target_root().join("stamped")
}

fn target_root() -> PathBuf {
    target().parent().expect("target/PROFILE has a parent").to_path_buf()
}

fn cargo(arguments: &[&str], target: &Path) {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--quiet")
        .arg("--target-dir")
        .arg(target)
        .current_dir(root())
        .status()
        .expect("cargo runs");
    assert!(status.success(), "cargo {arguments:?}");
}

/// How often what chance decides is tried: once, and PALINGENESIS_SOAK times more.
pub fn rounds() -> usize {
    let more = std::env::var("PALINGENESIS_SOAK").ok().and_then(|more| more.parse::<usize>().ok());
    1 + more.unwrap_or(0)
}

/// What a command in the sandbox said.
#[derive(Debug, Clone)]
pub struct Said {
    /// Its exit code; 124 when it outlived its deadline.
    pub code: i32,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
    /// How long it took.
    pub took: Duration,
}

impl Said {
    /// Runs a program of ours, outside any sandbox, and waits for it.
    pub fn run(mut command: Command) -> Said {
        let start = Instant::now();
        let output = command.stdin(Stdio::null()).output().expect("the program starts");
        Said::of(output, start.elapsed())
    }

    fn of(output: Output, took: Duration) -> Said {
        Said {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
            took,
        }
    }

    /// Lines of stderr that are ours.
    pub fn ours(&self) -> Vec<&str> {
        self.err.lines().filter(|line| line.contains("palingenesis")).collect()
    }

    /// Asserts exit code 0.
    #[track_caller]
    pub fn ok(self) -> Said {
        assert_eq!(self.code, 0, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }
}

/// A running cluster; torn down when dropped.
pub struct Sandbox {
    dir: PathBuf,
}

impl Sandbox {
    /// Starts a cluster with `slurm-sandbox up`'s arguments, or says why not.
    pub fn up(name: &str, arguments: &[&str]) -> Option<Sandbox> {
        let dir = std::env::temp_dir().join(format!("palingenesis-test-{name}-{}", std::process::id()));
        let output = script().arg("up").arg("--dir").arg(&dir).args(arguments).output().expect("bash is there");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => Some(Sandbox { dir }),
            Some(77) => {
                println!("skipped: {text}");
                None
            }
            _ => panic!("slurm-sandbox up {arguments:?}:\n{}{text}", String::from_utf8_lossy(&output.stdout)),
        }
    }

    /// The sandbox's folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs a bash command line at the login host as the unprivileged user, at
    /// most 60 seconds.
    pub fn run(&self, line: &str) -> Said {
        self.run_as(&[], line, 60)
    }

    /// As root.
    pub fn run_root(&self, line: &str) -> Said {
        self.run_as(&["--as-root"], line, 60)
    }

    /// With `slurm-sandbox run`'s options and a deadline in seconds.
    pub fn run_as(&self, options: &[&str], line: &str, seconds: u32) -> Said {
        let start = Instant::now();
        let output = script()
            .arg("run")
            .arg("--dir")
            .arg(&self.dir)
            .args(options)
            .args(["--", "timeout", "-k", "3", &seconds.to_string(), "bash", "-c", line])
            .stdin(Stdio::null())
            .output()
            .expect("bash is there");
        Said::of(output, start.elapsed())
    }

    /// Rewrites plugstack.conf under the running cluster.
    pub fn plugstack(&self, lines: &[&str]) {
        self.manage("plugstack", lines);
    }

    /// Cancels what runs, resumes the nodes and waits until they are idle.
    pub fn resume(&self) {
        self.manage("resume", &[]);
    }

    /// Restarts every slurmd, so that they read plugstack.conf again.
    pub fn restart_slurmd(&self) {
        self.manage("restart-slurmd", &[]);
    }

    fn manage(&self, command: &str, arguments: &[&str]) {
        let output = script().arg(command).arg("--dir").arg(&self.dir).args(arguments).output().expect("bash is there");
        assert!(output.status.success(), "slurm-sandbox {command}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = script().arg("down").arg("--dir").arg(&self.dir).output();
    }
}

fn script() -> Command {
    let mut command = Command::new(root().join("tests/sandbox/slurm-sandbox"));
    command.env_remove("SLURM_SANDBOX_DIR");
    command
}
