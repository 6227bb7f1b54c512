//! Files below another root: a recorded or made-up machine's links lead to files of
//! that machine.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

/// As many links as the kernel itself follows in one path (path_resolution(7)).
const MOST_LINKS: usize = 40;

/// No configuration file is longer.
const MOST: u64 = 1 << 20;

/// A machine's files.
#[derive(Debug, Clone)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The one below `root`.
    pub fn new(root: &Path) -> Tree {
        Tree { root: root.into() }
    }

    /// Where it begins.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether it is this machine.
    pub fn is_machine(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Where the machine's `path` is here, its links followed inside the tree but for
    /// the last one if `keep_last`.
    fn resolve(&self, path: &str, keep_last: bool) -> io::Result<PathBuf> {
        if self.is_machine() {
            return Ok(path.into());
        }
        let parts = |path: &Path| -> Vec<std::ffi::OsString> {
            let of = |part: Component<'_>| match part {
                Component::Normal(name) => Some(name.to_os_string()),
                Component::ParentDir => Some("..".into()),
                _ => None,
            };
            path.components().rev().filter_map(of).collect()
        };
        let mut left = parts(Path::new(path));
        let mut at = PathBuf::new();
        let mut links = 0;
        while let Some(part) = left.pop() {
            if part == ".." {
                at.pop();
                continue;
            }
            let next = at.join(&part);
            match std::fs::read_link(self.root.join(&next)) {
                Ok(target) if !(keep_last && left.is_empty()) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(io::Error::from_raw_os_error(libc::ELOOP));
                    }
                    if target.is_absolute() {
                        at = PathBuf::new();
                    }
                    left.extend(parts(&target));
                }
                _ => at = next,
            }
        }
        Ok(self.root.join(at))
    }

    /// Where the machine's file is here.
    pub fn file(&self, path: &str) -> io::Result<PathBuf> {
        self.resolve(path, false)
    }

    /// What stands at that path, links followed.
    pub fn metadata(&self, path: &str) -> io::Result<Metadata> {
        std::fs::metadata(self.file(path)?)
    }

    /// Where a link leads, by its own words.
    pub fn link(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.resolve(path, true).ok()?).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// Opens without waiting for what is no file.
    pub fn open(&self, path: &str) -> io::Result<File> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        OpenOptions::new().read(true).custom_flags(flags).open(self.file(path)?)
    }

    /// A regular file's bytes.
    pub fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        let file = self.open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("no regular file"));
        }
        let mut bytes = Vec::new();
        file.take(MOST + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MOST {
            return Err(io::Error::other(format!("more than {MOST} bytes")));
        }
        Ok(bytes)
    }

    /// What the kernel tells below /proc and /sys, of no length beforehand.
    pub fn attribute(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.open(path)?.take(16 * MOST).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The names in a directory, sorted.
    pub fn names(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.file(path)?)?;
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// The machine's paths that match a pattern, as glob(3) has them: sorted, `*` without
    /// names that begin with a dot, and a link that leads nowhere among them.
    pub fn glob(&self, pattern: &str) -> Vec<String> {
        use std::ffi::{CStr, CString};
        use std::os::unix::ffi::{OsStrExt, OsStringExt};
        let mut whole = Vec::new();
        if !self.is_machine() {
            for byte in self.root.as_os_str().as_bytes() {
                if b"*?[]\\".contains(byte) {
                    whole.push(b'\\');
                }
                whole.push(*byte);
            }
        }
        whole.extend(pattern.as_bytes());
        let Ok(whole) = CString::new(whole) else { return Vec::new() };
        let mut found = std::mem::MaybeUninit::<libc::glob_t>::zeroed();
        // SAFETY: the pattern is a C string, and glob writes the structure, which is zeroed.
        let outcome = unsafe { libc::glob(whole.as_ptr(), 0, None, found.as_mut_ptr()) };
        // SAFETY: zeroed or filled by glob, both valid.
        let mut found = unsafe { found.assume_init() };
        let mut paths = Vec::new();
        if outcome == 0 && !found.gl_pathv.is_null() {
            for index in 0..found.gl_pathc {
                // SAFETY: glob says that so many strings are there, and they live until globfree.
                let path = unsafe { CStr::from_ptr(*found.gl_pathv.add(index)) };
                let path = PathBuf::from(std::ffi::OsString::from_vec(path.to_bytes().to_vec()));
                let inside = match self.is_machine() {
                    true => Some(path),
                    false => path.strip_prefix(&self.root).ok().map(|rest| Path::new("/").join(rest)),
                };
                paths.extend(inside.map(|path| path.to_string_lossy().into_owned()));
            }
        }
        // SAFETY: glob has filled it, or left it zeroed.
        unsafe { libc::globfree(&mut found) };
        paths
    }
}

/// The system's words without std's number.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_lead_to_files_of_the_tree() {
        let root = std::env::temp_dir().join(format!("palingenesis-tree[{}]", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("usr/share/p")).unwrap();
        std::fs::create_dir_all(root.join("etc/slurm/d")).unwrap();
        std::fs::write(root.join("usr/share/p/p.conf"), "inside").unwrap();
        symlink("/usr/share/p/p.conf", root.join("etc/slurm/d/zz.conf")).unwrap();
        symlink("../../../../usr/share/p", root.join("etc/slurm/d/dir.conf")).unwrap();
        symlink("loop.conf", root.join("etc/slurm/d/loop.conf")).unwrap();
        std::fs::write(root.join("etc/slurm/d/.hidden.conf"), "").unwrap();
        let tree = Tree::new(&root);
        assert_eq!(tree.bytes("/etc/slurm/d/zz.conf").unwrap(), b"inside");
        assert_eq!(tree.bytes("/etc/slurm/d/dir.conf/p.conf").unwrap(), b"inside");
        assert!(tree.bytes("/etc/slurm/d/loop.conf").is_err());
        assert_eq!(tree.link("/etc/slurm/d/zz.conf").as_deref(), Some("/usr/share/p/p.conf"));
        assert_eq!(tree.glob("/etc/slurm/d/*.conf"), ["dir", "loop", "zz"].map(|n| format!("/etc/slurm/d/{n}.conf")));
        assert_eq!(tree.glob("/no/*"), Vec::<String>::new());
        std::fs::remove_dir_all(&root).unwrap();
    }
}
