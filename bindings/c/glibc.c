/* Keeps the shared library usable with a glibc as old as 2.31 (Debian 11), on whatever newer one it is linked.
 *
 * Functions that glibc 2.32 to 2.34 gave a new version, because they moved from libpthread and libdl into libc, are there under
 * their first one as well; `stat` and its kind were inline around `__xstat` before 2.33. build.rs passes `--wrap=NAME` for every
 * name in the lists below, so that the library's calls arrive here and go on to what is old. `bindings/c/glibc.sh` says whether the
 * lists are complete. */
#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#define NAMED "GLIBC_2.12"
#define AT "GLIBC_2.4"
#define STAT_VERSION 1
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#define NAMED "GLIBC_2.17"
#define AT "GLIBC_2.17"
#define STAT_VERSION 0
#else
#error "the first versions of this architecture's symbols are not known here"
#endif

#define HERE(declaration)                                  \
    __attribute__((visibility("hidden"))) declaration; \
    declaration

/* Hands five words on as they came, and the result back: no function of the list has more or wider ones. A `dlsym` that asks who
 * calls finds this library in both cases. */
#define OLD(name, version)                                             \
    __asm__(".symver metrale_old_" #name ", " #name "@" version);      \
    extern long metrale_old_##name(long, long, long, long, long);      \
    HERE(long __wrap_##name(long a, long b, long c, long d, long e)) { \
        return metrale_old_##name(a, b, c, d, e);                      \
    }

OLD(dlerror, FIRST)
OLD(dlopen, FIRST)
OLD(dlsym, FIRST)
OLD(pthread_attr_getguardsize, FIRST)
OLD(pthread_attr_getstack, FIRST)
OLD(pthread_attr_setstacksize, FIRST)
OLD(pthread_create, FIRST)
OLD(pthread_detach, FIRST)
OLD(pthread_getattr_np, FIRST)
OLD(pthread_getspecific, FIRST)
OLD(pthread_join, FIRST)
OLD(pthread_key_create, FIRST)
OLD(pthread_key_delete, FIRST)
OLD(pthread_setname_np, NAMED)
OLD(pthread_setspecific, FIRST)
OLD(pthread_sigmask, FIRST)

/* As above, with the version of the struct in front of the arguments. */
#define OLD_STAT(name, old, version)                              \
    __asm__(".symver metrale_old_" #name ", " #old "@" version);  \
    extern int metrale_old_##name(int, long, long, long, long);   \
    HERE(int __wrap_##name(long a, long b, long c, long d)) {     \
        return metrale_old_##name(STAT_VERSION, a, b, c, d);      \
    }

OLD_STAT(stat64, __xstat64, FIRST)
OLD_STAT(fstat64, __fxstat64, FIRST)
OLD_STAT(lstat64, __lxstat64, FIRST)
OLD_STAT(fstatat64, __fxstatat64, AT)
