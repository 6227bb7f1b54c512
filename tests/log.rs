//! The node's log: with the flag one line per step and node, as far as the site
//! file wants it, from slurmstepd itself; without the flag nothing; and never a
//! wait or a word where nobody listens. The listener is a socket of the test's
//! own in the sandbox's own /dev.

mod common;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Sandbox, fault_library, library};

const REFUSED: i32 = 78;

struct Cluster {
    sandbox: Sandbox,
    socket: UnixDatagram,
    file: PathBuf,
    uid: String,
}

impl Cluster {
    fn up(name: &str) -> Option<Cluster> {
        let sandbox = Sandbox::up(&format!("log-{name}"), &["--nodes", "2", "--cores", "4"])?;
        let socket = sandbox.syslog();
        let file = sandbox.dir().join("site.toml");
        let uid = sandbox.run("id -u").ok().out.trim().to_string();
        let cluster = Cluster { sandbox, socket, file, uid };
        cluster.load(&library().display().to_string(), "");
        Some(cluster)
    }

    fn load(&self, library: &str, arguments: &str) {
        self.sandbox.plugstack(&[&format!("optional {library} config={} {arguments}", self.file.display())]);
    }

    fn level(&self, level: &str) {
        fs::write(&self.file, format!("log = \"{level}\"\n")).unwrap();
        fs::set_permissions(&self.file, fs::Permissions::from_mode(0o644)).unwrap();
    }

    /// At least `lines` lines, and whatever else comes until every slurmstepd has
    /// ended; sorted, since two nodes write.
    fn lines(&self, lines: usize) -> Vec<String> {
        let mut found = Vec::new();
        let end = Instant::now() + Duration::from_secs(20);
        self.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut ended = false;
        loop {
            let mut buffer = [0; 4096];
            match self.socket.recv(&mut buffer) {
                Ok(length) => found.push(String::from_utf8(buffer[..length].to_vec()).expect("UTF-8")),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if (ended && found.len() >= lines) || Instant::now() > end {
                        break;
                    }
                    ended = self.sandbox.run("pgrep -x slurmstepd").code == 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(found.len(), lines, "{found:#?}");
        found.sort_by_key(|line| line.split_once(": ").map(|(_, text)| text.to_string()));
        found
    }
}

#[test]
fn each_level_writes_what_it_says_and_no_more() {
    let Some(cluster) = Cluster::up("levels") else { return };
    let sandbox = &cluster.sandbox;
    let good = "srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis=megatron true";
    let bad = "srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis=iface=nosuch0 true";
    let refused = |line: &str| assert_eq!(sandbox.run(line).code, REFUSED);

    cluster.level("info");
    let job = sandbox.run(&good.replace("true", "sh -c 'echo $SLURM_JOB_ID'")).ok();
    let job = job.out.lines().next().unwrap().to_string();
    for (line, node) in cluster.lines(2).iter().zip(["n1", "n2"]) {
        // 30: facility daemon (3 * 8), severity info (6), as in syslog.h.
        assert!(line.starts_with("<30>palingenesis["), "{line}");
        let text = format!(
            "]: job={job} step=0 uid={} ranks=2/4 node={node} shape=native profile=megatron fabric=tcp",
            cluster.uid
        );
        // Which fabric this machine has is its own matter.
        let text = text.trim_end_matches("tcp");
        assert!(line.contains(text), "'{text}' is not in: {line}");
        assert!(!line.contains("refused") && !line.contains("gpus="), "{line}");
    }
    refused(bad);
    for (line, node) in cluster.lines(2).iter().zip(["n1", "n2"]) {
        // 27: severity err (3).
        assert!(line.starts_with("<27>palingenesis["), "{line}");
        assert!(line.contains(&format!("node={node} shape=native profile=default")), "{line}");
        assert!(line.contains(&format!(" refused: iface=nosuch0: {node} has no such interface")), "{line}");
    }

    cluster.level("debug");
    sandbox.run(good).ok();
    assert!(cluster.lines(2).iter().all(|line| line.contains(" gpus=0 ")), "facts are missing");

    // Errors alone, which is also what holds where the file says nothing.
    for text in ["log = \"error\"\n", "# nothing\n"] {
        fs::write(&cluster.file, text).unwrap();
        sandbox.run(good).ok();
        refused(bad);
        assert!(cluster.lines(2).iter().all(|line| line.contains(" refused: iface=nosuch0")), "{text}");
    }
    cluster.level("off");
    sandbox.run(good).ok();
    refused(bad);
    cluster.lines(0);

    // Nothing without the flag, nor of what srun itself refuses: no step, no line.
    cluster.level("debug");
    sandbox.run("srun -Q -N2 -n2 true").ok();
    sandbox.run("srun -Q -N2 -n2 --palingenesis=off true").ok();
    sandbox.run("salloc -Q -N2 --palingenesis true").ok();
    refused("srun -N2 --palingenesis=port=80 true");
    cluster.lines(0);
    // A batch script's own step has no ranks and no line; the srun in it has.
    sandbox.batch("-N2 --palingenesis", 1, "srun -N2 -n2 true");
    assert!(cluster.lines(2).iter().all(|line| line.contains(" step=0 ")));
}

/// What is wrong before the site file is read, and in our own hooks, is an error.
#[test]
fn a_broken_site_file_and_faults_of_ours_are_in_the_log() {
    let Some(cluster) = Cluster::up("faults") else { return };
    let sandbox = &cluster.sandbox;
    let plugin = fault_library().display().to_string();
    cluster.level("error");
    for (fault, lines, text) in [
        ("fault=user_init:error:context=remote", 2, " refused: internal fault in slurm_spank_user_init: injected"),
        // On the other node, too: no rank of the step starts.
        ("fault=task_init:panic:rank=1", 2, " refused: internal fault in slurm_spank_task_init: panic at "),
        ("fault=task_exit:error:node=1", 1, " fault: internal fault in slurm_spank_task_exit: injected"),
        ("fault=exit:error:context=remote", 2, " fault: internal fault in slurm_spank_exit: injected"),
    ] {
        cluster.load(&plugin, fault);
        sandbox.run("srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis true");
        let found = cluster.lines(lines);
        assert!(found.iter().all(|line| line.starts_with("<27>") && line.contains(text)), "{fault}: {found:#?}");
        sandbox.run("srun -Q -N2 -n2 true").ok();
        cluster.lines(0);
    }
}

/// A secret's value is in no line, whatever it made go wrong.
#[test]
fn no_line_holds_a_secret_or_a_control_character() {
    let Some(cluster) = Cluster::up("secrets") else { return };
    cluster.level("debug");
    let secrets = "HF_TOKEN=s3cr3t WANDB_API_KEY=s3cr3t AWS_SECRET_ACCESS_KEY=s3cr3t";
    let said =
        cluster.sandbox.run(&format!("{secrets} srun -Q -N2 -n2 --palingenesis=iface=nosuch0 true --token=s3cr3t"));
    assert_eq!(said.code, REFUSED);
    for line in cluster.lines(2) {
        assert!(!line.contains("s3cr3t") && !line.chars().any(char::is_control), "{line}");
    }
}

/// Neither is an error, and neither is waited for: datagrams to a socket that
/// nobody reads block a sender once its queue is full (unix(7)).
#[test]
fn a_missing_log_and_a_full_one_cost_nothing_and_say_nothing() {
    let Some(cluster) = Cluster::up("full") else { return };
    let sandbox = &cluster.sandbox;
    cluster.level("info");
    let step = "srun -Q -N2 -n2 --palingenesis sh -c 'echo ran'";
    let run = |what: &str| {
        let said =
            sandbox.run(&format!("{step} && {step} && while pgrep -x slurmstepd >/dev/null; do sleep 0.1; done")).ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("ran\n".repeat(4).as_str(), ""), "{what}");
        said.took
    };
    let heard = run("a log that listens");
    cluster.lines(4);
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    sender.connect(sandbox.dir().join("dev-log")).unwrap();
    let full = std::iter::repeat_with(|| sender.send(b"full")).find_map(Result::err).unwrap();
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let full = run("a full log");
    sandbox.run_root("rm /dev/log").ok();
    let missing = run("a missing log");
    for took in [full, missing] {
        assert!(took < heard + Duration::from_secs(10), "{took:?}, where {heard:?} is usual");
    }
}
