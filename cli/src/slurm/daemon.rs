//! The slurmd that run on this host, as /proc has them: root's only, for what they say of
//! themselves is believed. What only root sees stays unknown to others.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::tree::Tree;

/// One slurmd.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Daemon {
    /// Its process.
    pub pid: u32,
    /// Its program.
    pub program: Option<PathBuf>,
    /// The slurm.conf that its command line or its environment names.
    pub conf: Option<String>,
    /// Whether its environment could be seen.
    pub seen: bool,
    /// Whether slurmctld sends its configuration.
    pub configless: bool,
    /// When it started.
    pub started: Option<SystemTime>,
    /// Libraries of ours that it has loaded; `None`: not to be seen.
    pub loaded: Option<Vec<String>>,
    /// Its hard limits of locked memory and open files, in bytes and files.
    pub memlock: Option<u64>,
    /// See `memlock`.
    pub open_files: Option<u64>,
}

/// All that run.
pub fn running(tree: &Tree) -> Vec<Daemon> {
    let names = tree.names("/proc").unwrap_or_default();
    let mut pids: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    let is_slurmd = |pid: &u32| tree.attribute(&format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "slurmd");
    // One of a container is not this host's: its files are others (pid_namespaces(7)).
    let is_here = |pid: &u32| {
        let status = tree.attribute(&format!("/proc/{pid}/status")).unwrap_or_default();
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        pids.is_none_or(|pids| pids.split_whitespace().count() < 2)
    };
    // A user may call a program of theirs slurmd. All four ids are root's: the owner of
    // /proc/PID is root for a user's process too where that is not dumpable (proc(5)).
    let is_root_s = |pid: &u32| {
        let status = tree.attribute(&format!("/proc/{pid}/status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        ids.is_some_and(|ids| ids.split_whitespace().count() == 4 && ids.split_whitespace().all(|id| id == "0"))
    };
    let pids: Vec<u32> = pids.into_iter().filter(is_slurmd).filter(is_root_s).filter(is_here).collect();
    let boot = boot_time(tree);
    let all = pids.iter().filter_map(|pid| {
        let stat = tree.attribute(&format!("/proc/{pid}/stat")).ok()?;
        let (parent, ticks) = parent_and_start(&stat)?;
        // A child that is about to become a slurmstepd.
        (!pids.contains(&parent)).then(|| read(tree, *pid, ticks, boot))
    });
    all.collect()
}

fn read(tree: &Tree, pid: u32, ticks: u64, boot: Option<u64>) -> Daemon {
    let file = |name: &str| tree.attribute(&format!("/proc/{pid}/{name}"));
    let command = file("cmdline").unwrap_or_default();
    let words: Vec<&str> = command.split('\0').collect();
    let named = words.iter().position(|word| *word == "-f").and_then(|at| words.get(at + 1)).map(ToString::to_string);
    let environment = file("environ");
    let variable = |name: &str| {
        let variables = environment.as_deref().unwrap_or_default().split('\0');
        variables
            .filter_map(|variable| variable.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|(_, v)| v.to_string())
    };
    let sent = words.iter().any(|word| word.starts_with("--conf-server")) || variable("SLURM_CONF_SERVER").is_some();
    let loaded = file("maps").ok().filter(|maps| !maps.is_empty()).map(|maps| {
        let paths = maps.lines().filter_map(|line| line.find('/').map(|at| line[at..].to_string()));
        let mut ours: Vec<String> =
            paths.filter(|path| path.contains("palingenesis") && path.contains(".so")).collect();
        ours.dedup();
        ours
    });
    let limits = file("limits").unwrap_or_default();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        let hard = line.split_whitespace().nth(1)?;
        if hard == "unlimited" { Some(u64::MAX) } else { hard.parse().ok() }
    };
    // SAFETY: takes a number.
    let hertz = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|hertz| *hertz > 0);
    let program = tree.link(&format!("/proc/{pid}/exe")).filter(|path| path.starts_with('/'));
    Daemon {
        pid,
        program: program.filter(|path| !path.ends_with(" (deleted)")).map(PathBuf::from),
        conf: named.or_else(|| variable("SLURM_CONF")),
        seen: environment.is_ok(),
        configless: sent,
        started: boot
            .zip(hertz)
            .map(|(boot, hertz)| SystemTime::UNIX_EPOCH + Duration::from_secs(boot + ticks / hertz)),
        loaded,
        memlock: limit("Max locked memory"),
        open_files: limit("Max open files"),
    }
}

fn boot_time(tree: &Tree) -> Option<u64> {
    let stat = tree.attribute("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

/// Of /proc/PID/stat (proc(5)); the name before may hold anything.
fn parent_and_start(stat: &str) -> Option<(u32, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    Some((fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slurmd_of_a_tree() {
        let root = std::env::temp_dir().join(format!("palingenesis-daemon-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/stat", "cpu 1\nbtime 1700000000\n");
        for (pid, parent) in [(812, 1), (900, 812)] {
            write(&format!("proc/{pid}/comm"), "slurmd\n");
            let fields = "0 ".repeat(17);
            write(&format!("proc/{pid}/stat"), &format!("{pid} (slurmd) S {parent} {fields}5000 0\n"));
        }
        // In a container of this host.
        write("proc/950/comm", "slurmd\n");
        write("proc/950/stat", &format!("950 (slurmd) S 1 {}5000 0\n", "0 ".repeat(17)));
        write("proc/950/status", "Name:\tslurmd\nUid:\t0\t0\t0\t0\nNSpid:\t950\t7\n");
        write("proc/812/status", "Name:\tslurmd\nUid:\t0\t0\t0\t0\nNSpid:\t812\n");
        write("proc/900/status", "Name:\tslurmd\nUid:\t0\t0\t0\t0\nNSpid:\t900\n");
        // A user's, and a user's setuid program under that name.
        for (pid, ids) in [(700, "1000\t1000\t1000\t1000"), (701, "1000\t0\t0\t0")] {
            write(&format!("proc/{pid}/comm"), "slurmd\n");
            write(&format!("proc/{pid}/stat"), &format!("{pid} (slurmd) S 1 {}5000 0\n", "0 ".repeat(17)));
            write(&format!("proc/{pid}/status"), &format!("Name:\tslurmd\nUid:\t{ids}\nNSpid:\t{pid}\n"));
            write(&format!("proc/{pid}/cmdline"), "slurmd\0-f\0/tmp/slurm.conf\0");
        }
        write("proc/812/cmdline", "slurmd\0-D\0-f\0/srv/slurm.conf\0");
        write("proc/812/environ", "PATH=/bin\0");
        write("proc/812/maps", "7f00-7f01 r-xp 0 08:01 5   /usr/lib/palingenesis/spank_palingenesis.so\n");
        write("proc/812/limits", "Max locked memory         65536                unlimited            bytes\n");
        let found = running(&Tree::new(&root));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, found[0].conf.as_deref()), (812, Some("/srv/slurm.conf")));
        assert_eq!(found[0].loaded.as_ref().map(Vec::len), Some(1));
        assert_eq!((found[0].memlock, found[0].open_files), (Some(u64::MAX), None));
        let since = found[0].started.unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        // SAFETY: takes a number.
        let hertz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
        assert_eq!(since, 1_700_000_000 + 5000 / hertz);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
