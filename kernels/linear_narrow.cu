// linear_narrow: y = W x + b for 5 to 32 rows, weights straight from memory into tensor cores. Bound by the read of the weights.
//
// A block takes a few pairs of panels; its warps are `ways` for each pair, which share k step by step, and their sums are added in order. A lane
// keeps AHEAD steps of weights on their way, the first of them before the kernels before have ended, since weights depend on nobody. Activations,
// which all pairs meet, go chunk by chunk (AHEAD steps of each way) through a ring in shared memory: so the cache serves them once a block.
//
// linear_prepare.cu has put them into the order of the tensor cores. Up to eight rows of 8-bit blocks are taken as they are, and put into it on the
// way out of the ring.
#include "common/rows.cuh"
#include "formats/fragments.cuh"

struct NarrowArgs {
    TensorArgs product;
    // Blocks that are taken as they are.
    Q8View q;
    // Pairs of all parts, and of a block; warps of a pair.
    u32 all_pairs, pairs, ways, spare;
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

// Activations that linear_prepare.cu has laid out: `bytes` of a chunk of `size` steps, and a step of it.
template <class F, u32 TILES> struct Prepared {
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

// Blocks as they are: [8 rows][size steps], rows 16 bytes further apart, so that a warp's reads meet no bank twice.
template <class F, u32 TILES> struct Direct {
    u32 b[TILES][2];
    float scale[TILES][2], sum[TILES][2][2];
    static DEVICE u32 bytes(const NarrowArgs&, u32 size) { return 8 * (size * 64 + 16); }
    static DEVICE void copy(const NarrowArgs& n, u8* to, u32 first, u32 count, u32 size, u32) {
        u32 rows = *n.q.rows;
        for (u32 i = threadIdx.x; i < count * 32; i += blockDim.x) {
            u32 row = i / (count * 4), at = i % (count * 4);
            bool is = n.product.first + row < rows;
            copy16_some(to + row * (size * 64 + 16) + at * 16, (const u8*)(row_at(n.q, is ? n.product.first + row : 0) + first) + at * 16, is ? 16 : 0);
        }
    }
    DEVICE void load(const u8* chunk, u32 size, u32 step, u32) {
        u32 g = lane() / 4, t = lane() % 4, stride = size * 64 + 16;
        const u32* codes = (const u32*)(chunk + g * stride + step * 64);
        if (F::ORDER == ORDER_I8) {
            b[0][0] = codes[t], b[0][1] = codes[t + 4];
        } else {
            Words2 w = load8(codes + 2 * t);
            b[0][0] = F::ORDER == ORDER_I4 ? w.x : permute(w.x, w.y, 0x5140), b[0][1] = F::ORDER == ORDER_I4 ? w.y : permute(w.x, w.y, 0x7362);
        }
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const Q8Block* block = (const Q8Block*)(chunk + (2 * t + j) * stride + step * 64);
            Words2 w = load8(&block->scale), halves = F::HALF && F::MIN ? load8(block->half_sum) : Words2{};
            scale[0][j] = float_of(w.x);
            sum[0][j][0] = float_of(F::HALF ? halves.x : w.y), sum[0][j][1] = float_of(halves.y);
        }
    }
};

// How a format's activations come.
template <class F, u32 TILES, bool DIRECT> struct Source { typedef Prepared<F, TILES> X; };
template <class F> struct Source<F, 1, true> { typedef Direct<F, 1> X; };

// A step's products.
template <class F, u32 TILES, bool INTEGER> struct Meet {
    template <class X> static DEVICE void add(const Part& p, float (&acc)[TILES][2][4], const Step<F, INTEGER>& s, const X& x) {
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            u32 w[4];
            F::a(p, s.raw, m, w);
#pragma unroll
            for (u32 i = 0; i < TILES; i++) F::multiply(acc[i][m], w, x.b[i][0], x.b[i][1]);
        }
    }
};
// Codes as signed bytes, times 16 where they are the high halves of bytes; sums start where they are floats already.
template <class F, u32 TILES> struct Meet<F, TILES, true> {
    template <class X> static DEVICE void add(const Part& p, float (&acc)[TILES][2][4], const Step<F, true>& s, const X& x) {
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
template <class F, u32 TILES, u32 AHEAD, bool DIRECT> DEVICE void multiply_narrow(const NarrowArgs& n, u8* memory) {
    typedef typename Source<F, TILES, DIRECT>::X X;
    const TensorArgs& a = n.product;
    u32 steps = a.part[0].cols / F::STEP, size = AHEAD * n.ways, chunks = (steps + size - 1) / size;
    u32 warp = threadIdx.x / 32, way = warp % n.ways, pair = blockIdx.x * n.pairs + warp / n.ways;
    // A warp without a pair only carries activations.
    bool any = pair < n.all_pairs;
    if (!any) pair = 0;
    const Part& p = part_of(a, pair);
    // An odd last panel is met twice; the second time nobody looks.
    u32 mine = pair * 2 + lane() / 16;
    const u8* panel = panel_at(p, mine < panels_of(p) ? mine : pair * 2);
    Step<F, F::INTEGER> ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (any && i * n.ways + way < steps) ahead[i].load(p, panel, i * n.ways + way);
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
    for (u32 c = 0; c < chunks; c++) {
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
        // As long as all of this chunk and of the next one is there.
        if (from + 2 * size <= steps) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                X x;
                for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                    x.load(chunk, size, i * n.ways + way, limb);
                    Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[i], x);
                }
                ahead[i].load(p, panel, from + size + i * n.ways + way);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 now = from + i * n.ways + way;
                X x;
                if (now < steps) {
                    for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                        x.load(chunk, size, i * n.ways + way, limb);
                        Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[i], x);
                    }
                }
                if (now + size < steps) ahead[i].load(p, panel, now + size);
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
    // Thread (pair, row, weight row).
    for (u32 at = threadIdx.x; at < n.pairs * TILES * 256; at += blockDim.x) {
        u32 which = at / (TILES * 256), row = at / 32 % (TILES * 8), n32 = at % 32;
        // Weight row 16 (g / 4) + 4 (g % 4) + 2 m + j / 2 is in lane (g, t), activation row 2 t + j % 2.
        u32 g = n32 / 4, m = n32 / 2 % 2, j = n32 % 2 * 2 + row % 2, t = row % 8 / 2, store = blockIdx.x * n.pairs + which;
        if (store >= n.all_pairs || a.first + row >= rows) continue;
        const Part& to = part_of(a, store);
        u32 out = store * 32 + n32;
        if (out >= to.rows) continue;
        const float* from = sums + (which * n.ways * TILES + row / 8) * SUMS + (m * 4 + j) * PLANE + m + j / 2 * 2 + g * 4 + t;
        float total = 0.0f;
        for (u32 w = 0; w < n.ways; w++) total += from[w * TILES * SUMS];
        if (F::INTEGER) total *= gain_of(panel_at(to, out / 16), out % 16);
        else if (a.exponents) total *= a.exponents[row];
        if (a.bias) total += a.bias[to.first + out];
        row_at(a.y, a.first + row)[to.first + out] = total;
    }
}

// Grid: (groups of pairs); pairs * ways warps, up to 12. Shared: the larger of the ring, RING chunks of AHEAD * ways steps, and
// warps * TILES * 1,152 bytes.
#define NARROW(name, TILES, AHEAD, DIRECT, ...)                            \
    KERNEL_OF(384, name, NarrowArgs) {                                     \
        SHARED_BYTES(memory);                                              \
        multiply_narrow<__VA_ARGS__, TILES, AHEAD, DIRECT>(a, memory);     \
    }
// Steps on their way for 8, 16 and 32 rows: as `ahead` in src/ops/linear_launch.rs.
#define NARROWS(name, A1, A2, A4, DIRECT, ...)     \
    NARROW(name##_1, 1, A1, DIRECT, __VA_ARGS__)   \
    NARROW(name##_2, 2, A2, false, __VA_ARGS__)    \
    NARROW(name##_4, 4, A4, false, __VA_ARGS__)
NARROWS(narrow_bf16, 8, 8, 8, false, Bf16Fragments)
NARROWS(narrow_f16, 6, 6, 6, false, F16Fragments)
NARROWS(narrow_i8, 6, 4, 3, true, IntegerFragments<LAYOUT_I8, false, false>)
NARROWS(narrow_i8_half, 4, 3, 3, true, IntegerFragments<LAYOUT_I8, true, false>)
NARROWS(narrow_i8_min, 6, 4, 3, true, IntegerFragments<LAYOUT_I8, false, true>)
NARROWS(narrow_i8_half_min, 4, 3, 3, true, IntegerFragments<LAYOUT_I8, true, true>)
NARROWS(narrow_i4, 8, 6, 4, true, IntegerFragments<LAYOUT_I4, false, false>)
NARROWS(narrow_i4_half, 4, 3, 3, true, IntegerFragments<LAYOUT_I4, true, false>)
NARROWS(narrow_i4_min, 8, 6, 4, true, IntegerFragments<LAYOUT_I4, false, true>)
NARROWS(narrow_i4_half_min, 4, 3, 3, true, IntegerFragments<LAYOUT_I4, true, true>)
NARROWS(narrow_table, 8, 6, 4, true, IntegerFragments<LAYOUT_TABLE, false, false>)
NARROWS(narrow_table_half, 4, 3, 3, true, IntegerFragments<LAYOUT_TABLE, true, false>)
