// attention: softmax(mask(softcap(scale q k^T))) v for each query row by itself, of any width and of f32 as well. Rows of common widths in f16
// take attention_decode.cu, prompts attention_prompt.cu. Definitions: src/ops/attention.rs, src/ops/source_attention.rs.
//
// The positions that a row sees are cut into chunks by their number and by the batch's width, whatever else is in the batch. A block takes one
// chunk for up to G query heads that share a key/value head, so that keys and values are read once; chunks are put together in order by
// `attention_combine`. Bound by the read of keys and values.
#include "common/attention.cuh"

static const u32 THREADS = 128;
static const u32 MOST_CHUNKS = 64;

// Sums v over the lanes that differ in `mask` and all lower powers of two down to LOW; each lane keeps its share of the sums, N / ways of
// them, and `at` becomes the index of its first one.
template <u32 N, u32 LOW> struct Scatter {
    static DEVICE void sum(float* v, u32 mask, u32& at) {
        bool upper = lane() & mask;
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            float send = upper ? v[i] : v[i + N / 2], keep = upper ? v[i + N / 2] : v[i];
            v[i] = keep + shuffle_xor(send, mask);
        }
        if (upper) at += N / 2;
        if (mask > LOW) Scatter<N / 2, LOW>::sum(v, mask / 2, at);
    }
};
template <u32 LOW> struct Scatter<1, LOW> {
    static DEVICE void sum(float* v, u32 mask, u32&) {
        for (; mask >= LOW; mask /= 2) v[0] += shuffle_xor(v[0], mask);
    }
};

// Sixteen bytes of keys or values as floats.
template <bool HALF> DEVICE void floats_of(const Words4& w, float* out) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (HALF) {
            out[2 * i] = from_f16((u16)words[i]);
            out[2 * i + 1] = from_f16((u16)(words[i] >> 16));
        } else {
            out[i] = float_of(words[i]);
        }
    }
}

// VEC elements of values from `index` on, of which `left` are there.
template <bool HALF> DEVICE Words4 values_at(const u8* page, u32 index, u32 left, bool aligned) {
    const u32 VEC = HALF ? 8 : 4;
    if (aligned) return load16(page + (u64)index * (HALF ? 2 : 4));
    u32 w[4] = {};
    for (u32 i = 0; i < VEC && i < left; i++) {
        if (HALF) w[i / 2] |= (u32)((const u16*)page)[index + i] << i % 2 * 16;
        else w[i] = ((const u32*)page)[index + i];
    }
    return {w[0], w[1], w[2], w[3]};
}

// Of shared memory: queries [G][key_dim], scores of two tiles, per-head numbers, and from a multiple of sixteen bytes on the shares of the sums.
template <u32 G, bool HALF> DEVICE void attend_rows(const AttentionArgs& a, u8* memory) {
    const u32 VEC = HALF ? 8 : 4, AHEAD = 8;
    u32 rows = *a.y.rows, row = blockIdx.z, chunk = blockIdx.x, bytes = HALF ? 2 : 4;
    // What the batch says, and the way of the first tile into the second cache, do not wait for the kernels before.
    u32 segment = row < rows ? a.batch->segment_of[row] : 0;
    bool ours = row < rows && a.batch->segment[segment].count < a.most_rows;
    Span span = ours ? span_of(a, row) : Span();
    u32 chunks = ours ? chunks_of(span) : 0;
    u32 group = a.heads / a.kv.heads, blocks = (group + G - 1) / G;
    u32 kv_head = blockIdx.y / blocks, head = kv_head * group + blockIdx.y % blocks * G;
    u32 heads = (kv_head + 1) * group - head < G ? (kv_head + 1) * group - head : G;
    u32 key_dim = a.kv.key_dim, value_dim = a.kv.value_dim;
    const u8* const* pages = (const u8* const*)a.batch->pages[(u64)segment * a.batch->kv_states + a.state];
    if (chunk < chunks) {
        u32 from = span.start + chunk * span.per_chunk * TILE;
        for (u32 p = from; p < from + TILE && p < span.end; p += PAGE) {
            prefetch_lines(pages[p / PAGE] + first_key(a.kv, kv_head) * bytes, PAGE * (key_dim + value_dim) * bytes);
        }
    }
    begin();
    if (!ours) return;
    if (chunk >= chunks) {
        // A source without tokens gives zeros.
        if (chunk == 0)
            for (u32 i = threadIdx.x; i < heads * value_dim; i += THREADS) store_one(a.y, row, head * value_dim + i, 0.0f);
        return;
    }
    float* q = (float*)memory;
    float* scores = q + G * key_dim;
    float* most = scores + 2 * G * TILE;
    float* total = most + G;
    float* factor = total + G;
    // On a multiple of sixteen bytes.
    float* room = q + (G * (key_dim + 2 * TILE + 3) + 3) / 4 * 4;

    for (u32 i = threadIdx.x; i < G * key_dim; i += THREADS) q[i] = i < heads * key_dim ? row_at(a.q, row)[head * key_dim + i] : 0.0f;
    if (threadIdx.x < G) most[threadIdx.x] = LOWEST, total[threadIdx.x] = 0.0f;
    u32 warp = threadIdx.x / 32;
    // Values: thread (unit, share) takes VEC dims of every `shares`-th position.
    u32 units = (value_dim + VEC - 1) / VEC, shares = THREADS / units;
    u32 unit = threadIdx.x % units, share = threadIdx.x / units;
    u32 value_base = first_value(a.kv, kv_head) + unit * VEC;
    u32 left = value_dim - unit * VEC < VEC ? value_dim - unit * VEC : VEC;
    // Values that are loaded ahead: only where they are whole words of sixteen bytes.
    u32 ready = value_dim % VEC == 0 ? AHEAD : 0;
    float acc[G][VEC] = {};
    barrier();

    u32 tile = chunk * span.per_chunk, last_tile = tile + span.per_chunk < span.tiles ? tile + span.per_chunk : span.tiles;
    for (u32 parity = 0; tile < last_tile; tile++, parity ^= 1) {
        u32 from = span.start + tile * TILE;
        float* s = scores + parity * G * TILE;
        // The first values are on their way while scores are computed.
        Words4 ahead[AHEAD] = {};
        u32 here = from < span.first ? span.first - from : 0, until = span.end - from < TILE ? span.end - from : TILE;
        if (share < shares) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 p = share + i * shares;
                if (i < ready && p >= here && p < until) ahead[i] = load16(pages[(from + p) / PAGE] + (u64)(value_base + (from + p) % PAGE * value_dim) * bytes);
            }
        }
        // Scores: a warp takes sixteen positions, a lane VEC of them at every 32 / (16 / VEC)th dim.
        u32 position = from + warp * 16;
        float dots[G * VEC] = {};
        if (position < span.end) {
            const u8* keys = pages[position / PAGE] + (first_key(a.kv, kv_head) + position % PAGE / 16 * 16 * key_dim) * bytes;
            u32 count = key_dim * (16 / VEC);
#pragma unroll 8
            for (u32 i = lane(); i < count; i += 32) {
                float k[VEC];
                floats_of<HALF>(load16(keys + i * 16), k);
                u32 d = i / (16 / VEC);
#pragma unroll
                for (u32 g = 0; g < G; g++) {
                    float x = q[g * key_dim + d];
#pragma unroll
                    for (u32 j = 0; j < VEC; j++) dots[g * VEC + j] = fused(x, k[j], dots[g * VEC + j]);
                }
            }
        }
        u32 at = 0;
        Scatter<G * VEC, 16 / VEC>::sum(dots, 16u, at);
        const u32 WAYS = 32 / (16 / VEC), LEFT = G * VEC / WAYS ? G * VEC / WAYS : 1;
#pragma unroll
        for (u32 i = 0; i < LEFT; i++) {
            u32 g = (at + i) / VEC, p = warp * 16 + lane() % (16 / VEC) * VEC + (at + i) % VEC;
            float score = dots[i] * a.scale;
            if (a.softcap != 0.0f) score = a.softcap * tanhf(score / a.softcap);
            s[g * TILE + p] = p >= here && p < until ? score : LOWEST;
        }
        barrier();
        // A warp per head: the running maximum, and scores become weights.
        for (u32 g = warp; g < heads; g += THREADS / 32) {
            float s0 = s[g * TILE + lane()], s1 = s[g * TILE + 32 + lane()], before = most[g];
            float now = largest(before, warp_max(largest(s0, s1)));
            float w0 = lane() >= here && lane() < until ? exponential(s0 - now) : 0.0f;
            float w1 = lane() + 32 >= here && lane() + 32 < until ? exponential(s1 - now) : 0.0f;
            float sum = warp_sum(w0 + w1);
            s[g * TILE + lane()] = w0;
            s[g * TILE + 32 + lane()] = w1;
            // Every lane has read the maximum of before.
            warp_barrier();
            if (lane() == 0) {
                factor[g] = exponential(before - now);
                total[g] = total[g] * factor[g] + sum;
                most[g] = now;
            }
        }
        barrier();
        if (share < shares) {
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                float f = g < heads ? factor[g] : 0.0f;
#pragma unroll
                for (u32 j = 0; j < VEC; j++) acc[g][j] *= f;
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 p = share + i * shares;
                if (i < ready && p >= here && p < until) {
                    float v[VEC];
                    floats_of<HALF>(ahead[i], v);
#pragma unroll
                    for (u32 g = 0; g < G; g++) {
                        float w = g < heads ? s[g * TILE + p] : 0.0f;
#pragma unroll
                        for (u32 j = 0; j < VEC; j++) acc[g][j] = fused(w, v[j], acc[g][j]);
                    }
                }
            }
            for (u32 p = share + ready * shares; p < until; p += shares) {
                if (p < here) continue;
                float v[VEC];
                floats_of<HALF>(values_at<HALF>(pages[(from + p) / PAGE], value_base + (from + p) % PAGE * value_dim, left, ready), v);
#pragma unroll
                for (u32 g = 0; g < G; g++) {
                    float w = g < heads ? s[g * TILE + p] : 0.0f;
#pragma unroll
                    for (u32 j = 0; j < VEC; j++) acc[g][j] = fused(w, v[j], acc[g][j]);
                }
            }
        }
        // The next tile's scores go to the other half; its factors are written after a barrier that all of this tile's readers have passed.
    }

    // The sums over shares, in order.
    if (share < shares) {
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            float* to = room + (g * shares + share) * value_dim + unit * VEC;
#pragma unroll
            for (u32 j = 0; j < VEC; j += 4) {
                if (ready) *(Words4*)(to + j) = {bits_of(acc[g][j]), bits_of(acc[g][j + 1]), bits_of(acc[g][j + 2]), bits_of(acc[g][j + 3])};
            }
#pragma unroll
            for (u32 j = 0; j < VEC; j++)
                if (!ready && j < left) to[j] = acc[g][j];
        }
    }
    barrier();
    for (u32 i = threadIdx.x; i < heads * value_dim; i += THREADS) {
        u32 g = i / value_dim, d = i % value_dim;
        u64 index = ((u64)row * a.heads + head + g) * a.chunks + chunk;
        float sum = 0.0f;
        for (u32 n = 0; n < shares; n++) sum += room[(g * shares + n) * value_dim + d];
        if (a.chunks > 1) {
            if (d == 0) a.partial[2 * index] = most[g], a.partial[2 * index + 1] = total[g];
            a.partial[2 * (u64)a.partial_rows * a.heads * a.chunks + index * value_dim + d] = sum;
            continue;
        }
        float divisor = total[g];
        if (a.sinks) {
            float sink = a.sinks[head + g], now = largest(most[g], sink), factor = exponential(most[g] - now);
            divisor = (divisor * factor + exponential(sink - now)) / factor;
        }
        store_one(a.y, row, (head + g) * value_dim + d, sum / divisor);
    }
}

// Grid: (chunks, key/value heads * blocks of G query heads, rows). Shared: see `attend_rows`.
#define ATTENTION(name, G, HALF)                \
    KERNEL_OF(128, name, AttentionArgs) {       \
        SHARED_BYTES(memory);                   \
        attend_rows<G, HALF>(a, memory);        \
    }
ATTENTION(attention_half_1, 1, true)
ATTENTION(attention_half_4, 4, true)
ATTENTION(attention_half_8, 8, true)
ATTENTION(attention_float_1, 1, false)
ATTENTION(attention_float_4, 4, false)

// Grid: (heads, rows): the chunks of a row and head, in order.
KERNEL_OF(256, attention_combine, AttentionArgs) {
    SHARED float weight[MOST_CHUNKS];
    u32 rows = *a.y.rows, head = blockIdx.x, row = blockIdx.y;
    bool ours = row < rows && a.batch->segment[a.batch->segment_of[row]].count < a.most_rows;
    u32 chunks = ours ? chunks_of(span_of(a, row)) : 0;
    begin();
    if (chunks == 0) return;
    const float* stats = a.partial + 2 * ((u64)row * a.heads + head) * a.chunks;
    const float* values = a.partial + 2 * (u64)a.partial_rows * a.heads * a.chunks + ((u64)row * a.heads + head) * a.chunks * a.kv.value_dim;
    float peak = a.sinks ? a.sinks[head] : LOWEST;
    for (u32 c = 0; c < chunks; c++) peak = largest(peak, stats[2 * c]);
    if (threadIdx.x < chunks) weight[threadIdx.x] = exponential(stats[2 * threadIdx.x] - peak);
    barrier();
    float total = a.sinks ? exponential(a.sinks[head] - peak) : 0.0f;
    for (u32 c = 0; c < chunks; c++) total = fused(weight[c], stats[2 * c + 1], total);
    for (u32 d = threadIdx.x; d < a.kv.value_dim; d += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 c = 0; c < chunks; c++) sum = fused(weight[c], values[c * a.kv.value_dim + d], sum);
        store_one(a.y, row, head * a.kv.value_dim + d, sum / total);
    }
}
