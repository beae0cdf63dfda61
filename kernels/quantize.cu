// quantize: rows of f32 to 8-bit blocks; src/ops/quantize.rs, src/backend/cpu/simd/quantize.rs.
#include "common/rows.cuh"
#include "common/q8.cuh"

struct QuantizeArgs {
    View x;
    Q8View y;
    // Elements of a run, and those behind it that are left out.
    u32 run, tail;
};

// Grid: (rows, blocks of a row / warps); a warp makes a block.
KERNEL_OF(256, quantize_rows, QuantizeArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    u32 block = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows || block >= a.y.width / 32) return;
    u32 at = block * 32;
    quantize_block(row_at(a.x, row)[at + at / a.run * a.tail + lane()], row_at(a.y, row) + block);
}
