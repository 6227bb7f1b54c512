//! What is mounted where, of /proc/self/mountinfo (proc(5)).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files::regular;

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where.
    pub at: String,
    /// The file system's type.
    pub kind: String,
    /// What is mounted, without names and passwords of users.
    pub source: String,
}

/// Longer than on a node with thousands of containers.
const MOST: u64 = 16 << 20;

/// Of a line that is longer the rest is left out.
const LONGEST: usize = 256;

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    id: u64,
    mount: Mount,
}

/// The mount on which an open directory lies: by what the kernel says of the descriptor,
/// or else, before Linux 3.15, by its path without links. `root` is that of a recorded
/// machine, or `/`.
pub fn of(root: &Path, descriptor: i32, path: &str) -> Option<Mount> {
    let read = |name: &str| regular(&root.join("proc/self").join(name), MOST).ok().flatten();
    let table = read("mountinfo")?;
    let id = read(&format!("fdinfo/{descriptor}")).and_then(|text| mount_id(&String::from_utf8_lossy(&text)));
    find(&String::from_utf8_lossy(&table), id, path)
}

fn mount_id(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}

/// The mount with that number, or the one that covers `path`: the longest, and of two at
/// one place the later, which hides the other.
fn find(table: &str, id: Option<u64>, path: &str) -> Option<Mount> {
    let lines = || table.lines().filter_map(line);
    if let Some(found) = id.and_then(|id| lines().find(|line| line.id == id)) {
        return Some(found.mount);
    }
    let covers = |at: &str| {
        let at = at.trim_end_matches('/');
        path.strip_prefix(at).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    lines()
        .map(|line| line.mount)
        .filter(|mount| covers(&mount.at))
        .max_by_key(|mount| mount.at.trim_end_matches('/').len())
}

/// `36 35 98:0 /root /at rw,noatime shared:1 - ext3 /dev/sda1 rw`.
fn line(text: &str) -> Option<Line> {
    let (before, after) = text.split_once(" - ")?;
    let before: Vec<&str> = before.split(' ').collect();
    let mut after = after.split(' ');
    let id = before.first()?.parse().ok()?;
    let kind = unescaped(after.next()?);
    let source = unescaped(after.next()?);
    let source = without_user(&kind, &source);
    Some(Line { id, mount: Mount { at: cut(unescaped(before.get(4)?)), kind: cut(kind), source: cut(source) } })
}

fn cut(text: String) -> String {
    text.chars().take(LONGEST).collect()
}

/// Blank, tab, newline and backslash are written as three octal digits.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|digits| digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        let value = digits.map(|digits| digits.iter().fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0')));
        match value.and_then(|value| u8::try_from(value).ok()).filter(|_| *first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `user:password@` before a host, and what follows a `?`, are nobody's business. Lustre
/// alone has an @ of its own: 10.0.0.1@o2ib:/fs.
fn without_user(kind: &str, source: &str) -> String {
    let source = source.split('?').next().unwrap_or_default();
    if kind == "lustre" {
        return source.into();
    }
    let start = source.find("//").map_or(0, |at| at + 2);
    let (scheme, rest) = source.split_at(start);
    // A password may hold a /, which should have been written otherwise.
    let end = match scheme {
        "" => rest.find('/').unwrap_or(rest.len()),
        _ => rest.len(),
    };
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}{}", &rest[at + 1..]),
        None => source.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the form of proc(5); the third line hides the second, the fourth is a bind mount.
    const TABLE: &str = r"21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 21 0:50 / /data rw shared:2 - nfs4 server:/export/data rw,vers=4.2
41 40 0:51 / /data rw - tmpfs tmpfs rw,size=64k
42 21 0:50 /users/me /home/me rw master:1 propagate_from:2 - nfs4 server:/export/data rw
43 21 0:52 / /my\040data\134x rw - cifs //me:s3cret@filer/share rw
44 21 0:53 / /datasets rw - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch rw
";

    fn at(path: &str) -> (String, String, String) {
        let Mount { at, kind, source } = find(TABLE, None, path).unwrap();
        (at, kind, source)
    }

    fn three(at: &str, kind: &str, source: &str) -> (String, String, String) {
        (at.into(), kind.into(), source.into())
    }

    #[test]
    fn the_mount_of_a_path_is_the_longest_and_the_last() {
        assert_eq!(at("/data/out"), three("/data", "tmpfs", "tmpfs"));
        assert_eq!(at("/data"), three("/data", "tmpfs", "tmpfs"));
        assert_eq!(at("/datasets/x"), three("/datasets", "lustre", "10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch"));
        assert_eq!(at("/databases"), three("/", "ext4", "/dev/sda1"));
        assert_eq!(at("/home/me/x").2, "server:/export/data");
        assert_eq!(at("/my data\\x/y"), three("/my data\\x", "cifs", "//filer/share"));
        assert_eq!(find("", None, "/"), None);
        assert_eq!(find("nonsense\n1 2\n - \n5 - a b\n", None, "/"), None);
    }

    #[test]
    fn the_kernel_s_number_goes_before_the_path() {
        assert_eq!(find(TABLE, Some(40), "/data/out").unwrap().kind, "nfs4");
        // A mount that the process cannot see has none.
        assert_eq!(find(TABLE, Some(99), "/data/out").unwrap().kind, "tmpfs");
        assert_eq!(mount_id("pos:\t0\nflags:\t012100000\nmnt_id:\t42\n"), Some(42));
        let folder = crate::system::folder::Folder::root().unwrap();
        assert_eq!(of(Path::new("/"), folder.number(), "/").unwrap().at, "/");
    }

    #[test]
    fn no_name_and_no_password_of_a_user_is_shown() {
        for (source, shown) in [
            ("https://me:pass@dav.example.org/files?sig=abc", "https://dav.example.org/files"),
            ("//me:pa/ss@filer/share", "//filer/share"),
            ("me@host:/dir", "host:/dir"),
            ("server:/export/a@b", "server:/export/a@b"),
            ("fd00::1:/export", "fd00::1:/export"),
            ("overlay", "overlay"),
        ] {
            assert_eq!(without_user("fuse", source), shown);
        }
    }

    #[test]
    fn octal_escapes_and_nothing_else_are_undone() {
        for (text, plain) in
            [(r"a\040b", "a b"), (r"\134040", r"\040"), (r"a\0", r"a\0"), (r"\777", r"\777"), ("ä", "ä")]
        {
            assert_eq!(unescaped(text), plain);
        }
    }
}
