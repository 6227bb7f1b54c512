//! The plugin, stamped for other Slurm releases, in those releases' own srun,
//! slurmd and slurmstepd. Each runs in a Debian tree that scripts/make-roots
//! built; a tree that is not there is said and skipped.
//!
//! What changed between releases and is used here: how a step is named to
//! slurm_job_step_layout_get, the spelling of an option without argument, which
//! failures end a step, and the marks on log lines.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use common::crossed::{CROSSED, Cluster, EXCHANGED, SLURM_S};
use common::{Said, Sandbox, container_plugin, open_folder, readable_by_all, stamped_library};

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

/// The plugin for that release, built once.
fn library(release: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let build = || readable_by_all(stamped_library(release));
    built.entry(release.to_string()).or_insert_with(build).clone()
}

/// Prints the places of a step's tasks, sorted.
const PLACES: &str = "/bin/sh -c 'echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK \
                      $MASTER_ADDR:$MASTER_PORT $SLURM_PROCID $SLURMD_NODENAME $SLURM_PALINGENESIS_SPEC' | sort";

fn works_in(suite: &str, release: &str) {
    let Some(tree) = tree(suite) else { return };
    let library = library(release);
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

/// Debian's name of the tree and its Slurm.
const RELEASES: [(&str, &str); 2] = [("trixie", "24.11"), ("forky", "26.05")];

/// Two nodes with that release's Slurm, and the plugin for it.
fn cluster(name: &str, suite: &str, release: &str) -> Option<(Sandbox, String)> {
    let tree = tree(suite)?.to_string_lossy().into_owned();
    let library = library(release).display().to_string();
    let line = format!("optional {library}");
    let options = ["--root", &tree, "--sockets", "1", "--cores", "4", "--plugstack", &line];
    // In the words of a failure.
    println!("Slurm {release}:");
    Some((Sandbox::up(&format!("release-{name}-{suite}"), &options)?, library))
}

/// The lines with this check's id.
fn of<'a>(said: &'a Said, id: &str) -> Vec<&'a str> {
    said.err.lines().filter(|line| line.contains(&format!("[{id}]"))).collect()
}

/// <https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>: seconds in
/// NCCL_IB_TIMEOUT. <https://github.com/pytorch/pytorch/issues/116974>: a launcher
/// in every task of a node.
#[test]
fn a_wrong_value_is_told_once_and_what_cannot_start_is_refused() {
    for (suite, release) in RELEASES {
        let Some((slurm, _)) = cluster("checks", suite, release) else { continue };
        let four = "srun -Q -N2 --ntasks-per-node=2";
        let values = "NCCL_IB_TIMEOUT=120 NCCL_DEBUG_SUBSYS=NET";
        let said = slurm.run(&format!("{values} {four} --palingenesis sh -c 'echo $NCCL_IB_TIMEOUT'")).ok();
        assert_eq!((said.out.as_str(), said.ours().len()), ("120\n120\n120\n120\n", 2), "{said:#?}");
        let [line] = of(&said, "ib-timeout-range")[..] else { panic!("{said:#?}") };
        assert!(line.contains("palingenesis: warning: NCCL_IB_TIMEOUT=120 "), "{line}");
        assert!(line.contains("22 is two minutes"), "{line}");
        // Rank 0's own word, and with show it has all of them.
        assert_eq!(of(&said, "subsys-no-info").len(), 1, "{said:#?}");
        let said = slurm.run(&format!("{values} {four} --palingenesis=show true")).ok();
        assert_eq!(of(&said, "ib-timeout-range").len(), 2, "{said:#?}");

        let next = || slurm.run("scontrol show config | grep NEXT_JOB_ID").ok().out;
        let before = next();
        assert!(before.contains("NEXT_JOB_ID"), "{before}");
        let said = slurm.run(&format!("TORCH_NCCL_BLOCKING_WAIT=maybe {four} --palingenesis echo RAN"));
        assert_eq!((said.code, said.out.as_str(), said.ours().len()), (78, "", 1), "{said:#?}");
        assert!(said.err.starts_with("palingenesis: error: TORCH_NCCL_BLOCKING_WAIT=maybe: "), "{said:#?}");
        assert!(said.err.contains("c10d-bool=warn"), "{said:#?}");
        assert_eq!(next(), before, "srun asked for a job");

        // srun itself knows the command (S_JOB_ARGV): one line, and not one of each node.
        let torchrun = "ln -s RECORD FOLDER/torchrun";
        let run = slurm.try_record(&format!("{torchrun}; {four} --palingenesis FOLDER/torchrun a"));
        assert_eq!((run.said.code, run.labels().len(), run.said.ours().len()), (78, 0, 1), "{run:#?}");
        let line = run.said.ours()[0];
        assert!(line.starts_with("palingenesis: error: torchrun ") && line.contains("--ntasks-per-node=1"), "{line}");
        slurm.resume();
        let run = slurm.record(&format!(
            "{torchrun}
             srun -Q -N2 --ntasks-per-node=1 --palingenesis FOLDER/torchrun a"
        ));
        assert_eq!((run.said.err.as_str(), run.tasks("a").len()), ("", 2));
        for (rank, task) in ["0", "1"].iter().zip(run.tasks("a")) {
            let pet = ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"].map(|name| task.get(name));
            assert_eq!(pet, [Some("2"), Some(*rank), Some("n1")], "{task}");
            assert!((20000..=31999).contains(&task.number("PET_MASTER_PORT")), "{task}");
            assert_eq!(task.get("PET_MASTER_PORT"), run.tasks("a")[0].get("PET_MASTER_PORT"));
            assert_eq!(["RANK", "LOCAL_RANK", "WORLD_SIZE"].map(|name| task.get(name)), [None; 3], "{task}");
        }
    }
}

/// SLURM_SPANK_, then the name under which the option reaches slurmstepd
/// (`src/common/spank.c` of Slurm 22.05).
const HANDED_DOWN: &str = "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis";
const CACHE_HANDED_DOWN: &str = "SLURM_SPANK__SLURM_SPANK_OPTION_palingenesis_palingenesis_cache";

/// The option's directory holds what ends a word of SPEC. sbatch hands options down
/// in variables (`src/common/spank.c`), the one without argument as "(null)".
#[test]
fn a_directory_given_to_sbatch_reaches_the_inner_srun_and_explain() {
    let program = common::program("palingenesis").display().to_string();
    for (suite, release) in RELEASES {
        let Some((slurm, _)) = cluster("caches", suite, release) else { continue };
        let home = slurm.run("echo $HOME").ok().out.trim().to_string();
        let root = format!("{home}/a, b");
        let hub = format!("{root}/huggingface");
        let run = slurm.record(&format!(
            "srun -Q -N2 -n2 --palingenesis=shared-local=off '--palingenesis-cache={root}' RECORD step"
        ));
        assert_eq!((run.said.err.as_str(), run.tasks("step").len()), ("", 2));
        run.tasks("step").iter().for_each(|task| assert_eq!(task.get("HF_HOME"), Some(hub.as_str()), "{task}"));

        // The local file system of this machine is warned of, since n2 might not see it.
        for (option, spec, profile) in
            [("=fsdp,shared-local=off", "fsdp,shared-local=off", "fsdp"), ("", "(null)", "default")]
        {
            let batch = slurm.batch(
                &format!("-N2 -n2 --palingenesis{option} '--palingenesis-cache={root}'"),
                1,
                &format!(
                    "RECORD script
                     srun RECORD inner
                     srun --palingenesis-cache=$HOME/other RECORD own
                     srun -N1 -n1 {program} explain --json 2>&1
                     {program} explain --json --nodelist 'n[1-2]' --tasks-per-node 1 --rank 1 2>&1"
                ),
            );
            let script = batch.task("script");
            assert_eq!((script.get(HANDED_DOWN), script.get(CACHE_HANDED_DOWN)), (Some(spec), Some(root.as_str())));
            assert_eq!((batch.tasks("inner").len(), batch.tasks("own").len()), (2, 2));
            for task in batch.tasks("inner") {
                assert_eq!(task.get("HF_HOME"), Some(hub.as_str()), "{task}");
            }
            for task in batch.tasks("own") {
                assert_eq!(task.get("HF_HOME"), Some(format!("{home}/other/huggingface").as_str()), "{task}");
            }
            slurm.check(batch.tasks("inner"));
            let plans: Vec<serde_json::Value> = batch
                .said
                .out
                .lines()
                .filter(|line| line.starts_with('{'))
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            assert_eq!(plans.len(), 2, "{:#?}", batch.said);
            for plan in plans {
                assert_eq!(plan["step"]["profile"], profile, "{plan}");
                let found = plan["env"].as_array().unwrap().iter().find(|variable| variable["name"] == "HF_HOME");
                assert_eq!(found.unwrap()["value"], hub.as_str(), "{plan}");
            }
        }
    }
}

const SITE: &str = r#"
log = "info"

[env]
NCCL_IB_TIMEOUT = "20"

[force]
NCCL_NET = "IB"

[profiles.mixtral]
base = "megatron"
[profiles.mixtral.env]
NCCL_MIN_CTAS = "4"
"#;

#[test]
fn the_site_file_s_values_reach_the_tasks_and_each_node_writes_a_line_of_log() {
    for (suite, release) in RELEASES {
        let Some((slurm, library)) = cluster("site", suite, release) else { continue };
        let socket = slurm.syslog();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let lines = || {
            let mut buffer = [0; 4096];
            let mut line =
                || socket.recv(&mut buffer).map(|length| String::from_utf8_lossy(&buffer[..length]).into_owned());
            let mut lines = [line().unwrap(), line().unwrap()];
            lines.sort_by_key(|line| line.contains(" node=n2 "));
            lines
        };
        let file = slurm.dir().join("site.toml");
        fs::write(&file, SITE).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        slurm.plugstack(&[&format!("optional {library} config={}", file.display())]);

        let line = "NCCL_NET=Socket srun -N2 -n4 --ntasks-per-node=2 --palingenesis=mixtral RECORD t";
        let run = slurm.record(line);
        assert_eq!(run.tasks("t").len(), 4);
        for task in run.tasks("t") {
            // The profile has 22, see src/plan/environment.rs; TOKENIZERS_PARALLELISM is
            // megatron's.
            let names = ["NCCL_IB_TIMEOUT", "NCCL_NET", "NCCL_MIN_CTAS", "TOKENIZERS_PARALLELISM"];
            assert_eq!(names.map(|name| task.get(name)), [Some("20"), Some("IB"), Some("4"), Some("false")], "{task}");
        }
        let ours = run.said.ours();
        assert_eq!(ours.len(), 1, "{:#?}", run.said);
        let place = format!("{}:8", file.display());
        for part in ["warning: NCCL_NET=Socket gives way to NCCL_NET=IB", "site file forces", &place] {
            assert!(ours[0].contains(part), "{}", ours[0]);
        }
        let uid = slurm.run("id -u").ok().out;
        let (job, uid) = (run.tasks("t")[0].get("SLURM_JOB_ID").unwrap(), uid.trim());
        for (line, node) in lines().iter().zip(["n1", "n2"]) {
            // 30: facility daemon (3 * 8), severity info (6), as in syslog.h.
            assert!(line.starts_with("<30>palingenesis["), "{line}");
            let text = format!("]: job={job} step=0 uid={uid} ranks=2/4 node={node} shape=native profile=mixtral ");
            assert!(line.contains(&text), "'{text}' is not in: {line}");
        }
        let said = slurm.run("srun -Q -N2 -n2 --palingenesis=mixtral,iface=nosuch0 echo RAN");
        assert_eq!((said.code, said.out.as_str()), (78, ""), "{said:#?}");
        for (line, node) in lines().iter().zip(["n1", "n2"]) {
            // 27: severity err (3).
            assert!(line.starts_with("<27>palingenesis["), "{line}");
            assert!(line.contains(&format!(" refused: iface=nosuch0: {node} has no such interface")), "{line}");
        }
    }
}

/// Slurm sets srun's limits in the task after the last hook of a plugin, from
/// SLURM_RLIMIT_*.
#[test]
fn the_limits_and_threads_are_those_that_the_task_will_have() {
    for (suite, release) in RELEASES {
        let Some((slurm, library)) = cluster("limits", suite, release) else { continue };
        // A node with an RDMA device, as its driver shows it.
        let node = slurm.dir().join("home/node");
        for (path, text) in [
            ("sys/class/net/eth0/ifindex", "2"),
            ("sys/class/net/eth0/flags", "0x1003"),
            ("sys/class/net/eth0/operstate", "up"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
            ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand"),
            ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)"),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA H100 80GB HBM3"),
        ] {
            let path = node.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        slurm.plugstack(&[&format!("optional {library} root={}", node.display())]);
        for (option, propagated) in [("", true), ("--propagate=MEMLOCK", true), ("--propagate=NONE", false)] {
            let limit = slurm.run(&format!("ulimit -Sl 48; srun -Q -N1 -n1 {option} sh -c 'ulimit -l'")).ok();
            assert_eq!(limit.out == "48\n", propagated, "{option}: {limit:#?}");
            let said = slurm.run(&format!("ulimit -Sl 48; srun -Q -N2 -n2 {option} --palingenesis=show true")).ok();
            let told = of(&said, "memlock");
            let low = told.iter().filter(|line| line.contains("ulimit -l is 48 KiB on n")).count();
            assert_eq!(low, usize::from(propagated), "{option}: {said:#?}");
        }

        let threads = "--palingenesis sh -c 'echo $OMP_NUM_THREADS $(env -u OMP_NUM_THREADS nproc)'";
        let said = slurm.run(&format!("srun -Q -N1 -n1 -c2 {threads}; srun -Q -N1 -n2 -c1 {threads}")).ok();
        let lines: Vec<Vec<u32>> =
            said.out.lines().map(|line| line.split(' ').map(|word| word.parse().unwrap()).collect()).collect();
        // The share of the job's CPUs, and never more than the machine has.
        let [one, first, second] = &lines[..] else { panic!("{said:#?}") };
        assert_eq!((one[0], first[0], second[0]), (one[1].min(2), 1, 1), "{said:#?}");
    }
}

/// <https://github.com/NVIDIA/pyxis/issues/124>, with the stand-in of
/// tests/container.rs built for the release.
#[test]
fn a_container_s_option_is_recognised_before_and_after_its_plugin() {
    if !common::user_namespaces() {
        return;
    }
    for (suite, release) in RELEASES {
        let Some(plugin) = tree(suite).and_then(|tree| container_plugin(&tree.join("usr/include"))) else { continue };
        let Some((slurm, library)) = cluster("container", suite, release) else { continue };
        let image = slurm.dir().join("home/image");
        fs::create_dir(&image).unwrap();
        fs::write(image.join("environ"), "NCCL_IB_TIMEOUT=14\nPATH=/opt/image/bin:/usr/bin:/bin\n").unwrap();
        let (theirs, ours) = (format!("required {}", plugin.display()), format!("optional {library}"));
        let srun = format!("srun -Q -N2 -n2 --palingenesis --container-image={}", image.display());
        let task = "sh -c 'echo $NCCL_IB_TIMEOUT $PATH $(readlink /proc/self/ns/user)' | sort";

        slurm.plugstack(&[&theirs, &ours]);
        let said = slurm.run(&format!("NCCL_IB_TIMEOUT=20 {srun} {task}")).ok();
        let inside: Vec<&str> = said.out.lines().collect();
        assert_eq!((inside.len(), said.err.as_str()), (2, ""), "{said:#?}");
        let outside = slurm.run("readlink /proc/self/ns/user").ok().out;
        for line in inside {
            let (values, namespace) = line.rsplit_once(' ').unwrap();
            assert_eq!(values, "20 /opt/image/bin:/usr/bin:/bin");
            assert!(namespace != outside.trim(), "it is no container");
        }

        slurm.plugstack(&[&ours, &theirs]);
        let said = slurm.run(&format!("NCCL_IB_TIMEOUT=20 {srun} {task}")).ok();
        let [warning] = said.ours()[..] else { panic!("not one line: {said:#?}") };
        assert!(warning.contains("palingenesis: warning: ") && warning.ends_with("[container-order]"), "{warning}");
        let list = warning.split_once("--container-env=").unwrap().1.split(", or ask").next().unwrap();
        assert!(list.split(',').any(|name| name == "NCCL_IB_TIMEOUT"), "{warning}");
        assert!(said.out.lines().count() == 2 && said.out.lines().all(|line| line.starts_with("14 ")), "{said:#?}");
        // With the list as it was told, and handed down by salloc.
        let kept = format!("--container-image={} --container-env={list}", image.display());
        let said = slurm.run(&format!("NCCL_IB_TIMEOUT=20 salloc -Q -N2 -n2 {kept} srun --palingenesis {task}")).ok();
        assert_eq!((said.out.lines().count(), said.err.as_str()), (2, ""), "{said:#?}");
        assert!(said.out.lines().all(|line| line.starts_with("20 ")), "{said:#?}");
        let error = srun.replace("--palingenesis", "--palingenesis=container-order=error");
        let said = slurm.run(&format!("{error} echo RAN"));
        assert_eq!((said.code, said.out.as_str()), (78, ""), "{said:#?}");
    }
}

/// <https://docs.coreweave.com/products/sunk/optimize_workloads/cpu-binding-numa-affinity>:
/// masks are set by slurmstepd before our hook and by nobody after it; srun's
/// options and variables are read as in 22.05.
#[test]
fn masks_that_are_exchanged_before_the_program_starts_stay() {
    for (suite, release) in RELEASES {
        let Some(tree) = tree(suite) else { continue };
        let root = tree.to_string_lossy().into_owned();
        println!("Slurm {release}:");
        let name = format!("release-{suite}");
        let Some(slurm) = Cluster::up(&name, &CROSSED, &library(release), &["--root", &root]) else { continue };
        slurm.two("", "").have(SLURM_S, "without the flag");
        let ranks = slurm.two("", "--palingenesis").are_quiet();
        ranks.have(EXCHANGED, "crossed");
        let preferred = ranks.policies[&1].as_str();
        assert!(preferred == "prefer (many):0" || preferred == "prefer:0", "{ranks:#?}");
        assert_eq!(ranks.policies[&0], "default", "{ranks:#?}");
        for option in ["--cpu-bind=map_cpu:0,1", "--cpu_ mask_cpu:0x1,0x2", "--cpu-b=cores"] {
            slurm.two("", &format!("--palingenesis {option}")).have(SLURM_S, option);
        }
        slurm.two("SLURM_CPU_BIND=map_cpu:0,1", "--palingenesis").have(SLURM_S, "SLURM_CPU_BIND");
        slurm.two("", "--palingenesis --cpu-bind=verbose").have(EXCHANGED, "--cpu-bind=verbose");
        slurm.two("", "--palingenesis=bind=off").have(SLURM_S, "bind=off");
        let ranks = slurm.two("", "--palingenesis --mem-bind=local");
        assert!(ranks.policies.values().all(|policy| policy == "bind:0"), "{ranks:#?}");
        let line = "srun -Q -N1 -n2 --gpus-per-node=2 --palingenesis sh -c TASK sh --cpu-bind=none";
        slurm.run(line).have(EXCHANGED, line);
    }
}
