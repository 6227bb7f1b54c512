//! Who may read and who may change a file that Slurm's commands and daemons read, by
//! owners and modes. Access lists are not looked at.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::tree::Tree;

/// The first id of people; below are the system's accounts, such as Slurm's own
/// (login.defs(5)).
const PEOPLE: u32 = 1000;

/// What was found of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// What keeps users from reading it.
    pub closed: Option<Closed>,
    /// How people may change it: "mode 0666".
    pub loose: Option<String>,
}

/// What keeps users from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closed {
    /// "mode 0600", "/etc/slurm has mode 0700".
    pub why: String,
    /// What opens it, for others.
    pub cure: String,
    /// Whether a group may read it, in which all users might be.
    pub but_group: bool,
}

/// Of a file, or of a directory whose names must be seen.
pub fn of(tree: &Tree, path: &str) -> Access {
    let mut access = Access::default();
    let Ok(data) = tree.metadata(path) else { return access };
    let mode = data.mode() & 0o7777;
    let needed = if data.is_dir() { 0o5 } else { 0o4 };
    let mut closed: Vec<Closed> = Vec::new();
    let close = |data: &Metadata, needed: u32, why: String, cure: String| {
        let lacks = data.mode() & needed != needed;
        let but_group = data.gid() != 0 && data.mode() & (needed << 3) == needed << 3;
        lacks.then_some(Closed { why, cure, but_group })
    };
    for (folder, shown) in folders(tree, path) {
        let Ok(data) = std::fs::metadata(&folder) else { continue };
        let mode = data.mode() & 0o7777;
        closed.extend(close(&data, 0o1, format!("{shown} has mode {mode:04o}"), format!("chmod a+x {shown}")));
        // Who may write there may put another file in its place; not where the sticky bit
        // keeps them from what is root's.
        let group = mode & 0o020 != 0 && data.gid() != 0;
        if mode & 0o1000 == 0 && (mode & 0o002 != 0 || group) {
            access.loose = Some(format!("{shown} has mode {mode:04o}"));
        } else if data.uid() >= PEOPLE {
            access.loose = Some(format!("{shown} belongs to user {}", data.uid()));
        }
    }
    let cure = if data.is_dir() { format!("chmod a+rx {path}") } else { format!("chmod a+r {path}") };
    closed.extend(close(&data, needed, format!("mode {mode:04o}"), cure));
    closed.sort_by_key(|closed| closed.but_group);
    access.closed = closed.into_iter().next();
    if mode & 0o002 != 0 || (mode & 0o020 != 0 && data.gid() != 0) {
        access.loose = Some(format!("mode {mode:04o}"));
    } else if data.uid() >= PEOPLE {
        access.loose = Some(format!("it belongs to user {}", data.uid()));
    }
    access
}

/// The directories on the way, by the path as written and without links, and how the
/// machine calls them.
fn folders(tree: &Tree, path: &str) -> Vec<(PathBuf, String)> {
    let below = |path: &Path| -> Vec<PathBuf> {
        path.ancestors().skip(1).take_while(|folder| folder.starts_with(tree.root())).map(PathBuf::from).collect()
    };
    let written = tree.root().join(path.trim_start_matches('/'));
    let real = tree.file(path).ok().and_then(|path| path.canonicalize().ok());
    let mut all: Vec<PathBuf> = [Some(written), real].into_iter().flatten().flat_map(|path| below(&path)).collect();
    all.sort();
    all.dedup();
    let shown = |folder: &PathBuf| Path::new("/").join(folder.strip_prefix(tree.root()).unwrap_or(folder));
    all.into_iter().map(|folder| (shown(&folder).to_string_lossy().into_owned(), folder)).map(|(a, b)| (b, a)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn the_file_and_every_directory_on_the_way_and_behind_a_link() {
        let root = std::env::temp_dir().join(format!("palingenesis-access-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let mode = |path: &str, mode: u32| {
            fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        for folder in ["etc/d", "usr/share"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for folder in ["", "etc", "etc/d", "usr", "usr/share"] {
            mode(folder, 0o755);
        }
        fs::write(root.join("usr/share/p.conf"), "").unwrap();
        mode("usr/share/p.conf", 0o644);
        symlink("/usr/share/p.conf", root.join("etc/d/p.conf")).unwrap();
        let tree = Tree::new(&root.canonicalize().unwrap());
        // Of another group than root's, in which this process is or which it may give.
        let own = fs::metadata(&root).unwrap();
        let groups = if own.uid() == 0 { PEOPLE } else { own.gid() };
        let why = |path: &str| of(&tree, path).closed.map(|closed| closed.why);
        assert_eq!((why("/etc/d/p.conf"), why("/etc/d"), why("/none")), (None, None, None));
        mode("usr/share", 0o700);
        assert_eq!(why("/etc/d/p.conf").as_deref(), Some("/usr/share has mode 0700"));
        mode("usr/share", 0o755);
        mode("etc/d", 0o711);
        assert_eq!((why("/etc/d/p.conf"), why("/etc/d").as_deref()), (None, Some("mode 0711")));
        mode("etc/d", 0o755);
        mode("usr/share/p.conf", 0o600);
        assert_eq!(of(&tree, "/etc/d/p.conf").closed.unwrap().cure, "chmod a+r /etc/d/p.conf");
        mode("usr/share/p.conf", 0o666);
        assert_eq!(of(&tree, "/etc/d/p.conf").loose.as_deref(), Some("mode 0666"));
        mode("usr/share/p.conf", 0o644);
        mode("usr/share", 0o777);
        assert_eq!(
            of(&tree, "/etc/d/p.conf").loose.as_deref().map(|why| why.starts_with("/usr/share has")),
            Some(true)
        );
        mode("usr/share", 0o775);
        std::os::unix::fs::chown(root.join("usr/share"), None, Some(groups)).unwrap();
        assert!(of(&tree, "/etc/d/p.conf").loose.is_some_and(|why| why.starts_with("/usr/share has mode 0775")));
        mode("usr/share", 0o1777);
        assert_eq!(of(&tree, "/etc/d/p.conf").loose.is_some(), own.uid() >= PEOPLE);
        if own.uid() == 0 {
            mode("usr/share", 0o755);
            std::os::unix::fs::chown(root.join("usr/share"), Some(PEOPLE), None).unwrap();
            let why = of(&tree, "/etc/d/p.conf").loose;
            assert_eq!(why.as_deref(), Some("/usr/share belongs to user 1000"));
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
