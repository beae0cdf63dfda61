/* Folders out of parts, looks at sources before a load, and steps counted in bytes. Run with the folder of a checkpoint. */
#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const NAMES[] = {"config.json",           "generation_config.json", "tokenizer.json",
                                    "tokenizer_config.json", "model.safetensors",      "chat_template.jinja"};
enum { MOST = sizeof NAMES / sizeof *NAMES };

static char folder[4096];
static uint8_t *files[MOST];
static size_t sizes[MOST];
static uint64_t asked;

/* A file beside the GGUF given, or nothing. */
static void read_files(const char *model) {
    const char *slash = strrchr(model, '/');
    CHECK(slash != NULL && snprintf(folder, sizeof folder, "%.*s/../models/llama", (int)(slash - model), model) < (int)sizeof folder);
    for (int i = 0; i < MOST; i++) {
        char name[4200];
        snprintf(name, sizeof name, "%s/%s", folder, NAMES[i]);
        FILE *f = fopen(name, "rb");
        if (f == NULL) continue;
        CHECK(fseek(f, 0, SEEK_END) == 0);
        sizes[i] = (size_t)ftell(f);
        rewind(f);
        CHECK((files[i] = malloc(sizes[i] + 1)) != NULL && fread(files[i], 1, sizes[i], f) == sizes[i] && fclose(f) == 0);
    }
    CHECK(files[0] != NULL && files[4] != NULL);
}

static int64_t read_at(void *user, uint64_t offset, void *into, size_t len) {
    int i = *(int *)user;
    if (offset + len > sizes[i]) return -1;
    memcpy(into, files[i] + offset, len);
    asked += len;
    return (int64_t)len;
}

static int indices[MOST] = {0, 1, 2, 3, 4, 5};

/* A folder of all files, each by `kind`: a buffer, a copy, a range of an open file, a function. */
static metrale_source *whole(int kind) {
    metrale_source *source = NULL;
    OK(metrale_source_folder(0, &source, &err));
    for (int i = 0; i < MOST; i++) {
        metrale_source *part = NULL;
        if (files[i] == NULL) continue;
        if (kind == 0) OK(metrale_source_buffer(files[i], sizes[i], 0, &part, &err));
        if (kind == 1) OK(metrale_source_buffer(files[i], sizes[i], METRALE_SOURCE_COPY, &part, &err));
        if (kind == 2) {
            char name[] = "/tmp/metrale-parts-XXXXXX";
            int fd = mkstemp(name);
            CHECK(fd >= 0 && unlink(name) == 0 && pwrite(fd, files[i], sizes[i], 13 + i) == (ssize_t)sizes[i]);
            OK(metrale_source_fd(fd, (uint64_t)(13 + i), sizes[i], 0, &part, &err));
            CHECK(close(fd) == 0);
        }
        if (kind == 3) OK(metrale_source_reader(read_at, &indices[i], sizes[i], 0, &part, &err));
        OK(metrale_source_add(source, NAMES[i], part, &err));
        EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_add(source, NAMES[i], part, &err));
        metrale_source_free(part);
    }
    return source;
}

static metrale_load_options one_thread(void) {
    metrale_load_options options = {0};
    options.struct_size = sizeof options;
    options.threads = 1;
    return options;
}

static const metrale_token prompt[] = {1, 5, 9, 2};

static uint64_t bits_of(metrale_model *model) {
    metrale_seq *seq = new_seq(model, NULL);
    size_t vocab = 0;
    uint64_t hash = 14695981039346656037u;
    OK(metrale_prefill(seq, prompt, 4, &err));
    const float *row = row_of(seq, &vocab);
    for (size_t i = 0; i < vocab * sizeof *row; i++) hash = (hash ^ ((const uint8_t *)row)[i]) * 1099511628211u;
    metrale_seq_free(seq);
    metrale_free(model);
    return hash;
}

static void every_kind(uint64_t expected) {
    for (int kind = 0; kind < 4; kind++) {
        metrale_load_options options = one_thread();
        metrale_source *source = whole(kind);
        metrale_model *model = NULL;
        OK(metrale_load_source(source, &options, &model, &err));
        metrale_source_free(source);
        CHECK(bits_of(model) == expected);
    }
}

/* What is said of a source is what is said of the path; a reader is asked for headers only. */
static void looks(void) {
    metrale_load_options options = one_thread();
    static uint8_t by_path[1 << 16], by_source[1 << 16];
    size_t path_len = 0, len = 0;
    metrale_memory_plan first = {0}, plan = {0};
    first.struct_size = plan.struct_size = sizeof plan;
    OK(metrale_model_probe(folder, by_path, sizeof by_path, &path_len, &err));
    OK(metrale_plan(folder, &options, 3, &first, &err));
    CHECK(first.source == 0 && first.total == first.weights + first.kv + first.state + first.scratch + first.other);
    for (int kind = 0; kind < 4; kind++) {
        uint64_t all = 0;
        for (int i = 0; i < MOST; i++) all += files[i] ? sizes[i] : 0;
        metrale_source *source = whole(kind);
        asked = 0;
        OK(metrale_source_probe(source, by_source, sizeof by_source, &len, &err));
        if (kind == 3) CHECK(asked > 0 && asked <= all);
        EXPECT(METRALE_MORE, metrale_source_probe(source, NULL, 0, &len, &err));
        /* Only the paths of the files differ. */
        const char *a = strstr((char *)by_path, "\"files\""), *b = strstr((char *)by_source, "\"files\"");
        CHECK(a && b && a - (char *)by_path == b - (char *)by_source && memcmp(by_path, by_source, (size_t)(a - (char *)by_path)) == 0);
        OK(metrale_source_plan(source, &options, 3, &plan, &err));
        CHECK(plan.weights == first.weights && plan.kv == first.kv && plan.other == first.other && plan.scratch == first.scratch);
        CHECK(plan.source == (kind == 1 || kind == 3 ? all : 0) && plan.total == first.total + plan.source);
        metrale_source_free(source);
        EXPECT(METRALE_INVALID_HANDLE, metrale_source_plan(source, &options, 3, &plan, &err));
        EXPECT(METRALE_INVALID_HANDLE, metrale_source_probe(source, by_source, sizeof by_source, &len, &err));
    }
}

/* Each step does what it was given, and at most a panel more. */
static void byte_steps(uint64_t expected) {
    const uint64_t budgets[] = {0, 1, 5000, UINT64_MAX};
    for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
        metrale_load_options options = one_thread();
        metrale_source *source = whole(3);
        metrale_loading *loading = NULL;
        metrale_model *model = NULL;
        metrale_load_progress progress = {0};
        progress.struct_size = sizeof progress;
        OK(metrale_load_begin(source, &options, &loading, &err));
        metrale_source_free(source);
        metrale_status status = METRALE_AGAIN;
        uint64_t before = 0, most = 0;
        char phase[16] = "reading";
        int steps = 0;
        while (status == METRALE_AGAIN) {
            status = metrale_load_step_bytes(loading, budgets[b], &progress, &model, NULL);
            CHECK(status == METRALE_AGAIN || status == METRALE_OK);
            if (strcmp(phase, progress.phase) == 0 && progress.done_bytes - before > most) most = progress.done_bytes - before;
            snprintf(phase, sizeof phase, "%s", progress.phase);
            before = progress.done_bytes;
            steps++;
        }
        /* The widest panel of this model, and its longest vector, are far below this. */
        CHECK(budgets[b] == UINT64_MAX || most <= budgets[b] + 16384);
        /* Without a limit each stage, and each program, is one step. */
        if (budgets[b] == UINT64_MAX) CHECK(steps <= 20);
        else CHECK(steps > 20);
        EXPECT(METRALE_INVALID_STATE, metrale_load_step_bytes(loading, 1, &progress, &model, &err));
        metrale_loading_free(loading);
        CHECK(bits_of(model) == expected);
    }
}

static void refusals(void) {
    metrale_source *source = NULL, *part = NULL;
    metrale_model *model = NULL;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_source_folder(1, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_folder(0, NULL, &err));
    OK(metrale_source_folder(0, &source, &err));
    EXPECT(METRALE_NOT_A_MODEL, metrale_load_source(source, NULL, &model, &err));
    OK(metrale_source_buffer(files[0], sizes[0], 0, &part, &err));
    const char *bad[] = {"", "..", "../config.json", "/config.json", "a/../b", "a\\b", "\xff"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_add(source, bad[i], part, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_add(source, NULL, part, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_add(source, "inner", source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_add(part, "config.json", part, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_source_add(source, "config.json", NULL, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_source_add(NULL, "config.json", part, &err));
    OK(metrale_source_add(source, "config.json", part, &err));
    EXPECT(METRALE_NOT_FOUND, metrale_load_source(source, NULL, &model, &err));
    metrale_source_free(part);
    /* Weights cut at each 4 KiB, with everything else there. */
    for (size_t cut = 1; cut < sizes[4]; cut += 4096 * (quick ? 16 : 1)) {
        metrale_source *cut_folder = NULL;
        OK(metrale_source_folder(0, &cut_folder, &err));
        for (int i = 0; i < MOST; i++) {
            if (files[i] == NULL) continue;
            OK(metrale_source_buffer(files[i], i == 4 ? cut : sizes[i], 0, &part, &err));
            OK(metrale_source_add(cut_folder, NAMES[i], part, &err));
            metrale_source_free(part);
        }
        metrale_status status = metrale_load_source(cut_folder, NULL, &model, NULL);
        CHECK(status == METRALE_CORRUPT_FILE || status == METRALE_NOT_A_MODEL);
        metrale_source_free(cut_folder);
    }
    metrale_source_free(source);
    CHECK(model == NULL);
}

int main(int argc, char **argv) {
    read_files(arguments(argc, argv));
    metrale_load_options options = one_thread();
    metrale_model *model = NULL;
    OK(metrale_load(folder, &options, &model, &err));
    uint64_t expected = bits_of(model);
    every_kind(expected);
    looks();
    byte_steps(expected);
    refusals();
    for (int i = 0; i < MOST; i++) free(files[i]);
    return 0;
}
