//! What `palingenesis-enable` is to do, from what the host has. Pure.

use crate::doctor::{Check, Verdict, arguments, before_pyxis, library, release};
use crate::slurm::Host;
use crate::slurm::access::Access;
use crate::slurm::library::Library;
use crate::slurm::plugstack::{Line, Opened, Stack, State};
use crate::slurm::release::Release;

/// The link's name in an included directory: behind pyxis.conf, because files are read in
/// the order of names and palingenesis must come after pyxis.
pub const LINK: &str = "zz-palingenesis.conf";

/// What the host has.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Slurm.
    pub host: Host,
    /// The file with the line.
    pub fragment: String,
    /// The same without links; `None`: it is not there.
    pub fragment_leads: Option<String>,
    /// Who may read and change it.
    pub fragment_access: Access,
    /// Its line's library; `None`: it has no line.
    pub library: Option<Library>,
    /// What stands where Slurm looks.
    pub found: Vec<Place>,
    /// Directories that are there, of those in which something may be put.
    pub folders: Vec<String>,
    /// What plugstack.conf says.
    pub written: Option<String>,
}

/// A file or link where Slurm looks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its path.
    pub path: String,
    /// What the link says, if it is one.
    pub link: Option<String>,
    /// Where it leads in the end; `None`: nowhere.
    pub leads: Option<String>,
    /// Whether it is a regular file itself.
    pub file: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// All is as wanted.
    Nothing(String),
    /// It must not or cannot be done: what, why, cure.
    Refuse(String),
    /// A link.
    Link {
        /// Where.
        at: String,
        /// To what.
        to: String,
        /// Whether a link that leads nowhere makes room first.
        instead_of_dangling: bool,
    },
    /// A plugstack.conf where there is none.
    Write {
        /// Its path.
        file: String,
        /// Its text.
        text: String,
    },
    /// Links of ours, or the plugstack.conf that this program wrote.
    Remove {
        /// Their paths.
        paths: Vec<String>,
    },
}

impl Step {
    /// What it does, in words that follow "would".
    pub fn text(&self) -> String {
        match self {
            Step::Nothing(text) | Step::Refuse(text) => text.clone(),
            Step::Link { at, to, .. } => format!("link {at} to {to}"),
            Step::Write { file, .. } => format!("write {file}"),
            Step::Remove { paths } => format!("remove {}", paths.join(", ")),
        }
    }
}

/// The plugstack.conf that this program writes where there is none.
pub fn whole_file(fragment: &str) -> String {
    format!(
        "# Slurm's plugins, see spank(8). Written by palingenesis-enable, which takes it away again\n\
         # (--remove) while it is as it was written.\ninclude {fragment}\n"
    )
}

fn refuse(text: impl Into<String>) -> Step {
    Step::Refuse(text.into())
}

/// Its words, for a refusal.
fn of_check(what: &str, check: &Check) -> String {
    let cure = check.cure.as_ref().map(|cure| format!("; {cure}")).unwrap_or_default();
    format!("{what}: {}{cure}", check.text)
}

/// Whether this file of the host keeps every command from working, or from being judged.
fn fault(stack: &Stack) -> Option<String> {
    let faulty = |opened: &&Opened| matches!(opened.state, State::Fault(_));
    let opened = stack.opened.iter().find(faulty)?;
    let State::Fault(why) = &opened.state else { return None };
    Some(format!("{} cannot be opened: {why}", opened.path))
}

/// Puts the line into place.
pub fn enable(seen: &Seen) -> Step {
    let host = &seen.host;
    let fragment = &seen.fragment;
    let package = host.release().map_or_else(|| "the package of this host's Slurm release".into(), Release::package);
    if seen.fragment_leads.is_none() {
        return refuse(format!(
            "not enabled: {fragment} is not there; install {package}, or name the file by --fragment"
        ));
    }
    let Some(ours) = &seen.library else {
        return refuse(format!("not enabled: {fragment} has no line of palingenesis; install {package} again"));
    };
    let Some(stack) = &host.stack else {
        let how = &host.conf.how;
        return refuse(format!(
            "not enabled: no slurm.conf is found, so it is not known which plugstack.conf is read: {how}; name it: \
             SLURM_CONF=/path/slurm.conf palingenesis-enable"
        ));
    };
    if let Some(fault) = &host.conf.fault {
        return refuse(format!("not enabled: {fault}; correct it first"));
    }
    if host.conf.configless {
        return refuse(configless(ours, "not enabled", "write this as the last line of"));
    }
    if let Some((pid, own)) = elsewhere(host) {
        let file = host.conf.file.as_deref().unwrap_or("none");
        return refuse(format!(
            "not enabled: slurmd ({pid}) has its configuration from {own}, and commands here from {file}, so that \
             steps would not load what commands do; let both read the same, or name slurmd's: \
             SLURM_CONF=/path/slurm.conf palingenesis-enable"
        ));
    }
    if let Some(fault) = fault(stack) {
        return refuse(format!("not enabled: {fault}, and every srun stops at it; correct that first"));
    }
    // Users' commands stop at a file that they cannot open.
    if let Some(closed) = &seen.fragment_access.closed {
        return refuse(format!(
            "not enabled: {fragment} is not readable by all ({}), and every srun of users would stop at it; {}",
            closed.why, closed.cure
        ));
    }
    if let Some(how) = &seen.fragment_access.loose {
        return refuse(format!(
            "not enabled: {fragment} may be changed by others than root ({how}), who then load what they like into \
            slurmd; \
             chown root {fragment}; chmod go-w {fragment}"
        ));
    }
    let line = arguments(&ours.line);
    if line.verdict == Verdict::Error {
        return refuse(of_check("not enabled", &line));
    }
    // The same tests for a line that is there already: it may have been right once.
    let there = stack.ours().next();
    let tested = there.and_then(|line| host.libraries.iter().find(|library| library.line == *line)).unwrap_or(ours);
    for check in [library(host, tested), release(host, tested)] {
        if matches!(check.verdict, Verdict::Error | Verdict::Warning | Verdict::Unknown) {
            let unknown = if host.release().is_none() { "; name this host's release: --slurm 24.11" } else { "" };
            let what = match there {
                Some(line) => format!("the line is there already, in {}, but not right", line.place()),
                None => "not enabled".into(),
            };
            return refuse(format!("{}{unknown}", of_check(&what, &check)));
        }
    }
    if let Some(line) = there {
        return already(stack, line);
    }
    link(seen, stack).or_else(|| whole(seen, stack)).unwrap_or_else(|| {
        refuse(format!(
            "not enabled: {} includes no directory that is there, and is left as it is; write this as its last line, \
            into a \
             copy that you then rename over it: include {fragment}",
            stack.file
        ))
    })
}

/// A slurmd whose configuration is another than that of commands.
fn elsewhere(host: &Host) -> Option<(u32, String)> {
    host.daemons.iter().find_map(|daemon| {
        let sent = daemon.configless.then(|| "slurmctld".to_string());
        let own = daemon.conf.clone().filter(|own| host.conf.file.as_ref() != Some(own)).or(sent)?;
        Some((daemon.pid, own))
    })
}

fn configless(ours: &Library, what: &str, how: &str) -> String {
    let line = [&["optional".to_string(), ours.line.path.clone()], ours.line.arguments.as_slice()].concat().join(" ");
    format!(
        "{what}: this host has the plugstack.conf that slurmctld sends; {how} plugstack.conf on slurmctld's host, \
        then scontrol reconfigure: {line}"
    )
}

fn already(stack: &Stack, line: &Line) -> Step {
    if let Some((ours, pyxis)) = before_pyxis(&stack.lines) {
        return refuse(format!(
            "the line is there already, in {}, but before that of pyxis in {}, which then replaces values by its \
            image's; \
             let it stand after pyxis",
            ours.place(),
            pyxis.place()
        ));
    }
    let more: Vec<String> = stack.ours().skip(1).map(Line::place).collect();
    if !more.is_empty() {
        return refuse(format!(
            "the line is there several times, in {} and in {}; take all but one out",
            line.place(),
            more.join(", ")
        ));
    }
    Step::Nothing(format!("already enabled: {} loads {}", line.place(), line.path))
}

/// A link in a directory that is included, behind pyxis.
fn link(seen: &Seen, stack: &Stack) -> Option<Step> {
    let fragment = &seen.fragment;
    let candidates = stack.includes.iter().filter_map(|include| {
        let at = include.would_include(LINK)?;
        let folder = at.rsplit_once('/')?.0.to_string();
        seen.folders.contains(&folder).then(|| (include.place_of(&at), at, include.closed.clone()))
    });
    // The last one has most before it.
    let (before, at, closed) = candidates.max_by_key(|(before, ..)| *before)?;
    if let Some(closed) = closed {
        return Some(refuse(format!(
            "not enabled: users cannot see what is in the directory of {at} ({}), and their commands would not load \
            it; {}",
            closed.why, closed.cure
        )));
    }
    // Another run may have made ours since plugstack.conf was read.
    let is_ours = |place: &Place| place.link.is_some() && place.leads.is_some() && place.leads == seen.fragment_leads;
    let taken = seen.found.iter().find(|place| place.path == at && !is_ours(place));
    if let Some(place) = taken
        && (place.leads.is_some() || place.link.is_none())
    {
        return Some(refuse(format!(
            "not enabled: {at} is there, and without a line of palingenesis; look at it, take it away, and run this \
            again"
        )));
    }
    if let Some(pyxis) = stack.lines.iter().skip(before).find(|line| line.is_pyxis()) {
        return Some(refuse(format!(
            "not enabled: pyxis' line in {} would stand after palingenesis ({at}), and pyxis then replaces values by \
            its \
             image's; let pyxis come first, or write this below its line: include {fragment}",
            pyxis.place()
        )));
    }
    Some(Step::Link { at, to: fragment.clone(), instead_of_dangling: taken.is_some() })
}

/// A file of our own, where Slurm has none.
fn whole(seen: &Seen, stack: &Stack) -> Option<Step> {
    let folder = stack.file.rsplit_once('/')?.0;
    // Another run may have written ours since it was looked for.
    let ours = seen.written.as_ref() == Some(&whole_file(&seen.fragment));
    let none = *stack.state() == State::Missing && (ours || !seen.found.iter().any(|place| place.path == stack.file));
    (none && seen.folders.iter().any(|there| there == folder))
        .then(|| Step::Write { file: stack.file.clone(), text: whole_file(&seen.fragment) })
}

/// Takes it out.
pub fn remove(seen: &Seen) -> Step {
    let Some(stack) = &seen.host.stack else {
        return refuse(format!(
            "nothing removed: no slurm.conf is found, so it is not known which plugstack.conf is read: {}; name it: \
             SLURM_CONF=/path/slurm.conf palingenesis-enable --remove",
            seen.host.conf.how
        ));
    };
    // A link whose package is gone is ours by what it says.
    let is_ours = |place: &&Place| {
        let Some(link) = &place.link else { return false };
        let same = place.leads.is_some() && place.leads == seen.fragment_leads;
        same || *link == seen.fragment || (place.leads.is_none() && place.path.ends_with(&format!("/{LINK}")))
    };
    let mut paths: Vec<String> = seen.found.iter().filter(is_ours).map(|place| place.path.clone()).collect();
    if seen.written.as_ref() == Some(&whole_file(&seen.fragment)) {
        paths.push(stack.file.clone());
    }
    if !paths.is_empty() {
        return Step::Remove { paths };
    }
    let Some(line) = stack.ours().next() else {
        return Step::Nothing(format!("not enabled: {} and what it includes have no line of palingenesis", stack.file));
    };
    if seen.host.conf.configless {
        return refuse(format!(
            "nothing removed: {} is what slurmctld sent; take the line out on slurmctld's host, then scontrol \
            reconfigure",
            line.file
        ));
    }
    let includes = stack
        .includes
        .iter()
        .find(|include| include.files.contains(&line.file) && !include.pattern.contains(['*', '?', '[']));
    let what = match includes {
        Some(include) if line.file == seen.fragment => format!("the include in {}", include.place),
        _ => format!("the line in {}", line.place()),
    };
    refuse(format!(
        "nothing removed: {what} was not put there by this program, and that file is left as it is; take it out in a \
        copy \
         that you then rename over it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm::access::Closed;
    use crate::slurm::conf::Configuration;
    use crate::slurm::library::{Load, Symbols};
    use crate::slurm::plugstack::Include;

    const STACK: &str = "/etc/slurm/plugstack.conf";
    const FOLDER: &str = "/etc/slurm/plugstack.conf.d";
    const FRAGMENT: &str = "/usr/share/palingenesis/palingenesis.conf";
    const AT: &str = "/etc/slurm/plugstack.conf.d/zz-palingenesis.conf";

    fn line(file: &str, path: &str) -> Line {
        Line { file: file.into(), number: 1, required: false, path: path.into(), arguments: Vec::new() }
    }

    fn opened(path: &str, state: State) -> Opened {
        Opened { path: path.into(), state, link: None, access: Access::default(), changed: None }
    }

    /// Installed, and not enabled.
    fn seen() -> Seen {
        let ours = line(FRAGMENT, "/usr/lib/palingenesis/spank_palingenesis.so");
        let include = Include {
            place: format!("{STACK}:1"),
            pattern: format!("{FOLDER}/*.conf"),
            files: Vec::new(),
            closed: None,
            before: vec![0],
        };
        let stack = Stack {
            file: STACK.into(),
            opened: vec![opened(STACK, State::Read)],
            includes: vec![include],
            ..Stack::default()
        };
        Seen {
            host: Host {
                named: Release::parse("24.11"),
                commands: None,
                slurmd: None,
                conf: Configuration { file: Some("/etc/slurm/slurm.conf".into()), ..Configuration::default() },
                stack: Some(stack),
                libraries: Vec::new(),
                gone: Vec::new(),
                daemons: Vec::new(),
                probe: None,
            },
            fragment: FRAGMENT.into(),
            fragment_leads: Some(FRAGMENT.into()),
            library: Some(Library {
                path: Some(ours.path.clone()),
                line: ours,
                symbols: Ok(Symbols { name: None, kind: Some("spank".into()), release: Release::parse("24.11") }),
                load: Load::Loaded,
                access: Access::default(),
            }),
            fragment_access: Access::default(),
            found: Vec::new(),
            folders: vec![FOLDER.into(), "/etc/slurm".into()],
            written: Some(String::new()),
        }
    }

    fn refused(seen: &Seen, parts: &[&str]) {
        let Step::Refuse(text) = enable(seen) else { panic!("{:?}", enable(seen)) };
        parts.iter().for_each(|part| assert!(text.contains(part), "'{part}' is not in: {text}"));
    }

    #[test]
    fn a_link_where_a_directory_is_included() {
        let link = |dangling| Step::Link { at: AT.into(), to: FRAGMENT.into(), instead_of_dangling: dangling };
        assert_eq!(enable(&seen()), link(false));
        let mut dangling = seen();
        dangling.found =
            vec![Place { path: AT.into(), link: Some("/old/palingenesis.conf".into()), leads: None, file: false }];
        assert_eq!(enable(&dangling), link(true));
        // Made by another run a moment ago.
        dangling.found[0].leads = Some(FRAGMENT.into());
        assert_eq!(enable(&dangling), link(false));
        // What somebody else put there stays.
        dangling.found[0].leads = Some("/old/palingenesis.conf".into());
        refused(&dangling, &[AT, "take it away"]);
        dangling.found[0] = Place { path: AT.into(), link: None, leads: Some(AT.into()), file: true };
        refused(&dangling, &[AT, "take it away"]);
        let mut bare = seen();
        bare.host.stack.as_mut().unwrap().includes[0].pattern = format!("{FOLDER}/*");
        assert_eq!(enable(&bare), link(false));
        // Whose names are others'.
        bare.host.stack.as_mut().unwrap().includes[0].pattern = format!("{FOLDER}/site-*.conf");
        refused(&bare, &["includes no directory", &format!("include {FRAGMENT}")]);
    }

    #[test]
    fn not_where_slurmd_reads_something_else() {
        let mut seen = seen();
        let daemon = |conf: Option<&str>, configless| crate::slurm::daemon::Daemon {
            pid: 812,
            conf: conf.map(String::from),
            configless,
            ..Default::default()
        };
        for own in [None, Some("/etc/slurm/slurm.conf")] {
            seen.host.daemons = vec![daemon(own, false)];
            assert!(matches!(enable(&seen), Step::Link { .. }), "{:?}", enable(&seen));
        }
        seen.host.daemons = vec![daemon(Some("/srv/slurm.conf"), false)];
        refused(&seen, &["slurmd (812)", "/srv/slurm.conf", "/etc/slurm/slurm.conf", "SLURM_CONF="]);
        seen.host.daemons = vec![daemon(None, true)];
        refused(&seen, &["slurmd (812)", "from slurmctld"]);
    }

    #[test]
    fn behind_pyxis_or_not_at_all() {
        let mut seen = seen();
        let pyxis = line(STACK, "/usr/lib64/slurm/spank_pyxis.so");
        let stack = seen.host.stack.as_mut().unwrap();
        stack.lines.push(pyxis.clone());
        refused(&seen, &["pyxis", &format!("{STACK}:1")]);
        let stack = seen.host.stack.as_mut().unwrap();
        (stack.includes[0].files, stack.includes[0].before) = (vec![format!("{FOLDER}/pyxis.conf")], vec![0, 1]);
        assert!(matches!(enable(&seen), Step::Link { .. }), "{:?}", enable(&seen));
        let stack = seen.host.stack.as_mut().unwrap();
        (stack.includes[0].files, stack.includes[0].before) = (vec![format!("{FOLDER}/zzz-pyxis.conf")], vec![0, 1]);
        refused(&seen, &["pyxis"]);
    }

    #[test]
    fn a_file_where_there_is_none_and_never_over_one() {
        let mut seen = seen();
        seen.written = None;
        let stack = seen.host.stack.as_mut().unwrap();
        (stack.includes, stack.opened) = (Vec::new(), vec![opened(STACK, State::Missing)]);
        assert_eq!(enable(&seen), Step::Write { file: STACK.into(), text: whole_file(FRAGMENT) });
        // A link that leads nowhere is somebody's.
        seen.found =
            vec![Place { path: STACK.into(), link: Some("/srv/plugstack.conf".into()), leads: None, file: false }];
        refused(&seen, &["includes no directory"]);
        seen.host.conf.configless = true;
        refused(
            &seen,
            &["slurmctld's host", "optional /usr/lib/palingenesis/spank_palingenesis.so", "scontrol reconfigure"],
        );
    }

    /// <https://github.com/NVIDIA/pyxis/issues/25>
    #[test]
    fn what_would_not_load_is_not_enabled() {
        let mut other = seen();
        other.host.named = Release::parse("25.05");
        refused(&other, &["for Slurm 24.11", "install palingenesis-slurm25.05"]);
        other.host.named = None;
        refused(&other, &["not known", "--slurm"]);
        let mut broken = seen();
        broken.library.as_mut().unwrap().load = Load::Refused("version `GLIBC_2.38' not found".into());
        refused(&broken, &["GLIBC_2.38", "newer system"]);
        broken.library = None;
        refused(&broken, &[FRAGMENT, "no line"]);
        broken.fragment_leads = None;
        refused(&broken, &["is not there", "install palingenesis-slurm24.11"]);
        let mut hidden = seen();
        let closed = Closed { why: "mode 0600".into(), cure: "chmod a+r it".into(), but_group: false };
        hidden.host.stack.as_mut().unwrap().includes[0].closed = Some(closed.clone());
        refused(&hidden, &[AT, "mode 0600", "chmod a+r it"]);
        hidden.fragment_access.closed = Some(closed);
        refused(&hidden, &[FRAGMENT, "mode 0600", "every srun of users would stop"]);
        hidden.fragment_access = Access { closed: None, loose: Some("mode 0666".into()) };
        refused(&hidden, &[FRAGMENT, "mode 0666", "chmod go-w"]);
        let mut wrong = seen();
        wrong.host.named = Release::parse("25.05");
        let ours = line(STACK, "/usr/lib/palingenesis/spank_palingenesis.so");
        wrong.host.libraries = vec![Library { line: ours.clone(), ..wrong.library.clone().unwrap() }];
        wrong.host.stack.as_mut().unwrap().lines.push(ours);
        refused(&wrong, &["the line is there already, in /etc/slurm/plugstack.conf:1, but", "palingenesis-slurm25.05"]);
        let mut closed = seen();
        closed.host.stack.as_mut().unwrap().opened.push(opened("/etc/x", State::Fault("Permission denied".into())));
        refused(&closed, &["/etc/x", "Permission denied"]);
    }

    #[test]
    fn what_is_there_already_is_told_and_removed_by_who_put_it_there() {
        let mut there = seen();
        let ours = line(AT, "/usr/lib/palingenesis/spank_palingenesis.so");
        there.host.stack.as_mut().unwrap().lines.push(ours);
        assert!(matches!(enable(&there), Step::Nothing(text) if text.contains(AT)));
        there.found =
            vec![Place { path: AT.into(), link: Some(FRAGMENT.into()), leads: Some(FRAGMENT.into()), file: false }];
        assert_eq!(remove(&there), Step::Remove { paths: vec![AT.into()] });
        // The package is gone, its link is left.
        (there.found[0].leads, there.fragment_leads) = (None, None);
        assert_eq!(remove(&there), Step::Remove { paths: vec![AT.into()] });
        // Somebody's own line.
        there.found = Vec::new();
        let Step::Refuse(text) = remove(&there) else { panic!("{:?}", remove(&there)) };
        assert!(text.contains(&format!("the line in {AT}:1")), "{text}");
        let mut written = seen();
        written.written = Some(whole_file(FRAGMENT));
        assert_eq!(remove(&written), Step::Remove { paths: vec![STACK.into()] });
        written.written = Some(format!("{}optional /x.so\n", whole_file(FRAGMENT)));
        assert!(matches!(remove(&written), Step::Nothing(_)));
    }
}
