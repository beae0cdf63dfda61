// measure: what memory gives a plain read, the ceiling that steps are held against; and random bits to read.
#include "common/rows.cuh"

struct MeasureArgs {
    Words4* data;
    u32* out;
    // Of 16 bytes.
    u64 words;
    u32 seed, spare;
};

DEVICE u32 mixed(u64 i, u32 seed) {
    u64 z = (i + seed) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return (u32)(z ^ (z >> 27)) ^ (u32)(z >> 32);
}

// Grid: any; blocks walk over all words.
KERNEL_OF(256, measure_fill, MeasureArgs) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < a.words; i += (u64)gridDim.x * blockDim.x) {
        Words4 w = {mixed(4 * i, a.seed), mixed(4 * i + 1, a.seed), mixed(4 * i + 2, a.seed), mixed(4 * i + 3, a.seed)};
        a.data[i] = w;
    }
}

// Grid: any; eight loads of a thread are under way at once.
KERNEL_OF(512, measure_read, MeasureArgs) {
    u32 sum = 0;
    u64 step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < a.words; i += 8 * step) {
        Words4 w[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) w[j] = load_once(a.data + i + j * step);
#pragma unroll
        for (u32 j = 0; j < 8; j++) sum ^= w[j].x ^ w[j].y ^ w[j].z ^ w[j].w;
    }
    for (; i < a.words; i += step) {
        Words4 w = load_once(a.data + i);
        sum ^= w.x ^ w.y ^ w.z ^ w.w;
    }
    if (sum == a.seed) *a.out = sum;
}
