//! How the ranks of a step start together, or not at all, on a real Slurm: the
//! pre-flight as srun's user sees it.
//!
//! One machine cannot show a network between nodes, nor how long one takes.

mod common;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Said, Sandbox, fault_library, library, rounds};
use palingenesis::config::PortRange;
use palingenesis::plan::rendezvous::{DEFAULT_PORTS, sequence};

/// `EX_CONFIG` of sysexits.h.
const REFUSED: i32 = 78;
/// 128 + SIGKILL, as srun reports it.
const KILLED: i32 = 137;

fn up(name: &str, options: &[&str]) -> Option<Sandbox> {
    let sandbox = Sandbox::up(&format!("preflight-start-{name}"), &[&["--cores", "4"], options].concat())?;
    sandbox.plugstack(&[&format!("optional {}", library().display())]);
    Some(sandbox)
}

/// The ranks that print themselves with their port.
const PRINT: &str = "sh -c 'echo $RANK $MASTER_PORT'";

fn ranks(said: &Said) -> Vec<(u32, u16)> {
    let line = |line: &str| {
        let (rank, port) = line.split_once(' ')?;
        Some((rank.parse().ok()?, port.parse().ok()?))
    };
    let mut ranks: Vec<(u32, u16)> = said.out.lines().map(|text| line(text).expect("a rank and its port")).collect();
    ranks.sort_unstable();
    ranks
}

/// An allocation without a shell, so that the port of its first step is known before.
fn allocate(sandbox: &Sandbox, nodes: u32) -> (u32, Vec<u16>) {
    let said = sandbox.run(&format!("salloc --no-shell -N{nodes} 2>&1; squeue -h -o %A")).ok();
    let job = said.out.lines().last().and_then(|job| job.parse().ok()).expect("a job");
    (job, sequence(job, 0, DEFAULT_PORTS))
}

/// A program on rank 0's node that has a port, in the sandbox until it is dropped.
struct Stranger(Child);

impl Stranger {
    fn new(sandbox: &Sandbox, port: u16, then: &str) -> Stranger {
        let text = format!(
            "import socket, time\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
             s.bind(('', {port}))\ns.listen()\nopen('{}/bound', 'w')\n{then}",
            sandbox.dir().join("home/trainer").display()
        );
        let mark = sandbox.dir().join("home/trainer/bound");
        let _ = fs::remove_file(&mark);
        let child = Command::new(common::root().join("tests/sandbox/slurm-sandbox"))
            .args(["run", "--dir"])
            .arg(sandbox.dir())
            .args(["--", "timeout", "60", "/usr/bin/python3", "-c", &text])
            .stdin(Stdio::null())
            .spawn()
            .expect("bash is there");
        let end = Instant::now() + Duration::from_secs(20);
        while !mark.exists() {
            assert!(Instant::now() < end, "port {port} was not bound");
            std::thread::sleep(Duration::from_millis(50));
        }
        Stranger(child)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const SILENT: &str = "time.sleep(60)";
const TALKING: &str = "while True:\n  c, _ = s.accept()\n  c.sendall(b'220 mail.example.org ESMTP\\r\\n')\n  c.close()";

#[test]
fn all_ranks_start_with_one_port_and_nothing_is_said() {
    let Some(sandbox) = up("go", &["--nodes", "4"]) else { return };
    for (nodes, tasks) in [(2, 2), (4, 4), (4, 12)] {
        let line = format!("srun -Q -N{nodes} -n{tasks} --ntasks-per-node={} --palingenesis {PRINT}", tasks / nodes);
        let said = sandbox.run(&line).ok();
        let ranks = ranks(&said);
        assert!(ranks.iter().map(|(rank, _)| *rank).eq(0..tasks), "{said:?}");
        assert!(ranks.iter().all(|(_, port)| *port == ranks[0].1), "{said:?}");
        assert_eq!(said.err, "", "{line}");
    }
}

/// <https://github.com/awslabs/awsome-distributed-ai/pull/1172>: a port derived from the
/// job may be another program's.
#[test]
fn a_port_that_a_stranger_has_gives_way_to_the_next_one() {
    let Some(sandbox) = up("stranger", &["--nodes", "2"]) else { return };
    for then in [SILENT, TALKING] {
        let (job, ports) = allocate(&sandbox, 2);
        let _stranger = Stranger::new(&sandbox, ports[0], then);
        let said = sandbox.run(&format!("srun -Q --jobid={job} -N2 -n2 --palingenesis {PRINT}; scancel {job}")).ok();
        assert_eq!(ranks(&said), [(0, ports[1]), (1, ports[1])], "{said:?}");
        let line = format!("palingenesis: note: port {} is taken on n1; MASTER_PORT is {}", ports[0], ports[1]);
        assert_eq!(said.ours(), [line], "{said:?}");
        assert!(said.took < Duration::from_secs(20), "{said:?}");
    }
}

/// The same report: two jobs on one node, whose ports are the same. Both start, and rank
/// 0 of each gets its port, bound without SO_REUSEADDR.
#[test]
fn two_jobs_with_the_same_port_start_on_the_same_nodes() {
    let Some(sandbox) = up("two-jobs", &["--nodes", "2"]) else { return };
    // Of three jobs two have the same first port of two.
    let range = PortRange { low: 24000, high: 24001 };
    let said = sandbox.run("for i in 1 2 3; do salloc --no-shell -N2 -n2 2>/dev/null; done; squeue -h -t R -o %A").ok();
    let mut jobs: Vec<u32> = said.out.lines().map(|job| job.parse().expect("a job")).collect();
    assert_eq!(jobs.len(), 3, "{said:?}");
    jobs.sort_unstable_by_key(|job| sequence(*job, 0, range)[0]);
    let same = jobs.windows(2).find(|pair| sequence(pair[0], 0, range)[0] == sequence(pair[1], 0, range)[0]);
    let [one, other] = *same.expect("three of two") else { unreachable!() };
    let program = "import os, socket, time\n\
                   if os.environ['RANK'] == '0':\n    \
                       s = socket.socket()\n    \
                       s.bind(('', int(os.environ['MASTER_PORT'])))\n    \
                       s.listen()\n    \
                       print('bound', os.environ['MASTER_PORT'], flush=True)\n    \
                       home, job = os.path.expanduser('~'), os.environ['SLURM_JOB_ID']\n    \
                       open(home + '/up.' + job, 'w')\n    \
                       while not os.path.exists(home + '/done'): time.sleep(0.1)\n";
    common::readable(&sandbox.dir().join("home/trainer"), "bind.py", program);
    let said = sandbox
        .run(&format!(
            "cd; step() {{ srun -Q --jobid=$1 -N2 -n2 --palingenesis=ports=24000-24001 /usr/bin/python3 bind.py & \
                           for i in {{1..200}}; do [ -e up.$1 ] && break; sleep 0.1; done; }}
             step {one}; step {other}; touch done; wait; scancel -u trainer"
        ))
        .ok();
    let mut bound: Vec<&str> = said.out.lines().collect();
    bound.sort_unstable();
    assert_eq!(bound, ["bound 24000", "bound 24001"], "{said:?}");
    let first = sequence(one, 0, range)[0];
    let note = format!("palingenesis: note: port {first} is taken on n1; MASTER_PORT is {}", 48001 - first);
    assert_eq!(said.ours(), [note], "{said:?}");
}

/// <https://github.com/NVIDIA/mlperf-common/pull/9>: a port cannot be reserved. Somebody
/// takes the range's ports and gives them back all the time. Between the end of the
/// pre-flight and rank 0's bind he may be quicker: then rank 0 says so, and srun that it
/// was the first.
#[test]
fn where_somebody_grabs_ports_a_step_starts_or_says_what_is_wrong() {
    let Some(sandbox) = up("grabbed", &["--nodes", "2"]) else { return };
    let grab = "import random\ns.close()\nwhile True:\n  s = socket.socket()\n  \
                try: s.bind(('', random.randrange(24000, 24008))); s.listen()\n  \
                except OSError: pass\n  \
                time.sleep(0.02); s.close()";
    let bind = "import os, socket\nif os.environ['RANK'] == '0':\n    \
                socket.socket().bind(('', int(os.environ['MASTER_PORT'])))\n";
    common::readable(&sandbox.dir().join("home/trainer"), "bind.py", bind);
    for _ in 0..if rounds() > 1 { 50 } else { 5 } {
        let _stranger = Stranger::new(&sandbox, 24008, grab);
        let said = sandbox.run("cd; srun -Q -N2 -n2 --palingenesis=ports=24000-24007 /usr/bin/python3 bind.py");
        if said.code != 0 {
            let first = said.ours().into_iter().any(|line| line.contains("rank 0 (n1, local rank 0) failed first"));
            assert!(first && said.err.contains("Address already in use"), "{said:?}");
        }
    }
}

/// <https://github.com/NVIDIA/mlperf-common/pull/9>: the port of the script is another
/// process's, and what is seen of it is a hang.
#[test]
fn a_port_of_the_user_s_that_is_taken_is_an_error_that_names_who_has_it() {
    let Some(sandbox) = up("taken", &["--nodes", "2"]) else { return };
    let _stranger = Stranger::new(&sandbox, 29555, SILENT);
    for (environment, option) in [("MASTER_PORT=29555 ", ""), ("", "=port=29555")] {
        let said =
            sandbox.run(&format!("{environment}srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis{option} {PRINT}"));
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:?}");
        let [line] = said.ours()[..] else { panic!("{said:?}") };
        assert!(
            line.starts_with("palingenesis: error: MASTER_PORT=29555 is taken on n1 by python3 (process "),
            "{line}"
        );
        assert!(line.contains("unset MASTER_PORT"), "{line}");
        assert!(said.took < Duration::from_secs(20), "{said:?}");
    }
    drop(_stranger);
    let said = sandbox.run(&format!("MASTER_PORT=29556 srun -Q -N2 -n2 --palingenesis {PRINT}")).ok();
    assert_eq!((ranks(&said), said.err.as_str()), (vec![(0, 29556), (1, 29556)], ""), "{said:?}");
}

/// While one node's ranks are on their way a rank of the other is killed: of rank 0's
/// node the one that leads it, and serves, and its second one; of another node the same.
#[test]
fn a_rank_that_is_killed_while_it_waits_stops_every_rank() {
    let Some(sandbox) = up("killed", &["--nodes", "2", "--namespace-per-node"]) else { return };
    for (late, node, which) in [(1, "n1", "head"), (1, "n1", "tail"), (0, "n2", "head"), (0, "n2", "tail")] {
        let what = format!("{which} of {node}");
        let fault = format!("optional {} fault=task_init:sleep-10:node={late}", fault_library().display());
        sandbox.plugstack(&[&fault]);
        let kill = format!(
            "ns=$(readlink /proc/self/ns/uts)
             for i in {{1..100}}; do
                 own=$(for p in $(pgrep -x palingenesis); do [ $(readlink /proc/$p/ns/uts) = $ns ] && echo $p; done)
                 [ $(echo $own | wc -w) = 2 ] && break; sleep 0.1
             done
             sleep 1; kill -9 $(echo \"$own\" | sort -n | {which} -n 1)"
        );
        let (said, killed) = std::thread::scope(|scope| {
            let srun =
                scope.spawn(|| sandbox.run(&format!("srun -Q -N2 -n4 --ntasks-per-node=2 --palingenesis {PRINT}")));
            let killed = sandbox.run_as(&["--as-root", "--node", node], &kill, 30);
            (srun.join().unwrap(), killed)
        });
        assert_eq!(killed.code, 0, "{what}: {killed:?}");
        assert_eq!((said.code, said.out.as_str()), (KILLED, ""), "{what}: {said:?}");
        let local = if which == "head" { 0 } else { 1 };
        let line = format!("palingenesis: error: local rank {local} on {node} ended before the start");
        assert!(said.ours().iter().any(|ours| ours.starts_with(&line)), "{what}: {said:?}");
        assert!(said.took < Duration::from_secs(25), "{what}: {said:?}");
    }
}

#[test]
fn one_rank_that_cannot_start_stops_those_of_every_node() {
    let Some(sandbox) = up("alone", &["--nodes", "4"]) else { return };
    for rank in [0, 1, 7] {
        let fault = format!("optional {} fault=task_init:error:rank={rank}", fault_library().display());
        sandbox.plugstack(&[&fault]);
        let said = sandbox.run(&format!("srun -Q -N4 -n8 --ntasks-per-node=2 --palingenesis {PRINT}"));
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "rank {rank}: {said:?}");
        assert_eq!(said.ours().len(), 1, "rank {rank}: {said:?}");
        assert!(said.took < Duration::from_secs(10), "rank {rank}: {said:?}");
    }
}

/// Each node has its own reason, and one rank is late: when it refuses, its leader has told
/// the others and ended. They are not told again, and Slurm is not asked to end the step.
#[test]
fn a_rank_that_refuses_after_its_leader_has_ended_adds_nothing() {
    let Some(sandbox) = up("late", &["--nodes", "2"]) else { return };
    for rank in [1, 3] {
        let fault = format!("optional {} fault=task_init:sleep-4:rank={rank}", fault_library().display());
        sandbox.plugstack(&[&fault]);
        let refusal = "--palingenesis=bind=off,cache=/proc/none";
        let said = sandbox.run(&format!("srun -Q -N2 -n4 --ntasks-per-node=2 {refusal} {PRINT}"));
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "rank {rank}: {said:?}");
        assert_eq!(said.ours().len(), 2, "rank {rank}: {said:?}");
        assert!(said.took > Duration::from_secs(3) && said.took < Duration::from_secs(9), "rank {rank}: {said:?}");
    }
}

/// Each node that cannot reach rank 0's finds it out for itself, at the same moment. The
/// first ones say it, and Slurm ends the step before a thousand lines say it again.
#[test]
fn of_many_nodes_behind_one_firewall_a_few_say_it() {
    let Some(sandbox) = up("many", &["--nodes", "14", "--namespace-per-node"]) else { return };
    let drop = "nft add table inet wall; nft 'add chain inet wall in { type filter hook input priority 0; }';
                nft add rule inet wall in tcp dport 20000-31999 drop";
    sandbox.run_as(&["--as-root", "--node", "n1"], drop, 20).ok();
    let unreached = || {
        let said = sandbox.run(&format!("srun -Q -N14 -n14 --palingenesis=timeout=4 {PRINT}"));
        assert_eq!((said.code, said.out.as_str()), (KILLED, ""), "{said:?}");
        assert!(said.took < Duration::from_secs(25), "{said:?}");
        said.ours().into_iter().filter(|line| line.contains("cannot reach")).count()
    };
    // Node ranks 1 to 7; rank 0's node names those that did not come. On a busy machine the
    // controller may need longer than the others leave it.
    let counts: Vec<usize> = (0..3).map(|_| unreached()).collect();
    assert!(counts.contains(&7) && counts.iter().all(|count| (7..=13).contains(count)), "{counts:?}");
}

/// A node without the plugin runs the user's program at once, and that waits for the
/// others: nobody tells why.
#[test]
fn a_node_without_the_plugin_is_named() {
    let Some(sandbox) = up("missing", &["--nodes", "3", "--namespace-per-node"]) else { return };
    sandbox.run_as(&["--as-root", "--node", "n3"], "mount --bind /dev/null /etc/slurm/plugstack.conf", 20).ok();
    let wait = "sh -c 'echo ${RANK:-none}; [ -n \"$RANK\" ] || sleep 50'";
    let said = sandbox.run(&format!("srun -Q -N3 -n3 --palingenesis=timeout=5 {wait}"));
    // Slurm ends the step: the rank of n3 knows of nothing.
    assert_eq!((said.code, said.out.as_str()), (KILLED, "none\n"), "{said:?}");
    let [line] = said.ours()[..] else { panic!("{said:?}") };
    assert!(line.starts_with("palingenesis: error: 1 of 3 nodes did not come to the start within 5 s: n3; "), "{line}");
    assert!(line.contains("srun -N1 -w n3 --palingenesis=show true"), "{line}");
    assert!(said.took > Duration::from_secs(4) && said.took < Duration::from_secs(25), "{said:?}");

    // preflight=warn: the others start all the same; off: at once.
    let end = "sh -c 'echo ${RANK:-none}'";
    let said = sandbox.run(&format!("srun -Q -N3 -n3 --palingenesis=timeout=5,preflight=warn {end} | sort")).ok();
    assert_eq!(said.out, "0\n1\nnone\n", "{said:?}");
    let [line] = said.ours()[..] else { panic!("{said:?}") };
    assert!(
        line.starts_with("palingenesis: warning: 1 of 3 nodes did not come to the start within 5 s: n3; "),
        "{line}"
    );
    let said = sandbox.run(&format!("srun -Q -N3 -n3 --palingenesis=timeout=5,preflight=off {end} | sort")).ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("0\n1\nnone\n", ""), "{said:?}");
    assert!(said.took < Duration::from_secs(4), "{said:?}");
}

#[test]
fn with_warn_findings_stop_nothing_but_a_refusal_and_a_failed_warm_up_do() {
    let Some(sandbox) = up("warn", &["--nodes", "3", "--namespace-per-node"]) else { return };
    let run = |options: &str| {
        sandbox.run(&format!("srun -Q -N3 -n3 --palingenesis=preflight=warn,shared-local=off{options} echo ran"))
    };
    // Each node has a /tmp of its own.
    let said = run(" --palingenesis-output=/tmp/run").ok();
    assert_eq!(said.out, "ran\nran\nran\n", "{said:?}");
    let [line] = said.ours()[..] else { panic!("{said:?}") };
    assert!(line.starts_with("palingenesis: warning: output=/tmp/run is not on n2 and "), "{line}");
    // One that only n2 refuses.
    sandbox.run_as(&["--node", "n2"], "touch /tmp/cache", 20).ok();
    for (options, line) in [
        (",cache=/tmp/cache", "palingenesis: error: cache=/tmp/cache cannot be used on n2: "),
        (" --palingenesis-warm='exit 3'", "palingenesis: error: the warm-up ('exit') ended with exit code 3 "),
    ] {
        let said = run(options);
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:?}");
        let [told] = said.ours()[..] else { panic!("{said:?}") };
        assert!(told.starts_with(line), "{told}");
    }
}

#[test]
fn a_step_of_one_node_meets_nobody() {
    let Some(sandbox) = up("one", &["--nodes", "1"]) else { return };
    // Nobody could listen on this port, and nobody does.
    let _stranger = Stranger::new(&sandbox, 29557, SILENT);
    let said = sandbox.run(&format!("srun -Q -N1 -n3 --palingenesis=port=29557 {PRINT}")).ok();
    assert_eq!((ranks(&said), said.err.as_str()), (vec![(0, 29557), (1, 29557), (2, 29557)], ""), "{said:?}");
}

/// <https://github.com/pytorch/pytorch/issues/79388>: nobody, or everybody, hosts the
/// store of an endpoint that is not ours.
#[test]
fn an_endpoint_of_the_command_s_own_is_tested_for_its_host_only() {
    let Some(sandbox) = up("endpoint", &["--nodes", "2", "--namespace-per-node"]) else { return };
    let home = sandbox.dir().join("home/trainer");
    common::readable(&home, "torchrun", "#!/bin/sh\necho started");
    sandbox.run_root(&format!("chmod 755 {}/torchrun", home.display())).ok();
    let run = |endpoint: &str| {
        let flags = format!("--rdzv-backend=c10d --rdzv-endpoint={endpoint} train.py");
        sandbox.run(&format!("srun -Q -N2 -n2 --palingenesis $HOME/torchrun {flags}"))
    };
    let said = run("n1:29400").ok();
    assert_eq!(said.out, "started\nstarted\n", "{said:?}");
    assert!(
        said.ours().iter().any(|line| line.contains("n1:29400") && line.contains("can be reached is not known")),
        "{said:?}"
    );
    let said = run("head:29400");
    assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:?}");
    let [line] = said.ours()[..] else { panic!("{said:?}") };
    assert!(
        line.contains("the launcher's endpoint is head:29400, and none of the step's nodes has that address"),
        "{line}"
    );
    assert!(line.contains("--palingenesis=endpoint-host=warn"), "{line}");
}
