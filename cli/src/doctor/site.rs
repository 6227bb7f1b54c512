//! `palingenesis doctor --config FILE`: is this site file right, and what does it mean?

use std::fmt;

use palingenesis::config::site::{self, Site, SiteError};
use palingenesis::facts::{Environment, User};

use crate::{print, tell};

/// The check.
pub fn run(file: &str, partition: Option<&str>, node: Option<&str>) -> Result<(), anyhow::Error> {
    let Some(found) = site::look(file).map_err(Broken)? else {
        return Err(Broken(SiteError::missing(file)).into());
    };
    let site = Site::parse(file, &found.text).map_err(Broken)?;
    for warning in site.warnings().iter().chain(&found.hidden) {
        tell(&format!("warning: {warning}"));
    }
    print(&site.text())?;
    if partition.is_some() || node.is_some() {
        let user = User::of_process(&Environment::of_process());
        print(&site.view_text(partition, node, &user))?;
    }
    // Last: a draft is not yet root's.
    Ok(found.trusted.map_err(Broken)?)
}

/// A file that the plugin would refuse, told to whoever can correct it.
#[derive(Debug)]
pub struct Broken(SiteError);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.finding())
    }
}

impl std::error::Error for Broken {}
