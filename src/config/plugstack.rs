//! The plugin's arguments in plugstack.conf: `key=value` words. Slurm splits
//! the line at blanks and knows no quoting.

use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::nearest;
use super::printable;

/// What the admin's line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugstack {
    /// Facts are read below this directory instead of `/`.
    pub root: PathBuf,
    /// How long a rank waits for the other ranks of its node.
    pub gate: Duration,
    /// The palingenesis-worker that `launch=worker` starts.
    pub worker: Option<String>,
    /// The site file, where it is not the usual one.
    pub config: Option<String>,
}

impl Default for Plugstack {
    fn default() -> Self {
        Plugstack { root: "/".into(), gate: Duration::from_secs(60), worker: None, config: None }
    }
}

const KEYS: [&str; 4] = ["root", "gate", "worker", "config"];

/// Why the line was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlugstackError {
    /// An argument that is none.
    #[error("unknown argument '{argument}' of palingenesis in plugstack.conf{}; known are config=FILE, gate=SECONDS, root=DIR and worker=PATH", .near.map(|near| format!(": did you mean '{near}='?")).unwrap_or_default())]
    Unknown {
        /// As written.
        argument: String,
        /// What was probably meant.
        near: Option<&'static str>,
    },
    /// A value outside its grammar.
    #[error("bad argument '{argument}' of palingenesis in plugstack.conf: {why}")]
    Bad {
        /// As written.
        argument: String,
        /// What is wrong.
        why: &'static str,
    },
}

impl Plugstack {
    /// Reads the arguments of the plugstack.conf line.
    ///
    /// # Errors
    /// The first argument that is not understood.
    pub fn parse<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<Plugstack, PlugstackError> {
        let mut plugstack = Plugstack::default();
        for argument in arguments {
            let bad = |why| PlugstackError::Bad { argument: printable(argument), why };
            match argument.split_once('=') {
                Some(("root", value)) => {
                    if !value.starts_with('/') {
                        return Err(bad("the directory must be absolute"));
                    }
                    plugstack.root = value.into();
                }
                Some(("config", value)) => {
                    if !value.starts_with('/') {
                        return Err(bad("the file's path must be absolute"));
                    }
                    plugstack.config = Some(value.into());
                }
                Some(("gate", value)) => {
                    let seconds = value.parse::<u64>().ok().filter(|seconds| (1..=3600).contains(seconds));
                    plugstack.gate = Duration::from_secs(seconds.ok_or_else(|| bad("write 1 to 3600 seconds"))?);
                }
                Some(("worker", value)) => {
                    if !value.starts_with('/') {
                        return Err(bad("the path must be absolute"));
                    }
                    plugstack.worker = Some(value.into());
                }
                // Read by the fault injection of test builds, in spank/fault.rs.
                Some(("fault", _)) if cfg!(feature = "fault-injection") => {}
                split => {
                    let key = split.map_or(argument, |(key, _)| key);
                    return Err(PlugstackError::Unknown { argument: printable(argument), near: nearest(key, KEYS) });
                }
            }
        }
        Ok(plugstack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_their_mistakes() {
        assert_eq!(Plugstack::parse([]), Ok(Plugstack::default()));
        let parsed = Plugstack::parse(["root=/srv/node", "gate=5", "worker=/opt/w", "config=/srv/site.toml"]).unwrap();
        assert_eq!(parsed.worker.as_deref(), Some("/opt/w"));
        assert_eq!((parsed.root, parsed.gate), (PathBuf::from("/srv/node"), Duration::from_secs(5)));
        assert_eq!(parsed.config.as_deref(), Some("/srv/site.toml"));
        for (argument, expected) in [
            ("rot=/x", "did you mean 'root='?"),
            ("debug", "unknown argument 'debug'"),
            ("root=x", "must be absolute"),
            ("worker=palingenesis-worker", "must be absolute"),
            ("config=site.toml", "must be absolute"),
            ("confg=/x", "did you mean 'config='?"),
            ("gate=0", "1 to 3600"),
            ("gate=x", "1 to 3600"),
        ] {
            let message = Plugstack::parse([argument]).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
