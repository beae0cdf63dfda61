/* Many threads: their own sequences on one model, one sequence for all, and frees in the middle of work. */
#include "check.h"

#include <pthread.h>
#include <sched.h>

enum { THREADS = 4, STEPS = 8 };

static metrale_model *model;
static metrale_token expected[STEPS];
static metrale_seq *shared;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};

static void generate(metrale_seq *seq, metrale_token *out) {
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    for (int i = 0; i < STEPS; i++) CHECK(metrale_decode_step(&seq, 1, out + i, NULL) >= METRALE_OK);
}

/* Every thread gets what a single one gets. */
static void *own_sequence(void *unused) {
    (void)unused;
    for (int round = 0; round < (quick ? 1 : 12); round++) {
        metrale_token got[STEPS];
        metrale_seq *seq = new_seq(model, NULL);
        generate(seq, got);
        CHECK(memcmp(got, expected, sizeof got) == 0);
        metrale_seq_free(seq);
    }
    return NULL;
}

/* On a shared sequence each call works or is refused; nothing in between. */
static void *shared_sequence(void *unused) {
    (void)unused;
    for (int round = 0; round < (quick ? 10 : 200); round++) {
        metrale_token token = -9;
        metrale_error *err = NULL;
        metrale_status status = metrale_decode_step(&shared, 1, &token, &err);
        CHECK(status == METRALE_OK || status == METRALE_DONE || status == METRALE_BUSY || status == METRALE_CONTEXT_FULL ||
              status == METRALE_INVALID_HANDLE);
        CHECK((status >= METRALE_OK) == (token != -9));
        CHECK(metrale_error_retry(err) == (status == METRALE_BUSY));
        metrale_error_free(err);
    }
    return NULL;
}

static void run(void *(*body)(void *), void (*meanwhile)(void)) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, body, NULL) == 0);
    if (meanwhile) meanwhile();
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Its length, or 0 while another call changes it. */
static uint64_t shared_length(void) {
    metrale_sequence_info info = {0};
    info.struct_size = sizeof info;
    metrale_status status = metrale_seq_info(shared, &info, NULL);
    CHECK(status == METRALE_OK || status == METRALE_BUSY);
    return status == METRALE_OK ? info.length : 0;
}

/* Everything is freed while the threads are working; the model outlives its handle. */
static void free_all(void) {
    while (shared_length() < 8) sched_yield();
    metrale_free(model);
    metrale_seq_free(shared);
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    metrale_seq *seq = new_seq(model, NULL);
    generate(seq, expected);
    metrale_seq_free(seq);
    run(own_sequence, NULL);
    shared = new_seq(model, NULL);
    OK(metrale_prefill(shared, PROMPT, 5, &err));
    run(shared_sequence, free_all);
    EXPECT(METRALE_INVALID_HANDLE, metrale_prefill(shared, PROMPT, 1, &err));
    return 0;
}
