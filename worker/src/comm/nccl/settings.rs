//! What of NCCL's own settings this program has a say in, and what is told of the others.

use std::ffi::OsStr;

use super::sys::Library;

/// NCCL lets this override what a program asks for in its configuration.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Told of, where they are set: which way NCCL goes.
const TOLD: &[&str] =
    &["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_ALGO", "NCCL_PROTO"];

/// Sees to it that NCCL's calls come back, whatever the environment and the nccl.conf files
/// say: a variable that is set goes before a file (NCCL, src/misc/param.cc). To be called
/// before the first thread; later it can only warn. What is to be told, if anything.
#[must_use]
pub fn prepare() -> Option<String> {
    let asked = std::env::var_os(BLOCKING);
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if alone {
        // SAFETY: no other thread exists, so none reads or writes the environment.
        unsafe { std::env::set_var(BLOCKING, "0") };
    }
    warning(asked.as_deref(), alone)
}

fn warning(asked: Option<&OsStr>, changed: bool) -> Option<String> {
    let asked = asked.filter(|value| *value != "0" && !value.is_empty())?.to_string_lossy().into_owned();
    let what = format!("{BLOCKING}={asked} would let NCCL hang where a rank is gone");
    Some(if changed { format!("{what}: it is 0 here") } else { format!("{what}: unset it") })
}

/// Lines for the log: the version and its file, and the settings by which NCCL chooses its way.
#[must_use]
pub fn describe(library: &Library) -> Vec<String> {
    describe_with(&library.version_text(), &library.path().display().to_string(), |name| std::env::var(name).ok())
}

fn describe_with(version: &str, path: &str, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = |name: &&str| variable(name).map(|value| format!("{name}={value}"));
    let set: Vec<String> = TOLD.iter().filter_map(set).collect();
    let way = if set.is_empty() { "NCCL chooses its interfaces itself".to_owned() } else { set.join(" ") };
    vec![format!("NCCL {version}: {path}"), way]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocking_calls_are_warned_of() {
        assert_eq!(warning(None, true), None);
        assert_eq!(warning(Some(OsStr::new("0")), true), None);
        assert!(warning(Some(OsStr::new("1")), true).unwrap().ends_with("it is 0 here"));
        assert!(warning(Some(OsStr::new("1")), false).unwrap().ends_with("unset it"));
    }

    #[test]
    fn the_way_is_told_as_it_was_set() {
        let set = |name: &str| (name == "NCCL_IB_HCA").then(|| "mlx5_0".to_owned());
        assert_eq!(
            describe_with("2.28.9", "/l/libnccl.so.2", set),
            ["NCCL 2.28.9: /l/libnccl.so.2", "NCCL_IB_HCA=mlx5_0"]
        );
        assert_eq!(describe_with("2.28.9", "/l/libnccl.so.2", |_| None)[1], "NCCL chooses its interfaces itself");
    }
}
