// What the kernels for segments of many rows share: a block's queries, what they see, and how they become halves.
#pragma once
#include "attention.cuh"

// The rows of a block, and the positions that they see.
struct PromptRows {
    Segment segment;
    const u8* const* pages;
    // In the segment; how many; query heads that share keys, which are neighbouring queries of a row.
    u32 first, count, group;
    // Positions that exist; the first page that is seen, and the position behind the last that is.
    u32 written, first_page, end;
};

// The tile of `queries` queries with this number among those of long segments; false where there are no more.
DEVICE bool prompt_rows(const AttentionArgs& a, u32 queries, u32 tile, PromptRows& r) {
    r.group = a.heads / a.kv.heads;
    u32 rows = queries / r.group, segment = 0;
    for (; segment < a.batch->segments; segment++) {
        u32 count = a.batch->segment[segment].count;
        if (count < a.most_rows) continue;
        u32 tiles = (count + rows - 1) / rows;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (segment == a.batch->segments) return false;
    const Segment s = r.segment = a.batch->segment[segment];
    r.pages = (const u8* const*)a.batch->pages[(u64)segment * a.batch->kv_states + a.state];
    r.first = tile * rows;
    r.count = s.count - r.first < rows ? s.count - r.first : rows;
    r.written = a.source ? s.source : s.position + s.count;
    r.end = a.source ? s.source : s.position + r.first + r.count;
    u32 seen_first = s.position + r.first + 1;
    r.first_page = a.source || !a.window || seen_first <= a.window ? 0 : (seen_first - a.window) / PAGE;
    return true;
}

// What row `row` of the block sees: positions from `low` to before `high`.
DEVICE void seen_by(const AttentionArgs& a, const PromptRows& r, u32 row, u32& low, u32& high) {
    high = row >= r.count ? 0 : a.source ? r.segment.source : r.segment.position + r.first + row + 1;
    low = a.window && high > a.window ? high - a.window : 0;
}

// The power of two that brings elements of at most this magnitude to where f16 holds them.
DEVICE float half_power(float most) {
    u32 exponent = bits_of(most) >> 23;
    return exponent == 0 || exponent == 255 ? 1.0f : float_of((exponent > 10 ? exponent - 9 : 1) << 23);
}
