//! The door to other programs: the functions of `include/palingenesis.h`.

use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::config;
use crate::config::site::{SITE_FILE, Site, SiteView};
use crate::facts::{Environment, Step, User};
use crate::plan::{self, Facts};

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
    if json.is_null() {
        return -2;
    }
    let outcome = catch_unwind(AssertUnwindSafe(layout)).unwrap_or_else(|_| Err("internal fault".into()));
    let (code, text) = match outcome {
        Ok(text) => (0, text),
        Err(text) => (-1, text),
    };
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    // SAFETY: not null, and writable as the caller promises.
    unsafe { *json = text.into_raw() };
    code
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

fn layout() -> Result<String, String> {
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
    let facts = Facts { site: Some(&view), ..Facts::new(&step, &environment) };
    let plan = plan::plan(&facts, &settings).map_err(|error| error.to_string())?;
    serde_json::to_string(&plan.step).map_err(|error| error.to_string())
}
