//! srun, slurmd and slurmstepd under valgrind with the plugin: no error and no
//! definite leak may have one of our functions in its stack, and what we hold does not
//! grow with launches or tasks. Slurm's own are not ours to judge.
//!
//! With PALINGENESIS_SOAK the launches are 200. What this cannot show: growth over months,
//! and on releases whose slurmd reads plugstack.conf again while it runs.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::crossed::{CROSSED, machine};
use common::{Sandbox, library, open_folder, rounds};

/// What is asked of valgrind; programs of the user's are let go, or each would be slow. Its
/// server for gdb has files in /tmp by pid: where pid namespaces share /tmp those of other
/// users are in the way, and the process ends with 1.
const VALGRIND: &str = "valgrind --vgdb=no --leak-check=full --keep-debuginfo=yes --num-callers=40 \
                        --trace-children-skip=*/true,*/sh,*/bash,*/env,*/sleep";
/// The same, and what is held to the end, too.
const ALL_KINDS: &str = "--show-leak-kinds=all";

/// More than slurmd's own growth differs by between two runs of it.
const ROOM_KIB: i64 = 256;

/// Whether a block of a log is ours to answer for. Strings that Slurm hands us, of an
/// allocator that differs by release, srun keeps for its short life: of the first tasks
/// only, see `src/spank/srun.rs`.
fn is_ours(block: &str) -> bool {
    let of_slurm = ["nodelist_nth_host", "slurm_conf_get_nodeaddr"];
    block.contains("libpalingenesis") && !of_slurm.iter().any(|function| block.contains(function))
}

/// Errors and definite leaks of a valgrind log that pass through our library.
fn ours(log: &str) -> Vec<String> {
    let text = strip_pids(log);
    let blocks = text.split("\n\n");
    blocks
        .filter(|block| is_ours(block))
        .filter(|block| !block.contains("still reachable") && !block.contains("possibly lost"))
        .map(String::from)
        .collect()
}

/// "==123== text" as "text".
fn strip_pids(log: &str) -> String {
    let lines = log.lines().map(|line| match line.strip_prefix("==").and_then(|rest| rest.split_once("==")) {
        Some((_, text)) => text.trim(),
        None => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Blocks of memory that a process had of us at its end, lost or not, and their bytes;
/// `None` where the log has no count, as that of a task that became the user's program.
fn held(log: &str) -> Option<(u64, u64)> {
    let text = strip_pids(log);
    // Where nothing is left there is no summary.
    if !text.contains("LEAK SUMMARY") && !text.contains("All heap blocks were freed") {
        return None;
    }
    let number = |text: &str| text.replace(',', "").parse::<u64>().ok();
    // "1,024 bytes in 2 blocks are still reachable in loss record 3 of 9", and with
    // "(16 direct, 8 indirect) " behind the first number.
    let count = |block: &str| {
        let line = block.lines().find(|line| line.contains(" in loss record "))?;
        let (bytes, rest) = line.split_once(' ')?;
        let (_, rest) = rest.split_once(" bytes in ").or_else(|| rest.split_once("bytes in "))?;
        Some((number(rest.split(' ').next()?)?, number(bytes)?))
    };
    let ours = text.split("\n\n").filter(|block| is_ours(block)).filter_map(count);
    Some(ours.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
}

/// A process's log.
struct Log {
    name: String,
    text: String,
}

impl Log {
    /// NAME.PID.log
    fn pid(&self) -> u32 {
        self.name.rsplit('.').nth(1).and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("{}", self.name))
    }

    fn parent(&self) -> Option<u32> {
        self.text.lines().find_map(|line| line.split_once("Parent PID: ")?.1.trim().parse().ok())
    }

    /// Whether it is of the program, or of what it became by fork alone.
    fn runs(&self, program: &str) -> bool {
        let command = self.text.lines().find_map(|line| Some(line.split_once("Command: ")?.1));
        command.and_then(|line| line.split(' ').next()).is_some_and(|word| word.rsplit('/').next() == Some(program))
    }
}

/// The logs whose names begin so, by their processes' numbers.
fn logs(sandbox: &Sandbox, beginning: &str) -> Vec<Log> {
    let mut found: Vec<Log> = Vec::new();
    for entry in fs::read_dir(home(sandbox)).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(beginning) && name.ends_with(".log") {
            found.push(Log { name, text: String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned() });
        }
    }
    found.sort_by_key(Log::pid);
    found
}

fn home(sandbox: &Sandbox) -> PathBuf {
    sandbox.dir().join("home/trainer")
}

/// A slurmd under valgrind in place of the sandbox's: its slurmstepd are traced too, in
/// logs whose names begin so.
fn start_slurmd(sandbox: &Sandbox, logs: &str, kinds: &str) {
    let log = home(sandbox).join(format!("{logs}.%p.log"));
    let start = format!(
        "kill $(pgrep -x slurmd); while pgrep -x slurmd >/dev/null; do sleep 0.1; done; \
         setsid {VALGRIND} {kinds} --trace-children=yes --log-file={} slurmd -D -N n1 >/dev/null 2>&1 </dev/null & \
         for i in $(seq 300); do sinfo -h -o %T | grep -q idle && scontrol ping -h >/dev/null && \
         srun -Q -n1 true 2>/dev/null && exit 0; sleep 0.2; done; exit 1",
        log.display()
    );
    sandbox.run_as(&["--as-root"], &start, 120).ok();
}

/// Waits until every slurmstepd has ended. (The brackets keep the pattern from finding
/// this shell.)
fn settle(sandbox: &Sandbox) {
    let wait = "for i in $(seq 300); do
                    [ -n \"$(squeue -h)\" ] || pgrep -f '[s]lurmstepd' >/dev/null || exit 0; sleep 0.2
                done; exit 1";
    sandbox.run_as(&["--as-root"], wait, 90).ok();
}

/// Ends the slurmd: its own leaks are told then.
fn stop_slurmd(sandbox: &Sandbox) {
    settle(sandbox);
    let stop = "pkill -TERM -f 'slurmd -D -N [n]1'
                for i in $(seq 300); do pgrep -f 'slurmd -D -N [n]1' >/dev/null || exit 0; sleep 0.2; done; exit 1";
    sandbox.run_as(&["--as-root"], stop, 90).ok();
}

/// What slurmd and its slurmstepd logged last, and what valgrind did, where a launch failed.
fn last_words(sandbox: &Sandbox, beginning: &str) -> String {
    let log = fs::read_to_string(sandbox.dir().join("log/slurmd.n1.log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let mut text = lines[lines.len().saturating_sub(60)..].join("\n");
    for log in logs(sandbox, beginning) {
        let end = log.text.len().saturating_sub(2000);
        text += &format!("\n{}:\n{}", log.name, log.text.get(end..).unwrap_or_default());
    }
    text
}

fn has_valgrind() -> bool {
    let found = Command::new("valgrind").arg("--version").output().is_ok();
    if !found {
        println!("skipped: no valgrind");
    }
    found
}

/// Launches of the two counts of which the second is many.
fn few_and_many() -> (usize, usize) {
    if rounds() > 1 { (20, 200) } else { (1, 3) }
}

#[test]
fn the_count_of_what_is_held_reads_valgrind_s_words() {
    let log = "==7== 16 bytes in 1 blocks are still reachable in loss record 1 of 3\n==7==    at 0x1: malloc\n\
               ==7==    by 0x2: f (in /x/libpalingenesis.so)\n==7== \n\
               ==7== 2,048 (1,024 direct, 1,024 indirect) bytes in 3 blocks are definitely lost in loss record 2 of 3\n\
               ==7==    by 0x2: g (in /x/libpalingenesis.so)\n==7== \n\
               ==7== 5 bytes in 1 blocks are still reachable in loss record 3 of 3\n==7==    by 0x2: h (in /x/libslurm.so)\n\
               ==7== \n==7== LEAK SUMMARY:\n";
    assert_eq!(held(log), Some((4, 2064)));
    assert_eq!(held("==7== Command: slurmd\n"), None);
    assert_eq!(held("==7== All heap blocks were freed -- no leaks are possible\n"), Some((0, 0)));
}

/// Of memory that is still reachable no leak is told, be there ever more of it.
#[test]
fn what_we_hold_grows_neither_with_launches_nor_with_tasks() {
    if !has_valgrind() {
        return;
    }
    let line = format!("optional {}", library().display());
    let options = ["--nodes", "1", "--sockets", "1", "--cores", "16", "--plugstack", &line];
    let Some(sandbox) = Sandbox::up("valgrind-growth", &options) else { return };
    if sandbox.run("valgrind --version").code != 0 {
        return println!("skipped: no valgrind in the tree");
    }
    let (few, many) = few_and_many();
    let mut of_slurmd = Vec::new();
    // With 2 tasks and with 12.
    let mut of_stepd: [Vec<(u64, u64)>; 2] = Default::default();
    // Of what has ended; it is long, and nobody needs it afterwards.
    let look = |beginning: &str, with_slurmd: bool| {
        let logs = logs(&sandbox, beginning);
        let slurmd = logs.iter().find(|log| log.runs("slurmd")).map(Log::pid);
        let is_stepd = |pid: Option<u32>| logs.iter().any(|log| Some(log.pid()) == pid && log.runs("slurmstepd"));
        let (mut of_slurmd, mut of_stepd) = (None, Vec::new());
        for log in logs.iter().filter(|log| with_slurmd || Some(log.pid()) != slurmd) {
            let found = ours(&log.text);
            assert!(found.is_empty(), "{}:\n{}", log.name, found.join("\n\n"));
            let held = held(&log.text);
            if Some(log.pid()) == slurmd {
                of_slurmd = Some(held.expect("slurmd has a summary"));
            } else if log.runs("slurmstepd") && !is_stepd(log.parent()) {
                of_stepd.push(held.expect("slurmstepd has a summary"));
            }
        }
        for log in logs.iter().filter(|log| Some(log.pid()) != slurmd) {
            let _ = fs::remove_file(home(&sandbox).join(&log.name));
        }
        (of_slurmd, of_stepd)
    };
    for (launches, wide) in [(few, 0), (many, 1)] {
        let beginning = format!("grow{launches}");
        start_slurmd(&sandbox, &beginning, ALL_KINDS);
        settle(&sandbox);
        // The one by which it was seen to be up had no flag.
        look(&beginning, false);
        for (tasks, count) in [(2, launches), (12, wide)] {
            for _ in 0..count {
                let said = sandbox.run_as(&[], &format!("srun -Q -n{tasks} --palingenesis true"), 180);
                assert_eq!(said.code, 0, "{}{}", said.err, last_words(&sandbox, &beginning));
                // Of what took too long under valgrind, say.
                print!("{}", said.err);
                settle(&sandbox);
                let (_, held) = look(&beginning, false);
                assert_eq!(held.len(), 1, "one slurmstepd for each launch: {held:?}");
                of_stepd[usize::from(tasks > 2)].extend(held);
            }
        }
        stop_slurmd(&sandbox);
        of_slurmd.push(look(&beginning, true).0.expect("slurmd has a log"));
        println!("after {launches} launches slurmd holds {:?} (blocks, bytes)", of_slurmd.last());
    }
    println!("slurmstepd holds {:?} with 2 tasks and {:?} with 12", of_stepd[0].iter().max(), of_stepd[1].iter().max());
    assert_eq!(of_slurmd[1], of_slurmd[0], "slurmd: blocks and bytes of ours after {few} launches and after {many}");
    let most = |tasks: usize| of_stepd[tasks].iter().copied().max();
    assert_eq!(most(1), most(0), "slurmstepd: blocks and bytes of ours with 2 tasks and with 12: {of_stepd:?}");

    let mut of_srun = Vec::new();
    sandbox.restart_slurmd();
    for tasks in [2, 16] {
        let log = home(&sandbox).join(format!("srun{tasks}.log"));
        let srun = format!("{VALGRIND} {ALL_KINDS} --log-file={} srun -Q -n{tasks} --palingenesis true", log.display());
        sandbox.run_as(&[], &srun, 120).ok();
        of_srun.push(held(&fs::read_to_string(log).unwrap()).expect("srun has a summary"));
    }
    println!("srun of 2 and of 16 tasks holds {of_srun:?}");
    assert_eq!(of_srun[0], of_srun[1], "srun: blocks and bytes of ours with 2 tasks and with 16");
}

/// The same by the kernel's count, without valgrind: Slurm's own growth with the plugin is
/// what it is without.
#[test]
fn slurmd_s_memory_grows_no_more_with_us_than_without() {
    let Some(sandbox) = Sandbox::up("slurmd-memory", &["--nodes", "1", "--cores", "4"]) else { return };
    let (few, many) = if rounds() > 1 { (50, 250) } else { (10, 60) };
    let plugin = format!("optional {}", library().display());
    let kib = |launches: usize, flag: &str| -> i64 {
        let line = format!(
            "for i in $(seq {launches}); do setpriv --reuid trainer --regid trainer --clear-groups srun -Q -n2 {flag} true || exit; done
             awk '/^RssAnon:/ {{ print $2 }}' /proc/$(pgrep -x slurmd)/status"
        );
        let said = sandbox.run_as(&["--as-root"], &line, 600).ok();
        said.out.trim().parse().unwrap_or_else(|_| panic!("{said:?}"))
    };
    let mut grown = Vec::new();
    for (lines, flag) in [(&[][..], ""), (&[plugin.as_str()][..], "--palingenesis")] {
        sandbox.plugstack(lines);
        sandbox.restart_slurmd();
        let first = kib(few, flag);
        let then = kib(many - few, flag);
        println!("'{flag}': RssAnon {first} KiB after {few} launches, {then} KiB after {many}");
        grown.push(then - first);
    }
    // Arenas of its threads come and go in steps of some pages; a leak of 1 KiB a launch
    // would be as many KiB as launches.
    assert!(grown[1] - grown[0] < ROOM_KIB, "slurmd grew by {} KiB without us and by {} with us", grown[0], grown[1]);
}

#[test]
fn no_memory_error_of_ours_in_srun_slurmd_and_slurmstepd() {
    if !has_valgrind() {
        return;
    }
    // With GPUs, so that the ranks meet and are bound.
    let root = open_folder().join("valgrind-machine");
    machine(&root, &CROSSED);
    let line = format!("optional {} root={}", library().display(), root.display());
    let Some(sandbox) =
        Sandbox::up("valgrind", &["--nodes", "1", "--sockets", "1", "--cores", "4", "--plugstack", &line])
    else {
        return;
    };
    if sandbox.run("valgrind --version").code != 0 {
        return println!("skipped: no valgrind in the tree");
    }
    start_slurmd(&sandbox, "slurmd", "");
    let srun = format!("{VALGRIND} --log-file={} srun", home(&sandbox).join("srun.%p.log").display());
    // With a site file, so that it is read and each step is logged.
    sandbox
        .run_root(
            "umask 022; mkdir -p /etc/palingenesis; printf '%s\\n' 'log = \"debug\"' '[profiles.mine]' \
             '[profiles.mine.env]' 'NCCL_IB_SL = 3' '[node.\"n[1-9]\".force]' 'NCCL_NET = \"IB\"' \
             >/etc/palingenesis/palingenesis.toml",
        )
        .ok();
    let runs = [
        ("--palingenesis=show", 0),
        ("", 0),
        ("--palingenesis=port=1", 78),
        ("--palingenesis=master=n1", 0),
        ("--palingenesis=mine", 0),
        ("--palingenesis=iface=nosuch0", 78),
    ];
    for (options, code) in runs.repeat(rounds()) {
        let said = sandbox.run_as(&[], &format!("{srun} -n2 {options} true"), 120);
        assert_eq!(said.code, code, "{options}: {}", said.err);
        assert!(!options.contains("show") || said.err.contains("beside GPU "), "{options}: {}", said.err);
    }
    stop_slurmd(&sandbox);

    let (mut seen, mut stepd) = (0, 0);
    for Log { name, text } in logs(&sandbox, "s") {
        seen += 1;
        stepd += usize::from(text.contains("slurmstepd"));
        let found = ours(&text);
        assert!(found.is_empty(), "{name}:\n{}", found.join("\n\n"));
    }
    // Six sruns, slurmd, and at least a slurmstepd with its tasks.
    assert!(seen >= 8 && stepd >= 5, "only {seen} logs, {stepd} of slurmstepd");
}
