// Kernels with mistakes in them, to see that the shim finds each. Argument: which. 0: it found nothing; 3: it reported a failure of the kernel;
// 4: the result is not what it would be without the mistake; 2: there is no such kernel; 1: the address sanitizer says so.
#define FILE_NAME planted
#include "../shim.hpp"

#include <cstdio>
#include <cstdlib>

struct Args {
    float* data;
    u32 len;
};

DEVICE float sum_of(const float* part) {
    float sum = 0.0f;
    for (u32 i = 0; i < 64; i++) sum += part[i];
    return sum;
}

// Sums 64 values over two warps; nothing is wrong with it.
KERNEL_OF(64, sound, Args) {
    SHARED float part[64];
    part[threadIdx.x] = a.data[threadIdx.x];
    barrier();
    if (threadIdx.x == 0) {
        a.data[0] = sum_of(part);
    }
}
// Without the barrier.
KERNEL_OF(64, race, Args) {
    SHARED float part[64];
    part[threadIdx.x] = a.data[threadIdx.x];
    if (threadIdx.x == 0) {
        a.data[0] = sum_of(part);
    }
}
// The other way around: warp 0 writes what warp 1 may not have read.
KERNEL_OF(64, overwritten, Args) {
    SHARED float part[64];
    part[threadIdx.x] = a.data[threadIdx.x];
    barrier();
    float mine = 0.0f;
    for (u32 i = 0; i < 64; i++) mine += part[i];
    part[threadIdx.x] = 0.0f;
    barrier();
    if (threadIdx.x == 63) a.data[0] = mine;
}
// Half of a warp waits for the block, the other half for the first half.
KERNEL_OF(64, divergent, Args) {
    if (threadIdx.x % 32 < 16) barrier();
    else warp_barrier();
    a.data[0] = 2016.0f;
}
// Lanes of a warp are in different operations.
KERNEL_OF(64, mixed, Args) {
    float v = threadIdx.x % 2 ? shuffle(1.0f, 0) : shuffle_xor(1.0f, 1);
    a.data[0] = v;
}
// One element past the end, of memory and of shared memory.
KERNEL_OF(64, outside, Args) {
    if (threadIdx.x == 63) a.data[a.len] = 1.0f;
}
KERNEL_OF(64, outside_shared, Args) {
    SHARED_BYTES(bytes);
    ((float*)bytes)[threadIdx.x + 1] = 1.0f;
    barrier();
    a.data[0] = ((float*)bytes)[1];
}
// A copy that nobody waits for.
KERNEL_OF(64, unawaited, Args) {
    SHARED __align__(16) float part[64];
    if (threadIdx.x < 16) copy16(part + 4 * threadIdx.x, a.data + 4 * threadIdx.x);
    copies_commit();
    barrier();
    if (threadIdx.x == 0) {
        a.data[0] = sum_of(part);
    }
}
// Shared memory that nobody wrote.
KERNEL_OF(64, unwritten, Args) {
    SHARED float part[64];
    if (threadIdx.x > 0) part[threadIdx.x] = a.data[threadIdx.x];
    barrier();
    if (threadIdx.x == 0) {
        a.data[0] = sum_of(part);
    }
}

// Bulk copies, counted by a barrier; nothing is wrong with the first.
// Brings 64 values, of which `bytes` are copied, and adds them up, after waiting for the barrier if it WAITS.
template <bool WAITS> DEVICE void sum_of_bulk(const Args& a, float* part, Barrier* full, u32 bytes) {
    if (threadIdx.x == 0) barrier_init(full, 1);
    barrier();
    if (threadIdx.x == 32) {
        barrier_expect(full, 256);
        copy_bulk(part, a.data, bytes, full);
    }
    if (WAITS) barrier_wait(full, 0);
    barrier();
    if (threadIdx.x == 0) a.data[0] = sum_of(part);
}
#define BULK(name, waits, bytes)                       \
    KERNEL_OF(64, name, Args) {                        \
        SHARED __align__(16) float part[64];           \
        SHARED Barrier full;                           \
        sum_of_bulk<waits>(a, part, &full, bytes);     \
    }
BULK(sound_bulk, true, 256)
// Nobody waits for its barrier.
BULK(uncounted, false, 256)
// It brings less than is waited for.
BULK(short_bulk, true, 128)
// The product of rows of sixteen 504's with a matrix of ones: 4 * 2016.
template <bool WAITS> DEVICE void multiply_ones(const Args& a) {
    SHARED __align__(16) u16 ones[128 * 64];
    for (u32 i = threadIdx.x; i < 128 * 64; i += 64) ones[i] = 0x3f80;
    barrier();
    float d[64] = {};
    const u32 words[4] = {0x43fc43fc, 0x43fc43fc, 0x43fc43fc, 0x43fc43fc};
    group_begin();
    group_bf16(d, words, operand_of_rows((const u8*)ones, 0), true);
    group_commit();
    if (WAITS) group_wait<0>();
    group_results(d);
    if (threadIdx.x == 0) a.data[0] = d[0] / 4.0f;
}
KERNEL_OF(64, sound_products, Args) { multiply_ones<true>(a); }
// Results that nobody waits for.
KERNEL_OF(64, hasty, Args) { multiply_ones<false>(a); }

int main(int, char** argv) {
    float* data = (float*)aligned_alloc(64, 64 * sizeof(float));
    for (u32 i = 0; i < 64; i++) data[i] = (float)i;
    Args args = {data, 64};
    const shim::Kernel* kernel = shim::kernels;
    while (kernel && strcmp(kernel->name, argv[1])) kernel = kernel->next;
    if (!kernel) return 2;
    if (!shim::launch(*kernel, {1, 1, 1}, {64, 1, 1}, 64 * sizeof(float), &args)) return 3;
    bool fine = data[0] == 2016.0f || !strncmp(argv[1], "outside", 7);
    free(data);
    return fine ? 0 : 4;
}
