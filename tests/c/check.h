/* The few macros that the C tests share. A failed check says where and what, and ends the program with 1. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "metrale.h"

/* Fails unless the condition holds. */
#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* Less of everything, for runs under a memory checker: set when the program has a second argument. */
static int quick;

/* Takes the arguments every program has: the model, and anything at all for a quick run. */
static inline const char *arguments(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [quick]\n", argv[0]);
        exit(2);
    }
    quick = argc > 2;
    return argv[1];
}

/* Fails unless `call`, which gets `&err`, returns `expected`; the error is freed afterwards. */
#define EXPECT(expected, call)                                                                                       \
    do {                                                                                                             \
        metrale_error *err = NULL; \
        metrale_status status = (call);                                                                              \
        if (status != (expected)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s, not %s, from %s: %s\n", __FILE__, __LINE__, metrale_status_name(status),     \
                    metrale_status_name(expected), #call, metrale_error_message(err));                               \
            exit(1);                                                                                                 \
        }                                                                                                            \
        if (metrale_error_code(err) != (status < 0 ? status : METRALE_OK)) {                                         \
            fprintf(stderr, "%s:%d: the error object does not match the status of %s\n", __FILE__, __LINE__, #call); \
            exit(1);                                                                                                 \
        }                                                                                                            \
        metrale_error_free(err);                                                                                     \
    } while (0)

/* Fails unless `call`, which gets `&err`, succeeds. */
#define OK(call) EXPECT(METRALE_OK, call)

/* Loads the model of the tests' first argument with the default options, on one thread. */
static inline metrale_model *load_model(const char *path) {
    metrale_load_options options = {0};
    metrale_model *model = NULL;
    options.struct_size = sizeof options;
    options.threads = 1;
    OK(metrale_load(path, &options, &model, &err));
    CHECK(model != NULL);
    return model;
}

/* A sequence with the default options, or with `options`. */
static inline metrale_seq *new_seq(metrale_model *model, const metrale_seq_options *options) {
    metrale_seq *seq = NULL;
    OK(metrale_seq_new(model, options, &seq, &err));
    CHECK(seq != NULL);
    return seq;
}

/* The number of tokens a sequence holds. */
static inline uint64_t length_of(const metrale_seq *seq) {
    metrale_sequence_info info = {0};
    info.struct_size = sizeof info;
    OK(metrale_seq_info(seq, &info, &err));
    return info.length;
}

/* The row of logits after all tokens. */
static inline const float *row_of(const metrale_seq *seq, size_t *count) {
    const float *row = NULL;
    OK(metrale_seq_logits(seq, &row, count, &err));
    CHECK(row != NULL && *count > 0);
    return row;
}

/* The id of the highest logit, the lowest of several. */
static inline metrale_token best_of(const metrale_seq *seq) {
    size_t count = 0, best = 0;
    const float *row = row_of(seq, &count);
    for (size_t i = 1; i < count; i++)
        if (row[i] > row[best]) best = i;
    return (metrale_token)best;
}

#endif
