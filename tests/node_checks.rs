//! Checks of the node on a real Slurm, whose nodes look at a recorded machine
//! (`root=` in plugstack.conf): what a variable names and the node does not have
//! is said before the program starts.
//!
//! What that cannot show: NCCL itself, real RDMA devices, nodes that differ (the
//! sandbox's nodes share the recorded one).

mod common;

use std::fs;
use std::path::PathBuf;

use common::{Said, Sandbox, library, open_folder, readable};

/// A node with a GPU, eth0, ib0 and mlx5_0 to mlx5_7 on InfiniBand.
fn recorded(name: &str) -> PathBuf {
    let root = open_folder().join(format!("node-checks-{name}"));
    let _ = fs::remove_dir_all(&root);
    for (device, index, flags, state) in
        [("lo", 1, "0x9", "unknown"), ("eth0", 2, "0x1003", "up"), ("ib0", 3, "0x1003", "up")]
    {
        let folder = format!("sys/class/net/{device}");
        readable(&root, &format!("{folder}/ifindex"), &index.to_string());
        readable(&root, &format!("{folder}/flags"), flags);
        readable(&root, &format!("{folder}/operstate"), state);
    }
    readable(&root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA H100 80GB HBM3");
    for device in 0..8 {
        let port = format!("sys/class/infiniband/mlx5_{device}/ports/1");
        readable(&root, &format!("{port}/state"), "4: ACTIVE");
        readable(&root, &format!("{port}/link_layer"), "InfiniBand");
        readable(&root, &format!("{port}/rate"), "400 Gb/sec (4X NDR)");
    }
    root
}

fn up(name: &str, arguments: &str) -> Option<Sandbox> {
    let line = format!("required {} {arguments}", library().display());
    Sandbox::up(&format!("node-checks-{name}"), &["--nodes", "2", "--cores", "4", "--plugstack", &line])
}

/// The lines of ours that end in this check's id.
fn of<'a>(said: &'a Said, id: &str) -> Vec<&'a str> {
    said.ours().into_iter().filter(|line| line.contains(&format!("[{id}]"))).collect()
}

#[track_caller]
fn assert_parts(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "'{part}' is missing: {line}");
    }
}

#[test]
fn what_a_node_does_not_have_is_said_before_the_program_starts() {
    let root = recorded("devices");
    readable(&root, "etc/nccl.conf", "# of this cluster\nNCCL_DEBUG=VERSION\nNCCL_IB_TC=41");
    let Some(sandbox) = up("devices", &format!("root={}", root.display())) else { return };

    // https://github.com/NVIDIA/nccl/issues/1837: no program of the step runs.
    let srun = "srun -N2 -n2 --palingenesis";
    let said = sandbox.run(&format!("NCCL_SOCKET_IFNAME=eth2 {srun} echo RAN"));
    let text = format!("{said:#?}");
    assert_eq!(said.code, 78, "{text}");
    assert!(!said.out.contains("RAN"), "{text}");
    let refusals: Vec<&str> = said.err.lines().filter(|line| line.starts_with("palingenesis: error: ")).collect();
    assert!(!refusals.is_empty(), "{text}");
    for line in refusals {
        assert_parts(
            line,
            &["NCCL_SOCKET_IFNAME=eth2", "has eth0, ib0", "no socket interface found", "ifname-missing=warn"],
        );
        assert!(line.contains(" on n1 (") || line.contains(" on n2 ("), "{line}");
    }
    // The way out that the line names works, and so does what the node has.
    let said = sandbox.run("NCCL_SOCKET_IFNAME=eth2 srun -N2 -n2 --palingenesis=ifname-missing=warn echo RAN").ok();
    assert_eq!(said.out.matches("RAN").count(), 2, "{said:#?}");
    assert_eq!(of(&said, "ifname-missing").len(), 1, "once for the step: {said:#?}");
    let said = sandbox.run(&format!("NCCL_SOCKET_IFNAME=eth {srun} echo RAN")).ok();
    assert_eq!(of(&said, "ifname-missing"), Vec::<&str>::new());

    // https://github.com/llm-d/llm-d-benchmark/pull/1862
    let said = sandbox.run(&format!("NCCL_IB_HCA='^mlxl5_7' {srun} echo RAN")).ok();
    assert_eq!(said.out.matches("RAN").count(), 2, "{said:#?}");
    let [line] = of(&said, "hca-missing")[..] else { panic!("{said:#?}") };
    assert_parts(line, &["palingenesis: warning: ", "mlxl5_7 matches no RDMA device of n", "did you mean mlx5_7?"]);

    // The fabric of the recorded node, its file of NCCL, and limits as they are.
    let said = sandbox.run("ulimit -l 64; srun -N2 -n2 --palingenesis=show true").ok();
    let heading = said.ours()[0];
    assert!(heading.contains("fabric infiniband:"), "{heading}");
    let kept: Vec<&str> = said.err.lines().filter(|line| line.trim_start().starts_with("NCCL_DEBUG ")).collect();
    let [line] = kept[..] else { panic!("{said:#?}") };
    assert_parts(line, &["NCCL finds it in /etc/nccl.conf, kept", "WARN"]);
    let [line] = of(&said, "memlock")[..] else { panic!("{said:#?}") };
    assert_parts(line, &["ulimit -l is 64 KiB on n"]);

    // Who looks at a node is not told what a training would lack there.
    let said = sandbox.run(&format!("ulimit -l 64; {srun} hostname")).ok();
    assert_eq!((said.out.lines().count(), said.err.as_str()), (2, ""), "{said:#?}");
    let said = sandbox.run(&format!("NCCL_SOCKET_IFNAME=eth2 {srun} hostname")).ok();
    let [line] = of(&said, "ifname-missing")[..] else { panic!("{said:#?}") };
    assert_parts(line, &["palingenesis: warning: ", "NCCL_SOCKET_IFNAME=eth2"]);

    // In the task the variable stays NCCL's file's.
    let said = sandbox.run(&format!("{srun} bash -c 'echo debug=$NCCL_DEBUG'")).ok();
    assert_eq!(said.out.matches("debug=\n").count(), 2, "{said:#?}");
}

#[test]
fn the_user_s_own_file_of_nccl_is_found_in_the_home_directory() {
    let Some(sandbox) = up("home", "") else { return };
    let said = sandbox
        .run(
            "echo NCCL_DEBUG=INFO >$HOME/.nccl.conf
             echo NCCL_DEBUG=TRACE >$HOME/other
             srun -N1 -n1 --palingenesis=show true
             echo ---- >&2
             NCCL_CONF_FILE=$HOME/other srun -N1 -n1 --palingenesis=show true
             echo ---- >&2
             srun -N1 -n1 --palingenesis bash -c 'echo debug=$NCCL_DEBUG threads=$OMP_NUM_THREADS; nproc'",
        )
        .ok();
    let shows: Vec<&str> = said.err.split("----").collect();
    for (show, file) in [(shows[0], "/.nccl.conf, kept"), (shows[1], "/other, kept")] {
        let kept: Vec<&str> = show.lines().filter(|line| line.trim_start().starts_with("NCCL_DEBUG ")).collect();
        let [line] = kept[..] else { panic!("{said:#?}") };
        assert_parts(line, &["NCCL finds it in /", file]);
    }
    // What is wrong in it is told once, by the file's name, and left to NCCL.
    let wrong = sandbox
        .run(
            "echo NCCL_IB_TIMEOUT=120 >$HOME/.nccl.conf
             srun -N2 -n4 --ntasks-per-node=2 --palingenesis bash -c 'echo timeout=$NCCL_IB_TIMEOUT'",
        )
        .ok();
    let [line] = of(&wrong, "ib-timeout-range")[..] else { panic!("{wrong:#?}") };
    assert_parts(line, &["warning: NCCL_IB_TIMEOUT=120 in /", "/.nccl.conf", "22 is two minutes"]);
    assert_eq!(wrong.out, "timeout=\n".repeat(4), "{wrong:#?}");

    let words: Vec<&str> = said.out.split_whitespace().collect();
    let ["debug=", threads, cpus] = words[..] else { panic!("{said:#?}") };
    let threads: u32 = threads.strip_prefix("threads=").unwrap().parse().unwrap();
    // nproc reads the same mask in the task itself (and OMP_NUM_THREADS, which bounds it).
    assert!(threads > 0 && threads <= cpus.parse().unwrap(), "{said:#?}");
}

/// `palingenesis explain` of a described step: the machine below --root stands
/// for its nodes; this one, a login node, does not.
#[test]
fn a_described_step_is_judged_by_the_recorded_node_only() {
    let root = recorded("explain");
    readable(&root, "home/u/.nccl.conf", "NCCL_DEBUG=INFO");
    let explain = |more: &[&str]| {
        let mut command = std::process::Command::new(common::program("palingenesis"));
        command.env_clear().envs([("NCCL_SOCKET_IFNAME", "eth77"), ("HOME", "/home/u")]);
        command.args(["explain", "--nodelist", "n[1-2]", "--tasks-per-node", "8"]).args(more);
        Said::run(command)
    };
    let root = root.to_str().unwrap();
    let said = explain(&["--root", root]);
    assert_eq!(said.code, 78, "{said:?}");
    assert_parts(&said.err, &["NCCL_SOCKET_IFNAME=eth77", "on n1 (has eth0, ib0)"]);
    let said = explain(&["--root", root, "--spec", "ifname-missing=warn"]).ok();
    assert_parts(&said.out, &["fabric infiniband:", "NCCL finds it in /home/u/.nccl.conf, kept", "[ifname-missing]"]);
    let said = explain(&[]).ok();
    assert!(said.out.contains("fabric auto:") && !said.out.contains("[ifname-missing]"), "{said:?}");
}
