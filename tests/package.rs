//! What `make install` and the packages put on a machine: exactly these files, and
//! none where Slurm reads it. A package that edits or leaves files in a directory
//! that plugstack.conf includes has stopped every job of a cluster:
//! https://github.com/aws/aws-parallelcluster/issues/6459
//!
//! The life of the .deb packages is that of real dpkg in a clean Debian with its own
//! Slurm, on which jobs run meanwhile. Of rpm there is the program and no
//! distribution: its packages are installed by it, with a database of its own, into
//! the same Debian, where the packages of Slurm and glibc are stand-ins without files.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use common::Sandbox;

const PLUGIN: &str = "palingenesis/spank_palingenesis.so";

/// A new folder that the cluster's user can reach.
fn folder(name: &str) -> PathBuf {
    let folder = common::open_folder().join(format!("package-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn make(arguments: &[&str]) -> Output {
    let release = common::release_library();
    let target = release.ancestors().nth(2).expect("target/release/libpalingenesis.so");
    let output = Command::new("make")
        .arg("--no-print-directory")
        .args(arguments)
        .env("CARGO_TARGET_DIR", target)
        .envs(common::sysroot().map(|root| ("PALINGENESIS_SYSROOT", root)))
        // Those of a `make test` around this test are not ours.
        .env_remove("MAKEFLAGS")
        .env_remove("MFLAGS")
        .current_dir(common::root())
        .output()
        .expect("make runs");
    assert!(output.status.success(), "make {arguments:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Every file below `root` with its mode, or where the link leads.
fn files(root: &Path) -> BTreeMap<String, String> {
    fn walk(root: &Path, folder: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
            if kind.is_symlink() {
                found.insert(name, format!("-> {}", fs::read_link(&path).unwrap().display()));
            } else if kind.is_dir() {
                walk(root, &path, found);
            } else {
                found.insert(name, format!("{:04o}", kind.permissions().mode() & 0o7777));
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    found
}

/// The programs and what comes with them, below usr; `zsh` is the directory of its
/// completions, and `packed` the end of a manual page's name in a package.
fn programs(zsh: &str, packed: &str) -> BTreeMap<String, String> {
    let mut found: BTreeMap<String, String> = [
        ("usr/bin/palingenesis", "0755"),
        ("usr/bin/palingenesis-worker", "0755"),
        ("usr/sbin/palingenesis-enable", "-> ../bin/palingenesis"),
        ("usr/share/palingenesis/palingenesis.toml.example", "0644"),
    ]
    .map(|(name, mode)| (name.to_string(), mode.to_string()))
    .into();
    let mut file = |name: String| found.insert(name, "0644".to_string());
    for program in ["palingenesis", "palingenesis-worker", "palingenesis-enable"] {
        file(format!("usr/share/bash-completion/completions/{program}"));
        file(format!("usr/share/zsh/{zsh}/_{program}"));
        file(format!("usr/share/fish/vendor_completions.d/{program}.fish"));
    }
    for page in [
        "palingenesis.1",
        "palingenesis-explain.1",
        "palingenesis-doctor.1",
        "palingenesis-report.1",
        "palingenesis-worker.1",
        "palingenesis-worker-check.1",
        "palingenesis-worker-config.1",
        "palingenesis-worker-prepare.1",
        "palingenesis-worker-recorder.1",
        "palingenesis.toml.5",
        "palingenesis-worker.toml.5",
        "palingenesis-spec.7",
        "palingenesis-enable.8",
    ] {
        let section = page.rsplit('.').next().unwrap();
        file(format!("usr/share/man/man{section}/{page}{packed}"));
    }
    found
}

/// The plugin and its line.
fn plugin(library: &str) -> BTreeMap<String, String> {
    let files = [format!("{library}/{PLUGIN}"), "usr/share/palingenesis/palingenesis.conf".to_string()];
    files.map(|name| (name, "0644".to_string())).into()
}

/// The C library; `leads` is what its name with a number is.
fn development(library: &str, leads: &str) -> BTreeMap<String, String> {
    [
        ("usr/include/palingenesis.h".to_string(), "0644"),
        (format!("{library}/libpalingenesis.so.0"), leads),
        (format!("{library}/libpalingenesis.so"), "-> libpalingenesis.so.0"),
        (format!("{library}/pkgconfig/palingenesis.pc"), "0644"),
    ]
    .map(|(name, mode)| (name, mode.to_string()))
    .into()
}

fn together<const N: usize>(parts: [BTreeMap<String, String>; N]) -> BTreeMap<String, String> {
    parts.into_iter().flatten().collect()
}

/// What README.md links to, below the folder it is in.
fn linked(folder: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for from in ["docs", "etc/examples", "examples"] {
        for file in fs::read_dir(common::root().join(from)).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            found.insert(format!("{folder}/{from}/{name}"), "0644".to_string());
        }
    }
    assert!(found.keys().any(|name| name.ends_with("docs/admin.md")));
    for file in ["README.md", "etc/palingenesis.toml", "etc/worker.toml"] {
        found.insert(format!("{folder}/{file}"), "0644".to_string());
    }
    found
}

/// The lines of a plugstack.conf that Slurm acts on.
fn active_lines(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(String::from).collect()
}

#[test]
fn make_install_puts_these_files_and_no_other() {
    let root = folder("install");
    let destination = format!("DESTDIR={}", root.display());
    let arguments = [destination.as_str(), "PREFIX=/usr", "LIBDIR=/usr/lib64"];
    let zsh = if Path::new("/etc/debian_version").exists() { "vendor-completions" } else { "site-functions" };
    let mut expected = together([
        programs(zsh, ""),
        plugin("usr/lib64"),
        development("usr/lib64", &format!("-> {PLUGIN}")),
        linked("usr/share/doc/palingenesis"),
    ]);
    for file in ["LICENSE", "THIRD-PARTY"] {
        expected.insert(format!("usr/share/doc/palingenesis/{file}"), "0644".into());
    }
    // Twice: an upgrade leaves nothing beside its files either.
    for _ in 0..2 {
        make(&[&["install"], &arguments[..]].concat());
        assert_eq!(files(&root), expected);
    }
    let fragment = root.join("usr/share/palingenesis/palingenesis.conf");
    // optional: a library that cannot be loaded must not stop every job.
    assert_eq!(active_lines(&fragment), [format!("optional /usr/lib64/{PLUGIN}")]);
    // Slurm reads a line into a buffer of 4096 bytes.
    assert!(fs::read_to_string(&fragment).unwrap().lines().all(|line| line.len() < 4096 && !line.contains('@')));
    // It is the shipped library, under both names.
    let built = fs::read(common::release_library()).unwrap();
    for name in [PLUGIN, "libpalingenesis.so"] {
        assert!(fs::read(root.join("usr/lib64").join(name)).unwrap() == built, "{name}");
    }

    a_c_program_links_with(&root);

    make(&[&["uninstall"], &arguments[..]].concat());
    assert_eq!(files(&root), BTreeMap::new());
}

/// As pkg-config says, and asks for the library by the name with a number when it
/// starts.
fn a_c_program_links_with(root: &Path) {
    let header = root.join("usr/include");
    let directory = format!("-L{}/usr/lib64", root.display());
    for (question, part) in
        [("--libs", "-lpalingenesis"), ("--libs", &directory), ("--modversion", env!("CARGO_PKG_VERSION"))]
    {
        let mut command = Command::new("pkg-config");
        command.args([question, "palingenesis"]).env("PKG_CONFIG_LIBDIR", root.join("usr/lib64/pkgconfig"));
        match command.env("PKG_CONFIG_SYSROOT_DIR", root).output() {
            Ok(said) => assert!(String::from_utf8_lossy(&said.stdout).contains(part), "{part}: {said:?}"),
            Err(error) => println!("skipped: pkg-config: {error}"),
        }
    }
    let work = folder("linked");
    let (source, program) = (work.join("layout.c"), work.join("layout"));
    fs::write(
        &source,
        "#include <palingenesis.h>\n#include <stdio.h>\n\
         int main(void) { char *t; int c = palingenesis_layout_json(&t); puts(t); palingenesis_free(t); return -c; }\n",
    )
    .unwrap();
    let mut compiler = Command::new("gcc");
    compiler.arg("-I").arg(header).arg("-L").arg(root.join("usr/lib64")).arg(&source);
    match compiler.arg("-lpalingenesis").arg("-o").arg(&program).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            println!("skipped: gcc: {error}");
            return;
        }
    }
    let said = Command::new(&program).env_clear().env("LD_LIBRARY_PATH", root.join("usr/lib64")).output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.code() == Some(1) && text.starts_with("not inside a Slurm job"), "{said:?}");
}

#[test]
fn another_prefix_stands_in_the_line_and_in_what_the_comments_say() {
    let root = folder("prefix");
    let destination = format!("DESTDIR={}", root.display());
    make(&["install", &destination, "PREFIX=/opt/palingenesis", "LIBDIR=/opt/palingenesis/lib"]);
    let fragment = root.join("opt/palingenesis/share/palingenesis/palingenesis.conf");
    // Outside /usr and /usr/local the plugin must be told where the worker is.
    let line = format!("optional /opt/palingenesis/lib/{PLUGIN} worker=/opt/palingenesis/bin/palingenesis-worker");
    assert_eq!(active_lines(&fragment), [line]);
    assert!(fs::read_to_string(&fragment).unwrap().contains("include /opt/palingenesis/share/palingenesis/"));
}

/// Needs root, a tree of another Debian and dpkg; the packages are built once.
struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// All of this kind for two releases, or why not.
    fn of(kind: &'static str) -> Option<&'static Packages> {
        static BUILT: [OnceLock<Option<Packages>>; 2] = [const { OnceLock::new() }; 2];
        let tool = if kind == "deb" { "dpkg-gencontrol" } else { "rpmbuild" };
        let built = BUILT[usize::from(kind == "rpm")].get_or_init(|| {
            if Command::new(tool).arg("--version").output().is_err() {
                println!("skipped: no {tool} (Debian: dpkg-dev, rpm)");
                return None;
            }
            let folder = folder(kind);
            // The same build twice: an upgrade and a downgrade need another number.
            for version in [OLD, NEW] {
                let version = format!("PACKAGE_VERSION={version}");
                make(&[kind, &format!("PACKAGES_DIR={}", folder.display()), "SLURM=22.05 24.11", &version]);
            }
            Some(Packages { folder })
        });
        built.as_ref()
    }

    fn file(&self, name: &str, version: &str) -> String {
        let found = fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap().path()).find(|path| {
            let file = path.file_name().unwrap().to_string_lossy();
            file.strip_prefix(name).is_some_and(|rest| rest.starts_with(['_', '-']) && rest[1..].starts_with(version))
        });
        found.unwrap_or_else(|| panic!("no {name} {version}")).display().to_string()
    }
}

const OLD: &str = "0.1.0-1";
const NEW: &str = "0.1.0-2";

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("LC_ALL", "C.UTF-8").output().expect("it runs");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The newest symbol version that the file wants of glibc.
fn newest_glibc(file: &Path) -> (u32, u32) {
    let symbols = output_of("objdump", &["-T", file.to_str().unwrap()]);
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let (major, minor) = rest.split(|c: char| c != '.' && !c.is_ascii_digit()).next()?.split_once('.')?;
        Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
    });
    versions.max().expect("it needs glibc")
}

#[test]
fn the_debian_packages_hold_their_part_and_say_what_they_go_with() {
    let Some(packages) = Packages::of("deb") else { return };
    let library = format!("usr/lib/{}", output_of("dpkg-architecture", &["-qDEB_HOST_MULTIARCH"]).trim());
    let documents = |name: &str| -> BTreeMap<String, String> {
        ["doc/NAME/copyright", "doc/NAME/changelog.Debian.gz", "doc/NAME/THIRD-PARTY.gz", "lintian/overrides/NAME"]
            .map(|file| (format!("usr/share/{}", file.replace("NAME", name)), "0644".to_string()))
            .into()
    };
    let mut common = together([
        programs("vendor-completions", ".gz"),
        linked("usr/share/doc/palingenesis"),
        documents("palingenesis"),
    ]);
    common.insert("etc/palingenesis/palingenesis.toml".into(), "0644".into());
    for (name, expected) in [
        ("palingenesis", common),
        ("palingenesis-dev", together([development(&library, "0644"), documents("palingenesis-dev")])),
        ("palingenesis-slurm22.05", together([plugin(&library), documents("palingenesis-slurm22.05")])),
        ("palingenesis-slurm24.11", together([plugin(&library), documents("palingenesis-slurm24.11")])),
    ] {
        let deb = packages.file(name, OLD);
        let unpacked = folder("unpacked");
        output_of("dpkg-deb", &["--raw-extract", &deb, unpacked.to_str().unwrap()]);
        let (control, content): (BTreeMap<_, _>, BTreeMap<_, _>) =
            files(&unpacked).into_iter().partition(|(path, _)| path.starts_with("DEBIAN/"));
        assert_eq!(content, expected, "{name}");

        // No maintainer script: nothing is restarted, enabled or edited.
        let parts: Vec<&str> = control.keys().map(|path| &path["DEBIAN/".len()..]).collect();
        let conf = unpacked.join("usr/share/palingenesis/palingenesis.conf");
        match name {
            "palingenesis" => assert_eq!(parts, ["conffiles", "control", "md5sums"]),
            "palingenesis-dev" => assert_eq!(parts, ["control", "md5sums", "shlibs", "triggers"]),
            _ => {
                assert_eq!(parts, ["control", "md5sums"]);
                // optional: a library that cannot be loaded must not stop every job.
                assert_eq!(active_lines(&conf), [format!("optional /{library}/{PLUGIN}")]);
            }
        }

        let fields = output_of("dpkg-deb", &["--field", &deb]);
        let field = |field: &str| {
            let line = fields.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(": "));
            line.unwrap_or_default().to_string()
        };
        assert!(field("Depends").contains("libc6") && !field("Depends").contains("slurm"), "{fields}");
        if let Some(release) = name.strip_prefix("palingenesis-slurm") {
            // Only the number in it differs: one compile.
            let (major, minor) = release.split_once('.').unwrap();
            let after = format!("{major}.{:02}", minor.parse::<u32>().unwrap() + 1);
            for holder in ["slurm-wlm-basic-plugins", "slurm-smd"] {
                for range in [format!("{holder} (<< {release}~)"), format!("{holder} (>= {after}~)")] {
                    assert!(field("Breaks").split(", ").any(|part| part == range), "{range}: {fields}");
                }
            }
            assert_eq!([field("Provides"), field("Conflicts")], ["palingenesis-plugin"; 2], "{fields}");
            assert!(field("Depends").contains(&format!("palingenesis (= {OLD})")), "{fields}");
        }

        // Debian bullseye has glibc 2.31, EL 9 has 2.34.
        for path in content.keys().filter(|path| path.contains("/bin/") || path.contains(".so")) {
            let file = unpacked.join(path);
            if file.symlink_metadata().unwrap().is_file() && common::sysroot().is_some() {
                assert!(newest_glibc(&file) <= (2, 30), "{name}: {path} needs glibc {:?}", newest_glibc(&file));
            }
        }
        if common::sysroot().is_none() {
            println!("skipped: linked with this machine's glibc; scripts/make-roots gets an older one");
        }
        match Command::new("lintian").args(["--fail-on", "error,warning"]).arg(&deb).output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
            }
            Err(error) => println!("skipped: lintian: {error}"),
        }
    }
}

/// A cluster in a clean Debian of its own, with the packages' folder in it.
fn clean(name: &str) -> Option<Sandbox> {
    let roots = std::env::var_os("PALINGENESIS_ROOTS").unwrap_or_else(|| "/var/cache/palingenesis-roots".into());
    let tree = Path::new(&roots).join("trixie");
    if !tree.join("usr/bin/srun").is_file() {
        println!("skipped: no Debian trixie at {}; scripts/make-roots makes it", tree.display());
        return None;
    }
    // The worst that an admin may have written, a bare `*`.
    let include = "include /etc/slurm/plugstack.conf.d/*";
    let sandbox = Sandbox::up(
        name,
        &["--root", tree.to_str().unwrap(), "--plugstack", include, "--sockets", "1", "--cores", "8"],
    )?;
    sandbox.run_root("mkdir -p /etc/slurm/plugstack.conf.d").ok();
    Some(sandbox)
}

/// sruns, one after another, until it is dropped: what they said that is not as it should be.
struct Meanwhile<'a> {
    sandbox: &'a Sandbox,
    name: &'static str,
}

impl<'a> Meanwhile<'a> {
    /// Each must end with 0 and print `ran` twice; a line of stderr that is not of a plugin that
    /// is missing under `optional` is wrong as well.
    fn begin(sandbox: &'a Sandbox, name: &'static str, flag: &str) -> Meanwhile<'a> {
        let line = format!(
            "cd; rm -f {name}.*; (n=0; while [ ! -e {name}.stop ]; do \
             out=$(srun -Q -K -N2 -n2 {flag} echo ran 2>{name}.err); code=$?; n=$((n+1)); \
             [ \"$code $out\" = $'0 ran\nran' ] || {{ echo \"code $code: $out\"; cat {name}.err; }} >>{name}.wrong; \
             done; echo $n >{name}.count) >/dev/null 2>&1 </dev/null &"
        );
        sandbox.run(&line).ok();
        Meanwhile { sandbox, name }
    }

    /// How many there were.
    fn end(self) -> u32 {
        let name = self.name;
        let said = self
            .sandbox
            .run(&format!("cd; touch {name}.stop; until [ -s {name}.count ]; do sleep 0.1; done; cat {name}.count"))
            .ok();
        let wrong = self.sandbox.run(&format!("cd; cat {name}.wrong 2>/dev/null")).out;
        assert_eq!(wrong, "", "{name}");
        said.out.trim().parse().unwrap()
    }
}

fn with_the_flag(sandbox: &Sandbox) {
    let said = sandbox.run("srun -Q -K -N2 -n2 --palingenesis bash -c 'echo rank=$RANK'").ok();
    let mut ranks: Vec<&str> = said.out.lines().collect();
    ranks.sort();
    assert_eq!((ranks, said.err.as_str()), (vec!["rank=0", "rank=1"], ""));
}

fn without_the_plugin(sandbox: &Sandbox) {
    let said = sandbox.run("srun -Q -N2 -n2 echo ran").ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("ran\nran\n", ""));
    let said = sandbox.run("srun -Q -N2 -n2 --palingenesis echo ran");
    assert!(said.code != 0 && said.err.contains("unrecognized option '--palingenesis'"), "{said:?}");
}

/// What is in the directory that plugstack.conf includes.
fn included(sandbox: &Sandbox) -> String {
    sandbox.run_root("ls -A /etc/slurm/plugstack.conf.d").ok().out.split_whitespace().collect::<Vec<_>>().join(" ")
}

const LINE: &str = "zz-palingenesis.conf";

/// In a clean Debian with its own Slurm 24.11: from the package to a job in one line, and on to the
/// end, while jobs start and run.
#[test]
fn a_debian_package_lives_from_install_to_purge_without_a_job_noticing() {
    let Some(packages) = Packages::of("deb") else { return };
    let Some(sandbox) = clean("package-deb") else { return };
    let dpkg = |arguments: &str| sandbox.run_as(&["--as-root"], &format!("dpkg {arguments}"), 120);
    let file = |name: &str, version: &str| packages.file(name, version);
    let (common, plugin) = ("palingenesis", "palingenesis-slurm24.11");
    let both = |version: &str| format!("--install {} {}", file(common, version), file(plugin, version));
    let plain = Meanwhile::begin(&sandbox, "plain", "");

    // Of another release: dpkg refuses it beside this Slurm.
    let refused = dpkg(&format!("--install {} {}", file(common, OLD), file("palingenesis-slurm22.05", OLD)));
    assert!(refused.code != 0 && refused.err.contains("slurm-wlm-basic-plugins"), "{refused:?}");
    dpkg("--purge palingenesis-slurm22.05 palingenesis").ok();

    dpkg(&both(OLD)).ok();
    assert_eq!(included(&sandbox), "", "it is active without having been enabled");
    without_the_plugin(&sandbox);
    let enabled = sandbox.run_root("palingenesis-enable").ok();
    assert_eq!(included(&sandbox), LINE, "{enabled:?}");
    with_the_flag(&sandbox);
    let doctor = sandbox.run_root("palingenesis doctor");
    assert!(doctor.code < 2, "{doctor:?}");

    // A job that goes on through all that follows, and others that start.
    sandbox
        .run(
            "cd; srun -Q -K -N2 -n2 --palingenesis bash -c 'until [ -e finish ]; do sleep 0.1; done; echo $RANK' \
                 >long.out 2>long.err </dev/null & sleep 1",
        )
        .ok();
    let flagged = Meanwhile::begin(&sandbox, "flagged", "--palingenesis");
    sandbox.run_root("echo '# of this site' >>/etc/palingenesis/palingenesis.toml").ok();
    for version in [NEW, OLD, NEW] {
        dpkg(&both(version)).ok();
        let installed = sandbox.run_root(&format!("dpkg-query -W -f '${{Version}}' {plugin}")).ok().out;
        assert_eq!((installed.as_str(), included(&sandbox).as_str()), (version, LINE));
        with_the_flag(&sandbox);
        let kept = sandbox.run_root("tail -n 1 /etc/palingenesis/palingenesis.toml; ls /etc/palingenesis").ok();
        assert_eq!(kept.out, "# of this site\npalingenesis.toml\n");
    }
    assert!(flagged.end() > 0);

    // Files gone, the link leads nowhere: Slurm passes it over.
    dpkg(&format!("--remove {plugin} {common}")).ok();
    without_the_plugin(&sandbox);
    let doctor = sandbox.run_root("test -e /usr/bin/palingenesis || ls /etc/palingenesis").ok();
    assert_eq!(doctor.out, "palingenesis.toml\n", "a removed package keeps what the admin wrote");
    // Back, and active as before.
    dpkg(&both(NEW)).ok();
    with_the_flag(&sandbox);
    sandbox.run_root("palingenesis-enable --remove").ok();
    assert_eq!(included(&sandbox), "");
    without_the_plugin(&sandbox);

    // By force beside a Slurm of another release: the loader refuses it, jobs run, and doctor
    // says what to install.
    sandbox.run_root("palingenesis-enable").ok();
    dpkg("--remove palingenesis-slurm24.11").ok();
    dpkg(&format!("--force-breaks --install {}", file("palingenesis-slurm22.05", NEW))).ok();
    let said = sandbox.run("srun -Q -N2 -n2 echo ran").ok();
    assert!(said.out == "ran\nran\n" && said.err.contains("ncompatible"), "{said:?}");
    let doctor = sandbox.run_root("palingenesis doctor");
    assert!(doctor.code == 2 && doctor.out.contains("palingenesis-slurm24.11"), "{doctor:?}");
    sandbox.run_root("palingenesis-enable --remove").ok();
    let refused = sandbox.run_root("palingenesis-enable");
    assert!(refused.code != 0 && refused.err.contains("palingenesis-slurm24.11"), "{refused:?}");
    assert_eq!(included(&sandbox), "");

    dpkg("--purge palingenesis-slurm22.05 palingenesis-slurm24.11 palingenesis").ok();
    let left = sandbox.run_root(
        "dpkg-query -W 'palingenesis*' 2>/dev/null | grep -v 'unknown' ; find /etc /usr -name '*palingenesis*' -not -path '*/slurm/*'",
    );
    assert_eq!(left.out, "");
    without_the_plugin(&sandbox);

    let said = sandbox
        .run("cd; touch finish; until [ $(wc -l <long.out) = 2 ]; do sleep 0.1; done; sort long.out; cat long.err");
    assert_eq!(said.ok().out, "0\n1\n");
    // The others took turns with all of that.
    assert!(plain.end() > 0);
}

/// What stands for a package of the distribution: no file, and what is said of it.
fn stand_in(folder: &Path, name: &str, version: &str, provides: &str) -> String {
    let spec = folder.join(format!("{name}.spec"));
    let text = format!(
        "Name: {name}\nVersion: {version}\nRelease: 1\nSummary: stands for the real one\nLicense: Apache-2.0\n\
         BuildArch: noarch\n{provides}\n%description\nNo file.\n%files\n"
    );
    fs::write(&spec, text).unwrap();
    let top = format!("_topdir {}", folder.display());
    output_of("rpmbuild", &["-bb", "--quiet", "--define", &top, spec.to_str().unwrap()]);
    folder.join(format!("RPMS/noarch/{name}-{version}-1.noarch.rpm")).display().to_string()
}

/// As far as it can be had without a distribution of rpm's: the packages are rpmlint's and the
/// real rpm's, the files are the ones that jobs use, Slurm is Debian's.
#[test]
fn an_rpm_package_lives_from_install_to_removal_without_a_job_noticing() {
    let Some(packages) = Packages::of("rpm") else { return };
    let names = ["palingenesis", "palingenesis-devel", "palingenesis-slurm22.05", "palingenesis-slurm24.11"];
    let mut provides = BTreeSet::new();
    for name in names {
        let file = packages.file(name, OLD);
        assert_eq!(output_of("rpm", &["-qp", "--scripts", "--triggers", &file]), "", "{name} has scripts");
        let listed: Vec<String> = output_of("rpm", &["-qpl", &file]).lines().map(String::from).collect();
        assert!(!listed.iter().any(|path| path.starts_with("/etc/slurm")), "{listed:?}");
        for needed in output_of("rpm", &["-qp", "--requires", &file]).lines() {
            if !needed.starts_with("palingenesis") && !needed.starts_with("rpmlib") && !needed.starts_with("config(") {
                provides.insert(format!("Provides: {needed}"));
            }
        }
        match Command::new("rpmlint").arg("-c").arg(common::root().join("packaging/rpmlint.toml")).arg(&file).output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(text.contains("0 errors, 0 warnings"), "{text}");
            }
            Err(error) => println!("skipped: rpmlint: {error}"),
        }
    }
    let config = output_of("rpm", &["-qp", "--configfiles", &packages.file("palingenesis", OLD)]);
    assert_eq!(config, "/etc/palingenesis/palingenesis.toml\n");

    let Some(sandbox) = clean("package-rpm") else { return };
    let state = fs::read_to_string(sandbox.dir().join("ctl/pid")).unwrap();
    // This machine's rpm, where the cluster's files are mounted and not yet the root.
    let (process, root) = (state.split_whitespace().next().unwrap(), sandbox.dir().join("root"));
    let rpm = |arguments: &[&str]| {
        let mut command = Command::new("nsenter");
        command.args(["-t", process, "-m", "rpm", "--dbpath=/var/lib/rpm", "--root"]).arg(&root).args(arguments);
        command.output().expect("nsenter is there")
    };
    let succeeds = |arguments: &[&str]| {
        let output = rpm(arguments);
        assert!(output.status.success(), "rpm {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let work = folder("stand-ins");
    let provides: Vec<String> = provides.into_iter().collect();
    succeeds(&["-i", &stand_in(&work, "glibc", "2.34", &provides.join("\n"))]);
    succeeds(&["-i", &stand_in(&work, "slurm", "24.11.5", "")]);
    let file = |name: &str, version: &str| packages.file(name, version);
    let plain = Meanwhile::begin(&sandbox, "plain", "");

    let refused = rpm(&["-i", &file("palingenesis", OLD), &file("palingenesis-slurm22.05", OLD)]);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("slurm >= 22.06"), "{text}");

    succeeds(&["-i", &file("palingenesis", OLD), &file("palingenesis-slurm24.11", OLD)]);
    assert_eq!(included(&sandbox), "", "it is active without having been enabled");
    without_the_plugin(&sandbox);
    sandbox.run_root("palingenesis-enable").ok();
    assert_eq!(included(&sandbox), LINE);
    with_the_flag(&sandbox);
    // Two releases at once have the same files.
    let refused = rpm(&["-i", &file("palingenesis-slurm22.05", OLD)]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("palingenesis-plugin"), "{refused:?}");

    let flagged = Meanwhile::begin(&sandbox, "flagged", "--palingenesis");
    sandbox.run_root("echo '# of this site' >>/etc/palingenesis/palingenesis.toml").ok();
    for version in [NEW, OLD, NEW] {
        succeeds(&["-U", "--oldpackage", &file("palingenesis", version), &file("palingenesis-slurm24.11", version)]);
        assert_eq!(included(&sandbox), LINE);
        with_the_flag(&sandbox);
        let kept = sandbox.run_root("tail -n 1 /etc/palingenesis/palingenesis.toml; ls /etc/palingenesis").ok();
        assert_eq!(kept.out, "# of this site\npalingenesis.toml\n");
    }
    assert!(flagged.end() > 0);
    succeeds(&["-e", "palingenesis-slurm24.11"]);
    assert_eq!(included(&sandbox), LINE);
    without_the_plugin(&sandbox);
    sandbox.run_root("palingenesis-enable --remove").ok();
    assert_eq!(included(&sandbox), "");
    succeeds(&["-e", "palingenesis"]);
    // rpm keeps a changed configuration under another name, and outside of what Slurm includes.
    let left = sandbox.run_root("find /etc /usr -name '*palingenesis*' -not -path '*/doc/*' | sort").ok().out;
    assert_eq!(left, "/etc/palingenesis\n/etc/palingenesis/palingenesis.toml.rpmsave\n");
    without_the_plugin(&sandbox);
    assert!(plain.end() > 0);
}

/// For the shells that are here: what the completions offer.
#[test]
fn completions_and_manual_pages_are_of_the_programs() {
    let root = folder("pages");
    make(&["install-common", &format!("DESTDIR={}", root.display()), "PREFIX=/usr", "ZSHDIR=/usr/share/zsh"]);
    let share = root.join("usr/share");
    let shell = |program: &str, script: &str| -> Option<String> {
        match Command::new(program).arg("-c").arg(script).current_dir(&share).env("HOME", &root).output() {
            Ok(output) => {
                assert!(output.status.success(), "{program}: {output:?}");
                Some(String::from_utf8_lossy(&output.stdout).into_owned())
            }
            Err(error) => {
                println!("skipped: {program}: {error}");
                None
            }
        }
    };
    for (program, words) in [
        ("palingenesis", "explain doctor report"),
        ("palingenesis-worker", "prepare check recorder config"),
        ("palingenesis-enable", "--remove"),
    ] {
        let dash = if words.starts_with('-') { "-" } else { "" };
        let function = format!("_{}", program.replace('-', "__"));
        let bash = |words: &str, last: &str, before: &str, index: u32| {
            format!(
                ". bash-completion/completions/{program}; COMP_WORDS=({words}); COMP_CWORD={index}; \
                 {function} {program} '{last}' {before}; echo \"${{COMPREPLY[*]}}\""
            )
        };
        if !words.starts_with('-') {
            let first = words.split(' ').next().unwrap();
            let said = shell("bash", &bash(&format!("{program} {first} --"), "--", first, 2)).unwrap_or_default();
            assert!(said.contains("--help"), "bash offers no option of {program} {first}: {said:?}");
        }
        let bash = bash(&format!("{program} '{dash}'"), dash, program, 1);
        let fish = format!("source fish/vendor_completions.d/{program}.fish; complete -C '{program} {dash}'");
        for (name, said) in [("bash", shell("bash", &bash)), ("fish", shell("fish", &fish))] {
            for word in words.split(' ') {
                let offered = said.as_ref().is_none_or(|said| said.split_whitespace().any(|offered| offered == word));
                assert!(offered, "{name} does not offer {word} for {program}: {said:?}");
            }
            assert!(!said.unwrap_or_default().contains("generate"), "{name}: a word for packagers");
        }
        shell("zsh", &format!("zsh -n zsh/_{program}"));
    }
    for page in
        fs::read_dir(share.join("man")).unwrap().flat_map(|section| fs::read_dir(section.unwrap().path()).unwrap())
    {
        let page = page.unwrap().path();
        let Ok(output) =
            Command::new("man").args(["--warnings", "-l", "-Tutf8"]).arg(&page).env("LC_ALL", "C.UTF-8").output()
        else {
            println!("skipped: no man");
            return;
        };
        assert!(output.status.success() && output.stderr.is_empty(), "{}: {output:?}", page.display());
        let name = page.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(String::from_utf8_lossy(&output.stdout).contains(&name), "{}", page.display());
    }
}
