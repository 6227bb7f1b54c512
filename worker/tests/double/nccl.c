/*
 * A libnccl.so.2 for tests: the same functions over host memory, between processes of one
 * machine that share the directory NCCL_DOUBLE_DIR. A "stream" is a thread that does what it
 * is given in order. What goes wrong is told by NCCL_DOUBLE, words separated by spaces:
 *
 *   init=hang|error:CODE|late:CODE    the call, or (late) what it began
 *   init=mute                         begins and never ends
 *   OP:N=hang|error:CODE|kill|wrong|nan   in the Nth all_gather, reduce_scatter, all_reduce
 *   OP:N=stuck                        the call itself does not come back
 *   OP:N=sync:CODE                    the call itself fails
 *   abort=hang   finalize=hang
 *
 * and NCCL_DOUBLE_VERSION is the version it says it is. With NCCL_DOUBLE_AT_ONCE a stream may be
 * anybody's, and each operation is over when its call comes back.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM = 2, INTERNAL = 3, ARGUMENT = 4, USAGE = 5, IN_PROGRESS = 7 };
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE };
enum { FLOAT32 = 7, BFLOAT16 = 9 };
#define RANKS 64

static const char *names[] = {"all_gather", "reduce_scatter", "all_reduce"};

/* As nccl.h 2.18 has it. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

struct id {
    char internal[128];
};

/* In a file that all ranks map. */
struct meeting {
    _Atomic int present[RANKS];
    /* Twice the operations, and one more while its numbers are there to be read. */
    _Atomic uint64_t phase[RANKS];
    _Atomic int gone;
};

struct comm {
    int rank, ranks;
    char path[200];
    struct meeting *meeting;
    _Atomic int state, aborted;
    uint64_t operations, counts[3];
    int own;
};

struct task {
    struct task *next;
    struct comm *comm;
    int kind, dtype, milliseconds;
    uint64_t number, of_kind;
    const char *send;
    char *receive;
    size_t count;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct task *first, **last;
    _Atomic uint64_t given, done;
};

static void forever(void) {
    for (;;) pause();
}

/* What follows "KEY=" in NCCL_DOUBLE, or NULL. */
static const char *fault(const char *key, char *buffer, size_t room) {
    const char *at = getenv("NCCL_DOUBLE");
    size_t length = strlen(key);
    while (at && *at) {
        if (!strncmp(at, key, length) && at[length] == '=') {
            snprintf(buffer, room, "%s", at + length + 1);
            buffer[strcspn(buffer, " ")] = 0;
            return buffer;
        }
        at = strchr(at, ' ');
        if (at) at++;
    }
    return NULL;
}

static int is(const char *key, const char *what) {
    char buffer[64];
    const char *found = fault(key, buffer, sizeof buffer);
    return found && !strcmp(found, what);
}

/* CODE of "what:CODE", else 0. */
static int code(const char *key, const char *what) {
    char buffer[64];
    const char *found = fault(key, buffer, sizeof buffer);
    size_t length = strlen(what);
    return found && !strncmp(found, what, length) && found[length] == ':' ? atoi(found + length + 1) : 0;
}

static float read_number(const char *at, size_t index, int dtype) {
    float value;
    if (dtype == FLOAT32) {
        memcpy(&value, at + 4 * index, 4);
    } else {
        uint16_t half;
        memcpy(&half, at + 2 * index, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
    }
    return value;
}

static void write_number(char *at, size_t index, int dtype, float value) {
    if (dtype == FLOAT32) {
        memcpy(at + 4 * index, &value, 4);
    } else {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(at + 2 * index, &half, 2);
    }
}

/* Waits until all ranks are at this phase. Whether they are. */
static int reach(struct comm *comm, uint64_t phase) {
    atomic_store(&comm->meeting->phase[comm->rank], phase);
    for (int rank = 0; rank < comm->ranks; rank++)
        while (atomic_load(&comm->meeting->phase[rank]) < phase) {
            if (atomic_load(&comm->aborted)) return 0;
            usleep(200);
        }
    return 1;
}

static void file_of(const struct comm *comm, int rank, char *path, size_t room) {
    snprintf(path, room, "%s.%d", comm->path, rank);
}

/* All of these bytes of a file, from this place on. */
static void whole(int file, char *bytes, size_t length, off_t from, int writes) {
    for (size_t at = 0; at < length;) {
        ssize_t n = writes ? pwrite(file, bytes + at, length - at, from + at)
                           : pread(file, bytes + at, length - at, from + at);
        /* Ranks that disagree about how much there is get what is there. */
        if (n <= 0) return;
        at += n;
    }
}

static void do_task(struct task *task) {
    struct comm *comm = task->comm;
    char key[64], path[256];
    if (!comm) {
        usleep(1000 * task->milliseconds);
        return;
    }
    snprintf(key, sizeof key, "%s:%llu", names[task->kind], (unsigned long long)task->of_kind);
    if (is(key, "hang")) forever();
    if (is(key, "kill")) kill(getpid(), SIGKILL);
    if (code(key, "error")) {
        atomic_store(&comm->state, code(key, "error"));
        while (!atomic_load(&comm->aborted)) usleep(1000);
        return;
    }
    size_t size = task->dtype == FLOAT32 ? 4 : 2;
    size_t sent = (task->kind == REDUCE_SCATTER ? comm->ranks : 1) * task->count;
    whole(comm->own, (char *)task->send, sent * size, 0, 1);
    if (!reach(comm, 2 * task->number + 1)) return;
    size_t from = task->kind == REDUCE_SCATTER ? comm->rank * task->count : 0;
    char *theirs = malloc(task->count * size + 1);
    float *sums = calloc(task->count + 1, sizeof *sums);
    for (int rank = 0; rank < comm->ranks; rank++) {
        file_of(comm, rank, path, sizeof path);
        int file = open(path, O_RDONLY);
        if (file < 0) abort();
        whole(file, theirs, task->count * size, from * size, 0);
        close(file);
        if (task->kind == ALL_GATHER) {
            memcpy(task->receive + rank * task->count * size, theirs, task->count * size);
        } else {
            for (size_t i = 0; i < task->count; i++) sums[i] += read_number(theirs, i, task->dtype);
        }
    }
    if (task->kind != ALL_GATHER)
        for (size_t i = 0; i < task->count; i++) write_number(task->receive, i, task->dtype, sums[i]);
    if (task->count && is(key, "wrong"))
        write_number(task->receive, 0, task->dtype, read_number(task->receive, 0, task->dtype) + 1);
    if (task->count && is(key, "nan")) write_number(task->receive, 0, task->dtype, 0.0f / 0.0f);
    free(theirs);
    free(sums);
    /* Nobody writes its next numbers before all have read these. */
    reach(comm, 2 * task->number + 2);
}

static void *work(void *argument) {
    struct stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->first) pthread_cond_wait(&stream->more, &stream->lock);
        struct task *task = stream->first;
        stream->first = task->next;
        if (!stream->first) stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        do_task(task);
        free(task);
        atomic_fetch_add(&stream->done, 1);
    }
    return NULL;
}

/* The stream and its points, which are CUDA's where there is a GPU. */
void *double_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->more, NULL);
    stream->last = &stream->first;
    pthread_create(&thread, NULL, work, stream);
    return stream;
}

static void give(struct stream *stream, struct task *task) {
    atomic_fetch_add(&stream->given, 1);
    pthread_mutex_lock(&stream->lock);
    task->next = NULL;
    *stream->last = task;
    stream->last = &task->next;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
}

/* Computes for so long. */
void double_compute(void *stream, int milliseconds) {
    struct task *task = calloc(1, sizeof *task);
    task->milliseconds = milliseconds;
    give(stream, task);
}

uint64_t double_mark(void *stream) {
    return atomic_load(&((struct stream *)stream)->given);
}

int double_done(void *stream, uint64_t mark) {
    return atomic_load(&((struct stream *)stream)->done) >= mark;
}

int ncclGetVersion(int *version) {
    const char *told = getenv("NCCL_DOUBLE_VERSION");
    *version = told ? atoi(told) : 22809;
    return SUCCESS;
}

const char *ncclGetErrorString(int status) {
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                  "NCCL operation in progress"};
    return status >= 0 && status < 8 ? texts[status] : "unknown result code";
}

const char *ncclGetLastError(void *comm) {
    (void)comm;
    return "as the stand-in was told";
}

int ncclGetUniqueId(struct id *id) {
    const char *directory = getenv("NCCL_DOUBLE_DIR");
    static _Atomic int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/%d-%d", directory ? directory : "/tmp", getpid(),
             atomic_fetch_add(&number, 1));
    return SUCCESS;
}

static void *start(void *argument) {
    struct comm *comm = argument;
    if (code("init", "late")) {
        usleep(100000);
        atomic_store(&comm->state, code("init", "late"));
        return NULL;
    }
    if (is("init", "mute")) forever();
    atomic_store(&comm->meeting->present[comm->rank], 1);
    for (int rank = 0; rank < comm->ranks; rank++)
        while (!atomic_load(&comm->meeting->present[rank])) {
            if (atomic_load(&comm->aborted)) return NULL;
            usleep(1000);
        }
    atomic_store(&comm->state, SUCCESS);
    return NULL;
}

int ncclCommInitRankConfig(void **made, int ranks, struct id id, int rank, struct config *config) {
    if (is("init", "hang")) forever();
    if (code("init", "error")) return code("init", "error");
    if (config->magic != 0xcafebeef || config->size != sizeof *config || config->version < 21800 || config->blocking)
        return ARGUMENT;
    if (ranks > RANKS || rank < 0 || rank >= ranks) return ARGUMENT;
    struct comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->ranks = ranks;
    snprintf(comm->path, sizeof comm->path, "%s", id.internal);
    int file = open(comm->path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct meeting))) return SYSTEM;
    comm->meeting = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->meeting == MAP_FAILED) return SYSTEM;
    char path[256];
    file_of(comm, rank, path, sizeof path);
    comm->own = open(path, O_RDWR | O_CREAT, 0600);
    if (comm->own < 0) return SYSTEM;
    atomic_store(&comm->state, IN_PROGRESS);
    *made = comm;
    pthread_t thread;
    pthread_create(&thread, NULL, start, comm);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *given, int *status) {
    *status = atomic_load(&((struct comm *)given)->state);
    return SUCCESS;
}

int ncclCommFinalize(void *given) {
    (void)given;
    if (is("finalize", "hang")) forever();
    return SUCCESS;
}

int ncclCommDestroy(void *given) {
    (void)given;
    return SUCCESS;
}

int ncclCommAbort(void *given) {
    if (is("abort", "hang")) forever();
    atomic_store(&((struct comm *)given)->aborted, 1);
    return SUCCESS;
}

static int collective(int kind, const void *send, void *receive, size_t count, int dtype, struct comm *comm,
                      void *stream) {
    char key[64];
    uint64_t of_kind = ++comm->counts[kind];
    snprintf(key, sizeof key, "%s:%llu", names[kind], (unsigned long long)of_kind);
    if (is(key, "stuck")) forever();
    if (code(key, "sync")) return code(key, "sync");
    if (dtype != FLOAT32 && dtype != BFLOAT16) return ARGUMENT;
    struct task *task = calloc(1, sizeof *task);
    task->comm = comm;
    task->kind = kind;
    task->dtype = dtype;
    task->number = comm->operations++;
    task->of_kind = of_kind;
    task->send = send;
    task->receive = receive;
    task->count = count;
    if (getenv("NCCL_DOUBLE_AT_ONCE")) {
        do_task(task);
        free(task);
    } else {
        give(stream, task);
    }
    return SUCCESS;
}

int ncclAllGather(const void *send, void *receive, size_t count, int dtype, void *comm, void *stream) {
    return collective(ALL_GATHER, send, receive, count, dtype, comm, stream);
}

int ncclReduceScatter(const void *send, void *receive, size_t count, int dtype, int op, void *comm, void *stream) {
    return op ? ARGUMENT : collective(REDUCE_SCATTER, send, receive, count, dtype, comm, stream);
}

int ncclAllReduce(const void *send, void *receive, size_t count, int dtype, int op, void *comm, void *stream) {
    return op ? ARGUMENT : collective(ALL_REDUCE, send, receive, count, dtype, comm, stream);
}
