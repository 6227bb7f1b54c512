//! Lock files that a killed program left behind and that others may wait for. Looked
//! for as the user, in a child with a deadline, a few hundred names at most; nothing
//! is removed.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::directories::{FileSystem, Place};
use crate::system::access::{self, Lock};
use crate::system::child;
use crate::system::folder::Folder;

/// How long the file servers may take, all together: a start does not wait for more.
const PATIENCE: Duration = Duration::from_secs(2);

/// A lock of this age is no compiler's that is still at work.
pub const OLD: Duration = Duration::from_secs(3600);

/// Names that are looked at below one directory.
const MOST_NAMES: usize = 400;

/// Locks that are told.
const MOST_FOUND: usize = 16;

/// Whose lock files they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// PyTorch's builder of extensions: while the file is there, all others wait
    /// (torch/utils/file_baton.py).
    Extensions,
    /// Triton before 2.1, which asks the kernel for the lock.
    Triton,
    /// Hugging Face's hub, which asks the kernel for the lock, or where the file
    /// system knows no locks, waits while the file is there (filelock).
    Hub,
}

/// A directory to look into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Whose.
    pub owner: Owner,
    /// The directory; absolute.
    pub path: String,
    /// Whether one on a file server is another node's matter.
    pub on_the_node: bool,
}

/// An old lock file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OldLock {
    /// Whose.
    pub owner: Owner,
    /// Where.
    pub path: String,
    /// Its age in hours.
    pub hours: u64,
    /// Whether the kernel knows somebody who holds it; `None`: the file system knows no
    /// locks, and the file itself is one.
    pub held: Option<bool>,
}

/// The old lock files below these directories; none where a file server does not
/// answer in time.
pub fn old(wanted: &[Wanted]) -> Vec<OldLock> {
    if wanted.is_empty() {
        return Vec::new();
    }
    let answer = child::run(PATIENCE, || serde_json::to_vec(&look(wanted, SystemTime::now())).unwrap_or_default());
    answer.ok().and_then(|answer| serde_json::from_slice(&answer).ok()).unwrap_or_default()
}

fn look(wanted: &[Wanted], now: SystemTime) -> Vec<OldLock> {
    let mut found = Vec::new();
    for wanted in wanted.iter().filter(|wanted| !wanted.on_the_node || is_on_the_node(&wanted.path)) {
        let mut names = MOST_NAMES;
        let root = Path::new(&wanted.path);
        match wanted.owner {
            // One directory for each extension; by default below one for Python and CUDA.
            Owner::Extensions => {
                for folder in folders(root, &mut names) {
                    take(&mut found, wanted.owner, &folder.join("lock"), now);
                    for folder in folders(&folder, &mut names) {
                        take(&mut found, wanted.owner, &folder.join("lock"), now);
                    }
                }
            }
            Owner::Triton => {
                for folder in folders(root, &mut names) {
                    take(&mut found, wanted.owner, &folder.join("lock"), now);
                }
            }
            // .locks/models--org--name/ETAG.lock, for models--org--name/blobs/ETAG.
            Owner::Hub => {
                for folder in folders(&root.join(".locks"), &mut names) {
                    let repository = folder.file_name().map(|name| root.join(name).join("blobs")).unwrap_or_default();
                    for file in entries(&folder, &mut names) {
                        let blob = file.file_stem().map(|name| repository.join(name));
                        // What is there already nobody waits for.
                        let done = blob.is_none_or(|blob| blob.exists());
                        if file.extension().is_some_and(|extension| extension == "lock") && !done {
                            take(&mut found, wanted.owner, &file, now);
                        }
                    }
                }
            }
        }
    }
    found
}

fn is_on_the_node(path: &str) -> bool {
    let kind = fs::File::open(path).ok().and_then(|file| Folder::from(file).room().ok());
    kind.is_some_and(|room| FileSystem::of(room.kind).place == Place::Node)
}

fn entries(folder: &Path, names: &mut usize) -> Vec<std::path::PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<_> = entries.flatten().take(*names).map(|entry| entry.path()).collect();
    *names -= found.len();
    found.sort();
    found
}

fn folders(folder: &Path, names: &mut usize) -> Vec<std::path::PathBuf> {
    let mut found = entries(folder, names);
    found.retain(|path| fs::symlink_metadata(path).is_ok_and(|data| data.is_dir()));
    found
}

fn take(found: &mut Vec<OldLock>, owner: Owner, path: &Path, now: SystemTime) {
    let Ok(data) = fs::symlink_metadata(path) else { return };
    let age = data.modified().ok().and_then(|time| now.duration_since(time).ok()).unwrap_or_default();
    let Some(text) = path.to_str().filter(|_| data.is_file() && age >= OLD && found.len() < MOST_FOUND) else { return };
    let held = match access::lock_of(path) {
        Lock::Free => Some(false),
        Lock::Held => Some(true),
        Lock::Unknown => None,
    };
    found.push(OldLock { owner, path: text.into(), hours: age.as_secs() / 3600, held });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::Tree;

    /// A file of this age in hours.
    fn aged(tree: &Tree, path: &str, hours: u64) {
        tree.file(path, "");
        let file = fs::File::options().write(true).open(tree.root().join(path)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600 + 60)).unwrap();
    }

    fn below(tree: &Tree, owner: Owner, folder: &str) -> Vec<(String, u64, Option<bool>)> {
        let path = tree.root().join(folder).to_str().unwrap().to_string();
        let found = old(&[Wanted { owner, path, on_the_node: false }]);
        let short = |path: &str| path.strip_prefix(tree.root().to_str().unwrap()).unwrap().to_string();
        found.into_iter().map(|lock| (short(&lock.path), lock.hours, lock.held)).collect()
    }

    /// <https://github.com/pytorch/pytorch/issues/189245>
    #[test]
    fn the_lock_of_an_extension_s_builder_that_was_killed() {
        let tree = Tree::new("locks-extensions");
        aged(&tree, "x/py311_cu124/fused/lock", 48);
        aged(&tree, "x/fused/lock", 3);
        aged(&tree, "x/young/lock", 0);
        aged(&tree, "x/py311_cu124/fused/build.ninja", 48);
        std::os::unix::fs::symlink(tree.root().join("x/fused"), tree.root().join("x/link")).unwrap();
        let found = below(&tree, Owner::Extensions, "x");
        let expected =
            [("/x/fused/lock".into(), 3, Some(false)), ("/x/py311_cu124/fused/lock".into(), 48, Some(false))];
        assert_eq!(found, expected);
        assert_eq!(below(&tree, Owner::Extensions, "nothing"), []);
        assert_eq!(old(&[]), []);
    }

    /// <https://github.com/ishandhanani/srt-slurm/pull/251>
    #[test]
    fn the_lock_of_a_download_that_was_killed() {
        let tree = Tree::new("locks-hub");
        aged(&tree, "hub/.locks/models--org--m/1234.lock", 72);
        aged(&tree, "hub/.locks/models--org--m/5678.lock", 72);
        // The library leaves it there.
        tree.file("hub/models--org--m/blobs/5678", "{}");
        tree.file("hub/models--org--m/blobs/1234.incomplete", "{");
        let found = below(&tree, Owner::Hub, "hub");
        assert_eq!(found, [("/hub/.locks/models--org--m/1234.lock".into(), 72, Some(false))]);
    }

    #[test]
    fn a_large_cache_costs_a_few_hundred_names() {
        let tree = Tree::new("locks-large");
        for number in 0..600 {
            aged(&tree, &format!("t/{number:03}/lock"), 2);
        }
        assert_eq!(below(&tree, Owner::Triton, "t").len(), MOST_FOUND);
        let mut names = MOST_NAMES;
        assert!(entries(&tree.root().join("t"), &mut names).len() == MOST_NAMES && names == 0);
    }
}
