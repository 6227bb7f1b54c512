//! The verdicts: what is right, what is not, and the cure, from the facts alone. Pure.

use std::collections::BTreeSet;
use std::time::SystemTime;

use palingenesis::config::Plugstack;
use palingenesis::facts::directories::Place;
use palingenesis::plan::checks::ENOUGH_LOCKED;
use palingenesis::system::clock;

use super::facts::{Facts, Folder, Use};
use crate::slurm::Host;
use crate::slurm::access::Closed;
use crate::slurm::conf::SENT;
use crate::slurm::library::{Library, Load};
use crate::slurm::plugstack::{Include, Line, Opened, Stack, State};
use crate::slurm::release::Release;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Right.
    Ok,
    /// To know; nothing is wrong.
    Note,
    /// Not to be found out here.
    Unknown,
    /// Jobs run, but not as well as they might, or not for long.
    Warning,
    /// Jobs with the flag, or all jobs, do not run.
    Error,
}

impl Verdict {
    /// Its word, in text and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Unknown => "unknown",
            Verdict::Warning => "warning",
            Verdict::Error => "error",
        }
    }
}

/// One line of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Its name, which stays the same from version to version.
    pub name: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found.
    pub text: String,
    /// What to do.
    pub cure: Option<String>,
    /// How it is known.
    pub source: String,
}

fn check(name: &'static str, verdict: Verdict, text: impl Into<String>, source: impl Into<String>) -> Check {
    Check { name, verdict, text: text.into(), cure: None, source: source.into() }
}

impl Check {
    fn cure(self, cure: impl Into<String>) -> Check {
        Check { cure: Some(cure.into()), ..self }
    }
}

/// Checks without which nothing can be said of jobs: unknown, they make the whole
/// unknown. Others may be root's alone to see.
const DECISIVE: [&str; 7] = ["slurm", "slurm-conf", "plugstack", "line", "library", "release", "files"];

/// Where the facts have not been read in this time.
pub fn unanswered(seconds: u64) -> Check {
    let text = format!("after {seconds} s some file has not been read: a file server does not answer");
    check("files", Verdict::Unknown, text, "the time")
        .cure("see `mount -t nfs,nfs4,lustre,beegfs` and dmesg for the server that does not answer, and run this again")
}

/// Of all checks together.
pub fn overall(checks: &[Check]) -> Verdict {
    let worst = checks.iter().map(|check| check.verdict).filter(|verdict| *verdict >= Verdict::Warning).max();
    let unknown = checks.iter().any(|check| check.verdict == Verdict::Unknown && DECISIVE.contains(&check.name));
    match worst {
        Some(verdict) => verdict,
        None if unknown => Verdict::Unknown,
        None => Verdict::Ok,
    }
}

/// For whoever calls this from monitoring.
pub fn exit_code(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Ok | Verdict::Note => 0,
        Verdict::Warning => 1,
        Verdict::Error => 2,
        Verdict::Unknown => 3,
    }
}

/// Every check, in the order of the answer.
pub fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = of_slurm(&facts.host);
    checks.push(site_file(facts));
    checks.extend(devices(facts));
    checks.extend(libraries(facts));
    checks.push(worker(facts));
    checks.extend(facts.directories.iter().map(folder));
    checks.extend(limits(facts));
    checks.extend(enroot(facts));
    checks
}

/// Those that say whether Slurm loads the plugin here.
fn of_slurm(host: &Host) -> Vec<Check> {
    let mut checks = vec![slurm(host), slurm_conf(host), configless(host), plugstack(host)];
    let Some(stack) = &host.stack else {
        checks.push(check("line", Verdict::Unknown, "not known without slurm.conf", "see slurm-conf"));
        let contexts = contexts(host, &checks);
        checks.extend(contexts);
        return checks;
    };
    checks.push(line(host, stack));
    if let Some(first) = stack.ours().next() {
        checks.push(required(first));
        checks.push(arguments(first));
    }
    if let Some(ours) = host.libraries.first() {
        checks.push(library(host, ours));
        checks.push(release(host, ours));
    }
    checks.push(order(stack));
    checks.push(included(stack));
    checks.push(others(host, stack));
    let contexts = contexts(host, &checks);
    checks.extend(contexts);
    checks
}

fn slurm(host: &Host) -> Check {
    let said = |program: &Option<crate::slurm::release::Program>| {
        program.as_ref().map(|program| match &program.said {
            Ok(text) => format!("{} -V: {text}", program.asked.display()),
            Err(why) => format!("{} -V: {why}", program.asked.display()),
        })
    };
    let sources: Vec<String> = [said(&host.commands), said(&host.slurmd)].into_iter().flatten().collect();
    let source = match (host.named, sources.is_empty()) {
        (Some(_), _) => "named by --slurm".to_string(),
        (None, true) => "looked for srun, sbatch, salloc and slurmd in PATH and the usual directories".into(),
        (None, false) => sources.join("; "),
    };
    let Some(found) = host.release() else {
        let text = if sources.is_empty() { "no Slurm is found on this host" } else { "its release is not known" };
        let cure = "put srun's directory into PATH, or name the release: --slurm 24.11";
        return check("slurm", Verdict::Unknown, text, source).cure(cure);
    };
    if !found.is_supported() {
        let text = format!("Slurm {found}; palingenesis is for 21.08 and newer");
        return check("slurm", Verdict::Error, text, source).cure("upgrade Slurm, or take the line out");
    }
    let of = |program: &Option<crate::slurm::release::Program>| program.as_ref().and_then(|program| program.release());
    match (host.named, of(&host.commands), of(&host.slurmd)) {
        (None, Some(commands), Some(slurmd)) if commands != slurmd => {
            let text =
                format!("commands are of Slurm {commands}, slurmd is of {slurmd}: one library can be of one only");
            let cure = format!("bring both to one release, and the plugin with them: {}", slurmd.package());
            check("slurm", Verdict::Warning, text, source).cure(cure)
        }
        _ => check("slurm", Verdict::Ok, format!("Slurm {found}"), source),
    }
}

fn slurm_conf(host: &Host) -> Check {
    match (&host.conf.file, &host.conf.fault) {
        (Some(_), Some(fault)) => check("slurm-conf", Verdict::Error, fault.clone(), host.conf.how.clone())
            .cure("correct it, or the path: no command of Slurm works without it"),
        (Some(file), None) => check("slurm-conf", Verdict::Ok, file.clone(), host.conf.how.clone()),
        (None, _) => {
            check("slurm-conf", Verdict::Unknown, "no slurm.conf is found on this host", host.conf.how.clone())
                .cure("name it: SLURM_CONF=/path/slurm.conf palingenesis doctor")
        }
    }
}

fn configless(host: &Host) -> Check {
    let conf = &host.conf;
    if conf.configless {
        let text = "this host has what slurmctld sent: plugstack.conf, but neither the library nor files that it \
        includes \
                    by a path";
        let source = conf.file.clone().unwrap_or_else(|| "slurmd's command line, or SLURM_CONF_SERVER".into());
        return check("configless", Verdict::Note, text, source);
    }
    let source = conf.file.clone().unwrap_or_else(|| "see slurm-conf".into());
    let text = match (&conf.file, conf.offered) {
        (None, _) => return check("configless", Verdict::Unknown, "not known without slurm.conf", source),
        (Some(_), true) => "no: slurmctld offers its configuration (enable_configless), but this host has its own",
        (Some(_), false) => "no: this host has its own configuration",
    };
    check("configless", Verdict::Ok, text, source)
}

fn plugstack(host: &Host) -> Check {
    let (Some(stack), Some((file, how))) = (&host.stack, host.conf.stack_file()) else {
        return check("plugstack", Verdict::Unknown, "not known without slurm.conf", "see slurm-conf");
    };
    if !file.starts_with('/') {
        let text = format!("PlugStackConfig={file} is no absolute path: each command takes it from its own directory");
        return check("plugstack", Verdict::Error, text, how).cure("write the whole path into slurm.conf");
    }
    if let Some(path) = &stack.endless {
        let text = format!("{path} is included again and again: every command of Slurm that reads it crashes");
        return check("plugstack", Verdict::Error, text, how).cure("take the include out");
    }
    match (stack.state(), stack.opened.first()) {
        (State::Read, Some(opened)) => match (&opened.access.closed, &opened.access.loose) {
            (Some(closed), _) => unreadable("plugstack", &file, closed, &how),
            (None, Some(loose)) => changeable("plugstack", &file, loose, &how),
            (None, None) => check("plugstack", Verdict::Ok, file, how),
        },
        (State::Missing, _) | (_, None) => {
            check("plugstack", Verdict::Note, format!("{file} does not exist, which is as if it were empty"), how)
        }
        (State::Folder, _) => {
            check("plugstack", Verdict::Error, format!("{file} is a directory"), how).cure("put a file in its place")
        }
        (State::Fault(why), _) => {
            let text = format!("{file}: {why}: every srun, sbatch and salloc stops");
            check("plugstack", Verdict::Error, text, how).cure(format!("chmod a+r {file}, and a+x its directories"))
        }
    }
}

/// A file that people may change.
fn changeable(name: &'static str, file: &str, how: &str, source: &str) -> Check {
    let text =
        format!("{file} may be changed by others than root ({how}), who then load what they like into slurmd, as root");
    check(name, Verdict::Warning, text, source).cure(format!("chown root {file}; chmod go-w {file}"))
}

/// A file that users cannot read.
fn unreadable(name: &'static str, file: &str, closed: &Closed, source: &str) -> Check {
    let text =
        format!("{file} is not readable by all ({}): every srun, sbatch and salloc of users stops at it", closed.why);
    match closed.but_group {
        false => check(name, Verdict::Error, text, source).cure(closed.cure.clone()),
        true => check(name, Verdict::Warning, format!("{text}, unless they are in its group"), source)
            .cure(closed.cure.clone()),
    }
}

/// What to do to have the line.
fn enable(host: &Host) -> String {
    if host.conf.configless {
        return "write `optional LIBRARY` into plugstack.conf on slurmctld's host, as \
                /usr/share/palingenesis/palingenesis.conf has it, then: scontrol reconfigure"
            .into();
    }
    "as root: palingenesis-enable".into()
}

/// Includes of one file that is not there.
fn nowhere(stack: &Stack) -> impl Iterator<Item = &Include> {
    stack.includes.iter().filter(|include| include.files.is_empty() && !include.pattern.contains(['*', '?', '[']))
}

fn line(host: &Host, stack: &Stack) -> Check {
    let ours: Vec<&Line> = stack.ours().collect();
    let source = match stack.opened.iter().filter(|opened| opened.state == State::Read).count() {
        1 => format!("read {}", stack.file),
        files => format!("read {} and what it includes, {files} files in all", stack.file),
    };
    let gone = |opened: &&Opened| {
        opened.state == State::Missing
            && (opened.path.contains("palingenesis")
                || opened.link.as_ref().is_some_and(|to| to.contains("palingenesis")))
    };
    match ours.as_slice() {
        [] => {
            let lost = stack.opened.iter().find(gone).map(|opened| match &opened.link {
                Some(to) => format!("{} leads to {to}", opened.path),
                None => opened.path.clone(),
            });
            let named = nowhere(stack).find(|include| include.pattern.contains("palingenesis"));
            let lost = lost.or_else(|| named.map(|include| format!("{} includes {}", include.place, include.pattern)));
            let (text, cure) = match lost {
                Some(lost) => (
                    format!("no line of palingenesis: {lost}, which is not there, and Slurm passes over it"),
                    "install the package of this release again, or: palingenesis-enable --remove".into(),
                ),
                None => {
                    ("no line of palingenesis: jobs on this host do not know --palingenesis".to_string(), enable(host))
                }
            };
            check("line", Verdict::Error, text, source).cure(cure)
        }
        [one] => check("line", Verdict::Ok, format!("{} in {}", one.path, one.place()), source),
        [first, rest @ ..] => {
            let places: Vec<String> = rest.iter().map(|line| line.place()).collect();
            let text = format!(
                "{} lines load palingenesis, the first in {}, then {}: each srun prints `option \"palingenesis\" \
                provided by \
                 both`, and each hook runs twice",
                ours.len(),
                first.place(),
                places.join(", ")
            );
            check("line", Verdict::Warning, text, source).cure(format!("take out {}", places.join(", ")))
        }
    }
}

fn required(line: &Line) -> Check {
    let place = line.place();
    if !line.required {
        return check("required", Verdict::Ok, "optional: without the library jobs run that do not ask for it", place);
    }
    let text = "required: if the library is missing or of another release, every srun, sbatch and salloc stops, and \
    slurmd \
                does not start";
    check("required", Verdict::Warning, text, place)
        .cure("write optional: what the plugin refuses it refuses all the same")
}

pub fn arguments(line: &Line) -> Check {
    let place = line.place();
    match Plugstack::parse(line.arguments.iter().map(String::as_str)) {
        Err(error) => check("arguments", Verdict::Error, format!("{error}; jobs with the flag are refused"), place)
            .cure("correct the line; new jobs read it afresh"),
        Ok(parsed) if parsed.root != std::path::Path::new("/") => {
            let text = format!("root={}: the node's facts are read there, which is for tests", parsed.root.display());
            check("arguments", Verdict::Warning, text, place).cure("take root= out")
        }
        Ok(_) if line.arguments.is_empty() => check("arguments", Verdict::Ok, "none", place),
        Ok(_) => check("arguments", Verdict::Ok, line.arguments.join(" "), place),
    }
}

/// What a library that cannot be loaded costs.
fn without(line: &Line) -> &'static str {
    if line.required {
        "every srun, sbatch and salloc stops (required)"
    } else {
        "jobs with the flag do not start, others run, in most releases with an error line"
    }
}

pub fn library(host: &Host, library: &Library) -> Check {
    let line = &library.line;
    let path = library.path.as_ref().unwrap_or(&line.path);
    let source = "loaded by a process of its own, as Slurm loads it (dlopen)";
    let broken = |why: &str| format!("{path} cannot be loaded: {why}; {}", without(line));
    let package = host.release().map_or_else(|| "the package of this host's release".into(), Release::package);
    let missing = format!("install {package}, or correct the path in the line");
    match (&library.path, &library.load) {
        (None, Load::Refused(why)) => check("library", Verdict::Error, broken(why), line.place()).cure(missing),
        (_, Load::Refused(why)) => {
            let cure = if why.contains("GLIBC") {
                "it was linked on a newer system than this: install one that is built for this system, or build it here"
            } else {
                "install the package again; the loader's words say what it misses"
            };
            check("library", Verdict::Error, broken(why), source).cure(cure)
        }
        (_, Load::Crashed(how)) => {
            let text = format!("{path}: the process that loads it ends {how}, as every srun and slurmd would");
            check("library", Verdict::Error, text, source).cure("take the line out, then install the package again")
        }
        (_, Load::Unknown(why)) => check("library", Verdict::Unknown, format!("{path}: {why}"), source),
        (_, Load::Loaded) => match (&library.access.closed, &library.access.loose) {
            (Some(closed), _) => {
                let text = format!("{path} is not readable by all ({}): {}", closed.why, without(line));
                let verdict = if closed.but_group { Verdict::Warning } else { Verdict::Error };
                check("library", verdict, text, "owners and modes").cure(closed.cure.clone())
            }
            (None, Some(loose)) => changeable("library", path, loose, "owners and modes"),
            (None, None) => check("library", Verdict::Ok, format!("{path} loads"), source),
        },
    }
}

/// Of Slurm's release?
pub fn release(host: &Host, library: &Library) -> Check {
    let path = library.path.as_ref().unwrap_or(&library.line.path);
    let source = format!("plugin_version in {path}, against slurm");
    let symbols = match &library.symbols {
        Ok(symbols) => symbols,
        Err(why) => return check("release", Verdict::Unknown, format!("{path}: {why}"), source),
    };
    let Some(stamped) = symbols.release.filter(|_| symbols.kind.as_deref() == Some("spank")) else {
        let text =
            format!("{path} is no SPANK plugin: it lacks plugin_type or plugin_version; {}", without(&library.line));
        let cure = host
            .release()
            .map_or_else(|| "install the package again".into(), |release| format!("install {}", release.package()));
        return check("release", Verdict::Error, text, source).cure(cure);
    };
    let Some(here) = host.release() else {
        let text = format!("the plugin is for Slurm {stamped}; this host's release is not known");
        return check("release", Verdict::Unknown, text, source);
    };
    if stamped == here {
        return check("release", Verdict::Ok, format!("the plugin is for Slurm {stamped}, as this host's"), source);
    }
    let text = format!(
        "the plugin is for Slurm {stamped}, this host has {here}: Slurm does not load it, and {}",
        without(&library.line)
    );
    check("release", Verdict::Error, text, source).cure(other_release(here))
}

/// Which package this host needs.
fn other_release(here: Release) -> String {
    if here.is_supported() { format!("install {}", here.package()) } else { "upgrade Slurm to 21.08 or newer".into() }
}

/// Whether ours stands before pyxis, which then has the last word.
pub fn before_pyxis(lines: &[Line]) -> Option<(&Line, &Line)> {
    let ours = lines.iter().position(Line::is_ours)?;
    let pyxis = lines.iter().rposition(Line::is_pyxis)?;
    (ours < pyxis).then(|| (&lines[ours], &lines[pyxis]))
}

fn order(stack: &Stack) -> Check {
    let source = "the order of lines and of included files";
    if let Some((ours, pyxis)) = before_pyxis(&stack.lines) {
        let text = format!(
            "palingenesis ({}) stands before pyxis ({}), which then replaces values by its image's",
            ours.place(),
            pyxis.place()
        );
        let cure = "give the link a name behind pyxis', as zz-palingenesis.conf, or move the line below";
        return check("order", Verdict::Warning, text, source).cure(cure);
    }
    let text = match (stack.lines.iter().any(Line::is_pyxis), stack.ours().next().is_some()) {
        (false, _) => "no pyxis here",
        (true, true) => "pyxis first, palingenesis after it",
        (true, false) => "pyxis is there, palingenesis is not",
    };
    check("order", Verdict::Ok, text, source)
}

/// What package managers, editors and installers leave behind.
const LEFT: [&str; 19] = [
    ".rpmsave",
    ".rpmnew",
    ".rpmorig",
    ".dpkg-old",
    ".dpkg-new",
    ".dpkg-dist",
    ".dpkg-tmp",
    ".dpkg-bak",
    ".dpkg-remove",
    ".ucf-old",
    ".ucf-new",
    ".ucf-dist",
    ".bak",
    ".orig",
    ".swp",
    ".tmp",
    ".old",
    ".save",
    "~",
];

/// Whether a file in an included directory is hardly meant to be there.
pub fn is_left_over(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    LEFT.iter().any(|end| name.ends_with(end)) || name.starts_with('#') || !name.contains(".conf")
}

fn included(stack: &Stack) -> Check {
    let source = match stack.includes.as_slice() {
        [] => "no include".to_string(),
        includes => includes
            .iter()
            .map(|include| format!("{}: {}", include.place, include.pattern))
            .collect::<Vec<_>>()
            .join("; "),
    };
    let opened = || stack.opened.iter().skip(1);
    for file in opened() {
        let (path, cure) = (&file.path, format!("move {} out of the included directory", file.path));
        if let State::Fault(why) = &file.state {
            let text = format!("{path} cannot be opened: {why}: every srun, sbatch and salloc stops at it");
            return check("included-files", Verdict::Error, text, source).cure(cure);
        }
        if let Some(closed) = file.access.closed.as_ref().filter(|_| file.state == State::Read) {
            return unreadable("included-files", path, closed, &source).cure(format!("{}, or {cure}", closed.cure));
        }
    }
    if let Some((include, closed)) = stack.includes.iter().find_map(|include| Some((include, include.closed.as_ref()?)))
    {
        let text = format!(
            "{}: users do not see what is included ({}), and their commands load none of it",
            include.pattern, closed.why
        );
        let verdict = if closed.but_group { Verdict::Warning } else { Verdict::Error };
        return check("included-files", verdict, text, source).cure(closed.cure.clone());
    }
    // Of a file that is named whole, its name is meant.
    let wild: BTreeSet<&String> = stack
        .includes
        .iter()
        .filter(|include| include.pattern.contains(['*', '?', '[']))
        .flat_map(|include| &include.files)
        .collect();
    let strays: Vec<&str> = opened()
        .filter(|file| file.state == State::Read && wild.contains(&file.path) && is_left_over(&file.path))
        .map(|file| file.path.as_str())
        .collect();
    if !strays.is_empty() {
        let text = format!(
            "Slurm reads {} too, which looks left over; its lines count, a required one stops jobs",
            strays.join(", ")
        );
        let cure = "move it out of the directory, and let the include end in *.conf";
        return check("included-files", Verdict::Warning, text, source).cure(cure);
    }
    if let Some((file, how)) = opened().find_map(|file| Some((file, file.access.loose.as_ref()?))) {
        return changeable("included-files", &file.path, how, &source);
    }
    let read = opened().filter(|file| file.state == State::Read).count();
    let gone = opened().filter(|file| file.state == State::Missing).map(|file| file.path.as_str());
    let gone: Vec<&str> = gone.chain(nowhere(stack).map(|include| include.pattern.as_str())).collect();
    let mut text = match (stack.includes.is_empty(), read) {
        (true, _) => "nothing is included".to_string(),
        (false, 1) => "1 file".into(),
        (false, read) => format!("{read} files"),
    };
    if !gone.is_empty() {
        text.push_str(&format!("; passed over, for it is not there: {}", gone.join(", ")));
        return check("included-files", Verdict::Note, text, source);
    }
    check("included-files", Verdict::Ok, text, source)
}

fn others(host: &Host, stack: &Stack) -> Check {
    let source = format!("read {}", stack.file);
    if let Some(line) = host.gone.first() {
        let text = format!(
            "{}: {} is required and cannot be found: every srun, sbatch and salloc stops",
            line.place(),
            line.path
        );
        return check("other-lines", Verdict::Error, text, source).cure("install what it names, or take the line out");
    }
    if let Some((place, text)) = stack.bad.first() {
        let text = format!("{place}: '{text}' is no line for Slurm, which prints an error at each srun and goes on");
        return check("other-lines", Verdict::Warning, text, source)
            .cure("begin it with required, optional or include, or take it out");
    }
    let others = stack.lines.iter().filter(|line| !line.is_ours()).count();
    let text = match others {
        0 => "no other plugin".to_string(),
        1 => "1 other plugin".into(),
        many => format!("{many} other plugins"),
    };
    check("other-lines", Verdict::Ok, text, source)
}

/// Who loads the plugin here.
fn contexts(host: &Host, checks: &[Check]) -> Vec<Check> {
    let wrong: Vec<&str> = checks
        .iter()
        .filter(|check| ["slurm", "plugstack", "line", "library", "release"].contains(&check.name))
        .filter(|check| [Verdict::Error, Verdict::Unknown].contains(&check.verdict))
        .map(|check| check.name)
        .collect();
    let file = host.stack.as_ref().map_or("plugstack.conf", |stack| stack.file.as_str());
    let afresh = format!("each reads {file} as it starts (spank(7))");
    let commands = match (&host.commands, wrong.as_slice()) {
        (None, _) => {
            check("commands", Verdict::Note, "no srun, sbatch or salloc on this host", "looked for them in PATH")
        }
        (Some(_), []) => check("commands", Verdict::Ok, "srun, sbatch and salloc load it", afresh),
        (Some(_), wrong) => {
            let text = format!("srun, sbatch and salloc do not load it, or it is not known: see {}", wrong.join(", "));
            check("commands", Verdict::Note, text, afresh)
        }
    };
    vec![commands, slurmstepd(host, &wrong), slurmd(host)]
}

fn slurmstepd(host: &Host, wrong: &[&str]) -> Check {
    let Some(daemon) = host.daemons.first() else {
        let text = "no slurmd runs here, so no step does: a login host, or slurmd is down";
        return check("slurmstepd", Verdict::Note, text, "/proc");
    };
    let sent = daemon.configless.then(|| SENT.to_string());
    let own = daemon.conf.clone().or(sent).filter(|file| host.conf.file.as_ref() != Some(file));
    let source = format!("each step reads the plugstack.conf of slurmd ({}) as it starts", daemon.pid);
    if let Some(own) = own {
        let text = format!(
            "slurmd has a slurm.conf of its own, {own}, and what its steps load is not known from that of commands"
        );
        return check("slurmstepd", Verdict::Warning, text, source)
            .cure(format!("let both read the same, or look by SLURM_CONF={own} palingenesis doctor"));
    }
    if !wrong.is_empty() {
        let text = format!("steps do not load it, or it is not known: see {}", wrong.join(", "));
        return check("slurmstepd", Verdict::Note, text, source);
    }
    if !daemon.seen {
        let text = "steps load it, if slurmd has the slurm.conf above; which one it has is seen by root only";
        return check("slurmstepd", Verdict::Ok, text, source);
    }
    check("slurmstepd", Verdict::Ok, "steps load it", source)
}

/// That slurmd itself has it matters to nobody: ranks, checks and reports are the
/// steps' own, and palingenesis has no prolog or epilog
/// (<https://github.com/ComputeCanada/puppet-magic_castle/issues/51>).
const NO_MATTER: &str = "nothing of palingenesis depends on it, on a prolog or an epilog";

fn slurmd(host: &Host) -> Check {
    let Some(daemon) = host.daemons.first() else {
        return check("slurmd", Verdict::Note, "no slurmd runs here", "/proc");
    };
    let pid = daemon.pid;
    match &daemon.loaded {
        Some(loaded) if !loaded.is_empty() => {
            let text = format!("slurmd ({pid}) has loaded it at its start; {NO_MATTER}");
            return check("slurmd", Verdict::Ok, text, format!("/proc/{pid}/maps"));
        }
        Some(_) => {
            let text =
                format!("slurmd ({pid}) has not loaded it: it reads plugstack.conf at its own start only; {NO_MATTER}");
            return check("slurmd", Verdict::Ok, text, format!("/proc/{pid}/maps"));
        }
        None => {}
    }
    let changed = host.stack.iter().flat_map(|stack| &stack.opened).filter_map(|opened| opened.changed).max();
    let at = |time: SystemTime| {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        clock::date_and_time(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    };
    let source = "its start against the files' times; what it has loaded is seen by root only";
    match (daemon.started, changed) {
        // The kernel tells both in whole seconds here.
        (Some(started), Some(changed)) if started > changed => {
            let text = format!(
                "slurmd ({pid}) started {}, after the last change of plugstack.conf and what it includes, and has \
                loaded what \
                 they say; {NO_MATTER}",
                at(started)
            );
            check("slurmd", Verdict::Ok, text, source)
        }
        (Some(started), Some(changed)) => {
            let text = format!(
                "unknown to this user: slurmd ({pid}) started {}, plugstack.conf or what it includes changed {}, and \
                it reads \
                 them at its start only; {NO_MATTER}",
                at(started),
                at(changed)
            );
            check("slurmd", Verdict::Unknown, text, source)
        }
        _ => {
            let text =
                format!("unknown to this user: slurmd ({pid}) reads plugstack.conf at its own start only; {NO_MATTER}");
            check("slurmd", Verdict::Unknown, text, source)
        }
    }
}

fn site_file(facts: &Facts) -> Check {
    let site = &facts.site;
    let source = if site.named { "config= in the line" } else { "its usual place" };
    if let Some(fault) = &site.fault {
        let text = format!("{}; jobs with the flag are refused", fault.finding());
        return check("site-file", Verdict::Error, text, source)
            .cure(format!("correct it; palingenesis doctor --config {} shows what it means", site.file));
    }
    if !site.there {
        return check("site-file", Verdict::Ok, format!("no {}: every job has our defaults", site.file), source);
    }
    match site.warnings.as_slice() {
        [] => check("site-file", Verdict::Ok, format!("{} is right", site.file), source),
        [first, rest @ ..] => {
            let more = if rest.is_empty() { String::new() } else { format!(" (and {} more)", rest.len()) };
            check("site-file", Verdict::Warning, format!("{first}{more}"), source)
                .cure(format!("palingenesis doctor --config {} prints all", site.file))
        }
    }
}

fn devices(facts: &Facts) -> Vec<Check> {
    let node = &facts.node;
    let source = "palingenesis explain --node shows them";
    let gpus: Vec<String> = node.gpus.iter().map(|(model, count)| format!("{count} {model}")).collect();
    let gpus = match (gpus.is_empty(), node.unknown.is_empty()) {
        (false, _) => check("gpus", Verdict::Ok, gpus.join(", "), source),
        (true, true) => check("gpus", Verdict::Note, "none seen, as on a login host", source),
        (true, false) => check("gpus", Verdict::Unknown, node.unknown.join("; "), source),
    };
    let up = node.nics.iter().filter(|(_, up)| *up).count();
    let down: Vec<&str> = node.nics.iter().filter(|(_, up)| !*up).map(|(name, _)| name.as_str()).collect();
    let nics = match (node.nics.len(), down.is_empty()) {
        (0, _) => check("network-cards", Verdict::Note, "no RDMA device and no Slingshot card seen", source),
        (all, true) => check("network-cards", Verdict::Ok, format!("{all}, all up"), source),
        (all, false) => {
            let text = format!("{all}, {up} of them up; down: {}", down.join(", "));
            check("network-cards", Verdict::Note, text, source)
        }
    };
    [Some(gpus), architecture(facts), Some(nics), Some(driver(facts))].into_iter().flatten().collect()
}

/// What the worker's kernels are for: Ampere and later, times ten.
const OLDEST: u32 = 80;

/// Compute capabilities, times ten, by what a model's name has in it; of two the longer one
/// counts (<https://developer.nvidia.com/cuda-gpus>).
const ARCHITECTURES: [(&str, u32); 25] = [
    ("P100", 60),
    ("P40", 61),
    ("V100", 70),
    ("T4", 75),
    ("RTX 6000", 75),
    ("RTX 8000", 75),
    ("A100", 80),
    ("A800", 80),
    ("A30", 80),
    ("A10", 86),
    ("A16", 86),
    ("A40", 86),
    ("RTX A", 86),
    ("L4", 89),
    ("L40", 89),
    ("RTX 6000 Ada", 89),
    ("H100", 90),
    ("H800", 90),
    ("H20", 90),
    ("H200", 90),
    ("GH200", 90),
    ("B200", 100),
    ("GB200", 100),
    ("B300", 103),
    ("RTX PRO 6000", 120),
];

/// Of a model, where its name is known.
fn capability(model: &str) -> Option<u32> {
    // "A10" is in "A100", "L4" in "L40S".
    let fits = |name: &str| {
        model.match_indices(name).any(|(at, _)| {
            let (before, after) = (model[..at].chars().next_back(), model[at + name.len()..].chars().next());
            // "RTX A" is of "RTX A6000": only a number may not go on.
            let goes_on = name.ends_with(|c: char| c.is_ascii_digit()) && after.is_some_and(|c| c.is_ascii_digit());
            !before.is_some_and(char::is_alphanumeric) && !goes_on
        })
    };
    let known = ARCHITECTURES.iter().filter(|(name, _)| fits(name)).max_by_key(|(name, _)| name.len());
    known.map(|(_, capability)| *capability)
}

fn architecture(facts: &Facts) -> Option<Check> {
    if facts.node.nvidia == 0 {
        return None;
    }
    let (mut known, mut old) = (Vec::new(), false);
    for (model, _) in &facts.node.gpus {
        match capability(model) {
            Some(capability) => {
                known.push(format!("{model}: compute capability {}.{}", capability / 10, capability % 10));
                old |= capability < OLDEST;
            }
            None => {
                known.push(format!("{model}: not known here, see `nvidia-smi --query-gpu=compute_cap --format=csv`"))
            }
        }
    }
    let verdict = if old { Verdict::Note } else { Verdict::Ok };
    let mut text = known.join("; ");
    if old {
        text.push_str("; palingenesis-worker computes on 8.0 (Ampere) and later");
    }
    Some(check("gpu-architecture", verdict, text, "the models' names"))
}

fn driver(facts: &Facts) -> Check {
    let source = "/proc/driver/nvidia/version";
    let library = facts.libraries.iter().find(|found| found.name == "libcuda.so.1");
    let of_library = library.and_then(|found| found.path.rsplit_once("libcuda.so.")).map(|(_, version)| version);
    let of_library = of_library.filter(|version| version.contains('.'));
    match (&facts.node.driver, library) {
        (None, _) if facts.node.nvidia > 0 => {
            check("driver", Verdict::Error, "NVIDIA GPUs are there, but their kernel module is not loaded", source)
                .cure("modprobe nvidia, or install the driver")
        }
        (None, _) => check("driver", Verdict::Note, "no NVIDIA driver", source),
        (Some(driver), None) => {
            let text = format!(
                "NVIDIA {driver}, but libcuda.so.1 is not found: no program can use CUDA outside of a container"
            );
            check("driver", Verdict::Warning, text, source)
                .cure("install the driver's user-space libraries (libcuda1, nvidia-driver-cuda-libs)")
        }
        // cuda-compat's is meant to be another (CUDA Compatibility, "Forward Compatibility").
        (Some(driver), Some(found)) if found.path.contains("/compat/") => {
            let text = format!("NVIDIA {driver}, and {} of the CUDA compatibility package before it", found.path);
            check("driver", Verdict::Note, text, source)
        }
        (Some(driver), Some(found)) if of_library.is_some_and(|version| version != driver) => {
            let text = format!(
                "the kernel module is {driver}, {} is another version: CUDA fails with a version mismatch",
                found.path
            );
            check("driver", Verdict::Error, text, source).cure("restart the node, or install the same version of both")
        }
        (Some(driver), Some(_)) => check("driver", Verdict::Ok, format!("NVIDIA {driver}"), source),
    }
}

fn libraries(facts: &Facts) -> Vec<Check> {
    let of = |name: &'static str, wanted: &str, what: &str| {
        let found: Vec<String> = facts
            .libraries
            .iter()
            .filter(|found| found.name.starts_with(wanted))
            .map(|found| format!("{} ({})", found.path, found.by))
            .collect();
        let source = "LD_LIBRARY_PATH, ld.so.cache and the usual directories";
        match found.is_empty() {
            false => check(name, Verdict::Ok, found.join(", "), source),
            true => check(
                name,
                Verdict::Note,
                format!("no {what} on this host: a training may bring its own, in its environment or image"),
                source,
            ),
        }
    };
    vec![of("nccl", "libnccl", "libnccl.so.2"), of("cuda", "libcuda", "libcuda.so.1 or libcudart.so")]
}

/// What palingenesis-worker opens at its start on a GPU.
fn worker(facts: &Facts) -> Check {
    let (name, source) = ("worker-cuda", "where palingenesis-worker looks, without train.cuda_libraries");
    let found = &facts.worker;
    let all = [&found.driver, &found.nvrtc, &found.cublaslt, &found.nccl];
    let there: Vec<String> = all
        .iter()
        .filter_map(|library| library.as_ref().ok())
        .map(|found| match found.version.is_empty() {
            true => format!("{} ({})", found.path.display(), found.by),
            false => format!("{} {} ({})", found.path.display(), found.version, found.by),
        })
        .collect();
    if facts.node.nvidia == 0 {
        return check(name, Verdict::Note, "no NVIDIA GPU: the worker computes on the processor", source);
    }
    let missing: Vec<_> = all.iter().filter_map(|library| library.as_ref().err()).collect();
    let Some(first) = missing.first() else {
        return check(name, Verdict::Ok, there.join(", "), source);
    };
    let names: Vec<&str> = missing.iter().map(|missing| missing.name).collect();
    let text = format!("palingenesis-worker does not find {} for its GPUs", names.join(", "));
    check(name, Verdict::Note, text, source).cure(first.cure)
}

/// Too little for a compiler's cache or the start of one.
const LITTLE: u64 = 1 << 30;

fn folder(folder: &Folder) -> Check {
    let (name, what) = match folder.usage {
        Use::Cache => ("cache", "models and packages"),
        Use::Local => ("local", "compilers' caches"),
    };
    let source = if folder.of_site {
        format!("{name} = \"{}\" in the site file", folder.value)
    } else {
        format!("no {name} in the site file")
    };
    let path = &folder.path;
    let whole = folder.value.trim_end_matches('/') == path;
    let mode = match &folder.mode {
        Err(why) => {
            return check(name, Verdict::Warning, format!("{path}: {why}"), source)
                .cure("mount it, or correct the site file");
        }
        Ok(None) => {
            let text = format!("{path} does not exist here: jobs that would keep {what} there are refused or warned");
            return check(name, Verdict::Warning, text, source)
                .cure(format!("make or mount {path}, or correct the site file"));
        }
        Ok(Some(mode)) => *mode,
    };
    let mut text = path.clone();
    if let Some(file_system) = &folder.file_system {
        text.push_str(&format!(", {}", file_system.name));
    }
    if let Some(free) = folder.free {
        text.push_str(&format!(", {} GiB free", free >> 30));
    }
    if whole && mode & 0o003 != 0o003 {
        let text = format!("{text}: not every user may write there (mode {mode:04o})");
        let verdict = if mode & 0o030 == 0o030 { Verdict::Note } else { Verdict::Warning };
        return check(name, verdict, text, source)
            .cure(format!("chmod 1777 {path}, or see that users' group may write"));
    }
    if whole && mode & 0o1000 == 0 {
        let text = format!(
            "{text}: everybody may rename what others have there (mode {mode:04o}, no sticky bit), so it is not used"
        );
        return check(name, Verdict::Warning, text, source).cure(format!("chmod +t {path}"));
    }
    if folder.free.is_some_and(|free| free < LITTLE) {
        return check(name, Verdict::Warning, format!("{text}: nearly full"), source).cure("make room there");
    }
    let place = folder.file_system.as_ref().map(|file_system| file_system.place);
    if folder.usage == Use::Local && place == Some(Place::Network) {
        let text = format!("{text}: not on this node, where compilers' caches belong");
        return check(name, Verdict::Warning, text, source).cure("name a disk of the node in local");
    }
    if folder.file_system.as_ref().is_some_and(|file_system| file_system.name == "tmpfs") {
        return check(name, Verdict::Note, format!("{text}: it is in memory, which jobs then lack"), source);
    }
    if !whole {
        text.push_str(": users need a directory of their own in it, or the right to make one");
    }
    check(name, Verdict::Ok, text, source)
}

fn in_units(bytes: u64) -> String {
    match bytes {
        u64::MAX => "unlimited".into(),
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    }
}

/// Open files that NCCL and data loaders of eight ranks are known to need.
const ENOUGH_FILES: u64 = 65_536;

fn limits(facts: &Facts) -> Vec<Check> {
    let daemon = facts.host.daemons.first();
    let conf = &facts.host.conf;
    // slurm.conf(5): ALL where nothing is said.
    let propagated = |name: &str| {
        let has = |list: &Option<String>| {
            list.as_ref().map(|list| {
                list.split(',').any(|word| word.eq_ignore_ascii_case(name) || word.eq_ignore_ascii_case("ALL"))
            })
        };
        match (has(&conf.propagate_except), has(&conf.propagate)) {
            (Some(except), _) => !except,
            (None, Some(propagate)) => propagate,
            (None, None) => true,
        }
    };
    let source = |name: &str| {
        let what = if propagated(name) {
            "steps take the soft limit of the shell that starts them"
        } else {
            "steps have slurmd's"
        };
        match daemon {
            Some(daemon) => format!("/proc/{}/limits; by PropagateResourceLimits {what}", daemon.pid),
            None => format!("this process; by PropagateResourceLimits {what}"),
        }
    };
    let shown = |daemon: Option<u64>, own: Option<(u64, u64)>, unit: fn(u64) -> String| {
        let own = own.map_or("not known".to_string(), |(soft, _)| unit(soft));
        match daemon {
            Some(hard) => format!("slurmd's hard limit {}, this process' soft limit {own}", unit(hard)),
            None => format!("this process' soft limit {own}"),
        }
    };
    let rdma = facts.node.nics.iter().any(|(_, up)| *up);
    let locked = daemon.and_then(|daemon| daemon.memlock);
    let text = shown(locked, facts.memlock, in_units);
    let memlock = if !rdma {
        check("memlock", Verdict::Ok, format!("{text}; no RDMA device that needs locked memory"), source("MEMLOCK"))
    } else if locked.is_some_and(|hard| hard < ENOUGH_LOCKED) {
        let text = format!("{text}: RDMA needs its buffers locked, or NCCL fails with \"Cannot allocate memory\"");
        check("memlock", Verdict::Warning, text, source("MEMLOCK"))
            .cure("LimitMEMLOCK=infinity in slurmd's unit, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")
    } else if propagated("MEMLOCK") && facts.memlock.is_some_and(|(soft, _)| soft < ENOUGH_LOCKED) {
        let text = format!("{text}: if users' shells have as little, so have their steps");
        check("memlock", Verdict::Note, text, source("MEMLOCK"))
            .cure("PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")
    } else {
        check("memlock", Verdict::Ok, text, source("MEMLOCK"))
    };
    let files = daemon.and_then(|daemon| daemon.open_files);
    let text =
        shown(files, facts.open_files, |files| if files == u64::MAX { "unlimited".into() } else { files.to_string() });
    let open_files = if files.is_some_and(|hard| hard < ENOUGH_FILES) && !facts.node.gpus.is_empty() {
        let text = format!("{text}: little for NCCL and data loaders of a node's ranks");
        check("open-files", Verdict::Warning, text, source("NOFILE")).cure("LimitNOFILE=1048576 in slurmd's unit")
    } else {
        check("open-files", Verdict::Ok, text, source("NOFILE"))
    };
    vec![memlock, open_files]
}

fn enroot(facts: &Facts) -> Option<Check> {
    let enroot = facts.enroot.as_ref()?;
    let source =
        enroot.file.clone().unwrap_or_else(|| "enroot or pyxis is here, and no /etc/enroot/enroot.conf".into());
    if !enroot.shared.is_empty() {
        let text = format!(
            "{} on a file server: containers of one name clash there, and overlays do not work on NFS or Lustre",
            enroot.shared.join(" and ")
        );
        return Some(
            check("enroot", Verdict::Warning, text, source)
                .cure("name directories of the node, one for each user, in enroot.conf"),
        );
    }
    let set: Vec<String> = enroot.paths.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut text = match set.is_empty() {
        true => "images and containers go where enroot's defaults say, in users' homes".to_string(),
        false => set.join(", "),
    };
    if let Some(hook) = &enroot.pytorch_hook {
        text.push_str(&format!("; ranks and MASTER_ADDR of {hook} are replaced by the step's with the flag"));
    }
    let verdict = if set.is_empty() { Verdict::Note } else { Verdict::Ok };
    Some(check("enroot", verdict, text, source))
}
