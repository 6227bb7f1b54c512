// CUDA on the processor, for tests: this text is compiled before the kernels' own, so that
// what a GPU runs is run and checked without one. Every thread of a block is a coroutine;
// blocks run one after another. It must not be fast, and must not forgive what a GPU does not:
// a divergent barrier, a lane that is missing from a warp's operation and a cp.async that is
// not waited for are all failures here.
//
// Threads run in rising order in one block and in falling order in the next: a missing
// barrier so shows in one of them. Dynamic shared memory holds NaNs when a block begins.

#pragma once

#define PALINGENESIS_HOST 1

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/mman.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static
// Blocks run one after another, so one copy of a block's static shared memory is enough.
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emulation::shared_memory)

struct dim3 {
    unsigned x, y, z;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace emulation {

constexpr unsigned MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10;
constexpr size_t GUARD = 4096;
// What compute capability 9.0 gives one block at most.
constexpr size_t MOST_SHARED = 227 << 10;

alignas(1024) static unsigned char shared_memory[MOST_SHARED];

enum class State { READY, BLOCK, WARP, DONE };

struct Copy {
    void *to;
    const void *from;
    unsigned bytes, of;
};

struct Thread {
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    State state;
    // Of the warp's operation that it waits in.
    const char *what;
    unsigned mask;
    alignas(16) unsigned char in[64];
    alignas(16) unsigned char out[64];
    // cp.async: those that are not committed, then the committed groups, oldest first.
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

static Thread threads[MOST_THREADS];
static unsigned thread_count, current, waiting, done, voted, votes;
static bool failed;
static std::string message;
static unsigned char *stacks;
static void (*invoke)(void **);
static void **arguments;

#if defined(__x86_64__)
static void *scheduler;
extern "C" void palingenesis_emulation_switch(void **from, void *to);
// Keeps what the System V ABI lets a callee not change.
asm(R"(
.text
.hidden palingenesis_emulation_switch
.globl palingenesis_emulation_switch
.type palingenesis_emulation_switch,@function
palingenesis_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size palingenesis_emulation_switch,.-palingenesis_emulation_switch
)");
inline void leave() { palingenesis_emulation_switch(&threads[current].stack_pointer, scheduler); }
inline void enter() { palingenesis_emulation_switch(&scheduler, threads[current].stack_pointer); }
#else
static ucontext_t scheduler;
inline void leave() { swapcontext(&threads[current].context, &scheduler); }
inline void enter() { swapcontext(&scheduler, &threads[current].context); }
#endif

// Ends the launch: the coroutines are left where they are.
[[noreturn]] inline void fail(const std::string &why) {
    message = "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
              std::to_string(blockIdx.z) + "), thread " + std::to_string(current) + ": " + why;
    failed = true;
    for (;;) leave();
}

// The others may run; what the compiler keeps of threadIdx is set again on return.
inline void wait(State state) {
    threads[current].state = state;
    asm volatile("" ::: "memory");
    leave();
    asm volatile("" ::: "memory");
}

// Threads that have ended count at no barrier.
inline void release_if_all_wait() {
    if (waiting == 0 || waiting + done < thread_count) return;
    for (unsigned t = 0; t < thread_count; t++)
        if (threads[t].state == State::BLOCK) threads[t].state = State::READY;
    waiting = 0;
    votes = voted;
    voted = 0;
}

inline int barrier(int vote) {
    waiting++;
    voted += vote != 0;
    threads[current].state = State::BLOCK;
    release_if_all_wait();
    if (threads[current].state == State::BLOCK) wait(State::BLOCK);
    return static_cast<int>(votes);
}

inline unsigned lane() { return current % 32; }

// An operation of the lanes of `mask`: each brings `in`, the last to come computes what each
// gets. It gets arrays of pointers, null for lanes that take no part.
template <class Out, class In> Out together(unsigned mask, const char *what, const In &in,
                                            void (*compute)(const In *const *, Out *const *)) {
    static_assert(sizeof(In) <= sizeof(Thread::in) && sizeof(Out) <= sizeof(Thread::out), "too large");
    Thread &self = threads[current];
    Thread *warp = threads + current / 32 * 32;
    if (!(mask >> lane() & 1)) fail(std::string(what) + ": the mask leaves out the lane that calls");
    std::memcpy(self.in, &in, sizeof in);
    self.what = what;
    self.mask = mask;
    self.state = State::WARP;
    bool all = true;
    for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (warp + i >= threads + thread_count || warp[i].state == State::DONE)
            fail(std::string(what) + ": lane " + std::to_string(i) + " of the mask does not exist or has ended");
        if (warp[i].state != State::WARP) {
            all = false;
        } else if (warp[i].mask != mask || std::strcmp(warp[i].what, what) != 0) {
            fail(std::string(what) + ": lane " + std::to_string(i) + " waits in " + warp[i].what +
                 " or with another mask");
        }
    }
    if (all) {
        const In *ins[32] = {};
        Out *outs[32] = {};
        for (unsigned i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            ins[i] = reinterpret_cast<const In *>(warp[i].in);
            outs[i] = reinterpret_cast<Out *>(warp[i].out);
            warp[i].state = State::READY;
        }
        compute(ins, outs);
    } else {
        wait(State::WARP);
    }
    Out out;
    std::memcpy(&out, self.out, sizeof out);
    return out;
}

inline void body() {
    invoke(arguments);
    threads[current].state = State::DONE;
    done++;
    release_if_all_wait();
    for (;;) leave();
}

inline void begin(Thread &thread, unsigned char *stack) {
    thread.state = State::READY;
    thread.open.clear();
    thread.groups.clear();
#if defined(__x86_64__)
    void **top = reinterpret_cast<void **>(stack + STACK);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    thread.stack_pointer = top;
#else
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stack;
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, body, 0);
#endif
}

inline bool run_block(bool falling) {
    // Bytes of 255: NaN as f32, bf16 and f64, -1 as an integer.
    std::memset(shared_memory, 0xff, sizeof shared_memory);
    waiting = done = voted = votes = 0;
    for (unsigned t = 0; t < thread_count; t++) begin(threads[t], stacks + t * (STACK + GUARD) + GUARD);
    while (done < thread_count) {
        bool progress = false;
        for (unsigned i = 0; i < thread_count; i++) {
            current = falling ? thread_count - 1 - i : i;
            if (threads[current].state != State::READY) continue;
            progress = true;
            unsigned in_plane = current % (blockDim.x * blockDim.y);
            threadIdx = {in_plane % blockDim.x, in_plane / blockDim.x, current / (blockDim.x * blockDim.y)};
            enter();
            if (failed) return false;
        }
        if (!progress) {
            message = "deadlock in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                      std::to_string(blockIdx.z) + "): " + std::to_string(waiting) + " threads wait at a barrier";
            for (unsigned t = 0; t < thread_count; t++)
                if (threads[t].state == State::WARP) {
                    message += ", thread " + std::to_string(t) + " in " + threads[t].what;
                    break;
                }
            return false;
        }
    }
    return true;
}

struct Kernel {
    void (*invoke)(void **);
    unsigned arguments;
};

inline std::unordered_map<std::string, Kernel> &kernels() {
    static std::unordered_map<std::string, Kernel> all;
    return all;
}

template <class... A> constexpr unsigned count(void (*)(A...)) { return sizeof...(A); }

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **from, std::index_sequence<I...>) {
    (void)from;
    kernel(*static_cast<A *>(from[I])...);
}

template <class... A> void call(void (*kernel)(A...), void **from) {
    call(kernel, from, std::index_sequence_for<A...>());
}

template <auto kernel> struct Registered {
    explicit Registered(const char *name) {
        kernels()[name] = {[](void **from) { call(kernel, from); }, count(kernel)};
    }
};

inline std::mutex &one_at_a_time() {
    static std::mutex lock;
    return lock;
}

} // namespace emulation

// Makes a kernel known by its name: once for each, after the kernels' text.
#define REGISTER(name) static emulation::Registered<&name> registered_##name(#name);

// Runs a kernel. 0, or 1 where there is no such kernel, 2 where the launch itself is wrong, 3
// where the kernel did what a GPU does not let it; emulated_error says why.
extern "C" inline __attribute__((used, visibility("default"))) int
emulated_launch(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned block, unsigned shared,
                void **arguments) {
    using namespace emulation;
    std::lock_guard<std::mutex> guard(one_at_a_time());
    auto found = kernels().find(name);
    message.clear();
    failed = false;
    if (found == kernels().end()) {
        message = std::string("no kernel ") + name;
        return 1;
    }
    if (gx == 0 || gy == 0 || gz == 0 || gy > 65535 || gz > 65535 || gx > 0x7fffffffu || block == 0 ||
        block > MOST_THREADS || shared > MOST_SHARED) {
        message = std::string(name) + ": grid " + std::to_string(gx) + " x " + std::to_string(gy) + " x " +
                  std::to_string(gz) + ", block " + std::to_string(block) + ", shared " + std::to_string(shared) +
                  ": out of what a GPU takes";
        return 2;
    }
    if (stacks == nullptr) {
        size_t bytes = MOST_THREADS * (STACK + GUARD);
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            message = "no memory for the threads' stacks";
            return 2;
        }
        stacks = static_cast<unsigned char *>(memory);
        for (unsigned t = 0; t < MOST_THREADS; t++) mprotect(stacks + t * (STACK + GUARD), GUARD, PROT_NONE);
    }
    invoke = found->second.invoke;
    emulation::arguments = arguments;
    thread_count = block;
    blockDim = {block, 1, 1};
    gridDim = {gx, gy, gz};
    bool falling = false;
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx; x++) {
                blockIdx = {x, y, z};
                if (!run_block(falling)) {
                    message = std::string(name) + ": " + message;
                    return 3;
                }
                falling = !falling;
            }
    return 0;
}

// Of the last launch; empty where it went well.
extern "C" inline __attribute__((used, visibility("default"))) const char *emulated_error() {
    return emulation::message.c_str();
}

// How many arguments a kernel takes, or -1.
extern "C" inline __attribute__((used, visibility("default"))) int emulated_arguments(const char *name) {
    auto found = emulation::kernels().find(name);
    return found == emulation::kernels().end() ? -1 : static_cast<int>(found->second.arguments);
}

// Barriers.
inline void __syncthreads() { emulation::barrier(0); }
inline int __syncthreads_count(int vote) { return emulation::barrier(vote); }
inline int __syncthreads_or(int vote) { return emulation::barrier(vote) != 0; }
inline int __syncthreads_and(int vote) { return emulation::barrier(!vote) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulation::together<char, char>(mask, "__syncwarp", 0, [](const char *const *, char *const *) {});
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Shuffles: the value of another lane of the same `width` lanes, or one's own where there is none.
namespace emulation {
template <class T> struct Asked {
    T value;
    int from;
};
template <class T> T shuffle(unsigned mask, const char *what, T value, int from) {
    return together<T, Asked<T>>(mask, what, {value, from}, [](const Asked<T> *const *in, T *const *out) {
        for (int i = 0; i < 32; i++) {
            if (!in[i]) continue;
            int from = in[i]->from;
            if (!in[from]) fail("a shuffle reads lane " + std::to_string(from) + ", which takes no part");
            *out[i] = in[from]->value;
        }
    });
}
} // namespace emulation
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    int base = static_cast<int>(emulation::lane()) / width * width;
    return emulation::shuffle(mask, "__shfl_sync", value, base + (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    int self = static_cast<int>(emulation::lane()), from = self ^ lanes;
    return emulation::shuffle(mask, "__shfl_xor_sync", value, from / width > self / width ? self : from);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    int self = static_cast<int>(emulation::lane()), from = self + static_cast<int>(lanes);
    return emulation::shuffle(mask, "__shfl_down_sync", value, from >= self / width * width + width ? self : from);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    int self = static_cast<int>(emulation::lane()), from = self - static_cast<int>(lanes);
    return emulation::shuffle(mask, "__shfl_up_sync", value, from < self / width * width ? self : from);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
    return emulation::together<unsigned, int>(mask, "__ballot_sync", vote,
                                              [](const int *const *in, unsigned *const *out) {
                                                  unsigned all = 0;
                                                  for (int i = 0; i < 32; i++)
                                                      if (in[i] && *in[i]) all |= 1u << i;
                                                  for (int i = 0; i < 32; i++)
                                                      if (out[i]) *out[i] = all;
                                              });
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }

// Atomics: coroutines leave only at a barrier, so plain code is atomic.
template <class T> T atomicAdd(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> T atomicMax(T *at, T value) {
    T old = *at;
    if (value > old) *at = value;
    return old;
}
template <class T> T atomicMin(T *at, T value) {
    T old = *at;
    if (value < old) *at = value;
    return old;
}
template <class T> T atomicExch(T *at, T value) {
    T old = *at;
    *at = value;
    return old;
}
template <class T> T atomicCAS(T *at, T expected, T value) {
    T old = *at;
    if (old == expected) *at = value;
    return old;
}

// Arithmetic.
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __saturatef(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }
template <class To, class From> To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(1ull * x * y >> 32); }
template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcs(T *at, T value) { *at = value; }
[[noreturn]] inline void __trap() { emulation::fail("__trap"); }
inline int min(int x, int y) { return x < y ? x : y; }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline long long min(long long x, long long y) { return x < y ? x : y; }
inline float min(float x, float y) { return std::fmin(x, y); }
inline int max(int x, int y) { return x > y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
inline long long max(long long x, long long y) { return x > y ? x : y; }
inline float max(float x, float y) { return std::fmax(x, y); }
using std::isfinite;
using std::isinf;
using std::isnan;

// What inline PTX does on the GPU, as the PTX ISA has it.
namespace emulation {

inline float from_bf16(unsigned bits) { return emulated_bits<float>(bits << 16); }

// cvt.rn.bf16x2.f32: two numbers rounded to the nearest even, here the first in the lower half. (The
// instruction's first source is the upper half.)
inline unsigned to_bf16(float x) {
    unsigned bits = emulated_bits<unsigned>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

struct Product {
    unsigned a[4], b[2];
    float c[4];
};
struct Accumulator {
    float c[4];
};

// Section "Matrix Fragments for mma.m16n8k16 with floating point type". With group = lane / 4
// and four = lane % 4: a[i]'s halves are row group (+ 8 for i = 1, 3), columns 2 four and the
// next (+ 8 for i = 2, 3); b[i]'s are rows 2 four and the next (+ 8 for i = 1), column group;
// c[i] is row group (+ 8 for i = 2, 3), column 2 four + i % 2.
inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Product in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    Accumulator out = together<Accumulator, Product>(
        0xffffffffu, "mma.sync", in, [](const Product *const *in, Accumulator *const *out) {
            float a[16][16], b[8][16];
            for (int lane = 0; lane < 32; lane++) {
                int group = lane / 4, four = lane % 4;
                for (int i = 0; i < 4; i++)
                    for (int half = 0; half < 2; half++)
                        a[group + i % 2 * 8][2 * four + half + i / 2 * 8] =
                            from_bf16(in[lane]->a[i] >> 16 * half & 0xffff);
                for (int i = 0; i < 2; i++)
                    for (int half = 0; half < 2; half++)
                        b[group][2 * four + half + i * 8] = from_bf16(in[lane]->b[i] >> 16 * half & 0xffff);
            }
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) {
                    const float *row = a[lane / 4 + i / 2 * 8], *column = b[lane % 4 * 2 + i % 2];
                    float sum = 0;
                    for (int k = 0; k < 16; k++) sum += row[k] * column[k];
                    out[lane]->c[i] = in[lane]->c[i] + sum;
                }
        });
    for (int i = 0; i < 4; i++) c[i] = out.c[i];
}

struct Quad {
    unsigned r[4];
};

// ldmatrix.m8n8.x4.b16: lanes 8 i .. 8 i + 7 give the rows of matrix i; each lane gets
// of each matrix row lane / 4, columns 2 (lane % 4) and the next, or of its transpose.
template <bool transposed> void ldmatrix_x4(unsigned (&r)[4], const void *row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix: a row is not at a multiple of 16 bytes");
    const unsigned char *at = static_cast<const unsigned char *>(row);
    if (at < shared_memory || at + 16 > shared_memory + MOST_SHARED) fail("ldmatrix: not in shared memory");
    Quad out = together<Quad, const void *>(
        0xffffffffu, transposed ? "ldmatrix.trans" : "ldmatrix", row, [](const void *const *const *in, Quad *const *out) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) {
                    unsigned short pair[2];
                    for (int half = 0; half < 2; half++) {
                        int r = lane / 4, column = 2 * (lane % 4) + half;
                        if (transposed) std::swap(r, column);
                        std::memcpy(&pair[half], static_cast<const unsigned short *>(*in[8 * i + r]) + column, 2);
                    }
                    out[lane]->r[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
                }
        });
    for (int i = 0; i < 4; i++) r[i] = out.r[i];
}

// cp.async: `bytes` are copied and the others of SIZE zeroed. Until it is waited
// for, NaNs are there.
template <unsigned SIZE> void cp_async(void *to, const void *from, unsigned bytes) {
    if (reinterpret_cast<uintptr_t>(to) % SIZE != 0 || reinterpret_cast<uintptr_t>(from) % SIZE != 0)
        fail("cp.async: an address is not a multiple of its size");
    unsigned char *at = static_cast<unsigned char *>(to);
    if (at < shared_memory || at + SIZE > shared_memory + MOST_SHARED) fail("cp.async: not into shared memory");
    std::memset(to, 0xff, SIZE);
    threads[current].open.push_back({to, from, bytes, SIZE});
}
inline void cp_async_commit() {
    threads[current].groups.push_back(std::move(threads[current].open));
    threads[current].open.clear();
}
// All but the `left` latest groups are done after.
inline void cp_async_wait(unsigned left) {
    auto &groups = threads[current].groups;
    while (groups.size() > left) {
        for (const Copy &copy : groups.front()) {
            std::memset(copy.to, 0, copy.of);
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

} // namespace emulation
