// linear_narrow: y = W x + b for 5 to 32 rows, weights straight from memory into tensor cores. Bound by the read of the weights.
//
// A block takes a few pairs of panels; its warps are `ways` for each pair, which share k step by step, and their sums are added in order. A lane
// keeps AHEAD steps of weights on their way, the first of them before the kernels before have ended, since weights depend on nobody. Activations,
// which all pairs meet, go chunk by chunk through a ring in shared memory: so the cache serves them once a block.
//
// linear_prepare.cu has put them into the order of the tensor cores.
#include "formats/narrow.cuh"

// Chunks of activations in shared memory.
static const u32 RING = 3;

template <class F> DEVICE void load_step(Step<F, false>& s, const Part& p, const u8* panel, u32 step) {
    s.template load<InGlobal>(F::codes(p, panel) + (u64)step * F::BYTES, panel, step * F::STEP);
}
template <class F> DEVICE void load_step(Step<F, true>& s, const Part&, const u8* panel, u32 step) {
    s.template load<InGlobal>(panel + GAINS + (u64)(step / 2) * F::STRETCH, step % 2);
}

// A chunk of activations into the ring: `count` of `size` steps, from `first` of `steps` on.
template <class F, u32 TILES> DEVICE void copy_chunk(const NarrowArgs& n, u8* to, u32 first, u32 count, u32 size, u32 steps) {
    const TensorArgs& a = n.product;
    for (u32 limb = 0; limb < (F::INTEGER ? 1 : a.limbs); limb++) {
        const u8* from = (const u8*)(a.words + ((u64)limb * steps + first) * TILES * 64);
        for (u32 i = threadIdx.x; i < count * TILES * 16; i += blockDim.x) copy16(to + limb * size * TILES * 256 + i * 16, from + i * 16);
    }
    if constexpr (F::INTEGER) {
        const u8* from = (const u8*)(a.factors + (u64)first * 8 * TILES);
        for (u32 i = threadIdx.x; i < count * TILES * 4; i += blockDim.x) copy16(to + size * TILES * 256 + i * 16, from + i * 16);
    }
}

// `memory`: the ring, then the sums of warps.
template <class F, u32 TILES, u32 AHEAD> DEVICE void multiply_narrow(const NarrowArgs& n, u8* memory) {
    typedef Activations<F, TILES> X;
    // A chunk is half of what is on its way.
    const u32 PARTS = AHEAD % 2 ? 1 : 2, EACH = AHEAD / PARTS;
    const TensorArgs& a = n.product;
    u32 steps = a.part[0].cols / F::STEP, size = EACH * n.ways, chunks = (steps + size - 1) / size;
    u32 warp = threadIdx.x / 32, way = warp % n.ways, pair = blockIdx.x * n.pairs + warp / n.ways;
    // A warp without a pair only carries activations.
    bool any = pair < n.all_pairs;
    if (!any) pair = 0;
    u32 part = pair % 2;
    if (n.gating.on) pair /= 2;
    const Part& p = n.gating.on ? a.part[part] : part_of(a, pair);
    // An odd last panel is met twice; the second time nobody looks.
    u32 mine = pair * 2 + lane() / 16;
    const u8* panel = panel_at(p, mine < panels_of(p) ? mine : pair * 2);
    Step<F, F::INTEGER> ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (any && i * n.ways + way < steps) load_step(ahead[i], p, panel, i * n.ways + way);
    NarrowSums<F, TILES> sums(n, p, part, pair, way, any);
    u32 rows = *a.y.rows;
    begin();

    u32 bytes = X::bytes(n, size);
#pragma unroll
    for (u32 c = 0; c < RING - 1; c++) {
        u32 from = c * size;
        if (from < steps) copy_chunk<F, TILES>(n, memory + c * bytes, from, steps - from < size ? steps - from : size, size, steps);
        copies_commit();
    }
    float acc[TILES][2][4] = {};
    u8 *here = memory, *free = memory + (RING - 1) * bytes;
    for (u32 c = 0; c < chunks;) {
#pragma unroll
        for (u32 part = 0; part < PARTS; part++, c++) {
            if (c >= chunks) break;
            copies_wait<RING - 2>();
            // Everybody's copies are there, and everybody has left the chunk before this one.
            barrier();
            u32 from = c * size, later = from + (RING - 1) * size;
            if (later < steps) copy_chunk<F, TILES>(n, free, later, steps - later < size ? steps - later : size, size, steps);
            copies_commit();
            const u8* chunk = here;
            free = here;
            here = here + bytes == memory + RING * bytes ? memory : here + bytes;
            if (!any) continue;
            // As long as all of this chunk and of those on their way is there.
            if (from + (PARTS + 1) * size <= steps) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    X x;
                    for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                        x.load(chunk, size, i * n.ways + way, limb);
                        Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[part * EACH + i], x);
                    }
                    load_step(ahead[part * EACH + i], p, panel, from + PARTS * size + i * n.ways + way);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    u32 now = from + i * n.ways + way;
                    X x;
                    if (now < steps) {
                        for (u32 limb = F::INTEGER ? 1 : a.limbs; limb-- > 0;) {
                            x.load(chunk, size, i * n.ways + way, limb);
                            Meet<F, TILES, F::INTEGER>::add(p, acc, ahead[part * EACH + i], x);
                        }
                    }
                    if (now + PARTS * size < steps) load_step(ahead[part * EACH + i], p, panel, now + PARTS * size);
                }
            }
        }
    }

    // The ring is done with.
    barrier();
    sums.put((float*)memory, acc);
    barrier();
    sums.store((const float*)memory, rows);
}

// Grid: (groups of pairs); pairs * ways warps, up to 12. Shared: the larger of the ring, RING chunks of half as many steps as are on their way, and
// warps * TILES * 1,152 bytes.
#define NARROW(name, TILES, AHEAD, ...)                            \
    KERNEL_OF(384, name, NarrowArgs) {                                     \
        SHARED_BYTES(memory);                                              \
        multiply_narrow<__VA_ARGS__, TILES, AHEAD>(a, memory);     \
    }
// Steps on their way for 8, 16 and 32 rows: as `ahead` in src/ops/linear_plan.rs.
#define NARROWS(name, A1, A2, A4, ...)     \
    NARROW(name##_1, 1, A1, __VA_ARGS__)   \
    NARROW(name##_2, 2, A2, __VA_ARGS__)    \
    NARROW(name##_4, 4, A4, __VA_ARGS__)
NARROWS(narrow_bf16, 8, 8, 8, Bf16Fragments)
NARROWS(narrow_f16, 6, 6, 6, F16Fragments)
NARROWS(narrow_f8, 12, 8, 8, F8Fragments)
NARROWS(narrow_i8, 6, 4, 3, IntegerFragments<LAYOUT_I8, false, false>)
NARROWS(narrow_i8_half, 4, 3, 3, IntegerFragments<LAYOUT_I8, true, false>)
NARROWS(narrow_i8_min, 6, 4, 3, IntegerFragments<LAYOUT_I8, false, true>)
NARROWS(narrow_i8_half_min, 4, 3, 3, IntegerFragments<LAYOUT_I8, true, true>)
NARROWS(narrow_i4, 8, 6, 3, IntegerFragments<LAYOUT_I4, false, false>)
NARROWS(narrow_i4_half, 4, 3, 3, IntegerFragments<LAYOUT_I4, true, false>)
NARROWS(narrow_i4_min, 8, 6, 3, IntegerFragments<LAYOUT_I4, false, true>)
NARROWS(narrow_i4_half_min, 4, 3, 3, IntegerFragments<LAYOUT_I4, true, true>)
NARROWS(narrow_table, 8, 6, 3, IntegerFragments<LAYOUT_TABLE, false, false>)
NARROWS(narrow_table_half, 4, 3, 3, IntegerFragments<LAYOUT_TABLE, true, false>)
