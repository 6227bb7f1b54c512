//! What can go wrong between the nodes of a step, provoked for real on four nodes
//! with a network, names and mounts of their own: srun ends in time, with exit
//! code 78, naming the node at fault, and no rank has started. What the user then
//! reads is the table in docs/preflight.md.
//!
//! The nodes share a clock, a kernel and, where nothing is mounted over it, all file
//! systems: clock offsets, a file server's slow caches and quotas are not shown here.

mod common;

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use common::failures::{ANY_PORTS, Firewall, MASTER_PORTS, Nodes};
use common::{Said, Sandbox, fault_library, library, open_folder, root};
use palingenesis::plan::rendezvous::{DEFAULT_PORTS, sequence};

/// `EX_CONFIG` of sysexits.h.
const REFUSED: i32 = 78;
/// Tasks of each node.
const TASKS: usize = 2;
const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];
/// How long a node is waited for, in these tests.
const ARRIVAL: u64 = 4;
/// What srun itself takes for launching and ending a step on a busy machine.
const SLACK: u64 = 6;

/// How a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// No rank starts.
    Refused,
    /// All ranks start; the user is told something.
    Starts,
}

/// What srun ends with: the highest exit code of its tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// Every task was told that it does not start.
    Ours,
    /// All but the one that the row kills.
    OfTheKilled,
    /// Nodes are left that nobody can tell: as the last resort Slurm is asked to end the
    /// step, and kills whoever has not ended by then.
    LastResort,
    /// srun could not launch the step, and says so with a code of its own.
    NoLaunch,
}

impl Exit {
    fn codes(self) -> &'static [i32] {
        match self {
            Exit::Ours => &[REFUSED],
            Exit::OfTheKilled => &[137],
            Exit::LastResort => &[REFUSED, 137],
            Exit::NoLaunch => &[REFUSED, 137, 140, 143],
        }
    }

    /// For the page.
    fn words(self) -> &'static str {
        match self {
            Exit::Ours => "exit code 78",
            Exit::OfTheKilled => "exit code 137, the killed rank's own",
            Exit::LastResort => "exit code 78, or 137: Slurm was asked to end the step, and killed ranks",
            Exit::NoLaunch => "exit code 140, srun's own for a launch that failed",
        }
    }
}

/// One thing that goes wrong.
struct Row {
    /// For the page: what, and where.
    what: &'static str,
    /// Before srun: variables.
    environment: &'static str,
    /// Beside `timeout=`.
    spec: &'static str,
    /// Provokes it before the step.
    before: fn(&Nodes),
    /// Provokes it while the nodes meet.
    during: fn(&Nodes),
    ends: Ends,
    exit: Exit,
    /// What one of our lines says: the node at fault, what is wrong, the cure.
    says: &'static [&'static str],
    /// Nodes whose tasks nobody can keep from starting.
    unguarded: &'static [&'static str],
    /// `timeout=`.
    arrival: u64,
    /// In seconds.
    within: u64,
    /// Tries Slurm's own patience, which takes long.
    slow: bool,
}

const ROW: Row = Row {
    what: "",
    environment: "",
    spec: "",
    before: |_| (),
    during: |_| (),
    ends: Ends::Refused,
    exit: Exit::Ours,
    says: &[],
    unguarded: &[],
    arrival: ARRIVAL,
    within: ARRIVAL + SLACK,
    slow: false,
};

/// Starts four nodes, or says why not.
fn up(name: &str) -> Option<Sandbox> {
    if !std::process::Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: nft is missing (Debian: nftables)");
        return None;
    }
    let mut arguments = vec!["--nodes", "4", "--namespace-per-node", "--cores", "4", "--scratch", "4M"];
    // How soon Slurm itself takes a node that does not answer for down.
    arguments.extend(["--conf", "SlurmdTimeout=10"]);
    let sandbox = Sandbox::up(&format!("preflight-{name}"), &arguments)?;
    // Ends by itself, some time after srun should have.
    sandbox.run(
        "mkdir ~/ran; printf '#!/bin/sh\\ntouch ~/ran/$SLURMD_NODENAME.$SLURM_LOCALID\\nexec sleep ${HANGS:-0}\\n' >~/train
         chmod +x ~/train",
    );
    Some(sandbox)
}

/// Runs the step of a row, and checks everything that is the same for all rows.
fn provoke(nodes: &Nodes, row: &Row) -> Result<Said, String> {
    nodes.sandbox.plugstack(&[&format!("optional {}", library().display())]);
    nodes.sandbox.run("rm -f ~/ran/*").ok();
    (row.before)(nodes);
    // A rank that starts although it must not is to be seen in the time, too.
    let hangs = if row.ends == Ends::Starts { 0 } else { 30 };
    let spec = row.spec.replace("SCRATCH", &nodes.scratch().display().to_string());
    let comma = if spec.is_empty() { "" } else { "," };
    let line = format!(
        "cd; HANGS={hangs} {} srun -Q -N4 --ntasks-per-node={TASKS} --palingenesis=timeout={}{comma}{spec} ./train",
        row.environment, row.arrival
    );
    let said = thread::scope(|scope| {
        let srun = scope.spawn(|| nodes.sandbox.run_as(&[], &line, 60));
        (row.during)(nodes);
        srun.join().expect("the thread runs srun")
    });
    let ran = nodes.sandbox.run("cd ~/ran; ls").ok().out;
    let ran: Vec<&str> = ran.lines().filter(|task| !row.unguarded.iter().any(|node| task.starts_with(node))).collect();
    let mut wrong = Vec::new();
    let mut check = |right: bool, what: String| {
        if !right {
            wrong.push(what);
        }
    };
    let codes = if row.ends == Ends::Refused { row.exit.codes() } else { &[0] };
    check(codes.contains(&said.code), format!("exit code {}, none of {codes:?}", said.code));
    match row.ends {
        Ends::Refused => check(ran.is_empty(), format!("ranks have started: {ran:?}")),
        Ends::Starts => check(ran.len() == TASKS * NODES.len(), format!("only these ranks have started: {ran:?}")),
    }
    check(said.took < Duration::from_secs(row.within), format!("it took longer than {} s", row.within));
    let right = |line: &&str| row.says.iter().all(|part| line.contains(part));
    check(row.says.is_empty() || said.ours().iter().any(right), format!("no line says all of {:?}", row.says));
    // Who stopped the start, and why, stands in its own line.
    check(row.exit == Exit::NoLaunch || !said.err.contains("by somebody else"), "we blame somebody else".into());
    check(!said.err.contains("panicked") && !said.err.contains("a fault of ours"), "a panic".into());
    for node in NODES {
        let left = nodes.tasks(node);
        check(left.is_empty(), format!("on {node} {} tasks still wait", left.len()));
    }
    let text = format!("{}\n  {line}\n  exit code {} after {:.1?}\n", row.what, said.code, said.took);
    let text = format!("{text}{}{}", said.out, said.err);
    println!("{text}");
    if wrong.is_empty() { Ok(said) } else { Err(format!("{text}WRONG: {}\n", wrong.join("; "))) }
}

/// Clusters on which a test's rows run beside each other: most of them wait.
const LANES: usize = 2;

/// Whether the rows that try Slurm's own patience are run.
fn patient() -> bool {
    ["PALINGENESIS_SOAK", "UPDATE_DOCS"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Runs the rows, writes their part of the page or compares it.
fn all(name: &str, rows: &[Row]) {
    let only = std::env::var("PREFLIGHT_ROW").unwrap_or_default();
    let (rows, left_out): (Vec<&Row>, Vec<&Row>) =
        rows.iter().filter(|row| row.what.contains(&only)).partition(|row| patient() || !row.slow);
    for row in &left_out {
        println!("NOT RUN, for it takes long (PALINGENESIS_SOAK=1 runs it): {}", row.what);
    }
    let next = AtomicUsize::new(0);
    let outcomes: Mutex<Vec<(usize, Result<String, String>)>> = Mutex::default();
    let lane = |lane: usize| {
        let Some(sandbox) = up(&format!("{name}-{lane}")) else { return };
        let nodes = Nodes::of(&sandbox);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(row) = rows.get(index) else { return };
            let outcome = provoke(&nodes, row).map(|said| line(&nodes, row, &said));
            nodes.restore();
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((index, outcome));
        }
    };
    thread::scope(|scope| {
        for number in 0..LANES.min(rows.len()) {
            scope.spawn(move || lane(number));
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    if outcomes.is_empty() {
        return;
    }
    outcomes.sort_by_key(|(index, _)| *index);
    let wrong: String = outcomes.iter().filter_map(|(_, outcome)| outcome.as_ref().err().cloned()).collect();
    assert!(wrong.is_empty(), "\n{wrong}");
    let lines: String = outcomes.into_iter().filter_map(|(_, outcome)| outcome.ok()).collect();
    if only.is_empty() {
        let left_out: Vec<String> = left_out.iter().map(|row| format!("| {} |", row.what)).collect();
        page(name, &format!("| what is wrong | srun ends | what it says |\n|---|---|---|\n{lines}"), &left_out);
    }
}

/// A row of the page.
fn line(nodes: &Nodes, row: &Row, said: &Said) -> String {
    let scratch = nodes.scratch().display().to_string();
    // How long others are waited for depends on the machine, and which node seems slow: they
    // share its CPUs. What several nodes say comes in any order.
    let mut lines: Vec<String> = said
        .ours()
        .iter()
        .filter(|line| !line.contains("palingenesis: waiting for") && !line.contains("[nodes-slow]"))
        .map(|line| format!("`{}`", line.replace(&scratch, "/scratch").replace('|', "\\|")))
        .collect();
    lines.sort_by_key(|line| (!line.contains("palingenesis: error: "), without_numbers(line), line.clone()));
    lines.dedup();
    let ends = match row.ends {
        Ends::Refused => format!("after {:.0} s, {}", said.took.as_secs_f64(), row.exit.words()),
        Ends::Starts => "as without it".into(),
    };
    format!("| {} | {ends} | {} |\n", row.what, lines.join("<br>"))
}

/// Puts a generated part into docs/preflight.md, or compares it but for numbers:
/// ports, times and job ids differ from run to run.
/// Lines that begin with one of `left_out` are not looked at.
fn page(name: &str, text: &str, left_out: &[String]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let path = root().join("docs/preflight.md");
    let page = fs::read_to_string(&path).expect("docs/preflight.md is there");
    let (begin, end) = (format!("<!-- {name}: made by tests/preflight.rs -->\n"), format!("<!-- end of {name} -->\n"));
    let (head, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("{begin} is missing"));
    let (old, tail) = rest.split_once(&end).unwrap_or_else(|| panic!("{end} is missing"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{head}{begin}\n{}\n{end}{tail}", text)).expect("docs/preflight.md is written");
        return;
    }
    let looked_at = |line: &&str| !left_out.iter().any(|left_out| line.starts_with(left_out));
    let old: Vec<&str> = old.trim().lines().filter(looked_at).collect();
    assert_eq!(
        without_numbers(&old.join("\n")),
        without_numbers(text.trim()),
        "docs/preflight.md is old: run `make docs`"
    );
}

/// The text with 0 for each number that is no part of a name.
fn without_numbers(text: &str) -> String {
    let mut last = ' ';
    let mut plain = String::new();
    for c in text.chars() {
        if !c.is_ascii_digit() {
            plain.push(c);
        } else if last.is_ascii_digit() {
            continue;
        } else {
            plain.push(if last.is_alphabetic() { c } else { '0' });
        }
        last = c;
    }
    // How many ports were tried depends on the machine.
    while plain.contains("0, 0") {
        plain = plain.replace("0, 0", "0");
    }
    plain
}

/// Listens on ports of every address, with what it does with a connection: nothing,
/// talk first, or say back what it hears. `bound`: holds them without listening.
const STRANGER: &str = r#"
import socket, sys, threading
manner, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
def meet(connection):
    try:
        if manner == "talks":
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
        while True:
            data = connection.recv(4096)
            if not data: break
            if manner == "echoes": connection.sendall(data)
    except OSError:
        pass
def serve(listener):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=meet, args=(connection,), daemon=True).start()
listeners = []
for port in ports:
    listener = socket.socket()
    listener.bind(("0.0.0.0", port))
    listeners.append(listener)
    if manner != "bound":
        listener.listen(128)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("ready")
threading.Event().wait()
"#;

/// The first ports that the next job's first step will try.
fn next_ports(nodes: &Nodes, count: usize) -> Vec<String> {
    let last = nodes.sandbox.run("srun -Q -n1 sh -c 'echo $SLURM_JOB_ID'").ok().out;
    let next = last.trim().parse::<u32>().expect("a job id") + 1;
    sequence(next, 0, DEFAULT_PORTS).iter().take(count).map(u16::to_string).collect()
}

/// A stranger on them, on rank 0's node.
fn stranger_on_the_sequence(nodes: &Nodes, manner: &str, count: usize) {
    let ports = next_ports(nodes, count);
    nodes.stranger("n1", STRANGER, &[manner, &ports.join(",")]);
}

#[test]
fn a_port_that_a_stranger_holds_is_passed_over_or_named() {
    all(
        "ports",
        &[
            Row {
                what: "another user's program on n1 listens on the step's first port and says nothing",
                before: |nodes| stranger_on_the_sequence(nodes, "silent", 1),
                ends: Ends::Starts,
                says: &["n1", "port"],
                ..ROW
            },
            Row {
                what: "one that talks first (an SSH server) holds the first two",
                before: |nodes| stranger_on_the_sequence(nodes, "talks", 2),
                ends: Ends::Starts,
                says: &["n1", "port"],
                ..ROW
            },
            Row {
                what: "one that says back what it hears",
                before: |nodes| stranger_on_the_sequence(nodes, "echoes", 1),
                ends: Ends::Starts,
                says: &["n1", "port"],
                ..ROW
            },
            Row {
                what: "one that holds the port without listening",
                before: |nodes| stranger_on_the_sequence(nodes, "bound", 1),
                ends: Ends::Starts,
                says: &["n1", "port"],
                ..ROW
            },
            Row {
                what: "another user's program on n1 holds MASTER_PORT=23456, which the user has set",
                environment: "MASTER_PORT=23456",
                before: |nodes| nodes.stranger("n1", STRANGER, &["silent", "23456"]),
                says: &["MASTER_PORT=23456", "n1"],
                arrival: 30,
                ..ROW
            },
            Row {
                what: "the same with `port=23456`, by a program that talks",
                spec: "port=23456",
                before: |nodes| nodes.stranger("n1", STRANGER, &["talks", "23456"]),
                says: &["23456", "n1"],
                ..ROW
            },
        ],
    );
}

/// The library with another version in it.
fn another_version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let other = format!("{}9", &version[..version.len() - 1]);
    assert_ne!(version, other);
    let mut bytes = fs::read(library()).expect("the library is there");
    let places: Vec<usize> =
        bytes.windows(version.len()).enumerate().filter(|(_, w)| *w == version.as_bytes()).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the library does not hold its version");
    for at in places {
        bytes[at..at + other.len()].copy_from_slice(other.as_bytes());
    }
    let copy = open_folder().join("libpalingenesis-other-version.so");
    fs::write(&copy, bytes).expect("it is ours");
    copy.display().to_string()
}

/// A node's own plugstack.conf with a site file of its own.
fn own_site_file(nodes: &Nodes, node: &str, text: &str) {
    let file = nodes.sandbox.dir().join(format!("{node}.toml"));
    fs::write(&file, text).expect("the sandbox's folder is ours");
    nodes.own_plugstack(node, &format!("optional {} config={}", library().display(), file.display()));
}

#[test]
fn a_node_that_differs_is_named_with_what_differs() {
    all(
        "differences",
        &[
            Row {
                what: "n3's plugstack.conf lacks the plugin",
                exit: Exit::LastResort,
                before: |nodes| nodes.own_plugstack("n3", ""),
                says: &["n3", "installed"],
                unguarded: &["n3"],
                ..ROW
            },
            Row {
                what: "that of n1, where rank 0 is, lacks it",
                exit: Exit::LastResort,
                before: |nodes| nodes.own_plugstack("n1", ""),
                says: &["n1", "10.99.0.1", "palingenesis"],
                unguarded: &["n1"],
                ..ROW
            },
            Row {
                what: "n3 has another version of the plugin",
                before: |nodes| nodes.own_plugstack("n3", &format!("optional {}", another_version())),
                says: &["n3", env!("CARGO_PKG_VERSION")],
                ..ROW
            },
            Row {
                what: "n3's site file sets a variable that the others' does not",
                before: |nodes| own_site_file(nodes, "n3", "[env]\nNCCL_ALGO = \"Ring\"\n"),
                ends: Ends::Starts,
                says: &["n3", "NCCL_ALGO", "Ring"],
                ..ROW
            },
            Row {
                what: "n3's site file takes ports from another range",
                exit: Exit::LastResort,
                before: |nodes| own_site_file(nodes, "n3", "ports = \"21000-21999\"\n"),
                says: &["n3", "port"],
                ..ROW
            },
            Row {
                what: "n3's interface has another MTU",
                before: |nodes| nodes.change("n3", "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500"),
                ends: Ends::Starts,
                says: &["n3", "1400", "1500"],
                ..ROW
            },
            Row {
                what: "n3's /dev/shm is smaller",
                before: |nodes| {
                    nodes.change("n3", "mount -o remount,size=8M /dev/shm", "mount -o remount,size=50% /dev/shm");
                },
                ends: Ends::Starts,
                says: &["n3", "/dev/shm"],
                ..ROW
            },
        ],
    );
}

#[test]
fn a_directory_that_is_not_shared_or_not_writable_is_named_with_its_node() {
    all(
        "directories",
        &[
            Row {
                what: "`output=` lies on a file system that is full",
                spec: "output=SCRATCH",
                before: |nodes| nodes.fill_scratch(),
                says: &["output=/", "no space"],
                ..ROW
            },
            Row {
                what: "it has no room for another file (inodes)",
                spec: "output=SCRATCH",
                before: |nodes| nodes.no_inodes(),
                says: &["output=/", "inodes"],
                ..ROW
            },
            Row {
                what: "n3 has mounted it read-only",
                spec: "output=SCRATCH",
                before: |nodes| nodes.read_only("n3"),
                says: &["n3", "read-only"],
                ..ROW
            },
            Row {
                what: "n3 has a file system of its own there (a failed mount)",
                spec: "output=SCRATCH",
                before: |nodes| nodes.own_scratch("n3"),
                says: &["n3", "output="],
                ..ROW
            },
            Row {
                what: "`output=/tmp/run`, which each node has for itself",
                spec: "output=/tmp/run",
                says: &["/tmp", "output="],
                ..ROW
            },
            Row { what: "`output=/dev/shm`, the same", spec: "output=/dev/shm", says: &["/dev/shm", "output="], ..ROW },
            Row {
                what: "the user may not write there",
                spec: "output=SCRATCH",
                before: |nodes| {
                    let scratch = nodes.scratch().display().to_string();
                    nodes.change("n1", &format!("chmod 755 {scratch}"), &format!("chmod 1777 {scratch}"));
                },
                says: &["output=/", "may not make files"],
                ..ROW
            },
            Row {
                what: "`cache=` is read-only on n3",
                spec: "cache=SCRATCH",
                before: |nodes| nodes.read_only("n3"),
                says: &["n3", "cache=", "read-only"],
                ..ROW
            },
            Row {
                what: "n3 has a file system of its own for `cache=`",
                spec: "cache=SCRATCH",
                before: |nodes| nodes.own_scratch("n3"),
                ends: Ends::Starts,
                says: &["n3", "huggingface", "not the same directory"],
                ..ROW
            },
        ],
    );
}

/// A node with the plugin that goes wrong on purpose.
fn fault(nodes: &Nodes, node: &str, fault: &str) {
    nodes.own_plugstack(node, &format!("optional {} fault=task_init:{fault}", fault_library().display()));
}

/// Lets n4 come late, so that the others wait; long enough for a busy machine.
fn hold(nodes: &Nodes) {
    fault(nodes, "n4", "sleep-8");
}

/// What then happens ends it before n4 comes.
const HELD: Row = Row { before: hold, arrival: 15, within: 15, ..ROW };

/// Waits until the tasks of the other nodes wait for n4.
fn all_wait(nodes: &Nodes) {
    for node in &NODES[..3] {
        nodes.wait_for_tasks(node, TASKS);
    }
}

#[test]
fn a_node_or_rank_that_is_lost_while_the_others_wait_is_named() {
    all(
        "lost",
        &[
            Row {
                what: "n3's slurmd hangs (SIGSTOP): its tasks are never started",
                before: |nodes| {
                    let slurmd = nodes.slurmd("n3");
                    nodes.change("n3", &format!("kill -STOP {slurmd}"), &format!("kill -CONT {slurmd}"));
                },
                // Slurm's own patience with a launch.
                exit: Exit::NoLaunch,
                slow: true,
                within: 30,
                says: &["n3"],
                ..ROW
            },
            Row {
                what: "n3's first task hangs before it comes",
                exit: Exit::LastResort,
                before: |nodes| fault(nodes, "n3", "hang:rank=4"),
                says: &["n3"],
                ..ROW
            },
            Row {
                what: "n3's second task hangs before it comes",
                exit: Exit::LastResort,
                before: |nodes| fault(nodes, "n3", "hang:rank=5"),
                says: &["n3", "ranks"],
                ..ROW
            },
            Row {
                what: "rank 5, on n3, fails alone",
                before: |nodes| fault(nodes, "n3", "error:rank=5"),
                says: &["injected"],
                ..ROW
            },
            Row {
                what: "rank 5, on n3, is killed before it comes",
                exit: Exit::OfTheKilled,
                before: |nodes| fault(nodes, "n3", "kill:rank=5"),
                says: &["n3", "local rank 1"],
                ..ROW
            },
            Row {
                what: "rank 4, the first of n3, is killed before it comes",
                exit: Exit::OfTheKilled,
                before: |nodes| fault(nodes, "n3", "kill:rank=4"),
                says: &["n3", "local rank 0"],
                ..ROW
            },
            Row {
                what: "rank 4, the first of n3, is killed while all wait for n4",
                exit: Exit::OfTheKilled,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n3", "KILL", &nodes.tasks("n3")[..1]);
                },
                says: &["n3"],
                ..HELD
            },
            Row {
                what: "rank 5, the second of n3, is killed while all wait for n4",
                exit: Exit::OfTheKilled,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n3", "KILL", &nodes.tasks("n3")[1..]);
                },
                says: &["n3", "local rank 1"],
                ..HELD
            },
            Row {
                what: "rank 0, on n1, is killed while all wait for n4",
                exit: Exit::OfTheKilled,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n1", "KILL", &nodes.tasks("n1")[..1]);
                },
                says: &["n1"],
                ..HELD
            },
            Row {
                what: "n3's slurmstepd is killed while all wait for n4",
                exit: Exit::LastResort,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n3", "KILL", &nodes.slurmstepd("n3"));
                },
                says: &["slurmstepd on n3 was killed"],
                ..HELD
            },
            Row {
                what: "that of n1, where rank 0 is, is killed",
                exit: Exit::LastResort,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n1", "KILL", &nodes.slurmstepd("n1"));
                },
                says: &["slurmstepd on n1 was killed"],
                ..HELD
            },
            Row {
                what: "n3's slurmd is killed while all wait for n4, which then comes",
                during: |nodes| {
                    all_wait(nodes);
                    nodes.signal("n3", "KILL", &[nodes.slurmd("n3")]);
                },
                ends: Ends::Starts,
                ..HELD
            },
            Row {
                what: "n3's cable is pulled while all wait for n4, which then comes",
                exit: Exit::LastResort,
                during: |nodes| {
                    all_wait(nodes);
                    nodes.no_link("n3");
                },
                // A connection that says nothing, then Slurm's own patience with a node.
                within: 50,
                slow: true,
                says: &["n3"],
                ..HELD
            },
        ],
    );
}

const ATTACK: &str = include_str!("common/attack.py");

/// As many attackers as wanted on rank 0's node and on one that is none of the step's
/// servers, of another user, while n4 keeps the others waiting.
fn attack(nodes: &Nodes, manner: &str, count: usize) {
    fault(nodes, "n4", "sleep-2");
    let port = next_ports(nodes, 1).remove(0);
    let record = nodes.sandbox.dir().join("record").display().to_string();
    for number in 0..count {
        nodes.stranger(["n1", "n2"][number % 2], ATTACK, &[manner, "10.99.0.1", &port, "5", &record]);
    }
}

const ATTACKED: Row = Row { ends: Ends::Starts, arrival: 20, within: 20 + SLACK, ..ROW };

/// Another user on rank 0's node or elsewhere is never taken for a node of the launch
/// and does not keep the launch from starting.
#[test]
fn no_stranger_gets_into_a_launch_or_stops_it() {
    let Some(sandbox) = up("attacks") else { return };
    let nodes = Nodes::of(&sandbox);
    // What n3 and rank 0's node say to each other, by way of n2, for a later replay.
    let recorded = Row {
        what: "a relay between n3 and n1 is no attack: it goes on",
        before: |nodes| {
            let port = next_ports(nodes, 1).remove(0);
            let folder = nodes.sandbox.dir().join("record").display().to_string();
            for file in [folder.clone(), format!("{folder}.server")] {
                nodes.root("n2", &format!("touch {file}; chmod 666 {file}"));
            }
            nodes.own_hosts("n3", "n1", Some("10.99.0.2"));
            nodes.stranger("n2", ATTACK, &["record", "10.99.0.1", &port, "4", &folder]);
        },
        ..ATTACKED
    };
    let rows = [
        Row { what: "replies with a wrong key", before: |nodes| attack(nodes, "wrong-key", 4), ..ATTACKED },
        Row { what: "an earlier launch's messages, replayed", before: |nodes| attack(nodes, "replay", 4), ..ATTACKED },
        Row { what: "the server's own greeting, sent back", before: |nodes| attack(nodes, "reflect", 4), ..ATTACKED },
        Row { what: "garbage", before: |nodes| attack(nodes, "garbage", 4), ..ATTACKED },
        Row { what: "10,000 connections that stay silent", before: |nodes| attack(nodes, "flood", 1), ..ATTACKED },
        Row {
            what: "an earlier server's messages, on the port that the launch would take",
            before: |nodes| {
                let port = next_ports(nodes, 1).remove(0);
                let record = nodes.sandbox.dir().join("record").display().to_string();
                nodes.stranger("n1", ATTACK, &["pose", "10.99.0.1", &port, "5", &record]);
            },
            says: &["n1", "port"],
            ..ATTACKED
        },
    ];
    let mut wrong = String::new();
    for row in std::iter::once(&recorded).chain(&rows) {
        if let Err(text) = provoke(&nodes, row) {
            wrong += &text;
        }
        for words in nodes.last_words() {
            println!("  the attacker: {}", words.trim());
            let turns = words.strip_prefix("turns ").and_then(|rest| rest.trim().strip_suffix(" proofs 0"));
            if !turns.is_some_and(|turns| turns.parse().is_ok_and(|turns: u32| turns > 0)) {
                wrong += &format!("{}: the attacker said {words:?}\n", row.what);
            }
        }
        nodes.restore();
    }
    let replayed = fs::metadata(sandbox.dir().join("record")).map_or(0, |data| data.len());
    assert!(replayed > 82, "n3's messages were not recorded: {replayed} bytes");
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// Two launches that want one port of one node: the second is refused, and neither
/// takes the other's nodes for its own.
#[test]
fn another_launch_on_the_same_port_is_never_joined() {
    let Some(sandbox) = up("same-port") else { return };
    let nodes = Nodes::of(&sandbox);
    sandbox.plugstack(&[&format!("optional {}", library().display())]);
    nodes.firewall("n1", "n2", MASTER_PORTS, Firewall::Drop);
    let step = |other: &str, to: &str| {
        let line = format!(
            "srun -Q -w n1,{other} -N2 -n2 --palingenesis=port=23456,timeout={to} sh -c 'echo $SLURM_JOB_ID $RANK $WORLD_SIZE'"
        );
        sandbox.run_as(&[], &line, 40)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| step("n2", "20"));
        nodes.wait_for_tasks("n1", 1);
        let second = step("n3", "4");
        let text = format!("{second:?}");
        assert_eq!(second.code, REFUSED, "{text}");
        assert_eq!(second.out, "", "{text}");
        assert!(second.ours().iter().any(|line| line.contains("23456") && line.contains("n1")), "{text}");
        nodes.no_firewall("n1");
        let first = first.join().expect("the thread runs srun").ok();
        let mut ranks: Vec<&str> =
            first.out.lines().filter_map(|line| line.split_once(' ')).map(|(_, rest)| rest).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, ["0 2", "1 2"], "{first:?}");
    });
    nodes.restore();
}

#[test]
fn the_page_lists_every_check_between_nodes() {
    let mut table = String::from("| check | looks for | finds at worst |\n|---|---|---|\n");
    for rule in palingenesis::plan::preflight::rules() {
        let severity = format!("{:?}", rule.severity).to_lowercase();
        table += &format!("| `{}` | {} | {severity} |\n", rule.id, rule.looks_for.replace('|', "\\|"));
    }
    page("checks", &table, &[]);
}

#[test]
fn a_node_that_cannot_reach_rank_0_s_is_named_with_the_reason() {
    all(
        "network",
        &[
            Row {
                what: "a firewall on n1 drops what comes from n3 (ports 20000-31999)",
                exit: Exit::LastResort,
                before: |nodes| nodes.firewall("n1", "n3", MASTER_PORTS, Firewall::Drop),
                says: &["n3", "n1", "10.99.0.1", "firewall"],
                ..ROW
            },
            Row {
                what: "a firewall on n1 resets what comes from n3",
                exit: Exit::LastResort,
                before: |nodes| nodes.firewall("n1", "n3", MASTER_PORTS, Firewall::Reset),
                says: &["n3", "10.99.0.1", "refused"],
                ..ROW
            },
            Row {
                what: "a firewall on n1 answers n3 that it is prohibited",
                exit: Exit::LastResort,
                before: |nodes| nodes.firewall("n1", "n3", MASTER_PORTS, Firewall::Prohibit),
                says: &["n3", "10.99.0.1"],
                ..ROW
            },
            Row {
                what: "n3 has no route to n1's address",
                exit: Exit::LastResort,
                before: |nodes| {
                    nodes.change(
                        "n3",
                        "ip route add unreachable 10.99.0.1/32",
                        "ip route del unreachable 10.99.0.1/32",
                    );
                },
                says: &["n3", "10.99.0.1", "route"],
                ..ROW
            },
            Row {
                what: "a wrong neighbour on n3: all packets to n1 are lost",
                exit: Exit::LastResort,
                before: |nodes| {
                    let line = "ip neigh replace 10.99.0.1 lladdr 02:00:00:00:00:99 nud permanent dev eth0";
                    nodes.change("n3", line, "ip neigh del 10.99.0.1 dev eth0");
                },
                says: &["n3", "10.99.0.1"],
                ..ROW
            },
            Row {
                what: "n3's /etc/hosts has n4's address for n1",
                exit: Exit::LastResort,
                before: |nodes| nodes.own_hosts("n3", "n1", Some("10.99.0.4")),
                says: &["n3", "10.99.0.4"],
                ..ROW
            },
            Row {
                what: "n3's /etc/hosts has an address for n1 that no host has",
                exit: Exit::LastResort,
                before: |nodes| nodes.own_hosts("n3", "n1", Some("10.99.0.77")),
                says: &["n3", "10.99.0.77"],
                ..ROW
            },
            Row {
                what: "n3's /etc/hosts has 127.0.1.1 for n1: MASTER_ADDR is the address there",
                before: |nodes| nodes.own_hosts("n3", "n1", Some("127.0.1.1")),
                ends: Ends::Starts,
                ..ROW
            },
            Row {
                what: "n3 cannot resolve n1: the same",
                before: |nodes| nodes.own_hosts("n3", "n1", None),
                ends: Ends::Starts,
                ..ROW
            },
            Row {
                what: "n3 cannot resolve n1 (MASTER_ADDR=n1 is the user's)",
                exit: Exit::LastResort,
                environment: "MASTER_ADDR=n1",
                before: |nodes| nodes.own_hosts("n3", "n1", None),
                says: &["n3", "n1", "resolve"],
                ..ROW
            },
            Row {
                what: "a firewall on n3 drops what comes from n2 to other ports (32768-60999), which NCCL needs",
                before: |nodes| nodes.firewall("n3", "n2", ANY_PORTS, Firewall::Drop),
                says: &["n2", "n3", "10.99.0.3"],
                within: 10 + SLACK,
                ..ROW
            },
        ],
    );
}
