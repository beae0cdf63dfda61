/* The process ends while threads are working and nothing has been freed: quietly, with the host's own exit code. */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

static metrale_model *model;
static atomic_int running;

static void *work_on(void *unused) {
    const metrale_token bos = 1;
    (void)unused;
    for (;;) {
        metrale_seq *seq = new_seq(model, NULL);
        OK(metrale_prefill(seq, &bos, 1, &err));
        for (int i = 0; i < 50; i++) {
            metrale_token token = -1;
            CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
            atomic_fetch_add(&running, 1);
        }
        metrale_seq_free(seq);
    }
    return NULL;
}

int main(int argc, char **argv) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    OK(metrale_load(arguments(argc, argv), &options, &model, &err));
    pthread_t thread;
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, work_on, NULL) == 0);
    while (atomic_load(&running) < 20) sched_yield();
    exit(0);
}
