//! The plugin, stamped for other Slurm releases, in those releases' own srun,
//! slurmd and slurmstepd. Each runs in a Debian tree that scripts/make-roots
//! built; a tree that is not there is said and skipped.
//!
//! What changed between releases and is used here: how a step is named to
//! slurm_job_step_layout_get, the spelling of an option without argument, which
//! failures end a step, and the marks on log lines.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::{Sandbox, open_folder, readable_by_all, stamped_library};

/// In place of palingenesis-worker: its words, its limit of open files, and what
/// TaskProlog left.
const STAND_IN: &str = "#!/bin/sh
printf '<%s>' \"$@\"
echo \" $(ulimit -Sn) $FROM_PROLOG ${PALINGENESIS_WORKER_ARG-whole} $RANK $(cat /proc/$PPID/comm)\"
exit 3
";

/// A program that every node reaches.
fn script(name: &str, text: &str) -> PathBuf {
    let file = open_folder().join(name);
    let new = file.with_extension(format!("new{}", std::process::id()));
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&new, &file).unwrap();
    file
}

fn tree(suite: &str) -> Option<PathBuf> {
    let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
    let tree = Path::new(&roots).join(suite);
    if tree.join("usr/bin/srun").is_file() {
        return Some(tree);
    }
    println!("skipped: no Slurm of Debian {suite} at {}; scripts/make-roots makes it", tree.display());
    None
}

/// Prints the places of a step's tasks, sorted.
const PLACES: &str = "/bin/sh -c 'echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK \
                      $MASTER_ADDR:$MASTER_PORT $SLURM_PROCID $SLURMD_NODENAME $SLURM_PALINGENESIS_SPEC' | sort";

fn works_in(suite: &str, release: &str) {
    let Some(tree) = tree(suite) else { return };
    let library = readable_by_all(stamped_library(release));
    let worker = script(&format!("release-worker-{suite}"), STAND_IN);
    let prolog = script(&format!("release-prolog-{suite}"), "#!/bin/sh\necho export FROM_PROLOG=yes\n");
    let line = format!("optional {} worker={}", library.display(), worker.display());
    let prolog = format!("TaskProlog={}", prolog.display());
    let tree = tree.to_string_lossy().into_owned();
    let name = format!("release-{suite}");
    let up = [
        "--root",
        &tree,
        "--names",
        "n1,n2,n3",
        "--sockets",
        "1",
        "--cores",
        "4",
        "--plugstack",
        &line,
        "--conf",
        &prolog,
    ];
    let Some(sandbox) = Sandbox::up(&name, &up) else { return };

    let said = sandbox.run(&format!("srun -N2 -n3 --palingenesis {PLACES}")).ok();
    let lines: Vec<&str> = said.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", said.out);
    let port = lines[0].split([':', ' ']).nth(4).expect("a port").to_string();
    let expected = [
        format!("0/3 0/2 0 n1:{port} 0 n1 "),
        format!("1/3 1/2 0 n1:{port} 1 n1 "),
        format!("2/3 0/1 1 n1:{port} 2 n2 "),
    ];
    let trimmed: Vec<String> = lines.iter().map(|line| format!("{} ", line.trim_end())).collect();
    assert_eq!(trimmed, expected);

    sandbox.resume();
    // Only srun can know that rank 0 is on the middle node.
    let said = sandbox
        .run(&format!(
            "printf 'n2\\nn3\\nn1\\n' > ~/hosts; SLURM_HOSTFILE=~/hosts srun -n3 -m arbitrary --palingenesis {PLACES}"
        ))
        .ok();
    assert!(said.out.lines().count() == 3 && said.out.lines().all(|line| line.contains(" n2:")), "{}", said.out);
    assert!(said.out.lines().next().unwrap().contains(" 0 n2"), "{}", said.out);

    sandbox.resume();
    let said = sandbox.run(&format!("srun -N2 -n2 --export=NONE --palingenesis {PLACES}")).ok();
    assert!(said.out.starts_with("0/2 0/1 0 n1:"), "{}", said.out);

    sandbox.resume();
    // No argument, handed down by salloc: NULL, "" or "(null)" by release.
    let said = sandbox.run(&format!("salloc -Q -N2 -n2 --palingenesis srun {PLACES}")).ok();
    assert!(said.out.starts_with("0/2 0/1 0 n1:"), "{}", said.out);

    sandbox.resume();
    // palingenesis-worker before the command's words (spank_prepend_task_argv), and
    // all that Slurm does for a command that is started by its name.
    let plain = sandbox.run(&format!("ulimit -Sn 777; srun -Q -n1 {} train.toml 'a b' ''", worker.display()));
    let started = "ulimit -Sn 777; cd; touch train.toml; srun -Q -n1 --palingenesis=worker,show train.toml 'a b' ''";
    let started = sandbox.run(started);
    assert_eq!((plain.code, plain.out.trim_end()), (3, "<train.toml><a b><> 777 yes whole  slurmstepd"), "{plain:?}");
    assert_eq!((started.code, started.out), (3, plain.out.replace("  ", " 0 ")), "{}", started.err);
    assert!(started.err.contains("spank_prepend_task_argv"), "{}", started.err);
    let said = sandbox.run("cd; echo '* /bin/echo ran' >multi; srun -Q -n2 --palingenesis=worker --multi-prog multi");
    assert_eq!((said.code, said.ours().len(), said.out.as_str()), (78, 1, ""), "{}", said.err);
    sandbox.resume();

    let said = sandbox.run("touch ~/ran; rm ~/ran; srun -n1 --palingenesis=prot=1 touch ~/ran");
    assert_eq!((said.code, said.ours().len()), (78, 1), "{}", said.err);
    // Known after the step was made: the tasks refuse, Slurm cleans up.
    let said = sandbox.run("srun -N2 -n2 --palingenesis=master=127.0.0.1 touch ~/ran");
    assert_eq!((said.code, said.ours().len()), (78, 1), "{}", said.err);
    sandbox.resume();
    // srun knows the step's nodes: told once, not by every node.
    let said = sandbox.run("srun -Q -N2 -n2 --palingenesis=master=n2 touch ~/ran");
    assert_eq!((said.code, said.ours().len()), (78, 1), "{}", said.err);
    assert!(said.err.contains("rank 0 runs on n1"), "{}", said.err);
    assert_eq!(sandbox.run("ls ~/ran").out, "");
    // Some seconds of "completing" are Slurm's own.
    let queue = "for i in $(seq 50); do [ -z \"$(squeue -h)\" ] && break; sleep 0.2; done; squeue -h";
    assert_eq!(sandbox.run(queue).out, "");

    let said = sandbox.run("srun -N2 -n2 /bin/sh -c 'echo ${RANK-none}'").ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("none\nnone\n", ""));
    let nodes = sandbox.run("sinfo -h -o %T | sort -u").out;
    assert!(!nodes.contains("drain") && !nodes.contains("down"), "{nodes}");
}

#[test]
fn slurm_24_11_of_debian_trixie() {
    works_in("trixie", "24.11");
}

#[test]
fn slurm_26_05_of_debian_forky() {
    works_in("forky", "26.05");
}
