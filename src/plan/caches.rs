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
use crate::facts::locks::{Owner, Wanted};
use crate::facts::task::{Container, TaskFacts};

use super::checks::From;
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

pub(super) const UV_CACHE: &str = "UV_CACHE_DIR";
pub(super) const UV_ENVIRONMENT: &str = "UV_PROJECT_ENVIRONMENT";
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
    Cache {
        name: "CUDA_CACHE_PATH",
        folder: "cuda",
        why: "in a shared home ranks wait for its locks, and it fills the quota",
    },
];

/// Variables that must name a directory which all nodes share.
pub(super) const MUST_BE_SHARED: &[&str] = &["HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "NEMO_HOME"];

/// Variables that `cache=` sets.
pub(super) fn below_cache() -> impl Iterator<Item = &'static str> {
    SHARED.iter().map(|cache| cache.name)
}

/// Variables that must name a directory on the node.
pub(super) fn must_be_local() -> impl Iterator<Item = &'static str> {
    LOCAL.iter().map(|cache| cache.name)
}

/// The directories to make before planning, in the order of preference. Pure.
pub fn wanted(facts: &Facts, settings: &Settings, here: &Here) -> Vec<Request> {
    let merged = facts.site.map(|site| site.under(settings));
    let settings = merged.as_ref().unwrap_or(settings);
    let marks = Marks::of(facts.environment);
    let in_container = facts.task.container == Container::Inside;
    // One rank of each node makes sure; where it cannot, it stops the others.
    let probe = facts.step.local_rank == 0;
    let mut requests = Vec::new();
    let folders = |caches: &'static [Cache], key: &str| -> Vec<String> {
        let free = caches.iter().filter(|cache| standing(facts, &marks, settings, key, cache.name).is_some());
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
    // Under the name that is the user's in and out of containers that show another
    // id. A name only: whose the directory is, the kernel says.
    let own_id = facts.environment.get("SLURM_JOB_UID").and_then(|id| id.parse().ok()).unwrap_or(here.user);
    if !folders.is_empty() {
        for (number, (root, chosen)) in local_roots(facts, settings).into_iter().enumerate() {
            requests.push(Request {
                purpose: Purpose::Local,
                make_root: chosen,
                own: Some(format!("palingenesis-{own_id}")),
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
    if let Some((cache, to)) = uv_of_others(facts, &marks, here) {
        requests.push(Request { link: Some((String::new(), to)), probe, ..Request::given(&cache) });
    }
    requests
}

/// The user's own cache of uv, where it is said what uv installs into: a link must lead
/// there, too.
fn uv_of_others(facts: &Facts, marks: &Marks, here: &Here) -> Option<(String, String)> {
    let (cache, _) = given(facts, marks, UV_CACHE)?;
    let told = given(facts, marks, UV_LINK).is_some();
    let explicit = facts.environment.get(UV_ENVIRONMENT).is_some_and(|path| !path.is_empty());
    let to = installs_to(facts, here).filter(|_| explicit && !told)?;
    check_directory(&cache).is_ok().then_some((cache, to))
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

/// Where `key=` stands for a variable: given for this step above the image's and
/// the site file's, in the site file below both. `None`: somebody above it sets
/// the variable, and its directory is not needed.
fn standing(facts: &Facts, marks: &Marks, settings: &Settings, key: &str, name: &str) -> Option<(Layer, Origin)> {
    let chosen = settings.is_given(key) && !settings.is_of_site(key);
    let of_site = facts.site.and_then(|site| site.env.iter().find(|variable| variable.name == name));
    let forced = of_site.is_some_and(|variable| variable.force);
    match given(facts, marks, name) {
        None | Some((_, From::Image)) if chosen && !forced => Some((Layer::Chosen, Origin::Option)),
        None if of_site.is_none() => {
            Some((Layer::Profile, if settings.is_given(key) { Origin::Site } else { Origin::Step }))
        }
        _ => None,
    }
}

/// Where uv installs to: links into it save the copy.
fn installs_to(facts: &Facts, here: &Here) -> Option<String> {
    let named = [UV_ENVIRONMENT, "VIRTUAL_ENV"].iter().find_map(|name| facts.environment.get(name));
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

/// Where lock files of killed programs may keep the ranks waiting: one rank of each
/// node looks on the node, rank 0 also where all nodes see the same.
pub fn with_locks(facts: &Facts, settings: &Settings, directories: &[Directory]) -> Vec<Wanted> {
    if facts.step.local_rank != 0 {
        return Vec::new();
    }
    let marks = Marks::of(facts.environment);
    let of = |name: &str| given(facts, &marks, name).map(|(value, _)| value).filter(|value| !value.is_empty());
    let local = directories.iter().find(|found| found.purpose == Purpose::Local && found.fault.is_none());
    let cache = |path: &str| of("HOME").map(|home| format!("{}/{path}", home.trim_end_matches('/')));
    let on_node = |name: &str, folder: &str, default: &str| {
        of(name).or_else(|| local.map(|local| format!("{}/{folder}", local.path))).or_else(|| cache(default))
    };
    let below = |root: String, folder: &str| format!("{}/{folder}", root.trim_end_matches('/'));
    let hub = || {
        let home = of("HF_HOME").or_else(|| settings.cache.clone().map(|root| below(root, "huggingface")));
        let home = home.or_else(|| of("XDG_CACHE_HOME").map(|root| below(root, "huggingface")));
        of("HF_HUB_CACHE").or_else(|| home.or_else(|| cache(".cache/huggingface")).map(|home| below(home, "hub")))
    };
    let places = [
        (Owner::Extensions, on_node("TORCH_EXTENSIONS_DIR", "torch_extensions", ".cache/torch_extensions")),
        (Owner::Triton, on_node("TRITON_CACHE_DIR", "triton", ".triton/cache")),
        (Owner::Hub, hub()),
    ];
    let on_the_node = facts.step.rank != 0;
    let wanted = |(owner, path): (Owner, Option<String>)| Some(Wanted { owner, path: path?, on_the_node });
    places.into_iter().filter_map(wanted).filter(|wanted| check_directory(&wanted.path).is_ok()).collect()
}

/// Offers the variables, each only if nobody else set it.
pub(super) fn offer(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks) {
    shared(offers, facts, settings, marks);
    local(offers, facts, settings, marks);
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
    let below = match settings.is_of_site("cache") {
        true => (Layer::Profile, Origin::Site),
        false => (Layer::Chosen, Origin::Option),
    };
    for cache in SHARED {
        let value = format!("{}/{}", root.trim_end_matches('/'), cache.folder);
        let (layer, origin) = standing(facts, marks, settings, "cache", cache.name).unwrap_or(below);
        offers.value(layer, origin, cache.name, value, cache.why);
    }
    let Some((layer, origin)) = standing(facts, marks, settings, "cache", UV_CACHE) else { return };
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

fn local(offers: &mut Offers, facts: &Facts, settings: &Settings, marks: &Marks) {
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
    let default = (Layer::Profile, Origin::Step);
    let instead = match failed.as_slice() {
        [] => String::new(),
        failed => format!("; not elsewhere: {}", failed.join("; ")),
    };
    for cache in LOCAL {
        let value = format!("{}/{}", found.path, cache.folder);
        let standing = standing(facts, marks, settings, "local", cache.name);
        let (layer, origin) = standing.filter(|_| chosen).unwrap_or(default);
        offers.value(layer, origin, cache.name, value, format!("on the node: {}{instead}", cache.why));
    }
}

/// A path for one line of a terminal, whole.
pub(super) fn shown(path: &str) -> String {
    path.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Who every user is, root too, that a user namespace does not know
/// (/proc/sys/kernel/overflowuid).
const UNSEEN: u32 = 65534;

/// What is wrong with a directory.
pub(super) fn words(fault: &Fault) -> String {
    let at = shown(&fault.at);
    match &fault.what {
        What::Missing => format!("{at} does not exist"),
        What::NotDirectory => format!("{at} is no directory"),
        What::Link => format!("{at} is a symbolic link"),
        What::Foreign(UNSEEN) => {
            format!("{at} belongs to another user, and which one is not to be seen here (id {UNSEEN})")
        }
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
            format!("mount it: --container-mounts={0}:{0}", shown(&found.root))
        }
        What::NoSpace | What::NoInodes | What::Quota => format!("remove what is not needed there, or {other}"),
        What::Open(_) => format!("look who wrote there, then chmod 700 {}; or {other}", shown(&fault.at)),
        What::Foreign(UNSEEN) if inside => {
            format!("mount it elsewhere: --container-mounts={}:/caches, and give {key}=/caches", shown(&found.root))
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Source;
    use crate::config::site::{SiteVariable, SiteView};
    use crate::facts::directories::HardLink;
    use crate::plan::tests::World;
    use crate::plan::{Plan, Severity};

    fn here() -> Here {
        Here { user: 1000, folder: Some("/project/job".into()) }
    }

    fn wants(world: &World, spec: &str) -> Vec<Request> {
        let facts = Facts {
            command: &world.command,
            task: &world.task,
            submitted: world.submitted.as_ref(),
            site: world.site.as_ref(),
            ..Facts::new(&world.step, &world.environment)
        };
        wanted(&facts, &Settings::parse(spec, Source::Option).unwrap(), &here())
    }

    /// The world after its requests were served, each by `found`.
    fn served(mut world: World, spec: &str, found: impl Fn(&Request) -> Directory) -> World {
        world.task.directories = wants(&world, spec).iter().map(found).collect();
        world
    }

    fn usable(request: &Request) -> Directory {
        let file_system = Some(FileSystem { name: "lustre".into(), place: Place::Network });
        let file_system = if request.purpose == Purpose::Shared { file_system } else { Some(FileSystem::of(0xEF53)) };
        Directory { file_system, free: Some(1 << 40), ..Directory::of(request) }
    }

    fn broken(request: &Request, what: What) -> Directory {
        let at = format!("{}/huggingface", request.path());
        Directory { fault: Some(Fault { at, what }), ..Directory::of(request) }
    }

    fn left<'a>(plan: &'a Plan, name: &str) -> &'a str {
        plan.left.iter().find(|note| note.name == name).unwrap_or_else(|| panic!("{name}")).why.as_str()
    }

    #[test]
    fn shared_caches_below_one_root_and_compilers_on_the_node() {
        let world = World::new("n[1-2]", "2(x2)", 1);
        let requests = wants(&world, "cache=/scratch/me/");
        let paths: Vec<(String, bool, bool)> = requests.iter().map(|r| (r.path(), r.make_root, r.otherwise)).collect();
        assert_eq!(paths, [("/scratch/me".into(), true, false), ("/tmp/palingenesis-1000".into(), false, false)]);
        assert_eq!(requests[0].folders, ["huggingface", "nemo", "torch", "uv"]);
        assert_eq!(requests[0].link, Some(("uv".into(), "/project/job/.venv".into())));
        let plan = served(world, "cache=/scratch/me/", usable).plan("cache=/scratch/me/").unwrap();
        for (name, value) in [
            ("HF_HOME", "/scratch/me/huggingface"),
            ("NEMO_HOME", "/scratch/me/nemo"),
            ("TORCH_HOME", "/scratch/me/torch"),
            ("UV_CACHE_DIR", "/scratch/me/uv"),
            ("TRITON_CACHE_DIR", "/tmp/palingenesis-1000/triton"),
            ("TORCHINDUCTOR_CACHE_DIR", "/tmp/palingenesis-1000/inductor"),
            ("TORCH_EXTENSIONS_DIR", "/tmp/palingenesis-1000/torch_extensions"),
            ("CUDA_CACHE_PATH", "/tmp/palingenesis-1000/cuda"),
        ] {
            assert_eq!(plan.value(name), Some(value), "{name}");
        }
        let origin = |name: &str| plan.env.iter().find(|variable| variable.name == name).map(|v| v.origin);
        assert_eq!((origin("HF_HOME"), origin("CUDA_CACHE_PATH")), (Some(Origin::Option), Some(Origin::Step)));
        assert_eq!(plan.value("XDG_CACHE_HOME"), None);
        assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    }

    #[test]
    fn without_a_root_shared_caches_stay_and_the_plan_says_where() {
        let plan = World::new("n[1-2]", "1(x2)", 0).plan("").unwrap();
        for name in ["HF_HOME", "NEMO_HOME", "TORCH_HOME"] {
            assert!(left(&plan, name).contains("home directory"), "{}", left(&plan, name));
            assert!(left(&plan, name).contains("--palingenesis-cache=DIR"));
        }
        assert!(["UV_CACHE_DIR", "UV_LINK_MODE"].iter().all(|name| plan.value(name).is_none()));
        assert!(left(&plan, "TRITON_CACHE_DIR").contains("on the node only"));
    }

    #[test]
    fn the_users_values_are_kept_and_no_directory_is_made_for_them() {
        let own = [("HF_HOME", "/data/hf"), ("UV_CACHE_DIR", "/data/uv"), ("TRITON_CACHE_DIR", "/local/t")];
        let world = World::new("n1", "1", 0).export(&own);
        let requests = wants(&world, "cache=/scratch");
        assert_eq!(requests[0].folders, ["nemo", "torch"]);
        assert_eq!(requests[0].link, None);
        assert_eq!(requests[1].folders, ["inductor", "torch_extensions", "cuda"]);
        let plan = served(world, "cache=/scratch", usable).plan("cache=/scratch").unwrap();
        for (name, _) in own {
            assert_eq!(plan.value(name), None, "{name}");
            assert!(left(&plan, name).starts_with("yours, kept"), "{}", left(&plan, name));
        }
        let all = [("HF_HOME", "/a"), ("NEMO_HOME", "/a"), ("TORCH_HOME", "/a"), ("UV_CACHE_DIR", "/a")];
        let requests = wants(&World::new("n1", "1", 0).export(&all), "cache=/scratch");
        assert!(requests.iter().all(|request| request.purpose == Purpose::Local), "{requests:?}");
    }

    #[test]
    fn the_node_s_root_is_what_was_chosen_else_tmpdir_else_tmp() {
        let roots = |world: &World, spec: &str| -> Vec<String> {
            let requests = wants(world, spec).into_iter().filter(|request| request.purpose == Purpose::Local);
            requests.map(|request| request.root).collect()
        };
        let bare = World::new("n1", "1", 0);
        let with = |tmpdir: &str| World::new("n1", "1", 0).export(&[("TMPDIR", tmpdir)]);
        assert_eq!(roots(&bare, ""), ["/tmp"]);
        assert_eq!(roots(&with("/tmp/"), ""), ["/tmp"]);
        assert_eq!(roots(&with("/local/job7"), ""), ["/local/job7", "/tmp"]);
        assert_eq!(roots(&with("relative"), ""), ["/tmp"]);
        assert_eq!(roots(&with(""), ""), ["/tmp"]);
        assert_eq!(roots(&with("/local/job7"), "local=/raid"), ["/raid"]);
        let mut site = with("/local/job7");
        site.site = Some(SiteView {
            settings: Settings::parse("local=/nvme", Source::Site("palingenesis.toml".into())).unwrap(),
            ..SiteView::default()
        });
        assert_eq!(roots(&site, ""), ["/nvme", "/local/job7", "/tmp"]);
        assert_eq!(roots(&site, "local=/raid"), ["/raid"]);
    }

    #[test]
    fn a_root_that_fails_is_passed_over_with_its_reason() {
        let world = || World::new("n1", "1", 0).export(&[("TMPDIR", "/local/job7")]);
        let plan = served(world(), "", |request| match request.root.as_str() {
            "/local/job7" => broken(request, What::NoSpace),
            _ => usable(request),
        });
        let plan = plan.plan("").unwrap();
        assert_eq!(plan.value("TRITON_CACHE_DIR"), Some("/tmp/palingenesis-1000/triton"));
        let why = &plan.env.iter().find(|variable| variable.name == "TRITON_CACHE_DIR").unwrap().why;
        assert!(why.contains("/local/job7") && why.contains("no space"), "{why}");
        // None can be used: nothing is set, nothing refused.
        let plan = served(world(), "", |request| broken(request, What::Link)).plan("").unwrap();
        assert_eq!(plan.value("TRITON_CACHE_DIR"), None);
        assert!(left(&plan, "CUDA_CACHE_PATH").contains("symbolic link"));
        assert!(plan.warnings.is_empty());
    }

    #[test]
    fn a_chosen_directory_that_cannot_be_used_is_one_refusal() {
        for (spec, root) in [("cache=/scratch/me", "/scratch/me"), ("local=/raid/me", "/raid/me")] {
            for (what, part) in [
                (What::Missing, "does not exist"),
                (What::NotDirectory, "is no directory"),
                (What::Foreign(1001), "belongs to another user (id 1001)"),
                (What::Denied, "you may not make files in"),
                (What::ReadOnly, "read-only file system"),
                (What::NoSpace, "no space is left"),
                (What::NoInodes, "no inodes are left"),
                (What::Quota, "quota"),
                (What::NotSticky(0o777), "mode 0777"),
                (What::Silent("no answer within 20.0s".into()), "no answer within 20.0s"),
                (What::Failed("Input/output error".into()), "Input/output error"),
            ] {
                let world = served(World::new("n[1-2]", "1(x2)", 1), spec, |request| match request.root == root {
                    true => broken(request, what.clone()),
                    false => usable(request),
                });
                let refusal = world.refusal(spec);
                for part in [&format!("{spec} cannot be used on n2: "), part, "; ", "cache-unusable=warn"] {
                    assert!(refusal.contains(part), "{part}: {refusal}");
                }
                let plan = world.plan(&format!("{spec},cache-unusable=warn")).unwrap();
                let name = if spec.starts_with("cache") { "HF_HOME" } else { "TRITON_CACHE_DIR" };
                assert_eq!(plan.value(name), None, "a directory that cannot be used is not named");
                assert_eq!(plan.warnings.len(), 1);
            }
        }
    }

    #[test]
    fn the_image_s_variables_give_way_to_what_was_asked_for_and_to_nothing_else() {
        let in_image = |submitted: &[(&str, &str)]| {
            let image = [("HF_HOME", "/root/hf"), ("TRITON_CACHE_DIR", "/root/t")];
            let mut world = World::new("n1", "1", 0).export(&image).export(&[("SLURM_JOB_UID", "4711")]);
            world.submitted = Some(World::new("n1", "1", 0).export(submitted).environment);
            world.task.container = Container::Inside;
            world
        };
        let spec = "cache=/c,local=/l";
        let plan = served(in_image(&[]), spec, usable).plan(spec).unwrap();
        assert_eq!(plan.value("HF_HOME"), Some("/c/huggingface"));
        assert_eq!(plan.value("TRITON_CACHE_DIR"), Some("/l/palingenesis-4711/triton"));
        // The user's own, that the image replaced, is put back.
        let plan = served(in_image(&[("HF_HOME", "/mine")]), spec, usable).plan(spec).unwrap();
        assert_eq!(plan.value("HF_HOME"), Some("/mine"));
        // Nobody asked: the image's stay.
        let plan = served(in_image(&[]), "", usable).plan("").unwrap();
        assert_eq!((plan.value("HF_HOME"), plan.value("TRITON_CACHE_DIR")), (None, None));
        assert!(left(&plan, "TRITON_CACHE_DIR").starts_with("the container image's, kept"));
        let mut site = in_image(&[]);
        let settings = Settings::parse("cache=/s", Source::Site("palingenesis.toml".into())).unwrap();
        site.site = Some(SiteView { settings, ..SiteView::default() });
        let plan = served(site, "", usable).plan("").unwrap();
        assert_eq!((plan.value("HF_HOME"), plan.value("NEMO_HOME")), (None, Some("/s/nemo")));
    }

    #[test]
    fn a_long_path_is_told_whole() {
        let root = format!("/scratch/{}", "project/".repeat(20));
        let spec = format!("cache={root}");
        let world = served(World::new("n1", "1", 0), &spec, |request| broken(request, What::Denied));
        let refusal = world.refusal(&spec);
        assert!(refusal.contains(&format!("{}huggingface", root)), "{refusal}");
    }

    #[test]
    fn in_a_container_the_way_out_is_to_mount_it() {
        for what in [What::Denied, What::ReadOnly, What::NotMounted, What::Missing] {
            let mut world = World::new("n1", "1", 0);
            world.task.container = Container::Inside;
            let requests = wants(&world, "cache=/scratch/me");
            assert!(requests.iter().all(|request| request.in_container));
            let world = served(world, "cache=/scratch/me", |request| match request.purpose {
                Purpose::Shared => broken(request, what.clone()),
                _ => usable(request),
            });
            let refusal = world.refusal("cache=/scratch/me");
            assert!(refusal.contains("--container-mounts=/scratch/me:/scratch/me"), "{refusal}");
        }
    }

    #[test]
    fn a_site_s_directory_is_a_default_only() {
        let with_site = |environment: &[(&str, &str)]| {
            let mut world = World::new("n1", "1", 0).export(environment);
            world.site = Some(SiteView {
                settings: Settings::parse("cache=/site/me,local=/nvme", Source::Site("palingenesis.toml".into()))
                    .unwrap(),
                env: vec![SiteVariable {
                    name: "NEMO_HOME".into(),
                    value: "/site/nemo".into(),
                    force: false,
                    place: "palingenesis.toml:3".into(),
                    of_node: false,
                }],
                ..SiteView::default()
            });
            world
        };
        let plan = served(with_site(&[]), "", usable).plan("").unwrap();
        let set = |plan: &Plan, name: &str| {
            plan.env.iter().find(|v| v.name == name).map(|v| (v.value.clone(), v.origin)).unwrap()
        };
        assert_eq!(set(&plan, "HF_HOME"), ("/site/me/huggingface".into(), Origin::Site));
        assert_eq!(set(&plan, "TRITON_CACHE_DIR"), ("/nvme/palingenesis-1000/triton".into(), Origin::Site));
        // The variable that the site names stands above its own cache=, and below the user's.
        assert_eq!(set(&plan, "NEMO_HOME"), ("/site/nemo".into(), Origin::Site));
        let plan = served(with_site(&[]), "cache=/mine", usable).plan("cache=/mine").unwrap();
        assert_eq!(set(&plan, "NEMO_HOME"), ("/mine/nemo".into(), Origin::Option));
        let plan = served(with_site(&[("HF_HOME", "/own")]), "", usable).plan("").unwrap();
        assert_eq!(left(&plan, "HF_HOME"), "yours, kept (the site would set /site/me/huggingface)");
        // A node without the site's directory for compilers is no reason to refuse.
        let plan = served(with_site(&[]), "", |request| match request.root.as_str() {
            "/nvme" => broken(request, What::Missing),
            _ => usable(request),
        });
        let plan = plan.plan("").unwrap();
        assert_eq!(plan.value("TRITON_CACHE_DIR"), Some("/tmp/palingenesis-1000/triton"));
        assert_eq!(plan.warnings.len(), 1);
        assert_eq!((plan.warnings[0].id, plan.warnings[0].severity), ("cache-unusable", Severity::Warning));
    }

    #[test]
    fn what_the_site_forces_stands_above_cache_and_needs_no_directory() {
        let mut world = World::new("n1", "1", 0);
        world.site = Some(SiteView {
            env: vec![SiteVariable {
                name: "HF_HOME".into(),
                value: "/site/hf".into(),
                force: true,
                place: "palingenesis.toml:3".into(),
                of_node: false,
            }],
            ..SiteView::default()
        });
        assert_eq!(wants(&world, "cache=/mine")[0].folders, ["nemo", "torch", "uv"]);
        let plan = served(world, "cache=/mine", usable).plan("cache=/mine").unwrap();
        assert_eq!((plan.value("HF_HOME"), plan.value("NEMO_HOME")), (Some("/site/hf"), Some("/mine/nemo")));
    }

    /// <https://github.com/astral-sh/uv/issues/15149>: where links do not work uv
    /// warns and copies; it is told to copy only where that was seen.
    #[test]
    fn uv_is_told_to_copy_where_links_do_not_work() {
        let linked = |fault: Option<&str>| {
            let fault = fault.map(String::from);
            move |request: &Request| Directory {
                hard_link: request.link.as_ref().map(|(_, to)| HardLink { to: to.clone(), fault: fault.clone() }),
                ..usable(request)
            }
        };
        let spec = "cache=/scratch";
        let plan = served(World::new("n1", "1", 0), spec, linked(Some("another file system"))).plan(spec).unwrap();
        assert_eq!(plan.value("UV_LINK_MODE"), Some("copy"));
        let plan = served(World::new("n1", "1", 0), spec, linked(None)).plan(spec).unwrap();
        assert_eq!(plan.value("UV_LINK_MODE"), None);
        assert!(left(&plan, "UV_LINK_MODE").contains("/project/job/.venv work"));
        let own = World::new("n1", "1", 0).export(&[("UV_LINK_MODE", "symlink")]);
        assert_eq!(wants(&own, spec)[0].link, None);
        let plan = served(own, spec, linked(Some("another file system"))).plan(spec).unwrap();
        assert_eq!(plan.value("UV_LINK_MODE"), None);
        // Nothing known of links: nothing said of them.
        let plan = served(World::new("n1", "1", 0), spec, usable).plan(spec).unwrap();
        assert!(plan.value("UV_LINK_MODE").is_none() && !plan.left.iter().any(|note| note.name == "UV_LINK_MODE"));
        let to = |name, value| {
            let world = World::new("n1", "1", 0).export(&[(name, value)]);
            wants(&world, spec)[0].link.clone().unwrap().1
        };
        assert_eq!(to("UV_PROJECT_ENVIRONMENT", "/envs/a"), "/envs/a");
        assert_eq!(to("UV_PROJECT_ENVIRONMENT", "env"), "/project/job/env");
        assert_eq!(to("VIRTUAL_ENV", "/envs/b"), "/envs/b");
    }

    /// The same where the user's own variables name both: it is told, and nothing is set.
    #[test]
    fn the_user_s_own_cache_of_uv_is_tried_too() {
        let own = [("UV_CACHE_DIR", "/mine/uv"), ("UV_PROJECT_ENVIRONMENT", "env")];
        let world = |more: &[(&str, &str)]| World::new("n1", "1", 0).export(&[&own[..], more].concat());
        let asked = |world: &World| -> Vec<String> {
            wants(world, "")
                .into_iter()
                .filter_map(|request| Some(format!("{} {}", request.root, request.link?.1)))
                .collect()
        };
        assert_eq!(asked(&world(&[])), ["/mine/uv /project/job/env"]);
        // Who has said how uv shall link has decided; without an environment uv may not run at all.
        assert!(asked(&world(&[("UV_LINK_MODE", "copy")])).is_empty());
        assert!(asked(&World::new("n1", "1", 0).export(&own[..1])).is_empty());
        let said = |fault: Option<&str>| {
            let world = served(world(&[]), "", |request| Directory {
                hard_link: request
                    .link
                    .as_ref()
                    .map(|(_, to)| HardLink { to: to.clone(), fault: fault.map(String::from) }),
                ..usable(request)
            });
            let plan = world.plan("").unwrap();
            assert_eq!(plan.value("UV_LINK_MODE"), None);
            plan.warnings.into_iter().map(|warning| (warning.id, warning.severity, warning.message)).collect::<Vec<_>>()
        };
        assert_eq!(said(None), []);
        let found = said(Some("another mount"));
        let [("uv-link", Severity::Info, message)] = found.as_slice() else { panic!("{found:?}") };
        assert!(
            message.starts_with("UV_CACHE_DIR=/mine/uv: no hard link leads to /project/job/env (another mount): "),
            "{message}"
        );
    }

    /// <https://github.com/NVIDIA/pyxis/issues/46>: paths built from a variable
    /// that became empty.
    #[test]
    fn paths_made_from_an_empty_variable_are_refused() {
        for (name, value, expected) in [
            ("HF_HOME", "", Some(true)),
            ("HF_HOME", "/", Some(true)),
            ("HF_HOME", "//", Some(true)),
            ("HF_HOME", "//hf", Some(true)),
            ("HF_HOME", "/HF_HOME", Some(true)),
            ("HF_HOME", "/HF_HOME/", Some(true)),
            ("TORCH_HOME", "/TORCH_HOME", Some(true)),
            ("CUDA_CACHE_PATH", "//nv", Some(true)),
            ("HF_HOME", "cache/hf", Some(false)),
            ("TRITON_CACHE_DIR", "./t", Some(false)),
            ("TRITON_CACHE_DIR", "/scratch/$USER/t", Some(false)),
            // huggingface_hub replaces variables and ~ itself (constants.py).
            ("HF_HOME", "$SCRATCH/hf", None),
            ("HF_HOME", "~/hf", None),
            ("TORCH_HOME", "~/torch", None),
            ("TRITON_CACHE_DIR", "~/t", Some(false)),
            ("HF_HOME", "/hf", None),
            ("HF_HOME", "/scratch/user1/hf", None),
        ] {
            assert_eq!(wrong_path(name, value).map(|(fails, _)| fails), expected, "{name}={value}");
            let world = World::new("n1", "1", 0).export(&[(name, value)]);
            match expected {
                Some(true) => {
                    let refusal = world.refusal("");
                    assert!(refusal.contains(&format!("{name}={value}: ")), "{refusal}");
                    assert!(refusal.contains("empty") && refusal.contains("unset it"), "{refusal}");
                    assert!(world.plan("cache-path=off").unwrap().warnings.is_empty());
                }
                Some(false) => {
                    let ids: Vec<&str> = world.plan("").unwrap().warnings.iter().map(|w| w.id).collect();
                    assert_eq!(ids, ["cache-path"], "{name}={value}");
                }
                None => assert!(world.plan("").unwrap().warnings.is_empty(), "{name}={value}"),
            }
        }
    }

    /// <https://github.com/pytorch/pytorch/issues/173679>.
    #[test]
    fn a_compiler_s_cache_on_a_file_server_is_told_with_several_tasks() {
        let ids = |tasks: &str, kind: u64, names: &[(&str, &str)]| -> Vec<&'static str> {
            let world = served(World::new("n1", tasks, 0).export(names), "", |request| Directory {
                file_system: Some(FileSystem::of(kind)),
                ..Directory::of(request)
            });
            world.plan("").unwrap().warnings.iter().map(|warning| warning.id).collect()
        };
        let all = [
            ("TRITON_CACHE_DIR", "/home/me/.triton"),
            ("TORCHINDUCTOR_CACHE_DIR", "/home/me/i"),
            ("TORCH_EXTENSIONS_DIR", "/home/me/e"),
            ("CUDA_CACHE_PATH", "/home/me/.nv"),
        ];
        for kind in [0x6969, 0x0BD0_0BD0, 0x4750_4653, 0x1983_0326, 0x00C3_6400, 0x6573_5546] {
            assert_eq!(ids("2", kind, &all), ["cache-nfs"; 4], "{kind:x}");
            assert!(ids("1", kind, &all).is_empty(), "{kind:x}");
        }
        for kind in [0xEF53, 0x5846_5342, 0x0102_1994] {
            assert!(ids("2", kind, &all).is_empty(), "{kind:x}");
        }
        let world = World::new("n1", "8", 0).export(&all[..1]);
        let world = served(world, "", |request| Directory {
            file_system: Some(FileSystem::of(0x6969)),
            ..Directory::of(request)
        });
        let plan = world.plan("").unwrap();
        let text = &plan.warnings[0].message;
        assert!(text.contains("TRITON_CACHE_DIR=/home/me/.triton is on nfs, and 8 tasks"), "{text}");
    }

    /// <https://github.com/modelscope/ms-swift/issues/4462>: a "shared" directory in
    /// /tmp. By the file system's type only: that two nodes see two directories
    /// takes both of them to show.
    #[test]
    fn a_shared_cache_on_a_file_system_of_the_node_is_told_with_several_nodes() {
        let ids = |nodes: &str, kind: u64, name: &str| -> Vec<&'static str> {
            let world = World::new(nodes, "1", 0).export(&[(name, "/tmp/hf")]);
            let world = served(world, "", |request| Directory {
                file_system: Some(FileSystem::of(kind)),
                ..Directory::of(request)
            });
            world.plan("").unwrap().warnings.iter().map(|warning| warning.id).collect()
        };
        for name in ["HF_HOME", "NEMO_HOME"] {
            for kind in [0x0102_1994, 0x5846_5342, 0xEF53, 0x9123_683E, 0x794C_7630] {
                assert_eq!(ids("n[1-2]", kind, name), ["shared-local"], "{kind:x}");
                assert!(ids("n1", kind, name).is_empty(), "{kind:x}");
            }
            for kind in [0x6969, 0x0BD0_0BD0, 0x6573_5546, 0x1234] {
                assert!(ids("n[1-2]", kind, name).is_empty(), "{kind:x}");
            }
        }
        // Ours below cache= too; its own default for compilers is no matter.
        let world = served(World::new("n[1-2]", "1", 0), "cache=/var/tmp/c", |request| Directory {
            file_system: Some(FileSystem::of(0xEF53)),
            ..Directory::of(request)
        });
        let ids: Vec<_> = world.plan("cache=/var/tmp/c").unwrap().warnings.iter().map(|w| w.id).collect();
        assert_eq!(ids, ["shared-local"; 2]);
    }

    #[test]
    fn little_room_is_told() {
        let ids = |free: u64| -> Vec<&'static str> {
            let world = served(World::new("n1", "1", 0), "cache=/c", |request| Directory {
                free: Some(free),
                ..Directory::of(request)
            });
            world.plan("cache=/c").unwrap().warnings.iter().map(|warning| warning.id).collect()
        };
        assert_eq!(ids((1 << 30) - 1), ["cache-space"]);
        assert!(ids(1 << 30).is_empty());
    }

    #[test]
    fn a_step_from_inside_another_takes_no_cache_of_the_outer_one() {
        let outer = served(World::new("n1", "1", 0), "cache=/c", usable).plan("cache=/c").unwrap();
        let mut world = World::new("n1", "1", 0);
        for variable in &outer.env {
            world.environment.set(&variable.name, &variable.value);
        }
        assert_eq!(wants(&world, "cache=/d")[0].folders.len(), 4, "ours, not the user's");
        let plan = served(world, "cache=/d", usable).plan("cache=/d").unwrap();
        assert_eq!(plan.value("HF_HOME"), Some("/d/huggingface"));
        let mut world = World::new("n1", "1", 0);
        for variable in &outer.env {
            world.environment.set(&variable.name, &variable.value);
        }
        let plan = world.plan("").unwrap();
        assert!(plan.unset.iter().any(|note| note.name == "UV_CACHE_DIR"), "{:?}", plan.unset);
    }
}
