// selected_attention: grouped-query attention over the positions of a selection; src/ops/selected_attention.rs has the definition.
#include "common/attend_rows.cuh"

struct SelectedAttentionArgs {
    View q, y, selection;
    const Batch* batch;
    // [keys of all heads | values of all heads].
    Records records;
    Splits splits;
    u32 heads, kv_heads, key_dim;
    float scale;
};

// Grid: (rows, key/value heads * head groups / warps, splits); a warp has up to H query heads of one key/value head.
template <u32 H, u32 C> DEVICE void selected_attention_of(const SelectedAttentionArgs& a) {
    u32 group = a.heads / a.kv_heads, per = over_up(group, H), item = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    u32 row = a.splits.first + blockIdx.x, kv_head = item / per, within = item % per * H, dim = a.splits.value_dim;
    if (row >= *a.y.rows || kv_head >= a.kv_heads) return;
    u32 first = kv_head * group + within, heads = least(H, group - within), position = a.batch->positions[row];
    Heads<H, C, C> s;
    heads_begin(s, row_at(a.q, row) + (u64)first * a.key_dim, heads, a.key_dim, nullptr);
    u8* const* pages = pages_of(*a.batch, a.batch->segment_of[row], a.records.kv);
    u32 begin, end;
    split_of(a.selection.width, a.splits.splits, blockIdx.z, begin, end);
    for (u32 i = begin; i < end; i++) {
        float chosen = row_at(a.selection, row)[i];
        if (!(chosen >= 0.0f) || chosen > (float)position) continue;
        Record record = record_of(a.records, pages, (u32)chosen);
        float k[C], v[C];
        load_row(a.records, record, kv_head * a.key_dim, a.key_dim, k);
        load_row(a.records, record, a.kv_heads * a.key_dim + kv_head * dim, dim, v);
        heads_meet(s, k, v, a.scale);
    }
    heads_end(s, a.splits, row_at(a.y, row), row, first, heads, a.heads, blockIdx.z);
}

// Keys and values of up to 128, 256 and 512 elements.
KERNEL_OF(256, selected_attention_128, SelectedAttentionArgs) {
    begin();
    selected_attention_of<4, 4>(a);
}
KERNEL_OF(256, selected_attention_256, SelectedAttentionArgs) {
    begin();
    selected_attention_of<4, 8>(a);
}
KERNEL_OF(256, selected_attention_512, SelectedAttentionArgs) {
    begin();
    selected_attention_of<2, 16>(a);
}

// Grid: (rows, heads).
KERNEL_OF(128, selected_attention_merge, AttendMergeArgs) {
    begin();
    attend_merge_of(a);
}
