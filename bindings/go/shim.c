/* The bodies of shim.h, and the functions that the library calls back: each hands over to the Go function of its name. */
#include "_cgo_export.h"

static void call_log(void *user, uint32_t level, metrale_status status, const uint8_t *text, size_t len) {
    metraleGoLog((uintptr_t)user, level, status, (char *)text, len);
}

static int64_t call_reader(void *user, uint64_t offset, void *into, size_t len) {
    return metraleGoRead((uintptr_t)user, offset, into, len);
}

static int32_t call_progress(void *user, uint64_t done, uint64_t total, const char *phase) {
    return metraleGoProgress((uintptr_t)user, done, total, (char *)phase);
}

static int32_t call_hook(void *user, float *logits, size_t count, const metrale_token *history, size_t history_count) {
    return metraleGoHook((uintptr_t)user, logits, count, (metrale_token *)history, history_count);
}

metrale_status go_runtime_new(metrale_runtime_options options, uintptr_t log, metrale_runtime **out, metrale_error **err) {
    options.struct_size = sizeof options;
    if (log) {
        options.log = call_log;
        options.log_user = (void *)log;
    }
    return metrale_runtime_new(&options, out, err);
}

metrale_status go_source_reader(uintptr_t reader, uint64_t len, metrale_source **out, metrale_error **err) {
    return metrale_source_reader(call_reader, (void *)reader, len, 0, out, err);
}

metrale_status go_load_begin(const metrale_source *source, metrale_load_options options, uintptr_t progress, metrale_loading **out,
                             metrale_error **err) {
    options.struct_size = sizeof options;
    if (progress) {
        options.progress = call_progress;
        options.user = (void *)progress;
    }
    return metrale_load_begin(source, &options, out, err);
}

metrale_status go_sampler_set_hook(metrale_sampler *sampler, uintptr_t hook, metrale_error **err) {
    return metrale_sampler_set_hook(sampler, call_hook, (void *)hook, err);
}

metrale_status go_text_new(const metrale_model *model, uint64_t flags, const uint8_t *stops, size_t stops_len, metrale_text **out,
                           metrale_error **err) {
    const metrale_text_options options = {.struct_size = sizeof options, .flags = flags, .stops = stops, .stops_len = stops_len};
    return metrale_text_new(model, &options, out, err);
}
