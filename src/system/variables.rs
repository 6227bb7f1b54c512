//! Taking a variable out of this process's own environment.

use std::ffi::OsString;

/// The variable's value; it is removed, so that no child sees it. With a second
/// thread, which might read the environment at this moment, it stays.
pub fn take(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    if std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1) {
        // SAFETY: no other thread exists, so none reads or writes the environment.
        unsafe { std::env::remove_var(name) };
    }
    Some(value)
}
