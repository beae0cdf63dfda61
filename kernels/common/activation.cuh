// Activations by number; src/ops/act.rs has the definitions.
#pragma once
#include "rows.cuh"

enum Activation : u32 {
    SILU,
    GELU_TANH,
    GELU,
    RELU,
    RELU2,
    SIGMOID,
    SOFTPLUS,
    IDENTITY,
    CLAMPED_SILU,
    SITU,
    SILU_THEN_CLAMP,
    SWIGLU_OAI,
};

DEVICE float below(float x, float limit) { return x > limit ? limit : x; }
DEVICE float within(float x, float limit) { return -below(-below(x, limit), limit); }
DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float activated(Activation act, float x, float limit, float slope) {
    switch (act) {
        case SILU: return x * sigmoid_of(x);
        case GELU_TANH: return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
        case GELU: return 0.5f * x * erfcf(-0.7071067811865476f * x);
        case RELU: return largest(x, 0.0f);
        case RELU2: return largest(x, 0.0f) * largest(x, 0.0f);
        case SIGMOID: return sigmoid_of(x);
        case SOFTPLUS: return largest(x, 0.0f) + log1pf(expf(-magnitude(x)));
        case IDENTITY: return x;
        case CLAMPED_SILU: return below(x, limit) * sigmoid_of(below(x, limit));
        case SITU: return limit * tanhf(x / limit) * sigmoid_of(x);
        case SILU_THEN_CLAMP: return below(x * sigmoid_of(x), limit);
        case SWIGLU_OAI: return below(x, limit) * sigmoid_of(slope * below(x, limit));
    }
    return x;
}

DEVICE float other_factor(Activation act, float up, float limit, float slope) {
    switch (act) {
        case CLAMPED_SILU:
        case SILU_THEN_CLAMP: return within(up, limit);
        case SITU: return slope != 0.0f ? slope * tanhf(up / slope) : up;
        case SWIGLU_OAI: return within(up, limit) + 1.0f;
        default: return up;
    }
}

// Calls `put(i, v)` with act(gate) * up, or act(gate) where `up` is null, for the columns of this thread (each_column).
template <class Put>
DEVICE void each_activated(Activation act, const float* gate, const float* up, u32 width, float limit, float slope, Put put) {
    struct Two {
        float gate, up;
    };
    each_column(
        width, [&](u32 i) { return Two{gate[i], up ? up[i] : 0.0f}; },
        [&](u32 i, const Two& x) {
            float v = activated(act, x.gate, limit, slope);
            put(i, up ? v * other_factor(act, x.up, limit, slope) : v);
        });
}
