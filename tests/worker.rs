//! palingenesis-worker says which rank it was given, and takes the arguments that the plugin
//! hands over. What it does with a configuration is tested beside it, in worker/tests.

mod common;

use std::process::Command;

use common::{Said, Sandbox};

const RANKS: [(&str, &str); 7] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("NODE_RANK", "1"),
    ("MASTER_ADDR", "n1"),
    ("MASTER_PORT", "23456"),
];

fn worker(environment: &[(&str, &str)], arguments: &[&str]) -> Said {
    let mut command = Command::new(common::program("palingenesis-worker"));
    command.env_clear().envs(environment.iter().copied()).args(arguments);
    Said::run(command)
}

fn with(name: &str, value: Option<&'static str>) -> Vec<(&'static str, &'static str)> {
    let mut ranks = RANKS.to_vec();
    ranks.retain(|(other, _)| *other != name);
    ranks
        .extend(value.and_then(|value| RANKS.iter().find(|(known, _)| *known == name).map(|(name, _)| (*name, value))));
    ranks
}

#[test]
fn one_line_per_process() {
    let said = worker(&RANKS, &[]).ok();
    assert_eq!(said.out, "rank 3 of 8: local rank 1 of 4, node rank 1, master n1:23456\n");
    assert_eq!(said.err, "");
    let said = worker(&with("MASTER_ADDR", Some("fd00::1")), &[]).ok();
    assert!(said.out.ends_with(" master [fd00::1]:23456\n"), "{}", said.out);
}

#[test]
fn what_is_missing_or_malformed_is_named_with_the_cure() {
    for (name, _) in RANKS {
        for value in [None, Some(""), Some("\u{1b}[31m")] {
            if name == "MASTER_ADDR" && value.is_some_and(|value| !value.is_empty()) {
                continue;
            }
            let said = worker(&with(name, value), &[]);
            assert_eq!((said.code, said.out.as_str()), (78, ""), "{name}={value:?}");
            assert_eq!(said.err.lines().count(), 1, "{}", said.err);
            assert!(said.err.contains(name) && said.err.contains("srun --palingenesis"), "{}", said.err);
            assert!(!said.err.contains('\u{1b}'));
        }
    }
    for (name, value) in [("RANK", "8"), ("LOCAL_RANK", "4"), ("MASTER_PORT", "65536"), ("WORLD_SIZE", "0")] {
        let said = worker(&with(name, Some(value)), &[]);
        assert_eq!(said.code, 78, "{name}={value}");
        assert!(said.err.contains(&format!("{name}={value}")), "{}", said.err);
    }
}

#[test]
fn version_help_and_what_is_no_configuration() {
    assert_eq!(worker(&[], &["--version"]).ok().out, concat!("palingenesis-worker ", env!("CARGO_PKG_VERSION"), "\n"));
    assert!(worker(&[], &["--help"]).ok().out.contains("Exit codes:"));
    let said = worker(&RANKS, &["/nowhere/train.toml"]);
    assert_eq!((said.code, said.out.as_str()), (78, ""), "{}", said.err);
    assert!(said.err.contains("/nowhere/train.toml") && said.err.lines().count() == 1, "{}", said.err);
    assert_eq!(worker(&RANKS, &["--bogus"]).code, 2);
}

#[test]
fn an_argument_that_the_plugin_handed_over_comes_first() {
    let mut ranks = RANKS.to_vec();
    ranks.push(("PALINGENESIS_WORKER_ARG", "--version"));
    assert!(worker(&ranks, &["train.toml"]).ok().out.starts_with("palingenesis-worker "));
    ranks.push(("PALINGENESIS_WORKER_ARG", ""));
    let said = worker(&ranks, &["train.toml"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("<CONFIG>"), "{}", said.err);
}

/// What a refusal on a node must do: no task runs its program, every node says
/// why, the step fails with the code of a refusal, and the nodes stay idle.
#[test]
fn in_a_real_step_every_task_has_its_rank_or_does_not_run() {
    let plugstack = format!("required {}", common::library().display());
    let Some(sandbox) = Sandbox::up("worker", &["--nodes", "2", "--plugstack", &plugstack]) else {
        return;
    };
    let program = common::program("palingenesis-worker");
    let run = |flag: &str| sandbox.run(&format!("srun -l -N2 -n2 {flag} {}", program.display()));
    let said = run("--palingenesis=port=23456").ok();
    let mut lines: Vec<&str> = said.out.lines().collect();
    lines.sort_unstable();
    let line = |rank| format!("{rank}: rank {rank} of 2: local rank 0 of 1, node rank {rank}, master n1:23456");
    assert_eq!(lines, [line(0), line(1)]);

    // The loopback interface joins no two nodes.
    for flag in ["--palingenesis=iface=lo", "--palingenesis=iface=no0"] {
        let said = run(flag);
        assert_eq!((said.code, said.out.as_str()), (78, ""), "{}", said.err);
        for task in 0..2 {
            let start = format!("{task}: palingenesis: error: iface=");
            assert_eq!(said.err.lines().filter(|line| line.starts_with(&start)).count(), 1, "{}", said.err);
        }
    }
    assert_eq!(run("").code, 78, "without the flag there are no ranks");
    // Some seconds of "completing" are Slurm's own.
    let states = "for i in $(seq 50); do sinfo -h -o %T | grep -q compl || break; sleep 0.2; done; sinfo -h -o %T";
    assert_eq!(sandbox.run(states).ok().out, "idle\n");
}
