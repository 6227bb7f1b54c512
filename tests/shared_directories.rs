//! Whether directories are the same on all nodes, on real files: two nodes are two mount
//! namespaces, in which this program runs again as an unprivileged user. Each case looks
//! at /mnt/world/data/out, writes as rank 0's node, looks on both, and removes.
//!
//! Needs root. What one machine cannot show: a file server, whose names come late to other
//! nodes, and whose quota is used up. The first is shown by a file that comes late (unit
//! tests), the second by a library that lets the write fail, a server that does not answer
//! by a frozen file system.

mod common;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use palingenesis::act::preflight::Work;
use palingenesis::act::preflight::shared::{clean, looking, seen, tokens, writing};
use palingenesis::plan::preflight::directories::{Absence, Moment, Place, Seen, Token, judge};
use palingenesis::plan::{Severity, Shape, StepPlan};

/// Ids that no account of the machine has.
const USER: u32 = 47_011;
const STRANGER: u32 = 47_012;

/// Set for the program that runs as the user: what to do, and for which node.
const VERB: &str = "SHARED_TEST_VERB";
const NODE: &str = "SHARED_TEST_NODE";

/// What of the place: `cache` is a variable's, which programs make later.
const KIND: &str = "SHARED_TEST_KIND";

fn step(node_rank: u32) -> StepPlan {
    StepPlan {
        job_id: 7,
        step_id: 0,
        shape: Shape::Native,
        profile: "default".into(),
        fabric: "auto",
        nodes: 2,
        node_list: "n[1-2]".into(),
        world_size: 2,
        rank: node_rank,
        local_rank: 0,
        local_world_size: 1,
        node_rank,
        node: format!("n{}", node_rank + 1),
        master_addr: None,
        master_port: None,
        ports: Vec::new(),
    }
}

fn wait(mut work: impl Work) -> Vec<u8> {
    let end = Instant::now() + Duration::from_secs(90);
    loop {
        if let Some(answer) = work.advance() {
            return answer;
        }
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Not a test by itself: what the others run as the user.
#[test]
#[ignore = "run by the other tests"]
fn as_the_user() {
    let Ok(verb) = std::env::var(VERB) else { return };
    let node: u32 = std::env::var(NODE).unwrap_or_default().parse().unwrap_or_default();
    let path = "/mnt/world/data/out".to_string();
    let place = match std::env::var(KIND).as_deref() {
        Ok("cache") => Place { what: "NEMO_HOME".into(), path, absence: Absence::Above, write: false },
        _ => Place { what: "output".into(), path, absence: Absence::Make, write: true },
    };
    let left = || tokens(&fs::read("/mnt/tokens").unwrap()).unwrap();
    let answer = match verb.as_str() {
        "write" => wait(writing(vec![place], &step(node))),
        "look" => wait(looking(vec![place], left(), &step(node))),
        "clean" | "refuse" => {
            clean(&[place], &left(), verb == "clean");
            Vec::new()
        }
        // Once through, and the same again until it is killed.
        "loop" => loop {
            let left = tokens(&wait(writing(vec![place.clone()], &step(node)))).unwrap();
            wait(looking(vec![place.clone()], left.clone(), &step(node)));
            clean(std::slice::from_ref(&place), &left, true);
        },
        _ => panic!("{verb}"),
    };
    println!("\nANSWER {}", String::from_utf8(answer).unwrap());
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

/// Two nodes, and what they are given to look at.
#[derive(Default)]
struct Nodes {
    /// Bash by root, in /mnt/world, which both nodes see.
    both: String,
    /// The same on the second node only, in a mount namespace of its own.
    second: String,
    kind: &'static str,
    /// Whether the step starts.
    refused: bool,
}

/// What came of it.
struct Outcome {
    tokens: Vec<Token>,
    seen: Vec<(String, Vec<Seen>)>,
    found: Vec<(&'static str, Severity, String)>,
    /// What the script said last.
    after: String,
}

impl Outcome {
    #[track_caller]
    fn one(&self) -> (&'static str, Severity, &str) {
        let [(id, severity, text)] = self.found.as_slice() else { panic!("{:#?}\n{:#?}", self.found, self.seen) };
        (id, *severity, text)
    }
}

/// Everything below /mnt/world.
const LIST: &str = "find . -mindepth 1 -printf '%U %m %y %p\n' | sort -k4";

impl Nodes {
    #[track_caller]
    fn run(&self, after: &str) -> Outcome {
        let script = format!(
            "set -e; export ME={USER} STRANGER={STRANGER} {KIND}={}
             as() {{ local id=$1; shift; setpriv --reuid $id --regid $id --clear-groups --inh-caps=-all \"$@\"; }}
             verb() {{ {VERB}=$1 {NODE}=$2 as $ME \"$PROGRAM\" --exact as_the_user --ignored --nocapture | sed -n 's/^ANSWER //p'; }}
             export -f as verb
             mkdir -p /mnt; mount -t tmpfs -o mode=755 none /mnt; mkdir /mnt/world; cd /mnt/world
             mkdir -m 755 data; chown $ME data
             {}
             cd /mnt/world
             verb write 0 >/mnt/tokens
             verb look 0 >/mnt/seen.0
             unshare -m --propagation private bash -c \"$SECOND\" >/mnt/seen.1
             verb {} 0
             cat /mnt/tokens /mnt/seen.0 /mnt/seen.1
             echo AFTER
             {after}",
            if self.kind.is_empty() { "output" } else { self.kind },
            self.both,
            if self.refused { "refuse" } else { "clean" },
        );
        let program = common::readable_by_all(std::env::current_exe().expect("the test has a path"));
        let output = Command::new("timeout")
            .args(["120", "unshare", "-m", "--propagation", "private", "bash", "-c", &script])
            .env("PROGRAM", program)
            .env("SECOND", format!("set -e; cd /mnt/world\n{}\ncd /mnt/world; verb look 1", self.second))
            .output()
            .expect("unshare is there");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{script}\n{out}\n{err}");
        let (said, after) = out.split_once("AFTER\n").expect("the script ran");
        let lines: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
        let [left, first, second] = lines.as_slice() else { panic!("{out}\n{err}") };
        let all = [("n1", first), ("n2", second)];
        let all: Vec<(String, Vec<Seen>)> =
            all.iter().map(|(node, line)| (node.to_string(), seen(line.as_bytes()).unwrap())).collect();
        let found = judge(&all, Moment::Start)
            .into_iter()
            .map(|warning| (warning.id, warning.severity, format!("{}; {}", warning.message, warning.cure)))
            .collect();
        Outcome { tokens: tokens(left.as_bytes()).unwrap(), seen: all, found, after: after.into() }
    }
}

fn both(both: &str) -> Nodes {
    Nodes { both: both.into(), ..Nodes::default() }
}

fn second(second: &str) -> Nodes {
    Nodes { second: second.into(), ..both("as $ME mkdir data/out") }
}

/// The only thing wrong in these worlds may be that a tmpfs has less than 1 GiB.
fn big(path: &str) -> String {
    format!("mount -t tmpfs -o size=4G,mode=777 filer:/big {path}")
}

#[test]
fn one_directory_on_both_nodes_is_one_and_nothing_is_left_of_the_look() {
    if !possible() {
        return;
    }
    // Seen through another mount, through a link, made by us.
    let mount = big("data");
    for (first, then) in [
        (format!("{mount}; as $ME mkdir data/out"), ""),
        (format!("{mount}; as $ME mkdir data/out"), "mount --bind data/out /mnt/world/data/out"),
        (format!("{mount}; as $ME mkdir data/real; as $ME ln -s real data/out"), ""),
        (mount, ""),
    ] {
        let world = Nodes { second: then.into(), ..both(&first) };
        let outcome = world.run("find data -mindepth 1 -printf '%m %y %p\\n'");
        assert_eq!(outcome.found, [], "{first}");
        assert!(!outcome.after.contains("palingenesis"), "{}", outcome.after);
        assert!(outcome.after.contains(" data/out\n"), "{}", outcome.after);
        // Made with the rights of a directory that a user makes.
        if outcome.tokens[0].made {
            assert_eq!(outcome.after, "755 d data/out\n");
        }
        assert_eq!(outcome.seen[0].1[0].mount.as_ref().unwrap().source, "filer:/big");
    }
}

/// Where the step is refused the directory that was made for it goes, too.
#[test]
fn nothing_is_left_where_the_step_does_not_start() {
    if !possible() {
        return;
    }
    let world = Nodes { refused: true, ..both(&big("data")) };
    assert_eq!(world.run("find data -mindepth 1").after, "");
    let world = Nodes { refused: true, ..both(&format!("{}; as $ME mkdir data/out", big("data"))) };
    assert_eq!(world.run("find data -mindepth 1").after, "data/out\n");
}

/// <https://github.com/modelscope/ms-swift/issues/4462>: each node had a directory of that
/// path, and neither was the other's.
#[test]
fn a_directory_in_memory_of_the_second_node_is_named_with_its_mount() {
    if !possible() {
        return;
    }
    let outcome = second("mount -t tmpfs -o mode=777,size=4G tmpfs data; mkdir -m 777 data/out").run(LIST);
    let (id, severity, text) = outcome.one_of_shared();
    assert_eq!((id, severity), ("dir-shared", Severity::Error));
    assert!(
        text.starts_with("output=/mnt/world/data/out is not the same directory on n2: there it is tmpfs on /mnt/world/data (n1: tmpfs on /mnt); "),
        "{text}"
    );
    // What a killed launch has left in it goes there too, for nobody else comes by.
    let outcome = second(
        "old=$(echo data/out/.pal*); cp -a $old /mnt/old; mount -t tmpfs -o mode=777,size=4G tmpfs data; mkdir -m 777 data/out
         cp -a /mnt/old $old; mv $old/.p* $old/.palingenesis-000000000000000000000000; touch -d '3 hours ago' $old/.p*; find data -type f >/mnt/before
         trap 'cd /mnt/world; find data >/mnt/then' EXIT",
    )
    .run("cat /mnt/before; echo THEN; cat /mnt/then");
    let (before, then) = outcome.after.split_once("THEN\n").unwrap();
    assert_eq!((before.lines().count(), then), (1, "data\ndata/out\n"));
    // By a link that leads to another place there.
    let outcome =
        second("mount -t tmpfs -o mode=777,size=4G tmpfs data; mkdir -m 777 data/own; ln -s own data/out").run(LIST);
    assert_eq!(outcome.one_of_shared().0, "dir-shared");
}

impl Outcome {
    /// The finding that is not about the little room of these small worlds.
    #[track_caller]
    fn one_of_shared(&self) -> (&'static str, Severity, &str) {
        let found: Vec<_> = self
            .found
            .iter()
            .filter(|(id, severity, _)| (*id, *severity) != ("dir-space", Severity::Warning))
            .collect();
        let [(id, severity, text)] = found.as_slice() else { panic!("{:#?}\n{:#?}", self.found, self.seen) };
        (id, *severity, text)
    }
}

/// <https://github.com/pytorch/pytorch/pull/92553>: only rank 0's host had the directory.
#[test]
fn a_directory_that_the_second_node_does_not_have() {
    if !possible() {
        return;
    }
    let world = Nodes { second: "mount -t tmpfs -o mode=777,size=4G tmpfs data".into(), ..Nodes::default() };
    let outcome = world.run(LIST);
    let (id, severity, text) = outcome.one_of_shared();
    assert_eq!((id, severity), ("dir-shared", Severity::Error));
    assert!(
        text.starts_with("output=/mnt/world/data/out is not on n2: there /mnt/world/data/out does not exist, the file system is tmpfs on /mnt/world/data (n1: "),
        "{text}"
    );
}

#[test]
fn a_missing_parent_is_told_by_its_name() {
    if !possible() {
        return;
    }
    let outcome = both("rmdir data").run(LIST);
    let (id, severity, text) = outcome.one();
    assert_eq!((id, severity), ("dir-missing", Severity::Error));
    assert!(
        text.starts_with("output=/mnt/world/data/out does not exist on n1: /mnt/world/data does not exist; mkdir -p"),
        "{text}"
    );
    // A parent in which the user may make nothing.
    let outcome = both("chown root data").run(LIST);
    let (id, severity, text) = outcome.one();
    assert_eq!((id, severity), ("dir-write", Severity::Error));
    assert!(text.contains("you may not make files in /mnt/world/data"), "{text}");
}

/// Bash after which this program's writes of a try fail with that error.
fn fails(error: &str) -> String {
    format!(
        "cat >/mnt/shim.c <<'END'
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int fd, const void *b, size_t n) {{ return n == 65536 ? (errno = {error}, -1) : syscall(SYS_write, fd, b, n); }}
END
         cc -shared -fPIC -o /mnt/shim.so /mnt/shim.c
         as() {{ local id=$1; shift; setpriv --reuid $id --regid $id --clear-groups env LD_PRELOAD=/mnt/shim.so \"$@\"; }}"
    )
}

#[test]
fn why_a_node_cannot_write_is_told_apart() {
    if !possible() {
        return;
    }
    let cases = [
        (
            "mount --bind data/out data/out; mount -o remount,ro,bind data/out",
            "dir-write",
            "is on a read-only file system",
        ),
        (
            "chown root data/out; chmod 755 data/out; trap 'chown $ME /mnt/world/data/out' EXIT",
            "dir-write",
            "you may not make files in",
        ),
    ];
    for (then, id, says) in cases {
        // The second of them is the same directory, of which rank 0's node was the first user.
        let outcome = second(then).run(LIST);
        let (found, severity, text) = outcome.one_of_shared();
        assert_eq!((found, severity), (id, Severity::Error), "{then}");
        assert!(text.contains("cannot be written on n2: ") && text.contains(says), "{text}");
        assert!(!outcome.after.contains("palingenesis"), "{}", outcome.after);
    }
    // A quota can only be played: this error of write is what it says.
    let outcome = second(&fails("EDQUOT")).run(LIST);
    let (found, severity, text) = outcome.one_of_shared();
    assert_eq!((found, severity), ("dir-write", Severity::Error));
    assert!(text.contains("cannot be written on n2: your quota at "), "{text}");
    assert!(!outcome.after.contains("palingenesis"), "{}", outcome.after);
}

/// A file system in memory of 64 KiB: full, with room for less than a try, without inodes.
#[test]
fn a_directory_without_room_is_told_apart() {
    if !possible() {
        return;
    }
    let full = "mount -t tmpfs -o mode=777,size=64k tmpfs data; as $ME mkdir data/out";
    let fill = "as $ME dd if=/dev/zero of=data/out/big bs=4k 2>/dev/null || true";
    for (setup, says) in [
        (format!("{full}; {fill}"), "no space is left on the file system of"),
        (
            format!("{full}; as $ME dd if=/dev/zero of=data/out/big bs=4k count=8 2>/dev/null"),
            "no space is left on the file system of",
        ),
        (
            "mount -t tmpfs -o mode=777,size=4G,nr_inodes=2 tmpfs data; as $ME mkdir data/out".into(),
            "no inodes are left on the file system of",
        ),
    ] {
        let outcome = both(&setup).run("find data -name '.pal*'");
        let (id, severity, text) = outcome.one();
        assert_eq!((id, severity), ("dir-space", Severity::Error), "{setup}");
        assert!(
            text.starts_with("output=/mnt/world/data/out has no room on all 2 nodes: ") && text.contains(says),
            "{text}"
        );
        assert_eq!(outcome.after, "");
    }
    let few = both("mount -t tmpfs -o mode=777,size=4G,nr_inodes=100 tmpfs data; as $ME mkdir data/out").run(LIST);
    let (id, severity, text) = few.one();
    assert_eq!((id, severity), ("dir-space", Severity::Warning));
    assert!(text.contains("room for few files: "), "{text}");
    let little = both("mount -t tmpfs -o mode=777,size=100m tmpfs data; as $ME mkdir data/out").run(LIST);
    assert!(
        little.one().2.contains("has little room: 99 MiB of 100 MiB are free on n1")
            || little.one().2.contains("has little room: 100 MiB of 100 MiB"),
        "{}",
        little.one().2
    );
}

/// <https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4207>: a directory of each
/// node's container.
#[test]
fn a_cache_of_each_node_s_own_is_a_warning() {
    if !possible() {
        return;
    }
    let own = "mount -t tmpfs -o mode=777 tmpfs data; mkdir -m 777 data/out";
    let outcome = Nodes { kind: "cache", ..second(own) }.run(LIST);
    let (id, severity, text) = outcome.one();
    assert_eq!((id, severity), ("dir-shared", Severity::Warning));
    assert!(
        text.starts_with(
            "NEMO_HOME=/mnt/world/data/out is not the same directory on n2: there it is tmpfs on /mnt/world/data"
        ),
        "{text}"
    );
    // One that does not exist yet tells by what is above it, and is not made.
    let outcome =
        Nodes { kind: "cache", second: "mount -t tmpfs -o mode=777 tmpfs data".into(), ..Nodes::default() }.run(LIST);
    assert_eq!(outcome.one().0, "dir-shared");
    assert!(!outcome.after.contains("data/"), "{}", outcome.after);
    let outcome = Nodes { kind: "cache", ..Nodes::default() }.run(LIST);
    assert_eq!(outcome.found, []);
    assert!(!outcome.after.contains("data/"), "{}", outcome.after);
    // Models that everybody may read and nobody write are no fault.
    let shared = "mkdir data/out; chown root data data/out; chmod 755 data";
    let outcome = Nodes { kind: "cache", ..both(shared) }.run(LIST);
    assert_eq!(outcome.found, []);
    let other = "mount -t tmpfs -o mode=755 tmpfs data; mkdir data/x data/y data/z data/out";
    let outcome = Nodes { kind: "cache", second: other.into(), ..both(shared) }.run(LIST);
    assert_eq!(outcome.one().0, "dir-shared");
}

/// Another user who may make names in the directory can prevent the look, not the job,
/// and cannot have anything of the user's removed or written elsewhere.
#[test]
fn a_stranger_s_traps_catch_nothing() {
    if !possible() {
        return;
    }
    let open = "mkdir -m 1777 data/out; mkdir -m 777 trap; touch trap/keep";
    let name = format!("data/out/.palingenesis-preflight-{USER}");
    for (trap, says) in [
        (format!("as $STRANGER ln -s /mnt/world/trap {name}"), "symbolic link"),
        (format!("as $STRANGER mkdir -m 777 {name}"), "belongs to another user"),
        (format!("as $STRANGER mkfifo {name}"), "is no directory"),
    ] {
        let outcome = both(&format!("{open}; {trap}")).run("find trap data/out -mindepth 1 | sort");
        let (id, severity, text) = outcome.one_of_shared();
        assert_eq!((id, severity), ("dir-write", Severity::Warning), "{trap}");
        assert!(text.contains("could not be tried on all 2 nodes: ") && text.contains(says), "{text}");
        assert_eq!(outcome.after, format!("{name}\ntrap/keep\n"));
    }
}

/// Killed at any moment it leaves files, which a later launch removes once they are old.
#[test]
fn what_a_kill_leaves_a_later_launch_removes() {
    if !possible() {
        return;
    }
    let world = both(
        "mount -t tmpfs -o size=4G,mode=777 none data; as $ME mkdir data/out
         for n in {1..15}; do
           SHARED_TEST_VERB=loop setpriv --reuid $ME --regid $ME --clear-groups \"$PROGRAM\" --exact as_the_user --ignored >/dev/null 2>&1 &
           pid=$!; sleep 0.$((n * 37 % 90 + 105)); kill -9 $pid; wait $pid 2>/dev/null || true
         done
         find data -type f >/mnt/left; find data -name '.pal*' -type d >>/mnt/left
         find data/out -type f -exec touch -d '3 hours ago' {} +",
    );
    let outcome = world.run("find data -mindepth 1; echo LEFT; cat /mnt/left");
    let (now, left) = outcome.after.split_once("LEFT\n").unwrap();
    assert_eq!(outcome.found, []);
    assert!(!left.is_empty(), "no kill left anything");
    assert_eq!(now, "data/out\n", "{left}");
}

#[test]
fn twenty_launches_at_the_same_time_all_see_one_directory() {
    if !possible() {
        return;
    }
    let world = both(&format!(
        "{}; as $ME mkdir data/out
         one() {{
           mkdir /mnt/$1; exec 3>&1
           unshare -m bash -c \"cd /mnt/world; verb write 0 >/mnt/$1/tokens; mount --bind /mnt/$1/tokens /mnt/tokens
             verb look 0 >>/mnt/all; verb clean 0\"
         }}
         touch /mnt/tokens
         for n in {{1..20}}; do one $n & done; wait",
        big("data")
    ));
    let outcome = world.run("find data -mindepth 1; echo ALL; cat /mnt/all");
    let (left, all) = outcome.after.split_once("ALL\n").unwrap();
    assert_eq!(left, "data/out\n");
    let all: Vec<(String, Vec<Seen>)> =
        all.lines().filter(|line| !line.is_empty()).map(|line| ("n".into(), seen(line.as_bytes()).unwrap())).collect();
    assert_eq!(all.len(), 20);
    assert_eq!(judge(&all, Moment::Start), []);
    assert!(all.iter().all(|(_, seen)| seen[0].fault.is_none() && seen[0].write.is_none()), "{all:?}");
}

/// A frozen file system answers as little as a dead server does.
#[test]
fn a_file_system_that_does_not_answer_is_named_with_its_node() {
    let image = "dd if=/dev/zero of=/mnt/image bs=1M count=16 status=none; mkfs.ext4 -q /mnt/image";
    let loops = format!("set -e; mount -t tmpfs none /mnt; {image}; mkdir /mnt/m; mount -o loop /mnt/image /mnt/m");
    let able = || Command::new("unshare").args(["-m", "--propagation", "private", "bash", "-c", &loops]).output();
    if !possible() || !able().is_ok_and(|output| output.status.success()) {
        println!("skipped: needs root, loop devices and mkfs.ext4");
        return;
    }
    let freeze = "mount -o loop /mnt/image data; mkdir -m 777 data/out; fsfreeze -f data
                  trap 'fsfreeze -u /mnt/world/data' EXIT";
    let world = Nodes { second: freeze.into(), both: format!("{image}; as $ME mkdir data/out"), ..Nodes::default() };
    let start = Instant::now();
    let outcome = world.run(LIST);
    let (id, severity, text) = outcome.one_of_shared();
    assert_eq!((id, severity), ("dir-shared", Severity::Error));
    assert!(text.starts_with("output=/mnt/world/data/out does not answer on n2: no answer within "), "{text}");
    assert!(start.elapsed() < Duration::from_secs(100));
}
