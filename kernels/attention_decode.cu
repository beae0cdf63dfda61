// attention_decode: attention of query rows one by one over keys and values in f16, on tensor cores: what decoding uses. Definitions:
// src/ops/attention.rs, src/ops/source_attention.rs.
//
// A block takes one chunk of a row's positions for up to 4 C query heads that share a key/value head; its warps take tiles of 64 positions in
// turn, each by itself, straight from memory into registers. Keys and values are the A operands of products of 16 x 8, the eight columns are
// four heads in two limbs of f16 each, so that queries and weights keep the bits of an f32. Bound by the read of keys and values.
//
// With g = lane / 4 and t = lane % 4 a lane loads, of keys, positions 8 g .. 8 g + 7 of dims t, t + 4, t + 8, t + 12 of sixteen; of values, dims
// 8 g .. 8 g + 7 of positions 16 t + 4 s .. + 3. Which row or k of a product that is does not matter as long as both operands agree; word j of
// four loads makes one operand, whose rows are elements 2 j and 2 j + 1.
#include "common/attention.cuh"

// Where a lane's keys and values of a tile are.
struct Here {
    const u8 *keys, *values;
    // Last row of values that is there, counted from the lane's first.
    i32 last;
};

template <u32 D> DEVICE Here here_of(const AttentionArgs& a, const u8* const* pages, u32 kv_head, u32 from, u32 end) {
    u32 g = lane() / 4, t = lane() % 4, left = end - from;
    // Without a second page the first is met twice; the second time its scores do not count.
    bool second = left > PAGE;
    const u8* keys = pages[from / PAGE + (second && g >= 4)];
    const u8* values = pages[from / PAGE + (second && t >= 2)];
    if (second && t >= 2) left -= PAGE;
    Here h;
    h.keys = keys + (first_key(a.kv, kv_head) + g / 2 % 2 * 16 * D + t * 16 + g % 2 * 8) * 2;
    h.values = values + (first_value(a.kv, kv_head) + t % 2 * 16 * D + g * 8) * 2;
    h.last = (i32)(left < PAGE ? left : PAGE) - 1 - (i32)(t % 2 * 16);
    return h;
}

// Loads come in units: sixteen dims of keys (unit u), or four positions a lane of 64 dims of values (positions s, dims `half`).
DEVICE void load_keys(const Here& h, u32 u, Words4 (&w)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = load_passing(h.keys + u * 512 + i * 128);
}
template <u32 D> DEVICE void load_values(const Here& h, u32 s, u32 half, Words4 (&w)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        // What lies behind the last position may be anything, even no number, so the last one is met instead, with a weight of 0.
        i32 at = (i32)(s * 4 + i);
        w[i] = load_passing(h.values + (at < h.last ? at : h.last) * (i32)(D * 2) + half * 128);
    }
}

DEVICE u32 word_of(const Words4& w, u32 j) { return j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w; }
DEVICE void operand(const Words4 (&w)[4], u32 j, u32 (&a)[4]) {
    u32 w0 = word_of(w[0], j), w1 = word_of(w[1], j), w2 = word_of(w[2], j), w3 = word_of(w[3], j);
    a[0] = permute(w0, w1, 0x5410), a[1] = permute(w0, w1, 0x7632), a[2] = permute(w2, w3, 0x5410), a[3] = permute(w2, w3, 0x7632);
}

// `memory`: [C][D / 16] 256 bytes of queries, [4 C] scales, [WARPS][4 C] maxima and sums, [WARPS][4 C][D] values.
template <u32 D, u32 C, u32 WARPS, u32 AHEAD> DEVICE void decode_rows(const AttentionArgs& a, u8* memory) {
    const u32 KEYS = D / 16, HALVES = D / 64, HEADS = 4 * C;
    u32 rows = *a.y.rows, row = blockIdx.z, chunk = blockIdx.x;
    let_next_begin();
    if (row >= rows) return wait_for_before();
    u32 segment = a.batch->segment_of[row];
    Segment seg = a.batch->segment[segment];
    if (seg.count >= a.most_rows) return wait_for_before();
    Span span = span_of(a, row);
    u32 chunks = chunks_of(span), group = a.heads / a.kv.heads, blocks = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.y / blocks, head = kv_head * group + blockIdx.y % blocks * HEADS;
    u32 heads = (kv_head + 1) * group - head < HEADS ? (kv_head + 1) * group - head : HEADS;
    if (chunk >= chunks) {
        wait_for_before();
        // A source without tokens gives zeros.
        if (chunk == 0)
            for (u32 i = threadIdx.x; i < heads * D; i += WARPS * 32) store_one(a.y, row, head * D + i, 0.0f);
        return;
    }
    const u8* const* pages = (const u8* const*)a.batch->pages[(u64)segment * a.batch->kv_states + a.state];
    u32 warp = threadIdx.x / 32, g = lane() / 4, t = lane() % 4;
    u32 tile = chunk * span.per_chunk + warp, first_tile = chunk * span.per_chunk;
    u32 last_tile = first_tile + span.per_chunk < span.tiles ? first_tile + span.per_chunk : span.tiles;

    Words4 ring[AHEAD][4];
    Here here = {};
    bool any = tile < last_tile, early = false;
    if (any) {
        u32 from = span.start + tile * TILE;
        here = here_of<D>(a, pages, kv_head, from, span.end);
        // Positions of earlier runs are there already.
        early = !a.source && from + TILE <= seg.position;
    }
#pragma unroll
    for (u32 u = 0; u < AHEAD; u++)
        if (early) load_keys(here, u, ring[u]);
    wait_for_before();
#pragma unroll
    for (u32 u = 0; u < AHEAD; u++)
        if (any && !early) load_keys(here, u, ring[u]);

    // Queries as B operands, [C][KEYS][32 lanes][4]: column g is limb g / 4 of head g % 4. A power of two brings each head to where f16 holds it.
    u16* queries = (u16*)memory;
    float* scales = (float*)(memory + C * KEYS * 256);
    for (u32 h = warp; h < HEADS; h += WARPS) {
        const float* x = row_at(a.q, row) + (head + h) * D;
        float v[D / 32], peak = 0.0f;
#pragma unroll
        for (u32 i = 0; i < D / 32; i++) {
            v[i] = h < heads ? x[i * 32 + lane()] : 0.0f;
            peak = largest(peak, magnitude(v[i]));
        }
        u32 exponent = bits_of(warp_max(peak)) >> 23;
        float power = exponent == 0 || exponent == 255 ? 1.0f : float_of((exponent > 10 ? exponent - 9 : 1) << 23), inverse = 1.0f / power;
        if (lane() == 0) scales[h] = power * a.scale;
#pragma unroll
        for (u32 i = 0; i < D / 32; i++) {
            u32 d = i * 32 + lane();
            float scaled = v[i] * inverse;
            u16 high = to_f16(scaled);
            u16* to = queries + ((h / 4 * KEYS + d / 16) * 32 + h % 4 * 4 + d % 4) * 4 + d % 16 / 4;
            to[0] = high;
            to[64] = to_f16(scaled - from_f16(high));
        }
    }
    barrier();
    float scale[C][2];
#pragma unroll
    for (u32 i = 0; i < 2 * C; i++) scale[i / 2][i % 2] = scales[i / 2 * 4 + t % 2 * 2 + i % 2];

    // A lane's columns are heads 2 (t % 2) and the next one.
    float acc[C][HALVES][4][4] = {}, most[C][2], total[C][2] = {};
#pragma unroll
    for (u32 c = 0; c < C; c++) most[c][0] = most[c][1] = LOWEST;
    for (; tile < last_tile; tile += WARPS) {
        u32 from = span.start + tile * TILE;
        bool more = tile + WARPS < last_tile;
        Here then = here;
        if (more) then = here_of<D>(a, pages, kv_head, from + WARPS * TILE, span.end);
        float score[C][4][4] = {};
        u32 weight[C][4][2];
        // A ring of units: each makes room for the one that comes AHEAD later, of keys, of values, of the next tile's keys.
#pragma unroll 1
        for (u32 u = 0; u < KEYS; u += AHEAD) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                Words2 q[C];
#pragma unroll
                for (u32 c = 0; c < C; c++) q[c] = load8(queries + ((c * KEYS + u + i) * 32 + lane()) * 4);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    u32 w[4];
                    operand(ring[i], j, w);
#pragma unroll
                    for (u32 c = 0; c < C; c++) mma_f16(score[c][j], w, q[c].x, q[c].y);
                }
                if (u + AHEAD < KEYS) load_keys(here, u + AHEAD + i, ring[i]);
                else load_values<D>(here, i / HALVES, i % HALVES, ring[i]);
            }
        }
#pragma unroll
        for (u32 c = 0; c < C; c++) {
            float peak[2] = {LOWEST, LOWEST}, now[2], factor[2], sum[2] = {};
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                u32 j = i / 4, r = i / 2 % 2, e = i % 2, position = from + g * 8 + j * 2 + r;
                float s = score[c][j][r * 2 + e];
                // Both limbs.
                s = (s + shuffle_xor(s, 2u)) * scale[c][e];
                if (a.softcap != 0.0f) s = a.softcap * tanhf(s / a.softcap);
                s = position >= span.first && position < span.end ? s : LOWEST;
                score[c][j][r * 2 + e] = s;
                peak[e] = largest(peak[e], s);
            }
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
#pragma unroll
                for (u32 m = 4; m < 32; m *= 2) peak[e] = largest(peak[e], shuffle_xor(peak[e], m));
                now[e] = largest(most[c][e], peak[e]);
                factor[e] = exponential(most[c][e] - now[e]);
                most[c][e] = now[e];
            }
            u32 pairs[2][4];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 j = i / 2, e = i % 2, position = from + g * 8 + j * 2;
                float w0 = position >= span.first && position < span.end ? exponential(score[c][j][e] - now[e]) : 0.0f;
                float w1 = position + 1 >= span.first && position + 1 < span.end ? exponential(score[c][j][2 + e] - now[e]) : 0.0f;
                sum[e] += w0 + w1;
                u32 pair = pair_f16(w0, w1);
                // Lanes t and t + 2 hold the same; the latter give the second limb.
                if (t >= 2) pair = pair_f16(w0 - from_f16((u16)pair), w1 - from_f16((u16)(pair >> 16)));
                pairs[e][j] = pair;
            }
#pragma unroll
            for (u32 e = 0; e < 2; e++) total[c][e] = total[c][e] * factor[e] + sum[e];
#pragma unroll
            for (u32 i = 0; i < HALVES * 16; i++) acc[c][i / 16][i / 4 % 4][i % 4] *= factor[i % 2];
            // Column g of positions 16 t ..: octets 2 t and 2 t + 1.
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 octet = i / 4, j = i % 4, source = (t * 2 + octet) * 4 + g % 4 / 2 + g / 4 * 2;
                u32 even = shuffle(pairs[0][j], source), odd = shuffle(pairs[1][j], source);
                weight[c][octet * 2 + j / 2][j % 2] = g % 2 ? odd : even;
            }
        }
        const u32 STEPS = AHEAD / HALVES;
#pragma unroll 1
        for (u32 s = 0; s < 4; s += STEPS) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    u32 w[4];
                    operand(ring[i], j, w);
#pragma unroll
                    for (u32 c = 0; c < C; c++) mma_f16(acc[c][i % HALVES][j], w, weight[c][i / HALVES][0], weight[c][i / HALVES][1]);
                }
                if (s + STEPS < 4) load_values<D>(here, s + STEPS + i / HALVES, i % HALVES, ring[i]);
                else if (more) load_keys(then, i, ring[i]);
            }
            // The next steps' weights come to the front.
#pragma unroll
            for (u32 i = 0; i < C * 4 * 2; i++) weight[i / 8][i / 2 % 4][i % 2] = weight[i / 8][(i / 2 % 4 + STEPS) % 4][i % 2];
        }
        here = then;
    }

    // The warps' shares, in order.
    float* stats = scales + HEADS;
    float* values = stats + WARPS * HEADS * 2;
#pragma unroll
    for (u32 c = 0; c < C; c++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 h = c * 4 + t % 2 * 2 + e;
            float sum = total[c][e];
#pragma unroll
            for (u32 m = 4; m < 32; m *= 2) sum += shuffle_xor(sum, m);
            if (g == 0 && t < 2) stats[(warp * HEADS + h) * 2] = most[c][e], stats[(warp * HEADS + h) * 2 + 1] = sum;
#pragma unroll
            for (u32 i = 0; i < HALVES * 4; i++) {
                float low = acc[c][i / 4][i % 4][e], high = acc[c][i / 4][i % 4][2 + e];
                low += shuffle_xor(low, 2u), high += shuffle_xor(high, 2u);
                float* to = values + (warp * HEADS + h) * D + i / 4 * 64 + g * 8 + i % 4 * 2;
                if (t < 2) to[0] = low, to[1] = high;
            }
        }
    }
    barrier();
    for (u32 i = threadIdx.x; i < heads * D; i += WARPS * 32) {
        u32 h = i / D, d = i % D;
        float peak = LOWEST, sum = 0.0f, value = 0.0f;
        for (u32 w = 0; w < WARPS; w++) peak = largest(peak, stats[(w * HEADS + h) * 2]);
        bool sink = a.chunks == 1 && a.sinks;
        if (sink) peak = largest(peak, a.sinks[head + h]);
        for (u32 w = 0; w < WARPS; w++) {
            float f = exponential(stats[(w * HEADS + h) * 2] - peak);
            sum = fused(f, stats[(w * HEADS + h) * 2 + 1], sum);
            value = fused(f, values[(w * HEADS + h) * D + d], value);
        }
        if (a.chunks == 1) {
            if (sink) sum += exponential(a.sinks[head + h] - peak);
            store_one(a.y, row, (head + h) * D + d, value / sum);
            continue;
        }
        u64 index = ((u64)row * a.heads + head + h) * a.chunks + chunk;
        if (d == 0) a.partial[2 * index] = peak, a.partial[2 * index + 1] = sum;
        a.partial[2 * (u64)a.partial_rows * a.heads * a.chunks + index * D + d] = value;
    }
}

// Grid: (chunks, key/value heads * blocks of 4 C query heads, rows). Shared: see `decode_rows`.
#define DECODE(name, D, C, WARPS, AHEAD)                  \
    KERNEL_OF(WARPS * 32, name, AttentionArgs) {          \
        SHARED_BYTES(memory);                             \
        decode_rows<D, C, WARPS, AHEAD>(a, memory);       \
    }
DECODE(attention_decode_64_4, 64, 1, 8, 4)
DECODE(attention_decode_64_8, 64, 2, 8, 4)
DECODE(attention_decode_128_4, 128, 1, 8, 4)
// For as many rows as fill the device with small blocks.
DECODE(attention_decode_128_4_many, 128, 1, 4, 8)
DECODE(attention_decode_128_8, 128, 2, 8, 4)
DECODE(attention_decode_256_4, 256, 1, 8, 4)
