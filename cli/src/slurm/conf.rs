//! Which slurm.conf the commands of this host read, and what it says of plugstack.conf,
//! PluginDir and limits. As slurm.conf(5) and the page on configless Slurm have it:
//! SLURM_CONF, the place that was compiled in, then what slurmd was sent.

use std::path::Path;
use std::time::Duration;

use palingenesis::system::program;

use super::daemon::Daemon;
use super::tree::{Tree, reason};

/// Where slurmd keeps what slurmctld sent (configless).
pub const SENT: &str = "/run/slurm/conf/slurm.conf";

/// Where packages of Slurm look: Debian's and SchedMD's, Debian's of old, builds of one's own.
const USUAL: [&str; 5] = [
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/usr/local/slurm/etc/slurm.conf",
];

/// PluginDir of Debian's packages, SchedMD's and of builds of one's own.
pub const PLUGIN_DIRS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu/slurm-wlm",
    "/usr/lib/aarch64-linux-gnu/slurm-wlm",
    "/usr/lib/x86_64-linux-gnu/slurm",
    "/usr/lib/aarch64-linux-gnu/slurm",
    "/usr/lib64/slurm",
    "/usr/lib/slurm",
    "/usr/local/lib/slurm",
    "/opt/slurm/lib/slurm",
];

/// Files that a slurm.conf includes, one below the other.
const DEEPEST: usize = 8;

/// How long slurmctld may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The configuration of the commands.
#[derive(Debug, Clone, Default)]
pub struct Configuration {
    /// slurm.conf, if one is found.
    pub file: Option<String>,
    /// How that is known, or where was looked.
    pub how: String,
    /// Why it could not be read.
    pub fault: Option<String>,
    /// Whether this host has no configuration of its own but what slurmctld sent.
    pub configless: bool,
    /// Whether slurmctld sends its configuration to hosts without.
    pub offered: bool,
    /// PlugStackConfig, and where it stands.
    pub plugstack: Option<(String, String)>,
    /// PluginDir.
    pub plugin_dir: Option<String>,
    /// PropagateResourceLimits and PropagateResourceLimitsExcept.
    pub propagate: Option<String>,
    /// See `propagate`.
    pub propagate_except: Option<String>,
}

impl Configuration {
    /// plugstack.conf, and how that is known.
    pub fn stack_file(&self) -> Option<(String, String)> {
        if let Some((file, place)) = &self.plugstack {
            return Some((file.clone(), format!("PlugStackConfig in {place}")));
        }
        let folder = Path::new(self.file.as_ref()?).parent()?;
        let file = folder.join("plugstack.conf").to_string_lossy().into_owned();
        Some((
            file,
            format!("beside {}, which names none by PlugStackConfig", self.file.as_deref().unwrap_or_default()),
        ))
    }
}

/// What the commands of this host read. `prefix` is where they are installed.
pub fn of_commands(tree: &Tree, prefix: Option<&Path>, daemons: &[Daemon]) -> Configuration {
    if let Some(file) = std::env::var("SLURM_CONF").ok().filter(|file| !file.is_empty() && tree.is_machine()) {
        return read(tree, &file, "SLURM_CONF in this environment".into());
    }
    let mut looked: Vec<String> = Vec::new();
    if let Some(prefix) = prefix.filter(|prefix| *prefix != Path::new("/usr") && *prefix != Path::new("/")) {
        looked.extend(
            ["etc/slurm.conf", "etc/slurm/slurm.conf"].map(|file| prefix.join(file).to_string_lossy().into_owned()),
        );
    }
    looked.extend(USUAL.map(String::from));
    looked.push(SENT.into());
    // One that is there and cannot be read is the one all the same.
    let there = |file: &&String| !tree.metadata(file).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    if let Some(file) = looked.iter().find(there) {
        let how = if file == SENT { "what slurmctld sent to slurmd" } else { "the usual place; SLURM_CONF is not set" };
        return read(tree, file, how.into());
    }
    let told =
        daemons.iter().find_map(|daemon| daemon.conf.clone().map(|file| (file, format!("slurmd {}'s", daemon.pid))));
    let told = told.or_else(|| {
        let file = asked().filter(|_| tree.is_machine())?;
        tree.metadata(&file).is_ok().then(|| (file, "scontrol show config".to_string()))
    });
    if let Some((file, how)) = told {
        return read(tree, &file, how);
    }
    Configuration {
        how: format!("SLURM_CONF is not set, and there is no {}", looked.join(", no ")),
        configless: std::env::var_os("SLURM_CONF_SERVER").is_some() || daemons.iter().any(|daemon| daemon.configless),
        ..Configuration::default()
    }
}

/// SLURM_CONF by slurmctld, which has its own host's.
fn asked() -> Option<String> {
    let scontrol = super::release::commands()?.path.with_file_name("scontrol");
    let said = program::output(&scontrol, &["show", "config"], &[], PATIENCE).ok()?;
    let said = String::from_utf8_lossy(&said);
    let value = said.lines().find_map(|line| line.strip_prefix("SLURM_CONF")?.trim().strip_prefix('='))?;
    Some(value.trim().to_string()).filter(|value| value.starts_with('/'))
}

/// The file and what it includes.
pub fn read(tree: &Tree, file: &str, how: String) -> Configuration {
    let sent = |file: &str| file == SENT || file.contains("/conf-cache/");
    let mut conf = Configuration { file: Some(file.into()), how, configless: sent(file), ..Configuration::default() };
    let resolved = tree.file(file).ok().and_then(|file| file.canonicalize().ok());
    conf.configless |= resolved.is_some_and(|file| sent(&file.to_string_lossy()));
    conf.fault = take(&mut conf, tree, file, 0).err();
    conf
}

fn take(conf: &mut Configuration, tree: &Tree, file: &str, depth: usize) -> Result<(), String> {
    let bytes = tree.bytes(file).map_err(|error| format!("{file} cannot be read: {}", reason(&error)))?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut whole = String::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        if let Some(begun) = line.trim_end().strip_suffix('\\') {
            whole.push_str(begun);
            whole.push(' ');
            continue;
        }
        whole.push_str(line);
        let line = std::mem::take(&mut whole);
        let mut words = line.split_whitespace();
        if let Some(first) = words.clone().next().filter(|word| word.eq_ignore_ascii_case("include")) {
            let name = words.nth(1).unwrap_or_default();
            if first.len() == "include".len() && depth < DEEPEST && !name.is_empty() {
                let beside = Path::new(file).parent().unwrap_or(Path::new("/"));
                // What is missing there is Slurm's to complain of.
                let _ = take(conf, tree, &beside.join(name).to_string_lossy(), depth + 1);
            }
            continue;
        }
        for word in words {
            let Some((key, value)) = word.split_once('=') else { continue };
            let value = value.trim_matches('"').to_string();
            match key.to_ascii_lowercase().as_str() {
                "plugstackconfig" => conf.plugstack = Some((value, format!("{file}:{}", index + 1))),
                "plugindir" => conf.plugin_dir = Some(value),
                "propagateresourcelimits" => conf.propagate = Some(value),
                "propagateresourcelimitsexcept" => conf.propagate_except = Some(value),
                "slurmctldparameters" => {
                    conf.offered |= value.split(',').any(|word| word.eq_ignore_ascii_case("enable_configless"));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
