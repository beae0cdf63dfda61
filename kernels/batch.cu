// batch: what is new in the batch since the last run; src/ops/batch_image.rs.
#include "common/rows.cuh"

struct BatchArgs {
    // 16 bytes each: how many words are new and three that are not used; then twice a place, in words from the start of the batch, and the word.
    const Words4* news;
    u32* to;
};

// Grid: (1). Latency.
KERNEL_OF(256, batch, BatchArgs) {
    wait_for_before();
    u32 count = a.news[0].x;
    for (u32 i = 1 + threadIdx.x; i <= (count + 1) / 2; i += blockDim.x) {
        Words4 w = a.news[i];
        a.to[w.x] = w.y;
        if (2 * i <= count) a.to[w.z] = w.w;
    }
}
