// linear_prepare: activations in the order in which tensor cores take them, for linear_narrow.cu and linear_wide.cu.
//
// Rows go in tiles of eight, the B operand of a product: lane (g, t) has row g. A step of k is a product's 16 (floats) or a 32-block (integers).
// Words lie [step][tiles / 2][32 lanes][2 tiles][2], or [step][32 lanes][2] for one tile: b0 and b1 of a lane, so that a warp reads them as they
// are. Floats are cut into limbs, the first the nearest of the format, the next the nearest to what is left; each limb is such a plane.
// Block factors of integers lie [step][rows].
#include "common/rows.cuh"
#include "formats/fragments.cuh"

struct PrepareArgs {
    View x;
    Q8View q;
    // Rows of x that exist: x.rows or q.rows.
    const u32* rows;
    u32* words;
    // Integers: [step][8 * tiles].
    BlockFactor* factors;
    // F16: by row from `first` on, the power of two that its elements are divided by.
    float* exponents;
    // First row of x that is taken, and tiles of rows from there on.
    u32 first, cols, tiles, limbs;
    Order order;
    u32 spare;
};

DEVICE u32* words_at(const PrepareArgs& a, u64 step, u32 tile) {
    if (a.tiles == 1) return a.words + (step * 32 + lane()) * 2;
    return a.words + ((step * (a.tiles / 2) + tile / 2) * 32 + lane()) * 4 + tile % 2 * 2;
}

// Grid: (rows): the exponents of the rows' largest magnitudes, so that f16 holds them; of blocks, those of their largest possible codes.
KERNEL_OF(256, prepare_exponents, PrepareArgs) {
    SHARED float most[8];
    u32 rows = *a.rows, at = blockIdx.x, row = a.first + at;
    begin();
    if (row >= rows) {
        if (threadIdx.x == 0) a.exponents[at] = 1.0f;
        return;
    }
    float v = 0.0f;
    if (a.q.data)
        for (u32 k = threadIdx.x; k < a.cols / 32; k += blockDim.x) v = largest(v, row_at(a.q, row)[k].scale * 127.0f);
    else
        for (u32 k = threadIdx.x; k < a.cols; k += blockDim.x) v = largest(v, magnitude(row_at(a.x, row)[k]));
    v = warp_max(v);
    if (lane() == 0) most[threadIdx.x / 32] = v;
    barrier();
    if (threadIdx.x) return;
    for (u32 w = 1; w < blockDim.x / 32; w++) v = largest(v, most[w]);
    // The largest lands in 2^14 .. 2^15. Zeros, and what is not finite, stay as they are.
    u32 exponent = bits_of(v) >> 23;
    a.exponents[at] = exponent == 0 || exponent == 255 ? 1.0f : float_of((exponent > 15 ? exponent - 14 : 1) << 23);
}

// Grid: (steps / 8, tiles); a warp makes a step of a tile.
KERNEL_OF(256, prepare_floats, PrepareArgs) {
    u32 rows = *a.rows, step = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = blockIdx.y;
    u32 at = tile * 8 + lane() / 4, row = a.first + at;
    begin();
    u32 steps = a.cols / 16;
    if (step >= steps) return;
    float v[4] = {};
    if (row < rows) {
        const float* x = row_at(a.x, row) + step * 16 + lane() % 4 * 2;
        Words2 low = load8(x), high = load8(x + 8);
        v[0] = float_of(low.x), v[1] = float_of(low.y), v[2] = float_of(high.x), v[3] = float_of(high.y);
        if (a.order == ORDER_F16)
            for (u32 i = 0; i < 4; i++) v[i] /= a.exponents[at];
    }
    for (u32 limb = 0; limb < a.limbs; limb++) {
        u32* to = words_at(a, (u64)limb * steps + step, tile);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 pair = a.order == ORDER_F16 ? pair_f16(v[2 * i], v[2 * i + 1]) : pair_bf16(v[2 * i], v[2 * i + 1]);
            to[i] = pair;
            v[2 * i] -= a.order == ORDER_F16 ? low_f16(pair) : low_bf16(pair);
            v[2 * i + 1] -= a.order == ORDER_F16 ? high_f16(pair) : high_bf16(pair);
        }
    }
}

// Grid: (blocks of 32 / 8, tiles); a warp makes a block of a tile. Steps up to an even number are written, the last with zeros.
KERNEL_OF(256, prepare_codes, PrepareArgs) {
    u32 rows = *a.rows, step = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = blockIdx.y;
    u32 at = tile * 8 + lane() / 4, row = a.first + at, t = lane() % 4;
    begin();
    u32 steps = a.cols / 32;
    if (step >= (steps + 1) / 2 * 2) return;
    u32 b0 = 0, b1 = 0;
    BlockFactor factor = {};
    if (row < rows && step < steps) {
        const Q8Block& block = row_at(a.q, row)[step];
        const u32* codes = (const u32*)block.codes;
        if (a.order == ORDER_I8) {
            b0 = codes[t], b1 = codes[t + 4];
        } else {
            u32 w0 = codes[2 * t], w1 = codes[2 * t + 1];
            b0 = a.order == ORDER_I4 ? w0 : permute(w0, w1, 0x5140), b1 = a.order == ORDER_I4 ? w1 : permute(w0, w1, 0x7362);
        }
        i32 low = block.half_offset[0] / -128, high = block.half_offset[1] / -128;
        factor = {block.scale, ((u32)low & 0xffff) | (u32)high << 16};
    }
    u32* to = words_at(a, step, tile);
    to[0] = b0, to[1] = b1;
    if (t == 0) a.factors[(u64)step * 8 * a.tiles + at] = factor;
}

// Where chunk `chunk` of sixteen bytes of row `at` lies in the step `blockIdx.x` of rows for linear_group.cu.
DEVICE u8* group_chunk(const PrepareArgs& a, u32 at, u32 chunk) {
    return (u8*)a.words + ((u64)blockIdx.x * a.tiles + at / 8) * 1024 + at % 8 * 128 + (chunk ^ at % 8) * 16;
}

// Grid: (steps of 64 k's, rows / 32): floats for linear_group.cu, [limb][step][row / 8][1,024 bytes]: eight rows of 64 elements, whose chunks of
// sixteen bytes are swapped by the row's number modulo eight.
KERNEL_OF(256, prepare_group, PrepareArgs) {
    u32 rows = *a.rows, at = blockIdx.y * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8, row = a.first + at;
    begin();
    float v[8] = {};
    if (row < rows) {
        const float* x = row_at(a.x, row) + blockIdx.x * 64 + chunk * 8;
        Words4 low = load16(x), high = load16(x + 4);
        const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = a.order == ORDER_F16 ? float_of(words[i]) / a.exponents[at] : float_of(words[i]);
    }
    u8* to = group_chunk(a, at, chunk);
    for (u32 limb = 0; limb < a.limbs; limb++) {
        u32 pair[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            pair[i] = a.order == ORDER_F16 ? pair_f16(v[2 * i], v[2 * i + 1]) : pair_bf16(v[2 * i], v[2 * i + 1]);
            v[2 * i] -= a.order == ORDER_F16 ? low_f16(pair[i]) : low_bf16(pair[i]);
            v[2 * i + 1] -= a.order == ORDER_F16 ? high_f16(pair[i]) : high_bf16(pair[i]);
        }
        *(Words4*)(to + (u64)limb * (a.cols / 64) * a.tiles * 1024) = {pair[0], pair[1], pair[2], pair[3]};
    }
}

// Grid as prepare_group: blocks of 8 bits as f16, for integers in linear_group.cu. Position 2 t + e of a step of 16, or 8 + 2 t + e, is that of lane t's
// word of four codes: code 2 e of it, or 1 + 2 e. Words of 8 bits are 4 t .. of the step, words of 4 bits 8 t .. of 32, their second half in the next step.
KERNEL_OF(256, prepare_group_codes, PrepareArgs) {
    u32 rows = *a.rows, at = blockIdx.y * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8, row = a.first + at;
    begin();
    u32 pair[4] = {};
    if (row < rows) {
        const Q8Block& block = row_at(a.q, row)[blockIdx.x * 2 + chunk / 4];
        float by = block.scale / a.exponents[at];
        u32 step = chunk / 2 % 2;
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            const i8* codes = block.codes + (a.order == ORDER_I8 ? step * 16 + t * 4 : t * 8 + step * 4) + chunk % 2;
            pair[t] = pair_f16(by * (float)codes[0], by * (float)codes[2]);
        }
    }
    *(Words4*)group_chunk(a, at, chunk) = {pair[0], pair[1], pair[2], pair[3]};
}
