// engram_rows, engram_inject: n-gram memory; src/ops/engram.rs has the definitions.
#include "common/records.cuh"

static const u32 ENGRAM_TOKENS = 16, ENGRAM_COLUMNS = 64;
struct EngramRowsArgs {
    View y;
    const Batch* batch;
    Records history;
    // Folded ids by token, `vocabulary` of them.
    const float* map;
    i64 pad;
    u32 vocabulary, tokens;
    // Columns of one length of n-grams; first of the columns that are filled here, and how many.
    u32 heads, start, columns, spare;
    i64 multiplier[ENGRAM_TOKENS];
    u32 prime[ENGRAM_COLUMNS];
    u32 offset[ENGRAM_COLUMNS];
};

// Grid: (rows / threads, columns).
KERNEL_OF(64, engram_rows, EngramRowsArgs) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x, column = a.start + blockIdx.y;
    if (row >= *a.y.rows) return;
    u32 position = a.batch->positions[row];
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.history.kv);
    bool ended = false;
    u64 mixed = 0;
    for (u32 i = 0; i < column / a.heads + 2; i++) {
        i64 id = a.pad;
        ended = ended || i > position;
        if (!ended) {
            u32 token = (u32)record_load(a.history, record_of(a.history, pages, position - i), 0);
            i64 folded = (i64)a.map[least(token, a.vocabulary - 1)];
            ended = folded < 0;
            if (!ended) id = folded;
        }
        mixed ^= (u64)id * (u64)a.multiplier[i];
    }
    i64 size = a.prime[blockIdx.y], rest = (i64)mixed % size;
    row_at(a.y, row)[column] = float_of((u32)(rest < 0 ? rest + size : rest) + a.offset[blockIdx.y]);
}

struct EngramInjectArgs {
    View x, kv, y;
    const float* q;
    const float* k;
    u32 streams;
    float eps;
};

// Grid: (rows, streams). Sums in f64, as the definition's.
KERNEL_OF(256, engram_inject, EngramInjectArgs) {
    begin();
    SHARED double scratch[33];
    u32 row = blockIdx.x, width = a.x.width / a.streams, first = blockIdx.y * width;
    if (row >= *a.y.rows) return;
    const float* x = row_at(a.x, row) + first;
    const float* key = row_at(a.kv, row) + first;
    const float* value = row_at(a.kv, row) + a.x.width;
    double dot = 0.0, xx = 0.0, kk = 0.0;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        double v = x[i], w = key[i];
        dot += v * w * a.q[first + i] * a.k[first + i];
        xx += v * v;
        kk += w * w;
    }
    dot = block_sum(dot, scratch), xx = block_sum(xx, scratch), kk = block_sum(kk, scratch);
    double n = width;
    dot /= sqrt((xx / n + a.eps) * (kk / n + a.eps) * n);
    double size = dot < 0.0 ? -dot : dot, root = sqrt(size < 1e-6 ? 1e-6 : size);
    float gate = (float)sigmoid(dot < 0.0 ? -root : root);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) row_at(a.y, row)[first + i] = fused(gate, value[i], x[i]);
}
