/* Allocations that fail, in the C library and in a host's allocator: for each kind of call, the n-th allocation alone and all
 * from the n-th on, for every n until the call needs no more; and all of them on a thread that was never here before. The
 * process lives; the status is METRALE_OUT_OF_MEMORY, or a success; after an error the sequence is bit for bit what it was, and
 * after a success it is what it should be; the host's allocator has back what the call took. The last line holds the counts. */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

#include "faults.h"

#ifdef __GLIBC__
#include "refuse.h"

static const char *path, *folder;
static enum refuser who;
static metrale_runtime *runtime;
static metrale_model *model, *other;
/* One that keeps beginnings of its sequences. */
static metrale_model *keeper;
static metrale_token LONG_PROMPT[50];
static uint64_t kept[7];
static metrale_seq *witness, *seq, *ruled, *longer;
static metrale_sampler *sampler;
static metrale_grammar *grammar;
static metrale_source *source;
static metrale_text *stream;
static uint64_t expected, after_prefill, after_step, after_stages, mark;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
static metrale_token token;
static uint8_t *saved, *buffer, *file;
static size_t saved_len, size, file_size;
enum { BUFFER = 1 << 20 };
static metrale_error *err;

static const char TEXT[] = "Once upon a time, there was a little girl named Lily.";
static const char REQUEST[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"variables\":{\"a\":[1,2,{\"b\":\"c\"}]}}";
static const char SCHEMA[] = "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^[a-c]+$\"},"
                             "\"b\":{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":3}}},\"required\":[\"a\"]}";
static const char GBNF[] = "root ::= item+\nitem ::= [a-z]+ \" \" (\"x\" | \"y\"){2,5}";

static metrale_load_options load_options(void) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2, .runtime = runtime};
    return options;
}

/* The calls. Each leaves the sequence as its `digest` says when it succeeds; NULL for unchanged. */
static metrale_status do_load(void) {
    metrale_load_options options = load_options();
    metrale_model *made = NULL;
    metrale_status status = metrale_load(path, &options, &made, &err);
    metrale_free(made);
    return status;
}
static metrale_status do_load_folder(void) {
    metrale_load_options options = load_options();
    metrale_model *made = NULL;
    metrale_status status = metrale_load(folder, &options, &made, &err);
    metrale_free(made);
    return status;
}
static int64_t read_at(void *user, uint64_t offset, void *into, size_t len) {
    memcpy(into, (uint8_t *)user + offset, len);
    return (int64_t)len;
}
static metrale_status from_source(metrale_source *from) {
    metrale_load_options options = load_options();
    metrale_model *made = NULL;
    metrale_status status = metrale_load_source(from, &options, &made, &err);
    metrale_source_free(from);
    metrale_free(made);
    return status;
}
static metrale_status do_load_reader(void) {
    metrale_source *from = NULL;
    metrale_status status = metrale_source_reader(read_at, file, file_size, 0, &from, &err);
    return status < 0 ? status : from_source(from);
}
static metrale_status do_load_copy(void) {
    metrale_source *from = NULL;
    metrale_status status = metrale_source_buffer(file, file_size, METRALE_SOURCE_COPY, &from, &err);
    return status < 0 ? status : from_source(from);
}
static metrale_status do_sources(void) {
    metrale_source *from = NULL;
    metrale_status status = metrale_source_path(path, METRALE_SOURCE_READ, &from, &err);
    metrale_source_free(from);
    if (status < 0) return status;
    FILE *opened = fopen("/proc/self/exe", "rb");
    if (opened == NULL) return METRALE_OUT_OF_MEMORY;
    status = metrale_source_fd(fileno(opened), 64, 4096, 0, &from, &err);
    fclose(opened);
    metrale_source_free(from);
    return status;
}
static metrale_status do_load_steps(void) {
    metrale_load_options options = load_options();
    metrale_loading *loading = NULL;
    metrale_model *made = NULL;
    metrale_status status = metrale_load_begin(source, &options, &loading, &err);
    if (status < 0) return status;
    do status = metrale_load_step(loading, 0, NULL, &made, &err);
    while (status == METRALE_AGAIN);
    metrale_loading_free(loading);
    metrale_free(made);
    return status;
}
static metrale_status do_plan(void) {
    metrale_load_options options = load_options();
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    return metrale_plan(path, &options, 1, &plan, &err);
}
static metrale_status do_probe(void) { return metrale_model_probe(path, buffer, BUFFER, &size, &err); }
static metrale_status do_runtime(void) {
    metrale_runtime_options options = {.struct_size = sizeof options, .alloc = host_alloc, .free = host_free};
    metrale_runtime *made = NULL;
    metrale_status status = metrale_runtime_new(&options, &made, &err);
    metrale_memory_usage usage = {.struct_size = sizeof usage};
    if (status == METRALE_OK) status = metrale_runtime_memory(made, &usage, &err);
    if (status == METRALE_OK) status = metrale_runtime_trim(made, &err);
    if (status == METRALE_OK) status = metrale_runtime_log_set(made, 0, NULL, NULL, &err);
    metrale_runtime_free(made);
    return status;
}
static metrale_status do_seq_new(void) {
    metrale_seq *made = NULL;
    metrale_seq_options options = {.struct_size = sizeof options, .sampler = sampler};
    metrale_status status = metrale_seq_new(model, &options, &made, &err);
    metrale_seq_free(made);
    return status;
}
static metrale_status do_prefill(void) { return metrale_prefill(seq, PROMPT + 1, 4, &err); }
static metrale_status do_decode(void) { return metrale_decode_step(&seq, 1, &token, &err); }
static metrale_status do_feed(void) { return metrale_seq_feed(seq, PROMPT, 5, &err); }
static metrale_status do_step(void) {
    metrale_step_result result = {.struct_size = sizeof result};
    metrale_status status = metrale_step(&seq, 1, 0, &result, &err);
    return status < 0 ? status : result.status;
}
static metrale_status do_estimate(void) {
    uint64_t ns = 0;
    return metrale_step_estimate(&seq, 1, &ns, &err);
}
static metrale_status do_fork(void) {
    metrale_seq *made = NULL;
    metrale_status status = metrale_seq_fork(seq, &made, &err);
    metrale_seq_free(made);
    return status;
}
static metrale_status do_mark(void) { return metrale_seq_mark(seq, &mark, &err); }
static metrale_status do_match(void) { return metrale_seq_match(seq, PROMPT, 5, &size, &err); }
static metrale_status do_save(void) { return metrale_seq_save(seq, buffer, BUFFER, &size, &err); }
static metrale_status do_restore(void) { return metrale_seq_restore(seq, saved, saved_len, &err); }
static metrale_status do_sampling(void) { return metrale_seq_sampling(seq, sampler, &err); }
static metrale_status do_rules(void) { return metrale_seq_grammar(seq, grammar, &err); }
static metrale_status do_decode_ruled(void) { return metrale_decode_step(&ruled, 1, &token, &err); }
static metrale_status do_logprobs(void) {
    float out[4];
    metrale_token best[4];
    return metrale_seq_logprobs(seq, PROMPT, 4, out, 4, best, out, &err);
}
static metrale_status do_tokenize(void) {
    return metrale_tokenize(model, (const uint8_t *)TEXT, sizeof TEXT - 1, 1, (metrale_token *)(void *)buffer, BUFFER / 4, &size, &err);
}
static metrale_status do_detokenize(void) { return metrale_detokenize(model, PROMPT, 5, 0, buffer, BUFFER, &size, &err); }
static metrale_status do_token_bytes(void) { return metrale_token_bytes(model, 403, buffer, BUFFER, &size, &err); }
static metrale_status do_render(void) {
    return metrale_chat_render(model, (const uint8_t *)REQUEST, sizeof REQUEST - 1, buffer, BUFFER, &size, &err);
}
static metrale_status do_text_new(void) {
    metrale_text *made = NULL;
    metrale_text_options options = {.struct_size = sizeof options, .stops = (const uint8_t *)"a\0b", .stops_len = 3};
    metrale_status status = metrale_text_new(model, &options, &made, &err);
    metrale_text_free(made);
    return status;
}
static metrale_status do_push(void) {
    metrale_text_piece piece = {.struct_size = sizeof piece};
    metrale_status status = metrale_text_push(stream, 403, &piece, &err);
    return status < 0 ? status : metrale_text_flush(stream, &piece, &err);
}
static metrale_status do_sampler(void) {
    metrale_sampler_stage stage = {.kind = METRALE_STAGE_TOP_K, .count = 4};
    metrale_sampler *made = NULL;
    metrale_status status = metrale_sampler_new(&stage, 1, 1, &made, &err);
    metrale_sampler_free(made);
    return status;
}
static metrale_status do_folder(void) {
    metrale_source *made = NULL, *part = NULL;
    metrale_status status = metrale_source_folder(0, &made, &err);
    if (status == METRALE_OK) status = metrale_source_path(path, 0, &part, &err);
    if (status == METRALE_OK) status = metrale_source_add(made, "model.gguf", part, &err);
    metrale_source_free(part);
    metrale_source_free(made);
    return status;
}
static metrale_status do_source_look(void) {
    metrale_source *source = NULL;
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    metrale_status status = metrale_source_path(path, METRALE_SOURCE_READ, &source, &err);
    if (status == METRALE_OK) status = metrale_source_probe(source, buffer, BUFFER, &size, &err);
    if (status == METRALE_OK) status = metrale_source_plan(source, NULL, 1, &plan, &err);
    metrale_source_free(source);
    return status;
}
/* A fork's pages are copied before they are changed. */
static metrale_status do_shift(void) {
    metrale_seq *fork = NULL;
    metrale_status status = metrale_seq_fork(longer, &fork, &err);
    if (status >= 0) status = metrale_seq_shift(fork, 1, 20, &err);
    metrale_seq_free(fork);
    return status;
}
/* Prompts that begin alike: looking up, taking up, keeping and giving way, at the end of a prompt and of a sequence. */
static metrale_status do_prefix(void) {
    static metrale_token last;
    metrale_seq *made = NULL;
    LONG_PROMPT[40] = 300 + last++ % 7;
    metrale_status status = metrale_seq_new(keeper, NULL, &made, &err);
    if (status >= 0) status = metrale_prefill(made, LONG_PROMPT, 50, &err);
    if (status >= 0) status = metrale_prefill(made, LONG_PROMPT, 30, &err);
    uint64_t digest = status >= 0 ? digest_of(made) : 0;
    metrale_seq_free(made);
    if (status >= 0 && digest != kept[LONG_PROMPT[40] - 300]) {
        fprintf(stderr, "a prompt was taken up wrongly\n");
        exit(1);
    }
    return status;
}
static metrale_status do_embed(void) { return metrale_embed(model, PROMPT, 5, NULL, (float *)(void *)buffer, BUFFER / 4, &size, &err); }
static metrale_status do_fingerprint(void) { return metrale_model_fingerprint(model, buffer, BUFFER, &size, &err); }
/* Every stage there is: their buffers are made by the first token. */
static int32_t looks(void *user, float *logits, size_t count, const metrale_token *history, size_t history_count) {
    (void)user, (void)logits, (void)history;
    return count + history_count == 0;
}
static metrale_status do_stages(void) {
    const metrale_sampler_stage stages[] = {
        {.kind = METRALE_STAGE_REPETITION, .value = 1.1f, .count = 8},
        {.kind = METRALE_STAGE_DRY, .value = 0.8f, .second = 1.75f, .length = 2},
        {.kind = METRALE_STAGE_DRY_BREAKER, .token = 13},
        {.kind = METRALE_STAGE_HOOK},
        {.kind = METRALE_STAGE_TOP_N_SIGMA, .value = 3.0f},
        {.kind = METRALE_STAGE_TYPICAL, .value = 0.95f},
        {.kind = METRALE_STAGE_XTC, .value = 0.1f, .second = 0.5f},
        {.kind = METRALE_STAGE_MIROSTAT, .value = 3.0f, .second = 0.1f, .count = 100},
    };
    metrale_sampler *made = NULL;
    metrale_status status = metrale_sampler_new(stages, sizeof stages / sizeof *stages, 1, &made, &err);
    if (status == METRALE_OK) status = metrale_sampler_set_hook(made, looks, NULL, &err);
    if (status == METRALE_OK) status = metrale_seq_sampling(seq, made, &err);
    metrale_sampler_free(made);
    return status == METRALE_OK ? metrale_decode_step(&seq, 1, &token, &err) : status;
}
static metrale_status do_info(void) {
    const char *json;
    return metrale_model_info(other, &json, NULL, &err);
}
static metrale_status do_meta(void) { return metrale_model_meta(model, "vocab", buffer, BUFFER, &size, &err); }
static metrale_status do_retain(void) {
    metrale_model *made = NULL;
    metrale_status status = metrale_model_retain(model, &made, &err);
    metrale_free(made);
    return status;
}
typedef metrale_status compile_fn(const metrale_model *, const uint8_t *, size_t, metrale_grammar **, metrale_error **);
static metrale_status compiles(compile_fn *compile, const metrale_model *of, const char *text) {
    metrale_grammar *made = NULL;
    metrale_status status = compile(of, (const uint8_t *)text, strlen(text), &made, &err);
    metrale_grammar_free(made);
    return status;
}
static metrale_status do_schema(void) { return compiles(metrale_grammar_json_schema, model, SCHEMA); }
static metrale_status do_gbnf(void) { return compiles(metrale_grammar_gbnf, model, GBNF); }
static metrale_status do_lark(void) { return compiles(metrale_grammar_lark, model, "start: /[a-c]+/ (\" x\" | \" y\")~2..5"); }
static metrale_status do_regex(void) { return compiles(metrale_grammar_regex, model, "[0-9]{3}-[a-c]{2,400}"); }
static metrale_status do_first_grammar(void) { return compiles(metrale_grammar_regex, other, "[0-9]+"); }
static metrale_status do_error(void) {
    metrale_status status = metrale_seq_truncate(seq, 100, &err);
    CHECK(strlen(metrale_error_detail(err)) > 0 && strlen(metrale_error_message(err)) > 0);
    return status;
}

/* A model of its own for calls that make something once. */
static void with_other(void) {
    metrale_load_options options = load_options();
    OK(metrale_load(path, &options, &other, &err));
}
static void with_rules(void) {
    OK(metrale_seq_fork(witness, &ruled, &err));
    OK(metrale_seq_grammar(ruled, grammar, &err));
}

static const struct operation {
    const char *name;
    metrale_status (*run)(void);
    const uint64_t *digest;
    void (*prepare)(void);
    /* Takes long, so that later points are farther apart. */
    int slow;
} OPERATIONS[] = {
    {"seq_new", do_seq_new, NULL, NULL, 0},
    {"prefill", do_prefill, &after_prefill, NULL, 0},
    {"decode_step", do_decode, &after_step, NULL, 0},
    {"feed", do_feed, NULL, NULL, 0},
    {"step", do_step, &after_step, NULL, 0},
    {"step_estimate", do_estimate, NULL, NULL, 0},
    {"fork", do_fork, NULL, NULL, 0},
    {"mark", do_mark, NULL, NULL, 0},
    {"match", do_match, NULL, NULL, 0},
    {"save", do_save, NULL, NULL, 0},
    {"restore", do_restore, NULL, NULL, 0},
    {"shift", do_shift, NULL, NULL, 0},
    {"prefix", do_prefix, NULL, NULL, 0},
    {"embed", do_embed, NULL, NULL, 0},
    {"fingerprint", do_fingerprint, NULL, NULL, 0},
    {"sampling", do_sampling, NULL, NULL, 0},
    {"stages", do_stages, &after_stages, NULL, 0},
    {"seq_grammar", do_rules, NULL, NULL, 0},
    {"decode under a grammar", do_decode_ruled, NULL, with_rules, 0},
    {"logprobs", do_logprobs, NULL, NULL, 0},
    {"tokenize", do_tokenize, NULL, NULL, 0},
    {"detokenize", do_detokenize, NULL, NULL, 0},
    {"token_bytes", do_token_bytes, NULL, NULL, 0},
    {"chat_render", do_render, NULL, NULL, 0},
    {"text_new", do_text_new, NULL, NULL, 0},
    {"text_push", do_push, NULL, NULL, 0},
    {"sampler_new", do_sampler, NULL, NULL, 0},
    {"model_info", do_info, NULL, with_other, 1},
    {"model_meta", do_meta, NULL, NULL, 0},
    {"model_retain", do_retain, NULL, NULL, 0},
    {"grammar_json_schema", do_schema, NULL, NULL, 0},
    {"grammar_gbnf", do_gbnf, NULL, NULL, 0},
    {"grammar_lark", do_lark, NULL, NULL, 0},
    {"grammar_regex", do_regex, NULL, NULL, 0},
    {"first grammar", do_first_grammar, NULL, with_other, 1},
    {"error_detail", do_error, NULL, NULL, 0},
    {"runtime", do_runtime, NULL, NULL, 0},
    {"sources", do_sources, NULL, NULL, 0},
    {"folder source", do_folder, NULL, NULL, 0},
    {"look at a source", do_source_look, NULL, NULL, 1},
    {"probe", do_probe, NULL, NULL, 0},
    {"plan", do_plan, NULL, NULL, 1},
    {"load", do_load, NULL, NULL, 1},
    {"load of a folder", do_load_folder, NULL, NULL, 1},
    {"load from a reader", do_load_reader, NULL, NULL, 1},
    {"load from a copy", do_load_copy, NULL, NULL, 1},
    {"load in steps", do_load_steps, NULL, NULL, 1},
};
enum { OPERATION_COUNT = sizeof OPERATIONS / sizeof *OPERATIONS };

static long points, errors, without, threads;

static void fresh(const struct operation *o) {
    OK(metrale_seq_fork(witness, &seq, &err));
    OK(metrale_text_new(model, NULL, &stream, &err));
    if (o->prepare) o->prepare();
    err = NULL;
}

static void done(void) {
    metrale_error_free(err);
    metrale_seq_free(seq);
    metrale_seq_free(ruled);
    metrale_text_free(stream);
    metrale_free(other);
    ruled = NULL;
    other = NULL;
}

/* Pieces of the host's allocator that are in use, but for what is kept for later: a helper may come for the first time at any call, and
 * its buffers stay. */
static size_t held(void) {
    if (runtime != NULL) OK(metrale_runtime_trim(runtime, &err));
    return atomic_load(&host_pieces);
}

/* What the host's allocator has given must be back. */
static void balanced(const struct operation *o, size_t before, long n) {
    size_t now = held();
    if (now <= before) return;
    fprintf(stderr, "%s: allocation %ld: %zu pieces were not given back\n", o->name, n, now - before);
    exit(1);
}

struct attempt {
    const struct operation *o;
    long n;
    int all;
    metrale_status status;
    int reached;
};

static void *attempt(void *argument) {
    struct attempt *a = argument;
    refuse(who, a->n, a->all);
    a->status = a->o->run();
    a->reached = refuse_end();
    return NULL;
}

/* One call with refusals; whether they were reached. */
static int try(const struct operation *o, metrale_status usual, long n, int all, int on_new_thread) {
    fresh(o);
    printf("%s %ld%s%s\n", o->name, n, all ? " and all after it" : "", on_new_thread ? " on a new thread" : "");
    struct attempt a = {.o = o, .n = n, .all = all};
    if (on_new_thread) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, attempt, &a) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        attempt(&a);
    }
    if (a.status < 0 && a.status != usual && a.status != METRALE_OUT_OF_MEMORY) {
        fprintf(stderr, "%s: allocation %ld: %s: %s\n", o->name, n, metrale_status_name(a.status), metrale_error_message(err));
        exit(1);
    }
    uint64_t wanted = a.status < 0 || o->digest == NULL ? expected : *o->digest;
    if (digest_of(seq) != wanted || digest_of(witness) != expected) {
        fprintf(stderr, "%s: allocation %ld: %s, and a sequence is not what it should be\n", o->name, n, metrale_status_name(a.status));
        exit(1);
    }
    points++;
    *(a.status == METRALE_OUT_OF_MEMORY ? &errors : &without) += 1;
    done();
    return a.reached;
}

static void sweep(const struct operation *o, int all) {
    long before_refused = atomic_load(&refused), before_points = points, before_errors = errors;
    long most = o->slow ? (quick ? 10 : 200) : (quick ? 50 : 400), share = quick && o->slow ? 3 : 16;
    fresh(o);
    metrale_status usual = o->run();
    done();
    size_t pieces = held();
    /* Every n at first; later ones in growing steps, so that a long load ends. */
    for (long n = 0; try(o, usual, n, all, 0); n += n < most ? 1 : 1 + n / share) balanced(o, pieces, n);
    if (all) {
        try(o, usual, 0, 1, 1);
        threads++;
    }
    balanced(o, pieces, -1);
    printf("%s, %s: %ld points, %ld out of memory, %ld refusals\n", o->name, who == HOST ? "the host's allocator" : "the C library",
           points - before_points, errors - before_errors, atomic_load(&refused) - before_refused);
}

static void sweeps(enum refuser whose) {
    metrale_runtime_options lent = {.struct_size = sizeof lent, .alloc = host_alloc, .free = host_free};
    who = whose;
    if (who == HOST) OK(metrale_runtime_new(&lent, &runtime, &err));
    metrale_load_options options = load_options();
    OK(metrale_load(path, &options, &model, &err));
    witness = new_seq(model, NULL);
    OK(metrale_prefill(witness, PROMPT, 1, &err));
    expected = digest_of(witness);
    OK(metrale_seq_save(witness, saved, BUFFER, &saved_len, &err));
    OK(metrale_grammar_regex(model, (const uint8_t *)"[a-z ]+", 7, &grammar, &err));
    const struct operation none = {.name = "none"};
    fresh(&none);
    OK(metrale_prefill(seq, PROMPT + 1, 4, &err));
    after_prefill = digest_of(seq);
    done();
    fresh(&none);
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    after_step = digest_of(seq);
    done();
    for (int i = 0; i < 50; i++) LONG_PROMPT[i] = 259 + i * 37 % 200;
    longer = new_seq(model, NULL);
    OK(metrale_prefill(longer, LONG_PROMPT, 50, &err));
    uint64_t long_digest = digest_of(longer);
    for (metrale_token i = 0; i < 7; i++) {
        metrale_seq *made = new_seq(model, NULL);
        LONG_PROMPT[40] = 300 + i;
        OK(metrale_prefill(made, LONG_PROMPT, 50, &err));
        OK(metrale_prefill(made, LONG_PROMPT, 30, &err));
        kept[i] = digest_of(made);
        metrale_seq_free(made);
    }
    /* It gives and takes pages as it likes, so it is not of the runtime whose pieces are counted. */
    metrale_load_options keeps = {.struct_size = sizeof keeps, .threads = 2, .prefix_bytes = 150000};
    OK(metrale_load(path, &keeps, &keeper, &err));
    static const struct operation STAGES = {"stages", do_stages, NULL, NULL, 0};
    fresh(&STAGES);
    CHECK(do_stages() >= METRALE_OK);
    after_stages = digest_of(seq);
    done();
    const char *only = getenv("ONLY");
    for (size_t i = 0; i < OPERATION_COUNT; i++) {
        if (only && strcmp(only, OPERATIONS[i].name) != 0) continue;
        for (int all = 0; all <= 1; all++) sweep(&OPERATIONS[i], all);
    }
    CHECK(digest_of(longer) == long_digest);
    metrale_seq_free(longer);
    metrale_free(keeper);
    metrale_grammar_free(grammar);
    metrale_seq_free(witness);
    metrale_free(model);
    metrale_runtime_free(runtime);
    runtime = NULL;
    if (atomic_load(&host_live) != 0 || atomic_load(&host_pieces) != 0) {
        fprintf(stderr, "%zu bytes of the host's allocator are still held\n", atomic_load(&host_live));
        exit(1);
    }
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    folder = getenv("FOLDER") ? getenv("FOLDER") : path;
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(dl_iterate_phdr(find_library, NULL) == 1 && library_end > library_start);
    CHECK((buffer = __libc_malloc(BUFFER)) != NULL && (saved = __libc_malloc(BUFFER)) != NULL);
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL && fseek(f, 0, SEEK_END) == 0);
    file_size = (size_t)ftell(f);
    rewind(f);
    CHECK((file = __libc_malloc(file_size)) != NULL && fread(file, 1, file_size, f) == file_size && fclose(f) == 0);
    metrale_sampler_stage stage = {.kind = METRALE_STAGE_TOP_K, .count = 4};
    OK(metrale_sampler_new(&stage, 1, 1, &sampler, &err));
    OK(metrale_source_path(path, METRALE_SOURCE_READ, &source, &err));
    sweeps(HOST);
    sweeps(C_LIBRARY);
    metrale_sampler_free(sampler);
    metrale_source_free(source);
    printf("counts: %d calls, each with one and with all allocations failing, in the C library and in a host's allocator: %ld points, %ld "
           "out of memory, %ld as without a fault, %ld of them on new threads, %ld refusals; 0 bytes held at the end\n",
           OPERATION_COUNT, points, errors, without, threads, atomic_load(&refused));
    return 0;
}
#else
int main(void) {
    printf("counts: SKIPPED, the C library is another\n");
    return 0;
}
#endif
