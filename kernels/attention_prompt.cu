// attention_prompt: attention for segments of many rows over keys and values in f16, by tensor cores (online softmax in tiles: Dao, 2023).
//
// A block takes 64 queries, 16 a warp: the query heads of one key/value head for neighbouring rows, so that a page serves all of them. It
// walks over the pages that its rows see, one at a time, STAGES of them on their way. Queries and weights of positions are cut into LIMBS halves,
// of which two keep what f32 has. Bound by the tensor cores and by shared memory.
#include "common/prompt.cuh"

static const u32 WARPS = 4, QUERIES = 16 * WARPS;

// Keys of a page and head lie [2][key_dim][16]: chunk of eight positions `octet` at dim d. Chunks are swapped so that eight dims meet
// different banks.
DEVICE u32 key_chunk(u32 d, u32 octet) {
    u32 c = d * 2 + octet;
    return c ^ (c >> 3 & 1);
}
// Values lie [32][value_dim], here in rows of a multiple of eight chunks.
DEVICE u32 value_chunk(u32 at, u32 octet, u32 chunks) { return at * chunks + (octet ^ (at & 7)); }

struct Tile {
    u32 key_bytes, value_chunks, bytes;
};
DEVICE Tile tile_of(const Kv& kv) {
    u32 chunks = (kv.value_dim / 8 + 7) / 8 * 8;
    return {PAGE * kv.key_dim * 2, chunks, PAGE * kv.key_dim * 2 + PAGE * chunks * 16};
}

// Queues the copies of a head's part of a page, of which positions before `there` were written.
DEVICE void copy_page(const Kv& kv, const Tile& tile, const u8* page, u32 head, u32 there, u8* to) {
    const u8* keys = page + (u64)first_key(kv, head) * 2;
    u32 half = kv.key_dim * 2;
    for (u32 i = threadIdx.x; i < 2 * half; i += blockDim.x) {
        u32 block = i / half, c = i % half;
        copy16(to + (block * half + key_chunk(c / 2, c % 2)) * 16, keys + i * 16);
    }
    const u8* values = page + (u64)first_value(kv, head) * 2;
    u32 row = kv.value_dim / 8;
    for (u32 i = threadIdx.x; i < PAGE * row; i += blockDim.x) {
        u32 at = i / row, octet = i % row;
        // What nobody wrote may be anything, and a weight of 0 does not hide it.
        copy16_some(to + tile.key_bytes + value_chunk(at, octet, tile.value_chunks) * 16, values + i * 16, at < there ? 16 : 0);
    }
}

DEVICE u32 pair_and_rest(float& a, float& b) {
    u32 pair = pair_f16(a, b);
    a -= from_f16((u16)pair), b -= from_f16((u16)(pair >> 16));
    return pair;
}

// ND: octets of a value at most.
template <u32 ND, u32 LIMBS> DEVICE void attend_prompt(const AttentionArgs& a, u8* memory) {
    begin();
    PromptRows r;
    if (!prompt_rows(a, QUERIES, blockIdx.x, r)) return;
    u32 group = r.group, kv_head = blockIdx.y, rows = r.count, written = r.written, start = r.first_page, last = (r.end + PAGE - 1) / PAGE;
    const u8* const* pages = r.pages;
    u32 steps = a.kv.key_dim / 16, octets = a.kv.value_dim / 8;

    u32 warp = threadIdx.x / 32, g = lane() / 4, t = lane() % 4;
    u16* queries = (u16*)memory + warp * steps * LIMBS * 256;
    float* factors = (float*)(memory + WARPS * steps * LIMBS * 512) + warp * 16;
    Tile tile = tile_of(a.kv);
    u8* tiles = memory + WARPS * steps * LIMBS * 512 + QUERIES * 4;

    if (start < last) copy_page(a.kv, tile, pages[start], kv_head, written - start * PAGE, tiles);
    copies_commit();
    // Queries as A operands. A power of two brings each to where f16 holds it.
    for (u32 m = 0; m < 16; m++) {
        u32 query = warp * 16 + m, row = query / group;
        const float* q = row < rows ? row_at(a.q, r.segment.first + r.first + row) + (kv_head * group + query % group) * a.kv.key_dim : nullptr;
        float most = 0.0f;
        for (u32 d = lane(); q && d < a.kv.key_dim; d += 32) most = largest(most, magnitude(q[d]));
        float power = half_power(warp_max(most));
        if (lane() == 0) factors[m] = power * a.scale;
        for (u32 d = lane(); d < a.kv.key_dim; d += 32) {
            float v = q ? q[d] / power : 0.0f;
            u32 k = d % 16, at = (d / 16 * LIMBS * 32 + m % 8 * 4 + k % 8 / 2) * 8 + (m / 8 + k / 8 * 2) * 2 + k % 2;
#pragma unroll
            for (u32 limb = 0; limb < LIMBS; limb++) {
                u16 h = to_f16(v);
                queries[at + limb * 256] = h;
                v -= from_f16(h);
            }
        }
    }
    warp_barrier();
    float factor[2] = {factors[g], factors[g + 8]};
    // What this lane's two queries see: positions from `low` to before `high`.
    u32 low[2], high[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        seen_by(a, r, (warp * 16 + g + i * 8) / group, low[i], high[i]);
    }
    float out[ND][4] = {}, most[2] = {LOWEST, LOWEST}, total[2] = {};
    for (u32 page = start; page < last; page++) {
        u8* here = tiles + (page - start) % a.stages * tile.bytes;
        if (a.stages == 2) {
            if (page + 1 < last) copy_page(a.kv, tile, pages[page + 1], kv_head, written - (page + 1) * PAGE, tiles + (page + 1 - start) % 2 * tile.bytes);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        barrier();
        float score[4][4] = {};
        for (u32 step = 0; step < steps; step++) {
            u32 x[LIMBS][4];
#pragma unroll
            for (u32 limb = 0; limb < LIMBS; limb++) {
                Words4 w = load16(queries + ((step * LIMBS + limb) * 32 + lane()) * 8);
                x[limb][0] = w.x, x[limb][1] = w.y, x[limb][2] = w.z, x[limb][3] = w.w;
            }
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 k[4], d = step * 16 + lane() / 8 % 2 * 8 + lane() % 8;
                load_matrices_transposed(k, here + (half * a.kv.key_dim * 2 + key_chunk(d, lane() / 16)) * 16);
#pragma unroll
                for (u32 limb = LIMBS; limb-- > 0;) {
                    mma_f16(score[2 * half], x[limb], k[0], k[1]);
                    mma_f16(score[2 * half + 1], x[limb], k[2], k[3]);
                }
            }
        }
        // Lane (g, t): queries g and g + 8 at positions 8 j + 2 t and the one after.
        float now[2] = {most[0], most[1]};
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 position = page * PAGE + j * 8 + t * 2 + i % 2;
                float v = score[j][i] * factor[i / 2];
                if (a.softcap != 0.0f) v = a.softcap * tanhf(v / a.softcap);
                bool seen = position >= low[i / 2] && position < high[i / 2];
                score[j][i] = seen ? v : LOWEST;
                now[i / 2] = largest(now[i / 2], score[j][i]);
            }
        float shrink[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            now[i] = largest(now[i], shuffle_xor(now[i], 1u));
            now[i] = largest(now[i], shuffle_xor(now[i], 2u));
            shrink[i] = exponential(most[i] - now[i]);
            most[i] = now[i];
            total[i] *= shrink[i];
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float v = score[j][i] > LOWEST ? exponential(score[j][i] - now[i / 2]) : 0.0f;
                total[i / 2] += v;
                score[j][i] = v;
            }
#pragma unroll
        for (u32 o = 0; o < ND; o++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) out[o][i] *= shrink[i / 2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 p[LIMBS][4];
#pragma unroll
            for (u32 limb = 0; limb < LIMBS; limb++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    p[limb][2 * j] = pair_and_rest(score[2 * half + j][0], score[2 * half + j][1]);
                    p[limb][2 * j + 1] = pair_and_rest(score[2 * half + j][2], score[2 * half + j][3]);
                }
            }
#pragma unroll
            for (u32 o = 0; o < ND; o += 2) {
                if (o >= octets) break;
                u32 v[4], at = half * 16 + lane() / 8 % 2 * 8 + lane() % 8;
                load_matrices_transposed(v, here + tile.key_bytes + value_chunk(at, o + lane() / 16, tile.value_chunks) * 16);
#pragma unroll
                for (u32 limb = LIMBS; limb-- > 0;) {
                    mma_f16(out[o], p[limb], v[0], v[1]);
                    mma_f16(out[o + 1], p[limb], v[2], v[3]);
                }
            }
        }
        barrier();
        if (a.stages == 1) {
            if (page + 1 < last) copy_page(a.kv, tile, pages[page + 1], kv_head, written - (page + 1) * PAGE, tiles);
            copies_commit();
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        total[i] += shuffle_xor(total[i], 1u);
        total[i] += shuffle_xor(total[i], 2u);
        u32 query = warp * 16 + g + i * 8, row = query / group, head = kv_head * group + query % group;
        if (row >= rows) continue;
        float sum = total[i], by = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head], peak = largest(most[i], sink);
            by = exponential(most[i] - peak);
            sum = sum * by + exponential(sink - peak);
        }
        // Nothing seen: an empty source.
        by = sum > 0.0f ? by / sum : 0.0f;
        u32 to = r.segment.first + r.first + row, column = head * a.kv.value_dim + t * 2;
#pragma unroll
        for (u32 o = 0; o < ND; o++) {
            if (o >= octets) break;
            store_pair(a.y, to, column + o * 8, out[o][2 * i] * by, out[o][2 * i + 1] * by);
        }
    }
}

// Grid: (tiles of 64 / group rows of long segments, key/value heads); 128 threads. Shared: queries, their factors, `stages` tiles.
#define PROMPT(name, ND, LIMBS)                   \
    KERNEL_OF(128, name, AttentionArgs) {         \
        SHARED_BYTES(memory);                     \
        attend_prompt<ND, LIMBS>(a, memory);      \
    }
PROMPT(attention_prompt_64, 8, 2)
PROMPT(attention_prompt_128, 16, 2)
PROMPT(attention_prompt_256, 32, 2)
PROMPT(attention_prompt_64_fast, 8, 1)
PROMPT(attention_prompt_128_fast, 16, 1)
PROMPT(attention_prompt_256_fast, 32, 1)
