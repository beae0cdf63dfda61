/* Memory that is refused on demand: the C library's functions, replaced here in the program, which the library then uses as
 * well, and a host's allocator that counts. The n-th request alone fails, or all from the n-th on. What the C library asks
 * of itself is given: it answers some refusals by ending the process (thread-local storage and its destructors). */
#ifndef REFUSE_H
#define REFUSE_H

#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

/* Whose requests fail. */
enum refuser { NOBODY, C_LIBRARY, HOST };
static _Atomic enum refuser refuser;
static atomic_long left;
static atomic_int persistent;
static atomic_long refused;

/* Where the code of libmetrale.so lies. */
static uintptr_t library_start, library_end;

static int find_library(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    if (strstr(info->dlpi_name, "libmetrale") == NULL) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_X)) continue;
        library_start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        library_end = library_start + info->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

/* Whether the function that called the one which asks lies in the library. */
#define FROM_LIBRARY() ((uintptr_t)__builtin_return_address(0) - library_start < library_end - library_start)

/* Whether this request fails. */
static int fails(enum refuser who) {
    if (atomic_load(&refuser) != who) return 0;
    long mine = atomic_fetch_sub(&left, 1);
    if (mine > 0 || (mine < 0 && !atomic_load(&persistent))) return 0;
    atomic_fetch_add(&refused, 1);
    errno = ENOMEM;
    return 1;
}

/* From now on the n-th request (from 0) of `who` fails, or all from there on. */
static void refuse(enum refuser who, long n, int all) {
    atomic_store(&left, n);
    atomic_store(&persistent, all);
    atomic_store(&refuser, who);
}

/* Nothing fails any more. Whether the n-th request was reached. */
static int refuse_end(void) {
    atomic_store(&refuser, NOBODY);
    return atomic_load(&left) < 0;
}

void *malloc(size_t size) { return FROM_LIBRARY() && fails(C_LIBRARY) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return FROM_LIBRARY() && fails(C_LIBRARY) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return FROM_LIBRARY() && fails(C_LIBRARY) ? NULL : __libc_realloc(p, size); }
void *aligned_alloc(size_t align, size_t size) { return FROM_LIBRARY() && fails(C_LIBRARY) ? NULL : __libc_memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) {
    if (FROM_LIBRARY() && fails(C_LIBRARY)) return ENOMEM;
    *out = __libc_memalign(align, size);
    return *out ? 0 : ENOMEM;
}

/* What the host's allocator has given. */
static atomic_size_t host_live, host_pieces, host_calls;

static void *host_alloc(void *user, size_t size, size_t align) {
    (void)user;
    if (size == 0 || align == 0 || (align & (align - 1)) != 0) abort();
    if (fails(HOST)) return NULL;
    atomic_fetch_add(&host_calls, 1);
    atomic_fetch_add(&host_live, size);
    atomic_fetch_add(&host_pieces, 1);
    return align <= 16 ? __libc_malloc(size) : __libc_memalign(align, size);
}

static void host_free(void *user, void *pointer, size_t size, size_t align) {
    (void)user, (void)align;
    if (pointer == NULL) abort();
    atomic_fetch_sub(&host_live, size);
    atomic_fetch_sub(&host_pieces, 1);
    __libc_free(pointer);
}

#endif
