//! What a task and its slurmstepd are besides their variables: descriptors, signals,
//! limits, ids, scheduling, places. All of it is the same without the plugin, with it, and
//! with the flag, except for what the flag is there to change, which is named here.
//!
//! A recorder in Perl is the task itself, so that what an exec would take back is seen,
//! too. What this cannot show: other kernels' and Slurm's other plugins' ideas (cgroups of
//! task/cgroup, other process trackers).

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use common::crossed::{CROSSED, machine};
use common::{Sandbox, library, open_folder, slurm};

/// One line for each thing, NAME<tab>VALUE. Numbers that are another's each time (pids,
/// inodes of pipes) are told by what they are to each other.
const RECORDER: &str = r#"
use strict; use warnings;
my ($out, $tasks) = @ARGV;
my $arm = `uname -m` =~ /aarch64/;
my $prctl = $arm ? 167 : 157;
sub text { my ($file) = @_; open(my $in, '<', $file) or return "?"; local $/; my $text = <$in>; close $in; $text // "" }
my @lines;
sub say_it { my ($name, $value) = @_; $value =~ s/\s+/ /g; push @lines, "$name\t$value\n" }
# First, before anything is opened here.
opendir(my $dir, "/proc/self/fd") or die;
my @fds = sort { $a <=> $b } grep { /^\d+$/ && $_ != fileno($dir) } readdir $dir;
closedir $dir;
for my $fd (@fds) {
    my $target = readlink("/proc/self/fd/$fd") // next;
    $target =~ s/\[\d+\]/[]/;
    my $flags = text("/proc/self/fdinfo/$fd") =~ /flags:\s*(\d+)/ ? $1 : "?";
    say_it("fd $fd", "$target $flags");
}
for my $line (split /\n/, text("/proc/self/status")) {
    my ($name, $value) = $line =~ /^(\w+):\s*(.*)/ or next;
    # Sizes; pids; how often it was scheduled; how many signals wait for all that the user runs.
    next if $name =~ /^(SigQ|Vm|Rss|Hugetlb|FDSize|Pid|PPid|Tgid|Ngid|NStgid|NSpid|NSpgid|NSsid|State|voluntary|nonvoluntary)/;
    say_it("status $name", $value);
}
say_it("limit", $_) for split /\n/, text("/proc/self/limits");
say_it("file $_", text("/proc/self/$_"))
    for qw(oom_score_adj coredump_filter timerslack_ns personality setgroups uid_map gid_map timers loginuid);
(my $cgroup = text("/proc/self/cgroup")) =~ s/job_\d+/job/g;
say_it("cgroup", $cgroup);
say_it("link $_", readlink("/proc/self/$_") // "?") for qw(cwd root exe), map { "ns/$_" } qw(mnt net pid user ipc uts cgroup);
my ($pgrp, $session, $tty) = (split / /, (text("/proc/self/stat") =~ /\) (.*)/s)[0])[2, 3, 4];
say_it("group", join " ", $pgrp == $$ ? "own" : $pgrp == getppid() ? "parent's" : "other", $session == $$ ? "own" : $session == getppid() ? "parent's" : "other", $tty);
say_it("nice", getpriority(0, 0));
say_it("policy of memory", (split / /, (split /\n/, text("/proc/self/numa_maps"))[0] // "? ?")[1]);
my @ticks = split / /, (text("/proc/self/stat") =~ /\) (.*)/s)[0];
say_it("scheduling", "policy $ticks[38] real-time priority $ticks[37]");
for my $pair ([2, "signal at the parent's death"]) { my $buffer = pack("i", -1); syscall($prctl, $pair->[0], $buffer, 0, 0, 0); say_it($pair->[1], unpack("i", $buffer)) }
{ my $buffer = pack("i", -1); syscall($prctl, 37, $buffer, 0, 0, 0); say_it("reaper of orphans", unpack("i", $buffer)) }
say_it("may be dumped", syscall($prctl, 3, 0, 0, 0, 0));
say_it("huge pages", syscall($prctl, 42, 0, 0, 0, 0));
say_it("secure bits", syscall($prctl, 27, 0, 0, 0, 0));
say_it("env $_", $ENV{$_}) for sort keys %ENV;
# All are here: then the parent's children are these.
open(my $mark, '>', "$out.here.$ENV{SLURM_PROCID}") or die; close $mark;
for (1 .. 600) { last if @{[glob "$out.here.*"]} >= $tasks; select(undef, undef, undef, 0.1) }
select(undef, undef, undef, 0.5);
my $parent = getppid();
my @children = map { text("/proc/$_/comm") =~ s/\n//r } grep { text("/proc/$_/stat") =~ /\) \S (\d+) / && $1 == $parent } map { m{(\d+)$} } glob "/proc/[0-9]*";
say_it("children of the parent", join " ", sort @children);
open(my $to, '>', "$out.tmp.$ENV{SLURM_PROCID}") or die; print $to @lines; close $to;
rename "$out.tmp.$ENV{SLURM_PROCID}", "$out.$ENV{SLURM_PROCID}";
# slurmstepd is looked at meanwhile.
for (1 .. 600) { last if -e "$out.go"; select(undef, undef, undef, 0.1) }
"#;

/// Values that are another one's in each step.
const OF_THE_STEP: &[&str] = &[
    "SLURM_JOB_ID",
    "SLURM_JOB_SLUID",
    "SLURM_JOBID",
    "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_TASK_PID",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
];

/// Each task's things, and slurmstepd's.
#[derive(Debug, PartialEq)]
struct Seen {
    tasks: Vec<BTreeMap<String, String>>,
    stepd: String,
}

impl Seen {
    /// Takes out what `is` says, and gives back its names.
    fn without(&mut self, is: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let mut taken = BTreeSet::new();
        for task in &mut self.tasks {
            taken.extend(task.keys().filter(|name| is(name)).cloned());
            task.retain(|name, _| !is(name));
        }
        taken
    }
}

/// Perl is part of every Debian, but not of every system.
fn has_perl() -> bool {
    let found = std::process::Command::new("perl").arg("-v").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: no perl, in which the recorder is written");
    }
    found
}

/// A step of so many recorders, with these lines in plugstack.conf and these options.
fn step(sandbox: &Sandbox, tasks: usize, name: &str, plugstack: &[&str], options: &str) -> Seen {
    sandbox.plugstack(plugstack);
    let home = sandbox.dir().join("home/trainer");
    fs::write(home.join("record.pl"), RECORDER).unwrap();
    // As the user would: with limits, a mask and an ignored signal of the user's own.
    let said = sandbox.run_root(&format!(
        "cd {home}; rm -f {name}.*
         setpriv --reuid trainer --regid trainer --init-groups bash -c '
             export HOME={home}; cd; umask 027; ulimit -S -n 777; ulimit -c 0; ulimit -S -s 5000; trap \"\" USR2
             exec srun -Q -n{tasks} {options} perl record.pl $HOME/{name} {tasks}' & srun=$!
         for i in {{1..600}}; do [ $(ls {name}.[0-9]* 2>/dev/null | wc -l) = {tasks} ] && break; sleep 0.1; done
         for stepd in $(pgrep -x slurmstepd); do
             for fd in /proc/$stepd/fd/*; do
                 echo \"fd $(readlink $fd | sed 's/[0-9]\\+/N/g') $(grep flags: /proc/$stepd/fdinfo/${{fd##*/}})\"
             done | sort | uniq -c
             grep -E '^(Sig|Umask|Threads|Cap|NoNewPrivs|Seccomp|Uid|Gid|Groups)' /proc/$stepd/status | grep -v SigQ
             cat /proc/$stepd/limits /proc/$stepd/oom_score_adj; readlink /proc/$stepd/cwd | sed 's/[0-9]\\+/N/g'
             ps -o stat=,comm= --ppid $stepd | sed 's/^[RD]/S/' | sort | uniq -c
         done
         touch {name}.go; wait $srun; echo code $?",
        home = home.display(),
    ));
    assert!(said.out.ends_with("code 0\n"), "{name}: {said:?}");
    let task = |rank: usize| -> BTreeMap<String, String> {
        let text = fs::read_to_string(home.join(format!("{name}.{rank}"))).unwrap();
        let mut found = BTreeMap::new();
        for line in text.lines() {
            let (name, value) = line.split_once('\t').unwrap();
            let variable = name.strip_prefix("env ");
            let value = if variable.is_some_and(|name| OF_THE_STEP.contains(&name)) { "(the step's)" } else { value };
            // Several of a name: limits.
            found
                .entry(if name == "limit" {
                    format!("limit {}", value.split("  ").next().unwrap())
                } else {
                    name.into()
                })
                .or_insert_with(String::new)
                .push_str(value);
        }
        found
    };
    Seen { tasks: (0..tasks).map(task).collect(), stepd: said.out }
}

/// Takes out what the flag sets: what it says that it has set, and its own. Gives back the
/// variables' names.
fn without_ours(seen: &mut Seen) -> BTreeSet<String> {
    let told = seen.tasks.iter().filter_map(|task| task.get("env PALINGENESIS_SET"));
    // "7.0 RANK=340ca71c …"
    let told: BTreeSet<String> = told
        .flat_map(|text| text.split(' ').filter_map(|word| word.split_once('=')))
        .map(|(name, _)| format!("env {name}"))
        .collect();
    // In which srun hands an option over: where there are several, slurmstepd of 24.11 and
    // 26.05 leaves one of them to the task (measured).
    let handed = |name: &str| slurm() >= (24, 11) && name.starts_with("env _SLURM_SPANK_OPTION_");
    seen.without(|name| told.contains(name) || name.starts_with("env PALINGENESIS_") || handed(name))
}

/// What differs, in words.
fn differences(seen: &Seen, other: &Seen) -> Vec<String> {
    let mut found = Vec::new();
    for (rank, (one, other)) in seen.tasks.iter().zip(&other.tasks).enumerate() {
        for name in one.keys().chain(other.keys()).collect::<BTreeSet<_>>() {
            if one.get(name) != other.get(name) {
                found.push(format!("task {rank}: {name}: {:?}, and not {:?}", one.get(name), other.get(name)));
            }
        }
    }
    let lines = |seen: &Seen| seen.stepd.lines().map(String::from).collect::<BTreeSet<_>>();
    found.extend(lines(seen).symmetric_difference(&lines(other)).map(|line| format!("slurmstepd: {line}")));
    found
}

/// <https://github.com/SchedMD/slurm/pull/19>: descriptors that tasks had from slurmstepd.
#[test]
fn a_task_has_nothing_but_its_variables_from_us() {
    if !has_perl() {
        return;
    }
    let Some(sandbox) = Sandbox::up("undisturbed", &["--nodes", "1", "--cores", "4"]) else { return };
    let plugin = format!("required {}", library().display());
    let without = step(&sandbox, 4, "without", &[], "");
    // The recorder sees what it is there for.
    for (name, part) in [
        ("fd 1", "pipe:[]"),
        ("status SigIgn", ""),
        ("status Umask", "0027"),
        ("limit Max open files 777", "777"),
        ("children of the parent", "perl perl perl perl"),
        ("signal at the parent's death", "0"),
    ] {
        let found: Vec<&String> =
            without.tasks[0].iter().filter(|(own, _)| own.starts_with(name)).map(|(_, value)| value).collect();
        assert!(!found.is_empty() && found[0].contains(part), "{name}: {:#?}", without.tasks[0]);
    }
    assert!(without.stepd.contains("SigBlk") && without.stepd.contains("perl"), "{}", without.stepd);

    let unused = step(&sandbox, 4, "unused", &[&plugin], "");
    assert_eq!(differences(&unused, &without), Vec::<String>::new(), "without the flag");

    // No GPUs here, so nothing is bound: affinity and memory policy stay as well.
    let mut used = step(&sandbox, 4, "used", &[&plugin], "--palingenesis");
    let set = without_ours(&mut used);
    assert!(set.contains("env RANK") && set.contains("env MASTER_PORT"), "{set:?}");
    assert_eq!(differences(&used, &without), Vec::<String>::new(), "with the flag; it has set {set:?}");
    // With all that the flag can do before the start.
    let options = "--palingenesis=rundir=$HOME/kept --palingenesis-output=$HOME/run --palingenesis-warm=true";
    let mut all = step(&sandbox, 4, "all", &[&plugin], options);
    without_ours(&mut all);
    assert_eq!(differences(&all, &without), Vec::<String>::new(), "with output and warm-up");
}

/// What binding is there to change, and nothing else: the mask, which is inherited by
/// name only ("status Cpus_allowed"), and where memory comes from.
#[test]
fn binding_changes_the_mask_and_the_memory_s_policy_and_nothing_else() {
    if !has_perl() {
        return;
    }
    let root = open_folder().join("undisturbed-machine");
    machine(&root, &CROSSED);
    let options = ["--nodes", "1", "--sockets", "1", "--cores", "4", "--gpus", "2"];
    let Some(sandbox) = Sandbox::up("undisturbed-bound", &options) else { return };
    let plugin = format!("required {} root={}", library().display(), root.display());
    let step_options = "--gpus-per-node=2";
    let mut without = step(&sandbox, 2, "without", &[], step_options);
    let mut bound = step(&sandbox, 2, "bound", &[&plugin], &format!("{step_options} --palingenesis"));
    without_ours(&mut bound);
    let meant = |name: &str| ["policy of memory", "status Cpus_allowed", "status Cpus_allowed_list"].contains(&name);
    let mask =
        |seen: &Seen| seen.tasks.iter().map(|task| task["status Cpus_allowed_list"].clone()).collect::<BTreeSet<_>>();
    // Else the test would show nothing.
    assert!(mask(&bound) != mask(&without), "nothing was bound: {:?}", mask(&bound));
    without.without(meant);
    bound.without(meant);
    assert_eq!(differences(&bound, &without), Vec::<String>::new());
}

/// A TaskProlog, the program and a TaskEpilog are whoever's the user lets in.
#[test]
fn the_launch_s_secret_is_in_no_environment_of_the_node() {
    let Some(sandbox) = Sandbox::up("secret", &["--nodes", "2", "--cores", "4"]) else { return };
    let plugin = format!("required {}", library().display());
    let copy = open_folder().join("libpalingenesis-second.so");
    fs::copy(library(), &copy).unwrap();
    for plugstack in [&[plugin.clone()][..], &[plugin.clone(), format!("required {}", copy.display())]] {
        sandbox.plugstack(&plugstack.iter().map(String::as_str).collect::<Vec<_>>());
        let said = sandbox.run(
            "cd; rm -rf seen; mkdir seen
             printf '#!/bin/sh\\nenv >%s/seen/$1$SLURM_PROCID.$$\\n' $HOME >look; chmod 755 look
             printf '#!/bin/sh\\nexec %s/look prolog\\n' $HOME >prolog; printf '#!/bin/sh\\nexec %s/look epilog\\n' $HOME >epilog
             chmod 755 prolog epilog
             srun -Q -N2 -n4 --ntasks-per-node=2 --task-prolog=$HOME/prolog --task-epilog=$HOME/epilog --palingenesis \\
                 sh -c './look program; [ $RANK != 3 ] || exit 3'
             echo code $?; ls seen | sed 's/[0-9.]*$//' | sort | uniq -c | xargs
             grep -hE '^SLURM_PALINGENESIS_NONCE=|[0-9a-f]{64}' seen/* | sort -u",
        );
        // That the nodes met, and that srun got the record of rank 3, they owe to the secret.
        let [code, files, rest @ ..] = &said.out.lines().collect::<Vec<_>>()[..] else { panic!("{said:?}") };
        assert_eq!((*code, *files), ("code 3", "4 epilog 4 program 4 prolog"), "{said:?}");
        assert!(rest.iter().all(|line| *line == "SLURM_PALINGENESIS_NONCE=-"), "{said:?}");
        let told =
            said.ours().into_iter().filter(|line| line.contains("rank 3 (") && line.contains("failed first")).count();
        assert_eq!(told, 1, "{said:?}");
        assert!(!said.err.contains("no secret") && !said.err.contains("warning"), "{said:?}");
    }
    let _ = fs::remove_file(copy);
}

/// Eight ends of four pipes for each of 64 tasks while they are forked, as far as 22.05.8
/// has them at the same time, and what slurmstepd needs beside them, at most 46 (measured).
const FEW: u32 = 8 * 64 + 48;

/// <https://github.com/SchedMD/slurm/pull/19>: with many tasks slurmstepd was out of
/// descriptors. What is hardly enough without us is enough with us.
#[test]
fn sixty_four_tasks_start_with_as_few_descriptors_as_without_us() {
    let Some(sandbox) = Sandbox::up("few-descriptors", &["--nodes", "1", "--cores", "64"]) else { return };
    let starts = |flag: &str| {
        let said = sandbox.run_root(&format!(
            "for one in $(pgrep -x slurmd); do prlimit --pid $one --nofile={FEW}:{FEW}; done
             cd /tmp; HOME=/tmp timeout -k 3 40 setpriv --reuid trainer --regid trainer --init-groups \
                 srun -Q -K -n64 {flag} sh -c 'ulimit -n'"
        ));
        (said.out == format!("{FEW}\n").repeat(64), said)
    };
    let (started, said) = starts("");
    if !started {
        println!("skipped: this Slurm needs more than {FEW} descriptors for 64 tasks: {said:?}");
        return;
    }
    sandbox.plugstack(&[&format!("required {}", library().display())]);
    for flag in ["", "--palingenesis"] {
        for _ in 0..3 {
            let (started, said) = starts(flag);
            assert!(started && said.code == 0 && said.ours().is_empty(), "'{flag}': {said:?}");
        }
    }
}
