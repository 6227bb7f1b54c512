//! What the step's tasks are: ranks of a training, launchers that start the
//! ranks of their node, or a shell for a person.
//!
//! A launcher is recognised in the command and, with one task on every node, in
//! shell text too: there RANK and the others would only mislead it, and without
//! PET_* each node's torchrun would be a training of its own. With several
//! tasks on a node a launcher in shell text may be for one of them only
//! (`[ $SLURM_LOCALID = 0 ] && torchrun …`), so the tasks stay ranks, and a
//! check warns. A script file is not looked into: `launch=agent` says it.

use serde::Serialize;

use super::{launcher, worker};
use crate::config::{Launch, Profile, Settings};

/// What the tasks of the step are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// The tasks are the ranks.
    Native,
    /// Each task starts a launcher, such as torchrun, that starts the node's ranks.
    Agent,
    /// The tasks are the ranks of palingenesis-worker.
    Worker,
    /// A shell for a person: the environment, no rank variables, since a
    /// program started in it later belongs to no rank.
    Shell,
}

impl Shape {
    /// Whether the step's tasks are ranks themselves.
    pub fn tasks_are_ranks(self) -> bool {
        matches!(self, Shape::Native | Shape::Worker)
    }

    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Native => "native",
            Shape::Agent => "agent",
            Shape::Worker => "worker",
            Shape::Shell => "shell",
        }
    }
}

pub(super) const SHELLS: [&str; 9] = ["bash", "sh", "zsh", "dash", "fish", "ksh", "mksh", "csh", "tcsh"];

/// The shape asked for, or the one that shows: a shell is for a person if it has
/// a terminal, by `--pty` or as srun's own standard input. `srun bash <script`
/// is a program like any other, and so is a launcher with `--pty`, which lets a
/// debugger be typed to. `one_each`: exactly one task on every node.
pub fn shape(settings: &Settings, command: &[String], pty: bool, terminal: bool, one_each: bool) -> Shape {
    let starts =
        |certainly: bool| one_each && launcher::find(command).is_some_and(|launcher| launcher.certain || !certainly);
    match settings.launch {
        Launch::Native => Shape::Native,
        Launch::Agent => Shape::Agent,
        Launch::Worker => Shape::Worker,
        Launch::Shell => Shape::Shell,
        Launch::Auto if worker::is_command(command) => Shape::Worker,
        // The profile may stand for a whole batch script, with a shell to look into it.
        Launch::Auto if (pty || terminal) && is_interactive_shell(command) => Shape::Shell,
        Launch::Auto if settings.profile == Profile::Worker => Shape::Worker,
        Launch::Auto if starts(true) => Shape::Agent,
        Launch::Auto if pty => Shape::Shell,
        Launch::Auto if starts(false) => Shape::Agent,
        Launch::Auto => Shape::Native,
    }
}

/// A shell with neither a script nor `-c`: it reads commands from its input.
fn is_interactive_shell(command: &[String]) -> bool {
    let Some((program, arguments)) = command.split_first() else {
        return false;
    };
    let name = program.rsplit('/').next().unwrap_or(program);
    let name = name.strip_prefix('-').unwrap_or(name);
    if !SHELLS.contains(&name) {
        return false;
    }
    arguments.iter().all(|argument| {
        let long = matches!(
            argument.as_str(),
            "--login" | "--interactive" | "--norc" | "--noprofile" | "--posix" | "--restricted"
        );
        let short = argument.strip_prefix('-').is_some_and(|flags| {
            !flags.is_empty() && flags.chars().all(|flag| matches!(flag, 'i' | 'l' | 's' | 'f' | 'e' | 'u' | 'x'))
        });
        long || short
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(command: &str, pty: bool, terminal: bool) -> Shape {
        let command: Vec<String> = command.split_whitespace().map(String::from).collect();
        shape(&Settings::default(), &command, pty, terminal, true)
    }

    #[test]
    fn shells_for_people_and_everything_else() {
        for command in ["bash", "/bin/bash", "bash -i", "bash -l", "zsh -il", "/usr/bin/fish", "sh --login", "-bash"] {
            assert_eq!(auto(command, false, true), Shape::Shell, "{command}");
            // srun bash <script: nobody types.
            assert_eq!(auto(command, false, false), Shape::Native, "{command}");
        }
        for command in
            ["bash -c env", "bash -lc env", "bash train.sh", "sh -x train.sh", "python3 train.py", "", "bashful"]
        {
            assert_eq!(auto(command, false, true), Shape::Native, "{command}");
        }
        assert_eq!(auto("python3", true, true), Shape::Shell);
    }

    #[test]
    fn launch_overrides() {
        let bash = ["bash".to_string()];
        let settings = |spec| Settings::parse(spec, crate::config::Source::Option).unwrap();
        assert_eq!(shape(&settings("launch=native"), &bash, true, true, true), Shape::Native);
        assert_eq!(shape(&settings("launch=shell"), &["python3".to_string()], false, false, true), Shape::Shell);
        let torchrun = ["torchrun".to_string(), "train.py".to_string()];
        assert_eq!(shape(&settings("launch=native"), &torchrun, false, false, true), Shape::Native);
        assert_eq!(shape(&settings("launch=agent"), &bash, true, true, false), Shape::Agent);
    }

    #[test]
    fn a_launcher_is_an_agent_where_every_node_has_one_task() {
        let of = |command: &[&str], pty: bool, one_each: bool| {
            let command: Vec<String> = command.iter().map(ToString::to_string).collect();
            shape(&Settings::default(), &command, pty, pty, one_each)
        };
        let torchrun = ["torchrun", "train.py"];
        let text = ["bash", "-c", "[ $SLURM_LOCALID = 0 ] && torchrun train.py"];
        assert_eq!(of(&torchrun, false, true), Shape::Agent);
        assert_eq!(of(&torchrun, false, false), Shape::Native);
        // For a debugger in a terminal.
        assert_eq!(of(&torchrun, true, true), Shape::Agent);
        assert_eq!(of(&text, false, true), Shape::Agent);
        assert_eq!(of(&text, false, false), Shape::Native);
        assert_eq!(of(&text, true, true), Shape::Shell);
        assert_eq!(of(&["bash", "train.sh"], false, true), Shape::Native);
    }
}
