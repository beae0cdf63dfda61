// linear_group: y = W x + b for many rows on compute capability 9.0, by products of groups of four warps. Bound by the tensor cores.
//
// A block computes 128 weight rows by 128 or 256 rows of x. Each of two groups has four panels, a warp one of them, which it reads from memory
// straight into registers, three stages of 64 k's ahead; integers become f16 there. Activations lie in memory as shared memory wants them
// (prepare_group and prepare_group_codes in linear_prepare.cu), so that one thread of a third group brings a stage by one bulk copy.
#include "common/rows.cuh"
#include "common/sm90.cuh"
#include "formats/fragments.cuh"

static const u32 WARPS = 8, PANELS = WARPS, ATOM = 1024;

// The part that a block's panels are in, and the first of them there. Each part begins a new block.
DEVICE const Part& part_of(const TensorArgs& a, u32& panel) {
    u32 index = 0;
    for (; index + 1 < a.parts; index++) {
        u32 taken = (panels_of(a.part[index]) + PANELS - 1) / PANELS * PANELS;
        if (panel < taken) break;
        panel -= taken;
    }
    return a.part[index];
}

#if SM90
// A format tells
//   STAGE     bytes of a panel's 64 k's, behind FRONT bytes
//   Raw       what a lane loads of them, for rows `row` and the next of a panel
//   SCALED    whether runs of k have scales in front of the panel, of which sums are multiples (GroupUnits)
//   READY     whether that is operand A as it is; else `operands` makes it, which no product may be reading then
//   multiply  by 128 rows of x.
// Which k's a step of 16 meets is the format's choice, and that of prepare_group and prepare_group_codes.
struct Bf16Group {
    struct Raw {
        u32 w[4][4];
    };
    static const u32 STAGE = 2048, FRONT = 0;
    static const bool READY = true, INTEGER = false, SCALED = false;
    static DEVICE void load(Raw& r, const u8* stage, u32 row) {
        stage += lane() % 4 * 64 + row * 4;
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            Words2 low = load8_once(stage + s * 512), high = load8_once(stage + s * 512 + 256);
            r.w[s][0] = low.x, r.w[s][1] = low.y, r.w[s][2] = high.x, r.w[s][3] = high.y;
        }
    }
    static DEVICE void multiply(float (&d)[64], const u32 (&w)[4], Operand x) { group_bf16(d, w, x, true); }
};
// Pairs of k's come from two words.
struct F16Group {
    struct Raw {
        u32 w[4][4];
    };
    static const u32 STAGE = 2048, FRONT = 0;
    static const bool READY = false, INTEGER = false, SCALED = false;
    static DEVICE void load(Raw& r, const u8* stage, u32 row) {
        stage += lane() % 4 * 64 + row * 2;
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) r.w[s][i] = load4_once(stage + s * 512 + i / 2 * 256 + i % 2 * 32);
    }
    static DEVICE void operands(const Part&, const Raw& r, u32 (&to)[4][4]) {
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i += 2) {
                to[s][i] = permute(r.w[s][i], r.w[s][i + 1], 0x5410), to[s][i + 1] = permute(r.w[s][i], r.w[s][i + 1], 0x7632);
            }
    }
    static DEVICE void multiply(float (&d)[64], const u32 (&w)[4], Operand x) { group_f16(d, w, x, true); }
};
// Codes as f16, times their block's scale, less its minimum, rounded once; scales are at most 256, so f16 holds products. A lane has words of four
// codes: the first and third are a pair, and the second and fourth.
template <LayoutKind KIND, bool HALF, bool MIN> struct IntegerGroup {
    typedef IntegerLines<KIND, HALF, MIN> Lines;
    static const u32 WORDS = KIND == LAYOUT_I8 ? 8 : 4, BLOCKS = HALF ? 4 : 2, STAGE = Lines::STRETCH, FRONT = GAINS;
    static const bool READY = false, INTEGER = true, SCALED = false;
    struct Raw {
        // Of both rows.
        Words2 codes[WORDS / 2];
        u32 scale[BLOCKS], min[MIN ? BLOCKS : 1];
    };
    static DEVICE void load(Raw& r, const u8* stage, u32 row) {
        const u8* scales = stage + row * 2;
        const u8* codes = stage + STAGE - Lines::CODES + lane() % 4 * 64 + row * 4;
#pragma unroll
        for (u32 i = 0; i < WORDS / 2; i++) r.codes[i] = load8_once(codes + i * 256);
#pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) {
            r.scale[b] = load4_once(scales + b * 32);
            if (MIN) r.min[b] = load4_once(scales + Lines::SCALES + b * 32);
        }
    }
    // Four codes of a row, the word's low or high halves of bytes where it has eight.
    static DEVICE u32 bytes_of(const Part& p, u32 word, u32 half) {
        if (KIND == LAYOUT_I8) return word;
        if (KIND == LAYOUT_I4) return (half ? word >> 4 : word) & 0x0f0f0f0f;
        u32 even, odd;
        Lines::look_up(p, word, even, odd);
        return permute(even, odd, half ? 0x7531 : 0x6420) ^ 0x80808080;
    }
    static DEVICE void operands(const Part& p, const Raw& r, u32 (&to)[4][4]) {
        // 1024 and what was added to codes.
        const u32 BASE = KIND == LAYOUT_I4 ? MIN ? 0x64006400 : 0x64086408 : 0x64806480;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            u32 scale[BLOCKS], min[BLOCKS];
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
                scale[b] = permute(r.scale[b], 0, row ? 0x3232 : 0x1010);
                min[b] = MIN ? permute(r.min[b], 0, row ? 0x3232 : 0x1010) ^ 0x80008000 : 0;
            }
#pragma unroll
            for (u32 s = 0; s < 4; s++) {
                // Eight codes of a word of half bytes are of 32 k's, four in a step; their halves of 16 are those of lanes.
                u32 word = WORDS == 8 ? s : s / 2, b = !HALF ? s / 2 : KIND == LAYOUT_I8 ? s : 0;
                u32 bytes = bytes_of(p, row ? r.codes[word].y : r.codes[word].x, s % 2);
                u32 by = scale[b], less = min[b];
                if (HALF && KIND != LAYOUT_I8) {
                    bool second = lane() % 4 / 2;
                    by = second ? scale[s / 2 * 2 + 1] : scale[s / 2 * 2], less = second ? min[s / 2 * 2 + 1] : min[s / 2 * 2];
                }
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 codes = less_f16(permute(bytes, 0x64, i ? 0x4341 : 0x4240), BASE);
                    to[s][i * 2 + row] = MIN ? fused_f16(codes, by, less) : times_f16(codes, by);
                }
            }
        }
    }
    static DEVICE void multiply(float (&d)[64], const u32 (&w)[4], Operand x) { group_f16(d, w, x, true); }
};

// 8-bit floats as bfloat16, without their scales. A word has a pair of k's of both rows.
struct F8Group {
    struct Raw {
        u32 w[8];
    };
    static const u32 STAGE = 1024, FRONT = 0;
    static const bool READY = false, INTEGER = false, SCALED = true;
    static DEVICE void load(Raw& r, const u8* stage, u32 row) {
        stage += lane() % 4 * 32 + row * 2;
#pragma unroll
        for (u32 i = 0; i < 8; i++) r.w[i] = load4_once(stage + i * 128);
    }
    static DEVICE void operands(const Part&, const Raw& r, u32 (&to)[4][4]) {
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) to[s][i] = bf16_of_e4m3(r.w[2 * s + i / 2] >> i % 2 * 16);
    }
    static DEVICE void multiply(float (&d)[64], const u32 (&w)[4], Operand x) { group_bf16(d, w, x, true); }
};

// What the sums of a lane's two rows are multiples of, as in linear_wide.cu: the scales of the run that is met.
struct GroupUnits {
    const u8* panel;
    Words2 now, next;
    DEVICE Words2 load(u32 k) const { return load8(panel + k / F8_RUN * 64); }
    // `row`: the lane's first of two.
    DEVICE void begin(const u8* at, u32 row) {
        panel = at + row * 4;
        next = load(0), now = next;
    }
    // To the run that has been loaded; the one after it begins at k. Gives back what sums are to be multiplied by.
    DEVICE Words2 turn(u32 k, u32 cols) {
        Words2 ratio = {bits_of(over(float_of(now.x), float_of(next.x))), bits_of(over(float_of(now.y), float_of(next.y)))};
        now = next;
        next = load(k < cols ? k : 0);
        return ratio;
    }
    static DEVICE void apply(float (&acc)[64], Words2 ratio) {
        group_results(acc);
#pragma unroll
        for (u32 i = 0; i < 64; i++) acc[i] *= float_of(i % 4 < 2 ? ratio.x : ratio.y);
    }
};

// A block's 128 weight rows, 16 for each warp, by HALVES times 128 rows of x from `row` on; `p` tells columns. `panel`: of a lane, whose scales are
// read here where it has such, for its rows `within` and the next. `load` loads what a lane has of a stage; `store` takes a warp's sums.
template <class F, u32 HALVES, u32 STAGES, class Load, class Store>
DEVICE void multiply_group(const TensorArgs& a, u8* memory, const Part& p, const u8* panel, u32 within, u32 row, Load load, Store store) {
    const u32 TILE = HALVES * 128 * 128, DEPTH = 4;
    memory += (0u - shared_address(memory)) % ATOM;
    Barrier *full = (Barrier*)(memory + STAGES * TILE), *empty = full + STAGES;
    u32 warp = threadIdx.x / 32, rows = *a.y.rows, per_limb = p.cols / 64, stages = per_limb * a.limbs;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], WARPS);
        }
        barriers_ready();
    }
    barrier();
    begin();
    if (a.first + row >= rows) return;
    if (warp >= WARPS) {
        registers_down<24>();
        if (threadIdx.x != WARPS * 32) return;
        // The smallest limbs first.
        for (u32 s = 0; s < stages; s++) {
            u32 slot = s % STAGES, limb = a.limbs - 1 - s / per_limb, stage = limb * per_limb + s % per_limb;
            if (s >= STAGES) barrier_wait(&empty[slot], (s / STAGES - 1) & 1);
            barrier_expect(&full[slot], TILE);
            copy_bulk(memory + slot * TILE, (const u8*)a.words + ((u64)stage * a.tiles + row / 8) * ATOM, TILE, &full[slot]);
        }
        return;
    }
    registers_up<240>();
    const u32 front = F::SCALED ? f8_front(p) : F::FRONT;
    GroupUnits units = {};
    if (F::SCALED) units.begin(panel, within);
    auto at_stage = [&](u32 s) { return front + (u64)(s < stages ? s % per_limb : 0) * F::STAGE; };
    float acc[HALVES][64] = {};
    typename F::Raw raw[DEPTH];
    // Those of 8-bit floats are made while the products of the stage before are on their way.
    u32 operands[F::SCALED ? 2 : 1][4][4];
#pragma unroll
    for (u32 i = 0; i < DEPTH - 1; i++) load(raw[i], at_stage(i));
    if constexpr (F::SCALED) F::operands(p, raw[0], operands[0]);
    for (u32 first = 0; first < stages; first += DEPTH) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            u32 s = first + i, slot = s % STAGES;
            if (s >= stages) break;
            if constexpr (!F::READY && !F::SCALED) F::operands(p, raw[i], operands[0]);
            // Whole runs of two stages each: a constant for each turn of the loop.
            Words2 ratio = {};
            if (F::SCALED && i % 2 == 0) ratio = units.turn(s % per_limb * 64 + F8_RUN, p.cols);
            barrier_wait(&full[slot], s / STAGES & 1);
            if (F::SCALED && i % 2 == 0) {
                group_wait<0>();
#pragma unroll
                for (u32 h = 0; h < HALVES; h++) units.apply(acc[h], ratio);
            }
            group_begin();
#pragma unroll
            for (u32 step = 0; step < 4; step++)
#pragma unroll
                for (u32 h = 0; h < HALVES; h++) {
                    Operand x = operand_of_rows(memory + slot * TILE + h * 128 * 128, step);
                    if constexpr (F::READY) F::multiply(acc[h], raw[i].w[step], x);
                    else F::multiply(acc[h], operands[F::SCALED ? i % 2 : 0][step], x);
                }
            group_commit();
            // The stage before is done: its slot and its registers are free. Operands that are made wait for their own.
            group_wait<F::READY || F::SCALED ? 1 : 0>();
            if constexpr (F::SCALED) F::operands(p, raw[(i + 1) % DEPTH], operands[(i + 1) % 2]);
            if (s > 0 && lane() == 0) barrier_arrive(&empty[(s - 1) % STAGES]);
            load(raw[(i + DEPTH - 1) % DEPTH], at_stage(s + DEPTH - 1));
        }
    }
    group_wait<0>();
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) {
        group_results(acc[h]);
        if (F::SCALED) units.apply(acc[h], units.now);
    }
    store(acc, rows);
}

// Panel `panel` of a part; beyond its end the last one, whose sums nobody takes.
DEVICE const u8* panel_within(const Part& p, u32 panel) {
    u32 last = panels_of(p) - 1;
    return panel_at(p, panel < last ? panel : last);
}

template <class F, u32 HALVES, u32 STAGES> DEVICE void linear_group(const TensorArgs& a, u8* memory) {
    u32 panel = blockIdx.y * PANELS, row = blockIdx.x * HALVES * 128;
    const Part& p = part_of(a, panel);
    u32 mine = panel + threadIdx.x / 32;
    const u8* weights = panel_within(p, mine);
    auto load = [&](typename F::Raw& raw, u64 at) { F::load(raw, weights + at, lane() / 4 * 2); };
    multiply_group<F, HALVES, STAGES>(a, memory, p, weights, lane() / 4 * 2, row, load, [&](float (&acc)[HALVES][64], u32 rows) {
        u32 n = mine * 16 + lane() / 4 * 2;
        if (n >= p.rows) return;
        bool both = n + 1 < p.rows;
        float bias[2] = {a.bias ? a.bias[p.first + n] : 0.0f, a.bias && both ? a.bias[p.first + n + 1] : 0.0f}, gain[2] = {1.0f, 1.0f};
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            if (F::INTEGER) gain[i] = gain_of(panel_at(p, n / 16), n % 16 + i);
#pragma unroll
        for (u32 h = 0; h < HALVES; h++)
#pragma unroll
            for (u32 j = 0; j < 16; j++)
#pragma unroll
                for (u32 c = 0; c < 2; c++) {
                    u32 at = row + h * 128 + j * 8 + lane() % 4 * 2 + c;
                    if (a.first + at >= rows) continue;
                    float factor = a.exponents ? a.exponents[at] : 1.0f;
                    float* y = row_at(a.y, a.first + at) + p.first + n;
                    float v[2] = {acc[h][4 * j + c] * factor, acc[h][4 * j + 2 + c] * factor};
#pragma unroll
                    for (u32 i = 0; i < 2; i++) v[i] = (F::INTEGER ? v[i] * gain[i] : v[i]) + bias[i];
                    if (both && (u64)y % 8 == 0) {
                        *(Words2*)y = {bits_of(v[0]), bits_of(v[1])};
                    } else {
                        y[0] = v[0];
                        if (both) y[1] = v[1];
                    }
                }
    });
}

// Grid: (rows / (128 HALVES), blocks of 8 panels of all parts); 384 threads. Shared: STAGES tiles of 16 KB HALVES, and 2 KB to align them and for
// their barriers.
#define GROUP(name, HALVES, STAGES, ...)                       \
    KERNEL_OF(384, name, TensorArgs) {                         \
        SHARED_BYTES(memory);                                  \
        linear_group<__VA_ARGS__, HALVES, STAGES>(a, memory);  \
    }
#define GROUPS(name, ...)                     \
    GROUP(name##_128, 1, 8, __VA_ARGS__)      \
    GROUP(name##_256, 2, 6, __VA_ARGS__)
GROUPS(group_bf16, Bf16Group)
GROUPS(group_f16, F16Group)
GROUPS(group_f8, F8Group)
GROUPS(group_i8, IntegerGroup<LAYOUT_I8, false, false>)
GROUPS(group_i8_half, IntegerGroup<LAYOUT_I8, true, false>)
GROUPS(group_i8_min, IntegerGroup<LAYOUT_I8, false, true>)
GROUPS(group_i8_half_min, IntegerGroup<LAYOUT_I8, true, true>)
GROUPS(group_i4, IntegerGroup<LAYOUT_I4, false, false>)
GROUPS(group_i4_half, IntegerGroup<LAYOUT_I4, true, false>)
GROUPS(group_i4_min, IntegerGroup<LAYOUT_I4, false, true>)
GROUPS(group_i4_half_min, IntegerGroup<LAYOUT_I4, true, true>)
GROUPS(group_table, IntegerGroup<LAYOUT_TABLE, false, false>)
GROUPS(group_table_half, IntegerGroup<LAYOUT_TABLE, true, false>)

struct GatedArgs {
    // The gate's part, and that of what it is multiplied with.
    TensorArgs product;
    Gating gating;
    u32 spare;
};

// y = act(gate x) * (up x), rows of words or of f32: a warp has eight rows of the gate, in its lower lanes, and the same of `up`. At the end lanes of
// the same rows give each other one of their two rows of x.
template <class F, u32 HALVES, u32 STAGES> DEVICE void gated_group(const GatedArgs& g, u8* memory) {
    const TensorArgs& a = g.product;
    u32 warp = threadIdx.x / 32, row = blockIdx.x * HALVES * 128, panel = blockIdx.y * (PANELS / 2) + warp / 2;
    u32 upper = lane() / 16, within = warp % 2 * 8 + lane() / 4 % 4 * 2;
    const Part &gate = a.part[0], &up = a.part[1];
    const u8* weights = panel_within(upper ? up : gate, panel);
    auto load = [&](typename F::Raw& raw, u64 at) { F::load(raw, weights + at, within); };
    multiply_group<F, HALVES, STAGES>(a, memory, gate, weights, within, row, load, [&](float (&acc)[HALVES][64], u32 rows) {
        u32 n = panel * 16 + within;
        float bias[2][2] = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            if (a.bias && n + i < gate.rows) bias[0][i] = a.bias[gate.first + n + i], bias[1][i] = a.bias[up.first + n + i];
#pragma unroll
        for (u32 h = 0; h < HALVES; h++)
#pragma unroll
            for (u32 j = 0; j < 16; j++) {
                float v[2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float low = acc[h][4 * j + 2 * i], high = acc[h][4 * j + 2 * i + 1];
                    float own = upper ? high : low, got = shuffle_xor(upper ? low : high, 16u);
                    v[i] = g.gating((upper ? got : own) + bias[0][i], (upper ? own : got) + bias[1][i]);
                }
                u32 at = row + h * 128 + j * 8 + lane() % 4 * 2 + upper;
                if (at >= rows || n >= gate.rows) continue;
                if (n + 1 < gate.rows) store_pair(a.y, at, n, v[0], v[1]);
                else row_at(a.y, at)[n] = v[0];
            }
    });
}

// Grid: (rows / (128 HALVES), blocks of 4 panels of both parts); 384 threads. Shared: as above.
#define GATED(name, F, HALVES, STAGES)                 \
    KERNEL_OF(384, name, GatedArgs) {                  \
        SHARED_BYTES(memory);                          \
        gated_group<F, HALVES, STAGES>(a, memory);     \
    }
GATED(gated_bf16_128, Bf16Group, 1, 8)
GATED(gated_bf16_256, Bf16Group, 2, 6)
GATED(gated_f8_128, F8Group, 1, 8)
GATED(gated_f8_256, F8Group, 2, 6)
#endif
