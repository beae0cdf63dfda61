// The highest of many numbers, found by their bits from the top.
#pragma once
#include "math.cuh"

// What orders as unsigned like the numbers themselves, zeros alike and never 0; NaN with what is lowest.
DEVICE u32 ordered(float v) {
    u32 bits = bits_of(v + 0.0f);
    if (is_nan(v)) return 0x007fffff;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Shared memory of `select_best`.
struct Selection {
    u32 count[256], scratch[33], found[2];
};

// Calls `put(rank, i)` for the `most` highest of `n` keys, the first of several alike, ranks by i. Keys of 0 are never taken. How many there are.
// By whole blocks of 256 threads.
template <class Key, class Put> DEVICE u32 select_best(u32 n, u32 most, Selection& s, Key key, Put put) {
    u32 valid = 0, total;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) valid += key(i) != 0;
    block_before(valid, s.scratch, valid);
    // All above `limit` are taken, and the first `equal` of those that are the same.
    u32 limit = 0, equal = 0;
    if (valid > most) {
        u32 wanted = most, mask = 0;
        for (u32 shift = 32; shift > 0; shift -= 8) {
            s.count[threadIdx.x] = 0;
            barrier();
            for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
                u32 v = key(i);
                if (v && (v & mask) == limit) atomic_add(&s.count[v >> (shift - 8) & 255], 1);
            }
            barrier();
            // Highest first.
            u32 bucket = 255 - threadIdx.x, here = s.count[bucket];
            u32 higher = block_before(here, s.scratch, total);
            if (higher < wanted && wanted <= higher + here) s.found[0] = bucket, s.found[1] = wanted - higher;
            barrier();
            limit |= s.found[0] << (shift - 8), mask |= 255u << (shift - 8), wanted = s.found[1];
        }
        equal = wanted;
    }
    u32 kept = 0, same = 0;
    for (u32 start = 0; start < n; start += blockDim.x * 4) {
        u32 first = start + threadIdx.x * 4, sum = 0;
        u32 v[4];
        // Counts of both kinds in halves of a word.
        for (u32 i = 0; i < 4; i++) {
            v[i] = first + i < n ? key(first + i) : 0;
            sum += v[i] > limit ? 1 : v[i] && v[i] == limit ? 1u << 16 : 0;
        }
        u32 before = block_before(sum, s.scratch, total);
        u32 above = kept + (before & 0xffff), alike = same + (before >> 16);
        for (u32 i = 0; i < 4; i++) {
            bool tie = v[i] && v[i] == limit;
            if (v[i] > limit || (tie && alike < equal)) put(above + least(alike, equal), first + i);
            above += v[i] > limit, alike += tie;
        }
        kept += total & 0xffff, same += total >> 16;
    }
    return kept + least(same, equal);
}
