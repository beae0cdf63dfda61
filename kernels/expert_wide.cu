// expert_wide: products of matrices that are picked by row and slot with many rows, on tensor cores. expert_linear.cu has the simple
// forms, src/ops/expert_linear.rs and src/ops/head_linear.rs the definitions.
//
// A block has up to 32 pairs (row, slot) of one matrix and 256 of its outputs: each of eight warps a pair of panels, its weights straight
// from memory, a chunk ahead. Activations of a chunk of 64 k's are put into shared memory in the order in which tensor cores take them, while the chunk
// before is met. Floats meet in limbs: the first the nearest bfloat16, each next one the nearest to what is left.
#include "common/routed.cuh"
#include "formats/fragments.cuh"

struct WideArgs {
    RoutedArgs routed;
    u32 limbs, spare;
};

static const u32 WIDE_TILES = 4, WIDE_PAIRS = 8 * WIDE_TILES, WIDE_CHUNK = 64, WIDE_LIMBS = 3;

// What a thread holds of the next chunk's activations, and how it puts them. Words lie [step][limb][tile][lane][2]: b0 and b1 of a product.
struct WideFloats {
    // Eight k's of a row: half of a step.
    Words4 low, high;
    DEVICE void load(const RoutedArgs& a, const Tile& tile, u32 k, u32 cols) {
        u32 row = threadIdx.x / 8, at = k + threadIdx.x % 8 * 8;
        low = high = Words4{};
        if (row >= tile.count || at >= cols) return;
        const float* x = input_of<float>(a, tile.pair[row]) + at;
        low = load16(x), high = load16(x + 4);
    }
    DEVICE void put(u32* words, BlockFactor*, u32 limbs, Order) {
        u32 row = threadIdx.x / 8, step = threadIdx.x % 8 / 2, half = threadIdx.x % 2;
        float v[8] = {float_of(low.x), float_of(low.y), float_of(low.z), float_of(low.w), float_of(high.x), float_of(high.y), float_of(high.z), float_of(high.w)};
        for (u32 limb = 0; limb < limbs; limb++) {
            u32* to = words + (((step * limbs + limb) * WIDE_TILES + row / 8) * 32 + row % 8 * 4) * 2 + half;
#pragma unroll
            for (u32 t = 0; t < 4; t++) {
                u32 pair = pair_bf16(v[2 * t], v[2 * t + 1]);
                to[2 * t] = pair;
                v[2 * t] -= low_bf16(pair), v[2 * t + 1] -= high_bf16(pair);
            }
        }
    }
};
struct WideCodes {
    // A quarter of a 32-block of a row, and of the block's numbers what a product needs.
    u32 b0, b1;
    BlockFactor factor;
    DEVICE void load(const RoutedArgs& a, const Tile& tile, u32 k, u32 cols, Order order) {
        u32 row = threadIdx.x / 8, block = k / 32 + threadIdx.x % 8 / 4, t = threadIdx.x % 4;
        b0 = b1 = 0, factor = BlockFactor{};
        if (row >= tile.count || block * 32 >= cols) return;
        const Q8Block& q = input_of<Q8Block>(a, tile.pair[row])[block];
        const u32* codes = (const u32*)q.codes;
        if (order == ORDER_I8) {
            b0 = codes[t], b1 = codes[t + 4];
        } else {
            u32 w0 = codes[2 * t], w1 = codes[2 * t + 1];
            b0 = order == ORDER_I4 ? w0 : permute(w0, w1, 0x5140), b1 = order == ORDER_I4 ? w1 : permute(w0, w1, 0x7362);
        }
        i32 first = q.half_offset[0] / -128, second = q.half_offset[1] / -128;
        factor = {q.scale, ((u32)first & 0xffff) | (u32)second << 16};
    }
    DEVICE void put(u32* words, BlockFactor* factors) {
        u32 row = threadIdx.x / 8, step = threadIdx.x % 8 / 4, t = threadIdx.x % 4;
        u32* to = words + ((step * WIDE_TILES + row / 8) * 32 + row % 8 * 4 + t) * 2;
        to[0] = b0, to[1] = b1;
        if (t == 0) factors[step * WIDE_PAIRS + row] = factor;
    }
};

// A step of weights of a pair of panels.
template <class F> struct WideWeights {
    typename F::Raw raw;
    typename F::Scales scales;
    DEVICE void load(const Part& p, const u8* panel, u32 step) {
        raw = F::load(InGlobal{F::codes(p, panel) + (u64)step * F::BYTES});
        scales.load(panel, step * F::STEP);
    }
};
template <class F> struct WideIntegers {
    typename F::Raw raw;
    Words2 scale[F::HALVES], min[F::HALVES];
    DEVICE void load(const u8* panel, u32 step) {
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

// What is the same for a block: its pairs, its part, and the panels of this warp.
struct WidePlace {
    Part part;
    // First of a pair of panels; whether the warp has one.
    u32 panel;
    bool there;
    const u8* weights;
};
DEVICE WidePlace wide_place(const RoutedArgs& a, const Tile& tile) {
    WidePlace w;
    w.part = a.table[(u64)(tile.matrix < a.matrices ? tile.matrix : 0) * a.parts + a.part];
    w.panel = (blockIdx.y * 8 + threadIdx.x / 32) * 2;
    w.there = w.panel < panels_of(w.part);
    // An odd last panel is met twice; the second time nobody looks.
    u32 mine = w.panel + lane() / 16;
    w.weights = panel_at(w.part, mine < panels_of(w.part) ? mine : w.there ? w.panel : 0);
    return w;
}

// Ids beyond compute nothing.
DEVICE bool wide_nothing(const RoutedArgs& a, const Tile& tile, const WidePlace& w) {
    if (tile.count == 0) return true;
    if (tile.matrix < a.matrices) return false;
    for (u32 i = threadIdx.x; i < tile.count * 256; i += blockDim.x) {
        u32 feature = blockIdx.y * 256 + i % 256;
        if (feature < w.part.rows) output_of(a, tile.pair[i / 256])[w.part.first + feature] = 0.0f;
    }
    return true;
}

// A lane's sums: outputs 4 g .. of the pair of panels, two pairs of each tile.
template <bool INTEGER> DEVICE void wide_store(const RoutedArgs& a, const Tile& tile, const WidePlace& w, const float (&acc)[WIDE_TILES][2][4]) {
    if (!w.there) return;
    u32 g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (u32 i = 0; i < WIDE_TILES; i++) {
#pragma unroll
        for (u32 c = 0; c < 2; c++) {
            u32 row = i * 8 + 2 * t + c;
            if (row >= tile.count) continue;
            float* y = output_of(a, tile.pair[row]) + w.part.first;
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u32 feature = w.panel * 16 + 4 * g + n;
                if (feature >= w.part.rows) continue;
                float v = acc[i][n / 2][n % 2 * 2 + c];
                if (INTEGER) v *= gain_of(panel_at(w.part, feature / 16), feature % 16);
                if (a.bias) v += a.bias[(u64)tile.matrix * a.outputs + w.part.first + feature];
                y[feature] = v;
            }
        }
    }
}

template <class F> DEVICE void wide_floats(const WideArgs& args, Tile& tile, u32* words) {
    const RoutedArgs& a = args.routed;
    find_tile(a, WIDE_PAIRS, tile);
    WidePlace w = wide_place(a, tile);
    if (wide_nothing(a, tile, w)) return;
    const u32 STEPS = WIDE_CHUNK / F::STEP;
    u32 steps = w.part.cols / F::STEP, limbs = args.limbs, size = STEPS * limbs * WIDE_TILES * 64;
    float acc[WIDE_TILES][2][4] = {};
    WideWeights<F> now[STEPS];
    WideFloats x;
    x.load(a, tile, 0, w.part.cols);
#pragma unroll
    for (u32 s = 0; s < STEPS; s++)
        if (w.there && s < steps) now[s].load(w.part, w.weights, s);
    x.put(words, nullptr, limbs, ORDER_BF16);
    barrier();
    for (u32 step = 0, chunk = 0; step < steps; step += STEPS, chunk++) {
        bool more = step + STEPS < steps;
        if (more) x.load(a, tile, (step + STEPS) * F::STEP, w.part.cols);
        const u32* from = words + chunk % 2 * size;
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
            if (!w.there || step + s >= steps) continue;
            for (u32 limb = limbs; limb-- > 0;) {
                u32 b[WIDE_TILES][2];
#pragma unroll
                for (u32 i = 0; i < WIDE_TILES; i++) {
                    Words2 v = load8(from + (((s * limbs + limb) * WIDE_TILES + i) * 32 + lane()) * 2);
                    b[i][0] = v.x, b[i][1] = v.y;
                }
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    u32 weights[4];
                    F::a(w.part, now[s].raw, m, weights);
#pragma unroll
                    for (u32 i = 0; i < WIDE_TILES; i++) multiply_scaled<F>(acc[i][m], weights, b[i][0], b[i][1], now[s].scales, m);
                }
            }
            if (step + s + STEPS < steps) now[s].load(w.part, w.weights, step + s + STEPS);
        }
        if (more) x.put(words + (chunk + 1) % 2 * size, nullptr, limbs, ORDER_BF16);
        barrier();
    }
    wide_store<false>(a, tile, w, acc);
    hand_on(a, tile.count, tile.pair);
}

template <class F> DEVICE void wide_integers(const WideArgs& args, Tile& tile, u32* words, BlockFactor* factors, Order order) {
    const RoutedArgs& a = args.routed;
    find_tile(a, WIDE_PAIRS, tile);
    WidePlace w = wide_place(a, tile);
    if (wide_nothing(a, tile, w)) return;
    const u32 STEPS = WIDE_CHUNK / 32, SIZE = STEPS * WIDE_TILES * 64;
    u32 steps = w.part.cols / 32;
    float acc[WIDE_TILES][2][4] = {};
    WideIntegers<F> now[STEPS];
    WideCodes x;
    x.load(a, tile, 0, w.part.cols, order);
#pragma unroll
    for (u32 s = 0; s < STEPS; s++)
        if (w.there && s < steps) now[s].load(w.weights, s);
    x.put(words, factors);
    barrier();
    for (u32 step = 0, chunk = 0; step < steps; step += STEPS, chunk++) {
        bool more = step + STEPS < steps;
        if (more) x.load(a, tile, (step + STEPS) * 32, w.part.cols, order);
        const u32* from = words + chunk % 2 * SIZE;
        const BlockFactor* scaled = factors + chunk % 2 * STEPS * WIDE_PAIRS;
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
            if (!w.there || step + s >= steps) continue;
#pragma unroll
            for (u32 i = 0; i < WIDE_TILES; i++) {
                Words2 v = load8(from + ((s * WIDE_TILES + i) * 32 + lane()) * 2);
                Words4 f = load16(scaled + s * WIDE_PAIRS + i * 8 + lane() % 4 * 2);
                const BlockFactor pair[2] = {{float_of(f.x), f.y}, {float_of(f.z), f.w}};
                add_block<F>(w.part, acc[i], now[s].raw, now[s].scale, now[s].min, v.x, v.y, pair);
            }
            if (step + s + STEPS < steps) now[s].load(w.weights, step + s + STEPS);
        }
        if (more) x.put(words + (chunk + 1) % 2 * SIZE, factors + (chunk + 1) % 2 * STEPS * WIDE_PAIRS);
        barrier();
    }
    wide_store<true>(a, tile, w, acc);
    hand_on(a, tile.count, tile.pair);
}

// Grid: (tiles, outputs / 256). Widths are multiples of 32.
#define WIDE_FLOATS(name, F)                                                                  \
    KERNEL_OF(256, name, WideArgs) {                                                          \
        begin();                                                                              \
        SHARED Tile tile;                                                                     \
        SHARED __align__(16) u32 words[2 * (WIDE_CHUNK / 16) * WIDE_LIMBS * WIDE_TILES * 64]; \
        wide_floats<F>(a, tile, words);                                                       \
    }
WIDE_FLOATS(expert_wide_bf16, Bf16Fragments)
WIDE_FLOATS(expert_wide_f8, F8Fragments)
#define WIDE_INTEGERS(name, order, ...)                                               \
    KERNEL_OF(256, name, WideArgs) {                                                  \
        begin();                                                                      \
        SHARED Tile tile;                                                             \
        SHARED __align__(16) u32 words[2 * (WIDE_CHUNK / 32) * WIDE_TILES * 64];      \
        SHARED __align__(16) BlockFactor factors[2 * (WIDE_CHUNK / 32) * WIDE_PAIRS]; \
        wide_integers<__VA_ARGS__>(a, tile, words, factors, order);                   \
    }
WIDE_INTEGERS(expert_wide_i8, ORDER_I8, IntegerFragments<LAYOUT_I8, false, false>)
WIDE_INTEGERS(expert_wide_i8_half, ORDER_I8, IntegerFragments<LAYOUT_I8, true, false>)
WIDE_INTEGERS(expert_wide_i8_min, ORDER_I8, IntegerFragments<LAYOUT_I8, false, true>)
WIDE_INTEGERS(expert_wide_i8_half_min, ORDER_I8, IntegerFragments<LAYOUT_I8, true, true>)
WIDE_INTEGERS(expert_wide_i4, ORDER_I4, IntegerFragments<LAYOUT_I4, false, false>)
WIDE_INTEGERS(expert_wide_i4_half, ORDER_I4, IntegerFragments<LAYOUT_I4, true, false>)
WIDE_INTEGERS(expert_wide_i4_min, ORDER_I4, IntegerFragments<LAYOUT_I4, false, true>)
WIDE_INTEGERS(expert_wide_i4_half_min, ORDER_I4, IntegerFragments<LAYOUT_I4, true, true>)
WIDE_INTEGERS(expert_wide_table, ORDER_TABLE, IntegerFragments<LAYOUT_TABLE, false, false>)
WIDE_INTEGERS(expert_wide_table_half, ORDER_TABLE, IntegerFragments<LAYOUT_TABLE, true, false>)
