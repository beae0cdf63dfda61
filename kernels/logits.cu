// logits: what is kept of a run's last rows. Each sequence's row goes behind its recurrent slots, and the highest logit's token is found; where
// somebody will draw from a row, its highest logits too, and the sum that probabilities are shares of. The host draws: src/sampling/shortlist.rs.
#include "common/select.cuh"

// The first of the highest; `bad` counts what no token can be chosen from: NaN and plus infinity.
struct Best {
    float value;
    u32 token, bad, spare;
};

struct LogitsArgs {
    View x;
    const Batch* batch;
    // [segments][chunks]; then [segments], in the place whose turn it is, so that the host may read one while the next step writes the other.
    Best* parts;
    Best* best[2];
    const u32* turn;
    // The tokens alone, for the step that follows (batch.cu); 0 where none can be chosen, which is a token.
    i32* tokens;
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
    if (threadIdx.x == 0) {
        (*a.turn ? a.best[1] : a.best[0])[row] = mine;
        a.tokens[row] = mine.bad || !(mine.value > float_of(0xff800000u)) ? 0 : (i32)mine.token;
    }
}

// Logits that are handed out.
static const u32 CANDIDATES = 128;

struct Candidate {
    float value;
    u32 token;
};

struct CandidatesArgs {
    View x;
    const Batch* batch;
    // [segments][chunks]; of each its highest logit, the sum of e^(logit - highest), and CANDIDATES, absent ones with token ~0.
    Best* parts;
    double* part_sums;
    Candidate* part_candidates;
    // The same by segment, candidates in order.
    Best* best;
    double* sums;
    Candidate* candidates;
    // Floats of the slots; parts a row is cut into.
    u32 slots, chunks;
};

// Grid: (rows, chunks).
KERNEL_OF(256, logits_candidates, CandidatesArgs) {
    begin();
    SHARED Best scratch[8];
    SHARED double sums[33];
    SHARED Selection selection;
    u32 row = blockIdx.x;
    if (row >= *a.x.rows) return;
    u32 per = (a.x.width + a.chunks - 1) / a.chunks, first = least(blockIdx.y * per, a.x.width), end = least(first + per, a.x.width);
    const float* x = row_at(a.x, row);
    float* to = a.batch->state_write[row] + a.slots;
    Best mine = nothing();
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float v = x[i];
        to[i] = v;
        if (!(v < infinite())) mine.bad++;
        else if (v > mine.value) mine.value = v, mine.token = i;
    }
    mine = block_best(mine, scratch);
    double sum = 0.0;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float v = x[i];
        if (v > -infinite() && v < infinite()) sum += exp((double)v - (double)mine.value);
    }
    sum = block_sum(sum, sums);
    u64 part = (u64)row * a.chunks + blockIdx.y;
    if (threadIdx.x == 0) a.parts[part] = mine, a.part_sums[part] = sum;
    Candidate* list = a.part_candidates + part * CANDIDATES;
    u32 count = select_best(end - first, CANDIDATES, selection, [&](u32 i) { return ordered(x[first + i]); }, [&](u32 rank, u32 i) { list[rank] = {x[first + i], first + i}; });
    for (u32 i = count + threadIdx.x; i < CANDIDATES; i += blockDim.x) list[i] = {-infinite(), ~0u};
}

// Grid: (rows): the parts together; of candidates with the same logit the lower token comes first.
KERNEL_OF(256, logits_candidates_best, CandidatesArgs) {
    begin();
    SHARED Best scratch[8];
    SHARED double sums[33];
    SHARED Selection selection;
    SHARED Candidate chosen[CANDIDATES];
    u32 row = blockIdx.x;
    if (row >= *a.x.rows) return;
    u64 part = (u64)row * a.chunks;
    Best mine = nothing();
    for (u32 i = threadIdx.x; i < a.chunks; i += blockDim.x) mine = better(mine, a.parts[part + i]);
    mine = block_best(mine, scratch);
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < a.chunks; i += blockDim.x)
        if (a.part_sums[part + i] > 0.0) sum += a.part_sums[part + i] * exp((double)a.parts[part + i].value - (double)mine.value);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) a.best[row] = mine, a.sums[row] = sum;
    // Parts, and what is in them, ascend by token.
    const Candidate* list = a.part_candidates + part * CANDIDATES;
    auto key = [&](u32 i) { return list[i].token == ~0u ? 0 : ordered(list[i].value); };
    u32 count = select_best(a.chunks * CANDIDATES, CANDIDATES, selection, key, [&](u32 rank, u32 i) { chosen[rank] = list[i]; });
    barrier();
    for (u32 i = threadIdx.x; i < CANDIDATES; i += blockDim.x) {
        Candidate own = i < count ? chosen[i] : Candidate{-infinite(), ~0u};
        u32 before = i < count ? 0 : i, mine = ordered(own.value);
        for (u32 j = 0; j < count && i < count; j++) {
            u32 other = ordered(chosen[j].value);
            before += other > mine || (other == mine && j < i);
        }
        a.candidates[(u64)row * CANDIDATES + before] = own;
    }
}
