//! palingenesis-worker says which rank it was given.

mod common;

use std::process::Command;

use common::Said;

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
fn version_help_and_nothing_else() {
    assert_eq!(worker(&[], &["--version"]).ok().out, concat!("palingenesis-worker ", env!("CARGO_PKG_VERSION"), "\n"));
    assert!(worker(&[], &["--help"]).ok().out.contains("Training does not exist yet"));
    let said = worker(&RANKS, &["train.toml"]);
    assert_eq!((said.code, said.out.as_str()), (2, ""));
    assert!(said.err.contains("'train.toml'"), "{}", said.err);
}
