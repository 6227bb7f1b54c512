//! Programs as a task finds them where it runs, inside its container if it has
//! one.

use std::io::ErrorKind;
use std::path::Path;

use crate::system::access::may_execute;

/// What is known for starting another program than the command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StartFacts {
    /// The programs that were looked at, in order.
    pub programs: Vec<Program>,
    /// The first of them, where the admin named it in plugstack.conf.
    pub configured: Option<String>,
    /// Whether the host can put a program before the command.
    pub prepends: bool,
}

/// A file that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its absolute path.
    pub path: String,
    /// Whether anything is there.
    pub exists: bool,
    /// Why the task cannot run it; `None`: it can.
    pub unfit: Option<String>,
}

impl Program {
    /// The path and what is wrong with it, for a line of text.
    pub fn described(&self) -> String {
        let path = shown(&self.path);
        self.unfit.as_ref().map_or_else(|| path.clone(), |why| format!("{path} ({why})"))
    }
}

/// A path for a line of text: uncut, so that it can be copied.
pub fn shown(path: &str) -> String {
    path.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Looks at each path below `root`, up to the first that can be run: no rule
/// needs the others, and each may be on a slow network file system.
pub fn look(root: &Path, paths: &[String]) -> Vec<Program> {
    let mut programs = Vec::new();
    for path in paths {
        let program = look_at(root, path);
        let fit = program.unfit.is_none();
        programs.push(program);
        if fit {
            break;
        }
    }
    programs
}

fn look_at(root: &Path, path: &str) -> Program {
    let file = root.join(path.trim_start_matches('/'));
    let (exists, unfit) = match std::fs::metadata(&file) {
        Ok(data) if data.is_dir() => (true, Some("a directory".to_string())),
        Ok(data) if !data.is_file() => (true, Some("no regular file".to_string())),
        Ok(_) if !may_execute(&file) => (true, Some("may not be executed".to_string())),
        Ok(_) => (true, None),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            (false, Some("not there".to_string()))
        }
        Err(error) => (true, Some(error.to_string())),
    };
    Program { path: path.into(), exists, unfit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_first_that_can_be_run_ends_the_search() {
        let root = std::env::temp_dir().join(format!("palingenesis-program-{}", std::process::id()));
        fs::create_dir_all(root.join("dir")).unwrap();
        for (name, mode) in [("plain", 0o644), ("program", 0o755), ("other", 0o755)] {
            fs::write(root.join(name), "#!/bin/sh\n").unwrap();
            fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::symlink("program", root.join("link")).unwrap();
        let look = |paths: &[&str]| look(&root, &paths.iter().map(|path| path.to_string()).collect::<Vec<_>>());
        let unfit: Vec<_> = look(&["/none", "/dir", "/plain", "/plain/x", "/program", "/other"])
            .into_iter()
            .map(|program| (program.exists, program.unfit.unwrap_or_default()))
            .collect();
        let expected = [
            (false, "not there"),
            (true, "a directory"),
            (true, "may not be executed"),
            (false, "not there"),
            (true, ""),
        ];
        assert_eq!(unfit, expected.map(|(exists, why)| (exists, why.to_string())));
        assert_eq!(look(&["/link"])[0].unfit, None);
        fs::remove_dir_all(&root).unwrap();
    }
}
