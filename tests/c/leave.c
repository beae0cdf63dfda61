/* The process ends while threads are working and nothing has been freed: quietly, with the host's own exit code. The second
 * argument says how: 0 exit, 1 return from main, 2 exit on a thread inside a callback of the library, 3 quick_exit, 4 _exit, 5 exit with
 * a handler that calls the library and frees what is in use. */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

static metrale_model *model;
static atomic_int running;

static void *work_on(void *unused) {
    const metrale_token bos = 1;
    (void)unused;
    for (;;) {
        metrale_seq *seq = NULL;
        if (metrale_seq_new(model, NULL, &seq, NULL) < METRALE_OK) return NULL;
        if (metrale_prefill(seq, &bos, 1, NULL) < METRALE_OK) return NULL; /* The process is about to end. */
        for (int i = 0; i < 50; i++) {
            metrale_token token = -1;
            if (metrale_decode_step(&seq, 1, &token, NULL) < METRALE_OK) return NULL;
            atomic_fetch_add(&running, 1);
        }
        metrale_seq_free(seq);
    }
    return NULL;
}

static int32_t leave(void *user, uint64_t done, uint64_t total, const char *phase) {
    (void)user, (void)done, (void)total, (void)phase;
    exit(0);
}

static void free_all(void) {
    metrale_cancel_all(model, NULL);
    metrale_free(model);
    CHECK(metrale_cancel_all(model, NULL) == METRALE_INVALID_HANDLE);
}

int main(int argc, char **argv) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    OK(metrale_load(arguments(argc, argv), &options, &model, &err));
    pthread_t thread;
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, work_on, NULL) == 0);
    while (atomic_load(&running) < 20) sched_yield();
    switch (argc > 2 ? atoi(argv[2]) : 0) {
    case 1: return 0;
    case 2:
        options.progress = leave;
        metrale_load(argv[1], &options, &(metrale_model *){NULL}, NULL);
        return 1; /* Not reached. */
    case 3: quick_exit(0);
    case 4: _exit(0);
    case 5: CHECK(atexit(free_all) == 0); /* fall through */
    default: exit(0);
    }
}
