//! Programs as a task finds them where it runs, inside its container if it has
//! one.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::system::access::may_execute;
use crate::system::child;

/// How long one path, and how long all of them, may keep the task: each may be on
/// a file server that does not answer.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(15));

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
/// needs the others. Each in a child, so that one which does not answer hides
/// neither itself nor the next.
pub fn look(root: &Path, paths: &[String]) -> Vec<Program> {
    look_by(paths, PATIENCE, |path| look_at(root, path))
}

fn look_by(paths: &[String], (each, all): (Duration, Duration), look: impl Fn(&str) -> Program) -> Vec<Program> {
    let end = Instant::now() + all;
    let mut programs = Vec::new();
    for path in paths {
        let left = end.saturating_duration_since(Instant::now()).min(each);
        let program = if left.is_zero() {
            Err("not looked at, for the others did not answer".to_string())
        } else {
            let answer = child::run(left, || serde_json::to_vec(&look(path)).unwrap_or_default());
            let answer = answer.map_err(|error| error.to_string());
            answer.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))
        };
        let program = program.unwrap_or_else(|why| Program { path: path.into(), exists: true, unfit: Some(why) });
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

    #[test]
    fn a_path_that_does_not_answer_costs_its_share_and_hides_no_other() {
        let slow = |path: &str| {
            if path != "/here" {
                std::thread::sleep(Duration::from_secs(600));
            }
            Program { path: path.into(), exists: true, unfit: None }
        };
        let paths = |list: &[&str]| list.iter().map(|path| path.to_string()).collect::<Vec<_>>();
        let start = Instant::now();
        let (each, all) = (Duration::from_millis(300), Duration::from_secs(20));
        let found = look_by(&paths(&["/dead", "/here", "/more"]), (each, all), slow);
        assert_eq!(found.iter().map(|program| program.path.as_str()).collect::<Vec<_>>(), ["/dead", "/here"]);
        assert!(found[0].unfit.as_ref().is_some_and(|why| why.contains("no answer")), "{found:?}");
        assert_eq!(found[1].unfit, None);
        let found = look_by(&paths(&["/dead"; 40]), (each, each), slow);
        assert_eq!(found.len(), 40);
        assert!(found[39].unfit.as_ref().is_some_and(|why| why.starts_with("not looked at")), "{found:?}");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}
