//! Where caches are. What is downloaded or prepared once for all ranks belongs
//! into one directory that all nodes see; what compilers keep belongs onto the
//! node, where renames and locks work.
//!
//! [`wanted`] names the directories before the plan is made, `act/directories`
//! makes them, and what came of it is a fact ([`Directory`]) of the plan.
//!
//! XDG_CACHE_HOME is never set: everything else that a user's programs keep
//! would move with it.

use crate::config::{Settings, check_directory};
use crate::facts::directories::{Directory, Fault, FileSystem, Here, Place, Purpose, Request, What};
use crate::facts::task::{Container, TaskFacts};

use super::marks::Marks;
use super::precedence::{Layer, Offers, given};
use super::{Facts, Origin};

/// A cache that a variable moves.
struct Cache {
    name: &'static str,
    folder: &'static str,
    why: &'static str,
}

/// Below `cache=`.
const SHARED: &[Cache] = &[
    Cache {
        name: "HF_HOME",
        folder: "huggingface",
        why: "models and data of Hugging Face, loaded once for all nodes (a login's token is looked for there too)",
    },
    Cache { name: "NEMO_HOME", folder: "nemo", why: "rank 0 prepares data there that all nodes read" },
    Cache { name: "TORCH_HOME", folder: "torch", why: "models of torch.hub, loaded once for all nodes" },
    Cache { name: UV_CACHE, folder: UV_FOLDER, why: "packages that uv installs, loaded once for all nodes" },
];

const UV_CACHE: &str = "UV_CACHE_DIR";
const UV_FOLDER: &str = "uv";
const UV_LINK: &str = "UV_LINK_MODE";

/// On the node.
const LOCAL: &[Cache] = &[
    Cache {
        name: "TRITON_CACHE_DIR",
        folder: "triton",
        why: "on a file server Triton's renames end in 'Stale file handle'",
    },
    Cache { name: "TORCHINDUCTOR_CACHE_DIR", folder: "inductor", why: "as Triton's, for what torch.compile makes" },
    Cache {
        name: "TORCH_EXTENSIONS_DIR",
        folder: "torch_extensions",
        why: "a lock file that a killed job left in a shared home makes all later ranks wait for ever",
    },
    Cache { name: "CUDA_CACHE_PATH", folder: "cuda", why: "the driver's locks and the home's quota" },
];

/// Variables that must name a directory which all nodes share.
pub(super) const MUST_BE_SHARED: &[&str] = &["HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "NEMO_HOME"];

/// Variables that must name a directory on the node.
pub(super) fn must_be_local() -> impl Iterator<Item = &'static str> {
    LOCAL.iter().map(|cache| cache.name)
}

/// The directories to make before planning, in the order of preference. Pure.
pub fn wanted(facts: &Facts, settings: &Settings, here: &Here) -> Vec<Request> {
    let merged = facts.site.map(|site| settings.clone().over(&site.settings));
    let settings = merged.as_ref().unwrap_or(settings);
    let marks = Marks::of(facts.environment);
    let in_container = facts.task.container == Container::Inside;
    // One rank of each node makes sure; where it cannot, it stops the others.
    let probe = facts.step.local_rank == 0;
    let mut requests = Vec::new();
    let folders = |caches: &'static [Cache], key: &str| -> Vec<String> {
        let free = caches.iter().filter(|cache| is_free(facts, &marks, settings, key, cache.name));
        free.map(|cache| cache.folder.to_string()).collect()
    };
    if let Some(root) = &settings.cache {
        let folders = folders(SHARED, "cache");
        let uv = folders.iter().any(|folder| folder == UV_FOLDER);
        let free = uv && given(facts, &marks, UV_LINK).is_none();
        if !folders.is_empty() {
            requests.push(Request {
                purpose: Purpose::Shared,
                make_root: true,
                link: installs_to(facts, here).filter(|_| free).map(|to| (UV_FOLDER.into(), to)),
                folders,
                probe,
                in_container,
                ..Request::given(root)
            });
        }
    }
    let folders = folders(LOCAL, "local");
    if !folders.is_empty() {
        for (number, (root, chosen)) in local_roots(facts, settings).into_iter().enumerate() {
            requests.push(Request {
                purpose: Purpose::Local,
                make_root: chosen,
                own: Some(format!("palingenesis-{}", here.user)),
                folders: folders.clone(),
                otherwise: number > 0,
                on_the_node: !chosen,
                probe,
                in_container,
                ..Request::given(&root)
            });
        }
    }
    requests.extend(of_others(facts, &marks).iter().map(|path| Request::given(path)));
    requests
}

/// Roots for the node's own caches with whether somebody chose them: the user's
/// choice and no other, or the site file's before what there always is.
fn local_roots(facts: &Facts, settings: &Settings) -> Vec<(String, bool)> {
    let mut roots: Vec<(String, bool)> = settings.local.iter().map(|root| (root.clone(), true)).collect();
    if roots.is_empty() || settings.is_of_site("local") {
        let own = facts.environment.get("TMPDIR").filter(|path| check_directory(path).is_ok());
        for root in own.into_iter().chain(["/tmp"]).map(|root| root.trim_end_matches('/')) {
            if !roots.iter().any(|(known, _)| known == root) {
                roots.push((root.into(), false));
            }
        }
    }
    roots
}

/// Whether nobody who stands above `key=` sets the variable.
fn is_free(facts: &Facts, marks: &Marks, settings: &Settings, key: &str, name: &str) -> bool {
    let chosen_by_user = settings.is_given(key) && !settings.is_of_site(key);
    let mut of_site = facts.site.iter().flat_map(|site| &site.env).filter(|variable| variable.name == name);
    given(facts, marks, name).is_none() && !of_site.any(|variable| variable.force || !chosen_by_user)
}

/// Where uv installs to: links into it save the copy.
fn installs_to(facts: &Facts, here: &Here) -> Option<String> {
    let named = ["UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV"].iter().find_map(|name| facts.environment.get(name));
    let path = named.filter(|path| !path.is_empty()).unwrap_or(".venv");
    if path.starts_with('/') {
        return Some(path.into());
    }
    here.folder.as_ref().map(|folder| format!("{}/{path}", folder.trim_end_matches('/')))
}

/// Directories that others' variables name, where it matters on which file
/// system they are.
fn of_others(facts: &Facts, marks: &Marks) -> Vec<String> {
    let shared = MUST_BE_SHARED.iter().copied().filter(|_| facts.step.nodes() > 1);
    let local = must_be_local().filter(|_| facts.step.world_size > 1);
    let mut paths: Vec<String> = Vec::new();
    for name in shared.chain(local) {
        let of_site = || facts.site?.env.iter().find(|variable| variable.name == name).map(|v| v.value.clone());
        let value = given(facts, marks, name).map(|(value, _)| value).or_else(of_site);
        if let Some(path) = value.filter(|path| check_directory(path).is_ok() && !paths.contains(path)) {
            paths.push(path);
        }
    }
    paths
}

/// Offers the variables, each only if nobody else set it.
pub(super) fn offer(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks) {
    shared(offers, facts, settings, marks);
    local(offers, facts, settings);
}

/// What is given for this step stands above the site file's variables, below the
/// user's: `offer` comes after the site file.
fn standing(settings: &Settings, key: &str) -> (Layer, Origin) {
    if settings.is_of_site(key) { (Layer::Profile, Origin::Site) } else { (Layer::Site, Origin::Option) }
}

fn shared(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks) {
    let Some(root) = &settings.cache else {
        let where_ = match facts.task.container {
            Container::Inside => "the home directory in the container, lost with it",
            _ => "your home directory",
        };
        for cache in SHARED.iter().filter(|cache| cache.name != UV_CACHE) {
            offers.nothing(cache.name, format!("in {where_}: --palingenesis-cache=DIR puts it below DIR"));
        }
        return;
    };
    let found = facts.task.directories.iter().find(|found| found.purpose == Purpose::Shared);
    if let Some(fault) = found.and_then(|found| found.fault.as_ref()) {
        for cache in SHARED {
            offers.nothing(cache.name, format!("{root} cannot be used: {}", words(fault)));
        }
        return;
    }
    let (layer, origin) = standing(settings, "cache");
    for cache in SHARED {
        let value = format!("{}/{}", root.trim_end_matches('/'), cache.folder);
        offers.value(layer, origin, cache.name, value, cache.why);
    }
    if given(facts, marks, UV_CACHE).is_some() {
        return;
    }
    match found.and_then(|found| found.hard_link.as_ref()) {
        Some(link) => match &link.fault {
            Some(why) => {
                let why = format!("no hard link leads from {UV_CACHE} to {} ({why}): uv would warn and copy", link.to);
                offers.value(layer, origin, UV_LINK, "copy", why);
            }
            None => offers.nothing(UV_LINK, format!("hard links from {UV_CACHE} to {} work: uv's default", link.to)),
        },
        // Tried when the step started.
        None if marks.of_this_step(facts.environment, facts.step, UV_LINK) => {
            let value = facts.environment.get(UV_LINK).unwrap_or_default();
            offers.value(layer, origin, UV_LINK, value, "as set when this step started");
        }
        None => {}
    }
}

fn local(offers: &mut Offers, facts: &Facts, settings: &Settings) {
    let tried: Vec<&Directory> =
        facts.task.directories.iter().filter(|found| found.purpose == Purpose::Local).collect();
    let failed: Vec<String> = tried.iter().filter_map(|found| found.fault.as_ref()).map(words).collect();
    let Some(found) = tried.iter().find(|found| found.fault.is_none()) else {
        let why = if tried.is_empty() {
            "which directory of the node can be used is known on the node only".into()
        } else {
            format!("no directory of the node can be used: {}", failed.join("; "))
        };
        for cache in LOCAL {
            offers.nothing(cache.name, why.as_str());
        }
        return;
    };
    let chosen = settings.local.as_ref() == Some(&found.root);
    let (layer, origin) = if chosen { standing(settings, "local") } else { (Layer::Profile, Origin::Step) };
    let instead = match failed.as_slice() {
        [] => String::new(),
        failed => format!("; not elsewhere: {}", failed.join("; ")),
    };
    for cache in LOCAL {
        let value = format!("{}/{}", found.path, cache.folder);
        offers.value(layer, origin, cache.name, value, format!("on the node: {}{instead}", cache.why));
    }
}

/// What is wrong with a directory.
pub(super) fn words(fault: &Fault) -> String {
    let at = crate::config::printable(&fault.at);
    match &fault.what {
        What::Missing => format!("{at} does not exist"),
        What::NotDirectory => format!("{at} is no directory"),
        What::Link => format!("{at} is a symbolic link"),
        What::Foreign(owner) => format!("{at} belongs to another user (id {owner})"),
        What::Open(mode) => format!("others have rights to {at} (mode {mode:04o})"),
        What::NotSticky(mode) => {
            format!("everybody may rename what is in {at} (mode {mode:04o}, without the sticky bit)")
        }
        What::Denied => format!("you may not make files in {at}"),
        What::ReadOnly => format!("{at} is on a read-only file system"),
        What::NoSpace => format!("no space is left on the file system of {at}"),
        What::NoInodes => format!("no inodes are left on the file system of {at}: it can hold no more files"),
        What::Quota => format!("your quota at {at} is used up"),
        What::Network => format!("{at} is on a network file system"),
        What::NoExec => format!("{at} is mounted noexec, compiled code could not be loaded from it"),
        What::NotMounted => format!("{at} is not mounted in the container"),
        What::Silent(why) => format!("{at}: {why}, is its file server up?"),
        What::Failed(why) => format!("{at}: {why}"),
    }
}

/// What to do about it. `key` chose the directory.
pub(super) fn cure(found: &Directory, fault: &Fault, key: &str, task: Option<&TaskFacts>) -> String {
    let other = format!("name another directory with {key}=");
    let inside = task.is_some_and(|task| task.container == Container::Inside);
    match &fault.what {
        What::Missing | What::Denied | What::ReadOnly | What::NotMounted if inside => {
            format!("mount it: --container-mounts={0}:{0}", found.root)
        }
        What::NoSpace | What::NoInodes | What::Quota => format!("remove what is not needed there, or {other}"),
        What::Open(_) => format!("look who wrote there, then chmod 700 {}; or {other}", fault.at),
        What::Foreign(_) => {
            format!("everybody may make names in the directory above it, and another user has: {other}, of your own")
        }
        What::Silent(_) | What::Failed(_) => format!("tell the cluster's admins, or {other}"),
        _ => other,
    }
}

/// The file system of a variable's directory, where it is known.
pub(super) fn file_system<'a>(task: &'a TaskFacts, path: &str) -> Option<&'a FileSystem> {
    let path = path.trim_end_matches('/');
    let holds = |found: &&Directory| {
        let own = found.path.trim_end_matches('/');
        path.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let found = task.directories.iter().filter(holds).max_by_key(|found| found.path.len());
    found.and_then(|found| found.file_system.as_ref())
}

/// Whether files there are on a server: FUSE, behind which may be anything, is
/// taken for one.
pub(super) fn on_a_server(file_system: &FileSystem) -> bool {
    file_system.place == Place::Network || file_system.name == "fuse"
}

/// What is wrong with a path that a variable gives to a cache, and whether it
/// certainly fails.
pub(super) fn wrong_path(name: &str, path: &str) -> Option<(bool, String)> {
    let empty = "the variable it was made from was empty";
    let expands = name.starts_with("HF_") || name == "TRANSFORMERS_CACHE";
    if path.is_empty() {
        return Some((true, "it is empty".into()));
    }
    if path.trim_matches('/').is_empty() {
        return Some((true, format!("it is the root directory: {empty}")));
    }
    if path.starts_with("//") || path.trim_matches('/') == name {
        return Some((true, empty.into()));
    }
    if path.contains('$') && !expands {
        return Some((false, "there is a $ left in it, which no shell has replaced".into()));
    }
    let home = path.starts_with('~') && (expands || name == "TORCH_HOME");
    if !path.starts_with('/') && !path.starts_with('$') && !home {
        return Some((false, "it is relative: another directory for each working directory".into()));
    }
    None
}

/// Variables whose paths are looked at.
pub(super) const PATHS: &[&str] = &[
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TRANSFORMERS_CACHE",
    "NEMO_HOME",
    "TORCH_HOME",
    "UV_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "CUDA_CACHE_PATH",
];
