//! srun, slurmd and slurmstepd under valgrind with the plugin: no error and no
//! definite leak may have one of our functions in its stack. Slurm's own are not
//! ours to judge.

mod common;

use std::fs;
use std::process::Command;

use common::crossed::{CROSSED, machine};
use common::{Sandbox, library, open_folder, rounds};

/// Errors and definite leaks of a valgrind log that pass through our library.
fn ours(log: &str) -> Vec<String> {
    let text = strip_pids(log);
    let blocks = text.split("\n\n");
    blocks
        .filter(|block| block.contains("libpalingenesis"))
        // Strings that Slurm hands us, of an allocator that differs by release:
        // srun keeps these two for its short life.
        .filter(|block| !block.contains("nodelist_nth_host") && !block.contains("slurm_conf_get_nodeaddr"))
        .filter(|block| !block.contains("still reachable") && !block.contains("possibly lost"))
        .map(String::from)
        .collect()
}

/// "==123== text" as "text".
fn strip_pids(log: &str) -> String {
    let lines = log.lines().map(|line| match line.strip_prefix("==").and_then(|rest| rest.split_once("==")) {
        Some((_, text)) => text.trim(),
        None => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn no_memory_error_of_ours_in_srun_slurmd_and_slurmstepd() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: no valgrind");
        return;
    }
    // With GPUs, so that the ranks meet and are bound.
    let root = open_folder().join("valgrind-machine");
    machine(&root, &CROSSED);
    let line = format!("optional {} root={}", library().display(), root.display());
    let Some(sandbox) =
        Sandbox::up("valgrind", &["--nodes", "1", "--sockets", "1", "--cores", "4", "--plugstack", &line])
    else {
        return;
    };
    let logs = sandbox.dir().join("home/trainer");
    let log = |name: &str| logs.join(name).display().to_string();
    let valgrind = "valgrind --leak-check=full --keep-debuginfo=yes --num-callers=40 --trace-children=yes";

    // A slurmd of our own in place of the sandbox's: its slurmstepd are traced too.
    let start = format!(
        "kill $(pgrep -x slurmd); while pgrep -x slurmd >/dev/null; do sleep 0.1; done; \
         setsid {valgrind} --log-file={} slurmd -D -N n1 >/dev/null 2>&1 </dev/null & \
         for i in $(seq 300); do sinfo -h -o %T | grep -q idle && scontrol ping -h >/dev/null && \
         srun -Q -n1 true 2>/dev/null && exit 0; sleep 0.2; done; exit 1",
        log("slurmd.%p.log")
    );
    sandbox.run_as(&["--as-root"], &start, 120).ok();

    let srun = format!("{valgrind} --trace-children=no --log-file={} srun", log("srun.%p.log"));
    // With a site file, so that it is read and each step is logged.
    sandbox
        .run_root(
            "umask 022; mkdir -p /etc/palingenesis; printf '%s\\n' 'log = \"debug\"' '[profiles.mine]' \
             '[profiles.mine.env]' 'NCCL_IB_SL = 3' '[node.\"n[1-9]\".force]' 'NCCL_NET = \"IB\"' \
             >/etc/palingenesis/palingenesis.toml",
        )
        .ok();
    let runs = [
        ("--palingenesis=show", 0),
        ("", 0),
        ("--palingenesis=port=1", 78),
        ("--palingenesis=master=n1", 0),
        ("--palingenesis=mine", 0),
        ("--palingenesis=iface=nosuch0", 78),
    ];
    for (options, code) in runs.repeat(rounds()) {
        let said = sandbox.run_as(&[], &format!("{srun} -n2 {options} true"), 120);
        assert_eq!(said.code, code, "{options}: {}", said.err);
        assert!(!options.contains("show") || said.err.contains("beside GPU "), "{options}: {}", said.err);
    }
    // slurmd's own leaks are told when it ends.
    sandbox.run_as(&["--as-root"], "pkill -TERM -f 'slurmd -D -N n1'; for i in $(seq 100); do pgrep -f 'slurmd -D -N n1' >/dev/null || break; sleep 0.2; done", 60);

    let (mut seen, mut stepd) = (0, 0);
    for entry in fs::read_dir(&logs).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".log") {
            seen += 1;
            let text = String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned();
            stepd += usize::from(text.contains("slurmstepd"));
            let found = ours(&text);
            assert!(found.is_empty(), "{name}:\n{}", found.join("\n\n"));
        }
    }
    // Six sruns, slurmd, and at least a slurmstepd with its tasks.
    assert!(seen >= 8 && stepd >= 5, "only {seen} logs, {stepd} of slurmstepd");
}
