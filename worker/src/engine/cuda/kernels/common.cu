// What all kernels but those of attention share: numbers as they are stored, 16 bytes at a
// time, and sums over a warp or a block. Nothing here knows of a model.
//
// Numbers are float, or bf16 in an unsigned short; all arithmetic is in f32 or f64. Every sum is
// made in one order that depends on the sizes only: the same input gives the same bits.

typedef unsigned short bf16;

constexpr unsigned ALL_LANES = 0xffffffffu;

#ifdef PALINGENESIS_HOST

__device__ __forceinline__ unsigned pack_bf16(float low, float high) { return emulation::pack_bf16(low, high); }

#else

// One name for all kernels: a name of shared memory has one type in all of the text.
extern __shared__ __align__(16) unsigned char dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(dynamic_shared)

// Two numbers rounded to the nearest even, the first in the lower half. A NaN stays one.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return static_cast<bf16>(pack_bf16(x, 0.0f) & 0xffff);
}

// How many T 16 bytes hold.
template <class T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));

// N numbers at once: 1, or so many that each load and store is one of 8 or 16 bytes. The
// address is then a multiple of that.
template <int N> __device__ __forceinline__ void load(float (&x)[N], const float *from) {
    if constexpr (N == 1) {
        x[0] = *from;
    } else {
        static_assert(N % 4 == 0, "whole vectors");
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 four = *reinterpret_cast<const float4 *>(from + i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        }
    }
}

__device__ __forceinline__ void unpack_bf16(float &low, float &high, unsigned both) {
    low = __uint_as_float(both << 16);
    high = __uint_as_float(both & 0xffff0000u);
}

template <int N> __device__ __forceinline__ void load(float (&x)[N], const bf16 *from) {
    if constexpr (N == 1) {
        x[0] = to_float(*from);
    } else if constexpr (N == 4) {
        uint2 packed = *reinterpret_cast<const uint2 *>(from);
        unpack_bf16(x[0], x[1], packed.x);
        unpack_bf16(x[2], x[3], packed.y);
    } else {
        static_assert(N == 8, "whole vectors");
        uint4 packed = *reinterpret_cast<const uint4 *>(from);
        unpack_bf16(x[0], x[1], packed.x);
        unpack_bf16(x[2], x[3], packed.y);
        unpack_bf16(x[4], x[5], packed.z);
        unpack_bf16(x[6], x[7], packed.w);
    }
}

template <int N> __device__ __forceinline__ void store(float *to, const float (&x)[N]) {
    if constexpr (N == 1) {
        *to = x[0];
    } else {
        static_assert(N % 4 == 0, "whole vectors");
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *reinterpret_cast<float4 *>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

template <int N> __device__ __forceinline__ void store(bf16 *to, const float (&x)[N]) {
    if constexpr (N == 1) {
        *to = from_float<bf16>(x[0]);
    } else if constexpr (N == 4) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else {
        static_assert(N == 8, "whole vectors");
        *reinterpret_cast<uint4 *>(to) =
            make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
}

// A whole vector, or one number and zeros.
template <int N, class T> __device__ __forceinline__ void load(float (&x)[N], const T *from, bool whole) {
    if (whole) {
        load(x, from);
    } else {
        x[0] = to_float(*from);
#pragma unroll
        for (int i = 1; i < N; i++) x[i] = 0.0f;
    }
}
template <int N, class T> __device__ __forceinline__ void store(T *to, const float (&x)[N], bool whole) {
    if (whole)
        store(to, x);
    else
        *to = from_float<T>(x[0]);
}

// Whether vectors may begin at all of these addresses.
template <class... Pointers> __device__ __forceinline__ bool aligned(Pointers... at) {
    return ((reinterpret_cast<unsigned long long>(at) | ...) & 15) == 0;
}

// Calls work(at, whole) for parts of 0 .. n that together are all of it: of V numbers each where
// `vector` says so, else of one, which is not whole. This thread is number `first` of `step`.
// (NVRTC takes no generic lambdas without an option, so `whole` is a value; all of this is
// inlined, and nothing is decided when it runs.)
template <int V, class Index, class Work>
__device__ __forceinline__ void for_each_part(Index n, bool vector, Index first, Index step, Work work) {
    Index whole = 0;
    if (vector) {
        whole = n / V * V;
        for (Index at = first * V; at < whole; at += step * V) work(at, true);
    }
    for (Index at = whole + first; at < n; at += step) work(at, false);
}

// The same with all threads of the grid.
template <int V, class Work> __device__ __forceinline__ void for_each_part(long long n, bool vector, Work work) {
    long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for_each_part<V, long long>(n, vector, first, static_cast<long long>(gridDim.x) * blockDim.x, work);
}

// All lanes get the sum: the same bits, because x + y is y + x.
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

// NaNs are left out.
__device__ __forceinline__ float warp_highest(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    return x;
}

// All threads of the block get the sum. Each must be there; a barrier is before and after.
template <class T> __device__ __forceinline__ T block_sum(T x) {
    __shared__ T parts[32];
    int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
    x = warp_sum(x);
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? parts[lane] : T(0));
    // Whoever comes next may write.
    __syncthreads();
    return x;
}

__device__ __forceinline__ float block_highest(float x) {
    __shared__ float parts[32];
    int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
    x = warp_highest(x);
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_highest(parts[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}
