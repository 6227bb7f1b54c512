//! Checks on the directories of caches.

use crate::facts::directories::{Place, Purpose, What};
use crate::facts::locks::{OldLock, Owner};
use crate::plan::caches::{
    MUST_BE_SHARED, PATHS, cure, file_system, must_be_local, on_a_server, shown, words, wrong_path,
};

use super::{Findings, From, Phase, Rule, Severity, Subject};

/// Less room than this is worth a word.
const LITTLE: u64 = 1 << 30;

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "cache-path",
        Phase::Environment,
        Severity::Error,
        "a cache's path made from an empty variable: empty, /, //hf or /HF_HOME; or relative, or with a $ left",
        cache_path,
    ),
    Rule::new(
        "cache-unusable",
        Phase::Node,
        Severity::Error,
        "a directory given by cache= or local= that cannot be made or written on this node",
        cache_unusable,
    ),
    Rule::new(
        "cache-space",
        Phase::Node,
        Severity::Warning,
        "less than 1 GiB free below cache= or local=",
        cache_space,
    ),
    Rule::new(
        "cache-nfs",
        Phase::Node,
        Severity::Warning,
        "a compiler's cache on a network file system, with several tasks",
        cache_nfs,
    ),
    Rule::new(
        "shared-local",
        Phase::Node,
        Severity::Warning,
        "a cache that all nodes must share, on a file system of this node",
        shared_local,
    ),
    Rule::new(
        "cache-lock-old",
        Phase::Node,
        Severity::Warning,
        "lock files older than an hour that a killed job left in PyTorch's, Triton's or Hugging Face's cache",
        cache_lock_old,
    ),
];

/// <https://github.com/NVIDIA/pyxis/issues/46>: a variable that refers to itself
/// is empty in the container, and paths built from it become /HF_HOME.
fn cache_path(subject: &Subject, findings: &mut Findings) {
    for name in PATHS {
        let Some(value) = subject.given(name) else { continue };
        let Some((fails, why)) = wrong_path(name, &value.value) else { continue };
        let shown = value.shown();
        let cure = format!("export {name} as an absolute path, or unset it and give --palingenesis-cache=DIR");
        if fails {
            findings.error(format!("{shown}: {why}"), cure);
        } else {
            findings.warn(format!("{shown}: {why}"), cure);
        }
    }
}

fn node<'a>(subject: &Subject<'a>) -> &'a str {
    subject.step.map_or("this node", |step| step.node.as_str())
}

fn cache_unusable(subject: &Subject, findings: &mut Findings) {
    let Some(task) = subject.task else { return };
    for found in &task.directories {
        let Some(fault) = &found.fault else { continue };
        let settings = subject.settings;
        let key = match (found.purpose, &fault.what) {
            (Purpose::Shared, _) => "cache",
            (Purpose::Local, _) if settings.local.as_ref() == Some(&found.root) => "local",
            // What the user's own variables name is the user's; but why all ranks
            // hang should be known.
            (Purpose::Given, What::Silent(_)) => {
                let message = format!("a cache's directory gave no answer on {}: {}", node(subject), words(fault));
                findings.warn(message, "tell the cluster's admins");
                continue;
            }
            _ => continue,
        };
        let cure = cure(found, fault, key, subject.task);
        let root = shown(&found.root);
        let message = format!("{key}={root} cannot be used on {}: {}", node(subject), words(fault));
        // A node without the site's directory for compilers has another one.
        if key == "local" && settings.is_of_site("local") {
            findings.warn(message, "tell the cluster's admins; another directory of the node is taken");
        } else {
            findings.error(message, cure);
        }
    }
}

fn cache_space(subject: &Subject, findings: &mut Findings) {
    let Some(task) = subject.task else { return };
    for found in task.directories.iter().filter(|found| found.fault.is_none()) {
        let key = match found.purpose {
            Purpose::Shared => "cache",
            Purpose::Local if subject.settings.local.as_ref() == Some(&found.root) => "local",
            _ => continue,
        };
        if let Some(free) = found.free.filter(|free| *free < LITTLE) {
            let root = shown(&found.root);
            findings.warn(
                format!("{key}={root}: {} MiB are free there on {}", free >> 20, node(subject)),
                format!("remove what is not needed, or name another directory with {key}="),
            );
        }
    }
}

/// <https://github.com/pytorch/pytorch/issues/173679>,
/// <https://github.com/triton-lang/triton/issues/2688>.
fn cache_nfs(subject: &Subject, findings: &mut Findings) {
    let (Some(task), Some(tasks)) = (subject.task, subject.tasks.filter(|tasks| *tasks > 1)) else { return };
    for name in must_be_local() {
        let Some(value) = subject.values.iter().find(|value| value.name == name) else { continue };
        let ours = value.from == From::Ours;
        // What nobody chose was taken for one of the node: FUSE may be that.
        if ours && subject.settings.local.is_none() {
            continue;
        }
        if let Some(found) = file_system(task, &value.value).filter(|found| on_a_server(found)) {
            let cure = match ours {
                true => "name a directory of the node with local=, or leave it out".into(),
                false => format!("unset {name}, and a directory of the node is taken; or name one with local="),
            };
            findings.warn(
                format!(
                    "{} is on {}, and {tasks} tasks compile into it: 'Stale file handle', or waiting for a lock",
                    value.shown(),
                    found.name
                ),
                cure,
            );
        }
    }
}

/// By the file system's type alone: a directory of each node's own may lie on a
/// network file system too, and a shared one on what looks local.
fn shared_local(subject: &Subject, findings: &mut Findings) {
    let (Some(task), true) = (subject.task, subject.several_nodes()) else { return };
    for name in MUST_BE_SHARED {
        let Some(value) = subject.values.iter().find(|value| value.name == *name) else { continue };
        if let Some(found) = file_system(task, &value.value).filter(|found| found.place == Place::Node) {
            findings.warn(
                format!(
                    "{} is on {} of {}, which other nodes probably do not see, and all {} nodes need the same files",
                    value.shown(),
                    found.name,
                    node(subject),
                    subject.nodes.unwrap_or_default()
                ),
                "name a directory that all nodes share with --palingenesis-cache=DIR",
            );
        }
    }
}

/// Lock files that a message names.
const MOST_LOCKS: usize = 3;

/// <https://github.com/pytorch/pytorch/issues/189245>,
/// <https://github.com/ishandhanani/srt-slurm/pull/251>: without a word the ranks wait
/// for a job that is gone.
fn cache_lock_old(subject: &Subject, findings: &mut Findings) {
    let Some(task) = subject.task else { return };
    let mut tell = |owner: Owner, wanted: fn(&OldLock) -> bool, warns: bool, why: &str| {
        let locks: Vec<&OldLock> = task.locks.iter().filter(|lock| lock.owner == owner && wanted(lock)).collect();
        let Some(first) = locks.first() else { return };
        let age = |hours: u64| if hours < 48 { format!("{hours} h") } else { format!("{} days", hours / 24) };
        let named = locks.iter().take(MOST_LOCKS).map(|lock| format!("{} ({})", shown(&lock.path), age(lock.hours)));
        let more = match locks.len().saturating_sub(MOST_LOCKS) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let what = if locks.len() == 1 { "an old lock file" } else { "old lock files" };
        let message = format!("{what} on {}: {}{more}: {why}", node(subject), named.collect::<Vec<_>>().join(", "));
        let cure = format!("if no other job of yours is at work there, rm {}", shown(&first.path));
        if warns { findings.warn(message, cure) } else { findings.inform(message, cure) }
    };
    // In all releases that were affected the file alone counts, whoever made it.
    tell(
        Owner::Extensions,
        |_| true,
        true,
        "PyTorch builds that extension when nobody has it, and else waits for ever",
    );
    tell(Owner::Triton, |_| true, false, "an old Triton may wait for it");
    tell(
        Owner::Hub,
        |lock| lock.held.is_none(),
        true,
        "the file system has no locks, so a download waits while the file is there",
    );
    tell(
        Owner::Hub,
        |lock| lock.held == Some(true),
        true,
        "some process still holds it, and a download waits for that one",
    );
    tell(Owner::Hub, |lock| lock.held == Some(false), false, "its download was not finished");
}
