// Panels of 16 rows element by element, as src/backend/cpu/pack.rs lays them out: what the simple kernels and look-ups use.
#pragma once
#include "../common/frame.cuh"

static const u32 GAINS = 64, SUPER = 64;
// Elements that share a scale of LAYOUT_F8.
static const u32 F8_RUN = 128;

DEVICE bool is_integer(const Part& p) { return p.kind >= LAYOUT_I8; }
DEVICE u32 panels_of(const Part& p) { return (p.rows + 15) / 16; }
DEVICE const u8* panel_at(const Part& p, u32 panel) { return p.data + p.panel_bytes * panel; }

// Bytes of the codes of 64 elements of 16 rows, and of these with their scales and minimums.
DEVICE u32 super_codes(const Part& p) { return p.kind == LAYOUT_I8 ? SUPER * 16 : SUPER * 8; }
DEVICE u32 super_bytes(const Part& p) { return super_codes(p) + SUPER / p.block * 32 * (1 + p.min); }

DEVICE float gain_of(const u8* panel, u32 lane16) { return ((const float*)panel)[lane16]; }
// Scale of the block that holds element k, and its minimum.
DEVICE float scale_of(const Part& p, const u8* panel, u32 lane16, u32 k) {
    const u16* scales = (const u16*)(panel + GAINS + k / SUPER * super_bytes(p));
    return from_f16(scales[k % SUPER / p.block * 16 + lane16]);
}
DEVICE float min_of(const Part& p, const u8* panel, u32 lane16, u32 k) {
    const u16* scales = (const u16*)(panel + GAINS + k / SUPER * super_bytes(p));
    return from_f16(scales[(SUPER / p.block + k % SUPER / p.block) * 16 + lane16]);
}
// Signed code of element k.
DEVICE i32 code_of(const Part& p, const u8* panel, u32 lane16, u32 k) {
    u32 i = k % SUPER;
    const u8* codes = panel + GAINS + k / SUPER * super_bytes(p) + super_bytes(p) - super_codes(p);
    if (p.kind == LAYOUT_I8) return (i32)codes[i / 4 * 64 + lane16 * 4 + i % 4] - 128;
    i32 nibble = codes[i / 8 * 64 + lane16 * 4 + i % 4] >> (i / 4 % 2 * 4) & 15;
    if (p.kind == LAYOUT_TABLE) return p.table[nibble];
    return p.min ? nibble : nibble - 8;
}
// 8-bit floats: bytes of the scales [k / 128][16] in front of the codes.
DEVICE u32 f8_front(const Part& p) { return (p.cols + F8_RUN - 1) / F8_RUN * 64; }
DEVICE float f8_of(const Part& p, const u8* panel, u32 lane16, u32 k) {
    float scale = ((const float*)panel)[k / F8_RUN * 16 + lane16];
    return times(scale, from_f16((u16)pair_e4m3(panel[f8_front(p) + k / 2 * 32 + lane16 * 2 + k % 2])));
}
// Element k of a row, whatever the layout.
DEVICE float element_of(const Part& p, const u8* panel, u32 lane16, u32 k) {
    switch (p.kind) {
        case LAYOUT_F32: return ((const float*)panel)[k * 16 + lane16];
        case LAYOUT_BF16: return from_bf16(((const u16*)panel)[k / 2 * 32 + lane16 * 2 + k % 2]);
        case LAYOUT_F16: return from_f16(((const u16*)panel)[k * 16 + lane16]);
        case LAYOUT_F8: return f8_of(p, panel, lane16, k);
        default: break;
    }
    float min = p.min ? min_of(p, panel, lane16, k) : 0.0f;
    return gain_of(panel, lane16) * (times(scale_of(p, panel, lane16, k), (float)code_of(p, panel, lane16, k)) - min);
}
