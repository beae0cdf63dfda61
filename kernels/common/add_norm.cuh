// The sum of two rows and its RMS norm, for kernels that differ in how they write it.
#pragma once
#include "rows.cuh"

// Elements of a row that a thread keeps while the row is summed; longer rows are read again.
static const u32 KEPT = 8;

// This thread's weights, which no kernel writes: they are on their way before the kernels before have ended.
struct NormWeights {
    float w[KEPT];
};
DEVICE NormWeights norm_weights(const float* weight, u32 width) {
    NormWeights r;
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * blockDim.x;
        r.w[j] = i < width ? weight[i] : 0.0f;
    }
    return r;
}

// total = x0 + x1, `width` elements; calls `put(i, v)` for elements of the norm. All blocks of a row sum all of it, and each writes its share: the
// elements of its number among those that a thread keeps. Whole warps call `put` where the width is a multiple of 32. `scratch` as for block_sum.
template <class Put>
DEVICE void add_and_norm(const float* x0, const float* x1, float* total, const float* weight, const NormWeights& first, u32 width, float eps, float* scratch, Put put) {
    u32 step = blockDim.x, part = blockIdx.y, parts = gridDim.y;
    float kept[KEPT], other[KEPT], squares = 0.0f;
    // All loads before the first store.
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        kept[j] = i < width ? x0[i] : 0.0f;
        other[j] = i < width ? x1[i] : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        kept[j] += other[j];
        squares = fused(kept[j], kept[j], squares);
    }
    for (u32 i = threadIdx.x + KEPT * step; i < width; i += step) {
        float v = x0[i] + x1[i];
        if (part == 0) total[i] = v;
        squares = fused(v, v, squares);
    }
    float factor = 1.0f / root(block_sum(squares, scratch) / (float)width + eps);
#pragma unroll
    for (u32 j = 0; j < KEPT; j++) {
        u32 i = threadIdx.x + j * step;
        if (j % parts == part && i < width) total[i] = kept[j], put(i, kept[j] * factor * first.w[j]);
    }
    if (part) return;
    for (u32 i = threadIdx.x + KEPT * step; i < width; i += step) put(i, total[i] * factor * weight[i]);
}
