//! The library as a file: what it needs, what it offers, for which Slurm release
//! it is, and that every program of Slurm, and others, can load it.
//!
//! An undefined symbol once kept a plugin from loading after a Slurm upgrade and,
//! being `required`, stopped every job: https://github.com/NVIDIA/pyxis/issues/25

mod common;

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Sandbox;

/// The hooks of spank(8) that we have.
const HOOKS: [&str; 8] = [
    "slurm_spank_init",
    "slurm_spank_init_post_opt",
    "slurm_spank_local_user_init",
    "slurm_spank_user_init",
    "slurm_spank_task_init",
    "slurm_spank_task_exit",
    "slurm_spank_exit",
    "slurm_spank_slurmd_exit",
];
/// What Slurm's loader reads (src/common/plugin.c).
const LOADER: [&str; 3] = ["plugin_name", "plugin_type", "plugin_version"];
/// include/palingenesis.h.
const C_API: [&str; 5] = [
    "palingenesis_bind",
    "palingenesis_exchange_id",
    "palingenesis_free",
    "palingenesis_layout_json",
    "palingenesis_plan_json",
];

fn tool(program: &str, arguments: &[&str], file: &Path) -> Option<String> {
    match Command::new(program).args(arguments).arg(file).env("LC_ALL", "C").output() {
        Ok(output) => {
            assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) => {
            println!("skipped: {program}: {error}");
            None
        }
    }
}

/// The u32 behind an exported symbol.
fn number(library: &Path, symbol: &str) -> u32 {
    let (file, name) = (CString::new(library.to_str().unwrap()).unwrap(), CString::new(symbol).unwrap());
    // SAFETY: the library runs no code when it is loaded, and stays loaded.
    let address = unsafe {
        let handle = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!handle.is_null(), "{} does not load", library.display());
        libc::dlsym(handle, name.as_ptr()).cast::<u32>()
    };
    assert!(!address.is_null(), "no {symbol}");
    // SAFETY: the symbol is an unsigned int, as Slurm's loader reads it.
    unsafe { *address }
}

#[test]
fn it_needs_the_c_library_and_nothing_else() {
    let Some(text) = tool("ldd", &[], &common::release_library()) else {
        return;
    };
    for line in text.lines() {
        let name = line.split_whitespace().next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
        // The last three are parts of the C library before glibc 2.34, see PALINGENESIS_SYSROOT.
        let files = ["linux-vdso.so", "libc.so", "libgcc_s.so", "ld-linux", "libpthread.so", "libdl.so", "librt.so"];
        let known = files.iter().any(|known| name.starts_with(known));
        assert!(known, "{line}");
    }
}

#[test]
fn every_undefined_symbol_is_of_the_c_library_or_weak() {
    let Some(text) = tool("nm", &["-D", "--undefined-only"], &common::release_library()) else {
        return;
    };
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [kind, symbol] = words[..] else { panic!("{line}") };
        assert!(!symbol.starts_with("slurm_") && !symbol.starts_with("spank_"), "{line}");
        let versioned = symbol.contains("@GLIBC_") || symbol.contains("@GCC_");
        // What is not there stays null: Rust's std looks so for what a newer C library has.
        let weak = kind == "w";
        assert!(versioned || weak, "{line}");
    }
}

#[test]
fn it_exports_the_plugin_and_the_c_api_and_nothing_else() {
    let Some(text) = tool("nm", &["-D", "--defined-only"], &common::release_library()) else {
        return;
    };
    let found: BTreeSet<&str> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    let expected: BTreeSet<&str> = HOOKS.into_iter().chain(LOADER).chain(C_API).collect();
    assert_eq!(found, expected);
}

#[test]
fn the_loader_may_map_it_read_only_and_no_page_is_executable_and_writable() {
    let library = common::release_library();
    let Some(text) = tool("readelf", &["--dynamic", "--program-headers", "--wide"], &library) else {
        return;
    };
    assert!(text.contains("GNU_RELRO") && text.contains("BIND_NOW"), "not full RELRO:\n{text}");
    assert!(!text.contains("TEXTREL"), "{text}");
    let stack = text.lines().find(|line| line.contains("GNU_STACK")).expect("GNU_STACK is there");
    assert!(!stack.contains("RWE"), "{stack}");
    for line in text.lines().filter(|line| line.trim_start().starts_with("LOAD")) {
        assert!(!line.contains("RWE"), "{line}");
    }
}

#[test]
fn faults_can_be_injected_into_test_builds_only() {
    let holds = |library: &Path, text: &str| {
        let bytes = fs::read(library).unwrap();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    };
    let (release, fault) = (common::release_library(), common::fault_library());
    for text in ["fault=", "sleep-", "injected"] {
        assert!(!holds(&release, text), "the release library holds '{text}'");
        assert!(holds(&fault, text), "the test library lacks '{text}': is the text still the right one?");
    }
}

/// Major and minor of `plugin_version` must be the host's (since 21.08).
#[test]
fn it_is_stamped_for_the_installed_slurm() {
    let Ok(header) = fs::read_to_string("/usr/include/slurm/slurm_version.h") else {
        println!("skipped: no slurm/slurm_version.h (Debian: libslurm-dev)");
        return;
    };
    let word = header.split("define SLURM_VERSION_NUMBER").nth(1).expect("the header has the number");
    let hex = word.split_whitespace().next().and_then(|word| word.strip_prefix("0x")).expect("a hexadecimal number");
    assert_eq!(number(&common::release_library(), "plugin_version"), u32::from_str_radix(hex, 16).unwrap());
}

/// One after another: they share a target folder.
#[test]
fn other_releases_and_machines_without_slurm_s_headers() {
    // SLURM_VERSION_NUM(24,5,0) of slurm.h.
    assert_eq!(number(&common::stamped_library("24.05"), "plugin_version"), 0x18_05_00);
    let output = common::stamped_build(&[("PALINGENESIS_SLURM", "24.05")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let copy = common::stamped_folder().join("libpalingenesis-24.05.so");
    fs::copy(common::stamped_folder().join("debug/libpalingenesis.so"), &copy).unwrap();
    assert_eq!(number(&copy, "plugin_version"), 0x18_05_00);

    for bad in ["24", "slurm-24.05", "24.05.1.2", "24.999", "19.05", "24.05 "] {
        let output = common::stamped_build(&[("PALINGENESIS_SLURM", bad)]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "PALINGENESIS_SLURM='{bad}' built");
        assert!(
            text.contains(&format!("PALINGENESIS_SLURM={bad}: not a Slurm release; write it as 24.05 or 24.05.3")),
            "{text}"
        );
    }

    let output = common::stamped_build(&[("SLURM_INCLUDE_DIR", "/nonexistent")]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("SLURM_INCLUDE_DIR=/nonexistent: no slurm/spank.h there; using the committed bindings"),
        "{text}"
    );
    // A library that is loaded stays: look at a copy under a name of its own.
    let copy = common::stamped_folder().join("libpalingenesis-committed.so");
    fs::copy(common::stamped_folder().join("debug/libpalingenesis.so"), &copy).unwrap();
    let committed = fs::read_to_string(common::root().join("src/spank/bindings.rs")).unwrap();
    let stamp = committed.split("SLURM_VERSION_NUMBER: u32 = ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    assert_eq!(number(&copy, "plugin_version"), stamp.parse::<u32>().unwrap());
}

/// One compile serves every release: the copies differ in the number and in nothing
/// else, and the number in the file is the one that the code goes by.
#[test]
fn a_stamped_copy_differs_in_its_number_only() {
    let library = common::release_library();
    let original = fs::read(&library).unwrap();
    // SLURM_VERSION_NUM(a,b,c) of slurm.h: a<<16 | b<<8 | c.
    for (release, expected) in
        [("21.08", 0x15_08_00), ("22.05.8", 0x16_05_08), ("24.11", 0x18_0b_00), ("26.05", 0x1a_05_00)]
    {
        let copy = common::stamped(&library, release);
        let bytes = fs::read(&copy).unwrap();
        assert_eq!(number(&copy, "plugin_version"), expected, "{release}");
        assert_eq!(bytes.len(), original.len());
        let differ: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != original[at]).collect();
        let within = differ.last().zip(differ.first()).is_none_or(|(last, first)| last - first < 4);
        assert!(within, "{release}: {differ:?}");
    }

    let folder = common::stamped_folder();
    let stamp = |release: &str, file: &Path| {
        let program = common::root().join("packaging/stamp");
        let output = Command::new(program).arg(release).arg(file).arg(folder.join("refused.so")).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (release, file, text) in [
        ("24", &library, "24: not a Slurm release; write it as 24.05 or 24.05.3"),
        ("20.11", &library, "20.11: palingenesis needs Slurm 21.08 or newer"),
        ("24.05", &PathBuf::from("/bin/sh"), "/bin/sh has no plugin_version: it is no Slurm plugin"),
        ("24.05", &PathBuf::from("/nonexistent"), "/nonexistent cannot be read"),
    ] {
        assert_eq!(stamp(release, file), (Some(2), format!("stamp: {text}\n")));
    }
    let left: Vec<_> = fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("refused")), "{left:?}");
}

#[test]
fn python_loads_it_without_slurm() {
    let script = r#"
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_GLOBAL)
text = ctypes.c_void_p()
code = library.palingenesis_layout_json(ctypes.byref(text))
print(code, ctypes.string_at(text).decode())
library.palingenesis_free(text)
"#;
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", script]).arg(common::release_library());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLURM") {
            python.env_remove(name);
        }
    }
    match python.output() {
        Ok(output) => {
            let out = String::from_utf8_lossy(&output.stdout);
            assert!(out.starts_with("-1 not inside a Slurm job"), "{out}{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(error) => println!("skipped: python3: {error}"),
    }
}

/// `required`, so that a library that one of the programs cannot load stops it.
#[test]
fn every_program_of_slurm_loads_it() {
    let library = common::for_the_clusters(common::release_library());
    let line = format!("required {}", library.display());
    let Some(sandbox) = Sandbox::up("load", &["--plugstack", &line]) else {
        return;
    };
    for program in ["srun", "sbatch", "salloc"] {
        let said = sandbox.run(&format!("{program} --help")).ok();
        assert!(said.out.contains("--palingenesis"), "{program} --help does not list the option");
    }
    // slurmstepd of an srun step, of a batch step and of salloc's.
    let rank = r#"'echo rank=$RANK of $WORLD_SIZE'"#;
    let expected = ["rank=0 of 2", "rank=1 of 2"];
    let lines = |out: &str| {
        let mut lines: Vec<String> = out.lines().filter(|l| l.starts_with("rank=")).map(String::from).collect();
        lines.sort();
        lines
    };
    let said = sandbox.run(&format!("srun -N2 -n2 --palingenesis bash -c {rank}")).ok();
    assert_eq!(lines(&said.out), expected, "{said:?}");
    let said = sandbox.run(&format!("salloc -N2 -n2 --palingenesis srun bash -c {rank}")).ok();
    assert_eq!(lines(&said.out), expected, "{said:?}");
    let script = "cd && printf '#!/bin/bash\\nsrun bash -c %s\\n' \"'echo rank=\\$RANK of \\$WORLD_SIZE'\" >job.sh \
                  && sbatch --wait -N2 -n2 -o job.out --palingenesis job.sh && cat job.out";
    let said = sandbox.run(script).ok();
    assert_eq!(lines(&said.out), expected, "{said:?}");
    // slurmd loads it at its start; with `required` it would not have come up.
    sandbox.restart_slurmd();
    sandbox.run("srun -N2 true").ok();
}

/// The word in front of the path decides what a bad file costs.
#[test]
fn a_missing_or_foreign_library_stops_no_job_under_optional_and_every_job_under_required() {
    let Some(sandbox) = Sandbox::up("load-bad", &["--nodes", "1"]) else {
        return;
    };
    let foreign = common::stamped_library("24.05");
    for file in ["/nonexistent/spank_palingenesis.so", foreign.to_str().unwrap()] {
        sandbox.plugstack(&[&format!("optional {file}")]);
        let said = sandbox.run("srun echo ran").ok();
        assert_eq!(said.out, "ran\n", "{said:?}");
        sandbox.plugstack(&[&format!("required {file}")]);
        let said = sandbox.run("srun echo ran");
        assert_eq!((said.code, said.out.as_str()), (1, ""), "{said:?}");
    }
    sandbox.plugstack(&[]);
}
