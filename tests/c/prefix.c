/* What a model keeps of its sequences' beginnings, what sequences count, and tokens taken out of the middle. */
#include <math.h>

#include "check.h"

enum { LONG = 120 };
static const char *path;
static metrale_token prompt[LONG];

static metrale_model *load_with(uint64_t prefix_bytes) {
    metrale_load_options options = {0};
    metrale_model *model = NULL;
    options.struct_size = sizeof options;
    options.threads = 1;
    options.prefix_bytes = prefix_bytes;
    OK(metrale_load(path, &options, &model, &err));
    return model;
}

static metrale_stats stats_of(const metrale_seq *seq) {
    metrale_stats stats = {0};
    stats.struct_size = sizeof stats;
    OK(metrale_seq_stats(seq, &stats, &err));
    return stats;
}

static metrale_model_counts counts_of(const metrale_model *model) {
    metrale_model_counts counts = {0};
    counts.struct_size = sizeof counts;
    OK(metrale_model_stats(model, &counts, &err));
    return counts;
}

static void same_row(const metrale_seq *a, const metrale_seq *b) {
    size_t na = 0, nb = 0;
    const float *ra = row_of(a, &na), *rb = row_of(b, &nb);
    CHECK(na == nb && memcmp(ra, rb, na * sizeof *ra) == 0);
}

static void prompts_that_begin_alike_are_computed_once(void) {
    metrale_model *plain = load_with(0), *model = load_with(1 << 20);
    metrale_seq *fresh = new_seq(plain, NULL), *first = new_seq(model, NULL), *second = new_seq(model, NULL), *third = new_seq(model, NULL);
    OK(metrale_prefill(fresh, prompt, LONG, &err));
    OK(metrale_prefill(first, prompt, LONG, &err));
    CHECK(stats_of(first).reused == 0);
    OK(metrale_prefill(second, prompt, LONG, &err));
    same_row(fresh, second);
    metrale_stats stats = stats_of(second);
    CHECK(stats.read == LONG && stats.reused == LONG - 1 && stats.passes == 1 && stats.generated == 0 && stats.cancelled == 0);
    CHECK(stats.prefill_ns > 0 && stats.decode_ns == 0);

    /* The step says what it took up as read, and the rest in the same call. */
    metrale_step_result result = {0};
    result.struct_size = sizeof result;
    OK(metrale_seq_feed(third, prompt, LONG, &err));
    CHECK(length_of(third) == 0);
    OK(metrale_step(&third, 1, 0, &result, &err));
    CHECK(result.read == LONG && result.queued == 0 && length_of(third) == LONG);
    same_row(fresh, third);
    CHECK(stats_of(third).reused == LONG - 1);

    metrale_model_counts counts = counts_of(model);
    CHECK(counts.prefix_budget == 1 << 20 && counts.prefix_bytes > 0 && counts.prefix_bytes <= counts.prefix_budget);
    CHECK(counts.prefix_hits == 2 && counts.prefix_misses == 1 && counts.prefix_reused == 2 * (LONG - 1) && counts.prefix_tokens == LONG);

    /* A freed sequence leaves what it produced. */
    metrale_token produced[6], again[LONG + 6];
    memcpy(again, prompt, sizeof prompt);
    for (int i = 0; i < 6; i++) CHECK(metrale_decode_step(&first, 1, &produced[i], NULL) >= METRALE_OK);
    CHECK(stats_of(first).generated == 6 && stats_of(first).decode_ns > 0);
    memcpy(again + LONG, produced, sizeof produced);
    metrale_seq_free(first);
    CHECK(counts_of(model).prefix_tokens == LONG + 6);
    first = new_seq(model, NULL);
    OK(metrale_prefill(first, again, LONG + 6, &err));
    CHECK(stats_of(first).reused == LONG + 5);
    for (int i = 0; i < 6; i++) CHECK(metrale_decode_step(&fresh, 1, &produced[i], NULL) >= METRALE_OK && produced[i] == again[LONG + i]);
    same_row(fresh, first);
    CHECK(counts_of(plain).prefix_budget == 0 && counts_of(plain).prefix_misses == 0);

    metrale_seq_free(fresh);
    metrale_seq_free(first);
    metrale_seq_free(second);
    metrale_seq_free(third);
    /* What is kept goes with the model; sequences may be freed after its handle. */
    metrale_free(plain);
    metrale_free(model);
}

static void a_budget_is_kept(void) {
    metrale_model *model = load_with(200000);
    for (metrale_token i = 0; i < (quick ? 10 : 40); i++) {
        metrale_seq *seq = new_seq(model, NULL);
        prompt[3] = 100 + i;
        OK(metrale_prefill(seq, prompt, LONG, &err));
        metrale_seq_free(seq);
        CHECK(counts_of(model).prefix_bytes <= 200000);
    }
    CHECK(counts_of(model).prefix_evicted > 0);
    metrale_free(model);
}

/* A runtime's trim forgets prompts; sequences that took them up go on. */
static void trimming_forgets(void) {
    metrale_runtime *runtime = NULL;
    OK(metrale_runtime_new(NULL, &runtime, &err));
    metrale_load_options options = {0};
    options.struct_size = sizeof options;
    options.threads = 2;
    options.prefix_bytes = 1 << 22;
    options.runtime = runtime;
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    metrale_seq *first = new_seq(model, NULL), *second = new_seq(model, NULL), *third = new_seq(model, NULL);
    OK(metrale_prefill(first, prompt, LONG, &err));
    metrale_seq_free(first);
    OK(metrale_prefill(second, prompt, LONG, &err));
    CHECK(stats_of(second).reused > 0 && counts_of(model).prefix_entries > 0);
    OK(metrale_runtime_trim(runtime, &err));
    CHECK(counts_of(model).prefix_entries == 0 && counts_of(model).prefix_bytes == 0);
    OK(metrale_prefill(third, prompt, LONG, &err));
    CHECK(stats_of(third).reused == 0);
    same_row(second, third);
    metrale_seq_free(second);
    metrale_seq_free(third);
    metrale_free(model);
    metrale_runtime_free(runtime);
}

static void forks_share_bytes(void) {
    metrale_model *model = load_with(0);
    metrale_seq *seq = new_seq(model, NULL), *fork = NULL;
    CHECK(stats_of(seq).kv_owned == 0 && stats_of(seq).kv_shared == 0);
    OK(metrale_prefill(seq, prompt, LONG, &err));
    metrale_stats alone = stats_of(seq);
    CHECK(alone.kv_owned > 0 && alone.kv_shared == 0 && alone.state_owned > 0 && alone.state_shared == 0);
    OK(metrale_seq_fork(seq, &fork, &err));
    metrale_stats shared = stats_of(fork);
    CHECK(shared.kv_shared == alone.kv_owned && shared.kv_owned == 0 && shared.read == 0 && shared.passes == 0);
    CHECK(shared.state_shared > 0);
    metrale_token token;
    CHECK(metrale_decode_step(&fork, 1, &token, NULL) >= METRALE_OK);
    CHECK(stats_of(fork).kv_owned > 0 && stats_of(fork).kv_owned + stats_of(fork).kv_shared == alone.kv_owned);
    metrale_seq_free(seq);
    CHECK(stats_of(fork).kv_owned == alone.kv_owned && stats_of(fork).kv_shared == 0);
    /* A cancel that meets waiting work is counted. */
    OK(metrale_seq_feed(fork, prompt, 5, &err));
    OK(metrale_cancel(fork, &err));
    metrale_step_result result = {0};
    result.struct_size = sizeof result;
    OK(metrale_step(&fork, 1, 0, &result, &err));
    CHECK(result.status == METRALE_CANCELLED && stats_of(fork).cancelled == 1);
    metrale_seq_free(fork);
    metrale_free(model);
}

static void the_middle_goes(void) {
    metrale_model *model = load_with(0);
    metrale_seq *seq = new_seq(model, NULL);
    uint64_t early = 0, late = 0;
    OK(metrale_prefill(seq, prompt, 10, &err));
    OK(metrale_seq_mark(seq, &early, &err));
    OK(metrale_prefill(seq, prompt + 10, LONG - 10, &err));
    OK(metrale_seq_mark(seq, &late, &err));
    OK(metrale_seq_shift(seq, 20, 50, &err));
    CHECK(length_of(seq) == LONG - 50);
    size_t same = 0;
    OK(metrale_seq_match(seq, prompt, LONG, &same, &err));
    CHECK(same >= 20);
    metrale_token token;
    for (int i = 0; i < 5; i++) CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    size_t count = 0;
    const float *row = row_of(seq, &count);
    for (size_t i = 0; i < count; i++) CHECK(isfinite(row[i]));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_rollback(seq, late, &err));
    OK(metrale_seq_rollback(seq, early, &err));
    CHECK(length_of(seq) == 10);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_shift(seq, 5, 6, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_shift(seq, SIZE_MAX, 2, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_shift(NULL, 0, 1, &err));
    CHECK(length_of(seq) == 10);
    OK(metrale_seq_shift(seq, 5, 5, &err));
    CHECK(length_of(seq) == 5);
    metrale_seq_free(seq);
    metrale_free(model);
}

static void fingerprints_tell_models_apart(void) {
    metrale_model *a = load_with(0), *b = load_with(0), *exact = NULL;
    metrale_load_options options = {0};
    options.struct_size = sizeof options;
    options.threads = 1;
    options.compute = METRALE_COMPUTE_F32;
    OK(metrale_load(path, &options, &exact, &err));
    char digits[3][33] = {{0}};
    size_t len = 0;
    EXPECT(METRALE_MORE, metrale_model_fingerprint(a, NULL, 0, &len, &err));
    CHECK(len == 32);
    OK(metrale_model_fingerprint(a, (uint8_t *)digits[0], 32, &len, &err));
    OK(metrale_model_fingerprint(b, (uint8_t *)digits[1], 32, &len, &err));
    OK(metrale_model_fingerprint(exact, (uint8_t *)digits[2], 32, &len, &err));
    CHECK(strlen(digits[0]) == 32 && strspn(digits[0], "0123456789abcdef") == 32);
    CHECK(strcmp(digits[0], digits[1]) == 0 && strcmp(digits[0], digits[2]) != 0);

    /* A state goes to a model of the same fingerprint; for another the error names both. */
    static uint8_t bytes[1 << 20];
    metrale_seq *from = new_seq(a, NULL), *to = new_seq(b, NULL), *other = new_seq(exact, NULL);
    OK(metrale_prefill(from, prompt, LONG, &err));
    OK(metrale_seq_save(from, bytes, sizeof bytes, &len, &err));
    OK(metrale_seq_restore(to, bytes, len, &err));
    same_row(from, to);
    metrale_error *err = NULL;
    CHECK(metrale_seq_restore(other, bytes, len, &err) == METRALE_MISMATCH);
    CHECK(strstr(metrale_error_message(err), digits[0]) && strstr(metrale_error_message(err), digits[2]));
    metrale_error_free(err);
    CHECK(length_of(other) == 0);
    metrale_seq_free(from);
    metrale_seq_free(to);
    metrale_seq_free(other);
    metrale_free(a);
    metrale_free(b);
    metrale_free(exact);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    for (int i = 0; i < LONG; i++) prompt[i] = i == 0 ? 1 : 259 + i * 37 % 200;
    prompts_that_begin_alike_are_computed_once();
    a_budget_is_kept();
    trimming_forgets();
    forks_share_bytes();
    the_middle_goes();
    fingerprints_tell_models_apart();
    return 0;
}
