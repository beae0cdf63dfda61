// head_linear: one matrix for each head; src/ops/head_linear.rs has the definition. Integers meet f32: a head's 8-bit form exists nowhere.
#include "common/routed_panel.cuh"

ROUTED_ALONE(head_linear_f32, PanelF32, FloatRows)
ROUTED_TOGETHER(head_linear_f32_together, PanelF32, FloatRows)
ROUTED_ALONE(head_linear_bf16, PanelBf16, FloatRows)
ROUTED_TOGETHER(head_linear_bf16_together, PanelBf16, FloatRows)
ROUTED_ALONE(head_linear_f16, PanelF16, FloatRows)
ROUTED_TOGETHER(head_linear_f16_together, PanelF16, FloatRows)
ROUTED_ALONE(head_linear_f8, PanelF8, FloatRows)
ROUTED_TOGETHER(head_linear_f8_together, PanelF8, FloatRows)
ROUTED_ALONE(head_linear_i8, PanelI8, FloatRows)
ROUTED_ALONE(head_linear_i4, PanelNibbles<Nibbles>, FloatRows)
ROUTED_ALONE(head_linear_table, PanelNibbles<TableNibbles>, FloatRows)
