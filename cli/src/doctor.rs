//! `palingenesis doctor`: is this install right? So far: is the site file right,
//! and what does it mean.

use std::fmt;

use palingenesis::config::site::{self, SITE_FILE, Site, SiteError};
use palingenesis::facts::{Environment, User};

use crate::{print, tell};

/// Below the options in --help.
pub const ABOUT: &str = "\
The file is read as the plugin reads it: what it would refuse is one line here.

Exit codes: 0 where the file is right, or where there is none and none was named; 78 where jobs with the flag would be \
refused; 2 for wrong usage.";

/// What to check.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The site file to check.
    #[arg(long, value_name = "FILE")]
    config: Option<String>,

    /// Print also what holds in the end for jobs of this partition.
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,

    /// Print also what holds in the end on this node.
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
}

/// The subcommand.
pub fn run(arguments: &Arguments) -> Result<(), anyhow::Error> {
    if arguments.config.is_none() {
        tell(&format!(
            "doctor checks the site file only in this version, not the node and the install; this is {SITE_FILE}"
        ));
    }
    let file = arguments.config.as_deref().unwrap_or(SITE_FILE);
    let Some(found) = site::look(file).map_err(Broken)? else {
        return match &arguments.config {
            Some(file) => Err(Broken(SiteError::missing(file)).into()),
            None => print(&format!("no site file {file}: every job has our defaults\n")),
        };
    };
    let site = Site::parse(file, &found.text).map_err(Broken)?;
    for warning in site.warnings().iter().chain(&found.hidden) {
        tell(&format!("warning: {warning}"));
    }
    print(&site.text())?;
    if arguments.partition.is_some() || arguments.node.is_some() {
        let user = User::of_process(&Environment::of_process());
        print(&site.view_text(arguments.partition.as_deref(), arguments.node.as_deref(), &user))?;
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
