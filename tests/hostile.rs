//! Binding on a real Slurm where everything goes wrong: ranks that are killed at
//! any moment of their start, a machine whose files are garbage, topology files
//! that are none. The ranks that live start, no CPU gets two owners, and nothing
//! waits for ever.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::crossed::{CROSSED, Cluster, EXCHANGED, Ranks};
use common::{fault_library, library};

/// Numbers that differ from call to call, and not from run to run.
fn number(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn fifo(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o666) }, 0);
}

/// The machine's directory, as `Cluster::machine` makes it.
fn tree(cluster: &Cluster) -> PathBuf {
    cluster.sandbox.dir().join("home/machine")
}

/// Eight ranks of which one, or a child it asks, is killed: before, in or after
/// the meeting. All that live have the masks of one arrangement: Slurm's, or ours.
/// (A rank that kept its mask while others took theirs would make a mixture.)
#[test]
fn a_rank_killed_at_any_moment_leaves_the_others_in_one_arrangement() {
    let Some(cluster) = Cluster::up("killed", &CROSSED, &fault_library(), &[]) else { return };
    let gpus = ["0000:01:00.0", "0000:21:00.0", "0000:41:00.0", "0000:61:00.0"];
    let gpus = gpus.into_iter().chain(["0000:81:00.0", "0000:a1:00.0", "0000:c1:00.0", "0000:e1:00.0"]);
    let gpus: Vec<_> = gpus.zip([1, 1, 1, 1, 0, 0, 0, 0]).collect();
    cluster.machine(&gpus);
    // Two of them have a CPU of their own; of the others it is not known where they are.
    for (address, _) in &gpus[1..7] {
        fs::write(tree(&cluster).join(format!("sys/bus/pci/devices/{address}/numa_node")), "-1\n").unwrap();
    }
    let cpus = ["1", "0-1", "0-1", "0-1", "0-1", "0-1", "0-1", "0"];
    // Eight tasks on the two CPUs of a job: without Slurm's binding all have both.
    let run = |spec: &str, kill: &str| {
        let said = cluster.try_run(&format!(
            "cd; rm -f ran; salloc -Q -w n1 -N1 -n2 srun -Q -n8 --overcommit --palingenesis={spec} \
             sh -c 'TASK >>$HOME/ran; sleep 1' & {kill} wait $!; touch ran; cat ran"
        ));
        (Ranks::of(said.clone()).cpus, said)
    };
    let (slurms, said) = run("bind=off", "");
    assert_eq!(slurms, (0..8).map(|rank| (rank, "0-1".to_string())).collect(), "{said:#?}");
    let (arranged, said) = run("", "");
    assert_eq!(arranged, (0..8).zip(cpus.map(String::from)).collect(), "{said:#?}");
    let mut state = 0x9e37_79b9_7f4a_7c15;
    let mut seen = BTreeMap::new();
    for round in 0..10 {
        let (victim, millis) = (1 + number(&mut state) % 8, 50 + number(&mut state) % 900);
        // In every other round one is late, so that the others wait for it.
        cluster.load(if round % 2 == 0 { "gate=600 fault=task_init:sleep-1:rank=5" } else { "gate=600" });
        let kill = format!(
            "sleep 0.{millis:03}; for i in {{1..50}}; do p=$(pgrep -x palingenesis | sed -n {victim}p); \
             [ \"$p\" ] && kill -9 $p && echo hit && break; sleep 0.01; done;"
        );
        let (found, said) = run("", &kill);
        let hit = said.out.contains("hit");
        assert!(said.took < Duration::from_secs(60), "round {round}: {said:#?}");
        assert!(found.len() >= if hit { 7 } else { 8 }, "round {round}: {said:#?}");
        let are = |all: &BTreeMap<u32, String>| found.iter().all(|(rank, mask)| all.get(rank) == Some(mask));
        let which = match (are(&slurms), are(&arranged)) {
            (true, false) => "Slurm's",
            (false, true) => "arranged",
            _ => panic!("round {round}: a mixture: {found:?} {said:#?}"),
        };
        println!("round {round}: {millis} ms, victim {victim}, hit: {hit}, {which}, took {:?}", said.took);
        *seen.entry((hit, which)).or_insert(0) += 1;
    }
    println!("{seen:?}");
    cluster.load("");
    cluster.machine(&CROSSED);
    cluster.two("", "--palingenesis").have(EXCHANGED, "afterwards");
}

/// Every file of the machine is replaced in turn and at random by what no kernel
/// writes; a few rounds replace them all.
#[test]
fn a_machine_of_garbage_is_started_on() {
    let Some(cluster) = Cluster::up("garbage", &CROSSED, &library(), &[]) else { return };
    let root = tree(&cluster);
    let mut state = 0x2545_f491_4f6c_dd1d;
    for round in 0..10 {
        cluster.machine(&CROSSED);
        let mut files = Vec::new();
        walk(&root, &mut files);
        files.sort();
        for file in &files {
            if round > 1 && !number(&mut state).is_multiple_of(3) {
                continue;
            }
            let _ = fs::remove_file(file);
            match number(&mut state) % 9 {
                0 => fifo(file),
                1 => symlink("/dev/zero", file).unwrap(),
                2 => fs::create_dir(file).unwrap(),
                3 => symlink(file, file).unwrap(),
                4 => fs::write(file, [0xff; 100_000]).unwrap(),
                5 => fs::write(file, "4294967295\n").unwrap(),
                6 => fs::write(file, "0-16383\n").unwrap(),
                7 => fs::write(file, "0,1,".repeat(30_000)).unwrap(),
                _ => {}
            }
        }
        let ranks = cluster.two("", "--palingenesis");
        assert!(ranks.said.took < Duration::from_secs(30), "round {round}: {:#?}", ranks.said);
        println!("round {round}: {:?}", ranks.said.took);
        let found: BTreeSet<&String> = ranks.cpus.values().collect();
        assert_eq!(found.len(), 2, "round {round}: {:#?}", ranks.said);
        assert!(!ranks.said.err.contains("internal fault"), "round {round}: {:#?}", ranks.said);
    }
    // A thousand GPUs, and as many cards.
    cluster.machine(&CROSSED);
    for number in 0..1000u32 {
        let address = format!("{number:04x}:01:00.0");
        fs::create_dir_all(root.join("proc/driver/nvidia/gpus").join(&address)).unwrap();
        fs::create_dir_all(root.join("sys/class/infiniband").join(format!("mlx5_{number}/ports/1"))).unwrap();
    }
    let ranks = cluster.two("", "--palingenesis");
    assert!(ranks.said.took < Duration::from_secs(60), "{:#?}", ranks.said);
    println!("a thousand GPUs: {:?}", ranks.said.took);
    assert!(ranks.said.err.contains("more than 128 GPUs: the others are not looked at"), "{:#?}", ranks.said);
    cluster.machine(&CROSSED);
    cluster.two("", "--palingenesis").have(EXCHANGED, "afterwards");
}

fn walk(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => walk(&entry.path(), files),
            _ => files.push(entry.path()),
        }
    }
}

/// What a user may give for NCCL's topology file on a virtual machine, where it is
/// read: only the tasks read it, never root, and none of it does harm.
#[test]
fn no_topology_file_does_harm() {
    let Some(cluster) = Cluster::up("topology-file", &CROSSED, &library(), &[]) else { return };
    let root = tree(&cluster);
    // A card on a bus of its own, so that the tree is flat.
    let card = root.join("sys/devices/pci0000:c1/0000:c1:00.0");
    fs::create_dir_all(card.join("infiniband/mlx5_0")).unwrap();
    fs::write(card.join("vendor"), "0x15b3\n").unwrap();
    fs::create_dir_all(root.join("sys/class/infiniband/mlx5_0/ports/1")).unwrap();
    symlink(&card, root.join("sys/class/infiniband/mlx5_0/device")).unwrap();
    fs::create_dir_all(root.join("data")).unwrap();
    let file = |name: &str, text: &[u8]| {
        let path = root.join("data").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    };
    fifo(&root.join("data/fifo"));
    symlink("/dev/zero", root.join("data/zero")).unwrap();
    symlink("/dev/tty", root.join("data/tty")).unwrap();
    symlink("loop", root.join("data/loop")).unwrap();
    file("sparse", b"");
    fs::File::options().write(true).open(root.join("data/sparse")).unwrap().set_len(1 << 34).unwrap();
    let entities: String =
        (1..10).map(|n| format!("<!ENTITY e{n} \"{}\">", format!("&e{};", n - 1).repeat(10))).collect();
    file("laughs", format!("<!DOCTYPE s [<!ENTITY e0 \"ha\">{entities}]><system>&e9;</system>").as_bytes());
    file("deep", "<system>".repeat(19_000).as_bytes());
    file("deeper", format!("{}{}", "<a>".repeat(19_000), "</a>".repeat(19_000)).as_bytes());
    let attributes: String = (0..22_000).map(|n| format!(" a{n}=''")).collect();
    file("attributes", format!("<system{attributes}/>").as_bytes());
    let bridges = "<pci busid='ffff:ff:01.0'>".repeat(9000) + "<pci busid='0000:01:00.0'/>" + &"</pci>".repeat(9000);
    file("bridges", format!("<system>{bridges}</system>").as_bytes());
    for name in [
        "fifo",
        "zero",
        "tty",
        "loop",
        "sparse",
        "laughs",
        "deep",
        "deeper",
        "attributes",
        "bridges",
        "none",
        "../data",
    ] {
        let ranks = cluster.two(&format!("NCCL_TOPO_FILE=/data/{name}"), "--palingenesis=show");
        ranks.have(EXCHANGED, name);
        println!("{name}: {:?}", ranks.said.took);
        assert!(ranks.said.took < Duration::from_secs(30), "{name}: {:#?}", ranks.said);
        assert!(ranks.said.err.contains(&format!("topology file /data/{name}")), "{name}: {:#?}", ranks.said);
    }
    // Whoever reads it left nothing behind.
    let left = cluster.sandbox.run_root("sleep 1; pgrep -x slurmstepd; pgrep -x palingenesis; true").ok().out;
    assert_eq!(left, "");
}

/// More ranks than masks are exchanged among: they start, and each keeps its own.
#[test]
fn very_many_ranks_of_a_node_start() {
    let Some(cluster) = Cluster::up("many", &CROSSED, &library(), &[]) else { return };
    let line = |spec: &str| format!("salloc -Q -w n1 -N1 -n2 srun -Q -n256 --overcommit {spec} TASK");
    let (plain, ranks) = (cluster.run(&line("")), cluster.run(&line("--palingenesis")));
    println!("{:?} without, {:?} with the flag", plain.said.took, ranks.said.took);
    assert_eq!(ranks.cpus.len(), 256, "{ranks:#?}");
    assert_eq!(ranks.cpus, plain.cpus);
    assert!(ranks.said.took < Duration::from_secs(90), "{:?}", ranks.said.took);
}
