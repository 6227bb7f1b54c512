//! Commands that look at a node or a file and train nothing: a step that runs
//! one needs no more than that.

/// Checks of what a training needs of its node and layout.
pub(super) const NEEDS_NOT: [&str; 15] = [
    "kill-on-bad-exit",
    "gpus-none",
    "gpus-fewer",
    "gpus-foreign",
    "memlock",
    "stack-unlimited",
    "nofile",
    "shm-size",
    "cpus",
    "cpus-asked",
    "cpu-bind-stale",
    "cpus-far",
    "uneven",
    "dist-not-block",
    "one-task-many-gpus",
];

/// Programs that train nothing themselves and start nothing else.
const TOOLS: [&str; 40] = [
    "cat",
    "date",
    "df",
    "dmesg",
    "du",
    "find",
    "free",
    "getent",
    "grep",
    "head",
    "hostname",
    "ibdev2netdev",
    "ibstat",
    "ibstatus",
    "ibv_devices",
    "ibv_devinfo",
    "id",
    "ifconfig",
    "ip",
    "locale",
    "ls",
    "lscpu",
    "lsmem",
    "lspci",
    "lstopo",
    "mount",
    "nproc",
    "nvidia-smi",
    "ofed_info",
    "palingenesis",
    "printenv",
    "ps",
    "pwd",
    "rocm-smi",
    "show_gids",
    "tail",
    "ucx_info",
    "uname",
    "uptime",
    "whoami",
];

/// Modules of Python that are programs of this kind.
const MODULES: [&str; 3] = ["pip", "site", "torch.utils.collect_env"];

/// Whether the command is one of them, or Python asked for a line, its version
/// or its packages.
pub(super) fn is_one(command: &[String]) -> bool {
    let Some((first, arguments)) = command.split_first() else { return false };
    let name = first.rsplit('/').next().unwrap_or(first);
    if TOOLS.contains(&name) {
        return true;
    }
    if !super::launch::is_python(command) {
        return false;
    }
    match arguments.iter().map(String::as_str).find(|word| !matches!(*word, "-u" | "-I" | "-s" | "-E" | "-B")) {
        Some("-m") => arguments.iter().any(|word| MODULES.contains(&word.as_str())),
        Some("-V" | "--version") => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_known_by_its_name_alone() {
        let is = |line: &str| is_one(&line.split_whitespace().map(String::from).collect::<Vec<_>>());
        for line in
            ["hostname", "/usr/bin/nvidia-smi -L", "python3 -m pip list", "python -u -V", "python3.11 --version"]
        {
            assert!(is(line), "{line}");
        }
        for line in [
            "",
            "python train.py",
            "python -m torch.distributed.run x.py",
            "bash -c hostname",
            "env python x.py",
            "./hostname.sh",
            "python train.py -m pip",
        ] {
            assert!(!is(line), "{line}");
        }
    }

    #[test]
    fn each_id_is_one_of_a_check() {
        for id in NEEDS_NOT {
            assert!(super::super::ids().any(|known| known == id), "{id}");
        }
    }
}
