//! Whose step it is.

use super::Environment;
use crate::system::user::effective_uid;

/// The user, for `{user}` and `{uid}` of the site file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The name, where it is known.
    pub name: Option<String>,
    /// The number.
    pub uid: u32,
}

impl User {
    /// The user of this process, in a job the job's: a container may show another
    /// number. The name is Slurm's or the shell's word for it, since to ask the
    /// system may mean to wait for a directory service.
    pub fn of_process(environment: &Environment) -> User {
        let name = ["SLURM_JOB_USER", "USER", "LOGNAME"].iter().find_map(|name| environment.get(name));
        let uid = environment.get("SLURM_JOB_UID").and_then(|uid| uid.parse().ok());
        User { name: name.map(String::from), uid: uid.unwrap_or_else(effective_uid) }
    }

    /// A path's part: the name where it can be one, else the number.
    pub fn part(&self) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
        let name = self.name.as_deref().filter(|name| !name.is_empty() && name.len() <= 64);
        match name.filter(|name| name.chars().all(plain) && !name.starts_with('.')) {
            Some(name) => name.into(),
            None => self.uid.to_string(),
        }
    }
}
