//! `palingenesis-enable`: puts the plugin's line into place, and takes it out again. What
//! is to be done is decided in `steps`, from what the host has; here it is done, in one
//! system call that leaves the old state or the new one. Nothing is restarted, no file is
//! edited in place, and no name appears in an included directory but the final one.

mod steps;

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use palingenesis::report::one_line;

use crate::doctor::parse_release;
use crate::slurm::Host;
use crate::slurm::access;
use crate::slurm::library;
use crate::slurm::plugstack;
use crate::slurm::release::Release;
use crate::slurm::tree::{Tree, reason};
use crate::{print, tell};
use steps::{Seen, Step};

/// The program's other name.
pub const NAME: &str = "palingenesis-enable";

/// Below the options in --help.
pub const ABOUT: &str = "\
The line is that of PREFIX/share/palingenesis/palingenesis.conf. Where plugstack.conf includes a directory, a link \
zz-palingenesis.conf to that file is made in it, by one system call: no command of Slurm ever sees half a file or a \
temporary one. Where there is no plugstack.conf, one that includes the file is put beside slurm.conf. Any other \
plugstack.conf is left as it is, and what to write into it is printed.

It refuses where the library cannot be loaded or is of another Slurm release, where palingenesis would stand before \
pyxis, and where slurmctld sends the configuration (configless). Where the line is there already, by whatever way, it \
says where and changes nothing. Commands and steps that start afterwards have the new state; nothing is restarted.

Exit codes: 0 where all is as wanted, or would be (--check); 1 where it is not, with the reason and the cure; 2 for \
wrong \
usage.";

/// Puts palingenesis' line into Slurm's plugstack.conf, or takes it out.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = ABOUT)]
pub struct Arguments {
    /// Take the line out again.
    #[arg(long)]
    remove: bool,

    /// Say what would be done, and do nothing.
    #[arg(long, visible_alias = "dry-run")]
    check: bool,

    /// The file with the line, where it is not the one beside this program.
    #[arg(long, value_name = "FILE")]
    fragment: Option<PathBuf>,

    /// The release of Slurm, as 24.11, where it cannot be asked of sinfo.
    #[arg(long, value_name = "RELEASE", value_parser = parse_release)]
    slurm: Option<Release>,
}

/// The program.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Some(fragment) = arguments.fragment.clone().or_else(beside) else {
        tell("error: this program does not know where it lies, and so not its palingenesis.conf: give --fragment FILE");
        return Ok(ExitCode::FAILURE);
    };
    let fragment = std::path::absolute(&fragment).unwrap_or(fragment).to_string_lossy().into_owned();
    let seen = look(&fragment, arguments.slurm);
    let step = if arguments.remove { steps::remove(&seen) } else { steps::enable(&seen) };
    let (does, step) = match step {
        Step::Nothing(text) => {
            print(&one_line(&text))?;
            return Ok(ExitCode::SUCCESS);
        }
        Step::Refuse(text) => {
            tell(&format!("error: {text}"));
            return Ok(ExitCode::FAILURE);
        }
        step => (step.text(), step),
    };
    if arguments.check {
        print(&one_line(&format!("would {does}")))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Err(error) = act(&step) {
        let cure = match error.kind() {
            ErrorKind::PermissionDenied => "; run it as root",
            ErrorKind::ReadOnlyFilesystem => "; its file system is read-only, change it where it is made",
            _ => "",
        };
        tell(&format!("error: nothing is changed: cannot {does}: {}{cure}", reason(&error)));
        return Ok(ExitCode::FAILURE);
    }
    // By what Slurm reads now, not by what was meant.
    let after = look(&fragment, arguments.slurm);
    let there = after.host.stack.as_ref().is_some_and(|stack| stack.ours().next().is_some());
    if there == arguments.remove {
        let left = match steps::remove(&after) {
            Step::Refuse(text) => text,
            _ => "run palingenesis doctor".into(),
        };
        tell(&format!("error: done ({does}), but the line is {} there: {left}", if there { "still" } else { "not" }));
        return Ok(ExitCode::FAILURE);
    }
    let now = if arguments.remove { "no longer load palingenesis" } else { "load palingenesis" };
    print(&one_line(&format!("done: {does}; commands and steps that start from now on {now}")))?;
    Ok(ExitCode::SUCCESS)
}

/// Of this program's own prefix.
fn beside() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    Some(program.parent()?.parent()?.join("share/palingenesis/palingenesis.conf"))
}

fn look(fragment: &str, release: Option<Release>) -> Seen {
    let tree = Tree::new(Path::new("/"));
    let host = Host::read(&tree, release);
    let stack = plugstack::read(&tree, fragment);
    let dirs = host.plugin_dirs();
    let line = stack.ours().next().cloned();
    let library = line.map(|line| library::look(&tree, &line, &dirs, host.probe.as_deref()));
    let leads = |path: &str| Some(fs::canonicalize(path).ok()?.to_string_lossy().into_owned());
    let mut places: Vec<String> =
        host.stack.iter().flat_map(|stack| &stack.opened).map(|opened| opened.path.clone()).collect();
    let includes = host.stack.iter().flat_map(|stack| &stack.includes);
    places.extend(includes.filter_map(|include| include.would_include(steps::LINK)));
    places.sort();
    places.dedup();
    let found = places.into_iter().filter_map(|path| {
        let data = fs::symlink_metadata(&path).ok()?;
        let place = steps::Place { link: tree.link(&path), leads: leads(&path), file: data.is_file(), path };
        Some(place)
    });
    let found: Vec<steps::Place> = found.collect();
    let written = host.stack.as_ref().and_then(|stack| tree.bytes(&stack.file).ok());
    let folders: Vec<String> = host
        .stack
        .iter()
        .flat_map(|stack| stack.includes.iter().filter_map(|include| include.would_include(steps::LINK)))
        .chain(host.stack.iter().map(|stack| stack.file.clone()))
        .filter_map(|path| Some(Path::new(&path).parent()?.to_string_lossy().into_owned()))
        .filter(|folder| Path::new(folder).is_dir())
        .collect();
    Seen {
        fragment: fragment.into(),
        fragment_leads: leads(fragment),
        fragment_access: access::of(&tree, fragment),
        library,
        found,
        folders,
        written: written.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        host,
    }
}

/// Does it, or nothing. What another run did at the same time is as good.
fn act(step: &Step) -> io::Result<()> {
    match step {
        Step::Nothing(_) | Step::Refuse(_) => Ok(()),
        Step::Link { at, to, instead_of_dangling } => {
            // Slurm passes over it, there or not. Another run may have been quicker.
            if *instead_of_dangling && !Path::new(at).exists() {
                removed(at)?;
            }
            match symlink(to, at) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists && fs::read_link(at)? == Path::new(to) => Ok(()),
                other => other,
            }
        }
        Step::Write { file, text } => write(Path::new(file), text),
        Step::Remove { paths } => paths.iter().try_for_each(|path| removed(path)),
    }
}

fn removed(path: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A whole file under a name that nobody reads, then its name, where that is free.
fn write(file: &Path, text: &str) -> io::Result<()> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let temporary = file.with_file_name(format!(".{name}.{}", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let made = (|| {
        let mut new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        new.write_all(text.as_bytes())?;
        new.set_permissions(fs::Permissions::from_mode(0o644))?;
        fchown(&new, Some(0), Some(0))?;
        new.sync_all()?;
        fs::hard_link(&temporary, file)
    })();
    let _ = fs::remove_file(&temporary);
    match made {
        Err(error)
            if error.kind() == ErrorKind::AlreadyExists && fs::read_to_string(file).is_ok_and(|now| now == text) =>
        {
            Ok(())
        }
        other => other,
    }
}
