//! Slow nodes: what one node shows and its peers do not. Everything is measured
//! against the step's own nodes, so that a cluster on which all are alike is left in
//! peace, whatever its clocks and links are.

use crate::facts::straggler::{Activity, Lanes};
use crate::plan::checks::Findings;

use super::super::report::NodeReport;
use super::groups::words;
use super::{Nodes, middle};

/// Shorter than this, in ticks of 10 ms over all CPUs, a share of time says nothing: the
/// nodes' times are not the same, and a moment's work is no neighbour's.
const LEAST_TICKS: u64 = 1000;

/// Stolen time of a node above that of its peers, in thousandths.
const STEAL: u64 = 50;

/// The same of time that others take.
const BUSY: u64 = 500;

/// The load above that of the peers, in thousandths of the node's CPUs.
const LOAD: u64 = 500;

/// A core that was throttled so often since its start, and so many times as often as
/// the peers' cores, gets too hot.
const THROTTLED: u64 = 1000;
const TIMES: u64 = 100;

/// A clock's limit below that of the peers, in thousandths of the most it could be;
/// and the clock itself, which flickers.
const LIMIT: u64 = 100;
const CLOCK: u64 = 300;

/// Nodes that a message names.
const MOST_NODES: usize = 8;

pub(super) fn slow(nodes: &Nodes, findings: &mut Findings) {
    let activity = |report: &NodeReport| report.activity.clone();
    high(
        nodes,
        findings,
        STEAL,
        |report| share(&activity(report), |of| of.steal),
        |named, others| {
            (
                format!(
                    "{named} of the CPU time there goes to other virtual machines (steal), on the other nodes {others}"
                ),
                "give back those nodes and ask the cluster's admins whether their hosts are overbooked",
            )
        },
    );
    // What imports a container's image is the step's own.
    let busy = |report: &NodeReport| match report.container {
        true => None,
        false => share(&activity(report), |of| of.busy),
    };
    high(nodes, findings, BUSY, busy, |named, others| {
        (
            format!(
                "{named} of the step's CPU time there was used before its ranks had started, on the other nodes {others}"
            ),
            "look there with top for what else runs on these CPUs",
        )
    });
    high_where(
        nodes,
        findings,
        LOAD,
        |report| load(&activity(report)),
        |report| is_loaded(&report.activity),
        |named, others| {
            (
                format!("{named} of the CPUs there had work before the step came, on the other nodes {others}"),
                "look there with top for processes that an earlier job left, or take whole nodes with --exclusive",
            )
        },
    );
    throttled(nodes, findings);
    low(nodes, findings, LIMIT, limit, |named, others| {
        (
            format!("the CPUs' clock is held at {named} of what they can, on the other nodes at {others}"),
            "tell the cluster's admins: scaling_max_freq differs there, a power limit or a setting of the firmware",
        )
    });
    low(nodes, findings, CLOCK, clock, |named, others| {
        (
            format!("the CPUs' clock is {named} of what they can, on the other nodes {others}"),
            "tell the cluster's admins: heat, power or the firmware may slow these CPUs down",
        )
    });
    links(nodes, findings, "GPU", |report| report.gpu_lanes.as_ref(), |lanes| u64::from(lanes.width));
    links(nodes, findings, "network card", |report| report.nic_lanes.as_ref(), of_card);
}

/// A part of the time, in thousandths.
fn share(activity: &Activity, part: impl Fn(&Activity) -> u64) -> Option<u64> {
    let ticks = Some(activity.ticks).filter(|ticks| *ticks >= LEAST_TICKS)?;
    thousandths(part(activity).min(ticks), ticks)
}

/// The load, which is compared. Threads that can run flicker from one moment to the next.
fn load(activity: &Activity) -> Option<u64> {
    thousandths(u64::from(activity.load?), u64::from(activity.cpus).checked_mul(100)?)
}

/// Whether the load is still there: it also counts a job that has just ended.
fn is_loaded(activity: &Activity) -> bool {
    let runnable = activity.runnable.and_then(|runnable| thousandths(runnable.into(), activity.cpus.into()));
    runnable.is_some_and(|runnable| runnable > LOAD)
}

fn limit(report: &NodeReport) -> Option<u64> {
    let clock = report.activity.clock.as_ref()?;
    thousandths(clock.limit.min(clock.most).into(), clock.most.into())
}

fn clock(report: &NodeReport) -> Option<u64> {
    let clock = report.activity.clock.as_ref()?;
    // A turbo clock is above what the kernel takes for the most.
    thousandths(clock.now?.min(clock.most).into(), clock.most.into())
}

/// A card does not lower its link's speed while it idles, as GPUs do.
fn of_card(lanes: &Lanes) -> u64 {
    u64::from(lanes.width).saturating_mul(u64::from(lanes.speed.max(1)))
}

fn thousandths(part: u64, of: u64) -> Option<u64> {
    let share = u128::from(part).checked_mul(1000)?.checked_div(u128::from(of))?;
    u64::try_from(share).ok()
}

fn percent(thousandths: u64) -> String {
    format!("{}%", (thousandths + 5) / 10)
}

type Told = (String, &'static str);

/// Names the nodes whose value is more than `margin` above the middle one.
fn high(
    nodes: &Nodes,
    findings: &mut Findings,
    margin: u64,
    value: impl Fn(&NodeReport) -> Option<u64>,
    tell: impl Fn(String, String) -> Told,
) {
    high_where(nodes, findings, margin, value, |_| true, tell);
}

/// The same of nodes of which something else is true too.
fn high_where(
    nodes: &Nodes,
    findings: &mut Findings,
    margin: u64,
    value: impl Fn(&NodeReport) -> Option<u64>,
    counts: impl Fn(&NodeReport) -> bool,
    tell: impl Fn(String, String) -> Told,
) {
    apart(
        nodes,
        findings,
        value,
        counts,
        // What all nodes have much of differs from one moment to the next.
        |own, middle| own > middle.saturating_add(margin) && own >= middle.saturating_mul(2),
        |values| middle(values, false),
        tell,
    );
}

/// The same of values that are too small.
fn low(
    nodes: &Nodes,
    findings: &mut Findings,
    margin: u64,
    value: impl Fn(&NodeReport) -> Option<u64>,
    tell: impl Fn(String, String) -> Told,
) {
    apart(
        nodes,
        findings,
        value,
        |_| true,
        |own, middle| own.saturating_add(margin) < middle,
        |values| middle(values, true),
        tell,
    );
}

fn apart(
    nodes: &Nodes,
    findings: &mut Findings,
    value: impl Fn(&NodeReport) -> Option<u64>,
    counts: impl Fn(&NodeReport) -> bool,
    is_apart: impl Fn(u64, u64) -> bool,
    middle: impl Fn(&[u64]) -> Option<u64>,
    tell: impl Fn(String, String) -> Told,
) {
    let known: Vec<(usize, u64)> = nodes.all().filter_map(|(place, report)| Some((place, value(report)?))).collect();
    let values: Vec<u64> = known.iter().map(|(_, value)| *value).collect();
    let Some(middle) = middle(&values) else { return };
    let counting: Vec<usize> = nodes.all().filter(|(_, report)| counts(report)).map(|(place, _)| place).collect();
    let is_slow = |(place, own): &(usize, u64)| is_apart(*own, middle) && counting.contains(place);
    let slow: Vec<(usize, u64)> = known.into_iter().filter(is_slow).collect();
    if slow.is_empty() {
        return;
    }
    let shown: Vec<String> =
        slow.iter().take(MOST_NODES).map(|(place, own)| format!("{}: {}", nodes.name(*place), percent(*own))).collect();
    let (message, cure) = tell(words(&shown, slow.len()), percent(middle));
    findings.warn(message, cure);
}

fn throttled(nodes: &Nodes, findings: &mut Findings) {
    let of = |value: fn(&Activity) -> Option<u64>| -> Vec<(usize, u64)> {
        nodes.all().filter_map(|(place, report)| Some((place, value(&report.activity)?))).collect()
    };
    let (now, ever) = (of(|of| of.throttled), of(|of| of.throttled_ever));
    let middle_of = |known: &[(usize, u64)]| middle(&known.iter().map(|(_, value)| *value).collect::<Vec<_>>(), false);
    let (Some(now_middle), Some(ever_middle)) = (middle_of(&now), middle_of(&ever)) else { return };
    let often = ever_middle.saturating_add(1).saturating_mul(TIMES).max(THROTTLED);
    let named = |known: &[(usize, u64)], least: u64| -> Vec<(usize, u64)> {
        known.iter().copied().filter(|(_, count)| *count >= least).collect()
    };
    let cure = "give back those nodes and tell the cluster's admins: the cooling may have failed";
    let tell = |slow: &[(usize, u64)]| {
        let shown = slow.iter().take(MOST_NODES).map(|(place, count)| format!("{}: {count} times", nodes.name(*place)));
        words(&shown.collect::<Vec<_>>(), slow.len())
    };
    let hot = named(&now, now_middle.saturating_add(1));
    if !hot.is_empty() {
        let message = format!(
            "CPU cores were throttled by heat while the step started, {}, on the other nodes {now_middle} times",
            tell(&hot)
        );
        findings.warn(message, cure);
        return;
    }
    let hot = named(&ever, often);
    if !hot.is_empty() {
        let message = format!(
            "CPU cores were throttled by heat since the machine's start, {}, on the other nodes {ever_middle} times",
            tell(&hot)
        );
        findings.warn(message, cure);
    }
}

/// A link that is narrower than its device can, and than the peers' are.
fn links<'a>(
    nodes: &'a Nodes,
    findings: &mut Findings,
    what: &str,
    lanes: impl Fn(&'a NodeReport) -> Option<&'a Lanes>,
    worth: impl Fn(&Lanes) -> u64,
) {
    let known: Vec<(usize, &Lanes)> = nodes.all().filter_map(|(place, report)| Some((place, lanes(report)?))).collect();
    let Some(middle) = middle(&known.iter().map(|(_, lanes)| worth(lanes)).collect::<Vec<_>>(), true) else { return };
    let could = |lanes: &Lanes| worth(&Lanes { width: lanes.most, speed: lanes.fastest, ..lanes.clone() });
    let is_slow = |lanes: &Lanes| worth(lanes) < middle && worth(lanes) < could(lanes);
    let slow: Vec<&(usize, &Lanes)> = known.iter().filter(|(_, lanes)| is_slow(lanes)).collect();
    let Some(peer) = known.iter().find(|(_, lanes)| worth(lanes) == middle).filter(|_| !slow.is_empty()) else {
        return;
    };
    let link = |lanes: &Lanes| match what {
        "GPU" => format!("x{}", lanes.width),
        _ => format!("x{} at {} GT/s", lanes.width, f64::from(lanes.speed) / 1000.0),
    };
    let shown = slow.iter().take(MOST_NODES).map(|(place, lanes)| {
        format!("{}: {} at {}", nodes.name(*place), link(lanes), crate::config::printable(&lanes.address))
    });
    let message = format!(
        "the PCI Express link of a {what} is slow: {}; on the other nodes {}",
        words(&shown.collect::<Vec<_>>(), slow.len()),
        link(peer.1)
    );
    findings.warn(
        message,
        "give back those nodes and tell the cluster's admins: the card may sit badly or its slot be worn",
    );
}
