//! What a real Slurm's nodes tell srun of ranks that ended badly, as srun reads it at
//! its end. The records are looked at before anything is made of them: the plugin with
//! fault injection writes them to the file that PALINGENESIS_TEST_RECORDS names.
//!
//! One machine cannot show a network that loses packets or nodes whose clocks differ.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use common::{Said, Sandbox, fault_library, rounds};
use serde_json::{Value, json};

const FLAG: &str = "--palingenesis=preflight=off";

fn up(name: &str, arguments: &[&str]) -> Option<Sandbox> {
    let sandbox = Sandbox::up(&format!("exits-{name}"), arguments)?;
    load(&sandbox, "");
    Some(sandbox)
}

/// Four nodes with addresses and host names of their own.
fn four(name: &str) -> Option<Sandbox> {
    up(name, &["--nodes", "4", "--cores", "16", "--namespace-per-node"])
}

fn load(sandbox: &Sandbox, arguments: &str) {
    sandbox.plugstack(&[&format!("required {} {arguments}", fault_library().display())]);
}

/// What one srun said, and the records it had.
#[derive(Debug)]
struct Ended {
    said: Said,
    records: Vec<Value>,
}

impl Ended {
    fn ranks(&self) -> BTreeSet<u64> {
        self.records.iter().filter_map(|record| record["rank"].as_u64()).collect()
    }

    /// The record of a rank.
    #[track_caller]
    fn of(&self, rank: u64) -> &Value {
        let mut of = self.records.iter().filter(|record| record["rank"] == rank);
        match (of.next(), of.next()) {
            (Some(record), None) => record,
            other => panic!("rank {rank}: {other:?} of {self:#?}"),
        }
    }
}

/// Runs a bash command line in the user's home. `srun` is srun without its lines about
/// waiting; STARTED in the line waits until so many tasks have called `up`.
fn run(sandbox: &Sandbox, line: &str) -> Ended {
    run_with(sandbox, &[], "", line, 60)
}

fn run_with(sandbox: &Sandbox, options: &[&str], as_user: &str, line: &str, seconds: u32) -> Ended {
    let home = sandbox.dir().join("home/trainer");
    let file = home.join("records");
    let _ = fs::remove_file(&file);
    let text = format!(
        "cd {}; rm -rf up go; mkdir -m 777 up
         started() {{ for i in {{1..300}}; do [ $(ls up | wc -l) = $1 ] && return; sleep 0.1; done; echo not started; }}
         user() {{ {as_user} env PALINGENESIS_TEST_RECORDS={} HOME=$PWD \"$@\"; }}
         {line}",
        home.display(),
        file.display(),
    );
    let said = sandbox.run_as(options, &text, seconds);
    let text = fs::read_to_string(&file).unwrap_or_default();
    let records = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Ended { said, records }
}

/// As root, who may rule the network; `user` runs as the user.
fn run_root(sandbox: &Sandbox, line: &str) -> Ended {
    let as_user = "setpriv --reuid trainer --regid trainer --init-groups";
    run_with(sandbox, &["--as-root"], as_user, line, 90)
}

/// The unix time in nanoseconds, of this host and so of the sandbox's.
fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    since.as_nanos() as u64
}

/// How a rank ends, and what is told of it.
#[test]
fn the_one_of_16_that_fails_is_told_with_its_node_and_how_it_ended() {
    let Some(sandbox) = up("one", &["--nodes", "4", "--cores", "4", "--gpus", "4", "--namespace-per-node"]) else {
        return;
    };
    let step = format!("srun -Q -N4 -n16 --ntasks-per-node=4 --gpus-per-node=4 {FLAG}");
    let cases = [
        (9, "exit 1", json!({"Exit": 1}), 1),
        (5, "kill -SEGV $$", json!({"Signal": 11}), 139),
        (0, "kill -9 $$", json!({"Signal": 9}), 137),
        // Our own exit code, but the program's.
        (15, "exit 78", json!({"Exit": 78}), 78),
    ];
    for (rank, how, kind, code) in cases {
        let before = now();
        let ended = run(
            &sandbox,
            &format!("user {step} bash -c 'if [ $SLURM_PROCID = {rank} ]; then sleep 0.2; {how}; fi; sleep 0.5'"),
        );
        assert_eq!(ended.said.code, code, "{ended:#?}");
        assert_eq!(ended.records.len(), 1, "{ended:#?}");
        let record = ended.of(rank);
        assert_eq!(record["kind"], kind, "{record}");
        assert_eq!(record["node"], format!("n{}", rank / 4 + 1), "{record}");
        assert_eq!((&record["node_rank"], &record["local_rank"]), (&json!(rank / 4), &json!(rank % 4)), "{record}");
        // As Slurm numbers the node's GPUs, which are no PCI devices here.
        assert_eq!(record["gpu"], (rank % 4).to_string(), "{record}");
        // Nobody on this host was killed for want of memory, or somebody of another job.
        assert_ne!(record["oom"], "Killed", "{record}");
        let time = record["time_ns"].as_u64().unwrap();
        assert!((before..=now()).contains(&time), "{record}");
        assert!(ended.said.ours()[0].contains(&format!("rank {rank} (n{}, ", rank / 4 + 1)), "{ended:#?}");
    }
    let ended = run(&sandbox, &format!("user {step} true"));
    assert!(ended.said.code == 0 && ended.records.is_empty(), "{ended:#?}");
}

/// All that end, whoever ends them: what is a consequence is decided later.
#[test]
fn ranks_that_are_ended_are_told_too() {
    let Some(sandbox) = four("ended") else { return };
    let task = "touch up/$SLURM_PROCID; if [ $SLURM_PROCID = 5 ]; then while [ ! -e go ]; do sleep 0.1; done; exit 7; fi; sleep 60";
    let step = |options: &str| format!("user srun -Q -N4 -n8 --ntasks-per-node=2 {options} {FLAG} bash -c '{task}'");
    let all: BTreeSet<u64> = (0..8).collect();

    // The measured kill of srun -K: <https://github.com/PrimeIntellect-ai/prime-rl/pull/2577>
    let ended = run(&sandbox, &format!("touch go; {}", step("-K")));
    assert_eq!(ended.ranks(), all, "{ended:#?}");
    let first = ended.records.iter().min_by_key(|record| record["time_ns"].as_u64()).unwrap();
    assert_eq!((&first["rank"], &first["kind"]), (&json!(5), &json!({"Exit": 7})), "{ended:#?}");
    assert_eq!(ended.of(0)["kind"], json!({"Signal": 15}), "{ended:#?}");

    let ended = run(&sandbox, &format!("{} & started 8; scancel -u trainer; wait", step("")));
    assert_eq!(ended.ranks(), all, "{ended:#?}");
    assert!(ended.records.iter().all(|record| record["kind"] == json!({"Signal": 15})), "{ended:#?}");

    // srun runs its exit hook also when it is told to end (measured with 22.05.8): once
    // for SIGTERM and SIGHUP, twice within a second for SIGINT.
    for signals in ["kill -TERM $srun", "kill -HUP $srun", "kill -INT $srun; sleep 0.3; kill -INT $srun"] {
        let ended = run(
            &sandbox,
            &format!("{} & started 8; srun=$(pgrep -o -x srun); touch go; sleep 1; {signals}; wait", step("")),
        );
        assert_eq!(ended.ranks(), all, "{signals}: {ended:#?}");
        assert_eq!(ended.of(5)["kind"], json!({"Exit": 7}), "{signals}: {ended:#?}");
    }
    // Killed at once it reads nothing, and the step ends as any other.
    let ended =
        run(&sandbox, &format!("{} & started 8; kill -KILL $(pgrep -x srun); scancel -u trainer; wait", step("")));
    assert!(ended.records.is_empty(), "{ended:#?}");
    sandbox.resume();
}

#[test]
fn a_rank_that_is_refused_is_told_with_the_line_the_user_has_seen() {
    let Some(sandbox) = four("refused") else { return };
    load(&sandbox, "fault=task_init:error:rank=2");
    let ended = run(&sandbox, &format!("user srun -Q -N2 -n4 --ntasks-per-node=2 {FLAG} bash -c 'sleep 0.5'"));
    assert_eq!(ended.said.code, 78, "{ended:#?}");
    let record = ended.of(2);
    assert_eq!(record["kind"], "Refused", "{record}");
    // Rank 2 has not come so far as to know its node's name from Slurm.
    assert_eq!((&record["node"], &record["local_rank"]), (&json!("n2"), &json!(0)), "{record}");
    let line = record["line"].as_str().unwrap();
    assert!(line.contains("injected") && ended.said.err.contains(line), "{ended:#?}");
    // The node's other rank stops with it; those of the first node end well here.
    assert!(ended.ranks().is_subset(&BTreeSet::from([2, 3])), "{ended:#?}");

    // What went wrong before the tasks: told by them, and sent by nobody: there is no
    // address then.
    load(&sandbox, "fault=user_init:error:node=1");
    let ended = run(&sandbox, &format!("user srun -Q -N2 -n4 --ntasks-per-node=2 {FLAG} bash -c 'sleep 0.5'"));
    assert_eq!((ended.said.code, ended.said.ours().len()), (78, 1), "{ended:#?}");
}

/// Each component has a slurmstepd of its own, and srun knows none of their nodes when
/// it hands over what reaches all of them.
#[test]
fn in_a_het_step_every_component_tells() {
    let nodes = ["--nodes", "4", "--cores", "16", "--namespace-per-node"];
    let Some(sandbox) = up("het", &[&nodes[..], &common::FOR_HET_STEPS].concat()) else { return };
    let fails = "bash -c '[ $SLURM_PROCID = 0 ] || exit $((SLURM_PROCID + 10)); sleep 0.5'";
    let parts = format!("srun -Q -N1 -n2 {FLAG} {fails} : -N1 -n2 {fails}");
    for line in
        [format!("user salloc -Q -N1 -n2 : -N1 -n2 srun --het-group=0,1 -n2 {FLAG} {fails}"), format!("user {parts}")]
    {
        let ended = run(&sandbox, &line);
        if ended.records.is_empty() && line.contains(&parts) {
            // No default route here: outside a job srun does not know where its nodes are.
            assert!(ended.said.err.contains("srun has no address that this node knows"), "{ended:#?}");
            continue;
        }
        assert!(ended.ranks().len() >= 2, "{line}: {ended:#?}");
        for record in &ended.records {
            let rank = record["rank"].as_u64().unwrap();
            assert_eq!(record["kind"], json!({"Exit": rank + 10}), "{ended:#?}");
        }
    }
}

/// With 128 tasks, as on a node with as many cores.
#[test]
fn a_node_of_which_every_task_fails_tells_each_once() {
    let Some(sandbox) = up("many", &["--nodes", "1", "--cores", "128"]) else { return };
    let ended = run(&sandbox, &format!("user srun -Q -N1 -n128 {FLAG} bash -c 'exit 3'"));
    assert_eq!((ended.said.code, ended.ranks().len()), (3, ended.records.len()), "{:?}", ended.said);
    // Here 128 children of one slurmstepd share two CPUs with 128 ends. A node that could not
    // tell srun of one within 200 ms says so, once, and names the first of them.
    let not_told = ended.said.err.matches("srun could not be told").count();
    assert!(ended.records.len() == 128 || not_told == 1, "{:?}", ended.said);
    // The same with our line in plugstack.conf twice.
    let line = format!("required {}", fault_library().display());
    sandbox.plugstack(&[&line, &line]);
    let ended = run(&sandbox, &format!("user srun -Q -N1 -n8 {FLAG} bash -c 'exit 3'"));
    assert_eq!(ended.records.len(), 8, "{ended:#?}");
}

/// Finds srun's socket: the only one at an address of its own.
const SOCKET: &str = "at=$(ss -Hltn | awk '{print $4}' | grep '^10[.].*:6[1-4]...$'); port=${at##*:}";

/// <https://slurm.schedmd.com/slurm.conf.html>, SrunPortRange: a firewall lets the nodes
/// through to no other port. The sandbox has 61000-64999.
#[test]
fn srun_listens_in_its_range_while_it_runs_and_what_it_starts_does_not_inherit_it() {
    let Some(sandbox) = four("socket") else { return };
    let ended = run_root(
        &sandbox,
        &format!(
            "printf '#!/bin/sh\\nreadlink /proc/self/fd/* >$PWD/fds; true\\n' >prolog; chmod 755 prolog; touch fds; chmod 666 fds
             user srun -Q -N1 -n1 --prolog=$PWD/prolog {FLAG} bash -c 'touch up/1; while [ ! -e go ]; do sleep 0.1; done' &
             started 1; {SOCKET}
             echo \"at $at\"; echo \"inode $(ss -Hltne \"sport = :$port\" | grep -o 'ino:[0-9]*')\"
             cat fds; touch go; wait
             {SOCKET}; echo \"after ($at)\""
        ),
    );
    let out = &ended.said.out;
    let port = out.lines().find_map(|line| line.strip_prefix("at 10.")?.rsplit(':').next()?.parse::<u16>().ok());
    let port = port.unwrap_or_else(|| panic!("{ended:#?}"));
    assert!((61000..=64999).contains(&port), "{out}");
    let inode = out.lines().find_map(|line| line.strip_prefix("inode ino:")).unwrap();
    assert!(out.contains("home/trainer/fds"), "the prolog has told its descriptors: {out}");
    assert!(!out.contains(&format!("socket:[{inode}]")), "{out}");
    assert!(out.contains("after ()"), "{out}");
}

/// Garbage, another launch's secret, and what another user says.
#[test]
fn strangers_are_not_believed_and_do_not_hold_srun() {
    let Some(sandbox) = four("strangers") else { return };
    let step = format!(
        "user srun -Q -N4 -n8 --ntasks-per-node=2 {FLAG} bash -c \
         'touch up/$SLURM_PROCID; while [ ! -e go ]; do sleep 0.1; done; [ $SLURM_PROCID != 3 ] || exit 5; sleep 0.5'"
    );
    // As nobody, at srun's own host and from a node.
    let strange = |how: &str| {
        format!(
            "setpriv --reuid 65534 --regid 65534 --clear-groups python3 -c \"\nimport socket, sys, time, os, struct\n{how}\""
        )
    };
    let few = strange(
        "
at = (sys.argv[1], int(sys.argv[2]))
def say(data):
    s = socket.create_connection(at); s.sendall(data); return s
body = b'{\\\"rank\\\":0,\\\"node\\\":\\\"n1\\\",\\\"node_rank\\\":0,\\\"local_rank\\\":0,\\\"gpu\\\":null,\\\"kind\\\":{\\\"Exit\\\":1},\\\"time_ns\\\":1,\\\"oom\\\":\\\"No\\\",\\\"clock\\\":null,\\\"line\\\":null}'
kept = [say(b''), say(b'PGX1'), say(b'PGX1' + struct.pack('>H', 65535) + os.urandom(60000))]
for tag in (bytes(32), os.urandom(32)):
    say(b'PGX1' + struct.pack('>H', len(body)) + body + tag).close()
say(os.urandom(3000)).close()
open('/tmp/said-' + sys.argv[2], 'w').close()
time.sleep(60)",
    );
    let ended = run_root(
        &sandbox,
        &format!(
            "{step} & srun=$!; started 8; {SOCKET}
             {few} ${{at%:*}} $port & few=$!
             for i in {{1..100}}; do [ -e /tmp/said-$port ] && break; sleep 0.1; done; ls /tmp/said-$port
             touch go; wait $srun; code=$?; kill $few; exit $code"
        ),
    );
    assert_eq!((ended.said.code, ended.ranks()), (5, BTreeSet::from([3])), "{ended:#?}");
    assert!(ended.said.out.contains("/tmp/said-"), "{ended:#?}");

    // 10,000 at once: the kernel keeps some 4,000 and lets no record through then. srun
    // ends, and the node says what it could not tell.
    let many = strange(
        "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (12000, 12000))
at = (sys.argv[1], int(sys.argv[2]))
kept = []
for number in range(10000):
    s = socket.socket(); s.setblocking(False); s.connect_ex(at); kept.append(s)
open('/tmp/many-' + sys.argv[2], 'w').close()
time.sleep(60)",
    );
    let ended = run_root(
        &sandbox,
        &format!(
            "ulimit -n 12000; {step} & srun=$!; started 8; {SOCKET}
             {many} ${{at%:*}} $port & many=$!
             for i in {{1..200}}; do [ -e /tmp/many-$port ] && break; sleep 0.1; done; ls /tmp/many-$port
             start=$(date +%s%N); touch go; wait $srun; code=$?
             echo \"took $((($(date +%s%N) - start) / 1000000)) ms\"; kill $many; exit $code"
        ),
    );
    assert_eq!(ended.said.code, 5, "{ended:#?}");
    assert!(ended.said.out.contains("/tmp/many-"), "{ended:#?}");
    assert!(ended.ranks().is_subset(&BTreeSet::from([3])), "{ended:#?}");
    let told = ended.said.err.contains("rank 3 (local rank 1) ended with exit code 5, as the first on n2");
    assert!(told != ended.ranks().contains(&3), "{ended:#?}");
    let took: u64 =
        ended.said.out.lines().find_map(|line| line.strip_prefix("took ")?.split(' ').next()?.parse().ok()).unwrap();
    assert!(took < 20_000, "{ended:#?}");
}

/// How long the step takes with and without what is in the way, and what its user reads.
#[test]
fn an_srun_out_of_reach_holds_the_step_s_end_a_second_at_most_and_each_node_says_so() {
    let Some(sandbox) = four("reach") else { return };
    let step = format!(
        "user srun -Q -N2 -n32 --ntasks-per-node=16 {FLAG} bash -c \
         'touch up/$SLURM_PROCID; while [ ! -e go ]; do sleep 0.1; done; exit 3'"
    );
    let with = |before: &str, after: &str| {
        run_root(
            &sandbox,
            &format!(
                "{step} & srun=$!; started 32; {SOCKET}
                 {before}
                 start=$(date +%s%N); touch go; wait $srun; code=$?
                 echo \"took $((($(date +%s%N) - start) / 1000000)) ms\"
                 {after}; exit $code"
            ),
        )
    };
    let took = |ended: &Ended| -> u64 {
        let took = |line: &str| line.strip_prefix("took ")?.split(' ').next()?.parse().ok();
        ended.said.out.lines().find_map(took).unwrap_or_else(|| panic!("{ended:#?}"))
    };
    let reached = with("", "true");
    assert_eq!((reached.said.code, reached.records.len()), (3, 32), "{reached:#?}");
    // srun's own two lines, and none of a node.
    let of_a_node =
        reached.said.ours().into_iter().filter(|line| line.contains("ended with exit code 3, as the first on"));
    assert_eq!((of_a_node.count(), reached.said.ours().len()), (0, 2), "{reached:#?}");

    // srun's answers never arrive, as behind a firewall that drops.
    let silent = with(
        "ip rule add ipproto tcp sport $port type blackhole",
        "ip rule del ipproto tcp sport $port type blackhole",
    );
    assert_eq!((silent.said.code, silent.records.len()), (3, 0), "{silent:#?}");
    let ours = silent.said.ours();
    assert_eq!(ours.len(), 2, "{silent:#?}");
    for node in ["n1", "n2"] {
        let line = ours.iter().find(|line| line.contains(&format!("as the first on {node}; "))).unwrap();
        assert!(line.contains("ended with exit code 3") && line.contains("could not be told at 10."), "{line}");
        assert!(line.contains("Connection timed out") || line.contains("no answer within 200 ms"), "{line}");
    }
    let held = Duration::from_millis(took(&silent).saturating_sub(took(&reached)));
    // A second for each node, side by side; and what a loaded machine adds.
    assert!(held < Duration::from_secs(5), "{held:?}");

    // Nodes that may not connect there.
    let node = "nodes=$(pgrep -x slurmd); for node in $nodes; do nsenter -t $node -n ip rule";
    let forbidden = with(
        &format!("{node} add ipproto tcp dport $port type prohibit; done"),
        &format!("{node} del ipproto tcp dport $port type prohibit; done"),
    );
    assert_eq!((forbidden.said.code, forbidden.records.len()), (3, 0), "{forbidden:#?}");
    let ours = forbidden.said.ours();
    assert_eq!(ours.len(), 2, "{forbidden:#?}");
    assert!(ours.iter().all(|line| line.contains("Permission denied")), "{forbidden:#?}");

    // Slurm's own end of a step is no rank's failure: nothing is said of it.
    let cancelled = run_root(
        &sandbox,
        &format!(
            "{step} & started 32; {SOCKET}
             ip rule add ipproto tcp sport $port type blackhole
             scancel -u trainer; wait; ip rule del ipproto tcp sport $port type blackhole"
        ),
    );
    assert_eq!(cancelled.said.ours(), Vec::<&str>::new(), "{cancelled:#?}");
    sandbox.resume();
}

/// <https://github.com/goodfire-ai/spd/pull/537>: one node ran out of memory, and ten times
/// as many lines spoke of something else. Version 1's counter, for real; version 2's are
/// recorded files in the library's own tests.
#[test]
fn a_rank_that_the_kernel_kills_for_want_of_memory_is_told_as_that() {
    let memory = ["--conf", "SelectTypeParameters=CR_CPU_Memory", "--conf", "DefMemPerCPU=500"];
    let arguments = [&["--nodes", "2", "--cores", "4", "--cgroup"][..], &memory].concat();
    let Some(sandbox) = up("memory", &arguments) else { return };
    let eat = "import os, time\nkept = []\nwhile True: kept.append(os.urandom(1 << 20))";
    for round in 0..rounds() {
        let rank = round % 4;
        let ended = run(
            &sandbox,
            &format!(
                "user srun -Q -N2 -n4 --ntasks-per-node=2 --mem=100 {FLAG} bash -c \
                 'if [ $SLURM_PROCID = {rank} ]; then exec python3 -c \"{eat}\"; fi; sleep 2; exit 6'"
            ),
        );
        let record = ended.of(rank as u64);
        assert_eq!((&record["kind"], &record["oom"]), (&json!({"Signal": 9}), &json!("Killed")), "{ended:#?}");
        // The others failed by themselves, that on the same node too.
        for other in (0..4).filter(|other| *other != rank as u64 as usize) {
            let record = ended.of(other as u64);
            assert_eq!((&record["kind"], &record["oom"]), (&json!({"Exit": 6}), &json!("No")), "{ended:#?}");
        }
    }
    // A helper's death, as of a data loader's worker: the rank ends by itself.
    let ended = run(&sandbox, &format!("user srun -Q -N1 -n1 --mem=100 {FLAG} bash -c 'python3 -c \"{eat}\"; exit 1'"));
    let record = ended.of(0);
    assert_eq!((&record["kind"], &record["oom"]), (&json!({"Exit": 1}), &json!("Killed")), "{ended:#?}");
    // Killed by hand.
    let ended = run(&sandbox, &format!("user srun -Q -N1 -n1 --mem=100 {FLAG} bash -c 'kill -9 $$'"));
    let record = ended.of(0);
    assert_eq!((&record["kind"], &record["oom"]), (&json!({"Signal": 9}), &json!("No")), "{ended:#?}");
}
