//! A Slurm that is too old: 20.11, of Debian bullseye in a tree by scripts/make-roots.
//! Its loader takes SPANK plugins of every release, so that the plugin itself refuses,
//! and only where it was asked for something.
//!
//! The library is the one that packages hold, linked against an old glibc (the same
//! tree's); none other loads there. What they cannot show: an old slurmd under a newer slurmctld.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Said, Sandbox, readable_by_all, release_library};

/// bullseye's glibc.
const GLIBC: (u32, u32) = (2, 31);

/// The highest version of glibc that the file asks for.
fn needed(library: &Path) -> Option<(u32, u32)> {
    let output = Command::new("readelf").arg("--version-info").arg(library).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let versions = text.split("GLIBC_").skip(1).filter_map(|rest| {
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    });
    versions.max()
}

/// Two nodes with Slurm 20.11, and the plugin; says why not.
fn up(name: &str, options: &[&str]) -> Option<(Sandbox, PathBuf)> {
    let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
    let tree = Path::new(&roots).join("bullseye");
    if !tree.join("usr/bin/srun").is_file() {
        println!("skipped: no Slurm 20.11 at {}; scripts/make-roots makes it", tree.display());
        return None;
    }
    if common::sysroot().is_none() {
        println!("skipped: no old glibc to link with, and other libraries do not load there");
        return None;
    }
    let library = release_library();
    let needed = needed(&library);
    assert!(needed.is_some_and(|needed| needed <= GLIBC), "{} needs glibc {needed:?}", library.display());
    let tree = tree.to_string_lossy().into_owned();
    let sandbox = Sandbox::up(&format!("old-{name}"), &[&["--root", &tree], options].concat())?;
    Some((sandbox, readable_by_all(library)))
}

/// The one line with which a program refuses.
#[track_caller]
fn refuses(said: &Said, program: &str) {
    let [line] = said.err.lines().filter(|line| line.contains("palingenesis")).collect::<Vec<_>>()[..] else {
        panic!("not one line: {said:#?}")
    };
    let start = format!("palingenesis: error: {program} is of Slurm 20.11, and palingenesis needs 21.08 or newer: ");
    assert!(line.contains(&start) && line.contains("start the job without --palingenesis"), "{line}");
    assert!(!said.out.contains("RAN"), "{said:#?}");
}

#[test]
fn without_the_flag_nothing_is_said_or_done() {
    let Some((slurm, library)) = up("unused", &[]) else { return };
    let bare = slurm.run("srun -N2 -n2 sh -c 'env | cut -d= -f1 | sort -u'").ok();
    for word in ["optional", "required"] {
        slurm.plugstack(&[&format!("{word} {}", library.display())]);
        slurm.restart_slurmd();
        let said = slurm.run("srun -Q -N2 -n2 sh -c 'env | cut -d= -f1 | sort -u'").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), (bare.out.as_str(), ""), "{word}");
        let said = slurm.run("salloc -Q -N2 srun -Q echo RAN; srun -Q --palingenesis=off echo RAN").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("RAN\nRAN\nRAN\n", ""), "{word}");
        let said = slurm.run("cd; sbatch -Q -W -o out --wrap 'srun -Q echo RAN'; cat out").ok();
        assert!(said.out.ends_with("RAN\n") && said.err.is_empty(), "{word}: {said:#?}");
    }
    let log = fs::read_to_string(slurm.dir().join("log/slurmd.n1.log")).unwrap();
    assert!(!log.contains("palingenesis: "), "{log}");
    let nodes = slurm.run("sinfo -h -o %T | sort -u").ok().out;
    assert!(!nodes.contains("drain") && !nodes.contains("down"), "{nodes}");
}

#[test]
fn with_the_flag_srun_sbatch_and_salloc_refuse_in_one_line() {
    let Some((slurm, library)) = up("flag", &[]) else { return };
    for word in ["optional", "required"] {
        slurm.plugstack(&[&format!("{word} {}", library.display())]);
        let next = || slurm.run("scontrol show config | grep NEXT_JOB_ID").ok().out;
        let before = next();
        for flag in ["--palingenesis", "--palingenesis=fsdp,port=23456"] {
            let said = slurm.run(&format!("srun -N2 {flag} echo RAN"));
            assert_eq!(said.code, 78, "{said:#?}");
            refuses(&said, "srun");
        }
        let said = slurm.run("PALINGENESIS=fsdp srun -N2 echo RAN");
        assert_eq!(said.code, 78, "{said:#?}");
        refuses(&said, "srun");
        let said = slurm.run("sbatch --palingenesis --wrap 'echo RAN'");
        assert_eq!(said.code, 78, "{said:#?}");
        refuses(&said, "sbatch");
        let said = slurm.run("salloc --palingenesis echo RAN");
        assert_eq!(said.code, 78, "{said:#?}");
        refuses(&said, "salloc");
        assert_eq!(next(), before, "a job was asked for");
        // Inside a job, where the step would be made at once.
        let said = slurm.run("salloc -Q -N2 srun --palingenesis echo RAN");
        assert_eq!(said.code, 78, "{said:#?}");
        refuses(&said, "srun");
    }
    // The variable may be meant for a job script on another cluster.
    let said = slurm.run("PALINGENESIS=fsdp sbatch -Q --wrap true").ok();
    assert_eq!(said.ours().len(), 1, "{said:#?}");
    assert!(
        said.err.starts_with("palingenesis: warning: srun in this job will refuse: sbatch is of Slurm"),
        "{said:#?}"
    );
    slurm.run("srun --palingenesis=help | grep -q fsdp").ok();
}

/// srun is another one, which has handed the flag over: the tasks refuse.
#[test]
fn where_only_slurmstepd_is_old_the_tasks_refuse_and_no_node_is_drained() {
    let Some((slurm, library)) = up("stepd", &["--namespace-per-node"]) else { return };
    for word in ["optional", "required"] {
        let file = slurm.dir().join(format!("{word}.conf"));
        fs::write(&file, format!("{word} {}\n", library.display())).unwrap();
        for node in ["n1", "n2"] {
            let mount = format!("mount --bind {} /etc/slurm/plugstack.conf", file.display());
            slurm.run_as(&["--as-root", "--node", node], &mount, 20).ok();
        }
        let said = slurm.run("SLURM_PALINGENESIS_SPEC=on srun -Q -N1 -n2 --overcommit echo RAN");
        assert_eq!(said.code, 78, "{said:#?}");
        refuses(&said, "slurmstepd on n1");
        let said = slurm.run("srun -Q -N2 -n2 echo RAN").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("RAN\nRAN\n", ""), "{word}");
        slurm.resume();
    }
    let nodes = slurm.run("sinfo -h -o %T | sort -u").ok().out;
    assert_eq!(nodes, "idle\n");
}
