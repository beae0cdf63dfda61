/* Samplers: seeds decide, stages do what they say, and nonsense is refused by its index. */
#include "check.h"

#include <math.h>

static metrale_model *model;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
enum { MOST = 24 };
static size_t steps = MOST;

static metrale_sampler *sampler_of(const metrale_sampler_stage *stages, size_t count, uint64_t seed) {
    metrale_sampler *sampler = NULL;
    OK(metrale_sampler_new(stages, count, seed, &sampler, &err));
    return sampler;
}

/* `steps` tokens from a new sequence with this sampler, and this seed unless 0. */
static void generate(const metrale_sampler *sampler, uint64_t seed, metrale_token *out) {
    metrale_seq_options options = {0};
    options.struct_size = sizeof options;
    options.sampler = sampler;
    options.seed = seed;
    metrale_seq *seq = new_seq(model, &options);
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    for (size_t i = 0; i < steps; i++) CHECK(metrale_decode_step(&seq, 1, out + i, NULL) >= METRALE_OK);
    metrale_seq_free(seq);
}

static bool same(const metrale_token *a, const metrale_token *b) {
    return memcmp(a, b, steps * sizeof *a) == 0;
}

static void seeds_decide(void) {
    const metrale_sampler_stage hot = {.kind = METRALE_STAGE_TEMPERATURE, .value = 2.0f};
    metrale_sampler *one = sampler_of(&hot, 1, 1), *two = sampler_of(&hot, 1, 2);
    metrale_token a[MOST], b[MOST];
    generate(one, 0, a);
    generate(one, 0, b);
    CHECK(same(a, b));
    generate(two, 0, b);
    CHECK(!same(a, b));
    generate(two, 1, b);
    CHECK(same(a, b));
    metrale_sampler_free(one);
    metrale_sampler_free(two);
}

static void greedy_in_all_its_forms(void) {
    const metrale_sampler_stage forms[][2] = {
        {{.kind = METRALE_STAGE_GREEDY}, {.kind = METRALE_STAGE_GREEDY}},
        {{.kind = METRALE_STAGE_TEMPERATURE}, {.kind = METRALE_STAGE_TOP_K, .count = 40}},
        {{.kind = METRALE_STAGE_TOP_K, .count = 1}, {.kind = METRALE_STAGE_TEMPERATURE, .value = 3.0f}},
        {{.kind = METRALE_STAGE_TOP_P}, {.kind = METRALE_STAGE_MIN_P}},
        {{.kind = METRALE_STAGE_MIN_P, .value = 1.0f}, {.kind = METRALE_STAGE_GREEDY}},
    };
    metrale_token expected[MOST], got[MOST];
    generate(NULL, 0, expected);
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        metrale_sampler *sampler = sampler_of(forms[i], 2, 9);
        generate(sampler, 0, got);
        CHECK(same(got, expected));
        metrale_sampler_free(sampler);
    }
    metrale_sampler *empty = sampler_of(NULL, 0, 0);
    generate(empty, 0, got);
    CHECK(same(got, expected));
    metrale_sampler_free(empty);
}

/* A huge penalty over all tokens: no token twice, and none of the prompt's. */
static void penalties(void) {
    const metrale_sampler_stage stages[] = {{.kind = METRALE_STAGE_PRESENCE, .value = 1e6f}, {.kind = METRALE_STAGE_GREEDY}};
    metrale_sampler *sampler = sampler_of(stages, 2, 0);
    metrale_token got[MOST];
    generate(sampler, 0, got);
    for (size_t i = 0; i < steps; i++) {
        for (size_t j = 0; j < i; j++) CHECK(got[i] != got[j]);
        for (int j = 0; j < 5; j++) CHECK(got[i] != PROMPT[j]);
    }
    metrale_sampler_free(sampler);
}

static void changing_the_sampler(void) {
    const metrale_sampler_stage stages[] = {{.kind = METRALE_STAGE_BIAS, .token = 7, .value = 1e6f}};
    metrale_sampler *sampler = sampler_of(stages, 1, 0);
    metrale_seq *seq = new_seq(model, NULL);
    metrale_token token = -1;
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    OK(metrale_seq_sampling(seq, sampler, &err));
    metrale_sampler_free(sampler);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_sampling(seq, sampler, &err));
    OK(metrale_decode_step(&seq, 1, &token, &err));
    CHECK(token == 7);
    OK(metrale_seq_sampling(seq, NULL, &err));
    metrale_token best = best_of(seq);
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK && token == best);
    metrale_seq_free(seq);
}

/* All tokens ruled out: an error, and the sequence can go on with another sampler. */
static void nothing_left(void) {
    enum { VOCAB = 512 };
    static metrale_sampler_stage stages[VOCAB];
    for (metrale_token t = 0; t < VOCAB; t++) {
        stages[t].kind = METRALE_STAGE_BIAS;
        stages[t].token = t;
        stages[t].value = -INFINITY;
    }
    metrale_sampler *none = sampler_of(stages, VOCAB, 0), *one = sampler_of(stages, VOCAB - 1, 0);
    metrale_seq *seq = new_seq(model, NULL);
    metrale_token token = -9;
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    OK(metrale_seq_sampling(seq, none, &err));
    EXPECT(METRALE_NO_VALID_TOKEN, metrale_decode_step(&seq, 1, &token, &err));
    CHECK(token == -9 && length_of(seq) == 5);
    OK(metrale_seq_sampling(seq, one, &err));
    OK(metrale_decode_step(&seq, 1, &token, &err));
    CHECK(token == VOCAB - 1);
    metrale_seq_free(seq);
    metrale_sampler_free(none);
    metrale_sampler_free(one);
}

/* A step that fails at its second sequence gives the first one's random number back. */
static void failed_steps_spend_nothing(void) {
    const metrale_sampler_stage hot = {.kind = METRALE_STAGE_TEMPERATURE, .value = 50.0f};
    static metrale_sampler_stage none[512];
    for (metrale_token t = 0; t < 512; t++) none[t] = (metrale_sampler_stage){.kind = METRALE_STAGE_BIAS, .token = t, .value = -INFINITY};
    metrale_sampler *random = sampler_of(&hot, 1, 5), *nothing = sampler_of(none, 512, 0);
    metrale_seq_options options = {.struct_size = sizeof options, .sampler = random, .flags = METRALE_SEQ_LOGPROBS};
    metrale_seq *first = new_seq(model, &options), *twin = new_seq(model, &options);
    options.sampler = nothing;
    metrale_seq *second = new_seq(model, &options);
    metrale_seq *pair[] = {first, second};
    OK(metrale_prefill(first, PROMPT, 5, &err));
    OK(metrale_prefill(second, PROMPT, 5, &err));
    OK(metrale_prefill(twin, PROMPT, 5, &err));
    for (int i = 0; i < 5; i++) {
        metrale_token tokens[2] = {-9, -9}, token = -9;
        metrale_error *err = NULL;
        uint64_t index = 0;
        CHECK(metrale_decode_step(pair, 2, tokens, &err) == METRALE_NO_VALID_TOKEN);
        CHECK(metrale_error_offset(err, &index) && index == 1 && tokens[0] == -9);
        metrale_error_free(err);
        CHECK(metrale_decode_step(&first, 1, tokens, NULL) >= METRALE_OK);
        CHECK(metrale_decode_step(&twin, 1, &token, NULL) >= METRALE_OK && token == tokens[0]);
    }
    metrale_seq_free(first);
    metrale_seq_free(second);
    metrale_seq_free(twin);
    metrale_sampler_free(random);
    metrale_sampler_free(nothing);
}

struct hook {
    uint64_t calls;
    size_t history;
    int32_t answer;
    metrale_token wanted;
    metrale_seq *other;
};

/* Wants one token, which it raises above all; or fails; or works on another sequence meanwhile. */
static int32_t wishes(void *user, float *logits, size_t count, const metrale_token *history, size_t history_count) {
    struct hook *hook = user;
    hook->calls++;
    hook->history = history_count;
    if (hook->answer) return hook->answer;
    CHECK(count == 512 && history[0] == PROMPT[0]);
    logits[hook->wanted] = 1e6f;
    if (hook->other) {
        metrale_token token = -1;
        metrale_step_result result = {.struct_size = sizeof result};
        CHECK(metrale_decode_step(&hook->other, 1, &token, NULL) >= METRALE_OK);
        EXPECT(METRALE_INVALID_STATE, metrale_step(&hook->other, 1, 0, &result, &err));
    }
    return 0;
}

static void hooks(void) {
    const metrale_sampler_stage stages[] = {{.kind = METRALE_STAGE_HOOK}, {.kind = METRALE_STAGE_TOP_K, .count = 1}};
    const metrale_sampler_stage cut[] = {{.kind = METRALE_STAGE_TOP_K, .count = 1}, {.kind = METRALE_STAGE_HOOK}};
    metrale_sampler *sampler = sampler_of(stages, 2, 1), *without = sampler_of(cut, 1, 1);
    struct hook hook = {.wanted = 300};
    metrale_seq_options options = {.struct_size = sizeof options, .sampler = sampler};
    metrale_seq *seq = NULL, *other = new_seq(model, NULL), *fork = NULL;
    metrale_token tokens[2] = {-9, -9};
    EXPECT(METRALE_INVALID_STATE, metrale_seq_new(model, &options, &seq, &err));
    EXPECT(METRALE_INVALID_STATE, metrale_sampler_set_hook(without, wishes, &hook, &err));
    OK(metrale_sampler_set_hook(sampler, wishes, &hook, &err));
    seq = new_seq(model, &options);
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    OK(metrale_prefill(other, PROMPT, 5, &err));
    OK(metrale_decode_step(&seq, 1, tokens, &err));
    CHECK(tokens[0] == 300 && hook.calls == 1 && hook.history == 5);

    /* It fails: its sequence alone, and unchanged. */
    metrale_seq *pair[] = {seq, other};
    hook.answer = METRALE_BUSY;
    EXPECT(METRALE_BUSY, metrale_decode_step(&seq, 1, tokens, &err));
    hook.answer = 17;
    EXPECT(METRALE_CANCELLED, metrale_decode_step(&seq, 1, tokens, &err));
    metrale_step_result results[2] = {{.struct_size = sizeof results[0]}, {.struct_size = sizeof results[0]}};
    OK(metrale_step(pair, 2, 0, results, &err));
    CHECK(results[0].status == METRALE_CANCELLED && results[0].token == -1 && results[1].status >= METRALE_OK);
    CHECK(length_of(seq) == 6 && length_of(other) == 6);
    hook.answer = 0;

    /* In the middle of a step it may work on another sequence, but not step. */
    hook.other = other;
    OK(metrale_step(&seq, 1, 0, results, &err));
    CHECK(results[0].token == 300 && length_of(other) == 7);
    hook.other = NULL;

    /* Forks have it; other samplers and those made before it was taken away do not change. */
    OK(metrale_seq_fork(seq, &fork, &err));
    hook.wanted = 41;
    OK(metrale_sampler_set_hook(sampler, NULL, NULL, &err));
    EXPECT(METRALE_INVALID_STATE, metrale_seq_sampling(other, sampler, &err));
    metrale_sampler_free(sampler);
    EXPECT(METRALE_INVALID_HANDLE, metrale_sampler_set_hook(sampler, wishes, &hook, &err));
    OK(metrale_decode_step(&fork, 1, tokens, &err));
    CHECK(tokens[0] == 41);

    /* At its place: behind a cut the wish comes too late. */
    metrale_sampler *late = sampler_of(cut, 2, 1);
    OK(metrale_sampler_set_hook(late, wishes, &hook, &err));
    OK(metrale_seq_sampling(other, late, &err));
    metrale_token best = best_of(other);
    CHECK(best != 41 && metrale_decode_step(&other, 1, tokens, NULL) >= METRALE_OK && tokens[0] == best);
    metrale_sampler_free(late);
    metrale_sampler_free(without);
    metrale_seq_free(seq);
    metrale_seq_free(other);
    metrale_seq_free(fork);
}

/* The state of stages goes with the sequence: marks, forks, and bytes. */
static void state_of_stages(void) {
    const metrale_sampler_stage stages[] = {
        {.kind = METRALE_STAGE_DRY, .value = 2.0f, .second = 1.75f, .length = 1},
        {.kind = METRALE_STAGE_XTC, .value = 0.05f, .second = 0.5f},
        {.kind = METRALE_STAGE_MIROSTAT_V2, .value = 4.0f, .second = 0.3f},
    };
    metrale_sampler *sampler = sampler_of(stages, 3, 21);
    metrale_seq_options options = {.struct_size = sizeof options, .sampler = sampler, .flags = METRALE_SEQ_LOGPROBS | METRALE_SEQ_IGNORE_END};
    metrale_seq *seq = new_seq(model, &options), *fork = NULL, *restored = new_seq(model, &options);
    metrale_token first[MOST], again[MOST];
    uint64_t mark = 0;
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    for (size_t i = 0; i < steps; i++) OK(metrale_decode_step(&seq, 1, first, &err));
    OK(metrale_seq_mark(seq, &mark, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    size_t size = 0;
    EXPECT(METRALE_MORE, metrale_seq_save(seq, NULL, 0, &size, &err));
    uint8_t *bytes = malloc(size);
    OK(metrale_seq_save(seq, bytes, size, &size, &err));
    OK(metrale_seq_restore(restored, bytes, size, &err));
    metrale_sequence_info a = {.struct_size = sizeof a}, b = a;
    OK(metrale_seq_info(seq, &a, &err));
    OK(metrale_seq_info(restored, &b, &err));
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    for (size_t i = 0; i < steps; i++) OK(metrale_decode_step(&seq, 1, first + i, &err));
    OK(metrale_seq_rollback(seq, mark, &err));
    metrale_seq *copies[] = {seq, fork, restored};
    for (int c = 0; c < 3; c++) {
        for (size_t i = 0; i < steps; i++) OK(metrale_decode_step(&copies[c], 1, again + i, &err));
        CHECK(same(first, again));
    }
    /* Every byte of the first part is looked at. */
    for (size_t i = 0; i < 64; i++) {
        bytes[i] ^= 4;
        metrale_error *err = NULL;
        CHECK(metrale_seq_restore(restored, bytes, size, &err) < METRALE_OK);
        metrale_error_free(err);
        bytes[i] ^= 4;
    }
    free(bytes);
    metrale_sampler_free(sampler);
    for (int c = 0; c < 3; c++) metrale_seq_free(copies[c]);
}

static void refusals(void) {
    const metrale_sampler_stage bad[] = {
        {.kind = 0},
        {.kind = 999},
        {.kind = METRALE_STAGE_TEMPERATURE, .value = -1.0f},
        {.kind = METRALE_STAGE_TEMPERATURE, .value = NAN},
        {.kind = METRALE_STAGE_TEMPERATURE, .value = 1.0f, .count = 1},
        {.kind = METRALE_STAGE_TOP_P, .value = 1.5f},
        {.kind = METRALE_STAGE_MIN_P, .value = -0.5f},
        {.kind = METRALE_STAGE_REPETITION},
        {.kind = METRALE_STAGE_GREEDY, .value = 1.0f},
        {.kind = METRALE_STAGE_GREEDY, .reserved = {0, 1}},
        {.kind = METRALE_STAGE_BIAS, .token = -1},
        {.kind = METRALE_STAGE_BIAS, .token = 1, .value = INFINITY},
        {.kind = METRALE_STAGE_TYPICAL, .value = 2.0f},
        {.kind = METRALE_STAGE_TOP_N_SIGMA, .value = -1.0f},
        {.kind = METRALE_STAGE_TOP_N_SIGMA, .value = 1.0f, .second = 1.0f},
        {.kind = METRALE_STAGE_XTC, .value = 0.1f, .second = 1.5f},
        {.kind = METRALE_STAGE_XTC, .value = 0.1f, .second = 0.5f, .length = 1},
        {.kind = METRALE_STAGE_MIROSTAT, .value = 3.0f, .second = 0.1f},
        {.kind = METRALE_STAGE_MIROSTAT_V2, .value = 3.0f, .second = 0.1f, .count = 100},
        {.kind = METRALE_STAGE_DRY, .value = 0.8f, .second = 1.75f},
        {.kind = METRALE_STAGE_DRY, .value = 0.8f, .length = 2},
        {.kind = METRALE_STAGE_DRY_BREAKER, .token = -1},
        {.kind = METRALE_STAGE_HOOK, .value = 1.0f},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        metrale_sampler_stage stages[2] = {{.kind = METRALE_STAGE_TOP_K, .count = 5}, bad[i]};
        metrale_sampler *sampler = NULL;
        metrale_error *err = NULL;
        uint64_t index = 0;
        CHECK(metrale_sampler_new(stages, 2, 0, &sampler, &err) < METRALE_OK);
        CHECK(sampler == NULL && metrale_error_offset(err, &index) && index == 1);
        metrale_error_free(err);
    }
    metrale_sampler *sampler = NULL;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_sampler_new(NULL, 2, 0, &sampler, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_sampler_new(bad, 0, 0, NULL, &err));

    /* A token outside this model's vocabulary is found when model and sampler meet. */
    const metrale_sampler_stage outside = {.kind = METRALE_STAGE_BIAS, .token = 512, .value = 1.0f};
    sampler = sampler_of(&outside, 1, 0);
    metrale_seq_options options = {.struct_size = sizeof options, .sampler = sampler};
    metrale_seq *seq = NULL;
    EXPECT(METRALE_INVALID_TOKEN, metrale_seq_new(model, &options, &seq, &err));
    CHECK(seq == NULL);
    metrale_sampler_free(sampler);
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    if (quick) steps = 6;
    seeds_decide();
    greedy_in_all_its_forms();
    penalties();
    changing_the_sampler();
    nothing_left();
    failed_steps_spend_nothing();
    hooks();
    state_of_stages();
    refusals();
    metrale_free(model);
    return 0;
}
