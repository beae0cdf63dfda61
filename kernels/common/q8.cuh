// 8-bit blocks of activations.
#pragma once
#include "frame.cuh"

// Below this a scale would become subnormal: the block is zeros.
static const float Q8_TINY = 1e-30f;

DEVICE i32 warp_sum_half(i32 v) {
    for (u32 m = 8; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}

// A warp's 32 elements, one for each lane, as a block. Every step rounds once, so the codes are those of the CPU.
DEVICE void quantize_block(float x, Q8Block* to) {
    // Without the sign, floats order like their bits, and what is not a number is above infinity.
    u32 most = bits_of(x) & 0x7fffffff;
    for (u32 m = 16; m > 0; m /= 2) {
        u32 other = shuffle_xor(most, m);
        most = most > other ? most : other;
    }
    float peak = float_of(most);
    bool finite = most < 0x7f800000, zero = finite && peak < Q8_TINY;
    float inverse = finite && !zero ? over(127.0f, peak) : 0.0f;
    float scale = zero ? 0.0f : finite ? over(peak, 127.0f) : float_of(0x7fc00000);
    i32 code = finite && !zero ? (i32)round_even(times(x, inverse)) : 0;
    to->codes[lane()] = (i8)code;
    i32 half = warp_sum_half(code), other = shuffle_xor(half, 16u);
    if (lane() % 16 == 0) {
        u32 h = lane() / 16;
        to->half_sum[h] = times(scale, (float)half);
        to->half_offset[h] = -128 * half;
    }
    if (lane() == 0) {
        i32 sum = half + other;
        to->scale = scale;
        to->sum = times(scale, (float)sum);
        to->offset = -128 * sum;
        to->offset_nibble = -8 * sum;
    }
}
