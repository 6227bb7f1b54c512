//! Whether a directory is the same one on all nodes, and can be written.
//!
//! Rank 0's node leaves a token in each of [`places`], every node says what it sees of it
//! ([`Seen`]), and [`judge`] says what follows. `act::preflight::shared` does it.
//!
//! What is wrong with `output=` is an error, for it was given to be looked at, and a
//! checkpoint in pieces is found out when it is needed. The caches' are warnings: training
//! that loads for each node what one could have loaded for all is slow, and only where rank
//! 0 prepares what the others read does it fail.

use serde::{Deserialize, Serialize};

use crate::config::{Settings, WarmPer, check_directory};
use crate::facts::Environment;
use crate::facts::directories::{Fault, Here, What};
use crate::facts::mounts::Mount;
use crate::plan::caches::{MUST_BE_SHARED, UV_CACHE, UV_ENVIRONMENT, below_cache, shown, words, wrong_path};
use crate::plan::checks::{Phase, Rule, elsewhere};
use crate::plan::{Plan, Severity, Warning};

/// The checks that look at directories.
pub const RULES: &[Rule] = &[
    elsewhere(
        SHARED,
        Phase::Between,
        Severity::Error,
        "output= that is another directory on some node, or that does not answer there; a warning for caches and for uv's environment after the warm-up",
    ),
    elsewhere(MISSING, Phase::Between, Severity::Error, "output= that does not exist and cannot be made"),
    elsewhere(WRITE, Phase::Between, Severity::Error, "output= in which a node can write no file, and why"),
    elsewhere(
        SPACE,
        Phase::Between,
        Severity::Error,
        "output= without room for a byte or a file; a warning below 1 GiB or 1 % of either",
    ),
    elsewhere(
        SLOW,
        Phase::Between,
        Severity::Info,
        "output= or a cache where a node sees a new file only after more than 2 s",
    ),
];

const SHARED: &str = "dir-shared";
const MISSING: &str = "dir-missing";
const WRITE: &str = "dir-write";
const SPACE: &str = "dir-space";
const SLOW: &str = "dir-slow";

const OUTPUT: &str = "output";
const CACHE: &str = "cache";
const VENV: &str = ".venv";

/// Places that are looked at, at the most.
pub const MOST: usize = 8;

/// Begins the name of the directory in which tokens lie; the user's id follows.
pub const FOLDER: &str = ".palingenesis-preflight-";

/// A file that another node sees later than this is worth a word, in milliseconds.
const SLOWLY: u64 = 2000;

/// Less room than this is worth a word.
const LITTLE: u64 = 1 << 30;

/// Or less than a hundredth, where that is not very much all the same.
const MUCH: u64 = 1 << 40;

/// The same of files.
const FEW_FILES: u64 = 1000;
const MANY_FILES: u64 = 1_000_000;

/// When directories are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before a warm-up.
    Start,
    /// After the warm-up that ran on rank 0's node alone.
    Warmed,
}

/// What to do about a place that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// Rank 0's node makes it; the directory above it must be there.
    Make,
    /// Programs make it later: the nearest directory above it tells as much.
    Above,
    /// Nothing.
    Leave,
}

/// A directory that all nodes should share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What names it: `output`, `cache`, or a variable.
    pub what: String,
    /// Absolute.
    pub path: String,
    /// Where it does not exist.
    pub absence: Absence,
    /// Whether every node must be able to write there.
    pub write: bool,
}

/// What rank 0's node left in a place. Says nothing that a receiver acts on unless it has
/// the same place itself: another node never chooses a path here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// [`Place::what`].
    pub what: String,
    /// [`Place::path`] on rank 0's node.
    pub path: String,
    /// Whose it is: ends the name of the directory it lies in.
    pub owner: u32,
    /// The file's name; `None` where none could be made.
    pub name: Option<String>,
    /// The file's content.
    pub content: String,
    /// Whether the place itself was made for it.
    pub made: bool,
    /// Why there is none.
    pub fault: Option<Fault>,
}

/// What became of a token on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sight {
    /// It is there, after so many milliseconds.
    Same(u64),
    /// The directory is there, the token is not.
    Absent,
    /// There was none to look for.
    NoToken,
    /// The place has another path on this node, or none.
    Elsewhere,
}

/// A place as a node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// [`Place::what`].
    pub what: String,
    /// [`Place::path`] on that node; empty where it has no such place.
    pub path: String,
    /// The token.
    pub sight: Sight,
    /// Why the directory could not be looked at.
    pub fault: Option<Fault>,
    /// Why no file could be made and written.
    pub write: Option<Fault>,
    /// Bytes that the user may still write, and all.
    pub space: Option<(u64, u64)>,
    /// The same of files; absent where the file system counts none.
    pub files: Option<(u64, u64)>,
    /// What is mounted there.
    pub mount: Option<Mount>,
    /// The directory's number on its file system.
    pub inode: Option<u64>,
}

impl Seen {
    /// Of a place of which nothing is known yet.
    pub fn new(what: &str, path: &str, sight: Sight) -> Seen {
        Seen {
            what: what.into(),
            path: path.into(),
            sight,
            fault: None,
            write: None,
            space: None,
            files: None,
            mount: None,
            inode: None,
        }
    }
}

/// The directories to look at. `settings` with the site file's below them; `environment`
/// as the rank had it before the plan.
pub fn places(plan: &Plan, settings: &Settings, environment: &Environment, here: &Here, moment: Moment) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    let mut add = |what: &str, path: &str, absence, write| {
        let path = path.trim_end_matches('/');
        if !path.is_empty() && check_directory(path).is_ok() && !places.iter().any(|place| place.path == path) {
            places.push(Place { what: what.into(), path: path.into(), absence, write });
        }
    };
    let value = |name: &str| -> Option<&str> {
        let ours = plan.env.iter().find(|variable| variable.name == name).map(|variable| variable.value.as_str());
        let left = || environment.get(name).filter(|_| !plan.unset.iter().any(|note| note.name == name));
        ours.or_else(left).filter(|value| !value.is_empty())
    };
    let root = settings.cache.as_ref().map(|root| format!("{}/", root.trim_end_matches('/')));
    let of_cache = |path: &str| root.as_ref().is_some_and(|root| path.starts_with(root.as_str()));
    let warms = settings.warm.is_some() && settings.warm_per == WarmPer::Step;
    if let Some(output) = settings.output.as_ref().filter(|_| moment == Moment::Start) {
        add(OUTPUT, output, Absence::Make, true);
    }
    // A warm-up may be what makes it.
    if (moment == Moment::Warmed) == warms
        && let Some(path) = below_cache().find_map(|name| value(name).filter(|path| of_cache(path)))
    {
        add(CACHE, path, Absence::Above, false);
    }
    match moment {
        Moment::Start if plan.step.nodes > 1 => {
            for name in MUST_BE_SHARED.iter().chain([&UV_CACHE]) {
                let own = value(name).filter(|path| !of_cache(path) && wrong_path(name, path).is_none());
                if let Some(path) = own {
                    add(name, path, Absence::Above, false);
                }
            }
        }
        // One that ran on each node has made one on each.
        Moment::Warmed if warms => {
            let below = |path: &str| match (path.starts_with('/'), &here.folder) {
                (true, _) => Some(path.to_string()),
                (false, folder) => folder.as_ref().map(|folder| format!("{}/{path}", folder.trim_end_matches('/'))),
            };
            let named = value(UV_ENVIRONMENT).map(|path| (UV_ENVIRONMENT, path));
            let uv = settings.warm.as_deref().is_some_and(runs_uv).then_some((VENV, VENV));
            if let Some((what, path)) = named.or(uv)
                && let Some(path) = below(path)
            {
                add(what, &path, Absence::Leave, false);
            }
        }
        Moment::Start | Moment::Warmed => {}
    }
    places.truncate(MOST);
    places
}

/// Whether a command line has uv in it.
fn runs_uv(command: &str) -> bool {
    command.split(|c: char| c.is_whitespace() || "/;&|()".contains(c)).any(|word| word == "uv")
}

/// Stands for nodes in what is said of them: no text of theirs can hold it.
const NODES: char = '\0';

/// Nodes of which the same is to be said.
struct Group<'a> {
    said: String,
    nodes: Vec<&'a str>,
}

/// What the nodes saw, by node rank, rank 0's the first, has against a start.
pub fn judge(seen: &[(String, Vec<Seen>)], moment: Moment) -> Vec<Warning> {
    let Some((_, places)) = seen.first() else { return Vec::new() };
    let mut found = Vec::new();
    for place in places {
        let all: Vec<(&str, &Seen)> = seen
            .iter()
            .filter_map(|(node, seen)| Some((node.as_str(), seen.iter().find(|seen| seen.what == place.what)?)))
            .collect();
        Judge { all, nodes: seen.len(), moment }.place(place, &mut found);
    }
    found
}

/// One place on all nodes, rank 0's the first.
struct Judge<'a> {
    all: Vec<(&'a str, &'a Seen)>,
    nodes: usize,
    moment: Moment,
}

impl<'a> Judge<'a> {
    fn place(&self, first: &Seen, found: &mut Vec<Warning>) {
        let name = named(first);
        let output = first.what == OUTPUT;
        let mut add = |id, severity, message, cure| found.push(Warning { id, severity, message, cure });
        let absent = |seen: &Seen| matches!(&seen.fault, Some(Fault { what: What::Missing, .. }));
        let not_same = self.severity(first);
        for Group { said, nodes } in self.groups(|_, seen| match &seen.fault {
            Some(Fault { what: What::Silent(why), .. }) => Some(shown(why)),
            _ => None,
        }) {
            let message = format!("{name} does not answer on {}: {said}", self.list(&nodes));
            let severity = if output { Severity::Error } else { Severity::Warning };
            add(SHARED, severity, message, format!("tell the cluster's admins, or {}", other(first)));
        }
        // Nothing more can be said of the others.
        if let Some(fault) = &first.fault {
            if output && !matches!(fault.what, What::Silent(_)) {
                let (node, _) = self.all[0];
                let (severity, cure) = self.of_fault(first, fault);
                let cannot = if absent(first) { "does not exist" } else { "cannot be used" };
                let id = if absent(first) { MISSING } else { WRITE };
                add(id, severity, format!("{name} {cannot} on {node}: {}", words(fault)), cure);
            }
            if output || first.what == UV_ENVIRONMENT || first.what == VENV {
                return;
            }
        }
        let mount = |seen: &Seen| seen.mount.as_ref().map(described);
        let here = mount(first).map(|mount| format!(" ({}: {mount})", self.all[0].0)).unwrap_or_default();
        let groups = self.groups(|_, seen| {
            let there = mount(seen).map(|mount| format!(": there it is {mount}{here}")).unwrap_or_default();
            let said = match (&seen.fault, &seen.sight) {
                (Some(Fault { what: What::Silent(_), .. }), _) => return None,
                (_, Sight::Same(_)) => return None,
                (_, Sight::Elsewhere) if seen.path.is_empty() => format!("is not set on {NODES}"),
                (_, Sight::Elsewhere) => format!("is {} on {NODES}", shown(&seen.path)),
                (Some(_), Sight::NoToken) if !output => return None,
                (Some(fault), _) if fault.what == What::Missing => {
                    let below =
                        mount(seen).map(|mount| format!(", the file system is {mount}{here}")).unwrap_or_default();
                    format!("is not on {NODES}: there {}{below}", words(fault))
                }
                (Some(fault), _) => format!("cannot be looked at on {NODES}: {}", looking(fault)),
                (None, Sight::Absent) => format!("is not the same directory on {NODES}{there}"),
                (None, Sight::NoToken) => match other_inode(first, seen) {
                    true => format!("is not the same directory on {NODES}{there}"),
                    false => return None,
                },
            };
            Some(said)
        });
        let different: Vec<&str> = groups.iter().flat_map(|group| group.nodes.iter().copied()).collect();
        for Group { said, nodes } in groups {
            let said = said.replacen(NODES, &self.list(&nodes), 1);
            add(SHARED, not_same, format!("{name} {said}; {}", self.why(first)), self.cure(first));
        }
        if output {
            self.written(first, &name, &different, &mut add);
            self.space(first, &name, &different, &mut add);
        }
        let slow = |seen: &Seen| match seen.sight {
            Sight::Same(millis) if millis > SLOWLY => Some(millis),
            _ => None,
        };
        let late: Vec<&str> = self.all.iter().filter(|(_, seen)| slow(seen).is_some()).map(|(node, _)| *node).collect();
        if let Some(most) = self.all.iter().filter_map(|(_, seen)| slow(seen)).max() {
            let message = format!(
                "{name}: a new file was seen on {} only after {}.{} s",
                self.list(&late),
                most / 1000,
                most % 1000 / 100
            );
            let cure = "a rank that reads what another has just written may not find it: let it wait and look again";
            add(SLOW, Severity::Info, message, cure.into());
        }
    }

    /// What the attempt to write came to, but for room. Where the directory is another one
    /// that is enough.
    fn written(
        &self,
        first: &Seen,
        name: &str,
        different: &[&str],
        add: &mut impl FnMut(&'static str, Severity, String, String),
    ) {
        let fault = |node: &str, seen: &'a Seen| -> Option<&'a Fault> {
            seen.write.as_ref().filter(|fault| !is_room(fault) && !different.contains(&node))
        };
        for Group { said, nodes } in self.groups(|node, seen| fault(node, seen).map(words)) {
            let first_fault =
                self.all.iter().find(|(node, _)| *node == nodes[0]).and_then(|(node, seen)| fault(node, seen));
            let Some(fault) = first_fault else { continue };
            let (severity, cure) = self.of_fault(first, fault);
            let verb = if severity == Severity::Error { "cannot be written" } else { "could not be tried" };
            add(WRITE, severity, format!("{name} {verb} on {}: {said}", self.list(&nodes)), cure);
        }
    }

    /// How much room there is.
    fn space(
        &self,
        first: &Seen,
        name: &str,
        different: &[&str],
        add: &mut impl FnMut(&'static str, Severity, String, String),
    ) {
        let cure = || format!("remove what is not needed there, or {}", other(first));
        for Group { said, nodes } in self.groups(|node, seen| {
            seen.write.as_ref().filter(|fault| is_room(fault) && !different.contains(&node)).map(words)
        }) {
            add(SPACE, Severity::Error, format!("{name} has no room on {}: {said}", self.list(&nodes)), cure());
        }
        // Rank 0's node speaks for all that share it.
        for (node, seen) in self.all.iter().take(1).filter(|(_, seen)| seen.write.is_none()) {
            let bytes = seen.space.filter(|(free, all)| *free < LITTLE || (*free < all / 100 && *free < MUCH));
            let files = seen.files.filter(|(free, all)| *free < FEW_FILES || (*free < all / 100 && *free < MANY_FILES));
            if let Some((free, all)) = bytes {
                let message = format!("{name} has little room: {} of {} are free on {node}", size(free), size(all));
                add(SPACE, Severity::Warning, message, cure());
            }
            if let Some((free, all)) = files {
                let message = format!("{name} has room for few files: {free} of {all} are free on {node}");
                add(SPACE, Severity::Warning, message, cure());
            }
        }
    }

    /// Nodes of which `say` says the same, in the order of the first.
    fn groups(&self, say: impl Fn(&str, &'a Seen) -> Option<String>) -> Vec<Group<'a>> {
        let mut groups: Vec<Group> = Vec::new();
        for (node, seen) in &self.all {
            let Some(said) = say(node, seen) else { continue };
            match groups.iter_mut().find(|group| group.said == said) {
                Some(group) => group.nodes.push(node),
                None => groups.push(Group { said, nodes: vec![node] }),
            }
        }
        groups
    }

    /// `n3`, `n3 and n4`, `n3 and 2 more`, `all 16 nodes`.
    fn list(&self, nodes: &[&str]) -> String {
        match nodes {
            _ if nodes.len() == self.nodes && self.nodes > 1 => format!("all {} nodes", self.nodes),
            [] => String::new(),
            [one] => shown(one),
            [one, two] => format!("{} and {}", shown(one), shown(two)),
            [one, more @ ..] => format!("{} and {} more", shown(one), more.len()),
        }
    }

    fn severity(&self, place: &Seen) -> Severity {
        match place.what.as_str() {
            OUTPUT => Severity::Error,
            // A cache of each node's own is a choice: faster, and loaded once for each.
            UV_CACHE if self.moment == Moment::Start => Severity::Info,
            _ => Severity::Warning,
        }
    }

    fn why(&self, place: &Seen) -> &'static str {
        match (place.what.as_str(), self.moment) {
            (OUTPUT, _) => "checkpoints would lie in parts on several nodes, and the training would not find them",
            (_, Moment::Warmed) => "what the warm-up has made is not there",
            (UV_CACHE, _) => "each node loads its packages for itself",
            _ => "what rank 0 loads or prepares is not there",
        }
    }

    fn cure(&self, place: &Seen) -> String {
        match (place.what.as_str(), self.moment) {
            (OUTPUT, _) => format!("{}, or mount it there{}", other(place), self.mounts(place)),
            (_, Moment::Warmed) => {
                format!("give warm-per=node, and the warm-up runs on each node; or {}", other(place))
            }
            _ => format!("{}{}", other(place), self.mounts(place)),
        }
    }

    /// For containers: a root of layers is one.
    fn mounts(&self, place: &Seen) -> String {
        let contained = |seen: &Seen| {
            seen.mount
                .as_ref()
                .is_some_and(|mount| mount.at == "/" && (mount.kind == "overlay" || mount.kind.starts_with("fuse")))
        };
        match self.all.iter().any(|(_, seen)| contained(seen)) {
            true => format!("; in a container: --container-mounts={0}:{0}", shown(&place.path)),
            false => String::new(),
        }
    }

    /// How bad it is that no file could be made, and what to do.
    fn of_fault(&self, place: &Seen, fault: &Fault) -> (Severity, String) {
        let own = fault.at.rsplit('/').next().is_some_and(|name| name.starts_with(FOLDER));
        match &fault.what {
            // Somebody is in the way of the look, not of the training.
            What::Foreign(_) | What::Link | What::NotDirectory if own => {
                (Severity::Warning, format!("have {} removed, or {}", shown(&fault.at), other(place)))
            }
            What::Missing => {
                let path = shown(&place.path);
                (Severity::Error, format!("mkdir -p {path} first, or {}{}", other(place), self.mounts(place)))
            }
            What::Quota => (Severity::Error, format!("remove what is not needed there, or {}", other(place))),
            _ => (Severity::Error, format!("{}{}", other(place), self.mounts(place))),
        }
    }
}

/// What is wrong where nothing was to be written yet.
fn looking(fault: &Fault) -> String {
    match &fault.what {
        What::Denied => format!("you may not enter it, for you have no right to {}", shown(&fault.at)),
        _ => words(fault),
    }
}

fn is_room(fault: &Fault) -> bool {
    matches!(fault.what, What::NoSpace | What::NoInodes)
}

/// Where no token could be left: whether it is plain that the directories are two. FUSE
/// and layers number files as they like, on each node anew.
fn other_inode(first: &Seen, seen: &Seen) -> bool {
    let stable = |seen: &Seen| {
        seen.mount.as_ref().is_some_and(|mount| !mount.kind.starts_with("fuse") && mount.kind != "overlay")
    };
    let (Some(one), Some(other)) = (first.inode, seen.inode) else { return false };
    one != other && stable(first) && stable(seen)
}

fn named(seen: &Seen) -> String {
    let path = shown(&seen.path);
    match seen.what.as_str() {
        CACHE => format!("the cache {path}"),
        VENV => format!("uv's environment {path}"),
        what => format!("{what}={path}"),
    }
}

/// Another directory, by its switch.
fn other(seen: &Seen) -> String {
    let what = match seen.what.as_str() {
        OUTPUT => "with --palingenesis-output=DIR",
        CACHE => "with --palingenesis-cache=DIR",
        VENV => "with UV_PROJECT_ENVIRONMENT",
        what => return format!("export {what} as a directory that all nodes share"),
    };
    format!("name a directory that all nodes share {what}")
}

/// A mount for people: the source only where it says something.
fn described(mount: &Mount) -> String {
    let (at, kind, source) = (shown(&mount.at), shown(&mount.kind), shown(&mount.source));
    match source.contains('/') || source.contains(':') {
        true => format!("{kind} {source} on {at}"),
        false => format!("{kind} on {at}"),
    }
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{} KiB", bytes >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Settings, Source};
    use crate::facts::directories::{Directory, Purpose};
    use crate::plan::tests::World;

    fn mount(kind: &str, source: &str, at: &str) -> Option<Mount> {
        Some(Mount { at: at.into(), kind: kind.into(), source: source.into() })
    }

    fn good(what: &str, path: &str) -> Seen {
        Seen {
            space: Some((1 << 42, 1 << 44)),
            files: Some((1 << 30, 1 << 31)),
            mount: mount("nfs4", "server:/data", "/data"),
            inode: Some(7),
            ..Seen::new(what, path, Sight::Same(3))
        }
    }

    fn output() -> Seen {
        good(OUTPUT, "/data/out")
    }

    fn fault(at: &str, what: What) -> Option<Fault> {
        Some(Fault { at: at.into(), what })
    }

    /// On n1 `first`, on n2 and so on the others.
    fn nodes(first: Seen, others: Vec<Seen>) -> Vec<(String, Vec<Seen>)> {
        [first].into_iter().chain(others).enumerate().map(|(n, seen)| (format!("n{}", n + 1), vec![seen])).collect()
    }

    fn found(first: Seen, others: Vec<Seen>) -> Vec<(&'static str, Severity, String)> {
        judge(&nodes(first, others), Moment::Start)
            .into_iter()
            .map(|warning| (warning.id, warning.severity, format!("{}; {}", warning.message, warning.cure)))
            .collect()
    }

    #[track_caller]
    fn one(first: Seen, others: Vec<Seen>) -> (&'static str, Severity, String) {
        let found = found(first, others);
        let [one] = found.as_slice() else { panic!("{found:#?}") };
        one.clone()
    }

    #[test]
    fn nothing_is_said_of_a_directory_that_all_nodes_share() {
        assert_eq!(found(output(), vec![output(), output()]), []);
        assert_eq!(judge(&[], Moment::Start), []);
        // One whose file system counts neither bytes nor files.
        let uncounted = Seen { space: None, files: None, mount: None, inode: None, ..output() };
        assert_eq!(found(uncounted.clone(), vec![uncounted]), []);
    }

    /// <https://github.com/modelscope/ms-swift/issues/4462>: the path was there on both
    /// nodes, as a directory of each of them.
    #[test]
    fn a_directory_of_a_node_s_own_is_named_with_node_and_mount() {
        let own = |at: &str| Seen { sight: Sight::Absent, mount: mount("tmpfs", "tmpfs", at), ..output() };
        let (id, severity, text) = one(output(), vec![output(), own("/data")]);
        assert_eq!((id, severity), ("dir-shared", Severity::Error));
        assert!(
            text.starts_with(
                "output=/data/out is not the same directory on n3: there it is tmpfs on /data (n1: nfs4 server:/data on /data); "
            ),
            "{text}"
        );
        assert!(text.contains("--palingenesis-output=DIR"), "{text}");
        // The same on several is said once, something else by itself.
        let found = found(output(), vec![own("/data"), own("/data"), own("/data"), own("/data/out")]);
        let said: Vec<&str> = found.iter().map(|(_, _, text)| text.split(" (").next().unwrap()).collect();
        assert_eq!(
            said,
            [
                "output=/data/out is not the same directory on n2 and 2 more: there it is tmpfs on /data",
                "output=/data/out is not the same directory on n5: there it is tmpfs on /data/out",
            ]
        );
    }

    /// <https://github.com/pytorch/pytorch/pull/92553>: rank 0's host made it, the others
    /// did not have it.
    #[test]
    fn a_directory_that_rank_0_s_node_made_and_another_does_not_have() {
        let absent = Seen {
            sight: Sight::Absent,
            fault: fault("/data/out", What::Missing),
            mount: mount("ext4", "/dev/sda1", "/"),
            ..output()
        };
        let (id, severity, text) = one(output(), vec![absent]);
        assert_eq!((id, severity), ("dir-shared", Severity::Error));
        assert!(
            text.starts_with(
                "output=/data/out is not on n2: there /data/out does not exist, the file system is ext4 /dev/sda1 on / (n1: "
            ),
            "{text}"
        );
    }

    #[test]
    fn a_directory_that_cannot_be_entered_on_another_node() {
        let closed = Seen { sight: Sight::Absent, fault: fault("/data/out", What::Denied), ..output() };
        let (id, severity, text) = one(output(), vec![closed]);
        assert_eq!((id, severity), ("dir-shared", Severity::Error));
        assert!(
            text.contains("cannot be looked at on n2: you may not enter it, for you have no right to /data/out; "),
            "{text}"
        );
    }

    #[test]
    fn a_missing_parent_is_an_error_on_rank_0_s_node_and_said_once() {
        let none = |what: What| Seen {
            sight: Sight::NoToken,
            fault: fault("/data/run", what),
            ..Seen::new(OUTPUT, "/data/run/out", Sight::NoToken)
        };
        let (id, severity, text) = one(none(What::Missing), vec![none(What::Missing), none(What::Missing)]);
        assert_eq!((id, severity), ("dir-missing", Severity::Error));
        assert!(
            text.starts_with(
                "output=/data/run/out does not exist on n1: /data/run does not exist; mkdir -p /data/run/out"
            ),
            "{text}"
        );
        let (id, _, text) = one(none(What::Denied), vec![none(What::Missing)]);
        assert_eq!(id, "dir-write");
        assert!(text.contains("cannot be used on n1: you may not make files in /data/run"), "{text}");
    }

    #[test]
    fn a_server_that_does_not_answer_is_named_with_the_node() {
        let silent = || Seen {
            fault: fault("/data/out", What::Silent("no answer within 35.0s".into())),
            ..Seen::new(OUTPUT, "/data/out", Sight::NoToken)
        };
        let (id, severity, text) = one(output(), vec![output(), silent()]);
        assert_eq!((id, severity), ("dir-shared", Severity::Error));
        assert!(text.starts_with("output=/data/out does not answer on n3: no answer within 35.0s"), "{text}");
        let (_, _, text) = one(silent(), vec![silent()]);
        assert!(text.starts_with("output=/data/out does not answer on all 2 nodes"), "{text}");
        let cache = Seen { what: "HF_HOME".into(), ..silent() };
        assert_eq!(one(good("HF_HOME", "/data/out"), vec![cache]).1, Severity::Warning);
    }

    #[test]
    fn errors_of_writing_are_told_apart() {
        let cases = [
            (
                What::ReadOnly,
                "dir-write",
                "output=/data/out cannot be written on n2: /data/out is on a read-only file system; ",
            ),
            (
                What::Denied,
                "dir-write",
                "output=/data/out cannot be written on n2: you may not make files in /data/out; ",
            ),
            (
                What::Quota,
                "dir-write",
                "output=/data/out cannot be written on n2: your quota at /data/out is used up; remove",
            ),
            (
                What::NoSpace,
                "dir-space",
                "output=/data/out has no room on n2: no space is left on the file system of /data/out; ",
            ),
            (What::NoInodes, "dir-space", "output=/data/out has no room on n2: no inodes are left"),
        ];
        for (what, id, says) in cases {
            let seen = Seen { write: fault("/data/out", what), ..output() };
            let (found, severity, text) = one(output(), vec![seen.clone()]);
            assert_eq!((found, severity), (id, Severity::Error), "{text}");
            assert!(text.starts_with(says), "{text}");
            let (_, _, text) = one(seen.clone(), vec![seen]);
            assert!(text.contains("all 2 nodes"), "{text}");
        }
        // Whoever holds our name in it is in the way of the look, not of the training.
        let held = fault("/data/out/.palingenesis-preflight-1000", What::Foreign(1001));
        let seen = Seen { write: held, ..output() };
        let (id, severity, text) = one(output(), vec![seen]);
        assert_eq!((id, severity), ("dir-write", Severity::Warning));
        assert!(text.contains("could not be tried on n2") && text.contains("another user (id 1001)"), "{text}");
        // Another directory that cannot be written either is one fault, not two.
        let other = Seen { sight: Sight::Absent, write: fault("/data/out", What::ReadOnly), ..output() };
        assert_eq!(one(output(), vec![other]).0, "dir-shared");
    }

    #[test]
    fn little_room_is_said_once_for_a_directory_that_all_share() {
        let with = |space: (u64, u64), files: (u64, u64)| Seen { space: Some(space), files: Some(files), ..output() };
        let many = (1 << 30, 1 << 31);
        let tight = with((1 << 29, 1 << 44), many);
        let (id, severity, text) = one(tight.clone(), vec![tight]);
        assert_eq!((id, severity), ("dir-space", Severity::Warning));
        assert!(text.starts_with("output=/data/out has little room: 512 MiB of 16 TiB are free on n1; "), "{text}");
        // Below a hundredth, though not of what has room enough all the same.
        assert_eq!(one(with((100 << 30, 16 << 40), many), vec![]).0, "dir-space");
        assert_eq!(found(with((8 << 40, 1 << 50), many), vec![]), []);
        assert_eq!(found(with((200 << 30, 16 << 40), many), vec![]), []);
        let (id, severity, text) = one(with((1 << 42, 1 << 44), (999, 1 << 31)), vec![]);
        assert_eq!((id, severity), ("dir-space", Severity::Warning));
        assert!(text.contains("999 of 2147483648 are free on n1"), "{text}");
    }

    #[test]
    fn a_file_that_is_seen_late_is_a_note() {
        let late = |millis| Seen { sight: Sight::Same(millis), ..output() };
        let (id, severity, text) = one(output(), vec![late(2000), late(3456), late(2100)]);
        assert_eq!((id, severity), ("dir-slow", Severity::Info));
        assert!(text.starts_with("output=/data/out: a new file was seen on n3 and n4 only after 3.4 s; "), "{text}");
    }

    /// <https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4207>: rank 0 prepared data in
    /// a directory of its container, and the other node's ranks found none.
    #[test]
    fn a_cache_in_the_container_is_a_warning_that_names_the_variable() {
        let path = "/root/.cache/nemo";
        let layers =
            |sight| Seen { mount: mount("overlay", "overlay", "/"), ..Seen { sight, ..good("NEMO_HOME", path) } };
        let (id, severity, text) = one(layers(Sight::Same(1)), vec![layers(Sight::Absent)]);
        assert_eq!((id, severity), ("dir-shared", Severity::Warning));
        assert_eq!(
            text,
            "NEMO_HOME=/root/.cache/nemo is not the same directory on n2: there it is overlay on / (n1: overlay on /); \
             what rank 0 loads or prepares is not there; export NEMO_HOME as a directory that all nodes share; \
             in a container: --container-mounts=/root/.cache/nemo:/root/.cache/nemo"
        );
        assert_eq!(
            one(good(UV_CACHE, path), vec![Seen { sight: Sight::Absent, ..good(UV_CACHE, path) }]).1,
            Severity::Info
        );
        let elsewhere = |path: &str| Seen { mount: None, ..Seen::new("HF_HOME", path, Sight::Elsewhere) };
        let (.., text) = one(good("HF_HOME", "/a"), vec![elsewhere("")]);
        assert!(text.starts_with("HF_HOME=/a is not set on n2; "), "{text}");
        let (.., text) = one(good("HF_HOME", "/a"), vec![elsewhere("/b{}")]);
        assert!(text.starts_with("HF_HOME=/a is /b{} on n2; "), "{text}");
    }

    #[test]
    fn where_no_token_can_be_left_numbers_speak_if_they_are_the_file_system_s() {
        let read_only = |inode, kind: &str| Seen {
            inode: Some(inode),
            mount: mount(kind, "server:/models", "/models"),
            ..Seen::new("HF_HOME", "/models/hf", Sight::NoToken)
        };
        assert_eq!(found(read_only(5, "nfs4"), vec![read_only(5, "nfs4")]), []);
        assert_eq!(one(read_only(5, "nfs4"), vec![read_only(6, "nfs4")]).0, "dir-shared");
        assert_eq!(found(read_only(5, "fuse.s3fs"), vec![read_only(6, "fuse.s3fs")]), []);
        assert_eq!(found(read_only(5, "overlay"), vec![read_only(6, "overlay")]), []);
        // One that is not there yet.
        let not_yet =
            Seen { fault: fault("/models", What::Missing), ..Seen::new("HF_HOME", "/models/hf", Sight::NoToken) };
        assert_eq!(found(not_yet.clone(), vec![not_yet]), []);
    }

    #[test]
    fn after_the_warm_up_the_cure_is_one_for_each_node() {
        let path = "/project/.venv";
        let absent =
            Seen { sight: Sight::Absent, fault: fault(path, What::Missing), mount: None, ..good(UV_ENVIRONMENT, path) };
        let found = judge(&nodes(good(UV_ENVIRONMENT, path), vec![absent]), Moment::Warmed);
        assert_eq!((found.len(), found[0].severity), (1, Severity::Warning));
        assert!(found[0].cure.starts_with("give warm-per=node"), "{}", found[0].cure);
        assert_eq!(
            found[0].message,
            "UV_PROJECT_ENVIRONMENT=/project/.venv is not on n2: there /project/.venv does not exist; what the warm-up has made is not there"
        );
        // A warm-up that made none.
        let none = Seen { fault: fault(path, What::Missing), ..Seen::new(VENV, path, Sight::NoToken) };
        assert_eq!(judge(&nodes(none.clone(), vec![none]), Moment::Warmed), []);
    }

    #[test]
    fn what_another_node_says_moves_no_cursor() {
        let evil = "/data\u{1b}[2J\nx";
        let seen = Seen { sight: Sight::Absent, mount: mount(evil, evil, evil), ..output() };
        let (.., text) = one(output(), vec![seen]);
        assert!(!text.chars().any(char::is_control), "{text:?}");
        // Nor does a node that answers nothing, or other places, stop the rest.
        let mut all = nodes(output(), vec![good("other", "/x")]);
        all.push(("n3".into(), Vec::new()));
        assert_eq!(judge(&all, Moment::Start), []);
    }

    fn here() -> Here {
        Here { user: 1000, folder: Some("/project/job".into()) }
    }

    /// `what path` of each place; a cache that is given can be used.
    fn wanted(nodes: &str, spec: &str, variables: &[(&str, &str)], moment: Moment) -> Vec<String> {
        let tasks = if nodes == "n1" { "1" } else { "1(x2)" };
        let mut world = World::new(nodes, tasks, 0);
        for (name, value) in variables {
            world.environment.set(*name, *value);
        }
        let settings = Settings::parse(spec, Source::Option).unwrap();
        if let Some(root) = &settings.cache {
            let request = crate::facts::directories::Request {
                purpose: Purpose::Shared,
                ..crate::facts::directories::Request::given(root)
            };
            world.task.directories = vec![Directory::of(&request)];
        }
        let plan = world.plan_with(&settings).unwrap();
        let places = places(&plan, &settings, &world.environment, &here(), moment);
        places.into_iter().map(|place| format!("{} {}", place.what, place.path)).collect()
    }

    #[test]
    fn the_places_are_those_that_somebody_named() {
        let start = |spec: &str, variables: &[(&str, &str)]| wanted("n[1-2]", spec, variables, Moment::Start);
        assert_eq!(start("on", &[]), [""; 0]);
        assert_eq!(start("on", &[("HOME", "/home/me")]), [""; 0]);
        assert_eq!(start("output=/data/out", &[]), ["output /data/out"]);
        assert_eq!(start("output=/data/out,cache=/c", &[]), ["output /data/out", "cache /c/huggingface"]);
        // The user's own variable is another place than the cache.
        let own = [("HF_HOME", "/mine/hf"), ("NEMO_HOME", "/root/.cache/nemo"), ("UV_CACHE_DIR", "/mine/uv")];
        assert_eq!(
            start("cache=/c", &own),
            ["cache /c/torch", "HF_HOME /mine/hf", "NEMO_HOME /root/.cache/nemo", "UV_CACHE_DIR /mine/uv"]
        );
        // No two of one path, none that cannot be one; on one node nobody shares.
        assert_eq!(start("on", &[("HF_HOME", "/a/"), ("HF_HUB_CACHE", "/a"), ("NEMO_HOME", "nemo")]), ["HF_HOME /a"]);
        assert_eq!(start("checks=warn", &[("HF_HOME", ""), ("NEMO_HOME", "$HOME/x")]), [""; 0]);
        assert_eq!(wanted("n1", "output=/o", &[("HF_HOME", "/a")], Moment::Start), ["output /o"]);
    }

    #[test]
    fn what_a_warm_up_makes_is_looked_at_after_it() {
        let warm = "cache=/c,output=/o,warm=uv%20sync";
        let at = |spec: &str, variables: &[(&str, &str)], moment| wanted("n[1-2]", spec, variables, moment);
        assert_eq!(at(warm, &[], Moment::Start), ["output /o"]);
        assert_eq!(at(warm, &[], Moment::Warmed), ["cache /c/huggingface", ".venv /project/job/.venv"]);
        let named = [("UV_PROJECT_ENVIRONMENT", "env")];
        assert_eq!(
            at(warm, &named, Moment::Warmed),
            ["cache /c/huggingface", "UV_PROJECT_ENVIRONMENT /project/job/env"]
        );
        assert_eq!(at("warm=make", &[("UV_PROJECT_ENVIRONMENT", "/e")], Moment::Warmed), ["UV_PROJECT_ENVIRONMENT /e"]);
        assert_eq!(at("warm=./louvre", &[], Moment::Warmed), [""; 0]);
        // On each node: nothing has to be shared for it.
        assert_eq!(at("cache=/c,warm=make,warm-per=node", &[], Moment::Start), ["cache /c/huggingface"]);
        assert_eq!(at("cache=/c,warm=uv%20sync,warm-per=node", &named, Moment::Warmed), [""; 0]);
    }
}
