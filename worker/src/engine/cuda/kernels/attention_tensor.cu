// Causal attention in bf16 on tensor cores, for heads of 64 and 128: the algorithm of
// FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691). No T x T numbers exist, every sum is
// made in one order, and what lies beyond T is read as zeros and never written.
//
// Four warps share a block. Tiles lie in shared memory row by row, in chunks of 16 bytes; chunk
// c of row r lies at place c ^ (r % 8), so that the 8 rows of an ldmatrix meet all banks once.

constexpr int ATTENTION_THREADS = 128;
// Keys of a tile, and queries of one that a block goes through.
constexpr int ATTENTION_TILE = 64;
// Queries that a block keeps: two fragments a warp, so that a fragment of keys is used twice.
constexpr int ATTENTION_QUERIES = 128;
constexpr float ATTENTION_LOG2_E = 1.4426950408889634f;

// Where a chunk lies, in bytes from the tile's beginning.
template <int D> __device__ __forceinline__ unsigned attention_place(int row, int chunk) {
    return static_cast<unsigned>(row * (2 * D) + ((chunk ^ (row & 7)) << 4));
}

// Begins to copy ROWS rows of a head to a tile.
template <int D, int ROWS>
__device__ __forceinline__ void attention_fetch(unsigned tile, const attention_bf16 *from, long long row_step,
                                                int first, int seq) {
    // A thread copies the same chunk of every STEP-th row: a multiple of 8, which leaves its place.
    constexpr int CHUNKS = D / 8, STEP = ATTENTION_THREADS / CHUNKS;
    static_assert(STEP % 8 == 0, "the chunks' places repeat every 8 rows");
    int row = static_cast<int>(threadIdx.x) / CHUNKS, chunk = static_cast<int>(threadIdx.x) % CHUNKS;
    tile += attention_place<D>(row, chunk);
    const attention_bf16 *source = from + (first + row) * row_step + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        bool there = first + row + i * STEP < seq;
        // What is not there is not read, but its address still is one.
        attention_copy_16(tile + i * STEP * 2 * D, there ? source : from, there);
        source += STEP * row_step;
    }
}

// A lane's address of the first of the fragments below, in a tile that begins at a multiple of
// 2 D bytes. That of columns 16 step and on differs by ^ (step << 5), that of 16 rows more by
// 32 D.
//
// Of a left factor, and of a right factor whose rows are the tile's.
template <int D> __device__ __forceinline__ unsigned attention_rows_lane(unsigned tile, int row) {
    int lane = static_cast<int>(threadIdx.x) % 32;
    return tile + attention_place<D>(row + lane % 16, lane / 16);
}
// Of a right factor whose columns are the tile's rows.
template <int D> __device__ __forceinline__ unsigned attention_columns_lane(unsigned tile) {
    int lane = static_cast<int>(threadIdx.x) % 32;
    return tile + attention_place<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// scores = left · rightᵀ, of FRAGMENTS · 16 rows of one tile and COLUMNS of the other.
template <int D, int FRAGMENTS, int COLUMNS>
__device__ __forceinline__ void attention_scores(float (&scores)[FRAGMENTS][COLUMNS / 8][4], unsigned left,
                                                 int row, unsigned right) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[f][n][i] = 0.0f;
    left = attention_rows_lane<D>(left, row);
    right = attention_columns_lane<D>(right);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) attention_ldmatrix(a[f], (left ^ static_cast<unsigned>(step << 5)) + f * 32 * D);
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            // Two fragments: b[0] and b[1], then 8 columns on.
            unsigned b[4];
            attention_ldmatrix(b, (right ^ static_cast<unsigned>(step << 5)) + n * 32 * D);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                attention_mma(scores[f][2 * n], a[f], b[0], b[1]);
                attention_mma(scores[f][2 * n + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// sums += weights · right: the weights as mma left them are, rounded, a left factor's fragments.
template <int D, int FRAGMENTS, int COLUMNS>
__device__ __forceinline__ void attention_sums(float (&sums)[FRAGMENTS][D / 8][4],
                                               const float (&weights)[FRAGMENTS][COLUMNS / 8][4],
                                               unsigned right) {
    right = attention_rows_lane<D>(right, 0);
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[f][i] = attention_pack(weights[f][2 * step + i / 2][i % 2 * 2], weights[f][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int pair = 0; pair < D / 16; pair++) {
            unsigned b[4];
            attention_ldmatrix_transposed(b, (right ^ static_cast<unsigned>(pair << 5)) + step * 32 * D);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                attention_mma(sums[f][2 * pair], a[f], b[0], b[1]);
                attention_mma(sums[f][2 * pair + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// Writes a warp's rows of a result, times a factor for each of a lane's two rows of a fragment,
// by way of a tile of which only this warp still uses these rows.
template <int D, int FRAGMENTS>
__device__ __forceinline__ void attention_write(attention_bf16 *to, const float (&sums)[FRAGMENTS][D / 8][4],
                                                const float (&factors)[FRAGMENTS][2], unsigned char *tile, int row,
                                                long long row_step, int first, int seq) {
    constexpr int CHUNKS = D / 8;
    int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                unsigned place = attention_place<D>(row + 16 * f + lane / 4 + 8 * half, n) + lane % 4 * 4;
                *reinterpret_cast<unsigned *>(tile + place) = attention_pack(
                    sums[f][n][2 * half] * factors[f][half], sums[f][n][2 * half + 1] * factors[f][half]);
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < FRAGMENTS * 16 * CHUNKS / 32; i++) {
        int index = i * 32 + lane, r = row + index / CHUNKS, chunk = index % CHUNKS;
        if (first + r < seq)
            *reinterpret_cast<uint4 *>(to + (first + r) * row_step + chunk * 8) =
                *reinterpret_cast<const uint4 *>(tile + attention_place<D>(r, chunk));
    }
}

// A block has one head's 128 queries. The grid is (batch · heads, tiles of queries), the longest
// tiles first.
template <int D>
__device__ __forceinline__ void attention_tensor_forward(attention_bf16 *out, float *log_sums, const attention_bf16 *q,
                                                         const attention_bf16 *k, const attention_bf16 *v, int seq,
                                                         int heads, int kv_heads, float scale) {
    // Of the keys 32 at a time: more scores would leave too few registers.
    constexpr int FRAGMENTS = 2, COLUMNS = 32;
    constexpr unsigned TILE_BYTES = ATTENTION_TILE * D * 2;
    ATTENTION_SHARED(unsigned char, memory);
    unsigned queries = attention_address(memory), keys = queries + ATTENTION_QUERIES * D * 2;
    unsigned values = keys + 2 * TILE_BYTES;
    int batch = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
    int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * ATTENTION_QUERIES;
    int lane = static_cast<int>(threadIdx.x) % 32;
    // Of the block's queries, the warp's first.
    int row = static_cast<int>(threadIdx.x) / 32 * 16 * FRAGMENTS;
    long long query_step = static_cast<long long>(heads) * D, key_step = static_cast<long long>(kv_heads) * D;
    long long query_offset = batch * seq * query_step + static_cast<long long>(head) * D;
    long long key_offset = batch * seq * key_step + static_cast<long long>(head / (heads / kv_heads)) * D;
    attention_fetch<D, ATTENTION_QUERIES>(queries, q + query_offset, query_step, first, seq);
    attention_fetch<D, ATTENTION_TILE>(keys, k + key_offset, key_step, 0, seq);
    attention_fetch<D, ATTENTION_TILE>(values, v + key_offset, key_step, 0, seq);
    attention_copy_commit();
    float sums[FRAGMENTS][D / 8][4], highest[FRAGMENTS][2], sum[FRAGMENTS][2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            highest[f][half] = -__int_as_float(0x7f800000);
            sum[f][half] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[f][n][i] = 0.0f;
    }
    float scale_log2 = scale * ATTENTION_LOG2_E;
    int tiles = (min(seq, first + ATTENTION_QUERIES) + ATTENTION_TILE - 1) / ATTENTION_TILE;
    for (int tile = 0; tile < tiles; tile++) {
        unsigned now = static_cast<unsigned>(tile & 1) * TILE_BYTES, next = TILE_BYTES - now;
        attention_copy_wait();
        __syncthreads();
        if (tile + 1 < tiles) {
            attention_fetch<D, ATTENTION_TILE>(keys + next, k + key_offset, key_step, (tile + 1) * ATTENTION_TILE, seq);
            attention_fetch<D, ATTENTION_TILE>(values + next, v + key_offset, key_step, (tile + 1) * ATTENTION_TILE,
                                               seq);
            attention_copy_commit();
        }
#pragma unroll
        for (int part = 0; part < ATTENTION_TILE; part += COLUMNS) {
            int key = tile * ATTENTION_TILE + part;
            // The warp's last query sees none of these keys.
            if (key >= first + row + 16 * FRAGMENTS) break;
            // How far the lane's first query lies beyond its first key.
            int distance = first + row + lane / 4 - key - lane % 4 * 2;
            float scores[FRAGMENTS][COLUMNS / 8][4];
            attention_scores<D, FRAGMENTS, COLUMNS>(scores, queries, row, keys + now + part * 2 * D);
            if (key + COLUMNS > first + row + 1) {
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (distance < 8 * n + i % 2 - 16 * f - i / 2 * 8)
                                scores[f][n][i] = -__int_as_float(0x7f800000);
            }
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float most = highest[f][half];
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++)
                        most = fmaxf(most, fmaxf(scores[f][n][2 * half], scores[f][n][2 * half + 1]));
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                    // Key 0 is in the first tile, and every query sees it: `most` is never infinite.
                    float before = attention_exp2((highest[f][half] - most) * scale_log2), own = 0.0f;
                    highest[f][half] = most;
                    float scaled = most * scale_log2;
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            scores[f][n][i] = attention_exp2(scores[f][n][i] * scale_log2 - scaled);
                            own += scores[f][n][i];
                        }
                    sum[f][half] = sum[f][half] * before + own;
                    // Soon a row's highest score is seen, and mostly nothing changes.
                    if (__any_sync(0xffffffffu, before != 1.0f)) {
#pragma unroll
                        for (int n = 0; n < D / 8; n++) {
                            sums[f][n][2 * half] *= before;
                            sums[f][n][2 * half + 1] *= before;
                        }
                    }
                }
            attention_sums<D, FRAGMENTS, COLUMNS>(sums, scores, values + now + part * 2 * D);
        }
    }
    float inverse[FRAGMENTS][2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float all = sum[f][half];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            inverse[f][half] = 1.0f / all;
            int query = first + row + 16 * f + lane / 4 + 8 * half;
            if (lane % 4 == 0 && query < seq)
                log_sums[(static_cast<long long>(batch) * heads + head) * seq + query] =
                    highest[f][half] * scale + logf(all);
        }
    attention_write<D, FRAGMENTS>(out + query_offset, sums, inverse, memory, row, query_step, first, seq);
}

// Begins to copy the queries of one tile, their gradients, and what is kept of their rows.
template <int D>
__device__ __forceinline__ void attention_fetch_queries(unsigned queries, unsigned douts, unsigned rows,
                                                        const attention_bf16 *q, const attention_bf16 *dout,
                                                        const float *log_sums, const float *delta, long long row_step,
                                                        int first, int seq) {
    attention_fetch<D, ATTENTION_TILE>(queries, q, row_step, first, seq);
    attention_fetch<D, ATTENTION_TILE>(douts, dout, row_step, first, seq);
    int place = static_cast<int>(threadIdx.x) % ATTENTION_TILE;
    bool there = first + place < seq;
    const float *source = static_cast<int>(threadIdx.x) < ATTENTION_TILE ? log_sums : delta;
    attention_copy_4(rows + threadIdx.x * 4, source + (there ? first + place : 0), there);
    attention_copy_commit();
}

// A block has one key-value head's 64 keys, each warp 16 of them, and goes through the queries of
// all the heads that share it. The scores are computed transposed, keys by queries: they are then
// left factors of both gradients as they are. The grid is (batch · kv_heads, tiles of keys).
template <int D>
__device__ __forceinline__ void
attention_tensor_backward_keys(attention_bf16 *dk, attention_bf16 *dv, const attention_bf16 *dout,
                               const float *log_sums, const float *delta, const attention_bf16 *q,
                               const attention_bf16 *k, const attention_bf16 *v, int seq, int heads, int kv_heads,
                               float scale) {
    constexpr unsigned TILE_BYTES = ATTENTION_TILE * D * 2, ROWS_BYTES = 2 * ATTENTION_TILE * 4;
    ATTENTION_SHARED(unsigned char, memory);
    unsigned keys = attention_address(memory), values = keys + TILE_BYTES, queries = values + TILE_BYTES;
    unsigned douts = queries + 2 * TILE_BYTES, rows = douts + 2 * TILE_BYTES;
    int batch = static_cast<int>(blockIdx.x) / kv_heads, kv_head = static_cast<int>(blockIdx.x) % kv_heads;
    int first = static_cast<int>(blockIdx.y) * ATTENTION_TILE, group = heads / kv_heads;
    int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 * 16;
    long long query_step = static_cast<long long>(heads) * D, key_step = static_cast<long long>(kv_heads) * D;
    long long query_offset = batch * seq * query_step + static_cast<long long>(kv_head) * group * D;
    long long key_offset = batch * seq * key_step + static_cast<long long>(kv_head) * D;
    long long row_offset = (static_cast<long long>(batch) * heads + kv_head * group) * seq;
    q += query_offset;
    dout += query_offset;
    log_sums += row_offset;
    delta += row_offset;
    attention_fetch<D, ATTENTION_TILE>(keys, k + key_offset, key_step, first, seq);
    attention_fetch<D, ATTENTION_TILE>(values, v + key_offset, key_step, first, seq);
    attention_fetch_queries<D>(queries, douts, rows, q, dout, log_sums, delta, query_step, first, seq);
    float dks[1][D / 8][4], dvs[1][D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) dks[0][n][i] = dvs[0][n][i] = 0.0f;
    float scale_log2 = scale * ATTENTION_LOG2_E;
    int tiles = (seq - first + ATTENTION_TILE - 1) / ATTENTION_TILE, member = 0, tile = 0;
    for (int turn = 0; turn < group * tiles; turn++) {
        unsigned now = static_cast<unsigned>(turn & 1), next = 1 - now;
        int query = first + tile * ATTENTION_TILE;
        if (++tile == tiles) {
            tile = 0;
            member++;
        }
        attention_copy_wait();
        __syncthreads();
        if (turn + 1 < group * tiles)
            attention_fetch_queries<D>(queries + next * TILE_BYTES, douts + next * TILE_BYTES, rows + next * ROWS_BYTES,
                                       q + member * D, dout + member * D, log_sums + static_cast<long long>(member) * seq,
                                       delta + static_cast<long long>(member) * seq, query_step,
                                       first + tile * ATTENTION_TILE, seq);
        const float *kept =
            reinterpret_cast<const float *>(memory + 6 * TILE_BYTES + now * ROWS_BYTES) + lane % 4 * 2;
        float weights[1][ATTENTION_TILE / 8][4], dweights[1][ATTENTION_TILE / 8][4];
        attention_scores<D, 1, ATTENTION_TILE>(weights, keys, row, queries + now * TILE_BYTES);
        bool diagonal = query < first + ATTENTION_TILE;
        // Where a query is not there its row is 0, and so is all that it adds.
#pragma unroll
        for (int n = 0; n < ATTENTION_TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float log_sum = kept[8 * n + i % 2] * ATTENTION_LOG2_E;
                bool seen = !diagonal || first + row + lane / 4 + i / 2 * 8 <= query + 8 * n + lane % 4 * 2 + i % 2;
                weights[0][n][i] = seen ? attention_exp2(weights[0][n][i] * scale_log2 - log_sum) : 0.0f;
            }
        attention_sums<D, 1, ATTENTION_TILE>(dvs, weights, douts + now * TILE_BYTES);
        attention_scores<D, 1, ATTENTION_TILE>(dweights, values, row, douts + now * TILE_BYTES);
#pragma unroll
        for (int n = 0; n < ATTENTION_TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                dweights[0][n][i] = weights[0][n][i] * (dweights[0][n][i] - kept[ATTENTION_TILE + 8 * n + i % 2]);
        attention_sums<D, 1, ATTENTION_TILE>(dks, dweights, queries + now * TILE_BYTES);
    }
    float scales[1][2] = {{scale, scale}}, ones[1][2] = {{1.0f, 1.0f}};
    attention_write<D, 1>(dk + key_offset, dks, scales, memory, row, key_step, first, seq);
    attention_write<D, 1>(dv + key_offset, dvs, ones, memory + TILE_BYTES, row, key_step, first, seq);
}

// A block has one head's 128 queries, and takes 32 keys at a time. The grid is (batch · heads,
// tiles of queries), the longest tiles first.
template <int D>
__device__ __forceinline__ void
attention_tensor_backward_queries(attention_bf16 *dq, const attention_bf16 *dout, const float *log_sums,
                                  const float *delta, const attention_bf16 *q, const attention_bf16 *k,
                                  const attention_bf16 *v, int seq, int heads, int kv_heads, float scale) {
    constexpr int FRAGMENTS = 2, KEYS = 32;
    constexpr unsigned QUERIES_BYTES = ATTENTION_QUERIES * D * 2, KEYS_BYTES = KEYS * D * 2;
    ATTENTION_SHARED(unsigned char, memory);
    unsigned queries = attention_address(memory), douts = queries + QUERIES_BYTES, keys = douts + QUERIES_BYTES;
    unsigned values = keys + 2 * KEYS_BYTES;
    int batch = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
    int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * ATTENTION_QUERIES;
    int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 * 16 * FRAGMENTS;
    long long query_step = static_cast<long long>(heads) * D, key_step = static_cast<long long>(kv_heads) * D;
    long long query_offset = batch * seq * query_step + static_cast<long long>(head) * D;
    long long key_offset = batch * seq * key_step + static_cast<long long>(head / (heads / kv_heads)) * D;
    long long row_offset = (static_cast<long long>(batch) * heads + head) * seq;
    attention_fetch<D, ATTENTION_QUERIES>(queries, q + query_offset, query_step, first, seq);
    attention_fetch<D, ATTENTION_QUERIES>(douts, dout + query_offset, query_step, first, seq);
    attention_fetch<D, KEYS>(keys, k + key_offset, key_step, 0, seq);
    attention_fetch<D, KEYS>(values, v + key_offset, key_step, 0, seq);
    attention_copy_commit();
    float dqs[FRAGMENTS][D / 8][4], log_sum[FRAGMENTS][2], own[FRAGMENTS][2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = first + row + 16 * f + lane / 4 + 8 * half;
            log_sum[f][half] = query < seq ? log_sums[row_offset + query] * ATTENTION_LOG2_E : 0.0f;
            own[f][half] = query < seq ? delta[row_offset + query] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dqs[f][n][i] = 0.0f;
    }
    float scale_log2 = scale * ATTENTION_LOG2_E;
    int end = min(seq, first + ATTENTION_QUERIES);
    for (int key = 0, turn = 0; key < end; key += KEYS, turn ^= 1) {
        unsigned now = static_cast<unsigned>(turn) * KEYS_BYTES, next = KEYS_BYTES - now;
        attention_copy_wait();
        __syncthreads();
        if (key + KEYS < end) {
            attention_fetch<D, KEYS>(keys + next, k + key_offset, key_step, key + KEYS, seq);
            attention_fetch<D, KEYS>(values + next, v + key_offset, key_step, key + KEYS, seq);
            attention_copy_commit();
        }
        // The warp's last query sees none of these keys.
        if (key >= first + row + 16 * FRAGMENTS) continue;
        // How far the lane's first query lies beyond its first key.
        int distance = first + row + lane / 4 - key - lane % 4 * 2;
        float weights[FRAGMENTS][KEYS / 8][4], dweights[FRAGMENTS][KEYS / 8][4];
        attention_scores<D, FRAGMENTS, KEYS>(weights, queries, row, keys + now);
        attention_scores<D, FRAGMENTS, KEYS>(dweights, douts, row, values + now);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float weight = attention_exp2(weights[f][n][i] * scale_log2 - log_sum[f][i / 2]);
                    bool seen = distance >= 8 * n + i % 2 - 16 * f - i / 2 * 8;
                    dweights[f][n][i] = seen ? weight * (dweights[f][n][i] - own[f][i / 2]) : 0.0f;
                }
        attention_sums<D, FRAGMENTS, KEYS>(dqs, dweights, keys + now);
    }
    float scales[FRAGMENTS][2] = {{scale, scale}, {scale, scale}};
    attention_write<D, FRAGMENTS>(dq + query_offset, dqs, scales, memory, row, query_step, first, seq);
}

// Two blocks of 128 threads on a multiprocessor may have all of 255 registers each.
#define ATTENTION_TENSOR(D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)                                                    \
        attention_tensor_forward_##D(attention_bf16 *out, float *log_sums, const attention_bf16 *q,                    \
                                     const attention_bf16 *k, const attention_bf16 *v, int seq, int heads,             \
                                     int kv_heads, float scale) {                                                      \
        attention_tensor_forward<D>(out, log_sums, q, k, v, seq, heads, kv_heads, scale);                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention_tensor_backward_keys_##D(                \
        attention_bf16 *dk, attention_bf16 *dv, const attention_bf16 *dout, const float *log_sums, const float *delta, \
        const attention_bf16 *q, const attention_bf16 *k, const attention_bf16 *v, int seq, int heads, int kv_heads,   \
        float scale) {                                                                                                 \
        attention_tensor_backward_keys<D>(dk, dv, dout, log_sums, delta, q, k, v, seq, heads, kv_heads, scale);        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention_tensor_backward_queries_##D(             \
        attention_bf16 *dq, const attention_bf16 *dout, const float *log_sums, const float *delta,                     \
        const attention_bf16 *q, const attention_bf16 *k, const attention_bf16 *v, int seq, int heads, int kv_heads,   \
        float scale) {                                                                                                 \
        attention_tensor_backward_queries<D>(dq, dout, log_sums, delta, q, k, v, seq, heads, kv_heads, scale);         \
    }

ATTENTION_TENSOR(64)
ATTENTION_TENSOR(128)
