// What goes row by row: the norms, the rotary embedding of positions, and SwiGLU.

// The lanes of a warp, or the threads of a block, that share a row.
struct WarpOfRow {
    static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) % 32; }
    static __device__ __forceinline__ int step() { return 32; }
    static __device__ __forceinline__ float sum(float x) { return warp_sum(x); }
};
struct BlockOfRow {
    static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x); }
    static __device__ __forceinline__ int step() { return static_cast<int>(blockDim.x); }
    static __device__ __forceinline__ float sum(float x) { return block_sum(x); }
};

// A row's y = x / rms(x) · weight, and 1 / rms(x).
template <int V, class Of, class T>
__device__ __forceinline__ void rms_norm_row(T *y, float *inverse, const T *x, const T *weight, int width, float eps,
                                             bool vector) {
    float sum = 0.0f;
    for_each_part<V, int>(width, vector, Of::first(), Of::step(), [&](int at, bool whole) {
        float numbers[V];
        load(numbers, x + at, whole);
#pragma unroll
        for (int i = 0; i < V; i++) sum += numbers[i] * numbers[i];
    });
    float factor = 1.0f / sqrtf(Of::sum(sum) / static_cast<float>(width) + eps);
    if (Of::first() == 0) *inverse = factor;
    for_each_part<V, int>(width, vector, Of::first(), Of::step(), [&](int at, bool whole) {
        float numbers[V], weights[V];
        load(numbers, x + at, whole);
        load(weights, weight + at, whole);
#pragma unroll
        for (int i = 0; i < V; i++) numbers[i] = numbers[i] * factor * weights[i];
        store(y + at, numbers, whole);
    });
}

template <class T>
__device__ __forceinline__ void rms_norm(T *y, float *inverse, const T *x, const T *weight, long long rows, int width,
                                         float eps) {
    long long row = blockIdx.x;
    if (row >= rows) return;
    bool vector = aligned(y, x, weight) && width % VECTOR<T> == 0;
    rms_norm_row<VECTOR<T>, BlockOfRow>(y + row * width, inverse + row, x + row * width, weight, width, eps, vector);
}

// Four numbers a lane: a head is often 128 wide, and all lanes then have their part.
template <class T>
__device__ __forceinline__ void rms_norm_narrow(T *y, float *inverse, const T *x, const T *weight, long long rows,
                                                int width, float eps) {
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    bool vector = aligned(y, x, weight) && width % 4 == 0;
    rms_norm_row<4, WarpOfRow>(y + row * width, inverse + row, x + row * width, weight, width, eps, vector);
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_f32(float *y, float *inverse, const float *x, const float *weight, long long rows, int width, float eps) {
    rms_norm(y, inverse, x, weight, rows, width, eps);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_bf16(bf16 *y, float *inverse, const bf16 *x, const bf16 *weight, long long rows, int width, float eps) {
    rms_norm(y, inverse, x, weight, rows, width, eps);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_narrow_f32(float *y, float *inverse, const float *x, const float *weight, long long rows, int width,
                        float eps) {
    rms_norm_narrow(y, inverse, x, weight, rows, width, eps);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_narrow_bf16(bf16 *y, float *inverse, const bf16 *x, const bf16 *weight, long long rows, int width,
                         float eps) {
    rms_norm_narrow(y, inverse, x, weight, rows, width, eps);
}

// Adds a row's part to dx, and to the sums of dy · x / rms(x) by column. A column is always
// of the same thread, so that nobody waits for its sum.
template <int V, class Of, class T>
__device__ __forceinline__ void rms_norm_backward_row(T *dx, float *sums, const T *dy, const T *x, const T *weight,
                                                      float inverse, int width, bool vector) {
    float dot = 0.0f;
    for_each_part<V, int>(width, vector, Of::first(), Of::step(), [&](int at, bool whole) {
        float d[V], numbers[V], weights[V];
        load(d, dy + at, whole);
        load(numbers, x + at, whole);
        load(weights, weight + at, whole);
#pragma unroll
        for (int i = 0; i < V; i++) dot += d[i] * weights[i] * numbers[i];
    });
    float along = Of::sum(dot) * inverse * inverse * inverse / static_cast<float>(width);
    for_each_part<V, int>(width, vector, Of::first(), Of::step(), [&](int at, bool whole) {
        float d[V], numbers[V], weights[V], result[V], sum[V];
        load(d, dy + at, whole);
        load(numbers, x + at, whole);
        load(weights, weight + at, whole);
        load(result, dx + at, whole);
        load(sum, sums + at, whole);
#pragma unroll
        for (int i = 0; i < V; i++) {
            result[i] += d[i] * weights[i] * inverse - numbers[i] * along;
            sum[i] += d[i] * numbers[i] * inverse;
        }
        store(dx + at, result, whole);
        store(sums + at, sum, whole);
    });
}

// A block's rows one after another. The sums by column are `partial`'s row of the block.
template <class T>
__device__ __forceinline__ void rms_norm_backward(T *dx, float *partial, const T *dy, const T *x, const T *weight,
                                                  const float *inverse, long long rows, int width,
                                                  int rows_per_block) {
    DYNAMIC_SHARED(float, sums);
    bool vector = aligned(dx, dy, x, weight) && width % VECTOR<T> == 0;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) sums[i] = 0.0f;
    __syncthreads();
    long long first = static_cast<long long>(blockIdx.x) * rows_per_block;
    long long end = min(rows, first + rows_per_block);
    for (long long row = first; row < end; row++) {
        long long at = row * width;
        rms_norm_backward_row<VECTOR<T>, BlockOfRow>(dx + at, sums, dy + at, x + at, weight, inverse[row], width,
                                                     vector);
    }
    __syncthreads();
    float *own = partial + static_cast<long long>(blockIdx.x) * width;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) own[i] = sums[i];
}

// Every warp has rows of its own, and sums by column: `width` in shared memory for each.
template <class T>
__device__ __forceinline__ void rms_norm_backward_narrow(T *dx, float *partial, const T *dy, const T *x,
                                                         const T *weight, const float *inverse, long long rows,
                                                         int width, int rows_per_block) {
    DYNAMIC_SHARED(float, sums);
    int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    bool vector = aligned(dx, dy, x, weight) && width % 4 == 0;
    for (int i = static_cast<int>(threadIdx.x); i < warps * width; i += static_cast<int>(blockDim.x)) sums[i] = 0.0f;
    __syncthreads();
    long long first = static_cast<long long>(blockIdx.x) * rows_per_block;
    long long end = min(rows, first + rows_per_block);
    for (long long row = first + warp; row < end; row += warps) {
        long long at = row * width;
        rms_norm_backward_row<4, WarpOfRow>(dx + at, sums + warp * width, dy + at, x + at, weight, inverse[row], width,
                                            vector);
    }
    __syncthreads();
    float *own = partial + static_cast<long long>(blockIdx.x) * width;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
        float sum = 0.0f;
        for (int w = 0; w < warps; w++) sum += sums[w * width + i];
        own[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_backward_f32(float *dx, float *partial, const float *dy, const float *x, const float *weight,
                          const float *inverse, long long rows, int width, int rows_per_block) {
    rms_norm_backward(dx, partial, dy, x, weight, inverse, rows, width, rows_per_block);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_backward_bf16(bf16 *dx, float *partial, const bf16 *dy, const bf16 *x, const bf16 *weight,
                           const float *inverse, long long rows, int width, int rows_per_block) {
    rms_norm_backward(dx, partial, dy, x, weight, inverse, rows, width, rows_per_block);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_backward_narrow_f32(float *dx, float *partial, const float *dy, const float *x, const float *weight,
                                 const float *inverse, long long rows, int width, int rows_per_block) {
    rms_norm_backward_narrow(dx, partial, dy, x, weight, inverse, rows, width, rows_per_block);
}
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_backward_narrow_bf16(bf16 *dx, float *partial, const bf16 *dy, const bf16 *x, const bf16 *weight,
                                  const float *inverse, long long rows, int width, int rows_per_block) {
    rms_norm_backward_narrow(dx, partial, dy, x, weight, inverse, rows, width, rows_per_block);
}

// dweight += the sums of partial's `count` rows. A block has 32 columns; each of its warps
// sums every eighth row, and the warps' sums are added in order.
template <class G> __device__ __forceinline__ void column_sum(G *dweight, const float *partial, int count, int width) {
    __shared__ float sums[8][32];
    int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int column = static_cast<int>(blockIdx.x) * 32 + lane;
    float sum = 0.0f;
    if (column < width)
        for (int row = warp; row < count; row += 8) sum += partial[static_cast<long long>(row) * width + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= width) return;
    for (int w = 1; w < 8; w++) sum += sums[w][lane];
    dweight[column] = from_float<G>(to_float(dweight[column]) + sum);
}

extern "C" __global__ void __launch_bounds__(256)
    column_sum_f32(float *dweight, const float *partial, int count, int width) {
    column_sum(dweight, partial, count, width);
}
extern "C" __global__ void __launch_bounds__(256)
    column_sum_bf16(bf16 *dweight, const float *partial, int count, int width) {
    column_sum(dweight, partial, count, width);
}

// Turns pairs (d, d + head_dim / 2) of every head, V pairs at a time. `table` has for each of
// `seq` positions the cosines, then the sines. Index holds the number of all pairs: dividing
// 64 bits costs more than all of the rest.
template <int V, class Index, class T>
__device__ __forceinline__ void rope_parts(T *x, const float *table, Index positions, Index seq, Index heads,
                                           Index half, float sign) {
    Index parts = half / V, n = positions * heads * parts, step = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index part = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; part < n; part += step) {
        Index head = part / parts, d = part % parts * V;
        const float *angles = table + static_cast<long long>(head / heads % seq) * (2 * half) + d;
        T *real_at = x + static_cast<long long>(head) * (2 * half) + d, *imaginary_at = real_at + half;
        float real[V], imaginary[V], cosine[V], sine[V];
        load(real, real_at);
        load(imaginary, imaginary_at);
        load(cosine, angles);
        load(sine, angles + half);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float r = real[i], j = imaginary[i], s = sine[i] * sign;
            real[i] = r * cosine[i] - j * s;
            imaginary[i] = j * cosine[i] + r * s;
        }
        store(real_at, real);
        store(imaginary_at, imaginary);
    }
}

template <class T>
__device__ __forceinline__ void rope(T *x, const float *table, long long positions, int seq, int heads, int head_dim,
                                     int back) {
    int half = head_dim / 2;
    float sign = back ? -1.0f : 1.0f;
    bool vector = aligned(x, table) && half % VECTOR<T> == 0;
    // A step beyond the last part must fit too.
    long long most = positions * heads * half + static_cast<long long>(gridDim.x) * blockDim.x;
    if (most <= 0xffffffffll) {
        unsigned p = static_cast<unsigned>(positions), s = seq, h = heads, f = half;
        if (vector)
            rope_parts<VECTOR<T>, unsigned>(x, table, p, s, h, f, sign);
        else
            rope_parts<1, unsigned>(x, table, p, s, h, f, sign);
    } else if (vector) {
        rope_parts<VECTOR<T>, long long>(x, table, positions, seq, heads, half, sign);
    } else {
        rope_parts<1, long long>(x, table, positions, seq, heads, half, sign);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rope_f32(float *x, const float *table, long long positions, int seq, int heads, int head_dim, int back) {
    rope(x, table, positions, seq, heads, head_dim, back);
}
extern "C" __global__ void __launch_bounds__(256)
    rope_bf16(bf16 *x, const float *table, long long positions, int seq, int heads, int head_dim, int back) {
    rope(x, table, positions, seq, heads, head_dim, back);
}

// As good as the numbers are: bf16 has 8 bits, and the fast instructions have 20.
template <class T> __device__ __forceinline__ float sigmoid(float x);
template <> __device__ __forceinline__ float sigmoid<float>(float x) { return 1.0f / (1.0f + expf(-x)); }
template <> __device__ __forceinline__ float sigmoid<bf16>(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <class T> __device__ __forceinline__ void swiglu(T *out, const T *gate, const T *up, long long n) {
    constexpr int N = VECTOR<T>;
    for_each_part<N>(n, aligned(out, gate, up), [=](long long at, bool whole) {
        float g[N], u[N];
        load(g, gate + at, whole);
        load(u, up + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) g[i] = g[i] * sigmoid<T>(g[i]) * u[i];
        store(out + at, g, whole);
    });
}

// Gate and up become their gradients.
template <class T> __device__ __forceinline__ void swiglu_backward(T *gate, T *up, const T *dout, long long n) {
    constexpr int N = VECTOR<T>;
    for_each_part<N>(n, aligned(gate, up, dout), [=](long long at, bool whole) {
        float g[N], u[N], d[N];
        load(g, gate + at, whole);
        load(u, up + at, whole);
        load(d, dout + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = sigmoid<T>(g[i]), silu = g[i] * s;
            g[i] = d[i] * u[i] * (s + silu * (1.0f - s));
            u[i] = d[i] * silu;
        }
        store(gate + at, g, whole);
        store(up + at, u, whole);
    });
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_f32(float *out, const float *gate, const float *up, long long n) {
    swiglu(out, gate, up, n);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_bf16(bf16 *out, const bf16 *gate, const bf16 *up, long long n) {
    swiglu(out, gate, up, n);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_f32(float *gate, float *up, const float *dout, long long n) {
    swiglu_backward(gate, up, dout, n);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_bf16(bf16 *gate, bf16 *up, const bf16 *dout, long long n) {
    swiglu_backward(gate, up, dout, n);
}
