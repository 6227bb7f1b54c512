//! The plugin in a host that misbehaves in every way a host can: tests/host
//! explains it. Here it is built as each Slurm release, and run, plainly and under
//! valgrind, with the library that is shipped, stamped for that release.
//!
//! What it knows of releases that are in no tree of scripts/make-roots is read in
//! their sources; that they behave so is shown for 22.05, 24.11 and 26.05 only, by
//! scripts/matrix.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};
use std::thread::JoinHandle;

/// The releases, as the host's RELEASE.
const RELEASES: [&str; 9] = ["21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05"];

/// Builds the host of a release, or with `None` one without any function of Slurm; or
/// says why not.
fn host(release: Option<&str>) -> Option<PathBuf> {
    built(release, &[])
}

/// The same with more arguments for the compiler, which it may lack.
fn built(release: Option<&str>, more: &[&str]) -> Option<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !Path::new("/usr/include/slurm/spank.h").is_file() {
        println!("skipped: no slurm/spank.h (Debian: libslurm-dev)");
        return None;
    }
    let watched = if more.is_empty() { "" } else { "-watched" };
    let name = format!("fake_host-{}{watched}", release.unwrap_or("bare"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-g", "-O1"]);
    compiler.args(more);
    if let Some(release) = release {
        compiler.args(["-rdynamic", &format!("-DRELEASE={}", release.replace('.', ""))]);
    }
    // Under another name first: another test may run the one from before.
    let new = program.with_extension("new");
    match compiler.arg(common::root().join("tests/host/fake_host.c")).arg("-o").arg(&new).arg("-ldl").output() {
        Ok(output) if !more.is_empty() && !output.status.success() => {
            println!("skipped: gcc {more:?}: {}", String::from_utf8_lossy(&output.stderr));
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            std::fs::rename(&new, &program).unwrap();
            Some(program)
        }
        Err(error) => {
            println!("skipped: gcc: {error}");
            None
        }
    }
}

/// The program in a network of its own, with root.
fn alone(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-n", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""]).arg(program);
    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 { command } else { Command::new(program) }
}

/// What is shipped for a release.
fn shipped(release: &str) -> PathBuf {
    common::stamped(&common::release_library(), release)
}

/// Asserts that all held; the host's standard output.
fn passes(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(!out.contains("FAILED"), "{out}\n{err}");
    out
}

/// Without the flag no hook allocates, in any context; with it, no failing call makes a
/// hook crash, return an error code or let a task run unprepared. Prints how much was
/// tried.
fn holds_in(release: &str) {
    // All at once, each in a network of its own where that can be had: their jobs have one
    // number, and with it one port.
    type Run = Mutex<Option<JoinHandle<Output>>>;
    static RUNNING: OnceLock<Vec<(&str, Option<Run>)>> = OnceLock::new();
    let running = RUNNING.get_or_init(|| {
        let start = |release| {
            let (host, library) = (host(Some(release))?, shipped(release));
            let run = move || {
                let mut command = alone(&host);
                command.arg(library).arg("all").output().expect("the host runs")
            };
            Some(Mutex::new(Some(std::thread::spawn(run))))
        };
        RELEASES.map(|release| (release, start(release))).into()
    });
    let Some(run) = running.iter().find(|(of, _)| *of == release).and_then(|(_, run)| run.as_ref()) else {
        return println!("skipped: no host of Slurm {release}");
    };
    let run = run.lock().unwrap().take().expect("one test for each release");
    let out = passes(&run.join().expect("the host runs"));
    let scenarios = out.lines().filter(|line| line.starts_with("ok ")).count();
    // "   52 calls failed in 14 ways each: …"
    let faults = |line: &str| {
        let numbers: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        line.contains(" calls failed in ").then(|| numbers[0] * numbers[1])
    };
    let faults: u32 = out.lines().filter_map(faults).sum();
    assert!(scenarios >= 38 && faults >= 1000, "{out}");
    println!("fake host of Slurm {release}: {scenarios} scenarios, {faults} launches with one call failing");
}

// One test for each release, so that they run side by side.

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_21_08() {
    holds_in("21.08");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_22_05() {
    holds_in("22.05");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_23_02() {
    holds_in("23.02");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_23_11() {
    holds_in("23.11");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_24_05() {
    holds_in("24.05");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_24_11() {
    holds_in("24.11");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_25_05() {
    holds_in("25.05");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_25_11() {
    holds_in("25.11");
}

#[test]
fn the_laws_of_the_hooks_hold_in_slurm_26_05() {
    holds_in("26.05");
}

/// <https://github.com/NVIDIA/pyxis/issues/25>: after an upgrade of Slurm. Its loader
/// (src/common/plugin.c) compares major and minor.
#[test]
fn the_loader_takes_the_library_of_its_own_release_only() {
    for release in RELEASES {
        let Some(host) = host(Some(release)) else { return };
        for other in RELEASES {
            let output = Command::new(&host).arg(shipped(other)).arg("load").output().expect("the host runs");
            let err = String::from_utf8_lossy(&output.stderr);
            let code = if other == release { 0 } else { 3 };
            assert_eq!(output.status.code(), Some(code), "{other} in {release}: {err}");
            assert_eq!(err.contains("Incompatible Slurm plugin"), other != release, "{other} in {release}: {err}");
        }
    }
}

/// The library loads into any program, and its hooks are harmless there.
#[test]
fn a_host_without_any_slurm_function_is_no_crash() {
    if let Some(host) = host(None) {
        passes(&Command::new(host).arg(shipped("22.05")).arg("bare").output().expect("the host runs"));
    }
}

#[test]
fn no_invalid_access_under_valgrind() {
    let Some(host) = host(Some("22.05")) else { return };
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--vgdb=no", "--quiet", "--error-exitcode=9", "--track-fds=no"]).arg(host).arg(shipped("22.05"));
    // valgrind replaces malloc, so the host cannot count.
    match valgrind.arg("scenarios").env("FAKE_HOST_NO_COUNT", "1").output() {
        Ok(output) => {
            let err = String::from_utf8_lossy(&output.stderr).into_owned();
            passes(&output);
            assert!(!err.contains("Invalid ") && !err.contains("uninitialised"), "{err}");
        }
        Err(_) => println!("skipped: no valgrind"),
    }
}

/// What the library hands to the host, and gets from it, is the host's to read and to
/// write: lengths, strings' ends, memory that was given back. The host's own leaks are its
/// scenarios'.
#[test]
fn the_host_s_sanitizers_see_nothing() {
    // Debian has their libraries in gcc's own package, others apart from it.
    let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let Some(host) = built(Some("22.05"), &sanitizers) else { return };
    let mut command = Command::new(host);
    command.arg(shipped("22.05")).arg("all").env("FAKE_HOST_NO_COUNT", "1");
    passes(&command.env("ASAN_OPTIONS", "detect_leaks=0").output().expect("the host runs"));
}
