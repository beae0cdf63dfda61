// The fibres behind shim.hpp: one for each thread of the block that runs.
#define FILE_NAME none
#include "shim.hpp"

#include <cstdio>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__)
#error "the switch of fibres is written for x86-64"
#endif

namespace shim {

Here here;
Kernel* kernels;
char failure[256];

extern "C" void shim_switch(void** save, void* to);
asm(".text\n.globl shim_switch\n.hidden shim_switch\nshim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

namespace {

struct Copy {
    void* to;
    const void* from;
    u32 bytes, group;
};

struct Pending {
    float* at;
    float values[64];
    u32 group;
};

struct Fibre {
    void* stack_pointer;
    Dim thread;
    bool done;
    Meeting waits;
    // Copies that nobody has waited for, and the number of groups closed.
    std::vector<Copy> copies;
    u32 groups;
    // PHASE: what it waits for.
    Barrier* barrier;
    u32 phase;
    // Results of products that nobody has waited for, and the number of groups of them closed.
    std::vector<Pending> products;
    u32 product_groups;
};

struct Bulk {
    void* to;
    const void* from;
    u32 bytes;
    Barrier* barrier;
};
// Of the block, not done yet.
std::vector<Bulk> bulks;

bool is_over(Barrier* barrier, u32 phase) {
    size_t kept = 0;
    for (const Bulk& bulk : bulks) {
        if (bulk.barrier == barrier) {
            memcpy(bulk.to, bulk.from, bulk.bytes);
            barrier->count(0, 0u - bulk.bytes);
        } else {
            bulks[kept++] = bulk;
        }
    }
    bulks.resize(kept);
    return (barrier->phase & 1) != phase;
}

const size_t STACK = 64 << 10;
const u32 WARP_SIZE = 32, MOST = 1024;

void* scheduler;
std::vector<Fibre> fibres(MOST);
Fibre* current;
u8* stacks;
u8 exchange[MOST * 64] __attribute__((aligned(64)));
const Kernel* running;
const void* arguments;
u32 random_state;

u32 random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state >> 4;
}

void leave() { shim_switch(&current->stack_pointer, scheduler); }

__attribute__((no_sanitize("address"))) void entry() {
    running->run(arguments);
    current->done = true;
    leave();
    abort();
}

__attribute__((no_sanitize("address"))) void poison(u8* p, u8* end) {
    for (volatile u8* at = p; at < end; at++) *at = 0xff;
}

void enter(u32 index) {
    Fibre& fibre = fibres[index];
    current = &fibre;
    here.thread = fibre.thread;
    here.lane = index % WARP_SIZE;
    here.exchange = exchange + index / WARP_SIZE * WARP_SIZE * 64;
    shim_switch(&scheduler, fibre.stack_pointer);
}

bool fail(const char* what, u32 warp) {
    snprintf(failure, sizeof failure, "kernel %s: block (%u, %u, %u), warp %u: %s", running->name, here.block.x, here.block.y, here.block.z, warp, what);
    fprintf(stderr, "shim: %s\n", failure);
    return false;
}

// Lets a warp go on whose lanes have all come. 1: it may run, 0: it waits, -1: its lanes wait for different things.
int release(u32 first, u32 end) {
    Meeting what = NONE;
    bool runs = false, waits = false;
    for (u32 i = first; i < end; i++) {
        Fibre& fibre = fibres[i];
        if (fibre.done) continue;
        if (fibre.waits == PHASE && is_over(fibre.barrier, fibre.phase)) fibre.waits = NONE;
        if (fibre.waits == NONE) {
            runs = true;
        } else if (fibre.waits == BLOCK || fibre.waits == PHASE) {
            waits = true;
        } else {
            if (what != NONE && what != fibre.waits) return -1;
            what = fibre.waits;
        }
    }
    if (runs) return 1;
    if (what == NONE || waits) return 0;
    for (u32 i = first; i < end; i++)
        if (fibres[i].waits == what) fibres[i].waits = NONE;
    return 1;
}

bool run_block(u32 count) {
    u32 warps = (count + WARP_SIZE - 1) / WARP_SIZE;
    for (;;) {
        bool moved = false;
        u32 start = random_state ? random() % warps : 0;
        for (u32 n = 0; n < warps; n++) {
            u32 warp = (start + n) % warps, first = warp * WARP_SIZE, end = first + WARP_SIZE < count ? first + WARP_SIZE : count;
            if (random_state && random() % 4 == 0) {
                moved = true;
                continue;
            }
            // A warp goes as far as it gets, unless the order is random.
            for (;;) {
                int released = release(first, end);
                if (released < 0) return fail("its lanes are in different operations of the warp", warp);
                if (released == 0) break;
                for (u32 i = first; i < end; i++) {
                    if (!fibres[i].done && fibres[i].waits == NONE) {
                        enter(i);
                        // What an absent lane would give.
                        if (fibres[i].done) memset(exchange + i * 64, 0xff, 64);
                    }
                }
                moved = true;
                if (random_state && random() % 4 == 0) break;
            }
        }
        bool all_wait = true, alive = false;
        for (u32 i = 0; i < count; i++) {
            alive |= !fibres[i].done;
            all_wait &= fibres[i].done || fibres[i].waits == BLOCK;
        }
        if (!alive) return true;
        if (all_wait) {
            for (u32 i = 0; i < count; i++) fibres[i].waits = NONE;
            moved = true;
        }
        if (!moved) return fail("deadlock: some threads wait at a barrier that others do not come to", 0);
    }
}

}  // namespace

void meet(Meeting what) {
    current->waits = what;
    leave();
}

void wait_phase(Barrier* barrier, u32 phase) {
    current->barrier = barrier, current->phase = phase;
    meet(PHASE);
}
void bulk_later(void* to, const void* from, u32 bytes, Barrier* barrier) { bulks.push_back({to, from, bytes, barrier}); }

float* pending_results(float (&d)[64]) {
    std::vector<Pending>& products = current->products;
    Pending* found = nullptr;
    for (Pending& pending : products)
        if (pending.at == d) found = &pending;
    if (!found) {
        products.push_back({d, {}, 0});
        found = &products.back();
        memcpy(found->values, d, sizeof d);
        memset(d, 0xff, sizeof d);
    }
    found->group = current->product_groups;
    return found->values;
}
void commit_products() { current->product_groups++; }
void wait_products(u32 left) {
    size_t kept = 0;
    for (const Pending& pending : current->products) {
        if (pending.group + left < current->product_groups) memcpy(pending.at, pending.values, sizeof pending.values);
        else current->products[kept++] = pending;
    }
    current->products.resize(kept);
}

void copy_later(void* to, const void* from, u32 bytes) { current->copies.push_back({to, from, bytes, current->groups}); }
void commit_copies() { current->groups++; }
void wait_copies(u32 left) {
    Fibre& fibre = *current;
    size_t kept = 0;
    for (const Copy& copy : fibre.copies) {
        if (copy.group + left < fibre.groups) {
            if (copy.bytes) memcpy(copy.to, copy.from, copy.bytes);
            memset((u8*)copy.to + copy.bytes, 0, 16 - copy.bytes);
        } else {
            fibre.copies[kept++] = copy;
        }
    }
    fibre.copies.resize(kept);
}

bool launch(const Kernel& kernel, Dim blocks, Dim threads, u32 dynamic, const void* args) {
    static bool once = false;
    if (!once) {
        once = true;
        const char* seed = getenv("METRALE_SHIM_SEED");
        random_state = seed ? (u32)atoi(seed) * 2654435761u : 0;
        stacks = (u8*)aligned_alloc(4096, STACK * MOST);
    }
    u32 count = threads.x * threads.y * threads.z;
    running = &kernel;
    arguments = args;
    if (count == 0 || count > kernel.threads) return fail("a block of so many threads is not what the kernel is for", 0);
    // Exactly as large as it was asked for, so that the address sanitizer sees what is beyond.
    here.dynamic = dynamic ? (u8*)aligned_alloc(128, (dynamic + 127) / 128 * 128) : nullptr;
    here.threads = threads;
    here.blocks = blocks;
    bool fine = true;
    for (u32 z = 0; z < blocks.z && fine; z++) {
        for (u32 y = 0; y < blocks.y && fine; y++) {
            for (u32 x = 0; x < blocks.x && fine; x++) {
                here.block = {x, y, z};
                poison(kernel.shared, kernel.shared_end);
                if (dynamic) memset(here.dynamic, 0xff, dynamic);
                bulks.clear();
                memset(exchange, 0xff, (count + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE * 64);
                for (u32 i = 0; i < count; i++) {
                    Fibre& fibre = fibres[i];
                    fibre.thread = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
                    fibre.done = false;
                    fibre.waits = NONE;
                    fibre.copies.clear();
                    fibre.groups = 0;
                    fibre.products.clear();
                    fibre.product_groups = 0;
                    u64* top = (u64*)(stacks + (i + 1) * STACK);
                    *--top = 0;
                    *--top = (u64)entry;
                    for (int k = 0; k < 6; k++) *--top = 0;
                    fibre.stack_pointer = top;
                }
                fine = run_block(count);
            }
        }
    }
    free(here.dynamic);
    return fine;
}

float half_to_float(u16 h) {
    u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)mantissa, -24);
    u32 bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

u16 float_to_half(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    u16 sign = (u16)(u >> 16 & 0x8000);
    u32 rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return 0x7fff;
    if (rest >= 0x477ff000) return sign | 0x7c00;
    if (rest < 0x38800000) {
        // Subnormal: the distance of its neighbours is 2^-24.
        return sign | (u16)nearbyintf(ldexpf(fabsf(f), 24));
    }
    u32 rounded = rest + 0xfff + (rest >> 13 & 1);
    return sign | (u16)((rounded - 0x38000000) >> 13);
}

}  // namespace shim
