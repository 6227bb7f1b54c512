//! What `make install` and `make deb` put on a machine: exactly these files, and
//! none where Slurm reads it. A package that edits or leaves files in a directory
//! that plugstack.conf includes has stopped every job of a cluster:
//! https://github.com/aws/aws-parallelcluster/issues/6459

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

fn expected(library: &str, documents: &[(String, &str)]) -> BTreeMap<String, String> {
    let mut expected: BTreeMap<String, String> = [
        ("usr/bin/palingenesis".to_string(), "0755".to_string()),
        ("usr/bin/palingenesis-worker".to_string(), "0755".to_string()),
        (format!("{library}/{PLUGIN}"), "0644".to_string()),
        (format!("{library}/libpalingenesis.so"), format!("-> {PLUGIN}")),
        ("usr/share/palingenesis/palingenesis.conf".to_string(), "0644".to_string()),
        ("usr/share/palingenesis/palingenesis.toml.example".to_string(), "0644".to_string()),
    ]
    .into();
    if common::root().join("include/palingenesis.h").is_file() {
        expected.insert("usr/include/palingenesis.h".into(), "0644".into());
    }
    for (name, mode) in documents {
        expected.insert(name.to_string(), mode.to_string());
    }
    expected
}

/// What README.md links to, below the folder it is in.
fn linked(folder: &str) -> Vec<(String, &'static str)> {
    let mut found = Vec::new();
    for from in ["docs", "etc/examples", "examples"] {
        for file in fs::read_dir(common::root().join(from)).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            found.push((format!("{folder}/{from}/{name}"), "0644"));
        }
    }
    assert!(found.iter().any(|(name, _)| name.ends_with("docs/admin.md")));
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
    let mut documents = linked("usr/share/doc/palingenesis");
    documents.push(("usr/share/doc/palingenesis/LICENSE".into(), "0644"));
    if common::root().join("README.md").is_file() {
        documents.push(("usr/share/doc/palingenesis/README.md".into(), "0644"));
    }
    // Twice: an upgrade leaves nothing beside its files either.
    for _ in 0..2 {
        make(&[&["install"], &arguments[..]].concat());
        assert_eq!(files(&root), expected("usr/lib64", &documents));
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

/// By `-lpalingenesis`, and asks for the library by that name when it starts.
fn a_c_program_links_with(root: &Path) {
    let header = root.join("usr/include");
    if !header.join("palingenesis.h").is_file() {
        return;
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

/// "22.05", as Slurm's header says.
fn installed_release() -> Option<String> {
    let header = fs::read_to_string("/usr/include/slurm/slurm_version.h").ok()?;
    let number = header.split("define SLURM_VERSION_NUMBER 0x").nth(1)?.split_whitespace().next()?;
    let number = u32::from_str_radix(number, 16).ok()?;
    Some(format!("{}.{:02}", number >> 16, (number >> 8) & 0xff))
}

fn output_of(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(file).output().expect("it runs");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// dpkg on a root of its own, in which Slurm of this version is installed.
fn dpkg(root: &Path, slurm: &str, arguments: &[&str], file: &str) -> Output {
    let admin = root.join("var/lib/dpkg");
    for folder in ["info", "updates", "triggers"] {
        fs::create_dir_all(admin.join(folder)).unwrap();
    }
    let status = admin.join("status");
    let architecture =
        String::from_utf8(Command::new("dpkg").arg("--print-architecture").output().unwrap().stdout).unwrap();
    let stanza = |name: &str, version: &str| {
        format!(
            "Package: {name}\nStatus: install ok installed\nMaintainer: nobody <root@localhost>\n\
             Architecture: {}\nVersion: {version}\nDescription: stands for the real one\n\n",
            architecture.trim()
        )
    };
    if !status.exists() {
        let here = [stanza("libc6", "2.36-9"), stanza("libgcc-s1", "12.2.0"), stanza("slurm-wlm-basic-plugins", slurm)];
        fs::write(&status, here.concat()).unwrap();
        for name in ["libc6", "libgcc-s1", "slurm-wlm-basic-plugins"] {
            fs::write(admin.join(format!("info/{name}.list")), "/.\n").unwrap();
        }
    }
    Command::new("dpkg")
        .arg(format!("--root={}", root.display()))
        .arg("--log=/dev/null")
        .args(arguments)
        .arg(file)
        .output()
        .expect("dpkg runs")
}

/// Needs cargo-deb, whose build takes minutes: `make tools` gets it.
#[test]
fn the_debian_package_installs_upgrades_and_goes_without_a_job_noticing() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !has("cargo-deb") && !common::root().join("target/tools/bin/cargo-deb").is_file() {
        println!("skipped: no cargo-deb; get it with `make tools`");
        return;
    }
    let Some(release) = installed_release() else {
        println!("skipped: no slurm/slurm_version.h (Debian: libslurm-dev)");
        return;
    };
    let built = folder("deb");
    make(&["deb", &format!("DEB_DIR={}", built.display())]);
    let deb = fs::read_dir(&built).unwrap().map(|entry| entry.unwrap().path()).next().expect("a package was built");

    // Named after the release it can be loaded by, and kept from others.
    let name = format!("palingenesis-slurm{release}");
    let field = |field| {
        output_of("dpkg-deb", &["--field"], &deb)
            .lines()
            .find_map(|line: &str| line.strip_prefix(field)?.strip_prefix(": ").map(String::from))
    };
    assert_eq!(field("Package").as_deref(), Some(name.as_str()));
    let depends = field("Depends").expect("it depends on the C library");
    assert!(depends.contains("libc6") && !depends.contains("slurm"), "{depends}");
    assert_eq!((field("Provides"), field("Conflicts")), (Some("palingenesis".into()), Some("palingenesis".into())));
    // No maintainer script: nothing is restarted, enabled or edited.
    let control = folder("control");
    let unpacked = Command::new("dpkg-deb").arg("--control").arg(&deb).arg(&control).status().expect("dpkg-deb runs");
    assert!(unpacked.success());
    let parts: Vec<String> = files(&control).into_keys().filter(|part| part != "md5sums").collect();
    assert_eq!(parts, ["control"]);
    if has("lintian") {
        let output = Command::new("lintian").args(["--fail-on", "error"]).arg(&deb).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    } else {
        println!("skipped: lintian is not installed");
    }

    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: dpkg and Slurm need root");
        return;
    }
    let root = folder("root");
    let included = root.join("etc/slurm/plugstack.conf.d");
    fs::create_dir_all(&included).unwrap();
    symlink(root.join("usr/share/palingenesis/palingenesis.conf"), included.join("palingenesis.conf")).unwrap();
    let only_the_link = || {
        let found: Vec<String> = files(&included).into_keys().collect();
        assert_eq!(found, ["palingenesis.conf"], "left in a directory that plugstack.conf includes");
    };
    let package = deb.to_str().unwrap();
    let here = format!("{release}.8-4");
    let succeeds = |arguments: &[&str], file: &str| {
        let output = dpkg(&root, &here, arguments, file);
        assert!(output.status.success(), "dpkg {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let library = format!("usr/lib/{}", output_of("dpkg-architecture", &[], Path::new("-qDEB_HOST_MULTIARCH")).trim());
    let packaged = || -> BTreeMap<String, String> {
        files(&root).into_iter().filter(|(name, _)| name.starts_with("usr/") || name.starts_with("lib")).collect()
    };

    // A Slurm that cannot load it: dpkg refuses, instead of two lines from every srun.
    let other = folder("other-release");
    let refused = dpkg(&other, "99.05.1-1", &["--install"], package);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("slurm-wlm-basic-plugins"), "{text}");

    succeeds(&["--install"], package);
    let documents = format!("usr/share/doc/{name}");
    let mut shipped = linked(&documents);
    shipped.extend(["copyright", "changelog.Debian.gz"].map(|name| (format!("{documents}/{name}"), "0644")));
    shipped.push((format!("usr/share/lintian/overrides/{name}"), "0644"));
    if common::root().join("README.md").is_file() {
        shipped.push((format!("{documents}/README.md"), "0644"));
    }
    assert_eq!(packaged(), expected(&library, &shipped));
    only_the_link();
    let fragment = root.join("usr/share/palingenesis/palingenesis.conf");
    assert_eq!(active_lines(&fragment), [format!("optional /{library}/{PLUGIN}")]);

    // The worst that an admin may have written, a bare `*`. The fragment's own
    // path leads to the real /usr, so the unpacked library has a line of its own.
    let unpacked = root.join(&library).join(PLUGIN);
    let include = format!("include {}/*", included.display());
    let line = format!("optional {}", unpacked.display());
    let Some(sandbox) = Sandbox::up("package", &["--plugstack", &include, "--plugstack", &line]) else {
        return;
    };
    let with_the_flag = || {
        let said = sandbox.run("srun -N2 -n2 --palingenesis bash -c 'echo rank=$RANK'").ok();
        let mut ranks: Vec<&str> = said.out.lines().collect();
        ranks.sort();
        assert_eq!(ranks, ["rank=0", "rank=1"]);
    };
    with_the_flag();
    succeeds(&["--install"], package);
    only_the_link();
    with_the_flag();
    succeeds(&["--remove"], &name);
    only_the_link();
    assert_eq!(packaged(), BTreeMap::new());
    let said = sandbox.run("srun -N2 -n2 echo ran").ok();
    assert_eq!(said.out, "ran\nran\n");
}
