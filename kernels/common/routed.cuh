// Products of rows with matrices that are picked by row and slot: routed experts, or one matrix for each head.
#pragma once
#include "../formats/panel_dot.cuh"
#include "math.cuh"

// Pairs (row, slot) that meet a weight together.
static const u32 TOGETHER = 8;

struct RoutedArgs {
    // `y.rows` alone says how many rows there are.
    View y;
    // f32 or 8-bit blocks; elements (blocks) from row to row and from slot to slot.
    const u8* x;
    u32 x_stride, x_step;
    // Ids of the slots' matrices, whole numbers; null: slot j meets matrix j.
    const float* route;
    u32 route_stride, slots;
    // [matrices][parts].
    const Part* table;
    u32 matrices, parts;
    // Which part of each matrix; elements of y from slot to slot.
    u32 part, y_step;
    // [matrices][outputs] or null.
    const float* bias;
    // Null, or [matrices + 2] starts by matrix, then the pairs by matrix. The last matrix stands for all ids beyond.
    const u32* sorted;
    // Outputs of a slot; elements behind a slot's inputs that are handed on behind its outputs.
    u32 outputs, tail;
};

// Pairs that one block meets with a panel: their matrix, and how many.
struct Tile {
    u32 matrix, count;
    u32 pair[TOGETHER];
};

DEVICE u32 matrix_of(const RoutedArgs& a, u32 pair) {
    u32 row = pair / a.slots, slot = pair % a.slots;
    return a.route ? least((u32)a.route[(u64)row * a.route_stride + slot], a.matrices) : slot;
}

// Block `tile`'s pairs, from sorted ones: tiles go by matrix. All threads call it; `found` is shared.
DEVICE void find_sorted(const RoutedArgs& a, u32 tile, Tile& found) {
    const u32* starts = a.sorted;
    if (threadIdx.x < 32) {
        u32 groups = a.matrices + 1, per = over_up(groups, 32), first = least(lane() * per, groups), last = least(first + per, groups);
        u32 mine = 0, total;
        for (u32 e = first; e < last; e++) mine += over_up(starts[e + 1] - starts[e], TOGETHER);
        u32 before = warp_before(mine, total);
        if (lane() == 0 && tile >= total) found.count = 0;
        if (tile >= before && tile < before + mine) {
            u32 e = first;
            for (u32 left = tile - before;; e++) {
                u32 tiles = over_up(starts[e + 1] - starts[e], TOGETHER);
                if (left < tiles) {
                    u32 begin = starts[e] + left * TOGETHER;
                    found.matrix = e, found.count = least(TOGETHER, starts[e + 1] - begin);
                    for (u32 n = 0; n < found.count; n++) found.pair[n] = a.sorted[a.matrices + 2 + begin + n];
                    break;
                }
                left -= tiles;
            }
        }
    }
    barrier();
}

// As find_sorted, where slot j meets matrix j: tiles of rows, slot by slot.
DEVICE void find_rows(const RoutedArgs& a, u32 tile, Tile& found) {
    if (threadIdx.x == 0) {
        u32 rows = *a.y.rows, slot = tile % a.slots, first = tile / a.slots * TOGETHER;
        found.matrix = slot, found.count = first < rows ? least(TOGETHER, rows - first) : 0;
        for (u32 n = 0; n < found.count; n++) found.pair[n] = (first + n) * a.slots + slot;
    }
    barrier();
}

DEVICE float* output_of(const RoutedArgs& a, u32 pair) { return row_at(a.y, pair / a.slots) + (u64)(pair % a.slots) * a.y_step; }
// Input of a pair, of either form.
DEVICE const float* input_of(const RoutedArgs& a, u32 pair, FloatRows<1>*) { return (const float*)a.x + (u64)(pair / a.slots) * a.x_stride + (u64)(pair % a.slots) * a.x_step; }
DEVICE const Q8Block* input_of(const RoutedArgs& a, u32 pair, Q8Rows<1>*) { return (const Q8Block*)a.x + (u64)(pair / a.slots) * a.x_stride + (u64)(pair % a.slots) * a.x_step; }

// Panel `blockIdx.y` of a part with `count` pairs, at most `N`, four warps sharing the k's. `scratch`: 4 * 16 * N floats.
template <class Format, template <u32> class In, u32 N> DEVICE void routed_panel(const RoutedArgs& a, const Part& part, u32 matrix, u32 count, const u32* pairs, float* scratch) {
    const u8* panel = part.data + (u64)blockIdx.y * part.panel_bytes;
    u32 warp = threadIdx.x / 32;
    In<N> in;
    // What is absent is computed like the first, and not stored.
    for (u32 n = 0; n < N; n++) in.x[n] = input_of(a, pairs[n < count ? n : 0], (In<1>*)nullptr);
    float sum[N][Format::ROWS];
    panel_sums<Format>(panel, part, in, warp, 4, sum);
    if (lane() < 16 / Format::ROWS) {
        for (u32 n = 0; n < N; n++) {
            for (u32 r = 0; r < Format::ROWS; r++) scratch[(warp * N + n) * 16 + lane() * Format::ROWS + r] = sum[n][r];
        }
    }
    barrier();
    u32 n = threadIdx.x / 16, r = threadIdx.x % 16, feature = blockIdx.y * 16 + r;
    if (n >= count || feature >= part.rows) return;
    float v = (scratch[n * 16 + r] + scratch[(N + n) * 16 + r]) + (scratch[(2 * N + n) * 16 + r] + scratch[(3 * N + n) * 16 + r]);
    if (Format::GAINS) v *= ((const float*)panel)[r];
    feature += part.first;
    if (a.bias) v += a.bias[(u64)matrix * a.outputs + feature];
    output_of(a, pairs[n])[feature] = v;
}

// A block's panel with its pairs. `ALONE`: one pair. `scratch`: 64 floats alone, else 64 * TOGETHER.
template <bool ALONE, class Format, template <u32> class In> DEVICE void routed_of(const RoutedArgs& a, u32 matrix, u32 count, const u32* pairs, float* scratch) {
    Part part = a.table[(u64)(matrix < a.matrices ? matrix : 0) * a.parts + a.part];
    u32 feature = blockIdx.y * 16 + threadIdx.x % 16;
    if (matrix >= a.matrices) {
        // Ids beyond compute nothing.
        if (threadIdx.x / 16 < count && feature < part.rows) output_of(a, pairs[threadIdx.x / 16])[part.first + feature] = 0.0f;
        return;
    }
    if (ALONE) routed_panel<Format, In, 1>(a, part, matrix, 1, pairs, scratch);
    else if (count <= 2) routed_panel<Format, In, 2>(a, part, matrix, count, pairs, scratch);
    else routed_panel<Format, In, TOGETHER>(a, part, matrix, count, pairs, scratch);
    // The first panel's block hands the tails on.
    for (u32 i = threadIdx.x; i < (blockIdx.y == 0 && a.part == 0 ? count * a.tail : 0); i += blockDim.x) {
        u32 pair = pairs[i / a.tail], at = i % a.tail;
        output_of(a, pair)[a.outputs + at] = input_of(a, pair, (FloatRows<1>*)nullptr)[part.cols + at];
    }
}

// Kernels for a kind of weights.
// ROUTED_ALONE, grid (pairs, panels): a block meets a panel with one pair, whatever others meet.
// ROUTED_TOGETHER, grid (tiles, panels): a block meets a panel with up to `TOGETHER` pairs.
#define ROUTED_ALONE(name, Format, In) \
    KERNEL_OF(128, name, RoutedArgs) { \
        begin(); \
        SHARED float scratch[64]; \
        u32 pair = blockIdx.x; \
        if (pair >= *a.y.rows * a.slots) return; \
        routed_of<true, Format, In>(a, matrix_of(a, pair), 1, &pair, scratch); \
    }
#define ROUTED_TOGETHER(name, Format, In) \
    KERNEL_OF(128, name, RoutedArgs) { \
        begin(); \
        SHARED float scratch[64 * TOGETHER]; \
        SHARED Tile tile; \
        if (a.sorted) find_sorted(a, blockIdx.x, tile); \
        else find_rows(a, blockIdx.x, tile); \
        if (tile.count) routed_of<false, Format, In>(a, tile.matrix, tile.count, tile.pair, scratch); \
    }
