// linear_stream: as linear_narrow.cu, on capability 9.0: weights too go through shared memory. Bound by the read of the weights.
//
// A warp of its own keeps a ring of stages filled by bulk copies, the weights of all of them before the kernels before have ended. So what is on its way
// takes no registers, and nobody waits for a whole block: a warp begins with a stage when it is there, and gives it back when it is through. A stage
// is EACH steps for each way of all pairs: of each panel what lies side by side, and the activations that all meet. The order of sums is that of
// linear_narrow.cu.
#include "common/sm90.cuh"
#include "formats/narrow.cuh"

#if SM90
// A panel's bytes of a stage.
struct InStage {
    const u8* at;
    DEVICE Words4 wide(u32 byte) const { return load16(at + byte); }
    DEVICE Words2 narrow(u32 byte) const { return load8(at + byte); }
};

// Most stages, as in src/ops/linear_plan.rs; their barriers lie in front of them.
static const u32 MOST_STAGES = 8, FRONT = MOST_STAGES * 32;
static const u32 MOST_WARPS = 12;

// 8-bit floats four products at a time, whose sums their scales are applied to.
struct F8Runs : F8Fragments {
    static const u32 PRODUCTS = 4, STEP = PRODUCTS * F8Fragments::STEP, BYTES = PRODUCTS * F8Fragments::BYTES;
};

// What a stage of `size` steps holds of a panel: codes, then the scales of the runs that they are in.
template <class F> DEVICE u32 code_bytes(u32 size) {
    if constexpr (F::INTEGER) return (size + 1) / 2 * F::STRETCH;
    else return size * F::BYTES;
}
template <class F> DEVICE u32 panel_bytes(u32 size) { return code_bytes<F>(size) + (F::Scales::ANY ? (size * F::STEP / F8_RUN + 2) * 64 : 0); }

// The producer's side of the ring: lane i has the block's panel i.
template <class F, u32 TILES> struct Filler {
    const NarrowArgs& n;
    u8* memory;
    u32 steps, size, stage_bytes, present;
    const u8 *codes, *front;

    DEVICE Filler(const NarrowArgs& n, u8* memory, u32 steps, u32 size, u32 stage_bytes)
        : n(n), memory(memory), steps(steps), size(size), stage_bytes(stage_bytes), codes(nullptr), front(nullptr) {
        const TensorArgs& a = n.product;
        u32 first = blockIdx.x * n.pairs, pair = first + lane() / 2;
        present = n.all_pairs - first < n.pairs ? n.all_pairs - first : n.pairs;
        if (lane() / 2 >= present) return;
        u32 part = pair % 2;
        if (n.gating.on) pair /= 2;
        const Part& p = n.gating.on ? a.part[part] : part_of(a, pair);
        // An odd last panel comes twice; the second time nobody looks.
        u32 mine = pair * 2 + lane() % 2;
        front = panel_at(p, mine < panels_of(p) ? mine : pair * 2);
        if constexpr (F::INTEGER) codes = front + GAINS;
        else codes = F::codes(p, front);
    }
    DEVICE Barrier* full(u32 slot) const { return (Barrier*)memory + slot; }
    DEVICE Barrier* empty(u32 slot) const { return (Barrier*)memory + MOST_STAGES + slot; }
    DEVICE u8* at(u32 slot) const { return memory + FRONT + slot * stage_bytes; }
    DEVICE u32 count(u32 stage) const { return steps - stage * size < size ? steps - stage * size : size; }

    DEVICE void weights(u32 stage, u32 slot) const {
        u32 some = count(stage), bytes = code_bytes<F>(some), k = stage * size * F::STEP;
        u32 run = k / F8_RUN, scales = F::Scales::ANY ? ((k + some * F::STEP + F8_RUN - 1) / F8_RUN - run) * 64 : 0;
        if (lane() == 0) {
            barrier_expect(full(slot), 2 * present * (bytes + scales) + Activations<F, TILES>::bytes(n, some));
        }
        if (!codes) return;
        u8* to = at(slot) + lane() * panel_bytes<F>(size);
        copy_bulk(to, codes + (u64)stage * code_bytes<F>(size), bytes, full(slot));
        if (F::Scales::ANY) copy_bulk(to + code_bytes<F>(size), front + run * 64, scales, full(slot));
    }
    DEVICE void activations(u32 stage, u32 slot) const {
        const TensorArgs& a = n.product;
        u8* to = at(slot) + 2 * n.pairs * panel_bytes<F>(size);
        // Of a step, in one limb.
        const u32 BYTES = TILES * (F::INTEGER ? 256 : F::STEP * 16);
        u32 some = count(stage), first = stage * size;
        if (lane() < (F::INTEGER ? 1 : a.limbs))
            copy_bulk(to + lane() * size * BYTES, (const u8*)a.words + ((u64)lane() * steps + first) * BYTES, some * BYTES, full(slot));
        if constexpr (F::INTEGER)
            if (lane() == 1) copy_bulk(to + size * BYTES, a.factors + (u64)first * 8 * TILES, some * TILES * 64, full(slot));
    }
    DEVICE void run() const {
        u32 stages = (steps + size - 1) / size, at_once = stages < n.stages ? stages : n.stages;
        for (u32 s = 0; s < at_once; s++) weights(s, s);
        wait_for_before();
        for (u32 s = 0; s < at_once; s++) activations(s, s);
        for (u32 s = at_once, slot = 0, phase = 0; s < stages; s++) {
            barrier_wait(empty(slot), phase);
            // Phases only alternate: no lane may fall behind by one.
            warp_barrier();
            weights(s, slot);
            activations(s, slot);
            if (++slot == n.stages) slot = 0, phase ^= 1;
        }
    }
};

// A step of a stage: `codes` and the scales behind them, of which those of k's `k` on are the step's.
template <class F, u32 TILES>
DEVICE void meet_step(const Part& p, float (&acc)[TILES][2][4], const u8* codes, const u8* scales, u32 k, const u8* words, u32 size, u32 step, u32 limbs) {
    if constexpr (F::Scales::ANY) {
        float c[TILES][2][4] = {};
#pragma unroll
        for (u32 product = 0; product < F::PRODUCTS; product++) {
            typename F::Raw raw = F::load(InStage{codes + step * F::BYTES + product * (F::BYTES / F::PRODUCTS)});
            u32 w[2][4];
            F::a(p, raw, 0, w[0]);
            F::a(p, raw, 1, w[1]);
            for (u32 limb = limbs; limb-- > 0;) {
                Activations<F, TILES> x;
                x.load(words, size * F::PRODUCTS, step * F::PRODUCTS + product, limb);
#pragma unroll
                for (u32 i = 0; i < 2 * TILES; i++) F::multiply(c[i / 2][i % 2], w[i % 2], x.b[i / 2][0], x.b[i / 2][1]);
            }
        }
        typename F::Scales by;
        by.load(scales, k);
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
#pragma unroll
            for (u32 j = 0; j < 8; j++) acc[i][j / 4][j % 4] = fused(c[i][j / 4][j % 4], by.of(j / 4 * 2 + j % 4 / 2), acc[i][j / 4][j % 4]);
    } else {
        Step<F, F::INTEGER> s;
        if constexpr (F::INTEGER) s.template load<InStage>(codes + step / 2 * F::STRETCH, step % 2);
        else s.template load<InStage>(codes + step * F::BYTES, scales, k);
        for (u32 limb = F::INTEGER ? 1 : limbs; limb-- > 0;) {
            Activations<F, TILES> x;
            x.load(words, size, step, limb);
            Meet<F, TILES, F::INTEGER>::add(p, acc, s, x);
        }
    }
}

// `memory`: barriers, the ring; then the sums of warps in its place.
template <class F, u32 TILES, u32 EACH> DEVICE void multiply_stream(const NarrowArgs& n, u8* memory) {
    const TensorArgs& a = n.product;
    u32 steps = a.part[0].cols / F::STEP, size = EACH * n.ways, warps = n.pairs * n.ways, warp = threadIdx.x / 32;
    u32 weights = 2 * n.pairs * panel_bytes<F>(size), bytes = weights + Activations<F, TILES>::bytes(n, size);
    // Stages begin at multiples of 128 bytes.
    bytes = (bytes + 127) / 128 * 128;
    const Filler<F, TILES> ring(n, memory, steps, size, bytes);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < n.stages; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), warps);
        }
        barriers_ready();
    }
    barrier();
    u32 way = warp % n.ways, pair = blockIdx.x * n.pairs + warp / n.ways;
    let_next_begin();
    if (warp == warps) {
        ring.run();
        barrier();
        barrier();
        return;
    }
    bool any = pair < n.all_pairs;
    if (!any) pair = 0;
    u32 part = pair % 2;
    if (n.gating.on) pair /= 2;
    const Part& p = n.gating.on ? a.part[part] : part_of(a, pair);
    NarrowSums<F, TILES> sums(n, p, part, pair, way, any);
    u32 rows = *a.y.rows, mine = (warp / n.ways * 2 + lane() / 16) * panel_bytes<F>(size);
    wait_for_before();
    float acc[TILES][2][4] = {};
    u32 slot = 0, phase = 0;
    for (u32 first = 0; first < steps; first += size) {
        barrier_wait(ring.full(slot), phase);
        const u8 *codes = ring.at(slot) + mine, *words = ring.at(slot) + weights;
        // From where scales of k's count: those of the stage's first run are the first.
        const u8* scales = codes + code_bytes<F>(size);
        u32 within = F::Scales::ANY ? first * F::STEP % F8_RUN : 0;
        if (any) {
            if (first + size <= steps) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    u32 step = i * n.ways + way;
                    meet_step<F, TILES>(p, acc, codes, scales, within + step * F::STEP, words, size, step, a.limbs);
                }
            } else {
                for (u32 step = way; first + step < steps; step += n.ways)
                    meet_step<F, TILES>(p, acc, codes, scales, within + step * F::STEP, words, size, step, a.limbs);
            }
        }
        warp_barrier();
        if (lane() == 0) barrier_arrive(ring.empty(slot));
        if (++slot == n.stages) slot = 0, phase ^= 1;
    }
    // The ring is done with.
    barrier();
    sums.put((float*)(memory + FRONT), acc);
    barrier();
    sums.store((const float*)(memory + FRONT), rows);
}

// Grid: (groups of pairs); pairs * ways warps, up to 12, and one. Shared: FRONT bytes, then the larger of the ring and of warps * TILES * 1,152 bytes.
#define STREAM(name, TILES, EACH, ...)                          \
    KERNEL_AT(32 * MOST_WARPS + 32, 1, name, NarrowArgs) {      \
        SHARED_BYTES(memory);                                   \
        multiply_stream<__VA_ARGS__, TILES, EACH>(a, memory);   \
    }
// Steps of a warp in a stage for 8, 16 and 32 rows: as `each` in src/ops/linear_plan.rs.
#define STREAMS(name, E1, E2, E4, ...)       \
    STREAM(name##_1, 1, E1, __VA_ARGS__)     \
    STREAM(name##_2, 2, E2, __VA_ARGS__)     \
    STREAM(name##_4, 4, E4, __VA_ARGS__)
STREAMS(stream_bf16, 4, 4, 2, Bf16Fragments)
STREAMS(stream_f16, 4, 4, 2, F16Fragments)
STREAMS(stream_f8, 2, 2, 2, F8Runs)
STREAMS(stream_i8, 4, 4, 4, IntegerFragments<LAYOUT_I8, false, false>)
STREAMS(stream_i8_half, 4, 4, 2, IntegerFragments<LAYOUT_I8, true, false>)
STREAMS(stream_i8_min, 4, 4, 4, IntegerFragments<LAYOUT_I8, false, true>)
STREAMS(stream_i8_half_min, 4, 4, 2, IntegerFragments<LAYOUT_I8, true, true>)
STREAMS(stream_i4, 4, 4, 4, IntegerFragments<LAYOUT_I4, false, false>)
STREAMS(stream_i4_half, 4, 4, 2, IntegerFragments<LAYOUT_I4, true, false>)
STREAMS(stream_i4_min, 4, 4, 4, IntegerFragments<LAYOUT_I4, false, true>)
STREAMS(stream_i4_half_min, 4, 4, 2, IntegerFragments<LAYOUT_I4, true, true>)
STREAMS(stream_table, 4, 4, 4, IntegerFragments<LAYOUT_TABLE, false, false>)
STREAMS(stream_table_half, 4, 4, 2, IntegerFragments<LAYOUT_TABLE, true, false>)
#endif
