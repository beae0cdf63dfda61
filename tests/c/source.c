/* Sources and stepped loads: the same model wherever its bytes come from, and a load that can end at any point. */
#include "check.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *path;
static uint8_t *file;
static size_t size;
static float *expected;
static size_t vocab;

static const metrale_token prompt[] = {1, 403, 407, 261};

static void read_file(void) {
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL && fseek(f, 0, SEEK_END) == 0);
    size = (size_t)ftell(f);
    rewind(f);
    file = malloc(size);
    CHECK(file != NULL && fread(file, 1, size, f) == size && fclose(f) == 0);
}

/* The row after the prompt; `row` has room for it. */
static void compute(metrale_model *model, float **row) {
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_prefill(seq, prompt, 4, &err));
    const float *found = row_of(seq, &vocab);
    *row = malloc(vocab * sizeof **row);
    CHECK(*row != NULL);
    memcpy(*row, found, vocab * sizeof **row);
    metrale_seq_free(seq);
}

/* The model computes what the one loaded by path does, bit for bit. Frees it. */
static void same(metrale_model *model) {
    CHECK(model != NULL);
    float *row = NULL;
    compute(model, &row);
    CHECK(memcmp(row, expected, vocab * sizeof *row) == 0);
    free(row);
    metrale_free(model);
}

static metrale_load_options one_thread(void) {
    metrale_load_options options = {0};
    options.struct_size = sizeof options;
    options.threads = 1;
    return options;
}

/* Loads, frees the source, then compares. */
static void loads_the_same(metrale_source *source) {
    metrale_load_options options = one_thread();
    metrale_model *model = NULL;
    OK(metrale_load_source(source, &options, &model, &err));
    metrale_source_free(source);
    same(model);
}

/* A reader over `file` that notes its thread and fails where it is told to. */
struct reader {
    uint64_t fail_at;
    int64_t result;
    uint64_t calls, next;
    int astray;
    pthread_t thread;
};

static int64_t read_at(void *user, uint64_t offset, void *into, size_t len) {
    struct reader *r = user;
    r->calls++;
    if (!pthread_equal(r->thread, pthread_self()) || offset != r->next || len == 0 || offset + len > size) r->astray = 1;
    if (offset + len > r->fail_at) return r->result;
    memcpy(into, file + offset, len);
    r->next = offset + len;
    return (int64_t)len;
}

static struct reader whole(void) {
    struct reader r = {0};
    r.fail_at = UINT64_MAX;
    r.thread = pthread_self();
    return r;
}

static void paths_and_readers(void) {
    metrale_source *source = NULL;
    for (uint64_t flags = 0; flags <= METRALE_SOURCE_READ; flags++) {
        OK(metrale_source_path(path, flags, &source, &err));
        loads_the_same(source);
    }
    struct reader r = whole();
    OK(metrale_source_reader(read_at, &r, size, 0, &source, &err));
    CHECK(r.calls == 0);
    loads_the_same(source);
    CHECK(r.calls > 0 && r.next == size && !r.astray);
}

/* The model at every offset of a container, as a buffer and as a file. */
static void any_offset(void) {
    char name[] = "/tmp/metrale-source-XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && unlink(name) == 0);
    uint8_t *container = malloc(size + 8192);
    CHECK(container != NULL);
    uint64_t step = quick ? 31 : 1;
    for (uint64_t i = 0; i <= 64; i += step) {
        uint64_t offset = i == 64 ? 4096 : i;
        memset(container, 0xa5, size + 8192);
        memcpy(container + offset, file, size);
        metrale_source *source = NULL;
        OK(metrale_source_buffer(container + offset, size, 0, &source, &err));
        loads_the_same(source);
        CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, container, size + 8192, 0) == (ssize_t)(size + 8192));
        CHECK(lseek(fd, 77, SEEK_SET) == 77);
        OK(metrale_source_fd(fd, offset, size, 0, &source, &err));
        loads_the_same(source);
        if (i % 8 == 1 || i == 64) {
            /* Ours may close and change, and the copy may go. */
            int second = dup(fd);
            CHECK(second >= 0);
            OK(metrale_source_fd(second, offset, size, METRALE_SOURCE_READ, &source, &err));
            CHECK(close(second) == 0);
            loads_the_same(source);
            OK(metrale_source_buffer(container + offset, size, METRALE_SOURCE_COPY, &source, &err));
            memset(container, 0, size + 8192);
            loads_the_same(source);
        }
        CHECK(lseek(fd, 0, SEEK_CUR) == 77);
    }
    /* Without a length: all that is left. */
    CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, file, size, 13) == (ssize_t)size);
    metrale_source *source = NULL;
    OK(metrale_source_fd(fd, 13, 0, 0, &source, &err));
    loads_the_same(source);
    CHECK(close(fd) == 0);
    free(container);
}

static void refusals(void) {
    metrale_source *source = NULL;
    metrale_loading *loading = NULL;
    metrale_model *model = NULL;
    int fd = open(path, O_RDONLY), ends[2];
    CHECK(fd >= 0 && pipe(ends) == 0);
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_path(NULL, 0, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_path(path, 0, NULL, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_source_path(path, METRALE_SOURCE_COPY, &source, &err));
    EXPECT(METRALE_NOT_FOUND, metrale_source_path("/no/such/file", METRALE_SOURCE_READ, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_buffer(NULL, 5, 0, &source, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_source_buffer(file, size, METRALE_SOURCE_READ, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_reader(NULL, NULL, 5, 0, &source, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_source_reader(read_at, NULL, 5, 1, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_fd(-1, 0, 0, 0, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_fd(-7, 0, 0, 0, &source, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_source_fd(1 << 20, 0, 0, 0, &source, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_source_fd(fd, 0, 0, METRALE_SOURCE_COPY, &source, &err));
    EXPECT(METRALE_CORRUPT_FILE, metrale_source_fd(fd, 0, size + 1, 0, &source, &err));
    EXPECT(METRALE_CORRUPT_FILE, metrale_source_fd(fd, size + 1, 0, 0, &source, &err));
    EXPECT(METRALE_CORRUPT_FILE, metrale_source_fd(fd, 1, UINT64_MAX, 0, &source, &err));
    EXPECT(METRALE_CORRUPT_FILE, metrale_source_fd(fd, UINT64_MAX, UINT64_MAX, 0, &source, &err));
    EXPECT(METRALE_NOT_A_MODEL, metrale_source_fd(ends[0], 0, 0, 0, &source, &err));
    CHECK(source == NULL && close(ends[0]) == 0 && close(ends[1]) == 0);

    EXPECT(METRALE_INVALID_HANDLE, metrale_load_source(NULL, NULL, &model, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_load_begin(NULL, NULL, &loading, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_load_step(NULL, 0, NULL, &model, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_load_cancel(NULL, &err));
    metrale_loading_free(NULL);
    metrale_source_free(NULL);

    /* Nothing, something else, and a model cut short: a status that says where. */
    OK(metrale_source_buffer(NULL, 0, 0, &source, &err));
    EXPECT(METRALE_NOT_A_MODEL, metrale_load_source(source, NULL, &model, &err));
    metrale_source_free(source);
    EXPECT(METRALE_INVALID_HANDLE, metrale_load_source(source, NULL, &model, &err));
    OK(metrale_source_fd(fd, size, 0, 0, &source, &err));
    EXPECT(METRALE_NOT_A_MODEL, metrale_load_source(source, NULL, &model, &err));
    metrale_source_free(source);
    OK(metrale_source_fd(fd, 1, 0, 0, &source, &err));
    EXPECT(METRALE_NOT_A_MODEL, metrale_load_source(source, NULL, &model, &err));
    metrale_source_free(source);
    for (size_t cut = 65536; cut < size; cut += 65536 * (quick ? 8 : 1)) {
        OK(metrale_source_buffer(file, cut, 0, &source, &err));
        EXPECT(METRALE_CORRUPT_FILE, metrale_load_source(source, NULL, &model, &err));
        metrale_source_free(source);
    }
    CHECK(model == NULL && close(fd) == 0);
}

static void readers_that_fail(void) {
    const int64_t results[] = {-5, 0, 3, INT64_MIN, INT64_MAX};
    metrale_load_options options = one_thread();
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        struct reader r = whole();
        r.fail_at = i == 0 ? 0 : size - 1;
        r.result = results[i];
        metrale_source *source = NULL;
        metrale_model *model = NULL;
        metrale_loading *loading = NULL;
        metrale_error *err = NULL;
        uint64_t offset = UINT64_MAX;
        OK(metrale_source_reader(read_at, &r, size, 0, &source, &err));
        CHECK(metrale_load_source(source, &options, &model, &err) == METRALE_IO);
        CHECK(metrale_error_offset(err, &offset) && offset == r.next && strstr(metrale_error_message(err), "offset") != NULL);
        metrale_error_free(err);

        /* The same error from every step after it. */
        r.next = 0;
        OK(metrale_load_begin(source, &options, &loading, &err));
        metrale_source_free(source);
        EXPECT(METRALE_IO, metrale_load_step(loading, UINT64_MAX, NULL, &model, &err));
        uint64_t calls = r.calls;
        EXPECT(METRALE_IO, metrale_load_step(loading, 0, NULL, &model, &err));
        CHECK(r.calls == calls && model == NULL && !r.astray);
        OK(metrale_load_cancel(loading, &err));
        metrale_loading_free(loading);
        EXPECT(METRALE_INVALID_HANDLE, metrale_load_step(loading, 0, NULL, &model, &err));
    }
}

/* Phases that a step has ended in, in their order. */
static const char *const PHASES[] = {"reading", "tokenizer", "weights", "done"};
static int phases;

static int phase_of(const char *name) {
    for (int i = 0; i < 4; i++)
        if (strcmp(PHASES[i], name) == 0) return i;
    fprintf(stderr, "no phase is called %s\n", name);
    exit(1);
}

/* Steps until the end or until `most` steps; the number of steps that returned AGAIN. */
static int drive(metrale_loading *loading, int most, metrale_model **model) {
    metrale_load_progress progress = {0};
    progress.struct_size = sizeof progress;
    char phase[16] = "reading";
    uint64_t done = 0;
    for (int steps = 0; steps < most; steps++) {
        metrale_error *err = NULL;
        metrale_status status = metrale_load_step(loading, 0, &progress, model, &err);
        CHECK(err == NULL && (status == METRALE_AGAIN || status == METRALE_OK));
        CHECK(progress.total_bytes == 0 || progress.done_bytes <= progress.total_bytes);
        if (strcmp(phase, progress.phase) == 0) CHECK(progress.done_bytes >= done);
        CHECK(phase_of(progress.phase) >= phase_of(phase));
        phases |= 1 << phase_of(progress.phase);
        CHECK(strlen(progress.phase) < sizeof phase);
        strcpy(phase, progress.phase);
        done = progress.done_bytes;
        if (status == METRALE_OK) {
            CHECK(strcmp(phase, "done") == 0 && done == progress.total_bytes);
            return steps;
        }
    }
    return most;
}

static size_t live(void) {
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

/* Cancelled, or simply freed, after every number of steps: no model, and nothing stays. */
static void every_end(metrale_source *source) {
    metrale_load_options options = one_thread();
    metrale_loading *loading = NULL;
    metrale_model *model = NULL;
    OK(metrale_load_begin(source, &options, &loading, &err));
    phases = 0;
    int steps = drive(loading, 1 << 20, &model);
    CHECK(steps > 3 && (phases & 14) == 14);
    EXPECT(METRALE_INVALID_STATE, metrale_load_step(loading, 0, NULL, &model, &err));
    EXPECT(METRALE_DONE, metrale_load_cancel(loading, &err));
    metrale_loading_free(loading);
    same(model);
    size_t baseline = 0;
    for (int stop = 0; stop <= steps; stop += quick ? steps / 3 : 1) {
        for (int cancel = 0; cancel < 2; cancel++) {
            model = NULL;
            OK(metrale_load_begin(source, &options, &loading, &err));
            /* The tokenizer takes as many steps as time lets it: the end may come sooner than the first time. */
            if (drive(loading, stop, &model) < stop || model != NULL) {
                CHECK(model != NULL && stop + 40 > steps / 2);
                metrale_loading_free(loading);
                metrale_free(model);
                continue;
            }
            if (cancel) {
                OK(metrale_load_cancel(loading, &err));
                OK(metrale_load_cancel(loading, &err));
                size_t before = live();
                EXPECT(METRALE_CANCELLED, metrale_load_step(loading, UINT64_MAX, NULL, &model, &err));
                CHECK(model == NULL && live() <= before + 4096);
            }
            metrale_loading_free(loading);
            metrale_loading_free(loading);
            if (baseline == 0) baseline = live();
            if (!quick && live() > baseline + 4096) {
                fprintf(stderr, "stopped after %d of %d steps: %zu bytes live, %zu at first\n", stop, steps, live(), baseline);
                exit(1);
            }
        }
    }
}

/* What the tokenizer is made on is no thread that a signal of the host's could land on, and it rests while nobody steps. */
static void the_tokenizer_rests(metrale_source *source) {
    metrale_load_options options = one_thread();
    metrale_loading *loading = NULL;
    metrale_model *model = NULL;
    metrale_load_progress progress = {.struct_size = sizeof progress};
    OK(metrale_load_begin(source, &options, &loading, &err));
    int met = 0;
    sigset_t mine, before;
    sigemptyset(&mine);
    sigaddset(&mine, SIGUSR1);
    while (model == NULL) {
        CHECK(metrale_load_step(loading, 0, &progress, &model, NULL) >= METRALE_OK);
        if (model != NULL || strcmp(progress.phase, "tokenizer") != 0) continue;
        /* Its default action ends the process, wherever it is not blocked. */
        CHECK(pthread_sigmask(SIG_BLOCK, &mine, &before) == 0);
        CHECK(kill(getpid(), SIGUSR1) == 0);
        CHECK(sigtimedwait(&mine, NULL, &(struct timespec){.tv_sec = 10}) == SIGUSR1);
        CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
        met++;
    }
    CHECK(met > 0);
    metrale_loading_free(loading);
    same(model);
}

static void stepped(void) {
    metrale_source *source = NULL;
    struct reader r = whole();
    OK(metrale_source_buffer(file, size, 0, &source, &err));
    every_end(source);
    the_tokenizer_rests(source);
    metrale_source_free(source);

    /* Two loads of one source, in turns, are two models; a step in one piece is a third. */
    metrale_load_options options = one_thread();
    metrale_loading *loads[3] = {NULL};
    metrale_model *models[3] = {NULL};
    OK(metrale_source_path(path, METRALE_SOURCE_READ, &source, &err));
    for (int i = 0; i < 3; i++) OK(metrale_load_begin(source, &options, &loads[i], &err));
    metrale_source_free(source);
    while (models[0] == NULL || models[1] == NULL)
        for (int i = 0; i < 2; i++)
            if (models[i] == NULL) drive(loads[i], 1, &models[i]);
    OK(metrale_load_step(loads[2], UINT64_MAX, NULL, &models[2], &err));
    for (int i = 0; i < 3; i++) {
        metrale_loading_free(loads[i]);
        same(models[i]);
    }

    /* The host's function is called by steps only. */
    OK(metrale_source_reader(read_at, &r, size, 0, &source, &err));
    OK(metrale_load_begin(source, &options, &loads[0], &err));
    CHECK(r.calls == 0);
    CHECK(drive(loads[0], 1, &models[0]) == 1 && r.calls == 1);
    metrale_loading_free(loads[0]);
    metrale_source_free(source);
}

/* A callback that cancels, or frees, its own load at a certain call, and tries to step it. */
struct inside {
    metrale_loading *loading;
    int calls, stop_at, how;
};

static int32_t from_inside(void *user, uint64_t done, uint64_t total, const char *phase) {
    struct inside *in = user;
    (void)done, (void)total, (void)phase;
    metrale_model *model = NULL;
    EXPECT(METRALE_BUSY, metrale_load_step(in->loading, 0, NULL, &model, &err));
    if (++in->calls != in->stop_at) return 0;
    if (in->how == 0) return 1;
    if (in->how == 1) OK(metrale_load_cancel(in->loading, &err));
    if (in->how == 2) metrale_loading_free(in->loading);
    return 0;
}

static void ends_from_inside(void) {
    metrale_source *source = NULL;
    OK(metrale_source_buffer(file, size, 0, &source, &err));
    metrale_load_options options = one_thread();
    options.progress = from_inside;
    struct inside in = {0};
    options.user = &in;
    metrale_model *model = NULL;
    OK(metrale_load_begin(source, &options, &in.loading, &err));
    OK(metrale_load_step(in.loading, UINT64_MAX, NULL, &model, &err));
    metrale_loading_free(in.loading);
    same(model);
    int calls = in.calls;
    for (int how = 0; how < 3; how++) {
        /* The first call, and the last, which comes when all is done. */
        for (int stop = 1; stop <= calls; stop += calls - 1) {
            memset(&in, 0, sizeof in);
            in.stop_at = stop;
            in.how = how;
            model = NULL;
            OK(metrale_load_begin(source, &options, &in.loading, &err));
            EXPECT(METRALE_CANCELLED, metrale_load_step(in.loading, UINT64_MAX, NULL, &model, &err));
            CHECK(model == NULL && in.calls == stop);
            metrale_loading_free(in.loading);
        }
    }
    metrale_source_free(source);
}

static void *canceller(void *loading) {
    usleep((useconds_t)(rand() % 30000));
    metrale_status status = metrale_load_cancel(loading, NULL);
    CHECK(status == METRALE_OK || status == METRALE_DONE);
    return (void *)(intptr_t)status;
}

/* A cancel from another thread and a load that ends: one of them wins, and both agree which. */
static void races(void) {
    metrale_source *source = NULL;
    OK(metrale_source_buffer(file, size, 0, &source, &err));
    metrale_load_options options = one_thread();
    srand(7);
    for (int round = 0; round < (quick ? 3 : 40); round++) {
        metrale_loading *loading = NULL;
        metrale_model *model = NULL;
        pthread_t thread;
        void *cancelled = NULL;
        OK(metrale_load_begin(source, &options, &loading, &err));
        CHECK(pthread_create(&thread, NULL, canceller, loading) == 0);
        metrale_status status = METRALE_AGAIN;
        while (status == METRALE_AGAIN) status = metrale_load_step(loading, 1000000, NULL, &model, NULL);
        CHECK(pthread_join(thread, &cancelled) == 0);
        metrale_loading_free(loading);
        if ((metrale_status)(intptr_t)cancelled == METRALE_DONE) {
            CHECK(status == METRALE_OK);
            same(model);
        } else {
            CHECK(status == METRALE_CANCELLED && model == NULL);
        }
    }
    metrale_source_free(source);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    read_file();
    metrale_model *model = load_model(path);
    compute(model, &expected);
    metrale_free(model);
    paths_and_readers();
    any_offset();
    refusals();
    readers_that_fail();
    stepped();
    ends_from_inside();
    races();
    free(expected);
    free(file);
    return 0;
}
