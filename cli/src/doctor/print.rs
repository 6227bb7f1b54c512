//! The checks as text for people and as one JSON object.

use palingenesis::report::one_line;
use serde_json::{Value, json};

use super::rules::{Check, Verdict, overall};

/// One line a check with the cure below it, and a line that sums up.
pub fn text(what: &str, checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = one_line(&format!("palingenesis {}: {what}", env!("CARGO_PKG_VERSION")));
    for check in checks {
        let Check { name, verdict, text: found, cure, source } = check;
        text.push_str(&one_line(&format!("  {:<7}  {name:<width$}  {found}  ({source})", verdict.word())));
        if let Some(cure) = cure {
            text.push_str(&one_line(&format!("  {:<7}  {:<width$}  cure: {cure}", "", "")));
        }
    }
    text.push_str(&one_line(&format!("palingenesis: {}", summary(checks))));
    text
}

fn summary(checks: &[Check]) -> String {
    let count = |verdict: Verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let several = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    let begin = match overall(checks) {
        Verdict::Ok | Verdict::Note => "this host is right",
        Verdict::Warning => "this host is not quite right",
        Verdict::Error => "this host is not right",
        Verdict::Unknown => "it could not be found out whether this host is right",
    };
    format!(
        "{begin}: {}, {}, {}, {} unknown",
        several(count(Verdict::Error), "error"),
        several(count(Verdict::Warning), "warning"),
        several(count(Verdict::Note), "note"),
        count(Verdict::Unknown)
    )
}

/// One object.
pub fn json(checks: &[Check]) -> Value {
    let check = |check: &Check| {
        json!({
            "name": check.name,
            "verdict": check.verdict.word(),
            "text": check.text,
            "cure": check.cure,
            "source": check.source,
        })
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "verdict": overall(checks).word(),
        "checks": checks.iter().map(check).collect::<Vec<_>>(),
    })
}
