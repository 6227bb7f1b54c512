//! MASTER_ADDR on a real Slurm whose nodes have a host name, an address and a
//! resolver configuration of their own; node lists as people's clusters have
//! them; and ranks that really meet.
//!
//! The nodes are network namespaces of one machine with one interface each.
//! What that cannot show: a DNS server, a second fabric, a firewall.

mod common;

use common::{Sandbox, library, root};
use palingenesis::facts::hostlist;

/// The nodes' names, and further options of the sandbox.
fn cluster(name: &str, nodes: &str, options: &[&str]) -> Option<Sandbox> {
    let plugstack = format!("required {}", library().display());
    let all = ["--names", nodes, "--sockets", "2", "--cores", "32", "--plugstack", &plugstack];
    Sandbox::up(name, &[&all, options].concat())
}

/// Nodes of their own: 10.99.0.1, 10.99.0.2 and 10.99.0.3 on eth0.
fn network(name: &str, options: &[&str]) -> Option<Sandbox> {
    cluster(name, "node001,node002,node003", &[&["--namespace-per-node"], options].concat())
}

/// Names that parsers of node lists got wrong:
/// <https://github.com/Lightning-AI/pytorch-lightning/issues/14896>,
/// <https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3830>,
/// <https://github.com/facebookincubator/submitit/pull/4>.
#[test]
fn node_names_in_brackets_and_without() {
    let nodes = "linux1,linux2,d05-41,d05-42,nodes006,nodes011,host001,host003,host004,host006,\
                 nodeA,nodeB001,nodeB003,nodeC,a1b3,a1b4,a2b3,a2b4,node099,node100,node8,node9";
    let Some(slurm) = cluster("names", nodes, &[]) else { return };
    for (list, master) in [
        ("linux[1,2]", "linux1"),
        ("d05-[41-42]", "d05-41"),
        ("nodes[006,011]", "nodes006"),
        ("host[001,003-004,006]", "host001"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA"),
        ("a1b3,a1b4,a2b3,a2b4", "a1b3"),
        ("node[099-100]", "node099"),
        ("node[8-9]", "node8"),
    ] {
        let run = slurm.record(&format!("srun --palingenesis -w '{list}' RECORD a"));
        let layout = slurm.check(run.tasks("a"));
        assert_eq!(layout.node_of(0), master, "{list}");
        let listed = run.tasks("a")[0].get("SLURM_STEP_NODELIST").unwrap();
        assert_eq!(hostlist::expand(listed).unwrap(), slurm.hostnames(listed), "{listed}");
    }
}

/// The same reports' lists, of nodes that need not exist, as Slurm expands them.
/// <https://github.com/pytorch/pytorch/issues/73656>: a list that Slurm refuses
/// gave an empty host, one that it misreads (22.05 takes `node[1-2` for `node]`)
/// a wrong one.
#[test]
fn node_lists_as_slurm_expands_them() {
    let Some(slurm) = cluster("lists", "node001", &[]) else { return };
    for list in [
        "linux[1,2]",
        "d05-[41-42]",
        "nodes[006,011]",
        "host[001,003-004,006]",
        "nodeA,nodeB[001,003],nodeC",
        "a[1-2]b[3-4]",
        "c[1-2]s[1-2]n[1-2]",
        "node[001-003,007]",
        "node[08-12]",
        "node[8-12]",
        "node[099-101]",
        "node[98-0101]",
        "node[1-2],node[2-3]",
    ] {
        assert_eq!(hostlist::expand(list).unwrap(), slurm.hostnames(list), "{list}");
    }
    let error = hostlist::expand("node[1-2").unwrap_err().to_string();
    assert!(error.contains("node[1-2"), "{error}");
    // Invalid before 23.11 and read since: never an empty list.
    assert_eq!(hostlist::first("node[001-003]-ib").unwrap(), "node001-ib");
}

#[test]
fn an_interface_gives_rank_0s_address_on_every_node() {
    let Some(slurm) = network("iface", &["--hide-resolve", "node003"]) else { return };
    let run = slurm.record(
        "srun --palingenesis=iface=eth0 -N3 -n4 RECORD first
         srun --palingenesis=iface=eth0 -m arbitrary -n3 -w node002,node001,node003 RECORD middle",
    );
    for (label, address) in [("first", "10.99.0.1"), ("middle", "10.99.0.2")] {
        slurm.check_ranks(run.tasks(label));
        for task in run.tasks(label) {
            assert_eq!(task.get("MASTER_ADDR"), Some(address), "{label}:\n{task}");
        }
    }
    let run = slurm.try_record("srun --palingenesis=iface=ib7 -N2 -n4 RECORD a");
    assert_eq!((run.said.code, run.labels().len()), (78, 0), "{:#?}", run.said);
    for node in ["node001", "node002"] {
        let lines = run.said.ours().into_iter().filter(|line| line.contains(node)).collect::<Vec<_>>();
        let [line] = lines[..] else { panic!("not one line about {node}: {}", run.said.err) };
        assert!(line.contains("iface=ib7") && line.contains("eth0"), "{line}");
    }
}

/// <https://github.com/pytorch/pytorch/issues/73656>: a site reaches its nodes
/// over the fast network by a name with a suffix.
#[test]
fn a_suffix_names_rank_0_on_another_network() {
    let Some(slurm) = network("suffix", &[]) else { return };
    let hosts = slurm.dir().join("etc/hosts");
    // Appended to, since the nodes have this file mounted.
    let mut file = std::fs::File::options().append(true).open(hosts).unwrap();
    std::io::Write::write_all(&mut file, b"10.99.0.1 node001i\n10.99.0.2 node002-ib0\n").unwrap();
    let run = slurm.record(
        "srun --palingenesis=suffix=i -N2 -n3 RECORD letter
         srun --palingenesis=suffix=-ib0 -m arbitrary -n2 -w node002,node001 RECORD arbitrary",
    );
    for (label, host) in [("letter", "node001i"), ("arbitrary", "node002-ib0")] {
        slurm.check_ranks(run.tasks(label));
        for task in run.tasks(label) {
            assert_eq!(task.get("MASTER_ADDR"), Some(host), "{label}");
        }
    }
    let run = slurm.try_record("srun --palingenesis=suffix=-opa -N2 -n2 RECORD a");
    assert_eq!((run.said.code, run.labels().len()), (78, 0), "{:#?}", run.said);
    let line = run.said.ours().into_iter().find(|line| line.contains("node002")).unwrap_or_default();
    assert!(line.contains("node001-opa") && line.contains("suffix="), "{}", run.said.err);
    // The nodes meet at that name's address, not at the node's: at this one is nobody.
    std::io::Write::write_all(&mut file, b"10.99.0.77 node001-ib9\n").unwrap();
    let run = slurm.try_record("srun --palingenesis=suffix=-ib9,timeout=4 -N2 -n2 RECORD a");
    assert_ne!(run.said.code, 0, "{:#?}", run.said);
    assert_eq!(run.labels(), Vec::<String>::new(), "a rank ran");
    let reached = "node002 cannot reach rank 0's node node001 at 10.99.0.77:";
    let line = run.said.ours().into_iter().find(|line| line.contains(reached)).unwrap_or_default();
    assert!(line.contains("to which node001-ib9 resolves on node002"), "{}", run.said.err);
}

/// <https://github.com/nyu-systems/Grendel-GS/issues/9>: one machine cannot
/// resolve the name that the others know.
#[test]
fn a_node_that_cannot_resolve_the_name_gets_slurms_address() {
    let Some(slurm) = network("hidden", &["--hide-resolve", "node001"]) else { return };
    let run = slurm.record(
        "srun --palingenesis -N3 -n4 RECORD own
         srun --palingenesis -m arbitrary -n3 -w node002,node001,node003 RECORD other
         # The addresses are there to be used: rank 0 listens, the others connect.
         srun --palingenesis -N3 -n3 /usr/bin/python3 -c '
import os, socket, time
place = os.environ[\"MASTER_ADDR\"], int(os.environ[\"MASTER_PORT\"])
if os.environ[\"RANK\"] == \"0\":
    server = socket.create_server(place)
    for _ in range(2): server.accept()
else:
    for _ in range(100):
        try:
            socket.create_connection(place, 5)
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise SystemExit(\"nobody listens at %s %s\" % place)
'",
    );
    for (label, host, address) in [("own", "node001", "10.99.0.1"), ("other", "node002", "10.99.0.2")] {
        slurm.check_ranks(run.tasks(label));
        for task in run.tasks(label) {
            let expected = if task.get("SLURMD_NODENAME") == Some("node001") { address } else { host };
            assert_eq!(task.get("MASTER_ADDR"), Some(expected), "{label}:\n{task}");
        }
    }
}

#[test]
fn without_a_name_and_an_address_the_node_is_named() {
    let Some(slurm) = network("no-address", &["--hide-resolve", "node003"]) else { return };
    // A NodeAddr that only the controller's machine could use.
    slurm.run_root("scontrol update nodename=node001 nodeaddr=localhost").ok();
    let run = slurm.try_record("srun --palingenesis -N3 -n3 RECORD a");
    // It has no way to the others: Slurm ends the step, as srun reports SIGKILL.
    assert_eq!(run.said.code, 128 + 9, "{:#?}", run.said);
    // First; where Slurm ends another node's rank before rank 0, that one says so.
    let lines = run.said.before_the_end();
    let line = lines.lines().find(|line| line.contains("palingenesis")).unwrap_or_default();
    assert!(
        line.contains("node001 does not resolve") && line.contains(" on node003,") && line.contains("/etc/hosts"),
        "{line}"
    );
    assert_eq!(run.labels(), Vec::<String>::new(), "a rank ran");
    assert!(run.said.took < std::time::Duration::from_secs(40), "{:#?}", run.said);
}

/// PyTorch as everybody uses it: nothing but `env://`.
#[test]
fn four_pytorch_ranks_on_two_nodes_add_up_their_values() {
    let Some(slurm) = network("gloo", &[]) else { return };
    if slurm.run("/usr/bin/python3 -c 'import importlib.util as u; raise SystemExit(not u.find_spec(\"torch\"))'").code
        != 0
    {
        println!("skipped: /usr/bin/python3 has no torch; install it with: apt-get install python3-torch");
        return;
    }
    let program = slurm.dir().join("home/allreduce.py");
    std::fs::copy(root().join("demo/allreduce.py"), &program).unwrap();
    let line =
        format!("OMP_NUM_THREADS=1 srun --palingenesis -N2 --ntasks-per-node=2 /usr/bin/python3 {}", program.display());
    let said = slurm.run_as(&[], &line, 120).ok();
    // Each rank gives ten to the power of its number.
    for rank in 0..4 {
        let (local, node) = (rank % 2, if rank < 2 { "node001" } else { "node002" });
        let expected = format!("rank {rank} of 4 (local rank {local} on {node}): sum 1111, expected 1111");
        assert!(said.out.lines().any(|line| line == expected), "'{expected}' is not in:\n{}", said.out);
    }
}

/// <https://github.com/TensorAuto/OpenTau/pull/396>: each rank named the run's directory by
/// its own clock, and one fell into the next second.
#[test]
fn all_ranks_of_a_launch_have_one_name_for_it() {
    let Some(slurm) = cluster("launch-id", "node001,node002", &[]) else { return };
    let tell = "sh -c 'sleep 0.$SLURM_PROCID; echo ${PALINGENESIS_LAUNCH_ID-none}'";
    let ids = |line: &str| {
        let said = slurm.run(line).ok();
        let mut ids: Vec<String> = said.out.lines().map(String::from).collect();
        ids.sort_unstable();
        ids
    };
    let step = format!("srun -Q -N2 -n8 --palingenesis {tell}");
    let (first, second) = (ids(&step), ids(&format!("PALINGENESIS_LAUNCH_ID=mine {step}")));
    for (ids, job) in [(&first, 1), (&second, 2)] {
        assert!(ids.len() == 8 && ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        let (time, step) = ids[0].split_once('-').unwrap();
        assert!(time.len() == 16 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        assert_eq!(step, format!("{job}.0"));
    }
    // An srun inside a step starts another launch; a shell is none.
    let print = "printenv PALINGENESIS_LAUNCH_ID";
    let inner = format!("sh -c '{print}; srun -Q --overlap -n1 --palingenesis {print}'");
    let nested = ids(&format!("srun -Q -N1 -n1 --palingenesis {inner}"));
    assert!(nested.len() == 2 && nested[0].ends_with("-3.0") && nested[1].ends_with("-3.1"), "{nested:?}");
    assert_eq!(ids(&format!("srun -Q -n1 --palingenesis=launch=shell {tell}")), ["none"]);
}
