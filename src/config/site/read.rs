//! Opens the site file so that nothing that may lie there can hold or mislead a
//! root daemon, and sees whether root alone decides what lies there. It must not
//! trust the process's own user: in slurmstepd that is the job's.

use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use super::SiteError;
use crate::system::folder::Folder;

/// The largest site file in bytes; one that is written by hand is far smaller.
pub const LARGEST: u64 = 256 * 1024;

/// As many links the kernel follows.
const MOST_LINKS: usize = 40;

/// A file that can be read.
#[derive(Debug)]
pub struct Found {
    /// What stands in it.
    pub text: String,
    /// Whether root alone can change it.
    pub trusted: Result<(), SiteError>,
    /// What keeps users from reading it; srun reads it as its user.
    pub hidden: Option<String>,
}

/// The file's text; `None` where there is none.
///
/// # Errors
/// When it cannot be read, is no text, or may be written or replaced by others than
/// root: what stands in it is set in every user's jobs
/// (<https://github.com/qiskit-community/spank-plugins/issues/72>).
pub fn load(file: &str) -> Result<Option<String>, SiteError> {
    let found = look(file)?;
    found.map(|found| found.trusted.map(|()| found.text)).transpose()
}

/// The file, whoever may write it; `None` where there is none.
///
/// # Errors
/// When it cannot be read or is no text.
pub fn look(file: &str) -> Result<Option<Found>, SiteError> {
    let wrong = |why: String| SiteError::of_file(file, why);
    // Without O_NONBLOCK a fifo holds whoever opens it.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(file);
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let cure = "every user must be able to read it (chmod a+r, and a+x for its directories)";
            return Err(wrong(format!("cannot be opened: {}; {cure}", reason(&error))));
        }
        Err(error) => return Err(wrong(format!("cannot be opened: {}", reason(&error)))),
    };
    let data = opened.metadata().map_err(|error| wrong(format!("cannot be looked at: {}", reason(&error))))?;
    check(&data).map_err(wrong)?;
    let trusted = trust(&data).and_then(|()| way(Path::new(file))).map_err(wrong);
    let mode = data.mode() & 0o7777;
    let hidden = (mode & 0o004 == 0).then(|| {
        format!("{file} is not readable by all (mode {mode:04o}): whoever cannot read it is refused; chmod a+r")
    });
    let text = text(opened).map_err(wrong)?;
    Ok(Some(Found { text, trusted, hidden }))
}

fn check(data: &Metadata) -> Result<(), String> {
    let kind = data.file_type();
    if kind.is_dir() {
        return Err("is a directory; it must be a file".into());
    }
    if !kind.is_file() {
        let what = if kind.is_fifo() { "a fifo" } else { "no regular file" };
        return Err(format!("is {what}; it must be a regular file"));
    }
    if data.len() > LARGEST {
        return Err(format!("is {} bytes long; {LARGEST} are the most", data.len()));
    }
    Ok(())
}

fn trust(data: &Metadata) -> Result<(), String> {
    if data.uid() != 0 {
        return Err(format!("is writable by others than root: it belongs to user {} (chown root)", data.uid()));
    }
    if data.mode() & 0o022 != 0 {
        return Err(format!("is writable by others than root (mode {:04o}; chmod go-w)", data.mode() & 0o7777));
    }
    Ok(())
}

/// Whether root alone decides which file the path leads to: each directory and link on
/// the way must be root's. Others may write to a directory only where its sticky bit
/// keeps them from what is root's in it (unlink(2), EPERM), or its mount is read-only:
/// the kubelet gives a ConfigMap's directory mode 0777. From the top, so that nobody
/// but root can change what was looked at before.
fn way(file: &Path) -> Result<(), String> {
    let unknown = |path: &Path, error: &io::Error| {
        format!("cannot be trusted: {} cannot be looked at: {}", path.display(), reason(error))
    };
    let file = std::path::absolute(file).map_err(|error| unknown(file, &error))?;
    let mut left: VecDeque<PathBuf> = file.components().map(|part| PathBuf::from(part.as_os_str())).collect();
    let mut here = PathBuf::from("/");
    let mut links = 0;
    while let Some(part) = left.pop_front() {
        let path = match part.components().next() {
            // Looked at already.
            Some(Component::ParentDir) => {
                here.pop();
                continue;
            }
            Some(Component::RootDir) => PathBuf::from("/"),
            Some(Component::Normal(name)) => here.join(name),
            _ => continue,
        };
        let data = std::fs::symlink_metadata(&path).map_err(|error| unknown(&path, &error))?;
        let what = if data.is_symlink() { "the link" } else { "the directory" };
        if data.is_file() {
            // Its own owner and mode were looked at where it was opened.
            continue;
        }
        if data.uid() != 0 {
            return Err(format!(
                "is replaceable by others than root: {what} {} on its way belongs to user {}; chown root it, or, where it \
                 is Slurm's own and so SlurmUser's, keep the file in a directory of root's such as /etc/palingenesis",
                path.display(),
                data.uid()
            ));
        }
        if data.is_symlink() {
            links += 1;
            if links > MOST_LINKS {
                return Err("is behind too many links".into());
            }
            let target = std::fs::read_link(&path).map_err(|error| unknown(&path, &error))?;
            for part in target.components().rev() {
                left.push_front(PathBuf::from(part.as_os_str()));
            }
            continue;
        }
        let mode = data.mode() & 0o7777;
        let read_only = || Folder::at(&path.to_string_lossy()).and_then(|folder| folder.room());
        if mode & 0o022 != 0 && mode & 0o1000 == 0 && !read_only().is_ok_and(|room| room.read_only) {
            return Err(format!(
                "is replaceable by others than root: they may write to {what} {} on its way (mode {mode:04o}; chmod go-w)",
                path.display()
            ));
        }
        here = path;
    }
    Ok(())
}

fn text(opened: File) -> Result<String, String> {
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    opened.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {}", reason(&error)))?;
    if bytes.len() as u64 > LARGEST {
        return Err(format!("is longer than {LARGEST} bytes"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() + 1;
        format!("is not UTF-8 in line {line}")
    })
}

/// The system's words without std's number.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    use super::*;

    /// Some user that is not root.
    const OTHER: u32 = 12345;

    struct Tree(PathBuf);

    impl Tree {
        /// a/b/site.toml, all of it root's.
        fn new(name: &str) -> Tree {
            let top = std::env::temp_dir().join(format!("palingenesis-way-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&top);
            let tree = Tree(top);
            fs::create_dir_all(tree.at("a/b")).unwrap();
            fs::write(tree.at("a/b/site.toml"), "port = 21000\n").unwrap();
            for path in ["", "a", "a/b"] {
                tree.mode(path, 0o755);
            }
            tree.mode("a/b/site.toml", 0o644);
            tree
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.join(path)
        }

        fn mode(&self, path: &str, mode: u32) {
            fs::set_permissions(self.at(path), Permissions::from_mode(mode)).unwrap();
        }

        fn load(&self, path: &str) -> Result<Option<String>, SiteError> {
            load(self.at(path).to_str().unwrap())
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Whoever owns a directory may rename what is in it, whoever's that is
    /// (path_resolution(7), rename(2)): root's own file does not help then.
    #[test]
    fn whoever_could_put_another_file_in_its_place_has_it_refused() {
        if fs::metadata("/proc/self").unwrap().uid() != 0 {
            println!("skipped: needs root, for directories of other users");
            return;
        }
        type Change = fn(&Tree);
        let cases: &[(&str, &str, Change, Option<&str>)] = &[
            ("nothing", "a/b/site.toml", |_| {}, None),
            ("a path that goes back", "a/../a/./b/site.toml", |_| {}, None),
            ("the directory above", "a/b/site.toml", |t| chown(t.at("a/b"), Some(OTHER), None).unwrap(), Some("a/b")),
            ("the one above that", "a/b/site.toml", |t| chown(t.at("a"), Some(OTHER), None).unwrap(), Some("a")),
            ("a group may write", "a/b/site.toml", |t| t.mode("a", 0o775), Some("a")),
            ("all may write", "a/b/site.toml", |t| t.mode("a/b", 0o777), Some("a/b")),
            // As /tmp: what is root's there stays root's.
            ("all may write, sticky", "a/b/site.toml", |t| t.mode("a/b", 0o1777), None),
            (
                "the same, another user's",
                "a/b/site.toml",
                |t| {
                    t.mode("a/b", 0o1777);
                    chown(t.at("a/b"), Some(OTHER), None).unwrap();
                },
                Some("a/b"),
            ),
            (
                "root's links",
                "x/site.toml",
                |t| {
                    symlink("a/c", t.at("x")).unwrap();
                    symlink(t.at("a/b"), t.at("a/c")).unwrap();
                },
                None,
            ),
            (
                "a link of another user's",
                "x",
                |t| {
                    symlink("a/b/site.toml", t.at("x")).unwrap();
                    lchown(t.at("x"), Some(OTHER), None).unwrap();
                },
                Some("x"),
            ),
            // The last place is root's, the way there is not.
            (
                "a link through another user's directory",
                "x",
                |t| {
                    fs::create_dir(t.at("u")).unwrap();
                    symlink("../a/b/site.toml", t.at("u/y")).unwrap();
                    chown(t.at("u"), Some(OTHER), None).unwrap();
                    symlink("u/y", t.at("x")).unwrap();
                },
                Some("u"),
            ),
            (
                "a way back through another user's directory",
                "u/../a/b/site.toml",
                |t| {
                    fs::create_dir(t.at("u")).unwrap();
                    chown(t.at("u"), Some(OTHER), None).unwrap();
                },
                Some("u"),
            ),
        ];
        for (number, (what, file, change, at)) in cases.iter().enumerate() {
            let tree = Tree::new(&number.to_string());
            change(&tree);
            match (tree.load(file), at) {
                (Ok(text), None) => assert_eq!(text.as_deref(), Some("port = 21000\n"), "{what}"),
                (Err(error), Some(at)) => {
                    let (text, at) = (error.to_string(), tree.at(at).display().to_string());
                    assert!(text.contains("is replaceable by others than root"), "{what}: {text}");
                    assert!(text.contains(&format!(" {at} on its way")) && text.lines().count() == 1, "{what}: {text}");
                    // Whoever corrects it sees the text all the same.
                    let found = look(tree.at(file).to_str().unwrap()).unwrap().unwrap();
                    assert!(found.trusted.is_err() && found.text.contains("21000"), "{what}");
                }
                (outcome, _) => panic!("{what}: {outcome:?}"),
            }
        }
    }
}
