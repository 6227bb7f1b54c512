//! Pages that name tests: what they name is there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The names of a file's tests.
fn tests_of(text: &str) -> Vec<&str> {
    let after = text.split("#[test]").skip(1);
    after.filter_map(|text| text.split_once("fn ")?.1.split_once('(')).map(|(name, _)| name).collect()
}

/// Each row of a table in docs/security.md says which test shows it: FILE: `name`, `name`; FILE: …
#[test]
fn each_row_of_the_security_page_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let mut named = 0;
    let mut files: BTreeMap<String, String> = BTreeMap::new();
    let (_, tables) = page.split_once("## What a hostile user can try").expect("the page has its tables");
    let (tables, _) = tables.split_once("## Limits").expect("the limits come last");
    for row in tables.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| input |")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let [_, _, _, tests] = cells[..] else { panic!("not four cells: {row}") };
        for part in tests.split("; ") {
            let (file, names) = part.trim().split_once(": ").unwrap_or_else(|| panic!("no test: {row}"));
            let text = files.entry(file.to_string()).or_insert_with(|| {
                fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
            });
            for name in names.split(", ") {
                let name = name.trim_matches('`');
                assert!(tests_of(text).contains(&name), "{file} has no test {name}");
                named += 1;
            }
        }
    }
    assert!(named > 80, "{named} tests are named: are these the tables?");
}
