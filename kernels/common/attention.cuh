// What the kernels of attention share: their arguments.
#pragma once
#include "rows.cuh"

struct AttentionArgs {
    View q, y;
    const Batch* batch;
    // [heads] or null.
    const float* sinks;
    // [rows][heads][chunks] pairs of maximum and sum, then [rows][heads][chunks][value_dim]; not used where there is one chunk.
    float* partial;
    Kv kv;
    u32 state, heads;
    // 0 for none.
    u32 window;
    float scale, softcap;
    // Chunks that the grid covers: 1, or what the longest row is cut into.
    u32 chunks;
    // Rows that `partial` has room for.
    u32 partial_rows;
    // 1: all positions of the segment's source are seen; 0: those up to the row's own.
    u32 source;
    // Segments with at least as many rows are those of attention_prompt.cu; the others' rows are taken one by one.
    u32 most_rows;
    // Tiles of keys and values that attention_prompt.cu has on their way, 1 or 2.
    u32 stages;
    // Chunks that positions are cut into at most, and what is not used.
    u32 most_chunks, spare;
};

static const float LOWEST = -1e30f;
