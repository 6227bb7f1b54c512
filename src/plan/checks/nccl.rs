//! Checks of what NCCL's variables hold. NCCL reads most of them with
//! `strtoll(value, NULL, 0)` and never complains: a word is 0, a unit is cut off,
//! a leading 0 makes a number octal (src/misc/param.cc).
//!
//! A value is an error only where NCCL ends at it: every other one lets a job
//! start, if slowly or not as meant.

use super::lists::{LONGEST, NameList, corrected};
use super::version::{NCCL, PYTORCH, Version};
use super::{Findings, From, Phase, Rule, Severity, Subject, Value};
use crate::config::{nearest, printable};
use crate::plan::Shape;
use crate::plan::catalog::{self, Entry, Fault, Level, Reader, ib_timeout_seconds, nccl_integer};

use Phase::{Environment, Launch, Node};
use Severity::{Error, Info};

const WARNING: Severity = Severity::Warning;

/// Checks of this file. What depends on the versions in a container, or on what
/// another layer sets, is looked at on the node.
pub(super) const RULES: &[Rule] = &[
    Rule::new("ib-timeout-range", Environment, WARNING, "NCCL_IB_TIMEOUT outside 1 to 31", ib_timeout_range),
    Rule::new(
        "ib-timeout-low",
        Environment,
        WARNING,
        "NCCL_IB_TIMEOUT below 14: less than half a second",
        ib_timeout_low,
    ),
    Rule::new("ib-retry", Environment, WARNING, "NCCL_IB_RETRY_CNT outside 0 to 7", ib_retry),
    Rule::new("nccl-bool-word", Environment, WARNING, "a word where NCCL reads a number", bool_word),
    Rule::new("nccl-octal", Environment, WARNING, "a leading 0, which makes a number octal for NCCL", octal),
    Rule::new("nccl-trailing", Environment, WARNING, "text behind a number, which NCCL ignores", trailing),
    Rule::new("gdr-level-int", Environment, WARNING, "NCCL_NET_GDR_LEVEL as a number", gdr_level_int),
    Rule::new("level-case", Environment, WARNING, "a distance that is none of NCCL's words", level_case),
    Rule::new("gdr-dead-name", Environment, Info, "names that NCCL gave up long ago", gdr_dead_name),
    Rule::new(
        "ifname-grammar",
        Environment,
        Error,
        "NCCL_SOCKET_IFNAME: misplaced ^ and =, blanks, ports, RDMA names",
        ifname_grammar,
    ),
    Rule::new(
        "hca-grammar",
        Environment,
        WARNING,
        "NCCL_IB_HCA: misplaced ^ and =, blanks, ports that are none",
        hca_grammar,
    ),
    Rule::new("algo-proto", Environment, Error, "NCCL_ALGO and NCCL_PROTO: unknown words; set at all", algo_proto),
    Rule::new("debug-file", Launch, WARNING, "NCCL_DEBUG_FILE: one file for several ranks, ~", debug_file),
    Rule::new("debug-word", Environment, WARNING, "NCCL_DEBUG, NCCL_DEBUG_SUBSYS: unknown words", debug_word),
    Rule::new("subsys-no-info", Node, Info, "NCCL_DEBUG_SUBSYS without NCCL_DEBUG=INFO", subsys_no_info),
    Rule::new("sockets-product", Node, WARNING, "more socket threads or sockets than NCCL takes", sockets_product),
    Rule::new("ctas", Node, WARNING, "NCCL_MIN_CTAS, NCCL_MAX_CTAS: out of range or crossed", ctas),
    Rule::new("nthreads", Environment, WARNING, "NCCL_NTHREADS other than 64, 128, 256, 512", nthreads),
    Rule::new("phantom", Environment, WARNING, "names that nobody reads, misspelt ones", phantom),
    Rule::new("version-gate", Node, WARNING, "variables that the image's NCCL or PyTorch does not read", version_gate),
    Rule::new("p2p-disabled", Node, WARNING, "NCCL_P2P_DISABLE=1 where NVLink joins the GPUs", p2p_disabled),
    Rule::new("hostid", Launch, WARNING, "NCCL_HOSTID, which is then the same on all nodes", hostid),
    Rule::new("shm-disabled", Environment, WARNING, "NCCL_SHM_DISABLE left on", shm_disabled),
];

const IB_TIMEOUT: &str = "NCCL_IB_TIMEOUT";

/// NCCL's own integers among what others than we have set, with what is wrong.
fn faults<'a>(subject: &Subject<'a>) -> impl Iterator<Item = (&'a Value, Fault)> {
    subject.values.iter().filter(|value| value.from != From::Ours && value.name.starts_with("NCCL_")).filter_map(
        |value| {
            let entry = catalog::entry(&value.name).filter(|entry| entry.reader == Reader::Nccl)?;
            Some((value, entry.grammar.fault(&value.value)?))
        },
    )
}

/// What somebody else than we set a variable to, unless to nothing, which NCCL
/// takes as unset.
fn given<'a>(subject: &Subject<'a>, name: &str) -> Option<&'a Value> {
    subject.given(name).filter(|value| !value.value.is_empty())
}

/// The number NCCL reads.
fn number(value: &Value) -> Option<i64> {
    nccl_integer(&value.value).map(|(number, _)| number)
}

/// The exponent whose seven tries last that long.
fn exponent_for(seconds: i64) -> Option<i64> {
    (1..=31).find(|exponent| ib_timeout_seconds(*exponent).is_some_and(|(_, all)| all >= seconds as f64))
}

/// How long NCCL's seven tries last, for people.
fn seven_tries(exponent: i64) -> String {
    match ib_timeout_seconds(exponent) {
        None => "for ever".into(),
        Some((_, all)) if all < 10.0 => format!("{all:.1} s"),
        Some((_, all)) if all < 120.0 => format!("{all:.0} s"),
        Some((_, all)) if all < 7200.0 => format!("{:.0} minutes", all / 60.0),
        Some((_, all)) => format!("{:.0} hours", all / 3600.0),
    }
}

/// A value in seconds, as many write it, is out of range: 60
/// (<https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>), 120.
fn ib_timeout_range(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, IB_TIMEOUT) else { return };
    let shown = value.shown();
    let unset = "write a number from 1 to 31 (22 is two minutes), or unset it";
    match nccl_integer(&value.value) {
        None => findings.warn(format!("{shown}: no number that NCCL can hold, so it uses its default"), unset),
        Some((_, rest)) if rest == value.value => {
            findings.warn(format!("{shown}: NCCL reads a word as 0, and 0 waits for ever at a dead link"), unset);
        }
        Some((0, _)) => findings.warn(format!("{shown} waits for ever at a dead link, and the job with it"), unset),
        Some((number, _)) if number < 0 => {
            findings.warn(
                format!("{shown}: no exponent from 1 to 31; the card takes its lowest bits, and waits for hours at a dead link"),
                unset,
            );
        }
        Some((number, _)) if number > 31 => {
            let waits = seven_tries(number & 31);
            let cure = match exponent_for(number) {
                Some(exponent) => format!("write {exponent} if {number} seconds are meant, or unset it"),
                None => unset.into(),
            };
            findings.warn(
                format!(
                    "{shown} is no number of seconds but an exponent from 1 to 31 (4.096 us * 2^value, seven times): 22 is \
                     two minutes, above 31 is endless by NCCL's guide, and {waits} on a card that takes the lowest 5 bits"
                ),
                cure,
            );
        }
        Some(_) => {}
    }
}

fn ib_timeout_low(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, IB_TIMEOUT) else { return };
    if let Some(low @ 1..=13) = number(value) {
        let time = seven_tries(low);
        findings.warn(
            format!(
                "{}: seven tries of 4.096 us * 2^{low} are {time}: a short pause of the network ends the job",
                value.shown()
            ),
            "unset it (NCCL's default, 20, is 30 s), or write 22 (two minutes)",
        );
    }
}

fn ib_retry(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_IB_RETRY_CNT") else { return };
    if let Some(retries) = number(value).filter(|retries| !(0..=7).contains(retries)) {
        findings.warn(
            format!("{}: the card counts tries in three bits, 0 to 7; {retries} is cut or refused", value.shown()),
            "unset it: 7 is the default; for a longer wait raise NCCL_IB_TIMEOUT by one, which doubles it",
        );
    }
}

fn is_on(word: &str) -> bool {
    ["true", "yes", "on", "y", "t", "enable", "enabled"].contains(&word)
}

fn is_off(word: &str) -> bool {
    ["false", "no", "off", "n", "f", "disable", "disabled", "none"].contains(&word)
}

fn bool_word(subject: &Subject, findings: &mut Findings) {
    for (value, fault) in faults(subject) {
        if fault != Fault::WordForInteger || value.name == IB_TIMEOUT {
            continue;
        }
        let shown = value.shown();
        let word = value.value.trim().to_ascii_lowercase();
        let name = value.name.as_str();
        if is_off(&word) {
            findings.inform(format!("{shown}: NCCL reads any word as 0, which this one happens to mean"), "write 0");
        } else if is_on(&word) {
            let so = match name {
                "NCCL_IB_DISABLE" => "InfiniBand stays on",
                "NCCL_P2P_DISABLE" => "P2P stays on",
                "NCCL_SHM_DISABLE" => "shared memory stays on",
                _ if name.ends_with("_DISABLE") => "nothing is disabled",
                _ => "it is off",
            };
            findings.warn(format!("{shown}: NCCL reads it as 0, so {so}"), "write 1 if that is meant, or unset it");
        } else {
            findings.warn(format!("{shown}: NCCL reads a number here, and a word as 0"), "write a number, or unset it");
        }
    }
}

/// A number with a leading 0, with the decimal number it looks like.
fn octal_looking(text: &str) -> Option<i64> {
    let text = text.trim_start();
    let digits = text.trim_start_matches(['-', '+']);
    let looks = digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit());
    if looks { text.trim_start_matches('+').parse().ok() } else { None }
}

fn octal(subject: &Subject, findings: &mut Findings) {
    for (value, _) in faults(subject) {
        let Some(decimal) = octal_looking(&value.value) else { continue };
        if let Some(read) = number(value).filter(|read| *read != decimal) {
            findings.warn(
                format!("{}: a leading 0 makes it octal, and NCCL reads {read}", value.shown()),
                format!("write {decimal}"),
            );
        }
    }
}

fn trailing(subject: &Subject, findings: &mut Findings) {
    for (value, fault) in faults(subject) {
        let shown = value.shown();
        match fault {
            Fault::Overflow if value.name != IB_TIMEOUT => findings.warn(
                format!("{shown}: no number that NCCL can hold, so it uses its default"),
                "write a smaller number, or unset it",
            ),
            Fault::Trailing(read) if octal_looking(&value.value).is_none() => {
                let rest = nccl_integer(&value.value).map_or("", |(_, rest)| rest);
                let unit = rest.trim().to_ascii_lowercase();
                let shift = match unit.trim_end_matches("ib").trim_end_matches('b') {
                    "k" => 10,
                    "m" => 20,
                    "g" => 30,
                    _ => 0,
                };
                let meant = read.checked_mul(1 << shift).unwrap_or(read);
                if unit.is_empty() {
                    findings.inform(
                        format!("{shown}: NCCL reads {read}, without the blank behind it"),
                        format!("write {read}"),
                    );
                } else {
                    findings.warn(
                        format!("{shown}: NCCL reads {read} and ignores '{}': it knows no units", printable(rest)),
                        format!("write {meant}"),
                    );
                }
            }
            _ => {}
        }
    }
}

fn gdr_level_int(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_NET_GDR_LEVEL") else { return };
    if !value.value.starts_with(|c: char| c.is_ascii_digit()) {
        return;
    }
    let Some(old) = number(value) else { return };
    let word = usize::try_from(old).ok().and_then(|old| Level::LEGACY.get(old)).copied().unwrap_or("SYS");
    let (what, cure) = match word {
        "LOC" => {
            ("which switches GPUDirect RDMA off", "unset it: NCCL uses GPUDirect RDMA where the card is near the GPU")
        }
        "SYS" => (
            "which allows GPUDirect RDMA across CPU sockets, often slower than without; it enables nothing that is off",
            "unset it: NCCL uses GPUDirect RDMA where the card is near the GPU; write SYS if that is meant",
        ),
        _ => ("which sets how far from the GPU a card may be for GPUDirect RDMA", "unset it, or write the word"),
    };
    findings.warn(format!("{}: a number of NCCL's old scale, read as {word}, {what}", value.shown()), cure);
}

fn level_case(subject: &Subject, findings: &mut Findings) {
    for name in ["NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_NET_MERGE_LEVEL"] {
        let Some(value) = given(subject, name) else { continue };
        let text = value.value.as_str();
        if Level::NAMES.contains(&text) || text.starts_with(|c: char| c.is_ascii_digit()) {
            continue;
        }
        let meant = Level::NAMES.iter().find(|known| known.eq_ignore_ascii_case(text.trim()));
        let cure = match meant {
            Some(word) => format!("write {word}"),
            None => format!("write one of {}", Level::NAMES.join(", ")),
        };
        findings.warn(format!("{}: NCCL takes its distances in capitals only, and ignores this", value.shown()), cure);
    }
}

/// Names that NCCL read until 2.4, with what took their place.
const DEAD: [(&str, &str); 7] = [
    ("NCCL_IB_GDR_LEVEL", "unset it, or NCCL_NET_GDR_LEVEL for a limit to GPUDirect RDMA"),
    ("NCCL_IB_CUDA_SUPPORT", "unset it: GPUDirect RDMA is automatic, NCCL_NET_GDR_LEVEL=LOC switches it off"),
    ("NCCL_LL_THRESHOLD", "unset it: NCCL chooses by itself"),
    ("NCCL_TREE_THRESHOLD", "unset it: NCCL chooses by itself"),
    ("NCCL_SINGLE_RING_THRESHOLD", "unset it: NCCL chooses by itself"),
    ("NCCL_THREAD_THRESHOLD", "unset it: NCCL chooses by itself"),
    ("NCCL_RINGS", "unset it: NCCL finds its rings, NCCL_GRAPH_FILE gives others"),
];

fn gdr_dead_name(subject: &Subject, findings: &mut Findings) {
    for (name, cure) in DEAD {
        if let Some(value) = subject.given(name) {
            findings.inform(format!("{}: NCCL gave this name up years ago and does not read it", value.shown()), cure);
        }
    }
}

/// Beginnings of the names that the kernel's RDMA drivers give.
const RDMA_NAMES: [&str; 12] =
    ["mlx4_", "mlx5_", "bnxt_re", "irdma", "rdmap", "rocep", "roceP", "hfi1_", "efa_", "qedr", "erdma_", "mana_"];

fn ifname_grammar(subject: &Subject, findings: &mut Findings) {
    for name in ["NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"] {
        let Some(value) = given(subject, name) else { continue };
        let list = NameList::parse(&value.value);
        let shown = value.shown();
        let odd: Vec<String> = list.odd().map(|item| format!("'{}'", printable(item.text))).collect();
        if !odd.is_empty() {
            let cure = match corrected(&value.value) {
                Some(list) => format!("write {name}={}", printable(&list)),
                None => "either name interfaces, or exclude some with one ^ in front of all".into(),
            };
            let why = format!(
                "{shown}: NCCL takes {} as a name, which no interface has: ^ and = count once, in front of the whole \
                 list, and blanks are part of a name",
                odd.join(", ")
            );
            if !list.excludes && odd.len() == list.items.len() && name == "NCCL_SOCKET_IFNAME" {
                findings.error(format!("{why}; it ends with 'no socket interface found'"), cure);
            } else {
                findings.warn(why, cure);
            }
        }
        if let Some(item) = list.items.iter().find(|item| item.port.is_some()) {
            findings.warn(
                format!(
                    "{shown}: interfaces have no ports, and NCCL ignores what stands behind {}",
                    printable(item.name)
                ),
                "leave the port out; ports belong to NCCL_IB_HCA",
            );
        }
        let rdma = list.items.iter().find(|item| RDMA_NAMES.iter().any(|known| item.name.starts_with(known)));
        if let Some(item) = rdma {
            findings.warn(
                format!("{shown}: {} is the name of an RDMA device, not of a network interface", printable(item.name)),
                "name interfaces as `ip link` shows them; RDMA devices belong to NCCL_IB_HCA",
            );
        }
    }
}

/// Marks repeated for each entry (<https://github.com/NVIDIA/nccl-tests/issues/150>)
/// and port texts that mean another port or any
/// (<https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/95>).
fn hca_grammar(subject: &Subject, findings: &mut Findings) {
    let name = "NCCL_IB_HCA";
    let Some(value) = given(subject, name) else { return };
    let list = NameList::parse(&value.value);
    let shown = value.shown();
    let odd: Vec<String> = list.odd().map(|item| format!("'{}'", printable(item.text))).collect();
    if !odd.is_empty() {
        let cure = match corrected(&value.value) {
            Some(list) => format!("write {name}={}", printable(&list)),
            None => "either name devices, or exclude some with one ^ in front of all".into(),
        };
        findings.warn(
            format!(
                "{shown}: NCCL takes {} as a name, which no device has: ^ and = count once, in front of the whole list \
                 and in this order, and blanks are part of a name",
                odd.join(", ")
            ),
            cure,
        );
    }
    let bad: Vec<String> = list
        .items
        .iter()
        .filter(|item| item.name.is_empty() || item.port.is_some_and(|port| !are_ports(port)))
        .filter(|item| !item.text.contains(char::is_whitespace))
        .map(|item| format!("'{}'", printable(item.text)))
        .collect();
    if !bad.is_empty() {
        findings.warn(
            format!(
                "{shown}: {}: no device with a port from 1 to 255 in plain digits; NCCL makes another port or any of it",
                bad.join(", ")
            ),
            "write DEVICE:1 for port 1, or the device alone for all its ports",
        );
    }
    if list.items.len() > LONGEST {
        findings.warn(
            format!("{shown} has {} entries; NCCL looks at {LONGEST}", list.items.len()),
            "use prefixes, or exclude the others with ^",
        );
    }
}

/// `port`, since NCCL 2.30 `port:rail` and `port:rail:plane`.
fn are_ports(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let fields: Vec<&str> = text.split(':').collect();
    let port = digits(fields[0]) && !fields[0].starts_with('0') && fields[0].parse::<u8>().is_ok();
    port && fields.len() <= 3 && fields[1..].iter().all(|field| digits(field))
}

const ALGORITHMS: [&str; 7] = ["Ring", "Tree", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT"];
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "Simple"];
const FUNCTIONS: [&str; 5] = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"];

/// The words of `[function:]list;…` that NCCL does not know.
fn unknown_words<'a>(text: &'a str, known: &[&str]) -> Vec<&'a str> {
    let mut unknown = Vec::new();
    let is = |words: &[&str], word: &str| words.iter().any(|known| known.eq_ignore_ascii_case(word));
    for part in text.split(';').filter(|part| !part.is_empty()) {
        let (function, list) = part.split_once(':').map_or((None, part), |(function, list)| (Some(function), list));
        unknown.extend(function.filter(|function| !is(&FUNCTIONS, function)));
        let list = list.strip_prefix('^').unwrap_or(list);
        unknown.extend(list.split(',').filter(|word| !is(known, word)));
    }
    unknown
}

fn algo_proto(subject: &Subject, findings: &mut Findings) {
    for (name, known) in [("NCCL_ALGO", &ALGORITHMS as &[&str]), ("NCCL_PROTO", &PROTOCOLS)] {
        let Some(value) = given(subject, name) else { continue };
        let shown = value.shown();
        let unknown = unknown_words(&value.value, known);
        if !unknown.is_empty() {
            let words: Vec<String> = unknown.iter().map(|word| format!("'{}'", printable(word))).collect();
            let marks = unknown.iter().any(|word| word.starts_with('^'));
            let blanks = unknown.iter().any(|word| word.contains(char::is_whitespace));
            let mut cure = format!("write words of {}", known.join(", "));
            match corrected(&value.value).filter(|list| (marks || blanks) && unknown_words(list, known).is_empty()) {
                Some(list) => cure = format!("write {name}={}", printable(&list)),
                None if marks => cure = "one ^ in front of a list excludes all of it".into(),
                None => {}
            }
            let why = format!("{shown}: {} is none of NCCL's words", words.join(", "));
            match Version::of(subject, NCCL) {
                Some(version) if version.before("2.24") => {
                    findings.warn(format!("{why}; NCCL {version} ignores it"), cure);
                }
                Some(version) => findings.error(format!("{why}, and NCCL {version} does not start with it"), cure),
                None => {
                    findings.warn(format!("{why}; NCCL does not start with it since 2.24, and ignored it before"), cure)
                }
            }
        } else if name == "NCCL_PROTO" && forces_ll128(&value.value) && may_corrupt(subject, &value.value) {
            findings.warn(
                format!("{shown} forces LL128 also where NCCL would not use it: data is corrupted on links that are not made for it"),
                "unset it: NCCL uses LL128 where it is safe",
            );
        } else if value.from == From::User && !subject.settings.deterministic && !of_a_cloud(subject, value) {
            findings.inform(
                format!("{shown} takes the choice from NCCL, for all sizes of messages"),
                "unset it, unless it is a measurement or for determinism",
            );
        }
    }
}

fn forces_ll128(text: &str) -> bool {
    text.split(';').any(|part| {
        let list = part.split_once(':').map_or(part, |(_, list)| list);
        !list.starts_with('^') && list.split(',').any(|word| word.eq_ignore_ascii_case("LL128"))
    })
}

/// Forced, LL128 is taken on any link, and NVLink keeps the order it needs. A
/// list with others, which cloud images set, is no proof where the GPUs are not
/// known.
fn may_corrupt(subject: &Subject, list: &str) -> bool {
    match models(subject) {
        [] => list.eq_ignore_ascii_case("LL128"),
        models => !models.iter().all(|model| has_nvlink(model)),
    }
}

/// What efa-obsolete tells, and what Google's network plugins insist on. (What an
/// image or a site's file chooses is not the user's to unset.)
fn of_a_cloud(subject: &Subject, value: &Value) -> bool {
    let old = || value.name == "NCCL_PROTO" && value.value.eq_ignore_ascii_case("simple");
    let plugins = ["NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_"];
    let google = || subject.values.iter().any(|value| plugins.iter().any(|plugin| value.name.starts_with(plugin)));
    (super::torch::on_efa(subject) && old()) || google()
}

fn debug_file(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_DEBUG_FILE") else { return };
    let (shown, text) = (value.shown(), value.value.as_str());
    if text.starts_with('~') {
        findings.warn(format!("{shown}: NCCL does not know ~ and makes a file of that name"), "write the whole path");
    }
    let alone = subject.tasks == Some(1) && subject.shape.is_some_and(Shape::tasks_are_ranks);
    if !alone && !text.contains("%p") && !text.starts_with("/dev/") && !["stdout", "stderr"].contains(&text) {
        findings.warn(
            format!("{shown}: all ranks write to one file, over each other"),
            "put %h and %p into it, for host and process",
        );
    }
}

fn debug_word(subject: &Subject, findings: &mut Findings) {
    if let Some(value) = given(subject, "NCCL_DEBUG") {
        let words = ["VERSION", "WARN", "INFO", "ABORT", "TRACE"];
        if !words.iter().any(|word| word.eq_ignore_ascii_case(&value.value)) {
            let lower = words.map(str::to_ascii_lowercase);
            let near = nearest(value.value.trim(), lower.iter().map(String::as_str));
            let word = near.map_or("WARN".into(), str::to_ascii_uppercase);
            findings.warn(
                format!("{}: no word of NCCL's ({}), so that it logs nothing at all", value.shown(), words.join(", ")),
                format!("write {word}"),
            );
        }
    }
    if let Some(value) = given(subject, "NCCL_DEBUG_SUBSYS") {
        let list = value.value.strip_prefix('^').unwrap_or(&value.value);
        let unknown: Vec<&str> = list
            .split(',')
            .filter(|word| !catalog::SUBSYSTEMS.iter().any(|known| known.eq_ignore_ascii_case(word)))
            .collect();
        if !unknown.is_empty() {
            findings.warn(
                format!("{}: NCCL has no '{}' and ignores it", value.shown(), printable(&unknown.join(","))),
                format!("write words of {}", catalog::SUBSYSTEMS.join(",")),
            );
        }
    }
}

fn subsys_no_info(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_DEBUG_SUBSYS") else { return };
    let level = subject.value("NCCL_DEBUG").unwrap_or_default();
    let now =
        if level.is_empty() { "NCCL without NCCL_DEBUG".into() } else { format!("NCCL_DEBUG={}", printable(level)) };
    if !["INFO", "TRACE", "ABORT"].iter().any(|word| word.eq_ignore_ascii_case(level)) {
        findings.inform(
            format!("{} chooses among messages that {now} does not print", value.shown()),
            "unset it, or set NCCL_DEBUG=INFO too",
        );
    }
}

fn sockets_product(subject: &Subject, findings: &mut Findings) {
    let (threads, sockets) = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD");
    let users: Vec<String> =
        [threads, sockets].into_iter().filter_map(|name| given(subject, name)).map(Value::shown).collect();
    if users.is_empty() {
        return;
    }
    let read = |name| subject.value(name).and_then(nccl_integer).map(|(number, _)| number);
    let (threads, sockets) = (read(threads), read(sockets));
    if threads.is_some_and(|threads| threads > 16) {
        findings.warn(format!("{}: NCCL takes 16 threads at most", users.join(" with ")), "write 4, or 16 at most");
    } else if let (Some(threads), Some(sockets)) = (threads, sockets)
        && threads.saturating_mul(sockets) > 64
    {
        findings.warn(
            format!(
                "{}: {threads} threads with {sockets} sockets each are more than the 64 sockets that NCCL opens for a connection",
                users.join(" with ")
            ),
            "choose NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD up to 64, such as 4 and 4",
        );
    }
}

fn ctas(subject: &Subject, findings: &mut Findings) {
    let most = if Version::of(subject, NCCL).is_some_and(|version| version.before("2.25")) { 32 } else { 64 };
    let of = |name| given(subject, name).and_then(|value| Some((value, number(value)?)));
    let (low, high) = (of("NCCL_MIN_CTAS"), of("NCCL_MAX_CTAS"));
    for (value, number) in [low, high].into_iter().flatten() {
        if !(1..=most).contains(&number) {
            findings.warn(
                format!("{}: NCCL takes 1 to {most} thread blocks", value.shown()),
                "unset it, or write a number in this range",
            );
        }
    }
    if let (Some((low, fewest)), Some((high, most))) = (low, high)
        && fewest > most
    {
        findings.warn(format!("{} is more than {}", low.shown(), high.shown()), "unset one of them, or exchange them");
    }
}

fn nthreads(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_NTHREADS") else { return };
    if !matches!(nccl_integer(&value.value), Some((64 | 128 | 256 | 512, _))) {
        findings.warn(
            format!(
                "{}: NCCL takes 64, 128, 256 or 512 threads in a block, and its default for all else",
                value.shown()
            ),
            "unset it",
        );
    }
}

/// How many unknown names are compared with all known ones: a rank shall not
/// start late for an odd environment.
const MOST_UNKNOWN: usize = 20;

/// Misspelt names (<https://github.com/llm-d/llm-d-benchmark/pull/1862>) and names
/// that people believe in. Of an unknown one only the name is told.
fn phantom(subject: &Subject, findings: &mut Findings) {
    let mut unknown = 0;
    let told = |name: &str| DEAD.iter().any(|(dead, _)| *dead == name);
    let values = subject.values.iter().filter(|value| value.from != From::Ours && !told(&value.name));
    for value in values.filter(|value| value.name.starts_with("NCCL_") || value.name.starts_with("TORCH_NCCL_")) {
        let name = value.name.as_str();
        match catalog::entry(name) {
            Some(entry) if entry.reader == Reader::Nobody => nobody_reads(value, entry, findings),
            Some(_) => {}
            None => {
                let family = if name.starts_with("NCCL_") { "NCCL_" } else { "TORCH_NCCL_" };
                unknown += 1;
                if unknown > MOST_UNKNOWN {
                    return;
                }
                if let Some(near) = catalog::nearest(name).filter(|near| near.starts_with(family)) {
                    findings.warn(
                        format!("{}: nothing is known to read this name, so that it has no effect", printable(name)),
                        format!("write {near} if that is meant"),
                    );
                }
            }
        }
    }
}

fn nobody_reads(value: &Value, entry: &Entry, findings: &mut Findings) {
    let cure = match (entry.successor, entry.trap) {
        ("", "") => "unset it".to_string(),
        ("", trap) => format!("unset it: {trap}"),
        (successor, _) => format!("write {successor} if that is meant, or unset it"),
    };
    let shown = value.shown();
    if entry.until.is_empty() {
        findings.warn(format!("{shown}: nobody reads this name, so that it has no effect"), cure);
    } else {
        findings.inform(format!("{shown}: read up to NCCL {} only, by nobody now", entry.until), cure);
    }
}

fn version_gate(subject: &Subject, findings: &mut Findings) {
    for value in subject.values.iter().filter(|value| value.from != From::Ours) {
        let Some(entry) = catalog::entry(&value.name) else { continue };
        let (what, place) = match entry.reader {
            Reader::Nccl => ("NCCL", NCCL),
            Reader::C10d | Reader::Allocator | Reader::Torchrun => ("PyTorch", PYTORCH),
            _ => continue,
        };
        let Some(version) = Version::of(subject, place) else { continue };
        let shown = value.shown();
        if version.before(entry.since) {
            findings.warn(
                format!(
                    "{shown}: {what} {version} ({place}) does not read it yet, {what} {} is the first",
                    entry.since
                ),
                format!("unset it, or take an image with {what} {}", entry.since),
            );
        } else if version.after(entry.until) && entry.name != super::torch::AVOID_RECORD {
            let cure = match entry.successor {
                "" => "unset it".into(),
                successor => format!("write {successor}, or unset it"),
            };
            findings.inform(
                format!("{shown}: {what} {version} ({place}) does not read it any more, {} was the last", entry.until),
                cure,
            );
        }
    }
}

/// Whether a model, as the driver prints its name, has NVLink.
fn has_nvlink(model: &str) -> bool {
    let words: Vec<&str> = model.split([' ', '-']).collect();
    let has = |known: &[&str]| words.iter().any(|word| known.contains(word));
    let always = ["H20", "H200", "H800", "GH200", "GB200", "GB300", "B100", "B200", "B300", "HBM3", "NVL"];
    has(&always) || words.iter().any(|word| word.starts_with("SXM"))
}

fn models<'a>(subject: &Subject<'a>) -> &'a [String] {
    subject.node.map(|node| node.gpu_models.as_slice()).unwrap_or_default()
}

fn p2p_disabled(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_P2P_DISABLE").filter(|value| number(value) == Some(1)) else { return };
    let cure = "unset it, unless the fault it was for is still looked for";
    let models = models(subject);
    if let Some(model) = models.iter().find(|model| has_nvlink(model)) {
        findings.warn(
            format!("{}: the GPUs ({model}) are joined by NVLink, which NCCL then does not use", value.shown()),
            cure,
        );
    } else if models.is_empty() {
        findings.inform(format!("{}: the GPUs of a node exchange data by way of the CPU", value.shown()), cure);
    }
}

/// srun's environment is that of all tasks, so that a host's identity in it is the
/// same on all nodes.
fn hostid(subject: &Subject, findings: &mut Findings) {
    if let Some(value) = given(subject, "NCCL_HOSTID").filter(|_| subject.several_nodes()) {
        findings.warn(
            format!(
                "{}: where all nodes have this value NCCL takes them for one host, and fails to share memory",
                value.shown()
            ),
            "unset it, or let a TaskProlog give each node its own",
        );
    }
}

fn shm_disabled(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, "NCCL_SHM_DISABLE") else { return };
    if number(value).is_some_and(|number| number != 0) {
        findings.warn(
            format!("{}: ranks of one node without a direct path use the network instead of /dev/shm", value.shown()),
            "unset it; where /dev/shm is too small, give the container a larger one",
        );
    }
}
