//! What the plugin assumes about Slurm's binary interface, held against Slurm's
//! own headers and library: those of this machine and of each Debian tree that
//! scripts/make-roots built. The types are compared by a C compiler, see
//! tests/host/signatures.c.
//!
//! A compiler sees declarations only. That a function does with its arguments
//! what the plugin expects is shown by tests/releases.rs, where these releases run.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Found by name although no installed header declares them.
const UNDECLARED: [&str; 5] = [
    "slurm_step_layout_host_name",
    "slurm_conf_get_nodeaddr",
    "slurm_conf_lock",
    "slurm_conf_unlock",
    "slurm_get_srun_port_range",
];

/// Used where it is, and not in every supported release: since Slurm 23.11.
const OPTIONAL: [&str; 1] = ["spank_prepend_task_argv"];

/// This machine and the Debian trees, as the folder that holds their `usr`.
fn systems() -> Vec<PathBuf> {
    let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
    let mut systems = vec![PathBuf::from("/")];
    systems.extend(["trixie", "forky"].map(|suite| Path::new(&roots).join(suite)));
    systems
}

fn signatures() -> String {
    fs::read_to_string(common::root().join("tests/host/signatures.c")).unwrap()
}

/// The functions that src/spank/host.rs looks up.
fn looked_up() -> BTreeSet<String> {
    let host = fs::read_to_string(common::root().join("src/spank/host.rs")).unwrap();
    let names = host.split("find").skip(1).filter_map(|call| {
        // find(c"NAME") or find::<Type>(c"NAME")
        let (kind, rest) = call.split_once("(c\"")?;
        (kind.is_empty() || kind.starts_with("::<") && !kind.contains('(')).then_some(rest.split_once('"')?.0)
    });
    names.map(String::from).collect()
}

/// Compiles `source` against the Slurm headers of a system; `None`, said aloud, if
/// there are none. Only Slurm's headers are taken from it: they need no C library
/// but this machine's.
fn compile(system: &Path, source: &str) -> Option<Output> {
    let headers = system.join("usr/include/slurm");
    if !headers.join("spank.h").is_file() {
        println!("skipped: no slurm/spank.h in {}", headers.display());
        return None;
    }
    let name = system.file_name().map_or("here".into(), |name| name.to_string_lossy().into_owned());
    let include = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("abi-{name}-{:?}", std::thread::current().id()));
    let _ = fs::remove_dir_all(&include);
    fs::create_dir_all(&include).unwrap();
    std::os::unix::fs::symlink(&headers, include.join("slurm")).unwrap();
    let compiler = Command::new("gcc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-", "-I"])
        .arg(&include)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut compiler = match compiler {
        Ok(compiler) => compiler,
        Err(error) => {
            println!("skipped: gcc: {error}");
            return None;
        }
    };
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let output = compiler.wait_with_output().unwrap();
    let _ = fs::remove_dir_all(&include);
    Some(output)
}

#[test]
fn functions_structures_and_numbers_are_those_of_each_release() {
    for system in systems() {
        let Some(output) = compile(&system, &signatures()) else { continue };
        assert!(output.status.success(), "{}:\n{}", system.display(), String::from_utf8_lossy(&output.stderr));
    }
}

/// The check above would notice: each of these is how a release might differ.
#[test]
fn a_difference_in_a_type_a_field_or_a_number_is_found() {
    let changes = [
        ("node_info_msg_t **, char *, uint16_t", "node_info_msg_t **, char *, uint32_t", "slurm_load_node_single"),
        ("spank_t, const char *, char *, int", "spank_t, const char *, char *, size_t", "spank_getenv"),
        ("IS_WORD(job_id, JOB_ID_AT)", "IS_WORD(job_id, 8 - JOB_ID_AT)", "job_id lies elsewhere"),
        ("OPTION(cb, 3 * sizeof(void *) + 8)", "OPTION(cb, 3 * sizeof(void *) + 4)", "cb lies elsewhere"),
        ("NUMBER(S_TASK_ID, 11)", "NUMBER(S_TASK_ID, 10)", "S_TASK_ID has another number"),
    ];
    for (right, wrong, message) in changes {
        let source = signatures();
        assert!(source.contains(right), "{right}");
        let Some(output) = compile(Path::new("/"), &source.replace(right, wrong)) else { return };
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(message), "{wrong}: {text}");
    }
    // A function of newer releases, in the first tree of one that is there.
    for system in systems().iter().filter(|system| declares(system, OPTIONAL[0])) {
        let right = "spank_t, int, const char **";
        assert!(signatures().contains(right));
        let Some(output) = compile(system, &signatures().replace(right, "spank_t, int, char **")) else { return };
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(OPTIONAL[0]), "{}: {text}", system.display());
    }
}

#[test]
fn every_function_that_is_looked_up_has_its_type_checked() {
    let source = signatures();
    let calls = source.lines().filter_map(|line| line.strip_prefix("IS("));
    let mut checked: BTreeSet<String> = calls.filter_map(|call| Some(call.split_once(',')?.0.to_string())).collect();
    checked.extend(UNDECLARED.map(String::from));
    assert_eq!(looked_up(), checked);
}

/// srun, slurmd and slurmstepd find them there, and nowhere else.
#[test]
fn every_function_that_is_looked_up_is_exported_by_libslurmfull() {
    for system in systems() {
        let Some(library) = libslurmfull(&system) else {
            println!("skipped: no libslurmfull.so below {}", system.join("usr/lib").display());
            continue;
        };
        let symbols = match Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output() {
            Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
            Err(error) => return println!("skipped: nm: {error}"),
        };
        let functions: BTreeSet<&str> = symbols
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace().skip(1);
                (words.next() == Some("T")).then(|| words.next())?
            })
            .collect();
        assert!(functions.len() > 100, "{}: {symbols}", library.display());
        for name in looked_up() {
            if OPTIONAL.contains(&name.as_str()) && !declares(&system, &name) {
                continue;
            }
            assert!(functions.contains(name.as_str()), "{} has no {name}", library.display());
        }
    }
}

/// Whether the system's spank.h has the function. Without headers it counts as
/// one that has not.
fn declares(system: &Path, function: &str) -> bool {
    let header = fs::read_to_string(system.join("usr/include/slurm/spank.h")).unwrap_or_default();
    header.contains(&format!("{function}("))
}

/// Debian: /usr/lib/ARCHITECTURE/slurm-wlm; SchedMD's packages: /usr/lib/ARCHITECTURE/slurm, /usr/lib64/slurm.
fn libslurmfull(system: &Path) -> Option<PathBuf> {
    let mut folders = vec![system.join("usr/lib"), system.join("usr/lib64")];
    let entries = fs::read_dir(&folders[0]).ok()?;
    folders.extend(entries.flatten().map(|entry| entry.path()));
    folders
        .iter()
        .flat_map(|folder| ["slurm-wlm", "slurm"].map(|name| folder.join(name).join("libslurmfull.so")))
        .find(|file| file.is_file())
}
