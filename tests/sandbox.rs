//! The cluster that the other tests run on keeps its promises: what it pretends
//! (GPUs, nodes with a name and a /tmp of their own), that it is cut off from the
//! machine, and that nothing of it stays.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::Sandbox;

/// `slurm-sandbox ARGUMENTS`, at most a minute.
fn script(arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60"]).arg(common::root().join("tests/sandbox/slurm-sandbox")).args(arguments);
    command.env_remove("SLURM_SANDBOX_DIR").stdin(Stdio::null());
    command
}

/// Exit code, stdout and stderr.
fn said(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).expect("it writes UTF-8");
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

fn call(arguments: &[&str]) -> (i32, String, String) {
    said(script(arguments).output().expect("timeout is there"))
}

/// A name for a sandbox's folder that nothing else on this machine has.
fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("palingenesis-test-{name}-{}", std::process::id()))
}

/// Processes in a mount namespace where something of the sandbox in `dir` is
/// mounted: all that belong to it, as its /etc/slurm lies there.
fn processes_of(dir: &Path) -> BTreeSet<u32> {
    let name = dir.file_name().unwrap().to_string_lossy().into_owned();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|entry| {
            // Empty for one that has just ended.
            fs::read_to_string(entry.path().join("mountinfo")).is_ok_and(|mounts| mounts.contains(&name))
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The cgroups that a sandbox in `dir` would make.
fn cgroups_of(dir: &Path) -> Vec<PathBuf> {
    let line = format!("cksum <<<'{}'", dir.display());
    let output = Command::new("bash").args(["-c", &line]).output().expect("bash is there");
    let sum = String::from_utf8(output.stdout).unwrap();
    let name = format!("slurm-sandbox-{}", sum.split(' ').next().unwrap());
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    hierarchies.map(|entry| entry.path().join(&name)).filter(|path| path.exists()).collect()
}

#[track_caller]
fn nothing_is_left_of(dir: &Path) {
    let end = Instant::now() + Duration::from_secs(10);
    while !processes_of(dir).is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(processes_of(dir), BTreeSet::new(), "processes or mounts");
    assert_eq!(cgroups_of(dir), [] as [PathBuf; 0]);
    assert!(!dir.exists(), "{} is still there", dir.display());
}

/// What opening each pretended GPU says in a task.
const OPEN: &str = "for i in 0 1; do LC_ALL=C dd if=/run/fakegpu/gpu$i of=/dev/null 2>&1 | head -n 1; done";
const NO_DRIVER: &str = "No such device or address"; // ENXIO
const NOT_PERMITTED: &str = "Operation not permitted"; // EPERM

#[test]
fn slurm_gives_out_the_pretended_gpus() {
    let Some(slurm) = Sandbox::up("sandbox-gpus", &["--gpus", "2", "--sockets", "1", "--cores", "2"]) else { return };
    let visible = "sh -c 'echo $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES-unset}' | sort";
    assert_eq!(slurm.run(&format!("srun -n1 --gres=gpu:1 {visible}")).ok().out, "n1 0\n");
    assert_eq!(slurm.run(&format!("srun -N2 --gpus-per-node=2 {visible}")).ok().out, "n1 0,1\nn2 0,1\n");
    assert_eq!(slurm.run(&format!("srun -n1 {visible}")).ok().out, "n1 unset\n");

    // Two steps at a time have different ones. Each waits for the other's file.
    let step = r#"srun --exact -n1 --gres=gpu:1 sh -c '
        echo $CUDA_VISIBLE_DEVICES; touch ~/gpu.$CUDA_VISIBLE_DEVICES
        for i in $(seq 200); do [ -e ~/gpu.0 ] && [ -e ~/gpu.1 ] && exit; sleep 0.1; done; exit 9'"#;
    let said = slurm.run(&format!(
        "cat >~/both <<'END'\n{step} &\nfirst=$!\n{step} || exit\nwait $first\nEND\n
         salloc -Q -N1 -n2 --gres=gpu:2 bash ~/both | sort"
    ));
    assert_eq!(said.ok().out, "0\n1\n");

    // Without control groups every device can be opened, as far as its driver goes.
    let said = slurm.run(&format!("srun -n1 --gres=gpu:1 bash -c '{OPEN}'")).ok();
    assert_eq!(said.out.matches(NO_DRIVER).count(), 2, "{}", said.out);
}

#[test]
fn with_control_groups_a_task_opens_its_own_gpu_only() {
    let Some(slurm) = Sandbox::up("sandbox-cgroup", &["--cgroup", "--gpus", "2"]) else { return };
    let said = slurm.run(&format!("srun -n1 --gres=gpu:1 bash -c 'echo $CUDA_VISIBLE_DEVICES; {OPEN}'")).ok();
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines.len() == 3 && lines[0] == "0", "{}", said.out);
    assert!(lines[1].contains("gpu0") && lines[1].contains(NO_DRIVER), "{}", said.out);
    assert!(lines[2].contains("gpu1") && lines[2].contains(NOT_PERMITTED), "{}", said.out);

    let said = slurm.run(&format!("srun -n1 bash -c '{OPEN}'")).ok();
    assert_eq!(said.out.matches(NOT_PERMITTED).count(), 2, "{}", said.out);
    // The login host is no task.
    let said = slurm.run(OPEN).ok();
    assert_eq!(said.out.matches(NO_DRIVER).count(), 2, "{}", said.out);

    let dir = slurm.dir().to_path_buf();
    assert!(!cgroups_of(&dir).is_empty());
    drop(slurm);
    nothing_is_left_of(&dir);
}

#[test]
fn each_node_can_have_its_own_name_address_and_tmp() {
    let arguments = ["--namespace-per-node", "--hide-resolve", "n2"];
    let Some(slurm) = Sandbox::up("sandbox-nodes", &arguments) else { return };
    let name = format!("{}.own", slurm.dir().file_name().unwrap().to_string_lossy());
    let said = slurm.run(&format!(
        "srun -N2 -n2 sh -c 'hostname >/tmp/{name}; touch /dev/shm/$(hostname); touch ~/shared.$(hostname)'
         srun -N2 -n2 sh -c 'echo $(hostname): $(cat /tmp/{name}) $(ls /dev/shm)' | sort
         srun -N2 -n2 sh -c 'echo $(hostname): $(getent hosts n1 || echo unknown)' | sort
         srun -N2 -n2 sh -c 'ip -o -4 addr show dev eth0 | sed \"s/.*inet //; s/ .*//\"' | sort
         ls ~"
    ));
    let expected =
        "n1: n1 n1\nn2: n2 n2\nn1: 10.99.0.1 n1\nn2: unknown\n10.99.0.1/24\n10.99.0.2/24\nshared.n1\nshared.n2\n";
    assert_eq!(said.ok().out, expected);
    assert!(!Path::new("/tmp").join(&name).exists(), "a node's /tmp is the machine's");
    assert_eq!(slurm.run_as(&["--node", "n2"], "hostname; id -un", 20).ok().out, "n2\ntrainer\n");
    let said = slurm.run_as(&["--node", "n3"], "hostname", 20);
    assert!(said.code == 2 && said.err.contains("there is no node n3; the nodes are: n1 n2"), "{}", said.err);
    // The login host is none of them, and the machine's own name is not changed.
    assert_eq!(slurm.run("hostname").ok().out, "head\n");
    assert_ne!(fs::read_to_string("/proc/sys/kernel/hostname").unwrap(), "head\n");

    let dir = slurm.dir().to_path_buf();
    drop(slurm);
    nothing_is_left_of(&dir);
}

#[test]
fn two_clusters_side_by_side_do_not_meet() {
    let Some(one) = Sandbox::up("sandbox-one", &["--names", "a1,a2"]) else { return };
    let Some(two) = Sandbox::up("sandbox-two", &["--names", "b1"]) else { return };
    let nodes = "sinfo -h -N -o '%N %T'";
    assert_eq!(one.run(nodes).ok().out, "a1 idle\na2 idle\n");
    assert_eq!(two.run(nodes).ok().out, "b1 idle\n");
    for slurm in [&one, &two] {
        assert_eq!(slurm.run("srun -n1 sh -c 'echo $SLURM_JOB_ID'").ok().out, "1\n");
    }
    one.plugstack(&["required /nonexistent.so"]);
    assert_ne!(one.run("srun -n1 true").code, 0);
    two.run("srun -n1 true").ok();

    let dir = one.dir().to_path_buf();
    drop(one);
    nothing_is_left_of(&dir);
    assert_eq!(two.run("srun -n1 sh -c 'echo $SLURM_JOB_ID'").ok().out, "3\n");
}

#[test]
fn a_failed_start_names_the_daemon_and_leaves_nothing() {
    if Sandbox::up("sandbox-possible", &[]).is_none() {
        return;
    }
    for (number, (setting, daemon, reason)) in [
        ("FooBar=1", "slurmctld: did not start", "Unable to process configuration file"),
        ("TaskPlugin=task/nonesuch", "slurmd.n1: ", "task/nonesuch"),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = folder(&format!("sandbox-failed{number}"));
        let (code, out, err) = call(&["up", "--dir", dir.to_str().unwrap(), "--conf", setting]);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert!(err.starts_with(&format!("slurm-sandbox: {daemon}")), "{err}");
        assert!(err.contains("the end of its log:") && err.contains(reason), "{err}");
        nothing_is_left_of(&dir);
    }
}

#[test]
fn an_interrupted_start_leaves_nothing() {
    if Sandbox::up("sandbox-uninterrupted", &[]).is_none() {
        return;
    }
    for wait in [10, 60, 120, 180] {
        let dir = folder(&format!("sandbox-interrupted{wait}"));
        // Without `timeout` in between, which would keep the signal to itself.
        let mut up = Command::new(common::root().join("tests/sandbox/slurm-sandbox"));
        let mut up = up.arg("up").arg("--dir").arg(&dir).stdout(Stdio::null()).spawn().expect("bash is there");
        std::thread::sleep(Duration::from_millis(wait));
        // SAFETY: the process is our child, and we have not waited for it yet.
        unsafe { libc::kill(up.id() as libc::pid_t, libc::SIGTERM) };
        // 0: it was quicker; none: bash had not come to its traps yet.
        let code = up.wait().unwrap().code();
        assert!([None, Some(0), Some(143)].contains(&code), "{code:?}");
        if code != Some(143) {
            assert_eq!(call(&["down", "--dir", dir.to_str().unwrap()]).0, 0);
        }
        nothing_is_left_of(&dir);
    }
}

#[test]
fn down_leaves_nothing_and_can_be_repeated() {
    let Some(slurm) = Sandbox::up("sandbox-down", &[]) else { return };
    let dir = slurm.dir().to_path_buf();
    let at = dir.to_str().unwrap();
    // A job that would run on, and something that left its session.
    slurm.run("sbatch --wrap 'sleep 1000'; setsid sleep 1000 >/dev/null 2>&1 &").ok();
    // Pid 1, munged, slurmctld and two slurmd at least.
    assert!(processes_of(&dir).len() >= 5, "{:?}", processes_of(&dir));
    assert!(!processes_of(&dir).contains(&std::process::id()), "a mount of the sandbox is visible outside");
    assert_eq!(call(&["down", "--dir", at]), (0, String::new(), String::new()));
    nothing_is_left_of(&dir);
    assert_eq!(call(&["down", "--dir", at]), (0, String::new(), String::new()));

    // A folder of somebody else is left alone.
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("thesis"), "text").unwrap();
    let (code, _, err) = call(&["down", "--dir", at]);
    assert!(code == 1 && err.contains("not a sandbox's directory; nothing done"), "{err}");
    let (code, _, err) = call(&["up", "--dir", at]);
    assert!(code == 1 && err.contains("use another --dir"), "{err}");
    assert_eq!(fs::read_to_string(dir.join("thesis")).unwrap(), "text");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_second_start_is_refused_and_one_after_a_kill_works() {
    let Some(slurm) = Sandbox::up("sandbox-again", &[]) else { return };
    let at = slurm.dir().to_str().unwrap();
    let (code, out, err) = call(&["up", "--dir", at]);
    let cure = format!("a cluster is already running in {at}; end it with: slurm-sandbox down --dir {at}");
    assert_eq!((code, out.as_str(), err.as_str()), (1, "", format!("slurm-sandbox: {cure}\n").as_str()));
    slurm.run("srun -n1 true").ok();

    let pid = fs::read_to_string(slurm.dir().join("ctl/pid")).unwrap();
    let pid: libc::pid_t = pid.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: no memory is involved; the sandbox's pid 1 runs until we end it.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    let end = Instant::now() + Duration::from_secs(10);
    while !processes_of(slurm.dir()).is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, _, err) = call(&["run", "--dir", at, "true"]);
    let cure = format!("no cluster is running in {at}; start one with: slurm-sandbox up --dir {at}");
    assert_eq!((code, err), (1, format!("slurm-sandbox: {cure}\n")));
    assert_eq!(call(&["up", "--dir", at]).0, 0);
    slurm.run("srun -n1 true").ok();
}

#[test]
fn run_passes_arguments_standard_input_and_exit_code_through() {
    let Some(slurm) = Sandbox::up("sandbox-run", &["--nodes", "1"]) else { return };
    let at = slurm.dir().to_str().unwrap();
    let mut command = script(&["run", "--dir", at, "--", "bash", "-c", "cat; echo bad >&2; exit 37"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().unwrap().write_all(b"one\ntwo").unwrap();
    assert_eq!(said(child.wait_with_output().unwrap()), (37, "one\ntwo".into(), "bad\n".into()));

    let (code, out, _) = call(&["run", "--dir", at, "printf", "<%s>", "a b", "", "$HOME", "--", "*"]);
    assert_eq!((code, out.as_str()), (0, "<a b><><$HOME><--><*>"));
    let mut command = script(&["run", "--dir", at, "--env", "GIVEN=x y", "env"]);
    let (_, out, _) = said(command.env("OUTSIDE", "1").env("TERM", "dumb").output().unwrap());
    let names: BTreeSet<&str> = out.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    // PWD is the shell's that changes to the current directory.
    assert_eq!(names, BTreeSet::from(["GIVEN", "HOME", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "USER"]));
    assert!(out.contains("GIVEN=x y\n"), "{out}");

    let (code, _, err) = call(&["run", "--dir", at]);
    assert!(code == 2 && err.contains("no command given"), "{err}");
    let (code, _, err) = call(&["run", "--dir", at, "--user", "nobody-there", "true"]);
    assert!(code == 2 && err.contains("nobody-there: there is no such user in the cluster"), "{err}");
}

#[test]
fn env_can_be_evaluated_by_any_shell() {
    let Some(slurm) = Sandbox::up("sandbox-env", &[]) else { return };
    let dir = slurm.dir().display();
    for shell in ["sh", "bash"] {
        let line = format!(
            "set -eu; assignments=$('{}' env --dir '{dir}'); eval \"$assignments\"
             echo \"$SANDBOX_DIR|$SANDBOX_USER|$SANDBOX_NODES|$SANDBOX_LOG_DIR|$SANDBOX_HOME\"
             kill -0 \"$SANDBOX_PID\"; echo \"$SLURM_VERSION\"",
            common::root().join("tests/sandbox/slurm-sandbox").display()
        );
        let (code, out, err) = said(Command::new(shell).args(["-c", &line]).output().unwrap());
        assert_eq!(code, 0, "{shell}: {err}");
        let (first, version) = out.split_once('\n').unwrap();
        assert_eq!(first, format!("{dir}|trainer|n1 n2|{dir}/log|{dir}/home/trainer"), "{shell}");
        assert_eq!(format!("slurm-wlm {version}"), slurm.run("sinfo -V").ok().out.replace("slurm 2", "slurm-wlm 2"));
    }
}

/// apt and useradd replace a file of /etc by renaming a new one over it. Where
/// another mount namespace has something mounted on that file, Linux takes this
/// mount away (rename(2) says EBUSY only for mounts of the own namespace).
///
/// The machine's own /etc stays as it is: the test has a copy, in a mount namespace
/// that is "the machine" for the sandbox.
#[test]
fn accounts_changed_on_the_machine_do_not_take_away_the_cluster_s() {
    if Sandbox::up("sandbox-accounts0", &[]).is_none() {
        return;
    }
    let dir = folder("sandbox-accounts");
    let line = r#"set -e
        mount -t tmpfs tmpfs /mnt
        cp -a /etc/. /mnt || cp -a /etc/. /mnt
        mount --move /mnt /etc
        trap '"$1" down --dir "$2"' EXIT
        "$1" up --dir "$2" >/dev/null
        for file in passwd group hosts nsswitch.conf; do
            cp -p "/etc/$file" "/etc/$file.new"
            mv "/etc/$file.new" "/etc/$file"
        done
        echo "added:x:4711:4711::/:/bin/sh" >>/etc/passwd
        "$1" run --dir "$2" bash -c '
            id -un
            srun -N2 id -un
            getent hosts n2
            getent passwd added || echo "added: unknown"'
        # And the other way round.
        "$1" run --as-root --dir "$2" bash -c 'cp /etc/group /etc/group.new && mv /etc/group.new /etc/group && touch /etc/inside'
        [ ! -e /etc/inside ]
        ! grep -q ^trainer: /etc/group"#;
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", "unshare", "-m", "--propagation", "private", "bash", "-c", line, "bash"]);
    command.arg(common::root().join("tests/sandbox/slurm-sandbox")).arg(&dir).env_remove("SLURM_SANDBOX_DIR");
    let (code, out, err) = said(command.output().unwrap());
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(out, "trainer\ntrainer\ntrainer\n10.99.0.2       n2\nadded: unknown\n", "{err}");
    nothing_is_left_of(&dir);
}

#[test]
fn logs_and_wrong_usage_say_what_there_is() {
    let Some(slurm) = Sandbox::up("sandbox-logs", &["--nodes", "1"]) else { return };
    let at = slurm.dir().to_str().unwrap();
    let (code, out, _) = call(&["logs", "--dir", at]);
    assert_eq!(code, 0);
    let names: BTreeSet<&str> = out.lines().filter_map(|line| line.rsplit('/').next()).collect();
    let expected = BTreeSet::from(["munged.log", "sandbox.log", "slurmctld.log", "slurmd.n1.log"]);
    assert!(names.is_superset(&expected) && out.lines().all(|line| Path::new(line).is_file()), "{out}");
    let (code, out, _) = call(&["logs", "--dir", at, "n1"]);
    assert!(code == 0 && out.contains("slurmd started"), "{out}");
    let (code, _, err) = call(&["logs", "--dir", at, "n9"]);
    assert!(code == 1 && err.contains("no log of n9") && err.contains("slurmd.n1.log"), "{err}");

    for (arguments, message) in [
        (&["up", "--nodes", "0"][..], "--nodes 0: not a number from 1 on"),
        (&["up", "--names", "n1,n1"], "a name is given twice"),
        (&["up", "--hide-resolve", "n1"], "--hide-resolve needs --namespace-per-node"),
        (&["up", "--conf", "FooBar"], "--conf 'FooBar': not KEY=VALUE"),
        (&["fly"], "unknown command fly"),
    ] {
        let (code, out, err) = call(arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}");
        assert!(err.contains(message) && err.contains("slurm-sandbox --help"), "{arguments:?}: {err}");
    }
}
