// What a kernel sees of a run: values, the batch, weights. Twins of the structs in src/ops/gpu.rs, field for field.
#pragma once
#include "platform.cuh"

// Rows of f32, `stride` elements apart. `*rows` is their number in this run; a grid may cover more. With `tiles`, the rows are words of bfloat16
// in place of f32: as many tiles of eight rows, laid as linear_prepare.cu lays them.
struct View {
    float* data;
    const u32* rows;
    u32 stride, width;
    u32 tiles;
    enum Words : u32 { FOR_TILES, FOR_GROUPS } words;
};

// 32 activations as scale * code, with the sums that packed weights need (src/backend/cpu/activations.rs).
struct Q8Block {
    i8 codes[32];
    float scale, sum;
    i32 offset, offset_nibble;
    float half_sum[2];
    i32 half_offset[2];
};

// Rows of 8-bit blocks, `stride` blocks apart.
struct Q8View {
    Q8Block* data;
    const u32* rows;
    u32 stride, width;
    u32 spare[2];
};

// Rows of the batch that belong to one sequence.
struct Segment {
    u32 first, count;
    // Position of the first row in its sequence; tokens of the source that the sequence has read.
    u32 position, source;
};

struct Batch {
    u32 rows, segments;
    // Key/value states of the model; recurrent slots too.
    u32 kv_states, spare;
    const i32* tokens;
    const u32* positions;
    // By row: its segment. By segment: its last row.
    const u32* segment_of;
    const u32* last_row;
    const Segment* segment;
    // [segment][kv state]: list of page addresses.
    u8* const* const* pages;
    // By segment: recurrent state before this run and where the state after it goes (may be the same memory).
    const float* const* state_read;
    float* const* state_write;
};

// Key/value pages as ops/frame.rs lays them out: for each head its keys [PAGE / 16][key_dim][16], then its values [PAGE][value_dim].
static const u32 PAGE = 32;
struct Kv {
    u32 heads, key_dim, value_dim;
    // 0: f32, 1: f16.
    u32 half;
};

DEVICE u32 first_key(const Kv& kv, u32 head) { return head * PAGE * (kv.key_dim + kv.value_dim); }
DEVICE u32 first_value(const Kv& kv, u32 head) { return first_key(kv, head) + PAGE * kv.key_dim; }
DEVICE u32 key_of(const Kv& kv, u32 head, u32 at, u32 d) { return first_key(kv, head) + at / 16 * 16 * kv.key_dim + d * 16 + at % 16; }
DEVICE u32 value_of(const Kv& kv, u32 head, u32 at, u32 d) { return first_value(kv, head) + at * kv.value_dim + d; }
DEVICE float kv_load(const Kv& kv, const u8* page, u32 index) { return kv.half ? from_f16(((const u16*)page)[index]) : ((const float*)page)[index]; }
DEVICE void kv_store(const Kv& kv, u8* page, u32 index, float v) {
    if (kv.half) ((u16*)page)[index] = to_f16(v);
    else ((float*)page)[index] = v;
}

// A packed matrix [rows, cols] in panels of 16 rows (src/backend/cpu/pack.rs).
enum LayoutKind : u32 { LAYOUT_F32, LAYOUT_BF16, LAYOUT_F16, LAYOUT_F8, LAYOUT_I8, LAYOUT_I4, LAYOUT_TABLE };
struct Part {
    const u8* data;
    u64 panel_bytes;
    u32 rows, cols;
    // First of its rows in the whole matrix.
    u32 first;
    LayoutKind kind;
    // Elements per scale (16 or 32; of floats 128, or 1 for none), whether blocks have a minimum.
    u32 block, min;
    // What 4-bit codes stand for, LAYOUT_TABLE alone.
    i8 table[16];
};

// Sum over a warp, in one order.
DEVICE float warp_sum(float v) {
    for (u32 m = 16; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}
DEVICE float warp_max(float v) {
    for (u32 m = 16; m > 0; m /= 2) v = largest(v, shuffle_xor(v, m));
    return v;
}
// Sum over a block of up to 1,024 threads, in one order; `scratch` has room for 32 floats. All threads get it.
DEVICE float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    barrier();
    if (lane() == 0) scratch[threadIdx.x / 32] = v;
    barrier();
    // Every warp adds up for itself.
    return warp_sum(lane() < (blockDim.x + 31) / 32 ? scratch[lane()] : 0.0f);
}
