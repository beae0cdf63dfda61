// batch: what is new in the batch since the last run, from the host's memory to the device's; src/ops/batch_image.rs.
#include "common/rows.cuh"

struct BatchArgs {
    // In the host's memory, 16 bytes each: how many words are new and three that are not used; then twice a place, in words from the start of the
    // batch, and the word.
    const Words4* news;
    u32* to;
};

// Grid: (1). Bound by the way to the host's memory and back: the first warp reads ahead of the number, which is all there is in a small step.
KERNEL_OF(256, batch, BatchArgs) {
    SHARED u32 shared;
    wait_for_before();
    u32 first = threadIdx.x;
    Words4 w = {};
    if (first < 32) w = load_now(a.news + first);
    if (first == 0) shared = w.x;
    barrier();
    u32 count = shared;
    for (u32 i = first; i <= (count + 1) / 2; i += blockDim.x) {
        if (i >= 32) w = load_now(a.news + i);
        if (i == 0) continue;
        a.to[w.x] = w.y;
        if (2 * i <= count) a.to[w.z] = w.w;
    }
}
