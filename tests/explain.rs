//! `palingenesis explain`: what it prints for described steps, and that in a
//! real step it prints what the step's tasks get.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{Said, Sandbox};
use serde_json::Value;

/// Rank 17 of 8, 8 and 4 tasks.
const LAST_NODE: [&str; 6] = ["--nodelist", "gpu[01-03]", "--tasks-per-node", "8(x2),4", "--rank", "17"];

/// Values that no two steps share.
const OF_THE_STEP: [&str; 2] = ["MASTER_PORT", "PALINGENESIS_SET"];

/// `palingenesis explain` in nothing but `environment`.
fn explain(environment: &[(&str, &str)], arguments: &[&str]) -> Said {
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().envs(environment.iter().copied()).arg("explain").args(["--root", "/nonexistent"]);
    command.args(arguments);
    Said::run(command)
}

fn json(said: &Said) -> Value {
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}:\n{}{}", said.out, said.err))
}

/// The variables of the JSON form.
fn variables(plan: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().expect("a string").to_string();
    plan["env"].as_array().expect("an array").iter().map(|v| (text(&v["name"]), text(&v["value"]))).collect()
}

fn names(plan: &Value, list: &str) -> Vec<String> {
    let entries = plan[list].as_array().expect("an array");
    entries.iter().map(|entry| entry["name"].as_str().expect("a string").to_string()).collect()
}

/// Blocks of 8, 8 and 4 hold ranks 0-7, 8-15 and 16-19 (srun(1),
/// --distribution=block); the first node of the list holds rank 0.
#[test]
fn an_uneven_step_as_json() {
    let said = explain(&[], &[&LAST_NODE[..], &["--json", "--job-id", "4711", "--step-id", "3"]].concat()).ok();
    assert_eq!(said.err, "");
    assert!(said.out.ends_with("}\n") && said.out.lines().count() == 1);
    let plan = json(&said);
    let keys: Vec<&String> = plan.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["binding", "env", "left", "step", "unset", "warnings"]);
    let step = &plan["step"];
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
        assert_eq!(step[key], value, "{key}");
    }
    assert_eq!((step["node"].as_str(), step["master_addr"].as_str()), (Some("gpu03"), Some("gpu01")));
    for variable in plan["env"].as_array().expect("an array") {
        let keys: Vec<&String> = variable.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["name", "origin", "value", "why"]);
        assert!(!variable["why"].as_str().unwrap_or_default().is_empty(), "{variable}");
    }
    let variables = variables(&plan);
    for (name, value) in [
        ("RANK", "17"),
        ("WORLD_SIZE", "20"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("NODE_RANK", "2"),
        ("MASTER_ADDR", "gpu01"),
        ("NCCL_DEBUG", "WARN"),
    ] {
        assert_eq!(variables[name], value, "{name}");
    }
    assert_eq!(variables["MASTER_PORT"], step["master_port"].to_string());
    let port = step["master_port"].as_u64().expect("a port");
    assert!((20000..=31999).contains(&port), "{port}");
}

/// Columns, heading and order of the table. Its reasons are the plan's.
#[test]
fn an_uneven_step_as_a_table() {
    let said = explain(&[("NCCL_DEBUG", "INFO")], &[&LAST_NODE[..], &["--spec", "port=29500"]].concat()).ok();
    assert!(!said.out.contains('\u{1b}'), "colour codes without a terminal");
    let start: Vec<String> = said
        .out
        .lines()
        .map(|line| {
            line.split("  ").filter(|cell| !cell.is_empty()).take(3).map(str::trim).collect::<Vec<_>>().join("|")
        })
        .collect();
    let expected = [
        "palingenesis: step 1.0, native shape, profile default, fabric auto: rank 17 of 20 on gpu03 (local 1 of 4, node 2 of 3)",
        "VARIABLE|VALUE|ORIGIN",
        "RANK|17|step",
        "WORLD_SIZE|20|step",
        "LOCAL_RANK|1|step",
        "LOCAL_WORLD_SIZE|4|step",
        "NODE_RANK|2|step",
        "GROUP_RANK|2|step",
        "MASTER_ADDR|gpu01|step",
        "MASTER_PORT|29500|option",
    ];
    assert_eq!(start[..expected.len()], expected);
    let title = start.iter().position(|row| row == "LEFT ALONE|VALUE|WHY").expect("something is left alone");
    let kept = "NCCL_DEBUG|INFO|yours, kept (the profile would set WARN)";
    assert!(start[title..].iter().any(|row| row == kept), "{}", said.out);
}

#[test]
fn the_users_values_are_kept_and_named() {
    let plan = json(&explain(&[("NCCL_DEBUG", "INFO")], &[&LAST_NODE[..], &["--json"]].concat()).ok());
    assert!(names(&plan, "left").contains(&"NCCL_DEBUG".to_string()));
    assert!(!variables(&plan).contains_key("NCCL_DEBUG"));
    let plan = json(&explain(&[("MASTER_PORT", "24242")], &[&LAST_NODE[..], &["--json"]].concat()).ok());
    assert_eq!(variables(&plan)["MASTER_PORT"], "24242");
}

#[test]
fn the_command_and_the_machine_below_root_count() {
    let name = "CUDA_DEVICE_MAX_CONNECTIONS";
    let of = |arguments: &[&str]| {
        variables(&json(&explain(&[], &[arguments, &["--json"], &LAST_NODE[..]].concat()).ok())).get(name).cloned()
    };
    assert_eq!(of(&[]).as_deref(), Some("1"));
    let fsdp = explain(&[], &[&["--json"], &LAST_NODE[..], &["--", "python3", "train_fsdp.py"]].concat()).ok();
    assert!(names(&json(&fsdp), "left").contains(&name.to_string()), "{}", fsdp.out);

    let root = common::target().join("explain-test");
    let gpu = root.join("proc/driver/nvidia/gpus/0000:18:00.0");
    fs::create_dir_all(&gpu).expect("target is writable");
    fs::write(gpu.join("information"), "Model: \t\t NVIDIA B200\n").expect("target is writable");
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().args(["explain", "--json", "--root"]).arg(&root).args(LAST_NODE);
    assert_eq!(variables(&json(&Said::run(command).ok()))[name], "32");
}

#[test]
fn spec_comes_from_srun_s_variables_too() {
    let port = |environment: &[(&str, &str)], arguments: &[&str]| {
        let said = explain(environment, &[&LAST_NODE[..], &["--json"], arguments].concat()).ok();
        variables(&json(&said))["MASTER_PORT"].clone()
    };
    assert_eq!(port(&[("PALINGENESIS", "port=21000")], &[]), "21000");
    assert_eq!(port(&[("PALINGENESIS_OPT_PORT", "22000")], &[]), "22000");
    assert_eq!(port(&[("PALINGENESIS", "port=21000")], &["--spec", "port=23000"]), "23000");
    assert!(explain(&[], &["--spec", "help"]).ok().out.contains("iface"));
    let off = explain(&[("PALINGENESIS", "off")], &LAST_NODE).ok();
    assert!(off.out.contains("off") && !off.out.contains("RANK"), "{}", off.out);
    let off = explain(&[("PALINGENESIS", "off")], &[&LAST_NODE[..], &["--json"]].concat()).ok();
    assert_eq!(json(&off)["step"], Value::Null);
}

#[test]
fn secrets_of_the_environment_are_printed_nowhere() {
    let secrets = [
        ("HF_TOKEN", "s3cr3t-hf"),
        ("WANDB_API_KEY", "s3cr3t-wandb"),
        ("AWS_SECRET_ACCESS_KEY", "s3cr3t-aws"),
        ("PALINGENESIS_STORE_KEY", "s3cr3t-store"),
    ];
    for form in [&["--json"][..], &[]] {
        let said = explain(&secrets, &[&LAST_NODE[..], form].concat()).ok();
        assert!(!said.out.contains("s3cr3t") && !said.err.contains("s3cr3t"), "{}{}", said.out, said.err);
        assert!(said.out.contains("gpu01"));
    }
}

/// The batch script has ranks of its own that mean nothing, and no SLURM_STEP_*
/// (<https://github.com/EleutherAI/gpt-neox/pull/1069>). These are its variables
/// in Slurm 22.05.8 after `sbatch -N3`.
#[test]
fn in_a_batch_script_it_says_that_there_are_no_ranks_and_how_to_get_them() {
    let batch = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOBID", "7"),
        ("SLURM_JOB_NODELIST", "n[1-3]"),
        ("SLURM_NODELIST", "n[1-3]"),
        ("SLURM_JOB_NUM_NODES", "3"),
        ("SLURM_NNODES", "3"),
        ("SLURM_TASKS_PER_NODE", "1(x3)"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURMD_NODENAME", "n1"),
    ];
    for environment in [&batch[..], &[]] {
        let said = explain(environment, &[]).ok();
        assert!(said.out.contains("srun --palingenesis"), "{}", said.out);
        assert_eq!((said.out.lines().count(), said.err.as_str()), (1, ""));
        assert!(!said.out.contains("RANK"), "{}", said.out);
        let said = explain(environment, &["--json"]).ok();
        let plan = json(&said);
        assert_eq!((&plan["step"], plan["env"].as_array().map(Vec::len)), (&Value::Null, Some(0)));
        assert!(said.err.contains("srun --palingenesis"), "{}", said.err);
    }
}

#[test]
fn mistakes_are_one_line_and_a_code() {
    let step = ["--nodelist", "gpu[01-03]", "--tasks-per-node", "8"];
    let table: [(&[&str], i32, &[&str]); 10] = [
        (&["--nodelist", "gpu[01-03]", "--tasks-per-node", "8", "--rank", "24"], 1, &["rank 24", "24 ranks"]),
        (&["--nodelist", "gpu[01-", "--tasks-per-node", "8"], 1, &["--nodelist", "gpu[01-"]),
        (&["--nodelist", "gpu[01-03]", "--tasks-per-node", "8x3"], 1, &["--tasks-per-node", "8x3"]),
        (&["--nodelist", "gpu[01-03]", "--tasks-per-node", "8(x2)"], 1, &["3 nodes", "of 2"]),
        (&["--nodelist", "", "--tasks-per-node", "8"], 1, &["--nodelist", "empty"]),
        (&[&step[..], &["--spec", "prot=1"]].concat(), 78, &["'prot'", "did you mean 'port'?"]),
        (&[&step[..], &["--spec", "megatorn"]].concat(), 78, &["did you mean 'megatron'?"]),
        (&[&step[..], &["--spec", "port=80"]].concat(), 78, &["below 1024"]),
        (&[&step[..], &["--spec", "master=127.0.0.1"]].concat(), 78, &["127.0.0.1", "loopback"]),
        (&[&step[..], &["--spec", "master=gpu02", "--rank", "8"]].concat(), 78, &["gpu02", "rank 0 runs on gpu01"]),
    ];
    for (arguments, code, words) in table {
        for form in [&[][..], &["--json"]] {
            let said = explain(&[], &[arguments, form].concat());
            assert_eq!((said.code, said.out.as_str()), (code, ""), "{arguments:?}: {}", said.err);
            assert!(said.err.starts_with("palingenesis: error: "), "{}", said.err);
            assert_eq!(said.err.lines().count(), 1, "{}", said.err);
            for word in words {
                assert!(said.err.contains(word), "{word}: {}", said.err);
            }
        }
    }
    for arguments in [&["--rank", "-1"][..], &["--rank", "1"], &["--nodelist", "a"], &["--rank", "x"]] {
        assert_eq!(explain(&[], arguments).code, 2, "{arguments:?}");
    }
    let malformed = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "x"), ("SLURM_STEP_NODELIST", "n1")];
    let said = explain(&malformed, &[]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("SLURM_STEP_ID=x"), "{}", said.err);
    let said = explain(&[("MASTER_PORT", "http")], &LAST_NODE);
    assert_eq!(said.code, 78);
    assert!(said.err.contains("MASTER_PORT=http"), "{}", said.err);
}

#[test]
fn a_reader_that_leaves_early_is_no_error_and_a_full_disk_is() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let run = |out: std::process::Stdio| {
        let mut command = Command::new(common::program("palingenesis"));
        command.env_clear().arg("explain").args(LAST_NODE).stdout(out);
        let output = command.output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run(writer.into()), (Some(0), String::new()));
    let full = fs::File::options().write(true).open("/dev/full").expect("Linux has /dev/full");
    let (code, text) = run(full.into());
    assert_eq!(code, Some(1));
    assert!(text.starts_with("palingenesis: error: cannot write to standard output"), "{text}");
    let line = format!(
        "set -o pipefail; {} explain {} | head -1",
        common::program("palingenesis").display(),
        "--nodelist n[1-2] --tasks-per-node 2"
    );
    let mut command = Command::new("bash");
    command.args(["-c", &line]);
    let said = Said::run(command).ok();
    assert_eq!((said.out.lines().count(), said.err.as_str()), (1, ""));
}

#[test]
fn version_and_help_promise_what_there_is() {
    let run = |argument: &str| {
        let mut command = Command::new(common::program("palingenesis"));
        command.env_clear().arg(argument);
        Said::run(command)
    };
    let version = run("--version").ok().out;
    // One command for every Slurm release: the plugin's is told by doctor.
    assert_eq!(version, concat!("palingenesis ", env!("CARGO_PKG_VERSION"), "\n"));
    let help = run("--help").ok().out;
    assert!(help.contains("Not there yet") && help.contains("diagnose"), "{help}");
    assert_eq!(run("diagnose").code, 2);
}

/// A step's tasks get what explain printed, since both come from one plan. One
/// machine plays both nodes here, so the names resolve as they do on the login
/// host; on a cluster each node's own resolver is asked.
#[test]
fn in_a_real_step_it_prints_what_the_tasks_get() {
    let plugstack = format!("required {}", common::library().display());
    let Some(sandbox) = Sandbox::up("explain", &["--nodes", "2", "--plugstack", &plugstack]) else {
        return;
    };
    let program: PathBuf = common::program("palingenesis");
    let program = program.display();
    // Uneven: two tasks on the first node and one on the second, which is meant.
    let step = "-N2 -n3 -m block --overcommit";
    let meant = "export PALINGENESIS_OPT_UNEVEN=off";

    // A file for each task, since srun mixes what tasks write at the same time.
    // Each holds explain's line and then the environment, separated by NUL.
    let run = |flag: &str| -> Vec<(Value, BTreeMap<String, String>)> {
        let task = format!("'{program} explain --json; env -0'");
        let said = sandbox
            .run(&format!("{meant}; cd $(mktemp -d) && srun -Q {flag} {step} -o %t bash -c {task} && cat 0 1 2"))
            .ok();
        assert_eq!(said.err, "");
        split(&said.out)
    };

    // Without the flag it prints what a step with the flag would get. Only the
    // port differs, since that is another step.
    let (plain, flagged) = (run(""), run("--palingenesis"));
    assert_eq!((plain.len(), flagged.len()), (3, 3));
    for ((plan, before), (_, task)) in plain.iter().zip(&flagged) {
        assert!(!before.contains_key("RANK"));
        for (name, value) in variables(plan).iter().filter(|(name, _)| !OF_THE_STEP.contains(&name.as_str())) {
            assert_eq!(task.get(name), Some(value), "{name}");
        }
        assert_eq!(plan["step"]["world_size"], 3);
    }
    // In the very step, the port too.
    for (rank, (plan, task)) in flagged.iter().enumerate() {
        for (name, value) in variables(plan) {
            assert_eq!(task.get(&name), Some(&value), "{name}");
        }
        assert_eq!(plan["step"]["rank"], rank);
        assert_eq!(task["SLURM_PROCID"], rank.to_string());
        assert_eq!(plan["warnings"], Value::Array(Vec::new()));
    }

    // A real batch script, with its output in a file that all nodes see.
    let batch = |options: &str, script: &str| {
        let line = format!("cd $(mktemp -d) && sbatch -Q -W -N2 {options} -o out --wrap '{script}'; cat out");
        sandbox.run(&line).ok().out
    };
    let out = batch("", &format!("{program} explain; echo code $?; {program} explain --json"));
    assert!(out.contains("outside a step") && out.contains("\ncode 0\n"), "{out}");
    assert!(out.contains(r#""step":null"#), "{out}");

    // What was given to sbatch holds for the steps, and for what explain says.
    let described = "--nodelist n[1-2] --tasks-per-node 1";
    let out = batch(
        "--palingenesis=port=24242",
        &format!("{program} explain {described}; srun -N2 -n2 bash -c \"echo task \\$MASTER_PORT\""),
    );
    assert_eq!(out.lines().filter(|line| *line == "task 24242").count(), 2, "{out}");
    assert!(out.lines().any(|line| line.contains("MASTER_PORT") && line.contains(" 24242 ")), "{out}");
}

/// The tasks' plans and environments, in order of rank.
fn split(out: &str) -> Vec<(Value, BTreeMap<String, String>)> {
    let mut tasks = Vec::new();
    let mut rest = out;
    while let Some((plan, after)) = rest.split_once('\n') {
        // The environment lasts until the next plan begins.
        let end = after.find("\0{\"step\":").map_or(after.len(), |at| at + 1);
        let pairs = after[..end].split('\0').filter_map(|pair| pair.split_once('='));
        let environment = pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect();
        tasks.push((serde_json::from_str(plan).expect("JSON"), environment));
        rest = &after[end..];
    }
    tasks
}
