// What goes number by number, sums over all numbers, and the step of AdamW.

template <class T> __device__ __forceinline__ void fill(T *x, long long n, float value) {
    constexpr int N = VECTOR<T>;
    for_each_part<N>(n, aligned(x), [=](long long at, bool whole) {
        float numbers[N];
#pragma unroll
        for (int i = 0; i < N; i++) numbers[i] = value;
        store(x + at, numbers, whole);
    });
}

extern "C" __global__ void __launch_bounds__(256) fill_f32(float *x, long long n, float value) { fill(x, n, value); }
extern "C" __global__ void __launch_bounds__(256) fill_bf16(bf16 *x, long long n, float value) { fill(x, n, value); }

template <class Y, class X> __device__ __forceinline__ void cast(Y *y, const X *x, long long n) {
    constexpr int N = 8;
    for_each_part<N>(n, aligned(y, x), [=](long long at, bool whole) {
        float numbers[N];
        load(numbers, x + at, whole);
        store(y + at, numbers, whole);
    });
}

extern "C" __global__ void __launch_bounds__(256) cast_to_bf16(bf16 *y, const float *x, long long n) { cast(y, x, n); }
extern "C" __global__ void __launch_bounds__(256) cast_to_f32(float *y, const bf16 *x, long long n) { cast(y, x, n); }

// Of two that are stored apart, vectors are as long as the shorter numbers' are.
template <class Y, class X> __device__ __forceinline__ void add(Y *y, const X *x, long long n) {
    constexpr int N = VECTOR<Y> > VECTOR<X> ? VECTOR<Y> : VECTOR<X>;
    for_each_part<N>(n, aligned(y, x), [=](long long at, bool whole) {
        float sum[N], more[N];
        load(sum, y + at, whole);
        load(more, x + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += more[i];
        store(y + at, sum, whole);
    });
}

extern "C" __global__ void __launch_bounds__(256) add_f32_f32(float *y, const float *x, long long n) { add(y, x, n); }
extern "C" __global__ void __launch_bounds__(256) add_f32_bf16(float *y, const bf16 *x, long long n) { add(y, x, n); }
extern "C" __global__ void __launch_bounds__(256) add_bf16_bf16(bf16 *y, const bf16 *x, long long n) { add(y, x, n); }
extern "C" __global__ void __launch_bounds__(256) add_bf16_f32(bf16 *y, const float *x, long long n) { add(y, x, n); }

// In f64, where the square of an f32 is exact: each block's part of the sum.
template <class T> __device__ __forceinline__ void sum_of_squares(double *partial, const T *x, long long n) {
    constexpr int N = VECTOR<T>;
    double sum = 0.0;
    for_each_part<N>(n, aligned(x), [&](long long at, bool whole) {
        float numbers[N];
        load(numbers, x + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) {
            double number = numbers[i];
            sum += number * number;
        }
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256) sum_of_squares_f32(double *partial, const float *x, long long n) {
    sum_of_squares(partial, x, n);
}
extern "C" __global__ void __launch_bounds__(256) sum_of_squares_bf16(double *partial, const bf16 *x, long long n) {
    sum_of_squares(partial, x, n);
}

// One block: what it adds is summed up in f64.
template <class T> __device__ __forceinline__ void add_sum(double *sum, const T *values, int count) {
    double own = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) own += values[i];
    own = block_sum(own);
    if (threadIdx.x == 0) *sum += own;
}

extern "C" __global__ void __launch_bounds__(256) add_sum_f64(double *sum, const double *values, int count) {
    add_sum(sum, values, count);
}
extern "C" __global__ void __launch_bounds__(256) add_sum_f32(double *sum, const float *values, int count) {
    add_sum(sum, values, count);
}

// `keep` is 1 - lr · weight_decay, `size` lr / (1 - beta1^step), `root` sqrt(1 - beta2^step),
// `new1` and `new2` 1 - beta1 and 1 - beta2: made in f64 where they come close to 0.
extern "C" __global__ void __launch_bounds__(256)
    adamw(float *param, const float *grad, float *m, float *v, long long n, float keep, float size, float root,
          float beta1, float new1, float beta2, float new2, float eps, float grad_scale) {
    constexpr int N = 4;
    for_each_part<N>(n, aligned(param, grad, m, v), [=](long long at, bool whole) {
        float p[N], g[N], first[N], second[N];
        load(p, param + at, whole);
        load(g, grad + at, whole);
        load(first, m + at, whole);
        load(second, v + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float scaled = g[i] * grad_scale;
            first[i] = beta1 * first[i] + new1 * scaled;
            second[i] = beta2 * second[i] + new2 * scaled * scaled;
            p[i] = p[i] * keep - size * first[i] / (sqrtf(second[i]) / root + eps);
        }
        store(m + at, first, whole);
        store(v + at, second, whole);
        store(param + at, p, whole);
    });
}
