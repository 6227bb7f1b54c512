//! `palingenesis-enable` on a real Slurm: jobs run before, between and after each step of
//! it, whatever runs meanwhile, and an included directory never holds anything but the
//! link. A temporary file there has stopped every job of a cluster:
//! <https://github.com/aws/aws-parallelcluster/issues/6459>
//!
//! Killed runs are killed at moments that chance decides, and, where strace is there, before
//! and after the one call that counts. What a loss of power leaves is not shown here.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{Said, Sandbox, library, program};

const LINK: &str = "zz-palingenesis.conf";

/// An install below a prefix of its own, as the packages have it, and a cluster.
struct Install {
    sandbox: Sandbox,
    prefix: PathBuf,
}

impl Install {
    fn up(name: &str, plugstack: &[&str]) -> Option<Install> {
        Install::with(name, plugstack, &[])
    }

    fn with(name: &str, plugstack: &[&str], options: &[&str]) -> Option<Install> {
        let sandbox = Sandbox::up(&format!("enable-{name}"), &[&["--nodes", "1"], options].concat())?;
        let prefix = common::open_folder().join(format!("enable-{name}"));
        let _ = fs::remove_dir_all(&prefix);
        for folder in ["bin", "sbin", "share/palingenesis"] {
            fs::create_dir_all(prefix.join(folder)).unwrap();
        }
        // Not by this process, see common::replace.
        let copied = Command::new("cp").arg(program("palingenesis")).arg(prefix.join("bin/palingenesis")).status();
        assert!(copied.unwrap().success());
        symlink("../bin/palingenesis", prefix.join("sbin/palingenesis-enable")).unwrap();
        fs::create_dir(sandbox.dir().join("etc/slurm/plugstack.conf.d")).unwrap();
        sandbox.plugstack(plugstack);
        let install = Install { sandbox, prefix };
        install.fragment_for(&library());
        Some(install)
    }

    fn fragment(&self) -> PathBuf {
        self.prefix.join("share/palingenesis/palingenesis.conf")
    }

    fn fragment_for(&self, library: &Path) {
        fs::write(self.fragment(), format!("optional {}\n", library.display())).unwrap();
        fs::set_permissions(self.fragment(), fs::Permissions::from_mode(0o644)).unwrap();
    }

    fn command(&self, arguments: &str) -> String {
        format!("{}/sbin/palingenesis-enable {arguments}", self.prefix.display())
    }

    fn enable(&self, arguments: &str) -> Said {
        self.sandbox.run_root(&self.command(arguments))
    }

    /// All of /etc/slurm, without times.
    fn listing(&self) -> String {
        self.sandbox
            .run_root("cd /etc/slurm; find . -printf '%p %m %u:%g %l\\n' | sort; cat plugstack.conf 2>/dev/null")
            .out
    }

    /// What lies in the included directory.
    fn included(&self) -> Vec<String> {
        let folder = self.sandbox.dir().join("etc/slurm/plugstack.conf.d");
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn leads(&self) -> bool {
        let link = self.sandbox.dir().join("etc/slurm/plugstack.conf.d").join(LINK);
        fs::read_link(link).is_ok_and(|to| to == self.fragment())
    }

    /// Jobs without the flag run without a word, and with it as `enabled` says.
    #[track_caller]
    fn jobs_run(&self, enabled: bool) {
        let said = self.sandbox.run("srun -Q -n1 echo ran").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("ran\n", ""));
        let said = self.sandbox.run("srun -Q -n1 --palingenesis sh -c 'echo rank $RANK'");
        match enabled {
            true => assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "rank 0\n", ""), "{said:?}"),
            false => assert!(said.code != 0 && said.err.contains("unrecognized option"), "{said:?}"),
        }
    }

    /// It says no, says why, and changes nothing.
    #[track_caller]
    fn refuses(&self, arguments: &str, parts: &[&str]) {
        let before = self.listing();
        for check in ["", "--check"] {
            let said = self.enable(&format!("{arguments} {check}"));
            assert_eq!((said.code, said.out.as_str(), said.err.lines().count()), (1, "", 1), "{said:?}");
            parts.iter().for_each(|part| assert!(said.err.contains(part), "'{part}' is not in {}", said.err));
        }
        assert_eq!(self.listing(), before);
    }
}

impl Drop for Install {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.prefix);
    }
}

/// A shell loop in the cluster until `stop` appears in its home.
struct Loop<'a> {
    install: &'a Install,
    name: &'static str,
    child: Child,
}

impl<'a> Loop<'a> {
    fn start(install: &'a Install, options: &[&str], name: &'static str, body: &str) -> Loop<'a> {
        let home = install.sandbox.dir().join("home/trainer");
        let line = format!("cd {0}; while [ ! -e stop ]; do {body}; done >{name}.out 2>{name}.err", home.display());
        let mut command = install.sandbox.command(options);
        let child =
            command.args(["timeout", "-k", "3", "120", "bash", "-c", &line]).stdin(Stdio::null()).spawn().unwrap();
        Loop { install, name, child }
    }

    fn end(mut self) -> (String, String) {
        let home = self.install.sandbox.dir().join("home/trainer");
        fs::write(home.join("stop"), "").unwrap();
        assert!(self.child.wait().unwrap().success());
        let read = |end: &str| fs::read_to_string(home.join(format!("{}.{end}", self.name))).unwrap();
        (read("out"), read("err"))
    }
}

fn in_and_out(name: &str, include: &str) {
    let Some(install) = Install::up(name, &[include]) else { return };
    let sandbox = &install.sandbox;
    install.jobs_run(false);
    // Jobs run meanwhile, and one all the time.
    let mut job = sandbox
        .command(&[])
        .args(["srun", "-Q", "-n1", "--overlap", "sleep", "20"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let jobs = Loop::start(&install, &[], "jobs", "srun -Q -n1 --overlap -s echo ran || echo failed");
    let watch = Loop::start(&install, &["--as-root"], "watch", "ls -A /etc/slurm/plugstack.conf.d");

    let empty = install.listing();
    let said = install.enable("--check").ok();
    assert!(said.out.starts_with("would link /etc/slurm/plugstack.conf.d/zz-palingenesis.conf"), "{said:?}");
    assert_eq!(install.listing(), empty);
    for _ in 0..3 {
        let said = install.enable("").ok();
        assert!(said.out.starts_with("done: link ") && said.err.is_empty(), "{said:?}");
        assert!(install.leads() && install.included() == [LINK], "{:?}", install.included());
        let enabled = install.listing();
        let said = install.enable("").ok();
        assert!(said.out.starts_with("already enabled: "), "{said:?}");
        assert_eq!(install.listing(), enabled);
        let said = sandbox.run("srun -Q -n1 --palingenesis sh -c 'echo rank $RANK'").ok();
        assert_eq!((said.out.as_str(), said.err.as_str()), ("rank 0\n", ""));
        let said = install.enable("--remove").ok();
        assert!(said.out.starts_with("done: remove "), "{said:?}");
        assert_eq!(install.listing(), empty);
        let said = install.enable("--remove").ok();
        assert!(said.out.starts_with("not enabled: "), "{said:?}");
        assert_eq!(install.listing(), empty);
    }

    // Many at a time: all of one kind are right, of both kinds the last one is.
    let many = |lines: &[String]| {
        let all: Vec<String> = lines.iter().map(|line| format!("{{ {line}; echo code $?; }} &")).collect();
        sandbox.run_root(&format!("{} wait", all.join(" "))).ok()
    };
    let said = many(&vec![install.command(""); 6]);
    assert_eq!(said.out.matches("code 0\n").count(), 6, "{said:?}");
    assert!(install.leads() && install.included() == [LINK]);
    many(&[vec![install.command("--remove"); 3], vec![install.command(""); 3]].concat());
    assert!(install.included().is_empty() || install.leads(), "{:?}", install.included());
    install.enable("--remove").ok();

    // Killed at any moment: the old state or the new one.
    for round in 0..12 {
        let arguments = if round % 2 == 0 { "" } else { "--remove" };
        let line = format!("{} & sleep 0.0{:02}; kill -KILL $!; wait", install.command(arguments), round * 4);
        sandbox.run_root(&line);
        assert!(
            install.included().is_empty() || (install.leads() && install.included() == [LINK]),
            "{:?}",
            install.included()
        );
    }
    install.enable("--remove").ok();

    let (out, err) = jobs.end();
    assert!(out.lines().count() > 3 && out.lines().all(|line| line == "ran"), "{out}");
    assert_eq!(err, "");
    let (seen, _) = watch.end();
    assert!(seen.lines().all(|line| line == LINK), "{seen}");
    assert!(seen.contains(LINK), "never seen");
    // SAFETY: our own child, which is not waited for yet.
    unsafe { libc::kill(i32::try_from(job.id()).unwrap(), libc::SIGTERM) };
    let _ = job.wait();
    sandbox.resume();
    install.jobs_run(false);
}

#[test]
fn in_and_out_of_a_directory_of_conf_files_while_jobs_run() {
    in_and_out("conf", "include /etc/slurm/plugstack.conf.d/*.conf");
}

#[test]
fn in_and_out_of_a_directory_whose_every_file_is_read_while_jobs_run() {
    in_and_out("bare", "include plugstack.conf.d/*");
}

/// <https://github.com/NVIDIA/pyxis/issues/25>
#[test]
fn what_would_not_load_or_stand_right_is_refused_with_the_cure() {
    let Some(install) = Install::up("refused", &["include /etc/slurm/plugstack.conf.d/*.conf"]) else { return };
    let said = install.sandbox.run_root("sinfo -V").ok();
    let here: String = said.out.split_whitespace().nth(1).unwrap().split('.').take(2).collect::<Vec<_>>().join(".");
    let other = if here == "24.05" { "24.11" } else { "24.05" };
    install.fragment_for(&common::readable_by_all(common::stamped_library(other)));
    install.refuses("", &[&format!("for Slurm {other}"), &format!("install palingenesis-slurm{here}")]);
    install.fragment_for(Path::new("/nonexistent/spank_palingenesis.so"));
    install.refuses("", &["/nonexistent/spank_palingenesis.so", "No such file"]);
    let text = install.prefix.join("spank_palingenesis.so");
    fs::write(&text, "no library").unwrap();
    install.fragment_for(&text);
    install.refuses("", &["cannot be loaded"]);
    install.refuses("--slurm 20.11", &["palingenesis"]);
    fs::remove_file(install.fragment()).unwrap();
    install.refuses("", &["palingenesis.conf is not there", &format!("install palingenesis-slurm{here}")]);
    install.fragment_for(&library());
    // Every srun of users would stop at a file that they cannot open.
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(&install.fragment(), 0o600);
    install.refuses("", &["not readable by all (mode 0600)", "chmod a+r"]);
    mode(&install.fragment(), 0o644);
    mode(&install.prefix.join("share"), 0o700);
    install.refuses("", &["share has mode 0700", "chmod a+x"]);
    mode(&install.prefix.join("share"), 0o755);
    mode(&install.fragment(), 0o666);
    install.refuses("", &["others than root (mode 0666)"]);
    mode(&install.fragment(), 0o644);
    let included = install.sandbox.dir().join("etc/slurm/plugstack.conf.d");
    mode(&included, 0o711);
    install.refuses("", &["users cannot see", "mode 0711"]);
    mode(&included, 0o755);
    // Users may not, and nothing changes.
    let before = install.listing();
    let said = install.sandbox.run(&install.command(""));
    assert!(said.code == 1 && said.err.contains("Permission denied; run it as root"), "{said:?}");
    assert_eq!(install.listing(), before);
    assert_eq!(install.enable("--nonsense").code, 2);

    // pyxis after it: by a name that sorts later, or a line below the include.
    let Some(container) = common::container_plugin(&common::slurm_headers()) else { return };
    let pyxis = install.prefix.join("spank_pyxis.so");
    assert!(Command::new("cp").arg(&container).arg(&pyxis).status().unwrap().success());
    let conf = |name: &str| install.sandbox.dir().join("etc/slurm/plugstack.conf.d").join(name);
    let line = format!("required {}", pyxis.display());
    fs::write(conf("zzz-pyxis.conf"), format!("{line}\n")).unwrap();
    install.refuses("", &["pyxis", "zzz-pyxis.conf:1", "include "]);
    fs::remove_file(conf("zzz-pyxis.conf")).unwrap();
    install.sandbox.plugstack(&["include /etc/slurm/plugstack.conf.d/*.conf", &line]);
    install.refuses("", &["pyxis", "plugstack.conf:2"]);
    install.sandbox.plugstack(&[&line, "include /etc/slurm/plugstack.conf.d/*.conf"]);
    install.enable("").ok();
    install.jobs_run(true);
    install.enable("--remove").ok();
}

#[test]
fn what_an_admin_wrote_stays_and_is_told() {
    let Some(install) = Install::up("own", &["# nothing"]) else { return };
    let sandbox = &install.sandbox;
    let include = format!("include {}", install.fragment().display());
    install.refuses("", &["includes no directory", &include]);
    // That line does it, and is the admin's to take out.
    sandbox.plugstack(&["# nothing", &include]);
    install.jobs_run(true);
    let said = install.enable("").ok();
    assert!(said.out.starts_with("already enabled: ") && said.out.contains("palingenesis.conf:1"), "{said:?}");
    install.refuses("--remove", &["the include in /etc/slurm/plugstack.conf:2", "left as it is"]);
    // And so is a line of the admin's own.
    sandbox.plugstack(&[&format!("optional {}", library().display())]);
    assert!(install.enable("").ok().out.contains("/etc/slurm/plugstack.conf:1"));
    install.refuses("--remove", &["the line in /etc/slurm/plugstack.conf:1"]);
    // Somebody's file of that name.
    sandbox.plugstack(&["include /etc/slurm/plugstack.conf.d/*.conf"]);
    let own = sandbox.dir().join("etc/slurm/plugstack.conf.d").join(LINK);
    fs::write(&own, "# later\n").unwrap();
    install.refuses("", &[LINK, "take it away"]);
    fs::remove_file(&own).unwrap();
    // What a package left that is gone.
    symlink("/nonexistent/palingenesis.conf", &own).unwrap();
    install.enable("").ok();
    assert!(install.leads());
    fs::remove_file(install.fragment()).unwrap();
    install.enable("--remove").ok();
    assert!(install.included().is_empty());
    install.jobs_run(false);
}

#[test]
fn a_host_without_plugstack_conf_gets_one_and_loses_it_again() {
    let Some(install) = Install::up("none", &[]) else { return };
    let sandbox = &install.sandbox;
    let file = sandbox.dir().join("etc/slurm/plugstack.conf");
    fs::remove_file(&file).unwrap();
    let empty = install.listing();
    install.jobs_run(false);
    assert!(install.enable("--check").ok().out.starts_with("would write /etc/slurm/plugstack.conf"));
    assert_eq!(install.listing(), empty);
    let said = sandbox.run_root(&format!("for i in 1 2 3 4; do {} & done; wait", install.command(""))).ok();
    assert_eq!(said.err, "");
    let data = fs::metadata(&file).unwrap();
    assert_eq!((data.uid(), data.gid(), data.mode() & 0o7777, data.nlink()), (0, 0, 0o644, 1));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.ends_with(&format!("\ninclude {}\n", install.fragment().display())), "{text}");
    install.jobs_run(true);
    install.enable("--remove").ok();
    // Nothing is left of the temporary name either.
    assert_eq!(install.listing(), empty);
    install.jobs_run(false);
    // Changed since, it is the admin's.
    install.enable("").ok();
    fs::write(&file, format!("{text}# mine\n")).unwrap();
    install.refuses("--remove", &["the include in /etc/slurm/plugstack.conf:3"]);
    install.jobs_run(true);
}

/// What is included, and how, is the same in every release; the library must be its own.
fn on_release(suite: &str, release: &str) {
    let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
    let tree = Path::new(&roots).join(suite);
    if !tree.join("usr/bin/srun").is_file() {
        println!("skipped: no Slurm of Debian {suite} at {}; scripts/make-roots makes it", tree.display());
        return;
    }
    let include = ["include /etc/slurm/plugstack.conf.d/*"];
    let Some(install) = Install::with(suite, &include, &["--root", tree.to_str().unwrap()]) else { return };
    // The one built for this machine's release, first.
    let here = install.sandbox.run_root("sinfo -V").ok().out;
    assert!(here.contains(release), "{here}");
    install.fragment_for(&common::readable_by_all(common::stamped_library("21.08")));
    install.refuses("", &["for Slurm 21.08", &format!("install palingenesis-slurm{release}")]);
    install.fragment_for(&common::readable_by_all(common::stamped_library(release)));
    install.jobs_run(false);
    install.enable("").ok();
    install.jobs_run(true);
    let doctor = install.sandbox.run_root(&format!("{}/bin/palingenesis doctor", install.prefix.display())).ok();
    assert!(doctor.out.contains(&format!("the plugin is for Slurm {release}")), "{}", doctor.out);
    install.enable("--remove").ok();
    install.jobs_run(false);
}

#[test]
fn in_and_out_on_24_11() {
    on_release("trixie", "24.11");
}

#[test]
fn in_and_out_on_26_05() {
    on_release("forky", "26.05");
}

/// The calls that change something below /etc/slurm, by strace.
fn changes(install: &Install, arguments: &str, inject: &str) -> Vec<String> {
    let calls = "symlink,symlinkat,link,linkat,unlink,unlinkat,rename,renameat,renameat2,mkdir,mkdirat,rmdir,truncate,\
                 chmod,fchmodat,chown,fchownat,openat,open,creat,fsync";
    let trace = install.sandbox.dir().join("trace");
    let line = format!("strace -f -qq -o {} -e trace={calls} {inject} {}", trace.display(), install.command(arguments));
    install.sandbox.run_root(&line);
    let trace = fs::read_to_string(trace).unwrap();
    let changes = |line: &&str| {
        let opens = line.contains("open");
        line.contains("/etc/slurm")
            && (!opens || ["O_WRONLY", "O_RDWR", "O_CREAT"].iter().any(|flag| line.contains(flag)))
    };
    let name = |line: &str| line.split_whitespace().nth(1).and_then(|call| call.split('(').next()).map(String::from);
    trace.lines().filter(changes).filter_map(name).collect()
}

/// What makes it safe to kill: one call that changes what Slurm reads, and nothing before
/// or after it but a file under a name that nobody reads.
#[test]
fn what_slurm_reads_is_changed_by_one_call() {
    let has_strace = Command::new("strace").arg("-V").output().is_ok();
    if !has_strace {
        println!("skipped: no strace");
        return;
    }
    let Some(install) = Install::up("calls", &["include /etc/slurm/plugstack.conf.d/*"]) else { return };
    let kind = |call: &str| call.trim_end_matches("at").to_string();
    let kinds = |arguments: &str| changes(&install, arguments, "").iter().map(|call| kind(call)).collect::<Vec<_>>();
    assert_eq!(kinds(""), ["symlink"]);
    assert_eq!(kinds(""), Vec::<String>::new());
    assert_eq!(kinds("--remove"), ["unlink"]);
    assert_eq!(kinds("--check"), Vec::<String>::new());
    // Where there is no plugstack.conf: a file of another name, its own name, and the other
    // one away. The first unlink is of what a killed run of the same number left.
    let file = install.sandbox.dir().join("etc/slurm/plugstack.conf");
    fs::remove_file(&file).unwrap();
    let empty = install.listing();
    assert_eq!(kinds(""), ["unlink", "open", "link", "unlink"]);
    install.enable("--remove").ok();
    assert_eq!(install.listing(), empty);
    // Killed with the file half made, before the call that counts, and after it.
    for (call, enabled) in
        [("fsync:signal=KILL", false), ("linkat:signal=KILL", false), ("unlink:signal=KILL:when=2", true)]
    {
        changes(&install, "", &format!("-e inject={call}"));
        assert_eq!(file.exists(), enabled, "{call}");
        install.jobs_run(enabled);
        // What is left over is read by nobody, and the next run is right.
        install.enable("").ok();
        install.jobs_run(true);
        install.enable("--remove").ok();
        install.jobs_run(false);
    }
}
