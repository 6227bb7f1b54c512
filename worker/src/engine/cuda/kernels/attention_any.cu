// Causal attention of any head dimension up to 256, stored as f32 or bf16 and computed in f32
// without tensor cores: where those of attention_tensor.cu do not fit. No T x T numbers exist,
// and every sum is made by one thread in one order.
//
// A block has 128 threads, 16 times 8. Thread (y, x) has the rows y · ROWS + i of the tile
// that the block keeps, and of the scores the columns x + 8 j, of a result the columns
// x + 8 c. A row so belongs to 8 lanes of one warp.

constexpr int ATTENTION_ANY_THREADS = 128;

// Rows of a matrix into shared memory, as f32 with `stride` between rows: what lies at or
// beyond `end` is 0.
template <class Number>
__device__ __forceinline__ void attention_any_tile(float *tile, const Number *from, long long row_step, int first,
                                                   int rows, int end, int head_dim, int stride) {
    int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int row = warp; row < rows; row += ATTENTION_ANY_THREADS / 32) {
        const Number *source = from + (first + row) * row_step;
        bool there = first + row < end;
        for (int d = lane; d < head_dim; d += 32) tile[row * stride + d] = there ? attention_load(source + d) : 0.0f;
    }
}

// scores[i][j] = left's row y · ROWS + i times right's row x + 8 j.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void attention_any_scores(float (&scores)[ROWS][COLUMNS], const float *left,
                                                     const float *right, int head_dim, int stride) {
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) scores[i][j] = 0.0f;
    for (int d = 0; d < head_dim; d++) {
        float l[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) l[i] = left[(y * ROWS + i) * stride + d];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            float r = right[(x + 8 * j) * stride + d];
#pragma unroll
            for (int i = 0; i < ROWS; i++) scores[i][j] += l[i] * r;
        }
    }
}

// sums[i][c] += weights' row y · ROWS + i times right's column x + 8 c. Of `weights` only rows
// that the own warp wrote are read.
template <int ROWS, int COLUMNS, int WIDTH>
__device__ __forceinline__ void attention_any_sums(float (&sums)[ROWS][WIDTH / 8], const float *weights,
                                                   const float *right, int head_dim, int stride) {
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
    for (int k = 0; k < 8 * COLUMNS; k++) {
        float w[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) w[i] = weights[(y * ROWS + i) * (8 * COLUMNS + 1) + k];
#pragma unroll
        for (int c = 0; c < WIDTH / 8; c++) {
            if (x + 8 * c >= head_dim) continue;
            float r = right[k * stride + x + 8 * c];
#pragma unroll
            for (int i = 0; i < ROWS; i++) sums[i][c] += w[i] * r;
        }
    }
}

// A thread's scores to where its warp reads them all.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void attention_any_keep(float *weights, const float (&scores)[ROWS][COLUMNS]) {
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) weights[(y * ROWS + i) * (8 * COLUMNS + 1) + x + 8 * j] = scores[i][j];
}

// Writes a thread's part of a result, times what its row has.
template <int ROWS, int WIDTH, class Number>
__device__ __forceinline__ void attention_any_write(Number *to, const float (&sums)[ROWS][WIDTH / 8],
                                                    const float (&factors)[ROWS], long long row_step, int first,
                                                    int end, int head_dim) {
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = first + y * ROWS + i;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; c++)
            if (x + 8 * c < head_dim) attention_store(to + row * row_step + x + 8 * c, sums[i][c] * factors[i]);
    }
}

// A block has one head's 16 · ROWS queries, and takes 8 · COLUMNS keys at a time. The grid is
// (batch · heads, tiles of queries), the longest tiles first.
template <int WIDTH, int ROWS, int COLUMNS, class Number>
__device__ __forceinline__ void attention_any_forward(Number *out, float *log_sums, const Number *q, const Number *k,
                                                      const Number *v, int seq, int heads, int kv_heads, int head_dim,
                                                      float scale) {
    constexpr int QUERIES = 16 * ROWS, KEYS = 8 * COLUMNS;
    ATTENTION_SHARED(float, memory);
    int stride = head_dim | 1;
    float *queries = memory, *keys = queries + QUERIES * stride, *weights = keys + KEYS * stride;
    int batch = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
    int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * QUERIES;
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
    long long query_step = static_cast<long long>(heads) * head_dim;
    long long key_step = static_cast<long long>(kv_heads) * head_dim;
    long long query_offset = batch * seq * query_step + static_cast<long long>(head) * head_dim;
    long long key_offset = batch * seq * key_step + static_cast<long long>(head / (heads / kv_heads)) * head_dim;
    float sums[ROWS][WIDTH / 8], highest[ROWS], sum[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        highest[i] = -__int_as_float(0x7f800000);
        sum[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; c++) sums[i][c] = 0.0f;
    }
    attention_any_tile(queries, q + query_offset, query_step, first, QUERIES, seq, head_dim, stride);
    int end = min(seq, first + QUERIES);
    for (int key = 0; key < end; key += KEYS) {
        __syncthreads();
        attention_any_tile(keys, k + key_offset, key_step, key, KEYS, seq, head_dim, stride);
        __syncthreads();
        float scores[ROWS][COLUMNS];
        attention_any_scores(scores, queries, keys, head_dim, stride);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = first + y * ROWS + i;
            float now = highest[i];
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                scores[i][j] = key + x + 8 * j <= row ? scores[i][j] * scale : -__int_as_float(0x7f800000);
                now = fmaxf(now, scores[i][j]);
            }
#pragma unroll
            for (int lanes = 4; lanes > 0; lanes /= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, lanes));
            // Key 0 is in the first tile, and every query sees it: `now` is never infinite.
            float before = expf(highest[i] - now), own = 0.0f;
            highest[i] = now;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                scores[i][j] = expf(scores[i][j] - now);
                own += scores[i][j];
            }
            sum[i] = sum[i] * before + own;
#pragma unroll
            for (int c = 0; c < WIDTH / 8; c++) sums[i][c] *= before;
        }
        attention_any_keep(weights, scores);
        __syncthreads();
        attention_any_tile(keys, v + key_offset, key_step, key, KEYS, seq, head_dim, stride);
        __syncthreads();
        attention_any_sums<ROWS, COLUMNS, WIDTH>(sums, weights, keys, head_dim, stride);
    }
    float inverse[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int lanes = 4; lanes > 0; lanes /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], lanes);
        inverse[i] = 1.0f / sum[i];
        int row = first + y * ROWS + i;
        if (x == 0 && row < seq)
            log_sums[(static_cast<long long>(batch) * heads + head) * seq + row] = highest[i] + logf(sum[i]);
    }
    attention_any_write<ROWS, WIDTH>(out + query_offset, sums, inverse, query_step, first, seq, head_dim);
}

// A block has one key-value head's 16 · ROWS keys, and takes 8 · COLUMNS queries at a time of
// all the heads that share it. The grid is (batch · kv_heads, tiles of keys).
template <int WIDTH, int ROWS, int COLUMNS, class Number>
__device__ __forceinline__ void attention_any_backward_keys(Number *dk, Number *dv, const Number *dout,
                                                            const float *log_sums, const float *delta, const Number *q,
                                                            const Number *k, const Number *v, int seq, int heads,
                                                            int kv_heads, int head_dim, float scale) {
    constexpr int KEYS = 16 * ROWS, QUERIES = 8 * COLUMNS;
    ATTENTION_SHARED(float, memory);
    int stride = head_dim | 1;
    float *keys = memory, *values = keys + KEYS * stride, *queries = values + KEYS * stride;
    float *douts = queries + QUERIES * stride, *weights = douts + QUERIES * stride;
    int batch = static_cast<int>(blockIdx.x) / kv_heads, kv_head = static_cast<int>(blockIdx.x) % kv_heads;
    int first = static_cast<int>(blockIdx.y) * KEYS, group = heads / kv_heads;
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
    long long query_step = static_cast<long long>(heads) * head_dim;
    long long key_step = static_cast<long long>(kv_heads) * head_dim;
    long long key_offset = batch * seq * key_step + static_cast<long long>(kv_head) * head_dim;
    float dks[ROWS][WIDTH / 8], dvs[ROWS][WIDTH / 8];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < WIDTH / 8; c++) dks[i][c] = dvs[i][c] = 0.0f;
    attention_any_tile(keys, k + key_offset, key_step, first, KEYS, seq, head_dim, stride);
    attention_any_tile(values, v + key_offset, key_step, first, KEYS, seq, head_dim, stride);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        long long query_offset = batch * seq * query_step + static_cast<long long>(head) * head_dim;
        long long row_offset = (static_cast<long long>(batch) * heads + head) * seq;
        for (int query = first / QUERIES * QUERIES; query < seq; query += QUERIES) {
            __syncthreads();
            attention_any_tile(queries, q + query_offset, query_step, query, QUERIES, seq, head_dim, stride);
            attention_any_tile(douts, dout + query_offset, query_step, query, QUERIES, seq, head_dim, stride);
            __syncthreads();
            float scores[ROWS][COLUMNS], dscores[ROWS][COLUMNS];
            attention_any_scores(scores, keys, queries, head_dim, stride);
            attention_any_scores(dscores, values, douts, head_dim, stride);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                int row = query + x + 8 * j;
                float log_sum = row < seq ? log_sums[row_offset + row] : 0.0f;
                float own = row < seq ? delta[row_offset + row] : 0.0f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    bool seen = first + y * ROWS + i <= row && row < seq;
                    scores[i][j] = seen ? expf(scores[i][j] * scale - log_sum) : 0.0f;
                    dscores[i][j] = scores[i][j] * (dscores[i][j] - own);
                }
            }
            attention_any_keep(weights, scores);
            __syncwarp();
            attention_any_sums<ROWS, COLUMNS, WIDTH>(dvs, weights, douts, head_dim, stride);
            __syncwarp();
            attention_any_keep(weights, dscores);
            __syncwarp();
            attention_any_sums<ROWS, COLUMNS, WIDTH>(dks, weights, queries, head_dim, stride);
        }
    }
    float scales[ROWS], ones[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        scales[i] = scale;
        ones[i] = 1.0f;
    }
    attention_any_write<ROWS, WIDTH>(dk + key_offset, dks, scales, key_step, first, seq, head_dim);
    attention_any_write<ROWS, WIDTH>(dv + key_offset, dvs, ones, key_step, first, seq, head_dim);
}

// A block has one head's 16 · ROWS queries, and takes 8 · COLUMNS keys at a time. The grid is
// (batch · heads, tiles of queries), the longest tiles first.
template <int WIDTH, int ROWS, int COLUMNS, class Number>
__device__ __forceinline__ void attention_any_backward_queries(Number *dq, const Number *dout, const float *log_sums,
                                                               const float *delta, const Number *q, const Number *k,
                                                               const Number *v, int seq, int heads, int kv_heads,
                                                               int head_dim, float scale) {
    constexpr int QUERIES = 16 * ROWS, KEYS = 8 * COLUMNS;
    ATTENTION_SHARED(float, memory);
    int stride = head_dim | 1;
    float *queries = memory, *douts = queries + QUERIES * stride, *keys = douts + QUERIES * stride;
    float *values = keys + KEYS * stride, *weights = values + KEYS * stride;
    int batch = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
    int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * QUERIES;
    int y = static_cast<int>(threadIdx.x) / 8, x = static_cast<int>(threadIdx.x) % 8;
    long long query_step = static_cast<long long>(heads) * head_dim;
    long long key_step = static_cast<long long>(kv_heads) * head_dim;
    long long query_offset = batch * seq * query_step + static_cast<long long>(head) * head_dim;
    long long key_offset = batch * seq * key_step + static_cast<long long>(head / (heads / kv_heads)) * head_dim;
    long long row_offset = (static_cast<long long>(batch) * heads + head) * seq;
    float dqs[ROWS][WIDTH / 8], log_sum[ROWS], own[ROWS], scales[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = first + y * ROWS + i;
        log_sum[i] = row < seq ? log_sums[row_offset + row] : 0.0f;
        own[i] = row < seq ? delta[row_offset + row] : 0.0f;
        scales[i] = scale;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; c++) dqs[i][c] = 0.0f;
    }
    attention_any_tile(queries, q + query_offset, query_step, first, QUERIES, seq, head_dim, stride);
    attention_any_tile(douts, dout + query_offset, query_step, first, QUERIES, seq, head_dim, stride);
    int end = min(seq, first + QUERIES);
    for (int key = 0; key < end; key += KEYS) {
        __syncthreads();
        attention_any_tile(keys, k + key_offset, key_step, key, KEYS, seq, head_dim, stride);
        attention_any_tile(values, v + key_offset, key_step, key, KEYS, seq, head_dim, stride);
        __syncthreads();
        float scores[ROWS][COLUMNS], dscores[ROWS][COLUMNS];
        attention_any_scores(scores, queries, keys, head_dim, stride);
        attention_any_scores(dscores, douts, values, head_dim, stride);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                bool seen = key + x + 8 * j <= first + y * ROWS + i;
                float weight = seen ? expf(scores[i][j] * scale - log_sum[i]) : 0.0f;
                dscores[i][j] = weight * (dscores[i][j] - own[i]);
            }
        __syncwarp();
        attention_any_keep(weights, dscores);
        __syncwarp();
        attention_any_sums<ROWS, COLUMNS, WIDTH>(dqs, weights, keys, head_dim, stride);
    }
    attention_any_write<ROWS, WIDTH>(dq + query_offset, dqs, scales, query_step, first, seq, head_dim);
}

// Rows and columns of a thread for a head dimension of at most WIDTH: so many that the sums stay
// in registers, and the tiles in the 99 KiB that the smallest of the GPUs gives a block.
#define ATTENTION_ANY(NAME, NUMBER, WIDTH, FORWARD_ROWS, ROWS, COLUMNS)                                                \
    extern "C" __global__ void __launch_bounds__(ATTENTION_ANY_THREADS) attention_any_forward_##NAME##_##WIDTH(        \
        NUMBER *out, float *log_sums, const NUMBER *q, const NUMBER *k, const NUMBER *v, int seq, int heads,           \
        int kv_heads, int head_dim, float scale) {                                                                     \
        attention_any_forward<WIDTH, FORWARD_ROWS, 4>(out, log_sums, q, k, v, seq, heads, kv_heads, head_dim, scale);  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ATTENTION_ANY_THREADS) attention_any_backward_keys_##NAME##_##WIDTH(  \
        NUMBER *dk, NUMBER *dv, const NUMBER *dout, const float *log_sums, const float *delta, const NUMBER *q,        \
        const NUMBER *k, const NUMBER *v, int seq, int heads, int kv_heads, int head_dim, float scale) {               \
        attention_any_backward_keys<WIDTH, ROWS, COLUMNS>(dk, dv, dout, log_sums, delta, q, k, v, seq, heads,          \
                                                          kv_heads, head_dim, scale);                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ATTENTION_ANY_THREADS)                                                \
        attention_any_backward_queries_##NAME##_##WIDTH(NUMBER *dq, const NUMBER *dout, const float *log_sums,         \
                                                        const float *delta, const NUMBER *q, const NUMBER *k,          \
                                                        const NUMBER *v, int seq, int heads, int kv_heads,             \
                                                        int head_dim, float scale) {                                   \
        attention_any_backward_queries<WIDTH, ROWS, COLUMNS>(dq, dout, log_sums, delta, q, k, v, seq, heads, kv_heads, \
                                                             head_dim, scale);                                         \
    }

ATTENTION_ANY(f32, float, 64, 4, 4, 4)
ATTENTION_ANY(f32, float, 128, 4, 2, 4)
ATTENTION_ANY(f32, float, 256, 2, 1, 2)
ATTENTION_ANY(bf16, attention_bf16, 64, 4, 4, 4)
ATTENTION_ANY(bf16, attention_bf16, 128, 4, 2, 4)
ATTENTION_ANY(bf16, attention_bf16, 256, 2, 1, 2)
