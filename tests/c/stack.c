/* A host thread with 64 KiB of stack is enough for everything: files and folders, text, templates, grammars, work, state, errors.
 * Under a sanitizer frames have guards around every variable and its run-time keeps tables on the stack: there it is four times that. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"

#include <libgen.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STACK = 256 * 1024 };
#else
enum { STACK = 64 * 1024 };
#endif

static const char *path;
static uint8_t buffer[1 << 20];

/* Everything a host does with a model that has text. */
static void work(metrale_model *model) {
    static const char text[] = "Once upon a time";
    static metrale_token tokens[64];
    size_t count = 0, size = 0;
    OK(metrale_tokenize(model, (const uint8_t *)text, strlen(text), METRALE_TOKENIZE_ADD_SPECIAL, tokens, 64, &count, &err));
    OK(metrale_detokenize(model, tokens, count, 0, buffer, sizeof buffer, &size, &err));
    metrale_seq *seq = new_seq(model, NULL), *fork = NULL;
    OK(metrale_prefill(seq, tokens, count, &err));
    metrale_token token = -1;
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    EXPECT(METRALE_INVALID_TOKEN, metrale_prefill(seq, &(metrale_token){-1}, 1, &err));
    OK(metrale_seq_feed(seq, tokens, count, &err));
    metrale_step_result result = {.struct_size = sizeof result};
    while (metrale_step(&seq, 1, 100000, &result, NULL) == METRALE_AGAIN) {}
    uint64_t mark = 0;
    OK(metrale_seq_mark(seq, &mark, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    OK(metrale_seq_save(seq, buffer, sizeof buffer, &size, &err));
    OK(metrale_seq_restore(fork, buffer, size, &err));
    OK(metrale_seq_rollback(seq, mark, &err));
    float logprob = 0;
    OK(metrale_seq_logprobs(seq, tokens, 1, &logprob, 0, NULL, NULL, &err));
    metrale_beam_options beam = {.struct_size = sizeof beam, .beams = 3, .max_tokens = 4};
    OK(metrale_seq_beam(seq, &beam, tokens, 64, &count, NULL, &err));
    metrale_text *stream = NULL;
    metrale_text_piece piece = {.struct_size = sizeof piece};
    OK(metrale_text_new(model, NULL, &stream, &err));
    OK(metrale_text_push(stream, token, &piece, &err));
    metrale_text_free(stream);
    metrale_seq_free(fork);
    metrale_seq_free(seq);
}

/* `depth` of one text around the other. */
static size_t nested(const char *open, const char *close, int depth) {
    uint8_t *at = buffer;
    for (int i = 0; i < depth; i++) at += sprintf((char *)at, "%s", open);
    for (int i = 0; i < depth; i++) at += sprintf((char *)at, "%s", close);
    return (size_t)(at - buffer);
}

typedef metrale_status compile_fn(const metrale_model *, const uint8_t *, size_t, metrale_grammar **, metrale_error **);

static void grammars(metrale_model *model) {
    compile_fn *const compile[] = {metrale_grammar_json_schema, metrale_grammar_gbnf, metrale_grammar_regex};
    const char *const plain[] = {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}", "root ::= \"a\" [b-d]+", "(ab|c)*d{2,40}"};
    const char *const open[] = {"{\"items\":", "root ::= (", "("}, *const close[] = {"}", ")", ")"};
    for (int i = 0; i < 3; i++) {
        metrale_grammar *grammar = NULL;
        OK(compile[i](model, (const uint8_t *)plain[i], strlen(plain[i]), &grammar, &err));
        metrale_seq *seq = new_seq(model, NULL);
        OK(metrale_prefill(seq, &(metrale_token){1}, 1, &err));
        OK(metrale_seq_grammar(seq, grammar, &err));
        metrale_token token = -1;
        CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
        metrale_seq_free(seq);
        metrale_grammar_free(grammar);
        /* Deep ones are refused or compiled, never followed into the end of the stack. */
        for (int depth = 10; depth <= 10000; depth *= 10) {
            size_t len = nested(open[i], close[i], depth);
            grammar = NULL;
            metrale_status status = compile[i](model, buffer, len, &grammar, NULL);
            CHECK(status < METRALE_OK || depth <= 1000);
            metrale_grammar_free(grammar);
        }
    }
}

static void chats(metrale_model *model, metrale_status expected) {
    static const char request[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}";
    static const char deep[] = "{\"messages\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}";
    size_t size = 0;
    EXPECT(expected, metrale_chat_render(model, (const uint8_t *)request, strlen(request), buffer, sizeof buffer, &size, &err));
    CHECK(metrale_chat_render(model, (const uint8_t *)deep, strlen(deep), buffer, sizeof buffer, &size, NULL) <= METRALE_OK);
    size_t len = nested("[", "]", 100000);
    CHECK(metrale_chat_render(model, buffer, len, NULL, 0, &size, NULL) < METRALE_OK);
}

/* A folder as models are published, without their weights: those are made up. */
static void a_folder(void) {
    static char folder[] = "/tmp/metrale-stack-XXXXXX", from[4096], to[4096], copy[4096];
    static const char *const names[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    CHECK(mkdtemp(folder) != NULL);
    CHECK(realpath(path, copy) != NULL);
    const char *beside = dirname(copy);
    for (int i = 0; i < 3; i++) {
        snprintf(from, sizeof from, "%.4000s/%s", beside, names[i]);
        snprintf(to, sizeof to, "%s/%s", folder, names[i]);
        CHECK(symlink(from, to) == 0);
    }
    snprintf(to, sizeof to, "%s/chat_template.jinja", folder);
    FILE *template = fopen(to, "w");
    CHECK(template != NULL);
    fputs("{% macro m(n) %}{% if n > 0 %}({{ m(n - 1) }}){% endif %}{% endmacro %}{{ m(20) }}"
          "{% for message in messages %}{{ message.role ~ message.content|tojson }}{% endfor %}", template);
    fclose(template);
    metrale_load_options options = {.struct_size = sizeof options, .threads = 1, .synthetic = "F32", .synthetic_seed = 1};
    metrale_model *model = NULL;
    OK(metrale_load(folder, &options, &model, &err));
    work(model);
    grammars(model);
    chats(model, METRALE_OK);
    metrale_free(model);
    unlink(to);
    for (int i = 0; i < 3; i++) {
        snprintf(to, sizeof to, "%s/%s", folder, names[i]);
        unlink(to);
    }
    rmdir(folder);
}

/* As above with real weights; relative to the model of the tests. */
static void safetensors(void) {
    static char folder[4096], copy[4096];
    snprintf(copy, sizeof copy, "%s", path);
    snprintf(folder, sizeof folder, "%.4000s/../models/llama", dirname(copy));
    metrale_model *model = load_model(folder);
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_prefill(seq, &(metrale_token){1}, 1, &err));
    metrale_seq_free(seq);
    metrale_free(model);
}

static void stepwise(void) {
    metrale_source *source = NULL;
    metrale_loading *loading = NULL;
    metrale_model *model = NULL;
    OK(metrale_source_path(path, METRALE_SOURCE_READ, &source, &err));
    OK(metrale_load_begin(source, NULL, &loading, &err));
    metrale_status status;
    while ((status = metrale_load_step(loading, 1000000, NULL, &model, NULL)) == METRALE_AGAIN) {}
    CHECK(status == METRALE_OK);
    metrale_loading_free(loading);
    metrale_source_free(source);
    metrale_free(model);
}

static void *all(void *unused) {
    (void)unused;
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    OK(metrale_plan(path, NULL, 1, &plan, &err));
    size_t size = 0;
    OK(metrale_model_probe(path, buffer, sizeof buffer, &size, &err));
    metrale_model *model = load_model(path);
    work(model);
    grammars(model);
    chats(model, METRALE_NOT_FOUND);
    metrale_free(model);
    stepwise();
    a_folder();
    safetensors();
    return NULL;
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, STACK) == 0);
    CHECK(pthread_create(&thread, &attributes, all, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    pthread_attr_destroy(&attributes);
    return 0;
}
