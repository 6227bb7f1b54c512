//! Every check has values it finds and values it does not; the settings decide
//! what becomes of a finding.

use crate::facts::rdma::LinkLayer;
use crate::facts::rdma::tests::rdma_port;
use std::collections::{BTreeMap, BTreeSet};

use super::examples::{Example, caches_examples, env, nccl, nccl_examples, plan_examples, torch, torch_examples};
use super::*;
use crate::config::Source;

/// Everything people get wrong that was found when the readers' sources and
/// public reports were gone through.
const KNOWN_MISTAKES: &[&str] = &[
    "ib-timeout-range",
    "ib-timeout-low",
    "ib-retry",
    "nccl-bool-word",
    "nccl-octal",
    "nccl-trailing",
    "gid-on-ib",
    "gid-since-221",
    "gdr-level-int",
    "level-case",
    "gdr-dead-name",
    "ifname-missing",
    "ifname-grammar",
    "ifname-lo",
    "hca-missing",
    "hca-prefix",
    "hca-netdev",
    "hca-mixed",
    "ib-disabled",
    "p2p-disabled",
    "shm-disabled",
    "nvls-forced-off",
    "mnnvl-no-imex",
    "algo-proto",
    "debug-file",
    "debug-word",
    "subsys-no-info",
    "sockets-product",
    "ctas",
    "nthreads",
    "phantom",
    "version-gate",
    "torch-rename",
    "async-off",
    "avoid-record",
    "c10d-bool",
    "alloc-both",
    "alloc-keys",
    "alloc-vs-ub",
    "maxconn-range",
    "maxconn-fsdp",
    "maxconn-tp",
    "maxconn-blackwell",
    "launch-blocking",
    "kill-on-bad-exit",
    "gpus-per-task",
    "gpus-none",
    "gpus-fewer",
    "cvd-order",
    "ranks-stale",
    "elastic-leak",
    "launcher-shape",
    "master-loopback",
    "port-range",
    "dist-not-block",
    "uneven",
    "memlock",
    "stack-unlimited",
    "nofile",
    "shm-size",
    "cpus",
    "cache-nfs",
    "shared-local",
    "efa-obsolete",
    "net-missing",
    "gloo-grammar",
    "ucx-dev",
    "proxy-jax",
    "deepspeed-five",
    "lightning-ntpn",
    "kill-on-bad",
    "secrets-argv",
    "hostid",
    "empty-rank",
];

#[test]
fn each_known_mistake_is_found_in_a_bad_example_and_not_in_a_good_one_or_says_why_it_cannot_be() {
    let of_node = [launch_examples::examples(), node_examples::examples()].concat();
    let examples: Vec<_> = [nccl_examples(), torch_examples(), caches_examples(), plan_examples(), of_node].concat();
    let mut seen: BTreeMap<&str, BTreeSet<bool>> = BTreeMap::new();
    for (id, bad, found) in &examples {
        assert!(ids().any(|known| known == *id), "{id} is no check");
        let of_it: Vec<_> = found.iter().filter(|warning| warning.id == *id).collect();
        assert_eq!(!of_it.is_empty(), *bad, "{id}, bad: {bad}: {of_it:#?}");
        seen.entry(id).or_default().insert(*bad);
    }
    let reasons: BTreeMap<&str, &str> = UNDECIDED.iter().copied().collect();
    for id in KNOWN_MISTAKES.iter().copied().chain(rules().map(|rule| rule.id)) {
        let both = seen.get(id).is_some_and(|kinds| kinds.len() == 2);
        let reason = reasons.get(id).is_some_and(|reason| reason.len() > 20);
        assert!(both != reason, "{id}: examples: {:?}, reason: {:?}", seen.get(id), reasons.get(id));
    }
    for id in reasons.keys() {
        assert!(KNOWN_MISTAKES.contains(id), "{id} is no known mistake");
    }
}

#[test]
fn ids_are_words_and_stand_once() {
    let mut known = BTreeSet::new();
    for id in ids() {
        assert!(known.insert(id), "{id} stands twice");
        assert!(id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'), "{id}");
    }
    for rule in rules() {
        assert!(!rule.looks_for.is_empty() && !rule.looks_for.contains('\n'), "{}", rule.id);
    }
}

#[track_caller]
fn holds(example: &Example) {
    let Example { id, scene, severity, words } = example;
    let found = scene.look();
    let of_it: Vec<&Warning> = found.iter().filter(|warning| warning.id == *id).collect();
    let Some(severity) = severity else {
        assert!(of_it.is_empty(), "{id} of {:?} {:?}: {of_it:#?}", scene.values, scene.command);
        return;
    };
    let [warning] = of_it.as_slice() else { panic!("{id} of {:?} {:?}: {of_it:#?}", scene.values, scene.command) };
    assert_eq!(warning.severity, *severity, "{warning:#?}");
    let rule = rules().find(|rule| rule.id == *id).unwrap();
    // As bad as the rule says at most; errors come first in the order.
    assert!(worse(rule.severity) >= worse(warning.severity), "{id}: {:?} but {:?}", rule.severity, warning.severity);
    let line = crate::report::warning_line(warning);
    for word in *words {
        assert!(line.contains(word), "'{word}' is missing in {line}");
    }
    assert_eq!(line.matches('\n').count(), 1, "{line:?}");
    assert!(!line.contains("s3cr3t"), "{line}");
    assert!(!warning.message.is_empty() && !warning.cure.is_empty(), "{warning:#?}");
    assert!(!line.contains("hf_abc") && !line.contains("0123456789abcdef"), "{line}");
}

fn worse(severity: Severity) -> u8 {
    match severity {
        Severity::Info => 0,
        Severity::Warning => 1,
        Severity::Error => 2,
    }
}

#[test]
fn what_nccl_makes_of_its_values_is_told_with_a_cure() {
    nccl().iter().for_each(holds);
}

#[test]
fn what_pytorch_and_others_make_of_their_values_is_told_with_a_cure() {
    torch().iter().for_each(holds);
}

#[test]
fn nothing_is_found_in_an_empty_environment_nor_in_what_we_set() {
    assert_eq!(env(&[]).look(), []);
    for profile in ["", "fsdp", "megatron", "deepspeed", "jax", "worker", "debug", "deterministic"] {
        let plan = crate::plan::tests::World::new("n[1-2]", "4(x2)", 0).plan(profile).unwrap();
        assert_eq!(plan.warnings, [], "profile {profile}");
    }
}

/// The examples of the site file that admins start from, looked at as an admin's
/// values are, and as a user's.
#[test]
fn nothing_is_found_in_the_examples_of_the_site_file() {
    let text = include_str!("../../../etc/palingenesis.toml");
    let examples: Vec<String> = text
        .lines()
        .filter_map(|line| line.trim_start_matches('#').split_once(" = "))
        .filter(|(name, _)| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_'))
        .map(|(name, value)| format!("{name}={}", value.trim_matches('"')))
        .collect();
    assert!(examples.len() >= 4, "{examples:?}");
    for from in [From::User, From::Site("palingenesis.toml:1".into())] {
        let mut scene = env(&[]).from(from, &examples.iter().map(String::as_str).collect::<Vec<_>>());
        let port = |number| rdma_port(&format!("mlx5_{number}"), LinkLayer::Ethernet);
        scene.node.rdma = Some((0..4).map(port).collect());
        assert_eq!(scene.look(), [], "{examples:?}");
    }
}

#[test]
fn the_settings_decide_what_becomes_of_a_finding() {
    let found = |spec: &str| {
        let scene = env(&["NCCL_IB_TIMEOUT=120", "TORCH_NCCL_BLOCKING_WAIT=maybe", "NCCL_TREE_THRESHOLD=0"]).spec(spec);
        let found: Vec<(&str, Severity)> = scene.look().iter().map(|warning| (warning.id, warning.severity)).collect();
        found
    };
    use Severity::{Error, Info, Warning};
    let (timeout, word, dead) = ("ib-timeout-range", "c10d-bool", "gdr-dead-name");
    assert_eq!(found(""), [(timeout, Warning), (dead, Info), (word, Error)]);
    assert_eq!(found("checks=error"), found(""));
    assert_eq!(found("checks=warn"), [(timeout, Warning), (dead, Info), (word, Warning)]);
    assert_eq!(found("checks=off"), []);
    assert_eq!(found("ib-timeout-range=off"), [(dead, Info), (word, Error)]);
    assert_eq!(found("ib-timeout-range=error"), [(timeout, Error), (dead, Info), (word, Error)]);
    assert_eq!(found("gdr-dead-name=error,c10d-bool=warn"), [(timeout, Warning), (dead, Error), (word, Warning)]);
    assert_eq!(found("checks=off,c10d-bool=error"), [(word, Error)]);
    assert_eq!(found("checks=warn,c10d-bool=error"), [(timeout, Warning), (dead, Info), (word, Error)]);
}

/// The same for findings of the plan itself, which no table holds.
#[test]
fn the_settings_decide_what_becomes_of_the_plan_s_own_findings() {
    let plan = |spec: &str| crate::plan::tests::World::new("n[1-2]", "1(x2)", 1).export(&[("RANK", "7")]).plan(spec);
    let ids = |spec: &str| plan(spec).unwrap().warnings.iter().map(|warning| warning.id).collect::<Vec<_>>();
    assert_eq!(ids(""), ["ranks-stale"]);
    assert!(ids("checks=off").is_empty() && ids("ranks-stale=off").is_empty());
    let refusal = plan("ranks-stale=error").unwrap_err().to_string();
    assert!(refusal.contains("RANK") && refusal.contains("ranks-stale=warn would start it"), "{refusal}");
}

/// The text of a value may be anything: nothing panics, and a line is a line.
#[test]
fn no_value_makes_a_check_panic_or_break_its_line() {
    let pieces =
        ["^", "=", ",", ":", "0", "08", "120", "-1", "true", "mlx5_0", "lo", " ", "\u{1b}[31m", "\n", "ä", "[", "]"];
    let variables: Vec<&str> = crate::plan::catalog::entries().map(|entry| entry.name).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 8) as usize % below
    };
    for _ in 0..300 * crate::plan::tests::rounds() {
        let mut scene = env(&[]).spec("checks=warn");
        for _ in 0..20 {
            let name = variables[next(variables.len())];
            let value: String = (0..next(6)).map(|_| pieces[next(pieces.len())]).collect();
            scene = scene.from(From::User, &[&format!("{name}={value}")]);
        }
        for warning in scene.look() {
            let line = crate::report::warning_line(&warning);
            assert!(line.trim_end().chars().all(|c| !c.is_control()), "{line:?}");
        }
    }
    // Settings of another grammar are refused as before.
    assert!(Settings::parse("ib-timeout-range=maybe", Source::Option).is_err());
}

/// Paths stand whole, so that they can be copied.
#[test]
fn the_longest_path_of_a_cache_is_told_whole() {
    use crate::facts::directories::{Fault, Purpose, What};
    let path = format!("/{}", "d".repeat(1023));
    assert_eq!(crate::config::check_directory(&path), Ok(()));
    let mut scene = env(&[]).spec(&format!("cache={path}")).directory(Purpose::Shared, &path, |found| {
        found.fault = Some(Fault { at: found.root.clone(), what: What::NotMounted });
    });
    scene.task.container = crate::facts::task::Container::Inside;
    let found = scene.look();
    let warning = found.iter().find(|warning| warning.id == "cache-unusable").unwrap();
    assert!(warning.cure.contains(&format!("--container-mounts={path}:{path}")), "{}", warning.cure);
}

/// Linux passes values of up to 128 KiB; srun and each task look at all of them.
#[test]
fn long_and_odd_values_cost_no_time_and_no_crash() {
    use crate::plan::catalog;
    use crate::plan::tests::World;
    let long = |piece: &str| piece.repeat(100_000 / piece.len());
    let values = [
        long("a"),
        long("mlx5_0:1,"),
        (0..15_000).map(|number| format!("x{number},")).collect(),
        (0..10_000).map(|number| format!("k{number}:{number},")).collect(),
        long(","),
        long("^="),
        long("9"),
        long("["),
        long("\u{e9}\n"),
        long("\u{fffd}"),
        long("0x"),
        long(" "),
        long("1:2:"),
        long("-1e9."),
        "\u{0}".into(),
        "-".into(),
        "=".into(),
        "^".into(),
        ":".into(),
        "-9223372036854775808".into(),
        "18446744073709551616".into(),
        "\u{661}\u{1d7d9}".into(),
    ];
    let names: Vec<String> = catalog::entries().map(|entry| entry.name.replace('*', "X")).collect();
    let others = ["SLURM_GTIDS", "SLURM_JOB_NAME", "PET_NNODES"].map(String::from);
    for value in &values {
        let shown = crate::config::printable(value);
        let start = processor_time();
        let mut world = World::new("n[1-2]", "2(x2)", 0);
        for name in names.iter().chain(&others) {
            world.environment.set(name.as_str(), value.as_str());
        }
        world.command = vec!["torchrun".into(), format!("--nnodes={value}"), value.clone()];
        let settings = crate::config::Settings::parse("checks=warn,launch=agent", Source::Option).unwrap();
        let values: Vec<Value> =
            names.iter().map(|name| Value { name: name.clone(), value: value.clone(), from: From::User }).collect();
        let subject = Subject { command: &world.command, nodes: Some(2), ..Subject::of_values(&values, &settings) };
        for warning in look(&subject, &[Phase::Environment, Phase::Launch, Phase::Node]) {
            let line = crate::report::warning_line(&warning);
            let length = line.chars().count();
            assert!(length < 2 * LONGEST + 100, "{}: {length}", warning.id);
        }
        let text = match world.plan("checks=warn") {
            Ok(plan) => crate::report::table(&plan),
            Err(refusal) => refusal.to_string(),
        };
        assert!(text.len() < 1 << 20, "{}: {}", shown, text.len());
        // Without optimization, and beside other tests.
        let taken = processor_time() - start;
        assert!(taken.as_secs() < 30, "{taken:?} for all at {shown}");
    }
}

/// What this thread has used, whatever else the machine does (proc(5), schedstat).
fn processor_time() -> std::time::Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
    std::time::Duration::from_nanos(nanos.unwrap_or(0))
}
