// linear_narrow: y = W x + b for 5 to 32 rows, weights straight from memory into tensor cores. Bound by the read of the weights.
//
// A block takes a few pairs of panels; its warps are `ways` for each pair, which share k step by step, and their sums are added in order. A lane
// keeps AHEAD steps of weights on their way, the first of them before the kernels before have ended, since weights depend on nobody. Activations,
// which all pairs meet, go chunk by chunk through a ring in shared memory: so the cache serves them once a block.
//
// linear_prepare.cu has put them into the order of the tensor cores.
#include "common/rows.cuh"
#include "formats/fragments.cuh"

struct NarrowArgs {
    TensorArgs product;
    // Pairs of all parts, and of a block; warps of a pair.
    u32 all_pairs, pairs, ways;
    // Pairs are then of both parts by turns.
    Gating gating;
};

// Chunks of activations in shared memory.
static const u32 RING = 3;
// Words of a warp's sums of a tile: eight planes of 32, apart so that nobody meets a bank twice.
static const u32 PLANE = 36, SUMS = 8 * PLANE;

// The pair of panels `pair` counted over parts, each of which begins a new pair.
DEVICE const Part& part_of(const TensorArgs& a, u32& pair) {
    u32 index = 0;
    while (index + 1 < a.parts && pair >= (panels_of(a.part[index]) + 1) / 2) pair -= (panels_of(a.part[index++]) + 1) / 2;
    return a.part[index];
}

// A step of weights of one pair.
template <class F, bool INTEGER> struct Step {
    typename F::Raw raw;
    typename F::Scales scales;
    DEVICE void load(const Part& p, const u8* panel, u32 step) {
        raw = F::load(InGlobal{F::codes(p, panel) + (u64)step * F::BYTES});
        scales.load(panel, step * F::STEP);
    }
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

// Activations as they come through the ring: `bytes` of a chunk of `size` steps, and a step of it.
template <class F, u32 TILES> struct Activations {
    // b0 and b1 of each tile; of its two columns for integers, scales, and scaled sums of halves.
    u32 b[TILES][2];
    float scale[TILES][2], sum[TILES][2][2];
    static DEVICE u32 bytes(const NarrowArgs& n, u32 size) { return size * TILES * (F::INTEGER ? 320 : 256 * n.product.limbs); }
    static DEVICE void copy(const NarrowArgs& n, u8* to, u32 first, u32 count, u32 size, u32 steps) {
        const TensorArgs& a = n.product;
        for (u32 limb = 0; limb < (F::INTEGER ? 1 : a.limbs); limb++) {
            const u8* from = (const u8*)(a.words + ((u64)limb * steps + first) * TILES * 64);
            for (u32 i = threadIdx.x; i < count * TILES * 16; i += blockDim.x) copy16(to + limb * size * TILES * 256 + i * 16, from + i * 16);
        }
        if constexpr (F::INTEGER) {
            const u8* from = (const u8*)(a.factors + (u64)first * 8 * TILES);
            for (u32 i = threadIdx.x; i < count * TILES * 4; i += blockDim.x) copy16(to + size * TILES * 256 + i * 16, from + i * 16);
        }
    }
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

// `memory`: the ring, then the sums of warps.
template <class F, u32 TILES, u32 AHEAD> DEVICE void multiply_narrow(const NarrowArgs& n, u8* memory) {
    typedef Activations<F, TILES> X;
    // A chunk is half of what is on its way.
    const u32 PARTS = AHEAD % 2 ? 1 : 2, EACH = AHEAD / PARTS;
    const TensorArgs& a = n.product;
    u32 steps = a.part[0].cols / F::STEP, size = EACH * n.ways, chunks = (steps + size - 1) / size;
    u32 warp = threadIdx.x / 32, way = warp % n.ways, pair = blockIdx.x * n.pairs + warp / n.ways;
    // A warp without a pair only carries activations.
    bool any = pair < n.all_pairs;
    if (!any) pair = 0;
    u32 part = pair % 2;
    if (n.gating.on) pair /= 2;
    const Part& p = n.gating.on ? a.part[part] : part_of(a, pair);
    // An odd last panel is met twice; the second time nobody looks.
    u32 mine = pair * 2 + lane() / 16, out = pair * 32 + lane();
    const u8* panel = panel_at(p, mine < panels_of(p) ? mine : pair * 2);
    Step<F, F::INTEGER> ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (any && i * n.ways + way < steps) ahead[i].load(p, panel, i * n.ways + way);
    // The weight row that this lane stores.
    bool stores = any && out < p.rows;
    float gain = F::INTEGER && stores ? gain_of(panel_at(p, out / 16), out % 16) : 1.0f, bias = a.bias && stores ? a.bias[p.first + out] : 0.0f;
    u32 rows = *a.y.rows;
    begin();

    u32 bytes = X::bytes(n, size);
#pragma unroll
    for (u32 c = 0; c < RING - 1; c++) {
        u32 from = c * size;
        if (from < steps) X::copy(n, memory + c * bytes, from, steps - from < size ? steps - from : size, size, steps);
        copies_commit();
    }
    float acc[TILES][2][4] = {};
    u8 *here = memory, *free = memory + (RING - 1) * bytes;
    for (u32 c = 0; c < chunks;) {
#pragma unroll
        for (u32 part = 0; part < PARTS; part++, c++) {
            if (c >= chunks) break;
            copies_wait<RING - 2>();
            // Everybody's copies are there, and everybody has left the chunk before this one.
            barrier();
            u32 from = c * size, later = from + (RING - 1) * size;
            if (later < steps) X::copy(n, free, later, steps - later < size ? steps - later : size, size, steps);
            copies_commit();
            const u8* chunk = here;
            free = here;
            here = here + bytes == memory + RING * bytes ? memory : here + bytes;
            if (!any) continue;
            // As long as all of this chunk and of those on their way is there.
            if (from + (PARTS + 1) * size <= steps) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    X x;
                    for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                        x.load(chunk, size, i * n.ways + way, limb);
                        Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[part * EACH + i], x);
                    }
                    ahead[part * EACH + i].load(p, panel, from + PARTS * size + i * n.ways + way);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    u32 now = from + i * n.ways + way;
                    X x;
                    if (now < steps) {
                        for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                            x.load(chunk, size, i * n.ways + way, limb);
                            Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[part * EACH + i], x);
                        }
                    }
                    if (now + PARTS * size < steps) ahead[part * EACH + i].load(p, panel, now + PARTS * size);
                }
            }
        }
    }

    // The ring is done with.
    barrier();
    float* sums = (float*)memory;
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) sums[(warp * TILES + i) * SUMS + (m * 4 + j) * PLANE + m + j / 2 * 2 + lane()] = acc[i][m][j];
    barrier();
    if (!stores) return;
    // The warps of a pair share its rows; a lane has a weight row: 16 (g / 4) + 4 (g % 4) + 2 m + j / 2 is in lane (g, t), row 2 t + j % 2.
    u32 g = lane() / 4, m = lane() / 2 % 2;
    u32 first = warp - way, rest = way, all = n.ways;
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

// Grid: (groups of pairs); pairs * ways warps, up to 12. Shared: the larger of the ring, RING chunks of half as many steps as are on their way, and
// warps * TILES * 1,152 bytes.
#define NARROW(name, TILES, AHEAD, ...)                            \
    KERNEL_OF(384, name, NarrowArgs) {                                     \
        SHARED_BYTES(memory);                                              \
        multiply_narrow<__VA_ARGS__, TILES, AHEAD>(a, memory);     \
    }
// Steps on their way for 8, 16 and 32 rows: as `ahead` in src/ops/linear_launch.rs.
#define NARROWS(name, A1, A2, A4, ...)     \
    NARROW(name##_1, 1, A1, __VA_ARGS__)   \
    NARROW(name##_2, 2, A2, __VA_ARGS__)    \
    NARROW(name##_4, 4, A4, __VA_ARGS__)
NARROWS(narrow_bf16, 8, 8, 8, Bf16Fragments)
NARROWS(narrow_f16, 6, 6, 6, F16Fragments)
NARROWS(narrow_f8, 12, 8, 8, F8Fragments)
NARROWS(narrow_i8, 6, 4, 3, IntegerFragments<LAYOUT_I8, false, false>)
NARROWS(narrow_i8_half, 4, 3, 3, IntegerFragments<LAYOUT_I8, true, false>)
NARROWS(narrow_i8_min, 6, 4, 3, IntegerFragments<LAYOUT_I8, false, true>)
NARROWS(narrow_i8_half_min, 4, 3, 3, IntegerFragments<LAYOUT_I8, true, true>)
NARROWS(narrow_i4, 8, 6, 3, IntegerFragments<LAYOUT_I4, false, false>)
NARROWS(narrow_i4_half, 4, 3, 3, IntegerFragments<LAYOUT_I4, true, false>)
NARROWS(narrow_i4_min, 8, 6, 3, IntegerFragments<LAYOUT_I4, false, true>)
NARROWS(narrow_i4_half_min, 4, 3, 3, IntegerFragments<LAYOUT_I4, true, true>)
NARROWS(narrow_table, 8, 6, 3, IntegerFragments<LAYOUT_TABLE, false, false>)
NARROWS(narrow_table_half, 4, 3, 3, IntegerFragments<LAYOUT_TABLE, true, false>)
