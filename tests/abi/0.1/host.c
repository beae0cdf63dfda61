/* A host of release 0.1, kept as it was compiled then: it runs with every later library of the same SONAME, or is told at
 * its first call that it does not fit. Every option struct and result is used, so that a shifted field shows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "metrale.h"

static metrale_error *err;

static void must(int line, int holds) {
    if (holds) return;
    printf("line %d: %s %s\n", line, metrale_status_name(metrale_error_code(err)), metrale_error_message(err));
    exit(1);
}
#define MUST(condition) must(__LINE__, (condition))

static int32_t heard;

static int32_t progress(void *user, uint64_t done, uint64_t total, const char *phase) {
    heard += user == (void *)&heard && done <= (total ? total : done) && phase != NULL;
    return 0;
}

static void refusals(void) {
    metrale_model *none = NULL;
    MUST(metrale_check_abi(METRALE_ABI_VERSION + 0x10000, NULL) == METRALE_VERSION_MISMATCH);
    MUST(metrale_check_abi(METRALE_ABI_VERSION - 0x10000, NULL) == METRALE_VERSION_MISMATCH);
    MUST(metrale_load("there is no such file", NULL, &none, &err) == METRALE_NOT_FOUND && none == NULL);
    MUST(metrale_error_code(err) == METRALE_NOT_FOUND && strlen(metrale_error_message(err)) > 0);
    metrale_error_free(err);
    err = NULL;
}

static metrale_seq *sampled(metrale_model *model) {
    metrale_sampler_stage stages[2] = {{.kind = METRALE_STAGE_TOP_K, .count = 8}, {.kind = METRALE_STAGE_TEMPERATURE, .value = 0.8f}};
    metrale_sampler *sampler = NULL;
    metrale_seq *seq = NULL;
    MUST(metrale_sampler_new(stages, 2, 7, &sampler, &err) == METRALE_OK);
    metrale_seq_options options = {.struct_size = sizeof options, .flags = METRALE_SEQ_LOGPROBS, .context = 64, .sampler = sampler, .seed = 3};
    MUST(metrale_seq_new(model, &options, &seq, &err) == METRALE_OK);
    metrale_sampler_free(sampler);
    return seq;
}

static void texts(metrale_model *model, metrale_token token) {
    metrale_text_options options = {.struct_size = sizeof options, .stops = (const uint8_t *)"no\0never", .stops_len = 8};
    metrale_text_piece piece = {.struct_size = sizeof piece};
    metrale_text *text = NULL;
    MUST(metrale_text_new(model, &options, &text, &err) == METRALE_OK);
    MUST(metrale_text_push(text, token, &piece, &err) == METRALE_OK && piece.stop == -1 && piece.struct_size == sizeof piece);
    MUST(metrale_text_flush(text, &piece, &err) == METRALE_OK);
    metrale_text_free(text);
}

int main(int argc, char **argv) {
    MUST(argc == 2 && metrale_check_abi(METRALE_ABI_VERSION, &err) == METRALE_OK);
    refusals();

    metrale_load_options load = {.struct_size = sizeof load, .threads = 2, .context = 128, .progress = progress, .user = &heard};
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    metrale_model *model = NULL;
    MUST(metrale_plan(argv[1], &load, 2, &plan, &err) == METRALE_OK && plan.weights > 0 && plan.total >= plan.weights + plan.kv);
    MUST(metrale_load(argv[1], &load, &model, &err) == METRALE_OK && heard > 0);

    metrale_token tokens[16];
    size_t count = 0;
    const char *prompt = "Once upon a time";
    MUST(metrale_tokenize(model, (const uint8_t *)prompt, strlen(prompt), METRALE_TOKENIZE_ADD_SPECIAL, tokens, 16, &count, &err) == METRALE_OK);
    metrale_seq *seq = sampled(model), *fork = NULL, *both[2];
    MUST(metrale_prefill(seq, tokens, count, &err) == METRALE_OK);
    MUST(metrale_seq_fork(seq, &fork, &err) == METRALE_OK);
    both[0] = seq;
    both[1] = fork;
    metrale_token next[2] = {-1, -1};
    MUST(metrale_decode_step(both, 2, next, &err) >= METRALE_OK && next[0] >= 0 && next[0] == next[1]);
    texts(model, next[0]);
    metrale_sequence_info info = {.struct_size = sizeof info};
    MUST(metrale_seq_info(seq, &info, &err) == METRALE_OK);
    MUST(info.length == count + 1 && info.capacity == 64 && info.last_token == next[0] && info.last_logprob < 0);

    metrale_step_result results[2] = {{.struct_size = sizeof results[0]}, {.struct_size = sizeof results[1]}};
    MUST(metrale_step(both, 2, 0, results, &err) >= METRALE_OK);
    MUST(results[0].token == results[1].token && results[1].read == 0 && results[1].queued == 0 && results[1].status >= METRALE_OK);
    static uint8_t state[1 << 20];
    size_t size = 0;
    MUST(metrale_seq_save(seq, state, sizeof state, &size, &err) == METRALE_OK && size > 0);
    MUST(metrale_seq_restore(fork, state, size, &err) == METRALE_OK);
    MUST(metrale_decode_step(both, 2, next, &err) >= METRALE_OK && next[0] == next[1]);

    metrale_free(model);
    metrale_seq_free(seq);
    metrale_seq_free(fork);
    puts("ok");
    return 0;
}
