//! Containers: what srun was told of one, and whether a process stands inside.
//! Container plugins are known by what they do, not by name; pyxis alone also
//! has variables of its own for its options.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::Environment;

/// Begins the variables in which srun hands plugins' options to slurmstepd:
/// `_SLURM_SPANK_OPTION_<plugin>_<option>` (Slurm's src/common/plugstack.c).
/// However an option was given or abbreviated, it stands there.
const OPTION: &str = "_SLURM_SPANK_OPTION_";

/// What makes a container plugin start one.
const IMAGE: [&str; 2] = ["_container_image", "_container_name"];

/// The names it leaves as they are, whatever its image says.
const KEEP: &str = "_container_env";

/// The same as environment variables of pyxis (its args.c).
const PYXIS_IMAGE: [&str; 2] = ["PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"];
const PYXIS_KEEP: &str = "PYXIS_CONTAINER_ENV";

/// Whether srun, whose environment this is, was asked for a container by a
/// plugin's option; then the names that `--container-env` keeps. srun's own
/// `--container` is another thing: there runc runs the task and no plugin
/// changes its environment.
pub fn asked(environment: &Environment) -> Option<Vec<String>> {
    let option = |endings: &[&str]| {
        let mut options = environment.iter().filter(|(name, _)| name.starts_with(OPTION));
        options.find(|(name, _)| endings.iter().any(|ending| name.ends_with(ending))).map(|(_, value)| value)
    };
    let given = |name: &&str| environment.get(name).is_some_and(|value| !value.is_empty());
    if option(&IMAGE).is_none() && !PYXIS_IMAGE.iter().any(given) {
        return None;
    }
    Some(names(option(&[KEEP]).or_else(|| environment.get(PYXIS_KEEP)).unwrap_or_default()))
}

/// The names of a list such as `--container-env` takes.
pub fn names(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(String::from).collect()
}

/// A file's identity.
type Id = (u64, u64);

/// Where a process stands: what a container changes and nothing else in Slurm
/// does. The mount namespace is not looked at: job_container/tmpfs gives every
/// job one of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    user_namespace: Option<Id>,
    root: Option<Id>,
}

impl Place {
    /// Where this process stands.
    pub fn here() -> Place {
        let id = |path| fs::metadata(path).ok().map(|data| (data.dev(), data.ino()));
        Place { user_namespace: id("/proc/self/ns/user"), root: id("/") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    /// As a real srun's environment looks in its hooks (Slurm 22.05).
    #[test]
    fn a_container_is_asked_for_by_a_plugin_s_option_or_by_pyxis_variables() {
        for asked_for in [
            ("_SLURM_SPANK_OPTION_pyxis_container_image", "nvcr.io#nvidia/pytorch:25.01-py3"),
            ("_SLURM_SPANK_OPTION_pyxis_container_name", "torch"),
            ("_SLURM_SPANK_OPTION_other_container_image", "/images/a.sqsh"),
            ("PYXIS_CONTAINER_IMAGE", "ubuntu"),
            ("PYXIS_CONTAINER_NAME", "torch"),
        ] {
            assert_eq!(asked(&environment(&[asked_for])), Some(Vec::new()), "{asked_for:?}");
        }
        for other in [
            ("_SLURM_SPANK_OPTION_pyxis_container_mounts", "/a:/b"),
            ("_SLURM_SPANK_OPTION_pyxis_container_env", "A"),
            ("PYXIS_CONTAINER_MOUNTS", "/a:/b"),
            ("PYXIS_CONTAINER_IMAGE", ""),
            ("SLURM_CONTAINER", "/bundle"),
            ("MY_container_image", "x"),
        ] {
            assert_eq!(asked(&environment(&[other])), None, "{other:?}");
        }
    }

    #[test]
    fn the_names_to_keep_come_from_the_option_else_from_the_variable() {
        let image = ("PYXIS_CONTAINER_IMAGE", "ubuntu");
        let option = ("_SLURM_SPANK_OPTION_pyxis_container_env", "A,B");
        let variable = ("PYXIS_CONTAINER_ENV", "C, D,");
        assert_eq!(asked(&environment(&[image, option, variable])).unwrap(), ["A", "B"]);
        assert_eq!(asked(&environment(&[image, variable])).unwrap(), ["C", "D"]);
    }

    #[test]
    fn a_place_is_the_same_from_one_look_to_the_next() {
        assert_eq!(Place::here(), Place::here());
        assert!(Place::here().user_namespace.is_some() && Place::here().root.is_some());
    }
}
