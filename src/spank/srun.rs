//! Hooks in srun, sbatch and salloc, as the user. A refusal here is a line on
//! stderr and exit code 78, never a return code: under `optional` Slurm ignores
//! an error from a local hook and runs the job.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::net::{IpAddr, Ipv4Addr};
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::host::{self, CommandLineOption, Handle, Layout};
use super::kept::{self, lock};
use super::{Arguments, Failure, ending, exits};
use crate::EXIT_REFUSED;
use crate::act::key::Key;
use crate::config::site::Site;
use crate::config::{self, APART, FLAG_VARIABLE, Given, Plugstack, Settings};
use crate::facts::network::{PATIENCE, Resolution, resolve};
use crate::facts::step::FIRST_SPECIAL_STEP;
use crate::facts::task::UserBound;
use crate::facts::{Environment, User, container, hostlist};
use crate::plan::checks::{self, From, Phase, Subject, Value};
use crate::plan::marks::Marks;
use crate::plan::rendezvous::{check_given_host, given_host, given_port, unresolvable};
use crate::plan::{Refusal, Severity, Shape, Warning, launch, release, worker};
use crate::report;
use crate::system::clock;
use crate::system::output::{stdin_is_terminal, to_stderr, to_stdout};

/// What srun hands to the tasks: variables of its own environment. Slurm sets
/// names that begin with SLURM_ in the tasks under every `--export`.
pub const SPEC: &std::ffi::CStr = c"SLURM_PALINGENESIS_SPEC";
/// NodeName of rank 0's node.
pub const HOST: &std::ffi::CStr = c"SLURM_PALINGENESIS_HOST";
/// Numeric address of rank 0's node.
pub const ADDRESS: &std::ffi::CStr = c"SLURM_PALINGENESIS_ADDRESS";
/// Set when the step has several het components.
pub const HET: &std::ffi::CStr = c"SLURM_PALINGENESIS_HET";
/// The marks on an outer step's values, which `--export` may keep from the tasks.
pub const MARKS: &std::ffi::CStr = c"SLURM_PALINGENESIS_MARKS";
/// Set where srun's standard input is a terminal.
pub const TERMINAL: &std::ffi::CStr = c"SLURM_PALINGENESIS_TERMINAL";
/// Set where `--multi-prog` gives each task its own program.
pub const MULTI_PROG: &std::ffi::CStr = c"SLURM_PALINGENESIS_MULTI_PROG";
/// The line with which every task is to refuse.
pub const REFUSAL: &std::ffi::CStr = c"SLURM_PALINGENESIS_REFUSAL";
/// Marks of the lines that srun has told; see `report::mark`.
pub const TOLD: &std::ffi::CStr = c"SLURM_PALINGENESIS_TOLD";

/// Set where a container plugin's option was given: the names it is told to keep.
pub const CONTAINER: &std::ffi::CStr = c"SLURM_PALINGENESIS_CONTAINER";
/// Set where the user chose the tasks' CPUs: how.
pub const CPU_BIND: &std::ffi::CStr = c"SLURM_PALINGENESIS_CPU_BIND";
/// The same of their memory.
pub const MEM_BIND: &std::ffi::CStr = c"SLURM_PALINGENESIS_MEM_BIND";

/// The launch's secret, in hexadecimal digits: by it the nodes, srun and the worker know
/// each other.
pub const NONCE: &std::ffi::CStr = c"SLURM_PALINGENESIS_NONCE";
/// When srun started this launch, nanoseconds since 1970: all ranks have one name for it.
pub const LAUNCHED: &std::ffi::CStr = c"SLURM_PALINGENESIS_LAUNCHED";
/// Where srun listens for the records of ranks that failed: ADDRESS:PORT, IPv6 in
/// brackets.
pub const EXITS: &std::ffi::CStr = c"SLURM_PALINGENESIS_EXITS";

/// All of these; task_init takes them out of the task's environment.
pub const HANDED_OVER: [&std::ffi::CStr; 15] = [
    SPEC, HOST, ADDRESS, HET, MARKS, TERMINAL, MULTI_PROG, CONTAINER, CPU_BIND, MEM_BIND, NONCE, LAUNCHED, EXITS,
    REFUSAL, TOLD,
];

/// How many marks are handed over. Lines behind them rank 0 tells again.
const MOST_TOLD: usize = 200;

/// How long srun waits for the address of a node whose NodeAddr is a name. The
/// tasks can do without.
const RESOLVE_NODE: Duration = Duration::from_secs(5);

/// An address of no host (RFC 5737): the way to it is the way out.
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// How many tasks of the layout srun looks at to tell a wrong MASTER_ADDR in one
/// line; behind them the nodes tell it.
const TASKS_LOOKED_AT: u32 = 1024;

/// How many tasks of the layout srun counts to see how many a node has. Slurm
/// reads the whole list of nodes for each.
const TASKS_COUNTED: u32 = 128;

/// `--palingenesis[=SPEC]`.
pub static OPTION: CommandLineOption = CommandLineOption {
    name: c"palingenesis",
    argument: c"[SPEC]",
    usage: c"give each task its rank variables and NCCL environment (SPEC=help lists what there is)",
    callback: option_given,
};

/// The options of [`config::APART`], apart because their values may hold commas and
/// blanks.
static APART_OPTIONS: [CommandLineOption; APART.len()] = [
    CommandLineOption {
        name: c"palingenesis-cache",
        argument: c"DIR",
        usage: c"with --palingenesis: shared directory for the caches of Hugging Face, NeMo, PyTorch and uv",
        callback: apart_given::<0>,
    },
    CommandLineOption {
        name: c"palingenesis-output",
        argument: c"DIR",
        usage:
            c"with --palingenesis: where the training writes its checkpoints; checked on every node before the start",
        callback: apart_given::<1>,
    },
    CommandLineOption {
        name: c"palingenesis-warm",
        argument: c"CMD",
        usage: c"with --palingenesis: command line run once, while all ranks wait, before they start",
        callback: apart_given::<2>,
    },
];

/// Every option; each is registered in every context, or Slurm would complain
/// of an unknown one where it is not.
pub fn options() -> impl Iterator<Item = &'static CommandLineOption> {
    std::iter::once(&OPTION).chain(&APART_OPTIONS)
}

/// The arguments of [`APART_OPTIONS`]; the last use wins.
static APART_GIVEN: Mutex<[Option<String>; APART.len()]> = Mutex::new([const { None }; APART.len()]);

/// As [`option_given`].
unsafe extern "C" fn apart_given<const OPTION: usize>(_: c_int, argument: *const c_char, remote: c_int) -> c_int {
    if remote == 0 {
        let _ = catch_unwind(|| {
            // SAFETY: Slurm passes null or a C string.
            let text = unsafe { host::owned(argument) };
            // Without an argument it is as one that is empty: refused by name.
            lock(&APART_GIVEN)[OPTION] = Some(config::option_argument(text.as_deref()).to_string());
        });
    }
    0
}

/// The option's argument; the last use wins. `None`: not given.
static GIVEN: Mutex<Option<String>> = Mutex::new(None);
/// What `init_post_opt` made of it.
static SETTINGS: Mutex<Option<Settings>> = Mutex::new(None);
/// Marks of the lines told: a het step's components have most of them in common.
static TOLD_LINES: Mutex<Vec<u32>> = Mutex::new(Vec::new());
/// Calls of `init`: lines of plugstack.conf with this plugin.
static COPIES: AtomicU32 = AtomicU32::new(0);
/// Calls of `init_post_opt`: one for each copy and het component.
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Called once per use in srun, sbatch and salloc, and in slurmstepd, up to
/// twice, where the flag is known from what srun handed over.
unsafe extern "C" fn option_given(_: c_int, argument: *const c_char, remote: c_int) -> c_int {
    if remote == 0 {
        let _ = catch_unwind(|| {
            // SAFETY: Slurm passes null or a C string.
            let text = unsafe { host::owned(argument) };
            let spec = config::option_argument(text.as_deref()).to_string();
            // Here, not in init_post_opt: `srun --palingenesis=help` has no command
            // and would not get that far.
            if spec.split(',').any(|word| word.trim() == "help") {
                help();
            }
            *lock(&GIVEN) = Some(spec);
        });
    }
    0
}

/// Whether the flag was given, as option or by PALINGENESIS, and not as `off`,
/// which must help even where the parser is at fault.
pub fn flag_given() -> bool {
    let given = lock(&GIVEN).clone();
    let spec = given.or_else(|| std::env::var_os(FLAG_VARIABLE).map(|spec| spec.to_string_lossy().into_owned()));
    spec.is_some_and(|spec| !spec.split(',').any(|word| word.trim() == "off"))
}

/// Whether there is anything to do, without allocating.
fn nothing_to_do() -> bool {
    // SAFETY: getenv reads a C string; nobody changes the environment meanwhile.
    let variable = |name: &std::ffi::CStr| unsafe { !libc::getenv(name.as_ptr()).is_null() };
    lock(&GIVEN).is_none() && !variable(c"PALINGENESIS")
}

/// Prints the help and ends srun, sbatch or salloc, as their own `--help` does.
fn help() {
    to_stdout(&config::help());
    // SAFETY: runs the command's exit handlers.
    unsafe { libc::exit(0) };
}

/// Ends srun, sbatch or salloc before it asks for anything.
pub fn refuse(line: &str) {
    to_stderr(line);
    // SAFETY: runs srun's exit handlers, as its own refusals do.
    unsafe { libc::exit(EXIT_REFUSED) };
}

/// Lets the tasks refuse, where the step exists already.
pub fn refuse_in_tasks(line: &str) {
    hand_over(REFUSAL, line.trim_end());
}

/// Sets a variable of this process; srun passes it on to the tasks.
fn hand_over(name: &std::ffi::CStr, value: &str) {
    if let Ok(value) = std::ffi::CString::new(value) {
        // SAFETY: two C strings; Slurm itself changes its environment around
        // these hooks, in the same thread.
        unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
    }
}

/// What an outer step's srun, or an earlier word of this one, left must not pass
/// for ours.
fn forget_handed_over() {
    for name in HANDED_OVER {
        // SAFETY: a C string; see hand_over.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
}

/// A step started from a shell with a terminal inherits that shell's marks of
/// it. This srun's own, with `--pty`, are set later.
fn forget_terminal() {
    for name in [c"SLURM_PTY_PORT", c"SLURM_PTY_WIN_COL", c"SLURM_PTY_WIN_ROW"] {
        // SAFETY: a C string; see hand_over.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
}

/// The user's settings; `None` without the flag and with `off`.
fn settings(environment: &Environment, site: Option<&Site>) -> Result<Option<Settings>, Failure> {
    let given = lock(&GIVEN).clone();
    let apart = lock(&APART_GIVEN).clone();
    let profiles = site.map(Site::profile_names).unwrap_or_default();
    let given = Given { option: given.as_deref(), apart: texts(&apart), site_profiles: &profiles };
    let settings = config::resolve(given, environment).map_err(Failure::refused)?;
    if settings.as_ref().is_some_and(|settings| settings.help) {
        help();
    }
    Ok(settings.filter(|settings| !settings.off))
}

/// This host's site file, with the flag only: `off` helps where the file is at
/// fault, too.
fn site(arguments: Arguments) -> Result<Option<Site>, Failure> {
    if !flag_given() {
        return Ok(None);
    }
    let plugstack = Plugstack::parse(arguments.iter()).map_err(Failure::refused)?;
    super::slurmstepd::read_site(plugstack.config).map_err(Failure::refused)
}

/// The settings that the checks of this process go by.
fn merged(settings: &Settings, site: Option<&Site>, environment: &Environment) -> Settings {
    match site {
        // Neither the nodes nor, but inside a job, the partition is known yet.
        Some(site) => {
            site.view(environment.get("SLURM_JOB_PARTITION"), None, &User::of_process(environment)).under(settings)
        }
        None => settings.clone(),
    }
}

/// In every context.
pub fn register(handle: Handle) -> Result<(), Failure> {
    for option in options() {
        handle.register_option(option)?;
    }
    Ok(())
}

/// srun: nothing is known yet. Called once, and for every plugin before any
/// other hook: a second copy of this plugin in plugstack.conf, whose option
/// Slurm disables, must not forget what the first one hands over.
pub fn init(handle: Handle) -> Result<(), Failure> {
    COPIES.fetch_add(1, Ordering::Relaxed);
    forget_handed_over();
    register(handle)
}

/// Refuses, with the flag, in a Slurm that is too old: its loader has let us in.
fn check_release(handle: Handle) -> Result<(), Failure> {
    if !flag_given() {
        return Ok(());
    }
    let words = words();
    let program = words.first().and_then(|word| word.rsplit('/').next()).unwrap_or("srun");
    release::check(program, handle.release()).map_err(Failure::refused)
}

/// srun: options are known, nothing is allocated. Called once per het component.
pub fn init_post_opt(handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    // The flag may come with a later component only.
    CALLS.fetch_add(1, Ordering::Relaxed);
    if nothing_to_do() {
        options_alone();
        return Ok(());
    }
    check_release(handle)?;
    let environment = Environment::of_process();
    let site = site(arguments)?;
    let Some(given) = settings(&environment, site.as_ref())? else {
        // `srun --palingenesis a : --palingenesis=off b`: the last word counts.
        if lock(&GIVEN).is_some() {
            forget_handed_over();
            *lock(&SETTINGS) = None;
        }
        return Ok(());
    };
    forget_terminal();
    if let Some(line) = kept::first() {
        refuse(&line);
    }
    ending::look_around(&environment);
    let settings = merged(&given, site.as_ref(), &environment);
    let exported = exported(&environment);
    given_port(&settings, &exported).map_err(Failure::refused)?;
    if let Some((host, origin)) = given_host(&settings, &exported) {
        check_given_host(&host, origin, 1, None, &[]).map_err(Failure::refused)?;
        if let Resolution::Failed(why) = resolve(&host, PATIENCE) {
            return Err(Failure::refused(unresolvable(&host, origin, &own_name(), &why)));
        }
    }
    if !is_salloc_s_shell() {
        check(&Subject::of_values(&values(&exported), &settings), Phase::Environment)?;
    }
    if het() {
        hand_over(HET, "1");
        // Of no component's command can be told where it ends among srun's words.
        hand_over_bound(&[], &environment);
    }
    if let Some(marks) = environment.get(config::MARKS) {
        hand_over(MARKS, marks);
    }
    if stdin_is_terminal() {
        hand_over(TERMINAL, "1");
    }
    if let Some(kept) = container::asked(&environment) {
        hand_over(CONTAINER, &kept.join(","));
    }
    // Here, where it reaches every component of a het step.
    if std::env::var_os("SLURM_PALINGENESIS_NONCE").is_none() {
        hand_over(NONCE, &Key::new()?.to_hex());
        hand_over(LAUNCHED, &clock::now().to_string());
    }
    if het() {
        listen_for_het(&environment);
    }
    // The user's own: each node adds what its site file has.
    hand_over(SPEC, &given.to_string());
    *lock(&SETTINGS) = Some(settings);
    Ok(())
}

/// Hands over whether the user chose the tasks' CPUs and memory.
fn hand_over_bound(command: &[String], environment: &Environment) {
    let bound = UserBound::of(&words(), command, environment);
    for (name, chosen) in [(CPU_BIND, bound.cpu), (MEM_BIND, bound.mem)] {
        if let Some(text) = chosen {
            hand_over(name, &text);
        }
    }
}

/// Of an srun with one of [`APART`]'s options and no flag, which is easily taken for
/// one. What sbatch or salloc handed down is for those sruns that have the flag.
fn options_alone() {
    let given = lock(&APART_GIVEN).clone();
    let own = given.iter().zip(APART.iter().zip(config::APART_HANDED_DOWN));
    let own = own.filter(|(given, (_, handed))| given.is_some() && std::env::var_os(handed).is_none());
    let line = |key| format!("palingenesis: warning: --palingenesis-{key} alone does nothing; add --palingenesis\n");
    tell(&own.map(|(_, (key, _))| line(key)).collect::<Vec<_>>());
}

/// As the settings take them.
fn texts(apart: &[Option<String>; APART.len()]) -> [Option<&str>; APART.len()] {
    std::array::from_fn(|index| apart[index].as_deref())
}

/// Whether the step has several het components, as far as `init_post_opt` knows.
fn het() -> bool {
    CALLS.load(Ordering::Relaxed) > COPIES.load(Ordering::Relaxed)
}

/// What somebody else than we set of these variables.
fn values(environment: &Environment) -> Vec<Value> {
    let marks = Marks::of(environment);
    let users = |name: &str| marks.users(environment, name).map(String::from);
    environment
        .iter()
        .filter_map(|(name, _)| Some(Value { name: name.into(), value: users(name)?, from: From::User }))
        .collect()
}

/// Looks at what is known so far: an error refuses, all else is told.
fn check(subject: &Subject, phase: Phase) -> Result<(), Failure> {
    let found = checks::judge(checks::look(subject, &[phase]), subject.settings);
    let (errors, rest): (Vec<Warning>, Vec<Warning>) =
        found.into_iter().partition(|warning| warning.severity == Severity::Error);
    if !errors.is_empty() {
        return Err(Failure::refused(Refusal::Checks(errors)));
    }
    tell(&rest.iter().map(report::warning_line).collect::<Vec<_>>());
    let told: Vec<String> = lock(&TOLD_LINES).iter().take(MOST_TOLD).map(|mark| format!("{mark:x}")).collect();
    if !told.is_empty() {
        hand_over(TOLD, &told.join(" "));
    }
    Ok(())
}

/// Tells each line once in this srun.
fn tell(lines: &[String]) {
    let mut told = lock(&TOLD_LINES);
    let mut text = String::new();
    for line in lines {
        let mark = report::mark(line);
        if !told.contains(&mark) {
            told.push(mark);
            text.push_str(line);
        }
    }
    to_stderr(&text);
}

/// Whether this srun is the one by which salloc starts a shell on the job's
/// first node (`src/salloc/salloc.c`: `srun --interactive …`): salloc has told
/// what there is to tell, and its user may still change it.
fn is_salloc_s_shell() -> bool {
    std::env::args_os().skip(1).any(|word| word == "--interactive")
}

/// sbatch, salloc: the option's grammar is refused. All else only warns, since
/// the script may still change its environment.
pub fn allocator_init_post_opt(handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    if nothing_to_do() {
        return Ok(());
    }
    let option = lock(&GIVEN).clone();
    let environment = Environment::of_process();
    let outcome = check_release(handle)
        .and_then(|()| site(arguments))
        .and_then(|site| Ok((foreseen(option.as_deref(), site.as_ref(), &environment)?, site)));
    let (settings, site) = match outcome {
        Ok(outcome) => outcome,
        Err(failure) if option.is_some() => return Err(failure),
        Err(Failure::Refused(error)) => {
            to_stderr(&report::one_line(&format!("palingenesis: warning: srun in this job will refuse: {error}")));
            return Ok(());
        }
        Err(Failure::Fault(_)) => return Ok(()),
    };
    if let Some(settings) = settings {
        let settings = merged(&settings, site.as_ref(), &environment);
        let values = values(&exported_by(&environment, &["SBATCH_EXPORT"]));
        let found = checks::look(&Subject::of_values(&values, &settings), &[Phase::Environment]);
        let lines: Vec<String> = checks::judge(found, &settings).into_iter().map(forewarned).collect();
        tell(&lines);
    }
    Ok(())
}

/// The settings an srun in this job would have from here, if the flag is given. Of
/// a wrong key variable beside the option nothing is said: the script may still
/// change it.
fn foreseen(option: Option<&str>, site: Option<&Site>, environment: &Environment) -> Result<Option<Settings>, Failure> {
    let of_option = match option {
        Some(_) => settings(&Environment::default(), site)?,
        None => None,
    };
    if let Some(line) = kept::first().filter(|_| of_option.is_some()) {
        refuse(&line);
    }
    let profiles = site.map(Site::profile_names).unwrap_or_default();
    let apart = lock(&APART_GIVEN).clone();
    let given = Given { option, apart: texts(&apart), site_profiles: &profiles };
    match config::resolve(given, environment) {
        Ok(settings) => Ok(settings.filter(|settings| !settings.off && !settings.help)),
        Err(_) if option.is_some() => Ok(of_option),
        Err(error) => Err(Failure::refused(error)),
    }
}

/// A finding's line where nothing is refused yet.
fn forewarned(mut warning: Warning) -> String {
    if warning.severity == Severity::Error {
        warning.severity = Severity::Warning;
        warning.message = format!("srun in this job will refuse {}", warning.message);
    }
    report::warning_line(&warning)
}

/// srun: the step is laid out, nothing is launched. Called once, also for a het
/// step: then with the ids of whichever component's thread comes first, and what
/// is set here reaches that component's tasks only (`_launch_one_app` in srun.c).
/// The tasks are told nothing then; all of them take the step's first node.
pub fn local_user_init(handle: Handle) -> Result<(), Failure> {
    let Some(settings) = lock(&SETTINGS).clone() else {
        return Ok(());
    };
    let (job, step) = (handle.job_id()?, handle.step_id()?);
    // The shell that salloc starts on a node is a step, and no training.
    if step >= FIRST_SPECIAL_STEP {
        forget_handed_over();
        return Ok(());
    }
    let command = handle.command().unwrap_or_default();
    let policy = ending::policy(&words(), &command, &Environment::of_process());
    ending::expect(handle, &settings, policy);
    if !het() {
        hand_over_bound(&command, &Environment::of_process());
    }
    let multi_prog = is_multi_prog(&command, &words());
    if multi_prog {
        hand_over(MULTI_PROG, "1");
    }
    worker::check_multi_prog(&settings, &command, multi_prog).map_err(Failure::refused)?;
    let environment = Environment::of_process();
    let layout = if het() { None } else { Layout::of(job, step) };
    if let Some(layout) = &layout {
        ending::look_nodes_up(layout);
    }
    let node = layout.as_ref().and_then(|layout| layout.node_of(0));
    if let Some(node) = &node {
        hand_over(HOST, node);
        let addresses = numeric_addresses(node);
        let others = addresses.iter().find(|address| !address.is_loopback());
        if let Some(address) = others {
            hand_over(ADDRESS, &address.to_string());
        }
        // A node with no other address than this host's own is this host.
        if let Some(address) = others.or(addresses.first()) {
            listen_for(*address);
        }
    }
    if let Some((host, origin)) = given_host(&settings, &exported(&environment)) {
        let job_nodes = environment.get("SLURM_JOB_NODELIST").unwrap_or_default();
        let mut known = hostlist::expand(job_nodes).unwrap_or_default();
        if let Some(layout) = &layout {
            let tasks = handle.tasks().unwrap_or(0).min(TASKS_LOOKED_AT);
            known.extend((0..tasks).filter_map(|task| layout.node_of(task)));
        }
        let nodes = handle.nodes().unwrap_or(1);
        check_given_host(&host, origin, nodes, node.as_deref(), &known).map_err(Failure::refused)?;
    }
    // Of a het step one component is known here; its tasks look for themselves.
    if het() {
        return Ok(());
    }
    let values = values(&exported(&environment));
    let pty = environment.get("SLURM_PTY_PORT").is_some();
    let most = most_on_a_node(handle, layout.as_ref());
    let shape = launch::shape(&settings, &command, pty, stdin_is_terminal(), most == Some(1));
    if shape == Shape::Agent {
        ending::has_launchers();
    }
    let subject = Subject {
        command: &command,
        nodes: handle.nodes().ok(),
        tasks: handle.tasks().ok(),
        tasks_on_a_node: most,
        shape: Some(shape),
        policy: Some(policy),
        ..Subject::of_values(&values, &settings)
    };
    check(&subject, Phase::Launch)
}

/// The most tasks on one node, as far as the layout is looked at; beyond that at
/// least the mean.
fn most_on_a_node(handle: Handle, layout: Option<&Layout>) -> Option<u32> {
    let (tasks, nodes) = (handle.tasks().ok()?, handle.nodes().ok()?);
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for node in layout.iter().flat_map(|layout| (0..tasks.min(TASKS_COUNTED)).filter_map(|task| layout.node_of(task))) {
        *counts.entry(node).or_default() += 1;
    }
    let mean = tasks.div_ceil(nodes.max(1));
    Some(counts.into_values().max().unwrap_or(0).max(mean))
}

/// srun, sbatch, salloc: the end. Slurm unloads us; what we hold would be lost.
pub fn exit() {
    ending::report(exits::collect());
    *lock(&GIVEN) = None;
    *lock(&APART_GIVEN) = [const { None }; APART.len()];
    *lock(&SETTINGS) = None;
    *lock(&TOLD_LINES) = Vec::new();
    host::forget_conf();
}

/// Addresses of `node`: its NodeAddr, looked up if it is a name.
fn numeric_addresses(node: &str) -> Vec<IpAddr> {
    match host::node_address(node).map(|address| resolve(&address, RESOLVE_NODE)) {
        Some(Resolution::Found(found)) => found,
        _ => Vec::new(),
    }
}

/// Listens for the records of ranks that fail, where the node with this address can
/// reach this host, and tells the nodes where.
fn listen_for(node: IpAddr) {
    if let Some(address) = exits::open(node) {
        hand_over(EXITS, &address);
    }
}

/// The same for a het step, before anything is known of its nodes but, inside a job,
/// their names; elsewhere the way out of this host counts.
fn listen_for_het(environment: &Environment) {
    let list = ["SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_0"].iter().find_map(|name| environment.get(name));
    let nodes = list.and_then(|list| hostlist::expand(list).ok());
    let first = nodes.and_then(|nodes| nodes.into_iter().next());
    let address = first.and_then(|node| numeric_addresses(&node).first().copied());
    listen_for(address.unwrap_or(ELSEWHERE));
}

/// The part of srun's environment that `--export` lets through to the tasks.
fn exported(environment: &Environment) -> Environment {
    exported_by(environment, &["SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV"])
}

/// The same with the variables that stand for `--export`.
fn exported_by(environment: &Environment, variables: &[&str]) -> Environment {
    let variable = || variables.iter().find_map(|name| environment.get(name));
    let rule = export_option(words().into_iter()).or_else(|| variable().map(String::from));
    let rule = rule.unwrap_or_else(|| "ALL".into());
    let names: Vec<&str> = rule.split(',').map(|word| word.split('=').next().unwrap_or(word)).collect();
    if names.contains(&"ALL") {
        return environment.clone();
    }
    // The marks reach the tasks anyway, see MARKS.
    let passed = environment.iter().filter(|(name, _)| names.contains(name) || *name == config::MARKS);
    passed.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// srun's command line.
fn words() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// Whether srun was given `--multi-prog`, which it tells nobody. Its command then
/// has the file's text as the second word (measured with 22.05.8), so that it
/// does not stand on srun's command line. (The first word may differ there without
/// it: with --bcast it is the copy's path.)
fn is_multi_prog(command: &[String], words: &[String]) -> bool {
    // getopt_long takes unique abbreviations.
    let asked = |word: &String| word.len() >= "--mu".len() && "--multi-prog".starts_with(word.as_str());
    command.len() >= 2
        && words.iter().any(asked)
        && !words.windows(command.len() - 1).any(|window| *window == command[1..])
}

/// The value of `--export` on srun's command line, which srun tells nobody.
/// Where the word belongs to the user's command, a check made here is merely
/// made later, on the nodes.
fn export_option(words: impl Iterator<Item = String>) -> Option<String> {
    let mut words = words.skip(1);
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (word.as_str(), None),
        };
        // getopt_long takes unique abbreviations.
        if name.len() >= "--exp".len() && "--export".starts_with(name) {
            return value.or_else(|| words.next());
        }
    }
    None
}

/// This host's name.
pub fn own_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_export_option_in_its_forms() {
        let find = |line: &str| export_option(line.split(' ').map(String::from));
        assert_eq!(find("srun -N2 --export=NONE a.out").as_deref(), Some("NONE"));
        assert_eq!(find("srun --export A=1,B a.out").as_deref(), Some("A=1,B"));
        assert_eq!(find("srun --exp=ALL a.out").as_deref(), Some("ALL"));
        assert_eq!(find("srun --exclusive --export-file=x a.out"), None);
        assert_eq!(find("srun --export"), None);
    }

    #[test]
    fn multi_prog_is_known_by_the_text_of_its_file() {
        let words = |text: &str| text.split('|').map(String::from).collect::<Vec<_>>();
        let file = words("mp.conf|0 a\n* b\n|x");
        assert!(is_multi_prog(&file, &words("srun|-n2|--multi-prog|mp.conf|x")));
        assert!(is_multi_prog(&file, &words("srun|--multi|mp.conf|x")));
        assert!(!is_multi_prog(&words("tool|--multi-prog"), &words("srun|tool|--multi-prog")));
        assert!(!is_multi_prog(&words("tool|x"), &words("srun|-n1|tool|x|:|tool")));
    }

    #[test]
    fn what_export_lets_through() {
        let environment = |rule: Option<&str>| {
            let mut environment = Environment::default();
            environment.set("A", "1");
            environment.set("B", "2");
            if let Some(rule) = rule {
                environment.set("SLURM_EXPORT_ENV", rule);
            }
            exported(&environment)
        };
        assert_eq!(environment(None).get("A"), Some("1"));
        assert_eq!(environment(Some("NONE")).get("A"), None);
        let named = environment(Some("B,C=3"));
        assert_eq!((named.get("A"), named.get("B")), (None, Some("2")));
        assert_eq!(environment(Some("ALL,C=3")).get("A"), Some("1"));
    }

    #[test]
    fn what_sbatch_lets_through_is_told_by_its_own_variable() {
        let mut environment = Environment::default();
        environment.set("A", "1");
        environment.set("SLURM_EXPORT_ENV", "NONE");
        assert_eq!(exported_by(&environment, &["SBATCH_EXPORT"]).get("A"), Some("1"));
        environment.set("SBATCH_EXPORT", "NONE");
        assert_eq!(exported_by(&environment, &["SBATCH_EXPORT"]).get("A"), None);
    }

    #[test]
    fn an_outer_step_s_values_are_not_the_user_s() {
        let mut environment = Environment::default();
        // FNV-1a of "120" and "1".
        environment.set(config::MARKS, "7.0 NCCL_IB_TIMEOUT=733864ae RANK=340ca71c");
        environment.set("NCCL_IB_TIMEOUT", "120");
        environment.set("RANK", "1");
        let marks = Marks::of(&environment);
        assert!(marks.ours(&environment, "RANK"), "the hash in this test is wrong");
        let names: Vec<String> = values(&environment).into_iter().map(|value| value.name).collect();
        assert!(!names.iter().any(|name| name == "RANK"), "{names:?}");
    }

    #[test]
    fn a_refusal_to_come_is_a_warning() {
        let message = "X=y: z".to_string();
        let error = Warning { id: "c10d-bool", severity: Severity::Error, message, cure: "unset it".into() };
        let line = forewarned(error);
        assert_eq!(line, "palingenesis: warning: srun in this job will refuse X=y: z; unset it [c10d-bool]\n");
    }
}
