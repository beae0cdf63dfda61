// A panel of 16 packed rows times a few rows of activations, by warps that share the panel's k's (src/backend/cpu/pack.rs has the layouts).
//
// A warp reads 512 bytes at a time: a lane takes 16 of them, which are four rows' codes for a few k's (eight rows' for F16). Each lane
// sums for its rows and k's; `panel_sums` then adds up what the lanes of a warp hold, always in one order, so a row's bits do not
// depend on how many rows of activations were met together.
#pragma once
#include "../common/frame.cuh"
#include "panel.cuh"

// Four f16 factors of a lane's rows.
DEVICE void factors4(const u8* p, float (&f)[4]) {
    Words2 w = load8(p);
    f[0] = from_f16((u16)w.x), f[1] = from_f16((u16)(w.x >> 16));
    f[2] = from_f16((u16)w.y), f[3] = from_f16((u16)(w.y >> 16));
}
DEVICE u32 word_of(const Words4& w, u32 i) { return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w; }
DEVICE float code_of(u32 word, u32 byte) { return (float)(i32)(i8)(word >> 8 * byte); }

// Activations as f32, `N` rows.
template <u32 N> struct FloatRows {
    typedef float Element;
    const float* x[N];
};
// Activations as 8-bit blocks.
template <u32 N> struct Q8Rows {
    typedef Q8Block Element;
    const Q8Block* x[N];
};

// Floats. `stretch` counts 512 bytes of the panel.
struct PanelF32 {
    static const bool GAINS = false;
    static const u32 ROWS = 4, K = 8;
    template <u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const FloatRows<N>& in, float (&sum)[N][4]) {
        u32 k = stretch * K + lane() / 4;
        if (k >= p.cols) return;
        Words4 w = load_once(panel + (u64)stretch * 512 + lane() * 16);
        for (u32 n = 0; n < N; n++) {
            float x = in.x[n][k];
            for (u32 r = 0; r < 4; r++) sum[n][r] = fused(float_of(word_of(w, r)), x, sum[n][r]);
        }
    }
};
struct PanelBf16 {
    static const bool GAINS = false;
    static const u32 ROWS = 4, K = 16;
    template <u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const FloatRows<N>& in, float (&sum)[N][4]) {
        u32 k = stretch * K + lane() / 4 * 2;
        if (k >= p.cols) return;
        Words4 w = load_once(panel + (u64)stretch * 512 + lane() * 16);
        for (u32 n = 0; n < N; n++) {
            float x0 = in.x[n][k], x1 = k + 1 < p.cols ? in.x[n][k + 1] : 0.0f;
            for (u32 r = 0; r < 4; r++) {
                u32 v = word_of(w, r);
                sum[n][r] = fused(float_of(v << 16), x0, fused(float_of(v & 0xffff0000u), x1, sum[n][r]));
            }
        }
    }
};
struct PanelF16 {
    static const bool GAINS = false;
    static const u32 ROWS = 8, K = 16;
    template <u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const FloatRows<N>& in, float (&sum)[N][8]) {
        u32 k = stretch * K + lane() / 2;
        if (k >= p.cols) return;
        Words4 w = load_once(panel + (u64)stretch * 512 + lane() * 16);
        for (u32 n = 0; n < N; n++) {
            float x = in.x[n][k];
            for (u32 r = 0; r < 8; r++) sum[n][r] = fused(from_f16((u16)(word_of(w, r / 2) >> r % 2 * 16)), x, sum[n][r]);
        }
    }
};

struct PanelF8 {
    static const bool GAINS = false;
    static const u32 ROWS = 8, K = 32;
    template <u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const FloatRows<N>& in, float (&sum)[N][8]) {
        u32 k = stretch * K + lane() / 2 * 2;
        if (k >= p.cols) return;
        Words4 w = load_once(panel + f8_front(p) + (u64)stretch * 512 + lane() * 16);
        const float* scale = (const float*)panel + k / F8_RUN * 16 + lane() % 2 * 8;
        Words4 first = load16(scale), second = load16(scale + 4);
        float x0[N], x1[N];
        for (u32 n = 0; n < N; n++) x0[n] = in.x[n][k], x1[n] = in.x[n][k + 1];
        for (u32 r = 0; r < 8; r++) {
            u32 pair = pair_e4m3(word_of(w, r / 2) >> r % 2 * 16);
            float s = float_of(word_of(r < 4 ? first : second, r % 4));
            float low = times(s, from_f16((u16)pair)), high = times(s, from_f16((u16)(pair >> 16)));
            for (u32 n = 0; n < N; n++) sum[n][r] = fused(low, x0[n], fused(high, x1[n], sum[n][r]));
        }
    }
};

// Integers. `stretch` counts 64 columns: scales and minimums [64 / block][16], then codes. Block and minimum are the same for all of a launch, so
// asking for them at run time costs little, and there are few kernels. The gains of a panel are applied to finished sums.
struct Factors {
    float scale[4], min[4];
};
// Those of a lane's four rows for slot `slot32` of blocks of 32, `slot16` of blocks of 16.
DEVICE Factors factors_of(const Part& p, const u8* stretch, u32 slot32, u32 slot16) {
    u32 slot = p.block == 32 ? slot32 : slot16, at = slot * 32 + lane() % 4 * 8;
    Factors f = {{}, {}};
    factors4(stretch + at, f.scale);
    if (p.min) factors4(stretch + (p.block == 32 ? 64 : 128) + at, f.min);
    return f;
}
DEVICE u32 factor_bytes(const Part& p) { return (p.block == 32 ? 64 : 128) << (p.min ? 1 : 0); }

struct PanelI8 {
    static const bool GAINS = true;
    static const u32 ROWS = 4, K = 64;
    template <class In, u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const In& in, float (&sum)[N][4]) {
        u32 g = lane() / 4, factors = factor_bytes(p);
        const u8* at = panel + 64 + (u64)stretch * (factors + 1024);
        for (u32 half = 0; half < 2 && stretch * 64 + half * 32 < p.cols; half++) {
            Words4 w = load_once(at + factors + half * 512 + lane() * 16);
            u32 codes[4] = {w.x ^ 0x80808080u, w.y ^ 0x80808080u, w.z ^ 0x80808080u, w.w ^ 0x80808080u};
            four<N>(in, stretch * 2 + half, g, codes, factors_of(p, at, half, half * 2 + g / 4), p.min, sum);
        }
    }
    // Four k's of a block: those of group `g`.
    template <u32 N> DEVICE void four(const Q8Rows<N>& in, u32 block, u32 g, const u32 (&codes)[4], const Factors& f, u32 min, float (&sum)[N][4]) {
        for (u32 n = 0; n < N; n++) {
            const Q8Block* q = in.x[n] + block;
            u32 x = ((const u32*)q->codes)[g];
            float held = min ? (float)dot4_ss(0x01010101u, x, 0) : 0.0f;
            for (u32 r = 0; r < 4; r++) {
                float v = fused(-f.min[r], held, f.scale[r] * (float)dot4_ss(codes[r], x, 0));
                sum[n][r] = fused(q->scale, v, sum[n][r]);
            }
        }
    }
    template <u32 N> DEVICE void four(const FloatRows<N>& in, u32 block, u32 g, const u32 (&codes)[4], const Factors& f, u32, float (&sum)[N][4]) {
        for (u32 n = 0; n < N; n++) {
            const float* x = in.x[n] + block * 32 + g * 4;
            for (u32 r = 0; r < 4; r++) {
                for (u32 i = 0; i < 4; i++) sum[n][r] = fused(fused(f.scale[r], code_of(codes[r], i), -f.min[r]), x[i], sum[n][r]);
            }
        }
    }
};

// 4-bit codes as signed bytes: `low` the first four k's of eight, `high` the next four. (Functions of formats are called through an object,
// so that they may be static members or not.)
struct Nibbles {
    // What was added to stored codes.
    DEVICE i32 offset(const Part& p) { return p.min ? 0 : 8; }
    DEVICE void bytes(u32 w, const Part&, u32& low, u32& high) { low = w & 0x0f0f0f0fu, high = w >> 4 & 0x0f0f0f0fu; }
};
struct TableNibbles {
    DEVICE i32 offset(const Part&) { return 0; }
    DEVICE void bytes(u32 w, const Part& p, u32& low, u32& high) {
        const u32* t = (const u32*)p.table;
        u32 pick = w & 0x77777777u, upper = w >> 1 & 0x44444444u;
        // Four nibbles at a time: from the table's first and second half, then whichever is meant.
        u32 a = permute(permute(t[0], t[1], pick), permute(t[2], t[3], pick), 0x3210u | (upper & 0xffffu));
        pick >>= 16, upper >>= 16;
        u32 b = permute(permute(t[0], t[1], pick), permute(t[2], t[3], pick), 0x3210u | upper);
        low = permute(a, b, 0x6420), high = permute(a, b, 0x7531);
    }
};

template <class Codes> struct PanelNibbles {
    static const bool GAINS = true;
    static const u32 ROWS = 4, K = 64;
    template <class In, u32 N> DEVICE void step(const u8* panel, const Part& p, u32 stretch, const In& in, float (&sum)[N][4]) {
        u32 g = lane() / 4, factors = factor_bytes(p);
        const u8* at = panel + 64 + (u64)stretch * (factors + 512);
        // The last stretch may have one block of 32 alone.
        if (stretch * 64 + g * 8 >= p.cols) return;
        Words4 w = load_once(at + factors + lane() * 16);
        u32 low[4], high[4];
        for (u32 r = 0; r < 4; r++) Codes().bytes(word_of(w, r), p, low[r], high[r]);
        eight<N>(in, stretch * 2 + g / 4, g % 4, low, high, factors_of(p, at, g / 4, g / 2), Codes().offset(p), sum);
    }
    // Eight k's of a block: those of group `g`.
    template <u32 N> DEVICE void eight(const Q8Rows<N>& in, u32 block, u32 g, const u32 (&low)[4], const u32 (&high)[4], const Factors& f, i32 offset, float (&sum)[N][4]) {
        for (u32 n = 0; n < N; n++) {
            const Q8Block* q = in.x[n] + block;
            Words2 x = load8(q->codes + g * 8);
            i32 held = dot4_ss(0x01010101u, x.x, dot4_ss(0x01010101u, x.y, 0));
            for (u32 r = 0; r < 4; r++) {
                float v = fused(-f.min[r], (float)held, f.scale[r] * (float)dot4_ss(low[r], x.x, dot4_ss(high[r], x.y, -offset * held)));
                sum[n][r] = fused(q->scale, v, sum[n][r]);
            }
        }
    }
    template <u32 N> DEVICE void eight(const FloatRows<N>& in, u32 block, u32 g, const u32 (&low)[4], const u32 (&high)[4], const Factors& f, i32 offset, float (&sum)[N][4]) {
        for (u32 n = 0; n < N; n++) {
            const float* x = in.x[n] + block * 32 + g * 8;
            for (u32 r = 0; r < 4; r++) {
                for (u32 i = 0; i < 8; i++) {
                    sum[n][r] = fused(fused(f.scale[r], code_of(i < 4 ? low[r] : high[r], i % 4) - (float)offset, -f.min[r]), x[i], sum[n][r]);
                }
            }
        }
    }
};

// Products of a panel with `N` rows, this warp being number `warp` of `warps` that share it; the sums of all k's of a warp are afterwards
// in every lane for the rows that the lane reads (4 * (lane % 4).., for F16 8 * (lane % 2)..).
template <class Format, class In, u32 N> DEVICE void panel_sums(const u8* panel, const Part& p, const In& in, u32 warp, u32 warps, float (&sum)[N][Format::ROWS]) {
    for (u32 n = 0; n < N; n++) {
        for (u32 r = 0; r < Format::ROWS; r++) sum[n][r] = 0.0f;
    }
    u32 stretches = (p.cols + Format::K - 1) / Format::K;
#pragma unroll (N == 1 ? 4 : 1)
    for (u32 s = warp; s < stretches; s += warps) Format().step(panel, p, s, in, sum);
    for (u32 n = 0; n < N; n++) {
        for (u32 r = 0; r < Format::ROWS; r++) {
            for (u32 m = 16; m >= 16 / Format::ROWS; m /= 2) sum[n][r] += shuffle_xor(sum[n][r], m);
        }
    }
}
