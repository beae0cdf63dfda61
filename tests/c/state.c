/* State of a sequence: forks, marks, bytes. What comes back is bit for bit what was, the sampler's generator included. */
#include "check.h"

#define VOCAB 512
#define STEPS 12

static metrale_model *model;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378, 399, 261, 285};
#define PROMPT_LEN (sizeof PROMPT / sizeof PROMPT[0])

/* A sequence that draws at random, so that the generator matters. */
static metrale_seq *random_seq(void) {
    metrale_sampler_stage stage;
    memset(&stage, 0, sizeof stage);
    stage.kind = METRALE_STAGE_TEMPERATURE;
    stage.value = 1.3f;
    metrale_sampler *sampler = NULL;
    OK(metrale_sampler_new(&stage, 1, 99, &sampler, &err));
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_seq_sampling(seq, sampler, &err));
    metrale_sampler_free(sampler);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    return seq;
}

static void steps(metrale_seq *seq, metrale_token *tokens, size_t count) {
    for (size_t i = 0; i < count; i++) {
        metrale_status status = metrale_decode_step(&seq, 1, &tokens[i], NULL);
        CHECK(status == METRALE_OK || status == METRALE_DONE);
    }
}

static void same_future(metrale_seq *seq, const metrale_token *expected, size_t count) {
    metrale_token tokens[STEPS];
    steps(seq, tokens, count);
    CHECK(memcmp(tokens, expected, count * sizeof *tokens) == 0);
}

static void forks_go_their_own_way(void) {
    metrale_seq *seq = random_seq(), *fork = NULL;
    metrale_token future[STEPS], other[STEPS];
    OK(metrale_seq_fork(seq, &fork, &err));
    steps(seq, future, STEPS);
    CHECK(length_of(fork) == PROMPT_LEN);
    same_future(fork, future, STEPS);
    /* The fork does not see what the original does next, and lives on without it. */
    steps(seq, other, 3);
    metrale_seq_free(seq);
    same_future(fork, other, 3);
    metrale_seq_free(fork);
}

static void marks_bring_back_everything(void) {
    metrale_seq *seq = random_seq();
    metrale_token first[STEPS], second[STEPS];
    uint64_t early = 0, late = 0;
    OK(metrale_seq_mark(seq, &early, &err));
    steps(seq, first, STEPS);
    OK(metrale_seq_mark(seq, &late, &err));
    CHECK(early != 0 && late != 0 && early != late);
    steps(seq, second, STEPS);
    OK(metrale_seq_rollback(seq, late, &err));
    same_future(seq, second, STEPS);
    OK(metrale_seq_rollback(seq, early, &err));
    CHECK(length_of(seq) == PROMPT_LEN);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_rollback(seq, late, &err));
    same_future(seq, first, STEPS);
    OK(metrale_seq_commit(seq, early, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_commit(seq, early, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_rollback(seq, 12345, &err));
    /* A cut to before a mark ends it. */
    OK(metrale_seq_mark(seq, &late, &err));
    OK(metrale_seq_truncate(seq, 2, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_rollback(seq, late, &err));
    CHECK(length_of(seq) == 2);
    metrale_seq_free(seq);
}

static void bytes_bring_back_everything(void) {
    metrale_seq *seq = random_seq(), *again = new_seq(model, NULL);
    metrale_token future[STEPS];
    size_t size = 0, written = 0;
    EXPECT(METRALE_MORE, metrale_seq_save(seq, NULL, 0, &size, &err));
    CHECK(size > 0);
    uint8_t *bytes = malloc(size);
    CHECK(bytes != NULL);
    OK(metrale_seq_save(seq, bytes, size, &written, &err));
    CHECK(written == size);
    steps(seq, future, STEPS);

    /* The stages are the host's to set; the generator comes with the bytes. */
    OK(metrale_seq_restore(seq, bytes, size, &err));
    same_future(seq, future, STEPS);

    /* Every byte counts: a changed or missing one is refused and changes nothing. */
    OK(metrale_prefill(again, PROMPT, 3, &err));
    for (size_t at = 0; at < size; at += 1 + size / 97) {
        bytes[at] ^= 0x10;
        CHECK(metrale_seq_restore(again, bytes, size, NULL) < 0);
        bytes[at] ^= 0x10;
        CHECK(metrale_seq_restore(again, bytes, at, NULL) < 0);
    }
    CHECK(length_of(again) == 3);
    OK(metrale_seq_restore(again, bytes, size, &err));
    CHECK(length_of(again) == PROMPT_LEN);
    free(bytes);
    metrale_seq_free(seq);
    metrale_seq_free(again);
}

static void prefixes_are_counted(void) {
    metrale_seq *seq = random_seq();
    metrale_token other[PROMPT_LEN + 1];
    memcpy(other, PROMPT, sizeof PROMPT);
    other[PROMPT_LEN] = 5;
    size_t count = 0;
    OK(metrale_seq_match(seq, other, PROMPT_LEN + 1, &count, &err));
    CHECK(count == PROMPT_LEN);
    other[4] = 9;
    OK(metrale_seq_match(seq, other, PROMPT_LEN + 1, &count, &err));
    CHECK(count == 4);
    OK(metrale_seq_match(seq, NULL, 0, &count, &err));
    CHECK(count == 0);
    metrale_seq_free(seq);
}

static void nothing_is_an_argument(void) {
    uint64_t mark = 0;
    size_t size = 0;
    metrale_seq *none = NULL;
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_fork(NULL, &none, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_mark(NULL, &mark, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_save(NULL, NULL, 0, &size, &err));
    metrale_seq *seq = random_seq();
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_fork(seq, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_mark(seq, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_save(seq, NULL, 0, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_restore(seq, NULL, 5, &err));
    CHECK(mark == 0 && size == 0 && none == NULL);
    metrale_seq_free(seq);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_mark(seq, &mark, &err));
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    forks_go_their_own_way();
    marks_bring_back_everything();
    bytes_bring_back_everything();
    prefixes_are_counted();
    nothing_is_an_argument();
    metrale_free(model);
    return 0;
}
