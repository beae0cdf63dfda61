// linear: y = W x + b for every layout and width, the simple way. The kernels of linear_vector.cu, linear_narrow.cu and linear_wide.cu
// take over where their shapes allow; this one explains them. src/ops/linear.rs has the definition.
#include "common/rows.cuh"
#include "formats/panel.cuh"

struct LinearArgs {
    View x;
    Q8View q;
    View y;
    // Of the whole matrix, or null.
    const float* bias;
    Part part;
};

static const u32 ROWS = 4, SLICES = 16;

// Grid: (panels, rows / 4). A block of 16 x 16 threads: thread (lane16, slice) sums every 16th k (32-block) of one weight row for 4 rows of x;
// slices are added in order.
KERNEL_OF(256, linear, LinearArgs) {
    SHARED float sums[ROWS][SLICES][16];
    u32 rows = *a.y.rows, first = blockIdx.y * ROWS;
    begin();
    if (first >= rows) return;
    u32 lane16 = threadIdx.x % 16, slice = threadIdx.x / 16;
    u32 count = rows - first < ROWS ? rows - first : ROWS;
    const Part& p = a.part;
    const u8* panel = panel_at(p, blockIdx.x);
    float acc[ROWS] = {};
    if (is_integer(p)) {
        for (u32 block = slice; block < p.cols / 32; block += SLICES) {
            for (u32 k = block * 32; k < block * 32 + 32; k += p.block) {
                float scale = scale_of(p, panel, lane16, k), min = p.min ? min_of(p, panel, lane16, k) : 0.0f;
                for (u32 r = 0; r < count; r++) {
                    const Q8Block& x = row_at(a.q, first + r)[block];
                    i32 sum = 0;
                    for (u32 i = k; i < k + p.block; i++) sum += code_of(p, panel, lane16, i) * x.codes[i % 32];
                    acc[r] = fused((float)sum, scale * x.scale, acc[r]);
                    if (p.min) acc[r] = fused(-min, p.block == 32 ? x.sum : x.half_sum[k % 32 / 16], acc[r]);
                }
            }
        }
    } else {
        for (u32 k = slice; k < p.cols; k += SLICES) {
            float w = element_of(p, panel, lane16, k);
            for (u32 r = 0; r < count; r++) acc[r] = fused(w, row_at(a.x, first + r)[k], acc[r]);
        }
    }
    for (u32 r = 0; r < ROWS; r++) sums[r][slice][lane16] = acc[r];
    barrier();
    u32 n = blockIdx.x * 16 + lane16;
    if (slice >= count || n >= p.rows) return;
    float total = 0.0f;
    for (u32 s = 0; s < SLICES; s++) total += sums[slice][s][lane16];
    if (is_integer(p)) total *= gain_of(panel, lane16);
    if (a.bias) total += a.bias[p.first + n];
    row_at(a.y, first + slice)[p.first + n] = total;
}
