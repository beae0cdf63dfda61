// linear_wide: y = W x + b for many rows, by tensor cores. Bound by them, or, for integers, by the arithmetic that scales blocks.
//
// A block computes 128 weight rows by 8 * TILES rows of x. Stages of two steps of both operands are copied to shared memory while others are
// multiplied: panels as they lie (chunks swapped against bank conflicts), activations as linear_prepare.cu has laid them. ROW_WARPS x
// (8 / ROW_WARPS) warps share the result; each keeps its part in registers.
#include "common/rows.cuh"
#include "formats/fragments.cuh"

static const u32 PANELS = 8, WARPS = 8, THREADS = WARPS * 32;

// Bytes of a stage's panel, in front of whose codes lie its scales.
template <class F, bool INTEGER> struct Stage {
    static const u32 PANEL = 2 * F::BYTES, FRONT = 0, FACTORS = 0;
    static DEVICE const u8* from(const Part& p, const u8* panel, u32 stage) { return F::codes(p, panel) + (u64)stage * PANEL; }
};
template <class F> struct Stage<F, true> {
    static const u32 PANEL = F::STRETCH, FRONT = F::STRETCH - F::CODES, FACTORS = 2 * 64;
    static DEVICE const u8* from(const Part&, const u8* panel, u32 stage) { return panel + GAINS + (u64)stage * PANEL; }
};

template <class F, u32 TILES> struct Sizes {
    typedef Stage<F, F::INTEGER> S;
    static const u32 A = PANELS * S::PANEL, B = 2 * TILES * 256, BYTES = A + B + TILES * S::FACTORS;
};

// Queues the copies of a stage: `stage` of the panels, which meets stage `x_stage` of the activations.
template <class F, u32 TILES> DEVICE void copy_stage(const TensorArgs& a, const Part& p, u32 panel, u32 tile, u32 stage, u32 x_stage, u8* to) {
    typedef Sizes<F, TILES> Z;
    typedef typename Z::S S;
    const u32 CHUNKS = S::PANEL / 16, FRONT = S::FRONT / 16;
    u32 last = panels_of(p) - 1;
    for (u32 i = threadIdx.x; i < PANELS * CHUNKS; i += THREADS) {
        u32 which = i / CHUNKS, chunk = i % CHUNKS, at = panel + which;
        u32 place = chunk < FRONT ? chunk : FRONT + swapped(chunk - FRONT);
        copy16(to + which * S::PANEL + place * 16, S::from(p, panel_at(p, at < last ? at : last), stage) + chunk * 16);
    }
    const u8* words = (const u8*)a.words + ((u64)2 * x_stage * a.tiles + tile) * 256;
    for (u32 i = threadIdx.x; i < 2 * TILES * 16; i += THREADS)
        copy16(to + Z::A + i * 16, words + (u64)(i / (TILES * 16)) * a.tiles * 256 + i % (TILES * 16) * 16);
    if (F::INTEGER) {
        const u8* factors = (const u8*)a.factors + ((u64)2 * x_stage * a.tiles + tile) * 64;
        for (u32 i = threadIdx.x; i < 2 * TILES * 4; i += THREADS)
            copy16(to + Z::A + Z::B + i * 16, factors + (u64)(i / (TILES * 4)) * a.tiles * 64 + i % (TILES * 4) * 16);
    }
}

// b0 and b1 of a warp's tiles in one step.
template <u32 N> DEVICE void shared_words(const u8* words, u32 (&b)[N][2]) {
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) {
        Words4 w = load16(words + (i * 32 + lane()) * 16);
        b[2 * i][0] = w.x, b[2 * i][1] = w.y, b[2 * i + 1][0] = w.z, b[2 * i + 1][1] = w.w;
    }
}

template <class F, u32 TILES, u32 P, u32 N, bool INTEGER> struct Multiply {
    static DEVICE void step(const Part& p, const u8* stage, u32 step, u32 pair, u32 tile, float (&acc)[P][N][2][4]) {
        typedef Sizes<F, TILES> Z;
        u32 b[N][2];
        shared_words<N>(stage + Z::A + (step * TILES + tile) * 256, b);
#pragma unroll
        for (u32 i = 0; i < P; i++) {
            typename F::Raw raw = F::load(InShared{stage + ((pair + i) * 2 + lane() / 16) * Z::S::PANEL + step * F::BYTES});
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                u32 w[4];
                F::a(p, raw, m, w);
#pragma unroll
                for (u32 j = 0; j < N; j++) F::multiply(acc[i][j][m], w, b[j][0], b[j][1]);
            }
        }
    }
};
template <class F, u32 TILES, u32 P, u32 N> struct Multiply<F, TILES, P, N, true> {
    static DEVICE void step(const Part& p, const u8* stage, u32 step, u32 pair, u32 tile, float (&acc)[P][N][2][4]) {
        typedef Sizes<F, TILES> Z;
        u32 b[N][2];
        shared_words<N>(stage + Z::A + (step * TILES + tile) * 256, b);
        const u8* factors = stage + Z::A + Z::B + ((step * TILES + tile) * 8 + lane() % 4 * 2) * 8;
#pragma unroll
        for (u32 i = 0; i < P; i++) {
            const u8* panel = stage + ((pair + i) * 2 + lane() / 16) * Z::S::PANEL;
            typename F::Raw raw = F::load(InShared{panel + Z::S::FRONT + step * F::BYTES});
            const u8* scales = panel + step * (F::SCALES / 2) + lane() / 4 % 4 * 8;
            Words2 scale[F::HALVES], min[F::HALVES];
#pragma unroll
            for (u32 h = 0; h < F::HALVES; h++) {
                scale[h] = load8(scales + h * 32);
                min[h] = F::MIN ? load8(scales + F::SCALES + h * 32) : Words2{};
            }
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                Words4 w = load16(factors + j * 64);
                const BlockFactor x[2] = {{float_of(w.x), w.y}, {float_of(w.z), w.w}};
                add_block<F>(p, acc[i][j], raw, scale, min, b[j][0], b[j][1], x);
            }
        }
    }
};

// What a lane's sums are multiples of: the scales of the run that is met, where the format has some. With the next run's they are divided by the
// ratio, which src/backend/cpu/pack.rs keeps within 2^64.
template <class F, u32 P, bool SCALED> struct Units {
    DEVICE void begin(const Part&, u32) {}
    template <u32 N> DEVICE void turn(float (&)[P][N][2][4], u32, u32) {}
    DEVICE float of(u32, u32) const { return 1.0f; }
};
template <class F, u32 P> struct Units<F, P, true> {
    const u8* panel[P];
    F8Scales now[P], next[P];
    DEVICE void begin(const Part& p, u32 pair) {
#pragma unroll
        for (u32 i = 0; i < P; i++) {
            u32 at = pair + i * 2 + lane() / 16, last = panels_of(p) - 1;
            panel[i] = panel_at(p, at < last ? at : last);
            next[i].load(panel[i], 0), now[i] = next[i];
        }
    }
    // To the run that has been loaded; the one after it begins at k.
    template <u32 N> DEVICE void turn(float (&acc)[P][N][2][4], u32 k, u32 cols) {
#pragma unroll
        for (u32 i = 0; i < P; i++) {
#pragma unroll
            for (u32 row = 0; row < 4; row++) {
                float ratio = over(now[i].of(row), next[i].of(row));
#pragma unroll
                for (u32 j = 0; j < N; j++)
#pragma unroll
                    for (u32 c = 0; c < 2; c++) acc[i][j][row / 2][row % 2 * 2 + c] *= ratio;
            }
            now[i] = next[i];
            next[i].load(panel[i], k < cols ? k : 0);
        }
    }
    DEVICE float of(u32 i, u32 row) const { return now[i].of(row); }
};

template <class F, u32 TILES, u32 ROW_WARPS, u32 STAGES> DEVICE void multiply_wide(const TensorArgs& a, u8* memory) {
    typedef Sizes<F, TILES> Z;
    const u32 P = PANELS / 2 / ROW_WARPS, N = TILES / (WARPS / ROW_WARPS);
    u32 panel = blockIdx.y * PANELS, index = 0, tile = blockIdx.x * TILES;
    while (index + 1 < a.parts) {
        // Each part begins a new block.
        u32 taken = (panels_of(a.part[index]) + PANELS - 1) / PANELS * PANELS;
        if (panel < taken) break;
        panel -= taken, index++;
    }
    const Part& p = a.part[index];
    u32 rows = *a.y.rows, per_limb = F::INTEGER ? (p.cols + 63) / 64 : p.cols / 32, stages = per_limb * a.limbs;
    begin();
    if (a.first + tile * 8 >= rows) return;
    u32 warp = threadIdx.x / 32, pair = warp % ROW_WARPS * P, mine = warp / ROW_WARPS * N;
    // The smallest limbs first.
    auto copy = [&](u32 s) {
        u32 limb = a.limbs - 1 - s / per_limb, stage = s % per_limb;
        copy_stage<F, TILES>(a, p, panel, tile, stage, limb * per_limb + stage, memory + s % STAGES * Z::BYTES);
    };
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < stages) copy(s);
        copies_commit();
    }
    float acc[P][N][2][4] = {};
    Units<F, P, F::Scales::ANY> units;
    units.begin(p, panel + pair * 2);
    for (u32 s = 0; s < stages; s++) {
        copies_wait<STAGES - 2>();
        barrier();
        if (s + STAGES - 1 < stages) copy(s + STAGES - 1);
        copies_commit();
        const u8* stage = memory + s % STAGES * Z::BYTES;
        u32 k = s % per_limb * 32;
        if (k % F8_RUN == 0) units.turn(acc, k + F8_RUN, p.cols);
#pragma unroll
        for (u32 step = 0; step < 2; step++) Multiply<F, TILES, P, N, F::INTEGER>::step(p, stage, step, pair, mine, acc);
    }
    // A lane has four weight rows side by side for each row of x.
    u32 t = lane() % 4;
#pragma unroll
    for (u32 i = 0; i < P; i++) {
        u32 n = (panel + (pair + i) * 2) * 16 + lane() / 4 * 4;
        if (n >= p.rows) continue;
        float gain[4], bias[4] = {};
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            gain[k] = units.of(i, k);
            if (F::INTEGER) gain[k] = gain_of(panel_at(p, n / 16), n % 16 + k);
            if (a.bias && n + k < p.rows) bias[k] = a.bias[p.first + n + k];
        }
#pragma unroll
        for (u32 j = 0; j < N; j++) {
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                u32 at = (tile + mine + j) * 8 + t * 2 + c;
                if (a.first + at >= rows) continue;
                float factor = !F::INTEGER && a.exponents ? a.exponents[at] : 1.0f;
                float* y = row_at(a.y, a.first + at) + p.first + n;
                float v[4];
#pragma unroll
                for (u32 k = 0; k < 4; k++) v[k] = acc[i][j][k / 2][k % 2 * 2 + c] * (gain[k] * factor) + bias[k];
                if (n + 4 <= p.rows && (u64)y % 16 == 0) {
                    *(Words4*)y = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
                } else {
                    for (u32 k = 0; k < 4 && n + k < p.rows; k++) y[k] = v[k];
                }
            }
        }
    }
}

// Grid: (rows / (8 TILES), blocks of 8 panels of all parts). Shared: STAGES stages; see src/ops/linear_launch.rs.
#define WIDE(name, TILES, ROW_WARPS, STAGES, ...)                           \
    KERNEL_OF(256, name, TensorArgs) {                                        \
        SHARED_BYTES(memory);                                               \
        multiply_wide<__VA_ARGS__, TILES, ROW_WARPS, STAGES>(a, memory);    \
    }
#define FLOATS(name, ...)                    \
    WIDE(name##_8, 8, 4, 4, __VA_ARGS__)     \
    WIDE(name##_32, 32, 2, 3, __VA_ARGS__)
// Blocks of integers are scaled in registers, which larger tiles do not leave room for.
#define INTEGERS(name, ...)                  \
    WIDE(name##_8, 8, 4, 4, __VA_ARGS__)     \
    WIDE(name##_16, 16, 2, 4, __VA_ARGS__)
FLOATS(wide_bf16, Bf16Fragments)
FLOATS(wide_f16, F16Fragments)
FLOATS(wide_f8, F8Fragments)
INTEGERS(wide_i8, IntegerFragments<LAYOUT_I8, false, false>)
INTEGERS(wide_i8_half, IntegerFragments<LAYOUT_I8, true, false>)
INTEGERS(wide_i8_min, IntegerFragments<LAYOUT_I8, false, true>)
INTEGERS(wide_i8_half_min, IntegerFragments<LAYOUT_I8, true, true>)
INTEGERS(wide_i4, IntegerFragments<LAYOUT_I4, false, false>)
INTEGERS(wide_i4_half, IntegerFragments<LAYOUT_I4, true, false>)
INTEGERS(wide_i4_min, IntegerFragments<LAYOUT_I4, false, true>)
INTEGERS(wide_i4_half_min, IntegerFragments<LAYOUT_I4, true, true>)
INTEGERS(wide_table, IntegerFragments<LAYOUT_TABLE, false, false>)
INTEGERS(wide_table_half, IntegerFragments<LAYOUT_TABLE, true, false>)
