//! What is linked into a library that root daemons load: few crates, known by
//! name, permissively licensed, no C library, no newer Rust than we promise.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Linked into the plugin.
const LINKED: &[&str] = &[
    // HMAC-SHA256, one file without dependencies.
    "hmac-sha256",
    "itoa",
    "libc",
    "memchr",
    "serde",
    "serde_core",
    "serde_json",
    "thiserror",
    "zmij",
    // The site file.
    "serde_spanned",
    "toml",
    "toml_datetime",
    "toml_parser",
    "winnow",
    // NCCL's topology file; it brings memchr.
    "roxmltree",
    // The node's log. syslog brings the time and hostname crates for what is not
    // used here; the linker leaves them out.
    "cfg-if",
    "deranged",
    "hostname",
    "log",
    "num-conv",
    "num_threads",
    "powerfmt",
    "syslog",
    "time",
    "time-core",
];
/// Procedural macros and what they are made of: run by the compiler, not linked.
const BUILD_TIME: &[&str] = &["proc-macro2", "quote", "serde_derive", "syn", "thiserror-impl", "unicode-ident"];

/// Licences that ask for a notice and nothing else.
const PERMISSIVE: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

const PLATFORM: &str = "x86_64-unknown-linux-gnu";

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--locked")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo writes UTF-8")
}

fn tree(package: &str) -> BTreeSet<String> {
    let text = cargo(&["tree", "-p", package, "-e", "normal", "--prefix", "none", "--target", PLATFORM]);
    text.lines().filter_map(|line| line.split(' ').next()).map(String::from).collect()
}

fn packages() -> BTreeMap<String, Vec<Value>> {
    let text = cargo(&["metadata", "--format-version", "1", "--filter-platform", PLATFORM]);
    let metadata: Value = serde_json::from_str(&text).expect("cargo writes JSON");
    let mut packages: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for package in metadata["packages"].as_array().expect("packages") {
        packages.entry(package["name"].as_str().expect("a name").into()).or_default().push(package.clone());
    }
    packages
}

#[test]
fn the_plugin_holds_these_crates_and_no_other() {
    let allowed: BTreeSet<String> = LINKED.iter().chain(BUILD_TIME).map(ToString::to_string).collect();
    let mut found = tree("palingenesis");
    found.remove("palingenesis");
    let added: Vec<_> = found.difference(&allowed).collect();
    assert!(
        added.is_empty(),
        "new in a library that root daemons load: {added:?}; if it is needed there, add it to the list in this test"
    );
    let gone: Vec<_> = allowed.difference(&found).collect();
    assert!(gone.is_empty(), "no longer used: {gone:?}; take it off the list in this test");
}

#[test]
fn build_time_crates_are_procedural_macros_or_their_parts() {
    // A crate that only macros use is compiled for the compiler, so it is not in
    // the tree without procedural macros.
    let text =
        cargo(&["tree", "-p", "palingenesis", "-e", "normal,no-proc-macro", "--prefix", "none", "--target", PLATFORM]);
    let linked: BTreeSet<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    let expected: BTreeSet<&str> = LINKED.iter().copied().chain(["palingenesis"]).collect();
    assert_eq!(linked, expected);
}

#[test]
fn no_dependency_brings_a_c_library() {
    let packages = packages();
    for name in tree("palingenesis") {
        for package in &packages[&name] {
            // `links` is how a build script declares the native library it links.
            assert!(package["links"].is_null(), "{name} links {}", package["links"]);
        }
    }
}

#[test]
fn every_licence_is_permissive() {
    let packages = packages();
    let mut names = tree("palingenesis");
    names.extend(tree("palingenesis-cli"));
    names.extend(tree("palingenesis-worker"));
    for name in names {
        for package in &packages[&name] {
            let licence = package["license"].as_str().unwrap_or_default();
            assert!(permissive(licence), "{name}: '{licence}'");
        }
    }
}

#[test]
fn no_dependency_needs_a_newer_rust_than_we_promise() {
    let packages = packages();
    let ours = version(packages["palingenesis"][0]["rust_version"].as_str().expect("rust-version is set"));
    for (name, versions) in &packages {
        for package in versions {
            if let Some(needed) = package["rust_version"].as_str() {
                assert!(version(needed) <= ours, "{name} {} needs Rust {needed}", package["version"]);
            }
        }
    }
}

fn version(text: &str) -> Vec<u32> {
    let mut numbers: Vec<u32> = text.split('.').map(|part| part.parse().expect("a number")).collect();
    numbers.resize(3, 0);
    numbers
}

/// An SPDX expression that can be met with permissive licences alone. `/` is
/// the old spelling of OR.
fn permissive(expression: &str) -> bool {
    let text = expression.trim();
    for (word, any) in [(" OR ", true), ("/", true), (" AND ", false)] {
        let parts = outside_parentheses(text, word);
        if parts.len() > 1 {
            return if any {
                parts.iter().any(|part| permissive(part))
            } else {
                parts.iter().all(|part| permissive(part))
            };
        }
    }
    match text.strip_prefix('(').and_then(|text| text.strip_suffix(')')) {
        Some(inner) => permissive(inner),
        None => PERMISSIVE.contains(&text),
    }
}

fn outside_parentheses<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ if depth == 0 && text[index..].starts_with(word) => {
                parts.push(&text[start..index]);
                start = index + word.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[test]
fn licence_expressions_are_understood() {
    for yes in ["MIT", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0", "MIT OR LGPL-2.1-or-later"] {
        assert!(permissive(yes), "{yes}");
    }
    for no in ["", "GPL-2.0", "MPL-2.0", "MIT AND GPL-3.0-only", "(MIT OR GPL-2.0) AND MPL-2.0"] {
        assert!(!permissive(no), "{no}");
    }
}

/// The programs are built while tests run. Were the library built another way for
/// them, its file would be replaced under the Slurm of tests that load it.
#[test]
fn the_programs_need_no_other_build_of_the_library_than_the_tests() {
    let built = cargo(&["build", "--workspace", "--bins", "--message-format=json"]);
    let messages = built.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let library = |message: &Value| {
        message["reason"] == "compiler-artifact"
            && message["target"]["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "cdylib"))
    };
    let fresh: Vec<bool> = messages.filter(library).map(|message| message["fresh"] == true).collect();
    assert_eq!(fresh, [true]);
}
