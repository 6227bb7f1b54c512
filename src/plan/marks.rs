//! Marks on our own values, so that a step started from inside another can tell
//! them from the user's: `PALINGENESIS_SET=JOB.STEP NAME=HASH NAME=HASH …`.
//! A value that was changed since no longer fits its hash and is the user's.

use crate::config::site::{FILE_OF_STEP, SITE_FILE, SiteView};
use crate::config::{SPEC_OF_STEP, Settings};
use crate::facts::{Environment, Step};

use super::{Origin, Plan, Variable, worker};

/// The variable that holds the marks.
pub use crate::config::MARKS as VARIABLE;

/// The marks found in an environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks {
    step: Option<(u32, u32)>,
    hashes: Vec<(String, u32)>,
}

impl Marks {
    /// Reads the marks; anything that is none is ignored.
    pub fn of(environment: &Environment) -> Marks {
        let mut words = environment.get(VARIABLE).unwrap_or_default().split(' ');
        let step = words
            .next()
            .and_then(|word| word.split_once('.'))
            .and_then(|(job, step)| Some((job.parse().ok()?, step.parse().ok()?)));
        let hashes = words
            .filter_map(|word| word.split_once('='))
            .filter_map(|(name, hash)| Some((name.to_string(), u32::from_str_radix(hash, 16).ok()?)))
            .collect();
        Marks { step, hashes }
    }

    /// Names that were marked.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.hashes.iter().map(|(name, _)| name.as_str())
    }

    /// Whether `name` still holds the value we gave it, in whichever step.
    pub fn ours(&self, environment: &Environment, name: &str) -> bool {
        let marked = self.hashes.iter().find(|(marked, _)| marked == name);
        match (marked, environment.get(name)) {
            (Some((_, marked)), Some(value)) => *marked == hash(value),
            _ => false,
        }
    }

    /// Whether `name` holds the value we gave it in this very step: then it is
    /// a fact of the step, known better than from here.
    pub fn of_this_step(&self, environment: &Environment, step: &Step, name: &str) -> bool {
        self.step == Some((step.job_id, step.step_id)) && self.ours(environment, name)
    }

    /// The user's value of `name`: set, and not by us.
    pub fn users<'a>(&self, environment: &'a Environment, name: &str) -> Option<&'a str> {
        environment.get(name).filter(|_| !self.ours(environment, name))
    }
}

/// FNV-1a: enough to see that a value changed; not a secret's protection.
pub(crate) fn hash(value: &str) -> u32 {
    value.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Adds the marks of everything the plan sets, and the settings it was made with.
pub(super) fn decide(plan: &mut Plan, settings: &Settings, site: Option<&SiteView>) {
    let why = "these settings, for palingenesis explain and the C library in this step";
    plan.set(SPEC_OF_STEP, settings.to_string(), Origin::Step, why);
    if let Some(site) = site.filter(|site| !site.file.is_empty() && site.file != SITE_FILE) {
        plan.set(FILE_OF_STEP, site.file.clone(), Origin::Step, "the site file, for palingenesis explain in this step");
    }
    let mut marks = format!("{}.{}", plan.step.job_id, plan.step.step_id);
    // A hash of a secret would be something to guess it by.
    let ours = |variable: &&Variable| {
        !matches!(variable.origin, Origin::User | Origin::Image) && variable.name != worker::STORE_KEY
    };
    for variable in plan.env.iter().filter(ours) {
        marks.push_str(&format!(" {}={:x}", variable.name, hash(&variable.value)));
    }
    plan.set(
        VARIABLE,
        marks,
        Origin::Step,
        "marks these values, so that an srun in this step can tell them from yours",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_value_is_the_users() {
        let mut environment = Environment::default();
        environment.set(VARIABLE, format!("7.0 MASTER_PORT={:x} RANK={:x}", hash("20000"), hash("1")));
        environment.set("MASTER_PORT", "20000");
        environment.set("RANK", "2");
        environment.set("NCCL_DEBUG", "INFO");
        let marks = Marks::of(&environment);
        assert!(marks.ours(&environment, "MASTER_PORT"));
        assert_eq!(marks.users(&environment, "MASTER_PORT"), None);
        assert_eq!(marks.users(&environment, "RANK"), Some("2"));
        assert_eq!(marks.users(&environment, "NCCL_DEBUG"), Some("INFO"));
        assert_eq!(marks.users(&environment, "UNSET"), None);
    }

    #[test]
    fn garbage_is_no_mark() {
        for text in ["", " ", "x.y A=zz", "7.0 =", "7 A=1", "\u{0}", "7.0 A=1=2"] {
            let mut environment = Environment::default();
            environment.set(VARIABLE, text);
            environment.set("A", "1");
            assert!(!Marks::of(&environment).ours(&environment, "A"), "{text:?}");
        }
    }

    #[test]
    fn the_hash_is_fnv1a() {
        // Published test vectors of FNV-1a, 32 bit.
        assert_eq!(hash(""), 0x811c_9dc5);
        assert_eq!(hash("a"), 0xe40c_292c);
        assert_eq!(hash("foobar"), 0xbf9c_f968);
    }
}
