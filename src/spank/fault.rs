//! Fault injection for tests, from plugstack.conf:
//! `fault=HOOK:KIND[:rank=N][:node=N][:context=NAME]`, with the kinds `panic`,
//! `error`, `sleep-SECONDS`, `hang` and `kill`. In builds without the feature
//! `fault-injection` this is an empty function and no such text.

use super::host::{Context, Handle};
use super::{Arguments, Failure, Hook};

#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub fn inject(_: Hook, _: Context, _: Handle, _: Arguments) -> Result<(), Failure> {
    Ok(())
}

#[cfg(feature = "fault-injection")]
pub fn inject(hook: Hook, context: Context, handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    use std::time::Duration;
    for fault in arguments.iter().filter_map(|argument| argument.strip_prefix("fault=")) {
        let mut parts = fault.split(':');
        if parts.next() != Some(hook.name()) {
            continue;
        }
        let kind = parts.next().unwrap_or_default();
        if !parts.all(|selector| selected(selector, context, handle)) {
            continue;
        }
        match kind {
            "panic" => panic!("injected"),
            "error" => return Err(Failure::Fault("injected".into())),
            "hang" => std::thread::sleep(Duration::from_secs(3600)),
            "kill" => {
                // SAFETY: ends this process, as asked.
                unsafe { libc::raise(libc::SIGKILL) };
            }
            _ => {
                let seconds = kind.strip_prefix("sleep-").and_then(|seconds| seconds.parse().ok());
                std::thread::sleep(Duration::from_secs(seconds.unwrap_or(0)));
            }
        }
    }
    Ok(())
}

/// For tests of what reaches srun: a line of JSON for each record, into the file that
/// PALINGENESIS_TEST_RECORDS names.
#[cfg(feature = "fault-injection")]
pub fn dump(records: &[crate::facts::exit::ExitRecord]) {
    use std::io::Write;
    let Some(file) = std::env::var_os("PALINGENESIS_TEST_RECORDS") else { return };
    let lines = records.iter().filter_map(|record| serde_json::to_string(record).ok());
    let text: String = lines.map(|line| line + "\n").collect();
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
    let _ = file.and_then(|mut file| file.write_all(text.as_bytes()));
}

#[cfg(feature = "fault-injection")]
fn selected(selector: &str, context: Context, handle: Handle) -> bool {
    let number = |text: &str| text.parse::<u32>().ok();
    match selector.split_once('=') {
        Some(("context", name)) => format!("{context:?}").eq_ignore_ascii_case(name),
        Some(("node", index)) => handle.node_index().ok() == number(index),
        Some(("rank", rank)) => handle.task_rank().ok() == number(rank),
        _ => false,
    }
}
