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
