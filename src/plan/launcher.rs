//! Which launcher a command starts, and with which flags of its own.
//!
//! A launcher starts the ranks of its node itself: torchrun and its kind. It may
//! stand behind programs that start another (`env`, `uv run`, `numactl`), after
//! `python -m`, or in the text that a shell is given with `-c`. What is read
//! from shell text, or behind a program whose options are not known here, is not
//! certain: nothing is refused for it.

/// The launchers that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// torchrun, `python -m torch.distributed.run` and `….launch`.
    Torchrun,
    /// `accelerate launch`.
    Accelerate,
    /// `deepspeed`.
    Deepspeed,
    /// `composer`.
    Composer,
    /// `colossalai run`.
    Colossalai,
    /// `ft_launcher` of NVIDIA's resiliency extension.
    FtLauncher,
}

impl Kind {
    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Torchrun => "torchrun",
            Kind::Accelerate => "accelerate launch",
            Kind::Deepspeed => "deepspeed",
            Kind::Composer => "composer",
            Kind::Colossalai => "colossalai run",
            Kind::FtLauncher => "ft_launcher",
        }
    }

    /// Whether its flags' defaults are PET_ variables
    /// (torch/distributed/argparse_util.py). `accelerate launch` fills in what
    /// its own flags say and leaves the rest to torchrun's defaults.
    pub fn reads_pet(self) -> bool {
        matches!(self, Kind::Torchrun | Kind::FtLauncher | Kind::Accelerate)
    }
}

/// A launcher found in a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    /// Which.
    pub kind: Kind,
    /// The word of the command that names it, or that is the shell text with it.
    pub position: usize,
    /// Whether the command certainly starts it.
    pub certain: bool,
    /// Whether it stands in shell text.
    pub in_shell: bool,
    /// Whether each of its flags is understood.
    pub flags_certain: bool,
    flags: Vec<(String, Option<String>)>,
}

impl Launcher {
    /// Whether it is given this flag, written with `-`: `nproc-per-node`.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|(name, _)| name == flag)
    }

    /// The flag's value; the last one counts.
    pub fn value(&self, flag: &str) -> Option<&str> {
        self.flags.iter().rev().find(|(name, _)| name == flag).and_then(|(_, value)| value.as_deref())
    }
}

/// The launcher that `command` starts, if it is one that is known.
pub fn find(command: &[String]) -> Option<Launcher> {
    walk(command, 0, true, 0)
}

/// Shells inside shells are followed this far.
const DEPTH: usize = 4;

/// A program that starts another one, and how its options are written.
struct Wrapper {
    name: &'static str,
    /// Options whose value is the next word.
    with_value: &'static [&'static str],
    /// Words of its own between options and command.
    words: usize,
    /// NAME=VALUE before the command.
    assigns: bool,
}

const fn wrapper(name: &'static str, with_value: &'static [&'static str], words: usize) -> Wrapper {
    Wrapper { name, with_value, words, assigns: false }
}

const WRAPPERS: &[Wrapper] = &[
    Wrapper { assigns: true, ..wrapper("env", &["-u", "--unset", "-C", "--chdir"], 0) },
    wrapper(
        "numactl",
        &[
            "-i",
            "-p",
            "-P",
            "-N",
            "-m",
            "-C",
            "-w",
            "--interleave",
            "--preferred",
            "--preferred-many",
            "--cpunodebind",
            "--membind",
            "--physcpubind",
            "--weighted-interleave",
        ],
        0,
    ),
    wrapper("taskset", &[], 1),
    wrapper("nice", &["-n", "--adjustment"], 0),
    wrapper("ionice", &["-c", "-n", "--class", "--classdata"], 0),
    wrapper("timeout", &["-k", "-s", "--kill-after", "--signal"], 1),
    wrapper("time", &["-o", "-f", "--output", "--format"], 0),
    wrapper("stdbuf", &["-i", "-o", "-e", "--input", "--output", "--error"], 0),
    wrapper("exec", &["-a"], 0),
    wrapper("command", &[], 0),
    wrapper("nohup", &[], 0),
    wrapper("setsid", &[], 0),
    wrapper("unbuffer", &[], 0),
];

/// Options of `uv` before `run`, and of `uv run`, with the value as next word.
const UV: Wrapper = wrapper(
    "uv",
    &[
        "--allow-insecure-host",
        "--cache-dir",
        "--color",
        "--config-file",
        "--config-setting",
        "-C",
        "--default-index",
        "--directory",
        "--env-file",
        "--exclude-newer",
        "--extra",
        "--extra-index-url",
        "--find-links",
        "-f",
        "--fork-strategy",
        "--group",
        "--index",
        "--index-strategy",
        "--index-url",
        "-i",
        "--keyring-provider",
        "--link-mode",
        "--no-binary-package",
        "--no-build-isolation-package",
        "--no-build-package",
        "--no-extra",
        "--no-group",
        "--only-group",
        "--package",
        "--prerelease",
        "--project",
        "--python",
        "-p",
        "--python-platform",
        "--refresh-package",
        "--reinstall-package",
        "--resolution",
        "--upgrade-package",
        "-P",
        "--with",
        "-w",
        "--with-editable",
        "--with-requirements",
    ],
    0,
);

/// Programs that start another one behind options that are not known here.
const FOREIGN: [&str; 14] = [
    "nsys",
    "ncu",
    "apptainer",
    "singularity",
    "conda",
    "mamba",
    "micromamba",
    "pixi",
    "poetry",
    "hatch",
    "shifter",
    "podman-hpc",
    "enroot",
    "rocprofv3",
];

const SHELLS: [&str; 6] = ["bash", "sh", "dash", "zsh", "ksh", "mksh"];

/// Words of a shell after which a command comes.
const KEYWORDS: [&str; 10] = ["if", "then", "else", "elif", "do", "while", "until", "!", "{", "builtin"];

fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// Whether a program of this name is Python: python, python3, python3.11.
pub(super) fn is_python(name: &str) -> bool {
    name.strip_prefix("python").is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

fn of_program(name: &str, next: Option<&str>) -> Option<(Kind, usize)> {
    match (name, next) {
        ("torchrun", _) => Some((Kind::Torchrun, 1)),
        ("ft_launcher", _) => Some((Kind::FtLauncher, 1)),
        ("deepspeed", _) => Some((Kind::Deepspeed, 1)),
        ("composer", _) => Some((Kind::Composer, 1)),
        ("accelerate-launch", _) => Some((Kind::Accelerate, 1)),
        ("accelerate", Some("launch")) => Some((Kind::Accelerate, 2)),
        ("colossalai", Some("run")) => Some((Kind::Colossalai, 2)),
        _ => None,
    }
}

fn of_module(module: &str, next: Option<&str>) -> Option<(Kind, usize)> {
    match (module, next) {
        ("torch.distributed.run" | "torch.distributed.launch", _) => Some((Kind::Torchrun, 0)),
        ("accelerate.commands.launch", _) => Some((Kind::Accelerate, 0)),
        ("accelerate.commands.accelerate_cli", Some("launch")) => Some((Kind::Accelerate, 1)),
        ("deepspeed.launcher.runner", _) => Some((Kind::Deepspeed, 0)),
        ("composer.cli.launcher" | "composer.cli", _) => Some((Kind::Composer, 0)),
        ("colossalai.cli", Some("run")) => Some((Kind::Colossalai, 1)),
        ("nvidia_resiliency_ext.fault_tolerance.launcher", _) => Some((Kind::FtLauncher, 0)),
        _ => None,
    }
}

/// Follows the command from its word `at` on.
fn walk(words: &[String], mut at: usize, certain: bool, depth: usize) -> Option<Launcher> {
    loop {
        let name = base(words.get(at)?);
        let word = |at: usize| words.get(at).map(String::as_str);
        if let Some((kind, taken)) = of_program(name, word(at + 1)) {
            return Some(with_flags(kind, words, at, at + taken, certain));
        }
        if is_python(name) {
            match python(words, at + 1)? {
                Python::Module(module, next) => {
                    let (kind, taken) = of_module(&module, word(next))?;
                    return Some(with_flags(kind, words, at, next + taken, certain));
                }
                Python::Script(script) => {
                    let (kind, taken) = of_program(base(word(script)?), word(script + 1))?;
                    return Some(with_flags(kind, words, at, script + taken, certain));
                }
            }
        }
        if SHELLS.contains(&name) {
            let text = shell_text(words, at + 1)?;
            return in_text(word(text)?, depth).map(|launcher| Launcher { position: text, ..launcher });
        }
        if name == "uv" {
            let run = skip(&UV, words, at + 1);
            if word(run) != Some("run") {
                return None;
            }
            at = skip(&UV, words, run + 1);
            if words.get(run + 1..at)?.iter().any(|option| option == "-m" || option == "--module") {
                let (kind, taken) = of_module(word(at)?, word(at + 1))?;
                return Some(with_flags(kind, words, at, at + 1 + taken, certain));
            }
            continue;
        }
        if FOREIGN.contains(&name) {
            at = foreign(words, at + 1)?;
            return walk(words, at, false, depth);
        }
        let wrapper = WRAPPERS.iter().find(|wrapper| wrapper.name == name)?;
        at = skip(wrapper, words, at + 1);
    }
}

/// Where the command of a wrapper begins.
fn skip(wrapper: &Wrapper, words: &[String], mut at: usize) -> usize {
    let (mut own, mut options) = (wrapper.words, true);
    while let Some(word) = words.get(at) {
        at += 1;
        if options && word == "--" {
            options = false;
        } else if options && word.len() > 1 && word.starts_with('-') {
            // A value may be joined to its option too: -n10, --adjustment=10.
            at += usize::from(wrapper.with_value.contains(&word.as_str()));
        } else if wrapper.assigns && (is_assignment(word) || word == "-") {
        } else if own > 0 {
            own -= 1;
        } else {
            return at - 1;
        }
    }
    at
}

/// The first word that is a program known here; not behind a script, whose
/// arguments may be named like one.
fn foreign(words: &[String], from: usize) -> Option<usize> {
    for (at, word) in words.iter().enumerate().skip(from) {
        let name = base(word);
        let next = words.get(at + 1).map(String::as_str);
        if of_program(name, next).is_some() || is_python(name) || SHELLS.contains(&name) {
            return Some(at);
        }
        if name.ends_with(".py") || name.ends_with(".sh") {
            return None;
        }
    }
    None
}

enum Python {
    /// `-m`, and where its arguments begin.
    Module(String, usize),
    /// Where the script stands.
    Script(usize),
}

fn python(words: &[String], mut at: usize) -> Option<Python> {
    while let Some(word) = words.get(at) {
        at += 1;
        if word == "--check-hash-based-pycs" {
            at += 1;
            continue;
        }
        let Some(options) = word.strip_prefix('-').filter(|options| !options.starts_with('-')) else {
            return (!word.starts_with("--")).then_some(Python::Script(at - 1));
        };
        if options.is_empty() {
            return None;
        }
        for (place, option) in options.char_indices() {
            let rest = options.get(place + 1..).unwrap_or_default();
            match option {
                'c' => return None,
                'm' if rest.is_empty() => return Some(Python::Module(words.get(at)?.clone(), at + 1)),
                'm' => return Some(Python::Module(rest.into(), at)),
                'W' | 'X' => {
                    at += usize::from(rest.is_empty());
                    break;
                }
                _ => {}
            }
        }
    }
    None
}

/// Where the text of `-c` stands among a shell's arguments.
fn shell_text(words: &[String], mut at: usize) -> Option<usize> {
    let mut text = false;
    while let Some(word) = words.get(at) {
        at += 1;
        if word == "--" {
            return text.then_some(at);
        }
        let Some(options) = word.strip_prefix(['-', '+']) else {
            return text.then_some(at - 1);
        };
        if options.starts_with('-') {
            at += usize::from(matches!(word.as_str(), "--rcfile" | "--init-file"));
            continue;
        }
        text |= word.starts_with('-') && options.contains('c');
        at += options.chars().filter(|option| matches!(option, 'o' | 'O')).count();
    }
    None
}

/// The first launcher that a command of the shell text starts.
fn in_text(text: &str, depth: usize) -> Option<Launcher> {
    if depth == DEPTH {
        return None;
    }
    let found = commands(text).into_iter().find_map(|words| {
        let start = words.iter().position(|word| !KEYWORDS.contains(&word.as_str()) && !is_assignment(word))?;
        walk(&words, start, false, depth + 1)
    })?;
    Some(Launcher { in_shell: true, certain: false, ..found })
}

/// The commands of shell text, as words without their quotes. Nothing is
/// expanded: a `$` stays in its word.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            '\'' => {
                let quoted: String = characters.by_ref().take_while(|next| *next != '\'').collect();
                word.get_or_insert_default().push_str(&quoted);
            }
            '"' => {
                let word = word.get_or_insert_default();
                while let Some(next) = characters.next() {
                    match next {
                        '"' => break,
                        '\\' => word.extend(characters.next().filter(|next| *next != '\n')),
                        next => word.push(next),
                    }
                }
            }
            // $(…) is part of its word, whatever stands in it.
            '$' if characters.peek() == Some(&'(') => {
                let word = word.get_or_insert_default();
                word.push('$');
                let mut open = 0;
                for next in characters.by_ref() {
                    word.push(next);
                    match next {
                        '(' => open += 1,
                        ')' => open -= 1,
                        _ => {}
                    }
                    if open == 0 {
                        break;
                    }
                }
            }
            '#' if word.is_none() => while characters.next_if(|next| *next != '\n').is_some() {},
            '&' if word.as_ref().is_some_and(|word| word.ends_with('>')) || characters.peek() == Some(&'>') => {
                word.get_or_insert_default().push('&');
            }
            ';' | '&' | '|' | '(' | ')' | '\n' | '`' => {
                words.extend(word.take());
                if !words.is_empty() {
                    all.push(std::mem::take(&mut words));
                }
            }
            space if space.is_whitespace() => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word.take());
    if !words.is_empty() {
        all.push(words);
    }
    all
}

/// torchrun's flags, and whether a value follows (torch/distributed/run.py and
/// launch.py, PyTorch 1.13 to 2.12).
const TORCHRUN: &[(&str, bool)] = &[
    ("nnodes", true),
    ("nproc-per-node", true),
    ("rdzv-backend", true),
    ("rdzv-endpoint", true),
    ("rdzv-id", true),
    ("rdzv-conf", true),
    ("standalone", false),
    ("max-restarts", true),
    ("monitor-interval", true),
    ("start-method", true),
    ("event-log-handler", true),
    ("role", true),
    ("module", false),
    ("no-python", false),
    ("run-path", false),
    ("log-dir", true),
    ("redirects", true),
    ("tee", true),
    ("local-ranks-filter", true),
    ("node-rank", true),
    ("master-addr", true),
    ("master-port", true),
    ("local-addr", true),
    ("logs-specs", true),
    ("numa-binding", true),
    ("signals-to-handle", true),
    ("virtual-local-rank", false),
    ("use-env", false),
    ("help", false),
];

fn with_flags(kind: Kind, words: &[String], position: usize, from: usize, certain: bool) -> Launcher {
    let arguments = words.get(from..).unwrap_or_default();
    let (flags, flags_certain) = match kind {
        Kind::Torchrun | Kind::FtLauncher => torchrun_flags(arguments),
        _ => (other_flags(arguments), false),
    };
    Launcher { kind, position, certain, in_shell: false, flags_certain, flags }
}

type Flags = Vec<(String, Option<String>)>;

/// As argparse reads them: up to the script, with `_` for `-`, in any
/// unambiguous abbreviation.
fn torchrun_flags(arguments: &[String]) -> (Flags, bool) {
    let mut flags = Vec::new();
    let mut certain = true;
    let mut at = 0;
    while let Some(word) = arguments.get(at) {
        at += 1;
        let next = |at: usize| arguments.get(at).filter(|next| !next.starts_with('-')).cloned();
        if word == "--" || word == "-" || !word.starts_with('-') {
            break;
        }
        let Some(long) = word.strip_prefix("--") else {
            match word.get(..2) {
                Some("-m") if word.len() == 2 => flags.push(("module".into(), None)),
                Some(short @ ("-r" | "-t")) => {
                    let name = if short == "-r" { "redirects" } else { "tee" };
                    let value = match word.get(2..).filter(|joined| !joined.is_empty()) {
                        Some(joined) => Some(joined.trim_start_matches('=').to_string()),
                        None => {
                            at += 1;
                            arguments.get(at - 1).cloned()
                        }
                    };
                    flags.push((name.into(), value));
                }
                _ => certain = false,
            }
            continue;
        };
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (long, None),
        };
        let name = name.replace('_', "-");
        let exact = TORCHRUN.iter().find(|(known, _)| *known == name);
        let mut begins = TORCHRUN.iter().filter(|(known, _)| known.starts_with(&name));
        let known = exact.or_else(|| match (begins.next(), begins.next()) {
            (Some(only), None) => Some(only),
            _ => None,
        });
        match known {
            Some((known, true)) => {
                let value = value.or_else(|| {
                    let value = next(at);
                    at += usize::from(value.is_some());
                    value
                });
                flags.push(((*known).into(), value));
            }
            Some((known, false)) => flags.push(((*known).into(), None)),
            // A flag of another release: most have a value.
            None => {
                certain = false;
                at += usize::from(value.is_none() && next(at).is_some());
            }
        }
    }
    (flags, certain)
}

/// Of launchers whose flags are not listed here: what stands before the script.
fn other_flags(arguments: &[String]) -> Flags {
    let mut flags = Vec::new();
    let own = arguments.iter().take_while(|word| !word.ends_with(".py") && !matches!(word.as_str(), "-m" | "--module"));
    let own: Vec<&String> = own.collect();
    for (at, word) in own.iter().enumerate() {
        let Some(long) = word.strip_prefix("--") else { continue };
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (long, own.get(at + 1).filter(|next| !next.starts_with('-')).map(|next| next.to_string())),
        };
        flags.push((name.replace('_', "-"), value));
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(command: &str) -> Vec<String> {
        // One word in quotes is enough for these tables.
        let mut words = Vec::new();
        for (index, part) in command.split('\'').enumerate() {
            if index % 2 == 1 {
                words.push(part.to_string());
            } else {
                words.extend(part.split_whitespace().map(String::from));
            }
        }
        words
    }

    fn kind(command: &str) -> Option<Kind> {
        find(&split(command)).map(|launcher| launcher.kind)
    }

    #[test]
    fn launchers_by_their_names() {
        for (command, expected) in [
            ("torchrun train.py", Kind::Torchrun),
            ("/opt/venv/bin/torchrun --nnodes=2 train.py", Kind::Torchrun),
            ("python -m torch.distributed.run train.py", Kind::Torchrun),
            ("python3.11 -u -m torch.distributed.launch train.py", Kind::Torchrun),
            ("/usr/bin/python3 -Xfaulthandler -W ignore -m torch.distributed.run train.py", Kind::Torchrun),
            ("python3 -um torch.distributed.run train.py", Kind::Torchrun),
            ("python3 -X dev -mtorch.distributed.run train.py", Kind::Torchrun),
            ("python3 /opt/venv/bin/torchrun train.py", Kind::Torchrun),
            ("accelerate launch train.py", Kind::Accelerate),
            ("python -m accelerate.commands.launch train.py", Kind::Accelerate),
            ("deepspeed train.py", Kind::Deepspeed),
            ("composer train.py", Kind::Composer),
            ("colossalai run train.py", Kind::Colossalai),
            ("ft_launcher --nnodes=2 train.py", Kind::FtLauncher),
        ] {
            let found = find(&split(command)).unwrap_or_else(|| panic!("{command}"));
            assert_eq!((found.kind, found.certain, found.in_shell), (expected, true, false), "{command}");
        }
    }

    #[test]
    fn no_launchers() {
        for command in [
            "",
            "python train.py",
            "python train.py -m torch.distributed.run",
            "python -m train --launcher torchrun",
            "python -c 'import torch.distributed.run' torchrun",
            "python",
            "python -",
            "accelerate config",
            "accelerate",
            "colossalai check",
            "torchrun.sh",
            "./train.sh torchrun",
            "bash train.sh torchrun",
            "bash -c 'python train.py # torchrun'",
            "bash -c 'echo torchrun'",
            "bash -c 'srun torchrun train.py'",
            "bash -c",
            "uv sync",
            "uv run train.py torchrun",
            "uv",
            "env",
            "env A=1 python train.py torchrun",
            "nsys profile -o report python train.py --launcher torchrun",
            "apptainer exec image.sif ./run.sh --launcher torchrun",
            "timeout 10",
        ] {
            assert_eq!(kind(command), None, "{command}");
        }
    }

    #[test]
    fn launchers_behind_other_programs() {
        for command in [
            "env torchrun train.py",
            "env -i -u HOME PATH=/bin OMP_NUM_THREADS=4 torchrun train.py",
            "/usr/bin/env -- A=1 torchrun train.py",
            "uv run torchrun train.py",
            "uv run -m torch.distributed.run train.py",
            "uv --project /p run --extra cuda --with flash-attn -p 3.12 --frozen -- torchrun train.py",
            "uv run python -m torch.distributed.run train.py",
            "numactl --cpunodebind=0 -m 0 torchrun train.py",
            "numactl --interleave all torchrun train.py",
            "taskset 0xff torchrun train.py",
            "taskset -c 0-31 torchrun train.py",
            "nice -n 10 torchrun train.py",
            "nice -10 torchrun train.py",
            "timeout -k 10 --signal=TERM 2h torchrun train.py",
            "time -v torchrun train.py",
            "stdbuf -oL -e L torchrun train.py",
            "nohup setsid torchrun train.py",
            "env A=1 numactl -N 0 timeout 60 uv run python3 -u -m torch.distributed.run train.py",
        ] {
            let found = find(&split(command)).unwrap_or_else(|| panic!("{command}"));
            assert_eq!((found.kind, found.certain, found.in_shell), (Kind::Torchrun, true, false), "{command}");
        }
        for command in [
            "nsys profile -o report --trace cuda,nvtx torchrun train.py",
            "nsys profile --stats=true python -m torch.distributed.run train.py",
            "apptainer exec --nv image.sif torchrun train.py",
            "singularity exec --nv --bind /data image.sif python3 -m torch.distributed.run train.py",
            "conda run -n train torchrun train.py",
        ] {
            let found = find(&split(command)).unwrap_or_else(|| panic!("{command}"));
            assert_eq!((found.kind, found.certain, found.in_shell), (Kind::Torchrun, false, false), "{command}");
        }
    }

    #[test]
    fn launchers_in_shell_text() {
        for command in [
            "bash -c 'torchrun train.py'",
            "bash -lc 'cd /work && torchrun train.py'",
            "bash -euxo pipefail -c 'source venv/bin/activate; OMP_NUM_THREADS=8 torchrun train.py'",
            "sh -c 'if [ -e x ]; then exec torchrun train.py; fi'",
            "bash -c '[ $SLURM_LOCALID = 0 ] && torchrun train.py'",
            "bash -c 'python -m torch.distributed.run train.py 2>&1 | tee log'",
            "bash -c 'export A=$(hostname)\ntorchrun \\\n --nnodes=2 \\\n train.py'",
            "env A=1 bash -c 'uv run torchrun train.py'",
            "bash -c 'bash -c \"torchrun train.py\"'",
            "apptainer exec image.sif bash -c 'torchrun train.py'",
            "bash -c '(ulimit -n 65536; torchrun train.py)'",
        ] {
            let words = split(command);
            let found = find(&words).unwrap_or_else(|| panic!("{command}"));
            assert_eq!((found.kind, found.certain, found.in_shell), (Kind::Torchrun, false, true), "{command}");
            assert!(words[found.position].contains("torch"), "{command}");
        }
    }

    #[test]
    fn flags_in_every_form_argparse_takes() {
        for (flags, name, value) in [
            ("--nnodes=2", "nnodes", Some("2")),
            ("--nnodes 1:4", "nnodes", Some("1:4")),
            ("--nproc_per_node=8", "nproc-per-node", Some("8")),
            ("--nproc-per-node gpu", "nproc-per-node", Some("gpu")),
            ("--nproc 4", "nproc-per-node", Some("4")),
            ("--nn 3", "nnodes", Some("3")),
            ("--node_rank=0", "node-rank", Some("0")),
            ("--rdzv_backend c10d", "rdzv-backend", Some("c10d")),
            ("--rdzv-e=n1:29400", "rdzv-endpoint", Some("n1:29400")),
            ("--master_a n1", "master-addr", Some("n1")),
            ("--standalone", "standalone", None),
            ("--stand", "standalone", None),
            ("-r 3", "redirects", Some("3")),
            ("-t3", "tee", Some("3")),
            ("--nnodes=1 --nnodes=2", "nnodes", Some("2")),
            ("--master_port=$MASTER_PORT", "master-port", Some("$MASTER_PORT")),
        ] {
            let found = find(&split(&format!("torchrun {flags} train.py --nnodes 9 --standalone"))).unwrap();
            assert!(found.has(name) && found.flags_certain, "{flags}");
            assert_eq!(found.value(name), value, "{flags}");
            // What stands behind the script is the script's.
            assert_ne!(found.value("nnodes"), Some("9"), "{flags}");
            assert_eq!(found.has("standalone"), name == "standalone", "{flags}");
        }
    }

    #[test]
    fn flags_that_are_not_understood_are_not_certain() {
        for flags in ["--rdzv x", "--brand-new 3", "--brand-new=3", "-z", "--n 2"] {
            let found = find(&split(&format!("torchrun {flags} --nnodes=2 train.py"))).unwrap();
            assert!(found.certain && !found.flags_certain, "{flags}");
            assert_eq!(found.value("nnodes"), Some("2"), "{flags}");
        }
        let ft = find(&split("ft_launcher --ft-param-x 3 --nnodes 2 train.py")).unwrap();
        assert_eq!((ft.value("nnodes"), ft.certain), (Some("2"), true));
        let accelerate =
            find(&split("accelerate launch --multi_gpu --num_machines 2 train.py --machine_rank 7")).unwrap();
        assert_eq!(accelerate.value("num-machines"), Some("2"));
        assert!(!accelerate.has("machine-rank"));
    }

    #[test]
    fn flags_in_shell_text_keep_what_the_shell_would_replace() {
        let found = find(&split(
            "bash -c 'torchrun --nnodes=$SLURM_NNODES --master_addr \"$(scontrol show hostnames | head -1)\" --standalone train.py'",
        ))
        .unwrap();
        assert_eq!(found.value("nnodes"), Some("$SLURM_NNODES"));
        assert_eq!(found.value("master-addr"), Some("$(scontrol show hostnames | head -1)"));
        assert!(found.has("standalone"));
    }

    #[test]
    fn no_command_line_is_too_strange() {
        let nested =
            (0..9).fold("torchrun x".to_string(), |text, _| format!("bash -c \"{}\"", text.replace('"', "\\\"")));
        assert_eq!(kind(&format!("bash -c '{nested}'")), None);
        for text in ["'", "\"", "$(", "\\", "$((1+", "a'b\"c", ";;&&||", "`", ">&", "&>"] {
            assert_eq!(find(&["bash".into(), "-c".into(), text.into()]), None, "{text}");
        }
        for words in [
            &["python", "-mé"][..],
            &["python", "-é", "x"],
            &["torchrun\u{301}"],
            &["python", "-m"],
            &["python", "-W"],
            &["uv", "run", "-m"],
            &["env", "-u"],
            &["bash", "-o"],
        ] {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            assert_eq!(find(&words), None, "{words:?}");
        }
        for word in ["-é", "--é=1", "-", "--", "--=", "-r", "--nnodes", "\u{0}"] {
            let found = find(&["torchrun".into(), word.into()]).unwrap();
            assert_eq!(found.value("nnodes"), None, "{word:?}");
        }
    }
}
