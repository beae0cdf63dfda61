/* Every exported function with the kinds of its arguments, one letter each, so that tests can make arguments up:
 *
 *   M model   S sequence   A sampler   X text stream   E error   Y source   Z load   D grammar   U runtime       handles
 *   L handles of sequences           t tokens   s text   r chat request   B saved state   g stages   P path   K key   read
 *   n how many of the pointer before (the function must refuse a size before it reads), N as n, but all would be read
 *   J H O v source of a grammar: JSON schema, GBNF, Lark, regular expression                             read
 *   b bytes of a file   h function that reads   j hook of a sampler   3 function for log records   u what they are called with   read later
 *   o buffer   c its capacity   z place for a number or pointer   I F W R G 1 2 5 7 structs to fill        written
 *   m q a x y w p 6 place for a new model, sequence, sampler, text stream, source, load, grammar, runtime   e place for the error
 *   l T Q V C 4 options of a load, text stream, sequence, beam search, embedding, runtime
 *   d i f k a number: 64 bits, a token, flags, a file descriptor    8 a number of steps, of which an error leaves those before it
 */
#ifndef FAULTS_H
#define FAULTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

enum { MOST_ARGUMENTS = 8 };

struct function {
    const char *name;
    const char *letters;
    /* 1 when the result is a status. */
    int status;
    int64_t (*call)(const uintptr_t *a);
};

#define P(i) ((void *)a[i])
#define H(i, type) ((type *)a[i])

#define STATUS(function, ...)                                                         \
    static int64_t call_##function(const uintptr_t *a) { return metrale_##function(__VA_ARGS__); }
#define VALUE(function, ...)                                                          \
    static int64_t call_##function(const uintptr_t *a) { (void)a; (void)metrale_##function(__VA_ARGS__); return 0; }
#define NOTHING(function, ...)                                                        \
    static int64_t call_##function(const uintptr_t *a) { metrale_##function(__VA_ARGS__); return 0; }

static int64_t call_version_string(const uintptr_t *a) { (void)a; return metrale_version_string() == NULL; }
static int64_t call_version_number(const uintptr_t *a) { (void)a; return metrale_version_number() == 0; }
static int64_t call_build_info(const uintptr_t *a) { (void)a; return metrale_build_info() == NULL; }
STATUS(check_abi, (uint32_t)a[0], P(1))
static int64_t call_status_name(const uintptr_t *a) { return metrale_status_name((metrale_status)a[0]) == NULL; }
VALUE(error_code, H(0, metrale_error))
static int64_t call_error_message(const uintptr_t *a) { return strlen(metrale_error_message(H(0, metrale_error))) > 100000; }
static int64_t call_error_detail(const uintptr_t *a) { return strlen(metrale_error_detail(H(0, metrale_error))) > 100000; }
VALUE(error_name, H(0, metrale_error))
VALUE(error_offset, H(0, metrale_error), P(1))
VALUE(error_wanted, H(0, metrale_error), P(1))
VALUE(error_available, H(0, metrale_error), P(1))
VALUE(error_retry, H(0, metrale_error))
NOTHING(error_free, H(0, metrale_error))
STATUS(runtime_new, P(0), P(1), P(2))
NOTHING(runtime_free, H(0, metrale_runtime))
STATUS(runtime_memory, H(0, metrale_runtime), P(1), P(2))
STATUS(runtime_trim, H(0, metrale_runtime), P(1))
STATUS(runtime_run_worker, H(0, metrale_runtime), P(1))
STATUS(runtime_release_workers, H(0, metrale_runtime), P(1))
static int64_t call_device_count(const uintptr_t *a) { (void)a; return metrale_device_count() != 1; }
STATUS(device_info, a[0], P(1), P(2))
static void ignore_record(void *user, uint32_t level, metrale_status status, const uint8_t *text, size_t len) {
    (void)user, (void)level, (void)status, (void)text, (void)len;
}
STATUS(runtime_log_set, H(0, metrale_runtime), (uint32_t)a[1], a[2] ? ignore_record : NULL, P(3), P(4))
STATUS(model_probe, P(0), P(1), a[2], P(3), P(4))
STATUS(plan, P(0), P(1), a[2], P(3), P(4))
STATUS(load, P(0), P(1), P(2), P(3))
STATUS(source_folder, a[0], P(1), P(2))
STATUS(source_add, H(0, metrale_source), P(1), H(2, metrale_source), P(3))
STATUS(source_probe, H(0, metrale_source), P(1), a[2], P(3), P(4))
STATUS(source_plan, H(0, metrale_source), P(1), a[2], P(3), P(4))
STATUS(load_step_bytes, H(0, metrale_loading), a[1], P(2), P(3), P(4))
STATUS(source_path, P(0), a[1], P(2), P(3))
STATUS(source_buffer, P(0), a[1], a[2], P(3), P(4))
STATUS(source_fd, (int32_t)a[0], a[1], a[2], a[3], P(4), P(5))
STATUS(source_reader, (metrale_read_at_fn)a[0], P(1), a[2], a[3], P(4), P(5))
NOTHING(source_free, H(0, metrale_source))
STATUS(load_source, H(0, metrale_source), P(1), P(2), P(3))
STATUS(load_begin, H(0, metrale_source), P(1), P(2), P(3))
STATUS(load_step, H(0, metrale_loading), a[1], P(2), P(3), P(4))
STATUS(load_cancel, H(0, metrale_loading), P(1))
NOTHING(loading_free, H(0, metrale_loading))
NOTHING(free, H(0, metrale_model))
STATUS(model_retain, H(0, metrale_model), P(1), P(2))
STATUS(model_info, H(0, metrale_model), P(1), P(2), P(3))
STATUS(model_meta, H(0, metrale_model), P(1), P(2), a[3], P(4), P(5))
STATUS(tokenize, H(0, metrale_model), P(1), a[2], (uint32_t)a[3], P(4), a[5], P(6), P(7))
STATUS(detokenize, H(0, metrale_model), P(1), a[2], (uint32_t)a[3], P(4), a[5], P(6), P(7))
STATUS(token_bytes, H(0, metrale_model), (metrale_token)a[1], P(2), a[3], P(4), P(5))
STATUS(chat_render, H(0, metrale_model), P(1), a[2], P(3), a[4], P(5), P(6))
STATUS(text_new, H(0, metrale_model), P(1), P(2), P(3))
STATUS(text_push, H(0, metrale_text), (metrale_token)a[1], P(2), P(3))
STATUS(text_flush, H(0, metrale_text), P(1), P(2))
STATUS(text_reset, H(0, metrale_text), P(1))
NOTHING(text_free, H(0, metrale_text))
STATUS(sampler_new, P(0), a[1], a[2], P(3), P(4))
NOTHING(sampler_free, H(0, metrale_sampler))
STATUS(sampler_set_hook, H(0, metrale_sampler), (metrale_hook_fn)a[1], P(2), P(3))
STATUS(grammar_json_schema, H(0, metrale_model), P(1), a[2], P(3), P(4))
STATUS(grammar_gbnf, H(0, metrale_model), P(1), a[2], P(3), P(4))
STATUS(grammar_lark, H(0, metrale_model), P(1), a[2], P(3), P(4))
STATUS(grammar_regex, H(0, metrale_model), P(1), a[2], P(3), P(4))
NOTHING(grammar_free, H(0, metrale_grammar))
STATUS(seq_grammar, H(0, metrale_seq), H(1, metrale_grammar), P(2))
STATUS(seq_new, H(0, metrale_model), P(1), P(2), P(3))
NOTHING(seq_free, H(0, metrale_seq))
STATUS(seq_info, H(0, metrale_seq), P(1), P(2))
STATUS(seq_truncate, H(0, metrale_seq), a[1], P(2))
STATUS(seq_sampling, H(0, metrale_seq), H(1, metrale_sampler), P(2))
STATUS(seq_fork, H(0, metrale_seq), P(1), P(2))
STATUS(seq_mark, H(0, metrale_seq), P(1), P(2))
STATUS(seq_rollback, H(0, metrale_seq), a[1], P(2))
STATUS(seq_commit, H(0, metrale_seq), a[1], P(2))
STATUS(seq_match, H(0, metrale_seq), P(1), a[2], P(3), P(4))
STATUS(seq_save, H(0, metrale_seq), P(1), a[2], P(3), P(4))
STATUS(seq_restore, H(0, metrale_seq), P(1), a[2], P(3))
STATUS(prefill, H(0, metrale_seq), P(1), a[2], P(3))
STATUS(decode_step, P(0), a[1], P(2), P(3))
STATUS(decode, P(0), a[1], a[2], P(3), P(4), P(5))
STATUS(seq_feed, H(0, metrale_seq), P(1), a[2], P(3))
STATUS(step, P(0), a[1], a[2], P(3), P(4))
STATUS(step_estimate, P(0), a[1], P(2), P(3))
STATUS(poll, H(0, metrale_seq), P(1), P(2))
STATUS(cancel, H(0, metrale_seq), P(1))
STATUS(cancel_all, H(0, metrale_model), P(1))
STATUS(seq_logits, H(0, metrale_seq), P(1), P(2), P(3))
STATUS(seq_logprobs, H(0, metrale_seq), P(1), a[2], P(3), a[4], P(5), P(6), P(7))
STATUS(seq_encode, H(0, metrale_seq), P(1), a[2], P(3))
STATUS(seq_beam, H(0, metrale_seq), P(1), P(2), a[3], P(4), P(5), P(6))
STATUS(model_fingerprint, H(0, metrale_model), P(1), a[2], P(3), P(4))
STATUS(model_stats, H(0, metrale_model), P(1), P(2))
STATUS(seq_stats, H(0, metrale_seq), P(1), P(2))
STATUS(seq_shift, H(0, metrale_seq), a[1], a[2], P(3))
STATUS(embed, H(0, metrale_model), P(1), a[2], P(3), P(4), a[5], P(6), P(7))

#define F(name, letters, status) {"metrale_" #name, letters, status, call_##name}
static const struct function FUNCTIONS[] = {
    F(version_string, "", 0),      F(version_number, "", 0),     F(build_info, "", 0),           F(check_abi, "de", 1),
    F(status_name, "i", 0),        F(error_code, "E", 0),        F(error_message, "E", 0),       F(error_detail, "E", 0),
    F(error_name, "E", 0),         F(error_offset, "Ez", 0),     F(error_wanted, "Ez", 0),       F(error_available, "Ez", 0),
    F(error_retry, "E", 0),        F(error_free, "E", 0),        F(model_probe, "Pocze", 1),     F(plan, "PldFe", 1),
    F(load, "Plme", 1),            F(free, "M", 0),              F(model_retain, "Mme", 1),      F(model_info, "Mzze", 1),
    F(model_meta, "MKocze", 1),    F(tokenize, "Msnfocze", 1),   F(detokenize, "Mtnfocze", 1),   F(token_bytes, "Miocze", 1),
    F(chat_render, "Mrnocze", 1),  F(text_new, "MTxe", 1),       F(text_push, "XiWe", 1),        F(text_flush, "XWe", 1),
    F(text_reset, "Xe", 1),        F(text_free, "X", 0),         F(sampler_new, "gndae", 1),     F(sampler_free, "A", 0),
    F(seq_new, "MQqe", 1),         F(seq_free, "S", 0),          F(seq_info, "SIe", 1),          F(seq_truncate, "Sde", 1),
    F(seq_sampling, "SAe", 1),     F(seq_fork, "Sqe", 1),        F(seq_mark, "Sze", 1),          F(seq_rollback, "Sde", 1),
    F(seq_commit, "Sde", 1),       F(seq_match, "Stnze", 1),     F(seq_save, "Socze", 1),        F(seq_restore, "SBne", 1),
    F(prefill, "Stne", 1),         F(decode_step, "Lnoe", 1),    F(seq_feed, "Stne", 1),         F(step, "LndRe", 1),
    F(decode, "Ln8oze", 1),
    F(step_estimate, "Lnze", 1),   F(poll, "Sze", 1),            F(cancel, "Se", 1),             F(cancel_all, "Me", 1),
    F(model_fingerprint, "Mocze", 1), F(model_stats, "M2e", 1), F(seq_stats, "S1e", 1),         F(seq_shift, "Sdde", 1),
    F(embed, "MtnCocze", 1),
    F(seq_logits, "Szze", 1),      F(seq_logprobs, "StNoNooe", 1), F(seq_encode, "Stne", 1),    F(seq_beam, "SVoczze", 1),
    F(source_path, "Pfye", 1),     F(source_buffer, "bnfye", 1), F(source_fd, "kddfye", 1),      F(source_reader, "hudfye", 1),
    F(source_free, "Y", 0),        F(load_source, "Ylme", 1),    F(load_begin, "Ylwe", 1),       F(load_step, "ZdGme", 1),
    F(load_cancel, "Ze", 1),       F(loading_free, "Z", 0),      F(source_folder, "fye", 1),     F(source_add, "YKYe", 1),
    F(source_probe, "Yocze", 1),   F(source_plan, "YldFe", 1),   F(load_step_bytes, "ZdGme", 1),
    F(sampler_set_hook, "Ajue", 1), F(grammar_json_schema, "MJnpe", 1),
    F(grammar_gbnf, "MHnpe", 1),   F(grammar_lark, "MOnpe", 1),  F(grammar_regex, "Mvnpe", 1),   F(grammar_free, "D", 0),
    F(seq_grammar, "SDe", 1),      F(runtime_new, "46e", 1),      F(runtime_free, "U", 0),      F(runtime_memory, "U5e", 1),
    F(runtime_trim, "Ue", 1),      F(runtime_log_set, "Uf3ue", 1), F(runtime_run_worker, "Ue", 1),
    F(runtime_release_workers, "Ue", 1), F(device_count, "", 0), F(device_info, "f7e", 1),
};
enum { FUNCTION_COUNT = sizeof FUNCTIONS / sizeof FUNCTIONS[0] };

/* One number of all that a sequence shows: its length and every bit of its logits. */
static inline uint64_t digest_of(const metrale_seq *seq) {
    size_t count = 0;
    const float *row = NULL;
    uint64_t hash = 14695981039346656037u ^ length_of(seq);
    if (metrale_seq_logits(seq, &row, &count, NULL) != METRALE_OK) return hash;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
}

/* A thread that is lent comes back when another releases it. */
static atomic_int lending;
static inline void *releases(void *runtime) {
    while (atomic_load(&lending)) {
        metrale_runtime_release_workers(runtime, NULL);
        usleep(100);
    }
    return NULL;
}
static inline int64_t call_and_release(const struct function *f, const uintptr_t *a) {
    pthread_t other;
    atomic_store(&lending, 1);
    CHECK(pthread_create(&other, NULL, releases, (void *)a[0]) == 0);
    int64_t status = f->call(a);
    atomic_store(&lending, 0);
    CHECK(pthread_join(other, NULL) == 0);
    return status;
}

#endif
