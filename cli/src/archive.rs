//! A record of a machine as a tar archive: written for a bug report, and unpacked
//! again to look at the machine elsewhere. What is unpacked comes from a stranger:
//! all of it is checked before anything of it is on disk.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use palingenesis::config::printable;
use palingenesis::facts::record::Entry;
use tar::{Builder, EntryType, Header};

/// What a record may hold: a large node's has a few hundred files.
const MOST_ENTRIES: usize = 10_000;
const MOST_BYTES: u64 = 16 << 20;
/// The archive with its headers, a kilobyte for each entry.
const LARGEST: u64 = MOST_BYTES + 2 * 1024 * MOST_ENTRIES as u64;
const LONGEST_NAME: usize = 1024;
/// As the kernel follows them.
const MOST_LINKS: usize = 40;

/// By path, relative to the root.
type Entries = BTreeMap<String, Entry>;

/// Writes the archive, the same for the same entries; tells its length in bytes.
pub fn write(file: &Path, entries: &Entries) -> anyhow::Result<u64> {
    let bytes: usize = entries.values().map(|entry| if let Entry::File(text) = entry { text.len() } else { 0 }).sum();
    if entries.len() > MOST_ENTRIES || bytes as u64 > MOST_BYTES {
        bail!("{} files of {bytes} bytes are more than a record may hold", entries.len());
    }
    let failed = |error: io::Error| anyhow!("cannot write {}: {error}", shown(file));
    let open = File::create(file).map_err(failed)?;
    let packed = pack(BufWriter::new(open), entries);
    packed.and_then(|writer| writer.into_inner()?.metadata()).map(|data| data.len()).map_err(|error| {
        // Half an archive must not be sent to anybody.
        let _ = fs::remove_file(file);
        failed(error)
    })
}

fn pack<W: Write>(writer: W, entries: &Entries) -> io::Result<W> {
    let mut builder = Builder::new(writer);
    for (name, entry) in entries {
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        match entry {
            Entry::File(text) => {
                header.set_mode(0o644);
                header.set_size(text.len() as u64);
                builder.append_data(&mut header, name, text.as_bytes())?;
            }
            Entry::Directory => {
                header.set_entry_type(EntryType::Directory);
                header.set_mode(0o755);
                header.set_size(0);
                builder.append_data(&mut header, name, io::empty())?;
            }
            Entry::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_mode(0o777);
                header.set_size(0);
                builder.append_link(&mut header, name, target)?;
            }
        }
    }
    builder.into_inner()
}

/// A directory that is removed when dropped.
#[derive(Debug)]
pub struct Unpacked(PathBuf);

impl Unpacked {
    /// The root of the recorded machine.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// An empty one that nobody else can look into or has prepared.
    fn empty() -> io::Result<Unpacked> {
        let mut number = 0;
        loop {
            let directory = std::env::temp_dir().join(format!("palingenesis-record-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&directory) {
                Ok(()) => return Ok(Unpacked(directory)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 1000 => number += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Unpacks an archive into a directory of its own.
pub fn unpack(file: &Path) -> anyhow::Result<Unpacked> {
    let entries = read(file).map_err(|why| anyhow!("{} is no record that can be replayed: {why:#}", shown(file)))?;
    let unpacked = Unpacked::empty().map_err(|why| anyhow!("cannot make a directory for the record: {why}"))?;
    let laid_out = lay_out(unpacked.root(), &entries);
    laid_out.map_err(|why| anyhow!("cannot unpack the record into {}: {why}", shown(unpacked.root())))?;
    Ok(unpacked)
}

/// Files first: no link is there yet that could lead one elsewhere.
fn lay_out(root: &Path, entries: &Entries) -> io::Result<()> {
    let make = |directory: &Path| DirBuilder::new().recursive(true).mode(0o700).create(directory);
    let parent = |path: &Path| path.parent().map_or(Ok(()), make);
    for (name, entry) in entries {
        let path = root.join(name);
        match entry {
            Entry::Directory => make(&path)?,
            Entry::File(text) => {
                parent(&path)?;
                fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path)?
                    .write_all(text.as_bytes())?;
            }
            Entry::Link(_) => {}
        }
    }
    for (name, entry) in entries {
        if let Entry::Link(target) = entry {
            let path = root.join(name);
            parent(&path)?;
            symlink(target, &path)?;
        }
    }
    Ok(())
}

fn shown(file: &Path) -> String {
    printable(&file.to_string_lossy())
}

/// What an archive holds, checked.
fn read(file: &Path) -> anyhow::Result<Entries> {
    // Before it is opened: a fifo would hold whoever does.
    let data = fs::metadata(file)?;
    if !data.is_file() {
        bail!("neither a directory nor a file");
    }
    if data.len() > LARGEST {
        bail!("{} bytes long; {LARGEST} are the most", data.len());
    }
    let mut reader = BufReader::new(File::open(file)?.take(LARGEST));
    if io::BufRead::fill_buf(&mut reader)?.starts_with(&[0x1f, 0x8b]) {
        bail!("it is compressed; gunzip it first");
    }
    let entries = entries(reader)?;
    check_links(&entries)?;
    Ok(entries)
}

fn entries(reader: impl Read) -> anyhow::Result<Entries> {
    let mut entries = Entries::new();
    let mut bytes = 0;
    for entry in tar::Archive::new(reader).entries()? {
        let mut entry = entry.context("not a tar archive")?;
        let kind = entry.header().entry_type();
        // The commit's id that git archive puts in front.
        if kind.is_pax_global_extensions() {
            continue;
        }
        let Some(name) = checked_name(&entry.path_bytes())? else {
            continue;
        };
        let found = match kind {
            EntryType::Directory => Entry::Directory,
            EntryType::Regular | EntryType::Continuous => {
                let mut content = Vec::new();
                entry.by_ref().take(MOST_BYTES + 1 - bytes).read_to_end(&mut content)?;
                bytes += content.len() as u64;
                if bytes > MOST_BYTES {
                    bail!("it holds more than {MOST_BYTES} bytes");
                }
                Entry::File(String::from_utf8_lossy(&content).into_owned())
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default();
                let target = String::from_utf8(target.into_owned()).ok().filter(|target| fits(target));
                Entry::Link(target.with_context(|| format!("{}: a link that leads to no path", printable(&name)))?)
            }
            other => bail!("{}: neither file, directory nor symbolic link (type {other:?})", printable(&name)),
        };
        if entries.len() == MOST_ENTRIES {
            bail!("it holds more than {MOST_ENTRIES} entries");
        }
        match entries.insert(name.clone(), found) {
            None | Some(Entry::Directory) => {}
            Some(_) => bail!("{} is in it twice", printable(&name)),
        }
    }
    if entries.is_empty() {
        bail!("it is empty");
    }
    Ok(entries)
}

fn fits(path: &str) -> bool {
    !path.is_empty() && path.len() <= LONGEST_NAME && !path.contains(char::is_control)
}

/// A name as entries have it; `None` for the root itself.
fn checked_name(bytes: &[u8]) -> anyhow::Result<Option<String>> {
    let name = String::from_utf8_lossy(bytes);
    if !fits(&name) || std::str::from_utf8(bytes).is_err() {
        bail!("{}: no path of a record", printable(&name));
    }
    if name.starts_with('/') {
        bail!("{}: an absolute path", printable(&name));
    }
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        bail!("{}: a path with ..", printable(&name));
    }
    Ok(Some(parts.join("/")).filter(|name| !name.is_empty()))
}

/// Nothing lies below a file or a link, and no link leads out of the tree, or to
/// its root, by whatever way the kernel would take.
fn check_links(entries: &Entries) -> anyhow::Result<()> {
    for (name, entry) in entries {
        for (at, _) in name.match_indices('/') {
            if entries.get(&name[..at]).is_some_and(|above| *above != Entry::Directory) {
                bail!("{} lies below what is no directory", printable(name));
            }
        }
        if matches!(entry, Entry::Link(_)) {
            follow(entries, name).map_err(|why| anyhow!("{}: {why}", printable(name)))?;
        }
    }
    Ok(())
}

/// Follows a link as the kernel does, inside the archive.
fn follow(entries: &Entries, name: &str) -> Result<(), String> {
    let mut ahead: VecDeque<&str> = name.split('/').collect();
    let mut here: Vec<&str> = Vec::new();
    let mut links = 0;
    while let Some(part) = ahead.pop_front() {
        match part {
            "" | "." => {}
            ".." => {
                here.pop().ok_or(OUT)?;
            }
            part => {
                here.push(part);
                let Some(Entry::Link(target)) = entries.get(&here.join("/")) else {
                    continue;
                };
                here.pop();
                links += 1;
                if links > MOST_LINKS {
                    return Err("links that lead round in a circle".into());
                }
                if target.starts_with('/') {
                    return Err("a link to an absolute path".into());
                }
                target.split('/').rev().for_each(|part| ahead.push_front(part));
            }
        }
    }
    // The root is out too: a reader may go up from what it was led to.
    if here.is_empty() { Err(OUT.into()) } else { Ok(()) }
}

const OUT: &str = "a link that leads out of the record";

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive of its own name with `build`'s entries.
    fn archive(name: &str, build: impl FnOnce(&mut Builder<File>)) -> PathBuf {
        let file = std::env::temp_dir().join(format!("palingenesis-archive-{name}-{}.tar", std::process::id()));
        let mut builder = Builder::new(File::create(&file).unwrap());
        build(&mut builder);
        builder.finish().unwrap();
        file
    }

    /// The name and target as they are, whatever the crate thinks of them.
    fn raw(builder: &mut Builder<File>, kind: EntryType, name: &str, target: &str, text: &str) {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_entry_type(kind);
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }

    fn refusal(name: &str, build: impl FnOnce(&mut Builder<File>)) -> String {
        let file = archive(name, build);
        let found = unpack(&file);
        fs::remove_file(&file).unwrap();
        let error = found.expect_err(name);
        error.to_string()
    }

    fn links(links: &[(&str, &str)]) -> String {
        let name = format!("links-{}", links.iter().map(|(name, _)| name.replace('/', "_")).collect::<String>());
        refusal(&name, |builder| {
            raw(builder, EntryType::Regular, "a/b/c/file", "", "x");
            links.iter().for_each(|(name, target)| raw(builder, EntryType::Symlink, name, target, ""));
        })
    }

    #[test]
    fn what_is_written_comes_back_the_same_each_time() {
        let deep = format!("sys/devices/{}infiniband/mlx5_0/ports/1/state", "0000:17:01.0/".repeat(20));
        let target = format!("../../devices/{}infiniband/mlx5_0", "0000:17:01.0/".repeat(20));
        let entries = Entries::from([
            (deep.clone(), Entry::File("4: ACTIVE\n".into())),
            ("sys/class/infiniband/mlx5_0".into(), Entry::Link(target)),
            ("sys/class/net".into(), Entry::Directory),
            ("sys/bus/driver".into(), Entry::Link("../nowhere".into())),
            ("proc/empty".into(), Entry::File(String::new())),
        ]);
        let files = [archive("same-1", |_| {}), archive("same-2", |_| {})];
        let lengths = files.each_ref().map(|file| write(file, &entries).unwrap());
        let bytes = files.each_ref().map(|file| fs::read(file).unwrap());
        assert_eq!((&bytes[0], bytes[0].len() as u64), (&bytes[1], lengths[0]));
        assert_eq!(read(&files[0]).unwrap(), entries);
        let unpacked = unpack(&files[0]).unwrap();
        let root = unpacked.root().to_path_buf();
        let state = fs::read_to_string(root.join("sys/class/infiniband/mlx5_0/ports/1/state"));
        assert_eq!(state.unwrap(), "4: ACTIVE\n");
        assert!(root.join("sys/class/net").is_dir() && root.join("sys/bus/driver").is_symlink());
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
        drop(unpacked);
        assert!(!root.exists());
        files.iter().for_each(|file| fs::remove_file(file).unwrap());
    }

    /// What people pack again by hand: ./ in front, directories listed.
    #[test]
    fn an_archive_of_tar_itself_is_read_too() {
        let file = archive("by-hand", |builder| {
            raw(builder, EntryType::Directory, "./", "", "");
            raw(builder, EntryType::Directory, "./proc/", "", "");
            raw(builder, EntryType::Regular, "./proc/x", "", "1");
            raw(builder, EntryType::Directory, "./proc/", "", "");
        });
        let entries = read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(entries.keys().collect::<Vec<_>>(), ["proc", "proc/x"]);
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        for (name, part) in [
            ("/etc/passwd", "an absolute path"),
            ("../x", "a path with .."),
            ("sys/../../x", "a path with .."),
            ("a\n/b", "no path of a record"),
        ] {
            let why = refusal("names", |builder| raw(builder, EntryType::Regular, name, "", "x"));
            assert!(why.contains(part) && !why.contains('\n'), "{name}: {why}");
        }
    }

    #[test]
    fn links_that_leave_the_directory_are_refused() {
        let out = "leads out of the record";
        for (list, part) in [
            (&[("l", "/etc")][..], "absolute path"),
            (&[("l", "..")], out),
            (&[("a/l", "../..")], out),
            (&[("a/l", "..")], out),
            (&[("l", "a/b/../../..")], out),
            // By way of another, which makes .. lead elsewhere than it looks.
            (&[("a/b/c/up", "../.."), ("a/b/c/l", "up/../..")], out),
            (&[("a/b/c/up", "../../../z"), ("z", "a/b/c/l"), ("a/b/c/l", "../../../..")], out),
            (&[("l", "m"), ("m", "l")], "round in a circle"),
            (&[("l", "l/x")], "round in a circle"),
            (&[("l", "")], "leads to no path"),
            // Through a link, and in place of a file.
            (&[("l", "a"), ("l/x", "b")], "below what is no directory"),
            (&[("a/b/c/file/l", "x")], "below what is no directory"),
            (&[("l", "a"), ("l", "a/b")], "in it twice"),
        ] {
            let why = links(list);
            assert!(why.contains(part), "{list:?}: {why}");
        }
        let fine = archive("fine", |builder| {
            raw(builder, EntryType::Regular, "a/b/c/file", "", "x");
            raw(builder, EntryType::Symlink, "a/b/up", "../../a/b/c", "");
            raw(builder, EntryType::Symlink, "d/e", "../a/nowhere/x", "");
        });
        assert!(unpack(&fine).is_ok());
        fs::remove_file(&fine).unwrap();
    }

    #[test]
    fn devices_pipes_and_hard_links_are_refused() {
        for kind in [EntryType::Block, EntryType::Char, EntryType::Fifo, EntryType::Link] {
            let why = refusal("kinds", |builder| raw(builder, kind, "x", "a", ""));
            assert!(why.contains("neither file, directory nor symbolic link"), "{kind:?}: {why}");
        }
        let why = refusal("sparse-kind", |builder| raw(builder, EntryType::GNUSparse, "x", "a", ""));
        assert!(why.contains("no record that can be replayed"), "{why}");
    }

    #[test]
    fn a_large_archive_and_one_that_only_says_so_are_refused() {
        let text = "x".repeat(9 << 20);
        let why = refusal("large", |builder| {
            raw(builder, EntryType::Regular, "a", "", &text);
            raw(builder, EntryType::Regular, "b", "", &text);
        });
        assert!(why.contains("more than 16777216 bytes"), "{why}");
        let why = refusal("many", |builder| {
            (0..=MOST_ENTRIES).for_each(|number| raw(builder, EntryType::Regular, &number.to_string(), "", ""));
        });
        assert!(why.contains("more than 10000 entries"), "{why}");
        let why = refusal("sparse", |builder| builder.get_ref().set_len(1 << 40).unwrap());
        assert!(why.contains("are the most"), "{why}");
        let why = refusal("says-so", |builder| {
            let mut header = Header::new_gnu();
            header.set_path("a").unwrap();
            header.set_size(1 << 60);
            header.set_cksum();
            builder.append(&header, io::empty()).unwrap();
        });
        assert!(why.contains("no record that can be replayed"), "{why}");
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let of = |bytes: &[u8]| {
            let file = std::env::temp_dir().join(format!("palingenesis-archive-other-{}", std::process::id()));
            fs::write(&file, bytes).unwrap();
            let error = unpack(&file).expect_err("no archive");
            fs::remove_file(&file).unwrap();
            error.to_string()
        };
        assert!(of(b"").contains("it is empty"));
        assert!(of(&[0x1f, 0x8b, 8, 0]).contains("gunzip it first"));
        assert!(of(&[b'x'; 2048]).contains("not a tar archive"));
        let directory = unpack(&std::env::temp_dir()).expect_err("a directory");
        assert!(directory.to_string().contains("neither a directory nor a file"));
        assert!(write(Path::new("/nonexistent/x.tar"), &Entries::new()).is_err());
    }

    /// Nothing of it is a panic, whatever bytes are changed.
    #[test]
    fn a_damaged_archive_is_an_error_or_another_one() {
        let file = archive("damaged", |builder| {
            raw(builder, EntryType::Regular, "a/b", "", "text");
            raw(builder, EntryType::Symlink, "c", "a/b", "");
        });
        let whole = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..3 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = (state >> 16) as usize % bytes.len();
                bytes[at] = state as u8;
            }
            bytes.truncate((state >> 40) as usize % (bytes.len() + 1));
            if let Ok(entries) = entries(bytes.as_slice()) {
                let _ = check_links(&entries);
            }
        }
    }
}
