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
    // Chunks that positions are cut into at most.
    u32 most_chunks;
    // First row of the grid, which `partial` begins with.
    u32 first;
    // Tiles that a chunk has at least; 0 where what a row is cut into depends on the grid.
    u32 least_tiles, spare;
};

static const float LOWEST = -1e30f;
// Positions that a row is taken by.
static const u32 TILE = 64;

// What a row sees.
struct Span {
    // First position, last + 1, and where the first tile begins.
    u32 first, end, start;
    // Tiles in all, and of a chunk.
    u32 tiles, per_chunk;
};

DEVICE Span span_of(const AttentionArgs& a, u32 row) {
    Span s;
    u32 position = a.batch->positions[row];
    s.end = a.source ? a.batch->segment[a.batch->segment_of[row]].source : position + 1;
    s.first = a.window && s.end > a.window ? s.end - a.window : 0;
    s.start = s.first / PAGE * PAGE;
    s.tiles = (s.end - s.start + TILE - 1) / TILE;
    s.per_chunk = a.chunks == 1 && !a.least_tiles ? s.tiles : (s.tiles + a.most_chunks - 1) / a.most_chunks;
    if (s.per_chunk < a.least_tiles) s.per_chunk = a.least_tiles;
    return s;
}
// Whether a row of so many chunks is complete without `attention_combine`.
DEVICE bool is_whole(const AttentionArgs& a, u32 chunks) { return a.chunks == 1 || (a.least_tiles && chunks <= 1); }
DEVICE u32 chunks_of(const Span& s) { return s.tiles ? (s.tiles + s.per_chunk - 1) / s.per_chunk : 0; }
