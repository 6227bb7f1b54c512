//! The door to Slurm: the exported symbols, and one dispatcher that sends each
//! hook to the file of its context. No rule of the product lives here.
//!
//! What holds for every hook: a panic is caught; a hook returns 0, never an
//! error code (a failing remote hook drains nodes, a positive code means
//! different things in different releases); without the flag it returns before
//! it allocates. What goes wrong on a node before the tasks run is kept and
//! told in task_init, the only hook whose failure ends the step with a message
//! and harms nothing else.

mod ending;
mod exits;
mod fault;
mod ffi;
mod gate;
mod host;
mod kept;
mod orphan;
mod preflight;
mod slurmstepd;
mod srun;
mod task;

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use host::{Context, Handle};

/// The number of the release that build.rs found or was told.
const BUILT_FOR: u32 = parse(env!("PALINGENESIS_PLUGIN_VERSION"));

const fn parse(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("build.rs writes a number"),
    }
}

/// Read by Slurm's loader (`src/common/plugin.c`).
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static plugin_name: [u8; 13] = *b"palingenesis\0";
/// Read by Slurm's loader.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static plugin_type: [u8; 6] = *b"spank\0";
/// Read by Slurm's loader: major and minor must be its own. An atomic, so that the
/// number in the file counts and no copy that the compiler made of it:
/// packaging/stamp writes another one into the finished library.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static plugin_version: AtomicU32 = AtomicU32::new(BUILT_FOR);

/// Major and minor of the release this library is stamped for: Slurm loads it into
/// that one only.
fn stamp() -> (u32, u32) {
    let number = plugin_version.load(Ordering::Relaxed);
    (number >> 16, (number >> 8) & 0xff)
}

/// The Slurm release this library is stamped for, as "22.05".
pub fn release() -> String {
    let (major, minor) = stamp();
    format!("{major}.{minor:02}")
}

/// Whether the bindings came from this machine's "header" or are the "committed" ones.
pub fn bindings_from() -> &'static str {
    env!("PALINGENESIS_BINDINGS_FROM")
}

/// The hooks we have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hook {
    Init,
    InitPostOpt,
    LocalUserInit,
    UserInit,
    TaskInit,
    TaskExit,
    Exit,
    SlurmdExit,
}

impl Hook {
    /// The symbol's name without its prefix.
    fn name(self) -> &'static str {
        match self {
            Hook::Init => "init",
            Hook::InitPostOpt => "init_post_opt",
            Hook::LocalUserInit => "local_user_init",
            Hook::UserInit => "user_init",
            Hook::TaskInit => "task_init",
            Hook::TaskExit => "task_exit",
            Hook::Exit => "exit",
            Hook::SlurmdExit => "slurmd_exit",
        }
    }
}

/// The plugin's arguments in plugstack.conf, as Slurm passes them.
#[derive(Debug, Clone, Copy)]
struct Arguments {
    count: c_int,
    words: *mut *mut c_char,
}

impl Arguments {
    fn iter<'a>(self) -> impl Iterator<Item = &'a str> {
        let count = if self.words.is_null() { 0 } else { usize::try_from(self.count).unwrap_or(0) };
        (0..count).filter_map(move |index| {
            // SAFETY: Slurm passes `count` strings that live as long as the plugin.
            let word = unsafe { *self.words.add(index) };
            // SAFETY: as above; a null one is skipped.
            (!word.is_null()).then(|| unsafe { CStr::from_ptr(word) }.to_str().unwrap_or("(not UTF-8)"))
        })
    }
}

/// Why a hook could not do its work. The text is for the user: what, why, cure.
#[derive(Debug)]
enum Failure {
    /// The job would not work.
    Refused(String),
    /// Our own or Slurm's fault.
    Fault(String),
}

impl Failure {
    fn refused(error: impl std::error::Error) -> Failure {
        Failure::Refused(error.to_string())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Fault(error.to_string())
    }
}

/// The line for a failure of `hook`.
fn line(hook: Hook, failure: &Failure) -> String {
    crate::report::one_line(&match failure {
        Failure::Refused(text) => format!("palingenesis: error: {text}"),
        Failure::Fault(text) => format!(
            "palingenesis: error: internal fault in slurm_spank_{}: {text}; please report it, \
             and start the job with --palingenesis=off meanwhile",
            hook.name()
        ),
    })
}

/// Every hook comes through here.
fn enter(hook: Hook, raw: ffi::spank_t, count: c_int, words: *mut *mut c_char) -> c_int {
    // Nothing may unwind into Slurm, not even from what surrounds the hook.
    let _ = catch_unwind(|| run(hook, raw, count, words));
    0
}

fn run(hook: Hook, raw: ffi::spank_t, count: c_int, words: *mut *mut c_char) {
    kept::install_panic_hook();
    // SAFETY: Slurm passes its handle to the hook that is now running.
    let handle = unsafe { Handle::new(raw) };
    let arguments = Arguments { count, words };
    let context = host::context();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        if (context, hook) == (Context::Remote, Hook::TaskInit) {
            task::make_killable(handle);
        }
        fault::inject(hook, context, handle, arguments)?;
        dispatch(hook, context, handle, arguments)
    }));
    let failure = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::Fault(kept::last_panic()),
    };
    // Reporting a failure must not become one, nor let a task run unprepared.
    let told = catch_unwind(AssertUnwindSafe(|| failed(hook, context, handle, &failure)));
    if told.is_err() && (context, hook) == (Context::Remote, Hook::TaskInit) && slurmstepd::active() {
        crate::system::output::exit_now(crate::EXIT_REFUSED);
    }
}

fn dispatch(hook: Hook, context: Context, handle: Handle, arguments: Arguments) -> Result<(), Failure> {
    match (context, hook) {
        (Context::Local, Hook::Init) => srun::init(handle),
        (Context::Allocator | Context::Remote | Context::Slurmd, Hook::Init) => srun::register(handle),
        (Context::Local, Hook::InitPostOpt) => srun::init_post_opt(handle, arguments),
        (Context::Allocator, Hook::InitPostOpt) => srun::allocator_init_post_opt(handle, arguments),
        (Context::Local, Hook::LocalUserInit) => srun::local_user_init(handle),
        (Context::Remote, Hook::UserInit) => slurmstepd::user_init(handle, arguments),
        (Context::Remote, Hook::TaskInit) => task::task_init(handle),
        (Context::Remote, Hook::TaskExit) => slurmstepd::task_exit(handle),
        (Context::Remote, Hook::Exit) => slurmstepd::exit(handle),
        (Context::Local | Context::Allocator, Hook::Exit) => {
            srun::exit();
            Ok(())
        }
        _ => Ok(()),
    }
}

/// What a failure means, by where it happened.
fn failed(hook: Hook, context: Context, handle: Handle, failure: &Failure) {
    match (context, hook) {
        // Told when the flag turns out to be given. Without the option Slurm would
        // speak of an unknown one.
        (Context::Local | Context::Allocator, Hook::Init) => {
            kept::keep(line(hook, failure));
            let _ = srun::init(handle);
        }
        (Context::Local | Context::Allocator, Hook::InitPostOpt) if srun::flag_given() => {
            srun::refuse(&line(hook, failure))
        }
        // The step exists already. An srun that ends here leaves it standing in the
        // job's allocation, with its CPUs (measured with 22.05.8), so the tasks are
        // told to refuse and Slurm cleans up as after any failed step.
        (Context::Local, Hook::LocalUserInit) if srun::flag_given() => srun::refuse_in_tasks(&line(hook, failure)),
        (Context::Remote, Hook::Init | Hook::InitPostOpt) => kept::keep(line(hook, failure)),
        (Context::Remote, Hook::UserInit) => {
            kept::keep(line(hook, failure));
            // So that one of the node's tasks tells it, not each. Without a
            // gate each does.
            let _ = slurmstepd::open_gate(handle);
        }
        // A task that has taken srun's words out of its environment is known by
        // its slurmstepd, one before that by the words.
        (Context::Remote, Hook::TaskInit) if slurmstepd::active() || task::flag_given(handle) => {
            task::refuse_with(handle, &kept::first().unwrap_or_else(|| line(hook, failure)))
        }
        (Context::Remote, Hook::TaskExit | Hook::Exit) if slurmstepd::active() => {
            let line = line(hook, failure);
            host::log(line.trim_end());
            slurmstepd::remember_fault(&line);
            if hook == Hook::Exit {
                slurmstepd::report(handle);
            }
        }
        (Context::Local, Hook::Exit) if srun::flag_given() => crate::system::output::to_stderr(&line(hook, failure)),
        _ => {}
    }
}

macro_rules! hooks {
    ($($symbol:ident => $hook:expr;)*) => {$(
        /// Called by Slurm (spank(8)).
        ///
        /// # Safety
        /// `spank` is Slurm's handle; `argv` holds `argc` strings.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(spank: ffi::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
            enter($hook, spank, argc, argv)
        }
    )*};
}

hooks! {
    slurm_spank_init => Hook::Init;
    slurm_spank_init_post_opt => Hook::InitPostOpt;
    slurm_spank_local_user_init => Hook::LocalUserInit;
    slurm_spank_user_init => Hook::UserInit;
    slurm_spank_task_init => Hook::TaskInit;
    slurm_spank_task_exit => Hook::TaskExit;
    slurm_spank_exit => Hook::Exit;
    slurm_spank_slurmd_exit => Hook::SlurmdExit;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bindings_are_those_of_the_header() {
        let used = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
        if bindings_from() == "committed" {
            println!("skipped: no slurm/spank.h or no libclang here, the committed bindings are in use");
            return;
        }
        // The release's number is the one line that may differ.
        let without_version = |text: &str| {
            text.lines().filter(|line| !line.contains("SLURM_VERSION_NUMBER")).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(
            without_version(used),
            without_version(include_str!("bindings.rs")),
            "src/spank/bindings.rs is not what bindgen makes of this machine's slurm/spank.h"
        );
    }

    #[test]
    fn stamped_for_a_release_with_the_version_gate() {
        assert!(stamp() >= (21, 8), "{}", release());
    }
}
