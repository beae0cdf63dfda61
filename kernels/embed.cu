// embed: y = factor * row of the table for each token; src/ops/embed.rs.
#include "common/rows.cuh"
#include "formats/panel.cuh"

struct EmbedArgs {
    View y;
    const Batch* batch;
    // A table that is a vector; else null, and the table is `part`.
    const float* vector;
    // Row of the whole table where `part` begins is part.first: rows outside it are left to the launch of another part.
    Part part;
    float factor;
    u32 spare;
};

// Grid: (rows, columns / (4 threads)).
KERNEL_OF(256, embed_rows, EmbedArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    u32 token = (u32)a.batch->tokens[row];
    float* y = row_at(a.y, row);
    if (a.vector) {
        each_column(a.y.width, [&](u32 i) { return a.vector[(u64)token * a.y.width + i] * a.factor; }, [&](u32 i, float v) { y[i] = v; });
        return;
    }
    u32 at = token - a.part.first;
    if (at >= a.part.rows) return;
    const u8* panel = panel_at(a.part, at / 16);
    each_column(a.y.width, [&](u32 i) { return element_of(a.part, panel, at % 16, i) * a.factor; }, [&](u32 i, float v) { y[i] = v; });
}
