//! What a task finds where it runs: its CPUs, its limits, NCCL's files as seen
//! from inside its container. Read in the task, as the user.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::directories::Directory;
use super::locks::OldLock;
use super::overlay::{self, Overlay};
use super::program::StartFacts;
use super::rdma::{self, GidRow, RdmaPort};
use super::topology::{Gpu, GpuVendor};
use super::{CpuSet, Environment, NodeFacts, PciAddress, files};
use crate::system::limits::{self, Resource};
use crate::system::mempolicy::{self, Policy};
use crate::system::{access, affinity, child};

/// The task's surroundings; what is not known is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskFacts {
    /// CPUs in the task's affinity mask.
    pub cpus: Option<u32>,
    /// What NCCL's configuration files say, the first one that names a variable
    /// first.
    pub nccl_files: Vec<FileValue>,
    /// Whether a container's image replaced the environment.
    pub container: Container,
    /// Names that the container plugin was told to leave as they are.
    pub container_keeps: Vec<String>,
    /// What is known for starting another program than the command; `None`: not
    /// looked for.
    pub start: Option<StartFacts>,
    /// Directories for caches: what `plan::caches::wanted` names, as they were
    /// found or made.
    pub directories: Vec<Directory>,
    /// Old lock files in what `plan::caches::with_locks` names.
    pub locks: Vec<OldLock>,
    /// Bytes the program may lock in memory; `u64::MAX`: no limit.
    pub memlock: Option<u64>,
    /// Files the program may have open; `u64::MAX`: no limit.
    pub open_files: Option<u64>,
    /// The limit of its stack in bytes; `u64::MAX`: no limit.
    pub stack: Option<u64>,
    /// Size of /dev/shm in bytes.
    pub shm: Option<u64>,
    /// Whether the IMEX channels of a multi-node NVLink domain are there.
    pub imex: Option<bool>,
    /// Rows of the RoCE ports' address tables that can be used; read only when
    /// NCCL_IB_GID_INDEX names one, and with `gid=auto`.
    pub gids: Option<Vec<GidRow>>,
    /// The CPUs of its affinity mask, as Slurm set it.
    pub mask: Option<CpuSet>,
    /// Its memory.
    pub memory: MemoryFacts,
    /// GPUs of the node that it may not open, because a cgroup or the file's mode
    /// hides them.
    pub gpus_hidden: Vec<PciAddress>,
    /// Sets of the CPUs that are one core; read only with `exclusive`.
    pub cores: Vec<CpuSet>,
    /// What a topology file says of the node's devices, where sysfs says nothing.
    pub overlay: Option<Overlay>,
    /// The node's ranks, as they met before the start.
    pub peers: Peers,
    /// Who bound it already.
    pub bound_by_user: UserBound,
    /// What could not be read, in words.
    pub unknown: Vec<String>,
}

/// What the kernel says of a task's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    /// NUMA nodes it may use (Mems_allowed_list); `None`: not known.
    pub allowed: Option<CpuSet>,
    /// Whether it has a memory policy already (srun --mem-bind, numactl).
    pub has_policy: Option<bool>,
}

/// What the user chose of the task's CPUs and memory: then it stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserBound {
    /// The option's text, `--cpu-bind=map_cpu:0,1`, or the variable with where it
    /// comes from, `SLURM_CPU_BIND=none (exported)`; `None`: Slurm chose.
    pub cpu: Option<String>,
    /// The same of `--mem-bind` and SLURM_MEM_BIND.
    pub mem: Option<String>,
}

/// The ranks of a node, as far as they came to the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Peers {
    /// Not asked: the plan is not made in a task.
    #[default]
    NotAsked,
    /// Not all of them came; why.
    Incomplete(String),
    /// All of them, by local rank.
    Met(Vec<Peer>),
}

/// What a rank brings to its node's meeting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its mask as Slurm set it.
    pub mask: CpuSet,
    /// The GPUs it is bound to, as indexes of the node's; none where that is not
    /// known.
    pub gpus: Vec<u8>,
}

/// A variable in one of NCCL's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileValue {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The file.
    pub file: String,
}

/// Where the task is, seen from the container plugin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Container {
    /// No container, or none that is known of.
    #[default]
    None,
    /// Inside one: its image's environment has been imported.
    Inside,
    /// One was asked for, and its plugin comes after ours: the image's
    /// environment will replace ours.
    ComesLater,
}

/// How long a home directory may take: an automounter needs seconds, a dead file
/// server would need for ever.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longer than any configuration of NCCL.
const LONGEST_FILE: u64 = 64 * 1024;

/// The groups of one user, 65,536 at most, and the masks of the largest kernel.
const LONGEST_STATUS: u64 = 1 << 20;

/// Names that NCCL, or what it loads after it has read its files, looks for.
const READ_AFTER: [&str; 6] = ["NCCL_", "FI_", "OFI_NCCL_", "SHARP_", "UCX_", "IBV_"];

const IMEX_CHANNELS: &str = "dev/nvidia-caps-imex-channels";

impl TaskFacts {
    /// Reads what this process, a task of a step, has.
    pub fn read(root: &Path, environment: &Environment, node: &NodeFacts) -> TaskFacts {
        let limit = |resource, name| propagated(environment, name, limits::limit(resource));
        let mask = affinity::mask();
        TaskFacts {
            cpus: mask.as_ref().map(CpuSet::len),
            mask,
            memory: MemoryFacts {
                allowed: memory_nodes(),
                has_policy: mempolicy::policy().map(|policy| policy != Policy::Default),
            },
            memlock: limit(Resource::LockedMemory, "SLURM_RLIMIT_MEMLOCK"),
            open_files: limit(Resource::OpenFiles, "SLURM_RLIMIT_NOFILE"),
            stack: limit(Resource::Stack, "SLURM_RLIMIT_STACK"),
            shm: limits::tmpfs_size(&root.join("dev/shm")),
            gpus_hidden: hidden(root, &node.topology.gpus),
            ..TaskFacts::described(root, environment, node)
        }
    }

    /// The same without what belongs to this process: for a step that is only
    /// described.
    pub fn described(root: &Path, environment: &Environment, node: &NodeFacts) -> TaskFacts {
        let mut unknown = Vec::new();
        let nccl_files = nccl_files(root, environment, &mut unknown);
        let in_files =
            |name: &str| nccl_files.iter().find(|value| value.name == name).map(|value| value.value.as_str());
        let index = environment.get("NCCL_IB_GID_INDEX").or_else(|| in_files("NCCL_IB_GID_INDEX"));
        let overlay = overlay::overlay(root, environment, in_files("NCCL_TOPO_FILE"), &node.topology, &mut unknown);
        TaskFacts {
            imex: root.join("dev").is_dir().then(|| root.join(IMEX_CHANNELS).is_dir()),
            gids: index.map(|_| rdma::roce_v2_rows(root, node.rdma.as_deref().unwrap_or_default())),
            overlay,
            nccl_files,
            unknown,
            ..TaskFacts::default()
        }
    }

    /// The same with the rows of the ports' tables, where they are wanted.
    pub fn with_gids(self, root: &Path, ports: &[RdmaPort], wanted: bool) -> TaskFacts {
        let gids = self.gids.or_else(|| wanted.then(|| rdma::roce_v2_rows(root, ports)));
        TaskFacts { gids, ..self }
    }

    /// The same with what is known of a container. One that comes later brings
    /// files of its own, and they are not known.
    pub fn within(self, container: Container, keeps: Vec<String>) -> TaskFacts {
        let known = TaskFacts { container, container_keeps: keeps, ..self };
        if container != Container::ComesLater {
            return known;
        }
        TaskFacts { nccl_files: Vec::new(), shm: None, imex: None, unknown: Vec::new(), ..known }
    }
}

/// The NUMA nodes of this process's cpuset.
fn memory_nodes() -> Option<CpuSet> {
    // Longer than a page for a user of many groups.
    let text = files::regular(Path::new("/proc/self/status"), LONGEST_STATUS).ok()??;
    let text = String::from_utf8_lossy(&text);
    let list = text.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    CpuSet::parse(list).ok().filter(|nodes| !nodes.is_empty())
}

/// The NVIDIA GPUs that this process may not open. A device node that is not there
/// hides its GPU only where another one's is: a container that was given some. No
/// node at all may be a driver that has not made them yet.
fn hidden(root: &Path, gpus: &[Gpu]) -> Vec<PciAddress> {
    let denied = |error: &std::io::Error| matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
    let mut asked = Vec::new();
    for gpu in gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia) {
        if let Some(minor) = gpu.minor {
            asked.push((gpu.place.address, access::may_open(&root.join(format!("dev/nvidia{minor}")))));
        }
    }
    let absent = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    let some_there = asked.iter().any(|(_, answer)| answer.as_ref().err().is_none_or(|error| !absent(error)));
    let is_hidden = |answer: &std::io::Result<()>| {
        answer.as_ref().err().is_some_and(|error| denied(error) || (some_there && absent(error)))
    };
    asked.iter().filter(|(_, answer)| is_hidden(answer)).map(|(address, _)| *address).collect()
}

/// The sets of CPUs that are one core, for the CPUs in `mask`; a CPU whose core the
/// kernel does not tell is in none of them. Only `exclusive` needs them: a file is
/// read for each core.
pub fn cores(root: &Path, mask: &CpuSet) -> Vec<CpuSet> {
    let mut seen = CpuSet::EMPTY;
    let mut cores: Vec<CpuSet> = Vec::new();
    for cpu in mask.iter() {
        if seen.has(cpu) {
            continue;
        }
        let file = root.join(format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
        let core = files::attribute(&file).and_then(|text| CpuSet::parse(&text).ok());
        if let Some(core) = core.filter(|core| core.has(cpu) && !core.meets(&seen)) {
            seen = seen.or(&core);
            cores.push(core);
        }
    }
    cores
}

/// The limit that the program will have. Slurm sets srun's limits after our
/// hook, from SLURM_RLIMIT_*: a number, behind a U where the user asked for it
/// (measured with 22.05.8), and none where nothing is propagated. Beyond the hard
/// limit it fails, and the limit stays.
fn propagated(environment: &Environment, name: &str, now: Option<(u64, u64)>) -> Option<u64> {
    let (soft, hard) = now?;
    let asked = environment.get(name).and_then(|text| text.strip_prefix('U').unwrap_or(text).parse::<u64>().ok());
    Some(asked.filter(|asked| *asked <= hard).unwrap_or(soft))
}

/// NCCL's files in its order: NCCL_CONF_FILE, or in its absence ~/.nccl.conf, and
/// /etc/nccl.conf; the first that names a variable decides (NCCL,
/// src/misc/param.cc). NCCL takes the home directory of the user's account, and
/// we that of HOME, because an account may only be known to a server.
fn nccl_files(root: &Path, environment: &Environment, unknown: &mut Vec<String>) -> Vec<FileValue> {
    let below = |path: &str| root.join(path.strip_prefix('/').unwrap_or(path));
    let named = environment.get("NCCL_CONF_FILE").filter(|file| !file.is_empty());
    let home = environment.get("HOME").filter(|home| home.starts_with('/'));
    let own = match (named, home) {
        // Not expanded, and relative to the working directory, as NCCL takes it.
        (Some(file), _) if file.starts_with('/') => Some((below(file), file.to_string())),
        (Some(file), _) => Some((PathBuf::from(file), file.to_string())),
        (None, Some(home)) => {
            let file = format!("{}/.nccl.conf", home.trim_end_matches('/'));
            Some((below(&file), file))
        }
        (None, None) => None,
    };
    // Where /etc waits for a server, no program starts at all.
    let own = own.map(|(path, file)| (in_a_child(&path), file));
    let everyones = (settings_in(&below("/etc/nccl.conf")), "/etc/nccl.conf".to_string());
    let mut values: Vec<FileValue> = Vec::new();
    for (settings, file) in own.into_iter().chain([everyones]) {
        match settings {
            Ok(found) => {
                for (name, value) in found {
                    if !values.iter().any(|known| known.name == name) {
                        values.push(FileValue { name, value, file: file.clone() });
                    }
                }
            }
            Err(why) => unknown.push(format!("{} not read: {why}", crate::config::printable(&file))),
        }
    }
    values
}

type Pairs = Vec<(String, String)>;

fn settings_in(path: &Path) -> Result<Pairs, String> {
    let text = files::regular(path, LONGEST_FILE).map_err(|error| error.to_string())?;
    Ok(text.map(|text| parse(&String::from_utf8_lossy(&text))).unwrap_or_default())
}

/// The same where a file server may be dead.
fn in_a_child(path: &Path) -> Result<Pairs, String> {
    let answer = child::run(PATIENCE, || match settings_in(path) {
        Ok(pairs) => encode(&pairs),
        Err(why) => format!("!{why}").into_bytes(),
    });
    let answer = answer.map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&answer);
    if let Some(why) = text.strip_prefix('!') {
        return Err(why.to_string());
    }
    let pairs = text.strip_prefix('=').unwrap_or_default().split('\0');
    Ok(pairs.filter_map(|pair| pair.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect())
}

/// "=" and the pairs, each ended by a NUL.
fn encode(pairs: &[(String, String)]) -> Vec<u8> {
    let text: String = pairs.iter().map(|(name, value)| format!("{name}={value}\0")).collect();
    format!("={text}").into_bytes()
}

/// `NAME=value` lines as NCCL takes them: no white space is removed, no quotes,
/// a comment only where # is the first character.
fn parse(text: &str) -> Pairs {
    let mut pairs: Pairs = Vec::new();
    for line in text.split('\n').filter(|line| !line.starts_with('#')) {
        // For NCCL the line ends at a NUL.
        let line = line.split('\0').next().unwrap_or_default();
        let Some((name, value)) = line.split_once('=') else {
            continue;
        };
        let known = READ_AFTER.iter().any(|prefix| name.starts_with(prefix));
        if known && !pairs.iter().any(|(earlier, _)| earlier == name) {
            pairs.push((name.into(), value.into()));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::time::Instant;

    use super::*;
    use crate::facts::pci::Place;
    use crate::facts::rdma::tests::Tree;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn read(tree: &Tree, pairs: &[(&str, &str)]) -> (Vec<(String, String, String)>, Vec<String>) {
        let mut unknown = Vec::new();
        let values = nccl_files(tree.root(), &environment(pairs), &mut unknown);
        (values.into_iter().map(|value| (value.name, value.value, value.file)).collect(), unknown)
    }

    fn triple(name: &str, value: &str, file: &str) -> (String, String, String) {
        (name.into(), value.into(), file.into())
    }

    /// <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>, "System
    /// configuration", and NCCL's setEnvFile.
    #[test]
    fn lines_are_taken_as_nccl_takes_them() {
        let text = "# NCCL_DEBUG=TRACE\n #NCCL_DEBUG=1\nNCCL_DEBUG=WARN\nNCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME==ens1f0\n\
                    export NCCL_ALGO=Ring\nNCCL_PROTO = LL\nNCCL_IB_TIMEOUT=22 # two minutes\nNCCL_IB_HCA=\nword\n\
                    LD_PRELOAD=/tmp/x.so\nFI_PROVIDER=efa";
        let expected = [
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_SOCKET_IFNAME", "=ens1f0"),
            ("NCCL_PROTO ", " LL"),
            ("NCCL_IB_TIMEOUT", "22 # two minutes"),
            ("NCCL_IB_HCA", ""),
            ("FI_PROVIDER", "efa"),
        ];
        assert_eq!(parse(text), expected.map(|(name, value)| (name.to_string(), value.to_string())));
        assert_eq!(parse("\0\0NCCL_X=1\nNCCL_Y=\0z"), [("NCCL_Y".to_string(), String::new())]);
    }

    #[test]
    fn the_user_s_file_comes_first_and_a_named_one_replaces_it() {
        let tree = Tree::new("nccl-files");
        tree.file("etc/nccl.conf", "NCCL_DEBUG=WARN\nNCCL_IB_TC=41\n");
        tree.file("home/u/.nccl.conf", "NCCL_DEBUG=INFO\n");
        tree.file("data/my.conf", "NCCL_IB_SL=1\n");
        let everyones = |name, value| triple(name, value, "/etc/nccl.conf");
        let (values, unknown) = read(&tree, &[("HOME", "/home/u/")]);
        assert_eq!(values, [triple("NCCL_DEBUG", "INFO", "/home/u/.nccl.conf"), everyones("NCCL_IB_TC", "41")]);
        assert!(unknown.is_empty());
        let (values, _) = read(&tree, &[("HOME", "/home/u"), ("NCCL_CONF_FILE", "/data/my.conf")]);
        assert_eq!(
            values,
            [
                triple("NCCL_IB_SL", "1", "/data/my.conf"),
                everyones("NCCL_DEBUG", "WARN"),
                everyones("NCCL_IB_TC", "41")
            ]
        );
        // Named but not there: the home directory's is replaced all the same. No HOME: only /etc.
        for pairs in [&[("HOME", "/home/u"), ("NCCL_CONF_FILE", "~/.nccl.conf")][..], &[("NCCL_CONF_FILE", "")], &[]] {
            assert_eq!(read(&tree, pairs).0, [everyones("NCCL_DEBUG", "WARN"), everyones("NCCL_IB_TC", "41")]);
        }
    }

    #[test]
    fn what_is_no_file_or_no_text_is_a_line_and_no_fault() {
        let tree = Tree::new("nccl-odd-files");
        tree.file("big/.nccl.conf", &"NCCL_DEBUG=INFO\n".repeat(5000));
        tree.file("garbage/.nccl.conf", "\u{0}\u{ff}==\n=\n\n");
        std::fs::create_dir_all(tree.root().join("folder/.nccl.conf")).unwrap();
        std::fs::create_dir_all(tree.root().join("fifo")).unwrap();
        let fifo = CString::new(tree.root().join("fifo/.nccl.conf").as_os_str().as_bytes()).unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        std::os::unix::fs::symlink("/dev/zero", tree.root().join("zero")).unwrap();
        let start = Instant::now();
        for (home, expected) in
            [("/big", "more than 65536 bytes"), ("/folder", "not a regular file"), ("/fifo", "not a regular file")]
        {
            let (values, unknown) = read(&tree, &[("HOME", home)]);
            assert!(values.is_empty(), "{home}");
            assert!(unknown.len() == 1 && unknown[0].contains(expected), "{home}: {unknown:?}");
            assert!(unknown[0].starts_with(&format!("{home}/.nccl.conf not read: ")), "{unknown:?}");
        }
        let (values, unknown) = read(&tree, &[("NCCL_CONF_FILE", "/zero")]);
        assert!(values.is_empty() && unknown[0].contains("not a regular file"), "{unknown:?}");
        tree.file("many/.nccl.conf", &(0..4000).map(|i| format!("NCCL_{i}=123\n")).collect::<String>());
        assert_eq!(read(&tree, &[("HOME", "/many")]).0.len(), 4000);
        assert_eq!(read(&tree, &[("HOME", "/garbage")]), (Vec::new(), Vec::new()));
        assert!(start.elapsed() < PATIENCE, "something waited");
    }

    #[test]
    fn limits_are_those_slurm_will_set() {
        let none = u64::MAX;
        let propagates = environment(&[
            ("PLAIN", "8388608"),
            ("ASKED", "U1024"),
            ("NO_LIMIT", "18446744073709551615"),
            ("WORD", "unlimited"),
        ]);
        for (name, now, expected) in [
            ("PLAIN", (1000, none), 8_388_608),
            ("ASKED", (20_000, 20_000), 1024),
            ("NO_LIMIT", (1000, none), none),
            // Above the hard limit Slurm cannot set it.
            ("NO_LIMIT", (1000, 2000), 1000),
            ("WORD", (1000, none), 1000),
            ("ABSENT", (1000, none), 1000),
        ] {
            assert_eq!(propagated(&propagates, name, Some(now)), Some(expected), "{name} {now:?}");
        }
        assert_eq!(propagated(&propagates, "PLAIN", None), None);
    }

    #[test]
    fn this_process_as_a_task() {
        let facts = TaskFacts::read(Path::new("/"), &environment(&[]), &NodeFacts::default());
        assert!(
            facts.cpus.is_some_and(|cpus| cpus > 0) && facts.mask.is_some_and(|mask| Some(mask.len()) == facts.cpus)
        );
        assert!(facts.memory.allowed.is_some_and(|nodes| !nodes.is_empty()));
        assert!(facts.memlock.is_some() && facts.open_files.is_some() && facts.stack.is_some());
        assert_eq!(facts.gids, None);
        // A recorded machine has files, and no CPUs of ours.
        let tree = Tree::new("task-described");
        tree.file("etc/nccl.conf", "NCCL_IB_GID_INDEX=3\n").file("dev/nvidia-caps-imex-channels/channel0", "");
        let facts = TaskFacts::described(tree.root(), &environment(&[]), &NodeFacts::default());
        let seen = (facts.cpus, facts.shm, facts.imex, facts.gids.clone());
        assert_eq!(seen, (None, None, Some(true), Some(Vec::new())));
        // A container that comes later hides these files.
        assert_eq!(facts.clone().within(Container::Inside, Vec::new()).nccl_files.len(), 1);
        let hidden = facts.within(Container::ComesLater, vec!["A".into()]);
        assert_eq!((hidden.nccl_files.len(), hidden.imex, hidden.container_keeps.len()), (0, None, 1));
    }

    /// The kernel lists them all before the memory nodes: 2,000 numbers take 20 kB.
    #[test]
    fn a_user_of_many_groups_has_memory_nodes_too() {
        let expected = memory_nodes().unwrap();
        let answer = child::run(PATIENCE, || {
            let groups: Vec<libc::gid_t> = (0..2000).map(|number| 1_000_000_000 + number).collect();
            // SAFETY: a live slice and its length; this is a child of the test's own.
            match unsafe { libc::setgroups(groups.len(), groups.as_ptr()) } {
                0 => format!("{:?}", memory_nodes()).into_bytes(),
                _ => b"skipped".to_vec(),
            }
        });
        match answer.unwrap() {
            skipped if skipped == b"skipped" => println!("skipped: groups are root's to set"),
            found => assert_eq!(String::from_utf8(found).unwrap(), format!("{:?}", Some(expected))),
        }
    }

    /// The node's GPUs with these numbers of their device files, one bus each.
    fn gpus(minors: &[u32]) -> Vec<Gpu> {
        let gpu = |(index, minor): (usize, &u32)| Gpu {
            vendor: GpuVendor::Nvidia,
            place: Place::of(address(index)),
            model: None,
            uuid: None,
            minor: Some(*minor),
            memory_node: None,
        };
        minors.iter().enumerate().map(gpu).collect()
    }

    fn address(index: usize) -> PciAddress {
        PciAddress { domain: 0, bus: index as u8, device: 0, function: 0 }
    }

    /// As the file's mode hides a device from somebody who is not root; the device
    /// cgroup answers the same question with EPERM, which a test on a real Slurm shows.
    #[test]
    fn gpus_that_may_not_be_opened_are_hidden() {
        use std::os::unix::fs::PermissionsExt;
        let tree = Tree::new("task-hidden");
        for (minor, mode) in [(3, 0o666), (0, 0o000), (1, 0o444)] {
            tree.file(&format!("dev/nvidia{minor}"), "");
            let file = tree.root().join(format!("dev/nvidia{minor}"));
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let gpus = gpus(&[3, 0, 1, 2]);
        let answer = child::run(PATIENCE, || {
            // SAFETY: takes numbers; this is a child of the test's own.
            unsafe { libc::setuid(65_534) };
            hidden(tree.root(), &gpus).iter().map(|address| address.bus).collect()
        });
        // The fourth has no file at all where others have one.
        assert_eq!(answer.unwrap(), [1, 2, 3]);
    }

    #[test]
    fn without_any_device_file_nothing_is_known() {
        let tree = Tree::new("task-no-devices");
        tree.file("dev/nvidiactl", "").file("dev/nvidia-uvm", "");
        assert_eq!(hidden(tree.root(), &gpus(&[0, 1])), []);
        tree.file("dev/nvidia1", "");
        assert_eq!(hidden(tree.root(), &gpus(&[0, 1])), [address(0)]);
        // Of a GPU without a number nothing is known, and none is AMD's.
        let mut others = gpus(&[0, 0]);
        (others[0].minor, others[1].vendor) = (None, GpuVendor::Amd);
        assert_eq!(hidden(tree.root(), &others), []);
    }

    #[test]
    fn cores_are_read_for_the_mask_only() {
        let tree = Tree::new("task-cores");
        let core = |cpu: u32, text: &str| {
            tree.file(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), text);
        };
        for cpu in 0..4 {
            core(cpu, &format!("{},{}\n", cpu, cpu + 4));
            core(cpu + 4, &format!("{},{}\n", cpu, cpu + 4));
        }
        let set = |text| CpuSet::parse(text).unwrap();
        assert_eq!(cores(tree.root(), &set("0-1,4-5,7")), [set("0,4"), set("1,5"), set("3,7")]);
        // Not its own, another core's, no list, no file: in none of them.
        core(1, "2\n");
        core(5, "0,5\n");
        core(2, "x");
        assert_eq!(cores(tree.root(), &set("0-2,4-5,100")), [set("0,4")]);
        assert_eq!(cores(tree.root(), &CpuSet::EMPTY), []);
    }
}
