// conv: causal depthwise convolution over time with a carried tail; src/ops/conv.rs has the definition.
#include "common/math.cuh"

struct ConvArgs {
    View x, y;
    const Batch* batch;
    const float* weight;
    // Null for none.
    const float* bias;
    // First float of the slot in a sequence's state.
    u64 slot;
    u32 taps, dilation;
    u32 silu, spare;
};

static const u32 CONV_TAPS = 16;

// Row `t` of the segment that begins at row `first`; what lies before it is in the tail.
DEVICE float conv_at(const ConvArgs& a, const float* tail, const float* w, u32 first, u32 t, u32 c) {
    u32 kept = (a.taps - 1) * a.dilation;
    float sum = a.bias ? a.bias[c] : 0.0f;
    for (u32 j = 0; j < a.taps; j++) {
        u32 back = (a.taps - 1 - j) * a.dilation;
        float x = t >= back ? row_at(a.x, first + t - back)[c] : tail[(u64)(kept - (back - t)) * a.x.width + c];
        sum = fused(w[j], x, sum);
    }
    return a.silu ? sum * sigmoid(sum) : sum;
}

// Moves one channel's tail forward over `count` rows. Places are read before later ones are written, so both may be the same memory.
DEVICE void conv_advance(const ConvArgs& a, const float* tail, float* next, u32 first, u32 count, u32 c) {
    u32 kept = (a.taps - 1) * a.dilation, width = a.x.width;
    for (u32 t = 0; t < kept; t++) {
        next[(u64)t * width + c] = t + count < kept ? tail[(u64)(t + count) * width + c] : row_at(a.x, first + count - (kept - t))[c];
    }
}

// Grid: (segments, channels / threads); a thread walks the rows of one channel. For few rows a sequence.
KERNEL_OF(128, conv, ConvArgs) {
    begin();
    u32 segment = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    if (segment >= a.batch->segments || c >= a.x.width) return;
    Segment s = a.batch->segment[segment];
    const float* tail = a.batch->state_read[segment] + a.slot;
    float w[CONV_TAPS];
    for (u32 j = 0; j < CONV_TAPS; j++) w[j] = j < a.taps ? a.weight[(u64)c * a.taps + j] : 0.0f;
    for (u32 t = 0; t < s.count; t++) row_at(a.y, s.first + t)[c] = conv_at(a, tail, w, s.first, t, c);
    conv_advance(a, tail, a.batch->state_write[segment] + a.slot, s.first, s.count, c);
}

// Grid: (rows, channels / threads). conv_tail follows.
KERNEL_OF(128, conv_rows, ConvArgs) {
    begin();
    u32 row = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.x.rows || c >= a.x.width) return;
    u32 segment = a.batch->segment_of[row], first = a.batch->segment[segment].first;
    row_at(a.y, row)[c] = conv_at(a, a.batch->state_read[segment] + a.slot, a.weight + (u64)c * a.taps, first, row - first, c);
}

// Grid: (segments, channels / threads).
KERNEL_OF(128, conv_tail, ConvArgs) {
    begin();
    u32 segment = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    if (segment >= a.batch->segments || c >= a.x.width) return;
    Segment s = a.batch->segment[segment];
    conv_advance(a, a.batch->state_read[segment] + a.slot, a.batch->state_write[segment] + a.slot, s.first, s.count, c);
}
