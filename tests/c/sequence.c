/* Sequences: prefill, steps, logits, truncation; each failing call leaves everything as it was. */
#include "check.h"

#include <math.h>

#define VOCAB 512

static metrale_model *model;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378, 399, 261, 285};
#define PROMPT_LEN (sizeof PROMPT / sizeof PROMPT[0])

static void logits_follow_all_tokens(void) {
    metrale_seq *seq = new_seq(model, NULL);
    const float *row = NULL;
    size_t count = 77;
    EXPECT(METRALE_INVALID_STATE, metrale_seq_logits(seq, &row, &count, &err));
    CHECK(row == NULL && count == 77);
    metrale_token token = -9;
    EXPECT(METRALE_INVALID_STATE, metrale_decode_step(&seq, 1, &token, &err));
    CHECK(token == -9);
    OK(metrale_prefill(seq, NULL, 0, &err));
    CHECK(length_of(seq) == 0);

    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    CHECK(length_of(seq) == PROMPT_LEN);
    row = row_of(seq, &count);
    CHECK(count == VOCAB);
    float first[VOCAB];
    memcpy(first, row, sizeof first);

    /* Token by token: the same bits. */
    metrale_seq *slow = new_seq(model, NULL);
    for (size_t i = 0; i < PROMPT_LEN; i++) OK(metrale_prefill(slow, PROMPT + i, 1, &err));
    CHECK(memcmp(row_of(slow, &count), first, sizeof first) == 0);

    /* A greedy step takes the highest logit, and appends it. */
    metrale_token best = best_of(seq);
    metrale_status status = metrale_decode_step(&seq, 1, &token, NULL);
    CHECK((status == METRALE_OK || status == METRALE_DONE) && token == best);
    CHECK(length_of(seq) == PROMPT_LEN + 1);
    OK(metrale_prefill(slow, &token, 1, &err));
    row = row_of(seq, &count);
    CHECK(memcmp(row_of(slow, &count), row, sizeof first) == 0);
    CHECK(memcmp(row, first, sizeof first) != 0);

    /* Cutting brings the earlier row back. */
    OK(metrale_seq_truncate(seq, PROMPT_LEN, &err));
    CHECK(length_of(seq) == PROMPT_LEN && memcmp(row_of(seq, &count), first, sizeof first) == 0);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_truncate(seq, PROMPT_LEN + 1, &err));
    OK(metrale_seq_truncate(seq, 0, &err));
    EXPECT(METRALE_INVALID_STATE, metrale_seq_logits(seq, &row, &count, &err));
    metrale_seq_free(seq);
    metrale_seq_free(slow);
}

static void bad_tokens_change_nothing(void) {
    static const metrale_token values[] = {-1, VOCAB, INT32_MAX, INT32_MIN};
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    size_t count = 0;
    float before[VOCAB];
    memcpy(before, row_of(seq, &count), sizeof before);
    for (size_t i = 0; i < 4; i++) {
        metrale_token tokens[3] = {5, 6, 0};
        uint64_t index = 0;
        metrale_error *err = NULL;
        tokens[2] = values[i];
        CHECK(metrale_prefill(seq, tokens, 3, &err) == METRALE_INVALID_TOKEN);
        CHECK(metrale_error_offset(err, &index) && index == 2);
        metrale_error_free(err);
    }
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_prefill(seq, NULL, 3, &err));
    EXPECT(METRALE_TOO_LARGE, metrale_prefill(seq, PROMPT, SIZE_MAX / 4, &err));
    CHECK(length_of(seq) == PROMPT_LEN && memcmp(before, row_of(seq, &count), sizeof before) == 0);
    metrale_seq_free(seq);
}

static void a_full_context(void) {
    metrale_seq_options options = {0};
    options.struct_size = sizeof options;
    options.context = PROMPT_LEN + 1;
    metrale_seq *seq = new_seq(model, &options);
    metrale_token many[PROMPT_LEN + 2];
    for (size_t i = 0; i < PROMPT_LEN + 2; i++) many[i] = 300;
    metrale_error *err = NULL;
    uint64_t available = 0;
    CHECK(metrale_prefill(seq, many, PROMPT_LEN + 2, &err) == METRALE_CONTEXT_FULL);
    CHECK(metrale_error_available(err, &available) && available == PROMPT_LEN + 1);
    metrale_error_free(err);
    CHECK(length_of(seq) == 0);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    metrale_token token = -9;
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    token = -9;
    EXPECT(METRALE_CONTEXT_FULL, metrale_decode_step(&seq, 1, &token, &err));
    CHECK(token == -9 && length_of(seq) == PROMPT_LEN + 1);
    metrale_seq_free(seq);
}

/* Sequences of different lengths in one step give what each gives alone. */
static void batches(void) {
    enum { N = 20 }; /* more than the library keeps on its stack */
    const int steps = quick ? 1 : 6;
    metrale_seq *together[N], *alone[N];
    for (size_t i = 0; i < N; i++) {
        together[i] = new_seq(model, NULL);
        alone[i] = new_seq(model, NULL);
        OK(metrale_prefill(together[i], PROMPT, 1 + i % PROMPT_LEN, &err));
        OK(metrale_prefill(alone[i], PROMPT, 1 + i % PROMPT_LEN, &err));
    }
    for (int step = 0; step < steps; step++) {
        metrale_token tokens[N];
        CHECK(metrale_decode_step(together, N, tokens, NULL) >= METRALE_OK);
        for (size_t i = 0; i < N; i++) {
            metrale_token token = -1;
            size_t count = 0;
            CHECK(metrale_decode_step(&alone[i], 1, &token, NULL) >= METRALE_OK);
            CHECK(token == tokens[i]);
            CHECK(memcmp(row_of(alone[i], &count), row_of(together[i], &count), VOCAB * sizeof(float)) == 0);
        }
    }

    /* One bad member: nobody moves. */
    metrale_seq *empty = new_seq(model, NULL);
    metrale_seq *mixed[] = {together[0], empty, together[1]};
    metrale_token tokens[3] = {-9, -9, -9};
    uint64_t before = length_of(together[0]), index = 0;
    metrale_error *err = NULL;
    CHECK(metrale_decode_step(mixed, 3, tokens, &err) == METRALE_INVALID_STATE);
    CHECK(metrale_error_offset(err, &index) && index == 1);
    metrale_error_free(err);
    mixed[1] = together[0];
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_decode_step(mixed, 3, tokens, &err));
    mixed[1] = NULL;
    EXPECT(METRALE_INVALID_HANDLE, metrale_decode_step(mixed, 3, tokens, &err));
    CHECK(tokens[0] == -9 && tokens[1] == -9 && tokens[2] == -9);
    CHECK(length_of(together[0]) == before);
    OK(metrale_decode_step(NULL, 0, NULL, &err));

    metrale_seq_free(empty);
    for (size_t i = 0; i < N; i++) {
        metrale_seq_free(together[i]);
        metrale_seq_free(alone[i]);
    }
}

/* Many steps in one call, and what an error in the middle leaves. */
static void many_steps(void) {
    enum { STEPS = 6 };
    metrale_seq *together[2], *alone[2];
    metrale_token tokens[STEPS][2], one[2];
    size_t done = 0;
    for (size_t i = 0; i < 2; i++) {
        together[i] = new_seq(model, NULL);
        alone[i] = new_seq(model, NULL);
        OK(metrale_prefill(together[i], PROMPT, 1 + i, &err));
        OK(metrale_prefill(alone[i], PROMPT, 1 + i, &err));
    }
    OK(metrale_decode(together, 2, STEPS, tokens[0], &done, &err));
    CHECK(done == STEPS);
    for (size_t step = 0; step < STEPS; step++) {
        OK(metrale_decode_step(alone, 2, one, &err));
        CHECK(memcmp(one, tokens[step], sizeof one) == 0);
    }
    for (size_t i = 0; i < 2; i++) {
        size_t count = 0;
        CHECK(memcmp(row_of(alone[i], &count), row_of(together[i], &count), VOCAB * sizeof(float)) == 0);
    }

    /* Nothing is asked for, or what cannot be. */
    uint64_t before = length_of(together[0]);
    done = 9;
    OK(metrale_decode(together, 2, 0, NULL, &done, &err));
    CHECK(done == 0);
    done = 9;
    OK(metrale_decode(NULL, 0, 7, NULL, &done, &err));
    CHECK(done == 0);
    done = 9;
    EXPECT(METRALE_TOO_LARGE, metrale_decode(together, 2, SIZE_MAX, tokens[0], &done, &err));
    EXPECT(METRALE_TOO_LARGE, metrale_decode(together, 2, SIZE_MAX / 8, tokens[0], &done, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_decode(together, 2, 1, tokens[0], NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_decode(together, 2, 1, NULL, &done, &err));
    metrale_seq *twice[2] = {together[0], together[0]};
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_decode(twice, 2, 2, tokens[0], &done, &err));
    CHECK(done == 9 && length_of(together[0]) == before);

    /* The context is full in the middle: what fits is done and stays. */
    metrale_seq_options options = {0};
    options.struct_size = sizeof options;
    options.context = PROMPT_LEN + 3;
    metrale_seq *small = new_seq(model, &options);
    OK(metrale_prefill(small, PROMPT, PROMPT_LEN, &err));
    metrale_token flat[STEPS] = {-9, -9, -9, -9, -9, -9};
    EXPECT(METRALE_CONTEXT_FULL, metrale_decode(&small, 1, STEPS, flat, &done, &err));
    CHECK(done == 3 && length_of(small) == PROMPT_LEN + 3 && flat[2] != -9 && flat[3] == -9);
    EXPECT(METRALE_CONTEXT_FULL, metrale_decode(&small, 1, STEPS, flat + 3, &done, &err));
    CHECK(done == 3 && flat[3] == -9);

    metrale_seq_free(small);
    for (size_t i = 0; i < 2; i++) {
        metrale_seq_free(together[i]);
        metrale_seq_free(alone[i]);
    }
}

static void logprobs(void) {
    metrale_seq_options options = {0};
    options.struct_size = sizeof options;
    options.flags = METRALE_SEQ_LOGPROBS;
    metrale_seq *seq = new_seq(model, &options);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    metrale_token best = best_of(seq), top[3] = {-9, -9, -9}, all[VOCAB];
    float of_best = 1, top_values[3] = {0}, values[VOCAB];
    OK(metrale_seq_logprobs(seq, &best, 1, &of_best, 3, top, top_values, &err));
    CHECK(top[0] == best && top_values[0] == of_best);
    CHECK(of_best <= 0 && top_values[0] >= top_values[1] && top_values[1] >= top_values[2]);
    for (metrale_token t = 0; t < VOCAB; t++) all[t] = t;
    OK(metrale_seq_logprobs(seq, all, VOCAB, values, 0, NULL, NULL, &err));
    double sum = 0;
    for (size_t i = 0; i < VOCAB; i++) sum += exp((double)values[i]);
    CHECK(fabs(sum - 1) < 1e-4);
    all[7] = VOCAB;
    EXPECT(METRALE_INVALID_TOKEN, metrale_seq_logprobs(seq, all, VOCAB, values, 0, NULL, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_logprobs(seq, NULL, 0, NULL, VOCAB + 1, all, values, &err));

    metrale_sequence_info info = {0};
    info.struct_size = sizeof info;
    OK(metrale_seq_info(seq, &info, &err));
    CHECK(info.length == PROMPT_LEN && info.last_token == PROMPT[PROMPT_LEN - 1] && isnan(info.last_logprob));
    metrale_token token = -1;
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    OK(metrale_seq_info(seq, &info, &err));
    CHECK(info.last_token == best && info.last_logprob == of_best);
    metrale_seq_free(seq);
}

/* With a bias that leaves only the end token: DONE, and stepping on is allowed. */
static void the_end(void) {
    metrale_sampler_stage only_end[] = {{.kind = METRALE_STAGE_BIAS, .token = 2, .value = 1e6f}, {.kind = METRALE_STAGE_GREEDY}};
    metrale_sampler *sampler = NULL;
    OK(metrale_sampler_new(only_end, 2, 0, &sampler, &err));
    metrale_seq_options options = {0};
    options.struct_size = sizeof options;
    options.sampler = sampler;
    metrale_seq *pair[2] = {new_seq(model, &options), new_seq(model, NULL)};
    options.flags = METRALE_SEQ_IGNORE_END;
    metrale_seq *deaf = new_seq(model, &options);
    OK(metrale_prefill(pair[0], PROMPT, PROMPT_LEN, &err));
    OK(metrale_prefill(pair[1], PROMPT, PROMPT_LEN, &err));
    OK(metrale_prefill(deaf, PROMPT, PROMPT_LEN, &err));
    metrale_token tokens[2] = {-1, -1};
    EXPECT(METRALE_DONE, metrale_decode_step(pair, 1, tokens, &err));
    CHECK(tokens[0] == 2 && length_of(pair[0]) == PROMPT_LEN + 1);
    OK(metrale_decode_step(pair, 2, tokens, &err)); /* the other one goes on */
    CHECK(tokens[0] == 2 && tokens[1] != 2);
    OK(metrale_decode_step(&deaf, 1, tokens, &err));
    CHECK(tokens[0] == 2);
    /* Many steps end with the first one that ends a sequence. */
    metrale_token many[8];
    size_t done = 0;
    EXPECT(METRALE_DONE, metrale_decode(pair, 1, 4, many, &done, &err));
    CHECK(done == 1 && many[0] == 2);
    OK(metrale_decode(pair, 2, 4, many, &done, &err));
    CHECK(done == 1 && many[0] == 2 && many[1] != 2);
    OK(metrale_decode(&deaf, 1, 4, many, &done, &err));
    CHECK(done == 4 && many[0] == 2 && many[3] == 2);
    metrale_seq_free(pair[0]);
    metrale_seq_free(pair[1]);
    metrale_seq_free(deaf);
    metrale_sampler_free(sampler);
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    logits_follow_all_tokens();
    bad_tokens_change_nothing();
    a_full_context();
    batches();
    many_steps();
    logprobs();
    the_end();
    metrale_free(model);
    return 0;
}
