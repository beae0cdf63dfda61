// cache_write: keys and values of the batch's rows into the pages of their sequences; src/ops/attention.rs.
#include "common/rows.cuh"

struct CacheWriteArgs {
    View k, v;
    const Batch* batch;
    Kv kv;
    u32 state, spare;
};

// Grid: (rows, key and value columns / (4 threads)).
KERNEL_OF(256, cache_write, CacheWriteArgs) {
    u32 row = blockIdx.x, rows = *a.k.rows;
    begin();
    if (row >= rows) return;
    u32 segment = a.batch->segment_of[row], position = a.batch->positions[row];
    u8* page = a.batch->pages[(u64)segment * a.batch->kv_states + a.state][position / PAGE];
    const float* k = row_at(a.k, row);
    const float* v = row_at(a.v, row);
    u32 keys = a.k.width;
    each_column(keys + a.v.width, [&](u32 i) {
        if (i < keys) kv_store(a.kv, page, key_of(a.kv, i / a.kv.key_dim, position % PAGE, i % a.kv.key_dim), k[i]);
        else kv_store(a.kv, page, value_of(a.kv, (i - keys) / a.kv.value_dim, position % PAGE, (i - keys) % a.kv.value_dim), v[i - keys]);
    });
}
