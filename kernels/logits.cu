// logits: what is kept of a run's last rows. Each sequence's row goes behind its recurrent slots, and the highest logit's token is found.
#include "common/rows.cuh"

// The first of the highest; `bad` counts what no token can be chosen from: NaN and plus infinity.
struct Best {
    float value;
    u32 token, bad, spare;
};

struct LogitsArgs {
    View x;
    const Batch* batch;
    // [segments][chunks]; then [segments].
    Best* parts;
    Best* best;
    // Floats of the slots; parts a row is cut into.
    u32 slots, chunks;
};

DEVICE Best better(const Best& a, const Best& b) {
    bool second = b.value > a.value || (b.value == a.value && b.token < a.token);
    Best r = second ? b : a;
    r.bad = a.bad + b.bad;
    return r;
}
DEVICE Best block_best(Best mine, Best* scratch) {
    for (u32 m = 16; m > 0; m /= 2) {
        Best other = {shuffle_xor(mine.value, m), shuffle_xor(mine.token, m), shuffle_xor(mine.bad, m), 0};
        mine = better(mine, other);
    }
    if (lane() == 0) scratch[threadIdx.x / 32] = mine;
    barrier();
    for (u32 w = 0; w < blockDim.x / 32; w++) mine = w ? better(mine, scratch[w]) : scratch[0];
    return mine;
}
DEVICE Best nothing() { return {float_of(0xff800000u), ~0u, 0, 0}; }

// Grid: (rows, chunks).
KERNEL_OF(256, logits, LogitsArgs) {
    begin();
    SHARED Best scratch[8];
    u32 row = blockIdx.x;
    if (row >= *a.x.rows) return;
    u32 per = (a.x.width + a.chunks - 1) / a.chunks, first = blockIdx.y * per, end = first + per < a.x.width ? first + per : a.x.width;
    const float* x = row_at(a.x, row);
    float* to = a.batch->state_write[row] + a.slots;
    Best mine = nothing();
    const u32 AHEAD = 4;
    for (u32 from = first + threadIdx.x; from < end; from += AHEAD * blockDim.x) {
        float v[AHEAD];
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) v[j] = from + j * blockDim.x < end ? x[from + j * blockDim.x] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) {
            u32 i = from + j * blockDim.x;
            if (i >= end) break;
            to[i] = v[j];
            if (!(v[j] < float_of(0x7f800000u))) mine.bad++;
            else if (v[j] > mine.value) mine.value = v[j], mine.token = i;
        }
    }
    mine = block_best(mine, scratch);
    if (threadIdx.x == 0) a.parts[row * a.chunks + blockIdx.y] = mine;
}

// Grid: (rows); a warp has a row.
KERNEL_OF(32, logits_best, LogitsArgs) {
    begin();
    SHARED Best scratch[1];
    u32 row = blockIdx.x;
    if (row >= *a.x.rows) return;
    Best mine = nothing();
    for (u32 i = threadIdx.x; i < a.chunks; i += 32) mine = better(mine, a.parts[row * a.chunks + i]);
    mine = block_best(mine, scratch);
    if (threadIdx.x == 0) a.best[row] = mine;
}
