//! What went wrong in a hook that may not fail, kept until a hook that may can
//! tell it; and the text of the last panic.

use std::panic::{PanicHookInfo, set_hook};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

static FIRST: Mutex<Option<String>> = Mutex::new(None);
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// A lock that a panic cannot spoil for later hooks.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the first failure; later ones follow from it.
pub fn keep(line: String) {
    lock(&FIRST).get_or_insert(line);
}

/// The failure that was kept.
pub fn first() -> Option<String> {
    lock(&FIRST).clone()
}

/// Makes panics silent and their text known. std would print them to stderr,
/// with a backtrace where the environment asks for one.
pub fn install_panic_hook() {
    static ONCE: Once = Once::new();
    // A plain function: boxing it allocates nothing.
    ONCE.call_once(|| set_hook(Box::new(remember)));
}

fn remember(info: &PanicHookInfo) {
    let payload = info.payload();
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    let place = info.location().map(|place| format!("{}:{}", place.file(), place.line())).unwrap_or_default();
    *lock(&PANIC) = Some(format!("panic at {place}: {}", crate::config::printable(text)));
}

/// The text of the panic just caught.
pub fn last_panic() -> String {
    lock(&PANIC).take().unwrap_or_else(|| "panic".into())
}
