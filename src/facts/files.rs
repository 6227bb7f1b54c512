//! Small files, read whole up to a bound, without waiting on what is no file. Each
//! look is noted for a record of the machine, see `trace`.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::trace::{Seen, note};

/// Longer than any attribute of the kernel's: a page, which has 64 KiB on some ARM
/// machines. Lists of CPUs may be longer than a small page.
const ATTRIBUTE: u64 = 64 * 1024;

/// One of the kernel's attributes, without the white space around it. `None`
/// when it is not there or has no value now: the kernel says EINVAL, EIO or
/// EOPNOTSUPP for the speed of a device that is down or a slot that is empty. Old
/// kernels end some with a NUL (Linux 2.6.32, node/online). What is too long is no
/// attribute: the beginning of a list would pass for another list.
pub(super) fn attribute(path: &Path) -> Option<String> {
    let bytes = open(path).and_then(|file| read(file, ATTRIBUTE + 1)).and_then(|bytes| match bytes.len() as u64 {
        0..=ATTRIBUTE => Ok(bytes),
        _ => Err(io::Error::other(format!("more than {ATTRIBUTE} bytes"))),
    });
    note(path, || text_or_refusal(&bytes));
    let bytes = bytes.ok()?;
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(String::from_utf8_lossy(text).trim().to_string())
}

/// A regular file of at most `most` bytes; `None` when there is none. A FIFO or
/// a device would make a reader wait, or worse: it is refused.
pub(super) fn regular(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let bytes = regular_file(path, most);
    note(path, || match &bytes {
        Ok(bytes) => bytes.clone().map(Seen::Text),
        Err(error) => Some(Seen::Refused(error.to_string())),
    });
    bytes
}

fn regular_file(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let bytes = read(file, most + 1)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("more than {most} bytes")));
    }
    Ok(Some(bytes))
}

/// An attribute without a value now is nothing to wonder about.
fn text_or_refusal(bytes: &io::Result<Vec<u8>>) -> Option<Seen> {
    match bytes {
        Ok(bytes) => Some(Seen::Text(bytes.clone())),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Some(Seen::Refused(error.to_string())),
        Err(_) => None,
    }
}

fn open(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

fn read(file: std::fs::File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What a symbolic link's last part names: `mlx5_core` of a device's driver, `bond0`
/// of a network device's master. `None` where there is none.
pub(super) fn link(path: &Path) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    note(path, || Some(Seen::Link));
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// The path without symbolic links; `None` where it leads nowhere.
pub(super) fn resolved(path: &Path) -> Option<PathBuf> {
    note(path, || Some(Seen::End));
    std::fs::canonicalize(path).ok()
}

/// Whether a directory is there.
pub(super) fn is_directory(path: &Path) -> bool {
    note(path, || Some(Seen::End));
    path.is_dir()
}

/// Entries of a directory that are looked at: more than any class of devices has.
const MOST_NAMES: usize = 16_384;

/// The names in a directory, sorted; `None` when there is none.
///
/// # Errors
/// What the kernel says of a directory that is there; too many names.
pub(super) fn names(directory: &Path) -> io::Result<Option<Vec<String>>> {
    let names = names_in(directory);
    note(directory, || match &names {
        Ok(names) => names.clone().map(Seen::Names),
        Err(error) => Some(Seen::Refused(error.to_string())),
    });
    names
}

fn names_in(directory: &Path) -> io::Result<Option<Vec<String>>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for (number, entry) in entries.flatten().enumerate() {
        if number == MOST_NAMES {
            return Err(io::Error::other(format!("more than {MOST_NAMES} entries")));
        }
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    Ok(Some(names))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::CpuSet;
    use crate::facts::rdma::tests::Tree;

    /// 2,048 CPUs of which each second one is listed: 5 kB.
    #[test]
    fn a_list_longer_than_a_page_is_read_whole_or_not_at_all() {
        let tree = Tree::new("attributes");
        let cpus: CpuSet = (0..2048).step_by(2).collect();
        tree.file("list", &format!("{cpus}\n")).file("long", &"0,".repeat(40_000));
        std::os::unix::fs::symlink("/dev/zero", tree.root().join("zero")).unwrap();
        let list = attribute(&tree.root().join("list")).unwrap();
        assert!(list.len() > 4096 && CpuSet::parse(&list) == Ok(cpus));
        assert_eq!([attribute(&tree.root().join("long")), attribute(&tree.root().join("zero"))], [None, None]);
    }
}
