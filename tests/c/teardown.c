/* Consumers go away at any moment: a sequence, or everything, is freed at every point of running work. The free returns at once, the
 * call that was running ends, the others go on: all within a second of the process's own time, whatever else the machine does. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

static const char *path;
static metrale_model *model;
static metrale_seq *victim, *bystander;
static atomic_int started, finished;
static double slowest_free, slowest_end;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Works on the victim until it is gone. */
static void *work(void *blocking) {
    static metrale_token prompt[200];
    for (int i = 0; i < 200; i++) prompt[i] = 1 + i % 400;
    atomic_store(&started, 1);
    for (;;) {
        metrale_status status;
        if (blocking) {
            status = metrale_prefill(victim, prompt, 200, NULL);
            metrale_token token = -1;
            for (int i = 0; i < 20 && status >= METRALE_OK; i++) status = metrale_decode_step(&victim, 1, &token, NULL);
            if (status >= METRALE_OK) status = metrale_seq_truncate(victim, 0, NULL);
        } else {
            metrale_step_result results[2] = {{.struct_size = sizeof results[0]}, {.struct_size = sizeof results[1]}};
            metrale_seq *both[2] = {victim, bystander};
            metrale_seq_feed(victim, prompt, 50, NULL);
            status = metrale_step(both, 2, 200000, results, NULL);
            if (length_of(bystander) > 100) OK(metrale_seq_truncate(bystander, 4, &err));
        }
        CHECK(status >= METRALE_OK || status == METRALE_CANCELLED || status == METRALE_INVALID_HANDLE || status == METRALE_CONTEXT_FULL ||
              status == METRALE_BUSY);
        if (status == METRALE_INVALID_HANDLE) break;
        if (status == METRALE_CONTEXT_FULL) metrale_seq_truncate(victim, 0, NULL);
    }
    atomic_store(&finished, 1);
    return NULL;
}

static void go_away(int point, int blocking, int everything) {
    static const metrale_token prompt[] = {1, 403, 407, 261};
    metrale_seq_options options = {.struct_size = sizeof options, .context = 256};
    victim = new_seq(model, &options);
    bystander = new_seq(model, &options);
    OK(metrale_prefill(bystander, prompt, 4, &err));
    metrale_token first = -1, again = -1;
    metrale_seq *same = NULL;
    OK(metrale_seq_fork(bystander, &same, &err));
    CHECK(metrale_decode_step(&same, 1, &first, NULL) >= METRALE_OK);
    atomic_store(&started, 0);
    atomic_store(&finished, 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, blocking ? &started : NULL) == 0);
    while (!atomic_load(&started)) usleep(10);
    usleep((useconds_t)point * 37);
    double begin = now();
    metrale_seq_free(victim);
    if (everything) metrale_free(model);
    double freed = now();
    CHECK(pthread_join(thread, NULL) == 0);
    double ended = now();
    if (freed - begin > slowest_free) slowest_free = freed - begin;
    if (ended - begin > slowest_end) slowest_end = ended - begin;
    CHECK(atomic_load(&finished));
    /* Nobody else noticed. */
    OK(metrale_seq_truncate(bystander, 4, &err));
    CHECK(metrale_decode_step(&bystander, 1, &again, NULL) >= METRALE_OK && again == first);
    metrale_seq_free(same);
    metrale_seq_free(bystander);
    if (everything) model = load_model(path);
}

/* A callback that says stop ends its own load and nothing else. */
static int32_t stop(void *user, uint64_t done, uint64_t total, const char *phase) {
    (void)total, (void)phase;
    return done >= *(uint64_t *)user;
}

static void callbacks_that_stop(void) {
    metrale_seq *seq = new_seq(model, NULL);
    for (uint64_t at = 0; at < 400000; at += 100000) {
        metrale_load_options options = {.struct_size = sizeof options, .threads = 1, .progress = stop, .user = &at};
        metrale_model *other = NULL;
        EXPECT(METRALE_CANCELLED, metrale_load(path, &options, &other, &err));
        CHECK(other == NULL);
        OK(metrale_prefill(seq, &(metrale_token){1}, 1, &err));
    }
    metrale_seq_free(seq);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    model = load_model(path);
    callbacks_that_stop();
    for (int point = 0; point < (quick ? 4 : 60); point++) go_away(point, point % 2, point % 5 == 4);
    metrale_free(model);
    /* Under a checker all is slower. */
    CHECK(quick || (slowest_free < 1 && slowest_end < 1));
    return 0;
}
