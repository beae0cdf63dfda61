/* Runtimes: every byte of a model and of what is made of it comes from the host's allocator and goes back to it, the limit
 * is kept, records reach the host, and what was made keeps its runtime. */
#include <libgen.h>
#include <stdatomic.h>

#include "check.h"

/* A host that counts. */
struct host {
    atomic_size_t live, calls;
    atomic_int refuses;
    atomic_int records, errors;
    char last[512];
    metrale_status status;
};

static void *host_alloc(void *user, size_t size, size_t align) {
    struct host *host = user;
    if (atomic_load(&host->refuses)) return NULL;
    atomic_fetch_add(&host->live, size);
    atomic_fetch_add(&host->calls, 1);
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void host_free(void *user, void *pointer, size_t size, size_t align) {
    struct host *host = user;
    (void)align;
    atomic_fetch_sub(&host->live, size);
    free(pointer);
}

static void host_log(void *user, uint32_t level, metrale_status status, const uint8_t *text, size_t len) {
    struct host *host = user;
    atomic_fetch_add(&host->records, 1);
    CHECK(level >= METRALE_LOG_ERROR && level <= METRALE_LOG_INFO && len > 0 && memchr(text, 0, len) == NULL);
    CHECK((status < 0) == (level == METRALE_LOG_ERROR));
    if (status < 0) atomic_fetch_add(&host->errors, 1);
    host->status = status;
    snprintf(host->last, sizeof host->last, "%.*s", (int)len, (const char *)text);
}

static const char *path;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};

static metrale_runtime *lent_by(struct host *host, uint64_t cap, metrale_log_fn log) {
    metrale_runtime_options options = {0};
    options.struct_size = sizeof options;
    options.alloc = host_alloc;
    options.free = host_free;
    options.alloc_user = host;
    options.memory_cap = cap;
    options.log = log;
    options.log_user = host;
    metrale_runtime *runtime = NULL;
    OK(metrale_runtime_new(&options, &runtime, &err));
    return runtime;
}

static metrale_load_options in(const metrale_runtime *runtime) {
    metrale_load_options options = {0};
    options.struct_size = sizeof options;
    options.threads = 2;
    options.runtime = runtime;
    return options;
}

static metrale_memory_usage usage_of(const metrale_runtime *runtime) {
    metrale_memory_usage usage = {0};
    usage.struct_size = sizeof usage;
    OK(metrale_runtime_memory(runtime, &usage, &err));
    return usage;
}

/* All that can be made of a model, used a little; freed children last. */
static void use(metrale_model *model) {
    metrale_seq *seq = new_seq(model, NULL), *fork = NULL;
    metrale_text *text = NULL;
    metrale_grammar *grammar = NULL;
    metrale_text_piece piece = {0};
    uint8_t out[4096];
    metrale_token tokens[64], token;
    size_t n = 0;
    const char *json;
    piece.struct_size = sizeof piece;
    OK(metrale_grammar_regex(model, (const uint8_t *)"[a-z ]+", 7, &grammar, &err));
    OK(metrale_text_new(model, NULL, &text, &err));
    OK(metrale_tokenize(model, (const uint8_t *)"Once upon", 9, 0, tokens, 64, &n, &err));
    OK(metrale_model_info(model, &json, NULL, &err));
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    OK(metrale_seq_grammar(fork, grammar, &err));
    for (int i = 0; i < 4; i++) CHECK(metrale_decode_step(&fork, 1, &token, NULL) >= 0);
    OK(metrale_text_push(text, 403, &piece, &err));
    CHECK(metrale_chat_render(model, (const uint8_t *)"{\"messages\":[]}", 15, out, sizeof out, &n, NULL) != METRALE_INTERNAL);
    OK(metrale_step_estimate(&seq, 1, &(uint64_t){0}, &err));
    metrale_grammar_free(grammar);
    metrale_free(model);
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= 0);
    metrale_seq_free(seq);
    metrale_seq_free(fork);
    metrale_text_free(text);
}

static void every_byte_comes_back(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    size_t baseline = host.live, after_first = 0;
    CHECK(baseline > 0 && usage_of(runtime).live == baseline);
    for (int i = 0; i < (quick ? 3 : 100); i++) {
        metrale_load_options options = in(runtime);
        metrale_model *model = NULL;
        OK(metrale_load(path, &options, &model, &err));
        metrale_memory_usage usage = usage_of(runtime);
        CHECK(usage.live == host.live && usage.peak >= usage.live && usage.cap == 0);
        CHECK(usage.weights > 200000 && usage.live > usage.weights && usage.other == usage.live - usage.weights - usage.cache);
        if (i == 0) after_first = host.live;
        CHECK(host.live == after_first);
        use(model);
        CHECK(host.live == baseline && usage_of(runtime).live == baseline);
    }
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
}

/* The host's own allocator is told everything, also of what outlives the runtime's handle. */
static void children_keep_their_runtime(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    metrale_load_options options = in(runtime);
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    metrale_runtime_free(runtime);
    metrale_memory_usage usage = {0};
    usage.struct_size = sizeof usage;
    EXPECT(METRALE_INVALID_HANDLE, metrale_runtime_memory(runtime, &usage, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_load(path, &options, &model, &err));
    metrale_error *error = NULL;
    metrale_seq *seq = new_seq(model, NULL);
    CHECK(metrale_seq_truncate(seq, 5, &error) == METRALE_INVALID_ARGUMENT);
    use(model);
    metrale_seq_free(seq);
    CHECK(host.live > 0 && strlen(metrale_error_message(error)) > 0);
    metrale_error_free(error);
    CHECK(host.live == 0);
}

/* A sequence that only decodes asks for no memory, in blocking calls as in steps: what a token needs is there before it. */
static void steady_decode_allocates_nothing(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    metrale_load_options options = in(runtime);
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    metrale_seq_options ignore = {0};
    ignore.struct_size = sizeof ignore;
    ignore.flags = METRALE_SEQ_IGNORE_END;
    metrale_seq *seqs[3];
    metrale_token tokens[3];
    metrale_step_result results[3] = {{.struct_size = sizeof *results}, {.struct_size = sizeof *results}, {.struct_size = sizeof *results}};
    for (int i = 0; i < 3; i++) {
        seqs[i] = new_seq(model, &ignore);
        OK(metrale_prefill(seqs[i], PROMPT, 5 - (size_t)i, &err));
    }
    /* The first steps make what later ones use. Only the first token on a page of the cache, each of 32, asks for that page. */
    for (int i = 0; i < 70; i++) {
        OK(metrale_decode_step(&seqs[i % 3], i % 2 && i % 3 < 2 ? 2 : 1, tokens, &err));
        while (metrale_step(seqs, 3, i % 2 ? 0 : 50000, results, NULL) == METRALE_AGAIN) {}
    }
    for (int i = 0; i < 3; i++)
        while (length_of(seqs[i]) % 32 != 2) OK(metrale_decode_step(&seqs[i], 1, tokens, &err));
    const size_t live = host.live, calls = host.calls;
    for (int i = 0; i < 8; i++) {
        OK(metrale_decode_step(&seqs[i % 3], 1, tokens, &err));
        OK(metrale_decode_step(seqs, 3, tokens, &err));
        while (metrale_step(seqs, 3, i % 2 ? 0 : 50000, results, NULL) == METRALE_AGAIN) {}
        CHECK(host.live == live && host.calls == calls);
    }
    for (int i = 0; i < 3; i++) metrale_seq_free(seqs[i]);
    metrale_free(model);
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
}

/* Experts left in their file are packed when they are met: without memory for that the step is refused by name, changes nothing, and
 * goes on as if nothing had been once there is memory again. */
static void experts_without_memory(void) {
    static char copy[4096], experts[4096];
    snprintf(copy, sizeof copy, "%s", path);
    snprintf(experts, sizeof experts, "%.4000s/../models/qwen3_moe-gguf-q8_0/model.gguf", dirname(copy));
    metrale_token tokens[2][8];
    for (int refusing = 0; refusing < 2; refusing++) {
        struct host host = {0};
        metrale_runtime *runtime = lent_by(&host, 0, NULL);
        metrale_load_options options = in(runtime);
        options.expert_bytes = 1;
        metrale_model *model = NULL;
        OK(metrale_load(experts, &options, &model, &err));
        metrale_seq *seq = new_seq(model, &(metrale_seq_options){.struct_size = sizeof(metrale_seq_options), .flags = METRALE_SEQ_IGNORE_END});
        OK(metrale_prefill(seq, (metrale_token[]){1, 2, 3}, 3, &err));
        for (int i = 0; i < 8; i++) {
            /* The first steps take what every step needs. */
            if (refusing && i > 1) {
                host.refuses = 1;
                metrale_error *error = NULL;
                metrale_token token = -7;
                CHECK(metrale_decode_step(&seq, 1, &token, &error) == METRALE_OUT_OF_MEMORY);
                const char *text = metrale_error_message(error), *name = metrale_error_name(error);
                CHECK(strstr(text, "of expert ") && strstr(text, "model.gguf") && !strstr(text, "panicked"));
                CHECK(name && strstr(name, "experts.") && metrale_error_retry(error));
                CHECK(token == -7 && length_of(seq) == 3 + (uint64_t)i);
                metrale_error_free(error);
                host.refuses = 0;
            }
            OK(metrale_decode_step(&seq, 1, &tokens[refusing][i], &err));
        }
        metrale_seq_free(seq);
        metrale_free(model);
        metrale_runtime_free(runtime);
        CHECK(host.live == 0);
    }
    CHECK(memcmp(tokens[0], tokens[1], sizeof tokens[0]) == 0);
}

static void the_limit_is_kept(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    metrale_load_options options = in(runtime);
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    metrale_free(model);
    uint64_t needed = usage_of(runtime).peak;
    metrale_runtime_free(runtime);
    for (uint64_t cap = needed / 8; cap < needed; cap += needed / 8) {
        runtime = lent_by(&host, cap, NULL);
        options = in(runtime);
        EXPECT(METRALE_OUT_OF_MEMORY, metrale_load(path, &options, &model, &err));
        CHECK(usage_of(runtime).peak <= cap && usage_of(runtime).cap == cap);
        metrale_runtime_free(runtime);
        CHECK(host.live == 0);
    }
    runtime = lent_by(&host, needed, NULL);
    options = in(runtime);
    OK(metrale_load(path, &options, &model, &err));
    metrale_free(model);
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
    metrale_runtime_options tiny = {0};
    tiny.struct_size = sizeof tiny;
    tiny.memory_cap = 1;
    EXPECT(METRALE_OUT_OF_MEMORY, metrale_runtime_new(&tiny, &runtime, &err));
}

/* A plan that does not fit is refused before weights are read, with both numbers. */
static void a_plan_beyond_the_cap_is_refused(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    metrale_load_options options = in(runtime);
    metrale_memory_plan plan = {0};
    metrale_model *model = NULL;
    metrale_error *error = NULL;
    uint64_t wanted = 0, available = 0;
    plan.struct_size = sizeof plan;
    OK(metrale_plan(path, &options, 1, &plan, &err));
    options.memory = plan.total - 1;
    CHECK(metrale_load(path, &options, &model, &error) == METRALE_OUT_OF_MEMORY);
    CHECK(metrale_error_wanted(error, &wanted) && metrale_error_available(error, &available));
    CHECK(wanted == plan.total && available == plan.total - 1 && usage_of(runtime).peak < plan.weights + usage_of(runtime).live);
    metrale_error_free(error);
    options.memory = plan.total;
    OK(metrale_load(path, &options, &model, &err));
    metrale_free(model);
    options.precision = "layers.0=f32,head=bf16";
    OK(metrale_load(path, &options, &model, &err));
    metrale_free(model);
    options.precision = "layers.0=what";
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_load(path, &options, &model, &err));
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
}

static void records_reach_the_host(void) {
    struct host host = {0}, second = {0};
    metrale_runtime *runtime = lent_by(&host, 0, host_log);
    metrale_load_options options = in(runtime);
    metrale_model *model = NULL;
    metrale_error *error = NULL;
    CHECK(metrale_load("/no/such/file", &options, &model, &error) == METRALE_NOT_FOUND);
    CHECK(host.errors == 1 && host.status == METRALE_NOT_FOUND && strcmp(host.last, metrale_error_message(error)) == 0);
    metrale_error_free(error);
    OK(metrale_load(path, &options, &model, &err));
    CHECK(host.records > 2 && host.errors == 1);
    metrale_seq *seq = new_seq(model, NULL);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_truncate(seq, 5, &err));
    CHECK(host.errors == 2 && host.status == METRALE_INVALID_ARGUMENT);
    OK(metrale_runtime_log_set(runtime, METRALE_LOG_ERROR, host_log, &second, &err));
    CHECK(metrale_seq_truncate(seq, 5, NULL) == METRALE_INVALID_ARGUMENT);
    CHECK(host.errors == 2 && second.errors == 1);
    OK(metrale_runtime_log_set(runtime, 0, NULL, NULL, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_seq_truncate(seq, 5, &err));
    CHECK(host.errors == 2 && second.errors == 1);
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_runtime_log_set(runtime, 5, host_log, &host, &err));
    metrale_seq_free(seq);
    metrale_free(model);
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
}

static void trimming_gives_memory_back(void) {
    struct host host = {0};
    metrale_runtime *runtime = lent_by(&host, 0, NULL);
    metrale_load_options options = in(runtime);
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    OK(metrale_runtime_trim(runtime, &err));
    size_t before = host.live;
    metrale_seq *kept = new_seq(model, NULL), *gone = NULL;
    OK(metrale_prefill(kept, PROMPT, 5, &err));
    metrale_token token, same;
    metrale_seq *control = NULL;
    OK(metrale_seq_fork(kept, &control, &err));
    for (int i = 0; i < 40; i++) {
        gone = new_seq(model, NULL);
        OK(metrale_prefill(gone, PROMPT, 5, &err));
        if (i % 2) metrale_seq_free(gone);
        else metrale_seq_free(control), control = gone;
    }
    metrale_seq_free(control);
    metrale_memory_usage full = usage_of(runtime);
    OK(metrale_runtime_trim(runtime, &err));
    metrale_memory_usage trimmed = usage_of(runtime);
    CHECK(trimmed.live < full.live && trimmed.cache < full.cache && trimmed.weights == full.weights && trimmed.cache > 0);
    gone = new_seq(model, NULL);
    OK(metrale_prefill(gone, PROMPT, 5, &err));
    metrale_free(model);
    for (int i = 0; i < 5; i++) {
        CHECK(metrale_decode_step(&kept, 1, &token, NULL) >= 0 && metrale_decode_step(&gone, 1, &same, NULL) >= 0 && token == same);
        OK(metrale_runtime_trim(runtime, &err));
    }
    metrale_seq_free(gone);
    CHECK(before > 0);
    metrale_seq_free(kept);
    metrale_runtime_free(runtime);
    CHECK(host.live == 0);
}

static void options_are_read_with_care(void) {
    metrale_runtime_options options = {0};
    metrale_runtime *runtime = NULL;
    struct host host = {0};
    options.struct_size = sizeof options;
    options.alloc = host_alloc;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(&options, &runtime, &err));
    options.alloc = NULL;
    options.free = host_free;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(&options, &runtime, &err));
    options.free = NULL;
    options.flags = 1;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_runtime_new(&options, &runtime, &err));
    options.flags = 0;
    options.log_level = 9;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_runtime_new(&options, &runtime, &err));
    options.log_level = 0;
    options.struct_size = 3;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(&options, &runtime, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(NULL, NULL, &err));
    CHECK(runtime == NULL);
    /* The system's memory, counted. */
    OK(metrale_runtime_new(NULL, &runtime, &err));
    metrale_load_options load = in(runtime);
    metrale_model *model = NULL;
    uint64_t before = usage_of(runtime).live;
    OK(metrale_load(path, &load, &model, &err));
    CHECK(usage_of(runtime).live > before + 200000);
    use(model);
    CHECK(usage_of(runtime).live == before);
    metrale_runtime_free(runtime);
    metrale_runtime_free(runtime);
    metrale_runtime_free(NULL);
    EXPECT(METRALE_INVALID_HANDLE, metrale_runtime_trim(runtime, &err));
    /* Two runtimes at once keep their bytes apart. */
    struct host hosts[2] = {{0}, {0}};
    metrale_runtime *two[2] = {lent_by(&hosts[0], 0, NULL), lent_by(&hosts[1], 0, NULL)};
    metrale_seq *seqs[2];
    metrale_token tokens[2];
    for (int i = 0; i < 2; i++) {
        load = in(two[i]);
        OK(metrale_load(path, &load, &model, &err));
        seqs[i] = new_seq(model, NULL);
        OK(metrale_prefill(seqs[i], PROMPT, 5, &err));
        metrale_free(model);
        metrale_runtime_free(two[i]);
    }
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_decode_step(seqs, 2, tokens, &err));
    for (int i = 0; i < 2; i++) CHECK(metrale_decode_step(&seqs[i], 1, &tokens[i], NULL) >= 0);
    CHECK(tokens[0] == tokens[1]);
    metrale_seq_free(seqs[0]);
    CHECK(hosts[0].live == 0 && hosts[1].live > 0);
    metrale_seq_free(seqs[1]);
    CHECK(hosts[1].live == 0 && host.live == 0);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    every_byte_comes_back();
    children_keep_their_runtime();
    steady_decode_allocates_nothing();
    experts_without_memory();
    the_limit_is_kept();
    a_plan_beyond_the_cap_is_refused();
    records_reach_the_host();
    trimming_gives_memory_back();
    options_are_read_with_care();
    return 0;
}
