// quantize: rows of f32 to 8-bit blocks; src/ops/quantize.rs, src/backend/cpu/simd/quantize.rs.
#include "common/rows.cuh"
#include "common/q8.cuh"

struct QuantizeArgs {
    View x;
    Q8View y;
};

// Grid: (rows, blocks of a row / warps); a warp makes a block.
KERNEL_OF(256, quantize_rows, QuantizeArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    u32 block = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows || block >= a.y.width / 32) return;
    quantize_block(row_at(a.x, row)[block * 32 + lane()], row_at(a.y, row) + block);
}
