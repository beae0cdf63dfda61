// linear_narrow: y = W x + b for 5 to 32 rows, weights straight from memory into tensor cores. Bound by the read of the weights.
//
// A warp has PAIRS pairs of panels and TILES tiles of eight rows; the warps of a block share k, step by step, and their sums are added in
// order. A lane keeps AHEAD steps of weights on their way.
#include "common/rows.cuh"
#include "formats/fragments.cuh"

// The pair of panels `pair` counted over parts, each of which begins a new pair.
DEVICE const Part& part_of(const TensorArgs& a, u32& pair) {
    u32 index = 0;
    while (index + 1 < a.parts && pair >= (panels_of(a.part[index]) + 1) / 2) pair -= (panels_of(a.part[index++]) + 1) / 2;
    return a.part[index];
}

// A step of weights of one pair.
template <class F, bool INTEGER> struct Step {
    typename F::Raw raw;
    DEVICE void load(const Part&, const u8* panel, u32 step) { raw = F::load(InGlobal{panel + (u64)step * F::BYTES}); }
};
template <class F> struct Step<F, true> {
    typename F::Raw raw;
    Words2 scale[F::HALVES], min[F::HALVES];
    DEVICE void load(const Part&, const u8* panel, u32 step) {
        const u8* at = panel + GAINS + (u64)(step / 2) * F::STRETCH;
        raw = F::load(InGlobal{at + F::STRETCH - F::CODES + step % 2 * (F::CODES / 2)});
        const u8* scales = at + step % 2 * (F::SCALES / 2) + lane() / 4 % 4 * 8;
#pragma unroll
        for (u32 h = 0; h < F::HALVES; h++) {
            scale[h] = load8(scales + h * 32);
            min[h] = F::MIN ? load8(scales + F::SCALES + h * 32) : Words2{};
        }
    }
};

// Activations of a step: b0 and b1 of each tile.
template <u32 TILES> DEVICE void load_words(const u32* words, u64 step, u32 (&b)[TILES][2]) {
    if (TILES == 1) {
        Words2 w = load8(words + (step * 32 + lane()) * 2);
        b[0][0] = w.x, b[0][1] = w.y;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < TILES / 2; i++) {
        Words4 w = load16(words + ((step * (TILES / 2) + i) * 32 + lane()) * 4);
        b[2 * i][0] = w.x, b[2 * i][1] = w.y, b[(2 * i + 1) % TILES][0] = w.z, b[(2 * i + 1) % TILES][1] = w.w;
    }
}

template <class F, u32 TILES, bool INTEGER> struct Meet {
    static DEVICE void add(const TensorArgs&, const Part& p, float (&acc)[TILES][2][4], const Step<F, INTEGER>& s, const u32 (&b)[TILES][2], u32) {
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            u32 w[4];
            F::a(p, s.raw, m, w);
#pragma unroll
            for (u32 i = 0; i < TILES; i++) F::multiply(acc[i][m], w, b[i][0], b[i][1]);
        }
    }
};
template <class F, u32 TILES> struct Meet<F, TILES, true> {
    static DEVICE void add(const TensorArgs& a, const Part& p, float (&acc)[TILES][2][4], const Step<F, true>& s, const u32 (&b)[TILES][2], u32 step) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            Words4 w = load16(a.factors + (u64)step * 8 * TILES + i * 8 + lane() % 4 * 2);
            const BlockFactor x[2] = {{float_of(w.x), w.y}, {float_of(w.z), w.w}};
            add_block<F>(p, acc[i], s.raw, s.scale, s.min, b[i][0], b[i][1], x);
        }
    }
};

// `sums`: [warps][TILES][2][4][32].
template <class F, u32 TILES, u32 AHEAD> DEVICE void multiply_narrow(const TensorArgs& a, float* sums) {
    u32 pair = blockIdx.x;
    const Part& p = part_of(a, pair);
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, steps = p.cols / F::STEP;
    // An odd last panel is met twice; the second time nobody looks.
    u32 mine = pair * 2 + lane() / 16;
    const u8* panel = panel_at(p, mine < panels_of(p) ? mine : pair * 2);
    Step<F, F::INTEGER> ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (warp + i * warps < steps) ahead[i].load(p, panel, warp + i * warps);
    u32 rows = *a.y.rows;
    begin();
    float acc[TILES][2][4] = {};
    u32 step = warp;
    for (; step + (2 * AHEAD - 1) * warps < steps; step += AHEAD * warps) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            u32 now = step + i * warps, b[TILES][2];
            for (u32 limb = a.limbs; limb-- > 0;) {
                load_words<TILES>(a.words, (u64)limb * steps + now, b);
                Meet<F, TILES, F::INTEGER>::add(a, p, acc, ahead[i], b, now);
            }
            ahead[i].load(p, panel, now + AHEAD * warps);
        }
    }
    for (; step < steps; step += AHEAD * warps) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            u32 now = step + i * warps, next = now + AHEAD * warps, b[TILES][2];
            if (now < steps) {
                for (u32 limb = a.limbs; limb-- > 0;) {
                    load_words<TILES>(a.words, (u64)limb * steps + now, b);
                    Meet<F, TILES, F::INTEGER>::add(a, p, acc, ahead[i], b, now);
                }
            }
            if (next < steps) ahead[i].load(p, panel, next);
        }
    }
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) sums[((warp * TILES + i) * 8 + m * 4 + j) * 32 + lane()] = acc[i][m][j];
    barrier();
    // Thread (row, weight row) of the 8 * TILES x 32 sums.
    for (u32 at = threadIdx.x; at < TILES * 256; at += blockDim.x) {
        u32 row = at / 32, n32 = at % 32;
        // Weight row 16 (g / 4) + 4 (g % 4) + 2 m + j / 2 is in lane (g, t), activation row 2 t + j % 2.
        u32 g = n32 / 4, m = n32 / 2 % 2, j = n32 % 2 * 2 + row % 2, t = row % 8 / 2, n = pair * 32 + n32;
        if (a.first + row >= rows || n >= p.rows) continue;
        float total = 0.0f;
        for (u32 w = 0; w < warps; w++) total += sums[((w * TILES + row / 8) * 8 + m * 4 + j) * 32 + g * 4 + t];
        if (F::INTEGER) total *= gain_of(panel_at(p, n / 16), n % 16);
        else if (a.exponents) total *= a.exponents[row];
        if (a.bias) total += a.bias[p.first + n];
        row_at(a.y, a.first + row)[p.first + n] = total;
    }
}

// Grid: (pairs of panels of all parts); up to 8 warps. Shared: warps * TILES * 1,024 bytes.
#define NARROW(name, TILES, AHEAD, ...)                              \
    KERNEL_OF(256, name, TensorArgs) {                               \
        SHARED_BYTES(memory);                                        \
        multiply_narrow<__VA_ARGS__, TILES, AHEAD>(a, (float*)memory); \
    }
#define NARROWS(name, AHEAD, ...)             \
    NARROW(name##_1, 1, AHEAD, __VA_ARGS__) \
    NARROW(name##_2, 2, AHEAD, __VA_ARGS__) \
    NARROW(name##_4, 4, AHEAD, __VA_ARGS__)
NARROWS(narrow_bf16, 6, Bf16Fragments)
NARROWS(narrow_f16, 6, F16Fragments)
NARROWS(narrow_i8, 4, IntegerFragments<LAYOUT_I8, false, false>)
NARROWS(narrow_i8_half, 4, IntegerFragments<LAYOUT_I8, true, false>)
NARROWS(narrow_i8_min, 4, IntegerFragments<LAYOUT_I8, false, true>)
NARROWS(narrow_i8_half_min, 3, IntegerFragments<LAYOUT_I8, true, true>)
NARROWS(narrow_i4, 6, IntegerFragments<LAYOUT_I4, false, false>)
NARROWS(narrow_i4_half, 4, IntegerFragments<LAYOUT_I4, true, false>)
NARROWS(narrow_i4_min, 4, IntegerFragments<LAYOUT_I4, false, true>)
NARROWS(narrow_i4_half_min, 4, IntegerFragments<LAYOUT_I4, true, true>)
NARROWS(narrow_table, 6, IntegerFragments<LAYOUT_TABLE, false, false>)
NARROWS(narrow_table_half, 4, IntegerFragments<LAYOUT_TABLE, true, false>)
