//! The site file on a real Slurm: what an admin writes reaches the tasks below
//! what users say, a broken file is one clear refusal for jobs with the flag and
//! nothing for those without, and `palingenesis doctor` tells the same of it.
//!
//! What one machine cannot show: a file server that does not answer. A file that
//! config= names is read under a deadline in a process of its own.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use common::{Said, Sandbox, library};
use palingenesis::config::site::Site;
use palingenesis::facts::User;

/// `EX_CONFIG` of sysexits.h.
const REFUSED: i32 = 78;

/// A cluster whose site file is `site.toml` of the sandbox's folder.
struct Cluster {
    sandbox: Sandbox,
    file: PathBuf,
}

impl Cluster {
    fn up(name: &str) -> Option<Cluster> {
        let sandbox = Sandbox::up(&format!("site-{name}"), &["--nodes", "2", "--cores", "4"])?;
        let file = sandbox.dir().join("site.toml");
        sandbox.plugstack(&[&format!("optional {} config={}", library().display(), file.display())]);
        Some(Cluster { sandbox, file })
    }

    fn write(&self, text: &str) {
        write(&self.file, text);
    }
}

fn write(file: &PathBuf, text: &str) {
    fs::write(file, text).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
}

const SITE: &str = r#"
profile = "mixtral"
ports = "21000-21999"

[env]
NCCL_IB_TIMEOUT = "20"
NCCL_IB_SL = "1"
NCCL_CROSS_NIC = "0"

[force]
NCCL_NET = "IB"

[profiles.mixtral]
base = "megatron"
[profiles.mixtral.env]
NCCL_CROSS_NIC = "2"
NCCL_MIN_CTAS = "4"

[profiles.plain]

[partition."ma*".env]
NCCL_IB_SL = "2"

[node."n[2-9]".env]
NCCL_IB_SL = "3"
"#;

/// Facts of the step, force, the user's words, the user's exports, the site file by
/// node, partition and for all, the profile: in this order.
#[test]
fn what_the_admin_writes_reaches_the_tasks_in_its_place() {
    let Some(cluster) = Cluster::up("order") else { return };
    let sandbox = &cluster.sandbox;
    cluster.write(SITE);
    let run = sandbox.record("srun -N2 -n2 --palingenesis RECORD t");
    assert_eq!(run.said.err, "");
    for (task, sl) in run.tasks("t").iter().zip(["2", "3"]) {
        // The profile has 22, see src/plan/environment.rs.
        assert_eq!(task.get("NCCL_IB_TIMEOUT"), Some("20"));
        assert_eq!(task.get("NCCL_IB_SL"), Some(sl), "{task}");
        assert_eq!(task.get("NCCL_NET"), Some("IB"));
        // Megatron's, as the base of the site's own profile.
        assert_eq!(task.get("TOKENIZERS_PARALLELISM"), Some("false"));
        assert_eq!(task.get("NCCL_MIN_CTAS"), Some("4"));
        // [env] stands above a profile, the site's own too.
        assert_eq!(task.get("NCCL_CROSS_NIC"), Some("0"));
        assert!((21000..=21999).contains(&task.number("MASTER_PORT")), "{task}");
        assert_eq!(task.get("RANK"), task.get("SLURM_PROCID"));
    }

    let exports = "NCCL_IB_TIMEOUT=23 NCCL_IB_SL=5 NCCL_NET=Socket MASTER_PORT=23456";
    let run = sandbox.record(&format!("{exports} srun -N2 -n2 --palingenesis RECORD t"));
    for task in run.tasks("t") {
        assert_eq!(task.get("NCCL_IB_TIMEOUT"), Some("23"));
        assert_eq!(task.get("NCCL_IB_SL"), Some("5"));
        assert_eq!(task.get("NCCL_NET"), Some("IB"));
        assert_eq!(task.get("MASTER_PORT"), Some("23456"));
    }
    // Loudly, once, with the line of the file.
    let ours = run.said.ours();
    let place = format!("{}:11", cluster.file.display());
    assert_eq!(ours.len(), 1, "{ours:?}");
    for part in ["warning: NCCL_NET=Socket gives way to NCCL_NET=IB", "site file forces", &place] {
        assert!(ours[0].contains(part), "{}", ours[0]);
    }

    // Another profile, by the user's word: nothing of the site's own.
    let run = sandbox.record("MASTER_PORT=23456 srun -N2 -n2 --palingenesis=fsdp,port=24000 RECORD t");
    for task in run.tasks("t") {
        assert_eq!((task.get("NCCL_MIN_CTAS"), task.get("NCCL_CROSS_NIC")), (None, Some("0")));
        assert_eq!((task.get("TOKENIZERS_PARALLELISM"), task.get("MASTER_PORT")), (None, Some("24000")));
    }

    // Without the flag and with off nobody reads it.
    for options in ["", "--palingenesis=off"] {
        let run = sandbox.record(&format!("srun -N2 -n2 {options} RECORD t"));
        assert_eq!(run.said.err, "");
        run.tasks("t").iter().for_each(|task| task.is_untouched());
    }
}

#[test]
fn a_site_profile_is_a_word_for_srun_sbatch_and_salloc_and_explain_shows_where_values_come_from() {
    let Some(cluster) = Cluster::up("profile") else { return };
    let sandbox = &cluster.sandbox;
    cluster.write(&SITE.replace("profile = \"mixtral\"\n", ""));
    let program = common::program("palingenesis");
    let program = program.display();
    let run = sandbox.record(&format!(
        "srun -N2 -n2 --palingenesis=mixtral,debug RECORD srun
         srun -N2 -n2 --palingenesis RECORD bare
         srun -n1 --palingenesis=mixtral {program} explain --json >FOLDER/plan
         salloc -Q -N2 --palingenesis=mixtral srun -N2 -n2 RECORD salloc
         cat FOLDER/plan"
    ));
    for label in ["srun", "salloc"] {
        assert_eq!(run.tasks(label).len(), 2);
        run.tasks(label).iter().for_each(|task| assert_eq!(task.get("NCCL_MIN_CTAS"), Some("4"), "{label}"));
    }
    run.tasks("bare").iter().for_each(|task| assert_eq!(task.get("NCCL_MIN_CTAS"), None));
    let plan: serde_json::Value = serde_json::from_str(run.said.out.trim()).unwrap();
    assert_eq!(plan["step"]["profile"], "mixtral");
    let of = |name: &str| {
        let found = plan["env"].as_array().unwrap().iter().find(|variable| variable["name"] == name);
        found.unwrap_or_else(|| panic!("{name} is not in {plan}"))
    };
    for name in ["NCCL_IB_SL", "NCCL_NET", "MASTER_PORT", "NCCL_MIN_CTAS"] {
        assert_eq!(of(name)["origin"], if name == "MASTER_PORT" { "step" } else { "site" }, "{}", of(name));
    }
    let run = sandbox.batch("-N2 --palingenesis=mixtral", 1, "srun -N2 -n2 RECORD t");
    run.tasks("t").iter().for_each(|task| assert_eq!(task.get("NCCL_MIN_CTAS"), Some("4")));

    // Nearest word, in every command and in the variable.
    for command in ["srun true", "sbatch --wrap true", "salloc true"] {
        let said = sandbox.run(&command.replacen(' ', " -N2 --palingenesis=mixtrl ", 1));
        assert_eq!((said.code, said.ours().len()), (REFUSED, 1), "{command}: {said:?}");
        assert!(said.err.contains("unknown word 'mixtrl'") && said.err.contains("did you mean 'mixtral'?"), "{said:?}");
    }
    let said = sandbox.run("PALINGENESIS=mixtral salloc -Q -N1 srun sh -c 'echo $NCCL_MIN_CTAS'").ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("4\n", ""));

    // A described step, by hand.
    let explain = |options: &str| {
        let step = "--nodelist n[1-2] --tasks-per-node 2 --rank 3";
        sandbox.run(&format!("{program} explain {step} --config {} {options}", cluster.file.display()))
    };
    let said = explain("--partition main").ok();
    let row = |said: &Said, name: &str| {
        let line = said.out.lines().find(|line| line.trim_start().starts_with(name));
        let words: Vec<String> = line.unwrap_or_default().split_whitespace().map(String::from).collect();
        words
    };
    assert_eq!(row(&said, "NCCL_IB_SL")[1..3], ["3".to_string(), "site".to_string()], "{}", said.out);
    assert_eq!(row(&said, "MASTER_PORT")[2], "site", "{}", said.out);
}

/// What may lie in a file's place, and what may stand in it. Each is one line with
/// the file and the reason, in the command itself, before anything is asked for
/// (<https://github.com/qiskit-community/spank-plugins/issues/72>: a configuration
/// that others than root can write).
#[test]
fn a_broken_file_refuses_with_the_flag_and_touches_no_other_job() {
    let Some(cluster) = Cluster::up("broken") else { return };
    let sandbox = &cluster.sandbox;
    let file = cluster.file.display().to_string();
    let doctor = common::program("palingenesis");
    let long = format!("head -c {} /dev/zero | tr '\\0' '#'", 256 * 1024 + 1);
    // (how root makes it, what the line says, whether it is also tried in sbatch and salloc)
    let cases: &[(&str, &[&str], bool)] = &[
        ("true", &["does not exist"], true),
        (
            "echo 'port = 21000' >F; chmod 600 F",
            &["cannot be opened: Permission denied; every user must be able to read it (chmod a+r"],
            false,
        ),
        ("printf 'port = 21000\\n\\xff\\n' >F", &["is not UTF-8 in line 2"], false),
        ("printf '\\n\\nprot = 21000\\n' >F", &[":3: unknown key 'prot'", "did you mean 'port'?"], true),
        ("echo 'port = [21000]' >F", &[":1: port is a list, but must be text"], false),
        ("echo 'port = 80' >F", &[":1: bad value '80' for port", "below 1024"], false),
        ("echo 'a = = b' >F", &[":1: not TOML"], false),
        ("printf '[env]\\nRANK = \"0\"\\n' >F", &[":2: RANK cannot be set here: it is a fact of the step"], false),
        (&format!("{long} >F"), &["is 262145 bytes long; 262144 are the most"], false),
        ("mkdir F", &["is a directory"], false),
        ("mkfifo F; chmod 644 F", &["is a fifo"], true),
        ("ln -s F F", &["cannot be opened: Too many levels of symbolic links"], false),
        ("ln -s /dev/zero F", &["is no regular file"], false),
        ("echo >F; chmod 664 F", &["is writable by others than root", "0664"], false),
        ("echo >F; chown trainer F", &["is writable by others than root", "belongs to user"], false),
        // Root's own file, which whoever owns its directory could rename away.
        (
            "mkdir -p HOME/d; echo >HOME/d/x; ln -s HOME/d/x F",
            &[
                "is replaceable by others than root: the directory ",
                "/home/trainer on its way belongs to user ",
                "SlurmUser",
            ],
            false,
        ),
    ];
    let plain = "srun -Q -N2 -n2";
    for (make, parts, all) in cases {
        let make = make.replace("HOME", &format!("{}/home/trainer", sandbox.dir().display()));
        sandbox.run_root(&format!("umask 022; cd /; rm -rf F; {make}").replace('F', &file)).ok();
        let mut lines = vec!["srun -N2 -n2 --palingenesis echo RAN"];
        if *all {
            lines.extend(["sbatch -N2 --palingenesis --wrap 'echo RAN'", "salloc -N2 --palingenesis echo RAN"]);
            lines.push("PALINGENESIS= srun -N2 -n2 echo RAN");
        }
        for line in lines {
            let said = sandbox.run(line);
            let what = format!("{make}: {line}: {said:?}");
            assert_eq!((said.code, said.ours().len()), (REFUSED, 1), "{what}");
            let ours = said.ours()[0];
            assert!(ours.starts_with(&format!("palingenesis: error: site file {file}")), "{what}");
            for part in parts.iter().chain(&["tell the cluster's admins"]) {
                assert!(ours.contains(part), "'{part}' is missing: {what}");
            }
            assert!(!said.out.contains("RAN") && !said.err.contains("Submitted"), "{what}");
        }
        let said = sandbox.run(&format!("{plain} echo plain && {plain} --palingenesis=off echo plain")).ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("plain\nplain\nplain\nplain\n", ""), "{make}");
        // The same of it, and the same code, for whoever corrects it.
        let said = sandbox.run(&format!("{} doctor --config {file}", doctor.display()));
        assert_eq!((said.code, said.ours().len()), (REFUSED, 1), "{make}: {said:?}");
        parts.iter().for_each(|part| assert!(said.err.contains(part), "{make}: {said:?}"));
    }
    // sbatch without the option, but with the variable: the script may change it.
    let said = sandbox.run("PALINGENESIS= sbatch -N1 -o /dev/null --wrap true").ok();
    assert!(said.out.contains("Submitted") && said.ours().len() == 1, "{said:?}");
    assert!(said.err.contains("warning: srun in this job will refuse: site file "), "{said:?}");
    // As the kubelet mounts a ConfigMap: the directory is everybody's by its mode, and
    // nobody's by its mount.
    let loose = sandbox.dir().join("home/configmap");
    let mount = "umask 022; mkdir -p D; : >D/x; chmod 777 D; rm -rf F; ln -s D/x F; [ -z \"$RO\" ] || \
                 { mount --bind D D && mount -o remount,bind,ro D; }";
    let mount = mount.replace('D', &loose.display().to_string()).replace('F', &file);
    for (read_only, code) in [("", REFUSED), ("1", 0)] {
        sandbox.run_root(&format!("RO={read_only}; {}", mount)).ok();
        let said = sandbox.run("srun -Q -N2 -n2 --palingenesis true");
        assert_eq!(said.code, code, "{said:?}");
        assert!(code == 0 || said.err.contains("they may write to the directory"), "{said:?}");
    }
    sandbox.run_root(&format!("umount {}", loose.display())).ok();
    // An empty one says nothing, and neither does one that links to a good one.
    for make in [": >F", "echo '# nothing' >F.real; ln -s F.real F"] {
        sandbox.run_root(&format!("umask 022; rm -rf F; {make}").replace('F', &file)).ok();
        let said = sandbox.run("srun -Q -N2 -n2 --palingenesis sh -c 'echo $RANK' | sort").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("0\n1\n", ""), "{make}");
    }
}

/// Each node reads its own file: what is wrong there is told from there.
#[test]
fn a_node_whose_file_differs_refuses_by_itself() {
    let options = ["--nodes", "2", "--cores", "4", "--namespace-per-node"];
    let Some(sandbox) = Sandbox::up("site-nodes", &options) else { return };
    sandbox.plugstack(&[&format!("optional {} config=/tmp/site-nodes-test.toml", library().display())]);
    // /tmp is each node's own, and the login host's that of this machine.
    let put = |place: &[&str], text: &str| {
        let options = [&["--as-root"], place].concat();
        let line = format!("umask 022; printf '{text}' >/tmp/site-nodes-test.toml");
        sandbox.run_as(&options, &line, 30).ok();
    };
    let good = "[profiles.mixtral]\\nbase = \"megatron\"\\n";
    put(&[], good);
    put(&["--node", "n1"], good);
    let line = "srun -N2 -n4 --ntasks-per-node=2 --palingenesis=mixtral sh -c 'echo $RANK'";
    let said = sandbox.run(line);
    assert_eq!((said.code, said.ours().len()), (REFUSED, 1), "{said:?}");
    assert!(said.err.contains("site file /tmp/site-nodes-test.toml does not exist"), "{said:?}");
    put(&["--node", "n2"], "port = 21000\\n");
    let said = sandbox.run(line);
    assert_eq!((said.code, said.ours().len()), (REFUSED, 1), "{said:?}");
    assert!(said.err.contains("profile mixtral is not in the site file of n2"), "{said:?}");
    put(&["--node", "n2"], good);
    let said = sandbox.run(&format!("{line} | sort")).ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("0\n1\n2\n3\n", ""));
    let _ = fs::remove_file("/tmp/site-nodes-test.toml");
}

/// The usual place, which need not hold a file.
#[test]
fn the_usual_place_is_read_without_a_word_in_plugstack() {
    let line = format!("optional {}", library().display());
    let Some(sandbox) = Sandbox::up("site-usual", &["--nodes", "1", "--cores", "4", "--plugstack", &line]) else {
        return;
    };
    let step = "srun -Q -n1 --palingenesis sh -c 'echo $NCCL_IB_SL $MASTER_PORT $PALINGENESIS_SITE.'";
    let said = sandbox.run(step).ok();
    assert!(said.out.starts_with('2') && said.err.is_empty(), "no file: {said:?}");
    // The sandbox's /etc is a copy of its own.
    let etc = "umask 022; mkdir -p /etc/palingenesis";
    sandbox
        .run_root(&format!(
            "{etc}; printf 'port = 21000\\n[env]\\nNCCL_IB_SL = 3\\n' >/etc/palingenesis/palingenesis.toml"
        ))
        .ok();
    assert_eq!(sandbox.run(step).ok().out, "3 21000 .\n");
    // The C library and explain read it, too.
    let program = common::program("palingenesis");
    let said = sandbox.run(&format!("srun -Q -n1 {} explain", program.display())).ok();
    let row = said.out.lines().find(|line| line.contains("MASTER_PORT")).unwrap_or_default();
    assert!(row.contains(" 21000 ") && row.contains(" site "), "{}", said.out);
}

fn doctor(arguments: &[&str]) -> Said {
    let mut command = Command::new(common::program("palingenesis"));
    command.env_clear().arg("doctor").args(arguments);
    Said::run(command)
}

#[test]
fn doctor_prints_what_a_file_means() {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("doctor.toml");
    write(&file, &SITE.replace("NCCL_IB_TIMEOUT = \"20\"", "NCCL_IB_TIMEOUT = \"120\""));
    let path = file.to_str().unwrap();
    let all_may_read = fs::Permissions::from_mode(0o644);
    if fs::metadata(&file).unwrap().uid() == 0 {
        // Root reads it all the same, srun as its user does not.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let said = doctor(&["--config", path]);
        assert!(said.code == 0 && said.err.contains("is not readable by all (mode 0640)"), "{said:?}");
    }
    fs::set_permissions(&file, all_may_read).unwrap();
    let said = doctor(&["--config", path, "--partition", "main", "--node", "n2"]);
    assert!(!said.err.contains("readable by all"), "{said:?}");
    if fs::metadata(&file).unwrap().uid() == 0 {
        assert_eq!(said.code, 0, "{said:?}");
    } else {
        // Whoever drafts a file sees what it means all the same.
        assert!(said.code == REFUSED && said.err.contains("writable by others than root"), "{said:?}");
    }
    for part in [
        "log = error",
        "for all jobs",
        "profile = mixtral",
        "ports = 21000-21999",
        "NCCL_NET=IB  (force: above the user's own; line 11)",
        "NCCL_IB_SL=1  (default: below the user's own; line 7)",
        "profile mixtral, on top of megatron",
        "for partition ma*",
        "for node n[2-9]",
        "together, for partition main and node n2",
    ] {
        assert!(said.out.contains(part), "'{part}' is missing:\n{}", said.out);
    }
    let (_, together) = said.out.split_once("together").unwrap();
    assert!(together.contains("NCCL_IB_SL=3") && !together.contains("NCCL_IB_SL=1"), "{together}");
    assert!(said.err.contains(&format!("{path}:6: NCCL_IB_TIMEOUT=120: 120 is outside the range")), "{}", said.err);

    // For one file only: of a node there is nothing to print.
    let said = doctor(&["--partition", "main"]);
    assert!(said.code == 3 && said.err.contains("--config"), "{said:?}");
    let example = common::root().join("etc/palingenesis.toml");
    let said = doctor(&["--config", example.to_str().unwrap()]);
    assert!(said.out.contains("no default for all jobs"), "{said:?}");
}

/// What docs/admin.md gives admins to start from.
#[test]
fn the_examples_are_accepted_without_a_word_and_have_the_fabric_of_their_name() {
    let page = fs::read_to_string(common::root().join("docs/admin.md")).unwrap();
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(common::root().join("etc/examples")).unwrap() {
        let file = entry.unwrap().path();
        let site = Site::parse(&file.display().to_string(), &fs::read_to_string(&file).unwrap());
        let site = site.unwrap_or_else(|error| panic!("{error}"));
        assert!(site.warnings().is_empty(), "{:?}", site.warnings());
        let settings = site.view(None, None, &User { name: None, uid: 1000 }).settings;
        let name = file.file_stem().unwrap().to_str().unwrap().to_string();
        assert_eq!(settings.fabric.name(), name);
        assert!(page.contains(&format!("(../etc/examples/{name}.toml)")), "docs/admin.md does not show {name}");
        names.push(name);
    }
    names.sort();
    assert_eq!(names, ["efa", "infiniband", "roce", "slingshot", "tcp"]);
}

/// As a training script would ask for its place. The plugin's own file need not be
/// the usual one, and a broken one is no matter of a script that runs already.
#[test]
fn the_c_library_tells_the_shape_and_profile_that_the_site_file_decided() {
    let Some(cluster) = Cluster::up("capi") else { return };
    cluster.write("launch = \"agent\"\n[profiles.mixtral]\nbase = \"fsdp\"\n");
    let program = "import ctypes, sys\nlib = ctypes.CDLL(sys.argv[1])\ntext = ctypes.c_void_p()\n\
                   print(lib.palingenesis_layout_json(ctypes.byref(text)), ctypes.string_at(text).decode())\n";
    fs::write(cluster.sandbox.dir().join("home/ask.py"), program).unwrap();
    let ask = |change: &str| {
        let line = format!(
            "srun -Q -n1 --palingenesis=mixtral bash -c '{change} python3 {}/home/ask.py {}'",
            cluster.sandbox.dir().display(),
            library().display()
        );
        cluster.sandbox.run(&line).ok().out
    };
    let said = ask("");
    for part in ["0 {", "\"shape\":\"agent\"", "\"profile\":\"mixtral\"", "\"world_size\":1"] {
        assert!(said.contains(part), "{said}");
    }
    let said = ask("PALINGENESIS_SITE=/etc/passwd");
    assert!(said.contains("0 {") && said.contains("\"profile\":\"mixtral\""), "{said}");
}
