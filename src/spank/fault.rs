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
