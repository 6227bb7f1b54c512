//! `palingenesis explain --node` and `--record`: what they print of real machines'
//! trees, and that a record shows the same machine elsewhere.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Said;
use common::machine::{Machine, TempTree, tree};
use serde_json::Value;

/// `palingenesis explain` with nothing in its environment but a folder for what it
/// unpacks.
fn explain(scratch: &TempTree, arguments: &[&str]) -> Said {
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().env("TMPDIR", scratch.root()).arg("explain").args(arguments);
    Said::run(command)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json(said: &Said) -> Value {
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}:\n{}{}", said.out, said.err))
}

/// The JSON form of the machine below `root`.
fn node(scratch: &TempTree, root: &Path) -> Value {
    json(&explain(scratch, &["--node", "--json", "--root", text(root)]).ok())
}

/// Takes the UUIDs out, which a record replaces.
fn take_uuids(node: &mut Value) -> Vec<String> {
    let gpus = node["gpus"].as_array_mut().unwrap().iter_mut();
    gpus.filter_map(|gpu| Some(gpu["uuid"].take().as_str()?.to_string())).collect()
}

fn record(scratch: &TempTree, root: &Path, name: &str) -> PathBuf {
    let file = scratch.root().join(name);
    explain(scratch, &["--record", text(&file), "--root", text(root)]).ok();
    file
}

/// Nothing but what the test put there is left of what was unpacked.
fn left(scratch: &TempTree) -> Vec<String> {
    let entries = fs::read_dir(scratch.root()).unwrap().map(|entry| entry.unwrap().file_name());
    entries.map(|name| name.into_string().unwrap()).filter(|name| !name.ends_with(".tar")).collect()
}

#[test]
fn a_record_shows_the_same_machine_and_is_small() {
    let scratch = TempTree::new();
    for machine in Machine::all() {
        let tree = machine.tree();
        let file = record(&scratch, tree.root(), &format!("{}.tar", machine.name));
        let (mut here, mut there) = (node(&scratch, tree.root()), node(&scratch, &file));
        let (own, replaced) = (take_uuids(&mut here), take_uuids(&mut there));
        assert_eq!(here, there, "{}", machine.name);
        assert_eq!((own.len(), BTreeSet::from_iter(&replaced).len()), (replaced.len(), own.len()));
        let size = fs::metadata(&file).unwrap().len();
        println!("{}: {} KiB, {} entries in the tree", machine.name, size.div_ceil(1024), tree.entries().len());
        assert!(size < 1 << 20, "{}: {size}", machine.name);
        if ["dgx-h100", "azure-nd-h100-v5"].contains(&machine.name.as_str()) {
            // A record of a record is the same one.
            let again = record(&scratch, &file, "again.tar");
            assert!(fs::read(&file).unwrap() == fs::read(again).unwrap(), "{}", machine.name);
        }
    }
    assert_eq!(left(&scratch), Vec::<String>::new());
}
/// The cards beside each GPU of a DGX H100 and its two for storage and management
/// (<https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html>), by
/// `nvidia-smi topo -m` PXB each.
#[test]
fn a_dgx_h100_as_a_table() {
    let scratch = TempTree::new();
    let tree = tree("dgx-h100");
    let text = explain(&scratch, &["--node", "--root", text(tree.root())]).ok().out;
    let cells = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = text.lines().map(cells).collect();
    let starts = |words: &[&str]| {
        let found: Vec<_> =
            rows.iter().filter(|row| row.len() >= words.len() && row[..words.len()] == *words).collect();
        assert_eq!(found.len(), 1, "{words:?}\n{text}");
        found[0].clone()
    };
    let cards = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];
    let titles = starts(&["DISTANCE"]);
    assert_eq!(titles.len(), 13);
    for (gpu, card) in cards.iter().enumerate() {
        let row = starts(&["GPU", &gpu.to_string()]);
        for (title, cell) in titles.iter().skip(1).zip(&row[2..]) {
            assert_eq!(cell == "PXB*", title == card, "GPU {gpu} {title}: {cell}");
            let near = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"].contains(&title.as_str());
            let expected = if near == (gpu < 4) { "NODE" } else { "SYS" };
            assert!(title == card || cell == expected, "GPU {gpu} {title}: {cell}");
        }
        assert!(starts(&[card]).contains(&"yes".into()));
    }
    for card in ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"] {
        let row = starts(&[card]);
        let no = row.iter().position(|cell| cell == "no").expect("not used");
        assert!(row.len() > no + 1, "no reason: {row:?}");
    }
    assert_eq!(starts(&["NCCL_IB_HCA"])[1], format!("={}", cards.map(|card| format!("{card}:1")).join(",")));
    assert_eq!(starts(&["0", "0000:1b:00.0"]).last().unwrap(), "mlx5_0");
    assert!(text.lines().any(|line| line.starts_with("  *: the card belongs to that GPU; PXB: ")), "{text}");
    // Its line is what a job gets: a plan of two such nodes says the same.
    let step = ["--nodelist", "dgx[1-2]", "--tasks-per-node", "8", "--json", "--root"];
    let plan = json(&explain(&scratch, &[&step[..], &[self::text(tree.root())]].concat()).ok());
    let hca = plan["env"].as_array().unwrap().iter().find(|variable| variable["name"] == "NCCL_IB_HCA");
    assert_eq!(hca.expect("set")["value"].as_str(), Some(starts(&["NCCL_IB_HCA"])[1].as_str()));
}

/// On a virtual machine's flat tree NCCL's topology file tells what is near what
/// (<https://github.com/Azure/azhpc-images/blob/master/topology/ndv5-topo.xml>).
#[test]
fn a_topology_file_counts_here_and_in_a_record() {
    let scratch = TempTree::new();
    let tree = tree("azure-nd-h100-v5");
    let pair = "<pci busid=\"ffff:ff:01.0\" class=\"0x060400\"><pci busid=\"0001:00:00.0\" class=\"0x030200\"/>\
                <pci busid=\"0101:00:00.0\" class=\"0x020700\"/></pci>";
    tree.file("etc/topo.xml", format!("<system version=\"1\"><cpu numaid=\"0\">{pair}</cpu></system>"));
    let distance = |root: &Path| node(&scratch, root)["gpus"][0]["distances"][0].clone();
    assert_eq!(distance(tree.root()), "NODE");
    tree.file("etc/nccl.conf", "NCCL_TOPO_FILE=/etc/topo.xml\n");
    let file = record(&scratch, tree.root(), "x.tar");
    for root in [tree.root(), &file] {
        assert_eq!((distance(root), &node(&scratch, root)["topology_file"]), ("PIX".into(), &"/etc/topo.xml".into()));
        let text = explain(&scratch, &["--node", "--root", self::text(root)]).ok().out;
        assert!(text.contains("note: the bridges are those of the topology file /etc/topo.xml"), "{text}");
    }
}

/// <https://github.com/getainode/ainode/pull/89>: a port whose only address no peer
/// knows. That survives the replacement of addresses in a record.
#[test]
fn a_stray_roce_port_is_one_in_a_record_too() {
    let scratch = TempTree::new();
    let tree = tree("oci-bm-gpu-h100-8");
    for number in 0..18 {
        let ports = format!("sys/class/infiniband/mlx5_{number}/ports/1");
        let address = if number == 5 { "a9fe:0705".to_string() } else { format!("0a5b:{number:02x}07") };
        tree.file(&format!("{ports}/gid_attrs/types/0"), "RoCE v2\n");
        tree.file(&format!("{ports}/gids/0"), format!("0000:0000:0000:0000:0000:ffff:{address}\n"));
    }
    let mut here = node(&scratch, tree.root());
    let file = record(&scratch, tree.root(), "x.tar");
    let mut there = node(&scratch, &file);
    take_uuids(&mut here);
    take_uuids(&mut there);
    assert_eq!(here, there);
    let nics = here["nics"].as_array().unwrap();
    let stray = nics.iter().find(|nic| nic["name"] == "mlx5_5").unwrap();
    assert_eq!(stray["used"], false);
    assert!(stray["why"].as_str().unwrap().contains("169.254.7.5"), "{stray}");
    let bytes = fs::read(file).unwrap();
    let record = String::from_utf8_lossy(&bytes);
    assert!(record.contains(":ffff:c612:") && !record.contains("0a5b:"), "10.91.0.0/16 is the site's own");
}

/// nic-down: the card of GPU 5 is DOWN.
#[test]
fn a_card_that_is_down_is_told_with_what_is_used_instead() {
    let scratch = TempTree::new();
    let tree = tree("dgx-h100");
    tree.file("sys/class/infiniband/mlx5_9/ports/1/state", "1: DOWN\n");
    tree.file("sys/class/infiniband/mlx5_9/ports/1/phys_state", "3: Disabled\n");
    let of = |more: &[&str]| explain(&scratch, &[&["--node", "--root", text(tree.root())], more].concat()).ok().out;
    let told = of(&[]);
    let line = |start: &str| told.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{told}"));
    assert!(line("palingenesis: warning: ").contains("GPU 5: mlx5_9 is down"), "{told}");
    assert!(line("  mlx5_9 ").contains(" down ") && line("  mlx5_9 ").contains(" no "), "{told}");
    assert!(!line("  NCCL_IB_HCA").contains("mlx5_9"), "{told}");
    let refused = of(&["--spec", "nic-down=fail"]);
    assert!(refused.contains("NCCL_IB_HCA  not set: a job would be refused here: "), "{refused}");
}

/// GPU UUIDs, the GUIDs of cards and where packets go are nobody's business in a
/// public report. Of this machine the name is left out too.
#[test]
fn a_record_names_nobody() {
    let scratch = TempTree::new();
    let tree = tree("dgx-h100");
    tree.file("etc/nccl.conf", "# admin@example.org\nNCCL_DEBUG=WARN\nNCCL_X_TOKEN=s3cr3t\nHOME_OF=ada\n");
    tree.file("proc/net/dev", "Inter-| Receive\n face |bytes\n  ibp24s0: 4711 99\n");
    let route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                 ibp24s0\t00000000\tFE01A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                 ibp24s0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n";
    tree.file("proc/net/route", route);
    let mut here = node(&scratch, tree.root());
    let bytes = fs::read(record(&scratch, tree.root(), "x.tar")).unwrap();
    let record = String::from_utf8_lossy(&bytes);
    let uuids = take_uuids(&mut here);
    assert_eq!(uuids.len(), 8);
    let secrets = ["s3cr3t", "admin@", "ada", "FE01A8C0", "0001A8C0", "4711"].map(String::from);
    for secret in uuids.iter().chain(&secrets) {
        assert!(!record.contains(secret.as_str()), "{secret}");
    }
    for there in
        ["NCCL_DEBUG=WARN\n", "NCCL_X_TOKEN=(hidden)\n", "ibp24s0: 0\n", "00000000-0000-0000-0000-000000000008"]
    {
        assert!(record.contains(there), "{there}");
    }
    assert_eq!(here["default_route"], "ibp24s0");
}

/// On whatever machine the tests run; the least it has is CPUs and a loopback.
#[test]
fn this_machine_can_be_recorded() {
    let scratch = TempTree::new();
    let file = scratch.root().join("this.tar");
    let said = explain(&scratch, &["--record", text(&file)]).ok();
    assert!(said.out.contains(" files of this machine, ") && said.err.is_empty(), "{}{}", said.out, said.err);
    let mut here = json(&explain(&scratch, &["--node", "--json"]).ok());
    let mut there = node(&scratch, &file);
    take_uuids(&mut here);
    take_uuids(&mut there);
    assert_eq!(here, there);
    let first = fs::read(&file).unwrap();
    explain(&scratch, &["--record", text(&file)]).ok();
    assert!(first == fs::read(&file).unwrap(), "another archive of the same machine");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let found = String::from_utf8_lossy(&first).contains(&format!("/{}/", host.trim()));
    assert!(!found && left(&scratch).is_empty());
}

#[test]
fn a_machine_without_gpus_says_so() {
    let scratch = TempTree::new();
    let empty = TempTree::new();
    let said = explain(&scratch, &["--node", "--root", text(empty.root())]).ok();
    for part in ["0 GPUs, 0 network cards", "no GPU is seen here, so nothing is bound", "no RDMA device"] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    let node = node(&scratch, empty.root());
    assert_eq!((node["gpus"].as_array().unwrap().len(), &node["nccl_ib_hca"]["value"]), (0, &Value::Null));
    let file = scratch.root().join("empty.tar");
    explain(&scratch, &["--record", text(&file), "--root", text(empty.root())]).ok();
    assert_eq!(explain(&scratch, &["--node", "--root", text(&file)]).code, 1);
}

#[test]
fn what_cannot_be_recorded_or_replayed_is_one_line() {
    let scratch = TempTree::new();
    let tree = TempTree::new();
    tree.file("plain.tar", "no archive at all");
    tree.file("gz.tar", [0x1f, 0x8b, 8, 0]);
    let file = |name: &str| tree.root().join(name);
    for (arguments, part) in [
        (["--node", "--root", "/nonexistent/x"], "--root /nonexistent/x: no such file or directory"),
        (["--node", "--root", text(&file("plain.tar"))], "is no record that can be replayed"),
        (["--node", "--root", text(&file("gz.tar"))], "gunzip it first"),
        (["--json", "--root", text(&file("plain.tar"))], "is no record that can be replayed"),
        (["--record", "/nonexistent/x.tar", "--root=/"], "cannot write /nonexistent/x.tar"),
        (["--record", text(&file("x.tar")), "--root=/nonexistent/x"], "nothing recorded: /nonexistent/x: "),
    ] {
        let said = explain(&scratch, &arguments);
        assert_eq!((said.code, said.err.lines().count()), (1, 1), "{arguments:?}: {}", said.err);
        assert!(said.err.starts_with("palingenesis: error: ") && said.err.contains(part), "{part}: {}", said.err);
    }
    // What is there and cannot be read is named, and the rest recorded.
    tree.file("sys/devices/system/cpu/online", "0-3\n");
    fs::create_dir_all(file("etc/nccl.conf")).unwrap();
    let said = explain(&scratch, &["--record", text(&file("x.tar")), "--root", text(tree.root())]).ok();
    assert!(said.err.contains("warning: not in the record: ") && said.err.contains("etc/nccl.conf: "), "{}", said.err);
    assert_eq!(node(&scratch, &file("x.tar"))["cpus"]["online"], "0-3");
    // A device for each of thousands of containers.
    for number in 0..3000 {
        tree.file(&format!("sys/class/net/veth{number:07}/flags"), "0x1003\n");
        tree.file(&format!("sys/class/net/veth{number:07}/operstate"), "up\n");
        tree.file(&format!("sys/class/net/veth{number:07}/ifindex"), format!("{number}\n"));
    }
    let said = explain(&scratch, &["--record", text(&file("many.tar")), "--root", text(tree.root())]);
    assert_eq!((said.code, said.err.lines().count()), (1, 1), "{}", said.err);
    assert!(said.err.contains("are more than a record holds") && !file("many.tar").exists(), "{}", said.err);
    for arguments in [
        &["--node", "--nodelist", "n1", "--tasks-per-node", "1"][..],
        &["--node", "NCCL_DEBUG"],
        &["--node", "--record", "x"],
        &["--record", "x", "--json"],
        &["--record", "x", "--partition", "gpu"],
    ] {
        assert_eq!(explain(&scratch, arguments).code, 2, "{arguments:?}");
    }
    assert_eq!(left(&scratch), Vec::<String>::new());
}

/// A list is for many kinds of nodes: what names no card of one is no fault.
#[test]
fn the_site_file_s_lists_hold_by_partition_and_node() {
    let scratch = TempTree::new();
    let tree = tree("dgx-h100");
    let site = tree.root().join("site.toml");
    let lists = "nic-deny = [\"mlx5_1\", \"bond*\"]\n[partition.old]\nnic-deny = [\"0000:99:00.0\"]\n\
                 [node.\"dgx[1-4]\"]\nnic-allow = [\"0000:18:00.0\", \"ibp64s0\", \"mlx5_[20-29]\"]\nnic-deny = []\n";
    fs::write(&site, lists).unwrap();
    let seen = |more: &[&str]| {
        let arguments = [&["--config", text(&site), "--root", text(tree.root())], more].concat();
        let text = explain(&scratch, &arguments).ok().out;
        let notes: Vec<String> = text.lines().filter(|line| line.contains("names no card")).map(String::from).collect();
        (text, notes)
    };
    let note =
        |list: &str, pattern: &str| format!("palingenesis: note: {list} \"{pattern}\" names no card of this node");
    assert_eq!(seen(&["--node"]).1, [note("nic-deny", "bond*")]);
    assert_eq!(seen(&["--node", "--partition", "old"]).1, [note("nic-deny", "0000:99:00.0")]);
    assert_eq!(seen(&["--node=dgx3"]).1, [note("nic-allow", "mlx5_[20-29]")]);
    let (json, _) = seen(&["--node=dgx3", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["no_such_card"], serde_json::json!([{"list": "nic-allow", "pattern": "mlx5_[20-29]"}]));
    let used = json["nics"].as_array().unwrap().iter().filter(|nic| nic["used"] == true);
    assert_eq!(used.map(|nic| nic["name"].as_str().unwrap()).collect::<Vec<_>>(), ["mlx5_0", "mlx5_3"]);
    assert_eq!(json["nccl_ib_hca"]["value"], "=mlx5_0:1,mlx5_3:1");
}
