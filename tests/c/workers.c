/* Whose threads compute: own ones, lent ones that come and go, the host's job system, good and bad. The bits are the same
 * under all of them, nothing hangs, and no thread is left behind. */
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { PROMPT_LEN = 5, STEPS = 6, LENT = 3 };

static const char *path;
static const metrale_token PROMPT[PROMPT_LEN] = {1, 403, 407, 261, 378};
/* What one thread computes: tokens, and the last row. */
static metrale_token expected[STEPS];
static float *row;
static size_t row_len;

static size_t thread_count(void) {
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static void nap(long microseconds) {
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

/* A thread that has ended is listed for a moment longer. */
static void only_threads(size_t count) {
    for (int i = 0; i < 2000 && thread_count() != count; i++) nap(1000);
    CHECK(thread_count() == count);
}

static metrale_runtime *runtime_with(uint32_t workers, uint32_t threads, metrale_parallel_for_fn parallel_for, void *user) {
    metrale_runtime_options options = {.struct_size = sizeof options, .workers = workers, .threads = threads};
    metrale_runtime *runtime = NULL;
    options.parallel_for = parallel_for;
    options.parallel_user = user;
    OK(metrale_runtime_new(&options, &runtime, &err));
    return runtime;
}

static metrale_model *load_in(const metrale_runtime *runtime, uint32_t threads) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = threads, .runtime = runtime};
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    return model;
}

static void generate(metrale_model *model, int check) {
    metrale_seq *seq = new_seq(model, NULL);
    const float *logits = NULL;
    metrale_token got[STEPS];
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    for (int i = 0; i < STEPS; i++) OK(metrale_decode_step(&seq, 1, got + i, &err));
    OK(metrale_seq_logits(seq, &logits, &row_len, &err));
    if (check) {
        CHECK(memcmp(got, expected, sizeof got) == 0);
        CHECK(memcmp(logits, row, row_len * sizeof *row) == 0);
    } else {
        memcpy(expected, got, sizeof got);
        row = malloc(row_len * sizeof *row);
        CHECK(row != NULL);
        memcpy(row, logits, row_len * sizeof *row);
    }
    metrale_seq_free(seq);
}

static void devices(void) {
    metrale_device device = {.struct_size = sizeof device};
    CHECK(metrale_device_count() == 1);
    OK(metrale_device_info(0, &device, &err));
    CHECK(device.kind == METRALE_DEVICE_CPU && device.threads >= 1 && strlen(device.name) > 0);
    CHECK(device.memory_total >= device.memory_free && device.memory_free > 0);
    CHECK(strcmp(device.kernels, "scalar") == 0 || strstr(device.instruction_sets, "avx2") != NULL);
    const char *asked = getenv("METRALE_SIMD");
    CHECK(asked == NULL || strcmp(asked, "scalar") != 0 || strcmp(device.kernels, "scalar") == 0);
    EXPECT(METRALE_NOT_FOUND, metrale_device_info(1, &device, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_device_info(0, NULL, &err));
}

/* Lent threads. Each lends itself again and again until it is told that this is the end. */
static metrale_runtime *lent_to;
static atomic_int homecomings, ended;

static void *lend(void *unused) {
    (void)unused;
    for (;;) {
        metrale_status status = metrale_runtime_run_worker(lent_to, NULL);
        atomic_fetch_add(&homecomings, 1);
        if (status == METRALE_OK) continue;
        CHECK(status == METRALE_DONE || status == METRALE_INVALID_HANDLE);
        atomic_fetch_add(&ended, 1);
        return NULL;
    }
}

static void start_lending(pthread_t *threads) {
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 64 * 1024) == 0);
    for (int i = 0; i < LENT; i++) CHECK(pthread_create(&threads[i], &attributes, lend, NULL) == 0);
    pthread_attr_destroy(&attributes);
}

static atomic_int stop;

static void *release_always(void *unused) {
    (void)unused;
    while (!atomic_load(&stop)) {
        OK(metrale_runtime_release_workers(lent_to, &err));
        nap(200);
    }
    return NULL;
}

static void lent_threads(void) {
    pthread_t threads[LENT], releaser;
    size_t before = thread_count();
    lent_to = runtime_with(METRALE_WORKERS_LENT, 4, NULL, NULL);
    /* Nobody is lent yet, and nobody is needed. */
    metrale_model *model = load_in(lent_to, 0);
    CHECK(thread_count() == before);
    generate(model, 1);
    /* They come while steps are in flight, and are called away in the middle of them. */
    start_lending(threads);
    for (int i = 0; i < (quick ? 1 : 30); i++) generate(model, 1);
    CHECK(pthread_create(&releaser, NULL, release_always, NULL) == 0);
    for (int i = 0; i < (quick ? 1 : 60) || atomic_load(&homecomings) < LENT; i++) {
        generate(model, 1);
        if (i % 10 == 0) metrale_free(load_in(lent_to, 2));
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(releaser, NULL) == 0);
    /* The end, while they wait or work; the model lives on without them. */
    metrale_runtime_free(lent_to);
    for (int i = 0; i < LENT; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(atomic_load(&ended) == LENT);
    generate(model, 1);
    metrale_free(model);
    EXPECT(METRALE_INVALID_HANDLE, metrale_runtime_run_worker(lent_to, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_runtime_release_workers(lent_to, &err));
    only_threads(before);
}

/* A host's job system. */
struct jobs {
    int backwards, threads;
    size_t skip, twice, calls;
    metrale_seq *nested;
    metrale_status found;
    metrale_body_fn body;
    void *arg;
};

struct job {
    metrale_body_fn body;
    void *arg;
    size_t index;
};

static void *run_job(void *user) {
    struct job *job = user;
    job->body(job->arg, job->index);
    return NULL;
}

static void parallel_for(void *user, size_t count, metrale_body_fn body, void *arg) {
    struct jobs *jobs = user;
    pthread_t threads[16];
    struct job job[16];
    CHECK(count > 0 && count <= 16);
    jobs->calls++;
    /* What is kept from an earlier time does nothing. */
    if (jobs->body) jobs->body(jobs->arg, 0);
    jobs->body = body;
    jobs->arg = arg;
    if (jobs->nested) jobs->found = metrale_prefill(jobs->nested, PROMPT, 1, NULL);
    for (size_t i = 0; i < count; i++) {
        size_t index = jobs->backwards ? count - 1 - i : i;
        job[i] = (struct job){body, arg, index};
        if (jobs->threads) CHECK(pthread_create(&threads[i], NULL, run_job, &job[i]) == 0);
        else if (index + 1 != jobs->skip) body(arg, index);
        if (index + 1 == jobs->twice) body(arg, index);
    }
    for (size_t i = 0; jobs->threads && i < count; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void host_jobs(void) {
    struct jobs kinds[] = {{.backwards = 0}, {.backwards = 1}, {.threads = 1}, {.threads = 1, .backwards = 1}};
    size_t before = thread_count();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        metrale_runtime *runtime = runtime_with(METRALE_WORKERS_HOST, 3, parallel_for, &kinds[i]);
        metrale_model *model = load_in(runtime, 0);
        generate(model, 1);
        CHECK(kinds[i].calls > STEPS);
        CHECK(thread_count() == before || kinds[i].threads);
        EXPECT(METRALE_INVALID_STATE, metrale_runtime_run_worker(runtime, &err));
        OK(metrale_runtime_release_workers(runtime, &err));
        metrale_runtime_free(runtime);
        generate(model, 1);
        metrale_free(model);
    }
    only_threads(before);
}

static void bad_hosts(void) {
    struct jobs jobs = {.backwards = 0};
    metrale_runtime *runtime = runtime_with(METRALE_WORKERS_HOST, 3, parallel_for, &jobs);
    metrale_model *model = load_in(runtime, 0);
    metrale_seq *seq = new_seq(model, NULL), *other = new_seq(model, NULL);
    OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
    for (size_t body = 1; body <= 3; body++) {
        for (int twice = 0; twice < 2; twice++) {
            metrale_sequence_info info = {.struct_size = sizeof info};
            metrale_error *error = NULL;
            metrale_token token = -7;
            jobs.skip = twice ? 0 : body;
            jobs.twice = twice ? body : 0;
            CHECK(metrale_decode_step(&seq, 1, &token, &error) == METRALE_INVALID_ARGUMENT);
            CHECK(token == -7 && strcmp(metrale_error_name(error), "parallel_for") == 0);
            metrale_error_free(error);
            OK(metrale_seq_info(seq, &info, &err));
            CHECK(info.length == PROMPT_LEN);
        }
    }
    jobs.skip = jobs.twice = 0;
    /* Work inside of work, on the same thread, would wait for itself. */
    jobs.nested = other;
    generate(model, 1);
    CHECK(jobs.found == METRALE_BUSY);
    jobs.nested = NULL;
    generate(model, 1);
    metrale_seq_free(seq);
    metrale_seq_free(other);
    metrale_free(model);
    metrale_runtime_free(runtime);

    metrale_runtime_options options = {.struct_size = sizeof options, .parallel_for = parallel_for};
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(&options, &runtime, &err));
    options.workers = 9;
    options.parallel_for = NULL;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_runtime_new(&options, &runtime, &err));
    options.workers = METRALE_WORKERS_HOST;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_runtime_new(&options, &runtime, &err));
    options.workers = METRALE_WORKERS_OWN;
    options.threads = 100000;
    EXPECT(METRALE_TOO_LARGE, metrale_runtime_new(&options, &runtime, &err));
}

/* Own threads come with a model and go with it; those of a runtime serve all its models. */
static void own_threads(void) {
    size_t before = thread_count();
    metrale_device device = {.struct_size = sizeof device};
    OK(metrale_device_info(0, &device, &err));
    metrale_model *model = load_in(NULL, 4 * device.threads);
    /* More than there are processors would only be in the way. */
    CHECK(thread_count() == before + device.threads - 1);
    generate(model, 1);
    metrale_free(model);
    only_threads(before);
    metrale_runtime *runtime = runtime_with(METRALE_WORKERS_OWN, 0, NULL, NULL);
    CHECK(thread_count() == before);
    metrale_model *one = load_in(runtime, 0), *two = load_in(runtime, 2);
    CHECK(thread_count() == before + device.threads - 1);
    generate(one, 1);
    generate(two, 1);
    metrale_runtime_free(runtime);
    metrale_free(one);
    generate(two, 1);
    metrale_free(two);
    only_threads(before);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How long a step takes when nobody disturbs it: a tenth of the steps are faster. For five seconds at most. */
static double step_time(metrale_model *model) {
    enum { MOST = 240, EACH = 24 };
    static double took[MOST];
    int count = 0;
    double end = seconds() + 5;
    while (count < MOST && (count < EACH || seconds() < end)) {
        metrale_seq *seq = new_seq(model, NULL);
        OK(metrale_prefill(seq, PROMPT, PROMPT_LEN, &err));
        for (int i = 0; i < EACH; i++) {
            metrale_token token;
            double start = seconds();
            CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
            took[count++] = seconds() - start;
        }
        metrale_seq_free(seq);
    }
    qsort(took, (size_t)count, sizeof *took, by_size);
    return took[count / 10];
}

/* With any number of threads, a step takes at most twice as long as on one. On a busy machine it is tried again. */
static void within_twice_of_serial(const char *where) {
    metrale_device device = {.struct_size = sizeof device};
    OK(metrale_device_info(0, &device, &err));
    const uint32_t counts[] = {device.threads, 2 * device.threads, 4 * device.threads, 64};
    metrale_model *serial = load_in(NULL, 1);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        metrale_model *model = load_in(NULL, counts[i]);
        double one = 0, many = 0;
        for (int attempt = 0; attempt < 6; attempt++) {
            one = step_time(serial);
            many = step_time(model);
            if (many <= 2 * one) break;
        }
        if (many > 2 * one) {
            fprintf(stderr, "%u threads %s: %.0f us, one thread: %.0f us\n", counts[i], where, many * 1e6, one * 1e6);
            exit(1);
        }
        metrale_free(model);
    }
    metrale_free(serial);
}

static void one_processor(void) {
#ifdef CPU_SET
    cpu_set_t all, one;
    int processor = 0;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    while (!CPU_ISSET(processor, &all)) processor++;
    CPU_ZERO(&one);
    CPU_SET(processor, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    metrale_device device = {.struct_size = sizeof device};
    OK(metrale_device_info(0, &device, &err));
    CHECK(device.threads == 1);
    own_threads();
    if (!quick) within_twice_of_serial("on one processor");
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
#endif
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    CHECK(thread_count() == 1);
    metrale_model *model = load_model(path);
    CHECK(thread_count() == 1);
    generate(model, 0);
    metrale_free(model);
    devices();
    lent_threads();
    host_jobs();
    bad_hosts();
    own_threads();
    if (!quick) within_twice_of_serial("on all processors");
    one_processor();
    free(row);
    return 0;
}
