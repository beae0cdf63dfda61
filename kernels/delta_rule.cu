// delta_rule: a matrix state for each head that decays, unlearns and learns, position by position; src/ops/delta_rule.rs has the definition.
#include "common/math.cuh"

struct DeltaRuleArgs {
    View q, k, v, decay, beta, y;
    const Batch* batch;
    // First float of the slot in a sequence's state: [heads][value_dim / 16 rounded up][key_dim][16].
    u64 slot;
    u32 key_heads, heads, key_dim, value_dim;
    // Gates of a head: 1, or one for each key channel.
    u32 gates;
    u32 tiled;
};

// Positions that are staged together.
static const u32 DELTA_STAGE = 8;

// A warp has 8 value channels; each of its four groups of 8 lanes has `E` key channels of them in registers, read once and written once.
// Both sums of a position are made from the state as it was: y = S q + delta (k . q).
template <u32 E> DEVICE void delta_rule_of(const DeltaRuleArgs& a, u8* memory) {
    // Keys of a group lie together, groups four floats apart from the next bank's.
    const u32 LINE = 4 * (E + 4);
    float* q = (float*)memory;
    float* k = q + DELTA_STAGE * LINE;
    float* gate = k + DELTA_STAGE * LINE;
    float* v = gate + DELTA_STAGE * LINE;
    float* beta = v + DELTA_STAGE * 32;
    float* met = beta + DELTA_STAGE;
    u32 segment = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, group = lane() / 8;
    if (segment >= a.batch->segments) return;
    u32 key_head = a.tiled ? head % a.key_heads : head / (a.heads / a.key_heads);
    u32 column = blockIdx.z * 32 + warp * 8 + lane() % 8;
    u32 blocks = over_up(a.value_dim, 16);
    bool held_here = column < blocks * 16;
    u64 place = a.slot + ((u64)(head * blocks + column / 16) * a.key_dim + group * E) * 16 + column % 16;
    const float* read = a.batch->state_read[segment] + place;
    float* write = a.batch->state_write[segment] + place;
    float s[E];
    for (u32 j = 0; j < E; j++) s[j] = held_here && group * E + j < a.key_dim ? read[j * 16] : 0.0f;
    Segment rows = a.batch->segment[segment];
    for (u32 start = 0; start < rows.count; start += DELTA_STAGE) {
        u32 count = least(DELTA_STAGE, rows.count - start);
        barrier();
        for (u32 i = threadIdx.x; i < count * 4 * E; i += blockDim.x) {
            u32 t = i / (4 * E), d = i % (4 * E), to = t * LINE + d / E * (E + 4) + d % E, row = rows.first + start + t;
            bool inside = d < a.key_dim;
            q[to] = inside ? row_at(a.q, row)[key_head * a.key_dim + d] : 0.0f;
            k[to] = inside ? row_at(a.k, row)[key_head * a.key_dim + d] : 0.0f;
            gate[to] = inside ? row_at(a.decay, row)[head * a.gates + (a.gates == 1 ? 0 : d)] : 0.0f;
        }
        for (u32 i = threadIdx.x; i < count * 32; i += blockDim.x) {
            u32 t = i / 32, d = blockIdx.z * 32 + i % 32;
            v[i] = d < a.value_dim ? row_at(a.v, rows.first + start + t)[head * a.value_dim + d] : 0.0f;
        }
        if (threadIdx.x < count) beta[threadIdx.x] = row_at(a.beta, rows.first + start + threadIdx.x)[head];
        barrier();
        for (u32 t = warp; t < count; t += 4) {
            float sum = 0.0f;
            for (u32 d = lane(); d < 4 * E; d += 32) sum = fused(q[t * LINE + d / E * (E + 4) + d % E], k[t * LINE + d / E * (E + 4) + d % E], sum);
            sum = warp_sum(sum);
            if (lane() == 0) met[t] = sum;
        }
        barrier();
        for (u32 t = 0; t < count; t++) {
            const float* qt = q + t * LINE + group * (E + 4);
            const float* kt = k + t * LINE + group * (E + 4);
            const float* gt = gate + t * LINE + group * (E + 4);
            float held[4] = {0.0f, 0.0f, 0.0f, 0.0f}, out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 j = 0; j < E; j += 4) {
                Words4 g4 = load16(gt + j), k4 = load16(kt + j), q4 = load16(qt + j);
                s[j] *= float_of(g4.x), s[j + 1] *= float_of(g4.y), s[j + 2] *= float_of(g4.z), s[j + 3] *= float_of(g4.w);
                held[0] = fused(s[j], float_of(k4.x), held[0]), held[1] = fused(s[j + 1], float_of(k4.y), held[1]);
                held[2] = fused(s[j + 2], float_of(k4.z), held[2]), held[3] = fused(s[j + 3], float_of(k4.w), held[3]);
                out[0] = fused(s[j], float_of(q4.x), out[0]), out[1] = fused(s[j + 1], float_of(q4.y), out[1]);
                out[2] = fused(s[j + 2], float_of(q4.z), out[2]), out[3] = fused(s[j + 3], float_of(q4.w), out[3]);
            }
            float known = (held[0] + held[1]) + (held[2] + held[3]), answer = (out[0] + out[1]) + (out[2] + out[3]);
            known += shuffle_xor(known, 8), answer += shuffle_xor(answer, 8);
            known += shuffle_xor(known, 16), answer += shuffle_xor(answer, 16);
            float delta = (v[t * 32 + warp * 8 + lane() % 8] - known) * beta[t];
#pragma unroll
            for (u32 j = 0; j < E; j += 4) {
                Words4 k4 = load16(kt + j);
                s[j] = fused(float_of(k4.x), delta, s[j]), s[j + 1] = fused(float_of(k4.y), delta, s[j + 1]);
                s[j + 2] = fused(float_of(k4.z), delta, s[j + 2]), s[j + 3] = fused(float_of(k4.w), delta, s[j + 3]);
            }
            if (group == 0 && column < a.value_dim) row_at(a.y, rows.first + start + t)[head * a.value_dim + column] = fused(delta, met[t], answer);
        }
    }
    for (u32 j = 0; j < E; j++) {
        if (held_here && group * E + j < a.key_dim) write[j * 16] = s[j];
    }
}

// Grid: (segments, heads, value channels / 32); keys of up to 32, 64, 128 and 256 elements. Dynamic shared memory: `stage_bytes` in src/ops/delta_rule.rs.
KERNEL_OF(128, delta_rule_32, DeltaRuleArgs) {
    begin();
    SHARED_BYTES(memory);
    delta_rule_of<8>(a, memory);
}
KERNEL_OF(128, delta_rule_64, DeltaRuleArgs) {
    begin();
    SHARED_BYTES(memory);
    delta_rule_of<16>(a, memory);
}
KERNEL_OF(128, delta_rule_128, DeltaRuleArgs) {
    begin();
    SHARED_BYTES(memory);
    delta_rule_of<32>(a, memory);
}
KERNEL_OF(128, delta_rule_256, DeltaRuleArgs) {
    begin();
    SHARED_BYTES(memory);
    delta_rule_of<64>(a, memory);
}
