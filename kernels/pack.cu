// pack: rows of 16-bit floats, as a checkpoint stores them, into panels of 16 rows; src/backend/cpu/pack.rs has the definition.
#include "common/platform.cuh"

struct PackArgs {
    const u8* rows;
    u8* panels;
    // Bytes from one row to the next, a multiple of 16; what lies behind a row's elements may be anything.
    u32 stride;
    u32 count, cols;
    // 1: bfloat16, whose panels are [k / 2][16 rows][2]. 0: half floats, [k][16 rows].
    u32 pairs;
};

// A step: 32 words, of two elements each, of 16 rows: 2 KB of a panel. Words behind one another lie a word more than 16 apart, so that lanes meet
// all banks.
static const u32 PACK_WORDS = 32, PACK_PITCH = 17;

// Grid: (steps of all panels / warps): a warp turns a step over.
KERNEL_OF(256, pack_rows, PackArgs) {
    SHARED u32 turned[8][PACK_WORDS * PACK_PITCH];
    u32 words = (a.cols + 1) / 2, steps = (words + PACK_WORDS - 1) / PACK_WORDS;
    u32 at = blockIdx.x * 8 + threadIdx.x / 32, panel = at / steps, first = at % steps * PACK_WORDS;
    if (panel >= (a.count + 15) / 16) return;
    u32* own = turned[threadIdx.x / 32];
    Words4 read[4] = {};
    u32 word = first + lane() % 8 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = panel * 16 + i * 4 + lane() / 8;
        if (row < a.count && word < words) read[i] = load_once(a.rows + (u64)row * a.stride + word * 4);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 four[4] = {read[i].x, read[i].y, read[i].z, read[i].w};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            // Behind the last element are zeros, where a panel has anything there.
            u32 left = word + j < words ? a.cols - (word + j) * 2 : 0;
            own[(lane() % 8 * 4 + j) * PACK_PITCH + i * 4 + lane() / 8] = left > 1 ? four[j] : left ? four[j] & 0xffff : 0;
        }
    }
    warp_barrier();
    u8* to = a.panels + ((u64)panel * words + first) * 64;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 at = i * 8 + lane() / 4, chunk = lane() % 4;
        const u32* from = own + at * PACK_PITCH;
        u32 four[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 two = (chunk % 2 * 4 + j) * 2;
            four[j] = a.pairs ? from[chunk * 4 + j] : permute(from[two], from[two + 1], chunk < 2 ? 0x5410 : 0x7632);
        }
        if (first + at < words) *(Words4*)(to + at * 64 + chunk * 16) = {four[0], four[1], four[2], four[3]};
    }
}
