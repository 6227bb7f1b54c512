//! One line of what was found, as the parts of the check write it and the table reads it:
//! four fields between tabs. Nothing here knows what is checked.

use std::fmt;

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Within its bar, or without one.
    Ok,
    /// Beyond it, or not done.
    Failed,
    /// Could not be asked for.
    Skipped,
}

impl State {
    /// Of a comparison.
    pub fn of(fits: bool) -> State {
        if fits { State::Ok } else { State::Failed }
    }

    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Failed => "FAILED",
            State::Skipped => "SKIPPED",
        }
    }
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub what: String,
    pub value: String,
    pub bar: String,
    pub state: State,
}

impl Row {
    pub fn new(what: impl Into<String>, value: impl Into<String>, bar: impl Into<String>, state: State) -> Row {
        Row { what: what.into(), value: value.into(), bar: bar.into(), state }
    }

    /// What was not done, and why.
    pub fn failed(what: impl Into<String>, why: impl fmt::Display) -> Row {
        Row::new(what, why.to_string(), "-", State::Failed)
    }

    /// From a line; a line that is none is itself a failure.
    pub fn parse(line: &str) -> Row {
        let fields: Vec<&str> = line.split('\t').collect();
        let states = [State::Ok, State::Failed, State::Skipped];
        match fields[..] {
            [what, value, bar, state] => match states.into_iter().find(|known| known.name() == state) {
                Some(state) => Row::new(what, value, bar, state),
                None => Row::failed("a line of the check", line),
            },
            _ => Row::failed("a line of the check", line),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = |text: &str| text.replace(['\t', '\n', '\r'], " ");
        write!(f, "{}\t{}\t{}\t{}", plain(&self.what), plain(&self.value), plain(&self.bar), self.state.name())
    }
}

/// The Markdown table of all rows, and whether none has failed.
pub fn table(rows: &[Row]) -> (String, bool) {
    let cell = |text: &str| text.replace('|', "\\|");
    let mut text = String::from("| what | value | bar | |\n|---|---|---|---|\n");
    for Row { what, value, bar, state } in rows {
        text += &format!("| {} | {} | {} | {} |\n", cell(what), cell(value), cell(bar), state.name());
    }
    (text, !rows.is_empty() && rows.iter().all(|row| row.state != State::Failed))
}
