/*
 * What src/spank/host.rs takes for granted about Slurm, checked by a C compiler
 * against the headers of a release: the type of each function that it finds by
 * name, the layout of each structure that it builds itself, and the numbers it
 * asks with. tests/abi.rs compiles this; nothing here runs.
 *
 * The types below are those of host.rs, written in C. An opaque `*mut c_void` in
 * Rust stands here as the pointer that Slurm declares: what matters is that
 * nothing but a pointer is at that place.
 *
 * Some functions are in no installed header: srun has them from libslurmfull.so
 * (tests/abi.rs looks for them there), and their declarations were read in
 * Slurm's sources, https://github.com/SchedMD/slurm:
 *
 *   src/common/slurm_step_layout.h
 *       char *slurm_step_layout_host_name(slurm_step_layout_t *, int task);
 *   src/common/read_config.h
 *       char *slurm_conf_get_nodeaddr(const char *node);
 *       slurm_conf_t *slurm_conf_lock(void); void slurm_conf_unlock(void);
 *   src/common/slurm_protocol_api.h
 *       uint16_t *slurm_get_srun_port_range(void);
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>

/* `function` has exactly this type. Where Slurm has an enumeration, host.rs has
 * an integer of 32 bits, signed for error codes, so these must be that long:
 * every ABI that Slurm runs on passes and returns them alike. */
#define IS(function, result, ...) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), result (*)(__VA_ARGS__)), \
                   #function " has another type than src/spank/host.rs calls it with"); \
    result (*check_##function)(__VA_ARGS__) = function

_Static_assert(sizeof(spank_item_t) == 4 && sizeof(spank_context_t) == 4 && sizeof(spank_err_t) == 4,
               "an enumeration of SPANK is not 32 bits long");

/* spank.h. */
IS(spank_get_item, spank_err_t, spank_t, spank_item_t, ...);
IS(spank_getenv, spank_err_t, spank_t, const char *, char *, int);
IS(spank_setenv, spank_err_t, spank_t, const char *, const char *, int);
IS(spank_unsetenv, spank_err_t, spank_t, const char *);
IS(spank_context, spank_context_t, void);
IS(spank_option_register, spank_err_t, spank_t, struct spank_option *);
IS(spank_strerror, const char *, spank_err_t);
IS(slurm_spank_log, void, const char *, ...);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0)
IS(spank_prepend_task_argv, spank_err_t, spank_t, int, const char **);
#endif

/* slurm.h. */
IS(slurm_job_step_layout_get, slurm_step_layout_t *, slurm_step_id_t *);
IS(slurm_job_step_layout_free, void, slurm_step_layout_t *);
IS(slurm_load_node_single, int, node_info_msg_t **, char *, uint16_t);
IS(slurm_print_node_info_msg, void, FILE *, node_info_msg_t *, int);
IS(slurm_free_node_info_msg, void, node_info_msg_t *);
IS(slurm_print_ctl_conf, void, FILE *, slurm_conf_t *);
/* Called with a fourth argument where there is none: it stays in a register. */
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(26, 5, 0)
IS(slurm_kill_job_step, int, slurm_step_id_t *, uint16_t, uint16_t);
#elif SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(24, 11, 0)
IS(slurm_kill_job_step, int, uint32_t, uint32_t, uint16_t, uint16_t);
#elif SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(22, 6, 0)
IS(slurm_kill_job_step, int, uint32_t, uint32_t, uint16_t);
#endif

/* Our StepId, and StepIdWithSluid since 24.11. */
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(24, 11, 0)
#define JOB_ID_AT 8
#else
#define JOB_ID_AT 0
#endif
#define IS_WORD(field, at) \
    _Static_assert(offsetof(slurm_step_id_t, field) == (at), "slurm_step_id_t: " #field " lies elsewhere"); \
    _Static_assert(sizeof(((slurm_step_id_t *)0)->field) == 4, "slurm_step_id_t: " #field " has another size")
IS_WORD(job_id, JOB_ID_AT);
IS_WORD(step_het_comp, JOB_ID_AT + 4);
IS_WORD(step_id, JOB_ID_AT + 8);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(24, 11, 0)
_Static_assert(offsetof(slurm_step_id_t, sluid) == 0 && sizeof(((slurm_step_id_t *)0)->sluid) == 8, "sluid");
#endif
_Static_assert(sizeof(slurm_step_id_t) <= 48, "slurm_step_id_t is longer than StepId, which Slurm reads as one");
_Static_assert(NO_VAL == 0xfffffffe, "NO_VAL");

/* spank_option, which bindgen or the committed bindings.rs gives. */
#define OPTION(field, at) \
    _Static_assert(offsetof(struct spank_option, field) == (at), "struct spank_option: " #field " lies elsewhere")
OPTION(name, 0);
OPTION(arginfo, sizeof(void *));
OPTION(usage, 2 * sizeof(void *));
OPTION(has_arg, 3 * sizeof(void *));
OPTION(val, 3 * sizeof(void *) + 4);
OPTION(cb, 3 * sizeof(void *) + 8);
_Static_assert(sizeof(struct spank_option) == 4 * sizeof(void *) + 8, "struct spank_option has another size");
_Static_assert(__builtin_types_compatible_p(spank_opt_cb_f, int (*)(int, const char *, int)), "spank_opt_cb_f");

/* Numbers of the committed bindings.rs, which serve where no header is. */
#define NUMBER(name, value) _Static_assert(name == (value), #name " has another number")
NUMBER(S_JOB_ID, 2);
NUMBER(S_JOB_STEPID, 3);
NUMBER(S_JOB_NNODES, 4);
NUMBER(S_JOB_NODEID, 5);
NUMBER(S_JOB_LOCAL_TASK_COUNT, 6);
NUMBER(S_JOB_ARGV, 9);
NUMBER(S_JOB_ENV, 10);
NUMBER(S_TASK_ID, 11);
NUMBER(S_TASK_GLOBAL_ID, 12);
NUMBER(S_CTX_ERROR, 0);
NUMBER(S_CTX_LOCAL, 1);
NUMBER(S_CTX_REMOTE, 2);
NUMBER(S_CTX_ALLOCATOR, 3);
NUMBER(S_CTX_SLURMD, 4);
NUMBER(S_CTX_JOB_SCRIPT, 5);
_Static_assert(ESPANK_SUCCESS == 0, "success is not 0");
