/* A stand-in for libcuda.so.1 and libcublasLt.so with one GPU made of the host's memory. It
 * writes down what it is asked, fails where it is told to, and in its lazy mode does what is
 * queued only while somebody asks whether it is done, as late as a real GPU may. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { TOTAL_GIB = 16 };

static struct {
    char log[1 << 16];
    size_t logged;
    char fail_function[64];
    int fail_code, fail_after;
    int lazy, stuck, version, architecture;
    size_t own, others;
    int live_memory, live_host, live_events, live_streams;
} state = {.version = 13000, .architecture = 90};

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
#include <stdarg.h>
static void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int wrote = vsnprintf(state.log + state.logged, sizeof state.log - state.logged, format, arguments);
    va_end(arguments);
    if (wrote > 0 && state.logged + wrote < sizeof state.log) state.logged += wrote;
}

/* What the test tells it. */
EXPORT void double_fail(const char *function, int code, int after) {
    snprintf(state.fail_function, sizeof state.fail_function, "%s", function);
    state.fail_code = code;
    state.fail_after = after;
}
EXPORT void double_lazy(int lazy) { state.lazy = lazy; }
EXPORT void double_stuck(int stuck) { state.stuck = stuck; }
EXPORT void double_version(int version) { state.version = version; }
EXPORT void double_architecture(int architecture) { state.architecture = architecture; }
EXPORT void double_others(uint64_t bytes) { state.others = bytes; }
EXPORT const char *double_log(void) { return state.log; }
EXPORT void double_forget(void) { state.logged = 0; state.log[0] = 0; }
EXPORT int double_live(int what) {
    int live[] = {state.live_memory, state.live_host, state.live_events, state.live_streams};
    return live[what];
}

static int failing(const char *function) {
    if (strcmp(function, state.fail_function) != 0) return 0;
    if (state.fail_after > 0) {
        state.fail_after--;
        return 0;
    }
    while (state.fail_code == -1) pause();
    return state.fail_code;
}
#define ENTER do { int code = failing(__func__); if (code) return code; } while (0)

/* The queue of the lazy mode, in one order for all streams. */
struct work { int kind; uint64_t to, from; size_t bytes; int value; struct event *event; };
struct event { int recorded, happened; };
static struct work queue[1 << 17];
static size_t queued, done;

static void perform(struct work *w) {
    if (w->kind == 0) memcpy((void *)w->to, (void *)w->from, w->bytes);
    else if (w->kind == 1) memset((void *)w->to, w->value, w->bytes);
    else w->event->happened = 1;
}
static int push(struct work w) {
    if (!state.lazy && !state.stuck) {
        perform(&w);
        return 0;
    }
    if (queued == sizeof queue / sizeof *queue) return 999;
    queue[queued++] = w;
    return 0;
}
static void one_more(void) {
    if (!state.stuck && done < queued) perform(&queue[done++]);
}

EXPORT int cuInit(unsigned flags) { ENTER; return flags; }
EXPORT int cuDriverGetVersion(int *version) { ENTER; *version = state.version; return 0; }
EXPORT int cuGetErrorName(int code, const char **text) {
    switch (code) {
    case 2: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 100: *text = "CUDA_ERROR_NO_DEVICE"; return 0;
    case 214: *text = "CUDA_ERROR_ECC_UNCORRECTABLE"; return 0;
    case 222: *text = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"; return 0;
    case 500: *text = "CUDA_ERROR_NOT_FOUND"; return 0;
    case 700: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0;
    case 802: *text = "CUDA_ERROR_SYSTEM_NOT_READY"; return 0;
    }
    *text = NULL;
    return 1;
}
EXPORT int cuGetErrorString(int code, const char **text) {
    const char *name;
    if (cuGetErrorName(code, &name)) { *text = NULL; return 1; }
    *text = code == 214 ? "uncorrectable ECC error encountered" : code == 700 ? "an illegal memory access was encountered" : "as its name says";
    return 0;
}
EXPORT int cuDeviceGetCount(int *count) {
    ENTER;
    const char *other = getenv("DOUBLE_COUNT");
    *count = other ? atoi(other) : 1;
    return 0;
}
EXPORT int cuDeviceGet(int *device, int ordinal) { ENTER; *device = ordinal; return ordinal == 0 ? 0 : 101; }
EXPORT int cuDeviceGetName(char *name, int length, int device) { ENTER; snprintf(name, length, "Double %d", device); return 0; }
EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER;
    const char *other = getenv("DOUBLE_UUID");
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(i * 17 + device + (other ? atoi(other) : 0));
    return 0;
}
EXPORT int cuDeviceGetPCIBusId(char *id, int length, int device) { ENTER; snprintf(id, length, "0000:A7:%02X.0", device); return 0; }
EXPORT int cuDeviceGetAttribute(int *value, int which, int device) {
    ENTER;
    *value = which == 16 ? 132 : which == 75 ? state.architecture / 10 : which == 76 ? state.architecture % 10 : -1;
    return device;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { ENTER; *context = &state; return device; }
static __thread void *current;
EXPORT int cuCtxSetCurrent(void *context) { ENTER; current = context; return 0; }
#define INSIDE do { ENTER; if (current != &state) return 201; } while (0)

EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total) {
    INSIDE;
    *total = (size_t)TOTAL_GIB << 30;
    *free = *total - state.own - state.others;
    return 0;
}
/* A header of 256 bytes before each block has its size. Not all of a large one is touched. */
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    INSIDE;
    size_t free, total;
    cuMemGetInfo_v2(&free, &total);
    if (bytes > free) return 2;
    char *block = aligned_alloc(256, bytes + 256);
    if (!block) return 2;
    *(size_t *)block = bytes;
    /* As dirty as a real one's may be. */
    memset(block + 256, 0xA5, bytes < 1 << 20 ? bytes : 1 << 20);
    *address = (uint64_t)(block + 256);
    state.own += bytes;
    state.live_memory++;
    return 0;
}
EXPORT int cuMemFree_v2(uint64_t address) {
    INSIDE;
    if (state.stuck) { fprintf(stderr, "cuMemFree would wait for ever\n"); abort(); }
    char *block = (char *)address - 256;
    state.own -= *(size_t *)block;
    state.live_memory--;
    free(block);
    return 0;
}
EXPORT int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    INSIDE;
    *start = malloc(bytes);
    state.live_host++;
    return flags;
}
EXPORT int cuMemFreeHost(void *start) {
    INSIDE;
    if (state.stuck) { fprintf(stderr, "cuMemFreeHost would wait for ever\n"); abort(); }
    state.live_host--;
    free(start);
    return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    INSIDE;
    note("to_device %zu\n", bytes);
    return stream ? push((struct work){.kind = 0, .to = to, .from = (uint64_t)from, .bytes = bytes}) : 400;
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    INSIDE;
    note("to_host %zu\n", bytes);
    return stream ? push((struct work){.kind = 0, .to = (uint64_t)to, .from = from, .bytes = bytes}) : 400;
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    INSIDE;
    note("on_device %zu\n", bytes);
    return stream ? push((struct work){.kind = 0, .to = to, .from = from, .bytes = bytes}) : 400;
}
EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
    INSIDE;
    note("set %zu %d\n", bytes, value);
    return stream ? push((struct work){.kind = 1, .to = to, .bytes = bytes, .value = value}) : 400;
}
EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    INSIDE;
    *stream = malloc(1);
    state.live_streams++;
    return flags == 1 ? 0 : 1;
}
EXPORT int cuStreamDestroy_v2(void *stream) { INSIDE; state.live_streams--; free(stream); return 0; }
EXPORT int cuStreamQuery(void *stream) {
    INSIDE;
    if (!stream) return 400;
    if (state.stuck) return 600;
    one_more();
    return done < queued ? 600 : 0;
}
EXPORT int cuStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    INSIDE;
    note("wait_event %d\n", event->recorded);
    return stream ? (int)flags : 400;
}
EXPORT int cuEventCreate(struct event **event, unsigned flags) {
    INSIDE;
    *event = calloc(1, sizeof **event);
    state.live_events++;
    return flags == 2 ? 0 : 1;
}
/* What is queued for it still happens, so it is not freed. */
EXPORT int cuEventDestroy_v2(struct event *event) { INSIDE; (void)event; state.live_events--; return 0; }
EXPORT int cuEventRecord(struct event *event, void *stream) {
    INSIDE;
    event->recorded = 1;
    return stream ? push((struct work){.kind = 2, .event = event}) : 400;
}
EXPORT int cuEventQuery(struct event *event) {
    INSIDE;
    if (event->happened) return 0;
    one_more();
    return event->happened ? 0 : 600;
}
/* Where DOUBLE_KERNELS names a library of kernels as host.h compiles them, they are run;
 * DOUBLE_FAIL is a call that fails, or with -1
 * hangs, as "cuInit:802" or, at the hundredth time, "cuLaunchKernel:214:99". */
static int (*run_kernel)(const char *, unsigned, unsigned, unsigned, unsigned, unsigned, void **);
__attribute__((constructor)) static void of_environment(void) {
    const char *kernels = getenv("DOUBLE_KERNELS"), *fails = getenv("DOUBLE_FAIL");
    if (kernels) {
        void *library = dlopen(kernels, RTLD_NOW);
        if (!library) abort();
        *(void **)&run_kernel = dlsym(library, "emulated_launch");
    }
    if (fails) sscanf(fails, "%63[^:]:%d:%d", state.fail_function, &state.fail_code, &state.fail_after);
}

/* The image is a list of names with newlines. */
EXPORT int cuModuleLoadData(void **module, const void *image) { INSIDE; *module = strdup(image); return 0; }
EXPORT int cuModuleGetFunction(char **function, const char *module, const char *name) {
    INSIDE;
    char line[128];
    snprintf(line, sizeof line, "%s\n", name);
    if (!run_kernel && !strstr(module, line)) return 500;
    *function = strdup(name);
    return 0;
}
EXPORT int cuFuncSetAttribute(const char *function, int which, int value) {
    INSIDE;
    note("attribute %s %d %d\n", function, which, value);
    return 0;
}
/* A kernel's name ends with how many arguments it has. */
EXPORT int cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    INSIDE;
    if (!stream || extra) return 400;
    if (run_kernel) return run_kernel(function, gx, gy, gz, bx, shared, arguments) == 0 ? 0 : 719;
    note("launch %s %ux%ux%u %ux%ux%u %u:", function, gx, gy, gz, bx, by, bz, shared);
    int count = function[strlen(function) - 1] - '0';
    for (int i = 0; i < count; i++) note(" %llx", *(unsigned long long *)arguments[i]);
    note("\n");
    return 0;
}

/* cublasLt: attributes are kept, products computed. */
struct layout { int type; uint64_t rows, columns; int64_t leading; };
struct descriptor { int compute, scale, a, b; };
struct preference { uint64_t workspace; uint32_t numbers[9]; };
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

EXPORT size_t cublasLtGetVersion(void) { return 130002; }
EXPORT size_t cublasLtGetCudartVersion(void) { return 13000; }
EXPORT const char *cublasLtGetStatusName(int status) { return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_OTHER"; }
EXPORT const char *cublasLtGetStatusString(int status) { return status == 15 ? "the functionality is not supported" : "other"; }
EXPORT int cublasLtCreate(void **handle) { ENTER; *handle = &state; return current == &state ? 0 : 1; }
EXPORT int cublasLtMatmulDescCreate(struct descriptor **d, int compute, int scale) {
    ENTER;
    *d = calloc(1, sizeof **d);
    (*d)->compute = compute;
    (*d)->scale = scale;
    return 0;
}
EXPORT int cublasLtMatmulDescSetAttribute(struct descriptor *d, int which, const int *value, size_t size) {
    ENTER;
    if (size != 4 || (which != 3 && which != 4)) return 7;
    *(which == 3 ? &d->a : &d->b) = *value;
    return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(struct layout **l, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    ENTER;
    *l = malloc(sizeof **l);
    **l = (struct layout){type, rows, columns, leading};
    return leading >= (int64_t)rows ? 0 : 7;
}
EXPORT int cublasLtMatmulPreferenceCreate(struct preference **p) { ENTER; *p = calloc(1, sizeof **p); return 0; }
EXPORT int cublasLtMatmulPreferenceDestroy(struct preference *p) { ENTER; free(p); return 0; }
EXPORT int cublasLtMatmulPreferenceSetAttribute(struct preference *p, int which, const void *value, size_t size) {
    ENTER;
    if (which == 1 && size == 8) p->workspace = *(const uint64_t *)value;
    else if (which > 1 && which < 9 && size == 4) p->numbers[which] = *(const uint32_t *)value;
    else return 7;
    return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, struct descriptor *d, struct layout *a, struct layout *b,
                                          struct layout *c, struct layout *r, struct preference *p, int asked,
                                          struct heuristic *found, int *count) {
    ENTER;
    if (handle != &state || asked < 1) return 7;
    note("heuristic compute %d scale %d op %d %d", d->compute, d->scale, d->a, d->b);
    struct layout *all[] = {a, b, c, r};
    for (int i = 0; i < 4; i++)
        note(" [%d %llux%llu %lld]", all[i]->type, (unsigned long long)all[i]->rows, (unsigned long long)all[i]->columns, (long long)all[i]->leading);
    note(" workspace %llu reduction %u align %u %u %u %u\n", (unsigned long long)p->workspace, p->numbers[3], p->numbers[5], p->numbers[6], p->numbers[7], p->numbers[8]);
    memset(found, 0, sizeof *found);
    found->algorithm[0] = 0x51;
    *count = 1;
    return 0;
}
static float load(const void *matrix, int type, size_t at) {
    if (type == 0) return ((const float *)matrix)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)matrix)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void store(void *matrix, int type, size_t at, float value) {
    if (type == 0) {
        ((float *)matrix)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t *)matrix)[at] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
EXPORT int cublasLtMatmul(void *handle, struct descriptor *d, const float *alpha, const void *A, struct layout *a,
                          const void *B, struct layout *b, const float *beta, const void *C, struct layout *c, void *D,
                          struct layout *r, const uint64_t *algorithm, void *workspace, size_t bytes, void *stream) {
    ENTER;
    if (handle != &state || algorithm[0] != 0x51 || !workspace || ((uint64_t)workspace & 255) || !stream || C != D || c != r) return 7;
    note("matmul %g %g %zu\n", *alpha, *beta, bytes);
    uint64_t inner = d->a ? a->rows : a->columns;
    if (inner != (d->b ? b->columns : b->rows) || r->rows != (d->a ? a->columns : a->rows) || r->columns != (d->b ? b->rows : b->columns)) return 7;
    for (uint64_t i = 0; i < r->rows; i++)
        for (uint64_t j = 0; j < r->columns; j++) {
            float sum = 0;
            for (uint64_t x = 0; x < inner; x++)
                sum += load(A, a->type, d->a ? x + i * a->leading : i + x * a->leading) *
                       load(B, b->type, d->b ? j + x * b->leading : x + j * b->leading);
            size_t at = i + j * r->leading;
            store(D, r->type, at, *alpha * sum + (*beta != 0 ? *beta * load(C, c->type, at) : 0));
        }
    return 0;
}
