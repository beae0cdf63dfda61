// linear_group: y = W x + b for many rows on compute capability 9.0, floats by products of groups of four warps. Bound by the tensor cores.
//
// A block computes 128 weight rows by 128 or 256 rows of x. Each of two groups has four panels, a warp one of them, which it reads from memory
// straight into registers, three stages of 64 k's ahead. Activations lie in memory as shared memory wants them (prepare_group in
// linear_prepare.cu), so that one thread of a third group brings a stage by one bulk copy.
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
// What a lane has of a panel's stage: rows 2 (lane / 4) and the next, the k's of its lane % 4 in each step of 16.
struct Bf16Group {
    typedef NoScales Scales;
    static const u32 BYTES = 2048;
    static DEVICE const u8* codes(const Part&, const u8* panel) { return panel; }
    u32 w[4][4];
    DEVICE void load(const u8* stage) {
        stage += lane() % 4 * 64 + lane() / 4 * 8;
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            Words2 low = load8_once(stage + s * 512), high = load8_once(stage + s * 512 + 256);
            w[s][0] = low.x, w[s][1] = low.y, w[s][2] = high.x, w[s][3] = high.y;
        }
    }
    static const bool ARRANGED = true;
    DEVICE void arrange() {}
    DEVICE void multiply(float (&d)[64], Operand x, u32 step) const { group_bf16(d, w[step], x, true); }
};
// Pairs of k's come from two words.
struct F16Group {
    typedef NoScales Scales;
    static const u32 BYTES = 2048;
    static DEVICE const u8* codes(const Part&, const u8* panel) { return panel; }
    u32 w[4][4];
    DEVICE void load(const u8* stage) {
        stage += lane() % 4 * 64 + lane() / 4 * 4;
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) w[s][i] = load4_once(stage + s * 512 + i / 2 * 256 + i % 2 * 32);
    }
    static const bool ARRANGED = false;
    DEVICE void arrange() {
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i += 2) {
                u32 low = permute(w[s][i], w[s][i + 1], 0x5410), high = permute(w[s][i], w[s][i + 1], 0x7632);
                w[s][i] = low, w[s][i + 1] = high;
            }
    }
    DEVICE void multiply(float (&d)[64], Operand x, u32 step) const { group_f16(d, w[step], x, true); }
};

// A word has a pair of k's of both rows.
struct F8Group {
    typedef F8Scales Scales;
    static const u32 BYTES = 1024;
    static DEVICE const u8* codes(const Part& p, const u8* panel) { return panel + f8_front(p); }
    u32 raw[8];
    DEVICE void load(const u8* stage) {
        stage += lane() % 4 * 32 + lane() / 4 * 4;
#pragma unroll
        for (u32 i = 0; i < 8; i++) raw[i] = load4_once(stage + i * 128);
    }
    // Into registers of their own, while products of others are on their way.
    DEVICE void decode(u32 (&w)[4][4]) const {
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) w[s][i] = bf16_of_e4m3(raw[2 * s + i / 2] >> i % 2 * 16);
    }
};

// What the sums of a lane's two rows are multiples of, as in linear_wide.cu: the scales of the run that is met.
struct GroupUnits {
    const u8* panel;
    Words2 now, next;
    DEVICE Words2 load(u32 k) const { return load8(panel + k / F8_RUN * 64 + lane() / 4 * 8); }
    DEVICE void begin(const u8* at) {
        panel = at;
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

// HALVES: of 128 rows of x.
template <class F, u32 HALVES, u32 STAGES> DEVICE void multiply_group(const TensorArgs& a, u8* memory) {
    const u32 TILE = HALVES * 128 * 128, DEPTH = 4;
    memory += (0u - shared_address(memory)) % ATOM;
    Barrier *full = (Barrier*)(memory + STAGES * TILE), *empty = full + STAGES;
    u32 warp = threadIdx.x / 32, panel = blockIdx.y * PANELS, row = blockIdx.x * HALVES * 128;
    const Part& p = part_of(a, panel);
    u32 rows = *a.y.rows, per_limb = p.cols / 64, stages = per_limb * a.limbs;
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
    u32 last = panels_of(p) - 1, mine = panel + warp;
    const u8 *scales = panel_at(p, mine < last ? mine : last), *weights = F::codes(p, scales);
    auto at_stage = [&](u32 s) { return weights + (u64)(s < stages ? s % per_limb : 0) * F::BYTES; };
    auto x_at = [&](u32 slot, u32 h, u32 step) { return operand_of_rows(memory + slot * TILE + h * 128 * 128, step); };
    GroupUnits units = {};
    float acc[HALVES][64] = {};
    F raw[DEPTH];
#pragma unroll
    for (u32 i = 0; i < DEPTH - 1; i++) raw[i].load(at_stage(i));
    // Operands of two stages, where they are decoded.
    u32 w[2][4][4];
    if constexpr (F::Scales::ANY) {
        units.begin(scales);
        raw[0].decode(w[0]);
    }
    for (u32 first = 0; first < stages; first += DEPTH) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            u32 s = first + i, slot = s % STAGES;
            if (s >= stages) break;
            if constexpr (F::Scales::ANY) {
                // Whole runs of two stages each: a constant for each turn of the loop, without which the compiler lets products wait.
                const bool turns = i % 2 == 0;
                Words2 ratio = {};
                if (turns) ratio = units.turn(s % per_limb * 64 + F8_RUN, p.cols);
                barrier_wait(&full[slot], s / STAGES & 1);
                if (turns) {
                    group_wait<0>();
#pragma unroll
                    for (u32 h = 0; h < HALVES; h++) units.apply(acc[h], ratio);
                }
                group_begin();
#pragma unroll
                for (u32 step = 0; step < 4; step++)
#pragma unroll
                    for (u32 h = 0; h < HALVES; h++) group_bf16(acc[h], w[i % 2][step], x_at(slot, h, step), true);
                group_commit();
                // The stage before is done: its slot and its operands are free.
                group_wait<1>();
                raw[(i + 1) % DEPTH].decode(w[(i + 1) % 2]);
            } else {
                raw[i].arrange();
                barrier_wait(&full[slot], s / STAGES & 1);
                group_begin();
#pragma unroll
                for (u32 step = 0; step < 4; step++)
#pragma unroll
                    for (u32 h = 0; h < HALVES; h++) raw[i].multiply(acc[h], x_at(slot, h, step), step);
                group_commit();
                // As above. No operand may be arranged in place while a product is on its way.
                group_wait<F::ARRANGED ? 1 : 0>();
            }
            if (s > 0 && lane() == 0) barrier_arrive(&empty[(s - 1) % STAGES]);
            raw[(i + DEPTH - 1) % DEPTH].load(at_stage(s + DEPTH - 1));
        }
    }
    group_wait<0>();
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) group_results(acc[h]);
    // A lane has two weight rows side by side for each row of x.
    u32 n = mine * 16 + lane() / 4 * 2;
    if (n >= p.rows) return;
    bool both = n + 1 < p.rows;
    float unit[2] = {F::Scales::ANY ? float_of(units.now.x) : 1.0f, F::Scales::ANY ? float_of(units.now.y) : 1.0f};
    float bias[2] = {a.bias ? a.bias[p.first + n] : 0.0f, a.bias && both ? a.bias[p.first + n + 1] : 0.0f};
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
                float v[2] = {acc[h][4 * j + c] * (factor * unit[0]) + bias[0], acc[h][4 * j + 2 + c] * (factor * unit[1]) + bias[1]};
                if (both && (u64)y % 8 == 0) {
                    *(Words2*)y = {bits_of(v[0]), bits_of(v[1])};
                } else {
                    y[0] = v[0];
                    if (both) y[1] = v[1];
                }
            }
}

// Grid: (rows / (128 HALVES), blocks of 8 panels of all parts); 384 threads. Shared: STAGES tiles of 16 KB HALVES, and 2 KB to align them and for
// their barriers.
#define GROUP(name, F, HALVES, STAGES)                 \
    KERNEL_OF(384, name, TensorArgs) {                 \
        SHARED_BYTES(memory);                          \
        multiply_group<F, HALVES, STAGES>(a, memory);  \
    }
GROUP(group_bf16_128, Bf16Group, 1, 8)
GROUP(group_bf16_256, Bf16Group, 2, 6)
GROUP(group_f16_128, F16Group, 1, 8)
GROUP(group_f16_256, F16Group, 2, 6)
GROUP(group_f8_128, F8Group, 1, 8)
GROUP(group_f8_256, F8Group, 2, 6)
#endif
