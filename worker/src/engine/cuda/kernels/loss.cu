// The two ends of a model: rows of the embedding by token, and the cross entropy.

template <class T>
__device__ __forceinline__ void embedding(T *out, const T *table, const unsigned *tokens, long long count, int width) {
    long long position = blockIdx.x;
    if (position >= count) return;
    const T *from = table + static_cast<long long>(tokens[position]) * width;
    T *to = out + position * width;
    bool vector = aligned(out, table) && width % VECTOR<T> == 0;
    for_each_part<VECTOR<T>, int>(width, vector, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                  [=](int at, bool whole) {
                                      if (whole)
                                          *reinterpret_cast<uint4 *>(to + at) =
                                              *reinterpret_cast<const uint4 *>(from + at);
                                      else
                                          to[at] = from[at];
                                  });
}

extern "C" __global__ void __launch_bounds__(256)
    embedding_f32(float *out, const float *table, const unsigned *tokens, long long count, int width) {
    embedding(out, table, tokens, count, width);
}
extern "C" __global__ void __launch_bounds__(256)
    embedding_bf16(bf16 *out, const bf16 *table, const unsigned *tokens, long long count, int width) {
    embedding(out, table, tokens, count, width);
}

// Adds to the table's row of `token` what all its positions have, from `position`, its first.
// V columns a thread: as many passes over the tokens as there are 256 · V columns.
template <int V, class G, class T>
__device__ __forceinline__ void embedding_backward_columns(G *row, const T *dout, const unsigned *tokens, int count,
                                                           int width, unsigned token, int position) {
    constexpr int THREADS = 256, AT_ONCE = 4;
    __shared__ int found[THREADS], found_of_warp[THREADS / 32];
    int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    for (int tile = 0; tile < width; tile += THREADS * V) {
        int column = tile + thread * V;
        float sums[V];
#pragma unroll
        for (int i = 0; i < V; i++) sums[i] = 0.0f;
        for (int start = position; start < count; start += THREADS) {
            bool same = start + thread < count && tokens[start + thread] == token;
            if (!__syncthreads_or(same)) continue;
            unsigned votes = __ballot_sync(ALL_LANES, same);
            if (lane == 0) found_of_warp[warp] = __popc(votes);
            __syncthreads();
            int before = 0, all = 0;
#pragma unroll
            for (int w = 0; w < THREADS / 32; w++) {
                if (w == warp) before = all;
                all += found_of_warp[w];
            }
            if (same) found[before + __popc(votes & ((1u << lane) - 1))] = start + thread;
            __syncthreads();
            if (column >= width) continue;
            for (int next = 0; next < all; next += AT_ONCE) {
                float numbers[AT_ONCE][V];
                // Loads that wait for one another would take all of the time.
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (next + i < all)
                        load(numbers[i], dout + static_cast<long long>(found[next + i]) * width + column);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (next + i < all)
#pragma unroll
                        for (int j = 0; j < V; j++) sums[j] += numbers[i][j];
            }
        }
        if (column >= width) continue;
        float numbers[V];
        load(numbers, row + column);
#pragma unroll
        for (int i = 0; i < V; i++) numbers[i] += sums[i];
        store(row + column, numbers);
    }
}

// A block has one position. That of a token's first sums up for all its positions, in their
// order: no two blocks write one row.
template <class G, class T>
__device__ __forceinline__ void embedding_backward(G *dtable, const T *dout, const unsigned *tokens, int count,
                                                   int width) {
    constexpr int STRETCH = 4096;
    int position = static_cast<int>(blockIdx.x);
    if (position >= count) return;
    unsigned token = tokens[position];
    for (int start = 0; start < position; start += STRETCH) {
        bool earlier = false;
        int end = min(position, start + STRETCH);
        for (int i = start + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x))
            earlier |= tokens[i] == token;
        if (__syncthreads_or(earlier)) return;
    }
    G *row = dtable + static_cast<long long>(token) * width;
    if (aligned(dtable, dout) && width % VECTOR<T> == 0)
        embedding_backward_columns<VECTOR<T>>(row, dout, tokens, count, width, token, position);
    else
        embedding_backward_columns<1>(row, dout, tokens, count, width, token, position);
}

extern "C" __global__ void __launch_bounds__(256)
    embedding_backward_f32_f32(float *dtable, const float *dout, const unsigned *tokens, int count, int width) {
    embedding_backward(dtable, dout, tokens, count, width);
}
extern "C" __global__ void __launch_bounds__(256)
    embedding_backward_bf16_f32(float *dtable, const bf16 *dout, const unsigned *tokens, int count, int width) {
    embedding_backward(dtable, dout, tokens, count, width);
}
extern "C" __global__ void __launch_bounds__(256)
    embedding_backward_bf16_bf16(bf16 *dtable, const bf16 *dout, const unsigned *tokens, int count, int width) {
    embedding_backward(dtable, dout, tokens, count, width);
}

// A position without a target.
constexpr unsigned IGNORED_TARGET = 0xffffffffu;

// Calls work(at, whole) for a row's parts. The rows of a vocabulary of an odd size begin
// anywhere: vectors begin at the first multiple of 16 bytes.
template <class T, class Work> __device__ __forceinline__ void for_each_logit(const T *row, int vocab, Work work) {
    int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    unsigned beyond = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) & 15);
    int before = min(vocab, static_cast<int>((16 - beyond) % 16 / sizeof(T)));
    if (thread < before) work(thread, false);
    for_each_part<VECTOR<T>, int>(vocab - before, true, thread, threads,
                                  [&](int at, bool whole) { work(before + at, whole); });
}

// A row's loss, -log softmax(logits)[target]; its logits become its gradients times `scale`.
// The highest and the sum of exponentials are found in one pass: a sum is brought to a new
// highest when there is one.
template <class T>
__device__ __forceinline__ void cross_entropy(T *logits, float *losses, const unsigned *targets, int rows, int vocab,
                                              float scale) {
    constexpr int N = VECTOR<T>;
    int row = static_cast<int>(blockIdx.x);
    if (row >= rows) return;
    T *own = logits + static_cast<long long>(row) * vocab;
    unsigned target = targets[row];
    if (target == IGNORED_TARGET) {
        if (threadIdx.x == 0) losses[row] = 0.0f;
        for_each_logit(own, vocab, [=](int at, bool whole) {
            float zeros[N];
#pragma unroll
            for (int i = 0; i < N; i++) zeros[i] = 0.0f;
            store(own + at, zeros, whole);
        });
        return;
    }
    // The lowest finite number: of two infinities the difference would be a NaN.
    float highest = -3.402823466e38f, sum = 0.0f;
    for_each_logit(own, vocab, [&](int at, bool whole) {
        float x[N];
        load(x, own + at, whole);
        int numbers = whole ? N : 1;
        float now = highest;
#pragma unroll
        for (int i = 0; i < numbers; i++) now = fmaxf(now, x[i]);
        if (now > highest) {
            sum *= expf(highest - now);
            highest = now;
        }
        // fmaxf leaves NaNs out; here they come in.
#pragma unroll
        for (int i = 0; i < numbers; i++) sum += expf(x[i] - now);
    });
    float of_target = to_float(own[target]);
    float of_all = block_highest(highest);
    sum = block_sum(sum * expf(highest - of_all));
    // From here on all have read the target's logit: the sums had barriers.
    if (threadIdx.x == 0)
        losses[row] = static_cast<float>(log(static_cast<double>(sum)) + static_cast<double>(of_all - of_target));
    float factor = scale / sum;
    int index = static_cast<int>(target);
    for_each_logit(own, vocab, [=](int at, bool whole) {
        float x[N];
        load(x, own + at, whole);
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = expf(x[i] - of_all) * factor;
            if (at + i == index) x[i] -= scale;
        }
        store(own + at, x, whole);
    });
}

extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy_f32(float *logits, float *losses, const unsigned *targets, int rows, int vocab, float scale) {
    cross_entropy(logits, losses, targets, rows, vocab, scale);
}
extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy_bf16(bf16 *logits, float *losses, const unsigned *targets, int rows, int vocab, float scale) {
    cross_entropy(logits, losses, targets, rows, vocab, scale);
}
