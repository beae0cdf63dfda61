// Records: one row of numbers for each `every` positions of a sequence, in its pages; src/ops/records.rs has the definition.
#pragma once
#include "math.cuh"

struct Records {
    // Index of the key/value state; elements of a record.
    u32 kv, width;
    u32 every;
    // 0: f32, 1: f16.
    u32 half;
};

// A record, or a part of one.
struct Record {
    u8* page;
    u32 at;
};

DEVICE u8* const* pages_of(const Batch& batch, u32 segment, u32 kv) { return batch.pages[(u64)segment * batch.kv_states + kv]; }
DEVICE Record record_of(const Records& r, u8* const* pages, u32 index) {
    u32 position = index * r.every + r.every - 1;
    return {pages[position / PAGE], position % PAGE / r.every * r.width};
}
DEVICE float record_load(const Records& r, const Record& record, u32 d) {
    return r.half ? from_f16(((const u16*)record.page)[record.at + d]) : ((const float*)record.page)[record.at + d];
}
DEVICE void record_store(const Records& r, const Record& record, u32 d, float v) {
    if (r.half) ((u16*)record.page)[record.at + d] = to_f16(v);
    else ((float*)record.page)[record.at + d] = v;
}
