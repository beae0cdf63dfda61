// Small functions that several kernels share. The names without a definition are in CUDA's own headers and in <cmath> alike.
#pragma once
#include "rows.cuh"

DEVICE float infinite() { return float_of(0x7f800000u); }

DEVICE u32 over_up(u32 a, u32 b) { return (a + b - 1) / b; }
DEVICE u32 least(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 most(u32 a, u32 b) { return a > b ? a : b; }
DEVICE bool is_nan(float x) { return !(x == x); }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// ln(1 + e^x).
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// As warp_sum and block_sum, in f64.
DEVICE double warp_sum(double v) {
    for (u32 m = 16; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}
DEVICE double block_sum(double v, double* scratch) {
    v = warp_sum(v);
    barrier();
    if (lane() == 0) scratch[threadIdx.x / 32] = v;
    barrier();
    if (threadIdx.x < 32) {
        double t = threadIdx.x < (blockDim.x + 31) / 32 ? scratch[threadIdx.x] : 0.0;
        t = warp_sum(t);
        if (threadIdx.x == 0) scratch[32] = t;
    }
    barrier();
    return scratch[32];
}
// Sum of what the lanes before this one hold, and in `total` of all.
DEVICE u32 warp_before(u32 v, u32& total) {
    u32 sum = v;
    for (u32 d = 1; d < 32; d *= 2) {
        u32 other = shuffle(sum, lane() - d & 31);
        if (lane() >= d) sum += other;
    }
    total = shuffle(sum, 31);
    return sum - v;
}
// The same over a block of up to 1,024 threads; `scratch` has room for 33 numbers.
DEVICE u32 block_before(u32 v, u32* scratch, u32& total) {
    u32 warp_total, all;
    u32 before = warp_before(v, warp_total);
    barrier();
    if (lane() == 0) scratch[threadIdx.x / 32] = warp_total;
    barrier();
    if (threadIdx.x < 32) {
        u32 first = warp_before(threadIdx.x < (blockDim.x + 31) / 32 ? scratch[threadIdx.x] : 0, all);
        scratch[threadIdx.x] = first;
        if (threadIdx.x == 0) scratch[32] = all;
    }
    barrier();
    total = scratch[32];
    return scratch[threadIdx.x / 32] + before;
}
