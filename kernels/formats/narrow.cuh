// Products of 5 to 32 rows: what linear_narrow.cu and linear_stream.cu share.
#pragma once
#include "../common/rows.cuh"
#include "fragments.cuh"

struct NarrowArgs {
    TensorArgs product;
    // Pairs of all parts, and of a block; warps of a pair.
    u32 all_pairs, pairs, ways;
    // Of a ring in shared memory.
    u32 stages;
    // Pairs are then of both parts by turns.
    Gating gating;
    u32 spare;
};

// Words of a warp's sums of a tile: eight planes of 32, apart so that nobody meets a bank twice.
static const u32 PLANE = 36, SUMS = 8 * PLANE;

// The pair of panels `pair` counted over parts, each of which begins a new pair.
DEVICE const Part& part_of(const TensorArgs& a, u32& pair) {
    u32 index = 0;
    while (index + 1 < a.parts && pair >= (panels_of(a.part[index]) + 1) / 2) pair -= (panels_of(a.part[index++]) + 1) / 2;
    return a.part[index];
}

// A step of weights of one pair, from where the memory `M` has it.
template <class F, bool INTEGER> struct Step {
    typename F::Raw raw;
    typename F::Scales scales;
    // `codes`: of the step; `front`: the panel's scales, of which those at `k` are the step's.
    template <class M> DEVICE void load(const u8* codes, const u8* front, u32 k) {
        raw = F::load(M{codes});
        scales.load(front, k);
    }
};
template <class F> struct Step<F, true> {
    typename F::Raw raw;
    Words2 scale[F::HALVES], min[F::HALVES];
    // `stretch`: of 64 k's, whose half `odd` is the step.
    template <class M> DEVICE void load(const u8* stretch, u32 odd) {
        raw = F::load(M{stretch + F::STRETCH - F::CODES + odd * (F::CODES / 2)});
        const u8* scales = stretch + odd * (F::SCALES / 2) + lane() / 4 % 4 * 8;
#pragma unroll
        for (u32 h = 0; h < F::HALVES; h++) {
            scale[h] = load8(scales + h * 32);
            min[h] = F::MIN ? load8(scales + F::SCALES + h * 32) : Words2{};
        }
    }
};

// Activations in shared memory: `bytes` of a chunk of `size` steps, and a step of it.
template <class F, u32 TILES> struct Activations {
    // b0 and b1 of each tile; of its two columns for integers, scales, and scaled sums of halves.
    u32 b[TILES][2];
    float scale[TILES][2], sum[TILES][2][2];
    static DEVICE u32 bytes(const NarrowArgs& n, u32 size) { return size * TILES * (F::INTEGER ? 320 : F::STEP * 16 * n.product.limbs); }
    DEVICE void load(const u8* chunk, u32 size, u32 step, u32 limb) {
        const u32* words = (const u32*)(chunk + (limb * size + step) * TILES * 256);
        if constexpr (TILES == 1) {
            Words2 w = load8(words + lane() * 2);
            b[0][0] = w.x, b[0][1] = w.y;
        } else {
#pragma unroll
            for (u32 i = 0; i < TILES / 2; i++) {
                Words4 w = load16(words + (i * 32 + lane()) * 4);
                b[2 * i][0] = w.x, b[2 * i][1] = w.y, b[2 * i + 1][0] = w.z, b[2 * i + 1][1] = w.w;
            }
        }
        if constexpr (F::INTEGER) {
#pragma unroll
            for (u32 i = 0; i < TILES; i++) {
                Words4 w = load16(chunk + size * TILES * 256 + ((step * TILES + i) * 8 + lane() % 4 * 2) * 8);
                const BlockFactor x[2] = {{float_of(w.x), w.y}, {float_of(w.z), w.w}};
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    scale[i][j] = x[j].scale;
                    sum[i][j][0] = times(x[j].scale, (float)(F::HALF ? x[j].low() : x[j].low() + x[j].high()));
                    sum[i][j][1] = times(x[j].scale, (float)x[j].high());
                }
            }
        }
    }
};

// A step's products.
template <class F, u32 TILES, bool INTEGER> struct Meet {
    static DEVICE void add(const Part& p, float (&acc)[TILES][2][4], const Step<F, INTEGER>& s, const Activations<F, TILES>& x) {
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            u32 w[4];
            F::a(p, s.raw, m, w);
#pragma unroll
            for (u32 i = 0; i < TILES; i++) multiply_scaled<F>(acc[i][m], w, x.b[i][0], x.b[i][1], s.scales, m);
        }
    }
};
// Codes as signed bytes, times 16 where they are the high halves of bytes; sums start where they are floats already.
template <class F, u32 TILES> struct Meet<F, TILES, true> {
    static DEVICE void add(const Part& p, float (&acc)[TILES][2][4], const Step<F, true>& s, const Activations<F, TILES>& x) {
        const float SHRINK = F::NIBBLES ? 0.0625f : 1.0f, MAGIC = 12582912.0f;
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            u32 w[4];
            F::signed_a(p, s.raw, m, w);
#pragma unroll
            for (u32 h = 0; h < F::HALVES; h++) {
                u32 scales = m ? s.scale[h].y : s.scale[h].x, mins = m ? s.min[h].y : s.min[h].x;
                float scale[2] = {low_f16(scales) * SHRINK, high_f16(scales) * SHRINK}, start[2] = {scale[0] * -MAGIC, scale[1] * -MAGIC};
                float min[2] = {low_f16(mins), high_f16(mins)};
#pragma unroll
                for (u32 i = 0; i < TILES; i++) {
                    u32 b0 = x.b[i][0], b1 = x.b[i][1];
                    if (F::HALF) F::half(h, b0, b1);
                    i32 c[4];
                    mma_s8s8_from(MAGIC_BITS, c, w, b0, b1);
#pragma unroll
                    for (u32 j = 0; j < 4; j++) {
                        // The magic number's product is exact, so this is the code's own, rounded once.
                        float v = fused(float_of((u32)c[j]), scale[j / 2], start[j / 2]);
                        acc[i][m][j] = fused(v, x.scale[i][j % 2], acc[i][m][j]);
                        if (F::MIN) acc[i][m][j] = fused(-min[j / 2], x.sum[i][j % 2][h], acc[i][m][j]);
                    }
                }
            }
        }
    }
};

// Adds up the sums of warps that share k, and stores them. A warp has had way `way` of pair `pair` of the block: with gating, pairs are those of part
// `part`. `out`: the lane's weight row of `p`; `gain` and `bias` of it. All threads of the block's first pairs * ways warps come here.
template <class F, u32 TILES> struct NarrowSums {
    const NarrowArgs& n;
    const Part& p;
    u32 part, way, out;
    bool stores;
    float gain, bias;
    DEVICE NarrowSums(const NarrowArgs& n, const Part& p, u32 part, u32 pair, u32 way, bool any) : n(n), p(p), part(part), way(way) {
        const TensorArgs& a = n.product;
        out = pair * 32 + lane();
        stores = any && out < p.rows;
        gain = F::INTEGER && stores ? gain_of(panel_at(p, out / 16), out % 16) : 1.0f;
        bias = a.bias && stores ? a.bias[p.first + out] : 0.0f;
    }
    // `sums`: of all warps.
    DEVICE void put(float* sums, const float (&acc)[TILES][2][4]) const {
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) sums[(threadIdx.x / 32 * TILES + i) * SUMS + (m * 4 + j) * PLANE + m + j / 2 * 2 + lane()] = acc[i][m][j];
    }
    DEVICE void store(const float* sums, u32 rows) const {
        if (!stores) return;
        const TensorArgs& a = n.product;
        // The warps of a pair share its rows; a lane has a weight row: 16 (g / 4) + 4 (g % 4) + 2 m + j / 2 is in lane (g, t), row 2 t + j % 2.
        u32 g = lane() / 4, m = lane() / 2 % 2;
        u32 first = threadIdx.x / 32 - way, rest = way, all = n.ways;
        // Those of a gate and its other factor share the rows of both.
        if (n.gating.on) first -= part * n.ways, rest += part * n.ways, all *= 2;
        const float* from = sums + first * TILES * SUMS + (m * 4 + lane() % 2 * 2) * PLANE + m + lane() % 2 * 2 + g * 4;
#pragma unroll 4
        for (u32 row = rest; row < TILES * 8; row += all) {
            if (a.first + row >= rows) break;
            auto sum = [&](u32 before) {
                float total = 0.0f;
                for (u32 w = before; w < before + n.ways; w++) total += from[(w * TILES + row / 8) * SUMS + row % 2 * PLANE + row % 8 / 2];
                return total;
            };
            if (!F::INTEGER && n.gating.on) {
                float gate = sum(0), up = sum(n.ways);
                if (a.bias) gate += a.bias[a.part[0].first + out], up += a.bias[a.part[1].first + out];
                store_one(a.y, a.first + row, out, n.gating(gate, up));
                continue;
            }
            float total = sum(0);
            if (F::INTEGER) total *= gain;
            else if (a.exponents) total *= a.exponents[row];
            if (a.bias) total += bias;
            row_at(a.y, a.first + row)[p.first + out] = total;
        }
    }
};
