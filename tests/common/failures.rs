//! What goes wrong between the nodes of a cluster, provoked for real on one node
//! of a sandbox (`--namespace-per-node`, `--scratch`): firewalls, lost links, wrong
//! names, file systems of its own, processes stopped or killed.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::Sandbox;

/// The ports that MASTER_PORT is taken from.
pub const MASTER_PORTS: &str = "20000-31999";
/// The ports the kernel gives to programs that ask for any.
pub const ANY_PORTS: &str = "32768-60999";

const NO_FIREWALL: &str = "! nft list table inet test >/dev/null 2>&1 || nft delete table inet test";

/// What a firewall does with a connection.
#[derive(Debug, Clone, Copy)]
pub enum Firewall {
    /// Says nothing.
    Drop,
    /// Answers as a host does where nobody listens.
    Reset,
    /// Answers that it is forbidden.
    Prohibit,
    /// Answers that there is no such host.
    Unreachable,
}

impl Firewall {
    fn verdict(self) -> &'static str {
        match self {
            Firewall::Drop => "drop",
            Firewall::Reset => "reject with tcp reset",
            Firewall::Prohibit => "reject with icmp type admin-prohibited",
            Firewall::Unreachable => "reject with icmp type host-unreachable",
        }
    }
}

/// The address of node `n1`, `n2`, …
pub fn address(node: &str) -> String {
    format!("10.99.0.{}", node.trim_start_matches('n'))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The nodes of a sandbox, to break.
pub struct Nodes<'a> {
    /// The cluster.
    pub sandbox: &'a Sandbox,
    /// What mends each thing broken: node and command.
    undo: Mutex<Vec<(String, String)>>,
    /// Programs of others that run on the nodes.
    strangers: Mutex<Vec<(Child, BufReader<ChildStdout>)>>,
}

impl<'a> Nodes<'a> {
    /// Nothing is broken yet.
    pub fn of(sandbox: &'a Sandbox) -> Nodes<'a> {
        Nodes { sandbox, undo: Mutex::default(), strangers: Mutex::default() }
    }

    /// Breaks something on a node by a bash line as root; `undo` mends it.
    #[track_caller]
    pub fn change(&self, node: &str, line: &str, undo: &str) {
        lock(&self.undo).push((node.into(), undo.into()));
        self.root(node, line);
    }

    /// Mends everything, the last first, and waits until the cluster is idle.
    pub fn restore(&self) {
        for (mut stranger, _) in std::mem::take(&mut *lock(&self.strangers)) {
            // It sends the program SIGTERM.
            let _ = stranger.kill();
            let _ = stranger.wait();
        }
        let undo = std::mem::take(&mut *lock(&self.undo));
        for (node, line) in undo.iter().rev() {
            self.root(node, line);
        }
        self.sandbox.resume();
    }

    /// A bash line as root on one node.
    #[track_caller]
    pub fn root(&self, node: &str, line: &str) -> String {
        let line = format!("cd /; set -e; {line}");
        self.sandbox.run_as(&["--as-root", "--node", node], &line, 30).ok().out
    }

    /// Between now and [`Nodes::restore`] connections from node `from` to these ports
    /// of node `on` meet a firewall.
    pub fn firewall(&self, on: &str, from: &str, ports: &str, firewall: Firewall) {
        let (from, verdict) = (address(from), firewall.verdict());
        self.change(
            on,
            &format!(
                "nft add table inet test
                 nft add chain inet test in '{{ type filter hook input priority 0; policy accept; }}'
                 nft add rule inet test in ip saddr {from} tcp dport {ports} {verdict}"
            ),
            NO_FIREWALL,
        );
    }

    /// Takes the firewall of `on` away.
    pub fn no_firewall(&self, on: &str) {
        self.root(on, NO_FIREWALL);
    }

    /// Pulls the node's cable out.
    pub fn no_link(&self, node: &str) {
        self.change(node, "ip link set eth0 down", "ip link set eth0 up");
    }

    /// The node's own version of a file of /etc.
    pub fn own_file(&self, node: &str, path: &str, text: &str) {
        let own = self.sandbox.dir().join(format!("own.{node}.{}", path.replace('/', "-")));
        fs::write(&own, text).expect("the sandbox's folder is ours");
        self.change(node, &format!("mount --bind {} {path}", own.display()), &format!("umount {path}"));
    }

    /// The node's own /etc/hosts: the cluster's, with another address for `name`;
    /// without one the name is not in it.
    pub fn own_hosts(&self, node: &str, name: &str, address: Option<&str>) {
        let hosts = fs::read_to_string(self.sandbox.dir().join("etc/hosts")).expect("the sandbox made it");
        let mut own: String = hosts
            .lines()
            .filter(|line| !line.ends_with(&format!(" {name}")))
            .fold(String::new(), |text, line| text + line + "\n");
        if let Some(address) = address {
            own += &format!("{address} {name}\n");
        }
        self.own_file(node, "/etc/hosts", &own);
    }

    /// The node's own plugstack.conf.
    pub fn own_plugstack(&self, node: &str, lines: &str) {
        self.own_file(node, "/etc/slurm/plugstack.conf", &format!("{lines}\n"));
    }

    /// Where the file system lies that all nodes share.
    pub fn scratch(&self) -> PathBuf {
        self.sandbox.dir().join("scratch")
    }

    /// The node sees the shared file system, but may not write it.
    pub fn read_only(&self, node: &str) {
        let scratch = self.scratch().display().to_string();
        self.change(
            node,
            &format!("mount --bind {scratch} {scratch}; mount -o remount,bind,ro {scratch}"),
            &format!("umount {scratch}"),
        );
    }

    /// The node has a file system of its own where the others have the shared one.
    pub fn own_scratch(&self, node: &str) {
        let scratch = self.scratch().display().to_string();
        self.change(node, &format!("mount -t tmpfs -o mode=1777,size=4M own {scratch}"), &format!("umount {scratch}"));
    }

    /// Fills the shared file system to the last byte.
    pub fn fill_scratch(&self) {
        let fill = self.scratch().join("fill").display().to_string();
        self.change("n1", &format!("head -c 1G /dev/zero 2>/dev/null >{fill} || [ -s {fill} ]"), &format!("rm {fill}"));
    }

    /// Lets the shared file system hold no further file.
    pub fn no_inodes(&self) {
        let scratch = self.scratch().display().to_string();
        let (line, undo) = ("mount -o remount,nr_inodes=", format!("mount -o remount,nr_inodes=10000 {scratch}"));
        self.change("n1", &format!("{line}$(df --output=iused {scratch} | tail -n 1 | tr -d ' ') {scratch}"), &undo);
    }

    /// Starts a Python program of another user on a node, and waits until it prints
    /// a line. It ends with [`Nodes::restore`], or after a minute.
    pub fn stranger(&self, node: &str, program: &str, arguments: &[&str]) {
        let mut command = self.sandbox.command(&["--node", node, "--user", "nobody"]);
        command.args(["timeout", "60", "python3", "-u", "-c", program]).args(arguments);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("bash is there");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("it was asked for"));
        out.read_line(&mut line).expect("it prints a line");
        lock(&self.strangers).push((child, out));
        assert!(!line.is_empty(), "the stranger on {node} does not run");
    }

    /// Waits for the end of all strangers; what they said after their first line.
    pub fn last_words(&self) -> Vec<String> {
        let ended = std::mem::take(&mut *lock(&self.strangers)).into_iter().map(|(mut stranger, mut out)| {
            let mut text = String::new();
            out.read_to_string(&mut text).expect("it is text");
            stranger.wait().expect("it is our child");
            text
        });
        ended.collect()
    }

    /// The process ids of the node's tasks that are with us, in the order of their
    /// local ranks; not what those start, but tasks whose slurmstepd was killed.
    pub fn tasks(&self, node: &str) -> Vec<u32> {
        let found = self.root(
            node,
            r#"own=$(readlink /proc/self/ns/net)
               for process in /proc/[0-9]*; do
                   { read -r name <$process/comm; } 2>/dev/null && [ "$name" = palingenesis ] || continue
                   [ "$(readlink $process/ns/net)" = "$own" ] || continue
                   parent=$(sed -n 's/^PPid:\t//p' $process/status) 2>/dev/null || continue
                   { read -r name </proc/$parent/comm; } 2>/dev/null || continue
                   [ "$name" = palingenesis ] || echo ${process#/proc/}
               done"#,
        );
        let mut tasks: Vec<u32> = found.lines().filter_map(|line| line.parse().ok()).collect();
        tasks.sort_unstable();
        tasks
    }

    /// Waits until that many tasks of the node are with us.
    pub fn wait_for_tasks(&self, node: &str, count: usize) -> Vec<u32> {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let tasks = self.tasks(node);
            if tasks.len() >= count {
                return tasks;
            }
            assert!(Instant::now() < end, "{node} has {} of {count} tasks in the pre-flight", tasks.len());
            sleep(Duration::from_millis(50));
        }
    }

    /// Sends a signal to processes of the node.
    pub fn signal(&self, node: &str, signal: &str, processes: &[u32]) {
        let processes: Vec<String> = processes.iter().map(u32::to_string).collect();
        self.root(node, &format!("kill -{signal} {}", processes.join(" ")));
    }

    /// The node's slurmd.
    pub fn slurmd(&self, node: &str) -> u32 {
        let said = self.root(node, &format!("cat /run/slurmd.{node}.pid"));
        said.trim().parse().expect("a process id")
    }

    /// The process ids of the node's slurmstepd of the newest job.
    pub fn slurmstepd(&self, node: &str) -> Vec<u32> {
        let found = self.root(
            node,
            r#"own=$(readlink /proc/self/ns/net)
               for process in /proc/[0-9]*; do
                   { read -r name <$process/comm; } 2>/dev/null && [ "$name" = slurmstepd ] || continue
                   [ "$(readlink $process/ns/net)" != "$own" ] || echo ${process#/proc/}
               done"#,
        );
        found.lines().filter_map(|line| line.parse().ok()).collect()
    }
}
