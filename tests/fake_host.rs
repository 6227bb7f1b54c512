//! The plugin in a host that misbehaves in every way a host can: tests/host
//! explains it. Here it is built and run, plainly and under valgrind, with the
//! library that is shipped and with one stamped for another Slurm release.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Builds the host, or says why not. `bare`: without functions for the plugin.
fn host(bare: bool) -> Option<PathBuf> {
    static HOSTS: [OnceLock<Option<PathBuf>>; 2] = [OnceLock::new(), OnceLock::new()];
    HOSTS[usize::from(bare)]
        .get_or_init(|| {
            if !Path::new("/usr/include/slurm/spank.h").is_file() {
                println!("skipped: no slurm/spank.h (Debian: libslurm-dev)");
                return None;
            }
            let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(if bare { "bare_host" } else { "fake_host" });
            let mut compiler = Command::new("gcc");
            compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-g", "-O1"]);
            if !bare {
                compiler.arg("-rdynamic");
            }
            let source = common::root().join("tests/host/fake_host.c");
            match compiler.arg(source).arg("-o").arg(&program).arg("-ldl").output() {
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

fn run(library: &Path) {
    if let Some(host) = host(false) {
        passes(Command::new(host).arg(library).arg("all").output().expect("the host runs"));
    }
}

/// Without the flag no hook allocates, in any context; with it, no failing call
/// makes a hook crash, return an error code or let a task run unprepared.
#[test]
fn the_laws_of_the_hooks_hold_in_a_misbehaving_host() {
    run(&common::release_library());
}

/// What Slurm would refuse to load still keeps the laws if it is loaded.
#[test]
fn a_library_stamped_for_another_release_keeps_them_too() {
    run(&common::stamped_library("24.05"));
}

/// The library loads into any program, and its hooks are harmless there.
#[test]
fn a_host_without_any_slurm_function_is_no_crash() {
    if let Some(host) = host(true) {
        passes(Command::new(host).arg(common::release_library()).arg("bare").output().expect("the host runs"));
    }
}

#[test]
fn no_invalid_access_under_valgrind() {
    let Some(host) = host(false) else {
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
