//! What is known of environment variables: that each name people use has an
//! entry, through `palingenesis explain NAME`, and that docs/variables.md is the
//! page that is made from them.
//!
//! The names stand in tests/fixtures/variable-names.txt, collected from the
//! readers' documentation and source, not from the catalog.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::Said;
use palingenesis::plan::{catalog, checks};
use serde_json::Value;

/// `palingenesis explain` in nothing but `environment`.
fn explain(environment: &[(&str, &str)], arguments: &[&str]) -> Said {
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().envs(environment.iter().copied()).arg("explain").args(arguments);
    Said::run(command)
}

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn names() -> Vec<String> {
    let text = fs::read_to_string(file("tests/fixtures/variable-names.txt")).expect("the names");
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from).collect()
}

#[test]
fn each_name_that_people_use_is_explained() {
    let names = names();
    let distinct: BTreeSet<&String> = names.iter().collect();
    assert_eq!(distinct.len(), names.len(), "a name stands twice in the fixture");
    let mut explained = 0;
    for some in names.chunks(50) {
        let said = explain(&[], &[&["--json"], &some.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat()).ok();
        assert_eq!(said.err, "");
        let entries: Vec<Value> = serde_json::from_str(&said.out).expect("an array");
        assert_eq!(entries.len(), some.len());
        for (name, entry) in some.iter().zip(&entries) {
            let found = entry["name"].as_str().expect("a name");
            let family = found.strip_suffix('*').is_some_and(|start| name.starts_with(start));
            assert!(found == name || family, "{name}: {found}");
            assert!(entry["meaning"].as_str().is_some_and(|text| !text.is_empty()), "{name}");
            assert!(entry["source"].as_str().is_some_and(|text| !text.is_empty()), "{name}");
            explained += 1;
        }
    }
    println!("{explained} names explained, {} entries in the catalog", catalog::entries().count());
    assert!(explained >= 200, "{explained}");
}

/// The text form of some, through the program too.
#[test]
fn an_entry_says_what_matters() {
    for (name, expected) in [
        ("NCCL_IB_DISABLE", &["true counts as 0", "values    0 or 1"][..]),
        ("NCCL_NET_GDR_LEVEL", &["5 means SYS", "PXB"]),
        ("NCCL_P2P_DISABLE", &["2 and true change nothing"]),
        ("NCCL_ASYNC_ERROR_HANDLING", &["instead   TORCH_NCCL_ASYNC_ERROR_HANDLING", "PyTorch"]),
        ("NCCL_IB_GID_INDEX", &["since 2.21 leave it unset"]),
        ("NCCL_TIMEOUT", &["read by nobody", "init_process_group(timeout=…)"]),
        ("NCCL_IB_GDR_LEVEL", &["read by nobody", "until 2.3", "instead   NCCL_NET_GDR_LEVEL"]),
        ("PYTORCH_ALLOC_CONF", &["since 2.9"]),
        ("GLOO_SOCKET_IFNAME", &["whole names"]),
        ("CUDA_DEVICE_MAX_CONNECTIONS", &["number, 1 to 32", "FSDP"]),
    ] {
        let said = explain(&[], &[name]).ok();
        assert_eq!(said.err, "");
        assert!(said.out.starts_with(&format!("{name}, read by ")), "{}", said.out);
        for part in expected {
            assert!(said.out.contains(part), "{name}: {part:?} is not in\n{}", said.out);
        }
    }
}

/// <https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>: 60 was taken
/// for seconds. NCCL's guide: 4.096 us * 2^value; 4.096e-6 * 2^22 = 17.18.
#[test]
fn the_ib_timeout_in_seconds() {
    let said = explain(&[], &["NCCL_IB_TIMEOUT"]).ok();
    for line in ["20  4.3 s per try, 30 s over 7 tries", "22  17.2 s per try, 120 s over 7 tries", "1 to 31"] {
        assert!(said.out.contains(line), "{}", said.out);
    }
    let said = explain(&[], &["--json", "NCCL_IB_TIMEOUT"]).ok();
    let entries: Value = serde_json::from_str(&said.out).expect("JSON");
    let rows = entries[0]["seconds"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["value"] == 22).expect("22");
    assert!((row["per_try"].as_f64().expect("a number") - 17.179_869).abs() < 1e-5, "{row}");
    assert!((row["total"].as_f64().expect("a number") - 120.259_084).abs() < 1e-5, "{row}");
}

/// <https://github.com/llm-d/llm-d-benchmark/pull/1862>: names that nobody reads.
#[test]
fn unknown_names_are_told_with_what_was_meant() {
    for (name, meant) in [
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBG", "NCCL_DEBUG"),
        ("NCCL_EXCLUDE_IB_HCA", "NCCL_IB_HCA"),
        ("NCCL_SOCKET_IFACE", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_DEBUG_SUBSYSTEM", "NCCL_DEBUG_SUBSYS"),
    ] {
        let said = explain(&[], &[name]);
        assert_eq!((said.code, said.out.as_str()), (1, ""));
        assert_eq!(said.err, format!("palingenesis: error: {name} is no variable known here; did you mean {meant}?\n"));
    }
    let said = explain(&[], &["EDITOR", "NCCL_DEBUG", "PAGER"]);
    assert_eq!(said.code, 1);
    assert!(said.out.starts_with("NCCL_DEBUG, read by NCCL"), "{}", said.out);
    assert_eq!(
        said.err,
        "palingenesis: error: EDITOR is no variable known here\npalingenesis: error: PAGER is no variable known here\n"
    );
}

#[test]
fn the_value_of_this_shell_is_shown_unless_it_is_secret() {
    let said = explain(&[("NCCL_IB_TIMEOUT", "120")], &["NCCL_IB_TIMEOUT"]).ok();
    assert!(said.out.contains("\n  set here  120\n"), "{}", said.out);
    let said = explain(&[], &["NCCL_IB_TIMEOUT"]).ok();
    assert!(!said.out.contains("set here"), "{}", said.out);
    let said = explain(&[("HF_TOKEN", "hf_abc")], &["HF_TOKEN"]).ok();
    assert!(said.out.contains("\n  set here  (hidden)\n") && !said.out.contains("hf_abc"), "{}", said.out);
}

/// An id of a check is explained as a variable is.
#[test]
fn a_check_is_explained_by_its_id() {
    let said = explain(&[], &["ib-timeout-range", "NCCL_DEBUG"]).ok();
    let check = said.out.split("\n\n").next().expect("the first");
    for part in [
        "ib-timeout-range, a check",
        "looks for NCCL_IB_TIMEOUT outside 1 to 31",
        "a warning",
        "ib-timeout-range=off",
        "[rules] of the site file",
        "PALINGENESIS_OPT_IB_TIMEOUT_RANGE",
    ] {
        assert!(check.contains(part), "{part:?} is not in\n{check}");
    }
    assert!(said.out.contains("\n\nNCCL_DEBUG, read by NCCL\n"), "{}", said.out);
    let ids: Vec<&str> = checks::ids().collect();
    let said = explain(&[], &ids).ok();
    assert_eq!(said.out.matches(", a check\n").count(), ids.len());
    let said = explain(&[], &["--json", "launcher-shape", "RANK"]).ok();
    let entries: Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!((&entries[0]["severity"], &entries[1]["name"]), (&"error".into(), &"RANK".into()));
    // A key of --palingenesis in brackets, as nic-down, is explained too.
    let said = explain(&[], &["nic-down", "rails"]).ok();
    for part in ["nic-down, a key of --palingenesis\n", "warn|fail", "PALINGENESIS_OPT_NIC_DOWN=", "\n\nrails, a key"] {
        assert!(said.out.contains(part), "{part:?} is not in\n{}", said.out);
    }
    let said = explain(&[], &["--json", "nic-down"]).ok();
    assert_eq!(serde_json::from_str::<Value>(&said.out).expect("JSON")[0]["kind"], "key");
    // A mistake that no check finds says why.
    let said = explain(&[], &["elastic-leak"]).ok();
    assert!(said.out.contains("TORCHELASTIC_*"), "{}", said.out);
    let said = explain(&[], &["ib-timeout-rage"]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("did you mean ib-timeout-range?"), "{}", said.err);
}

/// Names are no command, and a command is no list of names.
#[test]
fn names_do_not_go_with_a_step() {
    for arguments in [
        &["RANK", "--", "python"][..],
        &["RANK", "--nodelist", "a", "--tasks-per-node", "1"],
        &["RANK", "--spec", "help"],
        &["RANK", "--catalog"],
    ] {
        assert_eq!(explain(&[], arguments).code, 2, "{arguments:?}");
    }
}

/// `make docs` writes the page.
#[test]
fn the_page_of_variables_is_up_to_date() {
    let said = explain(&[], &["--catalog"]).ok();
    assert_eq!(said.out, catalog::markdown());
    let page = file("docs/variables.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&page, &said.out).expect("docs/variables.md is written");
    }
    let now = fs::read_to_string(&page).unwrap_or_default();
    assert!(now == said.out, "docs/variables.md is not what the catalog says: run `make docs`");
    // Each row has as many cells as its heading.
    let mut cells = 0;
    for line in now.lines() {
        let bars = line.replace("\\|", "").matches('|').count();
        if line.starts_with("|---") {
            cells = bars;
        } else if line.starts_with("| ") && cells != 0 {
            assert_eq!(bars, cells, "{line}");
        } else if !line.starts_with('|') {
            cells = 0;
        }
    }
}
