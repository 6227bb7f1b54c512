//! Which GPU each rank has, on a real Slurm that gives out device files and a
//! recorded machine (`root=` in plugstack.conf) whose /dev/nvidiaN lead to them:
//! each of Slurm's ways to hand GPUs to tasks, with device cgroups and without.
//!
//! What that cannot show: that CUDA numbers GPUs as we say it does.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::tasks::{Run, Task};
use common::{Sandbox, library, open_folder, slurm};

const ADDRESSES: [&str; 4] = ["0000:07:00.0", "0000:0b:00.0", "0000:8a:00.0", "0000:91:00.0"];
const UUIDS: [&str; 4] = [
    "GPU-aaaa0000-1111-2222-3333-444444444444",
    "GPU-bbbb0000-1111-2222-3333-444444444444",
    "GPU-cccc0000-1111-2222-3333-444444444444",
    "GPU-dddd0000-1111-2222-3333-444444444444",
];

/// A file that the cluster's user can read.
fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, format!("{text}\n")).unwrap();
    for folder in path.ancestors().skip(1).take_while(|folder| folder.starts_with(root)) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
}

/// A machine of four GPUs by PCI address, the n-th of which has /dev/nvidiaMINOR
/// by `minors`, Slurm's n-th device file. The first two sit on NUMA node 0 with
/// CPU 0, the others on node 1 with CPU 1.
fn machine(name: &str, minors: [u32; 4]) -> PathBuf {
    let root = open_folder().join(format!("gpus-{name}"));
    let _ = fs::remove_dir_all(&root);
    for (number, address) in ADDRESSES.into_iter().enumerate() {
        let (minor, uuid, node) = (minors[number], UUIDS[number], number / 2);
        let text = format!(
            "Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 21\nGPU UUID: \t {uuid}\n\
             Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No"
        );
        write(&root, &format!("proc/driver/nvidia/gpus/{address}/information"), &text);
        let bus = &address[5..7];
        let place = format!("devices/pci0000:{bus}/{address}");
        for (file, value) in [
            ("numa_node", node.to_string()),
            ("local_cpulist", node.to_string()),
            ("vendor", "0x10de".into()),
            ("device", "0x20b2".into()),
            ("class", "0x030200".into()),
        ] {
            write(&root, &format!("sys/{place}/{file}"), &value);
        }
        fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
        symlink(format!("../../../{place}"), root.join(format!("sys/bus/pci/devices/{address}"))).unwrap();
        fs::create_dir_all(root.join("dev")).unwrap();
        symlink(format!("/run/fakegpu/gpu{minor}"), root.join(format!("dev/nvidia{minor}"))).unwrap();
    }
    // A card on each node, whose names run against the GPUs'.
    for (name, address, node) in [("mlx5_1", "0000:0c:00.0", 0), ("mlx5_0", "0000:94:00.0", 1)] {
        let place = format!("devices/pci0000:{}/{address}", &address[5..7]);
        for (file, value) in [("numa_node", node.to_string()), ("vendor", "0x15b3".into()), ("device", "0x1021".into())]
        {
            write(&root, &format!("sys/{place}/{file}"), &value);
        }
        let card = format!("sys/class/infiniband/{name}");
        for (file, value) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("link_layer", "InfiniBand"),
            ("rate", "400 Gb/sec (4X NDR)"),
        ] {
            write(&root, &format!("{card}/ports/1/{file}"), value);
        }
        symlink(format!("../../../{place}"), root.join(format!("{card}/device"))).unwrap();
    }
    for node in 0..2 {
        write(&root, &format!("sys/devices/system/node/node{node}/cpulist"), &node.to_string());
        write(&root, &format!("sys/devices/system/node/node{node}/distance"), ["10 21", "21 10"][node]);
    }
    for file in ["online", "has_cpu"] {
        write(&root, &format!("sys/devices/system/node/{file}"), "0-1");
    }
    write(&root, "sys/devices/system/cpu/online", "0-1");
    root
}

fn up(name: &str, root: &Path, options: &[&str]) -> Option<Sandbox> {
    let line = format!("required {} root={}", library().display(), root.display());
    let all = [&["--nodes", "1", "--sockets", "1", "--cores", "8", "--plugstack", &line], options].concat();
    Sandbox::up(&format!("gpus-{name}"), &all)
}

/// What a task has: CUDA_VISIBLE_DEVICES, the index and the address we tell.
fn row(task: &Task) -> [&str; 3] {
    ["CUDA_VISIBLE_DEVICES", "PALINGENESIS_GPU_INDEX", "PALINGENESIS_GPU"].map(|name| task.get(name).unwrap_or("-"))
}

/// Lines of a check.
fn of<'a>(run: &'a Run, id: &str) -> Vec<&'a str> {
    run.said.ours().into_iter().filter(|line| line.contains(&format!("[{id}]"))).collect()
}

/// Runs a step whose ranks must have these rows, and the checks that speak of it,
/// each once for the step.
#[track_caller]
fn ranks(sandbox: &Sandbox, options: &str, rows: &[[&str; 3]], checks: &[&str]) -> Run {
    let run = sandbox.record(&format!("srun --palingenesis {options} RECORD rank"));
    let tasks = run.tasks("rank");
    assert_eq!(tasks.iter().map(row).collect::<Vec<_>>(), rows, "{options}: {:#?}", run.said);
    for (number, task) in tasks.iter().enumerate() {
        // Frameworks take it for who leads the node, whatever GPU it has.
        assert_eq!(task.number("LOCAL_RANK") as usize, number, "{options}");
        let seen = task.get("CUDA_VISIBLE_DEVICES").map_or(4, |list| list.split(',').count());
        for index in task.get("PALINGENESIS_GPU_INDEX").into_iter().flat_map(|list| list.split(',')) {
            assert!(index.parse::<usize>().unwrap() < seen, "{options}: index {index} of {seen}");
        }
    }
    for id in ["gpus-per-task", "gpus-fewer", "gpus-none", "gpus-foreign"] {
        assert_eq!(of(&run, id).len(), usize::from(checks.contains(&id)), "{options}: {id}: {:#?}", run.said);
    }
    run
}

const GPU: [&str; 4] = ADDRESSES;

/// The list that tasks see with --gpu-bind=none: 22.05 removes it from each, later ones
/// leave the step's (measured with 22.05.8, 24.11.5 and 26.05.5; `_set_gres_env` in
/// src/interfaces/gres.c).
fn unbound(list: &str) -> &str {
    if slurm() >= (24, 11) { list } else { "-" }
}

/// <https://github.com/NVIDIA/nccl-tests/issues/300>: ways to give GPUs to tasks,
/// and <https://github.com/ACEsuit/mace/issues/435>: a task's only GPU is its
/// number 0, whatever its local rank.
#[test]
fn each_way_to_give_gpus_to_tasks_has_its_right_index() {
    let root = machine("shapes", [0, 1, 2, 3]);
    let Some(sandbox) = up("shapes", &root, &["--gpus", "4"]) else { return };
    let each = [["0", "0", GPU[0]], ["1", "0", GPU[1]], ["2", "0", GPU[2]], ["3", "0", GPU[3]]];
    for options in ["-n4 --gpus-per-task=1", "-n4 --gres=gpu:4 --gpu-bind=single:1", "-n4 --ntasks-per-gpu=1"] {
        let run = ranks(&sandbox, options, &each, &["gpus-per-task"]);
        let line = of(&run, "gpus-per-task")[0];
        for part in [
            "palingenesis: warning: each of the 4 ranks on n1 sees one GPU of the step's 4 (CUDA_VISIBLE_DEVICES=0)",
            "--gpus-per-node=N --gpu-bind=none",
            "--tres-bind=gres/gpu:none",
        ] {
            assert!(line.contains(part), "'{part}' is missing: {line}");
        }
    }
    // The user's own choice.
    let mapped = [["3", "0", GPU[3]], ["1", "0", GPU[1]]];
    ranks(&sandbox, "-n2 --gres=gpu:4 --gpu-bind=map_gpu:3,1", &mapped, &["gpus-per-task"]);
    // The second takes number 1 of its own two.
    let two = [["0,1", "0", GPU[0]], ["2,3", "1", GPU[3]]];
    ranks(&sandbox, "-n2 --gpus-per-task=2", &two, &["gpus-per-task"]);
    // The cure: all are seen.
    let all = ["0", "1", "2", "3"].map(|index| [unbound("0,1,2,3"), index, GPU[index.parse::<usize>().unwrap()]]);
    ranks(&sandbox, "-n4 --gpus-per-node=4 --gpu-bind=none", &all, &[]);
    ranks(&sandbox, "-n4 --gpus-per-task=1 --gpu-bind=none", &all, &[]);
    let all = ["0", "1", "2", "3"].map(|index| ["0,1,2,3", index, GPU[index.parse::<usize>().unwrap()]]);
    ranks(&sandbox, "-n4 --gres=gpu:4", &all, &[]);
    // Rank 1 takes number 1 or its half, which is on the other NUMA node: not known.
    let [first, second] = ["0000:07:00.0,0000:0b:00.0", "0000:8a:00.0,0000:91:00.0"];
    ranks(&sandbox, "-n2 --gres=gpu:4", &[["0,1,2,3", "0,1", first], ["0,1,2,3", "-", "-"]], &[]);
    let run = sandbox.record("srun --palingenesis=isolate=env -n2 --gres=gpu:4 RECORD rank");
    let lists = [UUIDS[..2].join(","), UUIDS[2..].join(",")];
    for ((task, list), addresses) in run.tasks("rank").iter().zip(&lists).zip([first, second]) {
        assert_eq!(row(task), [list.as_str(), "0,1", addresses]);
    }

    if unbound("0,1") == "-" {
        // Slurm then shows the whole node, and does not say which two are the step's.
        ranks(&sandbox, "-n2 --gres=gpu:2 --gpu-bind=none", &[["-", "-", "-"]; 2], &["gpus-foreign"]);
    } else {
        let two = [["0,1", "0", GPU[0]], ["0,1", "1", GPU[1]]];
        ranks(&sandbox, "-n2 --gres=gpu:2 --gpu-bind=none", &two, &[]);
    }

    // What srun shows is the same.
    let said = sandbox.run("srun --palingenesis=show -n2 --gres=gpu:4 --gpu-bind=map_gpu:3,1 true").ok();
    let row = said.err.lines().find(|line| line.trim_start().starts_with("gpu ")).unwrap_or_default();
    assert!(row.contains("0000:91:00.0") && row.contains("index 0 of 1: the only GPU it sees"), "{said:#?}");
    // And what a rank can ask for itself.
    let explain = common::program("palingenesis");
    let ask = format!("{} explain --root {}", explain.display(), root.display());
    let said = sandbox.run(&format!("srun --palingenesis -n4 --gpus-per-task=1 -l {ask} 2>/dev/null")).ok();
    for (rank, address) in ADDRESSES.into_iter().enumerate() {
        let mut rows = said.out.lines().filter_map(|line| line.strip_prefix(&format!("{rank}: ")));
        let row = rows.find(|line| line.trim_start().starts_with("gpu ")).unwrap_or_default();
        assert!(row.contains(address) && row.contains("index 0 of 1"), "{rank}: {row}\n{}", said.out);
    }
}

/// <https://github.com/jax-ml/jax/issues/29669>: more tasks than GPUs on purpose,
/// as with MPS. They start, and both numbers are told.
#[test]
fn more_ranks_than_gpus_start_with_a_warning() {
    let root = machine("fewer", [0, 1, 2, 3]);
    let Some(sandbox) = up("fewer", &root, &["--gpus", "4"]) else { return };
    let run = ranks(&sandbox, "-n8 --gres=gpu:4", &[["0,1,2,3", "-", "-"]; 8], &["gpus-fewer"]);
    let line = of(&run, "gpus-fewer")[0];
    assert!(line.contains("8 ranks on n1 see 4 GPUs") && line.contains("'Duplicate GPU detected'"), "{line}");
    ranks(&sandbox, "-n8 --gpus-per-node=4 --gpu-bind=none", &[[unbound("0,1,2,3"), "-", "-"]; 8], &["gpus-fewer"]);
    // All on one.
    ranks(&sandbox, "-n2 --gres=gpu:1", &[["0", "0", GPU[0]]; 2], &["gpus-fewer"]);
    // Two ranks on each, by name.
    let run = sandbox.record("srun --palingenesis=isolate=env -n8 --gres=gpu:4 RECORD rank");
    for (rank, task) in run.tasks("rank").iter().enumerate() {
        assert_eq!(row(task), [UUIDS[rank / 2], "0", GPU[rank / 2]], "{task}");
    }
}

/// A GPU that the device cgroup hides is never counted: access(2) asks the cgroup
/// of the task. The device files' numbers run against the PCI addresses here, as
/// they may (<https://slurm.schedmd.com/gres.html>).
#[test]
fn a_gpu_that_a_rank_may_not_open_is_never_counted() {
    let root = machine("cgroup", [3, 2, 1, 0]);
    let Some(sandbox) = up("cgroup", &root, &["--gpus", "4", "--cgroup"]) else { return };
    // Slurm's numbers start at 0 for each task; its first device file is the last by address.
    let each = [["0", "0", GPU[3]], ["0", "0", GPU[2]], ["0", "0", GPU[1]], ["0", "0", GPU[0]]];
    for options in ["-n4 --gpus-per-task=1", "-n4 --gres=gpu:4 --gpu-bind=single:1", "-n4 --ntasks-per-gpu=1"] {
        ranks(&sandbox, options, &each, &["gpus-per-task"]);
    }
    let mapped = [["0", "0", GPU[0]], ["0", "0", GPU[2]]];
    ranks(&sandbox, "-n2 --gres=gpu:4 --gpu-bind=map_gpu:3,1", &mapped, &["gpus-per-task"]);
    // A job of two sees two of the four, and none is hidden from its ranks.
    let two = [["0,1", "0", GPU[2]], ["0,1", "1", GPU[3]]];
    ranks(&sandbox, "-n2 --gres=gpu:2", &two, &[]);
    let two = [[unbound("0,1"), "0", GPU[2]], [unbound("0,1"), "1", GPU[3]]];
    ranks(&sandbox, "-n2 --gpus-per-node=2 --gpu-bind=none", &two, &[]);

    // None was asked for: several ranks are warned, a lone program and a tool are not.
    ranks(&sandbox, "-n2", &[["-", "-", "-"]; 2], &["gpus-none"]);
    ranks(&sandbox, "-n1", &[["-", "-", "-"]], &[]);
    let said = sandbox.run("srun --palingenesis -n2 hostname").ok();
    assert!(said.ours().is_empty(), "{said:#?}");
    // Given some, and none of them can be used: the step does not start.
    fs::remove_file(root.join("dev/nvidia0")).unwrap();
    let said = sandbox.run("srun --palingenesis -n1 --gres=gpu:1 echo RAN");
    assert_eq!(said.code, 78, "{said:#?}");
    let lines = said.ours();
    assert!(!said.out.contains("RAN") && lines.len() == 1, "{said:#?}");
    for part in ["palingenesis: error: ", "no GPU of n1, which has 4, where its step has 1", "gpus-none=warn"] {
        assert!(lines[0].contains(part), "'{part}' is missing: {}", lines[0]);
    }
    let said = sandbox.run("srun --palingenesis=gpus-none=warn -n1 --gres=gpu:1 echo RAN").ok();
    assert!(said.out.contains("RAN"), "{said:#?}");
}

/// <https://github.com/pytorch/pytorch/pull/92315>: a GPU's name leads to its PCI
/// address, and that to its NUMA node, without CUDA or NVML. And the user's own
/// list stays.
#[test]
fn the_user_s_own_list_is_read_and_kept() {
    let root = machine("own", [0, 1, 2, 3]);
    // Slurm gives out no GPUs here, and leaves the variable alone.
    let Some(sandbox) = up("own", &root, &[]) else { return };
    let table = [
        ("GPU-bbbb", "1", "0", GPU[1]),
        (UUIDS[2], "1", "0", GPU[2]),
        ("3,1", "2", "0", GPU[3]),
        ("GPU-dddd,GPU-aaaa", "2", "0", GPU[3]),
        ("MIG-GPU-cccc0000-1111-2222-3333-444444444444/7/0", "1", "0", GPU[2]),
        ("2,-1,3", "1", "0", GPU[2]),
    ];
    for (list, tasks, index, address) in table {
        for spec in ["", "=isolate=env"] {
            let line = format!("CUDA_VISIBLE_DEVICES={list} srun --palingenesis{spec} -n{tasks} RECORD rank");
            let run = sandbox.record(&line);
            let first = &run.tasks("rank")[0];
            assert_eq!(row(first), [list, index, address], "{line}");
            // So that numbers follow the addresses.
            assert_eq!(first.get("CUDA_DEVICE_ORDER"), Some("PCI_BUS_ID"));
        }
    }
    // From the GPU's address to what is beside it: its NUMA node, CPUs and card.
    let facts = "sh -c 'echo $PALINGENESIS_GPU $PALINGENESIS_NUMA $PALINGENESIS_NIC $(grep Cpus_allowed_list /proc/self/status)'";
    for order in ["", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_DEVICE_ORDER=FASTEST_FIRST"] {
        for (uuid, address, node, card) in [("GPU-bbbb", GPU[1], 0, "mlx5_1"), ("GPU-cccc", GPU[2], 1, "mlx5_0")] {
            let line = format!("CUDA_VISIBLE_DEVICES={uuid} {order} srun --palingenesis -n1 {facts}");
            let said = sandbox.run(&line).ok();
            assert_eq!(said.out, format!("{address} {node} {card} Cpus_allowed_list: {node}\n"), "{line}");
        }
    }
    // What names no GPU is refused, what asks for none is not.
    let said = sandbox.run("CUDA_VISIBLE_DEVICES=4 srun --palingenesis -n1 echo RAN");
    assert!(
        said.code == 78 && said.ours()[0].contains("CUDA_VISIBLE_DEVICES=4 shows the task no GPU of n1"),
        "{said:#?}"
    );
    let said = sandbox.run("CUDA_VISIBLE_DEVICES= srun --palingenesis -n1 echo RAN").ok();
    assert!(said.ours().is_empty(), "{said:#?}");
}

/// A step started in a rank's step has GPUs of its own: the outer's facts and list
/// are no user's.
#[test]
fn a_step_in_a_step_is_not_told_the_outer_one_s_gpu() {
    let root = machine("nested", [0, 1, 2, 3]);
    let Some(sandbox) = up("nested", &root, &[]) else { return };
    let run = sandbox.record(
        "salloc -Q -n4 --overcommit srun --palingenesis=isolate=env -n4 --overlap sh -c '
             RECORD outer; [ $SLURM_PROCID = 2 ] || exit 0
             srun --palingenesis --overlap -n4 RECORD inner'",
    );
    for (rank, task) in run.tasks("outer").iter().enumerate() {
        assert_eq!(row(task), [UUIDS[rank], "0", GPU[rank]]);
    }
    for (rank, task) in run.tasks("inner").iter().enumerate() {
        assert_eq!(row(task), ["-", &rank.to_string(), GPU[rank]]);
    }
}
