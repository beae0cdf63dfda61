// Kernels on the host: each thread of a block is a fibre, and everything of kernels/common/platform.cuh has a twin here.
//
// Blocks run one after the other on one thread of the system. Memory that a kernel must write before it reads is poisoned: shared memory for
// each block, values of lanes that are absent. Copies marked asynchronous happen when they are waited for, no sooner. With a seed
// (METRALE_SHIM_SEED) warps run in random order, which shows missing barriers. Fibres that wait for each other without end, and lanes that meet in
// different operations of a warp, are reported.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef unsigned long long u64;
typedef long long i64;

namespace shim {

struct Dim {
    u32 x, y, z;
};

// What a warp's lanes meet in.
enum Meeting : u32 { NONE, BLOCK, WARP, SHUFFLE, SHUFFLE_XOR, MATRICES, MMA, PHASE };

// The fibre that runs, as kernels see it.
struct Here {
    Dim thread, block, threads, blocks;
    u8* dynamic;
    // Of its warp: 64 bytes for each lane.
    u8* exchange;
    u32 lane;
};
extern Here here;

// Waits until the others have come (`BLOCK`: of the block; else: of the warp), and says what for.
void meet(Meeting what);
void copy_later(void* to, const void* from, u32 bytes);
void commit_copies();
void wait_copies(u32 left);

// A barrier that counts arrivals and bytes: its bulk copies happen when somebody waits for it, no sooner.
struct Barrier {
    u32 arrivals, left, bytes, phase;
    void count(u32 arrived, u32 more) {
        left -= arrived, bytes += more;
        if (left == 0 && bytes == 0) left = arrivals, phase ^= 1;
    }
};
void bulk_later(void* to, const void* from, u32 bytes, Barrier* barrier);
// Until the barrier's phase is over.
void wait_phase(Barrier* barrier, u32 phase);
// Results of products on their way to `d`, where there is nothing before they are waited for.
float* pending_results(float (&d)[64]);
void commit_products();
void wait_products(u32 left);

struct Kernel {
    const char* file;
    const char* name;
    u32 args, threads;
    void (*run)(const void* args);
    u8 *shared, *shared_end;
    Kernel* next;
};
extern Kernel* kernels;
struct Register {
    explicit Register(Kernel* kernel) { kernel->next = kernels, kernels = kernel; }
};

// Runs a grid; false after what is then in `failure`.
bool launch(const Kernel& kernel, Dim blocks, Dim threads, u32 dynamic, const void* args);
extern char failure[256];

template <class T> T swap(Meeting what, const T& v, u32 from) {
    static_assert(sizeof(T) <= 64 && std::is_trivially_copyable<T>::value, "a value of a lane");
    u8* exchange = here.exchange;
    memcpy(exchange + here.lane * 64, &v, sizeof v);
    meet(what);
    T r;
    memcpy(&r, exchange + (from & 31) * 64, sizeof r);
    meet(what);
    return r;
}

float half_to_float(u16 h);
u16 float_to_half(float f);
inline float brain_to_float(u16 b) {
    u32 u = (u32)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline u16 float_to_brain(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// A product of 16 x 16 by 16 x 8 (of 16-bit elements), or of 16 x 32 by 32 x 8 (of bytes): `element` reads element `i` of a word.
template <class C, class Element> void product(C (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 per_word, Element element) {
    u8* exchange = here.exchange;
    u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(exchange + here.lane * 64, mine, sizeof mine);
    meet(MMA);
    auto word = [&](u32 lane, u32 reg) {
        u32 w;
        memcpy(&w, exchange + lane * 64 + reg * 4, 4);
        return w;
    };
    u32 g = here.lane / 4, t = here.lane % 4;
    for (u32 i = 0; i < 4; i++) {
        u32 row = g + i / 2 * 8, column = 2 * t + i % 2;
        C sum = c[i];
        for (u32 k = 0; k < 8 * per_word; k++) {
            u32 half = k / (4 * per_word), at = k % (4 * per_word);
            u32 aw = word(row % 8 * 4 + at / per_word, row / 8 + 2 * half), bw = word(column * 4 + at / per_word, 4 + half);
            sum += element(aw, at % per_word, true) * element(bw, at % per_word, false);
        }
        c[i] = sum;
    }
    meet(MMA);
}

// Operand B of a group's product, [128 x 16]: element (n, k) lies at `tile` + place(n, k).
struct Operand {
    const u8* tile;
    u32 step, depth, columns;
    u32 place(u32 n, u32 k) const {
        u32 at = step * 16 + k;
        // Rows of 64 elements.
        if (columns == 0) return n / 8 * 1024 + n % 8 * 128 + ((at / 8) ^ (n % 8)) * 16 + at % 8 * 2;
        u32 chunk = n % columns / 8;
        return n / columns * depth * columns * 2 + at * columns * 2 + (chunk ^ (columns == 16 ? at / 4 % 2 : at % 8)) * 16 + n % 8 * 2;
    }
};

// A group's product of 64 x 16 by 16 x 128: warps by themselves, since each has its own rows.
template <class Element> void group_product(float (&d)[64], const u32 (&a)[4], const Operand& b, bool more, Element element) {
    u8* exchange = here.exchange;
    memcpy(exchange + here.lane * 64, a, sizeof a);
    meet(MMA);
    float* sums = pending_results(d);
    for (u32 half = 0; half < 2; half++) {
        float mine[16];
        for (u32 k = 0; k < 16; k++) {
            u16 pair[2];
            memcpy(pair, exchange + (here.lane / 4 * 4 + k % 8 / 2) * 64 + (half + k / 8 * 2) * 4, sizeof pair);
            mine[k] = element(pair[k % 2]);
        }
        for (u32 j = 0; j < 32; j++) {
            u32 column = j / 2 * 8 + here.lane % 4 * 2 + j % 2;
            float& sum = sums[j / 2 * 4 + half * 2 + j % 2];
            if (!more) sum = 0.0f;
            for (u32 k = 0; k < 16; k++) {
                u16 x;
                memcpy(&x, b.tile + b.place(column, k), sizeof x);
                sum += mine[k] * element(x);
            }
        }
    }
    meet(MMA);
}

}  // namespace shim

// Kernel files are compiled inside an unnamed namespace, so that none of their names meet.
#define DEVICE __attribute__((unused)) inline
#define SHIM_STRING_(x) #x
#define SHIM_STRING(x) SHIM_STRING_(x)
#define SHIM_JOIN_(a, b) a##b
#define SHIM_JOIN(a, b) SHIM_JOIN_(a, b)
// FILE_NAME is the kernel file's, without extension; its shared variables lie in a section of that name.
#define SHIM_SECTION SHIM_JOIN(shared_, FILE_NAME)
extern "C" {
extern u8 SHIM_JOIN(__start_, SHIM_SECTION)[] __attribute__((weak, visibility("hidden")));
extern u8 SHIM_JOIN(__stop_, SHIM_SECTION)[] __attribute__((weak, visibility("hidden")));
}
#define KERNEL(name, Args) KERNEL_OF(1024, name, Args)
#define KERNEL_AT(most, blocks, name, Args) KERNEL_OF(most, name, Args)
#define KERNEL_OF(most, name, Args)                                                                                             \
    static void name(const Args& a);                                                                                            \
    static void name##_from(const void* args) { name(*(const Args*)args); }                                                     \
    static shim::Kernel name##_kernel = {SHIM_STRING(FILE_NAME), #name, sizeof(Args), most, name##_from, SHIM_JOIN(__start_, SHIM_SECTION), \
                                         SHIM_JOIN(__stop_, SHIM_SECTION), nullptr};                                            \
    static shim::Register name##_registered(&name##_kernel);                                                                    \
    static void name(const Args& a)
#define SHARED static __attribute__((section(SHIM_STRING(SHIM_SECTION))))
#define SHARED_BYTES(name) u8* name = shim::here.dynamic
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict

#define threadIdx (shim::here.thread)
#define blockIdx (shim::here.block)
#define blockDim (shim::here.threads)
#define gridDim (shim::here.blocks)

struct __align__(16) Words4 {
    u32 x, y, z, w;
};
struct __align__(8) Words2 {
    u32 x, y;
};

DEVICE u32 bits_of(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
DEVICE float float_of(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
DEVICE void barrier() { shim::meet(shim::BLOCK); }
DEVICE void warp_barrier() { shim::meet(shim::WARP); }
DEVICE u32 lane() { return shim::here.lane; }
template <class T> DEVICE T shuffle(T v, u32 from) { return shim::swap(shim::SHUFFLE, v, from); }
template <class T> DEVICE T shuffle_xor(T v, u32 mask) { return shim::swap(shim::SHUFFLE_XOR, v, shim::here.lane ^ mask); }

DEVICE float from_bf16(u16 b) { return shim::brain_to_float(b); }
DEVICE u16 to_bf16(float f) { return shim::float_to_brain(f); }
DEVICE float from_f16(u16 h) { return shim::half_to_float(h); }
DEVICE u16 to_f16(float f) { return shim::float_to_half(f); }
// By the type's definition: sign, four bits of exponent, three of mantissa.
DEVICE u32 pair_e4m3(u32 two) {
    u32 pair = 0;
    for (u32 i = 0; i < 2; i++) {
        u32 code = two >> 8 * i & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
        float v = exponent ? std::ldexp(8.0f + (float)mantissa, (int)exponent - 10) : std::ldexp((float)mantissa, -9);
        pair |= (u32)to_f16(code & 0x80 ? -v : v) << 16 * i;
    }
    return pair;
}
DEVICE u32 pair_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE u32 pair_f16(float low, float high) { return to_f16(low) | (u32)to_f16(high) << 16; }
namespace shim {
// `f` of the low and of the high halves, as f32, which holds sums and products of f16 with bits to spare.
template <class F> u32 by_halves(F f) { return pair_f16(f(0), f(16)); }
inline float half_of(u32 pair, u32 shift) { return from_f16((u16)(pair >> shift)); }
}
DEVICE u32 less_f16(u32 a, u32 b) { return shim::by_halves([=](u32 s) { return shim::half_of(a, s) - shim::half_of(b, s); }); }
DEVICE u32 times_f16(u32 a, u32 b) { return shim::by_halves([=](u32 s) { return shim::half_of(a, s) * shim::half_of(b, s); }); }
DEVICE u32 fused_f16(u32 a, u32 b, u32 c) {
    return shim::by_halves([=](u32 s) { return (float)((double)shim::half_of(a, s) * shim::half_of(b, s) + shim::half_of(c, s)); });
}

DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float times(float a, float b) { return a * b; }
DEVICE float plus(float a, float b) { return a + b; }
DEVICE float over(float a, float b) { return a / b; }
DEVICE float root(float x) { return sqrtf(x); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
DEVICE float power_of_two(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
DEVICE float round_even(float x) { return nearbyintf(x); }
DEVICE float largest(float a, float b) { return fmaxf(a, b); }
DEVICE float smallest(float a, float b) { return fminf(a, b); }
DEVICE float magnitude(float a) { return fabsf(a); }

DEVICE i32 dot4_us(u32 a, u32 b, i32 c) {
    for (u32 i = 0; i < 4; i++) c += (i32)(u8)(a >> 8 * i) * (i32)(i8)(b >> 8 * i);
    return c;
}
DEVICE i32 dot4_ss(u32 a, u32 b, i32 c) {
    for (u32 i = 0; i < 4; i++) c += (i32)(i8)(a >> 8 * i) * (i32)(i8)(b >> 8 * i);
    return c;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u64 both = (u64)b << 32 | a;
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 s = selector >> 4 * i & 15;
        u32 byte = (u8)(both >> 8 * (s & 7));
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << 8 * i;
    }
    return r;
}

DEVICE Words4 load16(const void* p) { return *(const Words4*)__builtin_assume_aligned(p, 16); }
DEVICE Words2 load8(const void* p) { return *(const Words2*)__builtin_assume_aligned(p, 8); }
DEVICE void prefetch(const void*) {}
DEVICE Words4 load_once(const void* p) { return load16(p); }
DEVICE Words2 load8_once(const void* p) { return load8(p); }
DEVICE u32 load4_once(const void* p) { return *(const u32*)__builtin_assume_aligned(p, 4); }
DEVICE Words4 load_passing(const void* p) { return load16(p); }

DEVICE u32 shared_address(const void* p) { return (u32)(uintptr_t)p; }
DEVICE void copy16(void* shared, const void* global) { shim::copy_later(shared, global, 16); }
DEVICE void copy16_some(void* shared, const void* global, u32 bytes) { shim::copy_later(shared, global, bytes); }
DEVICE void copies_commit() { shim::commit_copies(); }
template <int N> DEVICE void copies_wait() { shim::wait_copies(N); }

DEVICE void shim_matrices(u32 (&r)[4], const void* row, bool transposed) {
    u8* exchange = shim::here.exchange;
    memcpy(exchange + lane() * 64, &row, sizeof row);
    shim::meet(shim::MATRICES);
    for (u32 m = 0; m < 4; m++) {
        u16 pair[2];
        for (u32 i = 0; i < 2; i++) {
            u32 at = transposed ? lane() % 4 * 2 + i : lane() / 4, column = transposed ? lane() / 4 : lane() % 4 * 2 + i;
            const u16* from;
            memcpy(&from, exchange + (m * 8 + at) * 64, sizeof from);
            pair[i] = from[column];
        }
        r[m] = pair[0] | (u32)pair[1] << 16;
    }
    shim::meet(shim::MATRICES);
}
DEVICE void load_matrices(u32 (&r)[4], const void* row) { shim_matrices(r, row, false); }
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) { shim_matrices(r, row, true); }

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    shim::product(c, a, b0, b1, 2, [](u32 word, u32 i, bool) { return from_bf16((u16)(word >> 16 * i)); });
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    shim::product(c, a, b0, b1, 2, [](u32 word, u32 i, bool) { return from_f16((u16)(word >> 16 * i)); });
}
DEVICE void mma_u8s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    shim::product(c, a, b0, b1, 4, [](u32 word, u32 i, bool is_a) { return is_a ? (i32)(u8)(word >> 8 * i) : (i32)(i8)(word >> 8 * i); });
}
DEVICE void mma_s8s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    shim::product(c, a, b0, b1, 4, [](u32 word, u32 i, bool) { return (i32)(i8)(word >> 8 * i); });
}
DEVICE void mma_s8s8_from(i32 start, i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for (i32& v : d) v = start;
    mma_s8s8(d, a, b0, b1);
}

// kernels/common/sm90.cuh
#define SM90 1
typedef shim::Barrier Barrier;
DEVICE void barrier_init(Barrier* b, u32 arrivals) { *b = {arrivals, arrivals, 0, 0}; }
DEVICE void barriers_ready() {}
DEVICE void barrier_expect(Barrier* b, u32 bytes) { b->count(1, bytes); }
DEVICE void barrier_arrive(Barrier* b) { b->count(1, 0); }
DEVICE void barrier_wait(Barrier* b, u32 phase) { shim::wait_phase(b, phase); }
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, Barrier* b) { shim::bulk_later(to, from, bytes, b); }
template <int N> DEVICE void registers_down() {}
template <int N> DEVICE void registers_up() {}
DEVICE void group_begin() {}
DEVICE void group_commit() { shim::commit_products(); }
template <int N> DEVICE void group_wait() { shim::wait_products(N); }
typedef shim::Operand Operand;
DEVICE Operand operand_of_rows(const u8* tile, u32 step) { return {tile, step, 0, 0}; }
DEVICE Operand operand_by_16(const u8* tile, u32 step, u32 depth) { return {tile, step, depth, 16}; }
DEVICE Operand operand_by_64(const u8* tile, u32 step, u32 depth) { return {tile, step, depth, 64}; }
DEVICE void group_bf16(float (&d)[64], const u32 (&a)[4], Operand b, bool more) { shim::group_product(d, a, b, more, from_bf16); }
DEVICE void group_f16(float (&d)[64], const u32 (&a)[4], Operand b, bool more) { shim::group_product(d, a, b, more, from_f16); }
DEVICE void group_f16_across(float (&d)[64], const u32 (&a)[4], Operand b, bool more) { group_f16(d, a, b, more); }
DEVICE void group_results(float (&)[64]) {}
DEVICE void shared_ready() {}

DEVICE void wait_for_before() {}
DEVICE void let_next_begin() {}
DEVICE u32 atomic_add(u32* p, u32 v) {
    u32 before = *p;
    *p += v;
    return before;
}
DEVICE void fence() {}
