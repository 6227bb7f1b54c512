//! The directories of caches on real files: made as an unprivileged user, in a
//! place open to all with traps in it, without room, without rights. Each case
//! runs this program again, as that user, in a mount namespace of its own.
//!
//! Needs root. What one machine cannot show: a file server and its quotas; a
//! frozen file system and a library that lets calls fail stand for them.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use palingenesis::act::directories::make;
use palingenesis::facts::directories::{Directory, Purpose, Request, look};

/// Ids that no account of the machine has.
const USER: u32 = 47_001;
const STRANGER: u32 = 47_002;

/// Set for the program that runs as the user: the requests.
const REQUESTS: &str = "CACHES_TEST_REQUESTS";

/// What became of one root.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Outcome {
    fault: Option<(String, String)>,
    file_system: String,
    link: Option<String>,
}

/// A place of its own for one case, as /world.
struct World {
    setup: String,
}

impl World {
    /// `setup` is bash, run by root in a new mount namespace in which /world is an
    /// empty directory in memory; ME and STRANGER are the users' ids.
    fn new(setup: &str) -> World {
        World { setup: setup.into() }
    }

    /// What `requests` become, one a line: `VERB PURPOSE ROOT [WORD…]`; then the
    /// output of `after`, bash run by root.
    #[track_caller]
    fn run(&self, requests: &str, after: &str) -> (Vec<Outcome>, String) {
        let script = format!(
            "set -e; export ME={USER} STRANGER={STRANGER}
             as() {{ local id=$1; shift; setpriv --reuid $id --regid $id --clear-groups --inh-caps=-all \"$@\"; }}
             mkdir -p /mnt; mount -t tmpfs -o mode=755 none /mnt; mkdir /mnt/world; cd /mnt/world
             {}
             cd /mnt/world
             as $ME \"$PROGRAM\" --exact as_the_user --ignored --nocapture
             echo AFTER
             {after}",
            self.setup
        );
        let program = common::readable_by_all(std::env::current_exe().expect("the test has a path"));
        let output = Command::new("timeout")
            .args(["60", "unshare", "-m", "--propagation", "private", "bash", "-c", &script])
            .env("PROGRAM", program)
            .env(REQUESTS, requests)
            .output()
            .expect("unshare is there");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}\n{out}\n{err}", self.setup);
        let (said, after) = out.split_once("AFTER\n").expect("the program ran");
        let outcomes = said.lines().filter_map(|line| line.split_once("OUTCOME ")).map(|(_, text)| parse(text));
        (outcomes.collect(), after.into())
    }

    #[track_caller]
    fn one(&self, request: &str) -> Outcome {
        let (outcomes, _) = self.run(request, ":");
        let [outcome] = outcomes.as_slice() else { panic!("{outcomes:?}") };
        outcome.clone()
    }

    /// The fault of the one request, as `WHAT PATH`, the path below /mnt/world.
    #[track_caller]
    fn fault(&self, request: &str) -> String {
        let (what, at) = self.one(request).fault.unwrap_or_default();
        format!("{what} {}", at.strip_prefix("/mnt/world").unwrap_or(&at))
    }
}

/// Bash that lets a call of the program fail in its child; its own standard
/// output is spared.
fn fails(call: &str, error: &str) -> String {
    let arguments = match call {
        "write" => "int fd, const void *b, size_t n",
        "fsync" => "int fd",
        "linkat" => "int fd, const char *a, int t, const char *b, int f",
        _ => "int fd, const char *a, mode_t m",
    };
    let other = if call == "write" { "n != 4096 ? syscall(SYS_write, fd, b, n) :" } else { "" };
    format!(
        "cat >/mnt/shim.c <<'END'
#define _GNU_SOURCE
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
{} {call}({arguments}) {{ return {other} (errno = {error}, -1); }}
END
         cc -shared -fPIC -o /mnt/shim.so /mnt/shim.c
         as() {{ local id=$1; shift; setpriv --reuid $id --regid $id --clear-groups env LD_PRELOAD=/mnt/shim.so \"$@\"; }}",
        if call == "write" { "ssize_t" } else { "int" }
    )
}

fn parse(text: &str) -> Outcome {
    let fields: BTreeMap<&str, &str> = text.split('\t').filter_map(|field| field.split_once('=')).collect();
    let field = |name: &str| fields.get(name).map(|value| value.to_string()).filter(|value| !value.is_empty());
    Outcome { fault: field("what").zip(field("at")), file_system: field("fs").unwrap_or_default(), link: field("link") }
}

fn request(line: &str) -> (bool, Request) {
    let mut words = line.split(' ');
    let verb = words.next().unwrap();
    let purpose = match words.next().unwrap() {
        "shared" => Purpose::Shared,
        "local" => Purpose::Local,
        _ => Purpose::Given,
    };
    let root = format!("/mnt/world{}", words.next().unwrap());
    let mut request = Request { purpose, probe: true, make_root: purpose == Purpose::Shared, ..Request::given(&root) };
    request.folders = vec!["a".into(), "uv".into()];
    if purpose == Purpose::Local {
        request.own = Some(format!("palingenesis-{USER}"));
        request.on_the_node = true;
    }
    for word in words {
        match word.split_once('=') {
            Some(("link", to)) => request.link = Some(("uv".into(), format!("/mnt/world{to}"))),
            _ if word == "container" => request.in_container = true,
            _ if word == "no-probe" => request.probe = false,
            _ if word == "chosen" => (request.make_root, request.on_the_node) = (true, false),
            _ if word == "otherwise" => request.otherwise = true,
            _ => panic!("{word}"),
        }
    }
    (verb == "make", request)
}

/// Not a test by itself: what the others run as the user.
#[test]
#[ignore = "run by the other tests"]
fn as_the_user() {
    let Ok(lines) = std::env::var(REQUESTS) else { return };
    let (verbs, requests): (Vec<bool>, Vec<Request>) = lines.lines().map(str::trim).map(request).unzip();
    let found = if verbs[0] { make(&requests) } else { look(&requests) };
    println!();
    for Directory { fault, file_system, hard_link, .. } in found {
        let (at, what) = fault.map(|fault| (fault.at, format!("{:?}", fault.what))).unwrap_or_default();
        let fs = file_system.map(|fs| fs.name).unwrap_or_default();
        let link = hard_link.map(|link| link.fault.unwrap_or_else(|| "works".into())).unwrap_or_default();
        println!("OUTCOME \twhat={what}\tat={at}\tfs={fs}\tlink={link}");
    }
}

/// Says so and gives false where there is no root.
fn possible() -> bool {
    let status = fs::metadata("/proc/self").map(|data| std::os::unix::fs::MetadataExt::uid(&data));
    let able = status.is_ok_and(|uid| uid == 0)
        && Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    if !able {
        println!("skipped: needs root, for other users and mounts");
    }
    able
}

/// Owner, mode and path of everything below /mnt/world.
const LIST: &str = "find . -mindepth 1 -printf '%U %m %y %p\\n' | sort -k4";

#[test]
fn what_is_missing_is_made_for_the_user_alone_and_nothing_is_left_of_the_trial() {
    if !possible() {
        return;
    }
    let world = World::new("mkdir home; chown $ME home; umask 0");
    let (outcomes, list) = world.run("make shared /home/x/cache", LIST);
    assert_eq!(outcomes[0].fault, None, "{outcomes:?}");
    assert_eq!(outcomes[0].file_system, "tmpfs");
    let made = ["./home/x", "./home/x/cache", "./home/x/cache/a", "./home/x/cache/uv"];
    let expected: Vec<String> = made.iter().map(|path| format!("{USER} 700 d {path}")).collect();
    let list: Vec<&str> = list.lines().skip(1).collect();
    assert_eq!(list, expected);

    let world = World::new("mkdir -m 1777 tmp");
    let (outcomes, list) = world.run("make local /tmp", LIST);
    assert_eq!(outcomes[0].fault, None, "{outcomes:?}");
    let made = ["", "/a", "/uv"].map(|path| format!("{USER} 700 d ./tmp/palingenesis-{USER}{path}"));
    assert_eq!(list.lines().skip(1).collect::<Vec<_>>(), made);
}

#[test]
fn looking_makes_nothing() {
    if !possible() {
        return;
    }
    let world = World::new("mkdir home; chown $ME home; mkdir -m 1777 tmp; mkdir closed");
    let requests = "look shared /home/x/cache\nlook local /tmp\nlook given /home/hf\nlook shared /closed/x";
    let (outcomes, list) = world.run(requests, LIST);
    let faults: Vec<_> = outcomes.iter().map(|o| o.fault.as_ref().map(|(what, _)| what.as_str())).collect();
    // What is given comes last.
    assert_eq!(faults, [None, None, Some("Denied"), None]);
    assert!(outcomes.iter().all(|outcome| outcome.file_system == "tmpfs"), "{outcomes:?}");
    assert_eq!(list.lines().count(), 3, "{list}");
}

/// Somebody else's name in a place open to all, before we come: a link, a
/// directory, a link or directory on the way.
#[test]
fn traps_in_a_place_open_to_all_are_not_stepped_into() {
    if !possible() {
        return;
    }
    let own = format!("palingenesis-{USER}");
    let foreign = format!("Foreign({STRANGER})");
    let prepare = "mkdir -m 1777 tmp; mkdir -m 777 prey; mkdir mine; chown $ME mine";
    let cases = [
        ("as $STRANGER ln -s /mnt/world/prey tmp/OWN", "make local /tmp", format!("Link /tmp/{own}")),
        // The user's own link is none either: it may lead anywhere by now.
        ("as $ME ln -s /mnt/world/prey tmp/OWN", "make local /tmp", format!("Link /tmp/{own}")),
        ("ln -s /mnt/world/prey tmp/OWN", "make local /tmp", format!("Link /tmp/{own}")),
        ("as $STRANGER mkdir -m 700 tmp/OWN", "make local /tmp", format!("{foreign} /tmp/{own}")),
        ("as $STRANGER mkdir -m 777 tmp/OWN", "make local /tmp", format!("{foreign} /tmp/{own}")),
        ("as $STRANGER touch tmp/OWN", "make local /tmp", format!("NotDirectory /tmp/{own}")),
        ("as $ME mkdir -m 770 tmp/OWN", "make local /tmp", format!("Open(504) /tmp/{own}")),
        ("as $ME mkdir -m 755 tmp/OWN", "make local /tmp", format!("Open(493) /tmp/{own}")),
        ("chmod 777 tmp", "make local /tmp", "NotSticky(511) /tmp".into()),
        // Where everybody may exchange a directory further up, too.
        ("chmod 777 tmp; as $ME mkdir -p -m 700 tmp/job/own", "make local /tmp/job/own", "NotSticky(511) /tmp".into()),
        (
            "chmod 777 tmp; as $ME mkdir -m 700 tmp/job; as $ME ln -s ../tmp/job mine/job",
            "make local /mine/job",
            "NotSticky(511) /tmp".into(),
        ),
        ("as $STRANGER ln -s /mnt/world/prey tmp/c", "make shared /tmp/c", format!("{foreign} /tmp/c")),
        ("as $STRANGER ln -s /mnt/world/prey tmp/c", "make shared /tmp/c/d", format!("{foreign} /tmp/c")),
        ("as $STRANGER mkdir -m 777 tmp/c", "make shared /tmp/c", format!("{foreign} /tmp/c")),
        ("as $STRANGER mkdir -m 777 tmp/c", "make shared /tmp/c/d", format!("{foreign} /tmp/c")),
        ("as $STRANGER ln -s /mnt/world/prey tmp/a", "make shared /tmp", format!("{foreign} /tmp/a")),
        ("as $STRANGER mkdir -m 777 tmp/a", "make shared /tmp", format!("{foreign} /tmp/a")),
        // By a link of root's or of the user's that passes through such a place.
        (
            "as $STRANGER ln -s /mnt/world/prey tmp/c; as $ME ln -s ../tmp/c/d mine/c",
            "make shared /mine/c",
            format!("{foreign} /tmp/c"),
        ),
    ];
    for (trap, request, expected) in cases {
        let trap = trap.replace("OWN", &own);
        let world = World::new(&format!("{prepare}\n{trap}"));
        let (outcomes, prey) = world.run(request, "find prey -mindepth 1");
        let (what, at) = outcomes[0].fault.clone().unwrap_or_default();
        assert_eq!(format!("{what} {}", at.trim_start_matches("/mnt/world")), expected, "{trap}; {request}");
        assert_eq!(prey, "", "{trap}; {request}");
        let looked = world.fault(&request.replace("make", "look"));
        assert_eq!(looked, expected, "looking, {trap}; {request}");
    }
}

/// Homes and projects are reached by links of the admin on many sites, and
/// people put links in their homes.
#[test]
fn links_of_the_user_and_of_root_are_followed() {
    if !possible() {
        return;
    }
    let prepare = "mkdir -p fs1/me fs2 home; chown $ME fs1/me; mkdir -m 1777 tmp; ln -s ../fs1/me home/me";
    for (links, request, made) in [
        ("", "make shared /home/me/cache", "fs1/me/cache/a"),
        ("as $ME ln -s /mnt/world/fs1/me tmp/c", "make shared /tmp/c", "fs1/me/a"),
        ("ln -s /mnt/world/fs1/me tmp/c", "make shared /tmp/c", "fs1/me/a"),
        ("as $ME ln -s ../../home/me/x/./y/../z fs1/me/c", "make shared /home/me/c", "fs1/me/x/z/a"),
        // A link to what is not there yet.
        ("as $ME ln -s /mnt/world/fs1/me/new fs1/me/c", "make shared /home/me/c", "fs1/me/new/a"),
        ("as $ME mkdir fs1/me/big; as $ME ln -s big fs1/me/a", "make shared /fs1/me", "fs1/me/big"),
        // A colleague's directory, where not everybody may make names.
        ("mkdir -m 777 fs2/team; chown $STRANGER fs2/team", "make shared /fs2/team", "fs2/team/uv"),
    ] {
        let world = World::new(&format!("{prepare}\n{links}"));
        // x/./y/../z: y has to be there for the kernel, and so for us.
        let (outcomes, list) = world.run(request, &format!("ls -d {made} 2>&1 || {LIST}"));
        assert_eq!(outcomes[0].fault, None, "{links}; {request}");
        assert_eq!(list.trim(), made, "{links}; {request}");
    }
    let world = World::new("mkdir home; ln -s b home/a; ln -s a home/b");
    assert_eq!(world.fault("make shared /home/a"), "Failed(\"too many links\") /home/a");
}

#[test]
fn a_directory_that_cannot_be_used_says_where_and_why() {
    if !possible() {
        return;
    }
    let tmpfs = |options: &str| format!("mkdir c; mount -t tmpfs -o mode=1777,{options} none c");
    let cases = [
        ("mkdir c", "/c", "Denied /c/a"),
        ("mkdir -m 700 c; mkdir c/a", "/c", "Denied /c"),
        ("mkdir c c/a; chmod 700 c/a", "/c", "Denied /c/a"),
        ("mkdir c", "/c/new", "Denied /c/new"),
        ("mkdir c c/a c/uv; chown $ME c/a", "/c", "Denied /c/uv"),
        ("touch c", "/c", "NotDirectory /c"),
        ("touch c", "/c/new", "NotDirectory /c"),
        ("mkdir c; touch c/a; chown $ME c", "/c", "NotDirectory /c/a"),
        (&format!("{}; mount -o remount,ro c", tmpfs("size=1m")), "/c", "ReadOnly /c"),
        (&format!("{}; mount -o remount,ro c", tmpfs("size=1m")), "/c/new", "ReadOnly /c/new"),
        (&format!("{}; head -c 64k /dev/zero >c/full", tmpfs("size=64k")), "/c", "NoSpace /c"),
        // The directories are there, and no room for a file in them.
        (&format!("{}; mkdir -m 777 c/a c/uv; head -c 62k /dev/zero >c/full", tmpfs("size=64k")), "/c", "NoSpace /c"),
        (&format!("{}; touch c/1 c/2 c/3", tmpfs("nr_inodes=4")), "/c", "NoInodes /c"),
        (&format!("{}; touch c/1 c/2", tmpfs("nr_inodes=4")), "/c", "NoInodes /c/a"),
        // Told when the file is written, or only when a server has to keep it.
        (&format!("mkdir -m 777 c; {}", fails("write", "ENOSPC")), "/c", "NoSpace /c/a"),
        (&format!("mkdir -m 777 c; {}", fails("write", "EDQUOT")), "/c", "Quota /c/a"),
        (&format!("mkdir -m 777 c; {}", fails("fsync", "EDQUOT")), "/c", "Quota /c/a"),
        (&format!("mkdir -m 777 c; {}", fails("mkdirat", "EDQUOT")), "/c", "Quota /c/a"),
        (
            &format!("mkdir -m 777 c; {}", fails("mkdirat", "ESTALE")),
            "/c",
            "Failed(\"Stale file handle (os error 116)\") /c/a",
        ),
    ];
    for (setup, root, expected) in cases {
        let world = World::new(setup);
        assert_eq!(world.fault(&format!("make shared {root}")), expected, "{setup}");
        let (_, left) = world.run(&format!("make shared {root}"), "find . -name '.palingenesis*'");
        assert_eq!(left, "", "{setup}: nothing of the trial is left");
    }
}

#[test]
fn the_node_s_directory_is_on_the_node_and_lets_code_be_loaded() {
    if !possible() {
        return;
    }
    let world = World::new("mkdir -m 1777 tmp; mount -t tmpfs -o mode=1777,noexec none tmp");
    assert_eq!(world.fault("make local /tmp"), "NoExec /tmp");
    assert_eq!(world.fault("look local /tmp"), "NoExec /tmp");
    assert_eq!(world.fault("make local /tmp chosen"), "NoExec /tmp");
    assert_eq!(World::new(":").fault("make local /nowhere"), "Missing /nowhere");
    // What was asked for is made.
    assert_eq!(World::new("chmod 1777 .").one("make local /new chosen").fault, None);
    // The first that can be used, and no more.
    let world = World::new("mkdir -m 1777 tmp");
    let (outcomes, list) = world.run("make local /nowhere\nmake local /tmp otherwise\nmake local /tmp otherwise", LIST);
    let faults: Vec<bool> = outcomes.iter().map(|outcome| outcome.fault.is_some()).collect();
    assert_eq!(faults, [true, false]);
    assert!(list.contains(&format!("./tmp/palingenesis-{USER}/uv")), "{list}");
}

/// A container's own root looks like any directory; what is made there is gone
/// with it. (The tests' container is a tmpfs as root file system.)
#[test]
fn what_is_not_mounted_in_a_container_is_not_made_in_its_own_root() {
    if !possible() {
        return;
    }
    let setup = "mkdir -m 777 root; mkdir root/scratch";
    let world = World::new(&format!(
        "{setup}
         for dir in usr bin lib lib64 proc sys etc var tmp root; do
             [ -d /$dir ] && mkdir -p root/$dir && mount --rbind /$dir root/$dir || true
         done
         mkdir -p root/mnt/world root/$(dirname $PROGRAM); mount --bind $(dirname $PROGRAM) root/$(dirname $PROGRAM)
         mkdir -p root/mnt/world/mounted; mount -t tmpfs -o mode=1777 none root/mnt/world/mounted
         chmod 777 root/mnt/world
         as() {{ local id=$1; shift; chroot root setpriv --reuid $id --regid $id --clear-groups \"$@\"; }}"
    ));
    assert_eq!(world.fault("make shared /scratch/me container"), "NotMounted /scratch");
    assert_eq!(world.fault("look shared /scratch/me container"), "NotMounted /scratch/me");
    assert_eq!(world.one("make shared /mounted/me container").fault, None);
}

/// <https://github.com/astral-sh/uv/issues/15149>.
#[test]
fn hard_links_are_tried_between_the_cache_and_the_project() {
    if !possible() {
        return;
    }
    let prepare = "mkdir -m 777 c p; as $ME mkdir p/job";
    let link = |setup: &str, request: &str| {
        let world = World::new(&format!("{prepare}\n{setup}"));
        let (outcomes, list) = world.run(request, "find . -name '.palingenesis*'");
        assert_eq!((outcomes[0].fault.clone(), list.as_str()), (None, ""), "{setup}");
        outcomes[0].link.clone()
    };
    let ask = "make shared /c link=/p/job/.venv";
    assert_eq!(link("", ask).as_deref(), Some("works"));
    assert_eq!(link("", "make shared /c").as_deref(), None);
    assert_eq!(link("mount -t tmpfs -o mode=777 none c", ask).as_deref(), Some("another file system"));
    // One file system, two mounts.
    assert_eq!(link("mount --bind p p", ask).as_deref(), Some("another mount"));
    // The environment itself may be elsewhere than the project.
    let elsewhere = "mkdir p/job/.venv; mount -t tmpfs -o mode=777 none p/job/.venv";
    assert_eq!(link(elsewhere, ask).as_deref(), Some("another file system"));
    // File systems without hard links, and some that refuse them in between.
    for (error, why) in [("EPERM", "the file system has none"), ("EXDEV", "another mount")] {
        assert_eq!(link(&fails("linkat", error), ask).as_deref(), Some(why), "{error}");
    }
    // Where nothing can be tried nothing is known.
    assert_eq!(link(&fails("linkat", "EIO"), ask).as_deref(), None);
    assert_eq!(link("chown root p/job", ask).as_deref(), None);
    // A cache that the user's own variable names is tried alike, if it is there.
    let given = "make given /c link=/p/job/.venv";
    assert_eq!(link("", given).as_deref(), Some("works"));
    assert_eq!(link("mount --bind p p", given).as_deref(), Some("another mount"));
    assert_eq!(link("", "make given /c/new link=/p/job/.venv").as_deref(), None);
    assert_eq!(link("", "make given /c link=/p/job/.venv no-probe").as_deref(), None);
    let looking = World::new(&format!("{prepare}\nmount -t tmpfs -o mode=777 none c"));
    assert_eq!(looking.one(&given.replace("make", "look")).link.as_deref(), Some("another file system"));
    assert_eq!(looking.one(&ask.replace("make", "look")).link.as_deref(), Some("another file system"));
}

/// A frozen file system answers as little as a dead server does, not even to
/// SIGKILL: the rank goes on with that for an answer, its output comes to an end,
/// and what is elsewhere is made.
#[test]
fn a_file_system_that_does_not_answer_holds_nobody_for_ever() {
    let image = "dd if=/dev/zero of=/mnt/image bs=1M count=16 status=none; mkfs.ext4 -q /mnt/image
                 mkdir c; mount -o loop /mnt/image c; mkdir -m 777 c/d";
    let loops = format!("set -e; mount -t tmpfs none /mnt; cd /mnt; {image}");
    let able = || Command::new("unshare").args(["-m", "--propagation", "private", "bash", "-c", &loops]).output();
    if !possible() || !able().is_ok_and(|output| output.status.success()) {
        println!("skipped: needs root, loop devices and mkfs.ext4");
        return;
    }
    let world = World::new(&format!(
        "{image}; mkdir -m 1777 tmp; fsfreeze -f c; trap 'fsfreeze -u /mnt/world/c 2>/dev/null' EXIT"
    ));
    let start = Instant::now();
    let (outcomes, _) = world.run("make shared /c/d\nmake local /tmp", "fsfreeze -u c; trap - EXIT");
    let took = start.elapsed();
    let (what, at) = outcomes[0].fault.clone().unwrap_or_default();
    assert_eq!((what.as_str(), at.as_str()), ("Silent(\"no answer within 20.0s\")", "/mnt/world/c/d"));
    assert_eq!(outcomes[1].fault, None);
    assert!(took > Duration::from_secs(19), "{took:?}");
}

/// Of a node's ranks one writes a file, the others ask the kernel.
#[test]
fn ranks_that_write_nothing_see_a_closed_directory_too() {
    if !possible() {
        return;
    }
    let world = World::new("mkdir c c/a c/uv; chown $ME c/a");
    assert_eq!(world.fault("make shared /c no-probe"), "Denied /c/uv");
    let full = "mkdir c; mount -t tmpfs -o mode=1777,size=64k none c; head -c 64k /dev/zero >c/full";
    assert_eq!(World::new(full).fault("make shared /c no-probe"), "NoSpace /c");
}

/// All ranks of a node come at once.
#[test]
fn many_ranks_make_the_same_directories_at_once() {
    if !possible() {
        return;
    }
    let world = World::new(
        "mkdir -m 1777 tmp; mkdir home; chown $ME home
         for n in {1..8}; do as $ME \"$PROGRAM\" --exact as_the_user --ignored --nocapture >out.$n & done
         wait; cat out.*; rm out.*",
    );
    let (outcomes, list) = world.run("make shared /home/new/cache\nmake local /tmp", LIST);
    assert_eq!(outcomes.len(), 18, "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| outcome.fault.is_none()), "{outcomes:?}");
    assert_eq!(list.lines().count(), 9, "{list}");
}
