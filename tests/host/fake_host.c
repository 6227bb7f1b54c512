/*
 * A program that behaves towards the plugin as srun, sbatch, slurmstepd and
 * slurmd do, and worse: every SPANK call can be made to fail, every allocation
 * is counted, and what a hook may not touch is compared before and after it.
 *
 *   fake_host PLUGIN all          every scenario, each in a process of its own, and
 *                                 every call of a launch failing once in every way
 *   fake_host PLUGIN scenarios    without the latter
 *   fake_host PLUGIN load         whether the loader lets it in
 *   fake_host PLUGIN bare         a host without any SPANK function
 *
 * -DRELEASE=2411 makes it Slurm 24.11: the number by which the loader lets a plugin
 * in, the functions and error codes there are, how a step is named, how often the
 * option's callback is called and with what.
 *
 *   fake_host PLUGIN bench CONTEXT unused|flag ROUNDS
 *                                 one context's hooks, for callgrind
 *
 * Exit code 0: all laws held; 3: the loader did not let the plugin in. What spank_*
 * return is taken from slurm/spank.h and src/common/spank.c of Slurm 22.05. What
 * differs by release is as measured on 22.05, 24.11 and 26.05 and, between those, as
 * docs/design.md ("Slurm's releases") says it changed. What this cannot show: Slurm's
 * own threads, users and cgroups; the tests with a real cluster do.
 *
 * FAKE_HOST_NO_COUNT=1: allocations are not counted (valgrind and sanitizers replace
 * malloc).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define EX_CONFIG 78
#define SPEC "SLURM_PALINGENESIS_SPEC"
#define REFUSAL "SLURM_PALINGENESIS_REFUSAL"

#ifndef RELEASE
#define RELEASE 2205
#endif
#define YEAR (RELEASE / 100)
#define MONTH (RELEASE % 100)
#define DIGIT(place) ('0' + RELEASE / (place) % 10)
static const char YEAR_TEXT[] = {DIGIT(1000), DIGIT(100), '\0'};
static const char MONTH_TEXT[] = {DIGIT(10), DIGIT(1), '\0'};
static const char VERSION_TEXT[] = {DIGIT(1000), DIGIT(100), '.', DIGIT(10), DIGIT(1), '.', '3', '\0'};

/* slurm_errno.h since 25.05. */
#define NODE_FAILURE 3011
#define JOB_FAILURE 3012

/* src/common/plugin.c since 21.08: SLURM_VERSION_NUMBER, of which major and minor
   must be the plugin's. */
#define VERSION_NUMBER (YEAR << 16 | MONTH << 8 | 3)
#define GATE 0xffff00u

/* src/common/spank.c: slurmstepd called the option's callback twice before 24.05,
   the second time with "" for NULL. */
#define CALLBACKS (RELEASE < 2405 ? 2 : 1)
/* spank_prepend_task_argv: spank.h since 23.11. */
#if RELEASE >= 2311
#define PREPEND
#endif

/* ------------------------------------------------------------ allocations */

/* AddressSanitizer has a malloc of its own, which must stay the one. */
#ifndef __SANITIZE_ADDRESS__
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

#endif

static bool counting;
static unsigned long allocations;

#ifndef __SANITIZE_ADDRESS__

void *malloc(size_t size)
{
    allocations += counting;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocations += counting;
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    allocations += counting;
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size)
{
    allocations += counting;
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    allocations += counting;
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **result, size_t alignment, size_t size)
{
    allocations += counting;
    *result = __libc_memalign(alignment, size);
    return *result ? 0 : ENOMEM;
}
#endif

/* -------------------------------------------------------- Slurm's functions */

/* What the host is, and what goes wrong in it. */
static struct {
    spank_context_t context;
    uint32_t job_id, step_id, nodes, local_tasks;
    int task_id;
    int argc;
    char **argv;
    char *env[128];
    int item_error[64]; /* by item; 0: none */
    int all_items_error, getenv_error, setenv_error, unsetenv_error, register_error;
    bool env_null, argv_null, no_layout;
    int prepend_error, prepended;
    char before[256]; /* what was put before the command */
    struct spank_option option;
    unsigned options, logged, set, unset, layouts, freed;
    const char *hook; /* the one that runs */
    int fail_at, fail_with; /* the call that fails, and how; 0: none */
} host;

/* Success that brings no data. */
#define NOTHING 0x7fffffff

static int calls;

/* What the tests' processes have in common. */
static struct {
    int calls;          /* the most that one of them made */
    char failed[48];    /* the function that was made to fail */
} *shared;

/* Whether this call is the one to fail. */
static int due(const char *function)
{
    if (++calls != host.fail_at)
        return 0;
    if (shared)
        snprintf(shared->failed, sizeof shared->failed, "%s", function);
    return host.fail_with;
}

static bool runs(const char *hook)
{
    return host.hook && strcmp(host.hook, hook) == 0;
}

static bool in_task_hook(void)
{
    return host.hook && strncmp(host.hook, "task_", 5) == 0;
}

/* Which items a context has, as src/common/spank.c checks before it looks for one. */
static spank_err_t available(spank_item_t item)
{
    switch (item) {
    case S_SLURM_VERSION:
    case S_SLURM_VERSION_MAJOR:
    case S_SLURM_VERSION_MINOR:
    case S_SLURM_VERSION_MICRO:
        return ESPANK_SUCCESS;
    case S_TASK_ID:
    case S_TASK_GLOBAL_ID:
    case S_TASK_EXIT_STATUS:
    case S_TASK_PID:
        if (host.context != S_CTX_REMOTE)
            return ESPANK_NOT_REMOTE;
        return in_task_hook() ? ESPANK_SUCCESS : ESPANK_NOT_TASK;
    case S_JOB_UID:
    case S_JOB_GID:
    case S_JOB_ID:
        if (host.context == S_CTX_JOB_SCRIPT)
            return ESPANK_SUCCESS;
        break;
    default:
        break;
    }
    if (host.context == S_CTX_REMOTE)
        return ESPANK_SUCCESS;
    if (host.context != S_CTX_LOCAL)
        return ESPANK_NOT_AVAIL;
    switch (item) {
    case S_JOB_UID:
    case S_JOB_GID:
    case S_JOB_ID:
    case S_JOB_STEPID:
    case S_JOB_ARGV:
    case S_JOB_ENV:
    case S_JOB_NNODES:
    case S_JOB_TOTAL_TASK_COUNT:
        return runs("local_user_init") ? ESPANK_SUCCESS : ESPANK_NOT_AVAIL;
    default:
        return ESPANK_NOT_REMOTE;
    }
}

static int find_env(const char *name)
{
    size_t length = strlen(name);
    for (int i = 0; host.env[i]; i++)
        if (strncmp(host.env[i], name, length) == 0 && host.env[i][length] == '=')
            return i;
    return -1;
}

static const char *env_value(const char *name)
{
    int i = find_env(name);
    return i < 0 ? NULL : strchr(host.env[i], '=') + 1;
}

static void put_env(const char *name, const char *value)
{
    char *pair;
    if (asprintf(&pair, "%s=%s", name, value) < 0)
        abort();
    int i = find_env(name);
    if (i < 0) {
        for (i = 0; host.env[i]; i++)
            ;
        if (i + 1 >= (int)COUNT(host.env))
            abort();
    }
    host.env[i] = pair; /* an old one is left: hooks may hold it */
}

spank_context_t spank_context(void)
{
    return host.context;
}

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
    int error = due(__func__);
    if (error && error != NOTHING)
        return error;
    if (host.register_error)
        return host.register_error;
    if (!option || !option->name || !option->usage || !option->cb || strlen(option->name) > SPANK_OPTION_MAXLEN)
        abort(); /* Slurm would not take it */
    if (!strcmp(option->name, "palingenesis"))
        host.option = *option;
    host.options++;
    return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
    int error = due(__func__);
    if (error == NOTHING)
        return ESPANK_SUCCESS; /* what the caller has there stays */
    if (!error)
        error = host.all_items_error ? host.all_items_error : host.item_error[item];
    if (!error)
        error = available(item);
    if (error)
        return error;
    va_list list;
    va_start(list, item);
    spank_err_t code = ESPANK_SUCCESS;
    switch (item) {
    case S_SLURM_VERSION:
        *va_arg(list, const char **) = VERSION_TEXT;
        break;
    case S_SLURM_VERSION_MAJOR:
        *va_arg(list, const char **) = YEAR_TEXT;
        break;
    case S_SLURM_VERSION_MINOR:
        *va_arg(list, const char **) = MONTH_TEXT;
        break;
    case S_SLURM_VERSION_MICRO:
        *va_arg(list, const char **) = "3";
        break;
    case S_JOB_UID: /* srun's is not set yet since 24.11 */
        *va_arg(list, uid_t *) = host.context == S_CTX_LOCAL && RELEASE >= 2411 ? 99 : getuid();
        break;
    case S_JOB_TOTAL_TASK_COUNT:
        *va_arg(list, uint32_t *) = host.local_tasks * host.nodes;
        break;
    case S_TASK_GLOBAL_ID:
        *va_arg(list, uint32_t *) = host.task_id;
        break;
    case S_TASK_PID: /* known to slurmstepd, not yet to the task */
        *va_arg(list, pid_t *) = runs("task_post_fork") || runs("task_exit") ? getpid() : -1;
        break;
    case S_JOB_ID:
        *va_arg(list, uint32_t *) = host.job_id;
        break;
    case S_JOB_STEPID:
        *va_arg(list, uint32_t *) = host.step_id;
        break;
    case S_JOB_NNODES:
        *va_arg(list, uint32_t *) = host.nodes;
        break;
    case S_JOB_NODEID:
        *va_arg(list, uint32_t *) = 0;
        break;
    case S_JOB_LOCAL_TASK_COUNT:
        *va_arg(list, uint32_t *) = host.local_tasks;
        break;
    case S_TASK_ID:
        *va_arg(list, int *) = host.task_id;
        break;
    case S_TASK_EXIT_STATUS:
        *va_arg(list, int *) = 0;
        break;
    case S_JOB_ARGV:
        *va_arg(list, int *) = host.argc;
        *va_arg(list, char ***) = host.argv_null ? NULL : host.argv;
        break;
    case S_JOB_ENV: /* success without data is what srun gives */
        *va_arg(list, char ***) = host.env_null || host.context == S_CTX_LOCAL ? NULL : host.env;
        break;
    default:
        code = ESPANK_NOT_AVAIL;
    }
    va_end(list);
    return code;
}

spank_err_t spank_getenv(spank_t spank, const char *name, char *buffer, int length)
{
    int error = due(__func__);
    if (error && error != NOTHING)
        return error;
    if (host.getenv_error)
        return host.getenv_error;
    if (host.context != S_CTX_REMOTE)
        return ESPANK_NOT_REMOTE;
    const char *value = env_value(name);
    if (!value)
        return ESPANK_ENV_NOEXIST;
    if (length <= 0)
        return ESPANK_BAD_ARG;
    strncpy(buffer, value, length);
    buffer[length - 1] = '\0';
    return strlen(value) >= (size_t)length ? ESPANK_NOSPACE : ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
    host.set++;
    int error = due(__func__);
    if (error && error != NOTHING)
        return error;
    if (host.setenv_error)
        return host.setenv_error;
    if (host.context != S_CTX_REMOTE)
        return ESPANK_NOT_REMOTE;
    if (!name || !value || strchr(name, '='))
        return ESPANK_BAD_ARG;
    if (env_value(name) && !overwrite)
        return ESPANK_ENV_EXISTS;
    put_env(name, value);
    return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t spank, const char *name)
{
    host.unset++;
    int error = due(__func__);
    if (error && error != NOTHING)
        return error;
    if (host.unsetenv_error)
        return host.unsetenv_error;
    if (host.context != S_CTX_REMOTE)
        return ESPANK_NOT_REMOTE;
    int i = find_env(name);
    if (i >= 0)
        for (; host.env[i]; i++)
            host.env[i] = host.env[i + 1];
    return ESPANK_SUCCESS;
}

#ifdef PREPEND
/* Not declared by the headers of 22.05. */
spank_err_t spank_prepend_task_argv(spank_t spank, int argc, const char *argv[]);
spank_err_t spank_prepend_task_argv(spank_t spank, int argc, const char *argv[])
{
    int error = due(__func__);
    if (error && error != NOTHING)
        return error;
    if (host.prepend_error)
        return host.prepend_error;
    if (host.context != S_CTX_REMOTE || argc != 1 || !argv || !argv[0])
        return ESPANK_BAD_ARG;
    host.prepended++;
    snprintf(host.before, sizeof host.before, "%s", argv[0]);
    return ESPANK_SUCCESS;
}
#endif

const char *spank_strerror(spank_err_t code)
{
    if (due(__func__))
        return NULL;
    return code == ESPANK_NOT_AVAIL ? "Not available in this callback" : "Generic error";
}

void slurm_spank_log(const char *format, ...)
{
    bool before = counting;
    counting = false;
    host.logged++;
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    counting = before;
}

void slurm_error(const char *format, ...)
{
    (void)format;
    host.logged++;
}

/* Of libslurmfull; srun has them. A step is named by a structure that begins with an
   id of 64 bits since 24.11 (slurm.h). */
#if RELEASE >= 2411
struct step_id {
    uint64_t sluid;
    uint32_t job_id, step_het_comp, step_id;
};
#else
struct step_id {
    uint32_t job_id, step_het_comp, step_id;
};
#endif

/* slurm.h has another type for it, that of this machine's release. */
void *layout_get(struct step_id *step) __asm__("slurm_job_step_layout_get");
void *layout_get(struct step_id *step)
{
    if (due("slurm_job_step_layout_get"))
        return NULL;
    if (host.no_layout || step->job_id != host.job_id || step->step_id != host.step_id)
        return NULL;
    host.layouts++;
    return malloc(1); /* its fields are nobody's business */
}

void slurm_job_step_layout_free(slurm_step_layout_t *layout)
{
    host.freed++;
    free(layout);
}

char *slurm_step_layout_host_name(slurm_step_layout_t *layout, int task)
{
    static char name[] = "node1";
    (void)layout;
    return task == 0 && !due(__func__) ? name : NULL;
}

int slurm_load_node_single(node_info_msg_t **message, char *name, uint16_t flags)
{
    (void)flags;
    int error = due(__func__);
    if (error == NOTHING)
        return SLURM_SUCCESS;
    if (error || host.no_layout || strcmp(name, "node1"))
        return SLURM_ERROR;
    *message = calloc(1, sizeof **message);
    return SLURM_SUCCESS;
}

void slurm_print_node_info_msg(FILE *out, node_info_msg_t *message, int one_line)
{
    (void)message, (void)one_line;
    if (!due(__func__))
        fputs("NodeName=node1 NodeAddr=192.0.2.7 NodeHostName=node1\n", out);
}

void slurm_free_node_info_msg(node_info_msg_t *message)
{
    free(message);
}

char *slurm_conf_get_nodeaddr(const char *name);
char *slurm_conf_get_nodeaddr(const char *name)
{
    return due(__func__) || strcmp(name, "node1") ? NULL : strdup("192.0.2.7");
}

static slurm_conf_t configuration;

slurm_conf_t *slurm_conf_lock(void);
slurm_conf_t *slurm_conf_lock(void)
{
    return due(__func__) ? NULL : &configuration;
}

void slurm_conf_unlock(void);
void slurm_conf_unlock(void)
{
}

void slurm_print_ctl_conf(FILE *out, slurm_conf_t *conf)
{
    if (conf != &configuration)
        abort();
    if (!due(__func__))
        fputs("KillOnBadExit           = 0\nKillWait                = 30 sec\nWaitTime                = 0 sec\n", out);
}

uint16_t *slurm_get_srun_port_range(void);
uint16_t *slurm_get_srun_port_range(void)
{
    static uint16_t none[] = {0, 0};
    return due(__func__) ? NULL : none;
}

long slurm_api_version(void)
{
    static const int releases[] = {2108, 2205, 2302, 2311, 2405, 2411, 2505, 2511, 2605};
    for (size_t i = 0; i < COUNT(releases); i++)
        if (releases[i] == RELEASE)
            return (37 + i) << 16;
    abort();
}

/* The numbers of a step until 24.11, its id since 26.05 (slurm.h of both); what it
   takes between is in no package that could be looked at, so nobody may call it. */
#if RELEASE >= 2605
int kill_step(struct step_id *step, uint16_t signal, uint16_t flags) __asm__("slurm_kill_job_step");
int kill_step(struct step_id *step, uint16_t signal, uint16_t flags)
{
    if (step->job_id != host.job_id || step->step_id != host.step_id || signal != SIGKILL)
        abort();
    return due("slurm_kill_job_step") ? -1 : 0;
}
#elif RELEASE <= 2411
int kill_step(uint32_t job_id, uint32_t step_id, uint16_t signal) __asm__("slurm_kill_job_step");
int kill_step(uint32_t job_id, uint32_t step_id, uint16_t signal)
{
    if (job_id != host.job_id || step_id != host.step_id || signal != SIGKILL)
        abort();
    return due("slurm_kill_job_step") ? -1 : 0;
}
#else
void kill_step(void) __asm__("slurm_kill_job_step");
void kill_step(void)
{
    abort();
}
#endif

/* ------------------------------------------------------------------ checks */

static void *plugin;
static const char *scenario;
static bool count_valid = true;

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s: %s:%d: %s: ", scenario, __FILE__, __LINE__, #condition);                              \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* What no hook may change. */
struct state {
    struct rlimit limits[RLIM_NLIMITS];
    int descriptors[256];
    struct sigaction actions[NSIG];
    sigset_t mask;
    mode_t umask;
    int threads;
    char cwd[256];
};

static int count_threads(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    int threads = -1;
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "Threads: %d", &threads) == 1)
            break;
    if (status)
        fclose(status);
    return threads;
}

static void look(struct state *state)
{
    memset(state, 0, sizeof *state);
    for (int i = 0; i < (int)RLIM_NLIMITS; i++)
        getrlimit(i, &state->limits[i]);
    for (int i = 0; i < (int)COUNT(state->descriptors); i++)
        state->descriptors[i] = fcntl(i, F_GETFD);
    for (int i = 1; i < NSIG; i++)
        sigaction(i, NULL, &state->actions[i]);
    sigprocmask(SIG_SETMASK, NULL, &state->mask);
    state->umask = umask(0);
    umask(state->umask);
    state->threads = count_threads();
    if (!getcwd(state->cwd, sizeof state->cwd))
        abort();
}

/* With the flag srun listens, from one of these hooks to its end, for the nodes' records of
   failed ranks: one descriptor, which no program that srun starts inherits. */
static int listening = -1;

static bool listens(const char *hook, int descriptor, int before, int after)
{
    if (host.context != S_CTX_LOCAL)
        return false;
    bool opens = strcmp(hook, "init_post_opt") == 0 || strcmp(hook, "local_user_init") == 0;
    if (opens && listening < 0 && before == -1 && after == FD_CLOEXEC) {
        listening = descriptor;
        return true;
    }
    if (listening == descriptor && before == FD_CLOEXEC && after == -1) {
        listening = -1;
        return true;
    }
    return false;
}

static void same(const char *hook, const struct state *a, const struct state *b)
{
    CHECK(memcmp(a->limits, b->limits, sizeof a->limits) == 0, "%s changed a resource limit", hook);
    for (int i = 0; i < (int)COUNT(a->descriptors); i++)
        CHECK(listens(hook, i, a->descriptors[i], b->descriptors[i]) || a->descriptors[i] == b->descriptors[i], "%s: descriptor %d was %d, is %d", hook, i, a->descriptors[i],
              b->descriptors[i]);
    for (int i = 1; i < NSIG; i++)
        CHECK(a->actions[i].sa_handler == b->actions[i].sa_handler, "%s changed the handling of signal %d", hook, i);
    CHECK(memcmp(&a->mask, &b->mask, sizeof a->mask) == 0, "%s changed the signal mask", hook);
    CHECK(a->umask == b->umask, "%s changed the umask", hook);
    CHECK(a->threads == 1 && b->threads == 1, "%s: %d threads before, %d after", hook, a->threads, b->threads);
    CHECK(strcmp(a->cwd, b->cwd) == 0, "%s changed the working directory", hook);
}

static const char *const HOOKS[] = {"init",         "init_post_opt", "local_user_init",      "job_prolog",
                                    "user_init",    "task_init_privileged", "task_post_fork", "task_init",
                                    "task_exit",    "exit",          "job_epilog",           "slurmd_exit"};

/* Calls a hook if the plugin has it, as Slurm does. Returns its allocations. */
static unsigned long call_with(const char *hook, int argc, char **argv)
{
    static char spank; /* opaque to plugins */
    char symbol[64];
    snprintf(symbol, sizeof symbol, "slurm_spank_%s", hook);
    spank_f *function = (spank_f *)dlsym(plugin, symbol);
    if (!function)
        return 0;
    struct state before, after;
    look(&before);
    host.hook = hook;
    unsigned long start = allocations;
    counting = true;
    int code = function((spank_t)&spank, argc, argv);
    counting = false;
    host.hook = NULL;
    look(&after);
    CHECK(code == 0, "%s returned %d", symbol, code);
    same(hook, &before, &after);
    return allocations - start;
}

static unsigned long call(const char *hook)
{
    return call_with(hook, 0, NULL);
}

/* The law of a plugin that is installed and not asked for. */
static void idle(const char *hook, int argc, char **argv)
{
    char *environment[512];
    int count = 0;
    for (; environ && environ[count] && count < (int)COUNT(environment); count++)
        environment[count] = environ[count];
    unsigned set = host.set + host.unset, logged = host.logged;
    unsigned long made = call_with(hook, argc, argv);
    if (count_valid)
        CHECK(made == 0, "%s made %lu allocations in context %d without the flag", hook, made, host.context);
    CHECK(host.set + host.unset == set, "%s changed the job's environment without the flag", hook);
    CHECK(host.logged == logged, "%s spoke without the flag", hook);
    for (int i = 0; i < count; i++)
        CHECK(environ[i] == environment[i], "%s changed the process's environment without the flag", hook);
}

static void option(const char *argument, int remote)
{
    CHECK(host.options, "no option is registered");
    int code = host.option.cb(host.option.val, argument, remote);
    CHECK(code == 0, "the callback returned %d", code);
}

/* The option in slurmstepd, as this release brings it there. */
static void remote_option(const char *argument)
{
    option(argument, 1);
    if (CALLBACKS == 2)
        option(argument ? argument : "", 1);
}

/* Runs work in a child; its exit code, its stderr in text. */
static int child(void (*work)(void), char *text, size_t size)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        abort();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        work();
        _exit(0);
    }
    close(ends[1]);
    size_t have = 0;
    ssize_t got;
    while (have + 1 < size && (got = read(ends[0], text + have, size - 1 - have)) > 0)
        have += got;
    text[have] = '\0';
    close(ends[0]);
    int status;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void one_line(const char *what, const char *text)
{
    const char *end = strchr(text, '\n');
    CHECK(end && end[1] == '\0', "%s: not exactly one line: '%s'", what, text);
    CHECK(strncmp(text, "palingenesis: error: ", 21) == 0, "%s: '%s'", what, text);
}

/* A step of two tasks on one node; this process is its slurmstepd. */
static void stepd(const char *spec)
{
    static char *command[] = {"/usr/bin/python3", "train.py", NULL};
    host.context = S_CTX_REMOTE;
    host.job_id = 4711;
    host.step_id = 3;
    host.nodes = 1;
    host.local_tasks = 2;
    host.argc = 2;
    host.argv = command;
    static const char *const pairs[][2] = {
        {"SLURM_JOB_ID", "4711"},
        {"SLURM_STEP_ID", "3"},
        {"SLURM_STEP_NODELIST", "node1"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_STEP_TASKS_PER_NODE", "2"},
        {"SLURM_NODEID", "0"},
        {"SLURMD_NODENAME", "node1"},
        {"HOME", "/root"},
    };
    for (size_t i = 0; i < COUNT(pairs); i++)
        put_env(pairs[i][0], pairs[i][1]);
    if (spec) {
        put_env(SPEC, spec);
        put_env("SLURM_PALINGENESIS_HOST", "node1");
        put_env("SLURM_PALINGENESIS_ADDRESS", "192.0.2.7");
    }
}

static void task(int rank)
{
    char number[16];
    snprintf(number, sizeof number, "%d", rank);
    host.task_id = rank;
    put_env("SLURM_PROCID", number);
    put_env("SLURM_LOCALID", number);
}

static void is(const char *name, const char *expected)
{
    const char *value = env_value(name);
    CHECK(value && strcmp(value, expected) == 0, "%s is %s, not %s", name, value ? value : "(unset)", expected);
}

static void not_set(const char *name)
{
    CHECK(!env_value(name), "%s is %s", name, env_value(name));
}

/* --------------------------------------------------------------- scenarios */

static char *no_words[] = {NULL};
static char *gate_words[] = {"gate=5", "root=/", NULL};
static char *soon_words[] = {"gate=1", "root=/", NULL};

static void unused_in_its_sequence(void)
{
    static const struct {
        spank_context_t context;
        const char *hooks[8];
    } sequences[] = {
        {S_CTX_LOCAL, {"init", "init_post_opt", "local_user_init", "exit"}},
        {S_CTX_LOCAL, {"init", "init_post_opt", "init_post_opt", "local_user_init", "exit"}},
        {S_CTX_ALLOCATOR, {"init", "init_post_opt", "exit"}},
        {S_CTX_SLURMD, {"init", "slurmd_exit"}},
        {S_CTX_JOB_SCRIPT, {"job_prolog"}},
        {S_CTX_JOB_SCRIPT, {"job_epilog"}},
        {S_CTX_REMOTE,
         {"init", "init_post_opt", "user_init", "task_init_privileged", "task_post_fork", "task_init", "task_exit",
          "exit"}},
    };
    for (size_t i = 0; i < COUNT(sequences); i++) {
        fflush(NULL);
        pid_t pid = fork(); /* each in a fresh process: first calls are the expensive ones */
        if (pid == 0) {
            stepd(NULL);
            task(0);
            host.context = sequences[i].context;
            for (int h = 0; h < 8 && sequences[i].hooks[h]; h++)
                idle(sequences[i].hooks[h], 2, gate_words);
            exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        CHECK(status == 0, "sequence %zu", i);
    }
}

static void unused_every_hook_everywhere(void)
{
    static char *with_null[] = {"gate=5", NULL, "root=/", NULL};
    stepd(NULL);
    task(0);
    for (int context = S_CTX_ERROR; context <= S_CTX_JOB_SCRIPT + 1; context++)
        for (size_t h = 0; h < COUNT(HOOKS); h++) {
            host.context = context;
            idle(HOOKS[h], 0, NULL);
            idle(HOOKS[h], 0, no_words);
            idle(HOOKS[h], 3, NULL);
            idle(HOOKS[h], -1, gate_words);
            idle(HOOKS[h], 3, with_null);
            idle(HOOKS[h], 2, gate_words);
        }
}

static void unused_and_every_call_fails(void)
{
    stepd(NULL);
    host.all_items_error = ESPANK_NOT_AVAIL;
    host.getenv_error = ESPANK_BAD_ARG;
    host.setenv_error = host.unsetenv_error = ESPANK_BAD_ARG;
    for (int context = S_CTX_ERROR; context <= S_CTX_JOB_SCRIPT; context++)
        for (size_t h = 0; h < COUNT(HOOKS); h++) {
            host.context = context;
            idle(HOOKS[h], 2, gate_words);
        }
}

static void special_steps_have_no_ranks(void)
{
    /* slurm.h: SLURM_PENDING_STEP, EXTERN_CONT, BATCH_SCRIPT, INTERACTIVE_STEP */
    static const uint32_t ids[] = {0xfffffffd, 0xfffffffc, 0xfffffffb, 0xfffffffa};
    for (size_t i = 0; i < COUNT(ids); i++) {
        stepd("show");
        task(0);
        host.step_id = ids[i];
        call("init");
        option("show", 1);
        idle("init_post_opt", 2, gate_words);
        idle("user_init", 2, gate_words);
        /* srun set its words before it knew the step: they are taken out again. */
        call_with("task_init", 2, gate_words);
        not_set(SPEC);
        not_set("NCCL_DEBUG");
        idle("task_exit", 2, gate_words);
        idle("exit", 2, gate_words);
        not_set("RANK");
    }
}

/* The three spellings of "no argument": NULL from srun, "" through the
 * environment, "(null)" where Slurm prints a NULL into a variable. */
static void the_option_without_an_argument(void)
{
    static const char *const spellings[] = {NULL, "", "(null)"};
    host.context = S_CTX_LOCAL;
    call("init");
    CHECK(strcmp(host.option.name, "palingenesis") == 0 && host.option.has_arg == 2, "%s", host.option.name);
    for (size_t i = 0; i < COUNT(spellings); i++)
        for (int uses = 1; uses <= 3; uses++) {
            unsetenv(SPEC);
            for (int use = 0; use < uses; use++)
                option(use + 1 < uses ? "fsdp" : spellings[i], 0);
            call("init_post_opt");
            CHECK(getenv(SPEC) && strcmp(getenv(SPEC), "on") == 0, "%zu, %d uses: %s", i, uses, getenv(SPEC));
        }
    option("megatron,port=12345", 0);
    call("init_post_opt");
    CHECK(getenv(SPEC) && strcmp(getenv(SPEC), "megatron,port=12345") == 0, "%s", getenv(SPEC));
    /* What an outer step's srun left in the environment goes in init. */
    call("init");
    CHECK(!getenv(SPEC), "%s", getenv(SPEC));
    option("off", 0);
    call("init_post_opt");
    CHECK(!getenv(SPEC), "%s", getenv(SPEC));
}

static void the_callback_in_slurmstepd_changes_nothing(void)
{
    static const char *const spellings[] = {NULL, "", "(null)", "fsdp", "nonsense"};
    stepd(NULL);
    task(0);
    call("init");
    for (size_t i = 0; i < COUNT(spellings); i++)
        for (int use = 0; use < 2; use++)
            option(spellings[i], 1);
    idle("init_post_opt", 0, NULL);
    idle("user_init", 0, NULL);
    idle("task_init", 0, NULL);
    not_set("RANK");
}

static void srun_hands_rank_0_over(void)
{
    host.context = S_CTX_LOCAL;
    host.job_id = 4711;
    host.nodes = 2;
    call("init");
    option(NULL, 0);
    call("init_post_opt");
    call("local_user_init");
    const char *name = getenv("SLURM_PALINGENESIS_HOST"), *address = getenv("SLURM_PALINGENESIS_ADDRESS");
    CHECK(name && strcmp(name, "node1") == 0, "%s", name);
    CHECK(address && strcmp(address, "192.0.2.7") == 0, "%s", address);
    CHECK(host.layouts == host.freed, "%u layouts, %u freed", host.layouts, host.freed);
    CHECK(!getenv(REFUSAL), "%s", getenv(REFUSAL));
    call("exit");
    CHECK(listening < 0, "srun still listens at descriptor %d", listening);
}

static void srun_without_a_controller(void)
{
    host.context = S_CTX_LOCAL;
    host.no_layout = true;
    setenv("SLURM_PALINGENESIS_HOST", "of-an-outer-step", 1);
    setenv("PALINGENESIS", "show", 1);
    call("init");
    call("init_post_opt");
    call("local_user_init");
    CHECK(getenv(SPEC) && !getenv("SLURM_PALINGENESIS_HOST"), "a host of an outer step is left");
    call("exit");
}

/* The step exists: ending srun would leave it, so the tasks are to refuse. */
static void srun_whose_items_fail(void)
{
    host.context = S_CTX_LOCAL;
    call("init");
    option("", 0);
    call("init_post_opt");
    host.all_items_error = ESPANK_NOT_AVAIL;
    call("local_user_init");
    const char *line = getenv(REFUSAL);
    CHECK(line && strncmp(line, "palingenesis: error: ", 21) == 0 && !strchr(line, '\n'), "%s", line);
}

static const char *given;
static bool given_by_variable;
static spank_context_t given_in;

static void submit(void)
{
    host.context = given_in;
    if (given_by_variable)
        setenv("PALINGENESIS", given, 1);
    call("init");
    if (!given_by_variable && host.options)
        option(given, 0);
    call("init_post_opt");
    if (given_in == S_CTX_LOCAL)
        call("local_user_init");
    call("exit");
}

static void a_bad_spec_refuses_before_anything_is_asked_for(void)
{
    static const char *const bad[] = {"nonsense", "port=1", "master=", "=", "port=1,port=2", "profile", "\xff\xfe"};
    char text[8192];
    for (size_t i = 0; i < COUNT(bad); i++) {
        given = bad[i];
        for (int variable = 0; variable < 2; variable++) {
            given_by_variable = variable;
            given_in = S_CTX_LOCAL;
            int code = child(submit, text, sizeof text);
            CHECK(code == EX_CONFIG, "srun, %s: exit code %d, '%s'", given, code, text);
            one_line(given, text);
            given_in = S_CTX_ALLOCATOR;
            code = child(submit, text, sizeof text);
            if (variable) /* the batch script may still change its environment */
                CHECK(code == 0 && strstr(text, "warning"), "sbatch, %s: exit code %d, '%s'", given, code, text);
            else
                CHECK(code == EX_CONFIG, "sbatch, %s: exit code %d, '%s'", given, code, text);
        }
    }
    static char huge[100000];
    memset(huge, 'x', sizeof huge - 1);
    given = huge;
    given_by_variable = false;
    given_in = S_CTX_LOCAL;
    int code = child(submit, text, sizeof text);
    CHECK(code == EX_CONFIG, "a huge argument: exit code %d", code);
    one_line("a huge argument", text);
    given = "fsdp";
    given_in = S_CTX_ALLOCATOR;
    CHECK(child(submit, text, sizeof text) == 0 && !*text, "sbatch --palingenesis=fsdp: '%s'", text);
}

static void an_option_that_slurm_did_not_take(void)
{
    char text[8192];
    host.register_error = ESPANK_BAD_ARG;
    given = "fsdp";
    given_by_variable = true;
    given_in = S_CTX_LOCAL;
    int code = child(submit, text, sizeof text);
    CHECK(code == EX_CONFIG, "exit code %d, '%s'", code, text);
    one_line("PALINGENESIS=fsdp", text);
    given = "off";
    code = child(submit, text, sizeof text);
    CHECK(code == 0 && !*text, "off: exit code %d, '%s'", code, text);
    given_by_variable = false;
    code = child(submit, text, sizeof text);
    CHECK(code == 0 && !*text, "without the flag: exit code %d, '%s'", code, text);
}

static void run_task_0(void)
{
    task(0);
    call("task_init");
}

static void run_task_1(void)
{
    task(1);
    call("task_init");
}

/* Runs both tasks of the step at once, as slurmstepd does. */
static void both(int codes[2], char texts[2][8192])
{
    static void (*const work[])(void) = {run_task_0, run_task_1};
    int ends[2][2];
    pid_t pids[2];
    for (int i = 0; i < 2; i++) {
        if (pipe2(ends[i], O_CLOEXEC))
            abort();
        fflush(NULL);
        pids[i] = fork();
        if (pids[i] == 0) {
            alarm(60);
            dup2(ends[i][1], STDERR_FILENO);
            work[i]();
            char rank[16];
            snprintf(rank, sizeof rank, "%d", i);
            if (env_value("RANK")) {
                is("RANK", rank);
                is("WORLD_SIZE", "2");
                is("LOCAL_RANK", rank);
                is("LOCAL_WORLD_SIZE", "2");
                CHECK(env_value("MASTER_ADDR") && env_value("MASTER_PORT"), "no place to meet");
                not_set(SPEC);
                not_set("SLURM_PALINGENESIS_HOST");
                not_set("SLURM_PALINGENESIS_ADDRESS");
                _exit(0);
            }
            _exit(99); /* would run without its variables, and nobody would know */
        }
        close(ends[i][1]);
    }
    for (int i = 0; i < 2; i++) {
        size_t have = 0;
        ssize_t got;
        while (have + 1 < 8192 && (got = read(ends[i][0], texts[i] + have, 8191 - have)) > 0)
            have += got;
        texts[i][have] = '\0';
        close(ends[i][0]);
        int status;
        waitpid(pids[i], &status, 0);
        codes[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
}

static void end_of_step(void)
{
    for (int i = 0; i < 2; i++) {
        task(i);
        call("task_exit");
    }
    call("exit");
}

static void tasks_get_their_ranks(void)
{
    int codes[2];
    char texts[2][8192];
    stepd("default");
    call("init");
    remote_option(NULL);
    call_with("init_post_opt", 2, gate_words);
    unsigned long made = call_with("user_init", 2, gate_words);
    if (count_valid)
        CHECK(made > 0, "nothing is counted: is malloc interposed?");
    both(codes, texts);
    for (int i = 0; i < 2; i++)
        CHECK(codes[i] == 0 && !*texts[i], "task %d: exit code %d, '%s'", i, codes[i], texts[i]);
    end_of_step();
}

#if RELEASE >= 2405
static int run_contained(void *hook)
{
    call_with(hook, 2, gate_words);
    return 0;
}

/* SlurmdParameters=contain_spank, since 24.05: these hooks run in a process of their
   own that shares slurmstepd's memory (src/common/spank.c). */
static void contained(char *hook)
{
    static char stack[1 << 20] __attribute__((aligned(64)));
    int status;
    pid_t pid = clone(run_contained, stack + sizeof stack, CLONE_VM | SIGCHLD, hook);
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "%s: status %#x", hook, status);
}

static void tasks_of_a_slurmstepd_that_contains_hooks(void)
{
    int codes[2];
    char texts[2][8192];
    stepd("default");
    call("init");
    remote_option(NULL);
    call_with("init_post_opt", 2, gate_words);
    contained("user_init");
    both(codes, texts);
    for (int i = 0; i < 2; i++)
        CHECK(codes[i] == 0 && !*texts[i], "task %d: exit code %d, '%s'", i, codes[i], texts[i]);
    for (int i = 0; i < 2; i++) {
        task(i);
        contained("task_exit");
    }
    call("exit");
}
#endif

static void tasks_without_user_init(void)
{
    int codes[2];
    char texts[2][8192];
    stepd("fsdp,master=192.0.2.9,port=23456");
    both(codes, texts);
    for (int i = 0; i < 2; i++)
        CHECK(codes[i] == 0 && !*texts[i], "task %d: exit code %d, '%s'", i, codes[i], texts[i]);
    end_of_step();
}

/* What goes wrong before the tasks is told by one of them, and all end with exit code 78. */
enum outcome { WORKS, REFUSES };

static void with_a_fault(const char *what, enum outcome expected)
{
    int codes[2];
    char texts[2][8192];
    scenario = what;
    call("init");
    remote_option(NULL);
    call_with("init_post_opt", 2, gate_words);
    call_with("user_init", 2, gate_words);
    both(codes, texts);
    char said[16384];
    snprintf(said, sizeof said, "%s%s", texts[0], texts[1]);
    for (int i = 0; i < 2; i++)
        CHECK(codes[i] == (expected == WORKS ? 0 : EX_CONFIG), "task %d: exit code %d, '%s'", i, codes[i], said);
    if (expected == REFUSES)
        one_line(what, said);
    end_of_step();
}

#define FAULT(name, expected, ...)                                                                                     \
    static void name(void)                                                                                             \
    {                                                                                                                  \
        stepd("default");                                                                                              \
        __VA_ARGS__;                                                                                                   \
        with_a_fault(#name, expected);                                                                                 \
    }

static char *early_end[] = {"python3", NULL};
static char strange_name[] = "=strange", no_equals[] = "no equals sign", empty[] = "", bytes[] = "BYTES=\xff\xfe\x80";
static char huge_value[1 << 20];

static void strange_entries(void)
{
    static char *const entries[] = {strange_name, no_equals, empty, bytes, huge_value};
    memset(huge_value, 'x', sizeof huge_value - 1);
    memcpy(huge_value, "HUGE=", 5);
    int i = 0;
    while (host.env[i])
        i++;
    for (size_t e = 0; e < COUNT(entries); e++)
        host.env[i++] = entries[e];
    host.env[i] = NULL;
}

FAULT(argv_is_null, WORKS, host.argv_null = true)
FAULT(argv_is_an_error, WORKS, host.item_error[S_JOB_ARGV] = ESPANK_NOT_AVAIL)
FAULT(argv_ends_early, WORKS, host.argv = early_end; host.argc = 100)
FAULT(argc_is_negative, WORKS, host.argc = -5)
FAULT(the_environment_has_strange_entries, WORKS, strange_entries())
FAULT(the_environment_is_null, REFUSES, host.env_null = true)
FAULT(the_environment_is_an_error, REFUSES, host.item_error[S_JOB_ENV] = ESPANK_NOT_AVAIL)
FAULT(the_step_id_is_an_error, WORKS, host.item_error[S_JOB_STEPID] = ESPANK_NOT_AVAIL)
FAULT(the_task_count_is_an_error, REFUSES, host.item_error[S_JOB_LOCAL_TASK_COUNT] = ESPANK_NOT_AVAIL)
FAULT(the_task_count_is_absurd, REFUSES, host.local_tasks = 0xffffffff)
FAULT(the_task_id_is_an_error, WORKS, host.item_error[S_TASK_ID] = ESPANK_NOT_TASK)
FAULT(every_item_is_an_error, REFUSES, host.all_items_error = ESPANK_NOT_AVAIL)
FAULT(the_error_is_negative, REFUSES, host.all_items_error = -1)
FAULT(the_error_is_small, REFUSES, host.all_items_error = 5)
FAULT(the_error_is_a_new_one, REFUSES, host.all_items_error = RELEASE >= 2505 ? JOB_FAILURE : 3999)
FAULT(the_node_is_to_fail, REFUSES, host.setenv_error = RELEASE >= 2505 ? NODE_FAILURE : 3998)
FAULT(setenv_fails, REFUSES, host.setenv_error = ESPANK_BAD_ARG)
FAULT(unsetenv_fails, REFUSES, host.unsetenv_error = ESPANK_BAD_ARG)
FAULT(the_rank_is_no_number, REFUSES, put_env("SLURM_STEP_NUM_TASKS", "two"))
FAULT(the_spec_is_nonsense, REFUSES, put_env(SPEC, "no\nsense"))
FAULT(srun_refused, REFUSES, put_env(REFUSAL, "palingenesis: error: srun says no"))

/* The worker in place of the command, or before it. Its path is any program's. */
static char *worker_words[] = {"gate=5", "worker=/bin/sh", NULL};
static const char *in_front, *first_argument;

static void run_worker_task(void)
{
    task(0);
    call("task_init");
#ifdef PREPEND
    CHECK(host.prepended == 1 && strcmp(host.before, in_front) == 0, "%s", host.before);
    CHECK(strcmp(host.argv[0], first_argument) == 0, "%s", host.argv[0]);
    not_set("PALINGENESIS_WORKER_ARG");
#else
    CHECK(strcmp(host.argv[0], in_front) == 0, "%s", host.argv[0]);
    is("PALINGENESIS_WORKER_ARG", first_argument);
#endif
    CHECK(strcmp(host.argv[1], "a b") == 0 && !host.argv[2], "%s", host.argv[1]);
    is("RANK", "0");
}

static void worker_step(const char *spec, char **command)
{
    stepd(spec);
    host.local_tasks = 1;
    host.argc = 2;
    host.argv = command;
    put_env("SLURM_STEP_NUM_TASKS", "1");
    put_env("SLURM_STEP_TASKS_PER_NODE", "1");
    call("init");
    call_with("init_post_opt", 2, worker_words);
    call_with("user_init", 2, worker_words);
}

static void the_worker_is_started_with_the_words_of_the_command(void)
{
    static char config[] = "tr\xffin.toml", nothing[] = "", argument[] = "a b";
    static char *words[] = {config, nothing};
    char text[8192];
    for (size_t i = 0; i < COUNT(words); i++) {
        char *command[] = {words[i], argument, NULL};
        worker_step("worker", command);
        in_front = "/bin/sh";
        first_argument = words[i];
        put_env("PALINGENESIS_WORKER_ARG", "of an outer step");
        int code = child(run_worker_task, text, sizeof text);
        CHECK(code == 0 && !*text, "exit code %d, '%s'", code, text);
        call("exit");
    }
}

/* A task whose worker cannot be started does not run its words as a program. */
static void a_worker_that_cannot_be_started_is_a_refusal(void)
{
    static char config[] = "train.toml", argument[] = "a b";
    char *command[] = {config, argument, NULL}, text[8192];
    for (int fault = 0; fault < 4; fault++) {
        worker_step("worker", command);
        if (fault == 0)
            host.argv_null = true;
        else if (fault == 1)
            host.argc = 0;
        else if (fault == 2)
            host.item_error[S_JOB_ARGV] = ESPANK_NOT_AVAIL;
        else
            put_env("SLURM_PALINGENESIS_MULTI_PROG", "1");
        int code = child(run_task_0, text, sizeof text);
        CHECK(code == EX_CONFIG, "fault %d: exit code %d, '%s'", fault, code, text);
        one_line("no command", text);
        host.argv_null = false;
        host.item_error[S_JOB_ARGV] = 0;
        call("exit");
    }
#ifdef PREPEND
    worker_step("worker,launch=worker", command);
    host.env[find_env("SLURM_PALINGENESIS_MULTI_PROG")] = "NOTHING=";
    host.prepend_error = ESPANK_NOT_TASK;
    int code = child(run_task_0, text, sizeof text);
    CHECK(code == EX_CONFIG && strstr(text, "spank_prepend_task_argv"), "exit code %d, '%s'", code, text);
    one_line("spank_prepend_task_argv fails", text);
#endif
}

/* Hooks of a task that Slurm calls in a strange order, or again. */
static void hooks_out_of_order(void)
{
    char text[8192];
    stepd("default");
    host.local_tasks = 1;
    put_env("SLURM_STEP_NUM_TASKS", "1");
    put_env("SLURM_STEP_TASKS_PER_NODE", "1");
    call("exit");
    task(0);
    call("task_exit");
    call("user_init");
    call("user_init");
    int code = child(run_task_0, text, sizeof text);
    CHECK(code == 0 && !*text, "exit code %d, '%s'", code, text);
    task(1000);
    call("task_exit");
    task(-1);
    call("task_exit");
    call("exit");
    call("exit");
    call("init");
    call("init");
}

/* ------------------------------------------- every call fails, once, in every way */

static const int WAYS[] = {
    NOTHING,          ESPANK_ERROR,     ESPANK_BAD_ARG,    ESPANK_NOT_TASK,    ESPANK_ENV_EXISTS, ESPANK_ENV_NOEXIST,
    ESPANK_NOSPACE,   ESPANK_NOT_REMOTE, ESPANK_NOEXIST,   ESPANK_NOT_EXECD,   ESPANK_NOT_AVAIL,  ESPANK_NOT_LOCAL,
    -1,               1,
#if RELEASE >= 2505
    NODE_FAILURE,     JOB_FAILURE,
#endif
};

static void note_calls(void)
{
    if (calls > shared->calls)
        shared->calls = calls;
}

/* Lines of ours and nothing else. */
static void only_ours(const char *text)
{
    for (const char *line = text; *line;) {
        CHECK(strncmp(line, "palingenesis: ", 14) == 0, "not a line of ours: '%s'", line);
        const char *end = strchr(line, '\n');
        CHECK(end, "no whole line: '%s'", line);
        line = end + 1;
    }
}

/* Runs work once as it is and then with each of its calls failing in each way. */
static void sweep(void (*work)(void))
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        abort();
    const char *name = scenario;
    char what[160], text[16384];
    int code = child(work, text, sizeof text);
    CHECK(code == 0, "with nothing wrong: exit code %d, '%s'", code, text);
    int most = shared->calls, refused = 0;
    CHECK(most > 0, "no call was seen");
    for (int call = 1; call <= most; call++)
        for (size_t way = 0; way < COUNT(WAYS); way++) {
            host.fail_at = call;
            host.fail_with = WAYS[way];
            *shared->failed = '\0';
            code = child(work, text, sizeof text);
            snprintf(what, sizeof what, "%s: call %d (%s) gives %d", name, call, shared->failed, WAYS[way]);
            scenario = what;
            CHECK(code == 0 || code == EX_CONFIG, "exit code %d, '%s'", code, text);
            CHECK(*shared->failed, "it was not made");
            only_ours(text);
            CHECK(code == 0 || *text, "refused without a word");
            refused += code != 0;
            scenario = name;
        }
    host.fail_at = 0;
    printf("   %d calls failed in %zu ways each: %d launches refused, the others went on\n", most, COUNT(WAYS), refused);
}

#define UNPREPARED 99

static void a_task(void)
{
    task(0);
    call("task_init");
    note_calls();
    _exit(env_value("RANK") && env_value("MASTER_ADDR") ? 0 : UNPREPARED);
}

/* One task, so that every call is somebody's in a known order. */
static void a_step(void)
{
    char text[8192];
    calls = 0;
    stepd("default");
    host.local_tasks = 1;
    put_env("SLURM_STEP_NUM_TASKS", "1");
    put_env("SLURM_STEP_TASKS_PER_NODE", "1");
    call("init");
    if (host.options)
        remote_option(NULL);
    call_with("init_post_opt", 2, soon_words);
    call_with("user_init", 2, soon_words);
    note_calls();
    int code = child(a_task, text, sizeof text);
    fputs(text, stderr);
    task(0);
    call("task_exit");
    call("exit");
    note_calls();
    /* Where Slurm does not say what is in the environment, the flag is not there. */
    if (code == UNPREPARED && strcmp(shared->failed, "spank_getenv") == 0)
        code = 0;
    _exit(code);
}

static void srun_s_hooks(void)
{
    calls = 0;
    given = NULL;
    given_by_variable = false;
    given_in = S_CTX_LOCAL;
    host.job_id = 4711;
    host.nodes = 2;
    host.local_tasks = 2;
    submit();
    note_calls();
}

static void sbatch_s_hooks(void)
{
    calls = 0;
    given = NULL;
    given_by_variable = false;
    given_in = S_CTX_ALLOCATOR;
    submit();
    note_calls();
}

static void every_call_of_a_step_fails_once(void)
{
    sweep(a_step);
}

static void every_call_of_srun_fails_once(void)
{
    sweep(srun_s_hooks);
}

static void every_call_of_sbatch_fails_once(void)
{
    sweep(sbatch_s_hooks);
}

static const struct {
    const char *name;
    void (*run)(void);
} SCENARIOS[] = {
#define S(name) {#name, name}
    S(unused_in_its_sequence),
    S(unused_every_hook_everywhere),
    S(unused_and_every_call_fails),
    S(special_steps_have_no_ranks),
    S(the_option_without_an_argument),
    S(the_callback_in_slurmstepd_changes_nothing),
    S(srun_hands_rank_0_over),
    S(srun_without_a_controller),
    S(srun_whose_items_fail),
    S(a_bad_spec_refuses_before_anything_is_asked_for),
    S(an_option_that_slurm_did_not_take),
    S(tasks_get_their_ranks),
#if RELEASE >= 2405
    S(tasks_of_a_slurmstepd_that_contains_hooks),
#endif
    S(tasks_without_user_init),
    S(argv_is_null),
    S(argv_is_an_error),
    S(argv_ends_early),
    S(argc_is_negative),
    S(the_environment_has_strange_entries),
    S(the_environment_is_null),
    S(the_environment_is_an_error),
    S(the_step_id_is_an_error),
    S(the_task_count_is_an_error),
    S(the_task_count_is_absurd),
    S(the_task_id_is_an_error),
    S(every_item_is_an_error),
    S(the_error_is_negative),
    S(the_error_is_small),
    S(the_error_is_a_new_one),
    S(the_node_is_to_fail),
    S(setenv_fails),
    S(unsetenv_fails),
    S(the_rank_is_no_number),
    S(the_spec_is_nonsense),
    S(srun_refused),
    S(the_worker_is_started_with_the_words_of_the_command),
    S(a_worker_that_cannot_be_started_is_a_refusal),
    S(hooks_out_of_order),
    /* The last ones: see all(). */
    S(every_call_of_a_step_fails_once),
    S(every_call_of_srun_fails_once),
    S(every_call_of_sbatch_fails_once),
};

static int all(bool sweeps)
{
    int failed = 0;
    for (size_t i = 0; i < COUNT(SCENARIOS) - (sweeps ? 0 : 3); i++) {
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(900);
            scenario = SCENARIOS[i].name;
            SCENARIOS[i].run();
            exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        if (status != 0) {
            failed++;
            printf("FAILED %s (status %#x)\n", SCENARIOS[i].name, status);
        } else {
            printf("ok %s\n", SCENARIOS[i].name);
        }
    }
    return failed != 0;
}

/* A program that is none of Slurm's: built without exported functions. */
static int bare(void)
{
    scenario = "bare";
    CHECK(!dlsym(RTLD_DEFAULT, "spank_context"), "this program exports SPANK functions");
    setenv("PALINGENESIS", "nonsense", 1);
    for (size_t h = 0; h < COUNT(HOOKS); h++)
        call_with(HOOKS[h], 2, gate_words);
    return 0;
}

static void bench(const char *context, bool flag, int rounds)
{
    scenario = "bench";
    stepd(flag ? "default" : NULL);
    host.local_tasks = 1;
    put_env("SLURM_STEP_NUM_TASKS", "1");
    put_env("SLURM_STEP_TASKS_PER_NODE", "1");
    task(0);
    for (int round = 0; round < rounds; round++) {
        if (strcmp(context, "local") == 0) {
            host.context = S_CTX_LOCAL;
            call("init");
            if (flag)
                option(NULL, 0);
            call("init_post_opt");
            call("local_user_init");
            call("exit");
        } else if (strcmp(context, "allocator") == 0) {
            host.context = S_CTX_ALLOCATOR;
            call("init");
            if (flag)
                option(NULL, 0);
            call("init_post_opt");
            call("exit");
        } else {
            host.context = S_CTX_REMOTE;
            if (flag)
                put_env(SPEC, "default");
            call("init");
            if (flag)
                option(NULL, 1);
            call("init_post_opt");
            call("user_init");
            call("task_init");
            call("task_exit");
            call("exit");
        }
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: fake_host PLUGIN all|scenarios|load|bare|bench CONTEXT unused|flag ROUNDS\n");
        return 2;
    }
    count_valid = !getenv("FAKE_HOST_NO_COUNT");
    unsetenv("PALINGENESIS");
    setvbuf(stdout, NULL, _IONBF, 0);
    plugin = dlopen(argv[1], RTLD_LAZY); /* as Slurm opens plugins */
    if (!plugin) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const char *type = dlsym(plugin, "plugin_type");
    const uint32_t *version = dlsym(plugin, "plugin_version");
    if (!type || strcmp(type, "spank") || !dlsym(plugin, "plugin_name") || !version) {
        fprintf(stderr, "%s: not a SPANK plugin\n", argv[1]);
        return 1;
    }
    if ((*version & GATE) != (VERSION_NUMBER & GATE)) {
        fprintf(stderr, "plugin_load_from_file: Incompatible Slurm plugin %s version (%u.%02u.%u)\n", argv[1],
                *version >> 16, *version >> 8 & 0xff, *version & 0xff);
        return 3;
    }
    /* src/common/spank.c since 25.05 takes two values of this one, if it is there. */
    const int *mode = dlsym(plugin, "slurm_spank_init_failure_mode");
    if (mode && *mode != NODE_FAILURE && *mode != JOB_FAILURE) {
        fprintf(stderr, "slurm_spank_init_failure_mode is %d\n", *mode);
        return 1;
    }
    if (strcmp(argv[2], "all") == 0 || strcmp(argv[2], "scenarios") == 0)
        return all(strcmp(argv[2], "all") == 0);
    if (strcmp(argv[2], "load") == 0)
        return 0;
    if (strcmp(argv[2], "bare") == 0)
        return bare();
    if (strcmp(argv[2], "bench") == 0 && argc == 6) {
        bench(argv[3], strcmp(argv[4], "flag") == 0, atoi(argv[5]));
        return 0;
    }
    return 2;
}
