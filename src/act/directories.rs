//! Makes the directories of the caches, as the user, in the task: 0700, one
//! component at a time, following no link that `facts::directories::walk` would
//! not. Then tries whether they can be used. All of it in a child with a
//! deadline.
//!
//! Every rank makes them, for no rank knows that another has come so far; a
//! directory is made or is there, nothing is made in two steps.

use std::io;

use crate::facts::directories::{
    Directory, Fault, HardLink, Missing, PATIENCE, Purpose, Request, Walked, What, again, each, failed, fault, look_at,
    nearest, on_root, own, root, walk,
};
use crate::system::folder::{Folder, unforeseen_name};

/// Rights of what is made.
const PRIVATE: u32 = 0o700;

/// Makes what is wanted. What is only given is looked at.
pub fn make(requests: &[Request]) -> Vec<Directory> {
    each(requests, PATIENCE, make_one)
}

/// Makes one, here and without a deadline.
fn make_one(request: &Request) -> Directory {
    if request.purpose == Purpose::Given {
        return look_and_link(request);
    }
    let mut directory = Directory::of(request);
    directory.fault = try_make(request, &mut directory).err();
    directory
}

/// Looks at what somebody else's variable names; a link from it is all that is tried.
fn look_and_link(request: &Request) -> Directory {
    let mut directory = look_at(request);
    let wanted = request.link.as_ref().filter(|_| request.probe && directory.hard_link.is_none());
    if let Some((_, to)) = wanted
        && let Some(there) = nearest(&request.root).filter(|there| there.complete)
    {
        directory.hard_link = hard_link(&there.folder, to);
    }
    directory
}

fn make_folder(folder: &Folder, name: &str, at: &str) -> Result<bool, Fault> {
    match folder.make(name, PRIVATE) {
        // Another rank was quicker, or somebody who wants us to follow a link:
        // the caller looks.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(at, &error, folder)),
        _ => Ok(true),
    }
}

fn try_make(request: &Request, directory: &mut Directory) -> Result<(), Fault> {
    let make_root: Missing = &|folder, name, at| match request {
        Request { make_root: false, .. } => Err(fault(at, What::Missing)),
        Request { in_container: true, .. } if on_root(folder) => Err(fault(at, What::NotMounted)),
        _ => make_folder(folder, name, at),
    };
    let mut base = walk(root()?, &request.root, make_root)?;
    let room = base.folder.room().map_err(|error| failed(&base.at, &error, &base.folder))?;
    directory.take(request, &base.at, room)?;
    if let Some(name) = &request.own {
        base = make_own(base, name)?;
    }
    for name in &request.folders {
        let folder = walk(again(&base)?, name, &make_folder)?;
        let room = folder.folder.room().map_err(|error| failed(&folder.at, &error, &folder.folder))?;
        directory.take(request, &folder.at, room)?;
        try_it(&folder, request.probe)?;
        if let Some((_, to)) = request.link.as_ref().filter(|(of, _)| of == name) {
            directory.hard_link = hard_link(&folder.folder, to);
        }
    }
    Ok(())
}

/// The user's own directory in a place that may be open to all.
fn make_own(parent: Walked, name: &str) -> Result<Walked, Fault> {
    if let Some(own) = own(&parent, name)? {
        return Ok(own);
    }
    let at = format!("{}/{name}", parent.at);
    make_folder(&parent.folder, name, &at)?;
    own(&parent, name)?.ok_or_else(|| fault(&at, What::Missing))
}

/// Whether files can be made in it: by making one, or by what the kernel says.
fn try_it(walked: &Walked, probe: bool) -> Result<(), Fault> {
    let folder = &walked.folder;
    let outcome = if probe {
        unforeseen_name().and_then(|name| {
            folder.write_file(&name)?;
            folder.remove(&name)
        })
    } else {
        folder.may_write()
    };
    outcome.map_err(|error| failed(&walked.at, &error, folder))
}

/// Whether a hard link works from `folder` to the directory `to`, or the nearest
/// one above it that exists. `None`: not to be found out, since no file can be
/// made here or there.
fn hard_link(folder: &Folder, to: &str) -> Option<HardLink> {
    let target = nearest(to)?.folder;
    let outcome = |fault: Option<&str>| Some(HardLink { to: to.into(), fault: fault.map(String::from) });
    if folder.status().ok()?.device != target.status().ok()?.device {
        return outcome(Some("another file system"));
    }
    let name = unforeseen_name().ok()?;
    folder.make_file(&name).ok()?;
    let linked = folder.link(&name, &target);
    let _ = folder.remove(&name);
    match linked {
        Ok(()) => {
            let _ = target.remove(&name);
            outcome(None)
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::EXDEV) => outcome(Some("another mount")),
            Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS) => outcome(Some("the file system has none")),
            _ => None,
        },
    }
}
