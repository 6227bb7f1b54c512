//! Whether the kernel killed for want of memory: how often it did in a task's memory
//! group. Version 1 counts in memory.oom_control since Linux 4.13, for the group of the
//! process it killed; version 2 in memory.events, for that group and those around it.

use std::path::{Path, PathBuf};

use super::files::attribute;

/// Where the counts are found, as slurmstepd sees it: a container may show a task less.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryGroups {
    /// Where version 1's memory controller is mounted, and which group that shows.
    v1: Option<(PathBuf, String)>,
    /// The same of version 2.
    v2: Option<(PathBuf, String)>,
}

/// Counts the whole node's kills.
const OF_THE_NODE: &str = "proc/vmstat";

impl MemoryGroups {
    /// Reads below `root` what this process has mounted.
    pub fn read(root: &Path) -> MemoryGroups {
        let mut groups = MemoryGroups::default();
        // One for each mount (proc_pid_mountinfo(5)): ID PARENT DEV ROOT PLACE OPTIONS
        // [FIELDS] - TYPE SOURCE OPTIONS
        for line in attribute(&root.join("proc/self/mountinfo")).unwrap_or_default().lines() {
            let Some((mount, of)) = line.split_once(" - ") else { continue };
            let mount: Vec<&str> = mount.split(' ').collect();
            let (Some(shows), Some(place)) = (mount.get(3), mount.get(4)) else { continue };
            let of: Vec<&str> = of.split(' ').collect();
            let here = || Some((PathBuf::from(place), (*shows).to_string()));
            match (of.first(), of.get(2)) {
                (Some(&"cgroup"), Some(options)) if options.split(',').any(|option| option == "memory") => {
                    groups.v1 = groups.v1.or_else(here);
                }
                (Some(&"cgroup2"), _) => groups.v2 = groups.v2.or_else(here),
                _ => {}
            }
        }
        groups
    }

    /// The file that counts the kills in this process's memory group, where that is its
    /// step's own; else the one that counts the node's. Without `root` before it.
    pub fn file(&self, root: &Path) -> PathBuf {
        self.own(root).unwrap_or_else(|| Path::new("/").join(OF_THE_NODE))
    }

    fn own(&self, root: &Path) -> Option<PathBuf> {
        let text = attribute(&root.join("proc/self/cgroup"))?;
        // ID:CONTROLLERS:PATH, of version 2 "0::PATH"
        let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let v1 = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        let v2 = lines().find(|(controllers, _)| controllers.is_empty());
        let (mount, path, name) = match (&self.v1, v1, &self.v2, v2) {
            (Some(mount), Some((_, path)), ..) => (mount, path, "memory.oom_control"),
            (.., Some(mount), Some((_, path))) => (mount, path, "memory.events"),
            _ => return None,
        };
        if !path.split('/').any(|part| part.starts_with("step_")) || path.split('/').any(|part| part == "..") {
            return None;
        }
        let (place, shows) = mount;
        let below = path.strip_prefix(shows.trim_end_matches('/'))?;
        Some(place.join(below.trim_start_matches('/')).join(name))
    }
}

/// Whether the file counts one step's kills and no others.
pub fn is_own(file: &str) -> bool {
    !file.ends_with(OF_THE_NODE)
}

/// How often the kernel has killed, says such a file.
pub fn kills(root: &Path, file: &str) -> Option<u32> {
    let text = attribute(&root.join(file.trim_start_matches('/')))?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Files below a folder of its own.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("palingenesis-oom-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(root)
        }

        fn found(&self) -> (String, Option<u32>) {
            let file = MemoryGroups::read(&self.0).file(&self.0).display().to_string();
            let kills = kills(&self.0, &file);
            (file, kills)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const VMSTAT: (&str, &str) = ("proc/vmstat", "pgmajfault 12\noom_kill 9\nnuma_pte_updates 0\n");
    const V1: (&str, &str) = (
        "proc/self/mountinfo",
        "24 30 0:22 / /proc rw,nosuid - proc proc rw\n\
         33 32 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct\n\
         36 32 0:31 / /sys/fs/cgroup/memory rw,nosuid shared:13 - cgroup cgroup rw,memory\n\
         37 32 0:32 / /sys/fs/cgroup/unified rw,nosuid shared:14 - cgroup2 cgroup2 rw,nsdelegate\n",
    );
    const V2: (&str, &str) = (
        "proc/self/mountinfo",
        "28 25 0:25 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n",
    );

    /// As the kernel's Documentation/admin-guide/cgroup-v1/memory.rst (10) has the file,
    /// with the count that Linux 4.13 added.
    #[test]
    fn version_1_counts_in_the_step_s_own_group() {
        let tree = Tree::new(
            "v1",
            &[
                V1,
                VMSTAT,
                (
                    "proc/self/cgroup",
                    "9:memory:/slurm/uid_1000/job_7/step_0/task_1\n3:cpuset:/slurm/uid_1000/job_7/step_0\n0::/\n",
                ),
                (
                    "sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/task_1/memory.oom_control",
                    "oom_kill_disable 0\nunder_oom 1\noom_kill 2\n",
                ),
            ],
        );
        let file = "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/task_1/memory.oom_control";
        assert_eq!(tree.found(), (file.into(), Some(2)));
        assert!(is_own(file));
    }

    /// As Documentation/admin-guide/cgroup-v2.rst has memory.events, and Slurm's
    /// doc/html/cgroup_v2.shtml the groups.
    #[test]
    fn version_2_counts_in_the_task_s_own_group() {
        let group = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_3/memory.events";
        let tree = Tree::new(
            "v2",
            &[
                V2,
                VMSTAT,
                ("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_3\n"),
                (group, "low 0\nhigh 0\nmax 51\noom 3\noom_kill 1\noom_group_kill 0\n"),
            ],
        );
        assert_eq!(tree.found(), (format!("/{group}"), Some(1)));
    }

    #[test]
    fn a_mount_that_shows_a_part_and_a_group_in_it() {
        let shown = "36 32 0:31 /slurm /cgroup/memory rw - cgroup cgroup rw,memory\n";
        let tree = Tree::new(
            "part",
            &[
                ("proc/self/mountinfo", shown),
                VMSTAT,
                ("proc/self/cgroup", "9:memory:/slurm/uid_1/job_7/step_0\n"),
                ("cgroup/memory/uid_1/job_7/step_0/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n"),
            ],
        );
        // Before Linux 4.13 nothing is counted.
        assert_eq!(tree.found(), ("/cgroup/memory/uid_1/job_7/step_0/memory.oom_control".into(), None));
    }

    #[test]
    fn a_group_that_is_not_the_step_s_own_tells_of_the_node_only() {
        for path in ["/", "/system.slice/slurmd.service", "/x/../step_0"] {
            let tree = Tree::new("node", &[V1, VMSTAT, ("proc/self/cgroup", &format!("9:memory:{path}\n"))]);
            assert_eq!(tree.found(), ("/proc/vmstat".into(), Some(9)), "{path}");
        }
        assert!(!is_own("/proc/vmstat"));
        let tree = Tree::new("none", &[("proc/self/other", "")]);
        assert_eq!(tree.found(), ("/proc/vmstat".into(), None));
    }
}
