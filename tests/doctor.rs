//! `palingenesis doctor` on a real Slurm: what it says of an install is what that Slurm
//! then does. Each fault is made, told with its cure and the code that monitoring gets, and
//! tried by srun.
//!
//! What cannot be shown here: a host of another processor, a library that an old glibc
//! refuses (another refusal of the loader stands for it), devices, enroot; of configless Slurm only
//! what the files of a host look like.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use common::{Said, Sandbox, library, program};
use serde_json::Value;

/// What doctor said, and its object.
struct Told {
    said: Said,
    object: Value,
}

impl Told {
    fn of(said: Said) -> Told {
        let object = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said:?}"));
        Told { said, object }
    }

    fn check(&self, name: &str) -> &Value {
        let checks = self.object["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {}", self.object))
    }

    /// The whole's code, and one check with parts of what it says.
    #[track_caller]
    fn holds(&self, code: i32, name: &str, verdict: &str, parts: &[&str]) {
        let word = ["ok", "warning", "error", "unknown"][usize::try_from(code).unwrap()];
        assert_eq!((self.said.code, &self.object["verdict"]), (code, &Value::from(word)), "{:#}", self.object);
        let check = self.check(name);
        assert_eq!(check["verdict"], verdict, "{check}");
        let all = check.to_string();
        parts.iter().for_each(|part| assert!(all.contains(part), "'{part}' is not in {all}"));
    }
}

fn doctor_as(sandbox: &Sandbox, options: &[&str], before: &str) -> Told {
    let program = program("palingenesis");
    Told::of(sandbox.run_as(options, &format!("{before} {} doctor --json", program.display()), 60))
}

fn doctor(sandbox: &Sandbox) -> Told {
    doctor_as(sandbox, &["--as-root"], "")
}

/// Whether jobs without the flag run, with what is said on stderr.
fn plain(sandbox: &Sandbox) -> Said {
    sandbox.run("srun -Q -n1 echo ran")
}

fn with_the_flag(sandbox: &Sandbox) -> Said {
    sandbox.run("srun -Q -n1 --palingenesis sh -c 'echo rank $RANK'")
}

fn listing(sandbox: &Sandbox) -> String {
    sandbox.run_root("ls -lAR --time-style=full-iso /etc/slurm /etc/palingenesis 2>&1").out
}

#[test]
fn a_right_install_is_right_for_root_and_for_users() {
    let line = format!("optional {}", library().display());
    let Some(sandbox) = Sandbox::up("doctor-right", &["--nodes", "1", "--plugstack", &line]) else { return };
    let before = listing(&sandbox);
    let root = doctor(&sandbox);
    let path = library().display().to_string();
    root.holds(0, "line", "ok", &[&path, "/etc/slurm/plugstack.conf:1"]);
    root.holds(0, "slurm", "ok", &["Slurm ", "sinfo -V"]);
    root.holds(0, "library", "ok", &["loads"]);
    root.holds(0, "release", "ok", &[]);
    root.holds(0, "slurmstepd", "ok", &["steps load it"]);
    root.holds(0, "slurmd", "ok", &["has loaded it at its start", "/maps", "nothing of palingenesis depends on it"]);
    root.holds(0, "gpus", "note", &["login host"]);
    assert_eq!(root.object["version"], env!("CARGO_PKG_VERSION"));
    for check in root.object["checks"].as_array().unwrap() {
        let keys: Vec<&String> = check.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["cure", "name", "source", "text", "verdict"]);
    }
    assert_eq!(with_the_flag(&sandbox).ok().out, "rank 0\n");

    let user = doctor_as(&sandbox, &[], "");
    user.holds(0, "line", "ok", &[&path]);
    // /proc/PID/maps is root's; what is not known is not guessed.
    assert!(["ok", "unknown"].contains(&user.check("slurmd")["verdict"].as_str().unwrap()), "{:#}", user.object);
    assert!(user.check("slurmd")["source"].as_str().unwrap().contains("by root only"), "{:#}", user.object);

    // For people: a line each, and one that sums up.
    let text = sandbox.run(&format!("{} doctor", program("palingenesis").display())).ok();
    let names = |object: &Value| object["checks"].as_array().unwrap().len();
    assert_eq!(text.out.lines().filter(|line| !line.contains("  cure: ")).count(), names(&user.object) + 2);
    assert!(text.out.lines().last().unwrap().starts_with("palingenesis: this host is right: 0 errors"), "{}", text.out);
    assert_eq!(listing(&sandbox), before, "doctor changed something");

    // slurmd read the file at its start (spank(7)); a line that came later is in steps only.
    sandbox.plugstack(&[]);
    sandbox.restart_slurmd();
    sandbox.plugstack(&[&line]);
    doctor(&sandbox).holds(0, "slurmd", "ok", &["has not loaded it", "nothing of palingenesis depends on it"]);
    assert_eq!(with_the_flag(&sandbox).ok().out, "rank 0\n");

    // Where it cannot be found out.
    let nothing = doctor_as(&sandbox, &["--as-root"], "SLURM_CONF=/nonexistent/slurm.conf");
    nothing.holds(2, "slurm-conf", "error", &["/nonexistent/slurm.conf", "SLURM_CONF in this environment"]);
    let wrong = sandbox.run(&format!("{} doctor --jsom", program("palingenesis").display()));
    assert_eq!((wrong.code, wrong.out.as_str()), (3, ""), "{wrong:?}");
}

/// <https://github.com/NVIDIA/pyxis/issues/25>
#[test]
fn a_library_that_does_not_load_is_told_and_what_that_costs_is_true() {
    let Some(sandbox) = Sandbox::up("doctor-library", &["--nodes", "1"]) else { return };
    doctor(&sandbox).holds(2, "line", "error", &["no line of palingenesis", "palingenesis-enable"]);
    assert!(with_the_flag(&sandbox).err.contains("unrecognized option"));

    sandbox.plugstack(&["optional /nonexistent/spank_palingenesis.so"]);
    let told = doctor(&sandbox);
    told.holds(2, "library", "error", &["/nonexistent/spank_palingenesis.so", "No such file", "others run"]);
    told.holds(2, "commands", "note", &["see library"]);
    assert_eq!(plain(&sandbox).ok().out, "ran\n");

    // Of another release: jobs run all the same, and the package is named.
    let here = doctor(&sandbox).check("slurm")["text"].as_str().unwrap().replace("Slurm ", "");
    let other = if here == "24.05" { "24.11" } else { "24.05" };
    let stamped = common::readable_by_all(common::stamped_library(other));
    sandbox.plugstack(&[&format!("optional {}", stamped.display())]);
    let package = format!("install palingenesis-slurm{here}");
    doctor(&sandbox).holds(2, "release", "error", &[&format!("for Slurm {other}"), &package, "others run"]);
    let said = plain(&sandbox).ok();
    assert!(said.out == "ran\n" && said.err.contains("Incompatible"), "{said:?}");
    assert!(with_the_flag(&sandbox).err.contains("unrecognized option"));

    // required: right as long as it loads.
    sandbox.plugstack(&[&format!("required {}", library().display())]);
    doctor(&sandbox).holds(1, "required", "warning", &["write optional"]);
    assert_eq!(plain(&sandbox).ok().out, "ran\n");
    sandbox.plugstack(&[&format!("required {}", stamped.display())]);
    doctor(&sandbox).holds(2, "release", "error", &["every srun, sbatch and salloc stops", &package]);
    assert_eq!(plain(&sandbox).code, 1);

    // Arguments, a second line, another plugin's line.
    sandbox.plugstack(&[&format!("optional {} confg=/x", library().display())]);
    doctor(&sandbox).holds(2, "arguments", "error", &["confg=/x", "did you mean 'config='"]);
    assert_eq!((with_the_flag(&sandbox).code, plain(&sandbox).code), (78, 0));
    let line = format!("optional {}", library().display());
    sandbox.plugstack(&[&line, &line]);
    doctor(&sandbox).holds(1, "line", "warning", &["2 lines", "plugstack.conf:2", "provided by both"]);
    assert!(plain(&sandbox).err.contains("provided by both"));
    sandbox.plugstack(&[&line, "required /nonexistent/spank_other.so"]);
    doctor(&sandbox).holds(2, "other-lines", "error", &["/nonexistent/spank_other.so", "every srun"]);
    assert_eq!(plain(&sandbox).code, 1);
    sandbox.plugstack(&[&line, "optinal /nonexistent/spank_other.so"]);
    doctor(&sandbox).holds(1, "other-lines", "warning", &["plugstack.conf:2"]);
    let said = plain(&sandbox).ok();
    assert!(said.err.contains("Invalid"), "{said:?}");
}

/// Compiles a library of a few lines of C, or says why not.
fn compiled(name: &str, source: &str) -> Option<PathBuf> {
    let folder = common::open_folder();
    let (code, file) = (folder.join(format!("{name}.c")), folder.join(format!("spank_palingenesis-{name}.so")));
    fs::write(&code, source).unwrap();
    let built = Command::new("gcc").args(["-shared", "-fPIC", "-Wl,-z,now", "-o"]).arg(&file).arg(&code).output();
    match built {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(file)
        }
        Err(error) => {
            println!("skipped: gcc: {error}");
            None
        }
    }
}

#[test]
fn a_library_that_crashes_is_survived_and_the_loader_s_words_are_told() {
    let Some(sandbox) = Sandbox::up("doctor-crash", &["--nodes", "1"]) else { return };
    let constructor = "__attribute__((constructor)) static void begin(void)";
    let crashes = compiled("crash", &format!("#include <stdlib.h>\n{constructor} {{ abort(); }}\n"));
    let leaves = compiled("leave", &format!("#include <unistd.h>\n{constructor} {{ _exit(3); }}\n"));
    let lacks = compiled("lacks", "int not_there(void);\nint begin(void) { return not_there(); }\n");
    let waits = compiled("waits", &format!("#include <unistd.h>\n{constructor} {{ for (;;) pause(); }}\n"));
    let (Some(crashes), Some(leaves), Some(lacks), Some(waits)) = (crashes, leaves, lacks, waits) else { return };
    let text = common::open_folder().join("spank_palingenesis-text.so");
    fs::write(&text, "no library\n".repeat(100)).unwrap();
    for (file, verdict, code, part) in [
        (&crashes, "error", 2, "ends by signal 6"),
        (&leaves, "error", 2, "ends with exit code 3"),
        (&lacks, "error", 2, "undefined symbol: not_there"),
        (&text, "error", 2, "invalid ELF header"),
        // A library without the symbols is no plugin, which is an error of its own.
        (&waits, "unknown", 2, "no answer"),
    ] {
        sandbox.plugstack(&[&format!("optional {}", file.display())]);
        doctor(&sandbox).holds(code, "library", verdict, &[part]);
    }
}

/// <https://github.com/aws/aws-parallelcluster/issues/6459>: a temporary file of an
/// installer in an included directory stopped all jobs.
#[test]
fn what_lies_in_an_included_directory_and_the_order_with_pyxis() {
    let Some(sandbox) = Sandbox::up("doctor-include", &["--nodes", "1"]) else { return };
    let folder = sandbox.dir().join("etc/slurm/plugstack.conf.d");
    fs::create_dir(&folder).unwrap();
    let put = |name: &str, text: &str, mode: u32| {
        let file = folder.join(name);
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    };
    let line = format!("optional {}\n", library().display());
    put("palingenesis.conf", &line, 0o644);
    sandbox.plugstack(&["include /etc/slurm/plugstack.conf.d/*"]);
    doctor(&sandbox).holds(0, "included-files", "ok", &["1 file"]);
    // Left by rpm: its line counts, and is the second one.
    put("palingenesis.conf.rpmsave", &line, 0o644);
    let told = doctor(&sandbox);
    told.holds(1, "included-files", "warning", &["palingenesis.conf.rpmsave", "*.conf"]);
    told.holds(1, "line", "warning", &["palingenesis.conf.rpmsave:1"]);
    fs::remove_file(folder.join("palingenesis.conf.rpmsave")).unwrap();
    put("sed6Yj8Ga", "", 0o600);
    for who in [&["--as-root"][..], &[]] {
        doctor_as(&sandbox, who, "").holds(2, "included-files", "error", &["sed6Yj8Ga", "every srun"]);
    }
    let said = plain(&sandbox);
    assert!(said.code != 0 && said.err.contains("Permission denied"), "{said:?}");
    // It matches no include that ends in .conf.
    sandbox.plugstack(&["include plugstack.conf.d/*.conf"]);
    doctor(&sandbox).holds(0, "included-files", "ok", &[]);
    assert_eq!(plain(&sandbox).ok().out, "ran\n");
    fs::remove_file(folder.join("sed6Yj8Ga")).unwrap();
    // A fifo would hold whoever opens it.
    sandbox.run_root("mkfifo -m 644 /etc/slurm/plugstack.conf.d/fifo.conf").ok();
    doctor(&sandbox).holds(2, "included-files", "error", &["fifo.conf"]);
    fs::remove_file(folder.join("fifo.conf")).unwrap();
    // Root sees what is included, users do not, and nothing says so.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o711)).unwrap();
    for who in [&["--as-root"][..], &[]] {
        let told = doctor_as(&sandbox, who, "");
        told.holds(2, "included-files", "error", &["users do not see", "mode 0711", "chmod a+rx"]);
    }
    assert!(with_the_flag(&sandbox).err.contains("unrecognized option"));
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(with_the_flag(&sandbox).ok().out, "rank 0\n");
    // A link whose package is gone is passed over; ours too, and then there is no line.
    symlink("/nonexistent/other.conf", folder.join("other.conf")).unwrap();
    doctor(&sandbox).holds(0, "included-files", "note", &["other.conf"]);
    fs::remove_file(folder.join("palingenesis.conf")).unwrap();
    symlink("/nonexistent/palingenesis.conf", folder.join("zz-palingenesis.conf")).unwrap();
    doctor(&sandbox).holds(2, "line", "error", &["leads to /nonexistent/palingenesis.conf", "install the package"]);
    assert_eq!(plain(&sandbox).ok().err, "");
    fs::remove_file(folder.join("zz-palingenesis.conf")).unwrap();

    // pyxis comes first, by the names of files.
    let Some(container) = common::container_plugin(&common::slurm_headers()) else { return };
    let pyxis = container.with_file_name("spank_pyxis.so");
    assert!(Command::new("cp").arg(&container).arg(&pyxis).status().unwrap().success());
    put("pyxis.conf", &format!("required {}\n", pyxis.display()), 0o644);
    put("palingenesis.conf", &line, 0o644);
    doctor(&sandbox).holds(1, "order", "warning", &["pyxis.conf:1", "zz-palingenesis.conf"]);
    fs::rename(folder.join("palingenesis.conf"), folder.join("zz-palingenesis.conf")).unwrap();
    doctor(&sandbox).holds(0, "order", "ok", &["palingenesis after it"]);
}

/// <https://github.com/ComputeCanada/puppet-magic_castle/issues/51>: a release that ran hooks
/// of the job's context only where slurm.conf names plugstack.conf. Ours are those of the
/// commands and of steps, and run either way.
#[test]
fn plugstack_conf_named_in_slurm_conf_or_not() {
    let line = format!("optional {}", library().display());
    for named in [false, true] {
        let conf = ["--conf", "PlugStackConfig=/etc/slurm/stack/plugins.conf"];
        let name = if named { "doctor-named" } else { "doctor-usual" };
        let options = [&["--nodes", "1"][..], if named { &conf } else { &[] }].concat();
        let Some(sandbox) = Sandbox::up(name, &options) else { return };
        if named {
            fs::create_dir(sandbox.dir().join("etc/slurm/stack")).unwrap();
            fs::write(sandbox.dir().join("etc/slurm/stack/plugins.conf"), format!("{line}\n")).unwrap();
        } else {
            sandbox.plugstack(&[&line]);
        }
        let file = if named { "/etc/slurm/stack/plugins.conf" } else { "/etc/slurm/plugstack.conf" };
        let how = if named { "PlugStackConfig in /etc/slurm/slurm.conf:" } else { "beside /etc/slurm/slurm.conf" };
        for who in [&["--as-root"][..], &[]] {
            let told = doctor_as(&sandbox, who, "");
            told.holds(0, "plugstack", "ok", &[file, how]);
            told.holds(0, "commands", "ok", &["srun, sbatch and salloc load it", file]);
            told.holds(0, "slurmstepd", "ok", &["steps load it"]);
        }
        // slurmd started before the line was there: nothing depends on it.
        doctor(&sandbox).holds(0, "slurmd", "ok", &["has not loaded it", "on a prolog or an epilog"]);
        assert_eq!(with_the_flag(&sandbox).ok().out, "rank 0\n");
        sandbox.restart_slurmd();
        doctor(&sandbox).holds(0, "slurmd", "ok", &["has loaded it"]);
        assert_eq!(with_the_flag(&sandbox).ok().out, "rank 0\n");
    }
}

#[test]
fn the_site_file_and_its_directories() {
    let Some(sandbox) = Sandbox::up("doctor-site", &["--nodes", "1"]) else { return };
    let file = sandbox.dir().join("site.toml");
    sandbox.plugstack(&[&format!("optional {} config={}", library().display(), file.display())]);
    let put = |text: &str, mode: u32| {
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    };
    doctor(&sandbox).holds(2, "site-file", "error", &["does not exist", "config= in the line"]);
    put("prot = 21000\n", 0o644);
    doctor(&sandbox).holds(2, "site-file", "error", &[":1: unknown key 'prot'", "jobs with the flag are refused"]);
    put("port = 21000\n", 0o640);
    doctor(&sandbox).holds(1, "site-file", "warning", &["not readable by all (mode 0640)"]);
    doctor_as(&sandbox, &[], "").holds(2, "site-file", "error", &["Permission denied"]);
    assert_eq!(with_the_flag(&sandbox).code, 78);
    put("port = 21000\nlocal = \"/tmp\"\ncache = \"/nonexistent/{user}/cache\"\n", 0o644);
    let told = doctor(&sandbox);
    told.holds(1, "cache", "warning", &["/nonexistent does not exist", "/nonexistent/{user}/cache"]);
    told.holds(1, "site-file", "ok", &[]);
    put("port = 21000\ncache = \"/tmp\"\n", 0o644);
    doctor(&sandbox).holds(0, "cache", "ok", &["GiB free"]);
}

/// Of another machine, or of none: nothing of it is asked.
#[test]
fn a_tree_below_another_root() {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("doctor-tree");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(root.join("etc/slurm/plugstack.conf.d")).unwrap();
    fs::create_dir_all(root.join("usr/lib/palingenesis")).unwrap();
    fs::create_dir_all(root.join("usr/share/palingenesis")).unwrap();
    let run = |options: &[&str]| {
        let mut command = Command::new(program("palingenesis"));
        command.env_clear().args(["doctor", "--json", "--root"]).arg(&root).args(options);
        Told::of(Said::run(command))
    };
    run(&[]).holds(3, "slurm-conf", "unknown", &["no slurm.conf"]);
    fs::write(root.join("etc/slurm/slurm.conf"), "ClusterName=c\n").unwrap();
    fs::write(root.join("etc/slurm/plugstack.conf"), "include plugstack.conf.d/*.conf\n").unwrap();
    let line = "optional /usr/lib/palingenesis/spank_palingenesis.so\n";
    fs::write(root.join("usr/share/palingenesis/palingenesis.conf"), line).unwrap();
    let link = root.join("etc/slurm/plugstack.conf.d/zz-palingenesis.conf");
    symlink("/usr/share/palingenesis/palingenesis.conf", link).unwrap();
    fs::copy(library(), root.join("usr/lib/palingenesis/spank_palingenesis.so")).unwrap();
    let told = run(&["--slurm", "20.11"]);
    told.holds(2, "slurm", "error", &["21.08 and newer"]);
    told.holds(2, "line", "ok", &["zz-palingenesis.conf:1"]);
    // Its release is read all the same. Loading would run what is in it.
    let stamped = told.check("release")["text"].as_str().unwrap().split("Slurm ").nth(1).unwrap();
    let stamped = stamped.split(',').next().unwrap();
    let told = run(&["--slurm", stamped]);
    let code = told.said.code;
    told.holds(code, "release", "ok", &[stamped]);
    told.holds(code, "library", "unknown", &["not loaded"]);
    told.holds(code, "slurmd", "note", &["no slurmd runs here"]);
    run(&[]).holds(run(&[]).said.code, "release", "unknown", &["not known"]);

    // A configless host: nothing but what slurmctld sent
    // (https://slurm.schedmd.com/configless_slurm.html).
    fs::create_dir_all(root.join("run/slurm")).unwrap();
    fs::rename(root.join("etc/slurm"), root.join("run/slurm/conf")).unwrap();
    fs::write(root.join("run/slurm/conf/plugstack.conf"), "include /etc/slurm/plugstack.conf.d/*.conf\n").unwrap();
    let told = run(&["--slurm", stamped]);
    told.holds(2, "slurm-conf", "ok", &["/run/slurm/conf/slurm.conf", "what slurmctld sent"]);
    told.holds(2, "configless", "note", &["neither the library nor files"]);
    told.holds(2, "line", "error", &["/run/slurm/conf/plugstack.conf", "slurmctld's host"]);
    fs::write(root.join("run/slurm/conf/plugstack.conf"), line).unwrap();
    let told = run(&["--slurm", stamped]);
    told.holds(code, "line", "ok", &["/run/slurm/conf/plugstack.conf:1"]);
    fs::remove_dir_all(&root).unwrap();
}
