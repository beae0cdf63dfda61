// Products of rows with matrices that are picked by row and slot: routed experts, or one matrix for each head.
#pragma once
#include "math.cuh"

// Most pairs (row, slot) that meet a weight together.
static const u32 MOST_PAIRS = 32;

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
    // Outputs of a slot; elements that are handed on behind its outputs.
    u32 outputs, tail;
    // Where those of the first row and slot are, and elements from row to row and from slot to slot.
    const float* handed;
    u32 handed_stride, handed_step;
};

// Pairs that one block meets with a panel: their matrix, and how many.
struct Tile {
    u32 matrix, count;
    u32 pair[MOST_PAIRS];
};

DEVICE u32 matrix_of(const RoutedArgs& a, u32 pair) {
    u32 row = pair / a.slots, slot = pair % a.slots;
    return a.route ? least((u32)a.route[(u64)row * a.route_stride + slot], a.matrices) : slot;
}

// Pairs of tile `tile`, of up to `size`, from sorted ones: tiles go by matrix.
DEVICE void find_sorted(const RoutedArgs& a, u32 tile, u32 size, Tile& found) {
    const u32* starts = a.sorted;
    if (threadIdx.x < 32) {
        u32 groups = a.matrices + 1, per = over_up(groups, 32), first = least(lane() * per, groups), last = least(first + per, groups);
        u32 mine = 0, total;
        for (u32 e = first; e < last; e++) mine += over_up(starts[e + 1] - starts[e], size);
        u32 before = warp_before(mine, total);
        if (lane() == 0 && tile >= total) found.count = 0;
        if (tile >= before && tile < before + mine) {
            u32 e = first;
            for (u32 left = tile - before;; e++) {
                u32 tiles = over_up(starts[e + 1] - starts[e], size);
                if (left < tiles) {
                    u32 begin = starts[e] + left * size;
                    found.matrix = e, found.count = least(size, starts[e + 1] - begin);
                    for (u32 n = 0; n < found.count; n++) found.pair[n] = a.sorted[a.matrices + 2 + begin + n];
                    break;
                }
                left -= tiles;
            }
        }
    }
}

// As find_sorted, where slot j meets matrix j: tiles of rows, slot by slot.
DEVICE void find_rows(const RoutedArgs& a, u32 tile, u32 size, Tile& found) {
    if (threadIdx.x == 0) {
        u32 rows = *a.y.rows, slot = tile % a.slots, first = tile / a.slots * size;
        found.matrix = slot, found.count = first < rows ? least(size, rows - first) : 0;
        for (u32 n = 0; n < found.count; n++) found.pair[n] = (first + n) * a.slots + slot;
    }
}

DEVICE float* output_of(const RoutedArgs& a, u32 pair) { return row_at(a.y, pair / a.slots) + (u64)(pair % a.slots) * a.y_step; }
// Where a pair's input begins, of either form.
template <class T> DEVICE const T* input_of(const RoutedArgs& a, u32 pair) { return (const T*)a.x + (u64)(pair / a.slots) * a.x_stride + (u64)(pair % a.slots) * a.x_step; }

// The block's tile, `blockIdx.x`, into shared memory. All threads call it.
DEVICE void find_tile(const RoutedArgs& a, u32 size, Tile& found) {
    if (a.sorted) find_sorted(a, blockIdx.x, size, found);
    else find_rows(a, blockIdx.x, size, found);
    barrier();
}

// Hands on what `count` pairs have to: one block of those that share them does it.
DEVICE void hand_on(const RoutedArgs& a, u32 count, const u32* pairs) {
    if (blockIdx.y != 0 || a.part != 0) return;
    for (u32 i = threadIdx.x; i < count * a.tail; i += blockDim.x) {
        u32 pair = pairs[i / a.tail], at = i % a.tail;
        output_of(a, pair)[a.outputs + at] = a.handed[(u64)(pair / a.slots) * a.handed_stride + (u64)(pair % a.slots) * a.handed_step + at];
    }
}
