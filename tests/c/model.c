/* Models: probe, plan, load, facts, sharing, and everything that must be refused. */
#include "check.h"

static const char *path;

static void probe_and_plan(void) {
    size_t size = 0, again = 0;
    EXPECT(METRALE_MORE, metrale_model_probe(path, NULL, 0, &size, &err));
    CHECK(size > 2);
    uint8_t *text = malloc(size);
    CHECK(text != NULL);
    text[0] = 7;
    EXPECT(METRALE_MORE, metrale_model_probe(path, text, size - 1, &again, &err));
    CHECK(again == size && text[0] == 7);
    OK(metrale_model_probe(path, text, size, &again, &err));
    CHECK(again == size && text[0] == '{' && text[size - 1] == '}');
    free(text);
    EXPECT(METRALE_NOT_FOUND, metrale_model_probe("nowhere", NULL, 0, &size, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_model_probe(path, NULL, 0, NULL, &err));

    metrale_memory_plan one = {0}, two = {0};
    one.struct_size = two.struct_size = sizeof one;
    OK(metrale_plan(path, NULL, 1, &one, &err));
    OK(metrale_plan(path, NULL, 2, &two, &err));
    CHECK(one.struct_size == sizeof one);
    CHECK(one.weights > 0 && one.weights == two.weights);
    CHECK(two.kv > one.kv);
    CHECK(one.total == one.weights + one.kv + one.state + one.scratch + one.other);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_plan(path, NULL, 1, NULL, &err));
    EXPECT(METRALE_NOT_FOUND, metrale_plan("nowhere", NULL, 1, &one, &err));
}

struct watch {
    int calls, stop_at;
    uint64_t done, total;
    int odd;
};

static int32_t watcher(void *user, uint64_t done, uint64_t total, const char *phase) {
    struct watch *watch = user;
    watch->calls++;
    if (phase == NULL || phase[0] == '\0' || (total != 0 && done > total)) watch->odd = 1;
    watch->done = done;
    watch->total = total;
    return watch->calls == watch->stop_at;
}

static void progress_and_cancel(void) {
    struct watch watch = {0};
    metrale_load_options options = {0};
    metrale_model *model = NULL;
    options.struct_size = sizeof options;
    options.threads = 1;
    options.progress = watcher;
    options.user = &watch;
    OK(metrale_load(path, &options, &model, &err));
    CHECK(watch.calls > 0 && !watch.odd);
    metrale_free(model);

    /* Cancelled at points all along, the last one, where all is done, among them: a status, never a half model. */
    int calls = watch.calls;
    int step = calls > 20 ? calls / 20 : 1;
    CHECK(watch.done == watch.total);
    for (int at = 1; at < calls + step; at += step) {
        int stop = at < calls ? at : calls;
        model = NULL;
        memset(&watch, 0, sizeof watch);
        watch.stop_at = stop;
        EXPECT(METRALE_CANCELLED, metrale_load(path, &options, &model, &err));
        CHECK(model == NULL && watch.calls == stop);
    }
}

static void facts(metrale_model *model) {
    const char *info = NULL, *same = NULL;
    size_t len = 0, size = 0;
    OK(metrale_model_info(model, &info, &len, &err));
    CHECK(info[0] == '{' && strlen(info) == len && strstr(info, "\"model_type\":\"llama\"") != NULL);
    OK(metrale_model_info(model, &same, NULL, &err));
    CHECK(same == info);
    uint8_t value[16];
    OK(metrale_model_meta(model, "model_type", value, sizeof value, &size, &err));
    CHECK(size == 5 && memcmp(value, "llama", 5) == 0);
    OK(metrale_model_meta(model, "vocab", value, sizeof value, &size, &err));
    CHECK(size == 3 && memcmp(value, "512", 3) == 0);
    size = 99;
    EXPECT(METRALE_NOT_FOUND, metrale_model_meta(model, "no such key", value, sizeof value, &size, &err));
    CHECK(size == 99);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_model_meta(model, NULL, value, sizeof value, &size, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_model_meta(model, "\xff", value, sizeof value, &size, &err));
}

static void options_are_read_with_care(void) {
    metrale_load_options options = {0};
    metrale_model *model = NULL;
    options.struct_size = sizeof options;
    options.flags = METRALE_LOAD_LOW_PRIORITY << 7;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_load(path, &options, &model, &err));
    options.flags = METRALE_LOAD_LOW_PRIORITY | METRALE_LOAD_DETERMINISTIC | METRALE_LOAD_PACKED;
    options.compute = 77;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_load(path, &options, &model, &err));
    options.compute = METRALE_COMPUTE_F32;
    options.kv_type = METRALE_KV_Q8 + 1;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_load(path, &options, &model, &err));
    options.kv_type = METRALE_KV_DEFAULT;
    options.synthetic = "Q9_9";
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_load(path, &options, &model, &err));
    options.synthetic = NULL;
    options.threads = 2;
    options.context = 32;
    CHECK(model == NULL);
    OK(metrale_load(path, &options, &model, &err));
    uint8_t value[8];
    size_t size = 0;
    OK(metrale_model_meta(model, "context", value, sizeof value, &size, &err));
    CHECK(size == 2 && memcmp(value, "32", 2) == 0);
    metrale_free(model);
}

static void sharing(void) {
    metrale_model *model = load_model(path), *second = NULL;
    OK(metrale_model_retain(model, &second, &err));
    CHECK(second != NULL && second != model);
    metrale_free(model);
    metrale_free(model);
    EXPECT(METRALE_INVALID_HANDLE, metrale_model_retain(model, &model, &err));
    facts(second);

    /* A sequence keeps its model alive. */
    metrale_seq *seq = new_seq(second, NULL);
    metrale_free(second);
    const metrale_token bos = 1;
    metrale_token next = -1;
    OK(metrale_prefill(seq, &bos, 1, &err));
    OK(metrale_decode_step(&seq, 1, &next, &err));
    CHECK(next >= 0 && next < 512);
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_new(second, NULL, &seq, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_seq_new((metrale_model *)(void *)seq, NULL, &seq, &err));
    metrale_seq_free(seq);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    probe_and_plan();
    progress_and_cancel();
    options_are_read_with_care();
    metrale_model *model = load_model(path);
    facts(model);
    metrale_free(model);
    sharing();
    return 0;
}
