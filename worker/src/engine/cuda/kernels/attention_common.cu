// What the attention kernels share: numbers as they are stored, and the few instructions that
// C++ has no words for. Nothing here knows of queries and keys.

typedef unsigned short attention_bf16;

__device__ __forceinline__ float attention_load(const float *at) { return *at; }
__device__ __forceinline__ float attention_load(const attention_bf16 *at) {
    return __uint_as_float(static_cast<unsigned>(*at) << 16);
}

#ifdef PALINGENESIS_HOST

#define ATTENTION_SHARED(type, name) DYNAMIC_SHARED(type, name)
__device__ __forceinline__ unsigned attention_pack(float low, float high) { return emulation::pack_bf16(low, high); }
__device__ __forceinline__ float attention_exp2(float x) { return exp2f(x); }
__device__ __forceinline__ unsigned attention_address(const void *shared) {
    return static_cast<unsigned>(static_cast<const unsigned char *>(shared) - emulation::shared_memory);
}
__device__ __forceinline__ void attention_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulation::mma_m16n8k16(c, a, b0, b1);
}
__device__ __forceinline__ void attention_ldmatrix(unsigned (&r)[4], unsigned address) {
    emulation::ldmatrix_x4<false>(r, emulation::shared_memory + address);
}
__device__ __forceinline__ void attention_ldmatrix_transposed(unsigned (&r)[4], unsigned address) {
    emulation::ldmatrix_x4<true>(r, emulation::shared_memory + address);
}
__device__ __forceinline__ void attention_copy_16(unsigned to, const void *from, bool there) {
    emulation::cp_async<16>(emulation::shared_memory + to, from, there ? 16 : 0);
}
__device__ __forceinline__ void attention_copy_4(unsigned to, const void *from, bool there) {
    emulation::cp_async<4>(emulation::shared_memory + to, from, there ? 4 : 0);
}
__device__ __forceinline__ void attention_copy_commit() { emulation::cp_async_commit(); }
__device__ __forceinline__ void attention_copy_wait() { emulation::cp_async_wait(0); }

#else

// One name for all kernels: a name of shared memory has one type in all of the text.
extern __shared__ __align__(128) unsigned char attention_memory[];
#define ATTENTION_SHARED(type, name) type *name = reinterpret_cast<type *>(attention_memory)
// Two numbers rounded to the nearest even, the first in the lower half.
__device__ __forceinline__ unsigned attention_pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float attention_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned attention_address(const void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
// c += a · b: a is 16 x 16, b 16 x 8, c 16 x 8, in the fragments of the PTX ISA's "Matrix
// Fragments for mma.m16n8k16 with floating point type".
__device__ __forceinline__ void attention_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four matrices of 8 x 8, whose rows the lanes name: lanes 8 i .. 8 i + 7 those of matrix i.
__device__ __forceinline__ void attention_ldmatrix(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void attention_ldmatrix_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// Begins a copy to shared memory, of zeros where nothing is `there`.
__device__ __forceinline__ void attention_copy_16(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void attention_copy_4(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void attention_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void attention_copy_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#endif

__device__ __forceinline__ void attention_store(float *at, float x) { *at = x; }
__device__ __forceinline__ void attention_store(attention_bf16 *at, float x) {
    *at = static_cast<attention_bf16>(attention_pack(x, 0.0f) & 0xffff);
}

// delta = the sum of dout · out over each head's row: what the softmax's normalisation takes
// back. One warp a row; out and dout are B x T x H x D, delta is B x H x T.
template <class Number>
__device__ __forceinline__ void attention_delta(float *delta, const Number *dout, const Number *out, int batch, int seq,
                                                int heads, int head_dim) {
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= static_cast<long long>(batch) * seq * heads) return;
    int lane = static_cast<int>(threadIdx.x % 32);
    const Number *left = dout + row * head_dim, *right = out + row * head_dim;
    float sum = 0.0f;
    for (int d = lane; d < head_dim; d += 32) sum += attention_load(left + d) * attention_load(right + d);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0) {
        int head = static_cast<int>(row % heads);
        long long position = row / heads;
        delta[(position / seq * heads + head) * seq + position % seq] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    attention_delta_f32(float *delta, const float *dout, const float *out, int batch, int seq, int heads, int head_dim) {
    attention_delta(delta, dout, out, batch, seq, heads, head_dim);
}
extern "C" __global__ void __launch_bounds__(128)
    attention_delta_bf16(float *delta, const attention_bf16 *dout, const attention_bf16 *out, int batch, int seq,
                         int heads, int head_dim) {
    attention_delta(delta, dout, out, batch, seq, heads, head_dim);
}
