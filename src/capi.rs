//! The door to other programs: the functions of `include/palingenesis.h`.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::net::ToSocketAddrs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::act;
use crate::act::exchange::{self, Meeting};
use crate::act::key::Key;
use crate::config::site::{SITE_FILE, Site, SiteView};
use crate::config::{self, Settings};
use crate::facts::{Environment, NodeFacts, Step, TaskFacts, User};
use crate::plan::worker::STORE_KEY;
use crate::plan::{self, Facts, Plan};
use crate::report;

/// Writes the calling task's place in its step to `*json`, as a JSON object
/// with at least the keys job_id, step_id, shape, profile, fabric, nodes,
/// node_list, world_size, rank, local_rank, local_world_size, node_rank, node,
/// master_addr, master_port and ports. It is read from the task's environment;
/// the plugin need not be installed, but where it set MASTER_ADDR and
/// MASTER_PORT these are the ones. The command and the node's devices are not
/// looked at: shape is "native" and fabric "auto" where only these would tell.
/// master_addr and master_port are absent where shape is "shell".
/// The site file counts where it can be read; one that is broken or, as in most
/// containers, absent is no error here: this only tells what is.
///
/// Returns 0, or -1 when there is no step or it makes no sense; `*json` is then
/// one line that says why. Either way `*json` must be given back to
/// palingenesis_free. Returns -2 and writes nothing when `json` is NULL.
/// Starts no thread and may be called from any; do not change the environment
/// meanwhile.
///
/// # Safety
/// `json` is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn palingenesis_layout_json(json: *mut *mut c_char) -> c_int {
    // SAFETY: what the caller promises.
    unsafe { answer(json, || layout().map(|text| (0, text))) }
}

/// Writes to `*json` what srun --palingenesis would give the calling task, as a
/// JSON object: step (as palingenesis_layout_json has it), variables with the
/// reason of each, binding, warnings and more, as `palingenesis explain --json`
/// prints it. Nothing is set, made or bound. What is secret is not shown.
///
/// Returns and rules as for palingenesis_layout_json; -1 also where the step
/// would be refused.
///
/// # Safety
/// `json` is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn palingenesis_plan_json(json: *mut *mut c_char) -> c_int {
    // SAFETY: what the caller promises.
    unsafe {
        answer(json, || with_plan(|plan| report::json(plan).map_err(|error| error.to_string()))?.map(|text| (0, text)))
    }
}

/// Binds the calling thread to the CPUs and the memory near the GPU of its rank,
/// as the plugin binds a task; threads that are made later inherit it, so call it
/// before there are others. What Slurm gave the task is narrowed, never widened,
/// and ranks do not exchange what they have, which only the plugin can let them
/// do. Under the plugin it finds all done and changes nothing.
///
/// Returns 0 when everything is as planned, also where nothing is to be bound,
/// and `*text` is the reason of each part, one per line; 1 when the kernel
/// refused a part, and `*text` says which; -1 and -2 as for
/// palingenesis_layout_json. `*text` must be given back to palingenesis_free.
///
/// # Safety
/// `text` is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn palingenesis_bind(text: *mut *mut c_char) -> c_int {
    let bind = || {
        with_plan(|plan| match act::binding::apply(plan) {
            refused if !refused.is_empty() => (1, refused.join("\n")),
            _ => (
                0,
                plan.binding
                    .decisions
                    .iter()
                    .map(|decision| {
                        format!(
                            "{}: {}{}",
                            decision.what,
                            decision.value.as_deref().map_or_else(String::new, |value| format!("{value}; ")),
                            decision.why
                        )
                    })
                    .collect::<Vec<_>>()
                    .join("\n"),
            ),
        })
    };
    // SAFETY: what the caller promises.
    unsafe { answer(text, bind) }
}

/// Gives all ranks of the step rank 0's `length` bytes at `id`, such as an
/// ncclUniqueId: rank 0 brings them, on the others they are written. Every rank
/// must call it, with the same length (1 to 65536), equally often. The ranks meet
/// at MASTER_ADDR, where rank 0 listens on MASTER_PORT until all have come;
/// nothing else may listen there meanwhile. Who does not know
/// PALINGENESIS_STORE_KEY, 64 hexadecimal digits that are the same on all ranks,
/// gets nothing and gives nothing; srun --palingenesis=store sets it. The bytes
/// are not encrypted.
///
/// Returns 0; or -1 when it failed, within about `timeout_seconds` on each rank,
/// and `*error`, where `error` is not NULL, is one line that names who did not
/// come and must be given back to palingenesis_free; -2 when `id` is NULL or
/// `length` is out of range. Waits in the calling thread, starts none, and keeps
/// no descriptor. Two threads of a process must not call it at once.
///
/// # Safety
/// `id` is NULL or points to `length` bytes that may be written; `error` is NULL
/// or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn palingenesis_exchange_id(
    id: *mut c_void,
    length: usize,
    timeout_seconds: c_uint,
    error: *mut *mut c_char,
) -> c_int {
    if id.is_null() || !(1..=exchange::LONGEST).contains(&length) {
        return -2;
    }
    // SAFETY: not null, and that long as the caller promises.
    let id = unsafe { std::slice::from_raw_parts_mut(id.cast::<u8>(), length) };
    let outcome = catch_unwind(AssertUnwindSafe(|| exchanged(id, timeout_seconds)));
    match outcome.unwrap_or_else(|_| Err("internal fault".into())) {
        Ok(bytes) => {
            id.copy_from_slice(&bytes);
            0
        }
        Err(why) => {
            if !error.is_null() {
                // SAFETY: not null, and writable as the caller promises.
                unsafe { *error = c_string(&why) };
            }
            -1
        }
    }
}

/// Frees a string that this library returned; NULL is allowed.
///
/// # Safety
/// `text` is NULL or came from this library and was not freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn palingenesis_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: made by CString::into_raw above, as the caller promises.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Writes what `work` gives, or why it failed with -1.
///
/// # Safety
/// `text` is NULL or points to a writable pointer.
unsafe fn answer(text: *mut *mut c_char, work: impl FnOnce() -> Result<(c_int, String), String>) -> c_int {
    if text.is_null() {
        return -2;
    }
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("internal fault".into()));
    let (code, line) = outcome.unwrap_or_else(|why| (-1, why));
    // SAFETY: not null, and writable as the caller promises.
    unsafe { *text = c_string(&line) };
    code
}

fn c_string(text: &str) -> *mut c_char {
    CString::new(text.replace('\0', "")).unwrap_or_default().into_raw()
}

/// The calling task's step, and what holds for it.
struct Here {
    environment: Environment,
    step: Step,
    settings: Settings,
    view: SiteView,
}

fn here() -> Result<Here, String> {
    let environment = Environment::of_process();
    let step = Step::from_environment(&environment).map_err(|error| error.to_string())?;
    let file = config::site_file_of_step(&environment).unwrap_or(SITE_FILE);
    let site = Site::read(file).ok().flatten();
    let profiles = site.as_ref().map(Site::profile_names).unwrap_or_default();
    let settings = config::resolve_flagged(None, &environment, &profiles).map_err(|error| error.to_string())?;
    let mut view = site.map_or_else(SiteView::default, |site| {
        site.view(environment.get("SLURM_JOB_PARTITION"), Some(&step.node), &User::of_process(&environment))
    });
    // A profile of the step's own site file gives variables, no ranks.
    if let Some(name) = &settings.site_profile {
        view.profiles.entry(name.clone()).or_default();
    }
    Ok(Here { environment, step, settings, view })
}

fn layout() -> Result<String, String> {
    let Here { environment, step, settings, view } = here()?;
    let facts = Facts { site: Some(&view), ..Facts::new(&step, &environment) };
    let plan = plan::plan(&facts, &settings).map_err(|error| error.to_string())?;
    serde_json::to_string(&plan.step).map_err(|error| error.to_string())
}

/// The plan of this task on this node.
fn with_plan<T>(work: impl FnOnce(&Plan) -> T) -> Result<T, String> {
    let Here { environment, step, settings, view } = here()?;
    let root = Path::new("/");
    let node = NodeFacts::read(root);
    let task = TaskFacts::read(root, &environment, &node);
    let facts = Facts { site: Some(&view), node: &node, task: &task, ..Facts::new(&step, &environment) };
    let plan = plan::plan(&facts, &settings).map_err(|error| error.to_string())?;
    Ok(work(&plan))
}

/// Counts the exchanges of this process: each has a key of its own, so that a rank
/// that is ahead does not meet those that are behind.
static EXCHANGES: AtomicU32 = AtomicU32::new(0);

fn exchanged(id: &[u8], timeout_seconds: u32) -> Result<Vec<u8>, String> {
    let number = EXCHANGES.fetch_add(1, Ordering::Relaxed);
    let Here { environment, step, settings, view } = here()?;
    let facts = Facts { site: Some(&view), ..Facts::new(&step, &environment) };
    let plan = plan::plan(&facts, &settings).map_err(|error| error.to_string())?.step;
    let key = environment.get(STORE_KEY).ok_or_else(|| {
        format!("{STORE_KEY} is not set: launch with srun --palingenesis=store, or set it to the same 64 hexadecimal digits on all ranks")
    })?;
    let key = Key::from_hex(key).ok_or_else(|| format!("{STORE_KEY} is not 64 hexadecimal digits"))?;
    let (Some(host), Some(port)) = (&plan.master_addr, plan.master_port) else {
        return Err("one task runs a shell here, so that there are no ranks to meet".into());
    };
    let addresses = (host.as_str(), port).to_socket_addrs();
    let addresses = addresses.map_err(|error| format!("MASTER_ADDR {host} cannot be looked up: {error}"))?;
    let meeting = Meeting {
        rank: plan.rank,
        world_size: plan.world_size,
        addresses: addresses.map(|address| address.ip()).collect(),
        port,
        key: key.derive_from(&[b"exchange", &number.to_be_bytes()]),
        limit: Duration::from_secs(timeout_seconds.into()),
    };
    let bytes = exchange::from_rank_0(&meeting, id)?;
    if bytes.len() != id.len() {
        return Err(format!("rank 0 gave {} bytes, rank {} waits for {}", bytes.len(), plan.rank, id.len()));
    }
    Ok(bytes)
}
