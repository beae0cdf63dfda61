// What compute capability 9.0 has beside the rest: barriers in shared memory that count bytes, bulk copies, products of groups of four warps.
// Where SM90 is 0 nothing here may be called (tests/cuda/shim.hpp has the twins).
#pragma once
#include "frame.cuh"
#ifndef METRALE_HOST
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SM90 1

// Counts arrivals and bytes; its phases alternate.
struct Barrier {
    u64 word;
};
DEVICE void barrier_init(Barrier* b, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// What was initialised is seen by copies.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and lets the phase wait for so many bytes.
DEVICE void barrier_expect(Barrier* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(Barrier* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory"); }
// Until the phase (0 or 1) is over.
DEVICE void barrier_wait(Barrier* b, u32 phase) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(shared_address(b)), "r"(phase) : "memory");
    } while (!done);
}
// Bytes from global to shared memory, a multiple of 16; the barrier counts them.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, Barrier* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}

// Registers of a thread, for all warps of a group: fewer, or more where others gave theirs up.
template <int N> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Products of groups: begin, queue some, commit; `group_wait<N>` until all but the last N commits are done. Until then neither results nor
// operands in registers may be touched.
DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Operand B of a product, [128 x 16] of 16-bit elements in shared memory. Chunks of sixteen bytes are swapped as each form tells; `first` and
// `second` are the bytes between its larger pieces.
struct Operand {
    u64 word;
};
DEVICE Operand operand(const u8* at, u32 first, u32 second, u64 swizzle) {
    return {(u64)((shared_address(at) & 0x3ffff) >> 4) | (u64)(first / 16) << 16 | (u64)(second / 16) << 32 | swizzle << 62};
}
// Step `step` of rows of 64 elements, [128][64]: eight rows after eight rows, chunks swapped by the row's number modulo eight.
DEVICE Operand operand_of_rows(const u8* tile, u32 step) { return operand(tile + step * 32, 16, 1024, 1); }
// Step `step` of columns of 128 elements, [128 / 16][depth][16]: chunks swapped in the second four of eight.
DEVICE Operand operand_by_16(const u8* tile, u32 step, u32 depth) { return operand(tile + step * 512, depth * 32, 256, 3); }
// Step `step` of columns of 128 elements, [128 / 64][depth][64]: chunks swapped by the column's number modulo eight.
DEVICE Operand operand_by_64(const u8* tile, u32 step, u32 depth) { return operand(tile + step * 2048, depth * 128, 1024, 1); }

#define RESULTS_OF_64                                                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "   \
    "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "    \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define FOUR_OF(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN_OF(i) FOUR_OF(i), FOUR_OF(i + 4), FOUR_OF(i + 8), FOUR_OF(i + 12)
// d[64 x 128] (+)= a[64 x 16] b[16 x 128], f32 sums, added to d with `more`: a warp has 16 of a's rows, as mma_bf16 takes them, and those of the
// result, a tile of eight columns after the other as mma_bf16 gives them. `across`: b is one of columns.
#define GROUP_PRODUCT(name, type, across)                                                                                                   \
    DEVICE void name(float (&d)[64], const u32 (&a)[4], Operand b, bool more) {                                                             \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " RESULTS_OF_64    \
                     ", {%64, %65, %66, %67}, %68, p, 1, 1, " across ";}"                                                                   \
                     : SIXTEEN_OF(0), SIXTEEN_OF(16), SIXTEEN_OF(32), SIXTEEN_OF(48)                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word), "r"((u32)more));                                            \
    }
// Behind a wait: results are those of the products, and no use of them is moved before it.
DEVICE void group_results(float (&d)[64]) { asm volatile("" : SIXTEEN_OF(0), SIXTEEN_OF(16), SIXTEEN_OF(32), SIXTEEN_OF(48)::"memory"); }
GROUP_PRODUCT(group_bf16, "bf16", "0")
GROUP_PRODUCT(group_f16, "f16", "0")
GROUP_PRODUCT(group_f16_across, "f16", "1")
// What copies and stores have written to shared memory is seen by products of groups.
DEVICE void shared_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
#define SM90 0
#endif
#endif
