// Packed weights as a warp of a matrix-vector product reads them: sixteen bytes a lane, each word a weight row of a panel, straight into
// registers. A format tells
//   W      what a lane holds of one step
//   STEP   elements of k that a warp passes in a step; a width is a multiple of 32
//   ROWS   weight rows of a lane: those from ROWS * (lane % (16 / ROWS)) on
//   ahead  steps that are on their way at once, for R rows of x
//   load, add: a step of a panel, and its products with R rows of x, of which `count` are there.
// Lanes with the same rows take different k's; the kernel adds them up at the end.
#pragma once
#include "../common/frame.cuh"
#include "panel.cuh"

DEVICE float low_bf16(u32 w) { return float_of(w << 16); }
DEVICE float high_bf16(u32 w) { return float_of(w & 0xffff0000u); }
DEVICE float low_f16(u32 w) { return from_f16((u16)w); }
DEVICE float high_f16(u32 w) { return from_f16((u16)(w >> 16)); }

// Rows of f32 activations.
struct FloatRows {
    const float* x;
    u32 stride;
};

// What floats have in common: a step of a warp is 512 bytes of a panel.
struct FloatLines {
    struct W {
        Words4 w;
    };
    typedef FloatRows X;
    static const bool INTEGER = false;
    static DEVICE constexpr u32 ahead(u32) { return 8; }
    static DEVICE W load(const Part&, const u8* panel, u32 step) { return {load_once(panel + (u64)step * 512 + lane() * 16)}; }
};

struct F32Lines : FloatLines {
    static const u32 STEP = 8, ROWS = 4;
    template <u32 R> static DEVICE void add(float (&acc)[R][4], const Part&, const W& w, const X& x, u32 step, u32 count) {
        const u32 words[4] = {w.w.x, w.w.y, w.w.z, w.w.w};
        u32 k = step * STEP + lane() / 4;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (r >= count) break;
            float v = x.x[(u64)r * x.stride + k];
#pragma unroll
            for (u32 j = 0; j < 4; j++) acc[r][j] = fused(float_of(words[j]), v, acc[r][j]);
        }
    }
};

struct Bf16Lines : FloatLines {
    static const u32 STEP = 16, ROWS = 4;
    template <u32 R> static DEVICE void add(float (&acc)[R][4], const Part&, const W& w, const X& x, u32 step, u32 count) {
        const u32 words[4] = {w.w.x, w.w.y, w.w.z, w.w.w};
        u32 k = step * STEP + lane() / 4 * 2;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (r >= count) break;
            Words2 v = load8(x.x + (u64)r * x.stride + k);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                acc[r][j] = fused(low_bf16(words[j]), float_of(v.x), acc[r][j]);
                acc[r][j] = fused(high_bf16(words[j]), float_of(v.y), acc[r][j]);
            }
        }
    }
};

struct F16Lines : FloatLines {
    static const u32 STEP = 16, ROWS = 8;
    template <u32 R> static DEVICE void add(float (&acc)[R][8], const Part&, const W& w, const X& x, u32 step, u32 count) {
        const u32 words[4] = {w.w.x, w.w.y, w.w.z, w.w.w};
        u32 k = step * STEP + lane() / 2;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (r >= count) break;
            float v = x.x[(u64)r * x.stride + k];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                acc[r][2 * j] = fused(low_f16(words[j]), v, acc[r][2 * j]);
                acc[r][2 * j + 1] = fused(high_f16(words[j]), v, acc[r][2 * j + 1]);
            }
        }
    }
};

// Four lines of codes, which share their scales. (A single row has a way of its own: linear_vector.cu.)
struct F8Lines : FloatLines {
    struct W {
        Words4 w[4];
        // A lane holds the scale of one row, and gets those of its own from the others when they are needed.
        float scale;
    };
    static const u32 STEP = F8_RUN, ROWS = 8;
    static DEVICE constexpr u32 ahead(u32) { return 2; }
    static DEVICE W load(const Part& p, const u8* panel, u32 step) {
        W w = {};
        const u8* codes = panel + f8_front(p) + (u64)step * 2048 + lane() * 16;
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (step * STEP + i * 32 < p.cols) w.w[i] = load_once(codes + i * 512);
        w.scale = ((const float*)panel)[step * 16 + lane() % 16];
        return w;
    }
    template <u32 R> static DEVICE void add(float (&acc)[R][8], const Part& p, const W& w, const X& x, u32 step, u32 count) {
        float scale[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) scale[j] = shuffle(w.scale, lane() % 2 * 8 + j);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 k = step * STEP + i * 32 + lane() / 2 * 2;
            if (k >= p.cols) break;
            Words2 v[R] = {};
#pragma unroll
            for (u32 r = 0; r < R; r++)
                if (r < count) v[r] = load8(x.x + (u64)r * x.stride + k);
            const u32 words[4] = {w.w[i].x, w.w[i].y, w.w[i].z, w.w[i].w};
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u32 pair = pair_e4m3(words[j / 2] >> j % 2 * 16);
                float low = low_f16(pair), high = high_f16(pair);
                low = times(low, scale[j]), high = times(high, scale[j]);
#pragma unroll
                for (u32 r = 0; r < R; r++) {
                    acc[r][j] = fused(low, float_of(v[r].x), acc[r][j]);
                    acc[r][j] = fused(high, float_of(v[r].y), acc[r][j]);
                }
            }
        }
    }
};

// Rows of 8-bit activations.
struct Q8Rows {
    const Q8Block* x;
    u32 stride;
};

// Integers: a lane takes whole 32-blocks of four rows, eight blocks of a panel in a step, so that a block's sum is exact and its scale is
// applied once. HALF: a scale for each 16; MIN: with minimums.
template <LayoutKind KIND, bool HALF, bool MIN> struct IntegerLines {
    static const u32 GROUPS = KIND == LAYOUT_I8 ? 8 : 4, HALVES = HALF ? 2 : 1;
    struct W {
        Words4 codes[GROUPS];
        Words2 scale[HALVES], min[MIN ? HALVES : 1];
    };
    typedef Q8Rows X;
    static const u32 STEP = 256, ROWS = 4;
    static DEVICE constexpr u32 ahead(u32 rows) { return rows > 1 ? 1 : 2; }
    static const bool INTEGER = true;
    // Bytes of scales and of codes in a stretch of 64 k's, and all of it.
    static const u32 SCALES = HALF ? 128 : 64, CODES = GROUPS * 128, STRETCH = CODES + SCALES * (MIN ? 2 : 1);

    static DEVICE W load(const Part& p, const u8* panel, u32 step) {
        W w = {};
        u32 block = step * 8 + lane() / 4, quad = lane() % 4;
        if (block >= p.cols / 32) return w;
        const u8* at = panel + GAINS + (u64)(block / 2) * STRETCH;
        const u8* scales = at + block % 2 * (SCALES / 2) + quad * 8;
        const u8* codes = at + STRETCH - CODES + block % 2 * (CODES / 2) + quad * 16;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) w.codes[g] = load_once(codes + g * 64);
#pragma unroll
        for (u32 h = 0; h < HALVES; h++) {
            w.scale[h] = load8(scales + h * 32);
            if (MIN) w.min[h] = load8(scales + SCALES + h * 32);
        }
        return w;
    }

    static DEVICE float factor(const Words2& w, u32 j) { return j % 2 ? high_f16(j < 2 ? w.x : w.y) : low_f16(j < 2 ? w.x : w.y); }

    template <u32 R> static DEVICE void add(float (&acc)[R][4], const Part& p, const W& w, const X& x, u32 step, u32 count) {
        u32 block = step * 8 + lane() / 4;
        if (block >= p.cols / 32) return;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
            if (r >= count) break;
            const Q8Block* b = x.x + (u64)r * x.stride + block;
            Words4 low = load16(b->codes), high = load16(b->codes + 16), tail = load16(&b->scale);
            const u32 v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            float scale = float_of(tail.x);
            Words4 halves = {};
            if (HALF) halves = load16(&b->half_sum[0]);
            const u32 half_offset[2] = {halves.z, halves.w}, half_sum[2] = {halves.x, halves.y};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
#pragma unroll
                for (u32 h = 0; h < HALVES; h++) {
                    i32 offset = KIND == LAYOUT_I8 ? HALF ? (i32)half_offset[h] : (i32)tail.z
                                                   : KIND == LAYOUT_I4 && !MIN ? HALF ? (i32)half_offset[h] >> 4 : (i32)tail.w : 0;
                    i32 sum = dots(p, w, v, j, h, offset);
                    acc[r][j] = fused((float)sum, factor(w.scale[h], j) * scale, acc[r][j]);
                    if (MIN) acc[r][j] = fused(-factor(w.min[h], j), float_of(HALF ? half_sum[h] : tail.y), acc[r][j]);
                }
            }
        }
    }

    // The exact sum of a row's products, over half `h` of the block or over all of it.
    static DEVICE i32 dots(const Part& p, const W& w, const u32 (&v)[8], u32 j, u32 h, i32 sum) {
        const u32 COUNT = GROUPS / HALVES;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 g = h * COUNT + i;
            u32 word = j == 0 ? w.codes[g].x : j == 1 ? w.codes[g].y : j == 2 ? w.codes[g].z : w.codes[g].w;
            if (KIND == LAYOUT_I8) {
                sum = dot4_us(word, v[g], sum);
            } else if (KIND == LAYOUT_I4) {
                sum = dot4_us(word & 0x0f0f0f0f, v[2 * g], sum);
                sum = dot4_us(word >> 4 & 0x0f0f0f0f, v[2 * g + 1], sum);
            } else {
                u32 even, odd;
                look_up(p, word, even, odd);
                sum = dot4_ss(even, permute(v[2 * g], v[2 * g + 1], 0x5140), sum);
                sum = dot4_ss(odd, permute(v[2 * g], v[2 * g + 1], 0x7362), sum);
            }
        }
        return sum;
    }

    // What eight 4-bit codes of a word stand for: `even` those of k = 0, 4, 1, 5, `odd` those of k = 2, 6, 3, 7.
    static DEVICE void look_up(const Part& p, u32 word, u32& even, u32& odd) {
        const u32* table = (const u32*)p.table;
        u32 choose = word & 0x77777777, upper = (word & 0x88888888) >> 1;
        u32 low = permute(table[0], table[1], choose), high = permute(table[2], table[3], choose);
        even = permute(low, high, 0x3210 | (upper & 0xffff));
        low = permute(table[0], table[1], choose >> 16), high = permute(table[2], table[3], choose >> 16);
        odd = permute(low, high, 0x3210 | upper >> 16);
    }
};
