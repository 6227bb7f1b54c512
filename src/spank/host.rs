//! The program that loaded us (srun, sbatch, salloc, slurmd or slurmstepd), its
//! SPANK functions found by name at run time, and the safe handle over them.
//!
//! Nothing is linked: a library with one function that the running release lacks
//! could not be loaded at all (rustc links with BIND_NOW), and one with none
//! loads into any program.

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use thiserror::Error;

use super::ffi;
use super::kept::lock;
use crate::act::environment::TaskEnvironment;
use crate::act::launch::TaskCommand;
use crate::facts::Environment;
use crate::plan::release::Release;
use crate::system::child;

/// A SPANK call that did not work.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpankError {
    /// The program that loaded us has no such function.
    #[error("this program has no {0}: is it a Slurm command or daemon?")]
    NoFunction(&'static str),
    /// The function said no.
    #[error("{call}({argument}): {reason}")]
    Refused {
        /// The function.
        call: &'static str,
        /// What it was asked for.
        argument: String,
        /// Slurm's text for its error code.
        reason: String,
    },
    /// It succeeded but gave no data, as S_JOB_ENV does in srun.
    #[error("spank_get_item({0}) gave no data")]
    NoData(&'static str),
    /// A name or value with a NUL byte cannot be passed.
    #[error("{0} contains a NUL byte")]
    Nul(String),
}

type GetItem = unsafe extern "C" fn(ffi::spank_t, ffi::spank_item, ...) -> c_int;
type GetEnv = unsafe extern "C" fn(ffi::spank_t, *const c_char, *mut c_char, c_int) -> c_int;
type SetEnv = unsafe extern "C" fn(ffi::spank_t, *const c_char, *const c_char, c_int) -> c_int;
type UnsetEnv = unsafe extern "C" fn(ffi::spank_t, *const c_char) -> c_int;
type GetContext = unsafe extern "C" fn() -> ffi::spank_context;
type RegisterOption = unsafe extern "C" fn(ffi::spank_t, *mut ffi::spank_option) -> c_int;
type PrependArgv = unsafe extern "C" fn(ffi::spank_t, c_int, *mut *const c_char) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;
type Log = unsafe extern "C" fn(*const c_char, ...);

/// A number that is not given (slurm.h).
const NO_VAL: u32 = 0xffff_fffe;

/// slurm_step_id_t of slurm.h up to 24.05. Later releases begin with a SLUID.
#[repr(C)]
#[derive(Default)]
struct StepId {
    job_id: u32,
    step_het_comp: u32,
    step_id: u32,
    // Read by nobody; there so that a release with a longer struct than ours
    // still reads our memory.
    room: [u64; 4],
}

/// slurm_step_id_t of slurm.h since 24.11.
#[repr(C)]
#[derive(Default)]
struct StepIdWithSluid {
    sluid: u64,
    id: StepId,
}

type LayoutGet = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type LayoutFree = unsafe extern "C" fn(*mut c_void);
type LayoutHostName = unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_char;
type LoadNode = unsafe extern "C" fn(*mut *mut c_void, *mut c_char, u16) -> c_int;
type Print = unsafe extern "C" fn(*mut libc::FILE, *mut c_void, c_int);
type Free = unsafe extern "C" fn(*mut c_void);
type SrunPorts = unsafe extern "C" fn() -> *const u16;
type NodeAddr = unsafe extern "C" fn(*const c_char) -> *mut c_char;
type PrintConf = unsafe extern "C" fn(*mut libc::FILE, *mut c_void);
type ConfLock = unsafe extern "C" fn() -> *mut c_void;
type ConfUnlock = unsafe extern "C" fn();

/// The table of the host's functions; absent ones are `None`.
#[derive(Debug, Clone, Copy)]
struct Functions {
    get_item: Option<GetItem>,
    getenv: Option<GetEnv>,
    setenv: Option<SetEnv>,
    unsetenv: Option<UnsetEnv>,
    context: Option<GetContext>,
    register: Option<RegisterOption>,
    strerror: Option<StrError>,
    log: Option<Log>,
}

fn functions() -> &'static Functions {
    static TABLE: OnceLock<Functions> = OnceLock::new();
    // SAFETY: each name has had this signature in spank.h since 21.08;
    // tests/abi.rs compares the headers.
    TABLE.get_or_init(|| unsafe {
        Functions {
            get_item: find(c"spank_get_item"),
            getenv: find(c"spank_getenv"),
            setenv: find(c"spank_setenv"),
            unsetenv: find(c"spank_unsetenv"),
            context: find(c"spank_context"),
            register: find(c"spank_option_register"),
            strerror: find(c"spank_strerror"),
            log: find(c"slurm_spank_log"),
        }
    })
}

/// The function of that name in the program that loaded us.
///
/// # Safety
/// `F` must be the function pointer type of the function so named.
unsafe fn find<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the name is a C string; RTLD_DEFAULT needs no handle.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and of the type the caller vouches for.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

/// Which program, and where in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// srun.
    Local,
    /// sbatch, salloc, scrontab.
    Allocator,
    /// slurmstepd.
    Remote,
    /// slurmd.
    Slurmd,
    /// A prolog or epilog, or unknown.
    Other,
}

/// The context of the running hook.
pub fn context() -> Context {
    let Some(context) = functions().context else {
        return Context::Other;
    };
    // SAFETY: spank_context takes nothing.
    match unsafe { context() } {
        ffi::S_CTX_LOCAL => Context::Local,
        ffi::S_CTX_ALLOCATOR => Context::Allocator,
        ffi::S_CTX_REMOTE => Context::Remote,
        ffi::S_CTX_SLURMD => Context::Slurmd,
        _ => Context::Other,
    }
}

/// Slurm's handle of the running hook. Valid only inside it.
#[derive(Debug, Clone, Copy)]
pub struct Handle(ffi::spank_t);

impl Handle {
    /// # Safety
    /// `raw` is the handle that Slurm passed to the hook now running.
    pub unsafe fn new(raw: ffi::spank_t) -> Handle {
        Handle(raw)
    }

    fn refused(call: &'static str, argument: &str, code: c_int) -> SpankError {
        let text = functions().strerror.map(|strerror| {
            // SAFETY: spank_strerror returns a static string for every code.
            unsafe { owned(strerror(code)) }
        });
        let reason = text.flatten().unwrap_or_else(|| format!("error {code}"));
        SpankError::Refused { call, argument: argument.into(), reason }
    }

    /// # Safety
    /// `T` is the type that spank.h documents for `item`.
    unsafe fn item<T: Copy>(self, name: &'static str, item: ffi::spank_item, empty: T) -> Result<T, SpankError> {
        let get_item = functions().get_item.ok_or(SpankError::NoFunction("spank_get_item"))?;
        let mut value = empty;
        // SAFETY: one pointer to the type the item has, as the caller vouches.
        match unsafe { get_item(self.0, item, &raw mut value) } {
            0 => Ok(value),
            code => Err(Self::refused("spank_get_item", name, code)),
        }
    }

    /// S_SLURM_VERSION_MAJOR and _MINOR: the release of the program that loaded us, in
    /// every context.
    pub fn release(self) -> Option<Release> {
        let number = |name, item| {
            let none: *const c_char = std::ptr::null();
            // SAFETY: char **.
            let text = unsafe { self.item(name, item, none) }.ok()?;
            // SAFETY: null or a constant of Slurm's.
            unsafe { owned(text) }?.parse().ok()
        };
        let year = number("S_SLURM_VERSION_MAJOR", ffi::S_SLURM_VERSION_MAJOR)?;
        Some((year, number("S_SLURM_VERSION_MINOR", ffi::S_SLURM_VERSION_MINOR)?))
    }

    /// S_JOB_ID.
    pub fn job_id(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_ID", ffi::S_JOB_ID, 0u32) }
    }

    /// S_JOB_STEPID.
    pub fn step_id(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_STEPID", ffi::S_JOB_STEPID, 0u32) }
    }

    /// S_JOB_NNODES: nodes of the step; in srun of its first het component.
    pub fn nodes(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_NNODES", ffi::S_JOB_NNODES, 0u32) }
    }

    /// S_JOB_TOTAL_TASK_COUNT: tasks of the step; in srun of one het component.
    pub fn tasks(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_TOTAL_TASK_COUNT", ffi::S_JOB_TOTAL_TASK_COUNT, 0u32) }
    }

    /// S_JOB_UID: whose job it is.
    pub fn user_id(self) -> Result<u32, SpankError> {
        // SAFETY: uid_t *, which is uint32_t * on Linux.
        unsafe { self.item("S_JOB_UID", ffi::S_JOB_UID, 0u32) }
    }

    /// S_JOB_NODEID: this node's index in the step; in a het step in its component.
    pub fn node_index(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_NODEID", ffi::S_JOB_NODEID, 0u32) }
    }

    /// S_TASK_GLOBAL_ID: the task's rank, outside het steps; in the task hooks.
    pub fn task_rank(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_TASK_GLOBAL_ID", ffi::S_TASK_GLOBAL_ID, 0u32) }
    }

    /// S_JOB_LOCAL_TASK_COUNT: tasks of this slurmstepd.
    pub fn local_tasks(self) -> Result<u32, SpankError> {
        // SAFETY: uint32_t *.
        unsafe { self.item("S_JOB_LOCAL_TASK_COUNT", ffi::S_JOB_LOCAL_TASK_COUNT, 0u32) }
    }

    /// S_TASK_ID: the task's index on this node; in the task hooks.
    pub fn task_id(self) -> Result<u32, SpankError> {
        // SAFETY: int *.
        let id = unsafe { self.item("S_TASK_ID", ffi::S_TASK_ID, -1 as c_int) }?;
        u32::try_from(id).map_err(|_| SpankError::NoData("S_TASK_ID"))
    }

    /// S_TASK_EXIT_STATUS: the task's wait status; in task_exit.
    pub fn exit_status(self) -> Result<i32, SpankError> {
        // SAFETY: int *.
        unsafe { self.item("S_TASK_EXIT_STATUS", ffi::S_TASK_EXIT_STATUS, 0 as c_int) }
    }

    /// S_JOB_ARGV: the command and its arguments.
    pub fn command(self) -> Result<Vec<String>, SpankError> {
        let (count, words) = self.words()?;
        // SAFETY: Slurm's argv holds `count` strings; a null one ends it early.
        Ok((0..count).map_while(|i| unsafe { owned(*words.add(i)) }).collect())
    }

    /// S_JOB_ARGV: Slurm's own array, of at least as many pointers as it says.
    fn words(self) -> Result<(usize, *mut *mut c_char), SpankError> {
        let get_item = functions().get_item.ok_or(SpankError::NoFunction("spank_get_item"))?;
        let (mut count, mut words): (c_int, *mut *mut c_char) = (0, std::ptr::null_mut());
        // SAFETY: S_JOB_ARGV takes an int * and a char ***.
        match unsafe { get_item(self.0, ffi::S_JOB_ARGV, &raw mut count, &raw mut words) } {
            0 => {}
            code => return Err(Self::refused("spank_get_item", "S_JOB_ARGV", code)),
        }
        if words.is_null() {
            return Err(SpankError::NoData("S_JOB_ARGV"));
        }
        Ok((usize::try_from(count).unwrap_or(0), words))
    }

    /// S_JOB_ENV: the step's, in task_init the task's environment.
    pub fn environment(self) -> Result<Environment, SpankError> {
        let none: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: char ***.
        let mut next = unsafe { self.item("S_JOB_ENV", ffi::S_JOB_ENV, none) }?;
        if next.is_null() {
            return Err(SpankError::NoData("S_JOB_ENV"));
        }
        let mut environment = Environment::default();
        // SAFETY: a null-terminated array of strings that outlives the hook.
        while let Some(pair) = unsafe { owned(*next) } {
            if let Some((name, value)) = pair.split_once('=') {
                environment.set(name, value);
            }
            // SAFETY: the entry just read was not the terminating null.
            next = unsafe { next.add(1) };
        }
        Ok(environment)
    }

    /// The same, each variable byte for byte, for a program that is started with them.
    pub fn variables(self) -> Result<Vec<(OsString, OsString)>, SpankError> {
        let none: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: char ***.
        let mut next = unsafe { self.item("S_JOB_ENV", ffi::S_JOB_ENV, none) }?;
        if next.is_null() {
            return Err(SpankError::NoData("S_JOB_ENV"));
        }
        let mut variables = Vec::new();
        loop {
            // SAFETY: an entry of a null-terminated array that outlives the hook.
            let pair = unsafe { *next };
            if pair.is_null() {
                return Ok(variables);
            }
            // SAFETY: not null, so a string of the array's.
            let pair = unsafe { CStr::from_ptr(pair) }.to_bytes();
            if let Some(end) = pair.iter().position(|byte| *byte == b'=') {
                let text = |bytes: &[u8]| OsStr::from_bytes(bytes).to_os_string();
                variables.push((text(&pair[..end]), text(&pair[end + 1..])));
            }
            // SAFETY: the entry just read was not the terminating null.
            next = unsafe { next.add(1) };
        }
    }

    /// Whether the job's environment has `name`, without allocating.
    pub fn has_variable(self, name: &CStr) -> bool {
        let Some(getenv) = functions().getenv else {
            return false;
        };
        // Only written to: clearing it would be most of what a job without the
        // flag pays.
        let mut buffer = [const { MaybeUninit::<c_char>::uninit() }; 4096];
        // SAFETY: the buffer is ours and as long as we say. A longer value is cut
        // and reported as an error: no variable of ours is that long.
        unsafe { getenv(self.0, name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len() as c_int) == 0 }
    }

    /// Registers `--NAME[=ARGUMENT]`. Valid in slurm_spank_init only.
    pub fn register_option(self, option: &'static CommandLineOption) -> Result<(), SpankError> {
        let register = functions().register.ok_or(SpankError::NoFunction("spank_option_register"))?;
        let mut option = ffi::spank_option {
            name: option.name.as_ptr().cast_mut(),
            arginfo: option.argument.as_ptr().cast_mut(),
            usage: option.usage.as_ptr().cast_mut(),
            has_arg: 2, // optional, as getopt_long counts it
            val: 0,
            cb: Some(option.callback),
        };
        // SAFETY: Slurm copies the struct and its strings, which live for ever anyway.
        match unsafe { register(self.0, &raw mut option) } {
            0 => Ok(()),
            code => Err(Self::refused("spank_option_register", "--palingenesis", code)),
        }
    }
}

/// An option with an optional argument.
pub struct CommandLineOption {
    /// Without the dashes.
    pub name: &'static CStr,
    /// What `--help` shows for the argument.
    pub argument: &'static CStr,
    /// One line for `--help`.
    pub usage: &'static CStr,
    /// Called for each use.
    pub callback: unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int,
}

impl TaskEnvironment for Handle {
    type Error = SpankError;

    fn set(&mut self, name: &str, value: &str) -> Result<(), SpankError> {
        let setenv = functions().setenv.ok_or(SpankError::NoFunction("spank_setenv"))?;
        let (c_name, c_value) = (c_string(name)?, c_string(value)?);
        // SAFETY: two C strings, which Slurm copies.
        match unsafe { setenv(self.0, c_name.as_ptr(), c_value.as_ptr(), 1) } {
            0 => Ok(()),
            code => Err(Self::refused("spank_setenv", name, code)),
        }
    }

    fn unset(&mut self, name: &str) -> Result<(), SpankError> {
        let unsetenv = functions().unsetenv.ok_or(SpankError::NoFunction("spank_unsetenv"))?;
        let c_name = c_string(name)?;
        // SAFETY: a C string.
        match unsafe { unsetenv(self.0, c_name.as_ptr()) } {
            0 => Ok(()),
            code => Err(Self::refused("spank_unsetenv", name, code)),
        }
    }
}

/// Not in the table: looking for what is not there allocates, and the table is
/// made without the flag too.
fn prepend_argv() -> Option<PrependArgv> {
    // SAFETY: the signature of spank.h since 23.11; tests/abi.rs compares the headers.
    unsafe { find(c"spank_prepend_task_argv") }
}

/// Whether a task's command can have a program put before it: Slurm 23.11.
pub fn can_prepend() -> bool {
    prepend_argv().is_some()
}

impl TaskCommand for Handle {
    type Error = SpankError;

    fn prepend(&mut self, program: &str) -> Result<(), SpankError> {
        let prepend = prepend_argv().ok_or(SpankError::NoFunction("spank_prepend_task_argv"))?;
        let c_program = c_string(program)?;
        let mut words = [c_program.as_ptr(), std::ptr::null()];
        // SAFETY: one C string, which Slurm copies, and the null it does not count.
        match unsafe { prepend(self.0, 1, words.as_mut_ptr()) } {
            0 => Ok(()),
            code => Err(Self::refused("spank_prepend_task_argv", program, code)),
        }
    }

    /// In a forked task: the array is the task's own copy, and slurmstepd reads
    /// the task's words from it (measured with 22.05.8), looking the first one up
    /// in PATH and running TaskProlog only after this hook.
    fn replace_first(&mut self, program: &str, name: &str) -> Result<(), SpankError> {
        let setenv = functions().setenv.ok_or(SpankError::NoFunction("spank_setenv"))?;
        let (c_program, c_name) = (c_string(program)?, c_string(name)?);
        let (count, words) = self.words()?;
        // SAFETY: Slurm's argv has a first pointer where it counts one.
        let first = if count == 0 { std::ptr::null_mut() } else { unsafe { *words } };
        if first.is_null() {
            return Err(SpankError::NoData("S_JOB_ARGV"));
        }
        // SAFETY: two C strings, which Slurm copies.
        match unsafe { setenv(self.0, c_name.as_ptr(), first, 1) } {
            0 => {}
            code => return Err(Self::refused("spank_setenv", name, code)),
        }
        // SAFETY: the pointer read above, in memory of this process, which has no
        // other thread. The string is given up on purpose: it lives until execve.
        unsafe { *words = c_program.into_raw() };
        Ok(())
    }

    fn undecided(&self) -> SpankError {
        SpankError::NoData("the look for palingenesis-worker")
    }
}

fn c_string(text: &str) -> Result<CString, SpankError> {
    CString::new(text).map_err(|_| SpankError::Nul(crate::config::printable(text)))
}

/// # Safety
/// `text` is null or a C string.
pub(super) unsafe fn owned(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a C string as the caller says.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Writes a line to the host's log: in slurmstepd from user_init on also the
/// user's stderr, before that slurmd's log only.
pub fn log(line: &str) {
    let (Some(log), Ok(line)) = (functions().log, CString::new(line)) else {
        return;
    };
    // SAFETY: a constant format with one string argument.
    unsafe { log(c"%s".as_ptr(), line.as_ptr()) };
}

/// A step's layout as the controller made it. Only srun can ask for it in time.
///
/// The layout's own fields differ between releases; the functions of
/// libslurmfull that read it do not.
#[derive(Debug)]
pub struct Layout {
    layout: *mut c_void,
    host_name: LayoutHostName,
}

impl Layout {
    /// Asks the controller.
    pub fn of(job_id: u32, step_id: u32) -> Option<Layout> {
        // SAFETY: signatures of slurm.h and src/common/slurm_step_layout.h.
        let (get, host_name) = unsafe {
            (find::<LayoutGet>(c"slurm_job_step_layout_get")?, find::<LayoutHostName>(c"slurm_step_layout_host_name")?)
        };
        // No het component; 0: the first one of `srun a : b`.
        for step_het_comp in [NO_VAL, 0] {
            let id = || StepId { job_id, step_het_comp, step_id, room: [0; 4] };
            let (mut old, mut new) = (id(), StepIdWithSluid { sluid: 0, id: id() });
            let new: *mut c_void = (&raw mut new).cast();
            let old: *mut c_void = (&raw mut old).cast();
            // The loader's gate makes our stamp the release of the host. Releases
            // between take the first form they know: read as the other, each names
            // a job that does not exist.
            let forms: &[*mut c_void] = if super::stamp() >= (24, 11) { &[new] } else { &[old, new] };
            for form in forms {
                // SAFETY: the id lives through the call and is as long as any release reads.
                let layout = unsafe { get(*form) };
                if !layout.is_null() {
                    return Some(Layout { layout, host_name });
                }
            }
        }
        None
    }

    /// NodeName of the node that holds a task, which must be one of the step's.
    pub fn node_of(&self, task: u32) -> Option<String> {
        let task = c_int::try_from(task).ok()?;
        // SAFETY: a layout that slurm_job_step_layout_get returned. The name's
        // allocator differs by release; srun keeps it for its short life.
        let name = unsafe { owned((self.host_name)(self.layout, task)) };
        name.filter(|name| !name.is_empty())
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: signature of slurm.h.
        if let Some(free) = unsafe { find::<LayoutFree>(c"slurm_job_step_layout_free") } {
            // SAFETY: the layout came from slurm_job_step_layout_get and is not used again.
            unsafe { free(self.layout) };
        }
    }
}

type KillStep = unsafe extern "C" fn(u32, u32, u16, u16) -> c_int;
type KillStepOfId = unsafe extern "C" fn(*mut c_void, u16, u16) -> c_int;

/// How long the controller may take to end a step.
const ENDING: Duration = Duration::from_secs(5);

/// Asks the controller, as the user, to end a step; in a child, for the call has no
/// deadline, and Slurm's locks may be held by a thread that a fork does not take along.
/// Whether it said yes. The function took numbers until 24.11 (the flags came between,
/// and a function without them does not look at them) and takes an id in 26.05; for a
/// release between the two it is not called: as the other's, an argument would name
/// another job, or no memory.
pub fn end_step(job_id: u32, step_id: u32) -> bool {
    const SIGKILL: u16 = libc::SIGKILL as u16;
    let answer = child::run(ENDING, || {
        let code = match super::stamp() {
            release if release <= (24, 11) => {
                // SAFETY: the signature of slurm.h up to 24.11; tests/abi.rs compares the headers.
                unsafe { find::<KillStep>(c"slurm_kill_job_step") }
                    // SAFETY: numbers only.
                    .map(|kill| unsafe { kill(job_id, step_id, SIGKILL, 0) })
            }
            release if release >= (26, 5) => {
                let id = StepId { job_id, step_het_comp: NO_VAL, step_id, room: [0; 4] };
                let mut id = StepIdWithSluid { sluid: 0, id };
                // SAFETY: the signature of slurm.h since 26.05.
                unsafe { find::<KillStepOfId>(c"slurm_kill_job_step") }
                    // SAFETY: the id lives through the call and is as long as Slurm reads.
                    .map(|kill| unsafe { kill((&raw mut id).cast(), SIGKILL, 0) })
            }
            _ => None,
        };
        vec![u8::from(code == Some(0))]
    });
    answer.is_ok_and(|answer| answer == [1])
}

/// NodeAddr of `node`, as the controller knows it, else as slurm.conf says.
///
/// The structure of a node record differs between releases, its printed form
/// (`scontrol show node`) does not.
pub fn node_address(node: &str) -> Option<String> {
    let name = CString::new(node).ok()?;
    node_address_from_controller(&name).or_else(|| {
        // SAFETY: signature of src/common/read_config.h.
        let get = unsafe { find::<NodeAddr>(c"slurm_conf_get_nodeaddr")? };
        // SAFETY: a C string in, a string of Slurm's allocator or null out.
        unsafe { owned(get(name.as_ptr())) }
    })
}

/// SrunPortRange, where slurm.conf has one: the ports at which nodes may reach srun.
/// From what srun has read already, and so without asking anybody.
pub fn srun_ports() -> Option<RangeInclusive<u16>> {
    // SAFETY: signature of src/common/slurm_protocol_api.h, with the same name in 20.11
    // and 26.05.
    let get = unsafe { find::<SrunPorts>(c"slurm_get_srun_port_range")? };
    // SAFETY: takes nothing.
    let ports = unsafe { get() };
    if ports.is_null() {
        return None;
    }
    // SAFETY: not null, so an array of two that Slurm keeps as long as its configuration.
    let (first, last) = unsafe { (*ports, *ports.add(1)) };
    (first != 0 && first <= last).then_some(first..=last)
}

fn node_address_from_controller(name: &CStr) -> Option<String> {
    // SAFETY: signatures of slurm.h.
    let (load, print, free) = unsafe {
        (
            find::<LoadNode>(c"slurm_load_node_single")?,
            find::<Print>(c"slurm_print_node_info_msg")?,
            find::<Free>(c"slurm_free_node_info_msg")?,
        )
    };
    let mut nodes: *mut c_void = std::ptr::null_mut();
    // SAFETY: Slurm writes the message's address and only reads the name.
    if unsafe { load(&raw mut nodes, name.as_ptr().cast_mut(), 0) } != 0 || nodes.is_null() {
        return None;
    }
    // SAFETY: the printer of the message just loaded.
    let text = unsafe { printed(print, nodes) };
    // SAFETY: the message is not used again.
    unsafe { free(nodes) };
    text.and_then(|text| word_of(&text, "NodeAddr=").next().map(String::from))
}

/// slurm.conf as this program goes by it, in the form of `scontrol show config`. Nothing
/// is asked of the controller: srun has it in its memory.
fn controller_conf() -> Option<String> {
    // SAFETY: signatures of slurm.h and src/common/read_config.h.
    let (print, lock, unlock) = unsafe {
        (
            find::<PrintConf>(c"slurm_print_ctl_conf")?,
            find::<ConfLock>(c"slurm_conf_lock")?,
            find::<ConfUnlock>(c"slurm_conf_unlock")?,
        )
    };
    // SAFETY: takes nothing; reads the file if that has not been done, and gives the
    // structure, which is static.
    let conf = unsafe { lock() };
    // SAFETY: locked above, in this thread. Nobody in srun reads the file again, and
    // the printer may want the lock for itself.
    unsafe { unlock() };
    if conf.is_null() {
        return None;
    }
    // SAFETY: the printer of that structure, whose fields are left to it.
    unsafe { written(|stream| print(stream, conf)) }
}

/// The text of [`controller_conf`], printed once; given back at srun's end, since Slurm
/// unloads us.
static CONF: Mutex<Option<String>> = Mutex::new(None);

/// Gives it back.
pub fn forget_conf() {
    *lock(&CONF) = None;
}

/// The value of `name` there.
pub fn conf_value(name: &str) -> Option<String> {
    let mut conf = lock(&CONF);
    let text = conf.get_or_insert_with(|| controller_conf().unwrap_or_default());
    value_in_conf(text, name).map(String::from)
}

fn value_in_conf<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let values = text.lines().filter_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix('='));
    values.map(str::trim).find(|value| !value.is_empty() && *value != "(null)")
}

/// What `print` writes of `message`.
///
/// # Safety
/// `print` is the printer of that kind of message.
unsafe fn printed(print: Print, message: *mut c_void) -> Option<String> {
    // SAFETY: an open stream, and a message of this printer's.
    unsafe { written(|stream| print(stream, message, 1)) }
}

/// What `write` writes to a stream.
///
/// # Safety
/// `write` only writes to it.
unsafe fn written(write: impl FnOnce(*mut libc::FILE)) -> Option<String> {
    let (mut text, mut length): (*mut c_char, usize) = (std::ptr::null_mut(), 0);
    // SAFETY: both pointers outlive the stream.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut length) };
    if stream.is_null() {
        return None;
    }
    write(stream);
    // SAFETY: an open stream; after fclose `text` is null or a C string that is ours to
    // free.
    unsafe {
        libc::fclose(stream);
        let copy = owned(text);
        libc::free(text.cast());
        copy
    }
}

/// The values of `NAME=` in scontrol's one-line form; empty and "(null)" are none.
fn word_of<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.split_whitespace()
        .filter_map(move |word| word.strip_prefix(name))
        .filter(|value| !value.is_empty() && *value != "(null)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_slurm_every_call_is_an_error_and_none_a_crash() {
        // SAFETY: the handle is never dereferenced: there is no function to pass it to.
        let handle = unsafe { Handle::new(std::ptr::null_mut()) };
        assert_eq!(context(), Context::Other);
        assert_eq!(handle.job_id(), Err(SpankError::NoFunction("spank_get_item")));
        assert!(handle.command().is_err() && handle.environment().is_err());
        assert!(!handle.has_variable(c"PATH"));
        assert!(Layout::of(1, 0).is_none());
        assert_eq!(node_address("n1"), None);
        assert!(srun_ports().is_none() && handle.exit_status().is_err());
        assert_eq!(controller_conf(), None);
        log("nobody hears this");
    }

    #[test]
    fn values_in_scontrol_s_lines() {
        let line = "NodeName=n1 Arch=x86_64 CPUTot=2 NodeAddr=10.99.0.1 NodeHostName=n1 Port=6818";
        assert_eq!(word_of(line, "NodeAddr=").collect::<Vec<_>>(), ["10.99.0.1"]);
        assert_eq!(word_of("NodeName=n1", "NodeAddr=").next(), None);
        let line = "JobId=7 ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-2] BatchHost=n1";
        assert_eq!(word_of(line, "NodeList=").collect::<Vec<_>>(), ["n[1-2]"]);
        assert_eq!(word_of("JobId=7 NodeList=(null)", "NodeList=").next(), None);
        let conf = "Configuration data as of 1\nKillOnBadExit           = 0\nKillWait                = 30 sec\nEpilog = (null)\n";
        assert_eq!(value_in_conf(conf, "KillOnBadExit"), Some("0"));
        assert_eq!(value_in_conf(conf, "KillWait"), Some("30 sec"));
        assert_eq!((value_in_conf(conf, "Epilog"), value_in_conf(conf, "Kill")), (None, None));
    }
}
