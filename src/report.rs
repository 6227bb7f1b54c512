//! A plan as text: the one table that `--palingenesis=show` and `palingenesis
//! explain` print, and the one JSON form. Decides nothing.

use std::fmt::Write;

use crate::plan::{Note, Plan, Severity, Warning};

/// Values longer than this are cut in the table; the JSON form has all of them.
const LONGEST_VALUE: usize = 40;

/// Stands for a secret's value.
const HIDDEN: &str = "(hidden)";

/// The whole plan as aligned text, ending in a newline.
pub fn table(plan: &Plan) -> String {
    let mut text = heading(plan);
    if let Some(launch) = &plan.launch {
        let argument = launch.argument.as_deref().map(without_secret).unwrap_or_default();
        let argument = shortened(&crate::config::printable(&argument));
        let row =
            [crate::facts::program::shown(&launch.program), argument, launch.how.name().into(), launch.why.clone()];
        aligned(&mut text, ["STARTED", "ARGUMENT", "HOW", "WHY"], &[row]);
    }
    let rows: Vec<[String; 3]> = plan
        .binding
        .decisions
        .iter()
        .map(|decision| {
            let value = decision.value.as_deref().map_or("-".into(), crate::config::printable);
            [decision.what.to_string(), value, decision.why.clone()]
        })
        .collect();
    if !rows.is_empty() {
        aligned(&mut text, ["BOUND", "TO", "WHY"], &rows);
    }
    let rows: Vec<[String; 4]> = plan
        .env
        .iter()
        .map(|variable| {
            let value = shortened(&masked(&variable.name, &variable.value));
            [variable.name.clone(), value, variable.origin.name().into(), variable.why.clone()]
        })
        .collect();
    aligned(&mut text, ["VARIABLE", "VALUE", "ORIGIN", "WHY"], &rows);
    removed(&mut text, &plan.unset);
    left(&mut text, &plan.left);
    for warning in &plan.warnings {
        text.push_str(&warning_line(warning));
    }
    text
}

/// The whole plan as one JSON object, values uncut.
///
/// # Errors
/// None that is known; serde_json's signature has one.
pub fn json(plan: &Plan) -> serde_json::Result<String> {
    let mut plan = plan.clone();
    for variable in plan.env.iter_mut().filter(|variable| is_secret(&variable.name)) {
        variable.value = HIDDEN.into();
    }
    for note in plan.left.iter_mut().filter(|note| note.value.is_some() && is_secret(&note.name)) {
        note.value = Some(HIDDEN.into());
    }
    if let Some(launch) = &mut plan.launch {
        launch.argument = launch.argument.as_deref().map(without_secret);
    }
    serde_json::to_string(&plan)
}

/// One line for one warning, ending in a newline.
pub fn warning_line(warning: &Warning) -> String {
    let severity = match warning.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Info => "note",
    };
    one_line(&format!("palingenesis: {severity}: {}; {} [{}]", warning.message, warning.cure, warning.id))
}

/// Text as one line, ending in a newline. What people wrote is made safe where it
/// is put in; names of variables, files and devices are so here: none may move a
/// terminal's cursor or make a second line.
pub fn one_line(text: &str) -> String {
    let mut line = safe(text.trim_end_matches('\n'));
    line.push('\n');
    line
}

fn safe(text: &str) -> String {
    text.chars().map(crate::config::visible).collect()
}

/// Stands for a line that srun has told, so that rank 0 need not tell it again.
pub fn mark(line: &str) -> u32 {
    crate::plan::marks::hash(line)
}

/// Names whose values are never printed.
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    name.ends_with("_TOKEN")
        || name.ends_with("_KEY")
        || name.ends_with("_NONCE")
        || ["PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL"].iter().any(|word| name.contains(word))
        || name.starts_with("AWS_")
}

/// A word of the command; of `--hf-token=VALUE` the name only.
fn without_secret(word: &str) -> String {
    match word.split_once('=') {
        Some((name, _)) if is_secret(&name.replace('-', "_")) => format!("{name}={HIDDEN}"),
        _ => word.into(),
    }
}

fn masked(name: &str, value: &str) -> String {
    if is_secret(name) { HIDDEN.into() } else { crate::config::printable(value) }
}

fn shortened(value: &str) -> String {
    match value.char_indices().nth(LONGEST_VALUE) {
        Some((cut, _)) => format!("{}…", &value[..cut]),
        None => value.into(),
    }
}

fn heading(plan: &Plan) -> String {
    let step = &plan.step;
    one_line(&format!(
        "palingenesis: step {}.{}, {} shape, profile {}, fabric {}: {} {} of {} on {} (local {} of {}, node {} of {})",
        step.job_id,
        step.step_id,
        step.shape.name(),
        step.profile,
        step.fabric,
        if step.shape.tasks_are_ranks() { "rank" } else { "task" },
        step.rank,
        step.world_size,
        step.node,
        step.local_rank,
        step.local_world_size,
        step.node_rank,
        step.nodes,
    ))
}

fn removed(text: &mut String, notes: &[Note]) {
    if !notes.is_empty() {
        let rows: Vec<[String; 2]> = notes.iter().map(|note| [note.name.clone(), note.why.clone()]).collect();
        aligned(text, ["REMOVED", "WHY"], &rows);
    }
}

fn left(text: &mut String, notes: &[Note]) {
    if !notes.is_empty() {
        let value = |note: &Note| note.value.as_ref().map_or("-".into(), |value| shortened(&masked(&note.name, value)));
        let rows: Vec<[String; 3]> =
            notes.iter().map(|note| [note.name.clone(), value(note), note.why.clone()]).collect();
        aligned(text, ["LEFT ALONE", "VALUE", "WHY"], &rows);
    }
}

fn aligned<const N: usize>(text: &mut String, titles: [&str; N], rows: &[[String; N]]) {
    let mut widths = titles.map(|title| title.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let rows: Vec<[String; N]> = rows.iter().map(|row| std::array::from_fn(|column| safe(&row[column]))).collect();
    let mut line = |cells: [&str; N]| {
        let mut line = String::from(" ");
        for (cell, width) in cells.iter().zip(widths) {
            // Writing to a String cannot fail.
            let _ = write!(line, " {cell:<width$} ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(titles);
    for row in &rows {
        line(std::array::from_fn(|column| row[column].as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_known_by_name() {
        for name in [
            "HF_TOKEN",
            "WANDB_API_KEY",
            "AWS_ACCESS_KEY_ID",
            "DB_PASSWORD_FILE",
            "gh_token",
            "PALINGENESIS_STORE_KEY",
            "SLURM_PALINGENESIS_NONCE",
        ] {
            assert!(is_secret(name), "{name}");
            assert_eq!(masked(name, "abc"), "(hidden)");
        }
        assert!(!is_secret("NCCL_DEBUG") && !is_secret("TOKENIZERS_PARALLELISM"));
    }

    #[test]
    fn a_secret_among_the_arguments_is_not_told() {
        assert_eq!(without_secret("--hf-token=abc"), "--hf-token=(hidden)");
        assert_eq!(without_secret("WANDB_API_KEY=abc"), "WANDB_API_KEY=(hidden)");
        for word in ["train.toml", "--config=a=b", ""] {
            assert_eq!(without_secret(word), word);
        }
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        assert_eq!(shortened("kurz"), "kurz");
        let long = "ä".repeat(LONGEST_VALUE + 1);
        assert_eq!(shortened(&long).chars().count(), LONGEST_VALUE + 1);
    }

    #[test]
    fn columns_line_up() {
        let mut text = String::new();
        let rows = [["RANK".into(), "1".into()], ["WORLD_SIZE".into(), "16".into()]];
        aligned(&mut text, ["VARIABLE", "VALUE"], &rows);
        assert_eq!(text, "  VARIABLE    VALUE\n  RANK        1\n  WORLD_SIZE  16\n");
    }

    /// The user's and the image's environment, NCCL's file and the command hold
    /// `secret` under every name that a report might show, families' too.
    fn world_of_secrets(secret: &str) -> crate::plan::tests::World {
        use crate::facts::task::{Container, FileValue};
        use crate::plan::catalog;
        let mut world = crate::plan::tests::World::new("n[1-2]", "2(x2)", 0);
        let mut submitted = crate::facts::Environment::default();
        let known = catalog::entries().map(|entry| entry.name);
        let names = known.filter_map(|name| match name.strip_suffix('*') {
            Some(family) => Some(format!("{family}X_KEY")),
            None => is_secret(name).then(|| name.to_string()),
        });
        let others = [
            "AWS_SECRET_ACCESS_KEY",
            "NCCL_DB_PASSWORD",
            "OIDC_CLIENT_SECRET",
            "DB_PASSWD",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "HF_XET_X_TOKEN",
            "PALINGENESIS_STORE_KEY",
        ];
        for name in names.chain(others.map(String::from)) {
            submitted.set(name.as_str(), secret);
            world.environment.set(name.as_str(), format!("{secret}-of-the-image"));
            let file = "/etc/nccl.conf".to_string();
            world.task.nccl_files.push(FileValue { name: format!("NCCL_{name}"), value: secret.into(), file });
        }
        world.submitted = Some(submitted);
        world.task.container = Container::Inside;
        let words = ["python3", "train.py", "--hf-token", secret, "WANDB_API_KEY"];
        world.command = words.iter().map(|word| word.to_string()).collect();
        world.command.extend([format!("--api-key={secret}"), format!("HF_TOKEN={secret}")]);
        world
    }

    #[test]
    fn no_secret_is_in_any_report() {
        let secret = "hf_AbCdEf";
        for spec in ["", "debug", "fsdp", "launch=agent", "launch=shell", "checks=warn", "secrets-argv=error"] {
            let Ok(plan) = world_of_secrets(secret).plan(spec) else {
                assert!(!world_of_secrets(secret).refusal(spec).contains(secret), "{spec}");
                continue;
            };
            let (table, json) = (table(&plan), json(&plan).unwrap());
            for text in [table, json] {
                let line = text.lines().find(|line| line.contains(secret));
                assert_eq!(line, None, "{spec}");
            }
            // It is put back all the same.
            assert_eq!(plan.value("HF_XET_X_TOKEN"), Some(secret), "{spec}");
        }
    }

    /// Whatever the names of variables, files and nodes are.
    #[test]
    fn names_move_no_terminal_s_cursor_and_make_no_second_line() {
        use crate::facts::task::FileValue;
        let bad = "\u{1b}[2J\n\u{9b}";
        let mut world = crate::plan::tests::World::new("n[1-2]", "2(x2)", 0);
        for name in ["NCCL_", "NCCL_IB_", "OMPI_MCA_", "FI_", "UCX_", "TORCH_", "HF_XET_", "PET_", "PYTORCH_"] {
            world.environment.set(format!("{name}{bad}"), format!("1{bad}"));
        }
        world.environment.set("PALINGENESIS_SET", format!("7.0 A{bad}=1"));
        let file = format!("/home/{bad}/.nccl.conf");
        world.task.nccl_files.push(FileValue { name: format!("NCCL_{bad}"), value: bad.into(), file });
        world.task.unknown.push(format!("{bad} not read"));
        world.command = vec!["torchrun".into(), format!("--master-addr={bad}"), format!("--nnodes={bad}"), bad.into()];
        world.step.node = format!("n1{bad}");
        for spec in ["", "debug", "launch=native", "launch=agent", "checks=warn"] {
            let text = match world.plan(spec) {
                Ok(plan) => {
                    assert!(plan.warnings.iter().all(|warning| warning_line(warning).matches('\n').count() == 1));
                    table(&plan)
                }
                Err(refusal) => one_line(&refusal.to_string()),
            };
            let found = text.chars().find(|c| c.is_control() && *c != '\n');
            assert_eq!(found, None, "{spec}: {text}");
            let lines = text.lines().filter(|line| line.starts_with("[2J"));
            assert_eq!(lines.count(), 0, "{spec}: {text}");
        }
        assert_eq!(one_line("a\nb\n"), "a?b\n");
    }
}
