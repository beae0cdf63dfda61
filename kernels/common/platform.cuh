// What a kernel may use: fixed-size types and the few intrinsics that we name ourselves. No header of a toolkit is needed, so the same text
// goes through NVRTC, nvcc and, with METRALE_HOST, the host compiler (tests/cuda/shim.hpp has the twins of everything below).
#pragma once
#ifdef METRALE_HOST
#include "shim.hpp"
#else

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
// A kernel takes one struct by value: the same fields as its Rust twin. Its name for the driver is `metrale_` and its own, since some of those
// (norm, round) are the compiler's functions.
#define KERNEL(name, Args) extern "C" __global__ void metrale_##name(const __grid_constant__ Args a)
// As KERNEL, for blocks of at most `threads`.
#define KERNEL_OF(threads, name, Args) extern "C" __global__ void __launch_bounds__(threads) metrale_##name(const __grid_constant__ Args a)
// As KERNEL_OF, with few enough registers that a processor has `blocks` blocks at a time.
#define KERNEL_AT(threads, blocks, name, Args) extern "C" __global__ void __launch_bounds__(threads, blocks) metrale_##name(const __grid_constant__ Args a)
#define SHARED __shared__
// Dynamic shared memory of a launch, 128-byte aligned.
#define SHARED_BYTES(name) extern __shared__ __align__(128) u8 name[]

struct __align__(16) Words4 { u32 x, y, z, w; };
struct __align__(8) Words2 { u32 x, y; };

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 x) { return __uint_as_float(x); }
DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE u32 lane() { return threadIdx.x & 31; }
template <class T> DEVICE T shuffle(T v, u32 from) { return __shfl_sync(~0u, v, from); }
template <class T> DEVICE T shuffle_xor(T v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }

// 16 bits as the two 16-bit floats.
DEVICE float from_bf16(u16 b) { return __uint_as_float((u32)b << 16); }
DEVICE u16 to_bf16(float f) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }
DEVICE float from_f16(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 to_f16(float f) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }
// Two 8-bit floats (E4M3, the first in the low byte) as a pair of half floats. There is no NaN among weights: scales tell of it.
DEVICE u32 pair_e4m3(u32 two) {
    u32 r;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)two));
#else
    // As half floats they have the same fields, eight powers of two lower.
    u32 high = __byte_perm(two, 0, 0x1404);
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"((high & 0x80008000u) | (high & 0x7f007f00u) >> 1), "r"(0x5c005c00u));
#endif
    return r;
}
// Two floats as a pair, the first in the low half.
DEVICE u32 pair_bf16(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE u32 pair_f16(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
// Two f16 at once, each rounded once: a - b, a b, a b + c.
DEVICE u32 less_f16(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 times_f16(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 fused_f16(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }

// Arithmetic that must round once, and that the compiler must not join.
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float x) { return __fsqrt_rn(x); }
DEVICE float exponential(float x) { return expf(x); }
// 2^x to about two units in the last place; results below 2^-126 are 0.
DEVICE float power_of_two(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// 1 / x to about one unit in the last place.
DEVICE float reciprocal(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float round_even(float x) { return rintf(x); }
DEVICE float largest(float a, float b) { return fmaxf(a, b); }
DEVICE float smallest(float a, float b) { return fminf(a, b); }
DEVICE float magnitude(float a) { return fabsf(a); }

// Four 8-bit products added to `c`: unsigned weights, signed activations; and both signed.
DEVICE i32 dot4_us(u32 a, u32 b, i32 c) { i32 r; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEVICE i32 dot4_ss(u32 a, u32 b, i32 c) { i32 r; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
// Bytes of {a, b} by the selector's nibbles.
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// 16, 8 or 4 bytes that are read once: not kept in the first cache.
DEVICE Words4 load_once(const void* p) {
    Words4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
DEVICE Words2 load8_once(const void* p) {
    Words2 r;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    return r;
}
DEVICE u32 load4_once(const void* p) {
    u32 r;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}
// The same of what kernels write.
DEVICE Words4 load_passing(const void* p) {
    Words4 r;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
DEVICE Words4 load16(const void* p) { return *(const Words4*)p; }
// Asks for the line at `p` to be brought into the second cache; nothing is read, so it may be one that is being written.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE Words2 load8(const void* p) { return *(const Words2*)p; }

// Asynchronous copies of 16 bytes from global to shared memory, in groups.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void copy16(void* shared, const void* global) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)); }
// As copy16 of the first `bytes` (0 to 16); the rest is zeros.
DEVICE void copy16_some(void* shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// Four 8x8 matrices of 16-bit elements from shared memory; lane `i` gives the address of row `i % 8` of matrix `i / 8`.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// c[16 x 8] += a[16 x 16] b[16 x 8], f32 sums. With g = lane / 4 and t = lane % 4: a holds rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 8,
// 2t + 8 (pairs); b holds k = 2t, 2t + 8 (pairs) of column g; c holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c[16 x 8] += a[16 x 32] b[32 x 8] in integers, a unsigned and b signed bytes: as above with four k's in a word (k = 4t and 4t + 16).
DEVICE void mma_u8s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_s8s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same from sums that are all `start`, by signed bytes.
DEVICE void mma_s8s8_from(i32 start, i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
}

// Programmatic dependent launch: wait until the kernels before have written; let the next one begin.
DEVICE void wait_for_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE void fence() { __threadfence(); }
#endif
