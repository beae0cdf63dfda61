// linear_vector: y = W x + b for few rows, each weight read once for up to R of them. Bound by the read of the weights.
//
// A block takes panels of 16 weight rows, one after the other; its warps share k, step by step. A lane keeps AHEAD steps on their way, across the
// end of a panel too. The first of them are asked for before the kernels before have ended, since weights depend on nobody. (More than registers
// hold could be brought into the second cache then. That gains nothing: what the short kernels before read comes later by as much.) Sums over lanes,
// then over warps, have one order, whatever the batch.
#include "common/rows.cuh"
#include "formats/lines.cuh"

struct VectorArgs {
    View x;
    Q8View q;
    View y;
    // Of the whole matrix, or null.
    const float* bias;
    u32 parts;
    // Of all parts.
    u32 panels;
    // All of one layout.
    Part part[4];
    // Of the kernels that take panels of both parts by turns.
    Gating gating;
    u32 spare;
};

static const u32 MOST_WARPS = 8;

DEVICE FloatRows rows_from(const VectorArgs& a, u32 first, const FloatRows*) { return {row_at(a.x, first), a.x.stride}; }
DEVICE Q8Rows rows_from(const VectorArgs& a, u32 first, const Q8Rows*) { return {row_at(a.q, first), a.q.stride}; }

// A panel: its part, its number there, its weights.
struct Panel {
    const Part* part;
    u32 number;
    const u8* weights;
};
template <bool GATED> DEVICE Panel panel_of(const VectorArgs& a, u32 panel) {
    if (GATED) return {&a.part[panel % 2], panel / 2, panel_at(a.part[panel % 2], panel / 2)};
    u32 index = 0;
    while (index + 1 < a.parts && panel >= panels_of(a.part[index])) panel -= panels_of(a.part[index++]);
    return {&a.part[index], panel, panel_at(a.part[index], panel)};
}

// The panel that this block takes behind another.
template <bool GATED> DEVICE u32 after(u32 panel) {
    if (!GATED) return panel + gridDim.x;
    return panel % 2 ? panel - 1 + 2 * gridDim.x : panel + 1;
}

// `sums`: [2][warps][R][16], a half for each second panel.
template <class F, u32 R, bool GATED> DEVICE void multiply(const VectorArgs& a, float* sums) {
    // All parts are alike in what F looks at.
    const Part& p = a.part[0];
    u32 index = GATED ? 2 * blockIdx.x : blockIdx.x, warps = blockDim.x / 32, warp = threadIdx.x / 32, steps = (p.cols + F::STEP - 1) / F::STEP;
    const u8* weights = panel_of<GATED>(a, index).weights;
    const u32 AHEAD = F::ahead(R);
    typename F::W ahead[AHEAD] = {};
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (warp + i * warps < steps) ahead[i] = F::load(p, weights, warp + i * warps);
    float next_gain = F::INTEGER ? gain_of(weights, threadIdx.x % 16) : 1.0f;
    u32 rows = *a.y.rows, first = blockIdx.y * R;
    begin();
    if (first >= rows) return;
    u32 count = rows - first < R ? rows - first : R;
    typename F::X x = rows_from(a, first, (const typename F::X*)nullptr);
    // Of a gate's panel, until its other factor is there.
    float gate[R] = {};
    for (u32 half = 0;; half ^= 1) {
        const u8* next = after<GATED>(index) < a.panels ? panel_of<GATED>(a, after<GATED>(index)).weights : nullptr;
        // Read together with the next panel's first steps, long before it is needed.
        float gain = next_gain;
        if (F::INTEGER && next) next_gain = gain_of(next, threadIdx.x % 16);
        float acc[R][F::ROWS] = {};
        u32 step = warp;
        // As long as all steps of a round and of the next one are there.
        for (; step + (2 * AHEAD - 1) * warps < steps; step += AHEAD * warps) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                F::add(acc, p, ahead[i], x, step + i * warps, count);
                ahead[i] = F::load(p, weights, step + (i + AHEAD) * warps);
            }
        }
        for (; step < steps; step += AHEAD * warps) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 at = step + i * warps, then = at + AHEAD * warps;
                if (at >= steps) continue;
                F::add(acc, p, ahead[i], x, at, count);
                if (then < steps || next) ahead[i] = F::load(p, then < steps ? weights : next, then < steps ? then : warp + i * warps);
            }
        }
        float* mine = sums + half * warps * R * 16;
        const u32 SETS = 16 / F::ROWS;
#pragma unroll
        for (u32 r = 0; r < R; r++) {
#pragma unroll
            for (u32 j = 0; j < F::ROWS; j++) {
                float v = acc[r][j];
#pragma unroll
                for (u32 m = 16; m >= SETS; m /= 2) v += shuffle_xor(v, m);
                if (lane() < SETS) mine[(warp * R + r) * 16 + lane() * F::ROWS + j] = v;
            }
        }
        barrier();
        // Whoever is through here writes the other half next, and passes another barrier before this one again.
        Panel done = panel_of<GATED>(a, index);
        u32 lane16 = threadIdx.x % 16, n = done.number * 16 + lane16;
#pragma unroll
        for (u32 i = 0; i < R; i++) {
            u32 r = threadIdx.x / 16 + i * (blockDim.x / 16);
            if (r >= count || n >= done.part->rows) break;
            float total = 0.0f;
            for (u32 w = 0; w < warps; w++) total += mine[(w * R + r) * 16 + lane16];
            if (F::INTEGER) total *= gain;
            if (a.bias) total += a.bias[done.part->first + n];
            if (!GATED) row_at(a.y, first + r)[done.part->first + n] = total;
            else if (half == 0) gate[i] = total;
            else row_at(a.y, first + r)[n] = a.gating(gate[i], total);
        }
        if (!next) return;
        index = after<GATED>(index);
        weights = next;
    }
}

// One row and 8-bit floats: to widen each code costs more than its product, so tensor cores take codes as half floats. A step is 128 k's, four lines
// of 32. Of each line a lane has eight weight rows for two k's: as operand A of a product, the rows j and j + 1 of its half of the panel, of two
// lines. So the eight groups of four lanes (g) have two halves of the panel by four sets of k's, of which a product's columns hold those of x, in two
// pieces: columns 2 s and 2 s + 1 for set s. What the set g / 2 meets there is in lane t = g / 2 of the group; the other sums are of no use.
struct F8Step {
    Words4 w[4];
    // Of row lane % 16: lanes get those of their own from others.
    float scale;
    DEVICE void load(const Part& p, const u8* panel, u32 step) {
        u32 g = lane() / 4, half = g % 2;
        const u8* codes = panel + f8_front(p) + (u64)step * 2048 + (g / 2 * 4 + lane() % 4) * 32 + half * 16;
#pragma unroll
        for (u32 i = 0; i < 4; i++) w[i] = step * F8_RUN + i * 32 < p.cols ? load_once(codes + i * 512) : Words4{};
        scale = ((const float*)panel)[step * 16 + lane() % 16];
    }
};

// A lane's part of a step of x: set n / 2 of lane (n, t).
struct F8Input {
    Words2 line[4];
    DEVICE void load(const float* x, u32 step, u32 cols) {
        const float* at = x + step * F8_RUN + (lane() / 8 * 4 + lane() % 4) * 2;
#pragma unroll
        for (u32 i = 0; i < 4; i++) line[i] = step * F8_RUN + i * 32 < cols ? load8(at + i * 32) : Words2{};
    }
};

// A step of x for operand B: half floats under the power of two that brings the largest near 2^14; gives back that power. Lane (n, t) has the first
// or the second piece by n % 2.
DEVICE float f8_pieces(const F8Input& x, Words4& b) {
    float most = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) most = largest(most, largest(magnitude(float_of(x.line[i].x)), magnitude(float_of(x.line[i].y))));
    // What is not finite is to stay so: it is not seen by a comparison with NaN, and converts to itself.
    most = warp_max(most);
    u32 exponent = bits_of(most) >> 23;
    bool plain = exponent < 15 || exponent >= 254;
    float power = plain ? 1.0f : float_of((exponent - 14) << 23), inverse = plain ? 1.0f : float_of((254 - (exponent - 14)) << 23);
    u32 words[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float low = times(float_of(x.line[i].x), inverse), high = times(float_of(x.line[i].y), inverse);
        u32 first = pair_f16(low, high);
        words[i] = lane() / 4 % 2 ? pair_f16(low - low_f16(first), high - high_f16(first)) : first;
    }
    b = {words[0], words[1], words[2], words[3]};
    return power;
}

// `memory`: steps of x, then their powers.
DEVICE void multiply_f8(const VectorArgs& a, u8* memory, float* sums) {
    const Part& p = a.part[0];
    const u32 AHEAD = 3;
    u32 index = blockIdx.x, warps = blockDim.x / 32, warp = threadIdx.x / 32, steps = (p.cols + F8_RUN - 1) / F8_RUN;
    u32 g = lane() / 4, t = lane() % 4;
    Words4* words = (Words4*)memory + lane();
    float* powers = (float*)(memory + steps * 512);
    const u8* weights = panel_of<false>(a, index).weights;
    F8Step ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (warp + i * warps < steps) ahead[i].load(p, weights, warp + i * warps);
    u32 rows = *a.y.rows, row = blockIdx.y;
    begin();
    if (row >= rows) return;
    // A warp prepares the steps that it meets, all loads of four of them first.
    const float* x = row_at(a.x, row);
    for (u32 step = warp; step < steps; step += 4 * warps) {
        F8Input in[4];
        Words4 b[4];
        float power[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) in[i].load(x, step + i * warps, p.cols);
#pragma unroll
        for (u32 i = 0; i < 4; i++) power[i] = f8_pieces(in[i], b[i]);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (step + i * warps >= steps) break;
            words[(step + i * warps) * 32] = b[i];
            if (lane() == 0) powers[step + i * warps] = power[i];
        }
    }
    warp_barrier();
    for (u32 half = 0;; half ^= 1) {
        const u8* next = index + gridDim.x < a.panels ? panel_of<false>(a, index + gridDim.x).weights : nullptr;
        float acc[8] = {};
        for (u32 step = warp; step < steps; step += AHEAD * warps) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 at = step + i * warps, then = at + AHEAD * warps;
                if (at >= steps) continue;
                Words4 b = words[at * 32];
                float power = powers[at];
                const F8Step& s = ahead[i];
                float scale = times(s.scale, power);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    u32 line[4];
#pragma unroll
                    for (u32 l = 0; l < 4; l++) line[l] = j == 0 ? s.w[l].x : j == 1 ? s.w[l].y : j == 2 ? s.w[l].z : s.w[l].w;
                    float c[4] = {};
                    u32 first[4] = {pair_e4m3(line[0]), pair_e4m3(line[0] >> 16), pair_e4m3(line[1]), pair_e4m3(line[1] >> 16)};
                    u32 second[4] = {pair_e4m3(line[2]), pair_e4m3(line[2] >> 16), pair_e4m3(line[3]), pair_e4m3(line[3] >> 16)};
                    mma_f16(c, first, b.x, b.y);
                    mma_f16(c, second, b.z, b.w);
                    acc[2 * j] = fused(c[0] + c[1], shuffle(scale, g % 2 * 8 + 2 * j), acc[2 * j]);
                    acc[2 * j + 1] = fused(c[2] + c[3], shuffle(scale, g % 2 * 8 + 2 * j + 1), acc[2 * j + 1]);
                }
                if (then < steps || next) ahead[i].load(p, then < steps ? weights : next, then < steps ? then : warp + i * warps);
            }
        }
        float* mine = sums + half * warps * 16;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            // The set's lane, then the four sets.
            float v = shuffle(acc[j], g * 4 + g / 2);
            v += shuffle_xor(v, 8);
            v += shuffle_xor(v, 16);
            if (g < 2 && t == 0) mine[warp * 16 + g * 8 + j] = v;
        }
        barrier();
        // As in `multiply`.
        Panel done = panel_of<false>(a, index);
        u32 lane16 = threadIdx.x, n = done.number * 16 + lane16;
        if (lane16 < 16 && n < done.part->rows) {
            float total = 0.0f;
            for (u32 w = 0; w < warps; w++) total += mine[w * 16 + lane16];
            if (a.bias) total += a.bias[done.part->first + n];
            row_at(a.y, row)[done.part->first + n] = total;
        }
        if (!next) return;
        index += gridDim.x;
        weights = next;
    }
}

// Grid: (up to all panels, or half of them where they are taken by turns, rows / R); up to 8 warps. Widths are multiples of 32. `blocks`: of a processor,
// as src/ops/linear_launch.rs takes them.
#define VECTOR(name, R, blocks, GATED, ...)             \
    KERNEL_AT(256, blocks, name, VectorArgs) {          \
        SHARED float sums[2 * MOST_WARPS * R * 16];     \
        multiply<__VA_ARGS__, R, GATED>(a, sums);       \
    }
#define VECTORS(name, blocks, ...)                   \
    VECTOR(name##_1, 1, blocks, false, __VA_ARGS__)  \
    VECTOR(name##_4, 4, 2, false, __VA_ARGS__)
#define GATED_VECTORS(name, blocks, ...)            \
    VECTOR(name##_1, 1, blocks, true, __VA_ARGS__)  \
    VECTOR(name##_4, 4, 2, true, __VA_ARGS__)
VECTORS(vector_f32, 3, F32Lines)
VECTORS(vector_bf16, 3, Bf16Lines)
VECTORS(vector_f16, 3, F16Lines)
VECTOR(vector_f8_4, 4, 2, false, F8Lines)
// Dynamic shared memory: 516 bytes for each step of 128 k's.
KERNEL_AT(256, 2, vector_f8_1, VectorArgs) {
    SHARED float sums[2 * MOST_WARPS * 16];
    SHARED_BYTES(memory);
    multiply_f8(a, memory, sums);
}
VECTORS(vector_i8, 2, IntegerLines<LAYOUT_I8, false, false>)
VECTORS(vector_i8_half, 2, IntegerLines<LAYOUT_I8, true, false>)
VECTORS(vector_i8_min, 2, IntegerLines<LAYOUT_I8, false, true>)
VECTORS(vector_i8_half_min, 2, IntegerLines<LAYOUT_I8, true, true>)
VECTORS(vector_i4, 3, IntegerLines<LAYOUT_I4, false, false>)
VECTORS(vector_i4_half, 3, IntegerLines<LAYOUT_I4, true, false>)
VECTORS(vector_i4_min, 3, IntegerLines<LAYOUT_I4, false, true>)
VECTORS(vector_i4_half_min, 2, IntegerLines<LAYOUT_I4, true, true>)
VECTORS(vector_table, 3, IntegerLines<LAYOUT_TABLE, false, false>)
VECTORS(vector_table_half, 2, IntegerLines<LAYOUT_TABLE, true, false>)
GATED_VECTORS(gated_bf16, 3, Bf16Lines)
