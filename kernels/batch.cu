// batch: what is new in the batch since the last run, or the batch of the step that follows; src/ops/batch_image.rs.
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

struct AdvanceArgs {
    // One row a segment. Its arrays are written here, between two steps, and nowhere else on the device.
    Batch* batch;
    // By segment: the token that the step before has found.
    const i32* found;
    // By segment: where the state after the next step goes; that one's is where the state before the last step was.
    const float** next;
    // Which of two places what is found goes to.
    u32* turn;
};

// The batch of the step after the one it holds: each sequence's next position, with the token found for it. Grid: (1). Latency.
KERNEL_OF(256, advance, AdvanceArgs) {
    wait_for_before();
    Batch b = *a.batch;
    // Rows up to a graph's width are no segments, and stay what they are.
    for (u32 i = threadIdx.x; i < b.segments; i += blockDim.x) {
        ((i32*)b.tokens)[i] = a.found[i];
        ((u32*)b.positions)[i]++;
        ((Segment*)b.segment)[i].position++;
        const float* before = b.state_read[i];
        ((const float**)b.state_read)[i] = b.state_write[i];
        ((float**)b.state_write)[i] = (float*)a.next[i];
        a.next[i] = before;
    }
    if (threadIdx.x == 0) *a.turn ^= 1;
}
