// Kernels that meet a panel of a picked matrix with one pair, or with a few that share it, without tensor cores.
#pragma once
#include "../formats/panel_dot.cuh"
#include "routed.cuh"

// Pairs (row, slot) that meet a weight together.
static const u32 TOGETHER = 8;

// Panel `blockIdx.y` of a part with `count` pairs, at most `N`, four warps sharing the k's. `scratch`: 4 * 16 * N floats.
template <class Format, template <u32> class In, u32 N> DEVICE void routed_panel(const RoutedArgs& a, const Part& part, u32 matrix, u32 count, const u32* pairs, float* scratch) {
    const u8* panel = part.data + (u64)blockIdx.y * part.panel_bytes;
    u32 warp = threadIdx.x / 32;
    In<N> in;
    // What is absent is computed like the first, and not stored.
    for (u32 n = 0; n < N; n++) in.x[n] = input_of<typename In<1>::Element>(a, pairs[n < count ? n : 0]);
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
    hand_on(a, count, pairs);
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
        find_tile(a, TOGETHER, tile); \
        if (tile.count) routed_of<false, Format, In>(a, tile.matrix, tile.count, tile.pair, scratch); \
    }
