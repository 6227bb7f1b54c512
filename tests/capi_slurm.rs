//! The C interface in steps of a real Slurm: the examples in C and in Python, as they are
//! in examples/, get rank 0's bytes on all ranks of two nodes, and know their plan.
//!
//! The nodes are network namespaces of one machine; there is no GPU, so that binding has
//! nothing to do here: what is bound is shown in tests/binding.rs.

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::{Sandbox, library, link_folder, open_folder, readable_by_all, root};

fn cluster(name: &str) -> Option<Sandbox> {
    let plugstack = format!("required {}", library().display());
    Sandbox::up(name, &["--nodes", "2", "--cores", "2", "--namespace-per-node", "--plugstack", &plugstack])
}

/// The library where the cluster's user can load it, and the C example linked to it.
fn example() -> (PathBuf, PathBuf) {
    let library = readable_by_all(library());
    let program = open_folder().join("capi-exchange");
    let at = link_folder(&library).display().to_string();
    let status = Command::new("gcc")
        .args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(root().join("include"))
        .arg("-o")
        .arg(&program)
        .arg(root().join("examples/exchange.c"))
        .args(["-L", &at, "-lpalingenesis", &format!("-Wl,-rpath,{at}")])
        .status()
        .expect("gcc is there");
    assert!(status.success());
    (library, program)
}

fn ranks(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_of_two_nodes_gets_what_rank_0_brought() {
    let Some(slurm) = cluster("capi") else { return };
    let (library, program) = example();
    let srun = "srun -N2 --ntasks-per-node=2";

    let said = slurm.run(&format!("{srun} --palingenesis=store {}", program.display())).ok();
    let wanted: Vec<String> = (0..4).map(|rank| format!("rank {rank} has the id made by rank 0")).collect();
    assert_eq!(ranks(&said.out), wanted, "{}", said.err);

    // Python, through ctypes; the plugin need not be there, only the key.
    let script = open_folder().join("capi-exchange.py");
    std::fs::copy(root().join("examples/exchange.py"), &script).unwrap();
    let python = format!("/usr/bin/python3 {} {}", script.display(), library.display());
    let wanted: Vec<String> = (0..4).map(|rank| format!("rank {rank} of 4 has the id made by rank 0")).collect();
    let said = slurm.run(&format!("{srun} --palingenesis=store {python}")).ok();
    assert_eq!(ranks(&said.out), wanted, "{}", said.err);
    let key = "0123456789abcdef".repeat(4);
    let said = slurm.run(&format!("PALINGENESIS_STORE_KEY={key} {srun} {python}")).ok();
    assert_eq!(ranks(&said.out), wanted, "{}", said.err);

    // Without the key it says how to get one.
    let said = slurm.run(&format!("{srun} --palingenesis {}", program.display()));
    assert_eq!((said.code, said.out.as_str()), (1, ""), "{}", said.err);
    assert!(
        said.err.contains("rank 3: PALINGENESIS_STORE_KEY is not set: launch with srun --palingenesis=store"),
        "{}",
        said.err
    );

    // The key is nowhere to be read.
    let said = slurm.run(&format!("{srun} --palingenesis=store,show {}", program.display())).ok();
    assert!(said.err.contains("PALINGENESIS_STORE_KEY"), "{}", said.err);
    let digits = said.err.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 64);
    assert_eq!(digits, None, "{}", said.err);
}

#[test]
fn a_rank_that_dies_before_is_named_to_the_others_in_time() {
    let Some(slurm) = cluster("capi-dead") else { return };
    let (library, _) = example();
    let script = open_folder().join("capi-late.py");
    // Rank 2 never comes; the others wait 4 seconds.
    let text = std::fs::read_to_string(root().join("examples/exchange.py")).unwrap();
    let text = text.replace(", 60, ", ", 4, ").replace("identity = ", "rank == 2 and sys.exit(0)\nidentity = ");
    std::fs::write(&script, text).unwrap();
    let line = "srun -N2 --ntasks-per-node=2 --palingenesis=store";
    let said = slurm.run(&format!("{line} /usr/bin/python3 {} {}", script.display(), library.display()));
    assert_eq!(said.code, 1, "{}", said.err);
    for rank in [0, 1, 3] {
        let line = format!("rank {rank}: rank 2 did not come to rank 0 within 4 s");
        assert!(said.err.contains(&line), "{line}: {}", said.err);
    }
}
