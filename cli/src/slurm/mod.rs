//! What this host's Slurm is: its release, its configuration, the plugstack.conf
//! that it reads and the daemons that run. Facts only, for `doctor` and
//! `palingenesis-enable`: no verdict is given here and nothing is changed.

pub mod access;
pub mod conf;
pub mod daemon;
pub mod library;
pub mod plugstack;
pub mod release;
pub mod tree;

use std::path::PathBuf;

use conf::Configuration;
use daemon::Daemon;
use library::Library;
use plugstack::Stack;
use release::{Program, Release};
use tree::Tree;

/// One host, as far as Slurm concerns it.
#[derive(Debug, Clone)]
pub struct Host {
    /// The release that somebody named, which counts instead of what is found.
    pub named: Option<Release>,
    /// srun, or what stands beside it.
    pub commands: Option<Program>,
    /// The slurmd that is installed.
    pub slurmd: Option<Program>,
    /// The slurm.conf of commands.
    pub conf: Configuration,
    /// Their plugstack.conf with all that it includes.
    pub stack: Option<Stack>,
    /// The file of each line of ours, in their order.
    pub libraries: Vec<Library>,
    /// Required lines of other plugins whose file is not there.
    pub gone: Vec<plugstack::Line>,
    /// The slurmd that run here.
    pub daemons: Vec<Daemon>,
    /// Our own program, which loads a library in a process of its own.
    pub probe: Option<PathBuf>,
}

impl Host {
    /// Looks at the host below the tree's root; only at `/` are programs asked.
    pub fn read(tree: &Tree, named: Option<Release>) -> Host {
        let daemons = daemon::running(tree);
        let (commands, slurmd) = if tree.is_machine() {
            // It is started, so it must be nobody's but root's.
            let sound = |path: &PathBuf| access::of(tree, &path.to_string_lossy()).loose.is_none();
            let running = daemons.iter().find_map(|daemon| daemon.program.clone()).filter(sound);
            (release::commands(), release::slurmd(running))
        } else {
            (None, None)
        };
        let prefix = commands.as_ref().and_then(|program| program.path.parent()?.parent());
        let conf = conf::of_commands(tree, prefix, &daemons);
        let stack = conf.stack_file().map(|(file, _)| plugstack::read(tree, &file));
        let probe = std::env::current_exe().ok();
        let mut host =
            Host { named, commands, slurmd, conf, stack, libraries: Vec::new(), gone: Vec::new(), daemons, probe };
        let plugin_dirs = host.plugin_dirs();
        let ours = |line: &plugstack::Line| library::look(tree, line, &plugin_dirs, host.probe.as_deref());
        host.libraries =
            host.stack.iter().flat_map(|stack| &stack.lines).filter(|line| line.is_ours()).map(ours).collect();
        let lines = || host.stack.iter().flat_map(|stack| &stack.lines);
        let is_gone = |line: &&plugstack::Line| {
            let absent = line.path.starts_with('/') && tree.metadata(&line.path).is_err();
            line.required && !line.is_ours() && absent
        };
        host.gone = lines().filter(is_gone).cloned().collect();
        host
    }

    /// Its release, by which the plugin's is judged: what was named, what commands
    /// have, what slurmd has.
    pub fn release(&self) -> Option<Release> {
        let of = |program: &Option<Program>| program.as_ref().and_then(Program::release);
        self.named.or_else(|| of(&self.commands)).or_else(|| of(&self.slurmd))
    }

    /// Where a plugin of a relative path is looked for.
    pub fn plugin_dirs(&self) -> Vec<String> {
        match &self.conf.plugin_dir {
            Some(dirs) => dirs.split(':').filter(|dir| !dir.is_empty()).map(String::from).collect(),
            None => conf::PLUGIN_DIRS.iter().map(ToString::to_string).collect(),
        }
    }
}
