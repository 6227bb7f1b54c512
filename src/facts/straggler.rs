//! What makes one node slower than its peers, as far as /proc and /sys tell it
//! without waiting: CPU time that others take, processors that are throttled by
//! heat or held at a low clock, PCI Express links that came up too narrow.
//!
//! Most of it are counters, which say something only as differences: a snapshot is
//! taken in user_init, before the node's tasks exist, and [`since`] reads once more
//! when the node's leader makes its report. Whatever time has passed between them is
//! what there is: nothing waits for more.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{CpuSet, PciAddress, files};

/// Longer than /proc/stat of the largest machine: its line of interrupts has a number
/// for each.
const LONGEST_STAT: u64 = 4 << 20;

/// CPUs whose throttle counters are read.
const MOST_THROTTLED: usize = 8;

/// CPUs whose clock is read: old kernels take 10 ms for each (arch/x86/kernel/cpu/aperfmperf.c).
const MOST_CLOCKS: usize = 2;

/// The time of a CPU in the ticks of /proc/stat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ticks {
    /// Spent for programs and the kernel.
    pub busy: u64,
    /// Spent by the hypervisor for others, while this machine wanted to run.
    pub steal: u64,
    /// All of it, idle too.
    pub all: u64,
}

/// What the counters show at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Each CPU's time; none where it is not known.
    pub cpus: BTreeMap<u32, Ticks>,
    /// The load average over the last minute, in hundredths.
    pub load: Option<u32>,
    /// Threads that could run, the reader among them.
    pub runnable: Option<u32>,
    /// How often cores were throttled since the machine's start: the sum over a few
    /// of them.
    pub throttled: Option<u64>,
}

/// What happened on a node between two snapshots, and the clocks at the second.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Activity {
    /// The time of the step's CPUs, in ticks.
    pub ticks: u64,
    /// Of that, spent for programs and the kernel.
    pub busy: u64,
    /// Of that, spent by the hypervisor for others.
    pub steal: u64,
    /// The node's CPUs.
    pub cpus: u32,
    /// The load average in hundredths before the node's tasks existed.
    pub load: Option<u32>,
    /// Threads that could run then, without the reader.
    pub runnable: Option<u32>,
    /// How often cores were throttled between the snapshots.
    pub throttled: Option<u64>,
    /// And since the machine's start.
    pub throttled_ever: Option<u64>,
    /// The clock of a few of the step's CPUs; none where the kernel tells none.
    pub clock: Option<Clock>,
}

/// The clock of the slowest of the CPUs that were looked at, in kHz.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Clock {
    /// scaling_cur_freq, only where the governor lets it not fall in idle times.
    pub now: Option<u32>,
    /// scaling_max_freq: up to where it may go.
    pub limit: u32,
    /// cpuinfo_max_freq: up to where it could.
    pub most: u32,
}

/// A PCI Express link as it came up, and as it could.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lanes {
    /// The device.
    pub address: String,
    /// Lanes in use.
    pub width: u32,
    /// Lanes that the device has.
    pub most: u32,
    /// Megatransfers a second in use. GPUs lower it while they idle.
    pub speed: u32,
    /// The most the device can.
    pub fastest: u32,
}

impl Snapshot {
    /// Reads a few small files below `root`; what cannot be read is absent.
    pub fn read(root: &Path) -> Snapshot {
        let stat = files::regular(&root.join("proc/stat"), LONGEST_STAT).ok().flatten().unwrap_or_default();
        let cpus = times(&String::from_utf8_lossy(&stat));
        let average = files::attribute(&root.join("proc/loadavg")).unwrap_or_default();
        let (load, runnable) = loads(&average);
        let throttled = throttled(root, &cpus);
        Snapshot { cpus, load, runnable, throttled }
    }
}

/// What happened since `first`, on the CPUs of `mask` where it is known.
pub fn since(root: &Path, first: &Snapshot, mask: Option<&CpuSet>) -> Activity {
    let second = Snapshot::read(root);
    let mask = mask.filter(|mask| !mask.is_empty());
    Activity { clock: clock(root, &second, mask), ..between(first, &second, mask) }
}

/// The difference of two snapshots.
pub fn between(first: &Snapshot, second: &Snapshot, mask: Option<&CpuSet>) -> Activity {
    let mut activity = Activity {
        cpus: u32::try_from(second.cpus.len()).unwrap_or(u32::MAX),
        load: first.load,
        runnable: first.runnable.map(|running| running.saturating_sub(1)),
        throttled_ever: second.throttled,
        ..Activity::default()
    };
    // A counter that fell: a CPU was taken offline and put back.
    if let (Some(before), Some(after)) = (first.throttled, second.throttled) {
        activity.throttled = after.checked_sub(before);
    }
    for (cpu, after) in second.cpus.iter().filter(|(cpu, _)| mask.is_none_or(|mask| mask.has(**cpu))) {
        let Some(before) = first.cpus.get(cpu) else { continue };
        let parts = [(after.all, before.all), (after.busy, before.busy), (after.steal, before.steal)];
        let parts = parts.map(|(after, before)| after.checked_sub(before));
        if let [Some(all), Some(busy), Some(steal)] = parts {
            activity.ticks = activity.ticks.saturating_add(all);
            activity.busy = activity.busy.saturating_add(busy);
            activity.steal = activity.steal.saturating_add(steal);
        }
    }
    activity
}

/// The lines `cpuN` of /proc/stat: user, nice, system, idle, iowait, irq, softirq,
/// steal; guests' time is in user and nice already (proc(5)).
fn times(text: &str) -> BTreeMap<u32, Ticks> {
    let mut cpus = BTreeMap::new();
    for line in text.lines().take_while(|line| line.starts_with("cpu")) {
        let mut words = line.split_ascii_whitespace();
        let number = words.next().and_then(|name| name.strip_prefix("cpu")?.parse().ok());
        let Some(number) = number else { continue };
        let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).take(8).collect();
        let of = |place: usize| ticks.get(place).copied().unwrap_or(0);
        let sum = |places: &[usize]| places.iter().fold(0u64, |sum, place| sum.saturating_add(of(*place)));
        let own = Ticks { busy: sum(&[0, 1, 2, 5, 6]), steal: of(7), all: sum(&[0, 1, 2, 3, 4, 5, 6, 7]) };
        cpus.insert(number, own);
    }
    cpus
}

/// "0.20 0.18 0.12 1/80 11206": the load in hundredths, and the threads that can run.
fn loads(text: &str) -> (Option<u32>, Option<u32>) {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let load = words.first().and_then(|load| load.parse::<f64>().ok());
    let load = load.filter(|load| (0.0..1e6).contains(load)).map(|load| (load * 100.0).round() as u32);
    let runnable = words.get(3).and_then(|threads| threads.split_once('/')?.0.parse().ok());
    (load, runnable)
}

/// A few CPUs, spread over all of them.
fn spread(cpus: impl ExactSizeIterator<Item = u32>, most: usize) -> impl Iterator<Item = u32> {
    let step = cpus.len().div_ceil(most.max(1)).max(1);
    cpus.step_by(step)
}

fn of_cpu(root: &Path, cpu: u32, name: &str) -> Option<u64> {
    files::attribute(&root.join(format!("sys/devices/system/cpu/cpu{cpu}/{name}")))?.parse().ok()
}

/// Intel's kernel driver counts; others have no such files.
fn throttled(root: &Path, cpus: &BTreeMap<u32, Ticks>) -> Option<u64> {
    let mut sum = None;
    for cpu in spread(cpus.keys().copied(), MOST_THROTTLED) {
        let Some(count) = of_cpu(root, cpu, "thermal_throttle/core_throttle_count") else {
            // Where one has none, the others have none either.
            break;
        };
        sum = Some(sum.unwrap_or(0u64).saturating_add(count));
    }
    sum
}

fn clock(root: &Path, seen: &Snapshot, mask: Option<&CpuSet>) -> Option<Clock> {
    let cpus: Vec<u32> = seen.cpus.keys().copied().filter(|cpu| mask.is_none_or(|mask| mask.has(*cpu))).collect();
    let mut slowest: Option<Clock> = None;
    for cpu in spread(cpus.into_iter(), MOST_CLOCKS) {
        let khz = |name: &str| of_cpu(root, cpu, &format!("cpufreq/{name}")).and_then(|khz| u32::try_from(khz).ok());
        let (Some(limit), Some(most)) = (khz("scaling_max_freq"), khz("cpuinfo_max_freq")) else { break };
        let governor = root.join(format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"));
        let steady = files::attribute(&governor).as_deref() == Some("performance");
        let now = if steady { khz("scaling_cur_freq") } else { None };
        let key = |clock: &Clock| (clock.limit, clock.now.unwrap_or(u32::MAX));
        let own = Clock { now, limit, most };
        if slowest.as_ref().is_none_or(|slowest| key(&own) < key(slowest)) {
            slowest = Some(own);
        }
    }
    slowest
}

/// The links of these devices, of those that tell.
pub(super) fn lanes(root: &Path, devices: impl Iterator<Item = PciAddress>) -> Vec<Lanes> {
    let of = |address: PciAddress| {
        let directory = root.join(format!("sys/bus/pci/devices/{address}"));
        let text = |name: &str| files::attribute(&directory.join(name));
        let number = |name: &str| text(name)?.parse::<u32>().ok().filter(|width| (1..=64).contains(width));
        // "16.0 GT/s PCIe", "8 GT/s", "Unknown".
        let speed = |name: &str| {
            let transfers = text(name)?.split_ascii_whitespace().next()?.parse::<f64>().ok()?;
            (0.1..1e4).contains(&transfers).then_some((transfers * 1000.0) as u32)
        };
        Some(Lanes {
            address: address.to_string(),
            width: number("current_link_width")?,
            most: number("max_link_width")?,
            speed: speed("current_link_speed").unwrap_or(0),
            fastest: speed("max_link_speed").unwrap_or(0),
        })
    };
    devices.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::rdma::tests::Tree;

    /// The fields in the order of proc(5): user nice system idle iowait irq softirq
    /// steal guest guest_nice.
    const FIRST: &str = "cpu  300 0 100 3600 40 0 0 60 0 0\n\
                         cpu0 100 0 50 1800 20 0 0 30 0 0\n\
                         cpu1 200 0 50 1800 20 0 0 30 0 0\n\
                         intr 1462898 1 2 3\nctxt 115315\nbtime 769041601\nprocesses 86031\nprocs_running 6\n";
    const SECOND: &str = "cpu  390 10 130 4340 80 5 5 140 70 0\n\
                          cpu0 190 10 80 1840 60 5 5 110 70 0\n\
                          cpu1 200 0 50 2500 20 0 0 30 0 0\n\
                          intr 1 1\n";

    fn at(tree: &Tree, stat: &str, load: &str) -> Snapshot {
        tree.file("proc/stat", stat).file("proc/loadavg", load);
        Snapshot::read(tree.root())
    }

    #[test]
    fn the_difference_of_two_snapshots_of_proc_stat() {
        let tree = Tree::new("straggler-stat");
        // The example of proc(5).
        let first = at(&tree, FIRST, "0.20 0.18 0.12 1/80 11206\n");
        assert_eq!((first.load, first.runnable, first.cpus.len()), (Some(20), Some(1), 2));
        let second = at(&tree, SECOND, "9.99 0.18 0.12 7/80 11206\n");
        let whole = between(&first, &second, None);
        // By hand: cpu0 90+10+30+5+5 busy, 40 idle, 40 waiting, 80 stolen; cpu1 700 idle.
        assert_eq!((whole.ticks, whole.busy, whole.steal, whole.cpus), (1000, 140, 80, 2));
        assert_eq!((whole.load, whole.runnable), (Some(20), Some(0)));
        let one = CpuSet::parse("0").unwrap();
        let own = between(&first, &second, Some(&one));
        assert_eq!((own.ticks, own.busy, own.steal), (300, 140, 80));
        // A CPU that was taken away and came back counts from zero: it is left out.
        let back = between(&second, &first, None);
        assert_eq!((back.ticks, back.busy, back.steal), (0, 0, 0));
    }

    #[test]
    fn what_is_not_there_is_not_known_and_garbage_is_no_number() {
        let nothing = since(Path::new("/nonexistent"), &Snapshot::default(), None);
        assert_eq!(nothing, Activity::default());
        let tree = Tree::new("straggler-garbage");
        for stat in ["", "cpu\n", "cpu0\n", "cpux 1 2\n", "cpu0 -1 2 x\n", "cpu99999999999 1\n", "\0\n"] {
            let seen = at(&tree, stat, "x y z w\n");
            assert!(seen.cpus.values().all(|ticks| ticks.all == 0), "{stat:?}");
            assert_eq!((seen.load, seen.runnable), (None, None));
        }
        let most = format!("cpu0 {0} {0} {0} {0} {0} {0} {0} {0}\n", u64::MAX);
        assert_eq!(at(&tree, &most, "1e9 0 0 1/2 3\n").load, None);
    }

    #[test]
    fn throttle_counters_and_clocks_of_a_few_cpus() {
        let tree = Tree::new("straggler-cpus");
        let cpus: String = (0..64).map(|cpu| format!("cpu{cpu} 1 1 1 1 1 1 1 1 0 0\n")).collect();
        for cpu in 0..64 {
            let cpu = format!("sys/devices/system/cpu/cpu{cpu}");
            tree.file(&format!("{cpu}/thermal_throttle/core_throttle_count"), "3\n");
            tree.file(&format!("{cpu}/cpufreq/scaling_max_freq"), "2000000\n");
            tree.file(&format!("{cpu}/cpufreq/cpuinfo_max_freq"), "3800000\n");
            tree.file(&format!("{cpu}/cpufreq/scaling_cur_freq"), "800000\n");
            tree.file(&format!("{cpu}/cpufreq/scaling_governor"), "powersave\n");
        }
        let first = at(&tree, &cpus, "0 0 0 1/1 1\n");
        assert_eq!(first.throttled, Some(24));
        tree.file("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "10\n");
        let seen = since(tree.root(), &first, None);
        assert_eq!((seen.throttled, seen.throttled_ever), (Some(7), Some(31)));
        // An idle CPU runs slowly where its governor lets it.
        assert_eq!(seen.clock, Some(Clock { now: None, limit: 2_000_000, most: 3_800_000 }));
        tree.file("sys/devices/system/cpu/cpu3/cpufreq/scaling_governor", "performance\n");
        let mask = CpuSet::parse("3").unwrap();
        assert_eq!(since(tree.root(), &first, Some(&mask)).clock.and_then(|clock| clock.now), Some(800_000));
    }

    #[test]
    fn links_as_sysfs_shows_them() {
        let tree = Tree::new("straggler-lanes");
        let address = |text| PciAddress::parse(text).unwrap();
        let (gpu, odd) = (address("0000:1b:00.0"), address("0000:1c:00.0"));
        for (device, name, text) in [
            (gpu, "current_link_width", "8"),
            (gpu, "max_link_width", "16"),
            (gpu, "current_link_speed", "2.5 GT/s PCIe"),
            (gpu, "max_link_speed", "32.0 GT/s PCIe"),
            // A virtual function.
            (odd, "current_link_width", "0"),
            (odd, "max_link_width", "0"),
            (odd, "current_link_speed", "Unknown"),
        ] {
            tree.file(&format!("sys/bus/pci/devices/{device}/{name}"), &format!("{text}\n"));
        }
        let seen = lanes(tree.root(), [gpu, odd, address("0000:1d:00.0")].into_iter());
        let expected = Lanes { address: "0000:1b:00.0".into(), width: 8, most: 16, speed: 2500, fastest: 32000 };
        assert_eq!(seen, [expected]);
    }

    #[test]
    fn this_machine_has_cpus() {
        let seen = Snapshot::read(Path::new("/"));
        assert!(!seen.cpus.is_empty() && seen.load.is_some() && seen.runnable.is_some());
        assert!(seen.cpus.values().all(|ticks| ticks.all >= ticks.busy));
    }
}
