/* Allocations that fail: for each kind of call, the n-th allocation alone and all from the n-th on, for every n until the
 * call needs no more. The process lives; the status is METRALE_OUT_OF_MEMORY, or a success; after an error the sequence is
 * bit for bit what it was, and after a success it is what it should be. The C library's functions are replaced here, in the
 * program, which the library then uses as well. The last line holds the counts. */
#include <stdatomic.h>
#include <errno.h>

#include "faults.h"

#ifdef __GLIBC__
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_long left = -1;
static atomic_int persistent;
static atomic_long refused;

/* Whether this allocation fails. */
static int fails(void) {
    if (atomic_load(&left) < 0) return 0;
    long mine = atomic_fetch_sub(&left, 1);
    if (mine > 0) return 0;
    if (mine < 0 && !atomic_load(&persistent)) return 0;
    if (atomic_load(&persistent)) atomic_store(&left, 0);
    atomic_fetch_add(&refused, 1);
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return fails() ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return fails() ? NULL : __libc_realloc(p, size); }
void *aligned_alloc(size_t align, size_t size) { return fails() ? NULL : __libc_memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) {
    if (fails()) return ENOMEM;
    *out = __libc_memalign(align, size);
    return *out ? 0 : ENOMEM;
}

static const char *path;
static metrale_model *model;
/* One that keeps beginnings of its sequences. */
static metrale_model *keeper;
static metrale_token LONG_PROMPT[50];
static uint64_t kept[7];
static metrale_seq *witness, *seq, *longer;
static metrale_sampler *sampler;
static metrale_text *stream;
static uint64_t expected, after_prefill, after_step, after_stages;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
static metrale_token token;
static uint8_t *saved, *buffer;
static size_t saved_len, size;
enum { BUFFER = 1 << 20 };
static metrale_error *err;

static const char TEXT[] = "Once upon a time, there was a little girl named Lily.";
static const char REQUEST[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"variables\":{\"a\":[1,2,{\"b\":\"c\"}]}}";

/* The calls. Each leaves the sequence as `digest` says when it succeeds; NULL for unchanged. */
static metrale_status do_load(void) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    metrale_model *made = NULL;
    metrale_status status = metrale_load(path, &options, &made, &err);
    metrale_free(made);
    return status;
}
static metrale_status do_plan(void) {
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    return metrale_plan(path, NULL, 1, &plan, &err);
}
static metrale_status do_probe(void) { return metrale_model_probe(path, buffer, BUFFER, &size, &err); }
static metrale_status do_source(void) {
    metrale_source *made = NULL;
    metrale_status status = metrale_source_buffer((const uint8_t *)TEXT, sizeof TEXT, METRALE_SOURCE_COPY, &made, &err);
    metrale_source_free(made);
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
static metrale_status do_load_step(void) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    metrale_source *source = NULL;
    metrale_loading *loading = NULL;
    metrale_model *made = NULL;
    metrale_status status = metrale_source_path(path, METRALE_SOURCE_READ, &source, &err);
    if (status == METRALE_OK) status = metrale_load_begin(source, &options, &loading, &err);
    metrale_source_free(source);
    if (status == METRALE_OK) status = metrale_load_step(loading, UINT64_MAX, NULL, &made, &err);
    metrale_loading_free(loading);
    metrale_free(made);
    return status;
}
static metrale_status do_seq_new(void) {
    metrale_seq *made = NULL;
    metrale_status status = metrale_seq_new(model, NULL, &made, &err);
    metrale_seq_free(made);
    return status;
}
static metrale_status do_prefill(void) { return metrale_prefill(seq, PROMPT + 1, 4, &err); }
static metrale_status do_decode(void) { return metrale_decode_step(&seq, 1, &token, &err); }
static metrale_status do_feed(void) { return metrale_seq_feed(seq, PROMPT, 5, &err); }
static metrale_status do_step(void) {
    metrale_step_result result = {.struct_size = sizeof result};
    return metrale_step(&seq, 1, 0, &result, &err);
}
static metrale_status do_fork(void) {
    metrale_seq *made = NULL;
    metrale_status status = metrale_seq_fork(seq, &made, &err);
    metrale_seq_free(made);
    return status;
}
static metrale_status do_mark(void) {
    uint64_t mark = 0;
    return metrale_seq_mark(seq, &mark, &err);
}
static metrale_status do_save(void) { return metrale_seq_save(seq, buffer, BUFFER, &size, &err); }
static metrale_status do_restore(void) { return metrale_seq_restore(seq, saved, saved_len, &err); }
static metrale_status do_sampling(void) { return metrale_seq_sampling(seq, sampler, &err); }
static metrale_status do_logprobs(void) {
    float out[4];
    metrale_token best[4];
    return metrale_seq_logprobs(seq, PROMPT, 4, out, 4, best, out, &err);
}
static metrale_status do_tokenize(void) {
    return metrale_tokenize(model, (const uint8_t *)TEXT, sizeof TEXT - 1, 1, (metrale_token *)(void *)buffer, BUFFER / 4, &size, &err);
}
static metrale_status do_detokenize(void) { return metrale_detokenize(model, PROMPT, 5, 0, buffer, BUFFER, &size, &err); }
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
    return metrale_text_push(stream, 403, &piece, &err);
}
static metrale_status do_sampler(void) {
    metrale_sampler_stage stage = {.kind = METRALE_STAGE_TOP_K, .count = 4};
    metrale_sampler *made = NULL;
    metrale_status status = metrale_sampler_new(&stage, 1, 1, &made, &err);
    metrale_sampler_free(made);
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
static metrale_status do_meta(void) { return metrale_model_meta(model, "vocab", buffer, BUFFER, &size, &err); }

static const struct operation {
    const char *name;
    metrale_status (*run)(void);
    const uint64_t *digest;
} OPERATIONS[] = {
    {"seq_new", do_seq_new, NULL},       {"prefill", do_prefill, &after_prefill}, {"decode_step", do_decode, &after_step},
    {"feed", do_feed, NULL},             {"step", do_step, &after_step},          {"fork", do_fork, NULL},
    {"mark", do_mark, NULL},             {"save", do_save, NULL},                 {"restore", do_restore, NULL},
    {"shift", do_shift, NULL},           {"prefix", do_prefix, NULL},
    {"embed", do_embed, NULL},           {"fingerprint", do_fingerprint, NULL},
    {"sampling", do_sampling, NULL},     {"logprobs", do_logprobs, NULL},         {"tokenize", do_tokenize, NULL},
    {"detokenize", do_detokenize, NULL}, {"chat_render", do_render, NULL},        {"text_new", do_text_new, NULL},
    {"text_push", do_push, NULL},        {"sampler_new", do_sampler, NULL},       {"model_meta", do_meta, NULL},
    {"stages", do_stages, &after_stages},
    {"probe", do_probe, NULL},           {"plan", do_plan, NULL},                 {"source", do_source, NULL},
    {"folder", do_folder, NULL},         {"source_look", do_source_look, NULL},       {"load", do_load, NULL},
    {"load_step", do_load_step, NULL},
};

static void fresh(void) {
    OK(metrale_seq_fork(witness, &seq, &err));
    OK(metrale_text_new(model, NULL, &stream, &err));
}

static void done(void) {
    metrale_seq_free(seq);
    metrale_text_free(stream);
}

static void sweep(const struct operation *o, int all, long most) {
    long succeeded = 0, failed = 0, n = 0, before = atomic_load(&refused);
    fresh();
    metrale_status usual = o->run();
    metrale_error_free(err);
    done();
    /* Every n at first; later ones in growing steps, so that a long load ends. */
    for (;; n += n < most ? 1 : 1 + n / 16) {
        fresh();
        err = NULL;
        printf("%s %ld%s\n", o->name, n, all ? " and all after it" : "");
        atomic_store(&persistent, all);
        atomic_store(&left, n);
        metrale_status status = o->run();
        int spent = atomic_load(&left) > 0;
        atomic_store(&left, -1);
        if (status < 0 && status != usual && status != METRALE_OUT_OF_MEMORY) {
            fprintf(stderr, "%s: allocation %ld: %s: %s\n", o->name, n, metrale_status_name(status), metrale_error_message(err));
            exit(1);
        }
        uint64_t wanted = status < 0 || o->digest == NULL ? expected : *o->digest;
        if (digest_of(seq) != wanted || digest_of(witness) != expected) {
            fprintf(stderr, "%s: allocation %ld: %s, and a sequence is not what it should be\n", o->name, n, metrale_status_name(status));
            exit(1);
        }
        if (status == METRALE_OUT_OF_MEMORY) failed++;
        else succeeded++;
        metrale_error_free(err);
        done();
        if (spent) break;
    }
    printf("%s: %ld points, %ld out of memory, %ld as without a fault, %ld refusals\n", o->name, failed + succeeded, failed, succeeded,
           atomic_load(&refused) - before);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK((buffer = __libc_malloc(BUFFER)) != NULL && (saved = __libc_malloc(BUFFER)) != NULL);
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    OK(metrale_load(path, &options, &model, &err));
    witness = new_seq(model, NULL);
    OK(metrale_prefill(witness, PROMPT, 1, &err));
    expected = digest_of(witness);
    OK(metrale_seq_save(witness, saved, BUFFER, &saved_len, &err));
    metrale_sampler_stage stage = {.kind = METRALE_STAGE_TOP_K, .count = 4};
    OK(metrale_sampler_new(&stage, 1, 1, &sampler, &err));
    fresh();
    OK(metrale_prefill(seq, PROMPT + 1, 4, &err));
    after_prefill = digest_of(seq);
    done();
    fresh();
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
    options.prefix_bytes = 150000;
    OK(metrale_load(path, &options, &keeper, &err));
    fresh();
    CHECK(do_stages() >= METRALE_OK);
    after_stages = digest_of(seq);
    done();
    const char *only = getenv("ONLY");
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof *OPERATIONS; i++) {
        if (only && strcmp(only, OPERATIONS[i].name) != 0) continue;
        /* A load that goes on without any memory needs more than is set aside: docs/faults.md. */
        int last = strncmp(OPERATIONS[i].name, "load", 4) == 0 ? 0 : 1;
        for (int all = 0; all <= last; all++) sweep(&OPERATIONS[i], all, quick ? 50 : 400);
    }
    CHECK(digest_of(longer) == long_digest);
    metrale_seq_free(longer);
    metrale_free(keeper);
    metrale_sampler_free(sampler);
    metrale_seq_free(witness);
    metrale_free(model);
    printf("counts: %zu calls, each with one and with all allocations failing; %ld refused\n", sizeof OPERATIONS / sizeof *OPERATIONS,
           atomic_load(&refused));
    return 0;
}
#else
int main(void) {
    printf("counts: SKIPPED, the C library is another\n");
    return 0;
}
#endif
