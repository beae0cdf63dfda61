// ngram_rows: hashes of the last tokens as rows of tables; src/ops/ngram.rs has the definition.
#include "common/records.cuh"

static const u32 NGRAM_TABLES = 32, NGRAM_TOKENS = 16;
struct NgramTable {
    u32 rows, offset, tokens, spare;
};
struct NgramRowsArgs {
    View y;
    const Batch* batch;
    Records history;
    u64 base;
    // 1: by exclusive or; 0: a polynomial.
    u32 exclusive;
    i32 end;
    u32 ends;
    // First column of y that these tables fill.
    u32 start, tables, spare;
    i32 end_of[NGRAM_TOKENS];
    u64 multiplier[NGRAM_TOKENS];
    NgramTable table[NGRAM_TABLES];
};

// Grid: (rows / threads, tables).
KERNEL_OF(64, ngram_rows, NgramRowsArgs) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= *a.y.rows) return;
    NgramTable table = a.table[blockIdx.y];
    u32 position = a.batch->positions[row];
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.history.kv);
    u64 size = table.rows, sum = 0, power = 1 % size;
    bool ended = false;
    for (u32 d = 0; d < table.tokens; d++) {
        i32 token = d <= position ? (i32)record_load(a.history, record_of(a.history, pages, position - d), 0) : a.end;
        if (a.exclusive) {
            if (ended) token = a.end;
            ended = ended || (d > 0 && token == a.end);
            sum ^= (u64)(i64)token * a.multiplier[d];
            continue;
        }
        for (u32 e = 0; e < a.ends && d > 0; e++) ended = ended || token == a.end_of[e];
        if (ended || d > position) break;
        sum = (sum + (u64)(i64)token % size * power) % size;
        power = power * (a.base % size) % size;
    }
    if (a.exclusive) {
        // The remainder of a signed number.
        i64 rest = (i64)sum % (i64)size;
        sum = (u64)(rest < 0 ? rest + (i64)size : rest);
    }
    row_at(a.y, row)[a.start + blockIdx.y] = float_of(table.offset + (u32)sum);
}
