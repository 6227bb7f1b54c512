//! Checks of what the variables of PyTorch, CUDA, Gloo, UCX and the others hold.
//!
//! c10d throws at a value that it cannot parse, an empty one too
//! (c10d/Utils.hpp), and the allocator at an option that it does not know
//! (CUDAAllocatorConfig.cpp): these are errors.

use super::lists::NameList;
use super::version::{PYTORCH, Version};
use super::{Findings, From, Phase, Rule, Severity, Subject, Value};
use crate::config::{Fabric, Profile, nearest, printable};
use crate::plan::Shape;
use crate::plan::catalog::{self, Fault, Grammar, Reader};
use crate::plan::environment::{CUDA_GRAPHS, MEGATRON_FSDP, USER_BUFFERS, framework_in, has_any, is_blackwell};

use Phase::{Environment, Launch, Node};
use Severity::{Error, Info};

const WARNING: Severity = Severity::Warning;

/// Checks of this file. What depends on the versions in a container, or on what
/// another layer sets, is looked at on the node.
pub(super) const RULES: &[Rule] = &[
    Rule::new("torch-rename", Node, Info, "old names of PyTorch's variables", torch_rename),
    Rule::new("async-off", Environment, WARNING, "errors of collectives that nobody notices", async_off),
    Rule::new("avoid-record", Node, Info, "TORCH_NCCL_AVOID_RECORD_STREAMS where it is the default", avoid_record),
    Rule::new("c10d-bool", Environment, Error, "values at which PyTorch's c10d throws", c10d_bool),
    Rule::new(
        "alloc-both",
        Environment,
        WARNING,
        "both names of the allocator's options, with different values",
        alloc_both,
    ),
    Rule::new("alloc-keys", Environment, Error, "options at which PyTorch's allocator throws", alloc_keys),
    Rule::new("alloc-vs-ub", Node, WARNING, "expandable segments with NCCL user buffers or CUDA graphs", alloc_vs_ub),
    Rule::new("maxconn-range", Environment, WARNING, "CUDA_DEVICE_MAX_CONNECTIONS outside 1 to 32", maxconn_range),
    Rule::new("maxconn-fsdp", Launch, Error, "CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP or DeepSpeed", maxconn_fsdp),
    Rule::new("maxconn-blackwell", Node, WARNING, "CUDA_DEVICE_MAX_CONNECTIONS=1 on Blackwell", maxconn_blackwell),
    Rule::new("launch-blocking", Environment, WARNING, "settings for debugging left on", launch_blocking),
    Rule::new("gloo-grammar", Environment, WARNING, "GLOO_SOCKET_IFNAME in NCCL's grammar", gloo_grammar),
    Rule::new("proxy-jax", Launch, WARNING, "a proxy between the processes of JAX", proxy_jax),
    Rule::new("efa-obsolete", Environment, Info, "EFA settings that are not needed any more", efa_obsolete),
    Rule::new("empty-rank", Node, WARNING, "rank variables that are set to nothing", empty_rank),
    Rule::new("secrets-argv", Launch, WARNING, "tokens in the command", secrets_argv),
    Rule::new("kill-on-bad", Environment, WARNING, "a step that goes on when one rank has failed", kill_on_bad),
];

/// What somebody else than we set a variable to, unless to nothing.
fn given<'a>(subject: &Subject<'a>, name: &str) -> Option<&'a Value> {
    subject.given(name).filter(|value| !value.value.is_empty())
}

/// A word c10d takes as true, in any case.
fn is_true(value: &str) -> bool {
    ["y", "yes", "1", "t", "true"].iter().any(|word| word.eq_ignore_ascii_case(value))
}

/// An error where PyTorch trains, else a warning: JAX and the worker do not read
/// what PyTorch throws at.
fn throws(subject: &Subject, findings: &mut Findings, message: String, cure: impl Into<String>) {
    if matches!(subject.settings.profile, Profile::Jax | Profile::Worker) {
        findings.warn(message, cure);
    } else {
        findings.error(message, cure);
    }
}

/// Old names and those that c10d reads first since PyTorch 2.2.
const RENAMED: [(&str, &str); 4] = [
    ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    ("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"),
    ("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING"),
];

fn torch_rename(subject: &Subject, findings: &mut Findings) {
    if Version::of(subject, PYTORCH).is_some_and(|version| version.before("2.2")) {
        return;
    }
    for (old, new) in RENAMED {
        let Some(value) = subject.given(old) else { continue };
        let also = match subject.value(new) {
            Some(first) => format!(", and {new}={} stands above it", printable(first)),
            None => String::new(),
        };
        findings.inform(
            format!("{}: called {new} since PyTorch 2.2, which complains of the old name{also}", value.shown()),
            format!("write {new}, or unset it: the default is right"),
        );
    }
}

fn async_off(subject: &Subject, findings: &mut Findings) {
    let unset = "unset it: by default a failed collective ends the process";
    let first = |new: &str, old: &str| given(subject, new).or_else(|| given(subject, old));
    if let Some(value) = first("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
        && value.value.trim().parse() == Ok(0)
    {
        findings.warn(format!("{}: ranks wait for ever when another one has failed", value.shown()), unset);
    }
    if let Some(value) = first("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        && is_true(&value.value)
    {
        findings.warn(
            format!("{}: each wait blocks the CPU, and the watchdog does not end late collectives", value.shown()),
            unset,
        );
    }
}

/// See `avoid_record`.
pub(super) const AVOID_RECORD: &str = "TORCH_NCCL_AVOID_RECORD_STREAMS";

fn avoid_record(subject: &Subject, findings: &mut Findings) {
    let Some(value) = subject.given(AVOID_RECORD) else { return };
    if let Some(version) = Version::of(subject, PYTORCH).filter(|version| !version.before("2.8")) {
        findings.inform(
            format!("{}: what PyTorch {version} does anyway, with a complaint about the name", value.shown()),
            "unset it",
        );
    }
}

fn c10d_bool(subject: &Subject, findings: &mut Findings) {
    for value in subject.values.iter().filter(|value| value.from != From::Ours) {
        let text = value.value.as_str();
        if value.name == "TORCH_DISTRIBUTED_DEBUG" {
            // Read in any case (c10d/debug.cpp).
            if !["OFF", "INFO", "DETAIL"].iter().any(|word| word.eq_ignore_ascii_case(text)) {
                throws(
                    subject,
                    findings,
                    format!("{}: PyTorch throws at all but OFF, INFO and DETAIL", value.shown()),
                    "write one of these, or unset it",
                );
            }
            continue;
        }
        let Some(entry) = catalog::entry(&value.name).filter(|entry| entry.reader == Reader::C10d) else { continue };
        let number = match entry.grammar {
            Grammar::TorchBool => false,
            Grammar::TorchInteger(..) => true,
            _ => continue,
        };
        if text.is_empty() || entry.grammar.fault(text) == Some(Fault::Throws) {
            let (takes, cure) = if number {
                ("a number", "write a number, or unset it")
            } else {
                ("1, y, yes, t, true, 0, n, no, f or false", "write 1 or 0, or unset it")
            };
            throws(
                subject,
                findings,
                format!("{}: PyTorch takes {takes} and throws at the rest: no rank gets past its start", value.shown()),
                cure,
            );
        }
    }
}

const ALLOCATOR: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// Values are not told: we may have added our own keys to one.
fn alloc_both(subject: &Subject, findings: &mut Findings) {
    let [old, new] = ALLOCATOR.map(|name| given(subject, name));
    if let (Some(old), Some(new)) = (old, new)
        && old.value != new.value
    {
        findings.warn(
            "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF differ: which one counts depends on the release of PyTorch",
            "unset PYTORCH_ALLOC_CONF, which is read since 2.9 only, or write the same into both",
        );
    }
}

/// Options of the allocator, of all releases.
const OPTIONS: [&str; 16] = [
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "roundup_bypass_threshold_mb",
    "backend",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_hip_host_register",
    "pinned_use_cuda_host_register",
    "pinned_use_background_threads",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "per_process_memory_fraction",
    "graph_capture_record_stream_reuse",
];

/// `key:value,key:value`, where a value may be a list in brackets. Blanks do not
/// count. Where we have added keys to the user's, what is told must not change.
fn alloc_keys(subject: &Subject, findings: &mut Findings) {
    for name in ALLOCATOR {
        let Some(value) = given(subject, name) else { continue };
        let text: String = value.value.chars().filter(|c| *c != ' ').collect();
        for item in outside_brackets(&text) {
            let shown = Value { value: item.into(), ..value.clone() }.shown();
            let Some((key, setting)) = item.split_once(':') else {
                let cure = item
                    .split_once('=')
                    .map_or("write KEY:VALUE".into(), |(key, value)| format!("write {key}:{value}"));
                throws(
                    subject,
                    findings,
                    format!("{shown}: PyTorch's allocator takes KEY:VALUE, and throws at anything else"),
                    printable(&cure),
                );
                continue;
            };
            if !OPTIONS.contains(&key) {
                let near = nearest(key, OPTIONS);
                let why = format!("{shown}: PyTorch's allocator has no option '{}'", printable(key));
                match near {
                    Some(near) if is_slip(key, near) => {
                        throws(subject, findings, format!("{why}, and throws at it"), format!("write {near}"));
                    }
                    near => findings.warn(
                        format!("{why} that is known, and throws at unknown ones"),
                        match near {
                            Some(near) => format!("write {near} if that is meant"),
                            None => "leave it out, unless this release of PyTorch has it".into(),
                        },
                    ),
                }
            } else if let Some((takes, example)) = wrong_setting(key, setting) {
                throws(
                    subject,
                    findings,
                    format!("{shown}: PyTorch's allocator takes {takes} here, and throws at anything else"),
                    format!("write {key}:{example}, or leave it out"),
                );
            }
        }
    }
}

/// Whether two words differ in one place by a letter or two: a slip of the hand,
/// where more could be the option of a newer release.
fn is_slip(word: &str, near: &str) -> bool {
    let (a, b) = (word.as_bytes(), near.as_bytes());
    let front = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let back = a[front..].iter().rev().zip(b[front..].iter().rev()).take_while(|(a, b)| a == b).count();
    a.len().max(b.len()) - front - back <= 2
}

/// Items at commas that are in no bracket.
fn outside_brackets(text: &str) -> Vec<&str> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, c) in text.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth <= 0 => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    items.retain(|item| !item.is_empty());
    items
}

/// What the option takes, with an example, if this is not it. Less than 20 MB of
/// a split size are refused by all releases, 20 itself by older ones.
fn wrong_setting(key: &str, setting: &str) -> Option<(&'static str, &'static str)> {
    let number = setting.parse::<f64>().ok();
    let off = ["false", "0", "no", "off"].iter().any(|word| word.eq_ignore_ascii_case(setting));
    let (right, takes, example) = match key {
        "expandable_segments"
        | "pinned_use_background_threads"
        | "pinned_use_cuda_host_register"
        | "release_lock_on_cudamalloc" => {
            (matches!(setting, "True" | "False"), "True or False", if off { "False" } else { "True" })
        }
        "max_split_size_mb" => (number.is_some_and(|number| number >= 20.0), "a number above 20", "512"),
        "garbage_collection_threshold" => {
            (number.is_some_and(|number| number > 0.0 && number < 1.0), "a number between 0 and 1", "0.8")
        }
        "backend" => (matches!(setting, "native" | "cudaMallocAsync"), "native or cudaMallocAsync", "native"),
        _ => return None,
    };
    (!right).then_some((takes, example))
}

/// Whether the allocator is told to use expandable segments, by whoever.
fn expandable(subject: &Subject) -> Option<&'static str> {
    ALLOCATOR.into_iter().find(|name| {
        let text: String = subject.value(name).unwrap_or_default().chars().filter(|c| *c != ' ').collect();
        outside_brackets(&text).contains(&"expandable_segments:True")
    })
}

fn alloc_vs_ub(subject: &Subject, findings: &mut Findings) {
    let Some(name) = expandable(subject) else { return };
    let hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK";
    let without = format!("take expandable_segments out of {name}");
    if has_any(subject.command, &USER_BUFFERS) {
        findings.warn(
            format!(
                "{name} has expandable_segments:True, and the command registers NCCL user buffers, which these break"
            ),
            without,
        );
    } else if let Some(value) = given(subject, hook).filter(|value| is_true(&value.value)) {
        findings.warn(
            format!(
                "{name} has expandable_segments:True, and {} registers the allocator's memory, which these break",
                value.shown()
            ),
            without,
        );
    } else if has_any(subject.command, &CUDA_GRAPHS) && subject.value("NCCL_GRAPH_REGISTER") != Some("0") {
        findings.warn(
            format!("{name} has expandable_segments:True, and the command uses CUDA graphs, whose buffers NCCL must not register then"),
            "set NCCL_GRAPH_REGISTER=0",
        );
    }
}

const MAXCONN: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn maxconn_range(subject: &Subject, findings: &mut Findings) {
    let Some(value) = given(subject, MAXCONN) else { return };
    if !value.value.trim().parse::<u32>().is_ok_and(|connections| (1..=32).contains(&connections)) {
        findings.warn(
            format!("{} is out of range: CUDA takes 1 to 32 connections, 8 by default", value.shown()),
            "unset it, or write 1 for Megatron before Blackwell",
        );
    }
}

fn maxconn_fsdp(subject: &Subject, findings: &mut Findings) {
    let Some(value) = subject.given(MAXCONN).filter(|value| value.value.trim() == "1") else { return };
    let unset = "unset it";
    if has_any(subject.command, &MEGATRON_FSDP) {
        findings.error(format!("{}: Megatron does not start FSDP with one connection", value.shown()), unset);
        return;
    }
    let by_profile = match subject.settings.profile {
        Profile::Fsdp => Some("FSDP"),
        Profile::Deepspeed => Some("DeepSpeed"),
        Profile::Default => framework_in(subject.command).filter(|framework| *framework != "JAX"),
        _ => None,
    };
    if let Some(framework) = by_profile {
        findings.warn(
            format!(
                "{}: one connection serialises the streams of {framework}, and with them communication and computation",
                value.shown()
            ),
            unset,
        );
    }
}

fn maxconn_blackwell(subject: &Subject, findings: &mut Findings) {
    let Some(value) = subject.given(MAXCONN).filter(|value| value.value.trim() == "1") else { return };
    let models = subject.node.map(|node| node.gpu_models.as_slice()).unwrap_or_default();
    if let Some(model) = models.iter().find(|model| is_blackwell(model)) {
        findings.warn(
            format!(
                "{}: needed before Blackwell only; on {model} it merely serialises what could overlap",
                value.shown()
            ),
            "unset it, or write 32",
        );
    }
}

fn launch_blocking(subject: &Subject, findings: &mut Findings) {
    let on = |value: &str| value != "0" && !value.is_empty();
    let mut tell = |name: &str, is: &dyn Fn(&str) -> bool, what: &str| {
        if let Some(value) = subject.given(name).filter(|value| is(&value.value)) {
            findings.warn(format!("{} {what}", value.shown()), "unset it, unless a fault is looked for");
        }
    };
    tell("CUDA_LAUNCH_BLOCKING", &on, "is for debugging: the CPU waits for each kernel");
    tell(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        &|_| true,
        "is for debugging, whatever its value: each tensor is a cudaMalloc of its own",
    );
    tell(
        "NVIDIA_TF32_OVERRIDE",
        &|value| value == "0",
        "switches TF32 off in every library, whatever the code asks for",
    );
    if !subject.settings.debug {
        let detail = |value: &str| value.eq_ignore_ascii_case("DETAIL");
        tell(
            "TORCH_DISTRIBUTED_DEBUG",
            &detail,
            "is for debugging: all ranks compare each collective before they start it",
        );
    }
}

/// Only a program that makes a group with Gloo fails at it.
fn gloo_grammar(subject: &Subject, findings: &mut Findings) {
    for name in ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"] {
        let Some(value) = given(subject, name) else { continue };
        let odd = value.value.contains(['^', '=', ':']) || value.value.contains(char::is_whitespace);
        if odd {
            let list = NameList::parse(&value.value);
            let names: Vec<&str> =
                list.items.iter().map(|item| item.name.trim().trim_start_matches(['^', '='])).collect();
            let cure = if list.excludes || value.value.contains('^') {
                "name the interface to use, such as eth0; there is no exclusion".into()
            } else {
                format!("write {name}={}", printable(&names.join(",")))
            };
            findings.warn(
                format!(
                    "{}: whole names of interfaces belong here, not NCCL's ^ and =, ports or blanks: \
                     'Unable to find address for' ends a group that uses it",
                    value.shown()
                ),
                cure,
            );
        }
    }
}

const PROXIES: [&str; 6] = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];

/// With profile=jax the coordinator is added to no_proxy.
fn proxy_jax(subject: &Subject, findings: &mut Findings) {
    let jax = subject.settings.profile == Profile::Default && framework_in(subject.command) == Some("JAX");
    if !jax || subject.tasks.is_none_or(|tasks| tasks < 2) {
        return;
    }
    // A proxy's address may hold a password: its name only.
    if let Some(value) = PROXIES.iter().find_map(|name| given(subject, name)) {
        findings.warn(
            format!(
                "{} is set: JAX's processes may try to reach their coordinator through that proxy, and hang",
                value.name
            ),
            "use profile=jax, which adds the coordinator to no_proxy, or unset it",
        );
    }
}

/// Whether the step is known to use EFA.
pub(super) fn on_efa(subject: &Subject) -> bool {
    let values = || subject.values.iter().filter(|value| value.from != From::Ours);
    subject.settings.fabric == Fabric::Efa
        || values().any(|value| value.name.starts_with("FI_EFA_"))
        || given(subject, "FI_PROVIDER").is_some_and(|value| value.value.eq_ignore_ascii_case("efa"))
}

fn efa_obsolete(subject: &Subject, findings: &mut Findings) {
    if !on_efa(subject) {
        return;
    }
    let mut tell = |value: &Value, why: &str| {
        findings.inform(format!("{}: {why}", value.shown()), "unset it");
    };
    for (name, why) in [
        ("FI_EFA_USE_DEVICE_RDMA", "libfabric finds out by itself whether the device can RDMA"),
        ("FI_EFA_FORK_SAFE", "libfabric finds out by itself what fork() needs"),
        ("RDMAV_FORK_SAFE", "current kernels need nothing for fork()"),
    ] {
        if let Some(value) = subject.given(name) {
            tell(value, why);
        }
    }
    if let Some(value) = given(subject, "NCCL_PROTO").filter(|value| value.value.eq_ignore_ascii_case("simple")) {
        tell(value, "was for old releases of NCCL's EFA plugin, which now chooses better");
    }
}

/// What is still there when the plan has set and removed its own.
fn empty_rank(subject: &Subject, findings: &mut Findings) {
    if !matches!(subject.shape, Some(Shape::Shell | Shape::Agent)) {
        return;
    }
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        if subject.given(name).is_some_and(|value| value.value.is_empty()) {
            findings.warn(
                format!("{name} is set, but to nothing: PyTorch takes it as not set, and its env:// start fails"),
                format!("unset {name}"),
            );
        }
    }
}

/// Beginnings of tokens, with whose they are and how many characters follow at
/// least.
const TOKENS: [(&str, &str, usize); 12] = [
    ("hf_", "Hugging Face", 30),
    ("ghp_", "GitHub", 30),
    ("gho_", "GitHub", 30),
    ("ghs_", "GitHub", 30),
    ("github_pat_", "GitHub", 30),
    ("glpat-", "GitLab", 18),
    ("sk-", "OpenAI", 32),
    ("nvapi-", "NVIDIA", 32),
    ("xoxb-", "Slack", 20),
    ("AKIA", "AWS", 16),
    ("ASIA", "AWS", 16),
    ("wandb_v1_", "Weights & Biases", 30),
];

/// Whether what follows the beginning is of a token and no name such as
/// hf_datasets_of_the_last_run or ASIA_PACIFIC_2024.
fn looks_random(prefix: &str, rest: &str) -> bool {
    let has = |what: fn(&char) -> bool| rest.chars().any(|c| what(&c));
    match prefix {
        "AKIA" | "ASIA" => rest.len() == 16 && rest.bytes().all(|byte| matches!(byte, b'A'..=b'Z' | b'0'..=b'9')),
        "hf_" | "ghp_" | "gho_" | "ghs_" => rest.bytes().all(|byte| byte.is_ascii_alphanumeric()),
        "sk-" => has(char::is_ascii_digit) && has(char::is_ascii_uppercase) && has(char::is_ascii_lowercase),
        _ => has(char::is_ascii_digit),
    }
}

/// The token's owner, if a word holds one. Nothing of it is ever told.
fn token_in(word: &str, before: &str) -> Option<&'static str> {
    let is = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let parts = || word.split(|c| !is(c));
    for (prefix, whose, length) in TOKENS {
        let is_token = |rest: &str| rest.len() >= length && looks_random(prefix, rest);
        if parts().any(|part| part.strip_prefix(prefix).is_some_and(is_token)) {
            return Some(whose);
        }
    }
    // 40 hexadecimal digits are a commit of git, too, such as a tokenizer's: only
    // beside a word for it.
    let about = format!("{before} {word}").to_ascii_lowercase();
    let hexadecimal =
        |part: &str| part.len() == 40 && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let named = ["wandb", "api_key", "api-key", "apikey"].iter().any(|word| about.contains(word))
        || about.split(|c: char| !c.is_ascii_alphanumeric()).any(|part| part == "token");
    (named && parts().any(hexadecimal)).then_some("Weights & Biases")
}

fn secrets_argv(subject: &Subject, findings: &mut Findings) {
    let mut before = "";
    for (index, word) in subject.command.iter().enumerate() {
        if let Some(whose) = token_in(word, before) {
            findings.warn(
                format!(
                    "argument {index} of the command holds what looks like a token of {whose}: everybody on the nodes sees \
                     it in ps, and Slurm keeps it"
                ),
                "hand it over in an environment variable or a file that only you can read, and get a new one",
            );
        }
        before = word;
    }
}

fn kill_on_bad(subject: &Subject, findings: &mut Findings) {
    if let Some(value) = given(subject, "SLURM_KILL_BAD_EXIT").filter(|value| value.value.trim() == "0") {
        findings.warn(
            format!("{}: when one rank fails, the others wait for it until they time out", value.shown()),
            "export SLURM_KILL_BAD_EXIT=1, or give srun --kill-on-bad-exit=1: unset, it is as slurm.conf has it, usually 0",
        );
    }
    if let Some(value) =
        subject.given("SLURM_NO_KILL").filter(|value| !value.value.eq_ignore_ascii_case("off") && value.value != "0")
    {
        findings.warn(
            format!("{}: with --no-kill, srun's --kill-on-bad-exit has no effect, and the ranks of a lost node are waited for", value.shown()),
            "unset it",
        );
    }
}
