// attention_group: attention_prompt on compute capability 9.0 by products of groups of four warps, heads of 128 elements (online softmax in tiles: Dao,
// 2023; one group copies while two multiply: Shah et al., 2024).
//
// A block takes 128 queries, 64 a group: the query heads of one key/value head for neighbouring rows. A third group copies tiles of 128
// positions, two on their way. Queries and weights of positions are rounded to f16. Bound by the tensor cores and the exponentials.
#include "common/prompt.cuh"
#include "common/sm90.cuh"

static const u32 DIM = 128, SPAN = 128, WARPS = 8, QUERIES = 16 * WARPS, STEPS = DIM / 16, STAGES = 2;
static const u32 KEY_BYTES = SPAN * DIM * 2, STAGE_BYTES = 2 * KEY_BYTES, QUERY_BYTES = STEPS * 512;

#if SM90
// Queues the copies of the keys of the tile from `first` on, of whose positions those before `written` exist, or of its values.
template <bool KEYS> DEVICE void copy_tile(const Kv& kv, const u8* const* pages, u32 head, u32 first, u32 written, u8* to) {
    const u32 CHUNKS = PAGE * DIM / 8;
#pragma unroll 1
    for (u32 i = 0; i < SPAN / PAGE; i++) {
        u32 begin = first + i * PAGE;
        const u8* page = pages[(begin < written ? begin : first) / PAGE];
        const u8* from = page + (u64)(KEYS ? first_key(kv, head) : first_value(kv, head)) * 2;
#pragma unroll 2
        for (u32 c = threadIdx.x % 128; c < CHUNKS; c += 128) {
            u32 at = i * PAGE + c / 16, octet = c % 16;
            // A weight of 0 does not hide what nobody wrote.
            if (KEYS) copy16(to + i * (CHUNKS * 16) + (c ^ (c >> 3 & 1)) * 16, from + c * 16);
            else copy16_some(to + octet / 8 * SPAN * 128 + at * 128 + (octet ^ at) % 8 * 16, from + c * 16, first + at < written ? 16 : 0);
        }
    }
}

template <bool SOFTCAP> DEVICE void attend_group(const AttentionArgs& a, u8* memory) {
    const float LOG2_E = 1.44269504f;
    begin();
    // The last rows first, which see most.
    PromptRows r;
    if (!prompt_rows(a, QUERIES, gridDim.y - 1 - blockIdx.y, r)) return;
    u32 group = r.group, kv_head = blockIdx.x, rows = r.count, start = r.first_page * PAGE;
    u32 tiles = r.end > start ? (r.end - start + SPAN - 1) / SPAN : 0;

    memory += (0u - shared_address(memory)) % 1024;
    u8* queries_at = memory + STAGES * STAGE_BYTES;
    // Keys, then values: tiles that are there, and those that were used up. Whose turn it is to multiply.
    Barrier *full = (Barrier*)(queries_at + WARPS * QUERY_BYTES), *empty = full + 2 * STAGES, *turn = empty + 2 * STAGES;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2 * STAGES; i++) {
            barrier_init(&full[i], 128);
            barrier_init(&empty[i], WARPS);
        }
        for (u32 i = 0; i < 2; i++) barrier_init(&turn[i], 4);
        barriers_ready();
    }
    barrier();
    u32 warp = threadIdx.x / 32, g = lane() / 4, t = lane() % 4;
    if (warp >= WARPS) {
        registers_down<40>();
        // Keys of two tiles, then by turns values of a tile and the keys of the one after the next.
        u32 before = 0;
        for (u32 i = 0; i < 2 * tiles; i++) {
            bool keys = i < 2 || i % 2 == 1;
            u32 n = i < 2 ? i : keys ? i / 2 + 1 : i / 2 - 1;
            if (i == 2 * tiles - 1 || (tiles == 1 && i == 1)) keys = false, n = tiles - 1;
            u32 which = keys ? n % STAGES : STAGES + n % STAGES;
            if (n >= STAGES) barrier_wait(&empty[which], (n / STAGES - 1) & 1);
            u8* to = memory + which * KEY_BYTES;
            if (keys) copy_tile<true>(a.kv, r.pages, kv_head, start + n * SPAN, r.written, to);
            else copy_tile<false>(a.kv, r.pages, kv_head, start + n * SPAN, r.written, to);
            copies_commit();
            if (i > 0) {
                copies_wait<1>();
                shared_ready();
                barrier_arrive(&full[before]);
            }
            before = which;
        }
        copies_wait<0>();
        shared_ready();
        if (tiles) barrier_arrive(&full[before]);
        return;
    }
    registers_up<232>();
    // Queries as A operands. A power of two brings each to where f16 holds it.
    u16* queries = (u16*)(queries_at + warp * QUERY_BYTES);
    float factor[2] = {};
    for (u32 m = 0; m < 16; m++) {
        u32 query = warp * 16 + m, row = query / group;
        Words4 q = {};
        if (row < rows) q = load16(row_at(a.q, r.segment.first + r.first + row) + (kv_head * group + query % group) * DIM + lane() * 4);
        const float v[4] = {float_of(q.x), float_of(q.y), float_of(q.z), float_of(q.w)};
        float most = largest(largest(magnitude(v[0]), magnitude(v[1])), largest(magnitude(v[2]), magnitude(v[3])));
        float power = half_power(warp_max(most));
        if (m == g) factor[0] = power * a.scale;
        if (m == g + 8) factor[1] = power * a.scale;
        float by = 1.0f / power;
        u32 k = lane() % 4 * 4, at = (lane() / 4 * 32 + m % 8 * 4 + k % 8 / 2) * 8 + (m / 8 + k / 8 * 2) * 2;
        *(u32*)(queries + at) = pair_f16(v[0] * by, v[1] * by);
        *(u32*)(queries + at + 8) = pair_f16(v[2] * by, v[3] * by);
    }
    warp_barrier();
    u32 q[STEPS][4];
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        Words4 w = load16(queries + (step * 32 + lane()) * 8);
        q[step][0] = w.x, q[step][1] = w.y, q[step][2] = w.z, q[step][3] = w.w;
    }
    // What this lane's two queries see: positions from `low` to before `high`. All of the warp's see those from `all_low` to before `all_high`.
    u32 low[2], high[2], all_low = 0, all_high = ~0u;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        seen_by(a, r, (warp * 16 + g + i * 8) / group, low[i], high[i]);
        if (!SOFTCAP) factor[i] *= LOG2_E;
        all_low = low[i] > all_low ? low[i] : all_low, all_high = high[i] < all_high ? high[i] : all_high;
    }
    for (u32 m = 4; m < 32; m *= 2) {
        u32 l = shuffle_xor(all_low, m), h = shuffle_xor(all_high, m);
        all_low = l > all_low ? l : all_low, all_high = h < all_high ? h : all_high;
    }
    float out[64] = {}, most[2] = {LOWEST, LOWEST}, total[2] = {};
    u32 weights[SPAN / 16][4];
    // While one group multiplies, the other has exponentials: keys of a tile and values of the one before by turns.
    for (u32 n = 0; n <= tiles; n++) {
        u32 slot = n % STAGES, last_slot = (n + 1) % STAGES, first = start + n * SPAN, mine = warp / 4;
        if (mine + n > 0) barrier_wait(&turn[mine], (n + mine + 1) & 1);
        float score[64];
        if (n < tiles) {
            barrier_wait(&full[slot], n / STAGES & 1);
            group_begin();
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) group_f16_across(score, q[step], operand_by_16(memory + slot * KEY_BYTES, step, DIM), step > 0);
            group_commit();
        }
        if (n > 0) {
            barrier_wait(&full[STAGES + last_slot], (n - 1) / STAGES & 1);
            group_results(out);
            group_begin();
#pragma unroll
            for (u32 step = 0; step < SPAN / 16; step++)
                group_f16_across(out, weights[step], operand_by_64(memory + (STAGES + last_slot) * KEY_BYTES, step, SPAN), true);
            group_commit();
        }
        if (lane() == 0) barrier_arrive(&turn[1 - mine]);
        if (n == tiles) break;
        group_wait<0>();
        group_results(score);
        group_results(out);
        if (lane() == 0) {
            barrier_arrive(&empty[slot]);
            if (n > 0) barrier_arrive(&empty[STAGES + last_slot]);
        }
        // Score 4 j + 2 i + c: query g + 8 i at position 8 j + 2 t + c. From here on logarithms to the base of two.
        if (SOFTCAP) {
#pragma unroll
            for (u32 e = 0; e < 64; e++) score[e] = a.softcap * tanhf(score[e] * factor[e / 2 % 2] / a.softcap) * LOG2_E;
        } else {
#pragma unroll
            for (u32 e = 0; e < 64; e++) score[e] *= factor[e / 2 % 2];
        }
        if (first < all_low || first + SPAN > all_high) {
#pragma unroll
            for (u32 e = 0; e < 64; e++) {
                u32 position = first + e / 4 * 8 + t * 2 + e % 2, i = e / 2 % 2;
                if (position < low[i] || position >= high[i]) score[e] = LOWEST;
            }
        }
        float base[2], shrink[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float now = most[i];
#pragma unroll
            for (u32 j = 0; j < 16; j++) now = largest(now, largest(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
            now = largest(now, shuffle_xor(now, 1u));
            now = largest(now, shuffle_xor(now, 2u));
            // Nothing seen yet: everything is LOWEST, and shall be 0.
            base[i] = now > LOWEST ? now : 0.0f;
            shrink[i] = power_of_two(most[i] - base[i]);
            most[i] = now;
            total[i] *= shrink[i];
        }
#pragma unroll
        for (u32 e = 0; e < 64; e++) out[e] *= shrink[e / 2 % 2];
#pragma unroll
        for (u32 j = 0; j < 16; j++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float v0 = power_of_two(score[4 * j + 2 * i] - base[i]), v1 = power_of_two(score[4 * j + 2 * i + 1] - base[i]);
                total[i] += v0 + v1;
                weights[j / 2][j % 2 * 2 + i] = pair_f16(v0, v1);
            }
    }
    group_wait<0>();
    group_results(out);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        total[i] += shuffle_xor(total[i], 1u);
        total[i] += shuffle_xor(total[i], 2u);
        u32 query = warp * 16 + g + i * 8, row = query / group, head = kv_head * group + query % group;
        if (row >= rows) continue;
        float sum = total[i], by = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head] * LOG2_E, peak = largest(most[i], sink);
            by = power_of_two(most[i] - peak);
            sum = sum * by + power_of_two(sink - peak);
        }
        // Nothing seen: an empty source.
        by = sum > 0.0f ? by / sum : 0.0f;
        u32 to = r.segment.first + r.first + row, column = head * DIM + t * 2;
#pragma unroll
        for (u32 j = 0; j < 16; j++) store_pair(a.y, to, column + j * 8, out[4 * j + 2 * i] * by, out[4 * j + 2 * i + 1] * by);
    }
}

// Grid: (key/value heads, tiles of 128 / group rows of long segments); 384 threads. Shared: two tiles, queries, and 2 KB to align them and for
// barriers.
KERNEL_OF(384, attention_group_128, AttentionArgs) {
    SHARED_BYTES(memory);
    attend_group<false>(a, memory);
}
KERNEL_OF(384, attention_group_128_softcap, AttentionArgs) {
    SHARED_BYTES(memory);
    attend_group<true>(a, memory);
}
#endif
