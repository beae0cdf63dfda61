/* Bounded work: a prompt and tokens in small budgets, polling, estimates, and cancelling from another thread. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { STEPS = 6, PROMPT = 60 };

static metrale_token prompt[PROMPT];

static metrale_step_result result(void) {
    metrale_step_result r = {0};
    r.struct_size = sizeof r;
    return r;
}

/* Steps both sequences until each has read its queue and produced STEPS tokens; they get the tokens of the blocking calls. */
static void same_as_blocking(metrale_model *model, uint64_t budget) {
    metrale_seq *seqs[2], *plain = new_seq(model, NULL);
    metrale_token expected[STEPS], got[2][STEPS] = {{0}};
    size_t produced[2] = {0, 0}, queued = 0;
    OK(metrale_prefill(plain, prompt, PROMPT, &err));
    for (int i = 0; i < STEPS; i++) CHECK(metrale_decode_step(&plain, 1, expected + i, NULL) >= METRALE_OK);
    for (int i = 0; i < 2; i++) {
        seqs[i] = new_seq(model, NULL);
        OK(metrale_seq_feed(seqs[i], prompt, PROMPT, &err));
        EXPECT(METRALE_AGAIN, metrale_poll(seqs[i], &queued, &err));
        CHECK(queued == PROMPT && length_of(seqs[i]) == 0);
    }
    uint64_t estimate = 0;
    OK(metrale_step_estimate(seqs, 2, &estimate, &err));
    CHECK(estimate > 0);
    for (int calls = 0; produced[0] < STEPS || produced[1] < STEPS; calls++) {
        CHECK(calls < 1000000);
        metrale_step_result r[2] = {result(), result()};
        metrale_status status = metrale_step(seqs, 2, budget, r, NULL);
        CHECK(status == METRALE_OK || status == METRALE_AGAIN || status == METRALE_DONE);
        CHECK((status == METRALE_AGAIN) == (r[0].status == METRALE_AGAIN || r[1].status == METRALE_AGAIN));
        for (int i = 0; i < 2; i++) {
            CHECK(r[i].status >= METRALE_OK && r[i].queued + length_of(seqs[i]) >= PROMPT);
            if (r[i].token >= 0 && produced[i] < STEPS) got[i][produced[i]++] = r[i].token;
        }
    }
    for (int i = 0; i < 2; i++) {
        CHECK(memcmp(got[i], expected, sizeof expected) == 0);
        metrale_seq_free(seqs[i]);
    }
    metrale_seq_free(plain);
}

static void arguments_are_checked(metrale_model *model) {
    metrale_seq *seq = new_seq(model, NULL), *twice[2] = {seq, seq};
    metrale_step_result r[2] = {result(), result()};
    uint64_t ns = 7;
    OK(metrale_step(NULL, 0, 0, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_step(twice, 2, 0, r, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_step(&seq, 1, 0, NULL, &err));
    r[0].struct_size = 5;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_step(&seq, 1, 0, r, &err));
    r[0] = result();
    /* A sequence without a token says so in its own result. */
    OK(metrale_step(&seq, 1, 0, r, &err));
    CHECK(r[0].status == METRALE_INVALID_STATE && r[0].token == -1 && r[0].read == 0);
    EXPECT(METRALE_INVALID_TOKEN, metrale_seq_feed(seq, (metrale_token[]){1, -5}, 2, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_feed(seq, NULL, 2, &err));
    OK(metrale_poll(seq, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_step_estimate(&seq, 1, NULL, &err));
    /* A cancel with nothing to do does nothing. */
    OK(metrale_cancel(seq, &err));
    OK(metrale_cancel_all(model, &err));
    OK(metrale_prefill(seq, prompt, 3, &err));
    /* What waits, and a slice under way, are dropped; the sequence is as before. */
    OK(metrale_seq_feed(seq, prompt, PROMPT, &err));
    EXPECT(METRALE_AGAIN, metrale_step(&seq, 1, 1, r, &err));
    OK(metrale_cancel(seq, &err));
    OK(metrale_step(&seq, 1, 0, r, &err));
    CHECK(r[0].status == METRALE_CANCELLED && r[0].read == 0 && r[0].queued == 0 && length_of(seq) == 3);
    metrale_seq_free(seq);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_feed(seq, prompt, 1, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_step(&seq, 1, 0, r, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_step_estimate(&seq, 1, &ns, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_poll(seq, NULL, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_cancel(seq, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_cancel_all(NULL, &err));
    CHECK(ns == 7);
}

/* A sequence that is freed while its slice is under way leaves the others alone. */
static void freed_under_way(metrale_model *model) {
    metrale_seq *seqs[2] = {new_seq(model, NULL), new_seq(model, NULL)};
    metrale_step_result r[2] = {result(), result()};
    for (int i = 0; i < 2; i++) OK(metrale_seq_feed(seqs[i], prompt, PROMPT, &err));
    EXPECT(METRALE_AGAIN, metrale_step(seqs, 2, 1, r, &err));
    metrale_seq_free(seqs[0]);
    OK(metrale_step(&seqs[1], 1, 0, r, &err));
    CHECK(r[0].status == METRALE_OK && r[0].read == PROMPT && length_of(seqs[1]) == PROMPT);
    metrale_seq_free(seqs[1]);
}

static metrale_seq *busy;
static atomic_int stop;

static void *cancel_often(void *unused) {
    (void)unused;
    while (!stop) {
        usleep(700);
        metrale_cancel(busy, NULL);
    }
    return NULL;
}

/* A cancelled call leaves the length and the row as they were. */
static void cancel_running(metrale_model *model) {
    pthread_t thread;
    size_t vocab = 0;
    busy = new_seq(model, NULL);
    OK(metrale_prefill(busy, prompt, 4, &err));
    const float *row = row_of(busy, &vocab);
    float *before = malloc(vocab * sizeof *before);
    CHECK(before != NULL);
    memcpy(before, row, vocab * sizeof *before);
    CHECK(pthread_create(&thread, NULL, cancel_often, NULL) == 0);
    for (int round = 0; round < (quick ? 3 : 60); round++) {
        metrale_token many[200];
        for (int i = 0; i < 200; i++) many[i] = prompt[i % PROMPT];
        metrale_status status = metrale_prefill(busy, many, 200, NULL);
        CHECK(status == METRALE_OK || status == METRALE_CANCELLED);
        CHECK(length_of(busy) == (status == METRALE_OK ? 204u : 4u));
        if (status == METRALE_OK) CHECK(metrale_seq_truncate(busy, 4, NULL) == METRALE_OK);
        CHECK(memcmp(row_of(busy, &vocab), before, vocab * sizeof *before) == 0);
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    free(before);
    metrale_seq_free(busy);
}

int main(int argc, char **argv) {
    metrale_model *model = load_model(arguments(argc, argv));
    for (int i = 0; i < PROMPT; i++) prompt[i] = i == 0 ? 1 : 260 + i * 37 % 200;
    const uint64_t budgets[] = {0, UINT64_MAX, 1000000, 100000, 20000, 1};
    for (int i = quick ? 3 : 0; i < (quick ? 4 : 6); i++) same_as_blocking(model, budgets[i]);
    arguments_are_checked(model);
    freed_under_way(model);
    cancel_running(model);
    metrale_free(model);
    return 0;
}
