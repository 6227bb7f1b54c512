//! Compares `facts::hostlist` with the `scontrol` command of the installed
//! Slurm on random lists. Without a usable `scontrol` the tests say so on
//! standard error and check nothing.
//!
//! Only well-formed lists are made: those for which the parser's documentation
//! promises Slurm's answer. Left out on purpose, because the parser refuses or
//! reads them otherwise: unclosed and stray brackets, signs, spaces and missing
//! ends in ranges, empty lists, control characters, newlines (a separator since
//! 24.11 only), names over 255 bytes, and trailing digits past 2^64-1.
//!
//! `PALINGENESIS_SOAK=N` multiplies the number of cases;
//! `PALINGENESIS_SEED=N` repeats a run that failed.

use palingenesis::facts::hostlist::{count, expand, first};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

/// The `scontrol` of this machine with a configuration that needs no daemon.
struct Scontrol {
    config: PathBuf,
}

impl Scontrol {
    /// `None`, with the reason on standard error, where it cannot be used.
    fn find(test: &str) -> Option<Self> {
        let config =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("hostlist-{test}-{}.conf", std::process::id()));
        std::fs::write(&config, "ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n").unwrap();
        let scontrol = Scontrol { config };
        let answer = scontrol.command("hostnames", "a[1-2]").output();
        let reason = match answer {
            Ok(output) if output.stdout == b"a1\na2\n" => return Some(scontrol),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        eprintln!("SKIPPED {test}: the command scontrol cannot be used here: {reason}");
        None
    }

    fn command(&self, what: &str, list: &str) -> Command {
        let mut command = Command::new("scontrol");
        command.env("SLURM_CONF", &self.config).args(["show", what, list]);
        command
    }

    /// The lines of `scontrol show WHAT LIST`; `None` for an invalid list.
    fn show(&self, what: &str, list: &str) -> Option<Vec<String>> {
        let output = self.command(what, list).output().unwrap();
        assert!(output.status.success(), "{list:?}: {output:?}");
        if String::from_utf8_lossy(&output.stderr).contains("Invalid hostlist") {
            return None;
        }
        let text = String::from_utf8(output.stdout).unwrap();
        Some(text.lines().map(str::to_owned).collect())
    }
}

impl Drop for Scontrol {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.config);
    }
}

/// Xorshift; prints its seed when a test fails.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn new(default_seed: u64) -> Self {
        let seed = std::env::var("PALINGENESIS_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .filter(|&seed| seed != 0)
            .unwrap_or(default_seed);
        Random { seed, state: seed }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % limit
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with PALINGENESIS_SEED={}", self.seed);
        }
    }
}

/// How often to repeat something that is done `cases` times in a plain run.
fn soaked(cases: usize) -> usize {
    let factor = std::env::var("PALINGENESIS_SOAK").ok().and_then(|factor| factor.parse().ok());
    cases * factor.unwrap_or(1)
}

const STEMS: &[&str] =
    &["n", "node", "node-", "gpu_a", "rack1-", "c0", "r00x", "r0x", "N", "d05-", "x.y", "a.b.", "host-a"];

/// A number of few digits, sometimes with leading zeros.
fn number(random: &mut Random) -> (u64, String) {
    let limit = [10, 12, 110, 1100, 20_000][random.below(5) as usize];
    let value = random.below(limit);
    let width = match random.below(3) {
        0 => 1 + random.below(6) as usize,
        _ => 1,
    };
    (value, format!("{value:0width$}"))
}

fn bracket(random: &mut Random, longest: u64) -> String {
    let ranges: Vec<String> = (0..1 + random.below(3))
        .map(|_| {
            let (low, mut range) = number(random);
            if !random.one_in(3) {
                let high = low + random.below(longest);
                let width = match random.below(4) {
                    0 => random.below(7) as usize,
                    _ => range.len(),
                };
                range = format!("{range}-{high:0width$}");
            }
            range
        })
        .collect();
    format!("[{}]", ranges.join(","))
}

/// One name as it can stand in a list.
fn term(random: &mut Random, suffixes: bool) -> String {
    let mut term = random.pick(STEMS).to_owned();
    let brackets = match random.below(8) {
        0 | 1 => 0,
        2..5 => 1,
        5 => 2,
        6 => 3,
        _ => 4,
    };
    for at in 0..brackets {
        if at > 0 {
            term += random.pick(&["", "-", "n", "s0", "_7."]);
        }
        term += &bracket(random, if brackets == 1 { 12 } else { 3 });
    }
    if brackets == 0 {
        if !random.one_in(3) {
            term += &number(random).1;
        }
    } else if suffixes && random.one_in(2) {
        term += random.pick(&["-ib", ".x", "n", "-0", ".site.example"]);
    }
    term
}

fn list(random: &mut Random, suffixes: bool) -> String {
    let mut list = String::new();
    for at in 0..1 + random.below(5) {
        if at > 0 {
            list += random.pick(&[",", ",", ",", " ", "\t", ",,", ", "]);
        }
        list += &term(random, suffixes);
    }
    list
}

#[test]
fn random_lists_expand_as_scontrol_show_hostnames_does() {
    let Some(scontrol) = Scontrol::find("hostnames") else {
        return;
    };
    let mut random = Random::new(0x5eed_0001);
    for _ in 0..soaked(400) {
        let list = list(&mut random, false);
        let expected = scontrol.show("hostnames", &list);
        let names = expand(&list).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(count(&list), Ok(names.len()), "{list:?}");
        assert_eq!(first(&list).as_ref(), Ok(&names[0]), "{list:?}");
        assert_eq!(Some(names), expected, "{list:?}");
    }
}

/// Slurm reads text after the last bracket since 23.11. Where it refuses it,
/// the names before that text must still be Slurm's.
#[test]
fn text_after_the_last_bracket_is_read_as_newer_releases_do() {
    let Some(scontrol) = Scontrol::find("suffix") else {
        return;
    };
    let mut random = Random::new(0x5eed_0002);
    for _ in 0..soaked(100) {
        let stem = random.pick(STEMS).to_owned() + &bracket(&mut random, 5);
        let suffix = random.pick(&["-ib", ".x", "n", "-0", ".site.example"]);
        let list = format!("{stem}{suffix},{}", term(&mut random, true));
        let names = expand(&list).unwrap_or_else(|error| panic!("{error}"));
        match scontrol.show("hostnames", &list) {
            Some(expected) => assert_eq!(names, expected, "{list:?}"),
            None => {
                let bare = scontrol.show("hostnames", &stem).unwrap();
                let expected: Vec<String> = bare.iter().map(|name| format!("{name}{suffix}")).collect();
                assert_eq!(names[..expected.len()], expected, "{list:?}");
            }
        }
    }
}

/// What Slurm itself writes, from plain names, leads back to these names.
#[test]
fn random_hosts_survive_a_list_written_by_slurm() {
    let Some(scontrol) = Scontrol::find("hostlist") else {
        return;
    };
    let mut random = Random::new(0x5eed_0003);
    for case in 0..soaked(120) {
        let stems: Vec<&str> = (0..1 + random.below(3)).map(|_| random.pick(STEMS)).collect();
        let mut hosts: Vec<String> = Vec::new();
        for _ in 0..1 + random.below(40) {
            let stem = random.pick(&stems);
            let infix = random.pick(&["", "", "1-", "2s"]);
            let (low, written) = number(&mut random);
            let width = written.len();
            for value in low..=low + random.below(4) {
                let suffix = if random.one_in(20) { "-ib" } else { "" };
                hosts.push(format!("{stem}{infix}{value:0width$}{suffix}"));
            }
        }
        let written = scontrol.show("hostlist", &hosts.join(",")).unwrap();
        let [written] = written.as_slice() else {
            panic!("{hosts:?} gave {written:?}");
        };
        assert_eq!(expand(written).as_ref(), Ok(&hosts), "{written:?}");
        if case % 4 == 0 {
            let expected = scontrol.show("hostnames", written).unwrap();
            assert_eq!(hosts, expected, "{written:?}");
        }

        let distinct: BTreeSet<String> = hosts.into_iter().collect();
        let joined: Vec<&str> = distinct.iter().map(String::as_str).collect();
        let sorted = scontrol.show("hostlistsorted", &joined.join(",")).unwrap();
        let names = expand(&sorted[0]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(names.len(), distinct.len(), "{sorted:?}");
        assert_eq!(BTreeSet::from_iter(names.iter()), distinct.iter().collect());
        if case % 4 == 0 {
            assert_eq!(Some(names), scontrol.show("hostnames", &sorted[0]), "{sorted:?}");
        }
    }
}
