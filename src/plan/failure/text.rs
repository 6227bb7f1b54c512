//! The verdict in words: who, how and when, and what to do next.

use super::{Class, Ending, Kind, Others, Outside, StepEnd, Unordered, Verdict, class, signal, time};
use crate::config::printable;
use crate::facts::exit::{Ended, ExitRecord, Oom};

/// So many ranks of a set are named, and so many kinds of ends.
const MOST_NAMED: usize = 8;
const MOST_KINDS: usize = 4;
/// The longest name of a node or device, and the longest refusal, in characters.
const LONGEST_NAME: usize = 100;
const LONGEST_LINE: usize = 1000;

/// The report: lines without their end, none where nothing failed. `clock` makes the time
/// of day from nanoseconds since 1970.
pub fn report(verdict: &Verdict, step: &StepEnd, clock: &dyn Fn(u64) -> String) -> Vec<String> {
    match verdict {
        Verdict::Nothing => Vec::new(),
        Verdict::First { first, others, then } => {
            let did = match class(first) {
                Class::Outside => "was ended first, by somebody else",
                Class::Refused => "was refused first",
                _ => "failed first",
            };
            let mut line = format!("{} {did}", place(first, step));
            if let Some(how) = how(first) {
                line.push_str(&format!(": {how} at {}", clock(on_rank_0_s_clock(first))));
            }
            line.push_str(&and_others(others));
            line.push_str(&and_then(*then));
            [vec![line], next(&[first], step)].concat()
        }
        Verdict::Set { set, why, others, then } => {
            let line = format!("{}{}{}", of_set(set, *why, step, clock), and_others(others), and_then(*then));
            [vec![line], next(set, step)].concat()
        }
        Verdict::Nobody { by, all } => vec![of_nobody(*by, all, step)],
    }
}

fn rank(record: &ExitRecord, step: &StepEnd) -> String {
    format!("{} {}", if step.agents { "task" } else { "rank" }, record.rank)
}

fn name(text: &str) -> String {
    printable(text).chars().take(LONGEST_NAME).collect()
}

fn place(record: &ExitRecord, step: &StepEnd) -> String {
    let node = name(&record.node);
    if step.agents {
        return format!("{} (the launcher on {node})", rank(record, step));
    }
    let gpu = record.gpu.as_ref().map(|gpu| format!(", GPU {}", name(gpu))).unwrap_or_default();
    format!("{} ({node}, local rank {}{gpu})", rank(record, step), record.local_rank)
}

/// On the clock of rank 0's node.
fn on_rank_0_s_clock(record: &ExitRecord) -> u64 {
    u64::try_from(time(record)).unwrap_or(0)
}

fn how(record: &ExitRecord) -> Option<String> {
    let with = match record.kind {
        Ended::Refused => return None,
        Ended::Exit(code) => of_exit(code),
        Ended::Signal(signal) => signal_name(signal),
    };
    Some(match class(record) {
        Class::Memory => format!("out of memory ({with})"),
        _ => with,
    })
}

fn of_exit(code: i32) -> String {
    match code {
        129..=192 => format!("exit code {code} (128 + {})", signal_name(code - 128)),
        _ => format!("exit code {code}"),
    }
}

fn of_kind(kind: Kind) -> String {
    match kind {
        Kind::Refused => "not started".into(),
        Kind::Memory => "out of memory".into(),
        Kind::Exit(code) => format!("with {}", of_exit(code)),
        Kind::Signal(signal) => format!("by {}", signal_name(signal)),
    }
}

/// signal(7).
fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    name.into()
}

/// Seconds, minutes or hours.
fn span(ns: i64) -> String {
    let seconds = ns as f64 / 1e9;
    match seconds {
        ..10.0 => format!("{seconds:.2} s"),
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.0} h", seconds / 3600.0),
    }
}

fn counted(others: &Others) -> String {
    let rest: u32 = others.kinds.iter().skip(MOST_KINDS).map(|(_, count)| count).sum();
    let mut parts: Vec<String> =
        others.kinds.iter().take(MOST_KINDS).map(|(kind, count)| format!("{count} {}", of_kind(*kind))).collect();
    if rest > 0 {
        parts.push(format!("{rest} otherwise"));
    }
    parts.join(", ")
}

fn and_others(others: &Others) -> String {
    let plural = if others.count() == 1 { "other" } else { "others" };
    match others.count() {
        0 => String::new(),
        count => format!("; {} later {count} {plural} ended: {}", span(others.after), counted(others)),
    }
}

fn and_then(then: Option<Ending>) -> String {
    then.map(|then| format!("; then came {}", of_ending(then))).unwrap_or_default()
}

fn of_ending(ending: Ending) -> &'static str {
    match ending {
        Ending::TimeLimit => "the job's time limit",
        Ending::Deadline => "the job's deadline",
        Ending::Cancelled => "the job's cancellation",
        Ending::Preempted => "the job's preemption",
        Ending::NodeFailure => "a node's failure",
        Ending::Requeued => "the job's return to the queue",
    }
}

fn of_set(set: &[&ExitRecord], why: Unordered, step: &StepEnd, clock: &dyn Fn(u64) -> String) -> String {
    let (first, last) = (set.first().map_or(0, |one| time(one)), set.last().map_or(0, |one| time(one)));
    let when = set.first().map(|one| clock(on_rank_0_s_clock(one))).unwrap_or_default();
    let within = span(last.saturating_sub(first));
    let limits = match why {
        Unordered::SameNode => "Slurm sees ends on one node in batches of 0.1 s".to_string(),
        Unordered::Clocks(open) if open < 1_000_000 => "Slurm sees ends in batches of 0.1 s".to_string(),
        Unordered::Clocks(open) => format!(
            "Slurm sees ends in batches of 0.1 s, and the nodes' clocks are known to {:.0} ms only",
            open as f64 / 1e6
        ),
        Unordered::ClocksUnknown => "the nodes' clocks were not compared, which the pre-flight does".to_string(),
    };
    let ends: Vec<Option<String>> = set.iter().map(|record| how(record)).collect();
    let same = ends.windows(2).all(|pair| pair[0] == pair[1]);
    let what = if step.agents { "tasks" } else { "ranks" };
    let all = set.len() > MOST_NAMED || u32::try_from(set.len()) == Ok(step.ranks);
    let did =
        if set.iter().all(|record| class(record) == Class::Outside) { "were ended by somebody else" } else { "failed" };
    if same && all {
        let how = ends.first().cloned().flatten().map(|how| format!(", {how}")).unwrap_or_default();
        let of = if u32::try_from(set.len()) == Ok(step.ranks) { String::new() } else { format!(" of {}", step.ranks) };
        let numbers = if of.is_empty() { String::new() } else { format!(" ({})", numbers(set)) };
        return format!(
            "{}{of} {what} {did} in the same moment{numbers}, within {within} at {when}{how}: no first one can be told \
             ({limits})",
            set.len(),
        );
    }
    let mut list: Vec<String> = set
        .iter()
        .zip(&ends)
        .take(MOST_NAMED)
        .map(|(record, how)| match how {
            Some(how) => format!("{}: {how}", place(record, step)),
            None => place(record, step),
        })
        .collect();
    if set.len() > MOST_NAMED {
        list.push(format!("and {} more", set.len() - MOST_NAMED));
    }
    format!(
        "which of {} {what} {did} first cannot be told ({limits}); within {within} at {when}: {}",
        set.len(),
        list.join("; ")
    )
}

/// Ranks as ranges: "0-3,7".
fn numbers(set: &[&ExitRecord]) -> String {
    let mut ranks: Vec<u32> = set.iter().map(|record| record.rank).collect();
    ranks.sort_unstable();
    let mut text = String::new();
    let mut index = 0;
    let mut ranges = 0;
    while index < ranks.len() {
        let start = index;
        while ranks.get(index + 1) == Some(&(ranks[index] + 1)) {
            index += 1;
        }
        if ranges == 2 * MOST_NAMED {
            text.push_str(",…");
            break;
        }
        let comma = if text.is_empty() { "" } else { "," };
        let to = if index > start { format!("-{}", ranks[index]) } else { String::new() };
        text.push_str(&format!("{comma}{}{to}", ranks[start]));
        index += 1;
        ranges += 1;
    }
    text
}

fn of_nobody(by: Outside, all: &Others, step: &StepEnd) -> String {
    let lost = || {
        let names: Vec<String> = step.lost.iter().take(MOST_NAMED).map(|node| name(node)).collect();
        let more = if step.lost.len() > MOST_NAMED { ", …" } else { "" };
        format!("{}{more}", names.join(", "))
    };
    let who = match by {
        Outside::Job(Ending::NodeFailure) if !step.lost.is_empty() => {
            format!("{} does not answer any more, see its console and scontrol show node", lost())
        }
        Outside::Job(Ending::NodeFailure) => "a node of the job failed, see sinfo -R".into(),
        Outside::Job(ending) if !step.lost.is_empty() => {
            format!("{}, and {} does not answer", of_ending(ending), lost())
        }
        Outside::Job(ending) => of_ending(ending).into(),
        Outside::Wait(seconds) => format!("srun's --wait={seconds}, so long after the first rank had ended"),
        Outside::Signal => "a signal to all of them, as scancel, an interrupt or the step's time limit send it".into(),
    };
    let what = if step.agents { "task" } else { "rank" };
    format!("no {what} failed by itself: {who}; {} of {} ended: {}", all.count(), step.ranks, counted(all))
}

/// What to do next, in one line.
fn next(named: &[&ExitRecord], step: &StepEnd) -> Vec<String> {
    let Some(first) = named.first() else {
        return Vec::new();
    };
    if let Some(line) = named.iter().find_map(|record| record.line.as_ref()) {
        let line: String =
            printable(line.trim().trim_start_matches("palingenesis: error: ")).chars().take(LONGEST_LINE).collect();
        return vec![format!("why: {line}")];
    }
    let who = if named.len() == 1 { rank(first, step) } else { "each of them".into() };
    let node = name(&first.node);
    let output = |what: &str| {
        let how = match step.labelled {
            true => "",
            false => "; srun -l puts the rank before each line, --output=NAME-%t.log gives each a file",
        };
        format!("what to do: read what {who} wrote last{what}{how}")
    };
    let own = signal(first);
    let line = match class(first) {
        Class::Memory => format!(
            "what to do: {node} killed a process of {who} for want of memory: ask for more (--mem, --mem-per-gpu), or use \
             less (DataLoader workers, batch size)"
        ),
        Class::Outside if own == Some(libc::SIGKILL) && first.oom == Oom::Unknown => format!(
            "what to do: Slurm did not do it first: if the memory of {node} was short, its kernel's log says so (dmesg, \
             'Out of memory'); ask for more with --mem"
        ),
        Class::Outside => {
            format!(
                "what to do: find who sent it: somebody's kill or scancel, or a service on {node} (its kernel's log)"
            )
        }
        Class::Abort if own == Some(libc::SIGABRT) => {
            output(": an assertion or an uncaught exception, or a watchdog that waited for another rank")
        }
        Class::Abort => output(": it wrote to something that was closed"),
        Class::Refused => return Vec::new(),
        Class::Own if own == Some(libc::SIGBUS) => {
            output(": mostly /dev/shm or a file that it had mapped was full or gone")
        }
        Class::Own if own.is_some() => {
            output("; it crashed in native code: PYTHONFAULTHANDLER=1 shows where Python was")
        }
        Class::Own => match first.kind {
            Ended::Exit(127) => output(": the shell did not find a command"),
            Ended::Exit(126) => output(": the shell found a command that cannot be run"),
            _ => output(""),
        },
    };
    vec![line]
}
