// mamba2: a matrix state for each head that decays by one factor and takes in an outer product; src/ops/mamba2.rs has the definition.
#include "common/math.cuh"

struct Mamba2Args {
    View x, b, c, dt, y;
    const Batch* batch;
    const float* a_log;
    const float* d;
    const float* dt_bias;
    // First float of the slot in a sequence's state: [heads][channels / 16 rounded up][depth][16].
    u64 slot;
    float least, most;
    u32 heads, groups, channels, depth;
};

// Positions that are staged together.
static const u32 MAMBA_STAGE = 8;

// As delta_rule: a warp has 8 channels, each of its four groups of lanes `E` elements of their depth. y = decay S c + write (b . c) + d x.
template <u32 E> DEVICE void mamba2_of(const Mamba2Args& a, u8* memory) {
    const u32 LINE = 4 * (E + 4);
    float* b = (float*)memory;
    float* c = b + MAMBA_STAGE * LINE;
    float* x = c + MAMBA_STAGE * LINE;
    float* step = x + MAMBA_STAGE * 32;
    float* fade = step + MAMBA_STAGE;
    float* met = fade + MAMBA_STAGE;
    u32 segment = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, part = lane() / 8;
    if (segment >= a.batch->segments) return;
    u32 shared_at = head / (a.heads / a.groups) * a.depth;
    u32 column = blockIdx.z * 32 + warp * 8 + lane() % 8;
    u32 blocks = over_up(a.channels, 16);
    bool held_here = column < blocks * 16;
    u64 place = a.slot + ((u64)(head * blocks + column / 16) * a.depth + part * E) * 16 + column % 16;
    const float* read = a.batch->state_read[segment] + place;
    float* write = a.batch->state_write[segment] + place;
    float rate = expf(a.a_log[head]), skip = a.d[head], bias = a.dt_bias[head];
    float s[E];
    for (u32 j = 0; j < E; j++) s[j] = held_here && part * E + j < a.depth ? read[j * 16] : 0.0f;
    Segment rows = a.batch->segment[segment];
    for (u32 start = 0; start < rows.count; start += MAMBA_STAGE) {
        u32 count = least(MAMBA_STAGE, rows.count - start);
        barrier();
        for (u32 i = threadIdx.x; i < count * 4 * E; i += blockDim.x) {
            u32 t = i / (4 * E), d = i % (4 * E), to = t * LINE + d / E * (E + 4) + d % E, row = rows.first + start + t;
            b[to] = d < a.depth ? row_at(a.b, row)[shared_at + d] : 0.0f;
            c[to] = d < a.depth ? row_at(a.c, row)[shared_at + d] : 0.0f;
        }
        for (u32 i = threadIdx.x; i < count * 32; i += blockDim.x) {
            u32 d = blockIdx.z * 32 + i % 32;
            x[i] = d < a.channels ? row_at(a.x, rows.first + start + i / 32)[head * a.channels + d] : 0.0f;
        }
        if (threadIdx.x < count) {
            float t = softplus(row_at(a.dt, rows.first + start + threadIdx.x)[head] + bias);
            t = t < a.least ? a.least : t > a.most ? a.most : t;
            step[threadIdx.x] = t, fade[threadIdx.x] = expf(-t * rate);
        }
        barrier();
        for (u32 t = warp; t < count; t += 4) {
            float sum = 0.0f;
            for (u32 d = lane(); d < 4 * E; d += 32) sum = fused(b[t * LINE + d / E * (E + 4) + d % E], c[t * LINE + d / E * (E + 4) + d % E], sum);
            sum = warp_sum(sum);
            if (lane() == 0) met[t] = sum;
        }
        barrier();
        for (u32 t = 0; t < count; t++) {
            const float* bt = b + t * LINE + part * (E + 4);
            const float* ct = c + t * LINE + part * (E + 4);
            float own = x[t * 32 + warp * 8 + lane() % 8], in = step[t] * own, decay = fade[t];
            float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 j = 0; j < E; j += 4) {
                Words4 b4 = load16(bt + j), c4 = load16(ct + j);
                s[j] *= decay, s[j + 1] *= decay, s[j + 2] *= decay, s[j + 3] *= decay;
                out[0] = fused(s[j], float_of(c4.x), out[0]), out[1] = fused(s[j + 1], float_of(c4.y), out[1]);
                out[2] = fused(s[j + 2], float_of(c4.z), out[2]), out[3] = fused(s[j + 3], float_of(c4.w), out[3]);
                s[j] = fused(float_of(b4.x), in, s[j]), s[j + 1] = fused(float_of(b4.y), in, s[j + 1]);
                s[j + 2] = fused(float_of(b4.z), in, s[j + 2]), s[j + 3] = fused(float_of(b4.w), in, s[j + 3]);
            }
            float answer = (out[0] + out[1]) + (out[2] + out[3]);
            answer += shuffle_xor(answer, 8);
            answer += shuffle_xor(answer, 16);
            if (part == 0 && column < a.channels) {
                row_at(a.y, rows.first + start + t)[head * a.channels + column] = fused(skip, own, fused(in, met[t], answer));
            }
        }
    }
    for (u32 j = 0; j < E; j++) {
        if (held_here && part * E + j < a.depth) write[j * 16] = s[j];
    }
}

// Grid: (segments, heads, channels / 32); depths of up to 32, 64, 128 and 256. Dynamic shared memory: `stage_bytes` in src/ops/mamba2.rs.
KERNEL_OF(128, mamba2_32, Mamba2Args) {
    begin();
    SHARED_BYTES(memory);
    mamba2_of<8>(a, memory);
}
KERNEL_OF(128, mamba2_64, Mamba2Args) {
    begin();
    SHARED_BYTES(memory);
    mamba2_of<16>(a, memory);
}
KERNEL_OF(128, mamba2_128, Mamba2Args) {
    begin();
    SHARED_BYTES(memory);
    mamba2_of<32>(a, memory);
}
KERNEL_OF(128, mamba2_256, Mamba2Args) {
    begin();
    SHARED_BYTES(memory);
    mamba2_of<64>(a, memory);
}
