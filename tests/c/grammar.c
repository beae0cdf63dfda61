/* Grammars: what is chosen follows them, ends are statuses, state carries them, and nonsense is refused. */
#include <ctype.h>

#include "check.h"

static metrale_model *model;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
#define PROMPT_LEN (sizeof PROMPT / sizeof PROMPT[0])

typedef metrale_status compile_fn(const metrale_model *, const uint8_t *, size_t, metrale_grammar **, metrale_error **);

static metrale_grammar *compiled(compile_fn *compile, const char *source) {
    metrale_grammar *grammar = NULL;
    OK(compile(model, (const uint8_t *)source, strlen(source), &grammar, &err));
    CHECK(grammar != NULL);
    return grammar;
}

/* A sequence with a prompt, drawing at random, under a grammar that is freed at once. */
static metrale_seq *seq_under(compile_fn *compile, const char *source, uint64_t seed) {
    const metrale_sampler_stage stage = {.kind = METRALE_STAGE_TEMPERATURE, .value = 1.5f};
    metrale_sampler *sampler = NULL;
    OK(metrale_sampler_new(&stage, 1, seed, &sampler, &err));
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_seq_sampling(seq, sampler, &err));
    metrale_sampler_free(sampler);
    metrale_grammar *grammar = compiled(compile, source);
    OK(metrale_seq_grammar(seq, grammar, &err));
    metrale_grammar_free(grammar);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    return seq;
}

/* Steps until the end token; the bytes of what came before it. */
static size_t run(metrale_seq *seq, char *out, size_t capacity) {
    metrale_token tokens[128];
    size_t count = 0, len = 0;
    metrale_status status = METRALE_OK;
    while (status != METRALE_DONE) {
        CHECK(count < sizeof tokens / sizeof tokens[0]);
        metrale_error *err = NULL;
        status = metrale_decode_step(&seq, 1, &tokens[count], &err);
        if (status < 0) fprintf(stderr, "step: %s\n", metrale_error_message(err));
        CHECK(status >= 0);
        count++;
    }
    for (size_t i = 0; i + 1 < count; i++) {
        size_t n = 0;
        OK(metrale_token_bytes(model, tokens[i], (uint8_t *)out + len, capacity - len - 1, &n, &err));
        len += n;
    }
    out[len] = 0;
    return len;
}

static void what_is_chosen_follows(void) {
    for (uint64_t seed = 1; seed <= (quick ? 2 : 20); seed++) {
        char text[512];
        metrale_seq *seq = seq_under(metrale_grammar_regex, "[0-9]{3}-[a-c]{2,4}", seed);
        size_t len = run(seq, text, sizeof text);
        CHECK(len >= 6 && len <= 8 && text[3] == '-');
        for (size_t i = 0; i < 3; i++) CHECK(isdigit((unsigned char)text[i]));
        for (size_t i = 4; i < len; i++) CHECK(text[i] >= 'a' && text[i] <= 'c');
        metrale_seq_free(seq);

        seq = seq_under(metrale_grammar_json_schema, "{\"enum\": [\"one\", 2, null, [true]]}", seed);
        run(seq, text, sizeof text);
        CHECK(!strcmp(text, "\"one\"") || !strcmp(text, "2") || !strcmp(text, "null") || !strcmp(text, "[true]"));
        metrale_seq_free(seq);

        seq = seq_under(metrale_grammar_lark, "start: \"<\" a \">\" | NAME\na: \"<\" NAME \">\" | NAME\nNAME: /[x-z]/", seed);
        len = run(seq, text, sizeof text);
        CHECK(len % 2 == 1 && text[len / 2] >= 'x' && text[len / 2] <= 'z');
        for (size_t i = 0; i < len / 2; i++) CHECK(text[i] == '<' && text[len - 1 - i] == '>');
        metrale_seq_free(seq);
    }
}

static void the_end_is_a_status(void) {
    char text[64];
    metrale_seq *seq = seq_under(metrale_grammar_gbnf, "root ::= \"ab\"", 3);
    CHECK(run(seq, text, sizeof text) == 2 && !strcmp(text, "ab"));
    uint64_t length = length_of(seq);
    metrale_token token = -7;
    for (int i = 0; i < 3; i++) {
        EXPECT(METRALE_GRAMMAR_DONE, metrale_decode_step(&seq, 1, &token, &err));
        CHECK(token == -7 && length_of(seq) == length);
    }
    OK(metrale_seq_grammar(seq, NULL, &err));
    metrale_status status = metrale_decode_step(&seq, 1, &token, NULL);
    CHECK(status >= METRALE_OK && length_of(seq) == length + 1);
    metrale_seq_free(seq);
}

/* In a batch, one sequence at its end leaves the other as it was. */
static void a_batch_is_all_or_nothing(void) {
    char text[64];
    metrale_seq *ended = seq_under(metrale_grammar_gbnf, "root ::= \"a\"", 3);
    run(ended, text, sizeof text);
    metrale_seq *live = seq_under(metrale_grammar_regex, "[a-z]{5}", 4), *twin = seq_under(metrale_grammar_regex, "[a-z]{5}", 4);
    metrale_seq *pair[2] = {live, ended};
    metrale_token tokens[2];
    for (int i = 0; i < 3; i++) {
        metrale_error *err = NULL;
        uint64_t index = 0;
        CHECK(metrale_decode_step(pair, 2, tokens, &err) == METRALE_GRAMMAR_DONE);
        CHECK(metrale_error_offset(err, &index) && index == 1);
        metrale_error_free(err);
    }
    char other[64];
    run(live, text, sizeof text);
    run(twin, other, sizeof other);
    CHECK(strlen(text) == 5 && !strcmp(text, other));
    metrale_seq_free(live);
    metrale_seq_free(twin);
    metrale_seq_free(ended);
}

static void state_carries_it(void) {
    char text[64], again[64];
    metrale_token token = 0;
    metrale_seq *seq = seq_under(metrale_grammar_regex, "[a-z]{3}[0-9]{3}", 11), *fork = NULL;
    uint64_t mark = 0;
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) == METRALE_OK);
    uint64_t length = length_of(seq);
    OK(metrale_seq_mark(seq, &mark, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    run(seq, text, sizeof text);
    run(fork, again, sizeof again);
    CHECK(!strcmp(text, again));
    OK(metrale_seq_rollback(seq, mark, &err));
    run(seq, again, sizeof again);
    CHECK(!strcmp(text, again));
    /* Cut where the mark was: the grammar goes back with the tokens. */
    OK(metrale_seq_truncate(seq, (size_t)length, &err));
    size_t rest = run(seq, again, sizeof again);
    CHECK(rest == strlen(text) && isdigit((unsigned char)again[rest - 1]));
    metrale_seq_free(fork);
    metrale_seq_free(seq);
}

/* Saved in the middle of a grammar, and restored where the same one is set, the way goes on; elsewhere it is refused. */
static void bytes_carry_it(void) {
    static const char SOURCE[] = "root ::= [a-m]{40} pair+\npair ::= [a-m] pair [n-z] | \":\"";
    char text[128], again[128];
    metrale_seq *seq = seq_under(metrale_grammar_gbnf, SOURCE, 5);
    metrale_token token = 0;
    for (int i = 0; i < 3; i++) CHECK(metrale_decode_step(&seq, 1, &token, NULL) == METRALE_OK);
    size_t size = 0;
    EXPECT(METRALE_MORE, metrale_seq_save(seq, NULL, 0, &size, &err));
    uint8_t *bytes = malloc(size);
    OK(metrale_seq_save(seq, bytes, size, &size, &err));

    metrale_seq *other = seq_under(metrale_grammar_gbnf, "root ::= \"ab\"", 5);
    uint64_t length = length_of(other);
    EXPECT(METRALE_MISMATCH, metrale_seq_restore(other, bytes, size, &err));
    CHECK(length_of(other) == length && run(other, again, sizeof again) == 2);
    OK(metrale_seq_grammar(other, NULL, &err));
    EXPECT(METRALE_MISMATCH, metrale_seq_restore(other, bytes, size, &err));

    /* Compiled again, and already followed for a while. */
    metrale_seq *same = seq_under(metrale_grammar_gbnf, SOURCE, 5);
    CHECK(metrale_decode_step(&same, 1, &token, NULL) == METRALE_OK);
    OK(metrale_seq_restore(same, bytes, size, &err));
    CHECK(length_of(same) == length_of(seq));
    for (int i = 0; i < 12; i++) {
        metrale_token a = -1, b = -1;
        metrale_status status = metrale_decode_step(&seq, 1, &a, NULL);
        CHECK(metrale_decode_step(&same, 1, &b, NULL) == status && a == b);
        if (status != METRALE_OK) break;
    }
    /* At its end: the end is restored too. */
    metrale_seq *ended = seq_under(metrale_grammar_regex, "[ab]{2}", 7), *twin = seq_under(metrale_grammar_regex, "[ab]{2}", 7);
    run(ended, text, sizeof text);
    free(bytes);
    EXPECT(METRALE_MORE, metrale_seq_save(ended, NULL, 0, &size, &err));
    bytes = malloc(size);
    OK(metrale_seq_save(ended, bytes, size, &size, &err));
    OK(metrale_seq_restore(twin, bytes, size, &err));
    EXPECT(METRALE_GRAMMAR_DONE, metrale_decode_step(&twin, 1, &token, &err));
    free(bytes);
    metrale_seq_free(seq);
    metrale_seq_free(other);
    metrale_seq_free(same);
    metrale_seq_free(ended);
    metrale_seq_free(twin);
}

/* Row 17: one sequence's dead end is its own; the others of a step go on. */
static void a_dead_end_is_its_own(void) {
    metrale_seq *ended = seq_under(metrale_grammar_gbnf, "root ::= \"a\"", 3), *live = seq_under(metrale_grammar_regex, "[a-z]{60}", 4);
    char text[64];
    run(ended, text, sizeof text);
    metrale_seq *pair[] = {ended, live};
    for (int i = 0; i < 4; i++) {
        metrale_step_result results[2] = {{.struct_size = sizeof results[0]}, {.struct_size = sizeof results[0]}};
        uint64_t before = length_of(live);
        metrale_status status = metrale_step(pair, 2, 0, results, NULL);
        CHECK(status >= METRALE_OK && results[0].status == METRALE_GRAMMAR_DONE && results[0].token == -1);
        CHECK(results[1].status == METRALE_OK && length_of(live) == before + 1);
    }
    metrale_seq_free(ended);
    metrale_seq_free(live);
}

/* Rows 28 and 31 through the C surface: depth and counts, in every notation, on the caller's stack. */
static void depth_and_counts_end(void) {
    static const size_t DEPTHS[] = {10, 1000, 100000};
    static const struct {
        compile_fn *compile;
        const char *before, *open, *middle, *close;
    } FORMS[] = {
        {metrale_grammar_json_schema, "", "{\"items\":", "true", "}"},
        {metrale_grammar_gbnf, "root ::= ", "(", "\"a\"", ")"},
        {metrale_grammar_lark, "start: ", "(", "\"a\"", ")"},
        {metrale_grammar_regex, "", "(", "a", ")"},
    };
    for (size_t f = 0; f < sizeof FORMS / sizeof *FORMS; f++) {
        for (size_t d = 0; d < 3; d++) {
            size_t open = strlen(FORMS[f].open), len = 0;
            char *source = malloc(DEPTHS[d] * (open + 1) + 64);
            len += (size_t)sprintf(source, "%s", FORMS[f].before);
            for (size_t i = 0; i < DEPTHS[d]; i++) len += (size_t)sprintf(source + len, "%s", FORMS[f].open);
            len += (size_t)sprintf(source + len, "%s", FORMS[f].middle);
            for (size_t i = 0; i < DEPTHS[d]; i++) source[len++] = FORMS[f].close[0];
            metrale_grammar *grammar = NULL;
            /* 100,000 schemas are more than a source may have bytes; either is the limit. */
            EXPECT(d == 0 ? METRALE_OK : METRALE_LIMIT_EXCEEDED, FORMS[f].compile(model, (const uint8_t *)source, len, &grammar, &err));
            metrale_grammar_free(grammar);
            free(source);
        }
    }
    static const char *const COUNTS[] = {
        "{\"type\":\"array\",\"maxItems\":1000000000,\"items\":{\"type\":\"array\",\"maxItems\":1000000000}}",
        "{\"type\":\"string\",\"maxLength\":1000000000}",
        "{\"type\":\"array\",\"minItems\":10000,\"items\":{\"type\":\"string\",\"minLength\":10000}}",
    };
    for (size_t i = 0; i < sizeof COUNTS / sizeof *COUNTS; i++) {
        metrale_grammar *grammar = NULL;
        metrale_error *err = NULL;
        metrale_status status = metrale_grammar_json_schema(model, (const uint8_t *)COUNTS[i], strlen(COUNTS[i]), &grammar, &err);
        CHECK(status == METRALE_OK || status == METRALE_LIMIT_EXCEEDED);
        if (status == METRALE_OK) {
            metrale_seq *seq = new_seq(model, NULL);
            OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
            OK(metrale_seq_grammar(seq, grammar, &err));
            metrale_token token = 0;
            for (int n = 0; n < 5; n++) {
                metrale_status stepped = metrale_decode_step(&seq, 1, &token, NULL);
                CHECK(stepped >= METRALE_OK || stepped == METRALE_LIMIT_EXCEEDED);
            }
            metrale_seq_free(seq);
        }
        metrale_error_free(err);
        metrale_grammar_free(grammar);
    }
}

static void nonsense_is_refused(void) {
    const struct {
        compile_fn *compile;
        const char *source;
        metrale_status status;
    } bad[] = {
        {metrale_grammar_regex, "*a", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_regex, "a{1", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_regex, "", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_json_schema, "{\"type\":", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_json_schema, "{\"type\":\"nothing\"}", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_json_schema, "{\"type\":\"string\",\"pattern\":\"(\"}", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_gbnf, "root ::= nowhere", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_gbnf, "start: \"a\"", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_lark, "start: (", METRALE_INVALID_GRAMMAR},
        {metrale_grammar_lark, "root ::= \"a\"", METRALE_INVALID_GRAMMAR},
    };
    metrale_grammar *grammar = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        EXPECT(bad[i].status, bad[i].compile(model, (const uint8_t *)bad[i].source, strlen(bad[i].source), &grammar, &err));
    CHECK(grammar == NULL);
    const uint8_t *a = (const uint8_t *)"a";
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_grammar_regex(model, NULL, 1, &grammar, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_grammar_regex(model, a, 1, NULL, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_grammar_regex(NULL, a, 1, &grammar, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_grammar_regex(model, (const uint8_t *)"\xff", 1, &grammar, &err));
    EXPECT(METRALE_LIMIT_EXCEEDED, metrale_grammar_regex(model, a, SIZE_MAX, &grammar, &err));
    metrale_seq *seq = new_seq(model, NULL);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_grammar(seq, (metrale_grammar *)(void *)seq, &err));
    grammar = compiled(metrale_grammar_regex, "a");
    metrale_grammar_free(grammar);
    metrale_grammar_free(grammar);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_grammar(seq, grammar, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_grammar(NULL, NULL, &err));
    metrale_seq_free(seq);
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    what_is_chosen_follows();
    the_end_is_a_status();
    a_batch_is_all_or_nothing();
    state_carries_it();
    bytes_carry_it();
    a_dead_end_is_its_own();
    depth_and_counts_end();
    nonsense_is_refused();
    metrale_free(model);
    return 0;
}
