// rope: tables of cosines and sines, and rotations; src/ops/rope.rs, src/ops/rope_tail.rs.
#include "common/rows.cuh"

struct RopeTableArgs {
    View y;
    const Batch* batch;
    const float* frequencies;
    float factor;
    u32 spare;
};

// Grid: (rows); a thread takes frequencies, threads apart. Angles are rounded to f32 first, as the reference does.
KERNEL_OF(256, rope_table, RopeTableArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    float* y = row_at(a.y, row);
    float position = (float)a.batch->positions[row];
    u32 half = a.y.width / 2;
    for (u32 i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;
        sincos((double)times(position, a.frequencies[i]), &s, &c);
        y[i] = (float)c * a.factor;
        y[half + i] = (float)s * a.factor;
    }
}

struct RopeArgs {
    View x, table, y;
    // First rotary element of a head; the others pass.
    u32 head_dim, first;
    // 1: elements 2i and 2i + 1 turn together; 0: i and i + half.
    u32 pairs;
    // -1 turns back.
    float direction;
};

// Grid: (rows, columns / (4 threads)); a thread computes whole elements, each from itself and its partner.
KERNEL_OF(256, rope_turn, RopeArgs) {
    u32 row = blockIdx.x, rows = *a.y.rows;
    begin();
    if (row >= rows) return;
    const float* x = row_at(a.x, row);
    const float* table = row_at(a.table, row);
    float* y = row_at(a.y, row);
    u32 rotary = a.table.width, half = rotary / 2;
    each_column(a.y.width, [&](u32 i) {
        u32 d = i % a.head_dim - a.first;
        if (d >= rotary) {  // Also what lies before `first`: the difference wraps.
            y[i] = x[i];
            return;
        }
        bool second = a.pairs ? d & 1 : d >= half;
        u32 angle = a.pairs ? d / 2 : second ? d - half : d;
        float other = x[a.pairs ? (second ? i - 1 : i + 1) : second ? i - half : i + half];
        float c = table[angle], s = a.direction * table[half + angle];
        y[i] = second ? x[i] * c + other * s : x[i] * c - other * s;
    });
}
