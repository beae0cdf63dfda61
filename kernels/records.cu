// record_write: a record for each row that completes a group of positions; src/ops/records.rs has the definition.
#include "common/records.cuh"

struct RecordWriteArgs {
    View x;
    const Batch* batch;
    Records records;
};

// Grid: (rows, columns / threads).
KERNEL_OF(256, record_write, RecordWriteArgs) {
    begin();
    u32 row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= *a.x.rows || i >= a.records.width) return;
    u32 end = a.batch->positions[row] + 1;
    if (end % a.records.every != 0) return;
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.records.kv);
    record_store(a.records, record_of(a.records, pages, end / a.records.every - 1), i, row_at(a.x, row)[i]);
}
