pub const SLURM_VERSION_NUMBER: u32 = 1443080;
pub const SPANK_OPTION_MAXLEN: u32 = 75;
#[repr(C)]
#[derive(Debug)]
pub struct spank_handle {
    _unused: [u8; 0],
}
pub type spank_t = *mut spank_handle;
pub const S_JOB_UID: spank_item = 0;
pub const S_JOB_GID: spank_item = 1;
pub const S_JOB_ID: spank_item = 2;
pub const S_JOB_STEPID: spank_item = 3;
pub const S_JOB_NNODES: spank_item = 4;
pub const S_JOB_NODEID: spank_item = 5;
pub const S_JOB_LOCAL_TASK_COUNT: spank_item = 6;
pub const S_JOB_TOTAL_TASK_COUNT: spank_item = 7;
pub const S_JOB_NCPUS: spank_item = 8;
pub const S_JOB_ARGV: spank_item = 9;
pub const S_JOB_ENV: spank_item = 10;
pub const S_TASK_ID: spank_item = 11;
pub const S_TASK_GLOBAL_ID: spank_item = 12;
pub const S_TASK_EXIT_STATUS: spank_item = 13;
pub const S_TASK_PID: spank_item = 14;
pub const S_JOB_PID_TO_GLOBAL_ID: spank_item = 15;
pub const S_JOB_PID_TO_LOCAL_ID: spank_item = 16;
pub const S_JOB_LOCAL_TO_GLOBAL_ID: spank_item = 17;
pub const S_JOB_GLOBAL_TO_LOCAL_ID: spank_item = 18;
pub const S_JOB_SUPPLEMENTARY_GIDS: spank_item = 19;
pub const S_SLURM_VERSION: spank_item = 20;
pub const S_SLURM_VERSION_MAJOR: spank_item = 21;
pub const S_SLURM_VERSION_MINOR: spank_item = 22;
pub const S_SLURM_VERSION_MICRO: spank_item = 23;
pub const S_STEP_CPUS_PER_TASK: spank_item = 24;
pub const S_JOB_ALLOC_CORES: spank_item = 25;
pub const S_JOB_ALLOC_MEM: spank_item = 26;
pub const S_STEP_ALLOC_CORES: spank_item = 27;
pub const S_STEP_ALLOC_MEM: spank_item = 28;
pub const S_SLURM_RESTART_COUNT: spank_item = 29;
pub const S_JOB_ARRAY_ID: spank_item = 30;
pub const S_JOB_ARRAY_TASK_ID: spank_item = 31;
pub type spank_item = ::std::os::raw::c_uint;
pub use self::spank_item as spank_item_t;
pub const S_CTX_ERROR: spank_context = 0;
pub const S_CTX_LOCAL: spank_context = 1;
pub const S_CTX_REMOTE: spank_context = 2;
pub const S_CTX_ALLOCATOR: spank_context = 3;
pub const S_CTX_SLURMD: spank_context = 4;
pub const S_CTX_JOB_SCRIPT: spank_context = 5;
pub type spank_context = ::std::os::raw::c_uint;
pub use self::spank_context as spank_context_t;
pub type spank_opt_cb_f = ::std::option::Option<
    unsafe extern "C" fn(
        val: ::std::os::raw::c_int,
        optarg: *const ::std::os::raw::c_char,
        remote: ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int,
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct spank_option {
    pub name: *mut ::std::os::raw::c_char,
    pub arginfo: *mut ::std::os::raw::c_char,
    pub usage: *mut ::std::os::raw::c_char,
    pub has_arg: ::std::os::raw::c_int,
    pub val: ::std::os::raw::c_int,
    pub cb: spank_opt_cb_f,
}
