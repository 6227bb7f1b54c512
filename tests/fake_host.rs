//! The plugin in a host that misbehaves in every way a host can: tests/host
//! explains it. Here it is built and run, plainly and under valgrind, with the
//! library that is shipped and with one stamped for another Slurm release.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Which functions for the plugin the host has.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Host {
    /// Those of Slurm 22.05.
    Usual,
    /// spank_prepend_task_argv, of 23.11, too.
    Newer,
    /// None.
    Bare,
    /// The usual ones, and the host watched by AddressSanitizer and the sanitizer of
    /// undefined behaviour.
    Watched,
}

/// Builds the host, or says why not.
fn host(kind: Host) -> Option<PathBuf> {
    static HOSTS: [OnceLock<Option<PathBuf>>; 4] = [const { OnceLock::new() }; 4];
    HOSTS[kind as usize]
        .get_or_init(|| {
            if !Path::new("/usr/include/slurm/spank.h").is_file() {
                println!("skipped: no slurm/spank.h (Debian: libslurm-dev)");
                return None;
            }
            let name = ["fake_host", "newer_host", "bare_host", "watched_host"][kind as usize];
            let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            let mut compiler = Command::new("gcc");
            compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-g", "-O1"]);
            if kind != Host::Bare {
                compiler.arg("-rdynamic");
            }
            if kind == Host::Watched {
                // Debian has their libraries in gcc's own package, others apart from it.
                compiler.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
            }
            if kind == Host::Newer {
                compiler.arg("-DPREPEND");
            }
            let source = common::root().join("tests/host/fake_host.c");
            match compiler.arg(source).arg("-o").arg(&program).arg("-ldl").output() {
                Ok(output) if kind == Host::Watched && !output.status.success() => {
                    println!("skipped: gcc's sanitizers: {}", String::from_utf8_lossy(&output.stderr));
                    None
                }
                Ok(output) => {
                    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                    Some(program)
                }
                Err(error) => {
                    println!("skipped: gcc: {error}");
                    None
                }
            }
        })
        .clone()
}

fn passes(output: Output) {
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(!out.contains("FAILED"), "{out}\n{err}");
}

fn run(library: &Path, kind: Host) {
    if let Some(host) = host(kind) {
        passes(Command::new(host).arg(library).arg("all").output().expect("the host runs"));
    }
}

/// Without the flag no hook allocates, in any context; with it, no failing call
/// makes a hook crash, return an error code or let a task run unprepared.
#[test]
fn the_laws_of_the_hooks_hold_in_a_misbehaving_host() {
    run(&common::release_library(), Host::Usual);
}

/// The same with the function that starts palingenesis-worker.
#[test]
fn they_hold_in_a_host_that_can_put_a_program_before_the_command() {
    run(&common::release_library(), Host::Newer);
}

/// What Slurm would refuse to load still keeps the laws if it is loaded.
#[test]
fn a_library_stamped_for_another_release_keeps_them_too() {
    run(&common::stamped_library("24.05"), Host::Newer);
}

/// The library loads into any program, and its hooks are harmless there.
#[test]
fn a_host_without_any_slurm_function_is_no_crash() {
    if let Some(host) = host(Host::Bare) {
        passes(Command::new(host).arg(common::release_library()).arg("bare").output().expect("the host runs"));
    }
}

#[test]
fn no_invalid_access_under_valgrind() {
    let Some(host) = host(Host::Usual) else {
        return;
    };
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=9", "--track-fds=no"]).arg(host).arg(common::release_library());
    // valgrind replaces malloc, so the host cannot count.
    match valgrind.arg("all").env("FAKE_HOST_NO_COUNT", "1").output() {
        Ok(output) => {
            let err = String::from_utf8_lossy(&output.stderr).into_owned();
            passes(output);
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
    let Some(host) = host(Host::Watched) else { return };
    let mut command = Command::new(host);
    command.arg(common::release_library()).arg("all").env("FAKE_HOST_NO_COUNT", "1");
    passes(command.env("ASAN_OPTIONS", "detect_leaks=0").output().expect("the host runs"));
}
