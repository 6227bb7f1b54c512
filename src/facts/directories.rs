//! Directories for caches, as the task sees them: whether they can be used, on
//! what kind of file system, how much room there is. Nothing is made here (see
//! `act/directories.rs`). Everything runs in a child with a deadline: a dead
//! file server answers no call.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::system::child;
use crate::system::folder::{Folder, Found, Room, user};

/// How long file servers may take to answer, all together.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What one root gets, also when others have used the time up.
const LEAST: Duration = Duration::from_secs(2);

/// The process that makes or looks at the directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Here {
    /// Its user's id.
    pub user: u32,
    /// Its working directory.
    pub folder: Option<String>,
}

/// This process.
pub fn here() -> Here {
    let folder = std::env::current_dir().ok();
    Here { user: user(), folder: folder.and_then(|folder| folder.to_str().map(String::from)) }
}

/// What a directory is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The root of the shared caches.
    Shared,
    /// A root for what compilers keep on the node.
    Local,
    /// A variable of somebody else names it; it is looked at, never made.
    Given,
}

/// One root that is wanted, and what is to be below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What for.
    pub purpose: Purpose,
    /// The root; absolute.
    pub root: String,
    /// Whether the root itself may be made.
    pub make_root: bool,
    /// A directory in it that must be the user's alone: no link, 0700.
    pub own: Option<String>,
    /// The caches' directories, in `own` or in the root.
    pub folders: Vec<String>,
    /// Only where the requests before, back to the first without this, failed.
    pub otherwise: bool,
    /// Refuses network file systems.
    pub on_the_node: bool,
    /// Whether to try by a file that it can be written.
    pub probe: bool,
    /// A folder, and a directory into which a hard link from it must work.
    pub link: Option<(String, String)>,
    /// Whether the task is in a container, where a directory that is not mounted
    /// would go with it.
    pub in_container: bool,
}

impl Request {
    /// A directory to look at.
    pub fn given(path: &str) -> Request {
        Request {
            purpose: Purpose::Given,
            root: path.into(),
            make_root: false,
            own: None,
            folders: Vec::new(),
            otherwise: false,
            on_the_node: false,
            probe: false,
            link: None,
            in_container: false,
        }
    }

    /// The directory that holds the folders.
    pub fn path(&self) -> String {
        match &self.own {
            Some(own) => format!("{}/{own}", self.root.trim_end_matches('/')),
            None => self.root.trim_end_matches('/').into(),
        }
    }
}

/// What was found, or made, of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    /// What for.
    pub purpose: Purpose,
    /// The root as wanted.
    pub root: String,
    /// The directory that holds the folders.
    pub path: String,
    /// Why it cannot be used.
    pub fault: Option<Fault>,
    /// Its file system, or that of the nearest directory above it that exists.
    pub file_system: Option<FileSystem>,
    /// Bytes the user may still write there.
    pub free: Option<u64>,
    /// Whether hard links from it work; absent where not tried.
    pub hard_link: Option<HardLink>,
}

/// Why a directory cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The path at which it fails.
    pub at: String,
    /// How.
    pub what: What,
}

/// How a directory fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// It is not there.
    Missing,
    /// It is no directory.
    NotDirectory,
    /// A link where none is followed.
    Link,
    /// In a place that everybody may write to it is another user's.
    Foreign(u32),
    /// Others have rights to it; its mode.
    Open(u32),
    /// Everybody may rename what is in it, for it has no sticky bit; its mode.
    NotSticky(u32),
    /// The user has no right to make files there.
    Denied,
    /// Its file system is read-only.
    ReadOnly,
    /// Its file system is full.
    NoSpace,
    /// Its file system can hold no more files.
    NoInodes,
    /// The user's quota is used up.
    Quota,
    /// It is not on the node.
    Network,
    /// Its file system does not let libraries be loaded from it.
    NoExec,
    /// In the container nothing is mounted there.
    NotMounted,
    /// No answer in time.
    Silent(String),
    /// The kernel's words.
    Failed(String),
}

/// Where the files of a file system are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// On this node.
    Node,
    /// On a server.
    Network,
    /// That of FUSE and unknown kinds is not to be seen from the type.
    Unknown,
}

/// A file system, by statfs(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Its type's name, or the number.
    pub name: String,
    /// Where its files are.
    pub place: Place,
}

/// Types of linux/magic.h and, for those outside the kernel, of coreutils' stat.
const TYPES: &[(u64, &str, Place)] = &[
    (0x6969, "nfs", Place::Network),
    (0x0BD0_0BD0, "lustre", Place::Network),
    (0x4750_4653, "gpfs", Place::Network),
    (0x1983_0326, "beegfs", Place::Network),
    (0x00C3_6400, "ceph", Place::Network),
    (0xAAD7_AAEA, "panfs", Place::Network),
    (0x517B, "smb", Place::Network),
    (0xFF53_4D42, "cifs", Place::Network),
    (0xFE53_4D42, "smb2", Place::Network),
    (0x5346_414F, "afs", Place::Network),
    (0x0102_1997, "9p", Place::Network),
    (0x0116_1970, "gfs2", Place::Network),
    (0x7461_636F, "ocfs2", Place::Network),
    (0x6573_5546, "fuse", Place::Unknown),
    (0xEF53, "ext4", Place::Node),
    (0x5846_5342, "xfs", Place::Node),
    (0x9123_683E, "btrfs", Place::Node),
    (0x2FC1_2FC1, "zfs", Place::Node),
    (0xF2F5_2010, "f2fs", Place::Node),
    (0xCA45_1A4E, "bcachefs", Place::Node),
    (0x0102_1994, "tmpfs", Place::Node),
    (0x8584_58F6, "ramfs", Place::Node),
    (0x794C_7630, "overlay", Place::Node),
];

impl FileSystem {
    /// Of an `f_type`.
    pub fn of(kind: u64) -> FileSystem {
        match TYPES.iter().find(|(number, ..)| *number == kind) {
            Some((_, name, place)) => FileSystem { name: (*name).into(), place: *place },
            None => FileSystem { name: format!("type {kind:#x}"), place: Place::Unknown },
        }
    }
}

/// Whether a hard link to another directory worked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardLink {
    /// The other directory.
    pub to: String,
    /// Why it did not.
    pub fault: Option<String>,
}

impl Directory {
    /// Of a request of which nothing is known.
    pub(crate) fn of(request: &Request) -> Directory {
        Directory {
            purpose: request.purpose,
            root: request.root.clone(),
            path: request.path(),
            fault: None,
            file_system: None,
            free: None,
            hard_link: None,
        }
    }

    /// Takes what the file system says, and what is wrong with it.
    pub(crate) fn take(&mut self, request: &Request, at: &str, room: Room) -> Result<(), Fault> {
        let file_system = FileSystem::of(room.kind);
        let network = file_system.place == Place::Network;
        self.file_system = Some(file_system);
        self.free = Some(room.free);
        let what = match request.purpose {
            Purpose::Given => return Ok(()),
            _ if room.read_only => What::ReadOnly,
            _ if room.no_space => What::NoSpace,
            _ if room.no_inodes => What::NoInodes,
            _ if request.on_the_node && network => What::Network,
            Purpose::Local if room.no_exec => What::NoExec,
            _ => return Ok(()),
        };
        Err(fault(at, what))
    }
}

pub(crate) fn fault(at: &str, what: What) -> Fault {
    Fault { at: if at.is_empty() { "/".into() } else { at.into() }, what }
}

/// The kernel's error as a fault; `folder` tells which kind of "no space" it is.
pub(crate) fn failed(at: &str, error: &io::Error, folder: &Folder) -> Fault {
    let what = match error.raw_os_error() {
        Some(libc::ENOENT) => What::Missing,
        Some(libc::ENOTDIR) => What::NotDirectory,
        Some(libc::EACCES | libc::EPERM) => What::Denied,
        Some(libc::EROFS) => What::ReadOnly,
        Some(libc::EDQUOT) => What::Quota,
        Some(libc::ENOSPC) if folder.room().is_ok_and(|room| room.no_inodes) => What::NoInodes,
        Some(libc::ENOSPC) => What::NoSpace,
        _ => What::Failed(error.to_string()),
    };
    fault(at, what)
}

/// As many links as the kernel itself follows in one path (path_resolution(7)).
const MOST_LINKS: usize = 40;

/// Where a walk has come to.
#[derive(Debug)]
pub(crate) struct Walked {
    /// The directory.
    pub folder: Folder,
    /// Its path, without links.
    pub at: String,
    /// Whether the whole path was there.
    pub complete: bool,
    /// The first directory on the way in which everybody may exchange what the path
    /// names, and its mode.
    pub loose: Option<(String, u32)>,
}

/// What a walk does about a name that is not there: makes it and says true, or
/// leaves it.
pub(crate) type Missing<'a> = &'a dyn Fn(&Folder, &str, &str) -> Result<bool, Fault>;

/// Walks down `path` from `from`. In a directory that everybody may write to
/// only what is the user's or root's counts, links and directories alike: a
/// stranger's would lead to where the stranger wants. (In a user namespace root
/// cannot be told from a stranger, and counts as one.)
pub(crate) fn walk(from: Walked, path: &str, missing: Missing) -> Result<Walked, Fault> {
    let Walked { mut folder, mut at, mut loose, .. } = from;
    let user = user();
    let parts = |path: &str| -> Vec<String> {
        path.split('/').filter(|part| !part.is_empty() && *part != ".").map(String::from).collect()
    };
    let mut left: VecDeque<String> = parts(path).into();
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        if name == ".." {
            folder = match folder.find("..").map_err(|error| failed(&at, &error, &folder))? {
                Found::Folder(parent) => parent,
                _ => return Err(fault(&at, What::NotDirectory)),
            };
            at.truncate(at.rfind('/').unwrap_or(0));
            continue;
        }
        let here = format!("{at}/{name}");
        let status = |folder: &Folder| folder.status().map_err(|error| failed(&here, &error, folder));
        let mode = status(&folder)?.mode;
        if is_loose(mode) {
            loose.get_or_insert_with(|| (at.clone(), mode));
        }
        let open_to_all = mode & 0o002 != 0;
        let trusted = |owner: u32| if open_to_all && owner != user && owner != 0 { Some(owner) } else { None };
        let found = match folder.find(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !missing(&folder, &name, &here)? {
                    return Ok(Walked { folder, at, complete: false, loose });
                }
                folder.find(&name)
            }
            found => found,
        };
        match found.map_err(|error| failed(&here, &error, &folder))? {
            Found::Folder(next) => {
                if let Some(owner) = trusted(status(&next)?.owner) {
                    return Err(fault(&here, What::Foreign(owner)));
                }
                (folder, at) = (next, here);
            }
            Found::Link { owner, target } => {
                links += 1;
                if let Some(owner) = trusted(owner) {
                    return Err(fault(&here, What::Foreign(owner)));
                }
                if links > MOST_LINKS {
                    return Err(fault(&here, What::Failed("too many links".into())));
                }
                if target.starts_with('/') {
                    folder = root()?.folder;
                    at.clear();
                }
                for part in parts(&target).into_iter().rev() {
                    left.push_front(part);
                }
            }
            Found::Other => return Err(fault(&here, What::NotDirectory)),
        }
    }
    Ok(Walked { folder, at, complete: true, loose })
}

/// Whether everybody may rename and remove what is in a directory of this mode.
fn is_loose(mode: u32) -> bool {
    mode & 0o1002 == 0o0002
}

/// The start of a walk.
pub(crate) fn root() -> Result<Walked, Fault> {
    let folder = Folder::root().map_err(|error| fault("/", What::Failed(error.to_string())))?;
    Ok(Walked { folder, at: String::new(), complete: true, loose: None })
}

/// The user's own directory in a place that may be open to all: no link, the
/// user's, nobody else's, and not to be exchanged. `None`: not there.
pub(crate) fn own(parent: &Walked, name: &str) -> Result<Option<Walked>, Fault> {
    let at = format!("{}/{name}", parent.at);
    let above = parent.folder.status().map_err(|error| failed(&parent.at, &error, &parent.folder))?;
    let loose = parent.loose.clone().or_else(|| is_loose(above.mode).then(|| (parent.at.clone(), above.mode)));
    if let Some((at, mode)) = loose {
        return Err(fault(&at, What::NotSticky(mode)));
    }
    let folder = match parent.folder.find(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&at, &error, &parent.folder)),
        Ok(Found::Link { .. }) => return Err(fault(&at, What::Link)),
        Ok(Found::Other) => return Err(fault(&at, What::NotDirectory)),
        Ok(Found::Folder(folder)) => folder,
    };
    let status = folder.status().map_err(|error| failed(&at, &error, &folder))?;
    if status.owner != user() {
        return Err(fault(&at, What::Foreign(status.owner)));
    }
    if status.mode & 0o077 != 0 {
        return Err(fault(&at, What::Open(status.mode)));
    }
    Ok(Some(Walked { folder, at, complete: true, loose: None }))
}

/// The same directory, opened once more.
pub(crate) fn again(walked: &Walked) -> Result<Walked, Fault> {
    match walked.folder.find(".") {
        Ok(Found::Folder(folder)) => {
            Ok(Walked { folder, at: walked.at.clone(), complete: true, loose: walked.loose.clone() })
        }
        Ok(_) => Err(fault(&walked.at, What::NotDirectory)),
        Err(error) => Err(failed(&walked.at, &error, &walked.folder)),
    }
}

/// Looks at what is wanted and changes nothing.
pub fn look(requests: &[Request]) -> Vec<Directory> {
    each(requests, PATIENCE, look_at)
}

/// What a child finds out, in the order of [`Directory`]'s fields.
type Answer = (Option<Fault>, Option<FileSystem>, Option<u64>, Option<HardLink>);

/// Runs `work` for the requests that are needed, in a child for each root and one
/// for all that are only given; together they have `patience`.
pub(crate) fn each(requests: &[Request], patience: Duration, work: fn(&Request) -> Directory) -> Vec<Directory> {
    let end = Instant::now() + patience;
    let left = || end.saturating_duration_since(Instant::now()).max(LEAST.min(patience));
    let (given, wanted): (Vec<&Request>, Vec<&Request>) =
        requests.iter().partition(|request| request.purpose == Purpose::Given);
    let mut answers: Vec<Directory> = Vec::new();
    let mut served = false;
    for request in wanted {
        if !(request.otherwise && served) {
            answers.extend(in_child(&[request], left(), work));
            served = answers.last().is_some_and(|answer| answer.fault.is_none());
        }
    }
    if !given.is_empty() {
        answers.extend(in_child(&given, left(), work));
    }
    answers
}

fn in_child(requests: &[&Request], limit: Duration, work: fn(&Request) -> Directory) -> Vec<Directory> {
    let answer = child::run(limit, || {
        let answers: Vec<Answer> = requests
            .iter()
            .map(|request| work(request))
            .map(|found| (found.fault, found.file_system, found.free, found.hard_link))
            .collect();
        serde_json::to_vec(&answers).unwrap_or_default()
    });
    let answers = answer
        .map_err(|error| error.to_string())
        .and_then(|bytes| serde_json::from_slice::<Vec<Answer>>(&bytes).map_err(|error| error.to_string()));
    let of = |(index, request): (usize, &&Request)| {
        let (fault, file_system, free, hard_link) = match &answers {
            Ok(answers) => answers.get(index).cloned().unwrap_or_default(),
            Err(why) => (Some(fault(&request.path(), What::Silent(why.clone()))), None, None, None),
        };
        Directory { fault, file_system, free, hard_link, ..Directory::of(request) }
    };
    requests.iter().enumerate().map(of).collect()
}

/// Looks at one, here and without a deadline.
pub(crate) fn look_at(request: &Request) -> Directory {
    let mut directory = Directory::of(request);
    directory.fault = inspect(request, &mut directory).err();
    directory
}

fn inspect(request: &Request, directory: &mut Directory) -> Result<(), Fault> {
    let leave: Missing = &|_, _, _| Ok(false);
    let mut walked = walk(root()?, &request.root, leave)?;
    let there = walked.complete;
    if !there && request.purpose != Purpose::Given {
        if !request.make_root {
            return Err(fault(&request.root, What::Missing));
        }
        if request.in_container && on_root(&walked.folder) {
            return Err(fault(&request.root, What::NotMounted));
        }
    }
    if there && let Some(name) = &request.own {
        match own(&walked, name)? {
            Some(own) => walked = own,
            None => walked.complete = false,
        }
    }
    let room = walked.folder.room().map_err(|error| failed(&walked.at, &error, &walked.folder))?;
    directory.take(request, &walked.at, room)?;
    if request.purpose == Purpose::Given {
        directory.hard_link = request.link.as_ref().and_then(|(_, to)| other_device(&walked.folder, to));
        return Ok(());
    }
    let may_write =
        |walked: &Walked| walked.folder.may_write().map_err(|error| failed(&walked.at, &error, &walked.folder));
    may_write(&walked)?;
    for name in request.folders.iter().filter(|_| walked.complete) {
        may_write(&walk(again(&walked)?, name, leave)?)?;
    }
    if let Some((_, to)) = &request.link {
        directory.hard_link = other_device(&walked.folder, to);
    }
    Ok(())
}

/// Whether a directory lies on the file system of `/`.
pub(crate) fn on_root(folder: &Folder) -> bool {
    let device = |folder: &Folder| folder.status().ok().map(|status| status.device);
    device(folder).is_some_and(|own| Folder::root().ok().and_then(|root| device(&root)) == Some(own))
}

/// The nearest directory that exists of a path.
pub(crate) fn nearest(path: &str) -> Option<Walked> {
    walk(root().ok()?, path, &|_, _, _| Ok(false)).ok()
}

/// That no hard link can work, where it is plain to see.
fn other_device(folder: &Folder, to: &str) -> Option<HardLink> {
    let there = nearest(to)?.folder.status().ok()?.device;
    let here = folder.status().ok()?.device;
    (here != there).then(|| HardLink { to: to.into(), fault: Some("another file system".into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers as linux/magic.h and coreutils' stat.c have them.
    #[test]
    fn file_systems_by_type() {
        let of = |kind| {
            let FileSystem { name, place } = FileSystem::of(kind);
            (name, place)
        };
        assert_eq!(of(0x6969), ("nfs".into(), Place::Network));
        assert_eq!(of(0x0bd0_0bd0), ("lustre".into(), Place::Network));
        assert_eq!(of(0x0102_1994), ("tmpfs".into(), Place::Node));
        assert_eq!(of(0xff53_4d42), ("cifs".into(), Place::Network));
        assert_eq!(of(0x1234), ("type 0x1234".into(), Place::Unknown));
        let mut numbers: Vec<u64> = TYPES.iter().map(|(number, ..)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), TYPES.len());
    }

    #[test]
    fn a_directory_that_does_not_exist_has_the_file_system_of_the_one_above() {
        let found = look(&[Request::given("/proc/self/nothing/here"), Request::given("/dev/shm")]);
        assert_eq!(found[0].file_system.as_ref().map(|fs| fs.name.as_str()), Some("type 0x9fa0"));
        assert_eq!(found[0].fault, None);
        assert_eq!(found[1].purpose, Purpose::Given);
    }

    #[test]
    fn a_silent_file_server_costs_the_deadline_and_no_more() {
        let slow = |request: &Request| {
            std::thread::sleep(Duration::from_secs(60));
            Directory::of(request)
        };
        let root = Request { purpose: Purpose::Shared, ..Request::given("/tmp") };
        let start = Instant::now();
        let found = each(&[root], Duration::from_millis(200), slow);
        assert!(start.elapsed() < Duration::from_secs(20));
        assert!(matches!(&found[0].fault, Some(Fault { what: What::Silent(_), .. })), "{found:?}");
    }

    #[test]
    fn a_fallback_is_not_touched_while_what_comes_before_works() {
        let request = |path: &str, otherwise| Request { purpose: Purpose::Local, otherwise, ..Request::given(path) };
        let work = |request: &Request| {
            let broken = request.root.starts_with("/broken").then(|| fault(&request.root, What::Denied));
            Directory { fault: broken, ..Directory::of(request) }
        };
        let roots = |requests: &[Request]| -> Vec<String> {
            each(requests, PATIENCE, work).into_iter().map(|directory| directory.root).collect()
        };
        assert_eq!(roots(&[request("/a", false), request("/b", true), request("/c", true)]), ["/a"]);
        let all = [request("/broken", false), request("/broken2", true), request("/c", true), request("/d", true)];
        assert_eq!(roots(&all), ["/broken", "/broken2", "/c"]);
    }
}
