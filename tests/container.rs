//! A container plugin before and after ours in plugstack.conf, on a real Slurm:
//! whose values hold inside, that the ranks meet although nothing of ours and no
//! name of the cluster exists there, and what is said where it cannot be mended.
//!
//! The plugin is a stand-in for pyxis, tests/host/container_plugin.c: it makes
//! the namespaces and imports the image's environment as pyxis does. What it
//! cannot show: another root file system with a C library of its own, pyxis'
//! seccomp filter, an image that takes minutes to import.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use common::tasks::{Run, Task};
use common::{Sandbox, container_plugin, library, open_folder, target, user_namespaces};

/// The stand-in, built once.
fn plugin() -> Option<PathBuf> {
    static PLUGIN: OnceLock<Option<PathBuf>> = OnceLock::new();
    PLUGIN.get_or_init(|| container_plugin(&common::slurm_headers())).clone()
}

#[derive(Clone, Copy)]
enum Order {
    Before,
    After,
}

struct Cluster(Sandbox);

impl Cluster {
    /// Two nodes of their own, 10.99.0.1 and 10.99.0.2; the container plugin
    /// before or after ours, which reads the node's facts below `node`.
    fn up(name: &str, order: Order) -> Option<Cluster> {
        let theirs = format!("required {}", plugin()?.display());
        let dir = std::env::temp_dir().join(format!("palingenesis-test-container-{name}-{}", std::process::id()));
        let ours = format!("required {} root={}", library().display(), dir.join("home/node").display());
        let lines = match order {
            Order::Before => [theirs, ours],
            Order::After => [ours, theirs],
        };
        let arguments = ["--names", "node001,node002", "--cores", "4", "--namespace-per-node"];
        let plugstack = ["--plugstack", &lines[0], "--plugstack", &lines[1]];
        let sandbox = Sandbox::up(&format!("container-{name}"), &[&arguments[..], &plugstack].concat())?;
        assert_eq!(sandbox.dir(), dir);
        // The driver's file of a GPU, as /proc has it, for each of a node's ranks.
        for bus in 1..=4 {
            let gpu = sandbox.dir().join(format!("home/node/proc/driver/nvidia/gpus/0000:0{bus}:00.0"));
            fs::create_dir_all(&gpu).unwrap();
            fs::write(gpu.join("information"), "Model: \t\t NVIDIA B200\nIRQ:   \t\t 99\n").unwrap();
        }
        user_namespaces().then_some(Cluster(sandbox))
    }

    /// A directory that stands for an image, with these files. Inside, this
    /// build, the plugins and the node's facts are not to be seen, and no name
    /// of the cluster is known.
    fn image(&self, environ: &str, files: &[(&str, &str)]) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let folder = self.0.dir().join(format!("home/image-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&folder).unwrap();
        let mut hidden = vec![target(), self.node_facts()];
        if !open_folder().starts_with(target()) && !open_folder().starts_with(target().parent().unwrap()) {
            hidden.push(open_folder());
        }
        let infiniband = PathBuf::from("/sys/class/infiniband");
        if infiniband.is_dir() {
            hidden.push(infiniband);
        }
        let hidden: String = hidden.iter().map(|path| format!("{}\n", path.display())).collect();
        let standard = [
            ("environ", environ),
            ("hosts", "127.0.0.1 localhost\n"),
            ("nsswitch.conf", "hosts: files\n"),
            ("hide", &hidden),
        ];
        for (name, text) in standard.iter().chain(files) {
            fs::write(folder.join(name), text).unwrap();
        }
        folder.display().to_string()
    }

    fn node_facts(&self) -> PathBuf {
        self.0.dir().join("home/node")
    }

    #[track_caller]
    fn record(&self, line: &str) -> Run {
        self.0.record(line)
    }
}

/// <https://github.com/NVIDIA/pyxis/issues/124>: what the job had set, and what
/// an image had that replaced it.
const USERS: [(&str, &str); 3] =
    [("NCCL_IB_PCI_RELAXED_ORDERING", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "16"), ("UV_CACHE_DIR", "/shared/uv")];
const IMAGE: &str = "NCCL_IB_PCI_RELAXED_ORDERING=0\nCUDA_DEVICE_MAX_CONNECTIONS=8\nUV_CACHE_DIR=/root/.cache/uv\n";

/// What an image has for itself.
const IMAGE_S_OWN: [(&str, &str); 4] = [
    ("PATH", "/opt/image/bin:/usr/bin:/bin"),
    ("LD_LIBRARY_PATH", "/opt/image/lib"),
    ("PYTHONPATH", "/opt/image/python"),
    ("HOME", "/root"),
];

/// What enroot's hook 50-slurm-pytorch.sh adds to an image with PyTorch, were it
/// wrong in everything.
const HOOK: &str =
    "PYTORCH_VERSION=2.7.1\nMASTER_ADDR=node002\nMASTER_PORT=61044\nWORLD_SIZE=7\nRANK=6\nLOCAL_RANK=5\n";

fn lines(pairs: &[(&str, &str)], between: &str) -> String {
    pairs.iter().map(|(name, value)| format!("{name}={value}{between}")).collect()
}

#[track_caller]
fn has(task: &Task, pairs: &[(&str, &str)]) {
    for (name, value) in pairs {
        assert_eq!(task.get(name), Some(*value), "{name}:\n{task}");
    }
}

/// Inside no name of a node resolves, so all ranks have rank 0's address.
#[track_caller]
fn meet_at_the_address(cluster: &Cluster, run: &Run, label: &str) {
    cluster.0.check_ranks(run.tasks(label));
    for task in run.tasks(label) {
        assert_eq!(task.get("MASTER_ADDR"), Some("10.99.0.1"), "{task}");
        assert!((20000..=31999).contains(&task.number("MASTER_PORT")), "{task}");
    }
}

/// <https://github.com/NVIDIA/pyxis/issues/124>
#[test]
fn after_the_container_plugin_the_user_s_values_hold_and_the_image_keeps_its_own() {
    let Some(cluster) = Cluster::up("before", Order::Before) else { return };
    let users = lines(&USERS, " ");
    let environ = format!("{IMAGE}{}{HOOK}NCCL_DEBUG=INFO\nNCCL_NET_GDR_LEVEL=LOC\n", lines(&IMAGE_S_OWN, "\n"));
    let same = cluster.image(&environ, &[]);
    let remapped = cluster.image(&environ, &[("remap-root", "")]);
    for (label, image) in [("same", &same), ("remapped", &remapped)] {
        let hidden = target().join("deps");
        let run = cluster.record(&format!(
            "{users} LD_LIBRARY_PATH=/u PYTHONPATH=/u srun --palingenesis --container-image={image} -N2 \
             --ntasks-per-node=2 RECORD {label}
             srun --palingenesis --container-image={image} -N2 --ntasks-per-node=2 /bin/sh -c \
             'id -u; ls -A {} | wc -l; ls -A {} | wc -l; getent hosts node001 || echo unknown'",
            hidden.parent().unwrap().display(),
            cluster.node_facts().display(),
        ));
        assert_eq!(run.said.err, "", "{label}");
        let uid = if label == "remapped" { "0" } else { "1001" };
        let mut inside: Vec<&str> = run.said.out.lines().collect();
        inside.sort_unstable();
        let mut wanted = [[uid; 4], ["0"; 4], ["0"; 4], ["unknown"; 4]].concat();
        wanted.sort_unstable();
        assert_eq!(inside, wanted, "{label}: it is no container");
        meet_at_the_address(&cluster, &run, label);
        for task in run.tasks(label) {
            has(task, &USERS);
            has(task, &IMAGE_S_OWN);
            has(task, &[("NCCL_DEBUG", "INFO"), ("NCCL_NET_GDR_LEVEL", "LOC"), ("PYTORCH_VERSION", "2.7.1")]);
        }
    }

    // Who decided, in the words of show.
    let said = cluster.0.run(&format!("{users} srun --palingenesis=show --container-image={same} -N2 /bin/true")).ok();
    let row = |name: &str| {
        let row = said.err.lines().find(|line| line.split_whitespace().next() == Some(name));
        row.unwrap_or_else(|| panic!("{name} is not in:\n{}", said.err))
    };
    for ((name, value), image) in USERS.iter().zip(["0", "8", "/root/.cache/uv"]) {
        let row = row(name);
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[1..3], [*value, "user"], "{row}");
        assert!(row.ends_with(&format!("the container image has {image}")), "{row}");
    }
    assert!(row("NCCL_DEBUG").contains("the container image's, kept"), "{}", row("NCCL_DEBUG"));

    // Without a word of the user's the image stands above the profile, and the
    // node's facts, which are hidden inside, decide what the profile says.
    let plain = cluster.image(&lines(&IMAGE_S_OWN, "\n"), &[]);
    let eight = cluster.image("CUDA_DEVICE_MAX_CONNECTIONS=8\n", &[]);
    let run = cluster.record(&format!(
        "srun --palingenesis --container-image={plain} -N2 RECORD fact
         srun --palingenesis --container-image={eight} -N2 RECORD image
         # No container: the user's own, and nothing of a snapshot.
         {users} srun --palingenesis -N2 RECORD none"
    ));
    for (label, value) in [("fact", "32"), ("image", "8"), ("none", "16")] {
        for task in run.tasks(label) {
            has(task, &[("CUDA_DEVICE_MAX_CONNECTIONS", value)]);
        }
    }
    assert_eq!(run.said.err, "");

    // Exit codes are the program's, as without us.
    let code = |options: &str| {
        let line = format!("srun {options} --container-image={same} -N2 /bin/sh -c 'exit $((40 + SLURM_PROCID))'");
        cluster.0.run(&line).code
    };
    assert_eq!((code("--palingenesis"), code("")), (41, 41));
}

/// A cluster with job_container/tmpfs that works. The kernel refuses to bind some
/// mount namespaces below others (EINVAL of slurmd's `_create_ns`; measured with
/// Linux 6.18, in about every second cluster and then for all of its jobs).
fn with_private_tmp(options: &[&str]) -> Option<Sandbox> {
    let slurm = Sandbox::up("container-tmpfs", options)?;
    let etc = slurm.dir().join("etc/slurm");
    fs::write(etc.join("job_container.conf"), "AutoBasePath=true\nBasePath=/run/palingenesis-tmp\n").unwrap();
    let conf = fs::read_to_string(etc.join("slurm.conf")).unwrap();
    fs::write(etc.join("slurm.conf"), format!("{conf}JobContainerType=job_container/tmpfs\n")).unwrap();
    slurm.restart_slurmd();
    let works = (0..2).all(|_| slurm.run("srun -Q true").code == 0);
    works.then_some(slurm)
}

/// Under job_container/tmpfs every job has a mount namespace of its own from its
/// tasks on, which is no container: what a plugin before us sets there counts as
/// the user's, as it does elsewhere.
#[test]
fn a_private_tmp_is_no_container() {
    if common::slurm_root().is_some() {
        // setns(2) takes a task to the root of its mount namespace, and out of the tree.
        return println!("skipped: job_container/tmpfs does not work in the chroot of a tree");
    }
    let Some(plugin) = plugin() else { return };
    let plugstack = [format!("required {}", plugin.display()), format!("required {}", library().display())];
    let options = ["--conf", "PrologFlags=Contain", "--plugstack", &plugstack[0], "--plugstack", &plugstack[1]];
    let started = (0..8).find_map(|_| {
        let slurm = with_private_tmp(&options)?;
        // Not in /tmp, which is another one in the task.
        let image = "/run/variables";
        slurm
            .run_root(&format!(
                "mkdir {image}; echo NCCL_IB_TIMEOUT=21 >{image}/environ; echo NCCL_DEBUG=INFO >>{image}/environ
                 touch {image}/outside"
            ))
            .ok();
        let said = slurm.run(&format!(
            "cd /; readlink /proc/self/ns/mnt
             NCCL_IB_TIMEOUT=20 srun -Q --palingenesis=show,container-order=off --container-image={image} /bin/sh -c \
             'readlink /proc/self/ns/mnt; echo $NCCL_IB_TIMEOUT'"
        ));
        // It may come later, too: slurmd then never has the job's /tmp ready, and no
        // task and no hook of a step is reached.
        (!said.err.contains("are still not ready")).then_some(said)
    });
    let Some(said) = started else {
        println!("skipped: no cluster whose jobs could have a /tmp of their own");
        return;
    };
    let said = said.ok();
    let [outside, inside, timeout] = said.out.lines().collect::<Vec<_>>()[..] else { panic!("{said:?}") };
    assert!(outside != inside, "the task has no mount namespace of its own: {said:?}");
    assert_eq!(timeout, "21");
    assert!(!said.err.contains("container image") && said.err.contains("yours, kept"), "{}", said.err);
}

/// <https://github.com/NVIDIA/pyxis/issues/101>,
/// <https://github.com/NVIDIA/enroot/issues/136>
#[test]
fn a_container_without_home_path_and_slurm_changes_nothing() {
    let Some(cluster) = Cluster::up("bare", Order::Before) else { return };
    // Nothing of Slurm is in the image, and its PATH leads nowhere.
    let bare = cluster.image("PATH=/nonexistent\n", &[]);
    let hide = format!("{bare}/hide");
    let hidden = fs::read_to_string(&hide).unwrap();
    fs::write(&hide, format!("{hidden}/etc/slurm\n")).unwrap();
    let run = cluster.record(&format!(
        "srun --palingenesis --container-image={bare} --export=NONE -N2 --ntasks-per-node=2 RECORD none
         srun --palingenesis --container-image={bare} --export=X=1 -N2 --ntasks-per-node=2 RECORD one
         {users} srun --palingenesis --container-image={bare} --export=UV_CACHE_DIR -N2 --ntasks-per-node=2 RECORD some
         PATH=/nonexistent /usr/bin/srun --palingenesis --container-image={bare} -N2 --ntasks-per-node=2 RECORD path
         srun --container-image={bare} --export=NONE -N2 -n4 RECORD off",
        users = lines(&USERS, " "),
    ));
    assert_eq!(run.said.err, "");
    for label in ["none", "one", "some", "path"] {
        meet_at_the_address(&cluster, &run, label);
    }
    for task in run.tasks("none").iter().chain(run.tasks("one")) {
        has(task, &[("PATH", "/nonexistent"), ("NCCL_DEBUG", "WARN")]);
        assert_eq!(task.get("UV_CACHE_DIR"), None);
    }
    for task in run.tasks("one") {
        has(task, &[("X", "1")]);
    }
    for task in run.tasks("some") {
        has(task, &[("UV_CACHE_DIR", "/shared/uv")]);
        assert_eq!(task.get("NCCL_IB_PCI_RELAXED_ORDERING"), None, "it was not exported");
    }
    for task in run.tasks("off") {
        task.is_untouched();
    }
}

/// <https://github.com/NVIDIA/pyxis/issues/124>: before the plugin nothing can
/// be put back, so the list for `--container-env` is told, once.
#[test]
fn before_the_container_plugin_the_names_to_keep_are_told_once() {
    let Some(cluster) = Cluster::up("after", Order::After) else { return };
    let users = lines(&USERS, " ");
    let image = cluster.image(&format!("{IMAGE}{HOOK}"), &[]);
    let all = "-N2 --ntasks-per-node=2";
    let run = cluster.record(&format!("{users} srun --palingenesis --container-image={image} {all} RECORD a"));
    let [warning] = run.said.ours()[..] else { panic!("not one line: {}", run.said.err) };
    assert!(warning.starts_with("palingenesis: warning: ") && warning.ends_with("[container-order]"), "{warning}");
    let list = warning.split_once("--container-env=").unwrap().1.split(", or ask").next().unwrap().to_string();
    let names: Vec<&str> = list.split(',').collect();
    for (name, _) in USERS {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    // What the image did not have is right, and the ranks pyxis itself sets.
    for task in run.tasks("a") {
        has(task, &[("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("NCCL_DEBUG", "WARN"), ("MASTER_ADDR", "node002")]);
        assert_eq!(task.get("RANK"), task.get("SLURM_PROCID"));
        assert_eq!(task.get("LOCAL_WORLD_SIZE"), Some("2"));
        assert!(task.iter().all(|(name, _)| !name.starts_with("SLURM_PALINGENESIS_")), "{task}");
    }

    // With the list as it was told there is nothing to tell, in every way that
    // srun can be given it.
    let run = cluster.record(&format!(
        "{users} srun --palingenesis --container-image={image} --container-env={list} {all} RECORD option
         {users} srun --palingenesis --container-im {image} --container-e {list} {all} RECORD short
         {users} salloc -Q {all} --container-image={image} --container-env={list} srun --palingenesis RECORD inherited"
    ));
    assert_eq!(run.said.err, "");
    for label in ["option", "short", "inherited"] {
        // Looked up before the container, by the node's own resolver.
        cluster.0.check(run.tasks(label));
        for task in run.tasks(label) {
            has(task, &USERS);
        }
    }

    // Some of them, the refusal for who wants it, and what is no container.
    let try_it = |options: &str| cluster.0.run(&format!("{users} srun -Q --palingenesis{options} {all} /bin/true"));
    let said = try_it(&format!(" --container-image={image} --container-env=UV_CACHE_DIR,OTHER")).ok();
    let [warning] = said.ours()[..] else { panic!("not one line: {}", said.err) };
    assert!(warning.contains("CUDA_DEVICE_MAX_CONNECTIONS,") && !warning.contains("UV_CACHE_DIR"), "{warning}");
    assert_eq!(try_it(&format!("=container-order=error --container-image={image}")).code, 78);
    assert_eq!(try_it(&format!("=container-order=off --container-image={image}")).ok().err, "");
    assert_eq!(try_it("").ok().err, "");
    let said = cluster.0.run(&format!("srun -Q --palingenesis {all} /bin/true --container-image={image}")).ok();
    assert_eq!(said.err, "", "a word of the program's");
    let said = cluster.0.run(&format!("PYXIS_CONTAINER_IMAGE=x srun -Q --palingenesis {all} /bin/true")).ok();
    assert_eq!(said.ours().len(), 1, "{}", said.err);
}

/// With a container the ranks of a node wait for each other much longer; not
/// for one whose container never came to be.
#[test]
fn a_rank_without_its_container_is_not_waited_for() {
    let Some(cluster) = Cluster::up("broken", Order::Before) else { return };
    let image = cluster.image("UV_CACHE_DIR=/root/uv\n", &[("broken", "1")]);
    let line = format!("srun --palingenesis --container-image={image} -N2 --ntasks-per-node=2 /bin/sh -c 'echo $RANK'");
    let said = cluster.0.run(&line);
    assert!(said.code != 0 && said.code != 124, "{said:?}");
    assert!(said.err.contains("container: broken"), "{}", said.err);
    // A node that hears of the other's first says nothing of its own.
    let told = |node| {
        let told =
            format!("palingenesis: error: local rank 1 on {node} ended before the start: no rank of the step starts");
        said.ours().iter().filter(|line| line.starts_with(&told)).count()
    };
    assert!(matches!((told("node001"), told("node002")), (1, 0 | 1) | (0, 1)), "{}", said.err);
    assert_eq!(said.out, "");
}

/// The ranks of one node start a minute after the others': those wait in their
/// programs, as they would without us, and nobody gives up or warns. And the
/// ranks of a node may come to the start as far apart as a plugin likes that
/// imports the image for one after the other: here 70 s, and gate= is 60 s.
#[test]
fn a_node_that_is_a_minute_late_is_waited_for() {
    let Some(cluster) = Cluster::up("late", Order::Before) else { return };
    let image = cluster.image("UV_CACHE_DIR=/root/uv\n", &[("late", "node001 60")]);
    let apart = cluster.image("UV_CACHE_DIR=/root/uv\n", &[("apart", "70")]);
    // The late node is rank 0's: the others find nobody listening for a minute.
    let program = cluster.0.dir().join("home/sum.py");
    fs::write(&program, SUM).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    // Both at once, to wait once. Each rank has a GPU to itself.
    let line = format!(
        "export CUDA_VISIBLE_DEVICES=0
         srun -Q --palingenesis --container-image={image} -N2 -n2 --overcommit /usr/bin/python3 -u {program} & late=$!
         export CUDA_VISIBLE_DEVICES=0,1
         srun -Q --palingenesis --container-image={apart} -N2 -n4 --overcommit /usr/bin/python3 -u {program} & apart=$!
         wait $late && wait $apart",
        program = program.display(),
    );
    let said = cluster.0.run_as(&[], &line, 140).ok();
    assert_eq!(said.err, "");
    let count = |text: &str| said.out.lines().filter(|line| *line == text).count();
    assert_eq!((count("11 of 2"), count("1111 of 4")), (2, 4), "{}", said.out);
    assert!(said.took.as_secs() >= 60, "nobody was late: {:?}", said.took);
}

/// A sum over all ranks with plain sockets: rank 0 gathers and tells.
const SUM: &str = r#"
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own = 10 ** rank
if rank == 0:
    server = socket.create_server(place)
    others = [server.accept()[0] for _ in range(size - 1)]
    total = own + sum(int(other.makefile().readline()) for other in others)
    for other in others:
        other.sendall(b"%d\n" % total)
else:
    for _ in range(1200):
        try:
            server = socket.create_connection(place, 5)
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise SystemExit("nobody listens at %s %s" % place)
    server.settimeout(120)
    server.sendall(b"%d\n" % own)
    total = int(server.makefile().readline())
print(total, "of", size)
"#;

/// palingenesis-worker is looked for where the task is. Where its plugin comes
/// after ours nobody can look, and nothing is refused.
#[test]
fn the_worker_is_looked_for_inside_the_container() {
    if Path::new("/usr/bin/palingenesis-worker").exists() || Path::new("/usr/local/bin/palingenesis-worker").exists() {
        return println!("skipped: palingenesis-worker is installed on this machine");
    }
    let Some(cluster) = Cluster::up("worker", Order::Before) else { return };
    let folder = cluster.0.dir().join("home/worker");
    fs::create_dir(&folder).unwrap();
    let worker = folder.join("palingenesis-worker");
    // The command's first word comes in the variable up to 23.02, and with the others since.
    fs::write(&worker, "#!/bin/sh\necho $RANK $PALINGENESIS_WORKER_ARG $*\n").unwrap();
    fs::set_permissions(&worker, PermissionsExt::from_mode(0o755)).unwrap();
    let worker = worker.display().to_string();
    let theirs = format!("required {}", plugin().unwrap().display());
    let ours = format!("required {} worker={worker}", library().display());
    cluster.0.plugstack(&[&theirs, &ours]);
    let run = |image: &str| {
        cluster.0.run(&format!(
            "srun -Q -N2 --ntasks-per-node=2 --container-image={image} --palingenesis=worker train.toml a | sort"
        ))
    };
    let without = format!("{}\n{}\n", folder.display(), target().display());
    let (with, without) = (cluster.image("", &[]), cluster.image("PATH=/usr/bin:/bin\n", &[("hide", &without)]));
    let everywhere = "0 train.toml a\n1 train.toml a\n2 train.toml a\n3 train.toml a\n";
    let said = run(&with);
    assert_eq!((said.out.as_str(), said.ours().len()), (everywhere, 0), "{said:?}");

    let said = run(&without);
    assert_eq!((said.out.as_str(), said.ours().len()), ("", 2), "{said:?}");
    let cure = format!("add --container-mounts={worker}:{worker} to srun");
    for node in ["node001", "node002"] {
        let start = format!(
            "palingenesis: error: palingenesis-worker is not in the container on {node}: looked at {worker} (not there), "
        );
        assert!(said.ours().iter().any(|line| line.starts_with(&start) && line.contains(&cure)), "{said:?}");
    }

    cluster.0.plugstack(&[&ours, &theirs]);
    let said = run(&with);
    assert_eq!(said.out, everywhere, "{said:?}");
    assert!(said.err.contains("[worker-unseen]"), "{said:?}");
}

/// Caches inside: of a root that is mounted, of one that is not, where the image
/// has its own, and as root of a user namespace.
#[test]
fn caches_in_a_container_are_those_that_were_asked_for() {
    let Some(cluster) = Cluster::up("caches", Order::Before) else { return };
    let environ = "HF_HOME=/root/hf\nTRITON_CACHE_DIR=/root/triton\n";
    let node = |line: &str| cluster.0.run_as(&["--as-root", "--node", "node001"], line, 20).ok().out;
    node("mkdir -m 777 /dev/shm/of-root");
    for (label, files) in [("same", &[][..]), ("remapped", &[("remap-root", "")])] {
        let image = cluster.image(environ, files);
        let root = format!("/dev/shm/{label}");
        let run = cluster.record(&format!(
            "srun --palingenesis=cache={root},shared-local=off,dir-shared=off --container-image={image} -N2 --ntasks-per-node=2 RECORD c"
        ));
        assert_eq!(run.said.err, "", "{label}");
        for task in run.tasks("c") {
            has(task, &[("HF_HOME", &format!("{root}/huggingface")), ("TRITON_CACHE_DIR", "/root/triton")]);
            // The user's id in the name, whatever the container shows.
            has(task, &[("CUDA_CACHE_PATH", "/tmp/palingenesis-1001/cuda")]);
        }
        assert_eq!(node(&format!("stat -c '%U %a' {root} {root}/*")), "trainer 700\n".repeat(5), "{label}");

        // On the node that has the directory; Slurm would take the other one while the step before
        // is cleaned up.
        let refused = |root: &str, parts: [&str; 2]| {
            let line =
                format!("srun -w node001 --palingenesis=cache={root} --container-image={image} -N1 -n2 /bin/echo RAN");
            let said = cluster.0.run(&line);
            assert_eq!((said.code, said.out.as_str(), said.ours().len()), (78, "", 1), "{label}: {said:?}");
            assert!(said.err.contains(&format!("cache={root} ")), "{label}: {said:?}");
            assert!(parts.iter().all(|part| said.err.contains(part)), "{label}: {said:?}");
        };
        refused("/lustre/me", ["/lustre is not mounted in the container", "--container-mounts=/lustre/me:/lustre/me"]);
        // Root's directory in a place open to all: inside it might be anybody's.
        refused("/dev/shm/of-root", ["not to be seen here (id 65534)", "--container-mounts=/dev/shm/of-root:/caches"]);
    }
    let said = cluster.0.run("srun --palingenesis=cache=/dev/shm/of-root -w node001 -N1 -n2 /bin/true").ok();
    assert_eq!(said.err, "", "outside it is known to be root's");
}
