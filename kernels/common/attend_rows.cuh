// Attention over rows that are met one by one: a warp has up to four heads of one query, lane i the elements i, i + 32, .. of queries,
// keys and values. A query's rows may be cut into splits, each on warps of its own; `attend_merge` puts them together in order.
#pragma once
#include "records.cuh"

// Sums over a warp of H values at once: a lane gets the sum of value `lane() * H / 32`.
template <u32 H> DEVICE float spread_sum(float (&v)[H]) {
    u32 m = 16;
#pragma unroll
    for (u32 half = H / 2; half > 0; half /= 2, m /= 2) {
        bool upper = lane() & m;
#pragma unroll
        for (u32 i = 0; i < half; i++) {
            float mine = upper ? v[i + half] : v[i], other = upper ? v[i] : v[i + half];
            v[i] = mine + shuffle_xor(other, m);
        }
    }
    for (; m > 0; m /= 2) v[0] += shuffle_xor(v[0], m);
    return v[0];
}

// Running softmax of H heads. `top` and `total` of a lane are those of head `lane() * H / 32`.
template <u32 H, u32 QC, u32 VC> struct Heads {
    float q[H][QC], sum[H][VC];
    float top, total;
};

template <u32 H, u32 QC, u32 VC> DEVICE void heads_begin(Heads<H, QC, VC>& s, const float* q, u32 heads, u32 width, const float* sinks) {
    u32 mine = lane() * H / 32;
    // A sink is a score that was there before all keys: its weight counts, its value is nothing.
    s.top = sinks && mine < heads ? sinks[mine] : -infinite();
    s.total = sinks && mine < heads ? 1.0f : 0.0f;
    for (u32 h = 0; h < H; h++) {
        for (u32 c = 0; c < QC; c++) s.q[h][c] = h < heads && c * 32 + lane() < width ? q[h * width + c * 32 + lane()] : 0.0f;
        for (u32 c = 0; c < VC; c++) s.sum[h][c] = 0.0f;
    }
}

// A part of a record, elements `first ..`: what is beyond `width` is 0.
template <u32 C> DEVICE void load_row(const Records& r, const Record& record, u32 first, u32 width, float (&x)[C]) {
    if (r.half) {
        const u16* p = (const u16*)record.page + record.at + first;
        for (u32 c = 0; c < C; c++) x[c] = c * 32 + lane() < width ? from_f16(p[c * 32 + lane()]) : 0.0f;
    } else {
        const float* p = (const float*)record.page + record.at + first;
        for (u32 c = 0; c < C; c++) x[c] = c * 32 + lane() < width ? p[c * 32 + lane()] : 0.0f;
    }
}

// Takes in one key with its value.
template <u32 H, u32 QC, u32 VC> DEVICE void heads_meet(Heads<H, QC, VC>& s, const float* k, const float* v, float scale) {
    float dot[H];
#pragma unroll
    for (u32 h = 0; h < H; h++) {
        dot[h] = 0.0f;
#pragma unroll
        for (u32 c = 0; c < QC; c++) dot[h] = fused(s.q[h][c], k[c], dot[h]);
    }
    float score = spread_sum<H>(dot) * scale;
    // Whether any head has a new maximum; all lanes agree.
    u32 higher = score > s.top;
    for (u32 m = 16; m > 16 / H; m /= 2) higher |= shuffle_xor(higher, m);
    if (higher) {
        float top = largest(s.top, score), shrink = expf(s.top - top);
        // Nothing was met so far: -inf minus -inf.
        if (!(s.top > -infinite())) shrink = 0.0f;
        s.top = top, s.total *= shrink;
#pragma unroll
        for (u32 h = 0; h < H; h++) {
            float f = shuffle(shrink, h * (32 / H));
#pragma unroll
            for (u32 c = 0; c < VC; c++) s.sum[h][c] *= f;
        }
    }
    float weight = expf(score - s.top);
    s.total += weight;
#pragma unroll
    for (u32 h = 0; h < H; h++) {
        float w = shuffle(weight, h * (32 / H));
#pragma unroll
        for (u32 c = 0; c < VC; c++) s.sum[h][c] = fused(w, v[c], s.sum[h][c]);
    }
}

// What a query's splits leave: for each row and head `splits` times [value_dim] sums, the top score and the total.
struct Splits {
    // Null where there is one split, which writes the answer.
    float* data;
    u32 splits, value_dim;
    // First row of the grid, which `data` begins with, and how many there are.
    u32 first, rows;
};

// Writes the answers of one split, or what is needed to put splits together. Heads are numbered from `first` on.
template <u32 H, u32 QC, u32 VC> DEVICE void heads_end(const Heads<H, QC, VC>& s, const Splits& splits, float* y, u32 row, u32 first, u32 heads, u32 all, u32 split) {
    u32 dim = splits.value_dim;
    float factor = s.total > 0.0f ? 1.0f / s.total : 0.0f;
    for (u32 h = 0; h < H; h++) {
        u32 from = h * (32 / H);
        float f = shuffle(factor, from), top = shuffle(s.top, from), total = shuffle(s.total, from);
        if (h >= heads) continue;
        float* to = splits.data ? splits.data + (((u64)(row - splits.first) * all + first + h) * splits.splits + split) * (dim + 2) : y + (u64)(first + h) * dim;
        if (splits.data) f = 1.0f;
        for (u32 c = 0; c < VC; c++) {
            if (c * 32 + lane() < dim) to[c * 32 + lane()] = s.sum[h][c] * f;
        }
        if (splits.data && lane() == 0) to[dim] = top, to[dim + 1] = total;
    }
}

struct AttendMergeArgs {
    View y;
    Splits splits;
    u32 heads, spare;
};

// Head `blockIdx.y` of row `blockIdx.x`.
DEVICE void attend_merge_of(const AttendMergeArgs& a) {
    u32 row = a.splits.first + blockIdx.x, head = blockIdx.y, dim = a.splits.value_dim, n = a.splits.splits;
    if (row >= *a.y.rows) return;
    const float* parts = a.splits.data + ((u64)blockIdx.x * a.heads + head) * n * (dim + 2);
    float top = -infinite(), total = 0.0f;
    for (u32 s = 0; s < n; s++) top = largest(top, parts[s * (dim + 2) + dim]);
    for (u32 s = 0; s < n; s++) {
        const float* part = parts + s * (dim + 2);
        if (part[dim + 1] > 0.0f) total = fused(expf(part[dim] - top), part[dim + 1], total);
    }
    float factor = total > 0.0f ? 1.0f / total : 0.0f;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 s = 0; s < n; s++) {
            const float* part = parts + s * (dim + 2);
            if (part[dim + 1] > 0.0f) sum = fused(expf(part[dim] - top), part[i], sum);
        }
        row_at(a.y, row)[(u64)head * dim + i] = sum * factor;
    }
}

// This split's share of `n` items: whole, in order, at least 32 where there are as many.
DEVICE void split_of(u32 n, u32 splits, u32 split, u32& begin, u32& end) {
    u32 share = most(over_up(n, splits), 32);
    begin = least(n, split * share), end = least(n, begin + share);
}
