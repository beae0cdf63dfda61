// regroup: columns put in another order; src/ops/regroup.rs has the definition.
#include "common/math.cuh"

static const u32 REGROUP_PIECES = 16;
struct RegroupPiece {
    u32 first, width, stride, count;
};
struct RegroupArgs {
    View x, y;
    // First column of y that these pieces fill, columns they fill.
    u32 start, columns;
    u32 pieces, spare;
    RegroupPiece piece[REGROUP_PIECES];
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, regroup, RegroupArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.x.rows || i >= a.columns) return;
    u32 at = i;
    for (u32 p = 0; p < a.pieces; p++) {
        RegroupPiece piece = a.piece[p];
        if (at < piece.width * piece.count) {
            row_at(a.y, row)[a.start + i] = row_at(a.x, row)[piece.first + at / piece.width * piece.stride + at % piece.width];
            return;
        }
        at -= piece.width * piece.count;
    }
}
