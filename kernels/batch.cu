// batch: what changed in the batch since the last run, from the host's memory to the device's; src/ops/batch_image.rs.
#include "common/rows.cuh"

// Words from the start of the batch.
struct Change {
    u32 at, words;
};

struct BatchArgs {
    // In the host's memory: how many changes (`at` of the first one), then these; and the batch.
    const Change* changes;
    const u32* from;
    u32* to;
};

// Grid: (16); a warp takes every 128th change. Bound by the way to the host's memory and back, twice.
KERNEL_OF(256, batch, BatchArgs) {
    wait_for_before();
    const volatile Change* changes = (const volatile Change*)a.changes;
    const volatile u32* from = a.from;
    u32 step = gridDim.x * (blockDim.x / 32);
    u32 count = changes[0].at;
    for (u32 i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < count; i += step) {
        u32 at = changes[1 + i].at, words = changes[1 + i].words;
        for (u32 w = lane(); w < words; w += 32) a.to[at + w] = from[at + w];
    }
}
