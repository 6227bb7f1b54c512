//! Each verdict by the facts that lead to it; the hosts are made up.

use std::path::Path;
use std::time::{Duration, SystemTime};

use palingenesis::config::site::SiteError;
use palingenesis::facts::Environment;
use palingenesis::facts::cuda::{self, Libraries, Rule};
use palingenesis::facts::directories::FileSystem;

use super::facts::{Devices, Enroot, Facts, Folder, Found, SiteFile, Use};
use super::rules::{Check, Verdict, checks, exit_code, is_left_over, overall, unanswered};
use super::{parse_release, print};
use crate::slurm::Host;
use crate::slurm::access::{Access, Closed};
use crate::slurm::conf::Configuration;
use crate::slurm::daemon::Daemon;
use crate::slurm::library::{Library, Load, Symbols};
use crate::slurm::plugstack::{Include, Line, Opened, Stack, State};
use crate::slurm::release::{Program, Release};

const STACK: &str = "/etc/slurm/plugstack.conf";
const LINK: &str = "/etc/slurm/plugstack.conf.d/zz-palingenesis.conf";
const LIBRARY: &str = "/usr/lib/palingenesis/spank_palingenesis.so";

fn line(file: &str, number: usize, path: &str) -> Line {
    Line { file: file.into(), number, required: false, path: path.into(), arguments: Vec::new() }
}

fn opened(path: &str) -> Opened {
    let changed = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
    Opened { path: path.into(), state: State::Read, link: None, access: Access::default(), changed }
}

fn program(name: &str, said: &str) -> Option<Program> {
    let path = std::path::PathBuf::from(name);
    Some(Program { asked: path.clone(), path, said: Ok(said.into()) })
}

fn loaded(line: &Line, release: &str) -> Library {
    let symbols =
        Symbols { name: Some("palingenesis".into()), kind: Some("spank".into()), release: Release::parse(release) };
    Library {
        line: line.clone(),
        path: Some(line.path.clone()),
        symbols: Ok(symbols),
        load: Load::Loaded,
        access: Access::default(),
    }
}

/// A node on which all is right.
fn right() -> Facts {
    let ours = line(LINK, 1, LIBRARY);
    let link = Opened { link: Some("/usr/share/palingenesis/palingenesis.conf".into()), ..opened(LINK) };
    let include = Include {
        place: format!("{STACK}:1"),
        pattern: "/etc/slurm/plugstack.conf.d/*.conf".into(),
        files: vec![LINK.into()],
        closed: None,
        before: vec![0, 1],
    };
    let stack = Stack {
        file: STACK.into(),
        opened: vec![opened(STACK), link],
        lines: vec![ours.clone()],
        includes: vec![include],
        ..Stack::default()
    };
    let daemon = Daemon {
        pid: 812,
        seen: true,
        started: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(2000)),
        loaded: Some(vec![LIBRARY.into()]),
        memlock: Some(u64::MAX),
        open_files: Some(1 << 20),
        ..Daemon::default()
    };
    Facts {
        host: Host {
            named: None,
            commands: program("/usr/bin/srun", "slurm-wlm 24.11.5"),
            slurmd: program("/usr/sbin/slurmd", "slurm-wlm 24.11.5"),
            conf: Configuration { file: Some("/etc/slurm/slurm.conf".into()), ..Configuration::default() },
            stack: Some(stack),
            libraries: vec![loaded(&ours, "24.11")],
            gone: Vec::new(),
            daemons: vec![daemon],
            probe: None,
        },
        site: SiteFile { file: "/etc/palingenesis/palingenesis.toml".into(), there: true, ..SiteFile::default() },
        node: Devices {
            gpus: vec![("NVIDIA H100".into(), 8)],
            nvidia: 8,
            driver: Some("550.54.15".into()),
            nics: vec![("mlx5_0".into(), true)],
            unknown: Vec::new(),
        },
        libraries: vec![
            Found { name: "libcuda.so.1", path: "/usr/lib64/libcuda.so.550.54.15".into(), by: "ld.so.cache" },
            Found { name: "libnccl.so.2", path: "/usr/lib64/libnccl.so.2.21.5".into(), by: "ld.so.cache" },
        ],
        worker: libraries(),
        directories: vec![folder(Use::Local, "/scratch", 0o1777)],
        memlock: Some((u64::MAX, u64::MAX)),
        open_files: Some((1024, 1 << 20)),
        enroot: None,
    }
}

/// What the worker takes: of the driver, a toolkit and a package.
fn libraries() -> Libraries {
    let found = |path: &str, version: &str, by| Ok(cuda::Found { path: path.into(), version: version.into(), by });
    Libraries {
        driver: found("/usr/lib64/libcuda.so.1", "550.54.15", Rule::Loader),
        nvrtc: found("/usr/local/cuda/lib64/libnvrtc.so.12", "12.4.127", Rule::Toolkit),
        nvrtc_builtins: Some("/usr/local/cuda/lib64/libnvrtc-builtins.so.12.4".into()),
        cublaslt: found("/usr/local/cuda/lib64/libcublasLt.so.12", "12.4.5.8", Rule::Toolkit),
        nccl: found("/usr/lib64/libnccl.so.2", "2.21.5", Rule::Loader),
    }
}

#[test]
fn what_the_worker_needs_on_a_gpu_is_shown_or_named() {
    holds(
        ("worker-cuda", Verdict::Ok, 0, &["libnvrtc.so.12 12.4.127 (/usr/local/cuda*/lib64)", "libnccl.so.2"]),
        |_| (),
    );
    holds(("worker-cuda", Verdict::Note, 0, &["does not find libnccl.so.2 for its GPUs", "pip install"]), |facts| {
        let missing = cuda::find(Path::new("/nowhere"), None, &Environment::default()).nccl;
        facts.worker.nccl = missing;
    });
    holds(("worker-cuda", Verdict::Note, 0, &["the worker computes on the processor"]), |facts| {
        facts.node = Devices::default();
    });
}

#[test]
fn gpus_have_their_compute_capability_by_their_models() {
    // https://developer.nvidia.com/cuda-gpus
    for (model, capability) in [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA A10", "8.6"),
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0"),
    ] {
        holds(("gpu-architecture", Verdict::Ok, 0, &[&format!("{model}: compute capability {capability}")]), |facts| {
            facts.node.gpus = vec![(model.into(), 4)];
        });
    }
    holds(("gpu-architecture", Verdict::Note, 0, &["compute capability 7.0", "8.0 (Ampere) and later"]), |facts| {
        facts.node.gpus = vec![("Tesla V100-SXM2-32GB".into(), 4)];
    });
    holds(("gpu-architecture", Verdict::Ok, 0, &["NVIDIA X1: not known here"]), |facts| {
        facts.node.gpus = vec![("NVIDIA X1".into(), 1)];
    });
}

fn closed(but_group: bool) -> Access {
    let closed = Closed { why: "mode 0640".into(), cure: "chmod a+r it".into(), but_group };
    Access { closed: Some(closed), loose: None }
}

fn loose() -> Access {
    Access { closed: None, loose: Some("mode 0666".into()) }
}

fn folder(usage: Use, path: &str, mode: u32) -> Folder {
    Folder {
        usage,
        value: path.into(),
        path: path.into(),
        of_site: true,
        mode: Ok(Some(mode)),
        file_system: Some(FileSystem::of(0xEF53)),
        free: Some(100 << 30),
    }
}

fn stack(facts: &mut Facts) -> &mut Stack {
    facts.host.stack.as_mut().unwrap()
}

/// The first line of ours, in the stack and as the library's.
fn ours(facts: &mut Facts, change: impl Fn(&mut Line)) {
    change(&mut stack(facts).lines[0]);
    change(&mut facts.host.libraries[0].line);
}

fn of<'a>(all: &'a [Check], name: &str) -> &'a Check {
    all.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no {name} in {all:?}"))
}

#[test]
fn a_right_node_is_right_and_its_checks_keep_their_names() {
    let all = checks(&right());
    for check in &all {
        assert!(check.verdict <= Verdict::Note, "{check:?}");
    }
    assert_eq!((overall(&all), exit_code(overall(&all))), (Verdict::Ok, 0));
    let names: Vec<&str> = all.iter().map(|check| check.name).collect();
    // Monitoring is built on them: docs/admin.md has this list.
    assert_eq!(
        names,
        [
            "slurm",
            "slurm-conf",
            "configless",
            "plugstack",
            "line",
            "required",
            "arguments",
            "library",
            "release",
            "order",
            "included-files",
            "other-lines",
            "commands",
            "slurmstepd",
            "slurmd",
            "site-file",
            "gpus",
            "gpu-architecture",
            "network-cards",
            "driver",
            "nccl",
            "cuda",
            "worker-cuda",
            "local",
            "memlock",
            "open-files"
        ]
    );
    let page = include_str!("../../../docs/admin.md");
    for name in names.iter().chain(&["cache", "enroot"]) {
        assert!(page.contains(&format!("`{name}`")), "docs/admin.md does not name {name}");
    }
}

/// (name of the check, its verdict, exit code of the whole, parts of text or cure)
type Case<'a> = (&'static str, Verdict, u8, &'a [&'a str]);

fn holds(case: Case<'_>, change: impl FnOnce(&mut Facts)) {
    let (name, verdict, code, parts) = case;
    let mut facts = right();
    change(&mut facts);
    let all = checks(&facts);
    let check = of(&all, name);
    let whole = format!("{} {}", check.text, check.cure.clone().unwrap_or_default());
    assert_eq!((check.verdict, exit_code(overall(&all))), (verdict, code), "{name}: {all:#?}");
    parts.iter().for_each(|part| assert!(whole.contains(part), "{name}: '{part}' is not in: {whole}"));
    // One line each, whatever stands in files.
    assert!(print::text("x", &all).lines().count() >= all.len() + 2);
}

/// <https://github.com/NVIDIA/pyxis/issues/25>: after an upgrade of Slurm the plugin did not
/// load, and with required nothing started any more.
#[test]
fn the_library_and_its_release() {
    let other = |facts: &mut Facts| facts.host.libraries[0].symbols.as_mut().unwrap().release = Release::parse("24.05");
    holds(
        (
            "release",
            Verdict::Error,
            2,
            &["for Slurm 24.05", "has 24.11", "others run", "install palingenesis-slurm24.11"],
        ),
        other,
    );
    let required = |facts: &mut Facts| {
        ours(facts, |line| line.required = true);
        other(facts);
    };
    holds(("release", Verdict::Error, 2, &["every srun, sbatch and salloc stops (required)"]), required);
    holds(("commands", Verdict::Note, 2, &["see release"]), other);
    holds(("required", Verdict::Warning, 1, &["slurmd does not start", "write optional"]), |facts| {
        ours(facts, |line| line.required = true);
    });
    let refused = |why: &'static str| move |facts: &mut Facts| facts.host.libraries[0].load = Load::Refused(why.into());
    let glibc = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found";
    holds(("library", Verdict::Error, 2, &["GLIBC_2.38", "newer system", LIBRARY]), refused(glibc));
    holds(
        ("library", Verdict::Error, 2, &["undefined symbol: x", "install the package again"]),
        refused("undefined symbol: x"),
    );
    holds(("library", Verdict::Error, 2, &["ends by signal 11", "take the line out"]), |facts| {
        facts.host.libraries[0].load = Load::Crashed("by signal 11".into());
    });
    holds(
        ("library", Verdict::Error, 2, &["No such file", "install palingenesis-slurm24.11", "correct the path"]),
        |facts| {
            facts.host.libraries[0].path = None;
            facts.host.libraries[0].load = Load::Refused("No such file or directory".into());
        },
    );
    holds(("library", Verdict::Error, 2, &["not readable by all (mode 0640)"]), |facts| {
        facts.host.libraries[0].access = closed(false);
    });
    holds(("library", Verdict::Warning, 1, &["as root"]), |facts| facts.host.libraries[0].access = loose());
    holds(("library", Verdict::Unknown, 3, &["no answer"]), |facts| {
        facts.host.libraries[0].load = Load::Unknown("no answer".into());
    });
    holds(("release", Verdict::Error, 2, &["no SPANK plugin", "palingenesis-slurm24.11"]), |facts| {
        facts.host.libraries[0].symbols = Ok(Symbols::default());
    });
}

#[test]
fn the_release_of_slurm() {
    let none = |facts: &mut Facts| (facts.host.commands, facts.host.slurmd) = (None, None);
    holds(("slurm", Verdict::Unknown, 3, &["--slurm 24.11"]), none);
    holds(("release", Verdict::Unknown, 3, &["not known"]), none);
    holds(("release", Verdict::Ok, 0, &["24.11"]), |facts| {
        none(facts);
        facts.host.named = parse_release("24.11").ok();
    });
    holds(("slurm", Verdict::Error, 2, &["20.11", "21.08 and newer"]), |facts| {
        facts.host.named = Release::parse("20.11");
    });
    holds(("slurm", Verdict::Warning, 1, &["commands are of Slurm 24.11, slurmd is of 24.05"]), |facts| {
        facts.host.slurmd = program("/usr/sbin/slurmd", "slurm 24.05.1");
    });
}

#[test]
fn plugstack_conf_and_the_line() {
    let no_line = |facts: &mut Facts| {
        stack(facts).lines.clear();
        facts.host.libraries.clear();
    };
    holds(("line", Verdict::Error, 2, &["no line", "palingenesis-enable"]), no_line);
    holds(("line", Verdict::Error, 2, &["leads to", "which is not there", "install the package"]), |facts| {
        no_line(facts);
        stack(facts).opened[1].state = State::Missing;
    });
    holds(("line", Verdict::Error, 2, &["slurmctld's host", "scontrol reconfigure"]), |facts| {
        no_line(facts);
        facts.host.conf.configless = true;
    });
    holds(("plugstack", Verdict::Note, 2, &["does not exist"]), |facts| {
        no_line(facts);
        stack(facts).opened[0].state = State::Missing;
    });
    // A file in the whole is passed over too.
    holds(
        ("line", Verdict::Error, 2, &["plugstack.conf:1 includes /usr/share/palingenesis/p.conf", "--remove"]),
        |facts| {
            no_line(facts);
            stack(facts).includes[0].pattern = "/usr/share/palingenesis/p.conf".into();
            stack(facts).includes[0].files.clear();
        },
    );
    // <https://github.com/awslabs/awsome-distributed-ai/issues/1207>
    holds(("line", Verdict::Warning, 1, &["2 lines", "plugstack.conf:9", "twice"]), |facts| {
        let second = line(STACK, 9, LIBRARY);
        facts.host.libraries.push(loaded(&second, "24.11"));
        stack(facts).lines.push(second);
    });
    holds(("plugstack", Verdict::Error, 2, &["mode 0640", "chmod a+r"]), |facts| {
        stack(facts).opened[0].access = closed(false)
    });
    holds(("plugstack", Verdict::Warning, 1, &["in its group"]), |facts| stack(facts).opened[0].access = closed(true));
    holds(("plugstack", Verdict::Warning, 1, &["others than root"]), |facts| stack(facts).opened[0].access = loose());
    holds(("plugstack", Verdict::Error, 2, &["Permission denied"]), |facts| {
        stack(facts).opened[0].state = State::Fault("Permission denied".into());
    });
    holds(("plugstack", Verdict::Error, 2, &["again and again"]), |facts| stack(facts).endless = Some(STACK.into()));
    holds(("plugstack", Verdict::Error, 2, &["no absolute path"]), |facts| {
        facts.host.conf.plugstack = Some(("plugstack.conf".into(), "/etc/slurm/slurm.conf:3".into()));
    });
    holds(("arguments", Verdict::Error, 2, &["did you mean 'config='"]), |facts| {
        ours(facts, |line| line.arguments = vec!["confg=/x".into()]);
    });
    holds(("other-lines", Verdict::Warning, 1, &["plugstack.conf:4", "bogus"]), |facts| {
        stack(facts).bad.push((format!("{STACK}:4"), "bogus".into()));
    });
    holds(("other-lines", Verdict::Error, 2, &["/x/spank_other.so", "every srun"]), |facts| {
        facts.host.gone.push(Line { required: true, ..line(STACK, 2, "/x/spank_other.so") });
    });
    holds(("line", Verdict::Unknown, 3, &["without slurm.conf"]), |facts| {
        (facts.host.stack, facts.host.conf.file) = (None, None);
        facts.host.libraries.clear();
    });
}

/// <https://github.com/aws/aws-parallelcluster/issues/6459>: what an installer left for a
/// moment in an included directory stopped every job.
#[test]
fn files_that_an_include_picks_up() {
    let file = |name: &str, change: fn(&mut Opened)| {
        let path = format!("/etc/slurm/plugstack.conf.d/{name}");
        move |facts: &mut Facts| {
            let mut new = opened(&path);
            change(&mut new);
            stack(facts).includes[0].files.push(path);
            stack(facts).opened.push(new);
        }
    };
    holds(
        ("included-files", Verdict::Error, 2, &["sed6Yj8Ga", "mode 0640", "every srun"]),
        file("sed6Yj8Ga", |f| f.access = closed(false)),
    );
    holds(
        ("included-files", Verdict::Warning, 1, &["palingenesis.conf.rpmsave", "*.conf"]),
        file("palingenesis.conf.rpmsave", |_| ()),
    );
    holds(
        ("included-files", Verdict::Note, 0, &["passed over", "gone.conf"]),
        file("gone.conf", |f| f.state = State::Missing),
    );
    holds(("included-files", Verdict::Warning, 1, &["others than root"]), file("a.conf", |f| f.access = loose()));
    holds(
        ("included-files", Verdict::Error, 2, &["fifo.conf", "wait"]),
        file("fifo.conf", |f| f.state = State::Fault("it may wait".into())),
    );
    for name in ["a.conf.dpkg-old", "a.conf~", "#a.conf#", "a.conf.swp", "README", "sedAbc"] {
        assert!(is_left_over(&format!("/d/{name}")), "{name}");
    }
    assert!(!is_left_over("/d/zz-palingenesis.conf") && !is_left_over("/d/pyxis.conf"));
}

/// <https://github.com/NVIDIA/pyxis/issues/124>
#[test]
fn the_order_with_pyxis() {
    let pyxis = |at: usize| {
        move |facts: &mut Facts| stack(facts).lines.insert(at, line(STACK, 5, "/usr/lib64/slurm/spank_pyxis.so"))
    };
    holds(("order", Verdict::Warning, 1, &["before pyxis", "plugstack.conf:5"]), pyxis(1));
    holds(("order", Verdict::Ok, 0, &["palingenesis after it"]), pyxis(0));
}

/// <https://github.com/ComputeCanada/puppet-magic_castle/issues/51>: what runs in slurmd's own
/// context silently never ran.
/// Nothing is known then, and monitoring is told so.
#[test]
fn a_file_server_that_does_not_answer() {
    let checks = [unanswered(60)];
    assert_eq!(overall(&checks), Verdict::Unknown);
    assert_eq!(exit_code(overall(&checks)), 3);
    assert!(checks[0].text.contains("60 s") && checks[0].cure.is_some(), "{checks:?}");
}

#[test]
fn who_loads_it_and_how_that_is_known() {
    holds(("slurmd", Verdict::Ok, 0, &["has not loaded it", "nothing of palingenesis depends on it"]), |facts| {
        facts.host.daemons[0].loaded = Some(Vec::new());
    });
    // Not root: by the times of process and files.
    holds(("slurmd", Verdict::Ok, 0, &["after the last change"]), |facts| facts.host.daemons[0].loaded = None);
    holds(("slurmd", Verdict::Unknown, 0, &["unknown to this user", "depends on it"]), |facts| {
        facts.host.daemons[0].loaded = None;
        facts.host.daemons[0].started = Some(SystemTime::UNIX_EPOCH);
    });
    holds(("slurmstepd", Verdict::Warning, 1, &["SLURM_CONF=/srv/slurm.conf palingenesis doctor"]), |facts| {
        facts.host.daemons[0].conf = Some("/srv/slurm.conf".into());
    });
    holds(("slurmstepd", Verdict::Warning, 1, &["SLURM_CONF=/run/slurm/conf/slurm.conf"]), |facts| {
        facts.host.daemons[0].configless = true;
    });
    holds(("slurmstepd", Verdict::Note, 0, &["a login host"]), |facts| facts.host.daemons.clear());
    holds(("commands", Verdict::Note, 0, &["no srun"]), |facts| facts.host.commands = None);
}

#[test]
fn the_site_file_and_the_node() {
    holds(
        ("site-file", Verdict::Error, 2, &["is a directory", "jobs with the flag are refused", "doctor --config"]),
        |facts| {
            facts.site.fault = Some(SiteError::of_file("/e.toml", "is a directory"));
        },
    );
    holds(("site-file", Verdict::Warning, 1, &["out of range (and 1 more)"]), |facts| {
        facts.site.warnings = vec!["out of range".into(), "b".into()];
    });
    holds(("site-file", Verdict::Ok, 0, &["our defaults"]), |facts| facts.site.there = false);
    // A login host.
    holds(("gpus", Verdict::Note, 0, &["login host"]), |facts| facts.node = Devices::default());
    holds(("gpus", Verdict::Unknown, 0, &["no answer"]), |facts| {
        facts.node = Devices { unknown: vec!["no answer".into()], ..Devices::default() };
    });
    holds(("network-cards", Verdict::Note, 0, &["down: mlx5_1"]), |facts| {
        facts.node.nics.push(("mlx5_1".into(), false))
    });
    holds(("driver", Verdict::Error, 2, &["not loaded", "modprobe"]), |facts| facts.node.driver = None);
    holds(("driver", Verdict::Warning, 1, &["libcuda.so.1 is not found"]), |facts| facts.libraries.clear());
    holds(("driver", Verdict::Error, 2, &["550.54.15", "mismatch"]), |facts| {
        facts.libraries[0].path = "/usr/lib64/libcuda.so.535.104.05".into();
    });
    holds(("nccl", Verdict::Note, 0, &["bring its own"]), |facts| drop(facts.libraries.pop()));
}

#[test]
fn directories_limits_and_enroot() {
    let local = |new: Folder| move |facts: &mut Facts| facts.directories = vec![new];
    holds(("local", Verdict::Warning, 1, &["0755", "not every user"]), local(folder(Use::Local, "/scratch", 0o755)));
    holds(("local", Verdict::Warning, 1, &["sticky", "chmod +t"]), local(folder(Use::Local, "/scratch", 0o777)));
    holds(
        ("cache", Verdict::Warning, 1, &["/shared does not exist"]),
        local(Folder { mode: Ok(None), ..folder(Use::Cache, "/shared", 0) }),
    );
    holds(
        ("cache", Verdict::Ok, 0, &["directory of their own"]),
        local(Folder { value: "/shared/{user}/cache".into(), ..folder(Use::Cache, "/shared", 0o755) }),
    );
    holds(
        ("local", Verdict::Warning, 1, &["not on this node"]),
        local(Folder { file_system: Some(FileSystem::of(0x6969)), ..folder(Use::Local, "/scratch", 0o1777) }),
    );
    holds(
        ("local", Verdict::Note, 0, &["in memory"]),
        local(Folder { file_system: Some(FileSystem::of(0x0102_1994)), ..folder(Use::Local, "/scratch", 0o1777) }),
    );
    holds(
        ("local", Verdict::Warning, 1, &["nearly full"]),
        local(Folder { free: Some(5), ..folder(Use::Local, "/scratch", 0o1777) }),
    );
    holds(("memlock", Verdict::Warning, 1, &["64 KiB", "LimitMEMLOCK=infinity"]), |facts| {
        facts.host.daemons[0].memlock = Some(65536);
    });
    // slurm.conf(5): by default a step takes over the limits of the shell.
    let small_shell = |facts: &mut Facts| facts.memlock = Some((8 << 20, 8 << 20));
    holds(("memlock", Verdict::Note, 0, &["8 MiB", "PropagateResourceLimitsExcept"]), small_shell);
    holds(("memlock", Verdict::Ok, 0, &[]), |facts| {
        small_shell(facts);
        facts.host.conf.propagate_except = Some("MEMLOCK,NOFILE".into());
    });
    holds(("open-files", Verdict::Warning, 1, &["1024", "LimitNOFILE"]), |facts| {
        facts.host.daemons[0].open_files = Some(1024)
    });
    let enroot = |shared: &[&str]| {
        let shared = shared.iter().map(ToString::to_string).collect();
        let paths = vec![("ENROOT_DATA_PATH".to_string(), "/lustre/enroot".to_string())];
        move |facts: &mut Facts| facts.enroot = Some(Enroot { paths, shared, ..Enroot::default() })
    };
    holds(("enroot", Verdict::Warning, 1, &["ENROOT_DATA_PATH", "clash"]), enroot(&["ENROOT_DATA_PATH"]));
    holds(("enroot", Verdict::Ok, 0, &["ENROOT_DATA_PATH=/lustre/enroot"]), enroot(&[]));
}

#[test]
fn errors_stand_above_warnings_and_these_above_what_is_not_known() {
    let check = |name, verdict| Check { name, verdict, text: String::new(), cure: None, source: String::new() };
    use Verdict::{Error, Note, Ok, Unknown, Warning};
    for (all, whole, code) in [
        (vec![("slurm", Ok), ("gpus", Note)], Ok, 0),
        // Root's alone to see.
        (vec![("slurm", Ok), ("slurmd", Unknown)], Ok, 0),
        (vec![("slurm", Unknown), ("line", Ok)], Unknown, 3),
        (vec![("slurm", Unknown), ("order", Warning)], Warning, 1),
        (vec![("order", Warning), ("line", Error), ("slurm", Unknown)], Error, 2),
    ] {
        let all: Vec<Check> = all.into_iter().map(|(name, verdict)| check(name, verdict)).collect();
        assert_eq!((overall(&all), exit_code(overall(&all))), (whole, code), "{all:?}");
    }
}
