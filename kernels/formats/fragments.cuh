// Packed weights as tensor cores take them: a pair of panels (32 weight rows) as the A operands of two products of 16 rows.
//
// With g = lane / 4 and t = lane % 4 a lane has rows 4 * (g % 4) + 0..3 of panel g / 4; the first product takes the first two of them, the
// second the others. Which k's a product meets, and in which order, is the format's choice; the activations are put into the same order
// (linear_prepare.cu), so no element moves. A format tells
//   STEP   elements of k in a step: one product for floats, one 32-block for integers
//   BYTES  of a panel's step
//   Raw    what a lane loads of a step, `load` it from where the panel's step begins, and `a` operand of product m.
#pragma once
#include "lines.cuh"

// Where a panel's step lies: in global memory, or in shared memory with chunks of sixteen bytes swapped so that a warp's reads meet no bank
// twice.
struct InGlobal {
    const u8* at;
    DEVICE Words4 wide(u32 byte) const { return load_once(at + byte); }
    DEVICE Words2 narrow(u32 byte) const { return load8(at + byte); }
};
DEVICE u32 swapped(u32 chunk) { return chunk ^ (chunk & 8) >> 2; }
struct InShared {
    const u8* at;
    DEVICE Words4 wide(u32 byte) const { return load16(at + swapped(byte / 16) * 16); }
    DEVICE Words2 narrow(u32 byte) const { return load8(at + swapped(byte / 16) * 16 + byte % 16); }
};

// Order of k's in activations, see linear_prepare.cu.
enum Order : u32 { ORDER_BF16, ORDER_F16, ORDER_I8, ORDER_I4, ORDER_TABLE };

// Scales of the lane's four rows in a step that begins at k: none, or those of 8-bit floats.
struct NoScales {
    static const bool ANY = false;
    DEVICE void load(const u8*, u32) {}
};
struct F8Scales {
    static const bool ANY = true;
    Words4 w;
    DEVICE void load(const u8* panel, u32 k) { w = load16(panel + k / F8_RUN * 64 + lane() / 4 % 4 * 16); }
    DEVICE float of(u32 row) const { return float_of(row == 0 ? w.x : row == 1 ? w.y : row == 2 ? w.z : w.w); }
};

// `codes`: where a panel's first step begins.
struct Bf16Fragments {
    struct Raw {
        u32 w[8];
    };
    typedef NoScales Scales;
    static DEVICE const u8* codes(const Part&, const u8* panel) { return panel; }
    static const u32 STEP = 16, BYTES = 512;
    static const bool INTEGER = false;
    template <class M> static DEVICE Raw load(const M& m) {
        u32 at = lane() % 4 * 64 + lane() / 4 % 4 * 16;
        Words4 low = m.wide(at), high = m.wide(at + 256);
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    }
    static DEVICE void a(const Part&, const Raw& r, u32 m, u32 (&a)[4]) {
        a[0] = r.w[2 * m], a[1] = r.w[2 * m + 1], a[2] = r.w[4 + 2 * m], a[3] = r.w[5 + 2 * m];
    }
    static DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
};

// 8-bit floats as bfloat16, which holds each of them.
DEVICE u32 bf16_of_e4m3(u32 two) {
    u32 pair = pair_e4m3(two);
    return pair_bf16(low_f16(pair), high_f16(pair));
}
struct F8Fragments {
    struct Raw {
        Words2 low, high;
    };
    typedef F8Scales Scales;
    static DEVICE const u8* codes(const Part& p, const u8* panel) { return panel + f8_front(p); }
    static const u32 STEP = 16, BYTES = 256;
    static const bool INTEGER = false;
    template <class M> static DEVICE Raw load(const M& m) {
        u32 at = lane() % 4 * 32 + lane() / 4 % 4 * 8;
        return {m.narrow(at), m.narrow(at + 128)};
    }
    static DEVICE void a(const Part&, const Raw& r, u32 m, u32 (&a)[4]) {
        u32 low = m ? r.low.y : r.low.x, high = m ? r.high.y : r.high.x;
        a[0] = bf16_of_e4m3(low), a[1] = bf16_of_e4m3(low >> 16), a[2] = bf16_of_e4m3(high), a[3] = bf16_of_e4m3(high >> 16);
    }
    static DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
};

// acc += product `m` of a step, under the step's scales.
template <class F> DEVICE void multiply_scaled(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1, const typename F::Scales& scales, u32 m) {
    if constexpr (F::Scales::ANY) {
        float c[4] = {};
        F::multiply(c, a, b0, b1);
#pragma unroll
        for (u32 j = 0; j < 4; j++) acc[j] = fused(c[j], scales.of(2 * m + j / 2), acc[j]);
    } else {
        F::multiply(acc, a, b0, b1);
    }
}

struct F16Fragments {
    struct Raw {
        Words2 w[4];
    };
    typedef NoScales Scales;
    static DEVICE const u8* codes(const Part&, const u8* panel) { return panel; }
    static const u32 STEP = 16, BYTES = 512;
    static const bool INTEGER = false;
    template <class M> static DEVICE Raw load(const M& m) {
        u32 at = lane() % 4 * 64 + lane() / 4 % 4 * 8;
        return {{m.narrow(at), m.narrow(at + 32), m.narrow(at + 256), m.narrow(at + 288)}};
    }
    static DEVICE void a(const Part&, const Raw& r, u32 m, u32 (&a)[4]) {
        u32 k0 = m ? r.w[0].y : r.w[0].x, k1 = m ? r.w[1].y : r.w[1].x, k8 = m ? r.w[2].y : r.w[2].x, k9 = m ? r.w[3].y : r.w[3].x;
        a[0] = permute(k0, k1, 0x5410), a[1] = permute(k0, k1, 0x7632), a[2] = permute(k8, k9, 0x5410), a[3] = permute(k8, k9, 0x7632);
    }
    static DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
};

// As IntegerLines. Codes of a 32-block meet in one product, or in one for each half.
template <LayoutKind KIND, bool IS_HALF, bool HAS_MIN> struct IntegerFragments {
    typedef IntegerLines<KIND, IS_HALF, HAS_MIN> Lines;
    typedef NoScales Scales;
    static const u32 WORDS = KIND == LAYOUT_I8 ? 8 : 4;
    struct Raw {
        u32 w[WORDS];
    };
    static const u32 STEP = 32, BYTES = WORDS * 64, HALVES = IS_HALF ? 2 : 1;
    static const bool INTEGER = true, HALF = IS_HALF, MIN = HAS_MIN, BIASED = KIND == LAYOUT_I8 || (KIND == LAYOUT_I4 && !HAS_MIN);
    // Whether `signed_a` gives codes times 16.
    static const bool NIBBLES = KIND == LAYOUT_I4 && !HAS_MIN;
    static const Order ORDER = KIND == LAYOUT_I8 ? ORDER_I8 : KIND == LAYOUT_I4 ? ORDER_I4 : ORDER_TABLE;
    // What was added to codes.
    static const i32 BIAS = KIND == LAYOUT_I8 ? 128 : KIND == LAYOUT_I4 && !HAS_MIN ? 8 : 0;
    static const u32 SCALES = Lines::SCALES, CODES = Lines::CODES, STRETCH = Lines::STRETCH;
    template <class M> static DEVICE Raw load(const M& m) {
        u32 at = lane() % 4 * 64 + lane() / 4 % 4 * 16;
        Words4 low = m.wide(at);
        Raw r = {{low.x, low.y, low.z, low.w}};
        if (KIND == LAYOUT_I8) {
            Words4 high = m.wide(at + 256);
            r.w[WORDS - 4] = high.x, r.w[WORDS - 3] = high.y, r.w[WORDS - 2] = high.z, r.w[WORDS - 1] = high.w;
        }
        return r;
    }
    static DEVICE void a(const Part& p, const Raw& r, u32 m, u32 (&a)[4]) {
        if (KIND == LAYOUT_I8) {
            a[0] = r.w[2 * m], a[1] = r.w[2 * m + 1], a[2] = r.w[WORDS - 4 + 2 * m], a[3] = r.w[WORDS - 3 + 2 * m];
        } else if (KIND == LAYOUT_I4) {
            a[0] = r.w[2 * m] & 0x0f0f0f0f, a[1] = r.w[2 * m + 1] & 0x0f0f0f0f;
            a[2] = r.w[2 * m] >> 4 & 0x0f0f0f0f, a[3] = r.w[2 * m + 1] >> 4 & 0x0f0f0f0f;
        } else {
            Lines::look_up(p, r.w[2 * m], a[0], a[2]);
            Lines::look_up(p, r.w[2 * m + 1], a[1], a[3]);
        }
    }
    // As `a`, in signed bytes without what was added.
    static DEVICE void signed_a(const Part& p, const Raw& r, u32 m, u32 (&to)[4]) {
        if (NIBBLES) {
            to[0] = (r.w[2 * m] << 4 & 0xf0f0f0f0) ^ 0x80808080, to[1] = (r.w[2 * m + 1] << 4 & 0xf0f0f0f0) ^ 0x80808080;
            to[2] = (r.w[2 * m] & 0xf0f0f0f0) ^ 0x80808080, to[3] = (r.w[2 * m + 1] & 0xf0f0f0f0) ^ 0x80808080;
            return;
        }
        a(p, r, m, to);
        if (KIND == LAYOUT_I8)
            for (u32 i = 0; i < 4; i++) to[i] ^= 0x80808080;
    }
    static DEVICE void multiply(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        if (KIND == LAYOUT_TABLE) mma_s8s8(c, a, b0, b1);
        else mma_u8s8(c, a, b0, b1);
    }
    // Which words of activations meet half `h`: those of the other are taken as 0.
    static DEVICE void half(u32 h, u32& b0, u32& b1) {
        if (KIND == LAYOUT_I8) {
            if (h) b0 = 0;
            else b1 = 0;
        } else if (lane() % 4 / 2 != h) {
            b0 = b1 = 0;
        }
    }
};

// A block's scale for a row of activations, and the sums of the codes of its halves.
struct BlockFactor {
    float scale;
    u32 sums;
    DEVICE i32 low() const { return (i32)(sums << 16) >> 16; }
    DEVICE i32 high() const { return (i32)sums >> 16; }
};

// A product of up to four parts with rows of x that linear_prepare.cu has laid out: `tiles` of eight rows from `first` on.
struct TensorArgs {
    View y;
    // Of the whole matrix, or null.
    const float* bias;
    // What linear_prepare.cu made of x.
    const u32* words;
    const BlockFactor* factors;
    const float* exponents;
    u32 first, tiles, limbs, parts;
    // All of one layout.
    Part part[4];
};

// An integer in -2^22 .. 2^22 that was added to the bits of 1.5 * 2^23.
static const i32 MAGIC_BITS = 0x4b400000;
DEVICE float float_from(i32 with_magic) { return float_of((u32)with_magic) - 12582912.0f; }

// acc += products of one 32-block for two weight rows by two activation rows: `scale` and `min` of the lane's rows (of both halves where HALF),
// `x` the factors of its two columns.
template <class F> DEVICE void add_block(const Part& p, float (&acc)[2][4], const typename F::Raw& raw, const Words2 (&scale)[F::HALVES],
                                         const Words2 (&min)[F::HALVES], u32 b0, u32 b1, const BlockFactor (&x)[2]) {
#pragma unroll
    for (u32 h = 0; h < F::HALVES; h++) {
        u32 w0 = b0, w1 = b1;
        if (F::HALF) F::half(h, w0, w1);
        i32 sum[2], start[2];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            sum[j] = F::HALF ? h ? x[j].high() : x[j].low() : x[j].low() + x[j].high();
            start[j] = MAGIC_BITS - F::BIAS * sum[j];
        }
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            u32 a[4];
            F::a(p, raw, m, a);
            i32 c[4] = {start[0], start[1], start[0], start[1]};
            F::multiply(c, a, w0, w1);
            u32 scales = m ? scale[h].y : scale[h].x, mins = F::MIN ? m ? min[h].y : min[h].x : 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float s = i < 2 ? low_f16(scales) : high_f16(scales);
                acc[m][i] = fused(float_from(c[i]), s * x[i % 2].scale, acc[m][i]);
                if (F::MIN) acc[m][i] = fused(-(i < 2 ? low_f16(mins) : high_f16(mins)), times(x[i % 2].scale, (float)sum[i % 2]), acc[m][i]);
            }
        }
    }
}
