/* What LLVM's thread sanitizer calls for copies in Rust's code, on top of GCC's run-time, which has other names: it watches the C library's
 * own functions. */
#include <string.h>

void *__tsan_memcpy(void *to, const void *from, size_t count);
void *__tsan_memmove(void *to, const void *from, size_t count);
void *__tsan_memset(void *to, int value, size_t count);

void *__tsan_memcpy(void *to, const void *from, size_t count) { return memcpy(to, from, count); }
void *__tsan_memmove(void *to, const void *from, size_t count) { return memmove(to, from, count); }
void *__tsan_memset(void *to, int value, size_t count) { return memset(to, value, count); }
