// route: which experts a row goes to; src/ops/route.rs has the definition.
#include "common/math.cuh"

enum RouteScoring : u32 { ROUTE_LOGITS, ROUTE_SOFTMAX, ROUTE_SIGMOID, ROUTE_SQRT_SOFTPLUS };
static const u32 ROUTE_GROUPS = 64;

struct RouteArgs {
    View logits, y;
    // Null for none.
    const float* bias;
    const float* gain;
    u32 top_k;
    RouteScoring scoring;
    // The choice is made among logits; weights are a softmax over the picked.
    u32 by_logits, picked_only;
    // 0 for none.
    u32 groups;
    u32 keep, best_two, normalize;
    float scale;
    u32 spare;
};

// The larger one; what is not a number is never larger.
DEVICE float greater(float a, float b) { return b > a ? b : a; }
DEVICE float warp_greatest(float v) {
    for (u32 m = 16; m > 0; m /= 2) v = greater(v, shuffle_xor(v, m));
    return v;
}
DEVICE u32 warp_least(u32 v) {
    for (u32 m = 16; m > 0; m /= 2) v = least(v, shuffle_xor(v, m));
    return v;
}

// Leaves the choices of kept groups; all others become -inf.
DEVICE void route_limit(const RouteArgs& a, float* choice, float* group) {
    u32 size = a.logits.width / a.groups;
    for (u32 g = lane(); g < a.groups; g += 32) {
        float first = -infinite(), second = -infinite();
        for (u32 i = g * size; i < (g + 1) * size; i++) {
            float v = choice[i];
            if (v > first) second = first, first = v;
            else if (v > second) second = v;
        }
        group[g] = a.best_two && size > 1 ? first + second : first;
    }
    warp_barrier();
    for (u32 g = lane(); g < a.groups; g += 32) {
        u32 ahead = 0;
        for (u32 o = 0; o < a.groups; o++) ahead += group[o] > group[g] || (group[o] == group[g] && o < g);
        if (ahead < a.keep) continue;
        for (u32 i = g * size; i < (g + 1) * size; i++) choice[i] = -infinite();
    }
    warp_barrier();
}

// Grid: (rows); a block is a warp. Dynamic shared memory: two floats for each choice.
KERNEL_OF(32, route, RouteArgs) {
    begin();
    SHARED_BYTES(memory);
    SHARED float group[ROUTE_GROUPS];
    u32 row = blockIdx.x, n = a.logits.width;
    if (row >= *a.y.rows) return;
    const float* logits = row_at(a.logits, row);
    float* ids = row_at(a.y, row);
    float* weights = ids + a.top_k;
    float* scores = (float*)memory;
    float* choice = scores + n;
    float top = -infinite(), total = 0.0f;
    if (a.scoring == ROUTE_SOFTMAX) {
        for (u32 i = lane(); i < n; i += 32) top = greater(top, logits[i]);
        top = warp_greatest(top);
    }
    for (u32 i = lane(); i < n; i += 32) {
        float x = logits[i], s = x;
        if (a.scoring == ROUTE_SOFTMAX) total += s = expf(x - top);
        if (a.scoring == ROUTE_SIGMOID) s = sigmoid(x);
        if (a.scoring == ROUTE_SQRT_SOFTPLUS) s = root(softplus(x));
        scores[i] = s;
    }
    if (a.scoring == ROUTE_SOFTMAX) total = warp_sum(total);
    for (u32 i = lane(); i < n; i += 32) {
        if (a.scoring == ROUTE_SOFTMAX) scores[i] = over(scores[i], total);
        float c = a.by_logits ? logits[i] : scores[i];
        if (a.bias) c = plus(c, a.bias[i]);
        choice[i] = is_nan(c) ? -infinite() : c;
    }
    warp_barrier();
    if (a.groups) route_limit(a, choice, group);
    for (u32 slot = 0; slot < a.top_k; slot++) {
        float best = -infinite();
        u32 id = ~0u;
        for (u32 i = lane(); i < n; i += 32) {
            if (choice[i] > best) best = choice[i], id = i;
        }
        float most = warp_greatest(best);
        // The lowest of those that are as good.
        id = warp_least(best == most && most > -infinite() ? id : ~0u);
        if (id == ~0u) {
            // Nothing is left to prefer: the lowest that is not taken.
            for (u32 i = lane(); i < n && id == ~0u; i += 32) {
                bool taken = false;
                for (u32 s = 0; s < slot; s++) taken = taken || ids[s] == (float)i;
                if (!taken) id = i;
            }
            id = warp_least(id);
        }
        warp_barrier();
        if (lane() == 0) {
            choice[id] = -infinite();
            ids[slot] = (float)id;
            weights[slot] = scores[id];
        }
        warp_barrier();
    }
    if (a.picked_only) {
        top = -infinite();
        for (u32 s = 0; s < a.top_k; s++) top = greater(top, weights[s]);
        warp_barrier();
        for (u32 s = lane(); s < a.top_k; s += 32) weights[s] = expf(weights[s] - top);
        warp_barrier();
    }
    total = 1.0f;
    if (a.picked_only || a.normalize) {
        total = 0.0f;
        for (u32 s = 0; s < a.top_k; s++) total = plus(total, weights[s]);
        total = plus(total, 1e-20f);
        warp_barrier();
    }
    for (u32 s = lane(); s < a.top_k; s += 32) {
        weights[s] = over(weights[s], total) * (a.scale * (a.gain ? a.gain[(u32)ids[s]] : 1.0f));
    }
}
