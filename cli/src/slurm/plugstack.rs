//! plugstack.conf as Slurm reads it (src/common/plugstack.c, from 24.05 on spank.c): the
//! files, the lines, and what an include opens. The same in 21.08 to 26.05: `#` cuts a
//! line anywhere, words are parted by blanks, an include is a glob relative to its file,
//! a file that is missing counts as empty, and one that cannot be opened stops the command.

use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use super::access::{self, Access, Closed};
use super::tree::{Tree, reason};

/// Slurm reads a line into so many bytes, and takes the rest for the next line.
const LINE: usize = 4095;

/// Slurm does not count; a file that includes itself ends its commands.
const DEEPEST: usize = 16;

/// Far more than on any host.
const MOST_FILES: usize = 1000;

/// A line that loads a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The file it stands in.
    pub file: String,
    /// Its number.
    pub number: usize,
    /// required, not optional.
    pub required: bool,
    /// The plugin, as written.
    pub path: String,
    /// What follows.
    pub arguments: Vec<String>,
}

impl Line {
    /// Whether it loads palingenesis.
    pub fn is_ours(&self) -> bool {
        self.path.rsplit('/').next().is_some_and(|name| name.contains("palingenesis"))
    }

    /// Whether it loads pyxis.
    pub fn is_pyxis(&self) -> bool {
        self.path.rsplit('/').next().is_some_and(|name| name.contains("pyxis"))
    }

    /// "/etc/slurm/plugstack.conf:3".
    pub fn place(&self) -> String {
        format!("{}:{}", self.file, self.number)
    }
}

/// A line that includes files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Include {
    /// The file it stands in, and its number.
    pub place: String,
    /// The pattern, absolute.
    pub pattern: String,
    /// What it matches now.
    pub files: Vec<String>,
    /// What keeps users from seeing the names in its directory, where there are wildcards.
    pub closed: Option<Closed>,
    /// How many lines stood before each of them, and before what follows the include.
    pub before: Vec<usize>,
}

impl Include {
    /// How many of the stack's lines would stand before those of a file that is put where
    /// this include finds it, and is not there yet.
    pub fn place_of(&self, path: &str) -> usize {
        let later = self.files.iter().position(|file| file.as_str() > path).unwrap_or(self.files.len());
        self.before.get(later).copied().unwrap_or(usize::MAX)
    }

    /// Where a file of that name would be included by this pattern: its directory must be
    /// named whole.
    pub fn would_include(&self, name: &str) -> Option<String> {
        let (folder, pattern) = self.pattern.rsplit_once('/')?;
        let wild = |text: &str| text.contains(['*', '?', '[']);
        if wild(folder) || !wild(pattern) {
            return None;
        }
        let (pattern, c_name) = (std::ffi::CString::new(pattern).ok()?, std::ffi::CString::new(name).ok()?);
        // SAFETY: two C strings that are only read.
        let fits = unsafe { libc::fnmatch(pattern.as_ptr(), c_name.as_ptr(), libc::FNM_PERIOD) } == 0;
        fits.then(|| format!("{folder}/{name}"))
    }
}

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It was read.
    Read,
    /// It is not there, and Slurm passes over it.
    Missing,
    /// A directory: opened, and nothing is read.
    Folder,
    /// Slurm's commands stop here, or wait for ever.
    Fault(String),
}

/// A file that Slurm opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// Its path.
    pub path: String,
    /// What became of it.
    pub state: State,
    /// Where it leads, if it is a link.
    pub link: Option<String>,
    /// Who may read and change it.
    pub access: Access,
    /// When it was changed or put in place.
    pub changed: Option<SystemTime>,
}

/// plugstack.conf with all that it includes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stack {
    /// plugstack.conf itself.
    pub file: String,
    /// Every file, in order.
    pub opened: Vec<Opened>,
    /// Every line that loads a plugin, in order.
    pub lines: Vec<Line>,
    /// Every include.
    pub includes: Vec<Include>,
    /// Lines that Slurm complains of and ignores: place and text.
    pub bad: Vec<(String, String)>,
    /// A file that includes itself, or far too many.
    pub endless: Option<String>,
}

impl Stack {
    /// What became of plugstack.conf itself.
    pub fn state(&self) -> &State {
        self.opened.first().map_or(&State::Missing, |opened| &opened.state)
    }

    /// The lines of ours.
    pub fn ours(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| line.is_ours())
    }
}

/// Reads it as far as there is something to read.
pub fn read(tree: &Tree, file: &str) -> Stack {
    let mut stack = Stack { file: file.into(), ..Stack::default() };
    open(&mut stack, tree, file, 0);
    stack
}

fn open(stack: &mut Stack, tree: &Tree, path: &str, depth: usize) {
    if depth > DEEPEST || stack.opened.len() >= MOST_FILES {
        stack.endless.get_or_insert_with(|| path.into());
        return;
    }
    let (mut opened, text) = look(tree, path);
    opened.link = tree.link(path);
    stack.opened.push(opened);
    for (number, line) in text.iter().enumerate() {
        take(stack, tree, path, number + 1, line, depth);
    }
}

fn look(tree: &Tree, path: &str) -> (Opened, Vec<String>) {
    let mut opened =
        Opened { path: path.into(), state: State::Read, link: None, access: Access::default(), changed: None };
    let failed = |opened: Opened, error: &std::io::Error| {
        let state = match error.kind() {
            ErrorKind::NotFound => State::Missing,
            _ => State::Fault(reason(error)),
        };
        (Opened { state, ..opened }, Vec::new())
    };
    let file = match tree.open(path) {
        Ok(file) => file,
        Err(error) => return failed(opened, &error),
    };
    let data = match file.metadata() {
        Ok(data) => data,
        Err(error) => return failed(opened, &error),
    };
    // The link may be newer than what it leads to.
    let of_link = tree.file(path).ok().and_then(|_| std::fs::symlink_metadata(path).ok()).filter(|_| tree.is_machine());
    let seconds = data.ctime().max(of_link.map_or(0, |data| data.ctime()));
    let since = std::time::Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    opened.changed = Some(SystemTime::UNIX_EPOCH + since);
    opened.access = access::of(tree, path);
    if data.is_dir() {
        return (Opened { state: State::Folder, access: Access::default(), ..opened }, Vec::new());
    }
    if !data.is_file() {
        let why = "it is no regular file, and whoever opens it may wait for ever".into();
        return (Opened { state: State::Fault(why), ..opened }, Vec::new());
    }
    let mut bytes = Vec::new();
    match file.take(1 << 20).read_to_end(&mut bytes) {
        Ok(_) => (opened, lines(&bytes)),
        Err(error) => failed(opened, &error),
    }
}

/// As fgets into Slurm's buffer has them; what is behind a NUL is not seen.
fn lines(bytes: &[u8]) -> Vec<String> {
    let whole = bytes.split_inclusive(|byte| *byte == b'\n');
    let parts = whole.flat_map(|line| line.chunks(LINE));
    parts.map(|line| String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into()).collect()
}

fn take(stack: &mut Stack, tree: &Tree, file: &str, number: usize, line: &str, depth: usize) {
    let text = line.split('#').next().unwrap_or_default();
    let mut words = text.split([' ', '\t', '\n']).filter(|word| !word.is_empty()).map(String::from);
    let Some(kind) = words.next() else { return };
    let place = format!("{file}:{number}");
    let mut bad = || stack.bad.push((place.clone(), text.trim().to_string()));
    if !["required", "optional", "include"].contains(&kind.as_str()) {
        return bad();
    }
    let Some(path) = words.next() else { return bad() };
    if kind != "include" {
        let required = kind == "required";
        stack.lines.push(Line { file: file.into(), number, required, path, arguments: words.collect() });
        return;
    }
    let folder = Path::new(file).parent().unwrap_or(Path::new("/"));
    let pattern = folder.join(path).to_string_lossy().into_owned();
    let files = tree.glob(&pattern);
    let index = stack.includes.len();
    let wild = pattern.rsplit_once('/').filter(|(_, name)| name.contains(['*', '?', '[']));
    let closed = wild.and_then(|(folder, _)| access::of(tree, folder).closed);
    stack.includes.push(Include { place, pattern, files: files.clone(), closed, before: Vec::new() });
    for file in &files {
        stack.includes[index].before.push(stack.lines.len());
        open(stack, tree, file, depth + 1);
    }
    stack.includes[index].before.push(stack.lines.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    fn tree(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("palingenesis-stack-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("etc/slurm/plugstack.conf.d")).unwrap();
        root
    }

    /// By src/common/spank.c of Slurm, and tried on 22.05.8.
    #[test]
    fn files_and_lines_are_those_that_slurm_reads() {
        let root = tree("read");
        let write = |name: &str, text: &str| fs::write(root.join("etc/slurm").join(name), text).unwrap();
        write(
            "plugstack.conf",
            "# all\n\n include plugstack.conf.d/* # relative to this file\nrequired\t/x/spank_pyxis.so \
            runtime_path=/run \
             #optional y\nbogus /z.so\noptional\n",
        );
        write("plugstack.conf.d/zz.conf", "optional /l/spank_palingenesis.so gate=5 config=/e.toml");
        write("plugstack.conf.d/.hidden", "optional /l/hidden.so\n");
        fs::create_dir(root.join("etc/slurm/plugstack.conf.d/folder")).unwrap();
        symlink("/nowhere", root.join("etc/slurm/plugstack.conf.d/gone.conf")).unwrap();
        let closed = root.join("etc/slurm/plugstack.conf.d/sed6Yj8Ga");
        fs::write(&closed, "").unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o600)).unwrap();
        let stack = read(&Tree::new(&root), "/etc/slurm/plugstack.conf");
        let lines: Vec<(String, bool, &str)> =
            stack.lines.iter().map(|line| (line.place(), line.required, line.path.as_str())).collect();
        assert_eq!(
            lines,
            [
                ("/etc/slurm/plugstack.conf.d/zz.conf:1".into(), false, "/l/spank_palingenesis.so"),
                ("/etc/slurm/plugstack.conf:4".into(), true, "/x/spank_pyxis.so"),
            ]
        );
        assert_eq!(stack.lines[0].arguments, ["gate=5", "config=/e.toml"]);
        assert_eq!(stack.lines[1].arguments, ["runtime_path=/run"]);
        assert!(stack.lines[0].is_ours() && stack.lines[1].is_pyxis());
        assert_eq!(
            stack.bad.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(),
            ["/etc/slurm/plugstack.conf:5", "/etc/slurm/plugstack.conf:6"]
        );
        let state = |name: &str| {
            let path = format!("/etc/slurm/plugstack.conf.d/{name}");
            stack.opened.iter().find(|opened| opened.path == path).cloned()
        };
        assert_eq!(state("folder").unwrap().state, State::Folder);
        let gone = state("gone.conf").unwrap();
        assert_eq!((gone.state, gone.link.as_deref()), (State::Missing, Some("/nowhere")));
        assert_eq!(state("sed6Yj8Ga").unwrap().access.closed.map(|closed| closed.why).as_deref(), Some("mode 0600"));
        assert_eq!(state(".hidden"), None);
        // A new file of the include would come before its zz.conf, or after it.
        let include = &stack.includes[0];
        let place = |name: &str| include.would_include(name).map(|path| include.place_of(&path));
        assert_eq!(place("zy.conf"), Some(0));
        assert_eq!(place("zz.conf-"), Some(1));
        assert_eq!(place(".zz.conf"), None);
        // A file that is not there is an empty one.
        assert_eq!(*read(&Tree::new(&root), "/etc/none.conf").state(), State::Missing);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn what_never_ends_ends_here() {
        let root = tree("endless");
        fs::write(root.join("etc/slurm/plugstack.conf"), "include plugstack.conf\ninclude plugstack.conf\n").unwrap();
        let stack = read(&Tree::new(&root), "/etc/slurm/plugstack.conf");
        assert!(stack.endless.is_some() && stack.opened.len() <= MOST_FILES);
        fs::write(root.join("etc/slurm/plugstack.conf"), vec![b'a'; 10_000]).unwrap();
        assert_eq!(read(&Tree::new(&root), "/etc/slurm/plugstack.conf").bad.len(), 3);
        fs::remove_dir_all(&root).unwrap();
    }
}
