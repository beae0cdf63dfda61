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
DEVICE Panel panel_of(const VectorArgs& a, u32 panel) {
    u32 index = 0;
    while (index + 1 < a.parts && panel >= panels_of(a.part[index])) panel -= panels_of(a.part[index++]);
    return {&a.part[index], panel, panel_at(a.part[index], panel)};
}

// `sums`: [2][warps][R][16], a half for each second panel.
template <class F, u32 R> DEVICE void multiply(const VectorArgs& a, float* sums) {
    // All parts are alike in what F looks at.
    const Part& p = a.part[0];
    u32 index = blockIdx.x, warps = blockDim.x / 32, warp = threadIdx.x / 32, steps = (p.cols + F::STEP - 1) / F::STEP;
    const u8* weights = panel_of(a, index).weights;
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
    for (u32 half = 0;; half ^= 1) {
        const u8* next = index + gridDim.x < a.panels ? panel_of(a, index + gridDim.x).weights : nullptr;
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
        Panel done = panel_of(a, index);
        u32 r = threadIdx.x / 16, lane16 = threadIdx.x % 16, n = done.number * 16 + lane16;
        for (; r < count && n < done.part->rows; r += blockDim.x / 16) {
            float total = 0.0f;
            for (u32 w = 0; w < warps; w++) total += mine[(w * R + r) * 16 + lane16];
            if (F::INTEGER) total *= gain;
            if (a.bias) total += a.bias[done.part->first + n];
            row_at(a.y, first + r)[done.part->first + n] = total;
        }
        if (!next) return;
        index += gridDim.x;
        weights = next;
    }
}

// Grid: (up to all panels, rows / R); up to 8 warps. Widths are multiples of 32. `blocks`: of a processor, as src/ops/linear_launch.rs takes them.
#define VECTOR(name, R, blocks, ...)                \
    KERNEL_AT(256, blocks, name, VectorArgs) {      \
        SHARED float sums[2 * MOST_WARPS * R * 16]; \
        multiply<__VA_ARGS__, R>(a, sums);          \
    }
#define VECTORS(name, blocks, ...)            \
    VECTOR(name##_1, 1, blocks, __VA_ARGS__)  \
    VECTOR(name##_4, 4, 2, __VA_ARGS__)
VECTORS(vector_f32, 3, F32Lines)
VECTORS(vector_bf16, 3, Bf16Lines)
VECTORS(vector_f16, 3, F16Lines)
VECTORS(vector_f8, 2, F8Lines)
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
