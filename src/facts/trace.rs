//! What a reader looked at, noted while it looks: a record of a machine then holds
//! what its reader needs, by construction, and no list of files has to follow.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// One look at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// As the reader named it.
    pub path: PathBuf,
    /// What it wanted, and what was there.
    pub seen: Seen,
}

/// What a look wanted, and what was there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// A file's text.
    Text(Vec<u8>),
    /// The names in a directory.
    Names(Vec<String>),
    /// Where a symbolic link leads, without following it.
    Link,
    /// What is at the end of all links, or whether something is.
    End,
    /// Nothing, since the kernel refused: why.
    Refused(String),
}

thread_local! {
    static LOOKS: RefCell<Option<Vec<Look>>> = const { RefCell::new(None) };
}

/// Runs `read` and says what it looked at, on this thread.
pub fn traced<T>(read: impl FnOnce() -> T) -> (T, Vec<Look>) {
    LOOKS.with_borrow_mut(|looks| *looks = Some(Vec::new()));
    let result = read();
    let looks = LOOKS.with_borrow_mut(Option::take).unwrap_or_default();
    (result, looks)
}

/// Notes a look, while somebody traces. Nothing is there: nothing is noted.
pub(super) fn note(path: &Path, seen: impl FnOnce() -> Option<Seen>) {
    LOOKS.with_borrow_mut(|looks| {
        if let (Some(looks), Some(seen)) = (looks.as_mut(), seen()) {
            looks.push(Look { path: path.into(), seen });
        }
    });
}
