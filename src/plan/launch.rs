//! What the step's tasks are: ranks of a training, or a shell for a person.

use serde::Serialize;

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

const SHELLS: [&str; 9] = ["bash", "sh", "zsh", "dash", "fish", "ksh", "mksh", "csh", "tcsh"];

/// The shape asked for, or the one that shows: a shell is for a person if it has
/// a terminal, by `--pty` or as srun's own standard input. `srun bash <script`
/// is a program like any other.
pub fn shape(settings: &Settings, command: &[String], pty: bool, terminal: bool) -> Shape {
    match settings.launch {
        Launch::Native => Shape::Native,
        Launch::Agent => Shape::Agent,
        Launch::Worker => Shape::Worker,
        Launch::Shell => Shape::Shell,
        Launch::Auto if settings.profile == Profile::Worker => Shape::Worker,
        Launch::Auto if pty || (terminal && is_interactive_shell(command)) => Shape::Shell,
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
        shape(&Settings::default(), &command, pty, terminal)
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
        assert_eq!(shape(&settings("launch=native"), &bash, true, true), Shape::Native);
        assert_eq!(shape(&settings("launch=shell"), &["python3".to_string()], false, false), Shape::Shell);
    }
}
