// expert_linear: products with matrices that are picked by row and slot; src/ops/expert_linear.rs and src/ops/head_linear.rs have the definitions.
#include "common/routed_panel.cuh"

ROUTED_ALONE(expert_linear_f32, PanelF32, FloatRows)
ROUTED_TOGETHER(expert_linear_f32_together, PanelF32, FloatRows)
ROUTED_ALONE(expert_linear_bf16, PanelBf16, FloatRows)
ROUTED_TOGETHER(expert_linear_bf16_together, PanelBf16, FloatRows)
ROUTED_ALONE(expert_linear_f16, PanelF16, FloatRows)
ROUTED_TOGETHER(expert_linear_f16_together, PanelF16, FloatRows)
ROUTED_ALONE(expert_linear_f8, PanelF8, FloatRows)
ROUTED_TOGETHER(expert_linear_f8_together, PanelF8, FloatRows)
ROUTED_ALONE(expert_linear_i8, PanelI8, Q8Rows)
ROUTED_TOGETHER(expert_linear_i8_together, PanelI8, Q8Rows)
ROUTED_ALONE(expert_linear_i4, PanelNibbles<Nibbles>, Q8Rows)
ROUTED_TOGETHER(expert_linear_i4_together, PanelNibbles<Nibbles>, Q8Rows)
ROUTED_ALONE(expert_linear_table, PanelNibbles<TableNibbles>, Q8Rows)
ROUTED_TOGETHER(expert_linear_table_together, PanelNibbles<TableNibbles>, Q8Rows)

struct ExpertSortArgs {
    View route;
    // [experts + 2] starts, then the pairs; see RoutedArgs.
    u32* sorted;
    u32 slots, experts;
};

// Pairs (row, slot) by expert, ascending within; those without an expert come last.
// Grid: (experts + 1): a block counts what goes before its expert and then gathers its own, eight pairs to a thread.
KERNEL_OF(256, expert_sort, ExpertSortArgs) {
    begin();
    SHARED u32 scratch[33];
    u32 expert = blockIdx.x, pairs = *a.route.rows * a.slots, lower = 0, at;
    for (u32 p = threadIdx.x; p < pairs; p += blockDim.x) lower += least((u32)row_at(a.route, p / a.slots)[p % a.slots], a.experts) < expert;
    block_before(lower, scratch, at);
    if (threadIdx.x == 0) a.sorted[expert] = at;
    u32* order = a.sorted + a.experts + 2;
    for (u32 start = 0; start < pairs; start += blockDim.x * 8) {
        u32 first = start + threadIdx.x * 8, mine = 0, total;
        for (u32 i = 0; i < 8; i++) {
            u32 p = first + i;
            if (p < pairs && least((u32)row_at(a.route, p / a.slots)[p % a.slots], a.experts) == expert) mine |= 1u << i;
        }
        u32 count = 0;
        for (u32 i = 0; i < 8; i++) count += mine >> i & 1;
        u32 to = at + block_before(count, scratch, total);
        for (u32 i = 0; i < 8; i++) {
            if (mine >> i & 1) order[to++] = first + i;
        }
        at += total;
    }
    if (expert == a.experts && threadIdx.x == 0) a.sorted[expert + 1] = at;
}
