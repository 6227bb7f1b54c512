//! The C interface: the committed header is the one cbindgen makes, and programs
//! in C and Python get right answers through it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

const PROGRAM: &str = r#"
#include <palingenesis.h>
#include <stdio.h>

int main(void) {
    char *text = NULL;
    int code = palingenesis_layout_json(&text);
    printf("%d %s\n", code, text);
    palingenesis_free(text);
    palingenesis_free(NULL);
    printf("%d\n", palingenesis_layout_json(NULL));
    return 0;
}
"#;

const PYTHON: &str = r#"
import ctypes, json, sys
lib = ctypes.CDLL(sys.argv[1])
lib.palingenesis_free.argtypes = [ctypes.c_void_p]
text = ctypes.c_void_p()
code = lib.palingenesis_layout_json(ctypes.byref(text))
answer = ctypes.string_at(text).decode()
lib.palingenesis_free(text)
lib.palingenesis_free(None)
print(code, answer)
print(lib.palingenesis_layout_json(None))
"#;

/// Rank 17 of 8, 8 and 4 tasks in blocks: ranks 0-7, 8-15 and 16-19, so it is the
/// second task of the third node (srun(1), --distribution=block). The variables
/// are those that slurmstepd sets for a task (srun(1), OUTPUT ENVIRONMENT VARIABLES).
const STEP: [(&str, &str); 9] = [
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "3"),
    ("SLURM_PROCID", "17"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "2"),
    ("SLURM_STEP_NUM_TASKS", "20"),
    ("SLURM_STEP_TASKS_PER_NODE", "8(x2),4"),
    ("SLURM_STEP_NODELIST", "gpu[01-03]"),
    ("SLURMD_NODENAME", "gpu03"),
];

/// The keys that the header names.
const DOCUMENTED: [&str; 16] = [
    "job_id",
    "step_id",
    "shape",
    "profile",
    "fabric",
    "nodes",
    "node_list",
    "world_size",
    "rank",
    "local_rank",
    "local_world_size",
    "node_rank",
    "node",
    "master_addr",
    "master_port",
    "ports",
];

/// What the program with this environment prints: the first call's code and
/// text, and the code of the call with NULL.
fn answer(mut command: Command, environment: &[(&str, &str)]) -> (i32, String, i32, Output) {
    command.env_clear().env("PATH", "/usr/bin:/bin").envs(environment.iter().copied());
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    let mut lines = text.lines();
    let (code, answer) = lines.next().and_then(|line| line.split_once(' ')).expect("a code and an answer");
    let null = lines.next().expect("a second code");
    assert_eq!(lines.next(), None, "the answer is one line: {text}");
    (code.parse().expect("a number"), answer.to_string(), null.parse().expect("a number"), output)
}

fn folder() -> PathBuf {
    let folder = common::target().join("capi-test");
    fs::create_dir_all(&folder).expect("target is writable");
    folder
}

/// The C program, compiled strictly and linked to the library as cargo built it.
fn c_program() -> &'static Path {
    static PROGRAM_PATH: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM_PATH.get_or_init(|| {
        let library = common::library();
        let at = common::link_folder(&library).to_str().expect("UTF-8").to_string();
        let (source, program) = (folder().join("layout.c"), folder().join("layout"));
        fs::write(&source, PROGRAM).expect("target is writable");
        let status = Command::new("gcc")
            .args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wstrict-prototypes", "-Werror", "-g"])
            .arg("-I")
            .arg(common::root().join("include"))
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .args(["-L", &at, "-lpalingenesis", &format!("-Wl,-rpath,{at}")])
            .status()
            .expect("gcc is there");
        assert!(status.success());
        program
    })
}

fn python() -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", PYTHON]).arg(common::library());
    command
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn the_committed_header_is_what_cbindgen_makes() {
    let root = common::root();
    let mut made = Vec::new();
    cbindgen::Builder::new()
        .with_config(cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is valid"))
        .with_src(root.join("src/capi.rs"))
        .generate()
        .expect("cbindgen reads src/capi.rs")
        .write(&mut made);
    let made = String::from_utf8(made).expect("UTF-8");
    let header = root.join("include/palingenesis.h");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        fs::write(&header, &made).expect("include is writable");
    }
    let committed = fs::read_to_string(&header).unwrap_or_default();
    assert_eq!(committed, made, "write it again with: UPDATE_HEADER=1 cargo test --test capi");
    for key in DOCUMENTED {
        assert!(made.contains(key), "{key}");
    }
    for other in ["slurm_spank", "plugin_"] {
        assert!(!made.contains(other), "{other}");
    }
}

#[test]
fn the_header_is_also_cpp() {
    let header = common::root().join("include/palingenesis.h");
    let Ok(output) =
        Command::new("g++").args(["-x", "c++", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]).arg(header).output()
    else {
        println!("skipped: no g++ here");
        return;
    };
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn c_and_python_get_the_layout_of_their_task() {
    for command in [Command::new(c_program()), python()] {
        let (code, text, null, _) = answer(command, &STEP);
        assert_eq!((code, null), (0, -2), "{text}");
        let layout = json(&text);
        for key in DOCUMENTED {
            assert!(layout.get(key).is_some(), "{key}: {text}");
        }
        for (key, value) in [
            ("job_id", 4711),
            ("step_id", 3),
            ("nodes", 3),
            ("world_size", 20),
            ("rank", 17),
            ("local_rank", 1),
            ("local_world_size", 4),
            ("node_rank", 2),
        ] {
            assert_eq!(layout[key], value, "{key}");
        }
        // Under block distribution the first node of the list holds rank 0.
        assert_eq!((&layout["node"], &layout["master_addr"]), (&json(r#""gpu03""#), &json(r#""gpu01""#)));
        assert_eq!(layout["master_port"], layout["ports"][0]);
    }
}

#[test]
fn all_ranks_of_a_step_get_one_master() {
    let masters: Vec<(String, u64)> = [("0", "0", "0", "gpu01"), ("17", "1", "2", "gpu03")]
        .into_iter()
        .map(|(rank, local, node, name)| {
            let mut step = STEP.to_vec();
            for (variable, value) in step.iter_mut() {
                match *variable {
                    "SLURM_PROCID" => *value = rank,
                    "SLURM_LOCALID" => *value = local,
                    "SLURM_NODEID" => *value = node,
                    "SLURMD_NODENAME" => *value = name,
                    _ => {}
                }
            }
            let layout = json(&answer(Command::new(c_program()), &step).1);
            (layout["master_addr"].to_string(), layout["master_port"].as_u64().expect("a port"))
        })
        .collect();
    assert_eq!(masters[0], masters[1]);
}

/// A batch script has SLURM_PROCID and SLURM_LOCALID too, but is no rank
/// (<https://github.com/EleutherAI/gpt-neox/pull/1069>).
#[test]
fn outside_a_step_the_message_says_how_to_launch() {
    let batch =
        [("SLURM_JOB_ID", "4711"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_TASKS_PER_NODE", "1(x3)")];
    for environment in [&[][..], &batch[..]] {
        for command in [Command::new(c_program()), python()] {
            let (code, text, null, _) = answer(command, environment);
            assert_eq!((code, null), (-1, -2));
            assert!(text.contains("srun --palingenesis"), "{text}");
        }
    }
}

#[test]
fn malformed_variables_are_named() {
    let mut step = STEP.to_vec();
    step.retain(|(name, _)| *name != "SLURM_STEP_TASKS_PER_NODE");
    step.push(("SLURM_STEP_TASKS_PER_NODE", "8(x"));
    let (code, text, ..) = answer(Command::new(c_program()), &step);
    assert_eq!(code, -1);
    assert!(text.contains("SLURM_STEP_TASKS_PER_NODE"), "{text}");
}

#[test]
fn valgrind_finds_neither_leaks_nor_bad_accesses() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: no valgrind here");
        return;
    }
    for environment in [&STEP[..], &[]] {
        let mut command = Command::new("valgrind");
        command
            .args([
                "--vgdb=no",
                "--leak-check=full",
                "--errors-for-leak-kinds=definite,indirect",
                "--error-exitcode=99",
            ])
            .arg(c_program());
        let (.., output) = answer(command, environment);
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(report.contains("ERROR SUMMARY: 0 errors"), "{report}");
        let lost_nothing = report.contains("definitely lost: 0 bytes") || report.contains("no leaks are possible");
        assert!(lost_nothing, "{report}");
    }
}
