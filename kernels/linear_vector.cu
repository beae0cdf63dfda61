// linear_vector: y = W x + b for few rows, each weight read once for up to R of them. Bound by the read of the weights.
//
// A block takes a panel of 16 weight rows; its warps share k, step by step. A lane keeps AHEAD steps on their way, the first of them before the
// kernels before have ended, since weights depend on nobody. Sums over lanes, then over warps, have one order, whatever the batch.
#include "common/rows.cuh"
#include "formats/lines.cuh"

struct VectorArgs {
    View x;
    Q8View q;
    View y;
    // Of the whole matrix, or null.
    const float* bias;
    u32 parts, spare;
    // All of one layout.
    Part part[4];
};

static const u32 MOST_WARPS = 16;

DEVICE FloatRows rows_from(const VectorArgs& a, u32 first, const FloatRows*) { return {row_at(a.x, first), a.x.stride}; }
DEVICE Q8Rows rows_from(const VectorArgs& a, u32 first, const Q8Rows*) { return {row_at(a.q, first), a.q.stride}; }

// `sums`: [warps][R][16].
template <class F, u32 R> DEVICE void multiply(const VectorArgs& a, float* sums) {
    u32 panel = blockIdx.x, index = 0;
    while (index + 1 < a.parts && panel >= panels_of(a.part[index])) panel -= panels_of(a.part[index++]);
    const Part& p = a.part[index];
    const u8* weights = panel_at(p, panel);
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, steps = (p.cols + F::STEP - 1) / F::STEP;
    const u32 AHEAD = F::ahead(R);
    typename F::W ahead[AHEAD] = {};
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (warp + i * warps < steps) ahead[i] = F::load(p, weights, warp + i * warps);
    u32 rows = *a.y.rows, first = blockIdx.y * R;
    begin();
    if (first >= rows) return;
    u32 count = rows - first < R ? rows - first : R;
    typename F::X x = rows_from(a, first, (const typename F::X*)nullptr);
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
            u32 now = step + i * warps, next = now + AHEAD * warps;
            if (now < steps) F::add(acc, p, ahead[i], x, now, count);
            if (next < steps) ahead[i] = F::load(p, weights, next);
        }
    }
    const u32 SETS = 16 / F::ROWS;
#pragma unroll
    for (u32 r = 0; r < R; r++) {
#pragma unroll
        for (u32 j = 0; j < F::ROWS; j++) {
            float v = acc[r][j];
#pragma unroll
            for (u32 m = 16; m >= SETS; m /= 2) v += shuffle_xor(v, m);
            if (lane() < SETS) sums[(warp * R + r) * 16 + lane() * F::ROWS + j] = v;
        }
    }
    barrier();
    u32 r = threadIdx.x / 16, lane16 = threadIdx.x % 16, n = panel * 16 + lane16;
    for (; r < count; r += blockDim.x / 16) {
        if (n >= p.rows) break;
        float total = 0.0f;
        for (u32 w = 0; w < warps; w++) total += sums[(w * R + r) * 16 + lane16];
        if (F::INTEGER) total *= gain_of(weights, lane16);
        if (a.bias) total += a.bias[p.first + n];
        row_at(a.y, first + r)[p.first + n] = total;
    }
}

// Grid: (panels of all parts, rows / R); up to 16 warps. Widths are multiples of 32.
#define VECTOR(name, R, ...)                      \
    KERNEL_OF(512, name, VectorArgs) {            \
        SHARED float sums[MOST_WARPS * R * 16];   \
        multiply<__VA_ARGS__, R>(a, sums);        \
    }
#define VECTORS(name, ...)           \
    VECTOR(name##_1, 1, __VA_ARGS__) \
    VECTOR(name##_4, 4, __VA_ARGS__)
VECTORS(vector_f32, F32Lines)
VECTORS(vector_bf16, Bf16Lines)
VECTORS(vector_f16, F16Lines)
VECTORS(vector_i8, IntegerLines<LAYOUT_I8, false, false>)
VECTORS(vector_i8_half, IntegerLines<LAYOUT_I8, true, false>)
VECTORS(vector_i8_min, IntegerLines<LAYOUT_I8, false, true>)
VECTORS(vector_i8_half_min, IntegerLines<LAYOUT_I8, true, true>)
VECTORS(vector_i4, IntegerLines<LAYOUT_I4, false, false>)
VECTORS(vector_i4_half, IntegerLines<LAYOUT_I4, true, false>)
VECTORS(vector_i4_min, IntegerLines<LAYOUT_I4, false, true>)
VECTORS(vector_i4_half_min, IntegerLines<LAYOUT_I4, true, true>)
VECTORS(vector_table, IntegerLines<LAYOUT_TABLE, false, false>)
VECTORS(vector_table_half, IntegerLines<LAYOUT_TABLE, true, false>)
