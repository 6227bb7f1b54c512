//! What the whole-program tests share: a real Slurm cluster on this machine and
//! the libraries to load into it.
//!
//! Tests that need a cluster call [`Sandbox::up`] and return when it gives
//! `None`: without root there are no namespaces and no devices. They say so.
//!
//! `PALINGENESIS_TEST_SLURM=trixie` runs the clusters in that Debian tree below
//! `PALINGENESIS_ROOTS` (scripts/make-roots) instead of on this machine's Slurm, with
//! the libraries stamped for its release. What Slurm itself does differently is asked
//! of [`slurm`], and the test says where that is known from.

#![allow(dead_code)]

pub mod crossed;
pub mod failures;
pub mod machine;
pub mod planned;
pub mod tasks;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
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

/// A Slurm release: year and month.
pub type Release = (u32, u32);

/// The release of the clusters' Slurm.
pub fn slurm() -> Release {
    static SLURM: OnceLock<Release> = OnceLock::new();
    *SLURM.get_or_init(|| {
        let text = match slurm_root() {
            // "trixie, slurm-wlm 24.11.5", by make-root.
            Some(root) => fs::read_to_string(root.join(".slurm-sandbox-root")).expect("make-root made the tree"),
            // srun wants a slurm.conf even for that.
            None => match Command::new("slurmd").arg("-V").output() {
                Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
                // No cluster is to be had: the tests will say so.
                Err(_) => "22.05".into(),
            },
        };
        let version = text.trim().rsplit(' ').next().unwrap_or_default();
        let mut numbers = version.split('.').map(|number| number.parse().ok());
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(year), Some(month)) => (year, month),
            _ => panic!("not a Slurm release: {text}"),
        }
    })
}

/// "24.11".
pub fn slurm_name() -> String {
    let (year, month) = slurm();
    format!("{year}.{month:02}")
}

/// The tree in which the clusters run, where it is not this machine.
pub fn slurm_root() -> Option<&'static Path> {
    static ROOT: OnceLock<Option<PathBuf>> = OnceLock::new();
    ROOT.get_or_init(|| {
        let suite = std::env::var_os("PALINGENESIS_TEST_SLURM").filter(|suite| !suite.is_empty())?;
        let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
        let root = Path::new(&roots).join(suite);
        assert!(root.join("usr/bin/srun").is_file(), "no Slurm at {}; scripts/make-roots makes it", root.display());
        Some(root)
    })
    .as_deref()
}

/// Where the headers of the clusters' Slurm are.
pub fn slurm_headers() -> PathBuf {
    slurm_root().unwrap_or(Path::new("/")).join("usr/include")
}

/// The plugin, as built with this test: beside it in deps/. (`cargo test` does
/// not renew the copy one folder above.)
pub fn library() -> PathBuf {
    let library = target().join("deps/libpalingenesis.so");
    assert!(library.is_file(), "{} is missing", library.display());
    for_the_clusters(library)
}

/// The library as the clusters' Slurm loads it: this machine's has it as it is built.
pub fn for_the_clusters(library: PathBuf) -> PathBuf {
    if slurm_root().is_none() {
        return readable_by_all(library);
    }
    readable_by_all(stamped(&library, &slurm_name()))
}

/// A folder with the library under the names that -l looks for and that programs then ask
/// for, where the cluster's user can load it.
pub fn link_folder(library: &Path) -> PathBuf {
    let folder = open_folder().join("linked");
    fs::create_dir_all(&folder).expect("it is ours");
    for name in ["libpalingenesis.so", "libpalingenesis.so.0"] {
        let new = folder.join(format!("{name}.{}", std::process::id()));
        let _ = fs::remove_file(&new);
        std::os::unix::fs::symlink(library, &new).expect("it is ours");
        fs::rename(&new, folder.join(name)).expect("it is the same folder");
    }
    folder
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
    for_the_clusters(folder.join("debug/libpalingenesis.so"))
}

/// The glibc that release builds are linked with, as those for packages are: Debian
/// bullseye's where its tree is there, else this machine's.
pub fn sysroot() -> Option<String> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let given = std::env::var("PALINGENESIS_SYSROOT").ok().filter(|given| !given.is_empty());
        given.or_else(|| {
            let output = Command::new(root().join("packaging/sysroot")).arg(target_root().join("sysroot")).output();
            let output = output.ok().filter(|output| output.status.success())?;
            Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
        })
    });
    found.clone()
}

/// The plugin as it is shipped.
pub fn release_library() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| cargo(&["build", "--release"], &target_root()));
    target_root().join("release/libpalingenesis.so")
}

/// Whether the cluster's user gets through to `path`.
fn reachable(path: &Path) -> bool {
    let open = |folder: &Path| fs::metadata(folder).is_ok_and(|data| data.permissions().mode() & 0o001 != 0);
    path.ancestors().skip(1).all(open)
}

/// A folder for files that the cluster's user and every node must reach: cargo's
/// own, or where that lies in a home directory closed to others one in /var/tmp.
/// (Each node may have a /tmp of its own.)
pub fn open_folder() -> PathBuf {
    let own = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    if reachable(&own.join("file")) {
        return own;
    }
    let number = fs::metadata(root()).map(|data| data.ino()).unwrap_or(0);
    let folder = PathBuf::from(format!("/var/tmp/palingenesis-test-{number}"));
    fs::create_dir_all(&folder).expect("/var/tmp is writable");
    let owner = fs::symlink_metadata(&folder).expect("it is there now").uid();
    assert_eq!(owner, fs::metadata("/proc/self").expect("/proc").uid(), "{} is not ours", folder.display());
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    folder
}

/// The file, or a copy of it in [`open_folder`] where the cluster's user could
/// not reach it.
pub fn readable_by_all(file: PathBuf) -> PathBuf {
    if reachable(&file) {
        return file;
    }
    let name = file.strip_prefix(target_root()).unwrap_or(&file).to_string_lossy().replace('/', "-");
    let copy = open_folder().join(name);
    replace(&file, &copy);
    copy
}

/// Makes `copy` a copy of `file` if it is older. By renaming: a program that has
/// the old one open keeps it. And by cp: a file that this process held open for
/// writing could not be executed while another thread's child inherits it.
fn replace(file: &Path, copy: &Path) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    if changed(copy).is_some_and(|copied| changed(file).is_some_and(|built| copied >= built)) {
        return;
    }
    let new = copy.with_extension(format!("new{}", std::process::id()));
    let status = Command::new("cp").arg(file).arg(&new).status().expect("cp is there");
    assert!(status.success(), "{} cannot be copied", file.display());
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("it is ours");
    fs::rename(&new, copy).expect("it is the same folder");
}

/// Whether users may make user namespaces, which the stand-in for a container plugin
/// needs; says so where not. Asked of this machine: in a tree, a task can once the
/// stand-in has made the tree the root of a mount namespace.
pub fn user_namespaces() -> bool {
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "unshare", "-Urm", "true"];
    let able = Command::new("setpriv").args(nobody).output().is_ok_and(|output| output.status.success());
    if !able {
        println!("skipped: no user namespaces for users here");
    }
    able
}

/// Builds the stand-in for a container plugin, tests/host/container_plugin.c, with
/// the Slurm headers below `include`, or says why not.
pub fn container_plugin(include: &Path) -> Option<PathBuf> {
    if !include.join("slurm/spank.h").is_file() {
        println!("skipped: no slurm/spank.h in {} (Debian: libslurm-dev)", include.display());
        return None;
    }
    // By itself: the compiler's own headers are this machine's.
    let name = include.to_string_lossy().replace('/', "-");
    let headers = open_folder().join(format!("headers{name}"));
    fs::create_dir_all(&headers).expect("it is ours");
    let link = headers.join("slurm");
    if fs::symlink_metadata(&link).is_err() {
        std::os::unix::fs::symlink(include.join("slurm"), &link).expect("it is ours");
    }
    let plugin = open_folder().join(format!("container_plugin{name}.so"));
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC"]);
    compiler.arg("-I").arg(&headers).arg(root().join("tests/host/container_plugin.c"));
    match compiler.arg("-o").arg(&plugin).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(plugin)
        }
        Err(error) => {
            println!("skipped: gcc: {error}");
            None
        }
    }
}

/// The plugin for another Slurm release: a stamped copy of [`library`].
pub fn stamped_library(release: &str) -> PathBuf {
    stamped(&library(), release)
}

/// A copy of a library of ours for another Slurm release, as the packages have it.
pub fn stamped(library: &Path, release: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = stamped_folder();
    fs::create_dir_all(&folder).expect("target is ours");
    let name = library.strip_prefix(target_root()).unwrap_or(library).with_extension("");
    let copy = folder.join(format!("{}-{release}.so", name.to_string_lossy().replace('/', "-")));
    let changed = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    // Newer, for a stamp takes no time from the file.
    if changed(&copy).is_none_or(|copied| changed(library).is_none_or(|built| copied <= built)) {
        let mut stamp = Command::new(root().join("packaging/stamp"));
        let output = stamp.arg(release).arg(library).arg(&copy).output().expect("bash is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    copy
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
    // For release builds only: to the others it is nothing, but for cargo another build.
    let sysroot = sysroot().filter(|_| arguments.contains(&"--release")).map(|root| ("PALINGENESIS_SYSROOT", root));
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .envs(sysroot)
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
    /// Lines of its standard error that tell of a step without -K, which most tests' steps
    /// are: they are left out of `err`.
    pub of_no_kill: usize,
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
        let err = without_waiting(&String::from_utf8_lossy(&output.stderr));
        let (of_no_kill, rest): (Vec<&str>, Vec<&str>) = err.split_inclusive('\n').partition(|line| {
            line.starts_with("palingenesis: note: if one of the ") && line.trim_end().ends_with(" [kill-on-bad-exit]")
        });
        Said {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: rest.concat(),
            of_no_kill: of_no_kill.len(),
            took,
        }
    }

    /// Stderr without what srun says at its end of the rank that failed first, for tests of
    /// something else.
    pub fn before_the_end(&self) -> String {
        let starts = ["rank ", "which of ", "no rank failed by itself", "what to do: ", "why: "];
        let of_the_end = |line: &str| {
            line.strip_prefix("palingenesis: ").is_some_and(|text| {
                starts.iter().any(|start| text.starts_with(start)) || text.contains(" failed in the same moment")
            })
        };
        self.err.split_inclusive('\n').filter(|line| !of_the_end(line)).collect()
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

/// Without srun's lines about a job that waits while an earlier one's nodes are
/// completing, which depend on the machine's load only.
fn without_waiting(err: &str) -> String {
    let waits = |line: &str| {
        line.strip_prefix("srun: job ").and_then(|rest| rest.split_once(' ')).is_some_and(|(job, what)| {
            job.parse::<u32>().is_ok()
                && ["queued and waiting for resources", "has been allocated resources"].contains(&what)
        })
    };
    err.split_inclusive('\n').filter(|line| !waits(line.trim_end_matches('\n'))).collect()
}

/// For steps of several components: srun starts a thread for each, and with a SrunPortRange
/// these now and then get in each other's way (measured with 22.05.8: "all ports in range
/// exhausted").
pub const FOR_HET_STEPS: [&str; 2] = ["--conf", "SrunPortRange="];

/// A running cluster; torn down when dropped.
pub struct Sandbox {
    dir: PathBuf,
}

impl Sandbox {
    /// Starts a cluster with `slurm-sandbox up`'s arguments, or says why not.
    pub fn up(name: &str, arguments: &[&str]) -> Option<Sandbox> {
        let dir = std::env::temp_dir().join(format!("palingenesis-test-{name}-{}", std::process::id()));
        let mut up = script();
        up.arg("up").arg("--dir").arg(&dir).args(arguments);
        // A test that names a tree is about that one.
        if let Some(root) = slurm_root().filter(|_| !arguments.contains(&"--root")) {
            up.arg("--root").arg(root);
        }
        let output = up.output().expect("bash is there");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => {
                // scripts/matrix counts the tests that say so.
                print!("{}", String::from_utf8_lossy(&output.stdout));
                Some(Sandbox { dir })
            }
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
        let output = self
            .command(options)
            .args(["timeout", "-k", "3", &seconds.to_string(), "bash", "-c", line])
            .stdin(Stdio::null())
            .output()
            .expect("bash is there");
        Said::of(output, start.elapsed())
    }

    /// `slurm-sandbox run` with its options; what it runs is to be added.
    pub fn command(&self, options: &[&str]) -> Command {
        let mut command = script();
        command.arg("run").arg("--dir").arg(&self.dir).args(options).arg("--");
        command
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

    /// Listens in place of syslogd, at /dev/log of a /dev of the sandbox's own with
    /// what its programs need.
    pub fn syslog(&self) -> UnixDatagram {
        self.run_root(
            "set -e; mkdir /run/dev; mount -t tmpfs -o mode=755 dev /run/dev; cd /run/dev
             cp -a /dev/{null,zero,full,random,urandom,tty,fd,stdin,stdout,stderr} .
             mkdir pts shm; mount --rbind /dev/pts pts; mount --rbind /dev/shm shm; cp -a /dev/ptmx . || ln -s pts/ptmx .
             cd /; mount --move /run/dev /dev",
        )
        .ok();
        let path = self.dir.join("dev-log");
        let socket = UnixDatagram::bind(&path).expect("the sandbox's folder is ours");
        // As syslogd's own.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("it is ours");
        self.run_root(&format!("ln -s {} /dev/log", path.display())).ok();
        socket
    }

    fn manage(&self, command: &str, arguments: &[&str]) {
        let output = script().arg(command).arg("--dir").arg(&self.dir).args(arguments).output().expect("bash is there");
        assert!(output.status.success(), "slurm-sandbox {command}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = script().arg("down").arg("--dir").arg(&self.dir).output();
        // It keeps what is not its own: a test's files beside the cluster's.
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

fn script() -> Command {
    let mut command = Command::new(root().join("tests/sandbox/slurm-sandbox"));
    command.env_remove("SLURM_SANDBOX_DIR");
    // Visible below --root too.
    command.env("SLURM_SANDBOX_BIND", open_folder());
    command
}

/// A file that the cluster's user can read.
pub fn readable(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, format!("{text}\n")).unwrap();
    for folder in path.ancestors().skip(1).take_while(|folder| folder.starts_with(root)) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
}
