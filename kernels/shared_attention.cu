// shared_attention: all heads meet one row a position, whose first elements are the value; src/ops/shared_attention.rs has the definition.
#include "common/attend_rows.cuh"

struct SharedAttentionArgs {
    View q, y;
    // Positions, and indices of pooled rows; not connected where all that may be seen are.
    View selection, pooled_selection;
    const Batch* batch;
    // Null for none.
    const float* sinks;
    Records records, pooled;
    Splits splits;
    u32 heads;
    // 0 for all.
    u32 window;
    u32 has_pooled;
    float scale;
};

// Grid: (rows, head groups / warps, splits); a warp has H heads and its split's rows: positions in order, then pooled rows.
// Widths of at most 32 QC, values of at most 32 VC.
template <u32 H, u32 QC> DEVICE void shared_attention_of(const SharedAttentionArgs& a) {
    u32 row = a.splits.first + blockIdx.x, first = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * H, width = a.records.width;
    if (row >= *a.y.rows || first >= a.heads) return;
    u32 heads = least(H, a.heads - first), position = a.batch->positions[row], segment = a.batch->segment_of[row];
    Heads<H, QC, QC> s;
    heads_begin(s, row_at(a.q, row) + (u64)first * width, heads, width, a.sinks && blockIdx.z == 0 ? a.sinks + first : nullptr);
    // Items: positions, or entries of the selection; then pooled rows, or entries of theirs.
    u32 start = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    u32 near = a.selection.data ? a.selection.width : position + 1 - start;
    u32 visible = a.has_pooled ? (position + 1) / a.pooled.every : 0;
    u32 far = a.pooled_selection.data ? a.pooled_selection.width : visible;
    u32 begin, end;
    split_of(near + far, a.splits.splits, blockIdx.z, begin, end);
    u8* const* pages = pages_of(*a.batch, segment, a.records.kv);
    u8* const* far_pages = a.has_pooled ? pages_of(*a.batch, segment, a.pooled.kv) : nullptr;
    for (u32 i = begin; i < end; i++) {
        float k[QC];
        if (i < near) {
            u32 p = start + i;
            if (a.selection.data) {
                float chosen = row_at(a.selection, row)[i];
                if (!(chosen >= 0.0f) || chosen > (float)position) continue;
                p = (u32)chosen;
            }
            load_row(a.records, record_of(a.records, pages, p), 0, width, k);
        } else {
            u32 j = i - near;
            if (a.pooled_selection.data) {
                float chosen = row_at(a.pooled_selection, row)[j];
                if (!(chosen >= 0.0f) || chosen >= (float)visible) continue;
                j = (u32)chosen;
            }
            load_row(a.pooled, record_of(a.pooled, far_pages, j), 0, width, k);
        }
        heads_meet(s, k, k, a.scale);
    }
    heads_end(s, a.splits, row_at(a.y, row), row, first, heads, a.heads, blockIdx.z);
}

KERNEL_OF(256, shared_attention_128, SharedAttentionArgs) {
    begin();
    shared_attention_of<4, 4>(a);
}
KERNEL_OF(256, shared_attention_512, SharedAttentionArgs) {
    begin();
    shared_attention_of<4, 16>(a);
}
KERNEL_OF(256, shared_attention_576, SharedAttentionArgs) {
    begin();
    shared_attention_of<4, 18>(a);
}
KERNEL_OF(256, shared_attention_1024, SharedAttentionArgs) {
    begin();
    shared_attention_of<2, 32>(a);
}

// Grid: (rows, heads).
KERNEL_OF(128, shared_attention_merge, AttendMergeArgs) {
    begin();
    attend_merge_of(a);
}
